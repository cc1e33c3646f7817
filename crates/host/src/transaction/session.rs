//! Changing a host, with everything put back.
//!
//! A [`Session`] holds the one lock that lets somebody change KSM's settings and enrolments, and writes each change
//! into the [`journal`] before it is made. The lock is in the state directory; another one, which all Pagefolds on the
//! host share ([`Host::claim`]), keeps those out that have a state directory of their own. What was changed for a time
//! only comes back when the session ends, newest first: at the end of the work, on an error, in a panic. After `kill -9`
//! the next session, or `pagefold recover`, finds the journal and puts it back. What cannot be put back now but may be
//! later stays written down, and the next session tries again.
//!
//! A setting is put back only where it still has the value that was written last. Another value was written by
//! somebody else since, and is theirs: Pagefold yields and says so. One setting is written by the kernel too: a change
//! of `advisor_mode` resets `pages_to_scan` (mm/ksm.c, `set_advisor_defaults`), and while the advisor is on it moves.
//! So what `pages_to_scan` was is written down before the mode is changed, and comes back after it.
//!
//! Advice is put back only where its range still lies in what it lay in when it was given: a run of adjacent regions of
//! one kind that has not grown, but for the heap. By then the program may have mapped something else there, which it
//! never enrolled. Limits: something of the same kind and place cannot be told from what was there.
//!
//! What a session enrols is to stay, once it is done. If it ends before, by an error, a panic or `kill -9`, that is
//! withdrawn again, as far as there is memory for copies of what has merged and nobody waits for memory; where there is
//! not, it stays written down.
//!
//! Settings that a policy leaves behind on purpose ([`Session::keep`]) are written down apart, until
//! [`Session::restore_policy`].

mod error;
mod extent;

use crate::act;
use crate::act::{Action, Advice, Effect, Refusal};
use crate::transaction::journal::{Change, Directory, Entry, Journal, POLICY, SESSION, resting};
use crate::{Claim, Holder, Host, parse, room};
pub use error::Error;
pub use error::chain;
use extent::Extents;
use pagefold_base::guard;
use pagefold_base::guard::{Need, Verdict};
use pagefold_base::ksm::DEFAULT_PAGES_TO_SCAN;
use pagefold_base::ksm::{Setting, Settings};
use pagefold_base::memory::PRESSURE;
use pagefold_base::{Absent, AddressRange, Pages, ProcessId};
use rustix::fs::OFlags;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{DirBuilder, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

/// Where lock and journal are kept unless said otherwise.
pub const DIRECTORY: &str = "/run/pagefold";

/// How long processes are waited for in all that are ending or do not stop, where that keeps something from being put
/// back.
const ENDING: Duration = Duration::from_secs(5);

/// A guest that refuses a backend after so long hangs, busy or not.
const HUNG_AFTER: Duration = Duration::from_secs(1);

/// Why a backend of a guest is not put back after another one of the guest.
const HUNG: &str = "the control socket of the guest did not answer in time for another backend";

/// Whether a change comes back when the session ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stays {
    /// It is put back.
    ForNow,
    /// It is what the session is for, and stays once that is done ([`Session::done`]). Until then it is put back, too,
    /// as far as there is memory for that.
    OnceDone,
    /// It is never put back.
    ForGood,
}

/// Something that could not be put back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remains {
    /// What would have put it back.
    pub undo: Action,
    /// Why it was not.
    pub why: String,
    /// Whether the next session tries again.
    pub kept: bool,
}

impl fmt::Display for Remains {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", Was(&self.undo), self.why)
    }
}

/// What puts a change back, for people: as what there was before it.
pub struct Was<'a>(pub &'a Action);

