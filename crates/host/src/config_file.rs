//! The configuration files that Pagefold writes: files in a short list of directories below `/etc`, which the system
//! reads when it loads a module, boots, or changes a profile. They outlive a reboot, and so does their undo: see
//! `docs/decisions/0043-undo-configuration-after-a-reboot.md`.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The directories, below the root. Each holds fragments that other packages and the operator write too, so that
/// Pagefold needs to change only files of its own name there.
const DIRECTORIES: [&str; 3] = ["etc/modprobe.d", "etc/sysctl.d", "etc/tmpfiles.d"];

/// The longest accepted file name in bytes. Replacing a file needs a longer temporary name (NAME_MAX is 255).
const MAX_NAME_BYTES: usize = 200;

/// The path of a configuration file that Pagefold may write.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ConfigFile {
    /// The position in the list of directories.
    directory: usize,
    name: String,
}

/// A path that is not a configuration file that Pagefold may write.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a .conf file of /etc/modprobe.d, /etc/sysctl.d or /etc/tmpfiles.d: Pagefold writes no other file"
)]
pub struct InvalidConfigFile(String);

impl ConfigFile {
    /// The file of a path below the root: `etc/modprobe.d/pagefold.conf`.
    ///
    /// # Errors
    /// If the directory is not one that Pagefold writes in, or the name is not that of a fragment.
    pub fn from_path(path: &str) -> Result<Self, InvalidConfigFile> {
        let invalid = || InvalidConfigFile(path.to_owned());
        let (folder, name) = path.rsplit_once('/').ok_or_else(invalid)?;
        let directory = DIRECTORIES.iter().position(|directory| *directory == folder).ok_or_else(invalid)?;
        let is_fragment = name.strip_suffix(".conf").is_some_and(|stem| !stem.is_empty())
            && name.len() <= MAX_NAME_BYTES
            && !name.starts_with('.')
            && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'));
        if is_fragment { Ok(Self { directory, name: name.to_owned() }) } else { Err(invalid()) }
    }

    /// Its directory below the root.
    pub fn directory(&self) -> &'static str {
        DIRECTORIES[self.directory]
    }

    /// Its name in the directory.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its path below the root.
    pub fn path(&self) -> String {
        format!("{}/{}", self.directory(), self.name)
    }
}

/// The absolute path.
impl fmt::Display for ConfigFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/{}/{}", self.directory(), self.name)
    }
}

impl TryFrom<String> for ConfigFile {
    type Error = InvalidConfigFile;

    fn try_from(path: String) -> Result<Self, InvalidConfigFile> {
        Self::from_path(&path)
    }
}

impl From<ConfigFile> for String {
    fn from(file: ConfigFile) -> Self {
        file.path()
    }
}

/// The content of a configuration file; `None` if there is no file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigContent(pub Option<String>);

/// A description for messages, without the text.
impl fmt::Display for ConfigContent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(text) => write!(f, "a file of {} bytes", text.len()),
            None => f.write_str("absent"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_fragments_of_the_listed_directories_are_accepted() {
        let file = ConfigFile::from_path("etc/modprobe.d/pagefold.conf").unwrap();
        assert_eq!((file.directory(), file.name()), ("etc/modprobe.d", "pagefold.conf"));
        assert_eq!(
            (file.path().as_str(), file.to_string().as_str()),
            ("etc/modprobe.d/pagefold.conf", "/etc/modprobe.d/pagefold.conf")
        );
        for path in [
            "",
            "pagefold.conf",
            "/etc/modprobe.d/pagefold.conf",
            "etc/modprobe.d/.conf",
            "etc/modprobe.d/.hidden.conf",
            "etc/modprobe.d/pagefold",
            "etc/modprobe.d/../passwd.conf",
            "etc/modprobe.d/a/b.conf",
            "etc/passwd",
            "etc/cron.d/a.conf",
            "etc/sysctl.d/a b.conf",
            "etc/sysctl.d/a\n.conf",
        ] {
            assert_eq!(ConfigFile::from_path(path), Err(InvalidConfigFile(path.to_owned())));
        }
        let long = format!("etc/sysctl.d/{}.conf", "a".repeat(MAX_NAME_BYTES));
        assert!(ConfigFile::from_path(&long).is_err());
    }
}
