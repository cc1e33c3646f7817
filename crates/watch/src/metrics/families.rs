//! Maps the figures of a status to metrics.

use super::{Exposition, Labels, MAX_NAMED_SERIES, MetricFamily, MetricKind, MetricSample, MetricValue};
use pagefold_daemon::wire::{
    CensusTotalsReport, CgroupReport, CpuUsageReport, DaemonModeName, DaemonStateName, DomainSavingsReport,
    GroupFootprint, KsmReport, StatusReport, TrackedProcessReport, TrackingState, VmCpuReport, WorkloadKind,
    WorkloadReport,
};
use pagefold_doctor::wire::VerdictName;
use std::ops::Add;

pub fn write_status(status: &StatusReport, out: &mut Exposition) {
    write_daemon(status, out);
    write_host(status, out);
    if let Some(ksm) = &status.ksm {
        write_ksm(ksm, out);
    }
    write_savings(status, out);
    if let Some(census) = &status.census {
        write_page_classes(census, out);
    }
    write_domains(status, out);
    write_processes(status, out);
    write_groups(status, out);
    write_vm_cpus(status, out);
}

fn write_daemon(status: &StatusReport, out: &mut Exposition) {
    let samples = vec![(vec![("version", status.version.as_str())], 1.0)];
    out.add_family(&MetricFamily {
        kind: MetricKind::Gauge,
        name: "pagefold_build_info",
        help: "The running version of the daemon.",
        samples,
    });
    let start = Some(status.time - status.uptime_seconds);
    out.add_gauge("pagefold_start_time_seconds", "Start time of the daemon, since 1970.", start);
    out.add_gauge("pagefold_status_timestamp_seconds", "Time of these readings, since 1970.", Some(status.time));

    let modes =
        [("observe", DaemonModeName::Observe), ("advise", DaemonModeName::Advise), ("act", DaemonModeName::Act)];
    write_state_set(
        out,
        "pagefold_mode",
        "1 for the mode of the daemon, 0 for the other modes.",
        "mode",
        &modes,
        status.mode,
    );
    let states = [
        ("starting", DaemonStateName::Starting),
        ("working", DaemonStateName::Working),
        ("idle", DaemonStateName::Idle),
        ("paused", DaemonStateName::Paused),
        ("yielding", DaemonStateName::Yielding),
    ];
    write_state_set(
        out,
        "pagefold_state",
        "1 for the state of the daemon, 0 for the other states.",
        "state",
        &states,
        status.state,
    );
    write_daemon_resources(status, out);
    write_decisions_and_findings(status, out);
}

fn write_daemon_resources(status: &StatusReport, out: &mut Exposition) {
    out.add_gauge("pagefold_resident_bytes", "Resident memory of the daemon.", status.resident);
    let usages = [("ksmd", status.cpu.ksmd), ("pagefold", status.cpu.pagefold)];
    let samples_of = |figure: fn(CpuUsageReport) -> f64| {
        usages
            .iter()
            .filter_map(|(component, cpu)| Some((vec![("of", *component)], figure((*cpu)?))))
            .collect::<Vec<_>>()
    };
    let help = "CPU time since the daemon started.";
    out.add_family(&MetricFamily {
        kind: MetricKind::Counter,
        name: "pagefold_cpu_seconds",
        help,
        samples: samples_of(|cpu| cpu.seconds),
    });
    let help = "CPU time over the last minute, 1 for one CPU.";
    out.add_family(&MetricFamily {
        kind: MetricKind::Gauge,
        name: "pagefold_cpu_ratio",
        help,
        samples: samples_of(|cpu| cpu.percent / 100.0),
    });

    let bounds = &status.bounds;
    let help = "Limit of the mean CPU use of ksmd and the daemon together, 1 for one CPU.";
    out.add_gauge("pagefold_bound_cpu_ratio", help, Some(bounds.cpu_percent / 100.0));
    let help = "CPU time left in the token bucket, negative after it was exceeded.";
    out.add_gauge("pagefold_burst_available_seconds", help, Some(bounds.burst_available_seconds));
    out.add_gauge("pagefold_bound_metadata_bytes", "Limit of ksmd's metadata.", bounds.metadata);
}

