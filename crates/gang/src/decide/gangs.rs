//! From the threads of processes to gangs.

use globset::{Glob, GlobMatcher};
use pagefold_base::Pid;
use pagefold_base::identity::thread_role::ThreadRole;
use thiserror::Error;

/// The most gangs that the program schedules (`MAX_GANGS` in gang.bpf.c, of which two are none and the ordinary tasks).
pub const MAX_GANGS: usize = 126;
/// The weight of a VM whose weight is not set.
pub const DEFAULT_WEIGHT: u32 = 100;
/// The range of weights, as of `cpu.weight` in cgroups.
pub const WEIGHT_RANGE: std::ops::RangeInclusive<u32> = 1..=10_000;

/// A process as a candidate for a gang.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The process.
    pub pid: Pid,
    /// The name of the VM, or of the program.
    pub name: String,
    /// The numbers and names of its threads.
    pub threads: Vec<(Pid, String)>,
    /// `cpu.weight` of its cgroup, if that is the VM's own.
    pub cgroup_weight: Option<u32>,
}

/// Threads that are to run together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gang {
    /// The process.
    pub pid: Pid,
    /// The name of the VM, or of the program.
    pub name: String,
    /// Its share of the CPU time for each vCPU, relative to the other gangs.
    pub weight: u32,
    /// The vCPUs, ascending.
    pub vcpus: Vec<Pid>,
    /// The NUMA node on which they get CPUs if it has room: see [`super::nodes::find_home_node`].
    pub home_node: Option<u32>,
}

/// Which threads are vCPUs.
#[derive(Clone, Debug)]
pub enum VcpuRule {
    /// Those that a virtual machine monitor names as vCPUs.
    ByRole,
    /// Those whose name matches a pattern.
    ByName(Box<GlobMatcher>),
}

impl VcpuRule {
    /// The rule for a shell pattern of thread names.
    ///
    /// # Errors
    /// If the pattern is malformed.
    pub fn by_name(pattern: &str) -> Result<Self, globset::Error> {
        Ok(Self::ByName(Box::new(Glob::new(pattern)?.compile_matcher())))
    }

    /// Whether a thread with this name is a vCPU.
    pub fn is_vcpu(&self, name: &str) -> bool {
        match self {
            Self::ByRole => matches!(ThreadRole::from_thread_name(name), ThreadRole::Vcpu(_)),
            Self::ByName(pattern) => pattern.is_match(name),
        }
    }
}

/// A weight that the operator gives: `VM=WEIGHT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedWeight {
    /// The VM's name, or the process number.
    pub name: String,
    /// The weight.
    pub weight: u32,
}

impl std::str::FromStr for NamedWeight {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, weight) = text.rsplit_once('=').ok_or("expected VM=WEIGHT, such as db1=200")?;
        let weight: u32 = weight.parse().map_err(|_| format!("{weight:?} is not a number"))?;
        if !WEIGHT_RANGE.contains(&weight) {
            return Err(format!("{weight} is not between {} and {}", WEIGHT_RANGE.start(), WEIGHT_RANGE.end()));
        }
        Ok(Self { name: name.to_owned(), weight })
    }
}

/// Why no gangs can be formed.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum GangError {
    /// No process was selected.
    #[error("no process is selected: name virtual machines with --vm, --pid or --cgroup")]
    NoProcess,
    /// No thread of them is a vCPU.
    #[error(
        "no thread of {0} is a vCPU by its name (`CPU 0/KVM`, `vcpu0`): start QEMU with -name debug-threads=on, or \
         name the threads with --threads GLOB"
    )]
    NoVcpus(String),
    /// There are too many.
    #[error("{0} virtual machines are selected, and at most {MAX_GANGS} can be scheduled: select fewer")]
    TooMany(usize),
    /// A weight is for none of them.
    #[error("--weight {0}: no selected virtual machine has this name or process number")]
    UnknownWeight(String),
}

/// Forms a gang of each process with vCPUs, ascending by process number. A given weight counts before the cgroup's. The
/// gangs have no home yet.
///
/// # Errors
/// [`GangError`] if there is none, if there are too many, or if a weight is for none.
pub fn form_gangs(candidates: &[Candidate], rule: &VcpuRule, weights: &[NamedWeight]) -> Result<Vec<Gang>, GangError> {
    if candidates.is_empty() {
        return Err(GangError::NoProcess);
    }
    let mut gangs: Vec<Gang> = candidates.iter().filter_map(|candidate| form_gang(candidate, rule, weights)).collect();
    if gangs.is_empty() {
        let names: Vec<String> = candidates.iter().take(3).map(|c| format!("{} ({})", c.name, c.pid)).collect();
        return Err(GangError::NoVcpus(names.join(", ")));
    }
    if gangs.len() > MAX_GANGS {
        return Err(GangError::TooMany(gangs.len()));
    }
    let is_unused = |weight: &&NamedWeight| !gangs.iter().any(|gang| is_named(gang.pid, &gang.name, weight));
    if let Some(unused) = weights.iter().find(is_unused) {
        return Err(GangError::UnknownWeight(unused.name.clone()));
    }
    gangs.sort_by_key(|gang| gang.pid);
    Ok(gangs)
}

