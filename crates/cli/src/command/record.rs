//! `pagefold record`: write a directory from which every read-only command can run again on another host.

mod page_lines;

use crate::command::numa_placement::NUMA_BALANCING_FILE;
use crate::command::record::page_lines::PageLineBuilder;
use crate::command_line::{
    GlobalOptions, GuestAgentOptions, MonitorOptions, ProcessOptions, parse_bytes, parse_duration,
};
use crate::{CommandOutcome, host_selection, output, progress, stop_signal};
use anyhow::{Context, bail};
use clap::Args;
use pagefold_base::domain::DomainRule;
use pagefold_base::identity::Identity;
use pagefold_base::identity::virtual_nodes::passed_through_devices;
use pagefold_base::identity::{Monitor, Vm};
use pagefold_base::ksm::Setting;
use pagefold_base::tuner::identify_tuner;
use pagefold_base::{Bytes, Pid, ProcessId};
use pagefold_census::results::Census;
use pagefold_census::{Hasher, PageIndex, ProcessSelection};
use pagefold_daemon::run::utc_offset;
use pagefold_doctor::decide::examine_host;
use pagefold_doctor::{doctor_facts, guest_facts};
use pagefold_host::guest_agent::AgentAccess;
use pagefold_host::knob::Knob;
use pagefold_host::ksmd_thread::KsmdThread;
use pagefold_host::observe::{self, NumaNodes};
use pagefold_host::qemu_monitor::{MonitorAccess, ask_monitors};
use pagefold_host::transaction::session::read_boot_id;
use pagefold_host::{Host, memory_headroom};
use pagefold_merge::policy;
use pagefold_numa::map::{read_device_node, read_uptime_ticks};
use pagefold_numa::placement_record::read_counters;
use pagefold_numa::threads::read_threads;
use pagefold_numa::topology::Topology;
use pagefold_recording::HostRecorder;
use pagefold_recording::lines::format_content_line;
use pagefold_recording::trace::TraceWriter;
use pagefold_tune::facts as tune_facts;
use pagefold_vcpu::machines::find_machines;
use pagefold_vcpu::sample::read_recorded_sample;
use pagefold_vcpu::spread::read_cpus;
use std::collections::BTreeSet;
use std::fmt::Display;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

const EXAMPLES: &str = "\
Examples:
  pagefold record /tmp/host
  pagefold record --name 'qemu-*' /tmp/vms
  pagefold --host recording:/tmp/host census
  tar czf host.tar.gz -C /tmp host
  pagefold record --interval 1m --duration 8h --vm 'web-*' /var/tmp/day
  pagefold --host recording:/var/tmp/day daemon

The recording has fingerprints instead of page contents, under a key that is thrown away. From environments it has \
only the variables that name a job. It has the labels of containers, which may be sensitive. From command lines it has \
only the first word, except for virtual machines and programs that tune KSM. It has the vCPUs and memory backends that \
QEMU's monitors list. From libvirt's domains it has no passwords, secrets or metadata. Only you may read the \
directory; check its files before you share it.

With --guest-agent it has the answers of guest agents, for `doctor --guest-agent`. Monitors and agents of libvirt's \
machines are asked through libvirt, and only with --libvirt-monitor and --libvirt-agent: libvirt marks these machines \
as tainted until they end.";

/// The number of most frequent page contents whose kinds are recorded.
const MAX_CONTENT_KINDS: usize = 256;

/// Arguments of `record`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct RecordArguments {
    /// The directory to create; it must not exist, or must be empty
    directory: PathBuf,
    /// Pause between the two passes that detect volatile pages; 0 for one pass
    #[arg(long, value_name = "TIME", default_value = "500ms", value_parser = parse_duration)]
    pass_interval: Duration,
    /// Record repeatedly at this interval, as a trace; unchanged data is stored once
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    interval: Option<Duration>,
    /// With --interval: end after this time [default: none; a signal or --max-bytes ends it]
    #[arg(long, value_name = "TIME", value_parser = parse_duration, requires = "interval")]
    duration: Option<Duration>,
    /// With --interval: end when the trace has this size
    #[arg(long, value_name = "BYTES", default_value = "4GiB", value_parser = parse_bytes, requires = "interval")]
    max_bytes: Bytes,
    #[command(flatten)]
    monitors: MonitorOptions,
    #[command(flatten)]
    agents: GuestAgentOptions,
    #[command(flatten)]
    targets: ProcessOptions,
}

