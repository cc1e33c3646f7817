//! The event loop: CPUs, vCPUs, locks of guests, timer ticks, wake-ups and balancing.
//!
//! Each CPU has at most one pending activity and a tick. A vCPU that spins without pause-loop exits causes no events,
//! so that the number of events follows the operations and the exits, not the time.

mod balancing;
#[cfg(test)]
mod checks;
mod guests;

use super::event_queue::{EventQueue, NO_EVENT_TIME};
use super::gang::GangClock;
use super::outcome::{Outcome, SimulatedRun, VmOutcome};
use super::random::RandomSource;
use super::run_queue::{Entity, NO_VCPU, RunQueue};
use super::workload::{LockKind, Workload};
use super::{Kernel, Scenario, SchedulingPolicy, VmSpec};
use std::collections::VecDeque;

/// Ticks between two attempts to balance the queue of a CPU.
const BALANCE_TICKS: u32 = 8;

/// Event sources besides CPUs and timers of vCPUs: the gang clock and the end of the warm-up.
const CONTROL_SOURCES: usize = 2;

/// How a scenario is simulated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SimulationSettings {
    /// The modeled kernel.
    pub kernel: Kernel,
    /// The policy.
    pub policy: SchedulingPolicy,
    /// Measured time, in nanoseconds.
    pub duration_ns: u64,
    /// Time before the measurement starts, in nanoseconds.
    pub warm_up_ns: u64,
    /// Seed of all random numbers.
    pub seed: u64,
    /// From which time on the schedule is kept, and how long, in nanoseconds since the end of the warm-up.
    pub kept_schedule_ns: Option<(u64, u64)>,
}

impl SimulationSettings {
    /// Settings with a warm-up of a tenth of the time, at most a second, and no schedule.
    pub fn new(kernel: Kernel, policy: SchedulingPolicy, duration_ns: u64, seed: u64) -> Self {
        let warm_up_ns = (duration_ns / 10).min(1_000_000_000);
        Self { kernel, policy, duration_ns, warm_up_ns, seed, kept_schedule_ns: None }
    }
}

/// Simulate a scenario.
pub fn simulate(scenario: &Scenario, settings: &SimulationSettings) -> Outcome {
    let mut simulation = Simulation::new(scenario, settings);
    simulation.run();
    simulation.into_outcome()
}

/// What the pending activity of a CPU is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Activity {
    /// Nothing: idle, or a vCPU spins without an end.
    None,
    /// The timed phase of the running vCPU ends.
    PhaseEnd,
    /// The spinning phase of a para-virtual lock ends: the vCPU halts.
    SpinLimit,
    /// The spin window ended and the vCPU has exited: the host may choose a candidate.
    ExitDone,
    /// The locks of both run queues are released.
    LocksDone,
    /// The exit is handled: the guest goes on.
    EnterGuest,
}

/// What a vCPU does within its guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// It computes outside of critical sections.
    Think,
    /// It holds the lock.
    Critical,
    /// It waits for the lock.
    Spin,
    /// It sends interrupts to its siblings.
    SendInterrupts,
    /// It waits until preempted siblings have handled the interrupt.
    AwaitSiblings,
}

/// Where a vCPU is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// On a CPU.
    Running,
    /// In the run queue of a CPU.
    Queued,
    /// Runnable, but its gang has no time slice.
    Parked,
    /// Halted.
    Halted,
}

