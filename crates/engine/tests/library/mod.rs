//! The shared library of this build.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The folder in which cargo has left it.
pub fn build_directory() -> PathBuf {
    let tests = std::env::current_exe().expect("a test is a program");
    tests.parent().map(Path::to_owned).expect("target/PROFILE/deps")
}

/// A directory for domains and for the library, by the names that programs ask for.
pub fn library_and_domains_root() -> TempDir {
    let root = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    for name in ["libpagefold.so", "libpagefold.so.0"] {
        symlink(build_directory().join("libpagefold_engine.so"), root.path().join(name)).expect("a link");
    }
    root
}
