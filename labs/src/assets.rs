//! What a fleet of virtual machines needs on this machine, and who puts it there: `labs/setup.sh`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use thiserror::Error;

/// The program that runs a guest.
pub const QEMU: &str = "qemu-system-x86_64";

/// The files of a guest.
#[derive(Clone, Debug)]
pub struct Assets {
    /// The kernel.
    pub kernel: PathBuf,
    /// The initial memory file system: all that the guest has.
    pub initramfs: PathBuf,
}

/// Something is not there. Both say what to do.
#[derive(Debug, Error)]
pub enum Missing {
    /// A file.
    #[error("{0} is not there: run labs/setup.sh")]
    File(PathBuf),
    /// QEMU.
    #[error("{QEMU} cannot be run: run labs/setup.sh as root, or install qemu-system-x86")]
    Qemu(#[source] std::io::Error),
}

impl Assets {
    /// Where `labs/setup.sh` puts them in this source tree.
    #[must_use]
    pub fn directory() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name(".cache").join("fleet")
    }

    /// Those in `directory`, when they and QEMU are there.
    ///
    /// # Errors
    /// [`Missing`] for the first that is not.
    pub fn find(directory: &Path) -> Result<Self, Missing> {
        let file = |name| {
            let path = directory.join(name);
            if path.is_file() { Ok(path) } else { Err(Missing::File(path)) }
        };
        let assets = Self { kernel: file("vmlinuz")?, initramfs: file("initramfs.cpio")? };
        Command::new(QEMU).arg("--version").stdout(Stdio::null()).status().map_err(Missing::Qemu)?;
        Ok(assets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_without_them_is_told_with_the_remedy() {
        let directory = tempfile::tempdir().unwrap();
        let missing = Assets::find(directory.path()).unwrap_err().to_string();
        assert!(missing.contains("vmlinuz is not there: run labs/setup.sh"), "{missing}");
        std::fs::write(directory.path().join("vmlinuz"), "").unwrap();
        let missing = Assets::find(directory.path()).unwrap_err().to_string();
        assert!(missing.contains("initramfs.cpio"), "{missing}");
    }
}
