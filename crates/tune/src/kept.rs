//! The changes that `pagefold tune apply` left in force: whether they still are, and their undo.
//!
//! A value that another program has written since is drift. It is reported and stays: the undo leaves it, too.

use crate::counters::{changed_settings, read_counters, stored_reading};
use crate::decide::counters::{CounterEffect, Proof, effects, proof_of};
use crate::decide::export::Settings;
use crate::decide::{Effect, TunePlan, describe_change};
use pagefold_base::{Absent, Reading};
use pagefold_doctor::decide::change::SettingChange;
use pagefold_host::action::{Action, domain_definition_path};
use pagefold_host::resource::ResourceClass;
use pagefold_host::transaction::Session;
use pagefold_host::transaction::journal::{CounterSample, Journal, JournalEntry, StateDirectory};
use pagefold_host::transaction::session::kept::{TUNE_PURPOSE, load_kept_changes};
use pagefold_host::transaction::session::{Error, FailedUndo, read_boot_id};
use pagefold_host::{Host, parse};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

/// The classes that `tune` changes.
const CLASSES: [ResourceClass; 3] = [ResourceClass::Ksm, ResourceClass::Settings, ResourceClass::Configuration];

/// Whether a change is still in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptState {
    /// The value is the one that `tune` wrote.
    InForce,
    /// The value is the previous one again.
    ChangedBack,
    /// Another program wrote another value.
    ChangedByOthers,
    /// It cannot be read.
    Unknown,
}

/// A change that `tune` left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptChange {
    /// The absolute path of the setting or file, or the module.
    pub name: String,
    /// The path of the setting below the root, if it is one.
    pub setting: Option<String>,
    /// The value before.
    pub before: String,
    /// The value that `tune` wrote.
    pub written: String,
    /// The present value, or why it is absent.
    pub current: Result<String, String>,
    /// Whether it is in force.
    pub state: KeptState,
    /// Whether it is the definition of a domain; its values have no secrets then.
    pub is_definition: bool,
    /// The paths of the settings that it changed, also of parameters of a module.
    pub changed_settings: Vec<String>,
    /// Their counters before the change.
    pub counters: Vec<CounterSample>,
}

impl KeptChange {
    /// Why no counter shows the effect of the change, if none of its settings has one.
    pub fn reason_without_counter(&self) -> Option<&'static str> {
        let mut reason = None;
        for setting in &self.changed_settings {
            match proof_of(setting) {
                Proof::Counters(_) => return None,
                Proof::Nothing(why) => reason = Some(why),
            }
        }
        reason
    }
}

/// Reads the changes that are left, in the order in which they were made, and their present values. Takes no lock.
///
/// # Errors
/// If a state directory or a journal in it cannot be read.
pub fn load(host: &dyn Host, state_directory: &Path) -> Result<Vec<KeptChange>, Error> {
    let mut kept = Vec::new();
    for class in CLASSES {
        let Some(directory) = open_directory(state_directory, class)? else { continue };
        let entries = load_entries(host, &directory, class)?;
        kept.extend(entries.iter().filter_map(|entry| read_change(host, entry)));
    }
    let joined = join_successive(kept).into_iter();
    Ok(joined.map(|change| if change.is_definition { without_secrets_of(change) } else { change }).collect())
}

/// Joins changes of one file, module or definition that follow each other: a later one starts from what the earlier one
/// wrote, so only the last one can be compared with what is there.
fn join_successive(changes: Vec<KeptChange>) -> Vec<KeptChange> {
    let mut joined: Vec<KeptChange> = Vec::new();
    for mut change in changes {
        let is_earlier = |earlier: &&mut KeptChange| earlier.name == change.name && earlier.written == change.before;
        let Some(earlier) = joined.iter_mut().rev().find(is_earlier) else {
            joined.push(change);
            continue;
        };
        change.before = std::mem::take(&mut earlier.before);
        change.counters.splice(0..0, std::mem::take(&mut earlier.counters));
        if matches!(change.state, KeptState::ChangedBack | KeptState::ChangedByOthers) {
            let is_before = change.current.as_ref() == Ok(&change.before);
            change.state = if is_before { KeptState::ChangedBack } else { KeptState::ChangedByOthers };
        }
        *earlier = change;
    }
    joined
}

