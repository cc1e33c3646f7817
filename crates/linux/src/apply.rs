//! Carrying out actions on this machine.

use crate::LiveHost;
use pagefold_host::act::{Action, Effect, Refusal};
use pagefold_model::ksm::Setting;
use std::fs;
use std::io;

/// Carry out one action.
pub fn apply(_host: &LiveHost, action: &Action) -> Result<Effect, Refusal> {
    match action {
        Action::Set { setting, value } => set(*setting, value).map(|()| Effect::default()),
        Action::GuestMerge { process, socket, backend, on } => {
            Ok(crate::qmp::set_merge(socket, *process, backend, *on).map(|()| Effect::default())?)
        }
        Action::Advise { .. } | Action::MergeAny { .. } | Action::Collapse { .. } => {
            Err(Refusal::Unsupported("not on this machine".to_owned()))
        }
    }
}

/// Write a file of `/sys/kernel/mm/ksm`.
fn set(setting: Setting, value: &str) -> Result<(), Refusal> {
    let path = format!("/sys/kernel/mm/ksm/{}", setting.file());
    fs::write(&path, value).map_err(|error| {
        let said = format!("writing {value} to {path}: {error}");
        match error.kind() {
            io::ErrorKind::NotFound => Refusal::Unsupported(format!("this kernel has no {path}")),
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Refusal::Denied(said),
            io::ErrorKind::ResourceBusy => Refusal::Busy(said),
            _ => Refusal::Failed(said),
        }
    })
}
