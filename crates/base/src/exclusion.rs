//! Excluded processes: programs whose memory should not be merged.
//!
//! A write to a merged page is measurably slower, so another enrolled process can test guesses of a page's content. A
//! program with keys gains little from merging and risks much. The memory of a confidential guest is encrypted: no two
//! of its pages are equal, and scanning them only costs ksmd time. The owner of a virtual machine may forbid merging of
//! its memory ([`Vm::opt_out`]).
//!
//! Programs are recognized by the kernel's name and by their arguments. Limits: a process may choose its name, so the
//! list only protects programs that do not hide. Many other programs have keys: web servers that terminate TLS,
//! browsers, databases. The operator excludes these in the configuration.

use crate::domain::TrustGroup;
#[cfg(doc)]
use crate::identity::Vm;
use crate::identity::confidential_guest_technique;
use crate::process::Process;
use crate::tuner::program_name;
use globset::{Glob, GlobMatcher};

/// Programs that keep private keys, passwords or sealed secrets in memory while they run, with a description of these.
/// Names may contain `*`.
pub const KEY_HOLDING_PROGRAMS: [(&str, &str); 32] = [
    ("1password", "passwords"),
    ("bao", "secrets of OpenBao"),
    ("bitwarden", "passwords"),
    ("charon", "keys of IPsec"),
    ("charon-systemd", "keys of IPsec"),
    ("clevis*", "keys of disks"),
    ("cryptsetup", "keys of disks"),
    ("gnome-keyring-daemon", "passwords"),
    ("gpg-agent", "private keys"),
    ("hostapd", "keys of wireless networks"),
    ("kadmind", "keys of a Kerberos realm"),
    ("keepassxc", "passwords"),
    ("krb5kdc", "keys of a Kerberos realm"),
    ("ksecretd", "passwords"),
    ("kwalletd*", "passwords"),
    ("openvpn", "private keys"),
    ("pcscd", "PINs of smart cards"),
    ("pinentry*", "passphrases as they are typed"),
    ("polkit-agent-helper-1", "passwords as they are typed"),
    ("scdaemon", "PINs of smart cards"),
    ("ssh-agent", "private keys"),
    ("sshd", "host keys"),
    ("sshd-auth", "host keys"),
    ("sshd-session", "session keys"),
    ("step-ca", "keys of a certificate authority"),
    ("stunnel*", "private keys"),
    ("swtpm", "the state of a TPM"),
    ("systemd-cryptsetup", "keys of disks"),
    ("tangd", "keys of disks"),
    ("tpm2-abrmd", "sessions of a TPM"),
    ("vault", "secrets of Vault"),
    ("wpa_supplicant", "keys of wireless networks"),
];

/// Which processes are excluded.
#[derive(Clone, Debug)]
pub struct Exclusions {
    /// Programs, each with the reason.
    programs: Vec<ProgramPattern>,
    /// Virtual machines, by name.
    vms: Vec<GlobMatcher>,
    /// Other processes, by user, cgroup, label and similar conditions.
    groups: Vec<TrustGroup>,
    /// Whether confidential virtual machines are excluded.
    confidential: bool,
    /// Whether virtual machines whose owner forbids merging are excluded.
    opted_out: bool,
}

#[derive(Clone, Debug)]
struct ProgramPattern {
    pattern: GlobMatcher,
    why: String,
}

impl Default for Exclusions {
    /// [`KEY_HOLDING_PROGRAMS`], confidential virtual machines and those whose owner forbids merging.
    fn default() -> Self {
        let programs = KEY_HOLDING_PROGRAMS.iter().map(|(name, what)| ProgramPattern {
            pattern: Glob::new(name).expect("the patterns above are well-formed").compile_matcher(),
            why: format!("it holds {what}"),
        });
        Self { programs: programs.collect(), confidential: true, opted_out: true, ..Self::none() }
    }
}

impl Exclusions {
    /// Excludes no process.
    pub fn none() -> Self {
        Self { programs: Vec::new(), vms: Vec::new(), groups: Vec::new(), confidential: false, opted_out: false }
    }

