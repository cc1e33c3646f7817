//! Builds the status report from a snapshot of the daemon and the current state of the host.

use pagefold_base::ksm::{Ksm, RMAP_ITEM_BYTES};
use pagefold_base::memory::MemInfo;
use pagefold_base::process::Process;
use pagefold_base::{Absent, Bytes, PageCounts, Pages, ProcessId, Reading};
use pagefold_daemon::decide::{DaemonMode, DaemonStatus, PendingUnenroll, TrackedProcess};
use pagefold_daemon::run::{CpuUsage, DaemonSettings, FairShareReading, LoggedDecision, Snapshot};
use pagefold_daemon::wire::*;
use pagefold_doctor::decide::audit::Topic;
use pagefold_doctor::doctor_facts;
use pagefold_doctor::wire::{DoctorReport, FindingReport, VerdictName};
use pagefold_host::{Host, observe, parse};
use pagefold_output::wire::{PageClasses, ProcessInfo};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

/// The processes in the status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessScope {
    /// Every tracked process.
    All,
    /// Only processes that wait for their first census. Reading all processes takes long if there are many.
    Unscanned,
}

/// Build the status report: a list of fields, each with its source.
pub fn build_status(
    host: &dyn Host,
    snapshot: &Snapshot,
    scope: ProcessScope,
    findings: Vec<FindingReport>,
) -> StatusReport {
    let (rules, budget) = (snapshot.state.rules(), snapshot.state.cpu_budget());
    let (status, why) = snapshot.state.status();
    let counters = observe::ksm(host).ok();
    let vmstat = observe::vmstat(host).unwrap_or_default();
    let page_bytes = host.page_size().bytes();
    let mean_savings = MeanPageSavings { page_bytes, counters: counters.as_ref() };
    let tracked = snapshot.state.tracked();
    let tracked_count = snapshot.tracked_processes.iter().filter(|process| tracked.contains_key(&process.id)).count();
    let mut tracked_processes = tracked_process_reports(host, snapshot, scope, &mean_savings);
    let domains = domain_savings(&tracked_processes);
    let (workloads, workloads_omitted) =
        split_first(group_footprints::sum_by_workload(&tracked_processes), MAX_LISTED_GROUPS);
    let (cgroups, cgroups_omitted) =
        split_first(group_footprints::sum_by_cgroup(&tracked_processes), MAX_LISTED_GROUPS);
    tracked_processes.truncate(MAX_LISTED_PROCESSES);
    let tracked_processes_omitted = (tracked_count - tracked_processes.len()) as u64;
    let findings_by_verdict = count_by_verdict(&findings);
    let is_problem = |finding: &FindingReport| [VerdictName::Warn, VerdictName::Fail].contains(&finding.verdict);
    let increase_since = |name: &str, before: Option<u64>| Some(vmstat.get(name)?.saturating_sub(before?));
    StatusReport {
        schema: STATUS_SCHEMA.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        host: host.describe(),
        pid: std::process::id(),
        time: unix_seconds(host.unix_time()),
        uptime_seconds: host.unix_time().duration_since(snapshot.started_at).unwrap_or_default().as_secs_f64(),
        mode: mode_name(rules.mode),
        state: state_name(status),
        why,
        memory: host_memory_report(host),
        goal: GoalReport { keep_available: rules.keep_available.map(|bytes| bytes.0) },
        bounds: bounds_report(&snapshot.settings, budget.available_seconds()),
        ksm: counters.as_ref().map(|counters| ksm_report(counters, vmstat.get("cow_ksm").copied())),
        saved: counters
            .as_ref()
            .map(|counters| savings_report(counters, split_zero_pages(snapshot), page_bytes))
            .unwrap_or_default(),
        cpu: CpuReport { ksmd: snapshot.ksmd_cpu.map(cpu_usage), pagefold: Some(cpu_usage(snapshot.own_cpu)) },
        resident: own_resident(page_bytes),
        process_discovery: if snapshot.exec_events.is_ok() {
            ProcessDiscovery::ProcConnector
        } else {
            ProcessDiscovery::Polling
        },
        passes: pass_totals(snapshot),
        decisions_by_reason: snapshot
            .reasons
            .iter()
            .map(|(reason, count)| (reason.word().to_owned(), *count))
            .collect(),
        huge_pages_split: increase_since("thp_split_page", snapshot.thp_splits_and_cow_breaks_at_start.0),
        cow_breaks: increase_since("cow_ksm", snapshot.thp_splits_and_cow_breaks_at_start.1),
        census: census_totals(snapshot, host),
        domains,
        tracked_processes,
        tracked_processes_omitted,
        workloads,
        workloads_omitted,
        cgroups,
        cgroups_omitted,
        sharing: sharing_report(snapshot, page_bytes),
        placement: None,
        vm_cpus: Vec::new(),
        vm_cpus_omitted: 0,
        decisions: snapshot.decisions.iter().take(MAX_LISTED_DECISIONS).map(decision_report).collect(),
        findings: findings.into_iter().filter(is_problem).collect(),
        findings_by_verdict,
    }
}

