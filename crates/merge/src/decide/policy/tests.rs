//! Policies against traces that were computed by hand from the published formulas.

use super::*;
use pagefold_base::reading::Absent;
use proptest::prelude::*;

const KIB_PER_MIB: u64 = 1024;

fn ksm(advisor: bool) -> Ksm {
    let none = || Err(Absent::NotOnThisKernel);
    Ksm {
        run: Ok(0),
        pages_to_scan: Ok(100),
        sleep_millisecs: Ok(20),
        pages_shared: none(),
        pages_sharing: none(),
        pages_unshared: none(),
        pages_volatile: none(),
        pages_scanned: none(),
        pages_skipped: none(),
        full_scans: none(),
        max_page_sharing: none(),
        merge_across_nodes: none(),
        use_zero_pages: none(),
        ksm_zero_pages: Err(Absent::NotOnThisKernel),
        general_profit: Err(Absent::NotOnThisKernel),
        stable_node_chains: none(),
        stable_node_dups: none(),
        smart_scan: none(),
        advisor_mode: if advisor { Ok("none".to_owned()) } else { Err(Absent::NotOnThisKernel) },
        advisor_target_scan_time: none(),
    }
}

/// A host by its total, free and committed memory in kB.
fn host(total: u64, free: u64, committed: u64) -> HostObservation {
    HostObservation {
        total: Ok(Bytes::from_kib(total)),
        free: Ok(Bytes::from_kib(free)),
        committed: Ok(Bytes::from_kib(committed)),
        ksm: Ok(ksm(true)),
        ksmd_cpu: Ok(Duration::ZERO),
    }
}

/// Settings in the order in which they are written.
fn shown(settings: &Settings) -> String {
    settings.iter().map(|(setting, value)| format!("{}={value}", setting.file_name())).collect::<Vec<_>>().join(" ")
}

#[test]
fn fixed_policies_write_constant_settings() {
    let check = |name: &str, expected: &str| {
        let policy = Policy::from_name(name).unwrap().unwrap();
        assert_eq!(policy.to_string(), name);
        let host = host(1000, 500, 0);
        let (state, settings) = policy.start(&host).unwrap();
        assert_eq!(shown(&settings), expected);
        assert_eq!(policy.one_shot_settings(&host).unwrap(), settings);
        assert_eq!(policy.step(state.clone(), &host), Ok((state, Settings::new())));
    };
    check("default", "advisor_mode=none pages_to_scan=100 sleep_millisecs=20 run=1");
    check("flat-out", "advisor_mode=none pages_to_scan=20000 sleep_millisecs=0 run=1");
    check("guided", "advisor_mode=none pages_to_scan=100 sleep_millisecs=1000 run=1");
    let advisor = |target| {
        format!(
            "advisor_mode=scan-time advisor_target_scan_time={target} advisor_max_cpu=70 \
             advisor_min_pages_to_scan=500 advisor_max_pages_to_scan=30000 sleep_millisecs=20 run=1"
        )
    };
    check("advisor", &advisor(200));
    check("advisor:20", &advisor(20));
}

#[test]
fn unknown_policy_names_are_rejected() {
    for name in ["", "Default", "ksmtune", "advisor-20", "flat_out"] {
        assert_eq!(Policy::from_name(name), None, "{name}");
    }
    for target in ["", "0", "-1", "soon", "1.5", "18446744073709551616"] {
        let error = Policy::from_name(&format!("advisor:{target}")).unwrap().unwrap_err();
        assert!(error.contains("advisor:20"), "{error}");
    }
}

#[test]
fn advisor_mode_is_not_written_without_kernel_support() {
    let without_advisor = HostObservation { ksm: Ok(ksm(false)), ..host(1000, 500, 0) };
    let settings = Policy::Default.start(&without_advisor).unwrap().1;
    assert_eq!(shown(&settings), "pages_to_scan=100 sleep_millisecs=20 run=1");
    let without_ksm = HostObservation { ksm: Err(Absent::NotOnThisKernel), ..without_advisor };
    assert_eq!(Policy::Default.start(&without_ksm), Err(Absent::NotOnThisKernel));
}

