//! Which threads of a recording are vCPUs, and of which machine.

use crate::schedule::{IDLE, ScheduleBuilder, Task, Tid};
use pagefold_base::IdSet;
use pagefold_base::identity::thread_role::ThreadRole;
use regex::Regex;
use std::collections::{BTreeMap, BTreeSet};

/// How threads are put together.
#[derive(Clone, Copy, Debug)]
pub enum Grouping<'a> {
    /// vCPUs are recognized by the names of their threads ([`ThreadRole`]); a machine is a process with vCPUs.
    Machines,
    /// Threads whose names match belong together if their first capture is equal, or, without a capture, if their
    /// processes are equal. All of them count as vCPUs, numbered by ascending thread.
    Pattern(&'a Regex),
    /// The threads of each named machine, whatever their names. All of them count as vCPUs, numbered by ascending thread.
    Threads(&'a [(String, IdSet)]),
}

/// The threads of a recording.
#[derive(Clone, Debug, Default)]
pub struct RecordedThreads {
    threads: BTreeMap<Tid, RecordedThread>,
}

/// What a recording says about a thread.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct RecordedThread {
    name: String,
    process: Option<u32>,
    has_events: bool,
}

impl RecordedThreads {
    /// Notes that a thread occurs in an event of the scheduler.
    pub fn add_event(&mut self, tid: Tid) {
        self.threads.entry(tid).or_default().has_events = true;
    }

    /// Notes a thread's name. The last one counts.
    pub fn set_name(&mut self, tid: Tid, name: &str) {
        let thread = self.threads.entry(tid).or_default();
        if thread.name != name {
            name.clone_into(&mut thread.name);
        }
    }

    /// Notes the process of a thread.
    pub fn set_process(&mut self, tid: Tid, process: u32) {
        self.threads.entry(tid).or_default().process = Some(process);
    }

    /// Describes the machines, all their threads, and all other threads with events.
    pub fn describe(&self, builder: &mut ScheduleBuilder, grouping: Grouping<'_>) {
        let vcpus = self.vcpus(grouping);
        let names: BTreeSet<&String> = vcpus.values().map(|(name, _)| name).collect();
        let vm_of_name: BTreeMap<&String, usize> =
            names.into_iter().map(|name| (name, builder.add_vm(name.as_str()))).collect();
        // Other threads of a process belong to its machine, if it has a single one.
        let mut vm_of_process: BTreeMap<u32, Option<usize>> = BTreeMap::new();
        for (tid, (name, _)) in &vcpus {
            if let Some(process) = self.threads[tid].process {
                let vm = vm_of_name.get(name).copied();
                vm_of_process.entry(process).and_modify(|known| *known = known.filter(|_| *known == vm)).or_insert(vm);
            }
        }
        for (&tid, thread) in self.threads.iter().filter(|(tid, _)| **tid != IDLE) {
            let vcpu = vcpus.get(&tid);
            let vm = match vcpu {
                Some((name, _)) => vm_of_name.get(name).copied(),
                None => thread.process.and_then(|process| vm_of_process.get(&process).copied().flatten()),
            };
            if vm.is_some() || thread.has_events {
                let name = if thread.name.is_empty() { tid.to_string() } else { thread.name.clone() };
                let vcpu = vcpu.map(|(_, vcpu)| *vcpu);
                builder.set_task(Task { tid, process: thread.process, name, vm, vcpu });
            }
        }
    }

    /// The name of the machine and the number of each vCPU.
    fn vcpus(&self, grouping: Grouping<'_>) -> BTreeMap<Tid, (String, u32)> {
        let mut members: BTreeMap<String, u32> = BTreeMap::new();
        let mut vcpus = BTreeMap::new();
        for (&tid, thread) in self.threads.iter().filter(|(tid, _)| **tid != IDLE) {
            match grouping {
                Grouping::Machines => {
                    if let (ThreadRole::Vcpu(vcpu), Some(process)) =
                        (ThreadRole::from_thread_name(&thread.name), thread.process)
                    {
                        vcpus.insert(tid, (self.process_name(process), vcpu));
                    }
                }
                Grouping::Pattern(pattern) => {
                    let Some(captures) = pattern.captures(&thread.name) else { continue };
                    let name = match (captures.get(1), thread.process) {
                        (Some(capture), _) => capture.as_str().to_owned(),
                        (None, Some(process)) => self.process_name(process),
                        (None, None) => thread.name.clone(),
                    };
                    let number = members.entry(name.clone()).or_default();
                    vcpus.insert(tid, (name, *number));
                    *number += 1;
                }
                Grouping::Threads(machines) => {
                    let Some((name, _)) = machines.iter().find(|(_, tids)| tids.contains(tid)) else { continue };
                    let number = members.entry(name.clone()).or_default();
                    vcpus.insert(tid, (name.clone(), *number));
                    *number += 1;
                }
            }
        }
        vcpus
    }

