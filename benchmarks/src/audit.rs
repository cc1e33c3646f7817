//! The time and memory of `pagefold doctor` for a host with many virtual machines.
//!
//! First a recorded host whose virtual machine is there many times, each as a domain of libvirt with its own process
//! number, name and UUID. Then this host with as many processes that have memory and the command line of QEMU: there the
//! kernel also walks page tables for `smaps`. Two sizes of memory tell what a GiB costs.

use crate::BenchmarkEffort;
use crate::findings::{Findings, MarkdownTable, SampleSpread, ThresholdCheck};
use crate::target_process::{TargetLayout, TargetProcesses};
use anyhow::{Context, Result, ensure};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// The recorded host with one virtual machine, and the number of its process.
const RECORDING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/recordings/two-nodes");
const RECORDED_PID: u32 = 161;

/// Its memory, in MiB.
const RECORDED_MIB: usize = 73;

/// The name and the UUID of the recorded machine.
const RECORDED_NAME: &str = "big";
const RECORDED_UUID: &str = "6f1cb2f4-2d3c-4a51-9b0e-93c1b1c5d2a7";

/// The folders in which libvirt keeps a file for each machine.
const LIBVIRT_FOLDERS: [&str; 2] = ["files/run/libvirt/qemu", "files/etc/libvirt/qemu"];

/// The process number of the first copy.
const FIRST_PID: u32 = 100_000;

/// Memory of a process on this host, in MiB, in base pages; the machine has 24 GiB.
const LIVE_MIB: [usize; 2] = [16, 96];

/// Threads of virtual CPUs in each.
const LIVE_VCPUS: u32 = 8;

const MAX_SECONDS: f64 = 2.0;
const MAX_MIB: f64 = 100.0;

/// Run the measurement.
pub fn measure(effort: BenchmarkEffort) -> Result<Findings> {
    let (machines, rounds) = if effort.quick { (10, 1) } else { (200, 9) };
    let folder = tempfile::tempdir()?;
    copy_host(Path::new(RECORDING), folder.path(), machines)?;
    let program = std::env::current_exe()?.with_file_name("pagefold");
    ensure!(program.exists(), "{} is missing: cargo build --release -p pagefold", program.display());
    let mut findings = Findings::new("host,memory_mib,round,seconds,cpu_seconds,peak_kib");
    let title = format!("`pagefold doctor` for {machines} virtual machines, {rounds} rounds");
    let mut table =
        MarkdownTable::new(title, &["host", "memory of each, MiB", "seconds", "CPU seconds", "peak memory MiB"]);
    let mut measure = |name: &str, mebibytes: usize, host: &str| -> Result<AuditSample> {
        // The first round warms up.
        audit(&program, host, machines)?;
        let mut samples = Vec::new();
        for round in 1..=rounds {
            let sample = audit(&program, host, machines)?;
            let AuditSample { seconds, cpu_seconds, peak_mib } = sample;
            findings
                .samples
                .push(format!("{name},{mebibytes},{round},{seconds:.6},{cpu_seconds:.3},{:.0}", peak_mib * 1024.0));
            samples.push(sample);
        }
        let median = |value: fn(&AuditSample) -> f64| SampleSpread::from_samples(samples.iter().map(value)).median;
        let medians = AuditSample {
            seconds: median(|sample| sample.seconds),
            cpu_seconds: median(|sample| sample.cpu_seconds),
            peak_mib: median(|sample| sample.peak_mib),
        };
        table.rows.push(vec![
            name.to_owned(),
            mebibytes.to_string(),
            format!("{:.2}", medians.seconds),
            format!("{:.2}", medians.cpu_seconds),
            format!("{:.0}", medians.peak_mib),
        ]);
        findings.checks.push(ThresholdCheck {
            claim: format!(
                "{name}, {mebibytes} MiB each: an audit of 200 virtual machines takes less than {MAX_SECONDS} s and \
                 {MAX_MIB} MiB"
            ),
            measured: format!("{:.2} s, {:.0} MiB", medians.seconds, medians.peak_mib),
            met: medians.seconds < MAX_SECONDS && medians.peak_mib < MAX_MIB,
        });
        Ok(medians)
    };
    measure("recorded", RECORDED_MIB, &format!("recording:{}", folder.path().display()))?;
    let mut live = Vec::new();
    for mebibytes in LIVE_MIB {
        let _targets = start_live_machines(folder.path(), machines, mebibytes)?;
        live.push(measure("live", mebibytes, "live")?);
    }
    let gibibytes = f64::from(machines) * (LIVE_MIB[1] - LIVE_MIB[0]) as f64 / 1024.0;
    let per_gibibyte = (live[1].cpu_seconds - live[0].cpu_seconds) / gibibytes;
    findings.unjudged.push(format!("a GiB in base pages costs {:.1} ms of CPU time", per_gibibyte * 1e3));
    findings.tables.push(table);
    Ok(findings)
}

