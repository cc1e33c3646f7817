//! `[daemon]`: what `pagefold daemon` does and keeps to.

use super::{Config, ConfigText, GroupConditions, schema};
use crate::command_line::{parse_bytes, parse_cpu_share, parse_duration};
use pagefold_daemon::decide::{DaemonMode, DaemonRules, DailyHours};
use pagefold_daemon::run::DaemonSettings;
use schemars::JsonSchema;
use serde::Deserialize;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use toml::Spanned;

type OptionalWord = Option<Spanned<String>>;

/// The section as it is written.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct DaemonConfigSection {
    /// What it may do.
    #[schemars(extend("default" = "advise"))]
    mode: Option<DaemonModeArgument>,
    /// Merge only while less memory than this is available (MemAvailable); else all that pays is merged.
    #[schemars(with = "Option<schema::Amount>")]
    keep_available: OptionalWord,
    /// CPU time of ksmd and pagefold together on average: percent of one CPU.
    #[schemars(with = "Option<schema::Percent>", extend("default" = "10%"))]
    cpu: OptionalWord,
    /// CPU time that may be saved up for a burst.
    #[schemars(with = "Option<schema::Time>", extend("default" = "30s"))]
    burst: OptionalWord,
    /// CPU seconds at most for each MiB that merging a process gives back: ksmd's, and its part of those of the census.
    #[schemars(with = "Option<f64>", extend("exclusiveMinimum" = 0, "default" = 0.02))]
    price: Option<Spanned<f64>>,
    /// Memory that the kernel may keep to know what is merged.
    #[schemars(with = "Option<schema::Amount>")]
    max_metadata: OptionalWord,
    /// Regions that enrolling may bring a process to.
    max_regions: Option<u64>,
    /// Whether huge pages may be split for what is in them.
    #[schemars(extend("default" = true))]
    split_huge_pages: Option<bool>,
    /// Processes with less resident memory are not looked at.
    #[schemars(with = "Option<schema::Amount>", extend("default" = "16MiB"))]
    min_memory: OptionalWord,
    /// Processes that would give back less are left alone.
    #[schemars(with = "Option<schema::Amount>", extend("default" = "1MiB"))]
    min_profit: OptionalWord,
    /// Memory is short while tasks wait for it for this part of ten seconds, on the host or in a process's cgroup.
    /// What it is short for is merged first, and nothing of that is withdrawn. Less than a twentieth left is short as
    /// well: of a limit of a cgroup or one above it, and of the host's memory where it does not tell who waits.
    #[schemars(with = "Option<schema::Percent>", extend("default" = "10%"))]
    pressure: OptionalWord,
    /// The part of ten seconds by which programs may wait longer for a CPU by its work before it backs off.
    #[schemars(with = "Option<schema::Percent>", extend("default" = "10%"))]
    slowdown: OptionalWord,
    /// When nobody is looked at and nothing is merged. What is merged is watched, and what has to be is withdrawn.
    #[serde(default)]
    #[schemars(with = "Vec<schema::HoursOfDay>")]
    quiet_hours: Vec<Spanned<String>>,
    /// Whether pages of different trust domains may be merged: whoever times writes learns what the other holds.
    #[schemars(extend("default" = false))]
    across_domains: Option<bool>,
    /// Go on although another program tunes KSM.
    #[schemars(extend("default" = false))]
    force: Option<bool>,
    /// Who is managed; without it everybody is.
    #[schemars(with = "Option<GroupConditions>")]
    only: Option<Spanned<GroupConditions>>,
    /// Where it keeps its history.
    #[schemars(with = "Option<schema::KeptIn>")]
    history: OptionalWord,
    /// Where to show what it does over HTTP. Read once, when the daemon starts.
    #[schemars(with = "Option<schema::Address>")]
    http: OptionalWord,
    /// Names by which requests may call this host, beside its addresses and localhost; others are refused.
    #[serde(default)]
    #[schemars(with = "Vec<schema::HostName>")]
    http_names: Vec<Spanned<String>>,
}

/// Where the daemon shows what it does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HttpConfig {
    /// The address; without one there is no server.
    pub address: Option<SocketAddr>,
    /// Names by which requests may call this host, beside its addresses and `localhost`.
    pub names: Vec<String>,
}

/// Where the daemon keeps its history, if anywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HistoryLocation {
    /// Nowhere: `off`.
    Off,
    /// In this file.
    File(PathBuf),
}

