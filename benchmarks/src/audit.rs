//! The time and memory of `pagefold doctor` for a host with many virtual machines: a recorded host whose virtual machine
//! is there many times, each as a domain of libvirt with its own process number, name and UUID.

use crate::BenchmarkEffort;
use crate::findings::{Findings, MarkdownTable, SampleSpread, ThresholdCheck};
use anyhow::{Context, Result, ensure};
use nix::sys::resource::{UsageWho, getrusage};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// The recorded host with one virtual machine, and the number of its process.
const RECORDING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/recordings/two-nodes");
const RECORDED_PID: u32 = 161;

/// The name and the UUID of the recorded machine.
const RECORDED_NAME: &str = "big";
const RECORDED_UUID: &str = "6f1cb2f4-2d3c-4a51-9b0e-93c1b1c5d2a7";

/// The folders in which libvirt keeps a file for each machine.
const LIBVIRT_FOLDERS: [&str; 2] = ["files/run/libvirt/qemu", "files/etc/libvirt/qemu"];

/// The process number of the first copy.
const FIRST_PID: u32 = 100_000;

const MAX_SECONDS: f64 = 2.0;
const MAX_MIB: f64 = 100.0;

/// Run the measurement.
pub fn measure(effort: BenchmarkEffort) -> Result<Findings> {
    let (machines, rounds) = if effort.quick { (10, 1) } else { (200, 9) };
    let folder = tempfile::tempdir()?;
    copy_host(Path::new(RECORDING), folder.path(), machines)?;
    let program = std::env::current_exe()?.with_file_name("pagefold");
    ensure!(program.exists(), "{} is missing: cargo build --release -p pagefold", program.display());
    let mut findings = Findings::new("round,seconds,peak_kib");
    let mut samples = Vec::new();
    for round in 0..=rounds {
        let (seconds, peak_kib) = audit(&program, folder.path(), machines)?;
        // The first round warms up.
        if round > 0 {
            findings.samples.push(format!("{round},{seconds:.6},{peak_kib}"));
            samples.push((seconds, peak_kib as f64 / 1024.0));
        }
    }
    let seconds = SampleSpread::from_samples(samples.iter().map(|sample| sample.0)).median;
    let mib = SampleSpread::from_samples(samples.iter().map(|sample| sample.1)).median;
    let title = format!("`pagefold doctor` for {machines} virtual machines, {rounds} rounds");
    let mut table = MarkdownTable::new(title, &["seconds", "peak memory MiB"]);
    table.rows.push(vec![format!("{seconds:.2}"), format!("{mib:.0}")]);
    findings.tables.push(table);
    findings.checks.push(ThresholdCheck {
        claim: format!("an audit of 200 virtual machines takes less than {MAX_SECONDS} s"),
        measured: format!("{seconds:.2} s"),
        met: seconds < MAX_SECONDS,
    });
    findings.checks.push(ThresholdCheck {
        claim: format!("and less than {MAX_MIB} MiB of memory"),
        measured: format!("{mib:.0} MiB"),
        met: mib < MAX_MIB,
    });
    Ok(findings)
}

