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
const OVER: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(30)];

/// The time of which a slow-down is a part.
const SPAN: Duration = Duration::from_secs(10);

/// What has to be seen of work, and of rest, before anything is said.
const ENOUGH: [f64; 2] = [0.4, 1.0];

/// CPU seconds that programs want before a part of them means anything.
const WANTED: f64 = 0.05;

/// The first pause.
const PAUSE: Duration = Duration::from_secs(10);

/// The most steps: pauses of five minutes, and a thirty-second of the pace.
const STEPS: u32 = 5;

/// Work without anybody waiting longer that takes a step back.
const CLEAR: Duration = Duration::from_secs(1);

/// What programs waited for since the reading before.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Waits {
    /// How long ago that was.
    pub elapsed: Duration,
    /// For how long threads of managed programs stood in run queues and ran, both summed over the threads that were
    /// looked at.
    pub queued: Option<(Duration, Duration)>,
    /// Seconds in which some task waited for a CPU.
    pub pressure: Option<f64>,
    /// The share of the time of all CPUs that a hypervisor gave to others.
    pub stolen: Option<f64>,
}

/// What programs waited for, forgotten little by little.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Average {
    seconds: f64,
    queued: f64,
    wanted: f64,
    pressure: Option<f64>,
    stolen: f64,
}

impl Average {
    fn add(&mut self, waits: &Waits, over: Duration) {
        let seconds = waits.elapsed.as_secs_f64();
        let kept = (-seconds / over.as_secs_f64()).exp();
        let add = |sum: &mut f64, new: f64| *sum = *sum * kept + new;
        let (queued, ran) = waits.queued.unwrap_or_default();
        add(&mut self.seconds, seconds);
        add(&mut self.queued, queued.as_secs_f64());
        add(&mut self.wanted, (queued + ran).as_secs_f64());
        add(&mut self.stolen, waits.stolen.unwrap_or(0.0) * seconds);
        self.pressure = match (waits.queued, waits.pressure) {
            (None, Some(pressure)) => Some(self.pressure.unwrap_or(0.0) * kept + pressure),
            _ => None,
        };
    }

    /// The parts of the time for which programs wait, each between 0 and 1: in run queues or for any CPU, and because
    /// of others than this host.
    fn parts(&self) -> [f64; 2] {
        let queued = if self.wanted >= WANTED { self.queued / self.wanted } else { 0.0 };
        let seconds = self.seconds.max(f64::MIN_POSITIVE);
        let waiting = self.pressure.map_or(queued, |pressure| pressure / seconds);
        [waiting, self.stolen / seconds].map(|part| part.clamp(0.0, 1.0))
    }
}

/// What is known of how it slows programs down.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Slowdown {
    work: Average,
    rest: Average,
    /// For how long it worked of the last [`SPAN`], about, in seconds: what is past counts less and less.
    worked_for: f64,
    /// Whether it worked at the last reading.
    worked: bool,
    clear: Duration,
    steps: u32,
    until: Duration,
}

