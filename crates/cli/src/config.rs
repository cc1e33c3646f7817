//! The configuration: `/etc/pagefold/pagefold.toml`, or the file that `--config` names.
//!
//! It sets the trust domains, the exclusions and the daemon's settings; everything else is an option of a command. The
//! default file may be missing; a file given by `--config` must exist. An unknown key, an invalid pattern or a group
//! without conditions is an error. The error is one line with the line number and a similar known word, if there is
//! one. The doc comments of the fields below are also the descriptions in the JSON schema.

mod daemon;
mod ksmtuned;
mod schema;

pub use daemon::{DaemonModeArgument, HistoryLocation, HttpConfig};
pub use ksmtuned::{KsmtunedImport, import};
pub use schema::config_schema;

use crate::command_line::{DomainRuleArgument, GlobalOptions};
use crate::host_selection;
use anyhow::{Context, anyhow};
use globset::{Glob, GlobMatcher};
use pagefold_base::domain::{DomainConfig, DomainRule, TrustGroup};
use pagefold_base::exclusion::Exclusions;
use pagefold_base::ksm::{Setting, Settings};
use pagefold_daemon::decide::CpuBound;
use pagefold_merge::decide::policy;
use pagefold_merge::decide::policy::Policy;
use pagefold_numa::decide::pricing::OperatorPrices;
use pagefold_numa::keeper::KeeperSettings;
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use toml::Spanned;

/// The configuration file that is read without `--config`.
pub const DEFAULT_CONFIG_FILE: &str = "/etc/pagefold/pagefold.toml";

/// The default configuration, with all possible keys in comments.
pub const DEFAULT_CONFIG_TEXT: &str = include_str!("pagefold.toml");

/// The configuration in force.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// The file that it was read from; `None` if the default file does not exist.
    pub path: Option<PathBuf>,
    /// The trust domains.
    pub domains: DomainConfig,
    /// The processes that are never merged.
    pub exclusions: Exclusions,
    /// The daemon's HTTP server.
    pub http: HttpConfig,
    /// The location of the daemon's history, if the file sets it.
    pub history: Option<HistoryLocation>,
    /// How the daemon places virtual machines on NUMA nodes, if it does.
    pub placement: Option<KeeperSettings>,
    /// What resources are worth to a placement.
    pub placement_prices: OperatorPrices,
    /// The daemon's bound on CPU time, as far as the file sets it.
    cpu_bound: CpuBound,
    /// The other settings of the daemon.
    daemon: pagefold_daemon::run::DaemonSettings,
    /// Warnings about well-formed entries that have no effect. Each begins with its line number.
    warnings: Vec<String>,
}

