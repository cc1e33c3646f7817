//! Progress display on a terminal, and the stop flag for signals.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pagefold_base::PageSize;
use pagefold_census::ScanProgress;
use pagefold_merge::execute as merge;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A flag that SIGINT, SIGTERM, SIGQUIT and SIGHUP set. A second SIGINT, SIGTERM or SIGQUIT ends the process, as
/// without a handler. If SIGHUP or SIGQUIT is ignored, as nohup(1) arranges, it stays ignored.
pub fn stop_on_signal() -> std::io::Result<Arc<AtomicBool>> {
    let (stop, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let ignored = ignored_signal_mask(&std::fs::read_to_string("/proc/self/status").unwrap_or_default());
    let heeded = |signal| ignored & (1_u64 << (signal - 1)) == 0;
    for signal in [SIGINT, SIGTERM, SIGQUIT].into_iter().filter(|&signal| signal != SIGQUIT || heeded(signal)) {
        // The order matters: the conditional handler must see the flag as the previous signal left it.
        signal_hook::flag::register_conditional_default(signal, Arc::clone(&asked))?;
        signal_hook::flag::register(signal, Arc::clone(&asked))?;
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    // A terminal that closes causes two SIGHUPs, one by the kernel and one by the shell. The second must not end this
    // process while it restores the host's settings.
    if heeded(SIGHUP) {
        signal_hook::flag::register(SIGHUP, Arc::clone(&stop))?;
    }
    Ok(stop)
}

/// The mask of signals that this process ignores, from proc_pid_status(5): bit 0 is signal 1. 0 if it is unreadable.
fn ignored_signal_mask(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

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
    work: impl FnOnce(&merge::MergeProgress) -> T + Send,
) -> T {
    let progress = merge::MergeProgress::default();
    let draw = |bar: &ProgressBar| {
        let (merged, expected) = progress.merged();
        let what = match progress.stage() {
            _ if stop.load(Ordering::Relaxed) => "stopping",
            merge::MergeStage::Waiting | merge::MergeStage::Enrolling => "enrolling",
            merge::MergeStage::Merging => "merging",
            merge::MergeStage::Verifying => "verifying",
        };
        bar.set_message(format!("{what}: {} of {} merged", page_size.bytes_of(merged), page_size.bytes_of(expected)));
        bar.tick();
    };
    run_with_bar("enrolling", draw, || work(&progress))
}

/// Run `work`. Meanwhile call `draw` ten times a second if standard error is a terminal.
fn run_with_bar<T: Send>(
    first: &'static str,
    draw: impl Fn(&ProgressBar) + Sync,
    work: impl FnOnce() -> T + Send,
) -> T {
    if !std::io::stderr().is_terminal() {
        return work();
    }
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    bar.set_message(first);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_read_from_their_mask() {
        assert_eq!(
            ignored_signal_mask("SigBlk:\t0000000000000001\nSigIgn:\t0000000000001001\n"),
            (1 << 12) | (1 << (SIGHUP - 1))
        );
        assert_eq!(ignored_signal_mask("SigBlk:\t0000000000000001\n"), 0);
        assert_eq!(ignored_signal_mask("SigIgn:\tnone\n"), 0);
    }
}
