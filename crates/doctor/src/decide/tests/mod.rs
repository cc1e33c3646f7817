//! Table tests: healthy facts, one change, and the verdict of one rule.

mod coverage;
mod properties;

use super::audit::tests::tuned::put_profile;
use super::*;
use crate::test_support::note_tested;
use Verdict::{Fail, NotApplicable, Ok as Fine, Unknown, Warn};
use pagefold_base::exclusion::Exclusions;
use pagefold_base::identity::{Identity, Monitor, Vm, VmMemoryBackend};
use pagefold_base::ksm::ProcessKsm;
use pagefold_base::memory::PressureLine;
use pagefold_base::region::VmFlags;
use pagefold_base::units::{AddressRange, Bytes, Pid};

const GIB: u64 = 1 << 30;

/// A region with this many anonymous bytes.
fn region(bytes: u64, flags: VmFlags) -> Region {
    let mut region = Region::empty(AddressRange { start: 0x7f00_0000_0000, end: 0x7f00_0000_0000 + bytes });
    region.rss = Bytes(bytes);
    region.anonymous = Bytes(bytes);
    region.flags = flags;
    region
}

/// A shared memory object, mapped and resident.
fn shared(bytes: u64, name: &str) -> Region {
    let mut region = region(bytes, VmFlags::SHARED);
    region.anonymous = Bytes::ZERO;
    region.name = name.to_owned();
    region
}

/// A process of user 1000 with 1 GiB enrolled by madvise, half of it merged.
fn healthy_process(pid: u32) -> ProcessFacts {
    ProcessFacts {
        process: Process {
            id: ProcessId { pid: Pid(pid), start_time: u64::from(pid) },
            comm: "simulation".into(),
            state: 'S',
            kernel_thread: false,
            uid: Ok(1000),
            setuid: false,
            arguments: Ok(vec!["/usr/bin/simulation".into()]),
            cgroup: Ok("/user.slice".into()),
            identity: Identity::default(),
            ksm: ProcessKsm {
                rmap_items: Ok(GIB / 4096),
                merging_pages: Ok(GIB / 8192),
                zero_pages: Ok(0),
                profit: Ok(500 << 20),
                merge_any: Ok(false),
                mergeable: Ok(true),
            },
            seccomp: Ok(0),
            pinned: Ok(Bytes::ZERO),
        },
        regions: Ok(vec![region(GIB, VmFlags::MERGEABLE)]),
        domain: TrustDomain::User(1000),
        exclusion_reason: None,
        parent_merge_any: Ok(false),
    }
}

/// Determine whether the process is excluded from merging.
fn exclude(facts: &mut ProcessFacts) {
    facts.exclusion_reason = Exclusions::default().reason(&facts.process);
}

fn healthy_ksm() -> Ksm {
    Ksm {
        run: Ok(1),
        pages_to_scan: Ok(5000),
        sleep_millisecs: Ok(20),
        pages_shared: Ok(20_000),
        pages_sharing: Ok(240_000),
        pages_unshared: Ok(200_000),
        pages_volatile: Ok(64_288),
        pages_scanned: Ok(5_000_000),
        pages_skipped: Ok(1_000_000),
        full_scans: Ok(12),
        max_page_sharing: Ok(256),
        merge_across_nodes: Ok(1),
        use_zero_pages: Ok(1),
        ksm_zero_pages: Ok(1000),
        general_profit: Ok(900 << 20),
        stable_node_chains: Ok(0),
        stable_node_dups: Ok(0),
        smart_scan: Ok(1),
        advisor_mode: Ok("none".into()),
        advisor_target_scan_time: Ok(200),
    }
}

fn line(avg60: f64) -> PressureLine {
    PressureLine { avg10: avg60, avg60, avg300: avg60, total: 0 }
}

/// A host with two enrolled processes and no problem.
pub(super) fn healthy() -> HostFacts {
    HostFacts {
        page_size: PageSize::new(4096).unwrap(),
        kernel: Ok("6.18.44".into()),
        ksm: Ok(healthy_ksm()),
        memory: MemInfo {
            total: Ok(Bytes(64 * GIB)),
            free: Ok(Bytes(20 * GIB)),
            available: Ok(Bytes(30 * GIB)),
            anon: Ok(Bytes(20 * GIB)),
            anon_huge: Ok(Bytes::ZERO),
            swap_total: Ok(Bytes(8 * GIB)),
            swap_free: Ok(Bytes(8 * GIB)),
            hugetlb: Ok(Bytes::ZERO),
        },
        pressure: Ok(Pressure { some: line(0.1), full: line(0.0) }),
        vmstat: Ok([("cow_ksm", 500), ("ksm_swpin_copy", 0), ("thp_split_page", 3)].map(|(n, v)| (n.into(), v)).into()),
        thp_enabled: Ok("madvise".into()),
        nodes: Ok(1),
        ksmd: Ok(KsmdCpuTime { cpu_seconds: 30.0, uptime_seconds: 3600.0 }),
        tuners: Ok(vec![]),
        rewritten_settings: vec![],
        settings: SettingFacts::default(),
        processes: vec![healthy_process(100), healthy_process(200)],
    }
}

