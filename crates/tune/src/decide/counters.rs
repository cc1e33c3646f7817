//! Which counters of the kernel show the effect of each setting, and what they say about it.
//!
//! The text `counter` of a rule names the same counters, or says that there is none. A rate before a change is the mean
//! since boot, or for counters of KVM that of a short time before the change, because these are sums over the machines
//! that run. Files: virt/kvm/kvm_main.c, mm/vmstat.c, fs/proc/meminfo.c, kernel/sched/stats.c (`show_schedstat`),
//! Documentation/block/stat.rst, Documentation/ABI/testing/sysfs-devices-system-cpu, mm/ksm.c (6.18).
//!
//! Limits: a counter of KVM loses the part of a machine that ends. All counters are of the whole host, so other load
//! changes them as well.

use super::profile::matches_pattern;
use std::collections::BTreeMap;

/// What shows the effect of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proof {
    /// These counters.
    Counters(&'static [CounterSource]),
    /// No counter, for this reason.
    Nothing(&'static str),
}

/// Where a counter is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterSource {
    /// The kernel's name.
    pub name: &'static str,
    /// The path of the file, or of the directory that has a file of this name. Each `*` stands for what the `*` at the
    /// same position of the setting's pattern stands for.
    pub path: &'static str,
    /// Where it is there.
    pub place: CounterPlace,
    /// What its value means.
    pub kind: CounterKind,
}

/// Where in its file a counter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterPlace {
    /// It is the only word of a file with its name.
    OwnFile,
    /// The second word of the line that begins with its name.
    Line,
    /// The word with this number, from 0, of each line that begins with this text; the words are summed.
    Word(&'static str, usize),
}

/// What the value of a counter means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterKind {
    /// It grows from the boot on.
    SinceBoot,
    /// It grows, and is the sum over the virtual machines that run.
    OfMachines,
    /// It is a present amount. That of several files is their mean.
    Level,
}

const fn vmstat(name: &'static str) -> CounterSource {
    CounterSource { name, path: "proc/vmstat", place: CounterPlace::Line, kind: CounterKind::SinceBoot }
}

const fn meminfo(name: &'static str) -> CounterSource {
    CounterSource { name, path: "proc/meminfo", place: CounterPlace::Line, kind: CounterKind::Level }
}

const fn kvm(name: &'static str) -> CounterSource {
    let kind = CounterKind::OfMachines;
    CounterSource { name, path: "sys/kernel/debug/kvm", place: CounterPlace::OwnFile, kind }
}

const fn ksm(name: &'static str, kind: CounterKind) -> CounterSource {
    CounterSource { name, path: "sys/kernel/mm/ksm", place: CounterPlace::OwnFile, kind }
}

const fn disk(name: &'static str, word: usize) -> CounterSource {
    let place = CounterPlace::Word("", word);
    CounterSource { name, path: "sys/block/*/stat", place, kind: CounterKind::SinceBoot }
}

const fn idle_state(name: &'static str) -> CounterSource {
    let path = "sys/devices/system/cpu/cpu*/cpuidle/state*";
    CounterSource { name, path, place: CounterPlace::OwnFile, kind: CounterKind::SinceBoot }
}

const fn frequency(path: &'static str) -> CounterSource {
    CounterSource { name: "scaling_cur_freq", path, place: CounterPlace::OwnFile, kind: CounterKind::Level }
}

const SWITCHES: &[CounterSource] = &[
    CounterSource { name: "ctxt", path: "proc/stat", place: CounterPlace::Line, kind: CounterKind::SinceBoot },
    CounterSource {
        name: "run_delay",
        path: "proc/schedstat",
        place: CounterPlace::Word("cpu", 8),
        kind: CounterKind::SinceBoot,
    },
];

const KSM_SCANS: &[CounterSource] =
    &[ksm("full_scans", CounterKind::SinceBoot), ksm("pages_sharing", CounterKind::Level)];

const HUGE_PAGES: &[CounterSource] =
    &[vmstat("thp_fault_alloc"), vmstat("thp_collapse_alloc"), meminfo("AnonHugePages")];

const EXITS: &[CounterSource] = &[kvm("exits")];

/// Why a setting that no row names has no counter.
const UNKNOWN: &str = "Pagefold knows no counter of the kernel for it";

