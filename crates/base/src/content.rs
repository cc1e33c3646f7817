//! The content of a page: its fingerprint, its place in the order of bytes, and its kind.

use std::num::NonZeroU64;

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

/// A number that sorts pages as a comparison of their bytes does (`memcmp`), as far as it reaches: how many zeros precede
/// the first other byte, and six bytes from there. Most contents differ in these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct OrderKey(NonZeroU64);

impl OrderKey {
    /// The key of a page's bytes; `None` if all are zero.
    pub fn of_page(page: &[u8]) -> Option<Self> {
        let start = page.iter().position(|&byte| byte != 0)?;
        let bytes = page[start..].iter().chain(std::iter::repeat(&0)).take(ORDER_KEY_BYTES);
        let bytes = bytes.fold(0, |number, &byte| number << 8 | u64::from(byte));
        // The more zeros precede, the lower is the page in the order.
        let place = u64::from(u16::MAX).saturating_sub(start as u64);
        NonZeroU64::new(place << (8 * ORDER_KEY_BYTES) | bytes).map(Self)
    }

    /// The key as a number, for a place where 0 stands for none.
    pub const fn to_bits(key: Option<Self>) -> u64 {
        match key {
            Some(Self(bits)) => bits.get(),
            None => 0,
        }
    }

    /// The key of a number from [`Self::to_bits`].
    pub fn from_bits(bits: u64) -> Option<Self> {
        NonZeroU64::new(bits).map(Self)
    }
}

/// Bytes of a page's content in an [`OrderKey`], beside two for their place.
const ORDER_KEY_BYTES: usize = 6;

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

    /// Two pages with the same first bytes.
    fn related_pages() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
        let bytes = || proptest::collection::vec(prop_oneof![3 => Just(0u8), 1 => any::<u8>()], 24);
        (bytes(), bytes(), 0..=24usize).prop_map(|(one, mut other, equal)| {
            other[..equal].copy_from_slice(&one[..equal]);
            (one, other)
        })
    }

    proptest! {
        #[test]
        fn order_keys_sort_as_bytes_do((one, other) in related_pages()) {
            let keys = [&one, &other].map(|page| OrderKey::of_page(page));
            if one <= other {
                prop_assert!(keys[0] <= keys[1], "{one:?} {other:?} {keys:?}");
            }
            let differ = one.iter().zip(&other).position(|(a, b)| a != b);
            let reach = |page: &Vec<u8>| page.iter().position(|&byte| byte != 0).map_or(0, |start| start + ORDER_KEY_BYTES);
            if differ.is_some_and(|place| place < reach(&one).min(reach(&other))) {
                prop_assert_ne!(keys[0], keys[1]);
            }
            prop_assert_eq!(OrderKey::from_bits(OrderKey::to_bits(keys[0])), keys[0]);
        }

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
