//! When somebody's memory is looked at next.

use super::event::{DecisionReason, UnenrollScope};
use super::rules::DaemonRules;
use pagefold_base::domain::TrustDomain;
use pagefold_base::memory::Shortage;
use pagefold_base::units::{Bytes, NetBytes, ProcessId};
use pagefold_census::decide::sketch::ContentSketches;
use std::sync::Arc;
use std::time::Duration;

/// Growth from which memory counts as filled anew: an eighth, and no less than this.
const REFILL_MIN_GROWTH: (u64, Bytes) = (8, Bytes(16 << 20));

/// The same for who has come within so long: a machine that boots and is then filled, all within seconds.
const RECENT_ARRIVAL_MIN_GROWTH: (Duration, u64, Bytes) = (Duration::from_secs(60), 32, Bytes(2 << 20));

/// Growth between two readings by which memory still fills: looking at it now would be in vain.
const FILLING_MIN_GROWTH_PER_READING: Bytes = Bytes(1 << 20);

/// The share of one CPU from which on somebody is busy.
const BUSY_CPU_SHARE: f64 = 0.2;

/// The share of one CPU up to which somebody is idle: memory that was looked at in vain has hardly changed since.
const IDLE_CPU_SHARE: f64 = 0.01;

/// Looks one after the other that may find only what is not old enough before the next one waits longer: memory that is
/// written all the time is never old.
const MAX_EARLY_UNSTABLE_SCANS: u32 = 2;

/// Looks at most that come sooner because those before were without somebody who holds much of the same.
const MAX_EARLY_MISSED_PARTNER_SCANS: u32 = 4;

/// For how long who has come into another trust domain stays there: an hour.
const DOMAIN_CHANGE_COOLDOWN: Duration = Duration::from_secs(3600);

/// Doublings of what a look is taken to cost, at most.
const MAX_COST_DOUBLINGS: u32 = 10;

/// The first pause before what could not be withdrawn is tried again; each further one is twice as long, up to the
/// longest.
const UNENROLL_RETRY_INTERVALS: [Duration; 2] = [Duration::from_secs(10), Duration::from_secs(300)];

/// That pause in times of what the last try took, at least: trying stays below a two-hundredth of one CPU.
const UNENROLL_RETRY_COST_FACTOR: u32 = 200;

/// How long it has not grown, or been busy, when it is taken to be filled.
const FILL_SETTLE_TIME: Duration = Duration::from_millis(750);

/// Why somebody is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ScanCause {
    /// It has come, or an operator asks for it.
    Arrived,
    /// It has grown since it was looked at, or has just come and was busy.
    Grown,
    /// The pause is over.
    Due,
}

/// What the daemon knows of a process when it comes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessArrival {
    /// Which.
    pub process: ProcessId,
    /// Its trust domain.
    pub domain: TrustDomain,
    /// What is alike among processes: the program, for virtual machines with the size of their memory.
    pub similarity_key: String,
    /// Why it must not be merged, if it must not.
    pub exclusion_reason: Option<String>,
    /// Resident memory.
    pub resident: Bytes,
}

/// What becomes of somebody who is to be withdrawn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingUnenroll {
    /// Why it is.
    pub reason: DecisionReason,
    /// Why it could not be, the last time that it was tried.
    pub last_failure: Option<String>,
    /// From when on it is tried.
    pub next_try: Duration,
    /// The pause before that.
    retry_interval: Duration,
}

impl PendingUnenroll {
    /// What of it is withdrawn.
    pub fn scope(&self) -> UnenrollScope {
        self.reason.unenroll_scope()
    }
}

