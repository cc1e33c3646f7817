//! The directory of a domain, with the files that its members share. Only one user can enter it.

use rustix::fs::{Dir, Mode, OFlags, fstat, openat};
use std::ffi::{OsStr, OsString};
use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Environment variable with the directory of the domains.
pub const RUNTIME_DIRECTORY_VARIABLE: &str = "PAGEFOLD_RUNTIME";

/// Why there is no directory for a domain.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// The name is not a valid file name for a domain.
    #[error("{0:?} is not a valid domain name: letters, digits, '.', '_' and '-', not '.' first, at most 64")]
    InvalidName(String),
    /// The path is no directory, has another owner, or other users have too many rights.
    #[error("{0} is not a private directory of this user: remove it, or set PAGEFOLD_RUNTIME to one")]
    WritableByOthers(PathBuf),
    /// It cannot be created or used.
    #[error("cannot use {path}")]
    Io {
        /// Path of the directory.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
}

/// Directory of this user's domains: `$PAGEFOLD_RUNTIME`, else under `/dev/shm`, which is in memory.
pub fn default_root() -> PathBuf {
    let default_path = || Path::new("/dev/shm").join(format!("pagefold-{}", rustix::process::geteuid().as_raw()));
    std::env::var_os(RUNTIME_DIRECTORY_VARIABLE)
        .filter(|path| !path.is_empty())
        .map_or_else(default_path, PathBuf::from)
}

/// Whether a domain may have this name.
pub fn is_valid_domain_name(name: &str) -> bool {
    (1..=64).contains(&name.len()) && !name.starts_with('.') && name.chars().all(is_name_character)
}

/// Whether a domain name may contain this character.
fn is_name_character(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || "._-".contains(letter)
}

/// Environment variables that identify the MPI job of a rank: PMIx's namespace, Slurm's job number, and the job
/// identifier of PMI-2 launchers.
pub const JOB_ID_VARIABLES: [&str; 3] = ["PMIX_NAMESPACE", "SLURM_JOB_ID", "PMI_JOBID"];

/// Domain name for the MPI job of this process, from its launcher's job identifier ([`JOB_ID_VARIABLES`]). `None` if
/// the launcher sets none, as MPICH's own does.
pub fn job_domain_name() -> Option<String> {
    let job = JOB_ID_VARIABLES.iter().find_map(|name| std::env::var(name).ok().filter(|job| !job.is_empty()));
    job.map(|job| domain_name_for_job(&job))
}

/// Leaves room for a node suffix. Long names keep their end, where the number is that distinguishes jobs.
fn domain_name_for_job(job: &str) -> String {
    let letters: Vec<char> = job.chars().map(|letter| if is_name_character(letter) { letter } else { '-' }).collect();
    "mpi-".chars().chain(letters[letters.len().saturating_sub(50)..].iter().copied()).collect()
}

/// Directory of a domain under a root. Creates it if it does not exist.
///
/// # Errors
/// The name is invalid, other users could change the content, or those of mkdir(2).
pub fn prepare_domain_directory(root: &Path, name: &str) -> Result<PathBuf, DirectoryError> {
    if !is_valid_domain_name(name) {
        return Err(DirectoryError::InvalidName(name.to_owned()));
    }
    let path = root.join(name);
    // Other users must not be able to replace the domain's directory, or to enter it.
    for (path, forbidden) in [(root, 0o022), (&path, 0o077)] {
        let failed = |source| DirectoryError::Io { path: path.to_owned(), source };
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
            _ => {}
        }
        let metadata = path.symlink_metadata().map_err(failed)?;
        let is_private = metadata.is_dir()
            && metadata.uid() == rustix::process::geteuid().as_raw()
            && metadata.mode() & forbidden == 0;
        if !is_private {
            return Err(DirectoryError::WritableByOthers(path.to_owned()));
        }
    }
    Ok(path)
}

