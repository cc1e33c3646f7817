//! The virtual CPUs of QEMU by their place in sockets, cores and threads (`-smp`, hw/core/machine-smp.c).
//!
//! The number of a virtual CPU counts threads of a core first, then cores, and sockets last: of x86
//! (`x86_topo_ids_from_idx`, include/hw/i386/topology.h) and of Arm's virt (`virt_possible_cpu_arch_ids`,
//! hw/arm/virt.c). QEMU 5.0 to 5.1 numbered those of `-cpu EPYC` in another way.

use super::vm::{Parameters, options, parse_parameters, parse_properties};
use std::collections::BTreeMap;

/// The levels of the topology, the largest first: their numbers in `-smp`, and their keys in `-numa cpu`. A machine that
/// lacks a level has one of it.
const LEVELS: [(&str, &str); 6] = [
    ("sockets", "socket-id"),
    ("dies", "die-id"),
    ("clusters", "cluster-id"),
    ("modules", "module-id"),
    ("cores", "core-id"),
    ("threads", "thread-id"),
];
const SOCKETS: usize = 0;
const CORES: usize = 4;
const THREADS: usize = 5;

/// Virtual CPUs at most (`max_cpus` of q35, hw/i386/pc_q35.c, 9.0). Also a bound on options, which are arbitrary text.
const MAX_VCPUS: u32 = 4096;

/// Kinds of machines that number virtual CPUs in another way: pseries counts each core as a multiple of its threads
/// (hw/ppc/spapr.c), and s390 has books and drawers above sockets.
const OTHER_NUMBERINGS: [&str; 2] = ["pseries", "s390"];

/// The first version of machines that prefer many cores to many sockets (`prefer_sockets`, hw/core/machine-smp.c).
const FIRST_VERSION_WITH_CORES: (u32, u32) = (6, 2);

/// The numbers of sockets, dies, clusters, modules, cores and threads of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct VcpuTopology {
    counts: [u32; LEVELS.len()],
    max_vcpus: u32,
}

impl VcpuTopology {
    /// The topology of a command line without its program. `None` if the machine numbers virtual CPUs in another way, or
    /// if `-smp` is not valid.
    pub(super) fn new(arguments: &[String]) -> Option<Self> {
        let (mut smp, mut machine) = (Parameters::new(), Parameters::new());
        for (option, value) in options(arguments) {
            match option {
                "smp" => smp.extend(parse_parameters(value, "cpus")),
                "M" | "machine" => machine.extend(parse_parameters(value, "type")),
                _ => {}
            }
        }
        let kind = machine.get("type").map_or("", String::as_str);
        if OTHER_NUMBERINGS.iter().any(|other| kind.starts_with(other)) {
            return None;
        }
        Self::from_counts(&smp, prefers_sockets(kind))
    }

    /// As `machine_parse_smp_config` of hw/core/machine-smp.c: what is missing follows from the rest.
    fn from_counts(smp: &Parameters, prefers_sockets: bool) -> Option<Self> {
        // QEMU refuses 0.
        let number = |key: &str| match smp.get(key) {
            None => Some(None),
            Some(text) => text.parse().ok().filter(|number| (1..=MAX_VCPUS).contains(number)).map(Some),
        };
        let mut given = [None; LEVELS.len()];
        for (given, (key, _)) in given.iter_mut().zip(LEVELS) {
            *given = number(key)?;
        }
        let max_vcpus = number("maxcpus")?.or(number("cpus")?);
        if let Some(max_vcpus) = max_vcpus {
            let order = if prefers_sockets { [SOCKETS, CORES, THREADS] } else { [CORES, SOCKETS, THREADS] };
            // The first missing number in this order follows from all others; of the later ones there is one each.
            if let Some(missing) = order.into_iter().find(|&level| given[level].is_none()) {
                let others = given.iter().try_fold(1u32, |product, count| product.checked_mul(count.unwrap_or(1)))?;
                given[missing] = Some(max_vcpus / others);
            }
        }
        let counts = given.map(|count| count.unwrap_or(1));
        let product = counts.iter().try_fold(1u32, |product, &count| product.checked_mul(count))?;
        let is_valid = (1..=MAX_VCPUS).contains(&product) && max_vcpus.is_none_or(|max_vcpus| max_vcpus == product);
        is_valid.then_some(Self { counts, max_vcpus: product })
    }