#[test]
fn ksmtuned_sets_up_as_the_script_does() {
    let rule = Ksmtuned::default();
    let check = |rule: &Ksmtuned, total, sleep_millisecs, threshold_kib| {
        let state = ksmtuned::KsmtunedState { total_kib: total, threshold_kib, sleep_millisecs, npages: 0 };
        assert_eq!(rule.start(Bytes::from_kib(total)), state);
    };
    // 10 * 16777216 / total, at least 10; total * 20 / 100, at least 2048.
    check(&rule, 16 * KIB_PER_MIB * 1024, 10, 3_355_443);
    check(&rule, 64 * KIB_PER_MIB * 1024, 10, 13_421_772);
    check(&rule, 4 * KIB_PER_MIB * 1024, 40, 838_860);
    // 167772160 / 3000000 = 55.92; 3000000 * 20 / 100 = 600000.
    check(&rule, 3_000_000, 55, 600_000);
    check(&rule, 10_000, 16_777, 2048);
    let proxmox = Ksmtuned { sleep_millisecs: 100, ..rule };
    check(&proxmox, 64 * KIB_PER_MIB * 1024, 25, 13_421_772);
    // 1677721600 / 167000000 = 10.04.
    check(&proxmox, 167_000_000, 10, 33_400_000);
}

#[test]
fn ksmtuned_takes_the_steps_of_the_script() {
    // total 10,000,000 kB: threshold 2,000,000, sleep 167772160 / 10000000 = 16.
    let policy = Policy::Ksmtuned(Ksmtuned::default());
    let total = 10_000_000;
    let (mut state, settings) = policy.start(&host(total, 0, 0)).unwrap();
    assert_eq!(settings, Settings::new(), "nothing before the first interval");
    let pages = |npages: u64| format!("pages_to_scan={npages} sleep_millisecs=16 run=1");
    let trace = [
        // Enough free and little committed: stopped.
        (3_000_000, 1_000_000, "run=0".to_owned()),
        // 0 - 50, at least 64: committed + threshold = total is not less than it.
        (3_000_000, 8_000_000, pages(64)),
        // Less free than the threshold: boost.
        (1_999_999, 8_000_000, pages(364)),
        (1_999_999, 0, pages(664)),
        (0, 0, pages(964)),
        // 964 + 300 = 1264, at most 1250.
        (0, 0, pages(1250)),
        (0, 0, pages(1250)),
        // As much free as the threshold, and little committed: neither stopped nor boosted.
        (2_000_000, 0, pages(1200)),
        (2_000_000, 0, pages(1150)),
        // Stopped keeps npages.
        (2_000_001, 7_999_999, "run=0".to_owned()),
        (2_000_001, 8_000_000, pages(1100)),
        (1_999_999, 8_000_000, pages(1250)),
    ];
    for (turn, (free, committed, expected)) in trace.into_iter().enumerate() {
        let (next, settings) = policy.step(state, &host(total, free, committed)).unwrap();
        assert_eq!(shown(&settings), expected, "turn {turn}");
        state = next;
    }
    assert_eq!(shown(&policy.one_shot_settings(&host(total, 1, 0)).unwrap()), pages(300));
}

#[test]
fn ksmtuned_fails_without_its_readings() {
    let policy = Policy::Ksmtuned(Ksmtuned::default());
    let blind = HostObservation { committed: Err(Absent::Denied), ..host(1000, 1, 0) };
    assert_eq!(policy.one_shot_settings(&blind), Err(Absent::Denied));
    let blind = HostObservation { total: Err(Absent::Denied), ..host(1000, 1, 0) };
    assert_eq!(policy.start(&blind).map(|_| ()), Err(Absent::Denied));
}

