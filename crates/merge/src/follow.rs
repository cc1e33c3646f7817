//! Merging again and again, while programs run that keep making memory.
//!
//! Each round is a whole merge: census, plan, apply, verify, everything put back. What has not been there for long
//! enough to be expected to stay waits for a later round ([`Ages`]), so that the first round merges nothing of a
//! program that has just begun; what did not stay merged in one round is left out of the next ones. The second round
//! comes once what the first one noted can be ripe. The pause after any other is a multiple of the CPU time that the
//! round took, so that watching memory that does not change costs next to nothing, and no shorter than it takes to ripen.
//!
//! Between rounds merged pages are checked every two seconds. Programs write many of them now and then with the bytes
//! that were there. Those are merged again right away, by one scan of the enrolled ranges ([`remerge`]): a round needs a
//! census and comes too late for them. For the rest of the time ksmd is as it was, so that each COW break is seen. What
//! is written too often is unenrolled. The price for that is the CPU time that ksmd was granted
//! ([`pagefold_base::lasting::price_within`]).

use self::remerge::Remerge;
use crate::Ages;
use crate::decide::outcome::{Missed, Outcome};
use crate::execute as merge;
use crate::execute::{Planned, carry_out};
use crate::prepare::{Prepared, Request, prepare};
use crate::recheck::{Moment, Whom};
use crate::trial::Trial;
use pagefold_base::Pid;
use pagefold_base::lasting::ripe_after;
use pagefold_base::process::Process;
use pagefold_census::Selection;
use pagefold_host::Host;
use pagefold_host::transaction::session;
use pagefold_host::transaction::session::{Remains, Session};
use pagefold_sys::allocator::give_back_free_blocks;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The pause after a round, in times of the CPU time it took: but for the first rounds, pagefold's own share stays
/// below a fortieth of one CPU.
const REST: u32 = 40;

/// How often it is looked whether to go on.
const LOOK: Duration = Duration::from_millis(500);