    /// The number of a virtual CPU within each level.
    fn ids(&self, vcpu: u32) -> [u32; LEVELS.len()] {
        let mut ids = [0; LEVELS.len()];
        let mut rest = vcpu;
        for (id, count) in ids.iter_mut().zip(self.counts).rev() {
            *id = rest % count;
            rest /= count;
        }
        ids
    }

    /// The virtual CPUs with the numbers of `-numa cpu,socket-id=0,core-id=1`; all of a level that has none
    /// (`machine_set_cpu_numa_node`, hw/core/machine.c).
    fn matching(&self, assignment: &Parameters) -> Vec<u32> {
        let mut wanted = [None; LEVELS.len()];
        for (wanted, (_, key)) in wanted.iter_mut().zip(LEVELS) {
            *wanted = match assignment.get(key).map(|text| text.parse::<u32>()) {
                Some(Err(_)) => return Vec::new(),
                number => number.and_then(Result::ok),
            };
        }
        let matches =
            |vcpu: &u32| self.ids(*vcpu).iter().zip(wanted).all(|(id, wanted)| wanted.is_none_or(|it| it == *id));
        (0..self.max_vcpus).filter(matches).collect()
    }
}

/// Whether a kind of machine such as `pc-q35-6.1` prefers many sockets. One without a version is as new as QEMU.
fn prefers_sockets(kind: &str) -> bool {
    let version = kind.rsplit('-').next().and_then(|version| version.split_once('.'));
    let version = version.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    version.is_some_and(|version: (u32, u32)| version < FIRST_VERSION_WITH_CORES)
}

