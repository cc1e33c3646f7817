//! Programs that make it hard: one writes all its memory anew all the time, one leaves it alone for just so long that
//! it is merged, three have huge pages, of which two pay, one forks all the time, one has 60,000 regions that do not
//! pay and two a thousand that do. Beside them are two that are merged as they should be.
//!
//! That they are intact they tell themselves, where they answer with a checksum or check what they compute; of the
//! others the contents are counted from outside. What is broken after it was merged is seen page by page in their page
//! tables: the kernel's `cow_ksm` counts what children of a fork write, too, whose parent keeps its merge.

use super::driver::Driver;
use super::guest;
use crate::merge::holder::{Holder, held};
use crate::merge::trial::pause_for;
use crate::merge::truth::{self, Contents};
use crate::report::{Bar, Findings, Table};
use anyhow::{Context, Result, ensure};
use pagefold_labs::ksm::Ksm;
use pagefold_linux::LiveHost;
use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// The bound that the daemon is given: a share of one core on average.
const CPU: f64 = 0.1;

/// CPU seconds by which it may go beyond: what is under way is told to end at the next look, and ends where it can. To
/// be told of 60,000 regions takes the kernel a second, and a piece of work asks more than once.
const BEYOND: f64 = 5.0;

/// What a MiB may cost in CPU seconds where the run is brief: a census built without optimisation, on a slow machine,
/// costs several times what it does otherwise.
const BRIEF_PRICE: f64 = 0.05;

/// Memory that each thread of the one that writes has, in MiB.
const WRITTEN: u64 = 16;

/// How often a page may be merged and broken before it is left alone, at most.
const STRIKES: u64 = 3;

/// Memory of each program of which a part or all is shared, in MiB.
const SHARING: u64 = 64;

/// A program that forks: its children have all that it holds, write memory of their own, and end.
const FORKER: &str = r#"$| = 1;
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

/// Programs under a name that nobody else has, so that the daemon manages these alone.
pub struct Place {
    folder: tempfile::TempDir,
    name: String,
    enrolled: bool,
}

impl Place {
    /// With names that begin so.
    pub fn new(name: &str) -> Result<Self> {
        Ok(Self { folder: tempfile::tempdir()?, name: format!("{name}{}", std::process::id()), enrolled: false })
    }

    /// The same, but with all memory of those that are started there enrolled from their beginning, or not.
    pub fn enrolled(self, enrolled: bool) -> Self {
        Self { enrolled, ..self }
    }

    /// A program of the lab of a kind, once it is ready.
    pub fn lab(&self, kind: char, arguments: &[&str]) -> Result<Holder> {
        self.start(&pagefold_labs::client::binary()?, kind, arguments)
    }

    fn start(&self, program: &Path, kind: char, arguments: &[&str]) -> Result<Holder> {
        // The kernel calls a program what it was started as.
        let name = self.folder.path().join(format!("{}{kind}", self.name));
        if !name.exists() {
            std::os::unix::fs::symlink(program, &name)?;
        }
        let mut command = held(name, self.enrolled)?;
        command.args(arguments).stderr(Stdio::inherit());
        let mut holder = Holder::start(command)?;
        holder.ready()?;
        Ok(holder)
    }

    /// The configuration of a daemon that manages these and programs of other names, with more lines of its section.
    pub fn config(&self, section: &str, others: &[&str]) -> String {
        let own = format!("{}*", self.name);
        let names: Vec<&str> = others.iter().copied().chain([own.as_str()]).collect();
        format!("[daemon]\n{section}\n[daemon.only]\nnames = {names:?}\n")
    }
}

/// What is hostile.
#[derive(Clone, Debug)]
pub struct Hostile {
    /// For how long.
    pub length: Duration,
    /// Whether it ends as soon as all that pays is merged and a page that is rewritten now and then was merged and broken
    /// once. How soon that is depends on the machine.
    pub brief: bool,
    /// Regions of the one that has many.
    pub regions: u64,
    /// Threads of the one that writes. Where they leave no CPU idle, the daemon gets out of their way again and again.
    pub writers: u64,
    /// CPU time that the daemon may save up.
    pub burst: Duration,
    /// Between two rewritings of the one that leaves its memory alone meanwhile.
    pub tide: Duration,
    /// The binary.
    pub pagefold: PathBuf,
}

/// How it is known that the memory of a program is what it was.
enum Holds {
    /// It answers with a checksum.
    Checksum(String),
    /// What is in it is counted from outside.
    Contents(Contents),
    /// It checks itself what it computes, and ends where that is wrong.
    Checked,
}

