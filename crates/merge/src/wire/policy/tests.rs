use super::*;
use pagefold_base::Absent;
use pagefold_output::text::Style;

fn settings(of: &[(Setting, &str)]) -> Settings {
    of.iter().map(|&(setting, value)| (setting, value.to_owned())).collect()
}

fn facts() -> Facts {
    use Setting::{AdvisorMode, PagesToScan, Run, SleepMillisecs, SmartScan};
    let written = |before: &str, value: &str| Written { before: before.to_owned(), values: vec![value.to_owned()] };
    Facts {
        host: "this host".to_owned(),
        policy: Some("flat-out".to_owned()),
        tuners: vec!["ksmtuned".to_owned()],
        ksmd_cpu_seconds: Some(12.34),
        now: [
            (AdvisorMode, Ok("none".to_owned())),
            (PagesToScan, Ok("20000".to_owned())),
            (SleepMillisecs, Ok("33".to_owned())),
            (SmartScan, Err(Absent::NotOnThisKernel)),
            (Run, Ok("1".to_owned())),
        ]
        .into(),
        written: [
            (PagesToScan, written("100", "20000")),
            (SleepMillisecs, written("20", "0")),
            (Run, written("1", "0")),
        ]
        .into(),
        policies: vec![
            ("default".to_owned(), Ok(settings(&[(PagesToScan, "100"), (SleepMillisecs, "20"), (Run, "1")]))),
            ("flat-out".to_owned(), Ok(settings(&[(PagesToScan, "20000"), (SleepMillisecs, "0"), (Run, "1")]))),
            ("ksmtuned".to_owned(), Err(Absent::Denied)),
        ],
    }
}

#[test]
fn who_wrote_what() {
    let report = PolicyReport::of(&facts());
    let writers: Vec<_> = report.settings.iter().map(|setting| (setting.name, setting.writer)).collect();
    let expected = [
        ("advisor_mode", Writer::Unknown),
        ("pages_to_scan", Writer::Policy),
        ("sleep_millisecs", Writer::SomebodyElse),
        ("smart_scan", Writer::Unknown),
        ("run", Writer::Unknown),
    ];
    assert_eq!(writers, expected);
    let mut advised = facts();
    advised.now.insert(Setting::AdvisorMode, Ok("scan-time".to_owned()));
    assert_eq!(PolicyReport::of(&advised).settings[1].writer, Writer::Advisor);
}

#[test]
fn it_reads_well() {
    insta::assert_snapshot!(crate::text::policy::render(&PolicyReport::of(&facts()), Style::default()), @r"
Policy  flat-out (`pagefold policy restore` ends it)
Tuners  ksmtuned
ksmd    12.3 s of CPU since boot

                                 now  written by     before  default  ksmtuned  advisor  flat-out  guided
 advisor_mode                   none  ·                   ·        ·         ·        ·         ·       ·
 pages_to_scan                 20000  policy            100      100         ·        ·     20000       ·
 sleep_millisecs                  33  somebody else      20       20         ·        ·         0       ·
 smart_scan       not on this kernel  ·                   ·        ·         ·        ·         ·       ·
 run                               1  ·                   1        1         ·        ·         1       ·
What ksmtuned would write cannot be told: permission denied.

Right of `before` is what each policy would write now; a dot is what it leaves as it is.
");
}

#[test]
fn it_keeps_its_schema() {
    let schema = serde_json::to_value(schemars::schema_for!(PolicyReport)).unwrap();
    let report = serde_json::to_value(PolicyReport::of(&facts())).unwrap();
    assert!(jsonschema::is_valid(&schema, &report), "{report}");
    assert_eq!(report["settings"][3]["absent"], "not on this kernel");
    assert_eq!(report["unknown_policies"]["ksmtuned"], "permission denied");
}
