//! What a file of another program would set: a profile of tuned, a file of sysctl.d or of modprobe.d, a playbook of
//! Ansible.
//!
//! The changes go through the same plan as those of findings. Lines that Pagefold does not carry out are named with the
//! reason, never skipped silently.

pub mod ansible;
mod yaml;

use super::modprobe::{normal_name, parse_options};
use super::{Proposal, TuneState};
use pagefold_doctor::decide::change::SettingChange;
use std::collections::BTreeSet;
use std::fmt;

/// The format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImportFormat {
    /// `tuned.conf` of a profile: sections with options.
    Tuned,
    /// sysctl.d(5): `NAME = VALUE`.
    Sysctl,
    /// modprobe.d(5): `options MODULE NAME=VALUE`.
    Modprobe,
    /// A playbook or a list of tasks for Ansible.
    Ansible,
}

impl ImportFormat {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Tuned, Self::Sysctl, Self::Modprobe, Self::Ansible];
}

impl fmt::Display for ImportFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tuned => "a tuned profile",
            Self::Sysctl => "a sysctl.d file",
            Self::Modprobe => "a modprobe.d file",
            Self::Ansible => "an Ansible playbook",
        })
    }
}

/// A line that is not carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IgnoredLine {
    /// Its number, from 1.
    pub number: usize,
    /// The line.
    pub text: String,
    /// Why.
    pub why: String,
}

/// The content of a file as changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Imported {
    /// The changes, in the order of the file.
    pub changes: Vec<SettingChange>,
    /// Paths with a pattern, which stand for all devices or CPUs, with their value.
    pub patterns: Vec<(String, String)>,
    /// Lines that are not carried out.
    pub ignored: Vec<IgnoredLine>,
}

/// Settings of tuned's plugins that stand for one file or one of each device, by section and option
/// (tuned 2.24, `tuned/plugins`).
const TUNED_OPTIONS: &[(&str, &str, &str)] = &[
    ("cpu", "governor", "sys/devices/system/cpu/cpufreq/policy*/scaling_governor"),
    ("cpu", "energy_performance_preference", "sys/devices/system/cpu/cpufreq/policy*/energy_performance_preference"),
    ("vm", "transparent_hugepages", "sys/kernel/mm/transparent_hugepage/enabled"),
    ("vm", "transparent_hugepage", "sys/kernel/mm/transparent_hugepage/enabled"),
    ("vm", "transparent_hugepage.defrag", "sys/kernel/mm/transparent_hugepage/defrag"),
    ("disk", "elevator", "sys/block/*/queue/scheduler"),
    ("disk", "readahead", "sys/block/*/queue/read_ahead_kb"),
    ("scheduler", "sched_migration_cost_ns", "sys/kernel/debug/sched/migration_cost_ns"),
    ("scheduler", "sched_min_granularity_ns", "sys/kernel/debug/sched/min_granularity_ns"),
];

/// The format of a text: a section makes a profile of tuned, a line `options` a file of modprobe.d, and the start of a
/// document or a list of YAML a playbook.
pub fn identify_format(text: &str) -> ImportFormat {
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with(['#', ';']));
    match lines.next() {
        Some(line) if line == "---" || line.starts_with("- ") => ImportFormat::Ansible,
        Some(line) if line.starts_with('[') => ImportFormat::Tuned,
        Some(line)
            if ["options ", "install ", "blacklist ", "alias ", "softdep ", "remove "]
                .iter()
                .any(|word| line.starts_with(word)) =>
        {
            ImportFormat::Modprobe
        }
        _ => ImportFormat::Sysctl,
    }
}

/// The changes of a text.
pub fn parse(text: &str, format: ImportFormat) -> Imported {
    if format == ImportFormat::Ansible {
        return ansible::parse(text);
    }
    let mut imported = Imported::default();
    let mut section = String::new();
    for (index, line) in text.lines().enumerate() {
        let trimmed = line.trim();
        if trimmed.is_empty() || trimmed.starts_with(['#', ';']) {
            continue;
        }
        let parsed = match format {
            ImportFormat::Sysctl => parse_sysctl(trimmed, &mut imported),
            ImportFormat::Modprobe => parse_modprobe(trimmed, &mut imported),
            ImportFormat::Ansible => break,
            ImportFormat::Tuned => match trimmed.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
                Some(name) => {
                    name.trim().clone_into(&mut section);
                    Ok(())
                }
                None => parse_tuned(&section, trimmed, &mut imported),
            },
        };
        if let Err(why) = parsed {
            imported.ignored.push(IgnoredLine { number: index + 1, text: line.to_owned(), why });
        }
    }
    imported
}

