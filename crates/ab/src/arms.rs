//! Makes the settings of an arm, through the transaction.
//!
//! Every setting that one of the arms names has an explicit value under both; a value "as found" is the one that the
//! host had when the campaign was defined. The sessions restore what they found when they end, and `pagefold recover`
//! does after a kill.

use crate::decide::design::Arm;
use crate::experiment::{ArmDefinition, Experiment, RepetitionLevel};
use crate::record::CampaignStart;
use pagefold_base::Absent;
use pagefold_host::Host;
use pagefold_host::action::{Action, ActionError, Exchange};
use pagefold_host::kernel_module::{KernelModule, ModuleParameters};
use pagefold_host::knob::Knob;
use pagefold_host::resource::ResourceClass;
use pagefold_host::transaction::Session;
use pagefold_host::transaction::session::{ChangeLifetime, Error, FailedUndo};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use thiserror::Error as ThisError;

/// Why an arm's settings could not be made.
#[derive(Debug, ThisError)]
pub enum ArmError {
    /// No such setting.
    #[error(
        "{0:?} is no setting that pagefold changes; give its path, or a name such as vm.swappiness, transparent_hugepage, ksm.pages_to_scan, kvm.halt_poll_ns"
    )]
    UnknownSetting(String),
    /// No such module.
    #[error("pagefold does not load module {0:?} again")]
    UnknownModule(String),
    /// A setting that resets another one.
    #[error(
        "a change of {knob} makes the kernel reset /{other}, which would not be kept or not be restored; give commands that set and restore both: --before-a, --after-a, --before-b, --after-b"
    )]
    Coupled {
        /// The setting.
        knob: Knob,
        /// The path of the setting that is reset.
        other: String,
    },
    /// A present value cannot be read.
    #[error("cannot read {what}")]
    Unreadable {
        /// The setting.
        what: String,
        /// The reason.
        source: Absent,
    },
    /// The kernel did not take a value.
    #[error("the kernel has {found:?} in {knob} after {wanted:?} was written")]
    NotTaken {
        /// The setting.
        knob: Knob,
        /// What was written.
        wanted: String,
        /// What is in force.
        found: String,
    },
    /// The transaction.
    #[error(transparent)]
    Transaction(#[from] Error),
    /// A command of the arm did not start.
    #[error("cannot start the command {command:?}")]
    CommandNotStarted {
        /// The command.
        command: String,
        /// The reason.
        source: std::io::Error,
    },
    /// A command of the arm failed.
    #[error("the command {command:?} ended with {status}")]
    CommandFailed {
        /// The command.
        command: String,
        /// How it ended.
        status: ExitStatus,
    },
}

/// The setting of a name: a path, a name of sysctl, or a short name.
///
/// # Errors
/// If the table of settings has none, or this host does not have it.
pub fn find_setting(host: &dyn Host, name: &str) -> Result<Knob, ArmError> {
    let dotted = name.replace('.', "/");
    let mut candidates = vec![name.trim_start_matches('/').to_owned(), format!("proc/sys/{dotted}")];
    match name {
        "transparent_hugepage" | "thp" => candidates.push("sys/kernel/mm/transparent_hugepage/enabled".to_owned()),
        _ => {}
    }
    if let Some((subject, parameter)) = name.split_once('.') {
        candidates.push(format!("sys/kernel/mm/{subject}/{parameter}"));
        candidates.push(format!("sys/module/{subject}/parameters/{parameter}"));
    }
    let knobs = candidates.iter().filter_map(|path| Knob::from_path(path));
    knobs.into_iter().find(|knob| knob.read(host).is_ok()).ok_or_else(|| ArmError::UnknownSetting(name.to_owned()))
}

