use super::*;
use crate::decide::CensusSummary;
use crate::decide::{DaemonMode, SharingScope};
use pagefold_base::domain::{DomainRule, TrustDomain, TrustGroup};
use pagefold_base::memory::Shortage;
use pagefold_base::{Pages, Pid};
use pagefold_census::results::Matrix;
use pagefold_host::action::{Action, MergeAdvice};
use pagefold_host::fake_host::{FakeHost, MERGED_PAGE_NAME};
use pagefold_host::faulty_host::{FaultyHost, InjectedFault};
use pagefold_host::resource::ResourceClass;
use pagefold_host::transaction::journal::StateDirectory;
use pagefold_host::transaction::session::enrollments::ENROLLMENTS_FILE;
use pagefold_host::transaction::session::{ChangeLifetime, Session};
use pagefold_merge::split_zeros;
use std::sync::atomic::AtomicUsize;

/// Size in 4 KiB pages of a tracked process, and of an untracked one.
const TRACKED_PROCESS_PAGES: u64 = 50_000;
const UNTRACKED_PROCESS_PAGES: u64 = 100;

/// Pid of the first tracked process.
const FIRST_TRACKED_PID: u32 = 1000;

/// A host with forty small processes and four tracked ones, each in a cgroup with a limit.
fn host() -> FakeHost {
    let host = FakeHost::booted();
    host.set_free_kib(5_000_000);
    (1..=40).for_each(|pid| host.start_process(pid, UNTRACKED_PROCESS_PAGES));
    (FIRST_TRACKED_PID..FIRST_TRACKED_PID + 4).for_each(|pid| host.start_process(pid, TRACKED_PROCESS_PAGES));
    host.put_file("sys/fs/cgroup/cgroup.controllers", "memory\n");
    host.put_file("sys/fs/cgroup/cgroup.procs", "");
    (FIRST_TRACKED_PID..FIRST_TRACKED_PID + 4)
        .for_each(|pid| confine_to_cgroup(&host, pid, &format!("/guest{pid}"), "0.00"));
    host
}

/// Channels to the other threads; `orders` receives the tasks.
fn worker_channels(orders: Sender<WorkOrder>) -> WorkerChannels {
    WorkerChannels { work_orders: orders, walk_requests: mpsc::channel().0, host_answer_count: Arc::default() }
}

/// Put a process into a cgroup with a limit, half of which is free, and with this memory pressure.
fn confine_to_cgroup(host: &FakeHost, pid: u32, cgroup: &str, percent: &str) {
    host.put_file(&format!("proc/{pid}/cgroup"), &format!("0::{cgroup}\n"));
    let file = |name: &str, text: &str| host.put_file(&format!("sys/fs/cgroup{cgroup}/{name}"), text);
    file("memory.max", "1073741824\n");
    file("memory.high", "max\n");
    file("memory.current", "536870912\n");
    file("memory.stat", "inactive_file 0\n");
    file("memory.swap.max", "max\n");
    let line = |word: &str| format!("{word} avg10={percent} avg60=0.00 avg300=0.00 total=1\n");
    file("memory.pressure", &(line("some") + &line("full")));
}

/// Poll the table some times, half a second apart. Returns the events.
fn poll_table(table: &mut ProcessTable, host: &dyn Host, now: &mut Duration, times: u32) -> Vec<Event> {
    let settings = DaemonSettings::default();
    let mut poll = || {
        *now += IDLE_POLL_INTERVALS[0];
        table.poll(host, *now, &settings).unwrap().events
    };
    (0..times).flat_map(|_| poll()).collect()
}

fn has_arrived(events: &[Event], pid: u32) -> bool {
    events.iter().any(|event| matches!(event, Event::ProcessArrived(arrival) if arrival.process.pid == Pid(pid)))
}

