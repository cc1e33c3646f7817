//! Reads the state that a plan depends on.

use crate::decide::boot::{
    BootEvidence, BootState, FirmwareReport, GRUB_FILE, GRUB_FRAGMENTS, KERNEL_COMMAND_LINE_FILE, identify_loader,
};
use crate::decide::conflict::known_names;
use crate::decide::modprobe::{MODULE_FILE, normal_name};
use crate::decide::profile::{Profile, setting_patterns};
use crate::decide::{KSM_RUN_PATH, MachineState, ModuleState, TuneState};
use pagefold_base::guard::{FrameNeed, MemoryVerdict, check_memory};
use pagefold_base::ksm::Ksm;
use pagefold_base::process::Process;
use pagefold_base::{Absent, Pages, ProcessId, Reading, tuner};
use pagefold_doctor::decide::change::{SettingChange, VmOption};
use pagefold_doctor::decide::{Finding, HostFacts, find_ksm_start_refusal};
use pagefold_host::action::domain_definition_path;
use pagefold_host::kernel_module::normal_parameter_value;
use pagefold_host::knob::Knob;
use pagefold_host::{Host, memory_headroom, observe};
use std::collections::{BTreeMap, BTreeSet};

/// Reads the state for these changes, and for the settings that match the patterns of a profile or of a file. `facts` are
/// those of the doctor about the same host.
pub fn read_state(host: &dyn Host, facts: &HostFacts, changes: &[&SettingChange], patterns: &[&str]) -> TuneState {
    let mut paths: BTreeSet<String> = patterns.iter().flat_map(|pattern| list_matching(host, pattern)).collect();
    let (mut modules, mut machines) = (BTreeSet::new(), BTreeSet::new());
    for change in changes {
        match change {
            SettingChange::Write { path, .. } => _ = paths.insert(path.clone()),
            SettingChange::ModuleParameter { module, .. } => _ = modules.insert(normal_name(module)),
            SettingChange::VmDefinition { vm, .. } => _ = machines.insert(*vm),
            SettingChange::BootParameter { .. } => {}
        }
    }
    let processes: Vec<Process> =
        observe::processes(host).unwrap_or_default().into_iter().filter_map(|(_, process)| process.ok()).collect();
    TuneState {
        settings: paths.into_iter().map(|path| (path.clone(), read_setting(host, &path))).collect(),
        kvm_users: if modules.is_empty() { Vec::new() } else { find_kvm_users(host, &processes) },
        modules: modules.into_iter().map(|module| (module.clone(), read_module(host, &module))).collect(),
        module_file: read_text(host, MODULE_FILE).ok(),
        tuners: find_tuners(processes.iter()),
        machines: read_machines(host, &processes, &machines),
        boot: BootState {
            loader: identify_loader(read_boot_evidence(host)),
            command_line: read_text(host, "proc/cmdline").unwrap_or_default().trim().to_owned(),
        },
        ksm_start_refusal: find_ksm_start_refusal(facts).map(|why| {
            format!(
                "{why}: see the finding ksm-domains of `pagefold doctor`, and unmerge all but one trust domain first"
            )
        }),
        ksm_stop_refusal: find_ksm_stop_refusal(host),
        merged_pages_refusal: find_merged_pages_refusal(host),
    }
}

/// The variable of the Boot Loader Interface of systemd, with its vendor UUID.
const LOADER_INFO: &str = "sys/firmware/efi/efivars/LoaderInfo-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f";

fn read_boot_evidence(host: &dyn Host) -> BootEvidence {
    let fragments = host.list(GRUB_FRAGMENTS).unwrap_or_default();
    let fragments = fragments.iter().filter(|name| name.ends_with(".cfg"));
    let grub_files = fragments.map(|name| format!("{GRUB_FRAGMENTS}/{name}")).chain([GRUB_FILE.to_owned()]);
    BootEvidence {
        os_release: read_text(host, "etc/os-release").unwrap_or_default(),
        has_proxmox_boot: host.read("etc/kernel/proxmox-boot-uuids").is_ok(),
        firmware: read_firmware_report(host),
        grub_files: grub_files.filter_map(|path| Some((path.clone(), read_text(host, &path).ok()?))).collect(),
        kernel_command_line: read_text(host, KERNEL_COMMAND_LINE_FILE).ok(),
    }
}