/// One vCPU.
#[derive(Debug)]
pub(super) struct Vcpu {
    pub vm: u32,
    /// Its CPU, or the last one.
    pub cpu: u32,
    pub place: Place,
    pub phase: Phase,
    /// When the timed phase began to run, in nanoseconds.
    pub phase_since: u64,
    /// What remains of a timed phase, in nanoseconds.
    pub remaining: u64,
    /// The lock that it waits for or holds.
    pub lock: u32,
    /// Since when it waits, in nanoseconds.
    wait_since: u64,
    /// What remains until a para-virtual lock halts, in nanoseconds.
    pub pv_spin_left: u64,
    /// Whether it waits in a halted para-virtual lock.
    halted_in_lock: bool,
    /// Interrupts that preempted siblings have not handled yet.
    unhandled: u32,
    /// Siblings that wait for this vCPU to handle their interrupt.
    senders: Vec<u32>,
    /// When it became runnable without running, in nanoseconds.
    ready_since: u64,
    /// `spin_loop.in_spin_loop`
    pub in_spin_loop: bool,
    /// `spin_loop.dy_eligible`
    pub yield_eligible: bool,
    /// `ple_window`, in nanoseconds.
    pub spin_window: u64,
    /// The candidate whose run queue is being locked.
    pub candidate: u32,
    /// The CPU of that run queue.
    pub candidate_cpu: u32,
    /// The sibling at which the search for candidates goes on.
    pub search_next: u32,
    /// Siblings that the search has yet to look at.
    pub search_left: u32,
    /// Attempts that the search may still make.
    pub attempts_left: u32,
}

/// A spin lock of a guest.
#[derive(Debug)]
struct GuestLock {
    holder: u32,
    waiters: VecDeque<u32>,
}

/// One virtual machine.
#[derive(Debug)]
pub(super) struct VmState {
    pub first_vcpu: u32,
    pub vcpu_count: u32,
    pub weight: u64,
    workload: Workload,
    /// Probability of a shootdown, in parts of 2^32.
    shootdown: u64,
    locks: Vec<GuestLock>,
    pub runnable: u32,
    pub running: u32,
    counted_since: u64,
    pub last_boosted: u32,
    /// The end of the tick of the last directed yield, in nanoseconds.
    pub yields_from: u64,
    /// Whether the gang has the time slice.
    pub selected: bool,
    /// CPU time by the weight of all vCPUs, in nanoseconds (gangs).
    pub gang_vruntime: u64,
    /// CPU time that is not in `gang_vruntime` yet, in nanoseconds.
    pub gang_uncharged: u64,
    pub outcome: VmOutcome,
}

/// One CPU of the host.
#[derive(Debug)]
pub(super) struct Cpu {
    pub current: u32,
    last: u32,
    pub activity: Activity,
    activity_at: u64,
    next_tick: u64,
    /// Until when CPU time is charged, in nanoseconds.
    charged_until: u64,
    started_at: u64,
    need_resched: bool,
    pub queue: RunQueue,
    /// When the lock of the run queue is free, in nanoseconds.
    lock_free_at: u64,
    /// Locks of this queue that are held or waited for.
    lock_users: u32,
    tick_count: u32,
    idle_since: u64,
}

impl Vcpu {
    /// The vCPU with this number, which begins to think.
    fn new(vm: u32, number: u32, spec: &VmSpec, spin_window_ns: u64, think_ns: u64) -> Self {
        Self {
            vm,
            cpu: 0,
            place: Place::Parked,
            phase: Phase::Think,
            phase_since: 0,
            remaining: think_ns,
            lock: 0,
            wait_since: 0,
            pv_spin_left: 0,
            halted_in_lock: false,
            unhandled: 0,
            senders: Vec::with_capacity(spec.vcpus as usize),
            ready_since: 0,
            in_spin_loop: false,
            yield_eligible: false,
            spin_window: spin_window_ns,
            candidate: NO_VCPU,
            candidate_cpu: 0,
            search_next: number,
            search_left: 0,
            attempts_left: 0,
        }
    }

    /// Whether it has not handled an interrupt of a sibling yet.
    pub(super) fn has_interrupt(&self) -> bool {
        !self.senders.is_empty()
    }
}

impl VmState {
    fn new(first_vcpu: u32, spec: &VmSpec) -> Self {
        Self {
            first_vcpu,
            vcpu_count: spec.vcpus,
            weight: spec.weight,
            workload: spec.workload,
            shootdown: (spec.workload.shootdown_probability.clamp(0.0, 1.0) * (1u64 << 32) as f64) as u64,
            locks: (0..spec.workload.locks)
                .map(|_| GuestLock { holder: NO_VCPU, waiters: VecDeque::with_capacity(spec.vcpus as usize) })
                .collect(),
            runnable: spec.vcpus,
            running: 0,
            counted_since: 0,
            last_boosted: 0,
            yields_from: 0,
            selected: false,
            gang_vruntime: 0,
            gang_uncharged: 0,
            outcome: VmOutcome::default(),
        }
    }
}