impl FromStr for HistoryLocation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match Path::new(text) {
            _ if text == "off" => Ok(Self::Off),
            path if path.is_absolute() => Ok(Self::File(path.to_owned())),
            _ => Err(format!("a path from / on is needed such as {}, or off", HistoryLocation::SERVICE_HISTORY_FILE)),
        }
    }
}

impl HistoryLocation {
    /// Where the daemon of the service keeps it.
    pub const SERVICE_HISTORY_FILE: &str = "/var/lib/pagefold/history.db";
}

/// What a daemon may do.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum DaemonModeArgument {
    /// Look and tell
    Observe,
    /// Take censuses and tell what would pay; change nothing
    Advise,
    /// Merge what pays
    Act,
}

impl From<DaemonModeArgument> for DaemonMode {
    fn from(word: DaemonModeArgument) -> Self {
        match word {
            DaemonModeArgument::Observe => Self::Observe,
            DaemonModeArgument::Advise => Self::Advise,
            DaemonModeArgument::Act => Self::Act,
        }
    }
}

impl DaemonConfigSection {
    /// Where the daemon shows what it does. An error begins with its line.
    pub(super) fn parse_http(&mut self, place: &ConfigText<'_>) -> Result<HttpConfig, String> {
        let address = |text: String| text.parse().map_err(|_| "an address is needed such as 127.0.0.1:9750".to_owned());
        let name =
            |name: String| match name.bytes().all(|c| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'.' | b'_')) {
                true if !name.is_empty() => Ok(name),
                _ => Err("the name of a host is needed, without a port".to_owned()),
            };
        let names = place.convert_each(std::mem::take(&mut self.http_names), name)?;
        Ok(HttpConfig { address: place.convert_optional(self.http.take(), address)?, names })
    }

    /// Where the daemon keeps its history. An error begins with its line.
    pub(super) fn parse_history(&mut self, place: &ConfigText<'_>) -> Result<Option<HistoryLocation>, String> {
        place.convert_optional(self.history.take(), |text| text.parse())
    }

    /// The settings it stands for, but for who trusts whom and who is left alone. An error begins with its line.
    pub(super) fn into_settings(self, place: &ConfigText<'_>) -> Result<DaemonSettings, String> {
        let (defaults, rules) = (DaemonSettings::default(), DaemonRules::default());
        let amount = |word: OptionalWord| place.convert_optional(word, |text: String| parse_bytes(&text));
        let price = place.convert_optional(self.price, |price| match price > 0.0 && price.is_finite() {
            true => Ok(price),
            false => Err("a number above 0 is needed, in CPU seconds for a MiB; with one such as 1000.0 the price \
                          hardly counts"
                .to_owned()),
        })?;
        let rules = DaemonRules {
            mode: self.mode.map_or(rules.mode, Into::into),
            keep_available: amount(self.keep_available)?,
            cpu_rate: place.convert_optional(self.cpu, |text| parse_cpu_share(&text))?.unwrap_or(rules.cpu_rate),
            burst: place.convert_optional(self.burst, |text| parse_duration(&text))?.unwrap_or(rules.burst),
            max_cpu_seconds_per_mib: price.unwrap_or(rules.max_cpu_seconds_per_mib),
            pressure_percent: place
                .convert_optional(self.pressure, |text| parse_cpu_share(&text))?
                .map_or(rules.pressure_percent, |share| share * 100.0),
            max_slowdown: place
                .convert_optional(self.slowdown, |text| parse_cpu_share(&text))?
                .unwrap_or(rules.max_slowdown),
            quiet_hours: place.convert_each(self.quiet_hours, |hours| parse_hours(&hours))?,
            ignore_tuners: self.force.unwrap_or(rules.ignore_tuners),
            across_domains: self.across_domains.unwrap_or(rules.across_domains),
            ..rules
        };
        Ok(DaemonSettings {
            rules,
            min_resident: amount(self.min_memory)?.unwrap_or(defaults.min_resident),
            min_profit: amount(self.min_profit)?.unwrap_or(defaults.min_profit),
            max_metadata: amount(self.max_metadata)?,
            max_regions: self.max_regions,
            tracked_group: place.convert_optional(self.only, |only| match only.to_group(place)? {
                only if only.has_condition() => Ok(only),
                _ => Err("it does not say who is managed".to_owned()),
            })?,
            split_huge_pages: self.split_huge_pages.unwrap_or(defaults.split_huge_pages),
            ..defaults
        })
    }
}

