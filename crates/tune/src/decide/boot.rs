//! The commands that change the kernel's command line. They are printed and never run: a host that does not boot cannot
//! be undone from a running one.

use std::collections::BTreeMap;

/// The file of GRUB's settings, below the root.
pub const GRUB_FILE: &str = "etc/default/grub";
/// The directory of its fragments, which Debian's grub-mkconfig reads after [`GRUB_FILE`].
pub const GRUB_FRAGMENTS: &str = "etc/default/grub.d";
/// The command line that proxmox-boot-tool gives to systemd-boot.
pub const KERNEL_COMMAND_LINE_FILE: &str = "etc/kernel/cmdline";
/// The fragment that the commands write.
const OWN_FRAGMENT: &str = "etc/default/grub.d/pagefold.cfg";

/// How a host keeps the command line of its kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum BootLoader {
    /// GRUB as on Debian, Ubuntu and Proxmox.
    Grub {
        /// The existing files of its settings, by their path below the root, with their text.
        files: BTreeMap<String, String>,
        /// The command that makes GRUB's configuration from them.
        refresh: &'static str,
    },
    /// `grubby`, as on Fedora and Red Hat Enterprise Linux.
    Grubby,
    /// Proxmox with systemd-boot: `/etc/kernel/cmdline`, then `proxmox-boot-tool refresh`.
    ProxmoxSystemdBoot {
        /// The text of `/etc/kernel/cmdline`.
        file: String,
    },
    /// Another one.
    #[default]
    Unknown,
}

/// Which boot loader started the host, as the firmware knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum FirmwareReport {
    /// The EFI variable `LoaderInfo`, which systemd-boot and GRUB since 2.12 set: `systemd-boot 257.7`.
    Loader(String),
    /// There is no such variable, or no EFI. It was not systemd-boot.
    NoLoader,
    /// The variables cannot be read.
    #[default]
    Unreadable,
}

/// What shows which boot loader a host has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BootEvidence {
    /// The text of `/etc/os-release`.
    pub os_release: String,
    /// Whether proxmox-boot-tool manages the boot partitions (`/etc/kernel/proxmox-boot-uuids`): with systemd-boot on
    /// EFI without Secure Boot, otherwise with GRUB.
    pub has_proxmox_boot: bool,
    /// What the firmware knows.
    pub firmware: FirmwareReport,
    /// The existing files of GRUB's settings, by their path below the root, with their text.
    pub grub_files: BTreeMap<String, String>,
    /// The text of `/etc/kernel/cmdline`, if it exists.
    pub kernel_command_line: Option<String>,
}

/// The state of the boot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BootState {
    /// The boot loader.
    pub loader: BootLoader,
    /// The present command line.
    pub command_line: String,
}

/// The commands for a change of the command line, for a shell of root.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BootCommands {
    /// They make the change.
    pub change: Vec<String>,
    /// They undo it.
    pub undo: Vec<String>,
    /// It shows the command line after the next boot; its comment says what to expect.
    pub check: String,
}

/// The boot loader of a host.
pub fn identify_loader(evidence: BootEvidence) -> BootLoader {
    let lines = evidence.os_release.lines().filter_map(|line| line.split_once('='));
    let ids = lines.filter(|(name, _)| matches!(*name, "ID" | "ID_LIKE"));
    let ids: Vec<&str> = ids.flat_map(|(_, value)| value.trim_matches('"').split(' ')).collect();
    let is_any = |names: &[&str]| ids.iter().any(|id| names.contains(id));
    let is_systemd_boot = matches!(&evidence.firmware, FirmwareReport::Loader(name) if name.contains("systemd-boot"));
    let has_grub = evidence.grub_files.contains_key(GRUB_FILE);
    if evidence.has_proxmox_boot {
        return match (evidence.firmware, evidence.kernel_command_line) {
            (FirmwareReport::Unreadable, _) => BootLoader::Unknown,
            (_, Some(file)) if is_systemd_boot => BootLoader::ProxmoxSystemdBoot { file },
            _ if has_grub && !is_systemd_boot => {
                BootLoader::Grub { files: evidence.grub_files, refresh: "proxmox-boot-tool refresh" }
            }
            _ => BootLoader::Unknown,
        };
    }
    if is_any(&["debian", "ubuntu"]) && has_grub && !is_systemd_boot {
        BootLoader::Grub { files: evidence.grub_files, refresh: "update-grub" }
    } else if is_any(&["fedora", "rhel", "centos"]) {
        BootLoader::Grubby
    } else {
        BootLoader::Unknown
    }
}

