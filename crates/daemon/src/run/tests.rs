use super::*;
use crate::decide::Censused;
use crate::decide::Mode;
use pagefold_base::domain::{DomainRule, Group};
use pagefold_base::memory::Shortage;
use pagefold_base::{Pages, Pid};
use pagefold_census::results::Matrix;
use pagefold_host::fake::Fake;
use pagefold_host::faulty::{Fault, Faulty};
use pagefold_host::transaction::journal::Directory;
use pagefold_merge::splitting;
use std::sync::atomic::AtomicUsize;

/// Pages of 4 KiB of a process that is managed, and of one that is not.
const BIG: u64 = 50_000;
const SMALL: u64 = 100;

/// The first of those who are managed.
const FIRST: u32 = 1000;

/// Forty small processes and four that are managed, each in a cgroup with a limit.
fn host() -> Fake {
    let host = Fake::booted();
    host.free(5_000_000);
    (1..=40).for_each(|pid| host.start(pid, SMALL));
    (FIRST..FIRST + 4).for_each(|pid| host.start(pid, BIG));
    host.file("sys/fs/cgroup/cgroup.controllers", "memory\n");
    host.file("sys/fs/cgroup/cgroup.procs", "");
    (FIRST..FIRST + 4).for_each(|pid| confine(&host, pid, &format!("/guest{pid}"), "0.00"));
    host
}

/// The other threads, of which one does the work.
fn threads(orders: Sender<Order>) -> Threads {
    Threads { orders, walks: mpsc::channel().0, answers: Arc::default() }
}

/// Put a process into a cgroup with a limit, half of which is left, and have memory waited for there.
fn confine(host: &Fake, pid: u32, cgroup: &str, percent: &str) {
    host.file(&format!("proc/{pid}/cgroup"), &format!("0::{cgroup}\n"));
    let file = |name: &str, text: &str| host.file(&format!("sys/fs/cgroup{cgroup}/{name}"), text);
    file("memory.max", "1073741824\n");
    file("memory.high", "max\n");
    file("memory.current", "536870912\n");
    file("memory.stat", "inactive_file 0\n");
    file("memory.swap.max", "max\n");
    let line = |word: &str| format!("{word} avg10={percent} avg60=0.00 avg300=0.00 total=1\n");
    file("memory.pressure", &(line("some") + &line("full")));
}

/// So many polls of a roster, half a second after each other, and what they told.
fn poll(roster: &mut Roster, host: &dyn Host, now: &mut Duration, times: u32) -> Vec<Event> {
    let settings = Settings::default();
    let mut poll = || {
        *now += CALM[0];
        roster.poll(host, *now, &settings).unwrap().events
    };
    (0..times).flat_map(|_| poll()).collect()
}

fn came(events: &[Event], pid: u32) -> bool {
    events.iter().any(|event| matches!(event, Event::Came(arrival) if arrival.process.pid == Pid(pid)))
}

#[test]
fn a_quiet_host_that_is_merged_is_hardly_asked_anything() {
    let (fake, asked) = (host(), AtomicUsize::new(0));
    fake.tells_of_programs();
    let count = |_: &str| {
        asked.fetch_add(1, Ordering::Relaxed);
        None::<Fault>
    };
    let host = Faulty::new(&fake, count);
    let (orders, work) = mpsc::channel();
    let mut log = |_: &str| {};
    let mut daemon = Daemon::new(&host, Settings::default(), 0, threads(orders), &mut log);
    let mut ticks = |count: usize| {
        for _ in 0..count {
            daemon.now += CALM[0];
            daemon.tick().unwrap();
            // Nothing is found, as on a host where all is merged.
            while work.try_recv().is_ok() {
                daemon.step(Event::Censused(Censused::default()));
            }
        }
    };
    // Half an hour, and then another: whoever does not change is asked less and less.
    ticks(3600);
    let before = asked.swap(0, Ordering::Relaxed);
    ticks(3600);
    let after = asked.load(Ordering::Relaxed);
    // Each tick reads how much memory there is and how it is waited for. Everybody's size once a minute, those of four
    // each 16 s and who they are each minute, their cgroups each 10 s, what is waited for each 2 s and a list each 30 s
    // come to about three more.
    assert!(after <= 3600 * 6, "{after} questions in 3600 ticks, {before} in those before");
}