/// The tracked processes of a scope, the largest first.
fn tracked_process_reports(
    host: &dyn Host,
    snapshot: &Snapshot,
    scope: ProcessScope,
    mean_savings: &MeanPageSavings<'_>,
) -> Vec<TrackedProcessReport> {
    let state = &snapshot.state;
    // In the mode `observe` the daemon takes no census, so no process waits for one.
    let awaits_first_scan = |process: &TrackedProcess| {
        process.is_unscanned() && process.may_be_scanned() && state.rules().mode != DaemonMode::Observe
    };
    let is_in_scope = |process: &&Process| {
        scope == ProcessScope::All || state.tracked().get(&process.id).is_some_and(awaits_first_scan)
    };
    let in_scope = snapshot.tracked_processes.iter().filter(is_in_scope);
    let mut reports: Vec<TrackedProcessReport> =
        in_scope.filter_map(|process| tracked_process_report(host, snapshot, process, mean_savings)).collect();
    reports.sort_by_key(|process| (Reverse(process.resident), process.pid));
    reports
}

fn mode_name(mode: DaemonMode) -> DaemonModeName {
    match mode {
        DaemonMode::Observe => DaemonModeName::Observe,
        DaemonMode::Advise => DaemonModeName::Advise,
        DaemonMode::Act => DaemonModeName::Act,
    }
}

fn state_name(status: DaemonStatus) -> DaemonStateName {
    match status {
        DaemonStatus::Starting => DaemonStateName::Starting,
        DaemonStatus::Working => DaemonStateName::Working,
        DaemonStatus::Idle => DaemonStateName::Idle,
        DaemonStatus::Paused => DaemonStateName::Paused,
        DaemonStatus::Yielding => DaemonStateName::Yielding,
    }
}

/// Memory of the host, without the fields that cannot be read.
fn host_memory_report(host: &dyn Host) -> HostMemoryReport {
    let memory = observe::memory(host).ok();
    let bytes = |field: fn(&MemInfo) -> &Reading<Bytes>| Some(field(memory.as_ref()?).as_ref().ok()?.0);
    HostMemoryReport {
        total: bytes(|memory| &memory.total),
        available: bytes(|memory| &memory.available),
        free: bytes(|memory| &memory.free),
        anon_huge: bytes(|memory| &memory.anon_huge),
        pressure_percent: observe::pressure(host).ok().map(|pressure| pressure.some.avg10),
    }
}

/// The first items, and the number of omitted ones.
fn split_first<T>(mut items: Vec<T>, max_items: usize) -> (Vec<T>, u64) {
    let omitted = items.len().saturating_sub(max_items) as u64;
    items.truncate(max_items);
    (items, omitted)
}

/// The findings of the doctor about KSM, worst first, including those that are ok.
pub fn collect_findings(host: &dyn Host, settings: &DaemonSettings) -> Vec<FindingReport> {
    let trust =
        doctor_facts::TrustPolicy { domains: settings.domains.clone(), exclusions: settings.exclusions.clone() };
    let facts = doctor_facts::gather_host_facts(host, &[], &trust);
    DoctorReport::from_host(host.describe(), &facts).retain_topics(&[Topic::Ksm.name()]).findings
}

/// The number of findings of each verdict; empty if there are no findings.
fn count_by_verdict(findings: &[FindingReport]) -> BTreeMap<VerdictName, u64> {
    let verdicts =
        [VerdictName::NotApplicable, VerdictName::Ok, VerdictName::Unknown, VerdictName::Warn, VerdictName::Fail];
    let count = |verdict| findings.iter().filter(|finding| finding.verdict == verdict).count() as u64;
    if findings.is_empty() { BTreeMap::new() } else { verdicts.map(|verdict| (verdict, count(verdict))).into() }
}

