//! A file with which a daemon passes state on to the next one of the same boot.
//!
//! It is in the state directory and is replaced atomically. It holds the time when it was saved, so that its reader
//! knows how long no daemon ran.

use pagefold_host::transaction::journal::StateDirectory;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// The file, and the boot that it is valid for.
#[derive(Debug)]
pub(super) struct SavedFile {
    directory: StateDirectory,
    name: &'static str,
    boot: String,
}

#[derive(Serialize, Deserialize)]
struct Header {
    /// Id of the boot.
    boot: String,
    /// Unix time.
    saved_at: f64,
}

#[derive(Serialize)]
struct Saved<'c, T> {
    #[serde(flatten)]
    header: Header,
    content: &'c T,
}

#[derive(Deserialize)]
struct Loaded<T> {
    content: T,
}

impl SavedFile {
    /// A file in the state directory.
    ///
    /// # Errors
    /// If the directory cannot be opened, or other users may write to it.
    pub fn new(directory: &Path, name: &'static str, boot: String) -> io::Result<Self> {
        let directory = StateDirectory::open(directory)?;
        if !directory.is_private()? {
            return Err(io::Error::other("other users may write to it"));
        }
        Ok(Self { directory, name, boot })
    }

    /// The content and how long ago it was saved; `None` if there is no file of this boot.
    ///
    /// # Errors
    /// If the file cannot be read, or has another form.
    pub fn load<T: DeserializeOwned>(&self, now: SystemTime) -> io::Result<Option<(T, Duration)>> {
        let bytes = match self.directory.read(self.name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            bytes => bytes?,
        };
        let header: Header = serde_json::from_slice(&bytes)?;
        if header.boot != self.boot {
            return Ok(None);
        }
        let Loaded { content } = serde_json::from_slice(&bytes)?;
        // The clock may have been set back.
        let elapsed = Duration::try_from_secs_f64(unix_seconds(now) - header.saved_at).unwrap_or_default();
        Ok(Some((content, elapsed)))
    }

    /// Replace the content.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, content: &impl Serialize, now: SystemTime) -> io::Result<()> {
        let header = Header { boot: self.boot.clone(), saved_at: unix_seconds(now) };
        self.directory.replace(self.name, &serde_json::to_vec(&Saved { header, content })?)
    }
}

fn unix_seconds(time: SystemTime) -> f64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn content_is_loaded_with_its_age_under_the_same_boot() {
        let directory = tempfile::tempdir().unwrap();
        let file = |boot: &str| SavedFile::new(directory.path(), "saved.json", boot.to_owned()).unwrap();
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        assert_eq!(file("one").load::<Vec<u32>>(at(0)).unwrap(), None);
        file("one").save(&vec![1, 2], at(1000)).unwrap();
        assert_eq!(file("one").load(at(1060)).unwrap(), Some((vec![1, 2], Duration::from_secs(60))));
        assert_eq!(file("one").load(at(900)).unwrap(), Some((vec![1, 2], Duration::ZERO)), "the clock was set back");
        assert_eq!(file("two").load::<Vec<u32>>(at(1060)).unwrap(), None);
        file("two").save(&"of another version", at(1000)).unwrap();
        assert_eq!(file("one").load::<Vec<u32>>(at(1060)).unwrap(), None, "whatever another boot has saved");
        assert!(file("two").load::<Vec<u32>>(at(1060)).is_err());
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(SavedFile::new(directory.path(), "saved.json", "one".to_owned()).is_err());
    }
}
