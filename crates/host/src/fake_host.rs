//! An in-memory host for tests: the files of `/sys/kernel/mm/ksm`, with the kernel's behavior, and the other files
//! that a policy reads. Processes exist only if a test adds their files or memory. Advice changes the pages of
//! processes with memory. `smaps` shows adjacent pages of one kind as one region, as the kernel joins them. Pages
//! with the name [`MERGED_PAGE_NAME`] are merged, those with [`HUGE_PAGE_NAME`] are in huge pages. DAMON exists if its file `nr_kdamonds` does. The CPUs of a thread are
//! in the file `cpus` of its directory, and shown by its `status` unless a test has put that file. Its clock is the real
//! one until [`FakeHost::enable_virtual_time`].

mod setting_text;

use crate::access_monitor::{self, KDAMONDS_DIRECTORY, MonitorStep, MonitoredMemory};
use crate::action::{Action, ActionError, ActionOutcome, Exchange, MergeAdvice, MissedReason};
use crate::config_file::ConfigContent;
use crate::guest_agent::{AgentAccess, GuestQuestion};
use crate::qemu_monitor::{MonitorAccess, MonitorQuestion};
use crate::virtual_clock::VirtualClock;
use crate::{
    ExecEvents, FrameFlags, Host, PageRun, PageView, PagemapEntry, ProcessHandle, ReadMethod, StartedPrograms,
};
use pagefold_base::ksm::Setting;
use pagefold_base::memory::MemoryPolicy;
use pagefold_base::{Absent, AddressRange, IdSet, PageSize, Pages, Pfn, Pid, ProcessId, Reading};
use setting_text::text_after_write;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

const PAGE_BYTES: u64 = 4096;

/// The name of merged pages, which all map one frame, on node 0.
pub const MERGED_PAGE_NAME: &str = "merged";

/// The name of pages that huge pages map.
pub const HUGE_PAGE_NAME: &str = "huge";

/// The frame of merged pages.
const MERGED_FRAME: Pfn = Pfn(1);

/// The size of a memory block. Each node has the block of its number.
const BLOCK_BYTES: u64 = 128 << 20;

/// An in-memory host.
pub struct FakeHost {
    files: Mutex<BTreeMap<String, String>>,
    memory: Mutex<FakeMemory>,
    /// The NUMA nodes of pages that were moved, by process and address; all others are on node 0.
    page_nodes: Mutex<BTreeMap<(Pid, u64), u32>>,
    pinned_pages: Mutex<BTreeSet<(Pid, u64)>>,
    advice_fault: Mutex<Option<AdviceFault>>,
    written_settings: Mutex<Vec<String>>,
    /// Programs that have begun and were not reported yet; `None` if the host does not report programs.
    pending_execs: Arc<Mutex<Option<StartedPrograms>>>,
    /// Not set if the host uses the real clock.
    virtual_time: OnceLock<VirtualTime>,
}

/// The virtual time of a host.
struct VirtualTime {
    clock: VirtualClock,
    start: Instant,
    /// CPU time that Pagefold has used.
    cpu_time: Mutex<Duration>,
}

/// The date at which virtual time starts, as time since 1970: 2026-01-01 00:00 UTC.
const VIRTUAL_TIME_START: Duration = Duration::from_secs(1_767_225_600);