/// Settings of which the kernel sets one to 0 when the other is written (mm/page-writeback.c, `dirty_ratio_handler` and its
/// neighbors; mm/util.c, `overcommit_ratio_handler` and `overcommit_kbytes_handler`). `dirty_bytes` and
/// `dirty_background_bytes` refuse a written 0.
const COUPLED_SETTINGS: [[&str; 2]; 3] = [
    ["proc/sys/vm/dirty_bytes", "proc/sys/vm/dirty_ratio"],
    ["proc/sys/vm/dirty_background_bytes", "proc/sys/vm/dirty_background_ratio"],
    ["proc/sys/vm/overcommit_kbytes", "proc/sys/vm/overcommit_ratio"],
];

/// The path of the setting that the kernel resets when this one is written.
fn coupled_setting(knob: &Knob) -> Option<String> {
    if let Some((reset, _)) = knob.resets() {
        return Some(reset.path().to_owned());
    }
    COUPLED_SETTINGS.iter().find_map(|&[first, second]| match knob.path() {
        path if path == first => Some(second.to_owned()),
        path if path == second => Some(first.to_owned()),
        _ => None,
    })
}

/// The values of the settings under both arms, with the present value where an arm names none.
///
/// # Errors
/// An unknown setting, one that cannot be read, or a change of one that resets another.
pub fn resolve_settings(host: &dyn Host, experiment: &Experiment) -> Result<BTreeMap<String, [String; 2]>, ArmError> {
    let mut resolved: BTreeMap<String, [String; 2]> = BTreeMap::new();
    for (position, arm) in [&experiment.a, &experiment.b].into_iter().enumerate() {
        for (name, value) in &arm.settings {
            let knob = find_setting(host, name)?;
            let values = match resolved.entry(knob.path().to_owned()) {
                std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
                std::collections::btree_map::Entry::Vacant(entry) => {
                    let found =
                        knob.read(host).map_err(|source| ArmError::Unreadable { what: knob.to_string(), source })?;
                    let found = knob.restorable_value(found);
                    entry.insert([found.clone(), found])
                }
            };
            values[position].clone_from(value);
            if let Some(other) = coupled_setting(&knob)
                && knob.read(host).is_ok_and(|found| found != *value)
            {
                return Err(ArmError::Coupled { knob, other });
            }
        }
    }
    Ok(resolved)
}

/// The values of the parameters of modules under both arms.
pub type ModuleValues = BTreeMap<String, BTreeMap<String, [String; 2]>>;

/// The values of the parameters of modules under both arms, likewise.
///
/// # Errors
/// An unknown module, or a parameter that cannot be read.
pub fn resolve_modules(host: &dyn Host, experiment: &Experiment) -> Result<ModuleValues, ArmError> {
    let mut resolved: ModuleValues = BTreeMap::new();
    for (position, arm) in [&experiment.a, &experiment.b].into_iter().enumerate() {
        for (name, parameters) in &arm.modules {
            let module = KernelModule::from_name(name).ok_or_else(|| ArmError::UnknownModule(name.clone()))?;
            let present = ModuleParameters(parameters.clone())
                .read_current(host, module)
                .map_err(|source| ArmError::Unreadable { what: format!("the parameters of {module}"), source })?;
            let values = resolved.entry(module.name().to_owned()).or_default();
            for (parameter, value) in parameters {
                let found = present.0.get(parameter).cloned().unwrap_or_default();
                values.entry(parameter.clone()).or_insert([found.clone(), found])[position].clone_from(value);
            }
        }
    }
    Ok(resolved)
}

/// What happened to the changes of a host, by this run and by earlier ones.
#[derive(Debug, Default)]
pub struct SettingsOutcome {
    /// Changes of an earlier run that were undone first.
    pub recovered: Vec<Action>,
    /// Changes of an earlier run that could not be undone.
    pub failed_recoveries: Vec<FailedUndo>,
    /// Changes of this run that could not be undone.
    pub failed_undos: Vec<FailedUndo>,
    /// The arm whose command `after` failed at the end, with the reason. A resumption runs the command again.
    pub failed_after: Option<(char, ArmError)>,
}

/// Switches a host between the arms of a campaign, and restores it when dropped.
pub struct ArmSwitch<'a> {
    sessions: BTreeMap<ResourceClass, Session<'a>>,
    host: &'a dyn Host,
    campaign: &'a CampaignStart,
    current: Option<Arm>,
}

