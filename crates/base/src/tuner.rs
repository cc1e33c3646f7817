//! Programs that write KSM's settings, recognized by name and command line.
//!
//! Two writers of one setting overwrite each other, and none of these programs notices that. Names and settings of each
//! are from: ksmtuned and ksmctl 4.20150326 (Debian), KubeVirt `pkg/virt-handler/ksm/ksm.go`, Harvester node-manager
//! `pkg/ksmtuned`, oVirt MOM `doc/ksm.rules`, Kata ksm-throttler `throttler.go`, tuned 2.20 (`realtime-virtual-host`,
//! `cpu-partitioning`).

use crate::process::Process;

/// A program that writes KSM's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tuner {
    /// The shell daemon of Red Hat, Debian and Proxmox: `run`, `pages_to_scan`, `sleep_millisecs` every minute.
    Ksmtuned,
    /// The program of `ksm.service` at boot: `run`.
    Ksmctl,
    /// KubeVirt's node agent: `run`, `pages_to_scan`, `sleep_millisecs` every ten minutes, if the cluster's
    /// `ksmConfiguration` selects the node.
    VirtHandler,
    /// Harvester's node agent: `run`, `pages_to_scan`, `sleep_millisecs`, `merge_across_nodes`, from its `Ksmtuned`
    /// resource.
    Harvester,
    /// oVirt's Memory Overcommitment Manager: `run`, `pages_to_scan`, `sleep_millisecs`.
    Mom,
    /// Kata's throttler: `run`, `pages_to_scan`, `sleep_millisecs` at each start of a VM.
    KsmThrottler,
    /// tuned: `run=2` once, when one of two of its profiles is activated.
    Tuned,
}

const TUNER_PROGRAMS: [(&str, Tuner); 9] = [
    ("ksmtuned", Tuner::Ksmtuned),
    ("ksmctl", Tuner::Ksmctl),
    ("virt-handler", Tuner::VirtHandler),
    ("harvester-node-manager", Tuner::Harvester),
    ("momd", Tuner::Mom),
    ("ksm-throttler", Tuner::KsmThrottler),
    ("kata-ksm-throttler", Tuner::KsmThrottler),
    ("vc-throttler", Tuner::KsmThrottler),
    ("tuned", Tuner::Tuned),
];

/// The tuner that a process is, from the kernel's name and its arguments.
pub fn identify_tuner(comm: &str, arguments: &[String]) -> Option<Tuner> {
    TUNER_PROGRAMS.iter().find(|(name, _)| runs(name, comm, arguments)).map(|&(_, tuner)| tuner)
}

/// The tuner that a process is, if it can write KSM's settings. Any user may name a program ksmtuned, but only root can
/// write the settings. A setuid program does not count either, because the user that starts it chooses its arguments.
///
/// User IDs are as this process sees them, so root of another user namespace does not count.
pub fn identify_root_tuner(process: &Process) -> Option<Tuner> {
    let is_root = process.uid == Ok(0) && !process.setuid && !process.kernel_thread;
    let arguments = process.arguments.as_deref().unwrap_or_default();
    identify_tuner(&process.comm, arguments).filter(|_| is_root)
}

/// Whether a process runs the program of that name. Its arguments decide, if it has any, also for a script that an
/// interpreter runs. Otherwise `comm` decides, which the kernel cuts at 15 bytes (`TASK_COMM_LEN`).
pub fn runs(name: &str, comm: &str, arguments: &[String]) -> bool {
    match program_name(arguments) {
        Some(program) => program == name,
        None => comm == name || (comm.len() == 15 && name.starts_with(comm)),
    }
}

/// The base name of the program in the arguments, or of the script that an interpreter runs. `None` without arguments;
/// empty for an interpreter without a script.
pub(crate) fn program_name(arguments: &[String]) -> Option<&str> {
    let (first, rest) = arguments.split_first()?;
    let base = |path: &str| path.rfind('/').map_or(0, |slash| slash + 1);
    // A server may rewrite its arguments to one title: `sshd: user [priv]`.
    let first = first.split(' ').next().unwrap_or_default().trim_end_matches(':');
    let program = &first[base(first)..];
    let interpreter = ["python", "bash", "dash", "sh", "perl"].iter().any(|shell| {
        program.strip_prefix(shell).is_some_and(|version| version.chars().all(|c| c.is_ascii_digit() || c == '.'))
    });
    if !interpreter {
        return Some(program);
    }
    let script = rest.iter().find(|argument| !argument.starts_with('-') || argument.as_str() == "-c");
    Some(script.map_or("", |script| &script[base(script)..]))
}