impl Config {
    /// What the daemon is to do.
    pub fn daemon_settings(&self) -> DaemonSettings {
        DaemonSettings { domains: self.domains.clone(), exclusions: self.exclusions.clone(), ..self.daemon.clone() }
    }
}

/// Hours such as `22:00-06:30` by the host's clock, or `22:00-06:30Z` by UTC.
fn parse_hours(text: &str) -> Result<DailyHours, String> {
    let second = |text: &str| {
        let (hour, minute) = text.trim().split_once(':')?;
        let (hour, minute) = (hour.parse::<u32>().ok()?, minute.parse::<u32>().ok()?);
        (hour <= 24 && minute < 60 && hour * 60 + minute <= 24 * 60).then_some(hour * 3600 + minute * 60)
    };
    let both = || {
        let (hours, utc) = text.trim_end().strip_suffix('Z').map_or((text, false), |hours| (hours, true));
        let (from, to) = hours.split_once('-')?;
        Some(DailyHours { start_second: second(from)?, end_second: second(to)?, in_utc: utc })
    };
    both().ok_or_else(|| "hours are needed such as 22:00-06:30, or 22:00-06:30Z for UTC".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::Bytes;
    use std::time::Duration;

    #[test]
    fn daemon_section_takes_effect() {
        let text = "[daemon]\nmode = \"act\"\nkeep_available = \"8GiB\"\ncpu = \"25%\"\nburst = \"1m\"\nslowdown = \"5%\"\n\
                    max_regions = 1000\nquiet_hours = [\"22:00-06:30\", \"1:00-2:00Z\"]\nsplit_huge_pages = false\n";
        let settings = Config::parse(text).unwrap().daemon_settings();
        assert_eq!(settings.rules.mode, DaemonMode::Act);
        assert_eq!(settings.rules.keep_available, Some(Bytes(8 << 30)));
        assert_eq!((settings.rules.cpu_rate, settings.rules.burst), (0.25, Duration::from_secs(60)));
        assert_eq!(settings.rules.max_slowdown, 0.05);
        assert_eq!((settings.max_regions, settings.split_huge_pages), (Some(1000), false));
        let night = DailyHours { start_second: 22 * 3600, end_second: 6 * 3600 + 1800, in_utc: false };
        assert_eq!(
            settings.rules.quiet_hours,
            [night, DailyHours { start_second: 3600, end_second: 7200, in_utc: true }]
        );
        assert_eq!(settings.min_profit, DaemonSettings::default().min_profit);
    }

    #[test]
    fn http_address_is_parsed() {
        let http = |text: &str| Config::parse(&format!("[daemon]\n{text}")).map(|config| config.http);
        assert_eq!(http("").unwrap(), HttpConfig::default());
        let names = vec!["node17".to_owned(), "node17.example".to_owned()];
        let expect = HttpConfig { address: Some("[::1]:9750".parse().unwrap()), names };
        assert_eq!(http("http = \"[::1]:9750\"\nhttp_names = [\"node17\", \"node17.example\"]\n").unwrap(), expect);
        for wrong in ["http = \"9750\"", "http = \"localhost:9750\"", "http_names = [\"a:1\"]", "http_names = [\"\"]"] {
            assert!(http(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn history_is_a_path_or_off() {
        let history = |text: &str| Config::parse(&format!("[daemon]\n{text}")).map(|config| config.history);
        assert_eq!(history("").unwrap(), None);
        assert_eq!(history("history = \"off\"").unwrap(), Some(HistoryLocation::Off));
        assert_eq!(history("history = \"/a/b.db\"").unwrap(), Some(HistoryLocation::File("/a/b.db".into())));
        assert!(history("\nhistory = \"b.db\"").unwrap_err().starts_with("3: a path from / on"));
    }

    #[test]
    fn quiet_hours_are_within_a_day() {
        assert!(parse_hours("00:00-24:00").is_ok());
        for wrong in
            ["", "22-6", "22:00", "25:00-01:00", "24:01-01:00", "1:60-2:00", "a:b-c:d", "1:00Z-2:00Z", "1:00-2:00z"]
        {
            assert!(parse_hours(wrong).is_err(), "{wrong}");
        }
    }
}