/// Open a directory that is not a symbolic link. `None` if it does not belong to `owner`, if other users have one of
/// the forbidden rights, or if it is no directory.
///
/// # Errors
/// Those of openat(2) and fstat(2).
pub fn open_private<P: rustix::path::Arg>(
    parent: impl AsFd,
    name: P,
    owner: u32,
    forbidden: u32,
) -> io::Result<Option<OwnedFd>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = match openat(parent, name, flags, Mode::empty()) {
        Err(rustix::io::Errno::LOOP | rustix::io::Errno::NOTDIR) => return Ok(None),
        directory => directory?,
    };
    let status = fstat(&directory)?;
    Ok((status.st_uid == owner && status.st_mode & forbidden == 0).then_some(directory))
}

/// Open a file for reading and writing, not through a symbolic link. A new file is accessible to this user only.
///
/// # Errors
/// Those of open(2).
pub fn open_file(path: &Path, create: bool) -> io::Result<File> {
    open_with_flags(path, if create { OFlags::CREATE } else { OFlags::empty() })
}

/// Create a file that does not exist yet, as [`open_file`] does.
///
/// # Errors
/// Those of open(2): `AlreadyExists` if it exists.
pub fn create_new_file(path: &Path) -> io::Result<File> {
    open_with_flags(path, OFlags::CREATE | OFlags::EXCL)
}

fn open_with_flags(path: &Path, extra_flags: OFlags) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | extra_flags;
    Ok(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?.into())
}

/// The names in a directory, without `.` and `..`. Fails if the directory is a symbolic link. Does not call opendir(3),
/// which allocates by the program's malloc(3): that may be waiting for this thread.
///
/// # Errors
/// Those of open(2) and getdents(2).
pub fn list_names(path: &Path) -> io::Result<Vec<OsString>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    names_in(rustix::fs::open(path, flags, Mode::empty())?)
}

/// Like [`list_names`], for an open directory.
///
/// # Errors
/// Those of openat(2) and getdents(2).
pub fn names_in(directory: impl AsFd) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name != "." && name != ".." {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

/// Remove a domain's directory, which contains only files.
///
/// # Errors
/// Those of reading it, of unlink(2) and of rmdir(2).
pub fn remove_directory(path: &Path) -> io::Result<()> {
    remove_files(path)?;
    std::fs::remove_dir(path)
}

/// Remove the files of a domain's directory. The lock goes last, so that no process joins in between.
///
/// # Errors
/// Those of reading it and of unlink(2).
pub fn remove_files(path: &Path) -> io::Result<()> {
    let mut names = list_names(path)?;
    names.sort_by_key(|name| name == "lock");
    for name in names {
        match std::fs::remove_file(path.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn domain_names_are_valid_file_names() {
        let root = tempfile::tempdir().unwrap();
        for name in ["job42", "a.b-c_d", "x"] {
            assert_eq!(prepare_domain_directory(root.path(), name).unwrap(), root.path().join(name));
        }
        let long = "x".repeat(65);
        for name in ["", ".", "..", "a/b", "/tmp", ".hidden", "ä", "a b", "a\0b", &long] {
            assert!(
                matches!(prepare_domain_directory(root.path(), name), Err(DirectoryError::InvalidName(_))),
                "{name:?}"
            );
        }
    }

    #[test]
    fn any_job_id_gives_a_valid_domain_name() {
        assert_eq!(domain_name_for_job("prterun-host-1234@1"), "mpi-prterun-host-1234-1");
        let long = domain_name_for_job(&"x/".repeat(99));
        assert!(is_valid_domain_name(&long) && is_valid_domain_name(&format!("{long}.node1023")));
        assert!(domain_name_for_job(&format!("{}-77@1", "node".repeat(20))).ends_with("nodenode-77-1"));
    }

    #[test]
    fn directory_writable_by_others_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let path = prepare_domain_directory(root.path(), "open").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(
            matches!(prepare_domain_directory(root.path(), "open"), Err(DirectoryError::WritableByOthers(exposed)) if exposed == path)
        );
        std::os::unix::fs::symlink(root.path(), root.path().join("link")).unwrap();
        assert!(matches!(prepare_domain_directory(root.path(), "link"), Err(DirectoryError::WritableByOthers(_))));
        fs::write(root.path().join("file"), "").unwrap();
        assert!(matches!(prepare_domain_directory(root.path(), "file"), Err(DirectoryError::WritableByOthers(_))));
    }
}
