//! Profiles: what a host is for. A profile replaces or drops some changes that findings ask for, and adds a few.
//!
//! Values and sources: the halt polling of KVM has 200,000 ns as its default and grows from 10,000 ns
//! (Documentation/virt/kvm/halt-polling.rst, Linux 6.18); polling ends when another task waits for the CPU
//! (virt/kvm/kvm_main.c, `kvm_vcpu_can_poll`). `performance` is the governor of tuned's `throughput-performance` and
//! `latency-performance` (2.24). `swappiness` 10 is tuned's value for virtual hosts (`virtual-host`).

use super::{KSM_RUN_PATH, Proposal};
use pagefold_doctor::decide::change::{SettingChange, VmOption};
use std::collections::BTreeMap;
use std::fmt;

/// What a host is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Profile {
    /// As much work as possible, with CPUs that are not over-committed.
    Throughput,
    /// Short and even response times.
    Latency,
    /// As many machines as possible.
    Density,
    /// Databases: buffer pools stay in memory, and in huge or shared memory.
    Database,
    /// Many short jobs on machines with one image.
    Htc,
}

impl Profile {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Throughput, Self::Latency, Self::Density, Self::Database, Self::Htc];

    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Throughput => "throughput",
            Self::Latency => "latency",
            Self::Density => "density",
            Self::Database => "database",
            Self::Htc => "htc",
        }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a profile does with a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProfileDecision {
    /// It stays.
    Keep,
    /// Another value is set, for this reason.
    Replace(SettingChange, &'static str),
    /// It is not made, for this reason.
    Drop(&'static str),
}

const HALT_POLL: &str = "sys/module/kvm/parameters/halt_poll_ns";
const SWAPPINESS: &str = "proc/sys/vm/swappiness";
const ACROSS_NODES: &str = "sys/kernel/mm/ksm/merge_across_nodes";

/// The settings that a profile sets wherever the host has them: the path as a pattern, the value, and the reason.
pub fn settings(profile: Profile) -> &'static [(&'static str, &'static str, &'static str)] {
    const PERFORMANCE: (&str, &str, &str) = (
        "sys/devices/system/cpu/cpufreq/policy*/scaling_governor",
        "performance",
        "CPUs run at full frequency without a delay to raise it",
    );
    const DEFAULT_POLL: (&str, &str, &str) =
        (HALT_POLL, "200000", "an idle vCPU waits a while for its next event, and then wakes without the scheduler");
    match profile {
        Profile::Throughput => &[PERFORMANCE, DEFAULT_POLL],
        Profile::Latency => &[
            PERFORMANCE,
            DEFAULT_POLL,
            (KSM_RUN_PATH, "0", "ksmd takes no CPU time, and no new page gets a delay at its next write"),
        ],
        Profile::Density => &[
            (HALT_POLL, "10000", "an idle vCPU leaves its CPU to other machines"),
            (KSM_RUN_PATH, "1", "ksmd merges equal pages of the machines"),
        ],
        Profile::Database => &[(SWAPPINESS, "10", "buffer pools of guests stay in memory")],
        Profile::Htc => &[
            DEFAULT_POLL,
            (KSM_RUN_PATH, "1", "machines of one image have equal pages; `pagefold daemon` finds them by guided scans"),
        ],
    }
}

/// The paths that a profile may set, as patterns: `*` stands for any characters within one component.
pub fn setting_patterns(profile: Profile) -> impl Iterator<Item = &'static str> {
    settings(profile).iter().map(|(path, ..)| *path)
}

/// What a profile itself asks for on a host with these settings.
pub fn proposals(profile: Profile, present: &BTreeMap<String, Result<String, String>>) -> Vec<Proposal> {
    let mut found = Vec::new();
    for (pattern, value, reason) in settings(profile) {
        let paths = present.iter().filter(|(path, value)| value.is_ok() && matches_pattern(pattern, path));
        let changes: Vec<SettingChange> =
            paths.map(|(path, _)| SettingChange::Write { path: path.clone(), value: (*value).to_owned() }).collect();
        if !changes.is_empty() {
            found.push(Proposal {
                rule: format!("profile-{profile}"),
                title: format!("the profile {profile} sets {} to {value}", short_name(pattern)),
                why: (*reason).to_owned(),
                details: None,
                changes,
            });
        }
    }
    found
}

/// The end of a path, which people know: `ksm/run`, `kvm/halt_poll_ns`.
fn short_name(path: &str) -> String {
    let components: Vec<&str> = path.split('/').filter(|component| *component != "parameters").collect();
    components[components.len().saturating_sub(2)..].join("/")
}

/// Whether a path has the form of a pattern.
pub fn matches_pattern(pattern: &str, path: &str) -> bool {
    pattern.split('/').count() == path.split('/').count()
        && pattern.split('/').zip(path.split('/')).all(|(pattern, name)| match pattern.split_once('*') {
            None => pattern == name,
            Some((start, end)) => {
                name.len() > start.len() + end.len() && name.starts_with(start) && name.ends_with(end)
            }
        })
}

/// What a profile does with a change that a finding asks for.
pub fn judge(profile: Option<Profile>, rule: &str, change: &SettingChange) -> ProfileDecision {
    let Some(profile) = profile.filter(|_| !rule.starts_with("profile-")) else { return ProfileDecision::Keep };
    match change {
        SettingChange::Write { path, value } => judge_write(profile, path, value),
        SettingChange::ModuleParameter { module, parameter, value } => {
            judge_parameter(profile, module, parameter, value)
        }
        SettingChange::VmDefinition { option, .. } => judge_option(profile, option),
        SettingChange::BootParameter { .. } => ProfileDecision::Keep,
    }
}

