//! Access to ksmd in a test: one test at a time, and all settings are restored.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

const KSM_DIRECTORY: &str = "/sys/kernel/mm/ksm";

/// The process that controls ksmd holds a lock on this file.
pub const KSM_LOCK_FILE: &str = "/run/pagefold-test.lock";

/// The settings that are restored, in the order that the kernel requires: it takes `max_page_sharing` and
/// `merge_across_nodes` only while nothing is merged, and `pages_to_scan` only while no advisor is on.
const RESTORED_SETTINGS: &[&str] = &[
    "advisor_mode",
    "advisor_target_scan_time",
    "advisor_max_cpu",
    "advisor_min_pages_to_scan",
    "advisor_max_pages_to_scan",
    "pages_to_scan",
    "sleep_millisecs",
    "use_zero_pages",
    "smart_scan",
    "stable_node_chains_prune_millisecs",
    "max_page_sharing",
    "merge_across_nodes",
    "run",
];

/// Values of another writer for the settings that Pagefold writes; Pagefold does not write these values. A merge may
/// set `smart_scan` from 1 to 0, and leaves 0 unchanged.
const FOREIGN_SETTINGS: &[(&str, &str)] =
    &[("run", "0"), ("pages_to_scan", "123"), ("sleep_millisecs", "77"), ("use_zero_pages", "0"), ("smart_scan", "1")];

/// Exclusive access to KSM for one test. Dropping it, also in a panic, restores the settings.
#[derive(Debug)]
pub struct KsmTestGuard {
    saved_settings: Vec<(&'static str, String)>,
    _lock: File,
}

impl KsmTestGuard {
    /// Wait for the lock, and take it.
    ///
    /// # Errors
    /// The reason why a test is skipped: no root, or no KSM on this kernel.
    pub fn acquire() -> Result<Self, String> {
        let lock = File::create(KSM_LOCK_FILE)
            .map_err(|error| format!("cannot open {KSM_LOCK_FILE}: {error} (run as root)"))?;
        if lock.try_lock().is_err() {
            eprintln!("waiting for {KSM_LOCK_FILE}: another process controls ksmd");
            lock.lock().map_err(|error| format!("cannot lock {KSM_LOCK_FILE}: {error}"))?;
        }
        let readable = |name: &&str| Path::new(KSM_DIRECTORY).join(name).exists();
        let mut before = Vec::new();
        for &name in RESTORED_SETTINGS.iter().filter(|name| readable(name)) {
            let value = fs::read_to_string(Path::new(KSM_DIRECTORY).join(name)).map_err(|error| error.to_string())?;
            before.push((name, parse_chosen(&value)));
        }
        let run = before.iter().find(|(name, _)| *name == "run");
        let (_, run) = run.ok_or_else(|| format!("{KSM_DIRECTORY}/run is missing: a kernel without KSM"))?;
        fs::write(Path::new(KSM_DIRECTORY).join("run"), run)
            .map_err(|error| format!("cannot write {KSM_DIRECTORY}/run: {error}"))?;
        Ok(Self { saved_settings: before, _lock: lock })
    }

    /// KSM for one test, stopped and with settings that Pagefold does not write. `None` if the test is to be skipped;
    /// it has printed the reason.
    #[must_use]
    pub fn acquire_with_foreign_settings() -> Option<Self> {
        let ksm = Self::acquire().inspect_err(|why| println!("skipped: {why}")).ok()?;
        for (name, value) in FOREIGN_SETTINGS.iter().filter(|(name, _)| ksm.read_setting(name).is_some()) {
            ksm.write_setting(name, value);
        }
        Some(ksm)
    }

    /// The settings that differ from those of [`KsmTestGuard::acquire_with_foreign_settings`], with their values.
    #[must_use]
    pub fn changed_settings(&self) -> Vec<(&'static str, String)> {
        let settings =
            FOREIGN_SETTINGS.iter().filter_map(|&(name, value)| Some((name, value, self.read_setting(name)?)));
        settings.filter(|(_, value, current)| current != value).map(|(name, _, current)| (name, current)).collect()
    }

    /// Write a setting. For `pages_to_scan` this first switches the advisor off, because the kernel refuses other
    /// writers while it is on.
    ///
    /// # Panics
    /// If the kernel refuses.
    pub fn write_setting(&self, name: &str, value: impl ToString) {
        if name == "pages_to_scan" && self.read_setting("advisor_mode").is_some_and(|mode| mode != "none") {
            self.write_setting("advisor_mode", "none");
        }
        let path = Path::new(KSM_DIRECTORY).join(name);
        fs::write(&path, value.to_string()).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }

    /// The value of a setting, if this kernel has it.
    #[must_use]
    pub fn read_setting(&self, name: &str) -> Option<String> {
        fs::read_to_string(Path::new(KSM_DIRECTORY).join(name)).ok().map(|text| parse_chosen(&text))
    }

    /// Read a counter.
    ///
    /// # Panics
    /// If it is missing or not a number.
    #[must_use]
    pub fn read_counter(&self, name: &str) -> i64 {
        let path = Path::new(KSM_DIRECTORY).join(name);
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        text.trim().parse().unwrap_or_else(|_| panic!("{}: {text:?}", path.display()))
    }

    /// Let ksmd run until `pages_sharing` is constant over three full scans, then stop it; merged pages stay merged.
    ///
    /// # Panics
    /// If that takes longer than three minutes.
    pub fn scan_until_settled(&self) {
        let (sharing, scans) = (|| self.read_counter("pages_sharing"), || self.read_counter("full_scans"));
        self.write_setting("pages_to_scan", 20_000);
        self.write_setting("sleep_millisecs", 1);
        self.write_setting("run", 1);
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
        self.write_setting("run", 0);
    }
}

impl Drop for KsmTestGuard {
    fn drop(&mut self) {
        for (name, value) in &self.saved_settings {
            if let Err(error) = write_ksm_file(name, value) {
                eprintln!("{KSM_DIRECTORY}/{name} cannot be restored to {value}: {error}");
            }
        }
    }
}

fn write_ksm_file(name: &str, value: &str) -> io::Result<()> {
    let path = Path::new(KSM_DIRECTORY).join(name);
    if parse_chosen(&fs::read_to_string(&path)?) == value { Ok(()) } else { fs::write(path, value) }
}

/// The value of a setting: the bracketed word of a choice, otherwise the whole text.
fn parse_chosen(text: &str) -> String {
    let text = text.trim();
    match text.split_once('[').and_then(|(_, rest)| rest.split_once(']')) {
        Some((word, _)) => word.to_owned(),
        None => text.to_owned(),
    }
}
