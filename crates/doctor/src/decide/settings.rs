//! KSM's own settings and state.

use super::change::{ApplyMethod, SettingChange, SettingDetails};
use super::host_processes::{HostProcesses, bytes_of, is_at_least_percent, total, tracked, workload};
use super::pace::format_duration;
use super::{
    Finding, HostFacts, HostRule, MissingReading, ProcessFacts, RuleInfo, RuleResult, Verdict, is_set_command,
    pages_to_scan_for, pass_seconds, require, set_command,
};
use pagefold_base::domain::TrustDomain;
use pagefold_base::ksm::Ksm;
use pagefold_base::reading::{Absent, Reading};
use pagefold_base::units::{Bytes, Pages};
use std::collections::BTreeSet;

pub(super) const RUN: RuleInfo = RuleInfo {
    id: "ksm-run",
    source: "/sys/kernel/mm/ksm/run",
    why: "ksmd merges only while run is 1, and the kernel's default is 0. 0 keeps what is merged; 2 stops and \
          unmerges everything. QEMU enrolls the memory of each machine by default, so enrolled memory alone does not \
          show that it should be merged.",
    needs_ksm: true,
    verdicts: Verdict::ALL_BUT_FAIL,
    expected: "1 while memory is to be merged",
    details: SettingDetails {
        benefit: "enrolled memory merges",
        risk: "ksmd takes CPU time; equal pages of all enrolled processes merge, also across trust domains, and QEMU enrolls \
               the memory of each machine that starts later (mem-merge=on is its default)",
        method: ApplyMethod::Live,
        undo: "write 0, which keeps what is merged; 2 unmerges everything, and needs the memory for it",
        counter: "full_scans and pages_sharing in /sys/kernel/mm/ksm",
        versions: "Linux 2.6.32 and later",
        citation: "Linux 6.18: mm/ksm.c (run_store), Documentation/admin-guide/mm/ksm.rst (run)",
    },
};

