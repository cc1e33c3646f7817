use super::*;
use crate::decide::MappedPages;
use pagefold_base::identity::Identity;
use pagefold_base::ksm::ProcessKsm;
use pagefold_base::process::Process;
use pagefold_base::units::{Pid, ProcessId};
use std::num::NonZeroU64;

const PAGE: u64 = 4096;

fn page() -> PageSize {
    PageSize::new(PAGE).unwrap()
}

fn shares(entries: &[(u64, u64)]) -> MappingShares {
    let mut shares = MappingShares::default();
    for &(mappings, pages) in entries {
        shares.add(NonZeroU64::new(mappings).unwrap(), pages);
    }
    shares
}

fn account(pid: u32, mapped: MappedPages, ksm: ProcessKsm) -> Account {
    let pss = Ok(mapped.shares.bytes(page()));
    Account {
        footprint: Footprint::exact(page(), mapped, pss, Ok(Bytes::ZERO), &ksm),
        process: Process {
            id: ProcessId { pid: Pid(pid), start_time: 1 },
            comm: "p".to_owned(),
            state: 'S',
            kernel_thread: false,
            uid: Ok(0),
            setuid: false,
            arguments: Ok(vec![]),
            cgroup: Ok("/".to_owned()),
            identity: Identity::default(),
            ksm,
            seccomp: Ok(0),
            pinned: Ok(Bytes::ZERO),
        },
    }
}

fn process_ksm(rmap_items: u64, merging: u64, zero: i64) -> ProcessKsm {
    ProcessKsm {
        rmap_items: Ok(rmap_items),
        merging_pages: Ok(merging),
        zero_pages: Ok(zero),
        profit: Ok((merging as i64 + zero) * PAGE as i64 - rmap_items as i64 * 64),
        merge_any: Ok(false),
        mergeable: Ok(true),
    }
}

/// Counters observed on 6.18 with four processes. Each has 4,000 pages that all have in common, 600 pages of one
/// content and 1,000 zero pages, with 7,600 pages registered; see the values asserted below.
fn merged_host() -> (Vec<Account>, Frames, Ksm) {
    let absent = || Err(Absent::NotOnThisKernel);
    // 2,400 mappings of one content: nine frames at the limit of 256, and one of 96.
    let ksm_shares = [
        shares(&[(4, 4000), (256, 600)]),
        shares(&[(4, 4000), (256, 600)]),
        shares(&[(4, 4000), (256, 600)]),
        shares(&[(4, 4000), (256, 504), (96, 96)]),
    ];
    let accounts = ksm_shares
        .into_iter()
        .zip(1..)
        .map(|(ksm, pid)| {
            let mut all = shares(&[(1, 3000)]);
            all += &ksm;
            account(pid, MappedPages { shares: all, ksm, ..MappedPages::default() }, process_ksm(7600, 4600, 1000))
        })
        .collect();
    let frames = Frames {
        distinct: Pages(4 * 3000 + 4010),
        anonymous: Pages(4 * 3000 + 4010),
        ksm: Pages(4010),
        ksm_mappings: Pages(18_400),
        zero: Pages(4005),
        huge_zero: Pages(2048),
        ..Frames::default()
    };
    let ksm = Ksm {
        run: Ok(0),
        pages_to_scan: absent(),
        sleep_millisecs: absent(),
        pages_shared: Ok(4010),
        pages_sharing: Ok(14_390),
        pages_unshared: absent(),
        pages_volatile: absent(),
        pages_scanned: absent(),
        pages_skipped: absent(),
        full_scans: absent(),
        max_page_sharing: Ok(256),
        merge_across_nodes: absent(),
        use_zero_pages: Ok(1),
        ksm_zero_pages: Ok(4000),
        general_profit: Ok(73_379_840),
        stable_node_chains: Ok(1),
        stable_node_dups: Ok(10),
        smart_scan: absent(),
        advisor_mode: Err(Absent::NotOnThisKernel),
        advisor_target_scan_time: absent(),
    };
    (accounts, frames, ksm)
}

fn memory(anon: u64) -> MemInfo {
    let absent = || Err(Absent::NotOnThisKernel);
    MemInfo {
        total: absent(),
        free: absent(),
        available: absent(),
        anon: Ok(Bytes(anon)),
        anon_huge: absent(),
        swap_total: absent(),
        swap_free: absent(),
        hugetlb: Ok(Bytes::ZERO),
    }
}

fn comparison(reconciliation: &Reconciliation, counter: KernelCounter) -> &CounterComparison {
    reconciliation.comparisons.iter().find(|line| line.counter == counter).unwrap()
}