/// Why a round could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no census.
    #[error(transparent)]
    Census(#[from] pagefold_census::Error),
    /// The host cannot be changed.
    #[error(transparent)]
    Session(#[from] session::Error),
}

/// What there is to tell meanwhile.
#[derive(Clone, Copy, Debug)]
pub enum Told<'t> {
    /// What a round came to that merged anything.
    Round(&'t Outcome),
    /// What was changed for the time being and could not be put back, by a killed run or between rounds.
    Remains(&'t Remains),
    /// What could not be withdrawn until the end, however often it was tried.
    Refused(&'t Missed),
}

/// What is merged again and again, and how.
pub struct Follow<'h, 'a> {
    /// Where.
    pub host: &'h dyn Host,
    /// Where lock and journal are kept.
    pub directory: &'a Path,
    /// What is planned in each round; whom is told by the members.
    pub request: Request,
    /// How a plan is carried out.
    pub how: merge::Options,
    /// Why a process must not be enrolled, if it must not.
    pub excluded: &'a dyn Fn(&Process) -> Option<String>,
}

impl<'h> Follow<'h, '_> {
    /// Merge what `members` names, until it names nobody or `stop` is set. While somebody else drives this host a round
    /// is skipped.
    pub fn run(
        &self,
        members: impl FnMut() -> Vec<Pid>,
        tell: impl FnMut(Told<'_>),
        stop: &AtomicBool,
    ) -> Result<(), Error> {
        let mut trial = Trial::new(self.host);
        trial.grant(self.how.share);
        self.go_on(&mut trial, members, tell, stop)
    }

    /// The same, with what an earlier merge has under trial.
    fn go_on(
        &self,
        trial: &mut Trial<'h>,
        mut members: impl FnMut() -> Vec<Pid>,
        mut tell: impl FnMut(Told<'_>),
        stop: &AtomicBool,
    ) -> Result<(), Error> {
        let mut ages = Ages::new(self.host.page_size())?;
        let mut remerge = Remerge::new(self.host, self.how.share);
        let ripens = ripe_after(self.host.page_size().bytes());
        // A program that starts fills its memory first.
        let (mut pause, mut noted) = (ripens, false);
        loop {
            let rested = Instant::now();
            let (mut looked, mut again) = (rested, remerge::PAUSE);
            let mut pids = members();
            while rested.elapsed() < pause && !pids.is_empty() && !stop.load(Ordering::Relaxed) {
                std::thread::sleep(LOOK);
                pids = members();
                if looked.elapsed() >= again {
                    let before = merge::own_cpu();
                    let ksmd = self.look(trial, &mut remerge, &mut tell, stop)?;
                    let own = merge::own_cpu().saturating_sub(before) * REST;
                    (looked, again) = (Instant::now(), remerge::PAUSE.max(own).max(remerge.pause_after(ksmd)));
                }
            }
            if pids.is_empty() || stop.load(Ordering::Relaxed) {
                trial.refused().for_each(|refused| tell(Told::Refused(refused)));
                return Ok(());
            }
            let before = merge::own_cpu();
            self.round(pids, trial, &mut ages, &mut remerge, &mut tell, stop)?;
            // What the census took is in the job's cgroup, and counts against what was saved.
            give_back_free_blocks();
            // The first round only takes note of what there is, and is half of one with the second.
            let rest = if noted { merge::own_cpu().saturating_sub(before) * REST } else { ripens };
            pause = rest.max(ripens);
            noted = true;
        }
    }

    /// One merge, if anything pays and nobody else drives.
    fn round(
        &self,
        pids: Vec<Pid>,
        trial: &mut Trial<'h>,
        ages: &mut Ages,
        remerge: &mut Remerge<'h>,
        tell: &mut dyn FnMut(Told<'_>),
        stop: &AtomicBool,
    ) -> Result<(), Error> {
        let started = Instant::now();
        ages.retain(|process| pids.contains(&process.pid));
        let selection = Selection { pids, ..Selection::default() };
        let request = Request { selection, ..self.request.clone() };
        let progress = pagefold_census::Progress::default();
        let Prepared { mut plan, probes, .. } =
            prepare(self.host, &request, self.excluded, Some((ages, Instant::now())), &progress, stop)?;
        for (&process, withdrawn) in trial.withdrawn() {
            plan.leave_out(process, withdrawn.ranges());
        }
        if plan.targets.is_empty() {
            return self.look(trial, remerge, tell, stop).map(drop);
        }
        let Some(mut session) = self.begin(tell)? else { return Ok(()) };
        let progress = merge::Progress::default();
        let planned = Planned { plan, probes, started };
        let outcome = carry_out(&mut session, planned, &self.how, trial, &progress, stop)
            .map_err(|error| session.give_up(error))?;
        tell(Told::Round(&outcome));
        Ok(())
    }

    /// Check what is merged: unenroll what does not last, and merge again what was written. While another program drives
    /// this host it waits. Tells the CPU time that ksmd took for it.
    fn look(
        &self,
        trial: &mut Trial<'h>,
        remerge: &mut Remerge<'h>,
        tell: &mut dyn FnMut(Told<'_>),
        stop: &AtomicBool,
    ) -> Result<Duration, Error> {
        let losses = trial.look(Whom::Ran);
        let due = remerge::is_due(trial);
        if !losses && !due {
            return Ok(Duration::ZERO);
        }
        let Some(mut session) = self.begin(tell)? else { return Ok(Duration::ZERO) };
        let mut ksmd = Duration::ZERO;
        if losses {
            trial.withdraw(&mut session, Moment::Between).map_err(|error| session.give_up(error))?;
        }
        if due {
            match remerge.run(&mut session, trial, stop) {
                Ok(took) => ksmd = took,
                // Another program sets ksmd: its values stay.
                Err(session::Error::Contested { .. }) => {}
                Err(error) => return Err(session.give_up(error).into()),
            }
        }
        session.finish()?.iter().for_each(|remains| tell(Told::Remains(remains)));
        Ok(ksmd)
    }

    /// Begin to change the host. What of a killed run cannot be put back is told. Nothing while somebody else drives.
    fn begin(&self, tell: &mut dyn FnMut(Told<'_>)) -> Result<Option<Session<'h>>, Error> {
        match Session::begin(self.host, self.directory) {
            Ok((session, _, left)) => {
                left.iter().for_each(|remains| tell(Told::Remains(remains)));
                Ok(Some(session))
            }
            Err(session::Error::Busy(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

mod remerge;
#[cfg(test)]
mod tests;