#[test]
fn who_begins_is_seen_at_once_and_who_only_forks_soon() {
    let (host, mut now) = (host(), Duration::ZERO);
    host.tells_of_programs();
    let mut roster = Roster::new(&host);
    assert!(came(&poll(&mut roster, &host, &mut now, 1), FIRST));
    poll(&mut roster, &host, &mut now, 20);
    host.start(7000, BIG);
    host.begins(7000);
    assert!(came(&poll(&mut roster, &host, &mut now, 1), 7000));
    host.start(7001, BIG);
    assert!(came(&poll(&mut roster, &host, &mut now, 61), 7001), "nobody told of it");
    // One that becomes another program is told of again, and one that ends as well.
    host.begins(7000);
    host.file("proc/7000/stat", "7000 (other) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 1\n");
    assert!(came(&poll(&mut roster, &host, &mut now, 1), 7000));
    host.ended(7000);
    let process = ProcessId { pid: Pid(7000), start_time: 1 };
    assert!(poll(&mut roster, &host, &mut now, 61).contains(&Event::Went(process)));
    assert_eq!(roster.members().count(), 5);
}

#[test]
fn without_being_told_everybody_is_listed_each_time() {
    let (host, mut now) = (host(), Duration::ZERO);
    let mut roster = Roster::new(&host);
    assert!(roster.follows().is_err());
    poll(&mut roster, &host, &mut now, 1);
    host.start(7000, BIG);
    assert!(came(&poll(&mut roster, &host, &mut now, 1), 7000));
}

#[test]
fn a_storm_of_programs_costs_little_and_hides_nobody() {
    let (fake, mut now, asked) = (host(), Duration::ZERO, AtomicUsize::new(0));
    fake.tells_of_programs();
    let count = |_: &str| {
        asked.fetch_add(1, Ordering::Relaxed);
        None::<Fault>
    };
    let host = Faulty::new(&fake, count);
    let mut roster = Roster::new(&host);
    poll(&mut roster, &host, &mut now, 20);
    asked.store(0, Ordering::Relaxed);
    // Programs that have ended before anybody looks, and more that are lost, among them one that stays.
    for _ in 0..20 {
        (10_000..10_500).for_each(|pid| fake.begins(pid));
        fake.loses();
        poll(&mut roster, &host, &mut now, 1);
    }
    let questions = asked.load(Ordering::Relaxed);
    assert!(questions <= 20 * 1000 + 1000, "{questions}: two for each that is told");
    fake.start(7000, BIG);
    fake.loses();
    assert!(came(&poll(&mut roster, &host, &mut now, 2), 7000), "all are listed within a second");
    assert!(roster.follows().is_ok() && roster.members().count() == 5);
}

thread_local! {
    /// CPU time that this thread's questions to a host have taken, as if each took the same.
    static ASKING: std::cell::Cell<Duration> = const { std::cell::Cell::new(Duration::ZERO) };
}

#[test]
fn processes_that_exec_all_the_time_cannot_take_more_than_a_part_of_the_cpu_bound() {
    const STORM: std::ops::Range<u32> = 10_000..13_000;
    let (fake, settings) = (host(), Settings::default());
    fake.tells_of_programs();
    STORM.for_each(|pid| fake.start(pid, BIG));
    let count = |_: &str| {
        ASKING.set(ASKING.get() + Duration::from_micros(10));
        None::<Fault>
    };
    let faulty = Faulty::new(&fake, count);
    let mut roster = Roster::new(&faulty).with_cpu_clock(|| ASKING.get());
    let (mut now, mut execs, mut seen) = (Duration::ZERO, STORM.cycle(), None);
    let mut poll = |now: Duration| {
        // Each becomes another program every 40 seconds.
        (0..37).for_each(|_| fake.begins(execs.next().expect("they go on for ever")));
        let events = roster.poll(&faulty, now, &settings).unwrap().events;
        seen = seen.or(came(&events, 7000).then_some(now));
    };
    while now < Duration::from_secs(120) {
        now += CALM[0];
        poll(now);
    }
    let bound = now.mul_f64(settings.rules.cpu / 4.0) + Duration::from_secs(1);
    assert!(ASKING.get() <= bound + Duration::from_millis(50), "{:?} of {bound:?}", ASKING.get());
    // One that comes in the midst of it is not forgotten.
    fake.start(7000, BIG);
    fake.begins(7000);
    while now < Duration::from_secs(180) {
        now += CALM[0];
        poll(now);
    }
    assert!(seen.is_some(), "a process that came was not seen within a minute");
    assert_eq!(roster.members().count(), 4 + STORM.len() + 1);
}

