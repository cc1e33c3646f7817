//! Questions to many machines: to the monitors of QEMU, and to the agents in guests.
//!
//! Several machines are asked at once. Through libvirt these are few, and no more are asked once some had no answer in
//! time: libvirt waits longer for them than a session takes, without a limit for monitors, and each of them occupies one
//! of its threads for all domains, of which there are 20 by default (`max_workers` of libvirtd.conf).

use crate::{Host, elapsed_since, hold, parse};
use pagefold_base::{Absent, ProcessId, Reading};
use std::thread;
use std::time::Duration;

/// How long a session with one machine may take, from the connection to the last answer.
pub const SESSION_TIMEOUT: Duration = Duration::from_secs(1);

/// A session that took so long has run out of time: a system call may end a tick of the kernel early.
const OUT_OF_TIME: Duration = Duration::from_millis(950);

/// The maximum number of machines that are asked at once. Each may take until its time limit without using a CPU.
const MAX_CONCURRENT: usize = 256;

/// The number of sessions through libvirt that may run out of time. No more than that are open at once.
const MAX_OUT_OF_TIME_THROUGH_LIBVIRT: usize = 4;

/// Asks these machines, in their order. `is_managed` tells from the arguments of QEMU whether a machine is asked through
/// libvirt, if that is permitted.
pub fn ask_machines<T: Send>(
    host: &dyn Host,
    processes: &[ProcessId],
    is_libvirt_permitted: bool,
    is_managed: impl Fn(&[String]) -> bool,
    ask: impl Fn(ProcessId) -> Reading<T> + Sync,
) -> Vec<Reading<T>> {
    let is_through_libvirt = |process: ProcessId| {
        let command_line = || hold(host, process)?.read("cmdline");
        is_libvirt_permitted && command_line().is_ok_and(|bytes| is_managed(&parse::arguments(&bytes)))
    };
    let (managed, by_socket): (Vec<usize>, Vec<usize>) =
        (0..processes.len()).partition(|&position| is_through_libvirt(processes[position]));
    let mut answers: Vec<Reading<T>> = processes.iter().map(|_| Err(Absent::NotAsked(stop_reason()))).collect();
    let mut ask_at_once = |positions: &[usize]| {
        let asked = ask_concurrently(host, positions.iter().map(|&position| processes[position]), &ask);
        let mut out_of_time = 0;
        for (&position, (answer, duration)) in positions.iter().zip(asked) {
            answers[position] = answer;
            out_of_time += usize::from(duration >= OUT_OF_TIME);
        }
        out_of_time
    };
    for positions in by_socket.chunks(MAX_CONCURRENT) {
        ask_at_once(positions);
    }
    let (mut left, mut permitted) = (&managed[..], MAX_OUT_OF_TIME_THROUGH_LIBVIRT);
    while permitted > 0 && !left.is_empty() {
        let (positions, later) = left.split_at(permitted.min(left.len()));
        permitted -= ask_at_once(positions);
        left = later;
    }
    answers
}

fn stop_reason() -> String {
    format!(
        "{MAX_OUT_OF_TIME_THROUGH_LIBVIRT} other machines of libvirt did not answer in time, so it is not asked for more"
    )
}

