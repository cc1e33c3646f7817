//! The names of the points at which `PAGEFOLD_FAULT_POINT` ends a program (`pagefold_sys::fault`), for tests that kill at each
//! of them.

/// Those of a journal.
pub const JOURNAL_POINTS: &[&str] = &[
    "before writing a journal",
    "between writing a journal and renaming it",
    "after renaming a journal",
    "before appending to a journal",
    "after appending to a journal",
    "before removing a journal",
    "after removing a journal",
];

/// Those of a system call injected into a process, and of the pause after it.
pub const VISIT_POINTS: &[&str] = &[
    "tracer started",
    "thread chosen",
    "seized",
    "interrupted",
    "stopped",
    "seccomp suspended",
    "frame written",
    "parked",
    "signals blocked",
    "system call replaced",
    "at the exit of the call",
    "at the entry of sigreturn",
    "parked again",
    "interrupted to leave",
    "resumed to leave",
    "stopped to leave",
    "signal mask restored",
    "registers restored",
    "stack restored",
    "detached",
];

/// Those of a placement of memory and threads, beside its journal and its visits.
pub const PLACEMENT_POINTS: &[&str] =
    &["before setting an affinity", "after setting an affinity", "before moving pages", "after moving pages"];
