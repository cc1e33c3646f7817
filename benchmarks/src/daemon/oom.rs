//! A host that is driven to its memory limit: how much work it fits before the kernel kills, with the daemon and
//! without.
//!
//! The host is an emulated guest, so that nobody else is harmed. The work are programs of the lab that hold the same in
//! part, as machines of one template do, started one after the other. Emulated CPUs are many times slower than real
//! ones: the daemon is given a larger share of one there.

use crate::merge::trial::pause_for;
use crate::report::{Bar, Findings, Table};
use anyhow::{Context, Result, ensure};
use pagefold_labs::assets::Assets;
use pagefold_labs::machine::Machine;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// How much more it fits with the daemon.
const MORE: f64 = 4.0 / 3.0;

/// How long a run may take.
const LIMIT: Duration = Duration::from_secs(1800);

/// What is driven to its limit.
#[derive(Clone, Debug)]
pub struct Limit {
    /// Memory of the host, in MiB.
    pub memory: u32,
    /// Memory of each program, in MiB,
    pub mib: u32,
    /// and the share of it that all hold, in percent.
    pub duplicate: u32,
    /// Seconds between one that is ready and the next.
    pub pause: u32,
    /// The binary.
    pub pagefold: PathBuf,
}

/// What became of a host.
#[derive(Clone, Debug, Default, PartialEq)]
struct Fate {
    /// Programs that it held: how many, `pages_sharing` and `MemAvailable` in KiB after each.
    fits: Vec<(u64, u64, u64)>,
    /// Processes that the kernel killed for lack of memory.
    killed: u64,
    /// Programs that were ready and are gone.
    gone: u64,
    /// Whether the daemon was still there.
    daemon: bool,
}

impl Fate {
    fn parse(said: &str) -> Option<Self> {
        let mut fate = Self::default();
        for line in said.lines() {
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            match words[..] {
                ["FIT", count, "sharing", sharing, "available_kib", available] => {
                    fate.fits.push((count.parse().ok()?, sharing.parse().ok()?, available.parse().ok()?));
                }
                ["KILLED", killed, "GONE", gone] => {
                    (fate.killed, fate.gone) = (killed.parse().ok()?, gone.parse().ok()?)
                }
                ["DAEMON", "lives"] => fate.daemon = true,
                ["ENDED"] => return Some(fate),
                _ => {}
            }
        }
        None
    }

    fn count(&self) -> u64 {
        self.fits.last().map_or(0, |fit| fit.0)
    }
}

impl Limit {
    /// Measure it.
    pub fn measure(&self, folder: &Path) -> Result<Findings> {
        let without = self.run(false, 200, folder)?;
        ensure!(without.killed > 0, "the kernel has killed nobody");
        // Twice as many tell enough.
        let with = self.run(true, without.count() * 2, folder)?;
        Ok(self.findings(&without, &with))
    }

    fn run(&self, daemon: bool, most: u64, folder: &Path) -> Result<Fate> {
        let assets = Assets::find(&Assets::directory())?;
        let work = tempfile::tempdir()?;
        let pagefold = stripped(&self.pagefold, &work.path().join("pagefold"))?;
        let lab = stripped(&pagefold_labs::client::binary()?, &work.path().join("lab"))?;
        let words = format!(
            "lab.mib={} lab.duplicate={} lab.pause={} lab.most={most} lab.daemon={}",
            self.mib,
            self.duplicate,
            self.pause,
            u8::from(daemon)
        );
        let config =
            "[daemon]\ncpu = \"100%\"\nburst = \"5m\"\nprice = 0.5\n[daemon.only]\nnames = [\"pagefold-lab\"]\n";
        let machine = Machine {
            kernel: &assets.kernel,
            init: &crate::merge::lab_file("guest/init-oom"),
            programs: &[(&pagefold, "pagefold"), (&lab, "bin/pagefold-lab")],
            files: &[("pagefold.toml", config)],
            options: &["-cpu", "max", "-smp", "2", "-m", &format!("{}M", self.memory)],
            words: &words,
        };
        let mut meanwhile = || pause_for(Duration::ZERO).map_err(io::Error::other);
        let said = machine.run(work.path(), LIMIT, &mut meanwhile).context("an emulated host")?;
        let name = if daemon { "with.log" } else { "without.log" };
        fs::write(folder.join(name), &said)?;
        Fate::parse(&said).with_context(|| format!("the host has not come to its end: see {name}"))
    }