#[test]
fn who_drives_ksm_is_known_before_anything_is_done() {
    let (host, mut now) = (host(), Duration::ZERO);
    host.start(77, SMALL);
    host.file("proc/77/stat", "77 (ksmtuned) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 1\n");
    host.file("proc/77/cmdline", "/bin/bash\0/usr/sbin/ksmtuned\0");
    host.file("proc/77/status", "Uid:\t0\t0\t0\t0\n");
    let mut roster = Roster::new(&host);
    poll(&mut roster, &host, &mut now, 1);
    assert!(roster.tuner().is_some());
    host.ended(77);
    poll(&mut roster, &host, &mut now, 5);
    assert!(roster.tuner().is_none());
}

#[test]
fn a_tuner_is_heeded_only_if_it_is_of_root() {
    let nobody = "Uid:\t65534\t65534\t65534\t65534\n";
    // A setuid program, and one that has become root altogether: the auxiliary vector still tells of it.
    let (setuid, root) = ("Uid:\t65534\t0\t0\t0\n", "Uid:\t0\t0\t0\t0\n");
    let secure = |value: u8| [[23u8, 0, 0, 0, 0, 0, 0, 0], [value, 0, 0, 0, 0, 0, 0, 0], [0; 8], [0; 8]].concat();
    let text = |value| String::from_utf8(secure(value)).unwrap();
    let cases = [(nobody, 0, false), (setuid, 1, false), (root, 1, false), (root, 0, true)];
    for (users, privileged, heeded) in cases {
        let (host, mut now) = (host(), Duration::ZERO);
        host.start(77, SMALL);
        host.file("proc/77/stat", "77 (ksmtuned) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 1\n");
        host.file("proc/77/cmdline", "./ksmtuned\0");
        host.file("proc/77/status", users);
        if cfg!(target_endian = "little") {
            host.file("proc/77/auxv", &text(privileged));
        }
        let mut roster = Roster::new(&host);
        poll(&mut roster, &host, &mut now, 1);
        assert_eq!(roster.tuner().is_some(), heeded, "{users} {privileged}");
        let other = pagefold_merge::ksmd::other_tuner(&host).unwrap();
        assert_eq!(other.is_some(), heeded, "{users} {privileged}");
    }
}

#[test]
fn the_host_of_another_tuner_is_not_taken_first() {
    let host = host();
    host.start(77, SMALL);
    host.file("proc/77/status", "Uid:\t0\t0\t0\t0\n");
    host.file("proc/77/stat", "77 (ksmtuned) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 1\n");
    host.file("proc/77/cmdline", "/bin/bash\0/usr/sbin/ksmtuned\0");
    let (orders, work) = mpsc::channel();
    let (mut log, mut settings) = (|_: &str| {}, Settings::default());
    settings.rules.mode = Mode::Act;
    let mut daemon = Daemon::new(&host, settings, 0, threads(orders), &mut log);
    let orders = |daemon: &mut Daemon<'_, '_>| {
        for _ in 0..20 {
            daemon.now += CALM[0];
            daemon.tick().unwrap();
        }
        work.try_iter().map(|order: Order| order.action).collect::<Vec<Action>>()
    };
    assert_eq!(orders(&mut daemon), []);
    host.ended(77);
    assert_eq!(orders(&mut daemon), [Action::Hold]);
}

#[test]
fn who_shares_with_whom_is_kept_of_the_latest_alone() {
    let label = |number: u64| format!("program[{number}]");
    let census = |number: u64| Matrix {
        parties: vec![label(number), label(number + 1)],
        shared: vec![vec![Pages(number); 2]; 2],
    };
    let mut shared = Shared::default();
    (0..1000).for_each(|number| shared.add(&census(number)));
    assert!(shared.pages().len() <= 60 * 4, "{}", shared.pages().len());
    assert_eq!(shared.pages()[&(label(1000), label(999))], Pages(999));
    assert!(!shared.pages().contains_key(&(label(1), label(1))));
    shared.retain(|name| name != label(999));
    assert!(!shared.pages().contains_key(&(label(1000), label(999))));
}

