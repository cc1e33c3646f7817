//! `pagefold vcpu gang`: schedules the vCPUs of virtual machines by a program for `sched_ext`.

use crate::command_line::{ProcessOptions, parse_duration};
use clap::{Args, ValueEnum};
use pagefold_gang::decide::gangs::NamedWeight;
use pagefold_gang::wire::VcpuPolicy;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  sudo pagefold vcpu gang --vm 'web*' --metric 'cat /run/requests-served'
                                                    until Ctrl-C, or until it shows that it does not help
  sudo pagefold vcpu gang --cgroup /machine.slice --keep
                                                    until Ctrl-C, without a comparison
  sudo pagefold vcpu gang --vm a --vm b --weight a=200 --keep
                                                    twice the CPU time for each vCPU of a
  sudo pagefold vcpu gang --pid 4711 --threads 'worker*' --keep --for 60s

The kernel returns to its own scheduler when this command ends, however it ends, and when a task waits longer than 5 s. \
It needs Linux 6.13 or later with CONFIG_SCHED_CLASS_EXT, and a pagefold built with --features gang.

Exit status: 0 ended as requested, 1 it did not help or was removed by the kernel, 2 failure.";

/// Arguments of `vcpu gang`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct GangArguments {
    /// How vCPUs are scheduled
    #[arg(long, value_enum, default_value_t = PolicyArgument::Gang)]
    policy: PolicyArgument,
    /// End after this time
    #[arg(long = "for", value_name = "TIME", value_parser = parse_duration)]
    duration: Option<Duration>,
    /// The share of CPU time for each vCPU of a VM, by its name or PID; 100 is usual. Else the weight of its cgroup counts
    #[arg(long, value_name = "VM=WEIGHT")]
    weight: Vec<NamedWeight>,
    /// Which threads are vCPUs, by their name, with * and ?. Else the names that virtual machine monitors use
    #[arg(long, value_name = "GLOB")]
    threads: Option<String>,
    /// Percent of the time in which ordinary tasks that use much CPU time may take all CPUs. They get half a slot each
    /// SLOT / 2 * 100 / PERCENT, which may be at most 500 ms
    #[arg(long, value_name = "PERCENT", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=90))]
    ordinary_share: u32,
    /// The length of a slot of the policy gang
    #[arg(long, value_name = "TIME", default_value = "8ms", value_parser = parse_duration)]
    slot: Duration,
    /// The shortest interval between two yields of a VM that go to a sibling; other yields go to whichever vCPU waits
    /// longest
    #[arg(long, value_name = "TIME", default_value = "4ms", value_parser = parse_duration)]
    yield_interval: Duration,
    /// Schedule only threads with the policy SCHED_EXT (`chrt --ext`); all others keep the kernel's scheduler, which
    /// then always runs them first
    #[arg(long)]
    only_sched_ext: bool,
    /// Run although cgroups limit CPU time (cpu.max): the kernel does not enforce that for threads that it schedules by
    /// sched_ext
    #[arg(long, conflicts_with = "only_sched_ext")]
    ignore_cpu_limits: bool,
    /// Leave gaps empty that no whole gang fits in
    #[arg(long)]
    no_gap_filling: bool,
    /// Schedule gangs also while a single virtual machine has several runnable vCPUs, and more of them than CPUs. Else the
    /// kernel's own scheduler has the virtual machines in that time. With --metric, the comparison decides instead
    #[arg(long, conflicts_with = "metric")]
    no_hand_over: bool,
    /// A command that prints a counter of work done, by which the scheduler is compared with the kernel's own. This or
    /// --keep is needed
    #[arg(long, value_name = "COMMAND", conflicts_with = "keep")]
    metric: Option<String>,
    /// Length of a window of the comparison
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_duration, conflicts_with = "keep")]
    window: Duration,
    /// Do not compare, and keep the scheduler
    #[arg(long)]
    keep: bool,
    /// Print JSON (see `pagefold schema vcpu-gang`)
    #[arg(long)]
    json: bool,
    /// Lose every vCPU that waits, to test the watchdog of the kernel
    #[arg(long, hide = true)]
    stall: bool,
    // Last, because its help heading applies to all options after it.
    #[command(flatten)]
    targets: ProcessOptions,
}

/// The policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PolicyArgument {
    /// Siblings wait on different CPUs
    Spread,
    /// As spread, and a vCPU that spins yields to a sibling only once an interval, else to another VM
    ThrottledYield,
    /// The runnable vCPUs of a VM run in one slot
    Gang,
}

