//! `[daemon]`: the settings of `pagefold daemon`.

use super::{Config, ConfigText, GroupConditions, schema};
use crate::command_line::{check_vcpus_per_cpu, parse_bandwidth, parse_bytes, parse_cpu_share, parse_duration};
use pagefold_daemon::decide::{CpuBound, CpuRate, DaemonMode, DaemonRules, DailyHours, UnknownCpuCount};
use pagefold_daemon::run::DaemonSettings;
use pagefold_numa::decide::pricing::OperatorPrices;
use pagefold_numa::keeper::{DEFAULT_BANDWIDTH, KeeperSettings};
use pagefold_numa::problem::PlanLimits;
use schemars::JsonSchema;
use serde::Deserialize;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;
use toml::Spanned;

type OptionalWord = Option<Spanned<String>>;

/// The section `[daemon]` of the file.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct DaemonConfigSection {
    /// The mode: what the daemon may do.
    #[schemars(extend("default" = "advise"))]
    mode: Option<DaemonModeArgument>,
    /// Merge only while less memory than this is available (MemAvailable). Without it, merge all with net savings.
    #[schemars(with = "Option<schema::Amount>")]
    keep_available: OptionalWord,
    /// Average CPU limit of ksmd and pagefold together: the rate of the token bucket. It is a percentage of one CPU, or
    /// of all online CPUs of the host. Without it, the larger of 10 % of one CPU and 1 % of the host.
    #[schemars(with = "Option<schema::CpuRate>")]
    cpu_rate: OptionalWord,
    /// CPU time that a burst may take at once: the size of the token bucket. Without it, what the rate gives in five
    /// minutes, but at least 30 seconds.
    #[schemars(with = "Option<schema::Time>")]
    cpu_burst: OptionalWord,
    /// Maximum CPU seconds for each MiB of net savings of a process: those of ksmd, and its share of the census.
    #[schemars(with = "Option<f64>", extend("exclusiveMinimum" = 0, "default" = 0.02))]
    max_cpu_seconds_per_mib: Option<Spanned<f64>>,
    /// Maximum memory for KSM's metadata.
    #[schemars(with = "Option<schema::Amount>")]
    max_metadata: OptionalWord,
    /// Maximum number of regions of a process after it is enrolled.
    max_regions: Option<u64>,
    /// Whether huge pages may be split to merge the pages in them.
    #[schemars(extend("default" = true))]
    split_huge_pages: Option<bool>,
    /// Processes with less resident memory are not scanned.
    #[schemars(with = "Option<schema::Amount>", extend("default" = "16MiB"))]
    min_memory: OptionalWord,
    /// Processes with smaller net savings are not merged.
    #[schemars(with = "Option<schema::Amount>", extend("default" = "1MiB"))]
    min_profit: OptionalWord,
    /// Memory is short while tasks wait for it for this share of ten seconds, on the host or in a process's cgroup.
    /// Processes that are short of memory are merged first and are not unenrolled meanwhile. Memory is also short if
    /// less than a twentieth is left of a limit of the cgroup or its ancestors, or of the host's memory where the
    /// kernel reports no pressure.
    #[schemars(with = "Option<schema::Percent>", extend("default" = "10%"))]
    pressure_threshold: OptionalWord,
    /// The daemon backs off if its work makes programs wait longer for a CPU by this share of ten seconds.
    #[schemars(with = "Option<schema::Percent>", extend("default" = "10%"))]
    max_slowdown: OptionalWord,
    /// Hours without scans and merges. Merged pages are still monitored, and unenrolled where necessary.
    #[serde(default)]
    #[schemars(with = "Vec<schema::HoursOfDay>")]
    quiet_hours: Vec<Spanned<String>>,
    /// Whether to merge pages across trust domains. A process that times its writes then learns which contents
    /// processes of other domains have.
    #[schemars(extend("default" = false))]
    across_domains: Option<bool>,
    /// Whether to continue although another program tunes KSM.
    #[schemars(extend("default" = false))]
    force: Option<bool>,
    /// Conditions of the processes that the daemon manages; all processes by default.
    #[schemars(with = "Option<GroupConditions>")]
    tracked: Option<Spanned<GroupConditions>>,
    /// The file of the history. Read once, when the daemon starts.
    #[schemars(with = "Option<schema::HistoryPath>")]
    history: OptionalWord,
    /// The listen address of the HTTP server. Read once, when the daemon starts.
    #[schemars(with = "Option<schema::Address>")]
    http: OptionalWord,
    /// Host names that HTTP requests may use, besides the host's addresses and localhost; others are refused.
    #[serde(default)]
    #[schemars(with = "Vec<schema::HostName>")]
    http_names: Vec<Spanned<String>>,
    /// Whether virtual machines are placed on NUMA nodes: new ones once they have settled, all of them after
    /// `replan_interval`. Read once, when the daemon starts.
    #[schemars(extend("default" = "off"))]
    placement: Option<PlacementModeArgument>,
    /// The time between two checks of the virtual machines for their placement.
    #[schemars(with = "Option<schema::Time>", extend("default" = "30s"))]
    placement_interval: OptionalWord,
    /// The time after which the placement of all virtual machines is planned again.
    #[schemars(with = "Option<schema::Time>", extend("default" = "1h"))]
    replan_interval: OptionalWord,
    /// Bytes of memory that placement moves in a second at most, on average.
    #[schemars(with = "Option<schema::Amount>", extend("default" = "1GiB"))]
    placement_bandwidth: OptionalWord,
    /// The share of each node's memory that placement leaves free.
    #[schemars(with = "Option<schema::Percent>", extend("default" = "5%"))]
    placement_headroom: OptionalWord,
    /// vCPUs that placement lets a node run for each of its CPUs.
    #[schemars(with = "Option<f64>", extend("minimum" = 0.1, "maximum" = 100, "default" = 1.0))]
    placement_vcpus_per_cpu: Option<Spanned<f64>>,
    /// CPUs that a GiB of memory is worth to placement. Without it, as many as the host has for each GiB.
    #[schemars(with = "Option<f64>", extend("minimum" = 0))]
    placement_cpus_per_gib: Option<Spanned<f64>>,
    /// The share of its CPU time that a virtual machine loses if all its memory is at twice the local distance.
    #[schemars(with = "Option<schema::Percent>", extend("default" = "20%"))]
    placement_remote_read_cost: OptionalWord,
    /// The share of its CPU time that a virtual machine loses if none of its memory is in huge pages.
    #[schemars(with = "Option<schema::Percent>", extend("default" = "7.7%"))]
    placement_huge_page_cost: OptionalWord,
    /// The net gain, in CPU seconds an hour, that moving a virtual machine must have.
    #[schemars(with = "Option<f64>", extend("minimum" = 0, "default" = 36.0))]
    placement_min_gain: Option<Spanned<f64>>,
    /// The time for which a placement is expected to last: the CPU time of moving memory is spread over it.
    #[schemars(with = "Option<schema::Time>", extend("default" = "1h"))]
    placement_period: OptionalWord,
}