/// By pattern of the setting's path; the first pattern that matches counts.
const PROOFS: &[(&str, Proof)] = &[
    (
        "sys/module/kvm/parameters/halt_poll*",
        Proof::Counters(&[
            kvm("halt_attempted_poll"),
            kvm("halt_successful_poll"),
            kvm("halt_poll_success_ns"),
            kvm("halt_poll_fail_ns"),
        ]),
    ),
    (
        "sys/module/kvm/parameters/nx_huge_page*",
        Proof::Counters(&[CounterSource { kind: CounterKind::Level, ..kvm("nx_lpage_splits") }]),
    ),
    ("sys/module/kvm/parameters/tdp_mmu", Proof::Counters(&[kvm("pf_fixed")])),
    ("sys/module/kvm_*/parameters/nested", Proof::Counters(&[kvm("nested_run")])),
    ("sys/module/kvm_intel/parameters/enable_apicv", Proof::Counters(&[kvm("irq_window_exits"), kvm("exits")])),
    ("sys/module/kvm_amd/parameters/avic", Proof::Counters(&[kvm("irq_window_exits"), kvm("exits")])),
    ("sys/module/kvm/parameters/*", Proof::Counters(EXITS)),
    ("sys/module/kvm_*/parameters/*", Proof::Counters(EXITS)),
    (
        "proc/sys/kernel/numa_balancing",
        Proof::Counters(&[vmstat("numa_pte_updates"), vmstat("numa_hint_faults"), vmstat("numa_pages_migrated")]),
    ),
    (
        "proc/sys/vm/zone_reclaim_mode",
        Proof::Counters(&[
            vmstat("zone_reclaim_success"),
            vmstat("zone_reclaim_failed"),
            vmstat("numa_miss"),
            vmstat("pswpout"),
        ]),
    ),
    ("proc/sys/vm/swappiness", Proof::Counters(&[vmstat("pswpin"), vmstat("pswpout")])),
    ("sys/kernel/mm/transparent_hugepage/shmem_enabled", Proof::Counters(&[meminfo("ShmemHugePages")])),
    ("sys/kernel/mm/transparent_hugepage/*", Proof::Counters(HUGE_PAGES)),
    ("sys/kernel/mm/transparent_hugepage/khugepaged/*", Proof::Counters(&[vmstat("thp_collapse_alloc")])),
    (
        "sys/devices/system/clocksource/clocksource0/current_clocksource",
        Proof::Nothing("the kernel does not count how often the clock is read"),
    ),
    (
        "sys/devices/system/cpu/cpufreq/policy*/*",
        Proof::Counters(&[frequency("sys/devices/system/cpu/cpufreq/policy*")]),
    ),
    ("sys/devices/system/cpu/cpu*/cpufreq/*", Proof::Counters(&[frequency("sys/devices/system/cpu/cpu*/cpufreq")])),
    ("sys/devices/system/cpu/cpu*/cpuidle/state*/disable", Proof::Counters(&[idle_state("usage"), idle_state("time")])),
    (
        "proc/sys/kernel/sched_autogroup_enabled",
        Proof::Nothing("autogroup shifts waiting from one session to another, and the host's sum stays"),
    ),
    ("proc/sys/kernel/sched_*", Proof::Counters(SWITCHES)),
    ("sys/kernel/debug/sched/*", Proof::Counters(SWITCHES)),
    (
        "sys/block/*/queue/*",
        Proof::Counters(&[disk("read I/Os", 0), disk("read ticks", 3), disk("write I/Os", 4), disk("write ticks", 7)]),
    ),
    ("proc/sys/kernel/io_uring_disabled", Proof::Nothing("the kernel does not count refused calls of io_uring")),
    ("sys/kernel/mm/ksm/merge_across_nodes", Proof::Counters(&[ksm("pages_shared", CounterKind::Level)])),
    ("sys/kernel/mm/ksm/use_zero_pages", Proof::Counters(&[ksm("ksm_zero_pages", CounterKind::Level)])),
    (
        "sys/kernel/mm/ksm/smart_scan",
        Proof::Counters(&[ksm("pages_skipped", CounterKind::SinceBoot), ksm("pages_scanned", CounterKind::SinceBoot)]),
    ),
    (
        "sys/kernel/mm/ksm/max_page_sharing",
        Proof::Counters(&[ksm("stable_node_chains", CounterKind::Level), ksm("stable_node_dups", CounterKind::Level)]),
    ),
    ("sys/kernel/mm/ksm/*", Proof::Counters(KSM_SCANS)),
];

