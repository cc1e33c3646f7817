//! Prices a placement of machines and a merge of pages in one unit, so that memory, remote reads, CPU time and huge pages
//! can be compared: CPU seconds an hour (`CPU s/h`), the CPU time that a resource is worth for each hour it is used.
//!
//! ```text
//! memory       = pages saved x CPU s/h of a page
//! remote reads = pages x hotness x (distance / 10 - 1) x CPU s/h of a page with hotness 1
//! CPU          = (pages moved x MOVE_SECONDS_PER_PAGE + pages merged x MERGE_SECONDS_PER_PAGE) / period
//! huge pages   = base pages in huge pages that are split x hotness x CPU s/h of a page with hotness 1
//! crowding     = virtual CPUs above the even share of their node x CPU s/h of a crowded virtual CPU
//! net gain     = memory - remote reads - CPU - huge pages - crowding, each as a difference to the present
//! ```
//!
//! The CPU time of a move or a merge is spent once, and is spread over the period for which the result is expected to
//! last. Hotness is relative to the hottest part of the host, whose CPU time for each page gives the prices of reads.
//!
//! Limits: reads are estimated from CPU time, not measured; a split of huge pages is estimated from the pages that merge.

use std::time::Duration;

const SECONDS_PER_HOUR: f64 = 3600.0;

const BYTES_PER_GIB: f64 = (1_u64 << 30) as f64;

/// CPU time of moving a page of 4 KiB: 1 GiB in a second. `numa predict` assumes the same speed.
const MOVE_SECONDS_PER_PAGE: f64 = 4096.0 / BYTES_PER_GIB;

/// CPU time that ksmd needs to merge a page. Measured: 4 to 10 microseconds (Linux 6.18); `pagefold_base::savings` counts
/// the same.
const MERGE_SECONDS_PER_PAGE: f64 = 6e-6;

/// Huge pages that are split for each page that merges, if all memory is in huge pages. Measured on four virtual machines:
/// 188 huge pages for 331 MiB (`docs/merging.md`).
const SPLITS_PER_MERGED_PAGE: f64 = 188.0 / (331.0 * 256.0);

/// What a first placement of a machine must gain, as a share of what a further one must gain. At the default prices it is
/// a thousandth of a CPU.
pub const FIRST_MOVE_GAIN_SHARE: f64 = 0.1;

/// CPUs that a virtual CPU loses on a node that runs more than its even share of them: by hardware threads that share a
/// core, by caches and memory bandwidth, and by waiting. It is a choice, low enough for memory to stay local.
const CPUS_LOST_BY_CROWDED_VCPU: f64 = 0.01;

/// Base pages of a huge page of 2 MiB.
const PAGES_PER_HUGE_PAGE: f64 = 512.0;

/// What an operator says that resources are worth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OperatorPrices {
    /// CPUs that a GiB of memory is worth. `None`: as many as the host has for each GiB, because a host is full if either
    /// is used up.
    pub cpus_per_gib: Option<f64>,
    /// The share of its CPU time that a machine loses if it reads all its memory from a node at twice the local distance.
    /// The default is the largest effect of remote memory in L. Tang et al., "Optimizing Google's warehouse scale
    /// computers: the NUMA experience" (HPCA 2013).
    pub remote_read_share: f64,
    /// The share of its CPU time that a machine loses if none of its memory is in huge pages. The default is the effect of
    /// more huge pages in A. H. Hunter et al., "Beyond malloc efficiency to fleet efficiency" (OSDI 2021).
    pub huge_page_share: f64,
    /// CPU seconds an hour that a placement of a machine which was placed before must gain. The default is a hundredth of
    /// a CPU, which keeps machines from being moved to and fro, because run time is a rough estimate of reads. It is a
    /// choice, not a measurement. A first placement must gain a tenth of it ([`FIRST_MOVE_GAIN_SHARE`]).
    pub min_gain: f64,
    /// The time for which a placement or a merge is expected to last.
    pub period: Duration,
}

impl Default for OperatorPrices {
    fn default() -> Self {
        Self {
            cpus_per_gib: None,
            remote_read_share: 0.2,
            huge_page_share: 0.077,
            min_gain: SECONDS_PER_HOUR / 100.0,
            period: Duration::from_secs(3600),
        }
    }
}

/// What the prices of a host depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HostCapacity {
    /// Its CPUs.
    pub cpus: f64,
    /// Its memory.
    pub memory_bytes: f64,
    /// Bytes of a base page.
    pub page_bytes: f64,
    /// CPUs that the hottest part uses for each page of its memory.
    pub hottest_cpus_per_page: f64,
}

