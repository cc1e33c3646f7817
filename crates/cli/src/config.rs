//! The configuration: `/etc/pagefold/pagefold.toml`, or the file that `--config` names.
//!
//! It says who trusts whom, who is left alone, and what the daemon does; everything else is an option of a command. The
//! default file need not be there, one that is named must be. Nothing in it is guessed at: an unknown key, a pattern
//! that is none, a group with nobody in it is an error, in one line with the place and, where something near it is
//! known, with that. What the fields below are documented with is also what the JSON schema says of them.

mod daemon;
mod ksmtuned;
mod schema;

pub use daemon::{History, Http, ModeWord};
pub use ksmtuned::{Imported, import};
pub use schema::schema;

use crate::arguments::{DomainBy, Global};
use crate::source;
use anyhow::{Context, anyhow};
use globset::{Glob, GlobMatcher};
use pagefold_base::domain::{DomainRule, Domains, Group};
use pagefold_base::exclusion::Exclusions;
use pagefold_base::ksm::{Setting, Settings};
use pagefold_merge::decide::policy;
use pagefold_merge::decide::policy::Policy;
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use toml::Spanned;

/// Where it is unless said otherwise.
pub const FILE: &str = "/etc/pagefold/pagefold.toml";

/// What is in force where there is no file, with what could be said.
pub const DEFAULT: &str = include_str!("pagefold.toml");

/// What is in force.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// The file it was read from; none where the default one is not there.
    pub path: Option<PathBuf>,
    /// Who trusts whom.
    pub domains: Domains,
    /// Who is left alone.
    pub exclusions: Exclusions,
    /// Where the daemon shows what it does.
    pub http: Http,
    /// Where it keeps its history, if that is said.
    pub history: Option<History>,
    /// What the daemon does, but for the former.
    daemon: pagefold_daemon::run::Settings,
    /// What is well-formed and has no effect, each with the number of its line.
    warnings: Vec<String>,
}

