//! The errors of a session.

use super::FailedUndo;
use crate::LockHolder;
use crate::action::ActionError;
use crate::knob::Knob;
use crate::resource::ResourceClass;
use crate::transaction::journal;
use pagefold_base::Absent;
use std::io;
use std::path::PathBuf;

/// Why a session could not begin or a change could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another session is active, perhaps with another state directory.
    #[error("another pagefold{} is changing {} on this host: wait until it ends, or stop it", describe_holder(holder), class.name())]
    Busy {
        /// What it changes.
        class: ResourceClass,
        /// The process.
        holder: LockHolder,
    },
    /// The lock cannot be taken.
    #[error("cannot use {path} (run as root to create it, or pass --state DIR)")]
    StateDirectoryUnusable {
        /// The path.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// Other users could change the journal.
    #[error("{0} is writable by other users and could be tampered with: use a directory that only you can write")]
    DirectoryWritableByOthers(PathBuf),
    /// The journal cannot be read or written.
    #[error(transparent)]
    Journal(#[from] journal::Error),
    /// The state of the host cannot be read: to record it for the undo of a change, or to measure the effect of one.
    #[error("cannot read the state of the host: no further change is made, and temporary changes are undone")]
    HostStateUnreadable(#[source] Absent),
    /// A setting cannot be read, so a change could not be undone.
    #[error("cannot read {knob}{}", unreadable_hint(.knob, .source))]
    SettingUnreadable {
        /// The setting.
        knob: Knob,
        /// The reason.
        source: Absent,
    },
    /// The action needs the lock of another class of resources.
    #[error("the lock of {} does not permit a change of {}", .session.name(), .action.name())]
    ClassNotLocked {
        /// The class that the action needs.
        action: ResourceClass,
        /// The class of the session.
        session: ResourceClass,
    },
    /// The change was refused.
    #[error(transparent)]
    Refused(#[from] ActionError),
    /// Another program has written a setting since.
    #[error("another program changed {knob}: this session wrote {wrote}, and it is {found} now")]
    SettingOverwritten {
        /// The setting.
        knob: Knob,
        /// The value that this session wrote.
        wrote: String,
        /// The present value.
        found: String,
    },
    /// An error occurred, and some earlier changes could not be undone.
    #[error("some changes could not be undone ({})", join_failed_undos(.failed_undos))]
    UndoFailed {
        /// The undo actions that failed.
        failed_undos: Vec<FailedUndo>,
        /// The first error, or the error of the undo.
        source: Box<Error>,
    },
}

fn join_failed_undos(failed: &[FailedUndo]) -> String {
    failed.iter().map(FailedUndo::to_string).collect::<Vec<_>>().join("; ")
}

/// An error with its causes.
pub fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

fn describe_holder(LockHolder { pid, state_directory: state }: &LockHolder) -> String {
    match (pid, state) {
        (Some(pid), Some(state)) => format!(" (process {pid}, state directory {})", state.display()),
        (Some(pid), None) => format!(" (process {pid})"),
        (None, _) => " (not visible here: in another container or on the container host)".to_owned(),
    }
}

/// The remedy for a setting that cannot be read.
fn unreadable_hint(knob: &Knob, why: &Absent) -> String {
    match why {
        Absent::NotOnThisKernel => format!(" ({})", knob.requirement()),
        Absent::Denied => " (run as root)".to_owned(),
        _ => String::new(),
    }
}
