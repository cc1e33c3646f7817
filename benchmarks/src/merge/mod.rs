//! What merging saves and costs: `pagefold merge` against the usual KSM policies.
//!
//! All figures are measured from outside and in the same way for every policy ([`readings`]). From pagefold's own
//! report only the misses are printed, and no figure is taken ([`command_reports`]). Each trial reserves KSM and
//! restores its settings ([`pagefold_labs::ksm`]). A section keeps its run in a folder below
//! `benchmarks/runs/DATE-REVISION/`: settings.toml, samples.csv, trials.csv, reports.jsonl, summary.md, and a chart for
//! each workload. Needs root.

mod command_reports;
mod compare;
mod hera;
pub(crate) mod mergeable_pages;
mod plot;
pub(crate) mod policies;
mod prediction;
pub(crate) mod readings;
pub(crate) mod running_program;
mod simulations;
mod slowdown_probe;
mod stop_durations;
mod thresholds;
mod throughput;
pub(crate) mod trial;
mod workloads;

pub use running_program::exec_as_first_oom_victim;
pub use slowdown_probe::run_probe;

use crate::findings::Findings;
use crate::run_settings::RunSettings;
use crate::write_file;
use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use compare::PolicyComparison;
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_linux::LiveHost;
use policies::PagefoldProgram;
use prediction::Forecaster;
use serde::Serialize;
use simulations::SimulationCode;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use workloads::MergeWorkload;
pub(crate) use workloads::lab_file;

/// Measure what merging saves and costs, under all policies.
#[derive(Debug, Parser)]
#[command(name = "bench-merge")]
pub struct MergeBenchmarkArguments {
    /// Sections to measure; all if none is named
    sections: Vec<MergeSection>,
    /// Small sizes and one round: shows that it works, not how well
    #[arg(long)]
    quick: bool,
    /// Rounds of the policies that the targets compare
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=50))]
    rounds: u8,
    /// Rounds of the simulations
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=50))]
    simulation_rounds: u8,
    /// Simulations to run, by their folders in labs/mpi; all if none is named
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    codes: Vec<String>,
    /// Cases of the stand-in for HERA; all if none is named
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    cases: Vec<String>,
    /// Extra rounds of the stand-in for HERA, with only the plain code and the user engine
    #[arg(long, value_name = "N", default_value_t = 2)]
    extra_rounds: usize,
    /// The stand-in for HERA, as labs/hera/build.sh makes it [default: target/hera/hera]
    #[arg(long, value_name = "PATH")]
    hera: Option<PathBuf>,
    /// Slow-down bound of the user engine on the stand-in, in percent
    #[arg(long, default_value_t = 2.0, value_name = "PERCENT")]
    max_slowdown: f64,
    /// CPU bound of pagefold and of flat-out merging, in percent of one CPU
    #[arg(long, default_value_t = 100, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(1..=100))]
    cpu: u32,
    /// CPU bound of pagefold beside the simulations, in percent of one CPU
    #[arg(long, default_value_t = 10, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(1..=100))]
    simulation_cpu: u32,
    /// The binary to measure [default: the one built beside this program]
    #[arg(long, value_name = "PATH")]
    pagefold: Option<PathBuf>,
    /// Where to keep the run, instead of benchmarks/runs/DATE-REVISION
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum MergeSection {
    /// Memory of known content
    Synthetic,
    /// QEMU guests
    Fleet,
    /// Four QEMU guests of 1.7 GiB with many duplicate pages; only if named
    BigFleet,
    /// Databases with their data
    Program,
    /// Simulations that rewrite merged pages
    Simulations,
    /// LAMMPS and five further simulations from Debian; only if named
    Debian,
    /// How long a process is stopped while its ranges are enrolled and unenrolled
    Stops,
    /// The simulator's forecasts beside the real ksmd; only if named
    Prediction,
    /// The stand-in for HERA in all its modes; only if named
    Hera,
    /// Merge speed of the user engine against ksmd; only if named
    Throughput,
}

impl MergeSection {
    fn name(self) -> &'static str {
        match self {
            Self::Synthetic => "synthetic",
            Self::Fleet => "fleet",
            Self::BigFleet => "big-fleet",
            Self::Program => "program",
            Self::Simulations => "simulations",
            Self::Debian => "debian",
            Self::Stops => "stops",
            Self::Prediction => "prediction",
            Self::Hera => "hera",
            Self::Throughput => "throughput",
        }
    }
}

