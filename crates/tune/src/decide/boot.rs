//! The commands that change the kernel's command line. They are printed and never run: a host that does not boot cannot
//! be undone from a running one.

/// How a host keeps the command line of its kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BootLoader {
    /// GRUB as on Debian and Ubuntu: fragments in `/etc/default/grub.d`, then `update-grub`.
    GrubFragments,
    /// `grubby`, as on Fedora and Red Hat Enterprise Linux.
    Grubby,
    /// Proxmox with systemd-boot: `/etc/kernel/cmdline`, then `proxmox-boot-tool refresh`.
    ProxmoxBootTool,
    /// Another one.
    #[default]
    Unknown,
}

/// The state of the boot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BootState {
    /// The boot loader.
    pub loader: BootLoader,
    /// The present command line.
    pub command_line: String,
}

/// The boot loader of a host, from the text of `/etc/os-release` and whether `/etc/kernel/proxmox-boot-uuids` exists.
pub fn identify_loader(os_release: &str, has_proxmox_boot: bool) -> BootLoader {
    if has_proxmox_boot {
        return BootLoader::ProxmoxBootTool;
    }
    let lines = os_release.lines().filter_map(|line| line.split_once('='));
    let ids = lines.filter(|(name, _)| matches!(*name, "ID" | "ID_LIKE"));
    let ids: Vec<&str> = ids.flat_map(|(_, value)| value.trim_matches('"').split(' ')).collect();
    let is_any = |names: &[&str]| ids.iter().any(|id| names.contains(id));
    if is_any(&["debian", "ubuntu"]) {
        BootLoader::GrubFragments
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

/// The commands that change the command line, for a shell of root.
///
/// # Errors
/// Why there are none.
pub fn commands(state: &BootState, remove: Option<&str>, add: Option<&str>) -> Result<Vec<String>, String> {
    if let Some(parameter) = remove.iter().chain(&add).find(|parameter| !is_plain(parameter)) {
        return Err(format!("{parameter:?} has characters that a shell interprets: change the command line by hand"));
    }
    Ok(match state.loader {
        BootLoader::GrubFragments => {
            let mut lines = Vec::new();
            lines.extend(remove.map(|parameter| {
                let pattern = parameter.replace('/', "\\/").replace('.', "\\.");
                format!("sed -i '/^GRUB_CMDLINE_LINUX/s/\\([\" ]\\){pattern}\\([\" ]\\)/\\1\\2/' /etc/default/grub")
            }));
            lines.extend(add.map(|parameter| {
                format!(
                    "echo 'GRUB_CMDLINE_LINUX=\"$GRUB_CMDLINE_LINUX {parameter}\"' >> /etc/default/grub.d/pagefold.cfg"
                )
            }));
            lines.push("update-grub".to_owned());
            lines
        }
        BootLoader::Grubby => {
            let mut command = "grubby --update-kernel=ALL".to_owned();
            command.extend(remove.map(|parameter| format!(" --remove-args={parameter}")));
            command.extend(add.map(|parameter| format!(" --args={parameter}")));
            vec![command]
        }
        BootLoader::ProxmoxBootTool => {
            let mut lines = Vec::new();
            lines.extend(remove.map(|parameter| {
                let pattern = parameter.replace('/', "\\/").replace('.', "\\.");
                format!("sed -i 's/\\(^\\| \\){pattern}\\( \\|$\\)/\\2/' /etc/kernel/cmdline")
            }));
            lines.extend(
                add.map(|parameter| format!("sed -i 's/$/ {}/' /etc/kernel/cmdline", parameter.replace('/', "\\/"))),
            );
            lines.push("proxmox-boot-tool refresh".to_owned());
            lines
        }
        BootLoader::Unknown => {
            return Err("the boot loader is not known: add the parameter to its kernel command line by hand".to_owned());
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boot_loader_is_identified_by_distribution() {
        for (text, expected) in [
            ("ID=debian\n", BootLoader::GrubFragments),
            ("ID=linuxmint\nID_LIKE=\"ubuntu debian\"\n", BootLoader::GrubFragments),
            ("NAME=Fedora\nID=fedora\n", BootLoader::Grubby),
            ("ID=\"rocky\"\nID_LIKE=\"rhel centos fedora\"\n", BootLoader::Grubby),
            ("ID=nixos\n", BootLoader::Unknown),
            ("", BootLoader::Unknown),
        ] {
            assert_eq!(identify_loader(text, false), expected, "{text}");
        }
        assert_eq!(identify_loader("ID=debian\n", true), BootLoader::ProxmoxBootTool);
    }

    #[test]
    fn commands_are_exact_and_refuse_shell_characters() {
        let state = |loader| BootState { loader, command_line: "quiet tsc=unstable".to_owned() };
        assert_eq!(
            commands(&state(BootLoader::Grubby), Some("tsc=unstable"), Some("clocksource=tsc")).unwrap(),
            ["grubby --update-kernel=ALL --remove-args=tsc=unstable --args=clocksource=tsc"]
        );
        assert_eq!(
            commands(&state(BootLoader::GrubFragments), None, Some("clocksource=tsc")).unwrap(),
            [
                "echo 'GRUB_CMDLINE_LINUX=\"$GRUB_CMDLINE_LINUX clocksource=tsc\"' >> /etc/default/grub.d/pagefold.cfg",
                "update-grub"
            ]
        );
        for parameter in ["a b", "$(reboot)", "a'b", "", "a\nb", "a;b"] {
            assert!(commands(&state(BootLoader::Grubby), None, Some(parameter)).is_err(), "{parameter:?}");
        }
        assert!(commands(&state(BootLoader::Unknown), None, Some("quiet")).is_err());
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
