//! What a census found, as the memory of machines.
//!
//! Pages count by what they hold, whether ksmd has merged them or not. A frame that processes share since a fork counts
//! once, with the first of them: ksmd has nothing to save there. Pages that were not read are left out. Where a process has
//! enrolled memory, only that memory counts, as ksmd takes no other, unless all is wanted.

use crate::decide::content_order::{OrderedPage, rank_contents};
use crate::decide::counters::PAGE_BYTES;
use crate::decide::ksmd::KsmSettings;
use crate::decide::observed_host::{ObservedContent, ObservedHost, ObservedMachine};
use crate::decide::rules::KernelVersion;
use crate::decide::scenario::{DEFAULT_HZ, HostSpec, invalid_distance};
use crate::scenario::MAX_VCPUS;
use pagefold_base::identity::vm_definition::parse_vm_definition;
use pagefold_base::process::Process;
use pagefold_base::region::VmFlags;
use pagefold_base::{Absent, AddressRange, Fingerprint, PageClass, Reading};
use pagefold_census::PageIndex;
use pagefold_census::index::PageMark;
use pagefold_census::results::{Census, SubjectCensus};
use pagefold_host::ksmd_thread::KsmdThread;
use pagefold_host::{Host, hold, observe, parse};
use std::collections::BTreeSet;
use std::time::Duration;
use thiserror::Error;

/// The number of a page whose content no other page has.
const NO_NUMBER: u32 = u32::MAX;

/// Why there is no scenario of a host.
#[derive(Debug, Error)]
pub enum ObservationError {
    /// A figure of the host is missing.
    #[error("cannot read {what} of {host}")]
    Figure {
        /// The figure.
        what: &'static str,
        /// The host.
        host: String,
        /// Why it is missing.
        source: Absent,
    },
    /// The model has pages of 4 KiB.
    #[error("{host} has pages of {bytes} bytes, and the model of ksmd has pages of 4096 bytes only")]
    PageSize {
        /// The host.
        host: String,
        /// Its page size.
        bytes: u64,
    },
    /// The kernel's release has no version.
    #[error("{host} has the kernel release \"{release}\", which does not begin with a version such as 6.12")]
    Kernel {
        /// The host.
        host: String,
        /// Its release.
        release: String,
    },
}

/// Which memory counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObservedMemory {
    /// The enrolled memory of a process that has some, and otherwise all that KSM can take.
    EnrolledIfAny,
    /// All that KSM can take.
    All,
}

/// The memory of a host's processes, and what of it is left out.
#[derive(Clone, Debug)]
pub struct Observation {
    /// The host.
    pub host: ObservedHost,
    /// Pages that ksmd has merged, which count as if it had not.
    pub merged_pages: u64,
    /// Pages that share the frame of an earlier one since a fork, which are left out.
    pub repeated_frames: u64,
    /// Pages that were not read, which are left out.
    pub unread_pages: u64,
    /// Processes of which only enrolled memory counts.
    pub enrolled_processes: u64,
    /// Pages of these that are not enrolled, which are left out.
    pub unenrolled_pages: u64,
    /// Whether the number of CPUs is known. It only appears in reports; without it, the host has one.
    pub has_cpu_count: bool,
}

