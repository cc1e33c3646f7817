//! Machines that come and go: how soon a new one is merged, what that saves over time, and at what cost.
//!
//! All ways have the same to merge: for the policies, QEMU's whole process is enrolled from its beginning. What was
//! merged before READY counts from READY on; how that is told from what was never written is said in [`guest`].

use super::driver::{Cpu, Driver, Way};
use super::guest::{self, Guest, NAMES, Ready};
use crate::merge::trial::pause_for;
use crate::report::{Bar, Findings, Table};
use anyhow::Result;
use pagefold_labs::ksm::Ksm;
use pagefold_linux::LiveHost;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Within which 90 % of what a new machine can share is merged, for nine machines out of ten: seconds from READY.
const SOON: f64 = 10.0;

/// The share of one core that this may cost on average, all included.
const SHARE: f64 = 0.1;

/// Between two turns of the loop.
const TICK: Duration = Duration::from_millis(100);

/// Between two looks at machines that are not merged yet, and at all of them.
const LOOK: Duration = Duration::from_millis(400);
const SURVEY: Duration = Duration::from_secs(2);

/// What comes and goes.
#[derive(Clone, Debug)]
pub struct Churn {
    /// How long it goes on.
    pub length: Duration,
    /// A machine comes so often,
    pub every: Duration,
    /// and stays for so long.
    pub life: Duration,
    /// Memory of each, in MiB.
    pub mib: u32,
    /// The binary.
    pub pagefold: PathBuf,
}

/// A look at all of them.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Since the beginning.
    pub seconds: f64,
    /// Machines that are ready.
    pub guests: usize,
    /// Pages that are saved among them.
    pub saved: u64,
    /// What it has cost so far.
    pub cpu: Cpu,
}

/// What became of a machine.
#[derive(Clone, Debug)]
pub struct Fate {
    /// When it came, seconds since the beginning.
    pub arrived: f64,
    /// Seconds until it was ready.
    pub boot: f64,
    /// Pages that it could share then.
    pub shareable: u64,
    /// Pages that it shared at the end.
    pub shared: u64,
    /// Seconds for which it was watched after it was ready.
    pub watched: f64,
    /// Seconds until nine tenths were merged.
    pub merged: Option<f64>,
}

/// What came of a way.
#[derive(Clone, Debug)]
pub struct Run {
    /// Which.
    pub way: Way,
    /// Pages that a machine never wrote when it is ready, by a reference.
    pub unwritten: u64,
    /// Looks at all of them.
    pub samples: Vec<Sample>,
    /// In the order in which they came.
    pub fates: Vec<Fate>,
}

impl Run {
    /// Seconds until nine tenths were merged of those that were watched for long enough to tell, ascending. Without end
    /// for those that never were.
    fn seconds(&self) -> Vec<f64> {
        let told = |fate: &&Fate| fate.merged.is_some() || fate.watched >= SOON;
        let mut seconds: Vec<f64> =
            self.fates.iter().filter(told).map(|fate| fate.merged.unwrap_or(f64::INFINITY)).collect();
        seconds.sort_by(f64::total_cmp);
        seconds
    }

    /// Seconds within which a share of the machines were merged: the nearest rank.
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let seconds = self.seconds();
        seconds.get(((share * seconds.len() as f64).ceil() as usize).max(1) - 1).copied()
    }

    /// The share of one core, on average.
    pub fn share(&self) -> f64 {
        self.samples.last().map_or(0.0, |last| last.cpu.all() / last.seconds)
    }

    /// Bytes that were saved times the seconds for which they were.
    pub fn byte_seconds(&self) -> f64 {
        let page = pagefold_sys::mapping::page_size() as f64;
        let between =
            |pair: &[Sample]| (pair[1].seconds - pair[0].seconds) * (pair[0].saved + pair[1].saved) as f64 / 2.0 * page;
        self.samples.windows(2).map(between).sum()
    }
}

/// The configuration of the daemon: machines of the churn alone, which trust each other, at the default bounds.
fn config() -> String {
    format!("[[domain]]\nname = \"churn\"\nusers = [0]\nvms = [\"{NAMES}-*\"]\n[daemon.only]\nvms = [\"{NAMES}-*\"]\n")
}

