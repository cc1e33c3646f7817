//! What the over-commit model computes for each shipped scenario, kernel and policy does not change, down to the last
//! nanosecond of a schedule: a faster model must have the same outcomes. `UPDATE_GOLDEN=1` rewrites the digests after a
//! change of what is modeled.

use pagefold_vcpu::decide::model::{Kernel, Outcome, SchedulingPolicy, SimulationSettings, simulate};
use pagefold_vcpu::scenario::shipped_scenarios;
use std::fmt::Write as _;
use std::path::Path;

/// Long enough for ticks, balancing and several slices of gangs.
const SIMULATED_NS: u64 = 30_000_000;

/// A digest of all measures and of the schedule: FNV-1a of 64 bits (G. Fowler, L. C. Noll, K.-P. Vo). How many events the
/// model needed is not part of the outcome.
fn digest(outcome: &Outcome) -> u64 {
    let text = format!("{:?}", Outcome { events: 0, ..outcome.clone() });
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[test]
fn outcomes_of_all_scenarios_kernels_and_policies_are_the_stored_ones() {
    let mut outcomes = String::new();
    for (name, described) in shipped_scenarios().unwrap() {
        for kernel in [Kernel::Linux36, Kernel::Today] {
            for policy in SchedulingPolicy::ALL {
                let mut settings = SimulationSettings::new(kernel, policy, SIMULATED_NS, 5);
                settings.kept_schedule_ns = Some((0, SIMULATED_NS));
                let outcome = simulate(&described.scenario, &settings);
                let operations: u64 = outcome.vms.iter().map(|vm| vm.operations).sum();
                let (kernel, policy, digest) = (kernel.name(), policy.name(), digest(&outcome));
                writeln!(outcomes, "{name} {kernel} {policy}: {operations} operations, {digest:016x}").unwrap();
            }
        }
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/model-outcomes.txt");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&file, &outcomes).unwrap();
    }
    let stored = std::fs::read_to_string(&file).unwrap();
    let changed: Vec<_> = outcomes.lines().zip(stored.lines()).filter(|(new, old)| new != old).collect();
    assert_eq!(outcomes.lines().count(), stored.lines().count());
    assert!(outcomes == stored, "other outcomes than stored; UPDATE_GOLDEN=1 rewrites them: {changed:#?}");
}
