//! Settings as files of other programs, so that they last beyond a reboot or reach other hosts.

use super::modprobe::ModuleOptions;
use std::collections::BTreeMap;
use std::fmt::Write;

/// The format of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportFormat {
    /// A profile of tuned (`/etc/tuned/profiles/pagefold/tuned.conf`).
    Tuned,
    /// sysctl.d(5), for settings below `/proc/sys`.
    Sysctl,
    /// modprobe.d(5), for parameters of modules.
    Modprobe,
    /// Tasks of an Ansible playbook.
    Ansible,
}

/// What is exported.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Values of settings, by their path below the root.
    pub writes: BTreeMap<String, String>,
    /// Parameters of modules.
    pub modules: ModuleOptions,
    /// Parameters that are removed from the kernel's command line, and those that are added.
    pub boot: (Vec<String>, Vec<String>),
    /// Changes that no format expresses, each with the reason.
    pub omitted: Vec<(String, String)>,
}

/// The beginning of the message about a parameter of the kernel's command line in tasks for Ansible. No module of Ansible
/// changes the command line of each boot loader.
pub const BOOT_MESSAGE: &str = "The kernel command line is to be ";

const NOTE: &str = "Written by `pagefold tune export`.";

/// The settings in a format. What the format cannot express is named in comments.
pub fn render(settings: &Settings, format: ExportFormat) -> String {
    let settings = &without_odd_lines(settings);
    let mut text = match format {
        ExportFormat::Tuned => render_tuned(settings),
        ExportFormat::Sysctl => render_sysctl(settings),
        ExportFormat::Modprobe => render_modprobe(settings),
        ExportFormat::Ansible => render_ansible(settings),
    };
    for (change, why) in &settings.omitted {
        let comment = format!("not exported: {change} ({why})");
        let _ = writeln!(text, "# {}", comment.replace(char::is_control, " "));
    }
    text
}

/// The settings without those that would not stay one line, or one word of modprobe.d, in any format. These are omitted.
fn without_odd_lines(settings: &Settings) -> Settings {
    let mut plain = settings.clone();
    let has_odd_signs = |text: &str| text.contains(|c: char| c.is_control() && c != '\t');
    let mut omit = |change: String, why: &str| plain.omitted.push((change, why.to_owned()));
    plain.writes.retain(|path, value| {
        let is_odd = has_odd_signs(path) || has_odd_signs(value);
        if is_odd {
            omit(format!("set /{path} to {value}"), "it has control characters");
        }
        !is_odd
    });
    for (module, options) in &mut plain.modules {
        options.retain(|name, value| {
            let is_plain = is_plain_for_modprobe(name) && is_plain_for_modprobe(value);
            if !is_plain {
                omit(format!("set {name} of the module {module} to {value}"), "modprobe would read it otherwise");
            }
            is_plain
        });
    }
    plain.modules.retain(|_, options| !options.is_empty());
    for words in [&mut plain.boot.0, &mut plain.boot.1] {
        words.retain(|word| {
            let is_odd = has_odd_signs(word);
            if is_odd {
                omit(format!("set the boot parameter {word}"), "it has control characters");
            }
            !is_odd
        });
    }
    plain
}

/// The name of a sysctl: `vm.swappiness`. A dot in a name becomes a slash (sysctl.d(5)).
fn sysctl_name(path: &str) -> Option<String> {
    let name = path.strip_prefix("proc/sys/")?;
    Some(
        name.chars()
            .map(|c| {
                if c == '/' {
                    '.'
                } else if c == '.' {
                    '/'
                } else {
                    c
                }
            })
            .collect(),
    )
}

/// The settings that are not sysctls, nor parameters of modules.
fn other_writes(settings: &Settings) -> impl Iterator<Item = (&String, &String)> {
    settings.writes.iter().filter(|(path, _)| !path.starts_with("proc/sys/"))
}

fn sysctls(settings: &Settings) -> impl Iterator<Item = (String, &String)> {
    settings.writes.iter().filter_map(|(path, value)| Some((sysctl_name(path)?, value)))
}

/// The parameters of modules, with those that are written while the module is loaded.
fn all_module_options(settings: &Settings) -> ModuleOptions {
    let mut all = settings.modules.clone();
    for (path, value) in &settings.writes {
        if let Some((module, parameter)) =
            path.strip_prefix("sys/module/").and_then(|rest| rest.split_once("/parameters/"))
        {
            all.entry(module.to_owned()).or_default().entry(parameter.to_owned()).or_insert_with(|| value.clone());
        }
    }
    all
}