fn unix_seconds(time: SystemTime) -> f64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn cpu_usage(usage: CpuUsage) -> CpuUsageReport {
    CpuUsageReport { seconds: usage.total.as_secs_f64(), percent: usage.last_minute_share * 100.0 }
}

fn bounds_report(settings: &DaemonSettings, burst_available: f64) -> BoundsReport {
    BoundsReport {
        cpu_percent: settings.rules.cpu_rate * 100.0,
        burst_seconds: settings.rules.burst.as_secs_f64(),
        burst_available_seconds: burst_available,
        metadata: settings.max_metadata.map(|bytes| bytes.0),
        regions_per_process: settings.max_regions,
        split_huge_pages: settings.split_huge_pages,
    }
}

fn ksm_report(counters: &Ksm, cow_ksm: Option<u64>) -> KsmReport {
    let known_value = |value: &Result<u64, Absent>| value.as_ref().ok().copied();
    KsmReport {
        run: known_value(&counters.run),
        pages_to_scan: known_value(&counters.pages_to_scan),
        sleep_millisecs: known_value(&counters.sleep_millisecs),
        pages_shared: known_value(&counters.pages_shared),
        pages_sharing: known_value(&counters.pages_sharing),
        pages_unshared: known_value(&counters.pages_unshared),
        pages_volatile: known_value(&counters.pages_volatile),
        pages_scanned: known_value(&counters.pages_scanned),
        pages_skipped: known_value(&counters.pages_skipped),
        ksm_zero_pages: counters.ksm_zero_pages.as_ref().ok().copied(),
        full_scans: known_value(&counters.full_scans),
        general_profit: counters.general_profit.as_ref().ok().copied(),
        cow_ksm,
    }
}

/// Zero pages that were freed by splitting huge pages, which KSM does not count.
fn split_zero_pages(snapshot: &Snapshot) -> Pages {
    snapshot.split_zero_pages.values().copied().sum()
}

/// The savings: by the kernel's counters, and zero pages freed by splitting huge pages. Before 6.6, KSM merges zero
/// pages like other pages.
fn savings_report(counters: &Ksm, split_zeros: Pages, page_bytes: u64) -> HostSavingsReport {
    let duplicate = counters.pages_sharing.as_ref().ok().map(|pages| pages * page_bytes);
    let zero = counters.ksm_zero_pages.as_ref().ok().map(|pages| (*pages).max(0).unsigned_abs() * page_bytes);
    let split_zero = split_zeros.0 * page_bytes;
    let gross = duplicate.map(|duplicate| duplicate + zero.unwrap_or(0) + split_zero);
    let net = counters.general_profit.as_ref().ok().map(|profit| profit + split_zero.cast_signed());
    let merged = counters.pages_shared.as_ref().ok().zip(counters.pages_sharing.as_ref().ok());
    let duplicate_net = merged.map(|(shared, sharing)| {
        (sharing * page_bytes).cast_signed() - ((shared + sharing) * RMAP_ITEM_BYTES).cast_signed()
    });
    let metadata = gross.zip(net).map(|(gross, net)| (gross.cast_signed() - net).max(0).unsigned_abs());
    HostSavingsReport {
        gross,
        duplicate,
        zero,
        split_zero: Some(split_zero).filter(|bytes| *bytes > 0),
        duplicate_net,
        metadata,
        net,
    }
}

/// The gross savings on a host by KSM's counters, if they can be read.
pub fn gross_saved_by_ksm(host: &dyn Host) -> Option<u64> {
    savings_report(&observe::ksm(host).ok()?, Pages::ZERO, host.page_size().bytes()).gross
}

fn own_resident(page_bytes: u64) -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(statm.split_ascii_whitespace().nth(1)?.parse::<u64>().ok()? * page_bytes)
}

fn pass_totals(snapshot: &Snapshot) -> PassTotalsReport {
    PassTotalsReport {
        passes: snapshot.pass_and_merge_counts.0,
        merges: snapshot.pass_and_merge_counts.1,
        seconds: snapshot.pass_wall_and_cpu_time.0.as_secs_f64(),
        cpu_seconds: snapshot.pass_wall_and_cpu_time.1.as_secs_f64(),
        predicted: snapshot.predicted_and_measured.0.0,
        measured: snapshot.predicted_and_measured.1.0,
        last: snapshot.last_pass.map(|last| PassReport {
            time: unix_seconds(last.ended_at),
            seconds: last.wall_seconds,
            cpu_seconds: last.cpu_time.as_secs_f64(),
            processes: last.scanned_processes,
            predicted: last.predicted.0,
            measured: last.measured_net.map(|net| net.0),
        }),
    }
}

