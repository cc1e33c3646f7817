//! The disks and network devices of a machine.

use super::{UNDO, require_definition, with_option};
use crate::decide::audit::facts::VmFacts;
use crate::decide::audit::{Judge, SettingRule};
use crate::decide::change::{ApplyMethod, SettingDetails, VmOption};
use crate::decide::{HostFacts, RuleInfo, RuleResult, Verdict, require};
use pagefold_base::count_text;
use pagefold_base::identity::vm_definition::{VmDefinition, VmDisk, VmNetwork};

pub(super) const IOTHREADS: SettingRule = SettingRule {
    rule: RuleInfo {
        id: "vm-iothreads",
        source: "/proc/PID/cmdline, /proc/PID/task/TID/stat",
        why: "A disk without an iothread is served by the main loop of QEMU, under its big lock, together with all \
              other devices. One iothread is at most one CPU; QEMU 9.0 spreads the queues of a disk over several.",
        needs_ksm: false,
        verdicts: Verdict::ALL_BUT_FAIL,
        expected: "an iothread for each virtio-blk disk; from QEMU 9.0 on several, if it took half a CPU on average",
        details: SettingDetails {
            benefit: "more requests per second; the main loop stays responsive",
            risk: "one more busy thread beside the virtual CPUs",
            method: ApplyMethod::VmRestart,
            undo: UNDO,
            counter: "CPU time of the thread IO iothread1",
            versions: "QEMU 2.1 and later; several iothreads for one disk (iothread-vq-mapping) since 9.0",
            citation: "QEMU: docs/devel/multiple-iothreads.rst; hw/block/virtio-blk.c",
        },
    },
    judge: Judge::Definition(judge_iothreads),
};

pub(super) const CACHE: SettingRule = SettingRule {
    rule: RuleInfo {
        id: "vm-disk-cache",
        source: "/proc/PID/cmdline",
        why: "Without cache.direct=on each block of a disk is also in the page cache of the host: a second copy of what \
              the guest caches. aio=threads takes a thread for each request.",
        needs_ksm: false,
        verdicts: Verdict::ALL_BUT_FAIL,
        expected: "cache.direct=on (cache=none) with aio=native or io_uring",
        details: SettingDetails {
            benefit: "memory for guests instead of second copies; less CPU time for each request",
            risk: "disks that many machines read in common lose the cache of the host",
            method: ApplyMethod::VmRestart,
            undo: UNDO,
            counter: "Cached in /proc/meminfo; iostat",
            versions: "all versions of QEMU; io_uring since 5.0",
            citation: "QEMU: docs/system/qemu-block-drivers.rst.inc; qemu-options.hx (-drive cache=, aio=)",
        },
    },
    judge: Judge::Definition(judge_cache),
};

pub(super) const VHOST: SettingRule = SettingRule {
    rule: RuleInfo {
        id: "vm-vhost-net",
        source: "/proc/PID/cmdline",
        why: "Without vhost each packet passes the main loop of QEMU; with it a kernel thread moves packets between the \
              guest and the tap device.",
        needs_ksm: false,
        verdicts: Verdict::ALL_BUT_FAIL,
        expected: "vhost=on for tap devices",
        details: SettingDetails {
            benefit: "several times as many packets per second, with less CPU time",
            risk: "a bug in vhost is a bug in the kernel",
            method: ApplyMethod::VmRestart,
            undo: UNDO,
            counter: "threads named vhost-PID; exits",
            versions: "Linux 2.6.34 and later",
            citation: "drivers/vhost/net.c; QEMU: qemu-options.hx (-netdev tap)",
        },
    },
    judge: Judge::Definition(judge_vhost),
};

pub(super) const QUEUES: SettingRule = SettingRule {
    rule: RuleInfo {
        id: "vm-queues",
        source: "/proc/PID/cmdline",
        why: "One queue serializes packets of all virtual CPUs; more queues than virtual CPUs only take memory and \
              interrupts.",
        needs_ksm: false,
        verdicts: Verdict::ALL_BUT_FAIL,
        expected: "at least 2 queues for 4 or more virtual CPUs with vhost; at most one for each virtual CPU",
        details: SettingDetails {
            benefit: "virtual CPUs send and receive in parallel",
            risk: "each queue is a vhost worker that may use a CPU",
            method: ApplyMethod::VmRestart,
            undo: UNDO,
            counter: "ethtool -l and -S in the guest",
            versions: "Linux 3.8 and QEMU 1.4 and later",
            citation: "drivers/net/virtio_net.c (VIRTIO_NET_F_MQ); QEMU: qemu-options.hx (queues=)",
        },
    },
    judge: Judge::Definition(judge_queues),
};

