//! The unit tests of `blocks`. The library itself has no test program, since it stands in for the C library's functions.

#[path = "../src/blocks.rs"]
#[allow(dead_code, reason = "the tests use a part of it")]
mod blocks;
#[path = "../src/lock.rs"]
#[allow(dead_code, reason = "the tests use a part of it")]
mod lock;

mod next {
    use std::cell::Cell;

    /// A number that is another one in each thread, and never 0.
    pub fn this_thread() -> usize {
        thread_local!(static OWN: Cell<u8> = const { Cell::new(0) });
        OWN.with(|own| std::ptr::from_ref(own).addr())
    }
}