#[test]
fn idle_merged_host_gets_few_reads() {
    let (fake, read_count) = (host(), AtomicUsize::new(0));
    fake.enable_exec_events();
    let count = |_: &str| {
        read_count.fetch_add(1, Ordering::Relaxed);
        None::<InjectedFault>
    };
    let host = FaultyHost::new(&fake, count);
    let (orders, work) = mpsc::channel();
    let mut log = |_: &str| {};
    let mut daemon = Daemon::new(&host, DaemonSettings::default(), 0, worker_channels(orders), &mut log);
    let mut ticks = |count: usize| {
        for _ in 0..count {
            daemon.event_time += IDLE_POLL_INTERVALS[0];
            daemon.tick().unwrap();
            // Nothing is found, as on a host where all duplicates are merged.
            while work.try_recv().is_ok() {
                daemon.apply_event(Event::CensusDone(CensusSummary::default()));
            }
        }
    };
    // Half an hour, and then another: unchanged processes are read less and less often.
    ticks(3600);
    let before = read_count.swap(0, Ordering::Relaxed);
    ticks(3600);
    let after = read_count.load(Ordering::Relaxed);
    // Each tick reads available memory and memory pressure. About three more reads per tick come from other readings.
    // The size of every process is read once a minute, and that of the four tracked ones every 16 s. Their identities
    // follow every minute, their cgroups every 10 s, waiting every 2 s, and a list every 30 s.
    assert!(after <= 3600 * 6, "{after} reads in 3600 ticks, {before} in the ticks before");
}

#[test]
fn exec_is_seen_at_once_and_fork_soon() {
    let (host, mut now) = (host(), Duration::ZERO);
    host.enable_exec_events();
    let mut table = ProcessTable::new(&host);
    assert!(has_arrived(&poll_table(&mut table, &host, &mut now, 1), FIRST_TRACKED_PID));
    poll_table(&mut table, &host, &mut now, 20);
    host.start_process(7000, TRACKED_PROCESS_PAGES);
    host.exec_process(7000);
    assert!(has_arrived(&poll_table(&mut table, &host, &mut now, 1), 7000));
    host.start_process(7001, TRACKED_PROCESS_PAGES);
    assert!(has_arrived(&poll_table(&mut table, &host, &mut now, 61), 7001), "no event was reported");
    // An exec of a known process is reported again, and so is an exit.
    host.exec_process(7000);
    host.put_file("proc/7000/stat", "7000 (other) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 1\n");
    assert!(has_arrived(&poll_table(&mut table, &host, &mut now, 1), 7000));
    host.remove_process(7000);
    let process = ProcessId { pid: Pid(7000), start_time: 1 };
    assert!(poll_table(&mut table, &host, &mut now, 61).contains(&Event::ProcessExited(process)));
    assert_eq!(table.tracked_processes().count(), 5);
}

#[test]
fn polls_list_all_without_exec_events() {
    let (host, mut now) = (host(), Duration::ZERO);
    let mut table = ProcessTable::new(&host);
    assert!(table.check_exec_events().is_err());
    poll_table(&mut table, &host, &mut now, 1);
    host.start_process(7000, TRACKED_PROCESS_PAGES);
    assert!(has_arrived(&poll_table(&mut table, &host, &mut now, 1), 7000));
}

#[test]
fn exec_storm_hides_no_process() {
    let (fake, mut now, read_count) = (host(), Duration::ZERO, AtomicUsize::new(0));
    fake.enable_exec_events();
    let count = |_: &str| {
        read_count.fetch_add(1, Ordering::Relaxed);
        None::<InjectedFault>
    };
    let host = FaultyHost::new(&fake, count);
    let mut table = ProcessTable::new(&host);
    poll_table(&mut table, &host, &mut now, 20);
    read_count.store(0, Ordering::Relaxed);
    // Programs that exit before they are checked, and lost reports, one of them of a program that stays.
    for _ in 0..20 {
        (10_000..10_500).for_each(|pid| fake.exec_process(pid));
        fake.overflow_exec_events();
        poll_table(&mut table, &host, &mut now, 1);
    }
    let questions = read_count.load(Ordering::Relaxed);
    assert!(questions <= 20 * 1000 + 1000, "{questions}: two for each report");
    fake.start_process(7000, TRACKED_PROCESS_PAGES);
    fake.overflow_exec_events();
    assert!(has_arrived(&poll_table(&mut table, &host, &mut now, 2), 7000), "all are listed within a second");
    assert!(table.check_exec_events().is_ok() && table.tracked_processes().count() == 5);
}

