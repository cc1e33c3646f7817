//! Reads whether the vCPUs of machines have run.

use crate::decide::vcpus::{VcpuReadings, VcpuVerdict, judge_vcpus};
use crate::facts::{machine_name, read_text};
use pagefold_base::identity::Monitor;
use pagefold_base::identity::qemu_monitor::MonitorVcpu;
use pagefold_base::identity::vm_definition::{VmDefinition, parse_vm_definition};
use pagefold_base::process::{Process, USER_HZ};
use pagefold_base::{Absent, Pid, ProcessId, Reading};
use pagefold_doctor::doctor_facts::read_uptime;
use pagefold_host::qemu_monitor::{MonitorAccess, ask_monitors};
use pagefold_host::{Host, observe, parse};

/// The vCPUs of a machine, and the verdict on them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VcpuCheck {
    /// The process of the machine.
    pub process: ProcessId,
    /// The name of the machine.
    pub name: String,
    /// What is known about its vCPUs.
    pub readings: VcpuReadings,
    /// Whether they have run.
    pub verdict: VcpuVerdict,
}

/// The field `guest_time` of `/proc/PID/task/TID/stat` (proc(5)), counted from the state, which is field 3.
const GUEST_TIME_FIELD: usize = 43 - 3;

/// Checks the vCPUs of the selected QEMU machines that run by KVM. Their threads are those with names of vCPUs. Where QEMU
/// does not name them, its monitor is asked.
pub fn check_vcpus(host: &dyn Host, is_selected: impl Fn(ProcessId) -> bool, access: MonitorAccess) -> Vec<VcpuCheck> {
    let mut machines = find_machines(host);
    machines.retain(|(process, ..)| is_selected(process.id));
    let unnamed: Vec<usize> =
        machines.iter().enumerate().filter(|(_, (.., ticks))| ticks.is_empty()).map(|(position, _)| position).collect();
    let processes: Vec<ProcessId> = unnamed.iter().map(|&position| machines[position].0.id).collect();
    let mut answers = ask_monitors(host, &processes, access).into_iter();
    let uptime = read_uptime(host);
    let mut checks = Vec::new();
    for (position, (process, declared, named)) in machines.drain(..).enumerate() {
        let guest_ticks = if unnamed.contains(&position) {
            let listed = answers.next().unwrap_or(Err(Absent::Vanished)).and_then(|answers| answers.vcpus);
            listed.and_then(|vcpus| read_listed_threads(host, process.id, &vcpus))
        } else {
            Ok(named)
        };
        let age = uptime.clone().map(|uptime| (uptime - process.id.start_time as f64 / USER_HZ).max(0.0) as u64);
        let readings = VcpuReadings { declared, guest_ticks, age_seconds: age };
        let verdict = judge_vcpus(&readings);
        checks.push(VcpuCheck { process: process.id, name: machine_name(&process), readings, verdict });
    }
    checks
}

/// The machines with the number of vCPUs on the command line, and the guest time of the threads with names of vCPUs.
fn find_machines(host: &dyn Host) -> Vec<(Process, Option<u32>, Vec<u64>)> {
    let processes = observe::processes(host).unwrap_or_default().into_iter().filter_map(|(_, process)| process.ok());
    let is_qemu = |process: &Process| process.identity.vm.as_ref().is_some_and(|vm| vm.monitor == Monitor::Qemu);
    let read = |process: Process| {
        let definition: Reading<VmDefinition> =
            process.arguments.clone().and_then(|arguments| parse_vm_definition(&arguments));
        let named: Vec<u64> = list_threads(host, process.id)
            .into_iter()
            .filter_map(|tid| read_guest_ticks(host, process.id, tid).ok())
            .filter(|(name, _)| name.starts_with("CPU ") && name.ends_with("/KVM"))
            .map(|(_, ticks)| ticks)
            .collect();
        let uses_kvm = definition.as_ref().is_ok_and(|definition| definition.kvm) || !named.is_empty();
        uses_kvm.then(|| (process, definition.ok().and_then(|definition| definition.vcpus), named))
    };
    processes.filter(is_qemu).filter_map(read).collect()
}

fn list_threads(host: &dyn Host, process: ProcessId) -> Vec<Pid> {
    let names = host.list(&format!("proc/{}/task", process.pid)).unwrap_or_default();
    names.iter().filter_map(|tid| tid.parse().ok().map(Pid)).collect()
}

/// The name of a thread and its guest time in clock ticks.
fn read_guest_ticks(host: &dyn Host, process: ProcessId, tid: Pid) -> Reading<(String, u64)> {
    let stat = read_text(host, &format!("proc/{}/task/{tid}/stat", process.pid))?;
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
    let ticks = fields.split_ascii_whitespace().nth(GUEST_TIME_FIELD).and_then(|ticks| ticks.parse().ok());
    let ticks = ticks.ok_or_else(|| Absent::Malformed(format!("guest time of thread {tid}")))?;
    Ok((parse::stat(stat.as_bytes())?.comm, ticks))
}