    /// Set whether confidential virtual machines are excluded.
    #[must_use]
    pub fn confidential(self, confidential: bool) -> Self {
        Self { confidential, ..self }
    }

    /// Set whether virtual machines whose owner forbids merging are excluded.
    #[must_use]
    pub fn opted_out(self, opted_out: bool) -> Self {
        Self { opted_out, ..self }
    }

    /// Also exclude programs whose name matches one of the patterns.
    #[must_use]
    pub fn programs(mut self, patterns: impl IntoIterator<Item = GlobMatcher>) -> Self {
        let name = |pattern| ProgramPattern { pattern, why: "the configuration excludes its program".to_owned() };
        self.programs.extend(patterns.into_iter().map(name));
        self
    }

    /// Also exclude virtual machines whose name matches one of the patterns.
    #[must_use]
    pub fn vms(mut self, patterns: impl IntoIterator<Item = GlobMatcher>) -> Self {
        self.vms.extend(patterns);
        self
    }

    /// Also exclude the processes in these groups.
    #[must_use]
    pub fn groups(mut self, groups: impl IntoIterator<Item = TrustGroup>) -> Self {
        self.groups.extend(groups);
        self
    }

    /// Why a process is excluded, in one phrase.
    pub fn reason(&self, process: &Process) -> Option<String> {
        let arguments = process.arguments.as_deref().unwrap_or_default();
        if let Some(name) = self.programs.iter().find(|name| name.fits(&process.comm, program_name(arguments))) {
            return Some(name.why.clone());
        }
        if let Some(group) = self.groups.iter().find(|group| group.has(process)) {
            return Some(format!("the configuration excludes the group {}", group.name));
        }
        let vm = process.identity.vm.as_ref()?;
        if vm.name.as_ref().is_some_and(|name| self.vms.iter().any(|pattern| pattern.is_match(name))) {
            return Some("the configuration excludes this virtual machine".to_owned());
        }
        if let Some(setting) = vm.opt_out().filter(|_| self.opted_out) {
            return Some(format!("its owner forbids merging: {setting}"));
        }
        let technique = confidential_guest_technique(arguments).filter(|_| self.confidential)?;
        Some(format!("the memory of a confidential guest is encrypted ({technique})"))
    }
}

