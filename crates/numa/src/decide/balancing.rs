//! Whether NUMA balancing of the kernel is of use beside a placement.

use pagefold_base::memory::MAX_REMOTE_SHARE_OF_PLACED_MACHINE;

/// What to do about NUMA balancing, which moves pages to the threads that read them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BalancingAdvice {
    /// It is on, and all machines are placed: its page faults gain nothing more. They are few where memory has a policy.
    TurnOff,
    /// It is off, and machines read remote memory: it would move their memory.
    TurnOn,
    /// Leave it as it is.
    Keep,
}

/// The advice for a host on which NUMA balancing is on or off. `remote_shares` has the share of each virtual machine,
/// and whether it was placed.
pub fn balancing_advice(is_on: bool, machines: &[(Option<f64>, bool)]) -> BalancingAdvice {
    let is_local = |share: Option<f64>| share.is_some_and(|share| share <= MAX_REMOTE_SHARE_OF_PLACED_MACHINE);
    let all_placed = !machines.is_empty() && machines.iter().all(|&(share, placed)| placed && is_local(share));
    let any_remote =
        machines.iter().any(|&(share, _)| share.is_some_and(|share| share > MAX_REMOTE_SHARE_OF_PLACED_MACHINE));
    match is_on {
        true if all_placed => BalancingAdvice::TurnOff,
        false if any_remote => BalancingAdvice::TurnOn,
        _ => BalancingAdvice::Keep,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn balancing_is_turned_off_only_if_all_machines_are_placed() {
        let local = (Some(0.0), true);
        assert_eq!(balancing_advice(true, &[local, local]), BalancingAdvice::TurnOff);
        assert_eq!(balancing_advice(true, &[local, (Some(0.0), false)]), BalancingAdvice::Keep, "not placed");
        assert_eq!(balancing_advice(true, &[local, (Some(0.5), true)]), BalancingAdvice::Keep, "partly remote");
        assert_eq!(balancing_advice(true, &[local, (None, true)]), BalancingAdvice::Keep, "unknown");
        assert_eq!(balancing_advice(true, &[]), BalancingAdvice::Keep);
        assert_eq!(balancing_advice(false, &[local, (Some(0.5), false)]), BalancingAdvice::TurnOn);
        assert_eq!(balancing_advice(false, &[local]), BalancingAdvice::Keep);
    }
}
