//! Records events of the scheduler by perf_event_open(2).
//!
//! The events belong to this process: the kernel removes them when it ends, however it ends. Their numbers and layouts
//! are in tracefs. If that is not mounted, an instance is mounted for this process alone, without a path, by fsopen(2)
//! and fsmount(2) (Linux 5.2).
//!
//! A CPU that runs one task all the time has no event by itself. Therefore a thread of this process runs on each CPU
//! for a moment, at the start and at the end.
//!
//! Limit: CPUs that come online later are not recorded.

use crate::{LiveHost, read_whole_file};
use pagefold_base::IdSet;
use pagefold_host::scheduler_trace::{
    ATTRIBUTE_FLAGS, CLOCK, SAMPLE_FIELDS, SCHEDULER_EVENTS, SchedulerTrace, SchedulerTraceError, THREAD_FLAGS,
    TraceDescription, TracedEvent,
};
use pagefold_host::{Host, parse};
use perf_event::events::Tracepoint;
use perf_event::{Builder, Clock, SampleFlag, Sampler};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, openat, statat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CpuSet, sched_setaffinity};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Where tracefs is mounted: on its own, or by debugfs.
const TRACEFS_PATHS: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];

/// Open files beside those of the recording.
const OTHER_OPEN_FILES: u64 = 256;

/// How long the thread that runs on each CPU may take. Real-time tasks may keep it from a CPU.
const VISIT_LIMIT: Duration = Duration::from_millis(500);

/// The recording of all CPUs.
pub struct PerfTrace {
    description: TraceDescription,
    /// One for each event and CPU.
    samplers: Vec<Sampler>,
    record: Vec<u8>,
}

impl PerfTrace {
    /// Starts to record.
    pub fn open(host: &LiveHost, buffer_bytes: usize) -> Result<Self, SchedulerTraceError> {
        let tracefs = open_tracefs().map_err(SchedulerTraceError::Tracefs)?;
        let mut description = describe(&tracefs).map_err(SchedulerTraceError::Tracefs)?;
        let online = host.read("sys/devices/system/cpu/online").and_then(|bytes| parse::number_list(&bytes));
        let online: IdSet = online.unwrap_or_else(|_| vec![0]).into_iter().collect();
        description.cpus = online.iter().collect();
        allow_open_files((description.cpus.len() * SCHEDULER_EVENTS.len()) as u64);
        let mut samplers = Vec::new();
        for (index, event) in description.events.iter_mut().enumerate() {
            let flags = ATTRIBUTE_FLAGS | if index == 0 { THREAD_FLAGS } else { 0 };
            for &cpu in &description.cpus {
                let counter =
                    build_counter(event.id, cpu, flags).map_err(|error| refusal(host, event.name, cpu, error))?;
                event.sample_ids.push(counter.id());
                let sampler = counter.sampled(buffer_bytes).map_err(|error| SchedulerTraceError::Buffer {
                    bytes: buffer_bytes,
                    cpu,
                    error,
                })?;
                samplers.push(sampler);
            }
        }
        for (index, sampler) in samplers.iter_mut().enumerate() {
            let (event, cpu) = (index / description.cpus.len(), index % description.cpus.len());
            sampler
                .enable()
                .map_err(|error| refusal(host, description.events[event].name, description.cpus[cpu], error))?;
        }
        visit_cpus(description.cpus.clone());
        Ok(Self { description, samplers, record: Vec::new() })
    }
}

impl SchedulerTrace for PerfTrace {
    fn description(&self) -> &TraceDescription {
        &self.description
    }

    fn take_records(&mut self, take: &mut dyn FnMut(&[u8])) {
        let bytes = &mut self.record;
        for sampler in &mut self.samplers {
            while let Some(record) = sampler.next_record() {
                bytes.clear();
                bytes.extend(record.ty().to_ne_bytes());
                bytes.extend(record.misc().to_ne_bytes());
                // Records have at most 65,535 bytes with their header.
                bytes.extend(((RECORD_HEADER_BYTES + record.len()) as u16).to_ne_bytes());
                record.data().iter().for_each(|part| bytes.extend(*part));
                take(bytes);
            }
        }
    }