/// Whether a parameter can be put into a shell command and into the configuration of a boot loader as it is.
pub(super) fn is_plain(parameter: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ',' | '=' | ':' | '/');
    !parameter.is_empty() && parameter.chars().all(is_plain)
}

/// Whether the command line is as requested already.
pub fn is_in_force(state: &BootState, remove: Option<&str>, add: Option<&str>) -> bool {
    let has = |parameter: &str| state.command_line.split_ascii_whitespace().any(|word| word == parameter);
    remove.is_none_or(|remove| !has(remove)) && add.is_none_or(has)
}

/// The commands that change the command line and undo the change.
///
/// # Errors
/// Why there are none, and what to do instead.
pub fn commands(state: &BootState, remove: Option<&str>, add: Option<&str>) -> Result<BootCommands, String> {
    if let Some(parameter) = remove.iter().chain(&add).find(|parameter| !is_plain(parameter)) {
        return Err(format!("{parameter:?} has characters that a shell interprets: change the command line by hand"));
    }
    let (change, undo) = match &state.loader {
        BootLoader::Grub { files, refresh } => grub_commands(files, refresh, remove, add)?,
        BootLoader::Grubby => (vec![grubby_command(remove, add)], vec![grubby_command(add, remove)]),
        BootLoader::ProxmoxSystemdBoot { file } => systemd_boot_commands(file, remove, add)?,
        BootLoader::Unknown => {
            return Err(format!(
                "the boot loader is not known: in its configuration, {} the kernel command line, boot again, and check it \
                 by `cat /proc/cmdline`; to undo, {} it",
                describe(remove, add),
                describe(add, remove)
            ));
        }
    };
    let expected = [add.map(|add| format!("with {add}")), remove.map(|remove| format!("without {remove}"))];
    let expected = expected.into_iter().flatten().collect::<Vec<_>>().join(", ");
    Ok(BootCommands { change, undo, check: format!("cat /proc/cmdline # {expected}") })
}

fn describe(remove: Option<&str>, add: Option<&str>) -> String {
    match (remove, add) {
        (Some(remove), Some(add)) => format!("remove {remove} from, and add {add} to"),
        (Some(remove), None) => format!("remove {remove} from"),
        (None, add) => format!("add {} to", add.unwrap_or_default()),
    }
}

type Commands = (Vec<String>, Vec<String>);

/// A parameter is removed from each file that holds it, and added in a fragment of its own.
fn grub_commands(
    files: &BTreeMap<String, String>,
    refresh: &str,
    remove: Option<&str>,
    add: Option<&str>,
) -> Result<Commands, String> {
    let (mut change, mut undo) = (Vec::new(), Vec::new());
    if let Some(parameter) = remove {
        let holders: Vec<&String> =
            files.iter().filter(|(_, text)| holds_parameter(text, parameter)).map(|(path, _)| path).collect();
        if holders.is_empty() {
            return Err(format!(
                "neither /{GRUB_FILE} nor a fragment in /{GRUB_FRAGMENTS} sets {parameter}: remove it where the boot \
                 loader gets it, and check by `cat /proc/cmdline`"
            ));
        }
        let pattern = escape_pattern(parameter);
        for path in holders {
            let backup = backup_path(path, parameter);
            change.push(format!("cp -a /{path} /{backup}"));
            // In GNU sed \x27 is a single quote.
            change.push(format!(
                "sed -E -i '/^[[:space:]]*GRUB_CMDLINE_LINUX[A-Z_]*=/{{:a;s/(GRUB_CMDLINE_LINUX[A-Z_]*=|[[:space:]\"\\x27])\
                 {pattern}([[:space:]\"\\x27]|$)/\\1\\2/;ta;}}' /{path}"
            ));
            undo.push(format!("mv /{backup} /{path}"));
        }
    }
    if let Some(parameter) = add {
        let line = format!("GRUB_CMDLINE_LINUX=\"$GRUB_CMDLINE_LINUX {parameter}\"");
        change.push(format!("mkdir -p /{GRUB_FRAGMENTS}"));
        change.push(format!("echo '{line}' >> /{OWN_FRAGMENT}"));
        // Before the files of the removal come back: the fragment may be one of them.
        undo.insert(0, format!("sed -i '/^{}$/d' /{OWN_FRAGMENT}", escape_pattern(&line)));
    }
    change.push(refresh.to_owned());
    undo.push(refresh.to_owned());
    Ok((change, undo))
}