/// The variable is four bytes of attributes and a text in UTF-16 (Documentation/filesystems/efivarfs.rst).
fn read_firmware_report(host: &dyn Host) -> FirmwareReport {
    match host.read(LOADER_INFO) {
        Ok(bytes) => {
            let units =
                bytes.get(4..).unwrap_or_default().as_chunks::<2>().0.iter().map(|unit| u16::from_le_bytes(*unit));
            let text: String = char::decode_utf16(units).map(|c| c.unwrap_or(char::REPLACEMENT_CHARACTER)).collect();
            FirmwareReport::Loader(text.trim_end_matches('\0').to_owned())
        }
        // Without EFI there is no directory; efivarfs that is not mounted is an empty one.
        Err(Absent::NotOnThisKernel) => match (host.list("sys/firmware/efi"), host.list("sys/firmware/efi/efivars")) {
            (Err(Absent::NotOnThisKernel), _) => FirmwareReport::NoLoader,
            (_, Ok(variables)) if !variables.is_empty() => FirmwareReport::NoLoader,
            _ => FirmwareReport::Unreadable,
        },
        Err(_) => FirmwareReport::Unreadable,
    }
}

/// The modules whose parameters are changed.
const CHANGED_MODULES: [&str; 3] = ["kvm", "kvm_amd", "kvm_intel"];

/// Reads what any plan for this host may need, for a recording: the settings that findings and profiles change, the
/// modules of KVM, and the definitions of all machines.
pub fn read_possible_state(
    host: &dyn Host,
    facts: &HostFacts,
    findings: &[Finding],
    machines: &[ProcessId],
) -> TuneState {
    let module = |module: &str| SettingChange::ModuleParameter {
        module: module.to_owned(),
        parameter: String::new(),
        value: String::new(),
    };
    let definition = |&vm: &ProcessId| SettingChange::VmDefinition { vm, option: VmOption::HostCpuModel };
    let more: Vec<SettingChange> =
        CHANGED_MODULES.iter().copied().map(module).chain(machines.iter().map(definition)).collect();
    let changes: Vec<&SettingChange> = findings.iter().flat_map(|finding| &finding.changes).chain(&more).collect();
    let patterns: Vec<&str> = Profile::ALL.into_iter().flat_map(setting_patterns).collect();
    read_state(host, facts, &changes, &patterns)
}

pub(crate) fn read_text(host: &dyn Host, path: &str) -> Reading<String> {
    Ok(String::from_utf8_lossy(&host.read(path)?).into_owned())
}

fn read_setting(host: &dyn Host, path: &str) -> Result<String, String> {
    let knob = Knob::from_path(path).ok_or_else(|| {
        format!("Pagefold does not write /{path}: its list of settings is for memory, CPUs, KVM and disks")
    })?;
    knob.read(host).map_err(|why| match why {
        Absent::NotOnThisKernel => format!("there is no /{path}: {}", knob.requirement()),
        why => format!("cannot read /{path}: {why}"),
    })
}

/// The existing paths that match a pattern.
pub fn list_matching(host: &dyn Host, pattern: &str) -> Vec<String> {
    let mut found = vec![String::new()];
    for component in pattern.split('/') {
        let mut longer = Vec::new();
        for folder in found {
            let join = |name: &str| if folder.is_empty() { name.to_owned() } else { format!("{folder}/{name}") };
            match component.split_once('*') {
                None => longer.push(join(component)),
                Some((start, end)) => {
                    let names = host.list(&folder).unwrap_or_default();
                    let matching = names.iter().filter(|name| {
                        name.len() > start.len() + end.len() && name.starts_with(start) && name.ends_with(end)
                    });
                    longer.extend(matching.map(|name| join(name)));
                }
            }
        }
        found = longer;
    }
    found.retain(|path| host.read(path).is_ok());
    found
}