fn ksm(facts: &mut HostFacts) -> &mut Ksm {
    facts.ksm.as_mut().unwrap()
}

fn qemu() -> Vm {
    Vm {
        monitor: Monitor::Qemu,
        name: Some("guest1".into()),
        uuid: None,
        memory_bytes: Some(GIB),
        backends: vec![],
        mem_merge: true,
        vfio: false,
        control_socket: Some("unix:/run/qmp,server=on".into()),
    }
}

/// Makes a process a QEMU virtual machine.
fn vm(facts: &mut ProcessFacts, change: impl FnOnce(&mut Vm)) {
    let mut vm = qemu();
    change(&mut vm);
    facts.process.identity.vm = Some(vm);
}

/// Unenrolls every process, and clears the counters.
fn nothing_enrolled(facts: &mut HostFacts) {
    for process in &mut facts.processes {
        unenroll(process);
    }
    let ksm = ksm(facts);
    for counter in [&mut ksm.pages_shared, &mut ksm.pages_sharing, &mut ksm.pages_unshared, &mut ksm.pages_volatile] {
        *counter = Ok(0);
    }
    ksm.ksm_zero_pages = Ok(0);
    ksm.general_profit = Ok(0);
    facts.vmstat = Ok([("cow_ksm".to_owned(), 0)].into());
}

fn unenroll(process: &mut ProcessFacts) {
    process.process.ksm = ProcessKsm {
        rmap_items: Ok(0),
        merging_pages: Ok(0),
        zero_pages: Ok(0),
        profit: Ok(0),
        merge_any: Ok(false),
        mergeable: Ok(false),
    };
    process.regions = Ok(vec![region(GIB, VmFlags::default())]);
}

fn deny(process: &mut ProcessFacts) {
    process.regions = Err(Absent::Denied);
    process.process.ksm = ProcessKsm::absent(&Absent::Denied);
    process.parent_merge_any = Err(Absent::Denied);
}

/// Before 6.14 the flag cannot be read.
fn old_kernel(process: &mut ProcessFacts) {
    process.process.ksm.merge_any = Err(Absent::NotOnThisKernel);
    process.parent_merge_any = Err(Absent::NotOnThisKernel);
}

/// Check the verdict of one host rule after one change to healthy facts.
fn check(rule: &str, expected: Verdict, change: impl FnOnce(&mut HostFacts)) {
    let mut facts = healthy();
    change(&mut facts);
    facts.processes.iter_mut().for_each(exclude);
    let findings = examine_host(&facts);
    let found: Vec<_> = findings.iter().filter(|finding| finding.rule == rule).collect();
    assert_eq!(found.len(), 1, "{rule}");
    assert_eq!(found[0].verdict, expected, "{:#?}", found[0]);
    note_tested(rule, expected);
    assert_complete(&findings);
}

/// Check the worst verdict of one process rule after one change to healthy facts.
fn check_process(rule: &str, expected: Verdict, change: impl FnOnce(&mut HostFacts, &mut ProcessFacts)) {
    let (mut host, mut process) = (healthy(), healthy_process(100));
    change(&mut host, &mut process);
    exclude(&mut process);
    host.processes[0] = process.clone();
    let findings = examine_process(&host, &process);
    let found: Vec<_> = findings.iter().filter(|finding| finding.rule == rule).cloned().collect();
    assert!(!found.is_empty(), "{rule} is not in {findings:#?}");
    assert_eq!(worst(&found), expected, "{found:#?}");
    note_tested(rule, expected);
    assert_complete(&findings);
}

/// Requirements on any findings.
fn assert_complete(findings: &[Finding]) {
    assert!(findings.is_sorted_by(|a, b| a.verdict >= b.verdict), "worst first");
    for finding in findings {
        assert!(!finding.title.is_empty() && !finding.source.is_empty() && !finding.why.is_empty(), "{finding:?}");
        assert!(!finding.source.contains("PID") || finding.scope == Scope::Host, "{finding:?}");
        if matches!(finding.verdict, Warn | Fail) {
            assert!(!finding.remedy.is_empty() && finding.verify.is_some(), "{finding:?}");
        }
        if matches!(finding.verdict, Fine) {
            assert!(finding.remedy.is_empty(), "{finding:?}");
        }
    }
}

#[test]
fn healthy_host_has_only_ok_findings() {
    let findings = examine_host(&healthy());
    assert!(worst(&findings) <= Fine, "{findings:#?}");
    let (host, process) = (healthy(), healthy_process(100));
    let findings = examine_process(&host, &process);
    assert!(worst(&findings) <= Fine, "{findings:#?}");
}

#[test]
fn worst_of_no_findings_is_not_applicable() {
    assert_eq!(worst(&[]), NotApplicable);
}

