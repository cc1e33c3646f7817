//! ksmtuned, the shell daemon that tunes KSM by free memory.
//!
//! Computes what the script of Debian's package ksmtuned 4.20150326 (the same as Fedora's) computes: in kB, with the
//! shell's integer division. It runs ksmd while the guests' memory plus a threshold exceeds the host's memory, or while
//! less than the threshold is free. The longer memory is short, the faster ksmd scans.
//!
//! Quirks, kept: free memory equal to the threshold neither stops ksmd nor boosts it; the page count decays. The page
//! count survives while ksmd is stopped, so a later start continues from it. A smaller host sleeps longer, but a larger
//! one never less than 10 ms. Nothing is written before the first interval is over. The daemon finds guests by the
//! pattern `^qemu-system.*-enable-kvm` of the command line, so Debian's misses guests that are started by their full
//! path; here the caller passes the committed memory.
//!
//! Limits: `SIGUSR1`, which makes the daemon take a step at once, is not mirrored. While the kernel's advisor is on,
//! the daemon's writes of `pages_to_scan` fail and it does not notice; Pagefold stops with the error.

use pagefold_base::ksm::{Setting, Settings};
use pagefold_base::units::Bytes;
use std::time::Duration;

/// The variables of `/etc/ksmtuned.conf`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ksmtuned {
    /// `KSM_MONITOR_INTERVAL`.
    pub interval: Duration,
    /// `KSM_NPAGES_BOOST`.
    pub boost_pages: i64,
    /// `KSM_NPAGES_DECAY`, negative.
    pub decay_pages: i64,
    /// `KSM_NPAGES_MIN`.
    pub min_pages: i64,
    /// `KSM_NPAGES_MAX`.
    pub max_pages: i64,
    /// `KSM_SLEEP_MSEC`, for a host of 16 GiB. Proxmox sets 100.
    pub sleep_millisecs: u64,
    /// `KSM_THRES_COEF`, in percent of the memory.
    pub threshold_percent: u64,
    /// `KSM_THRES_CONST`, in kB.
    pub threshold_kib: u64,
}

impl Default for Ksmtuned {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(60),
            boost_pages: 300,
            decay_pages: -50,
            min_pages: 64,
            max_pages: 1250,
            sleep_millisecs: 10,
            threshold_percent: 20,
            threshold_kib: 2048,
        }
    }
}

/// The variables of the script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KsmtunedState {
    /// `total`, in kB.
    pub total_kib: u64,
    /// `thres`, in kB.
    pub threshold_kib: u64,
    /// `sleep`, in milliseconds.
    pub sleep_millisecs: u64,
    /// `npages`.
    pub npages: i64,
}

impl Ksmtuned {
    /// The script's setup before its loop.
    pub fn start(&self, total: Bytes) -> KsmtunedState {
        let total_kib = total.0 / 1024;
        let sleep = (self.sleep_millisecs * 16 * 1024 * 1024).checked_div(total_kib).unwrap_or(u64::MAX);
        KsmtunedState {
            total_kib,
            threshold_kib: (total_kib * self.threshold_percent / 100).max(self.threshold_kib),
            // The kernel takes an unsigned int.
            sleep_millisecs: sleep.clamp(10, u64::from(u32::MAX)),
            npages: 0,
        }
    }

    /// One iteration of the loop (`adjust`).
    pub fn step(&self, state: KsmtunedState, free: Bytes, committed: Bytes) -> (KsmtunedState, Settings) {
        let (free, committed) = (free.0 / 1024, committed.0 / 1024);
        if committed + state.threshold_kib < state.total_kib && free > state.threshold_kib {
            return (state, Settings::from([(Setting::Run, "0".to_owned())]));
        }
        let change = if free < state.threshold_kib { self.boost_pages } else { self.decay_pages };
        let npages = (state.npages + change).max(self.min_pages).min(self.max_pages);
        let settings = Settings::from([
            (Setting::PagesToScan, npages.to_string()),
            (Setting::SleepMillisecs, state.sleep_millisecs.to_string()),
            (Setting::Run, "1".to_owned()),
        ]);
        (KsmtunedState { npages, ..state }, settings)
    }
}
