//! System calls that need `unsafe`, each behind a safe interface that upholds what the call asks for.

pub mod forked;
pub mod mapping;