fn judge_write(profile: Profile, path: &str, value: &str) -> ProfileDecision {
    if let Some((_, wanted, reason)) = settings(profile).iter().find(|(pattern, ..)| matches_pattern(pattern, path)) {
        if *wanted == value {
            return ProfileDecision::Keep;
        }
        return ProfileDecision::Replace(
            SettingChange::Write { path: path.to_owned(), value: (*wanted).to_owned() },
            reason,
        );
    }
    match profile {
        Profile::Latency if path == ACROSS_NODES && value == "1" => ProfileDecision::Drop(
            "a page merged with one on another node is read from there: the profile latency keeps 0",
        ),
        _ => ProfileDecision::Keep,
    }
}

fn judge_parameter(profile: Profile, module: &str, parameter: &str, value: &str) -> ProfileDecision {
    let is_pause_exit = parameter.starts_with("ple_") || parameter.starts_with("pause_filter_");
    let defaults =
        [("ple_gap", "128"), ("ple_window", "4096"), ("pause_filter_thresh", "128"), ("pause_filter_count", "3000")];
    // arch/x86/kvm/svm/svm.c and vmx/vmx.c, `KVM_DEFAULT_PLE_GAP` and its neighbors in x86.h (6.18).
    match defaults.iter().find(|(name, _)| *name == parameter) {
        Some((_, default)) if profile == Profile::Htc && is_pause_exit && value != *default => {
            ProfileDecision::Replace(
                SettingChange::ModuleParameter {
                    module: module.to_owned(),
                    parameter: parameter.to_owned(),
                    value: (*default).to_owned(),
                },
                "short jobs on over-committed CPUs need exits on spinning at the default rate",
            )
        }
        _ => ProfileDecision::Keep,
    }
}

fn judge_option(profile: Profile, option: &VmOption) -> ProfileDecision {
    match (profile, option) {
        (Profile::Density | Profile::Htc, VmOption::CpuPowerManagement { enable: true }) => ProfileDecision::Drop(
            "a guest that keeps its CPU while idle leaves none to other machines: this profile shares CPUs",
        ),
        (Profile::Latency | Profile::Database, VmOption::MergeableMemory) => {
            ProfileDecision::Drop("this profile keeps huge and shared memory, which KSM does not merge")
        }
        _ => ProfileDecision::Keep,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &str, value: &str) -> SettingChange {
        SettingChange::Write { path: path.to_owned(), value: value.to_owned() }
    }

    #[test]
    fn profile_replaces_the_value_of_a_finding() {
        let poll = write(HALT_POLL, "50000");
        assert_eq!(judge(None, "halt-poll", &poll), ProfileDecision::Keep);
        for (profile, value) in [(Profile::Density, "10000"), (Profile::Latency, "200000"), (Profile::Htc, "200000")] {
            let ProfileDecision::Replace(change, _) = judge(Some(profile), "halt-poll", &poll) else {
                panic!("{profile}")
            };
            assert_eq!(change, write(HALT_POLL, value));
        }
        assert_eq!(judge(Some(Profile::Database), "halt-poll", &poll), ProfileDecision::Keep);
        assert_eq!(judge(Some(Profile::Density), "halt-poll", &write(HALT_POLL, "10000")), ProfileDecision::Keep);
    }

    #[test]
    fn profile_drops_options_that_contradict_it() {
        let option = |option| SettingChange::VmDefinition {
            vm: pagefold_base::ProcessId { pid: pagefold_base::Pid(1), start_time: 1 },
            option,
        };
        let power = option(VmOption::CpuPowerManagement { enable: true });
        assert!(matches!(judge(Some(Profile::Density), "cpu-pm", &power), ProfileDecision::Drop(_)));
        assert_eq!(judge(Some(Profile::Latency), "cpu-pm", &power), ProfileDecision::Keep);
        let mergeable = option(VmOption::MergeableMemory);
        assert!(matches!(judge(Some(Profile::Database), "memory", &mergeable), ProfileDecision::Drop(_)));
        assert_eq!(judge(Some(Profile::Density), "memory", &mergeable), ProfileDecision::Keep);
    }

    #[test]
    fn htc_restores_the_default_of_pause_exits() {
        let parameter = |value: &str| SettingChange::ModuleParameter {
            module: "kvm_intel".to_owned(),
            parameter: "ple_window".to_owned(),
            value: value.to_owned(),
        };
        let judged = judge(Some(Profile::Htc), "ple", &parameter("0"));
        assert!(matches!(&judged, ProfileDecision::Replace(change, _) if *change == parameter("4096")), "{judged:?}");
        assert_eq!(judge(Some(Profile::Throughput), "ple", &parameter("0")), ProfileDecision::Keep);
    }

    #[test]
    fn profile_adds_settings_that_the_host_has() {
        let governor = |policy: u32| format!("sys/devices/system/cpu/cpufreq/policy{policy}/scaling_governor");
        let present = [(governor(0), Ok("powersave".to_owned())), (governor(1), Err("absent".to_owned()))].into();
        let [proposal] = &proposals(Profile::Throughput, &present)[..] else { panic!() };
        assert_eq!(proposal.changes, [write(&governor(0), "performance")]);
        assert_eq!(proposals(Profile::Throughput, &BTreeMap::new()), []);
    }
}
