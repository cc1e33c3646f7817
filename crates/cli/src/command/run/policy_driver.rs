//! Controls KSM by a policy while a program's process tree runs, from the companion process.

use super::companion::ProcessTree;
use crate::command::{policy, recover};
use crate::command_line::GlobalOptions;
use crate::config::Config;
use crate::stop_signal;
use anyhow::bail;
use pagefold_base::process::Process;
use pagefold_base::{Bytes, ProcessId};
use pagefold_census::ProcessSelection;
use pagefold_daemon::run::return_large_blocks_when_freed;
use pagefold_host::Host;
use pagefold_host::resource::ResourceClass;
use pagefold_host::transaction::session;
use pagefold_host::transaction::session::Session;
use pagefold_linux::LiveHost;
use pagefold_merge::continuous_merge::{ContinuousMerge, ContinuousMergeEvent};
use pagefold_merge::decide::outcome::FailedChange;
use pagefold_merge::decide::policy::Policy;
use pagefold_merge::execute::{self, AfterMerge};
use pagefold_merge::ksmd;
use pagefold_merge::policy as rules;
use pagefold_merge::prepare::PlanRequest;
use std::collections::BTreeSet;
use std::fmt::Display;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The default CPU limit of ksmd, as a share of one CPU.
const DEFAULT_KSMD_CPU_SHARE: f64 = 0.1;

/// The minimum net savings of a process in a round. Ranks of a job have small savings in each round. Enrolling takes
/// some 2 ms of a process, which costs this much at the price of CPU time.
const MIN_ROUND_PROFIT: Bytes = Bytes(256 << 10);

/// The pause between two polls of the tree.
const TREE_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// A policy, checked as far as possible before the program starts.
pub struct PolicyDriver {
    policy: Policy,
    ksmd_cpu_share: f64,
    across_domains: bool,
    config: Config,
    state_directory: PathBuf,
}

impl PolicyDriver {
    /// A driver for the policy of a name.
    pub fn new(
        name: &str,
        ksmd_cpu_share: Option<f64>,
        across_domains: bool,
        config: Config,
        global: &GlobalOptions,
    ) -> anyhow::Result<Self> {
        let policy = policy::parse_policy(name)?;
        if ksmd_cpu_share.is_some() && policy != Policy::Guided {
            bail!("--cpu is for --policy guided: {name} sets its own rate; leave --cpu out");
        }
        let share = ksmd_cpu_share.unwrap_or(DEFAULT_KSMD_CPU_SHARE);
        Ok(Self { policy, ksmd_cpu_share: share, across_domains, config, state_directory: global.state.clone() })
    }

