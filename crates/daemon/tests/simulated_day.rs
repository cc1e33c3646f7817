//! The daemon on a simulated host, in virtual time: a day of arrivals and exits.

#![forbid(unsafe_code)]

use pagefold_daemon::decide::{DaemonMode, DaemonRules, Event};
use pagefold_daemon::run::{DaemonSettings, Message, run};
use pagefold_host::Host;
use pagefold_host::ksmd_thread::KsmdThread;
use pagefold_sim::decide::host_state::Exactness;
use pagefold_sim::decide::samples::SimulatedRun;
use pagefold_sim::host::SimulatedHost;
use pagefold_sim::scenario::parse_scenario;
use std::panic::{self, AssertUnwindSafe};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Classes of four machines of 64 MiB, every two hours, each for three hours. Of the 16,384 pages of a machine, 6,554
/// are common, 4,915 its own, and 1,638 zero. With these costs, the rate of [`rules`] just pays for what can be saved.
const DAY: &str = "description = 'a day of classes'\nduration = '24h'\ntick = '10s'\n\
    [host]\nmemory = '4 GiB'\nused = '256 MiB'\ncpus = 4\nkernel = '6.18.44'\n\
    [costs]\nvisit_ns = 205\nskip_ns = 263\nchecksum_ns = 889\nstable_comparison_ns = 29\nunstable_comparison_ns = 159\n\
    merge_ns = 781\nsplit_ns = 0\nallocation_ns = 11\nbatch_ns = 0\nfirst_comparison_ns = 0\n\
    [[template]]\nname = 'lab'\nsize = '64 MiB'\nzero = 0.1\ncommon = 0.4\nunique = 0.3\nrun_pages = [16, 256]\n\
    writes = [{ content = 'unique', share = 0.05, pages_per_second = 2.0 }]\n\
    [[machines]]\nname = 'class'\ntemplate = 'lab'\ncount = 48\nwave = 4\nevery = '2h'\nlifetime = '3h'";

const COMMON_PAGES: u64 = 6554;
const ZERO_PAGES: u64 = 1638;

/// Time, and the CPU time of ksmd and Pagefold until then.
type CpuSample = (Duration, Duration);

/// What a daemon did on the day.
struct Outcome {
    run: SimulatedRun,
    cpu: Vec<CpuSample>,
    log: Vec<String>,
    has_restored: bool,
}

fn rules() -> DaemonRules {
    DaemonRules {
        mode: DaemonMode::Act,
        across_domains: true,
        cpu_rate: 0.0003,
        burst: Duration::from_millis(150),
        ..DaemonRules::default()
    }
}

fn run_day(seed: u64) -> Outcome {
    let scenario = parse_scenario(DAY).unwrap();
    let host = SimulatedHost::with_scenario("a simulated day", &scenario, seed, Exactness::Approximate);
    let directory = tempfile::tempdir().unwrap();
    let settings = DaemonSettings { rules: rules(), ..DaemonSettings::default() };
    let start = host.now();
    let end = start + Duration::from_millis(scenario.duration_ms);
    let (sender, messages) = mpsc::channel();
    let stop = sender.clone();
    let (mut cpu, mut log, mut has_ended) = (Vec::new(), Vec::new(), false);
    let mut on_alive = |_: &_| {
        let ksmd = KsmdThread::find(&host).unwrap().cpu_time().unwrap();
        cpu.push((host.now() - start, ksmd + host.own_cpu_time()));
        if !has_ended && host.now() >= end {
            has_ended = true;
            stop.send(Message::Event(Event::Stop { unmerge: false })).unwrap();
        }
    };
    let mut note = |line: &str| log.push(line.to_owned());
    let has_restored =
        run(&host, directory.path(), settings, seed, (sender, messages), &mut on_alive, &mut note).unwrap();
    assert_eq!(host.workload_failure(), None);
    Outcome { run: host.simulated_run(), cpu, log, has_restored }
}

/// The most CPU time that any window of the run had beyond the rate, in seconds.
fn largest_burst(cpu: &[CpuSample], rate: f64) -> f64 {
    // What a window has beyond the rate is that of its end less that of its start.
    let excess = cpu.iter().map(|(time, cpu)| cpu.as_secs_f64() - rate * time.as_secs_f64());
    let (_, largest) = excess.fold((f64::INFINITY, 0.0_f64), |(least, largest), excess| {
        let least = least.min(excess);
        (least, largest.max(excess - least))
    });
    largest
}

#[test]
fn day_of_classes_is_merged_within_the_cpu_bound() {
    let day = run_day(1);
    assert!(day.has_restored, "{:?}", day.log);
    assert_eq!((day.run.samples[0].machines, day.run.samples[1440].machines), (4, 4));
    // Half an hour after an arrival, four machines run, and from the second class on eight. All common pages but one
    // copy and all zeros can be saved.
    for hour in (0..24).step_by(2) {
        let sample = &day.run.samples[60 * hour + 30];
        let machines = if hour == 0 { 4 } else { 8 };
        assert_eq!((sample.time_ms, sample.machines), ((60 * hour as u64 + 30) * 60_000, machines));
        let duplicates = (machines - 1) * COMMON_PAGES + machines * ZERO_PAGES - 1;
        let share = sample.saved_pages as f64 / duplicates as f64;
        assert!((0.95..=1.001).contains(&share), "hour {hour}: {share} of the duplicates are saved, {sample:?}");
    }
    let DaemonRules { cpu_rate, burst, .. } = rules();
    let largest = largest_burst(&day.cpu, cpu_rate);
    // What is spent between two readings, before the daemon can halt its work, is beyond the bound.
    let between_readings = day.cpu.windows(2).map(|pair| pair[1].1 - pair[0].1).max().unwrap();
    let bound = (burst + between_readings).as_secs_f64();
    assert!(largest <= bound, "{largest} s beyond the rate, {between_readings:?} between two readings");
    assert!(between_readings <= Duration::from_millis(100), "{between_readings:?}");
}

/// The daemon ends with its threads when its main loop panics, also in virtual time.
#[test]
fn panic_of_the_main_loop_ends_all_threads() {
    let (ended, end) = mpsc::channel();
    thread::spawn(move || {
        let scenario = parse_scenario(DAY).unwrap();
        let host = SimulatedHost::with_scenario("a panic", &scenario, 1, Exactness::Approximate);
        let directory = tempfile::tempdir().unwrap();
        let settings = DaemonSettings { rules: rules(), ..DaemonSettings::default() };
        let start = host.now();
        let mut on_alive =
            |_: &_| assert!(host.now() < start + Duration::from_secs(60), "the main loop is to end in a panic");
        let running = panic::catch_unwind(AssertUnwindSafe(|| {
            run(&host, directory.path(), settings, 1, mpsc::channel(), &mut on_alive, &mut |_| ()).unwrap()
        }));
        ended.send(running.map_err(|message| *message.downcast::<&str>().unwrap())).unwrap();
    });
    let running = end.recv_timeout(Duration::from_secs(300)).expect("the threads end");
    assert_eq!(running, Err("the main loop is to end in a panic"));
}