/// The settings of the daemon's HTTP server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HttpConfig {
    /// The listen address; without one there is no server.
    pub address: Option<SocketAddr>,
    /// Host names that requests may use, besides the host's addresses and `localhost`.
    pub names: Vec<String>,
}

/// The location of the daemon's history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HistoryLocation {
    /// No history is recorded: `off`.
    Off,
    /// This file.
    File(PathBuf),
}

impl FromStr for HistoryLocation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match Path::new(text) {
            _ if text == "off" => Ok(Self::Off),
            path if path.is_absolute() => Ok(Self::File(path.to_owned())),
            _ => Err(format!("expected an absolute path such as {}, or off", HistoryLocation::SERVICE_HISTORY_FILE)),
        }
    }
}

impl HistoryLocation {
    /// The history file of the systemd service.
    pub const SERVICE_HISTORY_FILE: &str = "/var/lib/pagefold/history.db";
}

/// What a daemon may do.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum DaemonModeArgument {
    /// Watch processes and memory, and take no census
    Observe,
    /// Take censuses and report predicted savings; change nothing
    Advise,
    /// Merge pages with net savings
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

/// Whether a daemon places virtual machines on NUMA nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PlacementModeArgument {
    /// It does not place virtual machines
    #[default]
    Off,
    /// It reports which virtual machines it would place
    Advise,
    /// It places them
    Act,
}

