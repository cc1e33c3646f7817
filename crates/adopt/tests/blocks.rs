//! The unit tests of `blocks`. The library itself has no test program, because it replaces functions of the C library.

#[path = "../src/blocks.rs"]
#[allow(dead_code, reason = "the tests use only some of these items")]
mod blocks;
#[path = "../src/lock.rs"]
#[allow(dead_code, reason = "the tests use only some of these items")]
mod lock;

mod next {
    use std::cell::Cell;

    /// A number that differs in each thread, and is never 0.
    pub fn this_thread() -> usize {
        thread_local!(static OWN: Cell<u8> = const { Cell::new(0) });
        OWN.with(|own| std::ptr::from_ref(own).addr())
    }
}
