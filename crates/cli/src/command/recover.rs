//! `pagefold recover`: undo the changes that a killed run left behind; and the checks of every command that changes a
//! host.

use crate::command::daemon::control_socket;
use crate::command_line::GlobalOptions;
use crate::{CommandOutcome, host_selection, output};
use anyhow::{Context, anyhow, bail};
use clap::Args;
use pagefold_host::Host;
use pagefold_host::action::{Action, ActionError};
use pagefold_host::resource::ResourceClass;
use pagefold_host::transaction::Session;
use pagefold_host::transaction::session::{Error, FailedUndo, UndoDescription};
use pagefold_merge::ksmd;
use pagefold_merge::wire::recover::{FailedUndoReport, RecoverReport};
use pagefold_output::wire;

const EXAMPLES: &str = "\
Examples:
  sudo pagefold recover                 undo the changes of a killed pagefold
  sudo pagefold recover --state /tmp/p  the same for one that ran with --state /tmp/p
  sudo pagefold recover --unenroll      also unmerge what an ended daemon left merged

Commands that change KSM first undo leftover changes of KSM. A setting that another program has written since \
keeps its value. What a daemon had merged when it ended is no leftover: the next daemon takes it over. \
With --unenroll it is unmerged, where there is memory for the copies.

Exit status: 0 everything is undone, 2 nothing could be tried, 3 some changes remain.";

/// Arguments of `recover`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct RecoverArguments {
    /// Also unenroll the memory that an ended or paused daemon left enrolled, which unmerges it
    #[arg(long)]
    unenroll: bool,
    /// Print JSON (see `pagefold schema recover`)
    #[arg(long)]
    json: bool,
}

/// Undo the changes of a killed run, and print them.
pub fn run(options: &RecoverArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let host = open_live_host(global)?;
    let (mut undone, mut failed_undos, mut errors) = (Vec::new(), Vec::new(), Vec::new());
    for class in ResourceClass::ALL {
        match Session::begin(&*host, &global.state, class) {
            Ok((mut session, undone_here, failed_here)) => {
                undone.extend(undone_here);
                failed_undos.extend(failed_here);
                // Only the session of KSM has recorded enrollments.
                match options.unenroll.then(|| session.undo_recorded_enrollments()) {
                    Some(Ok((undone_here, failed_here))) => {
                        undone.extend(undone_here);
                        failed_undos.extend(failed_here);
                    }
                    Some(Err(error)) => errors.push(with_remedy(error)),
                    None => {}
                }
            }
            // The other classes may still have something to undo.
            Err(error) => errors.push(with_daemon_hint(with_remedy(error), global)),
        }
    }
    if options.unenroll {
        let forgotten = pagefold_daemon::run::forget_schedule(&global.state);
        errors.extend(forgotten.context("the schedule of the last daemon cannot be removed").err());
    }
    print_partial_result((&undone, &failed_undos), errors, options.json, "Nothing was left to restore.")
}

/// Print what was undone and what was not, and why some classes of resources could not be tried. If nothing could be
/// tried, the first reason is the error.
pub fn print_partial_result(
    (undone, failed_undos): (&[Action], &[FailedUndo]),
    mut errors: Vec<anyhow::Error>,
    json: bool,
    empty_text: &str,
) -> anyhow::Result<CommandOutcome> {
    if undone.is_empty() && failed_undos.is_empty() && !errors.is_empty() {
        return Err(errors.swap_remove(0));
    }
    let outcome = print_result(undone, failed_undos, json, empty_text)?;
    errors.iter().for_each(|error| eprintln!("not undone: {error:#}"));
    Ok(if errors.is_empty() { outcome } else { CommandOutcome::Partial })
}

/// The host, if it can be changed.
pub fn open_live_host(global: &GlobalOptions) -> anyhow::Result<Box<dyn Host>> {
    if global.host != "live" {
        bail!("--host {}: only the live host can be changed; leave --host out", global.host);
    }
    host_selection::open_host(global)
}

/// The host of a command that also changes a simulated one.
pub fn open_changeable_host(global: &GlobalOptions) -> anyhow::Result<Box<dyn Host>> {
    if host_selection::is_recording(global) {
        bail!("--host {}: a recording cannot be changed; leave --host out, or add --dry-run", global.host);
    }
    host_selection::open_host(global)
}

/// Begin a session that changes a host. First it undoes the changes of a killed run, and prints them to standard error.
pub fn begin_session<'a>(host: &'a dyn Host, global: &GlobalOptions) -> anyhow::Result<Session<'a>> {
    let (session, undone, failed_undos) = Session::begin(host, &global.state, ResourceClass::Ksm)
        .map_err(with_remedy)
        .map_err(|error| with_daemon_hint(error, global))?;
    print_leftover(&undone, &failed_undos);
    Ok(session)
}