/// One function because it is a table: a rule, its verdict and the facts in each row.
#[test]
fn settings_rules_give_expected_verdicts() {
    check("ksm-kernel", Fine, |_| ());
    check("ksm-kernel", Fail, |f| f.ksm = Err(Absent::NotOnThisKernel));
    check("ksm-kernel", Unknown, |f| f.ksm = Err(Absent::Denied));

    check("ksm-run", Fine, |_| ());
    check("ksm-run", Warn, |f| ksm(f).run = Ok(0));
    check("ksm-run", Warn, |f| ksm(f).run = Ok(2));
    check("ksm-run", Unknown, |f| ksm(f).run = Err(Absent::Denied));
    check("ksm-run", Unknown, |f| ksm(f).run = Ok(3));
    check("ksm-run", NotApplicable, |f| f.ksm = Err(Absent::NotOnThisKernel));
    check("ksm-run", Warn, |f| {
        nothing_enrolled(f);
        ksm(f).run = Ok(0);
    });
    check("ksm-run", Warn, |f| {
        nothing_enrolled(f);
        ksm(f).run = Ok(0);
        deny(&mut f.processes[1]);
    });

    check("ksm-pace", Fine, |_| ());
    check("ksm-pace", Warn, |f| ksm(f).pages_to_scan = Ok(20));
    check("ksm-pace", Fail, |f| ksm(f).pages_to_scan = Ok(1));
    check("ksm-pace", Fail, |f| ksm(f).pages_to_scan = Ok(0));
    check("ksm-pace", Unknown, |f| ksm(f).pages_to_scan = Err(Absent::Malformed("x".into())));
    check("ksm-pace", NotApplicable, nothing_enrolled);
    // Exited processes are still counted.
    check("ksm-pace", NotApplicable, |f| f.processes.iter_mut().for_each(unenroll));
    // Before its first pass, ksmd's metadata does not cover unreadable processes.
    check("ksm-pace", Unknown, |f| {
        deny(&mut f.processes[1]);
        ksm(f).full_scans = Ok(0);
    });
    check("ksm-pace", Fine, |f| deny(&mut f.processes[1]));

    check("ksm-advisor-pace", NotApplicable, |_| ());
    check("ksm-advisor-pace", NotApplicable, |f| ksm(f).advisor_mode = Err(Absent::NotOnThisKernel));
    check("ksm-advisor-pace", Unknown, |f| ksm(f).advisor_mode = Err(Absent::Denied));
    check("ksm-advisor-pace", Unknown, |f| ksm(f).advisor_mode = Ok("by-benefit".into()));
    check("ksm-advisor-pace", Warn, |f| ksm(f).advisor_mode = Ok("scan-time".into()));
    check("ksm-advisor-pace", Fine, |f| {
        ksm(f).advisor_mode = Ok("scan-time".into());
        ksm(f).advisor_target_scan_time = Ok(20);
    });

    check("ksm-smart-scan", Fine, |_| ());
    check("ksm-smart-scan", Warn, |f| ksm(f).smart_scan = Ok(0));
    check("ksm-smart-scan", NotApplicable, |f| ksm(f).smart_scan = Err(Absent::NotOnThisKernel));
    check("ksm-smart-scan", Unknown, |f| ksm(f).smart_scan = Err(Absent::Denied));

    check("ksm-zero-pages", Fine, |_| ());
    check("ksm-zero-pages", Fine, |f| ksm(f).use_zero_pages = Ok(0));
    check("ksm-zero-pages", Unknown, |f| {
        ksm(f).use_zero_pages = Ok(0);
        ksm(f).stable_node_chains = Ok(1);
    });
    // With such a high limit, missing chains tell nothing of zero pages.
    check("ksm-zero-pages", Unknown, |f| (ksm(f).use_zero_pages, ksm(f).max_page_sharing) = (Ok(0), Ok(100_000)));
    check("ksm-zero-pages", NotApplicable, |f| {
        nothing_enrolled(f);
        ksm(f).use_zero_pages = Ok(0);
    });

    check("ksm-sharing-limit", Fine, |f| {
        (ksm(f).stable_node_chains, ksm(f).stable_node_dups) = (Ok(1), Ok(900));
    });
    check("ksm-sharing-limit", Warn, |f| {
        (ksm(f).stable_node_chains, ksm(f).stable_node_dups) = (Ok(1), Ok(20_000));
    });
    check("ksm-sharing-limit", Unknown, |f| ksm(f).stable_node_dups = Err(Absent::NotOnThisKernel));

    check("ksm-nodes", NotApplicable, |_| ());
    check("ksm-nodes", Fine, |f| f.nodes = Ok(2));
    check("ksm-nodes", Warn, |f| f.nodes = Ok(8));
    check("ksm-nodes", Unknown, |f| f.nodes = Err(Absent::Denied));
    check("ksm-nodes", Fine, |f| {
        f.nodes = Ok(8);
        ksm(f).merge_across_nodes = Ok(0);
    });
    check("ksm-nodes", NotApplicable, |f| ksm(f).merge_across_nodes = Err(Absent::NotOnThisKernel));

    check("ksm-counters", Fine, |_| ());
    check("ksm-counters", Warn, |f| ksm(f).run = Ok(0));
    check("ksm-counters", Unknown, |f| ksm(f).full_scans = Ok(0));
    check("ksm-counters", NotApplicable, |f| {
        nothing_enrolled(f);
        ksm(f).run = Ok(0);
    });
}

