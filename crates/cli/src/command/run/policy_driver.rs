//! Driving KSM by a policy for as long as a program's tree lives, from the process beside it.

use super::companion::ProcessTree;
use crate::command::{policy, recover};
use crate::command_line::GlobalOptions;
use crate::config::Config;
use crate::progress;
use anyhow::bail;
use pagefold_base::process::Process;
use pagefold_base::{Bytes, ProcessId};
use pagefold_census::ProcessSelection;
use pagefold_daemon::run::return_large_blocks_when_freed;
use pagefold_host::Host;
use pagefold_host::transaction::session;
use pagefold_host::transaction::session::Session;
use pagefold_linux::LiveHost;
use pagefold_merge::continuous_merge::{ContinuousMerge, ContinuousMergeEvent};
use pagefold_merge::decide::outcome::FailedChange;
use pagefold_merge::decide::policy::Policy;
use pagefold_merge::execute as merge;
use pagefold_merge::execute::AfterMerge;
use pagefold_merge::policy as rules;
use pagefold_merge::prepare::PlanRequest;
use std::collections::BTreeSet;
use std::fmt::Display;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// ksmd's share of one CPU unless said otherwise.
const DEFAULT_KSMD_CPU_SHARE: f64 = 0.1;

/// What a round must give back of a process, net. Ranks of a job have a little each, round by round. Enrolling takes some
/// 2 ms of a process, which is this much by the price of CPU time.
const MIN_ROUND_PROFIT: Bytes = Bytes(256 << 10);

/// The pause between two looks at the tree.
const TREE_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// A policy, checked as far as it can be before the program is started.
pub struct PolicyDriver {
    policy: Policy,
    ksmd_cpu_share: f64,
    across_domains: bool,
    config: Config,
    state_directory: PathBuf,
}

impl PolicyDriver {
    /// By the name of a policy.
    pub fn new(
        name: &str,
        ksmd_cpu_share: Option<f64>,
        across_domains: bool,
        config: Config,
        global: &GlobalOptions,
    ) -> anyhow::Result<Self> {
        let policy = policy::parse_policy(name)?;
        if ksmd_cpu_share.is_some() && policy != Policy::Guided {
            bail!("--cpu is for the policy guided: {name} has a rate of its own; leave --cpu out");
        }
        let share = ksmd_cpu_share.unwrap_or(DEFAULT_KSMD_CPU_SHARE);
        Ok(Self { policy, ksmd_cpu_share: share, across_domains, config, state_directory: global.state.clone() })
    }

    /// That this host can be driven: what the process beside the program would find out too late for anybody to heed.
    /// Puts back what a killed run left.
    pub fn check(&self, force: bool, global: &GlobalOptions) -> anyhow::Result<()> {
        let host = LiveHost::new();
        recover::check_ksm_present(&host)?;
        recover::check_no_tuner(&host, force)?;
        match recover::begin_session(&host, global) {
            Ok(session) => session.check_writable().map_err(recover::with_remedy),
            // Of several ranks one drives, and others take over.
            Err(error) if matches!(error.downcast_ref(), Some(session::Error::Busy(_))) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Whether it merges range by range.
    pub fn is_guided(&self) -> bool {
        self.policy == Policy::Guided
    }

    /// Drive until all that a process started have ended, or this process is told to stop.
    pub fn run(self, root: ProcessId) {
        let done = || -> anyhow::Result<()> {
            // Before there are other threads. Where it fails, what a census takes stays until the end.
            let _ = return_large_blocks_when_freed();
            let stop = progress::stop_on_signal()?;
            let host = LiveHost::new();
            let mut tree = ProcessTree::new(root);
            if self.is_guided() {
                self.merge_tree(&host, &mut tree, &stop)
            } else {
                self.follow_policy(&host, &mut tree, &stop)
            }
        };
        if let Err(error) = done() {
            eprintln!("pagefold: the policy {} ended: {error:#}", self.policy);
        }
    }

    fn merge_tree(&self, host: &dyn Host, tree: &mut ProcessTree, stop: &AtomicBool) -> anyhow::Result<()> {
        let excluded = |process: &Process| self.config.exclusions.reason(process);
        let follow = ContinuousMerge {
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
            },
            merge_options: merge::MergeOptions {
                ksmd_cpu_share: self.ksmd_cpu_share,
                deadline: None,
                watch_time: Duration::from_secs(1),
                after_merge: AfterMerge::UndoChanges,
            },
            exclusion_reason: &excluded,
        };
        let members = || {
            // A tree that cannot be looked at is taken to have ended.
            if tree.update(host).is_err() { Vec::new() } else { tree.processes().map(|member| member.pid).collect() }
        };
        // What the next session tries again would be told again.
        let mut known = BTreeSet::new();
        let mut say = |line: String| {
            if known.insert(line.clone()) {
                eprintln!("pagefold: {line}");
            }
        };
        let tell = |told: ContinuousMergeEvent<'_>| match told {
            ContinuousMergeEvent::RoundEnded(outcome) => {
                outcome.not_restored.iter().for_each(|remains| say(failed_undos_message(remains)))
            }
            ContinuousMergeEvent::UndoFailed(remains) => say(failed_undos_message(remains)),
            ContinuousMergeEvent::UnenrollFailed(FailedChange { pid, comm, why, .. }) => {
                say(format!("what did not stay merged of {comm} ({pid}) stays enrolled: {why}"));
            }
        };
        Ok(follow.run(members, tell, stop)?)
    }

    fn follow_policy(&self, host: &dyn Host, tree: &mut ProcessTree, stop: &AtomicBool) -> anyhow::Result<()> {
        let mut ended = || tree.update(host).is_err() || tree.has_ended() || stop.load(Ordering::Relaxed);
        while !ended() {
            match Session::begin(host, &self.state_directory) {
                Ok((mut session, _, left)) => {
                    left.iter().for_each(|remains| eprintln!("pagefold: {}", failed_undos_message(remains)));
                    let mut last = std::time::Instant::now();
                    let mut over = false;
                    let followed = rules::follow_policy(&mut session, &self.policy, || {
                        // The policy asks more often than the tree needs to be looked at.
                        if last.elapsed() >= TREE_POLL_INTERVAL {
                            (last, over) = (std::time::Instant::now(), ended());
                        }
                        over
                    });
                    followed.map_err(|error| session.abort(error))?;
                    session
                        .undo_all()?
                        .iter()
                        .for_each(|remains| eprintln!("pagefold: {}", failed_undos_message(remains)));
                    return Ok(());
                }
                Err(session::Error::Busy(_)) => std::thread::sleep(TREE_POLL_INTERVAL),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

fn failed_undos_message(remains: &impl Display) -> String {
    format!("not put back: {remains}")
}
