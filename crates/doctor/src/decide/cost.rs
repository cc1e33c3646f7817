//! Costs of merging: metadata, copies, huge pages and CPU time; and whether the host has the memory to undo it.

use super::change::{ApplyMethod, SettingDetails};
use super::host_processes::{HostProcesses, bytes_of, is_at_least_percent, total, tracked, workload};
use super::settings::{STALE_COUNTERS_TITLE, anything_enrolled, ksm, saved};
use super::{
    HostFacts, HostRule, MissingReading, ProcessFacts, RuleInfo, RuleResult, Verdict, is_set_command, pass_seconds,
    require, set_command,
};
use pagefold_base::ksm::RMAP_ITEM_BYTES;
use pagefold_base::process::USER_HZ;
use pagefold_base::reading::Absent;
use pagefold_base::units::{Bytes, NetBytes, Pages};

pub(super) const RULES: &[HostRule] = &[
    HostRule {
        rule: RuleInfo {
            id: "ksm-profit",
            source: "/sys/kernel/mm/ksm/general_profit",
            why: "ksmd keeps 64 bytes of metadata for every page it scans, merged or not. If few pages merge, that is \
                  more than merging saves.",
            needs_ksm: true,
            verdicts: Verdict::ALL,
            expected: "general_profit of 0 or more",
            details: SettingDetails {
                benefit: "metadata of pages that never merge is freed",
                risk: "what the unenrolled processes had merged takes memory again",
                method: ApplyMethod::Manual,
                undo: "enroll the processes again",
                counter: "general_profit in /sys/kernel/mm/ksm",
                versions: "all kernels with KSM; general_profit since Linux 6.4",
                citation: "Linux 6.18: mm/ksm.c (general_profit_show), Documentation/admin-guide/mm/ksm.rst \
                           (Monitoring KSM profit)",
            },
        },
        judge: judge_profit,
    },
    HostRule {
        rule: RuleInfo {
            id: "ksm-copies",
            source: "/proc/vmstat (cow_ksm, ksm_swpin_copy)",
            why: "A write to a merged page takes a fault and a copy, and so does swapping one in. Pages that are \
                  merged and copied again and again cost CPU on both sides and save nothing that lasts.",
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "at most ten copies since boot for each page that is merged now",
            details: SettingDetails {
                benefit: "no faults and copies for pages that do not stay merged",
                risk: "what the unenrolled processes had merged takes memory again",
                method: ApplyMethod::Manual,
                undo: "enroll the processes again",
                counter: "cow_ksm and ksm_swpin_copy in /proc/vmstat",
                versions: "Linux 5.19 and later",
                citation: "Linux 6.18: Documentation/admin-guide/mm/ksm.rst (Monitoring KSM events)",
            },
        },
        judge: judge_copies,
    },
    HostRule {
        rule: RuleInfo {
            id: "ksm-huge-pages",
            source: "/proc/*/smaps (AnonHugePages), /proc/vmstat (thp_split_page)",
            why: "ksmd splits a huge page to merge a part of it, even for zero pages. The rest stays in small pages: \
                  khugepaged takes long to rebuild huge pages, and unmerging does not.",
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "less than a tenth of the enrolled memory is in huge pages or was split",
            details: SettingDetails {
                benefit: "processes that need speed keep their huge pages",
                risk: "memory that is not merged stays taken",
                method: ApplyMethod::Manual,
                undo: "write 1 to run; split huge pages come back by madvise(MADV_COLLAPSE)",
                counter: "thp_split_page in /proc/vmstat; AnonHugePages in /proc/PID/smaps_rollup",
                versions: "Linux 4.5 and later; MADV_COLLAPSE since 6.1",
                citation: "Linux 6.18: mm/ksm.c (try_to_merge_one_page), Documentation/admin-guide/mm/transhuge.rst",
            },
        },
        judge: judge_huge_pages,
    },
    HostRule {
        rule: RuleInfo {
            id: "ksmd-cpu",
            source: "/proc/PID/stat of ksmd",
            why: "ksmd is one thread and takes CPU time from other programs.",
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "at most half a CPU on average since boot",
            details: SettingDetails {
                benefit: "CPU time for guests and other programs",
                risk: "a pass takes longer, and memory merges later",
                method: ApplyMethod::Live,
                undo: "write the value that was there",
                counter: "utime and stime in /proc/PID/stat of ksmd",
                versions: "Linux 2.6.32 and later",
                citation: "Linux 6.18: mm/ksm.c (ksm_scan_thread), Documentation/admin-guide/mm/ksm.rst \
                           (sleep_millisecs)",
            },
        },
        judge: judge_ksmd_cpu,
    },
    HostRule {
        rule: RuleInfo {
            id: "memory-headroom",
            source: "/proc/meminfo (MemAvailable, SwapFree)",
            why: "Saved memory may be needed again: each write to a merged page takes a page back. If more is saved \
                  than is free, a burst of writes, or run=2, ends in the OOM killer.",
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "available memory and free swap exceed what merging saves",
            details: SettingDetails {
                benefit: "a burst of writes to merged pages does not end in the OOM killer",
                risk: "fewer machines fit on the host",
                method: ApplyMethod::Manual,
                undo: "nothing was changed",
                counter: "MemAvailable and SwapFree in /proc/meminfo; oom_kill in /proc/vmstat",
                versions: "all kernels with KSM; MemAvailable since Linux 3.14",
                citation: "Linux 6.18: Documentation/admin-guide/mm/ksm.rst (MADV_UNMERGEABLE), \
                           Documentation/filesystems/proc.rst (MemAvailable)",
            },
        },
        judge: judge_headroom,
    },
    HostRule {
        rule: RuleInfo {
            id: "memory-pressure",
            source: "/proc/pressure/memory",
            why: "Tasks that wait for memory are slow already. ksmd then merges too late and competes with reclaim, \
                  and nothing should be unmerged.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_NOT_APPLICABLE,
            expected: "avg60 below 10 in the line some and below 1 in the line full",
            details: SettingDetails {
                benefit: "tasks do not wait for memory",
                risk: "what is moved or stopped is interrupted",
                method: ApplyMethod::Manual,
                undo: "start it again",
                counter: "some and full in /proc/pressure/memory",
                versions: "Linux 4.20 and later, with CONFIG_PSI",
                citation: "Linux 6.18: Documentation/accounting/psi.rst; oomd.conf(5)",
            },
        },
        judge: judge_pressure,
    },
    HostRule {
        rule: RuleInfo {
            id: "memory-swap",
            source: "/proc/meminfo (SwapTotal, SwapFree)",
            why: "A merged page that is swapped out comes back unshared and must be merged again. ksmd does not scan \
                  swapped-out pages.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "less than half of the swap is used",
            details: SettingDetails {
                benefit: "reclaim has room, and merged pages stay merged",
                risk: "merging takes CPU time",
                method: ApplyMethod::Manual,
                undo: "pagefold unmerge, once there is memory for it",
                counter: "SwapFree in /proc/meminfo; ksm_swpin_copy in /proc/vmstat",
                versions: "all kernels with KSM",
                citation: "Linux 6.18: mm/ksm.c (ksm_might_need_to_copy), Documentation/admin-guide/mm/ksm.rst \
                           (Overview)",
            },
        },
        judge: judge_swap,
    },
];