/// Somebody whose memory is looked at.
#[derive(Clone, Debug, PartialEq)]
pub struct TrackedProcess {
    /// Its trust domain.
    pub domain: TrustDomain,
    /// What is alike among members.
    pub similarity_key: String,
    /// Why it must not be merged.
    pub exclusion_reason: Option<String>,
    /// Whether an operator withdrew it.
    pub unenrolled_by_operator: bool,
    /// Until when it is left alone because it has refused to be enrolled, or lost by it.
    pub refused_until: Option<Duration>,
    /// Whether what is merged of it is to be withdrawn, and has not been.
    pub pending_unenroll: Option<PendingUnenroll>,
    /// Resident memory.
    pub resident: Bytes,
    /// A sample of what it held when it was looked at last.
    pub sketches: Option<Arc<ContentSketches>>,
    /// How short memory is in its cgroup, as far as it is known.
    pub shortage: Shortage,
    /// Whether the daemon has enrolled any of it.
    pub enrolled: bool,
    /// Whether any of it may be merged, whoever enrolled it: it was in a merge.
    pub maybe_merged: bool,
    /// Whether a merge of it has come to its end, so that it is known whether it loses by it.
    pub net_known: bool,
    /// What came of its merges until then, those that were halted among them.
    pub net_savings: NetBytes,
    /// Whether it may share pages with another trust domain, since its own has changed.
    pub maybe_shared_across_domains: bool,
    /// CPU seconds that its merge wants beside a look, where the last one was halted for want of them.
    pub reserved_merge_seconds: f64,
    /// When that was.
    pub merge_halted_at: Duration,
    /// When it came into another trust domain last.
    domain_changed_at: Option<Duration>,
    /// When it was looked at last.
    pub last_scan: Option<Duration>,
    /// The pause after the next look.
    pub scan_interval: Duration,
    /// When it is looked at next.
    pub next_scan: Duration,
    /// Why.
    pub scan_cause: ScanCause,
    /// When it has come.
    arrived_at: Duration,
    /// Since when it fills, if that has not been looked at.
    filling_since: Option<Duration>,
    /// Its CPU time, and when that was read.
    cpu_reading: Option<(Duration, Duration)>,
    /// When it was busy last, if that has not been looked at.
    last_busy: Option<Duration>,
    /// How often a look at it has used up the budget, less those that have not.
    pub overruns: u32,
    /// Looks one after the other that found only what was not old enough.
    unstable_scans: u32,
    /// Looks without somebody who is known to hold much of the same, since what it holds has changed.
    missed_partner_scans: u32,
    /// Whether the last look found nothing, not even what is too young.
    last_scan_found_nothing: bool,
    /// Whether its last merge gave back less than half of what it promised, or cost more than it was worth.
    pub last_merge_unprofitable: bool,
    /// Its CPU time when that look began, and when it was read.
    cpu_reading_at_scan: Option<(Duration, Duration)>,
    /// When the last look at it began.
    scan_started_at: Duration,
    /// Resident memory then.
    resident_at_scan: Bytes,
}

impl TrackedProcess {
    /// Somebody who has come at a time.
    pub fn new(arrival: ProcessArrival, now: Duration, rules: &DaemonRules) -> Self {
        let ProcessArrival { domain, similarity_key: likeness, exclusion_reason: excluded, resident, .. } = arrival;
        Self {
            domain,
            similarity_key: likeness,
            exclusion_reason: excluded,
            unenrolled_by_operator: false,
            refused_until: None,
            pending_unenroll: None,
            resident,
            sketches: None,
            shortage: Shortage::default(),
            enrolled: false,
            maybe_merged: false,
            net_known: false,
            net_savings: NetBytes(0),
            maybe_shared_across_domains: false,
            reserved_merge_seconds: 0.0,
            merge_halted_at: Duration::ZERO,
            domain_changed_at: None,
            last_scan: None,
            scan_interval: rules.min_scan_interval,
            next_scan: now + rules.debounce,
            scan_cause: ScanCause::Arrived,
            arrived_at: now,
            filling_since: None,
            cpu_reading: None,
            last_busy: None,
            overruns: 0,
            unstable_scans: 0,
            missed_partner_scans: 0,
            last_scan_found_nothing: false,
            last_merge_unprofitable: false,
            cpu_reading_at_scan: None,
            scan_started_at: now,
            resident_at_scan: Bytes::ZERO,
        }
    }

    /// Whether its memory may be looked at.
    pub fn may_be_scanned(&self) -> bool {
        self.exclusion_reason.is_none()
            && !self.unenrolled_by_operator
            && self.refused_until.is_none()
            && self.pending_unenroll.is_none()
    }

