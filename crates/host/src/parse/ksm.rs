//! `/sys/kernel/mm/ksm/*` (mm/ksm.c) and `/proc/PID/ksm_stat` (fs/proc/base.c, `proc_pid_ksm_stat`).
//!
//! `/proc/PID/ksm_merging_pages` came in 5.19 as a file of one number, `ksm_stat` in 6.1 with `ksm_rmap_items` alone;
//! 6.4 added `ksm_merging_pages` and `ksm_process_profit`, 6.6 `ksm_zero_pages`, 6.14 `ksm_merge_any` and
//! `ksm_mergeable`, which alone have a colon. Both counts of zero pages could fall below zero while they were printed
//! as unsigned (before 6.10): what wrapped is read as the negative number it is.

use super::text::{bracketed, field, malformed, number, signed};
use pagefold_model::ksm::{Ksm, ProcessKsm};
use pagefold_model::{Absent, Reading};

/// The settings and counters of KSM. `read` gets the bare name of a file under `sys/kernel/mm/ksm`.
pub fn ksm(read: impl Fn(&str) -> Reading<Vec<u8>>) -> Ksm {
    let count = |name| read(name).and_then(|bytes| number(&bytes));
    let balance = |name| read(name).and_then(|bytes| signed(&bytes));
    Ksm {
        run: count("run"),
        pages_to_scan: count("pages_to_scan"),
        sleep_millisecs: count("sleep_millisecs"),
        pages_shared: count("pages_shared"),
        pages_sharing: count("pages_sharing"),
        pages_unshared: count("pages_unshared"),
        pages_volatile: count("pages_volatile"),
        pages_scanned: count("pages_scanned"),
        pages_skipped: count("pages_skipped"),
        full_scans: count("full_scans"),
        max_page_sharing: count("max_page_sharing"),
        merge_across_nodes: count("merge_across_nodes"),
        use_zero_pages: count("use_zero_pages"),
        ksm_zero_pages: balance("ksm_zero_pages"),
        general_profit: balance("general_profit"),
        stable_node_chains: count("stable_node_chains"),
        stable_node_dups: count("stable_node_dups"),
        smart_scan: count("smart_scan"),
        advisor_mode: read("advisor_mode").and_then(|bytes| bracketed(&bytes)),
        advisor_target_scan_time: count("advisor_target_scan_time"),
    }
}

/// A process's share in KSM, from `ksm_stat` and, where that does not tell it, the older `ksm_merging_pages`.
///
/// `ksm_stat` is empty for a process without memory, such as a zombie: then its memory has vanished.
pub fn process_ksm(ksm_stat: Reading<Vec<u8>>, merging_pages: Reading<Vec<u8>>) -> ProcessKsm {
    let value = |key| match ksm_stat.as_deref() {
        Ok([]) => Err(Absent::Vanished),
        Ok(bytes) => field(bytes, key),
        Err(why) => Err(why.clone()),
    };
    let flag = |key| {
        value(key).and_then(|word| match word {
            b"yes" => Ok(true),
            b"no" => Ok(false),
            other => Err(malformed("neither yes nor no", other)),
        })
    };
    let older = || merging_pages.as_deref().map_err(Absent::clone).and_then(number);
    ProcessKsm {
        rmap_items: value("ksm_rmap_items").and_then(number),
        merging_pages: match value("ksm_merging_pages").and_then(number) {
            Err(Absent::NotOnThisKernel) => older(),
            Err(why) => older().map_err(|_| why),
            known => known,
        },
        zero_pages: value("ksm_zero_pages").and_then(signed),
        profit: value("ksm_process_profit").and_then(signed),
        merge_any: flag("ksm_merge_any"),
        mergeable: flag("ksm_mergeable"),
    }
}
