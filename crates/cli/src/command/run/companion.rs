//! The companion process of a started program: it follows the program's process tree until the last process has ended.
//!
//! It polls `/proc` and stores which processes belong to the tree. The alternatives would be visible to the program: a
//! subreaper takes orphans away from init, a cgroup moves the program to other limits, and a descriptor or variable
//! would be inherited. Limits: a process whose parent ended before a poll saw either of them is lost, such as a daemon
//! that forks twice between two polls.

use pagefold_base::process::Process;
use pagefold_base::region::{Region, VmFlags};
use pagefold_base::{Absent, AddressRange, Pid, ProcessId, Reading};
use pagefold_host::action::{self, Action, ActionError};
use pagefold_host::{Host, ProcessHandle as Handle, observe, parse};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::time::Duration;

/// The first pause between two polls of a tree; it doubles up to [`MAX_POLL_INTERVAL`].
pub const FIRST_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// The longest pause between two polls of a tree.
pub const MAX_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// A process and its descendants, as far as polls have seen them.
#[derive(Debug)]
pub struct ProcessTree {
    processes: BTreeSet<ProcessId>,
}

impl ProcessTree {
    /// The tree of a root process.
    pub fn new(process: ProcessId) -> Self {
        Self { processes: BTreeSet::from([process]) }
    }

    /// Update the tree from the running processes.
    pub fn update(&mut self, host: &dyn Host) -> Reading<()> {
        let running = host.pids()?.into_iter().filter_map(|pid| {
            let stat = parse::stat(&host.open(pid).ok()?.read("stat").ok()?).ok()?;
            let is_running = !matches!(stat.state, 'Z' | 'X');
            is_running.then_some((ProcessId { pid, start_time: stat.start_time }, stat.ppid))
        });
        self.update_from(&running.collect());
        Ok(())
    }

    /// The running processes of the tree.
    pub fn processes(&self) -> impl Iterator<Item = ProcessId> {
        self.processes.iter().copied()
    }

    /// Whether all processes of the tree have ended.
    pub fn has_ended(&self) -> bool {
        self.processes.is_empty()
    }

    /// Remove ended processes and add descendants, from the running processes and their parents.
    fn update_from(&mut self, running: &BTreeMap<ProcessId, Pid>) {
        self.processes.retain(|process| running.contains_key(process));
        loop {
            let parents: BTreeSet<Pid> = self.processes.iter().map(|process| process.pid).collect();
            let before = self.processes.len();
            self.processes.extend(running.iter().filter(|(_, parent)| parents.contains(parent)).map(|(id, _)| id));
            if self.processes.len() == before {
                return;
            }
        }
    }
}

