//! The kernel's text formats. Functions of bytes, never of a system.
