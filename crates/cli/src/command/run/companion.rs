//! What stays beside a program that was started: a process that follows the program's tree until the last of it has
//! ended.
//!
//! The tree is followed by looking at `/proc` again and again, and remembering who belonged to it. The alternatives
//! would show in the program: a subreaper takes orphans away from init, a cgroup moves the program to other limits, an
//! inherited descriptor or variable is one that its parent did not give. Limits: a process whose parent ended before
//! either was seen is not found again, as is a daemon's that forks twice between two looks.

use pagefold_host::act::{Action, Refusal};
use pagefold_host::{Host, observe};
use pagefold_model::process::Process;
use pagefold_model::region::VmFlags;
use pagefold_model::{Pid, ProcessId, Reading};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::time::Duration;

/// The first pause between two looks at the tree; doubled until it is [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// A process and its descendants, as far as they were seen.
#[derive(Debug)]
pub struct Tree {
    members: BTreeSet<ProcessId>,
}

impl Tree {
    /// The tree that a process begins.
    pub fn of(process: ProcessId) -> Self {
        Self { members: BTreeSet::from([process]) }
    }

    /// Look who is there now.
    pub fn observe(&mut self, host: &dyn Host) -> Reading<()> {
        let running = host.pids()?.into_iter().filter_map(|pid| {
            let stat = pagefold_host::parse::stat(&host.open(pid).ok()?.read("stat").ok()?).ok()?;
            let living = !matches!(stat.state, 'Z' | 'X');
            living.then_some((ProcessId { pid, start_time: stat.start_time }, stat.ppid))
        });
        self.grow(&running.collect());
        Ok(())
    }

    /// Who belongs to it now.
    pub fn members(&self) -> impl Iterator<Item = ProcessId> {
        self.members.iter().copied()
    }

    /// Whether all have ended.
    pub fn has_ended(&self) -> bool {
        self.members.is_empty()
    }

    /// Drop who has ended and add the descendants of the others, from the running processes and their parents.
    fn grow(&mut self, running: &BTreeMap<ProcessId, Pid>) {
        self.members.retain(|member| running.contains_key(member));
        loop {
            let parents: BTreeSet<Pid> = self.members.iter().map(|member| member.pid).collect();
            let before = self.members.len();
            self.members.extend(running.iter().filter(|(_, parent)| parents.contains(parent)).map(|(id, _)| id));
            if self.members.len() == before {
                return;
            }
        }
    }
}

/// Enrol every process of a tree that is not enrolled, from outside, until all have ended, but for those that
/// `excluded` tells a reason for. Tells on standard error whom it left or could not enrol, once each.
///
/// Who is excluded is asked anew at each look, since a process becomes another program by exec. Limits: what an
/// enrolled process starts is enrolled from its start, because the kernel hands it on over fork and exec.
pub fn enrol_all(host: &dyn Host, first: ProcessId, excluded: &dyn Fn(&Process) -> Option<String>) {
    let mut tree = Tree::of(first);
    let (mut refused, mut left) = (BTreeSet::new(), BTreeSet::new());
    let mut pause = FIRST_PAUSE;
    let tell = |process: ProcessId, why: &str| {
        // Nobody may be left to read it.
        let _ = writeln!(std::io::stderr(), "pagefold: process {} is not enrolled in KSM: {why}", process.pid);
    };
    while tree.observe(host).is_ok() && !tree.has_ended() {
        for process in tree.members().filter(|process| !refused.contains(process)).collect::<Vec<_>>() {
            match enrol_unless(host, process, excluded) {
                Ok(None) | Err(Refusal::Vanished | Refusal::Busy(_)) => {}
                Ok(Some(why)) => {
                    if left.insert(process) {
                        tell(process, &why);
                    }
                }
                Err(why) => {
                    tell(process, &why.to_string());
                    refused.insert(process);
                }
            }
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Enrol a process from outside, where it is not and there is no reason against it. Tells the reason.
fn enrol_unless(
    host: &dyn Host,
    process: ProcessId,
    excluded: &dyn Fn(&Process) -> Option<String>,
) -> Result<Option<String>, Refusal> {
    if is_enrolled(host, process)? {
        return Ok(None);
    }
    let seen = observe::process(&*host.open(process.pid)?)?;
    if seen.id != process {
        return Err(Refusal::Vanished);
    }
    let why = excluded(&seen);
    if why.is_none() {
        enrol(host, process)?;
    }
    Ok(why)
}

/// Enrol a process from outside, where it is not, and see that it took.
pub fn enrol(host: &dyn Host, process: ProcessId) -> Result<(), Refusal> {
    if is_enrolled(host, process)? {
        return Ok(());
    }
    host.apply(&Action::MergeAny { process, on: true })?;
    if is_enrolled(host, process)? { Ok(()) } else { Err(Refusal::Failed("the kernel agreed and did not".to_owned())) }
}

/// Whether the whole of a process is enrolled: by what the kernel says of it (6.14), else by a region that is.
fn is_enrolled(host: &dyn Host, process: ProcessId) -> Reading<bool> {
    let handle = host.open(process.pid)?;
    if handle.id() != process {
        return Err(pagefold_model::Absent::Vanished);
    }
    let ksm = pagefold_host::parse::process_ksm(handle.read("ksm_stat"), handle.read("ksm_merging_pages"));
    match ksm.merge_any {
        Ok(enrolled) => Ok(enrolled),
        Err(_) => Ok(observe::regions(&*handle)?.iter().any(|region| region.flags.has(VmFlags::MERGEABLE))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(pid: u32, start_time: u64) -> ProcessId {
        ProcessId { pid: Pid(pid), start_time }
    }

    /// Members after looks at running processes, each (number, start time, parent).
    fn followed(looks: &[&[(u32, u64, u32)]]) -> Vec<u32> {
        let mut tree = Tree::of(id(10, 1));
        for look in looks {
            tree.grow(&look.iter().map(|&(pid, start, parent)| (id(pid, start), Pid(parent))).collect());
        }
        tree.members().map(|member| member.pid.0).collect()
    }

    #[test]
    fn descendants_belong_to_a_tree_and_stay_in_it() {
        let look: &[_] = &[(1, 0, 0), (9, 1, 1), (10, 1, 9), (5, 4, 11), (11, 2, 10), (12, 3, 9)];
        assert_eq!(followed(&[look]), [5, 10, 11]);
        // Its parent gone, an orphan still belongs to it.
        assert_eq!(followed(&[look, &[(1, 0, 0), (5, 4, 1), (6, 9, 5), (12, 3, 9)]]), [5, 6]);
        assert!(followed(&[look, &[(1, 0, 0), (12, 3, 9)]]).is_empty());
    }

    #[test]
    fn a_number_that_was_given_again_is_another_process() {
        assert!(followed(&[&[(1, 0, 0), (10, 2, 1), (11, 3, 10)]]).is_empty());
    }
}
