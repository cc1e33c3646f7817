//! Programs with similar names and sizes, which do not show which programs have equal pages. First two programs of each
//! template run, then one more of each starts. The daemon has CPU time to scan only a few programs at once.

use super::driver::{DriverCpuSeconds, KsmDriver, KsmDriverKind};
use super::hostile_mix::{ProgramFolder, count_merged_pages};
use crate::findings::{Findings, MarkdownTable, ThresholdCheck};
use crate::merge::running_program::RunningProgram;
use crate::merge::trial::sleep_unless_signaled;
use anyhow::{Result, ensure};
use pagefold_labs::ksm::KsmTestGuard;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The percentage of the memory of each program that is equal in all programs of its template.
const DUPLICATE_PERCENT: u64 = 50;

/// The merged share of that memory from which a program counts as merged.
const MERGED_SHARE: f64 = 0.9;

/// The interval between two steps of a policy, and between two scans of programs that are not merged yet.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The similar programs.
#[derive(Clone, Debug)]
pub struct SimilarProgramsBenchmark {
    /// Number of templates.
    pub templates: usize,
    /// Memory of each program, in MiB.
    pub mib: u64,
    /// CPU time that the daemon's token bucket holds at most.
    pub burst: Duration,
    /// Time limit of the run.
    pub timeout: Duration,
    /// The pagefold binary.
    pub pagefold: PathBuf,
}

/// A program, and the checksum of its memory.
struct TemplateProgram {
    process: RunningProgram,
    checksum: String,
    ready_at: Instant,
    merged_seconds: Option<f64>,
}

/// The result of a driver.
pub struct SimilarProgramsRun {
    driver_kind: KsmDriverKind,
    /// Seconds from READY until each program was merged: the first two of each template, and the later ones.
    merged_seconds: [Vec<Option<f64>>; 2],
    seconds: f64,
    cpu: DriverCpuSeconds,
}

impl SimilarProgramsBenchmark {
    /// Run the programs under a driver. It reserves KSM meanwhile.
    pub fn run(&self, driver_kind: KsmDriverKind, log: &Path) -> Result<SimilarProgramsRun> {
        let ksm = KsmTestGuard::acquire().map_err(anyhow::Error::msg)?;
        let folder = ProgramFolder::new("pfalike")?.with_enrollment(driver_kind.enrolls_whole_qemu());
        let config = folder.daemon_config(&format!("cpu_burst = \"{}ms\"", self.burst.as_millis()), &[]);
        let mut driver = match driver_kind {
            KsmDriverKind::Policy(policy) => KsmDriver::start_policy(policy, &ksm)?,
            KsmDriverKind::Daemon => KsmDriver::start_daemon(&self.pagefold, &config, log, &ksm)?,
        };
        let start = Instant::now();
        let mut programs = Vec::new();
        for copies in [2, 1] {
            for template in (0..copies).flat_map(|_| 0..self.templates) {
                programs.push(self.start(&folder, template)?);
                self.poll(&mut driver, start, &mut programs)?;
            }
            let batch_start = Instant::now();
            while batch_start.elapsed() < self.timeout
                && programs.iter().any(|program| program.merged_seconds.is_none())
            {
                self.poll(&mut driver, start, &mut programs)?;
                sleep_unless_signaled(POLL_INTERVAL)?;
            }
        }
        let (seconds, cpu) = (start.elapsed().as_secs_f64(), driver.read_cpu_seconds()?);
        driver.stop()?;
        for program in &mut programs {
            let current = program.process.query("checksum")?;
            ensure!(
                current == program.checksum,
                "its memory has changed: checksum {current} instead of {}",
                program.checksum
            );
        }
        let mut merged: Vec<Option<f64>> = programs.iter().map(|program| program.merged_seconds).collect();
        let later = merged.split_off(2 * self.templates);
        Ok(SimilarProgramsRun { driver_kind, merged_seconds: [merged, later], seconds, cpu })
    }

    fn start(&self, folder: &ProgramFolder, template: usize) -> Result<TemplateProgram> {
        let (mib, share) = (self.mib.to_string(), format!("{DUPLICATE_PERCENT}%"));
        let seed = format!("template {template}");
        let mut process =
            folder.start_lab('x', &["mixture", "--mib", &mib, "--duplicate-share", &share, "--seed", &seed])?;
        let ready = Instant::now();
        Ok(TemplateProgram { checksum: process.query("checksum")?, process, ready_at: ready, merged_seconds: None })
    }

