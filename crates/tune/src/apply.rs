//! Makes the steps of a plan that need no restart of a machine or of the host.
//!
//! Each class of resources has its session, so each change is in a journal before it is made. A step that fails is
//! undone alone and named; the others stay. In the end the sessions keep their changes until `pagefold tune undo`. A
//! kill before that leaves the journals to `pagefold recover`.

use crate::counters::{changed_settings, sample_counters};
use crate::decide::counters::bind_counters;
use crate::decide::modprobe::{MODULE_FILE, set_parameters};
use crate::decide::vm::{Patch, xml};
use crate::decide::{Effect, ModuleChange, Step, TunePlan};
use crate::facts;
use pagefold_host::Host;
use pagefold_host::action::{Action, ActionError, Exchange};
use pagefold_host::config_file::{ConfigContent, ConfigFile};
use pagefold_host::kernel_module::{KernelModule, ModuleParameters};
use pagefold_host::knob::Knob;
use pagefold_host::resource::ResourceClass;
use pagefold_host::transaction::Session;
use pagefold_host::transaction::session::kept::TUNE_PURPOSE;
use pagefold_host::transaction::session::{ChangeLifetime, Error, FailedUndo};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The result of applying a plan.
#[derive(Debug, Default)]
pub struct Applied {
    /// The positions of the steps that were made.
    pub done: Vec<usize>,
    /// The positions of the steps that failed, with the reason.
    pub failed: Vec<(usize, String)>,
    /// Changes of an earlier, killed run that were undone first.
    pub recovered: Vec<Action>,
    /// Changes that could not be undone.
    pub failed_undos: Vec<FailedUndo>,
}

/// The steps that [`apply`] makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApplyScope {
    /// Settings of the running kernel.
    Live,
    /// Also parameters of modules.
    Host,
    /// Also definitions of libvirt's machines, for their next start.
    HostAndDefinitions,
}

impl ApplyScope {
    /// Whether a step is made; all others are for the operator.
    pub fn contains(self, step: &Step) -> bool {
        match &step.effect {
            Effect::Write { .. } => true,
            Effect::Module(_) => self != Self::Live,
            Effect::Machine { patch: Patch::Libvirt { .. }, .. } => self == Self::HostAndDefinitions,
            Effect::Boot { .. } | Effect::Machine { patch: Patch::Arguments { .. }, .. } => false,
        }
    }
}

/// Makes the steps of a plan that are in the scope, in the order of the plan.
///
/// # Errors
/// If a lock or a journal cannot be used. All changes are then undone.
pub fn apply(host: &dyn Host, state_directory: &Path, plan: &TunePlan, scope: ApplyScope) -> Result<Applied, Error> {
    let steps: Vec<(usize, &Step)> = plan.steps.iter().enumerate().filter(|(_, step)| scope.contains(step)).collect();
    let classes: BTreeSet<ResourceClass> = steps.iter().flat_map(|(_, step)| classes_of(step)).collect();
    let mut applied = Applied::default();
    let mut sessions = BTreeMap::new();
    for class in ResourceClass::ALL.into_iter().filter(|class| classes.contains(class)) {
        let (session, recovered, failed_undos) = Session::begin(host, state_directory, class)?;
        applied.recovered.extend(recovered);
        applied.failed_undos.extend(failed_undos);
        sessions.insert(class, session);
    }
    let settings: Vec<String> = steps.iter().flat_map(|(_, step)| settings_of(step)).collect();
    let samples = sample_counters(host, &settings);
    for (position, step) in steps {
        let result = match &step.effect {
            Effect::Write { path, to, .. } => write_setting(&mut sessions, path, to),
            Effect::Module(change) => change_module(&mut sessions, change),
            Effect::Machine { name, patch, .. } => define_machine(&mut sessions, name, patch),
            Effect::Boot { .. } => Ok(()),
        };
        match result {
            Ok(()) => applied.done.push(position),
            Err(Error::Refused(why)) => applied.failed.push((position, why.to_string())),
            Err(error @ (Error::SettingUnreadable { .. } | Error::HostStateUnreadable(_))) => {
                applied.failed.push((position, error.to_string()));
            }
            // A journal that cannot be written: nothing more may be changed.
            Err(error) => return Err(abort(sessions, error)),
        }
    }
    // Files first: if this process is killed between two classes, `recover` undoes the later ones, and a file without
    // its reload does no harm.
    for session in sessions.values_mut().rev() {
        session.note_counters(|undo| {
            let counters = bind_counters(changed_settings(undo).iter().map(String::as_str));
            counters.iter().filter_map(|counter| samples.get(&counter.id()).cloned()).collect()
        });
        applied.failed_undos.extend(session.keep_changes(TUNE_PURPOSE)?);
    }
    Ok(applied)
}

