//! The status of members and domains, compared with memory whose contents are known page by page.

use pagefold_base::engine::PageTally;
use pagefold_base::{Bytes, NetBytes, Pages};
use pagefold_engine::{AllocatedRegion, Engine, EngineOptions, observe};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;
use tempfile::TempDir;

const PAGE_BYTES: usize = 4096;

fn domains_root() -> TempDir {
    let root = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    std::fs::set_permissions(root.path(), std::fs::Permissions::from_mode(0o700)).expect("permission");
    root
}

fn unbounded_options(root: &TempDir) -> EngineOptions {
    EngineOptions { root: Some(root.path().to_owned()), max_slowdown: None, ..EngineOptions::default() }
}

/// Fill pages from `from` on. The content of each follows from the seed and its number; seed 0 is zeros.
fn fill_pages(region: &mut AllocatedRegion<'_>, from: usize, count: usize, seed: u64) {
    for number in from..from + count {
        let content = if seed == 0 { 0 } else { seed << 32 | number as u64 };
        let page = &mut region.as_mut_slice()[number * PAGE_BYTES..(number + 1) * PAGE_BYTES];
        page.as_chunks_mut::<8>().0.fill(content.to_ne_bytes());
    }
}

fn merge_once(engine: &Engine) {
    // SAFETY: no other thread writes during the merge, and no borrow of a region is used.
    unsafe { engine.merge() }.expect("a usable domain");
}

fn page_tally(pages: u64, merged: u64, zeros: u64, rewritten_pages: u64) -> PageTally {
    PageTally {
        pages: Pages(pages),
        merged: Pages(merged),
        zeros: Pages(zeros),
        rewritten_pages: Pages(rewritten_pages),
    }
}

fn net_bytes_of_pages(pages: i64) -> NetBytes {
    NetBytes(pages * PAGE_BYTES as i64)
}