fn census_totals(snapshot: &Snapshot, host: &dyn Host) -> Option<CensusTotalsReport> {
    let (taken_at, unscanned_processes) = snapshot.last_census?;
    let mut sum = PageCounts::default();
    for counts in snapshot.page_counts.values() {
        sum += *counts;
    }
    let classes = PageClasses::from_counts_in_bytes(&sum, host.page_size());
    Some(CensusTotalsReport {
        time: unix_seconds(taken_at),
        processes: snapshot.page_counts.len() as u64,
        unscanned_processes,
        classes,
    })
}

/// The mean savings of a merged page. A frame is shared by all processes that map it. The real number of mappings is
/// only in the page tables, and walking those of all processes for each status would cost too much.
struct MeanPageSavings<'a> {
    page_bytes: u64,
    counters: Option<&'a Ksm>,
}

impl MeanPageSavings<'_> {
    /// The bytes that merging saves for a process with `merging` pages on KSM frames.
    fn saved_bytes(&self, merging_pages: u64) -> Option<u64> {
        let counters = self.counters?;
        let (shared, sharing) = (*counters.pages_shared.as_ref().ok()?, *counters.pages_sharing.as_ref().ok()?);
        let merged_pages = (shared + sharing).max(1);
        Some((u128::from(merging_pages * self.page_bytes) * u128::from(sharing) / u128::from(merged_pages)) as u64)
    }

    /// The current fair share of a process whose page tables were walked before. Anonymous memory that became resident
    /// since counts in full; pages merged since save the mean. New mappings of files and shared memory count only after
    /// the next walk.
    fn update_fair_share(&self, fair: &FairShareReading, anonymous: Option<u64>, merging_pages: Option<u64>) -> u64 {
        let saved_bytes = |merging_pages: Option<u64>| merging_pages.and_then(|pages| self.saved_bytes(pages));
        let merged_then = fair.merged_pages.map(|pages| pages.0);
        // If either saving is unknown, the difference is, too.
        let newly_saved = match (saved_bytes(merging_pages), saved_bytes(merged_then)) {
            (Some(saved_now), Some(saved_then)) => saved_now.cast_signed() - saved_then.cast_signed(),
            _ => 0,
        };
        let growth = anonymous.map_or(0, |anonymous| anonymous.cast_signed() - fair.anonymous_resident.0.cast_signed());
        (fair.pss.0.cast_signed() + growth - newly_saved).max(0).unsigned_abs()
    }
}

fn tracked_process_report(
    host: &dyn Host,
    snapshot: &Snapshot,
    process: &Process,
    mean_savings: &MeanPageSavings<'_>,
) -> Option<TrackedProcessReport> {
    let tracked = snapshot.state.tracked().get(&process.id)?;
    let handle = host.open(process.id.pid).ok().filter(|handle| handle.id() == process.id);
    let ksm =
        handle.as_ref().map(|handle| parse::process_ksm(handle.read("ksm_stat"), handle.read("ksm_merging_pages")));
    let statm = handle.and_then(|handle| parse::statm(&handle.read("statm").ok()?).ok());
    let merging_pages = ksm.as_ref().and_then(|ksm| ksm.merging_pages.as_ref().ok().copied());
    let zero_pages = ksm.as_ref().and_then(|ksm| Some(ksm.zero_pages.as_ref().ok()?.max(&0).unsigned_abs()));
    let merged_pages = merging_pages.map(|merging_pages| merging_pages + zero_pages.unwrap_or(0));
    let saved_by_merging = merging_pages.and_then(|merging_pages| mean_savings.saved_bytes(merging_pages));
    let resident = tracked.resident.0;
    let fair = snapshot.fair_shares.get(&process.id);
    let split_zero_pages = snapshot.split_zero_pages.get(&process.id).map_or(0, |pages| pages.0);
    let anonymous = statm.map(|statm| statm.anonymous_bytes(host.page_size()).0);
    // Zero pages that KSM placed are not resident.
    let estimated_footprint = || saved_by_merging.map(|saved| resident.saturating_sub(saved));
    let kind = workload_kind(process);
    let info = ProcessInfo::from_process(process, Some(&tracked.domain));
    let uptime = host.unix_time().duration_since(snapshot.started_at).unwrap_or_default();
    let (state, why) =
        tracking_state((snapshot, uptime), process.id, tracked, merged_pages.unwrap_or(0) * mean_savings.page_bytes);
    Some(TrackedProcessReport {
        pid: process.id.pid.0,
        start_time: process.id.start_time,
        label: info.label(),
        kind,
        workload: workload_name(process, kind),
        uid: info.uid,
        cgroup: info.cgroup,
        domain: tracked.domain.to_string(),
        resident: Some(resident),
        file_and_shmem: statm.map(|statm| (statm.shared.0 * mean_savings.page_bytes).min(resident)),
        merged: merged_pages.map(|merged_pages| merged_pages * mean_savings.page_bytes),
        footprint: fair
            .map(|fair| mean_savings.update_fair_share(fair, anonymous, merging_pages).min(resident))
            .or_else(estimated_footprint),
        footprint_age_seconds: fair
            .map(|fair| host.unix_time().duration_since(fair.measured_at).unwrap_or_default().as_secs()),
        saved: saved_by_merging
            .map(|saved| saved + (zero_pages.unwrap_or(0) + split_zero_pages) * mean_savings.page_bytes),
        metadata: ksm.and_then(|ksm| Some(ksm.rmap_items.ok()? * RMAP_ITEM_BYTES)),
        enrolled_ranges: snapshot.enrolled_ranges.get(&process.id).copied().unwrap_or(0),
        state,
        why,
    })
}

