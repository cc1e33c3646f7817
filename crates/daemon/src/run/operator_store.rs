//! Operator commands, saved so that they outlive a killed daemon.
//!
//! A pause and the unenrolled processes are one JSON file beside the journal, replaced atomically. The next daemon of
//! the same boot applies it. A daemon that is stopped removes the file: its operator commands end with it. A daemon
//! that hands over to another one, and one that is killed, leave it.

use crate::decide::Event;
use pagefold_base::{Pid, ProcessId};
use pagefold_host::transaction::journal::StateDirectory;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io;
use std::path::Path;

/// Name of the file.
pub const OPERATOR_FILE: &str = "operator.json";

/// The commands in force.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OperatorState {
    /// Id of the boot.
    boot: String,
    /// Whether the daemon is paused.
    paused: bool,
    /// Unenrolled processes: pid and start time.
    unenrolled: BTreeSet<(u32, u64)>,
}

/// Saves operator commands.
#[derive(Debug)]
pub(super) struct OperatorStore {
    directory: StateDirectory,
    state: OperatorState,
}

impl OperatorStore {
    /// Load the commands of this boot, for processes that are alive. An unreadable file may have been a pause and
    /// counts as one; the reason is returned.
    ///
    /// # Errors
    /// If the directory cannot be opened, other users may write to it, or the file cannot be read.
    pub fn load(
        directory: &Path,
        boot_id: String,
        is_alive: impl Fn(ProcessId) -> bool,
    ) -> io::Result<(Self, Vec<Event>, Option<serde_json::Error>)> {
        let directory = StateDirectory::open(directory)?;
        if !directory.is_private()? {
            return Err(io::Error::other("other users may write to it"));
        }
        let (saved, why) = match directory.read(OPERATOR_FILE) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => (None, None),
            bytes => match serde_json::from_slice::<OperatorState>(&bytes?) {
                Ok(state) => (Some(state).filter(|state| state.boot == boot_id), None),
                Err(why) => {
                    (Some(OperatorState { boot: boot_id.clone(), paused: true, ..OperatorState::default() }), Some(why))
                }
            },
        };
        let mut state = saved.unwrap_or(OperatorState { boot: boot_id, ..OperatorState::default() });
        let process = |&(pid, start_time): &(u32, u64)| ProcessId { pid: Pid(pid), start_time };
        state.unenrolled.retain(|entry| is_alive(process(entry)));
        let pause = state.paused.then_some(Event::Pause);
        let events = pause.into_iter().chain(state.unenrolled.iter().map(process).map(Event::Unenroll)).collect();
        Ok((Self { directory, state }, events, why))
    }

    /// Save the command in an event, if it has one.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn record_event(&mut self, event: &Event) -> io::Result<()> {
        let entry = |process: &ProcessId| (process.pid.0, process.start_time);
        let mut state = self.state.clone();
        let has_changed = match event {
            Event::Pause => !std::mem::replace(&mut state.paused, true),
            Event::Resume => std::mem::replace(&mut state.paused, false),
            Event::Unenroll(process) => state.unenrolled.insert(entry(process)),
            Event::Enroll(process) | Event::ProcessExited(process) => state.unenrolled.remove(&entry(process)),
            _ => false,
        };
        if has_changed {
            self.directory.replace(OPERATOR_FILE, &serde_json::to_vec(&state)?)?;
            self.state = state;
        }
        Ok(())
    }

    /// Remove the file: no command applies any more.
    ///
    /// # Errors
    /// If the file cannot be removed.
    pub fn remove_file(&self) -> io::Result<()> {
        match self.directory.remove(OPERATOR_FILE) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn process(pid: u32) -> ProcessId {
        ProcessId { pid: Pid(pid), start_time: 5 }
    }

    #[test]
    fn state_is_loaded_only_under_the_same_boot() {
        let directory = tempfile::tempdir().unwrap();
        let load =
            |boot: &str| OperatorStore::load(directory.path(), boot.to_owned(), |process| process.pid.0 < 9).unwrap();
        let (mut operator, events, _) = load("one");
        assert_eq!(events, []);
        let events = [
            Event::Unenroll(process(1)),
            Event::Pause,
            Event::Unenroll(process(2)),
            Event::Unenroll(process(3)),
            Event::Unenroll(process(4)),
            Event::Unenroll(process(9)),
            Event::Enroll(process(2)),
            Event::ProcessExited(process(3)),
        ];
        events.iter().for_each(|event| operator.record_event(event).unwrap());
        let (mut operator, events, why) = load("one");
        assert_eq!(events, [Event::Pause, Event::Unenroll(process(1)), Event::Unenroll(process(4))]);
        assert!(why.is_none());
        assert_eq!(load("two").1, [], "commands of another boot do not apply");
        operator.record_event(&Event::Resume).unwrap();
        assert_eq!(load("one").1, [Event::Unenroll(process(1)), Event::Unenroll(process(4))]);
        // A command that could not be saved is saved when it is repeated.
        std::fs::create_dir(directory.path().join("operator.json.new")).unwrap();
        assert!(operator.record_event(&Event::Pause).is_err());
        std::fs::remove_dir(directory.path().join("operator.json.new")).unwrap();
        operator.record_event(&Event::Pause).unwrap();
        assert_eq!(load("one").1[0], Event::Pause);
        operator.remove_file().unwrap();
        operator.remove_file().unwrap();
        assert!(load("one").1.is_empty() && !directory.path().join(OPERATOR_FILE).exists());
    }

    #[test]
    fn unreadable_state_pauses_the_daemon() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(OPERATOR_FILE);
        let load = || OperatorStore::load(directory.path(), "one".to_owned(), |_| true);
        for strange in
            ["{\"boot\":\"one\",\"paused\":fal", "{\"boot\":\"one\",\"paused\":false,\"unenrolled\":[],\"more\":1}"]
        {
            fs::write(&path, strange).unwrap();
            let (mut operator, events, why) = load().unwrap();
            assert!(events == [Event::Pause] && why.is_some(), "{strange}");
            operator.record_event(&Event::Resume).unwrap();
            assert!(load().unwrap().1.is_empty(), "resuming clears the state");
        }
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(load().is_err());
    }
}
