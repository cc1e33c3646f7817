//! Programs that are hostile to merging. One rewrites all its memory all the time. One leaves its memory unchanged for
//! just as long as the daemon needs to merge it. Three have huge pages; for two of these merging is profitable. One
//! forks all the time. One has 60,000 regions without profit, and two have a thousand profitable regions. Two
//! well-behaved programs run beside them.
//!
//! Programs that answer with a checksum, or verify their own computation, show that their memory is intact. The
//! contents of the others are counted from outside. COW breaks are counted page by page in page tables: the kernel's
//! `cow_ksm` also counts the writes of forked children, whose parent keeps its merged page.

use super::driver::KsmDriver;
use super::guest;
use crate::findings::{Findings, MarkdownTable, ThresholdCheck};
use crate::merge::mergeable_pages::{self, ContentCounts};
use crate::merge::running_program::{RunningProgram, command_through_hold};
use crate::merge::trial::sleep_unless_signaled;
use anyhow::{Context, Result, ensure};
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_linux::LiveHost;
use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// The bound for the daemon: a share of one core on average.
const DAEMON_CPU_RATE: f64 = 0.1;

/// CPU seconds by which the daemon may exceed its bound. Work in progress is stopped at the next check, and ends where
/// it can. The kernel needs a second to list 60,000 regions, and one task lists them more than once.
const MAX_CPU_OVERRUN_SECONDS: f64 = 5.0;

/// The CPU price of a saved MiB in a brief run, in CPU seconds. An unoptimized census on a slow machine costs several
/// times as much as an optimized one.
const BRIEF_RUN_CPU_SECONDS_PER_MIB: f64 = 0.05;

/// Memory of each thread of the writer, in MiB.
const WRITER_THREAD_MIB: u64 = 16;

/// How often a page may be merged and broken at most before the daemon stops merging it.
const MAX_COW_BREAKS_PER_PAGE: u64 = 3;

/// Memory of each program whose pages are shareable in part or in full, in MiB.
const SHARING_PROGRAM_MIB: u64 = 64;

/// A program that forks: its children inherit all its memory, write memory of their own, and exit.
const FORKER_PERL: &str = r#"$| = 1;
my $held = join "", map { pack("N", $_ % 64) . ("x" x 4092) } 1 .. 6144;
print "READY\n";
my ($forks, $in) = (0, "");
while (1) {
    vec(my $ready = "", fileno(STDIN), 1) = 1;
    if (select($ready, undef, undef, 0.02)) {
        exit 0 unless sysread(STDIN, $in, 100);
        print unpack("%32N*", $held), " after some forks\n";
    }
    my $child = fork;
    die "fork: $!" unless defined $child;
    if (!$child) { my $own = "made" x 1000000; exit 0 }
    waitpid $child, 0;
}
"#;

/// Programs with a unique name prefix, so that the daemon manages only these.
pub struct ProgramFolder {
    folder: tempfile::TempDir,
    name_prefix: String,
    enrolled: bool,
}

impl ProgramFolder {
    /// A folder for programs with this name prefix.
    pub fn new(name: &str) -> Result<Self> {
        Ok(Self { folder: tempfile::tempdir()?, name_prefix: format!("{name}{}", std::process::id()), enrolled: false })
    }

    /// The same folder, with all memory of the programs started there enrolled from the start, or not.
    pub fn with_enrollment(self, enrolled: bool) -> Self {
        Self { enrolled, ..self }
    }

    /// Start a program of the lab, and wait until it is ready.
    pub fn start_lab(&self, kind: char, arguments: &[&str]) -> Result<RunningProgram> {
        self.start_program(&pagefold_labs::client::lab_binary()?, kind, arguments)
    }

    fn start_program(&self, program: &Path, kind: char, arguments: &[&str]) -> Result<RunningProgram> {
        // The kernel names a process after the file that it was started from.
        let name = self.folder.path().join(format!("{}{kind}", self.name_prefix));
        if !name.exists() {
            std::os::unix::fs::symlink(program, &name)?;
        }
        let mut command = command_through_hold(name, self.enrolled)?;
        command.args(arguments).stderr(Stdio::inherit());
        let mut process = RunningProgram::start(command)?;
        process.wait_until_ready()?;
        Ok(process)
    }

