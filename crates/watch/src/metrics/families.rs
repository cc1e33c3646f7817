//! Which figures of a status become which metrics.

use super::{Exposition, Family, Kind, Labels, NAMED, Number, Sample};
use pagefold_daemon::wire::{
    Census, Cgroup, CpuUse, DomainShare, Kind as MemberKind, Ksm, Member, MemberState, Mode, State, Status, Sum,
    Workload,
};
use pagefold_doctor::wire::VerdictName;
use std::ops::Add;

pub fn write(status: &Status, to: &mut Exposition) {
    daemon(status, to);
    host(status, to);
    if let Some(ksm) = &status.ksm {
        kernel(ksm, to);
    }
    worth(status, to);
    if let Some(census) = &status.census {
        classes(census, to);
    }
    domains(status, to);
    members(status, to);
    together(status, to);
}

fn daemon(status: &Status, to: &mut Exposition) {
    let samples = vec![(vec![("version", status.version.as_str())], 1.0)];
    to.family(&Family { kind: Kind::Gauge, name: "pagefold_build_info", help: "The version that runs.", samples });
    let start = Some(status.time - status.uptime_seconds);
    to.gauge("pagefold_start_time_seconds", "When the daemon started, since 1970.", start);
    to.gauge("pagefold_status_timestamp_seconds", "When these figures were read, since 1970.", Some(status.time));

    let modes = [("observe", Mode::Observe), ("advise", Mode::Advise), ("act", Mode::Act)];
    one_of(to, "pagefold_mode", "1 for what the daemon may do, 0 for the others.", "mode", &modes, status.mode);
    let states = [
        ("starting", State::Starting),
        ("working", State::Working),
        ("resting", State::Resting),
        ("paused", State::Paused),
        ("yielding", State::Yielding),
    ];
    one_of(to, "pagefold_state", "1 for what the daemon does, 0 for the others.", "state", &states, status.state);

    to.gauge("pagefold_resident_bytes", "Resident memory of the daemon.", status.resident);
    let uses = [("ksmd", status.cpu.ksmd), ("pagefold", status.cpu.pagefold)];
    let of = |figure: fn(CpuUse) -> f64| {
        uses.iter().filter_map(|(who, cpu)| Some((vec![("of", *who)], figure((*cpu)?)))).collect::<Vec<_>>()
    };
    let help = "CPU time since the daemon started.";
    to.family(&Family { kind: Kind::Counter, name: "pagefold_cpu_seconds", help, samples: of(|cpu| cpu.seconds) });
    let help = "CPU time over the last minute, 1 for one CPU.";
    to.family(&Family { kind: Kind::Gauge, name: "pagefold_cpu_ratio", help, samples: of(|cpu| cpu.percent / 100.0) });

    let bounds = &status.bounds;
    let help = "CPU time that ksmd and the daemon may use together on average, 1 for one CPU.";
    to.gauge("pagefold_bound_cpu_ratio", help, Some(bounds.cpu_percent / 100.0));
    let help = "CPU time that is left for a burst, negative while one is made up for.";
    to.gauge("pagefold_burst_left_seconds", help, Some(bounds.burst_left_seconds));
    to.gauge("pagefold_bound_metadata_bytes", "Metadata of ksmd at most.", bounds.metadata);

    let samples = series(status.decisions_by_reason.iter().map(|(word, n)| (vec![("reason", &**word)], Some(*n))));
    to.family(&Family { kind: Kind::Counter, name: "pagefold_decisions", help: "Decisions by reason.", samples });
    let verdicts = [
        ("fail", VerdictName::Fail),
        ("warn", VerdictName::Warn),
        ("unknown", VerdictName::Unknown),
        ("ok", VerdictName::Ok),
        ("not_applicable", VerdictName::NotApplicable),
    ];
    let count = |verdict| status.findings_by_verdict.get(&verdict).copied();
    let samples = series(verdicts.into_iter().map(|(name, verdict)| (vec![("verdict", name)], count(verdict))));
    let help = "Findings of the doctor by verdict, those in order among them.";
    to.family(&Family { kind: Kind::Gauge, name: "pagefold_findings", help, samples });
}

