//! What stays beside a program that was started: a process that follows the program's tree until the last of it has
//! ended.
//!
//! The tree is followed by looking at `/proc` again and again, and remembering who belonged to it. The alternatives
//! would show in the program: a subreaper takes orphans away from init, a cgroup moves the program to other limits, an
//! inherited descriptor or variable is one that its parent did not give. Limits: a process whose parent ended before
//! either was seen is not found again, as is a daemon's that forks twice between two looks.

use pagefold_base::process::Process;
use pagefold_base::region::{Region, VmFlags};
use pagefold_base::{Absent, AddressRange, Pid, ProcessId, Reading};
use pagefold_host::act::{self, Action, Refusal};
use pagefold_host::{Host, Process as Handle, observe, parse};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::time::Duration;

/// The first pause between two looks at a tree; doubled until it is [`LONGEST_PAUSE`].
pub const FIRST_PAUSE: Duration = Duration::from_millis(5);
/// The longest pause between two looks at a tree.
pub const LONGEST_PAUSE: Duration = Duration::from_millis(500);

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
            let stat = parse::stat(&host.open(pid).ok()?.read("stat").ok()?).ok()?;
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
    let (mut refused, mut left, mut asked) = (BTreeSet::new(), BTreeSet::new(), Asked::new());
    let mut pause = FIRST_PAUSE;
    let tell = |process: ProcessId, why: &str| {
        // Nobody may be left to read it.
        let _ = writeln!(std::io::stderr(), "pagefold: process {} is not enrolled in KSM: {why}", process.pid);
    };
    while tree.observe(host).is_ok() && !tree.has_ended() {
        for process in tree.members().filter(|process| !refused.contains(process)).collect::<Vec<_>>() {
            match enrol_unless(host, process, excluded, &mut asked) {
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

/// Who said that it is enrolled whole, where the kernel does not tell (before 6.14), with the regions that had no mark
/// then. Asking stops a thread, and who is enrolled whole has all marked that it maps: only other regions without a
/// mark are a reason to ask again, such as those of another program that it has become (not enrolled before 6.7).
type Asked = BTreeMap<ProcessId, BTreeSet<AddressRange>>;

/// Enrol a process from outside, where it is not and there is no reason against it. Tells the reason.
fn enrol_unless(
    host: &dyn Host,
    process: ProcessId,
    excluded: &dyn Fn(&Process) -> Option<String>,
    asked: &mut Asked,
) -> Result<Option<String>, Refusal> {
    let handle = pagefold_host::hold(host, process)?;
    let told = parse::process_ksm(handle.read("ksm_stat"), Err(Absent::NotOnThisKernel)).merge_any;
    match &told {
        Ok(true) => return Ok(None),
        Err(Absent::NotOnThisKernel) if unmarked(&*handle)?.is_subset(asked.entry(process).or_default()) => {
            return Ok(None);
        }
        Ok(false) | Err(Absent::NotOnThisKernel) => {}
        Err(why) => return Err(why.clone().into()),
    }
    if let Some(why) = excluded(&observe::process(host, &*handle)?) {
        return Ok(Some(why));
    }
    enrol(host, process)?;
    if told.is_err() {
        asked.insert(process, unmarked(&*handle)?);
    }
    Ok(None)
}

/// Regions that would be marked if the process were enrolled whole. Not the main stack, which the kernel makes for a
/// new program before it marks what that maps (fs/exec.c), and not the page that belongs to no address space.
fn unmarked(handle: &dyn Handle) -> Reading<BTreeSet<AddressRange>> {
    let lacks = |region: &&Region| region.ineligible().is_none() && !region.flags.has(VmFlags::MERGEABLE);
    let own = |region: &&Region| !matches!(region.name.as_str(), "[stack]" | "[vsyscall]");
    let regions = observe::regions(handle)?;
    Ok(regions.iter().filter(lacks).filter(own).map(|region| region.range).collect())
}

/// Enrol a process from outside, where it is not, and see that it took.
pub fn enrol(host: &dyn Host, process: ProcessId) -> Result<(), Refusal> {
    let handle = pagefold_host::hold(host, process)?;
    if act::merge_any(&*handle)? {
        return Ok(());
    }
    host.apply(&Action::MergeAny { process, on: true })?;
    if act::merge_any(&*handle)? { Ok(()) } else { Err(Refusal::Failed("the kernel agreed and did not".to_owned())) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_host::faulty::{Fault, Faulty};
    use pagefold_recording::Recording;
    use std::sync::Mutex;

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

    /// A process of a kernel before 6.14.
    #[derive(Default)]
    struct Old {
        /// Its regions, with whether they are marked.
        regions: Vec<(&'static str, bool)>,
        whole: bool,
        /// Whether it refuses without a word to be enrolled.
        deaf: bool,
        /// What was done to it.
        heard: Vec<&'static str>,
    }

    impl Old {
        fn answer(&mut self, path: &str) -> Option<Fault> {
            let answer = match path {
                "proc/10#ask_merge_any" => {
                    self.heard.push("ask");
                    String::from(if self.whole { "yes" } else { "no" })
                }
                "proc/10#merge_any" => {
                    self.heard.push("enrol");
                    self.whole = !self.deaf;
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
            Some(Fault::Replaced(answer.into_bytes()))
        }
    }

    /// What is done to a process at looks, before each of which it has these regions, and what the last look came to.
    fn heard(deaf: bool, why: Option<&str>, looks: &[&[(&'static str, bool)]]) -> (Vec<&'static str>, bool) {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(directory.path().join("files/proc/10")).unwrap();
        let file = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
        file("recording.toml", "schema = \"pagefold.recording/1\"\npage_size = 4096\n");
        let stat = format!("10 (old) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 1 0 0{}\n", " 0".repeat(28));
        file("files/proc/10/stat", &stat);
        let recording = Recording::open(directory.path()).unwrap();
        let old = Mutex::new(Old { deaf, ..Old::default() });
        let host = Faulty::new(&recording, |path| old.lock().unwrap().answer(path));
        let mut asked = Asked::new();
        let mut done = false;
        for look in looks {
            old.lock().unwrap().regions = look.to_vec();
            let outcome = enrol_unless(&host, id(10, 1), &|_| why.map(str::to_owned), &mut asked);
            done = matches!(outcome, Ok(None));
        }
        (old.into_inner().unwrap().heard, done)
    }

    #[test]
    fn where_the_kernel_does_not_tell_a_marked_region_is_not_all() {
        let guest: &[_] = &[("", true), ("[heap]", false), ("[stack]", false)];
        assert_eq!(heard(false, None, &[guest]), (vec!["ask", "enrol", "ask"], true));
        // It says so once, until something else has no mark.
        assert_eq!(heard(false, None, &[guest, guest]), (vec!["ask", "enrol", "ask"], true));
        let more: &[_] = &[("", true), ("[heap]", false), ("", false)];
        assert_eq!(heard(false, None, &[guest, guest, more, more]), (vec!["ask", "enrol", "ask", "ask"], true));
        assert_eq!(heard(true, None, &[guest]), (vec!["ask", "enrol", "ask"], false), "it did not take");
        // Who is enrolled by its parent is not stopped, nor is who is to be left alone.
        assert_eq!(
            heard(false, None, &[&[("", true), ("[heap]", true), ("[stack]", false), ("[vsyscall]", false)]]),
            (vec![], true)
        );
        assert_eq!(heard(false, Some("it holds secrets"), &[guest]), (vec![], false));
    }
}
