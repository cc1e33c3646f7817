//! Whether programs are slowed down while the daemon works, and the reaction: a pause, then a lower pace.
//!
//! Waiting of programs is compared between work and idle times of the daemon, so that a host that is busy anyway does
//! not count as slowed down by it. The measure is the share of wanted CPU time that tracked programs spend in run
//! queues. Where the kernel does not report it, the measure is the time in which any task waited for a CPU, which
//! includes the daemon's own waiting. The time that a hypervisor gives to other guests counts as well, since the
//! daemon's CPU use may be the cause.
//!
//! The excess is weighted by the daemon's share of the last ten seconds. A new process that boots waits for a CPU and
//! is scanned and merged just then, in a second of work that costs it little. Continuous work counts in full.
//!
//! Each detected slowdown doubles the pause of the one before, and afterwards ksmd works at half the pace. Each second
//! of work without longer waiting undoes one such step. At the lowest pace the work is not halted, so that it completes
//! on a host that is always busy.

use std::time::Duration;

/// Averaging times of readings during work, and while idle.
const AVERAGING_TIMES: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(30)];

/// Time of which a slowdown is a share.
const LOAD_WINDOW: Duration = Duration::from_secs(10);

/// Seconds of work, and of idle time, that must be observed before a verdict.
const MIN_OBSERVED_SECONDS: [f64; 2] = [0.4, 1.0];

/// CPU seconds that programs must want before their waiting share means anything.
const MIN_WANTED_CPU_SECONDS: f64 = 0.05;

/// The first pause.
const FIRST_PAUSE: Duration = Duration::from_secs(10);

/// Maximum number of steps: pauses of five minutes, and 1/32 of the pace.
const MAX_BACKOFF_STEPS: u32 = 5;

/// Work without longer waiting that undoes one step.
const CLEAR_WORK_PER_STEP: Duration = Duration::from_secs(1);

/// Waiting of programs since the last reading.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WaitTimes {
    /// Time since the last reading.
    pub elapsed: Duration,
    /// Time that threads of tracked programs spent in run queues, and running, each summed over the observed threads.
    pub queue_and_run_time: Option<(Duration, Duration)>,
    /// Seconds in which some task waited for a CPU.
    pub cpu_pressure_seconds: Option<f64>,
    /// Share of the time of all CPUs that a hypervisor gave to other guests.
    pub stolen_share: Option<f64>,
}

/// Exponentially decaying average of waiting.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct WaitAverage {
    elapsed_seconds: f64,
    queued_seconds: f64,
    wanted_seconds: f64,
    cpu_pressure_seconds: Option<f64>,
    stolen_seconds: f64,
}

impl WaitAverage {
    fn add(&mut self, waits: &WaitTimes, averaging_time: Duration) {
        let seconds = waits.elapsed.as_secs_f64();
        let decay = (-seconds / averaging_time.as_secs_f64()).exp();
        let add = |sum: &mut f64, value: f64| *sum = *sum * decay + value;
        let (queued, ran) = waits.queue_and_run_time.unwrap_or_default();
        add(&mut self.elapsed_seconds, seconds);
        add(&mut self.queued_seconds, queued.as_secs_f64());
        add(&mut self.wanted_seconds, (queued + ran).as_secs_f64());
        add(&mut self.stolen_seconds, waits.stolen_share.unwrap_or(0.0) * seconds);
        self.cpu_pressure_seconds = match (waits.queue_and_run_time, waits.cpu_pressure_seconds) {
            (None, Some(pressure)) => Some(self.cpu_pressure_seconds.unwrap_or(0.0) * decay + pressure),
            _ => None,
        };
    }

    /// Shares of the time for which programs wait, each between 0 and 1: in run queues or for any CPU, and because of
    /// other guests.
    fn waiting_shares(&self) -> [f64; 2] {
        let queued =
            if self.wanted_seconds >= MIN_WANTED_CPU_SECONDS { self.queued_seconds / self.wanted_seconds } else { 0.0 };
        let seconds = self.elapsed_seconds.max(f64::MIN_POSITIVE);
        let waiting = self.cpu_pressure_seconds.map_or(queued, |pressure| pressure / seconds);
        [waiting, self.stolen_seconds / seconds].map(|part| part.clamp(0.0, 1.0))
    }
}

/// Observed waiting of programs during work and idle time, and the backoff state.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SlowdownMonitor {
    while_working: WaitAverage,
    while_idle: WaitAverage,
    /// Approximate seconds of work within the last [`LOAD_WINDOW`], with exponential decay.
    work_seconds_in_window: f64,
    /// Whether the daemon worked at the last reading.
    was_working: bool,
    clear_work_time: Duration,
    backoff_steps: u32,
    paused_until: Duration,
}

