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

/// Threads of the one that writes, and the memory of each in MiB.
const WRITERS: u64 = 2;
const WRITTEN: u64 = 16;

/// How often a page may be merged and broken before it is left alone, at most.
const STRIKES: u64 = 3;

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
}

impl Place {
    /// With names that begin so.
    pub fn new(name: &str) -> Result<Self> {
        Ok(Self { folder: tempfile::tempdir()?, name: format!("{name}{}", std::process::id()) })
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
        let mut command = held(name, false)?;
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
    /// Regions of the one that has many.
    pub regions: u64,
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
const HONEST: &str = "honest";

impl Mix {
    fn start(place: &Place, regions: u64, tide: Duration) -> Result<Self> {
        let mixture = |kind, more: &[&str]| place.lab(kind, &[&["mixture", "--mib", "64"], more].concat());
        let layout = |kind, more: &[&str]| place.lab(kind, &[&["layout"], more].concat());
        let (threads, memory) = (WRITERS.to_string(), WRITTEN.to_string());
        let (regions, interval) = (format!("within={regions}"), tide.as_millis().to_string());
        let huge = ["--huge", "--run", "512"];
        let stray = [&huge[..], &["--duplicate", "6%", "--stray", "45%", "--seed", "stray"]].concat();
        let pays = [&huge[..], &["--duplicate", "50%", "--seed", "huge"]].concat();
        let pieces = ["shared-content=pieces:16384", "--regions", "1024"];
        let writer = place.lab('w', &["busy", "--threads", &threads, "--memory", &memory])?;
        let forker = place.start(Path::new("/usr/bin/perl"), 'f', &["-e", FORKER])?;
        Ok(Self(vec![
            Program { name: "writes all its memory anew", holder: writer, holds: Holds::Checked },
            Program::counted(TIDE, layout('t', &["hot-text=16384", "--interval", &interval])?)?,
            Program::answers("huge pages, of which nothing pays", mixture('s', &stray)?)?,
            Program::answers("huge pages", mixture('h', &pays)?)?,
            Program::answers("huge pages", mixture('h', &pays)?)?,
            Program::answers("forks", forker)?,
            Program::counted(MANY, layout('r', &[&regions, "--fragment"])?)?,
            Program::counted("regions of 16 pages", layout('p', &pieces)?)?,
            Program::counted("regions of 16 pages", layout('p', &pieces)?)?,
            Program::answers(HONEST, mixture('b', &["--duplicate", "50%"])?)?,
            Program::answers(HONEST, mixture('b', &["--duplicate", "50%"])?)?,
        ]))
    }

    /// That they are there and hold what they held.
    fn check(&mut self) -> Result<()> {
        self.0.iter_mut().try_for_each(|program| program.check().context(program.name))
    }

    /// Pages that are merged in each: those of zeros by the kernel's count, others by page tables where these were
    /// looked at, since what has broken is counted as merged until ksmd comes by again.
    fn merged(&self, breaks: &Breaks) -> Result<Vec<(&'static str, u64)>> {
        let of = |(number, program): (usize, &Program)| {
            let (counted, zeros) = merged(program.holder.pid())?;
            let seen = (program.name != MANY).then(|| breaks.merged[number].len() as u64);
            Ok((program.name, seen.unwrap_or(counted) + zeros))
        };
        self.0.iter().enumerate().map(of).collect()
    }
}

/// `ksm_merging_pages` and `ksm_zero_pages` of a process.
fn merged(pid: u32) -> Result<(u64, u64)> {
    let number = |text: &str| text.trim().parse::<u64>().unwrap_or(0);
    let stat = fs::read_to_string(format!("/proc/{pid}/ksm_stat"))?;
    let zeros = stat.lines().find_map(|line| line.strip_prefix("ksm_zero_pages ")).map_or(0, number);
    Ok((number(&fs::read_to_string(format!("/proc/{pid}/ksm_merging_pages"))?), zeros))
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

    /// How many pages broke so often: once, twice, and so on.
    fn by_times(&self) -> Vec<u64> {
        let mut pages = Vec::new();
        for &times in self.times.values() {
            pages.resize(pages.len().max(times as usize), 0);
            pages[times as usize - 1] += 1;
        }
        pages
    }
}

struct Sample {
    seconds: f64,
    cpu: f64,
    broken: u64,
    merged: Vec<(&'static str, u64)>,
}

impl Sample {
    /// Pages that are merged of those beside them.
    fn honest(&self) -> u64 {
        self.merged.iter().filter(|(name, _)| *name == HONEST).map(|(_, pages)| pages).sum()
    }
}

impl Hostile {
    /// Measure it. KSM is held meanwhile.
    pub fn measure(&self, log: &Path) -> Result<Findings> {
        let ksm = Ksm::take().map_err(anyhow::Error::msg)?;
        let place = Place::new("pfhost")?;
        let mut mix = Mix::start(&place, self.regions, self.tide)?;
        let burst = self.burst.as_secs();
        let section = format!("cpu = \"{}%\"\nburst = \"{burst}s\"", CPU * 100.0);
        let driver = Driver::daemon(&self.pagefold, &place.config(&section, &[]), log, &ksm)?;
        let (host, mut breaks) = (LiveHost::new(), Breaks::default());
        let (began, before) = (Instant::now(), broken()?);
        let mut samples: Vec<Sample> = Vec::new();
        while began.elapsed() < self.length {
            pause_for(Duration::from_millis(500))?;
            let (seconds, cpu) = (began.elapsed().as_secs_f64(), driver.cpu()?.all());
            breaks.look(&host, &mix)?;
            samples.push(Sample { seconds, cpu, broken: broken()? - before, merged: mix.merged(&breaks)? });
        }
        let status = driver.as_daemon().context("a daemon")?.status()?;
        driver.end()?;
        let intact = mix.check();
        Ok(self.findings(&samples, &breaks.by_times(), &status, intact))
    }

    fn findings(&self, samples: &[Sample], breaks: &[u64], status: &serde_json::Value, intact: Result<()>) -> Findings {
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
        let times: Vec<String> =
            breaks.iter().zip(1..).map(|(pages, times)| format!("{pages} pages {times} times")).collect();
        bar(
            format!("what is merged and written is merged again, but no page more than {STRIKES} times"),
            format!(
                "{}; cow_ksm, with the forked ones: {}",
                if times.is_empty() { "none was".to_owned() } else { times.join(", ") },
                last.broken
            ),
            (1..=STRIKES).contains(&(breaks.len() as u64)),
        );
        let page = pagefold_sys::mapping::page_size() as u64;
        let common = 2 * (64 << 20) / page / 2;
        bar(
            "of those beside them nine tenths of what they share are merged".to_owned(),
            format!("{} of {common} pages", last.honest()),
            last.honest() >= common * 9 / 10,
        );
        findings
    }
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
}
