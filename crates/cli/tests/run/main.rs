//! Tests of `pagefold run`:
//!
//! - [`exec`]: the environment of the program that it executes;
//! - [`enroll_methods`]: the methods of enrollment;
//! - [`domains`]: trust domains;
//! - [`preload_check`]: warnings if a library did not enroll the program;
//! - [`policies`]: policies that drive KSM while the program runs;
//! - [`user_engine`]: the user-space engine.

mod domains;
mod enroll_methods;
mod exec;
mod policies;
mod preload_check;
mod test_programs;
mod user_engine;
