//! The content of a page: its fingerprint and its kind.

/// A 64-bit fingerprint of a page's bytes. Each census uses a new key, so fingerprints only tell whether two pages are
/// equal. [`Fingerprint::ZERO_PAGE`] stands for the zero page only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint(pub u64);

impl Fingerprint {
    /// The zero page, found by comparison and not by hashing.
    pub const ZERO_PAGE: Self = Self(0);

    /// Half of the fingerprint, to save memory. Equal contents have equal halves; two different contents have equal
    /// halves with a probability of one in four billion. The bits are spread first, because fingerprints of a recording
    /// may be small numbers.
    pub const fn to_half(self) -> u32 {
        (self.0.wrapping_mul(SPREAD_MULTIPLIER) >> 32) as u32
    }

    /// The fingerprint for a content of which only half a fingerprint is known.
    pub const fn from_half(half: u32) -> Self {
        Self(((half as u64) << 32).wrapping_mul(SPREAD_INVERSE))
    }
}

/// The multiplier that spreads fingerprints (Fibonacci hashing: D. Knuth, The Art of Computer Programming 3, 6.4), and
/// its inverse modulo 2^64.
const SPREAD_MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
const SPREAD_INVERSE: u64 = 0xf1de_83e1_9937_733d;
const _: () = assert!(SPREAD_MULTIPLIER.wrapping_mul(SPREAD_INVERSE) == 1);

/// An upper bound of the probability that any two different contents among `distinct` share a fingerprint.
///
/// Two given contents collide with probability at most 2^-63 (`pagefold-sys`, `fingerprint`: 2^-64 for the hash, and
/// 2^-64 for the value that is reserved for the zero page). The bound is the sum over all pairs.
pub fn collision_probability(distinct: u64) -> f64 {
    let n = distinct as f64;
    (n * (n - 1.0).max(0.0) / 2.0 / 2f64.powi(63)).min(1.0)
}

/// The kind of a page's content, derived from its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ContentKind {
    /// Only zero bytes.
    Zero,
    /// One repeated eight-byte word, for example from allocators and memory tests.
    Pattern(u64),
    /// The first page of an ELF file.
    Elf,
    /// Printable ASCII or well-formed UTF-8 text, possibly padded with zeros at its end.
    Text,
    /// None of these.
    Other,
}

impl ContentKind {
    /// The kind of a page's bytes.
    pub fn classify(page: &[u8]) -> Self {
        if page.iter().all(|&byte| byte == 0) {
            return Self::Zero;
        }
        if let Some((first, rest)) = page.as_chunks::<8>().0.split_first()
            && rest.iter().all(|word| word == first)
        {
            return Self::Pattern(u64::from_le_bytes(*first));
        }
        if page.starts_with(b"\x7fELF") {
            return Self::Elf;
        }
        let end = page.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
        if is_text(&page[..end]) { Self::Text } else { Self::Other }
    }
}

/// Whether the bytes are UTF-8 without control characters except white space. A page may cut a character at its end, so
/// an incomplete last character is accepted.
fn is_text(bytes: &[u8]) -> bool {
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) if error.error_len().is_none() => {
            std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or_default()
        }
        Err(_) => return false,
    };
    !text.is_empty() && text.chars().all(|c| !c.is_control() || c.is_whitespace())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn half_fingerprint_round_trips(half: u32) {
            prop_assert_eq!(Fingerprint::from_half(half).to_half(), half);
        }
    }

    #[test]
    fn content_kinds_are_classified() {
        let check = |page: &[u8], kind| assert_eq!(ContentKind::classify(page), kind);
        check(&[0; 4096], ContentKind::Zero);
        check(&[0x5a; 4096], ContentKind::Pattern(0x5a5a_5a5a_5a5a_5a5a));
        let mut elf = [1u8; 4096];
        elf[..4].copy_from_slice(b"\x7fELF");
        check(&elf, ContentKind::Elf);
        let mut text = [0u8; 4096];
        text[..13].copy_from_slice("Grüße, Welt\n".as_bytes().get(..13).unwrap());
        check(&text, ContentKind::Text);
        let mut other = [0u8; 4096];
        other[77] = 0xff;
        check(&other, ContentKind::Other);
    }

    #[test]
    fn collisions_are_bounded() {
        assert_eq!(collision_probability(0), 0.0);
        assert_eq!(collision_probability(1), 0.0);
        // 1 TiB of distinct 4 KiB pages.
        assert!(collision_probability(1 << 28) < 0.004);
        assert_eq!(collision_probability(u64::MAX), 1.0);
    }
}
