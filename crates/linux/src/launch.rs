//! Starts a program in place of this one, enrolled: the system part of `pagefold run`.

pub use pagefold_sys::launch::{
    CompanionHandle, StderrPolicy, disable_address_randomization, discard_pending_sigchld, exec_program, has_no_reader,
    spawn_companion,
};
pub use pagefold_sys::mapping::set_merge_any;
pub use pagefold_sys::userfault::UserfaultFd;