fn names<'a>(ids: impl Iterator<Item = &'a String>) -> String {
    ids.map(String::as_str).collect::<Vec<_>>().join(", ")
}

fn judge_iothreads(rule: &'static RuleInfo, vm: &VmFacts, _: &HostFacts) -> RuleResult {
    let definition = match require_definition(rule, vm)? {
        Ok(definition) => definition,
        Err(finding) => return Ok(finding),
    };
    let disks: Vec<&VmDisk> = definition.disks.iter().filter(|disk| disk.virtio_blk).collect();
    if disks.is_empty() {
        return Ok(rule.not_applicable("the machine has no virtio-blk disk", "none"));
    }
    let without: Vec<&&VmDisk> = disks.iter().filter(|disk| disk.iothreads == 0).collect();
    if without.is_empty() {
        return judge_busy_iothreads(rule, vm, definition, &disks);
    }
    let value = format!("no iothread: {}", names(without.iter().map(|disk| &disk.id)));
    let finding = rule.warn("the main loop of QEMU serves disks", value);
    Ok(without.into_iter().fold(finding, |finding, disk| {
        let option = VmOption::DiskIoThreads { disk: disk.id.clone(), count: 1 };
        with_option(
            finding,
            vm,
            option,
            "add -object iothread and iothread= to the disks (libvirt: <driver iothread=''/>)",
        )
    }))
}

/// The first version of QEMU that maps the queues of a disk to iothreads (`iothread-vq-mapping`).
const FIRST_VERSION_WITH_MAPPING: (u32, u32) = (9, 0);
/// An iothread that takes so many CPUs on average, idle time included, lacks CPU time while the guest is busy.
const BUSY_IOTHREAD_LOAD: f64 = 0.5;
/// How many iothreads replace a busy one: each has half of its load at most.
const IOTHREADS_OF_BUSY_DISK: u32 = 2;

/// Judges disks that all have iothreads. A disk has a queue for each virtual CPU, so with one there is nothing to spread.
fn judge_busy_iothreads(
    rule: &'static RuleInfo,
    vm: &VmFacts,
    definition: &VmDefinition,
    disks: &[&VmDisk],
) -> RuleResult {
    let value = count_text(disks.len(), "disk");
    let title = "iothreads serve the disks";
    let can_map = definition.machine_version.is_some_and(|version| version >= FIRST_VERSION_WITH_MAPPING);
    if !can_map || disks.iter().all(|disk| disk.iothread.is_none()) || vm.vcpu_count()? < 2 {
        return Ok(rule.ok(title, value));
    }
    let loads = require("the CPU time of iothreads", &vm.iothread_loads)?;
    let busy: Vec<(&VmDisk, f64)> = disks
        .iter()
        .filter_map(|disk| {
            let name = disk.iothread.as_deref()?;
            let (_, load) = loads.iter().find(|(role, _)| role.is_iothread(name))?;
            Some((*disk, *load)).filter(|_| *load >= BUSY_IOTHREAD_LOAD)
        })
        .collect();
    if busy.is_empty() {
        return Ok(rule.ok(title, value));
    }
    let shown: Vec<String> =
        busy.iter().map(|(disk, load)| format!("that of {} took {:.0} % of a CPU", disk.id, load * 100.0)).collect();
    let finding = rule.warn("one iothread serves a busy disk", shown.join(", "));
    Ok(busy.into_iter().fold(finding, |finding, (disk, _)| {
        let option = VmOption::DiskIoThreads { disk: disk.id.clone(), count: IOTHREADS_OF_BUSY_DISK };
        with_option(
            finding,
            vm,
            option,
            "let two iothreads serve the disk: iothread-vq-mapping of the device (libvirt: <iothreads> in <driver>)",
        )
    }))
}