pub(super) const RULES: &[HostRule] = &[
    HostRule {
        rule: RuleInfo {
            id: "ksm-kernel",
            source: "/sys/kernel/mm/ksm",
            why: "Without CONFIG_KSM the kernel merges nothing: madvise(MADV_MERGEABLE) fails with EINVAL, and so \
                  does prctl(PR_SET_MEMORY_MERGE).",
            needs_ksm: false,
            verdicts: &[Verdict::Ok, Verdict::Unknown, Verdict::Fail],
            expected: "a kernel with CONFIG_KSM=y",
            details: SettingDetails {
                benefit: "equal pages of processes and virtual machines can be merged",
                risk: "another kernel may differ in more than KSM",
                method: ApplyMethod::Reboot,
                undo: "boot the previous kernel",
                counter: "the directory /sys/kernel/mm/ksm exists",
                versions: "Linux 2.6.32 and later",
                citation: "Linux 6.18: mm/Kconfig (KSM), Documentation/admin-guide/mm/ksm.rst",
            },
        },
        judge: judge_kernel,
    },
    HostRule { rule: RUN, judge: judge_run },
    HostRule {
        rule: RuleInfo {
            id: "ksm-pace",
            source: "/sys/kernel/mm/ksm/pages_to_scan, /sys/kernel/mm/ksm/sleep_millisecs",
            why: "A page is merged in the second pass that finds it unchanged, so merging takes two passes at least; \
                  pages that live shorter are never merged. The kernel's defaults are for demonstration.",
            needs_ksm: true,
            verdicts: Verdict::ALL,
            expected: "a full pass takes at most 200 s",
            details: SettingDetails {
                benefit: "memory merges minutes after a process has started, not hours",
                risk: "ksmd takes more CPU time",
                method: ApplyMethod::Live,
                undo: "write the values that were there",
                counter: "full_scans in /sys/kernel/mm/ksm; utime and stime in /proc/PID/stat of ksmd",
                versions: "Linux 2.6.32 and later; the advisor since 6.8",
                citation: "Linux 6.18: mm/ksm.c (ksm_scan_thread, ksm_advisor_target_scan_time), \
                           Documentation/admin-guide/mm/ksm.rst (pages_to_scan)",
            },
        },
        judge: judge_pace,
    },
    HostRule {
        rule: RuleInfo {
            id: "ksm-advisor-pace",
            source: "/sys/kernel/mm/ksm/advisor_mode, /sys/kernel/mm/ksm/advisor_target_scan_time",
            why: "The advisor sets pages_to_scan so that a pass takes its target, 200 s unless changed. Where there \
                  is little to scan it makes ksmd slower than its default.",
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "a target that is not longer than a pass with the default settings",
            details: SettingDetails {
                benefit: "memory merges sooner than without the advisor",
                risk: "ksmd takes more CPU time, up to advisor_max_cpu",
                method: ApplyMethod::Live,
                undo: "write the value that was there",
                counter: "full_scans and pages_to_scan in /sys/kernel/mm/ksm",
                versions: "Linux 6.8 and later",
                citation: "Linux 6.18: mm/ksm.c (scan_time_advisor), Documentation/admin-guide/mm/ksm.rst (Advisor)",
            },
        },
        judge: judge_advisor_pace,
    },
    HostRule {
        rule: RuleInfo {
            id: "ksm-smart-scan",
            source: "/sys/kernel/mm/ksm/smart_scan, /sys/kernel/mm/ksm/pages_skipped",
            why: "Smart scan visits pages that did not merge in earlier passes only in every second to ninth pass. \
                  That takes much less CPU time, but a copy of an old page is found a few passes later. Skipped pages \
                  move from pages_unshared to pages_volatile.",
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "1",
            details: SettingDetails {
                benefit: "ksmd takes less CPU time for pages that do not merge",
                risk: "a new copy of an old page merges a few passes later",
                method: ApplyMethod::Live,
                undo: "write the value that was there",
                counter: "pages_skipped and pages_scanned in /sys/kernel/mm/ksm",
                versions: "Linux 6.7 and later; 1 is the default",
                citation: "Linux 6.18: mm/ksm.c (should_skip_rmap_item, skip_age), \
                           Documentation/admin-guide/mm/ksm.rst (smart_scan)",
            },
        },
        judge: judge_smart_scan,
    },
    HostRule {
        rule: RuleInfo {
            id: "ksm-zero-pages",
            source: "/sys/kernel/mm/ksm/use_zero_pages",
            why: "Zero pages can be mapped to the kernel's zero page instead of being merged with each other. That \
                  keeps no copy and no chain. It takes effect for pages merged after the change.",
            needs_ksm: true,
            verdicts: &[Verdict::NotApplicable, Verdict::Ok, Verdict::Unknown],
            expected: "1, unless few enrolled pages hold only zeros",
            details: SettingDetails {
                benefit: "no copy and no chain is kept for pages of zeros",
                risk: "a page whose checksum is that of zeros is compared in vain; only pages that merge later are \
                       affected",
                method: ApplyMethod::Live,
                undo: "write 0; pages that are on the zero page stay there until they are written or unmerged",
                counter: "ksm_zero_pages in /sys/kernel/mm/ksm",
                versions: "Linux 4.11 and later; ksm_zero_pages since 6.6",
                citation: "Linux 6.18: mm/ksm.c (try_to_merge_with_zero_page), Documentation/admin-guide/mm/ksm.rst \
                           (use_zero_pages)",
            },
        },
        judge: judge_zero_pages,
    },
    HostRule {
        rule: RuleInfo {
            id: "ksm-sharing-limit",
            source: "/sys/kernel/mm/ksm/stable_node_chains, /sys/kernel/mm/ksm/stable_node_dups",
            why: "A content with more than max_page_sharing copies keeps one further frame for each max_page_sharing \
                  mappings. That bounds how long reclaim and migration take over one frame, and costs those frames.",
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "further copies take less than 5 % of what merging saves",
            details: SettingDetails {
                benefit: "fewer frames hold the same content",
                risk: "reclaim, compaction and migration of a merged frame take longer; the change unmerges \
                       everything, which needs memory",
                method: ApplyMethod::Live,
                undo: "only while no page is merged: write 2 to run, which needs memory for copies, then the old value to \
                       max_page_sharing, and 1 to run",
                counter: "stable_node_chains and stable_node_dups in /sys/kernel/mm/ksm",
                versions: "Linux 4.13 and later",
                citation: "Linux 6.18: mm/ksm.c (max_page_sharing_store), Documentation/admin-guide/mm/ksm.rst \
                           (max_page_sharing)",
            },
        },
        judge: judge_sharing_limit,
    },
    HostRule {
        rule: RuleInfo {
            id: "ksm-nodes",
            source: "/sys/kernel/mm/ksm/merge_across_nodes",
            why: "A merged page lies on one NUMA node and is remote for all other nodes, and NUMA balancing skips it. \
                  With 0 each node keeps a copy of its own.",
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "0 with more than two nodes; 0 or 1 with two",
            details: SettingDetails {
                benefit: "merged pages are local to the processes that read them",
                risk: "each node keeps a copy, so less is saved; the change unmerges everything, which needs memory",
                method: ApplyMethod::Live,
                undo: "only while no page is merged: write 2 to run, which needs memory for copies, then the old value to \
                       merge_across_nodes, and 1 to run",
                counter: "pages_shared in /sys/kernel/mm/ksm: a copy for each node",
                versions: "Linux 3.9 and later, with CONFIG_NUMA",
                citation: "Linux 6.18: mm/ksm.c (merge_across_nodes_store), Documentation/admin-guide/mm/ksm.rst \
                           (merge_across_nodes)",
            },
        },
        judge: judge_nodes,
    },
    HostRule {
        rule: RuleInfo {
            id: "ksm-counters",
            source: "/sys/kernel/mm/ksm/full_scans",
            why: "ksmd corrects its counters when it scans a page again. Until then they count pages that were \
                  written, freed or not scanned yet; smaps and PSS are right at any time.",
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "ksmd is on and has completed a pass",
            details: SettingDetails {
                benefit: "the counters of KSM tell what is merged now",
                risk: "with run = 1 ksmd takes CPU time and merges more",
                method: ApplyMethod::Manual,
                undo: "write 0 to run",
                counter: "full_scans in /sys/kernel/mm/ksm; KSM in /proc/PID/smaps_rollup",
                versions: "all kernels with KSM; KSM in smaps since Linux 6.6",
                citation: "Linux 6.18: mm/ksm.c (break_ksm, __ksm_exit), Documentation/admin-guide/mm/ksm.rst \
                           (full_scans)",
            },
        },
        judge: judge_counters,
    },
];

