//! Whether programs are slowed down while the daemon works, and what it does about it: rest, then work at a lower pace.
//!
//! What programs wait for is compared between when it works and when it rests, so that a host that is busy anyway is
//! not taken for one that it makes busy. What counts is the part of the CPU time that managed programs want for which
//! they are kept waiting in run queues; where the kernel does not tell, the time in which any task waited for a CPU, in
//! which its own waiting counts, too; and the time that a hypervisor gives to others, since the CPU that it uses may be
//! what is taken away.
//!
//! What counts of that is how much it is of ten seconds: who has just come and boots waits for a CPU, and is looked at
//! and merged just then, in a second of work that costs it little. Whoever works on and on slows programs down by all
//! that they wait for longer.
//!
//! Each time that it finds itself in the way it rests for twice as long as the time before and then has ksmd work at
//! half the pace; each second of work in which nobody waits longer takes one such step back. At the lowest pace it is
//! not stopped, so that it comes to an end on a host that is always busy.

use std::time::Duration;

/// The time over which what is seen at work is averaged, and at rest.
const AVERAGING_TIMES: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(30)];

/// The time of which a slow-down is a part.
const LOAD_WINDOW: Duration = Duration::from_secs(10);

/// What has to be seen of work, and of rest, before anything is said.
const MIN_OBSERVED_SECONDS: [f64; 2] = [0.4, 1.0];

/// CPU seconds that programs want before a part of them means anything.
const MIN_WANTED_CPU_SECONDS: f64 = 0.05;

/// The first pause.
const FIRST_PAUSE: Duration = Duration::from_secs(10);

/// The most steps: pauses of five minutes, and a thirty-second of the pace.
const MAX_BACKOFF_STEPS: u32 = 5;

/// Work without anybody waiting longer that takes a step back.
const CLEAR_WORK_PER_STEP: Duration = Duration::from_secs(1);

/// What programs waited for since the reading before.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WaitTimes {
    /// How long ago that was.
    pub elapsed: Duration,
    /// For how long threads of managed programs stood in run queues and ran, both summed over the threads that were
    /// looked at.
    pub queue_and_run_time: Option<(Duration, Duration)>,
    /// Seconds in which some task waited for a CPU.
    pub cpu_pressure_seconds: Option<f64>,
    /// The share of the time of all CPUs that a hypervisor gave to others.
    pub stolen_share: Option<f64>,
}

/// What programs waited for, forgotten little by little.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct WaitAverage {
    elapsed_seconds: f64,
    queued_seconds: f64,
    wanted_seconds: f64,
    cpu_pressure_seconds: Option<f64>,
    stolen_seconds: f64,
}

impl WaitAverage {
    fn add(&mut self, waits: &WaitTimes, over: Duration) {
        let seconds = waits.elapsed.as_secs_f64();
        let kept = (-seconds / over.as_secs_f64()).exp();
        let add = |sum: &mut f64, new: f64| *sum = *sum * kept + new;
        let (queued, ran) = waits.queue_and_run_time.unwrap_or_default();
        add(&mut self.elapsed_seconds, seconds);
        add(&mut self.queued_seconds, queued.as_secs_f64());
        add(&mut self.wanted_seconds, (queued + ran).as_secs_f64());
        add(&mut self.stolen_seconds, waits.stolen_share.unwrap_or(0.0) * seconds);
        self.cpu_pressure_seconds = match (waits.queue_and_run_time, waits.cpu_pressure_seconds) {
            (None, Some(pressure)) => Some(self.cpu_pressure_seconds.unwrap_or(0.0) * kept + pressure),
            _ => None,
        };
    }

    /// The parts of the time for which programs wait, each between 0 and 1: in run queues or for any CPU, and because
    /// of others than this host.
    fn waiting_shares(&self) -> [f64; 2] {
        let queued =
            if self.wanted_seconds >= MIN_WANTED_CPU_SECONDS { self.queued_seconds / self.wanted_seconds } else { 0.0 };
        let seconds = self.elapsed_seconds.max(f64::MIN_POSITIVE);
        let waiting = self.cpu_pressure_seconds.map_or(queued, |pressure| pressure / seconds);
        [waiting, self.stolen_seconds / seconds].map(|part| part.clamp(0.0, 1.0))
    }
}

