//! Each rule whose change `tune apply` can make is applied, verified and undone, and killed at each step. The rules are
//! those of the catalog: a new one without a case fails.

#![forbid(unsafe_code)]

#[path = "applied_rules/settings_of_rules.rs"]
mod settings_of_rules;

use pagefold_doctor::decide::audit::rule_summaries;
use pagefold_doctor::decide::change::ApplyMethod;
use pagefold_doctor::decide::{Finding, Scope, Verdict, examine_host, ksm_rule_summaries, process_rule_summaries};
use pagefold_doctor::doctor_facts::{TrustPolicy, gather_host_facts};
use pagefold_host::Host;
use pagefold_host::fake_host::{FakeHost, FakeHostState};
use pagefold_host::faulty_host::FaultyHost;
use pagefold_host::resource::ResourceClass;
use pagefold_host::transaction::Session;
use pagefold_tune::apply::{ApplyScope, apply};
use pagefold_tune::decide::modprobe::MODULE_FILE;
use pagefold_tune::decide::vm::Patch;
use pagefold_tune::decide::{Effect, Proposal, Step, TunePlan, plan};
use pagefold_tune::facts::read_state;
use pagefold_tune::kept::{self, KeptState};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Mutex;

/// An AMD host with two nodes of four CPUs, in good order.
const GOOD: &[(&str, &str)] = &[
    // Without ksmd, processes would count as hidden.
    (
        "proc/6/stat",
        "6 (ksmd) S 2 0 0 0 -1 2097216 0 0 0 0 0 0 0 0 25 5 1 0 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0\n",
    ),
    ("proc/6/cmdline", ""),
    ("proc/6/smaps", ""),
    ("proc/6/status", "Uid:\t0\t0\t0\t0\n"),
    ("proc/cmdline", "BOOT_IMAGE=/vmlinuz quiet\n"),
    ("proc/cpuinfo", "flags\t\t: fpu tsc svm npt x2avic pausefilter constant_tsc nonstop_tsc\n"),
    ("proc/sys/kernel/io_uring_disabled", "0\n"),
    ("proc/uptime", "5000.00 9000.00\n"),
    ("proc/sys/kernel/numa_balancing", "1\n"),
    ("proc/sys/kernel/sched_autogroup_enabled", "0\n"),
    ("proc/sys/vm/zone_reclaim_mode", "0\n"),
    ("sys/block/nvme0n1/queue/scheduler", "[none] mq-deadline kyber \n"),
    ("sys/block/nvme1n1/queue/scheduler", "[none] mq-deadline kyber \n"),
    ("sys/devices/system/clocksource/clocksource0/available_clocksource", "tsc hpet acpi_pm \n"),
    ("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n"),
    ("sys/devices/system/cpu/cpu0/cpuidle/state1/disable", "0\n"),
    ("sys/devices/system/cpu/cpu0/cpuidle/state1/latency", "2\n"),
    ("sys/devices/system/cpu/cpu0/cpuidle/state1/name", "C1\n"),
    ("sys/devices/system/cpu/cpu1/cpuidle/state1/disable", "0\n"),
    ("sys/devices/system/cpu/cpu1/cpuidle/state1/latency", "2\n"),
    ("sys/devices/system/cpu/cpu1/cpuidle/state1/name", "C1\n"),
    ("sys/devices/system/cpu/cpufreq/policy0/scaling_available_governors", "performance schedutil \n"),
    ("sys/devices/system/cpu/cpufreq/policy0/scaling_governor", "performance\n"),
    ("sys/devices/system/cpu/cpufreq/policy4/scaling_available_governors", "performance schedutil \n"),
    ("sys/devices/system/cpu/cpufreq/policy4/scaling_governor", "performance\n"),
    ("sys/devices/system/cpu/online", "0-7\n"),
    ("sys/devices/system/cpu/smt/control", "off\n"),
    ("sys/devices/system/cpu/vulnerabilities/itlb_multihit", "Not affected\n"),
    ("sys/devices/system/cpu/vulnerabilities/l1tf", "Not affected\n"),
    ("sys/devices/system/cpu/vulnerabilities/mds", "Not affected\n"),
    ("sys/devices/system/node/node0/cpulist", "0-3\n"),
    ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:       67108864 kB\n"),
    ("sys/devices/system/node/node1/cpulist", "4-7\n"),
    ("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal:       67108864 kB\n"),
    ("sys/fs/cgroup/cgroup.controllers", "cpu memory\n"),
    ("sys/kernel/debug/kvm/nested_run", "0\n"),
    ("sys/kernel/debug/sched/base_slice_ns", "2800000\n"),
    ("sys/kernel/debug/sched/preempt", "none (voluntary) full lazy\n"),
    ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
    ("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [advise] never deny force\n"),
    ("sys/module/kvm/parameters/halt_poll_ns", "200000\n"),
    ("sys/module/kvm/parameters/halt_poll_ns.mode", "644\n"),
    ("sys/module/kvm/parameters/nx_huge_pages", "N\n"),
    ("sys/module/kvm/parameters/nx_huge_pages.mode", "644\n"),
    ("sys/module/kvm/parameters/tdp_mmu", "Y\n"),
    ("sys/module/kvm/parameters/tdp_mmu.mode", "444\n"),
    ("sys/module/kvm/refcnt", "1\n"),
    ("sys/module/kvm_amd/parameters/avic", "Y\n"),
    ("sys/module/kvm_amd/parameters/nested", "0\n"),
    ("sys/module/kvm_amd/parameters/npt", "Y\n"),
    ("sys/module/kvm_amd/parameters/pause_filter_count", "3000\n"),
    ("sys/module/kvm_amd/parameters/pause_filter_count_grow", "2\n"),
    ("sys/module/kvm_amd/parameters/pause_filter_count_shrink", "0\n"),
    ("sys/module/kvm_amd/parameters/pause_filter_thresh", "128\n"),
    ("sys/module/kvm_amd/refcnt", "0\n"),
];