impl Config {
    /// The one that the command line asks for.
    pub fn load(global: &Global) -> anyhow::Result<Self> {
        let path = global.config.as_deref().unwrap_or(Path::new(FILE));
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

    /// Who trusts whom, by the rule of the command line where it gives one.
    pub fn domains(&self, by: Option<DomainBy>) -> Domains {
        let mut domains = self.domains.clone();
        if let Some(by) = by {
            domains.rule = by.into();
        }
        domains
    }

    /// With virtual machines merged, too, whose owner forbids that, if `ignore` is given.
    #[must_use]
    pub fn ignoring_opt_out(self, ignore: bool) -> Self {
        if ignore { Self { exclusions: self.exclusions.opted_out(false), ..self } } else { self }
    }

    /// From the text of a file. An error begins with the number of its line.
    fn parse(text: &str) -> Result<Self, String> {
        let mut document: Document = read(text)?;
        let place = Place(text);
        let lines: Vec<usize> = document.domain.iter().map(|domain| place.line(domain.span().start)).collect();
        let groups = place.groups("domain", document.domain)?;
        let unattested = lines.iter().zip(&groups).filter(|(_, group)| !group.is_attested());
        let warnings = unattested.map(|(line, group)| {
            format!(
                "{line}: the domain {:?} is not applied: any process can choose the names that it gives (vms, names, \
                 containers, jobs); add users, cgroups or labels",
                group.name
            )
        });
        let warnings = warnings.collect();
        let Exclude { names, extend, vms, confidential, opted_out, group } = document.exclude;
        let known = if names.is_some() { Exclusions::none() } else { Exclusions::default() };
        let names = place.globs(names.into_iter().flatten().chain(extend).collect())?;
        let exclusions = known.programs(names).vms(place.globs(vms)?).confidential(confidential).opted_out(opted_out);
        let exclusions = exclusions.groups(place.groups("excluded group", group)?);
        let http = document.daemon.http(&place)?;
        let history = document.daemon.history(&place)?;
        let daemon = document.daemon.settings(&place)?;
        Ok(Self {
            path: None,
            domains: Domains { rule: document.domains.into(), groups },
            exclusions,
            http,
            history,
            daemon,
            warnings,
        })
    }
}

/// The configuration of pagefold: /etc/pagefold/pagefold.toml.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "pagefold.toml")]
struct Document {
    /// How those are sorted into trust domains who are in no group below.
    #[serde(default)]
    #[schemars(extend("default" = "user"))]
    domains: Rule,
    /// Groups that trust each other; the first that fits is taken.
    #[serde(default)]
    #[schemars(with = "Vec<Members>", transform = schema::has_names)]
    domain: Vec<Spanned<Members>>,
    /// Who is left alone.
    #[serde(default)]
    exclude: Exclude,
    /// What `pagefold daemon` does.
    #[serde(default)]
    daemon: daemon::Section,
}

#[derive(Default, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Rule {
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

impl From<Rule> for DomainRule {
    fn from(rule: Rule) -> Self {
        match rule {
            Rule::User => Self::User,
            Rule::Cgroup => Self::Cgroup,
            Rule::Process => Self::Process,
            Rule::Host => Self::Host,
        }
    }
}

type Patterns = Vec<Spanned<String>>;

/// Conditions. Kinds of conditions narrow each other down; within a kind any one is enough.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(transform = schema::has_condition)]
struct Members {
    /// The group's name. None is needed where there is only one such table.
    #[serde(default)]
    name: String,
    /// Users, by name or number.
    #[serde(default)]
    #[schemars(with = "Vec<User>")]
    users: Vec<Spanned<User>>,
    /// Cgroups, and all below them.
    #[serde(default)]
    #[schemars(with = "Vec<schema::Glob>")]
    cgroups: Patterns,
    /// Names of virtual machines.
    #[serde(default)]
    #[schemars(with = "Vec<schema::Glob>")]
    vms: Patterns,
    /// The kernel's names of programs.
    #[serde(default)]
    #[schemars(with = "Vec<schema::Glob>")]
    names: Patterns,
    /// Containers, such as `docker:4c01db0b339c`.
    #[serde(default)]
    #[schemars(with = "Vec<schema::Glob>")]
    containers: Patterns,
    /// Labels of Docker's containers and annotations of Podman's, containerd's and CRI-O's, as `KEY=VALUE`.
    #[serde(default)]
    #[schemars(with = "Vec<schema::Glob>")]
    labels: Patterns,
    /// Jobs, such as `slurm:1234`.
    #[serde(default)]
    #[schemars(with = "Vec<schema::Glob>")]
    jobs: Patterns,
}

impl Members {
    fn group(self, place: &Place<'_>) -> Result<Group, String> {
        Ok(Group {
            users: place.each(self.users, |user| user.number())?,
            cgroups: place.globs(self.cgroups)?,
            vms: place.globs(self.vms)?,
            names: place.globs(self.names)?,
            containers: place.globs(self.containers)?,
            labels: place.globs(self.labels)?,
            jobs: place.globs(self.jobs)?,
            name: self.name,
        })
    }
}

/// A user, by name or number.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged, expecting = "a user's name or number")]
enum User {
    Number(u32),
    Name(String),
}

impl User {
    fn number(self) -> Result<u32, String> {
        match self {
            Self::Number(number) => Ok(number),
            Self::Name(name) => source::uid(&name).map_err(|error| format!("{error:#}")),
        }
    }
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Exclude {
    /// Programs instead of the known ones that hold keys.
    #[schemars(with = "Option<Vec<schema::Glob>>")]
    names: Option<Patterns>,
    /// Programs beside them.
    #[serde(default)]
    #[schemars(with = "Vec<schema::Glob>")]
    extend: Patterns,
    /// Virtual machines.
    #[serde(default)]
    #[schemars(with = "Vec<schema::Glob>")]
    vms: Patterns,
    /// Virtual machines with encrypted memory, which cannot merge.
    #[serde(default = "yes")]
    confidential: bool,
    /// Virtual machines of which QEMU is told not to merge: mem-merge=off, merge=off of a memory backend, libvirt's
    /// <nosharepages/>.
    #[serde(default = "yes")]
    opted_out: bool,
    /// Whoever else, with the conditions of a domain.
    #[serde(default)]
    #[schemars(with = "Vec<Members>", transform = schema::has_names)]
    group: Vec<Spanned<Members>>,
}

impl Default for Exclude {
    fn default() -> Self {
        let (confidential, opted_out) = (yes(), yes());
        Self { names: None, extend: Vec::new(), vms: Vec::new(), confidential, opted_out, group: Vec::new() }
    }
}

fn yes() -> bool {
    true
}

/// A file with a policy's settings.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyDocument {
    ksm: BTreeMap<Spanned<String>, Spanned<toml::Value>>,
}

/// The policy that a file describes: `[ksm]`, and below it the names and values of files of `/sys/kernel/mm/ksm`.
pub fn policy(path: &Path) -> anyhow::Result<Policy> {
    let text = std::fs::read_to_string(path).with_context(|| {
        format!("cannot read {} (a policy without a file is one of {})", path.display(), policy::NAMES.join(", "))
    })?;
    settings(&text).map(Policy::Fixed).map_err(|why| anyhow!("{}:{why}", path.display()))
}

fn settings(text: &str) -> Result<Settings, String> {
    let document: PolicyDocument = read(text)?;
    let place = Place(text);
    let mut settings = Settings::new();
    for (key, value) in document.ksm {
        let line = place.line(key.span().start);
        let Some(setting) = Setting::of_file(key.get_ref()) else {
            let files = Setting::ALL.map(Setting::file);
            let hint = nearest(key.get_ref(), files).map_or_else(String::new, |near| format!("did you mean {near}? "));
            return Err(format!(
                "{line}: {:?} is no setting of KSM: {hint}They are {}",
                key.get_ref(),
                files.join(", ")
            ));
        };
        let value = match value.into_inner() {
            toml::Value::Integer(number) => number.to_string(),
            toml::Value::Boolean(on) => u8::from(on).to_string(),
            toml::Value::String(text) => text,
            other => return Err(format!("{line}: {} takes a number or a word, not {other}", setting.file())),
        };
        pagefold_base::setting::check(setting, &value).map_err(|why| format!("{line}: {why}, not {value:?}"))?;
        settings.insert(setting, value);
    }
    if settings.is_empty() {
        return Err("1: there is no setting under [ksm]".to_owned());
    }
    Ok(settings)
}

/// Deserialize, with an error of one line.
fn read<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    toml::from_str(text).map_err(|error| {
        let line = Place(text).line(error.span().map_or(0, |span| span.start));
        let message = error.message().lines().collect::<Vec<_>>().join(", ");
        // serde says: unknown field `A`, expected one of `B`, `C`.
        let words: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
        let near = |near: &str| format!("; did you mean {near}?");
        let hint = match words.split_first() {
            Some((wrong, known)) if message.starts_with("unknown") => nearest(wrong, known.iter().copied()).map(near),
            _ => None,
        };
        let hint = hint.unwrap_or_default();
        format!("{line}: {message}{hint}")
    })
}

