//! Processes to scan: children of this program that fill memory and keep it unchanged.
//!
//! A child is this binary, started as `hold LAYOUT`. It prints the address of its memory once the memory is filled. It
//! exits when its standard input closes, so also when the benchmark is killed. The content is that of a guest fleet or
//! all unique; see [`TargetLayout::copies`]. Children are filled one after the other.

use anyhow::{Context, Result, ensure};
use pagefold_sys::mapping::{Access, MadviseAdvice, Mapping, page_size};
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, BufReader, PipeReader, PipeWriter, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The memory layout of a process.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct TargetLayout {
    /// Bytes of resident memory.
    pub bytes: usize,
    /// Whether huge pages back it.
    pub huge: bool,
    /// Bytes of inaccessible address space beside it.
    pub empty: usize,
    /// Whether each of its pages is a separate region.
    pub split: bool,
    /// Whether the content is that of a fleet: of 16 pages, 2 hold zeros, 4 are the same in every process and 10 are
    /// unique. Otherwise all pages are unique.
    pub copies: bool,
    /// The seed of the unique content: different for each process.
    pub seed: u64,
    /// Idle threads with the names of QEMU's virtual CPUs.
    pub vcpus: u32,
    /// The activity after the memory is filled.
    pub then: TargetActivity,
}

/// The activity of a process after its memory is filled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum TargetActivity {
    /// Nothing.
    #[default]
    Sleep,
    /// Run, and write nothing.
    Run,
    /// Rewrite the first tenth of its memory, again and again.
    WriteTenth,
    /// Rewrite a tenth of its memory, again and again; each second another tenth.
    WriteTenths,
    /// Rewrite one page in this many, again and again.
    WriteEvery(usize),
}

/// How often per second a process performs its activity.
const TURNS_PER_SECOND: usize = 50;

impl TargetActivity {
    /// Perform the activity for ever, with a pause in each turn.
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
        unreachable!("the loop does not end")
    }
}

/// The huge page size, for alignment. A larger alignment than needed does no harm.
const HUGE_PAGE_BYTES: usize = 2 << 20;

impl TargetLayout {
    fn fill(self, memory: &mut [u8]) {
        for (i, page) in memory.chunks_exact_mut(page_size()).enumerate() {
            let seed = match i % 16 {
                // A write makes a page resident, also a write of zeros.
                0 | 1 if self.copies => {
                    page.fill(0);
                    continue;
                }
                2..6 if self.copies => 0,
                _ => self.seed + 1,
            };
            // A multiplicative generator (D. Knuth, "The Art of Computer Programming" 2, 3.2.1; multiplier and
            // increment of MMIX), with a separate seed for each page: pages need only differ.
            let mut state = (seed << 40 ^ i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            for word in page.as_chunks_mut::<8>().0 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                *word = state.to_ne_bytes();
            }
        }
    }
}

/// Run as a child: fill memory, print its address, and wait for the end of standard input.
pub fn run_target(layout: TargetLayout) -> Result<()> {
    // If memory runs short, the OOM killer takes these processes first.
    std::fs::write("/proc/self/oom_score_adj", "1000").context("cannot write /proc/self/oom_score_adj")?;
    // A census is no ancestor of this process, and Yama lets only ancestors read unless the process consents. A kernel
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
    for vcpu in 0..layout.vcpus {
        let thread = std::thread::Builder::new().name(format!("CPU {vcpu}/KVM"));
        thread.spawn(|| {
            loop {
                std::thread::park();
            }
        })?;
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

/// Children that hold memory. They end when this is dropped.
pub struct TargetProcesses {
    children: Vec<Child>,
    addresses: Vec<u64>,
    input: PipeReader,
    /// Stays open as long as the children are to live.
    _exit_pipe: PipeWriter,
}

impl TargetProcesses {
    /// Start a child for each layout.
    pub fn start(layouts: impl IntoIterator<Item = TargetLayout>) -> Result<Self> {
        let program = std::env::current_exe()?;
        Self::start_as(&program, layouts.into_iter().map(|layout| (layout, Vec::new())))
    }

    /// Start targets by another path of this binary, with further arguments that they ignore: what other programs see.
    pub fn start_as(program: &Path, targets: impl IntoIterator<Item = (TargetLayout, Vec<String>)>) -> Result<Self> {
        let (input, release) = io::pipe()?;
        let mut started = Self { children: Vec::new(), addresses: Vec::new(), input, _exit_pipe: release };
        for (layout, arguments) in targets {
            started.start_target(program, layout, &arguments)?;
        }
        Ok(started)
    }

    fn start_target(&mut self, program: &Path, layout: TargetLayout, arguments: &[String]) -> Result<()> {
        let mut child = Command::new(program)
            .args(["hold", &serde_json::to_string(&layout)?])
            .args(arguments)
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

    /// Check that memory requested as huge pages is in huge pages; otherwise the figures would be mislabeled.
    fn expect_huge_pages(&self, bytes: usize) -> Result<()> {
        let pid = self.pids().pop().context("no process")?;
        let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
        let kilobytes = rollup.lines().find_map(|line| {
            line.strip_prefix("AnonHugePages:")?.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()
        });
        let huge = kilobytes.unwrap_or(0) << 10;
        ensure!(huge >= bytes / 100 * 99, "only {huge} of {bytes} bytes are in huge pages: free memory is fragmented");
        Ok(())
    }

    /// The process IDs of the children.
    pub fn pids(&self) -> Vec<u32> {
        self.children.iter().map(Child::id).collect()
    }

    /// The start address of each child's memory.
    pub fn addresses(&self) -> &[u64] {
        &self.addresses
    }
}

impl Drop for TargetProcesses {
    fn drop(&mut self) {
        // All children are asked to end before the wait for the first: they unmap in parallel.
        for child in &mut self.children {
            let _ = child.kill();
        }
        for child in &mut self.children {
            let _ = child.wait();
        }
    }
}
