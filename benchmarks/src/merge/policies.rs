//! What is compared: ways of driving ksmd, as settings and steps, and pagefold as a command.
//!
//! Sources: mm/ksm.c of Linux 6.18 for the default and the advisor; ksmtuned of ksmtuned 4.20150326 as Debian ships it.

use pagefold_labs::ksm::Ksm;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// A way to merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Policy {
    /// `pages_to_scan` 100, `sleep_millisecs` 20.
    Default,
    /// ksmtuned, as if memory were short: otherwise it starts nothing at all.
    Ksmtuned,
    /// The kernel's advisor, with its default target of 200 s.
    Advisor200,
    /// The kernel's advisor, to finish a pass in 20 s.
    Advisor20,
    /// Everything enrolled, ksmd without a pause, or with pauses that keep it to a bound.
    Whole,
    /// `pagefold merge`.
    Guided,
}

impl Policy {
    /// All, the slow ones first.
    pub const ALL: [Self; 6] =
        [Self::Default, Self::Ksmtuned, Self::Advisor200, Self::Advisor20, Self::Whole, Self::Guided];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "default 100/20",
            Self::Ksmtuned => "ksmtuned",
            Self::Advisor200 => "advisor 200 s",
            Self::Advisor20 => "advisor 20 s",
            Self::Whole => "whole, flat out",
            Self::Guided => "guided",
        }
    }

    /// Whether it is given a window only, and the rest is extrapolated.
    pub fn is_slow(self) -> bool {
        !matches!(self, Self::Whole | Self::Guided)
    }

    /// Whether the workload is to enrol itself.
    pub fn enrols(self) -> bool {
        self != Self::Guided
    }

    /// Write its settings, `run` not among them.
    pub fn prepare(self, ksm: &Ksm, memory_kib: u64) {
        ksm.set("advisor_mode", "none");
        let (pages, sleep) = match self {
            Self::Default | Self::Guided | Self::Advisor200 | Self::Advisor20 => (100, 20),
            Self::Ksmtuned => (ksmtuned_pages(0), ksmtuned_sleep(memory_kib)),
            Self::Whole => (20_000, 0),
        };
        ksm.set("pages_to_scan", pages);
        ksm.set("sleep_millisecs", sleep);
        let target = match self {
            Self::Advisor200 => 200,
            Self::Advisor20 => 20,
            _ => return,
        };
        ksm.set("advisor_mode", "scan-time");
        ksm.set("advisor_target_scan_time", target);
    }

    /// How many pages it has scanned at a time, if in its first `window` seconds it scanned `first`: the inverse of the
    /// pace with which it goes on. The advisor's next steps depend on what it finds; its pace is taken as it was.
    pub fn seconds_to_scan(self, pages: f64, first: f64, window: f64) -> f64 {
        let rate = first / window;
        if self != Self::Ksmtuned {
            return pages / rate;
        }
        let (mut minute, mut left) = (0, pages);
        loop {
            // Pages in a batch grow; what lies between two batches stays.
            let pace = rate * ksmtuned_pages(minute) as f64 / ksmtuned_pages(0) as f64;
            if left <= pace * 60.0 {
                return minute as f64 * 60.0 + left / pace;
            }
            left -= pace * 60.0;
            minute += 1;
        }
    }
}

/// `pages_to_scan` after so many intervals of 60 s in which memory stayed short: 300 more each, from 64 to 1250.
fn ksmtuned_pages(minute: u64) -> u64 {
    (300 * (minute + 1)).clamp(64, 1250)
}

/// Its pause: 10 ms at 16 GiB of memory, shorter with more, at least 10.
fn ksmtuned_sleep(memory_kib: u64) -> u64 {
    (10 * 16 * 1024 * 1024 / memory_kib).max(10)
}

/// The pause after a batch that took so long, for ksmd to take this share of a CPU, in milliseconds.
pub fn pause(batch_seconds: f64, share: f64) -> u64 {
    if share >= 1.0 { 0 } else { (batch_seconds * 1000.0 * (1.0 - share) / share).round() as u64 }
}

/// How pagefold is called. The only place that knows.
#[derive(Clone, Debug)]
pub struct Pagefold {
    /// The binary.
    pub program: PathBuf,
}

impl Pagefold {
    /// One merge of these processes, within a bound on CPU in percent of one.
    pub fn merge(&self, pids: &[u32], percent: u32) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("merge");
        for pid in pids {
            command.args(["--pid", &pid.to_string()]);
        }
        // They belong to one user; machines would be domains of their own.
        command.args(["--across-domains", "--cpu", &percent.to_string(), "--json"]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    }

    /// The same for programs that go on computing: called again and again while they run.
    pub fn merge_running(&self, pids: &[u32], percent: u32) -> Command {
        let mut command = self.merge(pids, percent);
        command.args(["--deadline", "10s"]);
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ksmtuned_steps_as_its_script() {
        assert_eq!((0..6).map(ksmtuned_pages).collect::<Vec<_>>(), [300, 600, 900, 1200, 1250, 1250]);
        assert_eq!([4 << 20, 16 << 20, 64 << 20].map(ksmtuned_sleep), [40, 10, 10]);
    }

    #[test]
    fn a_pace_is_carried_on() {
        assert_eq!(Policy::Default.seconds_to_scan(1000.0, 100.0, 10.0), 100.0);
        // 10 a second in the first minute, 20 in the second: 600 and then 400.
        assert_eq!(Policy::Ksmtuned.seconds_to_scan(1000.0, 100.0, 10.0), 80.0);
    }

    #[test]
    fn a_pause_keeps_to_a_share() {
        assert_eq!((pause(0.1, 1.0), pause(0.1, 0.5), pause(0.1, 0.2)), (0, 100, 400));
    }
}
