//! A guest that starts, is used for a while, and ends: when it was ready, what it could share then, and what it shares.
//!
//! A page table entry of the kernel's zero page has two causes: ksmd merged a page of zeros, or the page was never
//! written. Only the former counts as shared. ksmd merges zeros this way with `use_zero_pages`, and counts them. But
//! whenever ksmd splits a huge page, the kernel also maps the zero pages in it to its own zero page, without a counter
//! (`try_to_map_unused_to_zeropage` of mm/migrate.c, 6.18). A driver that merges a guest during boot has done much of
//! this before READY. By then the page tables do not show which pages were never written. Therefore a reference guest
//! boots the same way with KSM off ([`measure_unwritten_pages`]). Its unwritten pages are subtracted from the shareable
//! and the shared zeros of every other guest.
//!
//! Boots may differ by some pages. Pages that are written or collapsed into a huge page later are no longer unwritten.
//! Therefore the subtraction never exceeds the number of zeros, and never applies to pages merged otherwise.

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

/// The prefix of all guest names.
pub const GUEST_NAME_PREFIX: &str = "churn";

/// The interval between checks whether a guest is ready.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Time limit for a guest to boot and to fill its memory, beside others.
const BOOT_TIMEOUT_SECONDS: u32 = 1200;

/// The memory of a guest, in MiB.
#[derive(Clone, Copy, Debug)]
pub struct GuestShape {
    /// All memory.
    pub mib: u32,
    /// Data that all guests have, in the page cache.
    pub shared_mib: u32,
    /// Data that only this guest has, in the page cache.
    pub unique_mib: u32,
}

impl GuestShape {
    /// A guest with little data.
    pub fn small(mib: u32) -> Self {
        Self { mib, shared_mib: 16, unique_mib: 16 }
    }
}

/// A guest.
pub struct ChurnGuest {
    process: RunningProgram,
    enrolled: bool,
    ready_receiver: Receiver<(u32, Instant)>,
    /// When it was started.
    pub started_at: Instant,
    /// Present once the guest is ready.
    pub ready: Option<ReadyGuest>,
}

/// A guest that is ready.
pub struct ReadyGuest {
    /// QEMU's process.
    pub pid: u32,
    /// When it printed READY.
    pub ready_at: Instant,
    /// Pages that can be shared: zeros that were written, and contents that occur twice in this guest or also in
    /// another.
    pub shareable_pages: u64,
    /// The page contents of the guest when it became ready.
    initial_contents: ContentCounts,
    /// Pages that map the kernel's zero page because they were never written, by [`measure_unwritten_pages`].
    unwritten_pages: u64,
    /// When nine tenths of the shareable pages were shared.
    pub nine_tenths_merged_at: Option<Instant>,
    /// Pages that are shared, by the last scan.
    pub shared_pages: u64,
}

/// The result of a page table walk of a guest.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GuestScan {
    /// Pages that are mapped to KSM frames, including the copies that are kept.
    pub ksm_pages: u64,
    /// Pages that are mapped to the kernel's zero page.
    pub zero_pages: u64,
}

impl GuestScan {
    /// Pages that are shared in a guest with this many unwritten pages.
    fn shared_pages(self, unwritten: u64) -> u64 {
        self.ksm_pages + self.zero_pages.saturating_sub(unwritten)
    }
}

/// Pages that a guest can share beside other guests, where this many of its pages were never written.
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

/// Pages that map the kernel's zero page when a guest is ready. The function boots a reference guest, which has ended
/// when it returns. These pages were never written, provided that KSM is off; the caller ensures that.
pub fn measure_unwritten_pages(shape: GuestShape, enrolled: bool) -> Result<u64> {
    let mut guest = ChurnGuest::start(0, shape, enrolled)?;
    let pid = guest.wait_until_ready()?;
    let scan = scan_page_tables(&LiveHost::new(), pid, &mut HashSet::new())?;
    Ok(scan.zero_pages.saturating_sub(merged_zero_pages(pid)?))
}

