//! Gathering the settings of a host: each file is read once, with its mode, and nothing is changed.

use pagefold_base::identity::thread_role::ThreadRole;
use pagefold_base::{Absent, Bytes, PageSize, Pfn, Pid, Reading};
use pagefold_doctor::decide::audit::facts::CpuThrottling;
use pagefold_doctor::decide::{HostFacts, Scope, Verdict, examine_host};
use pagefold_doctor::doctor_facts::{TrustPolicy, gather_host_facts};
use pagefold_doctor::guest_facts::gather_guest_facts;
use pagefold_doctor::wire::DoctorReport;
use pagefold_host::action::{Action, ActionError, ActionOutcome};
use pagefold_host::fake_host::FakeHost;
use pagefold_host::guest_agent::AgentAccess;
use pagefold_host::{FrameFlags, Host, ProcessHandle};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

/// A host that counts the reads of each file, and fails the test when it is to be changed.
struct AuditedHost {
    host: FakeHost,
    reads: Mutex<BTreeMap<String, u32>>,
    /// Processes that are opened now, each for a moment, and the most at once.
    opened: Mutex<(usize, usize)>,
}

impl Host for AuditedHost {
    fn describe(&self) -> String {
        self.host.describe()
    }

    fn page_size(&self) -> PageSize {
        self.host.page_size()
    }

    fn read(&self, path: &str) -> Reading<Vec<u8>> {
        *self.reads.lock().unwrap().entry(path.to_owned()).or_default() += 1;
        self.host.read(path)
    }

    fn list(&self, path: &str) -> Reading<Vec<String>> {
        self.host.list(path)
    }

    fn file_mode(&self, path: &str) -> Reading<u32> {
        self.host.file_mode(path)
    }

    fn pids(&self) -> Reading<Vec<Pid>> {
        self.host.pids()
    }

    fn open(&self, pid: Pid) -> Reading<Box<dyn ProcessHandle + '_>> {
        let count = |change: &dyn Fn(&mut usize)| {
            let mut opened = self.opened.lock().unwrap();
            change(&mut opened.0);
            opened.1 = opened.1.max(opened.0);
        };
        count(&|now| *now += 1);
        std::thread::sleep(Duration::from_millis(1));
        count(&|now| *now -= 1);
        self.host.open(pid)
    }

    fn frame_flags(&self, frames: &[Pfn]) -> Reading<Vec<FrameFlags>> {
        self.host.frame_flags(frames)
    }

    fn frame_mappings(&self, frames: &[Pfn]) -> Reading<Vec<u64>> {
        self.host.frame_mappings(frames)
    }

    fn apply(&self, action: &Action) -> Result<ActionOutcome, ActionError> {
        panic!("the doctor performs {action:?}");
    }
}

fn stat(pid: u32, name: &str, cpu: u32) -> String {
    let zeros = |count| "0 ".repeat(count);
    format!("{pid} ({name}) S 1 1 1 0 -1 0 {}20 0 1 0 1 {}{cpu} 0 0 0\n", zeros(8), zeros(16))
}

const SMAPS: &str = "7f0000000000-7f0000001000 rw-p 00000000 00:00 0\nRss: 4 kB\nAnonymous: 4 kB\nVmFlags: rd wr mg\n";

/// An Intel host with a machine under libvirt that is throttled.
fn host() -> AuditedHost {
    let host = FakeHost::booted();
    let parameters = "sys/module/kvm_intel/parameters";
    let files = [
        ("sys/module/kvm/parameters/halt_poll_ns", "400000\n"),
        ("sys/module/kvm/parameters/halt_poll_ns.mode", "644\n"),
        ("sys/devices/system/cpu/online", "0-3\n"),
        ("sys/devices/system/cpu/cpu2/cpuidle/state1/latency", "2\n"),
        ("sys/devices/system/cpu/cpufreq/cpuidle/state1/latency", "9\n"),
        ("proc/cpuinfo", "processor : 0\nvmx flags : ept\n\nprocessor : 1\nflags : x2avic\n"),
        ("proc/irq/7/effective_affinity_list", "2\n"),
        ("proc/irq/default_smp_affinity", "f\n"),
        ("sys/block/nvme0n1/queue/scheduler", "[mq-deadline] none\n"),
        ("sys/fs/cgroup/cgroup.controllers", "cpu\n"),
        ("sys/fs/cgroup/machine.slice/vm/libvirt/vcpu0/cpu.max", "10000 100000\n"),
        ("sys/fs/cgroup/machine.slice/vm/libvirt/vcpu0/cpu.stat", "nr_periods 100\nnr_throttled 80\n"),
        ("sys/fs/cgroup/machine.slice/cpu.max", "max 100000\n"),
        ("proc/7/cgroup", "0::/machine.slice/vm/libvirt/emulator\n"),
        ("proc/7/cmdline", "qemu-system-x86_64\0-name\0web\0-accel\0kvm\0-device\0vfio-pci,host=3b:00.0\0"),
        ("proc/7/status", "Uid:\t0\t0\t0\t0\n"),
        ("proc/7/smaps", SMAPS),
        ("sys/bus/pci/devices/0000:3b:00.0/numa_node", "0\n"),
    ];
    files.iter().for_each(|(path, text)| host.put_file(path, text));
    host.put_file(&format!("{parameters}/ept"), "N\n");
    host.put_file(&format!("{parameters}/ept.mode"), "444\n");
    host.put_file("proc/7/stat", &stat(7, "qemu-system-x86", 0));
    for (tid, name) in [(7, "qemu-system-x86"), (8, "CPU 0/KVM"), (9, "vhost-7")] {
        host.put_file(&format!("proc/7/task/{tid}/stat"), &stat(tid, name, 3));
        host.put_file(&format!("proc/7/task/{tid}/status"), "Cpus_allowed_list:\t2-3\n");
    }
    AuditedHost { host, reads: Mutex::default(), opened: Mutex::default() }
}

