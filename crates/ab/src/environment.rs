//! What surrounds a campaign: the host, and its readings while a block runs.

use crate::decide::noise::{EnvironmentReadings, NoiseFlag, ReadingKind, judge_start};
use pagefold_host::Host;
use pagefold_host::ksmd_thread::KsmdThread;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

/// What a host is, as far as it matters to a measurement. A field that the host does not tell is absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HostDescription {
    /// The kernel's release.
    pub kernel: Option<String>,
    /// The kernel's command line.
    pub command_line: Option<String>,
    /// The model of the CPUs.
    pub cpu_model: Option<String>,
    /// Number of CPUs.
    pub cpus: usize,
    /// The version of the CPUs' microcode.
    pub microcode: Option<String>,
    /// The frequency governors in use.
    pub governors: Vec<String>,
    /// Whether the host is a virtual machine.
    pub is_virtual: bool,
    /// Transparent huge pages.
    pub transparent_hugepage: Option<String>,
    /// Whether simultaneous multithreading is on.
    pub smt: Option<String>,
    /// The SHA-256 digest of the workload's program.
    pub program_sha256: Option<String>,
    /// The git commit of the directory that holds the workload's program.
    pub git_commit: Option<String>,
}

impl HostDescription {
    /// Describes a host and the program of a workload.
    #[must_use]
    pub fn read(host: &dyn Host, program: Option<&Path>) -> Self {
        let text = |path: &str| host.read(path).ok().map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned());
        let cpuinfo = text("proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            cpuinfo.lines().find_map(|line| {
                let (key, value) = line.split_once(':')?;
                (key.trim() == name).then(|| value.trim().to_owned())
            })
        };
        let cpu_directories = host.list("sys/devices/system/cpu").unwrap_or_default();
        let governors: BTreeSet<String> = cpu_directories
            .iter()
            .filter_map(|cpu| text(&format!("sys/devices/system/cpu/{cpu}/cpufreq/scaling_governor")))
            .collect();
        let program = program.and_then(find_program);
        let program_text = program.as_deref().and_then(|path| host.read(path.strip_prefix("/").ok()?.to_str()?).ok());
        Self {
            kernel: text("proc/sys/kernel/osrelease"),
            command_line: text("proc/cmdline"),
            cpu_model: field("model name"),
            cpus: cpuinfo.lines().filter(|line| line.starts_with("processor")).count(),
            microcode: field("microcode"),
            governors: governors.into_iter().collect(),
            is_virtual: field("flags").is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor")),
            transparent_hugepage: text("sys/kernel/mm/transparent_hugepage/enabled"),
            smt: text("sys/devices/system/cpu/smt/control"),
            program_sha256: program_text
                .map(|bytes| Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect()),
            git_commit: program.as_deref().and_then(|path| find_git_commit(host, path)),
        }
    }
}

/// The absolute path of a program, by PATH if it has no slash.
fn find_program(program: &Path) -> Option<std::path::PathBuf> {
    if program.components().count() > 1 {
        return program.canonicalize().ok();
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(program)).find_map(|path| path.canonicalize().ok())
}

/// The commit that is checked out above a path.
fn find_git_commit(host: &dyn Host, path: &Path) -> Option<String> {
    let read = |path: &Path| {
        let bytes = host.read(path.strip_prefix("/").ok()?.to_str()?).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    };
    path.ancestors().skip(1).find_map(|directory| {
        let git = directory.join(".git");
        let head = read(&git.join("HEAD"))?;
        match head.strip_prefix("ref: ") {
            None => Some(head),
            Some(name) => read(&git.join(name)).or_else(|| {
                let packed = read(&git.join("packed-refs"))?;
                let mut lines = packed.lines().filter_map(|line| line.split_once(' '));
                lines.find(|(_, known)| *known == name).map(|(commit, _)| commit.to_owned())
            }),
        }
    })
}

/// Readings while a block runs; see [`EnvironmentReadings`] for the units.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BlockEnvironment {
    /// Share of CPU time that the hypervisor withheld.
    pub steal: Option<f64>,
    /// CPU seconds of other processes per second, without those of ksmd, which an arm may start.
    pub neighbor_cpus: Option<f64>,
    /// Share of time in which a task waited for a CPU.
    pub cpu_pressure: Option<f64>,
    /// Share of time in which a task waited for memory.
    pub memory_pressure: Option<f64>,
    /// Share of time in which a task waited for storage.
    pub io_pressure: Option<f64>,
    /// The highest temperature in degrees Celsius.
    pub temperature_celsius: Option<f64>,
    /// The mean CPU frequency in MHz.
    pub frequency_mhz: Option<f64>,
}

