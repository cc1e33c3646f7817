//! Of whom is looked at again little is read, and what is found is what there is.

use super::*;

/// Looks at some processes, again and again, under one key.
struct Looks {
    ages: Ages,
    began: Instant,
    options: Options,
    stop: AtomicBool,
}

/// What a look found.
#[derive(Debug, PartialEq, Default)]
struct Look {
    covered: BTreeSet<(u32, usize)>,
    /// Pages that were read.
    read: u64,
    /// Pages of the first process that were not.
    spared: u64,
    /// Pages that are taken to change.
    volatile: u64,
}

impl Looks {
    fn new() -> Self {
        let began = Instant::now();
        let ages = Ages::since(PageSize::new(PAGE).unwrap(), began).unwrap();
        let options = Options { second: Second::Candidates, ..options(false, CHEAP) };
        Self { ages, began, options, stop: AtomicBool::new(false) }
    }

    fn look(&mut self, host: &MadeHost, after: Duration) -> Look {
        self.look_at(host, after, &[])
    }

    /// Look at all processes, or at some.
    fn look_at(&mut self, host: &MadeHost, after: Duration, pids: &[u32]) -> Look {
        let before = host.read.load(Ordering::Relaxed);
        let (remembered, hasher) = self.ages.remembered();
        let progress = Progress::default();
        let selection = Selection { pids: pids.iter().map(|&pid| Pid(pid)).collect(), ..Selection::default() };
        let options = Options { selection, ..self.options.clone() };
        let (census, index) =
            take_again((remembered, self.began + after), hasher, host, &options, &progress, &self.stop).unwrap();
        let all_are_read = (0..index.pages() as u32).all(|page| index.mark(page).was_read());
        let is_whole = !host.refuses.load(Ordering::Relaxed) && !self.stop.load(Ordering::Relaxed);
        assert!(all_are_read || !is_whole, "each page is classified");
        Look {
            covered: covered(&census),
            read: host.read.load(Ordering::Relaxed) - before,
            spared: remembered.spared(ProcessId { pid: Pid(1), start_time: 1 }).0,
            volatile: census.counts.volatile.0,
        }
    }
}

/// Of two hundred and fifty-six pages, in pieces of 64, each alone with its content.
const ALL: u64 = 256;

fn alone(from: u64) -> Vec<Page> {
    (from..from + ALL).map(Still).collect()
}

fn host(processes: &[Made]) -> MadeHost {
    let ran = (1..=processes.len() as u32).map(|pid| (pid, (1, 0))).collect();
    MadeHost { ran, ..MadeHost::new(processes) }
}

/// Some time after which others than its own threads may have written a process's memory.
const LATER: Duration = Duration::from_secs(3600);

#[test]
fn who_rests_is_not_read_again_and_who_runs_in_part() {
    let mut host = host(&[made(1, &alone(1000))]);
    let mut looks = Looks::new();
    let mut look = |host: &MadeHost, after: u64| looks.look(host, Duration::from_secs(after));
    assert_eq!(look(&host, 0), Look { read: ALL, ..Look::default() });
    assert_eq!(look(&host, 1), Look { spared: ALL, ..Look::default() });
    assert!(look(&host, LATER.as_secs()).read > 0, "others may have written to it");
    // It runs all the while, and writes nothing.
    let mut read = Vec::new();
    for second in 1..=32 {
        host.ran.insert(1, (second + 1, 0));
        let found = look(&host, LATER.as_secs() + second);
        assert_eq!((found.read + found.spared, found.volatile), (ALL, 0));
        read.push(found.read);
    }
    assert!(read.iter().sum::<u64>() <= ALL * 32 / 6, "{read:?}");
    // Of each piece four are read in a look.
    assert!(
        read[16..].iter().sum::<u64>() >= 4 * (64 + 15 * 4),
        "each piece is read whole in one look of 16: {read:?}"
    );
    // Where the kernel does not tell, it may have run.
    host.ran.insert(1, (0, 0));
    assert!(look(&host, LATER.as_secs() + 40).read > 0);
}