fn gather(host: &AuditedHost) -> HostFacts {
    gather_host_facts(host, &[], &TrustPolicy::default())
}

#[test]
fn settings_are_read_once_with_their_modes_and_nothing_is_changed() {
    let host = host();
    let facts = gather(&host);
    let settings = &facts.settings;
    assert_eq!(settings.text("sys/module/kvm_intel/parameters/ept"), Ok("N"));
    assert_eq!(settings.files["sys/module/kvm_intel/parameters/ept"].mode, Ok(0o444));
    assert_eq!(settings.files["sys/module/kvm/parameters/halt_poll_ns"].mode, Ok(0o644));
    assert_eq!(settings.text("proc/cpuinfo"), Ok("processor : 0\nvmx flags : ept"), "only the first CPU");
    let latency = |cpu: &str| settings.text(&format!("sys/devices/system/cpu/{cpu}/cpuidle/state1/latency"));
    assert_eq!(["cpu2", "cpufreq"].map(latency), [Ok("2"), Err(Absent::NotOnThisKernel)], "of each CPU");
    assert_eq!(settings.text("proc/irq/7/effective_affinity_list"), Ok("2"));
    assert_eq!(settings.text("sys/bus/pci/devices/0000:3b:00.0/numa_node"), Ok("0"));
    assert_eq!(settings.text("sys/kernel/debug/kvm/nested_run"), Err(Absent::NotOnThisKernel));
    let reads = host.reads.lock().unwrap();
    let is_setting = |path: &&String| settings.files.contains_key(*path) || path.contains("cpu.max");
    let repeated: Vec<_> =
        reads.iter().filter(|(path, count)| is_setting(path) && **count > 1).map(|(path, _)| path).collect();
    // The mode of huge pages is also a fact of the rules about KSM.
    assert!(repeated.iter().all(|path| path.contains("transparent_hugepage")), "{repeated:?}");
}

#[test]
fn memory_of_machines_is_read_on_hosts_with_several_nodes() {
    let host = host();
    let memory = |host: &AuditedHost| gather(host).settings.vms[0].node_memory.clone();
    assert_eq!(memory(&host), None, "one node");
    host.host.put_file("sys/devices/system/node/node0/cpulist", "0-1\n");
    host.host.put_file("sys/devices/system/node/node1/cpulist", "2-3\n");
    assert_eq!(memory(&host), Some(Err(Absent::NotOnThisKernel)));
    host.host.put_file("proc/7/numa_maps", "7f00 default anon=3 N0=1 N1=2 kernelpagesize_kB=4\n");
    let expected = BTreeMap::from([(0, Bytes(4096)), (1, Bytes(8192))]);
    assert_eq!(memory(&host), Some(Ok(expected)));
    host.host.put_file("proc/7/numa_maps", "");
    assert_eq!(memory(&host), Some(Err(Absent::Vanished)));
}

