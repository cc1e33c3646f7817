//! A virtual machine, emulated by QEMU without KVM, that runs one init and powers off when that ends.
//!
//! Its initramfs contains the init, busybox, and programs of this machine with their libraries.

use crate::assets::{GuestAssets, MissingAsset, QEMU_PROGRAM};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Interval between two checks whether the machine is off.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The components of a machine.
#[derive(Clone, Debug)]
pub struct EmulatedMachine<'a> {
    /// The kernel.
    pub kernel: &'a Path,
    /// The init: a script for busybox's shell.
    pub init: &'a Path,
    /// Programs, and their paths in the machine.
    pub programs: &'a [(&'a Path, &'a str)],
    /// Paths and contents of files.
    pub files: &'a [(&'a str, &'a str)],
    /// More options of QEMU: memory, CPUs.
    pub options: &'a [&'a str],
    /// Additions to the kernel's command line.
    pub kernel_arguments: &'a str,
}

/// The kernel's options: no timer checks that an emulated clock fails, power off after a panic.
pub const MACHINE_KERNEL_OPTIONS: &str =
    "console=ttyS0 mitigations=off no_timer_check panic=-1 quiet cryptomgr.notests";

/// The path of busybox.
///
/// # Errors
/// If it is missing.
pub fn find_busybox() -> io::Result<&'static Path> {
    let path = ["/bin/busybox", "/usr/bin/busybox"].map(Path::new).into_iter().find(|path| path.exists());
    path.ok_or_else(|| io::Error::new(ErrorKind::NotFound, "busybox is missing: run labs/setup.sh"))
}

/// The kernel and QEMU's agent for a guest with the init `guest/init-agent`, if all that it needs is there.
///
/// # Errors
/// What is missing.
pub fn find_agent_assets() -> anyhow::Result<(PathBuf, PathBuf)> {
    let directory = GuestAssets::default_directory();
    GuestAssets::find(&directory)?;
    find_busybox()?;
    let agent = directory.join("qemu-ga");
    let kernel = GuestAssets::find_recent_kernel(&directory)?;
    if agent.is_file() { Ok((kernel, agent)) } else { Err(MissingAsset::File(agent).into()) }
}

impl EmulatedMachine<'_> {
    /// Run the machine until it is off, or until a time limit. Returns the output of its serial line. `work_directory`
    /// is for its files. `poll` is called periodically; an error from it ends the machine.
    ///
    /// # Errors
    /// If the machine cannot be created or started.
    pub fn run(
        &self,
        work_directory: &Path,
        timeout: Duration,
        poll: &mut dyn FnMut() -> io::Result<()>,
    ) -> io::Result<String> {
        let (initramfs, log) = (self.build_initramfs(work_directory)?, work_directory.join("log"));
        let mut running = QemuProcess(
            Command::new(QEMU_PROGRAM)
                // With several threads, a CPU may execute the breakpoint with which the kernel patches its code on another.
                // Enrolled memory would make whole-process merges of other tests be refused.
                .args(["-accel", "tcg,thread=single", "-M", "pc,mem-merge=off", "-nodefaults", "-no-user-config"])
                .args(["-display", "none", "-no-reboot", "-nic", "none"])
                .args(self.options)
                .arg("-kernel")
                .arg(self.kernel)
                .arg("-initrd")
                .arg(&initramfs)
                .args(["-append", &format!("{MACHINE_KERNEL_OPTIONS} {}", self.kernel_arguments)])
                .arg("-serial")
                .arg(format!("file:{}", log.display()))
                .stdin(Stdio::null())
                .spawn()?,
        );
        let start = Instant::now();
        while running.0.try_wait()?.is_none() && start.elapsed() < timeout {
            std::thread::sleep(POLL_INTERVAL);
            poll()?;
        }
        drop(running);
        Ok(String::from_utf8_lossy(&fs::read(log).unwrap_or_default()).replace('\r', ""))
    }

    /// Build its initramfs in a directory. Returns the path of the archive.
    ///
    /// # Errors
    /// If a file cannot be copied.
    pub fn build_initramfs(&self, work_directory: &Path) -> io::Result<PathBuf> {
        let root = work_directory.join("root");
        for directory in ["dev", "proc", "sys", "run", "tmp"] {
            fs::create_dir_all(root.join(directory))?;
        }
        copy_into_root(self.init, &root.join("init"))?;
        copy_into_root(find_busybox()?, &root.join("bin/busybox"))?;
        for (program, path) in self.programs {
            copy_program(program, &path_inside(&root, path))?;
            for library in needed_libraries(program)? {
                copy_into_root(&library, &path_inside(&root, &library.display().to_string()))?;
            }
        }
        for (path, text) in self.files {
            fs::write(path_inside(&root, path), text)?;
        }
        let archive = work_directory.join("initramfs.cpio");
        let status = Command::new("sh")
            .args(["-c", "find . | cpio --quiet -o -H newc -R 0:0"])
            .current_dir(&root)
            .stdout(fs::File::create(&archive)?)
            .status()?;
        if status.success() { Ok(archive) } else { Err(io::Error::other(format!("cpio: {status}"))) }
    }
}

/// Killed when dropped.
struct QemuProcess(Child);

impl Drop for QemuProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn path_inside(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}

fn copy_into_root(from: &Path, to: &Path) -> io::Result<()> {
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)?;
    }
    let copied = fs::copy(from, to);
    copied.map(drop).map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", from.display())))
}

/// Copies a program without its debug information, of which an unoptimized build has more than code: the guest unpacks all
/// of it at its start. Without strip(1), or for a script, the file is copied as it is, and so are kernel modules: strip(1)
/// removes their signature.
fn copy_program(from: &Path, to: &Path) -> io::Result<()> {
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)?;
    }
    if from.extension().is_some_and(|extension| extension == "ko") {
        return copy_into_root(from, to);
    }
    let strip = Command::new("strip").arg("--strip-debug").arg("-o").args([to, from]).stderr(Stdio::null()).status();
    if strip.is_ok_and(|status| status.success()) { Ok(()) } else { copy_into_root(from, to) }
}

/// The libraries of a program according to ldd(1): none if it is linked statically.
fn needed_libraries(program: &Path) -> io::Result<Vec<PathBuf>> {
    let needs = Command::new("ldd").arg(program).output()?;
    let needs = String::from_utf8_lossy(&needs.stdout).into_owned();
    Ok(needs.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect())
}
