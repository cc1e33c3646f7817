//! Which processes are enrolled, which are not, and what keeps memory from being enrolled.

use super::change::{ApplyMethod, SettingDetails};
use super::host_processes::{HostProcesses, ineligible_bytes, is_at_least_percent, process_count_text, total};
use super::settings::{anything_enrolled, ksm};
use super::{HostFacts, HostRule, ProcessFacts, RuleInfo, RuleResult, Verdict, require};
use pagefold_base::reading::{Absent, Reading};
use pagefold_base::region::Ineligible;
use pagefold_base::units::Bytes;
use std::collections::BTreeMap;

pub(super) const RULES: &[HostRule] = &[
    HostRule {
        rule: RuleInfo {
            id: "ksm-enrolled",
            source: "/proc/*/smaps (mg), /proc/*/ksm_stat",
            why: "ksmd scans only memory that its process has enrolled: with madvise(MADV_MERGEABLE), as QEMU does for \
                  guest RAM, or for the whole process with prctl(PR_SET_MEMORY_MERGE).",
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_WARN,
            expected: "a process is enrolled while ksmd is on",
            details: SettingDetails {
                benefit: "ksmd has memory to merge",
                risk: "ksmd takes CPU time and 64 bytes for each enrolled page; trust domains that are enrolled \
                       together share pages",
                method: ApplyMethod::Manual,
                undo: "pagefold unmerge; then start the processes without enrolling them",
                counter: "ksm_mergeable in /proc/PID/ksm_stat; mg in VmFlags of /proc/PID/smaps",
                versions: "Linux 2.6.32 and later by madvise, 6.4 by prctl; ksm_mergeable since 6.14",
                citation: "Linux 6.18: mm/ksm.c (ksm_madvise, ksm_enable_merge_any); madvise(2); systemd.exec(5) \
                           (MemoryKSM=)",
            },
        },
        judge: judge_enrolled,
    },
    HostRule {
        rule: RuleInfo {
            id: "ksm-ineligible",
            source: "/proc/*/smaps (VmFlags)",
            why: "KSM merges private anonymous pages only. It never merges shared memory, hugetlb pages or secret \
                  memory, enrolled or not.",
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "less than a tenth of the memory is out of KSM's reach",
            details: SettingDetails {
                benefit: "more memory can merge",
                risk: "vhost-user and virtiofs need shared memory; small pages cost TLB misses that huge pages of \
                       the pool do not",
                method: ApplyMethod::Manual,
                undo: "restore the definition, then start the machine again",
                counter: "pagefold census; VmFlags in /proc/PID/smaps",
                versions: "all kernels with KSM",
                citation: "Linux 6.18: mm/ksm.c (vma_ksm_compatible); QEMU: backends/hostmem.c",
            },
        },
        judge: judge_ineligible,
    },
    HostRule {
        rule: RuleInfo {
            id: "ksm-seccomp",
            source: "/proc/*/status (Seccomp)",
            why: SECCOMP_WHY,
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "less than a tenth of the eligible memory is unenrolled and behind filters",
            details: SettingDetails {
                benefit: "memory of sandboxed programs can merge",
                risk: "the programs must be started again",
                method: ApplyMethod::Manual,
                undo: "start the programs without enrolling them",
                counter: "ksm_merge_any in /proc/PID/ksm_stat",
                versions: "Linux 6.4 and later; ksm_merge_any since 6.14",
                citation: "seccomp(2); ptrace(2) (PTRACE_O_SUSPEND_SECCOMP); Linux 6.18: kernel/sys.c \
                           (PR_SET_MEMORY_MERGE)",
            },
        },
        judge: judge_seccomp,
    },
    HostRule {
        rule: RuleInfo {
            id: "ksm-prctl-exec",
            source: "/proc/*/ksm_stat (ksm_merge_any)",
            why: PRCTL_EXEC_WHY,
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "each process has the merge flag of its parent",
            details: SettingDetails {
                benefit: "the children of an enrolled program merge, too",
                risk: "memory of a process that lost the flag on purpose is enrolled again",
                method: ApplyMethod::Manual,
                undo: "pagefold unmerge; then start the processes without enrolling them",
                counter: "ksm_merge_any in /proc/PID/ksm_stat",
                versions: "Linux 6.7 to 6.18 without the fix; ksm_merge_any since 6.14",
                citation: "Linux 6.19: mm/ksm.c (scan_get_next_rmap_item), include/linux/ksm.h (ksm_execve)",
            },
        },
        judge: judge_prctl_exec,
    },
];

