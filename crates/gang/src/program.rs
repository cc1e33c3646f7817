//! Loads the BPF program, tells it the gangs, and reads its account.
//!
//! The program in `bpf/gang.bpf.c` exchanges data with this module through maps: `.rodata` holds its settings,
//! `.data.control` the generation of the lists of threads, `.data.report` what it counts. The layouts are those of
//! `struct settings`, `struct control` and `struct report` there.

use crate::decide::gangs::Gang;
use crate::wire::VcpuPolicy;
use libbpf_rs::{Link, MapCore, MapFlags, MapType, Object, ObjectBuilder, OpenMapMut, PrintLevel};
use pagefold_base::IdSet;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use thiserror::Error;

/// The compiled program. `make gang-object` builds it.
const OBJECT: &[u8] = include_bytes!("../bpf/gang.bpf.o");
/// Gangs in the arrays of the program (`MAX_GANGS` there).
const GANG_SLOTS: usize = 128;
/// CPUs in the arrays of the program (`MAX_CPUS` there).
pub const MAX_CPUS: u32 = 512;
/// Nodes in the arrays of the program (`MAX_NODES` there), of which the last is for CPUs without a node.
const MAX_NODES: usize = 63;
/// The node of a CPU or a gang that has none (`NO_NODE` there).
const NO_NODE: u8 = 255;
/// Bytes of `struct gang_report`.
const GANG_REPORT_BYTES: usize = 40;
/// Bytes of `struct report` before its gangs.
const REPORT_HEADER_BYTES: usize = 40 + 64 + 192;
/// The kernel's own unregistering of a scheduler (`SCX_EXIT_UNREG`, kernel/sched/ext_internal.h).
const EXIT_KIND_UNREGISTERED: i32 = 64;
/// The error number of a second scheduler.
const EBUSY_TEXT: &str = "os error 16";

/// The last messages of libbpf, which says in them why a program was refused.
static LIBBPF_MESSAGES: Mutex<Vec<String>> = Mutex::new(Vec::new());
/// The most messages that are kept.
const MAX_MESSAGES: usize = 40;

/// How the program schedules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramSettings {
    /// The policy.
    pub policy: VcpuPolicy,
    /// The number of CPU numbers: the highest possible CPU plus one.
    pub cpus: u32,
    /// The CPUs of each NUMA node.
    pub node_cpus: BTreeMap<u32, IdSet>,
    /// Percent of the time in which ordinary tasks that use much CPU time have all CPUs, if they want them.
    pub ordinary_percent: u32,
    /// Whether vCPUs of other gangs fill gaps that no whole gang fits in.
    pub fills_gaps: bool,
    /// The length of a slot.
    pub slot: Duration,
    /// The time slice of ordinary tasks, and of all tasks with the policies other than gang.
    pub slice: Duration,
    /// The shortest interval between two directed yields of a gang.
    pub yield_interval: Duration,
    /// Whether all ordinary tasks of the host are scheduled, too. Else only threads with the policy `SCHED_EXT` are.
    pub whole_host: bool,
    /// Whether each vCPU is lost, which tests the watchdog of the kernel.
    pub stalls: bool,
}

/// Why the program cannot run.
#[derive(Debug, Error)]
pub enum ProgramError {
    /// The privilege is missing.
    #[error("loading a scheduler needs CAP_BPF, CAP_PERFMON and CAP_SYS_ADMIN: run as root")]
    Denied,
    /// Another scheduler was loaded.
    #[error("another sched_ext scheduler was loaded meanwhile, and the kernel runs one at a time: end it first")]
    Busy,
    /// The machine is too large.
    #[error("this machine has CPU numbers up to {0}, and the program supports up to {MAX_CPUS} CPUs")]
    TooManyCpus(u32),
    /// The kernel refused it.
    #[error("the kernel refused the scheduler: {error}\n{messages}")]
    Refused {
        /// The failed step.
        error: String,
        /// What libbpf and the verifier printed.
        messages: String,
    },
    /// The object does not have the expected layout.
    #[error("the compiled program does not fit this pagefold ({0}): build it again with `make gang-object`")]
    Layout(&'static str),
}

/// What the program has counted for a gang.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GangCounters {
    /// CPU time of its vCPUs and I/O threads.
    pub cpu_time: Duration,
    /// Slots that it was given.
    pub slots: u64,
    /// Yields of its vCPUs.
    pub yields: u64,
    /// Yields that moved a sibling to the CPU.
    pub directed_yields: u64,
}