#[test]
fn the_advisor_takes_the_steps_of_the_kernel() {
    // Scan in milliseconds, CPU of ksmd since boot in milliseconds, expected pages_to_scan and change.
    let check = |rule: Advisor, trace: &[(u64, u64, u64, u64)]| {
        let mut context = rule.start();
        for (scan, &(millis, cpu, pages, change)) in trace.iter().enumerate() {
            context = context.step(&rule, Duration::from_millis(millis), Duration::from_millis(cpu));
            assert_eq!((context.pages_to_scan, context.change), (pages, change), "scan {scan}");
        }
    };
    check(
        Advisor::default(),
        &[
            // A small host. 1 s, 5 ms: cpu 1 %. factor 20000, change 30*100/100 = 30; wanted 500*100/20000 = 2, *30/100
            // = 0; a percent is 500 pages, so at least 5000.
            (100, 5, 5000, 30),
            // Less than 1 % is 1 %: a percent is 5000 pages, 50000 at least, 30000 at most. change (70*30 + 3000)/100 =
            // 51.
            (100, 14, 30_000, 51),
            (100, 20, 30_000, 65),
            // A scan in 400 s with 8000 ms of CPU: 8020-20 = 8000 ms of 400 s is 2 %. factor 20000/400 = 50;
            // change 40000/1 = 40000 %: (70*65 + 30*40000)/100 = 12045. wanted 60000*12045/100 = 7227000;
            // a percent is 15000, at most 1050000, and 30000.
            (400_000, 8020, 30_000, 12_045),
            // 500 s, 400000 ms of CPU: 80 %. factor 40; change 500*100/400 = 125: (70*12045 + 3750)/100 = 8469;
            // wanted 75000*8469/100; a percent is 375: at most 26250.
            (500_000, 408_020, 26_250, 8469),
        ],
    );
    check(
        Advisor { target_scan_time: 20, ..Advisor::default() },
        &[
            // 10 s, 3 s of CPU: 30 %. factor 200, change 30: wanted 250*30/100 = 75; a percent is 16: at least 160.
            (10_999, 3000, 160, 30),
            // 31 s, 6.2 s: 20 %. factor 2000/31 = 64; change 310: (2100 + 9300)/100 = 114; wanted 16000/64 = 250,
            // *114/100 = 285; a percent is 8: 80 to 560.
            (31_000, 9200, 285, 114),
            // 17 s, 3.4 s: 20 %. factor 117; change 54: (7980 + 1620)/100 = 96; wanted 28500/117 = 243, *96/100 = 233;
            // a percent is 14: 140 to 980.
            (17_500, 12_600, 233, 96),
        ],
    );
    // Switched on when ksmd has used an hour of CPU since boot: 360000 %, a percent is 1 page, and 10 are the least.
    check(Advisor::default(), &[(100, 3_600_000, 10, 30)]);
}

#[test]
fn setting_checks_match_the_kernel() {
    let check = |file: &str, value: &str, is_valid: bool| {
        let result = pagefold_base::setting::check_setting_value(Setting::from_file_name(file).unwrap(), value);
        assert_eq!(result.is_ok(), is_valid, "{file} {value}: {result:?}");
        assert!(result.err().is_none_or(|why| why.starts_with(file)));
    };
    for file in ["pages_to_scan", "sleep_millisecs", "advisor_max_cpu"] {
        check(file, "0", true);
        check(file, "4294967295", true);
        check(file, "4294967296", false);
    }
    for value in ["", "-1", "+1", "01", " 1", "1\n", "many", "1.0", "18446744073709551616"] {
        for setting in Setting::ALL {
            check(setting.file_name(), value, false);
        }
    }
    check("advisor_target_scan_time", "0", false);
    check("advisor_target_scan_time", "1", true);
    check("max_page_sharing", "1", false);
    check("max_page_sharing", "2", true);
    check("max_page_sharing", "2147483648", false);
    check("run", "1", true);
    check("run", "3", false);
    check("run", "2", false);
    assert!(
        pagefold_base::setting::check_setting_value(Setting::Run, "2").unwrap_err().contains("pagefold unmerge --all")
    );
    for file in ["use_zero_pages", "smart_scan", "merge_across_nodes"] {
        check(file, "1", true);
        check(file, "2", false);
    }
    check("advisor_mode", "scan-time", true);
    check("advisor_mode", "none", true);
    check("advisor_mode", "1", false);
}

proptest! {
    #[test]
    fn no_policy_writes_what_the_kernel_refuses(
        total in 0u64..1 << 44, hosts in prop::collection::vec((0u64..1 << 44, 0u64..1 << 44), 1..20),
    ) {
        for name in POLICY_NAMES {
            let policy = Policy::from_name(name).unwrap().unwrap();
            let (mut state, mut settings) = policy.start(&host(total, 0, 0)).unwrap();
            for &(free, committed) in &hosts {
                for (setting, value) in &settings {
                    prop_assert_eq!(pagefold_base::setting::check_setting_value(*setting, value), Ok(()));
                }
                (state, settings) = policy.step(state, &host(total, free, committed)).unwrap();
            }
        }
    }

    #[test]
    fn the_advisor_stays_within_its_bounds(
        target in 1u64..100_000, scans in prop::collection::vec((0u64..10_000_000, 0u64..10_000_000), 1..30),
    ) {
        let rule = Advisor { target_scan_time: target, ..Advisor::default() };
        let mut context = rule.start();
        let mut cpu = 0;
        for (millis, used) in scans {
            cpu += used;
            context = context.step(&rule, Duration::from_millis(millis), Duration::from_millis(cpu));
            prop_assert!((10..=rule.max_pages_to_scan).contains(&context.pages_to_scan));
        }
    }
}
