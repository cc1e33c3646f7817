//! Gang scheduling: all runnable vCPUs of a VM in one time slice.
//!
//! In each slice the VM with the least CPU time by the weight of its vCPUs goes first; further VMs that fit as a whole fill the remaining
//! CPUs, in the same order. A VM wider than the host gets the whole host, and its vCPUs share the CPUs as usual.

use super::engine::{Place, Simulation};
use super::event_queue::NO_EVENT_TIME;
use super::run_queue::{NO_VCPU, by_weight};

/// The least time between two decisions, in nanoseconds: VMs that halt and wake often do not cause a decision each.
const MIN_DECISION_INTERVAL_NS: u64 = 500_000;

/// When gangs change.
#[derive(Debug)]
pub(super) struct GangClock {
    last_decision: u64,
    next_decision: u64,
    /// VMs in the order of the last decision.
    order: Vec<usize>,
}

impl Default for GangClock {
    fn default() -> Self {
        Self { last_decision: 0, next_decision: NO_EVENT_TIME, order: Vec::new() }
    }
}

impl Simulation<'_> {
    fn decide_at(&mut self, time: u64) {
        self.gang.next_decision = time;
        self.events.set(self.gang_source(), time);
    }

    /// A CPU of a gang became idle: others may fit.
    pub(super) fn note_idle_gang_cpu(&mut self) {
        let earliest = self.now.max(self.gang.last_decision + MIN_DECISION_INTERVAL_NS);
        let waits = self.vms.iter().any(|vm| !vm.selected && vm.runnable > 0);
        if waits && earliest < self.gang.next_decision {
            self.decide_at(earliest);
        }
    }

    /// A vCPU of a VM without a time slice woke up.
    pub(super) fn note_parked_wakeup(&mut self, vm: usize) {
        if self.vms[vm].runnable == 1 {
            // A VM that slept does not save up CPU time.
            let least = self.vms.iter().filter(|vm| vm.selected).map(|vm| vm.gang_vruntime).min();
            let least = least.unwrap_or(0).saturating_sub(self.scenario.costs.gang_slice_ns);
            self.vms[vm].gang_vruntime = self.vms[vm].gang_vruntime.max(least);
        }
        if self.cpus.iter().any(|cpu| cpu.current == NO_VCPU) {
            self.note_idle_gang_cpu();
        }
    }

    /// Choose the gangs of the next time slice.
    pub(super) fn start_gang_slice(&mut self) {
        self.settle_accounts();
        self.gang.last_decision = self.now;
        self.decide_at(self.now + self.scenario.costs.gang_slice_ns);
        for vm in &mut self.vms {
            let weight = vm.weight * u64::from(vm.vcpu_count);
            vm.gang_vruntime += by_weight(std::mem::take(&mut vm.gang_uncharged), weight);
        }
        let mut order = std::mem::take(&mut self.gang.order);
        order.clear();
        order.extend((0..self.vms.len()).filter(|&vm| self.vms[vm].runnable > 0));
        order.sort_by_key(|&vm| (self.vms[vm].gang_vruntime, vm));
        for vm in &mut self.vms {
            vm.selected = false;
        }
        let mut free = self.cpus.len() as u32;
        for (position, &vm) in order.iter().enumerate() {
            let width = self.vms[vm].runnable;
            if width <= free || position == 0 {
                self.vms[vm].selected = true;
                free -= width.min(free);
            }
        }
        self.stop_unselected();
        for &vm in &order {
            if self.vms[vm].selected {
                self.place_gang(vm);
            }
        }
        self.gang.order = order;
    }

    fn stop_unselected(&mut self) {
        for cpu in 0..self.cpus.len() {
            while let Some(vcpu) = self.cpus[cpu].queue.queued.iter().copied().find(|&vcpu| !self.is_selected(vcpu)) {
                self.cpus[cpu].queue.remove(vcpu);
                self.vcpus[vcpu as usize].place = Place::Parked;
            }
            let current = self.cpus[cpu].current;
            if current != NO_VCPU && !self.is_selected(current) {
                self.stop_current(cpu, Place::Parked);
                self.set_idle(cpu);
            }
        }
    }

    fn is_selected(&self, vcpu: u32) -> bool {
        self.vms[self.vcpus[vcpu as usize].vm as usize].selected
    }

    fn place_gang(&mut self, vm: usize) {
        let siblings = self.vms[vm].first_vcpu..self.vms[vm].first_vcpu + self.vms[vm].vcpu_count;
        for vcpu in siblings {
            if self.vcpus[vcpu as usize].place != Place::Parked {
                continue;
            }
            let length = |cpu: usize| self.cpus[cpu].queue.task_count(self.cpus[cpu].current);
            let last = self.vcpus[vcpu as usize].cpu as usize;
            let count = self.cpus.len();
            let cpu = (0..count).map(|step| (last + step) % count).min_by_key(|&cpu| length(cpu)).unwrap_or(last);
            self.queue_on(cpu, vcpu, false);
            if self.cpus[cpu].current == NO_VCPU {
                self.schedule(cpu);
            }
        }
        // CPUs that lost their vCPU to another gang's end take what waits for them.
        for cpu in 0..self.cpus.len() {
            if self.cpus[cpu].current == NO_VCPU && !self.cpus[cpu].queue.queued.is_empty() {
                self.schedule(cpu);
            }
        }
    }
}
