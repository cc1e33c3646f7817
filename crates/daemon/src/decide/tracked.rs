//! A tracked process, and when its memory is scanned next.

use super::event::{DecisionReason, UnenrollScope};
use super::part_progress::{NextStep, PartProgress, PartSketches, joined_sketches};
use super::rules::DaemonRules;
use pagefold_base::domain::TrustDomain;
use pagefold_base::memory::Shortage;
use pagefold_base::units::{Bytes, NetBytes, Pages, ProcessId};
use pagefold_census::decide::sketch::ContentSketches;
use std::sync::Arc;
use std::time::Duration;

/// Growth since the last scan that triggers a new one: an eighth, but at least this many bytes.
const REFILL_MIN_GROWTH: (u64, Bytes) = (8, Bytes(16 << 20));

/// The same for processes younger than this time, such as a VM that boots and fills its memory within seconds.
const RECENT_ARRIVAL_MIN_GROWTH: (Duration, u64, Bytes) = (Duration::from_secs(60), 32, Bytes(2 << 20));

/// Growth between two readings of a process that still fills its memory: a scan would be too early.
const FILLING_MIN_GROWTH_PER_READING: Bytes = Bytes(1 << 20);

/// Share of one CPU from which a process counts as busy.
const BUSY_CPU_SHARE: f64 = 0.2;

/// Share of one CPU up to which a process counts as idle: after a fruitless scan its memory has hardly changed.
const IDLE_CPU_SHARE: f64 = 0.01;

/// Consecutive scans that may find only unstable contents before the interval grows: memory that is written all the
/// time never becomes stable.
const MAX_EARLY_UNSTABLE_SCANS: u32 = 2;

/// After a change of its trust domain, a process that changes it again within this time is not merged for a while.
const DOMAIN_CHANGE_COOLDOWN: Duration = Duration::from_secs(3600);

/// Maximum number of doublings of the predicted scan cost.
const MAX_COST_DOUBLINGS: u32 = 10;

/// First and longest pause before unenrolling is retried. The pause doubles after each failure.
const UNENROLL_RETRY_INTERVALS: [Duration; 2] = [Duration::from_secs(10), Duration::from_secs(300)];

/// Minimum of that pause, as a multiple of the last attempt's CPU time: retries stay below 1/200 of one CPU.
const UNENROLL_RETRY_COST_FACTOR: u32 = 200;

/// A process that has not grown or been busy for this long counts as filled.
const FILL_SETTLE_TIME: Duration = Duration::from_millis(750);

/// Bytes of a base page, to size a sketch. On a host with larger pages a sketch keeps fewer contents.
const BASE_PAGE_BYTES: u64 = 4096;

/// Why a process is scanned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ScanCause {
    /// An operator asks for it.
    Operator,
    /// It is new.
    Arrived,
    /// It has grown since the last scan, or is new and was busy.
    Grown,
    /// Its scan interval has passed.
    Due,
}

impl ScanCause {
    /// The cause of the rest of a scan, and of the scan after a first one. An operator's request covers both: only the
    /// second scan finds what is stable.
    fn of_rest(self) -> Self {
        if self == Self::Operator { self } else { Self::Due }
    }
}

/// What the daemon knows of a process when it arrives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessArrival {
    /// The process.
    pub process: ProcessId,
    /// Its trust domain.
    pub domain: TrustDomain,
    /// Equal for similar processes: the program name, and the memory size of a VM.
    pub similarity_key: String,
    /// Why it must not be merged, if it is excluded.
    pub exclusion_reason: Option<String>,
    /// Resident memory.
    pub resident: Bytes,
}

/// A pending request to unenroll a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingUnenroll {
    /// Reason of the request.
    pub reason: DecisionReason,
    /// Why the last attempt failed.
    pub last_failure: Option<String>,
    /// Time of the next attempt.
    pub next_try: Duration,
    /// Pause before the next attempt.
    retry_interval: Duration,
}