/// Joins a census with figures of the host. `pass_interval` is the pause between the two passes, if there were two.
///
/// # Errors
/// If the host's kernel or memory are not known, or its pages are not of 4 KiB.
pub fn observe_machines(
    host: &dyn Host,
    census: &Census,
    index: &PageIndex,
    pass_interval: Option<Duration>,
    memory: ObservedMemory,
) -> Result<Observation, ObservationError> {
    let nodes = numa_nodes(host);
    let (numbers, numbered_contents) = number_contents(index);
    let cpus = observe::online_cpu_count(host).ok();
    let spec = host_spec(host, &nodes, cpus.unwrap_or(1))?;
    let mut observation = Observation {
        host: ObservedHost {
            spec,
            machines: Vec::new(),
            numbered_contents,
            pass_seconds: pass_interval.map(|interval| interval.as_secs_f64()),
        },
        merged_pages: 0,
        repeated_frames: 0,
        unread_pages: 0,
        enrolled_processes: 0,
        unenrolled_pages: 0,
        has_cpu_count: cpus.is_some(),
    };
    let mut merged_contents = BTreeSet::new();
    let mut ordered_pages = Vec::new();
    for (number, subject) in census.subjects.iter().enumerate() {
        let process = &subject.process;
        let node = bound_node(host, process, &nodes);
        let vcpus = count_vcpus(process);
        let mut machine = ObservedMachine { family: family(process), node, vcpus, ..ObservedMachine::default() };
        let enrolled = enrolled_ranges(subject).filter(|_| memory == ObservedMemory::EnrolledIfAny);
        observation.enrolled_processes += u64::from(enrolled.is_some());
        for (run, first) in index.runs(index.subject_ordinals(number)) {
            for page in first..first + run.pages {
                let address = run.address + u64::from(page - first) * PAGE_BYTES.cast_unsigned();
                if enrolled.as_ref().is_some_and(|ranges| !contain(ranges, address)) {
                    let would_count = index.mark(page).class().is_some() && index.first_page_of_frame(page) == page;
                    observation.unenrolled_pages += u64::from(would_count);
                    continue;
                }
                if let Some(content) = observation.content(index, page, &numbers, &mut merged_contents) {
                    machine.push(content, run.huge);
                    let number = match content {
                        ObservedContent::Numbered(number) => Some(number),
                        _ => None,
                    };
                    if index.has_order_keys() && content != ObservedContent::Zero {
                        ordered_pages.push(OrderedPage { number, key: index.order_key(page) });
                    }
                }
            }
        }
        observation.host.machines.push(machine);
    }
    rank_pages(&mut observation.host.machines, &ordered_pages);
    let spec = &mut observation.host.spec;
    let observed: u64 = observation.host.machines.iter().map(ObservedMachine::pages).sum();
    // Merged pages of one content have one frame, and merged pages of zeros none.
    let frames = observed - (observation.merged_pages - merged_contents.len() as u64);
    spec.used_pages = spec.used_pages.saturating_sub(frames).min(spec.memory_pages.saturating_sub(1));
    Ok(observation)
}

impl Observation {
    /// What a page holds; `None` for one that is left out, which is counted. `merged_contents` gets the contents of merged
    /// pages; one that no other observed page has counts by the number of the page.
    fn content(
        &mut self,
        index: &PageIndex,
        page: u32,
        numbers: &[u32],
        merged_contents: &mut BTreeSet<(bool, u32)>,
    ) -> Option<ObservedContent> {
        let mark = index.mark(page);
        let Some(class) = mark.class() else {
            self.unread_pages += u64::from(mark != PageMark::NOT_RESIDENT);
            return None;
        };
        if index.first_page_of_frame(page) != page {
            self.repeated_frames += 1;
            return None;
        }
        if class == PageClass::Merged {
            self.merged_pages += 1;
            match numbers[page as usize] {
                ZERO_NUMBER => {}
                NO_NUMBER => _ = merged_contents.insert((false, page)),
                number => _ = merged_contents.insert((true, number)),
            }
        }
        Some(match (class, numbers[page as usize]) {
            (PageClass::Zero, _) | (PageClass::Merged, ZERO_NUMBER) => ObservedContent::Zero,
            (PageClass::Volatile, _) => ObservedContent::Volatile,
            (_, NO_NUMBER) => ObservedContent::Unique,
            (_, number) => ObservedContent::Numbered(number),
        })
    }
}

