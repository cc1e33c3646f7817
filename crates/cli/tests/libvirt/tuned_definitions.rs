//! `pagefold tune apply --define` on domains whose definitions break every rule that changes one. libvirt checks each new
//! definition by its schema.
//!
//! The rules judge the process that runs, and some apply only to machines on KVM. So the emulator of these domains is a
//! script that puts `-accel kvm` first. QEMU falls back to TCG on a host without KVM, and the domains stay paused.

use super::LibvirtSession;
use pagefold_doctor::decide::change::VmOption;
use pagefold_tune::decide::vm::xml::set_option;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;

/// The emulator. TCG has no model that libvirt lets tell its guest that its CPUs are dedicated, so the script does.
/// libvirt also starts it without a guest, to see what it can do.
const EMULATOR: &str = r#"#!/bin/sh
case " $* " in *" guest="*) ;; *) exec /usr/bin/qemu-system-x86_64 "$@" ;; esac
for argument; do
    shift
    case $argument in qemu64*kvmclock=off*) argument=$argument,kvm-hint-dedicated=on ;; esac
    set -- "$@" "$argument"
done
exec /usr/bin/qemu-system-x86_64 -accel kvm "$@"
"#;

/// The parts of a domain for Linux that rules find fault with.
const LINUX_PARTS: &str = "
  <vcpu>2</vcpu>
  <iothreads>1</iothreads>
  <features>
    <acpi/><apic eoi='off'/><kvm><pv-ipi state='off'/></kvm><pvspinlock state='off'/>
  </features>
  <clock offset='utc'><timer name='kvmclock' present='no'/></clock>
  <qemu:commandline><qemu:arg value='-overcommit'/><qemu:arg value='cpu-pm=on'/></qemu:commandline>";

const LINUX_DEVICES: &str = "
    <disk type='file' device='disk'>
      <driver name='qemu' type='raw'/><source file='DIRECTORY/cached.img'/><target dev='vda' bus='virtio'/>
    </disk>
    <disk type='file' device='disk'>
      <driver name='qemu' type='raw' cache='none' io='threads' iothread='1'/>
      <source file='DIRECTORY/direct.img'/><target dev='vdb' bus='virtio'/>
    </disk>
    <interface type='ethernet'><target dev='tap-a'/><model type='virtio'/><driver name='qemu'/></interface>";

/// The parts of a domain for Windows that a rule finds fault with.
const WINDOWS_PARTS: &str = "
  <vcpu>1</vcpu>
  <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>
  <features><acpi/></features><clock offset='localtime'/>";

/// The rules that change definitions. Without their names, `tune apply` would also change the host.
const RULES: [&str; 11] = [
    "vm-cpu-model",
    "vm-virtual-nodes",
    "vm-mergeable-memory",
    "vm-hyperv",
    "vm-pv-features",
    "vm-dedicated-hint",
    "vm-cpu-pm",
    "vm-clock",
    "vm-iothreads",
    "vm-disk-cache",
    "vm-vhost-net",
];

/// What libvirt's form of the new definition of the domain for Linux has, and the old one does not.
const LINUX_OPTIONS: [&str; 13] = [
    "<cpu mode='host-passthrough'",
    "<cell id='1' cpus='1' memory='32768' unit='KiB'/>",
    "<memnode cellid='1' mode='strict' nodeset='1'/>",
    "<vcpupin vcpu='1' cpuset='1'/>",
    "<apic eoi='on'/>",
    "<pv-ipi state='on'/>",
    "<pvspinlock state='on'/>",
    "<hint-dedicated state='off'/>",
    "<timer name='kvmclock' present='yes'/>",
    "<iothreads>2</iothreads>",
    "<driver name='qemu' type='raw' cache='none' io='native' iothread='2'/>",
    "<driver name='qemu' type='raw' cache='none' io='native' iothread='1'/>",
    "<driver name='vhost'/>",
];

/// The same of the domain for Windows.
const WINDOWS_OPTIONS: [&str; 4] = [
    "<cpu mode='host-passthrough'",
    "<relaxed state='on'/>",
    "<vapic state='on'/>",
    "<timer name='hypervclock' present='yes'/>",
];

