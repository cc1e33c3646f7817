//! Pseudo-random numbers derived from other numbers.

/// The finalizer of SplitMix64 (G. L. Steele, D. Lea, C. H. Flood, OOPSLA 2014). It is a bijection, and results of
/// adjacent numbers are uncorrelated.
pub const fn splitmix64(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers of the generator with the seed 0 (its reference implementation by S. Vigna).
    #[test]
    fn output_matches_the_reference() {
        let next = |step: u64| splitmix64(step.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        assert_eq!([next(0), next(1), next(2)], [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4, 0x06c4_5d18_8009_454f]);
    }
}
