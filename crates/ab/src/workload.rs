//! Runs the commands of a workload and measures them, with an injected slow-down if the run has one.
//!
//! Each command is the leader of a process group in the session of this process. A slow-down stops the group with SIGSTOP
//! and continues it with SIGCONT, a few times in a run, so that the stopped time is the stated share of the running time
//! ([`crate::decide::injection`]). The time of a stop counts when all threads have stopped: one that waits for a CPU
//! behind another process loses nothing before ([`pagefold_sys::process_group`]). This slows wall time and throughput as
//! a slower machine would. It does not change the CPU time, so a control cannot be found in that metric. Processes that
//! leave the group are not slowed.
//!
//! If this process is killed while a group is stopped, its children get another parent. If that is the host's init or in
//! another session, the group is orphaned, and the kernel sends it SIGHUP and SIGCONT (kernel/exit.c,
//! `kill_orphaned_pgrp`). In a container whose first process is in this session, the group stays stopped until
//! `pagefold ab resume` ends it.

use crate::decide::injection::InjectionPlan;
use crate::metric::{self, MetricError};
use pagefold_host::Host;
use pagefold_sys::process_group::is_group_stopped;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};
use thiserror::Error;

/// The first wait for a group to stop. Each further one is twice as long, so that a group that stops at once, as most do,
/// is seen to stop at once, and one that waits for its CPU is not disturbed.
const FIRST_STOPPED_CHECK: Duration = Duration::from_micros(20);

/// The longest wait between two looks at a group that has not stopped yet.
const LONGEST_STOPPED_CHECK: Duration = Duration::from_micros(500);

/// How long threads may take to stop: longer than the other processes of a CPU run before it is the thread's turn. A
/// thread that waits for storage may take longer; then the time of the stop counts from here.
const LONGEST_WAIT_FOR_STOP: Duration = Duration::from_millis(100);

/// How often the wait for the end of a run looks for a stop request.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// One side of a run: all commands of the workload under one arm.
#[derive(Clone, Debug)]
pub struct Side {
    /// The commands with the arm's prefix.
    pub commands: Vec<Vec<String>>,
    /// Environment variables.
    pub environment: BTreeMap<String, String>,
    /// The injected slow-down; absent for none.
    pub injection: Option<InjectionPlan>,
    /// The CPUs to which the commands are restricted.
    pub cpus: Option<Vec<usize>>,
}

/// A number that is read during the run.
pub struct SampledMetric<'a> {
    /// The time between two readings.
    pub interval: Duration,
    /// Reads it.
    pub read: Box<dyn Fn() -> Result<f64, MetricError> + 'a>,
}

/// What a side of a run measured.
#[derive(Clone, Debug, PartialEq)]
pub struct SideResult {
    /// The start of its first command.
    pub began: Instant,
    /// The end of its last command.
    pub ended: Instant,
    /// CPU time of the commands.
    pub cpu: Duration,
    /// How long the commands were stopped by the injection.
    pub stopped: Duration,
    /// Standard output and error of the commands, in their order.
    pub output: String,
}

impl SideResult {
    /// From the start of the first command to the end of the last.
    #[must_use]
    pub fn wall(&self) -> Duration {
        self.ended.saturating_duration_since(self.began)
    }
}