fn workload_kind(process: &Process) -> WorkloadKind {
    match process {
        _ if process.identity.vm.is_some() => WorkloadKind::Vm,
        _ if process.identity.container.is_some() => WorkloadKind::Container,
        _ if process.identity.job.is_some() => WorkloadKind::Job,
        _ => WorkloadKind::Process,
    }
}

/// The name of the workload that a process belongs to.
fn workload_name(process: &Process, kind: WorkloadKind) -> String {
    let identity = &process.identity;
    let name = match kind {
        WorkloadKind::Vm => identity.vm.as_ref().and_then(|vm| vm.name.clone()),
        WorkloadKind::Container => identity.container.clone(),
        WorkloadKind::Job => identity.job.as_ref().map(|job| job.name.clone()),
        WorkloadKind::Process => None,
    };
    name.unwrap_or_else(|| format!("{} {}", process.comm, process.id.pid))
}

/// What the daemon does with a process, and why. `uptime` is how long the daemon runs.
fn tracking_state(
    (snapshot, uptime): (&Snapshot, Duration),
    id: ProcessId,
    tracked: &TrackedProcess,
    merged: u64,
) -> (TrackingState, String) {
    let next_scan = || {
        let remaining = tracked.next_scan.saturating_sub(uptime);
        format!("next scan in {}", format_duration(remaining))
    };
    let unenroll_text = |what: &str| describe_unenroll(what, tracked.pending_unenroll.as_ref(), uptime);
    match tracked {
        TrackedProcess { exclusion_reason: Some(why), .. } => (TrackingState::Excluded, unenroll_text(why)),
        TrackedProcess { unenrolled_by_operator: true, .. } => {
            (TrackingState::Unenrolled, unenroll_text("unenroll requested by an operator"))
        }
        TrackedProcess { pending_unenroll: Some(pending), .. } => {
            (TrackingState::BackedOff, unenroll_text(pending.reason.unenroll_explanation()))
        }
        tracked if tracked.is_unscanned() => (TrackingState::Arriving, "not scanned yet".to_owned()),
        tracked if tracked.enrolled && merged > 0 => (TrackingState::Merged, next_scan()),
        tracked if tracked.is_backed_off(snapshot.state.rules()) => (TrackingState::BackedOff, next_scan()),
        _ => {
            let nothing_to_merge =
                snapshot.page_counts.get(&id).is_some_and(|counts| counts.duplicate() + counts.zero == Pages::ZERO);
            (
                TrackingState::Tracked,
                if nothing_to_merge { format!("nothing to merge yet; {}", next_scan()) } else { next_scan() },
            )
        }
    }
}