/// The fields of `settings.toml` beside those common to all benchmarks.
#[derive(Debug, Serialize)]
struct MergeRunSettings {
    #[serde(flatten)]
    common: RunSettings,
    cpu_percent: u32,
    simulation_cpu_percent: u32,
    rounds: u8,
    simulation_rounds: u8,
    /// KSM settings before the run.
    ksm: BTreeMap<String, String>,
    /// First lines of the programs' version output.
    versions: BTreeMap<String, String>,
}

/// Run the benchmark. Returns whether all targets are met.
pub fn run_benchmark(arguments: &MergeBenchmarkArguments) -> Result<bool> {
    if !arguments.quick && cfg!(debug_assertions) {
        bail!("built without optimization: use `make bench-merge`, or --quick for a functional test");
    }
    let program = match &arguments.pagefold {
        Some(path) => path.clone(),
        None => std::env::current_exe()?.with_file_name("pagefold"),
    };
    let pagefold =
        PagefoldProgram { program: program.canonicalize().with_context(|| format!("no {}", program.display()))? };
    let chosen = |section: &&MergeSection| match arguments.sections.is_empty() {
        true => !matches!(
            section,
            MergeSection::BigFleet
                | MergeSection::Debian
                | MergeSection::Prediction
                | MergeSection::Hera
                | MergeSection::Throughput
        ),
        false => arguments.sections.contains(section),
    };
    trial::install_signal_handlers()?;
    let mut met = true;
    for section in MergeSection::value_variants().iter().filter(chosen).copied() {
        let nice = rustix::process::nice(0).context("cannot read the priority")?;
        let ksm = {
            let _held = KsmTestGuard::acquire().map_err(anyhow::Error::msg)?;
            writable_ksm_settings()
        };
        let settings = MergeRunSettings {
            common: RunSettings::observe(arguments.quick, vec![format!("merge-{}", section.name())], nice)?,
            cpu_percent: arguments.cpu,
            simulation_cpu_percent: arguments.simulation_cpu,
            rounds: arguments.rounds,
            simulation_rounds: arguments.simulation_rounds,
            ksm,
            versions: program_versions(&pagefold),
        };
        let folder = new_section_folder(arguments.out.as_deref(), &settings.common, "merge", section.name())?;
        write_file(&folder, "settings.toml", &toml::to_string(&settings)?)?;
        let started = Instant::now();
        met &= SectionRecorder { folder: &folder, arguments, pagefold: &pagefold }
            .measure_section(section)
            .with_context(|| section.name())?;
        eprintln!("{} took {:.0} s, kept in {}\n", section.name(), started.elapsed().as_secs_f64(), folder.display());
    }
    Ok(met || arguments.quick)
}

/// The findings of a section, each with the name of its workload.
type SectionFindings = Vec<(&'static str, Findings)>;

/// Measures a section and keeps its results.
struct SectionRecorder<'a> {
    folder: &'a Path,
    arguments: &'a MergeBenchmarkArguments,
    pagefold: &'a PagefoldProgram,
}

