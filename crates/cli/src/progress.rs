//! Progress display on a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pagefold_base::{Bytes, PageSize};
use pagefold_census::ScanProgress;
use pagefold_merge::execute::{MergeProgress, MergeStage};
use pagefold_numa::apply::ProgressObserver;
use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Run a census and show its progress on standard error, if that is a terminal.
pub fn run_census_with_progress<T: Send>(
    page_size: PageSize,
    stop: &AtomicBool,
    work: impl FnOnce(&ScanProgress) -> T + Send,
) -> T {
    let progress = ScanProgress::default();
    run_with_bar("listing pages", |bar| draw_census_progress(bar, &progress, page_size, stop), || work(&progress))
}

/// Run a merge and show its progress in the same way.
pub fn run_merge_with_progress<T: Send>(
    page_size: PageSize,
    stop: &AtomicBool,
    work: impl FnOnce(&MergeProgress) -> T + Send,
) -> T {
    let progress = MergeProgress::default();
    let draw = |bar: &ProgressBar| {
        let (merged, expected) = progress.merged();
        let stage = match progress.stage() {
            _ if stop.load(Ordering::Relaxed) => "stopping",
            MergeStage::Waiting | MergeStage::Enrolling => "enrolling",
            MergeStage::Merging => "merging",
            MergeStage::Verifying => "verifying",
        };
        bar.set_message(format!("{stage}: {} of {} merged", page_size.bytes_of(merged), page_size.bytes_of(expected)));
        bar.tick();
    };
    run_with_bar("enrolling", draw, || work(&progress))
}

/// Move memory and show its progress in the same way. `total` is what is to be moved.
pub fn run_move_with_progress<T: Send>(
    total: Bytes,
    stop: &AtomicBool,
    work: impl FnOnce(&mut ProgressObserver<'_>) -> T + Send,
) -> T {
    let moved_bytes = AtomicU64::new(0);
    let draw = |bar: &ProgressBar| {
        let stage = if stop.load(Ordering::Relaxed) { "stopping" } else { "moving memory" };
        let moved = Bytes(moved_bytes.load(Ordering::Relaxed));
        bar.set_message(format!("{stage}: {moved} of {total}"));
        bar.tick();
    };
    let mut note_progress = |_, moved: Bytes| moved_bytes.store(moved.0, Ordering::Relaxed);
    run_with_bar("placing threads", draw, || work(&mut note_progress))
}

/// Observe vCPUs for `interval` and show how much of it is left, in the same way.
pub fn run_observation_with_progress<T: Send>(interval: Duration, work: impl FnOnce() -> T + Send) -> T {
    let started = Instant::now();
    let draw = |bar: &ProgressBar| {
        let left = interval.saturating_sub(started.elapsed());
        bar.set_message(format!("observing vCPUs: {:.0} s left", left.as_secs_f64().ceil()));
        bar.tick();
    };
    run_with_bar("observing vCPUs", draw, work)
}

/// Run simulations and show how many of `total` are finished. `work` counts them.
pub fn run_simulations_with_progress<T: Send>(total: u64, work: impl FnOnce(&AtomicU64) -> T + Send) -> T {
    let finished = AtomicU64::new(0);
    let draw = |bar: &ProgressBar| {
        bar.set_message(format!("{} of {total} simulations", finished.load(Ordering::Relaxed)));
        bar.tick();
    };
    run_with_bar("simulating", draw, || work(&finished))
}

/// Run the scenarios of a calibration and show its progress in the same way.
pub fn run_calibration_with_progress<T: Send>(
    stop: &AtomicBool,
    work: impl FnOnce(&mut (dyn FnMut(u64, u64) + Send)) -> T + Send,
) -> T {
    let (finished, all) = (AtomicU64::new(0), AtomicU64::new(0));
    let draw = |bar: &ProgressBar| {
        let stage = if stop.load(Ordering::Relaxed) { "stopping" } else { "measuring" };
        let (finished, all) = (finished.load(Ordering::Relaxed), all.load(Ordering::Relaxed));
        bar.set_message(format!("{stage}: {finished} of {all} scenarios"));
        bar.tick();
    };
    run_with_bar("measuring", draw, || {
        work(&mut |finished_now, total| {
            finished.store(finished_now, Ordering::Relaxed);
            all.store(total, Ordering::Relaxed);
        })
    })
}

/// Run simulations of `total_ms` virtual time together and show how far they are, in the same way. `work` counts the
/// milliseconds.
pub fn run_comparison_with_progress<T: Send>(total_ms: u64, work: impl FnOnce(&AtomicU64) -> T + Send) -> T {
    let simulated_ms = AtomicU64::new(0);
    let draw = |bar: &ProgressBar| {
        let percent = 100 * simulated_ms.load(Ordering::Relaxed) / total_ms.max(1);
        bar.set_message(format!("simulating: {percent} % of {} h", total_ms / 3_600_000));
        bar.tick();
    };
    run_with_bar("simulating", draw, || work(&simulated_ms))
}

/// Run `work`. Meanwhile call `draw` ten times a second if standard error is a terminal.
fn run_with_bar<T: Send>(
    first_message: &'static str,
    draw: impl Fn(&ProgressBar) + Sync,
    work: impl FnOnce() -> T + Send,
) -> T {
    if !std::io::stderr().is_terminal() {
        return work();
    }
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    bar.set_message(first_message);
    bar.set_style(ProgressStyle::with_template("{spinner} {msg}").unwrap_or_else(|_| ProgressStyle::default_spinner()));
    let finished = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !finished.load(Ordering::Relaxed) {
                draw(&bar);
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let result = work();
        finished.store(true, Ordering::Relaxed);
        bar.finish_and_clear();
        result
    })
}

fn draw_census_progress(bar: &ProgressBar, progress: &ScanProgress, page_size: PageSize, stop: &AtomicBool) {
    let expected = progress.expected_pages() * page_size.bytes();
    if expected > 0 && bar.length().is_none() {
        bar.set_length(expected);
        bar.reset_eta();
        let template = "{msg} {bar:30} {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left";
        bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message("reading");
    }
    if stop.load(Ordering::Relaxed) {
        bar.set_message("stopping");
    }
    bar.set_position(progress.scanned_pages() * page_size.bytes());
    bar.tick();
}