fn write_decisions_and_findings(status: &StatusReport, out: &mut Exposition) {
    let samples = bounded_series(
        status.decisions_by_reason.iter().map(|(reason, count)| (vec![("reason", &**reason)], Some(*count))),
    );
    out.add_family(&MetricFamily {
        kind: MetricKind::Counter,
        name: "pagefold_decisions",
        help: "Decisions by reason.",
        samples,
    });
    let verdicts = [
        ("fail", VerdictName::Fail),
        ("warn", VerdictName::Warn),
        ("unknown", VerdictName::Unknown),
        ("ok", VerdictName::Ok),
        ("not_applicable", VerdictName::NotApplicable),
    ];
    let count = |verdict| status.findings_by_verdict.get(&verdict).copied();
    let samples = bounded_series(verdicts.into_iter().map(|(name, verdict)| (vec![("verdict", name)], count(verdict))));
    let help = "Findings of the doctor by verdict, including ok.";
    out.add_family(&MetricFamily { kind: MetricKind::Gauge, name: "pagefold_findings", help, samples });
}

fn write_host(status: &StatusReport, out: &mut Exposition) {
    let memory = &status.memory;
    out.add_gauge("pagefold_memory_size_bytes", "Memory of the host (MemTotal).", memory.total);
    out.add_gauge("pagefold_memory_available_bytes", "Memory available to programs (MemAvailable).", memory.available);
    out.add_gauge("pagefold_memory_free_bytes", "Unused memory (MemFree).", memory.free);
    let help = "Anonymous memory in huge pages that are mapped as such (AnonHugePages).";
    out.add_gauge("pagefold_memory_anon_huge_bytes", help, memory.anon_huge);
    let help = "Goal for MemAvailable; absent if all profitable merges are done.";
    out.add_gauge("pagefold_goal_available_bytes", help, status.goal.keep_available);
    let help = "Share of the last ten seconds in which some task waited for memory (PSI).";
    out.add_gauge("pagefold_memory_pressure_ratio", help, memory.pressure_percent.map(|percent| percent / 100.0));
    let help = "Huge pages that the kernel split since the daemon started, for any reason.";
    out.add_counter("pagefold_huge_pages_split", help, status.huge_pages_split);
}

fn write_ksm(ksm: &KsmReport, out: &mut Exposition) {
    out.add_gauge("pagefold_ksm_run", "ksmd: 0 stopped, 1 running, 2 unmerging all pages.", ksm.run);
    out.add_gauge(
        "pagefold_ksm_batch_pages",
        "Pages that ksmd scans between two sleeps (pages_to_scan).",
        ksm.pages_to_scan,
    );
    let sleep = ksm.sleep_millisecs.map(|millis| millis as f64 / 1e3);
    out.add_gauge("pagefold_ksm_sleep_seconds", "Time that ksmd sleeps between two batches (sleep_millisecs).", sleep);
    out.add_gauge("pagefold_ksm_shared_pages", "Shared frames (pages_shared).", ksm.pages_shared);
    out.add_gauge(
        "pagefold_ksm_sharing_pages",
        "Additional mappings of shared frames (pages_sharing).",
        ksm.pages_sharing,
    );
    out.add_gauge("pagefold_ksm_unshared_pages", "Pages without a copy (pages_unshared).", ksm.pages_unshared);
    out.add_gauge(
        "pagefold_ksm_volatile_pages",
        "Pages that change between scans (pages_volatile).",
        ksm.pages_volatile,
    );
    out.add_gauge("pagefold_ksm_zero_pages", "Pages mapped to the zero page (ksm_zero_pages).", ksm.ksm_zero_pages);
    out.add_counter(
        "pagefold_ksm_scanned_pages",
        "Pages scanned by ksmd since boot (pages_scanned).",
        ksm.pages_scanned,
    );
    out.add_counter(
        "pagefold_ksm_skipped_pages",
        "Pages skipped by ksmd since boot (pages_skipped).",
        ksm.pages_skipped,
    );
    out.add_counter("pagefold_ksm_full_scans", "Complete scans since boot (full_scans).", ksm.full_scans);
    out.add_counter("pagefold_ksm_cow_pages", "COW breaks of merged pages since boot (cow_ksm).", ksm.cow_ksm);
    out.add_gauge(
        "pagefold_ksm_general_profit_bytes",
        "Savings less metadata, by the kernel's count (general_profit).",
        ksm.general_profit,
    );
}

