//! A machine that comes, is used for a while, and goes: when it was ready, what it could share then, and what it
//! shares.
//!
//! A page that maps the kernel's page of zeros was merged with it or was never written, and only the former is shared.
//! ksmd merges zeros so with `use_zero_pages`, and counts them. But whenever it splits a huge page, the pages of zeros
//! in that are mapped to the kernel's, too, and nothing counts these (`try_to_map_unused_to_zeropage` of mm/migrate.c,
//! 6.18). Who merges a machine while it boots has done much of that before READY, and by then its page tables do not
//! tell what was merged from what was never written. So the latter is taken from a machine that boots the same way with
//! KSM off ([`unwritten`]), and so many fewer zeros can be shared, and are shared, of every other. Boots may differ by
//! some pages, and what is written or collapsed into a huge page later is not unwritten any more: what is taken off is
//! never more than there are zeros, and nothing is taken off what is merged otherwise.

use crate::merge::holder::{Holder, held};
use crate::merge::readings::is_enrolled;
use crate::merge::trial::pause_for;
use crate::merge::truth::{self, Contents};
use anyhow::{Context, Result, anyhow, ensure};
use pagefold_base::{AddressRange, Pfn, Pid};
use pagefold_host::{Host, Mapping};
use pagefold_labs::lines;
use pagefold_linux::LiveHost;
use std::collections::HashSet;
use std::process::Stdio;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::time::{Duration, Instant};

/// What all machines' names begin with.
pub const NAMES: &str = "churn";

/// Between two looks whether a machine is ready.
const TICK: Duration = Duration::from_millis(100);

/// A machine.
pub struct Guest {
    holder: Holder,
    enrolled: bool,
    coming: Receiver<(u32, Instant)>,
    /// When it was started.
    pub arrived: Instant,
    /// Since it is ready.
    pub ready: Option<Ready>,
}

/// A machine that is ready.
pub struct Ready {
    /// QEMU's process.
    pub pid: u32,
    /// When it said so.
    pub at: Instant,
    /// Pages that can be shared: zeros that were written, and contents that it holds twice or another machine holds
    /// too.
    pub shareable: u64,
    /// What it held.
    contents: Contents,
    /// Pages that map the kernel's page of zeros since they were never written, by [`unwritten`].
    unwritten: u64,
    /// When nine tenths of what can be shared were.
    pub reached: Option<Instant>,
    /// Pages that are shared, by the last look.
    pub shared: u64,
}

/// What page tables tell of a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Look {
    /// Pages that are mapped to KSM frames, kept copies among them.
    pub merged: u64,
    /// Pages that are mapped to the kernel's page of zeros.
    pub zeros: u64,
}

impl Look {
    /// Pages that are shared, of a machine that never wrote so many.
    fn shared(self, unwritten: u64) -> u64 {
        self.merged + self.zeros.saturating_sub(unwritten)
    }
}

/// Pages that can be shared of what a machine holds beside others, of which it never wrote so many.
fn shareable(contents: &Contents, others: &[&Contents], unwritten: u64) -> u64 {
    let zero = truth::zero();
    let pages = |(content, &copies): (&[u8; 32], &u64)| {
        if *content == zero {
            return copies.saturating_sub(unwritten);
        }
        let is_shared = copies > 1 || others.iter().any(|other| other.contains_key(content));
        if is_shared { copies } else { 0 }
    };
    contents.iter().map(pages).sum()
}

/// Pages that map the kernel's page of zeros when a machine is ready, by one that is booted for that and is gone when
/// this returns. They were never written where KSM is off, which is for the caller to see to.
pub fn unwritten(mib: u32, enrolled: bool) -> Result<u64> {
    let mut guest = Guest::start(0, mib, enrolled)?;
    let pid = guest.wait()?;
    let look = look(&LiveHost::new(), pid, &mut HashSet::new())?;
    Ok(look.zeros.saturating_sub(zeros_merged(pid)?))
}

impl Guest {
    /// Start one, with all memory of QEMU enrolled or only what QEMU itself enrols: the memory of the machine.
    pub fn start(number: usize, mib: u32, enrolled: bool) -> Result<Self> {
        let mut command = held(pagefold_labs::client::binary()?, enrolled)?;
        command.args(["fleet", "--guests", "1", "--memory", &mib.to_string(), "--timeout", "300"]);
        command.args(["--names", &format!("{NAMES}-{number}")]).stderr(Stdio::null());
        let mut holder = Holder::start(command)?;
        let output = holder.take_output().context("no output")?;
        let (sender, coming) = mpsc::channel();
        std::thread::spawn(move || {
            let mut pid = None;
            for line in output.map_while(Result::ok) {
                if line.starts_with(lines::READY) {
                    // Who waited may have given up.
                    let _ = pid.map(|pid| sender.send((pid, Instant::now())));
                    return;
                }
                pid = serde_json::from_str::<lines::Guest>(&line).ok().map(|guest| guest.pid).or(pid);
            }
        });
        Ok(Self { holder, enrolled, coming, arrived: Instant::now(), ready: None })
    }

