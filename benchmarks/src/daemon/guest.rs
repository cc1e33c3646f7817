//! A machine that comes, is used for a while, and goes: when it was ready, what it could share then, and what it
//! shares.

use crate::merge::holder::{Holder, held};
use crate::merge::truth::{self, Contents};
use anyhow::{Context, Result, anyhow};
use pagefold_host::{Host, Mapping};
use pagefold_labs::lines;
use pagefold_linux::LiveHost;
use pagefold_model::{AddressRange, Pfn, Pid};
use std::collections::HashSet;
use std::process::Stdio;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::time::Instant;

/// What all machines' names begin with.
pub const NAMES: &str = "churn";

/// A machine.
pub struct Guest {
    holder: Holder,
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
    /// Pages that can be shared: zeros, and contents that it holds twice or another machine holds too.
    pub shareable: u64,
    /// What it held.
    contents: Contents,
    /// Pages that map the kernel's page of zeros and that nobody merged: they were never written.
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

impl Guest {
    /// Start one.
    pub fn start(number: usize, mib: u32) -> Result<Self> {
        let mut command = held(pagefold_labs::client::binary()?, false)?;
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
        Ok(Self { holder, coming, arrived: Instant::now(), ready: None })
    }

    /// Its process, once it is ready.
    pub fn becomes_ready(&mut self) -> Result<Option<(u32, Instant)>> {
        match self.coming.try_recv() {
            Ok(ready) => Ok(Some(ready)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) if self.ready.is_some() => Ok(None),
            Err(TryRecvError::Disconnected) => {
                self.holder.check_alive()?;
                Err(anyhow!("a machine is not ready, and says nothing more"))
            }
        }
    }

    /// Count what it can share with others that are ready.
    pub fn count(&mut self, host: &LiveHost, (pid, at): (u32, Instant), others: &[&Ready]) -> Result<()> {
        let mut contents = Contents::new();
        truth::add(pid, &mut contents)?;
        let zero = truth::zero();
        let is_shared = |content: &[u8; 32], copies: u64| {
            copies > 1 || *content == zero || others.iter().any(|other| other.contents.contains_key(content))
        };
        let shareable: u64 =
            contents.iter().filter(|(content, copies)| is_shared(content, **copies)).map(|(_, copies)| copies).sum();
        let look = look(host, pid, &mut HashSet::new())?;
        let unwritten = look.zeros.saturating_sub(zeros_merged(pid)?);
        let shareable = shareable.saturating_sub(unwritten);
        self.ready = Some(Ready { pid, at, shareable, contents, unwritten, reached: None, shared: 0 });
        Ok(())
    }
}

impl Ready {
    /// See how much is shared. `frames` gets the KSM frames that it maps.
    pub fn look(&mut self, host: &LiveHost, frames: &mut HashSet<u64>) -> Result<()> {
        let look = look(host, self.pid, frames)?;
        self.shared = (look.merged + look.zeros).saturating_sub(self.unwritten);
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
