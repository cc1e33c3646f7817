//! How a domain's directory goes away with its last members.
//!
//! Ranks of a job end at the same moment. Each of them still refers to what it maps when it looks for others, since its
//! references have to hold until the kernel has taken its memory away ([`crate::references`]). So a member that is about
//! to end leaves a file beside its references, and the one that finds such a file of each member removes the directory.
//!
//! Members that are killed leave none. [`sweep_domains`] removes what they leave, once all are gone.

use crate::references::{PREFIX, is_held};
use crate::{directory, domain};
use std::collections::HashSet;
use std::io;
use std::path::Path;

/// What precedes the name of a member's references in that of its file.
pub const ENDING: &str = "ending-";

/// The member that has its references in a file is about to end: whether that holds for all members of the domain now.
/// Under the domain's lock.
///
/// # Errors
/// Those of reading the directory, and of open(2) and flock(2).
pub fn all_end(directory: &Path, references: &Path) -> io::Result<bool> {
    let marker = |name: &str| directory.join(format!("{ENDING}{name}"));
    if let Some(name) = references.file_name().and_then(|name| name.to_str()) {
        directory::open(&marker(name), true)?;
    }
    let names = directory::names(directory)?;
    let names: HashSet<&str> = names.iter().filter_map(|name| name.to_str()).collect();
    let is_left = |name: &&str| name.strip_prefix(ENDING).is_some_and(|member| !names.contains(member));
    for name in names.iter().filter(|name| is_left(name)) {
        // One that cannot be removed now is found again.
        let _ = std::fs::remove_file(directory.join(name));
    }
    all_end_among(&names, |name| is_held(&directory.join(name)))
}

/// Whether all members among the names of files are about to end, or have ended. Asks for no member that has said so, and
/// for none after one that is still there: all ranks of a job ask this at the same time, under one lock.
fn all_end_among(names: &HashSet<&str>, mut is_held: impl FnMut(&str) -> io::Result<bool>) -> io::Result<bool> {
    let members = names.iter().filter(|name| name.starts_with(PREFIX));
    for name in members.filter(|name| !names.contains(format!("{ENDING}{name}").as_str())) {
        if is_held(name)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Remove the domains of this user whose members have all ended, or were killed: for whoever outlives members, as the
/// launcher of an MPI job does.
pub fn sweep_domains() {
    domain::sweep(&directory::root());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::references::References;

    #[test]
    fn members_are_asked_for_until_one_is_still_there() {
        let check = |members: u32, ending: u32, expected: (bool, u32)| {
            let member = |prefix: &str, number: u32| format!("{prefix}{PREFIX}{number}");
            let mut names: Vec<String> = (0..members).map(|number| member("", number)).collect();
            names.extend((0..ending).map(|number| member(ENDING, number)));
            let mut asked = 0;
            let all = all_end_among(&names.iter().map(String::as_str).collect(), |_| {
                asked += 1;
                Ok(true)
            });
            assert_eq!((all.unwrap(), asked), expected, "{ending} of {members}");
        };
        check(100, 1, (false, 1));
        check(100, 99, (false, 1));
        check(100, 100, (true, 0));
        let names = ["member-1", "member-2"].into();
        assert!(all_end_among(&names, |_| Ok(false)).unwrap(), "both were killed");
    }

    #[test]
    fn the_last_member_that_ends_knows_it() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path();
        let member = || References::new(path, 64, 1, 3).unwrap();
        let (first, second, killed) = (member(), member(), member());
        assert!(!all_end(path, first.path()).unwrap(), "two are there");
        assert!(!all_end(path, second.path()).unwrap(), "one is there");
        drop(killed);
        assert!(all_end(path, second.path()).unwrap(), "all have said so, or hold nothing");
        let third = member();
        assert!(!all_end(path, second.path()).unwrap(), "another one has come");
        std::fs::remove_file(first.path()).unwrap();
        assert!(all_end(path, third.path()).unwrap());
        let left = directory::names(path).unwrap();
        let endings = left.iter().filter(|name| name.to_str().is_some_and(|name| name.starts_with(ENDING))).count();
        assert_eq!(endings, 2, "of those whose references are there: {left:?}");
    }
}
