//! How much of the rate of reading is left when what is read is also hashed, on one thread.
//!
//! Four loops over the memory of a child, one after the other in each round, beginning with another in each:
//!
//! - `raw`: bare system calls with the census's buffer size: no check of what is resident or shared, so no loop that a
//!   census may use. It shows what the checks cost.
//! - `read`: [`Process::contents`] with a sink that ignores the bytes: the baseline.
//! - `hash`: the same with a sink that takes the fingerprint.
//! - `census`: the census's first pass on one thread, which also writes the index. Only where the census reads this
//!   memory in the way of the case.

use crate::Effort;
use crate::report::{Bar, Findings, Spread, Table};
use crate::target::{Layout, Targets};
use anyhow::{Context, Result, ensure};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use pagefold_base::domain::DomainRule;
use pagefold_base::{AddressRange, Pid};
use pagefold_census::scan::{Progress, Scan};
use pagefold_census::{Index, Selection, survey};
use pagefold_host::{Host, PageContent, Process, Run, Way};
use pagefold_linux::{BATCH_BYTES, LiveHost};
use pagefold_sys::fingerprint::Hasher;
use pagefold_sys::mapping::Mapping;
use std::fs::File;
use std::hint::black_box;
use std::io::IoSliceMut;
use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// A way of reading, with the share of its rate that must remain.
struct Case {
    name: &'static str,
    huge: bool,
    way: Way,
    bar: Option<f64>,
}

const MEMORY: Way = Way::Memory { merged: false };

