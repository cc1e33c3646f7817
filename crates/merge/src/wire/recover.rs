//! Undone and failed changes, on the wire.

use schemars::JsonSchema;
use serde::Serialize;

/// The result of `pagefold recover` and `pagefold policy restore`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct RecoverReport {
    /// `pagefold.recover/1`.
    pub schema: &'static str,
    /// Undone changes in the order of undoing, each as the value before the change.
    pub undone: Vec<String>,
    /// Changes that could not be undone.
    pub failed_undos: Vec<FailedUndoReport>,
}

/// A change that could not be undone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct FailedUndoReport {
    /// The value before the change.
    pub previous_state: String,
    /// Why it could not be undone.
    pub why: String,
    /// Whether it is still in the journal, so that the next command that changes the host tries again.
    pub will_retry: bool,
}

impl RecoverReport {
    /// Create the report.
    pub fn new(undone: Vec<String>, failed_undos: Vec<FailedUndoReport>) -> Self {
        Self { schema: "pagefold.recover/1", undone, failed_undos }
    }

    /// As text; `empty_text` is printed if there was nothing to undo.
    pub fn render(&self, empty_text: &str) -> String {
        if self.undone.is_empty() && self.failed_undos.is_empty() {
            return format!("{empty_text}\n");
        }
        let mut text = String::new();
        for previous_state in &self.undone {
            text.push_str(&format!("Restored: {previous_state}\n"));
        }
        for FailedUndoReport { previous_state, why, will_retry } in &self.failed_undos {
            let retry_note = if *will_retry { "; the next command tries again" } else { "" };
            text.push_str(&format!("Not restored: {previous_state}: {why}{retry_note}\n"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn undone_and_failed_undos_are_listed() {
        let nothing = RecoverReport::new(Vec::new(), Vec::new());
        assert_eq!(nothing.render("Nothing to do."), "Nothing to do.\n");
        let failed_undo =
            |will_retry| FailedUndoReport { previous_state: "run was 0".into(), why: "busy".into(), will_retry };
        let report = RecoverReport::new(vec!["x was 1".into()], vec![failed_undo(true), failed_undo(false)]);
        assert_eq!(
            report.render(""),
            "Restored: x was 1\nNot restored: run was 0: busy; the next command tries again\n\
             Not restored: run was 0: busy\n"
        );
    }
}
