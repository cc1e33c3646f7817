use super::*;
use pagefold_base::Absent;
use pagefold_output::text::TextStyle;

fn settings(values: &[(Setting, &str)]) -> Settings {
    values.iter().map(|&(setting, value)| (setting, value.to_owned())).collect()
}

fn sample_facts() -> PolicyFacts {
    use Setting::{AdvisorMode, PagesToScan, Run, SleepMillisecs, SmartScan};
    let written = |before: &str, value: &str| RecordedSetting {
        value_before: before.to_owned(),
        written_values: vec![value.to_owned()],
    };
    PolicyFacts {
        host: "this host".to_owned(),
        policy: Some("flat-out".to_owned()),
        tuners: vec!["ksmtuned".to_owned()],
        ksmd_cpu_seconds: Some(12.34),
        current: [
            (AdvisorMode, Ok("none".to_owned())),
            (PagesToScan, Ok("20000".to_owned())),
            (SleepMillisecs, Ok("33".to_owned())),
            (SmartScan, Err(Absent::NotOnThisKernel)),
            (Run, Ok("1".to_owned())),
        ]
        .into(),
        recorded: [
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
fn source_of_each_setting_is_reported() {
    let report = PolicyReport::from_facts(&sample_facts());
    let writers: Vec<_> = report.settings.iter().map(|setting| (setting.name, setting.source)).collect();
    let expected = [
        ("advisor_mode", SettingSource::Unknown),
        ("pages_to_scan", SettingSource::Policy),
        ("sleep_millisecs", SettingSource::OtherProgram),
        ("smart_scan", SettingSource::Unknown),
        ("run", SettingSource::Unknown),
    ];
    assert_eq!(writers, expected);
    let mut advised = sample_facts();
    advised.current.insert(Setting::AdvisorMode, Ok("scan-time".to_owned()));
    assert_eq!(PolicyReport::from_facts(&advised).settings[1].source, SettingSource::Advisor);
}

#[test]
fn report_is_rendered_as_text() {
    insta::assert_snapshot!(crate::text::policy::render(&PolicyReport::from_facts(&sample_facts()), TextStyle::default()), @r"
Policy  flat-out (`pagefold policy restore` ends it)
Tuners  ksmtuned
ksmd    12.3 s of CPU since boot

                                 now  written by     before  default  ksmtuned  advisor  flat-out  guided
 advisor_mode                   none  ·                   ·        ·         ·        ·         ·       ·
 pages_to_scan                 20000  policy            100      100         ·        ·     20000       ·
 sleep_millisecs                  33  other program      20       20         ·        ·         0       ·
 smart_scan       not on this kernel  ·                   ·        ·         ·        ·         ·       ·
 run                               1  ·                   1        1         ·        ·         1       ·
The settings of ksmtuned are unknown: permission denied.

Columns right of `before`: the value that each policy would write now; a dot means no change.
");
}

#[test]
fn json_matches_its_schema() {
    let schema = serde_json::to_value(schemars::schema_for!(PolicyReport)).unwrap();
    let report = serde_json::to_value(PolicyReport::from_facts(&sample_facts())).unwrap();
    assert!(jsonschema::is_valid(&schema, &report), "{report}");
    assert_eq!(report["settings"][3]["absent"], "not on this kernel");
    assert_eq!(report["unknown_policies"]["ksmtuned"], "permission denied");
}