    fn stop(&mut self) -> io::Result<()> {
        visit_cpus(self.description.cpus.clone());
        self.samplers.iter_mut().try_for_each(|sampler| sampler.disable())
    }
}

/// Bytes of `perf_event_header`.
const RECORD_HEADER_BYTES: usize = 8;

/// A counter of an event on a CPU, for all processes, that is not enabled yet.
fn build_counter(event: u64, cpu: u32, flags: u64) -> io::Result<perf_event::Counter> {
    let has = |flag: u64| flags & flag != 0;
    let [comm, task] = [1 << 9, 1 << 13];
    Builder::new(Tracepoint::with_id(event))
        .any_pid()
        .one_cpu(cpu as usize)
        .include_kernel()
        .include_hv()
        .sample_period(1)
        .sample(SampleFlag::from_bits_retain(SAMPLE_FIELDS))
        .sample_id_all(true)
        .clockid(Clock::new(CLOCK as i32))
        .comm(has(comm))
        .task(has(task))
        .build()
}

/// Lets a thread run on each CPU, so that each has an event. CPUs on which this process may not run are left out.
fn visit_cpus(cpus: Vec<u32>) {
    let (visited, finished) = mpsc::channel();
    let visitor = thread::Builder::new().name("cpu-visitor".to_owned());
    let visit = move || {
        for cpu in cpus.into_iter().map(|cpu| cpu as usize).filter(|&cpu| cpu < CpuSet::MAX_CPU) {
            let mut set = CpuSet::new();
            set.set(cpu);
            let _ = sched_setaffinity(None, &set);
        }
        let _ = visited.send(());
    };
    // Without it, the schedule lacks the CPUs that have no other event.
    if visitor.spawn(visit).is_ok() {
        let _ = finished.recv_timeout(VISIT_LIMIT);
    }
}

fn refusal(host: &LiveHost, event: &'static str, cpu: u32, error: io::Error) -> SchedulerTraceError {
    let paranoid = host.read("proc/sys/kernel/perf_event_paranoid");
    let paranoid =
        paranoid.map_or_else(|why| why.to_string(), |bytes| String::from_utf8_lossy(bytes.trim_ascii()).into());
    SchedulerTraceError::Refused { event, cpu, paranoid, error }
}

/// A directory of tracefs.
fn open_tracefs() -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    for path in TRACEFS_PATHS {
        let directory = openat(CWD, path, flags, Mode::empty());
        if let Ok(directory) = directory
            && statat(&directory, "events/header_page", AtFlags::empty()).is_ok()
        {
            return Ok(directory);
        }
    }
    let context = fsopen("tracefs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

fn describe(tracefs: &OwnedFd) -> io::Result<TraceDescription> {
    let read = |path: &str| -> io::Result<Vec<u8>> {
        let with_path = |error: io::Error| io::Error::new(error.kind(), format!("{path}: {error}"));
        let file = openat(tracefs, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        // In one large read: the kernel answers a second read of the headers with nothing.
        read_whole_file(File::from(file.map_err(|errno| with_path(errno.into()))?)).map_err(with_path)
    };
    let mut description = TraceDescription {
        header_page: read("events/header_page")?,
        header_event: read("events/header_event")?,
        ..TraceDescription::default()
    };
    for name in SCHEDULER_EVENTS {
        let path = format!("events/sched/{name}/id");
        let id = String::from_utf8_lossy(&read(&path)?).trim().parse();
        let id = id.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, format!("{path}: {error}")))?;
        let format = read(&format!("events/sched/{name}/format"))?;
        description.events.push(TracedEvent { name, id, format, sample_ids: Vec::new() });
    }
    Ok(description)
}

/// Raises this process's limit of open files, as far as it may. Too low a limit is told by the kernel's answer.
fn allow_open_files(count: u64) {
    let limit = getrlimit(Resource::Nofile);
    let wanted = count + OTHER_OPEN_FILES;
    if let Some(current) = limit.current.filter(|&current| current < wanted) {
        let raised = limit.maximum.map_or(wanted, |maximum| wanted.min(maximum)).max(current);
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(raised), maximum: limit.maximum });
    }
}