#[test]
fn files_of_the_active_profile_of_tuned_are_read() {
    let host = host();
    for (path, text) in [
        ("etc/tuned/active_profile", "rt\n"),
        ("usr/lib/tuned/rt/tuned.conf", "[main]\ninclude=base\n[script]\nscript=${i:PROFILE_DIR}/script.sh\n"),
        ("usr/lib/tuned/rt/script.sh", "start() {\n  disable_ksm\n}\n"),
        ("usr/lib/tuned/base/tuned.conf", "[sysctl]\nkernel.sched_latency_ns=1\n"),
        ("usr/lib/tuned/other/tuned.conf", "[main]\n"),
        ("proc/sys/kernel/ostype", "Linux\n"),
    ] {
        host.host.put_file(path, text);
    }
    let facts = gather(&host);
    let is_read = |path: &str| facts.settings.text(path).is_ok();
    assert!(is_read("usr/lib/tuned/rt/script.sh") && is_read("usr/lib/tuned/base/tuned.conf"));
    assert!(!is_read("usr/lib/tuned/other/tuned.conf"), "not active");
    let found = examine_host(&facts).into_iter().find(|finding| finding.rule == "dead-scheduler-knobs").unwrap();
    assert_eq!(
        (found.verdict, &*found.value),
        (Verdict::Warn, "kernel.sched_latency_ns in /usr/lib/tuned/base/tuned.conf")
    );
}

#[test]
fn machines_have_their_threads_limits_and_definition() {
    let facts = gather(&host());
    let [vm] = &facts.settings.vms[..] else { panic!("{:?}", facts.settings.vms) };
    assert_eq!((vm.name.as_str(), &vm.passed_through[..]), ("web", &["0000:3b:00.0".to_owned()][..]));
    let threads = vm.threads.as_ref().unwrap();
    let roles: Vec<_> = threads.iter().map(|thread| (&thread.role, thread.last_cpu)).collect();
    assert_eq!(roles, [(&ThreadRole::Vcpu(0), 3), (&ThreadRole::Vhost, 3)]);
    assert_eq!(threads[0].allowed_cpus.to_string(), "2-3");
    let throttling = CpuThrottling {
        cgroup: "/machine.slice/vm/libvirt/vcpu0".to_owned(),
        quota: 10_000,
        period: 100_000,
        periods: 100,
        throttled_periods: 80,
    };
    assert_eq!(vm.throttling, Ok(Some(throttling)));
    assert!(vm.definition.as_ref().unwrap().as_ref().unwrap().kvm);
}

#[test]
fn verdicts_follow_from_what_was_gathered() {
    let findings = examine_host(&gather(&host()));
    let verdict = |rule: &str| findings.iter().find(|finding| finding.rule == rule).unwrap().verdict;
    assert_eq!(verdict("kvm-ept"), Verdict::Fail);
    let rules = ["kvm-halt-poll", "nvme-scheduler", "vm-cpu-throttled", "vm-cpu-model"];
    assert_eq!(rules.map(verdict), [Verdict::Warn; 4]);
}

#[test]
fn machine_whose_cgroup_has_no_readable_statistics_is_unknown() {
    let host = host();
    host.host.put_file("sys/fs/cgroup/machine.slice/vm/libvirt/vcpu0/cpu.stat", "garbage\n");
    let facts = gather(&host);
    assert!(facts.settings.vms[0].throttling.is_err());
    let findings = examine_host(&facts);
    let finding = findings.iter().find(|finding| finding.rule == "vm-cpu-throttled").unwrap();
    assert_ne!(finding.verdict, Verdict::Ok);
}