/// What `tune apply` does with the change of a rule.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Expected {
    /// It makes it.
    Made,
    /// It refuses it; a part of the reason.
    Refused(&'static str),
    /// The rule names commands, and leaves the change to the operator.
    LeftToOperator,
}
use Expected::{LeftToOperator, Made, Refused};

/// A host on which a rule warns or fails.
struct Case {
    rule: &'static str,
    /// Files that differ from [`GOOD`].
    files: &'static [(&'static str, &'static str)],
    /// The virtual machine, if one runs.
    machine: Option<Machine>,
    expected: Expected,
}

/// The virtual machine `web` of libvirt.
#[derive(Clone, Copy)]
struct Machine {
    /// Options of QEMU.
    options: &'static str,
    /// The CPUs on which each virtual CPU may run.
    vcpus: &'static [&'static str],
    /// The parts of its definition beside name, UUID, memory and CPUs.
    xml: &'static str,
}

const fn host_case(rule: &'static str, files: &'static [(&'static str, &'static str)]) -> Case {
    Case { rule, files, machine: None, expected: Made }
}

const TWO_VCPUS: &[&str] = &["0-7", "0-7"];
const IDLE_MACHINE: Machine = Machine { options: "-accel kvm -cpu host", vcpus: TWO_VCPUS, xml: "" };

const fn machine_case(rule: &'static str, options: &'static str, xml: &'static str) -> Case {
    Case { rule, files: &[], machine: Some(Machine { options, vcpus: TWO_VCPUS, xml }), expected: Made }
}

const DISK: &str = "<devices>\n    <disk type='file' device='disk'>\n      <target dev='vda' bus='virtio'/>\n    </disk>\n  </devices>";
const NETWORK: &str = "<devices>\n    <interface type='bridge'>\n      <target dev='n'/>\n      <model type='virtio'/>\n    </interface>\n  </devices>";

/// Rules about KSM that name commands, beside those of [`CASES`].
const KSM_RULES_LEFT_TO_OPERATOR: [&str; 8] = [
    "ksm-advisor-pace",
    "ksm-advisor-writer",
    "ksm-opt-out",
    "ksm-pace",
    "ksm-sharing-limit",
    "ksm-smart-scan",
    "ksm-zero-pages",
    "ksmd-cpu",
];

/// Three nodes, whose pages are merged with each other.
const THREE_NODES: (&str, &str) = ("sys/devices/system/node/has_memory", "0-2\n");