#[test]
fn exec_storm_keeps_to_the_poll_cpu_share() {
    // Above the largest PID of the kernel: the table skips the PID of this test.
    const STORM_PIDS: std::ops::Range<u32> = 10_000_000..10_003_000;
    let (fake, settings) = (host(), DaemonSettings::default());
    fake.enable_exec_events();
    fake.enable_virtual_time();
    STORM_PIDS.for_each(|pid| fake.start_process(pid, TRACKED_PROCESS_PAGES));
    let count = |_: &str| {
        fake.spend_cpu_time(Duration::from_micros(10));
        None::<InjectedFault>
    };
    let faulty = FaultyHost::new(&fake, count);
    let mut table = ProcessTable::new(&faulty);
    let (mut now, mut execs, mut seen) = (Duration::ZERO, STORM_PIDS.cycle(), None);
    let mut poll = |now: Duration| {
        // Each process execs every 40 seconds.
        (0..37).for_each(|_| fake.exec_process(execs.next().expect("the iterator is endless")));
        let events = table.poll(&faulty, now, &settings).unwrap().events;
        seen = seen.or(has_arrived(&events, 7000).then_some(now));
    };
    while now < Duration::from_secs(120) {
        now += IDLE_POLL_INTERVALS[0];
        poll(now);
    }
    let bound = now.mul_f64(settings.rules.cpu_rate / 4.0) + Duration::from_secs(1);
    let used = fake.thread_cpu_time();
    assert!(used <= bound + Duration::from_millis(50), "{used:?} of {bound:?}");
    // A process that arrives meanwhile is still found.
    fake.start_process(7000, TRACKED_PROCESS_PAGES);
    fake.exec_process(7000);
    while now < Duration::from_secs(180) {
        now += IDLE_POLL_INTERVALS[0];
        poll(now);
    }
    assert!(seen.is_some(), "a process that came was not seen within a minute");
    assert_eq!(table.tracked_processes().count(), 4 + STORM_PIDS.len() + 1);
}

#[test]
fn other_tuner_is_known_after_first_poll() {
    let (host, mut now) = (host(), Duration::ZERO);
    host.start_process(77, UNTRACKED_PROCESS_PAGES);
    host.put_file("proc/77/stat", "77 (ksmtuned) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 1\n");
    host.put_file("proc/77/cmdline", "/bin/bash\0/usr/sbin/ksmtuned\0");
    host.put_file("proc/77/status", "Uid:\t0\t0\t0\t0\n");
    let mut table = ProcessTable::new(&host);
    poll_table(&mut table, &host, &mut now, 1);
    assert!(table.tuner().is_some());
    host.remove_process(77);
    poll_table(&mut table, &host, &mut now, 5);
    assert!(table.tuner().is_none());
}