/// The kernel's default of `advisor_target_scan_time` (mm/ksm.c): an acceptable pass to its authors.
const SLOW_PASS_SECONDS: f64 = 200.0;
/// A pass of this length merges nothing in a VM that lives for an hour or two.
const HOPELESS_PASS_SECONDS: f64 = 3600.0;
/// Target duration of the remedies: the memory of a booted VM is merged after two such passes.
const TARGET_PASS_SECONDS: f64 = 60.0;

pub(super) fn ksm(facts: &HostFacts) -> Result<&Ksm, MissingReading> {
    require("/sys/kernel/mm/ksm", &facts.ksm)
}

/// The counters of exited processes stay until ksmd visits them.
pub(super) const STALE_COUNTERS_TITLE: &str = "nothing is enrolled; the counters are of processes that have ended";

/// Whether anything is enrolled: seen in a process, or shown by ksmd's metadata if some processes cannot be read. The
/// metadata of a stopped ksmd shows nothing: it includes exited processes until ksmd visits them (mm/ksm.c,
/// `__ksm_exit`).
pub(super) fn anything_enrolled(facts: &HostFacts, host_processes: &HostProcesses) -> Result<bool, MissingReading> {
    if host_processes.enrolled().next().is_some() {
        return Ok(true);
    }
    let Err(missing) = host_processes.require_readable("enrollment", |p| p.is_enrolled()) else { return Ok(false) };
    let ksm = ksm(facts)?;
    if *require("run", &ksm.run)? == 1 && tracked(ksm)? > Pages::ZERO { Ok(true) } else { Err(missing) }
}

