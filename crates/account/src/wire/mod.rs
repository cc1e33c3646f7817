//! The account in JSON.

use crate::decide::reconcile::{Balance, CounterComparison, CounterUnit, Reconciliation, SharingDrift};
use crate::decide::{Account, Basis, Footprint, FootprintGroup, GroupBy, GroupKey, group_footprints};
use pagefold_base::ksm::RMAP_ITEM_BYTES;
use pagefold_base::{PageSize, Reading};
use pagefold_census::results::UnscannedProcess;
use pagefold_output::wire::{ProcessInfo, UnscannedProcessReport};
use schemars::JsonSchema;
use serde::Serialize;
use std::cmp::Reverse;

/// The result of `pagefold account`. Figures that the kernel does not provide are absent, never 0.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct AccountReport {
    /// `pagefold.account/1`.
    pub schema: &'static str,
    /// What was read: `this host` or a recording.
    pub host: String,
    /// Bytes of a base page.
    pub page_size: u64,
    /// Wall time in seconds.
    pub seconds: f64,
    /// The sum over `processes`.
    pub total: FootprintReport,
    /// The processes, the largest fair share first.
    pub processes: Vec<ProcessAccount>,
    /// The grouping of `groups`: `process` (then `groups` is empty), `vm`, `cgroup`, `job`, `step` or `user`.
    pub by: &'static str,
    /// Sums over groups of processes, the largest fair share first. Each process is in exactly one group.
    pub groups: Vec<GroupAccount>,
    /// With `--explain`: the account of all processes of the host, compared with the kernel's counters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reconciliation: Option<ReconciliationReport>,
    /// Processes that were selected and could not be read.
    pub unscanned_processes: Vec<UnscannedProcessReport>,
}

/// The memory cost of a process or group. The unit is bytes, unless the name says pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct FootprintReport {
    /// Resident memory as in `Rss:`: regardless of sharing and merging, without hugetlb.
    pub rss: u64,
    /// `Pss:` of `smaps_rollup`, the kernel's own fair share, without hugetlb.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pss: Option<u64>,
    /// Memory that no other process maps.
    pub private: u64,
    /// Resident hugetlb memory; unknown if estimated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hugetlb: Option<u64>,
    /// Swapped-out memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swap: Option<u64>,
    /// Each page divided by the mappings of its frame, hugetlb included.
    pub fair_share: u64,
    /// Pages that KSM merged, including the kept copies.
    pub ksm_pages: u64,
    /// The part of `fair_share` of these pages.
    pub ksm_fair_share: u64,
    /// Pages that map a store of the user-space engine (`pagefold engine status`), by the name of its memfd.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine_pages: Option<u64>,
    /// The part of `fair_share` of these pages; unknown if estimated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine_fair_share: Option<u64>,
    /// Gross savings by the engine, without zeros that it freed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine_saved: Option<u64>,
    /// Zero pages that KSM mapped to the kernel's zero page; in neither RSS nor PSS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ksm_zero_pages: Option<u64>,
    /// Zero pages that the kernel freed when it split huge pages for ksmd, as recorded by Pagefold's merges and still
    /// mapped in page tables. KSM's counters do not contain them. Absent if the records cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split_zero_pages: Option<u64>,
    /// The fair share if all merged pages were unmerged: `fair_share + saved`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fair_share_unmerged: Option<u64>,
    /// Gross savings by merging: those that KSM counts, and `split_zero_pages` if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved: Option<u64>,
    /// ksmd's metadata for it: 64 bytes for each page with an rmap item (`ksm_rmap_items`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<u64>,
    /// `saved - metadata`. Negative if KSM costs more than it saves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profit: Option<i64>,
    /// `ksm_merging_pages`: the value of `ksm_pages` at ksmd's last visit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ksm_merging_pages: Option<u64>,
    /// `ksm_process_profit`, which charges the kept copy to no process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ksm_process_profit: Option<i64>,
    /// Why the frames could not be read, if the figures are estimates from the kernel's totals; absent if they are
    /// exact.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub estimate_reason: Option<String>,
}

/// A process in the account.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ProcessAccount {
    /// The process.
    #[serde(flatten)]
    pub process: ProcessInfo,
    /// Its memory cost.
    #[serde(flatten)]
    pub footprint: FootprintReport,
}

/// A group of processes.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct GroupAccount {
    /// The name of the virtual machine, cgroup or job; `user N`; `others` for processes without a group; `unknown` for
    /// processes whose group could not be read.
    pub name: String,
    /// Number of processes.
    pub processes: u64,
    /// Their total memory cost.
    #[serde(flatten)]
    pub footprint: FootprintReport,
}

/// The account of all processes of the host, compared with the kernel's counters.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ReconciliationReport {
    /// Processes whose frames were read.
    pub processes: u64,
    /// Processes whose frames could not be read. They are in neither the balance nor the comparisons.
    pub estimated_processes: u64,
    /// Processes that could not be read at all.
    pub unscanned_processes: Vec<UnscannedProcessReport>,
    /// The fair shares compared with the frames in use.
    pub balance: BalanceReport,
    /// Figures of the account, each with the kernel's figure for the same memory.
    pub comparisons: Vec<CounterComparisonReport>,
    /// The causes of the difference between the saved pages and `pages_sharing`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drift: Option<DriftReport>,
}