fn is_named(pid: Pid, name: &str, weight: &NamedWeight) -> bool {
    weight.name == name || weight.name == pid.to_string()
}

fn form_gang(candidate: &Candidate, rule: &VcpuRule, weights: &[NamedWeight]) -> Option<Gang> {
    let is_vcpu = |(tid, name): &(Pid, String)| rule.is_vcpu(name).then_some(*tid);
    let mut vcpus: Vec<Pid> = candidate.threads.iter().filter_map(is_vcpu).collect();
    vcpus.sort_unstable();
    let given = weights.iter().rev().find(|weight| is_named(candidate.pid, &candidate.name, weight));
    let weight = given.map(|weight| weight.weight).or(candidate.cgroup_weight).unwrap_or(DEFAULT_WEIGHT);
    let gang = Gang { pid: candidate.pid, name: candidate.name.clone(), weight, vcpus, home_node: None };
    (!gang.vcpus.is_empty()).then_some(gang)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(pid: u32, name: &str, threads: &[&str]) -> Candidate {
        let number = |index: usize| Pid(pid + u32::try_from(index).unwrap());
        let threads = threads.iter().enumerate().map(|(index, name)| (number(index), (*name).to_owned())).collect();
        Candidate { pid: Pid(pid), name: name.to_owned(), threads, cgroup_weight: None }
    }

    fn weight(text: &str) -> NamedWeight {
        text.parse().unwrap()
    }

    #[test]
    fn vcpu_threads_form_one_gang_for_each_process() {
        let qemu = ["qemu-system-x86", "CPU 0/KVM", "IO iothread1", "CPU 1/KVM"];
        let candidates = [candidate(20, "b", &qemu), candidate(10, "a", &qemu), candidate(30, "shell", &["sh"])];
        let gangs = form_gangs(&candidates, &VcpuRule::ByRole, &[weight("b=200"), weight("10=50")]).unwrap();
        let found: Vec<_> = gangs.iter().map(|gang| (&*gang.name, gang.weight, gang.vcpus.clone())).collect();
        assert_eq!(found, [("a", 50, vec![Pid(11), Pid(13)]), ("b", 200, vec![Pid(21), Pid(23)])]);
    }

    #[test]
    fn threads_are_selected_by_pattern() {
        let rule = VcpuRule::by_name("vm*").unwrap();
        let gangs = form_gangs(&[candidate(10, "load", &["main", "vm0.0", "vm0.1"])], &rule, &[]).unwrap();
        assert_eq!((gangs[0].vcpus.len(), gangs[0].weight), (2, DEFAULT_WEIGHT));
    }

    #[test]
    fn given_weight_counts_before_the_weight_of_the_cgroup() {
        let candidates = [Candidate { cgroup_weight: Some(300), ..candidate(10, "a", &["vcpu0"]) }];
        let weight_with = |given: &[NamedWeight]| form_gangs(&candidates, &VcpuRule::ByRole, given).unwrap()[0].weight;
        assert_eq!((weight_with(&[]), weight_with(&[weight("a=7")])), (300, 7));
    }

    #[test]
    fn refusals_name_the_cause() {
        let form = |candidates: &[Candidate], weights: &[NamedWeight]| {
            form_gangs(candidates, &VcpuRule::ByRole, weights).unwrap_err().to_string()
        };
        assert!(form(&[], &[]).starts_with("no process is selected"));
        assert!(form(&[candidate(7, "bash", &["bash"])], &[]).starts_with("no thread of bash (7) is a vCPU"));
        let vm = candidate(7, "a", &["vcpu0"]);
        assert!(form(&[vm], &[weight("b=1")]).starts_with("--weight b: no selected"));
        let many: Vec<Candidate> = (1..=127).map(|pid| candidate(pid * 10, "vm", &["vcpu0"])).collect();
        assert!(form(&many, &[]).starts_with("127 virtual machines are selected, and at most 126"));
    }

    #[test]
    fn malformed_weights_are_refused() {
        for text in ["a", "a=", "a=0", "a=10001", "a=x"] {
            assert!(text.parse::<NamedWeight>().is_err(), "{text}");
        }
        assert_eq!(weight("a=b=5"), NamedWeight { name: "a=b".to_owned(), weight: 5 });
    }
}