pub(super) const SECCOMP_WHY: &str = "\
     A seccomp filter may refuse madvise and prctl, or kill the caller. Such a process must enroll itself before the \
     filter is set, or be started enrolled; a system call injected into it needs PTRACE_O_SUSPEND_SECCOMP.";

pub(super) const PRCTL_EXEC_WHY: &str = "\
     PR_SET_MEMORY_MERGE is inherited by fork, and by exec since 6.7. Until 2025 ksmd cleared it when it scanned a new \
     process before that had any memory (fixed by \"mm/ksm: fix exec/fork inheritance support for prctl\", 6.19 and \
     stable), and the process is then not enrolled.";

/// A command that starts any program enrolled, without a service manager. It needs only the C library; exec keeps the
/// flag from 6.7 on.
pub(super) const START_ENROLLED_COMMAND: &str = "python3 -c 'import ctypes,os,sys; \
    ctypes.CDLL(None).prctl(67,1,0,0,0) and sys.exit(\"refused\"); \
    os.execvp(sys.argv[1],sys.argv[1:])' PROGRAM ARGUMENTS";

/// If nothing is enrolled while ksmd is on, that is a failure: the operator turned it on for merging, and it merges
/// nothing. While it is off, no merging is expected.
fn judge_enrolled(rule: &'static RuleInfo, facts: &HostFacts, host_processes: &HostProcesses) -> RuleResult {
    let count = host_processes.enrolled().count();
    let bytes = host_processes.sum(|p| if p.is_enrolled() == Ok(true) { p.mergeable() } else { Bytes::ZERO });
    if count > 0 {
        return Ok(rule.ok(format!("enrolled: {}", process_count_text(count)), format!("{bytes} mergeable")));
    }
    if anything_enrolled(facts, host_processes)? {
        return Ok(rule.ok("processes that cannot be seen are enrolled", "ksmd has metadata of their pages"));
    }
    let value = format!("0 of {}", process_count_text(host_processes.processes.len()));
    if *require("run", &ksm(facts)?.run)? != 1 {
        return Ok(rule.not_applicable("nothing is enrolled, and ksmd is off", value));
    }
    Ok(rule
        .fail("ksmd is on and nothing is enrolled", value)
        .remedy([
            "# start what should share memory enrolled: QEMU with -machine mem-merge=on and private guest RAM,",
            "# a systemd service (254 or later) with MemoryKSM=yes in its [Service] section, anything else with",
            START_ENROLLED_COMMAND,
        ])
        .verify("grep -q -s 'ksm_mergeable: yes' /proc/[0-9]*/ksm_stat"))
}

/// Memory that KSM cannot merge, by reason, over all given regions.
pub(super) fn ineligible_bytes_by_reason<'a>(
    processes: impl Iterator<Item = &'a ProcessFacts>,
) -> BTreeMap<Ineligible, Bytes> {
    let mut sums = BTreeMap::<Ineligible, Bytes>::new();
    let regions = processes.flat_map(|p| p.regions.iter().flatten().filter_map(|region| ineligible_bytes(p, region)));
    for (why, bytes) in regions {
        let sum = sums.entry(why).or_default();
        *sum = total([*sum, bytes].into_iter());
    }
    sums
}

/// A tenth or more of ineligible memory is a warning, never a failure. Shared guest RAM or hugetlb pages are mostly
/// chosen for good reasons, and the operator should know what they cost. Memory that several processes map is counted
/// for each.
fn judge_ineligible(rule: &'static RuleInfo, _: &HostFacts, host_processes: &HostProcesses) -> RuleResult {
    let sums = ineligible_bytes_by_reason(host_processes.processes.iter().copied());
    let ineligible = total(sums.values().copied());
    let eligible = host_processes.sum(ProcessFacts::eligible);
    let reasons: Vec<_> = sums.iter().map(|(why, bytes)| format!("{} {bytes}", why.phrase())).collect();
    let value = format!(
        "{} out of reach, {eligible} within",
        if reasons.is_empty() { "nothing".into() } else { reasons.join(", ") }
    );
    if is_at_least_percent(ineligible.0, ineligible.0.saturating_add(eligible.0), 10) {
        return Ok(rule
            .warn(format!("{ineligible} cannot be merged"), value)
            .remedy([
                "# see it by region: pagefold doctor --pid N. Guest RAM becomes eligible with",
                "# -object memory-backend-ram (no share=on, no hugetlb) or, in libvirt, without <memoryBacking>",
                "# <source type='memfd'/>, <access mode='shared'/>, <hugepages/>",
            ])
            .verify("pagefold census --all"));
    }
    host_processes.require_readable("regions", |p| p.regions.clone().map(drop))?;
    Ok(rule.ok("little memory is out of KSM's reach", value))
}

