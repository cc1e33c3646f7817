//! `pagefold run`: what the program that it becomes finds ([`exec`]), and whether its memory is enrolled ([`ways`]).

mod exec;
mod programs;
mod ways;
