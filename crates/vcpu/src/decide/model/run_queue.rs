//! Run queues of one CPU: the Completely Fair Scheduler of Linux 3.6 and the EEVDF of today's kernels.
//!
//! It mirrors `kernel/sched/fair.c` of Linux 3.6 and of Linux 6.18. Left out: group scheduling, delayed dequeue, NUMA
//! balancing, and weights that differ within a queue as far as they change the slice of the Completely Fair Scheduler.

use super::Scheduler;

/// No vCPU.
pub(crate) const NO_VCPU: u32 = u32::MAX;

/// Weight of a task of nice 0 (`NICE_0_LOAD`).
pub(crate) const NICE_0_WEIGHT: u64 = 1024;

/// `sysctl_sched_latency` of Linux 3.6 on eight or more CPUs: 6 ms times 1 + log2(8).
const CFS_LATENCY_NS: i64 = 24_000_000;
/// `sysctl_sched_min_granularity` of Linux 3.6 on eight or more CPUs: 0.75 ms times 1 + log2(8).
const CFS_MIN_GRANULARITY_NS: i64 = 3_000_000;
/// `sysctl_sched_wakeup_granularity` of Linux 3.6 on eight or more CPUs: 1 ms times 1 + log2(8).
const CFS_WAKEUP_GRANULARITY_NS: i64 = 4_000_000;
/// Tasks of a queue up to which `sysctl_sched_latency` is shared (`sched_nr_latency`).
const CFS_LATENCY_TASKS: i64 = 8;
/// `sysctl_sched_base_slice` of Linux 6.18 on eight or more CPUs: 0.7 ms times 1 + log2(8).
pub(crate) const EEVDF_BASE_SLICE_NS: i64 = 2_800_000;

/// Virtual time for a time of an entity of this weight, in nanoseconds (`calc_delta_fair`).
#[inline]
pub(crate) fn by_weight(nanoseconds: u64, weight: u64) -> u64 {
    if weight == NICE_0_WEIGHT { nanoseconds } else { nanoseconds * NICE_0_WEIGHT / weight }
}

/// What the scheduler knows of one vCPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entity {
    /// CPU time, scaled by weight, in nanoseconds.
    pub vruntime: i64,
    /// Virtual deadline (EEVDF), in nanoseconds.
    pub deadline: i64,
    /// Lag at the last dequeue (EEVDF), in nanoseconds.
    pub lag: i64,
    /// Share of the CPU relative to [`NICE_0_WEIGHT`].
    pub weight: u64,
    /// CPU time when the entity was last picked, in nanoseconds.
    pub picked_at_cpu_time: u64,
    /// CPU time in total, in nanoseconds.
    pub cpu_time: u64,
}

impl Entity {
    /// An entity that has not run.
    pub(crate) fn new(weight: u64) -> Self {
        Self { vruntime: 0, deadline: EEVDF_BASE_SLICE_NS, lag: 0, weight, picked_at_cpu_time: 0, cpu_time: 0 }
    }

    fn scaled(&self, nanoseconds: i64) -> i64 {
        by_weight(nanoseconds as u64, self.weight) as i64
    }

    /// Charge CPU time.
    pub(crate) fn charge(&mut self, nanoseconds: u64) {
        self.cpu_time += nanoseconds;
        self.vruntime += self.scaled(nanoseconds as i64);
    }
}

/// A waiting vCPU, in the order of virtual run times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Waiting {
    vruntime: i64,
    vcpu: u32,
    /// In [`RunQueue::queued`].
    position: usize,
}

/// The vCPUs that wait for one CPU.
#[derive(Debug)]
pub(crate) struct RunQueue {
    scheduler: Scheduler,
    /// Waiting vCPUs, in no order. The running one is not among them.
    pub queued: Vec<u32>,
    /// The vCPU that a directed yield asked for (`cfs_rq->next`).
    pub next_buddy: u32,
    /// The vCPU that yielded (`cfs_rq->skip`, Linux 3.6).
    pub skip_buddy: u32,
    /// Monotonic lower bound of virtual run times, in nanoseconds.
    min_vruntime: i64,
}

impl RunQueue {
    /// An empty queue with space for `capacity` vCPUs.
    pub(crate) fn new(scheduler: Scheduler, capacity: usize) -> Self {
        Self {
            scheduler,
            queued: Vec::with_capacity(capacity),
            next_buddy: NO_VCPU,
            skip_buddy: NO_VCPU,
            min_vruntime: 0,
        }
    }