    /// Whether memory is short in its cgroup.
    pub fn is_cgroup_memory_short(&self, rules: &DaemonRules) -> bool {
        self.shortage.is_short(rules.pressure_percent)
    }

    /// Whether it has not been looked at yet.
    pub fn is_unscanned(&self) -> bool {
        self.last_scan.is_none()
    }

    /// Who comes first where CPU time is short, the least first: who was noted and may be merged, who is to be noted,
    /// who was looked at before.
    pub fn scan_order(&self, rules: &DaemonRules) -> u8 {
        match self.last_scan {
            Some(_) if !self.enrolled && self.scan_interval <= rules.min_scan_interval => 0,
            None => 1,
            Some(_) => 2,
        }
    }

    /// Whether it waits longer and longer.
    pub fn is_backed_off(&self, rules: &DaemonRules) -> bool {
        self.scan_interval > rules.min_scan_interval * 8
    }

    /// Take note of its memory. What fills is looked at once it has stopped to, or has filled for long.
    pub fn update_resident(&mut self, resident: Bytes, now: Duration, rules: &DaemonRules) {
        let fills = resident.saturating_sub(self.resident) >= FILLING_MIN_GROWTH_PER_READING;
        self.resident = resident;
        let more = resident.saturating_sub(self.resident_at_scan);
        let (part, least) = if now < self.arrived_at + RECENT_ARRIVAL_MIN_GROWTH.0 {
            (RECENT_ARRIVAL_MIN_GROWTH.1, RECENT_ARRIVAL_MIN_GROWTH.2)
        } else {
            REFILL_MIN_GROWTH
        };
        if more < least || more.0 < self.resident_at_scan.0 / part {
            return;
        }
        let soon = if fills {
            let since = *self.filling_since.get_or_insert(now);
            (now + FILL_SETTLE_TIME).min(since + rules.min_scan_interval)
        } else {
            now.max(self.scan_started_at + rules.min_scan_interval / 2)
        };
        if self.is_unscanned() {
            self.next_scan = self.next_scan.max(soon);
        } else if soon < self.next_scan || fills && self.scan_cause == ScanCause::Grown {
            (self.next_scan, self.scan_cause) = (soon, ScanCause::Grown);
            self.scan_interval = rules.min_scan_interval;
        }
    }

    /// Take note of its CPU time. Who has just come and is no longer busy is as it will be: memory that was there
    /// before, as in huge pages, fills without growing.
    pub fn update_cpu_time(&mut self, ran: Duration, now: Duration, rules: &DaemonRules) {
        let (before, at) = self.cpu_reading.replace((ran, now)).unwrap_or((ran, now));
        if now >= self.arrived_at + RECENT_ARRIVAL_MIN_GROWTH.0 {
            self.last_busy = None;
        } else if ran.saturating_sub(before) > (now.saturating_sub(at)).mul_f64(BUSY_CPU_SHARE) {
            self.last_busy = Some(now);
            if self.is_unscanned() {
                self.next_scan =
                    self.next_scan.max((now + FILL_SETTLE_TIME).min(self.arrived_at + rules.min_scan_interval));
            }
        } else if self.last_busy.is_some_and(|busy| now >= busy + FILL_SETTLE_TIME) && !self.is_unscanned() {
            self.last_busy = None;
            if self.next_scan > now {
                (self.next_scan, self.scan_cause, self.scan_interval) =
                    (now, ScanCause::Grown, rules.min_scan_interval);
            }
        }
    }