#[test]
fn who_comes_finds_what_others_are_remembered_to_hold() {
    let mut looks = Looks::new();
    let first = host(&[made(1, &alone(1000))]);
    looks.look(&first, Duration::ZERO);
    looks.look(&first, Duration::from_secs(1));
    let both = host(&[made(1, &alone(1000)), made(1, &[Still(1007), Still(1100), Still(1200), Still(5)])]);
    let found = looks.look(&both, Duration::from_secs(2));
    assert_eq!(found.covered, BTreeSet::from([(1, 7), (1, 100), (1, 200), (2, 0), (2, 1), (2, 2)]));
    assert_eq!((found.read, found.spared), (4 + 3 * 64, 64), "who rests is read where it has a partner");
    // What it was remembered to hold it holds no longer, and its pages are read before they count.
    let mut pages = alone(1000);
    (pages[7], pages[100]) = (Still(6), Still(8));
    let changed = host(&[made(1, &pages), both.processes[1].clone()]);
    assert_eq!(looks.look(&changed, Duration::from_secs(3)).covered, BTreeSet::from([(1, 200), (2, 2)]));
}

#[test]
fn what_was_not_read_is_not_enrolled_with_what_was() {
    let mut looks = Looks::new();
    // A range costs more than all that lies between two pages.
    looks.options.costs = Some(Costs { range: 1500, scan: 1, ..CHEAP });
    let host = host(&[made(1, &alone(1000)), made(1, &[Still(1063), Still(1128)])]);
    let fresh = covered(&census(&host.processes, &looks.options).0);
    assert_eq!(fresh, (63..=128).map(|page| (1, page)).chain([(2, 0), (2, 1)]).collect());
    looks.look_at(&host, Duration::ZERO, &[1]);
    let found = looks.look(&host, Duration::from_secs(1));
    assert_eq!((found.covered, found.spared), (BTreeSet::from([(1, 63), (1, 128), (2, 0), (2, 1)]), 2 * 64));
}

#[test]
fn what_ksm_was_told_of_is_read_and_who_is_only_a_witness() {
    let enrolled = |uid: u32, from: u64| Made { enrolled: true, ..made(uid, &alone(from)) };
    let looked = |processes: &[Made], enrolled: &[u32]| {
        let host = host(processes);
        let mut looks = Looks::new();
        for second in [0, 1] {
            looks.look_at(&host, Duration::from_secs(second), &[]);
        }
        looks.options.enrolled = enrolled.iter().map(|&pid| ProcessId { pid: Pid(pid), start_time: 1 }).collect();
        let chosen: Vec<u32> = (1..=processes.len() as u32).filter(|pid| !enrolled.contains(pid)).collect();
        let found = looks.look_at(&host, Duration::from_secs(2), &chosen);
        (found.spared, found.read)
    };
    assert_eq!(looked(&[made(1, &alone(1000)), made(2, &alone(2000))], &[]), (ALL, 0));
    assert_eq!(looked(&[enrolled(1, 1000), made(2, &alone(2000))], &[]), (0, ALL));
    assert_eq!(looked(&[made(1, &alone(1000)), enrolled(2, 2000)], &[2]), (ALL, ALL));
    assert_eq!(looked(&[made(1, &[&alone(1000)[..], &[Merged(7)]].concat())], &[]), (0, ALL + 1));
}

