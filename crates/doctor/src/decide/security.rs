//! What merging reveals to other processes.
//!
//! ksmd has one stable tree for all processes (mm/ksm.c, `root_stable_tree`; one per node with `merge_across_nodes=0`).
//! It merges across users, containers and machines. Enrollment is the only control.

use super::change::{ApplyMethod, SettingDetails};
use super::enrollment::join_first_names;
use super::host_processes::{HostProcesses, total};
use super::{HostFacts, HostRule, ProcessFacts, RuleInfo, RuleResult, Verdict};
use pagefold_base::units::Bytes;
use std::collections::BTreeMap;

pub(super) const RULES: &[HostRule] = &[
    HostRule {
        rule: RuleInfo {
            id: "ksm-domains",
            source: "/proc/*/smaps (mg), /proc/*/status (Uid)",
            why: DOMAINS_WHY,
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "one trust domain is enrolled",
            details: SettingDetails {
                benefit: "no process learns by the time of a write what another domain holds",
                risk: "equal pages of different domains are kept once for each domain",
                method: ApplyMethod::Manual,
                undo: "enroll the other domains again",
                counter: "mg in VmFlags of /proc/PID/smaps",
                versions: "all kernels with KSM",
                citation: "Suzaki et al., Memory Deduplication as a Threat to the Guest OS, EuroSec 2011; Razavi et \
                           al., Flip Feng Shui, USENIX Security 2016",
            },
        },
        judge: judge_domains,
    },
    HostRule {
        rule: RuleInfo {
            id: "ksm-keys",
            source: "/proc/*/cmdline",
            why: KEYS_WHY,
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "no program that holds keys is enrolled",
            details: SettingDetails {
                benefit: "keys cannot be guessed by the time of a write",
                risk: "what the program had merged takes memory again",
                method: ApplyMethod::Manual,
                undo: "enroll the program again",
                counter: "mg in VmFlags of /proc/PID/smaps",
                versions: "all kernels with KSM",
                citation: "Bosman et al., Dedup Est Machina, IEEE Symposium on Security and Privacy 2016; Linux \
                           6.18: arch/x86/kvm/svm/sev.c (sev_pin_memory)",
            },
        },
        judge: judge_keys,
    },
    HostRule {
        rule: RuleInfo {
            id: "ksm-opt-out",
            source: "/proc/*/cmdline",
            why: OPT_OUT_WHY,
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "no machine is enrolled whose owner forbids merging",
            details: SettingDetails {
                benefit: "the decision of the owner holds",
                risk: "what the machine had merged takes memory again",
                method: ApplyMethod::Live,
                undo: "pagefold merge --ignore-opt-out",
                counter: "ksm_merging_pages in /proc/PID/ksm_stat",
                versions: "QEMU 1.3 and later for mem-merge, 2.1 for merge of a backend; ksm_merging_pages since \
                           Linux 6.4",
                citation: "QEMU: qemu-options.hx (-machine mem-merge=), backends/hostmem.c (merge); libvirt: \
                           docs/formatdomain.rst (nosharepages)",
            },
        },
        judge: judge_opt_out,
    },
];

const DOMAINS_WHY: &str = "\
     Equal pages of all enrolled processes are merged, across all users and machines. A write to a merged page takes a \
     copy and is measurably slower. So one process can find out what another process's memory holds (memory \
     deduplication side channel), and Rowhammer on a merged frame flips bits in the other process's copy (Flip Feng \
     Shui).";

pub(super) const KEYS_WHY: &str = "\
     A program that holds keys gains little from merging, and another enrolled process can test guesses of its pages \
     by the time of a write. The memory of a confidential guest cannot merge usefully and only costs ksmd time.";

const OPT_OUT_WHY: &str = "\
     QEMU is told not to merge the memory of a virtual machine by mem-merge=off (libvirt: <nosharepages/>) or by \
     merge=off of a memory backend. The owner decides that, and pagefold leaves such a machine alone unless \
     --ignore-opt-out or opted_out = false in the configuration is given.";

