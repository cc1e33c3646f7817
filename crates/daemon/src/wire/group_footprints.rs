//! Footprints of groups of processes: those of a virtual machine, a container or a job, and those of a cgroup.
//!
//! Fair shares can be added up, estimates cannot. Files and shared memory are resident in each process that maps them,
//! and processes of one group map the same ones: a database server's buffers, or a window that MPI ranks share. Added
//! up, they would count once per process. So a sum of estimates includes only the largest shared part of any process.
//! That is too low if the processes map different files.

use super::{CgroupReport, GroupFootprint, TrackedProcessReport, WorkloadKind, WorkloadReport};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Sum by workload, the largest footprint first.
pub fn sum_by_workload(processes: &[TrackedProcessReport]) -> Vec<WorkloadReport> {
    let mut groups: BTreeMap<(WorkloadKind, &str, &str), Vec<&TrackedProcessReport>> = BTreeMap::new();
    for process in processes {
        groups.entry((process.kind, &process.workload, &process.domain)).or_default().push(process);
    }
    let workload = |((kind, name, domain), processes): ((WorkloadKind, &str, &str), Vec<&TrackedProcessReport>)| {
        WorkloadReport { name: name.to_owned(), kind, domain: domain.to_owned(), sum: sum_footprints(&processes) }
    };
    let mut workloads: Vec<WorkloadReport> = groups.into_iter().map(workload).collect();
    workloads.sort_by_key(|workload| Reverse(workload.sum.footprint));
    workloads
}

/// Sum by cgroup, the largest footprint first.
pub fn sum_by_cgroup(processes: &[TrackedProcessReport]) -> Vec<CgroupReport> {
    let mut groups: BTreeMap<&str, Vec<&TrackedProcessReport>> = BTreeMap::new();
    for process in processes {
        if let Some(path) = &process.cgroup {
            groups.entry(path).or_default().push(process);
        }
    }
    let cgroup = |(path, processes): (&str, Vec<&TrackedProcessReport>)| CgroupReport {
        path: path.to_owned(),
        sum: sum_footprints(&processes),
    };
    let mut cgroups: Vec<CgroupReport> = groups.into_iter().map(cgroup).collect();
    cgroups.sort_by_key(|cgroup| Reverse(cgroup.sum.footprint));
    cgroups
}

fn sum_footprints(processes: &[&TrackedProcessReport]) -> GroupFootprint {
    let sum_of = |figure: fn(&TrackedProcessReport) -> Option<u64>| -> Option<u64> {
        processes.iter().map(|process| figure(process)).sum()
    };
    let ages: Option<Vec<u64>> = processes.iter().map(|process| process.footprint_age_seconds).collect();
    let largest_shared = processes.iter().filter_map(|process| shared_estimate(process)).max().unwrap_or(0);
    GroupFootprint {
        processes: processes.len() as u64,
        merged: sum_of(|process| process.merged),
        footprint: sum_of(|process| Some(process.footprint? - shared_estimate(process)?))
            .map(|private| private + largest_shared),
        footprint_age_seconds: ages.and_then(|ages| ages.into_iter().max()),
        saved: sum_of(|process| process.saved),
        metadata: sum_of(|process| process.metadata),
    }
}

