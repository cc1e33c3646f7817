//! Gives the shared library the name by which programs ask for it.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libpagefold.so.0");
    println!("cargo:rerun-if-changed=build.rs");
}