    /// The configuration of a daemon that manages these programs and those named in `others`, with additional lines in
    /// its section.
    pub fn daemon_config(&self, section: &str, others: &[&str]) -> String {
        let own_pattern = format!("{}*", self.name_prefix);
        let names: Vec<&str> = others.iter().copied().chain([own_pattern.as_str()]).collect();
        format!("[daemon]\n{section}\n[daemon.tracked]\nnames = {names:?}\n")
    }
}

/// The hostile workload.
#[derive(Clone, Debug)]
pub struct HostileMixBenchmark {
    /// Duration of the run.
    pub duration: Duration,
    /// Whether the run ends as soon as all profitable pages are merged and a periodically rewritten page was merged and
    /// broken once. How soon that is depends on the machine.
    pub is_brief: bool,
    /// Regions of the program with many regions.
    pub region_count: u64,
    /// Threads of the writer. If they leave no CPU idle, the daemon pauses again and again.
    pub writer_threads: u64,
    /// CPU time that the daemon's token bucket holds at most.
    pub burst: Duration,
    /// The interval between two rewrites by the periodic writer. In a brief run, a rewrite also waits for a merge.
    pub rewrite_interval: Duration,
    /// The pagefold binary.
    pub pagefold: PathBuf,
}

/// How the memory of a program is checked for changes.
enum IntegrityCheck {
    /// The program answers with a checksum.
    Checksum(String),
    /// The contents of its pages are counted from outside.
    Contents(ContentCounts),
    /// The program verifies its own computation, and exits if a result is wrong.
    SelfChecked,
}

struct HostileProgram {
    name: &'static str,
    process: RunningProgram,
    integrity: IntegrityCheck,
}

impl HostileProgram {
    fn with_checksum(name: &'static str, mut process: RunningProgram) -> Result<Self> {
        let integrity = IntegrityCheck::Checksum(process.query("checksum")?);
        Ok(Self { name, process, integrity })
    }

    fn with_contents(name: &'static str, process: RunningProgram) -> Result<Self> {
        let integrity = IntegrityCheck::Contents(count_contents(&process)?);
        Ok(Self { name, process, integrity })
    }

    /// Check that the program is running and its memory is unchanged.
    fn check_integrity(&mut self) -> Result<()> {
        self.process.check_alive()?;
        match &self.integrity {
            IntegrityCheck::Checksum(before) => {
                let current = self.process.query("checksum")?;
                ensure!(current == *before, "its memory has changed: checksum {current} instead of {before}");
            }
            IntegrityCheck::Contents(before) => {
                let current = count_contents(&self.process)?;
                let is_lost =
                    |(content, copies): &(&_, &_)| current.get(*content).is_none_or(|current| current < *copies);
                let lost = before.iter().filter(is_lost).count();
                ensure!(lost == 0, "{lost} of {} page contents have changed", before.len());
            }
            IntegrityCheck::SelfChecked => {}
        }
        Ok(())
    }
}

/// The page contents of a program, with their number of copies.
fn count_contents(process: &RunningProgram) -> Result<ContentCounts> {
    let mut contents = ContentCounts::new();
    mergeable_pages::add_process(process.pid(), &mut contents)?;
    // A few pages belong to the program itself and not to the layout.
    contents.retain(|_, copies| *copies > 1);
    Ok(contents)
}

/// The running programs.
struct HostileMix(Vec<HostileProgram>);

const MANY_REGIONS_PROGRAM: &str = "regions of one page";
const PERIODIC_WRITER_PROGRAM: &str = "rewrites its memory now and then";
const HUGE_PAGES_PROGRAM: &str = "huge pages";
const SMALL_REGIONS_PROGRAM: &str = "regions of 16 pages";
const PLAIN_PROGRAM: &str = "honest";

