//! The workloads: memory of known content, a fleet of guests, databases with their data.

use super::mergeable_pages::{self, MergeablePages};
use super::readings::is_enrolled;
use super::running_program::{RunningProgram, command_through_hold};
use anyhow::{Context, Result, ensure};
use pagefold_labs::assets::GuestAssets;
use pagefold_labs::output_lines::{GuestLine, RegionLine};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A workload, not yet started.
#[derive(Clone, Debug)]
pub struct MergeWorkload {
    /// Its name in tables, checks and files.
    pub name: &'static str,
    /// Its title in reports.
    pub title: String,
    /// Its setup.
    pub setup: WorkloadSetup,
    /// Whether every policy is measured, with further rounds for the slow-down of the probe; otherwise only the
    /// policies that the targets compare.
    pub all_policies: bool,
}

/// The source of the savings during merging.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SavingsGauge {
    /// KSM's counters, at no cost.
    Counters,
    /// The memory of the processes, by their page tables: it costs CPU, and is read less often.
    Memory,
}

/// The setup of a workload.
#[derive(Clone, Debug)]
pub enum WorkloadSetup {
    /// Processes of `pagefold-lab mixture`.
    Mixture {
        /// Number of processes.
        processes: u32,
        /// Size of each process, in MiB.
        mib: u64,
        /// Share of runs that are duplicates, in percent.
        duplicate: u32,
        /// Share of runs with one stray duplicate page, in percent.
        stray: u32,
        /// Run length in base pages.
        run: u64,
        /// Whether its memory is in huge pages.
        huge: bool,
    },
    /// QEMU guests of `pagefold-lab fleet`.
    Fleet {
        /// Number of guests.
        guests: u32,
        /// Memory of each guest, in MiB.
        mib: u32,
        /// Data that is equal in all guests, in MiB.
        shared_mib: u32,
        /// Data that is unique to each guest, in MiB.
        unique_mib: u32,
        /// Whether the first 4,086 bytes of all data pages are equal.
        equal_start: bool,
    },
    /// SQLite shells, each with the same database and own tables in memory.
    Databases {
        /// Number of processes.
        processes: u32,
        /// Rows of the common database; a thousand rows take some 270 KiB.
        rows: u64,
    },
    /// A script of `labs/program` that prints the IDs of its processes before it is ready.
    Script {
        /// Its name.
        name: &'static str,
        /// Its arguments.
        arguments: &'static [&'static str],
    },
}

/// A running workload.
#[derive(Debug)]
pub struct RunningWorkload {
    processes: Vec<RunningProgram>,
    /// The processes whose memory is merged.
    pub pids: Vec<u32>,
    checksum_query: Option<&'static str>,
    /// The possible savings: known for laid-out memory, counted for programs.
    pub mergeable: MergeablePages,
}

impl MergeWorkload {
    /// The workloads of the section `synthetic`.
    pub fn synthetic_workloads(quick: bool) -> Vec<Self> {
        let mib = if quick { 64 } else { 1024 };
        let workload = |name, what: &str, duplicate, stray, run, huge| Self {
            name,
            title: format!("Memory of known content, 4 x {mib} MiB: {what}"),
            setup: WorkloadSetup::Mixture { processes: 4, mib, duplicate, stray, run, huge },
            all_policies: name == "tenth",
        };
        vec![
            workload("tenth", "10 % duplicates in runs of 256 KiB", 10, 0, 64, false),
            workload("third", "33 % duplicates in runs of 256 KiB", 33, 0, 64, false),
            workload("most", "95 % duplicates in runs of 256 KiB", 95, 0, 64, false),
            workload("scattered", "10 % duplicates, single pages", 10, 0, 1, false),
            // Whole-process KSM splits huge pages with any duplicate. One duplicate page in a huge page does not repay
            // the split.
            workload("huge", "huge pages, 6 % of them all duplicates, 45 % with one duplicate page", 6, 45, 512, true),
        ]
    }

    /// The workload of the section `fleet`.
    pub fn fleet_workload(quick: bool) -> Vec<Self> {
        let guests = if quick { 2 } else { 8 };
        let title = format!("{guests} QEMU guests of 128 MiB: 16 MiB of the same and 16 MiB of own data in each");
        let setup = WorkloadSetup::Fleet { guests, mib: 128, shared_mib: 16, unique_mib: 16, equal_start: false };
        vec![Self { name: "fleet", title, setup, all_policies: true }]
    }

