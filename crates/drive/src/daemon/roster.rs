//! Who runs, found out by polling: who has come and is big enough to be managed, who went, who grew.
//!
//! The list of processes costs next to nothing, and only those are looked at whose turn it is: a process that has just
//! come at every poll for a few seconds, since a virtual machine is small when it starts, and longer and longer ones
//! afterwards. One that is managed is looked at every other moment while it grows. A number that was given to another process between two polls is noticed when its turn comes.

use super::Settings;
use pagefold_host::{Host, Process as Handle, observe, parse};
use pagefold_model::daemon::{Arrival, Event};
use pagefold_model::doctor::{Tuner, USER_HZ, tuner};
use pagefold_model::process::Process;
use pagefold_model::{Bytes, Pid, ProcessId, Reading};
use std::collections::BTreeMap;
use std::time::Duration;

/// The longest pause between two looks at a process that is not managed.
const RAREST: Duration = Duration::from_secs(30);

/// Between two looks at the memory of one that is, while it does not grow.
const MEMORY: Duration = Duration::from_secs(2);

/// Growth between two looks with which it fills.
const GROWS: Bytes = Bytes(1 << 20);

/// Between two looks at who it is: it may have become another program.
const IDENTITY: Duration = Duration::from_secs(60);

/// How long somebody has not been there for long: what it does is followed.
const YOUNG: Duration = Duration::from_secs(60);

/// The first pause.
const FIRST: Duration = Duration::from_millis(200);

struct Known {
    process: ProcessId,
    kernel_thread: bool,
    pause: Duration,
    next: Duration,
    /// Who it is, and when that is looked at again, if it is managed.
    who: Option<(Process, Duration)>,
    resident: Bytes,
    came: Duration,
    tuner: Option<Tuner>,
}

/// The processes of a host.
pub(super) struct Roster {
    known: BTreeMap<Pid, Known>,
    own: Pid,
}

/// What a poll found.
#[derive(Default)]
pub(super) struct Polled {
    pub events: Vec<Event>,
    pub resident: Vec<(ProcessId, Bytes)>,
    pub ran: Vec<(ProcessId, Duration)>,
}

impl Roster {
    pub fn new() -> Self {
        Self { known: BTreeMap::new(), own: Pid(std::process::id()) }
    }

    /// Who is managed.
    pub fn members(&self) -> impl Iterator<Item = &Process> {
        self.known.values().filter_map(|known| Some(&known.who.as_ref()?.0))
    }

    /// A program that writes KSM's settings again and again.
    pub fn tuner(&self) -> Option<Tuner> {
        self.known.values().find_map(|known| known.tuner)
    }

    /// Whether anybody has come so lately that it may still fill.
    pub fn is_young(&self) -> bool {
        self.known.values().any(|known| known.who.is_none() && !known.kernel_thread && known.pause < FIRST * 16)
    }

    /// Whether anybody who is managed has grown so lately that it may still fill.
    pub fn grows(&self) -> bool {
        self.known.values().any(|known| known.who.is_some() && known.pause < MEMORY)
    }

    /// Everybody is to be judged anew.
    pub fn forget(&mut self) {
        for known in self.known.values_mut() {
            (known.pause, known.next) = (FIRST, Duration::ZERO);
            if let Some((_, again)) = &mut known.who {
                *again = Duration::ZERO;
            }
        }
    }

    /// See who came, went and grew.
    pub fn poll(&mut self, host: &dyn Host, now: Duration, settings: &Settings) -> Reading<Polled> {
        let pids = host.pids()?;
        let mut polled = Polled::default();
        self.known.retain(|pid, known| {
            let there = pids.binary_search(pid).is_ok();
            if !there && known.who.is_some() {
                polled.events.push(Event::Went(known.process));
            }
            there
        });
        let own = self.own;
        for pid in pids.into_iter().filter(|pid| *pid != own) {
            let turn = self.known.get(&pid).is_none_or(|known| known.next <= now && !known.kernel_thread);
            if turn && let Ok(handle) = host.open(pid) {
                self.look(host, &*handle, now, settings, &mut polled);
            }
        }
        Ok(polled)
    }

