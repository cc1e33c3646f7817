//! The doctor: audits how a host merges, from facts to findings.
//!
//! [`doctor_facts`] collects the facts, [`monitor_facts`] and [`guest_facts`] those that QEMU's monitors and guests know;
//! [`decide`] has the rules; [`wire`] and [`text`] are the report.

#![forbid(unsafe_code)]

pub mod decide;
pub mod doctor_facts;
pub mod guest_facts;
pub mod monitor_facts;
pub mod setting_facts;
#[cfg(test)]
mod test_support;
pub mod text;
pub mod wire;
