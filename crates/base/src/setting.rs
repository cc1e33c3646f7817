//! The values that the kernel accepts for each setting.
//!
//! Follows the `*_store` functions of mm/ksm.c (6.18, verified on a running kernel), with three differences. A boolean
//! may be written in many forms (`kstrtobool`) and is only 0 or 1 here. The kernel accepts `advisor_max_cpu` beyond 32
//! bits and truncates it silently; here it is refused. A `run` of 2 is refused: it unmerges the whole host, even
//! without enough memory. Conditions of the moment are not checked: EBUSY while pages are merged, EINVAL for
//! `pages_to_scan` while the advisor is active.

use crate::ksm::Setting;

/// Check whether a policy may write a value, in the form in which the kernel prints it. The error says which values the
/// setting takes.
pub fn check_setting_value(setting: Setting, value: &str) -> Result<(), String> {
    let check_range = |min: u64, max: u64| {
        // The form in which the kernel prints it, because the two are compared: no sign, no leading zero.
        let is_canonical = value.bytes().all(|byte| byte.is_ascii_digit()) && (value == "0" || !value.starts_with('0'));
        match value.parse::<u64>() {
            Ok(number) if is_canonical && (min..=max).contains(&number) => Ok(()),
            _ if max <= 3 => Err(format!(
                "{} takes {}",
                setting.file_name(),
                (min..=max).map(|number| number.to_string()).collect::<Vec<_>>().join(", ")
            )),
            _ => Err(format!("{} takes a number from {min} to {max}", setting.file_name())),
        }
    };
    match setting {
        Setting::AdvisorMode if matches!(value, "none" | "scan-time") => Ok(()),
        Setting::AdvisorMode => Err("advisor_mode takes \"none\" or \"scan-time\"".to_owned()),
        Setting::AdvisorTargetScanTime => check_range(1, u64::MAX),
        Setting::AdvisorMaxCpu | Setting::PagesToScan | Setting::SleepMillisecs => check_range(0, u64::from(u32::MAX)),
        Setting::AdvisorMinPagesToScan | Setting::AdvisorMaxPagesToScan => check_range(0, u64::MAX),
        Setting::UseZeroPages | Setting::SmartScan | Setting::MergeAcrossNodes => check_range(0, 1),
        Setting::MaxPageSharing => check_range(2, i32::MAX as u64),
        Setting::Run if value == "2" => {
            Err("run takes 0, 1 (2 would unmerge the whole host at once, even without enough memory; \
                 `pagefold unmerge --all` checks that first)"
                .to_owned())
        }
        Setting::Run => check_range(0, 1),
    }
}