/// Whether a file of GRUB's settings puts a parameter on the command line of Linux.
fn holds_parameter(text: &str, parameter: &str) -> bool {
    let values = text.lines().filter_map(|line| {
        let (name, value) = line.trim_start().split_once('=')?;
        let suffix = name.strip_prefix("GRUB_CMDLINE_LINUX")?;
        suffix.chars().all(|c| c.is_ascii_uppercase() || c == '_').then_some(value)
    });
    let is_delimiter = |c: char| c.is_ascii_whitespace() || matches!(c, '"' | '\'');
    values.flat_map(|value| value.split(is_delimiter)).any(|word| word == parameter)
}

fn grubby_command(remove: Option<&str>, add: Option<&str>) -> String {
    let mut command = "grubby --update-kernel=ALL".to_owned();
    command.extend(remove.map(|parameter| format!(" --remove-args={parameter}")));
    command.extend(add.map(|parameter| format!(" --args={parameter}")));
    command
}

fn systemd_boot_commands(file: &str, remove: Option<&str>, add: Option<&str>) -> Result<Commands, String> {
    const PATH: &str = KERNEL_COMMAND_LINE_FILE;
    if let Some(parameter) = remove.filter(|remove| !file.split_ascii_whitespace().any(|word| word == *remove)) {
        return Err(format!(
            "/{PATH} does not set {parameter}: remove it where the boot loader gets it, and check by `cat /proc/cmdline`"
        ));
    }
    let backup = backup_path(PATH, remove.or(add).unwrap_or_default());
    let mut change = vec![format!("cp -a /{PATH} /{backup}")];
    change.extend(remove.map(|parameter| {
        format!("sed -E -i ':a;s/(^|[[:space:]]){}([[:space:]]|$)/\\2/;ta' /{PATH}", escape_pattern(parameter))
    }));
    change.extend(add.map(|parameter| format!("sed -i '1s/$/ {}/' /{PATH}", escape_pattern(parameter))));
    let refresh = "proxmox-boot-tool refresh".to_owned();
    let undo = vec![format!("mv /{backup} /{PATH}"), refresh.clone()];
    change.push(refresh);
    Ok((change, undo))
}

/// A text as a pattern of sed between slashes. A dollar sign is plain inside a basic pattern.
fn escape_pattern(text: &str) -> String {
    text.replace('/', "\\/").replace('.', "\\.")
}

