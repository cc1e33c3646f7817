use super::*;
use crate::experiment::{ArmDefinition, MetricDefinition};
use crate::record;
use crate::wire::AbReport;
use crate::wire::unrestored::{UnrestoredChange, UnrestoredChanges};
use crate::{html, text};
use pagefold_base::Absent;
use pagefold_host::fake_host::FakeHost;
use pagefold_host::faulty_host::{FaultyHost, InjectedFault};
use pagefold_host::transaction::Session;
use std::collections::BTreeMap;
use std::error::Error as _;
use std::sync::atomic::AtomicUsize;

const METRIC_FILE: &str = "tmp/n";

/// Arms that differ in a variable of the environment.
fn experiment() -> Experiment {
    let b = ArmDefinition { environment: BTreeMap::from([("X".into(), "1".into())]), ..ArmDefinition::default() };
    Experiment { b, workload: vec![vec!["true".to_owned()]], ..Experiment::default() }
}

/// An experiment that reads a file.
fn observation(blocks: usize) -> Experiment {
    let source = MetricSource::File { path: format!("/{METRIC_FILE}") };
    let metric = MetricDefinition { name: "depth".to_owned(), source, higher_is_better: false, every_seconds: None };
    Experiment {
        workload: Vec::new(),
        observe_seconds: Some(0.001),
        metric: vec![metric],
        blocks,
        control_blocks: Some(2),
        ..experiment()
    }
}