impl Cpu {
    /// An idle CPU. `tick_count` is the number of ticks since its last balance.
    fn new(kernel: Kernel, vcpu_count: usize, tick_count: u32) -> Self {
        Self {
            current: NO_VCPU,
            last: NO_VCPU,
            activity: Activity::None,
            activity_at: NO_EVENT_TIME,
            next_tick: NO_EVENT_TIME,
            charged_until: 0,
            started_at: 0,
            need_resched: false,
            queue: RunQueue::new(kernel.scheduler(), vcpu_count),
            lock_free_at: 0,
            lock_users: 0,
            tick_count,
            idle_since: 0,
        }
    }
}

/// A running simulation.
#[derive(Debug)]
pub(super) struct Simulation<'a> {
    pub scenario: &'a Scenario,
    settings: &'a SimulationSettings,
    pub policy: SchedulingPolicy,
    pub kernel: Kernel,
    pub now: u64,
    pub cpus: Vec<Cpu>,
    pub vcpus: Vec<Vcpu>,
    /// Until when each vCPU runs in guest mode, in nanoseconds: the end of its spin window, [`NO_EVENT_TIME`] if it does not
    /// spin, 0 if it does not run or the host handles its exit. Apart from [`Vcpu`] because a search reads many of them.
    pub guest_until: Vec<u64>,
    pub entities: Vec<Entity>,
    pub vms: Vec<VmState>,
    pub events: EventQueue,
    random: RandomSource,
    pub gang: GangClock,
    pub outcome: Outcome,
    kept: (u64, u64),
}

impl<'a> Simulation<'a> {
    fn new(scenario: &'a Scenario, settings: &'a SimulationSettings) -> Self {
        let vcpu_count = scenario.vcpu_count() as usize;
        let cpu_count = scenario.cpus as usize;
        let tick_ns = scenario.costs.tick_ns;
        let mut random = RandomSource::new(settings.seed);
        let cpus = (0..cpu_count)
            .map(|_| Cpu::new(settings.kernel, vcpu_count, random.below(u64::from(BALANCE_TICKS)) as u32))
            .collect();
        let mut vms = Vec::with_capacity(scenario.vms.len());
        let mut vcpus = Vec::with_capacity(vcpu_count);
        let mut entities = Vec::with_capacity(vcpu_count);
        for spec in &scenario.vms {
            let first_vcpu = vcpus.len() as u32;
            for index in 0..spec.vcpus {
                entities.push(Entity::new(spec.weight));
                let think_ns = random.exponential(spec.workload.think_ns.max(1));
                vcpus.push(Vcpu::new(
                    vms.len() as u32,
                    first_vcpu + index,
                    spec,
                    scenario.costs.spin_window_ns,
                    think_ns,
                ));
            }
            vms.push(VmState::new(first_vcpu, spec));
        }
        let halts = scenario.vms.iter().any(|vm| vm.workload.halt_ns > 0);
        let timers = if halts { vcpu_count } else { 0 };
        let (kept_from, kept_for) = settings.kept_schedule_ns.unwrap_or((NO_EVENT_TIME, 0));
        let kept_from = kept_from.saturating_add(settings.warm_up_ns);
        let mut simulation = Self {
            scenario,
            settings,
            policy: settings.policy,
            kernel: settings.kernel,
            now: 0,
            cpus,
            guest_until: vec![0; vcpus.len()],
            vcpus,
            entities,
            vms,
            events: EventQueue::new(cpu_count + CONTROL_SOURCES + timers),
            random,
            gang: GangClock::default(),
            outcome: Outcome::default(),
            kept: (kept_from, kept_from.saturating_add(kept_for)),
        };
        simulation.events.set(simulation.warm_up_source(), settings.warm_up_ns);
        if simulation.policy == SchedulingPolicy::Gang {
            simulation.start_gang_slice();
        } else {
            simulation.place_all(tick_ns);
        }
        simulation
    }

    /// The event source of the wake-up timer of a vCPU.
    fn timer_source(&self, vcpu: u32) -> usize {
        self.cpus.len() + CONTROL_SOURCES + vcpu as usize
    }

