//! Duration of a full pass of ksmd, and the settings for a pass of a given duration.

use pagefold_base::units::Pages;

/// Microseconds of CPU time per page that ksmd scans. mm/ksm.c gives no figure; ksmd's CPU time over `pages_scanned`
/// was 3.5 to 4.0 us for 64 and 256 MiB of random pages on 6.18 (x86-64, 2 CPUs). Merging a page takes up to 10 us, and
/// cold memory more.
pub const SCAN_MICROSECONDS_PER_PAGE: f64 = 4.0;

/// Minimum duration in seconds of a scan of this many pages; `None` if ksmd scans no pages.
///
/// `ksm_scan_thread` (mm/ksm.c) scans `pages_to_scan` pages and then sleeps `sleep_millisecs`, in a loop; the last
/// batch of a pass ends early and sleeps too. Hence ceil(pages / pages_to_scan) sleeps and
/// [`SCAN_MICROSECONDS_PER_PAGE`] per page. Pages that smart scan skips do not count against a batch
/// (`scan_get_next_rmap_item`), so later passes over memory that does not merge are shorter, down to a ninth. The sleep
/// is rounded up to the kernel's tick, and ksmd waits for a CPU. On two busy CPUs at 250 Hz, passes at 100/20, 2000/20
/// and 5000/20 took 1.26, 1.41 and 1.21 times as long as this formula says.
pub fn pass_seconds(pages: Pages, pages_to_scan: u64, sleep_millisecs: u64) -> Option<f64> {
    let batches = pages.0.div_ceil((pages_to_scan > 0).then_some(pages_to_scan)?);
    Some(batches as f64 * sleep_millisecs as f64 / 1e3 + pages.0 as f64 * SCAN_MICROSECONDS_PER_PAGE / 1e6)
}

/// The smallest `pages_to_scan`, in hundreds, for a pass within `target_seconds`, limited so that ksmd is busy at most
/// half of the time. `None` if ksmd does not sleep, so that a longer batch changes nothing.
///
/// Solves [`pass_seconds`] for `pages_to_scan`: pages x sleep / (target - pages x cost); ksmd is busy half the time
/// at sleep / cost.
pub fn pages_to_scan_for(pages: Pages, sleep_millisecs: u64, target_seconds: f64) -> Option<u64> {
    let sleep = (sleep_millisecs > 0).then_some(sleep_millisecs as f64 / 1e3)?;
    let cost = SCAN_MICROSECONDS_PER_PAGE / 1e6;
    let max_pages = sleep / cost;
    let total_sleep = target_seconds - pages.0 as f64 * cost;
    let needed_pages = if total_sleep > 0.0 { pages.0 as f64 * sleep / total_sleep } else { max_pages };
    // The kernel takes an unsigned int; the cast saturates.
    Some(u64::from((needed_pages.min(max_pages) / 100.0).ceil().max(1.0).min(f64::from(u32::MAX / 100)) as u32) * 100)
}

/// A duration as text.
pub(super) fn format_duration(seconds: f64) -> String {
    match seconds {
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.1} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.1} days", s / 86_400.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_pass_is_batches_and_sleeps() {
        let check = |pages, to_scan, sleep, expected: Option<f64>| {
            let seconds = pass_seconds(Pages(pages), to_scan, sleep);
            assert_eq!(seconds.map(|s| (s * 1e6).round()), expected.map(|s| (s * 1e6).round()));
        };
        // 16 GiB at the kernel's defaults: 41944 sleeps of 20 ms.
        check(4_194_304, 100, 20, Some(41944.0 * 0.02 + 4_194_304.0 * 4e-6));
        check(1, 100, 20, Some(0.020004));
        check(0, 100, 20, Some(0.0));
        check(1, 0, 20, None);
    }

    #[test]
    fn durations_read_well() {
        assert_eq!(format_duration(3.34), "3.3 s");
        assert_eq!(format_duration(300.0), "5.0 min");
        assert_eq!(format_duration(10_000.0), "2.8 h");
        assert_eq!(format_duration(864_000.0), "10.0 days");
    }

    proptest! {
        #[test]
        fn proposed_batch_meets_the_target_time(pages in 1u64..50_000_000, sleep in 1u64..1000, target in 1f64..3600.0) {
            let proposed = pages_to_scan_for(Pages(pages), sleep, target).unwrap();
            let seconds = pass_seconds(Pages(pages), proposed, sleep).unwrap();
            let half = sleep as f64 / 1e3 / (SCAN_MICROSECONDS_PER_PAGE / 1e6);
            // One more sleep than in the continuous formula, for the last partial batch.
            prop_assert!(seconds <= target + sleep as f64 / 1e3 || proposed as f64 >= half);
            prop_assert!(proposed as f64 <= half + 100.0);
        }
    }
}