    /// Its turn has come. Who was looked at in vain and has hardly run since is put off, until `rarest` is over since
    /// that look: others may write its memory, too.
    pub fn defer_if_idle(&mut self, now: Duration, max_interval: Duration) {
        self.refused_until = self.refused_until.filter(|until| now < *until);
        let idle = |(before, then): (Duration, Duration), (ran, at): (Duration, Duration)| {
            at > then && ran.saturating_sub(before) <= at.saturating_sub(then).mul_f64(IDLE_CPU_SHARE)
        };
        let last = self.scan_started_at + max_interval;
        let due = self.scan_cause == ScanCause::Due && self.next_scan <= now && now < last;
        if due
            && self.last_scan_found_nothing
            && self.cpu_reading_at_scan.zip(self.cpu_reading).is_some_and(|(then, ran)| idle(then, ran))
        {
            self.scan_interval = (self.scan_interval * 2).min(max_interval);
            self.next_scan = (now + self.scan_interval).min(last);
        }
    }

    /// A look at it begins.
    pub fn begin_scan(&mut self, now: Duration) {
        (self.scan_started_at, self.resident_at_scan, self.filling_since) = (now, self.resident, None);
        self.cpu_reading_at_scan = self.cpu_reading;
        // What is busy still may fill still.
        self.last_busy = self.last_busy.filter(|busy| now < *busy + FILL_SETTLE_TIME);
    }

    /// It was looked at. What had something to merge, or will have when that `ripens`, is looked at again sooner, what
    /// had nothing later, up to the pause `rarest`; `spread` between 0 and 1 keeps those apart that came together, so
    /// that none meets a program's own rhythm each time. Contents were read in the order of the look before, so that it
    /// counts when that began.
    pub fn finish_scan(
        &mut self,
        now: Duration,
        (found, ripens): (bool, bool),
        spread: f64,
        rules: &DaemonRules,
        max_interval: Duration,
    ) {
        let first = self.last_scan.is_none();
        self.last_scan = Some(now);
        self.unstable_scans = if ripens && !found { self.unstable_scans + 1 } else { 0 };
        if ripens && self.unstable_scans <= MAX_EARLY_UNSTABLE_SCANS {
            self.scan_interval = rules.min_scan_interval;
        } else if found && !self.last_merge_unprofitable {
            self.scan_interval = (self.scan_interval / 2).max(rules.min_scan_interval);
        } else if !found && !first {
            self.scan_interval = (self.scan_interval * 2).clamp(rules.min_scan_interval, max_interval);
        }
        self.last_scan_found_nothing = !found && !ripens && !first;
        let spread = if self.scan_interval > rules.min_scan_interval { spread / 8.0 } else { 0.0 };
        self.next_scan = self.scan_started_at + self.scan_interval.mul_f64(1.0 + spread);
        self.scan_cause = ScanCause::Due;
    }

    /// Take note of what it holds.
    pub fn set_sketches(&mut self, held: ContentSketches) {
        let before = self.sketches.take().unwrap_or_default();
        if before.unmerged.shared(&held.unmerged).0 * 2 < held.unmerged.contents().0 {
            self.missed_partner_scans = 0;
        }
        self.sketches = Some(Arc::new(held));
    }

    /// It was just looked at without somebody who holds much of the same: it is again, soon, unless that was in vain.
    pub fn record_missed_partner(&mut self, rules: &DaemonRules) {
        self.missed_partner_scans += 1;
        if self.missed_partner_scans <= MAX_EARLY_MISSED_PARTNER_SCANS && !self.last_merge_unprofitable {
            (self.scan_interval, self.last_scan_found_nothing) = (rules.min_scan_interval, false);
            self.next_scan = self.scan_started_at + self.scan_interval;
        }
    }

    /// A look in which it took part has used up the budget: it is taken to cost twice as much.
    pub fn record_overrun(&mut self) {
        self.overruns = (self.overruns + 1).min(MAX_COST_DOUBLINGS);
    }

    /// A look in which it took part has come to its end.
    pub fn record_within_budget(&mut self) {
        self.overruns = self.overruns.saturating_sub(1);
    }

    /// How many times as much a look at it costs as one at others of its size: one with very many regions, say.
    pub fn scan_cost_factor(&self) -> f64 {
        f64::from(1_u32 << self.overruns)
    }

    /// Little is expected of it for twice as long.
    pub fn double_scan_interval(&mut self, rules: &DaemonRules) {
        self.next_scan += self.scan_interval;
        self.scan_interval = (self.scan_interval * 2).min(rules.max_scan_interval);
    }