impl ChurnGuest {
    /// Start a guest, with all memory of QEMU enrolled or only the guest memory, which QEMU itself enrolls.
    pub fn start(number: usize, shape: GuestShape, enrolled: bool) -> Result<Self> {
        let mut command = command_through_hold(pagefold_labs::client::lab_binary()?, enrolled)?;
        command.args(["fleet", "--guests", "1", "--timeout", &BOOT_TIMEOUT_SECONDS.to_string()]);
        command.args(["--memory", &shape.mib.to_string()]);
        command.args(["--shared-mib", &shape.shared_mib.to_string(), "--unique-mib", &shape.unique_mib.to_string()]);
        command.args(["--name-prefix", &format!("{GUEST_NAME_PREFIX}-{number}")]).stderr(Stdio::null());
        let mut process = RunningProgram::start(command)?;
        let output = process.take_output().context("a guest has no output")?;
        let (sender, ready_receiver) = mpsc::channel();
        std::thread::spawn(move || {
            let mut pid = None;
            for line in output.map_while(Result::ok) {
                if line.starts_with(output_lines::READY_PREFIX) {
                    // The receiver may have given up waiting.
                    let _ = pid.map(|pid| sender.send((pid, Instant::now())));
                    return;
                }
                pid = serde_json::from_str::<output_lines::GuestLine>(&line).ok().map(|guest| guest.pid).or(pid);
            }
        });
        Ok(Self { process, enrolled, ready_receiver, started_at: Instant::now(), ready: None })
    }

    /// The process of the guest, once it is ready.
    pub fn poll_ready(&mut self) -> Result<Option<(u32, Instant)>> {
        match self.ready_receiver.try_recv() {
            Ok((pid, ready_at)) => {
                ensure!(!self.enrolled || is_enrolled(pid)?, "QEMU's process {pid} is not enrolled as requested");
                Ok(Some((pid, ready_at)))
            }
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) if self.ready.is_some() => Ok(None),
            Err(TryRecvError::Disconnected) => {
                self.process.check_alive()?;
                Err(anyhow!("a guest closed its output before it was ready"))
            }
        }
    }

    /// Wait until the guest is ready, and return its process.
    pub fn wait_until_ready(&mut self) -> Result<u32> {
        loop {
            if let Some((pid, _)) = self.poll_ready()? {
                return Ok(pid);
            }
            sleep_unless_signaled(POLL_INTERVAL)?;
        }
    }

    /// Count the pages that it can share with other ready guests, where this many of its pages were never written.
    pub fn count_shareable_with(
        &mut self,
        (pid, ready_at): (u32, Instant),
        others: &[&ReadyGuest],
        unwritten: u64,
    ) -> Result<()> {
        let mut contents = ContentCounts::new();
        mergeable_pages::add_process(pid, &mut contents)?;
        let others: Vec<&ContentCounts> = others.iter().map(|other| &other.initial_contents).collect();
        let shareable_pages = count_shareable(&contents, &others, unwritten);
        self.ready = Some(ReadyGuest {
            pid,
            ready_at,
            shareable_pages,
            initial_contents: contents,
            unwritten_pages: unwritten,
            nine_tenths_merged_at: None,
            shared_pages: 0,
        });
        Ok(())
    }
}

impl ReadyGuest {
    /// Update the number of shared pages. The KSM frames that the guest maps are added to `frames`.
    pub fn scan(&mut self, host: &LiveHost, frames: &mut HashSet<u64>) -> Result<()> {
        let scan = scan_page_tables(host, self.pid, frames)?;
        self.shared_pages = scan.shared_pages(self.unwritten_pages);
        if self.nine_tenths_merged_at.is_none() && self.shared_pages as f64 >= 0.9 * self.shareable_pages as f64 {
            self.nine_tenths_merged_at = Some(Instant::now());
        }
        Ok(())
    }

