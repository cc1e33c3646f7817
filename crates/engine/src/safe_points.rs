//! Whether a member merges at a safe point, for callers to whom it costs something to come to one.

use crate::decide::merge_turn::SafePoint;
use crate::write_exclusion::WriteExclusion;
use crate::{Engine, Error, merge_clock};
use pagefold_base::Bytes;
use std::time::Duration;

impl Engine {
    /// Whether [`Engine::merge`] would merge now, for callers to whom a safe point costs something: whether there is
    /// room for it within the bound, it is expected to pay with so much memory that is to be adopted before, and it is
    /// not for others to wait for. To be asked at each safe point; the next merge does not ask again.
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

    /// As [`Engine::is_merge_due`], for callers that come to safe points thousands of times a second: `None` if it has
    /// its turn; otherwise the moment of [`merge_clock`] before which it need not ask again, but tell when its last safe point
    /// `before` was.
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