fn write_savings(status: &StatusReport, out: &mut Exposition) {
    out.add_gauge(
        "pagefold_saved_gross_bytes",
        "Gross savings by merging on this host, before metadata.",
        status.saved.gross,
    );
    let split_zero = status.saved.split_zero;
    let by_class = [("duplicate", status.saved.duplicate), ("zero", status.saved.zero), ("split_zero", split_zero)];
    let samples = bounded_series(by_class.into_iter().map(|(class, bytes)| (vec![("class", class)], bytes)));
    let help = "Savings by class: merged with equal pages, mapped to the kernel's zero page by KSM, or freed as zeros \
                of split huge pages, which KSM does not count.";
    out.add_family(&MetricFamily { kind: MetricKind::Gauge, name: "pagefold_saved_class_bytes", help, samples });
    let zero = status.saved.zero.map(u64::cast_signed);
    let split_zero = split_zero.map(u64::cast_signed);
    let unmerged = || {
        let zeros = zero.unwrap_or(0) + split_zero.unwrap_or(0);
        Some(status.saved.net? - status.saved.duplicate_net? - zeros)
    };
    let net = status.saved.duplicate_net;
    let by_class = [("duplicate", net), ("zero", zero), ("split_zero", split_zero), ("unmerged", unmerged())];
    let samples = bounded_series(by_class.into_iter().map(|(class, bytes)| (vec![("class", class)], bytes)));
    let help = "Net savings by class, less metadata. Pages that are not merged (unmerged) also have metadata.";
    out.add_family(&MetricFamily { kind: MetricKind::Gauge, name: "pagefold_saved_class_net_bytes", help, samples });
    out.add_gauge(
        "pagefold_saved_metadata_bytes",
        "Metadata that the kernel keeps for merging.",
        status.saved.metadata,
    );
    out.add_gauge(
        "pagefold_saved_net_bytes",
        "Net savings: gross savings less metadata, negative if the metadata is larger.",
        status.saved.net,
    );
    let passes = &status.passes;
    out.add_counter("pagefold_passes", "Passes: a census, and a merge if it is profitable.", Some(passes.passes));
    out.add_counter("pagefold_merges", "Passes that merged pages.", Some(passes.merges));
    out.add_counter("pagefold_passes_seconds", "Total duration of all passes.", Some(passes.seconds));
    let help = "CPU time of all passes, including ksmd.";
    out.add_counter("pagefold_passes_cpu_seconds", help, Some(passes.cpu_seconds));
    let help = "Predicted net savings of all merges since the daemon started.";
    out.add_gauge("pagefold_predicted_bytes", help, Some(passes.predicted));
    out.add_gauge(
        "pagefold_measured_bytes",
        "Measured net savings of all merges since the daemon started.",
        Some(passes.measured),
    );
    if let Some(last) = &passes.last {
        out.add_gauge("pagefold_last_pass_timestamp_seconds", "End of the last pass, since 1970.", Some(last.time));
        out.add_gauge("pagefold_last_pass_duration_seconds", "Duration of the last pass.", Some(last.seconds));
        out.add_gauge(
            "pagefold_last_pass_cpu_seconds",
            "CPU time of the last pass, including ksmd.",
            Some(last.cpu_seconds),
        );
    }
    out.add_counter("pagefold_cow_pages", "COW breaks of merged pages since the daemon started.", status.cow_breaks);
    if let Some(placement) = &status.placement {
        out.add_counter(
            "pagefold_numa_placements",
            "Virtual machines placed on NUMA nodes since the daemon started.",
            Some(placement.placed_machines),
        );
        out.add_counter(
            "pagefold_numa_moved_bytes",
            "Memory moved between NUMA nodes since the daemon started.",
            Some(placement.moved_bytes),
        );
        out.add_gauge(
            "pagefold_numa_planned_gain",
            "Net gain of the last plan for NUMA nodes, in CPU seconds an hour.",
            Some(placement.planned_gain.net),
        );
        out.add_gauge(
            "pagefold_numa_placed_gain",
            "Net gain of the placements on NUMA nodes since the daemon started, as planned, in CPU seconds an hour.",
            Some(placement.placed_gain.net),
        );
    }
}

