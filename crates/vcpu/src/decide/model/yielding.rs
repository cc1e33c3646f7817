//! What the host does when a vCPU exits because it spins: `kvm_vcpu_on_spin` and `yield_to`.
//!
//! It mirrors `virt/kvm/kvm_main.c` and `kernel/sched/core.c` of Linux 3.6 and Linux 6.18, and the throttled yield that
//! was proposed for Linux 3.6: at most one directed yield a tick and VM, otherwise a plain `yield()`.

use super::engine::{Activity, Phase, Place, Simulation};
use super::run_queue::NO_VCPU;
use super::{Kernel, SchedulingPolicy};

/// Failed attempts after which today's `kvm_vcpu_on_spin` gives up.
const MAX_ATTEMPTS: u32 = 3;
/// `ple_window_grow`: the factor by which each exit lengthens the window.
const WINDOW_GROWTH: u64 = 2;
/// Upper bound of a grown window, in nanoseconds: `ple_window_max` is the largest 32-bit number of cycles.
const MAX_WINDOW_NS: u64 = 1_000_000_000;

impl Simulation<'_> {
    /// The vCPU has spun for its window, and the CPU has exited to the host.
    pub(super) fn exit_on_spin(&mut self, cpu: usize, vcpu: u32) {
        self.outcome.spin_exits += 1;
        let vm = self.vcpus[vcpu as usize].vm as usize;
        let state = &mut self.vcpus[vcpu as usize];
        self.guest_until[vcpu as usize] = 0;
        state.in_spin_loop = true;
        state.pv_spin_left = state.pv_spin_left.saturating_sub(state.spin_window).max(1);
        if self.kernel == Kernel::Today {
            state.spin_window = (state.spin_window * WINDOW_GROWTH).min(MAX_WINDOW_NS);
        }
        state.search_left = self.vms[vm].vcpu_count;
        state.search_next = self.vms[vm].last_boosted;
        state.attempts_left = MAX_ATTEMPTS;
        self.choose_candidate(cpu, vcpu);
    }

    /// Go on with the search for a sibling that should run, or yield plainly.
    pub(super) fn choose_candidate(&mut self, cpu: usize, vcpu: u32) {
        let vm = self.vcpus[vcpu as usize].vm as usize;
        if self.policy == SchedulingPolicy::ThrottledYield
            && self.vcpus[vcpu as usize].search_left == self.vms[vm].vcpu_count
        {
            if self.now < self.vms[vm].yields_from {
                self.yield_plainly(cpu, vcpu);
                return;
            }
            let tick_ns = self.scenario.costs.tick_ns;
            self.vms[vm].yields_from = (self.now / tick_ns + 1) * tick_ns;
        }
        let before = self.vcpus[vcpu as usize].search_left;
        let candidate = self.next_candidate(vcpu);
        let looked_at = u64::from(before - self.vcpus[vcpu as usize].search_left);
        // The time of the search is charged with the end of the locks or of the exit.
        let searched_until = self.now + looked_at * self.scenario.costs.candidate_ns;
        match candidate {
            Some(candidate) => {
                let target = self.vcpus[candidate as usize].cpu as usize;
                self.vcpus[vcpu as usize].candidate = candidate;
                self.vcpus[vcpu as usize].candidate_cpu = target as u32;
                let done = self.lock_both(cpu, target).max(searched_until);
                self.set_activity(cpu, done, Activity::LocksDone);
            }
            None => self.set_activity(cpu, searched_until, Activity::EnterGuest),
        }
    }

    /// The next sibling that `kvm_vcpu_on_spin` tries.
    fn next_candidate(&mut self, me: u32) -> Option<u32> {
        let vm = &self.vms[self.vcpus[me as usize].vm as usize];
        let (first, count) = (vm.first_vcpu, vm.vcpu_count);
        let state = &self.vcpus[me as usize];
        let (mut left, mut next) = (state.search_left, state.search_next);
        let mut candidate = None;
        if state.attempts_left > 0 {
            while left > 0 {
                left -= 1;
                next = if next + 1 >= count { 0 } else { next + 1 };
                let sibling = first + next;
                if sibling != me && self.is_candidate(sibling) && self.passes_eligibility(sibling) {
                    candidate = Some(sibling);
                    break;
                }
            }
        }
        let state = &mut self.vcpus[me as usize];
        (state.search_left, state.search_next) = (left, next);
        candidate
    }

    fn is_candidate(&self, sibling: u32) -> bool {
        if self.is_in_guest(sibling) {
            return false;
        }
        let state = &self.vcpus[sibling as usize];
        match self.kernel {
            // Not halted, and not in guest mode (PF_VCPU), which includes vCPUs whose exits are being handled.
            Kernel::Linux36 => state.place != Place::Halted,
            // Preempted, and in kernel mode when that happened, or with an interrupt to handle
            // (kvm_arch_dy_has_pending_interrupt).
            Kernel::Today => {
                let workload = &self.scenario.vms[state.vm as usize].workload;
                let in_kernel = state.phase != Phase::Think || workload.think_in_kernel;
                state.place == Place::Queued && (in_kernel || state.has_interrupt())
            }
        }
    }

    /// `kvm_vcpu_eligible_for_directed_yield`: every second time if the sibling spins itself.
    fn passes_eligibility(&mut self, sibling: u32) -> bool {
        let now = self.now;
        let state = &mut self.vcpus[sibling as usize];
        let in_spin_loop = state.in_spin_loop || (1..=now).contains(&self.guest_until[sibling as usize]);
        let passes = !in_spin_loop || state.yield_eligible;
        if in_spin_loop {
            state.yield_eligible = !state.yield_eligible;
        }
        passes
    }

    /// The locks of both run queues were held: yield if the candidate still waits.
    pub(super) fn finish_directed_yield(&mut self, cpu: usize, vcpu: u32) {
        let candidate = self.vcpus[vcpu as usize].candidate;
        self.vcpus[vcpu as usize].candidate = NO_VCPU;
        let target = self.vcpus[vcpu as usize].candidate_cpu as usize;
        self.unlock_both(cpu, target);
        let state = &self.vcpus[candidate as usize];
        if state.place != Place::Queued || state.cpu as usize != target {
            self.outcome.failed_yields += 1;
            self.choose_candidate(cpu, vcpu);
            return;
        }
        if self.kernel == Kernel::Today && self.both_queues_have_one_task(cpu, target) {
            self.outcome.failed_yields += 1;
            self.vcpus[vcpu as usize].attempts_left -= 1;
            self.choose_candidate(cpu, vcpu);
            return;
        }
        self.outcome.directed_yields += 1;
        let vm = &mut self.vms[self.vcpus[vcpu as usize].vm as usize];
        vm.last_boosted = candidate - vm.first_vcpu;
        self.charge_current(cpu);
        self.cpus[cpu].queue.note_yield(vcpu, &mut self.entities);
        self.cpus[target].queue.next_buddy = candidate;
        if target != cpu {
            self.reschedule(target);
        }
        self.schedule(cpu);
    }

    /// `yield_to` answers ESRCH if neither queue has a second task.
    fn both_queues_have_one_task(&self, own: usize, target: usize) -> bool {
        [own, target].iter().all(|&cpu| self.cpus[cpu].queue.task_count(self.cpus[cpu].current) == 1)
    }

    /// `yield()`: the rest of the queue goes first.
    fn yield_plainly(&mut self, cpu: usize, vcpu: u32) {
        self.outcome.plain_yields += 1;
        self.charge_current(cpu);
        if !self.cpus[cpu].queue.queued.is_empty() {
            self.cpus[cpu].queue.note_yield(vcpu, &mut self.entities);
        }
        self.schedule(cpu);
    }
}