/// By process and address: the name of the mapping and whether it is enrolled.
type FakeMemory = BTreeMap<Pid, BTreeMap<u64, (&'static str, bool)>>;

/// The state of a host that actions can change.
pub type FakeHostState = (BTreeMap<String, String>, FakeMemory);

/// A failure of advice or of guests.
pub enum AdviceFault {
    /// The pages of this range are missed.
    MissesRange(AddressRange),
    /// The advice fails as busy after this many pages.
    BusyAfterPages(usize),
    /// The control sockets of guests do not answer.
    GuestsHang,
}

impl FakeHost {
    /// A freshly booted kernel with 10,000,000 kB of memory.
    pub fn booted() -> Self {
        let fake = Self {
            files: Mutex::default(),
            memory: Mutex::default(),
            page_nodes: Mutex::default(),
            pinned_pages: Mutex::default(),
            advice_fault: Mutex::default(),
            written_settings: Mutex::default(),
            pending_execs: Arc::default(),
            virtual_time: OnceLock::new(),
        };
        let settings = [
            ("advisor_mode", "none"),
            ("advisor_target_scan_time", "200"),
            ("advisor_max_cpu", "70"),
            ("advisor_min_pages_to_scan", "500"),
            ("advisor_max_pages_to_scan", "30000"),
            ("pages_to_scan", "100"),
            ("sleep_millisecs", "20"),
            ("use_zero_pages", "0"),
            ("smart_scan", "1"),
            ("max_page_sharing", "256"),
            ("merge_across_nodes", "1"),
            ("run", "0"),
        ];
        for (file, value) in settings {
            fake.put_setting(file, value);
        }
        fake.put_file("proc/sys/kernel/random/boot_id", "this-boot\n");
        fake.put_file("proc/sys/vm/min_free_kbytes", "0\n");
        fake.set_free_kib(5_000_000);
        fake
    }

    /// The value of a setting; for `advisor_mode` without the brackets.
    pub fn setting_value(&self, setting: &str) -> String {
        let files = self.files.lock().unwrap();
        files[&format!("sys/kernel/mm/ksm/{setting}")].trim().to_owned()
    }

    /// The values of all settings.
    pub fn setting_values(&self) -> Vec<String> {
        Setting::ALL
            .iter()
            .map(|setting| format!("{}={}", setting.file_name(), self.setting_value(setting.file_name())))
            .collect()
    }

    /// Writes a setting as another program would, without the kernel's checks.
    pub fn put_setting(&self, setting: &str, value: &str) {
        self.put_file(&format!("sys/kernel/mm/ksm/{setting}"), &format!("{value}\n"));
    }

    /// Creates or replaces a file.
    pub fn put_file(&self, path: &str, text: &str) {
        self.files.lock().unwrap().insert(path.to_owned(), text.to_owned());
    }

    /// Writes a file of sysfs or procfs, which shows the value in the form of its present text.
    fn write_file(&self, path: &str, value: &str) -> Result<(), ActionError> {
        let mut files = self.files.lock().unwrap();
        let text = match files.get(path) {
            Some(current) => text_after_write(current, value)
                .ok_or_else(|| ActionError::Failed(format!("writing {value} to {path}: Invalid argument")))?,
            None => value.to_owned(),
        };
        files.insert(path.to_owned(), text);
        Ok(())
    }

    /// Sets the free memory, in kB, of 10,000,000.
    pub fn set_free_kib(&self, kib: u64) {
        let text =
            format!("MemTotal: 10000000 kB\nMemFree: {kib} kB\nMemAvailable: {kib} kB\nBuffers: 0 kB\nCached: 0 kB\n");
        self.put_file("proc/meminfo", &text);
    }

    /// Adds a NUMA node of 1,000,000 kB with these CPUs, or replaces it. Other nodes are at distance 20.
    pub fn put_node(&self, node: u32, cpus: &str, free_kib: u64) {
        let folder = format!("sys/devices/system/node/node{node}");
        self.put_file(&format!("{folder}/cpulist"), &format!("{cpus}\n"));
        let memory = format!("Node {node} MemTotal:       1000000 kB\nNode {node} MemFree:        {free_kib} kB\n");
        self.put_file(&format!("{folder}/meminfo"), &memory);
        self.put_file(&format!("{folder}/memory{node}/online"), "1\n");
        self.put_file("sys/devices/system/memory/block_size_bytes", &format!("{BLOCK_BYTES:x}\n"));
    }

    /// Maps pages and replaces existing ones. Creates the process if necessary.
    pub fn map_pages(&self, pid: u32, range: (u64, u64), name: &'static str, enrolled: bool) {
        self.set_cpu_ticks(pid, 0);
        let mut memory = self.memory.lock().unwrap();
        let pages = memory.entry(Pid(pid)).or_default();
        pages.extend((range.0..range.1).step_by(PAGE_BYTES as usize).map(|page| (page, (name, enrolled))));
    }

    /// Sets the CPU ticks that a process has used, with one page fault for each tick.
    pub fn set_cpu_ticks(&self, pid: u32, ticks: u64) {
        let stat = format!("{pid} (program) S 1 1 1 0 -1 0 {ticks} 0 0 0 {ticks} 0 0 0 20 0 1 0 1\n");
        self.put_file(&format!("proc/{pid}/stat"), &stat);
    }

    /// Uses virtual time from now on: time passes only while all members of the [`VirtualClock`] sleep or wait, and CPU
    /// time only in [`Self::spend_cpu_time`]. The date starts at 2026-01-01 00:00 UTC.
    pub fn enable_virtual_time(&self) {
        self.virtual_time.get_or_init(|| VirtualTime {
            clock: VirtualClock::default(),
            start: Instant::now(),
            cpu_time: Mutex::default(),
        });
    }

    /// Lets Pagefold, and each of its threads, use CPU time. The host must be in virtual time.
    pub fn spend_cpu_time(&self, time: Duration) {
        *self.virtual_time.get().unwrap().cpu_time.lock().unwrap() += time;
    }

    /// Starts a process with this many resident pages.
    pub fn start_process(&self, pid: u32, pages: u64) {
        self.set_cpu_ticks(pid, 0);
        self.put_file(&format!("proc/{pid}/statm"), &format!("{pages} {pages} 0 0 0 0 0\n"));
        self.put_file(&format!("proc/{pid}/cmdline"), "program\0");
    }

    /// Reports programs from now on.
    pub fn enable_exec_events(&self) {
        *self.pending_execs.lock().unwrap() = Some(StartedPrograms::default());
    }

    /// Reports that a process executes another program.
    pub fn exec_process(&self, pid: u32) {
        self.pending_execs.lock().unwrap().as_mut().unwrap().pids.insert(Pid(pid));
    }

    /// Reports that more programs began than fit into the queue.
    pub fn overflow_exec_events(&self) {
        self.pending_execs.lock().unwrap().as_mut().unwrap().overflowed = true;
    }

    /// Removes the files of a process.
    pub fn remove_process(&self, pid: u32) {
        let prefix = format!("proc/{pid}/");
        self.files.lock().unwrap().retain(|path, _| !path.starts_with(&prefix));
        self.memory.lock().unwrap().remove(&Pid(pid));
    }

    /// Unmaps pages.
    pub fn unmap_pages(&self, pid: u32, range: (u64, u64)) {
        let mut memory = self.memory.lock().unwrap();
        memory.entry(Pid(pid)).or_default().retain(|page, _| !(range.0..range.1).contains(page));
    }

    /// Ends a process.
    pub fn end_process(&self, pid: Pid) {
        self.files.lock().unwrap().remove(&format!("proc/{pid}/stat"));
        self.memory.lock().unwrap().remove(&pid);
    }

    /// The regions of a process, and whether they are enrolled.
    pub fn regions(&self, pid: Pid) -> Option<Vec<(AddressRange, &'static str, bool)>> {
        let memory = self.memory.lock().unwrap();
        let mut regions: Vec<(AddressRange, &str, bool)> = Vec::new();
        for (&start, &(name, enrolled)) in memory.get(&pid)? {
            match regions.last_mut() {
                Some((range, same, was)) if range.end == start && (*same, *was) == (name, enrolled) => {
                    range.end += PAGE_BYTES;
                }
                _ => regions.push((AddressRange { start, end: start + PAGE_BYTES }, name, enrolled)),
            }
        }
        Some(regions)
    }

    /// Sets or clears a failure of advice.
    pub fn set_advice_fault(&self, fault: Option<AdviceFault>) {
        *self.advice_fault.lock().unwrap() = fault;
    }

    /// The state that actions can change.
    pub fn state(&self) -> FakeHostState {
        (self.files.lock().unwrap().clone(), self.memory.lock().unwrap().clone())
    }

    /// A host with the given state.
    pub fn from_state(state: &FakeHostState) -> Self {
        let fake = Self::booted();
        *fake.files.lock().unwrap() = state.0.clone();
        *fake.memory.lock().unwrap() = state.1.clone();
        fake
    }

    /// The text of `smaps`, or of `maps`, which has the first line of each entry.
    fn render_maps(&self, pid: Pid, entries: bool) -> Option<Vec<u8>> {
        let mut maps = String::new();
        for (AddressRange { start, end }, name, enrolled) in self.regions(pid)? {
            writeln!(maps, "{start:x}-{end:x} rw-p 00000000 00:00 0 {name}").unwrap();
            let flag = if enrolled { " mg" } else { "" };
            if entries {
                let kib = (end - start) >> 10;
                writeln!(maps, "Rss: {kib} kB\nAnonymous: {kib} kB\nVmFlags: rd wr{flag}").unwrap();
            }
        }
        Some(maps.into_bytes())
    }

    fn apply_advice(
        &self,
        pid: Pid,
        advice: MergeAdvice,
        ranges: &[AddressRange],
    ) -> Result<ActionOutcome, ActionError> {
        let (mut memory, fault) = (self.memory.lock().unwrap(), self.advice_fault.lock().unwrap());
        let pages = memory.get_mut(&pid).ok_or(ActionError::Vanished)?;
        let mut effect = ActionOutcome { stop_durations: vec![Duration::from_micros(100)], ..ActionOutcome::default() };
        let starts = ranges.iter().flat_map(|range| (range.start..range.end).step_by(PAGE_BYTES as usize));
        for (i, start) in starts.enumerate() {
            let page = AddressRange { start, end: start + PAGE_BYTES };
            match (pages.get_mut(&start), &*fault) {
                (_, Some(AdviceFault::BusyAfterPages(max_pages))) if i >= *max_pages => {
                    return Err(ActionError::Busy("it does not stop".to_owned()));
                }
                (_, Some(AdviceFault::MissesRange(range))) if range.contains(start) => {
                    let why = MissedReason::Refused("the kernel has no memory for it".to_owned());
                    effect.missed_ranges.push((page, why));
                }
                (Some((_, enrolled)), _) => *enrolled = advice == MergeAdvice::Mergeable,
                (None, _) => effect.missed_ranges.push((page, MissedReason::NotMapped)),
            }
        }
        Ok(effect)
    }

    /// Exchanges the set in a file.
    fn exchange_ids(&self, path: &str, ids: &Exchange<IdSet>) -> Result<ActionOutcome, ActionError> {
        let text = String::from_utf8(self.read(path)?).unwrap();
        let must_write = ids.must_write(&text.parse().unwrap(), path)?;
        if must_write {
            self.put_file(path, &ids.to.to_string());
        }
        Ok(ActionOutcome { unchanged: !must_write, ..ActionOutcome::default() })
    }

    /// Sets the share of a range that a process accesses, in percent; by default it is 0.
    pub fn set_accessed_percent(&self, pid: u32, range_start: u64, percent: u64) {
        self.put_file(&format!("proc/{pid}/accessed/{range_start:x}"), &percent.to_string());
    }

    /// The counts of a kdamond are final when it starts.
    fn monitor_accesses(&self, step: &MonitorStep) -> Result<ActionOutcome, ActionError> {
        let kdamond_count = access_monitor::read_kdamond_count(self)?;
        match step {
            MonitorStep::Start(_) if kdamond_count != 0 => return Err(ActionError::Busy("DAMON is in use".to_owned())),
            MonitorStep::Start(memory) => {
                self.put_file(&format!("{KDAMONDS_DIRECTORY}/nr_kdamonds"), &memory.len().to_string());
                memory.iter().enumerate().for_each(|(position, memory)| self.start_kdamond(position, memory));
            }
            step if kdamond_count == 0 || !access_monitor::has_kdamonds_for(self, &step.pids())? => {
                return Ok(ActionOutcome { unchanged: true, ..ActionOutcome::default() });
            }
            MonitorStep::UpdateCounts(_) => {}
            MonitorStep::Stop(_) => {
                self.files.lock().unwrap().retain(|path, _| !path.starts_with(KDAMONDS_DIRECTORY));
                self.put_file(&format!("{KDAMONDS_DIRECTORY}/nr_kdamonds"), "0");
            }
        }
        Ok(ActionOutcome::default())
    }

    fn start_kdamond(&self, position: usize, memory: &MonitoredMemory) {
        for (path, value) in access_monitor::context_files(position, memory) {
            self.put_file(&path, &value);
        }
        let bytes = |range: &AddressRange| range.bytes().0;
        let percent = |range: &AddressRange| -> u64 {
            let file = self.read(&format!("proc/{}/accessed/{:x}", memory.process.pid, range.start));
            file.map_or(0, |text| String::from_utf8(text).unwrap().parse().unwrap())
        };
        let monitored: u64 = memory.ranges.iter().map(bytes).sum();
        let accessed: u64 = memory.ranges.iter().map(|range| bytes(range) * percent(range) / 100).sum();
        for (scheme, count) in [monitored, accessed].into_iter().enumerate() {
            self.put_file(&access_monitor::scheme_count_file(position, scheme), &count.to_string());
        }
    }

    fn define_domain(&self, name: &str, definition: &Exchange<String>) -> Result<ActionOutcome, ActionError> {
        let path = crate::action::domain_definition_path(name);
        let current = self.files.lock().unwrap().get(&path).cloned().ok_or(ActionError::Vanished)?;
        let must_write = definition.must_define(current, name)?;
        if must_write {
            // As libvirt, it stores a definition in its own form.
            self.put_file(&path, &definition.to.replace('"', "'"));
        }
        Ok(ActionOutcome { unchanged: !must_write, ..ActionOutcome::default() })
    }

    /// Moves pages that are neither merged nor pinned, and counts the free memory of the nodes.
    fn move_pages(&self, pid: Pid, ranges: &[AddressRange], node: u32) -> ActionOutcome {
        let mut outcome = ActionOutcome::default();
        for page in ranges.iter().flat_map(|range| (range.start..range.end).step_by(PAGE_BYTES as usize)) {
            let mapped = self.memory.lock().unwrap().get(&pid).and_then(|pages| pages.get(&page)).copied();
            if mapped.is_some_and(|(name, _)| name == MERGED_PAGE_NAME) {
                let range = AddressRange { start: page, end: page + PAGE_BYTES };
                outcome.missed_ranges.push((range, MissedReason::MappedSeveralTimes));
                continue;
            }
            if self.pinned_pages.lock().unwrap().contains(&(pid, page)) {
                let why = MissedReason::Refused("it is pinned".to_owned());
                outcome.missed_ranges.push((AddressRange { start: page, end: page + PAGE_BYTES }, why));
                continue;
            }
            let former = self.page_nodes.lock().unwrap().insert((pid, page), node);
            if former != Some(node) {
                outcome.moved_pages += Pages(1);
                self.take_free_memory(node, PAGE_BYTES as i64 >> 10);
                former.into_iter().for_each(|former| self.take_free_memory(former, -(PAGE_BYTES as i64 >> 10)));
            }
        }
        outcome
    }

    /// Replaces policies in `numa_maps`.
    fn set_memory_policy(
        &self,
        pid: Pid,
        ranges: &[AddressRange],
        policy: &Exchange<MemoryPolicy>,
    ) -> Result<ActionOutcome, ActionError> {
        let path = format!("proc/{pid}/numa_maps");
        let mut policies = crate::parse::memory_policies(&self.read(&path)?);
        let mut outcome = ActionOutcome { unchanged: true, ..ActionOutcome::default() };
        for range in ranges {
            match policies.get_mut(&range.start) {
                Some(current) if *current == policy.from.to_string() => {
                    *current = policy.to.to_string();
                    outcome.unchanged = false;
                }
                Some(current) if *current == policy.to.to_string() => {}
                Some(current) => outcome.missed_ranges.push((*range, MissedReason::OtherPolicy(current.clone()))),
                None => outcome.missed_ranges.push((*range, MissedReason::NotMapped)),
            }
        }
        let lines = policies.iter().map(|(start, policy)| format!("{start:x} {policy}\n"));
        self.put_file(&path, &lines.collect::<String>());
        Ok(outcome)
    }

    fn take_free_memory(&self, node: u32, kib: i64) {
        let mut files = self.files.lock().unwrap();
        let Some(text) = files.get_mut(&format!("sys/devices/system/node/node{node}/meminfo")) else { return };
        let line = |text: &str| text.lines().find(|line| line.contains("MemFree:")).map(str::to_owned);
        let Some(before) = line(text) else { return };
        let free: i64 = before.split_whitespace().nth(3).unwrap().parse().unwrap();
        *text = text.replace(&before, &format!("Node {node} MemFree: {} kB", free - kib));
    }

    /// Pins pages of a process, so that they cannot be moved.
    pub fn pin_pages(&self, pid: u32, range: AddressRange) {
        let pages = (range.start..range.end).step_by(PAGE_BYTES as usize);
        self.pinned_pages.lock().unwrap().extend(pages.map(|page| (Pid(pid), page)));
    }

    /// Puts pages of a process on a node.
    pub fn put_pages_on_node(&self, pid: u32, range: AddressRange, node: u32) {
        let pages = (range.start..range.end).step_by(PAGE_BYTES as usize);
        self.page_nodes.lock().unwrap().extend(pages.map(|page| ((Pid(pid), page), node)));
    }

    /// The settings written through the port and the guest backends requested, in order.
    pub fn written_settings(&self) -> Vec<String> {
        self.written_settings.lock().unwrap().clone()
    }

    fn has_merged_pages(&self) -> bool {
        let files = self.files.lock().unwrap();
        files.get("sys/kernel/mm/ksm/pages_shared").is_some_and(|count| count.trim() != "0")
    }

    fn apply_setting(&self, setting: Setting, value: &str) -> Result<(), ActionError> {
        let invalid =
            || Err(ActionError::Failed(format!("writing {value} to {}: Invalid argument", setting.file_name())));
        let unmerging = setting == Setting::Run && value == "2";
        if !unmerging && pagefold_base::setting::check_setting_value(setting, value).is_err() {
            return invalid();
        }
        // mm/ksm.c, `pages_to_scan_store`, `advisor_mode_store`, `merge_across_nodes_store`.
        match setting {
            Setting::MergeAcrossNodes | Setting::MaxPageSharing
                if self.setting_value(setting.file_name()) != value && self.has_merged_pages() =>
            {
                let why = format!("writing {value} to {}: Device or resource busy", setting.file_name());
                return Err(ActionError::Busy(why));
            }
            Setting::PagesToScan if self.setting_value("advisor_mode") == "scan-time" => return invalid(),
            Setting::AdvisorMode if self.setting_value("advisor_mode") != value => {
                let start =
                    if value == "none" { "100".to_owned() } else { self.setting_value("advisor_min_pages_to_scan") };
                self.put_setting("pages_to_scan", &start);
            }
            _ => {}
        }
        self.put_setting(setting.file_name(), value);
        Ok(())
    }
}

impl Host for FakeHost {
    fn describe(&self) -> String {
        "a host in memory".to_owned()
    }

    fn page_size(&self) -> PageSize {
        PageSize::new(4096).unwrap()
    }

    fn read(&self, path: &str) -> Reading<Vec<u8>> {
        self.files.lock().unwrap().get(path).map(|text| text.clone().into_bytes()).ok_or(Absent::NotOnThisKernel)
    }

    fn list(&self, path: &str) -> Reading<Vec<String>> {
        let files = self.files.lock().unwrap();
        let first_part =
            |file: &String| file.strip_prefix(path)?.strip_prefix('/')?.split('/').next().map(str::to_owned);
        let names: BTreeSet<String> = files.keys().filter_map(first_part).collect();
        if names.is_empty() { Err(Absent::NotOnThisKernel) } else { Ok(names.into_iter().collect()) }
    }

    /// In octal in the file of this name with `.mode` at its end.
    fn file_mode(&self, path: &str) -> Reading<u32> {
        crate::parse::file_mode(&self.read(&format!("{path}.mode"))?)
    }

    fn pids(&self) -> Reading<Vec<Pid>> {
        let files = self.files.lock().unwrap();
        let pid = |path: &String| path.strip_prefix("proc/")?.strip_suffix("/stat")?.parse().ok().map(Pid);
        let mut pids: Vec<Pid> = files.keys().filter_map(pid).collect();
        pids.sort();
        Ok(pids)
    }

    fn open(&self, pid: Pid) -> Reading<Box<dyn ProcessHandle + '_>> {
        self.read(&format!("proc/{pid}/stat")).map_err(|_| Absent::Vanished)?;
        Ok(Box::new(FakeHostProcess { host: self, pid }))
    }

    fn frame_flags(&self, frames: &[Pfn]) -> Reading<Vec<FrameFlags>> {
        const KSM_FLAG: u64 = 1 << 21;
        let flags = |frame: &Pfn| FrameFlags(if *frame == MERGED_FRAME { KSM_FLAG } else { 0 });
        Ok(frames.iter().map(flags).collect())
    }

    fn frame_mappings(&self, frames: &[Pfn]) -> Reading<Vec<u64>> {
        let memory = self.memory.lock().unwrap();
        let is_merged = |(name, _): &&(&str, bool)| *name == MERGED_PAGE_NAME;
        let merged = memory.values().flat_map(BTreeMap::values).filter(is_merged).count() as u64;
        Ok(frames.iter().map(|frame| if *frame == MERGED_FRAME { merged } else { 1 }).collect())
    }

    fn follow_programs(&self) -> Reading<Box<dyn ExecEvents>> {
        match *self.pending_execs.lock().unwrap() {
            Some(_) => Ok(Box::new(FakeExecEvents(Arc::clone(&self.pending_execs)))),
            None => Err(Absent::NotOnThisKernel),
        }
    }

    fn apply(&self, action: &Action) -> Result<ActionOutcome, ActionError> {
        match action {
            Action::Write { knob, value } => {
                match knob.ksm_setting() {
                    Some(setting) => self.apply_setting(setting, value)?,
                    None => self.write_file(knob.path(), value)?,
                }
                self.written_settings.lock().unwrap().push(format!("{}={value}", knob.name()));
                Ok(ActionOutcome::default())
            }
            Action::Advise { process, advice, ranges } => self.apply_advice(process.pid, *advice, ranges),
            Action::MergeAny { process, enable: on } if self.memory.lock().unwrap().contains_key(&process.pid) => {
                // mm/ksm.c, `ksm_add_vmas` and `ksm_del_vmas`.
                self.memory.lock().unwrap().entry(process.pid).or_default().values_mut().for_each(|page| page.1 = *on);
                let answer = if *on { "yes" } else { "no" };
                self.put_file(&format!("proc/{}/ksm_stat", process.pid), &format!("ksm_merge_any: {answer}\n"));
                Ok(ActionOutcome { stop_durations: vec![Duration::from_micros(10)], ..ActionOutcome::default() })
            }
            Action::SetQomProperty { process, object, property, value, .. } => {
                let file = format!("proc/{}/qom{object}/{property}", process.pid);
                if let Ok(current) = self.read(&file) {
                    let current = serde_json::from_slice(&current).unwrap();
                    if !value.must_write(&current, &file)? {
                        return Ok(ActionOutcome { unchanged: true, ..ActionOutcome::default() });
                    }
                    self.put_file(&file, &value.to.to_string());
                }
                self.written_settings.lock().unwrap().push(format!("{object} of {}={}", process.pid, value.to));
                match *self.advice_fault.lock().unwrap() {
                    Some(AdviceFault::GuestsHang) => Err(ActionError::Busy("the socket does not answer".to_owned())),
                    _ => Ok(ActionOutcome::default()),
                }
            }
            Action::SetAffinity { thread, cpus, .. } => {
                let file = format!("proc/{}/task/{}/cpus", thread.process.pid, thread.tid);
                self.exchange_ids(&file, cpus).map_err(|why| match why {
                    ActionError::Unsupported(_) => ActionError::Vanished,
                    why => why,
                })
            }
            Action::ReplaceFile { file, content } => {
                let current = ConfigContent(self.files.lock().unwrap().get(&file.path()).cloned());
                let must_write = content.must_write(&current, file)?;
                match &content.to.0 {
                    Some(text) if must_write => self.put_file(&file.path(), text),
                    None if must_write => drop(self.files.lock().unwrap().remove(&file.path())),
                    _ => {}
                }
                Ok(ActionOutcome { unchanged: !must_write, ..ActionOutcome::default() })
            }
            Action::DefineDomain { name, definition, .. } => self.define_domain(name, definition),
            Action::ReloadModule { module, parameters } => {
                if module.references(self).is_ok_and(|references| references > 0) {
                    return Err(ActionError::Busy(format!("module {module} is in use")));
                }
                let current = parameters.to.read_current(self, *module)?;
                let must_write = parameters.must_write(&current, module)?;
                for (name, value) in parameters.to.0.iter().filter(|_| must_write) {
                    self.write_file(&format!("sys/module/{module}/parameters/{name}"), value)?;
                }
                Ok(ActionOutcome { unchanged: !must_write, ..ActionOutcome::default() })
            }
            Action::MovePages { process, ranges, node } if self.memory.lock().unwrap().contains_key(&process.pid) => {
                Ok(self.move_pages(process.pid, ranges, *node))
            }
            Action::SetMemoryPolicy { process, ranges, policy } => self.set_memory_policy(process.pid, ranges, policy),
            Action::MonitorAccesses(step) => self.monitor_accesses(step),
            _ => Err(ActionError::Vanished),
        }
    }

    fn now(&self) -> Instant {
        self.virtual_time.get().map_or_else(Instant::now, |time| time.start + time.clock.now())
    }

    fn sleep(&self, duration: Duration) {
        self.virtual_time.get().map_or_else(|| thread::sleep(duration), |time| time.clock.sleep(duration));
    }

    fn wait(&self, timeout: Duration, receive: &mut dyn FnMut(Duration) -> bool) {
        match self.virtual_time.get() {
            None => _ = receive(timeout),
            Some(time) => time.clock.wait(timeout, receive),
        }
    }

    fn join_clock(&self) {
        self.virtual_time.get().inspect(|time| time.clock.join());
    }

    fn unix_time(&self) -> SystemTime {
        let date = |time: &VirtualTime| SystemTime::UNIX_EPOCH + VIRTUAL_TIME_START + time.clock.now();
        self.virtual_time.get().map_or_else(SystemTime::now, date)
    }

    fn own_cpu_time(&self) -> Duration {
        self.virtual_time.get().map_or_else(crate::own_cpu_time, VirtualTime::cpu_time)
    }

    fn thread_cpu_time(&self) -> Duration {
        self.virtual_time.get().map_or_else(crate::thread_cpu_time, VirtualTime::cpu_time)
    }
}

