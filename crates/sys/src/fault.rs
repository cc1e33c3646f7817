//! Numbered fault points at which a test ends this process, to show that the processes it works on survive.
//!
//! Without the cargo feature `fault-points` a point does nothing. With it, the environment variable
//! `PAGEFOLD_FAULT_POINT` selects the action:
//!
//! - `N` ends the process at the N-th point reached, counted from 1. The process sends itself SIGKILL, so no handler,
//!   destructor or exit function runs.
//! - `N NAME` ends it when it reaches the point NAME for the N-th time.
//! - `stop N` and `stop N NAME` stop the process there with SIGSTOP, until it receives SIGCONT.
//! - `count` prints the number of points reached on exit, as `fault points: N` on standard error, and one line
//!   `fault points at NAME: N` for each name. A process that ends without exit functions calls [`report_before_exit`].
//!
//! Limits: points are numbered in the order in which this process reaches them. The order is the same in each run only
//! if one thread at a time reaches them.

/// A fault point. `name` says which step has just finished.
#[cfg(not(feature = "fault-points"))]
#[inline(always)]
pub fn point(_name: &'static str) {}

/// A process that ends by `_exit` calls this right before.
#[cfg(not(feature = "fault-points"))]
#[inline(always)]
pub fn report_before_exit() {}

#[cfg(feature = "fault-points")]
pub use armed::{point, report_before_exit};

#[cfg(feature = "fault-points")]
mod armed {
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Mutex, OnceLock};

    use rustix::process::{Signal, getpid, kill_process};

    const FAULT_POINT_VARIABLE: &str = "PAGEFOLD_FAULT_POINT";

    enum FaultPlan {
        Disabled,
        CountPoints,
        /// At the N-th point reached, or at the N-th time that the named point is reached.
        SignalAt(u64, Option<String>, Signal),
    }

    static POINTS_REACHED: AtomicU64 = AtomicU64::new(0);
    static COUNTS_BY_NAME: Mutex<BTreeMap<&str, u64>> = Mutex::new(BTreeMap::new());

    fn fault_plan() -> &'static FaultPlan {
        static FAULT_PLAN: OnceLock<FaultPlan> = OnceLock::new();
        FAULT_PLAN.get_or_init(|| match std::env::var(FAULT_POINT_VARIABLE) {
            Err(_) => FaultPlan::Disabled,
            Ok(text) if text == "count" => {
                // SAFETY: `print_counts` has the required signature and never unwinds into C.
                unsafe { libc::atexit(print_counts) };
                FaultPlan::CountPoints
            }
            Ok(text) => {
                let stop_target = text.strip_prefix("stop ");
                let (number, name) = match stop_target.unwrap_or(&text).split_once(' ') {
                    Some((number, name)) => (number, Some(name.to_owned())),
                    None => (stop_target.unwrap_or(&text), None),
                };
                let number = number
                    .parse()
                    .unwrap_or_else(|_| panic!("{FAULT_POINT_VARIABLE} is {text:?}: [stop ]N[ NAME] or count"));
                FaultPlan::SignalAt(number, name, if stop_target.is_some() { Signal::STOP } else { Signal::KILL })
            }
        })
    }

    extern "C" fn print_counts() {
        use std::io::Write;
        let Ok(counts) = COUNTS_BY_NAME.lock() else { return };
        let mut lines = format!("fault points: {}\n", counts.values().sum::<u64>());
        for (name, count) in &*counts {
            lines.push_str(&format!("fault points at {name}: {count}\n"));
        }
        // Without standard error there is no place for the report.
        let _ = std::io::stderr().write_all(lines.as_bytes());
    }

    /// A process that ends by `_exit` calls this right before.
    pub fn report_before_exit() {
        if matches!(fault_plan(), FaultPlan::CountPoints) {
            print_counts();
        }
    }

    /// A fault point. `name` says which step has just finished.
    pub fn point(name: &'static str) {
        match fault_plan() {
            FaultPlan::Disabled => {}
            FaultPlan::CountPoints => {
                *COUNTS_BY_NAME.lock().expect("no thread panics while it holds this lock").entry(name).or_default() += 1
            }
            FaultPlan::SignalAt(_, Some(wanted_name), _) if wanted_name != name => {}
            FaultPlan::SignalAt(wanted_number, _, signal) => {
                let number = POINTS_REACHED.fetch_add(1, Ordering::SeqCst) + 1;
                if number != *wanted_number {
                    return;
                }
                eprintln!("fault point {number}: {name}");
                kill_process(getpid(), *signal).expect("a process may signal itself");
                if *signal == Signal::KILL {
                    loop {
                        std::thread::park();
                    }
                }
            }
        }
    }
}