#[test]
fn tuner_counts_only_if_run_by_root() {
    let nobody = "Uid:\t65534\t65534\t65534\t65534\n";
    // A setuid program, and one that changed all its user ids to root: the auxiliary vector still shows the origin.
    let (setuid, root) = ("Uid:\t65534\t0\t0\t0\n", "Uid:\t0\t0\t0\t0\n");
    let secure = |value: u8| [[23u8, 0, 0, 0, 0, 0, 0, 0], [value, 0, 0, 0, 0, 0, 0, 0], [0; 8], [0; 8]].concat();
    let text = |value| String::from_utf8(secure(value)).unwrap();
    let cases = [(nobody, 0, false), (setuid, 1, false), (root, 1, false), (root, 0, true)];
    for (users, privileged, heeded) in cases {
        let (host, mut now) = (host(), Duration::ZERO);
        host.start_process(77, UNTRACKED_PROCESS_PAGES);
        host.put_file("proc/77/stat", "77 (ksmtuned) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 1\n");
        host.put_file("proc/77/cmdline", "./ksmtuned\0");
        host.put_file("proc/77/status", users);
        if cfg!(target_endian = "little") {
            host.put_file("proc/77/auxv", &text(privileged));
        }
        let mut table = ProcessTable::new(&host);
        poll_table(&mut table, &host, &mut now, 1);
        assert_eq!(table.tuner().is_some(), heeded, "{users} {privileged}");
        let other = pagefold_merge::ksmd::find_other_tuner(&host).unwrap();
        assert_eq!(other.is_some(), heeded, "{users} {privileged}");
    }
}

#[test]
fn host_with_other_tuner_is_not_acquired() {
    let host = host();
    host.start_process(77, UNTRACKED_PROCESS_PAGES);
    host.put_file("proc/77/status", "Uid:\t0\t0\t0\t0\n");
    host.put_file("proc/77/stat", "77 (ksmtuned) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 1\n");
    host.put_file("proc/77/cmdline", "/bin/bash\0/usr/sbin/ksmtuned\0");
    let (orders, work) = mpsc::channel();
    let (mut log, mut settings) = (|_: &str| {}, DaemonSettings::default());
    settings.rules.mode = DaemonMode::Act;
    let mut daemon = Daemon::new(&host, settings, 0, worker_channels(orders), &mut log);
    let orders = |daemon: &mut Daemon<'_, '_>| {
        for _ in 0..20 {
            daemon.event_time += IDLE_POLL_INTERVALS[0];
            daemon.tick().unwrap();
        }
        work.try_iter().map(|order: WorkOrder| order.effect).collect::<Vec<Effect>>()
    };
    assert_eq!(orders(&mut daemon), []);
    host.remove_process(77);
    assert_eq!(orders(&mut daemon), [Effect::AcquireHost]);
}

#[test]
fn sharing_history_keeps_recent_parties() {
    let label = |number: u64| format!("program[{number}]");
    let census = |number: u64| Matrix {
        parties: vec![label(number), label(number + 1)],
        shared: vec![vec![Pages(number); 2]; 2],
    };
    let mut shared = SharingHistory::default();
    (0..1000).for_each(|number| shared.add_census(&census(number)));
    assert!(shared.shared_pages().len() <= 60 * 4, "{}", shared.shared_pages().len());
    assert_eq!(shared.shared_pages()[&(label(1000), label(999))], Pages(999));
    assert!(!shared.shared_pages().contains_key(&(label(1), label(1))));
    shared.retain_parties(|name| name != label(999));
    assert!(!shared.shared_pages().contains_key(&(label(1000), label(999))));
}