impl Slowdown {
    /// Take in a reading made while it works, or rests. Tells for how long it should rest, and why, if by its work
    /// programs wait for longer by this part of their time.
    pub fn read(&mut self, waits: &Waits, works: bool, limit: f64, now: Duration) -> Option<(Duration, String)> {
        let same = std::mem::replace(&mut self.worked, works) == works;
        let seconds = waits.elapsed.as_secs_f64();
        self.worked_for *= (-seconds / SPAN.as_secs_f64()).exp();
        if works {
            self.worked_for = (self.worked_for + seconds).min(SPAN.as_secs_f64());
        }
        // What lies half in the work says nothing of either.
        if !same || waits.elapsed.is_zero() {
            return None;
        }
        if !works {
            self.rest.add(waits, OVER[1]);
            return None;
        }
        self.work.add(waits, OVER[0]);
        if self.work.seconds < ENOUGH[0] || self.rest.seconds < ENOUGH[1] {
            return None;
        }
        let (work, rest) = (self.work.parts(), self.rest.parts());
        let busy = self.worked_for / SPAN.as_secs_f64();
        let [waiting, stolen] = [0, 1].map(|part: usize| work[part] - rest[part]);
        let longer = waiting.max(stolen);
        if longer <= limit {
            self.clear += waits.elapsed;
            if self.clear >= CLEAR {
                (self.clear, self.steps) = (Duration::ZERO, self.steps.saturating_sub(1));
            }
        }
        // What is told to end goes on for a moment, and a census to its end.
        if longer * busy <= limit || now < self.until {
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
        let pause = PAUSE * 2u32.pow(self.steps);
        self.steps = (self.steps + 1).min(STEPS);
        (self.work, self.clear, self.until) = (Average::default(), Duration::ZERO, now + pause);
        Some((pause, why))
    }

    /// Until when it rests.
    pub fn until(&self) -> Duration {
        self.until
    }

    /// What its pace is multiplied with.
    pub fn pace(&self) -> f64 {
        0.5f64.powi(self.steps as i32)
    }

    /// Whether it works at the lowest pace that there is.
    pub fn is_slowest(&self) -> bool {
        self.steps >= STEPS
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TICK: Duration = Duration::from_millis(250);

    /// A reading after a tick: milliseconds in queues and running.
    fn waits(queued: u64, ran: u64) -> Waits {
        let queued = Some((Duration::from_millis(queued), Duration::from_millis(ran)));
        Waits { elapsed: TICK, queued, pressure: Some(0.2), stolen: Some(0.0) }
    }

    fn read(slowdown: &mut Slowdown, waits: &Waits, works: bool, times: u32) -> Vec<(u32, Duration, String)> {
        let read = |tick| Some((tick, slowdown.read(waits, works, 0.1, TICK * tick)?));
        (1..=times).filter_map(read).map(|(tick, (pause, why))| (tick, pause, why)).collect()
    }

    /// The first time that it finds itself in the way at work.
    fn first(slowdown: &mut Slowdown, waits: &Waits) -> (u32, Duration, String) {
        let tell = |tick| slowdown.read(waits, true, 0.1, TICK * tick).map(|(pause, why)| (tick, pause, why));
        (1..100).find_map(tell).unwrap()
    }

    #[test]
    fn who_is_slowed_down_is_left_alone_for_longer_and_longer() {
        let mut slowdown = Slowdown::default();
        assert_eq!(read(&mut slowdown, &waits(10, 490), false, 40), []);
        // 100 ms of 500 ms are 20 %, 18 % more than before; the first reading is half of one, two are enough.
        // That is too much once it has worked for more than a tenth of 18 %, 56 % of the time.
        let (tick, pause, why) = first(&mut slowdown, &waits(100, 400));
        assert!((30..36).contains(&tick), "1 - e^(-t / 10 s) is 0.56 after 8.1 s, 33 ticks: {tick}");
        let words = "programs waited for a CPU for 20 % of their time while it worked, which was 56 % of the time, and \
                     for 2 % before";
        assert_eq!((pause, why.as_str()), (PAUSE, words));
        assert_eq!((slowdown.until(), slowdown.pace()), (TICK * tick + PAUSE, 0.5));
        assert_eq!(read(&mut slowdown, &waits(10, 490), false, 400), []);
        assert_eq!(first(&mut slowdown, &waits(100, 400)).1, PAUSE * 2);
        assert_eq!(slowdown.pace(), 0.25);
        assert_eq!(read(&mut slowdown, &waits(10, 490), false, 400), []);
        // 11 % are no more than a tenth above 2 %: a second of it takes a step back, two seconds both.
        assert_eq!(read(&mut slowdown, &waits(55, 445), true, 10), []);
        assert_eq!(slowdown.pace(), 1.0);
        assert!(!slowdown.is_slowest());
    }

    #[test]
    fn a_moment_of_work_now_and_then_is_no_slow_down() {
        let mut slowdown = Slowdown::default();
        read(&mut slowdown, &waits(10, 490), false, 40);
        for _ in 0..30 {
            // Two thirds of their time for a second and a quarter, each twenty seconds: some 4 % in all.
            assert_eq!(read(&mut slowdown, &waits(330, 170), true, 5), []);
            assert_eq!(read(&mut slowdown, &waits(10, 490), false, 75), []);
        }
        assert_eq!(slowdown.pace(), 1.0);
        assert!(!read(&mut slowdown, &waits(330, 170), true, 12).is_empty(), "three seconds are too much");
    }

    #[test]
    fn a_host_that_is_busy_anyway_is_not_its_doing() {
        let mut slowdown = Slowdown::default();
        assert_eq!(read(&mut slowdown, &waits(250, 250), false, 40), []);
        assert_eq!(read(&mut slowdown, &waits(280, 220), true, 40), []);
        // Programs that hardly want to run tell nothing: 16 ms in two seconds.
        let mut slowdown = Slowdown::default();
        assert_eq!(read(&mut slowdown, &waits(0, 1), false, 40), []);
        assert_eq!(read(&mut slowdown, &waits(1, 1), true, 40), []);
    }

    #[test]
    fn pressure_stands_in_where_queues_are_not_told_and_steal_always_counts() {
        let pressed = |pressure| Waits { elapsed: TICK, pressure: Some(pressure), ..Waits::default() };
        let mut slowdown = Slowdown::default();
        assert_eq!(read(&mut slowdown, &pressed(0.05), false, 40), []);
        // 0.1 of 0.25 s are 40 %, 0.05 of them 20 %.
        let told = read(&mut slowdown, &pressed(0.1), true, 40);
        assert!(told[0].2.contains("for 40 % of their time") && told[0].2.contains("20 % before"), "{told:?}");
        let mut slowdown = Slowdown::default();
        assert_eq!(read(&mut slowdown, &waits(10, 490), false, 40), []);
        let told = read(&mut slowdown, &Waits { stolen: Some(0.15), ..waits(10, 490) }, true, 100);
        assert!(told[0].2.starts_with("the hypervisor gave CPU time to others for 15 %"), "{told:?}");
    }

    #[test]
    fn nothing_is_said_before_there_was_any_rest() {
        assert_eq!(read(&mut Slowdown::default(), &waits(400, 100), true, 40), []);
    }

    proptest! {
        /// Who waits no longer while it works is not told of, and steps stay within their bounds.
        #[test]
        fn steps_follow_from_excess_alone(
            rest in 0u64..400,
            phases in prop::collection::vec((any::<bool>(), 0u64..400, 1u32..20), 1..40),
        ) {
            let mut slowdown = Slowdown::default();
            let mut quiet = Slowdown::default();
            read(&mut slowdown, &waits(rest, 100), false, 20);
            read(&mut quiet, &waits(rest, 100), false, 20);
            for (works, queued, times) in phases {
                let told = read(&mut slowdown, &waits(if works { queued } else { rest }, 100), works, times);
                prop_assert!(told.iter().all(|told| told.1 >= PAUSE && told.1 <= PAUSE * 32));
                prop_assert!((0.03..=1.0).contains(&slowdown.pace()));
                let told = read(&mut quiet, &waits(if works { queued.min(rest) } else { rest }, 100), works, times);
                prop_assert!(told.is_empty() && quiet.pace() == 1.0);
            }
        }
    }
}