fn write_page_classes(census: &CensusTotalsReport, out: &mut Exposition) {
    let classes = &census.classes;
    out.add_gauge("pagefold_census_timestamp_seconds", "Time of the last census of any process.", Some(census.time));
    out.add_gauge(
        "pagefold_census_processes",
        "Scanned processes; figures of each are from its last census.",
        Some(census.processes),
    );
    out.add_gauge(
        "pagefold_census_unscanned_processes",
        "Processes that the last census could not scan.",
        Some(census.unscanned_processes),
    );
    let by_class = [
        ("zero", classes.zero),
        ("duplicate", classes.duplicate),
        ("unique", classes.unique),
        ("merged", classes.merged),
        ("volatile", classes.volatile),
    ];
    let samples = by_class.map(|(class, bytes)| (vec![("class", class)], bytes.to_f64())).into();
    let help = "Resident private anonymous memory by page class.";
    out.add_family(&MetricFamily { kind: MetricKind::Gauge, name: "pagefold_census_bytes", help, samples });
    let by_partner = [
        ("process", classes.duplicate_within_process),
        ("domain", classes.duplicate_within_domain),
        ("other_domain", classes.duplicate_across_domains),
    ];
    let samples = by_partner.map(|(nearest, bytes)| (vec![("nearest", nearest)], bytes.to_f64())).into();
    let help = "Duplicates by the place of the nearest copy.";
    out.add_family(&MetricFamily { kind: MetricKind::Gauge, name: "pagefold_census_duplicate_bytes", help, samples });
    let help = "Duplicates beyond one copy of each content.";
    out.add_gauge("pagefold_census_redundant_bytes", help, Some(classes.redundant));
}

fn write_domains(status: &StatusReport, out: &mut Exposition) {
    let figures: [GroupMetric<DomainSavingsReport>; 4] = [
        ("pagefold_domain_saved_bytes", "Estimated savings by merging in a trust domain.", |domain| domain.saved),
        ("pagefold_domain_merged_bytes", "Merged memory of a trust domain, including kept copies.", |domain| {
            domain.merged
        }),
        ("pagefold_domain_resident_bytes", "Resident memory of a trust domain, not affected by merging.", |domain| {
            domain.resident
        }),
        ("pagefold_domain_tracked_processes", "Tracked processes in a trust domain.", |domain| {
            Some(domain.tracked_processes)
        }),
    ];
    write_group_metrics(out, &figures, &status.domains, |domain| vec![("domain", domain_name(&domain.name))]);
    let net = |domain: &DomainSavingsReport| net_saved(domain.saved, domain.metadata);
    let samples =
        bounded_series(status.domains.iter().map(|domain| (vec![("domain", domain_name(&domain.name))], net(domain))));
    let help = "Estimated net savings of the processes in a trust domain, less the metadata of their pages.";
    out.add_family(&MetricFamily { kind: MetricKind::Gauge, name: "pagefold_domain_saved_net_bytes", help, samples });
}

fn write_processes(status: &StatusReport, out: &mut Exposition) {
    let states = [
        ("arriving", TrackingState::Arriving),
        ("tracked", TrackingState::Tracked),
        ("merged", TrackingState::Merged),
        ("backed_off", TrackingState::BackedOff),
        ("excluded", TrackingState::Excluded),
        ("unenrolled", TrackingState::Unenrolled),
    ];
    let count = |state| status.tracked_processes.iter().filter(|process| process.state == state).count() as u64;
    let samples = states.map(|(name, state)| (vec![("state", name)], count(state).to_f64())).into();
    let help = "Listed tracked processes by state.";
    out.add_family(&MetricFamily { kind: MetricKind::Gauge, name: "pagefold_tracked_processes", help, samples });
    let known = status.tracked_processes.iter().filter(|process| process.footprint.is_some());
    let ages = || known.clone().map(|process| process.footprint_age_seconds);
    let help = "Listed tracked processes with an estimated footprint: their fair share was not read.";
    let estimated = ages().filter(Option::is_none).count() as u64;
    out.add_gauge("pagefold_tracked_processes_footprint_estimated", help, Some(estimated));
    let help = "Maximum age of the fair share of a tracked process.";
    out.add_gauge("pagefold_tracked_processes_footprint_age_max_seconds", help, ages().flatten().max());
    let help = "Tracked processes that the status omits: no other series includes them.";
    out.add_gauge("pagefold_tracked_processes_omitted", help, Some(status.tracked_processes_omitted));

    let figures: [GroupMetric<TrackedProcessReport>; 4] = [
        (
            "pagefold_tracked_process_footprint_bytes",
            "Footprint of a tracked process: its fair share of each page, or an estimate until that is read.",
            |process| process.footprint,
        ),
        (
            "pagefold_tracked_process_resident_bytes",
            "Resident memory of a tracked process, not affected by merging.",
            |process| process.resident,
        ),
        (
            "pagefold_tracked_process_merged_bytes",
            "Merged memory of a tracked process, including kept copies.",
            |process| process.merged,
        ),
        (
            "pagefold_tracked_process_saved_bytes",
            "Estimated savings of a tracked process, from the host's mean.",
            |process| process.saved,
        ),
    ];
    write_group_metrics(out, &figures, &status.tracked_processes, |process| {
        vec![("kind", kind_name(process.kind)), ("process", &*process.label), ("domain", domain_name(&process.domain))]
    });
}