#[test]
fn counters_of_ended_processes_are_not_applicable() {
    let left_over = |f: &mut HostFacts| {
        f.processes.iter_mut().for_each(unenroll);
        let ksm = ksm(f);
        (ksm.run, ksm.general_profit) = (Ok(0), Ok(-1));
        (ksm.stable_node_chains, ksm.stable_node_dups) = (Ok(1), Ok(20_000));
        f.vmstat.as_mut().unwrap().insert("cow_ksm".into(), 1 << 30);
    };
    check("ksm-run", Warn, left_over);
    for rule in ["ksm-enrolled", "ksm-sharing-limit", "ksm-counters", "ksm-profit", "ksm-copies"] {
        check(rule, NotApplicable, left_over);
    }
    // The counters may belong to an unreadable process.
    for rule in ["ksm-enrolled", "ksm-sharing-limit", "ksm-counters", "ksm-profit", "ksm-copies"] {
        check(rule, Unknown, |f| {
            left_over(f);
            deny(&mut f.processes[1]);
        });
    }
}

#[test]
fn unreadable_processes_are_named() {
    let mut facts = healthy();
    deny(&mut facts.processes[1]);
    let title = |facts: &HostFacts| {
        examine_host(facts).into_iter().find(|finding| finding.rule == "ksm-ineligible").unwrap().title
    };
    assert_eq!(title(&facts), "cannot tell: regions of simulation (200)");
    facts.processes[1].process.id.pid = Pid(0);
    assert_eq!(title(&facts), "cannot tell: regions of hidden processes");
    deny(&mut facts.processes[0]);
    assert_eq!(title(&facts), "cannot tell: regions of 2 processes");
}

#[test]
fn enrollment_rules_give_expected_verdicts() {
    check("ksm-enrolled", Fine, |_| ());
    check("ksm-enrolled", Fail, nothing_enrolled);
    check("ksm-enrolled", NotApplicable, |f| {
        nothing_enrolled(f);
        ksm(f).run = Ok(0);
    });
    check("ksm-enrolled", Unknown, |f| {
        nothing_enrolled(f);
        deny(&mut f.processes[0]);
    });
    // No readable process is enrolled, but ksmd has metadata of some process.
    check("ksm-enrolled", Fine, |f| f.processes.iter_mut().for_each(deny));
    check("ksm-enrolled", Fail, |f| {
        nothing_enrolled(f);
        f.processes[0].process.kernel_thread = true;
        deny(&mut f.processes[0]);
        f.processes[1].regions = Err(Absent::Vanished);
        f.processes[1].process.ksm = ProcessKsm::absent(&Absent::Vanished);
    });

    check("ksm-ineligible", Fine, |_| ());
    check("ksm-ineligible", Warn, |f| f.processes[0].regions = Ok(vec![shared(GIB, "/memfd:ram (deleted)")]));
    check("ksm-ineligible", Fine, |f| f.processes[0].regions.as_mut().unwrap().push(shared(GIB, "/var/log/journal")));
    check("ksm-ineligible", Unknown, |f| deny(&mut f.processes[0]));

    check("ksm-seccomp", Fine, |_| ());
    check("ksm-seccomp", Fine, |f| f.processes[0].process.seccomp = Ok(2));
    check("ksm-seccomp", Warn, |f| {
        unenroll(&mut f.processes[0]);
        f.processes[0].process.seccomp = Ok(2);
    });
    check("ksm-seccomp", Unknown, |f| f.processes[0].process.seccomp = Err(Absent::NotOnThisKernel));
    check("ksm-seccomp", Unknown, |f| f.processes[0].regions = Err(Absent::Denied));

    check("ksm-prctl-exec", Fine, |_| ());
    check("ksm-prctl-exec", Warn, |f| f.processes[0].parent_merge_any = Ok(true));
    check("ksm-prctl-exec", Unknown, |f| old_kernel(&mut f.processes[0]));
    check("ksm-prctl-exec", Fine, |f| f.processes[0].parent_merge_any = Err(Absent::Vanished));
}

#[test]
fn writer_rules_give_expected_verdicts() {
    check("ksm-tuners", Fine, |_| ());
    check("ksm-tuners", Fine, |f| f.tuners = Ok(vec![Tuner::Tuned]));
    check("ksm-tuners", Warn, |f| {
        f.tuners = Ok(vec![Tuner::Tuned]);
        ksm(f).run = Ok(2);
    });
    check("ksm-tuners", Warn, |f| {
        f.tuners = Ok(vec![Tuner::Tuned]);
        put_profile(f, "rt", "[sysfs]\n/sys/kernel/mm/ksm/run = 2\n");
    });
    check("ksm-tuners", Fine, |f| {
        f.tuners = Ok(vec![Tuner::Tuned]);
        put_profile(f, "virtual-host", "[sysctl]\nvm.dirty_background_ratio = 5\n");
        ksm(f).run = Ok(2);
    });
    check("ksm-tuners", Unknown, |f| {
        f.tuners = Ok(vec![Tuner::Tuned]);
        put_profile(f, "rt", "");
        f.settings.files.get_mut("etc/tuned/active_profile").unwrap().text = Err(Absent::Denied);
    });
    check("ksm-tuners", Warn, |f| f.tuners = Ok(vec![Tuner::Ksmtuned, Tuner::Ksmtuned]));
    check("ksm-tuners", Fail, |f| f.tuners = Ok(vec![Tuner::Mom, Tuner::Ksmtuned]));
    check("ksm-tuners", Unknown, |f| f.tuners = Err(Absent::Denied));
    check("ksm-tuners", Warn, |f| f.rewritten_settings = vec!["run: 1, then 0".into()]);
    check("ksm-tuners", Warn, |f| {
        (f.tuners, f.rewritten_settings) = (Err(Absent::Denied), vec!["run: 1, then 0".into()])
    });

    check("ksm-advisor-writer", NotApplicable, |f| f.tuners = Ok(vec![Tuner::Ksmtuned]));
    check("ksm-advisor-writer", Fine, |f| ksm(f).advisor_mode = Ok("scan-time".into()));
    check("ksm-advisor-writer", Fail, |f| {
        ksm(f).advisor_mode = Ok("scan-time".into());
        f.tuners = Ok(vec![Tuner::VirtHandler]);
    });
    check("ksm-advisor-writer", Unknown, |f| {
        ksm(f).advisor_mode = Ok("scan-time".into());
        f.tuners = Err(Absent::Denied);
    });
}

