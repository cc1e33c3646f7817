//! Wake-ups, and the balance between run queues.

use super::{Place, Simulation};
use crate::decide::model::SchedulingPolicy;
use crate::decide::model::run_queue::NO_VCPU;

impl Simulation<'_> {
    pub(super) fn wake(&mut self, vcpu: u32) {
        let vm = self.vcpus[vcpu as usize].vm as usize;
        self.count_co_run(vm);
        self.vms[vm].runnable += 1;
        self.vcpus[vcpu as usize].ready_since = self.now;
        if self.policy == SchedulingPolicy::Gang && !self.vms[vm].selected {
            self.vcpus[vcpu as usize].place = Place::Parked;
            self.note_parked_wakeup(vm);
            return;
        }
        let cpu = self.choose_cpu(vcpu);
        let last = self.vcpus[vcpu as usize].cpu as usize;
        if cpu != last {
            self.rebase(vcpu, last, cpu);
        }
        self.queue_on(cpu, vcpu, true);
        let current = self.cpus[cpu].current;
        if current == NO_VCPU {
            self.schedule(cpu);
        } else {
            self.charge_current(cpu);
            if self.cpus[cpu].queue.wakeup_preempts(vcpu, current, &self.entities) {
                self.reschedule(cpu);
            }
        }
    }

    /// Queue a vCPU that is in no queue.
    pub(in crate::decide::model) fn queue_on(&mut self, cpu: usize, vcpu: u32, slept: bool) {
        self.vcpus[vcpu as usize].place = Place::Queued;
        self.vcpus[vcpu as usize].cpu = cpu as u32;
        self.charge_current(cpu);
        let current = self.cpus[cpu].current;
        self.cpus[cpu].queue.enqueue(vcpu, slept, current, &mut self.entities);
    }

    /// `select_task_rq_fair`: the last CPU if it is idle, then any idle CPU, then the shortest queue.
    pub(super) fn choose_cpu(&self, vcpu: u32) -> usize {
        let last = self.vcpus[vcpu as usize].cpu as usize;
        let is_idle = |cpu: usize| self.cpus[cpu].current == NO_VCPU && self.cpus[cpu].queue.queued.is_empty();
        if is_idle(last) {
            return last;
        }
        let count = self.cpus.len();
        if let Some(idle) = (0..count).map(|step| (last + step) % count).find(|&cpu| is_idle(cpu)) {
            return idle;
        }
        let siblings = |cpu: usize| if self.policy.spreads_siblings() { self.sibling_count(cpu, vcpu) } else { 0 };
        let length = |cpu: usize| self.cpus[cpu].queue.task_count(self.cpus[cpu].current);
        let best = (0..count).map(|step| (last + step) % count).min_by_key(|&cpu| (siblings(cpu), length(cpu)));
        best.unwrap_or(last)
    }

    pub(super) fn sibling_count(&self, cpu: usize, vcpu: u32) -> usize {
        let vm = self.vcpus[vcpu as usize].vm;
        let state = &self.cpus[cpu];
        let members = state.queue.queued.iter().copied().chain((state.current != NO_VCPU).then_some(state.current));
        members.filter(|&other| other != vcpu && self.vcpus[other as usize].vm == vm).count()
    }

    /// Move a vCPU from the longest queue to this one if that one is longer by two.
    pub(super) fn balance(&mut self, cpu: usize) {
        let length = |cpu: usize| self.cpus[cpu].queue.task_count(self.cpus[cpu].current);
        let own = length(cpu);
        let Some(busiest) = (0..self.cpus.len()).max_by_key(|&other| (length(other), usize::MAX - other)) else {
            return;
        };
        if length(busiest) < own + 2 {
            return;
        }
        if let Some(vcpu) = self.pull(busiest, cpu) {
            self.queue_on(cpu, vcpu, false);
        }
    }

    /// Pull a vCPU to a CPU that becomes idle.
    pub(super) fn pull_when_idle(&mut self, cpu: usize) -> Option<u32> {
        if self.policy == SchedulingPolicy::Gang {
            return None;
        }
        let waiting = |other: usize| self.cpus[other].queue.queued.len();
        let busiest = (0..self.cpus.len()).max_by_key(|&other| (waiting(other), usize::MAX - other))?;
        if waiting(busiest) == 0 {
            return None;
        }
        let vcpu = self.pull(busiest, cpu)?;
        self.queue_on(cpu, vcpu, false);
        self.cpus[cpu].queue.pick(&mut self.entities)
    }

    /// Take a waiting vCPU out of the queue of `source`: the one that has the fewest siblings on `target`.
    pub(super) fn pull(&mut self, source: usize, target: usize) -> Option<u32> {
        let waiting = &self.cpus[source].queue.queued;
        let vcpu = if self.policy.spreads_siblings() {
            waiting.iter().copied().min_by_key(|&vcpu| (self.sibling_count(target, vcpu), vcpu))?
        } else {
            waiting.iter().copied().min()?
        };
        let current = self.cpus[source].current;
        self.charge_current(source);
        self.cpus[source].queue.prepare_removal(vcpu, current, &mut self.entities);
        self.cpus[source].queue.remove(vcpu);
        self.rebase(vcpu, source, target);
        self.outcome.migrations += 1;
        Some(vcpu)
    }

    /// Make the virtual run time of a vCPU that leaves one CPU for another relative to the other's queue.
    fn rebase(&mut self, vcpu: u32, source: usize, target: usize) {
        for cpu in [source, target] {
            self.charge_current(cpu);
            let current = self.cpus[cpu].current;
            self.cpus[cpu].queue.advance_min_vruntime(current, &self.entities);
        }
        self.cpus[source].queue.rebase(vcpu, &self.cpus[target].queue, &mut self.entities);
    }
}