impl From<&BlockEnvironment> for EnvironmentReadings {
    fn from(block: &BlockEnvironment) -> Self {
        let BlockEnvironment {
            steal,
            neighbor_cpus,
            cpu_pressure,
            memory_pressure,
            io_pressure,
            temperature_celsius,
            frequency_mhz,
        } = *block;
        Self { steal, neighbor_cpus, cpu_pressure, memory_pressure, io_pressure, temperature_celsius, frequency_mhz }
    }
}

/// The flag of a reading as text.
#[must_use]
pub fn describe_flag(flag: &NoiseFlag) -> String {
    let (name, unit, scale) = match flag.reading {
        ReadingKind::Steal => ("steal", " %", 100.0),
        ReadingKind::NeighborCpus => ("CPU time of other processes", " CPUs", 1.0),
        ReadingKind::CpuPressure => ("CPU pressure", " %", 100.0),
        ReadingKind::MemoryPressure => ("memory pressure", " %", 100.0),
        ReadingKind::IoPressure => ("storage pressure", " %", 100.0),
        ReadingKind::Temperature => ("temperature", " °C", 1.0),
        ReadingKind::Frequency => ("CPU frequency", " MHz", 1.0),
    };
    format!("{name} {:.2}{unit}, limit {:.2}{unit}", flag.value * scale, flag.limit * scale)
}

/// What makes a host with so many CPUs busy before the workload runs, as text.
#[must_use]
pub fn describe_busy_host(baseline: &BlockEnvironment, cpus: usize) -> Vec<String> {
    judge_start(&EnvironmentReadings::from(baseline), cpus).iter().map(describe_flag).collect()
}

/// The counters of a host at one moment.
#[derive(Clone, Debug)]
pub struct EnvironmentCounters {
    taken: Instant,
    /// Busy, stolen and all CPU time in ticks.
    cpu: Option<(u64, u64, u64)>,
    /// CPU time of ksmd; zero if there is none.
    ksmd: Duration,
    /// Microseconds of waiting: CPU, memory, storage.
    pressure: [Option<u64>; 3],
}

/// Clock ticks in a second (`USER_HZ`, include/asm-generic/param.h).
const TICKS_PER_SECOND: f64 = 100.0;

impl EnvironmentCounters {
    /// Reads the counters now.
    #[must_use]
    pub fn read(host: &dyn Host) -> Self {
        let text = |path: &str| host.read(path).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let pressure = |name: &str| {
            let text = text(&format!("proc/pressure/{name}"))?;
            let line = text.lines().find(|line| line.starts_with("some "))?;
            line.rsplit_once("total=")?.1.trim().parse().ok()
        };
        Self {
            taken: host.now(),
            cpu: text("proc/stat").and_then(|text| parse_cpu_times(&text)),
            ksmd: KsmdThread::find(host).and_then(|ksmd| ksmd.cpu_time()).unwrap_or_default(),
            pressure: ["cpu", "memory", "io"].map(pressure),
        }
    }

    /// The readings since these counters, with the CPU seconds that the workload and Pagefold itself used.
    #[must_use]
    pub fn readings_since(&self, host: &dyn Host, own_cpu_seconds: f64) -> BlockEnvironment {
        let now = Self::read(host);
        let own_cpu_seconds = own_cpu_seconds + now.ksmd.saturating_sub(self.ksmd).as_secs_f64();
        let seconds = now.taken.saturating_duration_since(self.taken).as_secs_f64().max(1e-3);
        let cpu = self.cpu.zip(now.cpu).map(|(before, after)| {
            let all = after.2.saturating_sub(before.2).max(1) as f64;
            let busy = after.0.saturating_sub(before.0) as f64 / TICKS_PER_SECOND;
            let neighbors = ((busy - own_cpu_seconds) / seconds).max(0.0);
            (after.1.saturating_sub(before.1) as f64 / all, neighbors)
        });
        let share = |position: usize| {
            let (before, after) = self.pressure[position].zip(now.pressure[position])?;
            Some(after.saturating_sub(before) as f64 / 1e6 / seconds)
        };
        BlockEnvironment {
            steal: cpu.map(|(steal, _)| steal),
            neighbor_cpus: cpu.map(|(_, neighbors)| neighbors),
            cpu_pressure: share(0),
            memory_pressure: share(1),
            io_pressure: share(2),
            temperature_celsius: read_temperature(host),
            frequency_mhz: read_frequency(host),
        }
    }
}

