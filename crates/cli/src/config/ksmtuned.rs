//! Import of `/etc/ksmtuned.conf` into settings of the daemon.
//!
//! The file is a shell script of assignments. ksmtuned, a bash script, sources it (`. /etc/ksmtuned.conf`, version
//! 4.20150326). An unset or empty variable has ksmtuned's default; `export` makes no difference.
//! [`pagefold_merge::decide::policy::Ksmtuned`] describes the effect of each value: ksmtuned runs ksmd at a rate that
//! depends on free memory. The daemon has a CPU limit instead of a rate. The import converts a rate to the CPU time
//! that it takes, and a threshold to memory to keep available.
//!
//! Limits: the import reads plain assignments and runs nothing. It reports any other line as left out, with the
//! variables that the line may assign. It treats lines between `if` and `fi` as if they ran.

use super::nearest_word;
use pagefold_base::Bytes;
use pagefold_doctor::decide::SCAN_MICROSECONDS_PER_PAGE;
use pagefold_merge::decide::policy::Ksmtuned;

/// The import of a ksmtuned configuration. Each assignment is the beginning of one line in `imported` or `skipped`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KsmtunedImport {
    /// The `[daemon]` section.
    pub section: String,
    /// The imported assignments, each with its effect.
    pub imported: Vec<String>,
    /// The assignments that were left out, each with the reason.
    pub skipped: Vec<String>,
    /// ksmtuned's defaults for variables that the file does not set.
    pub implied_defaults: Vec<String>,
}

/// Variables that determine `keep_available`.
const THRESHOLD_VARIABLES: [&str; 2] = ["KSM_THRES_COEF", "KSM_THRES_CONST"];

/// Variables that determine `cpu_rate`.
const RATE_VARIABLES: [&str; 2] = ["KSM_NPAGES_MAX", "KSM_SLEEP_MSEC"];

/// Variables that have no counterpart, with the reason.
const UNSUPPORTED_VARIABLES: [(&str, &str); 6] = [
    ("KSM_MONITOR_INTERVAL", "the daemon polls every second and merges new processes at once"),
    ("KSM_NPAGES_BOOST", "the daemon has no rate to increase"),
    ("KSM_NPAGES_DECAY", "the daemon has no rate to decrease"),
    ("KSM_NPAGES_MIN", "ksmd is idle while there is nothing to merge"),
    ("LOGFILE", "decisions go to standard error, which the journal stores"),
    ("DEBUG", "decisions are always logged with their reasons"),
];

