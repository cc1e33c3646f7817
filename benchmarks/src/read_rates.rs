//! The rate of reading pages that remains when the pages are also hashed, on one thread.
//!
//! Four loops over the memory of a child run one after the other in each round. Each round begins with a different
//! loop:
//!
//! - `raw`: bare system calls with the census's buffer size. Without checks of what is resident or shared, a census may
//!   not use this loop. It shows the cost of the checks.
//! - `read`: [`pagefold_host::ProcessHandle::contents`] with a sink that ignores the bytes: the baseline.
//! - `hash`: the same with a sink that computes the fingerprint.
//! - `census`: the census's first pass on one thread, which also writes the index. It runs only where the census uses
//!   the read method of the case.

use crate::BenchmarkEffort;
use crate::findings::{Findings, MarkdownTable, PairedRatio, SampleSpread, ThresholdCheck};
use crate::rounds::draw_orders;
use crate::target_process::{TargetLayout, TargetProcesses};
use anyhow::{Context, Result, ensure};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use pagefold_base::domain::DomainRule;
use pagefold_base::{AddressRange, Pid};
use pagefold_census::scan::{Scan, ScanProgress};
use pagefold_census::{PageIndex, ProcessSelection, scan_scope};
use pagefold_host::{Host, PageContent, PageRun, ProcessHandle, ReadMethod};
use pagefold_linux::{BATCH_BYTES, LiveHost};
use pagefold_sys::fingerprint::Hasher;
use pagefold_sys::mapping::Mapping;
use std::fs::File;
use std::hint::black_box;
use std::io::IoSliceMut;
use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// A read method, with the share of its rate that must remain.
struct ReadRateCase {
    name: &'static str,
    huge: bool,
    read_method: ReadMethod,
    min_ratio: Option<f64>,
}

const PROC_MEM_METHOD: ReadMethod = ReadMethod::ProcMem { detect_merged: false };

const READ_RATE_CASES: [ReadRateCase; 4] = [
    ReadRateCase {
        name: "4 KiB pages, process_vm_readv",
        huge: false,
        read_method: ReadMethod::ProcessVmReadv,
        min_ratio: Some(0.85),
    },
    ReadRateCase {
        name: "4 KiB pages, /proc/PID/mem",
        huge: false,
        read_method: PROC_MEM_METHOD,
        min_ratio: Some(0.85),
    },
    ReadRateCase {
        name: "huge pages, process_vm_readv",
        huge: true,
        read_method: ReadMethod::ProcessVmReadv,
        min_ratio: Some(0.65),
    },
    ReadRateCase { name: "huge pages, /proc/PID/mem", huge: true, read_method: PROC_MEM_METHOD, min_ratio: None },
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReadLoop {
    Raw,
    Read,
    Hash,
    Census,
}

const READ_LOOPS: [ReadLoop; 4] = [ReadLoop::Raw, ReadLoop::Read, ReadLoop::Hash, ReadLoop::Census];

impl ReadLoop {
    fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Read => "read",
            Self::Hash => "hash",
            Self::Census => "census",
        }
    }
}

/// Measure all cases.
pub fn measure(effort: BenchmarkEffort) -> Result<Findings> {
    let (bytes, rounds) = if effort.quick { (64 << 20, 3) } else { (1 << 30, 15) };
    let host = LiveHost::new();
    let mut findings = Findings::new("case,round,position,loop,bytes,seconds,cpu_seconds");
    let mut table = MarkdownTable::new(
        format!("Rates on one thread, medians of {rounds} rounds of {} MiB", bytes >> 20),
        &["memory", "raw GB/s", "read GB/s", "hash GB/s", "census GB/s", "hash / read", "read / raw", "census / read"],
    );
    for case in READ_RATE_CASES {
        let targets =
            TargetProcesses::start([TargetLayout { bytes, huge: case.huge, seed: 1, ..TargetLayout::default() }])?;
        let mut bench = ReadLoopBench::new(&host, &targets, bytes, case.read_method)?;
        let mut samples: Vec<Vec<f64>> = vec![Vec::new(); READ_LOOPS.len()];
        // The round before the first one warms up and is not counted.
        for (round, order) in draw_orders(&READ_LOOPS, rounds + 1).into_iter().enumerate() {
            for (position, chosen) in order.into_iter().enumerate() {
                if chosen == ReadLoop::Census && case.read_method != ReadMethod::ProcessVmReadv {
                    continue;
                }
                let cpu = thread_cpu_seconds();
                let started = Instant::now();
                bench.run_loop(chosen)?;
                let seconds = started.elapsed().as_secs_f64();
                let cpu = thread_cpu_seconds() - cpu;
                if round > 0 {
                    samples[chosen as usize].push(seconds);
                    let name = chosen.name();
                    findings
                        .samples
                        .push(format!("\"{}\",{round},{position},{name},{bytes},{seconds:.6},{cpu:.6}", case.name));
                }
            }
        }
        let rate = |which: ReadLoop| match samples[which as usize].as_slice() {
            [] => "-".to_owned(),
            seconds => {
                format!("{:.1}", SampleSpread::from_samples(seconds.iter().map(|s| bytes as f64 / s / 1e9)).median)
            }
        };
        // Ratios of rates are inverse ratios of seconds.
        let ratio = |a: ReadLoop, b: ReadLoop| {
            PairedRatio::from_rounds(samples[b as usize].iter().zip(&samples[a as usize]).map(|(b, a)| b / a))
        };
        let percent = |ratio: Option<PairedRatio>| ratio.map_or("-".to_owned(), PairedRatio::format_percent);
        let hashing = ratio(ReadLoop::Hash, ReadLoop::Read);
        let mut row = vec![case.name.to_owned()];
        row.extend(READ_LOOPS.map(rate));
        row.push(percent(hashing));
        row.push(percent(ratio(ReadLoop::Read, ReadLoop::Raw)));
        row.push(percent(ratio(ReadLoop::Census, ReadLoop::Read)));
        table.rows.push(row);
        if let (Some(bar), Some(hashing)) = (case.min_ratio, hashing) {
            findings.checks.push(ThresholdCheck {
                claim: format!("{}: hashing keeps at least {:.0} % of the rate of reading", case.name, bar * 100.0),
                measured: hashing.format_percent(),
                met: hashing.ratio >= bar,
            });
        }
    }
    let hasher = Hasher::with_random_key(host.page_size().as_len())?;
    table.notes.push(format!(
        "`raw` is system calls alone, `read` adds the checks that keep a census free of side effects, `hash` adds the \
         fingerprint ({}), `census` adds the index. Ratios are geometric means of the ratios within rounds, with 95 % \
         intervals. Buffers of {} KiB.",
        hasher.implementation(),
        BATCH_BYTES >> 10
    ));
    findings.tables.push(table);
    Ok(findings)
}