/// A content that another domain has enrolled, in a page between two that are worth a range with all between them.
#[test]
fn what_has_changed_unseen_or_changes_is_not_enrolled_with_what_lies_beside_it() {
    let of = |changed: Page| {
        let mut pages = alone(1000);
        (pages[10], pages[14], pages[12]) = (Still(7), Still(7), changed);
        made(1, &pages)
    };
    let between = Some(Costs { range: 1500, scan: 1, ..CHEAP });
    let witness = || Made { enrolled: true, ..made(2, &[Still(9)]) };
    let witnesses = vec![ProcessId { pid: Pid(2), start_time: 1 }];
    // It rests, by its own account: a device wrote to it. Then what was to be merged with is new.
    let mut looks = Looks::new();
    looks.options.costs = between;
    let mut host = host(&[made(1, &alone(1000)), witness()]);
    looks.look_at(&host, Duration::ZERO, &[1]);
    host.processes[0] = of(Still(9));
    // So that its witness is read.
    looks.options.enrolled = witnesses.clone();
    let fresh = covered(
        &census_of(
            MadeHost::new(&host.processes),
            &Options { selection: Selection { pids: vec![Pid(1)], ..Selection::default() }, ..looks.options.clone() },
        )
        .0,
    );
    assert_eq!(fresh, BTreeSet::from([(1, 10), (1, 14)]), "as it is without remembering");
    host.processes.push(made(1, &[Still(1010), Still(7)]));
    host.ran.insert(3, (1, 0));
    let found = looks.look_at(&host, Duration::from_secs(1), &[1, 3]).covered;
    assert!(!found.contains(&(1, 12)), "{found:?}");
    // It changes each time until it holds that.
    let mut looks = Looks::new();
    (looks.options.costs, looks.options.enrolled) = (between, witnesses);
    for second in 0..40 {
        host.processes[0] = of(if second < 20 { Changing } else { Still(9) });
        host.ran.insert(1, (second + 2, 0));
        let found = looks.look_at(&host, Duration::from_secs(second), &[1]).covered;
        assert!(found.contains(&(1, 10)) && !found.contains(&(1, 12)) || second < 20, "{second}: {found:?}");
    }
}

#[test]
fn what_cannot_be_read_does_not_count() {
    // The same, but nobody has seen them side by side.
    let host = host(&[made(1, &alone(1000)), made(1, &alone(1000))]);
    let mut looks = Looks::new();
    for pid in [1, 2] {
        looks.look_at(&host, Duration::from_secs(pid.into()), &[pid]);
    }
    host.refuses.store(true, Ordering::Relaxed);
    assert_eq!(looks.look(&host, Duration::from_secs(3)).covered, BTreeSet::new());
    host.refuses.store(false, Ordering::Relaxed);
    assert_eq!(looks.look(&host, Duration::from_secs(4)).covered.len() as u64, 2 * ALL);
}

#[test]
fn what_is_new_or_changes_is_read() {
    let mut host = host(&[made(1, &alone(1000))]);
    let mut looks = Looks::new();
    let mut look = |host: &mut MadeHost, second: u64| {
        host.ran.insert(1, (second + 1, 0));
        looks.look(host, Duration::from_secs(second)).covered
    };
    for second in 0..6 {
        look(&mut host, second);
    }
    // Everything is written, and there are pages that were not there: one like one of each piece.
    let of_each = |from: u64| (0..4).map(move |piece| Still(from + piece * 64));
    let written: Vec<Page> = alone(9000).into_iter().chain(of_each(9000)).collect();
    host.processes[0] = made(1, &written);
    let shared =
        |at: usize| (0..4).flat_map(move |i| [(1, i * 64 + at), (1, ALL as usize + i)]).collect::<BTreeSet<_>>();
    assert_eq!(look(&mut host, 10), shared(0));
    // Where it has just been written, one page that is written alone is found, too.
    let mut pages = written[..ALL as usize].to_vec();
    (0..4).for_each(|piece| pages[piece * 64 + 3] = Still(20000 + piece as u64 * 64));
    host.processes[0] = made(1, &pages.into_iter().chain(of_each(20000)).collect::<Vec<_>>());
    assert_eq!(look(&mut host, 11), shared(3));
}

#[test]
fn to_have_rested_is_no_reason_to_be_trusted_when_it_runs() {
    let mut host = host(&[made(1, &alone(1000))]);
    let mut looks = Looks::new();
    for second in 0..8 {
        looks.look(&host, Duration::from_secs(second));
    }
    let mut pages = alone(1000);
    (0..4).for_each(|piece| pages[piece * 64 + 3] = Still(20000 + piece as u64));
    host.processes = vec![made(1, &pages), made(1, &(0..4).map(|piece| Still(20000 + piece)).collect::<Vec<_>>())];
    host.ran = [(1, (2, 0)), (2, (1, 0))].into();
    let found = looks.look(&host, Duration::from_secs(8)).covered;
    assert_eq!(found, (0..4).flat_map(|piece| [(1, piece * 64 + 3), (2, piece)]).collect());
}