/// Pages that a program shares with the other one of its name, if merging them is profitable.
fn shareable_pages(name: &str) -> Option<u64> {
    let total = (SHARING_PROGRAM_MIB << 20) / pagefold_sys::mapping::page_size() as u64;
    match name {
        SMALL_REGIONS_PROGRAM => Some(total),
        HUGE_PAGES_PROGRAM | PLAIN_PROGRAM => Some(total / 2),
        _ => None,
    }
}

impl HostileMix {
    fn start(folder: &ProgramFolder, hostile: &HostileMixBenchmark) -> Result<Self> {
        let sharing = SHARING_PROGRAM_MIB.to_string();
        let mixture = |kind, more: &[&str]| folder.start_lab(kind, &[&["mixture", "--mib", &sharing], more].concat());
        let layout = |kind, more: &[&str]| folder.start_lab(kind, &[&["layout"], more].concat());
        let (threads, memory) = (hostile.writer_threads.to_string(), WRITER_THREAD_MIB.to_string());
        let (regions, interval) =
            (format!("within={}", hostile.region_count), hostile.rewrite_interval.as_millis().to_string());
        let huge = ["--huge", "--run-pages", "512"];
        let stray = [&huge[..], &["--duplicate-share", "6%", "--stray-share", "45%", "--seed", "stray"]].concat();
        let profitable = [&huge[..], &["--duplicate-share", "50%", "--seed", "huge"]].concat();
        let pages = shareable_pages(SMALL_REGIONS_PROGRAM).unwrap_or_default();
        let (content, region_count) = (format!("shared-content=pieces:{pages}"), (pages / 16).to_string());
        let pieces = [content.as_str(), "--regions", &region_count];
        // On a slow machine a merge may take longer than the interval, and would never succeed.
        let await_merge: &[&str] = if hostile.is_brief { &["--await-merge"] } else { &[] };
        let periodic = [&["rewritten-text=16384", "--interval", &interval][..], await_merge].concat();
        let writer = folder.start_lab('w', &["busy", "--threads", &threads, "--memory", &memory])?;
        let forker = folder.start_program(Path::new("/usr/bin/perl"), 'f', &["-e", FORKER_PERL])?;
        Ok(Self(vec![
            HostileProgram { name: "rewrites all its memory", process: writer, integrity: IntegrityCheck::SelfChecked },
            HostileProgram::with_contents(PERIODIC_WRITER_PROGRAM, layout('t', &periodic)?)?,
            HostileProgram::with_checksum("huge pages without profit", mixture('s', &stray)?)?,
            HostileProgram::with_checksum(HUGE_PAGES_PROGRAM, mixture('h', &profitable)?)?,
            HostileProgram::with_checksum(HUGE_PAGES_PROGRAM, mixture('h', &profitable)?)?,
            HostileProgram::with_checksum("forks", forker)?,
            HostileProgram::with_contents(MANY_REGIONS_PROGRAM, layout('r', &[&regions, "--fragment"])?)?,
            HostileProgram::with_contents(SMALL_REGIONS_PROGRAM, layout('p', &pieces)?)?,
            HostileProgram::with_contents(SMALL_REGIONS_PROGRAM, layout('p', &pieces)?)?,
            HostileProgram::with_checksum(PLAIN_PROGRAM, mixture('b', &["--duplicate-share", "50%"])?)?,
            HostileProgram::with_checksum(PLAIN_PROGRAM, mixture('b', &["--duplicate-share", "50%"])?)?,
        ]))
    }

    /// Check that all programs are running and their memory is unchanged.
    fn check_integrity(&mut self) -> Result<()> {
        self.0.iter_mut().try_for_each(|program| program.check_integrity().context(program.name))
    }