/// Prices in CPU seconds an hour.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prices {
    /// A page that is saved.
    pub saved_page: f64,
    /// Reads of a page with hotness 1 at twice the local distance.
    pub remote_page: f64,
    /// A page with hotness 1 that is no longer in a huge page.
    pub split_page: f64,
    /// A page that is moved.
    pub moved_page: f64,
    /// A page that ksmd merges.
    pub merged_page: f64,
    /// What moving a machine again must gain.
    pub min_gain: f64,
    /// What moving a machine for the first time must gain.
    pub first_min_gain: f64,
    /// A virtual CPU above the even share of its node.
    pub crowded_vcpu: f64,
}

impl Prices {
    /// The prices of a host.
    pub fn new(operator: &OperatorPrices, host: HostCapacity) -> Self {
        let gib = |bytes: f64| bytes / BYTES_PER_GIB;
        let cpus_per_gib = operator.cpus_per_gib.unwrap_or_else(|| match gib(host.memory_bytes) {
            memory if memory > 0.0 => host.cpus / memory,
            _ => 0.0,
        });
        let hottest_page = SECONDS_PER_HOUR * host.hottest_cpus_per_page;
        let periods_per_hour = SECONDS_PER_HOUR / operator.period.as_secs_f64().max(1.0);
        // The constants are for pages of 4 KiB. Copying dominates a move, and hashing a merge.
        let base_pages = host.page_bytes / 4096.0;
        Self {
            saved_page: SECONDS_PER_HOUR * cpus_per_gib * gib(host.page_bytes),
            remote_page: operator.remote_read_share * hottest_page,
            split_page: operator.huge_page_share * hottest_page,
            moved_page: MOVE_SECONDS_PER_PAGE * base_pages * periods_per_hour,
            merged_page: MERGE_SECONDS_PER_PAGE * base_pages * periods_per_hour,
            min_gain: operator.min_gain,
            first_min_gain: FIRST_MOVE_GAIN_SHARE * operator.min_gain,
            crowded_vcpu: SECONDS_PER_HOUR * CPUS_LOST_BY_CROWDED_VCPU,
        }
    }

    /// The price that amounts of cost are compared with.
    pub fn unit(&self) -> f64 {
        self.remote_page.max(self.saved_page).max(self.min_gain / 4096.0).max(1e-9)
    }
}

/// What a placement or a merge uses and saves, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PricedAmounts {
    /// Pages that are saved.
    pub saved_pages: f64,
    /// Pages on other nodes than the CPUs that read them, by their shares of the run time. They have no price.
    pub remote_pages: f64,
    /// Remote reads: pages times hotness times extra distance.
    pub remote_reads: f64,
    /// Pages that are moved.
    pub moved_pages: f64,
    /// Pages that ksmd merges.
    pub merged_pages: f64,
    /// Pages that are no longer in huge pages, times hotness.
    pub split_pages: f64,
}

impl PricedAmounts {
    /// What merging pages with this hotness means, if this share of them is in huge pages. `remote_reads` are those of the
    /// merged pages afterwards, less those before.
    pub fn for_merge(pages: f64, hotness: f64, huge_share: f64, remote_reads: f64) -> Self {
        let split_pages = (pages * SPLITS_PER_MERGED_PAGE * PAGES_PER_HUGE_PAGE) * huge_share * hotness;
        Self { saved_pages: pages, merged_pages: pages, remote_reads, split_pages, ..Self::default() }
    }

    /// The amounts of both.
    #[must_use]
    pub fn plus(self, other: Self, factor: f64) -> Self {
        Self {
            saved_pages: self.saved_pages + factor * other.saved_pages,
            remote_pages: self.remote_pages + factor * other.remote_pages,
            remote_reads: self.remote_reads + factor * other.remote_reads,
            moved_pages: self.moved_pages + factor * other.moved_pages,
            merged_pages: self.merged_pages + factor * other.merged_pages,
            split_pages: self.split_pages + factor * other.split_pages,
        }
    }
}

/// Gains in CPU seconds an hour; a loss is negative.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PricedGain {
    /// By memory that is saved.
    pub memory: f64,
    /// By remote reads.
    pub remote_reads: f64,
    /// By CPU time of moving and of ksmd.
    pub cpu: f64,
    /// By huge pages.
    pub huge_pages: f64,
    /// By virtual CPUs above the even shares of nodes. Of a single machine: beside all others as they are planned.
    pub crowding: f64,
}

