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

/// Types of machines that number virtual CPUs as above, without their versions. `pc` is the last of its kind, as it is
/// the beginning of the others.
const X86_MACHINES: [&str; 5] = ["pc-i440fx", "pc-q35", "pc", "q35", "microvm"];

/// The same of Arm. A machine `virt` of RISC-V or LoongArch numbers virtual CPUs in another way.
const ARM_MACHINE: &str = "virt";

/// The first version of machines that prefer many cores to many sockets (`prefer_sockets`, hw/core/machine-smp.c).
const FIRST_VERSION_WITH_CORES: (u32, u32) = (6, 2);

/// The numbers of sockets, dies, clusters, modules, cores and threads of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct VcpuTopology {
    counts: [u32; LEVELS.len()],
    max_vcpus: u32,
}

impl VcpuTopology {
    /// The topology of a command line. `None` if the machine is not known to number virtual CPUs as above, if `-smp` is
    /// not valid, or if it leaves open what depends on an unknown version of the machine.
    pub(super) fn new(program: &str, arguments: &[String]) -> Option<Self> {
        let (mut smp, mut machine) = (Parameters::new(), Parameters::new());
        for (option, value) in options(arguments) {
            match option {
                "smp" => smp.extend(parse_parameters(value, "cpus")),
                "M" | "machine" => machine.extend(parse_parameters(value, "type")),
                _ => {}
            }
        }
        let version = machine_version(program, machine.get("type").map(String::as_str))?;
        if let Some(prefers_sockets) = prefers_sockets(version) {
            return Self::from_counts(&smp, prefers_sockets);
        }
        let topology = Self::from_counts(&smp, false);
        topology.filter(|_| topology == Self::from_counts(&smp, true))
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
    /// (`machine_set_cpu_numa_node`, hw/core/machine.c). None for a `thread-id` alone: Arm's virt before QEMU 7.1 has threads
    /// only, and counts them through the whole machine.
    fn matching(&self, assignment: &Parameters) -> Vec<u32> {
        let mut wanted = [None; LEVELS.len()];
        for (wanted, (_, key)) in wanted.iter_mut().zip(LEVELS) {
            *wanted = match assignment.get(key).map(|text| text.parse::<u32>()) {
                Some(Err(_)) => return Vec::new(),
                number => number.and_then(Result::ok),
            };
        }
        if wanted[THREADS].is_some() && wanted[..THREADS].iter().all(Option::is_none) {
            return Vec::new();
        }
        let matches =
            |vcpu: &u32| self.ids(*vcpu).iter().zip(wanted).all(|(id, wanted)| wanted.is_none_or(|it| it == *id));
        (0..self.max_vcpus).filter(matches).collect()
    }
}

/// The version in a machine type that numbers virtual CPUs as above, such as `6.1` of `pc-q35-6.1`, or `rhel8.2.0`; empty
/// without one. `None` for any other machine. The program decides what `virt` and a missing type mean.
fn machine_version<'a>(program: &str, machine: Option<&'a str>) -> Option<&'a str> {
    let program = program.rsplit('/').next().unwrap_or(program);
    let Some(machine) = machine else {
        let is_x86 = program.ends_with("x86_64") || program.ends_with("i386") || matches!(program, "qemu-kvm" | "kvm");
        return is_x86.then_some("");
    };
    let is_arm = program.ends_with("aarch64") || program.ends_with("arm");
    X86_MACHINES.into_iter().chain(is_arm.then_some(ARM_MACHINE)).find_map(|known| {
        match machine.strip_prefix(known)? {
            "" => Some(""),
            suffix => suffix.strip_prefix('-'),
        }
    })
}

/// Whether machines of this version prefer many sockets. One without a version is as new as QEMU. `None` for a name of a
/// distribution, such as `focal` or `rhel8.2.0`, which does not tell the version of QEMU.
fn prefers_sockets(version: &str) -> Option<bool> {
    if version.is_empty() {
        return Some(false);
    }
    let numbers: Vec<u32> = version.split('.').map(|number| number.parse().ok()).collect::<Option<_>>()?;
    match numbers[..] {
        [major, minor, ..] => Some((major, minor) < FIRST_VERSION_WITH_CORES),
        _ => None,
    }
}