#[test]
fn cost_rules_give_expected_verdicts() {
    check("ksm-profit", Fine, |_| ());
    check("ksm-profit", Fail, |f| ksm(f).general_profit = Ok(-1));
    check("ksm-profit", Warn, |f| {
        ksm(f).general_profit = Ok(-1);
        ksm(f).full_scans = Ok(1);
    });
    // ksmd has completed passes, but not since these processes were started or enrolled.
    check("ksm-profit", Warn, |f| {
        ksm(f).general_profit = Ok(-1);
        ksm(f).pages_volatile = Ok(0);
    });
    check("ksm-profit", Warn, |f| {
        ksm(f).general_profit = Ok(-1);
        f.processes.iter_mut().for_each(|p| p.process.id.start_time = 359_900);
    });
    check("ksm-profit", Unknown, |f| ksm(f).general_profit = Err(Absent::Denied));
    check("ksm-profit", NotApplicable, nothing_enrolled);
    // Before 6.4 it is computed: one page saved for 1,000,000 with metadata.
    check("ksm-profit", Fail, |f| {
        ksm(f).general_profit = Err(Absent::NotOnThisKernel);
        (ksm(f).pages_sharing, ksm(f).ksm_zero_pages) = (Ok(1), Err(Absent::NotOnThisKernel));
        ksm(f).use_zero_pages = Ok(0);
        ksm(f).pages_unshared = Ok(1_000_000);
    });

    check("ksm-copies", Fine, |_| ());
    check("ksm-copies", Warn, |f| f.vmstat.as_mut().unwrap().insert("cow_ksm".into(), 1 << 30).map(drop).unwrap());
    check("ksm-copies", Unknown, |f| f.vmstat = Err(Absent::Denied));
    check("ksm-copies", Unknown, |f| f.vmstat = Ok(BTreeMap::new()));
    check("ksm-copies", NotApplicable, nothing_enrolled);

    let huge = |f: &mut HostFacts| f.processes[0].regions.as_mut().unwrap()[0].anon_huge = Bytes(GIB);
    check("ksm-huge-pages", Fine, |_| ());
    check("ksm-huge-pages", Warn, huge);
    check("ksm-huge-pages", Warn, |f| {
        f.vmstat.as_mut().unwrap().insert("thp_split_page".into(), 4096).map(drop).unwrap()
    });
    check("ksm-huge-pages", NotApplicable, |f| f.thp_enabled = Err(Absent::NotOnThisKernel));
    check("ksm-huge-pages", Unknown, |f| deny(&mut f.processes[0]));
    check("ksm-huge-pages", Unknown, |f| f.vmstat = Ok([("cow_ksm".to_owned(), 0)].into()));
    check("ksm-huge-pages", Fine, |f| {
        huge(f);
        ksm(f).run = Ok(0);
    });

    check("ksmd-cpu", Fine, |_| ());
    check("ksmd-cpu", Warn, |f| f.ksmd = Ok(KsmdCpuTime { cpu_seconds: 2000.0, uptime_seconds: 3600.0 }));
    check("ksmd-cpu", Unknown, |f| f.ksmd = Err(Absent::Vanished));
    check("ksmd-cpu", Unknown, |f| f.ksmd = Ok(KsmdCpuTime { cpu_seconds: 0.0, uptime_seconds: 0.0 }));

    check("memory-headroom", Fine, |_| ());
    check("memory-headroom", Warn, |f| {
        (f.memory.available, f.memory.swap_free) = (Ok(Bytes(1 << 20)), Ok(Bytes(0)));
    });
    check("memory-headroom", Unknown, |f| f.memory.available = Err(Absent::NotOnThisKernel));
    check("memory-headroom", Unknown, |f| ksm(f).ksm_zero_pages = Err(Absent::NotOnThisKernel));
    check("memory-headroom", NotApplicable, nothing_enrolled);

    check("memory-pressure", Fine, |_| ());
    check("memory-pressure", Warn, |f| f.pressure = Ok(Pressure { some: line(12.0), full: line(0.0) }));
    check("memory-pressure", Warn, |f| f.pressure = Ok(Pressure { some: line(2.0), full: line(2.0) }));
    check("memory-pressure", Fail, |f| f.pressure = Ok(Pressure { some: line(40.0), full: line(11.0) }));
    check("memory-pressure", Unknown, |f| f.pressure = Err(Absent::NotOnThisKernel));
    check("memory-pressure", Unknown, |f| f.pressure = Ok(Pressure { some: line(f64::NAN), full: line(0.0) }));

    check("memory-swap", Fine, |_| ());
    check("memory-swap", Warn, |f| f.memory.swap_free = Ok(Bytes(GIB)));
    check("memory-swap", NotApplicable, |f| f.memory.swap_total = Ok(Bytes(0)));
    check("memory-swap", Unknown, |f| f.memory.swap_total = Err(Absent::Malformed("?".into())));
}