/// A kernel without KSM is a failure: it cannot merge anything.
fn judge_kernel(rule: &'static RuleInfo, facts: &HostFacts, _: &HostProcesses) -> RuleResult {
    let release = facts.kernel.as_deref().unwrap_or("unknown release");
    Ok(match &facts.ksm {
        Ok(_) => rule.ok("the kernel has KSM", release),
        Err(Absent::NotOnThisKernel) => rule
            .fail("the kernel has no KSM", format!("{release}: absent"))
            .remedy(["# boot a kernel built with CONFIG_KSM=y; the kernels of all large distributions are"])
            .verify("test -d /sys/kernel/mm/ksm"),
        Err(absent) => {
            return Err(MissingReading { reading_name: "/sys/kernel/mm/ksm".into(), absent: absent.clone() });
        }
    })
}

/// A stopped ksmd is a failure while something is enrolled: merging was requested and does not happen. It is only a
/// warning while nothing is enrolled, or while that is unknown. For future merging it makes no difference whether `run`
/// is 0 or 2.
fn judge_run(rule: &'static RuleInfo, facts: &HostFacts, host_processes: &HostProcesses) -> RuleResult {
    let run = *require("run", &ksm(facts)?.run)?;
    let value = format!("run = {run}");
    let state = match run {
        0 => "stopped",
        1 => return Ok(rule.ok("ksmd is on", value)),
        2 => "stopped and everything is unmerged",
        _ => return Err(MissingReading { reading_name: "run".into(), absent: Absent::Malformed(run.to_string()) }),
    };
    let finding = match anything_enrolled(facts, host_processes) {
        Ok(true) => {
            let bytes = host_processes.sum(|p| p.mergeable());
            rule.warn(format!("ksmd is {state} while memory is enrolled"), format!("{value}, {bytes} enrolled"))
        }
        Ok(false) => {
            let finding = rule.warn(format!("ksmd is {state}, and nothing is enrolled"), value).on_request();
            return Ok(with_start(finding, [ENROLLED_LATER.to_owned()]).change(write_change("run", 1)));
        }
        Err(MissingReading { reading_name, absent }) => rule.warn(
            format!("ksmd is {state}; whether anything is enrolled is not known"),
            format!("{value}; {reading_name}: {absent}"),
        ),
    };
    let objection = find_objection_to_merging(host_processes, None);
    let finding = with_start(finding, objection.iter().map(|why| format!("# {why}: see the finding ksm-domains")));
    Ok(if objection.is_none() { finding.change(write_change("run", 1)) } else { finding })
}

/// What happens after ksmd was started on a host on which nothing is enrolled (QEMU: hw/core/machine.c, `mem_merge`).
const ENROLLED_LATER: &str = "# start it if machines of all owners may be merged: QEMU enrolls each machine that starts \
                              later, unless it has mem-merge=off";

/// The commands that start ksmd, after instructions.
fn with_start(finding: Finding, instructions: impl IntoIterator<Item = String>) -> Finding {
    let commands = [
        set_command("run", 1),
        "# to keep it over a reboot:".to_owned(),
        "echo 'w /sys/kernel/mm/ksm/run - - - - 1' > /etc/tmpfiles.d/ksm.conf".to_owned(),
    ];
    finding.remedy(instructions.into_iter().chain(commands)).verify(is_set_command("run", 1))
}