impl SectionRecorder<'_> {
    fn measure_section(&self, section: MergeSection) -> Result<bool> {
        let quick = self.arguments.quick;
        let findings = match section {
            MergeSection::Synthetic => self.compare_policies(section, MergeWorkload::synthetic_workloads(quick)),
            MergeSection::Fleet => self.compare_policies(section, MergeWorkload::fleet_workload(quick)),
            MergeSection::BigFleet => self.compare_policies(section, MergeWorkload::big_fleet(quick)),
            MergeSection::Program => self.compare_policies(section, MergeWorkload::database_workload(quick)),
            MergeSection::Simulations => self.measure_simulations(section, simulations::SIMULATION_CODES),
            MergeSection::Debian => self.measure_simulations(section, simulations::DEBIAN_CODES),
            MergeSection::Prediction => self.measure_prediction(section),
            MergeSection::Hera => self.measure_hera(section),
            MergeSection::Throughput => throughput::measure(self.rounds(self.arguments.rounds), quick)
                .and_then(|findings| self.keep_findings(section, vec![("throughput", findings)])),
            MergeSection::Stops => stop_durations::measure(quick)
                .and_then(|findings| self.keep_findings(section, vec![("stops", findings)])),
        }?;
        Ok(findings.iter().flat_map(|(_, findings)| &findings.checks).all(|check| check.met))
    }

    /// The number of rounds; one for a quick run.
    fn rounds(&self, rounds: u8) -> usize {
        if self.arguments.quick { 1 } else { usize::from(rounds) }
    }

    /// Measure all policies on each workload.
    fn compare_policies(&self, section: MergeSection, workloads: Vec<MergeWorkload>) -> Result<SectionFindings> {
        let conditions = trial::TrialConditions {
            pagefold: self.pagefold.clone(),
            quick: self.arguments.quick,
            cpu_percent: self.arguments.cpu,
            host: pagefold_merge::policy::observe_host(&LiveHost::new()),
        };
        let mut all = Vec::new();
        let (mut trials, mut reports) = (vec![compare::TRIALS_CSV_HEADER.to_owned()], String::new());
        for workload in workloads {
            let name = workload.name;
            let comparison = PolicyComparison::measure_all(workload, self.rounds(self.arguments.rounds), &conditions)?;
            trials.extend(comparison.trials_csv());
            write_file(self.folder, "trials.csv", &format!("{}\n", trials.join("\n")))?;
            reports.extend(comparison.report_lines().map(|line| line + "\n"));
            write_file(self.folder, "reports.jsonl", &reports)?;
            plot::draw_chart(&comparison, &self.folder.join(format!("{name}.svg")))?;
            all.push((name, comparison.build_findings()));
            self.write_findings(section, &all)?;
        }
        Ok(all)
    }

    fn measure_simulations(&self, section: MergeSection, codes: &[SimulationCode]) -> Result<SectionFindings> {
        let conditions = simulations::SimulationConditions {
            pagefold: self.pagefold.clone(),
            cpu_percent: self.arguments.simulation_cpu,
            quick: self.arguments.quick,
        };
        let mut all = Vec::new();
        for code in simulations::select_codes(codes, &self.arguments.codes)? {
            let rounds = self.rounds(self.arguments.simulation_rounds);
            all.push((code.name, simulations::measure_code(code, rounds, &conditions)?));
            self.write_findings(section, &all)?;
        }
        Ok(all)
    }

    fn measure_prediction(&self, section: MergeSection) -> Result<SectionFindings> {
        let rounds = self.rounds(self.arguments.rounds);
        let forecaster = Forecaster::calibrate(self.pagefold, self.folder, self.arguments.quick)?;
        let (mut all, mut residuals) = (Vec::new(), Vec::new());
        for workload in MergeWorkload::predicted_workloads(self.arguments.quick) {
            let trials = forecaster.measure_all(&workload, rounds)?;
            prediction::plot::draw_chart(
                &workload.title,
                &trials,
                &self.folder.join(format!("{}.svg", workload.name)),
            )?;
            all.push((workload.name, prediction::describe_trials(&workload, &trials)));
            residuals.extend(trials);
            self.write_findings(section, &all)?;
        }
        all.push(("all programs", prediction::judge_trials(&residuals)));
        self.keep_findings(section, all)
    }

    fn measure_hera(&self, section: MergeSection) -> Result<SectionFindings> {
        let program = match &self.arguments.hera {
            Some(path) => path.clone(),
            None => Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("target/hera/hera"),
        };
        let conditions = hera::HeraConditions {
            program,
            pagefold: self.pagefold.clone(),
            cpu_percent: self.arguments.simulation_cpu,
            max_slowdown: self.arguments.max_slowdown / 100.0,
            extra_rounds: if self.arguments.quick { 0 } else { self.arguments.extra_rounds },
            quick: self.arguments.quick,
        };
        let mut all = Vec::new();
        for case in hera::select_cases(&self.arguments.cases)? {
            let runs = hera::measure_case(case, self.rounds(self.arguments.rounds), &conditions)?;
            hera::draw_chart(case, &runs, &self.folder.join(format!("{}.svg", case.name)))?;
            all.push((case.name, hera::build_findings(case, &runs, &conditions)));
            self.write_findings(section, &all)?;
        }
        Ok(all)
    }

    /// Write findings and return them.
    fn keep_findings(&self, section: MergeSection, findings: SectionFindings) -> Result<SectionFindings> {
        self.write_findings(section, &findings)?;
        Ok(findings)
    }

    /// Write the findings so far, and print the latest.
    fn write_findings(&self, section: MergeSection, section_findings: &[(&str, Findings)]) -> Result<()> {
        let mut summary = format!("# Merging: {}\n", section.name());
        if self.arguments.quick {
            summary.push_str("\nA quick run: it shows that the benchmark works, and its figures mean little.\n");
        }
        let mut samples: Vec<&str> = Vec::new();
        for (name, findings) in section_findings {
            summary.push('\n');
            summary.push_str(&findings.to_markdown(name, !self.arguments.quick));
            // One header for all workloads.
            let header = usize::from(!samples.is_empty());
            samples.extend(findings.samples.iter().skip(header).map(String::as_str));
        }
        if let Some((name, findings)) = section_findings.last() {
            println!("{}", findings.to_markdown(name, !self.arguments.quick));
        }
        write_file(self.folder, "summary.md", &summary)?;
        write_file(self.folder, "samples.csv", &format!("{}\n", samples.join("\n")))
    }
}