    /// Merged pages of each program, including zeros. They come from page tables where these were walked: the kernel
    /// counts broken pages as merged until ksmd visits them again.
    fn merged_pages_by_program(&self, breaks: &CowBreakTracker) -> Result<Vec<(&'static str, u64)>> {
        let merged_pages = |(number, program): (usize, &HostileProgram)| {
            let mapped_pages = breaks.merged_addresses[number].len() as u64;
            Ok((
                program.name,
                if program.name == MANY_REGIONS_PROGRAM {
                    count_merged_pages(program.process.pid())?
                } else {
                    mapped_pages
                },
            ))
        };
        self.0.iter().enumerate().map(merged_pages).collect()
    }
}

/// Merged pages of a process, including zeros, by the kernel's counters: `ksm_merging_pages`, which excludes zeros,
/// plus `ksm_zero_pages`.
pub(super) fn count_merged_pages(pid: u32) -> Result<u64> {
    let number = |text: &str| text.trim().parse::<u64>().unwrap_or(0);
    let stat = fs::read_to_string(format!("/proc/{pid}/ksm_stat"))?;
    let zeros = stat.lines().find_map(|line| line.strip_prefix("ksm_zero_pages ")).map_or(0, number);
    Ok(number(&fs::read_to_string(format!("/proc/{pid}/ksm_merging_pages"))?) + zeros)
}

/// Writes to merged pages so far (`cow_ksm` of `/proc/vmstat`).
fn read_cow_breaks() -> Result<u64> {
    let vmstat = fs::read_to_string("/proc/vmstat")?;
    let line = vmstat.lines().find_map(|line| line.strip_prefix("cow_ksm ")).context("no cow_ksm in /proc/vmstat")?;
    line.trim().parse().context("cow_ksm")
}

/// Pages that were merged and no longer are, by the number of the program.
#[derive(Default)]
struct CowBreakTracker {
    merged_addresses: Vec<HashSet<u64>>,
    break_counts: HashMap<(usize, u64), u64>,
}

impl CowBreakTracker {
    /// Update which pages are merged now. Programs with 60,000 regions are left out: the walk takes too long, and these
    /// are never written.
    fn update(&mut self, host: &LiveHost, mix: &HostileMix) -> Result<()> {
        self.merged_addresses.resize(mix.0.len(), HashSet::new());
        for (position, program) in mix.0.iter().enumerate().filter(|(_, program)| program.name != MANY_REGIONS_PROGRAM)
        {
            let addresses = guest::merged_addresses(host, program.process.pid()).context(program.name)?;
            for &page in self.merged_addresses[position].difference(&addresses) {
                *self.break_counts.entry((position, page)).or_default() += 1;
            }
            self.merged_addresses[position] = addresses;
        }
        Ok(())
    }

    /// How many pages broke once, twice, and so on, in the programs with these numbers.
    fn pages_by_break_count(&self, is_included: impl Fn(usize) -> bool) -> Vec<u64> {
        let mut pages = Vec::new();
        for (_, &breaks) in self.break_counts.iter().filter(|((position, _), _)| is_included(*position)) {
            pages.resize(pages.len().max(breaks as usize), 0);
            pages[breaks as usize - 1] += 1;
        }
        pages
    }
}

/// How many pages broke once, twice, and so on.
struct CowBreakHistogram {
    /// Pages of all programs.
    all_programs: Vec<u64>,
    /// Pages of the periodic writer.
    periodic_writer: Vec<u64>,
}

/// How many pages of the periodic writer broke once, twice, and so on.
fn periodic_writer_breaks(breaks: &CowBreakTracker, mix: &HostileMix) -> Vec<u64> {
    breaks.pages_by_break_count(|number| mix.0[number].name == PERIODIC_WRITER_PROGRAM)
}

