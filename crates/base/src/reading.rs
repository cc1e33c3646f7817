//! A reading of the host: a value, or the reason why it is absent.
//!
//! Absent is not zero. The kernel may not have the counter, reading may not be permitted, or the process may have ended.

/// Why there is no value.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error)]
pub enum Absent {
    /// The file or field does not exist on this kernel (or its option is off).
    #[error("not on this kernel")]
    NotOnThisKernel,
    /// Permission denied: more privilege is needed.
    #[error("permission denied")]
    Denied,
    /// The process or object has ended.
    #[error("vanished")]
    Vanished,
    /// The value exists, but is not in the expected format; the text says how.
    #[error("malformed: {0}")]
    Malformed(String),
    /// A program holds the value and does not give it; the text says which and why.
    #[error("no answer: {0}")]
    NoAnswer(String),
    /// A program holds the value and was not asked for it; the text says why.
    #[error("not asked: {0}")]
    NotAsked(String),
}

/// A value read from the host, or why it is absent.
pub type Reading<T> = Result<T, Absent>;
