//! When an injected slow-down stops a run, and for how long.
//!
//! A stop costs the run more or less than its length if another process uses the same CPU: the scheduler may let the run
//! finish its time slice before, or wait for the end of other slices after. This error has the length of a few time slices
//! (a few milliseconds), whatever the length of the stop. So a run gets few long stops: one for each four seconds of the
//! running time that is expected, and one in a shorter run. Each stop stands in the middle of its part of the run, so that
//! a run that is shorter or longer than expected is slowed by the stated share on average. The first one comes earlier,
//! so that it meets a run that is much shorter because the load of the host has fallen. On a busy host stops last longer
//! than asked for; the next run with the same slow-down makes up for that.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// The running time for which there is one stop: an error of 6 ms is 0.15 % of it.
const LONGEST_PERIOD: Duration = Duration::from_secs(4);

/// The period for a run whose running time cannot be expected from an earlier one.
const UNKNOWN_RUN_PERIOD: Duration = Duration::from_millis(20);

/// The shortest period: a quarter of it is the shortest run that can be slowed.
const SHORTEST_PERIOD: Duration = Duration::from_millis(2);

/// How many of the last runs say how long the next one takes: the load of a host changes during a campaign.
const EXPECTATION_RUNS: usize = 4;

/// Where the first stop stands, in periods.
const FIRST_STOP: f64 = 0.25;

/// The longest stop in lengths of a stop that makes up for nothing.
const LONGEST_STOP: f64 = 2.0;

/// What the measured runs under arm A say about the next one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EarlierRuns {
    /// The running times of the last [`EXPECTATION_RUNS`] runs.
    running: VecDeque<Duration>,
    /// For each slow-down in percent, by how many seconds the runs were stopped too long.
    surplus_seconds: BTreeMap<u32, f64>,
}

impl EarlierRuns {
    /// Adds a measured run under arm A with its running time without stops.
    pub fn add(&mut self, slowdown_percent: u32, running: Duration, stopped: Duration) {
        if self.running.len() == EXPECTATION_RUNS {
            self.running.pop_front();
        }
        self.running.push_back(running);
        if slowdown_percent > 0 {
            let surplus = stopped.as_secs_f64() - running.as_secs_f64() * f64::from(slowdown_percent) / 100.0;
            *self.surplus_seconds.entry(slowdown_percent).or_default() += surplus;
        }
    }

    /// Plans the stops of the next run.
    #[must_use]
    pub fn plan_injection(&self, slowdown_percent: u32) -> InjectionPlan {
        let sum: Duration = self.running.iter().sum();
        let expected = (!self.running.is_empty()).then(|| sum / self.running.len() as u32);
        let surplus_seconds = self.surplus_seconds.get(&slowdown_percent).copied().unwrap_or_default();
        InjectionPlan { surplus_seconds, ..InjectionPlan::new(slowdown_percent, expected) }
    }
}

/// The stops of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InjectionPlan {
    /// The stopped time as a share of the running time.
    share: f64,
    /// The running time for which there is one stop.
    period: Duration,
    /// By how many seconds earlier runs were stopped too long.
    surplus_seconds: f64,
}

impl InjectionPlan {
    /// Plans the stops of a run that is slowed by a percentage. `expected` is its running time without stops, if it is known
    /// from earlier runs.
    #[must_use]
    pub fn new(percent: u32, expected: Option<Duration>) -> Self {
        let period = expected.map_or(UNKNOWN_RUN_PERIOD, |expected| {
            let stops = (expected.as_secs_f64() / LONGEST_PERIOD.as_secs_f64()).round().max(1.0);
            expected.div_f64(stops).max(SHORTEST_PERIOD)
        });
        Self { share: f64::from(percent) / 100.0, period, surplus_seconds: 0.0 }
    }

    /// The running time before the next stop, after so many stops.
    #[must_use]
    pub fn running_time_before_stop(&self, stops: u32) -> Duration {
        self.period.mul_f64(if stops == 0 { FIRST_STOP } else { f64::from(stops) + 0.5 })
    }

