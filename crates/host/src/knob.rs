//! The kernel settings that Pagefold writes, as a table: where each is and how it behaves.
//!
//! [`crate::transaction`] and the adapters know of a setting only what its row says, so a new setting is a new row.
//! The rows of KSM mirror the `*_store` and `*_show` functions of mm/ksm.c (6.18).

use crate::resource::ResourceClass;
use crate::{Host, parse};
use pagefold_base::Reading;
use pagefold_base::ksm::Setting;
use std::fmt;

/// A kernel setting: a row of the table. Knobs are ordered as the kernel accepts their values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Knob(usize);

/// A row of the table.
struct KnobRow {
    /// The path below the root.
    path: &'static str,
    /// Whose lock a change needs.
    class: ResourceClass,
    /// A value that must not be written again to restore it, and the value that has the same effect.
    restored_as: Option<(&'static str, &'static str)>,
    /// The path of a setting that the kernel resets when this one changes, and the value it gets.
    resets: Option<(&'static str, &'static str)>,
    /// The path of another setting, and its value with which the kernel itself changes this one.
    changed_by_kernel_while: Option<(&'static str, &'static str)>,
    /// The kernel that has it, for the message that it is missing.
    requirement: &'static str,
}

const KSM: &str = "a kernel with CONFIG_KSM is needed";
const KSM_ADVISOR: &str = "Linux 6.8 or later with CONFIG_KSM is needed";

/// A setting of KSM without quirks.
const fn plain(path: &'static str, requirement: &'static str) -> KnobRow {
    let class = ResourceClass::Ksm;
    KnobRow { path, class, restored_as: None, resets: None, changed_by_kernel_while: None, requirement }
}

/// Another setting without quirks.
const fn general(path: &'static str, requirement: &'static str) -> KnobRow {
    KnobRow { class: ResourceClass::Settings, ..plain(path, requirement) }
}

/// The settings of KSM, in the order of [`Setting::ALL`], then all others.
static KNOBS: &[KnobRow] = &[
    KnobRow {
        // `set_advisor_defaults`
        resets: Some(("sys/kernel/mm/ksm/pages_to_scan", "100")),
        ..plain("sys/kernel/mm/ksm/advisor_mode", KSM_ADVISOR)
    },
    plain("sys/kernel/mm/ksm/advisor_target_scan_time", KSM_ADVISOR),
    plain("sys/kernel/mm/ksm/advisor_max_cpu", KSM_ADVISOR),
    plain("sys/kernel/mm/ksm/advisor_min_pages_to_scan", KSM_ADVISOR),
    plain("sys/kernel/mm/ksm/advisor_max_pages_to_scan", KSM_ADVISOR),
    KnobRow {
        // The advisor sets it after each scan.
        changed_by_kernel_while: Some(("sys/kernel/mm/ksm/advisor_mode", "scan-time")),
        ..plain("sys/kernel/mm/ksm/pages_to_scan", KSM)
    },
    plain("sys/kernel/mm/ksm/sleep_millisecs", KSM),
    plain("sys/kernel/mm/ksm/use_zero_pages", KSM),
    plain("sys/kernel/mm/ksm/smart_scan", "Linux 6.7 or later with CONFIG_KSM is needed"),
    plain("sys/kernel/mm/ksm/max_page_sharing", KSM),
    plain("sys/kernel/mm/ksm/merge_across_nodes", "a kernel with CONFIG_KSM and CONFIG_NUMA is needed"),
    KnobRow {
        // After all pages were unmerged, `run` reads as 2, and ksmd is stopped as with 0. Writing 2 would unmerge all
        // pages again (`run_store`).
        restored_as: Some(("2", "0")),
        ..plain("sys/kernel/mm/ksm/run", KSM)
    },
    // mm/huge_memory.c, `enabled_show`: a choice.
    general("sys/kernel/mm/transparent_hugepage/enabled", "a kernel with CONFIG_TRANSPARENT_HUGEPAGE is needed"),
    // kernel/sched/core.c, `sysctl_numa_balancing`: 0 off, 1 on, 2 memory tiering.
    general("proc/sys/kernel/numa_balancing", "a kernel with CONFIG_NUMA_BALANCING is needed"),
];

impl From<Setting> for Knob {
    fn from(setting: Setting) -> Self {
        Self(setting as usize)
    }
}

impl Knob {
    /// The knob of a path below the root: `sys/kernel/mm/ksm/run`.
    pub fn from_path(path: &str) -> Option<Self> {
        KNOBS.iter().position(|row| row.path == path).map(Self)
    }

    /// Its path below the root.
    pub fn path(self) -> &'static str {
        self.row().path
    }

    /// The name of its file.
    pub fn name(self) -> &'static str {
        self.path().rsplit('/').next().unwrap_or_default()
    }

    /// The class whose lock a change needs.
    pub fn class(self) -> ResourceClass {
        self.row().class
    }

    /// The setting of KSM that it is, if it is one.
    pub fn ksm_setting(self) -> Option<Setting> {
        Setting::ALL.get(self.0).copied()
    }

    /// The kernel that has it, for the message that it is missing.
    pub fn requirement(self) -> &'static str {
        self.row().requirement
    }

    /// The value to write to restore `value`, which was read.
    pub fn restorable_value(self, value: String) -> String {
        match self.row().restored_as {
            Some((reported, restored)) if value == reported => restored.to_owned(),
            _ => value,
        }
    }

    /// A setting that the kernel resets when this one changes, and the value it gets.
    pub fn resets(self) -> Option<(Self, &'static str)> {
        self.row().resets.and_then(Self::resolve)
    }

    /// Another setting, and its value with which the kernel itself changes this one.
    pub fn changed_by_kernel_while(self) -> Option<(Self, &'static str)> {
        self.row().changed_by_kernel_while.and_then(Self::resolve)
    }

    /// Reads its value: the bracketed word of a choice, otherwise the whole text.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read(self, host: &dyn Host) -> Reading<String> {
        let bytes = host.read(self.path())?;
        Ok(parse::bracketed_word(&bytes).unwrap_or_else(|_| String::from_utf8_lossy(&bytes).trim().to_owned()))
    }

    fn row(self) -> &'static KnobRow {
        &KNOBS[self.0]
    }

    fn resolve((path, value): (&'static str, &'static str)) -> Option<(Self, &'static str)> {
        Some((Self::from_path(path)?, value))
    }
}

/// The absolute path.
impl fmt::Display for Knob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/{}", self.path())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_in_the_order_of_ksm_settings_and_refer_to_rows() {
        for setting in Setting::ALL {
            let knob = Knob::from(setting);
            assert_eq!((knob.name(), knob.ksm_setting()), (setting.file_name(), Some(setting)));
            assert_eq!((Knob::from_path(knob.path()), knob.class()), (Some(knob), ResourceClass::Ksm));
        }
        for row in KNOBS {
            let referred = row.resets.iter().chain(&row.changed_by_kernel_while);
            assert!(referred.into_iter().all(|(path, _)| Knob::from_path(path).is_some()), "{}", row.path);
        }
        assert_eq!(Knob::from_path("sys/kernel/mm/ksm/full_scans"), None);
    }
}
