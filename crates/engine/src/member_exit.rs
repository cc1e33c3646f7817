//! Removal of a domain's directory when its last members exit.
//!
//! Ranks of a job end at the same time. Each of them still holds references when it checks for other members, since its
//! references must last until the kernel has freed its memory ([`crate::slot_references`]). So a member that is about
//! to exit creates a marker file beside its references. The member that finds such a file for each member removes the
//! directory.
//!
//! Killed members leave no marker. [`remove_dead_domains`] removes their files once all members are gone.

use crate::slot_references::{REFERENCES_PREFIX, has_live_process};
use crate::{domain, domain_directory};
use std::collections::HashSet;
use std::io;
use std::path::Path;

/// Prefix of the name of a marker file; the name of the member's references file follows.
pub const EXIT_MARKER_PREFIX: &str = "exiting-";

/// Mark the member with this references file as about to exit. Returns whether all members of the domain now are.
/// Requires the domain's lock.
///
/// # Errors
/// Those of reading the directory, and of open(2) and flock(2).
pub fn mark_exit_and_check_all(directory: &Path, references: &Path) -> io::Result<bool> {
    let marker = |name: &str| directory.join(format!("{EXIT_MARKER_PREFIX}{name}"));
    if let Some(name) = references.file_name().and_then(|name| name.to_str()) {
        domain_directory::open_file(&marker(name), true)?;
    }
    let names = domain_directory::list_names(directory)?;
    let names: HashSet<&str> = names.iter().filter_map(|name| name.to_str()).collect();
    let is_stale = |name: &&str| name.strip_prefix(EXIT_MARKER_PREFIX).is_some_and(|member| !names.contains(member));
    for name in names.iter().filter(|name| is_stale(name)) {
        // A file that cannot be removed now is found again later.
        let _ = std::fs::remove_file(directory.join(name));
    }
    are_all_exiting(&names, |name| has_live_process(&directory.join(name)))
}

/// Whether all members among these file names are about to exit, or have ended. Checks no member that has a marker, and
/// stops at the first live one: all ranks of a job call this at the same time, under one lock.
fn are_all_exiting(names: &HashSet<&str>, mut is_alive: impl FnMut(&str) -> io::Result<bool>) -> io::Result<bool> {
    let members = names.iter().filter(|name| name.starts_with(REFERENCES_PREFIX));
    for name in members.filter(|name| !names.contains(format!("{EXIT_MARKER_PREFIX}{name}").as_str())) {
        if is_alive(name)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Remove the domains of this user whose members have all ended or were killed. For processes that outlive members,
/// such as the launcher of an MPI job.
pub fn remove_dead_domains() {
    domain::remove_dead_domains(&domain_directory::default_root());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slot_references::SlotReferences;

    #[test]
    fn members_are_checked_until_one_is_alive() {
        let check = |members: u32, exiting: u32, expected: (bool, u32)| {
            let member = |prefix: &str, number: u32| format!("{prefix}{REFERENCES_PREFIX}{number}");
            let mut names: Vec<String> = (0..members).map(|number| member("", number)).collect();
            names.extend((0..exiting).map(|number| member(EXIT_MARKER_PREFIX, number)));
            let mut checked = 0;
            let result = are_all_exiting(&names.iter().map(String::as_str).collect(), |_| {
                checked += 1;
                Ok(true)
            });
            assert_eq!((result.unwrap(), checked), expected, "{exiting} of {members}");
        };
        check(100, 1, (false, 1));
        check(100, 99, (false, 1));
        check(100, 100, (true, 0));
        let names = ["member-1", "member-2"].into();
        assert!(are_all_exiting(&names, |_| Ok(false)).unwrap(), "both were killed");
    }

    #[test]
    fn last_exiting_member_detects_it_is_last() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path();
        let member = || SlotReferences::new(path, 64, 1, 3).unwrap();
        let (first, second, killed) = (member(), member(), member());
        assert!(!mark_exit_and_check_all(path, first.path()).unwrap(), "two members have no marker");
        assert!(!mark_exit_and_check_all(path, second.path()).unwrap(), "one member has no marker");
        drop(killed);
        assert!(mark_exit_and_check_all(path, second.path()).unwrap(), "all members have a marker or are dead");
        let third = member();
        assert!(!mark_exit_and_check_all(path, second.path()).unwrap(), "a new member has joined");
        std::fs::remove_file(first.path()).unwrap();
        assert!(mark_exit_and_check_all(path, third.path()).unwrap());
        let remaining = domain_directory::list_names(path).unwrap();
        let markers = remaining
            .iter()
            .filter(|name| name.to_str().is_some_and(|name| name.starts_with(EXIT_MARKER_PREFIX)))
            .count();
        assert_eq!(markers, 2, "only markers of members with a references file stay: {remaining:?}");
    }
}
