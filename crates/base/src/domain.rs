//! Trust domains: which processes may share memory.
//!
//! KSM has one tree for all enrolled pages, so all enrolled processes share with each other. A write to a shared page
//! takes longer than a write to a private page, so sharing reveals memory contents to other processes. A census
//! therefore counts duplicates within a domain and duplicates across domains separately.
//!
//! A [`DomainRule`] assigns all processes to domains. The configuration may assign some to [`TrustGroup`]s before the
//! rule applies.
//!
//! - By default each virtual machine is a separate domain, because libvirt runs all of them as one user.
//! - Names of programs, virtual machines, containers and jobs are self-declared. A process chooses its name and
//!   environment, and a user with a delegated cgroup may name a cgroup below it after any container. Such a name counts
//!   only together with a user, a cgroup or a label. A group that only has names is not applied
//!   ([`TrustGroup::is_attested`]).
//! - Another user than the effective one starts a setuid program and controls its input. So groups by user never
//!   contain it. If it is in no group, it is a separate domain.
//!
//! Limits: a group that has users and names trusts these users to choose names. Labels are read only for containers in
//! cgroups that only root creates. They are the labels that the container's runtime was given. So a group by label
//! trusts the users that may start containers with it, and the providers of images that set it.

use crate::process::Process;
use globset::GlobMatcher;
use std::fmt;

/// The rule that assigns processes to trust domains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DomainRule {
    /// One domain for each user; each virtual machine and each setuid program is a separate domain.
    #[default]
    User,
    /// One domain for each cgroup.
    Cgroup,
    /// One domain for each virtual machine or process.
    Process,
    /// One domain for the whole host.
    Host,
}

/// A trust domain.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TrustDomain {
    /// The whole host.
    Host,
    /// The processes of a user.
    User(u32),
    /// The processes of a cgroup.
    Cgroup(String),
    /// A virtual machine, by its name, if it has one, and its monitor's PID.
    Vm(Option<String>, u32),
    /// A process, by its PID.
    Process(u32),
    /// A group of the configuration, by its name.
    Group(String),
    /// Processes of a domain whose memory is bound to these NUMA nodes, given as a node list. On a host where KSM
    /// merges across nodes, a merge with other processes would move their pages to another node.
    NumaBound(Box<TrustDomain>, String),
}

/// How processes are assigned to trust domains: by the first group that contains them, otherwise by the rule.
#[derive(Clone, Debug, Default)]
pub struct DomainConfig {
    /// For processes in no group.
    pub rule: DomainRule,
    /// In the order in which they are tried.
    pub groups: Vec<TrustGroup>,
}

/// Processes that trust each other. A process must match one pattern of each kind of condition that is given. A group
/// without a condition is empty.
#[derive(Clone, Debug, Default)]
pub struct TrustGroup {
    /// The name of the domain.
    pub name: String,
    /// Effective users.
    pub users: Vec<u32>,
    /// Cgroup paths, each with its subtree; in these patterns `*` also matches `/`.
    pub cgroups: Vec<GlobMatcher>,
    /// Names of virtual machines.
    pub vms: Vec<GlobMatcher>,
    /// The kernel's names of programs.
    pub program_names: Vec<GlobMatcher>,
    /// Containers, such as `docker:4c01db0b339c` or `lxc:web`.
    pub containers: Vec<GlobMatcher>,
    /// Labels of containers, such as `com.docker.compose.project=shop`.
    pub labels: Vec<GlobMatcher>,
    /// Jobs, such as `slurm:1234.0`.
    pub jobs: Vec<GlobMatcher>,
}

impl From<DomainRule> for DomainConfig {
    fn from(rule: DomainRule) -> Self {
        Self { rule, groups: Vec::new() }
    }
}

impl DomainConfig {
    /// The domain of a process.
    pub fn domain(&self, process: &Process) -> TrustDomain {
        match self.groups.iter().find(|group| group.is_attested() && group.trusts(process)) {
            Some(group) => TrustDomain::Group(group.name.clone()),
            None => self.rule.domain(process),
        }
    }
}

impl TrustGroup {
    /// Whether it has any condition.
    pub fn has_condition(&self) -> bool {
        let Self { name: _, users, cgroups, vms, program_names: names, containers, labels, jobs } = self;
        let patterns = [cgroups, vms, names, containers, labels, jobs];
        !users.is_empty() || patterns.iter().any(|patterns| !patterns.is_empty())
    }

    /// Whether one of its conditions tests a property that a process cannot choose itself. Names of programs, virtual
    /// machines, containers and jobs are self-declared.
    pub fn is_attested(&self) -> bool {
        let Self { name: _, users, cgroups, vms: _, program_names: _, containers: _, labels, jobs: _ } = self;
        !users.is_empty() || !cgroups.is_empty() || !labels.is_empty()
    }

