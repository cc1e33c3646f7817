//! The agent within the guest of a domain, which runs QEMU's real agent, is asked through libvirt, and only on request,
//! because libvirt marks the domain then.

use super::{LibvirtSession, wait_until};
use pagefold_labs::machine::{EmulatedMachine, MACHINE_KERNEL_OPTIONS, find_agent_assets};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Boots a domain with the agent, whose second CPU the guest turns off.
fn start_domain(libvirt: &mut LibvirtSession, name: &str, kernel: &Path, agent: &Path) {
    let directory = libvirt.directory.path().to_owned();
    let machine = EmulatedMachine {
        kernel,
        init: &Path::new(env!("CARGO_MANIFEST_DIR")).join("../../labs/guest/init-agent"),
        programs: &[(agent, "bin/qemu-ga")],
        files: &[],
        options: &[],
        kernel_arguments: "",
    };
    let folder = tempfile::tempdir().unwrap();
    let initramfs = machine.build_initramfs(folder.path()).unwrap();
    fs::copy(initramfs, directory.join("boot/agent.cpio")).unwrap();
    fs::copy(kernel, directory.join("boot/agent-kernel")).unwrap();
    let boot = directory.join("boot");
    let xml = format!(
        "<domain type='qemu'>
  <name>{name}</name>
  <memory unit='MiB'>256</memory>
  <vcpu>2</vcpu>
  <os>
    <type arch='x86_64' machine='pc'>hvm</type>
    <kernel>{boot}/agent-kernel</kernel>
    <initrd>{boot}/agent.cpio</initrd>
    <cmdline>{MACHINE_KERNEL_OPTIONS}</cmdline>
  </os>
  <features><acpi/></features>
  <memoryBacking><nosharepages/></memoryBacking>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
    <memballoon model='none'/>
  </devices>
</domain>
",
        boot = boot.display()
    );
    fs::write(directory.join(format!("{name}.xml")), xml).unwrap();
    libvirt.run_shell(&format!("virsh create $directory/{name}.xml"));
}

/// Verdict and value of each finding about the guest of the domain.
fn findings(libvirt: &mut LibvirtSession, command: &str) -> BTreeMap<String, (String, String)> {
    let pagefold = env!("CARGO_BIN_EXE_pagefold");
    let output = libvirt.run_shell(&format!("{pagefold} {command} --json || true; echo"));
    let (json, _) = output.rsplit_once("END 0").unwrap();
    let report: Value = serde_json::from_str(json).unwrap_or_else(|why| panic!("{why}: {output}"));
    let text = |finding: &Value, key: &str| finding[key].as_str().unwrap().to_owned();
    let list = report.get("guests").unwrap_or_else(|| &report["findings"]).as_array().unwrap().iter();
    list.filter(|finding| text(finding, "rule").starts_with("guest-"))
        .map(|finding| (text(finding, "rule"), (text(finding, "verdict"), text(finding, "value"))))
        .collect()
}

/// The first finding of each rule that is not unknown, of several attempts. A session is short: on a loaded host, and while
/// the guest boots, an emulated agent answers only some of the questions in time.
fn wait_for_findings(
    mut ask: impl FnMut() -> BTreeMap<String, (String, String)>,
) -> BTreeMap<String, (String, String)> {
    let mut answered = BTreeMap::new();
    wait_until("the answers of the guest", || {
        let found = ask();
        assert_eq!(found.len(), 5, "{found:?}");
        for (rule, finding) in found.into_iter().filter(|(_, (verdict, _))| verdict != "unknown") {
            answered.entry(rule).or_insert(finding);
        }
        answered.len() == 5
    });
    answered
}

/// Whether libvirt has marked the domain.
fn is_tainted(libvirt: &LibvirtSession, name: &str) -> bool {
    let log = libvirt.directory.path().join(format!("var/log/libvirt/qemu/{name}.log"));
    fs::read_to_string(log).unwrap().contains("tainted: custom-ga-command")
}

/// Asks the agent by `doctor`, `tune verify` and from a recording.
pub fn check_guest_agent(libvirt: &mut LibvirtSession) {
    let (kernel, agent) = match find_agent_assets() {
        Ok(assets) => assets,
        Err(why) => return println!("skipped: {why}"),
    };
    let name = format!("agent{}", std::process::id());
    start_domain(libvirt, &name, &kernel, &agent);
    let pid = format!("--pid $(cat /run/libvirt/qemu/{name}.pid)");

    let unasked = findings(libvirt, &format!("doctor --guest-agent --topic guest {pid}"));
    for (verdict, value) in unasked.values() {
        assert!(verdict == "unknown" && value.contains("not asked: the program that started QEMU"), "{unasked:?}");
    }
    assert!(!is_tainted(libvirt, &name));

    let found = wait_for_findings(|| findings(libvirt, &format!("doctor --libvirt-agent --topic guest {pid}")));
    let expected = |rule: &str, verdict: &str, value: &str| {
        assert_eq!(found[rule], (verdict.to_owned(), value.to_owned()), "{rule}");
    };
    expected("guest-cpus-online", "fail", "1 online and 1 offline in the guest, 2 of the machine");
    expected("guest-timer-frequency", "ok", "250 Hz, periodic");
    assert!(is_tainted(libvirt, &name));
    let state = "--state $directory/agent-state";
    let verified = wait_for_findings(|| findings(libvirt, &format!("tune verify --libvirt-agent {state} {pid}")));
    assert_eq!(verified, found);
    let recorded = wait_for_findings(|| {
        libvirt.run_shell(&format!(
            "rm -rf $directory/agent-recording; {} record --libvirt-agent --pass-interval 0 {pid} \
             $directory/agent-recording",
            env!("CARGO_BIN_EXE_pagefold")
        ));
        findings(libvirt, "--host recording:$directory/agent-recording doctor --guest-agent --topic guest")
    });
    assert_eq!(recorded, found);

    // A paused guest does not answer, and libvirt says so at once.
    libvirt.run_shell(&format!("virsh suspend {name}"));
    let paused = findings(libvirt, &format!("doctor --libvirt-agent --topic guest {pid}"));
    for rule in ["guest-cpus-online", "guest-timer-frequency"] {
        let (verdict, value) = &paused[rule];
        assert!(verdict == "unknown" && value.contains("libvirt refuses: "), "{paused:?}");
    }
    libvirt.run_shell(&format!("virsh destroy {name}"));
}
