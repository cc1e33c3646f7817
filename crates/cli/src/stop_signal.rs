//! The flag that signals set to stop a command.

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A flag that SIGINT, SIGTERM, SIGQUIT and SIGHUP set. A second SIGINT, SIGTERM or SIGQUIT ends the process, as
/// without a handler. If SIGHUP or SIGQUIT is ignored, as nohup(1) arranges, it stays ignored.
pub fn stop_on_signal() -> std::io::Result<Arc<AtomicBool>> {
    let (stop, has_stop_request) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let ignored = ignored_signal_mask(&std::fs::read_to_string("/proc/self/status").unwrap_or_default());
    let is_heeded = |signal| ignored & (1_u64 << (signal - 1)) == 0;
    for signal in [SIGINT, SIGTERM, SIGQUIT].into_iter().filter(|&signal| signal != SIGQUIT || is_heeded(signal)) {
        // The order matters: the conditional handler must see the flag as the previous signal left it.
        signal_hook::flag::register_conditional_default(signal, Arc::clone(&has_stop_request))?;
        signal_hook::flag::register(signal, Arc::clone(&has_stop_request))?;
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    // A terminal that closes causes two SIGHUPs, one by the kernel and one by the shell. The second must not end this
    // process while it restores the host's settings.
    if is_heeded(SIGHUP) {
        signal_hook::flag::register(SIGHUP, Arc::clone(&stop))?;
    }
    Ok(stop)
}

/// The mask of signals that this process ignores, from proc_pid_status(5): bit 0 is signal 1. 0 if it is unreadable.
fn ignored_signal_mask(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
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