#[test]
fn region_member_and_domain_status_match_known_pages() {
    let root = domains_root();
    let first = Engine::join("known", &unbounded_options(&root)).expect("a domain");
    let second = Engine::join("known", &unbounded_options(&root)).expect("a domain");
    let (mut table, mut work) = (first.allocate(1000 * PAGE_BYTES).unwrap(), first.allocate(200 * PAGE_BYTES).unwrap());
    let mut other = second.allocate(700 * PAGE_BYTES).unwrap();
    fill_pages(&mut table, 0, 600, 7);
    fill_pages(&mut table, 600, 100, 0);
    // Contents that no other region has. The last 200 pages are never touched.
    fill_pages(&mut table, 700, 100, 8);
    fill_pages(&mut work, 0, 200, 0);
    fill_pages(&mut other, 0, 600, 7);
    assert_eq!(first.domain_status().unwrap().tally(), page_tally(1900, 0, 0, 0), "published at once");
    assert_eq!(first.domain_status().unwrap().members[0].last_merge, None);

    for engine in [&first, &second, &first] {
        merge_once(engine);
    }
    // A merge publishes these figures without a request.
    let domain = second.domain_status().unwrap();
    assert_eq!((domain.members.len(), domain.ended_members, domain.unreadable_members), (2, 0, 0));
    assert_eq!(domain.tally(), page_tally(1900, 1200, 300, 0));
    assert_eq!((domain.stored, domain.sharing()), (Pages(600), Some(2.0)));
    assert_eq!(domain.saved_by_all(), net_bytes_of_pages(600 + 300));
    assert_eq!(domain.net().0, net_bytes_of_pages(900).0 - domain.overhead().0 as i64);
    assert_eq!(domain.index, Bytes(4096 * 16), "the first index is large enough");
    assert!(domain.files > domain.index && domain.overhead().0 >= domain.files.0 + 1900 * 4);
    let mut merges: Vec<u64> = domain.members.iter().map(|member| member.merges).collect();
    merges.sort_unstable();
    assert_eq!(merges, [1, 2]);
    assert!(domain.members.iter().all(|member| member.last_merge.is_some_and(|merge| merge <= member.reported_at)));

    let regions = first.region_statuses().unwrap();
    let status_of =
        |region: &AllocatedRegion<'_>| *regions.iter().find(|found| found.range == region.range()).expect("the region");
    assert_eq!(
        (status_of(&table).tally, status_of(&table).saved),
        (page_tally(1000, 600, 100, 0), net_bytes_of_pages(300 + 100))
    );
    assert_eq!((status_of(&work).tally, status_of(&work).saved), (page_tally(200, 0, 200, 0), net_bytes_of_pages(200)));
    let second_regions = second.region_statuses().unwrap();
    assert_eq!(
        (second_regions.len(), second_regions[0].tally, second_regions[0].saved),
        (1, page_tally(700, 600, 0, 0), net_bytes_of_pages(300))
    );

    let status = first.status().unwrap();
    assert_eq!((status.pages, status.merged, status.zeros), (Pages(1200), Pages(600), Pages(300)));
    assert_eq!((status.store_bytes, status.note_bytes, status.merge_count), (Bytes(600 * 4096), Bytes(1200 * 8), 2));
    assert!(status.time_use.spent >= status.totals.program_time && status.totals.program_time > Duration::ZERO);
    assert!(status.time_use.slowdown() > 0.0 && status.time_use.elapsed > status.time_use.spent);

    // The member itself sees writes at once; other members see them after it publishes its figures.
    fill_pages(&mut other, 0, 10, 9);
    fill_pages(&mut work, 0, 5, 9);
    assert_eq!(second.domain_status().unwrap().tally(), page_tally(1900, 1200, 300, 0));
    assert_eq!(second.region_statuses().unwrap()[0].tally.merged, Pages(590));
    assert_eq!(first.status().unwrap().zeros, Pages(295));
    assert_eq!(first.domain_status().unwrap().tally(), page_tally(1900, 1190, 295, 0));
    merge_once(&second);
    merge_once(&first);
    let domain = first.domain_status().unwrap();
    assert_eq!(domain.tally(), page_tally(1900, 1190, 295, 15), "written pages are skipped");
    assert_eq!((domain.stored, domain.saved_by_all()), (Pages(600), net_bytes_of_pages(590 + 295)));

    drop(other);
    drop(second);
    assert_eq!(first.domain_status().unwrap().members.len(), 1, "a member that leaves removes its figures");
    drop((table, work));
    assert_eq!(first.domain_status().unwrap().tally(), page_tally(0, 0, 0, 0));
    drop(first);
    let root =
        observe::DomainsRoot { directory: root.path().to_owned(), owner_uid: rustix::process::geteuid().as_raw() };
    // The second member left while the first one had merged memory in the same process; the process keeps those
    // references.
    let domain = observe::read_domain(&root, "known").unwrap();
    assert_eq!((domain.members.len(), domain.ended_members, domain.unreadable_members), (0, 0, 0));
}

#[test]
fn observing_a_domain_changes_nothing() {
    let root = domains_root();
    let engine = Engine::join("seen", &unbounded_options(&root)).expect("a domain");
    let mut region = engine.allocate(100 * PAGE_BYTES).unwrap();
    fill_pages(&mut region, 0, 50, 3);
    region.as_mut_slice().copy_within(0..50 * PAGE_BYTES, 50 * PAGE_BYTES);
    merge_once(&engine);
    let files = || {
        let entries = root.path().join("seen").read_dir().unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<_> = entries.map(|path| (std::fs::read(&path).unwrap(), path)).collect();
        files.sort();
        files
    };
    let files_before = files();
    let observed =
        observe::DomainsRoot { directory: root.path().to_owned(), owner_uid: rustix::process::geteuid().as_raw() };
    let domain = observe::read_domain(&observed, "seen").unwrap();
    assert_eq!((domain.tally(), domain.stored), (page_tally(100, 100, 0, 0), Pages(50)));
    assert_eq!(files(), files_before);
}