/// Why only an operator can decide to merge what is enrolled, and a process of another domain: ksmd would merge pages
/// across trust domains, or it is not known whether it would.
pub(super) fn find_objection_to_merging(host_processes: &HostProcesses, other: Option<&TrustDomain>) -> Option<String> {
    let enrolled = host_processes.enrolled().map(|process| &process.domain);
    let domains: BTreeSet<_> = enrolled.chain(other).collect();
    if domains.len() > 1 {
        return Some(format!("pages of {} trust domains would be merged with each other", domains.len()));
    }
    let MissingReading { reading_name, absent } =
        host_processes.require_readable("enrollment", ProcessFacts::is_enrolled).err()?;
    Some(format!("whether one trust domain is enrolled is not known ({reading_name}: {absent})"))
}

/// The change of a setting of KSM.
fn write_change(file: &str, value: u64) -> SettingChange {
    SettingChange::Write { path: format!("sys/kernel/mm/ksm/{file}"), value: value.to_string() }
}

/// Whether the advisor sets `pages_to_scan`; kernels before 6.8 have no advisor.
pub(super) fn advisor_is_on(ksm: &Ksm) -> Result<bool, MissingReading> {
    match &ksm.advisor_mode {
        Err(Absent::NotOnThisKernel) => Ok(false),
        mode => match require("advisor_mode", mode)?.as_str() {
            "none" => Ok(false),
            "scan-time" => Ok(true),
            other => {
                Err(MissingReading { reading_name: "advisor_mode".into(), absent: Absent::Malformed(other.to_owned()) })
            }
        },
    }
}

/// A pass slower than the kernel's own target is a warning. Over an hour is a failure, since then almost nothing
/// merges. A fast enough pass over the visible processes is no verdict if other processes could not be read. For a
/// stopped ksmd, the pace is judged as if it ran.
pub(super) fn judge_pace(rule: &'static RuleInfo, facts: &HostFacts, host_processes: &HostProcesses) -> RuleResult {
    let ksm = ksm(facts)?;
    let to_scan = *require("pages_to_scan", &ksm.pages_to_scan)?;
    let sleep = *require("sleep_millisecs", &ksm.sleep_millisecs)?;
    let work = workload(facts, host_processes)?;
    let bytes = bytes_of(facts.page_size, work.pages);
    let settings = format!("pages_to_scan = {to_scan}, sleep_millisecs = {sleep}, {bytes} to scan");
    if work.pages == Pages::ZERO {
        work.complete?;
        return Ok(rule.not_applicable("nothing to scan", settings));
    }
    if !anything_enrolled(facts, host_processes)? {
        return Ok(rule.not_applicable(STALE_COUNTERS_TITLE, settings));
    }
    let (verdict, title) = match pass_seconds(work.pages, to_scan, sleep) {
        None => (Verdict::Fail, "ksmd scans no page".to_owned()),
        Some(s) if s > HOPELESS_PASS_SECONDS => {
            (Verdict::Fail, format!("a full pass takes {} or more", format_duration(s)))
        }
        Some(s) if s > SLOW_PASS_SECONDS => {
            (Verdict::Warn, format!("a full pass takes {} or more", format_duration(s)))
        }
        Some(s) => (Verdict::Ok, format!("a full pass takes about {}", format_duration(s))),
    };
    let finding = rule.finding(verdict, title, settings);
    if verdict == Verdict::Ok {
        return work.complete.map(|()| finding);
    }
    Ok(with_faster_pass_remedy(finding, advisor_is_on(ksm)?, work.pages, to_scan, sleep))
}

/// The remedy for a slow pass.
fn with_faster_pass_remedy(finding: Finding, has_advisor: bool, pages: Pages, to_scan: u64, sleep: u64) -> Finding {
    if has_advisor {
        return finding
            .remedy([set_command("advisor_target_scan_time", TARGET_PASS_SECONDS)])
            .verify(is_set_command("advisor_target_scan_time", TARGET_PASS_SECONDS));
    }
    match pages_to_scan_for(pages, sleep, TARGET_PASS_SECONDS) {
        Some(new_value) if new_value > to_scan => {
            finding.remedy([set_command("pages_to_scan", new_value)]).verify(is_set_command("pages_to_scan", new_value))
        }
        _ => finding
            .remedy([
                "# ksmd is as busy as it should be: enroll less; a census shows which regions hold duplicates",
                "pagefold census --all",
            ])
            .verify("pagefold doctor"),
    }
}