/// The path of a sysctl (systemd sysctl.d(5)): the first separator decides, and the other one stands for itself.
fn sysctl_path(name: &str) -> String {
    let dots = name.find(['.', '/']).is_some_and(|at| name.as_bytes()[at] == b'.');
    let swap = |c| match c {
        '.' if dots => '/',
        '/' if dots => '.',
        c => c,
    };
    format!("proc/sys/{}", name.chars().map(swap).collect::<String>())
}

fn parse_sysctl(line: &str, imported: &mut Imported) -> Result<(), String> {
    let (name, value) = line.split_once('=').ok_or("it is not NAME = VALUE")?;
    let (name, value) = (name.trim().trim_start_matches('-'), value.trim());
    if name.contains('*') {
        return Err("a pattern of sysctls is not carried out: name each one".to_owned());
    }
    if value.is_empty() {
        return Err("it has no value".to_owned());
    }
    imported.changes.push(SettingChange::Write { path: sysctl_path(name), value: value.to_owned() });
    Ok(())
}

fn parse_modprobe(line: &str, imported: &mut Imported) -> Result<(), String> {
    let (module, options) = parse_options(line).ok_or("only `options MODULE NAME=VALUE` sets a value")?;
    for (parameter, value) in options {
        imported.changes.push(SettingChange::ModuleParameter {
            module: normal_name(module),
            parameter: parameter.to_owned(),
            value: value.to_owned(),
        });
    }
    Ok(())
}

fn parse_tuned(section: &str, line: &str, imported: &mut Imported) -> Result<(), String> {
    let (name, value) = line.split_once('=').ok_or("it is not NAME = VALUE")?;
    let (name, value) = (name.trim(), strip_tuned_value(value));
    if value.contains("${") {
        return Err("it uses a variable or a function of tuned".to_owned());
    }
    if value.is_empty() {
        return Err("it has no value".to_owned());
    }
    match section {
        "main" => match name {
            "include" => Err(format!("the included profile {value} is not read: import it, too")),
            _ => Ok(()),
        },
        "sysctl" => parse_sysctl(&format!("{name}={value}"), imported),
        "sysfs" => {
            let path = name.trim_start_matches('/').to_owned();
            if path.contains('*') {
                imported.patterns.push((path, value.to_owned()));
            } else {
                imported.changes.push(SettingChange::Write { path, value: value.to_owned() });
            }
            Ok(())
        }
        "modules" => parse_modprobe(&format!("options {name} {}", value.trim_start_matches("+r")), imported),
        "bootloader" if name.starts_with("cmdline") => {
            for parameter in value.trim_start_matches('+').split_ascii_whitespace() {
                let (remove, add) = match parameter.strip_prefix('-') {
                    Some(removed) => (Some(removed.to_owned()), None),
                    None => (None, Some(parameter.to_owned())),
                };
                imported.changes.push(SettingChange::BootParameter { remove, add });
            }
            Ok(())
        }
        _ => {
            let row = TUNED_OPTIONS.iter().find(|(in_section, option, _)| (*in_section, *option) == (section, name));
            let (.., path) = row.ok_or_else(|| format!("Pagefold does not carry out [{section}] {name}"))?;
            // tuned tries the alternatives in order; the first one is the one it wants.
            let value = value.split('|').next().unwrap_or_default().trim_start_matches('>').to_owned();
            if path.contains('*') {
                imported.patterns.push(((*path).to_owned(), value));
            } else {
                imported.changes.push(SettingChange::Write { path: (*path).to_owned(), value });
            }
            Ok(())
        }
    }
}

/// A value without quotes around it.
fn strip_tuned_value(value: &str) -> &str {
    let value = value.trim();
    value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(value)
}