/// Busy, stolen and all ticks from the first line of `/proc/stat` (proc_stat(5)). Guest time is part of user time.
fn parse_cpu_times(text: &str) -> Option<(u64, u64, u64)> {
    let line = text.lines().find(|line| line.starts_with("cpu "))?;
    let ticks: Vec<u64> = line.split_whitespace().skip(1).map_while(|word| word.parse().ok()).collect();
    let [user, nice, system, idle, iowait, irq, softirq, steal, ..] = ticks[..] else { return None };
    let busy = user + nice + system + irq + softirq;
    Some((busy, steal, busy + idle + iowait + steal))
}

fn read_temperature(host: &dyn Host) -> Option<f64> {
    let zones = host.list("sys/class/thermal").ok()?;
    let zones = zones.iter().filter(|zone| zone.starts_with("thermal_zone"));
    let read = |zone: &String| {
        let bytes = host.read(&format!("sys/class/thermal/{zone}/temp")).ok()?;
        String::from_utf8_lossy(&bytes).trim().parse::<f64>().ok().map(|thousandths| thousandths / 1000.0)
    };
    zones.filter_map(read).reduce(f64::max)
}

fn read_frequency(host: &dyn Host) -> Option<f64> {
    let cpus = host.list("sys/devices/system/cpu").ok()?;
    let read = |cpu: &String| {
        let bytes = host.read(&format!("sys/devices/system/cpu/{cpu}/cpufreq/scaling_cur_freq")).ok()?;
        String::from_utf8_lossy(&bytes).trim().parse::<f64>().ok().map(|khz| khz / 1000.0)
    };
    let values: Vec<f64> = cpus.iter().filter_map(read).collect();
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_host::fake_host::FakeHost;

    #[test]
    fn readings_are_differences_and_absent_files_are_absent() {
        let host = FakeHost::booted();
        host.put_file("proc/stat", "cpu  100 0 100 1000 0 0 0 0 0 0\ncpu0 1 1\n");
        host.put_file("proc/pressure/cpu", "some avg10=0.00 avg60=0.00 avg300=0.00 total=1000\n");
        let before = EnvironmentCounters::read(&host);
        host.put_file("proc/stat", "cpu  150 0 100 1040 0 0 0 10 0 0\ncpu0 1 1\n");
        let readings = before.readings_since(&host, 1000.0);
        assert_eq!(readings.steal, Some(0.1));
        assert_eq!((readings.neighbor_cpus, readings.memory_pressure), (Some(0.0), None));
        assert_eq!(readings.cpu_pressure, Some(0.0));
    }

    #[test]
    fn ksmd_is_no_neighbor() {
        let host = FakeHost::booted();
        host.enable_virtual_time();
        // A kernel thread, with its user and system ticks.
        let run = |ticks: u64| {
            host.put_file(
                "proc/30/stat",
                &format!("30 (ksmd) S 2 0 0 0 -1 2129984 0 0 0 0 0 {ticks} 0 0 25 5 1 0 6\n"),
            );
            host.put_file("proc/stat", &format!("cpu  {} 0 0 1000 0 0 0 0 0 0\n", 50 + 3 * ticks));
        };
        run(0);
        let before = EnvironmentCounters::read(&host);
        run(100);
        host.sleep(Duration::from_secs(1));
        let readings = before.readings_since(&host, 0.5);
        let neighbors = readings.neighbor_cpus.unwrap();
        assert!((neighbors - 1.5).abs() < 1e-6, "three CPUs less one of ksmd and half a one of its own: {neighbors}");
    }

    #[test]
    fn commit_of_a_program_is_found_in_packed_references() {
        let host = FakeHost::booted();
        host.put_file("src/app/.git/HEAD", "ref: refs/heads/main\n");
        host.put_file("src/app/.git/packed-refs", "# pack-refs\nabc123 refs/heads/main\n");
        assert_eq!(find_git_commit(&host, Path::new("/src/app/bin/x")).as_deref(), Some("abc123"));
        assert_eq!(find_git_commit(&host, Path::new("/other/x")), None);
    }
}
