//! Files of tuned, sysctl.d, modprobe.d and Ansible, the plan of what they set, and the files that keep it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagefold_doctor::decide::change::SettingChange;
use pagefold_host::knob::Knob;
use pagefold_tune::decide::boot::{BootLoader, BootState};
use pagefold_tune::decide::export::{self, ExportFormat, Settings};
use pagefold_tune::decide::import::ansible::sysctl_value;
use pagefold_tune::decide::import::{self, ImportFormat, Imported};
use pagefold_tune::decide::modprobe::{ModuleOptions, normal_name, parse_options};
use pagefold_tune::decide::{Effect, ModuleState, TunePlan, TuneState, plan};
use std::collections::BTreeMap;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    for format in ImportFormat::ALL {
        let imported = import::parse(text, format);
        let lines: Vec<&str> = text.lines().collect();
        assert!(imported.ignored.iter().all(|line| lines[line.number - 1] == line.text));
        check_plan(&imported, text);
    }
    let _ = import::identify_format(text);
});

/// A host that has each setting that Pagefold writes, a loaded module of KVM, and the text as its file of modprobe.d.
fn host_state(imported: &Imported, text: &str) -> TuneState {
    let mut state = TuneState { module_file: Some(text.to_owned()), ..TuneState::default() };
    state.boot = BootState { loader: BootLoader::GrubFragments, command_line: "quiet".to_owned() };
    let mut parameters = BTreeMap::from([("npt".to_owned(), "1".to_owned())]);
    for change in &imported.changes {
        match change {
            SettingChange::Write { path, .. } => {
                let value = Knob::from_path(path).map(|_| "present".to_owned());
                state.settings.insert(path.clone(), value.ok_or_else(|| "not a setting".to_owned()));
            }
            SettingChange::ModuleParameter { parameter, .. } => {
                _ = parameters.insert(parameter.clone(), "1".to_owned())
            }
            SettingChange::BootParameter { .. } | SettingChange::VmDefinition { .. } => {}
        }
    }
    let module = ModuleState { is_loaded: true, is_built_in: false, references: Some(0), parameters };
    state.modules.insert("kvm_amd".to_owned(), module);
    state
}

/// A plan writes only known settings, its commands and files have nothing else of the text, and it is empty once its
/// steps are made.
fn check_plan(imported: &Imported, text: &str) {
    let mut state = host_state(imported, text);
    let planned = plan(&[imported.proposal("fuzzed", &state)], None, &state);
    let mut settings = Settings::default();
    for step in &planned.steps {
        match &step.effect {
            Effect::Write { path, to, .. } => {
                assert!(Knob::from_path(path).is_some() && !path.split('/').any(|name| name == ".."), "{path}");
                assert!(!to.contains('\n'), "{to:?}");
                state.settings.insert(path.clone(), Ok(to.clone()));
                settings.writes.insert(path.clone(), to.clone());
            }
            Effect::Module(change) => {
                // The line also has parameters that the file had before.
                let has_all = |options: &BTreeMap<String, String>| {
                    change.to.iter().all(|(name, value)| options.get(name) == Some(value))
                };
                assert!(options_of(&change.file_after, &change.module).iter().any(has_all), "{change:?}");
                state.modules.get_mut(&change.module).expect("a known module").parameters.extend(change.to.clone());
                state.module_file = Some(change.file_after.clone());
                settings.modules.insert(change.module.clone(), change.to.clone());
            }
            Effect::Boot { remove, add, .. } => {
                let mut parameters = remove.iter().chain(add);
                assert!(
                    parameters.all(|word| !word.contains([' ', '\'', '"', '$', '`', ';', '\\', '&', '|'])),
                    "{step:?}"
                );
            }
            Effect::Machine { .. } => panic!("a file changes no machine: {step:?}"),
        }
    }
    check_exports(&settings);
    let again: TunePlan = plan(&[imported.proposal("fuzzed", &state)], None, &state);
    assert!(again.steps.iter().all(|step| matches!(step.effect, Effect::Boot { .. })), "{again:?}");
}

/// The parameters of a module in each line of a file of modprobe.d.
fn options_of(file: &str, module: &str) -> Vec<BTreeMap<String, String>> {
    let options = file.lines().filter_map(parse_options).filter(|(named, _)| normal_name(named) == module);
    let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
    options.map(|(_, options)| options.into_iter().map(owned).collect()).collect()
}

/// What is exported is imported again as the same settings.
fn check_exports(settings: &Settings) {
    let read = |format, as_format| import::parse(&export::render(settings, format), as_format);
    let sysctls = read(ExportFormat::Sysctl, ImportFormat::Sysctl);
    let written = settings.writes.iter().filter(|(path, _)| path.starts_with("proc/sys/"));
    let expected: BTreeMap<String, String> = written.map(|(path, value)| (path.clone(), value.clone())).collect();
    assert_eq!(writes_of(&sysctls), expected);
    assert!(sysctls.ignored.is_empty(), "{sysctls:?}");
    let mut options = ModuleOptions::new();
    for change in read(ExportFormat::Modprobe, ImportFormat::Modprobe).changes {
        let SettingChange::ModuleParameter { module, parameter, value } = change else { panic!("{change:?}") };
        options.entry(module).or_default().insert(parameter, value);
    }
    for (module, parameters) in &settings.modules {
        assert!(parameters.iter().all(|(name, value)| options[module].get(name) == Some(value)), "{options:?}");
    }
    let mut plain = settings.writes.clone();
    plain.retain(|_, value| export::is_plain_for_tuned(value));
    assert_eq!(writes_of(&read(ExportFormat::Tuned, ImportFormat::Tuned)), plain);
    // Ansible evaluates templates in values, and takes words of truth values for numbers.
    let is_template = |value: &String| ["{{", "{%", "{#"].iter().any(|open| value.contains(open));
    if !settings.writes.values().any(is_template) {
        let tasks = read(ExportFormat::Ansible, ImportFormat::Ansible);
        let written = |(path, value): (&String, &String)| {
            let value = if path.starts_with("proc/sys/") { sysctl_value(value) } else { value.clone() };
            (path.clone(), value)
        };
        assert_eq!(writes_of(&tasks), settings.writes.iter().map(written).collect());
    }
}

fn writes_of(imported: &Imported) -> BTreeMap<String, String> {
    let write = |change: &SettingChange| match change {
        SettingChange::Write { path, value } => Some((path.clone(), value.clone())),
        _ => None,
    };
    imported.changes.iter().filter_map(write).collect()
}