impl fmt::Display for Was<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Action::Set { setting, value } => write!(f, "/sys/kernel/mm/ksm/{} was {value}", setting.file()),
            Action::Advise { process, advice, ranges } => {
                let was = if *advice == Advice::Mergeable { "enrolled" } else { "not enrolled" };
                write!(f, "{} ranges of process {} were {was}", ranges.len(), process.pid)
            }
            Action::MergeAny { process, on } => {
                write!(f, "process {} was {}enrolled whole", process.pid, if *on { "" } else { "not " })
            }
            Action::GuestMerge { process, backend, on, .. } => {
                let was = if *on { "" } else { "not " };
                write!(f, "{backend} of the guest of process {} was {was}enrolled", process.pid)
            }
            // It has no undo.
            Action::Collapse { .. } => Ok(()),
        }
    }
}

/// The right to change a host, and what is to be put back.
pub struct Session<'a> {
    host: &'a dyn Host,
    directory: Directory,
    /// What comes back when this session ends.
    journal: Journal,
    /// What could not be put back and may be later, oldest first.
    left: Vec<Entry>,
    written: Written,
    stops: Vec<Duration>,
    _lock: File,
    _claim: Claim,
}

/// What the journal's file has in bytes.
#[derive(Clone, Copy, Default)]
struct Written {
    /// When it was last written whole; 0 where there is none, or where it has to be written whole again.
    whole: usize,
    /// Since then.
    appended: usize,
}

/// Changes may be appended to a journal until they are as large as it was, and as this: all that is written is so within
/// a small multiple of what is to be kept.
const APPENDED: usize = 64 << 10;

/// What of an entry was put back.
#[derive(Default)]
struct Back {
    done: Option<Action>,
    /// Whether the process was busy until it was given up.
    is_busy: bool,
    /// What was not, why, and whether to try again later.
    remains: Vec<(Entry, String, bool)>,
}

impl Back {
    fn done(entry: &Entry) -> Self {
        Self { done: Some(entry.undo.clone()), ..Self::default() }
    }

    fn not(entry: &Entry, why: impl ToString, kept: bool) -> Self {
        Self { remains: vec![(entry.clone(), why.to_string(), kept)], ..Self::default() }
    }
}

/// How the journal was before an action was noted.
struct Noted {
    length: usize,
    written: Vec<(usize, Vec<String>)>,
}

impl<'a> Session<'a> {
    /// Take the lock in a directory, made if it is not there, and put back what a killed session left. Tells that too.
    pub fn begin(host: &'a dyn Host, directory: &Path) -> Result<(Self, Vec<Action>, Vec<Remains>), Error> {
        let (directory, lock) = lock(directory)?;
        let claim = host.claim().map_err(Error::Busy)?;
        if matches!(claim, Claim::Obstructed) {
            let _ = writeln!(
                io::stderr(),
                "pagefold: another program holds a read lock on /sys/kernel/mm/ksm/run: a second pagefold with another \
                 state directory would not be noticed"
            );
        }
        let boot = boot(host).map_err(Error::Unknown)?;
        let left = Journal::load(&directory, SESSION)?.filter(|journal| journal.boot == boot);
        let journal = Journal { boot, writer: std::process::id(), purpose: None, entries: Vec::new() };
        let written = Written::default();
        let mut session =
            Self { host, directory, journal, left: Vec::new(), written, stops: Vec::new(), _lock: lock, _claim: claim };
        let Some(left) = left else { return Ok((session, Vec::new(), Vec::new())) };
        session.journal.entries = left.entries;
        let (undone, remains) = session.put_back()?;
        Ok((session, undone, remains))
    }