impl From<PolicyArgument> for VcpuPolicy {
    fn from(policy: PolicyArgument) -> Self {
        match policy {
            PolicyArgument::Spread => Self::Spread,
            PolicyArgument::ThrottledYield => Self::ThrottledYield,
            PolicyArgument::Gang => Self::Gang,
        }
    }
}

/// Schedule until a signal, the end of the time, or the end of the scheduler.
#[cfg(not(all(feature = "gang", target_arch = "x86_64")))]
pub fn run(
    _options: &GangArguments,
    _global: &crate::command_line::GlobalOptions,
) -> anyhow::Result<crate::CommandOutcome> {
    anyhow::bail!(
        "this pagefold was built without the scheduler: build it with `cargo build --features gang` on x86-64"
    )
}

#[cfg(all(feature = "gang", target_arch = "x86_64"))]
pub use scheduling::run;

#[cfg(all(feature = "gang", target_arch = "x86_64"))]
mod scheduling {
    use super::GangArguments;
    use crate::command::recover::open_live_host;
    use crate::command_line::GlobalOptions;
    use crate::{CommandOutcome, host_selection, output, stop_signal};
    use anyhow::{Context, bail};
    use pagefold_base::process::Process;
    use pagefold_base::{Pid, ProcessId};
    use pagefold_census::{ProcessSelection, scan_scope};
    use pagefold_gang::decide::demand::{GangDemand, HandOver, mean_runnable};
    use pagefold_gang::decide::gangs::{self, Candidate, Gang, VcpuRule};
    use pagefold_gang::decide::{slots, trial};
    use pagefold_gang::program::{Counters, Program, ProgramSettings};
    use pagefold_gang::wire::{EndReason, GangReport, GangRunReport, TrialReport, VcpuPolicy};
    use pagefold_gang::{members, support, text};
    use pagefold_host::{Host, hold};
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    /// Interval between two looks at the threads of the virtual machines and at the state of the scheduler.
    const POLL_INTERVAL: Duration = Duration::from_millis(200);
    /// Looks at the state of the scheduler for each look at the threads.
    const POLLS_PER_REFRESH: u32 = 5;
    /// Windows of the comparison: four pairs.
    const TRIAL_WINDOWS: usize = 8;
    /// The time after which the comparison is repeated, because loads change.
    const TRIAL_INTERVAL: Duration = Duration::from_secs(3600);
    /// The slice of ordinary tasks, about that of the kernel's own scheduler (kernel/sched/fair.c).
    const SLICE: Duration = Duration::from_millis(4);

    /// Schedule until a signal, the end of the time, or the end of the scheduler.
    pub fn run(options: &GangArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
        if !options.targets.selects_some() {
            bail!("name the virtual machines: --vm GLOB, --pid N or --cgroup PATH");
        }
        if options.metric.is_none() && !options.keep {
            bail!(
                "the scheduler stays only if it helps: give --metric COMMAND, which prints a counter of work done, for \
                 the comparison with the kernel's own scheduler, or --keep to do without a comparison"
            );
        }
        check_times(options)?;
        let host = open_live_host(global)?;
        support::check(&*host)?;
        if !options.only_sched_ext && !options.ignore_cpu_limits {
            support::check_cpu_limits(&*host)?;
        }
        let rule = match &options.threads {
            Some(pattern) => VcpuRule::by_name(pattern).with_context(|| format!("--threads {pattern}"))?,
            None => VcpuRule::ByRole,
        };
        let selection = host_selection::process_selection(&options.targets, global)?;
        let found = find_processes(&*host, &selection, global)?;
        let candidates: Vec<Candidate> = found.iter().map(|(_, candidate)| candidate.clone()).collect();
        let mut gangs = gangs::form_gangs(&candidates, &rule, &options.weight)?;
        let processes = gangs.iter().filter_map(|gang| found.iter().find(|(id, _)| id.pid == gang.pid));
        let processes: Vec<ProcessId> = processes.map(|(id, _)| *id).collect();
        let settings = read_settings(&*host, options)?;
        for (process, gang) in processes.iter().zip(&mut gangs) {
            let Ok(handle) = hold(&*host, *process) else { continue };
            gang.home_node = members::read_home_node(&*handle, gang.vcpus.len(), &settings.node_cpus);
        }
        if let Some(command) = &options.metric {
            read_counter(command).context("the scheduler cannot be compared with the kernel's own")?;
        }
        let stop = stop_signal::stop_on_signal().context("cannot handle signals")?;
        let program = Program::load(&settings, &gangs)?;
        let mut scheduling = Scheduling {
            host: &*host,
            program,
            rule,
            processes,
            gangs,
            stop: &stop,
            end_at: options.duration.map(|duration| host.now() + duration),
            scheduled: Duration::ZERO,
            attached_at: None,
            handed_over: Duration::ZERO,
            handed_over_at: None,
            hand_over: options.hands_over().then(HandOver::default),
            observed_at: None,
            polls: 0,
        };
        scheduling.observe_demands();
        scheduling.attach()?;
        eprintln!("scheduling {} with the policy {}", describe(&scheduling.gangs), options.policy_name());
        let (end, trial) = scheduling.run(options.metric.as_deref(), options.window)?;
        scheduling.detach();
        scheduling.end_hand_over();
        let report = scheduling.report(options, end, trial)?;
        if options.json {
            output::print_stdout(&(serde_json::to_string_pretty(&report)? + "\n"))?;
        } else {
            output::print_stdout(&text::run_report(&report, output::stdout_style(global)))?;
        }
        Ok(match end {
            EndReason::Requested | EndReason::NoVms => CommandOutcome::Done,
            EndReason::DoesNotHelp | EndReason::Ejected => CommandOutcome::NegativeVerdict,
        })
    }