const CASES: &[Case] = &[
    // Of one trust domain.
    Case { machine: Some(IDLE_MACHINE), ..host_case("ksm-run", &[("sys/kernel/mm/ksm/run", "0\n")]) },
    // Nothing is enrolled.
    host_case("ksm-run", &[("sys/kernel/mm/ksm/run", "0\n")]),
    Case {
        machine: Some(IDLE_MACHINE),
        expected: LeftToOperator,
        ..host_case(
            "ksm-run",
            &[
                ("proc/8/stat", OTHER_STAT),
                ("proc/8/cmdline", "qemu-system-x86_64\0-name\0guest=db\0"),
                ("proc/8/smaps", SMAPS),
                ("proc/8/status", "Uid:\t0\t0\t0\t0\n"),
            ],
        )
    },
    Case {
        machine: Some(IDLE_MACHINE),
        ..host_case("ksm-nodes", &[THREE_NODES, ("sys/kernel/mm/ksm/pages_shared", "0\n")])
    },
    Case {
        machine: Some(IDLE_MACHINE),
        expected: Refused("copies of 7 merged pages have room in available memory: `echo 2 >"),
        ..host_case("ksm-nodes", MERGED_PAGES)
    },
    Case {
        machine: Some(IDLE_MACHINE),
        expected: Refused("copies of 9000000000 merged pages need more than the available memory"),
        ..host_case(
            "ksm-nodes",
            &[
                THREE_NODES,
                ("sys/kernel/mm/ksm/pages_shared", "2\n"),
                ("sys/kernel/mm/ksm/pages_sharing", "9000000000\n"),
            ],
        )
    },
    host_case("kvm-ept", &[("sys/module/kvm_amd/parameters/npt", "N\n")]),
    host_case(
        "kvm-ple",
        &[
            ("sys/module/kvm_amd/parameters/pause_filter_count", "100\n"),
            ("sys/module/kvm_amd/parameters/pause_filter_thresh", "1\n"),
        ],
    ),
    host_case("kvm-halt-poll", &[("sys/module/kvm/parameters/halt_poll_ns", "400000\n")]),
    host_case("kvm-nx-huge-pages", &[("sys/module/kvm/parameters/nx_huge_pages", "Y\n")]),
    host_case("kvm-nx-huge-pages", &[("sys/devices/system/cpu/vulnerabilities/itlb_multihit", "KVM: Vulnerable\n")]),
    host_case("kvm-apicv", &[("sys/module/kvm_amd/parameters/avic", "N\n")]),
    Case {
        expected: Refused("does not load kvm again"),
        ..host_case("kvm-tdp-mmu", &[("sys/module/kvm/parameters/tdp_mmu", "N\n")])
    },
    Case {
        // Under emulation, so that the module of KVM is not in use.
        machine: Some(Machine { options: "-accel tcg", ..IDLE_MACHINE }),
        ..host_case("kvm-nested", &[("sys/module/kvm_amd/parameters/nested", "1\n")])
    },
    Case {
        machine: Some(IDLE_MACHINE),
        expected: Refused("in use"),
        ..host_case(
            "kvm-nested",
            &[("sys/module/kvm_amd/parameters/nested", "1\n"), ("sys/module/kvm_amd/refcnt", "1\n")],
        )
    },
    host_case("host-clocksource", &[("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n")]),
    host_case(
        "cpu-governor",
        &[
            ("sys/devices/system/cpu/cpufreq/policy0/scaling_governor", "schedutil\n"),
            ("sys/devices/system/cpu/cpufreq/policy4/scaling_governor", "schedutil\n"),
        ],
    ),
    host_case(
        "cpu-idle-states",
        &[
            ("sys/devices/system/cpu/cpu0/cpuidle/state1/latency", "890\n"),
            ("sys/devices/system/cpu/cpu1/cpuidle/state1/latency", "890\n"),
        ],
    ),
    Case {
        machine: Some(IDLE_MACHINE),
        files: &[
            ("proc/8/stat", OTHER_STAT),
            ("proc/8/cmdline", "qemu-system-x86_64\0-name\0guest=db\0"),
            ("proc/8/smaps", SMAPS),
            ("proc/8/status", "Uid:\t0\t0\t0\t0\n"),
            ("sys/devices/system/cpu/smt/control", "on\n"),
            ("sys/devices/system/cpu/vulnerabilities/mds", "Mitigation: Clear CPU buffers; SMT vulnerable\n"),
        ],
        rule: "smt-control",
        expected: LeftToOperator,
    },
    Case { machine: Some(IDLE_MACHINE), ..host_case("numa-balancing", &[("proc/sys/kernel/numa_balancing", "0\n")]) },
    // All of its memory is on node 0, where its virtual CPUs are.
    Case { machine: Some(Machine { vcpus: &["0-3", "0-3"], ..IDLE_MACHINE }), ..host_case("numa-balancing", &[]) },
    // Its memory is on the other node.
    Case {
        machine: Some(Machine { vcpus: &["4-7", "4-7"], ..IDLE_MACHINE }),
        ..host_case("numa-balancing", &[("proc/sys/kernel/numa_balancing", "0\n")])
    },
    host_case("zone-reclaim", &[("proc/sys/vm/zone_reclaim_mode", "1\n")]),
    host_case("thp-guest-ram", &[("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")]),
    Case {
        machine: Some(Machine { options: "-accel kvm -object memory-backend-memfd,id=m,size=1G", ..IDLE_MACHINE }),
        ..host_case(
            "thp-shared-memory",
            &[("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force\n")],
        )
    },
    Case {
        machine: Some(IDLE_MACHINE),
        ..host_case(
            "sched-autogroup",
            &[("proc/sys/kernel/sched_autogroup_enabled", "1\n"), ("proc/7/cgroup", "0::/\n")],
        )
    },
    Case {
        machine: Some(Machine { vcpus: &["0-1", "0-1", "0-1"], ..IDLE_MACHINE }),
        ..host_case(
            "sched-base-slice",
            &[("sys/devices/system/cpu/online", "0-1\n"), ("sys/kernel/debug/sched/base_slice_ns", "700000\n")],
        )
    },
    Case {
        machine: Some(Machine { vcpus: &["0-1", "0-1", "0-1"], ..IDLE_MACHINE }),
        ..host_case(
            "preemption-model",
            &[
                ("sys/devices/system/cpu/online", "0-1\n"),
                ("sys/kernel/debug/sched/preempt", "none voluntary (full) lazy\n"),
            ],
        )
    },
    host_case(
        "nvme-scheduler",
        &[
            ("sys/block/nvme0n1/queue/scheduler", "none [mq-deadline] kyber \n"),
            ("sys/block/nvme1n1/queue/scheduler", "none mq-deadline [kyber] \n"),
        ],
    ),
    Case {
        machine: Some(Machine { options: "-accel kvm -drive file=a,if=virtio,id=a,aio=io_uring", ..IDLE_MACHINE }),
        ..host_case("io-uring", &[("proc/sys/kernel/io_uring_disabled", "2\n")])
    },
    Case {
        machine: Some(IDLE_MACHINE),
        expected: LeftToOperator,
        ..host_case(
            "vm-cpu-throttled",
            &[
                ("proc/7/cgroup", "0::/vm\n"),
                ("sys/fs/cgroup/vm/cpu.max", "10000 100000\n"),
                ("sys/fs/cgroup/vm/cpu.stat", "nr_periods 100\nnr_throttled 80\n"),
            ],
        )
    },
    Case {
        machine: Some(Machine { vcpus: &["2", "2"], ..IDLE_MACHINE }),
        expected: LeftToOperator,
        ..host_case("vm-stacked-vcpus", &[])
    },
    machine_case(
        "vm-cpu-model",
        "-accel kvm -cpu qemu64",
        "<cpu mode='custom' match='exact'>\n    <model>qemu64</model>\n  </cpu>",
    ),
    Case {
        machine: Some(Machine { options: "-accel kvm -cpu host -m 1G", vcpus: &["0-7"; 6], xml: "" }),
        ..machine_case("vm-virtual-nodes", "", "")
    },
    Case {
        files: &[("sys/kernel/mm/ksm/run", "1\n")],
        ..machine_case(
            "vm-mergeable-memory",
            "-accel kvm -object memory-backend-memfd,id=m,size=1G",
            "<memoryBacking>\n    <source type='memfd'/>\n    <access mode='shared'/>\n  </memoryBacking>",
        )
    },
    Case {
        files: &[("sys/kernel/mm/ksm/run", "1\n")],
        expected: LeftToOperator,
        ..machine_case(
            "vm-mergeable-memory",
            "-accel kvm -mem-path /dev/hugepages",
            "<memoryBacking>\n    <hugepages/>\n  </memoryBacking>",
        )
    },
    Case {
        files: &[("sys/kernel/mm/ksm/run", "1\n")],
        expected: Refused("its owner forbids merging"),
        ..machine_case(
            "vm-mergeable-memory",
            "-accel kvm -object memory-backend-memfd,id=m,size=1G",
            "<memoryBacking>\n    <nosharepages/>\n  </memoryBacking>",
        )
    },
    machine_case("vm-hyperv", "-accel kvm -cpu host -rtc base=localtime", "<clock offset='localtime'/>"),
    machine_case(
        "vm-pv-features",
        "-accel kvm -cpu host,kvm-pv-eoi=off",
        "<features>\n    <apic eoi='off'/>\n  </features>",
    ),
    machine_case(
        "vm-dedicated-hint",
        "-accel kvm -cpu host,kvm-hint-dedicated=on",
        "<features>\n    <kvm>\n      <hint-dedicated state='on'/>\n    </kvm>\n  </features>",
    ),
    Case {
        expected: Refused("libvirt has no element"),
        ..machine_case("vm-cpu-pm", "-accel kvm -overcommit cpu-pm=on", "")
    },
    machine_case(
        "vm-clock",
        "-accel kvm -cpu host,kvmclock=off",
        "<clock offset='utc'>\n    <timer name='kvmclock' present='no'/>\n  </clock>",
    ),
    machine_case(
        "vm-iothreads",
        "-accel kvm -drive file=a,if=none,id=d,cache=none,aio=native -device virtio-blk-pci,drive=d,id=virtio-disk0",
        DISK,
    ),
    machine_case("vm-disk-cache", "-accel kvm -drive file=a,if=virtio,id=vda", DISK),
    machine_case("vm-vhost-net", "-accel kvm -netdev tap,id=n -device virtio-net-pci,netdev=n", NETWORK),
    Case {
        machine: Some(Machine {
            options: "-accel kvm -netdev tap,id=n,vhost=on -device virtio-net-pci,netdev=n",
            vcpus: &["0-7"; 4],
            xml: NETWORK,
        }),
        ..machine_case("vm-queues", "", "")
    },
];