fn read_module(host: &dyn Host, module: &str) -> ModuleState {
    let folder = format!("sys/module/{module}/parameters");
    let names = host.list(&folder).unwrap_or_default();
    let read = |name: String| {
        let value = read_text(host, &format!("{folder}/{name}")).ok()?;
        Some((name, normal_parameter_value(&value)))
    };
    let references = read_text(host, &format!("sys/module/{module}/refcnt"));
    ModuleState {
        is_loaded: references.is_ok(),
        is_built_in: references.is_err() && host.list(&format!("sys/module/{module}")).is_ok(),
        references: references.ok().and_then(|text| text.trim().parse().ok()),
        parameters: names.into_iter().filter_map(read).collect(),
    }
}

/// The processes that have `/dev/kvm`, a virtual machine or a vCPU open.
fn find_kvm_users(host: &dyn Host, processes: &[Process]) -> Vec<String> {
    let mut users = Vec::new();
    for process in processes.iter().filter(|process| !process.kernel_thread) {
        let links = pagefold_host::hold(host, process.id).and_then(|handle| handle.links("fd")).unwrap_or_default();
        if links.iter().any(|link| link == "/dev/kvm" || link.starts_with("anon_inode:kvm-")) {
            users.push(format!("{} (process {})", machine_name(process), process.id.pid));
        }
    }
    users
}

/// The name of a machine, otherwise of its program.
pub(crate) fn machine_name(process: &Process) -> String {
    let name = process.identity.vm.as_ref().and_then(|vm| vm.name.clone());
    name.unwrap_or_else(|| process.comm.clone())
}

/// The running programs of root that the table of conflicts knows. Processes that cannot be read are left out.
pub fn running_tuners(host: &dyn Host) -> Vec<String> {
    let processes = observe::processes(host).unwrap_or_default();
    find_tuners(processes.iter().filter_map(|(_, process)| process.as_ref().ok()))
}

/// The programs of root that the table of conflicts knows.
fn find_tuners<'p>(processes: impl Iterator<Item = &'p Process> + Clone) -> Vec<String> {
    let runs = |name: &str| {
        processes.clone().any(|process| {
            let arguments = process.arguments.as_deref().unwrap_or_default();
            process.uid == Ok(0) && !process.kernel_thread && tuner::runs(name, &process.comm, arguments)
        })
    };
    known_names().filter(|name| runs(name)).map(str::to_owned).collect()
}

fn read_machines(
    host: &dyn Host,
    processes: &[Process],
    machines: &BTreeSet<ProcessId>,
) -> BTreeMap<ProcessId, MachineState> {
    let wanted = processes.iter().filter(|process| machines.contains(&process.id));
    // Which process runs a domain is what libvirt says, and not the name that a process gives itself.
    let domains = observe::libvirt_domains(host).unwrap_or_default();
    let read = |process: &Process| {
        let arguments = process.arguments.clone().ok()?;
        let domain = domains.iter().find(|domain| domain.pid == process.id.pid);
        let name = domain.map_or_else(|| machine_name(process), |domain| domain.name.clone());
        // libvirt refuses a slash in the name of a domain (`src/conf/domain_conf.c`, `virDomainDefPostParseCommon`).
        let domain = domain.filter(|domain| !domain.name.contains('/') && !domain.name.starts_with('.'));
        let definition = domain.and_then(|domain| read_text(host, &domain_definition_path(&domain.name)).ok());
        Some((process.id, MachineState { name, libvirt_xml: definition, arguments }))
    };
    wanted.filter_map(read).collect()
}

