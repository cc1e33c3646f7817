//! A member of a domain that does what lines on its standard input say, and knows what its memory has to hold.
//!
//! ```text
//! member DOMAIN PAGES [--threads N] [--max-slowdown PERCENT]
//!
//! fill START COUNT SEED   pages from START on; SEED 0 is zeros, and equal seeds and places are equal contents
//! copy START COUNT FROM   pages from START on become what those from FROM on hold
//! clear START COUNT       by the engine's own way
//! merge                   tells what was done
//! race ROUNDS             merges so often while a thread writes to pages without pause
//! check                   every page against what was written
//! standing                tells how it stands
//! close                   closes all descriptors but the first three, and opens others by their numbers
//! leave                   drops its memory and its engine, and ends
//! fork                    a child that waits; `child` has it check its memory, merge and end
//! ```

use pagefold_engine::{Engine, Options};
use pagefold_model::AddressRange;
use std::io::{BufRead, Read, Write, stdin};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const PAGE: usize = 4096;

/// What a page is to hold: a seed and a place, from which all its bytes follow.
type Known = Vec<(u64, u64)>;

fn fill(page: &mut [u8], (seed, place): (u64, u64)) {
    let mut state = seed << 32 ^ place << 12;
    for word in page.as_chunks_mut::<8>().0 {
        // splitmix64 (G. Steele et al., OOPSLA 2014).
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        *word = if seed == 0 { [0; 8] } else { (value ^ value >> 31).to_ne_bytes() };
    }
}

/// The first page that does not hold what it has to.
fn wrong(memory: &[u8], known: &Known) -> Option<usize> {
    let mut expected = vec![0; PAGE];
    memory.chunks_exact(PAGE).zip(known).position(|(page, &known)| {
        fill(&mut expected, known);
        page != expected
    })
}

/// Merge while another thread writes, which looks whether what it has written is there.
fn race(engine: &Engine, memory: &mut [u8], known: &Known, rounds: u64) -> String {
    let words: Vec<&AtomicU64> = memory
        .chunks_exact_mut(PAGE)
        // SAFETY: each is the first word of a page, aligned and writable, and used by atomic operations only until the
        // end.
        .map(|page| unsafe { AtomicU64::from_ptr(page.as_mut_ptr().cast()) })
        .collect();
    let end = AtomicBool::new(false);
    let (told, lost) = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let before: Vec<u64> = words.iter().map(|word| word.load(Ordering::Relaxed)).collect();
            let (mut last, mut lost, mut state) = (before.clone(), 0, 1u64);
            while !end.load(Ordering::Relaxed) {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let at = (state >> 33) as usize % words.len();
                lost += u64::from(words[at].load(Ordering::Relaxed) != last[at]);
                // Often what was there, so that pages become equal again.
                last[at] = if state >> 20 & 3 == 0 { state } else { before[at] };
                words[at].store(last[at], Ordering::Relaxed);
            }
            words.iter().zip(before).for_each(|(word, before)| word.store(before, Ordering::Relaxed));
            lost
        });
        let mut told = String::new();
        for _ in 0..rounds {
            // SAFETY: nobody unmaps anything.
            match unsafe { engine.merge_while_running() } {
                Ok(merged) => told = format!("{merged:?}"),
                Err(error) => told = error.to_string(),
            }
        }
        end.store(true, Ordering::Relaxed);
        (told, writer.join().expect("it does not panic"))
    });
    let wrong = wrong(memory, known).map_or(0, |_| 1);
    format!("{told} lost: {} .", lost + wrong)
}

