//! A program that measures slow-down. It repeats a fixed amount of work, half arithmetic and half a walk through
//! memory, and prints the duration of each repetition. One thread, not pinned to a CPU.

use super::running_program::{RunningProgram, command_through_hold};
use anyhow::{Context, Result, ensure};
use std::hint::black_box;
use std::io::Write;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Bytes of the walk: more than caches hold.
const WALKED_BYTES: usize = 64 << 20;

/// Steps of each half of a repetition: some ten milliseconds in total.
const ARITHMETIC_STEPS: u64 = 2_000_000;
const MEMORY_STEPS: usize = 100_000;

/// Run as the probe: print a line with the seconds of each repetition, until the reader has gone.
pub fn run_probe() -> Result<()> {
    let size = WALKED_BYTES / 8;
    // A walk over all words in one cycle: a full-period congruential sequence (D. Knuth, TAOCP 2, 3.2.1.2, theorem A).
    let next: Vec<u64> = (0..size as u64).map(|i| (i * 5 + 1_000_003) % size as u64).collect();
    let mut at = 0;
    println!("READY");
    loop {
        let started = Instant::now();
        let mut state = 1_u64;
        for _ in 0..ARITHMETIC_STEPS {
            state = black_box(state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
        }
        for _ in 0..MEMORY_STEPS {
            at = next[at as usize];
        }
        black_box((state, at));
        let written = writeln!(std::io::stdout(), "{}", started.elapsed().as_secs_f64());
        if written.is_err() {
            return Ok(());
        }
    }
}

/// The running probe.
pub struct SlowdownProbe {
    repetitions: Receiver<(Instant, f64)>,
    /// Seconds of a repetition on the otherwise idle machine.
    baseline_seconds: f64,
    /// Dropped after the receiver: the reader then stops, and the probe exits.
    _process: RunningProgram,
}

impl SlowdownProbe {
    /// Start the probe, and measure its speed alone for this time.
    pub fn start(baseline_time: Duration) -> Result<Self> {
        let mut command = command_through_hold(std::env::current_exe()?, false)?;
        command.arg("probe");
        let mut process = RunningProgram::start(command)?;
        process.wait_until_ready()?;
        let output = process.take_output().context("the probe has no output")?;
        let (sender, written) = channel();
        std::thread::spawn(move || {
            for line in output.map_while(Result::ok) {
                let Ok(seconds) = line.trim().parse() else { return };
                if sender.send((Instant::now(), seconds)).is_err() {
                    return;
                }
            }
        });
        // The first repetitions fill the caches.
        std::thread::sleep(Duration::from_millis(200));
        let mut probe = Self { repetitions: written, _process: process, baseline_seconds: 0.0 };
        let begin = Instant::now();
        std::thread::sleep(baseline_time);
        probe.baseline_seconds = probe.mean_seconds(begin, Instant::now())?;
        Ok(probe)
    }

    /// How much longer a repetition took in this interval than alone: 0.1 is 10 % longer. Earlier samples are
    /// discarded.
    pub fn slowdown(&self, from: Instant, to: Instant) -> Result<f64> {
        Ok(self.mean_seconds(from, to)? / self.baseline_seconds - 1.0)
    }

    fn mean_seconds(&self, from: Instant, to: Instant) -> Result<f64> {
        let within: Vec<f64> =
            self.repetitions.try_iter().filter(|(at, _)| (from..=to).contains(at)).map(|(_, s)| s).collect();
        ensure!(!within.is_empty(), "the probe finished no repetition in {:.1} s", (to - from).as_secs_f64());
        Ok(within.iter().sum::<f64>() / within.len() as f64)
    }
}