/// What shows the effect of a setting, by its path below the root.
pub fn proof_of(setting: &str) -> Proof {
    find_row(setting).map_or(Proof::Nothing(UNKNOWN), |(_, proof)| proof)
}

fn find_row(setting: &str) -> Option<(&'static str, Proof)> {
    PROOFS.iter().find(|(pattern, _)| matches_pattern(pattern, setting)).copied()
}

/// A counter in a certain file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundCounter {
    /// The counter.
    pub source: &'static CounterSource,
    /// The path of the file below the root.
    pub file: String,
}

impl BoundCounter {
    /// The file, and the name in it if it has several counters.
    pub fn id(&self) -> String {
        full_name(self.source, &self.file)
    }

    /// The value in the text of the file.
    pub fn parse(&self, text: &str) -> Option<u64> {
        let name = self.source.name;
        match self.source.place {
            CounterPlace::OwnFile => text.trim().parse().ok(),
            CounterPlace::Line => {
                let mut lines = text.lines().map(str::split_whitespace);
                let mut words = lines.find_map(|mut words| {
                    let is_named = words.next()?.trim_end_matches(':') == name;
                    is_named.then_some(words)
                })?;
                words.next()?.parse().ok()
            }
            CounterPlace::Word(start, position) => {
                let lines = text.lines().filter(|line| line.starts_with(start));
                let words = lines.map(|line| line.split_whitespace().nth(position)?.parse::<u64>().ok());
                let values: Vec<u64> = words.collect::<Option<_>>()?;
                (!values.is_empty()).then(|| values.into_iter().fold(0, u64::wrapping_add))
            }
        }
    }
}

fn full_name(source: &CounterSource, file: &str) -> String {
    match source.place {
        CounterPlace::OwnFile => format!("/{file}"),
        CounterPlace::Line | CounterPlace::Word(..) => format!("/{file}:{}", source.name),
    }
}

/// The counters of these settings, each once, in the order of the settings.
pub fn bind_counters<'a>(settings: impl IntoIterator<Item = &'a str>) -> Vec<BoundCounter> {
    let mut bound: Vec<BoundCounter> = Vec::new();
    let mut known = std::collections::BTreeSet::new();
    for setting in settings {
        let Some((pattern, Proof::Counters(sources))) = find_row(setting) else { continue };
        let names = wildcard_names(pattern, setting);
        for source in sources {
            let counter = BoundCounter { source, file: bind_file(source, &names) };
            if known.insert(counter.id()) {
                bound.push(counter);
            }
        }
    }
    bound
}

/// What each `*` of a pattern stands for in a path that matches it.
fn wildcard_names<'a>(pattern: &str, path: &'a str) -> Vec<&'a str> {
    let components = pattern.split('/').zip(path.split('/'));
    let matched = components.filter_map(|(pattern, name)| {
        let (start, end) = pattern.split_once('*')?;
        name.strip_prefix(start)?.strip_suffix(end)
    });
    matched.collect()
}

/// The file of a counter, with these names in place of each `*`.
fn bind_file(source: &CounterSource, names: &[&str]) -> String {
    let mut names = names.iter();
    let mut file = String::new();
    for (number, part) in source.path.split('*').enumerate() {
        if number > 0 {
            file.push_str(names.next().copied().unwrap_or("*"));
        }
        file.push_str(part);
    }
    if source.place == CounterPlace::OwnFile { format!("{file}/{}", source.name) } else { file }
}

/// The value of a counter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CounterReading {
    /// The counter.
    pub counter: BoundCounter,
    /// Its value.
    pub value: u64,
}

/// What is stored of a counter with a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadingBefore {
    /// Its value.
    pub value: u64,
    /// When it had this value, in milliseconds since boot.
    pub uptime_ms: u64,
    /// How much it had grown until then; `None` for an amount, and where it is not known.
    pub growth: Option<Growth>,
}

