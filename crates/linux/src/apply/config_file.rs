//! Replaces configuration files as a whole.
//!
//! The new content is written to a temporary file beside the old one, whose name no program reads, and both are
//! exchanged in one step (renameat2(2)). If the content that came out is not the expected one, another program wrote
//! the file meanwhile, and both are exchanged back. A temporary file that a kill left behind is removed by the next
//! replacement of the same file, which `pagefold recover` performs.

use pagefold_host::action::{ActionError, ActionOutcome, Exchange};
use pagefold_host::config_file::{ConfigContent, ConfigFile};
use pagefold_sys::fault;
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, ResolveFlags, Stat, fchmod, fchown, fstat, fsync, openat,
    openat2, renameat_with, unlinkat,
};
use rustix::io::Errno;
use rustix::process::{Gid, Uid};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;

/// The largest file that is read, and thus replaced: such files have a few lines.
const MAX_BYTES: u64 = 1 << 20;

/// The mode of a new file: readable by all, as the packages install theirs.
const NEW_FILE_MODE: Mode = Mode::from_raw_mode(0o644);

/// Replace, create or remove a file.
pub fn replace_file(file: &ConfigFile, content: &Exchange<ConfigContent>) -> Result<ActionOutcome, ActionError> {
    let target = Target { directory: open_directory(file)?, file };
    target.remove_temporary()?;
    let current = target.read(file.name())?;
    let (text, status) = current.map_or((None, None), |(text, status)| (Some(text), Some(status)));
    let must_write = content.must_write(&ConfigContent(text), file)?;
    if must_write {
        fault::point("before replacing a file");
        match &content.to.0 {
            Some(text) => target.put(text, status.as_ref(), &content.from)?,
            None => target.remove(&content.from)?,
        }
        fsync(&target.directory).map_err(|errno| target.error("cannot store", errno))?;
        fault::point("after replacing a file");
    }
    Ok(ActionOutcome { unchanged: !must_write, ..ActionOutcome::default() })
}

/// Open the directory of a file. No component of its path may be a symbolic link.
fn open_directory(file: &ConfigFile) -> Result<OwnedFd, ActionError> {
    let path = format!("/{}", file.directory());
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = match openat2(CWD, &path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS) {
        // Linux before 5.6, or a seccomp filter that does not know the call.
        Err(Errno::NOSYS | Errno::PERM) => openat(CWD, &path, flags, Mode::empty()),
        opened => opened,
    };
    opened.map_err(|errno| match errno {
        Errno::NOENT => ActionError::Unsupported(format!("there is no directory {path}: create it first")),
        Errno::LOOP | Errno::NOTDIR => {
            ActionError::Unsupported(format!("{path} is a symbolic link: it is not followed"))
        }
        errno => errno_error(format!("cannot open the directory {path}"), errno),
    })
}

/// A file in its open directory.
struct Target<'a> {
    directory: OwnedFd,
    file: &'a ConfigFile,
}