/// The word that is most like another, if one is.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let distance = |known: &&str| strsim::damerau_levenshtein(word, known);
    let near = known.into_iter().min_by_key(distance)?;
    (distance(&near) <= (word.chars().count() / 3).max(1)).then_some(near)
}

/// Places in a text.
struct Place<'a>(&'a str);

impl Place<'_> {
    /// Groups of a kind, each with a name of its own and somebody in it.
    fn groups(&self, kind: &str, members: Vec<Spanned<Members>>) -> Result<Vec<Group>, String> {
        let mut groups: Vec<Group> = Vec::new();
        for spanned in members {
            let line = self.line(spanned.span().start);
            let wire = spanned.into_inner();
            if wire.name.is_empty() || groups.iter().any(|group| group.name == wire.name) {
                return Err(format!("{line}: each {kind} needs a name of its own, and {:?} is none", wire.name));
            }
            let group = wire.group(self)?;
            if !group.has_condition() {
                return Err(format!(
                    "{line}: the {kind} {:?} does not say who is in it: give users, cgroups, vms, names, \
                     containers, labels or jobs",
                    group.name
                ));
            }
            groups.push(group);
        }
        Ok(groups)
    }

    /// The number of the line of a position, from 1.
    fn line(&self, position: usize) -> usize {
        let before = &self.0.as_bytes()[..position.min(self.0.len())];
        before.iter().filter(|&&byte| byte == b'\n').count() + 1
    }

    /// Convert each, or say in which line one cannot be.
    fn each<T, U>(&self, all: Vec<Spanned<T>>, convert: impl Fn(T) -> Result<U, String>) -> Result<Vec<U>, String> {
        let one = |spanned: Spanned<T>| {
            let line = self.line(spanned.span().start);
            convert(spanned.into_inner()).map_err(|why| format!("{line}: {why}"))
        };
        all.into_iter().map(one).collect()
    }

    /// Convert what is there, or say in which line it cannot be.
    fn one<T, U>(
        &self,
        value: Option<Spanned<T>>,
        convert: impl Fn(T) -> Result<U, String>,
    ) -> Result<Option<U>, String> {
        Ok(self.each(value.into_iter().collect(), convert)?.pop())
    }

    fn globs(&self, patterns: Patterns) -> Result<Vec<GlobMatcher>, String> {
        self.each(patterns, |pattern| glob(&pattern))
    }
}

