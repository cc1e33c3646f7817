//! Whoever is enrolled in another trust domain and rests is remembered, and kept apart from like whoever is read.

use super::*;

/// A time within a second of the beginning.
const SOON: Duration = Duration::from_secs(1);

/// Looks at the first process, with all others enrolled.
struct Looks {
    ages: Ages,
    began: Instant,
}

/// What a look at the first process of a host found: the pages of it that are covered, how many pages were read, and
/// how often regions were.
#[derive(Debug, PartialEq)]
struct Look {
    covered: BTreeSet<usize>,
    read: u64,
    listed: u64,
}

impl Looks {
    fn new() -> Self {
        let began = Instant::now();
        Self { ages: Ages::since(PageSize::new(PAGE).unwrap(), began).unwrap(), began }
    }

    fn look(&mut self, host: &MadeHost, after: Duration, options: &Options) -> Look {
        let others = 2..=host.processes.len() as u32;
        let enrolled = others.map(|pid| ProcessId { pid: Pid(pid), start_time: 1 }).collect();
        let selection = Selection { pids: vec![Pid(1)], ..Selection::default() };
        let options = Options { enrolled, selection, second: Second::Candidates, ..options.clone() };
        let count = || [&host.read, &host.listed].map(|count| count.load(Ordering::Relaxed));
        let before = count();
        let (remembered, hasher) = self.ages.remembered();
        let (progress, stop) = (Progress::default(), AtomicBool::new(false));
        let (census, _) =
            take_again((remembered, self.began + after), hasher, host, &options, &progress, &stop).unwrap();
        let [read, listed] = [0, 1].map(|of| count()[of] - before[of]);
        let covered = covered(&census).into_iter().map(|(pid, page)| {
            assert_eq!(pid, 1, "nobody else was chosen");
            page
        });
        Look { covered: covered.collect(), read, listed }
    }
}

/// Two of a content that somebody has merged in another domain, and five that nobody has, with one between them that
/// somebody has enrolled, and one that is nobody else's.
const PAGES: [Page; 9] =
    [Still(7), Still(7), Still(20), Still(20), Still(8), Still(20), Still(20), Still(9), Still(20)];

/// A hole costs less than a further range.
const JOINED: Costs = Costs { range: 1000, ..CHEAP };

/// Those that may be merged, and the hole between them.
const OURS: [usize; 6] = [2, 3, 5, 6, 7, 8];

fn other() -> Made {
    made(2, &[Merged(7), Merged(7), Still(8), Merged(30), Still(31)])
}

/// A host that tells what has run: nobody, so far.
fn host(processes: &[Made]) -> MadeHost {
    let ran = (1..=processes.len() as u32).map(|pid| (pid, (1, 0))).collect();
    MadeHost { ran, ..MadeHost::new(processes) }
}

#[test]
fn who_rests_is_not_read_again_and_what_it_holds_is_kept_apart_from() {
    // Both domains are known from the beginning, or the witness's alone.
    for uid in [1, 3] {
        let host = host(&[made(uid, &PAGES), other()]);
        let mut looks = Looks::new();
        let options = options(false, JOINED);
        let first = looks.look(&host, Duration::ZERO, &options);
        assert_eq!((&first.covered, first.listed), (&BTreeSet::from(OURS), 2));
        let second = looks.look(&host, SOON, &options);
        assert_eq!((&second.covered, second.listed), (&first.covered, 1), "its regions are not listed");
        assert_eq!(second.read, first.read - 5, "nor its pages read");
        assert_eq!(looks.look(&host, SOON, &Options { across_domains: true, ..options }).covered, (0..9).collect());
    }
}

#[test]
fn who_has_run_or_faulted_or_was_read_long_ago_is_read_again() {
    let mut host = host(&[made(1, &PAGES), other()]);
    let mut looks = Looks::new();
    let options = options(false, JOINED);
    let mut listed = |host: &MadeHost, after: Duration| looks.look(host, after, &options).listed;
    assert_eq!([0, 1, 2].map(|second| listed(&host, SOON * second)), [2, 1, 1]);
    host.ran.insert(2, (2, 0));
    assert_eq!([3, 4].map(|second| listed(&host, SOON * second)), [2, 1], "it has run");
    host.ran.insert(2, (2, 1));
    assert_eq!([5, 6].map(|second| listed(&host, SOON * second)), [2, 1], "it had a page fault");
    let hour = Duration::from_secs(3600);
    assert_eq!(listed(&host, SOON * 4 + hour), 1);
    assert_eq!(listed(&host, SOON * 5 + hour), 2, "others may have written to it");
    // What it holds now counts.
    host.ran.insert(2, (3, 1));
    host.processes[1] = made(2, &[Merged(20)]);
    let covered = looks.look(&host, SOON * 6 + hour, &options).covered;
    assert_eq!(covered, BTreeSet::from([0, 1]));
    assert_eq!(looks.look(&host, SOON * 7 + hour, &options), Look { covered, read: 9, listed: 1 });
    // Where the kernel does not count, nothing tells whether anybody has run.
    host.ran.insert(2, (0, 1));
    assert_eq!([8, 9].map(|second| looks.look(&host, SOON * second + hour, &options).listed), [2, 2]);
}

#[test]
fn of_whom_two_hold_one_is_read_when_the_other_rests() {
    let mut host = host(&[made(1, &PAGES), other(), made(2, &[Merged(20)]), made(3, &[Merged(20)])]);
    let mut looks = Looks::new();
    let options = options(false, JOINED);
    let covered: BTreeSet<usize> = BTreeSet::new();
    assert_eq!(looks.look(&host, Duration::ZERO, &options).covered, covered);
    host.ran.insert(2, (2, 0));
    let some = looks.look(&host, SOON, &options);
    assert_eq!((&some.covered, some.listed), (&covered, 2));
    // Its own domain has it merged, but so has another that rests.
    host.processes[0].uid = 3;
    assert_eq!(looks.look(&host, SOON, &options).covered, covered);
    // Where only its own domain has it, it may join.
    host.processes[2] = made(2, &[Merged(40)]);
    host.ran.insert(3, (2, 0));
    assert_eq!(looks.look(&host, SOON, &options).covered, BTreeSet::from(OURS));
}

proptest! {
    /// Whether they are read or remembered, the same is covered.
    #[test]
    fn what_is_remembered_forbids_what_it_did(
        mut processes in processes(),
        range in 0i64..2000,
        use_zero_pages in any::<bool>(),
    ) {
        // Nobody has run.
        let pages = processes.iter_mut().flat_map(|made| &mut made.pages);
        pages.filter(|page| **page == Page::Changing).for_each(|page| *page = Page::Hole);
        let host = host(&processes);
        let mut looks = Looks::new();
        let options = Options { use_zero_pages, ..options(false, Costs { range, ..CHEAP }) };
        let read = looks.look(&host, Duration::ZERO, &options).covered;
        let remembered = looks.look(&host, SOON, &options).covered;
        prop_assert_eq!(remembered, read);
    }
}
