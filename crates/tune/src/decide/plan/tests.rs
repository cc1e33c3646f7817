use super::*;
use crate::decide::MachineState;
use crate::decide::boot::{BootLoader, BootState};
use pagefold_base::Pid;
use pagefold_doctor::decide::change::HostNode;

const POLL: &str = "sys/module/kvm/parameters/halt_poll_ns";
const VM: ProcessId = ProcessId { pid: Pid(7), start_time: 3 };

fn write(path: &str, value: &str) -> SettingChange {
    SettingChange::Write { path: path.to_owned(), value: value.to_owned() }
}

fn parameter(module: &str, name: &str, value: &str) -> SettingChange {
    SettingChange::ModuleParameter { module: module.to_owned(), parameter: name.to_owned(), value: value.to_owned() }
}

fn proposal(rule: &str, changes: Vec<SettingChange>) -> Proposal {
    Proposal { rule: rule.to_owned(), title: rule.to_owned(), why: String::new(), details: None, changes }
}

fn state() -> TuneState {
    let setting = |path: &str, value: &str| (path.to_owned(), Ok(value.to_owned()));
    let amd = ModuleState {
        is_loaded: true,
        is_built_in: false,
        references: Some(0),
        parameters: [("npt".to_owned(), "0".to_owned()), ("nested".to_owned(), "1".to_owned())].into(),
    };
    TuneState {
        settings: [
            setting(POLL, "0"),
            setting("sys/module/kvm/parameters/nx_huge_pages", "Y"),
            setting(KSM_RUN_PATH, "1"),
            setting("proc/sys/vm/zone_reclaim_mode", "0"),
            setting("proc/sys/kernel/printk", "4\t4\t1\t7"),
            setting("proc/sys/kernel/watchdog_cpumask", "0"),
            ("proc/sys/vm/x".to_owned(), Err("Pagefold does not write it".to_owned())),
        ]
        .into(),
        modules: [("kvm_amd".to_owned(), amd)].into(),
        machines: [(
            VM,
            MachineState {
                name: "web".to_owned(),
                libvirt_xml: None,
                arguments: ["qemu", "-cpu", "qemu64"].map(str::to_owned).to_vec(),
            },
        )]
        .into(),
        boot: BootState { loader: BootLoader::Grubby, command_line: "quiet".to_owned() },
        ..TuneState::default()
    }
}

fn plan_of(changes: Vec<SettingChange>, state: &TuneState) -> TunePlan {
    plan(&[proposal("rule", changes)], None, state)
}

#[test]
fn plan_of_a_host_that_is_right_is_empty() {
    let changes = vec![
        write(POLL, "0"),
        write("sys/module/kvm/parameters/nx_huge_pages", "1"),
        parameter("kvm_amd", "npt", "N"),
        SettingChange::BootParameter { remove: Some("nosmt".to_owned()), add: Some("quiet".to_owned()) },
        SettingChange::VmDefinition { vm: VM, option: VmOption::CpuFeature { name: "x".to_owned(), enable: true } },
    ];
    let mut state = state();
    if let Some(machine) = state.machines.get_mut(&VM) {
        machine.arguments[2] = "qemu64,x=on".to_owned();
    }
    assert_eq!(plan_of(changes, &state), TunePlan::default());
}

#[test]
fn steps_are_ordered_from_live_to_reboot() {
    let changes = vec![
        SettingChange::BootParameter { remove: None, add: Some("clocksource=tsc".to_owned()) },
        SettingChange::VmDefinition { vm: VM, option: VmOption::HostCpuModel },
        parameter("kvm-amd", "npt", "1"),
        write(POLL, "200000"),
    ];
    let plan = plan_of(changes, &state());
    assert_eq!(plan.refusals, []);
    let [poll, npt, machine, boot] = &plan.steps[..] else { panic!("{plan:#?}") };
    assert_eq!(poll.effect, Effect::Write { path: POLL.to_owned(), from: "0".to_owned(), to: "200000".to_owned() });
    let Effect::Module(change) = &npt.effect else { panic!("{npt:?}") };
    assert_eq!((change.from["npt"].as_str(), change.to["npt"].as_str(), change.reload), ("0", "1", true));
    assert!(change.file_after.ends_with("options kvm_amd npt=1\n"));
    assert!(matches!(&machine.effect, Effect::Machine { name, .. } if name == "web"));
    let Effect::Boot { commands, .. } = &boot.effect else { panic!("{boot:?}") };
    assert_eq!(commands.change, ["grubby --update-kernel=ALL --args=clocksource=tsc"]);
}

