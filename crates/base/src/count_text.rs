//! Counts with their nouns, in messages and reports.

use std::fmt::Display;

/// A count with its noun, which takes an `s` in the plural: `1 node`, `2 nodes`.
pub fn count_text<N: Copy + Display + PartialEq + From<u8>>(count: N, noun: &str) -> String {
    let ending = if count == N::from(1) { "" } else { "s" };
    format!("{count} {noun}{ending}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_is_singular() {
        assert_eq!(count_text(0_usize, "node"), "0 nodes");
        assert_eq!(count_text(1_u32, "virtual machine"), "1 virtual machine");
        assert_eq!(count_text(2_u64, "node"), "2 nodes");
    }
}