/// The answers with the time that each took.
fn ask_concurrently<T: Send>(
    host: &dyn Host,
    processes: impl Iterator<Item = ProcessId>,
    ask: &(impl Fn(ProcessId) -> Reading<T> + Sync),
) -> Vec<(Reading<T>, Duration)> {
    let measure = |process| {
        let start = host.now();
        (ask(process), elapsed_since(host, start))
    };
    thread::scope(|scope| {
        let measure = &measure;
        let asked: Vec<_> = processes.map(|process| scope.spawn(move || measure(process))).collect();
        asked.into_iter().map(|thread| thread.join().expect("asking does not panic")).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_host::FakeHost;
    use pagefold_base::Pid;
    use std::collections::BTreeSet;
    use std::sync::{Condvar, Mutex};

    const COUNT: u32 = 20;

    /// Machines 1 to 20, of which those above a number are libvirt's.
    fn machines(last_by_socket: u32) -> (FakeHost, Vec<ProcessId>) {
        let host = FakeHost::booted();
        let start = |pid: u32| {
            host.start_process(pid, 3);
            let way = if pid > last_by_socket { "libvirt" } else { "socket" };
            host.put_file(&format!("proc/{pid}/cmdline"), &format!("qemu\0{way}\0"));
            host.open(Pid(pid)).unwrap().id()
        };
        let processes = (1..=COUNT).map(start).collect();
        (host, processes)
    }

    fn is_managed(arguments: &[String]) -> bool {
        arguments[1] == "libvirt"
    }

    /// Asks machines of which some hang: the answers, and the largest number of machines that were asked at once.
    fn ask_some_that_hang(hung: &BTreeSet<u32>) -> (Vec<Reading<u32>>, usize) {
        let (host, processes) = machines(0);
        let open = Mutex::new((0, 0));
        let ask = |process: ProcessId| {
            let count = |change: fn(usize) -> usize| {
                let mut open = open.lock().unwrap();
                open.0 = change(open.0);
                open.1 = open.1.max(open.0);
            };
            count(|now| now + 1);
            let hangs = hung.contains(&process.pid.0);
            thread::sleep(if hangs { SESSION_TIMEOUT } else { Duration::from_millis(1) });
            count(|now| now - 1);
            if hangs { Err(Absent::NoAnswer("nothing".to_owned())) } else { Ok(process.pid.0) }
        };
        let answers = ask_machines(&host, &processes, true, is_managed, ask);
        let most = open.lock().unwrap().1;
        (answers, most)
    }

    #[test]
    fn libvirt_is_not_asked_for_more_after_some_machines_did_not_answer_in_time() {
        let unasked = Err(Absent::NotAsked(stop_reason()));
        // At most four threads of libvirt are occupied, also if the machines that hang are apart from each other.
        for hung in [[1, 2, 3, 4], [1, 2, 3, 5], [2, 5, 8, 11]] {
            let (answers, most) = ask_some_that_hang(&hung.into());
            assert!(most <= MAX_OUT_OF_TIME_THROUGH_LIBVIRT, "{most}");
            let count =
                |is_wanted: fn(&Reading<u32>) -> bool| answers.iter().filter(|answer| is_wanted(answer)).count();
            assert_eq!(count(|answer| matches!(answer, Err(Absent::NoAnswer(_)))), 4, "{answers:?}");
            assert_eq!(answers[hung[3] as usize..], vec![unasked.clone(); COUNT as usize - hung[3] as usize]);
        }
    }

    #[test]
    fn machines_of_libvirt_are_all_asked_while_few_hang() {
        let (answers, most) = ask_some_that_hang(&[1, 7, 20].into());
        assert!((1..=4).contains(&most), "{most}");
        for (pid, answer) in (1..=COUNT).zip(answers) {
            assert_eq!(answer.is_ok(), ![1, 7, 20].contains(&pid), "{pid}: {answer:?}");
        }
    }

    #[test]
    fn machines_with_a_socket_are_asked_at_once() {
        let (host, processes) = machines(COUNT - 1);
        let (arrived, all_arrived) = (Mutex::new(0), Condvar::new());
        let ask = |process: ProcessId| {
            if process.pid.0 == COUNT {
                return Ok(true);
            }
            let mut arrived = arrived.lock().unwrap();
            *arrived += 1;
            all_arrived.notify_all();
            let wait = all_arrived.wait_timeout_while(arrived, Duration::from_secs(60), |count| *count < COUNT - 1);
            Ok(!wait.unwrap().1.timed_out())
        };
        let answers = ask_machines(&host, &processes, true, is_managed, ask);
        assert_eq!(answers, vec![Ok(true); COUNT as usize]);
        // Without permission, libvirt's are asked as all others, and tell why they do not answer.
        let unasked = Err(Absent::NotAsked("libvirt has the monitor".to_owned()));
        let (host, processes) = machines(0);
        let answers = ask_machines(&host, &processes, false, is_managed, |_| unasked.clone() as Reading<u32>);
        assert_eq!(answers, vec![unasked; COUNT as usize]);
    }
}
