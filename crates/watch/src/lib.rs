//! What people and monitoring systems see of a running daemon: its state as metrics, as a web page and in a terminal.
//!
//! All of it is drawn from one document, [`pagefold_daemon::wire::StatusReport`]: [`http`] shows the one that the daemon
//! publishes on a [`StatusBoard`], [`top`] the one that it is given.
//! Nothing here looks at the host or changes it.

#![forbid(unsafe_code)]

pub mod board;
pub mod http;
pub mod metrics;
mod page;
pub mod top;

pub use board::StatusBoard;