impl VirtualTime {
    fn cpu_time(&self) -> Duration {
        *self.cpu_time.lock().unwrap()
    }
}

struct FakeExecEvents(Arc<Mutex<Option<StartedPrograms>>>);

impl ExecEvents for FakeExecEvents {
    fn take_started(&mut self) -> Reading<StartedPrograms> {
        Ok(self.0.lock().unwrap().replace(StartedPrograms::default()).unwrap_or_default())
    }
}

struct FakeHostProcess<'a> {
    host: &'a FakeHost,
    pid: Pid,
}

impl ProcessHandle for FakeHostProcess<'_> {
    fn id(&self) -> ProcessId {
        ProcessId { pid: self.pid, start_time: 1 }
    }

    fn read(&self, file: &str) -> Reading<Vec<u8>> {
        let maps =
            ["maps", "smaps"].contains(&file).then(|| self.host.render_maps(self.pid, file == "smaps")).flatten();
        if let Some(maps) = maps {
            return Ok(maps);
        }
        let found = self.host.read(&format!("proc/{}/{file}", self.pid));
        match file.strip_prefix("task/").and_then(|rest| rest.strip_suffix("/status")?.parse().ok()) {
            Some(tid) if found.is_err() => {
                Ok(format!("Cpus_allowed_list:\t{}\n", self.thread_cpus(Pid(tid))?).into_bytes())
            }
            _ => found,
        }
    }

    fn links(&self, _: &str) -> Reading<Vec<String>> {
        Err(Absent::NotOnThisKernel)
    }

    fn resident(&self, ranges: &[AddressRange]) -> Reading<Vec<PageRun>> {
        let memory = self.host.memory.lock().unwrap();
        let pages = memory.get(&self.pid).ok_or(Absent::NotOnThisKernel)?;
        let within = ranges.iter().flat_map(|range| pages.range(range.start..range.end));
        Ok(within.map(|(&address, (name, _))| PageRun { address, pages: 1, huge: *name == HUGE_PAGE_NAME }).collect())
    }

    fn mappings(&self, range: AddressRange) -> Reading<Vec<PagemapEntry>> {
        let (memory, nodes) = (self.host.memory.lock().unwrap(), self.host.page_nodes.lock().unwrap());
        let pages = memory.get(&self.pid).ok_or(Absent::Vanished)?;
        let mapping = |page: u64| match pages.get(&page) {
            Some((MERGED_PAGE_NAME, _)) => {
                PagemapEntry { present: true, frame: Some(MERGED_FRAME), ..PagemapEntry::default() }
            }
            Some(_) => {
                let node = nodes.get(&(self.pid, page)).copied().unwrap_or(0);
                let frame = Pfn(u64::from(node) * (BLOCK_BYTES / PAGE_BYTES) + MERGED_FRAME.0 + 1);
                PagemapEntry { present: true, exclusive: true, frame: Some(frame), ..PagemapEntry::default() }
            }
            None => PagemapEntry::default(),
        };
        Ok((range.start..range.end).step_by(PAGE_BYTES as usize).map(mapping).collect())
    }

    fn thread_cpus(&self, tid: Pid) -> Reading<IdSet> {
        let text = self.host.read(&format!("proc/{}/task/{tid}/cpus", self.pid))?;
        String::from_utf8_lossy(&text).parse().map_err(|_| Absent::Malformed("no set of CPUs".to_owned()))
    }

    fn page_nodes(&self, range: AddressRange) -> Reading<Vec<Option<u32>>> {
        let (memory, nodes) = (self.host.memory.lock().unwrap(), self.host.page_nodes.lock().unwrap());
        let pages = memory.get(&self.pid).ok_or(Absent::Vanished)?;
        let node = |page| pages.contains_key(&page).then(|| nodes.get(&(self.pid, page)).copied().unwrap_or(0));
        Ok((range.start..range.end).step_by(PAGE_BYTES as usize).map(node).collect())
    }

    fn contents(&self, _: ReadMethod, _: &[PageRun], _: &mut dyn FnMut(usize, PageView<'_>)) -> Reading<()> {
        Err(Absent::NotOnThisKernel)
    }

    /// The answers are files at the paths that recordings have. A machine without any of them has no channel.
    fn ask_guest_agent(&self, questions: &[GuestQuestion], _: AgentAccess) -> Reading<Vec<Reading<Vec<u8>>>> {
        let answers: Vec<_> = questions.iter().map(|question| self.read(&question.record_path())).collect();
        if answers.iter().any(Result::is_ok) { Ok(answers) } else { Err(Absent::NotOnThisKernel) }
    }

    /// The answers are files, as those of guest agents are.
    fn ask_monitor(&self, questions: &[MonitorQuestion], _: MonitorAccess) -> Reading<Vec<Reading<Vec<u8>>>> {
        let answers: Vec<_> = questions.iter().map(|question| self.read(&question.record_path())).collect();
        if answers.iter().any(Result::is_ok) { Ok(answers) } else { Err(Absent::NotOnThisKernel) }
    }

    fn ask_merge_any(&self) -> Result<bool, ActionError> {
        let ksm_stat = self.host.read(&format!("proc/{}/ksm_stat", self.pid));
        Ok(ksm_stat.is_ok_and(|ksm_stat| ksm_stat == b"ksm_merge_any: yes\n"))
    }
}
