//! The form of a journal in its file: JSON, with names that stay when those of the code change.

use super::{CounterGrowth, CounterSample, Journal, JournalChange, JournalEntry};
use crate::access_monitor::MonitorStep;
use crate::action::{Action, Exchange, LibvirtPin, LibvirtPinTarget, MergeAdvice, ThreadId};
use crate::config_file::{ConfigContent, ConfigFile};
use crate::kernel_module::{KernelModule, ModuleParameters};
use crate::knob::Knob;
use pagefold_base::id_set::{IdSet, InvalidIdSet};
use pagefold_base::memory::MemoryPolicy;
use pagefold_base::{AddressRange, Pid, ProcessId};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WireJournal {
    boot: String,
    writer: u32,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    purpose: Option<String>,
    entries: Vec<WireEntry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WireEntry {
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    written_values: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    enclosing_extents: Vec<(u64, u64)>,
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    until_commit: bool,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    purpose: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    counters: Vec<WireCounter>,
    undo: WireAction,
}

/// A counter; `growth` is the count and the time in milliseconds.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireCounter {
    source: String,
    value: u64,
    uptime_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    growth: Option<(u64, u64)>,
}

impl From<&CounterSample> for WireCounter {
    fn from(sample: &CounterSample) -> Self {
        let CounterSample { source, value, uptime_ms, growth } = sample.clone();
        let growth = growth.map(|CounterGrowth { count, milliseconds }| (count, milliseconds));
        Self { source, value, uptime_ms, growth }
    }
}