fn domain_xml(name: &str, directory: &str, parts: &str, devices: &str) -> String {
    format!(
        "<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>{name}</name>
  <memory unit='MiB'>64</memory>
  <os><type arch='x86_64' machine='pc'>hvm</type></os>{parts}
  <devices>
    <emulator>{directory}/emulator</emulator>{devices}
    <memballoon model='none'/>
  </devices>
</domain>
"
    )
    .replace("DIRECTORY", directory)
}

/// The lines of a command's output, without the last, which has its status.
fn output_of(libvirt: &mut LibvirtSession, command: &str) -> String {
    let output = libvirt.run_shell(&format!("{command}; echo"));
    output.rsplit_once("END 0").unwrap().0.to_owned()
}

fn read_json(libvirt: &mut LibvirtSession, command: &str) -> Value {
    let output = output_of(libvirt, command);
    let start = output.find('{').unwrap_or_else(|| panic!("{output}"));
    serde_json::from_str(&output[start..]).unwrap_or_else(|why| panic!("{why}: {output}"))
}

/// The command line of a domain's process, and libvirt's view of the domain that runs.
fn running_state(libvirt: &mut LibvirtSession, name: &str) -> String {
    output_of(
        libvirt,
        &format!("tr '\\0' ' ' < /proc/$(cat /run/libvirt/qemu/{name}.pid)/cmdline; virsh dumpxml {name}"),
    )
}