    fn look(&mut self, host: &dyn Host, handle: &dyn Handle, now: Duration, settings: &Settings, polled: &mut Polled) {
        let process = handle.id();
        if let Some(other) = self.known.get(&process.pid).filter(|known| known.process != process) {
            if other.who.is_some() {
                polled.events.push(Event::Went(other.process));
            }
            self.known.remove(&process.pid);
        }
        let known = self.known.entry(process.pid).or_insert_with(|| {
            let stat = handle.read("stat").and_then(|bytes| parse::stat(&bytes));
            let kernel_thread = stat.as_ref().is_ok_and(|stat| stat.flags & parse::PF_KTHREAD != 0);
            let comm = stat.map(|stat| stat.comm).unwrap_or_default();
            let arguments = handle.read("cmdline").map(|bytes| parse::arguments(&bytes)).unwrap_or_default();
            let tuner = tuner(&comm, &arguments).filter(|tuner| tuner.writes_rate() && !kernel_thread);
            Known {
                process,
                kernel_thread,
                pause: FIRST,
                next: now,
                who: None,
                resident: Bytes::ZERO,
                came: now,
                tuner,
            }
        });
        if known.kernel_thread {
            return;
        }
        let Ok(resident) = resident(host, handle) else { return };
        let managed = known.who.is_some();
        if managed {
            polled.resident.push((process, resident));
        }
        let young = managed && now < known.came + YOUNG;
        if young && let Ok(ran) = cpu_time(handle) {
            polled.ran.push((process, ran));
        }
        let grows = resident.saturating_sub(known.resident) >= GROWS;
        known.resident = resident;
        known.pause = match managed {
            true if grows || young => FIRST,
            true => (known.pause * 2).min(MEMORY),
            false => (known.pause * 2).min(RAREST),
        };
        known.next = now + known.pause;
        let due = known.who.as_ref().is_none_or(|(_, again)| now >= *again);
        if !due || !managed && resident < settings.min_resident {
            return;
        }
        let Ok(who) = observe::process(handle) else { return };
        if settings.only.as_ref().is_some_and(|only| !only.has(&who)) {
            polled.events.extend(known.who.take().map(|_| Event::Went(process)));
            return;
        }
        let same = |(before, again): &(Process, Duration)| {
            (&before.comm, &before.arguments) == (&who.comm, &who.arguments) && !again.is_zero()
        };
        if !known.who.as_ref().is_some_and(same) {
            polled.events.push(Event::Came(arrival(&who, resident, settings)));
        }
        known.who = Some((who, now + IDENTITY));
    }
}

fn arrival(who: &Process, resident: Bytes, settings: &Settings) -> Arrival {
    let memory = who.identity.vm.as_ref().and_then(|vm| vm.memory);
    let size = memory.map(|bytes| format!(" {bytes}")).unwrap_or_default();
    Arrival {
        process: who.id,
        domain: settings.domains.domain(who),
        likeness: format!("{}{size}", who.comm),
        excluded: settings.exclusions.reason(who),
        resident,
    }
}

/// CPU time of all threads, in ticks.
fn cpu_time(handle: &dyn Handle) -> Reading<Duration> {
    let stat = parse::stat(&handle.read("stat")?)?;
    Ok(Duration::from_secs_f64(stat.utime.saturating_add(stat.stime) as f64 / USER_HZ))
}

/// Resident memory: the second number of `statm`, else the sum over the regions.
pub(super) fn resident(host: &dyn Host, handle: &dyn Handle) -> Reading<Bytes> {
    let pages = handle.read("statm").and_then(|statm| {
        let word = statm.split(u8::is_ascii_whitespace).nth(1).unwrap_or_default();
        parse::number::<u64>(word)
    });
    match pages {
        Ok(pages) => Ok(Bytes(pages.saturating_mul(host.page_size().bytes()))),
        Err(_) => Ok(observe::regions(handle)?.iter().map(|region| region.rss).sum()),
    }
}
