//! Processes to be measured: children of this program that lay out memory and hold it still.
//!
//! A child is this very binary, started as `hold LAYOUT`. It says where its memory begins once that is filled, and ends
//! when its standard input does, so also when the benchmark is killed. Its content is that of a fleet or all unique;
//! see [`TargetLayout::judge_copies`]. Limits: children are filled one after the other.

use anyhow::{Context, Result, ensure};
use pagefold_sys::mapping::{Access, MadviseAdvice, Mapping, page_size};
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, BufReader, PipeReader, PipeWriter, Read};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// What a process holds.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct TargetLayout {
    /// Bytes of resident memory.
    pub bytes: usize,
    /// Whether it is backed by huge pages.
    pub huge: bool,
    /// Bytes of inaccessible address space beside it.
    pub empty: usize,
    /// Whether each of its pages is a region of its own.
    pub split: bool,
    /// Whether the content is a fleet's: of 16 pages, 2 hold zeros, 4 are the same in every process and 10 are unique.
    /// Otherwise all are unique.
    pub copies: bool,
    /// What makes unique content so: different for each process.
    pub seed: u64,
    /// What it does once that is filled.
    pub then: TargetActivity,
}

/// What a process does once its memory is filled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum TargetActivity {
    /// Nothing.
    #[default]
    Sleep,
    /// Run, and write nothing.
    Run,
    /// Write the first tenth of its memory anew, again and again.
    WriteTenth,
    /// Write a tenth of its memory anew, again and again, and each second another.
    WriteTenths,
    /// Write one page in so many anew, again and again.
    WriteEvery(usize),
}

/// How often in a second a process does it.
const TURNS_PER_SECOND: usize = 50;

impl TargetActivity {
    /// Do it for ever, in turns with some rest.
    fn run_forever(self, memory: &mut [u8]) -> ! {
        let pages = memory.len() / page_size();
        for turn in 1_u64.. {
            let written = match self {
                Self::Sleep | Self::Run => 0..0,
                Self::WriteTenth => 0..pages / 10,
                Self::WriteTenths => {
                    let tenth = turn as usize / TURNS_PER_SECOND % 10;
                    tenth * pages / 10..(tenth + 1) * pages / 10
                }
                Self::WriteEvery(_) => 0..pages,
            };
            let step = if let Self::WriteEvery(step) = self { step } else { 1 };
            for page in written.step_by(step) {
                memory[page * page_size()..][..8].copy_from_slice(&turn.to_ne_bytes());
            }
            std::thread::sleep(Duration::from_secs(1) / TURNS_PER_SECOND as u32);
        }
        unreachable!("turns do not end")
    }
}

/// The size of a huge page here, for alignment; more than needed does no harm.
const HUGE_PAGE_BYTES: usize = 2 << 20;

impl TargetLayout {
    fn fill(self, memory: &mut [u8]) {
        for (i, page) in memory.chunks_exact_mut(page_size()).enumerate() {
            let seed = match i % 16 {
                // Writing makes a page resident, also with zeros.
                0 | 1 if self.copies => {
                    page.fill(0);
                    continue;
                }
                2..6 if self.copies => 0,
                _ => self.seed + 1,
            };
            // A multiplicative generator (D. Knuth, "The Art of Computer Programming" 2, 3.2.1; multiplier and
            // increment of MMIX) begun at a number of its own for each page: it need only differ.
            let mut state = (seed << 40 ^ i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            for word in page.as_chunks_mut::<8>().0 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                *word = state.to_ne_bytes();
            }
        }
    }
}

/// Be a child: lay out memory, say where, and wait for the end of standard input.
pub fn run_target(layout: TargetLayout) -> Result<()> {
    // Should memory run short, what is held for a measurement goes first.
    std::fs::write("/proc/self/oom_score_adj", "1000").context("cannot offer to be killed first")?;
    // A census runs beside this process, not above it, and Yama lets only ancestors read unless one consents. A kernel
    // without Yama refuses the consent and needs none.
    let _ = rustix::process::set_ptracer(rustix::process::PTracer::Any);
    let _empty = match layout.empty {
        0 => None,
        bytes => Some(Mapping::reserve(bytes).context("cannot reserve address space")?),
    };
    let mut memory = Mapping::anonymous_aligned(layout.bytes, HUGE_PAGE_BYTES).context("cannot map memory")?;
    let advice = if layout.huge { MadviseAdvice::HugePage } else { MadviseAdvice::NoHugePage };
    memory.advise(0..memory.len(), advice).context("cannot choose the size of pages")?;
    layout.fill(memory.as_mut_slice());
    if layout.split {
        let page = page_size();
        for start in (page..memory.len()).step_by(2 * page) {
            memory.protect(start..start + page, Access::Read).context("cannot split regions")?;
        }
    }
    println!("{}", memory.address());
    let until_released = || io::stdin().read_to_end(&mut Vec::new());
    if layout.then == TargetActivity::Sleep {
        until_released()?;
        return Ok(());
    }
    std::thread::spawn(move || {
        let _ = until_released();
        std::process::exit(0)
    });
    layout.then.run_forever(memory.as_mut_slice())
}

/// Children that hold memory. Ended when dropped.
pub struct TargetProcesses {
    children: Vec<Child>,
    addresses: Vec<u64>,
    input: PipeReader,
    /// Kept open for as long as the children shall live.
    _exit_pipe: PipeWriter,
}

impl TargetProcesses {
    /// Start a child for each layout.
    pub fn start(layouts: impl IntoIterator<Item = TargetLayout>) -> Result<Self> {
        let (input, release) = io::pipe()?;
        let mut targets = Self { children: Vec::new(), addresses: Vec::new(), input, _exit_pipe: release };
        for layout in layouts {
            targets.start_target(layout)?;
        }
        Ok(targets)
    }

    fn start_target(&mut self, layout: TargetLayout) -> Result<()> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["hold", &serde_json::to_string(&layout)?])
            .stdin(self.input.try_clone()?)
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a process to measure")?;
        let output = child.stdout.take();
        self.children.push(child);
        let mut line = String::new();
        BufReader::new(output.context("the child has no output")?).read_line(&mut line)?;
        self.addresses.push(line.trim().parse().with_context(|| format!("a process to measure ended: {layout:?}"))?);
        if layout.huge {
            self.expect_huge_pages(layout.bytes)?;
        }
        Ok(())
    }

    /// What was asked for as huge pages must be so, or the figures would bear a wrong name.
    fn expect_huge_pages(&self, bytes: usize) -> Result<()> {
        let pid = self.pids().pop().context("no process")?;
        let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
        let kilobytes = rollup.lines().find_map(|line| {
            line.strip_prefix("AnonHugePages:")?.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()
        });
        let huge = kilobytes.unwrap_or(0) << 10;
        ensure!(huge >= bytes / 100 * 99, "only {huge} of {bytes} bytes are in huge pages: free memory is in pieces");
        Ok(())
    }

    /// Their numbers.
    pub fn pids(&self) -> Vec<u32> {
        self.children.iter().map(Child::id).collect()
    }

    /// Where the memory of each begins.
    pub fn addresses(&self) -> &[u64] {
        &self.addresses
    }
}

impl Drop for TargetProcesses {
    fn drop(&mut self) {
        // All are told before any is waited for: they unmap in parallel.
        for child in &mut self.children {
            let _ = child.kill();
        }
        for child in &mut self.children {
            let _ = child.wait();
        }
    }
}