const MERGED_PAGES: &[(&str, &str)] =
    &[THREE_NODES, ("sys/kernel/mm/ksm/pages_shared", "2\n"), ("sys/kernel/mm/ksm/pages_sharing", "7\n")];

/// Of the process of another virtual machine.
const OTHER_STAT: &str =
    "8 (qemu-system-x86) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0\n";

const SMAPS: &str = "7f0000000000-7f0000001000 rw-p 00000000 00:00 0\nRss: 4 kB\nAnonymous: 4 kB\nVmFlags: rd wr mg\n";

fn stat(pid: usize, name: &str) -> String {
    let zeros = |count| "0 ".repeat(count);
    format!("{pid} ({name}) S 1 1 1 0 -1 0 {}20 0 1 0 1 {}0 0 0 0\n", zeros(8), zeros(16))
}

fn put_machine(host: &FakeHost, machine: &Machine) {
    const UUID: &str = "c7a5fdbd-cdaf-9455-926a-d65c16db1809";
    let count = machine.vcpus.len();
    let command = format!("qemu-system-x86_64 -name guest=web,debug-threads=on -smp {count} {}", machine.options);
    host.put_file("proc/7/cmdline", &(command.split_whitespace().collect::<Vec<_>>().join("\0") + "\0"));
    host.put_file("proc/7/status", "Uid:\t0\t0\t0\t0\n");
    host.put_file("proc/7/stat", &stat(7, "qemu-system-x86"));
    host.put_file("proc/7/smaps", SMAPS);
    host.put_file("proc/7/numa_maps", "7f0000000000 default anon=1 dirty=1 N0=1 kernelpagesize_kB=4\n");
    host.put_file("proc/7/ksm_merging_pages", "0\n");
    host.put_file("proc/7/cgroup", "0::/machine.slice/web\n");
    for (vcpu, cpus) in machine.vcpus.iter().enumerate() {
        let tid = 70 + vcpu;
        host.put_file(&format!("proc/7/task/{tid}/stat"), &stat(tid, &format!("CPU {vcpu}/KVM")));
        host.put_file(&format!("proc/7/task/{tid}/status"), &format!("Cpus_allowed_list:\t{cpus}\n"));
    }
    let xml = machine.xml;
    let domain = format!(
        "<domain type='kvm'>\n  <name>web</name>\n  <uuid>{UUID}</uuid>\n  <memory unit='KiB'>1048576</memory>\n  \
         <vcpu placement='static'>{count}</vcpu>\n  {xml}\n</domain>\n"
    );
    host.put_file("run/libvirt/qemu/web.xml", &format!("<domstatus state='running' pid='7'>{domain}</domstatus>"));
    host.put_file("etc/libvirt/qemu/web.xml", &domain);
}

