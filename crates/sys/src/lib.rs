//! System calls without a safe wrapper elsewhere, and the vectorized fingerprint: most of Pagefold's unsafe code.
//!
//! All exported items are safe to call. Each unsafe block has one operation and its safety argument. This crate imports
//! no other Pagefold crate.

pub mod advise;
pub mod allocator;
pub mod child;
pub mod fault;
pub mod fingerprint;
pub mod forked_copy;
pub mod inject;
pub mod launch;
pub mod mapping;
pub mod namespace;
pub mod numa;
pub mod ofd_lock;
pub mod pagemap;
pub mod process_group;
pub mod signals;
pub mod userfault;