const CASES: [Case; 4] = [
    Case { name: "4 KiB pages, process_vm_readv", huge: false, way: Way::Remote, bar: Some(0.85) },
    Case { name: "4 KiB pages, /proc/PID/mem", huge: false, way: MEMORY, bar: Some(0.85) },
    Case { name: "huge pages, process_vm_readv", huge: true, way: Way::Remote, bar: Some(0.65) },
    Case { name: "huge pages, /proc/PID/mem", huge: true, way: MEMORY, bar: None },
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loop {
    Raw,
    Read,
    Hash,
    Census,
}

const LOOPS: [Loop; 4] = [Loop::Raw, Loop::Read, Loop::Hash, Loop::Census];

impl Loop {
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
pub fn measure(effort: Effort) -> Result<Findings> {
    let (bytes, rounds) = if effort.quick { (64 << 20, 3) } else { (1 << 30, 15) };
    let host = LiveHost::new();
    let mut findings = Findings::new("case,round,position,loop,bytes,seconds,cpu_seconds");
    let mut table = Table::new(
        format!("Rates on one thread, medians of {rounds} rounds of {} MiB", bytes >> 20),
        &["memory", "raw GB/s", "read GB/s", "hash GB/s", "census GB/s", "hash / read", "read / raw", "census / read"],
    );
    for case in CASES {
        let targets = Targets::start([Layout { bytes, huge: case.huge, seed: 1, ..Layout::default() }])?;
        let mut bench = Bench::new(&host, &targets, bytes, case.way)?;
        let mut samples: Vec<Vec<f64>> = vec![Vec::new(); LOOPS.len()];
        // The round before the first warms up and is not counted.
        for round in 0..=rounds {
            for position in 0..LOOPS.len() {
                let chosen = (position + round) % LOOPS.len();
                if LOOPS[chosen] == Loop::Census && case.way != Way::Remote {
                    continue;
                }
                let cpu = thread_cpu_seconds();
                let started = Instant::now();
                bench.run(LOOPS[chosen])?;
                let seconds = started.elapsed().as_secs_f64();
                let cpu = thread_cpu_seconds() - cpu;
                if round > 0 {
                    samples[chosen].push(seconds);
                    let name = LOOPS[chosen].name();
                    findings
                        .samples
                        .push(format!("\"{}\",{round},{position},{name},{bytes},{seconds:.6},{cpu:.6}", case.name));
                }
            }
        }
        let rate = |which: Loop| match samples[which as usize].as_slice() {
            [] => "-".to_owned(),
            seconds => format!("{:.1}", Spread::of(seconds.iter().map(|s| bytes as f64 / s / 1e9)).median),
        };
        // Of rates, so the other way round in seconds.
        let ratio = |a: Loop, b: Loop| {
            let pairs: Vec<f64> = samples[b as usize].iter().zip(&samples[a as usize]).map(|(b, a)| b / a).collect();
            (!pairs.is_empty()).then(|| Spread::of(pairs))
        };
        let percent = |ratio: Option<Spread>| ratio.map_or("-".to_owned(), Spread::percent);
        let hashing = ratio(Loop::Hash, Loop::Read);
        let mut row = vec![case.name.to_owned()];
        row.extend(LOOPS.map(rate));
        row.push(percent(hashing));
        row.push(percent(ratio(Loop::Read, Loop::Raw)));
        row.push(percent(ratio(Loop::Census, Loop::Read)));
        table.rows.push(row);
        if let (Some(bar), Some(hashing)) = (case.bar, hashing) {
            findings.bars.push(Bar {
                claim: format!("{}: hashing keeps at least {:.0} % of the rate of reading", case.name, bar * 100.0),
                measured: hashing.percent(),
                met: hashing.median >= bar,
            });
        }
    }
    let hasher = Hasher::random(host.page_size().as_len())?;
    table.notes.push(format!(
        "`raw` is system calls alone, `read` adds the checks that keep a census without a trace, `hash` adds the \
         fingerprint ({}), `census` adds the index. Ratios are medians of the ratios within rounds, with the least and \
         the greatest. Buffers of {} KiB.",
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

/// All that the loops over one process need, prepared.
struct Bench<'a> {
    host: &'a LiveHost,
    process: Box<dyn Process + 'a>,
    pid: u32,
    way: Way,
    address: u64,
    bytes: usize,
    runs: Vec<Run>,
    hasher: Hasher,
    buffer: Mapping,
    memory: File,
    survey: survey::Survey,
    index: Index,
    threads: rayon::ThreadPool,
}

impl<'a> Bench<'a> {
    fn new(host: &'a LiveHost, targets: &Targets, bytes: usize, way: Way) -> Result<Self> {
        let (pid, address) = (targets.pids()[0], targets.addresses()[0]);
        let process = host.open(Pid(pid))?;
        let runs = process.resident(&[AddressRange { start: address, end: address + bytes as u64 }])?;
        let selection = Selection { pids: vec![Pid(pid)], ..Selection::default() };
        let survey = survey::survey(host, &selection, &DomainRule::Host.into(), &[], None)?;
        let index = Index::list(host, &survey, false)?;
        Ok(Self {
            host,
            process,
            pid,
            way,
            address,
            bytes,
            runs,
            hasher: Hasher::random(host.page_size().as_len())?,
            buffer: Mapping::anonymous(BATCH_BYTES)?,
            memory: File::open(format!("/proc/{pid}/mem"))?,
            survey,
            index,
            threads: rayon::ThreadPoolBuilder::new().num_threads(1).build()?,
        })
    }

    fn run(&mut self, which: Loop) -> Result<()> {
        match which {
            Loop::Raw if self.way == Way::Remote => self.raw_remote(),
            Loop::Raw => self.raw_memory(),
            Loop::Read => self.contents(false),
            Loop::Hash => self.contents(true),
            Loop::Census => self.census(),
        }
    }

    fn raw_remote(&mut self) -> Result<()> {
        let pid = nix::unistd::Pid::from_raw(self.pid.try_into()?);
        for offset in (0..self.bytes).step_by(BATCH_BYTES) {
            let remote = RemoteIoVec { base: self.address as usize + offset, len: BATCH_BYTES };
            let read = process_vm_readv(pid, &mut [IoSliceMut::new(self.buffer.as_mut_slice())], &[remote])?;
            ensure!(read == BATCH_BYTES, "a short read");
        }
        Ok(())
    }

    fn raw_memory(&mut self) -> Result<()> {
        for offset in (0..self.bytes).step_by(BATCH_BYTES) {
            self.memory.read_exact_at(self.buffer.as_mut_slice(), self.address + offset as u64)?;
        }
        Ok(())
    }

    fn contents(&self, hash: bool) -> Result<()> {
        let mut pages = 0;
        let mut sum = 0;
        self.process.contents(self.way, &self.runs, &mut |_, page| {
            let PageContent::Bytes(bytes) = page.content else { return };
            pages += 1;
            if hash {
                sum ^= self.hasher.fingerprint(bytes);
            }
        })?;
        black_box(sum);
        ensure!(pages * self.host.page_size().as_len() == self.bytes, "{pages} pages of {} bytes", self.bytes);
        Ok(())
    }

    fn census(&mut self) -> Result<()> {
        let (progress, stop) = (Progress::default(), AtomicBool::new(false));
        let scan = Scan {
            host: self.host,
            survey: &self.survey,
            hasher: &self.hasher,
            nodes: None,
            progress: &progress,
            stop: &stop,
            sample: None,
            remembered: None,
        };
        let index = &mut self.index;
        let failures = self.threads.install(|| scan.first_pass(index));
        ensure!(failures.is_empty(), "not all was read: {failures:?}");
        let read = usize::try_from(progress.bytes_read()).context("bytes read")?;
        ensure!(read >= self.bytes, "{read} of {} bytes were read", self.bytes);
        Ok(())
    }
}