/// `fair + unseen + partially_read - excess + changed_mappings = frames`, in bytes, within a rounding error of one byte
/// in each.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct BalanceReport {
    /// Mapped frames, each counted once, without the kernel's zero pages.
    pub frames: u64,
    /// The fair shares.
    pub fair: u64,
    /// The shares of mappers that were not read.
    pub unseen: u64,
    /// The shares of processes that exited while they were read.
    pub partially_read: u64,
    /// The shares of mappings beyond the kernel's count: frames reused between two reads, and address spaces shared by
    /// processes.
    pub excess: u64,
    /// The remainder, caused by numbers of mappings that changed while they were read.
    pub changed_mappings: i64,
    /// Whether the shares add up to the frames exactly, in integers.
    pub exact: bool,
}

/// A figure of the account with the kernel's figure.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CounterComparisonReport {
    /// The memory that both figures count.
    pub figure: &'static str,
    /// `pages` or `bytes`.
    pub unit: &'static str,
    /// The figure of the account, from the frames.
    pub account: i64,
    /// The kernel's figure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<i64>,
    /// `account - kernel`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub difference: Option<i64>,
    /// The source of the kernel's figure.
    pub source: &'static str,
    /// The reasons for the difference, if there is one.
    pub explanation: String,
}

/// The difference between the saved pages and `pages_sharing` is
/// `unvisited - stale - counted_elsewhere + unseen + excess_frames`.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct DriftReport {
    /// Merged pages that are not in `ksm_merging_pages` of their process: forked or merged since.
    pub unvisited: i64,
    /// Pages in `ksm_merging_pages` that are no longer merged: written or unmapped since.
    pub stale: i64,
    /// Pages that the kernel counts for processes that exited or were not read.
    pub counted_elsewhere: i64,
    /// Pages mapped to the counted KSM frames by processes that were not read.
    pub unseen: i64,
    /// `pages_shared` minus the KSM frames counted.
    pub excess_frames: i64,
}

/// The input of a report.
#[derive(Clone, Debug)]
pub struct AccountInput<'a> {
    /// The name of the host: `this host` or a recording.
    pub host: String,
    /// The size of the host's pages.
    pub page_size: PageSize,
    /// How to group the processes.
    pub group_by: GroupBy,
    /// The selected processes.
    pub accounts: &'a [Account],
    /// The selected processes that could not be read.
    pub unscanned: &'a [UnscannedProcess],
    /// The comparison with the kernel, with `--explain`.
    pub reconciliation: Option<ReconciliationInput<'a>>,
    /// Wall time.
    pub seconds: f64,
}

/// The comparison of all processes of the host with the kernel's counters.
#[derive(Clone, Copy, Debug)]
pub struct ReconciliationInput<'a> {
    /// The comparison.
    pub reconciliation: &'a Reconciliation,
    /// Number of processes read.
    pub processes: u64,
    /// Processes that could not be read.
    pub unscanned: &'a [UnscannedProcess],
}

impl AccountReport {
    /// Makes the report.
    pub fn from_input(input: &AccountInput<'_>) -> Self {
        let page = input.page_size;
        let mut total = Footprint::empty();
        input.accounts.iter().for_each(|account| total += &account.footprint);
        let mut processes: Vec<_> = input
            .accounts
            .iter()
            .map(|account| ProcessAccount {
                process: ProcessInfo::from_process(&account.process, None),
                footprint: FootprintReport::from_footprint(&account.footprint, page),
            })
            .collect();
        processes.sort_by_key(|process| (Reverse(process.footprint.fair_share), process.process.pid));
        let mut groups = match input.group_by {
            GroupBy::Process => Vec::new(),
            by => group_footprints(input.accounts, by)
                .into_iter()
                .map(|group| GroupAccount::from_group(&group, page))
                .collect(),
        };
        groups.sort_by_key(|group| Reverse(group.footprint.fair_share));
        Self {
            schema: "pagefold.account/1",
            host: input.host.clone(),
            page_size: page.bytes(),
            seconds: input.seconds,
            total: FootprintReport::from_footprint(&total, page),
            processes,
            by: match input.group_by {
                GroupBy::Process => "process",
                GroupBy::Vm => "vm",
                GroupBy::Cgroup => "cgroup",
                GroupBy::Job => "job",
                GroupBy::Step => "step",
                GroupBy::User => "user",
            },
            groups,
            reconciliation: input.reconciliation.map(ReconciliationReport::from_input),
            unscanned_processes: unscanned_processes(input.unscanned),
        }
    }

    /// Whether a selected process could not be read or, with `--explain`, the frames of any process.
    pub fn is_incomplete(&self) -> bool {
        let is_partial = |whole_host: &ReconciliationReport| {
            whole_host.estimated_processes > 0 || !whole_host.unscanned_processes.is_empty()
        };
        !self.unscanned_processes.is_empty() || self.reconciliation.as_ref().is_some_and(is_partial)
    }