/// Copies a recorded host with so many copies of its virtual machine. QEMU's accelerator becomes KVM, so that all rules
/// apply.
fn copy_host(from: &Path, to: &Path, machines: u32) -> Result<()> {
    copy_folder(from, to, &|name| name.to_owned())?;
    let original = to.join(format!("files/proc/{RECORDED_PID}"));
    let arguments = fs::read_to_string(original.join("cmdline"))?.replace("\0tcg\0", "\0kvm\0");
    let absent = fs::read_to_string(to.join("absent.txt"))?;
    let mut all_absent = absent.clone();
    let names = to.join("files/proc/.names");
    let copies = FIRST_PID..FIRST_PID + machines - 1;
    let listed: String = copies.clone().map(|pid| format!("{pid}\n")).collect();
    fs::write(&names, fs::read_to_string(&names)? + &listed)?;
    let libvirt_files = read_libvirt_files(to)?;
    for pid in copies.clone() {
        let rename = |name: &str| if name == RECORDED_PID.to_string() { pid.to_string() } else { name.to_owned() };
        let copy = to.join(format!("files/proc/{pid}"));
        copy_folder(&original, &copy, &rename)?;
        let names = copy.join("task/.names");
        let threads: Vec<String> = fs::read_to_string(&names)?.lines().map(rename).collect();
        fs::write(names, threads.join("\n") + "\n")?;
        let named = arguments
            .replace(&format!("\0guest={RECORDED_NAME},"), &format!("\0guest=machine-{pid},"))
            .replace(RECORDED_UUID, &machine_uuid(pid));
        ensure!(named != arguments, "the recorded machine is not named {RECORDED_NAME}");
        fs::write(copy.join("cmdline"), named)?;
        for (folder, text) in &libvirt_files {
            fs::write(to.join(folder).join(format!("machine-{pid}.xml")), adapt_libvirt_file(text, pid)?)?;
        }
        fs::copy(to.join(format!("pages/{RECORDED_PID}.txt")), to.join(format!("pages/{pid}.txt")))?;
        let prefix = format!("proc/{RECORDED_PID}/");
        for rest in absent.lines().filter_map(|line| line.strip_prefix(&prefix)) {
            all_absent.push_str(&format!("proc/{pid}/{rest}\n"));
        }
    }
    for (folder, _) in &libvirt_files {
        let names = to.join(folder).join(".names");
        if names.exists() {
            let listed: String = copies.clone().map(|pid| format!("machine-{pid}.xml\n")).collect();
            fs::write(&names, fs::read_to_string(&names)? + &listed)?;
        }
    }
    fs::write(original.join("cmdline"), arguments)?;
    fs::write(to.join("absent.txt"), all_absent)?;
    Ok(())
}

/// What libvirt keeps of the recorded machine, by folder.
fn read_libvirt_files(recording: &Path) -> Result<Vec<(&'static str, String)>> {
    let read = |folder: &'static str| {
        let path = recording.join(folder).join(format!("{RECORDED_NAME}.xml"));
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok((folder, text))
    };
    LIBVIRT_FOLDERS.into_iter().map(read).collect()
}

/// The same file of the copy with this process number.
fn adapt_libvirt_file(text: &str, pid: u32) -> Result<String> {
    let adapted = text
        .replace(&format!("<name>{RECORDED_NAME}</name>"), &format!("<name>machine-{pid}</name>"))
        .replace(RECORDED_UUID, &machine_uuid(pid))
        .replacen(&format!("pid='{RECORDED_PID}'"), &format!("pid='{pid}'"), 1);
    ensure!(adapted.contains(&format!("<name>machine-{pid}</name>")), "a file of libvirt has no name");
    Ok(adapted)
}

/// The UUID of the copy with this process number.
fn machine_uuid(pid: u32) -> String {
    format!("{}{pid:012}", &RECORDED_UUID[..RECORDED_UUID.len() - 12])
}

fn copy_folder(from: &Path, to: &Path, rename: &dyn Fn(&str) -> String) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry?;
        let target = to.join(rename(&entry.file_name().to_string_lossy()));
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &target, rename)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

/// Seconds and peak memory in KiB of one audit, which must find all machines.
fn audit(program: &Path, recording: &Path, machines: u32) -> Result<(f64, u64)> {
    let output = tempfile::NamedTempFile::new()?;
    let started = Instant::now();
    let peak = Command::new(std::env::current_exe()?)
        .arg("peak-memory")
        .arg(program)
        .arg("--host")
        .arg(format!("recording:{}", recording.display()))
        .args(["doctor", "--json"])
        .stderr(output.reopen()?)
        .output()?;
    let seconds = started.elapsed().as_secs_f64();
    let report: serde_json::Value = serde_json::from_reader(output.reopen()?).context("the audit printed no JSON")?;
    let findings = report["findings"].as_array().context("the audit has no findings")?;
    let of_models = findings.iter().filter(|finding| finding["rule"] == "vm-cpu-model").count();
    ensure!(of_models == machines as usize, "{of_models} of {machines} machines were audited");
    Ok((seconds, String::from_utf8(peak.stdout)?.trim().parse()?))
}

/// Runs a program with its output on standard error, and prints its peak resident memory in KiB.
pub fn print_peak_memory(program: &str, arguments: &[&str]) -> Result<()> {
    let mut command = Command::new(PathBuf::from(program));
    // The verdict of an audit is in its exit status.
    command.args(arguments).stdout(Stdio::from(rustix::io::dup(std::io::stderr())?)).status()?;
    println!("{}", getrusage(UsageWho::RUSAGE_CHILDREN)?.max_rss());
    Ok(())
}