    /// Check that KSM can be controlled on this host. The companion process would find errors only after the program
    /// has started. Also undoes the changes of a killed run.
    pub fn check(&self, force: bool, global: &GlobalOptions) -> anyhow::Result<()> {
        let host = LiveHost::new();
        recover::check_ksm_present(&host)?;
        recover::check_no_tuner(&host, force)?;
        match recover::begin_session(&host, global) {
            Ok(session) => ksmd::check_writable(&session).map_err(recover::with_remedy),
            // One of several ranks controls KSM; others take over when it ends.
            Err(error) if matches!(error.downcast_ref(), Some(session::Error::Busy { .. })) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Whether the policy merges range by range.
    pub fn is_guided(&self) -> bool {
        self.policy == Policy::Guided
    }

    /// Control KSM until the process tree has ended or a signal stops this process.
    pub fn run(self, root: ProcessId) {
        let control_ksm = || -> anyhow::Result<()> {
            // Must run before other threads start. If it fails, the memory of each census stays allocated.
            let _ = return_large_blocks_when_freed();
            let stop = stop_signal::stop_on_signal()?;
            let host = LiveHost::new();
            let mut tree = ProcessTree::new(root);
            if self.is_guided() {
                self.merge_tree(&host, &mut tree, &stop)
            } else {
                self.follow_policy(&host, &mut tree, &stop)
            }
        };
        if let Err(error) = control_ksm() {
            eprintln!("pagefold: the policy {} ended: {error:#}", self.policy);
        }
    }

    fn merge_tree(&self, host: &dyn Host, tree: &mut ProcessTree, stop: &AtomicBool) -> anyhow::Result<()> {
        let exclusion_reason = |process: &Process| self.config.exclusions.reason(process);
        let merge = ContinuousMerge {
            host,
            directory: &self.state_directory,
            plan_request: PlanRequest {
                selection: ProcessSelection::default(),
                domains: self.config.domains(None),
                across_domains: self.across_domains,
                pass_interval: Duration::from_millis(500),
                threads: 1,
                whole_processes: false,
                min_profit: MIN_ROUND_PROFIT,
                ksmd_cpu_share: self.ksmd_cpu_share,
                max_regions: None,
                max_added_metadata: None,
                split_huge_pages: true,
                excluded_ranges: Default::default(),
                max_matrix_rows: 0,
                explain_differences: false,
            },
            merge_options: execute::MergeOptions {
                ksmd_cpu_share: self.ksmd_cpu_share,
                deadline: None,
                watch_time: Duration::from_secs(1),
                after_merge: AfterMerge::UndoChanges,
            },
            exclusion_reason: &exclusion_reason,
        };
        let running_pids = || {
            // A tree that cannot be read counts as ended.
            if tree.update(host).is_err() { Vec::new() } else { tree.processes().map(|process| process.pid).collect() }
        };
        // The next session tries failed changes again; report each only once.
        let mut reported = BTreeSet::new();
        let mut report_once = |line: String| {
            if reported.insert(line.clone()) {
                eprintln!("pagefold: {line}");
            }
        };
        let report_event = |event: ContinuousMergeEvent<'_>| match event {
            ContinuousMergeEvent::RoundEnded(outcome) => {
                outcome.not_restored.iter().for_each(|failed_undo| report_once(failed_undos_message(failed_undo)))
            }
            ContinuousMergeEvent::UndoFailed(failed_undo) => report_once(failed_undos_message(failed_undo)),
            ContinuousMergeEvent::UnenrollFailed(FailedChange { pid, comm, why, .. }) => {
                report_once(format!("cannot unenroll ranges of {comm} ({pid}) that did not stay merged: {why}"));
            }
        };
        Ok(merge.run(running_pids, report_event, stop)?)
    }

    fn follow_policy(&self, host: &dyn Host, tree: &mut ProcessTree, stop: &AtomicBool) -> anyhow::Result<()> {
        let mut is_over = || tree.update(host).is_err() || tree.has_ended() || stop.load(Ordering::Relaxed);
        while !is_over() {
            match Session::begin(host, &self.state_directory, ResourceClass::Ksm) {
                Ok((mut session, _, failed_undos)) => {
                    failed_undos
                        .iter()
                        .for_each(|failed_undo| eprintln!("pagefold: {}", failed_undos_message(failed_undo)));
                    let mut last_poll = std::time::Instant::now();
                    let mut ended = false;
                    let result = rules::follow_policy(&mut session, &self.policy, || {
                        // The policy calls this more often than the tree needs a poll.
                        if last_poll.elapsed() >= TREE_POLL_INTERVAL {
                            (last_poll, ended) = (std::time::Instant::now(), is_over());
                        }
                        ended
                    });
                    result.map_err(|error| session.abort(error))?;
                    session
                        .undo_all()?
                        .iter()
                        .for_each(|failed_undo| eprintln!("pagefold: {}", failed_undos_message(failed_undo)));
                    return Ok(());
                }
                Err(session::Error::Busy { .. }) => std::thread::sleep(TREE_POLL_INTERVAL),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

fn failed_undos_message(failed_undo: &impl Display) -> String {
    format!("not restored: {failed_undo}")
}