impl DaemonConfigSection {
    /// Parse the settings of the placement on NUMA nodes; `None` if it is off. An error begins with its line number.
    pub(super) fn parse_placement(
        &mut self,
        prices: OperatorPrices,
        config_text: &ConfigText<'_>,
    ) -> Result<Option<KeeperSettings>, String> {
        let time = |word: &mut OptionalWord, default: Duration| {
            let time = config_text.convert_optional(word.take(), |text| parse_duration(&text))?.unwrap_or(default);
            Ok::<_, String>(time.max(Duration::from_secs(1)))
        };
        let defaults = PlanLimits::default();
        let limits = PlanLimits {
            prices,
            vcpus_per_cpu: config_text
                .convert_optional(self.placement_vcpus_per_cpu.take(), check_vcpus_per_cpu)?
                .unwrap_or(defaults.vcpus_per_cpu),
            headroom_share: config_text
                .convert_optional(self.placement_headroom.take(), |text| parse_cpu_share(&text))?
                .unwrap_or(defaults.headroom_share),
        };
        let settings = KeeperSettings {
            acts: self.placement == Some(PlacementModeArgument::Act),
            interval: time(&mut self.placement_interval, Duration::from_secs(30))?,
            replan_interval: time(&mut self.replan_interval, Duration::from_secs(3600))?,
            limits,
            bandwidth: config_text
                .convert_optional(self.placement_bandwidth.take(), |text| parse_bandwidth(&text))?
                .unwrap_or(DEFAULT_BANDWIDTH),
        };
        let is_on = self.placement.take().is_some_and(|mode| mode != PlacementModeArgument::Off);
        Ok(is_on.then_some(settings))
    }

    /// Parse what resources are worth to the placement. An error begins with its line number.
    pub(super) fn parse_prices(&mut self, config_text: &ConfigText<'_>) -> Result<OperatorPrices, String> {
        let defaults = OperatorPrices::default();
        let share = |word: &mut OptionalWord, default: f64| {
            let share = config_text.convert_optional(word.take(), |text| parse_cpu_share(&text))?;
            Ok::<_, String>(share.unwrap_or(default))
        };
        let check_price = |price: f64| match price >= 0.0 && price.is_finite() {
            true => Ok(price),
            false => Err("expected a number that is not negative".to_owned()),
        };
        Ok(OperatorPrices {
            remote_read_share: share(&mut self.placement_remote_read_cost, defaults.remote_read_share)?,
            huge_page_share: share(&mut self.placement_huge_page_cost, defaults.huge_page_share)?,
            cpus_per_gib: config_text.convert_optional(self.placement_cpus_per_gib.take(), check_price)?,
            min_gain: config_text
                .convert_optional(self.placement_min_gain.take(), check_price)?
                .unwrap_or(defaults.min_gain),
            period: config_text
                .convert_optional(self.placement_period.take(), |text| parse_duration(&text))?
                .unwrap_or(defaults.period),
        })
    }

