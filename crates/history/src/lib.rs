//! The history of a host in an SQLite database: the data of `pagefold report`.
//!
//! The daemon records its status and commits the new rows in one transaction about once a minute ([`HistoryWriter`]).
//! The database is in WAL mode with `synchronous=NORMAL`. Committed rows survive any end of the process; a power
//! failure may lose the last commits, and keeps the rest intact (SQLite, "Write-Ahead Logging", 3.3). Samples are kept
//! at full rate for a day, then one a minute for a month, then one an hour for a year; see [`tiers`]. Database and log
//! together stay below a size limit; before it is reached, the oldest rows are deleted. Tables and columns are in
//! `schema.sql`.
//!
//! A file that is not a history, or is damaged, is not changed and is reported. Readers take no lock that the daemon
//! would wait for. If a reader blocks the log for long, the daemon records nothing until the reader ends
//! ([`Error::LogBlockedByReader`]).

#![forbid(unsafe_code)]

pub mod chart;
pub mod convergence;
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
    /// It cannot be opened or created.
    #[error("cannot open the history {}", .0.display())]
    Open(PathBuf, #[source] std::io::Error),
    /// It is not a database, or one of another program.
    #[error("{} is no history of pagefold: name another file, or move it away", .0.display())]
    NotAHistory(PathBuf),
    /// Its format version is unknown.
    #[error(
        "the history {} has format {}, and this pagefold reads format {}: use the version that wrote it",
        .0.display(), .1, database::SCHEMA_VERSION
    )]
    UnknownVersion(PathBuf, i64),
    /// It is damaged.
    #[error("the history {} is damaged ({}): move it away to start a new one", .0.display(), .1)]
    Damaged(PathBuf, String),
    /// A reader has blocked the log for so long that the log has reached its size limit.
    #[error("a reader blocks the log of the history {}: nothing can be written until it ends", .0.display())]
    LogBlockedByReader(PathBuf),
    /// The database reports an error.
    #[error("cannot {} the history {}", .1, .0.display())]
    Database(PathBuf, &'static str, #[source] rusqlite::Error),
}