/// Passes after which a net loss counts: pages merge in the second pass at the earliest.
const SETTLED_PASSES: u64 = 3;

/// Whether ksmd has completed the passes over these processes that merging takes; it has metadata for `tracked` of
/// their pages. That is so if it runs, has metadata for most of the pages, and most of them belong to processes older
/// than [`SETTLED_PASSES`] passes. `full_scans` alone does not show it, since it counts from boot.
///
/// Limits: if a process was enrolled, or ksmd was started, long after the process started, one pass counts as three.
pub(super) fn has_settled(
    facts: &HostFacts,
    host_processes: &HostProcesses,
    processes: &[&ProcessFacts],
    tracked: Pages,
) -> Result<bool, MissingReading> {
    let ksm = ksm(facts)?;
    if *require("run", &ksm.run)? != 1 || *require("full_scans", &ksm.full_scans)? < SETTLED_PASSES {
        return Ok(false);
    }
    let to_scan = *require("pages_to_scan", &ksm.pages_to_scan)?;
    let sleep = *require("sleep_millisecs", &ksm.sleep_millisecs)?;
    let Some(pass) = pass_seconds(workload(facts, host_processes)?.pages, to_scan, sleep) else { return Ok(false) };
    let uptime = facts.ksmd.as_ref().map_or(f64::INFINITY, |ksmd| ksmd.uptime_seconds);
    let is_old = |process: &ProcessFacts| {
        uptime - process.process.id.start_time as f64 / USER_HZ >= pass * SETTLED_PASSES as f64
    };
    let mergeable = total(processes.iter().map(|process| process.mergeable()));
    let old_bytes = total(processes.iter().filter(|process| is_old(process)).map(|process| process.mergeable()));
    let known_bytes = bytes_of(facts.page_size, tracked);
    Ok(mergeable == Bytes::ZERO
        || (is_at_least_percent(known_bytes.0, mergeable.0, 90) && is_at_least_percent(old_bytes.0, mergeable.0, 50)))
}