/// tuned has a plugin for sysctls and one for files below /sys. It cannot remove a parameter from the kernel's command line:
/// `-` removes one that a profile has added.
fn render_tuned(settings: &Settings) -> String {
    let mut text = format!("# {NOTE}\n[main]\nsummary=Settings of pagefold tune\n");
    let mut section = |name: &str, lines: Vec<String>| {
        if !lines.is_empty() {
            let _ = write!(text, "\n[{name}]\n{}\n", lines.join("\n"));
        }
    };
    let line = |name: &str, value: &str| match is_plain_for_tuned(value) {
        true => format!("{name}={value}"),
        false => format!("# not a value for tuned: {name}={value}"),
    };
    let file = |(path, value): (&String, &String)| match path.starts_with("sys/") {
        true => line(&format!("/{path}"), value),
        false => format!("# not a file for tuned: /{path}={value}"),
    };
    section("sysctl", sysctls(settings).map(|(name, value)| line(&name, value)).collect());
    section("sysfs", other_writes(settings).map(file).collect());
    section("modules", settings.modules.iter().map(|(module, options)| line(module, &join(options))).collect());
    let (removed, added) = &settings.boot;
    let lines =
        added.iter().enumerate().map(|(number, word)| line(&format!("cmdline_pagefold{number}"), &format!("+{word}")));
    section("bootloader", lines.collect());
    for parameter in removed {
        let _ = writeln!(text, "# for the kernel command line: without {parameter}");
    }
    text
}

/// Whether tuned takes a value as it is: it evaluates variables, removes quotes and comments, and takes a sign at the
/// beginning as a condition (2.24, `tuned/profiles/variables.py`, `tuned/profiles/loader.py`, `tuned/plugins/base.py`).
pub fn is_plain_for_tuned(value: &str) -> bool {
    let is_quoted = value.len() > 1 && value.starts_with('"') && value.ends_with('"');
    !is_quoted && !value.contains("${") && !value.contains('#') && !value.starts_with(['<', '>'])
}

fn join(options: &BTreeMap<String, String>) -> String {
    options.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
}

fn render_sysctl(settings: &Settings) -> String {
    let mut text = format!("# {NOTE}\n");
    for (name, value) in sysctls(settings) {
        let _ = writeln!(text, "{name} = {value}");
    }
    for (path, value) in other_writes(settings) {
        let _ = writeln!(text, "# not a sysctl: /{path} = {value}");
    }
    for (module, options) in &settings.modules {
        let _ = writeln!(text, "# not a sysctl: options {module} {}", join(options));
    }
    push_boot_comments(settings, &mut text);
    text
}

/// The parameters of the kernel's command line as comments.
fn push_boot_comments(settings: &Settings, text: &mut String) {
    let (removed, added) = &settings.boot;
    for parameter in removed.iter().map(|remove| format!("without {remove}")).chain(added.iter().cloned()) {
        let _ = writeln!(text, "# for the kernel command line: {parameter}");
    }
}

fn render_modprobe(settings: &Settings) -> String {
    let mut text = format!("# {NOTE}\n");
    for (module, mut options) in all_module_options(settings) {
        options.retain(|name, value| {
            let is_plain = is_plain_for_modprobe(value);
            if !is_plain {
                let _ = writeln!(text, "# not a value for modprobe: {module} {name}={value}");
            }
            is_plain
        });
        if !options.is_empty() {
            let _ = writeln!(text, "options {module} {}", join(&options));
        }
    }
    for (path, value) in settings.writes.iter().filter(|(path, _)| !path.starts_with("sys/module/")) {
        let _ = writeln!(text, "# not a parameter of a module: /{path} = {value}");
    }
    push_boot_comments(settings, &mut text);
    text
}

/// Whether modprobe hands a value to the kernel as it is: words end at white space, and quotes and backslashes have a
/// meaning (modprobe.d(5); kernel/params.c, `next_arg`).
fn is_plain_for_modprobe(value: &str) -> bool {
    !value.is_empty() && !value.contains(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '\\'))
}

