//! How a domain's directory goes away with its last members.
//!
//! Ranks of a job end at the same moment. Each of them still refers to what it maps when it looks for others, since its
//! references have to hold until the kernel has taken its memory away ([`crate::references`]). So a member that is about
//! to end leaves a file beside its references, and the one that finds such a file of each member removes the directory.
//!
//! Members that are killed leave none. [`sweep_domains`] removes what they leave, once all are gone.

use crate::references::{PREFIX, is_held};
use crate::{directory, domain};
use std::io;
use std::path::Path;

/// What precedes the name of a member's references in that of its file.
const ENDING: &str = "ending-";

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
    let mut all = true;
    for name in directory::names(directory)? {
        let Some(name) = name.to_str() else { continue };
        if name.starts_with(PREFIX) {
            all &= marker(name).exists() || !is_held(&directory.join(name))?;
        } else if let Some(member) = name.strip_prefix(ENDING)
            && !directory.join(member).exists()
        {
            // One that cannot be removed now is found again.
            let _ = std::fs::remove_file(directory.join(name));
        }
    }
    Ok(all)
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
