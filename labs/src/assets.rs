//! The files and programs that a fleet of virtual machines needs on this machine; `labs/setup.sh` provides them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use thiserror::Error;

/// The program that runs a guest.
pub const QEMU_PROGRAM: &str = "qemu-system-x86_64";

/// The files of a guest.
#[derive(Clone, Debug)]
pub struct GuestAssets {
    /// The kernel.
    pub kernel: PathBuf,
    /// The initial memory file system, which is the guest's complete system.
    pub initramfs: PathBuf,
}

/// A missing asset. Both messages name the remedy.
#[derive(Debug, Error)]
pub enum MissingAsset {
    /// A file.
    #[error("{0} is missing: run labs/setup.sh")]
    File(PathBuf),
    /// QEMU.
    #[error("{QEMU_PROGRAM} cannot be run: run labs/setup.sh as root, or install qemu-system-x86")]
    Qemu(#[source] std::io::Error),
}

impl GuestAssets {
    /// The directory in this source tree that `labs/setup.sh` uses.
    #[must_use]
    pub fn default_directory() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name(".cache").join("fleet")
    }

    /// A kernel with features that the other one lacks, such as `PAGEMAP_SCAN`, in `directory`.
    ///
    /// # Errors
    /// If it is missing.
    pub fn find_recent_kernel(directory: &Path) -> Result<PathBuf, MissingAsset> {
        let path = directory.join("vmlinuz-recent");
        if path.is_file() { Ok(path) } else { Err(MissingAsset::File(path)) }
    }

    /// The assets in `directory`, if they and QEMU exist.
    ///
    /// # Errors
    /// [`MissingAsset`] for the first one that is missing.
    pub fn find(directory: &Path) -> Result<Self, MissingAsset> {
        let file = |name| {
            let path = directory.join(name);
            if path.is_file() { Ok(path) } else { Err(MissingAsset::File(path)) }
        };
        let assets = Self { kernel: file("vmlinuz")?, initramfs: file("initramfs.cpio")? };
        Command::new(QEMU_PROGRAM).arg("--version").stdout(Stdio::null()).status().map_err(MissingAsset::Qemu)?;
        Ok(assets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_assets_error_names_the_remedy() {
        let directory = tempfile::tempdir().unwrap();
        let missing = GuestAssets::find(directory.path()).unwrap_err().to_string();
        assert!(missing.contains("vmlinuz is missing: run labs/setup.sh"), "{missing}");
        std::fs::write(directory.path().join("vmlinuz"), "").unwrap();
        let missing = GuestAssets::find(directory.path()).unwrap_err().to_string();
        assert!(missing.contains("initramfs.cpio"), "{missing}");
    }
}