/// The directory of a class's journals, if it exists.
fn open_directory(state_directory: &Path, class: ResourceClass) -> Result<Option<StateDirectory>, Error> {
    let path = class.directory(state_directory);
    match StateDirectory::open(&path) {
        Ok(directory) => Ok(Some(directory)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::StateDirectoryUnusable { path, source }),
    }
}

/// The changes of `tune` among those of a class that are kept, oldest first.
fn load_entries(host: &dyn Host, directory: &StateDirectory, class: ResourceClass) -> Result<Vec<JournalEntry>, Error> {
    let boot = read_boot_id(host).map_err(Error::HostStateUnreadable)?;
    let kept = load_kept_changes(directory, class, &boot)?;
    let entries = kept.into_iter().flat_map(|kept| kept.entries);
    Ok(entries.filter(|entry| entry.purpose.as_deref() == Some(TUNE_PURPOSE)).collect())
}

/// A change of a definition as it is shown.
fn without_secrets_of(change: KeptChange) -> KeptChange {
    KeptChange {
        before: without_secrets(&change.before),
        written: without_secrets(&change.written),
        current: change.current.as_deref().map(without_secrets).map_err(Clone::clone),
        ..change
    }
}

/// The definition of a domain as it is shown.
fn without_secrets(definition: &str) -> String {
    let stripped = parse::strip_libvirt_secrets(definition.as_bytes());
    stripped.map_or_else(|_| "no definition of a domain".to_owned(), |text| String::from_utf8_lossy(&text).into_owned())
}

fn read_change(host: &dyn Host, entry: &JournalEntry) -> Option<KeptChange> {
    let (name, setting, before, written, current) = match &entry.undo {
        Action::Write { knob, value } => {
            let written = entry.written_values.last()?.clone();
            (knob.to_string(), Some(knob.path().to_owned()), value.clone(), written, knob.read(host))
        }
        Action::ReloadModule { module, parameters } => {
            let current = parameters.to.read_current(host, *module).map(|current| current.to_string());
            let setting = format!("sys/module/{module}");
            (format!("module {module}"), Some(setting), parameters.to.to_string(), parameters.from.to_string(), current)
        }
        Action::DefineDomain { name, definition, .. } => {
            let path = domain_definition_path(name);
            let current = host.read(&path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
            (format!("/{path}"), None, definition.to.clone(), definition.from.clone(), current)
        }
        Action::ReplaceFile { file, content } => {
            let text = |content: &Option<String>| content.clone().unwrap_or_else(|| "absent".to_owned());
            let current: Reading<String> = match host.read(&file.path()) {
                Err(Absent::NotOnThisKernel) => Ok(text(&None)),
                current => current.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()),
            };
            (file.to_string(), None, text(&content.to.0), text(&content.from.0), current)
        }
        _ => return None,
    };
    let state = match &current {
        Ok(current) if *current == written => KeptState::InForce,
        Ok(current) if *current == before => KeptState::ChangedBack,
        Ok(_) => KeptState::ChangedByOthers,
        Err(_) => KeptState::Unknown,
    };
    Some(KeptChange {
        name,
        setting,
        before,
        written,
        current: current.map_err(|why| why.to_string()),
        state,
        is_definition: matches!(entry.undo, Action::DefineDomain { .. }),
        changed_settings: changed_settings(&entry.undo),
        counters: entry.counters.clone(),
    })
}

/// What was undone.
#[derive(Debug, Default)]
pub struct Undone {
    /// The undone changes.
    pub done: Vec<Action>,
    /// The changes that could not be undone, with the reason.
    pub failed: Vec<FailedUndo>,
    /// Why the changes of a class could not be tried, for each such class.
    pub errors: Vec<Error>,
}

impl Undone {
    fn add(&mut self, (done, failed): (Vec<Action>, Vec<FailedUndo>)) {
        self.done.extend(done);
        self.failed.extend(failed);
    }
}

/// Undoes all changes that `tune` left, the last class first. Locks only classes that have such changes, or what a killed
/// run left. Where another Pagefold process works on a class, the others are undone.
pub fn undo(host: &dyn Host, state_directory: &Path) -> Undone {
    let mut undone = Undone::default();
    let mut sessions = Vec::new();
    for class in CLASSES {
        match begin_if_needed(host, state_directory, class) {
            Ok(Some((session, done, failed))) => {
                undone.add((done, failed));
                sessions.push(session);
            }
            Ok(None) => {}
            Err(error) => undone.errors.push(error),
        }
    }
    for session in sessions.iter_mut().rev() {
        match session.undo_kept_changes_for(TUNE_PURPOSE) {
            Ok(result) => undone.add(result),
            Err(error) => undone.errors.push(error),
        }
    }
    undone
}

