//! What programs change on a simulated host: settings of KSM, and advice about memory. See also [`super::placement`].

use crate::decide::host_state::{HostState, PAGE_BYTES};
use crate::decide::ksmd::{Advice, KsmSettings, RunState};
use pagefold_base::ksm::Setting;
use pagefold_base::setting::check_setting_value;
use pagefold_base::{AddressRange, Pid, ProcessId};
use pagefold_host::action::{ActionError, ActionOutcome, MergeAdvice, MissedReason};
use std::time::Duration;

/// How long a thread of a process is stopped to give advice within it.
pub(super) const STOP_TIME: Duration = Duration::from_micros(100);

/// Whether a write waits until ksmd's batch ends (`ksm_thread_mutex` in mm/ksm.c).
pub(super) fn waits_for_batch(setting: Setting) -> bool {
    matches!(setting, Setting::Run | Setting::MaxPageSharing | Setting::MergeAcrossNodes)
}

impl HostState<'_> {
    /// Write a setting of KSM, with the kernel's checks.
    pub(super) fn write_setting(&mut self, setting: Setting, value: &str) -> Result<(), ActionError> {
        let name = setting.file_name();
        let invalid = || ActionError::Failed(format!("writing {value} to {name}: Invalid argument"));
        let is_unmerging = setting == Setting::Run && value == "2";
        if !is_unmerging && check_setting_value(setting, value).is_err() {
            return Err(invalid());
        }
        let number = value.parse::<u64>().unwrap_or_default();
        let is_on = number == 1;
        let mut settings = *self.model.settings();
        match setting {
            Setting::Run => {
                self.model.write_run(match number {
                    0 => RunState::Stopped,
                    1 => RunState::Merging,
                    _ => RunState::Unmerged,
                });
                return Ok(());
            }
            Setting::PagesToScan if settings.advisor.is_some() => return Err(invalid()),
            Setting::PagesToScan => settings.pages_to_scan = number,
            Setting::SleepMillisecs => settings.sleep_millisecs = number,
            Setting::UseZeroPages => settings.use_zero_pages = is_on,
            Setting::SmartScan => settings.smart_scan = is_on,
            Setting::MergeAcrossNodes => settings.merge_across_nodes = is_on,
            Setting::MaxPageSharing => settings.max_page_sharing = number as usize,
            Setting::AdvisorMode => settings.advisor = (value == "scan-time").then_some(self.advisor),
            Setting::AdvisorTargetScanTime => self.advisor.target_scan_time = number,
            Setting::AdvisorMaxCpu => self.advisor.max_cpu = number,
            Setting::AdvisorMinPagesToScan => self.advisor.min_pages_to_scan = number,
            Setting::AdvisorMaxPagesToScan => self.advisor.max_pages_to_scan = number,
        }
        settings.advisor = settings.advisor.map(|_| self.advisor);
        self.write_settings(settings, || format!("writing {value} to {name}: Device or resource busy"))
    }

    fn write_settings(&mut self, settings: KsmSettings, what: impl Fn() -> String) -> Result<(), ActionError> {
        if self.model.write_settings(settings) { Ok(()) } else { Err(ActionError::Busy(what())) }
    }

    /// The process with this number and start.
    pub(super) fn living(&self, process: ProcessId) -> Result<Pid, ActionError> {
        let found = self.processes.get(&process.pid).filter(|found| found.start_ticks == process.start_time);
        found.map(|_| process.pid).ok_or(ActionError::Vanished)
    }

    /// Give advice about ranges.
    pub(super) fn advise(
        &mut self,
        process: ProcessId,
        advice: MergeAdvice,
        ranges: &[AddressRange],
    ) -> Result<ActionOutcome, ActionError> {
        let pid = self.living(process)?;
        let mut outcome = ActionOutcome { stop_durations: vec![STOP_TIME], ..ActionOutcome::default() };
        let advice = match advice {
            MergeAdvice::Mergeable => Advice::Mergeable,
            MergeAdvice::Unmergeable => Advice::Unmergeable,
        };
        let model_id = self.processes[&pid].model_id;
        for &range in ranges {
            let (start, end) = (range.start / PAGE_BYTES, range.end.div_ceil(PAGE_BYTES));
            let vmas = &self.model.memory().process(model_id).vmas;
            let covered = |vma: &crate::decide::memory::Vma| vma.end().min(end).saturating_sub(vma.start.max(start));
            match vmas.values().map(covered).sum::<u64>() {
                0 => outcome.missed_ranges.push((range, MissedReason::NotMapped)),
                pages => {
                    if pages < end - start {
                        outcome.missed_ranges.push((range, MissedReason::PartlyNotMapped));
                    }
                    self.model.advise(model_id, start, end - start, advice);
                }
            }
        }
        Ok(outcome)
    }

    /// Enroll a process whole, or unenroll it (`ksm_enable_merge_any`, `ksm_disable_merge_any`).
    pub(super) fn merge_any(&mut self, process: ProcessId, enable: bool) -> Result<ActionOutcome, ActionError> {
        let pid = self.living(process)?;
        self.advise_all(pid, if enable { Advice::Mergeable } else { Advice::Unmergeable });
        self.processes.entry(pid).and_modify(|process| process.merges_any = enable);
        Ok(ActionOutcome { stop_durations: vec![STOP_TIME], ..ActionOutcome::default() })
    }
}