#[test]
fn security_rules_give_expected_verdicts() {
    check("ksm-domains", Fine, |_| ());
    check("ksm-domains", Warn, |f| f.processes[1].domain = TrustDomain::User(1001));
    check("ksm-domains", NotApplicable, nothing_enrolled);
    check("ksm-domains", Unknown, |f| deny(&mut f.processes[1]));

    check("ksm-keys", Fine, |_| ());
    check("ksm-keys", Warn, |f| f.processes[0].process.arguments = Ok(vec!["/usr/bin/ssh-agent".into()]));
    check("ksm-keys", Warn, |f| {
        f.processes[0].process.arguments =
            Ok(["qemu-system-x86_64", "-machine", "q35,confidential-guest-support=sev0"].map(String::from).to_vec());
        f.processes[0].process.identity.vm = Some(qemu());
    });
    check("ksm-keys", Unknown, |f| deny(&mut f.processes[0]));
    check("ksm-keys", Unknown, |f| f.processes[0].process.arguments = Err(Absent::Denied));

    let opted_out = |facts: &mut ProcessFacts| {
        vm(facts, |vm| vm.mem_merge = false);
        exclude(facts);
    };
    check("ksm-opt-out", NotApplicable, |_| ());
    check("ksm-opt-out", NotApplicable, |f| vm(&mut f.processes[0], |_| ()));
    check("ksm-opt-out", Warn, |f| opted_out(&mut f.processes[0]));
    check("ksm-keys", Fine, |f| opted_out(&mut f.processes[0]));
    check("ksm-opt-out", Fine, |f| {
        opted_out(&mut f.processes[0]);
        unenroll(&mut f.processes[0]);
    });
    // QEMU enrolls the other backends itself.
    let backend =
        |id: &str, merge| VmMemoryBackend { id: id.into(), kind: "memory-backend-ram".into(), share: false, merge };
    let part = vec![backend("a", true), backend("b", false)];
    check("ksm-opt-out", Fine, |f| vm(&mut f.processes[0], |vm| vm.backends.clone_from(&part)));
    let all = vec![backend("b", false)];
    check("ksm-opt-out", Warn, |f| vm(&mut f.processes[0], |vm| vm.backends.clone_from(&all)));
    check("ksm-opt-out", Unknown, |f| f.processes[0].process.arguments = Err(Absent::Denied));
}

