//! The JSON report of `pagefold merge` (`pagefold schema merge`), kept with the run to explain odd figures. No figure
//! is taken from it: figures are measured from outside. Kept runs are public, so the report's cgroup names are removed.

use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Maximum entries of a list that are kept, and maximum lines printed for a trial.
const MAX_KEPT_ENTRIES: usize = 20;

/// A report without its long parts (ranges and the timeline, which samples.csv also has) and without cgroups.
#[derive(Clone, Debug, PartialEq)]
pub struct MergeCommandReport {
    /// The command's exit status.
    pub exit_status: i32,
    json: Value,
}

impl MergeCommandReport {
    /// Parse the printed report.
    pub fn parse(exit: i32, text: &str) -> Result<Self> {
        let mut report: Value = serde_json::from_str(text)
            .with_context(|| format!("pagefold merge exited with status {exit} and printed no report"))?;
        if let Some(outcome) = report.get_mut("outcome").and_then(Value::as_object_mut) {
            outcome.remove("timeline");
        }
        let targets = report.pointer_mut("/plan/targets").and_then(Value::as_array_mut);
        for target in targets.into_iter().flatten().filter_map(Value::as_object_mut) {
            let ranges = target.get("ranges").and_then(Value::as_array).map_or(0, Vec::len);
            target.insert("ranges".to_owned(), ranges.into());
            target.remove("cgroup");
        }
        Ok(Self { exit_status: exit, json: report })
    }

    fn json_list(&self, pointer: &str) -> &[Value] {
        self.json.pointer(pointer).and_then(Value::as_array).map_or(&[], Vec::as_slice)
    }

    /// Everything that was not scanned, skipped, refused or not finished: a line for each process and reason. The trial
    /// names only processes to merge, so a skipped process counts as missed.
    pub fn missed_reasons(&self) -> Vec<String> {
        let word = |entry: &Value, name: &str| entry[name].as_str().unwrap_or("?").to_owned();
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        let lists = [
            ("/unscanned_processes", "not scanned", "detail"),
            ("/plan/skipped", "skipped", "why"),
            ("/outcome/failed_changes", "not enrolled", "why"),
        ];
        for (pointer, outcome_name, reason_key) in lists {
            for entry in self.json_list(pointer) {
                let line =
                    format!("{outcome_name}: {} ({}): {}", entry["pid"], word(entry, "comm"), word(entry, reason_key));
                *counts.entry(line).or_default() += 1;
            }
        }
        for failed in self.json_list("/outcome/failed_undos") {
            *counts.entry(format!("not undone: {}", failed.as_str().unwrap_or("?"))).or_default() += 1;
        }
        let outcome = &self.json["outcome"];
        match outcome["end"].as_str() {
            None => *counts.entry("nothing was merged".to_owned()).or_default() += 1,
            Some("settled") => {}
            Some(end) => *counts.entry(format!("it ended by {end}")).or_default() += 1,
        }
        if self.exit_status == 1 {
            let of_saved = self.json_list("/outcome/differences").iter().filter(|entry| entry["figure"] == "saved");
            let differences: Vec<String> =
                of_saved.map(|entry| format!("{} bytes {}", entry["amount"], word(entry, "reason"))).collect();
            let line = format!("measured savings are below nine tenths of the prediction: {}", differences.join(", "));
            *counts.entry(line).or_default() += 1;
        }
        let line_count = counts.len();
        let line = |(line, count)| if count == 1 { line } else { format!("{line} ({count} times)") };
        let mut lines: Vec<String> = counts.into_iter().take(MAX_KEPT_ENTRIES).map(line).collect();
        if line_count > MAX_KEPT_ENTRIES {
            lines.push(format!("and {} more", line_count - MAX_KEPT_ENTRIES));
        }
        lines
    }

    /// A line of JSON with the trial of the report. Long lists are cut, with the number of omitted entries.
    pub fn to_json_line(&self, workload: &str, round: usize, probed: bool) -> String {
        let mut report = self.json.clone();
        for pointer in ["/outcome/failed_changes", "/unscanned_processes", "/plan/skipped"] {
            if let Some(list) =
                report.pointer_mut(pointer).and_then(Value::as_array_mut).filter(|list| list.len() > MAX_KEPT_ENTRIES)
            {
                let omitted = list.len() - MAX_KEPT_ENTRIES;
                list.truncate(MAX_KEPT_ENTRIES);
                list.push(json!({ "more": omitted }));
            }
        }
        json!({ "workload": workload, "round": round, "probe": probed, "exit": self.exit_status, "report": report })
            .to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample_report(exit: i32, missed: usize) -> MergeCommandReport {
        let range = json!({ "pid": 7, "comm": "a", "start": 0, "end": 4096, "why": "no memory" });
        let text = json!({
            "plan": {
                "targets": [{ "pid": 7, "cgroup": "/user", "ranges": [{ "start": 0 }, { "start": 4096 }] }],
                "skipped": [{ "pid": 8, "comm": "b", "why": "too little" }],
            },
            "outcome": {
                "end": "settled",
                "differences": [{ "figure": "saved", "amount": -20480, "reason": "changed" }],
                "failed_changes": vec![range; missed],
                "failed_undos": [],
                "timeline": [{ "seconds": 1.0 }],
            },
            "unscanned_processes": [{ "pid": 9, "reason": "denied", "detail": "not permitted" }],
        });
        MergeCommandReport::parse(exit, &text.to_string()).unwrap()
    }

    #[test]
    fn missed_reason_is_reported_once_per_process() {
        let expected = [
            "not enrolled: 7 (a): no memory (3 times)",
            "not scanned: 9 (?): not permitted",
            "skipped: 8 (b): too little",
        ];
        assert_eq!(sample_report(3, 3).missed_reasons(), expected);
        let less = "measured savings are below nine tenths of the prediction: -20480 bytes changed";
        assert!(
            sample_report(1, 0).missed_reasons().iter().any(|line| line == less),
            "{:?}",
            sample_report(1, 0).missed_reasons()
        );
    }

    #[test]
    fn complete_merge_has_no_missed_reasons() {
        let said = json!({
            "plan": { "targets": [], "skipped": [] },
            "outcome": { "end": "settled" },
            "unscanned_processes": [],
        });
        assert_eq!(MergeCommandReport::parse(0, &said.to_string()).unwrap().missed_reasons(), Vec::<String>::new());
        let planned = json!({ "plan": { "targets": [], "skipped": [] }, "unscanned_processes": [] });
        assert_eq!(
            MergeCommandReport::parse(0, &planned.to_string()).unwrap().missed_reasons(),
            ["nothing was merged"]
        );
    }

    #[test]
    fn json_line_is_short_and_identifies_the_trial() {
        let line = sample_report(3, 1000).to_json_line("program", 3, false);
        assert!(line.len() < 4000 && !line.contains('\n') && !line.contains("timeline"), "{line}");
        let value: Value = serde_json::from_str(&line).unwrap();
        assert_eq!((&value["workload"], &value["round"], &value["exit"]), (&json!("program"), &json!(3), &json!(3)));
        assert_eq!(value["report"]["plan"]["targets"][0], json!({ "pid": 7, "ranges": 2 }));
        assert_eq!(value["report"]["outcome"]["failed_changes"][MAX_KEPT_ENTRIES], json!({ "more": 980 }));
    }

    #[test]
    fn absent_report_is_an_error() {
        assert!(MergeCommandReport::parse(0, "").is_err());
    }
}
