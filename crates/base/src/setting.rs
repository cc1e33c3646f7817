//! Which values the kernel takes for a setting.
//!
//! As the `*_store` functions of mm/ksm.c decide (6.18, tried on the running kernel). Three differences: a boolean may
//! be written in many ways (`kstrtobool`) and is 0 or 1 here; `advisor_max_cpu` beyond 32 bits is taken and silently
//! cut, which is refused here; and so is a `run` of 2, which is no pace: it unmerges the whole host, room or none. What
//! depends on the moment is not judged: EBUSY while pages are merged, EINVAL for `pages_to_scan` while the advisor is
//! on.

use crate::ksm::Setting;

/// Whether a policy may write a value, as the kernel prints it back; otherwise what the setting takes.
pub fn check_setting_value(setting: Setting, value: &str) -> Result<(), String> {
    let within = |least: u64, most: u64| {
        // As the kernel prints it back, since that is compared: no sign, no leading zero.
        let plain = value.bytes().all(|byte| byte.is_ascii_digit()) && (value == "0" || !value.starts_with('0'));
        match value.parse::<u64>() {
            Ok(number) if plain && (least..=most).contains(&number) => Ok(()),
            _ if most <= 3 => Err(format!(
                "{} takes {}",
                setting.file_name(),
                (least..=most).map(|n| n.to_string()).collect::<Vec<_>>().join(", ")
            )),
            _ => Err(format!("{} takes a number from {least} to {most}", setting.file_name())),
        }
    };
    match setting {
        Setting::AdvisorMode if matches!(value, "none" | "scan-time") => Ok(()),
        Setting::AdvisorMode => Err("advisor_mode takes \"none\" or \"scan-time\"".to_owned()),
        Setting::AdvisorTargetScanTime => within(1, u64::MAX),
        Setting::AdvisorMaxCpu | Setting::PagesToScan | Setting::SleepMillisecs => within(0, u64::from(u32::MAX)),
        Setting::AdvisorMinPagesToScan | Setting::AdvisorMaxPagesToScan => within(0, u64::MAX),
        Setting::UseZeroPages | Setting::SmartScan | Setting::MergeAcrossNodes => within(0, 1),
        Setting::MaxPageSharing => within(2, i32::MAX as u64),
        Setting::Run if value == "2" => {
            Err("run takes 0, 1; 2 would unmerge the whole host at once, whether there is \
                                             memory for it or not: `pagefold unmerge --all` looks first"
                .to_owned())
        }
        Setting::Run => within(0, 1),
    }
}