impl Config {
    /// Read the file that the command line selects.
    pub fn load(global: &GlobalOptions) -> anyhow::Result<Self> {
        let path = global.config.as_deref().unwrap_or(Path::new(DEFAULT_CONFIG_FILE));
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound && global.config.is_none() => {
                return Ok(Self::default());
            }
            Err(error) => {
                return Err(error).with_context(|| {
                    format!("cannot read {} (`pagefold config default` prints one to start from)", path.display())
                });
            }
        };
        let config = Self::parse(&text).map_err(|why| anyhow!("{}:{why}", path.display()))?;
        for warning in &config.warnings {
            eprintln!("pagefold: {}:{warning}", path.display());
        }
        Ok(Self { path: Some(path.to_owned()), ..config })
    }

    /// The trust domains. A rule of the command line replaces the file's rule.
    pub fn domains(&self, rule: Option<DomainRuleArgument>) -> DomainConfig {
        let mut domains = self.domains.clone();
        if let Some(rule) = rule {
            domains.rule = rule.into();
        }
        domains
    }

    /// If `ignore` is set, also merge virtual machines whose owner forbids merging.
    #[must_use]
    pub fn with_opt_out_ignored(self, ignore: bool) -> Self {
        if ignore { Self { exclusions: self.exclusions.opted_out(false), ..self } } else { self }
    }

    /// Parse the text of a file. An error begins with its line number.
    fn parse(text: &str) -> Result<Self, String> {
        let mut document: ConfigDocument = deserialize_toml(text)?;
        let config_text = ConfigText(text);
        let line_numbers: Vec<usize> =
            document.domain.iter().map(|domain| config_text.line_number(domain.span().start)).collect();
        let groups = config_text.parse_groups("domain", document.domain)?;
        let unattested = line_numbers.iter().zip(&groups).filter(|(_, group)| !group.is_attested());
        let warnings = unattested.map(|(line, group)| {
            format!(
                "{line}: the domain {:?} is not applied: any process can choose its own vms, names, containers and \
                 jobs; add users, cgroups or labels",
                group.name
            )
        });
        let warnings = warnings.collect();
        let ExcludeConfig { names, extend, vms, confidential, opted_out, group } = document.exclude;
        let base = if names.is_some() { Exclusions::none() } else { Exclusions::default() };
        let names = config_text.parse_globs(names.into_iter().flatten().chain(extend).collect())?;
        let exclusions =
            base.programs(names).vms(config_text.parse_globs(vms)?).confidential(confidential).opted_out(opted_out);
        let exclusions = exclusions.groups(config_text.parse_groups("excluded group", group)?);
        let http = document.daemon.parse_http(&config_text)?;
        let history = document.daemon.parse_history(&config_text)?;
        let placement_prices = document.daemon.parse_prices(&config_text)?;
        let placement = document.daemon.parse_placement(placement_prices, &config_text)?;
        let cpu_bound = document.daemon.parse_cpu_bound(&config_text)?;
        let daemon = document.daemon.into_settings(&config_text)?;
        Ok(Self {
            path: None,
            domains: DomainConfig { rule: document.domains.into(), groups },
            exclusions,
            http,
            history,
            placement,
            placement_prices,
            cpu_bound,
            daemon,
            warnings,
        })
    }
}

