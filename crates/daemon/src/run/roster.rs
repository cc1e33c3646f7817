//! Who runs: who has come and is big enough to be managed, who went, who grew.
//!
//! Where the host tells of programs as they begin, those are looked at, and all processes are listed now and then: for
//! those that forked and did not become another program, and to see who went. Elsewhere they are listed at every poll.
//!
//! Only those are looked at whose turn it is: a process that has just come at every poll for a few seconds, since a
//! virtual machine is small when it starts, and longer and longer ones afterwards. A look at who is not managed is one
//! read of its size, so that thousands of short-lived programs cost little. A number that was given to another process
//! is noticed when its turn comes.
//!
//! Any user can start processes that become other programs again and again, so what all of this costs is bounded: the
//! pauses grow with the number of new processes, and a token bucket holds a part of the daemon's CPU bound. Where that
//! is empty, the processes that are due wait, the longest due first.

use super::Settings;
use crate::decide::{Arrival, Budget, Event};
use pagefold_base::process::Process;
use pagefold_base::process::USER_HZ;
use pagefold_base::tuner::{Tuner, tuner};
use pagefold_base::{Absent, Bytes, Pid, ProcessId, Reading};
use pagefold_host::{Begun, Host, Process as Handle, Programs, observe, parse};
use rustix::time::{ClockId, clock_gettime};
use std::collections::BTreeMap;
use std::time::Duration;

/// The longest pause between two looks at a process that is not managed.
const RAREST: Duration = Duration::from_secs(60);

/// The longest pause between two looks at a program that writes KSM's settings.
const MEMORY: Duration = Duration::from_secs(2);

/// The longest pause between two looks at the memory of one that is managed and has been there for long.
const STEADY: Duration = Duration::from_secs(16);

/// Growth between two looks with which it fills.
const GROWS: Bytes = Bytes(1 << 20);

/// Between two looks at who it is: it may have become another program.
const IDENTITY: Duration = Duration::from_secs(60);

/// How long somebody has not been there for long: what it does is followed.
const YOUNG: Duration = Duration::from_secs(60);

/// The first pause.
const FIRST: Duration = Duration::from_millis(200);

/// The pause after which a process is asked what program it is. Most have ended before.
const LASTING: Duration = Duration::from_millis(800);

/// Between two lists of all processes where the host tells of programs as they begin.
const LISTED: Duration = Duration::from_secs(30);

/// The same after some were lost.
const LOST: Duration = Duration::from_secs(1);

/// New processes up to which the first pause is [`FIRST`]. With more of them it grows in proportion, so that the looks
/// at new processes within a second do not.
const NEW_AT_FIRST_PAUSE: usize = 64;

/// The part of the daemon's CPU bound that observing processes may take on average, and the burst.
const OBSERVING_SHARE: f64 = 0.25;
const OBSERVING_BURST: Duration = Duration::from_secs(1);

struct Known {
    /// Which it was when it was taken hold of.
    process: Option<ProcessId>,
    came: Duration,
    pause: Duration,
    next: Duration,
    resident: Bytes,
    /// Who it is, and when that is looked at again, if it is managed.
    who: Option<(Process, Duration)>,
    /// Until when it is taken to be nobody who is managed, whatever its size.
    foreign: Duration,
    /// Whether it was asked what program it is.
    asked: bool,
    tuner: Option<Tuner>,
}

impl Known {
    fn new(now: Duration) -> Self {
        Self {
            process: None,
            came: now,
            pause: FIRST,
            next: now,
            resident: Bytes::ZERO,
            who: None,
            foreign: Duration::ZERO,
            asked: false,
            tuner: None,
        }
    }
}

/// The processes of a host.
pub(super) struct Roster {
    known: BTreeMap<Pid, Known>,
    own: Pid,
    programs: Reading<Box<dyn Programs>>,
    /// When all processes were listed last.
    listed: Option<Duration>,
    /// Whether programs have begun that are not known.
    lost: bool,
    /// The CPU time of the polling thread.
    cpu_clock: fn() -> Duration,
    /// CPU time that polls have taken in all, and what they may take.
    observed: Duration,
    budget: Budget,
}

/// What a poll found.
#[derive(Default)]
pub(super) struct Polled {
    pub events: Vec<Event>,
    pub resident: Vec<(ProcessId, Bytes)>,
    pub ran: Vec<(ProcessId, Duration)>,
}

impl Roster {
    pub fn new(host: &dyn Host) -> Self {
        Self {
            known: BTreeMap::new(),
            own: Pid(std::process::id()),
            programs: host.follow_programs(),
            listed: None,
            lost: false,
            cpu_clock: thread_cpu_time,
            observed: Duration::ZERO,
            budget: Budget::new(0.0, OBSERVING_BURST, Duration::ZERO, Duration::ZERO),
        }
    }

    /// With another clock of CPU time.
    #[cfg(test)]
    pub fn with_cpu_clock(self, cpu_clock: fn() -> Duration) -> Self {
        Self { cpu_clock, ..self }
    }