fn kind_name(kind: WorkloadKind) -> &'static str {
    match kind {
        WorkloadKind::Vm => "vm",
        WorkloadKind::Container => "container",
        WorkloadKind::Job => "job",
        WorkloadKind::Process => "process",
    }
}

/// Write the metrics of workloads and cgroups.
fn write_groups(status: &StatusReport, out: &mut Exposition) {
    let figures: [GroupMetric<WorkloadReport>; 3] = [
        (
            "pagefold_workload_footprint_bytes",
            "Footprint of a virtual machine, container or job: fair shares of all its processes.",
            |workload| workload.sum.footprint,
        ),
        (
            "pagefold_workload_saved_bytes",
            "Estimated savings of a virtual machine, container or job, from the host's mean.",
            |workload| workload.sum.saved,
        ),
        ("pagefold_workload_processes", "Processes of a virtual machine, container or job.", |workload| {
            Some(workload.sum.processes)
        }),
    ];
    // Other processes have series by their name; with their PID each would be a new series.
    let workloads = status.workloads.iter().filter(|workload| workload.kind != WorkloadKind::Process);
    write_group_metrics(out, &figures, workloads.clone(), workload_labels);
    let net_of = |sum: &GroupFootprint| net_saved(sum.saved, sum.metadata);
    let samples = bounded_series(workloads.map(|workload| (workload_labels(workload), net_of(&workload.sum))));
    let help = "Estimated net savings of a virtual machine, container or job, less the metadata of its pages.";
    out.add_family(&MetricFamily { kind: MetricKind::Gauge, name: "pagefold_workload_saved_net_bytes", help, samples });
    let help = "Workloads that the status omits: no other series includes them.";
    out.add_gauge("pagefold_workloads_omitted", help, Some(status.workloads_omitted));

    let figures: [GroupMetric<CgroupReport>; 2] = [
        (
            "pagefold_cgroup_footprint_bytes",
            "Footprint of the tracked processes in a cgroup: their fair shares.",
            |cgroup| cgroup.sum.footprint,
        ),
        (
            "pagefold_cgroup_saved_bytes",
            "Estimated savings of the tracked processes in a cgroup, from the host's mean.",
            |cgroup| cgroup.sum.saved,
        ),
    ];
    write_group_metrics(out, &figures, &status.cgroups, |cgroup| vec![("cgroup", &*cgroup.path)]);
    let samples =
        bounded_series(status.cgroups.iter().map(|cgroup| (vec![("cgroup", &*cgroup.path)], net_of(&cgroup.sum))));
    let help = "Estimated net savings of the tracked processes in a cgroup, less the metadata of their pages.";
    out.add_family(&MetricFamily { kind: MetricKind::Gauge, name: "pagefold_cgroup_saved_net_bytes", help, samples });
    let help = "Cgroups that the status omits: no other series includes them.";
    out.add_gauge("pagefold_cgroups_omitted", help, Some(status.cgroups_omitted));
}