    /// The workloads of the section `big-fleet`: guests with many duplicate pages.
    pub fn big_fleet(quick: bool) -> Vec<Self> {
        let (guests, mib, shared_mib, unique_mib) = if quick { (2, 256, 64, 64) } else { (4, 1700, 700, 500) };
        let workload = |name, equal_start, pages: &str| Self {
            name,
            title: format!(
                "{guests} QEMU guests of {mib} MiB: {shared_mib} MiB of the same and {unique_mib} MiB of own data in \
                 each, {pages}"
            ),
            setup: WorkloadSetup::Fleet { guests, mib, shared_mib, unique_mib, equal_start },
            all_policies: false,
        };
        vec![
            workload("big-fleet", false, "pages that differ in their first bytes"),
            workload("big-fleet-equal-start", true, "pages whose first 4,086 bytes are equal"),
        ]
    }

    /// The workload of the section `program`.
    pub fn database_workload(quick: bool) -> Vec<Self> {
        let rows = if quick { 100_000 } else { 600_000 };
        let processes = if quick { 2 } else { 6 };
        let title = format!("{processes} SQLite shells in memory: a common database of {rows} rows and own tables");
        vec![Self { name: "program", title, setup: WorkloadSetup::Databases { processes, rows }, all_policies: true }]
    }

    /// The workloads of the section `prediction`: programs, none of which has been used to calibrate the model.
    pub fn predicted_workloads(quick: bool) -> Vec<Self> {
        let mut workloads = Self::database_workload(quick);
        if quick {
            return workloads;
        }
        let script = |name, title: &str, script, arguments| Self {
            name,
            title: title.to_owned(),
            setup: WorkloadSetup::Script { name: script, arguments },
            all_policies: false,
        };
        workloads.extend(Self::fleet_workload(false));
        workloads.push(script(
            "postgres",
            "6 sessions of PostgreSQL that hold sorted results, half of them equal in all sessions",
            "postgres.sh",
            &["6", "300000"],
        ));
        workloads.push(script(
            "lammps",
            "LAMMPS: a melting crystal, 4 running ranks on one of two CPUs",
            "lammps.sh",
            &["endless"],
        ));
        workloads
    }

    /// Whether the possible savings are known from the layout; otherwise they are counted.
    pub fn is_mergeable_known(&self) -> bool {
        matches!(self.setup, WorkloadSetup::Mixture { .. })
    }

    /// The source of the savings. Guests have huge pages with zeros in them, which a split alone frees.
    pub fn gauge(&self) -> SavingsGauge {
        match self.setup {
            WorkloadSetup::Fleet { .. } => SavingsGauge::Memory,
            WorkloadSetup::Mixture { .. } | WorkloadSetup::Databases { .. } | WorkloadSetup::Script { .. } => {
                SavingsGauge::Counters
            }
        }
    }

    /// Start the workload, and wait until its memory is filled.
    pub fn start(&self, enrolled: bool) -> Result<RunningWorkload> {
        let lab = pagefold_labs::client::lab_binary()?;
        let (programs, pids, question, mergeable) = match self.setup {
            WorkloadSetup::Mixture { processes, mib, duplicate, stray, run, huge } => {
                let mut programs = Vec::new();
                for salt in 0..processes {
                    let mut command = command_through_hold(&lab, enrolled)?;
                    command.args(["mixture", "--mib", &mib.to_string(), "--run-pages", &run.to_string()]);
                    command.args(["--duplicate-share", &duplicate.to_string(), "--stray-share", &stray.to_string()]);
                    command.args(["--salt", &salt.to_string()]);
                    command.args(huge.then_some("--huge"));
                    programs.push(RunningProgram::start(command)?);
                }
                let mut pages = 0;
                for program in &mut programs {
                    let region = program.wait_until_ready()?;
                    pages = serde_json::from_str::<RegionLine>(region.first().context("no region")?)?.pages;
                }
                let share = |percent: u32| f64::from(percent) / 100.0;
                let mixture = pagefold_labs::mixture::Mixture {
                    pages,
                    run_pages: run,
                    duplicate_share: share(duplicate),
                    stray_share: share(stray),
                };
                let (each, processes) = (mixture.duplicate_pages(), u64::from(processes));
                let mergeable =
                    MergeablePages { redundant_pages: each * (processes - 1), mapped_to_shared: each * processes };
                let pids = programs.iter().map(RunningProgram::pid).collect::<Vec<_>>();
                (programs, pids, Some("checksum"), mergeable)
            }
            WorkloadSetup::Fleet { guests, mib, shared_mib, unique_mib, equal_start } => {
                GuestAssets::find(&GuestAssets::default_directory())?;
                // QEMU enrolls the guests' memory itself, as on any host.
                let mut command = command_through_hold(&lab, false)?;
                command.args(["fleet", "--guests", &guests.to_string(), "--memory", &mib.to_string()]);
                command.args([
                    "--shared-mib",
                    &shared_mib.to_string(),
                    "--unique-mib",
                    &unique_mib.to_string(),
                    "--timeout",
                    "600",
                ]);
                command.args(equal_start.then_some("--equal-start"));
                command.stderr(Stdio::null());
                let mut program = RunningProgram::start(command)?;
                let guests = program.wait_until_ready()?;
                let pids = guests.iter().map(|line| Ok(serde_json::from_str::<GuestLine>(line)?.pid));
                let pids = pids.collect::<Result<Vec<_>>>()?;
                let mergeable = mergeable_pages::count_mergeable(&pids)?;
                (vec![program], pids, None, mergeable)
            }
            WorkloadSetup::Databases { processes, rows } => {
                let programs = start_databases(processes, rows, enrolled)?;
                let pids = programs.iter().map(RunningProgram::pid).collect::<Vec<_>>();
                let mergeable = mergeable_pages::count_mergeable(&pids)?;
                (programs, pids, Some(DATABASE_CHECK_SQL), mergeable)
            }
            WorkloadSetup::Script { name, arguments } => {
                let mut command = command_through_hold(lab_file("program").join(name), enrolled)?;
                command.args(arguments);
                let mut program = RunningProgram::start(command)?;
                let lines = program.wait_until_ready()?;
                let pids = lines.iter().map(|line| line.parse().with_context(|| format!("{name} printed {line:?}")));
                let pids = pids.collect::<Result<Vec<u32>>>()?;
                ensure!(!pids.is_empty(), "{name} printed no process ID");
                let mergeable = mergeable_pages::count_mergeable(&pids)?;
                (vec![program], pids, None, mergeable)
            }
        };
        if enrolled && !matches!(self.setup, WorkloadSetup::Fleet { .. }) {
            for &pid in &pids {
                ensure!(is_enrolled(pid)?, "process {pid} is not enrolled as requested");
            }
        }
        Ok(RunningWorkload { processes: programs, pids, checksum_query: question, mergeable })
    }
}

