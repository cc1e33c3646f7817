//! Driving KSM by a policy for as long as a program's tree lives, from the process beside it.

use super::companion::Tree;
use crate::arguments::Global;
use crate::command::{policy, recover};
use crate::config::Config;
use crate::progress;
use anyhow::bail;
use pagefold_base::process::Process;
use pagefold_base::{Bytes, ProcessId};
use pagefold_census::Selection;
use pagefold_daemon::run::give_back_big_blocks;
use pagefold_host::Host;
use pagefold_host::transaction::session;
use pagefold_host::transaction::session::Session;
use pagefold_linux::LiveHost;
use pagefold_merge::decide::outcome::Missed;
use pagefold_merge::decide::policy::Policy;
use pagefold_merge::execute as merge;
use pagefold_merge::execute::After;
use pagefold_merge::follow::{Follow, Told};
use pagefold_merge::policy as rules;
use pagefold_merge::prepare::Request;
use std::collections::BTreeSet;
use std::fmt::Display;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// ksmd's share of one CPU unless said otherwise.
const SHARE: f64 = 0.1;

/// What a round must give back of a process, net. Ranks of a job have a little each, round by round. Enrolling takes some
/// 2 ms of a process, which is this much by the price of CPU time.
const MIN_PROFIT: Bytes = Bytes(256 << 10);

/// The pause between two looks at the tree.
const LOOK: Duration = Duration::from_millis(500);

/// A policy, checked as far as it can be before the program is started.
pub struct Drive {
    policy: Policy,
    share: f64,
    across_domains: bool,
    config: Config,
    directory: PathBuf,
}

impl Drive {
    /// By the name of a policy.
    pub fn new(
        name: &str,
        share: Option<f64>,
        across_domains: bool,
        config: Config,
        global: &Global,
    ) -> anyhow::Result<Self> {
        let policy = policy::parse(name)?;
        if share.is_some() && policy != Policy::Guided {
            bail!("--cpu is for the policy guided: {name} has a rate of its own; leave --cpu out");
        }
        let share = share.unwrap_or(SHARE);
        Ok(Self { policy, share, across_domains, config, directory: global.state.clone() })
    }

    /// That this host can be driven: what the process beside the program would find out too late for anybody to heed.
    /// Puts back what a killed run left.
    pub fn check(&self, force: bool, global: &Global) -> anyhow::Result<()> {
        let host = LiveHost::new();
        recover::needs_ksm(&host)?;
        recover::refuse_tuner(&host, force)?;
        match recover::begin(&host, global) {
            Ok(session) => session.writable().map_err(recover::explained),
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
    pub fn run(self, first: ProcessId) {
        let done = || -> anyhow::Result<()> {
            // Before there are other threads. Where it fails, what a census takes stays until the end.
            let _ = give_back_big_blocks();
            let stop = progress::stop_on_signal()?;
            let host = LiveHost::new();
            let mut tree = Tree::of(first);
            if self.is_guided() { self.merge(&host, &mut tree, &stop) } else { self.follow(&host, &mut tree, &stop) }
        };
        if let Err(error) = done() {
            eprintln!("pagefold: the policy {} ended: {error:#}", self.policy);
        }
    }

    fn merge(&self, host: &dyn Host, tree: &mut Tree, stop: &AtomicBool) -> anyhow::Result<()> {
        let excluded = |process: &Process| self.config.exclusions.reason(process);
        let follow = Follow {
            host,
            directory: &self.directory,
            request: Request {
                selection: Selection::default(),
                domains: self.config.domains(None),
                across_domains: self.across_domains,
                settle: Duration::from_millis(500),
                threads: 1,
                whole: false,
                min_profit: MIN_PROFIT,
                share: self.share,
                max_regions: None,
                metadata: None,
                split_huge_pages: true,
                left_out: Default::default(),
                parties: 0,
            },
            how: merge::Options {
                share: self.share,
                deadline: None,
                watch: Duration::from_secs(1),
                after: After::PutBack,
            },
            excluded: &excluded,
        };
        let members = || {
            // A tree that cannot be looked at is taken to have ended.
            if tree.observe(host).is_err() { Vec::new() } else { tree.members().map(|member| member.pid).collect() }
        };
        // What the next session tries again would be told again.
        let mut known = BTreeSet::new();
        let mut say = |line: String| {
            if known.insert(line.clone()) {
                eprintln!("pagefold: {line}");
            }
        };
        let tell = |told: Told<'_>| match told {
            Told::Round(outcome) => outcome.remains.iter().for_each(|remains| say(not_put_back(remains))),
            Told::Remains(remains) => say(not_put_back(remains)),
            Told::Refused(Missed { pid, comm, why, .. }) => {
                say(format!("what did not stay merged of {comm} ({pid}) stays enrolled: {why}"));
            }
        };
        Ok(follow.run(members, tell, stop)?)
    }

    fn follow(&self, host: &dyn Host, tree: &mut Tree, stop: &AtomicBool) -> anyhow::Result<()> {
        let mut ended = || tree.observe(host).is_err() || tree.has_ended() || stop.load(Ordering::Relaxed);
        while !ended() {
            match Session::begin(host, &self.directory) {
                Ok((mut session, _, left)) => {
                    left.iter().for_each(|remains| eprintln!("pagefold: {}", not_put_back(remains)));
                    let mut last = std::time::Instant::now();
                    let mut over = false;
                    let followed = rules::follow(&mut session, &self.policy, || {
                        // The policy asks more often than the tree needs to be looked at.
                        if last.elapsed() >= LOOK {
                            (last, over) = (std::time::Instant::now(), ended());
                        }
                        over
                    });
                    followed.map_err(|error| session.give_up(error))?;
                    session.finish()?.iter().for_each(|remains| eprintln!("pagefold: {}", not_put_back(remains)));
                    return Ok(());
                }
                Err(session::Error::Busy(_)) => std::thread::sleep(LOOK),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

fn not_put_back(remains: &impl Display) -> String {
    format!("not put back: {remains}")
}