fn judge_cache(rule: &'static RuleInfo, vm: &VmFacts, _: &HostFacts) -> RuleResult {
    let definition = match require_definition(rule, vm)? {
        Ok(definition) => definition,
        Err(finding) => return Ok(finding),
    };
    let disks: Vec<&VmDisk> = definition.disks.iter().filter(|disk| disk.local).collect();
    if disks.is_empty() {
        return Ok(rule.not_applicable("the machine has no disk in a file or device of the host", "none"));
    }
    let cached: Vec<&&VmDisk> = disks.iter().filter(|disk| !disk.direct).collect();
    let threaded: Vec<&&VmDisk> = disks.iter().filter(|disk| disk.direct && disk.aio == "threads").collect();
    if cached.is_empty() && threaded.is_empty() {
        return Ok(rule.ok("disks bypass the page cache of the host", format!("{} disks", disks.len())));
    }
    let mut parts = Vec::new();
    parts.extend((!cached.is_empty()).then(|| format!("cached: {}", names(cached.iter().map(|disk| &disk.id)))));
    parts.extend(
        (!threaded.is_empty()).then(|| format!("aio=threads: {}", names(threaded.iter().map(|disk| &disk.id)))),
    );
    let title =
        if cached.is_empty() { "requests to disks take threads" } else { "the host caches disks a second time" };
    let finding = rule.warn(title, parts.join("; "));
    let finding = cached.iter().fold(finding, |finding, disk| {
        let option = VmOption::DiskCacheNone { disk: disk.id.clone() };
        with_option(finding, vm, option, "set cache.direct=on of the disks (libvirt: <driver cache='none'/>)")
    });
    let uses_threads = disks.iter().filter(|disk| disk.aio == "threads");
    Ok(uses_threads.fold(finding, |finding, disk| {
        let option = VmOption::DiskAio { disk: disk.id.clone(), interface: "native".to_owned() };
        with_option(finding, vm, option, "set aio=native of the disks (libvirt: <driver io='native'/>)")
    }))
}

fn judge_vhost(rule: &'static RuleInfo, vm: &VmFacts, _: &HostFacts) -> RuleResult {
    let definition = match require_definition(rule, vm)? {
        Ok(definition) => definition,
        Err(finding) => return Ok(finding),
    };
    let taps: Vec<&VmNetwork> = definition.networks.iter().filter(|network| network.kind == "tap").collect();
    if taps.is_empty() {
        return Ok(rule.not_applicable("the machine has no virtio device on a tap device", "none"));
    }
    let without: Vec<&&VmNetwork> = taps.iter().filter(|network| !network.vhost).collect();
    if without.is_empty() {
        return Ok(rule.ok("the kernel moves packets", format!("{} devices", taps.len())));
    }
    let value = format!("no vhost: {}", names(without.iter().map(|network| &network.id)));
    let finding = rule.warn("QEMU moves each packet", value);
    Ok(without.into_iter().fold(finding, |finding, network| {
        let option = VmOption::VhostNet { network: network.id.clone() };
        with_option(
            finding,
            vm,
            option,
            "add vhost=on to -netdev (libvirt: <driver name='vhost'/>), and load vhost_net",
        )
    }))
}

/// From this number of virtual CPUs on, one queue is too few.
const MIN_VCPUS_FOR_QUEUES: u64 = 4;
/// Queues to recommend at most: more bring little, and each is a kernel thread.
const MAX_RECOMMENDED_QUEUES: u64 = 8;

fn judge_queues(rule: &'static RuleInfo, vm: &VmFacts, _: &HostFacts) -> RuleResult {
    let definition = match require_definition(rule, vm)? {
        Ok(definition) => definition,
        Err(finding) => return Ok(finding),
    };
    let networks: Vec<&VmNetwork> =
        definition.networks.iter().filter(|network| network.vhost && network.kind == "tap").collect();
    if networks.is_empty() {
        return Ok(rule.not_applicable("the machine has no network device with vhost", "none"));
    }
    let vcpus = vm.vcpu_count()?;
    let fits = |network: &VmNetwork| {
        let queues = u64::from(network.queues);
        queues <= vcpus && (queues > 1 || vcpus < MIN_VCPUS_FOR_QUEUES)
    };
    let shown: Vec<String> = networks.iter().map(|network| format!("{} {}", network.id, network.queues)).collect();
    let value = format!("queues: {}; {}", shown.join(", "), count_text(vcpus, "virtual CPU"));
    if networks.iter().all(|network| fits(network)) {
        return Ok(rule.ok("the queues suit the virtual CPUs", value));
    }
    let count = u32::try_from(vcpus.min(MAX_RECOMMENDED_QUEUES)).unwrap_or(1);
    let finding = rule.warn("the queues do not suit the virtual CPUs", value);
    Ok(networks.into_iter().filter(|network| !fits(network)).fold(finding, |finding, network| {
        let option = VmOption::NetworkQueues { network: network.id.clone(), count };
        with_option(finding, vm, option, &format!("set queues={count} of -netdev and mq=on of the device"))
    }))
}