impl<'a> ArmSwitch<'a> {
    /// Takes the locks of the settings that the arms change. Changes that an earlier run had left are undone first and noted
    /// in `outcome`, also if a later step fails.
    ///
    /// # Errors
    /// If a lock or a journal cannot be used.
    pub fn begin(
        host: &'a dyn Host,
        state_directory: &Path,
        campaign: &'a CampaignStart,
        outcome: &mut SettingsOutcome,
    ) -> Result<Self, ArmError> {
        let mut classes: BTreeSet<ResourceClass> =
            campaign.settings.keys().filter_map(|path| Knob::from_path(path)).map(|knob| knob.class()).collect();
        if !campaign.modules.is_empty() {
            classes.insert(ResourceClass::Settings);
        }
        let mut sessions = BTreeMap::new();
        for class in classes {
            let (session, undone, failed) = Session::begin(host, state_directory, class)?;
            outcome.recovered.extend(undone);
            outcome.failed_recoveries.extend(failed);
            sessions.insert(class, session);
        }
        Ok(Self { sessions, host, campaign, current: None })
    }

    /// The arm whose settings are in force.
    #[must_use]
    pub fn current(&self) -> Option<Arm> {
        self.current
    }

    /// The definition of an arm.
    #[must_use]
    pub fn definition(&self, arm: Arm) -> &'a ArmDefinition {
        match arm {
            Arm::A => &self.campaign.experiment.a,
            Arm::B => &self.campaign.experiment.b,
        }
    }

    /// Runs the command `after` of the present arm.
    ///
    /// # Errors
    /// If it fails.
    pub fn leave(&mut self) -> Result<(), ArmError> {
        match self.current.take().and_then(|arm| self.definition(arm).after.as_deref()) {
            Some(after) => run_shell(after),
            None => Ok(()),
        }
    }

    /// Makes the settings of an arm, checks that the kernel took them, and runs its command `before`.
    ///
    /// # Errors
    /// If a setting is refused or not taken, or the command fails.
    pub fn enter(&mut self, arm: Arm) -> Result<(), ArmError> {
        self.write_settings(arm)?;
        self.load_modules(arm, false)?;
        if let Some(before) = &self.definition(arm).before {
            run_shell(before)?;
        }
        self.current = Some(arm);
        Ok(())
    }

    /// Does what the level of repetition asks for before each run.
    ///
    /// # Errors
    /// If a module cannot be loaded again, or the command fails.
    pub fn restart(&mut self, arm: Arm) -> Result<(), ArmError> {
        let experiment = &self.campaign.experiment;
        if experiment.level == RepetitionLevel::ModuleReload {
            self.load_modules(arm, true)?;
        }
        experiment.restart.as_deref().map_or(Ok(()), run_shell)
    }

    fn write_settings(&mut self, arm: Arm) -> Result<(), ArmError> {
        let mut writes: Vec<(Knob, &String)> = self
            .campaign
            .settings
            .iter()
            .filter_map(|(path, values)| Some((Knob::from_path(path)?, &values[arm as usize])))
            .collect();
        // The order in which the kernel accepts them.
        writes.sort();
        for (knob, value) in writes {
            let Some(session) = self.sessions.get_mut(&knob.class()) else { continue };
            let read = |knob: &Knob| {
                let what = knob.to_string();
                knob.read(self.host).map_err(|source| ArmError::Unreadable { what, source })
            };
            if read(&knob)? == *value {
                continue;
            }
            session.apply(&Action::Write { knob: knob.clone(), value: value.clone() }, ChangeLifetime::Temporary)?;
            let found = read(&knob)?;
            if found != *value {
                return Err(ArmError::NotTaken { knob, wanted: value.clone(), found });
            }
        }
        Ok(())
    }

    fn load_modules(&mut self, arm: Arm, always: bool) -> Result<(), ArmError> {
        for (name, parameters) in &self.campaign.modules {
            let module = KernelModule::from_name(name).ok_or_else(|| ArmError::UnknownModule(name.clone()))?;
            let wanted: BTreeMap<String, String> =
                parameters.iter().map(|(name, values)| (name.clone(), values[arm as usize].clone())).collect();
            let wanted = ModuleParameters(wanted);
            let from = wanted
                .read_current(self.host, module)
                .map_err(|source| ArmError::Unreadable { what: format!("the parameters of {module}"), source })?;
            if from == wanted && !always {
                continue;
            }
            let action = Action::ReloadModule { module, parameters: Exchange { from, to: wanted } };
            match self.sessions.get_mut(&ResourceClass::Settings) {
                Some(session) => session.apply(&action, ChangeLifetime::Temporary).map(drop)?,
                None => {
                    return Err(Error::Refused(ActionError::Failed("the settings are not locked".to_owned())).into());
                }
            }
        }
        Ok(())
    }

    /// Restores what was found, for all classes of resources even if one fails. Returns what could not be undone.
    ///
    /// # Errors
    /// If a journal cannot be written; the first of such errors.
    pub fn restore(mut self) -> (Vec<FailedUndo>, Result<(), ArmError>) {
        let (mut failed_undos, mut result) = (Vec::new(), Ok(()));
        for session in self.sessions.values_mut().rev() {
            let error = match session.undo_all() {
                Ok(failed) => {
                    failed_undos.extend(failed);
                    continue;
                }
                Err(Error::UndoFailed { failed_undos: failed, source }) => {
                    failed_undos.extend(failed);
                    *source
                }
                Err(error) => error,
            };
            result = result.and(Err(error.into()));
        }
        (failed_undos, result)
    }
}

