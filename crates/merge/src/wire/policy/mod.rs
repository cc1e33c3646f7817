//! KSM's settings on the wire: what they are, who wrote them, and what each policy would write.

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
    /// What was looked at: `this host` or a recording.
    pub host: String,
    /// The policy that `pagefold policy set` has set and nobody has restored, by its name or file.
    pub policy: Option<String>,
    /// Programs that write KSM's settings again and again, and run.
    pub tuners: Vec<String>,
    /// CPU time of ksmd since boot, in seconds; absent where it cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ksmd_cpu_seconds: Option<f64>,
    /// In the order in which they are written.
    pub settings: Vec<SettingReport>,
    /// Policies whose values could not be told, with why.
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
    /// Why it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub absent: Option<String>,
    /// Who wrote the value.
    pub writer: SettingSource,
    /// What it was before the policy was set, and will be again when it is restored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
    /// What each policy would write now, by the policy's name.
    pub policies: BTreeMap<String, String>,
}

/// Who wrote a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SettingSource {
    /// Nobody that Pagefold knows of: the kernel's default, or somebody by hand.
    Unknown,
    /// The policy that is set.
    Policy,
    /// Somebody else, after the policy was set: `policy restore` will leave it.
    SomebodyElse,
    /// The kernel's advisor, which is on.
    Advisor,
}

/// What a policy has written down of a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedSetting {
    /// What it was before.
    pub value_before: String,
    /// What was written.
    pub written_values: Vec<String>,
}

/// What the report is made of.
#[derive(Clone, Debug)]
pub struct PolicyFacts {
    /// The host, in a few words.
    pub host: String,
    /// The policy that is set.
    pub policy: Option<String>,
    /// Names of programs that tune.
    pub tuners: Vec<String>,
    /// CPU time of ksmd since boot, in seconds.
    pub ksmd_cpu_seconds: Option<f64>,
    /// The settings now.
    pub current: BTreeMap<Setting, Reading<String>>,
    /// What the policy has written down.
    pub recorded: BTreeMap<Setting, RecordedSetting>,
    /// What each policy would write, by its name.
    pub policies: Vec<(String, Reading<Settings>)>,
}

impl PolicyReport {
    /// Put it together.
    pub fn from_facts(facts: &PolicyFacts) -> Self {
        let advised = facts.current.get(&Setting::AdvisorMode) == Some(&Ok("scan-time".to_owned()));
        let settings = facts.current.iter().map(|(&setting, now)| {
            let written = facts.recorded.get(&setting);
            let writer = match (now, written) {
                _ if advised && setting == Setting::PagesToScan => SettingSource::Advisor,
                (Ok(now), Some(written)) if written.written_values.contains(now) => SettingSource::Policy,
                (Ok(now), Some(written)) if written.value_before == *now => SettingSource::Unknown,
                (Ok(_), Some(_)) => SettingSource::SomebodyElse,
                _ => SettingSource::Unknown,
            };
            let value = |(name, settings): &(String, Reading<Settings>)| {
                Some((name.clone(), settings.as_ref().ok()?.get(&setting)?.clone()))
            };
            SettingReport {
                name: setting.file_name(),
                value: now.clone().ok(),
                absent: now.as_ref().err().map(ToString::to_string),
                writer,
                before: written.map(|written| written.value_before.clone()),
                policies: facts.policies.iter().filter_map(value).collect(),
            }
        });
        let unknown =
            |(name, settings): &(String, Reading<Settings>)| Some((name.clone(), settings.as_ref().err()?.to_string()));
        Self {
            schema: "pagefold.policy/1",
            host: facts.host.clone(),
            policy: facts.policy.clone(),
            tuners: facts.tuners.clone(),
            ksmd_cpu_seconds: facts.ksmd_cpu_seconds,
            settings: settings.collect(),
            unknown_policies: facts.policies.iter().filter_map(unknown).collect(),
        }
    }
}

#[cfg(test)]
mod tests;
