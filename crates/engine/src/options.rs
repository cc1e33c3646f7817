//! What a program may choose: the options of a member, and its advice on ranges.

use std::path::PathBuf;
use std::time::Duration;

/// Options of a member.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineOptions {
    /// Directory of the domains. Default: `$PAGEFOLD_RUNTIME`, else `/dev/shm/pagefold-UID`.
    pub root: Option<PathBuf>,
    /// Bound on the slowdown of the program, as a share of its run time without the engine; `None` for no bound. Work
    /// that does not fit is left to a later merge. Members with safe points within a second of each other merge at a
    /// common time ([`crate::decide::merge_turn`]), because the others may wait for a member that merges alone. While
    /// merges save less than their time costs, the interval between them grows, up to a minute if the time budget
    /// allows. It returns to normal when new memory could make a merge profitable
    /// ([`crate::decide::time_budget::RoundBackoff`]). [`crate::Engine::merge_while_running`] leaves that to its
    /// caller.
    pub max_slowdown: Option<f64>,
    /// Minimum run time of the program, from the join on. Merges that are expected to be profitable may spend the share
    /// of that whole time from the beginning, even at one safe point: most memory is merged then. Until then, and for a
    /// program that ends sooner, the slowdown may exceed the bound. Ignored without a bound.
    pub min_runtime: Duration,
    /// Number of threads that scan and map in parallel. One thread stores, since the kernel serializes writes to a
    /// file.
    pub threads: usize,
    /// Use a domain, and so a store, for each NUMA node, and join that of the node on which this process runs at the
    /// join. Merged memory stays local, and no page is merged across nodes. For processes that stay on one node, such
    /// as bound MPI ranks. The domain of node 1 is called `NAME.node1`.
    pub per_node: bool,
    /// Maximum time to wait for the lock of a domain when joining. Other members may use the lock one after another.
    pub max_join_wait: Duration,
    /// Merge although memory of this process is pinned for a device (RDMA) or io_uring. The caller guarantees that no
    /// pinned memory is adopted: data written to pinned pages after they were merged is lost. Without this option a
    /// merge fails with [`crate::Error::MemoryPinned`] while `VmPin` of `/proc/self/status` is above zero.
    pub merge_while_pinned: bool,
    /// Split huge pages wherever that saves memory, for a program that was measured not to slow down by it. Without
    /// this option, and with a bound on the slowdown, a huge page is split in two cases: all of its pages are zeros, or
    /// all of them have a partner and the expected cost of TLB misses fits into the bound
    /// ([`crate::decide::huge_page_loss`]).
    pub split_huge_pages: bool,
}

impl Default for EngineOptions {
    /// A slowdown of 2 %, one thread, and ten seconds to join.
    fn default() -> Self {
        Self {
            root: None,
            max_slowdown: Some(0.02),
            min_runtime: Duration::ZERO,
            threads: 1,
            per_node: false,
            max_join_wait: Duration::from_secs(10),
            merge_while_pinned: false,
            split_huge_pages: false,
        }
    }
}

/// Advice on how the engine treats a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageAdvice {
    /// Merge it, whatever its write history. The default.
    Mergeable,
    /// Do not merge it. Merged pages stay merged until they are written.
    Unmergeable,
    /// The program rewrites it often: skip it as if merges had observed that. Pages that are merged when the program
    /// writes to them are skipped for 68 minutes. [`crate::Engine::clear`] ends that, as does disowning and adopting
    /// the range again.
    Rewritten,
}