type Sessions<'a> = BTreeMap<ResourceClass, Session<'a>>;

fn abort(mut sessions: Sessions<'_>, error: Error) -> Error {
    sessions.values_mut().rev().fold(error, |error, session| session.abort(error))
}

/// The paths of the settings that a step changes.
fn settings_of(step: &Step) -> Vec<String> {
    match &step.effect {
        Effect::Write { path, .. } => vec![path.clone()],
        Effect::Module(change) if change.reload => {
            change.to.keys().map(|name| format!("sys/module/{}/parameters/{name}", change.module)).collect()
        }
        Effect::Module(_) | Effect::Machine { .. } | Effect::Boot { .. } => Vec::new(),
    }
}

/// The classes of a step's actions.
fn classes_of(step: &Step) -> Vec<ResourceClass> {
    match &step.effect {
        Effect::Write { path, .. } => Knob::from_path(path).map(|knob| knob.class()).into_iter().collect(),
        Effect::Module(_) => vec![ResourceClass::Settings, ResourceClass::Configuration],
        Effect::Machine { .. } => vec![ResourceClass::Configuration],
        Effect::Boot { .. } => Vec::new(),
    }
}

fn run(sessions: &mut Sessions<'_>, action: &Action) -> Result<(), Error> {
    match sessions.get_mut(&action.class()) {
        Some(session) => session.apply(action, ChangeLifetime::Temporary).map(drop),
        None => Err(ActionError::Failed("its class of resources is not locked".to_owned()).into()),
    }
}

/// Writes a setting, and checks that the kernel took the value. Where the kernel rounds it, the rounded value is written
/// again, so that the journal knows it as Pagefold's own.
fn write_setting(sessions: &mut Sessions<'_>, path: &str, value: &str) -> Result<(), Error> {
    let knob =
        Knob::from_path(path).ok_or_else(|| ActionError::Unsupported(format!("Pagefold does not write /{path}")))?;
    let Some(host) = sessions.get(&knob.class()).map(Session::host) else { return Ok(()) };
    let before = knob.read(host).map_err(ActionError::from)?;
    run(sessions, &Action::Write { knob: knob.clone(), value: value.to_owned() })?;
    let after = knob.read(host).map_err(ActionError::from)?;
    if after == value {
        return Ok(());
    }
    if after == before {
        if let Some(session) = sessions.get_mut(&knob.class()) {
            session.forget_write_without_effect(&knob)?;
        }
        return Err(ActionError::Failed(format!("the kernel accepted {value} for {knob}, but kept {before}")).into());
    }
    run(sessions, &Action::Write { knob, value: after })
}

/// Loads a module with new parameters, and then stores them in the file, so that a refused reload leaves no file. They are
/// added to what the file holds now: an earlier step may have failed.
fn change_module(sessions: &mut Sessions<'_>, change: &ModuleChange) -> Result<(), Error> {
    let reload = change.reload.then(|| reload_action(change)).transpose()?;
    if let Some(reload) = &reload {
        run(sessions, reload)?;
    }
    let host = sessions.get(&ResourceClass::Configuration).map(Session::host);
    let present = host.and_then(|host| facts::read_text(host, MODULE_FILE).ok());
    let text = set_parameters(present.as_deref(), &change.module, &change.to);
    let content = Exchange { from: ConfigContent(present), to: ConfigContent(Some(text)) };
    let file = ConfigFile::from_path(MODULE_FILE).map_err(|error| ActionError::Unsupported(error.to_string()))?;
    let stored = run(sessions, &Action::ReplaceFile { file, content });
    if let (Err(_), Some(Action::ReloadModule { module, parameters })) = (&stored, reload) {
        run(sessions, &Action::ReloadModule { module, parameters: parameters.inverse() })?;
    }
    stored
}

