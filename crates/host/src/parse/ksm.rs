//! `/sys/kernel/mm/ksm/*` (mm/ksm.c) and `/proc/PID/ksm_stat` (fs/proc/base.c, `proc_pid_ksm_stat`).
//!
//! `/proc/PID/ksm_merging_pages` came in 5.19 as a file with one number, `ksm_stat` in 6.1 with `ksm_rmap_items` alone.
//! 6.4 added `ksm_merging_pages` and `ksm_process_profit`, 6.6 `ksm_zero_pages`, 6.14 `ksm_merge_any` and
//! `ksm_mergeable`, which are the only keys with a colon. Before 6.10 both counts of zero pages could fall below zero
//! and were printed as unsigned numbers. The parser reads such a number as negative.

use super::text::{bracketed_word, field, malformed, number, signed};
use pagefold_base::ksm::{Ksm, ProcessKsm};
use pagefold_base::{Absent, Reading};

/// Parses the settings and counters of KSM. `read` gets the name of a file in `sys/kernel/mm/ksm`.
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
        advisor_mode: read("advisor_mode").and_then(|bytes| bracketed_word(&bytes)),
        advisor_target_scan_time: count("advisor_target_scan_time"),
    }
}

/// A process's KSM figures, from `ksm_stat` and, for kernels without the field, the older `ksm_merging_pages`.
///
/// `ksm_stat` is empty for a process without memory, such as a zombie; its memory then counts as vanished.
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample(name: &str) -> Reading<Vec<u8>> {
        std::fs::read(format!("{}/src/parse/samples/ksm/{name}", env!("CARGO_MANIFEST_DIR")))
            .map_err(|_| Absent::NotOnThisKernel)
    }

    #[test]
    fn ksm_files_are_parsed() {
        let expected = Ksm {
            run: Ok(1),
            pages_to_scan: Ok(20_000),
            sleep_millisecs: Ok(20),
            pages_shared: Ok(4),
            pages_sharing: Ok(785),
            pages_unshared: Ok(0),
            pages_volatile: Ok(1792),
            pages_scanned: Ok(295_724),
            pages_skipped: Ok(189_952),
            full_scans: Ok(124),
            max_page_sharing: Ok(256),
            merge_across_nodes: Ok(1),
            use_zero_pages: Ok(0),
            ksm_zero_pages: Ok(0),
            general_profit: Ok(3_050_176),
            stable_node_chains: Ok(1),
            stable_node_dups: Ok(2),
            smart_scan: Ok(1),
            advisor_mode: Ok("none".into()),
            advisor_target_scan_time: Ok(200),
        };
        assert_eq!(ksm(sample), expected);
    }

    #[test]
    fn each_unreadable_file_keeps_its_reason() {
        let host = ksm(|name| match name {
            "run" => Ok(b"1\n".to_vec()),
            "pages_shared" => Err(Absent::Denied),
            "general_profit" => Ok(b"-64\n".to_vec()),
            "advisor_mode" => Ok(b"none scan-time\n".to_vec()),
            "full_scans" => Ok(b"many\n".to_vec()),
            _ => Err(Absent::NotOnThisKernel),
        });
        assert_eq!((host.run, host.pages_shared), (Ok(1), Err(Absent::Denied)));
        assert_eq!((host.general_profit, host.smart_scan), (Ok(-64), Err(Absent::NotOnThisKernel)));
        assert_eq!(host.full_scans, Err(Absent::Malformed("not a number in range: \"many\\n\"".into())));
        assert!(matches!(host.advisor_mode, Err(Absent::Malformed(_))));
    }

    #[test]
    fn ksm_stat_is_parsed() {
        let expected = ProcessKsm {
            rmap_items: Ok(2581),
            merging_pages: Ok(789),
            zero_pages: Ok(0),
            profit: Ok(3_066_560),
            merge_any: Ok(true),
            mergeable: Ok(true),
        };
        let stat = include_bytes!("samples/ksm_stat").to_vec();
        assert_eq!(process_ksm(Ok(stat), Err(Absent::Denied)), expected);
    }

    #[test]
    fn ksm_stat_of_older_kernels_is_parsed() {
        let absent = || Err(Absent::NotOnThisKernel);
        let check = |stat: Option<&str>, merging: Option<&str>, expected: ProcessKsm| {
            let bytes = |text: Option<&str>| text.map(|text| text.as_bytes().to_vec()).ok_or(Absent::NotOnThisKernel);
            assert_eq!(process_ksm(bytes(stat), bytes(merging)), expected, "{stat:?} {merging:?}");
        };
        let none = ProcessKsm::absent(&Absent::NotOnThisKernel);
        check(None, None, none.clone());
        check(None, Some("12\n"), ProcessKsm { merging_pages: Ok(12), ..none.clone() });
        check(
            Some("ksm_rmap_items 5\n"),
            Some("12\n"),
            ProcessKsm { rmap_items: Ok(5), merging_pages: Ok(12), ..none.clone() },
        );
        check(
            Some(
                "ksm_rmap_items 5\nksm_zero_pages 18446744073709551614\nksm_merging_pages 3\nksm_process_profit -320\n",
            ),
            Some("12\n"),
            ProcessKsm {
                rmap_items: Ok(5),
                merging_pages: Ok(3),
                zero_pages: Ok(-2),
                profit: Ok(-320),
                merge_any: absent(),
                mergeable: absent(),
            },
        );
    }

    #[test]
    fn most_specific_absence_reason_is_kept() {
        let denied = || Err(Absent::Denied);
        let stat = |text: &str| Ok(text.as_bytes().to_vec());
        assert_eq!(process_ksm(denied(), Err(Absent::NotOnThisKernel)).merging_pages, Err(Absent::Denied));
        assert_eq!(process_ksm(stat("ksm_rmap_items 5\n"), denied()).merging_pages, Err(Absent::Denied));
        assert_eq!(process_ksm(stat(""), denied()).merging_pages, Err(Absent::Vanished));
        assert_eq!(process_ksm(stat(""), denied()).merge_any, Err(Absent::Vanished));
        let odd = process_ksm(stat("ksm_merge_any: perhaps\nksm_mergeable: ye"), denied());
        assert_eq!(odd.merge_any, Err(Absent::Malformed("neither yes nor no: \"perhaps\"".into())));
        assert!(matches!(odd.mergeable, Err(Absent::Malformed(_))));
    }

    proptest! {
        #[test]
        fn arbitrary_input_does_not_panic(stat: Vec<u8>, merging: Vec<u8>) {
            let _ = ksm(|_| Ok(stat.clone()));
            let _ = process_ksm(Ok(stat.clone()), Ok(merging));
        }
    }
}