impl PendingUnenroll {
    /// Which ranges are unenrolled.
    pub fn scope(&self) -> UnenrollScope {
        self.reason.unenroll_scope()
    }
}

/// A process whose memory is scanned.
#[derive(Clone, Debug, PartialEq)]
pub struct TrackedProcess {
    /// Its trust domain.
    pub domain: TrustDomain,
    /// Equal for similar processes.
    pub similarity_key: String,
    /// Why it must not be merged, if it is excluded.
    pub exclusion_reason: Option<String>,
    /// Whether an operator unenrolled it.
    pub unenrolled_by_operator: bool,
    /// Until when it is left alone because it refused to be enrolled or merging it was a net loss.
    pub refused_until: Option<Duration>,
    /// The request to unenroll it, until that has succeeded.
    pub pending_unenroll: Option<PendingUnenroll>,
    /// Resident memory.
    pub resident: Bytes,
    /// Its content sketches from the last scan.
    pub sketches: Option<Arc<ContentSketches>>,
    /// The sketches of its parts from the last scan, if there were several.
    pub part_sketches: Arc<[PartSketches]>,
    /// Memory shortage in its cgroup, as far as it is known.
    pub shortage: Shortage,
    /// Whether the daemon has enrolled any of its ranges.
    pub enrolled: bool,
    /// Whether it may have merged pages, whatever program enrolled them: it was in a merge.
    pub maybe_merged: bool,
    /// Whether a merge of it has completed, so that its net savings are known.
    pub net_known: bool,
    /// Net savings of its merges until then, including halted ones.
    pub net_savings: NetBytes,
    /// Whether it may share pages with another trust domain, because its own has changed.
    pub maybe_shared_across_domains: bool,
    /// CPU seconds that its merge needs beside a scan, after the last merge was halted for lack of CPU time.
    pub reserved_merge_seconds: f64,
    /// Time of that halt.
    pub merge_halted_at: Duration,
    /// Time of the last change of its trust domain.
    domain_changed_at: Option<Duration>,
    /// Time of the last scan.
    pub last_scan: Option<Duration>,
    /// Interval after the next scan.
    pub scan_interval: Duration,
    /// Time of the next scan.
    pub next_scan: Duration,
    /// Reason of the next scan.
    pub scan_cause: ScanCause,
    /// Progress of the current scan.
    pub progress: PartProgress,
    /// Start of the current scan of a part.
    part_started_at: Duration,
    /// Time of its arrival.
    arrived_at: Duration,
    /// Whether no earlier daemon has scanned it.
    pub(super) is_new: bool,
    /// Start of its current growth, if it has not been scanned since.
    filling_since: Option<Duration>,
    /// Its total CPU time, and the time of that reading.
    cpu_reading: Option<(Duration, Duration)>,
    /// When it was busy last, if it has not been scanned since.
    last_busy: Option<Duration>,
    /// Scans of it that exceeded the CPU budget, less the later ones that did not.
    pub overruns: u32,
    /// Consecutive scans that found only unstable contents.
    unstable_scans: u32,
    /// Whether the last scan found nothing, not even unstable contents.
    pub(super) last_scan_found_nothing: bool,
    /// Whether its last merge saved less than half of the prediction, or cost more than the limit.
    pub last_merge_unprofitable: bool,
    /// Its CPU time at the start of the last scan, and the time of that reading.
    pub(super) cpu_reading_at_scan: Option<(Duration, Duration)>,
    /// Start of its last scan.
    pub(super) scan_started_at: Duration,
    /// Time from its last scan until this daemon started, if an earlier daemon scanned it last.
    pub(super) scan_age_at_start: Duration,
    /// Resident memory at that time.
    pub(super) resident_at_scan: Bytes,
}

