//! The shared library of this build.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The directory in which cargo leaves it.
pub fn build_directory() -> PathBuf {
    let tests = std::env::current_exe().expect("a test is a program");
    tests.parent().map(Path::to_owned).expect("target/PROFILE/deps")
}

/// A directory for domains and for the library, under the names that programs load.
pub fn library_and_domains_root() -> TempDir {
    let root = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    for name in ["libpagefold.so", "libpagefold.so.0"] {
        symlink(build_directory().join("libpagefold_engine.so"), root.path().join(name)).expect("a link");
    }
    root
}