/// Import a ksmtuned configuration for a host with `total` memory.
pub fn import(text: &str, total: Bytes) -> KsmtunedImport {
    let statements = parse_statements(text);
    let assigned_value = |name: &str| {
        let last = statements.iter().rfind(|statement| statement.may_assign(name))?;
        parse_decimal(last.assignment?.1)
    };
    let default = Ksmtuned::default();
    // ksmtuned's threshold: the larger of a share of all memory and a constant in kB.
    let [coefficient, constant] = THRESHOLD_VARIABLES.map(assigned_value);
    let threshold = Bytes((total.0 / 100).saturating_mul(coefficient.unwrap_or(default.threshold_percent)))
        .max(Bytes(constant.unwrap_or(default.threshold_kib).saturating_mul(1024)));
    let mut section = format!("[daemon]\nmode = \"act\"\nkeep_available = \"{}MiB\"\n", threshold.0 >> 20);
    let mut effects = vec![(THRESHOLD_VARIABLES, format!("in keep_available, which is {threshold}"))];
    let mut defaults = vec![
        (THRESHOLD_VARIABLES[0], coefficient.is_none(), default.threshold_percent),
        (THRESHOLD_VARIABLES[1], constant.is_none(), default.threshold_kib),
    ];
    let [max_pages, sleep_millis] = RATE_VARIABLES.map(assigned_value);
    if max_pages.is_some() || sleep_millis.is_some() {
        let gib = total.0.max(1) as f64 / f64::from(1 << 30);
        let pause_millis = (sleep_millis.unwrap_or(default.sleep_millisecs) as f64 * 16.0 / gib).max(10.0);
        let work_millis =
            max_pages.unwrap_or(default.max_pages.unsigned_abs()) as f64 * SCAN_MICROSECONDS_PER_PAGE / 1000.0;
        let percent = (work_millis / (work_millis + pause_millis) * 100.0).clamp(1.0, 100.0);
        section.push_str(&format!("cpu_rate = \"{percent:.0}%\"\n"));
        effects.push((RATE_VARIABLES, format!("in cpu_rate, which is {percent:.0} % of one CPU on average")));
        defaults.push((RATE_VARIABLES[0], max_pages.is_none(), default.max_pages.unsigned_abs()));
        defaults.push((RATE_VARIABLES[1], sleep_millis.is_none(), default.sleep_millisecs));
    }
    let effect = |name: &str| {
        effects.iter().find(|(names, _)| names.contains(&name)).map(|(_, effect)| effect.as_str()).unwrap_or_default()
    };
    let (mut imported, mut skipped) = (Vec::new(), Vec::new());
    for (position, statement) in statements.iter().enumerate() {
        let is_reassigned = |name: &str| statements[position + 1..].iter().any(|later| later.may_assign(name));
        let why = match statement.assignment {
            None => "not a plain assignment; the import runs no shell code".to_owned(),
            Some((name, _)) if is_reassigned(name) => "it is assigned again below".to_owned(),
            Some((name, value)) if THRESHOLD_VARIABLES.contains(&name) || RATE_VARIABLES.contains(&name) => {
                match parse_decimal(value) {
                    Some(_) => {
                        imported.push(format!("{}: {}", statement.text, effect(name)));
                        continue;
                    }
                    None if value.is_empty() => "empty, which means ksmtuned's default".to_owned(),
                    None => "not a plain decimal number".to_owned(),
                }
            }
            Some((name, _)) => skip_reason(name),
        };
        skipped.push(format!("{}: {why}", statement.text));
    }
    let defaults = defaults.into_iter().filter(|(_, is_default, _)| *is_default);
    let defaults = defaults.map(|(name, _, value)| format!("{name}={value}: {}", effect(name))).collect();
    KsmtunedImport { section, imported, skipped, implied_defaults: defaults }
}

/// Parse a decimal number. In shell arithmetic a leading 0 makes a number octal, which is refused.
fn parse_decimal(value: &str) -> Option<u64> {
    let is_decimal = value.bytes().all(|c| c.is_ascii_digit()) && (value == "0" || !value.starts_with('0'));
    value.parse().ok().filter(|_| is_decimal)
}

/// Why a variable is left out.
fn skip_reason(name: &str) -> String {
    if let Some((_, why)) = UNSUPPORTED_VARIABLES.iter().find(|(known, _)| *known == name) {
        return (*why).to_owned();
    }
    let known_names =
        THRESHOLD_VARIABLES.into_iter().chain(RATE_VARIABLES).chain(UNSUPPORTED_VARIABLES.map(|(name, _)| name));
    let hint = nearest_word(name, known_names).map_or_else(String::new, |near| format!("; did you mean {near}?"));
    format!("ksmtuned reads no such variable{hint}")
}

/// A plain assignment, or a line that is something else.
struct ShellStatement<'a> {
    text: &'a str,
    /// The variable and its value, for a plain assignment.
    assignment: Option<(&'a str, &'a str)>,
}

impl ShellStatement<'_> {
    /// Whether the statement may change a variable.
    fn may_assign(&self, name: &str) -> bool {
        let contains = |sign: &str| self.text.contains(&format!("{name}{sign}"));
        self.assignment.map_or_else(|| contains("=") || contains("+="), |(assigned, _)| assigned == name)
    }
}

fn parse_statements(text: &str) -> Vec<ShellStatement<'_>> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .flat_map(|line| {
            parse_assignments(line).unwrap_or_else(|| vec![ShellStatement { text: line, assignment: None }])
        })
        .collect()
}

