//! What merging tells the neighbours.
//!
//! ksmd has one tree for all (mm/ksm.c, `root_stable_tree`; one for each node with `merge_across_nodes=0`): it merges
//! across users, containers and machines alike. Who is enrolled is the only control.

use super::enrolment::some_of;
use super::fleet::{Fleet, total};
use super::{HostFacts, HostRule, Outcome, ProcessFacts, Rule};
use crate::units::Bytes;
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
];

const DOMAINS: &str = "\
     Equal pages of all who are enrolled are merged, whoever owns them. A write to a merged page takes a copy and is \
     measurably slower, so that a neighbour can find out what another's memory holds (memory deduplication side \
     channel), and Rowhammer on a merged frame flips bits in the neighbour's copy (Flip Feng Shui).";

pub(super) const KEYS: &str = "\
     A program that holds keys gains little from merging, and a neighbour who is enrolled can test guesses of its \
     pages by the time of a write. The memory of a confidential guest cannot merge usefully and only costs ksmd \
     time.";

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
                "# enrol one domain only. A QEMU machine: -machine mem-merge=off, in libvirt <nosharepages/>; or now:",
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
    let names: Vec<_> = fleet.enrolled().filter(|p| p.excluded.is_some()).map(ProcessFacts::name).collect();
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