fn host(status: &Status, to: &mut Exposition) {
    let memory = &status.memory;
    to.gauge("pagefold_memory_size_bytes", "Memory of the host (MemTotal).", memory.total);
    to.gauge("pagefold_memory_available_bytes", "Memory that programs can still get (MemAvailable).", memory.available);
    to.gauge("pagefold_memory_free_bytes", "Memory that nobody uses (MemFree).", memory.free);
    let help = "Anonymous memory in huge pages that are mapped as such (AnonHugePages).";
    to.gauge("pagefold_memory_anon_huge_bytes", help, memory.anon_huge);
    let help = "MemAvailable to keep; without it, all that pays is merged.";
    to.gauge("pagefold_goal_available_bytes", help, status.goal.keep_available);
    let help = "Part of the last ten seconds in which some task waited for memory (PSI).";
    to.gauge("pagefold_memory_pressure_ratio", help, memory.pressure_percent.map(|percent| percent / 100.0));
    let help = "Huge pages that the kernel split since the daemon started, for any reason.";
    to.counter("pagefold_huge_pages_split", help, status.huge_pages_split);
}

fn kernel(ksm: &Ksm, to: &mut Exposition) {
    to.gauge("pagefold_ksm_run", "ksmd: 0 stopped, 1 running, 2 unmerging everything.", ksm.run);
    to.gauge(
        "pagefold_ksm_batch_pages",
        "Pages that ksmd looks at between two sleeps (pages_to_scan).",
        ksm.pages_to_scan,
    );
    let sleep = ksm.sleep_millisecs.map(|millis| millis as f64 / 1e3);
    to.gauge("pagefold_ksm_sleep_seconds", "How long ksmd sleeps between two batches (sleep_millisecs).", sleep);
    to.gauge("pagefold_ksm_shared_pages", "Frames that are shared (pages_shared).", ksm.pages_shared);
    to.gauge("pagefold_ksm_sharing_pages", "Further mappings of them (pages_sharing).", ksm.pages_sharing);
    to.gauge("pagefold_ksm_unshared_pages", "Pages without a copy (pages_unshared).", ksm.pages_unshared);
    to.gauge("pagefold_ksm_volatile_pages", "Pages that change too fast (pages_volatile).", ksm.pages_volatile);
    to.gauge("pagefold_ksm_zero_pages", "Pages mapped to the page of zeros (ksm_zero_pages).", ksm.ksm_zero_pages);
    to.counter(
        "pagefold_ksm_scanned_pages",
        "Pages that ksmd looked at since boot (pages_scanned).",
        ksm.pages_scanned,
    );
    to.counter(
        "pagefold_ksm_skipped_pages",
        "Pages that ksmd passed over since boot (pages_skipped).",
        ksm.pages_skipped,
    );
    to.counter("pagefold_ksm_full_scans", "Complete scans since boot (full_scans).", ksm.full_scans);
    to.counter("pagefold_ksm_cow_pages", "Merged pages written and copied since boot (cow_ksm).", ksm.cow_ksm);
    to.gauge(
        "pagefold_ksm_general_profit_bytes",
        "Saved less metadata by the kernel (general_profit).",
        ksm.general_profit,
    );
}

