//! `pagefold vcpu gang`: schedules guests of KVM in an emulated machine, and leaves the kernel's own scheduler behind
//! however it ends; refuses a kernel without sched_ext.

use pagefold_labs::gang_machine::{MachineShape, load_figures, machine_rates, run_scenes_on};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const PAGEFOLD_BINARY: &str = env!("CARGO_BIN_EXE_pagefold");
/// The machine takes minutes on a loaded host.
const TIMEOUT: Duration = Duration::from_secs(900);

const SCENES: &str = "
load 2 4 kvm
measure eevdf 150
gang
measure gang 150
say stop
pagefold vcpu gang $targets --keep > /run/second 2>&1
echo \"EXIT second $?\"
sed 's/^/SAID second /' /run/second
state second
echo 0 > /sys/devices/system/cpu/cpu3/online
state offline
echo 1 > /sys/devices/system/cpu/cpu3/online
say go
measure online 50
end_gang end
state end
trial --window 60ms
measure kept 80
state kept
end_gang kept
gang --policy throttled-yield
state throttled
echo 0 > /sys/devices/system/cpu/cpu3/online
measure stranded 120
echo 1 > /sys/devices/system/cpu/cpu3/online
state stranded
kill -9 $gang
removed killed
wait $gang
measure killed 50
gang --stall
removed stalled
say stop
wait_gang stalled
end_load
load 2 4 kvm 40
pin
gang --policy spread
measure pinned 50
state pinned
end_gang pinned
gang
measure pinned-gang 50
end_gang pinned-gang
end_load
load 2 4 kvm
scope 1 300
scope 2 100
targets='--cgroup /machine.slice'
gang
measure cgroup 250
end_gang cgroup
echo '20000 100000' > /sys/fs/cgroup/machine.slice/machine-qemu-1.scope/cpu.max
pagefold vcpu gang $targets --keep > /run/limited 2>&1
echo \"EXIT limited $?\"
sed 's/^/SAID limited /' /run/limited
echo max > /sys/fs/cgroup/machine.slice/machine-qemu-1.scope/cpu.max
set -- $(sed -n 's/^READY //p' /run/out)
targets=\"--pid $1 --pid $2\"
gang --weight $1=50 --weight $2=150
measure weight 250
end_gang weight
end_load
load 2 3 kvm 0 1
allow 7
taskset -p 8 $(pidof hog) > /run/pin
say ext
gang --only-sched-ext
measure partial 100
state partial
end_gang partial
end_load
load 2 4,1 kvm 40
allow 3
gang
handed_over
state handed-over
measure handed-over 50
say stop
returned
state returned
end_gang returned
end_load
";