impl TrackedProcess {
    /// A process that arrived at this time.
    pub fn new(arrival: ProcessArrival, now: Duration, rules: &DaemonRules) -> Self {
        let ProcessArrival { domain, similarity_key, exclusion_reason, resident, .. } = arrival;
        Self {
            domain,
            similarity_key,
            exclusion_reason,
            unenrolled_by_operator: false,
            refused_until: None,
            pending_unenroll: None,
            resident,
            sketches: None,
            part_sketches: Arc::default(),
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
            progress: PartProgress::default(),
            part_started_at: now,
            arrived_at: now,
            is_new: true,
            filling_since: None,
            cpu_reading: None,
            last_busy: None,
            overruns: 0,
            unstable_scans: 0,
            last_scan_found_nothing: false,
            last_merge_unprofitable: false,
            cpu_reading_at_scan: None,
            scan_started_at: now,
            scan_age_at_start: Duration::ZERO,
            resident_at_scan: Bytes::ZERO,
        }
    }

    /// Whether its memory may be scanned.
    pub fn may_be_scanned(&self) -> bool {
        self.exclusion_reason.is_none()
            && !self.unenrolled_by_operator
            && self.refused_until.is_none()
            && self.pending_unenroll.is_none()
    }

    /// Whether it has just started, so that it may still fill its memory.
    fn is_recent(&self, now: Duration) -> bool {
        self.is_new && now < self.arrived_at + RECENT_ARRIVAL_MIN_GROWTH.0
    }

    /// Whether memory is short in its cgroup.
    pub fn is_cgroup_memory_short(&self, rules: &DaemonRules) -> bool {
        self.shortage.is_short(rules.pressure_percent)
    }

    /// Whether it has not been scanned yet.
    pub fn is_unscanned(&self) -> bool {
        self.last_scan.is_none()
    }

    /// Priority when CPU time is scarce, lowest first: processes scanned once that may be merged now, new processes,
    /// all others.
    pub fn scan_order(&self, rules: &DaemonRules) -> u8 {
        match self.last_scan {
            Some(_) if !self.enrolled && self.scan_interval <= rules.min_scan_interval => 0,
            None => 1,
            Some(_) => 2,
        }
    }

    /// Whether its scan interval has grown.
    pub fn is_backed_off(&self, rules: &DaemonRules) -> bool {
        self.scan_interval > rules.min_scan_interval * 8
    }

    /// Record its resident memory. A growing process is scanned once it stops growing, or after the minimum interval.
    /// Growth between two parts counts once the scan is complete.
    pub fn update_resident(&mut self, resident: Bytes, now: Duration, rules: &DaemonRules) {
        let is_filling = resident.saturating_sub(self.resident) >= FILLING_MIN_GROWTH_PER_READING;
        self.resident = resident;
        if !self.progress.is_at_start() {
            return;
        }
        let growth = resident.saturating_sub(self.resident_at_scan);
        let (divisor, min_growth) = if self.is_recent(now) {
            (RECENT_ARRIVAL_MIN_GROWTH.1, RECENT_ARRIVAL_MIN_GROWTH.2)
        } else {
            REFILL_MIN_GROWTH
        };
        if growth < min_growth || growth.0 < self.resident_at_scan.0 / divisor {
            return;
        }
        let scan_at = if is_filling {
            let since = *self.filling_since.get_or_insert(now);
            (now + FILL_SETTLE_TIME).min(since + rules.min_scan_interval)
        } else {
            now.max(self.scan_started_at + rules.min_scan_interval / 2)
        };
        if self.is_unscanned() {
            self.next_scan = self.next_scan.max(scan_at);
        } else if scan_at < self.next_scan || is_filling && self.scan_cause == ScanCause::Grown {
            (self.next_scan, self.scan_cause) = (scan_at, ScanCause::Grown);
            self.scan_interval = rules.min_scan_interval;
        }
    }