/// Why ksmd must not be stopped: merged pages that guests write to are copied, and no page is merged any more to pay for
/// it. So memory must suffice for copies of all of them. `tune undo` needs no such check: it writes 0 only where ksmd was
/// stopped before, and pages stay merged (mm/ksm.c, `run_store`).
fn find_ksm_stop_refusal(host: &dyn Host) -> Option<String> {
    match observe::ksm(host).and_then(|ksm| count_merged_pages(&ksm)) {
        Ok(0) => None,
        Ok(merged) => (!fits_copies(host, merged)).then(|| {
            format!(
                "{merged} merged pages would need memory of their own when guests write to them, and available memory \
                 does not suffice: shut machines down or migrate them first"
            )
        }),
        Err(why) => Some(format!(
            "how many pages are merged, and would need memory of their own when guests write to them, is not known \
             (pages_sharing and ksm_zero_pages in /sys/kernel/mm/ksm: {why})"
        )),
    }
}

/// The pages that need memory of their own once nothing is merged. Kernels before 6.6 do not count zero pages.
fn count_merged_pages(ksm: &Ksm) -> Reading<u64> {
    let zero_pages = match ksm.ksm_zero_pages.clone() {
        Err(Absent::NotOnThisKernel) => 0,
        pages => pages?,
    };
    Ok(ksm.pages_sharing.clone()?.saturating_add_signed(zero_pages))
}

/// Whether memory suffices for copies of so many merged pages.
fn fits_copies(host: &dyn Host, merged: u64) -> bool {
    let headroom = memory_headroom::measure_headroom(host, &BTreeSet::new());
    let need = FrameNeed::for_cgroup(None, Pages(merged), Pages::ZERO);
    check_memory(&need, &headroom, host.page_size()).verdict == MemoryVerdict::Fits
}