#[test]
fn to_rest_in_between_does_not_keep_it_from_being_read() {
    let mut host = host(&[made(1, &alone(1000))]);
    let mut looks = Looks::new();
    let mut look = |host: &mut MadeHost, second: u64| {
        host.ran.insert(1, (second / 2 + 1, 0));
        looks.look(host, Duration::from_secs(second)).covered
    };
    for second in 0..16 {
        look(&mut host, second);
    }
    let mut pages = alone(1000);
    (0..4).for_each(|piece| pages[piece * 64 + 3] = Still(20000));
    host.processes[0] = made(1, &pages);
    let shared: BTreeSet<(u32, usize)> = (0..4).map(|piece| (1, piece * 64 + 3)).collect();
    let found: BTreeSet<(u32, usize)> = (16..16 + 32).flat_map(|second| look(&mut host, second)).collect();
    assert!(found.is_subset(&shared) && found.len() >= 2, "{found:?}");
    assert_eq!((0..32).map(|second| look(&mut host, 48 + second)).last(), Some(shared));
}

#[test]
fn what_changes_each_time_is_read_ever_more_seldom_and_found_once_it_does_not() {
    let partner = made(1, &[Still(7), Still(8)]);
    let with = |first: &[Page]| {
        let still = (first.len() as u64..ALL).map(|i| Still(1000 + i));
        made(1, &first.iter().copied().chain(still).collect::<Vec<_>>())
    };
    let mut host = host(&[with(&[Changing; 32]), partner]);
    let mut looks = Looks::new();
    let mut look = |host: &mut MadeHost, second: u64| {
        host.ran.insert(1, (second + 1, 0));
        looks.look(host, Duration::from_secs(second))
    };
    let read: Vec<u64> = (0..40).map(|second| look(&mut host, second).read).collect();
    assert_eq!(read[..2], [ALL + 2; 2], "{read:?}");
    // In one look of eight, with a sixteenth and four of each piece of the others, and the partner.
    let late = read[24..].iter().sum::<u64>();
    assert!((32 * 2..32 * 2 + 16 * (16 + 16 + 2)).contains(&late), "{late}: {read:?}");
    let some = [&[Still(7), Still(8)][..], &[Changing; 30]].concat();
    host.processes[0] = with(&some);
    let found: Vec<_> = (40..57).map(|second| look(&mut host, second).covered).collect();
    let shared = BTreeSet::from([(1, 0), (1, 1), (2, 0), (2, 1)]);
    assert!(found[8..].iter().all(|found| *found == shared), "{found:?}");
    // What is still again, though it is like nothing else, is not taken to change for ever.
    host.processes[0] = with(&[Still(7), Still(8)]);
    let found: Vec<_> = (57..82).map(|second| look(&mut host, second).volatile).collect();
    assert!(found[0] > 0 && found[17..].iter().all(|volatile| *volatile == 0), "{found:?}");
}

#[test]
fn little_that_is_scattered_is_not_remembered() {
    let scattered: Vec<Page> = (0..ALL).map(|i| if i % 10 == 0 { Still(1000 + i) } else { Hole }).collect();
    let host = host(&[made(1, &scattered)]);
    let mut looks = Looks::new();
    let read = [0, 1].map(|second| looks.look(&host, Duration::from_secs(second)).read);
    assert_eq!(read, [26, 26]);
}