/// The assignments of a line that contains only assignments and a comment.
fn parse_assignments(line: &str) -> Option<Vec<ShellStatement<'_>>> {
    let mut rest = line.strip_prefix("export").filter(|rest| rest.starts_with([' ', '\t'])).unwrap_or(line);
    let mut assignments = Vec::new();
    loop {
        rest = rest.trim_start();
        if rest.is_empty() || rest.starts_with('#') {
            return Some(assignments);
        }
        let (name, value) = rest.split_once('=')?;
        let is_name = name.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'_');
        if !is_name || name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) {
            return None;
        }
        let (value, after) = parse_word(value)?;
        let text = rest[..rest.len() - after.len()].trim_end();
        assignments.push(ShellStatement { text, assignment: Some((name, value)) });
        rest = after;
    }
}

/// Split off a word, quoted or not, that the shell does not expand. Returns the word and the rest of the text.
fn parse_word(text: &str) -> Option<(&str, &str)> {
    let quote = text.chars().next().filter(|c| matches!(c, '"' | '\''));
    let (value, after) = match quote {
        Some(quote) => text[1..].split_once(quote)?,
        None => text.split_at(text.find([' ', '\t']).unwrap_or(text.len())),
    };
    let special: &[char] = match quote {
        Some('\'') => &[],
        Some(_) => &['$', '`', '\\'],
        None => &['$', '`', '\\', '"', '\'', ';', '&', '|', '(', ')', '<', '>', '~'],
    };
    let is_whole_word = after.is_empty() || after.starts_with([' ', '\t']);
    (is_whole_word && !value.contains(special)).then_some((value, after))
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;
    use proptest::prelude::*;

    const SAMPLE_KSMTUNED_CONF: &str = "# Configuration file for ksmtuned.\n# KSM_MONITOR_INTERVAL=60\nKSM_SLEEP_MSEC=10\n\
                        KSM_NPAGES_MAX=1250\nKSM_NPAGES_BOOST=300 # more\nKSM_THRES_COEF=\"30\"\nLOGFILE=/var/log/x\n";

    /// The assignments at the beginning of report lines.
    fn line_subjects(lines: &[String]) -> Vec<&str> {
        lines.iter().map(|line| line.split_once(": ").expect("a line has an assignment and a text").0).collect()
    }

    #[test]
    fn known_variables_are_imported_and_others_reported() {
        let imported = import(SAMPLE_KSMTUNED_CONF, Bytes(16 << 30));
        let settings = Config::parse(&imported.section).unwrap().daemon_settings(Some(48)).unwrap();
        assert_eq!(settings.rules.keep_available.map(|bytes| bytes.0 >> 20), Some(16 * 1024 * 30 / 100));
        assert!(settings.rules.cpu_rate > 0.1 && settings.rules.cpu_rate < 0.6, "{}", settings.rules.cpu_rate);
        assert_eq!(
            line_subjects(&imported.imported),
            ["KSM_SLEEP_MSEC=10", "KSM_NPAGES_MAX=1250", "KSM_THRES_COEF=\"30\""]
        );
        assert_eq!(line_subjects(&imported.skipped), ["KSM_NPAGES_BOOST=300", "LOGFILE=/var/log/x"]);
        assert_eq!(line_subjects(&imported.implied_defaults), ["KSM_THRES_CONST=2048"]);
    }

    #[test]
    fn assignments_follow_shell_rules() {
        let import_text = |text: &str| {
            let imported = import(text, Bytes(100 << 30));
            let settings = Config::parse(&imported.section).unwrap().daemon_settings(None).unwrap();
            (settings.rules.keep_available.map(|bytes| bytes.0 >> 30), imported)
        };
        for (text, expect) in [
            ("export KSM_THRES_COEF=50", 50),
            ("export\tKSM_THRES_COEF='50' KSM_THRES_CONST=1 # both", 50),
            ("KSM_THRES_COEF=30\nKSM_THRES_COEF=50", 50),
            ("KSM_THRES_COEF=", 20),
            ("KSM_THRES_COEF=050", 20),
            ("KSM_THRES_COEF=50#", 20),
            ("KSM_THRES_COEF = 50", 20),
            ("KSM_THRES_COEF=50; exit", 20),
            ("exportKSM_THRES_COEF=50", 20),
            ("KSM_THRES_COEF=50\nKSM_THRES_COEF=${X:-10}", 20),
            ("KSM_THRES_COEF=50\nKSM_THRES_COEF+=0", 20),
        ] {
            assert_eq!(import_text(text).0, Some(expect), "{text}: {:?}", import_text(text).1);
        }
        let unknown = import_text("KSM_SLEEP_MSECS=20\nPATH=/bin").1.skipped;
        assert!(
            unknown[0].ends_with("did you mean KSM_SLEEP_MSEC?") && unknown[1].ends_with("variable"),
            "{unknown:?}"
        );
        let unreadable = import_text("KSM_SLEEP_MSEC=${X:-10}").1;
        assert_eq!(line_subjects(&unreadable.skipped), ["KSM_SLEEP_MSEC=${X:-10}"]);
        assert_eq!(unreadable.imported, [""; 0], "an unreadable value is not imported");
    }

    /// A line with its assignments, each as it is reported.
    fn any_line_with_assignments() -> impl Strategy<Value = (String, Vec<String>)> {
        let known_names = THRESHOLD_VARIABLES
            .into_iter()
            .chain(RATE_VARIABLES)
            .chain(UNSUPPORTED_VARIABLES.map(|(name, _)| name))
            .chain(["KSM_FOO", "x"]);
        let name = prop::sample::select(known_names.collect::<Vec<_>>());
        let plain_value = prop_oneof![
            any::<u64>().prop_map(|value| value.to_string()),
            prop::sample::select(vec!["", "10", "\"30\"", "'1 2'", "-50", "007", "a#b", "/var/log/ksm", "\"a; b\""])
                .prop_map(str::to_owned),
        ];
        let shell_value =
            prop::sample::select(vec!["${X:-10}", "$((10 + 10))", "`nproc`", "\"$X\"", "1; true", "a'b'", "\\1"]);
        let end = prop::sample::select(vec!["", " ", "\t# more", " # KSM_FOO=1"]);
        let export = prop::sample::select(vec!["", "export ", "export\t", "  "]);
        let assigned = |(name, value): (&str, String)| format!("{name}={value}");
        let plain_assignments = prop::collection::vec((name.clone(), plain_value).prop_map(assigned), 1..3);
        prop_oneof![
            (export.clone(), plain_assignments, end.clone()).prop_map(|(export, assignments, end)| {
                (format!("{export}{}{end}", assignments.join(" ")), assignments)
            }),
            (export, name, shell_value, end).prop_map(|(export, name, value, end)| {
                let line = format!("{export}{name}={value}{end}");
                let assignments = vec![line.trim().to_owned()];
                (line, assignments)
            }),
            prop::sample::select(vec!["", "# KSM_THRES_COEF=1", "  #"]).prop_map(|line| (line.to_owned(), Vec::new())),
        ]
    }

    proptest! {
        #[test]
        fn every_assignment_is_reported_once(lines in prop::collection::vec(any_line_with_assignments(), 0..12), gib in 0_u64..4096) {
            let (lines, assignments): (Vec<String>, Vec<Vec<String>>) = lines.into_iter().unzip();
            let imported = import(&lines.join("\n"), Bytes(gib << 30));
            let mut reported = [line_subjects(&imported.imported), line_subjects(&imported.skipped)].concat();
            let mut assignments = assignments.concat();
            reported.sort_unstable();
            assignments.sort_unstable();
            prop_assert_eq!(reported, assignments);
            prop_assert!(Config::parse(&imported.section).is_ok(), "{}", imported.section);
            let variable = |line: &str| line.split_once('=').map(|(name, _)| name.to_owned());
            let names: Vec<_> = line_subjects(&imported.imported).into_iter().map(variable).collect();
            prop_assert!(line_subjects(&imported.implied_defaults).into_iter().all(|line| !names.contains(&variable(line))));
        }

        #[test]
        fn arbitrary_text_does_not_panic(text: String) {
            import(&text, Bytes(1 << 34));
        }
    }
}