/// What the program has counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Why the kernel has removed the program, if it has: text of the kernel.
    pub exit: Option<String>,
    /// Times at which owners of CPUs were chosen.
    pub rotations: u64,
    /// Slots of ordinary tasks.
    pub ordinary_slots: u64,
    /// Preemptions of CPUs for a new owner.
    pub preemptions: u64,
    /// The gangs, in the order of [`Program::set_gangs`].
    pub gangs: Vec<GangCounters>,
}

/// A loaded program. Attached, it schedules; dropped, the kernel's own scheduler takes over.
#[derive(Debug)]
pub struct Program {
    link: Option<Link>,
    object: Object,
    whole_host: bool,
    generation: u32,
    vcpus: BTreeMap<u32, u32>,
    machines: BTreeMap<u32, u32>,
    gang_count: usize,
}

impl Program {
    /// Loads the program for some gangs, whose number and weights stay the same.
    ///
    /// # Errors
    /// [`ProgramError`]: the privilege is missing, or the kernel refuses the program.
    pub fn load(settings: &ProgramSettings, gangs: &[Gang]) -> Result<Self, ProgramError> {
        if settings.cpus > MAX_CPUS {
            return Err(ProgramError::TooManyCpus(settings.cpus - 1));
        }
        libbpf_rs::set_print(Some((PrintLevel::Info, keep_message)));
        lock_messages().clear();
        let mut open = ObjectBuilder::default().open_memory(OBJECT).map_err(refuse)?;
        for mut map in open.maps_mut() {
            configure_map(&mut map, settings, gangs)?;
        }
        let object = open.load().map_err(refuse)?;
        let (vcpus, machines) = (BTreeMap::new(), BTreeMap::new());
        let whole_host = settings.whole_host;
        let mut program =
            Self { link: None, object, whole_host, generation: 1, vcpus, machines, gang_count: gangs.len() };
        program.set_gangs(gangs)?;
        Ok(program)
    }

    /// Makes it schedule.
    ///
    /// # Errors
    /// If another scheduler is loaded.
    pub fn attach(&mut self) -> Result<(), ProgramError> {
        let name = operations_name(self.whole_host);
        let mut maps = self.object.maps_mut();
        let mut map = maps.find(|map| map.name() == name).ok_or(ProgramError::Layout("operations"))?;
        self.link = Some(map.attach_struct_ops().map_err(refuse)?);
        Ok(())
    }

    /// Returns to the kernel's own scheduler. The counters stay readable.
    pub fn detach(&mut self) {
        self.link = None;
    }

    /// Replaces the threads of the gangs.
    ///
    /// # Errors
    /// If the kernel refuses an entry.
    pub fn set_gangs(&mut self, gangs: &[Gang]) -> Result<(), ProgramError> {
        let (mut vcpus, mut machines) = (BTreeMap::new(), BTreeMap::new());
        for (number, gang) in (1..).zip(gangs) {
            machines.insert(gang.pid.0, number);
            vcpus.extend(gang.vcpus.iter().map(|tid| (tid.0, number)));
        }
        if (&vcpus, &machines) == (&self.vcpus, &self.machines) {
            return Ok(());
        }
        self.replace("vcpus", &self.vcpus, &vcpus)?;
        self.replace("machines", &self.machines, &machines)?;
        (self.vcpus, self.machines) = (vcpus, machines);
        self.generation += 1;
        self.write(".data.control", 0, &self.generation.to_ne_bytes())
    }

    fn replace(&self, map: &str, old: &BTreeMap<u32, u32>, new: &BTreeMap<u32, u32>) -> Result<(), ProgramError> {
        for key in old.keys().filter(|key| !new.contains_key(*key)) {
            // An entry that is missing needs no removal.
            let _ = self.map(map)?.delete(&key.to_ne_bytes());
        }
        new.iter().try_for_each(|(key, gang)| self.write(map, *key, &gang.to_ne_bytes()))
    }

    fn write(&self, map: &str, key: u32, value: &[u8]) -> Result<(), ProgramError> {
        self.map(map)?.update(&key.to_ne_bytes(), value, MapFlags::ANY).map_err(refuse)
    }

