//! A machine that comes, is used for a while, and goes: when it was ready, what it could share then, and what it
//! shares.
//!
//! A page that maps the kernel's page of zeros was merged with it or was never written, and only the former is shared.
//! ksmd merges zeros so with `use_zero_pages`, and counts them. But whenever it splits a huge page, the pages of zeros
//! in that are mapped to the kernel's, too, and nothing counts these (`try_to_map_unused_to_zeropage` of mm/migrate.c,
//! 6.18). Who merges a machine while it boots has done much of that before READY, and by then its page tables do not
//! tell what was merged from what was never written. So the latter is taken from a machine that boots the same way with
//! KSM off ([`measure_unwritten_pages`]), and so many fewer zeros can be shared, and are shared, of every other. Boots may differ by
//! some pages, and what is written or collapsed into a huge page later is not unwritten any more: what is taken off is
//! never more than there are zeros, and nothing is taken off what is merged otherwise.

use crate::merge::mergeable_pages::{self, ContentCounts};
use crate::merge::readings::is_enrolled;
use crate::merge::running_program::{RunningProgram, command_through_hold};
use crate::merge::trial::sleep_unless_signaled;
use anyhow::{Context, Result, anyhow, ensure};
use pagefold_base::{AddressRange, Pfn, Pid};
use pagefold_host::{Host, PagemapEntry};
use pagefold_labs::output_lines;
use pagefold_linux::LiveHost;
use std::collections::HashSet;
use std::process::Stdio;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::time::{Duration, Instant};

/// What all machines' names begin with.
pub const GUEST_NAME_PREFIX: &str = "churn";

/// Between two looks whether a machine is ready.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A machine.
pub struct ChurnGuest {
    process: RunningProgram,
    enrolled: bool,
    ready_receiver: Receiver<(u32, Instant)>,
    /// When it was started.
    pub started_at: Instant,
    /// Since it is ready.
    pub ready: Option<ReadyGuest>,
}

/// A machine that is ready.
pub struct ReadyGuest {
    /// QEMU's process.
    pub pid: u32,
    /// When it said so.
    pub ready_at: Instant,
    /// Pages that can be shared: zeros that were written, and contents that it holds twice or another machine holds
    /// too.
    pub shareable_pages: u64,
    /// What it held.
    initial_contents: ContentCounts,
    /// Pages that map the kernel's page of zeros since they were never written, by [`measure_unwritten_pages`].
    unwritten_pages: u64,
    /// When nine tenths of what can be shared were.
    pub nine_tenths_merged_at: Option<Instant>,
    /// Pages that are shared, by the last look.
    pub shared_pages: u64,
}

/// What page tables tell of a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GuestScan {
    /// Pages that are mapped to KSM frames, kept copies among them.
    pub ksm_pages: u64,
    /// Pages that are mapped to the kernel's page of zeros.
    pub zero_pages: u64,
}

impl GuestScan {
    /// Pages that are shared, of a machine that never wrote so many.
    fn shared_pages(self, unwritten: u64) -> u64 {
        self.ksm_pages + self.zero_pages.saturating_sub(unwritten)
    }
}

/// Pages that can be shared of what a machine holds beside others, of which it never wrote so many.
fn count_shareable(contents: &ContentCounts, others: &[&ContentCounts], unwritten: u64) -> u64 {
    let zero = mergeable_pages::zero_page_hash();
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
pub fn measure_unwritten_pages(mib: u32, enrolled: bool) -> Result<u64> {
    let mut guest = ChurnGuest::start(0, mib, enrolled)?;
    let pid = guest.wait_until_ready()?;
    let look = scan_page_tables(&LiveHost::new(), pid, &mut HashSet::new())?;
    Ok(look.zero_pages.saturating_sub(merged_zero_pages(pid)?))
}

impl ChurnGuest {
    /// Start one, with all memory of QEMU enrolled or only what QEMU itself enrols: the memory of the machine.
    pub fn start(number: usize, mib: u32, enrolled: bool) -> Result<Self> {
        let mut command = command_through_hold(pagefold_labs::client::lab_binary()?, enrolled)?;
        command.args(["fleet", "--guests", "1", "--memory", &mib.to_string(), "--timeout", "300"]);
        command.args(["--names", &format!("{GUEST_NAME_PREFIX}-{number}")]).stderr(Stdio::null());
        let mut holder = RunningProgram::start(command)?;
        let output = holder.take_output().context("no output")?;
        let (sender, coming) = mpsc::channel();
        std::thread::spawn(move || {
            let mut pid = None;
            for line in output.map_while(Result::ok) {
                if line.starts_with(output_lines::READY_PREFIX) {
                    // Who waited may have given up.
                    let _ = pid.map(|pid| sender.send((pid, Instant::now())));
                    return;
                }
                pid = serde_json::from_str::<output_lines::GuestLine>(&line).ok().map(|guest| guest.pid).or(pid);
            }
        });
        Ok(Self { process: holder, enrolled, ready_receiver: coming, started_at: Instant::now(), ready: None })
    }

    /// Its process, once it is ready.
    pub fn poll_ready(&mut self) -> Result<Option<(u32, Instant)>> {
        match self.ready_receiver.try_recv() {
            Ok((pid, at)) => {
                ensure!(!self.enrolled || is_enrolled(pid)?, "QEMU's process {pid} was to be enrolled and is not");
                Ok(Some((pid, at)))
            }
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) if self.ready.is_some() => Ok(None),
            Err(TryRecvError::Disconnected) => {
                self.process.check_alive()?;
                Err(anyhow!("a machine is not ready, and says nothing more"))
            }
        }
    }

    /// Wait until it is ready. Tells its process.
    pub fn wait_until_ready(&mut self) -> Result<u32> {
        loop {
            if let Some((pid, _)) = self.poll_ready()? {
                return Ok(pid);
            }
            sleep_unless_signaled(POLL_INTERVAL)?;
        }
    }

    /// Count what it can share with others that are ready, where so many pages were never written.
    pub fn count_shareable_with(
        &mut self,
        (pid, at): (u32, Instant),
        others: &[&ReadyGuest],
        unwritten: u64,
    ) -> Result<()> {
        let mut contents = ContentCounts::new();
        mergeable_pages::add_process(pid, &mut contents)?;
        let others: Vec<&ContentCounts> = others.iter().map(|other| &other.initial_contents).collect();
        let shareable = count_shareable(&contents, &others, unwritten);
        self.ready = Some(ReadyGuest {
            pid,
            ready_at: at,
            shareable_pages: shareable,
            initial_contents: contents,
            unwritten_pages: unwritten,
            nine_tenths_merged_at: None,
            shared_pages: 0,
        });
        Ok(())
    }
}

