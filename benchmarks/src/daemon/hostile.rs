//! Programs that make it hard: one writes all its memory anew, one has huge pages, one forks all the time, one has
//! 60,000 regions. Beside them are two that are merged as they should be.
//!
//! That they are intact they tell themselves, where they answer with a checksum or check what they compute; of the one
//! with all the regions the contents are counted from outside. What is broken after it was merged is seen page by page
//! in their page tables: the kernel's `cow_ksm` counts what children of a fork write, too, whose parent keeps its merge.

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

/// The bounds that the daemon is given: a share of one core on average, and seconds that may be saved up.
const CPU: f64 = 0.1;
const BURST: f64 = 10.0;

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

    /// The configuration of a daemon that manages these, with more lines of its section.
    pub fn config(&self, section: &str) -> String {
        format!("[daemon]\n{section}\n[daemon.only]\nnames = [\"{}*\"]\n", self.name)
    }
}

/// What is hostile.
#[derive(Clone, Debug)]
pub struct Hostile {
    /// For how long.
    pub length: Duration,
    /// Regions of the one that has many.
    pub regions: u64,
    /// The binary.
    pub pagefold: PathBuf,
}

/// The programs that run.
struct Mix {
    /// With what they are called, and whether they answer with a checksum.
    programs: Vec<(&'static str, Holder, bool)>,
    answers: Vec<Option<String>>,
    /// What the one with many regions holds.
    contents: Contents,
}

const MANY: &str = "many regions";
const HONEST: &str = "honest";

impl Mix {
    fn start(place: &Place, regions: u64) -> Result<Self> {
        let mixture = |kind, more: &[&str]| place.lab(kind, &[&["mixture", "--mib", "64"], more].concat());
        let (threads, memory) = (WRITERS.to_string(), WRITTEN.to_string());
        let regions = format!("within={regions}");
        let mut programs = vec![
            ("writes all anew", place.lab('w', &["busy", "--threads", &threads, "--memory", &memory])?, false),
            ("huge pages", mixture('h', &["--huge", "--duplicate", "6%", "--stray", "45%", "--run", "512"])?, true),
            ("forks", place.start(Path::new("/usr/bin/perl"), 'f', &["-e", FORKER])?, true),
            (MANY, place.lab('r', &["layout", &regions, "--fragment"])?, false),
            (HONEST, mixture('b', &["--duplicate", "50%"])?, true),
            (HONEST, mixture('b', &["--duplicate", "50%"])?, true),
        ];
        let mut answers = Vec::new();
        for (_, program, asked) in &mut programs {
            answers.push(if *asked { Some(program.ask("checksum")?) } else { None });
        }
        let mut mix = Self { programs, answers, contents: Contents::new() };
        mix.contents = mix.counted()?;
        Ok(mix)
    }

    fn counted(&self) -> Result<Contents> {
        let many = self.programs.iter().find(|(name, ..)| *name == MANY).context("the one with many regions")?;
        let mut contents = Contents::new();
        truth::add(many.1.pid(), &mut contents)?;
        // Few pages are its own and not of the layout.
        contents.retain(|_, copies| *copies > 1);
        Ok(contents)
    }

    /// That they are there and hold what they held.
    fn check(&mut self) -> Result<()> {
        for ((name, program, _), answer) in self.programs.iter_mut().zip(&self.answers) {
            program.check_alive().with_context(|| *name)?;
            if let Some(answer) = answer {
                let now = program.ask("checksum").with_context(|| *name)?;
                ensure!(now == *answer, "{name}: its memory is not what it was: {now} instead of {answer}");
            }
        }
        let (before, now) = (&self.contents, self.counted()?);
        let lost = before.iter().filter(|(content, copies)| now.get(*content).is_none_or(|now| now < *copies)).count();
        ensure!(lost == 0, "{MANY}: {lost} contents of {} are not what they were", before.len());
        Ok(())
    }

    /// Pages that are merged in each.
    fn merged(&self) -> Result<Vec<(&'static str, u64)>> {
        self.programs.iter().map(|(name, program, _)| Ok((*name, merged(program.pid())?))).collect()
    }
}

/// `ksm_merging_pages` and `ksm_zero_pages` of a process.
fn merged(pid: u32) -> Result<u64> {
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
        self.merged.resize(mix.programs.len(), HashSet::new());
        for (number, (name, program, _)) in mix.programs.iter().enumerate().filter(|(_, (name, ..))| *name != MANY) {
            let now = guest::merged(host, program.pid()).with_context(|| *name)?;
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
        let mut mix = Mix::start(&place, self.regions)?;
        let section = format!("cpu = \"{}%\"\nburst = \"{BURST}s\"", CPU * 100.0);
        let driver = Driver::daemon(&self.pagefold, &place.config(&section), log, &ksm)?;
        let (host, mut breaks) = (LiveHost::new(), Breaks::default());
        let (began, before) = (Instant::now(), broken()?);
        let mut samples: Vec<Sample> = Vec::new();
        while began.elapsed() < self.length {
            pause_for(Duration::from_millis(500))?;
            samples.push(Sample {
                seconds: began.elapsed().as_secs_f64(),
                cpu: driver.cpu()?.all(),
                broken: broken()? - before,
                merged: mix.merged()?,
            });
            breaks.look(&host, &mix)?;
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
        // Over any time so much on average, and what was saved up before.
        let beyond = |sample: &Sample| sample.cpu - CPU * sample.seconds - BURST;
        let worst = samples.iter().map(beyond).fold(f64::NEG_INFINITY, f64::max);
        let mut bar = |claim: String, measured: String, met: bool| findings.bars.push(Bar { claim, measured, met });
        bar(
            format!(
                "never more CPU time than {:.0} % on average and {BURST} s saved up, but for {BEYOND} s",
                CPU * 100.0
            ),
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
            format!("no page is merged and broken more than {STRIKES} times"),
            format!(
                "{}; cow_ksm, with the forked ones: {}",
                if times.is_empty() { "none was".to_owned() } else { times.join(", ") },
                last.broken
            ),
            breaks.len() as u64 <= STRIKES,
        );
        let page = pagefold_sys::mapping::page_size() as u64;
        let common = 2 * (64 << 20) / page / 2;
        findings.told.push(format!("of those beside them {} of {common} pages are merged", last.honest()));
        findings
    }
}