/// One function because it is a table: a rule, its verdict and the facts in each row.
#[test]
fn process_rules_give_expected_verdicts() {
    check_process("process-run", Fine, |_, _| ());
    check_process("process-run", Fail, |h, _| ksm(h).run = Ok(0));
    check_process("process-run", Warn, |h, p| {
        ksm(h).run = Ok(0);
        unenroll(p);
    });
    check_process("process-run", Unknown, |h, _| ksm(h).run = Err(Absent::Denied));

    check_process("process-enrolled", Fine, |_, _| ());
    check_process("process-enrolled", Fail, |_, p| unenroll(p));
    check_process("process-enrolled", Warn, |_, p| {
        p.regions.as_mut().unwrap().push(region(9 * GIB, VmFlags::default()))
    });
    check_process("process-enrolled", Unknown, |_, p| deny(p));
    check_process("process-enrolled", Unknown, |_, p| p.regions = Err(Absent::Denied));
    check_process("process-enrolled", Unknown, |h, p| {
        h.ksm = Err(Absent::Denied);
        deny(p);
    });
    check_process("process-enrolled", NotApplicable, |h, _| h.ksm = Err(Absent::NotOnThisKernel));
    check_process("process-enrolled", NotApplicable, |_, p| p.process.kernel_thread = true);
    check_process("process-enrolled", NotApplicable, |_, p| p.process.state = 'Z');

    let backend = |merge| VmMemoryBackend { id: "mem0".into(), kind: "memory-backend-ram".into(), share: false, merge };
    check_process("process-mem-merge", NotApplicable, |_, _| ());
    check_process("process-mem-merge", NotApplicable, |_, p| vm(p, |vm| vm.monitor = Monitor::Firecracker));
    check_process("process-mem-merge", Fine, |_, p| vm(p, |_| ()));
    check_process("process-mem-merge", Warn, |_, p| vm(p, |vm| vm.mem_merge = false));
    check_process("process-mem-merge", Fail, |_, p| {
        unenroll(p);
        vm(p, |vm| vm.mem_merge = false);
    });
    check_process("process-mem-merge", Fail, |_, p| {
        unenroll(p);
        p.process.identity.vm = Some(Vm { backends: vec![backend(true), backend(false)], ..qemu() });
    });
    check_process("process-mem-merge", Unknown, |_, p| p.process.arguments = Err(Absent::Denied));

    check_process("process-eligible", Fine, |_, _| ());
    check_process("process-eligible", Warn, |_, p| p.regions.as_mut().unwrap().push(shared(GIB / 2, "/dev/shm/x")));
    check_process("process-eligible", Fail, |_, p| p.regions = Ok(vec![shared(GIB, "/memfd:pc.ram (deleted)")]));
    // A shared file belongs to the page cache, unless it is guest RAM.
    check_process("process-eligible", Fine, |_, p| p.regions.as_mut().unwrap().push(shared(9 * GIB, "/srv/ram")));
    check_process("process-eligible", Fail, |_, p| {
        p.regions.as_mut().unwrap().push(shared(9 * GIB, "/srv/ram"));
        let backend = VmMemoryBackend { id: "m".into(), kind: "memory-backend-file".into(), share: true, merge: true };
        p.process.identity.vm = Some(Vm { backends: vec![backend], ..qemu() });
    });
    check_process("process-eligible", NotApplicable, |_, p| p.regions = Ok(vec![]));
    check_process("process-eligible", Unknown, |_, p| p.regions = Err(Absent::Denied));

    check_process("process-pinned", Fine, |_, _| ());
    check_process("process-pinned", Fail, |_, p| vm(p, |vm| vm.vfio = true));
    check_process("process-pinned", Warn, |_, p| p.process.pinned = Ok(Bytes(GIB / 2)));
    check_process("process-pinned", Unknown, |_, p| p.process.pinned = Err(Absent::NotOnThisKernel));

    check_process("process-prctl-exec", Fine, |_, _| ());
    check_process("process-prctl-exec", Warn, |_, p| p.parent_merge_any = Ok(true));
    check_process("process-prctl-exec", Fail, |_, p| {
        unenroll(p);
        p.parent_merge_any = Ok(true);
    });
    check_process("process-prctl-exec", Unknown, |_, p| old_kernel(p));

    check_process("process-seccomp", Fine, |_, p| p.process.seccomp = Ok(2));
    check_process("process-seccomp", Warn, |_, p| {
        unenroll(p);
        p.process.seccomp = Ok(2);
    });
    check_process("process-seccomp", Unknown, |_, p| p.process.seccomp = Err(Absent::Vanished));

    check_process("process-scanned", Fine, |_, _| ());
    check_process("process-scanned", NotApplicable, |_, p| unenroll(p));
    check_process("process-scanned", Warn, |_, p| p.process.ksm.rmap_items = Ok(0));
    check_process("process-scanned", NotApplicable, |h, p| (ksm(h).run, p.process.ksm.rmap_items) = (Ok(0), Ok(0)));
    check_process("process-scanned", Unknown, |_, p| p.process.ksm.rmap_items = Err(Absent::Denied));

    check_process("process-merging", Fine, |_, _| ());
    check_process("process-merging", Warn, |_, p| p.process.ksm.merging_pages = Ok(0));
    check_process("process-merging", Unknown, |_, p| {
        (p.process.ksm.merging_pages, p.process.ksm.rmap_items) = (Ok(0), Ok(9))
    });
    check_process("process-merging", NotApplicable, |_, p| unenroll(p));
    check_process("process-merging", Unknown, |_, p| p.process.ksm.merging_pages = Err(Absent::Denied));

    check_process("process-profit", Fine, |_, _| ());
    check_process("process-profit", Fail, |_, p| p.process.ksm.profit = Ok(-64));
    check_process("process-profit", Warn, |h, p| {
        ksm(h).full_scans = Ok(1);
        p.process.ksm.profit = Ok(-64);
    });
    check_process("process-profit", Unknown, |_, p| p.process.ksm.profit = Err(Absent::NotOnThisKernel));

    check_process("process-keys", Fine, |_, _| ());
    check_process("process-keys", Warn, |_, p| p.process.arguments = Ok(vec!["ssh-agent".into()]));
    check_process("process-keys", Unknown, |_, p| {
        p.process.arguments = Ok(vec!["ssh-agent".into()]);
        deny(p);
    });

    check_process("process-pace", Fine, |_, _| ());
    check_process("process-pace", Warn, |h, _| ksm(h).pages_to_scan = Ok(20));
    check_process("process-pace", Fail, |h, _| ksm(h).pages_to_scan = Ok(1));
    check_process("process-pace", NotApplicable, |_, p| unenroll(p));
    check_process("process-pace", Unknown, |h, _| ksm(h).sleep_millisecs = Err(Absent::Denied));
}