fn worth(status: &Status, to: &mut Exposition) {
    to.gauge("pagefold_saved_gross_bytes", "What merging saves on this host, before metadata.", status.saved.gross);
    let split_zero = status.saved.split_zero;
    let by_class = [("duplicate", status.saved.duplicate), ("zero", status.saved.zero), ("split_zero", split_zero)];
    let samples = series(by_class.into_iter().map(|(class, bytes)| (vec![("class", class)], bytes)));
    let help = "What merging saves by class: merged with equal pages, mapped to the kernel's page of zeros by KSM, or \
                freed with zeros in split huge pages, which KSM does not count.";
    to.family(&Family { kind: Kind::Gauge, name: "pagefold_saved_class_bytes", help, samples });
    let zero = status.saved.zero.map(u64::cast_signed);
    let split_zero = split_zero.map(u64::cast_signed);
    let unmerged = || {
        let zeros = zero.unwrap_or(0) + split_zero.unwrap_or(0);
        Some(status.saved.net? - status.saved.duplicate_net? - zeros)
    };
    let net = status.saved.duplicate_net;
    let by_class = [("duplicate", net), ("zero", zero), ("split_zero", split_zero), ("unmerged", unmerged())];
    let samples = series(by_class.into_iter().map(|(class, bytes)| (vec![("class", class)], bytes)));
    let help = "What merging saves by class less metadata, of which pages that are not merged have some, too.";
    to.family(&Family { kind: Kind::Gauge, name: "pagefold_saved_class_net_bytes", help, samples });
    to.gauge("pagefold_saved_metadata_bytes", "Metadata that the kernel keeps for it.", status.saved.metadata);
    to.gauge("pagefold_saved_net_bytes", "What is left of it, negative where merging costs more.", status.saved.net);
    let passes = &status.passes;
    to.counter("pagefold_passes", "Censuses, each with its merge where anything pays.", Some(passes.passes));
    to.counter("pagefold_merges", "Passes that merged anything.", Some(passes.merges));
    to.counter("pagefold_passes_seconds", "How long all passes took.", Some(passes.seconds));
    let help = "CPU time of all passes, ksmd's included.";
    to.counter("pagefold_passes_cpu_seconds", help, Some(passes.cpu_seconds));
    let help = "What the plans that were carried out should have saved since the daemon started.";
    to.gauge("pagefold_predicted_bytes", help, Some(passes.predicted));
    to.gauge("pagefold_reached_bytes", "What they saved.", Some(passes.reached));
    if let Some(last) = &passes.last {
        to.gauge("pagefold_last_pass_timestamp_seconds", "When the last pass ended, since 1970.", Some(last.time));
        to.gauge("pagefold_last_pass_duration_seconds", "How long the last pass took.", Some(last.seconds));
        to.gauge(
            "pagefold_last_pass_cpu_seconds",
            "CPU time of the last pass, ksmd's included.",
            Some(last.cpu_seconds),
        );
    }
    to.counter("pagefold_cow_pages", "Merged pages written and copied since the daemon started.", status.cow_breaks);
}

fn classes(census: &Census, to: &mut Exposition) {
    let classes = &census.classes;
    to.gauge(
        "pagefold_census_timestamp_seconds",
        "When the last census was taken, whoever it was of.",
        Some(census.time),
    );
    to.gauge(
        "pagefold_census_processes",
        "Processes that were looked at, each as its last census found it.",
        Some(census.processes),
    );
    to.gauge(
        "pagefold_census_not_seen_processes",
        "Processes that the last census could not look at.",
        Some(census.not_seen),
    );
    let by_class = [
        ("zero", classes.zero),
        ("duplicate", classes.duplicate),
        ("unique", classes.unique),
        ("merged", classes.merged),
        ("volatile", classes.volatile),
    ];
    let samples = by_class.map(|(class, bytes)| (vec![("class", class)], bytes.value())).into();
    let help = "Resident private anonymous memory by what merging could do with it.";
    to.family(&Family { kind: Kind::Gauge, name: "pagefold_census_bytes", help, samples });
    let by_partner = [
        ("process", classes.duplicate_within_process),
        ("domain", classes.duplicate_within_domain),
        ("other_domain", classes.duplicate_across_domains),
    ];
    let samples = by_partner.map(|(nearest, bytes)| (vec![("nearest", nearest)], bytes.value())).into();
    let help = "The class of duplicates by where the nearest copy is.";
    to.family(&Family { kind: Kind::Gauge, name: "pagefold_census_duplicate_bytes", help, samples });
    let help = "Duplicates beyond one copy of each content.";
    to.gauge("pagefold_census_redundant_bytes", help, Some(classes.redundant));
}