/// The configuration of pagefold: /etc/pagefold/pagefold.toml.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "pagefold.toml")]
struct ConfigDocument {
    /// The rule that sorts processes into trust domains if they are in no group below.
    #[serde(default)]
    #[schemars(extend("default" = "user"))]
    domains: DomainRuleName,
    /// Groups of processes that trust each other. A process belongs to the first group that it matches.
    #[serde(default)]
    #[schemars(with = "Vec<GroupConditions>", transform = schema::require_unique_names)]
    domain: Vec<Spanned<GroupConditions>>,
    /// Processes that are never merged.
    #[serde(default)]
    exclude: ExcludeConfig,
    /// The settings of `pagefold daemon`.
    #[serde(default)]
    daemon: daemon::DaemonConfigSection,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum DomainRuleName {
    /// A domain for each user, and one for each virtual machine and each setuid program.
    #[default]
    User,
    /// A domain for each cgroup.
    Cgroup,
    /// A domain for each process or virtual machine.
    Process,
    /// One domain.
    Host,
}

impl From<DomainRuleName> for DomainRule {
    fn from(rule: DomainRuleName) -> Self {
        match rule {
            DomainRuleName::User => Self::User,
            DomainRuleName::Cgroup => Self::Cgroup,
            DomainRuleName::Process => Self::Process,
            DomainRuleName::Host => Self::Host,
        }
    }
}

type GlobPatterns = Vec<Spanned<String>>;

/// Conditions on processes. A process must match one value of each key that is given.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(transform = schema::require_condition)]
struct GroupConditions {
    /// The group's name. Not needed where only one such table is possible.
    #[serde(default)]
    name: String,
    /// Users, by name or UID.
    #[serde(default)]
    #[schemars(with = "Vec<UserNameOrUid>")]
    users: Vec<Spanned<UserNameOrUid>>,
    /// Cgroups and their descendants.
    #[serde(default)]
    #[schemars(with = "Vec<schema::Glob>")]
    cgroups: GlobPatterns,
    /// Names of virtual machines.
    #[serde(default)]
    #[schemars(with = "Vec<schema::Glob>")]
    vms: GlobPatterns,
    /// The kernel's names of programs (comm).
    #[serde(default)]
    #[schemars(with = "Vec<schema::Glob>")]
    names: GlobPatterns,
    /// Containers, such as `docker:4c01db0b339c`.
    #[serde(default)]
    #[schemars(with = "Vec<schema::Glob>")]
    containers: GlobPatterns,
    /// Labels of Docker containers and annotations of Podman, containerd and CRI-O containers, as `KEY=VALUE`.
    #[serde(default)]
    #[schemars(with = "Vec<schema::Glob>")]
    labels: GlobPatterns,
    /// Jobs, such as `slurm:1234`.
    #[serde(default)]
    #[schemars(with = "Vec<schema::Glob>")]
    jobs: GlobPatterns,
}

impl GroupConditions {
    fn into_group(self, text: &ConfigText<'_>) -> Result<TrustGroup, String> {
        Ok(TrustGroup {
            users: text.convert_each(self.users, |user| user.into_uid())?,
            cgroups: text.parse_globs(self.cgroups)?,
            vms: text.parse_globs(self.vms)?,
            program_names: text.parse_globs(self.names)?,
            containers: text.parse_globs(self.containers)?,
            labels: text.parse_globs(self.labels)?,
            jobs: text.parse_globs(self.jobs)?,
            name: self.name,
        })
    }
}

/// A user, by name or UID.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged, expecting = "a user's name or number")]
enum UserNameOrUid {
    Number(u32),
    Name(String),
}

impl UserNameOrUid {
    fn into_uid(self) -> Result<u32, String> {
        match self {
            Self::Number(number) => Ok(number),
            Self::Name(name) => host_selection::parse_uid(&name).map_err(|error| format!("{error:#}")),
        }
    }
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ExcludeConfig {
    /// Programs to exclude instead of the built-in list of programs that hold keys.
    #[schemars(with = "Option<Vec<schema::Glob>>")]
    names: Option<GlobPatterns>,
    /// Programs to exclude in addition to that list.
    #[serde(default)]
    #[schemars(with = "Vec<schema::Glob>")]
    extend: GlobPatterns,
    /// Virtual machines to exclude.
    #[serde(default)]
    #[schemars(with = "Vec<schema::Glob>")]
    vms: GlobPatterns,
    /// Whether to exclude virtual machines with encrypted memory, which cannot merge.
    #[serde(default = "yes")]
    confidential: bool,
    /// Whether to exclude virtual machines whose owner forbids merging: QEMU's mem-merge=off, merge=off of a memory
    /// backend, libvirt's `<nosharepages/>`.
    #[serde(default = "yes")]
    opted_out: bool,
    /// Other processes to exclude, with the conditions of a domain.
    #[serde(default)]
    #[schemars(with = "Vec<GroupConditions>", transform = schema::require_unique_names)]
    group: Vec<Spanned<GroupConditions>>,
}

impl Default for ExcludeConfig {
    fn default() -> Self {
        let (confidential, opted_out) = (yes(), yes());
        Self { names: None, extend: Vec::new(), vms: Vec::new(), confidential, opted_out, group: Vec::new() }
    }
}

fn yes() -> bool {
    true
}

/// A file with the settings of a policy.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyDocument {
    ksm: BTreeMap<Spanned<String>, Spanned<toml::Value>>,
}

/// Read a policy file: the table `[ksm]` with names and values of files in `/sys/kernel/mm/ksm`.
pub fn load_policy(path: &Path) -> anyhow::Result<Policy> {
    let text = std::fs::read_to_string(path).with_context(|| {
        format!("cannot read {} (the built-in policies are {})", path.display(), policy::POLICY_NAMES.join(", "))
    })?;
    parse_policy_settings(&text).map(Policy::Fixed).map_err(|why| anyhow!("{}:{why}", path.display()))
}

fn parse_policy_settings(text: &str) -> Result<Settings, String> {
    let document: PolicyDocument = deserialize_toml(text)?;
    let config_text = ConfigText(text);
    let mut settings = Settings::new();
    for (key, value) in document.ksm {
        let line = config_text.line_number(key.span().start);
        let Some(setting) = Setting::from_file_name(key.get_ref()) else {
            let files = Setting::ALL.map(Setting::file_name);
            let hint =
                nearest_word(key.get_ref(), files).map_or_else(String::new, |near| format!("did you mean {near}? "));
            return Err(format!(
                "{line}: {:?} is not a KSM setting: {hint}The settings are {}",
                key.get_ref(),
                files.join(", ")
            ));
        };
        let value = match value.into_inner() {
            toml::Value::Integer(number) => number.to_string(),
            toml::Value::Boolean(on) => u8::from(on).to_string(),
            toml::Value::String(text) => text,
            other => return Err(format!("{line}: {} takes a number or a word, not {other}", setting.file_name())),
        };
        pagefold_base::setting::check_setting_value(setting, &value)
            .map_err(|why| format!("{line}: {why}, not {value:?}"))?;
        settings.insert(setting, value);
    }
    if settings.is_empty() {
        return Err("1: there is no setting under [ksm]".to_owned());
    }
    Ok(settings)
}

/// Deserialize TOML. An error is one line.
fn deserialize_toml<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    toml::from_str(text).map_err(|error| {
        let line = ConfigText(text).line_number(error.span().map_or(0, |span| span.start));
        let message = error.message().lines().collect::<Vec<_>>().join(", ");
        // serde's message: unknown field `A`, expected one of `B`, `C`.
        let words: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
        let did_you_mean = |word: &str| format!("; did you mean {word}?");
        let hint = match words.split_first() {
            Some((wrong, known)) if message.starts_with("unknown") => {
                nearest_word(wrong, known.iter().copied()).map(did_you_mean)
            }
            _ => None,
        };
        let hint = hint.unwrap_or_default();
        format!("{line}: {message}{hint}")
    })
}

