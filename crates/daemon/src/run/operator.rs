//! What an operator has said, so that it outlives a daemon that is killed.
//!
//! A pause, and who is withdrawn, are one JSON file beside the journal, replaced atomically. The next daemon of the
//! same boot takes it up. One that is stopped removes it: what was said to it ends with it.

use crate::decide::Event;
use pagefold_base::{Pid, ProcessId};
use pagefold_host::transaction::journal::Directory;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io;
use std::path::Path;

/// The file.
pub const FILE: &str = "operator.json";

/// What was said and holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Said {
    /// Under which boot.
    boot: String,
    /// Whether nothing is to be done.
    paused: bool,
    /// Who is to be left alone: number and start time.
    withdrawn: BTreeSet<(u32, u64)>,
}

/// Keeps it.
#[derive(Debug)]
pub(super) struct Operator {
    directory: Directory,
    said: Said,
}

impl Operator {
    /// Take up what was said before under this boot, of those who live. What cannot be understood may have been a pause,
    /// and is taken for one: with the reason.
    ///
    /// # Errors
    /// Where the directory cannot be opened, others may write in it, or the file cannot be read.
    pub fn take_up(
        directory: &Path,
        boot: String,
        lives: impl Fn(ProcessId) -> bool,
    ) -> io::Result<(Self, Vec<Event>, Option<serde_json::Error>)> {
        let directory = Directory::open(directory)?;
        if !directory.is_private()? {
            return Err(io::Error::other("others may write in it"));
        }
        let (before, why) = match directory.read(FILE) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => (None, None),
            bytes => match serde_json::from_slice::<Said>(&bytes?) {
                Ok(said) => (Some(said).filter(|said| said.boot == boot), None),
                Err(why) => (Some(Said { boot: boot.clone(), paused: true, ..Said::default() }), Some(why)),
            },
        };
        let mut said = before.unwrap_or(Said { boot, ..Said::default() });
        let process = |&(pid, start_time): &(u32, u64)| ProcessId { pid: Pid(pid), start_time };
        said.withdrawn.retain(|of| lives(process(of)));
        let pause = said.paused.then_some(Event::Pause);
        let events = pause.into_iter().chain(said.withdrawn.iter().map(process).map(Event::Withdraw)).collect();
        Ok((Self { directory, said }, events, why))
    }

    /// Keep what an event says, if anything.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn heed(&mut self, event: &Event) -> io::Result<()> {
        let of = |process: &ProcessId| (process.pid.0, process.start_time);
        let mut said = self.said.clone();
        let changes = match event {
            Event::Pause => !std::mem::replace(&mut said.paused, true),
            Event::Resume => std::mem::replace(&mut said.paused, false),
            Event::Withdraw(process) => said.withdrawn.insert(of(process)),
            Event::Enrol(process) | Event::Went(process) => said.withdrawn.remove(&of(process)),
            _ => false,
        };
        if changes {
            self.directory.replace(FILE, &serde_json::to_vec(&said)?)?;
            self.said = said;
        }
        Ok(())
    }

    /// Nothing holds any more.
    ///
    /// # Errors
    /// Where the file cannot be removed.
    pub fn forget(&self) -> io::Result<()> {
        match self.directory.remove(FILE) {
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
    fn what_holds_is_taken_up_under_the_same_boot() {
        let directory = tempfile::tempdir().unwrap();
        let take_up = |boot: &str| Operator::take_up(directory.path(), boot.to_owned(), |who| who.pid.0 < 9).unwrap();
        let (mut operator, before, _) = take_up("one");
        assert_eq!(before, []);
        let events = [
            Event::Withdraw(process(1)),
            Event::Pause,
            Event::Withdraw(process(2)),
            Event::Withdraw(process(3)),
            Event::Withdraw(process(4)),
            Event::Withdraw(process(9)),
            Event::Enrol(process(2)),
            Event::Went(process(3)),
        ];
        events.iter().for_each(|event| operator.heed(event).unwrap());
        let (mut operator, before, why) = take_up("one");
        assert_eq!(before, [Event::Pause, Event::Withdraw(process(1)), Event::Withdraw(process(4))]);
        assert!(why.is_none());
        assert_eq!(take_up("two").1, [], "of another boot");
        operator.heed(&Event::Resume).unwrap();
        assert_eq!(take_up("one").1, [Event::Withdraw(process(1)), Event::Withdraw(process(4))]);
        // What could not be written is written when it is said again.
        std::fs::create_dir(directory.path().join("operator.json.new")).unwrap();
        assert!(operator.heed(&Event::Pause).is_err());
        std::fs::remove_dir(directory.path().join("operator.json.new")).unwrap();
        operator.heed(&Event::Pause).unwrap();
        assert_eq!(take_up("one").1[0], Event::Pause);
        operator.forget().unwrap();
        operator.forget().unwrap();
        assert!(take_up("one").1.is_empty() && !directory.path().join(FILE).exists());
    }

    #[test]
    fn what_is_not_understood_is_a_pause_and_what_others_may_have_written_is_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(FILE);
        let take_up = || Operator::take_up(directory.path(), "one".to_owned(), |_| true);
        for strange in
            ["{\"boot\":\"one\",\"paused\":fal", "{\"boot\":\"one\",\"paused\":false,\"withdrawn\":[],\"more\":1}"]
        {
            fs::write(&path, strange).unwrap();
            let (mut operator, events, why) = take_up().unwrap();
            assert!(events == [Event::Pause] && why.is_some(), "{strange}");
            operator.heed(&Event::Resume).unwrap();
            assert!(take_up().unwrap().1.is_empty(), "that ends it");
        }
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(take_up().is_err());
    }
}