/// Lets libvirt define a machine anew, for its next start.
fn define_machine(sessions: &mut Sessions<'_>, name: &str, patch: &Patch) -> Result<(), Error> {
    let Patch::Libvirt { before, after } = patch else { return Ok(()) };
    let uuid = xml::domain_uuid(before)
        .ok_or_else(|| ActionError::Unsupported(format!("the definition of {name} has no UUID")))?;
    let definition = Exchange { from: before.clone(), to: after.clone() };
    run(sessions, &Action::DefineDomain { uuid, name: name.to_owned(), definition })
}

fn reload_action(change: &ModuleChange) -> Result<Action, ActionError> {
    let module = KernelModule::from_name(&change.module)
        .ok_or_else(|| ActionError::Unsupported(format!("Pagefold does not load {} again", change.module)))?;
    let parameters = Exchange { from: ModuleParameters(change.from.clone()), to: ModuleParameters(change.to.clone()) };
    Ok(Action::ReloadModule { module, parameters })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::{Proposal, plan, profile::Profile};
    use crate::facts::read_state;
    use crate::kept::{self, KeptState};
    use pagefold_base::ksm::Setting;
    use pagefold_base::{Absent, Pid, ProcessId};
    use pagefold_doctor::decide::change::SettingChange;
    use pagefold_doctor::doctor_facts::{TrustPolicy, gather_host_facts};
    use pagefold_host::fake_host::FakeHost;
    use pagefold_host::faulty_host::{FaultyHost, InjectedFault};

    const POLL: &str = "sys/module/kvm/parameters/halt_poll_ns";
    const NPT: &str = "sys/module/kvm_amd/parameters/npt";
    const SWAPPINESS: &str = "proc/sys/vm/swappiness";

    fn host() -> FakeHost {
        let host = FakeHost::booted();
        host.put_file(POLL, "0");
        host.put_file(SWAPPINESS, "60");
        host.put_file(NPT, "0");
        host.put_file("sys/module/kvm_amd/refcnt", "0");
        host
    }

    fn read(host: &dyn Host) -> [String; 4] {
        [POLL, SWAPPINESS, NPT, MODULE_FILE].map(|path| String::from_utf8(host.read(path).unwrap_or_default()).unwrap())
    }

    fn make_plan(host: &dyn Host) -> TunePlan {
        let write = |path: &str, value: &str| SettingChange::Write { path: path.to_owned(), value: value.to_owned() };
        let npt = SettingChange::ModuleParameter {
            module: "kvm_amd".to_owned(),
            parameter: "npt".to_owned(),
            value: "1".to_owned(),
        };
        let changes = vec![npt, write(POLL, "200000"), write(SWAPPINESS, "10")];
        let facts = gather_host_facts(host, &[], &TrustPolicy::default());
        let state = read_state(host, &facts, &changes.iter().collect::<Vec<_>>(), &[]);
        let proposal =
            Proposal { rule: "rule".to_owned(), title: String::new(), why: String::new(), details: None, changes };
        plan(&[proposal], None::<Profile>, &state)
    }

    #[test]
    fn machine_is_defined_on_request_and_undone() {
        const FILE: &str = "etc/libvirt/qemu/web.xml";
        const UUID: &str = "c7a5fdbd-cdaf-9455-926a-d65c16db1809";
        let before = format!("<domain type='kvm'>\n  <name>web</name>\n  <uuid>{UUID}</uuid>\n</domain>\n");
        let (host, directory) = (host(), tempfile::tempdir().unwrap());
        host.put_file(FILE, &before);
        let after = before.replace("</uuid>", "</uuid>\n  <title value=\"kept\"/>");
        let effect = Effect::Machine {
            process: ProcessId { pid: Pid(7), start_time: 1 },
            name: "web".to_owned(),
            patch: Patch::Libvirt { before: before.clone(), after: after.clone() },
        };
        let step = Step { reasons: Vec::new(), effect };
        let plan = TunePlan { steps: vec![step], ..TunePlan::default() };
        let read = || String::from_utf8(host.read(FILE).unwrap()).unwrap();
        assert_eq!(apply(&host, directory.path(), &plan, ApplyScope::Host).unwrap().done, Vec::<usize>::new());
        assert_eq!(read(), before);
        assert_eq!(apply(&host, directory.path(), &plan, ApplyScope::HostAndDefinitions).unwrap().done, [0]);
        let stored = after.replace('"', "'");
        assert_eq!(read(), stored, "in libvirt's own form");
        host.put_file(FILE, "<other/>");
        let refused = apply(&host, directory.path(), &plan, ApplyScope::HostAndDefinitions).unwrap();
        assert_eq!((refused.done.len(), refused.failed.len()), (0, 1), "another program's definition stays");
        host.put_file(FILE, &stored);
        assert!(kept::undo(&host, directory.path()).failed.is_empty());
        assert_eq!(read(), before);
    }

    #[test]
    fn file_holds_no_parameters_of_a_module_that_was_not_loaded_again() {
        let (fake, directory) = (host(), tempfile::tempdir().unwrap());
        fake.put_file("sys/module/kvm_intel/parameters/ept", "N");
        fake.put_file("sys/module/kvm_intel/refcnt", "0");
        let change = |module: &str, parameter: &str| SettingChange::ModuleParameter {
            module: module.to_owned(),
            parameter: parameter.to_owned(),
            value: "1".to_owned(),
        };
        let changes = vec![change("kvm_amd", "npt"), change("kvm_intel", "ept")];
        let facts = gather_host_facts(&fake, &[], &TrustPolicy::default());
        let state = read_state(&fake, &facts, &changes.iter().collect::<Vec<_>>(), &[]);
        let proposal =
            Proposal { rule: "rule".to_owned(), title: String::new(), why: String::new(), details: None, changes };
        let plan = plan(&[proposal], None::<Profile>, &state);
        assert_eq!(plan.steps.len(), 2, "{plan:?}");
        let reloads = std::sync::atomic::AtomicUsize::new(0);
        let refuse_first = |path: &str| {
            let is_reload = path.ends_with("#reload");
            (is_reload && reloads.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0)
                .then_some(InjectedFault::Absent(Absent::Denied))
        };
        let faulty = FaultyHost::new(&fake, refuse_first);
        let applied = apply(&faulty, directory.path(), &plan, ApplyScope::Host).unwrap();
        assert_eq!((applied.done, applied.failed.len()), (vec![1], 1));
        let file = String::from_utf8(fake.read(MODULE_FILE).unwrap()).unwrap();
        assert!(file.contains("kvm_intel ept=1") && !file.contains("kvm_amd"), "{file}");
    }

    #[test]
    fn applied_plan_is_in_force_until_it_is_undone() {
        let (host, directory) = (host(), tempfile::tempdir().unwrap());
        let before = read(&host);
        let plan = make_plan(&host);
        assert_eq!((plan.steps.len(), plan.refusals.len()), (3, 0));
        let applied = apply(&host, directory.path(), &plan, ApplyScope::Host).unwrap();
        assert_eq!((applied.done.len(), applied.failed.len()), (3, 0));
        let after = read(&host);
        assert_eq!(after[..3], ["200000", "10", "1"].map(str::to_owned));
        assert!(after[3].ends_with("options kvm_amd npt=1\n"));
        assert_eq!(make_plan(&host), TunePlan::default(), "a tuned host needs nothing");

        let kept = kept::load(&host, directory.path()).unwrap();
        assert!(kept.len() == 4 && kept.iter().all(|kept| kept.state == KeptState::InForce), "{kept:?}");
        host.put_file(SWAPPINESS, "33");
        let kept = kept::load(&host, directory.path()).unwrap();
        let drifted: Vec<_> = kept.iter().filter(|kept| kept.state != KeptState::InForce).collect();
        assert!(drifted.len() == 1 && drifted[0].state == KeptState::ChangedByOthers, "{drifted:?}");

        let undone = kept::undo(&host, directory.path());
        assert!(undone.failed.len() == 1 && undone.failed[0].why.contains("another program"), "{:?}", undone.failed);
        assert_eq!(read(&host), [&before[0], "33", &before[2], &before[3]].map(|text: &str| text.to_owned()));
        assert_eq!(kept::load(&host, directory.path()).unwrap(), []);
    }

    #[test]
    fn step_that_fails_is_named_and_the_others_stay() {
        let (fake, directory) = (host(), tempfile::tempdir().unwrap());
        let plan = make_plan(&fake);
        for (fault, changed) in [
            ("#write halt_poll_ns", ["0", "10", "1"]),
            ("sys/module/kvm_amd#reload", ["200000", "10", "0"]),
            ("etc/modprobe.d/zz-pagefold.conf#replace", ["200000", "10", "0"]),
        ] {
            let before = read(&fake);
            let faulty =
                FaultyHost::new(&fake, |path| (path == fault).then_some(InjectedFault::Absent(Absent::Denied)));
            let applied = apply(&faulty, directory.path(), &plan, ApplyScope::Host).unwrap();
            assert_eq!((applied.done.len(), applied.failed.len()), (2, 1), "{fault}");
            assert_eq!(read(&fake)[..3], changed.map(str::to_owned), "{fault}");
            assert_eq!(read(&fake)[3].is_empty(), fault != "#write halt_poll_ns", "{fault}");
            assert_eq!(kept::undo(&fake, directory.path()).failed, [], "{fault}");
            assert_eq!(read(&fake), before, "{fault}");
        }
    }

    #[test]
    fn only_live_settings_are_made_on_request() {
        let (host, directory) = (host(), tempfile::tempdir().unwrap());
        apply(&host, directory.path(), &make_plan(&host), ApplyScope::Live).unwrap();
        assert_eq!(read(&host), ["200000", "10", "0", ""].map(str::to_owned));
    }

    #[test]
    fn counters_before_the_changes_are_kept_with_them() {
        let (host, directory) = (host(), tempfile::tempdir().unwrap());
        host.put_file("proc/uptime", "100.00 9.00\n");
        host.put_file("proc/vmstat", "pswpin 50\npswpout 200\n");
        host.put_file("sys/kernel/debug/kvm/exits", "0\n");
        let put_polls = |polls: &str| host.put_file("sys/kernel/debug/kvm/halt_attempted_poll", polls);
        put_polls("0\n");
        apply(&host, directory.path(), &make_plan(&host), ApplyScope::Host).unwrap();
        // A second change of a setting has the counters from before the first one.
        host.put_file("proc/vmstat", "pswpin 50\npswpout 260\n");
        host.put_file("proc/uptime", "110.00 9.00\n");
        let effect = Effect::Write { path: SWAPPINESS.to_owned(), from: "10".to_owned(), to: "20".to_owned() };
        let again = TunePlan { steps: vec![Step { reasons: Vec::new(), effect }], ..TunePlan::default() };
        assert_eq!(apply(&host, directory.path(), &again, ApplyScope::Live).unwrap().done, [0]);

        host.put_file("proc/uptime", "120.00 9.00\n");
        put_polls("40\n");
        let kept = kept::load(&host, directory.path()).unwrap();
        let found = kept::observe_effects(&host, &kept, std::time::Duration::ZERO);
        let mut shown: Vec<_> =
            found.iter().map(|found| (found.name, found.value_before, found.rate_before, found.rate_since)).collect();
        shown.sort_by_key(|found| found.0);
        assert_eq!(
            shown,
            [
                ("exits", Some(0), None, Some(0.0)),
                ("halt_attempted_poll", Some(0), None, Some(2.0)),
                ("pswpin", Some(50), Some(0.5), Some(0.0)),
                ("pswpout", Some(200), Some(2.0), Some(3.0)),
            ]
        );
        assert!(kept.iter().all(|kept| kept.reason_without_counter().is_none()));
    }

    #[test]
    fn counters_of_running_machines_are_sampled_for_a_second_before_the_changes() {
        const POLLS: &str = "sys/kernel/debug/kvm/halt_attempted_poll";
        let (fake, directory) = (host(), tempfile::tempdir().unwrap());
        fake.put_file("proc/uptime", "100.00 9.00\n");
        fake.put_file(POLLS, "5\n");
        let reads = std::sync::atomic::AtomicUsize::new(0);
        // What the second reading finds.
        let grow = |path: &str| {
            if path == POLLS && reads.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 1 {
                fake.put_file(POLLS, "35\n");
                fake.put_file("proc/uptime", "102.00 9.00\n");
            }
            None
        };
        let faulty = FaultyHost::new(&fake, grow);
        apply(&faulty, directory.path(), &make_plan(&fake), ApplyScope::Live).unwrap();
        let kept = kept::load(&fake, directory.path()).unwrap();
        let found = kept::observe_effects(&fake, &kept, std::time::Duration::ZERO);
        let polls = found.iter().find(|found| found.name == "halt_attempted_poll").unwrap();
        assert_eq!((polls.value_before, polls.rate_before), (Some(35), Some(15.0)));
    }

    /// As if the kernel kept the old value without an error.
    #[test]
    fn value_that_the_kernel_does_not_take_is_a_failure() {
        let (fake, directory) = (host(), tempfile::tempdir().unwrap());
        let plan = make_plan(&fake);
        let faulty =
            FaultyHost::new(&fake, |path| (path == "#write swappiness").then_some(InjectedFault::Replaced(Vec::new())));
        let applied = apply(&faulty, directory.path(), &plan, ApplyScope::Live).unwrap();
        assert!(matches!(&applied.failed[..], [(_, why)] if why.contains("kept 60")), "{:?}", applied.failed);
        let kept = kept::load(&fake, directory.path()).unwrap();
        assert_eq!(kept.iter().map(|kept| &*kept.name).collect::<Vec<_>>(), [format!("/{POLL}")], "no false drift");
    }

    /// As while the daemon runs, which has the lock of KSM's settings.
    #[test]
    fn undo_goes_on_where_another_process_works_on_a_class() {
        const RUN: &str = "sys/kernel/mm/ksm/run";
        for tunes_ksm in [false, true] {
            let (host, directory) = (host(), tempfile::tempdir().unwrap());
            let before = read(&host);
            let mut plan = make_plan(&host);
            if tunes_ksm {
                let effect = Effect::Write { path: RUN.to_owned(), from: "0".to_owned(), to: "1".to_owned() };
                plan.steps.push(Step { reasons: Vec::new(), effect });
            }
            let applied = apply(&host, directory.path(), &plan, ApplyScope::Host).unwrap();
            assert_eq!((applied.done.len(), applied.failed), (plan.steps.len(), Vec::new()));
            let (mut daemon, ..) = Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap();
            let pace = Action::Write { knob: Setting::SleepMillisecs.into(), value: "7".to_owned() };
            daemon.apply(&pace, ChangeLifetime::Temporary).unwrap();
            let undone = kept::undo(&host, directory.path());
            assert_eq!(undone.failed, []);
            let busy: Vec<bool> = undone
                .errors
                .iter()
                .map(|error| matches!(error, Error::Busy { class: ResourceClass::Ksm, .. }))
                .collect();
            assert_eq!(busy, if tunes_ksm { vec![true] } else { Vec::new() }, "{:?}", undone.errors);
            assert_eq!(read(&host), before);
            assert_eq!(host.setting_value("run"), if tunes_ksm { "1" } else { "0" });
            drop(daemon);
            let rest = kept::undo(&host, directory.path());
            assert_eq!((rest.done.len(), rest.errors.len()), (usize::from(tunes_ksm), 0));
            assert_eq!(host.setting_value("run"), "0");
        }
    }

    #[test]
    fn undo_continues_a_killed_undo() {
        let (host, directory) = (host(), tempfile::tempdir().unwrap());
        let before = read(&host);
        apply(&host, directory.path(), &make_plan(&host), ApplyScope::Live).unwrap();
        // An undo moves the kept changes to the journal first.
        let file = |name: &str| directory.path().join(name);
        let class = ResourceClass::Settings;
        std::fs::rename(file(class.kept_changes_file()), file(class.journal_file())).unwrap();
        assert_eq!(kept::load(&host, directory.path()).unwrap(), []);
        assert_eq!(kept::undo(&host, directory.path()).done.len(), 2);
        assert_eq!(read(&host), before);
    }
}
