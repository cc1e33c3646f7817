//! Whether a member merges at a safe point, for callers to whom it costs something to come to one.

use crate::decide::turn::SafePoint;
use crate::stillness::Stillness;
use crate::{Engine, Error, clock};
use pagefold_base::Bytes;
use std::time::Duration;

impl Engine {
    /// Whether [`Engine::merge`] would merge now, for callers to whom a safe point costs something: whether there is
    /// room for it within the bound, it is expected to pay with so much memory that is to be adopted before, and it is
    /// not for others to wait for. To be asked at each safe point; the next merge does not ask again.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn has_its_turn(&self, to_come: Bytes) -> Result<bool, Error> {
        self.with(|state| {
            state.granted = state.has_its_turn(clock(), &Stillness::promised(&self.claims), to_come);
            state.granted
        })
    }

    /// As [`Engine::has_its_turn`], for callers that come to safe points thousands of times a second: `None` if it has
    /// its turn; otherwise the moment of [`clock`] before which it need not ask again, but tell when its last safe point
    /// `before` was.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn next_turn(&self, before: Option<Duration>, to_come: Bytes) -> Result<Option<Duration>, Error> {
        self.with(|state| {
            let now = clock();
            state.before = before.or(state.before);
            state.granted = state.has_its_turn(now, &Stillness::promised(&self.claims), to_come);
            (!state.granted).then(|| SafePoint::next_check(now, state.domain.moment()))
        })
    }
}