    /// The event source of the gang clock.
    pub(super) fn gang_source(&self) -> usize {
        self.cpus.len()
    }

    fn warm_up_source(&self) -> usize {
        self.cpus.len() + 1
    }

    /// Distribute all vCPUs evenly: at random, or without siblings on one queue as far as possible.
    fn place_all(&mut self, tick_ns: u64) {
        let cpu_count = self.cpus.len() as u64;
        let mut order: Vec<u32> = (0..self.vcpus.len() as u32).collect();
        if !self.policy.spreads_siblings() {
            for last in (1..order.len()).rev() {
                let other = self.random.below(last as u64 + 1) as usize;
                order.swap(last, other);
            }
        }
        for (position, vcpu) in order.into_iter().enumerate() {
            let cpu = (position as u64 % cpu_count) as usize;
            self.vcpus[vcpu as usize].cpu = cpu as u32;
            self.vcpus[vcpu as usize].place = Place::Queued;
            // Queues of a host that has run for a while are not in step.
            let offset = self.random.below(4 * tick_ns) as i64;
            self.entities[vcpu as usize].vruntime = offset;
            self.entities[vcpu as usize].deadline += offset;
            self.cpus[cpu].queue.put_back(vcpu);
        }
        for cpu in 0..self.cpus.len() {
            self.schedule(cpu);
        }
    }

    fn run(&mut self) {
        let end = self.settings.warm_up_ns + self.settings.duration_ns;
        loop {
            let (time, source) = self.events.earliest();
            if time >= end {
                break;
            }
            debug_assert!(time >= self.now, "events are in order");
            self.now = time;
            self.outcome.events += 1;
            if source < self.cpus.len() {
                let cpu = &self.cpus[source];
                if cpu.activity_at <= cpu.next_tick {
                    self.run_activity(source);
                } else {
                    self.tick(source);
                }
            } else if source == self.gang_source() {
                self.start_gang_slice();
            } else if source == self.warm_up_source() {
                self.events.set(source, NO_EVENT_TIME);
                self.end_warm_up();
            } else {
                self.events.set(source, NO_EVENT_TIME);
                self.wake((source - self.cpus.len() - CONTROL_SOURCES) as u32);
            }
        }
        self.now = end;
        self.settle_accounts();
    }

    /// Charge all running vCPUs and count idle times until now.
    pub(super) fn settle_accounts(&mut self) {
        for cpu in 0..self.cpus.len() {
            self.charge_current(cpu);
            if self.cpus[cpu].current == NO_VCPU {
                self.outcome.idle_ns += self.now - self.cpus[cpu].idle_since;
                self.cpus[cpu].idle_since = self.now;
            }
        }
        for vm in 0..self.vms.len() {
            self.count_co_run(vm);
        }
        for vcpu in 0..self.vcpus.len() {
            if matches!(self.vcpus[vcpu].place, Place::Queued | Place::Parked) {
                self.end_ready_time(vcpu as u32);
                self.vcpus[vcpu].ready_since = self.now;
            }
        }
    }

    fn end_warm_up(&mut self) {
        self.settle_accounts();
        self.outcome = Outcome { events: self.outcome.events, ..Outcome::default() };
        for vm in &mut self.vms {
            vm.outcome = VmOutcome::default();
        }
    }

    fn into_outcome(mut self) -> Outcome {
        for cpu in 0..self.cpus.len() {
            self.keep_interval(cpu);
        }
        self.outcome.simulated_ns = self.settings.duration_ns;
        self.outcome.vms = self.vms.iter().map(|vm| vm.outcome).collect();
        self.outcome.schedule.sort_by_key(|interval| (interval.start_ns, interval.cpu));
        self.outcome
    }

    // Accounting

    #[inline]
    fn count_co_run(&mut self, vm: usize) {
        let cpu_count = self.cpus.len() as u32;
        let vm = &mut self.vms[vm];
        if vm.running > 0 {
            let elapsed = self.now - vm.counted_since;
            vm.outcome.active_ns += elapsed;
            if vm.running >= vm.runnable.min(cpu_count) {
                vm.outcome.co_run_ns += elapsed;
            }
        }
        vm.counted_since = self.now;
    }