    fn map(&self, name: &str) -> Result<libbpf_rs::Map<'_>, ProgramError> {
        self.object.maps().find(|map| map.name() == name).ok_or(ProgramError::Layout("maps"))
    }

    /// What the program has counted since it was loaded.
    ///
    /// # Errors
    /// If the map cannot be read.
    pub fn counters(&self) -> Result<Counters, ProgramError> {
        let value = self.map(".data.report")?.lookup(&0_u32.to_ne_bytes(), MapFlags::ANY).map_err(refuse)?;
        let value = value.ok_or(ProgramError::Layout("report"))?;
        parse_counters(&value, self.gang_count).ok_or(ProgramError::Layout("report"))
    }
}

fn operations_name(whole_host: bool) -> &'static str {
    if whole_host { "whole_host" } else { "selected_threads" }
}

fn configure_map(map: &mut OpenMapMut<'_>, settings: &ProgramSettings, gangs: &[Gang]) -> Result<(), ProgramError> {
    let name = map.name().to_string_lossy().into_owned();
    if name.ends_with(".rodata") {
        let value = settings_bytes(settings, gangs);
        if map.initial_value().map(<[u8]>::len) != Some(value.len()) {
            return Err(ProgramError::Layout("settings"));
        }
        map.set_initial_value(&value).map_err(refuse)?;
    } else if map.map_type() == MapType::StructOps {
        map.set_autocreate(name == operations_name(settings.whole_host)).map_err(refuse)?;
    }
    Ok(())
}

/// `struct settings`.
fn settings_bytes(settings: &ProgramSettings, gangs: &[Gang]) -> Vec<u8> {
    let nanoseconds = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    let policy = match settings.policy {
        VcpuPolicy::Spread => 0_u32,
        VcpuPolicy::ThrottledYield => 1,
        VcpuPolicy::Gang => 2,
    };
    let gang_count = u32::try_from(gangs.len()).unwrap_or(u32::MAX);
    let mut bytes = Vec::new();
    let flags = [settings.ordinary_percent, settings.fills_gaps.into(), settings.stalls.into()];
    for number in [policy, settings.cpus, gang_count].into_iter().chain(flags) {
        bytes.extend(number.to_ne_bytes());
    }
    for duration in [settings.slot, settings.slice, settings.yield_interval] {
        bytes.extend(nanoseconds(duration).to_ne_bytes());
    }
    let mut weights = [0_u32; GANG_SLOTS];
    for (weight, gang) in weights.iter_mut().skip(1).zip(gangs) {
        *weight = gang.weight;
    }
    bytes.extend(weights.iter().flat_map(|weight| weight.to_ne_bytes()));
    let (homes, cpu_nodes) = node_tables(&settings.node_cpus, gangs);
    bytes.extend(homes);
    bytes.extend(cpu_nodes);
    bytes
}

/// The homes of the gangs, and the nodes of the CPUs. A node is its place among the nodes, for numbers may have gaps. A
/// host with too many nodes has none here.
fn node_tables(node_cpus: &BTreeMap<u32, IdSet>, gangs: &[Gang]) -> ([u8; GANG_SLOTS], [u8; MAX_CPUS as usize]) {
    let (mut homes, mut cpu_nodes) = ([NO_NODE; GANG_SLOTS], [NO_NODE; MAX_CPUS as usize]);
    if node_cpus.len() > MAX_NODES {
        return (homes, cpu_nodes);
    }
    for (place, (number, cpus)) in (0..NO_NODE).zip(node_cpus) {
        for cpu in cpus.iter() {
            if let Some(node) = cpu_nodes.get_mut(cpu as usize) {
                *node = place;
            }
        }
        for (home, gang) in homes.iter_mut().skip(1).zip(gangs) {
            if gang.home_node == Some(*number) {
                *home = place;
            }
        }
    }
    (homes, cpu_nodes)
}

