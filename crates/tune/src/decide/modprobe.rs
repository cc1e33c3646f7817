//! The text of the modprobe.d file that Pagefold writes.

use std::collections::BTreeMap;

/// The file, below the root. modprobe(8) reads files in the order of their names, and a later value of a parameter
/// wins; Debian's `qemu-system-x86.conf` sets `nested`, for example.
pub const MODULE_FILE: &str = "etc/modprobe.d/zz-pagefold.conf";

const HEADER: &str = "# Written by `pagefold tune`; `pagefold tune undo` restores the previous file.\n";

/// Parameters of modules, in the order of their names.
pub type ModuleOptions = BTreeMap<String, BTreeMap<String, String>>;

/// Adds parameters of a module to the text of a file, in place of earlier values of the same parameters. All other
/// lines stay.
pub fn set_parameters(text: Option<&str>, module: &str, parameters: &BTreeMap<String, String>) -> String {
    let mut all = parameters.clone();
    let mut kept = String::new();
    for line in text.unwrap_or(HEADER).lines() {
        match parse_options(line) {
            Some((named, options)) if normal_name(named) == normal_name(module) => {
                for (name, value) in options {
                    all.entry(name.to_owned()).or_insert_with(|| value.to_owned());
                }
            }
            _ => {
                kept.push_str(line);
                kept.push('\n');
            }
        }
    }
    let words: Vec<String> = all.iter().map(|(name, value)| format!("{name}={value}")).collect();
    kept + &format!("options {module} {}\n", words.join(" "))
}

/// The module and the parameters of a line `options MODULE NAME=VALUE ...`.
pub fn parse_options(line: &str) -> Option<(&str, Vec<(&str, &str)>)> {
    let mut words = line.split('#').next()?.split_ascii_whitespace();
    let (Some("options"), Some(module)) = (words.next(), words.next()) else { return None };
    // A parameter without a value is a truth value (kernel/params.c, `param_set_bool`).
    Some((module, words.map(|word| word.split_once('=').unwrap_or((word, "1"))).collect()))
}

/// The name of a module with underscores, as sysfs has it; files of modprobe.d may have hyphens.
pub fn normal_name(module: &str) -> String {
    module.replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn parameters_join_those_of_the_same_module_and_keep_other_lines() {
        let first = set_parameters(None, "kvm_amd", &parameters(&[("npt", "1")]));
        assert_eq!(first, format!("{HEADER}options kvm_amd npt=1\n"));
        let old = "# mine\noptions kvm-amd nested=0 npt=0\noptions kvm ignore_msrs=1\nblacklist pcspkr\n";
        assert_eq!(
            set_parameters(Some(old), "kvm_amd", &parameters(&[("npt", "1")])),
            "# mine\noptions kvm ignore_msrs=1\nblacklist pcspkr\noptions kvm_amd nested=0 npt=1\n"
        );
    }

    #[test]
    fn options_line_is_parsed() {
        assert_eq!(
            parse_options("options kvm_intel nested=1 ept # x=2"),
            Some(("kvm_intel", vec![("nested", "1"), ("ept", "1")]))
        );
        for line in ["", "# options a b=1", "blacklist kvm", "options"] {
            assert_eq!(parse_options(line), None, "{line:?}");
        }
    }
}