/// A target slower than the kernel's default settings is a warning: without the advisor, pages merge sooner.
fn judge_advisor_pace(rule: &'static RuleInfo, facts: &HostFacts, host_processes: &HostProcesses) -> RuleResult {
    let ksm = ksm(facts)?;
    if !advisor_is_on(ksm)? {
        return Ok(rule.not_applicable("the advisor is off", mode(&ksm.advisor_mode)));
    }
    let target = *require("advisor_target_scan_time", &ksm.advisor_target_scan_time)?;
    let work = workload(facts, host_processes)?;
    let value = format!("scan-time, target {target} s, {} to scan", bytes_of(facts.page_size, work.pages));
    // DEFAULT_PAGES_TO_SCAN and the initial ksm_thread_sleep_millisecs (mm/ksm.c).
    let default_seconds = pass_seconds(work.pages, 100, 20).unwrap_or(f64::INFINITY);
    if default_seconds >= target as f64 {
        return Ok(rule.ok("the advisor is on, and its target is within reach", value));
    }
    work.complete?;
    if work.pages == Pages::ZERO {
        return Ok(rule.not_applicable("nothing to scan", value));
    }
    let new_target = (default_seconds / 10.0).ceil().max(1.0);
    let title = format!(
        "the advisor stretches a pass to {target} s; the defaults would take {}",
        format_duration(default_seconds)
    );
    Ok(rule
        .warn(title, value)
        .remedy([set_command("advisor_target_scan_time", new_target)])
        .verify(is_set_command("advisor_target_scan_time", new_target)))
}

fn mode(reading: &Reading<String>) -> String {
    reading.as_ref().map_or_else(ToString::to_string, Clone::clone)
}

/// Smart scan turned off is a warning if there is something to scan: it costs CPU time and gains little.
fn judge_smart_scan(rule: &'static RuleInfo, facts: &HostFacts, _: &HostProcesses) -> RuleResult {
    let ksm = ksm(facts)?;
    if ksm.smart_scan == Err(Absent::NotOnThisKernel) {
        return Ok(rule.not_applicable("smart scan came with 6.7", "absent"));
    }
    if *require("smart_scan", &ksm.smart_scan)? == 0 {
        let verdict = if tracked(ksm)? == Pages::ZERO { Verdict::NotApplicable } else { Verdict::Warn };
        return Ok(rule
            .finding(verdict, "every pass scans every page", "smart_scan = 0")
            .remedy([set_command("smart_scan", 1)])
            .verify(is_set_command("smart_scan", 1)));
    }
    let skipped = require("pages_skipped", &ksm.pages_skipped)?;
    let value = match &ksm.pages_scanned {
        Ok(scanned) => format!("smart_scan = 1, {skipped} pages skipped, {scanned} scanned"),
        Err(absent) => format!("smart_scan = 1, {skipped} pages skipped, scanned {absent}"),
    };
    Ok(rule.ok("smart scan is on", value))
}

/// Passes after which the counters of chains are settled: two to merge, one to build chains.
const SETTLED_PASSES: u64 = 3;