/// The copy of a file before a change, which GRUB does not read: its fragments end with `.cfg`.
fn backup_path(path: &str, parameter: &str) -> String {
    let name = parameter.split('=').next().unwrap_or_default();
    format!("{path}.before-{}", name.replace(['/', ':', ','], "-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(files: &[(&str, &str)]) -> BTreeMap<String, String> {
        files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect()
    }

    fn state(loader: BootLoader) -> BootState {
        BootState { loader, command_line: "quiet tsc=unstable".to_owned() }
    }

    #[test]
    fn boot_loader_is_identified_by_distribution_and_files() {
        let identify = |os_release: &str, grub_files: &[(&str, &str)]| {
            identify_loader(BootEvidence {
                os_release: os_release.to_owned(),
                grub_files: files(grub_files),
                ..BootEvidence::default()
            })
        };
        let grub = [(GRUB_FILE, "")];
        for text in ["ID=debian\n", "ID=linuxmint\nID_LIKE=\"ubuntu debian\"\n"] {
            assert_eq!(identify(text, &grub), BootLoader::Grub { files: files(&grub), refresh: "update-grub" });
            assert_eq!(identify(text, &[]), BootLoader::Unknown, "there is no {GRUB_FILE}");
        }
        assert_eq!(identify("NAME=Fedora\nID=fedora\n", &grub), BootLoader::Grubby);
        assert_eq!(identify("ID=\"rocky\"\nID_LIKE=\"rhel centos fedora\"\n", &[]), BootLoader::Grubby);
        assert_eq!(identify("ID=nixos\n", &grub), BootLoader::Unknown);
        assert_eq!(identify("", &grub), BootLoader::Unknown);
    }

    #[test]
    fn boot_loader_of_proxmox_is_the_one_that_the_firmware_started() {
        let loader = |name: &str| FirmwareReport::Loader(name.to_owned());
        let grub = BootLoader::Grub { files: files(&[(GRUB_FILE, "")]), refresh: "proxmox-boot-tool refresh" };
        let systemd_boot = BootLoader::ProxmoxSystemdBoot { file: "quiet".to_owned() };
        for (firmware, expected) in [
            (loader("systemd-boot 252.39"), &systemd_boot),
            (loader("GRUB 2.12"), &grub),
            (FirmwareReport::NoLoader, &grub),
            (FirmwareReport::Unreadable, &BootLoader::Unknown),
        ] {
            let evidence = BootEvidence {
                os_release: "ID=debian\n".to_owned(),
                has_proxmox_boot: true,
                firmware,
                grub_files: files(&[(GRUB_FILE, "")]),
                kernel_command_line: Some("quiet".to_owned()),
            };
            assert_eq!(&identify_loader(evidence.clone()), expected, "{evidence:?}");
            if expected == &systemd_boot {
                let without_proxmox = BootEvidence { has_proxmox_boot: false, ..evidence.clone() };
                assert_eq!(identify_loader(without_proxmox), BootLoader::Unknown, "GRUB is installed and not in use");
                let without_file = BootEvidence { kernel_command_line: None, ..evidence };
                assert_eq!(identify_loader(without_file), BootLoader::Unknown);
            }
        }
    }

    #[test]
    fn commands_of_grubby_have_an_undo_and_a_check() {
        let commands = commands(&state(BootLoader::Grubby), Some("tsc=unstable"), Some("clocksource=tsc")).unwrap();
        assert_eq!(commands.change, ["grubby --update-kernel=ALL --remove-args=tsc=unstable --args=clocksource=tsc"]);
        assert_eq!(commands.undo, ["grubby --update-kernel=ALL --remove-args=clocksource=tsc --args=tsc=unstable"]);
        assert_eq!(commands.check, "cat /proc/cmdline # with clocksource=tsc, without tsc=unstable");
    }

    #[test]
    fn parameters_with_shell_characters_are_refused() {
        for parameter in ["a b", "$(reboot)", "a'b", "", "a\nb", "a;b"] {
            assert!(commands(&state(BootLoader::Grubby), None, Some(parameter)).is_err(), "{parameter:?}");
        }
    }

    #[test]
    fn parameter_that_no_file_holds_is_refused() {
        let grub = BootLoader::Grub { files: files(&[(GRUB_FILE, "GRUB_TIMEOUT=5\n")]), refresh: "update-grub" };
        let systemd_boot = BootLoader::ProxmoxSystemdBoot { file: "quiet nosmt=force".to_owned() };
        for loader in [grub, systemd_boot] {
            assert!(commands(&state(loader), Some("nosmt"), None).unwrap_err().contains("cat /proc/cmdline"));
        }
    }

    #[test]
    fn unknown_boot_loader_gets_the_parameters_to_change() {
        let why = |remove, add| commands(&state(BootLoader::Unknown), remove, add).unwrap_err();
        assert!(why(None, Some("quiet")).contains(", add quiet to the kernel command line, boot again"));
        assert!(why(Some("a"), None).contains("remove a from the kernel command line"));
        let both = why(Some("a"), Some("b"));
        assert!(
            both.contains("remove a from, and add b to") && both.contains("to undo, remove b from, and add a to it")
        );
    }

    #[test]
    fn parameters_in_quotes_of_both_kinds_are_found_as_whole_words() {
        for text in [
            "GRUB_CMDLINE_LINUX=\"a nosmt b\"\n",
            "  GRUB_CMDLINE_LINUX_DEFAULT='nosmt'\n",
            "GRUB_CMDLINE_LINUX=nosmt\n",
            "X=1\nGRUB_CMDLINE_LINUX=\"$GRUB_CMDLINE_LINUX nosmt\"\n",
        ] {
            assert!(holds_parameter(text, "nosmt"), "{text}");
        }
        for text in [
            "",
            "# GRUB_CMDLINE_LINUX=\"nosmt\"\n",
            "GRUB_CMDLINE_LINUX=\"nosmt=force\"\n",
            "GRUB_CMDLINE_LINUX=\"x=nosmt\"\n",
            "GRUB_CMDLINE_XEN=\"nosmt\"\n",
        ] {
            assert!(!holds_parameter(text, "nosmt"), "{text}");
        }
    }

    #[test]
    fn command_line_in_force_needs_no_change() {
        let state = BootState { loader: BootLoader::Grubby, command_line: "quiet clocksource=tsc".to_owned() };
        assert!(is_in_force(&state, None, Some("clocksource=tsc")));
        assert!(is_in_force(&state, Some("nosmt"), None));
        assert!(!is_in_force(&state, Some("quiet"), Some("clocksource=tsc")));
        assert!(!is_in_force(&state, None, Some("clocksource=ts")));
    }
}
