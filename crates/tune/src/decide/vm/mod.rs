//! Changes definitions of virtual machines: libvirt's XML ([`xml`]) or the arguments of QEMU ([`arguments`]).
//!
//! Both are pure functions from a definition and an option to a new definition. All other parts of the definition stay
//! as they are, byte for byte. An option that the definition has already changes nothing; one that it cannot have is
//! refused with the reason.

pub mod arguments;
pub mod xml;

use super::MachineState;
use pagefold_doctor::decide::change::{VmOption, node_list};
use similar::TextDiff;

/// Lines around a change in a diff.
const CONTEXT_LINES: usize = 3;

/// The changed definition of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Patch {
    /// libvirt's persistent definition.
    Libvirt {
        /// Before.
        before: String,
        /// After.
        after: String,
    },
    /// The arguments of QEMU, for a machine that a script starts.
    Arguments {
        /// Before.
        before: Vec<String>,
        /// After.
        after: Vec<String>,
    },
}

impl Patch {
    /// The definition of a machine without changes.
    pub fn begin(machine: &MachineState) -> Self {
        match &machine.libvirt_xml {
            Some(xml) => Self::Libvirt { before: xml.clone(), after: xml.clone() },
            None => Self::Arguments { before: machine.arguments.clone(), after: machine.arguments.clone() },
        }
    }

    /// Applies an option. Returns whether the definition changes.
    ///
    /// # Errors
    /// Why the definition cannot have it, and what to do instead.
    pub fn add(&mut self, option: &VmOption) -> Result<bool, String> {
        match self {
            Self::Libvirt { after, .. } => {
                let changed = xml::set_option(after, option)?;
                let is_changed = changed != *after;
                *after = changed;
                Ok(is_changed)
            }
            Self::Arguments { after, .. } => {
                let changed = arguments::set_option(after, option)?;
                let is_changed = changed != *after;
                *after = changed;
                Ok(is_changed)
            }
        }
    }

    /// The change as a unified diff; arguments have a line each.
    pub fn diff(&self, name: &str) -> String {
        let (before, after) = match self {
            Self::Libvirt { before, after } => (before.clone(), after.clone()),
            Self::Arguments { before, after } => (argument_lines(before), argument_lines(after)),
        };
        let diff = TextDiff::from_lines(&before, &after);
        let mut unified = diff.unified_diff();
        unified.context_radius(CONTEXT_LINES).header(&format!("{name} (now)"), &format!("{name} (tuned)")).to_string()
    }
}

/// A line for each argument, as a shell takes it. Line breaks inside an argument stay within its quotes.
fn argument_lines(arguments: &[String]) -> String {
    arguments.iter().map(|argument| quote_for_shell(argument) + "\n").collect()
}

/// An argument as a shell takes it.
pub fn quote_for_shell(argument: &str) -> String {
    let is_plain =
        |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ',' | '=' | ':' | '/' | '+' | '@' | '%');
    if !argument.is_empty() && argument.chars().all(is_plain) {
        return argument.to_owned();
    }
    format!("'{}'", argument.replace('\'', "'\\''"))
}

/// An option as a phrase.
pub fn describe_option(option: &VmOption) -> String {
    let state = |enable: bool| if enable { "on" } else { "off" };
    match option {
        VmOption::HostCpuModel => "the CPU model of the host".to_owned(),
        VmOption::CpuFeature { name, enable } => format!("CPU feature {name} {}", state(*enable)),
        VmOption::HyperVSpinlocks { retries } => format!("CPU feature hv-spinlocks={retries:#x}"),
        VmOption::CpuPowerManagement { enable } => {
            format!("power states under control of the guest {}", state(*enable))
        }
        VmOption::VirtualNodes { host_nodes } => {
            format!("{} virtual nodes on the host nodes {}", host_nodes.len(), node_list(host_nodes))
        }
        VmOption::MergeableMemory => "memory that KSM can merge".to_owned(),
        VmOption::DiskCacheNone { disk } => format!("no host cache for disk {disk}"),
        VmOption::DiskAio { disk, interface } => format!("aio={interface} for disk {disk}"),
        VmOption::DiskIoThreads { disk, count } => format!("{count} iothreads for disk {disk}"),
        VmOption::VhostNet { network } => format!("vhost for network {network}"),
        VmOption::NetworkQueues { network, count } => format!("{count} queues for network {network}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn diff_shows_changed_lines_with_context() {
        let machine = MachineState {
            name: "web".to_owned(),
            libvirt_xml: None,
            arguments: ["qemu", "-m", "1G", "-cpu", "qemu64", "-name", "a b"].map(str::to_owned).to_vec(),
        };
        let mut patch = Patch::begin(&machine);
        assert_eq!(patch.add(&VmOption::HostCpuModel), Ok(true));
        assert_eq!(patch.add(&VmOption::HostCpuModel), Ok(false));
        assert_eq!(
            patch.diff("web"),
            "--- web (now)\n+++ web (tuned)\n@@ -2,6 +2,6 @@\n -m\n 1G\n -cpu\n-qemu64\n+host\n -name\n 'a b'\n"
        );
    }

    #[test]
    fn arguments_are_quoted_for_a_shell() {
        assert_eq!(quote_for_shell("a,b=c"), "a,b=c");
        assert_eq!(quote_for_shell("a'b $c"), "'a'\\''b $c'");
        assert_eq!(quote_for_shell(""), "''");
    }
}