/// How much a counter grew in some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// How much.
    pub count: u64,
    /// The time in milliseconds.
    pub milliseconds: u64,
}

/// Readings of several counters at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Readings {
    /// The counters that can be read.
    pub counters: Vec<CounterReading>,
    /// The time, in milliseconds since boot, if it is known.
    pub uptime_ms: Option<u64>,
}

impl Readings {
    /// Whether a machine runs that counts.
    pub fn have_machines(&self) -> bool {
        self.counters.iter().any(|reading| reading.counter.source.kind == CounterKind::OfMachines && reading.value > 0)
    }

    /// What to store with a change, by the id of the counter. `earlier` are readings of some time before, for counters of
    /// machines. Without the time since boot there is nothing to compare with later.
    pub fn samples(&self, earlier: Option<&Self>) -> BTreeMap<String, ReadingBefore> {
        let Some(uptime_ms) = self.uptime_ms else { return BTreeMap::new() };
        let sample = |reading: &CounterReading| {
            let growth = match reading.counter.source.kind {
                CounterKind::SinceBoot => Some(Growth { count: reading.value, milliseconds: uptime_ms }),
                CounterKind::OfMachines => earlier.and_then(|earlier| {
                    let milliseconds = uptime_ms.checked_sub(earlier.uptime_ms?)?;
                    Some(Growth { count: reading.value.checked_sub(earlier.find(reading)?)?, milliseconds })
                }),
                CounterKind::Level => None,
            };
            (reading.counter.id(), ReadingBefore { value: reading.value, uptime_ms, growth })
        };
        self.counters.iter().map(sample).collect()
    }

    fn find(&self, reading: &CounterReading) -> Option<u64> {
        self.counters.iter().find(|other| other.counter == reading.counter).map(|other| other.value)
    }
}

/// What a counter says about changes. That of several files is summed, or their mean for amounts.
#[derive(Clone, Debug, PartialEq)]
pub struct CounterEffect {
    /// The kernel's name.
    pub name: &'static str,
    /// Where it is read: `/proc/vmstat:numa_miss`; with `*` for several files.
    pub source: String,
    /// The present value.
    pub value: u64,
    /// How much it grew between the two readings, if there were two.
    pub growth: Option<i64>,
    /// The value before the changes, if it was stored.
    pub value_before: Option<u64>,
    /// How much it grew in a second before the changes, if that was stored.
    pub rate_before: Option<f64>,
    /// How much it has grown in a second since the changes, on average.
    pub rate_since: Option<f64>,
}

