//! A host on which nothing happens any more, or little: what the daemon costs there, in CPU time and in memory. Beside
//! processes that sleep there are virtual machines that are idle, and where that is asked for a process that works a
//! little, and is looked at again for that.

use super::driver::{Daemon, Driver};
use super::guest::{Guest, NAMES};
use super::hostile::{Place, merged_pages};
use crate::merge::holder::Holder;
use crate::merge::trial::pause_for;
use crate::report::{Bar, Findings, Table};
use anyhow::{Context, Result, ensure};
use pagefold_labs::ksm::Ksm;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The share of one core that it may cost.
const SHARE: f64 = 0.002;

/// Resident memory: so much, and so much of what is managed.
const MEMORY: f64 = 32.0 * MIB;
const OF_MANAGED: f64 = 0.004;

/// What two looks at resident memory may differ by without growth: the heap's own granularity.
const GRAIN: f64 = MIB;

const MIB: f64 = 1048576.0;

/// The percentage of the memory of each process that others hold, too.
const DUPLICATE: u64 = 33;

/// What works a little, too much to count as idle: 256 MiB, of which it writes a sixteenth anew four times a second.
const WORKER: [&str; 4] = ["layout", "unique=61440,volatile=4096", "--interval", "250"];

/// How long it may take until everybody is merged, and nothing more comes to it.
const PATIENCE: Duration = Duration::from_secs(1200);

/// The part of the duplicates of each process that is merged, at least, when it counts as merged.
const MOST: f64 = 0.5;

/// What is quiet.
#[derive(Clone, Debug)]
pub struct Quiet {
    /// For how long it is measured once nothing more is merged.
    pub length: Duration,
    /// For how long nothing may have been merged before that.
    pub calm: Duration,
    /// How many processes,
    pub processes: u32,
    /// and how big, in MiB.
    pub mib: u64,
    /// How many virtual machines,
    pub guests: usize,
    /// and with how much memory each, in MiB.
    pub guest_mib: u32,
    /// Whether somebody works a little.
    pub restless: bool,
    /// The binary.
    pub pagefold: PathBuf,
}

struct Sample {
    seconds: f64,
    ksmd: f64,
    driver: f64,
    resident: f64,
}

impl Quiet {
    /// Measure it. KSM is held meanwhile.
    pub fn measure(&self, log: &Path) -> Result<Findings> {
        let ksm = Ksm::take().map_err(anyhow::Error::msg)?;
        let place = Place::new("pfquiet")?;
        let mib = self.mib.to_string();
        let holders: Vec<Holder> = (0..self.processes)
            .map(|_| place.lab('q', &["mixture", "--duplicate", &format!("{DUPLICATE}%"), "--mib", &mib]))
            .collect::<Result<_>>()?;
        let worker = if self.restless { Some(place.lab('w', &WORKER)?) } else { None };
        let guests = self.start()?;
        let domain = format!("[[domain]]\nname = \"quiet\"\nusers = [0]\nvms = [\"{NAMES}-*\"]\n");
        let config = place.config("", &["qemu-system-*"]) + &domain;
        let driver = Driver::daemon(&self.pagefold, &config, log, &ksm)?;
        let daemon = driver.as_daemon().context("a daemon")?;
        let pids = |least: u64| {
            let holders = holders.iter().map(move |holder| (holder.pid(), least));
            holders.chain(guests.iter().map(|(_, pid)| (*pid, 1))).chain(worker.iter().map(|worker| (worker.pid(), 0)))
        };
        let least = (self.mib * 256 * DUPLICATE / 100) as f64 * MOST;
        let reached = self.wait(daemon, &pids(least as u64).collect::<Vec<_>>())?;
        let peak = memory(daemon.pid(), "VmHWM:")?;
        let managed: f64 = pids(0).map(|(pid, _)| resident(pid)).sum::<Result<f64>>()?;
        let looks = passes(daemon)?;
        let (began, before) = (Instant::now(), driver.cpu()?);
        let mut samples = Vec::new();
        while began.elapsed() < self.length {
            pause_for((self.length / 60).clamp(Duration::from_millis(500), Duration::from_secs(30)))?;
            let cpu = driver.cpu()?;
            samples.push(Sample {
                seconds: began.elapsed().as_secs_f64(),
                ksmd: cpu.ksmd - before.ksmd,
                driver: cpu.driver - before.driver,
                resident: resident(daemon.pid())?,
            });
        }
        let looks = passes(daemon)? - looks;
        driver.end()?;
        Ok(self.findings(&samples, managed, (reached, peak, looks)))
    }

    /// Start the virtual machines, and wait until each is ready.
    fn start(&self) -> Result<Vec<(Guest, u32)>> {
        let ready = |number| {
            let mut guest = Guest::start(number, self.guest_mib, false)?;
            let pid = guest.wait()?;
            Ok((guest, pid))
        };
        (0..self.guests).map(ready).collect()
    }

    /// Wait until of each so many pages are merged, and nothing more came for a while. Tells the bytes that were merged.
    fn wait(&self, daemon: &Daemon, whom: &[(u32, u64)]) -> Result<f64> {
        let (began, mut last, mut since) = (Instant::now(), (0, 0), Instant::now());
        loop {
            let status = daemon.status()?;
            let number = |name: &str| status["passes"][name].as_i64().unwrap_or(0);
            let now = (number("merges"), number("reached"));
            if now != last {
                (last, since) = (now, Instant::now());
            }
            let pages: Vec<u64> = whom.iter().map(|(pid, _)| merged_pages(*pid)).collect::<Result<_>>()?;
            let all = pages.iter().zip(whom).all(|(pages, (_, least))| pages >= least);
            if all && since.elapsed() >= self.calm {
                return Ok(last.1 as f64);
            }
            ensure!(
                began.elapsed() < PATIENCE,
                "it does not come to rest within {PATIENCE:?}: {last:?}, pages of each {pages:?}"
            );
            pause_for(Duration::from_secs(1))?;
        }
    }