/// The guest time of the threads that a monitor lists, which numbers them as its own PID namespace does. A monitor that
/// lists a thread which the machine does not have, or its main thread, is not believed.
fn read_listed_threads(host: &dyn Host, process: ProcessId, listed: &[MonitorVcpu]) -> Reading<Vec<u64>> {
    let is_listed = |tid: Pid| {
        let status = host.read(&format!("proc/{}/task/{tid}/status", process.pid)).unwrap_or_default();
        let inner_tid = parse::innermost_pid(&status).unwrap_or(tid);
        tid != process.pid && listed.iter().any(|vcpu| vcpu.thread == inner_tid.0)
    };
    let threads = list_threads(host, process).into_iter().filter(|&tid| is_listed(tid));
    let ticks: Vec<u64> =
        threads.map(|tid| Ok(read_guest_ticks(host, process, tid)?.1)).collect::<Reading<Vec<u64>>>()?;
    if listed.is_empty() || ticks.len() != listed.len() {
        return Err(Absent::Malformed("its monitor lists other threads than it has".to_owned()));
    }
    Ok(ticks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_host::fake_host::FakeHost;

    fn stat(pid: u32, name: &str, guest_ticks: u32) -> String {
        let zeros = |count| "0 ".repeat(count);
        format!("{pid} ({name}) S 1 1 1 0 -1 0 {}20 0 1 0 1 {}{guest_ticks} 0 0 0\n", zeros(8), zeros(20))
    }

    fn put_machine(host: &FakeHost, pid: u32, options: &str, threads: &[(&str, u32)]) {
        let command = format!("qemu-system-x86_64\0-name\0guest=vm{pid}\0{}\0", options.replace(' ', "\0"));
        host.put_file(&format!("proc/{pid}/cmdline"), &command);
        host.put_file(&format!("proc/{pid}/stat"), &stat(pid, "qemu-system-x86", 0));
        host.put_file(&format!("proc/{pid}/status"), "Uid:\t0\t0\t0\t0\n");
        for (tid, (name, ticks)) in (pid * 10..).zip(threads) {
            host.put_file(&format!("proc/{pid}/task/{tid}/stat"), &stat(tid, name, *ticks));
        }
    }

    #[test]
    fn machines_of_kvm_have_verdicts() {
        let host = FakeHost::booted();
        host.put_file("proc/uptime", "5000.00 9000.00\n");
        put_machine(&host, 7, "-accel kvm -smp 2", &[("qemu-system-x86", 0), ("CPU 0/KVM", 5), ("CPU 1/KVM", 3)]);
        put_machine(
            &host,
            8,
            "-accel kvm -smp sockets=2,cores=2",
            &[("CPU 0/KVM", 5), ("CPU 1/KVM", 0), ("CPU 2/KVM", 0), ("CPU 3/KVM", 0)],
        );
        put_machine(&host, 9, "-accel kvm -smp 2", &[("qemu-system-x86", 5), ("qemu-system-x86", 3)]);
        put_machine(&host, 10, "-accel tcg -smp 2", &[("CPU 0/TCG", 0)]);
        put_machine(&host, 11, "-accel kvm -smp 1", &[("CPU 0/KVM", 5)]);
        let checks = check_vcpus(&host, |process| process.pid != Pid(11), MonitorAccess::Socket);
        let names: Vec<&str> = checks.iter().map(|check| &*check.name).collect();
        assert_eq!(names, ["vm7", "vm8", "vm9"], "no emulated machine, and none that is not selected");
        assert_eq!(checks[0].verdict, VcpuVerdict::AllRan);
        assert!(matches!(&checks[1].verdict, VcpuVerdict::NotAllRan(why) if why.starts_with("1 of 4 ")), "{checks:?}");
        assert!(matches!(&checks[2].verdict, VcpuVerdict::Unknown(why) if why.contains("debug-threads")), "{checks:?}");
    }

    #[test]
    fn threads_that_a_monitor_lists_are_read() {
        let host = FakeHost::booted();
        put_machine(&host, 7, "-accel kvm -smp 2", &[("qemu-system-x86", 0), ("qemu-system-x86", 5)]);
        let process = ProcessId { pid: Pid(7), start_time: 1 };
        let vcpu = |number, thread| MonitorVcpu { number, thread, node: None, socket: None, core: None };
        assert_eq!(read_listed_threads(&host, process, &[vcpu(0, 70), vcpu(1, 71)]), Ok(vec![0, 5]));
        assert!(read_listed_threads(&host, process, &[vcpu(0, 70), vcpu(1, 99)]).is_err(), "no such thread");
        assert!(read_listed_threads(&host, process, &[]).is_err());
    }
}