#[test]
fn cgroup_shortages_are_read_in_rotation() {
    let (fake, mut now, mut cgroups) = (host(), Duration::ZERO, CgroupShortageReader::default());
    // More cgroups than one reading covers.
    let pids: Vec<u32> = (2000..2050).collect();
    for &pid in &pids {
        fake.start_process(pid, TRACKED_PROCESS_PAGES);
        confine_to_cgroup(&fake, pid, &format!("/{pid}"), if pid % 2 == 0 { "50.00" } else { "0.00" });
    }
    let mut table = ProcessTable::new(&fake);
    poll_table(&mut table, &fake, &mut now, 1);
    assert_eq!(table.tracked_processes().count(), 4 + pids.len());
    let mut short = BTreeMap::new();
    for second in 0..20 {
        let found = cgroups.read_shortages(&fake, Duration::from_secs(second), table.tracked_processes());
        assert!(found.is_empty() || second % 10 == 0, "every ten seconds");
        short.extend(found.into_iter().map(|(process, shortage)| (process.pid, shortage.is_short(10.0))));
    }
    let expect = (FIRST_TRACKED_PID..FIRST_TRACKED_PID + 4).map(|pid| (Pid(pid), false));
    let expect = expect.chain(pids.into_iter().map(|pid| (Pid(pid), pid % 2 == 0)));
    assert_eq!(short, expect.collect());

    // A process that left its cgroup is short of memory only if the host is.
    fake.put_file("proc/2000/cgroup", "0::/\n");
    table.recheck_all();
    poll_table(&mut table, &fake, &mut now, 1);
    let found = cgroups.read_shortages(&fake, Duration::from_secs(60), table.tracked_processes());
    let moved = found.iter().find(|(process, _)| process.pid == Pid(2000));
    assert_eq!(moved.map(|(_, shortage)| *shortage), Some(Shortage::default()));
}

/// A tracked process that leaves the managed group stays known, as it may have merged pages.
#[test]
fn leaving_the_group_excludes_the_process() {
    let (fake, mut now) = (host(), Duration::ZERO);
    let mut table = ProcessTable::new(&fake);
    assert!(has_arrived(&poll_table(&mut table, &fake, &mut now, 1), FIRST_TRACKED_PID));
    let group = Some(TrustGroup { users: vec![12_345], ..TrustGroup::default() });
    let settings = DaemonSettings { tracked_group: group, ..DaemonSettings::default() };
    fake.start_process(3000, TRACKED_PROCESS_PAGES);
    table.recheck_all();
    let events: Vec<Event> = (1..10)
        .flat_map(|second| table.poll(&fake, now + Duration::from_secs(second), &settings).unwrap().events)
        .collect();
    assert_eq!(events.len(), 4, "one event each: {events:?}");
    for event in events {
        let Event::ProcessArrived(arrival) = event else { panic!("the process is alive: {event:?}") };
        assert!(arrival.process.pid.0 < 3000 && arrival.exclusion_reason.unwrap().contains("[daemon.tracked]"));
    }
    table.recheck_all();
    let later_events = table.poll(&fake, now + Duration::from_secs(60), &DaemonSettings::default()).unwrap().events;
    assert!(has_arrived(&later_events, FIRST_TRACKED_PID) && has_arrived(&later_events, 3000));
}

#[test]
fn domain_change_is_reported_soon() {
    let (fake, mut now) = (host(), Duration::ZERO);
    let mut table = ProcessTable::new(&fake);
    let settings = DaemonSettings { domains: DomainRule::Cgroup.into(), ..DaemonSettings::default() };
    let mut minutes = |count: u64| -> Vec<Event> {
        let end = now + Duration::from_secs(60 * count);
        let mut events = Vec::new();
        while now < end {
            now += Duration::from_secs(1);
            events.extend(table.poll(&fake, now, &settings).unwrap().events);
        }
        events
    };
    assert!(has_arrived(&minutes(1), FIRST_TRACKED_PID));
    assert_eq!(minutes(3), [], "no events without a change");
    fake.put_file(&format!("proc/{FIRST_TRACKED_PID}/cgroup"), "0::/elsewhere\n");
    let events = minutes(2);
    let [Event::ProcessArrived(arrival)] = &events[..] else { panic!("one event for one process: {events:?}") };
    assert_eq!(
        (arrival.process.pid, arrival.domain.to_string().as_str()),
        (Pid(FIRST_TRACKED_PID), "cgroup /elsewhere")
    );
}

