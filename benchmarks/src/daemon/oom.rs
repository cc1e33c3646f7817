//! A host that is driven to its memory limit: how many programs fit before the kernel kills one, with the daemon and
//! without.
//!
//! The host is an emulated guest, so that no process of the real host is harmed. The workload consists of lab programs
//! with partly equal memory, like guests of one template, started one after the other. Emulated CPUs are many times
//! slower than real ones: the daemon gets a larger share of one CPU there.

use crate::findings::{Findings, MarkdownTable, ThresholdCheck};
use crate::merge::trial::sleep_unless_signaled;
use anyhow::{Context, Result, ensure};
use pagefold_labs::assets::GuestAssets;
use pagefold_labs::machine::EmulatedMachine;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Target: how many times as many programs fit with the daemon.
const MIN_CAPACITY_RATIO: f64 = 4.0 / 3.0;

/// Time limit of a run.
const RUN_TIMEOUT: Duration = Duration::from_secs(1800);

/// The host and its programs.
#[derive(Clone, Debug)]
pub struct OomBenchmark {
    /// Memory of the host, in MiB.
    pub host_mib: u32,
    /// Memory of each program, in MiB.
    pub program_mib: u32,
    /// The share of a program's memory that is equal in all programs, in percent.
    pub duplicate_percent: u32,
    /// Seconds from READY of one program to the start of the next.
    pub start_interval_seconds: u32,
    /// The pagefold binary.
    pub pagefold: PathBuf,
}

/// The result of a host.
#[derive(Clone, Debug, Default, PartialEq)]
struct OomHostResult {
    /// Readings after each program start: the number of programs, `pages_sharing`, and `MemAvailable` in KiB.
    program_readings: Vec<(u64, u64, u64)>,
    /// Processes that the kernel killed for lack of memory.
    oom_kills: u64,
    /// Programs that were ready and have vanished.
    lost_programs: u64,
    /// Whether the daemon was still running.
    daemon_alive: bool,
}

impl OomHostResult {
    fn parse(output: &str) -> Option<Self> {
        let mut result = Self::default();
        for line in output.lines() {
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            match words[..] {
                ["FIT", count, "sharing", sharing, "available_kib", available] => {
                    result.program_readings.push((count.parse().ok()?, sharing.parse().ok()?, available.parse().ok()?));
                }
                ["KILLED", killed, "GONE", gone] => {
                    (result.oom_kills, result.lost_programs) = (killed.parse().ok()?, gone.parse().ok()?)
                }
                ["DAEMON", "lives"] => result.daemon_alive = true,
                ["ENDED"] => return Some(result),
                _ => {}
            }
        }
        None
    }

    fn max_programs(&self) -> u64 {
        self.program_readings.last().map_or(0, |fit| fit.0)
    }
}

impl OomBenchmark {
    /// Run the measurement.
    pub fn measure(&self, folder: &Path) -> Result<Findings> {
        let without = self.run(false, 200, folder)?;
        ensure!(without.oom_kills > 0, "the kernel killed no process: the host did not reach its memory limit");
        // Twice as many programs are enough to judge.
        let with = self.run(true, without.max_programs() * 2, folder)?;
        Ok(self.build_findings(&without, &with))
    }

    fn run(&self, daemon: bool, max_programs: u64, folder: &Path) -> Result<OomHostResult> {
        let assets = GuestAssets::find(&GuestAssets::default_directory())?;
        let work = tempfile::tempdir()?;
        let pagefold = strip_program(&self.pagefold, &work.path().join("pagefold"))?;
        let lab = strip_program(&pagefold_labs::client::lab_binary()?, &work.path().join("lab"))?;
        let words = format!(
            "lab.mib={} lab.duplicate={} lab.pause={} lab.most={max_programs} lab.daemon={}",
            self.program_mib,
            self.duplicate_percent,
            self.start_interval_seconds,
            u8::from(daemon)
        );
        let config = "[daemon]\ncpu_rate = \"100%\"\ncpu_burst = \"5m\"\nmax_cpu_seconds_per_mib = 0.5\n\
             [daemon.tracked]\nnames = [\"pagefold-lab\"]\n";
        let machine = EmulatedMachine {
            kernel: &assets.kernel,
            init: &crate::merge::lab_file("guest/init-oom"),
            programs: &[(&pagefold, "pagefold"), (&lab, "bin/pagefold-lab")],
            files: &[("pagefold.toml", config)],
            options: &["-cpu", "max", "-smp", "2", "-m", &format!("{}M", self.host_mib)],
            kernel_arguments: &words,
        };
        let mut poll = || sleep_unless_signaled(Duration::ZERO).map_err(io::Error::other);
        let output = machine.run(work.path(), RUN_TIMEOUT, &mut poll).context("cannot run the emulated host")?;
        let name = if daemon { "with.log" } else { "without.log" };
        fs::write(folder.join(name), &output)?;
        OomHostResult::parse(&output).with_context(|| format!("the emulated host did not finish: see {name}"))
    }

