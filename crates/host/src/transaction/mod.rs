//! Changes to a host that can be undone: a session under locks, and the journal with the undo of each change.

pub mod journal;
pub mod session;

pub use session::Session;
