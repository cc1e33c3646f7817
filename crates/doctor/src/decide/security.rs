//! What merging tells the neighbours.
//!
//! ksmd has one tree for all (mm/ksm.c, `root_stable_tree`; one for each node with `merge_across_nodes=0`): it merges
//! across users, containers and machines alike. Who is enrolled is the only control.

use super::enrolment::some_of;
use super::fleet::{Fleet, total};
use super::{HostFacts, HostRule, Outcome, ProcessFacts, Rule};
use pagefold_base::units::Bytes;
use std::collections::BTreeMap;

pub(super) const RULES: &[HostRule] = &[
    HostRule {
        rule: Rule {
            id: "ksm-domains",
            source: "/proc/*/smaps (mg), /proc/*/status (Uid)",
            why: DOMAINS,
            needs_ksm: true,
        },
        judge: domains,
    },
    HostRule { rule: Rule { id: "ksm-keys", source: "/proc/*/cmdline", why: KEYS, needs_ksm: true }, judge: keys },
    HostRule {
        rule: Rule { id: "ksm-opt-out", source: "/proc/*/cmdline", why: OPT_OUT, needs_ksm: true },
        judge: opt_out,
    },
];

const DOMAINS: &str = "\
     Equal pages of all who are enrolled are merged, whoever owns them. A write to a merged page takes a copy and is \
     measurably slower, so that a neighbour can find out what another's memory holds (memory deduplication side \
     channel), and Rowhammer on a merged frame flips bits in the neighbour's copy (Flip Feng Shui).";

pub(super) const KEYS: &str = "\
     A program that holds keys gains little from merging, and a neighbour who is enrolled can test guesses of its \
     pages by the time of a write. The memory of a confidential guest cannot merge usefully and only costs ksmd \
     time.";

const OPT_OUT: &str = "\
     QEMU is told not to merge the memory of a virtual machine by mem-merge=off (libvirt: <nosharepages/>) or by \
     merge=off of a memory backend. The owner decides that, and pagefold leaves such a machine alone unless \
     --ignore-opt-out or opted_out = false in the configuration is given.";

/// More than one trust domain is a warning, not a failure: it may be what the operator chose. One domain among those
/// that can be seen is no verdict while others cannot.
fn domains(rule: &Rule, _: &HostFacts, fleet: &Fleet) -> Outcome {
    let mut sizes = BTreeMap::<_, Bytes>::new();
    for process in fleet.enrolled() {
        let size = sizes.entry(&process.domain).or_default();
        *size = total([*size, process.mergeable()].into_iter());
    }
    let names: Vec<_> = sizes.iter().map(|(domain, bytes)| format!("{domain}: {bytes}")).collect();
    if names.len() > 1 {
        return Ok(rule
            .warn(format!("{} trust domains may share memory", names.len()), some_of(&names))
            .remedy([
                "# enrol one domain only. A QEMU machine: -machine mem-merge=off, in libvirt <nosharepages/>; or now,",
                "# which taints the domain for libvirt (custom-monitor) until it is started anew:",
                "# virsh qemu-monitor-command NAME '{\"execute\":\"qom-set\",\"arguments\": \
                 {\"path\":\"/objects/pc.ram\",\"property\":\"merge\",\"value\":false}}'",
                "# for a process enrolled by prctl: gdb -p PID -batch -ex 'call (int)prctl(67,0,0,0,0)'",
            ])
            .verify("pagefold doctor"));
    }
    fleet.all_seen("enrolment", ProcessFacts::enrolled)?;
    Ok(match names.as_slice() {
        [one] => rule.ok("one trust domain is enrolled", one.clone()),
        _ => rule.not_applicable("nothing is enrolled", "none"),
    })
}

/// A warning: no harm by itself, and easily avoided.
fn keys(rule: &Rule, _: &HostFacts, fleet: &Fleet) -> Outcome {
    let names: Vec<_> = fleet.enrolled().filter(|p| p.holds_secrets()).map(ProcessFacts::name).collect();
    if names.is_empty() {
        fleet.all_seen("enrolment", ProcessFacts::enrolled)?;
        fleet.all_seen("command lines", |p| p.process.arguments.clone())?;
        return Ok(rule.ok("no program that is known to hold keys is enrolled", "none"));
    }
    Ok(rule
        .warn("programs that hold secrets are enrolled", some_of(&names))
        .remedy(["# ask for each: pagefold doctor --pid N"])
        .verify("pagefold doctor"))
}

/// A warning: the owner has said no, and somebody else has enrolled it all the same.
fn opt_out(rule: &Rule, _: &HostFacts, fleet: &Fleet) -> Outcome {
    let opted_out: Vec<_> = fleet.processes.iter().copied().filter(|process| process.opt_out().is_some()).collect();
    // Where one backend is left out, QEMU itself enrols the others.
    let against = |process: &&&ProcessFacts| process.forbids_all() && process.enrolled() == Ok(true);
    let named = |process: &&ProcessFacts| {
        let setting = process.opt_out().unwrap_or_default();
        format!("{}: {setting}", process.name())
    };
    let enrolled: Vec<_> = opted_out.iter().filter(against).copied().collect();
    if !enrolled.is_empty() {
        let pids: Vec<_> = enrolled.iter().map(|process| format!("--pid {}", process.process.id.pid)).collect();
        return Ok(rule
            .warn(
                "virtual machines are enrolled although their owner forbids merging",
                some_of(&enrolled.iter().map(named).collect::<Vec<_>>()),
            )
            .remedy([
                "# give them pages of their own again:".to_owned(),
                format!("pagefold unmerge {}", pids.join(" ")),
            ])
            .verify("pagefold doctor"));
    }
    fleet.all_seen("command lines", |p| p.process.arguments.clone())?;
    if opted_out.is_empty() {
        return Ok(rule.not_applicable("no virtual machine forbids merging", "none"));
    }
    fleet.all_seen("enrolment", ProcessFacts::enrolled)?;
    let names: Vec<_> = opted_out.iter().map(named).collect();
    Ok(rule.ok("virtual machines that forbid merging are left alone", some_of(&names)))
}