    fn findings(&self, samples: &[Sample], managed: f64, (reached, peak, looks): (f64, f64, u64)) -> Findings {
        let mut findings = Findings::new("seconds,ksmd_seconds,daemon_seconds,resident_bytes");
        for Sample { seconds, ksmd, driver, resident } in samples {
            findings.samples.push(format!("{seconds:.1},{ksmd:.4},{driver:.4},{resident:.0}"));
        }
        let Some(last) = samples.last() else { return findings };
        let share = (last.ksmd + last.driver) / last.seconds;
        let most = samples.iter().map(|sample| sample.resident).fold(0.0, f64::max);
        // A census under way takes memory and gives it back.
        let median = |samples: &[Sample]| {
            let mut resident: Vec<f64> = samples.iter().map(|sample| sample.resident).collect();
            resident.sort_by(f64::total_cmp);
            resident.get(resident.len() / 2).copied().unwrap_or(most)
        };
        let (early, late) = samples.split_at(samples.len() / 2);
        let (early, late) = (median(early), median(late));
        let bound = MEMORY + OF_MANAGED * managed;
        let title = format!(
            "{} of {} MiB and {}, merged{}, for {:.0} s",
            counted(u64::from(self.processes), "idle process", "idle processes"),
            self.mib,
            counted(self.guests as u64, "idle virtual machine", "idle virtual machines"),
            if self.restless { ", beside a process that works a little" } else { "" },
            last.seconds
        );
        let mut table = Table::new(title, &["of", "value"]);
        for (of, value) in [
            ("merged before, MiB", format!("{:.0}", reached / MIB)),
            ("censuses meanwhile", looks.to_string()),
            ("ksmd, CPU s", format!("{:.3}", last.ksmd)),
            ("daemon, CPU s", format!("{:.2}", last.driver)),
            ("both, % of one core", format!("{:.3}", share * 100.0)),
            ("daemon's memory, median of the first half, MiB", format!("{:.1}", early / MIB)),
            ("daemon's memory, median of the second half, MiB", format!("{:.1}", late / MIB)),
            ("daemon's memory at most, MiB", format!("{:.1}", most / MIB)),
            ("its peak before, at work, MiB", format!("{:.1}", peak / MIB)),
            ("managed memory, MiB", format!("{:.0}", managed / MIB)),
        ] {
            table.rows.push(vec![of.to_owned(), value]);
        }
        findings.tables.push(table);
        findings.bars.push(Bar {
            claim: format!("a quiet host costs under {:.1} % of one core", SHARE * 100.0),
            measured: format!("{:.3} %", share * 100.0),
            met: share < SHARE,
        });
        findings.bars.push(Bar {
            claim: format!("no growth of memory over {:.0} s", last.seconds),
            measured: format!("{:+.1} MiB from the first half to the second", (late - early) / MIB),
            met: late <= early + GRAIN,
        });
        findings.bars.push(Bar {
            claim: "resident memory of at most 32 MiB and 0.4 % of what is managed, at work too".to_owned(),
            measured: format!("{:.1} of {:.1} MiB, {:.1} at work", most / MIB, bound / MIB, peak / MIB),
            met: most.max(peak) <= bound,
        });
        if self.restless {
            findings.bars.push(Bar {
                claim: "there are looks meanwhile, as at who works a little".to_owned(),
                measured: counted(looks, "census", "censuses"),
                met: looks > 0,
            });
        }
        findings
    }
}

/// A number of things.
fn counted(number: u64, one: &str, more: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { more })
}

/// Passes of a daemon so far.
fn passes(daemon: &Daemon) -> Result<u64> {
    daemon.status()?["passes"]["passes"].as_u64().context("passes")
}

/// Resident memory of a process in bytes.
fn resident(pid: u32) -> Result<f64> {
    memory(pid, "VmRSS:")
}

/// A size of a process in bytes, by its name in proc_pid_status(5).
fn memory(pid: u32, name: &str) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("no {name}"))?;
    let kib: f64 = line.trim().trim_end_matches("kB").trim().parse().with_context(|| name.to_owned())?;
    Ok(kib * 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(guests: usize, restless: bool, looks: u64) -> Findings {
        let (length, calm, pagefold) = (Duration::from_secs(60), Duration::from_secs(5), PathBuf::new());
        let quiet = Quiet { length, calm, processes: 4, mib: 32, guests, guest_mib: 128, restless, pagefold };
        let sample = |seconds: f64| Sample { seconds, ksmd: 0.0, driver: 0.01, resident: MIB };
        quiet.findings(&[sample(30.0), sample(60.0)], 1024.0 * MIB, (MIB, MIB, looks))
    }

    #[test]
    fn who_works_a_little_has_to_be_looked_at() {
        let met = |restless, looks| found(1, restless, looks).bars.iter().map(|bar| bar.met).collect::<Vec<_>>();
        assert_eq!(met(true, 0), [true, true, true, false]);
        assert_eq!(met(true, 1), [true; 4]);
        assert_eq!(met(false, 0), [true; 3]);
    }

    #[test]
    fn one_machine_is_no_machines() {
        let title = |guests, restless| found(guests, restless, 1).tables[0].title.clone();
        assert_eq!(title(1, false), "4 idle processes of 32 MiB and 1 idle virtual machine, merged, for 60 s");
        assert_eq!(
            title(4, true),
            "4 idle processes of 32 MiB and 4 idle virtual machines, merged, beside a process that works a little, for 60 s"
        );
    }
}