/// What is known of how it slows programs down.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SlowdownMonitor {
    while_working: WaitAverage,
    while_idle: WaitAverage,
    /// For how long it worked of the last [`LOAD_WINDOW`], about, in seconds: what is past counts less and less.
    work_seconds_in_window: f64,
    /// Whether it worked at the last reading.
    was_working: bool,
    clear_work_time: Duration,
    backoff_steps: u32,
    paused_until: Duration,
}

impl SlowdownMonitor {
    /// Take in a reading made while it works, or rests. Tells for how long it should rest, and why, if by its work
    /// programs wait for longer by this part of their time.
    pub fn observe(
        &mut self,
        waits: &WaitTimes,
        is_working: bool,
        max_slowdown: f64,
        now: Duration,
    ) -> Option<(Duration, String)> {
        let same = std::mem::replace(&mut self.was_working, is_working) == is_working;
        let seconds = waits.elapsed.as_secs_f64();
        self.work_seconds_in_window *= (-seconds / LOAD_WINDOW.as_secs_f64()).exp();
        if is_working {
            self.work_seconds_in_window = (self.work_seconds_in_window + seconds).min(LOAD_WINDOW.as_secs_f64());
        }
        // What lies half in the work says nothing of either.
        if !same || waits.elapsed.is_zero() {
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
        let (work, rest) = (self.while_working.waiting_shares(), self.while_idle.waiting_shares());
        let busy = self.work_seconds_in_window / LOAD_WINDOW.as_secs_f64();
        let [waiting, stolen] = [0, 1].map(|part: usize| work[part] - rest[part]);
        let longer = waiting.max(stolen);
        if longer <= max_slowdown {
            self.clear_work_time += waits.elapsed;
            if self.clear_work_time >= CLEAR_WORK_PER_STEP {
                (self.clear_work_time, self.backoff_steps) = (Duration::ZERO, self.backoff_steps.saturating_sub(1));
            }
        }
        // What is told to end goes on for a moment, and a census to its end.
        if longer * busy <= max_slowdown || now < self.paused_until {
            return None;
        }
        let why = match waiting >= stolen {
            true => ("programs waited for a CPU", 0),
            false => ("the hypervisor gave CPU time to others", 1),
        };
        let why = format!(
            "{} for {:.0} % of their time while it worked, which was {:.0} % of the time, and for {:.0} % before",
            why.0,
            work[why.1] * 100.0,
            busy * 100.0,
            rest[why.1] * 100.0
        );
        let pause = FIRST_PAUSE * 2u32.pow(self.backoff_steps);
        self.backoff_steps = (self.backoff_steps + 1).min(MAX_BACKOFF_STEPS);
        (self.while_working, self.clear_work_time, self.paused_until) =
            (WaitAverage::default(), Duration::ZERO, now + pause);
        Some((pause, why))
    }

    /// Until when it rests.
    pub fn paused_until(&self) -> Duration {
        self.paused_until
    }

    /// What its pace is multiplied with.
    pub fn pace_factor(&self) -> f64 {
        0.5f64.powi(self.backoff_steps as i32)
    }

    /// Whether it works at the lowest pace that there is.
    pub fn is_at_lowest_pace(&self) -> bool {
        self.backoff_steps >= MAX_BACKOFF_STEPS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TICK: Duration = Duration::from_millis(250);

    /// A reading after a tick: milliseconds in queues and running.
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
        works: bool,
        times: u32,
    ) -> Vec<(u32, Duration, String)> {
        let read = |tick| Some((tick, slowdown.observe(waits, works, 0.1, TICK * tick)?));
        (1..=times).filter_map(read).map(|(tick, (pause, why))| (tick, pause, why)).collect()
    }

    /// The first time that it finds itself in the way at work.
    fn first_slowdown(slowdown: &mut SlowdownMonitor, waits: &WaitTimes) -> (u32, Duration, String) {
        let tell = |tick| slowdown.observe(waits, true, 0.1, TICK * tick).map(|(pause, why)| (tick, pause, why));
        (1..100).find_map(tell).unwrap()
    }

    #[test]
    fn repeated_slowdowns_double_the_pause() {
        let mut slowdown = SlowdownMonitor::default();
        assert_eq!(observe_times(&mut slowdown, &wait_times(10, 490), false, 40), []);
        // 100 ms of 500 ms are 20 %, 18 % more than before; the first reading is half of one, two are enough.
        // That is too much once it has worked for more than a tenth of 18 %, 56 % of the time.
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
        // 11 % are no more than a tenth above 2 %: a second of it takes a step back, two seconds both.
        assert_eq!(observe_times(&mut slowdown, &wait_times(55, 445), true, 10), []);
        assert_eq!(slowdown.pace_factor(), 1.0);
        assert!(!slowdown.is_at_lowest_pace());
    }

    #[test]
    fn short_bursts_of_work_are_no_slowdown() {
        let mut slowdown = SlowdownMonitor::default();
        observe_times(&mut slowdown, &wait_times(10, 490), false, 40);
        for _ in 0..30 {
            // Two thirds of their time for a second and a quarter, each twenty seconds: some 4 % in all.
            assert_eq!(observe_times(&mut slowdown, &wait_times(330, 170), true, 5), []);
            assert_eq!(observe_times(&mut slowdown, &wait_times(10, 490), false, 75), []);
        }
        assert_eq!(slowdown.pace_factor(), 1.0);
        assert!(
            !observe_times(&mut slowdown, &wait_times(330, 170), true, 12).is_empty(),
            "three seconds are too much"
        );
    }

    #[test]
    fn busy_host_alone_is_no_slowdown() {
        let mut slowdown = SlowdownMonitor::default();
        assert_eq!(observe_times(&mut slowdown, &wait_times(250, 250), false, 40), []);
        assert_eq!(observe_times(&mut slowdown, &wait_times(280, 220), true, 40), []);
        // Programs that hardly want to run tell nothing: 16 ms in two seconds.
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
        // 0.1 of 0.25 s are 40 %, 0.05 of them 20 %.
        let told = observe_times(&mut slowdown, &pressed(0.1), true, 40);
        assert!(told[0].2.contains("for 40 % of their time") && told[0].2.contains("20 % before"), "{told:?}");
        let mut slowdown = SlowdownMonitor::default();
        assert_eq!(observe_times(&mut slowdown, &wait_times(10, 490), false, 40), []);
        let told =
            observe_times(&mut slowdown, &WaitTimes { stolen_share: Some(0.15), ..wait_times(10, 490) }, true, 100);
        assert!(told[0].2.starts_with("the hypervisor gave CPU time to others for 15 %"), "{told:?}");
    }

    #[test]
    fn no_slowdown_without_idle_readings() {
        assert_eq!(observe_times(&mut SlowdownMonitor::default(), &wait_times(400, 100), true, 40), []);
    }

    proptest! {
        /// Who waits no longer while it works is not told of, and steps stay within their bounds.
        #[test]
        fn backoff_steps_follow_excess_waiting_only(
            rest in 0u64..400,
            phases in prop::collection::vec((any::<bool>(), 0u64..400, 1u32..20), 1..40),
        ) {
            let mut slowdown = SlowdownMonitor::default();
            let mut quiet = SlowdownMonitor::default();
            observe_times(&mut slowdown, &wait_times(rest, 100), false, 20);
            observe_times(&mut quiet, &wait_times(rest, 100), false, 20);
            for (works, queued, times) in phases {
                let told = observe_times(&mut slowdown, &wait_times(if works { queued } else { rest }, 100), works, times);
                prop_assert!(told.iter().all(|told| told.1 >= FIRST_PAUSE && told.1 <= FIRST_PAUSE * 32));
                prop_assert!((0.03..=1.0).contains(&slowdown.pace_factor()));
                let told = observe_times(&mut quiet, &wait_times(if works { queued.min(rest) } else { rest }, 100), works, times);
                prop_assert!(told.is_empty() && quiet.pace_factor() == 1.0);
            }
        }
    }
}