#[test]
fn sample_without_a_ratio_is_not_recorded() {
    let (host, directory, state) = (FakeHost::booted(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let stop = AtomicBool::new(false);
    let start = define(&host, observation(2)).unwrap();
    let mut record = Record::create(directory.path(), start.clone()).unwrap();
    let mut run = |value: &str| {
        host.put_file(METRIC_FILE, value);
        let mut settings = SettingsOutcome::default();
        let switch = ArmSwitch::begin(&host, state.path(), &start, &mut settings).unwrap();
        let baseline = EnvironmentCounters::read(&host).readings_since(&host, 0.0);
        let (start, boot, earlier) = (&start, String::new(), EarlierRuns::default());
        let (host, record) = (&host, &mut record);
        let mut campaign = Campaign { host, record, start, boot, baseline, stop: &stop, switch, earlier };
        let result = campaign.run_blocks(&record::load(directory.path()).unwrap(), &mut |_| {});
        (result, record::load(directory.path()).unwrap())
    };
    for value in ["NaN", "inf", "0"] {
        let (result, loaded) = run(value);
        let error = result.unwrap_err();
        assert_eq!(error.to_string(), "run 0 of block 0");
        let why = error.source().unwrap().to_string();
        assert!(why.starts_with(&format!("metric depth is {value};")), "{why}");
        assert_eq!((loaded.blocks.len(), loaded.abandoned_runs), (0, 0));
    }
    let (result, loaded) = run("2.5");
    result.unwrap();
    assert!(loaded.end.is_some());
    assert_eq!(loaded.blocks.len(), start.schedule.len());
}

/// Each arm has each pair of CPUs once in a block, in either order.
#[test]
fn duet_exchanges_the_cpus_of_the_arms() {
    let duet = Experiment { duet: true, duet_cpus: Some([vec![0], vec![1]]), ..experiment() };
    let schedule = Schedule::generate(&duet.design());
    let mut orders = std::collections::BTreeSet::new();
    for block in &schedule.blocks {
        orders.insert(block.order.iter().map(|&arm| arm_letter(arm)).collect::<String>());
        let scheduled = block.runs(&schedule.warm_up);
        let (mut position, mut used) = (0, Vec::new());
        while position < scheduled.len() {
            let group = next_group(&duet, &scheduled, position);
            let measured = group.iter().enumerate().filter(|(_, run)| !run.is_warm_up);
            used.extend(measured.map(|(number, run)| (run.label, duet_cpus(&duet, number).unwrap()[0])));
            position += group.len();
        }
        used.sort_unstable();
        assert_eq!(used, [(Arm::A, 0), (Arm::A, 1), (Arm::B, 0), (Arm::B, 1)], "{:?}", block.order);
    }
    assert_eq!(orders.into_iter().collect::<Vec<_>>(), ["ABBA", "BAAB"]);
}

/// A campaign of real commands without warm-up. Returns its record and the file with it.
fn run_commands(experiment: Experiment) -> (LoadedRecord, String) {
    let (directory, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let host = FakeHost::booted();
    let experiment =
        Experiment { blocks: 2, control_blocks: Some(2), warm_up_runs: 0, timeout_seconds: 60.0, ..experiment };
    let start = define(&host, experiment).unwrap();
    let mut record = Record::create(directory.path(), start).unwrap();
    let loaded = record::load(directory.path()).unwrap();
    let outcome = run(&host, state.path(), &mut record, &loaded, &AtomicBool::new(false), &mut |_| {});
    outcome.result.unwrap();
    let text = fs::read_to_string(directory.path().join(record::RECORD_FILE)).unwrap();
    (record::load(directory.path()).unwrap(), text)
}

/// Start and end of a run in seconds since 1970, by its row in the record.
fn interval(row: &serde_json::Value) -> (f64, f64) {
    let (end, wall) = (row["unix_seconds"].as_f64().unwrap(), row["wall_seconds"].as_f64().unwrap());
    (end - wall, end)
}

fn run_rows(record: &str) -> Vec<serde_json::Value> {
    let rows = record.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    rows.filter(|row| row["event"] == "run").collect()
}

/// A metric that the commands print after its name.
fn printed(name: &str) -> MetricDefinition {
    let source = MetricSource::Pattern { pattern: format!("{name} ([0-9.]+)") };
    MetricDefinition { name: name.to_owned(), source, higher_is_better: false, every_seconds: None }
}

/// Start and end that the commands of a run have printed.
fn printed_interval(row: &serde_json::Value) -> (f64, f64) {
    let sample = |metric: usize| row["samples"][metric][0].as_f64().unwrap();
    (sample(0), sample(1))
}

/// How far the clock of the record may be from that of the commands: a loaded machine can delay the reading of one.
const CLOCK_TOLERANCE: f64 = 0.2;

/// Each run has two commands. The first one ends only after that of the other arm has begun, so a pair that ran one after
/// the other would not end.
#[test]
fn arms_of_a_pair_of_a_duet_overlap_in_time() {
    let barrier = tempfile::tempdir().unwrap();
    let script = format!(
        "cd {} && date +'begin %s.%N' && touch $PAGEFOLD_AB_BLOCK.$PAGEFOLD_AB_RUN && \
         while ! test -e $PAGEFOLD_AB_BLOCK.$((PAGEFOLD_AB_RUN ^ 1)); do sleep 0.01; done && \
         sleep 0.0$PAGEFOLD_AB_RUN && date +'end %s.%N'",
        barrier.path().display()
    );
    let (record, text) = run_commands(Experiment {
        duet: true,
        workload: vec![["sh", "-c", &script].map(str::to_owned).to_vec(), vec!["true".to_owned()]],
        metric: vec![printed("begin"), printed("end"), MetricDefinition::wall_time()],
        ..experiment()
    });
    let rows = run_rows(&text);
    assert_eq!((record.blocks.len(), rows.len()), (8, 8 * 4));
    for pair in rows.chunks(2) {
        let [first, second] = pair else { unreachable!() };
        assert_eq!((&first["block"], first["position"].as_u64().unwrap() % 2), (&second["block"], 0));
        let mut labels = [&first["label"], &second["label"]].map(|label| label.as_str().unwrap());
        labels.sort_unstable();
        assert_eq!(labels, ["A", "B"]);
        for interval in [interval, printed_interval] {
            let [(begin, end), (other_begin, other_end)] = [first, second].map(interval);
            assert!(begin.max(other_begin) < end.min(other_end), "{first} {second}");
        }
        for row in pair {
            let ((begin, end), (printed_begin, printed_end)) = (interval(row), printed_interval(row));
            assert!(begin <= printed_begin + CLOCK_TOLERANCE && printed_end <= end + CLOCK_TOLERANCE, "{row}");
            assert!(end - begin >= printed_end - printed_begin, "{row}");
            assert_eq!(row["samples"][2][0], row["wall_seconds"], "{row}");
        }
    }
    for pairs in rows.chunks(2).collect::<Vec<_>>().windows(2) {
        let (before, after) = (pairs[0].iter().map(printed_interval), pairs[1].iter().map(printed_interval));
        let (ended, begun) =
            (before.map(|run| run.1).fold(0.0, f64::max), after.map(|run| run.0).fold(1e300, f64::min));
        assert!(ended <= begun, "{pairs:?}");
    }
}

#[test]
fn runs_of_other_campaigns_follow_each_other() {
    let script = ["sh", "-c", "date +'begin %s.%N' && sleep 0.01 && date +'end %s.%N'"].map(str::to_owned).to_vec();
    let metric = vec![printed("begin"), printed("end")];
    let (_, text) = run_commands(Experiment { workload: vec![script], metric, ..experiment() });
    let intervals: Vec<(f64, f64)> = run_rows(&text).iter().map(printed_interval).collect();
    assert_eq!(intervals.len(), 8 * 4);
    for following in intervals.windows(2) {
        assert!(following[0].1 <= following[1].0, "{following:?}");
    }
}

/// At the look, B takes 1.5 times as long in all blocks but the noisy ones, which hide it.
#[test]
fn look_leaves_noisy_blocks_out_like_the_verdict() {
    let host = FakeHost::booted();
    let mut experiment = Experiment { looks: vec![16], blocks: 20, ..experiment() };
    experiment.exclude_noisy_blocks = true;
    let mut start = define(&host, experiment).unwrap();
    start.schedule.retain(|plan| plan.kind == PlannedKind::Comparison);
    let plan = start.experiment.stopping_plan().unwrap();
    let environment = EnvironmentCounters::read(&host).readings_since(&host, 0.0);
    let blocks = |noisy: usize| -> Vec<(BlockRecord, Vec<RunRecord>)> {
        let block = |index: usize| {
            let is_noisy = index < noisy;
            let ratio = (if is_noisy { 0.1 } else { 1.5 }) + 0.001 * index as f64;
            let run = |(position, label): (usize, char)| RunRecord {
                block: index,
                position,
                label,
                applied: label,
                slowdown_percent: 0,
                warm_up: false,
                unix_seconds: 0.0,
                stopped_seconds: 0.0,
                wall_seconds: 1.0,
                samples: vec![vec![if label == 'A' { 1.0 } else { ratio }]],
                counter_change: None,
            };
            let flags = if is_noisy { vec!["steal".to_owned()] } else { Vec::new() };
            let runs = start.schedule[index].order.chars().enumerate().map(run).collect();
            (BlockRecord { block: index, environment: environment.clone(), flags }, runs)
        };
        (0..16).map(block).collect()
    };
    let find = |start: &CampaignStart, noisy| find_difference_at_look(start, &plan, &blocks(noisy)).unwrap();
    assert_eq!(find(&start, 0), Some(16));
    assert_eq!(find(&start, 4), Some(16), "the noisy blocks are left out");
    assert_eq!(find(&start, 15), None, "one block is too few");
    let mut kept = start.clone();
    kept.experiment.exclude_noisy_blocks = false;
    assert_eq!(find(&kept, 4), None, "the noisy blocks are kept");
}

const SWAPPINESS: &str = "proc/sys/vm/swappiness";
const STAT_INTERVAL: &str = "proc/sys/vm/stat_interval";

/// An observation whose arms both differ from the host, with a command `after` that fails once `flag` exists.
fn observation_of_settings(flag: &Path) -> Experiment {
    let arm = |swappiness: &str, interval: &str| ArmDefinition {
        settings: BTreeMap::from([
            ("vm.swappiness".to_owned(), swappiness.to_owned()),
            ("vm.stat_interval".to_owned(), interval.to_owned()),
        ]),
        after: Some(format!("test ! -e {}", flag.display())),
        ..ArmDefinition::default()
    };
    Experiment { a: arm("20", "5"), b: arm("10", "7"), warm_up_runs: 0, ..observation(2) }
}

/// During the last run, or the third one and then with a stop, the host begins to refuse the write that restores
/// swappiness, another program writes another setting, and the commands `after` begin to fail.
fn check_that_unrestored_changes_are_told(stops: bool) {
    let (directory, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let flag = directory.path().join("flag");
    let fake = FakeHost::booted();
    fake.enable_virtual_time();
    for (path, value) in [(SWAPPINESS, "60"), (STAT_INTERVAL, "1"), (METRIC_FILE, "2")] {
        fake.put_file(path, value);
    }
    let start = define(&fake, observation_of_settings(&flag)).unwrap();
    let runs: usize = start.schedule.iter().map(|block| block.order.len()).sum();
    let disturbed_run = if stops { 3 } else { runs };
    let (stop, runs) = (AtomicBool::new(false), AtomicUsize::new(0));
    let host = FaultyHost::new(&fake, |path: &str| {
        if path == METRIC_FILE && runs.fetch_add(1, Ordering::Relaxed) + 1 == disturbed_run {
            fake.put_file(STAT_INTERVAL, "3");
            fs::write(&flag, "").unwrap();
            stop.store(stops, Ordering::Relaxed);
        }
        let is_denied = path == "#write swappiness" && runs.load(Ordering::Relaxed) >= disturbed_run;
        is_denied.then_some(InjectedFault::Absent(Absent::Denied))
    });
    let mut record = Record::create(directory.path(), start.clone()).unwrap();
    let loaded = record::load(directory.path()).unwrap();
    let CampaignOutcome { result, settings } = run(&host, state.path(), &mut record, &loaded, &stop, &mut |_| {});
    assert_eq!(result.as_ref().err().is_some_and(CampaignError::is_stop), stops, "{result:?}");
    assert!(stops || result.is_ok(), "{result:?}");
    assert_eq!((settings.recovered.len(), settings.failed_recoveries.len()), (0, 0));

    let loaded = record::load(directory.path()).unwrap();
    let arm = loaded.entered_arm.unwrap();
    let unrestored = UnrestoredChanges::new(&settings, state.path(), directory.path());
    let [swappiness, after] = &unrestored.failed_undos[..] else { panic!("{unrestored:?}") };
    assert_eq!(swappiness.previous_state, "/proc/sys/vm/swappiness was 60");
    assert!(swappiness.why.contains("permission denied") && swappiness.will_retry, "{swappiness:?}");
    assert_eq!(swappiness.remedy, format!("run `pagefold recover --state {}`", state.path().display()));
    assert_eq!(after.previous_state, format!("arm {arm} was not in force"));
    assert!(after.why.contains("test ! -e") && after.will_retry, "{after:?}");
    let overwritten = UnrestoredChange {
        previous_state: "/proc/sys/vm/stat_interval was 1".to_owned(),
        why: "it is 3 now, written by another program".to_owned(),
        will_retry: false,
        remedy: "if the present value is not wanted, write 1 to /proc/sys/vm/stat_interval".to_owned(),
    };
    assert_eq!(unrestored.overwritten_changes, [overwritten]);

    let report = AbReport { unrestored, ..AbReport::from_record(&loaded) };
    assert!(report.is_partial());
    let json: serde_json::Value = serde_json::from_str(&pagefold_output::wire::to_json(&report)).unwrap();
    assert_eq!(json["failed_undos"][0]["previous_state"], "/proc/sys/vm/swappiness was 60");
    assert_eq!(json["overwritten_changes"][0]["previous_state"], "/proc/sys/vm/stat_interval was 1");
    let style = pagefold_output::text::TextStyle { width: 120, color: false };
    for rendered in [text::render(&report, style), html::render(&report)] {
        assert!(rendered.contains("Not restored:"), "{rendered}");
        assert!(rendered.contains("Left as another program has written it:"), "{rendered}");
        assert!(rendered.contains("pagefold recover --state"), "{rendered}");
    }

    // The remedies work: another session restores the setting, and the resumption runs the command again.
    let value = |path| String::from_utf8(fake.read(path).unwrap()).unwrap();
    assert_eq!((&*value(STAT_INTERVAL), &*value(SWAPPINESS)), ("3", if arm == 'A' { "20" } else { "10" }));
    let (recovering, undone, failed) =
        Session::begin(&fake, state.path(), pagefold_host::resource::ResourceClass::Settings).unwrap();
    assert_eq!((undone.len(), failed.len(), &*value(SWAPPINESS)), (1, 0, "60"));
    drop((recovering, record));
    fs::remove_file(&flag).unwrap();
    let (mut record, loaded) = Record::resume(directory.path()).unwrap();
    let resumed = run(&fake, state.path(), &mut record, &loaded, &AtomicBool::new(false), &mut |_| {});
    resumed.result.unwrap();
    let left = UnrestoredChanges::new(&resumed.settings, state.path(), directory.path());
    assert_eq!(left, UnrestoredChanges::default());
    let loaded = record::load(directory.path()).unwrap();
    assert!(loaded.end.is_some() && loaded.entered_arm.is_none());
    assert_eq!((&*value(STAT_INTERVAL), &*value(SWAPPINESS)), ("3", "60"));
}

#[test]
fn finished_campaign_tells_what_is_not_restored() {
    check_that_unrestored_changes_are_told(false);
}

#[test]
fn stopped_campaign_tells_what_is_not_restored() {
    check_that_unrestored_changes_are_told(true);
}

/// A kill leaves a process of the last run. After a reboot its number may belong to another process.
#[test]
fn resumption_ends_the_last_run_unless_the_host_has_rebooted() {
    use std::os::unix::process::{CommandExt, ExitStatusExt};
    const BOOT_ID: &str = "proc/sys/kernel/random/boot_id";
    let host = FakeHost::booted();
    host.enable_virtual_time();
    host.put_file(METRIC_FILE, "2");
    let start = define(&host, observation(2)).unwrap();
    for (boot, is_ended) in [("this-boot", true), ("next-boot", false)] {
        let (directory, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut process = std::process::Command::new("sleep").arg("60").process_group(0).spawn().unwrap();
        let pid = process.id();
        host.put_file(BOOT_ID, "this-boot");
        host.start_process(pid, 1);
        let start_time = host.open(Pid(pid)).unwrap().id().start_time;
        let baseline = BlockEnvironment { steal: Some(0.5), ..BlockEnvironment::default() };
        let (boot_before, description) = ("this-boot".to_owned(), HostDescription::default());
        let session = SessionStart {
            boot: boot_before.clone(),
            unix_seconds: 0.0,
            host: description,
            baseline: baseline.clone(),
        };
        let spawned = SpawnedProcess { pid, start_time, boot: boot_before };
        let mut record = Record::create(directory.path(), start.clone()).unwrap();
        record.append(&RecordLine::Session(Box::new(session))).unwrap();
        record.append(&RecordLine::ArmEntered { arm: 'A' }).unwrap();
        record.append(&RecordLine::Spawned { processes: vec![spawned] }).unwrap();
        drop(record);

        host.put_file(BOOT_ID, boot);
        let (mut record, loaded) = Record::resume(directory.path()).unwrap();
        let stop = AtomicBool::new(false);
        run(&host, state.path(), &mut record, &loaded, &stop, &mut |_| {}).result.unwrap();
        if is_ended {
            assert_eq!(process.wait().unwrap().signal(), Some(9));
        } else {
            assert!(process.try_wait().unwrap().is_none(), "the process of the new boot runs");
            process.kill().and_then(|()| process.wait()).unwrap();
        }
        let loaded = record::load(directory.path()).unwrap();
        assert!(loaded.end.is_some() && loaded.blocks.len() == start.schedule.len());
        let session = loaded.sessions.last().unwrap();
        assert_eq!((loaded.sessions.len(), &*session.boot), (2, boot));
        assert_eq!(session.baseline == baseline, is_ended, "a new boot has a baseline of its own");
    }
}