impl From<WireCounter> for CounterSample {
    fn from(WireCounter { source, value, uptime_ms, growth }: WireCounter) -> Self {
        let growth = growth.map(|(count, milliseconds)| CounterGrowth { count, milliseconds });
        Self { source, value, uptime_ms, growth }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum WireChange {
    Push(Box<WireEntry>),
    Pop,
    SetWrittenValues { entry: usize, written_values: Vec<String> },
}

#[derive(Serialize, Deserialize)]
struct WireLibvirtPin {
    domain: String,
    target: LibvirtPinTarget,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum WireAction {
    Write {
        knob: WireKnob,
        value: String,
    },
    Advise {
        pid: u32,
        start_time: u64,
        mergeable: bool,
        ranges: Vec<(u64, u64)>,
    },
    MergeAny {
        pid: u32,
        start_time: u64,
        on: bool,
    },
    SetQomProperty {
        pid: u32,
        start_time: u64,
        socket: PathBuf,
        object: String,
        property: String,
        from: serde_json::Value,
        to: serde_json::Value,
    },
    SetAffinity {
        pid: u32,
        start_time: u64,
        tid: u32,
        thread_start_time: u64,
        from: WireIdSet,
        to: WireIdSet,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pin: Option<WireLibvirtPin>,
    },
    MovePages {
        pid: u32,
        start_time: u64,
        ranges: Vec<(u64, u64)>,
        node: u32,
    },
    SetMemoryPolicy {
        pid: u32,
        start_time: u64,
        ranges: Vec<(u64, u64)>,
        from: WireMemoryPolicy,
        to: WireMemoryPolicy,
    },
    ReplaceFile {
        file: ConfigFile,
        from: ConfigContent,
        to: ConfigContent,
    },
    DefineDomain {
        uuid: String,
        name: String,
        from: String,
        to: String,
    },
    ReloadModule {
        module: KernelModule,
        from: ModuleParameters,
        to: ModuleParameters,
    },
    StopMonitoring {
        pids: Vec<u32>,
    },
}

/// A policy as text: `prefer:1`.
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
struct WireMemoryPolicy(MemoryPolicy);

impl TryFrom<String> for WireMemoryPolicy {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse().map(Self).map_err(|()| format!("{text} is not a memory policy that Pagefold sets"))
    }
}

impl From<WireMemoryPolicy> for String {
    fn from(policy: WireMemoryPolicy) -> Self {
        policy.0.to_string()
    }
}

/// A set of numbers as text: `0-3,8`.
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
struct WireIdSet(IdSet);

impl TryFrom<String> for WireIdSet {
    type Error = InvalidIdSet;

    fn try_from(text: String) -> Result<Self, InvalidIdSet> {
        text.parse().map(Self)
    }
}

impl From<WireIdSet> for String {
    fn from(ids: WireIdSet) -> Self {
        ids.0.to_string()
    }
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
struct WireKnob(Knob);

impl TryFrom<String> for WireKnob {
    type Error = String;

    fn try_from(path: String) -> Result<Self, String> {
        Knob::from_path(&path).map(Self).ok_or_else(|| format!("{path} is not a setting that Pagefold writes"))
    }
}

impl From<WireKnob> for String {
    fn from(knob: WireKnob) -> Self {
        knob.0.path().to_owned()
    }
}

fn address_pairs(ranges: &[AddressRange]) -> Vec<(u64, u64)> {
    ranges.iter().map(|range| (range.start, range.end)).collect()
}

fn address_ranges(pairs: Vec<(u64, u64)>) -> Vec<AddressRange> {
    pairs.into_iter().map(|(start, end)| AddressRange { start, end }).collect()
}

impl WireAction {
    /// The file format of an undo action; `None` for a collapse and for other monitoring than its end, which are never
    /// an undo.
    fn from_action(undo: &Action) -> Option<Self> {
        Some(match undo {
            Action::Write { knob, value } => Self::Write { knob: WireKnob(knob.clone()), value: value.clone() },
            Action::Advise { process, advice, ranges } => Self::Advise {
                pid: process.pid.0,
                start_time: process.start_time,
                mergeable: *advice == MergeAdvice::Mergeable,
                ranges: address_pairs(ranges),
            },
            Action::MergeAny { process, enable: on } => {
                Self::MergeAny { pid: process.pid.0, start_time: process.start_time, on: *on }
            }
            Action::SetQomProperty { process, socket, object, property, value } => Self::SetQomProperty {
                pid: process.pid.0,
                start_time: process.start_time,
                socket: socket.clone(),
                object: object.clone(),
                property: property.clone(),
                from: value.from.clone(),
                to: value.to.clone(),
            },
            Action::SetAffinity { thread, cpus, pin } => Self::SetAffinity {
                pid: thread.process.pid.0,
                start_time: thread.process.start_time,
                tid: thread.tid.0,
                thread_start_time: thread.start_time,
                from: WireIdSet(cpus.from.clone()),
                to: WireIdSet(cpus.to.clone()),
                pin: pin.as_ref().map(|pin| WireLibvirtPin { domain: pin.domain.clone(), target: pin.target }),
            },
            Action::MovePages { process, ranges, node } => Self::MovePages {
                pid: process.pid.0,
                start_time: process.start_time,
                ranges: address_pairs(ranges),
                node: *node,
            },
            Action::SetMemoryPolicy { process, ranges, policy } => Self::SetMemoryPolicy {
                pid: process.pid.0,
                start_time: process.start_time,
                ranges: address_pairs(ranges),
                from: WireMemoryPolicy(policy.from),
                to: WireMemoryPolicy(policy.to),
            },
            Action::ReplaceFile { file, content } => {
                Self::ReplaceFile { file: file.clone(), from: content.from.clone(), to: content.to.clone() }
            }
            Action::DefineDomain { uuid, name, definition } => Self::DefineDomain {
                uuid: uuid.clone(),
                name: name.clone(),
                from: definition.from.clone(),
                to: definition.to.clone(),
            },
            Action::ReloadModule { module, parameters } => {
                Self::ReloadModule { module: *module, from: parameters.from.clone(), to: parameters.to.clone() }
            }
            Action::MonitorAccesses(MonitorStep::Stop(pids)) => {
                Self::StopMonitoring { pids: pids.iter().map(|pid| pid.0).collect() }
            }
            Action::MonitorAccesses(_) | Action::Collapse { .. } => return None,
        })
    }
}

impl From<WireAction> for Action {
    fn from(action: WireAction) -> Self {
        let process = |pid, start_time| ProcessId { pid: Pid(pid), start_time };
        match action {
            WireAction::Write { knob, value } => {
                let value = knob.0.restorable_value(value);
                Self::Write { knob: knob.0, value }
            }
            WireAction::Advise { pid, start_time, mergeable, ranges: pairs } => Self::Advise {
                process: process(pid, start_time),
                advice: if mergeable { MergeAdvice::Mergeable } else { MergeAdvice::Unmergeable },
                ranges: address_ranges(pairs),
            },
            WireAction::MergeAny { pid, start_time, on } => {
                Self::MergeAny { process: process(pid, start_time), enable: on }
            }
            WireAction::SetQomProperty { pid, start_time, socket, object, property, from, to } => {
                let value = Exchange { from, to };
                Self::SetQomProperty { process: process(pid, start_time), socket, object, property, value }
            }
            WireAction::SetAffinity { pid, start_time, tid, thread_start_time, from, to, pin } => {
                let process = process(pid, start_time);
                let thread = ThreadId { process, tid: Pid(tid), start_time: thread_start_time };
                let pin = pin.map(|WireLibvirtPin { domain, target }| LibvirtPin { domain, target });
                Self::SetAffinity { thread, cpus: Exchange { from: from.0, to: to.0 }, pin }
            }
            WireAction::MovePages { pid, start_time, ranges: pairs, node } => {
                Self::MovePages { process: process(pid, start_time), ranges: address_ranges(pairs), node }
            }
            WireAction::SetMemoryPolicy { pid, start_time, ranges: pairs, from, to } => Self::SetMemoryPolicy {
                process: process(pid, start_time),
                ranges: address_ranges(pairs),
                policy: Exchange { from: from.0, to: to.0 },
            },
            WireAction::ReplaceFile { file, from, to } => Self::ReplaceFile { file, content: Exchange { from, to } },
            WireAction::DefineDomain { uuid, name, from, to } => {
                Self::DefineDomain { uuid, name, definition: Exchange { from, to } }
            }
            WireAction::ReloadModule { module, from, to } => {
                Self::ReloadModule { module, parameters: Exchange { from, to } }
            }
            WireAction::StopMonitoring { pids } => {
                Self::MonitorAccesses(MonitorStep::Stop(pids.into_iter().map(Pid).collect()))
            }
        }
    }
}

impl WireEntry {
    /// The file format of an entry, if its undo has one.
    fn from_entry(entry: &JournalEntry) -> Option<Self> {
        Some(Self {
            written_values: entry.written_values.clone(),
            enclosing_extents: address_pairs(&entry.enclosing_extents),
            until_commit: entry.until_commit,
            purpose: entry.purpose.clone(),
            counters: entry.counters.iter().map(Into::into).collect(),
            undo: WireAction::from_action(&entry.undo)?,
        })
    }
}

impl From<WireEntry> for JournalEntry {
    fn from(entry: WireEntry) -> Self {
        Self {
            undo: entry.undo.into(),
            written_values: entry.written_values,
            enclosing_extents: address_ranges(entry.enclosing_extents),
            until_commit: entry.until_commit,
            purpose: entry.purpose,
            counters: entry.counters.into_iter().map(Into::into).collect(),
        }
    }
}

impl WireChange {
    pub(super) fn from_change(change: &JournalChange) -> Option<Self> {
        Some(match change {
            JournalChange::Push(entry) => Self::Push(Box::new(WireEntry::from_entry(entry)?)),
            JournalChange::Pop => Self::Pop,
            JournalChange::SetWrittenValues(entry, written) => {
                Self::SetWrittenValues { entry: *entry, written_values: written.clone() }
            }
        })
    }
}

impl From<WireChange> for JournalChange {
    fn from(change: WireChange) -> Self {
        match change {
            WireChange::Push(entry) => Self::Push(Box::new((*entry).into())),
            WireChange::Pop => Self::Pop,
            WireChange::SetWrittenValues { entry, written_values: written } => Self::SetWrittenValues(entry, written),
        }
    }
}

impl From<&Journal> for WireJournal {
    fn from(journal: &Journal) -> Self {
        Self {
            boot: journal.boot.clone(),
            writer: journal.writer,
            purpose: journal.purpose.clone(),
            entries: journal.entries.iter().filter_map(WireEntry::from_entry).collect(),
        }
    }
}

impl From<WireJournal> for Journal {
    fn from(wire: WireJournal) -> Self {
        let entries = wire.entries.into_iter().map(JournalEntry::from).collect();
        Self { boot: wire.boot, writer: wire.writer, purpose: wire.purpose, entries }
    }
}
