//! A machine of its own, emulated by QEMU without KVM, that runs one init and is off when that ends.
//!
//! Its initramfs has the init, busybox, and programs of this machine with the libraries that they need.

use crate::assets::QEMU;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Between two looks whether it is off.
const TICK: Duration = Duration::from_millis(100);

/// What a machine consists of.
#[derive(Clone, Debug)]
pub struct Machine<'a> {
    /// The kernel.
    pub kernel: &'a Path,
    /// The init: a script for busybox's shell.
    pub init: &'a Path,
    /// Programs, and where they lie in the machine.
    pub programs: &'a [(&'a Path, &'a str)],
    /// Files with their contents, and where they lie.
    pub files: &'a [(&'a str, &'a str)],
    /// More of QEMU's options: memory, CPUs.
    pub options: &'a [&'a str],
    /// What is added to the kernel's command line.
    pub words: &'a str,
}

/// The kernel's options: no timer checks that an emulated clock fails, gone after a panic.
const KERNEL_OPTIONS: &str = "console=ttyS0 mitigations=off no_timer_check panic=-1 quiet cryptomgr.notests";

/// Where busybox is.
///
/// # Errors
/// If it is not there.
pub fn busybox() -> io::Result<&'static Path> {
    let there = ["/bin/busybox", "/usr/bin/busybox"].map(Path::new).into_iter().find(|path| path.exists());
    there.ok_or_else(|| io::Error::new(ErrorKind::NotFound, "busybox is not there: run labs/setup.sh"))
}

impl Machine<'_> {
    /// Run it until it is off, or for so long at most: what it has said on its serial line. `work` is a folder for its
    /// files; `meanwhile` is called again and again, and ends it by an error.
    ///
    /// # Errors
    /// If it cannot be made or started.
    pub fn run(
        &self,
        work: &Path,
        limit: Duration,
        meanwhile: &mut dyn FnMut() -> io::Result<()>,
    ) -> io::Result<String> {
        let (initramfs, log) = (self.initramfs(work)?, work.join("log"));
        let mut running = Running(
            Command::new(QEMU)
                .args(["-accel", "tcg", "-M", "pc", "-nodefaults", "-no-user-config"])
                .args(["-display", "none", "-no-reboot", "-nic", "none"])
                .args(self.options)
                .arg("-kernel")
                .arg(self.kernel)
                .arg("-initrd")
                .arg(&initramfs)
                .args(["-append", &format!("{KERNEL_OPTIONS} {}", self.words)])
                .arg("-serial")
                .arg(format!("file:{}", log.display()))
                .stdin(Stdio::null())
                .spawn()?,
        );
        let began = Instant::now();
        while running.0.try_wait()?.is_none() && began.elapsed() < limit {
            std::thread::sleep(TICK);
            meanwhile()?;
        }
        drop(running);
        Ok(String::from_utf8_lossy(&fs::read(log).unwrap_or_default()).replace('\r', ""))
    }

    fn initramfs(&self, work: &Path) -> io::Result<PathBuf> {
        let root = work.join("root");
        for directory in ["dev", "proc", "sys", "run", "tmp"] {
            fs::create_dir_all(root.join(directory))?;
        }
        put(self.init, &root.join("init"))?;
        put(busybox()?, &root.join("bin/busybox"))?;
        for (program, place) in self.programs {
            put(program, &inside(&root, place))?;
            for library in libraries(program)? {
                put(&library, &inside(&root, &library.display().to_string()))?;
            }
        }
        for (place, text) in self.files {
            fs::write(inside(&root, place), text)?;
        }
        let archive = work.join("initramfs.cpio");
        let packed = Command::new("sh")
            .args(["-c", "find . | cpio --quiet -o -H newc -R 0:0"])
            .current_dir(&root)
            .stdout(fs::File::create(&archive)?)
            .status()?;
        if packed.success() { Ok(archive) } else { Err(io::Error::other(format!("cpio: {packed}"))) }
    }
}

/// Ended when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn inside(root: &Path, place: &str) -> PathBuf {
    root.join(place.trim_start_matches('/'))
}

fn put(from: &Path, to: &Path) -> io::Result<()> {
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)?;
    }
    let copied = fs::copy(from, to);
    copied.map(drop).map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", from.display())))
}

/// What a program needs by ldd(1): nothing where it is linked statically.
fn libraries(program: &Path) -> io::Result<Vec<PathBuf>> {
    let needs = Command::new("ldd").arg(program).output()?;
    let needs = String::from_utf8_lossy(&needs.stdout).into_owned();
    Ok(needs.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect())
}
