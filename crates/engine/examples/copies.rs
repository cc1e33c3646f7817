//! A process that holds the same table several times, as caches and interpreters do. The first four copies are merged
//! at a safe point. A fifth one is merged later, while the program runs, where the kernel permits that. A copy that is
//! written afterwards becomes private again.
//!
//! ```sh
//! cargo run --release -p pagefold-engine --example copies
//! ```
//!
//! Processes that merge with each other do the same in a domain of one name: see `c/ranks.c`.

use pagefold_engine::{AllocatedRegion, Engine, EngineOptions, Error, MergeCounters};

const TABLE_BYTES: usize = 16 << 20;

fn table_word(index: usize) -> [u8; 8] {
    (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_ne_bytes()
}

/// A copy of the table, in mergeable memory.
fn allocate_table(engine: &Engine) -> Result<AllocatedRegion<'_>, Error> {
    let mut memory = engine.allocate(TABLE_BYTES)?;
    let words = memory.as_mut_slice().as_chunks_mut().0.iter_mut();
    words.enumerate().for_each(|(index, bytes)| *bytes = table_word(index));
    Ok(memory)
}

fn print_status(engine: &Engine, label: &str, merged: MergeCounters) -> Result<(), Error> {
    let status = engine.status()?;
    println!(
        "{label}: {} pages merged in {:.1} ms; {} of {} pages are merged now, and the store takes {}",
        merged.pages_merged.0,
        merged.program_time.as_secs_f64() * 1e3,
        status.merged.0,
        status.pages.0,
        status.store_bytes,
    );
    Ok(())
}

fn main() -> Result<(), Error> {
    // No bound: this program has no other work that merging could slow down.
    let options = EngineOptions { max_slowdown: None, ..EngineOptions::default() };
    let engine = Engine::join(&format!("copies-{}", std::process::id()), &options)?;
    let mut copies = (0..4).map(|_| allocate_table(&engine)).collect::<Result<Vec<_>, _>>()?;
    // SAFETY: no thread writes to the copies during the merge.
    print_status(&engine, "at a safe point", unsafe { engine.merge() }?)?;

    copies.push(allocate_table(&engine)?);
    // SAFETY: no thread unmaps or replaces the copies during the merge, and no device has pinned them.
    match unsafe { engine.merge_while_running() } {
        Ok(merged) => print_status(&engine, "while running", merged)?,
        Err(error @ Error::WriteProtectUnavailable(_)) => println!("{error}"),
        Err(error) => return Err(error),
    }

    for (number, copy) in copies.iter_mut().enumerate() {
        copy.as_mut_slice()[number] ^= 1;
    }
    for (number, copy) in copies.iter_mut().enumerate() {
        copy.as_mut_slice()[number] ^= 1;
        let mut words = copy.as_slice().as_chunks().0.iter().enumerate();
        assert!(words.all(|(index, bytes)| *bytes == table_word(index)), "copy {number} has an unexpected content");
    }
    println!("all memory as it was written");
    Ok(())
}