/// Gives the machines the ranks of their pages but zeros, which are in the order of the machines, if the bytes of any are
/// known.
fn rank_pages(machines: &mut [ObservedMachine], pages: &[OrderedPage]) {
    if pages.iter().all(|page| page.key.is_none()) {
        return;
    }
    let ranks = rank_contents(pages);
    let mut rest = &ranks[..];
    for machine in machines {
        let runs = machine.runs.iter().filter(|run| run.content != ObservedContent::Zero);
        let (of_machine, others) = rest.split_at(runs.map(|run| run.pages as usize).sum());
        machine.ranks = of_machine.to_vec();
        rest = others;
    }
}

/// The enrolled regions of a process that have resident pages, if there are any.
fn enrolled_ranges(subject: &SubjectCensus) -> Option<Vec<AddressRange>> {
    let enrolled = subject.regions.iter().filter(|region| region.region.flags.has(VmFlags::MERGEABLE));
    let ranges: Vec<AddressRange> = enrolled.map(|region| region.region.range).collect();
    Some(ranges).filter(|ranges| !ranges.is_empty())
}

/// Whether an address is in one of these ranges, which ascend.
fn contain(ranges: &[AddressRange], address: u64) -> bool {
    let next = ranges.partition_point(|range| range.end <= address);
    ranges.get(next).is_some_and(|range| range.contains(address))
}

/// The number of the content of merged pages of zeros.
const ZERO_NUMBER: u32 = NO_NUMBER - 1;

/// The number of the content of each page that may have a duplicate, and how many numbers there are.
fn number_contents(index: &PageIndex) -> (Vec<u32>, u32) {
    let mut numbers = vec![NO_NUMBER; index.page_count()];
    let mut next = 0;
    for group in index.paired().chunk_by(|a, b| a.fingerprint() == b.fingerprint()) {
        let is_zero = group[0].fingerprint() == Fingerprint::ZERO_PAGE;
        if group.len() > 1 || is_zero {
            group.iter().for_each(|entry| numbers[entry.ordinal as usize] = if is_zero { ZERO_NUMBER } else { next });
            next += u32::from(!is_zero);
        }
    }
    (numbers, next)
}

/// Processes of one family may be of one template: those of one program, and virtual machines whose names differ in the
/// number at the end.
fn family(process: &Process) -> String {
    let vm = process.identity.vm.as_ref();
    let name = vm.and_then(|vm| vm.name.as_ref().or(vm.uuid.as_ref()));
    name.map_or_else(|| process.comm.clone(), |name| without_number(name).to_owned())
}

/// A name without the number at its end and what separates it, unless nothing else is left.
fn without_number(name: &str) -> &str {
    let base = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let base = if base.len() < name.len() { base.trim_end_matches(['-', '_', '.', ':', ' ']) } else { base };
    if base.is_empty() { name } else { base }
}

/// The numbers of the NUMA nodes with memory.
fn numa_nodes(host: &dyn Host) -> Vec<u32> {
    host.read("sys/devices/system/node/has_memory").and_then(|list| parse::number_list(&list)).unwrap_or_default()
}

/// The nodes of a scenario at most.
const MAX_NODES: usize = 64;

/// The distances between these nodes; `None` for a host with one of them, and where they are not known or not those of a
/// scenario. A file has one for each node that is online, in ascending order (drivers/base/node.c, `distance_show`).
fn node_distances(host: &dyn Host, nodes: &[u32]) -> Option<Vec<Vec<u8>>> {
    let nodes = &nodes[..nodes.len().min(MAX_NODES)];
    let online: Vec<u32> = parse::number_list(&host.read("sys/devices/system/node/online").ok()?).ok()?;
    let columns: Vec<usize> =
        nodes.iter().map(|node| online.iter().position(|known| known == node)).collect::<Option<_>>()?;
    let row = |node: &u32| -> Option<Vec<u8>> {
        let text = host.read(&format!("sys/devices/system/node/node{node}/distance")).ok()?;
        let text = String::from_utf8_lossy(&text).into_owned();
        let all: Vec<u8> = text.split_whitespace().map(|word| word.parse().ok()).collect::<Option<_>>()?;
        columns.iter().map(|&column| all.get(column).copied()).collect()
    };
    let distances: Vec<Vec<u8>> = nodes.iter().map(row).collect::<Option<_>>()?;
    Some(distances).filter(|distances| distances.len() > 1 && invalid_distance(distances).is_none())
}