    fn build_findings(&self, without: &OomHostResult, with: &OomHostResult) -> Findings {
        let mut findings = Findings::new("way,programs,pages_sharing,available_kib");
        let title = format!(
            "Programs of {} MiB, {} % of it equal in all, in an emulated host of {} MiB, one each {} s; the daemon has \
             `cpu_rate = \"100%\"`, `cpu_burst = \"5m\"` and `max_cpu_seconds_per_mib = 0.5`, since an \
             emulated CPU is slow",
            self.program_mib, self.duplicate_percent, self.host_mib, self.start_interval_seconds
        );
        let head = ["variant", "programs that fit", "killed by the kernel", "pages_sharing"];
        let mut table = MarkdownTable::new(title, &head);
        for (variant, result) in [("without", without), ("with the daemon", with)] {
            let sharing = result.program_readings.last().map_or(0, |fit| fit.1);
            table.rows.push(vec![
                variant.to_owned(),
                result.max_programs().to_string(),
                result.oom_kills.to_string(),
                sharing.to_string(),
            ]);
            for (count, sharing, available) in &result.program_readings {
                findings.samples.push(format!("{variant},{count},{sharing},{available}"));
            }
        }
        if with.oom_kills == 0 {
            let note = "With the daemon, the run was stopped at twice as many programs, without a kill.";
            table.notes.push(note.to_owned());
        }
        findings.tables.push(table);
        let ratio = with.max_programs() as f64 / without.max_programs().max(1) as f64;
        findings.checks.push(ThresholdCheck {
            claim: "with the daemon one third more programs fit before the kernel kills one".to_owned(),
            measured: format!(
                "{ratio:.2} times as many: {} instead of {}",
                with.max_programs(),
                without.max_programs()
            ),
            met: ratio >= MIN_CAPACITY_RATIO,
        });
        findings.checks.push(ThresholdCheck {
            claim: "only the kernel kills programs, and the daemon keeps running".to_owned(),
            measured: format!("{} gone, {} killed by the kernel", with.lost_programs, with.oom_kills),
            met: with.lost_programs <= with.oom_kills && with.daemon_alive,
        });
        findings
    }
}

/// The program without debug sections: the emulated host keeps it in memory.
fn strip_program(program: &Path, stripped: &Path) -> Result<PathBuf> {
    let status = Command::new("strip").arg("-o").arg(stripped).arg(program).status();
    if !status.is_ok_and(|status| status.success()) {
        fs::copy(program, stripped).with_context(|| program.display().to_string())?;
    }
    Ok(stripped.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_output_is_parsed() {
        let said = "6.1.0\nFIT 1 sharing 0 available_kib 200\nFIT 2 sharing 10 available_kib 190\nKILLED 1 GONE 0\n\
                    [ 1.0] Out of memory: Killed process 7\nDAEMON lives\nENDED\n";
        let fate = OomHostResult {
            program_readings: vec![(1, 0, 200), (2, 10, 190)],
            oom_kills: 1,
            lost_programs: 0,
            daemon_alive: true,
        };
        assert_eq!((OomHostResult::parse(said), fate.max_programs()), (Some(fate.clone()), 2));
        assert_eq!(OomHostResult::parse(&said.replace("ENDED", "")), None, "the output is incomplete");
    }

    #[test]
    fn four_thirds_capacity_is_required() {
        let limit = OomBenchmark {
            host_mib: 384,
            program_mib: 24,
            duplicate_percent: 50,
            start_interval_seconds: 8,
            pagefold: PathBuf::new(),
        };
        let fate = |count, killed, gone| OomHostResult {
            program_readings: vec![(count, 0, 0)],
            oom_kills: killed,
            lost_programs: gone,
            daemon_alive: true,
        };
        let met = |with: &OomHostResult| {
            limit.build_findings(&fate(12, 1, 0), with).checks.iter().map(|bar| bar.met).collect::<Vec<_>>()
        };
        assert_eq!(met(&fate(16, 1, 1)), [true, true]);
        assert_eq!(met(&fate(15, 1, 2)), [false, false]);
    }
}