fn domains(status: &Status, to: &mut Exposition) {
    let figures: [Figure<DomainShare>; 4] = [
        ("pagefold_domain_saved_bytes", "What merging saves in a trust domain, an estimate.", |domain| domain.saved),
        ("pagefold_domain_merged_bytes", "Merged memory of a trust domain, kept copies included.", |domain| {
            domain.merged
        }),
        ("pagefold_domain_resident_bytes", "Resident memory of a trust domain, blind to merging.", |domain| {
            domain.resident
        }),
        ("pagefold_domain_members", "Members of a trust domain.", |domain| Some(domain.members)),
    ];
    write_each(to, &figures, &status.domains, |domain| vec![("domain", named(&domain.name))]);
    let net = |domain: &DomainShare| net(domain.saved, domain.metadata);
    let samples = series(status.domains.iter().map(|domain| (vec![("domain", named(&domain.name))], net(domain))));
    let help = "What merging saves for the members in a trust domain less the metadata of their pages, an estimate.";
    to.family(&Family { kind: Kind::Gauge, name: "pagefold_domain_saved_net_bytes", help, samples });
}

fn members(status: &Status, to: &mut Exposition) {
    let states = [
        ("arriving", MemberState::Arriving),
        ("followed", MemberState::Followed),
        ("merged", MemberState::Merged),
        ("backed_off", MemberState::BackedOff),
        ("excluded", MemberState::Excluded),
        ("withdrawn", MemberState::Withdrawn),
    ];
    let count = |state| status.members.iter().filter(|member| member.state == state).count() as u64;
    let samples = states.map(|(name, state)| (vec![("state", name)], count(state).value())).into();
    let help = "Members that the status names, by what is done with them.";
    to.family(&Family { kind: Kind::Gauge, name: "pagefold_members", help, samples });
    let known = status.members.iter().filter(|member| member.footprint.is_some());
    let ages = || known.clone().map(|member| member.footprint_age_seconds);
    let help = "Members that the status names whose footprint is an estimate: their fair share was not read.";
    let estimated = ages().filter(Option::is_none).count() as u64;
    to.gauge("pagefold_members_footprint_estimated", help, Some(estimated));
    let help = "How long ago the fair share of a member was read, at most.";
    to.gauge("pagefold_members_footprint_age_max_seconds", help, ages().flatten().max());
    let help = "Members that the status does not name: they are in no other series of members.";
    to.gauge("pagefold_members_left_out", help, Some(status.members_left_out));

    let figures: [Figure<Member>; 4] = [
        (
            "pagefold_member_footprint_bytes",
            "What a member takes: its fair share of each page, or an estimate until that is read.",
            |m| m.footprint,
        ),
        ("pagefold_member_resident_bytes", "Resident memory of a member, blind to merging.", |m| m.resident),
        ("pagefold_member_merged_bytes", "Merged memory of a member, kept copies included.", |m| m.merged),
        ("pagefold_member_saved_bytes", "What merging saves for a member, an estimate by the host's mean.", |m| {
            m.saved
        }),
    ];
    write_each(to, &figures, &status.members, |member| {
        vec![("kind", kind(member.kind)), ("member", &*member.label), ("domain", named(&member.domain))]
    });
}

fn kind(kind: MemberKind) -> &'static str {
    match kind {
        MemberKind::Vm => "vm",
        MemberKind::Container => "container",
        MemberKind::Job => "job",
        MemberKind::Process => "process",
    }
}

/// What belongs together.
fn together(status: &Status, to: &mut Exposition) {
    let figures: [Figure<Workload>; 3] = [
        (
            "pagefold_workload_footprint_bytes",
            "What a virtual machine, container or job takes with all its processes: their fair shares.",
            |workload| workload.sum.footprint,
        ),
        (
            "pagefold_workload_saved_bytes",
            "What merging saves for a virtual machine, container or job, an estimate by the host's mean.",
            |workload| workload.sum.saved,
        ),
        ("pagefold_workload_processes", "Processes of a virtual machine, container or job.", |workload| {
            Some(workload.sum.processes)
        }),
    ];
    // Other processes are members by their name: with their number each would be a new series.
    let workloads = status.workloads.iter().filter(|workload| workload.kind != MemberKind::Process);
    write_each(to, &figures, workloads.clone(), of_workload);
    let net_of = |sum: &Sum| net(sum.saved, sum.metadata);
    let samples = series(workloads.map(|workload| (of_workload(workload), net_of(&workload.sum))));
    let help =
        "What merging saves for a virtual machine, container or job less the metadata of its pages, an estimate.";
    to.family(&Family { kind: Kind::Gauge, name: "pagefold_workload_saved_net_bytes", help, samples });
    let help = "Workloads that the status does not name: they are in no other series of workloads.";
    to.gauge("pagefold_workloads_left_out", help, Some(status.workloads_left_out));

    let figures: [Figure<Cgroup>; 2] = [
        ("pagefold_cgroup_footprint_bytes", "What the members in a cgroup take: their fair shares.", |cgroup| {
            cgroup.sum.footprint
        }),
        (
            "pagefold_cgroup_saved_bytes",
            "What merging saves for the members in a cgroup, an estimate by the host's mean.",
            |cgroup| cgroup.sum.saved,
        ),
    ];
    write_each(to, &figures, &status.cgroups, |cgroup| vec![("cgroup", &*cgroup.path)]);
    let samples = series(status.cgroups.iter().map(|cgroup| (vec![("cgroup", &*cgroup.path)], net_of(&cgroup.sum))));
    let help = "What merging saves for the members in a cgroup less the metadata of their pages, an estimate.";
    to.family(&Family { kind: Kind::Gauge, name: "pagefold_cgroup_saved_net_bytes", help, samples });
    let help = "Cgroups that the status does not name: they are in no other series of cgroups.";
    to.gauge("pagefold_cgroups_left_out", help, Some(status.cgroups_left_out));
}