impl SlowdownMonitor {
    /// Take in a reading made during work or while idle. Returns the length of the pause and its reason if the work
    /// makes programs wait longer by more than `max_slowdown` of their time.
    pub fn observe(
        &mut self,
        waits: &WaitTimes,
        is_working: bool,
        max_slowdown: f64,
        now: Duration,
    ) -> Option<(Duration, String)> {
        let state_unchanged = std::mem::replace(&mut self.was_working, is_working) == is_working;
        let seconds = waits.elapsed.as_secs_f64();
        self.work_seconds_in_window *= (-seconds / LOAD_WINDOW.as_secs_f64()).exp();
        if is_working {
            self.work_seconds_in_window = (self.work_seconds_in_window + seconds).min(LOAD_WINDOW.as_secs_f64());
        }
        // A reading that spans a change between work and idle time is not used.
        if !state_unchanged || waits.elapsed.is_zero() {
            return None;
        }
        if !is_working {
            self.while_idle.add(waits, AVERAGING_TIMES[1]);
            return None;
        }
        self.while_working.add(waits, AVERAGING_TIMES[0]);
        if self.while_working.elapsed_seconds < MIN_OBSERVED_SECONDS[0]
            || self.while_idle.elapsed_seconds < MIN_OBSERVED_SECONDS[1]
        {
            return None;
        }
        let (work, idle) = (self.while_working.waiting_shares(), self.while_idle.waiting_shares());
        let work_share = self.work_seconds_in_window / LOAD_WINDOW.as_secs_f64();
        let [waiting, stolen] = [0, 1].map(|part: usize| work[part] - idle[part]);
        let excess = waiting.max(stolen);
        if excess <= max_slowdown {
            self.clear_work_time += waits.elapsed;
            if self.clear_work_time >= CLEAR_WORK_PER_STEP {
                (self.clear_work_time, self.backoff_steps) = (Duration::ZERO, self.backoff_steps.saturating_sub(1));
            }
        }
        // A halted task still runs for a moment, and a census runs to its end.
        if excess * work_share <= max_slowdown || now < self.paused_until {
            return None;
        }
        let (cause, part) = match waiting >= stolen {
            true => ("programs waited for a CPU", 0),
            false => ("the hypervisor gave CPU time to other guests", 1),
        };
        let why = format!(
            "{cause} for {:.0} % of their time while it worked, which was {:.0} % of the time, and for {:.0} % before",
            work[part] * 100.0,
            work_share * 100.0,
            idle[part] * 100.0
        );
        let pause = FIRST_PAUSE * 2u32.pow(self.backoff_steps);
        self.backoff_steps = (self.backoff_steps + 1).min(MAX_BACKOFF_STEPS);
        (self.while_working, self.clear_work_time, self.paused_until) =
            (WaitAverage::default(), Duration::ZERO, now + pause);
        Some((pause, why))
    }

    /// End of the current pause.
    pub fn paused_until(&self) -> Duration {
        self.paused_until
    }

    /// Factor of ksmd's pace.
    pub fn pace_factor(&self) -> f64 {
        0.5f64.powi(self.backoff_steps as i32)
    }