    /// Parse the settings of the HTTP server. An error begins with its line number.
    pub(super) fn parse_http(&mut self, config_text: &ConfigText<'_>) -> Result<HttpConfig, String> {
        let parse_address =
            |text: String| text.parse().map_err(|_| "expected an address such as 127.0.0.1:9750".to_owned());
        let parse_name =
            |name: String| match name.bytes().all(|c| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'.' | b'_')) {
                true if !name.is_empty() => Ok(name),
                _ => Err("expected a host name without a port".to_owned()),
            };
        let names = config_text.convert_each(std::mem::take(&mut self.http_names), parse_name)?;
        Ok(HttpConfig { address: config_text.convert_optional(self.http.take(), parse_address)?, names })
    }

    /// Parse the location of the history. An error begins with its line number.
    pub(super) fn parse_history(&mut self, config_text: &ConfigText<'_>) -> Result<Option<HistoryLocation>, String> {
        config_text.convert_optional(self.history.take(), |text| text.parse())
    }

    /// Parse the bound on CPU time. An error begins with its line number.
    pub(super) fn parse_cpu_bound(&mut self, config_text: &ConfigText<'_>) -> Result<CpuBound, String> {
        Ok(CpuBound {
            rate: config_text.convert_optional(self.cpu_rate.take(), |text| text.parse())?,
            burst: config_text.convert_optional(self.cpu_burst.take(), |text| parse_duration(&text))?,
        })
    }

    /// Convert the section to settings, without the bound on CPU time, trust domains and exclusions. An error begins
    /// with its line number.
    pub(super) fn into_settings(self, config_text: &ConfigText<'_>) -> Result<DaemonSettings, String> {
        let (defaults, rules) = (DaemonSettings::default(), DaemonRules::default());
        let parse_amount = |word: OptionalWord| config_text.convert_optional(word, |text: String| parse_bytes(&text));
        let max_cpu_seconds_per_mib = config_text.convert_optional(self.max_cpu_seconds_per_mib, |limit| {
            match limit > 0.0 && limit.is_finite() {
                true => Ok(limit),
                false => Err("expected a number above 0, in CPU seconds per MiB; a large number such as 1000.0 turns \
                          the limit off"
                    .to_owned()),
            }
        })?;
        let rules = DaemonRules {
            mode: self.mode.map_or(rules.mode, Into::into),
            keep_available: parse_amount(self.keep_available)?,
            max_cpu_seconds_per_mib: max_cpu_seconds_per_mib.unwrap_or(rules.max_cpu_seconds_per_mib),
            pressure_percent: config_text
                .convert_optional(self.pressure_threshold, |text| parse_cpu_share(&text))?
                .map_or(rules.pressure_percent, |share| share * 100.0),
            max_slowdown: config_text
                .convert_optional(self.max_slowdown, |text| parse_cpu_share(&text))?
                .unwrap_or(rules.max_slowdown),
            quiet_hours: config_text.convert_each(self.quiet_hours, |hours| parse_hours(&hours))?,
            ignore_tuners: self.force.unwrap_or(rules.ignore_tuners),
            across_domains: self.across_domains.unwrap_or(rules.across_domains),
            ..rules
        };
        Ok(DaemonSettings {
            rules,
            min_resident: parse_amount(self.min_memory)?.unwrap_or(defaults.min_resident),
            min_profit: parse_amount(self.min_profit)?.unwrap_or(defaults.min_profit),
            max_metadata: parse_amount(self.max_metadata)?,
            max_regions: self.max_regions,
            tracked_group: config_text.convert_optional(self.tracked, |conditions| {
                match conditions.into_group(config_text)? {
                    group if group.has_condition() => Ok(group),
                    _ => Err("[daemon.tracked] has no condition".to_owned()),
                }
            })?,
            split_huge_pages: self.split_huge_pages.unwrap_or(defaults.split_huge_pages),
            ..defaults
        })
    }
}

impl Config {
    /// The configuration with another rate of the daemon's CPU time, if one is given.
    #[must_use]
    pub fn with_cpu_rate(&self, rate: Option<CpuRate>) -> Self {
        let cpu_bound = CpuBound { rate: rate.or(self.cpu_bound.rate), ..self.cpu_bound };
        Self { cpu_bound, ..self.clone() }
    }

    /// The settings of the daemon, with trust domains, exclusions, and the bound on CPU time for a host with so many
    /// online CPUs, if that is known.
    ///
    /// # Errors
    /// If the bound is a share of the host and the number is not known.
    pub fn daemon_settings(&self, online_cpus: Option<usize>) -> Result<DaemonSettings, UnknownCpuCount> {
        let (domains, exclusions) = (self.domains.clone(), self.exclusions.clone());
        let mut settings = DaemonSettings { domains, exclusions, ..self.daemon.clone() };
        self.cpu_bound.apply(online_cpus, &mut settings.rules)?;
        Ok(settings)
    }
}

