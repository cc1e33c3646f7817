//! The kernel settings that Pagefold writes, as a table: where each is and how it behaves.
//!
//! [`crate::transaction`] and the adapters know of a setting only what its row says, so a new setting is a new row.
//! The rows of KSM mirror the `*_store` and `*_show` functions of mm/ksm.c (6.18).
//!
//! The path of a row may be a pattern, for settings that exist once for each device or CPU: `*` stands for any
//! characters within one component of the path. The table is also the limit of what a plan or an imported file can
//! write: settings that run a program, that cannot be written back, or that weaken the kernel's protection are not in
//! it.

use crate::resource::ResourceClass;
use crate::{Host, parse};
use pagefold_base::Reading;
use pagefold_base::ksm::Setting;
use std::borrow::Cow;
use std::fmt;

/// A kernel setting: a path that matches a row of the table. Knobs are ordered as the kernel accepts their values.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Knob {
    /// The position of the row.
    row: usize,
    path: Cow<'static, str>,
}

/// A row of the table.
struct KnobRow {
    /// The path below the root, or a pattern for it.
    path: &'static str,
    /// Whose lock a change needs.
    class: ResourceClass,
    /// A value that must not be written again to restore it, and the value that has the same effect.
    restored_as: Option<(&'static str, &'static str)>,
    /// The path of a setting that the kernel resets when this one changes, and the value it gets.
    resets: Option<(&'static str, &'static str)>,
    /// The path of another setting, and its value with which the kernel itself changes this one.
    changed_by_kernel_while: Option<(&'static str, &'static str)>,
    /// When the kernel takes no other value (EBUSY), and what to do about it.
    busy_remedy: Option<&'static str>,
    /// Whether the present one of several words is in parentheses instead of brackets.
    marks_choice_by_parentheses: bool,
    /// The kernel that has it, for the message that it is missing.
    requirement: &'static str,
}

const THP: &str = "a kernel with CONFIG_TRANSPARENT_HUGEPAGE is needed";
const SCHEDULER: &str = "a kernel with this setting of its scheduler is needed";
const SYSCTL: &str = "a kernel with this setting is needed";
const SCHED_DEBUG: &str = "a kernel with CONFIG_SCHED_DEBUG, this setting and a mounted debugfs is needed";
const CPUFREQ: &str = "a CPU whose frequency the kernel controls is needed";
const KSM: &str = "a kernel with CONFIG_KSM is needed";
const KSM_ADVISOR: &str = "Linux 6.8 or later with CONFIG_KSM is needed";

/// `merge_across_nodes_store` and `max_page_sharing_store` refuse while `ksm_pages_shared` is not zero. A stopped ksmd
/// keeps that counter until 2 is written to `run`.
const MERGED_PAGES_REMEDY: &str = "the kernel takes another value only while no page is merged: unmerge all pages with \
                                   `pagefold unmerge --all`, which checks that memory suffices, then `echo 2 > \
                                   /sys/kernel/mm/ksm/run`, then `pagefold recover`";

