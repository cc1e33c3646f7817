//! Numbered places at which a test ends this process, to show that what it was doing to others survives that.
//!
//! Without the cargo feature `fault-points` a point is nothing at all. With it, the environment variable
//! `PAGEFOLD_FAULT_POINT` says what happens: `N` ends the process at the N-th point reached, from 1, by a SIGKILL that
//! it sends itself, so that no handler, destructor or exit function of it runs; `N NAME` at the N-th time that it is at
//! the point of that name; `stop N` and `stop N NAME` stop the process there by a SIGSTOP, until somebody has it go on;
//! `count` prints on exit how many were reached, as `fault points: N` on standard error, and how often each, as
//! `fault points at NAME: N`; so does [`report_before_exit`], for a process that ends without an exit. Limits: points are numbered
//! in the order in which this process reaches them, which is the same in each run only as long as one thread reaches
//! them at a time.

/// A place to fail at. `name` says what has just been done.
#[cfg(not(feature = "fault-points"))]
#[inline(always)]
pub fn point(_name: &'static str) {}

/// To be called by a process that ends by `_exit`, right before that.
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
        /// At the N-th time that a point is reached, or the one of a name.
        SignalAt(u64, Option<String>, Signal),
    }

    static POINTS_REACHED: AtomicU64 = AtomicU64::new(0);
    static COUNTS_BY_NAME: Mutex<BTreeMap<&str, u64>> = Mutex::new(BTreeMap::new());

    fn fault_plan() -> &'static FaultPlan {
        static FAULT_PLAN: OnceLock<FaultPlan> = OnceLock::new();
        FAULT_PLAN.get_or_init(|| match std::env::var(FAULT_POINT_VARIABLE) {
            Err(_) => FaultPlan::Disabled,
            Ok(text) if text == "count" => {
                // SAFETY: `print_count` is a function of the signature asked for that never unwinds into C.
                unsafe { libc::atexit(print_counts) };
                FaultPlan::CountPoints
            }
            Ok(text) => {
                let stops = text.strip_prefix("stop ");
                let (number, name) = match stops.unwrap_or(&text).split_once(' ') {
                    Some((number, name)) => (number, Some(name.to_owned())),
                    None => (stops.unwrap_or(&text), None),
                };
                let number = number
                    .parse()
                    .unwrap_or_else(|_| panic!("{FAULT_POINT_VARIABLE} is {text:?}: [stop ]N[ NAME] or count"));
                FaultPlan::SignalAt(number, name, if stops.is_some() { Signal::STOP } else { Signal::KILL })
            }
        })
    }

    extern "C" fn print_counts() {
        use std::io::Write;
        let Ok(counted) = COUNTS_BY_NAME.lock() else { return };
        let mut lines = format!("fault points: {}\n", counted.values().sum::<u64>());
        for (name, times) in &*counted {
            lines.push_str(&format!("fault points at {name}: {times}\n"));
        }
        // An exit without standard error has nobody to tell.
        let _ = std::io::stderr().write_all(lines.as_bytes());
    }

    /// To be called by a process that ends by `_exit`, right before that.
    pub fn report_before_exit() {
        if matches!(fault_plan(), FaultPlan::CountPoints) {
            print_counts();
        }
    }

    /// A place to fail at. `name` says what has just been done.
    pub fn point(name: &'static str) {
        match fault_plan() {
            FaultPlan::Disabled => {}
            FaultPlan::CountPoints => {
                *COUNTS_BY_NAME.lock().expect("nothing panics with it").entry(name).or_default() += 1
            }
            FaultPlan::SignalAt(_, Some(wanted), _) if wanted != name => {}
            FaultPlan::SignalAt(at, _, signal) => {
                let number = POINTS_REACHED.fetch_add(1, Ordering::SeqCst) + 1;
                if number != *at {
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