/// The virtual CPUs that `-numa cpu` assigns to each virtual node, of a command line without its program.
pub(super) fn assigned_vcpus(arguments: &[String]) -> BTreeMap<u32, Vec<u32>> {
    let assignments = options(arguments)
        .filter(|(option, _)| *option == "numa")
        .map(|(_, value)| parse_properties(value, "type"))
        .filter(|assignment| assignment.get("type").is_some_and(|kind| kind == "cpu"));
    let mut assignments = assignments.take(MAX_VCPUS as usize).peekable();
    let mut assigned: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    let Some(topology) = assignments.peek().and_then(|_| VcpuTopology::new(arguments)) else { return assigned };
    for assignment in assignments {
        if let Some(node) = assignment.get("node-id").and_then(|id| id.parse().ok()) {
            assigned.entry(node).or_default().extend(topology.matching(&assignment));
        }
    }
    assigned
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::IdSet;
    use proptest::prelude::*;

    fn arguments(command: &str) -> Vec<String> {
        command.split_whitespace().map(str::to_owned).collect()
    }

    fn counts(command: &str) -> Option<[u32; 6]> {
        VcpuTopology::new(&arguments(command)).map(|topology| topology.counts)
    }

    /// The examples of docs/system and qemu-options.hx, and what the rules of hw/core/machine-smp.c give.
    #[test]
    fn missing_numbers_follow_from_the_others() {
        assert_eq!(counts(""), Some([1; 6]));
        assert_eq!(counts("-smp 8"), Some([1, 1, 1, 1, 8, 1]));
        assert_eq!(counts("-machine pc-q35-6.1,accel=kvm -smp 8"), Some([8, 1, 1, 1, 1, 1]));
        assert_eq!(counts("-M pc-i440fx-9.2 -smp 8"), Some([1, 1, 1, 1, 8, 1]));
        assert_eq!(counts("-smp 8,sockets=2,maxcpus=8"), Some([2, 1, 1, 1, 4, 1]));
        assert_eq!(counts("-smp 8,sockets=2,cores=2"), Some([2, 1, 1, 1, 2, 2]));
        assert_eq!(counts("-smp 4,maxcpus=16,cores=4,threads=2"), Some([2, 1, 1, 1, 4, 2]));
        assert_eq!(counts("-smp sockets=2,cores=3"), Some([2, 1, 1, 1, 3, 1]));
        assert_eq!(counts("-smp 16,sockets=2,dies=2,cores=2,threads=2,maxcpus=16"), Some([2, 2, 1, 1, 2, 2]));
        assert_eq!(counts("-smp 16,sockets=1,modules=2,cores=4,threads=2"), Some([1, 1, 1, 2, 4, 2]));
        for invalid in
            ["-smp 0", "-smp x", "-smp 7,sockets=2,cores=2,threads=1", "-smp 99999", "-smp cores=4096,threads=4096"]
        {
            assert_eq!(counts(invalid), None, "{invalid}");
        }
        assert_eq!(counts("-machine pseries-9.0 -smp 8"), None);
    }

    fn assigned(command: &str, node: u32) -> String {
        let vcpus = assigned_vcpus(&arguments(command)).remove(&node).unwrap_or_default();
        vcpus.into_iter().collect::<IdSet>().to_string()
    }

    #[test]
    fn vcpus_are_assigned_by_their_place() {
        // qemu-options.hx, "-numa cpu": two sockets.
        let manual = "-M pc -smp 1,sockets=2,maxcpus=2 -numa node,nodeid=0 -numa node,nodeid=1 \
                      -numa cpu,node-id=0,socket-id=0 -numa cpu,node-id=1,socket-id=1";
        assert_eq!([0, 1, 2].map(|node| assigned(manual, node)), ["0", "1", ""]);
        // Each thread on its own, not in their order.
        let single = "-smp 8,sockets=2,cores=2,threads=2 \
                      -numa cpu,node-id=0,socket-id=0,core-id=0,thread-id=0 -numa cpu,node-id=0,socket-id=1,core-id=1,thread-id=1 \
                      -numa cpu,node-id=1,socket-id=0,core-id=1,thread-id=0 -numa cpu,node-id=1,socket-id=1,core-id=0";
        assert_eq!([0, 1].map(|node| assigned(single, node)), ["0,7", "2,4-5"]);
        let dies = "-smp 16,sockets=2,dies=2,cores=2,threads=2 -numa cpu,node-id=3,socket-id=1,die-id=0";
        assert_eq!(assigned(dies, 3), "8-11");
        let json = r#"-smp 4,sockets=2 -numa {"type":"cpu","node-id":1,"socket-id":1}"#;
        assert_eq!(assigned(json, 1), "2-3");
        for nothing in ["-numa cpu,node-id=0,socket-id=9", "-numa cpu,node-id=0,core-id=x", "-numa cpu,socket-id=0"] {
            assert_eq!(assigned(nothing, 0), "", "{nothing}");
        }
        assert_eq!(assigned("-machine s390-ccw-virtio -smp 2 -numa cpu,node-id=0,core-id=0", 0), "");
    }

    proptest! {
        #[test]
        fn no_options_make_it_panic(
            smp in "([a-z]{1,8}|cpus|maxcpus|sockets|dies|cores|threads)?=?[0-9x,=]{0,12}(,(sockets|cores|threads)=[0-9]{1,12}){0,3}",
            numa in "cpu,node-id=[0-9]{1,12},(socket-id|core-id|die-id)=[0-9x]{0,12}",
        ) {
            let assigned = assigned_vcpus(&["-smp", &smp, "-numa", &numa].map(str::to_owned));
            prop_assert!(assigned.values().flatten().all(|vcpu| *vcpu < MAX_VCPUS));
        }
    }

    #[test]
    fn numbers_and_places_agree() {
        let topology = VcpuTopology::new(&arguments("-smp 24,sockets=2,dies=3,cores=2,threads=2")).unwrap();
        assert_eq!(topology.ids(0), [0; 6]);
        assert_eq!(topology.ids(13), [1, 0, 0, 0, 0, 1]);
        let number = |ids: [u32; 6]| ids.iter().zip(topology.counts).fold(0, |sum, (id, count)| sum * count + id);
        assert!((0..24).all(|vcpu| number(topology.ids(vcpu)) == vcpu));
    }
}