/// Compares readings with earlier ones, and with the samples of the changes, by the id of the counter.
pub fn effects(
    now: &Readings,
    earlier: Option<&Readings>,
    samples: &BTreeMap<String, ReadingBefore>,
) -> Vec<CounterEffect> {
    let mut by_source: Vec<(&'static CounterSource, Vec<&CounterReading>)> = Vec::new();
    for reading in &now.counters {
        let source = reading.counter.source;
        match by_source.iter_mut().find(|(known, _)| *known == source) {
            Some((_, readings)) => readings.push(reading),
            None => by_source.push((source, vec![reading])),
        }
    }
    let effect = |(source, readings): (&'static CounterSource, Vec<&CounterReading>)| {
        let combine = |values: Option<Vec<u64>>| {
            let values = values?;
            let sum = values.iter().fold(0, |sum: u64, &value| sum.saturating_add(value));
            Some(if source.kind == CounterKind::Level { sum / values.len().max(1) as u64 } else { sum })
        };
        let sample = |reading: &CounterReading| samples.get(&reading.counter.id());
        let value = combine(Some(readings.iter().map(|reading| reading.value).collect())).unwrap_or_default();
        let before = combine(readings.iter().map(|reading| earlier?.find(reading)).collect());
        let rate_before = readings.iter().map(|&reading| sample(reading)?.growth.and_then(rate));
        let rate_since = readings.iter().map(|&reading| {
            let sample = sample(reading).filter(|_| source.kind != CounterKind::Level)?;
            let milliseconds = now.uptime_ms?.checked_sub(sample.uptime_ms)?;
            rate(Growth { count: reading.value.checked_sub(sample.value)?, milliseconds })
        });
        CounterEffect {
            name: source.name,
            source: pattern_name(source),
            value,
            growth: before.map(|before| value.cast_signed().wrapping_sub(before.cast_signed())),
            value_before: combine(readings.iter().map(|&reading| Some(sample(reading)?.value)).collect()),
            rate_before: rate_before.sum(),
            rate_since: rate_since.sum(),
        }
    };
    by_source.into_iter().map(effect).collect()
}

fn pattern_name(source: &CounterSource) -> String {
    full_name(source, &bind_file(source, &[]))
}

/// How much a counter grew in a second.
fn rate(growth: Growth) -> Option<f64> {
    (growth.milliseconds > 0).then(|| growth.count as f64 * 1000.0 / growth.milliseconds as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATE: &str = "sys/devices/system/cpu/cpu3/cpuidle/state2";

    #[test]
    fn counters_are_read_where_the_setting_is() {
        let ids = |setting: &str| bind_counters([setting]).iter().map(BoundCounter::id).collect::<Vec<_>>();
        assert_eq!(ids(&format!("{STATE}/disable")), [format!("/{STATE}/usage"), format!("/{STATE}/time")]);
        let frequency = "/sys/devices/system/cpu/cpufreq/policy4/scaling_cur_freq";
        assert_eq!(ids("sys/devices/system/cpu/cpufreq/policy4/scaling_governor"), [frequency]);
        let of_disk = ["read I/Os", "read ticks", "write I/Os", "write ticks"];
        assert_eq!(
            ids("sys/block/nvme0n1/queue/scheduler"),
            of_disk.map(|name| format!("/sys/block/nvme0n1/stat:{name}"))
        );
        let exits = "/sys/kernel/debug/kvm/exits";
        assert_eq!(ids("sys/module/kvm_amd/parameters/pause_filter_count"), [exits]);
        assert_eq!(ids("sys/module/kvm_amd/parameters/avic"), ["/sys/kernel/debug/kvm/irq_window_exits", exits]);
        assert_eq!(ids("sys/kernel/mm/transparent_hugepage/shmem_enabled"), ["/proc/meminfo:ShmemHugePages"]);
        let both = ["sys/module/kvm_amd/parameters/npt", "sys/module/kvm_amd/parameters/avic"];
        assert_eq!(bind_counters(both).len(), 2, "each counter once");
        assert_eq!(proof_of("proc/irq/7/smp_affinity_list"), Proof::Nothing(UNKNOWN));
        assert!(matches!(proof_of("proc/sys/kernel/io_uring_disabled"), Proof::Nothing(_)));
    }

    #[test]
    fn values_are_found_in_their_files() {
        let parse = |setting: &str, number: usize, text: &str| bind_counters([setting])[number].parse(text);
        assert_eq!(parse("proc/sys/vm/swappiness", 1, "pswpin 3\npswpout 4\n"), Some(4));
        assert_eq!(parse("proc/sys/vm/swappiness", 1, "pswpin 3\n"), None);
        let shared = "ShmemHugePages:     2048 kB\n";
        assert_eq!(parse("sys/kernel/mm/transparent_hugepage/shmem_enabled", 0, shared), Some(2048));
        let statistics = "version 17\ncpu0 1 0 2 3 4 5 600 70 8\ndomain0 3 9 9 9 9 9 9 9 9\ncpu1 1 0 2 3 4 5 600 5 8\n";
        assert_eq!(parse("sys/kernel/debug/sched/preempt", 1, statistics), Some(75), "nanoseconds of all CPUs");
        assert_eq!(parse("sys/kernel/debug/sched/preempt", 1, "cpu0 1 2\n"), None);
        let disk = " 11 1 12 13 14 2 15 16 0 9 9\n";
        assert_eq!(
            [0, 1, 2, 3].map(|number| parse("sys/block/sda/queue/scheduler", number, disk)),
            [Some(11), Some(13), Some(14), Some(16)]
        );
        assert_eq!(parse("sys/kernel/mm/ksm/use_zero_pages", 0, "-1\n"), None);
    }

    fn readings(uptime_ms: u64, counters: &[(&str, &[u64])]) -> Readings {
        let read = |(setting, values): &(&str, &[u64])| {
            let counters = bind_counters([*setting]).into_iter().zip(values.to_vec());
            counters.map(|(counter, value)| CounterReading { counter, value }).collect::<Vec<_>>()
        };
        Readings { counters: counters.iter().flat_map(read).collect(), uptime_ms: Some(uptime_ms) }
    }

    const POLL: &str = "sys/module/kvm/parameters/halt_poll_ns";
    const SWAPPINESS: &str = "proc/sys/vm/swappiness";
    const SHARED: &str = "sys/kernel/mm/transparent_hugepage/shmem_enabled";

    #[test]
    fn rates_before_are_those_since_boot_or_of_a_short_time() {
        let earlier = readings(99_000, &[(POLL, &[100, 50]), (SWAPPINESS, &[0, 190]), (SHARED, &[64])]);
        let at_apply = readings(100_000, &[(POLL, &[110, 57]), (SWAPPINESS, &[0, 200]), (SHARED, &[128])]);
        assert!(at_apply.have_machines());
        let samples = at_apply.samples(Some(&earlier));
        let now = readings(110_000, &[(POLL, &[130, 58]), (SWAPPINESS, &[40, 200]), (SHARED, &[256])]);
        let found = effects(&now, Some(&at_apply), &samples);
        let shown: Vec<_> = found
            .iter()
            .map(|effect| (effect.name, effect.value_before, effect.rate_before, effect.rate_since))
            .collect();
        assert_eq!(
            shown,
            [
                ("halt_attempted_poll", Some(110), Some(10.0), Some(2.0)),
                ("halt_successful_poll", Some(57), Some(7.0), Some(0.1)),
                ("pswpin", Some(0), Some(0.0), Some(4.0)),
                ("pswpout", Some(200), Some(2.0), Some(0.0)),
                ("ShmemHugePages", Some(128), None, None),
            ]
        );
        assert_eq!(found.iter().map(|effect| effect.growth).collect::<Vec<_>>(), [20, 1, 40, 0, 128].map(Some));
    }

    #[test]
    fn rate_is_absent_where_it_is_not_known() {
        let at_apply = readings(100_000, &[(POLL, &[110]), (SWAPPINESS, &[7])]);
        let samples = at_apply.samples(None);
        assert!(samples["/sys/kernel/debug/kvm/halt_attempted_poll"].growth.is_none(), "no earlier reading");
        // A machine has ended.
        let found = effects(&readings(200_000, &[(POLL, &[9])]), None, &samples);
        assert_eq!((found[0].rate_before, found[0].rate_since, found[0].growth), (None, None, None));
        let found = effects(&readings(100_000, &[(SWAPPINESS, &[7])]), None, &samples);
        assert_eq!((found[0].rate_before, found[0].rate_since), (Some(0.07), None), "no time has passed");
        let found = effects(&at_apply, None, &BTreeMap::new());
        assert!(found.iter().all(|effect| effect.value_before.is_none() && effect.rate_before.is_none()));
        assert_eq!(Readings { uptime_ms: None, ..at_apply }.samples(None), BTreeMap::new());
    }

    #[test]
    fn counters_of_several_files_are_one() {
        let state = |cpu: u32| format!("sys/devices/system/cpu/cpu{cpu}/cpuidle/state2/disable");
        let policy = |number: u32| format!("sys/devices/system/cpu/cpufreq/policy{number}/scaling_governor");
        let read = |uptime_ms, usage: [u64; 2], frequency: [u64; 2]| {
            readings(
                uptime_ms,
                &[
                    (&state(0), &[usage[0]]),
                    (&state(1), &[usage[1]]),
                    (&policy(0), &[frequency[0]]),
                    (&policy(4), &[frequency[1]]),
                ],
            )
        };
        let samples = read(1000, [5, 7], [1000, 3000]).samples(None);
        let found = effects(&read(3000, [9, 7], [4000, 3000]), None, &samples);
        let shown: Vec<_> = found
            .iter()
            .map(|effect| (&*effect.source, effect.value_before, effect.value, effect.rate_since))
            .collect();
        assert_eq!(
            shown,
            [
                ("/sys/devices/system/cpu/cpu*/cpuidle/state*/usage", Some(12), 16, Some(2.0)),
                ("/sys/devices/system/cpu/cpufreq/policy*/scaling_cur_freq", Some(2000), 3500, None),
            ]
        );
    }
}