/// Runs a command of the shell, with its output on standard error.
///
/// # Errors
/// If it does not start or does not succeed.
pub fn run_shell(command: &str) -> Result<(), ArmError> {
    let status = Command::new("sh")
        .args(["-c", command])
        .stdin(Stdio::null())
        .stdout(std::io::stderr())
        .status()
        .map_err(|source| ArmError::CommandNotStarted { command: command.to_owned(), source })?;
    if status.success() { Ok(()) } else { Err(ArmError::CommandFailed { command: command.to_owned(), status }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_host::fake_host::FakeHost;
    use pagefold_host::faulty_host::{FaultyHost, InjectedFault};

    const SWAPPINESS: &str = "proc/sys/vm/swappiness";

    fn campaign(host: &dyn Host, experiment: Experiment) -> CampaignStart {
        let settings = resolve_settings(host, &experiment).unwrap();
        let modules = resolve_modules(host, &experiment).unwrap();
        CampaignStart {
            version: 1,
            pagefold: String::new(),
            experiment,
            settings,
            modules,
            looks: Vec::new(),
            schedule: Vec::new(),
        }
    }

    fn experiment(settings: &[(&str, &str)]) -> Experiment {
        let settings = settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Experiment { b: ArmDefinition { settings, ..ArmDefinition::default() }, ..Experiment::default() }
    }

    #[test]
    fn arms_are_switched_and_the_found_value_is_restored() {
        let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
        host.put_file(SWAPPINESS, "60");
        let campaign = campaign(&host, experiment(&[("vm.swappiness", "10")]));
        assert_eq!(campaign.settings[SWAPPINESS], ["60", "10"]);
        let value = || String::from_utf8(host.read(SWAPPINESS).unwrap()).unwrap();
        let mut outcome = SettingsOutcome::default();
        let mut switch = ArmSwitch::begin(&host, directory.path(), &campaign, &mut outcome).unwrap();
        for (arm, expected) in [(Arm::B, "10"), (Arm::A, "60"), (Arm::B, "10")] {
            switch.enter(arm).unwrap();
            assert_eq!(value(), expected);
        }
        let (failed_undos, restored) = switch.restore();
        restored.unwrap();
        assert_eq!(failed_undos, []);
        assert_eq!(value(), "60");
    }

    /// The journal of the class that is restored first cannot be written, and a setting of it cannot be restored.
    #[test]
    fn all_classes_are_restored_even_if_one_fails() {
        let (fake, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
        fake.put_file(SWAPPINESS, "60");
        let before = fake.setting_value("pages_to_scan");
        let writes = std::sync::atomic::AtomicUsize::new(0);
        let host = FaultyHost::new(&fake, |path: &str| {
            let is_undo = path == "#write swappiness" && writes.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 1;
            is_undo.then_some(InjectedFault::Absent(Absent::Denied))
        });
        let campaign = campaign(&host, experiment(&[("vm.swappiness", "10"), ("ksm.pages_to_scan", "777")]));
        let mut outcome = SettingsOutcome::default();
        let mut switch = ArmSwitch::begin(&host, directory.path(), &campaign, &mut outcome).unwrap();
        switch.enter(Arm::B).unwrap();
        assert_eq!(fake.setting_value("pages_to_scan"), "777");
        let blocking_directory = directory.path().join(format!("{}.new", ResourceClass::Settings.journal_file()));
        std::fs::create_dir(&blocking_directory).unwrap();
        let (failed_undos, restored) = switch.restore();
        assert!(matches!(restored, Err(ArmError::Transaction(Error::Journal(_)))), "{restored:?}");
        let failed: Vec<String> = failed_undos.iter().map(ToString::to_string).collect();
        assert!(failed.len() == 1 && failed[0].starts_with("/proc/sys/vm/swappiness was 60: "), "{failed:?}");
        assert_eq!(fake.setting_value("pages_to_scan"), before);
    }

    #[test]
    fn change_that_resets_another_setting_is_refused() {
        let host = FakeHost::booted();
        host.put_file(SWAPPINESS, "60");
        for (name, other) in [
            ("vm.dirty_bytes", "dirty_ratio"),
            ("vm.dirty_ratio", "dirty_bytes"),
            ("vm.dirty_background_bytes", "dirty_background_ratio"),
            ("vm.dirty_background_ratio", "dirty_background_bytes"),
            ("vm.overcommit_kbytes", "overcommit_ratio"),
            ("vm.overcommit_ratio", "overcommit_kbytes"),
        ] {
            host.put_file(&format!("proc/sys/{}", name.replace('.', "/")), "20");
            let error = resolve_settings(&host, &experiment(&[(name, "10")])).unwrap_err().to_string();
            assert!(error.contains(&format!("/proc/sys/vm/{other},")) && error.contains("--before-a"), "{error}");
        }
        let advisor = |mode| resolve_settings(&host, &experiment(&[("ksm.advisor_mode", mode)]));
        assert!(advisor("scan-time").unwrap_err().to_string().contains("pages_to_scan"));
        // A value that is not changed is not written.
        assert_eq!(advisor("none").unwrap().len(), 1);
        host.put_file("proc/sys/vm/dirty_expire_centisecs", "3000");
        host.put_file("proc/sys/vm/overcommit_memory", "0");
        let others = experiment(&[("vm.dirty_expire_centisecs", "100"), ("vm.overcommit_memory", "1")]);
        assert_eq!(resolve_settings(&host, &others).unwrap().len(), 2);
    }

    #[test]
    fn settings_have_short_names() {
        let host = FakeHost::booted();
        host.put_file(SWAPPINESS, "60");
        host.put_file("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never");
        host.put_file("sys/module/kvm/parameters/halt_poll_ns", "0");
        for (name, path) in [
            ("vm.swappiness", SWAPPINESS),
            ("/proc/sys/vm/swappiness", SWAPPINESS),
            ("transparent_hugepage", "sys/kernel/mm/transparent_hugepage/enabled"),
            ("kvm.halt_poll_ns", "sys/module/kvm/parameters/halt_poll_ns"),
        ] {
            assert_eq!(find_setting(&host, name).unwrap().path(), path);
        }
        assert!(find_setting(&host, "kernel.core_pattern").is_err());
    }
}