impl ProgramPattern {
    /// Matches the arguments or the kernel's name, which is cut at 15 bytes (`TASK_COMM_LEN`).
    fn fits(&self, comm: &str, program: Option<&str>) -> bool {
        let is_truncated_match = || comm.len() == 15 && self.pattern.glob().glob().starts_with(comm);
        program.is_some_and(|program| self.pattern.is_match(program))
            || self.pattern.is_match(comm)
            || is_truncated_match()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Identity;
    use crate::reading::Absent;
    use crate::units::{Pid, ProcessId};

    fn glob(pattern: &str) -> GlobMatcher {
        Glob::new(pattern).unwrap().compile_matcher()
    }

    fn process(comm: &str, line: &str) -> Process {
        let arguments: Vec<String> =
            line.split('|').filter(|argument| !argument.is_empty()).map(str::to_owned).collect();
        Process {
            comm: comm.to_owned(),
            identity: Identity::new(&arguments, &std::collections::BTreeMap::new(), None),
            arguments: Ok(arguments),
            ..Process::absent(ProcessId { pid: Pid(7), start_time: 1 }, &Absent::Denied)
        }
    }

    #[test]
    fn key_holding_programs_are_excluded() {
        let exclusions = Exclusions::default();
        let check = |comm: &str, line: &str, expected: Option<&str>| {
            assert_eq!(exclusions.reason(&process(comm, line)).as_deref(), expected, "{comm} {line}");
        };
        check("ssh-agent", "/usr/bin/ssh-agent|-D", Some("it holds private keys"));
        check("sshd", "sshd: root@pts/0", Some("it holds host keys"));
        check("gnome-keyring-d", "/usr/bin/gnome-keyring-daemon|--foreground", Some("it holds passwords"));
        check("gnome-keyring-d", "", Some("it holds passwords"));
        check("pinentry-gtk-2", "pinentry-gtk-2", Some("it holds passphrases as they are typed"));
        check("systemd-cryptse", "/usr/lib/systemd/systemd-cryptsetup|attach", Some("it holds keys of disks"));
        check("kwalletd6", "", Some("it holds passwords"));
        // A program that changes its title is still recognized by the kernel's name, and the reverse.
        check("vault", "worker", Some("it holds secrets of Vault"));
        check("worker", "/opt/vault|server", Some("it holds secrets of Vault"));
        check("sshfs", "sshfs|host:", None);
        check("vim", "vim|/usr/bin/ssh-agent", None);
        check("gnome-keyring", "", None);
        check("", "", None);
    }

    #[test]
    fn key_holding_programs_are_sorted() {
        assert!(KEY_HOLDING_PROGRAMS.windows(2).all(|pair| pair[0].0 < pair[1].0));
    }

    #[test]
    fn confidential_guests_are_excluded() {
        let check = |line: &str, expected: bool| {
            let process = process("qemu-system-x86", line);
            assert_eq!(Exclusions::default().reason(&process).is_some(), expected, "{line}");
            assert_eq!(Exclusions::default().confidential(false).reason(&process), None, "{line}");
        };
        check("qemu-system-x86_64|-machine|q35,confidential-guest-support=sev0", true);
        check("qemu-system-x86_64|-machine|q35,memory-encryption=sev0", true);
        check("qemu-system-x86_64|-machine|q35", false);
        let reason = Exclusions::default().reason(&process("cat", "cat|confidential-guest-support=sev0"));
        assert_eq!(reason, None, "no virtual machine");
    }

    #[test]
    fn vms_that_forbid_merging_are_excluded() {
        let check = |line: &str, expected: Option<&str>| {
            let process = process("qemu-system-x86", line);
            let expected = expected.map(|setting| format!("its owner forbids merging: {setting}"));
            assert_eq!(Exclusions::default().reason(&process), expected, "{line}");
            assert_eq!(Exclusions::default().opted_out(false).reason(&process), None, "{line}");
        };
        check("qemu-system-x86_64|-machine|pc,mem-merge=off", Some("mem-merge=off"));
        check("qemu-system-x86_64|-M|pc", None);
        check("qemu-system-x86_64|-M|pc,mem-merge=on", None);
        let backends =
            "-object|memory-backend-ram,id=a,size=1G|-object|{\"qom-type\":\"memory-backend-ram\",\"id\":\"b\"";
        check(&format!("qemu-system-x86_64|{backends},\"merge\":false}}"), Some("merge=off of b"));
        check(&format!("qemu-system-x86_64|{backends}}}"), None);
        check(&format!("qemu-system-x86_64|-machine|mem-merge=off|{backends},\"merge\":true}}"), Some("mem-merge=off"));
        check("cloud-hypervisor|--memory|size=1G", None);
        check("firecracker|--id|a", None);
    }

    #[test]
    fn configuration_replaces_or_extends_exclusions() {
        let vm = process("qemu-system-x86", "qemu-system-x86_64|-name|guest=db-7");
        let key = process("vault", "vault");
        let own = process("tls-proxy-of-ou", "tls-proxy-of-ours");
        let replaced = Exclusions::none().programs([glob("tls-*")]).vms([glob("db-*")]);
        assert_eq!(replaced.reason(&key), None);
        assert_eq!(replaced.reason(&own).unwrap(), "the configuration excludes its program");
        assert_eq!(replaced.reason(&vm).unwrap(), "the configuration excludes this virtual machine");
        let group = TrustGroup { name: "keys".to_owned(), vms: vec![glob("db-*")], ..TrustGroup::default() };
        let grouped = Exclusions::default().groups([group, TrustGroup::default()]);
        assert_eq!(grouped.reason(&vm).unwrap(), "the configuration excludes the group keys");
        assert_eq!(grouped.reason(&own), None, "a group without a condition is empty");
        let extended = Exclusions::default().programs([glob("tls-proxy-of-ours")]);
        assert!(extended.reason(&key).is_some() && extended.reason(&own).is_some());
    }
}