    /// Seconds from READY until nine tenths of the shareable pages were shared.
    pub fn merge_seconds(&self) -> Option<f64> {
        Some(self.nine_tenths_merged_at?.duration_since(self.ready_at).as_secs_f64())
    }
}

/// Walk the page tables of a process.
fn scan_page_tables(host: &LiveHost, pid: u32, ksm_frames: &mut HashSet<u64>) -> Result<GuestScan> {
    let process = host.open(Pid(pid)).map_err(|why| anyhow!("process {pid}: {why}"))?;
    let mut frames: Vec<Pfn> = Vec::new();
    for (start, end) in mergeable_pages::private_regions(pid)? {
        let mappings =
            process.mappings(AddressRange { start, end }).map_err(|why| anyhow!("pagemap of {pid}: {why}"))?;
        frames.extend(mappings.iter().filter(|mapping| mapping.present && !mapping.file).filter_map(|m| m.frame));
    }
    frames.sort_unstable();
    let flags = host.frame_flags(&frames).map_err(|why| anyhow!("frames of {pid}: {why}"))?;
    let mut scan = GuestScan::default();
    for (frame, flags) in frames.iter().zip(flags) {
        if flags.is_ksm() {
            scan.ksm_pages += 1;
            ksm_frames.insert(frame.0);
        } else if flags.is_zero_page() {
            scan.zero_pages += 1;
        }
    }
    Ok(scan)
}

/// The addresses of pages of a process that are merged, with other pages or with the kernel's zero page.
pub fn merged_addresses(host: &LiveHost, pid: u32) -> Result<HashSet<u64>> {
    let process = host.open(Pid(pid)).map_err(|why| anyhow!("process {pid}: {why}"))?;
    let page = pagefold_sys::mapping::page_size() as u64;
    let mut shared: Vec<(Pfn, u64)> = Vec::new();
    for (start, end) in mergeable_pages::private_regions(pid)? {
        // The region may have vanished.
        let mappings = process.mappings(AddressRange { start, end }).unwrap_or_default();
        let is_shared = |mapping: &PagemapEntry| mapping.present && !mapping.file && !mapping.exclusive;
        let shared_mappings =
            mappings.iter().zip((start..).step_by(page as usize)).filter(|(mapping, _)| is_shared(mapping));
        shared.extend(shared_mappings.filter_map(|(mapping, address)| Some((mapping.frame?, address))));
    }
    shared.sort_unstable();
    let frames: Vec<Pfn> = shared.iter().map(|(frame, _)| *frame).collect();
    let flags = host.frame_flags(&frames).map_err(|why| anyhow!("frames of {pid}: {why}"))?;
    let merged = shared.iter().zip(flags).filter(|(_, flags)| flags.is_ksm() || flags.is_zero_page());
    Ok(merged.map(|((_, address), _)| *address).collect())
}

/// Pages of zeros of a process that ksmd has merged (`ksm_zero_pages` of `/proc/PID/ksm_stat`).
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
        let contents = |pages: &[([u8; 32], u64)]| pages.iter().copied().collect::<ContentCounts>();
        let guest = contents(&[(mergeable_pages::zero_page_hash(), 100), ([1; 32], 2), ([2; 32], 1), ([3; 32], 1)]);
        let other = contents(&[([3; 32], 1), (mergeable_pages::zero_page_hash(), 1)]);
        assert_eq!(count_shareable(&guest, &[&other], 30), 70 + 2 + 1);
        assert_eq!(count_shareable(&guest, &[], 0), 100 + 2);
        assert_eq!(count_shareable(&guest, &[&other], 101), 2 + 1, "the reference boot left more pages unwritten");
    }

    #[test]
    fn zero_pages_beyond_unwritten_count_as_shared() {
        let scan = GuestScan { ksm_pages: 5, zero_pages: 40 };
        assert_eq!([30, 40, 41].map(|unwritten| scan.shared_pages(unwritten)), [15, 5, 5]);
    }
}