/// Why a process is no longer merged, and when its merged pages are unenrolled.
fn describe_unenroll(reason: &str, pending: Option<&PendingUnenroll>, now: Duration) -> String {
    match pending {
        None => reason.to_owned(),
        Some(PendingUnenroll { last_failure: None, .. }) => format!("{reason}: it is unenrolled as soon as possible"),
        Some(PendingUnenroll { last_failure: Some(why), next_try, .. }) => {
            let retry_delay = format_duration(next_try.saturating_sub(now));
            format!("{reason}: not unenrolled yet ({why}), next try in {retry_delay}")
        }
    }
}

fn format_duration(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..100 => format!("{seconds} s"),
        seconds => format!("{} min", seconds / 60),
    }
}

fn domain_savings(processes: &[TrackedProcessReport]) -> Vec<DomainSavingsReport> {
    let mut by_domain: BTreeMap<&str, DomainSavingsReport> = BTreeMap::new();
    let add = |sum: Option<u64>, value: Option<u64>| match (sum, value) {
        (None, None) => None,
        (sum, value) => Some(sum.unwrap_or(0) + value.unwrap_or(0)),
    };
    for process in processes {
        let domain = by_domain.entry(&process.domain).or_insert_with(|| empty_domain_savings(&process.domain));
        domain.tracked_processes += 1;
        domain.resident = add(domain.resident, process.resident);
        domain.merged = add(domain.merged, process.merged);
        domain.saved = add(domain.saved, process.saved);
        domain.metadata = add(domain.metadata, process.metadata);
    }
    let mut by_domain: Vec<DomainSavingsReport> = by_domain.into_values().collect();
    by_domain.sort_by_key(|domain| Reverse(domain.saved));
    if by_domain.len() > MAX_LISTED_DOMAINS {
        let rest = by_domain.split_off(MAX_LISTED_DOMAINS - 1);
        by_domain.push(rest.iter().fold(empty_domain_savings("others"), |sum, domain| DomainSavingsReport {
            tracked_processes: sum.tracked_processes + domain.tracked_processes,
            resident: add(sum.resident, domain.resident),
            merged: add(sum.merged, domain.merged),
            saved: add(sum.saved, domain.saved),
            metadata: add(sum.metadata, domain.metadata),
            ..sum
        }));
    }
    by_domain
}

fn empty_domain_savings(name: &str) -> DomainSavingsReport {
    DomainSavingsReport {
        name: name.to_owned(),
        tracked_processes: 0,
        resident: None,
        merged: None,
        saved: None,
        metadata: None,
    }
}

/// The sharing matrix of the parties that share most.
fn sharing_report(snapshot: &Snapshot, page_bytes: u64) -> Option<SharingReport> {
    let mut shared_by_party: BTreeMap<&str, u64> = BTreeMap::new();
    for ((party, _), pages) in snapshot.sharing.shared_pages() {
        *shared_by_party.entry(party).or_default() += pages.0;
    }
    let mut parties: Vec<(u64, &str)> = shared_by_party.into_iter().map(|(label, sum)| (sum, label)).collect();
    parties.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(b.1)));
    parties.truncate(MAX_MATRIX_PARTIES);
    let pages = |party: &str, other_party: &str| {
        snapshot.sharing.shared_pages().get(&(party.to_owned(), other_party.to_owned())).map_or(0, |pages| pages.0)
    };
    let row = |party: &str| parties.iter().map(|(_, other_party)| pages(party, other_party) * page_bytes).collect();
    let shared_bytes = parties.iter().map(|(_, party)| row(party)).collect();
    (!parties.is_empty()).then(|| SharingReport {
        parties: parties.iter().map(|(_, label)| (*label).to_owned()).collect(),
        shared_bytes,
    })
}