/// What names a workload.
fn of_workload(workload: &Workload) -> Labels<'_> {
    vec![("kind", kind(workload.kind)), ("workload", &*workload.name), ("domain", named(&workload.domain))]
}

/// What is saved less metadata.
fn net(saved: Option<u64>, metadata: Option<u64>) -> Option<i64> {
    Some(saved?.cast_signed() - metadata?.cast_signed())
}

/// The domain of those that have none but their own, without the number of a process: each restart would be a new
/// series.
fn named(domain: &str) -> &str {
    match domain.split_once("process ") {
        Some(("", _)) => "processes",
        Some(("vm of ", _)) => "vms without a name",
        _ => domain,
    }
}

/// A figure of what there is several of: the name of its metric, its meaning, and where it is found.
type Figure<T> = (&'static str, &'static str, fn(&T) -> Option<u64>);

/// Write a family for each figure. Things with equal labels are one series; the first [`NAMED`] are named, and the
/// others summed up.
fn write_each<'a, T: 'a>(
    to: &mut Exposition,
    figures: &[Figure<T>],
    things: impl IntoIterator<Item = &'a T, IntoIter: Clone>,
    labels: impl Fn(&'a T) -> Labels<'a>,
) {
    let things = things.into_iter();
    for (name, help, figure) in figures {
        let samples = series(things.clone().map(|thing| (labels(thing), figure(thing))));
        to.family(&Family { kind: Kind::Gauge, name, help, samples });
    }
}

/// Samples for the first [`NAMED`] different labels, the rest summed up as `others`. Who is named does not depend on
/// which values are absent.
fn series<'a, N: Number + Add<Output = N> + Copy>(
    rows: impl Iterator<Item = (Labels<'a>, Option<N>)>,
) -> Vec<Sample<'a>> {
    let mut sums: Vec<(Labels, Option<N>)> = Vec::new();
    for (mut labels, value) in rows {
        if sums.len() >= NAMED && sums[..NAMED].iter().all(|(known, _)| *known != labels) {
            labels.iter_mut().for_each(|(_, value)| *value = "others");
        }
        match sums.iter_mut().find(|(known, _)| *known == labels) {
            Some((_, sum)) => {
                *sum = match (*sum, value) {
                    (Some(sum), Some(value)) => Some(sum + value),
                    (sum, value) => sum.or(value),
                }
            }
            None => sums.push((labels, value)),
        }
    }
    sums.into_iter().filter_map(|(labels, sum)| Some((labels, sum?.value()))).collect()
}

/// A metric that is 1 for one of some words and 0 for the others.
fn one_of<T: Copy + PartialEq>(
    to: &mut Exposition,
    name: &'static str,
    help: &'static str,
    label: &'static str,
    words: &[(&'static str, T)],
    current: T,
) {
    let samples = words.iter().map(|(word, value)| (vec![(label, *word)], f64::from(u8::from(*value == current))));
    to.family(&Family { kind: Kind::Gauge, name, help, samples: samples.collect() });
}