    /// Record its CPU time. A new process that is no longer busy has filled its memory: memory that is already
    /// resident, such as huge pages, fills without growth.
    pub fn update_cpu_time(&mut self, cpu_time: Duration, now: Duration, rules: &DaemonRules) {
        let (last_cpu_time, last_read) = self.cpu_reading.replace((cpu_time, now)).unwrap_or((cpu_time, now));
        if !self.is_recent(now) {
            self.last_busy = None;
        } else if cpu_time.saturating_sub(last_cpu_time) > (now.saturating_sub(last_read)).mul_f64(BUSY_CPU_SHARE) {
            self.last_busy = Some(now);
            if self.is_unscanned() {
                self.next_scan =
                    self.next_scan.max((now + FILL_SETTLE_TIME).min(self.arrived_at + rules.min_scan_interval));
            }
        } else if self.last_busy.is_some_and(|busy| now >= busy + FILL_SETTLE_TIME) && !self.is_unscanned() {
            self.last_busy = None;
            if self.next_scan > now && self.progress.is_at_start() {
                (self.next_scan, self.scan_cause, self.scan_interval) =
                    (now, ScanCause::Grown, rules.min_scan_interval);
            }
        }
    }

    /// Defer a due scan if the last one found nothing and the process has hardly run since. The scan is deferred until
    /// `max_interval` after the last one at most, because other processes may write its memory, too.
    pub fn defer_if_idle(&mut self, now: Duration, max_interval: Duration) {
        self.refused_until = self.refused_until.filter(|until| now < *until);
        let was_idle = |(cpu_before, start): (Duration, Duration), (cpu_after, end): (Duration, Duration)| {
            let elapsed = end.saturating_sub(start) + self.scan_age_at_start;
            elapsed > Duration::ZERO && cpu_after.saturating_sub(cpu_before) <= elapsed.mul_f64(IDLE_CPU_SHARE)
        };
        let latest = self.scan_started_at + max_interval.saturating_sub(self.scan_age_at_start);
        let is_due =
            self.progress.is_at_start() && self.scan_cause == ScanCause::Due && self.next_scan <= now && now < latest;
        if is_due
            && self.last_scan_found_nothing
            && self.cpu_reading_at_scan.zip(self.cpu_reading).is_some_and(|(before, after)| was_idle(before, after))
        {
            self.scan_interval = (self.scan_interval * 2).min(max_interval);
            self.next_scan = (now + self.scan_interval).min(latest);
        }
    }

    /// A scan starts, or goes on with the next part.
    pub fn begin_scan(&mut self, now: Duration) {
        self.part_started_at = now;
        if !self.progress.is_at_start() {
            return;
        }
        (self.scan_started_at, self.resident_at_scan, self.filling_since) = (now, self.resident, None);
        (self.cpu_reading_at_scan, self.scan_age_at_start) = (self.cpu_reading, Duration::ZERO);
        // A process that is still busy may still fill its memory.
        self.last_busy = self.last_busy.filter(|busy| now < *busy + FILL_SETTLE_TIME);
    }

    /// A part was scanned. Returns the progress if the scan is complete, with [`Self::finish_scan`] to follow.
    pub fn finish_part(&mut self, now: Duration, step: NextStep, rules: &DaemonRules) -> Option<PartProgress> {
        self.next_scan = match step {
            NextStep::Repeat => self.part_started_at + rules.min_scan_interval,
            NextStep::Continue => now,
            NextStep::Complete => {
                let mut progress = std::mem::take(&mut self.progress);
                let parts = std::mem::take(&mut progress.sketches);
                if let Some(sketches) = joined_sketches(&parts, Pages(self.resident.0 / BASE_PAGE_BYTES)) {
                    self.set_sketches(sketches);
                }
                self.part_sketches = if parts.len() > 1 { parts.into() } else { Arc::default() };
                return Some(progress);
            }
        };
        self.scan_cause = self.scan_cause.of_rest();
        None
    }

