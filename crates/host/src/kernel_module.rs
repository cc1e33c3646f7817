//! The kernel modules that Pagefold loads again, and their parameters.
//!
//! A module of KVM that runs no virtual machine can be unloaded and loaded with other parameters. Parameters that the
//! kernel shows as `Y` and `N` (kernel/params.c, `param_get_bool`, 6.18) are held as `1` and `0`, which every kernel
//! accepts for them.

use crate::Host;
use pagefold_base::Reading;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// A module that Pagefold may load again. No other module depends on these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelModule {
    /// KVM on processors of AMD.
    KvmAmd,
    /// KVM on processors of Intel.
    KvmIntel,
}

impl KernelModule {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::KvmAmd, Self::KvmIntel];

    /// The kernel's name of the module.
    pub const fn name(self) -> &'static str {
        match self {
            Self::KvmAmd => "kvm_amd",
            Self::KvmIntel => "kvm_intel",
        }
    }

    /// The module of a name, which may have hyphens instead of underscores as the name of its file does.
    pub fn from_name(name: &str) -> Option<Self> {
        let name = name.replace('-', "_");
        Self::ALL.into_iter().find(|module| module.name() == name)
    }

    /// Whether it is loaded and can be unloaded: a built-in one has parameters but no reference count.
    pub fn is_loaded(self, host: &dyn Host) -> bool {
        host.read(&format!("sys/module/{}/refcnt", self.name())).is_ok()
    }

    /// How many users the module has: virtual machines, and processes that have `/dev/kvm` open.
    ///
    /// # Errors
    /// If it is not loaded, or built in.
    pub fn references(self, host: &dyn Host) -> Reading<u64> {
        let text = host.read(&format!("sys/module/{}/refcnt", self.name()))?;
        let text = String::from_utf8_lossy(&text);
        text.trim().parse().map_err(|_| pagefold_base::Absent::Malformed(format!("refcnt: {:?}", text.trim())))
    }
}

impl fmt::Display for KernelModule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Parameters of a module, by name, with their values as [`normal_parameter_value`] returns them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModuleParameters(pub BTreeMap<String, String>);

impl ModuleParameters {
    /// Reads the present values of the parameters with the names of this set.
    ///
    /// # Errors
    /// If one of them cannot be read.
    pub fn read_current(&self, host: &dyn Host, module: KernelModule) -> Reading<Self> {
        let read = |name: &String| {
            let text = host.read(&format!("sys/module/{module}/parameters/{name}"))?;
            Ok((name.clone(), normal_parameter_value(&String::from_utf8_lossy(&text))))
        };
        self.0.keys().map(read).collect::<Reading<_>>().map(Self)
    }

    /// Whether modprobe(8) can be given all of them: names and values without characters that separate or quote.
    pub fn are_plain(&self) -> bool {
        self.0.iter().all(|(name, value)| is_parameter_name(name) && is_parameter_value(value))
    }
}

/// `npt=0 nested=1`, as modprobe(8) takes them.
impl fmt::Display for ModuleParameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (name, value)) in self.0.iter().enumerate() {
            write!(f, "{}{name}={value}", if i > 0 { " " } else { "" })?;
        }
        Ok(())
    }
}

/// A value as Pagefold compares it: without white space around it, and a truth value as `1` or `0`.
pub fn normal_parameter_value(value: &str) -> String {
    match value.trim() {
        "Y" | "y" => "1".to_owned(),
        "N" | "n" => "0".to_owned(),
        value => value.to_owned(),
    }
}

/// Whether a text can be the name of a parameter.
pub fn is_parameter_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// Whether a text can be the value of a parameter in a file of modprobe.d and on a command line without quotes.
pub fn is_parameter_value(value: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ',' | ':' | '+');
    !value.is_empty() && value.chars().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_host::FakeHost;

    #[test]
    fn parameters_are_read_as_modprobe_takes_them() {
        let host = FakeHost::booted();
        host.put_file("sys/module/kvm_amd/parameters/npt", "Y\n");
        host.put_file("sys/module/kvm_amd/parameters/pause_filter_count", "3000\n");
        host.put_file("sys/module/kvm_amd/refcnt", "2\n");
        let names = ["npt", "pause_filter_count"].map(|name| (name.to_owned(), String::new()));
        let read = ModuleParameters(names.into()).read_current(&host, KernelModule::KvmAmd).unwrap();
        assert_eq!(read.to_string(), "npt=1 pause_filter_count=3000");
        assert_eq!(KernelModule::KvmAmd.references(&host), Ok(2));
        assert!(KernelModule::KvmAmd.is_loaded(&host) && !KernelModule::KvmIntel.is_loaded(&host));
        assert_eq!(KernelModule::from_name("kvm-intel"), Some(KernelModule::KvmIntel));
        assert_eq!(KernelModule::from_name("kvm"), None);
    }

    #[test]
    fn parameters_with_separators_are_not_plain() {
        let parameters = |name: &str, value: &str| ModuleParameters([(name.to_owned(), value.to_owned())].into());
        assert!(parameters("npt", "0").are_plain() && parameters("ple_gap", "128").are_plain());
        for (name, value) in
            [("", "0"), ("npt", ""), ("npt", "0 nested=1"), ("n pt", "0"), ("npt", "\"0"), ("npt", "0\n")]
        {
            assert!(!parameters(name, value).are_plain(), "{name:?}={value:?}");
        }
    }
}