struct Program {
    name: &'static str,
    holder: Holder,
    holds: Holds,
}

impl Program {
    fn answers(name: &'static str, mut holder: Holder) -> Result<Self> {
        let holds = Holds::Checksum(holder.ask("checksum")?);
        Ok(Self { name, holder, holds })
    }

    fn counted(name: &'static str, holder: Holder) -> Result<Self> {
        let holds = Holds::Contents(contents(&holder)?);
        Ok(Self { name, holder, holds })
    }

    /// That it is there and holds what it held.
    fn check(&mut self) -> Result<()> {
        self.holder.check_alive()?;
        match &self.holds {
            Holds::Checksum(before) => {
                let now = self.holder.ask("checksum")?;
                ensure!(now == *before, "its memory is not what it was: {now} instead of {before}");
            }
            Holds::Contents(before) => {
                let now = contents(&self.holder)?;
                let fewer = |(content, copies): &(&_, &_)| now.get(*content).is_none_or(|now| now < *copies);
                let lost = before.iter().filter(fewer).count();
                ensure!(lost == 0, "{lost} contents of {} are not what they were", before.len());
            }
            Holds::Checked => {}
        }
        Ok(())
    }
}

/// What is in a program's memory, by content.
fn contents(holder: &Holder) -> Result<Contents> {
    let mut contents = Contents::new();
    truth::add(holder.pid(), &mut contents)?;
    // Few pages are its own and not of the layout.
    contents.retain(|_, copies| *copies > 1);
    Ok(contents)
}

/// The programs that run.
struct Mix(Vec<Program>);

const MANY: &str = "regions of one page";
const TIDE: &str = "writes its memory anew now and then";
const HUGE: &str = "huge pages";
const PIECES: &str = "regions of 16 pages";
const HONEST: &str = "honest";

/// Pages that a program shares with the other one of its name, if it pays to merge them.
fn shares(name: &str) -> Option<u64> {
    let all = (SHARING << 20) / pagefold_sys::mapping::page_size() as u64;
    match name {
        PIECES => Some(all),
        HUGE | HONEST => Some(all / 2),
        _ => None,
    }
}

impl Mix {
    fn start(place: &Place, hostile: &Hostile) -> Result<Self> {
        let sharing = SHARING.to_string();
        let mixture = |kind, more: &[&str]| place.lab(kind, &[&["mixture", "--mib", &sharing], more].concat());
        let layout = |kind, more: &[&str]| place.lab(kind, &[&["layout"], more].concat());
        let (threads, memory) = (hostile.writers.to_string(), WRITTEN.to_string());
        let (regions, interval) = (format!("within={}", hostile.regions), hostile.tide.as_millis().to_string());
        let huge = ["--huge", "--run", "512"];
        let stray = [&huge[..], &["--duplicate", "6%", "--stray", "45%", "--seed", "stray"]].concat();
        let pays = [&huge[..], &["--duplicate", "50%", "--seed", "huge"]].concat();
        let pages = shares(PIECES).unwrap_or_default();
        let (content, cut) = (format!("shared-content=pieces:{pages}"), (pages / 16).to_string());
        let pieces = [content.as_str(), "--regions", &cut];
        let writer = place.lab('w', &["busy", "--threads", &threads, "--memory", &memory])?;
        let forker = place.start(Path::new("/usr/bin/perl"), 'f', &["-e", FORKER])?;
        Ok(Self(vec![
            Program { name: "writes all its memory anew", holder: writer, holds: Holds::Checked },
            Program::counted(TIDE, layout('t', &["hot-text=16384", "--interval", &interval])?)?,
            Program::answers("huge pages, of which nothing pays", mixture('s', &stray)?)?,
            Program::answers(HUGE, mixture('h', &pays)?)?,
            Program::answers(HUGE, mixture('h', &pays)?)?,
            Program::answers("forks", forker)?,
            Program::counted(MANY, layout('r', &[&regions, "--fragment"])?)?,
            Program::counted(PIECES, layout('p', &pieces)?)?,
            Program::counted(PIECES, layout('p', &pieces)?)?,
            Program::answers(HONEST, mixture('b', &["--duplicate", "50%"])?)?,
            Program::answers(HONEST, mixture('b', &["--duplicate", "50%"])?)?,
        ]))
    }

    /// That they are there and hold what they held.
    fn check(&mut self) -> Result<()> {
        self.0.iter_mut().try_for_each(|program| program.check().context(program.name))
    }