/// Print to standard error what an earlier run had left behind and what was undone.
pub fn print_leftover(undone: &[Action], failed_undos: &[FailedUndo]) {
    if !undone.is_empty() || !failed_undos.is_empty() {
        eprint!("An earlier pagefold left changes behind.\n{}", build_report(undone, failed_undos).render(""));
    }
}

/// Add a hint to an error if the daemon holds the lock of this host.
pub fn with_daemon_hint(error: anyhow::Error, global: &GlobalOptions) -> anyhow::Error {
    let is_busy = matches!(error.downcast_ref(), Some(Error::Busy { class: ResourceClass::Ksm, .. }));
    if is_busy && control_socket::is_daemon_listening(&global.state) {
        return error
            .context("the daemon controls KSM on this host: run `pagefold pause` before and `pagefold resume` after");
    }
    error
}

/// Print the changes that were undone and those that were not.
pub fn print_result(
    undone: &[Action],
    failed_undos: &[FailedUndo],
    json: bool,
    empty_text: &str,
) -> anyhow::Result<CommandOutcome> {
    let report = build_report(undone, failed_undos);
    output::print_stdout(&if json { wire::to_json(&report) } else { report.render(empty_text) })?;
    Ok(if failed_undos.is_empty() { CommandOutcome::Done } else { CommandOutcome::Partial })
}

fn build_report(undone: &[Action], failed_undos: &[FailedUndo]) -> RecoverReport {
    let failed_undos = failed_undos.iter().map(|failed| FailedUndoReport {
        previous_state: UndoDescription(&failed.undo).to_string(),
        why: failed.why.clone(),
        will_retry: failed.will_retry,
    });
    RecoverReport::new(undone.iter().map(|undo| UndoDescription(undo).to_string()).collect(), failed_undos.collect())
}

/// Add the remedy to an error.
pub fn with_remedy(error: Error) -> anyhow::Error {
    let remedy = match &error {
        Error::Refused(ActionError::Denied(_)) if rustix::process::geteuid().is_root() => {
            "nothing was changed: /sys is read-only here (a container?) or a security module forbids it"
        }
        Error::Refused(ActionError::Denied(_)) => "nothing was changed: run as root",
        Error::Refused(ActionError::Busy(_)) => {
            "nothing was changed: max_page_sharing and merge_across_nodes can be set only while nothing is merged"
        }
        Error::Refused(_) => "nothing was changed",
        _ => return error.into(),
    };
    Err::<(), _>(error).context(remedy).expect_err("it is an error")
}

/// The exit status for an error: 3 if some changes were not undone, otherwise 2.
pub fn exit_status(error: &anyhow::Error) -> u8 {
    let is_undo_failure =
        |error: &(dyn std::error::Error + 'static)| matches!(error.downcast_ref(), Some(Error::UndoFailed { .. }));
    if error.chain().any(is_undo_failure) { 3 } else { 2 }
}

/// Check that the kernel has KSM. All other code relies on this check.
pub fn check_ksm_present(host: &dyn Host) -> anyhow::Result<()> {
    match host.read("sys/kernel/mm/ksm/run") {
        Ok(_) => Ok(()),
        Err(pagefold_base::Absent::NotOnThisKernel) => {
            Err(anyhow!("this kernel has no KSM (no /sys/kernel/mm/ksm): boot one with CONFIG_KSM=y"))
        }
        Err(why) => Err(anyhow!("/sys/kernel/mm/ksm/run: {why}")),
    }
}

/// Check that no other program repeatedly writes KSM's settings, unless `force` is set.
pub fn check_no_tuner(host: &dyn Host, force: bool) -> anyhow::Result<()> {
    match ksmd::find_other_tuner(host).context("cannot look for other programs that tune KSM")? {
        Some(tuner) if !force => bail!(
            "{} tunes KSM, and both would overwrite each other's settings: stop it with `{}`, or use --force",
            tuner.name(),
            tuner.stop_commands().join("; ")
        ),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::ksm::Setting;

    #[test]
    fn error_claims_nothing_changed_only_if_true() {
        let refused = || Error::Refused(ActionError::Denied("writing 1 to run".to_owned()));
        let undo = Action::Write { knob: Setting::PagesToScan.into(), value: "100".to_owned() };
        let why = "permission denied".to_owned();
        let failed_undos = vec![FailedUndo { undo, why, will_retry: true, is_overwritten: false }];
        let partial = with_remedy(Error::UndoFailed { failed_undos, source: Box::new(refused()) });
        assert_eq!(
            format!("{partial:#}"),
            "some changes could not be undone (/sys/kernel/mm/ksm/pages_to_scan was 100: permission denied): \
             permission denied: writing 1 to run"
        );
        assert_eq!(exit_status(&partial.context("around it")), 3);
        let complete = with_remedy(refused());
        assert!(format!("{complete:#}").starts_with("nothing was changed"), "{complete:#}");
        assert_eq!(exit_status(&complete), 2);
    }
}