/// The most similar known word, if one is similar enough.
pub fn nearest_word<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let distance = |known: &&str| strsim::damerau_levenshtein(word, known);
    let near = known.into_iter().min_by_key(distance)?;
    (distance(&near) <= (word.chars().count() / 3).max(1)).then_some(near)
}

/// The text of a configuration, to turn positions into line numbers.
struct ConfigText<'a>(&'a str);

impl ConfigText<'_> {
    /// Parse the groups of one kind. Each needs a unique name and at least one condition.
    fn parse_groups(&self, table_name: &str, tables: Vec<Spanned<GroupConditions>>) -> Result<Vec<TrustGroup>, String> {
        let mut groups: Vec<TrustGroup> = Vec::new();
        for table in tables {
            let line = self.line_number(table.span().start);
            let conditions = table.into_inner();
            if conditions.name.is_empty() || groups.iter().any(|group| group.name == conditions.name) {
                return Err(format!(
                    "{line}: each {table_name} needs a unique, nonempty name, not {:?}",
                    conditions.name
                ));
            }
            let group = conditions.into_group(self)?;
            if !group.has_condition() {
                return Err(format!(
                    "{line}: the {table_name} {:?} has no condition: give users, cgroups, vms, names, containers, \
                     labels or jobs",
                    group.name
                ));
            }
            groups.push(group);
        }
        Ok(groups)
    }

    /// The line number of a byte position, from 1.
    fn line_number(&self, position: usize) -> usize {
        let before = &self.0.as_bytes()[..position.min(self.0.len())];
        before.iter().filter(|&&byte| byte == b'\n').count() + 1
    }

    /// Convert each value. An error begins with the line number of its value.
    fn convert_each<T, U>(
        &self,
        values: Vec<Spanned<T>>,
        convert: impl Fn(T) -> Result<U, String>,
    ) -> Result<Vec<U>, String> {
        let convert_one = |value: Spanned<T>| {
            let line = self.line_number(value.span().start);
            convert(value.into_inner()).map_err(|why| format!("{line}: {why}"))
        };
        values.into_iter().map(convert_one).collect()
    }

    /// Convert a value if it is given. An error begins with its line number.
    fn convert_optional<T, U>(
        &self,
        value: Option<Spanned<T>>,
        convert: impl Fn(T) -> Result<U, String>,
    ) -> Result<Option<U>, String> {
        Ok(self.convert_each(value.into_iter().collect(), convert)?.pop())
    }

    fn parse_globs(&self, patterns: GlobPatterns) -> Result<Vec<GlobMatcher>, String> {
        self.convert_each(patterns, |pattern| parse_glob(&pattern))
    }
}

