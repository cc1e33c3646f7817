//! Says whether the processes of a process group are stopped.
//!
//! SIGSTOP does not stop a thread that waits for a CPU: the thread stops when it runs next (kernel/signal.c, `do_signal_stop`;
//! Linux 6.18). SIGCONT before that discards the stop. The time of a stop counts from the moment at which all threads are
//! stopped.

use std::fs;
use std::path::Path;

/// Whether no thread of a process group's leader and of its descendants in the group can run: each one is stopped or has
/// ended.
///
/// A thread that sleeps uninterruptibly is not stopped. Descendants are found by `/proc/PID/task/TID/children`, which needs
/// `CONFIG_PROC_CHILDREN`; without it, only the leader counts. Processes whose parent has ended are not seen.
#[must_use]
pub fn is_group_stopped(leader: u32) -> bool {
    let mut processes = vec![leader];
    while let Some(process) = processes.pop() {
        // It may have ended.
        let Ok(threads) = fs::read_dir(format!("/proc/{process}/task")) else { continue };
        for thread in threads.flatten() {
            if is_runnable_in_group(&thread.path(), leader) {
                return false;
            }
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            processes.extend(children.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
        }
    }
    true
}

/// Whether a thread belongs to a group and is neither stopped nor ended.
fn is_runnable_in_group(thread: &Path, group: u32) -> bool {
    let Ok(stat) = fs::read_to_string(thread.join("stat")) else { return false };
    parse_state_and_group(&stat).is_some_and(|(state, its_group)| its_group == group && !"TtZX".contains(state))
}

/// The state and the process group in `/proc/PID/task/TID/stat` (proc_pid_stat(5)): the third and the fifth field. The
/// second one is the name in parentheses, which may have spaces and parentheses itself.
fn parse_state_and_group(stat: &str) -> Option<(char, u32)> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(1)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};
    use std::thread;
    use std::time::{Duration, Instant};

    #[test]
    fn state_and_group_follow_the_name() {
        assert_eq!(parse_state_and_group("7 (a ) R 1) T 3 9 9 0"), Some(('T', 9)));
        assert_eq!(parse_state_and_group("7 (sh) R"), None);
    }

    /// Waits for at most a minute.
    fn wait_until(condition: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(60);
        while !condition() {
            assert!(Instant::now() < end, "the group did not change its state");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// The leader waits for a child that counts, so that both must stop.
    #[test]
    fn group_is_stopped_when_leader_and_descendants_are() {
        let script = "sh -c 'while :; do :; done'; true";
        let mut command = Command::new("sh");
        let mut child = command.args(["-c", script]).stdin(Stdio::null()).process_group(0).spawn().unwrap();
        let leader = child.id();
        let signal = |name: &str| {
            let group = format!("-{leader}");
            assert!(Command::new("kill").args([name, "--", &group]).status().unwrap().success());
        };
        let children = format!("/proc/{leader}/task/{leader}/children");
        wait_until(|| !fs::read_to_string(&children).is_ok_and(|children| children.is_empty()));
        assert!(!is_group_stopped(leader));
        signal("-STOP");
        wait_until(|| is_group_stopped(leader));
        let counting: u32 = fs::read_to_string(&children).unwrap_or_default().trim().parse().unwrap_or_default();
        assert!(
            counting == 0 || !is_runnable_in_group(Path::new(&format!("/proc/{counting}/task/{counting}")), leader)
        );
        signal("-CONT");
        wait_until(|| !is_group_stopped(leader));
        signal("-KILL");
        child.wait().unwrap();
        assert!(is_group_stopped(leader), "an ended group cannot run");
    }
}
