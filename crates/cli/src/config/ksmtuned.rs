//! `/etc/ksmtuned.conf` read as what it means for the daemon.
//!
//! The file is a shell script of assignments (ksmtuned 4.20150326). What ksmtuned does with a value is in
//! [`pagefold_model::policy::Ksmtuned`]: it runs ksmd at a rate that moves with free memory. The daemon has no rate but
//! a bound on CPU time, so that a rate is kept as the CPU time that it takes, and a threshold as memory to keep.

use pagefold_model::Bytes;
use pagefold_model::doctor::SCAN_MICROSECONDS;
use pagefold_model::policy::Ksmtuned;

/// What a configuration of ksmtuned comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// The section for the daemon.
    pub section: String,
    /// What was kept, each with how.
    pub kept: Vec<String>,
    /// What was not, each with why.
    pub left: Vec<String>,
}

/// Read a configuration of ksmtuned for a host with so much memory.
pub fn import(text: &str, total: Bytes) -> Imported {
    let (mut kept, mut left) = (Vec::new(), Vec::new());
    let mut number = |name: &str| {
        let value = value_of(text, name)?;
        let number = value.parse::<u64>().ok();
        if number.is_none() {
            left.push(format!("{name}={value}: no number, and not the shell's to be found out here"));
        }
        number
    };
    let coefficient = number("KSM_THRES_COEF");
    let constant = number("KSM_THRES_CONST");
    let most = number("KSM_NPAGES_MAX");
    let sleep = number("KSM_SLEEP_MSEC");
    let mut section = "[daemon]\nmode = \"act\"\n".to_owned();
    let default = Ksmtuned::default();
    // ksmtuned: the larger of a part of all memory and a constant in kB.
    let threshold = Bytes(total.0 / 100 * coefficient.unwrap_or(default.threshold_percent))
        .max(Bytes::from_kib(constant.unwrap_or(default.threshold_kib)));
    section.push_str(&format!("keep_available = \"{}MiB\"\n", threshold.0 >> 20));
    let said = if coefficient.is_some() || constant.is_some() { "as the file says" } else { "ksmtuned's default" };
    kept.push(format!("KSM_THRES_COEF and KSM_THRES_CONST ({said}): keep_available is {threshold}"));
    if most.is_some() || sleep.is_some() {
        let gib = total.0.max(1) as f64 / f64::from(1 << 30);
        let pause = (sleep.unwrap_or(default.sleep_millisecs) as f64 * 16.0 / gib).max(10.0);
        let work = most.unwrap_or(default.max.unsigned_abs()) as f64 * SCAN_MICROSECONDS / 1000.0;
        let percent = (work / (work + pause) * 100.0).clamp(1.0, 100.0);
        section.push_str(&format!("cpu = \"{percent:.0}%\"\n"));
        kept.push(format!("KSM_NPAGES_MAX and KSM_SLEEP_MSEC: at most {percent:.0} % of one CPU, as cpu on average"));
    }
    for (name, why) in [
        ("KSM_MONITOR_INTERVAL", "the daemon looks every second, and merges who comes at once"),
        ("KSM_NPAGES_BOOST", "there is no rate that would move"),
        ("KSM_NPAGES_DECAY", "there is no rate that would move"),
        ("KSM_NPAGES_MIN", "ksmd rests where nothing is to be merged"),
        ("LOGFILE", "decisions go to standard error, which the journal keeps"),
        ("DEBUG", "decisions are told with their reasons always"),
    ] {
        if value_of(text, name).is_some() {
            left.push(format!("{name}: {why}"));
        }
    }
    Imported { section, kept, left }
}

/// The last assignment of a variable that is not a comment, without quotes.
fn value_of<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let assigned = |line: &'a str| line.trim().strip_prefix(name)?.strip_prefix('=');
    let value = text.lines().filter_map(assigned).next_back()?;
    let value = value.split('#').next().unwrap_or_default().trim();
    Some(value.trim_matches(|c| c == '"' || c == '\''))
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

    const FILE: &str = "# Configuration file for ksmtuned.\n# KSM_MONITOR_INTERVAL=60\nKSM_SLEEP_MSEC=10\n\
                        KSM_NPAGES_MAX=1250\nKSM_NPAGES_BOOST=300 # more\nKSM_THRES_COEF=\"30\"\nLOGFILE=/var/log/x\n";

    #[test]
    fn what_means_something_is_kept_and_the_rest_is_told() {
        let imported = import(FILE, Bytes(16 << 30));
        let settings = Config::parse(&imported.section).unwrap().daemon();
        assert_eq!(settings.rules.keep_available.map(|bytes| bytes.0 >> 20), Some(16 * 1024 * 30 / 100));
        assert!(settings.rules.cpu > 0.1 && settings.rules.cpu < 0.6, "{}", settings.rules.cpu);
        assert_eq!(imported.kept.len(), 2);
        let left: Vec<_> = imported.left.iter().map(|line| line.split(':').next().unwrap()).collect();
        assert_eq!(left, ["KSM_NPAGES_BOOST", "LOGFILE"]);
    }

    #[test]
    fn what_is_no_number_is_told() {
        let imported = import("KSM_THRES_COEF=$((10 + 10))\n", Bytes(1 << 30));
        assert!(imported.left[0].starts_with("KSM_THRES_COEF=$((10 + 10)):"), "{:?}", imported.left);
        assert!(Config::parse(&imported.section).is_ok());
    }
}