/// The virtual CPUs that `-numa cpu` assigns to each virtual node, of a command line.
pub(super) fn assigned_vcpus(program: &str, arguments: &[String]) -> BTreeMap<u32, Vec<u32>> {
    let assignments = options(arguments)
        .filter(|(option, _)| *option == "numa")
        .map(|(_, value)| parse_properties(value, "type"))
        .filter(|assignment| assignment.get("type").is_some_and(|kind| kind == "cpu"));
    let mut assignments = assignments.take(MAX_VCPUS as usize).peekable();
    let mut assigned: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    let Some(topology) = assignments.peek().and_then(|_| VcpuTopology::new(program, arguments)) else {
        return assigned;
    };
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
        counts_of("qemu-system-x86_64", command)
    }

    fn counts_of(program: &str, command: &str) -> Option<[u32; 6]> {
        VcpuTopology::new(program, &arguments(command)).map(|topology| topology.counts)
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
    }

    #[test]
    fn only_known_machines_have_a_topology() {
        let is_known = |program: &str, machine: &str| counts_of(program, &format!("{machine} -smp 8")).is_some();
        for machine in ["pc", "pc-1.0", "pc-i440fx-9.2", "pc-q35-2.4.1", "q35", "microvm"] {
            assert!(is_known("/usr/libexec/qemu-kvm", &format!("-machine type={machine},accel=kvm")), "{machine}");
        }
        for program in ["/usr/bin/qemu-system-x86_64", "qemu-system-i386", "qemu-kvm", "kvm"] {
            assert!(is_known(program, "") && is_known(program, "-machine accel=kvm"), "{program}");
        }
        for program in ["/usr/bin/qemu-system-aarch64", "qemu-system-arm"] {
            assert!(is_known(program, "-M virt") && is_known(program, "-M virt-9.0"), "{program}");
            assert!(!is_known(program, ""), "{program} has no default machine");
        }
        for program in ["qemu-system-ppc64", "qemu-system-s390x", "qemu-system-riscv64", "qemu-system-loongarch64"] {
            let machines = ["", "-M virt", "-M virt-9.0", "-M pseries-9.0", "-M s390-ccw-virtio-9.0", "-M none"];
            assert!(!machines.into_iter().any(|machine| is_known(program, machine)), "{program}");
        }
        let unknown = ["-M virt", "-M pseries-9.0", "-M xenfv", "-M pcx", "-M type="];
        assert!(!unknown.into_iter().any(|machine| is_known("qemu-system-x86_64", machine)));
        assert!(!is_known("", "") && !is_known("/opt/x86_64/wrapped", ""));
    }

    #[test]
    fn unknown_versions_leave_open_what_depends_on_them() {
        for machine in ["pc-q35-focal", "pc-q35-rhel8.2.0", "pc-i440fx-1.5-qemu-kvm", "pc-q35-9", "pc-q35-6.x"] {
            let counts = |smp: &str| counts(&format!("-M {machine} -smp {smp}"));
            assert_eq!([counts("8"), counts("8,threads=2")], [None; 2], "{machine}");
            assert_eq!(counts("8,sockets=2,cores=2,threads=2"), Some([2, 1, 1, 1, 2, 2]), "{machine}");
            assert_eq!(counts("8,sockets=2"), Some([2, 1, 1, 1, 4, 1]), "{machine}: the cores follow in any version");
            assert_eq!(counts("1"), Some([1; 6]), "{machine}");
        }
        assert_eq!(counts("-M pc-q35-4.0.1 -smp 8"), Some([8, 1, 1, 1, 1, 1]));
        assert_eq!(counts("-M pc-q35-10.0 -smp 8"), Some([1, 1, 1, 1, 8, 1]));
        assert_eq!(counts_of("qemu-system-aarch64", "-M virt-6.1 -smp 8"), Some([8, 1, 1, 1, 1, 1]));
        assert_eq!(counts_of("qemu-system-aarch64", "-M virt-rhel8.2.0 -smp 8"), None);
    }

    fn assigned(command: &str, node: u32) -> String {
        let vcpus = assigned_vcpus("qemu-system-x86_64", &arguments(command)).remove(&node).unwrap_or_default();
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
        for nothing in [
            "-numa cpu,node-id=0,socket-id=9",
            "-numa cpu,node-id=0,core-id=x",
            "-numa cpu,socket-id=0",
            "-numa cpu,node-id=0,thread-id=0",
        ] {
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
            let assigned = assigned_vcpus("kvm", &["-smp", &smp, "-numa", &numa].map(str::to_owned));
            prop_assert!(assigned.values().flatten().all(|vcpu| *vcpu < MAX_VCPUS));
        }
    }

    #[test]
    fn numbers_and_places_agree() {
        let topology = VcpuTopology::new("kvm", &arguments("-smp 24,sockets=2,dies=3,cores=2,threads=2")).unwrap();
        assert_eq!(topology.ids(0), [0; 6]);
        assert_eq!(topology.ids(13), [1, 0, 0, 0, 0, 1]);
        let number = |ids: [u32; 6]| ids.iter().zip(topology.counts).fold(0, |sum, (id, count)| sum * count + id);
        assert!((0..24).all(|vcpu| number(topology.ids(vcpu)) == vcpu));
    }
}