    /// Threads with names of vCPUs whose processes are not known.
    pub fn unassigned_vcpus(&self) -> Vec<Tid> {
        let is_vcpu = |thread: &RecordedThread| {
            thread.process.is_none() && matches!(ThreadRole::from_thread_name(&thread.name), ThreadRole::Vcpu(_))
        };
        self.threads.iter().filter(|(_, thread)| is_vcpu(thread)).map(|(&tid, _)| tid).collect()
    }

    /// The name of a process is that of its first thread. The number keeps processes of equal names apart.
    fn process_name(&self, process: u32) -> String {
        match self.threads.get(&process) {
            Some(thread) if !thread.name.is_empty() => format!("{} ({process})", thread.name),
            _ => format!("process {process}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn threads() -> RecordedThreads {
        let mut threads = RecordedThreads::default();
        for (tid, process, name) in [
            (0, 0, "swapper/0"),
            (100, 100, "qemu-system-x86"),
            (101, 100, "CPU 0/KVM"),
            (102, 100, "CPU 1/KVM"),
            (200, 200, "firecracker"),
            (201, 200, "fc_vcpu 0"),
            (300, 300, "job"),
            (301, 300, "worker-a-1"),
            (302, 300, "worker-b-1"),
            (303, 300, "worker-a-2"),
        ] {
            threads.set_name(tid, name);
            threads.set_process(tid, process);
        }
        for tid in [0, 101, 301] {
            threads.add_event(tid);
        }
        threads
    }

    /// Name of the machine, and vCPU, of each described thread.
    fn described(grouping: Grouping<'_>) -> Vec<(Tid, Option<String>, Option<u32>)> {
        let mut builder = ScheduleBuilder::new();
        threads().describe(&mut builder, grouping);
        let schedule = builder.finish();
        let vm_name = |task: &Task| task.vm.map(|vm| schedule.vms[vm].name.clone());
        schedule.tasks.iter().map(|task| (task.tid, vm_name(task), task.vcpu)).collect()
    }

    #[test]
    fn machines_are_processes_with_threads_named_as_vcpus() {
        let qemu = || Some("qemu-system-x86 (100)".to_owned());
        let firecracker = || Some("firecracker (200)".to_owned());
        assert_eq!(
            described(Grouping::Machines),
            [
                (100, qemu(), None),
                (101, qemu(), Some(0)),
                (102, qemu(), Some(1)),
                (200, firecracker(), None),
                (201, firecracker(), Some(0)),
                (301, None, None),
            ]
        );
    }

    #[test]
    fn pattern_groups_by_its_capture() {
        let pattern = Regex::new("^worker-([a-z])-").unwrap();
        let group = |name: &str| Some(name.to_owned());
        assert_eq!(
            described(Grouping::Pattern(&pattern)),
            [(101, None, None), (301, group("a"), Some(0)), (302, group("b"), Some(0)), (303, group("a"), Some(1))]
        );
    }

    #[test]
    fn pattern_without_capture_groups_by_process() {
        let pattern = Regex::new("^worker").unwrap();
        let job = || Some("job (300)".to_owned());
        assert_eq!(
            described(Grouping::Pattern(&pattern)),
            [
                (101, None, None),
                (300, job(), None),
                (301, job(), Some(0)),
                (302, job(), Some(1)),
                (303, job(), Some(2))
            ]
        );
    }

    #[test]
    fn vcpu_of_an_unknown_process_belongs_to_no_machine() {
        let mut threads = RecordedThreads::default();
        threads.set_name(7, "CPU 0/KVM");
        threads.add_event(7);
        let mut builder = ScheduleBuilder::new();
        threads.describe(&mut builder, Grouping::Machines);
        assert_eq!(builder.finish().tasks[0].vm, None);
        assert_eq!(threads.unassigned_vcpus(), [7]);
        let machines = [("web".to_owned(), [6, 7].into_iter().collect())];
        let mut builder = ScheduleBuilder::new();
        threads.describe(&mut builder, Grouping::Threads(&machines));
        let schedule = builder.finish();
        assert_eq!((schedule.vms[0].name.as_str(), schedule.tasks[0].vcpu), ("web", Some(0)));
    }
}
