//! The threads of the selected processes, read from the host.

use crate::decide::gangs::{Candidate, WEIGHT_RANGE};
use pagefold_base::process::Process;
use pagefold_base::{Pid, Reading};
use pagefold_host::{Host, ProcessHandle, parse};

/// The hierarchy of cgroups.
const CGROUP_ROOT: &str = "sys/fs/cgroup";

/// Reads a process with its threads. Threads that end meanwhile are left out.
///
/// # Errors
/// If the threads cannot be listed.
pub fn read_candidate(host: &dyn Host, handle: &dyn ProcessHandle, process: &Process) -> Reading<Candidate> {
    let vm_name = process.identity.vm.as_ref().and_then(|vm| vm.name.clone());
    Ok(Candidate {
        pid: process.id.pid,
        name: vm_name.unwrap_or_else(|| process.comm.clone()),
        threads: read_threads(host, handle)?,
        cgroup_weight: process.cgroup.as_ref().ok().and_then(|path| read_weight(host, path)),
    })
}

/// The numbers and names of the threads of a process.
///
/// # Errors
/// If they cannot be listed: `Vanished` if the process has ended.
pub fn read_threads(host: &dyn Host, handle: &dyn ProcessHandle) -> Reading<Vec<(Pid, String)>> {
    let names = host.list(&format!("proc/{}/task", handle.id().pid))?;
    let tids = names.iter().filter_map(|name| name.parse().ok().map(Pid));
    let read = |tid: Pid| -> Reading<(Pid, String)> {
        let stat = parse::stat(&handle.read(&format!("task/{tid}/stat"))?)?;
        Ok((tid, stat.comm))
    };
    Ok(tids.filter_map(|tid| read(tid).ok()).collect())
}

/// The weight of a VM's scope (cgroup v2), which libvirt creates for each VM: `machine-qemu...scope`, with the processes
/// in a child. Other cgroups are not of a VM, and their weight is shared by all processes in them.
fn read_weight(host: &dyn Host, cgroup: &str) -> Option<u32> {
    let end = cgroup.find(".scope").map(|position| position + ".scope".len())?;
    let scope = cgroup.get(..end)?;
    if !scope.rsplit('/').next()?.starts_with("machine-") {
        return None;
    }
    let text = host.read(&format!("{CGROUP_ROOT}{scope}/cpu.weight")).ok()?;
    let weight: u32 = String::from_utf8_lossy(&text).trim().parse().ok()?;
    Some(weight.clamp(*WEIGHT_RANGE.start(), *WEIGHT_RANGE.end()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_host::fake_host::FakeHost;

    #[test]
    fn weight_is_that_of_the_scope_of_a_machine() {
        let host = FakeHost::booted();
        host.put_file("sys/fs/cgroup/machine.slice/machine-qemu-1-a.scope/cpu.weight", "250\n");
        host.put_file("sys/fs/cgroup/user.slice/session.scope/cpu.weight", "300\n");
        let read = |path| read_weight(&host, path);
        assert_eq!(read("/machine.slice/machine-qemu-1-a.scope/libvirt/emulator"), Some(250));
        assert_eq!((read("/user.slice/session.scope"), read("/system.slice/a.service")), (None, None));
    }
}
