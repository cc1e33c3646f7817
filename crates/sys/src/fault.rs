//! Numbered places at which a test ends this process, to show that what it was doing to others survives that.
//!
//! Without the cargo feature `fault-points` a point is nothing at all. With it, the environment variable
//! `PAGEFOLD_FAULT_POINT` says what happens: `N` ends the process at the N-th point reached, from 1, by a SIGKILL that
//! it sends itself, so that no handler, destructor or exit function of it runs; `count` prints on exit how many were
//! reached, as `fault points: N` on standard error; `stop N` stops the process at the N-th point by a SIGSTOP, until
//! somebody has it go on. Limits: points are numbered in the order in which this process
//! reaches them, which is the same in each run only as long as one thread reaches them at a time.

/// A place to fail at. `name` says what has just been done.
#[cfg(not(feature = "fault-points"))]
#[inline(always)]
pub fn point(_name: &'static str) {}

#[cfg(feature = "fault-points")]
pub use armed::point;

#[cfg(feature = "fault-points")]
mod armed {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    use rustix::process::{Signal, getpid, kill_process};

    const VARIABLE: &str = "PAGEFOLD_FAULT_POINT";

    #[derive(Clone, Copy)]
    enum Plan {
        Nothing,
        Count,
        EndAt(u64),
        StopAt(u64),
    }

    static REACHED: AtomicU64 = AtomicU64::new(0);

    fn plan() -> Plan {
        static PLAN: OnceLock<Plan> = OnceLock::new();
        *PLAN.get_or_init(|| match std::env::var(VARIABLE) {
            Err(_) => Plan::Nothing,
            Ok(text) if text == "count" => {
                // SAFETY: `print_count` is a function of the signature asked for that never unwinds into C.
                unsafe { libc::atexit(print_count) };
                Plan::Count
            }
            Ok(text) => {
                let number = text.strip_prefix("stop ").unwrap_or(&text).parse();
                let number = number.unwrap_or_else(|_| panic!("{VARIABLE} is {text:?}: a number, stop N or count"));
                if text.starts_with("stop ") { Plan::StopAt(number) } else { Plan::EndAt(number) }
            }
        })
    }

    extern "C" fn print_count() {
        use std::io::Write;
        // An exit without standard error has nobody to tell.
        let _ = writeln!(std::io::stderr(), "fault points: {}", REACHED.load(Ordering::SeqCst));
    }

    /// A place to fail at. `name` says what has just been done.
    pub fn point(name: &'static str) {
        let plan = plan();
        let number = REACHED.fetch_add(1, Ordering::SeqCst) + 1;
        if matches!(plan, Plan::StopAt(stop) if stop == number) {
            eprintln!("fault point {number}: {name}");
            kill_process(getpid(), Signal::STOP).expect("a process may signal itself");
        }
        if matches!(plan, Plan::EndAt(end) if end == number) {
            eprintln!("fault point {number}: {name}");
            kill_process(getpid(), Signal::KILL).expect("a process may signal itself");
            loop {
                std::thread::park();
            }
        }
    }
}
