//! Checks of the state of a simulation.

use super::{Phase, Place, Simulation, SimulationSettings};
use crate::decide::model::outcome::Outcome;
use crate::decide::model::run_queue::NO_VCPU;
use crate::decide::model::workload::LockKind;
use crate::decide::model::{Scenario, SchedulingPolicy};

impl Simulation<'_> {
    /// Simulate, and check the state at the end.
    pub(in crate::decide::model) fn run_checked(scenario: &Scenario, settings: &SimulationSettings) -> Outcome {
        let mut simulation = Simulation::new(scenario, settings);
        simulation.run();
        simulation.check_vcpus();
        simulation.check_locks();
        simulation.into_outcome()
    }

    /// Each vCPU is at exactly one place.
    fn check_vcpus(&self) {
        for (vcpu, state) in self.vcpus.iter().enumerate() {
            let vcpu = vcpu as u32;
            let running = self.cpus.iter().filter(|cpu| cpu.current == vcpu).count();
            let queued: usize =
                self.cpus.iter().map(|cpu| cpu.queue.queued.iter().filter(|&&other| other == vcpu).count()).sum();
            let expected = match state.place {
                Place::Running => (1, 0),
                Place::Queued => (0, 1),
                Place::Parked | Place::Halted => (0, 0),
            };
            assert_eq!((running, queued), expected, "vCPU {vcpu} is {:?}", state.place);
            assert!(state.place != Place::Parked || self.policy == SchedulingPolicy::Gang);
        }
        for vm in &self.vms {
            let siblings = &self.vcpus[vm.first_vcpu as usize..(vm.first_vcpu + vm.vcpu_count) as usize];
            let count = |place: Place| siblings.iter().filter(|vcpu| vcpu.place == place).count() as u32;
            assert_eq!(vm.running, count(Place::Running));
            assert_eq!(vm.runnable, vm.vcpu_count - count(Place::Halted));
        }
    }

    /// No lock is lost: a holder is in its critical section, a waiter waits once, and a lock of which the next waiter
    /// is the owner is not free while there are waiters.
    fn check_locks(&self) {
        for vm in &self.vms {
            for (index, lock) in vm.locks.iter().enumerate() {
                if lock.holder != NO_VCPU {
                    let holder = &self.vcpus[lock.holder as usize];
                    assert_eq!((holder.phase, holder.lock), (Phase::Critical, index as u32));
                } else if vm.workload.lock_kind == LockKind::Fifo {
                    assert!(lock.waiters.is_empty(), "a free lock has waiters");
                }
                for &waiter in &lock.waiters {
                    let state = &self.vcpus[waiter as usize];
                    assert_eq!((state.phase, state.lock), (Phase::Spin, index as u32));
                    assert_eq!(lock.waiters.iter().filter(|&&other| other == waiter).count(), 1);
                }
            }
            let spinning = |vcpu: &u32| self.vcpus[*vcpu as usize].phase == Phase::Spin;
            let spinning = (vm.first_vcpu..vm.first_vcpu + vm.vcpu_count).filter(spinning).count();
            assert_eq!(vm.locks.iter().map(|lock| lock.waiters.len()).sum::<usize>(), spinning);
        }
    }
}