fn glob(pattern: &str) -> Result<GlobMatcher, String> {
    if pattern.is_empty() {
        return Err("an empty pattern fits nothing".to_owned());
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

    /// The files of a folder of `fixtures/config`: name and text.
    fn fixtures(folder: &str) -> Vec<(String, String)> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/config").join(folder);
        let files = fs::read_dir(&folder).expect("the fixtures").map(|entry| entry.unwrap().path());
        let files: Vec<_> =
            files.map(|path| (path.display().to_string(), fs::read_to_string(&path).unwrap())).collect();
        assert!(!files.is_empty());
        files
    }

    /// Each text is refused with what its first line expects, in one line.
    fn refused<T>(folder: &str, parse: impl Fn(&str) -> Result<T, String>) {
        for (path, text) in fixtures(folder) {
            let expected = text.lines().next().and_then(|line| line.strip_prefix("# expected: ")).expect(&path);
            let error = parse(&text).err().unwrap_or_else(|| panic!("{path} is taken"));
            assert!(error.starts_with(expected), "{path}: {error}");
            assert!(!error.contains('\n'), "{path}: {error}");
        }
    }

    #[test]
    fn what_is_well_formed_is_taken() {
        for (path, text) in fixtures("valid") {
            Config::parse(&text).unwrap_or_else(|error| panic!("{path}: {error}"));
        }
        for (path, text) in fixtures("policy-valid") {
            let settings = settings(&text).unwrap_or_else(|error| panic!("{path}: {error}"));
            assert_eq!(settings.len(), Setting::ALL.len());
            assert_eq!(settings[&Setting::UseZeroPages], "1");
        }
    }

    #[test]
    fn what_is_not_is_refused_in_one_line() {
        refused("invalid", Config::parse);
        refused("policy-invalid", settings);
    }

    fn process(uid: u32, comm: &str) -> Process {
        let id = ProcessId { pid: Pid(7), start_time: 1 };
        Process { uid: Ok(uid), setuid: false, comm: comm.to_owned(), ..Process::absent(id, &Absent::Denied) }
    }

    #[test]
    fn what_it_says_is_in_force() {
        let text = "domains = \"host\"\n[[domain]]\nname = \"a\"\nusers = [7]\nnames = [\"x*\"]\n\
                    [exclude]\nextend = [\"secret\"]";
        let config = Config::parse(text).unwrap();
        let domain = |by, process: &Process| config.domains(by).domain(process).to_string();
        assert_eq!(domain(None, &process(7, "xyz")), "group a");
        assert_eq!(domain(None, &process(8, "xyz")), "host");
        assert_eq!(domain(Some(DomainBy::User), &process(8, "xyz")), "user 8", "the command line has the last word");
        assert_eq!(domain(Some(DomainBy::User), &process(7, "xyz")), "group a");
        assert_eq!(config.warnings, [""; 0]);
        assert!(config.exclusions.reason(&process(7, "secret")).is_some());
        assert!(config.exclusions.reason(&process(7, "ssh-agent")).is_some());
        let replaced = Config::parse("[exclude]\nnames = [\"secret\"]").unwrap();
        assert_eq!(replaced.exclusions.reason(&process(7, "ssh-agent")), None);
    }

    #[test]
    fn a_domain_by_names_alone_is_warned_of_and_not_applied() {
        let text = "[[domain]]\nname = \"b\"\nusers = [7]\n\n[[domain]]\nname = \"a\"\nnames = [\"x*\"]\n";
        let config = Config::parse(text).unwrap();
        let [warning] = &config.warnings[..] else { panic!("{:?}", config.warnings) };
        assert!(warning.starts_with("5: the domain \"a\" is not applied: "), "{warning}");
        let domain = |uid| config.domains(None).domain(&process(uid, "xyz")).to_string();
        assert_eq!((domain(8), domain(7)), ("user 8".to_owned(), "group b".to_owned()));
    }

    #[test]
    fn the_default_is_what_is_in_force_without_a_file() {
        let (written, none) = (Config::parse(DEFAULT).unwrap(), Config::default());
        assert_eq!(format!("{written:?}"), format!("{none:?}"));
        // Nor does anything change where what is commented out is said, but for examples.
        let mut table = false;
        let is_default = |line: &&str| {
            table = line.starts_with("#[") || table && line.starts_with('#') && !line.starts_with("# ");
            !table && !line.ends_with("# example")
        };
        let said: String = DEFAULT.lines().filter(is_default).map(uncommented).flat_map(|line| [line, "\n"]).collect();
        assert!(said.lines().any(|line| line.starts_with("cpu = ")), "{said}");
        assert_eq!(format!("{:?}", Config::parse(&said).unwrap()), format!("{none:?}"));
        // And what it shows as possible is.
        assert_eq!(Config::parse(&everything_that_is_shown()).unwrap().domains.groups.len(), 1);
    }

    /// The default with all that is commented out said, but for a user that need not be there.
    pub(super) fn everything_that_is_shown() -> String {
        let all: String = DEFAULT.lines().map(uncommented).flat_map(|line| [line, "\n"]).collect();
        all.replace("\"www-data\", ", "")
    }

    fn uncommented(line: &str) -> &str {
        line.strip_prefix('#').filter(|rest| !rest.starts_with(' ')).unwrap_or(line)
    }

    #[test]
    fn what_is_meant_is_guessed_only_from_near() {
        assert_eq!(nearest("user", ["users", "vms"]), Some("users"));
        assert_eq!(nearest("flatout", policy::NAMES), Some("flat-out"));
        assert_eq!(nearest("zz", ["users", "vms"]), None);
        assert_eq!(nearest("x", []), None);
    }

    /// Text made of what a configuration is made of.
    fn text() -> impl Strategy<Value = String> {
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
        fn no_text_panics_and_every_error_is_a_line(text in text()) {
            for error in [Config::parse(&text).err(), settings(&text).err()].into_iter().flatten() {
                let (line, _) = error.split_once(": ").expect("a line");
                let line: usize = line.parse().expect("its number");
                prop_assert!(line >= 1 && line <= text.lines().count() + 1, "{error}");
                prop_assert!(!error.contains('\n'), "{error}");
            }
        }
    }
}