/// More than one trust domain is a warning, not a failure: the operator may have chosen it. If only one domain is
/// visible, there is no verdict while some processes cannot be read.
fn judge_domains(rule: &'static RuleInfo, _: &HostFacts, host_processes: &HostProcesses) -> RuleResult {
    let mut sizes = BTreeMap::<_, Bytes>::new();
    for process in host_processes.enrolled() {
        let size = sizes.entry(&process.domain).or_default();
        *size = total([*size, process.mergeable()].into_iter());
    }
    let names: Vec<_> = sizes.iter().map(|(domain, bytes)| format!("{domain}: {bytes}")).collect();
    if names.len() > 1 {
        return Ok(rule
            .warn(format!("{} trust domains may share memory", names.len()), join_first_names(&names))
            .remedy([
                "# enroll one domain only. A QEMU machine: -machine mem-merge=off, in libvirt <nosharepages/>; or now,",
                "# which taints the domain for libvirt (custom-monitor) until it is restarted:",
                "# virsh qemu-monitor-command NAME '{\"execute\":\"qom-set\",\"arguments\": \
                 {\"path\":\"/objects/pc.ram\",\"property\":\"merge\",\"value\":false}}'",
                "# for a process enrolled by prctl: gdb -p PID -batch -ex 'call (int)prctl(67,0,0,0,0)'",
            ])
            .verify("pagefold doctor"));
    }
    host_processes.require_readable("enrollment", ProcessFacts::is_enrolled)?;
    Ok(match names.as_slice() {
        [name] => rule.ok("one trust domain is enrolled", name.clone()),
        _ => rule.not_applicable("nothing is enrolled", "none"),
    })
}

/// A warning only: harmless by itself, and easily avoided.
fn judge_keys(rule: &'static RuleInfo, _: &HostFacts, host_processes: &HostProcesses) -> RuleResult {
    let names: Vec<_> = host_processes.enrolled().filter(|p| p.holds_secrets()).map(ProcessFacts::name).collect();
    if names.is_empty() {
        host_processes.require_readable("enrollment", ProcessFacts::is_enrolled)?;
        host_processes.require_readable("command lines", |p| p.process.arguments.clone())?;
        return Ok(rule.ok("no program that is known to hold keys is enrolled", "none"));
    }
    Ok(rule
        .warn("programs that hold secrets are enrolled", join_first_names(&names))
        .remedy(["# check each one: pagefold doctor --pid N"])
        .verify("pagefold doctor"))
}

/// A warning: the owner forbids merging, but another program has enrolled it.
fn judge_opt_out(rule: &'static RuleInfo, _: &HostFacts, host_processes: &HostProcesses) -> RuleResult {
    let opted_out: Vec<_> =
        host_processes.processes.iter().copied().filter(|process| process.opt_out().is_some()).collect();
    // If one backend opts out, QEMU itself enrolls the other backends.
    let is_enrolled_anyway = |process: &&&ProcessFacts| process.forbids_all() && process.is_enrolled() == Ok(true);
    let describe = |process: &&ProcessFacts| {
        let setting = process.opt_out().unwrap_or_default();
        format!("{}: {setting}", process.name())
    };
    let enrolled: Vec<_> = opted_out.iter().filter(is_enrolled_anyway).copied().collect();
    if !enrolled.is_empty() {
        let pids: Vec<_> = enrolled.iter().map(|process| format!("--pid {}", process.process.id.pid)).collect();
        return Ok(rule
            .warn(
                "virtual machines are enrolled although their owner forbids merging",
                join_first_names(&enrolled.iter().map(describe).collect::<Vec<_>>()),
            )
            .remedy([
                "# give them pages of their own again:".to_owned(),
                format!("pagefold unmerge {}", pids.join(" ")),
            ])
            .verify("pagefold doctor"));
    }
    host_processes.require_readable("command lines", |p| p.process.arguments.clone())?;
    if opted_out.is_empty() {
        return Ok(rule.not_applicable("no virtual machine forbids merging", "none"));
    }
    host_processes.require_readable("enrollment", ProcessFacts::is_enrolled)?;
    let names: Vec<_> = opted_out.iter().map(describe).collect();
    Ok(rule.ok("virtual machines that forbid merging are left alone", join_first_names(&names)))
}