/// Defines domains anew by each option of [`VmOption`] that libvirt has, and brings their files back. The domains that run
/// stay as they are.
pub fn check_tuned_definitions(libvirt: &mut LibvirtSession) {
    let directory = libvirt.directory.path().to_str().unwrap().to_owned();
    let pagefold = env!("CARGO_BIN_EXE_pagefold");
    let id = std::process::id();
    let (linux, windows) = (format!("linux{id}"), format!("windows{id}"));
    let emulator = libvirt.directory.path().join("emulator");
    fs::write(&emulator, EMULATOR).unwrap();
    fs::set_permissions(&emulator, fs::Permissions::from_mode(0o755)).unwrap();
    for (name, parts, devices) in [(&linux, LINUX_PARTS, LINUX_DEVICES), (&windows, WINDOWS_PARTS, "")] {
        let xml = domain_xml(name, &directory, parts, devices);
        fs::write(libvirt.directory.path().join(format!("{name}.xml")), xml).unwrap();
    }
    // Only these namespaces see two nodes of one CPU, and KSM running.
    libvirt.run_shell(&format!(
        "truncate -s 1M $directory/cached.img $directory/direct.img && mkdir -p /dev/net && \
         {{ [ -e /dev/net/tun ] || mknod -m 666 /dev/net/tun c 10 200; }} && state=$directory/tuned && \
         for name in {linux} {windows}; do virsh define --validate $directory/$name.xml && \
         virsh start --paused $name || break; done && nodes=$directory/tune-nodes && \
         for node in 0 1; do mkdir -p $nodes/node$node && echo $node > $nodes/node$node/cpulist; done && \
         cp /sys/devices/system/node/node0/meminfo $nodes/node0 && \
         sed 's/Node 0/Node 1/' $nodes/node0/meminfo > $nodes/node1/meminfo && \
         echo '10 20' > $nodes/node0/distance && echo '20 10' > $nodes/node1/distance && \
         mount --bind $nodes /sys/devices/system/node && echo 1 > $directory/ksm-run && \
         mount --bind $directory/ksm-run /sys/kernel/mm/ksm/run && cp -r /etc/libvirt/qemu $directory/untuned"
    ));
    let running = [&linux, &windows].map(|name| running_state(libvirt, name));
    let rules = RULES.map(|rule| format!("--rule {rule}")).join(" ");

    let command = format!("{pagefold} tune apply {rules} --state $state --json");
    let without = read_json(libvirt, &command);
    assert_eq!(without["done"], serde_json::json!([]), "definitions change on request only: {without}");
    libvirt.run_shell("diff -r /etc/libvirt/qemu $directory/untuned");

    // Killed when libvirt has stored a definition, and the journal does not have libvirt's form of it yet.
    for number in [1, 2] {
        libvirt.run_shell(&format!(
            "PAGEFOLD_FAULT_POINT='{number} after defining a domain' {command} --define > $directory/killed 2>&1; \
             [ $? -eq 137 ] && ! diff -r /etc/libvirt/qemu $directory/untuned > $directory/changes && \
             {pagefold} recover --state $state && diff -r /etc/libvirt/qemu $directory/untuned"
        ));
    }

    let applied = read_json(libvirt, &format!("{command} --define"));
    assert_eq!(applied["done"].as_array().unwrap().len(), 2, "{applied}");
    assert_eq!(applied["failed"], serde_json::json!([]), "{applied}");
    let refusals = applied["plan"]["refused"].as_array().unwrap();
    let [refusal] = &refusals[..] else { panic!("{refusals:?}") };
    assert!(refusal["rule"] == "vm-cpu-pm" && refusal.to_string().contains("by hand"), "{refusal}");
    for (name, options) in [(&linux, &LINUX_OPTIONS[..]), (&windows, &WINDOWS_OPTIONS[..])] {
        let next = output_of(libvirt, &format!("virsh dumpxml --inactive {name}"));
        let missing: Vec<&&str> = options.iter().filter(|option| !next.contains(**option)).collect();
        assert!(missing.is_empty(), "{missing:?}: {next}");
    }
    let next = output_of(libvirt, &format!("virsh dumpxml --inactive {linux}"));
    assert!(next.contains("<qemu:arg value='cpu-pm=on'/>"), "other parts stay: {next}");
    assert_eq!([&linux, &windows].map(|name| running_state(libvirt, name)), running, "a running domain was changed");
    let verified = read_json(libvirt, &format!("{pagefold} tune verify --state $state --json"));
    assert!(verified.to_string().contains(&*linux) && verified.to_string().contains(&*windows), "{verified}");

    // Queues need a machine that runs with vhost, which this kernel may not have.
    let queues = VmOption::NetworkQueues { network: "hostnet0".to_owned(), count: 4 };
    let next = define_with_option(libvirt, &linux, &queues);
    assert!(next.contains("<driver name='vhost' queues='4'/>"), "{next}");
    // The domains of this test distrust each other, so no memory was made mergeable.
    let next = output_of(libvirt, &format!("virsh dumpxml --inactive {windows}"));
    assert!(next.contains("<access mode='shared'/>") && next.contains("memfd"), "{next}");
    let next = define_with_option(libvirt, &windows, &VmOption::MergeableMemory);
    assert!(!next.contains("<access mode='shared'/>") && !next.contains("memfd"), "{next}");

    libvirt.run_shell(&format!("{pagefold} tune undo --state $state && diff -r /etc/libvirt/qemu $directory/untuned"));
    assert_eq!([&linux, &windows].map(|name| running_state(libvirt, name)), running, "a running domain was changed");
    libvirt.run_shell(&format!(
        "umount /sys/kernel/mm/ksm/run /sys/devices/system/node && for name in {linux} {windows}; do \
         virsh destroy $name && virsh undefine $name || break; done"
    ));
}

/// libvirt's form of a tuned definition with one more option, which no rule has given it. The definition is brought back.
fn define_with_option(libvirt: &mut LibvirtSession, name: &str, option: &VmOption) -> String {
    let tuned = libvirt.directory.path().join(format!("etc/libvirt/qemu/{name}.xml"));
    let tuned = fs::read_to_string(tuned).unwrap();
    fs::write(libvirt.directory.path().join("changed.xml"), set_option(&tuned, option).unwrap()).unwrap();
    let next = output_of(
        libvirt,
        &format!("virsh define --validate $directory/changed.xml && virsh dumpxml --inactive {name}"),
    );
    fs::write(libvirt.directory.path().join("tuned.xml"), &tuned).unwrap();
    libvirt.run_shell(&format!(
        "virsh define $directory/tuned.xml && diff /etc/libvirt/qemu/{name}.xml $directory/tuned.xml"
    ));
    next
}