/// How often the stop flag is checked between two recordings.
const SIGNAL_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Make the recording.
pub fn run(options: &RecordArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let host = host_selection::open_host(global)?;
    let stop = stop_signal::stop_on_signal().context("cannot handle signals")?;
    let session = RecordingSession {
        host: &*host,
        hasher: host.page_hasher().context("cannot create a key for fingerprints")?,
        pass_interval: options.pass_interval,
        selection: host_selection::process_selection(&options.targets, global)?,
        monitors: options.monitors.access(),
        agents: options.agents.access(),
        stop: &stop,
        global,
    };
    match options.interval {
        Some(interval) => session.record_trace(options, interval),
        None => {
            let RecordingSummary { process_count, line_count, is_complete } =
                session.record_once(&options.directory, "", true)?;
            output::print_stdout(&format!(
                "Recorded {} with {line_count} lines of pages in {path}.\n\
                 Check the files, then attach them: tar czf recording.tar.gz -C {path} .\n",
                format_process_count(process_count),
                path = options.directory.display(),
            ))?;
            Ok(if is_complete { CommandOutcome::Done } else { CommandOutcome::Partial })
        }
    }
}

fn format_process_count(processes: usize) -> String {
    match processes {
        1 => "1 process".to_owned(),
        count => format!("{count} processes"),
    }
}

/// The state of one `record` command.
struct RecordingSession<'a> {
    host: &'a dyn Host,
    /// The same for all recordings of a trace, so that their contents can be compared.
    hasher: Hasher,
    pass_interval: Duration,
    selection: ProcessSelection,
    /// The ways to QEMU's monitors that may be used.
    monitors: MonitorAccess,
    /// The ways to agents within guests that may be used, if they are to be asked.
    agents: Option<AgentAccess>,
    stop: &'a AtomicBool,
    global: &'a GlobalOptions,
}

/// The result of one recording.
struct RecordingSummary {
    process_count: usize,
    line_count: usize,
    /// Whether all selected processes could be read.
    is_complete: bool,
}