struct Child {
    process: libc::pid_t,
    /// Closed to have the child go on.
    gate: OwnedFd,
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let option = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        Some(arguments.get(at + 1).expect("an option has a value").parse::<f64>().expect("a number"))
    };
    let options = Options {
        max_slowdown: option("--max-slowdown").map(|percent| percent / 100.0),
        threads: option("--threads").map_or(1, |threads| threads as usize),
        ..Options::default()
    };
    let pages: usize = arguments[2].parse().expect("a number of pages");
    let engine = Engine::join(&arguments[1], &options).expect("a domain");
    let mut region = engine.allocate(pages * PAGE).expect("memory");
    let mut known: Known = vec![(0, 0); pages];
    let mut children: Vec<Child> = Vec::new();
    // The program's own files, which are none of the engine's business.
    let mut others = Vec::new();
    println!("ready");
    for line in stdin().lock().lines().map_while(Result::ok) {
        let mut words = line.split_ascii_whitespace();
        let command = words.next().unwrap_or_default();
        let numbers: Vec<u64> = words.map(|word| word.parse().expect("a number")).collect();
        let page = |number: u64| number as usize * PAGE..(number as usize + 1) * PAGE;
        match (command, &numbers[..]) {
            ("fill", &[start, count, seed]) => {
                for number in start..start + count {
                    known[number as usize] = (seed, number);
                    fill(&mut region.as_mut_slice()[page(number)], (seed, number));
                }
                println!("filled");
            }
            ("copy", &[start, count, from]) => {
                for number in 0..count {
                    known[(start + number) as usize] = known[(from + number) as usize];
                    region.as_mut_slice().copy_within(page(from + number), (start + number) as usize * PAGE);
                }
                println!("copied");
            }
            ("clear", &[start, count]) => {
                let at = region.range().start + start * PAGE as u64;
                let range = AddressRange { start: at, end: at + count * PAGE as u64 };
                // SAFETY: no borrow of the region lives.
                unsafe { engine.clear(range) }.expect("whole pages");
                known[start as usize..(start + count) as usize].fill((0, 0));
                println!("cleared");
            }
            ("merge", []) => {
                // SAFETY: this program has one thread, and no borrow of the region lives.
                match unsafe { engine.merge() } {
                    Ok(merged) => println!("{merged:?}"),
                    Err(error) => println!("{error}"),
                }
            }
            ("race", &[rounds]) => println!("{}", race(&engine, region.as_mut_slice(), &known, rounds)),
            ("check", []) => match wrong(region.as_slice(), &known) {
                None => println!("same"),
                Some(page) => println!("page {page} differs"),
            },
            ("close", []) => {
                // SAFETY: what of these is somebody's finds that out, which is what is tested.
                unsafe { libc::close_range(3, libc::c_uint::MAX, 0) };
                for _ in 0..64 {
                    others.push(tempfile::tempfile().expect("a file"));
                }
                println!("closed");
            }
            ("others", []) => {
                let untouched = others.iter().all(|file| file.metadata().is_ok_and(|file| file.len() == 0));
                println!("{}", if untouched { "untouched" } else { "touched" });
            }
            ("leave", []) => {
                drop(region);
                drop(engine);
                println!("left");
                return;
            }
            ("standing", []) => println!("{:?}", engine.standing().expect("a domain that works")),
            ("fork", []) => {
                let (wait, gate) = std::io::pipe().expect("a pipe");
                // SAFETY: this program has one thread.
                let process = unsafe { libc::fork() };
                if process == 0 {
                    drop(gate);
                    drop(std::mem::take(&mut children));
                    let _ = (&wait).read(&mut [0]);
                    let before = wrong(region.as_slice(), &known);
                    // SAFETY: as above.
                    let merged = unsafe { engine.merge() };
                    let right = before.is_none() && merged.is_ok() && wrong(region.as_slice(), &known).is_none();
                    // SAFETY: it ends here.
                    unsafe { libc::_exit(if right { 0 } else { 1 }) };
                }
                assert!(process > 0, "a child");
                children.push(Child { process, gate: gate.into() });
                println!("forked");
            }
            ("child", []) => {
                let child = children.pop().expect("a child");
                drop(child.gate);
                let mut status = 0;
                // SAFETY: `status` is there to be written.
                unsafe { libc::waitpid(child.process, &raw mut status, 0) };
                println!("{}", if status == 0 { "same" } else { "different" });
            }
            _ => println!("unknown: {line}"),
        }
        std::io::stdout().flush().expect("somebody reads");
    }
}