/// A text as a scalar of YAML in double quotes, whose escapes are those of JSON (YAML 1.2, section 5.7).
fn yaml_string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Whether Ansible and what it starts take the value of a setting as it is. Ansible evaluates expressions of Jinja; its
/// module `ansible.posix.sysctl` takes words for truth values as 1 and 0
/// (`ansible/module_utils/parsing/convert_bool.py`); in tmpfiles.d(5) a dash stands for no argument.
pub(super) fn is_plain_for_ansible(path: &str, value: &str) -> bool {
    const TRUTH_VALUES: [&str; 10] = ["y", "yes", "on", "true", "t", "n", "no", "off", "false", "f"];
    let is_expression = ["{{", "{%", "{#"].iter().any(|start| value.contains(start));
    !is_expression
        && match path.starts_with("proc/sys/") {
            true => !TRUTH_VALUES.contains(&value.to_ascii_lowercase().as_str()),
            false => value != "-",
        }
}

/// A value as an argument of tmpfiles.d(5), in which a percent sign begins a specifier and a backslash an escape.
fn tmpfiles_argument(value: &str) -> String {
    value.replace('%', "%%").replace('\\', "\\\\")
}

fn render_ansible(settings: &Settings) -> String {
    let (plain, odd): (BTreeMap<_, _>, BTreeMap<_, _>) =
        settings.writes.clone().into_iter().partition(|(path, value)| is_plain_for_ansible(path, value));
    let settings = &Settings { writes: plain, ..settings.clone() };
    let mut text = format!("# {NOTE} Tasks for hosts with Linux; the collection ansible.posix is needed.\n---\n");
    let length = text.len();
    for (name, value) in sysctls(settings) {
        let _ = write!(
            text,
            "- name: {}\n  ansible.posix.sysctl:\n    name: {}\n    value: {}\n    state: present\n    \
             sysctl_file: /etc/sysctl.d/90-pagefold.conf\n",
            yaml_string(&format!("Set {name}")),
            yaml_string(&name),
            yaml_string(value),
        );
    }
    // systemd-tmpfiles writes these at each boot.
    let lines: Vec<String> = other_writes(settings)
        .map(|(path, value)| format!("w /{path} - - - - {}\n", tmpfiles_argument(value)))
        .collect();
    if !lines.is_empty() {
        let _ = write!(
            text,
            "- name: Write settings of sysfs at each boot\n  ansible.builtin.copy:\n    \
             dest: /etc/tmpfiles.d/pagefold.conf\n    mode: \"0644\"\n    content: {}\n\
             - name: Write settings of sysfs now\n  ansible.builtin.command:\n    argv:\n      - systemd-tmpfiles\n      \
             - --create\n      - /etc/tmpfiles.d/pagefold.conf\n  changed_when: false\n",
            yaml_string(&lines.concat())
        );
    }
    if !settings.modules.is_empty() {
        let options: Vec<String> =
            settings.modules.iter().map(|(module, options)| format!("options {module} {}\n", join(options))).collect();
        let _ = write!(
            text,
            "- name: Set parameters of modules from the next load on\n  ansible.builtin.copy:\n    \
             dest: /etc/modprobe.d/zz-pagefold.conf\n    mode: \"0644\"\n    content: {}\n",
            yaml_string(&options.concat())
        );
    }
    for parameter in settings.boot.0.iter().map(|remove| format!("without {remove}")).chain(settings.boot.1.clone()) {
        let message = yaml_string(&format!("{BOOT_MESSAGE}{parameter}"));
        let _ = write!(text, "- name: Kernel command line\n  ansible.builtin.debug:\n    msg: {message}\n");
    }
    if text.len() == length {
        text.push_str("[]\n");
    }
    for (path, value) in odd {
        let _ = writeln!(text, "# not a value for Ansible: /{path} = {value}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::import::{ImportFormat, parse};
    use super::*;
    use pagefold_doctor::decide::change::SettingChange;
    use proptest::prelude::*;

    fn settings() -> Settings {
        let pairs = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        Settings {
            writes: pairs(&[
                ("proc/sys/vm/swappiness", "10"),
                ("sys/module/kvm/parameters/halt_poll_ns", "10000"),
                ("sys/block/nvme0n1/queue/scheduler", "none"),
            ]),
            modules: [("kvm_amd".to_owned(), pairs(&[("npt", "1")]))].into(),
            boot: (vec!["quiet".to_owned()], vec!["clocksource=tsc".to_owned()]),
            omitted: vec![("set /x to 1\n2".to_owned(), "Pagefold does not write it".to_owned())],
        }
    }

    /// Exported files mean the same when they are imported.
    #[test]
    fn exported_files_are_imported_again() {
        let settings = settings();
        let imported = parse(&render(&settings, ExportFormat::Tuned), ImportFormat::Tuned);
        assert_eq!(imported.ignored, []);
        let writes: BTreeMap<String, String> = imported
            .changes
            .iter()
            .filter_map(|change| match change {
                SettingChange::Write { path, value } => Some((path.clone(), value.clone())),
                _ => None,
            })
            .collect();
        assert_eq!(writes, settings.writes);
        // A parameter of a module, and one that is added to the kernel's command line.
        assert_eq!(imported.changes.len(), settings.writes.len() + 2);
        let sysctl = parse(&render(&settings, ExportFormat::Sysctl), ImportFormat::Sysctl);
        assert_eq!((sysctl.changes.len(), sysctl.ignored), (1, Vec::new()));
        let modprobe = parse(&render(&settings, ExportFormat::Modprobe), ImportFormat::Modprobe);
        assert_eq!((modprobe.changes.len(), modprobe.ignored), (2, Vec::new()));
    }

    #[test]
    fn what_a_format_cannot_express_is_named_in_comments() {
        let comments = |format| {
            let text = render(&settings(), format);
            text.lines().filter(|line| line.starts_with('#')).skip(1).map(str::to_owned).collect::<Vec<_>>()
        };
        let omitted = "# not exported: set /x to 1 2 (Pagefold does not write it)";
        let boot = ["# for the kernel command line: without quiet", "# for the kernel command line: clocksource=tsc"];
        let sysctl = [
            "# not a sysctl: /sys/block/nvme0n1/queue/scheduler = none",
            "# not a sysctl: /sys/module/kvm/parameters/halt_poll_ns = 10000",
            "# not a sysctl: options kvm_amd npt=1",
        ];
        assert_eq!(comments(ExportFormat::Sysctl), [&sysctl[..], &boot, &[omitted]].concat());
        let modprobe = [
            "# not a parameter of a module: /proc/sys/vm/swappiness = 10",
            "# not a parameter of a module: /sys/block/nvme0n1/queue/scheduler = none",
        ];
        assert_eq!(comments(ExportFormat::Modprobe), [&modprobe[..], &boot, &[omitted]].concat());
        assert_eq!(comments(ExportFormat::Tuned), [boot[0], omitted]);
        assert_eq!(comments(ExportFormat::Ansible), [omitted]);
    }

    #[test]
    fn ansible_tasks_are_a_list_of_yaml() {
        let tasks: Vec<serde_json::Value> =
            serde_norway::from_str(&render(&settings(), ExportFormat::Ansible)).unwrap();
        assert_eq!(tasks[0]["ansible.posix.sysctl"]["value"], "10");
        assert_eq!(
            tasks[1]["ansible.builtin.copy"]["content"],
            "w /sys/block/nvme0n1/queue/scheduler - - - - none\nw /sys/module/kvm/parameters/halt_poll_ns - - - - 10000\n"
        );
        assert_eq!(tasks[3]["ansible.builtin.copy"]["content"], "options kvm_amd npt=1\n");
        assert_eq!(tasks.len(), 6);
        assert!(tasks.iter().all(|task| task["name"].is_string()));
        let none: Vec<serde_json::Value> =
            serde_norway::from_str(&render(&Settings::default(), ExportFormat::Ansible)).unwrap();
        assert_eq!(none, Vec::<serde_json::Value>::new());
    }

    proptest! {
        #[test]
        fn ansible_keeps_any_value(value in "\\PC{0,40}") {
            let settings = Settings {
                writes: [("proc/sys/vm/x".to_owned(), value.clone())].into(),
                ..Settings::default()
            };
            let tasks: Vec<serde_json::Value> =
                serde_norway::from_str(&render(&settings, ExportFormat::Ansible)).unwrap();
            let exported = tasks.first().and_then(|task| task["ansible.posix.sysctl"]["value"].as_str());
            prop_assert_eq!(exported, is_plain_for_ansible("proc/sys/vm/x", &value).then_some(&*value));
        }
    }
}
