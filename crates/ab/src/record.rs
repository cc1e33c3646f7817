//! The record of a campaign: one JSON document a line, appended and synchronized line by line.
//!
//! The first line is the experiment with its schedule and its stopping rule, written before the first sample. Each start
//! or resumption adds a line with the state of the host, each run its raw samples, each block its environment. A block
//! counts once its line is written; the runs of a block that was interrupted stay in the record and are not analyzed,
//! and the block runs again. A line that a kill cut off is removed when the record is opened again.

use crate::decide::design::{Arm, BlockKind, Level, Schedule, ScheduledBlock, WarmUpRule};
use crate::environment::{BlockEnvironment, HostDescription};
use crate::experiment::Experiment;
use pagefold_sys::fault;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The record's file in a campaign's directory.
pub const RECORD_FILE: &str = "campaign.jsonl";

/// The version of the record's form.
pub const RECORD_VERSION: u32 = 1;

/// A line of a record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum RecordLine {
    /// The first line.
    Start(Box<CampaignStart>),
    /// The campaign starts or goes on.
    Session(Box<SessionStart>),
    /// The commands of a run were started.
    Spawned {
        /// Their processes.
        processes: Vec<SpawnedProcess>,
    },
    /// The settings of an arm are about to be made, and its command `before` about to run.
    ArmEntered {
        /// `A` or `B`.
        arm: char,
    },
    /// The arm's command `after` has run.
    ArmLeft,
    /// A run has ended.
    Run(RunRecord),
    /// All runs of a block have ended.
    Block(BlockRecord),
    /// The campaign has ended.
    End {
        /// Why.
        why: String,
    },
}

/// The first line of a record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CampaignStart {
    /// The version of the form.
    pub version: u32,
    /// The version of Pagefold.
    pub pagefold: String,
    /// The experiment, with names resolved.
    pub experiment: Experiment,
    /// Each setting that an arm changes, with its value under A and under B.
    pub settings: BTreeMap<String, [String; 2]>,
    /// Each parameter of a module that an arm changes, likewise.
    pub modules: BTreeMap<String, BTreeMap<String, [String; 2]>>,
    /// The stopping rule: numbers of comparison blocks, each with the two-sided level there.
    pub looks: Vec<(usize, f64)>,
    /// The blocks in the order in which they run.
    pub schedule: Vec<BlockPlan>,
}

/// A block of a schedule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BlockPlan {
    /// What is compared.
    pub kind: PlannedKind,
    /// The labels of the runs: `ABBA`.
    pub order: String,
}

/// What a block compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PlannedKind {
    /// A against B.
    Comparison,
    /// A against A.
    SameArm,
    /// A against A with a slow-down in percent.
    Injected(u32),
}

impl From<&ScheduledBlock> for BlockPlan {
    fn from(block: &ScheduledBlock) -> Self {
        let kind = match block.kind {
            BlockKind::Comparison => PlannedKind::Comparison,
            BlockKind::SameArm => PlannedKind::SameArm,
            BlockKind::Injected { slowdown_percent } => PlannedKind::Injected(slowdown_percent),
        };
        Self { kind, order: block.order.iter().map(|&arm| arm_letter(arm)).collect() }
    }
}

/// The letter of an arm.
#[must_use]
pub fn arm_letter(arm: Arm) -> char {
    match arm {
        Arm::A => 'A',
        Arm::B => 'B',
    }
}

impl CampaignStart {
    /// The schedule.
    #[must_use]
    pub fn schedule(&self) -> Schedule {
        let design = self.experiment.design();
        let blocks = self.schedule.iter().enumerate().map(|(index, plan)| ScheduledBlock {
            index,
            kind: match plan.kind {
                PlannedKind::Comparison => BlockKind::Comparison,
                PlannedKind::SameArm => BlockKind::SameArm,
                PlannedKind::Injected(slowdown_percent) => BlockKind::Injected { slowdown_percent },
            },
            order: plan.order.chars().map(|letter| if letter == 'A' { Arm::A } else { Arm::B }).collect(),
        });
        let (level, warm_up): (Level, WarmUpRule) = (design.level, design.warm_up);
        Schedule { level, warm_up, seed: design.seed, blocks: blocks.collect() }
    }
}