    /// Pages that are merged in each, those of zeros among them: by page tables where these were looked at, since what
    /// has broken is counted as merged by the kernel until ksmd comes by again.
    fn merged(&self, breaks: &Breaks) -> Result<Vec<(&'static str, u64)>> {
        let of = |(number, program): (usize, &Program)| {
            let seen = breaks.merged[number].len() as u64;
            Ok((program.name, if program.name == MANY { merged_pages(program.holder.pid())? } else { seen }))
        };
        self.0.iter().enumerate().map(of).collect()
    }
}

/// Pages of a process that are merged, those of zeros among them, by the kernel's count: `ksm_merging_pages`, which
/// leaves these out, and `ksm_zero_pages`.
pub(super) fn merged_pages(pid: u32) -> Result<u64> {
    let number = |text: &str| text.trim().parse::<u64>().unwrap_or(0);
    let stat = fs::read_to_string(format!("/proc/{pid}/ksm_stat"))?;
    let zeros = stat.lines().find_map(|line| line.strip_prefix("ksm_zero_pages ")).map_or(0, number);
    Ok(number(&fs::read_to_string(format!("/proc/{pid}/ksm_merging_pages"))?) + zeros)
}

/// Writes to merged pages so far (`cow_ksm` of `/proc/vmstat`).
fn broken() -> Result<u64> {
    let vmstat = fs::read_to_string("/proc/vmstat")?;
    let line = vmstat.lines().find_map(|line| line.strip_prefix("cow_ksm ")).context("no cow_ksm in /proc/vmstat")?;
    line.trim().parse().context("cow_ksm")
}

/// Pages that were merged and are not any more, by the number of the program.
#[derive(Default)]
struct Breaks {
    merged: Vec<HashSet<u64>>,
    times: HashMap<(usize, u64), u64>,
}

impl Breaks {
    /// See which pages are merged now. Those with 60,000 regions take too long, and nobody writes to them.
    fn look(&mut self, host: &LiveHost, mix: &Mix) -> Result<()> {
        self.merged.resize(mix.0.len(), HashSet::new());
        for (number, program) in mix.0.iter().enumerate().filter(|(_, program)| program.name != MANY) {
            let now = guest::merged(host, program.holder.pid()).context(program.name)?;
            for &page in self.merged[number].difference(&now) {
                *self.times.entry((number, page)).or_default() += 1;
            }
            self.merged[number] = now;
        }
        Ok(())
    }

    /// How many pages broke so often, of the programs with these numbers: once, twice, and so on.
    fn by_times(&self, is_of: impl Fn(usize) -> bool) -> Vec<u64> {
        let mut pages = Vec::new();
        for (_, &times) in self.times.iter().filter(|((number, _), _)| is_of(*number)) {
            pages.resize(pages.len().max(times as usize), 0);
            pages[times as usize - 1] += 1;
        }
        pages
    }
}

/// How many pages broke so often: once, twice, and so on.
struct Broken {
    /// Of all programs.
    all: Vec<u64>,
    /// Of the one that leaves its memory alone for just so long that it is merged.
    tide: Vec<u64>,
}

/// How many pages of the one that leaves its memory alone now and then broke once, twice and so on.
fn tide(breaks: &Breaks, mix: &Mix) -> Vec<u64> {
    breaks.by_times(|number| mix.0[number].name == TIDE)
}