/// The part of an estimated footprint that other processes may map too.
fn shared_estimate(process: &TrackedProcessReport) -> Option<u64> {
    match process.footprint_age_seconds {
        Some(_) => Some(0),
        None => Some(process.file_and_shmem.unwrap_or(0).min(process.footprint?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::TrackingState;

    fn tracked_process(
        pid: u32,
        kind: WorkloadKind,
        workload: &str,
        figures: [Option<u64>; 4],
    ) -> TrackedProcessReport {
        let [shared, merged, footprint, saved] = figures;
        TrackedProcessReport {
            pid,
            start_time: 1,
            label: format!("program {pid}"),
            kind,
            workload: workload.to_owned(),
            uid: None,
            cgroup: (pid != 9).then(|| format!("/{workload}")),
            domain: "user 1".to_owned(),
            resident: None,
            file_and_shmem: shared,
            merged,
            footprint,
            footprint_age_seconds: None,
            saved,
            metadata: None,
            enrolled_ranges: 0,
            state: TrackingState::Tracked,
            why: String::new(),
        }
    }

    #[test]
    fn shared_memory_counts_once_per_workload() {
        let figures = |shared, merged, footprint, saved| [Some(shared), Some(merged), Some(footprint), Some(saved)];
        let processes = [
            tracked_process(1, WorkloadKind::Process, "cat 1", figures(0, 0, 80, 0)),
            tracked_process(2, WorkloadKind::Job, "slurm:7", figures(30, 8, 50, 4)),
            tracked_process(3, WorkloadKind::Job, "slurm:7", figures(20, 6, 60, 3)),
            tracked_process(4, WorkloadKind::Job, "slurm:7", [None, Some(2), Some(10), Some(1)]),
            // A process whose shared memory exceeds its estimated footprint.
            tracked_process(5, WorkloadKind::Vm, "web", figures(9, 0, 7, 0)),
            tracked_process(9, WorkloadKind::Container, "web", [Some(1), None, None, Some(5)]),
        ];
        let found = sum_by_workload(&processes);
        let group_sum = |name: &str, kind: WorkloadKind| {
            found.iter().find(|workload| workload.name == name && workload.kind == kind).expect("it is listed").sum
        };
        let sum = |processes, merged, footprint, saved| {
            let footprint_age_seconds = None;
            GroupFootprint { processes, merged, footprint, footprint_age_seconds, saved, metadata: None }
        };
        assert_eq!(group_sum("slurm:7", WorkloadKind::Job), sum(3, Some(16), Some(20 + 40 + 10 + 30), Some(8)));
        assert_eq!(group_sum("web", WorkloadKind::Vm), sum(1, Some(0), Some(7), Some(0)));
        assert_eq!(group_sum("web", WorkloadKind::Container), sum(1, None, None, Some(5)));
        let names: Vec<&str> = found.iter().map(|workload| workload.name.as_str()).collect();
        assert_eq!(names, ["slurm:7", "cat 1", "web", "web"], "the largest first, the unknown last");
        assert_eq!(found[3].kind, WorkloadKind::Container);

        let found = sum_by_cgroup(&processes);
        let paths: Vec<&str> = found.iter().map(|cgroup| cgroup.path.as_str()).collect();
        assert_eq!(paths, ["/slurm:7", "/cat 1", "/web"]);
        assert_eq!(found[2].sum, group_sum("web", WorkloadKind::Vm), "a process without a known cgroup is in none");
    }

    #[test]
    fn fair_shares_are_added_unchanged() {
        let read = |pid, footprint, age| TrackedProcessReport {
            footprint_age_seconds: age,
            ..tracked_process(pid, WorkloadKind::Job, "slurm:7", [Some(30), Some(0), Some(footprint), Some(0)])
        };
        let footprint_and_age = |processes: &[TrackedProcessReport]| {
            let sum = sum_by_workload(processes)[0].sum;
            (sum.footprint, sum.footprint_age_seconds)
        };
        assert_eq!(footprint_and_age(&[read(1, 40, Some(5)), read(2, 50, Some(70))]), (Some(90), Some(70)));
        // By hand: 40, and from the estimates 20 + 10 private and 30 shared once.
        assert_eq!(
            footprint_and_age(&[read(1, 40, Some(5)), read(2, 50, None), read(3, 40, None)]),
            (Some(40 + 30 + 30), None)
        );
    }

    #[test]
    fn sum_of_one_process_is_that_process() {
        for shared in [None, Some(0), Some(3), Some(7), Some(100)] {
            let process = tracked_process(1, WorkloadKind::Vm, "web", [shared, Some(5), Some(7), Some(2)]);
            let sum = sum_by_workload(std::slice::from_ref(&process))[0].sum;
            assert_eq!((sum.footprint, sum.merged, sum.saved), (Some(7), Some(5), Some(2)), "{shared:?}");
        }
    }
}