impl Churn {
    /// Let it go on under a way. KSM is held meanwhile.
    pub fn run(&self, way: Way, log: &Path) -> Result<Run> {
        let ksm = Ksm::take().map_err(anyhow::Error::msg)?;
        // The reference is gone before anything is driven or timed.
        ksm.set("run", 0);
        let unwritten = guest::unwritten(self.mib, way.enrols())?;
        let mut driver = match way {
            Way::Policy(policy) => Driver::policy(policy, &ksm)?,
            Way::Daemon => Driver::daemon(&self.pagefold, &config(), log, &ksm)?,
        };
        let mut run = Run { way, unwritten, samples: Vec::new(), fates: Vec::new() };
        let (guests, leaving) = (Vec::new(), Vec::new());
        let mut street = Street { host: LiveHost::new(), began: Instant::now(), unwritten, guests, leaving };
        let (mut looked, mut surveyed, mut come) = (Duration::ZERO, Duration::ZERO, 0);
        loop {
            let now = street.began.elapsed();
            if now >= self.length {
                break;
            }
            if now >= self.every * come {
                street.guests.push(Guest::start(come as usize, self.mib, way.enrols())?);
                come += 1;
            }
            street.dismiss(&mut run, |guest| guest.arrived.elapsed() >= self.life);
            street.greet()?;
            driver.follow(now.as_secs_f64())?;
            if now >= surveyed + SURVEY {
                let (guests, saved) = street.survey()?;
                let seconds = street.began.elapsed().as_secs_f64();
                run.samples.push(Sample { seconds, guests, saved, cpu: driver.cpu()? });
                (surveyed, looked) = (now, now);
            } else if now >= looked + LOOK {
                street.look()?;
                looked = now;
            }
            pause_for(TICK)?;
        }
        street.dismiss(&mut run, |_| true);
        driver.end()?;
        street.leaving.into_iter().for_each(|gone| drop(gone.join()));
        run.fates.sort_by(|one, other| one.arrived.total_cmp(&other.arrived));
        Ok(run)
    }
}

/// The machines that are there.
struct Street {
    host: LiveHost,
    began: Instant,
    unwritten: u64,
    guests: Vec<Guest>,
    leaving: Vec<JoinHandle<()>>,
}

impl Street {
    /// Those that become ready are counted.
    fn greet(&mut self) -> Result<()> {
        for position in 0..self.guests.len() {
            let Some(ready) = self.guests[position].becomes_ready()? else { continue };
            let (before, rest) = self.guests.split_at_mut(position);
            let Some((guest, after)) = rest.split_first_mut() else { continue };
            let others: Vec<&Ready> =
                before.iter().chain(after.iter()).filter_map(|guest| guest.ready.as_ref()).collect();
            guest.count(ready, &others, self.unwritten)?;
        }
        Ok(())
    }

    /// Look at those that are not merged yet.
    fn look(&mut self) -> Result<()> {
        let young = self.guests.iter_mut().filter_map(|guest| guest.ready.as_mut());
        young.filter(|ready| ready.reached.is_none()).try_for_each(|ready| ready.look(&self.host, &mut HashSet::new()))
    }

    /// Look at all of them: how many there are, and pages that they save.
    fn survey(&mut self) -> Result<(usize, u64)> {
        let (mut count, mut shared, mut frames) = (0, 0, HashSet::new());
        for ready in self.guests.iter_mut().filter_map(|guest| guest.ready.as_mut()) {
            ready.look(&self.host, &mut frames)?;
            count += 1;
            shared += ready.shared;
        }
        Ok((count, shared.saturating_sub(frames.len() as u64)))
    }

    /// Have those end whose time has come.
    fn dismiss(&mut self, run: &mut Run, is_due: impl Fn(&Guest) -> bool) {
        for guest in self.guests.extract_if(.., |guest| is_due(guest)) {
            if let Some(ready) = &guest.ready {
                run.fates.push(Fate {
                    arrived: (guest.arrived - self.began).as_secs_f64(),
                    boot: (ready.at - guest.arrived).as_secs_f64(),
                    shareable: ready.shareable,
                    shared: ready.shared,
                    watched: ready.at.elapsed().as_secs_f64(),
                    merged: ready.seconds(),
                });
            }
            // To free its memory takes a while.
            self.leaving.push(std::thread::spawn(move || drop(guest)));
        }
    }
}

fn seconds(seconds: Option<f64>) -> String {
    match seconds {
        Some(seconds) if seconds.is_finite() => format!("{seconds:.1}"),
        Some(_) => "never".to_owned(),
        None => "-".to_owned(),
    }
}