/// Enroll every process of a tree that is not enrolled, from outside, until all have ended. Processes for which
/// `exclusion_reason` returns a reason are skipped. Reports each process that was skipped or could not be enrolled once
/// on standard error.
///
/// Exclusions are checked at each poll, because a process can become another program by exec. Limits: child processes
/// of an enrolled process are always enrolled, because they inherit it over fork and exec.
pub fn enroll_tree(host: &dyn Host, root: ProcessId, exclusion_reason: &dyn Fn(&Process) -> Option<String>) {
    let mut tree = ProcessTree::new(root);
    let (mut failed, mut reported_exclusions, mut unverified) =
        (BTreeSet::new(), BTreeSet::new(), UnverifiedEnrolls::new());
    let mut pause = FIRST_POLL_INTERVAL;
    let report = |process: ProcessId, why: &str| {
        // Standard error may have no reader.
        let _ = writeln!(std::io::stderr(), "pagefold: process {} is not enrolled in KSM: {why}", process.pid);
    };
    while tree.update(host).is_ok() && !tree.has_ended() {
        for process in tree.processes().filter(|process| !failed.contains(process)).collect::<Vec<_>>() {
            match enroll_unless_excluded(host, process, exclusion_reason, &mut unverified) {
                Ok(None) | Err(ActionError::Vanished | ActionError::Busy(_)) => {}
                Ok(Some(why)) => {
                    if reported_exclusions.insert(process) {
                        report(process, &why);
                    }
                }
                Err(why) => {
                    report(process, &why.to_string());
                    failed.insert(process);
                }
            }
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(MAX_POLL_INTERVAL);
    }
}

/// Processes that answered that they are enrolled whole, with the regions that were unmarked then. Used where the
/// kernel does not report enrolled processes (before 6.14). A query stops a thread of the process. All regions that an
/// enrolled process maps later are marked. So only new unmarked regions are a reason to query again, for example after
/// exec (before 6.7 a program is not enrolled after exec).
type UnverifiedEnrolls = BTreeMap<ProcessId, BTreeSet<AddressRange>>;

/// Enroll a process from outside, if it is not enrolled and not excluded. Returns the exclusion reason.
fn enroll_unless_excluded(
    host: &dyn Host,
    process: ProcessId,
    exclusion_reason: &dyn Fn(&Process) -> Option<String>,
    unverified: &mut UnverifiedEnrolls,
) -> Result<Option<String>, ActionError> {
    let handle = pagefold_host::hold(host, process)?;
    let merge_any = parse::process_ksm(handle.read("ksm_stat"), Err(Absent::NotOnThisKernel)).merge_any;
    match &merge_any {
        Ok(true) => return Ok(None),
        Err(Absent::NotOnThisKernel)
            if unmarked_regions(&*handle)?.is_subset(unverified.entry(process).or_default()) =>
        {
            return Ok(None);
        }
        Ok(false) | Err(Absent::NotOnThisKernel) => {}
        Err(why) => return Err(why.clone().into()),
    }
    if let Some(why) = exclusion_reason(&observe::process(host, &*handle)?) {
        return Ok(Some(why));
    }
    enroll_process(host, process)?;
    if merge_any.is_err() {
        unverified.insert(process, unmarked_regions(&*handle)?);
    }
    Ok(None)
}

/// The unmarked regions that would be marked if the process were enrolled whole. Without the main stack, which the
/// kernel creates for a new program before it marks regions (fs/exec.c), and without the vsyscall page.
fn unmarked_regions(handle: &dyn Handle) -> Reading<BTreeSet<AddressRange>> {
    let is_unmarked = |region: &&Region| region.ineligible().is_none() && !region.flags.has(VmFlags::MERGEABLE);
    let would_be_marked = |region: &&Region| !matches!(region.name.as_str(), "[stack]" | "[vsyscall]");
    let regions = observe::regions(handle)?;
    Ok(regions.iter().filter(is_unmarked).filter(would_be_marked).map(|region| region.range).collect())
}

/// Enroll a process from outside, if it is not enrolled, and verify the result.
pub fn enroll_process(host: &dyn Host, process: ProcessId) -> Result<(), ActionError> {
    let handle = pagefold_host::hold(host, process)?;
    if action::query_merge_any(&*handle)? {
        return Ok(());
    }
    host.apply(&Action::MergeAny { process, enable: true })?;
    if action::query_merge_any(&*handle)? {
        Ok(())
    } else {
        Err(ActionError::Failed("the kernel reported success but did not enroll it".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_host::faulty_host::{FaultyHost, InjectedFault};
    use pagefold_recording::Recording;
    use std::sync::Mutex;

    fn process_id(pid: u32, start_time: u64) -> ProcessId {
        ProcessId { pid: Pid(pid), start_time }
    }

    /// The PIDs of the tree after polls of running processes, each (PID, start time, parent).
    fn follow_tree(scans: &[&[(u32, u64, u32)]]) -> Vec<u32> {
        let mut tree = ProcessTree::new(process_id(10, 1));
        for scan in scans {
            tree.update_from(&scan.iter().map(|&(pid, start, parent)| (process_id(pid, start), Pid(parent))).collect());
        }
        tree.processes().map(|process| process.pid.0).collect()
    }

    #[test]
    fn descendants_join_the_tree_and_stay() {
        let scan: &[_] = &[(1, 0, 0), (9, 1, 1), (10, 1, 9), (5, 4, 11), (11, 2, 10), (12, 3, 9)];
        assert_eq!(follow_tree(&[scan]), [5, 10, 11]);
        // An orphan still belongs to the tree.
        assert_eq!(follow_tree(&[scan, &[(1, 0, 0), (5, 4, 1), (6, 9, 5), (12, 3, 9)]]), [5, 6]);
        assert!(follow_tree(&[scan, &[(1, 0, 0), (12, 3, 9)]]).is_empty());
    }

    #[test]
    fn reused_pid_is_another_process() {
        assert!(follow_tree(&[&[(1, 0, 0), (10, 2, 1), (11, 3, 10)]]).is_empty());
    }

    /// A process of a kernel before 6.14.
    #[derive(Default)]
    struct FakePre614Process {
        /// Its regions, and whether they are marked.
        regions: Vec<(&'static str, bool)>,
        is_enrolled: bool,
        /// Whether enrolling it silently has no effect.
        ignores_enroll: bool,
        /// The actions on it.
        actions: Vec<&'static str>,
    }

    impl FakePre614Process {
        fn read_answer(&mut self, path: &str) -> Option<InjectedFault> {
            let answer = match path {
                "proc/10#ask_merge_any" => {
                    self.actions.push("ask");
                    String::from(if self.is_enrolled { "yes" } else { "no" })
                }
                "proc/10#merge_any" => {
                    self.actions.push("enroll");
                    self.is_enrolled = !self.ignores_enroll;
                    String::new()
                }
                "proc/10/ksm_stat" => "ksm_rmap_items 0\n".to_owned(),
                "proc/10/smaps" => {
                    let region = |(number, (name, marked)): (usize, &(&str, bool))| {
                        let (start, mark) = ((number + 1) << 16, if *marked { " mg" } else { "" });
                        let head = format!("{start:x}-{:x} rw-p 00000000 00:00 0 {name}", start + 4096);
                        format!("{head}\nRss: 0 kB\nAnonymous: 0 kB\nVmFlags: rd wr{mark}\n")
                    };
                    self.regions.iter().enumerate().map(region).collect()
                }
                _ => return None,
            };
            Some(InjectedFault::Replaced(answer.into_bytes()))
        }
    }

    /// The actions on a process over several polls, each with these regions, and whether the last poll found it
    /// enrolled.
    fn enroll_over_scans(
        ignores_enroll: bool,
        exclusion_reason: Option<&str>,
        scans: &[&[(&'static str, bool)]],
    ) -> (Vec<&'static str>, bool) {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(directory.path().join("files/proc/10")).unwrap();
        let file = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
        file("recording.toml", "schema = \"pagefold.recording/1\"\npage_size = 4096\n");
        let stat = format!("10 (old) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 1 0 0{}\n", " 0".repeat(28));
        file("files/proc/10/stat", &stat);
        let recording = Recording::open(directory.path()).unwrap();
        let process = Mutex::new(FakePre614Process { ignores_enroll, ..FakePre614Process::default() });
        let host = FaultyHost::new(&recording, |path| process.lock().unwrap().read_answer(path));
        let mut unverified = UnverifiedEnrolls::new();
        let mut is_enrolled = false;
        for scan in scans {
            process.lock().unwrap().regions = scan.to_vec();
            let outcome = enroll_unless_excluded(
                &host,
                process_id(10, 1),
                &|_| exclusion_reason.map(str::to_owned),
                &mut unverified,
            );
            is_enrolled = matches!(outcome, Ok(None));
        }
        (process.into_inner().unwrap().actions, is_enrolled)
    }

    #[test]
    fn marked_region_is_no_proof_of_enrollment() {
        let regions: &[_] = &[("", true), ("[heap]", false), ("[stack]", false)];
        assert_eq!(enroll_over_scans(false, None, &[regions]), (vec!["ask", "enroll", "ask"], true));
        // One query is enough until another region is unmarked.
        assert_eq!(enroll_over_scans(false, None, &[regions, regions]), (vec!["ask", "enroll", "ask"], true));
        let more_regions: &[_] = &[("", true), ("[heap]", false), ("", false)];
        assert_eq!(
            enroll_over_scans(false, None, &[regions, regions, more_regions, more_regions]),
            (vec!["ask", "enroll", "ask", "ask"], true)
        );
        assert_eq!(
            enroll_over_scans(true, None, &[regions]),
            (vec!["ask", "enroll", "ask"], false),
            "it had no effect"
        );
        // A process that inherited enrollment is not stopped, nor is an excluded one.
        assert_eq!(
            enroll_over_scans(
                false,
                None,
                &[&[("", true), ("[heap]", true), ("[stack]", false), ("[vsyscall]", false)]]
            ),
            (vec![], true)
        );
        assert_eq!(enroll_over_scans(false, Some("it holds secrets"), &[regions]), (vec![], false));
    }
}