    /// The host.
    pub fn host(&self) -> &'a dyn Host {
        self.host
    }

    /// Where its journal is.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// For how long threads of targets were stopped, each time, by all changes and by putting them back.
    pub fn stops(&self) -> &[Duration] {
        &self.stops
    }

    /// Make a change, after it was written down what puts it back. A setting that is changed for good no longer comes
    /// back, whatever was done to it before.
    pub fn apply(&mut self, action: &Action, stays: Stays) -> Result<Effect, Error> {
        self.apply_until_stopped(action, stays, &AtomicBool::new(false))
    }

    /// The same, ending the wait for a process that does not answer once `stop` is set. What puts a change back waits
    /// for its time limit all the same.
    pub fn apply_until_stopped(&mut self, action: &Action, stays: Stays, stop: &AtomicBool) -> Result<Effect, Error> {
        if stays == Stays::ForGood {
            let effect = self.effect(action, stop)?;
            if let Action::Set { setting, .. } = action {
                let length = self.journal.entries.len();
                self.journal.entries.retain(|entry| !sets(entry, *setting));
                if self.journal.entries.len() < length {
                    self.store()?;
                }
            }
            return Ok(effect);
        }
        let noted = self.note(action, stays == Stays::OnceDone)?;
        self.effect(action, stop).map_err(|refusal| {
            // Where something may have been changed, its undo stays: taking back what was not done does no harm.
            let in_part = matches!(refusal, Refusal::Busy(_) | Refusal::Failed(_));
            let untouched = matches!(action, Action::Set { .. }) || !in_part;
            match if untouched { self.forget(noted) } else { Ok(()) } {
                Ok(()) => refusal.into(),
                Err(error) => error,
            }
        })
    }

    /// Have an action carried out.
    fn effect(&mut self, action: &Action, stop: &AtomicBool) -> Result<Effect, Refusal> {
        let effect = self.host.apply_until_stopped(action, stop)?;
        self.stops.extend(&effect.stops);
        Ok(effect)
    }

    /// Put something back, or find that its process has ended. A process that does not stop at once is tried again until
    /// some time: it may be ending, wait in the kernel, or get no processor, and one that is given up stays as it is.
    fn effect_or_end(&mut self, undo: &Action, until: Instant) -> Result<Effect, Refusal> {
        loop {
            let effect = self.effect(undo, &AtomicBool::new(false));
            let of_process = whose(undo).is_some();
            if !of_process || !matches!(effect, Err(Refusal::Busy(_))) || Instant::now() >= until {
                return effect;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Write settings for now, in the order in which the kernel takes them. Those that have the value are not written.
    pub fn set(&mut self, settings: &Settings) -> Result<(), Error> {
        for (&setting, value) in settings {
            let now = self.now(setting)?;
            self.check(setting, &now)?;
            if now != *value {
                self.apply(&Action::Set { setting, value: value.clone() }, Stays::ForNow)?;
            }
        }
        Ok(())
    }

    /// Whether settings can be written at all, found out by writing one that changes nothing. Not `run`, which somebody
    /// else may switch between the look and the write.
    pub fn writable(&self) -> Result<(), Error> {
        let value = self.now(Setting::SleepMillisecs)?;
        self.host.apply(&Action::Set { setting: Setting::SleepMillisecs, value })?;
        Ok(())
    }

    /// Whether every setting still has the value that this session wrote.
    pub fn uncontested(&self) -> Result<(), Error> {
        for entry in &self.journal.entries {
            if let Action::Set { setting, .. } = entry.undo {
                self.check(setting, &self.now(setting)?)?;
            }
        }
        Ok(())
    }

    /// Forget what would put back something of processes that have ended.
    pub fn forget_ended(&mut self) -> Result<(), Error> {
        let length = self.journal.entries.len();
        let host = self.host;
        let lives = |process: &ProcessId| host.open(process.pid).is_ok_and(|handle| handle.id() == *process);
        self.journal.entries.retain(|entry| whose(&entry.undo).is_none_or(|process| lives(&process)));
        if self.journal.entries.len() < length { self.store() } else { Ok(()) }
    }

    /// What the session is for is done: it stays. What an earlier one had begun of the same processes, and could not be
    /// withdrawn, stays with it.
    pub fn done(&mut self) -> Result<(), Error> {
        let length = self.left.len() + self.journal.entries.len();
        let done: BTreeSet<ProcessId> = self
            .journal
            .entries
            .iter()
            .filter(|entry| entry.until_done)
            .filter_map(|entry| whose(&entry.undo))
            .collect();
        self.left
            .retain(|entry| !entry.until_done || whose(&entry.undo).is_none_or(|process| !done.contains(&process)));
        self.journal.entries.retain(|entry| !entry.until_done);
        if self.left.len() + self.journal.entries.len() < length { self.store() } else { Ok(()) }
    }

    /// Put everything back that was changed for now, newest first.
    ///
    /// # Errors
    /// When the journal cannot be written in the end: [`Error::Remains`] with what is not put back, if there is any.
    pub fn finish(&mut self) -> Result<Vec<Remains>, Error> {
        Ok(self.put_back()?.1)
    }

    /// The same because something failed: the error, with what remains.
    pub fn give_up(&mut self, error: Error) -> Error {
        let remains = match self.finish() {
            Ok(remains) | Err(Error::Remains { remains, .. }) => remains,
            // All is back: the journal that says otherwise does no harm.
            Err(_) => Vec::new(),
        };
        if remains.is_empty() { error } else { Error::Remains { remains, source: Box::new(error) } }
    }

    /// End with the settings as they are now, as a policy's, and write down what they were before the first policy.
    /// Anything else that was changed for now comes back.
    pub fn keep(&mut self, policy: &str) -> Result<Vec<Remains>, Error> {
        let mut kept = self.policy()?.unwrap_or_else(|| Journal { entries: Vec::new(), ..self.journal.clone() });
        let settings = |entry: &Entry| matches!(entry.undo, Action::Set { .. });
        for entry in self.journal.entries.iter().filter(|entry| settings(entry)) {
            let Action::Set { setting, value } = &entry.undo else { continue };
            match kept.entries.iter_mut().find(|known| sets(known, *setting)) {
                Some(known) => {
                    // The former policy's is there again if this ends before its own journal is gone.
                    known.written.retain(|written| written == value);
                    known.written.extend(entry.written.last().cloned());
                }
                None => kept.entries.push(entry.clone()),
            }
        }
        kept.purpose = Some(policy.to_owned());
        kept.store(&self.directory, POLICY)?;
        let all = self.journal.entries.clone();
        self.journal.entries.retain(|entry| !settings(entry));
        // While its own journal has them, they come back.
        if let Err(error) = self.store() {
            self.journal.entries = all;
            return Err(error);
        }
        self.finish()
    }

    /// What the host had before a policy was set, with the policy's name, if one is set.
    pub fn policy(&self) -> Result<Option<Journal>, Error> {
        Ok(Journal::load(&self.directory, POLICY)?.filter(|journal| journal.boot == self.journal.boot))
    }

    /// Put back what the host had before a policy was set. Tells what was put back and what was not.
    pub fn restore_policy(&mut self) -> Result<(Vec<Action>, Vec<Remains>), Error> {
        let Some(policy) = self.policy()? else { return Ok((Vec::new(), Vec::new())) };
        self.journal.entries.extend(policy.entries);
        // From here on it is this session's to put back, also after it was killed.
        self.store()?;
        Journal { entries: Vec::new(), ..self.journal.clone() }.store(&self.directory, POLICY)?;
        self.put_back()
    }

    fn now(&self, setting: Setting) -> Result<String, Error> {
        act::setting_now(self.host, setting).map_err(|source| Error::Setting { setting, source })
    }

    fn check(&self, setting: Setting, now: &str) -> Result<(), Error> {
        // While this session has the advisor on, the kernel moves it.
        if setting == Setting::PagesToScan && self.wrote(Setting::AdvisorMode) == Some("scan-time") {
            return Ok(());
        }
        match self.wrote(setting) {
            Some(wrote) if wrote != now => {
                Err(Error::Contested { setting, wrote: wrote.to_owned(), found: now.to_owned() })
            }
            _ => Ok(()),
        }
    }

    /// What was written last.
    fn wrote(&self, setting: Setting) -> Option<&str> {
        self.journal.entries.iter().find(|entry| sets(entry, setting))?.written.last().map(String::as_str)
    }

    /// Write down what puts an action back. A setting keeps the value that it had first.
    fn note(&mut self, action: &Action, until_done: bool) -> Result<Noted, Error> {
        let mut noted = Noted { length: self.journal.entries.len(), written: Vec::new() };
        if let Action::Set { setting, value } = action {
            let now = self.now(*setting)?;
            if *setting == Setting::AdvisorMode && now != *value && (now == "none" || self.known(Setting::PagesToScan))
            {
                self.note_setting(Setting::PagesToScan, &DEFAULT_PAGES_TO_SCAN.to_string(), &mut noted)?;
            }
            if now != *value || self.known(*setting) {
                self.note_setting(*setting, value, &mut noted)?;
            }
        } else {
            let undo = act::undo(self.host, action)?;
            for undo in undo {
                let within = self.within(&undo).map_err(Error::Unknown)?;
                self.journal.entries.push(Entry { undo, written: Vec::new(), within, until_done });
            }
        }
        self.log(&self.changes(&noted))?;
        Ok(noted)
    }

    /// What was changed since an action was noted.
    fn changes(&self, noted: &Noted) -> Vec<Change> {
        let entries = &self.journal.entries;
        let older = self.left.len();
        let written = noted.written.iter().map(|(at, _)| Change::Written(older + at, entries[*at].written.clone()));
        written.chain(entries[noted.length..].iter().cloned().map(Change::Push)).collect()
    }

    /// What each range of advice is part of now.
    fn within(&self, action: &Action) -> Result<Vec<AddressRange>, Absent> {
        let Action::Advise { process, ranges, .. } = action else { return Ok(Vec::new()) };
        let extents = Extents::of(self.host, *process)?;
        // What has changed since it was chosen is bounded by itself.
        Ok(ranges.iter().map(|&range| extents.around(range).unwrap_or(range)).collect())
    }

    /// Write down that a setting is about to be written.
    fn note_setting(&mut self, setting: Setting, value: &str, noted: &mut Noted) -> Result<(), Error> {
        match self.journal.entries.iter().position(|entry| sets(entry, setting)) {
            Some(position) => {
                let written = &mut self.journal.entries[position].written;
                noted.written.push((position, written.clone()));
                let last = written.pop();
                *written = last.into_iter().chain([value.to_owned()]).collect();
            }
            None => {
                let undo = Action::Set { setting, value: resting(setting, self.now(setting)?) };
                let written = vec![value.to_owned()];
                self.journal.entries.push(Entry { undo, written, within: Vec::new(), until_done: false });
            }
        }
        Ok(())
    }

    /// Take back what was noted, because it was not done.
    fn forget(&mut self, noted: Noted) -> Result<(), Error> {
        let mut changes = vec![Change::Pop; self.journal.entries.len() - noted.length];
        self.journal.entries.truncate(noted.length);
        for (position, written) in noted.written.into_iter().rev() {
            changes.push(Change::Written(self.left.len() + position, written.clone()));
            self.journal.entries[position].written = written;
        }
        self.log(&changes)
    }

    fn known(&self, setting: Setting) -> bool {
        self.journal.entries.iter().any(|entry| sets(entry, setting))
    }

    /// Write the journal whole.
    fn store(&mut self) -> Result<(), Error> {
        let entries = self.left.iter().chain(&self.journal.entries).cloned().collect();
        let journal = Journal { boot: self.journal.boot.clone(), writer: self.journal.writer, purpose: None, entries };
        self.written = Written::default();
        self.written.whole = journal.store(&self.directory, SESSION)?;
        Ok(())
    }

    /// Write changes down that were made to the journal.
    fn log(&mut self, changes: &[Change]) -> Result<(), Error> {
        let Written { whole, appended } = self.written;
        let empty = self.left.is_empty() && self.journal.entries.is_empty();
        if changes.is_empty() {
            return Ok(());
        }
        if empty || whole == 0 || appended > whole.max(APPENDED) {
            return self.store();
        }
        match Journal::append(&self.directory, SESSION, changes) {
            Ok(bytes) => self.written.appended += bytes,
            // A part of a line may be there, after which no other may come.
            Err(_) => self.store()?,
        }
        Ok(())
    }

    /// Put back all there is, newest first, whatever happens to one of them or to the journal.
    fn put_back(&mut self) -> Result<(Vec<Action>, Vec<Remains>), Error> {
        let (mut undone, mut remains, mut stored) = (Vec::new(), Vec::new(), Ok(()));
        let (older, until) = (self.left.len(), Instant::now() + ENDING);
        // Each backend of a guest that hangs would take the whole time limit of its control socket.
        let mut hung: BTreeSet<ProcessId> = BTreeSet::new();
        // `run` was written last and is put back first, so that ksmd does not run under half of the old settings.
        while let Some(entry) = self.journal.entries.pop() {
            let guest = matches!(entry.undo, Action::GuestMerge { .. }).then(|| whose(&entry.undo)).flatten();
            let started = Instant::now();
            let back = match guest {
                Some(process) if hung.contains(&process) => Back::not(&entry, HUNG, true),
                _ => self.put_back_one(&entry, until),
            };
            let hangs = back.is_busy || !back.remains.is_empty() && started.elapsed() >= HUNG_AFTER;
            hung.extend(guest.filter(|_| hangs));
            undone.extend(back.done);
            let left = self.left.len();
            for (entry, why, kept) in back.remains {
                remains.push(Remains { undo: entry.undo.clone(), why, kept });
                if kept {
                    self.left.insert(older, entry);
                }
            }
            // Where something stays, what comes after it in the file has another place.
            let same = stored.is_ok() && self.left.len() == left;
            stored = if same { self.log(&[Change::Pop]) } else { self.store() };
        }
        match stored {
            Ok(()) => Ok((undone, remains)),
            Err(error) if remains.is_empty() => Err(error),
            Err(error) => Err(Error::Remains { remains, source: Box::new(error) }),
        }
    }

    fn put_back_one(&mut self, entry: &Entry, until: Instant) -> Back {
        // The socket of a guest that has ended would be tried for ever.
        if whose(&entry.undo).is_some_and(|process| matches!(crate::hold(self.host, process), Err(Absent::Vanished))) {
            return Back::done(entry);
        }
        if entry.until_done
            && let Err(why) = self.may_copy(&entry.undo)
        {
            return Back::not(entry, why, true);
        }
        match &entry.undo {
            Action::Set { setting, value } => match self.changed(entry, *setting, value) {
                Ok(true) => {}
                Ok(false) => return Back::done(entry),
                Err((why, kept)) => return Back::not(entry, why, kept),
            },
            Action::Advise { process, advice, ranges } => {
                return self.put_back_advice(entry, (*process, *advice, ranges), until);
            }
            _ => {}
        }
        match self.effect_or_end(&entry.undo, until) {
            Ok(_) | Err(Refusal::Vanished) => Back::done(entry),
            Err(why) => Back { is_busy: matches!(why, Refusal::Busy(_)), ..Back::not(entry, &why, later(&why)) },
        }
    }

    /// Whether there is memory for pages of their own for all that is merged of a process that is to be withdrawn, and
    /// none is waited for; or why not.
    fn may_copy(&self, undo: &Action) -> Result<(), &'static str> {
        match self.room_for(undo) {
            Ok(None) => Ok(()),
            Ok(Some((false, _))) | Err(_) => Err("there is no memory for copies of what has merged"),
            Ok(Some((true, cgroup))) if room::is_short(self.host, cgroup.as_deref(), PRESSURE) => {
                Err("memory is short, and copies of what has merged take more")
            }
            Ok(Some((true, _))) => Ok(()),
        }
    }

    /// Whether there is room for copies of all that is merged of a process that is to be withdrawn, and its cgroup;
    /// nothing where nothing is to be copied.
    fn room_for(&self, undo: &Action) -> Result<Option<(bool, Option<String>)>, Absent> {
        let process = match undo {
            Action::Advise { process, advice: Advice::Unmergeable, .. }
            | Action::MergeAny { process, on: false }
            | Action::GuestMerge { process, on: false, .. } => *process,
            _ => return Ok(None),
        };
        let handle = match crate::hold(self.host, process) {
            Err(Absent::Vanished) => return Ok(None),
            handle => handle?,
        };
        let ksm = parse::process_ksm(handle.read("ksm_stat"), handle.read("ksm_merging_pages"));
        let merged = ksm.merging_pages.map(|pages| pages.saturating_add_signed(ksm.zero_pages.unwrap_or(0)));
        let copies = match (merged, undo) {
            (Ok(pages), _) => Pages(pages),
            // At most.
            (Err(_), Action::Advise { ranges, .. }) => {
                ranges.iter().map(|range| self.host.page_size().pages_in(range.bytes())).sum()
            }
            (Err(why), _) => return Err(why),
        };
        let cgroup = handle.read("cgroup").and_then(|bytes| parse::cgroup(&bytes)).ok();
        if copies == Pages::ZERO {
            return Ok(None);
        }
        let room = room::room(self.host, &cgroup.iter().cloned().collect());
        let need = Need::of(cgroup.as_deref(), copies, Pages::ZERO);
        let fits = guard::judge(&need, &room, self.host.page_size()).verdict == Verdict::Fits;
        Ok(Some((fits, cgroup)))
    }

    /// Whether a setting is to be put back. If it is but must not be: why, and whether to try again later.
    fn changed(&self, entry: &Entry, setting: Setting, value: &str) -> Result<bool, (String, bool)> {
        let read = |setting| act::setting_now(self.host, setting);
        let now = read(setting).map_err(|why| (why.to_string(), why != Absent::NotOnThisKernel))?;
        if resting(setting, now.clone()) == *value {
            return Ok(false);
        }
        if setting == Setting::PagesToScan && read(Setting::AdvisorMode).as_deref() == Ok("scan-time") {
            let advisor = Action::Set { setting: Setting::AdvisorMode, value: "scan-time".to_owned() };
            if self.left.iter().any(|entry| sets(entry, Setting::AdvisorMode)) {
                return Err(("the advisor is on, which could not be switched off".to_owned(), true));
            }
            // If the advisor was on before, it sets this.
            let before = self.journal.entries.iter().any(|older| older.undo == advisor);
            let foreign = || ("the advisor is on, which somebody else switched on".to_owned(), false);
            return if before { Ok(false) } else { Err(foreign()) };
        }
        if !entry.written.contains(&now) {
            return Err((format!("it is {now} now, which somebody else wrote"), false));
        }
        Ok(true)
    }

    /// Put advice back where what was advised is still there.
    fn put_back_advice(
        &mut self,
        entry: &Entry,
        (process, advice, ranges): (ProcessId, Advice, &[AddressRange]),
        until: Instant,
    ) -> Back {
        let extents = match Extents::of(self.host, process) {
            Ok(extents) => extents,
            Err(Absent::Vanished) => return Back::done(entry),
            Err(why) => return Back::not(entry, why, true),
        };
        let part = |pairs: &[(AddressRange, AddressRange)]| {
            let (ranges, within) = pairs.iter().copied().unzip();
            let undo = Action::Advise { process, advice, ranges };
            Entry { undo, written: Vec::new(), within, until_done: entry.until_done }
        };
        let mut back = Back::default();
        let (mut same, mut other) = (Vec::new(), Vec::new());
        for (position, &range) in ranges.iter().enumerate() {
            // What nothing is mapped at any more needs nothing.
            match entry.within.get(position) {
                _ if !extents.any(range) => {}
                Some(&within) if extents.still(range, within) => same.push((range, within)),
                within => other.push((range, within.copied().unwrap_or(range))),
            }
        }
        if !other.is_empty() {
            let why = "something else may be mapped there by now: it was left as it is";
            back.remains.push((part(&other), why.to_owned(), false));
        }
        if same.is_empty() {
            back.done = other.is_empty().then(|| entry.undo.clone());
            return back;
        }
        let action = part(&same);
        match self.effect_or_end(&action.undo, until) {
            Ok(effect) => {
                let mut missed: BTreeMap<String, Vec<_>> = BTreeMap::new();
                // What was unmapped meanwhile has nothing that could come back.
                for (range, why) in effect.missed.into_iter().filter(|(_, why)| !why.starts_with(act::NOT_MAPPED)) {
                    let cut = same.iter().filter_map(|&(part, within)| Some((part.overlap(range)?, within)));
                    missed.entry(why).or_default().extend(cut);
                }
                if missed.is_empty() {
                    back.done = Some(action.undo);
                }
                back.remains.extend(missed.into_iter().map(|(why, pairs)| (part(&pairs), why, true)));
            }
            Err(Refusal::Vanished) => back.done = Some(action.undo),
            Err(why) => back.remains.push((action, why.to_string(), later(&why))),
        }
        back
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        let told: Vec<String> = match self.put_back() {
            Ok((_, remains)) => remains.iter().map(|remains| format!("not put back: {remains}")).collect(),
            Err(error) => vec![chain(&error)],
        };
        for told in told {
            // Nobody may be left to read it, and a panic here would end more than this.
            let _ = writeln!(io::stderr(), "pagefold: {told}");
        }
    }
}

/// Whether something that was refused may be taken later.
fn later(why: &Refusal) -> bool {
    !matches!(why, Refusal::ReadOnly | Refusal::Unsupported(_))
}

/// Whose memory it is about.
fn whose(undo: &Action) -> Option<ProcessId> {
    match undo {
        Action::Advise { process, .. } | Action::MergeAny { process, .. } | Action::GuestMerge { process, .. } => {
            Some(*process)
        }
        _ => None,
    }
}

fn sets(entry: &Entry, of: Setting) -> bool {
    matches!(entry.undo, Action::Set { setting, .. } if setting == of)
}

/// Which boot of the host this is: journals of another one are void.
pub fn boot(host: &dyn Host) -> Result<String, Absent> {
    Ok(String::from_utf8_lossy(&host.read("proc/sys/kernel/random/boot_id")?).trim().to_owned())
}

/// A directory, made if it is not there, and its lock. The lock's file holds the number of the process that has it.
fn lock(path: &Path) -> Result<(Directory, File), Error> {
    let state = |path: &Path| {
        let path = path.to_owned();
        move |source| Error::State { path, source }
    };
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(state(path))?;
    let directory = Directory::open(path).map_err(state(path))?;
    if !directory.is_private().map_err(state(path))? {
        return Err(Error::Exposed(path.to_owned()));
    }
    let path = path.join("lock");
    let mut lock = directory.file("lock", OFlags::RDWR | OFlags::CREATE).map_err(state(&path))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            let read = lock.read_to_string(&mut holder);
            let pid = read.ok().and_then(|_| holder.trim().parse().ok());
            return Err(Error::Busy(Holder { pid, state: None }));
        }
        Err(TryLockError::Error(source)) => return Err(Error::State { path, source }),
    }
    lock.set_len(0).and_then(|()| write!(lock, "{}", std::process::id())).map_err(state(&path))?;
    Ok((directory, lock))
}

#[cfg(test)]
mod tests;