fn host_of(case: &Case) -> FakeHost {
    let host = FakeHost::booted();
    GOOD.iter().for_each(|(path, text)| host.put_file(path, text));
    case.machine.iter().for_each(|machine| put_machine(&host, machine));
    case.files.iter().for_each(|(path, text)| host.put_file(path, text));
    host
}

fn finding_of(host: &dyn Host, rule: &str) -> Finding {
    let findings = examine_host(&gather_host_facts(host, &[], &TrustPolicy::default()));
    let of_rule = findings.into_iter().filter(|finding| finding.rule == rule);
    of_rule.max_by_key(|finding| finding.verdict).unwrap_or_else(|| panic!("no finding of {rule}"))
}

/// The plan for a rule that the operator names.
fn plan_of(host: &dyn Host, finding: &Finding) -> TunePlan {
    let proposals = Proposal::from_findings(std::slice::from_ref(finding), &[finding.rule.to_owned()]);
    let changes: Vec<_> = proposals.iter().flat_map(|proposal| &proposal.changes).collect();
    let facts = gather_host_facts(host, &[], &TrustPolicy::default());
    plan(&proposals, None, &read_state(host, &facts, &changes, &[]))
}

/// The methods that `tune apply` can carry out: machines are defined anew on request.
fn is_applicable(method: ApplyMethod) -> bool {
    matches!(method, ApplyMethod::Live | ApplyMethod::ModuleReload | ApplyMethod::VmRestart)
}

#[test]
fn each_rule_that_can_be_applied_has_a_case() {
    let summaries = rule_summaries().into_iter().chain(ksm_rule_summaries());
    let rules: BTreeSet<&str> =
        summaries.filter(|rule| is_applicable(rule.details.method)).map(|rule| rule.id).collect();
    let tested: BTreeSet<&str> = CASES.iter().map(|case| case.rule).chain(KSM_RULES_LEFT_TO_OPERATOR).collect();
    assert_eq!(rules, tested, "the catalog, and the cases of this test");
    let made: BTreeSet<&str> = CASES.iter().filter(|case| case.expected == Made).map(|case| case.rule).collect();
    let not_made: Vec<&&str> = rules.difference(&made).collect();
    // A rule joins this list only with the reason in its case, or in the document.
    let expected: BTreeSet<&str> = ["kvm-tdp-mmu", "smt-control", "vm-cpu-pm", "vm-cpu-throttled", "vm-stacked-vcpus"]
        .into_iter()
        .chain(KSM_RULES_LEFT_TO_OPERATOR)
        .collect();
    assert_eq!(not_made, expected.iter().collect::<Vec<_>>());
}

#[test]
fn document_names_each_live_rule_that_is_left_to_the_operator() {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/settings.md");
    let document = fs::read_to_string(document).unwrap();
    let (_, table) = document.split_once("| findings | why |\n|---|---|\n").unwrap();
    let table = table.split_once("\n\n").unwrap().0;
    let named: Vec<&str> = table.lines().flat_map(|row| row.split('|').nth(1).unwrap().split('`')).collect();
    let is_named = |rule: &str| {
        named.iter().any(|name| rule == *name || name.strip_suffix('*').is_some_and(|start| rule.starts_with(start)))
    };
    let made: BTreeSet<&str> = CASES.iter().filter(|case| case.expected == Made).map(|case| case.rule).collect();
    let all = rule_summaries().into_iter().chain(ksm_rule_summaries()).chain(process_rule_summaries());
    for rule in all.filter(|rule| rule.details.method == ApplyMethod::Live) {
        assert_ne!(is_named(rule.id), made.contains(rule.id), "{}", rule.id);
    }
}