    /// A scan has ended. `is_profitable` is whether it found anything to merge, `has_unstable` whether it found
    /// contents that are not stable yet. The interval shrinks after a successful scan and grows up to `max_interval`
    /// after a fruitless one. `spread`, between 0 and 1, separates scans of processes that arrived together, and avoids
    /// resonance with periodic programs. The next scan reads pages in the same order, so the interval counts from the
    /// start of this one.
    pub fn finish_scan(
        &mut self,
        now: Duration,
        (is_profitable, has_unstable): (bool, bool),
        spread: f64,
        rules: &DaemonRules,
        max_interval: Duration,
    ) {
        let is_first = self.last_scan.is_none();
        self.last_scan = Some(now);
        let duration = now.saturating_sub(self.scan_started_at);
        self.unstable_scans = if has_unstable && !is_profitable { self.unstable_scans + 1 } else { 0 };
        if has_unstable && self.unstable_scans <= MAX_EARLY_UNSTABLE_SCANS {
            self.scan_interval = rules.min_scan_interval;
        } else if is_profitable && !self.last_merge_unprofitable {
            self.scan_interval = (self.scan_interval / 2).max(rules.min_scan_interval);
        } else if !is_first && (!is_profitable || duration > self.scan_interval) {
            // The pause after a scan in parts is at least as long as the scan.
            let grown = self.scan_interval.max(duration) * 2;
            self.scan_interval = grown.clamp(rules.min_scan_interval, max_interval.max(duration * 2));
        }
        self.last_scan_found_nothing = !is_profitable && !has_unstable && !is_first;
        let spread = if self.scan_interval > rules.min_scan_interval { spread / 8.0 } else { 0.0 };
        // A scan in parts may take longer than the interval; the process has not waited meanwhile.
        self.next_scan = (self.scan_started_at + self.scan_interval.mul_f64(1.0 + spread)).max(now);
        self.scan_cause = if is_first { self.scan_cause.of_rest() } else { ScanCause::Due };
    }

    /// Record its content sketches.
    pub fn set_sketches(&mut self, sketches: ContentSketches) {
        self.sketches = Some(Arc::new(sketches));
    }

    /// A scan of it exceeded the CPU budget: double its predicted scan cost.
    pub fn record_overrun(&mut self) {
        self.overruns = (self.overruns + 1).min(MAX_COST_DOUBLINGS);
    }

    /// A scan of it exceeded the CPU budget: delay the next one, the longer the more often that happened. Between
    /// the parts of a scan, the delay is a multiple of the shortest scan interval.
    pub fn postpone_after_overrun(&mut self, now: Duration, rules: &DaemonRules) {
        let interval = if self.progress.is_at_start() { self.scan_interval } else { rules.min_scan_interval };
        let pause = interval.saturating_mul(1 << self.overruns);
        self.next_scan = now + pause.min(rules.max_scan_interval).max(rules.min_scan_interval);
    }

    /// A scan of it completed within the budget.
    pub fn record_within_budget(&mut self) {
        self.overruns = self.overruns.saturating_sub(1);
    }

    /// Its scan cost relative to other processes of its size. It is high for a process with very many regions, for
    /// example.
    pub fn scan_cost_factor(&self) -> f64 {
        f64::from(1_u32 << self.overruns)
    }

    /// Delay the next scan and double the interval, since little savings are expected. The next part is not delayed:
    /// other parts may save more.
    pub fn double_scan_interval(&mut self, rules: &DaemonRules) {
        if !self.progress.is_at_start() {
            return;
        }
        self.next_scan += self.scan_interval;
        self.scan_interval = (self.scan_interval * 2).min(rules.max_scan_interval);
    }

    /// Delay the next scan by eight times the interval.
    pub fn back_off(&mut self, now: Duration, rules: &DaemonRules) {
        self.scan_interval = (self.scan_interval * 8).clamp(rules.min_scan_interval, rules.max_scan_interval);
        self.next_scan = now + self.scan_interval;
    }