impl Target<'_> {
    /// The name of the temporary file: programs read names that end in `.conf` only.
    fn temporary_name(&self) -> String {
        format!(".{}.pagefold-new", self.file.name())
    }

    fn error(&self, what: &str, errno: Errno) -> ActionError {
        errno_error(format!("{what} {}", self.file), errno)
    }

    fn remove_temporary(&self) -> Result<(), ActionError> {
        match unlinkat(&self.directory, self.temporary_name(), AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(self.error("cannot remove the temporary copy of", errno)),
        }
    }

    /// The text and the status of a file in the directory, if there is one.
    fn read(&self, name: &str) -> Result<Option<(String, Stat)>, ActionError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened: File = match openat(&self.directory, name, flags, Mode::empty()) {
            Ok(opened) => opened.into(),
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::LOOP) => {
                return Err(ActionError::Unsupported(format!("{} is a symbolic link: it is not followed", self.file)));
            }
            Err(errno) => return Err(self.error("cannot read", errno)),
        };
        let status = fstat(&opened).map_err(|errno| self.error("cannot read", errno))?;
        if !FileType::from_raw_mode(status.st_mode).is_file() {
            return Err(ActionError::Unsupported(format!("{} is not a regular file", self.file)));
        }
        let mut bytes = Vec::new();
        let read = opened.take(MAX_BYTES + 1).read_to_end(&mut bytes);
        read.map_err(|error| ActionError::Failed(format!("cannot read {}: {error}", self.file)))?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(ActionError::Unsupported(format!("{} is larger than {MAX_BYTES} bytes", self.file)));
        }
        let text = String::from_utf8(bytes)
            .map_err(|_| ActionError::Unsupported(format!("{} is not UTF-8 text", self.file)))?;
        Ok(Some((text, status)))
    }

    /// Write the text with the owner and the mode of the old file, and put it in place.
    fn put(&self, text: &str, old: Option<&Stat>, expected: &ConfigContent) -> Result<(), ActionError> {
        let temporary = self.temporary_name();
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let write_error = |errno| self.error("cannot write a copy of", errno);
        let mut file: File =
            openat(&self.directory, &*temporary, flags, Mode::RUSR | Mode::WUSR).map_err(write_error)?.into();
        let written = file.write_all(text.as_bytes());
        written.map_err(|error| ActionError::Failed(format!("cannot write a copy of {}: {error}", self.file)))?;
        if let Some(old) = old {
            let owner = (Uid::from_raw(old.st_uid), Gid::from_raw(old.st_gid));
            fchown(&file, Some(owner.0), Some(owner.1)).map_err(write_error)?;
        }
        let mode = old.map_or(NEW_FILE_MODE, |old| Mode::from_raw_mode(old.st_mode & 0o7777));
        fchmod(&file, mode).and_then(|()| fsync(&file)).map_err(write_error)?;
        fault::point("between writing a file and putting it in place");
        match old {
            None => self.rename(&temporary, self.file.name(), RenameFlags::NOREPLACE),
            Some(_) => {
                self.rename(&temporary, self.file.name(), RenameFlags::EXCHANGE)?;
                self.check_replaced(expected, RenameFlags::EXCHANGE)?;
                self.remove_temporary()
            }
        }
    }

    fn remove(&self, expected: &ConfigContent) -> Result<(), ActionError> {
        self.rename(self.file.name(), &self.temporary_name(), RenameFlags::NOREPLACE)?;
        self.check_replaced(expected, RenameFlags::NOREPLACE)?;
        self.remove_temporary()
    }

    /// Check that the file that was in place has the expected content; otherwise put it back.
    fn check_replaced(&self, expected: &ConfigContent, back: RenameFlags) -> Result<(), ActionError> {
        let temporary = self.temporary_name();
        let replaced = self.read(&temporary).map(|read| ConfigContent(read.map(|(text, _)| text)));
        if replaced.as_ref() == Ok(expected) {
            return Ok(());
        }
        self.rename(&temporary, self.file.name(), back)?;
        self.remove_temporary()?;
        Err(ActionError::ChangedByOthers(format!("{} changed during its replacement", self.file)))
    }

    fn rename(&self, from: &str, to: &str, flags: RenameFlags) -> Result<(), ActionError> {
        renameat_with(&self.directory, from, &self.directory, to, flags).map_err(|errno| match errno {
            Errno::EXIST | Errno::NOENT => {
                ActionError::ChangedByOthers(format!("{} appeared or vanished meanwhile", self.file))
            }
            errno => self.error("cannot replace", errno),
        })
    }
}

