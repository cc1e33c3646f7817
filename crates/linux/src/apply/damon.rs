//! Lets DAMON count accesses: see [`pagefold_host::access_monitor`].
//!
//! DAMON tries the lock of its files and returns EBUSY instead of waiting, also when its own kernel threads have it
//! (`damon_sysfs_lock`, mm/damon/sysfs.c), so each write is retried for a while.

use super::write_setting;
use crate::LiveHost;
use pagefold_base::{Absent, Pid};
use pagefold_host::access_monitor::{self, KDAMONDS_DIRECTORY, MonitorStep, MonitoredMemory, OPERATIONS};
use pagefold_host::action::{ActionError, ActionOutcome};
use pagefold_host::{Host, hold};
use std::thread;
use std::time::{Duration, Instant};

/// How long a write is retried while DAMON is busy: ten of its sampling intervals.
const BUSY_TIMEOUT: Duration = Duration::from_secs(1);

const BUSY_PAUSE: Duration = Duration::from_millis(10);

/// Start, update or stop kdamonds.
pub fn monitor(host: &LiveHost, step: &MonitorStep) -> Result<ActionOutcome, ActionError> {
    match step {
        MonitorStep::Start(memory) => start(host, memory).map(|()| ActionOutcome::default()),
        MonitorStep::UpdateCounts(pids) => update_counts(host, pids).map(|()| ActionOutcome::default()),
        MonitorStep::Stop(pids) => Ok(ActionOutcome { unchanged: !stop(host, pids)?, ..ActionOutcome::default() }),
    }
}

fn start(host: &LiveHost, memory: &[MonitoredMemory]) -> Result<(), ActionError> {
    for memory in memory {
        hold(host, memory.process)?;
    }
    match access_monitor::read_kdamond_count(host) {
        Ok(0) => {}
        Ok(count) => return Err(ActionError::Busy(format!("another program uses DAMON: it has {count} kdamonds"))),
        Err(Absent::NotOnThisKernel) => {
            return Err(ActionError::Unsupported("this kernel has no DAMON (5.18, CONFIG_DAMON_SYSFS)".to_owned()));
        }
        Err(Absent::Denied) => return Err(ActionError::Denied("DAMON needs root".to_owned())),
        Err(why) => return Err(why.into()),
    }
    configure_and_turn_on(host, memory).map_err(|why| {
        let pids: Vec<Pid> = memory.iter().map(|memory| memory.process.pid).collect();
        match stop(host, &pids) {
            Ok(_) => why,
            Err(remains) => ActionError::Failed(format!("{why}; and its kdamonds remain: {remains}")),
        }
    })
}

fn configure_and_turn_on(host: &LiveHost, memory: &[MonitoredMemory]) -> Result<(), ActionError> {
    write(&format!("{KDAMONDS_DIRECTORY}/nr_kdamonds"), &memory.len().to_string())?;
    for (position, memory) in memory.iter().enumerate() {
        write(&format!("{}/contexts/nr_contexts", access_monitor::kdamond_directory(position)), "1")?;
        check_operations(host, position)?;
        for (path, value) in access_monitor::context_files(position, memory) {
            write(&path, &value)?;
        }
    }
    for position in 0..memory.len() {
        write_state(position, "on").map_err(|why| match why {
            ActionError::Busy(_) => ActionError::Busy(
                "another user of DAMON runs, such as DAMON_RECLAIM, DAMON_LRU_SORT or DAMON_STAT".to_owned(),
            ),
            why => why,
        })?;
    }
    Ok(())
}

fn check_operations(host: &LiveHost, position: usize) -> Result<(), ActionError> {
    let available = host.read(&format!("{}/avail_operations", access_monitor::context_directory(position)))?;
    if String::from_utf8_lossy(&available).split_whitespace().any(|operations| operations == OPERATIONS) {
        return Ok(());
    }
    let missing = format!("this kernel's DAMON lacks {OPERATIONS} operations (5.19, CONFIG_DAMON_VADDR)");
    Err(ActionError::Unsupported(missing))
}

fn update_counts(host: &LiveHost, pids: &[Pid]) -> Result<(), ActionError> {
    if !access_monitor::has_kdamonds_for(host, pids)? {
        return Err(ActionError::ChangedByOthers("the kdamonds of this session".to_owned()));
    }
    for position in 0..pids.len() {
        // A kdamond ends with the last of its processes.
        if !is_on(host, position)? {
            return Err(ActionError::Vanished);
        }
        write_state(position, "update_schemes_stats")?;
    }
    Ok(())
}

/// Turn the kdamonds off and remove them. Returns whether they existed.
fn stop(host: &LiveHost, pids: &[Pid]) -> Result<bool, ActionError> {
    if access_monitor::read_kdamond_count(host)? == 0 || !access_monitor::has_kdamonds_for(host, pids)? {
        return Ok(false);
    }
    for position in 0..pids.len() {
        if is_on(host, position)? {
            write_state(position, "off")?;
        }
    }
    write(&format!("{KDAMONDS_DIRECTORY}/nr_kdamonds"), "0")?;
    Ok(true)
}

fn is_on(host: &LiveHost, position: usize) -> Result<bool, ActionError> {
    Ok(host.read(&state_file(position))?.trim_ascii() == b"on")
}

fn state_file(position: usize) -> String {
    format!("{}/state", access_monitor::kdamond_directory(position))
}

fn write_state(position: usize, state: &str) -> Result<(), ActionError> {
    write(&state_file(position), state)
}

/// Write a file of DAMON, by its path below the root.
fn write(path: &str, value: &str) -> Result<(), ActionError> {
    let deadline = Instant::now() + BUSY_TIMEOUT;
    loop {
        match write_setting(&format!("/{path}"), value) {
            Err(ActionError::Busy(_)) if Instant::now() < deadline => thread::sleep(BUSY_PAUSE),
            written => return written,
        }
    }
}