/// A start or a resumption.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SessionStart {
    /// The boot.
    pub boot: String,
    /// Seconds since 1970.
    pub unix_seconds: f64,
    /// The host.
    pub host: HostDescription,
    /// Its readings before the first block of the session, without the workload.
    pub baseline: BlockEnvironment,
}

/// A process of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpawnedProcess {
    /// The process number, which is also that of its group.
    pub pid: u32,
    /// Its start time in clock ticks since boot.
    pub start_time: u64,
    /// The boot.
    pub boot: String,
}

/// The raw samples of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RunRecord {
    /// The block.
    pub block: usize,
    /// The position within the block; warm-up comes first.
    pub position: usize,
    /// Under which arm the run is counted.
    pub label: char,
    /// Which arm's settings were in force.
    pub applied: char,
    /// The injected slow-down in percent.
    pub slowdown_percent: u32,
    /// Whether it is warm-up.
    pub warm_up: bool,
    /// Seconds since 1970 at its end.
    pub unix_seconds: f64,
    /// How long the injection stopped the commands, in seconds.
    pub stopped_seconds: f64,
    /// From the start of the first command to the end of the last, in seconds.
    #[serde(default)]
    pub wall_seconds: f64,
    /// For each metric, the samples.
    pub samples: Vec<Vec<f64>>,
    /// How much the proof counter changed.
    pub counter_change: Option<f64>,
}

/// A completed block.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockRecord {
    /// The position in the schedule.
    pub block: usize,
    /// Readings while it ran.
    pub environment: BlockEnvironment,
    /// Readings beyond their limits. They are judged without knowledge of the samples.
    pub flags: Vec<String>,
}

/// Why a record cannot be used.
#[derive(Debug, Error)]
pub enum RecordError {
    /// The directory has a campaign already.
    #[error("{} holds a campaign already: continue it with `pagefold ab resume {}`, or choose another --dir", .0.display(), .0.display())]
    Exists(PathBuf),
    /// Another process writes the record.
    #[error("another pagefold runs the campaign in {}", .0.display())]
    Busy(PathBuf),
    /// The record cannot be read or written.
    #[error("cannot read or write {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// An earlier line was written in part and could not be removed.
    #[error("{} ends with part of a line that could not be removed; make room on its file system, then `pagefold ab resume` removes it", .0.display())]
    PartOfLine(PathBuf),
    /// A line is not understood.
    #[error("{}, line {line}: {why}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The reason.
        why: String,
    },
}

/// An open record.
pub struct Record {
    directory: PathBuf,
    file: File,
    /// The length of the whole lines in bytes; absent after a failed line that could not be removed.
    length: Option<u64>,
}

/// What a record holds.
#[derive(Clone, Debug)]
pub struct LoadedRecord {
    /// The first line.
    pub start: CampaignStart,
    /// The starts and resumptions.
    pub sessions: Vec<SessionStart>,
    /// The completed blocks with their runs, in order.
    pub blocks: Vec<(BlockRecord, Vec<RunRecord>)>,
    /// Runs of blocks that were interrupted.
    pub abandoned_runs: usize,
    /// Processes of the last run, if the session did not get to its end.
    pub leftover: Vec<SpawnedProcess>,
    /// The arm whose command `after` has not run.
    pub entered_arm: Option<char>,
    /// Why the campaign ended, if it has.
    pub end: Option<String>,
}

