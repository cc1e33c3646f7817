//! Changes of the host that a campaign made and that are not undone at its end.

use crate::arms::SettingsOutcome;
use pagefold_host::action::Action;
use pagefold_host::transaction::session::{DEFAULT_STATE_DIRECTORY, FailedUndo, UndoDescription, chain};
use schemars::JsonSchema;
use serde::Serialize;
use std::path::Path;

/// Changes that are not undone. They belong to the run that wrote the report; `pagefold ab report` changes nothing and
/// has none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct UnrestoredChanges {
    /// Changes whose undo failed. The exit status is 3 if there are any.
    pub failed_undos: Vec<UnrestoredChange>,
    /// Changes that another program has overwritten since, whose value stays. This is no failure.
    pub overwritten_changes: Vec<UnrestoredChange>,
}

/// A change of the host that is not undone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct UnrestoredChange {
    /// The state before the change.
    pub previous_state: String,
    /// Why it was not restored.
    pub why: String,
    /// Whether Pagefold tries again: at `pagefold recover`, or when the campaign is resumed.
    pub will_retry: bool,
    /// What restores the state.
    pub remedy: String,
}

impl UnrestoredChanges {
    /// What a campaign has left. The directories are those of the state and of the campaign, for the remedies.
    #[must_use]
    pub fn new(settings: &SettingsOutcome, state_directory: &Path, campaign_directory: &Path) -> Self {
        let (overwritten, failed): (Vec<&FailedUndo>, Vec<&FailedUndo>) =
            settings.failed_undos.iter().partition(|undo| undo.is_overwritten);
        let change = |undo: &FailedUndo| UnrestoredChange {
            previous_state: UndoDescription(&undo.undo).to_string(),
            why: undo.why.clone(),
            will_retry: undo.will_retry,
            remedy: find_remedy(undo, state_directory),
        };
        let mut failed_undos: Vec<UnrestoredChange> = failed.into_iter().map(change).collect();
        failed_undos.extend(settings.failed_after.as_ref().map(|(arm, why)| UnrestoredChange {
            previous_state: format!("arm {arm} was not in force"),
            why: chain(why),
            will_retry: true,
            remedy: format!("`pagefold ab resume {}` runs the command again", campaign_directory.display()),
        }));
        Self { failed_undos, overwritten_changes: overwritten.into_iter().map(change).collect() }
    }
}

/// What restores the state that an undo did not restore.
fn find_remedy(failed: &FailedUndo, state_directory: &Path) -> String {
    if failed.will_retry {
        return match state_directory {
            path if path == Path::new(DEFAULT_STATE_DIRECTORY) => "run `pagefold recover`".to_owned(),
            path => format!("run `pagefold recover --state {}`", path.display()),
        };
    }
    let restore = match &failed.undo {
        Action::Write { knob, value } => format!("write {value} to {knob}"),
        Action::ReloadModule { module, parameters } => format!("load module {module} with {}", parameters.to),
        _ => "restore it".to_owned(),
    };
    if failed.is_overwritten { format!("if the present value is not wanted, {restore}") } else { restore }
}
