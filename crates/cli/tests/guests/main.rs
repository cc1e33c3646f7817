//! Tests that boot guests, in one program: an emulated CPU takes one CPU of the host, so two of them run at the same time.

#![forbid(unsafe_code)]

mod doctor_guest;
#[cfg(all(feature = "gang", target_arch = "x86_64"))]
mod vcpu_gang;