/// Why a setting that the kernel takes only while no page is merged cannot be written, and whether memory suffices to
/// unmerge all pages. Pagefold does not unmerge for it: `tune undo` would have to unmerge again, at a time when memory
/// may not suffice.
fn find_merged_pages_refusal(host: &dyn Host) -> Option<String> {
    let ksm = observe::ksm(host).ok()?;
    if ksm.pages_shared.clone().ok()? == 0 {
        return None;
    }
    let merged = count_merged_pages(&ksm).ok()?;
    let reason = format!("the kernel takes it only while no page is merged, and copies of {merged} merged pages");
    Some(if fits_copies(host, merged) {
        format!(
            "{reason} have room in available memory: `echo 2 > /{KSM_RUN_PATH}` unmerges them; then apply this again, \
             with the rule ksm-run"
        )
    } else {
        format!("{reason} need more than the available memory: shut machines down or migrate them first")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::boot::BootLoader;
    use pagefold_doctor::doctor_facts::{TrustPolicy, gather_host_facts};
    use pagefold_host::fake_host::FakeHost;
    use pagefold_host::faulty_host::{FaultyHost, InjectedFault};

    #[test]
    fn state_has_values_modules_and_boot() {
        let host = FakeHost::booted();
        for cpu in 0..3 {
            host.put_file(&format!("sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor"), "powersave\n");
        }
        host.put_file("sys/devices/system/cpu/online", "0-2\n");
        host.put_file("sys/module/kvm_amd/parameters/npt", "Y\n");
        host.put_file("sys/module/kvm_amd/refcnt", "0\n");
        host.put_file("sys/module/kvm_intel/parameters/ept", "Y\n");
        host.put_file("proc/cmdline", "quiet\n");
        host.put_file("etc/os-release", "ID=debian\n");
        let parameter = |module: &str| SettingChange::ModuleParameter {
            module: module.to_owned(),
            parameter: "npt".to_owned(),
            value: "1".to_owned(),
        };
        let write = SettingChange::Write { path: "proc/sys/kernel/core_pattern".to_owned(), value: "x".to_owned() };
        let changes = [parameter("kvm-amd"), parameter("kvm_intel"), write];
        let changes: Vec<&SettingChange> = changes.iter().collect();
        let governors = "sys/devices/system/cpu/cpu*/cpufreq/scaling_governor";
        let facts = gather_host_facts(&host, &[], &TrustPolicy::default());
        let state = read_state(&host, &facts, &changes, &[governors, "sys/block/*/queue/scheduler"]);
        assert_eq!(state.settings.len(), 4);
        assert_eq!(state.settings.values().filter(|value| *value == &Ok("powersave".to_owned())).count(), 3);
        assert!(
            state.settings["proc/sys/kernel/core_pattern"].as_ref().is_err_and(|why| why.contains("does not write"))
        );
        let amd = &state.modules["kvm_amd"];
        assert!(amd.is_loaded && !amd.is_built_in && amd.references == Some(0) && amd.parameters["npt"] == "1");
        assert!(!state.modules["kvm_intel"].is_loaded && state.modules["kvm_intel"].is_built_in);
        assert_eq!(state.boot.command_line, "quiet");
        assert_eq!(state.boot.loader, BootLoader::Unknown, "there is no file of GRUB");
    }

    #[test]
    fn ksm_is_stopped_only_if_memory_for_copies_is_known_to_suffice() {
        let host = FakeHost::booted();
        let refusal = |host: &dyn Host| {
            let facts = gather_host_facts(host, &[], &TrustPolicy::default());
            read_state(host, &facts, &[], &[]).ksm_stop_refusal
        };
        host.put_setting("pages_sharing", "0");
        assert_eq!(refusal(&host), None);
        host.put_setting("pages_sharing", "1000");
        host.set_free_kib(1 << 20);
        assert_eq!(refusal(&host), None);
        host.set_free_kib(2000);
        let scarce = refusal(&host).unwrap();
        assert!(scarce.starts_with("1000 merged pages would need memory"), "{scarce}");
        for path in ["sys/kernel/mm/ksm/pages_sharing", "sys/kernel/mm/ksm/ksm_zero_pages"] {
            let denied = |read: &str| (read == path).then_some(InjectedFault::Absent(Absent::Denied));
            let unknown = refusal(&FaultyHost::new(&host, denied)).unwrap();
            assert!(unknown.contains("is not known") && unknown.contains("permission denied"), "{unknown}");
        }
    }

    #[test]
    fn boot_loader_is_read_from_its_files_and_from_the_firmware() {
        let host = FakeHost::booted();
        host.put_file("etc/os-release", "ID=debian\n");
        host.put_file("etc/kernel/proxmox-boot-uuids", "ABCD-1234\n");
        host.put_file("etc/kernel/cmdline", "quiet\n");
        host.put_file(GRUB_FILE, "GRUB_TIMEOUT=5\n");
        host.put_file("etc/default/grub.d/a.cfg", "X=1\n");
        host.put_file("etc/default/grub.d/a.cfg.before-nosmt", "X=2\n");
        let loader = |host: &FakeHost| {
            let facts = gather_host_facts(host, &[], &TrustPolicy::default());
            read_state(host, &facts, &[], &[]).boot.loader
        };
        let BootLoader::Grub { files, refresh } = loader(&host) else { panic!("{:?}", loader(&host)) };
        assert_eq!(files.keys().collect::<Vec<_>>(), [GRUB_FILE, "etc/default/grub.d/a.cfg"]);
        assert_eq!(refresh, "proxmox-boot-tool refresh");
        host.put_file("sys/firmware/efi/fw_platform_size", "64\n");
        assert_eq!(loader(&host), BootLoader::Unknown, "the variables cannot be read");
        host.put_file("sys/firmware/efi/efivars/BootOrder-8be4df61-93ca-11d2-aa0d-00e098032b8c", "");
        assert!(matches!(loader(&host), BootLoader::Grub { .. }), "GRUB before 2.12 has no LoaderInfo");
        let variable: String = "systemd-boot 252\0".chars().flat_map(|c| [c, '\0']).collect();
        host.put_file(LOADER_INFO, &format!("\u{6}\0\0\0{variable}"));
        assert_eq!(loader(&host), BootLoader::ProxmoxSystemdBoot { file: "quiet\n".to_owned() });
    }
}