#[test]
fn module_in_use_is_refused_and_its_machines_are_named() {
    let mut state = state();
    state.kvm_users = vec!["web (process 7)".to_owned()];
    let plan = plan_of(vec![parameter("kvm_amd", "npt", "1")], &state);
    assert!(plan.steps.is_empty() && plan.refusals[0].why.contains("web (process 7)"), "{plan:?}");
    // It can be prepared for the next load.
    assert_eq!(plan.refusals[0].deferred, [parameter("kvm_amd", "npt", "1")]);
    state.kvm_users.clear();
    if let Some(module) = state.modules.get_mut("kvm_amd") {
        module.references = Some(2);
    }
    let plan = plan_of(vec![parameter("kvm_amd", "npt", "1")], &state);
    assert!(plan.steps.is_empty() && plan.refusals[0].why.contains("would be lost"), "{plan:?}");
    for (change, why) in [
        (parameter("kvm_amd", "no_such", "1"), "no parameter"),
        (parameter("kvm_intel", "ept", "1"), "was not read"),
        (write("proc/sys/vm/x", "1"), "does not write"),
        (write("proc/sys/vm/y", "1"), "was not read"),
        (write(KSM_RUN_PATH, "2"), "unmerge"),
        (write("proc/sys/vm/zone_reclaim_mode", "abc"), "number"),
        (write("proc/sys/kernel/printk", "4 x"), "number"),
        (write(POLL, "abc"), "number"),
    ] {
        let plan = plan_of(vec![change], &state);
        assert!(plan.steps.is_empty() && plan.refusals[0].why.contains(why), "{why}: {plan:?}");
        assert_eq!(plan.refusals[0].deferred, []);
    }
}

#[test]
fn module_that_is_not_loaded_gets_its_file_only() {
    let mut state = state();
    let absent = ModuleState { is_loaded: false, is_built_in: false, references: None, parameters: BTreeMap::new() };
    state.modules.insert("kvm_intel".to_owned(), absent);
    // Users of kvm_amd do not matter for it.
    state.kvm_users = vec!["web (process 7)".to_owned()];
    let plan = plan_of(vec![parameter("kvm_intel", "ept", "1")], &state);
    let [Step { effect: Effect::Module(change), .. }] = &plan.steps[..] else { panic!("{plan:?}") };
    assert!(!change.reload && change.from.is_empty());
    state.module_file = Some(change.file_after.clone());
    assert_eq!(plan_of(vec![parameter("kvm_intel", "ept", "1")], &state), TunePlan::default());
    if let Some(module) = state.modules.get_mut("kvm_intel") {
        module.is_built_in = true;
    }
    let refusal = &plan_of(vec![parameter("kvm_intel", "ept", "1")], &state).refusals[0];
    assert!(refusal.why.contains("kernel image"));
    let boot = SettingChange::BootParameter { remove: None, add: Some("kvm_intel.ept=1".to_owned()) };
    assert_eq!(refusal.deferred, [boot]);
    assert_eq!(plan_of(vec![parameter("kvm_intel", "ept", "$(reboot)")], &state).refusals[0].deferred, []);
}

#[test]
fn boot_parameter_of_an_unknown_boot_loader_is_left_to_other_programs() {
    let unknown = TuneState { boot: BootState { loader: BootLoader::Unknown, ..state().boot }, ..state() };
    let change = SettingChange::BootParameter { remove: None, add: Some("clocksource=tsc".to_owned()) };
    assert_eq!(plan_of(vec![change.clone()], &unknown).refusals[0].deferred, [change]);
    let unsafe_change = SettingChange::BootParameter { remove: None, add: Some("x=$(reboot)".to_owned()) };
    assert_eq!(plan_of(vec![unsafe_change], &unknown).refusals[0].deferred, []);
}

#[test]
fn lists_of_cpus_and_hexadecimal_numbers_are_numeric() {
    assert_eq!(plan_of(vec![write("proc/sys/kernel/watchdog_cpumask", "0-1,3")], &state()).refusals, []);
    assert_eq!(plan_of(vec![write("proc/sys/kernel/printk", "4 4 1 3")], &state()).refusals, []);
    assert_eq!(plan_of(vec![write("proc/sys/vm/zone_reclaim_mode", "0x1")], &state()).refusals, []);
}

#[test]
fn first_proposal_for_a_setting_wins_and_a_profile_replaces_its_value() {
    let proposals = [proposal("a", vec![write(POLL, "50000")]), proposal("b", vec![write(POLL, "60000")])];
    let value = |profile| {
        let plan = plan(&proposals, profile, &state());
        let [step @ Step { effect: Effect::Write { to, .. }, .. }] = &plan.steps[..] else { panic!("{plan:?}") };
        assert_eq!(step.rules(), "a");
        to.clone()
    };
    assert_eq!(value(None), "50000");
    assert_eq!(value(Some(Profile::Density)), "10000");
}