    /// It refused to be enrolled, or merging it was a net loss. A plan must not count on its copies, so it is in none
    /// until its next scan.
    pub fn record_refusal(&mut self, now: Duration, rules: &DaemonRules) {
        self.back_off(now, rules);
        self.refused_until = Some(self.next_scan);
    }

    /// An operator unenrolls and excludes it.
    pub fn unenroll_by_operator(&mut self, now: Duration) {
        self.unenrolled_by_operator = true;
        self.request_unenroll(DecisionReason::Operator, now);
    }

    /// Request to unenroll it. Until that is done it is in no plan: other processes would share pages that go away.
    pub fn request_unenroll(&mut self, reason: DecisionReason, now: Duration) {
        // Requests by an operator, and requests with a wider scope, are tried at once.
        let is_wider = self.pending_unenroll.as_ref().is_none_or(|pending| pending.scope() < reason.unenroll_scope());
        if is_wider || reason == DecisionReason::Operator {
            self.pending_unenroll =
                Some(PendingUnenroll { reason, last_failure: None, next_try: now, retry_interval: Duration::ZERO });
        }
    }

    /// Unenrolling failed: retry it with exponential backoff. Returns whether the reason is new.
    pub fn record_unenroll_failure(&mut self, why: String, cpu_time: Duration, now: Duration) -> bool {
        let Some(pending) = &mut self.pending_unenroll else { return false };
        pending.retry_interval = (pending.retry_interval * 2)
            .clamp(UNENROLL_RETRY_INTERVALS[0], UNENROLL_RETRY_INTERVALS[1])
            .max(cpu_time * UNENROLL_RETRY_COST_FACTOR);
        pending.next_try = now + pending.retry_interval;
        let previous = pending.last_failure.replace(why);
        previous != pending.last_failure
    }

    /// It may share pages with processes of another domain: request to unenroll it.
    pub fn unenroll_if_shared(&mut self, now: Duration) {
        if self.maybe_merged {
            self.maybe_shared_across_domains = true;
            self.request_unenroll(DecisionReason::DomainChanged, now);
        }
    }

    /// Its trust domain has changed. Frequent changes count as a refusal; otherwise it would be merged and unenrolled
    /// each time.
    pub fn record_domain_change(&mut self, now: Duration, rules: &DaemonRules) {
        if self.domain_changed_at.replace(now).is_some_and(|last_change| now < last_change + DOMAIN_CHANGE_COOLDOWN) {
            self.record_refusal(now, rules);
        }
    }

    /// It was unenrolled. Returns the reason of the request if an earlier attempt had failed.
    pub fn record_unenrolled(&mut self, scope: UnenrollScope) -> Option<DecisionReason> {
        (self.enrolled, self.net_known, self.net_savings, self.reserved_merge_seconds) =
            (false, false, NetBytes(0), 0.0);
        if scope == UnenrollScope::AllMerged {
            (self.maybe_merged, self.maybe_shared_across_domains) = (false, false);
        }
        let pending = self.pending_unenroll.take()?;
        if pending.reason == DecisionReason::Stopped {
            // For the next daemon it is a new process: nothing of it is merged.
            self.last_scan = None;
        }
        pending.last_failure.is_some().then_some(pending.reason)
    }

    /// Cancel a pending request to unenroll it, unless exclusion or its domain requires it.
    pub fn cancel_unenroll_if_allowed(&mut self) {
        self.pending_unenroll = self
            .pending_unenroll
            .take()
            .filter(|_| self.exclusion_reason.is_some() || self.maybe_shared_across_domains);
    }

    /// Scan it now, and cancel a pending request to unenroll it unless that is required.
    pub fn enroll_by_operator(&mut self, now: Duration, rules: &DaemonRules) {
        (self.unenrolled_by_operator, self.refused_until) = (false, None);
        self.cancel_unenroll_if_allowed();
        (self.scan_interval, self.next_scan, self.scan_cause) = (rules.min_scan_interval, now, ScanCause::Operator);
    }
}