    /// Whether a process belongs to the group and runs for the user that the group trusts.
    fn trusts(&self, process: &Process) -> bool {
        self.has(process) && (self.users.is_empty() || !process.setuid)
    }

    /// Whether a process belongs to the group. A property that cannot be read matches nothing.
    pub fn has(&self, process: &Process) -> bool {
        let Self { name: _, users, cgroups, vms, program_names: names, containers, labels, jobs } = self;
        let matches_any = |patterns: &[GlobMatcher], text: Option<&str>| {
            patterns.is_empty() || text.is_some_and(|text| patterns.iter().any(|pattern| pattern.is_match(text)))
        };
        let identity = &process.identity;
        let vm = identity.vm.as_ref().and_then(|vm| vm.name.as_deref());
        self.has_condition()
            && (users.is_empty() || process.uid.as_ref().is_ok_and(|uid| users.contains(uid)))
            && (cgroups.is_empty()
                || process.cgroup.as_ref().is_ok_and(|path| matches_cgroup_or_ancestor(cgroups, path)))
            && matches_any(vms, vm)
            && matches_any(names, Some(&process.comm))
            && matches_any(containers, identity.container.as_deref())
            && (labels.is_empty() || identity.labels.iter().any(|label| matches_any(labels, Some(label))))
            && matches_any(jobs, identity.job.as_ref().map(|job| job.name.as_str()))
    }
}

/// Whether a cgroup or one of its ancestors matches.
fn matches_cgroup_or_ancestor(patterns: &[GlobMatcher], path: &str) -> bool {
    let ends = path.match_indices('/').map(|(end, _)| end).filter(|&end| end > 0).chain([path.len()]);
    ends.map(|end| &path[..end]).any(|path| patterns.iter().any(|pattern| pattern.is_match(path)))
}

impl DomainRule {
    /// The domain of a process. A process whose users or cgroup cannot be read is a separate domain.
    pub fn domain(self, process: &Process) -> TrustDomain {
        let pid = process.id.pid.0;
        let single = match &process.identity.vm {
            Some(vm) => TrustDomain::Vm(vm.name.clone(), pid),
            None => TrustDomain::Process(pid),
        };
        match self {
            Self::Host => TrustDomain::Host,
            Self::Process => single,
            Self::Cgroup => process.cgroup.clone().map_or(single, TrustDomain::Cgroup),
            Self::User => match process.uid {
                Ok(uid) if process.identity.vm.is_none() && !process.setuid => TrustDomain::User(uid),
                Ok(_) | Err(_) => single,
            },
        }
    }
}

impl TrustDomain {
    /// Whether the domain contains a single process only.
    pub fn is_single_process(&self) -> bool {
        matches!(self.without_nodes(), Self::Vm(..) | Self::Process(_))
    }

    /// The domain without its NUMA binding, which does not affect trust.
    pub fn without_nodes(&self) -> &Self {
        match self {
            Self::NumaBound(domain, _) => domain.without_nodes(),
            domain => domain,
        }
    }

    /// The nodes to which its memory is bound, if it is separated for that reason.
    pub fn nodes(&self) -> Option<&str> {
        match self {
            Self::NumaBound(_, nodes) => Some(nodes),
            _ => None,
        }
    }

    /// The domain, separated by the nodes to which its memory is bound, if any.
    #[must_use]
    pub fn with_nodes(self, nodes: Option<String>) -> Self {
        match nodes {
            Some(nodes) => Self::NumaBound(Box::new(self), nodes),
            None => self,
        }
    }
}

