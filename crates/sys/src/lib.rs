//! The unsafe corner: system calls without a safe wrapper elsewhere, and the vectorised fingerprint.
//!
//! Everything exported is safe to call. Each unsafe block holds one operation and its argument. Nothing of Pagefold is
//! imported here.

pub mod advise;
pub mod allocator;
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
pub mod signals;
pub mod userfault;
