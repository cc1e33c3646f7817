//! What was put back and what was not, on the wire.

use schemars::JsonSchema;
use serde::Serialize;

/// The result of `pagefold recover` and `pagefold policy restore`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct RecoverReport {
    /// `pagefold.recover/1`.
    pub schema: &'static str,
    /// What was put back, in the order in which it was, as what there was before.
    pub put_back: Vec<String>,
    /// What was not.
    pub remains: Vec<FailedUndoReport>,
}

/// Something that could not be put back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct FailedUndoReport {
    /// What there was before.
    pub was: String,
    /// Why it was not put back.
    pub why: String,
    /// Whether it is still written down, and the next command that changes the host tries again.
    pub retried: bool,
}

impl RecoverReport {
    /// Put it together.
    pub fn new(undone: Vec<String>, failed_undos: Vec<FailedUndoReport>) -> Self {
        Self { schema: "pagefold.recover/1", put_back: undone, remains: failed_undos }
    }

    /// As text; `nothing` says what it means that there was nothing.
    pub fn render(&self, empty_text: &str) -> String {
        if self.put_back.is_empty() && self.remains.is_empty() {
            return format!("{empty_text}\n");
        }
        let mut text = String::new();
        for was in &self.put_back {
            text.push_str(&format!("Put back: {was}\n"));
        }
        for FailedUndoReport { was, why, retried } in &self.remains {
            let again = if *retried { "; the next command tries again" } else { "" };
            text.push_str(&format!("Not put back: {was}: {why}{again}\n"));
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
        let remains = |retried| FailedUndoReport { was: "run was 0".into(), why: "busy".into(), retried };
        let report = RecoverReport::new(vec!["x was 1".into()], vec![remains(true), remains(false)]);
        assert_eq!(
            report.render(""),
            "Put back: x was 1\nNot put back: run was 0: busy; the next command tries again\n\
             Not put back: run was 0: busy\n"
        );
    }
}