/// Only ksmd's own counters can show that the setting is harmless when off. Without a single chain after a few passes,
/// no content, zeros included, has more than `max_page_sharing` copies. That is little if it is less than a hundredth
/// of the pages ksmd scans. Otherwise only a census can tell.
fn judge_zero_pages(rule: &'static RuleInfo, facts: &HostFacts, host_processes: &HostProcesses) -> RuleResult {
    let ksm = ksm(facts)?;
    if *require("use_zero_pages", &ksm.use_zero_pages)? != 0 {
        let placed = ksm.ksm_zero_pages.as_ref().map_or_else(ToString::to_string, ToString::to_string);
        return Ok(rule.ok("pages of zeros go to the zero page", format!("use_zero_pages = 1, {placed} placed")));
    }
    let value = "use_zero_pages = 0";
    if !anything_enrolled(facts, host_processes)? {
        return Ok(rule.not_applicable("nothing is enrolled", value));
    }
    let passes = *require("full_scans", &ksm.full_scans)?;
    let settled = *require("run", &ksm.run)? == 1 && passes >= SETTLED_PASSES;
    let limit = require("max_page_sharing", &ksm.max_page_sharing)?.saturating_mul(100);
    if settled && *require("stable_node_chains", &ksm.stable_node_chains)? == 0 && limit <= tracked(ksm)?.0 {
        let value = format!("{value}, stable_node_chains = 0 after {passes} passes");
        return Ok(rule.ok("no content has many copies, so neither have zeros", value));
    }
    Ok(rule
        .finding(Verdict::Unknown, "cannot tell: how many enrolled pages hold only zeros", value)
        .remedy([
            "pagefold census --all".to_owned(),
            "# if it counts many zero pages:".to_owned(),
            set_command("use_zero_pages", 1),
        ])
        .verify(is_set_command("use_zero_pages", 1)))
}

/// Percentage of the savings that chains may cost before it is useful to unmerge everything once. The default limit of
/// 256 costs at most 0.4 percent. A higher cost means that the limit is low or that chains have gaps.
const MAX_CHAIN_COST_PERCENT: u64 = 5;

/// Frames lost to chains are a warning if they are a noticeable part of the savings.
fn judge_sharing_limit(rule: &'static RuleInfo, facts: &HostFacts, host_processes: &HostProcesses) -> RuleResult {
    let ksm = ksm(facts)?;
    let chains = *require("stable_node_chains", &ksm.stable_node_chains)?;
    let dups = *require("stable_node_dups", &ksm.stable_node_dups)?;
    let sharing = *require("pages_sharing", &ksm.pages_sharing)?;
    let limit = *require("max_page_sharing", &ksm.max_page_sharing)?;
    let extra_copies = dups.saturating_sub(chains);
    let bytes = bytes_of(facts.page_size, Pages(extra_copies));
    let value = format!(
        "stable_node_chains = {chains}, stable_node_dups = {dups}, max_page_sharing = {limit}: {bytes} in further copies"
    );
    if !is_at_least_percent(extra_copies, sharing.saturating_add(extra_copies), MAX_CHAIN_COST_PERCENT) {
        return Ok(rule.ok("chains cost next to nothing", value));
    }
    if !anything_enrolled(facts, host_processes)? {
        return Ok(rule.not_applicable(STALE_COUNTERS_TITLE, value));
    }
    let new_limit = limit.saturating_mul(4).clamp(256, i32::MAX as u64);
    Ok(with_remerge_remedy(
        rule.warn("chains keep many copies of one content", value),
        facts,
        "max_page_sharing",
        new_limit,
    ))
}

/// More than two nodes is a warning, as ksm.rst advises 0 for "systems with more nodes, at significant NUMA distances".
/// With two nodes either setting is fine.
fn judge_nodes(rule: &'static RuleInfo, facts: &HostFacts, host_processes: &HostProcesses) -> RuleResult {
    let ksm = ksm(facts)?;
    if ksm.merge_across_nodes == Err(Absent::NotOnThisKernel) {
        return Ok(rule.not_applicable("the kernel knows no nodes", "absent"));
    }
    let across = *require("merge_across_nodes", &ksm.merge_across_nodes)?;
    let nodes = *require("number of nodes", &facts.nodes)?;
    let value = format!("merge_across_nodes = {across}, nodes with memory: {nodes}");
    Ok(match (nodes, across) {
        (0 | 1, _) => rule.not_applicable("one node", value),
        (_, 0) => rule.ok("each node merges for itself", value),
        (2, _) => rule.ok("two nodes share merged pages", value),
        _ if !anything_enrolled(facts, host_processes)? => rule.not_applicable("nothing is enrolled", value),
        _ => with_remerge_remedy(
            rule.warn(format!("{nodes} nodes share merged pages"), value),
            facts,
            "merge_across_nodes",
            0,
        )
        .change(write_change("merge_across_nodes", 0)),
    })
}

