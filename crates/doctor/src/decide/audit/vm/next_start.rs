//! Whether libvirt's persistent definition of a machine still tells what its command line does.

use crate::decide::audit::facts::VmFacts;
use crate::decide::audit::{Judge, SettingRule};
use crate::decide::change::{ApplyMethod, SettingDetails};
use crate::decide::{HostFacts, RuleInfo, RuleResult, Verdict, require};
use pagefold_base::identity::virtual_nodes::VirtualNode;
use pagefold_base::identity::vm_definition::VmDefinition;
use pagefold_base::libvirt::LibvirtDefinition;

pub(super) const NEXT_START: SettingRule = SettingRule {
    rule: RuleInfo {
        id: "vm-next-start",
        source: "/proc/PID/cmdline, /etc/libvirt/qemu/*.xml",
        why: "libvirt starts a machine by its persistent definition. A change of it has no effect on the machine that \
              runs, and a change of the machine that runs is lost when it ends.",
        needs_ksm: false,
        verdicts: Verdict::ALL_BUT_FAIL,
        expected: "the definition of libvirt and the command line agree",
        details: SettingDetails {
            benefit: "the settings that were chosen are in force",
            risk: "a start of the machine interrupts its work",
            method: ApplyMethod::Manual,
            undo: "define the machine as before (virsh define)",
            counter: "virsh dumpxml NAME and virsh dumpxml --inactive NAME",
            versions: "all versions of libvirt",
            citation: "libvirt: docs/manpages/virsh.rst (edit, define, --config and --live)",
        },
    },
    judge: Judge::Vm(judge_next_start),
};

fn judge_next_start(rule: &'static RuleInfo, vm: &VmFacts, _: &HostFacts) -> RuleResult {
    let Some(next) = &vm.next_definition else {
        return Ok(rule.not_applicable("libvirt has no persistent definition of the machine", "none"));
    };
    let next = require("libvirt's definition of the machine", next)?;
    let Some(running) = &vm.definition else {
        return Ok(rule.not_applicable("the monitor is not QEMU", "not QEMU"));
    };
    let differences = find_differences(require("the definition of the machine", running)?, next);
    if differences.is_empty() {
        return Ok(rule.ok("the machine starts the next time as it runs now", "no difference"));
    }
    Ok(rule
        .warn(
            "the definition of libvirt differs from the machine: it takes effect at the next start",
            differences.join("; "),
        )
        .remedy([
            "# if the definition is right, shut the machine down and start it again; else define it as it runs now",
        ])
        .verify("pagefold doctor --topic vm"))
}

/// Features of the virtual CPU that rules judge, and whether QEMU has them by default with KVM
/// (target/i386/kvm/kvm-cpu.c, `kvm_default_props`).
const FEATURES: &[(&str, bool)] = &[
    ("hv-relaxed", false),
    ("hv-spinlocks", false),
    ("hv-time", false),
    ("hv-vapic", false),
    ("invtsc", false),
    ("kvm-hint-dedicated", false),
    ("kvm-pv-eoi", true),
    ("kvm-pv-ipi", true),
    ("kvm-pv-unhalt", true),
    ("kvmclock", true),
];

/// What differs between a running machine and its definition, of the settings that rules judge.
fn find_differences(running: &VmDefinition, next: &LibvirtDefinition) -> Vec<String> {
    let mut found = Vec::new();
    let mut compare = |what: &str, now: String, next: String| {
        if now != next {
            found.push(format!("{what}: {now} now, {next} next"));
        }
    };
    let LibvirtDefinition { vm: next, default_drivers, .. } = next;
    compare("accelerator", accelerator(running.kvm), accelerator(next.kvm));
    // libvirt turns host-model into a named model when the machine starts.
    if next.cpu_model.as_deref() != Some("host-model") {
        compare("CPU model", model(running), model(next));
    }
    for (name, default) in FEATURES {
        let state = |vm: &VmDefinition| on_off(vm.cpu_features.get(*name).copied().unwrap_or(*default));
        compare(name, state(running), state(next));
    }
    if let (Some(now), Some(next)) = (running.vcpus, next.vcpus) {
        compare("virtual CPUs", now.to_string(), next.to_string());
    }
    compare("virtual nodes", nodes(&running.virtual_nodes), nodes(&next.virtual_nodes));
    compare("memory", memory_kind(running), memory_kind(next));
    compare("merging", on_off(running.opt_out.is_none()), on_off(next.opt_out.is_none()));
    compare("cpu-pm", on_off(running.cpu_pm), on_off(next.cpu_pm));
    for disk in &next.disks {
        let Some(now) = running.disks.iter().find(|now| now.id == disk.id).filter(|now| now.local && disk.local) else {
            continue;
        };
        let name = |what: &str| format!("{what} of {}", disk.id);
        compare(&name("cache"), cache(now.direct), cache(disk.direct));
        compare(&name("aio"), now.aio.clone(), disk.aio.clone());
        compare(&name("iothreads"), now.iothreads.to_string(), disk.iothreads.to_string());
    }
    for network in &next.networks {
        let Some(now) = running.networks.iter().find(|now| now.id == network.id) else { continue };
        let name = |what: &str| format!("{what} of {}", network.id);
        if !default_drivers.contains(&network.id) {
            compare(&name("vhost"), on_off(now.vhost), on_off(network.vhost));
        }
        compare(&name("queues"), now.queues.to_string(), network.queues.to_string());
    }
    found
}

fn on_off(is_on: bool) -> String {
    if is_on { "on" } else { "off" }.to_owned()
}

fn accelerator(is_kvm: bool) -> String {
    if is_kvm { "kvm" } else { "none" }.to_owned()
}

fn cache(is_direct: bool) -> String {
    if is_direct { "none" } else { "host" }.to_owned()
}

/// libvirt writes qemu64 for a definition without a model.
fn model(vm: &VmDefinition) -> String {
    vm.cpu_model.clone().unwrap_or_else(|| "qemu64".to_owned())
}

fn nodes(nodes: &[VirtualNode]) -> String {
    let shown = |node: &VirtualNode| match &node.policy {
        Some(policy) => format!("{} {policy} {}", node.id, node.host_nodes),
        None => node.id.to_string(),
    };
    if nodes.is_empty() { "none".to_owned() } else { nodes.iter().map(shown).collect::<Vec<_>>().join(", ") }
}

/// Which kind of memory the machine has; backends have other names on the command line.
fn memory_kind(vm: &VmDefinition) -> String {
    let has = |kind: &str| vm.unmergeable.iter().any(|reason| reason.ends_with(kind));
    let kind = if vm.guest_memfd {
        "guest_memfd"
    } else if has("hugetlb") || has("-mem-path") {
        "hugetlb"
    } else if has("shared") {
        "shared"
    } else {
        "private"
    };
    kind.to_owned()
}
