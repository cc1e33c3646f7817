//! Starting a program in place of this one, enrolled: the system's part of `pagefold run`.

pub use pagefold_sys::launch::{
    Accompanied, Errors, accompany, become_program, fix_addresses, forget_children, has_no_reader,
};
pub use pagefold_sys::mapping::merge_any;
pub use pagefold_sys::userfault::UserFault;