/// How virtual machines run and wait for CPUs.
fn write_vm_cpus(status: &StatusReport, out: &mut Exposition) {
    type Figure = (MetricKind, &'static str, &'static str, fn(&VmCpuReport) -> f64);
    let figures: [Figure; 3] = [
        (
            MetricKind::Counter,
            "pagefold_vm_cpu_ready_seconds",
            "Time for which vCPUs of a virtual machine were runnable and waited for a CPU, summed up.",
            |vm| vm.ready_seconds,
        ),
        (
            MetricKind::Counter,
            "pagefold_vm_cpu_run_seconds",
            "Time for which vCPUs of a virtual machine ran, summed up.",
            |vm| vm.run_seconds,
        ),
        (MetricKind::Gauge, "pagefold_vm_vcpus", "vCPUs of a virtual machine.", |vm| vm.vcpus as f64),
    ];
    // In a fixed order, so that the same machines are named each time.
    let mut vms: Vec<&VmCpuReport> = status.vm_cpus.iter().collect();
    vms.sort_by(|left, right| left.name.cmp(&right.name));
    if vms.is_empty() {
        return;
    }
    for (kind, name, help, figure) in figures {
        let samples = bounded_series(vms.iter().map(|vm| (vec![("vm", &*vm.name)], Some(figure(vm)))));
        out.add_family(&MetricFamily { kind, name, help, samples });
    }
    let help = "Virtual machines that the status omits: no series includes them.";
    out.add_gauge("pagefold_vms_omitted", help, Some(status.vm_cpus_omitted));
}

/// The labels of a workload.
fn workload_labels(workload: &WorkloadReport) -> Labels<'_> {
    vec![("kind", kind_name(workload.kind)), ("workload", &*workload.name), ("domain", domain_name(&workload.domain))]
}

/// Net savings: gross savings less metadata.
fn net_saved(saved: Option<u64>, metadata: Option<u64>) -> Option<i64> {
    Some(saved?.cast_signed() - metadata?.cast_signed())
}

/// The domain as a label. Domains of a single process get a common label without the PID: otherwise each restart would
/// be a new series.
fn domain_name(domain: &str) -> &str {
    match domain.split_once("process ") {
        Some(("", _)) => "processes",
        Some(("vm of ", _)) => "vms without a name",
        _ => domain,
    }
}

/// A metric of a group: its name, its help text, and its value.
type GroupMetric<T> = (&'static str, &'static str, fn(&T) -> Option<u64>);

/// Write a family for each figure. Items with equal labels are one series; the first [`MAX_NAMED_SERIES`] are named,
/// and the rest is summed up.
fn write_group_metrics<'a, T: 'a>(
    out: &mut Exposition,
    figures: &[GroupMetric<T>],
    items: impl IntoIterator<Item = &'a T, IntoIter: Clone>,
    labels: impl Fn(&'a T) -> Labels<'a>,
) {
    let items = items.into_iter();
    for (name, help, figure) in figures {
        let samples = bounded_series(items.clone().map(|item| (labels(item), figure(item))));
        out.add_family(&MetricFamily { kind: MetricKind::Gauge, name, help, samples });
    }
}

/// Samples for the first [`MAX_NAMED_SERIES`] different labels, the rest summed up as `others`. Absent values do not
/// change which items are named.
fn bounded_series<'a, N: MetricValue + Add<Output = N> + Copy>(
    rows: impl Iterator<Item = (Labels<'a>, Option<N>)>,
) -> Vec<MetricSample<'a>> {
    let mut sums: Vec<(Labels, Option<N>)> = Vec::new();
    for (mut labels, value) in rows {
        if sums.len() >= MAX_NAMED_SERIES && sums[..MAX_NAMED_SERIES].iter().all(|(named, _)| *named != labels) {
            labels.iter_mut().for_each(|(_, value)| *value = "others");
        }
        match sums.iter_mut().find(|(named, _)| *named == labels) {
            Some((_, sum)) => {
                *sum = match (*sum, value) {
                    (Some(sum), Some(value)) => Some(sum + value),
                    (sum, value) => sum.or(value),
                }
            }
            None => sums.push((labels, value)),
        }
    }
    sums.into_iter().filter_map(|(labels, sum)| Some((labels, sum?.to_f64()))).collect()
}

/// A metric that is 1 for the current state and 0 for the others.
fn write_state_set<T: Copy + PartialEq>(
    out: &mut Exposition,
    name: &'static str,
    help: &'static str,
    label: &'static str,
    states: &[(&'static str, T)],
    current: T,
) {
    let samples = states.iter().map(|(state, value)| (vec![(label, *state)], f64::from(u8::from(*value == current))));
    out.add_family(&MetricFamily { kind: MetricKind::Gauge, name, help, samples: samples.collect() });
}
