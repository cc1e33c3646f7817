//! `pagefold run`: what the program that it becomes finds ([`exec`]), whether its memory is enrolled ([`ways`]) and may
//! be ([`domains`]), and how KSM is driven meanwhile ([`policies`]).

mod domains;
mod exec;
mod policies;
mod programs;
mod user;
mod ways;