/// A setting of KSM without quirks.
const fn plain(path: &'static str, requirement: &'static str) -> KnobRow {
    let class = ResourceClass::Ksm;
    KnobRow {
        path,
        class,
        restored_as: None,
        resets: None,
        changed_by_kernel_while: None,
        busy_remedy: None,
        marks_choice_by_parentheses: false,
        requirement,
    }
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
    KnobRow { busy_remedy: Some(MERGED_PAGES_REMEDY), ..plain("sys/kernel/mm/ksm/max_page_sharing", KSM) },
    KnobRow {
        busy_remedy: Some(MERGED_PAGES_REMEDY),
        ..plain("sys/kernel/mm/ksm/merge_across_nodes", "a kernel with CONFIG_KSM and CONFIG_NUMA is needed")
    },
    KnobRow {
        // After all pages were unmerged, `run` reads as 2, and ksmd is stopped as with 0. Writing 2 would unmerge all
        // pages again (`run_store`).
        restored_as: Some(("2", "0")),
        ..plain("sys/kernel/mm/ksm/run", KSM)
    },
    // mm/huge_memory.c, `enabled_show`: a choice.
    general("sys/kernel/mm/transparent_hugepage/enabled", THP),
    general("sys/kernel/mm/transparent_hugepage/defrag", THP),
    general("sys/kernel/mm/transparent_hugepage/shmem_enabled", THP),
    general("sys/kernel/mm/transparent_hugepage/use_zero_page", THP),
    general("sys/kernel/mm/transparent_hugepage/khugepaged/*", THP),
    // kernel/sched/core.c, `sysctl_numa_balancing`: 0 off, 1 on, 2 memory tiering.
    general("proc/sys/kernel/numa_balancing", "a kernel with CONFIG_NUMA_BALANCING is needed"),
    general("proc/sys/kernel/numa_balancing_promote_rate_limit_MBps", "a kernel with CONFIG_NUMA_BALANCING is needed"),
    general("proc/sys/kernel/sched_*", SCHEDULER),
    general("proc/sys/kernel/timer_migration", SCHEDULER),
    general("proc/sys/kernel/watchdog", SYSCTL),
    general("proc/sys/kernel/nmi_watchdog", SYSCTL),
    general("proc/sys/kernel/watchdog_thresh", SYSCTL),
    // io_uring/io_uring.c: 0 allowed, 1 privileged, 2 off.
    general("proc/sys/kernel/io_uring_disabled", "Linux 6.6 or later is needed"),
    KnobRow {
        marks_choice_by_parentheses: true,
        ..general("sys/kernel/debug/sched/preempt", "Linux 5.12 or later with CONFIG_PREEMPT_DYNAMIC is needed")
    },
    // kernel/sched/debug.c: files that hold one number. `features` shows all of its words and takes one, so it could not
    // be restored.
    general("sys/kernel/debug/sched/*_ns", SCHED_DEBUG),
    general("sys/kernel/debug/sched/latency_warn_*", SCHED_DEBUG),
    general("sys/kernel/debug/sched/nr_migrate", SCHED_DEBUG),
    general("sys/kernel/debug/sched/tunable_scaling", SCHED_DEBUG),
    general("proc/sys/vm/compaction_proactiveness", SYSCTL),
    general("proc/sys/vm/dirty_*", SYSCTL),
    general("proc/sys/vm/max_map_count", SYSCTL),
    general("proc/sys/vm/min_free_kbytes", SYSCTL),
    general("proc/sys/vm/nr_hugepages", "a kernel with CONFIG_HUGETLBFS is needed"),
    general("proc/sys/vm/nr_overcommit_hugepages", "a kernel with CONFIG_HUGETLBFS is needed"),
    general("proc/sys/vm/overcommit_*", SYSCTL),
    general("proc/sys/vm/page-cluster", SYSCTL),
    general("proc/sys/vm/page_lock_unfairness", SYSCTL),
    general("proc/sys/vm/stat_interval", SYSCTL),
    general("proc/sys/vm/swappiness", SYSCTL),
    general("proc/sys/vm/vfs_cache_pressure", SYSCTL),
    general("proc/sys/vm/watermark_*", SYSCTL),
    general("proc/sys/vm/zone_reclaim_mode", "a kernel with CONFIG_NUMA is needed"),
    general("sys/devices/system/node/node*/hugepages/hugepages-*/nr_hugepages", "a kernel with huge pages is needed"),
    // Parameters of a module that the kernel lets root write while it is loaded.
    general("sys/module/kvm/parameters/*", "a loaded module kvm with this parameter is needed"),
    general("sys/module/kvm_intel/parameters/*", "a loaded module kvm_intel with this parameter is needed"),
    general("sys/module/kvm_amd/parameters/*", "a loaded module kvm_amd with this parameter is needed"),
    general("sys/module/vhost_net/parameters/*", "a loaded module vhost_net with this parameter is needed"),
    general("sys/block/*/queue/*", "this block device and setting are needed"),
    general("sys/devices/system/cpu/cpu*/cpufreq/scaling_governor", CPUFREQ),
    general("sys/devices/system/cpu/cpu*/cpufreq/scaling_min_freq", CPUFREQ),
    general("sys/devices/system/cpu/cpu*/cpufreq/scaling_max_freq", CPUFREQ),
    general("sys/devices/system/cpu/cpu*/cpufreq/energy_performance_preference", CPUFREQ),
    general("sys/devices/system/cpu/cpufreq/policy*/scaling_governor", CPUFREQ),
    general("sys/devices/system/cpu/cpufreq/policy*/energy_performance_preference", CPUFREQ),
    general("sys/devices/system/cpu/cpu*/cpuidle/state*/disable", "a kernel with CONFIG_CPU_IDLE is needed"),
    general("sys/devices/system/cpu/cpu*/power/pm_qos_resume_latency_us", "a kernel with CONFIG_PM is needed"),
    general("sys/devices/system/clocksource/clocksource0/current_clocksource", "this clock source is needed"),
    general("sys/devices/system/cpu/smt/control", "a kernel with CONFIG_HOTPLUG_SMT is needed"),
    general("proc/irq/*/smp_affinity_list", "this interrupt is needed"),
];

impl From<Setting> for Knob {
    fn from(setting: Setting) -> Self {
        Self { row: setting as usize, path: Cow::Borrowed(KNOBS[setting as usize].path) }
    }
}

impl Knob {
    /// The knob of a path below the root: `sys/kernel/mm/ksm/run`. `None` if no row of the table matches it.
    pub fn from_path(path: &str) -> Option<Self> {
        let row = KNOBS.iter().position(|row| matches_pattern(row.path, path))?;
        let is_pattern = KNOBS[row].path.contains('*');
        Some(Self { row, path: if is_pattern { path.to_owned().into() } else { KNOBS[row].path.into() } })
    }