impl PricedGain {
    /// The sum.
    pub fn net(&self) -> f64 {
        self.memory + self.remote_reads + self.cpu + self.huge_pages + self.crowding
    }

    /// The gains of both.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            memory: self.memory + other.memory,
            remote_reads: self.remote_reads + other.remote_reads,
            cpu: self.cpu + other.cpu,
            huge_pages: self.huge_pages + other.huge_pages,
            crowding: self.crowding + other.crowding,
        }
    }
}

/// The price of a placement or a merge: of its amounts, or of the difference of two. This is the only place where
/// memory, reads, CPU time and huge pages are compared.
pub fn price(prices: &Prices, amounts: PricedAmounts) -> PricedGain {
    // No term is the negative zero.
    PricedGain {
        memory: prices.saved_page * amounts.saved_pages,
        remote_reads: 0.0 - prices.remote_page * amounts.remote_reads,
        cpu: 0.0 - (prices.moved_page * amounts.moved_pages + prices.merged_page * amounts.merged_pages),
        huge_pages: 0.0 - prices.split_page * amounts.split_pages,
        crowding: 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A host with 16 CPUs and 64 GiB, whose hottest part keeps a CPU busy with one GiB.
    fn capacity() -> HostCapacity {
        HostCapacity {
            cpus: 16.0,
            memory_bytes: 64.0 * BYTES_PER_GIB,
            page_bytes: 4096.0,
            hottest_cpus_per_page: 1.0 / 262_144.0,
        }
    }

    fn is_near(left: f64, right: f64) -> bool {
        (left - right).abs() <= 1e-9 * right.abs().max(1.0)
    }

    #[test]
    fn prices_of_a_gib_are_those_computed_by_hand() {
        let prices = Prices::new(&OperatorPrices::default(), capacity());
        let gib = |price: f64| price * 262_144.0;
        assert!(is_near(gib(prices.saved_page), 900.0), "a quarter of a CPU: {prices:?}");
        assert!(is_near(gib(prices.remote_page), 720.0), "a fifth of a CPU: {prices:?}");
        assert!(is_near(gib(prices.split_page), 277.2), "{prices:?}");
        assert!(is_near(gib(prices.moved_page), 1.0), "a second in each hour: {prices:?}");
        assert!(is_near(gib(prices.merged_page), 1.572864), "{prices:?}");
        let halved =
            OperatorPrices { period: Duration::from_secs(7200), cpus_per_gib: Some(1.0), ..Default::default() };
        let halved = Prices::new(&halved, capacity());
        assert!(is_near(gib(halved.moved_page), 0.5) && is_near(gib(halved.saved_page), 3600.0), "{halved:?}");
    }

    #[test]
    fn merge_across_nodes_gains_only_if_its_pages_are_cold() {
        let prices = Prices::new(&OperatorPrices::default(), capacity());
        let pages = 262_144.0;
        let merge = |hotness: f64, huge_share: f64, extra_distance: f64| {
            price(&prices, PricedAmounts::for_merge(pages, hotness, huge_share, hotness * extra_distance * pages))
        };
        let near = merge(1.0, 0.0, 0.0);
        assert!(is_near(near.net(), 900.0 - 1.572864), "{near:?}");
        let remote = merge(1.0, 0.0, 1.1);
        assert!(is_near(remote.net(), 900.0 - 1.572864 - 792.0), "{remote:?}");
        assert!(merge(1.0, 0.0, 2.0).net() < 0.0, "far away");
        assert!(merge(1.0, 1.0, 1.1).net() < 0.0, "it splits huge pages, too");
        assert!(merge(0.25, 1.0, 2.0).net() > 0.0, "cold pages");
    }

    proptest! {
        #[test]
        fn price_of_a_sum_is_the_sum_of_prices(
            left in prop::array::uniform5(-1e6f64..1e6), right in prop::array::uniform5(-1e6f64..1e6),
        ) {
            let prices = Prices::new(&OperatorPrices::default(), capacity());
            let amounts = |[saved_pages, remote_reads, moved_pages, merged_pages, split_pages]: [f64; 5]| PricedAmounts {
                saved_pages, remote_reads, moved_pages, merged_pages, split_pages, remote_pages: 0.0,
            };
            let (left, right) = (amounts(left), amounts(right));
            let sum = price(&prices, left.plus(right, 1.0)).net();
            let parts = price(&prices, left).plus(price(&prices, right)).net();
            prop_assert!((sum - parts).abs() < 1e-6);
        }
    }
}