/// A folder for a section that does not exist yet.
pub(crate) fn new_section_folder(
    out: Option<&Path>,
    settings: &RunSettings,
    kind: &str,
    section: &str,
) -> Result<PathBuf> {
    let run = match out {
        Some(folder) => folder.to_owned(),
        None => {
            Path::new(env!("CARGO_MANIFEST_DIR")).join("runs").join(format!("{}-{}", settings.date, settings.revision))
        }
    };
    let first = run.join(format!("{kind}-{section}"));
    let numbered = (2..).map(|number| run.join(format!("{kind}-{section}-{number}")));
    let folder = std::iter::once(first).chain(numbered).find(|folder| !folder.exists()).expect("numbers do not end");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    Ok(folder)
}

/// The writable KSM settings of the host. The caller must hold the KSM test guard, so that no other program changes
/// them.
pub(crate) fn writable_ksm_settings() -> BTreeMap<String, String> {
    let files = pagefold_base::ksm::Setting::ALL.map(|setting| setting.file_name());
    let read = |file: &str| {
        let text = fs::read_to_string(format!("/sys/kernel/mm/ksm/{file}")).ok()?;
        Some((file.to_owned(), text.trim().to_owned()))
    };
    files.into_iter().filter_map(read).collect()
}

/// The versions of the participating programs that are installed.
pub(crate) fn program_versions(pagefold: &PagefoldProgram) -> BTreeMap<String, String> {
    let pagefold = pagefold.program.display().to_string();
    let programs = [
        ("pagefold", vec![pagefold.as_str(), "--version"]),
        ("qemu", vec!["qemu-system-x86_64", "--version"]),
        ("sqlite3", vec!["sqlite3", "--version"]),
        ("mpirun", vec!["mpirun", "--version"]),
        ("meep", vec!["dpkg-query", "-W", "meep-mpi-default"]),
        ("openfoam", vec!["dpkg-query", "-W", "openfoam"]),
        ("espresso", vec!["dpkg-query", "-W", "quantum-espresso"]),
        ("cp2k", vec!["dpkg-query", "-W", "cp2k"]),
        ("lammps", vec!["dpkg-query", "-W", "lammps"]),
        ("gromacs", vec!["dpkg-query", "-W", "gromacs"]),
        ("nwchem", vec!["dpkg-query", "-W", "nwchem-openmpi"]),
        ("abinit", vec!["dpkg-query", "-W", "abinit"]),
        ("elk", vec!["dpkg-query", "-W", "elk-lapw"]),
        ("gerris", vec!["dpkg-query", "-W", "gerris"]),
    ];
    let ask = |words: &[&str]| {
        let output = Command::new(words[0]).args(&words[1..]).output().ok()?;
        Some(String::from_utf8_lossy(&output.stdout).lines().next()?.trim().replace('\t', " "))
    };
    programs.iter().filter_map(|(name, words)| Some(((*name).to_owned(), ask(words)?))).collect()
}
