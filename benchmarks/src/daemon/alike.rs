//! Programs that look alike: by their names and sizes nobody tells which of them hold the same. There are two of each
//! template, and then comes one more of each. The daemon has CPU time to look at few of them at once.

use super::driver::{Cpu, Driver, Way};
use super::hostile::{Place, merged_pages};
use crate::merge::holder::Holder;
use crate::merge::trial::pause_for;
use crate::report::{Bar, Findings, Table};
use anyhow::{Result, ensure};
use pagefold_labs::ksm::Ksm;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The percentage of the memory of each that others of its template hold, too.
const DUPLICATE: u64 = 50;

/// The part of that of which a program counts as merged.
const MOST: f64 = 0.9;

/// Between two steps of a policy, and two looks at those that are not merged yet.
const TICK: Duration = Duration::from_millis(100);

/// What looks alike.
#[derive(Clone, Debug)]
pub struct Alike {
    /// How many templates.
    pub templates: usize,
    /// Memory of each program, in MiB.
    pub mib: u64,
    /// CPU time that the daemon may save up.
    pub burst: Duration,
    /// How long it is waited for.
    pub patience: Duration,
    /// The binary.
    pub pagefold: PathBuf,
}

/// A program, and the checksum of its memory.
struct Program {
    holder: Holder,
    checksum: String,
    ready: Instant,
    merged: Option<f64>,
}

/// What came of a way.
pub struct Run {
    way: Way,
    /// Seconds from READY until each was merged: of two of each template, and of those that came later.
    merged: [Vec<Option<f64>>; 2],
    seconds: f64,
    cpu: Cpu,
}

impl Alike {
    /// Let them run under a way. KSM is held meanwhile.
    pub fn run(&self, way: Way, log: &Path) -> Result<Run> {
        let ksm = Ksm::take().map_err(anyhow::Error::msg)?;
        let place = Place::new("pfalike")?.enrolled(way.enrols());
        let config = place.config(&format!("burst = \"{}ms\"", self.burst.as_millis()), &[]);
        let mut driver = match way {
            Way::Policy(policy) => Driver::policy(policy, &ksm)?,
            Way::Daemon => Driver::daemon(&self.pagefold, &config, log, &ksm)?,
        };
        let began = Instant::now();
        let mut programs = Vec::new();
        for times in [2, 1] {
            for template in (0..times).flat_map(|_| 0..self.templates) {
                programs.push(self.start(&place, template)?);
                self.step(&mut driver, began, &mut programs)?;
            }
            let since = Instant::now();
            while since.elapsed() < self.patience && programs.iter().any(|program| program.merged.is_none()) {
                self.step(&mut driver, began, &mut programs)?;
                pause_for(TICK)?;
            }
        }
        let (seconds, cpu) = (began.elapsed().as_secs_f64(), driver.cpu()?);
        driver.end()?;
        for program in &mut programs {
            let now = program.holder.ask("checksum")?;
            ensure!(now == program.checksum, "its memory is not what it was: {now} instead of {}", program.checksum);
        }
        let mut merged: Vec<Option<f64>> = programs.iter().map(|program| program.merged).collect();
        let later = merged.split_off(2 * self.templates);
        Ok(Run { way, merged: [merged, later], seconds, cpu })
    }

    fn start(&self, place: &Place, template: usize) -> Result<Program> {
        let (mib, part) = (self.mib.to_string(), format!("{DUPLICATE}%"));
        let seed = format!("template {template}");
        let mut holder = place.lab('x', &["mixture", "--mib", &mib, "--duplicate", &part, "--seed", &seed])?;
        let ready = Instant::now();
        Ok(Program { checksum: holder.ask("checksum")?, holder, ready, merged: None })
    }

    /// Take the steps of a policy that are due, and see who is merged.
    fn step(&self, driver: &mut Driver<'_>, began: Instant, programs: &mut [Program]) -> Result<()> {
        let page = pagefold_sys::mapping::page_size() as u64;
        let least = ((self.mib << 20) / page * DUPLICATE / 100) as f64 * MOST;
        driver.follow(began.elapsed().as_secs_f64())?;
        for program in programs.iter_mut().filter(|program| program.merged.is_none()) {
            if merged_pages(program.holder.pid())? as f64 >= least {
                program.merged = Some(program.ready.elapsed().as_secs_f64());
            }
        }
        Ok(())
    }
}

/// How many are merged, and seconds until half of all and the last were.
fn told(merged: &[Option<f64>]) -> [String; 3] {
    let mut seconds: Vec<f64> = merged.iter().map(|merged| merged.unwrap_or(f64::INFINITY)).collect();
    seconds.sort_by(f64::total_cmp);
    let at = |seconds: Option<&f64>| match seconds {
        Some(seconds) if seconds.is_finite() => format!("{seconds:.1}"),
        _ => "never".to_owned(),
    };
    let count = merged.iter().flatten().count();
    [format!("{count} of {}", merged.len()), at(seconds.get(merged.len().div_ceil(2).max(1) - 1)), at(seconds.last())]
}

/// What came of all ways, side by side.
pub fn findings(alike: &Alike, runs: &[Run]) -> Findings {
    let mut findings = Findings::new("way,came,merged_after_seconds");
    let title = format!(
        "{} programs of {} MiB that look alike, two of each of {} templates, and then one more of each",
        alike.templates * 2,
        alike.mib,
        alike.templates
    );
    let head =
        ["way", "merged", "half after s", "all after s", "later ones", "half after s", "all after s", "CPU %", "CPU s"];
    let mut table = Table::new(title, &head);
    for run in runs {
        let [first, later] = run.merged.each_ref().map(|merged| told(merged));
        let cpu = [run.cpu.all() / run.seconds * 100.0, run.cpu.all()].map(|cpu| format!("{cpu:.2}"));
        table.rows.push([&[run.way.name().to_owned()][..], &first, &later, &cpu].concat());
        for (came, merged) in ["first", "later"].into_iter().zip(&run.merged) {
            for merged in merged {
                let seconds = merged.map(|seconds| format!("{seconds:.2}")).unwrap_or_default();
                findings.samples.push(format!("{},{came},{seconds}", run.way.name()));
            }
        }
    }
    table.notes.push(format!(
        "After: seconds from READY until {:.0} % of what a program shares with others of its template is merged. CPU: \
         ksmd and who drives it, until all were, or for {} s each time. Policies are followed at no cost, on programs \
         that are enrolled whole from their beginning, and ksmtuned as if memory were short. The daemon may save up \
         {} ms of CPU time.",
        MOST * 100.0,
        alike.patience.as_secs(),
        alike.burst.as_millis()
    ));
    findings.tables.push(table);
    if let Some(run) = runs.iter().find(|run| run.way == Way::Daemon) {
        let all = run.merged.concat();
        findings.bars.push(Bar {
            claim: "everybody is merged, whatever it looks like".to_owned(),
            measured: told(&all)[0].clone(),
            met: all.iter().all(Option::is_some),
        });
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_never_merged_is_last() {
        assert_eq!(told(&[Some(3.0), None, Some(1.0)]), ["2 of 3", "3.0", "never"]);
        assert_eq!(told(&[Some(3.0), Some(1.0)]), ["2 of 2", "1.0", "3.0"]);
        assert_eq!(told(&[None]), ["0 of 1", "never", "never"]);
    }
}
