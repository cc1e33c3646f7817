//! Lets DAMON count accesses: see [`pagefold_host::access_monitor`].
//!
//! DAMON tries the lock of its files and returns EBUSY instead of waiting, also when its own kernel threads have it
//! (`damon_sysfs_lock`, mm/damon/sysfs.c), so each access is retried for a while. Only the write that makes the kdamonds
//! is not: while there are none, no kernel thread has the lock, but another program that makes its own.

use super::write_setting;
use crate::LiveHost;
use pagefold_base::{Absent, Pid, Reading};
use pagefold_host::access_monitor::{self, KDAMONDS_DIRECTORY, MonitorStep, MonitoredMemory, OPERATIONS};
use pagefold_host::action::{ActionError, ActionOutcome};
use pagefold_host::{Host, hold};
use std::thread;
use std::time::{Duration, Instant};

/// How long an access is retried while DAMON is busy: ten of its sampling intervals.
const BUSY_TIMEOUT: Duration = Duration::from_secs(1);

const BUSY_PAUSE: Duration = Duration::from_millis(10);

/// Start, update or stop kdamonds.
pub fn monitor(host: &LiveHost, step: &MonitorStep) -> Result<ActionOutcome, ActionError> {
    Damon { host, write_once: &|path, value| write_setting(&format!("/{path}"), value) }.monitor(step)
}

/// DAMON's files.
struct Damon<'a> {
    /// The host, for reading.
    host: &'a dyn Host,
    /// Writes a value to a file, by its path below the root.
    write_once: &'a dyn Fn(&str, &str) -> Result<(), ActionError>,
}

impl Damon<'_> {
    fn monitor(&self, step: &MonitorStep) -> Result<ActionOutcome, ActionError> {
        match step {
            MonitorStep::Start(memory) => self.start(memory).map(|()| ActionOutcome::default()),
            MonitorStep::UpdateCounts(pids) => self.update_counts(pids).map(|()| ActionOutcome::default()),
            MonitorStep::Stop(pids) => Ok(ActionOutcome { unchanged: !self.stop(pids)?, ..ActionOutcome::default() }),
        }
    }

    fn start(&self, memory: &[MonitoredMemory]) -> Result<(), ActionError> {
        for memory in memory {
            hold(self.host, memory.process)?;
        }
        match access_monitor::read_kdamond_count(self.host) {
            Ok(0) => {}
            Ok(count) => {
                let noun = if count == 1 { "kdamond" } else { "kdamonds" };
                return Err(ActionError::Busy(format!("another program uses DAMON: it has {count} {noun}")));
            }
            Err(Absent::NotOnThisKernel) => {
                return Err(ActionError::Unsupported("this kernel has no DAMON (5.18, CONFIG_DAMON_SYSFS)".to_owned()));
            }
            Err(Absent::Denied) => return Err(ActionError::Denied("DAMON needs root".to_owned())),
            Err(why) => return Err(why.into()),
        }
        // If it fails, all kdamonds that exist are another program's.
        (self.write_once)(&kdamond_count_file(), &memory.len().to_string()).map_err(|why| match why {
            ActionError::Busy(_) => ActionError::Busy("another program uses DAMON: it has just begun".to_owned()),
            why => why,
        })?;
        self.configure_and_turn_on(memory).map_err(|why| {
            let pids: Vec<Pid> = memory.iter().map(|memory| memory.process.pid).collect();
            match self.stop(&pids) {
                Ok(_) => why,
                Err(remains) => ActionError::Failed(format!("{why}; and its kdamonds remain: {remains}")),
            }
        })
    }

    fn configure_and_turn_on(&self, memory: &[MonitoredMemory]) -> Result<(), ActionError> {
        for (position, memory) in memory.iter().enumerate() {
            self.write(&format!("{}/contexts/nr_contexts", access_monitor::kdamond_directory(position)), "1")?;
            self.check_operations(position)?;
            for (path, value) in access_monitor::context_files(position, memory) {
                self.write(&path, &value)?;
            }
        }
        for position in 0..memory.len() {
            self.write_state(position, "on").map_err(|why| match why {
                ActionError::Busy(_) => ActionError::Busy(
                    "another user of DAMON runs, such as DAMON_RECLAIM, DAMON_LRU_SORT or DAMON_STAT".to_owned(),
                ),
                why => why,
            })?;
        }
        Ok(())
    }

    fn check_operations(&self, position: usize) -> Result<(), ActionError> {
        let path = format!("{}/avail_operations", access_monitor::context_directory(position));
        let available = self.host.read(&path)?;
        if String::from_utf8_lossy(&available).split_whitespace().any(|operations| operations == OPERATIONS) {
            return Ok(());
        }
        let missing = format!("this kernel's DAMON lacks {OPERATIONS} operations (5.19, CONFIG_DAMON_VADDR)");
        Err(ActionError::Unsupported(missing))
    }

    fn update_counts(&self, pids: &[Pid]) -> Result<(), ActionError> {
        if !self.has_kdamonds_for(pids)? {
            return Err(ActionError::ChangedByOthers("the kdamonds of this session".to_owned()));
        }
        for position in 0..pids.len() {
            // A kdamond ends with the last of its processes.
            if !self.is_on(position)? {
                return Err(ActionError::Vanished);
            }
            self.write_state(position, "update_schemes_stats")?;
        }
        Ok(())
    }

    /// Turn the kdamonds off and remove them. Returns whether they existed.
    fn stop(&self, pids: &[Pid]) -> Result<bool, ActionError> {
        if access_monitor::read_kdamond_count(self.host)? == 0 || !self.has_kdamonds_for(pids)? {
            return Ok(false);
        }
        let mut turned_off = Ok(());
        for position in 0..pids.len() {
            let result = self.turn_off(position);
            turned_off = turned_off.and(result);
        }
        turned_off?;
        self.write(&kdamond_count_file(), "0")?;
        Ok(true)
    }

    fn turn_off(&self, position: usize) -> Result<(), ActionError> {
        if !self.is_on(position)? {
            return Ok(());
        }
        match self.write_state(position, "off") {
            // The kernel returns EPERM if the kdamond has ended by itself meanwhile (`__damon_stop`, mm/damon/core.c).
            Err(why) if self.is_on(position).unwrap_or(true) => Err(why),
            _ => Ok(()),
        }
    }

    fn has_kdamonds_for(&self, pids: &[Pid]) -> Reading<bool> {
        retry_reading(|| access_monitor::has_kdamonds_for(self.host, pids))
    }

    fn is_on(&self, position: usize) -> Reading<bool> {
        let state = retry_reading(|| self.host.read(&access_monitor::state_file(position)))?;
        Ok(state.trim_ascii() == b"on")
    }

    fn write_state(&self, position: usize, state: &str) -> Result<(), ActionError> {
        self.write(&access_monitor::state_file(position), state)
    }

    fn write(&self, path: &str, value: &str) -> Result<(), ActionError> {
        retry(|| (self.write_once)(path, value), |why| matches!(why, ActionError::Busy(_)))
    }
}

