//! Huge pages put back together, from outside: nothing is stopped.
//!
//! Mirrors `madvise_collapse` (mm/khugepaged.c, 6.18), which goes on behind a huge page that it fails at and tells only
//! of the last one. So a range that failed is gone over again page by huge page, which leaves those that are huge as
//! they are.

use super::push_missed_range;
use crate::LiveHost;
use crate::process::LiveProcess;
use pagefold_base::AddressRange;
use pagefold_host::action::{ActionError, ActionOutcome};
use pagefold_host::{ProcessHandle, observe};
use pagefold_sys::{advise, fault};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io;

/// Collapse ranges of whole huge pages.
pub fn collapse(
    host: &LiveHost,
    process: &LiveProcess<'_>,
    ranges: &[AddressRange],
) -> Result<ActionOutcome, ActionError> {
    let huge = observe::huge_page_bytes(host)
        .map_err(|_| ActionError::Unsupported("this kernel has no transparent huge pages".to_owned()))?;
    let pid = Pid::from_raw(process.id().pid.0.cast_signed()).ok_or(ActionError::Vanished)?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|_| ActionError::Vanished)?;
    // The number was the process's when the handle was made if it is its own still.
    if !process.exists() {
        return Err(ActionError::Vanished);
    }
    let call = |range: AddressRange| advise::collapse(&pidfd, range.start, range.bytes().0);
    let mut missed = Vec::new();
    for &range in ranges {
        fault::point("before collapsing a range");
        let answer = call(range);
        fault::point("after collapsing a range");
        let Err(error) = answer else { continue };
        if let Some(refusal) = process_wide_error(&error) {
            return Err(refusal);
        }
        for start in (range.start..range.end).step_by(huge as usize) {
            let page = AddressRange { start, end: range.end.min(start + huge) };
            if let Err(error) = call(page) {
                push_missed_range(&mut missed, page, describe_error(&error));
            }
        }
    }
    Ok(ActionOutcome { stop_durations: Vec::new(), missed_ranges: missed })
}

/// Errors that hold for the whole process.
fn process_wide_error(error: &io::Error) -> Option<ActionError> {
    match Errno::from_io_error(error)? {
        Errno::SRCH => Some(ActionError::Vanished),
        Errno::PERM | Errno::ACCESS => Some(ActionError::Denied(
            "collapsing needs the process's owner or CAP_SYS_PTRACE, and CAP_SYS_NICE".to_owned(),
        )),
        Errno::NOSYS => Some(ActionError::Unsupported("this kernel has no process_madvise (5.10)".to_owned())),
        _ => None,
    }
}

/// Why one huge page was not made (mm/khugepaged.c, `madvise_collapse_errno`).
fn describe_error(error: &io::Error) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::NOMEM) => "not mapped any more, or no huge page was to be had".to_owned(),
        Some(Errno::BUSY) => "a cgroup's limit leaves no room for a huge page".to_owned(),
        Some(Errno::AGAIN) => "pages of it are in use just now".to_owned(),
        Some(Errno::INVAL) => {
            "nothing is there, it may not hold huge pages, or this kernel cannot collapse (6.1)".to_owned()
        }
        _ => format!("refused by the kernel: {error}"),
    }
}