    /// Whether the host tells of programs as they begin, or why not.
    pub fn follows(&self) -> Reading<()> {
        self.programs.as_ref().map(drop).map_err(Absent::clone)
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
        self.known.values().any(|known| known.who.is_none() && known.pause < FIRST * 16)
    }

    /// Whether anybody who is managed has grown so lately that it may still fill.
    pub fn grows(&self) -> bool {
        self.known.values().any(|known| known.who.is_some() && known.pause < MEMORY)
    }

    /// Everybody is to be judged anew.
    pub fn forget(&mut self) {
        for known in self.known.values_mut() {
            (known.pause, known.next, known.foreign) = (FIRST, Duration::ZERO, Duration::ZERO);
            if let Some((_, again)) = &mut known.who {
                *again = Duration::ZERO;
            }
        }
    }

    /// See who came, went and grew.
    pub fn poll(&mut self, host: &dyn Host, now: Duration, settings: &Settings) -> Reading<Polled> {
        let mut polled = Polled::default();
        let (began, before) = ((self.cpu_clock)(), self.observed);
        let read = |roster: &mut Self| {
            roster.observed = before + (roster.cpu_clock)().saturating_sub(began);
            roster.budget.read(now, roster.observed);
            roster.budget.left() > 0.0
        };
        self.budget.rebound(settings.rules.cpu * OBSERVING_SHARE, OBSERVING_BURST);
        // At first all are looked at, whatever it costs: a program that writes KSM's settings may be among them.
        let first = self.listed.is_none();
        let affordable = read(self);
        self.hear(now);
        let pause = match (&self.programs, self.lost) {
            _ if !affordable => LISTED,
            (Err(_), _) => Duration::ZERO,
            (Ok(_), true) => LOST,
            (Ok(_), false) => LISTED,
        };
        if self.listed.is_none_or(|listed| now >= listed + pause) {
            self.list(host, now, &mut polled)?;
        }
        let pause = self.first_pause(now);
        let due = self.known.iter().filter(|(_, known)| known.next <= now);
        let mut due: Vec<(Duration, Pid)> = due.map(|(pid, known)| (known.next, *pid)).collect();
        due.sort_unstable();
        for (_, pid) in due {
            if !read(self) && !first {
                break;
            }
            self.look(host, pid, now, pause, settings, &mut polled);
        }
        read(self);
        Ok(polled)
    }

    /// The first pause between two looks at a process, by the number of those that are new.
    fn first_pause(&self, now: Duration) -> Duration {
        let new = self.known.values().filter(|known| known.is_new(now)).count();
        FIRST * u32::try_from(new.div_ceil(NEW_AT_FIRST_PAUSE).max(1)).unwrap_or(u32::MAX)
    }

    /// Take in which programs have begun.
    fn hear(&mut self, now: Duration) {
        let Ok(programs) = &mut self.programs else { return };
        let Begun { mut pids, lost } = match programs.begun() {
            Ok(begun) => begun,
            Err(why) => return self.programs = Err(why),
        };
        self.lost |= lost;
        pids.remove(&self.own);
        for pid in pids {
            let known = self.known.entry(pid).or_insert_with(|| Known::new(now));
            (known.came, known.pause, known.next) = (now, FIRST, now);
            (known.foreign, known.asked) = (Duration::ZERO, false);
            if let Some((_, again)) = &mut known.who {
                *again = now;
            }
        }
    }

    /// List all processes.
    fn list(&mut self, host: &dyn Host, now: Duration, polled: &mut Polled) -> Reading<()> {
        let pids = host.pids()?;
        self.known.retain(|pid, known| {
            let there = pids.binary_search(pid).is_ok();
            if !there {
                polled.went(known);
            }
            there
        });
        // Who was there before is asked at once: a program that writes KSM's settings is heeded before anything is
        // done.
        let pause = if self.listed.is_none() { LASTING } else { FIRST };
        for pid in pids.into_iter().filter(|pid| *pid != self.own) {
            self.known.entry(pid).or_insert_with(|| Known { pause, ..Known::new(now) });
        }
        (self.listed, self.lost) = (Some(now), false);
        Ok(())
    }

    /// Look at somebody whose turn it is.
    fn look(
        &mut self,
        host: &dyn Host,
        pid: Pid,
        now: Duration,
        first_pause: Duration,
        settings: &Settings,
        polled: &mut Polled,
    ) {
        let Some(known) = self.known.get_mut(&pid) else { return };
        if known.who.is_none()
            && known.tuner.is_none()
            && let Ok(resident) = size(host, host.read(&format!("proc/{pid}/statm")))
            && (resident < settings.min_resident || now < known.foreign)
            && (known.asked || known.pause < LASTING)
        {
            // Kernel threads have no memory, nor has who has ended and was not waited for.
            let pause = (known.pause * 2).max(first_pause);
            known.pause = if resident == Bytes::ZERO { RAREST } else { pause.min(RAREST) };
            known.next = now + known.pause;
            return;
        }
        match host.open(pid) {
            Ok(handle) => known.look(host, &*handle, now, first_pause, settings, polled),
            Err(Absent::Vanished) => {
                polled.went(known);
                self.known.remove(&pid);
            }
            Err(_) => known.next = now + known.pause,
        }
    }
}