#[test]
fn ksm_is_stopped_only_if_memory_suffices_and_no_other_program_runs_it() {
    let stop = || vec![write(KSM_RUN_PATH, "0")];
    assert_eq!(plan_of(stop(), &state()).steps.len(), 1);
    let scarce = TuneState { ksm_stop_refusal: Some("memory does not suffice".to_owned()), ..state() };
    assert_eq!(plan_of(stop(), &scarce).refusals[0].why, "memory does not suffice");
    let tuned = TuneState { tuners: vec!["ksmtuned".to_owned()], ..state() };
    assert!(plan_of(stop(), &tuned).refusals[0].why.starts_with("ksmtuned"));
}

#[test]
fn options_of_one_machine_become_one_patch() {
    let option = |option| SettingChange::VmDefinition { vm: VM, option };
    let with_details = |number: usize, proposal: Proposal| {
        let details = pagefold_doctor::decide::audit::rule_summaries()[number].details;
        Proposal { details: Some(details), ..proposal }
    };
    let proposals = [
        with_details(0, proposal("cpu", vec![option(VmOption::HostCpuModel)])),
        with_details(
            1,
            proposal("eoi", vec![option(VmOption::CpuFeature { name: "kvm-pv-eoi".to_owned(), enable: true })]),
        ),
        proposal("disk", vec![option(VmOption::DiskCacheNone { disk: "d".to_owned() })]),
    ];
    let plan = plan(&proposals, None, &state());
    let [step @ Step { effect: Effect::Machine { patch, .. }, .. }] = &plan.steps[..] else { panic!("{plan:?}") };
    assert_eq!((&*step.rules(), &*step.title()), ("cpu, eoi", "cpu; eoi"));
    let details: Vec<_> = step.reasons.iter().map(|reason| reason.details.unwrap().risk).collect();
    assert_eq!(details, proposals.iter().take(2).map(|proposal| proposal.details.unwrap().risk).collect::<Vec<_>>());
    assert_ne!(details[0], details[1], "each rule keeps its own");
    assert!(patch.diff("web").contains("+host,kvm-pv-eoi=on"), "{}", patch.diff("web"));
    assert_eq!(plan.refusals.len(), 1);
}

/// The kernel takes `merge_across_nodes` only while no page is merged, so it comes before `run`.
#[test]
fn settings_are_shown_in_the_order_in_which_they_are_written() {
    let across_nodes = "sys/kernel/mm/ksm/merge_across_nodes";
    let mut state = state();
    state.settings.insert(KSM_RUN_PATH.to_owned(), Ok("0".to_owned()));
    state.settings.insert(across_nodes.to_owned(), Ok("1".to_owned()));
    let changes = vec![write(POLL, "200000"), write(KSM_RUN_PATH, "1"), write(across_nodes, "0")];
    let plan = plan_of(changes, &state);
    let paths: Vec<&str> = plan
        .steps
        .iter()
        .map(|step| match &step.effect {
            Effect::Write { path, .. } => path.as_str(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(paths, [across_nodes, KSM_RUN_PATH, POLL]);
}

#[test]
fn programs_that_change_the_same_are_named_for_each_kind_of_step() {
    let mut state = TuneState { tuners: ["tuned", "numad", "libvirtd"].map(str::to_owned).to_vec(), ..state() };
    if let Some(machine) = state.machines.get_mut(&VM) {
        machine.arguments = ["qemu", "-cpu", "qemu64", "-smp", "4", "-m", "2G"].map(str::to_owned).to_vec();
    }
    let conflicts = |change: SettingChange| -> Vec<&str> {
        let plan = plan_of(vec![change], &state);
        assert_eq!(plan.steps.len(), 1, "{plan:?}");
        plan.conflicts.iter().map(|conflict| conflict.program).collect()
    };
    assert_eq!(conflicts(parameter("kvm_amd", "npt", "1")), ["tuned"]);
    assert_eq!(conflicts(SettingChange::BootParameter { remove: None, add: Some("nosmt".to_owned()) }), ["tuned"]);
    assert_eq!(conflicts(SettingChange::VmDefinition { vm: VM, option: VmOption::HostCpuModel }), ["libvirt"]);
    let host_nodes = [0, 1].map(|id| HostNode { id, cpus: IdSet::default() }).to_vec();
    let split = SettingChange::VmDefinition { vm: VM, option: VmOption::VirtualNodes { host_nodes } };
    assert_eq!(conflicts(split), ["numad", "libvirt"]);
}