    fn findings(&self, without: &Fate, with: &Fate) -> Findings {
        let mut findings = Findings::new("way,programs,pages_sharing,available_kib");
        let title = format!(
            "Programs of {} MiB, {} % of it the same in all, in an emulated host of {} MiB, one each {} s; the daemon has \
             `cpu = \"100%\"`, `burst = \"5m\"` and `price = 0.5`, since an emulated CPU is slow",
            self.mib, self.duplicate, self.memory, self.pause
        );
        let head = ["way", "programs that fit", "killed by the kernel", "pages_sharing"];
        let mut table = Table::new(title, &head);
        for (way, fate) in [("without", without), ("with the daemon", with)] {
            let sharing = fate.fits.last().map_or(0, |fit| fit.1);
            table.rows.push(vec![
                way.to_owned(),
                fate.count().to_string(),
                fate.killed.to_string(),
                sharing.to_string(),
            ]);
            for (count, sharing, available) in &fate.fits {
                findings.samples.push(format!("{way},{count},{sharing},{available}"));
            }
        }
        if with.killed == 0 {
            table.notes.push("With the daemon it was ended at twice as many, with nobody killed.".to_owned());
        }
        findings.tables.push(table);
        let more = with.count() as f64 / without.count().max(1) as f64;
        findings.bars.push(Bar {
            claim: "with the daemon a host fits one third more before the kernel kills".to_owned(),
            measured: format!("{more:.2} times as many: {} instead of {}", with.count(), without.count()),
            met: more >= MORE,
        });
        findings.bars.push(Bar {
            claim: "nobody is killed but by the kernel, and the daemon stays".to_owned(),
            measured: format!("{} gone, {} killed by the kernel", with.gone, with.killed),
            met: with.gone <= with.killed && with.daemon,
        });
        findings
    }
}

/// A program without what is only for debuggers: in the host it lies in memory.
fn stripped(program: &Path, to: &Path) -> Result<PathBuf> {
    let done = Command::new("strip").arg("-o").arg(to).arg(program).status();
    if !done.is_ok_and(|status| status.success()) {
        fs::copy(program, to).with_context(|| program.display().to_string())?;
    }
    Ok(to.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_host_says_is_read() {
        let said = "6.1.0\nFIT 1 sharing 0 available_kib 200\nFIT 2 sharing 10 available_kib 190\nKILLED 1 GONE 0\n\
                    [ 1.0] Out of memory: Killed process 7\nDAEMON lives\nENDED\n";
        let fate = Fate { fits: vec![(1, 0, 200), (2, 10, 190)], killed: 1, gone: 0, daemon: true };
        assert_eq!((Fate::parse(said), fate.count()), (Some(fate.clone()), 2));
        assert_eq!(Fate::parse(&said.replace("ENDED", "")), None, "it was not ended");
    }

    #[test]
    fn a_third_more_is_asked_for() {
        let limit = Limit { memory: 384, mib: 24, duplicate: 50, pause: 8, pagefold: PathBuf::new() };
        let fate = |count, killed, gone| Fate { fits: vec![(count, 0, 0)], killed, gone, daemon: true };
        let met =
            |with: &Fate| limit.findings(&fate(12, 1, 0), with).bars.iter().map(|bar| bar.met).collect::<Vec<_>>();
        assert_eq!(met(&fate(16, 1, 1)), [true, true]);
        assert_eq!(met(&fate(15, 1, 2)), [false, false]);
    }
}
