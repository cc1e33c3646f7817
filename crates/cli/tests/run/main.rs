//! `pagefold run`: what the program that it becomes finds ([`exec`]), whether its memory is enrolled ([`ways`]), and
//! how KSM is driven meanwhile ([`policies`]).

mod exec;
mod policies;
mod programs;
mod user;
mod ways;