impl fmt::Display for TrustDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::User(uid) => write!(f, "user {uid}"),
            Self::Cgroup(path) => write!(f, "cgroup {path}"),
            Self::Vm(Some(name), _) => write!(f, "vm {name}"),
            Self::Vm(None, pid) => write!(f, "vm of process {pid}"),
            Self::Process(pid) => write!(f, "process {pid}"),
            Self::Group(name) => write!(f, "group {name}"),
            Self::NumaBound(domain, nodes) => write!(f, "{domain} on node {nodes}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Identity;
    use crate::reading::Absent;
    use crate::units::{Pid, ProcessId};
    use globset::Glob;
    use std::collections::BTreeMap;

    fn process(uid: u32, cgroup: &str, arguments: &[&str]) -> Process {
        let arguments: Vec<String> = arguments.iter().map(|&argument| argument.to_owned()).collect();
        let job = BTreeMap::from([("SLURM_JOB_ID".to_owned(), "7".to_owned())]);
        Process {
            comm: arguments[0].clone(),
            uid: Ok(uid),
            setuid: false,
            cgroup: Ok(cgroup.to_owned()),
            identity: Identity::new(&arguments, &job, Some(cgroup)),
            arguments: Ok(arguments),
            ..Process::absent(ProcessId { pid: Pid(7), start_time: 1 }, &Absent::Denied)
        }
    }

    fn globs(patterns: &[&str]) -> Vec<GlobMatcher> {
        patterns.iter().map(|pattern| Glob::new(pattern).unwrap().compile_matcher()).collect()
    }

    fn group(name: &str) -> TrustGroup {
        TrustGroup { name: name.to_owned(), ..TrustGroup::default() }
    }

    #[test]
    fn first_matching_group_is_the_domain() {
        let groups = vec![
            TrustGroup { users: vec![0], vms: globs(&["web-*"]), ..group("web") },
            TrustGroup { users: vec![1000, 1001], program_names: globs(&["solver"]), ..group("solvers") },
            TrustGroup { cgroups: globs(&["/machine.slice"]), ..group("machines") },
            TrustGroup { users: vec![5], containers: globs(&["docker:*"]), ..group("containers") },
            TrustGroup { users: vec![5], jobs: globs(&["slurm:7"]), program_names: globs(&["rank"]), ..group("job") },
            TrustGroup { labels: globs(&["com.docker.compose.project=shop", "tenant=a*"]), ..group("labelled") },
            group("nobody"),
        ];
        let domains = DomainConfig { rule: DomainRule::User, groups };
        let check = |process: Process, expected: &str| assert_eq!(domains.domain(&process).to_string(), expected);
        let qemu = |name: &str, cgroup: &str| process(0, cgroup, &["qemu-system-x86_64", "-name", name]);
        check(qemu("web-1", "/machine.slice/web"), "group web");
        check(qemu("db", "/machine.slice/db"), "group machines");
        check(qemu("db", "/machine.slice"), "group machines");
        check(qemu("db", "/machine.slices/db"), "vm db");
        check(process(1000, "/", &["solver"]), "group solvers");
        check(process(1001, "/", &["solver"]), "group solvers");
        check(process(1001, "/", &["other"]), "user 1001");
        check(process(1002, "/", &["solver"]), "user 1002");
        check(process(5, "/", &["rank"]), "group job");
        check(process(5, &format!("/docker/{}", "ab".repeat(32)), &["nginx"]), "group containers");
        let labelled = |labels: &[&str]| {
            let mut process = process(5, "/", &["nginx"]);
            process.identity.labels = labels.iter().map(|&label| label.to_owned()).collect();
            process
        };
        check(labelled(&["x=y", "com.docker.compose.project=shop"]), "group labelled");
        check(labelled(&["tenant=acme"]), "group labelled");
        check(labelled(&["com.docker.compose.project=shops", "tenant=b"]), "user 5");
        check(Process::absent(ProcessId { pid: Pid(9), start_time: 1 }, &Absent::Denied), "process 9");
    }

    #[test]
    fn without_groups_the_rule_decides() {
        let check = |rule: DomainRule, process: &Process, expected: &str| {
            assert_eq!(DomainConfig::from(rule).domain(process).to_string(), expected);
        };
        let vm = process(0, "/machine.slice/web", &["qemu-system-x86_64", "-name", "web"]);
        check(DomainRule::User, &vm, "vm web");
        check(DomainRule::Cgroup, &vm, "cgroup /machine.slice/web");
        check(DomainRule::Process, &vm, "vm web");
        check(DomainRule::Host, &vm, "host");
        check(DomainRule::User, &process(0, "/", &["bash"]), "user 0");
        check(DomainRule::Host, &Process { setuid: true, ..process(0, "/", &["su"]) }, "host");
        let hidden = Process { uid: Err(Absent::Denied), ..process(0, "/", &["bash"]) };
        check(DomainRule::User, &hidden, "process 7");
    }

    #[test]
    fn each_vm_is_a_domain_of_its_own_for_every_user() {
        let domain = |uid: u32, pid: u32, name: &str| {
            let cgroup = format!("/machine.slice/machine-qemu\\x2d1\\x2d{name}.scope/libvirt/emulator");
            let vm = process(uid, &cgroup, &["qemu-system-x86_64", "-name", &format!("guest={name}")]);
            let id = ProcessId { pid: Pid(pid), start_time: 1 };
            DomainConfig::default().domain(&Process { id, ..vm })
        };
        for uid in [0, 1000, 64055] {
            let domains = [domain(uid, 7, "web-0"), domain(uid, 8, "web-1"), domain(uid, 9, "web-1")];
            assert!(domains.iter().all(TrustDomain::is_single_process), "user {uid}: {domains:?}");
            assert!(domains[0] != domains[1] && domains[1] != domains[2], "user {uid}: {domains:?}");
        }
        let helper = process(64055, "/machine.slice", &["swtpm"]);
        assert_eq!(DomainConfig::default().domain(&helper), TrustDomain::User(64055));
    }

    #[test]
    fn a_group_by_self_declared_names_alone_has_no_process() {
        let evil = process(65534, "/user.slice", &["qemu-system-x86_64", "-name", "web-evil"]);
        let good = process(0, "/machine.slice/web", &["qemu-system-x86_64", "-name", "web-1"]);
        let domain = |group: TrustGroup, process: &Process| {
            let domains = DomainConfig { rule: DomainRule::User, groups: vec![group] };
            domains.domain(process).to_string()
        };
        let names = || TrustGroup { vms: globs(&["web-*"]), program_names: globs(&["qemu-*"]), ..group("web") };
        let job = || TrustGroup { jobs: globs(&["slurm:*"]), ..group("web") };
        for alone in [names, job] {
            assert!(alone().has_condition() && !alone().is_attested());
            assert!(alone().has(&evil), "the group still selects processes to manage or to exclude");
            assert_eq!(domain(alone(), &good), "vm web-1");
            assert_eq!(domain(alone(), &evil), "vm web-evil");
            assert_eq!(domain(TrustGroup { users: vec![0], ..alone() }, &good), "group web");
            assert_eq!(domain(TrustGroup { users: vec![0], ..alone() }, &evil), "vm web-evil");
            assert_eq!(domain(TrustGroup { cgroups: globs(&["/machine.slice"]), ..alone() }, &good), "group web");
            assert_eq!(domain(TrustGroup { cgroups: globs(&["/machine.slice"]), ..alone() }, &evil), "vm web-evil");
        }
    }

    #[test]
    fn a_group_by_containers_alone_admits_no_cgroup_that_a_user_named() {
        let id = "4c01db0b339c".to_owned() + &"0".repeat(52);
        let victim = process(0, &format!("/system.slice/docker-{id}.scope"), &["nginx"]);
        let delegated = "/user.slice/user-1000.slice/user@1000.service";
        let scopes = [format!("docker-{id}.scope"), "docker-4c01db0b339c.scope".to_owned()];
        let forged = scopes.map(|scope| process(1000, &format!("{delegated}/{scope}"), &["probe"]));
        let alone = || TrustGroup { containers: globs(&["docker:4c01*"]), ..group("shop") };
        let domain = |group: TrustGroup, process: &Process| {
            let domains = DomainConfig { rule: DomainRule::User, groups: vec![group] };
            domains.domain(process).to_string()
        };
        assert_eq!(domain(alone(), &victim), "user 0");
        let beside_users = TrustGroup { users: vec![0], ..alone() };
        let beside_cgroups = TrustGroup { cgroups: globs(&["/system.slice"]), ..alone() };
        for forged in &forged {
            assert!(alone().has(forged), "it has the name of the container: {:?}", forged.cgroup);
            assert_eq!(domain(alone(), forged), "user 1000");
            for group in [&beside_users, &beside_cgroups] {
                assert_eq!(domain(group.clone(), &victim), "group shop");
                assert_eq!(domain(group.clone(), forged), "user 1000");
            }
        }
    }

    #[test]
    fn numa_binding_separates_trusted_processes() {
        let domain = TrustDomain::User(7).with_nodes(Some("0".to_owned()));
        assert_eq!((domain.to_string().as_str(), domain.nodes()), ("user 7 on node 0", Some("0")));
        assert_eq!(domain.without_nodes(), &TrustDomain::User(7));
        assert_ne!(domain, TrustDomain::User(7).with_nodes(Some("1".to_owned())));
        assert_ne!(domain, TrustDomain::User(7).with_nodes(None));
        assert!(
            !domain.is_single_process() && TrustDomain::Process(7).with_nodes(Some("0".to_owned())).is_single_process()
        );
    }

    #[test]
    fn a_setuid_program_is_a_domain_of_its_own() {
        let group = TrustGroup { users: vec![0], ..group("admins") };
        let domains = DomainConfig { rule: DomainRule::User, groups: vec![group] };
        let root = process(0, "/", &["su"]);
        assert_eq!(domains.domain(&root).to_string(), "group admins");
        let setuid = Process { setuid: true, ..root };
        assert_eq!(domains.domain(&setuid).to_string(), "process 7");
        assert_eq!(DomainConfig::default().domain(&setuid).to_string(), "process 7");
        assert!(domains.groups[0].has(&setuid), "an exclusion by its effective user still holds");
    }
}
