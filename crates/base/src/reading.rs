//! A reading of the host: a value, or the reason why there is none.
//!
//! Absent is not zero. A counter that this kernel does not have, one that may not be read, and one whose process went
//! away are three different answers, and none of them is the number 0.

/// Why there is no value.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error)]
pub enum Absent {
    /// The file or field does not exist on this kernel (or its option is off).
    #[error("not on this kernel")]
    NotOnThisKernel,
    /// The kernel refused: more privilege is needed.
    #[error("permission denied")]
    Denied,
    /// The process or object went away.
    #[error("vanished")]
    Vanished,
    /// There is something, and it is not what was expected; the text says what.
    #[error("malformed: {0}")]
    Malformed(String),
}

/// A value read from the host, or why it is absent.
pub type Reading<T> = Result<T, Absent>;