    /// Its process, once it is ready.
    pub fn becomes_ready(&mut self) -> Result<Option<(u32, Instant)>> {
        match self.coming.try_recv() {
            Ok((pid, at)) => {
                ensure!(!self.enrolled || is_enrolled(pid)?, "QEMU's process {pid} was to be enrolled and is not");
                Ok(Some((pid, at)))
            }
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) if self.ready.is_some() => Ok(None),
            Err(TryRecvError::Disconnected) => {
                self.holder.check_alive()?;
                Err(anyhow!("a machine is not ready, and says nothing more"))
            }
        }
    }

    /// Wait until it is ready. Tells its process.
    pub fn wait(&mut self) -> Result<u32> {
        loop {
            if let Some((pid, _)) = self.becomes_ready()? {
                return Ok(pid);
            }
            pause_for(TICK)?;
        }
    }

    /// Count what it can share with others that are ready, where so many pages were never written.
    pub fn count(&mut self, (pid, at): (u32, Instant), others: &[&Ready], unwritten: u64) -> Result<()> {
        let mut contents = Contents::new();
        truth::add(pid, &mut contents)?;
        let others: Vec<&Contents> = others.iter().map(|other| &other.contents).collect();
        let shareable = shareable(&contents, &others, unwritten);
        self.ready = Some(Ready { pid, at, shareable, contents, unwritten, reached: None, shared: 0 });
        Ok(())
    }
}

impl Ready {
    /// See how much is shared. `frames` gets the KSM frames that it maps.
    pub fn look(&mut self, host: &LiveHost, frames: &mut HashSet<u64>) -> Result<()> {
        let look = look(host, self.pid, frames)?;
        self.shared = look.shared(self.unwritten);
        if self.reached.is_none() && self.shared as f64 >= 0.9 * self.shareable as f64 {
            self.reached = Some(Instant::now());
        }
        Ok(())
    }

    /// Seconds from READY until nine tenths were shared.
    pub fn seconds(&self) -> Option<f64> {
        Some(self.reached?.duration_since(self.at).as_secs_f64())
    }
}

/// Walk through the page tables of a process.
fn look(host: &LiveHost, pid: u32, ksm: &mut HashSet<u64>) -> Result<Look> {
    let process = host.open(Pid(pid)).map_err(|why| anyhow!("process {pid}: {why}"))?;
    let mut frames: Vec<Pfn> = Vec::new();
    for (start, end) in truth::regions(pid)? {
        let mappings =
            process.mappings(AddressRange { start, end }).map_err(|why| anyhow!("pagemap of {pid}: {why}"))?;
        frames.extend(mappings.iter().filter(|mapping| mapping.present && !mapping.file).filter_map(|m| m.frame));
    }
    frames.sort_unstable();
    let flags = host.frame_flags(&frames).map_err(|why| anyhow!("frames of {pid}: {why}"))?;
    let mut look = Look::default();
    for (frame, flags) in frames.iter().zip(flags) {
        if flags.is_ksm() {
            look.merged += 1;
            ksm.insert(frame.0);
        } else if flags.is_zero_page() {
            look.zeros += 1;
        }
    }
    Ok(look)
}

/// The addresses of pages of a process that are merged, with others or with the kernel's page of zeros.
pub fn merged(host: &LiveHost, pid: u32) -> Result<HashSet<u64>> {
    let process = host.open(Pid(pid)).map_err(|why| anyhow!("process {pid}: {why}"))?;
    let page = pagefold_sys::mapping::page_size() as u64;
    let mut shared: Vec<(Pfn, u64)> = Vec::new();
    for (start, end) in truth::regions(pid)? {
        // It may be gone by now.
        let mappings = process.mappings(AddressRange { start, end }).unwrap_or_default();
        let shares = |mapping: &Mapping| mapping.present && !mapping.file && !mapping.exclusive;
        let at = mappings.iter().zip((start..).step_by(page as usize)).filter(|(mapping, _)| shares(mapping));
        shared.extend(at.filter_map(|(mapping, address)| Some((mapping.frame?, address))));
    }
    shared.sort_unstable();
    let frames: Vec<Pfn> = shared.iter().map(|(frame, _)| *frame).collect();
    let flags = host.frame_flags(&frames).map_err(|why| anyhow!("frames of {pid}: {why}"))?;
    let merged = shared.iter().zip(flags).filter(|(_, flags)| flags.is_ksm() || flags.is_zero_page());
    Ok(merged.map(|((_, address), _)| *address).collect())
}

/// Pages of zeros that ksmd has merged of a process (`ksm_zero_pages` of `/proc/PID/ksm_stat`).
fn zeros_merged(pid: u32) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/ksm_stat"))?;
    let zeros = stat.lines().find_map(|line| line.strip_prefix("ksm_zero_pages ")?.trim().parse().ok());
    Ok(zeros.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_never_written_is_taken_from_zeros_alone() {
        let contents = |of: &[([u8; 32], u64)]| of.iter().copied().collect::<Contents>();
        let held = contents(&[(truth::zero(), 100), ([1; 32], 2), ([2; 32], 1), ([3; 32], 1)]);
        let other = contents(&[([3; 32], 1), (truth::zero(), 1)]);
        assert_eq!(shareable(&held, &[&other], 30), 70 + 2 + 1);
        assert_eq!(shareable(&held, &[], 0), 100 + 2);
        assert_eq!(shareable(&held, &[&other], 101), 2 + 1, "another boot left more unwritten");
    }

    #[test]
    fn zeros_beyond_what_was_never_written_are_shared() {
        let look = Look { merged: 5, zeros: 40 };
        assert_eq!([30, 40, 41].map(|unwritten| look.shared(unwritten)), [15, 5, 5]);
    }
}
