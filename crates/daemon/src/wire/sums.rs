//! What members take that belong together: those of a virtual machine, a container or a job, and those of a cgroup.
//!
//! Fair shares add up. Not so estimates: files and shared memory are resident in each process that maps them, and
//! processes that belong together map the same ones: the buffers of a database server, the window that ranks share.
//! Added up they would count once for each. So of them a sum of estimates has what the one with the most of them maps,
//! which is too little where the processes map different ones.

use super::{Cgroup, Kind, Member, Sum, Workload};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// By workload, the largest footprint first.
pub fn workloads(members: &[Member]) -> Vec<Workload> {
    let mut parts: BTreeMap<(Kind, &str, &str), Vec<&Member>> = BTreeMap::new();
    for member in members {
        parts.entry((member.kind, &member.workload, &member.domain)).or_default().push(member);
    }
    let workload = |((kind, name, domain), members): ((Kind, &str, &str), Vec<&Member>)| Workload {
        name: name.to_owned(),
        kind,
        domain: domain.to_owned(),
        sum: sum(&members),
    };
    let mut workloads: Vec<Workload> = parts.into_iter().map(workload).collect();
    workloads.sort_by_key(|workload| Reverse(workload.sum.footprint));
    workloads
}

/// By cgroup, the largest footprint first.
pub fn cgroups(members: &[Member]) -> Vec<Cgroup> {
    let mut parts: BTreeMap<&str, Vec<&Member>> = BTreeMap::new();
    for member in members {
        if let Some(path) = &member.cgroup {
            parts.entry(path).or_default().push(member);
        }
    }
    let cgroup = |(path, members): (&str, Vec<&Member>)| Cgroup { path: path.to_owned(), sum: sum(&members) };
    let mut cgroups: Vec<Cgroup> = parts.into_iter().map(cgroup).collect();
    cgroups.sort_by_key(|cgroup| Reverse(cgroup.sum.footprint));
    cgroups
}

fn sum(members: &[&Member]) -> Sum {
    let all = |figure: fn(&Member) -> Option<u64>| -> Option<u64> { members.iter().map(|member| figure(member)).sum() };
    let ages: Option<Vec<u64>> = members.iter().map(|member| member.footprint_age_seconds).collect();
    let once = members.iter().filter_map(|member| shared(member)).max().unwrap_or(0);
    Sum {
        processes: members.len() as u64,
        merged: all(|member| member.merged),
        footprint: all(|member| Some(member.footprint? - shared(member)?)).map(|own| own + once),
        footprint_age_seconds: ages.and_then(|ages| ages.into_iter().max()),
        saved: all(|member| member.saved),
        metadata: all(|member| member.metadata),
    }
}

/// What of an estimate of a member's footprint others may map too.
fn shared(member: &Member) -> Option<u64> {
    match member.footprint_age_seconds {
        Some(_) => Some(0),
        None => Some(member.shared.unwrap_or(0).min(member.footprint?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::MemberState;

    fn member(pid: u32, kind: Kind, workload: &str, figures: [Option<u64>; 4]) -> Member {
        let [shared, merged, footprint, saved] = figures;
        Member {
            pid,
            start_time: 1,
            label: format!("program {pid}"),
            kind,
            workload: workload.to_owned(),
            uid: None,
            cgroup: (pid != 9).then(|| format!("/{workload}")),
            domain: "user 1".to_owned(),
            resident: None,
            shared,
            merged,
            footprint,
            footprint_age_seconds: None,
            saved,
            metadata: None,
            ranges: 0,
            state: MemberState::Followed,
            why: String::new(),
        }
    }

    #[test]
    fn what_belongs_together_is_added_up_with_shared_memory_once() {
        let all = |shared, merged, footprint, saved| [Some(shared), Some(merged), Some(footprint), Some(saved)];
        let members = [
            member(1, Kind::Process, "cat 1", all(0, 0, 80, 0)),
            member(2, Kind::Job, "slurm:7", all(30, 8, 50, 4)),
            member(3, Kind::Job, "slurm:7", all(20, 6, 60, 3)),
            member(4, Kind::Job, "slurm:7", [None, Some(2), Some(10), Some(1)]),
            // What is known of its shared memory is more than all that it takes.
            member(5, Kind::Vm, "web", all(9, 0, 7, 0)),
            member(9, Kind::Container, "web", [Some(1), None, None, Some(5)]),
        ];
        let found = workloads(&members);
        let of = |name: &str, kind: Kind| {
            found.iter().find(|workload| workload.name == name && workload.kind == kind).expect("it is there").sum
        };
        let sum = |processes, merged, footprint, saved| {
            let footprint_age_seconds = None;
            Sum { processes, merged, footprint, footprint_age_seconds, saved, metadata: None }
        };
        assert_eq!(of("slurm:7", Kind::Job), sum(3, Some(16), Some(20 + 40 + 10 + 30), Some(8)));
        assert_eq!(of("web", Kind::Vm), sum(1, Some(0), Some(7), Some(0)));
        assert_eq!(of("web", Kind::Container), sum(1, None, None, Some(5)));
        let names: Vec<&str> = found.iter().map(|workload| workload.name.as_str()).collect();
        assert_eq!(names, ["slurm:7", "cat 1", "web", "web"], "the largest first, the unknown last");
        assert_eq!(found[3].kind, Kind::Container);

        let found = cgroups(&members);
        let paths: Vec<&str> = found.iter().map(|cgroup| cgroup.path.as_str()).collect();
        assert_eq!(paths, ["/slurm:7", "/cat 1", "/web"]);
        assert_eq!(found[2].sum, of("web", Kind::Vm), "who tells no cgroup is in none");
    }

    #[test]
    fn fair_shares_are_added_up_as_they_are() {
        let read = |pid, footprint, age| Member {
            footprint_age_seconds: age,
            ..member(pid, Kind::Job, "slurm:7", [Some(30), Some(0), Some(footprint), Some(0)])
        };
        let of = |members: &[Member]| {
            let sum = workloads(members)[0].sum;
            (sum.footprint, sum.footprint_age_seconds)
        };
        assert_eq!(of(&[read(1, 40, Some(5)), read(2, 50, Some(70))]), (Some(90), Some(70)));
        // By hand: 40, and of the estimates 20 + 10 of their own and 30 once.
        assert_eq!(of(&[read(1, 40, Some(5)), read(2, 50, None), read(3, 40, None)]), (Some(40 + 30 + 30), None));
    }

    #[test]
    fn a_sum_of_one_is_the_one() {
        for shared in [None, Some(0), Some(3), Some(7), Some(100)] {
            let member = member(1, Kind::Vm, "web", [shared, Some(5), Some(7), Some(2)]);
            let sum = workloads(std::slice::from_ref(&member))[0].sum;
            assert_eq!((sum.footprint, sum.merged, sum.saved), (Some(7), Some(5), Some(2)), "{shared:?}");
        }
    }
}
