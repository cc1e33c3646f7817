//! The catalog of rules about one process.

use super::{
    judge_eligible, judge_enrolled, judge_keys, judge_mem_merge, judge_merging, judge_pinned, judge_prctl_exec,
    judge_profit, judge_run, judge_scanned, judge_seccomp,
};
use crate::decide::change::{ApplyMethod, SettingDetails};
use crate::decide::enrollment::{PRCTL_EXEC_WHY, SECCOMP_WHY};
use crate::decide::security::KEYS_WHY;
use crate::decide::{HostFacts, ProcessFacts, RuleInfo, RuleResult, Verdict};

/// A rule about one process.
pub(super) struct ProcessRule {
    pub(super) rule: RuleInfo,
    pub(super) judge: fn(&'static RuleInfo, &HostFacts, &ProcessFacts) -> RuleResult,
}

pub(super) static PROCESS_RULES: [ProcessRule; 11] = [
    ProcessRule {
        rule: RuleInfo {
            id: "process-run",
            source: "/sys/kernel/mm/ksm/run",
            why: "ksmd merges only while run is 1; enrolled memory waits until then.",
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_NOT_APPLICABLE,
            expected: "1 while memory of the process is to be merged",
            details: SettingDetails {
                benefit: "enrolled memory of the process merges",
                risk: "ksmd takes CPU time, and merges all other enrolled processes, too",
                method: ApplyMethod::Live,
                undo: "write 0, which keeps what is merged; 2 unmerges everything, and needs the memory for it",
                counter: "full_scans in /sys/kernel/mm/ksm; ksm_merging_pages in /proc/PID/ksm_stat",
                versions: "Linux 2.6.32 and later",
                citation: "Linux 6.18: mm/ksm.c (run_store), Documentation/admin-guide/mm/ksm.rst (run)",
            },
        },
        judge: judge_run,
    },
    ProcessRule {
        rule: RuleInfo {
            id: "process-enrolled",
            source: "/proc/PID/smaps (mg), /proc/PID/ksm_stat",
            why: "ksmd scans only memory that is enrolled: by madvise(MADV_MERGEABLE) in the process itself, or by \
                  prctl(PR_SET_MEMORY_MERGE) in it or in its parent.",
            needs_ksm: true,
            verdicts: Verdict::ALL,
            expected: "at least half of the eligible memory is enrolled",
            details: SettingDetails {
                benefit: "equal pages of the process and of others are kept once",
                risk: "ksmd takes CPU time and 64 bytes for each enrolled page; other enrolled processes can test \
                       what its pages hold",
                method: ApplyMethod::Live,
                undo: "pagefold unmerge; or set merge of the memory backend to false, or prctl(PR_SET_MEMORY_MERGE, 0)",
                counter: "mg in VmFlags of /proc/PID/smaps; ksm_mergeable in /proc/PID/ksm_stat",
                versions: "Linux 2.6.32 and later by madvise, 6.4 by prctl; ksm_mergeable since 6.14",
                citation: "Linux 6.18: mm/ksm.c (ksm_madvise, ksm_enable_merge_any), kernel/sys.c \
                           (PR_SET_MEMORY_MERGE); madvise(2)",
            },
        },
        judge: judge_enrolled,
    },
    ProcessRule {
        rule: RuleInfo {
            id: "process-mem-merge",
            source: "/proc/PID/cmdline",
            why: "QEMU enrolls guest RAM by itself unless mem-merge=off or merge=off forbids it (libvirt: \
                  <nosharepages/>).",
            needs_ksm: true,
            verdicts: Verdict::ALL,
            expected: "mem-merge=on, and no backend with merge=off",
            details: SettingDetails {
                benefit: "QEMU enrolls guest RAM when the machine starts",
                risk: "the owner may have forbidden it against side channels",
                method: ApplyMethod::Live,
                undo: "set the property merge of the memory backend to false",
                counter: "mg in VmFlags of /proc/PID/smaps",
                versions: "QEMU 1.3 and later for mem-merge, 2.1 for merge of a backend",
                citation: "QEMU: qemu-options.hx (-machine mem-merge=), backends/hostmem.c (merge); libvirt: \
                           docs/formatdomain.rst (nosharepages)",
            },
        },
        judge: judge_mem_merge,
    },
    ProcessRule {
        rule: RuleInfo {
            id: "process-eligible",
            source: "/proc/PID/smaps (VmFlags)",
            why: "KSM takes private anonymous pages only.",
            needs_ksm: true,
            verdicts: Verdict::ALL,
            expected: "less than a tenth of its memory is out of KSM's reach",
            details: SettingDetails {
                benefit: "more memory of the process can merge",
                risk: "vhost-user and virtiofs need shared memory; small pages cost TLB misses that huge pages of \
                       the pool do not",
                method: ApplyMethod::Manual,
                undo: "restore the definition of the machine, or the options of the program, then start it again",
                counter: "VmFlags in /proc/PID/smaps; pagefold census --pid PID",
                versions: "all kernels with KSM; VmFlags since Linux 3.8",
                citation: "Linux 6.18: mm/ksm.c (vma_ksm_compatible); madvise(2) (MADV_MERGEABLE)",
            },
        },
        judge: judge_eligible,
    },
    ProcessRule {
        rule: RuleInfo {
            id: "process-pinned",
            source: "/proc/PID/status (VmPin), /proc/PID/cmdline",
            why: "ksmd skips a page that a driver has pinned, since the device would keep using the old frame. A \
                  passed-through device pins all guest RAM.",
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_NOT_APPLICABLE,
            expected: "no passed-through device, and less than a tenth of the eligible memory pinned",
            details: SettingDetails {
                benefit: "ksmd can merge the pages",
                risk: "a virtio device is slower than one passed through; I/O from registered memory is faster",
                method: ApplyMethod::Manual,
                undo: "restore the definition, then start the machine again",
                counter: "VmPin in /proc/PID/status",
                versions: "all kernels with KSM; VmPin since Linux 3.2",
                citation: "Linux 6.18: mm/ksm.c (write_protect_page), drivers/vfio/vfio_iommu_type1.c \
                           (vfio_pin_pages_remote)",
            },
        },
        judge: judge_pinned,
    },
    ProcessRule {
        rule: RuleInfo {
            id: "process-prctl-exec",
            source: "/proc/PID/ksm_stat (ksm_merge_any)",
            why: PRCTL_EXEC_WHY,
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_NOT_APPLICABLE,
            expected: "the merge flag is set if the parent has it",
            details: SettingDetails {
                benefit: "all memory of the process is enrolled, also what it maps later",
                risk: "memory of a process that lost the flag on purpose is enrolled again",
                method: ApplyMethod::Live,
                undo: "prctl(PR_SET_MEMORY_MERGE, 0) in the process, or pagefold unmerge",
                counter: "ksm_merge_any in /proc/PID/ksm_stat",
                versions: "Linux 6.7 to 6.18 without the fix; ksm_merge_any since 6.14",
                citation: "Linux 6.19: mm/ksm.c (scan_get_next_rmap_item), include/linux/ksm.h (ksm_execve)",
            },
        },
        judge: judge_prctl_exec,
    },
    ProcessRule {
        rule: RuleInfo {
            id: "process-seccomp",
            source: "/proc/PID/status (Seccomp)",
            why: SECCOMP_WHY,
            needs_ksm: true,
            verdicts: &[Verdict::Ok, Verdict::Unknown, Verdict::Warn],
            expected: "no filter, or enrolled before the filter was set",
            details: SettingDetails {
                benefit: "the process can be enrolled in any way",
                risk: "a program without its filter is less isolated: start it enrolled instead",
                method: ApplyMethod::Manual,
                undo: "start it without enrolling it",
                counter: "Seccomp in /proc/PID/status; ksm_merge_any in /proc/PID/ksm_stat",
                versions: "Linux 3.8 and later; PTRACE_O_SUSPEND_SECCOMP since 4.3",
                citation: "seccomp(2); ptrace(2) (PTRACE_O_SUSPEND_SECCOMP); proc_pid_status(5)",
            },
        },
        judge: judge_seccomp,
    },
    ProcessRule {
        rule: RuleInfo {
            id: "process-scanned",
            source: "/proc/PID/ksm_stat (ksm_rmap_items)",
            why: "ksmd scans the processes in turn, and merges a page in its second scan at the earliest. From 6.7 \
                  to 6.9 it never scanned a process that had inherited the prctl flag over exec (\"mm/ksm: fix ksm \
                  exec support for prctl\", 6.10 and stable).",
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "ksm_rmap_items above 0",
            details: SettingDetails {
                benefit: "ksmd compares the pages of the process with those of others",
                risk: "a restart interrupts the program",
                method: ApplyMethod::Manual,
                undo: "nothing was changed",
                counter: "ksm_rmap_items in /proc/PID/ksm_stat",
                versions: "Linux 6.1 and later",
                citation: "Linux 6.18: mm/ksm.c (scan_get_next_rmap_item), Documentation/filesystems/proc.rst \
                           (ksm_stat)",
            },
        },
        judge: judge_scanned,
    },
    ProcessRule {
        rule: RuleInfo {
            id: "process-merging",
            source: "/proc/PID/ksm_stat (ksm_merging_pages, ksm_zero_pages), /proc/PID/smaps (KSM)",
            why: "If ksmd has scanned the process and merged nothing, there may be no duplicates, or they change \
                  between two passes. A census tells which.",
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "merged pages or zero pages above 0 after three passes",
            details: SettingDetails {
                benefit: "a process without duplicates costs no CPU time and metadata once it is unenrolled",
                risk: "duplicates that appear later do not merge",
                method: ApplyMethod::Manual,
                undo: "enroll the process again",
                counter: "ksm_merging_pages and ksm_zero_pages in /proc/PID/ksm_stat; KSM in /proc/PID/smaps",
                versions: "Linux 6.4 and later; ksm_zero_pages and KSM in smaps since 6.6",
                citation: "Linux 6.18: fs/proc/base.c (proc_pid_ksm_stat), Documentation/filesystems/proc.rst \
                           (ksm_stat)",
            },
        },
        judge: judge_merging,
    },
    ProcessRule {
        rule: RuleInfo {
            id: "process-profit",
            source: "/proc/PID/ksm_stat (ksm_process_profit)",
            why: "ksmd keeps 64 bytes of metadata for each page it scans: below one merged page in 64, the process \
                  costs memory.",
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_NOT_APPLICABLE,
            expected: "ksm_process_profit of 0 or more",
            details: SettingDetails {
                benefit: "metadata of pages that never merge is freed",
                risk: "what the process had merged takes memory again",
                method: ApplyMethod::Live,
                undo: "enroll the process again",
                counter: "ksm_process_profit and ksm_rmap_items in /proc/PID/ksm_stat",
                versions: "Linux 6.4 and later",
                citation: "Linux 6.18: mm/ksm.c (ksm_process_profit), Documentation/admin-guide/mm/ksm.rst \
                           (Monitoring KSM profit)",
            },
        },
        judge: judge_profit,
    },
    ProcessRule {
        rule: RuleInfo {
            id: "process-keys",
            source: "/proc/PID/cmdline",
            why: KEYS_WHY,
            needs_ksm: true,
            verdicts: &[Verdict::Ok, Verdict::Unknown, Verdict::Warn],
            expected: "not enrolled if it holds keys",
            details: SettingDetails {
                benefit: "keys cannot be guessed by the time of a write",
                risk: "what the process had merged takes memory again",
                method: ApplyMethod::Live,
                undo: "enroll the process again",
                counter: "mg in VmFlags of /proc/PID/smaps",
                versions: "all kernels with KSM",
                citation: "Bosman et al., Dedup Est Machina, IEEE Symposium on Security and Privacy 2016; Linux \
                           6.18: arch/x86/kvm/svm/sev.c (sev_pin_memory)",
            },
        },
        judge: judge_keys,
    },
];

/// The pace of the host, judged for a process.
pub(super) static PACE_RULE: RuleInfo = RuleInfo {
    id: "process-pace",
    source: "/sys/kernel/mm/ksm/pages_to_scan, /sys/kernel/mm/ksm/sleep_millisecs",
    why: "A page is merged in the second pass over all enrolled memory of the host that finds it unchanged.",
    needs_ksm: true,
    verdicts: Verdict::ALL,
    expected: "a full pass takes at most 200 s",
    details: SettingDetails {
        benefit: "its memory merges minutes after it has started, not hours",
        risk: "ksmd takes more CPU time",
        method: ApplyMethod::Live,
        undo: "write the values that were there",
        counter: "full_scans in /sys/kernel/mm/ksm; utime and stime in /proc/PID/stat of ksmd",
        versions: "Linux 2.6.32 and later; the advisor since 6.8",
        citation: "Linux 6.18: mm/ksm.c (ksm_scan_thread, ksm_advisor_target_scan_time), \
                   Documentation/admin-guide/mm/ksm.rst (pages_to_scan)",
    },
};

/// One region that KSM cannot merge.
pub(super) static REGION_RULE: RuleInfo = RuleInfo {
    id: "process-region",
    source: "/proc/PID/smaps (VmFlags)",
    why: "KSM takes private anonymous pages only; nothing of this region is ever merged.",
    needs_ksm: true,
    verdicts: &[Verdict::Warn],
    expected: "private anonymous memory",
    details: SettingDetails {
        benefit: "the region can merge",
        risk: "memory that devices or other processes share must stay shared; small pages cost TLB misses",
        method: ApplyMethod::Manual,
        undo: "map the region as before, which takes a restart of the program",
        counter: "VmFlags in /proc/PID/smaps",
        versions: "all kernels with KSM; VmFlags since Linux 3.8",
        citation: "Linux 6.18: mm/ksm.c (vma_ksm_compatible); madvise(2) (MADV_MERGEABLE)",
    },
};