    #[inline]
    fn end_ready_time(&mut self, vcpu: u32) {
        let vcpu = &self.vcpus[vcpu as usize];
        self.vms[vcpu.vm as usize].outcome.ready_time_ns += self.now - vcpu.ready_since;
    }

    #[inline]
    pub(super) fn charge_current(&mut self, cpu: usize) {
        let state = &mut self.cpus[cpu];
        let elapsed = self.now - state.charged_until;
        state.charged_until = self.now;
        if state.current != NO_VCPU && elapsed > 0 {
            let current = state.current;
            let entity = &mut self.entities[current as usize];
            entity.charge(elapsed);
            let vm = &mut self.vms[self.vcpus[current as usize].vm as usize];
            vm.outcome.cpu_time_ns += elapsed;
            vm.gang_uncharged += elapsed;
        }
    }

    #[inline]
    fn keep_interval(&mut self, cpu: usize) {
        if self.now <= self.kept.0 {
            return;
        }
        let state = &self.cpus[cpu];
        let (start, end) = (state.started_at.max(self.kept.0), self.now.min(self.kept.1));
        if state.current != NO_VCPU && start < end {
            let vcpu = &self.vcpus[state.current as usize];
            self.outcome.schedule.push(SimulatedRun {
                cpu: cpu as u32,
                vm: vcpu.vm,
                vcpu: state.current - self.vms[vcpu.vm as usize].first_vcpu,
                start_ns: start - self.kept.0,
                end_ns: end - self.kept.0,
            });
        }
    }

    // Scheduling

    #[inline]
    pub(super) fn set_activity(&mut self, cpu: usize, at: u64, activity: Activity) {
        let state = &mut self.cpus[cpu];
        state.activity = activity;
        state.activity_at = at;
        self.events.set(cpu, at.min(state.next_tick));
    }

    fn tick(&mut self, cpu: usize) {
        let tick_ns = self.scenario.costs.tick_ns;
        let state = &mut self.cpus[cpu];
        state.next_tick += tick_ns;
        state.tick_count += 1;
        let balances = state.tick_count.is_multiple_of(BALANCE_TICKS);
        let next = state.activity_at.min(state.next_tick);
        self.events.set(cpu, next);
        self.charge_current(cpu);
        if self.policy == SchedulingPolicy::Gang && self.cpus[cpu].queue.queued.is_empty() {
            return;
        }
        if balances && self.policy != SchedulingPolicy::Gang {
            self.balance(cpu);
        }
        let state = &self.cpus[cpu];
        if state.queue.tick_ends_slice(state.current, &mut self.entities) {
            self.reschedule(cpu);
        }
    }

    /// Let a CPU choose again, at once or when the host has handled the exit of its vCPU.
    pub(super) fn reschedule(&mut self, cpu: usize) {
        let current = self.cpus[cpu].current;
        if current != NO_VCPU && !self.is_in_guest(current) {
            self.cpus[cpu].need_resched = true;
        } else {
            self.schedule(cpu);
        }
    }

    /// Leave guest mode: what remains of a timed phase is kept.
    pub(super) fn leave_guest(&mut self, vcpu: u32) {
        let now = self.now;
        let index = vcpu as usize;
        let vcpu = &mut self.vcpus[index];
        let was_in_guest = std::mem::take(&mut self.guest_until[index]) > 0;
        if was_in_guest && matches!(vcpu.phase, Phase::Think | Phase::Critical | Phase::SendInterrupts) {
            vcpu.remaining = vcpu.remaining.saturating_sub(now.saturating_sub(vcpu.phase_since)).max(1);
        }
    }