/// An audit.
#[derive(Clone, Copy, Debug)]
struct AuditSample {
    seconds: f64,
    cpu_seconds: f64,
    peak_mib: f64,
}

/// Starts processes with so much memory that look like QEMU. They end when the group is dropped.
fn start_live_machines(folder: &Path, machines: u32, mebibytes: usize) -> Result<TargetProcesses> {
    let program = folder.join("qemu-system-x86_64");
    if !program.exists() {
        std::os::unix::fs::symlink(std::env::current_exe()?, &program)?;
    }
    let target = |number: u32| {
        let layout = TargetLayout {
            bytes: mebibytes << 20,
            copies: true,
            seed: u64::from(number),
            vcpus: LIVE_VCPUS,
            ..TargetLayout::default()
        };
        let options =
            format!("-name guest=live-{number},debug-threads=on -accel kvm -cpu host -smp {LIVE_VCPUS} -m {mebibytes}");
        (layout, options.split(' ').map(str::to_owned).collect())
    };
    TargetProcesses::start_as(&program, (0..machines).map(target))
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

/// One audit, which must find all machines.
fn audit(program: &Path, host: &str, machines: u32) -> Result<AuditSample> {
    let output = tempfile::NamedTempFile::new()?;
    let started = Instant::now();
    let peak = Command::new(std::env::current_exe()?)
        .arg("peak-memory")
        .arg(program)
        .arg("--host")
        .arg(host)
        .args(["doctor", "--json"])
        .stderr(output.reopen()?)
        .output()?;
    let seconds = started.elapsed().as_secs_f64();
    let report: serde_json::Value = serde_json::from_reader(output.reopen()?).context("the audit printed no JSON")?;
    let findings = report["findings"].as_array().context("the audit has no findings")?;
    let of_models = findings.iter().filter(|finding| finding["rule"] == "vm-cpu-model").count();
    ensure!(of_models == machines as usize, "{of_models} of {machines} machines were audited");
    let printed = String::from_utf8(peak.stdout)?;
    let (peak_kib, cpu_seconds) = printed.trim().split_once(' ').context("peak-memory prints two numbers")?;
    Ok(AuditSample { seconds, cpu_seconds: cpu_seconds.parse()?, peak_mib: peak_kib.parse::<f64>()? / 1024.0 })
}

/// Runs a program with its output on standard error, and prints its peak resident memory in KiB and its CPU time in
/// seconds.
pub fn print_peak_memory(program: &str, arguments: &[&str]) -> Result<()> {
    let mut command = Command::new(PathBuf::from(program));
    // The verdict of an audit is in its exit status.
    command.args(arguments).stdout(Stdio::from(rustix::io::dup(std::io::stderr())?)).status()?;
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN)?;
    let seconds = |time: TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    println!("{} {}", usage.max_rss(), seconds(usage.user_time()) + seconds(usage.system_time()));
    Ok(())
}
