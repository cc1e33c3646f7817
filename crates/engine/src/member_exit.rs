//! How a domain's directory goes away with its last members.
//!
//! Ranks of a job end at the same moment. Each of them still refers to what it maps when it looks for others, since its
//! references have to hold until the kernel has taken its memory away ([`crate::slot_references`]). So a member that is about
//! to end leaves a file beside its references, and the one that finds such a file of each member removes the directory.
//!
//! Members that are killed leave none. [`remove_dead_domains`] removes what they leave, once all are gone.

use crate::slot_references::{REFERENCES_PREFIX, has_live_process};
use crate::{domain, domain_directory};
use std::collections::HashSet;
use std::io;
use std::path::Path;

/// What precedes the name of a member's references in that of its file.
pub const EXIT_MARKER_PREFIX: &str = "ending-";

/// The member that has its references in a file is about to end: whether that holds for all members of the domain now.
/// Under the domain's lock.
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
    let is_left = |name: &&str| name.strip_prefix(EXIT_MARKER_PREFIX).is_some_and(|member| !names.contains(member));
    for name in names.iter().filter(|name| is_left(name)) {
        // One that cannot be removed now is found again.
        let _ = std::fs::remove_file(directory.join(name));
    }
    are_all_exiting(&names, |name| has_live_process(&directory.join(name)))
}

/// Whether all members among the names of files are about to end, or have ended. Asks for no member that has said so, and
/// for none after one that is still there: all ranks of a job ask this at the same time, under one lock.
fn are_all_exiting(names: &HashSet<&str>, mut is_held: impl FnMut(&str) -> io::Result<bool>) -> io::Result<bool> {
    let members = names.iter().filter(|name| name.starts_with(REFERENCES_PREFIX));
    for name in members.filter(|name| !names.contains(format!("{EXIT_MARKER_PREFIX}{name}").as_str())) {
        if is_held(name)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Remove the domains of this user whose members have all ended, or were killed: for whoever outlives members, as the
/// launcher of an MPI job does.
pub fn remove_dead_domains() {
    domain::remove_dead_domains(&domain_directory::default_root());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slot_references::SlotReferences;

    #[test]
    fn members_are_checked_until_one_is_alive() {
        let check = |members: u32, ending: u32, expected: (bool, u32)| {
            let member = |prefix: &str, number: u32| format!("{prefix}{REFERENCES_PREFIX}{number}");
            let mut names: Vec<String> = (0..members).map(|number| member("", number)).collect();
            names.extend((0..ending).map(|number| member(EXIT_MARKER_PREFIX, number)));
            let mut asked = 0;
            let all = are_all_exiting(&names.iter().map(String::as_str).collect(), |_| {
                asked += 1;
                Ok(true)
            });
            assert_eq!((all.unwrap(), asked), expected, "{ending} of {members}");
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
        assert!(!mark_exit_and_check_all(path, first.path()).unwrap(), "two are there");
        assert!(!mark_exit_and_check_all(path, second.path()).unwrap(), "one is there");
        drop(killed);
        assert!(mark_exit_and_check_all(path, second.path()).unwrap(), "all have said so, or hold nothing");
        let third = member();
        assert!(!mark_exit_and_check_all(path, second.path()).unwrap(), "another one has come");
        std::fs::remove_file(first.path()).unwrap();
        assert!(mark_exit_and_check_all(path, third.path()).unwrap());
        let left = domain_directory::list_names(path).unwrap();
        let endings =
            left.iter().filter(|name| name.to_str().is_some_and(|name| name.starts_with(EXIT_MARKER_PREFIX))).count();
        assert_eq!(endings, 2, "of those whose references are there: {left:?}");
    }
}