    /// Take the running vCPU, which was charged until now, off its CPU. It is queued, parked or halted afterwards.
    pub(super) fn stop_current(&mut self, cpu: usize, place: Place) {
        let vcpu = self.cpus[cpu].current;
        debug_assert_eq!(self.cpus[cpu].charged_until, self.now, "it was charged");
        self.leave_guest(vcpu);
        self.keep_interval(cpu);
        let vm = self.vcpus[vcpu as usize].vm as usize;
        self.count_co_run(vm);
        self.vms[vm].running -= 1;
        if place == Place::Halted {
            self.vms[vm].runnable -= 1;
        }
        let state = &mut self.vcpus[vcpu as usize];
        state.place = place;
        state.ready_since = self.now;
        if place == Place::Queued {
            self.cpus[cpu].queue.put_back(vcpu);
        }
        let state = &mut self.cpus[cpu];
        state.current = NO_VCPU;
        state.idle_since = self.now;
        state.need_resched = false;
    }

    /// Choose the vCPU that runs on a CPU from now on.
    pub(super) fn schedule(&mut self, cpu: usize) {
        self.cpus[cpu].need_resched = false;
        self.charge_current(cpu);
        let previous = self.cpus[cpu].current;
        if previous != NO_VCPU {
            if self.cpus[cpu].queue.queued.is_empty() {
                self.cpus[cpu].queue.skip_buddy = NO_VCPU;
                self.go_on(cpu, previous);
                return;
            }
            self.cpus[cpu].queue.put_back(previous);
        }
        let picked = self.cpus[cpu].queue.pick(&mut self.entities);
        if previous != NO_VCPU {
            if picked == Some(previous) {
                self.go_on(cpu, previous);
                return;
            }
            // It is in the queue already.
            self.stop_current(cpu, Place::Parked);
            self.vcpus[previous as usize].place = Place::Queued;
        }
        let picked = picked.or_else(|| self.pull_when_idle(cpu));
        match picked {
            Some(vcpu) => self.dispatch(cpu, vcpu),
            None => {
                self.set_idle(cpu);
                if self.policy == SchedulingPolicy::Gang {
                    self.note_idle_gang_cpu();
                }
            }
        }
    }

    /// A CPU without a vCPU has no events.
    pub(super) fn set_idle(&mut self, cpu: usize) {
        self.cpus[cpu].next_tick = NO_EVENT_TIME;
        self.set_activity(cpu, NO_EVENT_TIME, Activity::None);
    }

    /// The previous vCPU was chosen again.
    fn go_on(&mut self, cpu: usize, vcpu: u32) {
        if self.guest_until[vcpu as usize] == 0 {
            self.enter_guest(cpu, vcpu, self.now + self.scenario.costs.yield_ns);
        }
    }

    /// Run a vCPU, which is in no queue, on an idle CPU.
    pub(super) fn dispatch(&mut self, cpu: usize, vcpu: u32) {
        let now = self.now;
        let tick_ns = self.scenario.costs.tick_ns;
        self.end_ready_time(vcpu);
        let vm = self.vcpus[vcpu as usize].vm as usize;
        self.count_co_run(vm);
        self.vms[vm].running += 1;
        let state = &mut self.cpus[cpu];
        self.outcome.idle_ns += now - state.idle_since;
        state.current = vcpu;
        state.charged_until = now;
        state.started_at = now;
        if state.next_tick == NO_EVENT_TIME {
            // Ticks of different CPUs are apart (`skew_tick`), so that their slices do not end together.
            let phase = cpu as u64 * tick_ns / self.cpus.len() as u64;
            let state = &mut self.cpus[cpu];
            state.next_tick = (now + tick_ns - phase) / tick_ns * tick_ns + phase;
        }
        let state = &mut self.cpus[cpu];
        let mut start = now.max(state.lock_free_at);
        if state.last != vcpu {
            start += self.scenario.costs.switch_ns;
            state.last = vcpu;
            self.outcome.switches += 1;
        }
        let window = self.scenario.costs.spin_window_ns;
        let state = &mut self.vcpus[vcpu as usize];
        state.place = Place::Running;
        state.cpu = cpu as u32;
        // vmx_sched_in: ple_window_shrink of 0 resets the window.
        state.spin_window = window;
        self.enter_guest(cpu, vcpu, start);
    }