#[test]
fn process_short_of_memory_is_scanned_first() {
    let host = host();
    confine_to_cgroup(&host, FIRST_TRACKED_PID + 2, "/guest", "50.00");
    let (orders, work) = mpsc::channel();
    let (mut log, mut settings) = (|_: &str| {}, DaemonSettings::default());
    settings.rules.keep_available = Some(Bytes(1 << 30));
    let mut daemon = Daemon::new(&host, settings, 0, worker_channels(orders), &mut log);
    let first = (0..60).find_map(|_| {
        daemon.event_time += IDLE_POLL_INTERVALS[0];
        daemon.tick().unwrap();
        work.try_recv().ok()
    });
    let Some(Effect::Census(parts)) = first.map(|order: WorkOrder| order.effect) else { panic!("no census") };
    assert!(parts.keys().any(|process| process.pid == Pid(FIRST_TRACKED_PID + 2)), "{parts:?}");
}

#[test]
fn hung_work_stops_the_alive_signal() {
    let (host, answers) = (host(), Arc::new(AtomicU64::new(0)));
    let (orders, work) = mpsc::channel();
    let (log_sender, log_lines) = mpsc::channel();
    let mut log = |line: &str| log_sender.send(line.to_owned()).unwrap();
    let mut daemon = Daemon::new(
        &host,
        DaemonSettings::default(),
        0,
        WorkerChannels { host_answer_count: Arc::clone(&answers), ..worker_channels(orders) },
        &mut log,
    );
    let ticks = |daemon: &mut Daemon<'_, '_>, advances: bool| {
        let results = (0..2 * HANG_TIMEOUT.as_secs()).map(|_| {
            daemon.event_time += Duration::from_secs(1);
            answers.fetch_add(u64::from(advances), Ordering::Relaxed);
            daemon.tick().unwrap();
            daemon.check_progress()
        });
        results.collect::<Vec<bool>>()
    };
    let progress = ticks(&mut daemon, true);
    assert!(daemon.state().is_task_pending() && work.try_recv().is_ok(), "an order stays unanswered");
    assert!(progress.iter().all(|progress| *progress), "a long task that makes progress");
    let progress = ticks(&mut daemon, false);
    let longest = HANG_TIMEOUT.as_secs() as usize;
    assert!(
        progress[..longest - 1].iter().all(|progress| *progress)
            && progress[longest..].iter().all(|progress| !progress)
    );
    let hung = log_lines.try_iter().filter(|line| line.contains("no answer from the host")).count();
    assert_eq!(hung, 1, "it is logged once");
    daemon.apply_event(Event::TaskFailed("the task has ended".to_owned()));
    assert!(ticks(&mut daemon, true).iter().all(|progress| *progress));
}

#[test]
fn work_progress_counts_host_answers() {
    let (host, answers) = (host(), Arc::new(AtomicU64::new(0)));
    let counting_host = CountingHost::new(&host, Arc::clone(&answers));
    let (sender, messages) = mpsc::channel();
    let directory = tempfile::tempdir().unwrap();
    let worker = Worker::new(&counting_host, directory.path().to_owned(), sender).unwrap();
    let (orders, work) = mpsc::channel();
    let order = WorkOrder { effect: Effect::AcquireHost, settings: Arc::default(), cancel: Arc::default() };
    orders.send(order).unwrap();
    drop(orders);
    worker.run(&work);
    assert!(matches!(messages.try_recv(), Ok(Message::Event(Event::HostAcquired(Ok(()))))));
    assert!(answers.load(Ordering::Relaxed) > 0);
}