fn errno_error(what: String, errno: Errno) -> ActionError {
    let message = format!("{what}: {errno}");
    match errno {
        Errno::ACCESS | Errno::PERM | Errno::ROFS => ActionError::Denied(message),
        _ => ActionError::Failed(message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    fn content(text: Option<&str>) -> ConfigContent {
        ConfigContent(text.map(str::to_owned))
    }

    /// The file of a test, removed at its end.
    struct TestFile(ConfigFile);

    impl TestFile {
        /// `None`, with a message, if this process may not write there.
        fn create(name: &str) -> Option<Self> {
            let file = ConfigFile::from_path(&format!("etc/sysctl.d/pagefold-test-{name}.conf")).unwrap();
            if !rustix::process::geteuid().is_root() || !fs::exists("/etc/sysctl.d").unwrap() {
                println!("skipped: needs root and /etc/sysctl.d");
                return None;
            }
            let _ = fs::remove_file(file.to_string());
            Some(Self(file))
        }

        fn replace(&self, from: Option<&str>, to: Option<&str>) -> Result<bool, ActionError> {
            let exchange = Exchange { from: content(from), to: content(to) };
            replace_file(&self.0, &exchange).map(|outcome| !outcome.unchanged)
        }

        fn text(&self) -> Option<String> {
            fs::read_to_string(self.0.to_string()).ok()
        }
    }

    impl Drop for TestFile {
        fn drop(&mut self) {
            let _ = fs::remove_file(self.0.to_string());
        }
    }

    #[test]
    fn file_is_created_replaced_and_removed_with_its_owner_and_mode() {
        let Some(test) = TestFile::create("exchange") else { return };
        assert_eq!(test.replace(None, Some("# a\n")), Ok(true));
        assert_eq!(fs::metadata(test.0.to_string()).unwrap().permissions().mode() & 0o777, 0o644);
        fs::set_permissions(test.0.to_string(), fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::chown(test.0.to_string(), Some(1), Some(2)).unwrap();
        assert_eq!(test.replace(Some("# a\n"), Some("# b\n")), Ok(true));
        let metadata = fs::metadata(test.0.to_string()).unwrap();
        assert_eq!((metadata.mode() & 0o777, metadata.uid(), metadata.gid()), (0o600, 1, 2));
        assert_eq!(test.replace(Some("# a\n"), Some("# b\n")), Ok(false), "it is so already");
        assert_eq!(test.replace(Some("# b\n"), None), Ok(true));
        assert_eq!((test.text(), test.replace(Some("# b\n"), None)), (None, Ok(false)));
        let left =
            fs::read_dir("/etc/sysctl.d").unwrap().filter_map(|entry| entry.unwrap().file_name().into_string().ok());
        assert!(left.into_iter().all(|name| !name.contains("pagefold-test-exchange")));
    }

    #[test]
    fn content_of_another_program_and_links_stay() {
        let Some(test) = TestFile::create("refused") else { return };
        fs::write(test.0.to_string(), "# other\n").unwrap();
        for (from, to) in [(None, Some("# a\n")), (Some("# b\n"), Some("# a\n")), (Some("# b\n"), None)] {
            assert!(matches!(test.replace(from, to), Err(ActionError::ChangedByOthers(_))), "{from:?} {to:?}");
        }
        assert_eq!(test.text().as_deref(), Some("# other\n"));
        fs::remove_file(test.0.to_string()).unwrap();
        let target = tempfile::NamedTempFile::new().unwrap();
        symlink(target.path(), test.0.to_string()).unwrap();
        for (from, to) in [(None, Some("# a\n")), (Some(""), Some("# a\n")), (Some(""), None)] {
            assert!(matches!(test.replace(from, to), Err(ActionError::Unsupported(_))), "{from:?} {to:?}");
        }
        assert_eq!(fs::read(target.path()).unwrap(), b"");
        assert!(fs::symlink_metadata(test.0.to_string()).unwrap().is_symlink());
    }

    #[test]
    fn write_during_the_replacement_is_put_back() {
        let Some(test) = TestFile::create("race") else { return };
        fs::write(test.0.to_string(), "# other\n").unwrap();
        let target = Target { directory: open_directory(&test.0).unwrap(), file: &test.0 };
        let (_, status) = target.read(test.0.name()).unwrap().unwrap();
        // As if the file had been read as `# a` before the other program wrote it.
        let refused = target.put("# b\n", Some(&status), &content(Some("# a\n")));
        assert!(matches!(refused, Err(ActionError::ChangedByOthers(_))), "{refused:?}");
        assert_eq!(test.text().as_deref(), Some("# other\n"));
        assert!(matches!(target.remove(&content(Some("# a\n"))), Err(ActionError::ChangedByOthers(_))));
        assert!(matches!(target.put("# b\n", None, &content(None)), Err(ActionError::ChangedByOthers(_))));
        assert_eq!(test.text().as_deref(), Some("# other\n"));
        target.remove_temporary().unwrap();
    }
}
