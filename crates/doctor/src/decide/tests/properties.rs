//! Properties of the rules under any facts.

use super::*;
use proptest::prelude::*;

fn absent() -> impl Strategy<Value = Absent> {
    prop_oneof![
        Just(Absent::NotOnThisKernel),
        Just(Absent::Denied),
        Just(Absent::Vanished),
        Just(Absent::Malformed("x".into()))
    ]
}

fn reading<T: Clone + std::fmt::Debug + 'static>(
    value: impl Strategy<Value = T> + 'static,
) -> BoxedStrategy<Reading<T>> {
    prop_oneof![4 => value.prop_map(Ok), 1 => absent().prop_map(Err)].boxed()
}

/// Boundary values of the rules, and any other numbers.
fn number() -> impl Strategy<Value = u64> + Clone {
    prop_oneof![Just(0), Just(1), Just(2), 3u64..10_000, any::<u64>(), Just(u64::MAX)]
}

fn bytes() -> impl Strategy<Value = Bytes> {
    number().prop_map(Bytes)
}

prop_compose! {
    fn any_ksm()(
        n in prop::collection::vec(reading(number()), 17),
        zero in reading(any::<i64>()),
        profit in reading(any::<i64>()),
        mode in reading(prop_oneof![Just("none".to_owned()), Just("scan-time".to_owned()), Just("?".to_owned())]),
    ) -> Ksm {
        let mut n = n.into_iter();
        let mut next = || n.next().unwrap();
        Ksm {
            run: next(), pages_to_scan: next(), sleep_millisecs: next(), pages_shared: next(), pages_sharing: next(),
            pages_unshared: next(), pages_volatile: next(), pages_scanned: next(), pages_skipped: next(),
            full_scans: next(), max_page_sharing: next(), merge_across_nodes: next(), use_zero_pages: next(),
            ksm_zero_pages: zero, general_profit: profit, stable_node_chains: next(), stable_node_dups: next(),
            smart_scan: next(), advisor_mode: mode, advisor_target_scan_time: next(),
        }
    }
}

prop_compose! {
    fn any_region()(
        start in any::<u64>(), end in any::<u64>(), n in prop::collection::vec(bytes(), 4),
        flag in prop::sample::select(vec!["mg", "sh", "ht", "io", "de", "dp", "hg"]),
        merge in any::<bool>(),
        name in prop::sample::select(vec!["", "/memfd:x", "/secretmem", "[heap]", "/lib/x"]),
    ) -> Region {
        let mut region = Region::empty(AddressRange { start, end });
        (region.rss, region.anonymous, region.anon_huge, region.hugetlb) = (n[0], n[1], n[2], n[3]);
        region.flags = VmFlags::from_mnemonic(flag);
        if merge {
            region.flags = region.flags.with(VmFlags::MERGEABLE);
        }
        region.name = name.to_owned();
        region
    }
}

prop_compose! {
    fn any_process(pid: u32)(
        regions in reading(prop::collection::vec(any_region(), 0..4)),
        n in prop::collection::vec(reading(number()), 3),
        i in prop::collection::vec(reading(any::<i64>()), 2),
        b in prop::collection::vec(reading(any::<bool>()), 3),
        pinned in reading(bytes()),
        comm in prop::sample::select(vec!["ssh-agent", "qemu-system-x86", ""]),
        arguments in reading(prop::collection::vec(".{0,8}", 0..3)),
        domain in 0u32..3,
        state in prop::sample::select(vec!['S', 'Z']),
        kernel_thread in any::<bool>(),
        is_vm in any::<bool>(), mem_merge in any::<bool>(), vfio in any::<bool>(),
    ) -> ProcessFacts {
        let mut facts = healthy_process(pid);
        facts.process.ksm = ProcessKsm {
            rmap_items: n[0].clone(), merging_pages: n[1].clone(), zero_pages: i[0].clone(), profit: i[1].clone(),
            merge_any: b[0].clone(), mergeable: b[1].clone(),
        };
        facts.process.seccomp = n[2].clone();
        (facts.process.pinned, facts.process.arguments, facts.regions) = (pinned, arguments, regions);
        (facts.process.comm, facts.process.state, facts.process.kernel_thread) = (comm.into(), state, kernel_thread);
        facts.process.identity.vm = is_vm.then(|| Vm { mem_merge, vfio, ..qemu() });
        facts.domain = TrustDomain::User(domain);
        facts.parent_merge_any = b[2].clone();
        exclude(&mut facts);
        facts
    }
}

