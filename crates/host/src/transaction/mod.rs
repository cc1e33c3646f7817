//! Changes to a host that are undone: a session under locks, and the journal of what undoes it.

pub mod journal;
pub mod session;

pub use session::Session;