#[test]
fn settled_memory_agrees_line_by_line() {
    let (accounts, frames, ksm) = merged_host();
    let result = reconcile(page(), &accounts, &frames, &ksm, &memory(16_010 * PAGE));
    assert!(result.balance.exact);
    assert_eq!(result.balance.fair, Bytes(16_010 * PAGE));
    assert_eq!(result.balance.changed_mappings, NetBytes(0));
    let check = |counter, account_value, difference| {
        let line = comparison(&result, counter);
        assert_eq!((line.account_value, line.difference()), (account_value, difference), "{counter:?}");
    };
    check(KernelCounter::Pss, 16_010 * PAGE as i64, Ok(0));
    check(KernelCounter::AnonPages, 16_010 * PAGE as i64, Ok(0));
    check(KernelCounter::PagesShared, 4010, Ok(0));
    check(KernelCounter::PagesSharing, 14_390, Ok(0));
    check(KernelCounter::MergingPages, 18_400, Ok(0));
    check(KernelCounter::ZeroPages, 4005, Ok(5));
    check(KernelCounter::FramesAtSharingLimit, 9, Ok(0));
    check(KernelCounter::Hugetlb, 0, Ok(0));
    check(KernelCounter::HugeZeroPage, 2048, Err(Absent::NotOnThisKernel));
    check(KernelCounter::GeneralProfit, 73_379_840, Ok(0));
    check(KernelCounter::ProcessProfit, 73_379_840, Ok(-4010 * PAGE as i64));
    assert!(
        comparison(&result, KernelCounter::MergingPages).explanation.contains("overstates by pages_shared, 4010 pages")
    );
    assert!(comparison(&result, KernelCounter::ProcessProfit).explanation.starts_with("nothing else differs"));
    assert!(comparison(&result, KernelCounter::PagesShared).explanation.starts_with("agrees"));
    assert!(comparison(&result, KernelCounter::ZeroPages).explanation.contains("read and never written"));
}

/// Counters observed on 6.18 after the first process wrote 100 merged pages, the second forked and the fourth exited,
/// with ksmd stopped.
#[test]
fn stale_counters_are_explained_by_part() {
    let (mut accounts, frames, ksm) = merged_host();
    accounts.pop();
    accounts[0].footprint.ksm = Pages(4500);
    let mut child = accounts[1].clone();
    child.footprint.merging_pages = Ok(0);
    accounts.push(child);
    let frames = Frames { ksm: Pages(4008), ksm_mappings: Pages(18_300), ..frames };
    let result = reconcile(page(), &accounts, &frames, &ksm, &memory(0));
    let drift = result.drift.clone().unwrap();
    assert_eq!(
        drift,
        SharingDrift { unvisited: 4600, stale: 100, counted_elsewhere: 4600, unseen: 0, excess_frames: 2 }
    );
    assert_eq!(drift.total(), -98);
    let sharing = comparison(&result, KernelCounter::PagesSharing);
    assert_eq!(sharing.difference(), Ok(drift.total()));
    assert!(sharing.explanation.starts_with("+4600 forked or newly merged"), "{}", sharing.explanation);
    assert!(sharing.explanation.contains("; -100 pages written"), "{}", sharing.explanation);
    assert!(comparison(&result, KernelCounter::PagesShared).explanation.contains("stale"));
    assert!(comparison(&result, KernelCounter::MergingPages).explanation.contains("forked"));
}

#[test]
fn unseen_mappings_are_reported() {
    let (mut accounts, frames, ksm) = merged_host();
    accounts.pop();
    let frames =
        Frames { distinct: Pages(frames.distinct.0 - 3000 - 1), unseen: shares(&[(4, 4000), (256, 504)]), ..frames };
    let result = reconcile(page(), &accounts, &frames, &ksm, &memory(0));
    let drift = result.drift.unwrap();
    assert_eq!((drift.unseen, drift.counted_elsewhere, drift.total()), (4600, 4600, 0));
    let balance = result.balance;
    assert!(balance.exact);
    assert_eq!(balance.unseen, Bytes(1000 * PAGE + 504 * PAGE / 256));
    assert!(balance.fair < balance.frames);
    assert_eq!(balance.fair.0 + balance.unseen.0, balance.frames.0);
}

#[test]
fn changed_mappings_are_reported_separately() {
    let (accounts, frames, ksm) = merged_host();
    let check = |frames: &Frames, exact, remainder| {
        let balance = reconcile(page(), &accounts, frames, &ksm, &memory(0)).balance;
        assert_eq!((balance.exact, balance.changed_mappings), (exact, NetBytes(remainder)));
    };
    check(&Frames { distinct: Pages(frames.distinct.0 + 2), ..frames.clone() }, false, 2 * PAGE as i64);
    check(&Frames { distinct: Pages(frames.distinct.0 - 1), ..frames.clone() }, false, -(PAGE as i64));
    let excess = Frames { distinct: Pages(frames.distinct.0 - 7), excess: shares(&[(1, 7)]), ..frames.clone() };
    check(&excess, true, 0);
    let unfinished = Frames { distinct: Pages(frames.distinct.0 + 5), partially_read: shares(&[(1, 5)]), ..frames };
    check(&unfinished, true, 0);
}

#[test]
fn estimates_stay_out_of_the_balance() {
    let (mut accounts, frames, ksm) = merged_host();
    let mut estimated = accounts[0].clone();
    estimated.footprint.basis = Basis::Estimated(Absent::Denied);
    accounts.push(estimated);
    let result = reconcile(page(), &accounts, &frames, &ksm, &memory(0));
    assert!(result.balance.exact);
    assert_eq!(result.estimated_processes, 1);
    assert_eq!(comparison(&result, KernelCounter::MergingPages).account_value, 18_400);
}

#[test]
fn absent_counter_has_no_difference() {
    let (accounts, frames, ksm) = merged_host();
    let ksm = Ksm { pages_shared: Err(Absent::NotOnThisKernel), ..ksm };
    let result = reconcile(page(), &accounts, &frames, &ksm, &memory(0));
    let line = comparison(&result, KernelCounter::PagesShared);
    assert_eq!(line.difference(), Err(Absent::NotOnThisKernel));
    assert_eq!(line.explanation, "this kernel has no such counter");
}
