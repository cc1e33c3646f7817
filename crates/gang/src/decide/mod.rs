//! Which threads form a gang, and whether gang scheduling helps.

pub mod demand;
pub mod gangs;
pub mod nodes;
pub mod slots;
pub mod trial;