/// The kernel reads 2 after all pages were unmerged; writing 2 would unmerge all pages again.
#[test]
fn ksmd_that_was_stopped_by_unmerging_is_stopped_again_by_undo() {
    let (host, directory) = (host_of(&CASES[0]), tempfile::tempdir().unwrap());
    host.put_file("sys/kernel/mm/ksm/run", "2\n");
    let plan = plan_of(&host, &finding_of(&host, "ksm-run"));
    assert_eq!(apply(&host, directory.path(), &plan, ApplyScope::Live).unwrap().done, [0]);
    assert_eq!(host.setting_value("run"), "1");
    assert_eq!(kept::undo(&host, directory.path()).failed, []);
    assert_eq!(host.setting_value("run"), "0");
}

/// Once pages are merged again, the kernel takes no other value (EBUSY): mm/ksm.c, `merge_across_nodes_store`.
#[test]
fn undo_that_the_kernel_refuses_for_now_is_retried() {
    let case = CASES.iter().find(|case| case.rule == "ksm-nodes").unwrap();
    let (host, directory) = (host_of(case), tempfile::tempdir().unwrap());
    host.put_setting("run", "0");
    let before = host.state();
    let findings = examine_host(&gather_host_facts(&host, &[], &TrustPolicy::default()));
    let pair: Vec<Finding> =
        findings.into_iter().filter(|finding| ["ksm-run", "ksm-nodes"].contains(&finding.rule)).collect();
    let proposals = Proposal::from_findings(&pair, &[]);
    let changes: Vec<_> = proposals.iter().flat_map(|proposal| &proposal.changes).collect();
    let facts = gather_host_facts(&host, &[], &TrustPolicy::default());
    let plan = plan(&proposals, None, &read_state(&host, &facts, &changes, &[]));
    assert_eq!(plan.steps.iter().map(Step::rules).collect::<Vec<_>>(), ["ksm-nodes", "ksm-run"]);
    let applied = apply(&host, directory.path(), &plan, ApplyScope::Live).unwrap();
    assert_eq!((applied.done, applied.failed), (vec![0, 1], Vec::new()));
    assert_eq!((host.setting_value("run"), host.setting_value("merge_across_nodes")), ("1".to_owned(), "0".to_owned()));

    // ksmd has merged pages meanwhile. It is stopped, and the other value stays recorded.
    host.put_setting("pages_shared", "2");
    for attempt in 0..2 {
        let failed = match attempt {
            0 => kept::undo(&host, directory.path()).failed,
            _ => Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap().2,
        };
        let [failed] = &failed[..] else { panic!("{failed:?}") };
        assert!(
            failed.will_retry && failed.why.contains("unmerge --all") && failed.why.contains("recover"),
            "{failed:?}"
        );
        assert_eq!(host.setting_value("run"), "0");
        assert_eq!(host.setting_value("merge_across_nodes"), "0");
    }
    // Writing 2 to `run` unmerges all pages.
    host.put_setting("pages_shared", "0");
    host.put_setting("run", "2");
    recover(&host, directory.path());
    host.put_setting("run", "0");
    assert_eq!(host.setting_value("merge_across_nodes"), "1");
    assert_eq!(host.setting_values(), FakeHost::from_state(&before).setting_values());
    assert_eq!(kept::undo(&host, directory.path()).failed, []);
}

#[test]
fn changes_are_applied_verified_and_undone_byte_for_byte() {
    for case in CASES {
        for module_file in [None, Some("# mine\noptions kvm-amd vls=1\noptions snd slots=x\n")] {
            let (host, directory) = (host_of(case), tempfile::tempdir().unwrap());
            module_file.iter().for_each(|text| host.put_file(MODULE_FILE, text));
            apply_and_undo(case, &host, directory.path());
        }
    }
}