/// Of the programs that pay to be merged, the one of which the least part of what it shares is: its name, pages that
/// are merged and pages that it shares.
fn least_merged(merged: &[(&'static str, u64)]) -> Option<(&'static str, u64, u64)> {
    let paying = merged.iter().filter_map(|&(name, pages)| Some((name, pages, shares(name)?)));
    paying.min_by(|(_, one, of_one), (_, other, of_other)| (one * of_other).cmp(&(other * of_one)))
}

/// Whether nine tenths of what each program shares are merged.
fn all_merged(merged: &[(&'static str, u64)]) -> bool {
    least_merged(merged).is_none_or(|(_, pages, shared)| pages * 10 >= shared * 9)
}

struct Sample {
    seconds: f64,
    cpu: f64,
    broken: u64,
    merged: Vec<(&'static str, u64)>,
}

impl Hostile {
    /// Measure it. KSM is held meanwhile.
    pub fn measure(&self, log: &Path) -> Result<Findings> {
        let ksm = Ksm::take().map_err(anyhow::Error::msg)?;
        let place = Place::new("pfhost")?;
        let mut mix = Mix::start(&place, self)?;
        let burst = self.burst.as_secs();
        let price = if self.brief { format!("\nprice = {BRIEF_PRICE}") } else { String::new() };
        let section = format!("cpu = \"{}%\"\nburst = \"{burst}s\"{price}", CPU * 100.0);
        let driver = Driver::daemon(&self.pagefold, &place.config(&section, &[]), log, &ksm)?;
        let (host, mut breaks) = (LiveHost::new(), Breaks::default());
        let (began, before) = (Instant::now(), broken()?);
        let mut samples: Vec<Sample> = Vec::new();
        while began.elapsed() < self.length {
            pause_for(Duration::from_millis(500))?;
            let (seconds, cpu) = (began.elapsed().as_secs_f64(), driver.cpu()?.all());
            breaks.look(&host, &mix)?;
            samples.push(Sample { seconds, cpu, broken: broken()? - before, merged: mix.merged(&breaks)? });
            let broke = tide(&breaks, &mix).len() >= self.least_breaks();
            if self.brief && broke && samples.last().is_some_and(|last| all_merged(&last.merged)) {
                break;
            }
        }
        let status = driver.as_daemon().context("a daemon")?.status()?;
        driver.end()?;
        let intact = mix.check();
        let broken = Broken { all: breaks.by_times(|_| true), tide: tide(&breaks, &mix) };
        Ok(self.findings(&samples, &broken, &status, intact))
    }

    /// How often a page has to have broken at least that is merged again after it was written.
    fn least_breaks(&self) -> usize {
        if self.brief { 1 } else { 2 }
    }

    fn findings(
        &self,
        samples: &[Sample],
        breaks: &Broken,
        status: &serde_json::Value,
        intact: Result<()>,
    ) -> Findings {
        let mut findings = Findings::new("seconds,cpu_seconds,broken_pages,merged_pages_of_each");
        for Sample { seconds, cpu, broken, merged } in samples {
            let merged: Vec<String> = merged.iter().map(|(_, pages)| pages.to_string()).collect();
            findings.samples.push(format!("{seconds:.1},{cpu:.3},{broken},{}", merged.join(" ")));
        }
        let Some(last) = samples.last() else { return findings };
        let mut table = Table::new(format!("After {:.0} s", last.seconds), &["program", "merged pages", "at most"]);
        for (position, (name, pages)) in last.merged.iter().enumerate() {
            let most = samples.iter().map(|sample| sample.merged[position].1).max().unwrap_or(0);
            table.rows.push(vec![(*name).to_owned(), pages.to_string(), most.to_string()]);
        }
        findings.tables.push(table);
        let burst = self.burst.as_secs_f64();
        let worst = most_in_any_time(samples.iter().map(|sample| (sample.seconds, sample.cpu))) - burst;
        let mut bar = |claim: String, measured: String, met: bool| findings.bars.push(Bar { claim, measured, met });
        bar(
            format!("in no time more CPU than {:.0} % of it and {burst} s saved up, but for {BEYOND} s", CPU * 100.0),
            format!("{worst:+.2} s at worst, {:.2} s in {:.0} s", last.cpu, last.seconds),
            worst <= BEYOND,
        );
        let told = match &intact {
            Ok(()) => "all are there and hold what they held".to_owned(),
            Err(error) => format!("{error:#}"),
        };
        bar("nobody ends, and nobody's memory changes".to_owned(), told, intact.is_ok());
        let failed = status["decisions_by_reason"]["failed"].as_u64().unwrap_or(0);
        bar("nothing fails".to_owned(), format!("{failed} times"), failed == 0);
        let least = self.least_breaks();
        let often = if least > 1 { "broken, merged again and broken again" } else { "merged and broken" };
        bar(
            format!(
                "a page of the one that {TIDE} is {often}, and no page of any is merged and broken more than {STRIKES} \
                 times"
            ),
            format!(
                "its pages that broke once, twice and so on: {}; of all: {}; cow_ksm, with the forked ones: {}",
                listed(&breaks.tide),
                listed(&breaks.all),
                last.broken
            ),
            breaks.tide.len() >= least && breaks.all.len() as u64 <= STRIKES,
        );
        if let Some((name, pages, shared)) = least_merged(&last.merged) {
            bar(
                "of each program that pays nine tenths of what it shares is merged at the end".to_owned(),
                format!(
                    "at least {:.1} %: {pages} of {shared} pages of one of {name:?}",
                    pages as f64 / shared as f64 * 100.0
                ),
                all_merged(&last.merged),
            );
        }
        findings
    }
}

fn listed(pages: &[u64]) -> String {
    let pages: Vec<String> = pages.iter().map(u64::to_string).collect();
    if pages.is_empty() { "none".to_owned() } else { pages.join(", ") }
}

/// How much CPU time beyond its part was used most, over any stretch of time, from readings of the seconds and the CPU
/// seconds since the beginning.
fn most_in_any_time(readings: impl Iterator<Item = (f64, f64)>) -> f64 {
    let (mut least, mut most) = (0.0_f64, f64::NEG_INFINITY);
    for (seconds, cpu) in readings {
        let beyond = cpu - CPU * seconds;
        most = most.max(beyond - least);
        least = least.min(beyond);
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_after_a_calm_time_counts_by_itself() {
        let most = |readings: &[(f64, f64)]| (most_in_any_time(readings.iter().copied()) * 1e3).round() / 1e3;
        assert_eq!(most(&[(1.0, 0.5), (2.0, 0.5)]), 0.4, "in the first second");
        // From 100 s to 102 s, although it is less than its part since the beginning.
        assert_eq!(most(&[(100.0, 0.0), (102.0, 2.0), (103.0, 2.0)]), 1.8);
    }

    /// Whether the bars are met where so many pages broke once, twice and so on, in a brief run or a whole one, all that
    /// pays being merged but for one with so many pages.
    fn met(brief: bool, tide: &[u64], all: &[u64], (name, pages): (&'static str, u64)) -> Vec<bool> {
        let [length, burst, interval] = [600, 5, 10].map(Duration::from_secs);
        let hostile =
            Hostile { length, brief, regions: 1, writers: 1, burst, tide: interval, pagefold: PathBuf::new() };
        let names = [HUGE, PIECES, HONEST, TIDE];
        let mut merged: Vec<_> = names.iter().map(|&name| (name, shares(name).unwrap_or(0))).collect();
        merged.push((name, pages));
        let samples = [Sample { seconds: 600.0, cpu: 1.0, broken: 0, merged }];
        let breaks = Broken { all: all.to_vec(), tide: tide.to_vec() };
        let found = hostile.findings(&samples, &breaks, &serde_json::json!({}), Ok(()));
        found.bars.iter().map(|bar| bar.met).collect()
    }

    #[test]
    fn what_is_written_now_and_then_has_to_break_and_break_again() {
        let bar = |brief, tide: &[u64], all: &[u64]| met(brief, tide, all, (HONEST, 1 << 14))[3];
        assert!(bar(true, &[7], &[7]), "merged and written once is all that a brief run shows");
        assert!(!bar(false, &[7], &[7]), "in a whole one it is merged again");
        assert!(bar(false, &[0, 7], &[3, 7, 1]));
        assert!(!bar(false, &[7], &[7, 7]), "another program breaks in its place");
        assert!(!bar(true, &[], &[7]));
        assert!(!bar(false, &[0, 7], &[0, 7, 0, 1]), "a page of another breaks once too often");
    }

    #[test]
    fn each_that_pays_has_to_be_merged() {
        let bar = |name, pages| met(true, &[7], &[7], (name, pages))[4];
        for name in [HUGE, PIECES, HONEST] {
            let shared = shares(name).unwrap();
            assert!(bar(name, (shared * 9).div_ceil(10)), "{name}");
            assert!(!bar(name, shared * 9 / 10 - 1), "{name}, of which the other is merged");
        }
        assert!(bar(MANY, 0), "who does not pay may be left alone");
    }

    #[test]
    fn the_least_merged_part_is_named() {
        let [huge, pieces] = [HUGE, PIECES].map(|name| shares(name).unwrap());
        let merged = [(HUGE, huge / 2), (MANY, 0), (PIECES, huge / 2 + 1), (HONEST, huge)];
        assert_eq!(least_merged(&merged), Some((PIECES, huge / 2 + 1, pieces)), "by part, not by pages");
        assert_eq!(least_merged(&[(MANY, 0)]), None);
    }

    #[test]
    fn breaks_are_counted_by_program() {
        let times = HashMap::from([((0, 1), 1), ((0, 2), 3), ((1, 1), 1)]);
        let breaks = Breaks { merged: Vec::new(), times };
        assert_eq!((breaks.by_times(|_| true), breaks.by_times(|number| number == 1)), (vec![2, 0, 1], vec![1]));
    }
}