/// A net loss is a failure if ksmd runs and has completed its passes: the host has less memory because of merging.
/// Before that, or while ksmd is stopped, it is a warning: the metadata may still become profitable.
///
/// `general_profit` is (pages_sharing + ksm_zero_pages) x page size - ksm_rmap_items x 64 (mm/ksm.c,
/// `general_profit_show`); before 6.4 it is computed here in the same way (ksm.rst, "Monitoring KSM profit").
fn judge_profit(rule: &'static RuleInfo, facts: &HostFacts, host_processes: &HostProcesses) -> RuleResult {
    let ksm = ksm(facts)?;
    let tracked = tracked(ksm)?;
    let profit = match &ksm.general_profit {
        Err(Absent::NotOnThisKernel) => {
            let metadata = tracked.0.saturating_mul(RMAP_ITEM_BYTES);
            let net = i128::from(saved(facts)?.0) - i128::from(metadata);
            i64::try_from(net).unwrap_or(if net < 0 { i64::MIN } else { i64::MAX })
        }
        reading => *require("general_profit", reading)?,
    };
    let value = format!("{} net, {} pages with metadata", NetBytes(profit), tracked.0);
    if tracked == Pages::ZERO && profit == 0 {
        return Ok(rule.not_applicable("ksmd has scanned nothing", value));
    }
    if profit >= 0 {
        return Ok(rule.ok("merging pays for its metadata", value));
    }
    if !anything_enrolled(facts, host_processes)? {
        return Ok(rule.not_applicable(STALE_COUNTERS_TITLE, value));
    }
    let settled = has_settled(facts, host_processes, &host_processes.enrolled().collect::<Vec<_>>(), tracked)?;
    let verdict = if settled { Verdict::Fail } else { Verdict::Warn };
    Ok(rule
        .finding(verdict, "merging costs more memory than it saves", value)
        .remedy([
            "# find the processes that hold duplicates, and enroll only these; for each: pagefold doctor --pid N",
            "pagefold census --all",
        ])
        .verify("test $(cat /sys/kernel/mm/ksm/general_profit) -ge 0"))
}

/// A counter of `/proc/vmstat`.
fn vmstat_counter(facts: &HostFacts, name: &str) -> Result<u64, MissingReading> {
    let absent = MissingReading { reading_name: name.to_owned(), absent: Absent::NotOnThisKernel };
    require("/proc/vmstat", &facts.vmstat)?.get(name).copied().ok_or(absent)
}