impl Known {
    /// Whether it is looked at often: it has just come, or it is managed and has come lately.
    fn is_new(&self, now: Duration) -> bool {
        self.pause < FIRST * 16 || self.who.is_some() && now < self.came + YOUNG
    }

    fn look(
        &mut self,
        host: &dyn Host,
        handle: &dyn Handle,
        now: Duration,
        first_pause: Duration,
        settings: &Settings,
        polled: &mut Polled,
    ) {
        let process = handle.id();
        if self.process.is_some_and(|known| known != process) {
            polled.went(self);
            *self = Self::new(now);
        }
        self.process = Some(process);
        if !self.asked {
            self.tuner = asked(host, handle);
            self.asked = true;
        }
        let Ok(resident) = resident(host, handle) else {
            self.next = now + self.pause;
            return;
        };
        let grows = resident.saturating_sub(self.resident) >= GROWS;
        self.resident = resident;
        let managed = self.who.is_some();
        if managed {
            polled.resident.push((process, resident));
        }
        let young = managed && now < self.came + YOUNG;
        if managed && let Ok(ran) = cpu_time(handle) {
            polled.ran.push((process, ran));
        }
        self.pause = match (managed, self.tuner) {
            (true, _) if grows || young => first_pause.min(STEADY),
            (true, _) => (self.pause * 2).min(STEADY),
            (false, Some(_)) => (self.pause * 2).min(MEMORY),
            (false, None) => (self.pause * 2).min(RAREST),
        };
        self.next = now + self.pause;
        let due = self.who.as_ref().is_none_or(|(_, again)| now >= *again);
        if !due || !managed && resident < settings.min_resident {
            return;
        }
        let Ok(mut who) = observe::process(host, handle) else { return };
        if let Some((before, _)) = &self.who {
            // Where nothing can be read for once it has not moved.
            if before.uid.is_ok() && who.uid.is_err() || before.cgroup.is_ok() && who.cgroup.is_err() {
                return;
            }
            // A container keeps its labels, also when it ends and its runtime has thrown them away.
            if before.cgroup == who.cgroup && !before.identity.labels.is_empty() {
                who.identity.labels.clone_from(&before.identity.labels);
            }
        }
        let foreign = settings.only.as_ref().is_some_and(|only| !only.has(&who));
        if foreign && !managed {
            self.foreign = now + IDENTITY;
            return;
        }
        // What decides with whom it may share: where that changes it is told of again.
        let standing = |who: &Process| {
            let chosen = settings.only.as_ref().is_none_or(|only| only.has(who));
            (settings.domains.domain(who), chosen, settings.exclusions.reason(who))
        };
        let same = |(before, again): &(Process, Duration)| {
            let program = (&before.comm, &before.arguments) == (&who.comm, &who.arguments);
            program && standing(before) == standing(&who) && !again.is_zero()
        };
        if !self.who.as_ref().is_some_and(same) {
            // Who was managed before, and may be merged, is not forgotten for that.
            let not_chosen = foreign.then(|| "it is not among those that are managed ([daemon.only])".to_owned());
            let arrival = arrival(&who, resident, settings);
            polled.events.push(Event::Came(Arrival { excluded: not_chosen.or(arrival.excluded), ..arrival }));
        }
        self.who = Some((who, now + IDENTITY));
    }
}

impl Polled {
    /// Somebody is managed no more.
    fn went(&mut self, known: &mut Known) {
        self.events.extend(known.who.take().map(|(who, _)| Event::Went(who.id)));
    }
}

/// Whether a process is a program of root that writes KSM's settings again and again. Whose it is is asked only of one
/// that has the name.
fn asked(host: &dyn Host, handle: &dyn Handle) -> Option<Tuner> {
    let stat = handle.read("stat").and_then(|bytes| parse::stat(&bytes)).ok()?;
    let arguments = handle.read("cmdline").map(|bytes| parse::arguments(&bytes)).unwrap_or_default();
    tuner(&stat.comm, &arguments).filter(|tuner| tuner.writes_rate())?;
    observe::tuner(host, &observe::process(host, handle).ok()?)
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

/// The CPU time of this thread.
fn thread_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec as u32)
}

/// CPU time of all threads, in ticks.
fn cpu_time(handle: &dyn Handle) -> Reading<Duration> {
    let stat = parse::stat(&handle.read("stat")?)?;
    Ok(Duration::from_secs_f64(stat.utime.saturating_add(stat.stime) as f64 / USER_HZ))
}

/// Resident memory by `statm`.
fn size(host: &dyn Host, statm: Reading<Vec<u8>>) -> Reading<Bytes> {
    Ok(host.page_size().of(parse::statm(&statm?)?.resident))
}

/// Resident memory by `statm`, else the sum over the regions.
pub(super) fn resident(host: &dyn Host, handle: &dyn Handle) -> Reading<Bytes> {
    size(host, handle.read("statm")).or_else(|_| Ok(observe::regions(handle)?.iter().map(|region| region.rss).sum()))
}