    fn check_times(options: &GangArguments) -> anyhow::Result<()> {
        let (slot, share) = (options.slot, options.ordinary_share);
        if !(Duration::from_millis(2)..=Duration::from_millis(100)).contains(&slot) {
            bail!("--slot must be between 2ms and 100ms");
        }
        let (interval, limit) = (slots::ordinary_interval(slot, share), slots::MAX_ORDINARY_INTERVAL);
        if interval > limit {
            bail!(
                "ordinary tasks would wait {} ms for each of their slots (--slot / 2 * 100 / --ordinary-share), and at \
                 most {} ms is allowed: give a shorter --slot, or --ordinary-share {} or more",
                interval.as_millis(),
                limit.as_millis(),
                slots::least_ordinary_share(slot)
            );
        }
        Ok(())
    }

    fn describe(gangs: &[Gang]) -> String {
        let vcpus: usize = gangs.iter().map(|gang| gang.vcpus.len()).sum();
        format!("{} virtual machines with {vcpus} vCPUs", gangs.len())
    }

    fn find_processes(
        host: &dyn Host,
        selection: &ProcessSelection,
        global: &GlobalOptions,
    ) -> anyhow::Result<Vec<(ProcessId, Candidate)>> {
        let read = |handle: &dyn pagefold_host::ProcessHandle, process: Process| {
            Ok((process.id, members::read_candidate(host, handle, &process)?))
        };
        let (found, unscanned) = scan_scope::inspect_selected(host, selection, read)?;
        host_selection::check_any_seen(host, !found.is_empty(), selection, &unscanned, global)?;
        Ok(found)
    }

    fn read_settings(host: &dyn Host, options: &GangArguments) -> anyhow::Result<ProgramSettings> {
        let possible = host.read("sys/devices/system/cpu/possible").context("cannot read the possible CPUs")?;
        let possible: pagefold_base::IdSet = String::from_utf8_lossy(&possible)
            .trim()
            .parse()
            .map_err(|error| anyhow::anyhow!("/sys/devices/system/cpu/possible: {error}"))?;
        let cpus = possible.iter().last().map_or(1, |last| last + 1);
        Ok(ProgramSettings {
            policy: options.policy.into(),
            cpus,
            node_cpus: members::read_node_cpus(host),
            ordinary_percent: options.ordinary_share,
            fills_gaps: !options.no_gap_filling,
            slot: options.slot,
            slice: SLICE,
            yield_interval: options.yield_interval,
            whole_host: !options.only_sched_ext,
            stalls: options.stall,
        })
    }

    /// Reads the counter of work done, by which the schedulers are compared.
    fn read_counter(command: &str) -> anyhow::Result<f64> {
        let output = std::process::Command::new("sh").args(["-c", command]).output();
        let output = output.with_context(|| format!("cannot run --metric {command:?}"))?;
        if !output.status.success() {
            bail!("--metric {command:?} failed: {}", output.status);
        }
        let text = String::from_utf8_lossy(&output.stdout);
        text.trim().parse().with_context(|| format!("--metric {command:?} printed {:?}, not a number", text.trim()))
    }

