//! A scenario in virtual time under a policy: machines arrive, write and exit, a policy sets ksmd's pace, and ksmd scans.
//!
//! The host is [`HostState`]; this module adds the policy.
//!
//! Limits: ksmd has a CPU for itself, and pauses end on time. A host whose memory is used up goes on: there is no swap,
//! and samples show how much memory is missing. Pages that change during a scan are [approximated] on request. A machine's
//! page tables, and programs other than the machines, are a fixed part of memory.
//!
//! [approximated]: super::ksmd::KsmModel::seeing_changes_at_once

use super::content_pool::ContentsUsedUp;
use super::counters::PAGE_BYTES;
use super::host_state::{Exactness, HostSetup, HostState, MachineEnrollment, NS_PER_MS};
use super::ksmd::RunState;
use super::policies::{ComparedPolicy, PolicySteps};
use super::samples::{Sample, SimulatedRun};
use super::scenario::Scenario;
use pagefold_base::ksm::{Setting, Settings};
use pagefold_base::units::Bytes;
use std::num::NonZeroU32;

/// Simulates a scenario under a policy other than [`ComparedPolicy::Guided`], whose program needs the
/// [host port](crate::host::SimulatedHost). `note_progress` gets the virtual time in milliseconds, from time to time.
///
/// # Errors
/// If the scenario has more contents than the model.
///
/// # Panics
/// If the policy is [`ComparedPolicy::Guided`].
pub fn simulate(
    scenario: &Scenario,
    policy: &ComparedPolicy,
    seed: u64,
    exactness: Exactness,
    note_progress: &mut dyn FnMut(u64),
) -> Result<SimulatedRun, ContentsUsedUp> {
    assert!(!policy.is_guided(), "the daemon runs on the host port");
    let (mut ksm, runs) = policy.start(&scenario.host.ksm);
    ksm.sleep_millisecs *= u64::from(scenario.divisor.get());
    let run = if runs { RunState::Merging } else { RunState::Stopped };
    let setup = HostSetup { ksm, run, exactness, enrollment: MachineEnrollment::AtArrival };
    let mut host = HostState::with_scenario(scenario, seed, setup);
    let mut steps = PolicySteps::start(policy, bytes_of_whole(scenario, scenario.host.memory_pages));
    let end_ns = scenario.duration_ms * NS_PER_MS;
    let mut next_step_ns = steps.as_ref().map_or(u64::MAX, PolicySteps::interval_ns);
    while host.now_ns < end_ns {
        let progress_ns = host.now_ns + scenario.tick_ms * NS_PER_MS;
        host.advance(progress_ns.min(next_step_ns).min(end_ns));
        if let Some(why) = host.failure() {
            return Err(why);
        }
        if let Some(steps) = steps.as_mut().filter(|_| host.now_ns == next_step_ns) {
            step_policy(&mut host, scenario, steps);
            next_step_ns += steps.interval_ns();
        }
        note_progress(host.now_ns / NS_PER_MS);
    }
    Ok(host.finish())
}

/// Memory of the host of which the scenario is a part.
fn bytes_of_whole(scenario: &Scenario, pages: u64) -> Bytes {
    Bytes(pages * PAGE_BYTES.cast_unsigned() * u64::from(scenario.divisor.get()))
}

/// Lets a policy act on what it would read on the whole host, with the pace of the part.
fn step_policy(host: &mut HostState<'_>, scenario: &Scenario, steps: &mut PolicySteps) {
    let now = Sample::observe(host);
    let free = bytes_of_whole(scenario, now.available_bytes.max(0).cast_unsigned() / PAGE_BYTES.cast_unsigned());
    // Pages that are mapped to the zero page are not resident; merged ones are.
    let resident_pages: u64 = host.processes.values().map(|process| host.memory_of(process).totals.anonymous()).sum();
    let committed = bytes_of_whole(scenario, resident_pages);
    let settings = steps.step(free, committed);
    write_settings(host, &settings, scenario.divisor);
}

fn write_settings(host: &mut HostState<'_>, written: &Settings, divisor: NonZeroU32) {
    let mut settings = *host.model.settings();
    for (setting, value) in written {
        let value = value.parse().expect("policies write numbers");
        match setting {
            Setting::PagesToScan => settings.pages_to_scan = value,
            Setting::SleepMillisecs => settings.sleep_millisecs = value * u64::from(divisor.get()),
            Setting::Run => host.model.write_run(if value == 0 { RunState::Stopped } else { RunState::Merging }),
            _ => unreachable!("ksmtuned writes no {setting:?}"),
        }
    }
    host.model.write_settings(settings);
}
