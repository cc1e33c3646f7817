//! Pure decisions of the user-space engine.

pub mod huge_page_loss;
pub mod merge_turn;
pub mod page_note;
pub mod time_budget;
