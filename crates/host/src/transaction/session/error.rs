//! Why a session could not do something.

use super::FailedUndo;
use crate::LockHolder;
use crate::action::ActionError;
use crate::transaction::journal;
use pagefold_base::Absent;
use pagefold_base::ksm::Setting;
use std::io;
use std::path::PathBuf;

/// Why a session could not begin or a change could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another one is under way, perhaps with another state directory.
    #[error("another pagefold{} changes this host now: wait for it, or stop it", describe_holder(.0))]
    Busy(LockHolder),
    /// The lock cannot be had.
    #[error("cannot use {path} (as root it is made; elsewhere give --state DIR)")]
    StateDirectoryUnusable {
        /// Which path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Others could write what is to be put back.
    #[error(
        "{0} can be written by others: whoever can write the journal decides what is done; use a directory of yours"
    )]
    DirectoryWritableByOthers(PathBuf),
    /// The journal cannot be read or written.
    #[error(transparent)]
    Journal(#[from] journal::Error),
    /// What the host has now cannot be read, so it could not be put back.
    #[error("cannot tell what there is now, so it could not be put back")]
    HostStateUnreadable(#[source] Absent),
    /// A setting cannot be read, so it could not be put back.
    #[error("cannot read /sys/kernel/mm/ksm/{}{}", .setting.file_name(), unreadable_hint(.source))]
    SettingUnreadable {
        /// Which.
        setting: Setting,
        /// Why.
        source: Absent,
    },
    /// The change was refused.
    #[error(transparent)]
    Refused(#[from] ActionError),
    /// Somebody else has written a setting since.
    #[error("somebody else writes /sys/kernel/mm/ksm/{}: it was {wrote}, it is {found}", .setting.file_name())]
    SettingOverwritten {
        /// Which.
        setting: Setting,
        /// What this session had written.
        wrote: String,
        /// What is there.
        found: String,
    },
    /// Something failed, and not all that was changed before is put back.
    #[error("not all is put back ({})", join_failed_undos(.failed_undos))]
    UndoFailed {
        /// What is not.
        failed_undos: Vec<FailedUndo>,
        /// What had failed, or what failed in putting it back.
        source: Box<Error>,
    },
}

fn join_failed_undos(remains: &[FailedUndo]) -> String {
    remains.iter().map(FailedUndo::to_string).collect::<Vec<_>>().join("; ")
}

/// An error with what caused it.
pub fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

fn describe_holder(LockHolder { pid, state_directory: state }: &LockHolder) -> String {
    match (pid, state) {
        (Some(pid), Some(state)) => format!(" (process {pid}, state directory {})", state.display()),
        (Some(pid), None) => format!(" (process {pid})"),
        (None, _) => " that is not seen from here, in another container or on its host,".to_owned(),
    }
}

/// What to do about a setting that cannot be read.
fn unreadable_hint(why: &Absent) -> &'static str {
    match why {
        Absent::NotOnThisKernel => " (a kernel with CONFIG_KSM is needed, and for the advisor 6.8 or later)",
        Absent::Denied => " (run as root)",
        _ => "",
    }
}