/// Why a run gave no result.
#[derive(Debug, Error)]
pub enum RunError {
    /// A command did not start.
    #[error("cannot start {program:?}")]
    NotStarted {
        /// The program.
        program: String,
        /// The reason.
        source: io::Error,
    },
    /// A command failed.
    #[error("{program:?} ended with {status}; its output is in {}", output.display())]
    Failed {
        /// The program.
        program: String,
        /// How it ended.
        status: std::process::ExitStatus,
        /// The file with its output.
        output: PathBuf,
    },
    /// The run took too long.
    #[error("the run was not finished after {0:?}; give it more time with --timeout")]
    TimedOut(Duration),
    /// A signal asked to stop.
    #[error("stopped by a signal; `pagefold ab resume` continues")]
    Stopped,
    /// A metric could not be read.
    #[error(transparent)]
    Metric(#[from] MetricError),
    /// Files or processes.
    #[error("{what}")]
    System {
        /// What failed.
        what: &'static str,
        /// The reason.
        source: io::Error,
    },
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> RunError {
    move |source| RunError::System { what, source }
}

/// The children of a run. Dropping it kills their groups and reaps them.
struct RunningCommands {
    children: Vec<StartedCommand>,
}

struct StartedCommand {
    child: Child,
    side: usize,
    program: String,
    output: PathBuf,
    /// When it ended, once it has. It is not reaped before the run ends, so its number stays its own.
    ended: Option<Instant>,
    is_reaped: bool,
}

impl RunningCommands {
    /// Whether a command of a side has not ended.
    fn is_side_running(&self, side: usize) -> bool {
        self.children.iter().any(|command| command.side == side && command.ended.is_none())
    }
}

impl StartedCommand {
    fn group(&self) -> Option<Pid> {
        Pid::from_raw(self.child.id().cast_signed())
    }

    fn signal(&self, signal: Signal) {
        if !self.is_reaped
            && let Some(group) = self.group()
        {
            // The group may have no member that can be signaled any more.
            let _ = kill_process_group(group, signal);
        }
    }
}

impl Drop for RunningCommands {
    fn drop(&mut self) {
        for command in &mut self.children {
            command.signal(Signal::KILL);
            if !command.is_reaped {
                let _ = command.child.wait();
            }
        }
    }
}

/// Runs the sides at the same time until all commands have ended.
///
/// `note_started` gets the process numbers before the wait begins. `samples` are read by intervals during the run.
///
/// # Errors
/// A command that does not start or does not succeed, a timeout, a stop request, a metric that cannot be read. All
/// processes of the groups are ended then.
pub fn run_sides(
    sides: &[Side],
    output_directory: &Path,
    timeout: Duration,
    stop: &AtomicBool,
    samples: &[SampledMetric<'_>],
    note_started: &mut dyn FnMut(&[u32]) -> io::Result<()>,
) -> Result<(Vec<SideResult>, Vec<Vec<f64>>), RunError> {
    let begin = Instant::now();
    let mut running = RunningCommands { children: Vec::new() };
    let begun = start_sides(sides, output_directory, &mut running)?;
    let pids: Vec<u32> = running.children.iter().map(|command| command.child.id()).collect();
    note_started(&pids).map_err(system("cannot record the processes of the run"))?;
    let (sender, ends) = mpsc::channel();
    for (position, &pid) in pids.iter().enumerate() {
        let sender = sender.clone();
        // The thread ends with the child: `Drop` kills it.
        thread::spawn(move || {
            let Some(pid) = Pid::from_raw(pid.cast_signed()) else { return };
            while matches!(
                waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT),
                Err(rustix::io::Errno::INTR)
            ) {}
            let _ = sender.send((position, Instant::now()));
        });
    }
    let mut injections: Vec<Injection> = sides.iter().zip(&begun).map(Injection::new).collect();
    let mut readings: Vec<Vec<f64>> = vec![Vec::new(); samples.len()];
    let mut due: Vec<Instant> = samples.iter().map(|sample| begin + sample.interval).collect();
    while running.children.iter().any(|command| command.ended.is_none()) {
        let now = Instant::now();
        let stops = injections.iter().enumerate().filter(|(side, _)| running.is_side_running(*side));
        let stops = stops.filter_map(|(_, injection)| injection.next_stop());
        let moments = due.iter().copied().chain(stops);
        let wait = moments.map(|due| due.saturating_duration_since(now)).fold(STOP_CHECK_INTERVAL, Duration::min);
        match ends.recv_timeout(wait) {
            Ok((position, ended)) => running.children[position].ended = Some(ended),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                for (side, injection) in injections.iter_mut().enumerate() {
                    injection.stop_if_due(&running, side);
                }
            }
        }
        if stop.load(Ordering::Relaxed) {
            return Err(RunError::Stopped);
        }
        if begin.elapsed() > timeout {
            return Err(RunError::TimedOut(timeout));
        }
        read_due(samples, &mut due, &mut readings)?;
    }
    let stopped: Vec<Duration> = injections.iter().map(|injection| injection.stopped).collect();
    Ok((collect_results(&mut running, &begun, &stopped)?, readings))
}

/// Starts the commands of all sides. Returns when each side began.
fn start_sides(
    sides: &[Side],
    output_directory: &Path,
    running: &mut RunningCommands,
) -> Result<Vec<Instant>, RunError> {
    let mut begun = Vec::new();
    for (number, side) in sides.iter().enumerate() {
        let _affinity =
            side.cpus.as_deref().map(RestrictedThread::new).transpose().map_err(system("cannot set CPUs"))?;
        begun.push(Instant::now());
        for words in &side.commands {
            let position = running.children.len();
            running.children.push(start_command(words, &side.environment, output_directory, number, position)?);
        }
    }
    Ok(begun)
}

/// Reaps the commands, which have ended, and what they left running. Each side began and was stopped for the given time.
fn collect_results(
    running: &mut RunningCommands,
    begun: &[Instant],
    stopped: &[Duration],
) -> Result<Vec<SideResult>, RunError> {
    let mut results = Vec::new();
    for (number, (&began, &stopped)) in begun.iter().zip(stopped).enumerate() {
        let mut result = SideResult { began, ended: began, cpu: Duration::ZERO, stopped, output: String::new() };
        for command in running.children.iter_mut().filter(|command| command.side == number) {
            // What the command left running must not disturb the next run.
            command.signal(Signal::KILL);
            let (status, cpu) = pagefold_sys::child::wait_with_cpu_time(command.child.id())
                .map_err(system("cannot wait for a command"))?;
            command.is_reaped = true;
            if !status.success() {
                let (program, output) = (command.program.clone(), command.output.clone());
                return Err(RunError::Failed { program, status, output });
            }
            result.ended = result.ended.max(command.ended.unwrap_or_else(Instant::now));
            result.cpu += cpu;
            let bytes = std::fs::read(&command.output).map_err(system("cannot read the output of a command"))?;
            result.output.push_str(&String::from_utf8_lossy(&bytes));
        }
        results.push(result);
    }
    Ok(results)
}

/// Observes the host for a time without running a command.
///
/// # Errors
/// A stop request, or a metric that cannot be read.
pub fn observe(
    host: &dyn Host,
    duration: Duration,
    stop: &AtomicBool,
    samples: &[SampledMetric<'_>],
) -> Result<Vec<Vec<f64>>, RunError> {
    let begin = Instant::now();
    let mut readings: Vec<Vec<f64>> = vec![Vec::new(); samples.len()];
    let mut due: Vec<Instant> = samples.iter().map(|sample| begin + sample.interval).collect();
    while begin.elapsed() < duration {
        if stop.load(Ordering::Relaxed) {
            return Err(RunError::Stopped);
        }
        let now = Instant::now();
        let rest = duration.saturating_sub(begin.elapsed()).min(STOP_CHECK_INTERVAL);
        host.sleep(due.iter().map(|due| due.saturating_duration_since(now)).fold(rest, Duration::min));
        read_due(samples, &mut due, &mut readings)?;
    }
    Ok(readings)
}

fn read_due(samples: &[SampledMetric<'_>], due: &mut [Instant], readings: &mut [Vec<f64>]) -> Result<(), MetricError> {
    for (position, sample) in samples.iter().enumerate() {
        if due[position] <= Instant::now() {
            readings[position].push((sample.read)()?);
            due[position] = Instant::now() + sample.interval;
        }
    }
    Ok(())
}

/// The injected slow-down of a side, as far as it is carried out.
struct Injection {
    plan: Option<InjectionPlan>,
    begin: Instant,
    stops: u32,
    stopped: Duration,
}

impl Injection {
    fn new((side, &begin): (&Side, &Instant)) -> Self {
        Self { plan: side.injection, begin, stops: 0, stopped: Duration::ZERO }
    }

    /// When the side stops next.
    fn next_stop(&self) -> Option<Instant> {
        Some(self.begin + self.stopped + self.plan?.running_time_before_stop(self.stops))
    }

    /// Stops the groups of the side if it is time. The time counts from the moment at which all of them have stopped, as
    /// exactly as the looks at them tell.
    fn stop_if_due(&mut self, running: &RunningCommands, side: usize) {
        let Some(plan) = self.plan else { return };
        if self.next_stop().is_none_or(|due| due > Instant::now()) || !running.is_side_running(side) {
            return;
        }
        let groups = || running.children.iter().filter(move |command| command.side == side && command.ended.is_none());
        let signaled = Instant::now();
        groups().for_each(|command| command.signal(Signal::STOP));
        let (mut ran_at, mut wait) = (signaled, FIRST_STOPPED_CHECK);
        loop {
            let look = Instant::now();
            if groups().all(|command| is_group_stopped(command.child.id()))
                || signaled.elapsed() >= LONGEST_WAIT_FOR_STOP
            {
                break;
            }
            ran_at = look;
            thread::sleep(wait);
            wait = (wait * 2).min(LONGEST_STOPPED_CHECK);
        }
        // The group stopped between the last look that saw it run and this one.
        let from = ran_at + ran_at.elapsed() / 2;
        let until = from + plan.stop_length(self.stops, self.stopped);
        thread::sleep(until.saturating_duration_since(Instant::now()));
        groups().for_each(|command| command.signal(Signal::CONT));
        self.stopped += from.elapsed();
        self.stops += 1;
    }
}

/// Restricts the calling thread, and so the children that it starts, to CPUs until it is dropped.
struct RestrictedThread {
    previous: CpuSet,
}

impl RestrictedThread {
    fn new(cpus: &[usize]) -> io::Result<Self> {
        let previous = sched_getaffinity(None)?;
        let mut set = CpuSet::new();
        for &cpu in cpus.iter().filter(|&&cpu| cpu < CpuSet::MAX_CPU) {
            set.set(cpu);
        }
        sched_setaffinity(None, &set)?;
        Ok(Self { previous })
    }
}

impl Drop for RestrictedThread {
    fn drop(&mut self) {
        // It was in force before, so the kernel accepts it unless the CPUs are gone; then it has chosen others itself.
        let _ = sched_setaffinity(None, &self.previous);
    }
}

fn start_command(
    words: &[String],
    environment: &BTreeMap<String, String>,
    output_directory: &Path,
    side: usize,
    position: usize,
) -> Result<StartedCommand, RunError> {
    let program = words.first().cloned().unwrap_or_default();
    let output = output_directory.join(format!("command-{position}.txt"));
    let open = |append: bool| -> io::Result<File> {
        OpenOptions::new().create(true).write(true).truncate(!append).append(append).open(&output)
    };
    // Both streams append, so that neither overwrites the other.
    open(false).map_err(system("cannot write the output of a command"))?;
    let stdout = open(true).map_err(system("cannot write the output of a command"))?;
    let stderr = stdout.try_clone().map_err(system("cannot write the output of a command"))?;
    let child = Command::new(&program)
        .args(&words[1..])
        .envs(environment)
        .stdin(Stdio::null())
        .stdout(stdout)
        .stderr(stderr)
        .process_group(0)
        .spawn()
        .map_err(|source| RunError::NotStarted { program: program.clone(), source })?;
    Ok(StartedCommand { child, side, program, output, ended: None, is_reaped: false })
}

/// The value of a metric that is read once after the run.
///
/// # Errors
/// If it cannot be read.
pub fn read_once(host: &dyn Host, source: &crate::experiment::MetricSource) -> Result<f64, MetricError> {
    use crate::experiment::MetricSource;
    match source {
        MetricSource::Prometheus { url, query } => metric::query_prometheus(url, query),
        MetricSource::File { path } => metric::read_file_number(host, path),
        // The others are measured by the run itself.
        MetricSource::WallTime | MetricSource::CpuTime | MetricSource::Pattern { .. } => Ok(f64::NAN),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::injection::EarlierRuns;

    fn side(script: &str, injection: Option<InjectionPlan>) -> Side {
        let commands = vec![["sh", "-c", script].map(str::to_owned).to_vec()];
        Side { commands, environment: BTreeMap::from([("X".into(), "7".into())]), injection, cpus: None }
    }

    fn run(sides: &[Side], timeout: Duration) -> Result<Vec<SideResult>, RunError> {
        let directory = tempfile::tempdir().unwrap();
        let stop = AtomicBool::new(false);
        run_sides(sides, directory.path(), timeout, &stop, &[], &mut |_| Ok(())).map(|(results, _)| results)
    }

    const RUN_TIMEOUT: Duration = Duration::from_secs(60);

    #[test]
    fn output_of_all_commands_is_kept() {
        let mut side = side("echo out $X; echo err >&2", None);
        side.commands.push(vec!["echo".to_owned(), "second".to_owned()]);
        let results = run(&[side], RUN_TIMEOUT).unwrap();
        assert_eq!(results[0].output, "out 7\nerr\nsecond\n");
    }

    /// About 0.15 s of counting on a CPU of its own.
    const COUNTING: &str = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done";

    /// The stopped time is compared with the running time, which a loaded machine stretches alike.
    #[test]
    fn injection_stops_the_stated_share_of_the_running_time() {
        let plain = &run(&[side(COUNTING, None)], RUN_TIMEOUT).unwrap()[0];
        assert_eq!(plain.stopped, Duration::ZERO);
        for expected in [None, Some(plain.wall())] {
            let plan = InjectionPlan::new(50, expected);
            let result = &run(&[side(COUNTING, Some(plan))], RUN_TIMEOUT).unwrap()[0];
            let ran = result.wall().saturating_sub(result.stopped).as_secs_f64();
            let share = result.stopped.as_secs_f64() / ran;
            assert!(share > 0.2 && result.stopped < result.wall(), "{expected:?}, {share}: {result:?}");
        }
    }

    /// CPU time of a process in seconds: the first field of `schedstat` has nanoseconds (Documentation/scheduler/sched-stats.rst).
    fn cpu_seconds(pid: u32) -> f64 {
        let text = std::fs::read_to_string(format!("/proc/{pid}/schedstat")).unwrap();
        text.split_whitespace().next().unwrap().parse::<f64>().unwrap() / 1e9
    }

    /// A process that ends with its guard.
    struct Competitor(Child);

    impl Drop for Competitor {
        fn drop(&mut self) {
            let _ = self.0.kill().and_then(|()| self.0.wait());
        }
    }

    /// The command, its competitor and this thread share one CPU. The time of a run is that in which either of the two
    /// processes ran, so that other work on the CPU does not count.
    #[test]
    fn injection_slows_a_command_that_shares_its_cpu() {
        const PERCENT: u32 = 30;
        let cpus = sched_getaffinity(None).unwrap();
        let cpu = (0..CpuSet::MAX_CPU).find(|&cpu| cpus.is_set(cpu)).unwrap();
        let _affinity = RestrictedThread::new(&[cpu]).unwrap();
        let competitor = Competitor(Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap());
        let mut earlier = EarlierRuns::default();
        let mut measure = |percent: u32| {
            let injection = (percent > 0).then(|| earlier.plan_injection(percent));
            let before = cpu_seconds(competitor.0.id());
            let result = run(&[side(COUNTING, injection)], RUN_TIMEOUT).unwrap().remove(0);
            earlier.add(percent, result.wall() - result.stopped, result.stopped);
            // The CPU time of the command itself changes with the frequency and the caches of the CPU.
            let own = result.cpu.as_secs_f64();
            (cpu_seconds(competitor.0.id()) - before + own) / own
        };
        let ratios: Vec<f64> = (0..8)
            .map(|_| {
                let plain = measure(0);
                measure(PERCENT) / plain
            })
            .collect();
        let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
        assert!(mean > 1.0 + f64::from(PERCENT) / 300.0, "{mean}: {ratios:?}");
    }

    #[test]
    fn failed_command_ends_the_run_with_its_status() {
        let error = run(&[side("exit 3", None)], RUN_TIMEOUT).unwrap_err().to_string();
        assert!(error.contains("exit status: 3"), "{error}");
        assert!(matches!(run(&[side("sleep 60", None)], Duration::from_millis(50)), Err(RunError::TimedOut(_))));
    }

    #[test]
    fn background_process_of_a_run_ends_with_it() {
        let result = &run(&[side("sleep 1000 & echo $!", None)], RUN_TIMEOUT).unwrap()[0];
        let pid: u32 = result.output.trim().parse().unwrap();
        let is_gone = || match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            Err(_) => true,
            Ok(stat) => stat.contains(") Z "),
        };
        while !is_gone() {
            thread::sleep(Duration::from_millis(5));
        }
    }
}
