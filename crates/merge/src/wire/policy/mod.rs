//! KSM's settings on the wire: their values, their sources, and the values that each policy would write.

use pagefold_base::Reading;
use pagefold_base::ksm::{Setting, Settings};
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

/// The result of `pagefold policy`.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct PolicyReport {
    /// `pagefold.policy/1`.
    pub schema: &'static str,
    /// The host: `this host` or a recording.
    pub host: String,
    /// The policy that `pagefold policy set` has set and no command has restored, by its name or file.
    pub policy: Option<String>,
    /// Running programs that write KSM's settings repeatedly.
    pub tuners: Vec<String>,
    /// CPU time of ksmd since boot, in seconds; absent where it cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ksmd_cpu_seconds: Option<f64>,
    /// The settings, in the order in which they are written.
    pub settings: Vec<SettingReport>,
    /// Policies whose values are unknown, with the reason.
    pub unknown_policies: BTreeMap<String, String>,
}

/// A file of `/sys/kernel/mm/ksm`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct SettingReport {
    /// Its name.
    pub name: &'static str,
    /// Its value now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// Why there is no value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub absent: Option<String>,
    /// The source of the value.
    pub source: SettingSource,
    /// Its value before the policy was set, which a restore writes again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value_before_policy: Option<String>,
    /// The value that each policy would write now, by the policy's name.
    pub policies: BTreeMap<String, String>,
}

/// The source of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SettingSource {
    /// Not known to Pagefold: the kernel's default, or an operator by hand.
    Unknown,
    /// The policy that is set.
    Policy,
    /// Another program, after the policy was set: `policy restore` will leave it.
    OtherProgram,
    /// The kernel's advisor, which is on.
    Advisor,
}

/// A policy's record of a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedSetting {
    /// The value before.
    pub value_before: String,
    /// The written values.
    pub written_values: Vec<String>,
}

/// The input of the report.
#[derive(Clone, Debug)]
pub struct PolicyFacts {
    /// The host, in a few words.
    pub host: String,
    /// The policy that is set.
    pub policy: Option<String>,
    /// Names of running tuners.
    pub tuners: Vec<String>,
    /// CPU time of ksmd since boot, in seconds.
    pub ksmd_cpu_seconds: Option<f64>,
    /// The settings now.
    pub current: BTreeMap<Setting, Reading<String>>,
    /// The policy's record of each setting.
    pub recorded: BTreeMap<Setting, RecordedSetting>,
    /// The settings that each policy would write, by its name.
    pub policies: Vec<(String, Reading<Settings>)>,
}

impl PolicyReport {
    /// Create the report.
    pub fn from_facts(facts: &PolicyFacts) -> Self {
        let advisor_is_on = facts.current.get(&Setting::AdvisorMode) == Some(&Ok("scan-time".to_owned()));
        let settings = facts.current.iter().map(|(&setting, current)| {
            let recorded = facts.recorded.get(&setting);
            let source = match (current, recorded) {
                _ if advisor_is_on && setting == Setting::PagesToScan => SettingSource::Advisor,
                (Ok(current), Some(recorded)) if recorded.written_values.contains(current) => SettingSource::Policy,
                (Ok(current), Some(recorded)) if recorded.value_before == *current => SettingSource::Unknown,
                (Ok(_), Some(_)) => SettingSource::OtherProgram,
                _ => SettingSource::Unknown,
            };
            let value = |(name, settings): &(String, Reading<Settings>)| {
                Some((name.clone(), settings.as_ref().ok()?.get(&setting)?.clone()))
            };
            SettingReport {
                name: setting.file_name(),
                value: current.clone().ok(),
                absent: current.as_ref().err().map(ToString::to_string),
                source,
                value_before_policy: recorded.map(|recorded| recorded.value_before.clone()),
                policies: facts.policies.iter().filter_map(value).collect(),
            }
        });
        let unknown_policy =
            |(name, settings): &(String, Reading<Settings>)| Some((name.clone(), settings.as_ref().err()?.to_string()));
        Self {
            schema: "pagefold.policy/1",
            host: facts.host.clone(),
            policy: facts.policy.clone(),
            tuners: facts.tuners.clone(),
            ksmd_cpu_seconds: facts.ksmd_cpu_seconds,
            settings: settings.collect(),
            unknown_policies: facts.policies.iter().filter_map(unknown_policy).collect(),
        }
    }
}

#[cfg(test)]
mod tests;
