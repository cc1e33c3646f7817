//! Pure decisions of the user-space engine.

pub mod allowance;
pub mod hot;
pub mod huge;
pub mod turn;