impl RecordingSession<'_> {
    /// Record a trace until a signal, the time limit or the size limit ends it.
    fn record_trace(&self, options: &RecordArguments, interval: Duration) -> anyhow::Result<CommandOutcome> {
        if interval.is_zero() {
            bail!("--interval 0: the interval must be above 0");
        }
        let root = &options.directory;
        let error_context = || format!("cannot record into {}: name a new directory", root.display());
        let mut trace = TraceWriter::create(root).with_context(error_context)?;
        let (started, mut is_complete, mut max_processes) = (Instant::now(), true, 0);
        let end_reason = loop {
            let elapsed = started.elapsed();
            let now = SystemTime::now();
            let time = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            let time_lines = format!(
                "at_seconds = {:.3}\ntime = {:.3}\nutc_offset_seconds = {}\n",
                elapsed.as_secs_f64(),
                time.as_secs_f64(),
                utc_offset(now),
            );
            match self.record_once(&trace.next_folder(), &time_lines, trace.recording_count() == 0) {
                // An interrupted recording is incomplete.
                Ok(_) if self.stop.load(Ordering::Relaxed) => {
                    trace.discard_next();
                    break "a signal ended it";
                }
                Ok(summary) => {
                    trace.commit_next().with_context(|| format!("cannot write to {}", root.display()))?;
                    is_complete &= summary.is_complete;
                    max_processes = summary.process_count.max(max_processes);
                }
                Err(error) => {
                    trace.discard_next();
                    return Err(error);
                }
            }
            if trace.written_bytes() >= options.max_bytes.0 {
                break "the size limit is reached (--max-bytes)";
            }
            // If a recording takes longer than the interval, the next one starts at the next multiple of the interval.
            let next_start = interval * (elapsed.as_secs_f64() / interval.as_secs_f64()).floor() as u32 + interval;
            if options.duration.is_some_and(|duration| next_start >= duration) {
                break "the time limit is reached (--duration)";
            }
            while started.elapsed() < next_start && !self.stop.load(Ordering::Relaxed) {
                std::thread::sleep(SIGNAL_POLL_INTERVAL.min(next_start.saturating_sub(started.elapsed())));
            }
            if self.stop.load(Ordering::Relaxed) {
                break "a signal ended it";
            }
        };
        if trace.recording_count() == 0 {
            bail!("nothing was recorded: {end_reason}");
        }
        let count = trace.recording_count();
        output::print_stdout(&format!(
            "Recorded a trace of {count} recording{} of up to {} in {}, {}: {end_reason}.\n\
             To replay the daemon's decisions: pagefold --host recording:{} daemon\n",
            if count == 1 { "" } else { "s" },
            format_process_count(max_processes),
            root.display(),
            Bytes(trace.written_bytes()),
            root.display(),
        ))?;
        Ok(if is_complete { CommandOutcome::Done } else { CommandOutcome::Partial })
    }

    /// Record the host as it is now. `extra_lines` go to recording.toml. If `requires_process` is set, fail if no
    /// selected process could be read.
    fn record_once(&self, root: &Path, extra_lines: &str, requires_process: bool) -> anyhow::Result<RecordingSummary> {
        let host = self.host;
        let recorder = HostRecorder::new(host, root, is_command_line_kept)
            .with_context(|| format!("cannot record into {}: name a new directory", root.display()))?;
        let options = pagefold_census::CensusOptions {
            selection: self.selection.clone(),
            domains: DomainRule::default().into(),
            pass_interval: self.pass_interval,
            threads: std::thread::available_parallelism().map_or(1, Into::into),
            sample_probability: None,
            sample_seed: 0,
            max_top_contents: MAX_CONTENT_KINDS,
            max_matrix_rows: 0,
            matrix_row_kind: Default::default(),
            ..Default::default()
        };
        let (census, index) = progress::run_census_with_progress(host.page_size(), self.stop, |progress| {
            pagefold_census::take_census_with_hasher(&self.hasher, &recorder, &options, progress, self.stop)
        })?;
        host_selection::check_any_seen(
            host,
            !requires_process || !census.subjects.is_empty(),
            &options.selection,
            &census.unscanned,
            self.global,
        )?;
        recorder.restrict_to_pids(recorded_pids(host, &census));
        self.read_for_other_commands(&recorder, &census);
        let nodes = NumaNodes::read(&recorder).unwrap_or_default();
        let line_count = write_pages(&recorder, &census, &index, &nodes, root)?;
        write_lines(
            &root.join("contents.txt"),
            census.contents.iter().filter_map(|content| Some(format_content_line(content.fingerprint, content.kind?))),
        )?;
        let metadata = format!(
            "kernel = {:?}\narchitecture = {:?}\npagefold = {:?}\nsettle_seconds = {}\npartial = {}\n{extra_lines}",
            observe::kernel_release(&recorder).unwrap_or_default(),
            std::env::consts::ARCH,
            env!("CARGO_PKG_VERSION"),
            census.pass_interval.unwrap_or_default().as_secs_f64(),
            census.partial,
        );
        recorder.finish(&metadata).with_context(|| format!("cannot write to {}", root.display()))?;
        let is_complete = !census.partial && census.unscanned.is_empty();
        Ok(RecordingSummary { process_count: census.subjects.len(), line_count, is_complete })
    }

    /// Read the files that other commands read beyond a census. The recorder stores them, also if they are absent.
    fn read_for_other_commands(&self, recorder: &HostRecorder<'_>, census: &Census) {
        let mut facts = doctor_facts::gather_host_facts(recorder, &[], &Default::default());
        if let Some(agents) = self.agents {
            guest_facts::gather_guest_facts(recorder, facts.settings.vms.iter_mut(), agents);
        }
        for process in &facts.processes {
            if let Ok(handle) = recorder.open(process.process.id.pid) {
                let _ = observe::rollup(&*handle);
                let _ = handle.read("statm");
            }
        }
        let _ = observe::huge_page_bytes(recorder);
        // For `tune`.
        let machines: Vec<ProcessId> = facts.settings.vms.iter().map(|vm| vm.process).collect();
        let _ = tune_facts::read_possible_state(recorder, &facts, &examine_host(&facts), &machines);
        let _ = pagefold_tune::vcpus::check_vcpus(recorder, |_| true, self.monitors);
        // For `numa`.
        let _ = (read_uptime_ticks(recorder), observe::libvirt_domains(recorder), Topology::read(recorder));
        let _ = (read_boot_id(recorder), read_counters(recorder), recorder.read(NUMA_BALANCING_FILE));
        for arguments in census.subjects.iter().filter_map(|subject| subject.process.arguments.as_deref().ok()) {
            for address in passed_through_devices(arguments) {
                let _ = read_device_node(recorder, &address);
            }
        }
        for subject in &census.subjects {
            if let Ok(handle) = recorder.open(subject.process.id.pid) {
                let _ = read_threads(recorder, &*handle, true);
            }
        }
        let is_qemu = |vm: &Vm| vm.monitor == Monitor::Qemu;
        let machines =
            census.subjects.iter().filter(|subject| subject.process.identity.vm.as_ref().is_some_and(is_qemu));
        let machines: Vec<ProcessId> = machines.map(|subject| subject.process.id).collect();
        let _ = ask_monitors(recorder, &machines, self.monitors);
        // For `vcpu status`, whose counters of two recordings are compared.
        let pids = census.subjects.iter().map(|subject| subject.process.id.pid).collect();
        if let Ok((machines, _)) = find_machines(recorder, &ProcessSelection { pids, ..ProcessSelection::default() }) {
            let _ = (read_cpus(recorder), read_recorded_sample(recorder, &machines));
        }
        // For `policy show` and `unmerge --dry-run`.
        for setting in Setting::ALL {
            let _ = Knob::from(setting).read(recorder);
        }
        let _ = policy::observe_host(recorder);
        // For the daemon.
        let _ = observe::pressure(recorder);
        if let Ok(ksmd) = KsmdThread::find(self.host).and_then(|ksmd| recorder.open(ksmd.pid)) {
            let _ = ksmd.read("schedstat");
        }
        let cgroups = census.subjects.iter().filter_map(|subject| subject.process.cgroup.clone().ok()).collect();
        let _ = memory_headroom::cgroup_shortages(recorder, &cgroups);
    }
}