    /// Weighted mean of the virtual run times of the queue and the running vCPU (`avg_vruntime`), in nanoseconds.
    fn mean_vruntime(&self, current: u32, entities: &[Entity]) -> i64 {
        let members = self.queued.iter().copied().chain((current != NO_VCPU).then_some(current));
        let (mut weighted, mut weights) = (0i128, 0i128);
        for vcpu in members {
            let entity = &entities[vcpu as usize];
            weighted += i128::from(entity.vruntime - self.min_vruntime) * i128::from(entity.weight);
            weights += i128::from(entity.weight);
        }
        if weights == 0 { self.min_vruntime } else { self.min_vruntime + weighted.div_euclid(weights) as i64 }
    }

    /// Advance the lower bound of virtual run times. Within a queue they only grow, so that it suffices to do so before
    /// a member comes or goes, or is compared with members of another queue.
    pub(crate) fn advance_min_vruntime(&mut self, current: u32, entities: &[Entity]) {
        let members = self.queued.iter().copied().chain((current != NO_VCPU).then_some(current));
        if let Some(least) = members.map(|vcpu| entities[vcpu as usize].vruntime).min() {
            self.min_vruntime = self.min_vruntime.max(least);
        }
    }

    /// Place a vCPU that starts, wakes or migrates, and queue it.
    pub(crate) fn enqueue(&mut self, vcpu: u32, slept: bool, current: u32, entities: &mut [Entity]) {
        self.advance_min_vruntime(current, entities);
        match self.scheduler {
            Scheduler::Cfs36 => {
                // place_entity with GENTLE_FAIR_SLEEPERS: a sleeper is at most half a latency behind.
                let credit = if slept { CFS_LATENCY_NS / 2 } else { 0 };
                let entity = &mut entities[vcpu as usize];
                entity.vruntime = entity.vruntime.max(self.min_vruntime - credit);
            }
            Scheduler::Eevdf => {
                let mean = self.mean_vruntime(current, entities);
                let others: u64 = self.queued.iter().map(|&other| entities[other as usize].weight).sum::<u64>()
                    + if current == NO_VCPU { 0 } else { entities[current as usize].weight };
                let entity = &mut entities[vcpu as usize];
                let mut lag = entity.lag.clamp(-2 * EEVDF_BASE_SLICE_NS, 2 * EEVDF_BASE_SLICE_NS);
                if others > 0 {
                    // Adding the entity shifts the mean: scale the lag so that it is kept (place_entity).
                    lag = lag * (others + entity.weight) as i64 / others as i64;
                }
                entity.vruntime = mean - lag;
                entity.deadline = entity.vruntime + entity.scaled(EEVDF_BASE_SLICE_NS);
            }
        }
        self.queued.push(vcpu);
    }

    /// Queue the vCPU that has been running.
    pub(crate) fn put_back(&mut self, vcpu: u32) {
        self.queued.push(vcpu);
    }

    /// Note the lag of a vCPU that is about to leave the queue to sleep or to migrate.
    pub(crate) fn prepare_removal(&mut self, vcpu: u32, current: u32, entities: &mut [Entity]) {
        self.advance_min_vruntime(current, entities);
        if self.scheduler == Scheduler::Eevdf {
            let mean = self.mean_vruntime(current, entities);
            entities[vcpu as usize].lag = mean - entities[vcpu as usize].vruntime;
        }
    }

    /// Make the virtual run time of a vCPU relative to this queue before it migrates to `target`.
    pub(crate) fn rebase(&self, vcpu: u32, target: &RunQueue, entities: &mut [Entity]) {
        if self.scheduler == Scheduler::Cfs36 {
            entities[vcpu as usize].vruntime += target.min_vruntime - self.min_vruntime;
        }
    }

    /// Remove a waiting vCPU. Returns false if it does not wait here.
    pub(crate) fn remove(&mut self, vcpu: u32) -> bool {
        if self.next_buddy == vcpu {
            self.next_buddy = NO_VCPU;
        }
        if self.skip_buddy == vcpu {
            self.skip_buddy = NO_VCPU;
        }
        match self.queued.iter().position(|&other| other == vcpu) {
            Some(position) => {
                self.queued.swap_remove(position);
                true
            }
            None => false,
        }
    }

    /// Take the vCPU that runs next out of the queue.
    pub(crate) fn pick(&mut self, entities: &mut [Entity]) -> Option<u32> {
        let position = match self.scheduler {
            Scheduler::Cfs36 => self.pick_cfs(entities),
            Scheduler::Eevdf => self.pick_eevdf(entities),
        }?;
        let picked = self.queued.swap_remove(position);
        if self.next_buddy == picked {
            self.next_buddy = NO_VCPU;
        }
        self.skip_buddy = NO_VCPU;
        let entity = &mut entities[picked as usize];
        entity.picked_at_cpu_time = entity.cpu_time;
        Some(picked)
    }

