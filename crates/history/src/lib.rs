//! The history of a host in an SQLite database: what `pagefold report` is made of.
//!
//! The daemon notes its status and commits what it has noted in one transaction about once a minute ([`HistoryWriter`]). The
//! database is in WAL mode with `synchronous=NORMAL`: what was committed survives any end of the process; a power
//! failure may take the last commits, and leaves the rest whole (SQLite, "Write-Ahead Logging", 3.3). Samples are at
//! full rate for a day, then one a minute for a month, then one an hour for a year; see [`tiers`]. Database and log
//! together stay below a bound: before it is reached, the oldest goes. Tables and columns are in `schema.sql`.
//!
//! A file that is not a history, or is damaged, is left as it is and reported. Readers need no lock that the daemon
//! would wait for; one that holds the log for long makes the daemon keep nothing until it lets go ([`HistoryError::LogBlockedByReader`]).

#![forbid(unsafe_code)]

pub mod chart;
pub mod convergence;
pub mod csv;
mod database;
pub mod figures;
pub mod html;
#[cfg(feature = "parquet")]
pub mod parquet;
pub mod points;
mod reader;
pub mod record;
pub mod report;
pub mod series;
pub mod svg;
pub mod text;
pub mod tiers;
mod writer;

pub use reader::HistoryReader;
pub use writer::{HistoryLimits, HistoryWriter};

use std::path::PathBuf;

/// Why a history cannot be kept or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It cannot be opened or made.
    #[error("cannot open the history {}", .0.display())]
    Open(PathBuf, #[source] std::io::Error),
    /// It is not a database, or one of another program.
    #[error("{} is no history of pagefold: name another file, or move it away", .0.display())]
    NotAHistory(PathBuf),
    /// It has a form that is not known.
    #[error("the history {} has form {}, and this pagefold knows 1 only: use the one that wrote it", .0.display(), .1)]
    UnknownVersion(PathBuf, i64),
    /// It is damaged.
    #[error("the history {} is damaged ({}): move it away, and a new one is begun", .0.display(), .1)]
    Damaged(PathBuf, String),
    /// Somebody reads it for so long that its log has grown to its bound.
    #[error("the history {} is held by whoever reads it, and nothing can be written until they end", .0.display())]
    LogBlockedByReader(PathBuf),
    /// The database refuses.
    #[error("cannot {} the history {}", .1, .0.display())]
    Database(PathBuf, &'static str, #[source] rusqlite::Error),
}
