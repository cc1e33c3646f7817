//! Whether a member merges at a safe point, for callers to which reaching a safe point has a cost.

use crate::decide::merge_turn::SafePoint;
use crate::write_exclusion::WriteExclusion;
use crate::{Engine, Error, merge_clock};
use pagefold_base::Bytes;
use std::time::Duration;

impl Engine {
    /// Whether [`Engine::merge`] would merge now, for callers to which reaching a safe point has a cost. Three
    /// conditions: the time budget allows a merge, it is expected to be profitable with `to_be_adopted` bytes adopted
    /// first, and no other member would have to wait for it. Call this at each safe point; the next merge does not
    /// check again.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn is_merge_due(&self, to_be_adopted: Bytes) -> Result<bool, Error> {
        self.with_state(|state| {
            state.is_turn_granted =
                state.is_merge_due(merge_clock(), &WriteExclusion::promised(&self.claims), to_be_adopted);
            state.is_turn_granted
        })
    }

    /// Like [`Engine::is_merge_due`], for callers that reach safe points thousands of times a second. `None` if a merge
    /// is due. Otherwise the time of [`merge_clock`] before which the caller need not check again; then it must pass
    /// the time of its last safe point as `previous_safe_point`.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn next_merge_check(
        &self,
        previous_safe_point: Option<Duration>,
        to_be_adopted: Bytes,
    ) -> Result<Option<Duration>, Error> {
        self.with_state(|state| {
            let now = merge_clock();
            state.last_safe_point = previous_safe_point.or(state.last_safe_point);
            state.is_turn_granted = state.is_merge_due(now, &WriteExclusion::promised(&self.claims), to_be_adopted);
            (!state.is_turn_granted).then(|| SafePoint::next_check(now, state.domain.next_merge_time()))
        })
    }
}