impl ReadyGuest {
    /// See how much is shared. `frames` gets the KSM frames that it maps.
    pub fn scan(&mut self, host: &LiveHost, frames: &mut HashSet<u64>) -> Result<()> {
        let look = scan_page_tables(host, self.pid, frames)?;
        self.shared_pages = look.shared_pages(self.unwritten_pages);
        if self.nine_tenths_merged_at.is_none() && self.shared_pages as f64 >= 0.9 * self.shareable_pages as f64 {
            self.nine_tenths_merged_at = Some(Instant::now());
        }
        Ok(())
    }

    /// Seconds from READY until nine tenths were shared.
    pub fn merge_seconds(&self) -> Option<f64> {
        Some(self.nine_tenths_merged_at?.duration_since(self.ready_at).as_secs_f64())
    }
}

/// Walk through the page tables of a process.
fn scan_page_tables(host: &LiveHost, pid: u32, ksm: &mut HashSet<u64>) -> Result<GuestScan> {
    let process = host.open(Pid(pid)).map_err(|why| anyhow!("process {pid}: {why}"))?;
    let mut frames: Vec<Pfn> = Vec::new();
    for (start, end) in mergeable_pages::private_regions(pid)? {
        let mappings =
            process.mappings(AddressRange { start, end }).map_err(|why| anyhow!("pagemap of {pid}: {why}"))?;
        frames.extend(mappings.iter().filter(|mapping| mapping.present && !mapping.file).filter_map(|m| m.frame));
    }
    frames.sort_unstable();
    let flags = host.frame_flags(&frames).map_err(|why| anyhow!("frames of {pid}: {why}"))?;
    let mut look = GuestScan::default();
    for (frame, flags) in frames.iter().zip(flags) {
        if flags.is_ksm() {
            look.ksm_pages += 1;
            ksm.insert(frame.0);
        } else if flags.is_zero_page() {
            look.zero_pages += 1;
        }
    }
    Ok(look)
}

/// The addresses of pages of a process that are merged, with others or with the kernel's page of zeros.
pub fn merged_addresses(host: &LiveHost, pid: u32) -> Result<HashSet<u64>> {
    let process = host.open(Pid(pid)).map_err(|why| anyhow!("process {pid}: {why}"))?;
    let page = pagefold_sys::mapping::page_size() as u64;
    let mut shared: Vec<(Pfn, u64)> = Vec::new();
    for (start, end) in mergeable_pages::private_regions(pid)? {
        // It may be gone by now.
        let mappings = process.mappings(AddressRange { start, end }).unwrap_or_default();
        let shares = |mapping: &PagemapEntry| mapping.present && !mapping.file && !mapping.exclusive;
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
fn merged_zero_pages(pid: u32) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/ksm_stat"))?;
    let zeros = stat.lines().find_map(|line| line.strip_prefix("ksm_zero_pages ")?.trim().parse().ok());
    Ok(zeros.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unwritten_pages_reduce_only_zero_pages() {
        let contents = |of: &[([u8; 32], u64)]| of.iter().copied().collect::<ContentCounts>();
        let held = contents(&[(mergeable_pages::zero_page_hash(), 100), ([1; 32], 2), ([2; 32], 1), ([3; 32], 1)]);
        let other = contents(&[([3; 32], 1), (mergeable_pages::zero_page_hash(), 1)]);
        assert_eq!(count_shareable(&held, &[&other], 30), 70 + 2 + 1);
        assert_eq!(count_shareable(&held, &[], 0), 100 + 2);
        assert_eq!(count_shareable(&held, &[&other], 101), 2 + 1, "another boot left more unwritten");
    }

    #[test]
    fn zero_pages_beyond_unwritten_count_as_shared() {
        let look = GuestScan { ksm_pages: 5, zero_pages: 40 };
        assert_eq!([30, 40, 41].map(|unwritten| look.shared_pages(unwritten)), [15, 5, 5]);
    }
}
