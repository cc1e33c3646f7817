//! The shared library of this build.

use std::os::unix::fs::symlink;
use tempfile::TempDir;

/// A directory for domains and for the library, by the names that programs ask for.
pub fn root() -> TempDir {
    let root = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    let tests = std::env::current_exe().expect("a test is a program");
    let built = tests.parent().expect("target/PROFILE/deps").join("libpagefold_engine.so");
    for name in ["libpagefold.so", "libpagefold.so.0"] {
        symlink(&built, root.path().join(name)).expect("a link");
    }
    root
}
