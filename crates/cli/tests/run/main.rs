//! `pagefold run`: what the program that it becomes finds ([`exec`]), whether its memory is enrolled ([`ways`]) and may
//! be ([`domains`]), what is said where a library did not enrol it ([`preloaded`]), and how KSM is driven meanwhile
//! ([`policies`]).

mod domains;
mod enroll_methods;
mod exec;
mod policies;
mod preload_check;
mod test_programs;
mod user_engine;