/// Filters are common in containers and no fault. They are a warning if much mergeable memory belongs to processes that
/// are neither enrolled nor easy to enroll.
fn judge_seccomp(rule: &'static RuleInfo, _: &HostFacts, host_processes: &HostProcesses) -> RuleResult {
    let filtered: Vec<_> = host_processes
        .processes
        .iter()
        .filter(|p| matches!(p.process.seccomp, Ok(mode) if mode != 0) && p.is_enrolled() == Ok(false))
        .collect();
    let bytes = total(filtered.iter().map(|p| p.eligible()));
    let eligible = host_processes.sum(ProcessFacts::eligible);
    let value = format!("{} with {bytes} of {eligible}", process_count_text(filtered.len()));
    if is_at_least_percent(bytes.0, eligible.0, 10) {
        return Ok(rule
            .warn("memory that is not enrolled lies behind seccomp filters", value)
            .remedy([
                "# start these enrolled; a filter does not take the flag away. Under systemd 254 or later:",
                "# MemoryKSM=yes in the [Service] section; otherwise",
                START_ENROLLED_COMMAND,
            ])
            .verify("grep -q -s 'ksm_merge_any: yes' /proc/[0-9]*/ksm_stat"));
    }
    host_processes.require_readable("seccomp mode", |p| p.process.seccomp.clone())?;
    host_processes.require_readable("enrollment", ProcessFacts::is_enrolled)?;
    host_processes.require_readable("regions", |p| p.regions.clone().map(drop))?;
    Ok(rule.ok("seccomp keeps little memory from being enrolled", value))
}

/// Whether a process lacks the flag that its parent has.
pub(super) fn lacks_parent_merge_flag(facts: &ProcessFacts) -> Reading<bool> {
    match (&facts.parent_merge_any, &facts.process.ksm.merge_any) {
        (Ok(false), _) | (_, Ok(true)) => Ok(false),
        (Ok(true), Ok(false)) => Ok(true),
        // Without a living parent, no inherited flag can have been lost.
        (Err(Absent::Vanished), Ok(false)) => Ok(false),
        (_, Err(absent)) | (Err(absent), _) => Err(absent.clone()),
    }
}

/// A warning only: the parent may have enrolled itself after it started the child, or the child may have unenrolled
/// itself.
fn judge_prctl_exec(rule: &'static RuleInfo, facts: &HostFacts, host_processes: &HostProcesses) -> RuleResult {
    let without_flag: Vec<_> =
        host_processes.processes.iter().filter(|p| lacks_parent_merge_flag(p) == Ok(true)).map(|p| p.name()).collect();
    if without_flag.is_empty() {
        host_processes.require_readable("ksm_merge_any", lacks_parent_merge_flag)?;
        return Ok(
            rule.ok("every process has the flag of its parent", process_count_text(host_processes.processes.len()))
        );
    }
    let release = facts.kernel.as_deref().unwrap_or("unknown release");
    Ok(rule
        .finding(
            Verdict::Warn,
            format!("{} without the merge flag of the parent", process_count_text(without_flag.len())),
            format!("{}; kernel {release}", join_first_names(&without_flag)),
        )
        .remedy([
            "# check each one: pagefold doctor --pid N",
            "# keep ksmd off while they start, or start each with",
            START_ENROLLED_COMMAND,
        ])
        .verify("pagefold doctor"))
}

/// The first few names of a list, and the number of the others.
pub(super) fn join_first_names(names: &[String]) -> String {
    let shown = names.iter().take(5).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > 5 { format!("{shown} and {} more", names.len() - 5) } else { shown }
}