    /// Its path below the root.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The name of its file.
    pub fn name(&self) -> &str {
        self.path().rsplit('/').next().unwrap_or_default()
    }

    /// The class whose lock a change needs.
    pub fn class(&self) -> ResourceClass {
        self.row().class
    }

    /// The setting of KSM that it is, if it is one.
    pub fn ksm_setting(&self) -> Option<Setting> {
        Setting::ALL.get(self.row).copied()
    }

    /// The kernel that has it, for the message that it is missing.
    pub fn requirement(&self) -> &'static str {
        self.row().requirement
    }

    /// When the kernel takes no other value (EBUSY), and what to do about it; `None` if it always takes one.
    pub fn busy_remedy(&self) -> Option<&'static str> {
        self.row().busy_remedy
    }

    /// The value to write to restore `value`, which was read.
    pub fn restorable_value(&self, value: String) -> String {
        match self.row().restored_as {
            Some((reported, restored)) if value == reported => restored.to_owned(),
            _ => value,
        }
    }

    /// A setting that the kernel resets when this one changes, and the value it gets.
    pub fn resets(&self) -> Option<(Self, &'static str)> {
        self.row().resets.and_then(Self::resolve)
    }

    /// Another setting, and its value with which the kernel itself changes this one.
    pub fn changed_by_kernel_while(&self) -> Option<(Self, &'static str)> {
        self.row().changed_by_kernel_while.and_then(Self::resolve)
    }

    /// Reads its value: the marked word of a choice, otherwise the whole text.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read(&self, host: &dyn Host) -> Reading<String> {
        let bytes = host.read(self.path())?;
        let word = if self.row().marks_choice_by_parentheses {
            parse::parenthesized_word(&bytes)
        } else {
            parse::bracketed_word(&bytes)
        };
        Ok(word.unwrap_or_else(|_| String::from_utf8_lossy(&bytes).trim().to_owned()))
    }

    fn row(&self) -> &'static KnobRow {
        &KNOBS[self.row]
    }

    fn resolve((path, value): (&'static str, &'static str)) -> Option<(Self, &'static str)> {
        Some((Self::from_path(path)?, value))
    }
}

/// Whether a path has the form of a pattern. A component of the path consists of characters that names in sysfs and
/// procfs have, and does not begin with a dot.
fn matches_pattern(pattern: &str, path: &str) -> bool {
    let is_name = |name: &str| {
        !name.starts_with('.') && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | ':'))
    };
    let (mut patterns, mut names) = (pattern.split('/'), path.split('/'));
    loop {
        let (pattern, name) = match (patterns.next(), names.next()) {
            (None, None) => return true,
            (Some(pattern), Some(name)) => (pattern, name),
            _ => return false,
        };
        let matches = match pattern.split_once('*') {
            None => pattern == name,
            Some((prefix, suffix)) => {
                is_name(name)
                    && name.len() > prefix.len() + suffix.len()
                    && name.starts_with(prefix)
                    && name.ends_with(suffix)
            }
        };
        if !matches {
            return false;
        }
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

    #[test]
    fn patterns_match_one_component_and_nothing_outside_the_table() {
        for path in [
            "sys/module/kvm/parameters/halt_poll_ns",
            "sys/block/nvme0n1/queue/scheduler",
            "sys/block/dm-0/queue/nr_requests",
            "sys/devices/system/cpu/cpu17/cpufreq/scaling_governor",
            "sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages",
            "proc/sys/kernel/sched_autogroup_enabled",
            "sys/kernel/debug/sched/migration_cost_ns",
            "sys/kernel/debug/sched/nr_migrate",
            "sys/kernel/debug/sched/tunable_scaling",
        ] {
            let knob = Knob::from_path(path).unwrap_or_else(|| panic!("{path}"));
            assert_eq!((knob.path(), knob.class()), (path, ResourceClass::Settings));
        }
        for path in [
            "",
            "/sys/module/kvm/parameters/halt_poll_ns",
            "sys/module/kvm/parameters/",
            "sys/module/kvm/parameters/..",
            "sys/module/kvm/parameters/a/../../../x",
            "sys/module/kvm/parameters/halt_poll_ns/",
            "sys/block/../queue/scheduler",
            "sys/block//queue/scheduler",
            "sys/block/sda/../../queue/scheduler",
            "proc/sys/kernel/core_pattern",
            "proc/sys/kernel/modprobe",
            "proc/sys/kernel/modules_disabled",
            "proc/sys/kernel/sched_",
            "sys/kernel/debug/sched/features",
            "sys/kernel/debug/sched/debug",
            "sys/devices/system/cpu/cpu/cpufreq/scaling_governor",
        ] {
            assert_eq!(Knob::from_path(path), None, "{path}");
        }
    }
}