#[test]
fn a_look_that_was_halted_or_missed_somebody_does_not_mislead() {
    let mut looks = Looks::new();
    // Beyond what is read at once, with pieces in two portions.
    let pages: Vec<Page> = [Hole].into_iter().chain((0..20000).map(|i| Still(1000 + i))).collect();
    let mut host = host(&[made(1, &pages), made(1, &[Still(1063)])]);
    assert_eq!(looks.look_at(&host, Duration::ZERO, &[1]).read, 20000);
    assert_eq!(looks.look_at(&host, Duration::from_secs(1), &[1]).spared, 20000);
    looks.stop.store(true, Ordering::Relaxed);
    host.ran.insert(1, (2, 0));
    assert_eq!(looks.look(&host, Duration::from_secs(2)).covered, BTreeSet::new());
    looks.stop.store(false, Ordering::Relaxed);
    assert_eq!(looks.look_at(&host, Duration::from_secs(3), &[2]).covered, BTreeSet::new());
    let found = looks.look(&host, Duration::from_secs(4));
    assert_eq!(found.covered, BTreeSet::from([(1, 64), (2, 0)]));
    assert_eq!(found.read + found.spared, 20001);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever was written unseen, nothing is enrolled that another domain has enrolled, or that is enrolled in another.
    #[test]
    fn domains_are_kept_apart_whatever_is_remembered(
        contents in prop::collection::vec(1u64..300, 300),
        changes in prop::collection::vec((0usize..300, 1u64..300), 100),
        range in prop::sample::select(vec![0, 400, 1500]),
        rests in any::<bool>(),
    ) {
        let mut contents = contents;
        let mut looks = Looks::new();
        looks.options.costs = Some(Costs { range, scan: 1, ..CHEAP });
        looks.options.enrolled = vec![ProcessId { pid: Pid(4), start_time: 1 }];
        for (step, changes) in changes.chunks(5).enumerate() {
            for &(page, content) in changes {
                contents[page] = content;
            }
            let of = |pages: std::ops::Range<usize>| contents[pages].iter().map(|&content| Still(content)).collect::<Vec<_>>();
            let witness = Made { enrolled: true, ..made(3, &of(270..300)) };
            let mut made_up = host(&[made(1, &of(0..90)), made(1, &of(90..180)), made(2, &of(180..270)), witness]);
            let ran = |pid: u32| if rests && pid < 4 { (1, 0) } else { (step as u64 + 1, 0) };
            made_up.ran = (1..=4).map(|pid| (pid, ran(pid))).collect();
            let found = looks.look_at(&made_up, Duration::from_secs(step as u64), &[1, 2, 3]).covered;
            let mut domains: BTreeMap<u64, BTreeSet<u32>> = BTreeMap::new();
            for (pid, page) in found.into_iter().chain((0..30).map(|page| (4, page))) {
                let content = contents[(pid as usize - 1) * 90 + page];
                domains.entry(content).or_default().insert(made_up.processes[pid as usize - 1].uid);
            }
            prop_assert!(domains.values().all(|domains| domains.len() == 1), "{step}: {domains:?}");
        }
    }

    /// What is covered is shared, whatever is remembered; and after as many looks as it takes for each piece to be read
    /// whole it is what is found without remembering anything.
    #[test]
    fn nothing_is_taken_for_shared_that_is_not_and_all_is_found_that_is(
        contents in prop::collection::vec(1u64..400, 150),
        changes in prop::collection::vec((0usize..150, 1u64..400), 0..60),
        runs in any::<bool>(),
    ) {
        let of = |contents: &[u64]| contents.iter().map(|&content| Still(content)).collect::<Vec<_>>();
        let mut made_up = host(&[made(1, &of(&contents[..100])), made(1, &of(&contents[100..]))]);
        let mut looks = Looks::new();
        let mut contents = contents;
        let mut run = 1;
        for (step, changes) in changes.chunks(6).enumerate() {
            for &(page, content) in changes {
                contents[page] = content;
            }
            made_up.processes = vec![made(1, &of(&contents[..100])), made(1, &of(&contents[100..]))];
            run += 1;
            made_up.ran = [(1, (run, 0)), (2, (run, 0))].into();
            let found = looks.look(&made_up, Duration::from_secs(step as u64));
            let count = |content: u64| contents.iter().filter(|other| **other == content).count();
            for (pid, page) in found.covered {
                let content = contents[page + if pid == 2 { 100 } else { 0 }];
                prop_assert!(count(content) > 1, "page {page} of {pid} is shared with nobody");
            }
        }
        for step in 0..17 {
            run += u64::from(runs);
            made_up.ran = [(1, (run, 0)), (2, (run, 0))].into();
            looks.look(&made_up, Duration::from_secs(100) + LATER * step);
        }
        let found = looks.look(&made_up, Duration::from_secs(200) + LATER * 17).covered;
        let (fresh, ..) = census(&made_up.processes, &looks.options);
        prop_assert_eq!(found, covered(&fresh));
    }
}