#[test]
fn who_is_squeezed_is_found_out_in_turn() {
    let (fake, mut now, mut cgroups) = (host(), Duration::ZERO, Cgroups::default());
    // More than are read at once.
    let pids: Vec<u32> = (2000..2050).collect();
    for &pid in &pids {
        fake.start(pid, BIG);
        confine(&fake, pid, &format!("/{pid}"), if pid % 2 == 0 { "50.00" } else { "0.00" });
    }
    let mut roster = Roster::new(&fake);
    poll(&mut roster, &fake, &mut now, 1);
    assert_eq!(roster.members().count(), 4 + pids.len());
    let mut short = BTreeMap::new();
    for second in 0..20 {
        let found = cgroups.read(&fake, Duration::from_secs(second), roster.members());
        assert!(found.is_empty() || second % 10 == 0, "each ten seconds");
        short.extend(found.into_iter().map(|(process, shortage)| (process.pid, shortage.is_short(10.0))));
    }
    let expect = (FIRST..FIRST + 4).map(|pid| (Pid(pid), false));
    let expect = expect.chain(pids.into_iter().map(|pid| (Pid(pid), pid % 2 == 0)));
    assert_eq!(short, expect.collect());

    // Who is moved out of there is short by the host alone.
    fake.file("proc/2000/cgroup", "0::/\n");
    roster.forget();
    poll(&mut roster, &fake, &mut now, 1);
    let found = cgroups.read(&fake, Duration::from_secs(60), roster.members());
    let told = found.iter().find(|(process, _)| process.pid == Pid(2000));
    assert_eq!(told.map(|(_, shortage)| *shortage), Some(Shortage::default()));
}

/// What is merged of somebody is not forgotten when it is no longer among those that are managed.
#[test]
fn who_is_not_chosen_any_more_is_told_of_and_who_never_was_is_not() {
    let (fake, mut now) = (host(), Duration::ZERO);
    let mut roster = Roster::new(&fake);
    assert!(came(&poll(&mut roster, &fake, &mut now, 1), FIRST));
    let only = Some(Group { users: vec![12_345], ..Group::default() });
    let settings = Settings { only, ..Settings::default() };
    fake.start(3000, BIG);
    roster.forget();
    let events: Vec<Event> = (1..10)
        .flat_map(|second| roster.poll(&fake, now + Duration::from_secs(second), &settings).unwrap().events)
        .collect();
    assert_eq!(events.len(), 4, "once each: {events:?}");
    for event in events {
        let Event::Came(arrival) = event else { panic!("it lives: {event:?}") };
        assert!(arrival.process.pid.0 < 3000 && arrival.excluded.unwrap().contains("[daemon.only]"));
    }
    roster.forget();
    let again = roster.poll(&fake, now + Duration::from_secs(60), &Settings::default()).unwrap().events;
    assert!(came(&again, FIRST) && came(&again, 3000));
}

#[test]
fn who_moves_to_another_domain_is_told_of_soon() {
    let (fake, mut now) = (host(), Duration::ZERO);
    let mut roster = Roster::new(&fake);
    let settings = Settings { domains: DomainRule::Cgroup.into(), ..Settings::default() };
    let mut minutes = |count: u64| -> Vec<Event> {
        let end = now + Duration::from_secs(60 * count);
        let mut events = Vec::new();
        while now < end {
            now += Duration::from_secs(1);
            events.extend(roster.poll(&fake, now, &settings).unwrap().events);
        }
        events
    };
    assert!(came(&minutes(1), FIRST));
    assert_eq!(minutes(3), [], "as long as nobody moves");
    fake.file(&format!("proc/{FIRST}/cgroup"), "0::/elsewhere\n");
    let events = minutes(2);
    let [Event::Came(arrival)] = &events[..] else { panic!("once, and nobody else: {events:?}") };
    assert_eq!((arrival.process.pid, arrival.domain.to_string().as_str()), (Pid(FIRST), "cgroup /elsewhere"));
}

#[test]
fn who_is_squeezed_is_looked_at_before_others_and_above_the_goal() {
    let host = host();
    confine(&host, FIRST + 2, "/guest", "50.00");
    let (orders, work) = mpsc::channel();
    let (mut log, mut settings) = (|_: &str| {}, Settings::default());
    settings.rules.keep_available = Some(Bytes(1 << 30));
    let mut daemon = Daemon::new(&host, settings, 0, threads(orders), &mut log);
    let first = (0..60).find_map(|_| {
        daemon.now += CALM[0];
        daemon.tick().unwrap();
        work.try_recv().ok()
    });
    let Some(Action::Census(processes)) = first.map(|order: Order| order.action) else { panic!("no census") };
    assert!(processes.iter().any(|process| process.pid == Pid(FIRST + 2)), "{processes:?}");
}

