//! The doctor: audits how a host merges, from facts to findings.
//!
//! [`doctor_facts`] collects the facts, [`guest_facts`] those of guests, [`decide`] has the rules; [`wire`] and [`text`] are the report.

#![forbid(unsafe_code)]

pub mod decide;
pub mod doctor_facts;
pub mod guest_facts;
pub mod setting_facts;
#[cfg(test)]
mod test_support;
pub mod text;
pub mod wire;