fn apply_and_undo(case: &Case, host: &FakeHost, directory: &Path) {
    let before = host.state();
    let finding = finding_of(host, case.rule);
    assert!(matches!(finding.verdict, Verdict::Warn | Verdict::Fail), "{}: {finding:?}", case.rule);
    assert!(!finding.remedy.is_empty(), "{finding:?}");
    let plan = plan_of(host, &finding);
    match case.expected {
        LeftToOperator => return assert_eq!(finding.changes, [], "{finding:?}"),
        Refused(reason) => {
            assert_eq!(plan.steps, [], "{}", case.rule);
            assert!(!plan.refusals.is_empty(), "{}", case.rule);
            assert!(plan.refusals.iter().all(|refusal| refusal.why.contains(reason)), "{:?}", plan.refusals);
            return;
        }
        Made => assert!(!plan.steps.is_empty() && plan.refusals.is_empty(), "{finding:?}: {plan:?}"),
    }
    let applied = apply(host, directory, &plan, ApplyScope::HostAndDefinitions).unwrap();
    assert_eq!((applied.done.len(), applied.failed), (plan.steps.len(), Vec::new()), "{}", case.rule);
    assert_ne!(host.state(), before, "{}", case.rule);

    let kept = kept::load(host, directory).unwrap();
    assert!(!kept.is_empty() && kept.iter().all(|kept| kept.state == KeptState::InForce), "{}: {kept:?}", case.rule);
    let after = finding_of(host, case.rule);
    // A definition takes effect when the machine starts again; nothing is left to be changed in it.
    let is_definition = after.details.method == ApplyMethod::VmRestart;
    assert!(is_definition || after.verdict == Verdict::Ok, "{after:?}");
    let again = plan_of(host, &after);
    assert_eq!((again.steps, again.refusals), (Vec::new(), Vec::new()), "{}", case.rule);

    let undone = kept::undo(host, directory);
    assert_eq!((undone.done.len(), undone.failed), (kept.len(), Vec::new()), "{}", case.rule);
    assert_eq!(host.state(), before, "{}", case.rule);
    assert_eq!(kept::load(host, directory).unwrap(), [], "{}", case.rule);
}

/// The findings of a rule once the machine has started with the tuned definition.
fn findings_after_restart(case: &Case, patch: &Patch) -> Vec<Finding> {
    let host = host_of(case);
    match patch {
        Patch::Libvirt { after, .. } => {
            // The domain does not run.
            host.remove_process(7);
            host.put_file("run/libvirt/qemu/web.xml", "");
            host.put_file("etc/libvirt/qemu/web.xml", after);
        }
        Patch::Arguments { after, .. } => host.put_file("proc/7/cmdline", &(after.join("\0") + "\0")),
    }
    let findings = examine_host(&gather_host_facts(&host, &[], &TrustPolicy::default()));
    let is_idle = |finding: &Finding| matches!(finding.scope, Scope::IdleDomain(_));
    let is_libvirt = matches!(patch, Patch::Libvirt { .. });
    findings.into_iter().filter(|finding| finding.rule == case.rule && is_idle(finding) == is_libvirt).collect()
}

#[test]
fn tuned_definitions_resolve_the_finding() {
    let of_definition = |case: &&Case| {
        let mut summaries = rule_summaries().into_iter();
        let method = summaries.find(|rule| rule.id == case.rule).map(|rule| rule.details.method);
        case.expected == Made && method == Some(ApplyMethod::VmRestart)
    };
    let mut rules = BTreeSet::new();
    for case in CASES.iter().filter(of_definition) {
        rules.insert(case.rule);
        for is_of_libvirt in [true, false] {
            let host = host_of(case);
            if !is_of_libvirt {
                host.put_file("run/libvirt/qemu/web.xml", "");
            }
            let findings = examine_host(&gather_host_facts(&host, &[], &TrustPolicy::default()));
            let of_running = |finding: &&Finding| finding.rule == case.rule && !finding.changes.is_empty();
            let plan = plan_of(&host, findings.iter().find(of_running).unwrap());
            let [Step { effect: Effect::Machine { patch, .. }, .. }] = &plan.steps[..] else {
                panic!("{}: {plan:?}", case.rule)
            };
            assert_eq!(matches!(patch, Patch::Libvirt { .. }), is_of_libvirt);
            let findings = findings_after_restart(case, patch);
            // A rule about the use of an option does not apply once it is off.
            let is_resolved = |finding: &Finding| matches!(finding.verdict, Verdict::Ok | Verdict::NotApplicable);
            // The rule about dedicated CPUs needs threads, which a domain that does not run lacks.
            let has_finding = !is_of_libvirt || case.rule != "vm-dedicated-hint";
            assert_eq!(!findings.is_empty(), has_finding, "{}", case.rule);
            assert!(findings.iter().all(is_resolved), "{}: {findings:?}", case.rule);
        }
    }
    assert!(rules.len() >= 10 && rules.contains("vm-virtual-nodes"), "{rules:?}");
}

/// The host and the files of the journals at one moment.
#[derive(Clone, PartialEq)]
struct Moment {
    host: FakeHostState,
    journals: BTreeMap<String, Vec<u8>>,
}

impl Moment {
    fn read(host: &FakeHost, directory: &Path) -> Self {
        let read = |entry: fs::DirEntry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap());
        let entries = fs::read_dir(directory).unwrap().map(|entry| read(entry.unwrap()));
        let journals = entries.filter(|(name, _)| name.ends_with(".json")).collect();
        Self { host: host.state(), journals }
    }

    fn has_kept_changes(&self) -> bool {
        ResourceClass::ALL.iter().any(|class| self.journals.contains_key(class.kept_changes_file()))
    }

    /// The state of the host and of the directory after a kill at this moment.
    fn restore(&self) -> (FakeHost, tempfile::TempDir) {
        let directory = tempfile::tempdir().unwrap();
        self.journals.iter().for_each(|(name, bytes)| fs::write(directory.path().join(name), bytes).unwrap());
        (FakeHost::from_state(&self.host), directory)
    }
}