impl Imported {
    /// The proposal for a host with these settings, where patterns stand for the settings that it has. The last value of
    /// a setting is proposed, as it is the one that the other program leaves.
    pub fn proposal(&self, name: &str, state: &TuneState) -> Proposal {
        let mut changes = self.changes.clone();
        for (pattern, value) in &self.patterns {
            let present = state
                .settings
                .iter()
                .filter(|(path, present)| present.is_ok() && super::profile::matches_pattern(pattern, path));
            changes.extend(present.map(|(path, _)| SettingChange::Write { path: path.clone(), value: value.clone() }));
        }
        let subject = |change: &SettingChange| match change {
            SettingChange::Write { path, .. } => Some(path.clone()),
            SettingChange::ModuleParameter { module, parameter, .. } => Some(format!("{module}.{parameter}")),
            SettingChange::BootParameter { .. } | SettingChange::VmDefinition { .. } => None,
        };
        let mut set_later = BTreeSet::new();
        changes.reverse();
        changes.retain(|change| subject(change).is_none_or(|subject| set_later.insert(subject)));
        changes.reverse();
        Proposal {
            rule: "import".to_owned(),
            title: name.to_owned(),
            why: "the imported file sets it".to_owned(),
            details: None,
            changes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn write(path: &str, value: &str) -> SettingChange {
        SettingChange::Write { path: path.to_owned(), value: value.to_owned() }
    }

    #[test]
    fn sysctl_file_is_read_with_both_separators() {
        let text = "# a comment\nvm.swappiness = 10\n-net/ipv4/conf/eth0.1/rp_filter=1\nbroken\n";
        assert_eq!(identify_format(text), ImportFormat::Sysctl);
        let imported = parse(text, ImportFormat::Sysctl);
        assert_eq!(
            imported.changes,
            [write("proc/sys/vm/swappiness", "10"), write("proc/sys/net/ipv4/conf/eth0.1/rp_filter", "1")]
        );
        assert_eq!((imported.ignored.len(), imported.ignored[0].number), (1, 4));
    }

    #[test]
    fn modprobe_file_sets_parameters() {
        let text = "options kvm-amd npt=1 nested=0\nblacklist pcspkr\n";
        assert_eq!(identify_format(text), ImportFormat::Modprobe);
        let imported = parse(text, ImportFormat::Modprobe);
        let parameter = |parameter: &str, value: &str| SettingChange::ModuleParameter {
            module: "kvm_amd".to_owned(),
            parameter: parameter.to_owned(),
            value: value.to_owned(),
        };
        assert_eq!(imported.changes, [parameter("npt", "1"), parameter("nested", "0")]);
        assert_eq!(imported.ignored[0].number, 2);
    }

    #[test]
    fn tuned_profile_names_what_it_cannot_carry_out() {
        let text = "[main]\nsummary=Test\ninclude=throughput-performance\n[cpu]\ngovernor=performance\n\
                    [sysctl]\nvm.dirty_background_ratio = 5\nkernel.x=${f:y}\n[sysfs]\n/sys/module/kvm/parameters/halt_poll_ns=0\n\
                    [bootloader]\ncmdline_a=+nohz=on -quiet\n[vm]\ntransparent_hugepages=madvise\n[script]\nscript=s.sh\n";
        assert_eq!(identify_format(text), ImportFormat::Tuned);
        let imported = parse(text, ImportFormat::Tuned);
        assert_eq!(
            imported.changes,
            [
                write("proc/sys/vm/dirty_background_ratio", "5"),
                write("sys/module/kvm/parameters/halt_poll_ns", "0"),
                SettingChange::BootParameter { remove: None, add: Some("nohz=on".to_owned()) },
                SettingChange::BootParameter { remove: Some("quiet".to_owned()), add: None },
                write("sys/kernel/mm/transparent_hugepage/enabled", "madvise"),
            ]
        );
        let governors =
            ("sys/devices/system/cpu/cpufreq/policy*/scaling_governor".to_owned(), "performance".to_owned());
        assert_eq!(imported.patterns, [governors]);
        let ignored: Vec<usize> = imported.ignored.iter().map(|line| line.number).collect();
        assert_eq!(ignored, [3, 8, 16]);
        let governor = "sys/devices/system/cpu/cpufreq/policy3/scaling_governor";
        let settings = [(governor.to_owned(), Ok("powersave".to_owned()))].into();
        let proposal = imported.proposal("test", &TuneState { settings, ..TuneState::default() });
        assert_eq!(proposal.changes.last(), Some(&write(governor, "performance")));
    }

    #[test]
    fn last_value_of_a_setting_is_proposed() {
        let imported = parse("vm.swappiness=10\nvm.stat_interval=5\nvm.swappiness=20\n", ImportFormat::Sysctl);
        let proposal = imported.proposal("test", &TuneState::default());
        let expected = [write("proc/sys/vm/stat_interval", "5"), write("proc/sys/vm/swappiness", "20")];
        assert_eq!(proposal.changes, expected);
    }

    proptest! {
        #[test]
        fn every_line_is_carried_out_or_named(text in "[\\[\\]a-z0-9.=/ #;*+\\-\"\n]{0,300}") {
            for format in ImportFormat::ALL {
                let imported = parse(&text, format);
                let lines = text.lines().count();
                prop_assert!(imported.ignored.iter().all(|line| (1..=lines).contains(&line.number)));
            }
        }
    }
}