impl Record {
    /// Creates a directory with a new record.
    ///
    /// # Errors
    /// If the directory has a record, or cannot be written.
    pub fn create(directory: &Path, start: CampaignStart) -> Result<Self, RecordError> {
        let path = directory.join(RECORD_FILE);
        let error = |source| RecordError::File { path: path.clone(), source };
        fs::create_dir_all(directory).map_err(error)?;
        // The first line appears whole or not at all.
        if fs::metadata(&path).is_ok_and(|metadata| metadata.len() > 0) {
            return Err(RecordError::Exists(directory.to_owned()));
        }
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(error)?;
        lock(&file, directory)?;
        let mut record = Self { directory: directory.to_owned(), file, length: Some(0) };
        record.append(&RecordLine::Start(Box::new(start)))?;
        File::open(directory).and_then(|directory| directory.sync_all()).map_err(error)?;
        Ok(record)
    }

    /// Opens a record to continue it, and removes a line that a kill cut off.
    ///
    /// # Errors
    /// If another process has it open, or it cannot be read.
    pub fn resume(directory: &Path) -> Result<(Self, LoadedRecord), RecordError> {
        let path = directory.join(RECORD_FILE);
        let error = |source| RecordError::File { path: path.clone(), source };
        let file = OpenOptions::new().append(true).open(&path).map_err(error)?;
        lock(&file, directory)?;
        let text = fs::read(&path).map_err(error)?;
        let whole = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        if whole < text.len() {
            file.set_len(whole as u64).and_then(|()| file.sync_data()).map_err(error)?;
        }
        let loaded = parse(&text[..whole], &path)?;
        Ok((Self { directory: directory.to_owned(), file, length: Some(whole as u64) }, loaded))
    }

    /// The campaign's directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Appends a line; it is on the disk when this returns. A line that is written in part is removed.
    ///
    /// # Errors
    /// If it cannot be written, or the rest of an earlier line could not be removed.
    pub fn append(&mut self, line: &RecordLine) -> Result<(), RecordError> {
        fault::point("before a line of the record");
        let mut text = pagefold_output::wire::to_json_line(line);
        text.push('\n');
        self.append_bytes(text.as_bytes(), |file, bytes| file.write_all(bytes).and_then(|()| file.sync_data()))?;
        fault::point("after a line of the record");
        Ok(())
    }

    fn append_bytes(
        &mut self,
        bytes: &[u8],
        write: impl FnOnce(&mut File, &[u8]) -> io::Result<()>,
    ) -> Result<(), RecordError> {
        let path = self.directory.join(RECORD_FILE);
        let Some(length) = self.length.take() else { return Err(RecordError::PartOfLine(path)) };
        if let Err(source) = write(&mut self.file, bytes) {
            let is_removed = self.file.set_len(length).and_then(|()| self.file.sync_data()).is_ok();
            self.length = is_removed.then_some(length);
            return Err(RecordError::File { path, source });
        }
        self.length = Some(length + bytes.len() as u64);
        Ok(())
    }
}

fn lock(file: &File, directory: &Path) -> Result<(), RecordError> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(RecordError::Busy(directory.to_owned())),
        Err(TryLockError::Error(source)) => Err(RecordError::File { path: directory.join(RECORD_FILE), source }),
    }
}

/// Reads a record without changing it.
///
/// # Errors
/// If it cannot be read.
pub fn load(directory: &Path) -> Result<LoadedRecord, RecordError> {
    let path = directory.join(RECORD_FILE);
    let text = fs::read(&path).map_err(|source| RecordError::File { path: path.clone(), source })?;
    let whole = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
    parse(&text[..whole], &path)
}