fn parse_glob(pattern: &str) -> Result<GlobMatcher, String> {
    if pattern.is_empty() {
        return Err("an empty pattern matches nothing".to_owned());
    }
    Glob::new(pattern).map(|glob| glob.compile_matcher()).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::process::Process;
    use pagefold_base::{Absent, Pid, ProcessId};
    use proptest::prelude::*;
    use std::fs;

    /// Path and text of each file in a directory of `fixtures/config`.
    fn config_fixtures(folder: &str) -> Vec<(String, String)> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/config").join(folder);
        let files = fs::read_dir(&folder).expect("the fixtures").map(|entry| entry.unwrap().path());
        let files: Vec<_> =
            files.map(|path| (path.display().to_string(), fs::read_to_string(&path).unwrap())).collect();
        assert!(!files.is_empty());
        files
    }

    /// Assert that each text is refused with a one-line error that begins as its first line expects.
    fn assert_all_refused<T>(folder: &str, parse: impl Fn(&str) -> Result<T, String>) {
        for (path, text) in config_fixtures(folder) {
            let expected = text.lines().next().and_then(|line| line.strip_prefix("# expected: ")).expect(&path);
            let error = parse(&text).err().unwrap_or_else(|| panic!("{path} is accepted"));
            assert!(error.starts_with(expected), "{path}: {error}");
            assert!(!error.contains('\n'), "{path}: {error}");
        }
    }

    #[test]
    fn valid_configurations_are_accepted() {
        for (path, text) in config_fixtures("valid") {
            Config::parse(&text).unwrap_or_else(|error| panic!("{path}: {error}"));
        }
        for (path, text) in config_fixtures("policy-valid") {
            let settings = parse_policy_settings(&text).unwrap_or_else(|error| panic!("{path}: {error}"));
            assert_eq!(settings.len(), Setting::ALL.len());
            assert_eq!(settings[&Setting::UseZeroPages], "1");
        }
    }

    #[test]
    fn invalid_configurations_fail_with_one_line() {
        assert_all_refused("invalid", Config::parse);
        assert_all_refused("policy-invalid", parse_policy_settings);
    }

    fn test_process(uid: u32, comm: &str) -> Process {
        let id = ProcessId { pid: Pid(7), start_time: 1 };
        Process { uid: Ok(uid), setuid: false, comm: comm.to_owned(), ..Process::absent(id, &Absent::Denied) }
    }

    #[test]
    fn configuration_takes_effect() {
        let text = "domains = \"host\"\n[[domain]]\nname = \"a\"\nusers = [7]\nnames = [\"x*\"]\n\
                    [exclude]\nextend = [\"secret\"]";
        let config = Config::parse(text).unwrap();
        let domain = |by, process: &Process| config.domains(by).domain(process).to_string();
        assert_eq!(domain(None, &test_process(7, "xyz")), "group a");
        assert_eq!(domain(None, &test_process(8, "xyz")), "host");
        assert_eq!(
            domain(Some(DomainRuleArgument::User), &test_process(8, "xyz")),
            "user 8",
            "the command line overrides the file"
        );
        assert_eq!(domain(Some(DomainRuleArgument::User), &test_process(7, "xyz")), "group a");
        assert_eq!(config.warnings, [""; 0]);
        assert!(config.exclusions.reason(&test_process(7, "secret")).is_some());
        assert!(config.exclusions.reason(&test_process(7, "ssh-agent")).is_some());
        let replaced = Config::parse("[exclude]\nnames = [\"secret\"]").unwrap();
        assert_eq!(replaced.exclusions.reason(&test_process(7, "ssh-agent")), None);
    }

    #[test]
    fn domain_by_names_alone_is_ignored_with_warning() {
        let text = "[[domain]]\nname = \"b\"\nusers = [7]\n\n[[domain]]\nname = \"a\"\nnames = [\"x*\"]\n";
        let config = Config::parse(text).unwrap();
        let [warning] = &config.warnings[..] else { panic!("{:?}", config.warnings) };
        assert!(warning.starts_with("5: the domain \"a\" is not applied: "), "{warning}");
        let domain = |uid| config.domains(None).domain(&test_process(uid, "xyz")).to_string();
        assert_eq!((domain(8), domain(7)), ("user 8".to_owned(), "group b".to_owned()));
    }

    #[test]
    fn default_file_equals_no_file() {
        let (from_text, none) = (Config::parse(DEFAULT_CONFIG_TEXT).unwrap(), Config::default());
        assert_eq!(format!("{from_text:?}"), format!("{none:?}"));
        // Uncommenting all keys except the examples changes nothing either.
        let mut table = false;
        let is_default = |line: &&str| {
            table = line.starts_with("#[") || table && line.starts_with('#') && !line.starts_with("# ");
            !table && !line.ends_with("# example")
        };
        let text: String =
            DEFAULT_CONFIG_TEXT.lines().filter(is_default).map(uncomment_line).flat_map(|line| [line, "\n"]).collect();
        assert!(text.lines().any(|line| line.starts_with("max_slowdown = ")), "{text}");
        assert_eq!(format!("{:?}", Config::parse(&text).unwrap()), format!("{none:?}"));
        // With the examples it parses, too.
        assert_eq!(Config::parse(&default_config_uncommented()).unwrap().domains.groups.len(), 1);
    }

    /// The default configuration with all keys uncommented, without a user that may not exist on this host.
    pub(super) fn default_config_uncommented() -> String {
        let all: String = DEFAULT_CONFIG_TEXT.lines().map(uncomment_line).flat_map(|line| [line, "\n"]).collect();
        all.replace("\"www-data\", ", "")
    }

    fn uncomment_line(line: &str) -> &str {
        line.strip_prefix('#').filter(|rest| !rest.starts_with(' ')).unwrap_or(line)
    }

    #[test]
    fn nearest_word_needs_a_close_match() {
        assert_eq!(nearest_word("user", ["users", "vms"]), Some("users"));
        assert_eq!(nearest_word("flatout", policy::POLICY_NAMES), Some("flat-out"));
        assert_eq!(nearest_word("zz", ["users", "vms"]), None);
        assert_eq!(nearest_word("x", []), None);
    }

    /// Random text made of tokens of a configuration.
    fn config_like_text() -> impl Strategy<Value = String> {
        let pieces = prop::sample::select(vec![
            "domains",
            "[[domain]]",
            "[exclude]",
            "[ksm]",
            "name",
            "users",
            "vms",
            "names",
            "extend",
            "confidential",
            "run",
            "pages_to_scan",
            "advisor_mode",
            " = ",
            "=",
            "\"",
            "[",
            "]",
            "{",
            "}",
            ",",
            "\n",
            "1",
            "-1",
            "true",
            "\"a*\"",
            "[\"[\"]",
            "[1, \"root\"]",
            ".",
            "#",
            "'",
            "\u{e9}",
            "\0",
            "1e9",
            "1979-05-27",
            "\"\"\"",
            "\\u",
        ]);
        prop_oneof![prop::collection::vec(pieces, 0..24).prop_map(|pieces| pieces.concat()), any::<String>()]
    }

    proptest! {
        #[test]
        fn any_text_parses_without_panic_and_errors_are_one_line(text in config_like_text()) {
            for error in [Config::parse(&text).err(), parse_policy_settings(&text).err()].into_iter().flatten() {
                let (line, _) = error.split_once(": ").expect("an error begins with a line number");
                let line: usize = line.parse().expect("the line number is a number");
                prop_assert!(line >= 1 && line <= text.lines().count() + 1, "{error}");
                prop_assert!(!error.contains('\n'), "{error}");
            }
        }
    }
}