/// A session, and what it undid when it began.
type BegunSession<'h> = (Session<'h>, Vec<Action>, Vec<FailedUndo>);

/// Begins a session of a class if `tune` left changes of it, or if a killed run left a journal, as an undo does that was
/// killed.
fn begin_if_needed<'h>(
    host: &'h dyn Host,
    state_directory: &Path,
    class: ResourceClass,
) -> Result<Option<BegunSession<'h>>, Error> {
    let Some(directory) = open_directory(state_directory, class)? else { return Ok(None) };
    let has_kept_changes = !load_entries(host, &directory, class)?.is_empty();
    if !has_kept_changes && Journal::load(&directory, class.journal_file())?.is_none() {
        return Ok(None);
    }
    match Session::begin(host, state_directory, class) {
        // The journal is that of a process which lives.
        Err(Error::Busy { .. }) if !has_kept_changes => Ok(None),
        result => result.map(Some),
    }
}

/// What the counters of changes say now, and after `wait` if it is not zero.
pub fn observe_effects(host: &dyn Host, kept: &[KeptChange], wait: Duration) -> Vec<CounterEffect> {
    let read = || read_counters(host, kept.iter().flat_map(|change| &change.changed_settings).map(String::as_str));
    let (mut now, mut earlier) = (read(), None);
    if !wait.is_zero() {
        host.sleep(wait);
        earlier = Some(std::mem::replace(&mut now, read()));
    }
    // Of a counter that two changes have, the older sample is from before both.
    let mut samples = BTreeMap::new();
    for sample in kept.iter().flat_map(|change| &change.counters) {
        let stored = stored_reading(sample);
        let oldest = samples.entry(sample.source.clone()).or_insert(stored);
        if stored.uptime_ms < oldest.uptime_ms {
            *oldest = stored;
        }
    }
    effects(&now, earlier.as_ref(), &samples)
}

/// The settings in force by `tune` and those of a plan, for an export. The plan wins. Changes that the plan refuses only
/// for now, because a module is in use or the boot loader is not known, are part of it.
pub fn export_settings(kept: &[KeptChange], plan: &TunePlan) -> Settings {
    let mut settings = Settings::default();
    for change in kept {
        match change.setting.as_deref().map(|path| (path, path.strip_prefix("sys/module/"))) {
            Some((_, Some(module))) if !module.contains('/') => {
                let words = change.written.split(' ').filter_map(|word| word.split_once('='));
                let words = words.map(|(name, value)| (name.to_owned(), value.to_owned()));
                settings.modules.entry(module.to_owned()).or_default().extend(words);
            }
            Some((path, _)) => _ = settings.writes.insert(path.to_owned(), change.written.clone()),
            None => {}
        }
    }
    for step in &plan.steps {
        match &step.effect {
            Effect::Write { path, to, .. } => _ = settings.writes.insert(path.clone(), to.clone()),
            Effect::Module(change) => {
                settings.modules.entry(change.module.clone()).or_default().extend(change.to.clone());
            }
            Effect::Boot { remove, add, .. } => {
                settings.boot.0.extend(remove.clone());
                settings.boot.1.extend(add.clone());
            }
            Effect::Machine { name, .. } => {
                let why = "`pagefold tune plan` shows the patch of its definition".to_owned();
                settings.omitted.push((format!("change virtual machine {name}"), why));
            }
        }
    }
    for refusal in &plan.refusals {
        if refusal.deferred.is_empty() {
            settings.omitted.push((refusal.change.clone(), refusal.why.clone()));
        }
        for change in &refusal.deferred {
            match change.clone() {
                SettingChange::ModuleParameter { module, parameter, value } => {
                    settings.modules.entry(module).or_default().insert(parameter, value);
                }
                SettingChange::BootParameter { remove, add } => {
                    settings.boot.0.extend(remove);
                    settings.boot.1.extend(add);
                }
                SettingChange::Write { path, value } => _ = settings.writes.insert(path, value),
                change @ SettingChange::VmDefinition { .. } => {
                    settings.omitted.push((describe_change(&change), refusal.why.clone()));
                }
            }
        }
    }
    settings
}