    /// Whether the pace is at its minimum.
    pub fn is_at_lowest_pace(&self) -> bool {
        self.backoff_steps >= MAX_BACKOFF_STEPS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TICK: Duration = Duration::from_millis(250);

    /// A reading after a tick: milliseconds in run queues and running.
    fn wait_times(queued: u64, ran: u64) -> WaitTimes {
        let queued = Some((Duration::from_millis(queued), Duration::from_millis(ran)));
        WaitTimes {
            elapsed: TICK,
            queue_and_run_time: queued,
            cpu_pressure_seconds: Some(0.2),
            stolen_share: Some(0.0),
        }
    }

    fn observe_times(
        slowdown: &mut SlowdownMonitor,
        waits: &WaitTimes,
        is_working: bool,
        times: u32,
    ) -> Vec<(u32, Duration, String)> {
        let observe_tick = |tick| Some((tick, slowdown.observe(waits, is_working, 0.1, TICK * tick)?));
        (1..=times).filter_map(observe_tick).map(|(tick, (pause, why))| (tick, pause, why)).collect()
    }

    /// The first slowdown detected during work.
    fn first_slowdown(slowdown: &mut SlowdownMonitor, waits: &WaitTimes) -> (u32, Duration, String) {
        let observe_tick =
            |tick| slowdown.observe(waits, true, 0.1, TICK * tick).map(|(pause, why)| (tick, pause, why));
        (1..100).find_map(observe_tick).unwrap()
    }

    #[test]
    fn repeated_slowdowns_double_the_pause() {
        let mut slowdown = SlowdownMonitor::default();
        assert_eq!(observe_times(&mut slowdown, &wait_times(10, 490), false, 40), []);
        // 100 ms of 500 ms are 20 %, 18 points more than when idle. The first reading spans the change and is skipped;
        // two more suffice. The limit of a tenth is exceeded once the daemon worked for more than 56 % of the time (a
        // tenth of 18 %).
        let (tick, pause, why) = first_slowdown(&mut slowdown, &wait_times(100, 400));
        assert!((30..36).contains(&tick), "1 - e^(-t / 10 s) is 0.56 after 8.1 s, 33 ticks: {tick}");
        let words = "programs waited for a CPU for 20 % of their time while it worked, which was 56 % of the time, and \
                     for 2 % before";
        assert_eq!((pause, why.as_str()), (FIRST_PAUSE, words));
        assert_eq!((slowdown.paused_until(), slowdown.pace_factor()), (TICK * tick + FIRST_PAUSE, 0.5));
        assert_eq!(observe_times(&mut slowdown, &wait_times(10, 490), false, 400), []);
        assert_eq!(first_slowdown(&mut slowdown, &wait_times(100, 400)).1, FIRST_PAUSE * 2);
        assert_eq!(slowdown.pace_factor(), 0.25);
        assert_eq!(observe_times(&mut slowdown, &wait_times(10, 490), false, 400), []);
        // 11 % is no more than a tenth above 2 %: one second of such work undoes one step, two seconds both.
        assert_eq!(observe_times(&mut slowdown, &wait_times(55, 445), true, 10), []);
        assert_eq!(slowdown.pace_factor(), 1.0);
        assert!(!slowdown.is_at_lowest_pace());
    }

    #[test]
    fn short_bursts_of_work_are_no_slowdown() {
        let mut slowdown = SlowdownMonitor::default();
        observe_times(&mut slowdown, &wait_times(10, 490), false, 40);
        for _ in 0..30 {
            // Two thirds of their time for 1.25 s, every 20 s: about 4 % in all.
            assert_eq!(observe_times(&mut slowdown, &wait_times(330, 170), true, 5), []);
            assert_eq!(observe_times(&mut slowdown, &wait_times(10, 490), false, 75), []);
        }
        assert_eq!(slowdown.pace_factor(), 1.0);
        assert!(
            !observe_times(&mut slowdown, &wait_times(330, 170), true, 12).is_empty(),
            "three seconds exceed the limit"
        );
    }

    #[test]
    fn busy_host_alone_is_no_slowdown() {
        let mut slowdown = SlowdownMonitor::default();
        assert_eq!(observe_times(&mut slowdown, &wait_times(250, 250), false, 40), []);
        assert_eq!(observe_times(&mut slowdown, &wait_times(280, 220), true, 40), []);
        // Programs that hardly want CPU time give no verdict: 16 ms in two seconds.
        let mut slowdown = SlowdownMonitor::default();
        assert_eq!(observe_times(&mut slowdown, &wait_times(0, 1), false, 40), []);
        assert_eq!(observe_times(&mut slowdown, &wait_times(1, 1), true, 40), []);
    }

    #[test]
    fn cpu_pressure_replaces_missing_queue_times_and_steal_counts() {
        let pressed =
            |pressure| WaitTimes { elapsed: TICK, cpu_pressure_seconds: Some(pressure), ..WaitTimes::default() };
        let mut slowdown = SlowdownMonitor::default();
        assert_eq!(observe_times(&mut slowdown, &pressed(0.05), false, 40), []);
        // 0.1 of 0.25 s is 40 %, 0.05 is 20 %.
        let slowdowns = observe_times(&mut slowdown, &pressed(0.1), true, 40);
        assert!(
            slowdowns[0].2.contains("for 40 % of their time") && slowdowns[0].2.contains("20 % before"),
            "{slowdowns:?}"
        );
        let mut slowdown = SlowdownMonitor::default();
        assert_eq!(observe_times(&mut slowdown, &wait_times(10, 490), false, 40), []);
        let slowdowns =
            observe_times(&mut slowdown, &WaitTimes { stolen_share: Some(0.15), ..wait_times(10, 490) }, true, 100);
        assert!(slowdowns[0].2.starts_with("the hypervisor gave CPU time to other guests for 15 %"), "{slowdowns:?}");
    }

    #[test]
    fn no_slowdown_without_idle_readings() {
        assert_eq!(observe_times(&mut SlowdownMonitor::default(), &wait_times(400, 100), true, 40), []);
    }

    proptest! {
        /// Without longer waiting no slowdown is reported, and steps stay within their bounds.
        #[test]
        fn backoff_steps_follow_excess_waiting_only(
            idle_wait in 0u64..400,
            phases in prop::collection::vec((any::<bool>(), 0u64..400, 1u32..20), 1..40),
        ) {
            let mut slowdown = SlowdownMonitor::default();
            let mut unslowed = SlowdownMonitor::default();
            observe_times(&mut slowdown, &wait_times(idle_wait, 100), false, 20);
            observe_times(&mut unslowed, &wait_times(idle_wait, 100), false, 20);
            for (is_working, queued, times) in phases {
                let waits = wait_times(if is_working { queued } else { idle_wait }, 100);
                let slowdowns = observe_times(&mut slowdown, &waits, is_working, times);
                prop_assert!(slowdowns.iter().all(|(_, pause, _)| *pause >= FIRST_PAUSE && *pause <= FIRST_PAUSE * 32));
                prop_assert!((0.03..=1.0).contains(&slowdown.pace_factor()));
                let waits = wait_times(if is_working { queued.min(idle_wait) } else { idle_wait }, 100);
                let slowdowns = observe_times(&mut unslowed, &waits, is_working, times);
                prop_assert!(slowdowns.is_empty() && unslowed.pace_factor() == 1.0);
            }
        }
    }
}