    /// Nothing more is expected of it for long.
    pub fn back_off(&mut self, now: Duration, rules: &DaemonRules) {
        self.scan_interval = (self.scan_interval * 8).clamp(rules.min_scan_interval, rules.max_scan_interval);
        self.next_scan = now + self.scan_interval;
    }

    /// It has refused to be enrolled, or lost by it. A plan that counts on its copies comes to nothing: it is in none
    /// until its next turn.
    pub fn record_refusal(&mut self, now: Duration, rules: &DaemonRules) {
        self.back_off(now, rules);
        self.refused_until = Some(self.next_scan);
    }

    /// An operator wants it to be left alone.
    pub fn unenroll_by_operator(&mut self, now: Duration) {
        self.unenrolled_by_operator = true;
        self.request_unenroll(DecisionReason::Operator, now);
    }

    /// What is merged of it is to be withdrawn. Until it is, it is in no plan: others would share with what goes away.
    pub fn request_unenroll(&mut self, reason: DecisionReason, now: Duration) {
        // An operator has it tried at once, as has whoever wants more of it withdrawn.
        let more = self.pending_unenroll.as_ref().is_none_or(|leaving| leaving.scope() < reason.unenroll_scope());
        if more || reason == DecisionReason::Operator {
            self.pending_unenroll =
                Some(PendingUnenroll { reason, last_failure: None, next_try: now, retry_interval: Duration::ZERO });
        }
    }

    /// Not all that is merged of it could be withdrawn: it is tried again, later each time. Tells whether that is news.
    pub fn record_unenroll_failure(&mut self, why: String, cpu_time: Duration, now: Duration) -> bool {
        let Some(leaving) = &mut self.pending_unenroll else { return false };
        leaving.retry_interval = (leaving.retry_interval * 2)
            .clamp(UNENROLL_RETRY_INTERVALS[0], UNENROLL_RETRY_INTERVALS[1])
            .max(cpu_time * UNENROLL_RETRY_COST_FACTOR);
        leaving.next_try = now + leaving.retry_interval;
        let before = leaving.last_failure.replace(why);
        before != leaving.last_failure
    }

    /// It may share pages with others that it must not any more.
    pub fn unenroll_if_shared(&mut self, now: Duration) {
        if self.maybe_merged {
            self.maybe_shared_across_domains = true;
            self.request_unenroll(DecisionReason::DomainChanged, now);
        }
    }

    /// It came into another trust domain. Who does so again and again would be merged and withdrawn each time.
    pub fn record_domain_change(&mut self, now: Duration, rules: &DaemonRules) {
        if self.domain_changed_at.replace(now).is_some_and(|before| now < before + DOMAIN_CHANGE_COOLDOWN) {
            self.record_refusal(now, rules);
        }
    }

    /// It was withdrawn. Tells why it was to be, where that was refused before.
    pub fn record_unenrolled(&mut self, extent: UnenrollScope) -> Option<DecisionReason> {
        (self.enrolled, self.net_known, self.net_savings, self.reserved_merge_seconds) =
            (false, false, NetBytes(0), 0.0);
        if extent == UnenrollScope::AllMerged {
            (self.maybe_merged, self.maybe_shared_across_domains) = (false, false);
        }
        self.pending_unenroll.take().filter(|leaving| leaving.last_failure.is_some()).map(|leaving| leaving.reason)
    }

    /// It is not withdrawn unless it must be.
    pub fn cancel_unenroll_if_allowed(&mut self) {
        self.pending_unenroll = self
            .pending_unenroll
            .take()
            .filter(|_| self.exclusion_reason.is_some() || self.maybe_shared_across_domains);
    }

    /// It is to be looked at now, and is not withdrawn unless it must be.
    pub fn enroll_by_operator(&mut self, now: Duration, rules: &DaemonRules) {
        (self.unenrolled_by_operator, self.refused_until) = (false, None);
        self.cancel_unenroll_if_allowed();
        (self.scan_interval, self.next_scan, self.scan_cause) = (rules.min_scan_interval, now, ScanCause::Arrived);
    }
}