/// The host of [`host`] whose machine has an agent that answers some questions.
fn host_with_agent() -> AuditedHost {
    let host = host();
    let answers = [
        ("osinfo.json", r#"{"id": "debian"}"#),
        ("vcpus.json", r#"[{"logical-id": 0, "online": true}, {"logical-id": 1, "online": false}]"#),
        ("sys/devices/system/clocksource/clocksource0/current_clocksource", "acpi_pm\n"),
        ("proc/stat", "garbage\n"),
        ("boot/config", "CONFIG_NO_HZ_IDLE=y\nCONFIG_HZ=250"),
    ];
    answers.iter().for_each(|(path, text)| host.host.put_file(&format!("proc/7/guest_agent/{path}"), text));
    host
}

#[test]
fn guests_are_asked_only_on_request() {
    let host = host_with_agent();
    let mut facts = gather(&host);
    assert_eq!(facts.settings.vms[0].guest, None);
    assert!(host.reads.lock().unwrap().keys().all(|path| !path.contains("guest_agent")));
    gather_guest_facts(&host, facts.settings.vms.iter_mut(), AgentAccess::Socket);
    let guest = facts.settings.vms[0].guest.clone().unwrap().unwrap();
    assert_eq!(guest.vcpus.map(|vcpus| (vcpus.online, vcpus.offline)), Ok((1, 1)));
    let verdicts: BTreeMap<&str, Verdict> = examine_host(&facts)
        .into_iter()
        .filter(|finding| matches!(finding.scope, Scope::Guest(id) if id.pid == Pid(7)))
        .map(|finding| (finding.rule, finding.verdict))
        .collect();
    let expected = [
        ("guest-clocksource", Verdict::Fail),
        ("guest-cpus-online", Verdict::Ok),
        ("guest-haltpoll", Verdict::NotApplicable),
        ("guest-steal", Verdict::Unknown),
        ("guest-timer-frequency", Verdict::Ok),
    ];
    assert_eq!(verdicts, expected.into());
}

#[test]
fn machines_without_an_agent_and_ended_machines_are_not_judged() {
    let host = host();
    let mut facts = gather(&host);
    gather_guest_facts(&host, facts.settings.vms.iter_mut(), AgentAccess::Socket);
    assert_eq!(facts.settings.vms[0].guest, Some(Err(Absent::NotOnThisKernel)));
    // Another process has its PID now.
    facts.settings.vms[0].process.start_time += 1;
    gather_guest_facts(&host_with_agent(), facts.settings.vms.iter_mut(), AgentAccess::Socket);
    assert_eq!(facts.settings.vms[0].guest, Some(Err(Absent::Vanished)));
}

/// The command line of a machine whose agent libvirt has.
const MANAGED_CHANNEL: &str = "qemu-system-x86_64\0-chardev\0socket,id=a,fd=3,server=on\0\
    -device\0virtserialport,chardev=a,name=org.qemu.guest_agent.0\0";

#[test]
fn each_of_many_guests_is_asked() {
    let host = host_with_agent();
    for access in [AgentAccess::Socket, AgentAccess::SocketOrLibvirt] {
        let mut vms = vec![gather(&host).settings.vms[0].clone(); 100];
        vms[99].definition = None;
        host.host.put_file("proc/7/cmdline", MANAGED_CHANNEL);
        *host.opened.lock().unwrap() = (0, 0);
        gather_guest_facts(&host, vms.iter_mut(), access);
        assert!(vms[..99].iter().all(|vm| matches!(vm.guest, Some(Ok(_)))));
        assert_eq!(vms[99].guest, None, "another monitor");
    }
    assert!((1..=4).contains(&host.opened.lock().unwrap().1), "libvirt has few threads for agents that hang");
}

#[test]
fn findings_about_a_guest_belong_to_its_process() {
    let host = host_with_agent();
    let mut facts = gather(&host);
    gather_guest_facts(&host, facts.settings.vms.iter_mut(), AgentAccess::Socket);
    let process = facts.processes.iter().find(|process| process.process.id.pid == Pid(7)).unwrap();
    let report = DoctorReport::from_processes("x".to_owned(), &facts, &[process]).retain_topics(&["guest"]);
    assert_eq!(report.findings.len(), 5);
    assert!(report.findings.iter().all(|finding| finding.machine.as_deref() == Some("web")));
}

#[test]
fn definitions_of_libvirt_are_read_for_running_and_idle_domains() {
    let host = host();
    let put = |path: &str, text: &str| host.host.put_file(path, text);
    let definition = |name: &str| format!("<domain type='kvm'><name>{name}</name><vcpu>3</vcpu></domain>\n");
    put("run/libvirt/qemu/web.xml", "<domstatus pid='7'><domain><name>web</name><uuid>u</uuid></domain></domstatus>\n");
    put("etc/libvirt/qemu/web.xml", &definition("web"));
    put("etc/libvirt/qemu/db.xml", &definition("db"));
    put("etc/libvirt/qemu/broken.xml", "<domain\n");
    put("etc/libvirt/qemu/networks/default.xml", "<network/>\n");
    let facts = gather(&host);
    let next = facts.settings.vms[0].next_definition.clone().unwrap().unwrap();
    assert_eq!((next.name.as_str(), next.vm.vcpus), ("web", Some(3)));
    let idle: Vec<_> = facts
        .settings
        .idle_domains
        .iter()
        .map(|domain| (domain.name.as_str(), domain.definition.as_ref().unwrap().is_ok()))
        .collect();
    assert_eq!(idle, [("broken", false), ("db", true)]);
    let report = DoctorReport::from_host("x".to_owned(), &facts);
    let of_db: Vec<_> = report.findings.iter().filter(|finding| finding.machine.as_deref() == Some("db")).collect();
    assert!(of_db.len() > 5 && of_db.iter().all(|finding| finding.pid.is_none()), "{of_db:?}");
    let drift = report.findings.iter().find(|finding| finding.rule == "vm-next-start").unwrap();
    assert_eq!(drift.machine.as_deref(), Some("web"));
    assert!(drift.value.contains("CPU model") || drift.value.contains("virtual CPUs"), "{drift:?}");
    // A domain without a persistent definition exists until it ends.
    let transient = self::host();
    transient.host.put_file(
        "run/libvirt/qemu/web.xml",
        "<domstatus pid='7'><domain><name>web</name><uuid>u</uuid></domain></domstatus>\n",
    );
    assert_eq!(gather(&transient).settings.vms[0].next_definition, None);
}