/// More than ten copies since boot per page that is merged now is a warning: many merged pages had COW breaks. Reads of
/// merged pages with process_vm_readv count, too.
fn judge_copies(rule: &'static RuleInfo, facts: &HostFacts, host_processes: &HostProcesses) -> RuleResult {
    let ksm = ksm(facts)?;
    let copied = vmstat_counter(facts, "cow_ksm")?;
    // A kernel built without swap lacks this counter, and makes no such copies.
    let swapped = vmstat_counter(facts, "ksm_swpin_copy").unwrap_or(0);
    let merged =
        require("pages_shared", &ksm.pages_shared)?.saturating_add(*require("pages_sharing", &ksm.pages_sharing)?);
    let total_copies = copied.saturating_add(swapped);
    let value = format!("{copied} copies on write, {swapped} on swapping in, {merged} pages merged now");
    if total_copies == 0 && merged == 0 {
        return Ok(rule.not_applicable("nothing was merged since boot", value));
    }
    if total_copies <= merged.saturating_mul(10) {
        return Ok(rule.ok("merged pages stay merged", value));
    }
    if !anything_enrolled(facts, host_processes)? {
        return Ok(rule.not_applicable("nothing is enrolled any more", value));
    }
    Ok(rule
        .warn("merged pages are copied again and again", value)
        .remedy(["# see which processes hold volatile pages, and take these out of KSM", "pagefold census --all"])
        .verify("grep cow_ksm /proc/vmstat; sleep 60; grep cow_ksm /proc/vmstat"))
}

/// A warning if ksmd runs and a tenth or more of the enrolled memory is in huge pages, or as much was split since boot.
/// The operator should decide this trade of speed for memory.
fn judge_huge_pages(rule: &'static RuleInfo, facts: &HostFacts, host_processes: &HostProcesses) -> RuleResult {
    let ksm = ksm(facts)?;
    let enabled = match &facts.thp_enabled {
        Err(Absent::NotOnThisKernel) => {
            return Ok(rule.not_applicable("the kernel has no transparent huge pages", "absent"));
        }
        reading => require("transparent_hugepage/enabled", reading)?,
    };
    let run = *require("run", &ksm.run)?;
    let mergeable = host_processes.sum(|p| p.mergeable());
    let huge = host_processes.sum(|p| p.mergeable_huge());
    let splits = vmstat_counter(facts, "thp_split_page")?;
    // A page table of the lowest level fills one page with entries of eight bytes: x86-64 and aarch64.
    let huge_page = facts.page_size.bytes().saturating_mul(facts.page_size.bytes() / 8);
    let split = Bytes(splits.saturating_mul(huge_page));
    let value =
        format!("enabled = {enabled}, {huge} of {mergeable} enrolled is in huge pages, {splits} split since boot");
    if mergeable == Bytes::ZERO {
        host_processes.require_readable("regions", |p| p.regions.clone().map(drop))?;
        return Ok(rule.not_applicable("nothing is enrolled", value));
    }
    let title = if run == 1 && is_at_least_percent(huge.0, mergeable.0, 10) {
        "ksmd will split huge pages where parts of them merge"
    } else if *require("pages_sharing", &ksm.pages_sharing)? > 0 && is_at_least_percent(split.0, mergeable.0, 10) {
        "huge pages were split, probably for merging"
    } else {
        host_processes.require_readable("regions", |p| p.regions.clone().map(drop))?;
        return Ok(rule.ok("merging costs few huge pages", value));
    };
    Ok(rule
        .warn(title, value)
        .remedy([
            "# see what merging would save and how many huge pages it would split:",
            "pagefold census --all",
            "# where speed matters more, stop and keep what is merged:",
            "echo 0 > /sys/kernel/mm/ksm/run",
        ])
        .verify("grep thp_split_page /proc/vmstat; sleep 60; grep thp_split_page /proc/vmstat"))
}