fn parse(text: &[u8], path: &Path) -> Result<LoadedRecord, RecordError> {
    let malformed = |line: usize, why: String| RecordError::Malformed { path: path.to_owned(), line: line + 1, why };
    let mut lines =
        text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()).enumerate().map(|(number, line)| {
            serde_json::from_slice::<RecordLine>(line).map_err(|error| malformed(number, error.to_string()))
        });
    let start = match lines.next().transpose()? {
        Some(RecordLine::Start(start)) if start.version == RECORD_VERSION => *start,
        Some(RecordLine::Start(start)) => {
            return Err(malformed(
                0,
                format!("the record has version {}; this pagefold reads {RECORD_VERSION}", start.version),
            ));
        }
        _ => return Err(malformed(0, "the record does not begin with an experiment; remove the directory".to_owned())),
    };
    let mut loaded = LoadedRecord {
        start,
        sessions: Vec::new(),
        blocks: Vec::new(),
        abandoned_runs: 0,
        leftover: Vec::new(),
        entered_arm: None,
        end: None,
    };
    let mut runs: Vec<RunRecord> = Vec::new();
    for line in lines {
        match line? {
            RecordLine::Start(_) => return Err(malformed(0, "the record has two experiments".to_owned())),
            RecordLine::Session(session) => {
                loaded.sessions.push(*session);
                loaded.abandoned_runs += runs.len();
                runs.clear();
            }
            RecordLine::Spawned { processes } => loaded.leftover.extend(processes),
            RecordLine::ArmEntered { arm } => loaded.entered_arm = Some(arm),
            RecordLine::ArmLeft => loaded.entered_arm = None,
            RecordLine::Run(run) => {
                loaded.leftover.clear();
                runs.push(run);
            }
            RecordLine::Block(block) => loaded.blocks.push((block, std::mem::take(&mut runs))),
            RecordLine::End { why } => loaded.end = Some(why),
        }
    }
    loaded.abandoned_runs += runs.len();
    Ok(loaded)
}

/// Replaces a file of a campaign's directory as a whole.
///
/// # Errors
/// If it cannot be written.
pub fn replace_file(directory: &Path, name: &str, content: &[u8]) -> Result<(), RecordError> {
    let (path, temporary) = (directory.join(name), directory.join(format!(".{name}.new")));
    let write = || -> io::Result<()> {
        let mut file = File::create(&temporary)?;
        file.write_all(content)?;
        file.sync_all()?;
        fault::point("between writing a report and renaming it");
        fs::rename(&temporary, &path)?;
        File::open(directory)?.sync_all()
    };
    write().map_err(|source| RecordError::File { path: path.clone(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::Experiment;

    fn start() -> CampaignStart {
        CampaignStart {
            version: RECORD_VERSION,
            pagefold: String::new(),
            experiment: Experiment::default(),
            settings: BTreeMap::new(),
            modules: BTreeMap::new(),
            looks: Vec::new(),
            schedule: Vec::new(),
        }
    }

    #[test]
    fn line_written_in_part_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let mut record = Record::create(directory.path(), start()).unwrap();
        let error = record.append_bytes(b"{\"event\":\"arm_left\"}\n", |file, bytes| {
            file.write_all(&bytes[..7])?;
            Err(io::ErrorKind::StorageFull.into())
        });
        assert!(matches!(error, Err(RecordError::File { .. })));
        record.append(&RecordLine::End { why: "tested".to_owned() }).unwrap();
        assert_eq!(load(directory.path()).unwrap().end.as_deref(), Some("tested"));
    }

    /// `/dev/full` takes no byte, and cannot be truncated.
    #[test]
    fn record_whose_failed_line_cannot_be_removed_takes_no_further_line() {
        let directory = tempfile::tempdir().unwrap();
        let mut record = Record::create(directory.path(), start()).unwrap();
        let whole = fs::read(directory.path().join(RECORD_FILE)).unwrap();
        assert_eq!(record.length, Some(whole.len() as u64));
        let working = std::mem::replace(&mut record.file, OpenOptions::new().append(true).open("/dev/full").unwrap());
        assert!(matches!(record.append(&RecordLine::ArmLeft), Err(RecordError::File { .. })));
        record.file = working;
        assert!(matches!(record.append(&RecordLine::ArmLeft), Err(RecordError::PartOfLine(_))));
        assert_eq!(fs::read(directory.path().join(RECORD_FILE)).unwrap(), whole);
    }
}
