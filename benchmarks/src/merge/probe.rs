//! A program that suffers: it repeats a fixed piece of work, half arithmetic and half a walk through memory, and a
//! slow-down shows in how long each repetition takes. One thread, pinned nowhere.

use super::holder::{Holder, held};
use anyhow::{Context, Result, ensure};
use std::hint::black_box;
use std::io::Write;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Bytes that are walked through: more than caches hold.
const MEMORY: usize = 64 << 20;

/// Steps of each half of a repetition: some ten milliseconds together.
const STEPS: u64 = 2_000_000;
const WALK: usize = 100_000;

/// Be the probe: a line for each repetition, with its seconds, until nobody reads them.
pub fn work() -> Result<()> {
    let size = MEMORY / 8;
    // A walk over all words in one cycle: a full-period congruential sequence (D. Knuth, TAOCP 2, 3.2.1.2, theorem A).
    let next: Vec<u64> = (0..size as u64).map(|i| (i * 5 + 1_000_003) % size as u64).collect();
    let mut at = 0;
    println!("READY");
    loop {
        let started = Instant::now();
        let mut state = 1_u64;
        for _ in 0..STEPS {
            state = black_box(state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
        }
        for _ in 0..WALK {
            at = next[at as usize];
        }
        black_box((state, at));
        let told = writeln!(std::io::stdout(), "{}", started.elapsed().as_secs_f64());
        if told.is_err() {
            return Ok(());
        }
    }
}

/// The probe at work.
pub struct Probe {
    told: Receiver<(Instant, f64)>,
    /// Seconds of a repetition when nothing else goes on.
    alone: f64,
    /// Dropped after the receiver: the reader then stops, and the probe with it.
    _holder: Holder,
}

impl Probe {
    /// Start it, and see for so long how fast it is alone.
    pub fn start(alone: Duration) -> Result<Self> {
        let mut command = held(std::env::current_exe()?, false)?;
        command.arg("probe");
        let mut holder = Holder::start(command)?;
        holder.ready()?;
        let output = holder.take_output().context("the probe has no output")?;
        let (sender, told) = channel();
        std::thread::spawn(move || {
            for line in output.map_while(Result::ok) {
                let Ok(seconds) = line.trim().parse() else { return };
                if sender.send((Instant::now(), seconds)).is_err() {
                    return;
                }
            }
        });
        // The first repetitions fill caches.
        std::thread::sleep(Duration::from_millis(200));
        let mut probe = Self { told, _holder: holder, alone: 0.0 };
        let begin = Instant::now();
        std::thread::sleep(alone);
        probe.alone = probe.mean(begin, Instant::now())?;
        Ok(probe)
    }

    /// How much longer a repetition took between two moments than alone: 0.1 is a tenth. Earlier ones are forgotten.
    pub fn slow_down(&self, from: Instant, to: Instant) -> Result<f64> {
        Ok(self.mean(from, to)? / self.alone - 1.0)
    }

    fn mean(&self, from: Instant, to: Instant) -> Result<f64> {
        let within: Vec<f64> =
            self.told.try_iter().filter(|(at, _)| (from..=to).contains(at)).map(|(_, s)| s).collect();
        ensure!(!within.is_empty(), "the probe finished no repetition in {:.1} s", (to - from).as_secs_f64());
        Ok(within.iter().sum::<f64>() / within.len() as f64)
    }
}
