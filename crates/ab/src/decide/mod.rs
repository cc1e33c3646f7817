//! The pure half of an experiment: its design, its statistics, its stopping rule and its verdict.
//!
//! [`design`] draws the schedule of blocks before the campaign starts. [`noise`] flags blocks by the readings of their
//! environment, before a sample is looked at. [`analysis`] turns the samples of the blocks into verdicts with
//! [`statistics`]. [`study`] says how much a workload varies
//! without a change, before a campaign is designed. [`stopping`] says at which numbers of blocks a campaign may stop, and at
//! which level it then judges. [`injection`] says when an injected slow-down stops a run.
//!
//! All randomness comes from a seed, so that a schedule and an analysis can be repeated from the record of a campaign.

pub mod analysis;
pub mod design;
pub mod injection;
pub mod noise;
pub mod statistics;
pub mod stopping;
pub mod study;
