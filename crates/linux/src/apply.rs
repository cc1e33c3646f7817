//! Carrying out actions on this machine.

use crate::LiveHost;
use pagefold_host::act::{Action, Effect, Refusal};
use pagefold_model::ksm::Setting;
use std::fs;
use std::io::{self, Write};

/// Carry out one action.
pub fn apply(_host: &LiveHost, action: &Action) -> Result<Effect, Refusal> {
    match action {
        Action::Set { setting, value } => set(*setting, value).map(|()| Effect::default()),
        Action::Advise { .. } | Action::MergeAny { .. } | Action::GuestMerge { .. } | Action::Collapse { .. } => {
            Err(Refusal::Unsupported("not on this machine".to_owned()))
        }
    }
}

/// Write a file of `/sys/kernel/mm/ksm`.
fn set(setting: Setting, value: &str) -> Result<(), Refusal> {
    let path = format!("/sys/kernel/mm/ksm/{}", setting.file());
    // Without O_CREAT, which sysfs answers with EACCES where there is no such file.
    let write = || fs::OpenOptions::new().write(true).open(&path)?.write_all(value.as_bytes());
    write().map_err(|error| {
        let said = format!("writing {value} to {path}: {error}");
        match error.kind() {
            io::ErrorKind::NotFound => Refusal::Unsupported(format!("this kernel has no {path}")),
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Refusal::Denied(said),
            io::ErrorKind::ResourceBusy => Refusal::Busy(said),
            _ => Refusal::Failed(said),
        }
    })
}
