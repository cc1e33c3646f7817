//! Collapses ranges into huge pages from outside: no thread is stopped.
//!
//! Mirrors `madvise_collapse` (mm/khugepaged.c, 6.18). It continues after a huge page that failed and only reports the
//! last error. So a failed range is processed again huge page by huge page, which does not change existing huge pages.

use super::push_missed_range;
use crate::LiveHost;
use crate::process::LiveProcess;
use pagefold_base::AddressRange;
use pagefold_host::action::{ActionError, ActionOutcome, MissedReason};
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
    // If the process still exists, the pidfd refers to it and not to a later process with its PID.
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
                push_missed_range(&mut missed, page, MissedReason::Refused(describe_error(&error)));
            }
        }
    }
    Ok(ActionOutcome { missed_ranges: missed, ..ActionOutcome::default() })
}

/// Errors that apply to the whole process.
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

/// Why one huge page was not created (mm/khugepaged.c, `madvise_collapse_errno`).
fn describe_error(error: &io::Error) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::NOMEM) => "not mapped any more, or no huge page was available".to_owned(),
        Some(Errno::BUSY) => "a cgroup's limit does not allow another huge page".to_owned(),
        Some(Errno::AGAIN) => "some of its pages are in use".to_owned(),
        Some(Errno::INVAL) => {
            "no page is resident, huge pages are not allowed there, or this kernel cannot collapse (6.1)".to_owned()
        }
        _ => format!("refused by the kernel: {error}"),
    }
}
