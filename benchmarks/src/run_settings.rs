//! The conditions of a run.

use anyhow::{Context, Result};
use pagefold_sys::fingerprint::Hasher;
use pagefold_sys::mapping::page_size;
use serde::Serialize;
use std::fs;
use std::process::Command;
use std::time::SystemTime;

/// The fields of `settings.toml` that every run has.
#[derive(Debug, Serialize)]
pub struct RunSettings {
    /// Day, UTC.
    pub date: String,
    /// Short hash of the commit, with `-dirty` if files differed from it; `unknown` outside of a clone.
    pub revision: String,
    kernel: String,
    cpu: String,
    cpus: usize,
    hypervisor: bool,
    memory_kib: u64,
    page_bytes: usize,
    transparent_hugepage: String,
    batch_bytes: usize,
    fingerprint: &'static str,
    /// Whether the compiler could use AES instructions everywhere.
    built_with_aes: bool,
    optimized: bool,
    /// The nice value of the process, if setting it was permitted.
    nice: i32,
    /// The autogroup. Between sessions its priority counts instead, where the scheduler groups by session (sched(7)).
    autogroup: String,
    /// Load average of the last minute before the run: other processes slow the run.
    load_before: String,
    quick: bool,
    sections: Vec<String>,
}

impl RunSettings {
    /// Read the conditions from the host.
    pub fn observe(quick: bool, sections: Vec<String>, nice: i32) -> Result<Self> {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo")?;
        // On Arm `/proc/cpuinfo` has no model name.
        let cpu = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        let thp = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
        let chosen = thp.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map(|(chosen, _)| chosen);
        Ok(Self {
            date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string()[..10].to_owned(),
            revision: git_revision(),
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            cpu: cpu.map_or(std::env::consts::ARCH, |(_, model)| model).to_owned(),
            cpus: std::thread::available_parallelism()?.get(),
            hypervisor: cpuinfo.lines().any(|line| line.starts_with("flags") && line.contains(" hypervisor")),
            memory_kib: meminfo_kib("MemTotal:")?,
            page_bytes: page_size(),
            transparent_hugepage: chosen.unwrap_or("unknown").to_owned(),
            batch_bytes: pagefold_linux::BATCH_BYTES,
            fingerprint: Hasher::with_random_key(page_size())?.implementation(),
            built_with_aes: cfg!(target_feature = "aes"),
            optimized: !cfg!(debug_assertions),
            nice,
            autogroup: fs::read_to_string("/proc/self/autogroup").unwrap_or_default().trim().to_owned(),
            load_before: fs::read_to_string("/proc/loadavg")?.split(' ').next().unwrap_or_default().to_owned(),
            quick,
            sections,
        })
    }
}

fn git_revision() -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(["-C", env!("CARGO_MANIFEST_DIR")]).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(hash) = git(&["rev-parse", "--short=9", "HEAD"]) else { return "unknown".to_owned() };
    // Kept runs do not change the code.
    let changed = git(&["status", "--porcelain", "--", ":/", ":!/benchmarks/runs"]);
    if changed.is_none_or(|files| !files.is_empty()) { format!("{hash}-dirty") } else { hash }
}

/// A line of `/proc/meminfo`, in KiB.
pub fn meminfo_kib(name: &str) -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let amount = text.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix("kB")?.trim().parse().ok());
    amount.with_context(|| format!("no {name} in /proc/meminfo"))
}