/// Noted zero pages of a process are limited to those in its page tables, and notes of other commands are loaded while
/// the daemon runs.
#[test]
fn split_zero_notes_are_capped_by_walks() {
    let (host, folder) = (host(), tempfile::tempdir().unwrap());
    let large = ProcessId { pid: Pid(FIRST_TRACKED_PID), start_time: 1 };
    host.start_process(FIRST_TRACKED_PID, 1 << 25);
    let directory = StateDirectory::open(folder.path()).unwrap();
    let note = |pages| split_zeros::note(&host, &directory, &BTreeMap::from([(large, Pages(pages))])).unwrap();
    let ((orders, _work), (walk_requests, walk_receiver)) = (mpsc::channel(), mpsc::channel());
    let mut log = |_: &str| {};
    let threads = WorkerChannels { walk_requests, ..worker_channels(orders) };
    let mut daemon = Daemon::new(&host, DaemonSettings::default(), 0, threads, &mut log);
    daemon.load_saved_state(folder.path());
    daemon.tick().unwrap();
    assert_eq!(daemon.take_snapshot().split_zero_pages, BTreeMap::new());
    note(100);
    assert_eq!(daemon.take_snapshot().split_zero_pages, BTreeMap::from([(large, Pages(100))]));
    let cpu_time = Duration::ZERO;
    let mut walk_of_large = || {
        for _ in 0..1000 {
            daemon.event_time += IDLE_POLL_INTERVALS[0];
            daemon.tick().unwrap();
            match walk_receiver.try_recv() {
                Ok(walk) if walk.process == large => return walk,
                Ok(WalkRequest { process, .. }) => {
                    daemon.record_work_result(WorkResult::PageTableWalk {
                        process,
                        fair_share: None,
                        uncounted_zero_pages: None,
                        cpu_time,
                    });
                }
                Err(_) => {}
            }
        }
        panic!("the large process is never walked");
    };
    let walk = walk_of_large();
    assert!(walk.wants_zero_pages);
    daemon.record_work_result(WorkResult::PageTableWalk {
        process: large,
        fair_share: None,
        uncounted_zero_pages: Some(Pages(40)),
        cpu_time,
    });
    assert_eq!(daemon.take_snapshot().split_zero_pages, BTreeMap::from([(large, Pages(40))]));
    note(10);
    assert_eq!(daemon.take_snapshot().split_zero_pages, BTreeMap::from([(large, Pages(50))]));
}

/// All threads of the real daemon on a host in virtual time: new processes are scanned at once, and unchanged ones at
/// growing intervals.
#[test]
fn half_an_hour_of_the_daemon_passes_in_virtual_time() {
    const HALF_HOUR: Duration = Duration::from_secs(1800);
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    host.enable_virtual_time();
    host.enable_exec_events();
    let start = host.now();
    let (sender, messages) = mpsc::channel();
    let (mut alive, mut lines, stop) = (0_u64, Vec::new(), sender.clone());
    let mut on_alive = |_: &DaemonState| {
        alive += 1;
        if elapsed_since(&host, start) >= HALF_HOUR {
            stop.send(Message::Event(Event::Stop { unmerge: false })).unwrap();
        }
    };
    let mut log = |line: &str| lines.push(line.to_owned());
    let settings = DaemonSettings::default();
    let restored = run(&host, directory.path(), settings, 1, (sender, messages), &mut on_alive, &mut log);
    assert!(matches!(restored, Ok(true)), "{restored:?}");
    assert!(elapsed_since(&host, start) >= HALF_HOUR);
    let polls = HALF_HOUR.as_secs_f64() / IDLE_POLL_INTERVALS[0].as_secs_f64();
    assert!((1.0..1.1).contains(&(alive as f64 / polls)), "{alive} polls, of {polls} while idle");
    let censuses: Vec<&String> = lines.iter().filter(|line| line.starts_with("census")).collect();
    assert!(censuses.len() == 2 && censuses[0].contains("new process"), "{lines:?}");
}

/// How a daemon in virtual time was ended, and its log.
fn run_daemon(
    host: &FakeHost,
    directory: &Path,
    settings: DaemonSettings,
    events: Vec<(Duration, Event)>,
) -> (bool, Vec<String>) {
    let (start, (sender, messages)) = (host.now(), mpsc::channel());
    let (mut lines, mut events, event_sender) = (Vec::new(), VecDeque::from(events), sender.clone());
    let mut on_alive = |_: &DaemonState| {
        while let Some((_, event)) = events.pop_front_if(|(at, _)| elapsed_since(host, start) >= *at) {
            event_sender.send(Message::Event(event)).unwrap();
        }
    };
    let mut log = |line: &str| lines.push(line.to_owned());
    let restored = run(host, directory, settings, 1, (sender, messages), &mut on_alive, &mut log).unwrap();
    (restored, lines)
}