    /// Enter guest mode at `at`, which may be later than now.
    pub(super) fn enter_guest(&mut self, cpu: usize, vcpu: u32, at: u64) {
        let state = &mut self.vcpus[vcpu as usize];
        state.phase_since = at;
        state.in_spin_loop = false;
        state.yield_eligible = false;
        if !state.senders.is_empty() {
            self.handle_interrupts(vcpu);
        }
        if self.vcpus[vcpu as usize].phase == Phase::Spin {
            self.try_free_lock(vcpu);
        }
        self.continue_phase(cpu, vcpu, at);
    }

    /// Set the pending activity of a CPU by what its vCPU, in guest mode, does from `at` on.
    fn continue_phase(&mut self, cpu: usize, vcpu: u32, at: u64) {
        let exits = self.policy.exits_on_spin();
        let state = &self.vcpus[vcpu as usize];
        let (time, activity) = match state.phase {
            Phase::Think | Phase::Critical | Phase::SendInterrupts => (at + state.remaining, Activity::PhaseEnd),
            Phase::Spin if self.vms[state.vm as usize].workload.lock_kind == LockKind::ParaVirtual => {
                if exits && state.spin_window < state.pv_spin_left {
                    self.set_spin_window(cpu, vcpu, at);
                    return;
                } else {
                    (at + state.pv_spin_left, Activity::SpinLimit)
                }
            }
            Phase::Spin | Phase::AwaitSiblings if exits => {
                self.set_spin_window(cpu, vcpu, at);
                return;
            }
            Phase::Spin | Phase::AwaitSiblings => (NO_EVENT_TIME, Activity::None),
        };
        self.guest_until[vcpu as usize] = NO_EVENT_TIME;
        self.set_activity(cpu, time, activity);
    }

    /// Let the running vCPU spin from `at` on until it exits. One event serves for the end of the window and of the
    /// exit: nothing but [`is_in_guest`](Self::is_in_guest) depends on the time between.
    fn set_spin_window(&mut self, cpu: usize, vcpu: u32, at: u64) {
        let state = &self.vcpus[vcpu as usize];
        let exits_at = at + state.spin_window;
        self.guest_until[vcpu as usize] = exits_at;
        let done = exits_at + self.scenario.costs.exit_ns;
        self.set_activity(cpu, done, Activity::ExitDone);
    }

    /// Whether a vCPU runs in guest mode now.
    #[inline]
    pub(super) fn is_in_guest(&self, vcpu: u32) -> bool {
        self.now < self.guest_until[vcpu as usize]
    }

    fn run_activity(&mut self, cpu: usize) {
        let vcpu = self.cpus[cpu].current;
        match self.cpus[cpu].activity {
            Activity::PhaseEnd => self.end_phase(cpu, vcpu),
            Activity::ExitDone => self.exit_on_spin(cpu, vcpu),
            Activity::SpinLimit => self.halt_in_lock(cpu, vcpu),
            Activity::LocksDone => self.finish_directed_yield(cpu, vcpu),
            Activity::EnterGuest if self.cpus[cpu].need_resched => self.schedule(cpu),
            Activity::EnterGuest => self.enter_guest(cpu, vcpu, self.now),
            Activity::None => self.set_activity(cpu, NO_EVENT_TIME, Activity::None),
        }
    }

    /// Take the locks of two run queues in order of arrival. Returns when they are released again.
    pub(super) fn lock_both(&mut self, own: usize, other: usize) -> u64 {
        let costs = &self.scenario.costs;
        let waiters = self.cpus[own].lock_users.max(self.cpus[other].lock_users);
        let hold = costs.double_lock_ns + costs.double_lock_per_waiter_ns * u64::from(waiters);
        let start = self.now.max(self.cpus[own].lock_free_at).max(self.cpus[other].lock_free_at);
        let end = start + hold;
        for queue in [own, other] {
            self.cpus[queue].lock_free_at = end;
        }
        self.cpus[own].lock_users += 1;
        if other != own {
            self.cpus[other].lock_users += 1;
        }
        self.outcome.double_lock_ns += end - self.now;
        end
    }

    /// Note that the locks of [`lock_both`](Self::lock_both) are released.
    pub(super) fn unlock_both(&mut self, own: usize, other: usize) {
        self.cpus[own].lock_users -= 1;
        if other != own {
            self.cpus[other].lock_users -= 1;
        }
    }
}