impl Tuner {
    /// Its common name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ksmtuned => "ksmtuned",
            Self::Ksmctl => "ksmctl (ksm.service)",
            Self::VirtHandler => "KubeVirt virt-handler",
            Self::Harvester => "Harvester node-manager",
            Self::Mom => "oVirt MOM",
            Self::KsmThrottler => "Kata ksm-throttler",
            Self::Tuned => "tuned",
        }
    }

    /// Whether it writes `pages_to_scan` repeatedly.
    pub fn writes_rate(self) -> bool {
        !matches!(self, Self::Ksmctl | Self::Tuned)
    }

    /// The commands that stop it from writing. KubeVirt and Harvester write run=0 as their last action.
    pub fn stop_commands(self) -> &'static [&'static str] {
        match self {
            Self::Ksmtuned => &["systemctl disable --now ksmtuned.service"],
            // Stopping the unit would run `ksmctl stop`, which writes run=0.
            Self::Ksmctl => &["systemctl disable ksm.service"],
            Self::VirtHandler => &["kubectl -n kubevirt patch kubevirt kubevirt --type=json -p \
                 '[{\"op\":\"remove\",\"path\":\"/spec/configuration/ksmConfiguration\"}]'"],
            Self::Harvester => &["kubectl patch ksmtuneds.node.harvesterhci.io \"$(hostname)\" --type=merge -p \
                 '{\"spec\":{\"run\":\"stop\"}}'"],
            Self::Mom => {
                &["systemctl disable --now $(systemctl list-units --plain --no-legend 'mom*.service' | cut -d' ' -f1)"]
            }
            Self::KsmThrottler => &["systemctl disable --now \
                 $(systemctl list-units --plain --no-legend '*-throttler.service' | cut -d' ' -f1)"],
            Self::Tuned => &["tuned-adm profile virtual-host"],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reading::Absent;
    use crate::units::{Pid, ProcessId};

    #[test]
    fn tuners_are_known_by_name_and_command_line() {
        let check = |comm: &str, line: &str, expected| {
            let arguments: Vec<String> = line.split('|').filter(|a| !a.is_empty()).map(str::to_owned).collect();
            assert_eq!(identify_tuner(comm, &arguments), expected, "{comm} {line}");
        };
        check("ksmtuned", "/bin/bash|/usr/sbin/ksmtuned", Some(Tuner::Ksmtuned));
        check("ksmctl", "/usr/sbin/ksmctl|start", Some(Tuner::Ksmctl));
        check("virt-handler", "/usr/bin/virt-handler|--port|8443", Some(Tuner::VirtHandler));
        check("harvester-node-", "harvester-node-manager|start", Some(Tuner::Harvester));
        check("harvester-node-", "", Some(Tuner::Harvester));
        check("python3", "/usr/bin/python3|/usr/sbin/momd|-c|/etc/vdsm/mom.conf", Some(Tuner::Mom));
        check("ksm-throttler", "/usr/libexec/ksm-throttler/ksm-throttler", Some(Tuner::KsmThrottler));
        check("tuned", "/usr/bin/python3.11|-Es|/usr/sbin/tuned|-l|-P", Some(Tuner::Tuned));
        check("vim", "vim|/usr/sbin/ksmtuned", None);
        check("bash", "bash|-c|ksmtuned", None);
        check("ksmd", "", None);
        check("tunedd", "/usr/bin/tunedd", None);
        check("", "", None);
    }

    #[test]
    fn only_root_programs_count_as_tuners() {
        let id = ProcessId { pid: Pid(7), start_time: 1 };
        let (comm, arguments) = ("ksmtuned".to_owned(), Ok(vec!["./ksmtuned".to_owned()]));
        let root = Process { comm, arguments, uid: Ok(0), setuid: false, ..Process::absent(id, &Absent::Denied) };
        assert_eq!(identify_root_tuner(&root), Some(Tuner::Ksmtuned));
        for other in [
            Process { uid: Ok(65534), ..root.clone() },
            Process { uid: Err(Absent::Denied), ..root.clone() },
            Process { setuid: true, ..root.clone() },
            Process { kernel_thread: true, ..root },
        ] {
            assert_eq!(identify_root_tuner(&other), None, "{other:?}");
        }
    }

    #[test]
    fn a_rewritten_title_still_names_its_program() {
        assert!(runs("sshd", "sshd", &["sshd: root@pts/0".to_owned()]));
        assert!(!runs("sshd", "sshfs", &["sshfs".to_owned()]));
    }
}
