//! Views of a running daemon for people and monitoring systems: metrics, a web page and a terminal display.
//!
//! All views show one document, [`pagefold_daemon::wire::StatusReport`]: [`http`] serves the status that the daemon
//! publishes on a [`StatusBoard`], [`top`] shows the status that it is given. This crate does not read or change the
//! host.

#![forbid(unsafe_code)]

pub mod board;
pub mod http;
pub mod metrics;
mod page;
pub mod top;

pub use board::StatusBoard;