fn kdamond_count_file() -> String {
    format!("{KDAMONDS_DIRECTORY}/nr_kdamonds")
}

/// Read a state, for which the kernel may return EBUSY (`state_show`, mm/damon/sysfs.c, 6.17).
fn retry_reading<T>(read: impl FnMut() -> Reading<T>) -> Reading<T> {
    // The host reports EBUSY as a malformed value.
    retry(read, |why| matches!(why, Absent::Malformed(_)))
}

fn retry<T, E>(mut access: impl FnMut() -> Result<T, E>, is_busy: impl Fn(&E) -> bool) -> Result<T, E> {
    let deadline = Instant::now() + BUSY_TIMEOUT;
    loop {
        match access() {
            Err(why) if is_busy(&why) && Instant::now() < deadline => thread::sleep(BUSY_PAUSE),
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::{AddressRange, ProcessId};
    use pagefold_host::fake_host::FakeHost;
    use std::cell::RefCell;

    fn put_kdamond(host: &FakeHost, position: usize, (target, state): (u32, &str)) {
        host.put_file(&access_monitor::state_file(position), state);
        let context = access_monitor::context_directory(position);
        host.put_file(&format!("{context}/targets/0/pid_target"), &target.to_string());
    }

    fn host_with_kdamonds(kdamonds: &[(u32, &str)]) -> FakeHost {
        let host = FakeHost::booted();
        host.set_cpu_ticks(7, 0);
        host.put_file(&kdamond_count_file(), &kdamonds.len().to_string());
        kdamonds.iter().enumerate().for_each(|(position, kdamond)| put_kdamond(&host, position, *kdamond));
        host
    }

    fn start_of_7() -> MonitorStep {
        let process = ProcessId { pid: Pid(7), start_time: 1 };
        MonitorStep::Start(vec![MonitoredMemory { process, ranges: vec![AddressRange { start: 0, end: 0x1000 }] }])
    }

    /// The result of a step, and the writes that it tried. A write changes a file unless `fail` returns an error.
    fn perform(
        host: &FakeHost,
        step: &MonitorStep,
        fail: impl Fn(&str, &str) -> Option<ActionError>,
    ) -> (Result<ActionOutcome, ActionError>, Vec<(String, String)>) {
        let writes = RefCell::new(Vec::new());
        let write_once = |path: &str, value: &str| {
            let file = path.strip_prefix(KDAMONDS_DIRECTORY).unwrap().trim_start_matches('/');
            writes.borrow_mut().push((file.to_owned(), value.to_owned()));
            if let Some(error) = fail(file, value) {
                return Err(error);
            }
            host.put_file(path, value);
            Ok(())
        };
        let result = Damon { host, write_once: &write_once }.monitor(step);
        (result, writes.into_inner())
    }

    fn owned(writes: &[(&str, &str)]) -> Vec<(String, String)> {
        writes.iter().map(|(file, value)| ((*file).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn running_kdamond_for_physical_addresses_is_refused_and_stays() {
        let host = host_with_kdamonds(&[(0, "on")]);
        let (stopped, writes) = perform(&host, &MonitorStep::Stop(vec![Pid(7)]), |_, _| None);
        assert!(stopped.unwrap().unchanged && writes.is_empty(), "{writes:?}");
        let (updated, writes) = perform(&host, &MonitorStep::UpdateCounts(vec![Pid(7)]), |_, _| None);
        assert!(matches!(updated, Err(ActionError::ChangedByOthers(_))) && writes.is_empty(), "{updated:?} {writes:?}");
        let (started, writes) = perform(&host, &start_of_7(), |_, _| None);
        assert!(matches!(started, Err(ActionError::Busy(_))) && writes.is_empty(), "{started:?} {writes:?}");
    }

    #[test]
    fn refusal_counts_the_kdamonds_of_another_program() {
        let message = |kdamonds: &[(u32, &str)]| {
            perform(&host_with_kdamonds(kdamonds), &start_of_7(), |_, _| None).0.unwrap_err().to_string()
        };
        let one = message(&[(0, "on")]);
        assert!(one.ends_with("it has 1 kdamond"), "{one}");
        let two = message(&[(0, "on"), (0, "off")]);
        assert!(two.ends_with("it has 2 kdamonds"), "{two}");
    }

    #[test]
    fn kdamond_that_another_program_makes_before_the_start_stays() {
        let host = host_with_kdamonds(&[]);
        let (started, writes) = perform(&host, &start_of_7(), |file, _| {
            assert_eq!(file, "nr_kdamonds");
            host.put_file(&kdamond_count_file(), "1");
            put_kdamond(&host, 0, (0, "off"));
            Some(ActionError::Busy("EBUSY".to_owned()))
        });
        assert!(matches!(started, Err(ActionError::Busy(_))), "{started:?}");
        assert_eq!(writes, owned(&[("nr_kdamonds", "1")]));
    }

    #[test]
    fn kdamonds_of_a_failed_start_are_removed() {
        let host = host_with_kdamonds(&[]);
        let (started, writes) = perform(&host, &start_of_7(), |file, value| {
            if (file, value) == ("nr_kdamonds", "1") {
                host.put_file(&access_monitor::state_file(0), "off");
            }
            (file == "0/contexts/nr_contexts").then(|| ActionError::Failed("ENOMEM".to_owned()))
        });
        assert!(matches!(&started, Err(ActionError::Failed(why)) if why == "ENOMEM"), "{started:?}");
        let expected = [("nr_kdamonds", "1"), ("0/contexts/nr_contexts", "1"), ("nr_kdamonds", "0")];
        assert_eq!(writes, owned(&expected));
    }

    #[test]
    fn kdamond_that_ends_while_it_is_turned_off_is_removed() {
        let host = host_with_kdamonds(&[(7, "on"), (8, "on")]);
        let (stopped, writes) = perform(&host, &MonitorStep::Stop(vec![Pid(7), Pid(8)]), |file, _| {
            (file == "0/state").then(|| {
                host.put_file(&access_monitor::state_file(0), "off");
                ActionError::Denied("EPERM".to_owned())
            })
        });
        assert!(!stopped.unwrap().unchanged);
        assert_eq!(writes, owned(&[("0/state", "off"), ("1/state", "off"), ("nr_kdamonds", "0")]));
    }

    #[test]
    fn all_kdamonds_are_turned_off_before_the_first_error_is_returned() {
        let host = host_with_kdamonds(&[(7, "on"), (8, "on"), (9, "on")]);
        let stop = MonitorStep::Stop(vec![Pid(7), Pid(8), Pid(9)]);
        let (stopped, writes) = perform(&host, &stop, |file, _| match file {
            "0/state" => Some(ActionError::Failed("first".to_owned())),
            "1/state" => Some(ActionError::Failed("second".to_owned())),
            _ => None,
        });
        assert!(matches!(&stopped, Err(ActionError::Failed(why)) if why == "first"), "{stopped:?}");
        assert_eq!(writes, owned(&[("0/state", "off"), ("1/state", "off"), ("2/state", "off")]));
    }

    #[test]
    fn busy_state_is_read_again() {
        let mut readings = vec![Ok(true), Err(Absent::Malformed("EBUSY".to_owned()))];
        assert_eq!(retry_reading(|| readings.pop().unwrap()), Ok(true));
        assert_eq!(retry_reading(|| Err::<bool, _>(Absent::Denied)), Err(Absent::Denied));
    }
}