    /// `pick_next_entity` of Linux 3.6: the leftmost entity, unless a buddy is within the wake-up granularity of it.
    fn pick_cfs(&self, entities: &[Entity]) -> Option<usize> {
        let (mut leftmost, mut second, mut buddy) = (None, None, None);
        for (position, &vcpu) in self.queued.iter().enumerate() {
            let waiting = Waiting { vruntime: entities[vcpu as usize].vruntime, vcpu, position };
            if vcpu == self.next_buddy {
                buddy = Some(waiting);
            }
            if leftmost.is_none_or(|leftmost| waiting < leftmost) {
                second = leftmost;
                leftmost = Some(waiting);
            } else if second.is_none_or(|second| waiting < second) {
                second = Some(waiting);
            }
        }
        let leftmost = leftmost?;
        let is_near = |waiting: &Waiting| {
            let granularity = entities[waiting.vcpu as usize].scaled(CFS_WAKEUP_GRANULARITY_NS);
            waiting.vruntime - leftmost.vruntime <= granularity
        };
        let second = second.filter(|_| self.skip_buddy == leftmost.vcpu);
        let picked = buddy.filter(is_near).or_else(|| second.filter(is_near)).unwrap_or(leftmost);
        Some(picked.position)
    }

    /// `pick_eevdf`: the eligible entity with the earliest deadline, or an eligible buddy (`PICK_BUDDY`).
    fn pick_eevdf(&self, entities: &[Entity]) -> Option<usize> {
        let mean = self.mean_vruntime(NO_VCPU, entities);
        let mut earliest: Option<(i64, u32, usize)> = None;
        for (position, &vcpu) in self.queued.iter().enumerate() {
            let entity = &entities[vcpu as usize];
            if entity.vruntime > mean {
                continue;
            }
            if vcpu == self.next_buddy {
                return Some(position);
            }
            let key = (entity.deadline, vcpu, position);
            if earliest.is_none_or(|earliest| key < earliest) {
                earliest = Some(key);
            }
        }
        earliest.map(|(_, _, position)| position)
    }

    /// Whether the timer tick ends the time slice of the running vCPU.
    pub(crate) fn tick_ends_slice(&self, current: u32, entities: &mut [Entity]) -> bool {
        match self.scheduler {
            Scheduler::Cfs36 => {
                // check_preempt_tick
                if self.queued.is_empty() {
                    return false;
                }
                let entity = &entities[current as usize];
                let ran = (entity.cpu_time - entity.picked_at_cpu_time) as i64;
                let tasks = self.queued.len() as i64 + 1;
                let period = if tasks > CFS_LATENCY_TASKS { tasks * CFS_MIN_GRANULARITY_NS } else { CFS_LATENCY_NS };
                let weights: u64 = self.queued.iter().map(|&other| entities[other as usize].weight).sum::<u64>();
                let slice = period * entity.weight as i64 / (weights + entity.weight) as i64;
                if ran > slice {
                    return true;
                }
                if ran < CFS_MIN_GRANULARITY_NS {
                    return false;
                }
                let least = self.queued.iter().map(|&other| entities[other as usize].vruntime).min();
                least.is_some_and(|least| entity.vruntime - least > slice)
            }
            Scheduler::Eevdf => {
                // update_deadline
                let entity = &mut entities[current as usize];
                if entity.vruntime < entity.deadline {
                    return false;
                }
                entity.deadline = entity.vruntime + entity.scaled(EEVDF_BASE_SLICE_NS);
                !self.queued.is_empty()
            }
        }
    }

    /// Whether a woken vCPU preempts the running one.
    pub(crate) fn wakeup_preempts(&self, woken: u32, current: u32, entities: &[Entity]) -> bool {
        let (woken, current) = (&entities[woken as usize], &entities[current as usize]);
        match self.scheduler {
            // wakeup_preempt_entity
            Scheduler::Cfs36 => current.vruntime - woken.vruntime > woken.scaled(CFS_WAKEUP_GRANULARITY_NS),
            // RUN_TO_PARITY: the running entity is protected until it has used its slice.
            Scheduler::Eevdf => current.vruntime >= current.deadline && woken.deadline < current.deadline,
        }
    }

    /// `yield_task_fair` for the running vCPU.
    pub(crate) fn note_yield(&mut self, current: u32, entities: &mut [Entity]) {
        match self.scheduler {
            Scheduler::Cfs36 => {
                if self.next_buddy == current {
                    self.next_buddy = NO_VCPU;
                }
                self.skip_buddy = current;
            }
            Scheduler::Eevdf => {
                // An eligible entity forfeits the rest of its slice; then it gets a new deadline.
                let mean = self.mean_vruntime(current, entities);
                let entity = &mut entities[current as usize];
                if entity.vruntime <= mean {
                    entity.vruntime = entity.deadline;
                    entity.deadline += entity.scaled(EEVDF_BASE_SLICE_NS);
                }
            }
        }
    }

    /// Tasks of the queue with the running one.
    pub(crate) fn task_count(&self, current: u32) -> usize {
        self.queued.len() + usize::from(current != NO_VCPU)
    }
}