#[test]
fn ineligible_regions_are_listed_with_reason() {
    let mut process = healthy_process(7);
    let mut hugetlb = region(0, VmFlags::HUGETLB);
    hugetlb.hugetlb = Bytes(2 * GIB);
    let mut secret = region(4 << 20, VmFlags::SHARED);
    secret.name = "/secretmem (deleted)".into();
    process.regions = Ok(vec![
        region(GIB, VmFlags::MERGEABLE),
        shared(GIB, "/memfd:memory-backend-memfd (deleted)"),
        hugetlb,
        secret,
        shared(4096, "/dev/shm/small"),
        shared(GIB, "/usr/lib/locale/locale-archive"),
    ]);
    let findings = examine_process(&healthy(), &process);
    let titles: Vec<_> = findings.iter().filter(|f| f.rule == "process-region").map(|f| f.title.as_str()).collect();
    assert_eq!(titles, ["2.00 GiB of hugetlb", "1.00 GiB of shared memory", "4.00 MiB of secret memory"]);
    assert!(findings.iter().all(|f| f.rule != "process-region" || f.verdict == Warn), "{findings:?}");
    note_tested("process-region", Warn);
    assert!(findings.iter().all(|f| f.scope == Scope::Process(process.process.id)));
}

#[test]
fn busy_ksmd_gets_a_longer_sleep() {
    for (current, expected) in [(20, 100), (50, 100), (200, 400), (u64::from(u32::MAX), u64::from(u32::MAX))] {
        let mut facts = healthy();
        facts.ksmd = Ok(KsmdCpuTime { cpu_seconds: 2000.0, uptime_seconds: 3600.0 });
        ksm(&mut facts).sleep_millisecs = Ok(current);
        let finding = examine_host(&facts).into_iter().find(|finding| finding.rule == "ksmd-cpu").unwrap();
        assert_eq!(finding.remedy, [format!("echo {expected} > /sys/kernel/mm/ksm/sleep_millisecs")]);
    }
}

/// Unmerging is only advised if there is memory for it.
#[test]
fn unmerge_remedy_requires_available_memory() {
    let remedy = |available| {
        let mut facts = healthy();
        facts.nodes = Ok(8);
        facts.memory.available = available;
        let findings = examine_host(&facts);
        findings.into_iter().find(|finding| finding.rule == "ksm-nodes").unwrap().remedy
    };
    assert_eq!(remedy(Ok(Bytes(GIB * 2)))[0], "echo 2 > /sys/kernel/mm/ksm/run");
    assert!(
        remedy(Ok(Bytes(GIB)))[0].starts_with("# not now: unmerging needs 941 MiB"),
        "{:?}",
        remedy(Ok(Bytes(GIB)))
    );
    assert!(remedy(Err(Absent::Denied))[0].starts_with("# not now"));
}

/// A filter may kill the process for an injected call.
#[test]
fn no_gdb_remedy_with_a_seccomp_filter() {
    let mut process = healthy_process(7);
    unenroll(&mut process);
    for (mode, injects) in [(Ok(0), true), (Ok(2), false), (Err(Absent::Denied), false)] {
        process.process.seccomp = mode;
        let findings = examine_process(&healthy(), &process);
        let mut lines = findings.iter().flat_map(|finding| &finding.remedy);
        assert_eq!(lines.any(|line| line.starts_with("gdb")), injects, "{findings:#?}");
    }
}

#[test]
fn vm_is_enrolled_over_its_qmp_socket() {
    let mut process = healthy_process(7);
    unenroll(&mut process);
    process.process.identity.vm = Some(qemu());
    let findings = examine_process(&healthy(), &process);
    let finding = findings.iter().find(|finding| finding.rule == "process-enrolled").unwrap();
    let expected = "printf '{\"execute\":\"qmp_capabilities\"}{\"execute\":\"qom-set\",\"arguments\":{\"path\":\
                    \"/objects/pc.ram\",\"property\":\"merge\",\"value\":true}}' | socat -t2 - UNIX-CONNECT:/run/qmp";
    assert_eq!(finding.remedy[1], expected);
}

/// These lines are meant for a root shell.
#[test]
fn untrusted_names_never_reach_a_shell() {
    let mut process = healthy_process(7);
    unenroll(&mut process);
    for name in ["x'; reboot #", "$(reboot)", "-x", "a b", ""] {
        let backend = VmMemoryBackend { id: name.into(), kind: "memory-backend-ram".into(), share: false, merge: true };
        for control in [Some(format!("unix:{name}")), None] {
            let vm = Vm { name: Some(name.into()), control_socket: control, backends: vec![backend.clone()], ..qemu() };
            process.process.identity.vm = Some(vm);
            let findings = examine_process(&healthy(), &process);
            let mut lines = findings.iter().flat_map(|finding| &finding.remedy);
            assert!(
                name.is_empty() || !lines.any(|line| line.contains(name) && !line.starts_with('#')),
                "{findings:#?}"
            );
            assert!(findings.iter().flat_map(|f| &f.remedy).any(|line| line.contains("/objects/ID")));
        }
    }
}

#[test]
fn denied_reading_suggests_sudo() {
    let mut process = healthy_process(7);
    deny(&mut process);
    let findings = examine_process(&healthy(), &process);
    let finding = findings.iter().find(|finding| finding.rule == "process-enrolled").unwrap();
    assert_eq!(finding.remedy, ["sudo pagefold doctor --pid 7"]);
}