/// What came of all ways, side by side.
pub fn findings(churn: &Churn, runs: &[Run]) -> Findings {
    let mut findings = Findings::new("way,seconds,guests,saved_pages,ksmd_seconds,driver_seconds");
    let (every, life) = (churn.every.as_secs(), churn.life.as_secs());
    let title = format!(
        "A guest of {} MiB comes every {every} s and lives for {life} s, for {} s",
        churn.mib,
        churn.length.as_secs()
    );
    let head = ["way", "guests", "90 % after s", "p90", "saved GiB s", "MiB on average", "CPU %", "ksmd s", "driver s"];
    let mut table = Table::new(title, &head);
    for run in runs {
        let last = run.samples.last().copied();
        let (length, cpu) = last.map_or((1.0, Cpu::default()), |last| (last.seconds, last.cpu));
        table.rows.push(vec![
            run.way.name().to_owned(),
            run.fates.len().to_string(),
            seconds(run.quantile(0.5)),
            seconds(run.quantile(0.9)),
            format!("{:.1}", run.byte_seconds() / f64::from(1 << 30)),
            format!("{:.0}", run.byte_seconds() / length / f64::from(1 << 20)),
            format!("{:.1}", run.share() * 100.0),
            format!("{:.2}", cpu.ksmd),
            format!("{:.2}", cpu.driver),
        ]);
        for sample in &run.samples {
            findings.samples.push(format!(
                "{},{:.3},{},{},{:.4},{:.4}",
                run.way.name(),
                sample.seconds,
                sample.guests,
                sample.saved,
                sample.cpu.ksmd,
                sample.cpu.driver
            ));
        }
    }
    table.notes.push(
        "90 % after: seconds from READY until nine tenths of what the guest could share then were merged, by page \
         tables; the median and the 90th percentile. What can be shared is counted by a cryptographic hash of every page. \
         CPU: ksmd and who drives it, of one core on average. Policies are followed at no cost, on guests of which \
         QEMU's whole process is enrolled, and ksmtuned as if memory were short."
            .to_owned(),
    );
    let unwritten: Vec<String> = runs.iter().map(|run| format!("{} ({})", run.unwritten, run.way.name())).collect();
    table.notes.push(format!(
        "Never written when READY, by a reference guest that boots with KSM off before each way, and neither shareable \
         nor shared in any guest of it, in pages: {}.",
        unwritten.join(", ")
    ));
    findings.tables.push(table);
    if let Some(run) = runs.iter().find(|run| run.way == Way::Daemon) {
        let soon = run.quantile(0.9);
        findings.bars.push(Bar {
            claim: format!(
                "90 % of what a new guest can share is merged within {SOON} s of READY, at the 90th percentile"
            ),
            measured: format!("{} s", seconds(soon)),
            met: soon.is_some_and(|soon| soon <= SOON),
        });
        findings.bars.push(Bar {
            claim: format!("at no more than {:.0} % of one core on average, all included", SHARE * 100.0),
            measured: format!("{:.1} %", run.share() * 100.0),
            met: run.share() <= SHARE,
        });
    }
    findings
}

/// Every machine, as CSV.
pub fn fates(runs: &[Run]) -> String {
    let mut text =
        "way,arrived_seconds,boot_seconds,shareable_pages,shared_pages,watched_seconds,merged_after_seconds\n"
            .to_owned();
    for run in runs {
        for fate in &run.fates {
            let merged = fate.merged.map(|seconds| format!("{seconds:.2}")).unwrap_or_default();
            text.push_str(&format!(
                "{},{:.2},{:.2},{},{},{:.2},{merged}\n",
                run.way.name(),
                fate.arrived,
                fate.boot,
                fate.shareable,
                fate.shared,
                fate.watched
            ));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(merged: &[Option<f64>]) -> Run {
        let fate = |&merged| Fate { arrived: 0.0, boot: 9.0, shareable: 10, shared: 9, watched: 60.0, merged };
        let sample =
            |seconds: f64, saved| Sample { seconds, guests: 1, saved, cpu: Cpu { ksmd: seconds / 20.0, driver: 0.0 } };
        let samples = vec![sample(0.0, 0), sample(10.0, 100), sample(20.0, 100)];
        Run { way: Way::Daemon, unwritten: 0, samples, fates: merged.iter().map(fate).collect() }
    }

    #[test]
    fn nine_of_ten_decide() {
        let seconds: Vec<Option<f64>> = (1..=10).map(|seconds| Some(f64::from(seconds))).collect();
        assert_eq!((run(&seconds).quantile(0.9), run(&seconds).quantile(0.5)), (Some(9.0), Some(5.0)));
        assert_eq!(run(&[Some(1.0), None]).quantile(0.9), Some(f64::INFINITY));
        assert_eq!(run(&[]).quantile(0.9), None);
    }

    #[test]
    fn who_was_not_watched_for_long_tells_nothing() {
        let mut short = run(&[Some(1.0), None]);
        short.fates[1].watched = SOON / 2.0;
        assert_eq!(short.quantile(0.9), Some(1.0));
    }

    #[test]
    fn what_is_saved_counts_for_as_long_as_it_is() {
        let page = pagefold_sys::mapping::page_size() as f64;
        assert_eq!(run(&[]).byte_seconds(), (500.0 + 1000.0) * page);
        assert!((run(&[]).share() - 0.05).abs() < 1e-9);
    }
}