/// CPUs go offline and come back while vCPUs run, under each policy. An ordinary task is bound to CPU 3.
const HOTPLUG_SCENES: &str = "
online() { echo $2 > /sys/devices/system/cpu/cpu$1/online; }
hog_time() { echo \"HOG $1 $(cut -d ' ' -f 1 /proc/$(pidof hog)/schedstat)\"; }
# Threads of programs that wait without being interruptible. Some threads of the kernel always do.
blocked_threads() { grep -l '^State:.D' $(grep -l '^Kthread:.0' /proc/[0-9]*/task/[0-9]*/status 2> /run/gone) 2> /run/gone; }
for policy in gang spread throttled-yield; do
    load 2 4 kvm 40 1
    taskset -p 8 $(pidof hog) > /run/pin
    gang --policy $policy
    measure $policy-before 80
    hog_time $policy-before
    online 3 0
    measure $policy-three 60
    hog_time $policy-three
    online 3 1
    measure $policy-four 60
    for cpu in 3 2 1; do online $cpu 0; done
    measure $policy-one 150
    hog_time $policy-one
    for cpu in 1 2 3; do online $cpu 1; done
    # CPUs come and go faster than a slot.
    for round in 1 2 3 4; do online 2 0; online 1 0; online 2 1; online 1 1; done
    measure $policy-after 80
    hog_time $policy-after
    state $policy-after
    end_gang $policy
    state $policy-end
    measure $policy-end 50
    end_load
    echo \"LEFT $policy $(pidof gang-load hog pagefold)\"
    echo \"BLOCKED $policy $(blocked_threads)\"
done
";

/// Machines with their memory on one node each: the first and the third on node 0, the others on node 1. First all have a
/// CPU for each vCPU, then twice as many vCPUs as CPUs, then three machines of which two have one home.
const NODE_SCENES: &str = "
for machines in 2 4 3; do
    load $machines 2 threads 40 0 2
    measure eevdf-$machines 150
    for start in 1 2 3; do
        gang
        usleep $((start * 1900))
        measure gang-$machines-$start 150
        end_gang gang-$machines-$start
    done
    end_load
done
load 1 3 threads 40 0 2
gang
measure wide 50
end_gang wide
end_load
";

/// The machine of the scenes: the CPUs 0 and 1 are on one node, 2 and 3 on the other.
const SHAPE: MachineShape = MachineShape { cpus: 4, nodes: 2 };

fn is_kernel_fault(line: &str) -> bool {
    line.starts_with("KERNEL ") && (line.contains("BUG:") || line.contains("WARNING:"))
}

#[test]
fn gangs_run_together_and_the_kernel_takes_over_at_the_end() {
    let output = match run_scenes_on(Path::new(PAGEFOLD_BINARY), SHAPE, SCENES, TIMEOUT) {
        Ok(output) => output,
        Err(why) => {
            println!("skipped: {why}");
            return;
        }
    };
    let has = |line: &str| assert!(output.lines().any(|found| found.trim_end() == line), "no {line}: {output}");
    let says = |part: &str| assert!(output.contains(part), "{part}: {output}");
    for name in ["second", "offline", "kept", "throttled", "stranded", "pinned", "partial", "returned"] {
        has(&format!("STATE {name} enabled pagefold_gang"));
    }
    for name in ["end", "killed", "stalled", "handed-over"] {
        has(&format!("STATE {name} disabled"));
    }
    for (name, status) in
        [("second", 2), ("limited", 2), ("end", 0), ("kept", 0), ("stalled", 1), ("pinned", 0), ("pinned-gang", 0)]
    {
        has(&format!("EXIT {name} {status}"));
    }
    says("SAID second pagefold: another sched_ext scheduler is loaded (pagefold_gang)");
    says("SAID limited pagefold: CPU time is limited for /machine.slice/machine-qemu-1.scope (cpu.max 20000 100000)");
    says("SAID stalled The kernel: runnable task stall");
    // The figures of the kernel's own scheduler vary by a factor of thirty with the start; those of gangs do not.
    let (gang, online) = (load_figures(&output, "gang"), load_figures(&output, "online"));
    assert!(gang.rate > 350_000.0 && gang.corun >= 0.9 && gang.fairness >= 0.95, "{gang:?}: {output}");
    assert!(online.rate > 300_000.0, "the CPU that came back is not used: {online:?}: {output}");
    // Attached for the fifth time in the comparison, it still knows the gangs.
    let kept = load_figures(&output, "kept");
    assert!(kept.rate > 350_000.0 && kept.corun >= 0.9, "{kept:?}: {output}");
    // No vCPU is left in the queue of the CPU that went offline. If pinned, each vCPU may run on one CPU only, and those
    // that spin yield to siblings on other CPUs.
    for name in ["stranded", "pinned", "pinned-gang"] {
        let figures = load_figures(&output, name);
        assert!(figures.rate > 0.0 && figures.idle_vcpus == 0, "{name}: {figures:?}: {output}");
    }
    for name in ["pinned", "pinned-gang"] {
        assert!(load_figures(&output, name).fairness > 0.55, "{name}: {output}");
    }
    // Selected by their cgroup, with its weight or a given one.
    says("SAID cgroup scheduling 2 virtual machines with 8 vCPUs with the policy gang");
    for (name, heavy) in [("cgroup", 0), ("weight", 1)] {
        let rates = machine_rates(&output, name);
        let ratio = rates[heavy] / rates[1 - heavy];
        assert!((2.4..3.6).contains(&ratio), "three times the weight: {name}: {rates:?}: {output}");
    }
    // The kernel runs ordinary tasks before threads with the policy SCHED_EXT. The busy one has a CPU of its own, and the
    // gangs have the other three by their affinity.
    let partial = load_figures(&output, "partial");
    assert!(partial.rate > 200_000.0 && partial.corun >= 0.6 && partial.fairness >= 0.9, "{partial:?}: {output}");
    // Four vCPUs that may use two CPUs cannot run as a whole, and the other machine has a single vCPU.
    says("SAID returned handed over to the kernel's scheduler");
    says("SAID returned The kernel's own scheduler had the virtual machines for ");
    assert_eq!(load_figures(&output, "handed-over").idle_vcpus, 0, "{output}");
    let eevdf = load_figures(&output, "eevdf");
    assert!(gang.corun >= 3.0 * eevdf.corun && gang.rate >= 1.5 * eevdf.rate, "{eevdf:?} {gang:?}");
    assert!(!output.lines().any(is_kernel_fault), "{output}");
}

#[test]
fn cpus_go_and_come_back_while_gangs_run() {
    let output = match run_scenes_on(Path::new(PAGEFOLD_BINARY), SHAPE, HOTPLUG_SCENES, TIMEOUT) {
        Ok(output) => output,
        Err(why) => {
            println!("skipped: {why}");
            return;
        }
    };
    let has = |line: &str| assert!(output.lines().any(|found| found.trim_end() == line), "no {line}: {output}");
    // The nanoseconds on a CPU.
    let hog_time = |name: String| -> u64 {
        let line = output.lines().find_map(|line| line.strip_prefix(&format!("HOG {name} ")));
        line.and_then(|time| time.trim_end().parse().ok()).unwrap_or_else(|| panic!("no HOG {name}: {output}"))
    };
    for policy in ["gang", "spread", "throttled-yield"] {
        // The program stays loaded, ends when it is told to, and leaves the kernel's own scheduler behind.
        has(&format!("STATE {policy}-after enabled pagefold_gang"));
        has(&format!("EXIT {policy} 0"));
        has(&format!("STATE {policy}-end disabled"));
        // No thread hangs: each vCPU works or spins in each measurement, the bound task runs wherever the kernel lets it
        // run, and all programs end.
        for name in ["before", "three", "four", "one", "after", "end"] {
            let figures = load_figures(&output, &format!("{policy}-{name}"));
            assert!(figures.rate > 0.0 && figures.idle_vcpus == 0, "{policy}-{name}: {figures:?}: {output}");
        }
        let times = ["before", "three", "one", "after"].map(|name| hog_time(format!("{policy}-{name}")));
        assert!(times.is_sorted_by(|earlier, later| earlier < later), "{policy}: {times:?}: {output}");
        has(&format!("LEFT {policy}"));
        has(&format!("BLOCKED {policy}"));
    }
    // All four CPUs are used again.
    let [before, after] = ["gang-before", "gang-after"].map(|name| load_figures(&output, name));
    assert!(after.rate > 0.8 * before.rate && after.corun >= 0.6, "{before:?} {after:?}: {output}");
    assert!(!output.lines().any(is_kernel_fault), "{output}");
}

#[test]
fn gangs_run_on_the_node_of_their_memory() {
    let output = match run_scenes_on(Path::new(PAGEFOLD_BINARY), SHAPE, NODE_SCENES, TIMEOUT) {
        Ok(output) => output,
        Err(why) => {
            println!("skipped: {why}");
            return;
        }
    };
    for (machines, least_home_share) in [(2, 0.98), (4, 0.95), (3, 0.75)] {
        println!("{machines} without gangs: {:?}", load_figures(&output, &format!("eevdf-{machines}")));
        // Each start finds the vCPUs on other CPUs, and at another point of the slot.
        for start in 1..=3 {
            let name = format!("gang-{machines}-{start}");
            let figures = load_figures(&output, &name);
            println!("{name}: {figures:?}");
            assert!(figures.home_share >= least_home_share, "{name}: {figures:?}: {output}");
            assert!(figures.corun >= 0.95 && figures.fairness >= 0.95, "{name}: {figures:?}: {output}");
            assert_eq!(home_nodes(&output, &name), &["0", "1", "0", "1"][..machines]);
        }
    }
    // Wider than a node: it has no home.
    assert_eq!(home_nodes(&output, "wide"), ["-"]);
    assert_eq!(load_figures(&output, "wide").idle_vcpus, 0, "{output}");
    assert!(!output.lines().any(is_kernel_fault), "{output}");
}

/// The column `home node` of the table that `vcpu gang` printed at the end.
fn home_nodes(output: &str, name: &str) -> Vec<String> {
    let prefix = format!("SAID {name} ");
    let rows = output.lines().filter_map(|line| line.strip_prefix(&*prefix)?.trim_start().strip_prefix("gang-load "));
    let home = |row: &str| row.split_whitespace().nth(3).unwrap_or_else(|| panic!("no home: {output}")).to_owned();
    rows.map(home).collect()
}

#[test]
fn kernel_without_sched_ext_is_named() {
    if Path::new("/sys/kernel/sched_ext").exists() {
        println!("skipped: this kernel has sched_ext");
        return;
    }
    let output = Command::new(PAGEFOLD_BINARY).args(["vcpu", "gang", "--pid", "1", "--keep"]).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("has no sched_ext: it was built without CONFIG_SCHED_CLASS_EXT"), "{message}");
}

#[test]
fn comparison_needs_a_metric() {
    let output = Command::new(PAGEFOLD_BINARY).args(["vcpu", "gang", "--pid", "1"]).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("--metric COMMAND") && message.contains("--keep"), "{message}");
}

#[test]
fn long_waits_of_ordinary_tasks_are_refused() {
    let arguments = ["vcpu", "gang", "--pid", "1", "--keep", "--slot", "100ms", "--ordinary-share", "5"];
    let output = Command::new(PAGEFOLD_BINARY).args(arguments).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("1000 ms") && message.contains("--ordinary-share 10"), "{message}");
}

#[test]
fn machines_must_be_selected() {
    let output = Command::new(PAGEFOLD_BINARY).args(["vcpu", "gang"]).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("name the virtual machines: --vm GLOB, --pid N or --cgroup PATH"), "{message}");
}