pub(super) fn decision_report(LoggedDecision { logged_at, subject, decision }: &LoggedDecision) -> DecisionReport {
    DecisionReport {
        time_ms: logged_at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis() as u64,
        kind: decision.kind.word().to_owned(),
        subject: subject.clone(),
        reason: decision.reason.word().to_owned(),
        explanation: decision.explanation.clone(),
        predicted: decision.predicted.map(|bytes| bytes.0),
        carried_out: decision.carried_out,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::Pid;
    use pagefold_base::domain::TrustDomain;
    use pagefold_daemon::decide::{DaemonRules, DecisionReason, ProcessArrival};

    #[test]
    fn savings_are_reported_by_class() {
        let counters = |zeros: &[u8]| {
            parse::ksm(|name| match name {
                "pages_shared" => Ok(b"2".to_vec()),
                "pages_sharing" => Ok(b"10".to_vec()),
                "general_profit" => Ok(b"51968".to_vec()),
                "ksm_zero_pages" if !zeros.is_empty() => Ok(zeros.to_vec()),
                _ => Err(Absent::NotOnThisKernel),
            })
        };
        let saved = |zeros: &[u8], split: u64| savings_report(&counters(zeros), Pages(split), 4096);
        let by_class = |saved: HostSavingsReport| (saved.gross, saved.duplicate, saved.zero);
        assert_eq!(by_class(saved(b"3", 0)), (Some(13 * 4096), Some(10 * 4096), Some(3 * 4096)));
        assert_eq!(by_class(saved(b"", 0)), (Some(10 * 4096), Some(10 * 4096), None), "absent is not zero");
        // Calculated by hand: 64 bytes for each of 2 + 10 merged pages and 8 unmerged pages.
        let report = saved(b"3", 0);
        assert_eq!(report.duplicate_net, Some(10 * 4096 - 12 * 64));
        assert_eq!((report.metadata, report.net), (Some(20 * 64), Some(13 * 4096 - 20 * 64)));
        // Zero pages freed by splitting huge pages count as savings, and need no metadata.
        let split = saved(b"3", 5);
        assert_eq!((split.gross, split.split_zero), (Some(18 * 4096), Some(5 * 4096)));
        assert_eq!((split.metadata, split.net), (Some(20 * 64), Some(18 * 4096 - 20 * 64)));
        assert_eq!(report.split_zero, None);
    }

    #[test]
    fn fair_share_follows_later_resident_and_merged_pages() {
        let counters = parse::ksm(|name| match name {
            "pages_shared" => Ok(b"1".to_vec()),
            "pages_sharing" => Ok(b"3".to_vec()),
            _ => Err(Absent::NotOnThisKernel),
        });
        let mean_savings = MeanPageSavings { page_bytes: 4096, counters: Some(&counters) };
        let (pss, anonymous) = (Bytes(600 * 4096), Bytes(1000 * 4096));
        let fair = FairShareReading {
            measured_at: SystemTime::now(),
            pss,
            anonymous_resident: anonymous,
            merged_pages: Some(Pages(100)),
        };
        let fair_pages = |fair: &FairShareReading, anonymous: u64, merging_pages| {
            mean_savings.update_fair_share(fair, Some(anonymous * 4096), merging_pages) / 4096
        };
        assert_eq!(fair_pages(&fair, 1000, Some(100)), 600, "nothing has changed");
        assert_eq!(fair_pages(&fair, 1050, Some(100)), 650, "50 pages more");
        assert_eq!(fair_pages(&fair, 1000, Some(140)), 570, "three quarters of 40 more merged pages are saved");
        assert_eq!(
            fair_pages(&fair, 1000, Some(60)),
            630,
            "three quarters of 40 fewer merged pages are no longer saved"
        );
        assert_eq!(fair_pages(&fair, 1000, None), 600);
        assert_eq!(fair_pages(&FairShareReading { merged_pages: None, ..fair }, 1000, Some(60)), 600);
        assert_eq!(fair_pages(&fair, 100, Some(100)), 0, "never negative");
        assert_eq!(mean_savings.update_fair_share(&fair, None, None), fair.pss.0, "unchanged if nothing else is known");
    }

    #[test]
    fn failed_unenroll_is_reported_with_its_reason() {
        let process = ProcessId { pid: Pid(1), start_time: 1 };
        let (domain, similarity_key, resident) = (TrustDomain::Host, String::new(), Bytes(1 << 30));
        let arrival = ProcessArrival { process, domain, similarity_key, exclusion_reason: None, resident };
        let second = Duration::from_secs(1);
        let mut process = TrackedProcess::new(arrival, Duration::ZERO, &DaemonRules::default());
        let description = |process: &TrackedProcess| {
            describe_unenroll("unenroll requested by an operator", process.pending_unenroll.as_ref(), 3 * second)
        };
        assert_eq!(description(&process), "unenroll requested by an operator");
        process.request_unenroll(DecisionReason::Operator, Duration::ZERO);
        assert_eq!(description(&process), "unenroll requested by an operator: it is unenrolled as soon as possible");
        process.record_unenroll_failure("there is not the memory for it".to_owned(), Duration::ZERO, Duration::ZERO);
        let failed =
            "unenroll requested by an operator: not unenrolled yet (there is not the memory for it), next try in 7 s";
        assert_eq!(description(&process), failed);
    }
}