    impl GangArguments {
        fn policy_name(&self) -> pagefold_gang::wire::VcpuPolicy {
            self.policy.into()
        }

        /// Whether the kernel's own scheduler gets wide VMs. A comparison decides by itself.
        fn hands_over(&self) -> bool {
            self.policy_name() == VcpuPolicy::Gang && self.metric.is_none() && !self.no_hand_over
        }
    }

    struct Scheduling<'a> {
        host: &'a dyn Host,
        program: Program,
        rule: VcpuRule,
        processes: Vec<ProcessId>,
        gangs: Vec<Gang>,
        stop: &'a AtomicBool,
        end_at: Option<Instant>,
        scheduled: Duration,
        attached_at: Option<Instant>,
        handed_over: Duration,
        handed_over_at: Option<Instant>,
        /// Absent if the program keeps wide gangs.
        hand_over: Option<HandOver>,
        /// When the threads were read last, with the times that each gang's have run or waited.
        observed_at: Option<(Instant, Vec<BTreeMap<Pid, u64>>)>,
        polls: u32,
    }

    impl Scheduling<'_> {
        fn attach(&mut self) -> anyhow::Result<()> {
            self.program.attach()?;
            self.attached_at = Some(self.host.now());
            self.end_hand_over();
            Ok(())
        }

        fn end_hand_over(&mut self) {
            if let Some(since) = self.handed_over_at.take() {
                self.handed_over += self.host.now().saturating_duration_since(since);
            }
        }

        fn detach(&mut self) {
            self.program.detach();
            if let Some(since) = self.attached_at.take() {
                self.scheduled += self.host.now().saturating_duration_since(since);
            }
        }

        fn run(&mut self, counter: Option<&str>, window: Duration) -> anyhow::Result<(EndReason, Option<TrialReport>)> {
            let mut last_trial = None;
            loop {
                if let Some(counter) = counter {
                    let (end, trial) = self.run_trial(counter, window)?;
                    last_trial = trial.or(last_trial);
                    if let Some(end) = end {
                        return Ok((end, last_trial));
                    }
                }
                let until = counter.map(|_| self.host.now() + TRIAL_INTERVAL);
                if let Some(end) = self.wait(until)? {
                    return Ok((end, last_trial));
                }
            }
        }

        /// Alternates between the schedulers and judges. Ends attached if the scheduler helps.
        fn run_trial(
            &mut self,
            counter: &str,
            window: Duration,
        ) -> anyhow::Result<(Option<EndReason>, Option<TrialReport>)> {
            let mut rates = Vec::new();
            for number in 0..TRIAL_WINDOWS {
                match (trial::is_on(number), self.attached_at.is_some()) {
                    (true, false) => self.attach()?,
                    (false, true) => self.detach(),
                    _ => {}
                }
                let (start, before) = (self.host.now(), read_counter(counter)?);
                if let Some(end) = self.wait(Some(start + window))? {
                    return Ok((Some(end), trial::judge(counter, &rates)));
                }
                let seconds = self.host.now().saturating_duration_since(start).as_secs_f64();
                rates.push((read_counter(counter)? - before) / seconds.max(f64::MIN_POSITIVE));
            }
            let report = trial::judge(counter, &rates);
            let helps = report.as_ref().is_some_and(|report| report.helps);
            if let Some(report) = &report {
                let (on, off) = (&report.with_scheduler, &report.without_scheduler);
                eprintln!("compared: {:.2} times as much work; rates {on:.0?} with, {off:.0?} without", report.benefit);
            }
            if helps && self.attached_at.is_none() {
                self.attach()?;
            }
            Ok(((!helps).then_some(EndReason::DoesNotHelp), report))
        }

        /// Waits until a time, or until a reason to end. Looks for threads that began or ended meanwhile.
        /// The kernel's own scheduler has the VMs while gangs cannot help, unless a comparison decides.
        fn wait(&mut self, until: Option<Instant>) -> anyhow::Result<Option<EndReason>> {
            loop {
                let now = self.host.now();
                if self.stop.load(Ordering::SeqCst) || self.end_at.is_some_and(|end| now >= end) {
                    return Ok(Some(EndReason::Requested));
                }
                if self.attached_at.is_some() && self.program.counters()?.exit.is_some() {
                    return Ok(Some(EndReason::Ejected));
                }
                if until.is_some_and(|until| now >= until) {
                    return Ok(None);
                }
                let next = [until, self.end_at].into_iter().flatten().min();
                let left = next.map_or(POLL_INTERVAL, |next| next.saturating_duration_since(now));
                self.host.sleep(left.min(POLL_INTERVAL));
                self.polls += 1;
                if self.polls.is_multiple_of(POLLS_PER_REFRESH) {
                    if !self.refresh()? {
                        return Ok(Some(EndReason::NoVms));
                    }
                    let demands = self.observe_demands();
                    self.adapt(&demands)?;
                }
            }
        }

        /// Reads the threads again. Returns whether any process still runs.
        fn refresh(&mut self) -> anyhow::Result<bool> {
            for (process, gang) in self.processes.iter().zip(&mut self.gangs) {
                let threads = hold(self.host, *process).and_then(|handle| members::read_threads(self.host, &*handle));
                let is_vcpu = |(tid, name): (Pid, String)| self.rule.is_vcpu(&name).then_some(tid);
                gang.vcpus = threads.unwrap_or_default().into_iter().filter_map(is_vcpu).collect();
                gang.vcpus.sort_unstable();
            }
            self.program.set_gangs(&self.gangs)?;
            Ok(self.gangs.iter().any(|gang| !gang.vcpus.is_empty()))
        }

        /// What the VMs wanted since the last call. Empty at the first call.
        fn observe_demands(&mut self) -> Vec<GangDemand> {
            if self.hand_over.is_none() {
                return Vec::new();
            }
            let handles: Vec<_> = self.processes.iter().map(|process| hold(self.host, *process).ok()).collect();
            let pairs = || handles.iter().zip(&self.gangs);
            let times: Vec<BTreeMap<Pid, u64>> = pairs()
                .map(|(handle, gang)| {
                    handle
                        .as_ref()
                        .map_or_else(BTreeMap::new, |handle| members::read_thread_times(&**handle, &gang.vcpus))
                })
                .collect();
            let now = self.host.now();
            let Some((since, before)) = self.observed_at.replace((now, times)) else { return Vec::new() };
            let Some((_, after)) = &self.observed_at else { return Vec::new() };
            let interval = now.saturating_duration_since(since);
            let mut demands = Vec::new();
            for (((handle, gang), before), after) in pairs().zip(&before).zip(after) {
                let Some(handle) = handle else { continue };
                let Ok(usable_cpus) = members::count_usable_cpus(self.host, &**handle, &gang.vcpus) else { continue };
                demands.push(GangDemand { runnable_vcpus: mean_runnable(before, after, interval), usable_cpus });
            }
            demands
        }

        /// Attaches or detaches the program by what the VMs want.
        fn adapt(&mut self, demands: &[GangDemand]) -> anyhow::Result<()> {
            let Some(hand_over) = &mut self.hand_over else { return Ok(()) };
            match (hand_over.update(demands), self.attached_at.is_some()) {
                (true, true) => {
                    self.detach();
                    self.handed_over_at = Some(self.host.now());
                    eprintln!(
                        "handed over to the kernel's scheduler: a single virtual machine has several runnable vCPUs, and \
                         more of them than CPUs"
                    );
                }
                (false, false) => {
                    self.attach()?;
                    eprintln!("scheduling gangs again");
                }
                _ => {}
            }
            Ok(())
        }

        fn report(
            &self,
            options: &GangArguments,
            end: EndReason,
            trial: Option<TrialReport>,
        ) -> anyhow::Result<GangRunReport> {
            let Counters { exit, rotations, ordinary_slots, gangs: counters, .. } = self.program.counters()?;
            let milliseconds = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
            let gangs = self.gangs.iter().zip(counters).map(|(gang, counted)| GangReport {
                pid: gang.pid.0,
                name: gang.name.clone(),
                vcpus: u32::try_from(gang.vcpus.len()).unwrap_or(u32::MAX),
                weight: gang.weight,
                home_node: gang.home_node,
                cpu_ms: milliseconds(counted.cpu_time),
                slots: counted.slots,
                yields: counted.yields,
                directed_yields: counted.directed_yields,
            });
            Ok(GangRunReport {
                policy: options.policy.into(),
                end,
                ejection: exit.filter(|_| end == EndReason::Ejected),
                scheduled_ms: milliseconds(self.scheduled),
                handed_over_ms: milliseconds(self.handed_over),
                rotations,
                ordinary_slots,
                gangs: gangs.collect(),
                trial,
            })
        }
    }
}