/// Parses `struct report`.
fn parse_counters(bytes: &[u8], gangs: usize) -> Option<Counters> {
    let number = |at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let half = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let text = |at: usize, length: usize| {
        let text = bytes.get(at..at + length)?.split(|byte| *byte == 0).next()?;
        Some(String::from_utf8_lossy(text).into_owned())
    };
    let (reason, message) = (text(40, 64)?, text(104, 192)?);
    let kind = i32::from_ne_bytes(half(0)?.to_ne_bytes());
    let says = if message.is_empty() { reason } else { format!("{reason}: {message}") };
    let gang = |index: usize| {
        let at = REPORT_HEADER_BYTES + (index + 1) * GANG_REPORT_BYTES;
        let [cpu_ns, slots, yields, directed_yields] =
            [number(at)?, number(at + 8)?, number(at + 16)?, number(at + 24)?];
        Some(GangCounters { cpu_time: Duration::from_nanos(cpu_ns), slots, yields, directed_yields })
    };
    Some(Counters {
        exit: (half(4)? != 0 && kind != EXIT_KIND_UNREGISTERED).then_some(says),
        rotations: number(16)?,
        ordinary_slots: number(24)?,
        preemptions: number(32)?,
        gangs: (0..gangs).map(gang).collect::<Option<_>>()?,
    })
}

fn lock_messages() -> std::sync::MutexGuard<'static, Vec<String>> {
    LIBBPF_MESSAGES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn keep_message(_level: PrintLevel, message: String) {
    let mut messages = lock_messages();
    messages.push(message.trim_end().to_owned());
    let excess = messages.len().saturating_sub(MAX_MESSAGES);
    messages.drain(..excess);
}

fn refuse(error: libbpf_rs::Error) -> ProgramError {
    let text = format!("{error:#}");
    if error.kind() == libbpf_rs::ErrorKind::PermissionDenied {
        return ProgramError::Denied;
    }
    if text.contains(EBUSY_TEXT) {
        return ProgramError::Busy;
    }
    ProgramError::Refused { error: text, messages: lock_messages().join("\n") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::Pid;

    #[test]
    fn settings_have_the_layout_of_the_program() {
        let settings = ProgramSettings {
            policy: VcpuPolicy::Gang,
            cpus: 4,
            node_cpus: [(0, "0-1".parse().unwrap()), (3, "2-3".parse().unwrap())].into(),
            ordinary_percent: 10,
            fills_gaps: true,
            slot: Duration::from_millis(8),
            slice: Duration::from_millis(4),
            yield_interval: Duration::from_millis(4),
            whole_host: true,
            stalls: false,
        };
        let gang = Gang { pid: Pid(7), name: "a".to_owned(), weight: 300, vcpus: vec![Pid(8)], home_node: Some(3) };
        let bytes = settings_bytes(&settings, &[gang]);
        let mut open = ObjectBuilder::default().open_memory(OBJECT).unwrap();
        let expected = open
            .maps_mut()
            .find(|map| map.name().to_string_lossy().ends_with(".rodata"))
            .unwrap()
            .initial_value()
            .unwrap()
            .len();
        let homes = 24 + 24 + 128 * 4;
        assert_eq!((bytes.len(), expected), (homes + 128 + 512, bytes.len()));
        assert_eq!(u32::from_ne_bytes(bytes[52..56].try_into().unwrap()), 300);
        assert_eq!(bytes[homes..homes + 3], [NO_NODE, 1, NO_NODE]);
        assert_eq!(bytes[homes + 128..homes + 133], [0, 0, 1, 1, NO_NODE]);
    }

    #[test]
    fn report_has_the_layout_of_the_program() {
        let mut open = ObjectBuilder::default().open_memory(OBJECT).unwrap();
        let map = open.maps_mut().find(|map| map.name() == ".data.report").unwrap();
        let mut bytes = map.initial_value().unwrap().to_vec();
        assert_eq!(bytes.len(), REPORT_HEADER_BYTES + GANG_SLOTS * GANG_REPORT_BYTES);
        bytes[0] = 0x40;
        bytes[5] = 0;
        bytes[4] = 1;
        bytes[REPORT_HEADER_BYTES + GANG_REPORT_BYTES + 8] = 9;
        let counters = parse_counters(&bytes, 1).unwrap();
        assert_eq!((counters.exit.clone(), counters.gangs[0].slots), (None, 9));
        bytes[1] = 4;
        bytes[104] = b'x';
        assert_eq!(parse_counters(&bytes, 0).unwrap().exit.as_deref(), Some(": x"));
        assert_eq!(parse_counters(&bytes[..100], 0), None);
    }
}