    /// Take the policy steps that are due, and update which programs are merged.
    fn poll(&self, driver: &mut KsmDriver<'_>, start: Instant, programs: &mut [TemplateProgram]) -> Result<()> {
        let page = pagefold_sys::mapping::page_size() as u64;
        let min_pages = ((self.mib << 20) / page * DUPLICATE_PERCENT / 100) as f64 * MERGED_SHARE;
        driver.poll(start.elapsed().as_secs_f64())?;
        for program in programs.iter_mut().filter(|program| program.merged_seconds.is_none()) {
            if count_merged_pages(program.process.pid())? as f64 >= min_pages {
                program.merged_seconds = Some(program.ready_at.elapsed().as_secs_f64());
            }
        }
        Ok(())
    }
}

/// How many are merged, and seconds until half of all and the last were merged.
fn merge_summary_cells(merged: &[Option<f64>]) -> [String; 3] {
    let mut seconds: Vec<f64> = merged.iter().map(|merged| merged.unwrap_or(f64::INFINITY)).collect();
    seconds.sort_by(f64::total_cmp);
    let format_seconds = |seconds: Option<&f64>| match seconds {
        Some(seconds) if seconds.is_finite() => format!("{seconds:.1}"),
        _ => "never".to_owned(),
    };
    let count = merged.iter().flatten().count();
    [
        format!("{count} of {}", merged.len()),
        format_seconds(seconds.get(merged.len().div_ceil(2).max(1) - 1)),
        format_seconds(seconds.last()),
    ]
}

/// The results of all drivers, side by side.
pub fn build_findings(benchmark: &SimilarProgramsBenchmark, runs: &[SimilarProgramsRun]) -> Findings {
    let mut findings = Findings::new("way,came,merged_after_seconds");
    let title = format!(
        "{} similar programs of {} MiB, two of each of {} templates, and then one more of each",
        benchmark.templates * 2,
        benchmark.mib,
        benchmark.templates
    );
    let head = [
        "driver",
        "merged",
        "half after s",
        "all after s",
        "later ones",
        "half after s",
        "all after s",
        "CPU %",
        "CPU s",
    ];
    let mut table = MarkdownTable::new(title, &head);
    for run in runs {
        let [first, later] = run.merged_seconds.each_ref().map(|merged| merge_summary_cells(merged));
        let cpu = [run.cpu.total() / run.seconds * 100.0, run.cpu.total()].map(|cpu| format!("{cpu:.2}"));
        table.rows.push([&[run.driver_kind.name().to_owned()][..], &first, &later, &cpu].concat());
        for (batch, merged) in ["first", "later"].into_iter().zip(&run.merged_seconds) {
            for merged in merged {
                let seconds = merged.map(|seconds| format!("{seconds:.2}")).unwrap_or_default();
                findings.samples.push(format!("{},{batch},{seconds}", run.driver_kind.name()));
            }
        }
    }
    table.notes.push(format!(
        "After: seconds from READY until {:.0} % of a program's pages common to its template are merged. CPU: \
         ksmd and its driver, until all were, or for {} s each time. Policies run at no CPU cost, on programs \
         that are enrolled whole from their start, and ksmtuned as if memory were short. The daemon's burst is \
         {} ms of CPU time.",
        MERGED_SHARE * 100.0,
        benchmark.timeout.as_secs(),
        benchmark.burst.as_millis()
    ));
    findings.tables.push(table);
    if let Some(run) = runs.iter().find(|run| run.driver_kind == KsmDriverKind::Daemon) {
        let merged_seconds = run.merged_seconds.concat();
        findings.checks.push(ThresholdCheck {
            claim: "all programs are merged, although their names and sizes are similar".to_owned(),
            measured: merge_summary_cells(&merged_seconds)[0].clone(),
            met: merged_seconds.iter().all(Option::is_some),
        });
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_merged_program_sorts_last() {
        assert_eq!(merge_summary_cells(&[Some(3.0), None, Some(1.0)]), ["2 of 3", "3.0", "never"]);
        assert_eq!(merge_summary_cells(&[Some(3.0), Some(1.0)]), ["2 of 2", "1.0", "3.0"]);
        assert_eq!(merge_summary_cells(&[None]), ["0 of 1", "never", "never"]);
    }
}