/// The profitable program with the smallest merged share of its shareable pages: its name, merged pages, shareable
/// pages.
fn least_merged_program(merged: &[(&'static str, u64)]) -> Option<(&'static str, u64, u64)> {
    let profitable = merged.iter().filter_map(|&(name, pages)| Some((name, pages, shareable_pages(name)?)));
    profitable.min_by(|(_, left_pages, left_shareable), (_, right_pages, right_shareable)| {
        (left_pages * right_shareable).cmp(&(right_pages * left_shareable))
    })
}

/// Whether nine tenths of the shareable pages of each program are merged.
fn are_all_merged(merged: &[(&'static str, u64)]) -> bool {
    least_merged_program(merged).is_none_or(|(_, pages, shared)| pages * 10 >= shared * 9)
}

struct HostileSample {
    seconds: f64,
    cpu_seconds: f64,
    cow_breaks: u64,
    merged_pages: Vec<(&'static str, u64)>,
}

impl HostileMixBenchmark {
    /// Run the measurement. It reserves KSM meanwhile.
    pub fn measure(&self, log: &Path) -> Result<Findings> {
        let ksm = KsmTestGuard::acquire().map_err(anyhow::Error::msg)?;
        let folder = ProgramFolder::new("pfhost")?;
        let mut mix = HostileMix::start(&folder, self)?;
        let burst = self.burst.as_secs();
        let merge_cost = if self.is_brief {
            format!("\nmax_cpu_seconds_per_mib = {BRIEF_RUN_CPU_SECONDS_PER_MIB}")
        } else {
            String::new()
        };
        let section = format!("cpu_rate = \"{}%\"\ncpu_burst = \"{burst}s\"{merge_cost}", DAEMON_CPU_RATE * 100.0);
        let driver = KsmDriver::start_daemon(&self.pagefold, &folder.daemon_config(&section, &[]), log, &ksm)?;
        let (host, mut breaks) = (LiveHost::new(), CowBreakTracker::default());
        let (start, before) = (Instant::now(), read_cow_breaks()?);
        let mut samples: Vec<HostileSample> = Vec::new();
        while start.elapsed() < self.duration {
            sleep_unless_signaled(Duration::from_millis(500))?;
            let (seconds, cpu) = (start.elapsed().as_secs_f64(), driver.read_cpu_seconds()?.total());
            breaks.update(&host, &mix)?;
            samples.push(HostileSample {
                seconds,
                cpu_seconds: cpu,
                cow_breaks: read_cow_breaks()? - before,
                merged_pages: mix.merged_pages_by_program(&breaks)?,
            });
            let has_expected_breaks = periodic_writer_breaks(&breaks, &mix).len() >= self.min_expected_breaks();
            if self.is_brief
                && has_expected_breaks
                && samples.last().is_some_and(|last| are_all_merged(&last.merged_pages))
            {
                break;
            }
        }
        let status = driver.as_daemon().context("a daemon")?.read_status()?;
        driver.stop()?;
        let integrity = mix.check_integrity();
        let histogram = CowBreakHistogram {
            all_programs: breaks.pages_by_break_count(|_| true),
            periodic_writer: periodic_writer_breaks(&breaks, &mix),
        };
        Ok(self.build_findings(&samples, &histogram, &status, integrity))
    }

    /// How often a page must have broken at least to show that it was merged again after a write.
    fn min_expected_breaks(&self) -> usize {
        if self.is_brief { 1 } else { 2 }
    }

    fn build_findings(
        &self,
        samples: &[HostileSample],
        breaks: &CowBreakHistogram,
        status: &serde_json::Value,
        integrity: Result<()>,
    ) -> Findings {
        let mut findings = Findings::new("seconds,cpu_seconds,broken_pages,merged_pages_of_each");
        for HostileSample { seconds, cpu_seconds: cpu, cow_breaks: sample_breaks, merged_pages: merged } in samples {
            let merged: Vec<String> = merged.iter().map(|(_, pages)| pages.to_string()).collect();
            findings.samples.push(format!("{seconds:.1},{cpu:.3},{sample_breaks},{}", merged.join(" ")));
        }
        let Some(last) = samples.last() else { return findings };
        let mut table =
            MarkdownTable::new(format!("After {:.0} s", last.seconds), &["program", "merged pages", "at most"]);
        for (position, (name, pages)) in last.merged_pages.iter().enumerate() {
            let max_pages = samples.iter().map(|sample| sample.merged_pages[position].1).max().unwrap_or(0);
            table.rows.push(vec![(*name).to_owned(), pages.to_string(), max_pages.to_string()]);
        }
        findings.tables.push(table);
        let burst = self.burst.as_secs_f64();
        let worst = max_cpu_overrun(samples.iter().map(|sample| (sample.seconds, sample.cpu_seconds))) - burst;
        let mut add_check =
            |claim: String, measured: String, met: bool| findings.checks.push(ThresholdCheck { claim, measured, met });
        add_check(
            format!(
                "CPU at most {:.0} % of any interval plus the burst of {burst} s, with an overrun of at most \
                 {MAX_CPU_OVERRUN_SECONDS} s",
                DAEMON_CPU_RATE * 100.0
            ),
            format!("{worst:+.2} s at worst, {:.2} s in {:.0} s", last.cpu_seconds, last.seconds),
            worst <= MAX_CPU_OVERRUN_SECONDS,
        );
        let measured = match &integrity {
            Ok(()) => "all run, with unchanged memory".to_owned(),
            Err(error) => format!("{error:#}"),
        };
        add_check("no program exits, and no program's memory changes".to_owned(), measured, integrity.is_ok());
        let failed = status["decisions_by_reason"]["failed"].as_u64().unwrap_or(0);
        add_check("no merge fails".to_owned(), format!("{failed} times"), failed == 0);
        let min_breaks = self.min_expected_breaks();
        let events = if min_breaks > 1 { "broken, merged again and broken again" } else { "merged and broken" };
        add_check(
            format!(
                "a page of the program that {PERIODIC_WRITER_PROGRAM} is {events}, and no page of any program is \
                 merged and broken more than {MAX_COW_BREAKS_PER_PAGE} times"
            ),
            format!(
                "its pages by breaks (once, twice, ...): {}; of all programs: {}; cow_ksm, forks included: {}",
                format_break_counts(&breaks.periodic_writer),
                format_break_counts(&breaks.all_programs),
                last.cow_breaks
            ),
            breaks.periodic_writer.len() >= min_breaks && breaks.all_programs.len() as u64 <= MAX_COW_BREAKS_PER_PAGE,
        );
        if let Some((name, pages, shared)) = least_merged_program(&last.merged_pages) {
            add_check(
                "nine tenths of the shareable pages of each profitable program are merged at the end".to_owned(),
                format!(
                    "at least {:.1} %: {pages} of {shared} pages of one of {name:?}",
                    pages as f64 / shared as f64 * 100.0
                ),
                are_all_merged(&last.merged_pages),
            );
        }
        findings
    }
}

fn format_break_counts(pages: &[u64]) -> String {
    let pages: Vec<String> = pages.iter().map(u64::to_string).collect();
    if pages.is_empty() { "none".to_owned() } else { pages.join(", ") }
}

/// The largest excess of CPU time over the bound, over any interval. Readings are (seconds, CPU seconds) since the
/// start.
fn max_cpu_overrun(readings: impl Iterator<Item = (f64, f64)>) -> f64 {
    let (mut min_excess, mut max_overrun) = (0.0_f64, f64::NEG_INFINITY);
    for (seconds, cpu) in readings {
        let excess = cpu - DAEMON_CPU_RATE * seconds;
        max_overrun = max_overrun.max(excess - min_excess);
        min_excess = min_excess.min(excess);
    }
    max_overrun
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn burst_after_idle_time_counts_by_itself() {
        let most = |readings: &[(f64, f64)]| (max_cpu_overrun(readings.iter().copied()) * 1e3).round() / 1e3;
        assert_eq!(most(&[(1.0, 0.5), (2.0, 0.5)]), 0.4, "the excess of the first second");
        // From 100 s to 102 s, although it is below the bound since the start.
        assert_eq!(most(&[(100.0, 0.0), (102.0, 2.0), (103.0, 2.0)]), 1.8);
    }

    /// Whether the checks pass where so many pages broke once, twice and so on, in a brief run or a full one, with all
    /// profitable pages merged except in one program, which has so many merged pages.
    fn evaluate_thresholds(brief: bool, tide: &[u64], all: &[u64], (name, pages): (&'static str, u64)) -> Vec<bool> {
        let [length, burst, interval] = [600, 5, 10].map(Duration::from_secs);
        let hostile = HostileMixBenchmark {
            duration: length,
            is_brief: brief,
            region_count: 1,
            writer_threads: 1,
            burst,
            rewrite_interval: interval,
            pagefold: PathBuf::new(),
        };
        let names = [HUGE_PAGES_PROGRAM, SMALL_REGIONS_PROGRAM, PLAIN_PROGRAM, PERIODIC_WRITER_PROGRAM];
        let mut merged: Vec<_> = names.iter().map(|&name| (name, shareable_pages(name).unwrap_or(0))).collect();
        merged.push((name, pages));
        let samples = [HostileSample { seconds: 600.0, cpu_seconds: 1.0, cow_breaks: 0, merged_pages: merged }];
        let breaks = CowBreakHistogram { all_programs: all.to_vec(), periodic_writer: tide.to_vec() };
        let found = hostile.build_findings(&samples, &breaks, &serde_json::json!({}), Ok(()));
        found.checks.iter().map(|bar| bar.met).collect()
    }

    #[test]
    fn periodic_writer_must_break_repeatedly() {
        let bar = |brief, tide: &[u64], all: &[u64]| evaluate_thresholds(brief, tide, all, (PLAIN_PROGRAM, 1 << 14))[3];
        assert!(bar(true, &[7], &[7]), "a brief run shows only one merge and one write");
        assert!(!bar(false, &[7], &[7]), "in a full run it is merged again");
        assert!(bar(false, &[0, 7], &[3, 7, 1]));
        assert!(!bar(false, &[7], &[7, 7]), "the page that broke belongs to another program");
        assert!(!bar(true, &[], &[7]));
        assert!(!bar(false, &[0, 7], &[0, 7, 0, 1]), "a page of another program breaks once too often");
    }

    #[test]
    fn every_profitable_program_must_be_merged() {
        let bar = |name, pages| evaluate_thresholds(true, &[7], &[7], (name, pages))[4];
        for name in [HUGE_PAGES_PROGRAM, SMALL_REGIONS_PROGRAM, PLAIN_PROGRAM] {
            let shared = shareable_pages(name).unwrap();
            assert!(bar(name, (shared * 9).div_ceil(10)), "{name}");
            assert!(!bar(name, shared * 9 / 10 - 1), "{name}: only the other program of that name is merged");
        }
        assert!(bar(MANY_REGIONS_PROGRAM, 0), "an unprofitable program may stay unmerged");
    }

    #[test]
    fn least_merged_program_is_named() {
        let [huge, pieces] = [HUGE_PAGES_PROGRAM, SMALL_REGIONS_PROGRAM].map(|name| shareable_pages(name).unwrap());
        let merged = [
            (HUGE_PAGES_PROGRAM, huge / 2),
            (MANY_REGIONS_PROGRAM, 0),
            (SMALL_REGIONS_PROGRAM, huge / 2 + 1),
            (PLAIN_PROGRAM, huge),
        ];
        assert_eq!(
            least_merged_program(&merged),
            Some((SMALL_REGIONS_PROGRAM, huge / 2 + 1, pieces)),
            "compared by share, not by number of pages"
        );
        assert_eq!(least_merged_program(&[(MANY_REGIONS_PROGRAM, 0)]), None);
    }

    #[test]
    fn breaks_are_counted_by_program() {
        let times = HashMap::from([((0, 1), 1), ((0, 2), 3), ((1, 1), 1)]);
        let breaks = CowBreakTracker { merged_addresses: Vec::new(), break_counts: times };
        assert_eq!(
            (breaks.pages_by_break_count(|_| true), breaks.pages_by_break_count(|number| number == 1)),
            (vec![2, 0, 1], vec![1])
        );
    }
}