/// SQLite checks the integrity of the database, and sums up the data.
const DATABASE_CHECK_SQL: &str = "SELECT (SELECT group_concat(integrity_check) FROM pragma_integrity_check) || ' ' || \
                     (SELECT sum(key) FROM data) || ' ' || (SELECT sum(length(value) + unicode(hex(value))) FROM own);";

/// A file of `labs/`.
pub fn lab_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("labs").join(name)
}

/// Starts SQLite shells with the common database in memory and a table of their own, and waits until they have both.
fn start_databases(processes: u32, rows: u64, enrolled: bool) -> Result<Vec<RunningProgram>> {
    let database = create_database(rows)?;
    let mut programs = Vec::new();
    for _ in 0..processes {
        let mut command = command_through_hold("sqlite3", enrolled)?;
        command.args(["-batch", "-bail"]).stderr(Stdio::inherit());
        let mut program = RunningProgram::start(command)?;
        program.send_line(&format!(".open --deserialize \"{}\"", database.display()))?;
        program.send_line(&format!(".read \"{}\"", lab_file("program/own.sql").display()))?;
        program.send_line(&format!("INSERT INTO own SELECT key, randomblob(160) FROM data LIMIT {rows};"))?;
        program.send_line(".print READY")?;
        programs.push(program);
    }
    for program in &mut programs {
        program.wait_until_ready()?;
    }
    Ok(programs)
}

/// The common database, created once.
fn create_database(rows: u64) -> Result<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name(".cache").join("bench");
    let path = folder.join(format!("data-{rows}.db"));
    if !path.exists() {
        fs::create_dir_all(&folder)?;
        let unfinished = path.with_extension("unfinished");
        let _ = fs::remove_file(&unfinished);
        let made = Command::new("sqlite3")
            .arg(&unfinished)
            .arg(format!(".parameter set @rows {rows}"))
            .arg(format!(".read \"{}\"", lab_file("program/data.sql").display()))
            .stdout(Stdio::null())
            .status()
            .context("sqlite3 cannot be run: run labs/setup-bench.sh as root")?;
        ensure!(made.success(), "sqlite3 made no database: {made}");
        fs::rename(unfinished, &path)?;
    }
    Ok(path)
}

impl RunningWorkload {
    /// The checksums of the memory of each process, computed by the process. Merging must not change them.
    pub fn read_checksums(&mut self) -> Result<Vec<String>> {
        self.processes.iter_mut().try_for_each(RunningProgram::check_alive)?;
        let Some(question) = self.checksum_query else { return Ok(Vec::new()) };
        self.processes.iter_mut().map(|process| process.query(question)).collect()
    }
}