/// The remedy for a setting that the kernel refuses to change (EBUSY) while pages are merged: unmerge first, but only
/// if there is memory for it.
fn with_remerge_remedy(finding: Finding, facts: &HostFacts, file: &str, value: u64) -> Finding {
    let verify = is_set_command(file, value);
    let saved = saved(facts);
    match (&saved, &facts.memory.available) {
        // A margin of a tenth, since the host continues to allocate memory meanwhile.
        (Ok(saved), Ok(available)) if saved.0.saturating_add(saved.0 / 10) <= available.0 => {
            finding.remedy([set_command("run", 2), set_command(file, value), set_command("run", 1)])
        }
        (Ok(saved), Ok(available)) => finding.remedy([
            format!("# not now: unmerging needs {saved} and {available} are available. When there is more:"),
            format!("{} && {} && {}", set_command("run", 2), set_command(file, value), set_command("run", 1)),
        ]),
        _ => finding.remedy(["# not now: what unmerging needs or what is available could not be read"]),
    }
    .verify(verify)
}

/// Pages mapped to the zero page, for the host or a process. Kernels before 6.6 do not count them: there are surely
/// none only if `use_zero_pages` is off, assuming that it always was.
pub(super) fn placed_zeros(facts: &HostFacts, reading: &Reading<i64>) -> Result<u64, MissingReading> {
    if *reading == Err(Absent::NotOnThisKernel) && ksm(facts)?.use_zero_pages == Ok(0) {
        return Ok(0);
    }
    Ok(u64::try_from(*require("ksm_zero_pages", reading)?).unwrap_or(0))
}

/// Bytes that unmerging everything would need.
pub(super) fn saved(facts: &HostFacts) -> Result<Bytes, MissingReading> {
    let ksm = ksm(facts)?;
    let sharing = *require("pages_sharing", &ksm.pages_sharing)?;
    let zeros = placed_zeros(facts, &ksm.ksm_zero_pages)?;
    Ok(total([sharing, zeros].map(|pages| bytes_of(facts.page_size, Pages(pages))).into_iter()))
}

/// A stopped ksmd with merged pages is a warning: the savings are real, but their figures are outdated. Before the
/// first complete pass there is no verdict.
fn judge_counters(rule: &'static RuleInfo, facts: &HostFacts, host_processes: &HostProcesses) -> RuleResult {
    let ksm = ksm(facts)?;
    let run = *require("run", &ksm.run)?;
    let passes = *require("full_scans", &ksm.full_scans)?;
    let tracked = tracked(ksm)?;
    let value = format!("full_scans = {passes}, run = {run}");
    if run != 1 {
        return Ok(if tracked == Pages::ZERO {
            rule.not_applicable("nothing is counted", value)
        } else if !anything_enrolled(facts, host_processes)? {
            rule.not_applicable(STALE_COUNTERS_TITLE, value)
        } else {
            rule.warn("the counters are those of the last scan", value)
                .remedy(["pagefold account".to_owned(), "# or let ksmd count again:".to_owned(), set_command("run", 1)])
                .verify(is_set_command("run", 1))
        });
    }
    if passes > 0 {
        return Ok(rule.ok("ksmd has completed passes", value));
    }
    if !anything_enrolled(facts, host_processes)? {
        return Ok(rule.not_applicable("nothing is enrolled", value));
    }
    Ok(rule
        .finding(Verdict::Unknown, "cannot tell: ksmd has not completed its first pass", value)
        .remedy(["# wait for the time that ksm-pace gives, then ask again"])
        .verify("test $(cat /sys/kernel/mm/ksm/full_scans) -ge 1"))
}