/// All threads of the real daemon: its successors watch what it enrolled, and one that must not merge a process any
/// more unenrolls it.
#[test]
fn restarted_daemons_take_over_until_the_configuration_forbids_it() {
    let (fake, directory) = (host(), tempfile::tempdir().unwrap());
    fake.enable_virtual_time();
    let seconds = Duration::from_secs;
    let process = ProcessId { pid: Pid(FIRST_TRACKED_PID + 3), start_time: 1 };
    let range = pagefold_base::AddressRange { start: 1 << 20, end: 2 << 20 };
    fake.map_pages(process.pid.0, (range.start, range.end), "", false);
    fake.put_file(&format!("proc/{}/ksm_merging_pages", process.pid), "0\n");
    let is_enrolled = || fake.regions(process.pid).unwrap().iter().any(|region| region.2);
    // The first daemon has merged the range and ended.
    let scope = SharingScope::of_merge(&TrustDomain::User(7), false);
    let (mut session, ..) = Session::begin(&fake, directory.path(), ResourceClass::Ksm).unwrap();
    let action = Action::Advise { process, advice: MergeAdvice::Mergeable, ranges: vec![range] };
    session.apply(&action, ChangeLifetime::PermanentOnCommit).unwrap();
    session.record_enrollments([(process, scope.to_string())].into());
    session.commit().unwrap();
    drop(session);
    fake.map_pages(process.pid.0, (range.start, range.end), MERGED_PAGE_NAME, true);
    fake.put_file(&format!("proc/{}/status", process.pid), "Uid:\t7\t7\t7\t7\n");
    let mut settings = DaemonSettings::default();
    settings.rules.mode = DaemonMode::Act;
    // The process is smaller than those that are tracked.
    settings.min_resident = Bytes(1 << 40);

    let events = vec![(seconds(5), Event::Unenroll(tracked_elsewhere())), (seconds(60), Event::HandOver)];
    let (restored, lines) = run_daemon(&fake, directory.path(), settings.clone(), events);
    assert!(restored && is_enrolled(), "{lines:?}");
    let is_adoption =
        |line: &&String| line.starts_with("adopt process 1003") || line.starts_with("adopt program[1003]");
    assert_eq!(lines.iter().filter(is_adoption).count(), 1, "{lines:?}");
    assert!(directory.path().join(operator_store::OPERATOR_FILE).exists(), "operator commands are handed over");

    let events = vec![(seconds(20), Event::Stop { unmerge: false })];
    let (restored, lines) = run_daemon(&fake, directory.path(), settings.clone(), events);
    assert!(restored && is_enrolled() && lines.iter().any(|line| is_adoption(&line)), "{lines:?}");
    assert!(!directory.path().join(operator_store::OPERATOR_FILE).exists(), "they end at a stop");

    // The managed group does not contain the process any more.
    settings.tracked_group = Some(TrustGroup { users: vec![12_345], ..TrustGroup::default() });
    let events = vec![(seconds(20), Event::HandOver)];
    let (restored, lines) = run_daemon(&fake, directory.path(), settings, events);
    assert!(restored && !is_enrolled(), "{lines:?}");
    assert!(lines.iter().any(|line| line.starts_with("unenroll ") && line.contains("excluded")), "{lines:?}");
    assert!(!directory.path().join(ENROLLMENTS_FILE).exists());
}

/// A process that no daemon tracks, for a command that is saved.
fn tracked_elsewhere() -> ProcessId {
    ProcessId { pid: Pid(1), start_time: 1 }
}
