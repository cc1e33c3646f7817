//! What members and domains tell of themselves, against memory whose contents are known page by page.

use pagefold_base::engine::Tally;
use pagefold_base::{Bytes, NetBytes, Pages};
use pagefold_engine::{Engine, Options, Region, observe};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;
use tempfile::TempDir;

const PAGE: usize = 4096;

fn root() -> TempDir {
    let root = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    std::fs::set_permissions(root.path(), std::fs::Permissions::from_mode(0o700)).expect("its owner may");
    root
}

fn options(root: &TempDir) -> Options {
    Options { root: Some(root.path().to_owned()), max_slowdown: None, ..Options::default() }
}

/// Fill pages from one on, each with a content of its own that follows from a seed and its number; 0 is zeros.
fn fill(region: &mut Region<'_>, from: usize, count: usize, seed: u64) {
    for number in from..from + count {
        let content = if seed == 0 { 0 } else { seed << 32 | number as u64 };
        let page = &mut region.as_mut_slice()[number * PAGE..(number + 1) * PAGE];
        page.as_chunks_mut::<8>().0.fill(content.to_ne_bytes());
    }
}

fn merge(engine: &Engine) {
    // SAFETY: nobody writes meanwhile, and no borrow of a region is used.
    unsafe { engine.merge() }.expect("a domain that works");
}

fn tally(pages: u64, merged: u64, zeros: u64, hot: u64) -> Tally {
    Tally { pages: Pages(pages), merged: Pages(merged), zeros: Pages(zeros), hot: Pages(hot) }
}

fn pages(pages: i64) -> NetBytes {
    NetBytes(pages * PAGE as i64)
}

#[test]
fn regions_members_and_the_domain_tell_what_is_known_of_them() {
    let root = root();
    let first = Engine::join("known", &options(&root)).expect("a domain");
    let second = Engine::join("known", &options(&root)).expect("a domain");
    let (mut table, mut work) = (first.allocate(1000 * PAGE).unwrap(), first.allocate(200 * PAGE).unwrap());
    let mut other = second.allocate(700 * PAGE).unwrap();
    fill(&mut table, 0, 600, 7);
    fill(&mut table, 600, 100, 0);
    // What nobody else has. The last 200 pages are never touched.
    fill(&mut table, 700, 100, 8);
    fill(&mut work, 0, 200, 0);
    fill(&mut other, 0, 600, 7);
    assert_eq!(first.domain().unwrap().tally(), tally(1900, 0, 0, 0), "adopted is told at once");
    assert_eq!(first.domain().unwrap().members[0].last_merge, None);

    for engine in [&first, &second, &first] {
        merge(engine);
    }
    // Told by merging, without being asked.
    let domain = second.domain().unwrap();
    assert_eq!((domain.members.len(), domain.ended, domain.unread), (2, 0, 0));
    assert_eq!(domain.tally(), tally(1900, 1200, 300, 0));
    assert_eq!((domain.stored, domain.sharing()), (Pages(600), Some(2.0)));
    assert_eq!(domain.saved_by_all(), pages(600 + 300));
    assert_eq!(domain.net().0, pages(900).0 - domain.overhead().0 as i64);
    assert_eq!(domain.index, Bytes(4096 * 16), "the first index is large enough");
    assert!(domain.files > domain.index && domain.overhead().0 >= domain.files.0 + 1900 * 4);
    let mut merges: Vec<u64> = domain.members.iter().map(|member| member.merges).collect();
    merges.sort_unstable();
    assert_eq!(merges, [1, 2]);
    assert!(domain.members.iter().all(|member| member.last_merge.is_some_and(|merge| merge <= member.told)));

    let regions = first.regions().unwrap();
    let of = |region: &Region<'_>| *regions.iter().find(|found| found.range == region.range()).expect("the region");
    assert_eq!((of(&table).tally, of(&table).saved), (tally(1000, 600, 100, 0), pages(300 + 100)));
    assert_eq!((of(&work).tally, of(&work).saved), (tally(200, 0, 200, 0), pages(200)));
    let others = second.regions().unwrap();
    assert_eq!((others.len(), others[0].tally, others[0].saved), (1, tally(700, 600, 0, 0), pages(300)));

    let standing = first.standing().unwrap();
    assert_eq!((standing.pages, standing.merged, standing.zeros), (Pages(1200), Pages(600), Pages(300)));
    assert_eq!((standing.store, standing.notes, standing.merges), (Bytes(600 * 4096), Bytes(1200 * 8), 2));
    assert!(standing.spending.spent >= standing.so_far.time && standing.so_far.time > Duration::ZERO);
    assert!(standing.spending.slowdown() > 0.0 && standing.spending.elapsed > standing.spending.spent);

    // What is written shows at once to who asks, and to the others when it is told.
    fill(&mut other, 0, 10, 9);
    fill(&mut work, 0, 5, 9);
    assert_eq!(second.domain().unwrap().tally(), tally(1900, 1200, 300, 0));
    assert_eq!(second.regions().unwrap()[0].tally.merged, Pages(590));
    assert_eq!(first.standing().unwrap().zeros, Pages(295));
    assert_eq!(first.domain().unwrap().tally(), tally(1900, 1190, 295, 0));
    merge(&second);
    merge(&first);
    let domain = first.domain().unwrap();
    assert_eq!(domain.tally(), tally(1900, 1190, 295, 15), "what was written is left alone");
    assert_eq!((domain.stored, domain.saved_by_all()), (Pages(600), pages(590 + 295)));

    drop(other);
    drop(second);
    assert_eq!(first.domain().unwrap().members.len(), 1, "who leaves takes its figures along");
    drop((table, work));
    assert_eq!(first.domain().unwrap().tally(), tally(0, 0, 0, 0));
    drop(first);
    let root = observe::Root { path: root.path().to_owned(), owner: rustix::process::geteuid().as_raw() };
    // The second has left while the first had merged memory in the same process, whose references it keeps.
    let left = observe::domain(&root, "known").unwrap();
    assert_eq!((left.members.len(), left.ended, left.unread), (0, 0, 0));
}

#[test]
fn looking_at_a_domain_changes_nothing_in_it() {
    let root = root();
    let engine = Engine::join("seen", &options(&root)).expect("a domain");
    let mut region = engine.allocate(100 * PAGE).unwrap();
    fill(&mut region, 0, 50, 3);
    region.as_mut_slice().copy_within(0..50 * PAGE, 50 * PAGE);
    merge(&engine);
    let files = || {
        let entries = root.path().join("seen").read_dir().unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<_> = entries.map(|path| (std::fs::read(&path).unwrap(), path)).collect();
        files.sort();
        files
    };
    let before = files();
    let observed = observe::Root { path: root.path().to_owned(), owner: rustix::process::geteuid().as_raw() };
    let domain = observe::domain(&observed, "seen").unwrap();
    assert_eq!((domain.tally(), domain.stored), (tally(100, 100, 0, 0), Pages(50)));
    assert_eq!(files(), before);
}