/// More than half a CPU on average since boot is a warning. The average hides bursts, so it never overstates.
fn judge_ksmd_cpu(rule: &'static RuleInfo, facts: &HostFacts, _: &HostProcesses) -> RuleResult {
    let ksmd = require("CPU time of ksmd", &facts.ksmd)?;
    let value = format!("{:.1} s of CPU in {:.0} s since boot", ksmd.cpu_seconds, ksmd.uptime_seconds);
    let share = ksmd.cpu_seconds / ksmd.uptime_seconds;
    if !share.is_finite() {
        return Err(MissingReading { reading_name: "CPU share of ksmd".into(), absent: Absent::Malformed(value) });
    }
    if share <= 0.5 {
        return Ok(rule.ok(format!("ksmd takes {:.1} % of a CPU", share * 100.0), value));
    }
    // Five times the kernel's default, and always longer than now.
    let current = *require("sleep_millisecs", &ksm(facts)?.sleep_millisecs)?;
    let new_value = current.saturating_mul(2).clamp(100, u64::from(u32::MAX));
    Ok(rule
        .warn(format!("ksmd takes {:.0} % of a CPU", share * 100.0), value)
        .remedy([set_command("sleep_millisecs", new_value)])
        .verify(is_set_command("sleep_millisecs", new_value)))
}

/// More saved than free memory is a warning. It becomes a failure only under memory pressure, which `memory-pressure`
/// judges.
fn judge_headroom(rule: &'static RuleInfo, facts: &HostFacts, _: &HostProcesses) -> RuleResult {
    let saved = saved(facts)?;
    let available = *require("MemAvailable", &facts.memory.available)?;
    let swap = *require("SwapFree", &facts.memory.swap_free)?;
    let value = format!("{saved} saved, {available} available, {swap} of swap free");
    if saved == Bytes::ZERO {
        return Ok(rule.not_applicable("nothing is merged", value));
    }
    if saved.0 <= available.0.saturating_add(swap.0) {
        return Ok(rule.ok("everything could be unmerged", value));
    }
    Ok(rule
        .warn("more memory is saved than is free", value)
        .remedy(["# start nothing more on this host, or add swap or memory; do not write 2 to run"])
        .verify("pagefold doctor"))
}

/// `full` counts the time in which every runnable task waited for memory. A tenth of a minute of it is a failure. A
/// hundredth is a warning, and so is a tenth of `some` (Documentation/accounting/psi.rst; systemd-oomd kills at 60
/// percent).
fn judge_pressure(rule: &'static RuleInfo, facts: &HostFacts, _: &HostProcesses) -> RuleResult {
    let pressure = require("/proc/pressure/memory", &facts.pressure)?;
    let (some, full) = (pressure.some.avg60, pressure.full.avg60);
    let value = format!("some avg60 = {some}, full avg60 = {full}");
    if !(some.is_finite() && full.is_finite()) {
        return Err(MissingReading { reading_name: "memory pressure".into(), absent: Absent::Malformed(value) });
    }
    let verdict = match (some, full) {
        (_, full) if full >= 10.0 => Verdict::Fail,
        (some, full) if full >= 1.0 || some >= 10.0 => Verdict::Warn,
        _ => return Ok(rule.ok("tasks do not wait for memory", value)),
    };
    Ok(rule
        .finding(verdict, "tasks wait for memory", value)
        .remedy(["# see which processes use it and what merging saves, then move or stop some:", "pagefold account"])
        .verify("awk '/^full/ { split($3, a, \"=\"); exit a[2] >= 1 }' /proc/pressure/memory"))
}

/// Half of the swap in use is a warning: little is left for reclaim.
fn judge_swap(rule: &'static RuleInfo, facts: &HostFacts, _: &HostProcesses) -> RuleResult {
    let total = *require("SwapTotal", &facts.memory.swap_total)?;
    let free = *require("SwapFree", &facts.memory.swap_free)?;
    let used = total.saturating_sub(free);
    let value = format!("{used} of {total} used");
    if total == Bytes::ZERO {
        return Ok(rule.not_applicable("no swap", value));
    }
    if !is_at_least_percent(used.0, total.0, 50) {
        return Ok(rule.ok("swap has room", value));
    }
    Ok(rule
        .warn("most of the swap is in use", value)
        .remedy(["# see which memory could be merged instead:", "pagefold census --all"])
        .verify("awk '/^SwapTotal/ { t = $2 } /^SwapFree/ { f = $2 } END { exit 2 * f < t }' /proc/meminfo"))
}