    /// The length of the next stop, after so many stops that took a time together: earlier stops that were too long or too
    /// short are made up for.
    #[must_use]
    pub fn stop_length(&self, stops: u32, stopped: Duration) -> Duration {
        let length = self.share * self.period.as_secs_f64();
        let due = length * (f64::from(stops) + 1.0) - self.surplus_seconds - stopped.as_secs_f64();
        Duration::from_secs_f64(due.clamp(0.0, length * LONGEST_STOP))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLISECOND: Duration = Duration::from_millis(1);

    /// The stopped time of a run of a length, whose stops take what was planned.
    fn total_stop(plan: InjectionPlan, running: Duration) -> (u32, Duration) {
        let (mut stops, mut stopped) = (0, Duration::ZERO);
        while plan.running_time_before_stop(stops) < running {
            stopped += plan.stop_length(stops, stopped);
            stops += 1;
        }
        (stops, stopped)
    }

    #[test]
    fn run_of_the_expected_length_is_stopped_for_the_stated_share() {
        for (milliseconds, stops) in [(3, 1), (100, 1), (5900, 1), (6100, 2), (60_000, 15)] {
            let running = milliseconds * MILLISECOND;
            for percent in [1, 2, 5, 50] {
                let plan = InjectionPlan::new(percent, Some(running));
                let (planned, stopped) = total_stop(plan, running);
                assert_eq!(planned, stops, "{running:?}");
                let share = stopped.as_secs_f64() / running.as_secs_f64() * 100.0;
                assert!((share - f64::from(percent)).abs() < 1e-3, "{running:?}, {percent} %: {share}");
            }
        }
    }

    /// Lengths around the expected one by up to 40 % have the stated share on average.
    #[test]
    fn runs_of_other_lengths_are_stopped_for_the_stated_share_on_average() {
        for expected in [100 * MILLISECOND, 12_000 * MILLISECOND] {
            let plan = InjectionPlan::new(5, Some(expected));
            let lengths = (60..=140).map(|percent| expected.mul_f64(f64::from(percent) / 100.0));
            let (stopped, ran) = lengths
                .map(|running| (total_stop(plan, running).1, running))
                .fold((Duration::ZERO, Duration::ZERO), |sum, run| (sum.0 + run.0, sum.1 + run.1));
            let share = stopped.as_secs_f64() / ran.as_secs_f64();
            assert!((share - 0.05).abs() < 0.001, "{expected:?}: {share}");
        }
    }

    #[test]
    fn run_of_unknown_length_is_stopped_often() {
        let plan = InjectionPlan::new(2, None);
        let (stops, stopped) = total_stop(plan, 1000 * MILLISECOND);
        assert_eq!((stops, stopped.as_millis()), (50, 20));
    }

    #[test]
    fn longer_stop_than_planned_shortens_the_next_one() {
        let plan = InjectionPlan::new(5, Some(8000 * MILLISECOND));
        let milliseconds = |stops, stopped: u32| plan.stop_length(stops, stopped * MILLISECOND).as_secs_f64() * 1e3;
        for ((stops, stopped), length) in [((0, 0), 200.0), ((1, 270), 130.0), ((1, 500), 0.0), ((3, 100), 400.0)] {
            assert!((milliseconds(stops, stopped) - length).abs() < 1e-6, "{stops} stops, {stopped} ms");
        }
    }

    /// The host adds 3 ms to each stop of 2 ms; other slow-downs have their own sum.
    #[test]
    fn earlier_runs_that_were_stopped_too_long_are_made_up_for() {
        let (mut earlier, mut stopped) = (EarlierRuns::default(), Duration::ZERO);
        let running = 100 * MILLISECOND;
        earlier.add(0, running, Duration::ZERO);
        for _ in 0..100 {
            let length = earlier.plan_injection(2).stop_length(0, Duration::ZERO);
            let actual = if length.is_zero() { length } else { length + 3 * MILLISECOND };
            earlier.add(2, running, actual);
            stopped += actual;
        }
        let share = stopped.as_secs_f64() / (100 * running).as_secs_f64();
        assert!((share - 0.02).abs() < 0.001, "{share}");
        assert_eq!(earlier.plan_injection(5).stop_length(0, Duration::ZERO), 5 * MILLISECOND);
        assert_eq!(EarlierRuns::default().plan_injection(2), InjectionPlan::new(2, None));
    }

    /// The load of the host falls, and runs take a third of the time.
    #[test]
    fn runs_that_become_shorter_are_stopped_nevertheless() {
        let mut earlier = EarlierRuns::default();
        for _ in 0..20 {
            earlier.add(0, 1500 * MILLISECOND, Duration::ZERO);
        }
        for _ in 0..EXPECTATION_RUNS {
            let (stops, _) = total_stop(earlier.plan_injection(5), 500 * MILLISECOND);
            assert_eq!(stops, 1);
            earlier.add(0, 500 * MILLISECOND, Duration::ZERO);
        }
        assert_eq!(earlier.plan_injection(5), InjectionPlan::new(5, Some(500 * MILLISECOND)));
    }

    #[test]
    fn shortest_run_has_a_period() {
        assert_eq!(InjectionPlan::new(5, Some(Duration::ZERO)).running_time_before_stop(0), MILLISECOND / 2);
    }
}