/// Parse hours such as `22:00-06:30` in the host's local time, or `22:00-06:30Z` in UTC.
fn parse_hours(text: &str) -> Result<DailyHours, String> {
    let parse_second = |text: &str| {
        let (hour, minute) = text.trim().split_once(':')?;
        let (hour, minute) = (hour.parse::<u32>().ok()?, minute.parse::<u32>().ok()?);
        (hour <= 24 && minute < 60 && hour * 60 + minute <= 24 * 60).then_some(hour * 3600 + minute * 60)
    };
    let parse = || {
        let (hours, in_utc) = text.trim_end().strip_suffix('Z').map_or((text, false), |hours| (hours, true));
        let (from, to) = hours.split_once('-')?;
        Some(DailyHours { start_second: parse_second(from)?, end_second: parse_second(to)?, in_utc })
    };
    parse().ok_or_else(|| "expected hours such as 22:00-06:30, or 22:00-06:30Z for UTC".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::Bytes;
    use std::time::Duration;

    #[test]
    fn daemon_section_takes_effect() {
        let text = "[daemon]\nmode = \"act\"\nkeep_available = \"8GiB\"\ncpu_rate = \"25%\"\ncpu_burst = \"1m\"\n\
                    max_slowdown = \"5%\"\nmax_regions = 1000\nquiet_hours = [\"22:00-06:30\", \"1:00-2:00Z\"]\nsplit_huge_pages = false\n";
        let settings = Config::parse(text).unwrap().daemon_settings(Some(48)).unwrap();
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
    fn cpu_bound_is_that_of_the_host() {
        let bound = |text: &str, cpus| {
            let settings = Config::parse(&format!("[daemon]\n{text}")).unwrap().daemon_settings(cpus);
            settings.map(|settings| (settings.rules.cpu_rate, settings.rules.burst.as_secs()))
        };
        assert_eq!(bound("", Some(2)), Ok((0.1, 30)));
        assert_eq!(bound("", Some(48)), Ok((0.48, 144)));
        assert_eq!(bound("", None), Ok((0.1, 30)), "of a recording without the number of CPUs");
        assert_eq!(bound("cpu_rate = \"250%\"", None), Ok((2.5, 750)));
        assert_eq!(bound("cpu_rate = \"2% of host\"\ncpu_burst = \"10s\"", Some(50)), Ok((1.0, 10)));
        assert!(bound("cpu_rate = \"2% of host\"", None).unwrap_err().to_string().contains("of one CPU"));
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
    fn placement_settings_take_effect() {
        let placement = |text: &str| Config::parse(&format!("[daemon]\n{text}")).map(|config| config.placement);
        assert_eq!(placement("placement_headroom = \"10%\"").unwrap(), None, "it is off");
        let defaults = KeeperSettings {
            acts: false,
            interval: Duration::from_secs(30),
            replan_interval: Duration::from_secs(3600),
            limits: PlanLimits::default(),
            bandwidth: Bytes(1 << 30),
        };
        assert_eq!(placement("placement = \"advise\"").unwrap(), Some(defaults));
        let shown =
            crate::config::tests::default_config_uncommented().replace("placement = \"off\"", "placement = \"advise\"");
        let shown = Config::parse(&shown).unwrap().placement;
        // The file shows a price of memory as an example. Without it the price is that of the host.
        let prices = OperatorPrices { cpus_per_gib: Some(0.25), ..OperatorPrices::default() };
        let limits = PlanLimits { prices, ..PlanLimits::default() };
        assert_eq!(shown, Some(KeeperSettings { limits, ..defaults }), "the default file");
        let text = "placement = \"advise\"\nplacement_cpus_per_gib = 0\nplacement_remote_read_cost = \"30%\"\n\
                    placement_huge_page_cost = \"5%\"\nplacement_min_gain = 1.5\nplacement_period = \"2h\"\n";
        let prices = OperatorPrices {
            cpus_per_gib: Some(0.0),
            remote_read_share: 0.3,
            huge_page_share: 0.05,
            min_gain: 1.5,
            period: Duration::from_secs(7200),
        };
        assert_eq!(placement(text).unwrap().map(|settings| settings.limits.prices), Some(prices));
        for wrong in ["placement_cpus_per_gib = -1", "placement_min_gain = nan"] {
            assert_eq!(placement(wrong).unwrap_err(), "2: expected a number that is not negative", "{wrong}");
        }
        let text = "placement = \"act\"\nplacement_headroom = \"10%\"\nplacement_vcpus_per_cpu = 2\n\
                    placement_bandwidth = \"500MiB\"\n";
        let limits = PlanLimits { vcpus_per_cpu: 2.0, headroom_share: 0.1, ..PlanLimits::default() };
        let expected = KeeperSettings { acts: true, bandwidth: Bytes(500 << 20), limits, ..defaults };
        assert_eq!(placement(text).unwrap(), Some(expected));
        for wrong in ["0", "0.05", "101", "nan", "-1"] {
            let error = placement(&format!("placement_vcpus_per_cpu = {wrong}")).unwrap_err();
            assert_eq!(error, "2: expected a number of vCPUs for each CPU from 0.1 to 100, such as 1.5", "{wrong}");
        }
    }

    #[test]
    fn history_is_a_path_or_off() {
        let history = |text: &str| Config::parse(&format!("[daemon]\n{text}")).map(|config| config.history);
        assert_eq!(history("").unwrap(), None);
        assert_eq!(history("history = \"off\"").unwrap(), Some(HistoryLocation::Off));
        assert_eq!(history("history = \"/a/b.db\"").unwrap(), Some(HistoryLocation::File("/a/b.db".into())));
        assert!(history("\nhistory = \"b.db\"").unwrap_err().starts_with("3: expected an absolute path"));
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
