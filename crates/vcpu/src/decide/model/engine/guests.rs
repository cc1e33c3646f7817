//! What guests do: locks, interrupts to siblings, operations.

use super::{Activity, Phase, Place, Simulation};
use crate::decide::model::run_queue::NO_VCPU;
use crate::decide::model::workload::{LockKind, Workload};

impl Simulation<'_> {
    pub(super) fn end_phase(&mut self, cpu: usize, vcpu: u32) {
        match self.vcpus[vcpu as usize].phase {
            Phase::Think => self.acquire_lock(cpu, vcpu),
            Phase::Critical => {
                let kicked = self.release_lock(vcpu);
                self.after_critical_section(cpu, vcpu);
                // Last, because the woken vCPU may preempt this one.
                if let Some(kicked) = kicked {
                    self.wake(kicked);
                }
            }
            Phase::SendInterrupts => {
                if self.vcpus[vcpu as usize].unhandled == 0 {
                    self.complete_operation(cpu, vcpu);
                } else {
                    self.vcpus[vcpu as usize].phase = Phase::AwaitSiblings;
                    self.continue_phase(cpu, vcpu, self.now);
                }
            }
            Phase::Spin | Phase::AwaitSiblings => {}
        }
    }

    pub(super) fn acquire_lock(&mut self, cpu: usize, vcpu: u32) {
        let vm = self.vcpus[vcpu as usize].vm as usize;
        let Workload { locks, critical_section_ns, lock_kind, .. } = self.vms[vm].workload;
        if critical_section_ns == 0 || locks == 0 {
            self.after_critical_section(cpu, vcpu);
            return;
        }
        let lock = if locks == 1 { 0 } else { self.random.below(u64::from(locks)) as u32 };
        let state = &mut self.vcpus[vcpu as usize];
        state.lock = lock;
        let guest_lock = &mut self.vms[vm].locks[lock as usize];
        let is_free = guest_lock.holder == NO_VCPU && (guest_lock.waiters.is_empty() || lock_kind != LockKind::Fifo);
        if is_free {
            guest_lock.holder = vcpu;
            state.phase = Phase::Critical;
            state.remaining = critical_section_ns;
            state.phase_since = self.now;
        } else {
            guest_lock.waiters.push_back(vcpu);
            state.phase = Phase::Spin;
            state.wait_since = self.now;
            state.pv_spin_left = self.scenario.costs.pv_spin_ns;
        }
        self.continue_phase(cpu, vcpu, self.now);
    }

    /// A waiter owns its lock.
    pub(super) fn grant(&mut self, vcpu: u32) {
        let vm = &mut self.vms[self.vcpus[vcpu as usize].vm as usize];
        let state = &mut self.vcpus[vcpu as usize];
        vm.locks[state.lock as usize].holder = vcpu;
        // A spin that began after a switch, later than now, ends when the switch ends.
        vm.outcome.lock_wait_ns += self.now.saturating_sub(state.wait_since);
        vm.outcome.lock_waits += 1;
        state.phase = Phase::Critical;
        state.remaining = vm.workload.critical_section_ns;
    }

    /// Release the lock, and grant it to the next waiter. Returns a halted waiter to be woken.
    pub(super) fn release_lock(&mut self, vcpu: u32) -> Option<u32> {
        let vm = self.vcpus[vcpu as usize].vm as usize;
        let lock = self.vcpus[vcpu as usize].lock as usize;
        let kind = self.vms[vm].workload.lock_kind;
        let guest_lock = &mut self.vms[vm].locks[lock];
        guest_lock.holder = NO_VCPU;
        let mut kicked = None;
        let next = match kind {
            LockKind::Fifo => guest_lock.waiters.pop_front(),
            LockKind::TestAndSet => {
                let runs = |&waiter: &u32| self.now < self.guest_until[waiter as usize];
                match guest_lock.waiters.iter().position(runs) {
                    Some(position) => guest_lock.waiters.remove(position),
                    None => None,
                }
            }
            LockKind::ParaVirtual => match guest_lock.waiters.front() {
                Some(&head) if self.now < self.guest_until[head as usize] => guest_lock.waiters.pop_front(),
                Some(&head) if self.vcpus[head as usize].halted_in_lock => {
                    self.vcpus[head as usize].halted_in_lock = false;
                    kicked = Some(head);
                    None
                }
                _ => None,
            },
        };
        if let Some(next) = next {
            self.grant(next);
            let state = &mut self.vcpus[next as usize];
            if self.now < self.guest_until[next as usize] {
                let at = self.now.max(state.phase_since);
                state.phase_since = at;
                let cpu = state.cpu as usize;
                self.continue_phase(cpu, next, at);
            }
        }
        kicked
    }

    /// A waiter that enters the guest takes its lock if the kind of lock allows it and the lock is free.
    pub(super) fn try_free_lock(&mut self, vcpu: u32) {
        let state = &self.vcpus[vcpu as usize];
        let vm = &mut self.vms[state.vm as usize];
        let kind = vm.workload.lock_kind;
        let guest_lock = &mut vm.locks[state.lock as usize];
        if kind == LockKind::Fifo || guest_lock.holder != NO_VCPU {
            return;
        }
        let position = guest_lock.waiters.iter().position(|&waiter| waiter == vcpu);
        match position {
            Some(position) if kind == LockKind::TestAndSet || position == 0 => {
                guest_lock.waiters.remove(position);
                self.grant(vcpu);
            }
            _ => {}
        }
    }

    /// A para-virtual lock has spun for long enough.
    pub(super) fn halt_in_lock(&mut self, cpu: usize, vcpu: u32) {
        self.vcpus[vcpu as usize].halted_in_lock = true;
        self.vcpus[vcpu as usize].pv_spin_left = self.scenario.costs.pv_spin_ns;
        self.halt(cpu, vcpu);
    }

    pub(super) fn halt(&mut self, cpu: usize, vcpu: u32) {
        self.charge_current(cpu);
        self.cpus[cpu].queue.prepare_removal(vcpu, vcpu, &mut self.entities);
        self.stop_current(cpu, Place::Halted);
        self.schedule(cpu);
    }

    pub(super) fn after_critical_section(&mut self, cpu: usize, vcpu: u32) {
        let vm = self.vcpus[vcpu as usize].vm as usize;
        if self.random.happens(self.vms[vm].shootdown) {
            self.send_interrupts(cpu, vcpu);
        } else {
            self.complete_operation(cpu, vcpu);
        }
    }

    pub(super) fn send_interrupts(&mut self, cpu: usize, vcpu: u32) {
        let vm = &self.vms[self.vcpus[vcpu as usize].vm as usize];
        let siblings = vm.first_vcpu..vm.first_vcpu + vm.vcpu_count;
        let receive_ns = self.scenario.costs.ipi_receive_ns;
        for sibling in siblings {
            let state = &mut self.vcpus[sibling as usize];
            if sibling == vcpu || state.place == Place::Halted {
                continue;
            }
            if self.now < self.guest_until[sibling as usize] {
                if matches!(state.phase, Phase::Think | Phase::Critical | Phase::SendInterrupts) {
                    state.remaining += receive_ns;
                    let (at, remaining, cpu) = (state.phase_since, state.remaining, state.cpu as usize);
                    self.set_activity(cpu, at + remaining, Activity::PhaseEnd);
                }
            } else {
                state.senders.push(vcpu);
                self.vcpus[vcpu as usize].unhandled += 1;
            }
        }
        let state = &mut self.vcpus[vcpu as usize];
        state.phase = Phase::SendInterrupts;
        state.remaining = self.scenario.costs.ipi_ns;
        state.phase_since = self.now;
        self.continue_phase(cpu, vcpu, self.now);
    }

    /// A vCPU that enters the guest handles the interrupts of its siblings.
    pub(super) fn handle_interrupts(&mut self, vcpu: u32) {
        while let Some(sender) = self.vcpus[vcpu as usize].senders.pop() {
            let state = &mut self.vcpus[sender as usize];
            state.unhandled -= 1;
            if state.unhandled == 0 && state.phase == Phase::AwaitSiblings {
                if self.now < self.guest_until[sender as usize] {
                    let cpu = state.cpu as usize;
                    self.complete_operation(cpu, sender);
                } else {
                    // It completes the operation when it runs.
                    state.phase = Phase::SendInterrupts;
                    state.remaining = 1;
                }
            }
        }
    }

    pub(super) fn complete_operation(&mut self, cpu: usize, vcpu: u32) {
        let vm = &mut self.vms[self.vcpus[vcpu as usize].vm as usize];
        vm.outcome.operations += 1;
        let Workload { think_ns, halt_ns, operations_per_halt, .. } = vm.workload;
        let state = &mut self.vcpus[vcpu as usize];
        state.phase = Phase::Think;
        state.remaining = self.random.exponential(think_ns.max(1));
        state.phase_since = self.now.max(state.phase_since);
        let every = u64::from(operations_per_halt);
        if halt_ns > 0 && (every == 1 || self.random.below(every) == 0) {
            // The new phase has not begun.
            self.guest_until[vcpu as usize] = 0;
            let wakes_at = self.now + self.random.exponential(halt_ns);
            self.events.set(self.timer_source(vcpu), wakes_at);
            self.halt(cpu, vcpu);
        } else {
            let at = self.vcpus[vcpu as usize].phase_since;
            self.continue_phase(cpu, vcpu, at);
        }
    }
}
