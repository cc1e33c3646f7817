//! A busy program that detects changes to its state: threads compute on their own memory, keep partial results in
//! registers, on their stacks and on the heap, sleep and wait in between, and check all of it.

use anyhow::{Result, bail};
use clap::Args;
use pagefold_labs::output_lines::READY_PREFIX;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// A page, in words of 64 bits. Some pages of each thread's memory are equal, so that there are pages to merge.
const WORDS_PER_PAGE: usize = 512;

#[derive(Args)]
pub struct BusyArguments {
    /// Number of threads
    #[arg(long, default_value_t = 4)]
    threads: u64,
    /// Memory of each thread, in MiB
    #[arg(long, value_name = "MiB", default_value_t = 8)]
    memory: usize,
}

/// Work until standard input closes.
pub fn run(arguments: &BusyArguments) -> Result<()> {
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let workers: Vec<_> = (0..arguments.threads)
            .map(|number| {
                let (stop, rounds) = (&stop, &rounds);
                scope.spawn(move || compute_and_check(number, arguments.memory << 20, stop, rounds))
            })
            .collect();
        println!("{READY_PREFIX}pid={}", std::process::id());
        io::stdout().flush()?;
        io::copy(&mut io::stdin().lock(), &mut io::sink())?;
        stop.store(true, Ordering::Relaxed);
        workers.into_iter().try_for_each(|worker| match worker.join() {
            Ok(result) => result,
            Err(_) => bail!("a thread panicked"),
        })
    })?;
    // An error means that the reader has closed the pipe.
    let _ = writeln!(io::stdout(), "{} rounds, all right", rounds.load(Ordering::Relaxed));
    Ok(())
}

/// Number of parts of a thread's memory; each round checks and rewrites one of them.
const PARTS_PER_THREAD: usize = 16;

/// The expected word at an index of a part that was last written in a round.
fn expected_word(thread: u64, round: u64, index: usize) -> u64 {
    // Every fourth page is the same in all threads and rounds.
    let (thread, round) = if (index / WORDS_PER_PAGE).is_multiple_of(4) { (0, 0) } else { (thread, round) };
    (thread << 48 | round << 16 | (index % WORDS_PER_PAGE) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn compute_and_check(thread: u64, bytes: usize, stop: &AtomicBool, rounds: &AtomicU64) -> Result<()> {
    let mut memory: Vec<u64> = (0..bytes / 8).map(|index| expected_word(thread, 0, index)).collect();
    let part_len = memory.len() / PARTS_PER_THREAD;
    let mut written = [0; PARTS_PER_THREAD];
    let mut round = 0_u64;
    while !stop.load(Ordering::Relaxed) {
        round += 1;
        let part = round as usize % PARTS_PER_THREAD;
        let start = part * part_len;
        let last_round = written[part];
        let mut sums = (0_f64, 0_f64);
        for (i, word) in memory[start..start + part_len].iter_mut().enumerate() {
            let expected = expected_word(thread, last_round, start + i);
            if *word != expected {
                exit_with_error(&format!("thread {thread}, round {round}: {word:#x} at {i}, not {expected:#x}"));
            }
            sums.0 += (*word >> 40) as f64;
            sums.1 += (expected >> 40) as f64;
            *word = expected_word(thread, round, start + i);
        }
        if sums.0.to_bits() != sums.1.to_bits() {
            exit_with_error(&format!("thread {thread}, round {round}: sums {sums:?}"));
        }
        written[part] = round;
        rounds.fetch_add(1, Ordering::Relaxed);
        if round.is_multiple_of(64) {
            sleep_or_receive(thread, round);
        }
    }
    Ok(())
}

/// Sleep for a moment, or wait for a message that never arrives: neither may end early.
fn sleep_or_receive(thread: u64, round: u64) {
    let time = Duration::from_millis(1);
    let begun = Instant::now();
    if round.is_multiple_of(128) {
        thread::sleep(time);
    } else {
        let (_sender, receiver) = mpsc::channel::<()>();
        if receiver.recv_timeout(time).is_ok() {
            exit_with_error(&format!("thread {thread}, round {round}: an unexpected message"));
        }
    }
    if begun.elapsed() < time {
        exit_with_error(&format!("thread {thread}, round {round}: it waited only {:?}", begun.elapsed()));
    }
}

/// Print an error and exit at once.
fn exit_with_error(message: &str) -> ! {
    eprintln!("pagefold-lab busy: {message}");
    std::process::exit(1);
}