    /// Number of processes with estimated figures.
    pub fn estimated_count(&self) -> usize {
        self.processes.iter().filter(|process| process.footprint.estimate_reason.is_some()).count()
    }
}

impl FootprintReport {
    /// Makes the report of a footprint.
    pub fn from_footprint(footprint: &Footprint, page: PageSize) -> Self {
        fn bytes<T>(reading: &Reading<T>, value: impl Fn(&T) -> u64) -> Option<u64> {
            reading.as_ref().ok().map(value)
        }
        Self {
            rss: footprint.rss.0,
            pss: bytes(&footprint.pss, |pss| pss.0),
            private: footprint.private.0,
            hugetlb: bytes(&footprint.hugetlb, |hugetlb| hugetlb.0),
            swap: bytes(&footprint.swap, |swap| swap.0),
            fair_share: footprint.fair.bytes(page).0,
            ksm_pages: footprint.ksm.0,
            ksm_fair_share: footprint.ksm_fair.bytes(page).0,
            engine_pages: bytes(&footprint.engine, |pages| pages.0),
            engine_fair_share: bytes(&footprint.engine_fair, |shares| shares.bytes(page).0),
            engine_saved: bytes(&footprint.engine_saved(page), |saved| saved.0),
            ksm_zero_pages: bytes(&footprint.ksm_zero, |pages| pages.0),
            split_zero_pages: bytes(&footprint.zeros_by_splitting, |pages| pages.0),
            fair_share_unmerged: bytes(&footprint.unmerged(page), |unmerged| unmerged.0),
            saved: bytes(&footprint.saved(page), |saved| saved.0),
            metadata: bytes(&footprint.rmap_items, |items| items.saturating_mul(RMAP_ITEM_BYTES)),
            profit: footprint.profit(page).ok().map(|profit| profit.0),
            ksm_merging_pages: footprint.merging_pages.clone().ok(),
            ksm_process_profit: footprint.kernel_profit.as_ref().ok().map(|profit| profit.0),
            estimate_reason: match &footprint.basis {
                Basis::Exact => None,
                Basis::Estimated(why) => Some(why.to_string()),
            },
        }
    }
}

impl GroupAccount {
    fn from_group(group: &FootprintGroup, page: PageSize) -> Self {
        let name = match &group.key {
            GroupKey::Process(id, comm) => format!("{comm}[{}]", id.pid),
            GroupKey::Vm(id, name) => name.clone().unwrap_or_else(|| format!("pid {}", id.pid)),
            GroupKey::Cgroup(name) | GroupKey::Job(name) => name.clone(),
            GroupKey::User(uid) => format!("user {uid}"),
            GroupKey::Ungrouped => "others".to_owned(),
            GroupKey::Unread(_) => "unknown".to_owned(),
        };
        Self { name, processes: group.processes, footprint: FootprintReport::from_footprint(&group.footprint, page) }
    }
}

impl ReconciliationReport {
    fn from_input(input: ReconciliationInput<'_>) -> Self {
        let Reconciliation { balance, comparisons, drift, estimated_processes } = input.reconciliation;
        Self {
            processes: input.processes.saturating_sub(*estimated_processes),
            estimated_processes: *estimated_processes,
            unscanned_processes: unscanned_processes(input.unscanned),
            balance: BalanceReport::from_balance(balance),
            comparisons: comparisons.iter().map(CounterComparisonReport::from_comparison).collect(),
            drift: drift.as_ref().ok().map(DriftReport::from_drift),
        }
    }
}

impl BalanceReport {
    fn from_balance(balance: &Balance) -> Self {
        Self {
            frames: balance.frames.0,
            fair: balance.fair.0,
            unseen: balance.unseen.0,
            partially_read: balance.partially_read.0,
            excess: balance.excess.0,
            changed_mappings: balance.changed_mappings.0,
            exact: balance.exact,
        }
    }
}

impl CounterComparisonReport {
    fn from_comparison(line: &CounterComparison) -> Self {
        Self {
            figure: line.counter.account_label(),
            unit: match line.counter.unit() {
                CounterUnit::Pages => "pages",
                CounterUnit::Bytes => "bytes",
            },
            account: line.account_value,
            kernel: line.kernel_value.clone().ok(),
            difference: line.difference().ok(),
            source: line.counter.kernel_label(),
            explanation: line.explanation.clone(),
        }
    }
}

impl DriftReport {
    fn from_drift(drift: &SharingDrift) -> Self {
        let SharingDrift { unvisited, stale, counted_elsewhere, unseen, excess_frames } = *drift;
        Self { unvisited, stale, counted_elsewhere, unseen, excess_frames }
    }
}

fn unscanned_processes(unscanned: &[UnscannedProcess]) -> Vec<UnscannedProcessReport> {
    unscanned
        .iter()
        .map(|process| UnscannedProcessReport::new(process.pid.0, process.comm.clone(), &process.why))
        .collect()
}

#[cfg(test)]
mod tests;