fn thread_cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Prepared state of all loops over one process.
struct ReadLoopBench<'a> {
    host: &'a LiveHost,
    process: Box<dyn ProcessHandle + 'a>,
    pid: u32,
    read_method: ReadMethod,
    address: u64,
    bytes: usize,
    runs: Vec<PageRun>,
    hasher: Hasher,
    buffer: Mapping,
    memory: File,
    survey: scan_scope::ScanScope,
    index: PageIndex,
    threads: rayon::ThreadPool,
}

impl<'a> ReadLoopBench<'a> {
    fn new(host: &'a LiveHost, targets: &TargetProcesses, bytes: usize, read_method: ReadMethod) -> Result<Self> {
        let (pid, address) = (targets.pids()[0], targets.addresses()[0]);
        let process = host.open(Pid(pid))?;
        let runs = process.resident(&[AddressRange { start: address, end: address + bytes as u64 }])?;
        let selection = ProcessSelection { pids: vec![Pid(pid)], ..ProcessSelection::default() };
        let survey = scan_scope::determine_scope(host, &selection, &DomainRule::Host.into(), &[], None)?;
        let index = PageIndex::build(host, &survey, false)?;
        Ok(Self {
            host,
            process,
            pid,
            read_method,
            address,
            bytes,
            runs,
            hasher: Hasher::with_random_key(host.page_size().as_len())?,
            buffer: Mapping::anonymous(BATCH_BYTES)?,
            memory: File::open(format!("/proc/{pid}/mem"))?,
            survey,
            index,
            threads: rayon::ThreadPoolBuilder::new().num_threads(1).build()?,
        })
    }

    fn run_loop(&mut self, read_loop: ReadLoop) -> Result<()> {
        match read_loop {
            ReadLoop::Raw if self.read_method == ReadMethod::ProcessVmReadv => self.read_raw_remote(),
            ReadLoop::Raw => self.read_raw_memory(),
            ReadLoop::Read => self.read_contents(false),
            ReadLoop::Hash => self.read_contents(true),
            ReadLoop::Census => self.take_census(),
        }
    }

    fn read_raw_remote(&mut self) -> Result<()> {
        let pid = nix::unistd::Pid::from_raw(self.pid.try_into()?);
        for offset in (0..self.bytes).step_by(BATCH_BYTES) {
            let remote = RemoteIoVec { base: self.address as usize + offset, len: BATCH_BYTES };
            let read = process_vm_readv(pid, &mut [IoSliceMut::new(self.buffer.as_mut_slice())], &[remote])?;
            ensure!(read == BATCH_BYTES, "a short read");
        }
        Ok(())
    }

    fn read_raw_memory(&mut self) -> Result<()> {
        for offset in (0..self.bytes).step_by(BATCH_BYTES) {
            self.memory.read_exact_at(self.buffer.as_mut_slice(), self.address + offset as u64)?;
        }
        Ok(())
    }

    fn read_contents(&self, with_hash: bool) -> Result<()> {
        let mut pages = 0;
        let mut sum = 0;
        self.process.contents(self.read_method, &self.runs, &mut |_, page| {
            let PageContent::Bytes(bytes) = page.content else { return };
            pages += 1;
            if with_hash {
                sum ^= self.hasher.fingerprint(bytes);
            }
        })?;
        black_box(sum);
        ensure!(pages * self.host.page_size().as_len() == self.bytes, "{pages} pages of {} bytes", self.bytes);
        Ok(())
    }

    fn take_census(&mut self) -> Result<()> {
        let (progress, stop) = (ScanProgress::default(), AtomicBool::new(false));
        let scan = Scan {
            host: self.host,
            scope: &self.survey,
            hasher: &self.hasher,
            nodes: None,
            progress: &progress,
            stop: &stop,
            sample: None,
            cache: None,
        };
        let index = &mut self.index;
        let failures = self.threads.install(|| scan.first_pass(index));
        ensure!(failures.is_empty(), "the census could not read all pages: {failures:?}");
        let read = usize::try_from(progress.bytes_read()).context("the number of bytes read")?;
        ensure!(read >= self.bytes, "{read} of {} bytes were read", self.bytes);
        Ok(())
    }
}