#[test]
fn work_that_does_not_get_on_is_no_sign_of_life() {
    let (host, answers) = (host(), Arc::new(AtomicU64::new(0)));
    let (orders, work) = mpsc::channel();
    let (said, told) = mpsc::channel();
    let mut log = |line: &str| said.send(line.to_owned()).unwrap();
    let mut daemon = Daemon::new(
        &host,
        Settings::default(),
        0,
        Threads { answers: Arc::clone(&answers), ..threads(orders) },
        &mut log,
    );
    let ticks = |daemon: &mut Daemon<'_, '_>, advances: bool| {
        let all = (0..2 * HUNG.as_secs()).map(|_| {
            daemon.now += Duration::from_secs(1);
            answers.fetch_add(u64::from(advances), Ordering::Relaxed);
            daemon.tick().unwrap();
            daemon.is_well()
        });
        all.collect::<Vec<bool>>()
    };
    let well = ticks(&mut daemon, true);
    assert!(daemon.state().awaits() && work.try_recv().is_ok(), "there is an order that nobody answers");
    assert!(well.iter().all(|well| *well), "long work that gets on");
    let well = ticks(&mut daemon, false);
    let longest = HUNG.as_secs() as usize;
    assert!(well[..longest - 1].iter().all(|well| *well) && well[longest..].iter().all(|well| !well));
    let hung = told.try_iter().filter(|line| line.contains("no answer from the host")).count();
    assert_eq!(hung, 1, "it is told once");
    daemon.step(Event::Failed("it has come back".to_owned()));
    assert!(ticks(&mut daemon, true).iter().all(|well| *well));
}

#[test]
fn the_work_is_counted_by_what_the_host_answers() {
    let (host, answers) = (host(), Arc::new(AtomicU64::new(0)));
    let counted = Counted::new(&host, Arc::clone(&answers));
    let (sender, messages) = mpsc::channel();
    let directory = tempfile::tempdir().unwrap();
    let worker = Worker::new(&counted, directory.path().to_owned(), sender).unwrap();
    let (orders, work) = mpsc::channel();
    let order = Order { action: Action::Hold, settings: Arc::default(), halt: Arc::default() };
    orders.send(order).unwrap();
    drop(orders);
    worker.run(&work);
    assert!(matches!(messages.try_recv(), Ok(Message::Event(Event::Held(Ok(()))))));
    assert!(answers.load(Ordering::Relaxed) > 0);
}

/// What is noted of a process that is too large for its fair share to be found out is kept to what its page tables have,
/// and notes of other commands are seen while the daemon runs.
#[test]
fn notes_of_other_merges_are_taken_in_and_checked_however_large_the_process_is() {
    let (host, folder) = (host(), tempfile::tempdir().unwrap());
    let large = ProcessId { pid: Pid(FIRST), start_time: 1 };
    host.start(FIRST, (fair::LARGEST.0 >> 12) + 1);
    let directory = Directory::open(folder.path()).unwrap();
    let note = |pages| splitting::note(&host, &directory, &BTreeMap::from([(large, Pages(pages))])).unwrap();
    let ((orders, _work), (walks, walked)) = (mpsc::channel(), mpsc::channel());
    let mut log = |_: &str| {};
    let threads = Threads { walks, ..threads(orders) };
    let mut daemon = Daemon::new(&host, Settings::default(), 0, threads, &mut log);
    daemon.take_up(folder.path());
    daemon.tick().unwrap();
    assert_eq!(daemon.snapshot().by_splitting, BTreeMap::new());
    note(100);
    assert_eq!(daemon.snapshot().by_splitting, BTreeMap::from([(large, Pages(100))]));
    let cost = Duration::ZERO;
    let mut walk_of_large = || {
        for _ in 0..1000 {
            daemon.now += CALM[0];
            daemon.tick().unwrap();
            match walked.try_recv() {
                Ok(walk) if walk.process == large => return walk,
                Ok(Walk { process, .. }) => {
                    daemon.told(Told::Walked { process, fair: None, uncounted_zeros: None, cost });
                }
                Err(_) => {}
            }
        }
        panic!("the large process is never walked");
    };
    let walk = walk_of_large();
    assert!(walk.counts_zeros && !walk.counts_share);
    daemon.told(Told::Walked { process: large, fair: None, uncounted_zeros: Some(Pages(40)), cost });
    assert_eq!(daemon.snapshot().by_splitting, BTreeMap::from([(large, Pages(40))]));
    note(10);
    assert_eq!(daemon.snapshot().by_splitting, BTreeMap::from([(large, Pages(50))]));
}