fn any_tuner() -> impl Strategy<Value = Tuner> {
    prop::sample::select(vec![Tuner::Tuned, Tuner::Ksmtuned, Tuner::Mom, Tuner::Ksmctl, Tuner::Harvester])
}

prop_compose! {
    fn any_host()(
        ksm in reading(any_ksm()),
        m in prop::collection::vec(reading(bytes()), 3),
        pressure in reading((any::<f64>(), any::<f64>())),
        vmstat in reading(prop::collection::vec(number(), 3)),
        thp in reading(Just("always".to_owned())),
        nodes in reading(any::<u32>()),
        ksmd in reading((any::<f64>(), any::<f64>())),
        tuners in reading(prop::collection::vec(any_tuner(), 0..4)),
        kernel in reading(".{0,8}"),
        processes in (any_process(1), any_process(2), any_process(3)),
        page_size in prop::sample::select(vec![4096u64, 16384, 65536]),
    ) -> HostFacts {
        let mut facts = healthy();
        facts.page_size = PageSize::new(page_size).unwrap();
        let memory = &mut facts.memory;
        (memory.available, memory.swap_total, memory.swap_free) = (m[0].clone(), m[1].clone(), m[2].clone());
        facts.pressure = pressure.map(|(some, full)| Pressure { some: line(some), full: line(full) });
        let names = ["cow_ksm", "ksm_swpin_copy", "thp_split_page"].map(String::from);
        facts.vmstat = vmstat.map(|counts| names.into_iter().zip(counts).collect());
        facts.ksmd = ksmd.map(|(cpu_seconds, uptime_seconds)| KsmdCpuTime { cpu_seconds, uptime_seconds });
        (facts.ksm, facts.thp_enabled, facts.nodes, facts.tuners, facts.kernel) = (ksm, thp, nodes, tuners, kernel);
        facts.processes = vec![processes.0, processes.1, processes.2];
        facts
    }
}

proptest! {
    #[test]
    fn any_facts_give_complete_findings(facts in any_host()) {
        assert_complete(&examine_host(&facts));
        for process in &facts.processes {
            assert_complete(&examine_process(&facts, process));
        }
    }

    #[test]
    fn the_order_of_processes_does_not_matter(facts in any_host()) {
        let mut turned = facts.clone();
        turned.processes.rotate_left(1);
        turned.processes.swap(0, 1);
        prop_assert_eq!(examine_host(&facts), examine_host(&turned));
    }

    /// A missing reading is never reported as healthy: with every reading absent, no rule returns `Ok`.
    #[test]
    fn absent_readings_are_never_ok(why in absent()) {
        let mut facts = healthy();
        let no = || Err(why.clone());
        facts.ksm = Err(why.clone());
        facts.kernel = Err(why.clone());
        let memory = &mut facts.memory;
        (memory.available, memory.swap_total, memory.swap_free) = (no(), no(), no());
        facts.pressure = Err(why.clone());
        facts.vmstat = Err(why.clone());
        facts.thp_enabled = Err(why.clone());
        facts.nodes = Err(why.clone());
        facts.ksmd = Err(why.clone());
        facts.tuners = Err(why.clone());
        for process in &mut facts.processes {
            process.process.ksm = ProcessKsm::absent(&why);
            process.process.seccomp = Err(why.clone());
            process.process.pinned = no();
            process.process.arguments = Err(why.clone());
            process.regions = Err(why.clone());
            process.parent_merge_any = Err(why.clone());
        }
        let mut findings = examine_process(&facts, &facts.processes[0]);
        // If every process has exited, none can have a problem.
        if why != Absent::Vanished {
            findings.extend(examine_host(&facts));
        }
        findings.retain(|finding| finding.verdict == Fine);
        prop_assert!(findings.is_empty(), "{:#?}", findings);
    }
}