/// The position of the one node to which the memory of a process is bound.
fn bound_node(host: &dyn Host, process: &Process, nodes: &[u32]) -> Option<u8> {
    let handle = hold(host, process.id).ok()?;
    let bound = observe::bound_nodes(&*handle, nodes)?;
    let node: u32 = bound.trim().parse().ok()?;
    u8::try_from(nodes.iter().position(|&known| known == node)?).ok()
}

/// The vCPUs with which a virtual machine of QEMU starts; 0 for other processes, and if its command line does not tell.
fn count_vcpus(process: &Process) -> u32 {
    if process.identity.vm.is_none() {
        return 0;
    }
    let definition = process.arguments.clone().and_then(|arguments| parse_vm_definition(&arguments));
    definition.ok().and_then(|definition| definition.vcpus).unwrap_or(0).min(MAX_VCPUS)
}

/// The host; `used_pages` is all that is not available.
fn host_spec(host: &dyn Host, nodes: &[u32], cpus: usize) -> Result<HostSpec, ObservationError> {
    let describe = || host.describe();
    let bytes = host.page_size().bytes();
    if bytes != PAGE_BYTES.cast_unsigned() {
        return Err(ObservationError::PageSize { host: describe(), bytes });
    }
    let figure = |what| move |source| ObservationError::Figure { what, host: describe(), source };
    let memory = observe::memory(host).map_err(figure("the memory"))?;
    let total = memory.total.map_err(figure("MemTotal"))?;
    let available = memory.available.map_err(figure("MemAvailable"))?;
    let release = observe::kernel_release(host).map_err(figure("the kernel's release"))?;
    let kernel = KernelVersion::parse(&release);
    Ok(HostSpec {
        memory_pages: total.0 / bytes,
        used_pages: total.0.saturating_sub(available.0) / bytes,
        cpus: u32::try_from(cpus).unwrap_or(u32::MAX),
        nodes: u8::try_from(nodes.len().clamp(1, MAX_NODES)).unwrap_or(1),
        distances: node_distances(host, nodes).unwrap_or_default(),
        kernel: kernel.ok_or_else(|| ObservationError::Kernel { host: host.describe(), release })?,
        hz: timer_hz(host),
        ksmd_cpu_ms: ksmd_cpu(host).map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
        ksm: ksm_settings(host),
    })
}

/// CPU time of ksmd since boot.
fn ksmd_cpu(host: &dyn Host) -> Reading<Duration> {
    KsmdThread::find(host)?.cpu_time()
}

/// Values of `CONFIG_HZ` (kernel/Kconfig.hz).
const KERNEL_HZ: [u32; 4] = [100, 250, 300, 1000];

/// Ticks of the kernel a second; the default where root's file `timer_list` cannot be read.
fn timer_hz(host: &dyn Host) -> u32 {
    let list = host.read("proc/timer_list");
    list.ok().and_then(|list| hz_of_timer_list(&String::from_utf8_lossy(&list))).unwrap_or(DEFAULT_HZ)
}

/// Ticks a second from their count, which begins five minutes before 2^32 (`INITIAL_JIFFIES`, include/linux/jiffies.h).
/// `None` in the minute in which the count is near 2^32.
fn hz_of_timer_list(text: &str) -> Option<u32> {
    let number = |start: &str, end: &str| -> Option<f64> {
        text.lines().find_map(|line| line.strip_prefix(start)?.strip_suffix(end)?.trim().parse().ok())
    };
    let seconds = number("now at ", " nsecs")? / 1e9 - INITIAL_JIFFIES_SECONDS;
    let hz = (number("jiffies: ", "")? - JIFFIES_AT_WRAP) / seconds;
    let is_near = |candidate: &u32| (hz / f64::from(*candidate) - 1.0).abs() < HZ_TOLERANCE;
    KERNEL_HZ.into_iter().find(|candidate| seconds.abs() > 30.0 && is_near(candidate))
}

