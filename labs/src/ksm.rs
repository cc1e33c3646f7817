//! Driving ksmd in a test: one test at a time, and everything is put back.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

const ROOT: &str = "/sys/kernel/mm/ksm";

/// Whoever drives ksmd holds this file.
pub const LOCK: &str = "/run/pagefold-test.lock";

/// The settings that are put back, in an order in which the kernel takes them: `max_page_sharing` and
/// `merge_across_nodes` only while nothing is merged, `pages_to_scan` only while no advisor is on.
const SETTINGS: &[&str] = &[
    "advisor_mode",
    "advisor_target_scan_time",
    "advisor_max_cpu",
    "advisor_min_pages_to_scan",
    "advisor_max_pages_to_scan",
    "pages_to_scan",
    "sleep_millisecs",
    "use_zero_pages",
    "smart_scan",
    "max_page_sharing",
    "merge_across_nodes",
    "run",
];

/// What others may have set of what Pagefold writes: not what it writes there. A merge may set `smart_scan` to 0 where
/// it is 1, and leaves it alone where it is 0.
const OTHERS: &[(&str, &str)] =
    &[("run", "0"), ("pages_to_scan", "123"), ("sleep_millisecs", "77"), ("use_zero_pages", "0"), ("smart_scan", "1")];

/// KSM, held by one test. Dropping it, also in a panic, puts the settings back.
#[derive(Debug)]
pub struct Ksm {
    before: Vec<(&'static str, String)>,
    _lock: File,
}

impl Ksm {
    /// Wait for KSM and take it.
    ///
    /// # Errors
    /// What a test says it is skipped for: not root, no KSM on this kernel.
    pub fn take() -> Result<Self, String> {
        let lock = File::create(LOCK).map_err(|error| format!("cannot open {LOCK}: {error} (run as root)"))?;
        if lock.try_lock().is_err() {
            eprintln!("waiting for {LOCK}: somebody else drives ksmd");
            lock.lock().map_err(|error| format!("cannot lock {LOCK}: {error}"))?;
        }
        let readable = |name: &&str| Path::new(ROOT).join(name).exists();
        let mut before = Vec::new();
        for &name in SETTINGS.iter().filter(|name| readable(name)) {
            let value = fs::read_to_string(Path::new(ROOT).join(name)).map_err(|error| error.to_string())?;
            before.push((name, chosen(&value)));
        }
        let run = before.iter().find(|(name, _)| *name == "run");
        let (_, run) = run.ok_or_else(|| format!("{ROOT}/run is missing: a kernel without KSM"))?;
        fs::write(Path::new(ROOT).join("run"), run).map_err(|error| format!("cannot write {ROOT}/run: {error}"))?;
        Ok(Self { before, _lock: lock })
    }

    /// KSM for one test, stopped and with settings that Pagefold does not write. `None`, once it has said why, where
    /// the test is to be skipped.
    #[must_use]
    pub fn take_as_others_set_it() -> Option<Self> {
        let ksm = Self::take().inspect_err(|why| println!("skipped: {why}")).ok()?;
        for (name, value) in OTHERS.iter().filter(|(name, _)| ksm.value(name).is_some()) {
            ksm.set(name, value);
        }
        Some(ksm)
    }

    /// The settings that are not, or not any more, as [`Ksm::take_as_others_set_it`] leaves them, and what they are.
    #[must_use]
    pub fn changed(&self) -> Vec<(&'static str, String)> {
        let found = OTHERS.iter().filter_map(|&(name, value)| Some((name, value, self.value(name)?)));
        found.filter(|(_, value, found)| found != value).map(|(name, _, found)| (name, found)).collect()
    }

    /// Write a setting. The advisor is switched off for `pages_to_scan`, which the kernel does not take from others
    /// while it is on.
    ///
    /// # Panics
    /// If the kernel refuses.
    pub fn set(&self, name: &str, value: impl ToString) {
        if name == "pages_to_scan" && self.value("advisor_mode").is_some_and(|mode| mode != "none") {
            self.set("advisor_mode", "none");
        }
        let path = Path::new(ROOT).join(name);
        fs::write(&path, value.to_string()).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }

    /// The value of a setting, if this kernel has it.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<String> {
        fs::read_to_string(Path::new(ROOT).join(name)).ok().map(|text| chosen(&text))
    }

    /// Read a counter.
    ///
    /// # Panics
    /// If it is not there or no number.
    #[must_use]
    pub fn counter(&self, name: &str) -> i64 {
        let path = Path::new(ROOT).join(name);
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        text.trim().parse().unwrap_or_else(|_| panic!("{}: {text:?}", path.display()))
    }

    /// Let ksmd run until `pages_sharing` has not moved over three full scans, then stop it with the merges kept.
    ///
    /// # Panics
    /// If that takes longer than three minutes.
    pub fn settle(&self) {
        let (sharing, scans) = (|| self.counter("pages_sharing"), || self.counter("full_scans"));
        self.set("pages_to_scan", 20_000);
        self.set("sleep_millisecs", 1);
        self.set("run", 1);
        let started = Instant::now();
        let mut last = (sharing(), scans());
        // A page merges on the second scan at the earliest.
        let first = last.1;
        while scans() < first + 4 || scans() < last.1 + 3 {
            assert!(started.elapsed() < Duration::from_secs(180), "ksmd did not settle within minutes");
            std::thread::sleep(Duration::from_millis(5));
            if sharing() != last.0 {
                last = (sharing(), scans());
            }
        }
        self.set("run", 0);
    }
}

impl Drop for Ksm {
    fn drop(&mut self) {
        for (name, value) in &self.before {
            if let Err(error) = put(name, value) {
                eprintln!("{ROOT}/{name} could not be set back to {value}: {error}");
            }
        }
    }
}

fn put(name: &str, value: &str) -> io::Result<()> {
    let path = Path::new(ROOT).join(name);
    if chosen(&fs::read_to_string(&path)?) == value { Ok(()) } else { fs::write(path, value) }
}

/// The value of a setting: the bracketed word of a choice, otherwise all of it.
fn chosen(text: &str) -> String {
    let text = text.trim();
    match text.split_once('[').and_then(|(_, rest)| rest.split_once(']')) {
        Some((word, _)) => word.to_owned(),
        None => text.to_owned(),
    }
}