/// The processes of the census, and ksmd, whose CPU time the doctor reads.
fn recorded_pids(host: &dyn Host, census: &Census) -> BTreeSet<Pid> {
    let scanned = census.subjects.iter().map(|subject| subject.process.id.pid);
    scanned
        .chain(census.unscanned.iter().map(|process| process.pid))
        .chain(KsmdThread::find(host).map(|ksmd| ksmd.pid))
        .collect()
}

/// Whether a command line is recorded in full.
fn is_command_line_kept(comm: &str, arguments: &[String]) -> bool {
    identify_tuner(comm, arguments).is_some() || Identity::new(arguments, &Default::default(), None).vm.is_some()
}

/// Write the pages of every process and the frames of all processes. Returns the number of page lines.
fn write_pages(
    host: &dyn Host,
    census: &Census,
    index: &PageIndex,
    nodes: &NumaNodes,
    root: &Path,
) -> anyhow::Result<usize> {
    let mut pages = PageLineBuilder::new(host, index, nodes);
    // A process that has ended since keeps its recorded files, but has no pages.
    let mut lines: Vec<_> =
        (0..census.subjects.len()).map(|i| pages.process_lines(census, i).unwrap_or_default()).collect();
    let frames = pages.renumber_frames(&mut lines);
    for (subject, lines) in census.subjects.iter().zip(&lines) {
        write_lines(&root.join("pages").join(format!("{}.txt", subject.process.id.pid)), lines)?;
    }
    write_lines(&root.join("frames.txt"), frames)?;
    Ok(lines.iter().map(Vec::len).sum())
}

fn write_lines<T: Display>(path: &Path, lines: impl IntoIterator<Item = T>) -> anyhow::Result<()> {
    let write = || -> std::io::Result<()> {
        let mut file = BufWriter::new(File::create(path)?);
        for line in lines {
            writeln!(file, "{line}")?;
        }
        file.flush()
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}