/// The time after which the count of ticks is 2^32.
const INITIAL_JIFFIES_SECONDS: f64 = 300.0;
const JIFFIES_AT_WRAP: f64 = 4_294_967_296.0;
/// Ticks are counted in whole ones, and a bit late.
const HZ_TOLERANCE: f64 = 0.02;

/// KSM's settings; those that the kernel does not have are the defaults.
fn ksm_settings(host: &dyn Host) -> KsmSettings {
    let otherwise = KsmSettings::default();
    let Ok(ksm) = observe::ksm(host) else { return otherwise };
    let switch = |value: Reading<u64>, otherwise| value.map_or(otherwise, |value| value != 0);
    let prune = host.read("sys/kernel/mm/ksm/stable_node_chains_prune_millisecs");
    KsmSettings {
        pages_to_scan: ksm.pages_to_scan.unwrap_or(otherwise.pages_to_scan).max(1),
        sleep_millisecs: ksm.sleep_millisecs.unwrap_or(otherwise.sleep_millisecs),
        max_page_sharing: ksm
            .max_page_sharing
            .ok()
            .and_then(|pages| usize::try_from(pages).ok())
            .unwrap_or(otherwise.max_page_sharing),
        stable_node_chains_prune_millisecs: prune
            .and_then(|value| parse::number(&value))
            .unwrap_or(otherwise.stable_node_chains_prune_millisecs),
        use_zero_pages: switch(ksm.use_zero_pages, otherwise.use_zero_pages),
        smart_scan: switch(ksm.smart_scan, false),
        merge_across_nodes: switch(ksm.merge_across_nodes, otherwise.merge_across_nodes),
        advisor: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_host::fake_host::FakeHost;

    #[test]
    fn ticks_a_second_follow_from_their_count() {
        let list = |now: &str, jiffies: &str| {
            hz_of_timer_list(&format!("Timer List Version: v0.10\nnow at {now} nsecs\n\njiffies: {jiffies}\n"))
        };
        assert_eq!(list("4293861089021", "4295965696"), Some(250));
        // A minute after boot, the count is below 2^32.
        assert_eq!(list("60000000000", "4294727296"), Some(1000));
        assert_eq!(list("300500000000", "4294967421"), None, "too near");
        assert_eq!([list("4293861089021", "x"), hz_of_timer_list("")], [None, None]);
    }

    #[test]
    fn distances_are_those_of_the_nodes_with_memory() {
        let host = FakeHost::booted();
        let put = |file: &str, text: &str| host.put_file(&format!("sys/devices/system/node/{file}"), text);
        put("online", "0-2,10\n");
        put("node0/distance", "10 21 31 40\n");
        put("node2/distance", "31 17 10 21\n");
        put("node10/distance", "40 99 22 10\n");
        let expected = vec![vec![10, 31, 40], vec![31, 10, 21], vec![40, 22, 10]];
        assert_eq!(node_distances(&host, &[0, 2, 10]), Some(expected));
        assert_eq!(node_distances(&host, &[0]), None, "one node");
        assert_eq!(node_distances(&host, &[0, 1]), None, "node 1 has no file");
        put("node2/distance", "9 17 10 21\n");
        assert_eq!(node_distances(&host, &[0, 2]), None, "no scenario has a distance of 9");
        put("node2/distance", "31 17\n");
        assert_eq!(node_distances(&host, &[0, 2]), None, "a row is too short");
    }

    #[test]
    fn machines_of_one_family_differ_in_the_number_at_the_end_of_their_name() {
        let check = |name, expected| assert_eq!(without_number(name), expected);
        check("web-12", "web");
        check("web12", "web");
        check("web-a", "web-a");
        check("web-", "web-");
        check("-12", "-12");
    }
}