/// All moments of some work, at each call to the host and between the files of the journals that change without one.
fn moments(
    host: &FakeHost,
    directory: &Path,
    file_order: &[&'static str],
    work: impl FnOnce(&dyn Host),
) -> Vec<Moment> {
    let seen = Mutex::new(Vec::new());
    let note = || {
        let moment = Moment::read(host, directory);
        let mut seen = seen.lock().unwrap();
        if seen.last() != Some(&moment) {
            seen.push(moment);
        }
    };
    work(&FaultyHost::new(host, |_: &str| {
        note();
        None
    }));
    note();
    let seen = seen.into_inner().unwrap();
    let mut all = vec![seen[0].clone()];
    for pair in seen.windows(2) {
        // A call to the host changes it first; the journals are written between two calls.
        let mut moment = Moment { host: pair[1].host.clone(), journals: pair[0].journals.clone() };
        if all.last() != Some(&moment) {
            all.push(moment.clone());
        }
        for file in file_order {
            match pair[1].journals.get(*file) {
                Some(bytes) => _ = moment.journals.insert((*file).to_owned(), bytes.clone()),
                None => _ = moment.journals.remove(*file),
            }
            if all.last() != Some(&moment) {
                all.push(moment.clone());
            }
        }
        if all.last() != Some(&pair[1]) {
            all.push(pair[1].clone());
        }
    }
    all
}

/// As `pagefold recover`.
fn recover(host: &dyn Host, directory: &Path) {
    for class in ResourceClass::ALL {
        let (_, _, failed) = Session::begin(host, directory, class).unwrap();
        assert_eq!(failed, []);
    }
}

#[test]
fn kill_at_each_step_of_apply_is_recovered() {
    let mut kills = 0;
    for case in CASES.iter().filter(|case| case.expected == Made) {
        let (host, directory) = (host_of(case), tempfile::tempdir().unwrap());
        host.put_file(MODULE_FILE, "# mine\noptions kvm_amd vls=1\n");
        let before = host.state();
        let plan = plan_of(&host, &finding_of(&host, case.rule));
        // The classes keep their changes last class first; each stores the kept changes, and then empties its journal.
        let order: Vec<&str> = ResourceClass::ALL
            .iter()
            .rev()
            .flat_map(|class| [class.kept_changes_file(), class.journal_file()])
            .collect();
        let moments = moments(&host, directory.path(), &order, |host| {
            let applied = apply(host, directory.path(), &plan, ApplyScope::HostAndDefinitions).unwrap();
            assert_eq!(applied.failed, [], "{}", case.rule);
        });
        let after = host.state();
        assert!(moments.len() >= 4, "{}: {}", case.rule, moments.len());
        assert!(moments.iter().any(|moment| moment.host != before && !moment.has_kept_changes()), "{}", case.rule);
        for (step, moment) in moments.iter().enumerate() {
            let (host, directory) = moment.restore();
            recover(&host, directory.path());
            if !moment.has_kept_changes() {
                assert!(host.state() == before, "{}, step {step}: not recovered", case.rule);
            }
            let undone = kept::undo(&host, directory.path());
            assert_eq!(undone.failed, [], "{}, step {step}", case.rule);
            assert!(host.state() == before, "{}, step {step}: not undone", case.rule);
            kills += 1;
        }
        let (host, directory) = moments.last().unwrap().restore();
        recover(&host, directory.path());
        assert!(host.state() == after, "{}: a finished change stays", case.rule);
    }
    println!("{kills} kills of apply");
}

#[test]
fn kill_at_each_step_of_undo_is_recovered() {
    let mut kills = 0;
    for case in CASES.iter().filter(|case| case.expected == Made) {
        let (host, directory) = (host_of(case), tempfile::tempdir().unwrap());
        let before = host.state();
        let plan = plan_of(&host, &finding_of(&host, case.rule));
        apply(&host, directory.path(), &plan, ApplyScope::HostAndDefinitions).unwrap();
        // An undo moves the kept changes to the journal, and then removes them.
        let order: Vec<&str> = ResourceClass::ALL
            .iter()
            .rev()
            .flat_map(|class| [class.journal_file(), class.kept_changes_file()])
            .collect();
        let moments = moments(&host, directory.path(), &order, |host| {
            assert_eq!(kept::undo(host, directory.path()).failed, [], "{}", case.rule);
        });
        assert!(moments.len() >= 3, "{}: {}", case.rule, moments.len());
        for (step, moment) in moments.iter().enumerate() {
            let (host, directory) = moment.restore();
            recover(&host, directory.path());
            let undone = kept::undo(&host, directory.path());
            assert_eq!(undone.failed, [], "{}, step {step}", case.rule);
            assert!(host.state() == before, "{}, step {step}: not undone", case.rule);
            kills += 1;
        }
    }
    println!("{kills} kills of undo");
}
