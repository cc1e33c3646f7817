//! What the pages of a layout hold: pseudo-random words from a seed, or one of a few recognisable contents.
//!
//! The words are SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). Its
//! output function is a bijection, so pages of different seeds differ in their first word already, and a page that is
//! seen half rewritten equals neither its old nor its new content. Seeds of different origin collide with probability
//! n²/2⁶⁵ for n pages.

/// The step of the SplitMix64 sequence: 2⁶⁴ divided by the golden ratio.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

const SENTENCE: &[u8] = b"Pages that hold the same need to be held only once. ";

/// The byte of which [`pattern`] is made.
pub const PATTERN: u8 = 0x5a;

/// Where the content of a family of pages comes from: equal origins, equal pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin(u64);

impl Origin {
    /// The origin with these names, in this order.
    #[must_use]
    pub fn of(names: &[&str]) -> Self {
        // FNV-1a, 64 bits; a zero byte ends each name so that ("ab", "c") is not ("a", "bc").
        let bytes = names.iter().flat_map(|name| name.bytes().chain([0]));
        Self(bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)))
    }

    /// A number as good as random, by its place in the sequence of this origin.
    #[must_use]
    pub fn number(self, place: u64) -> u64 {
        mix(self.0 ^ mix(place))
    }

    /// Fill a page with the content of this origin that has this number.
    pub fn write(self, page: &mut [u8], number: u64) {
        let mut state = self.number(number);
        for word in page.chunks_mut(8) {
            word.copy_from_slice(&mix(state).to_ne_bytes()[..word.len()]);
            state = state.wrapping_add(STEP);
        }
    }
}

/// The output function of SplitMix64.
fn mix(state: u64) -> u64 {
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

/// Fill a page with printable text, always the same.
pub fn text(page: &mut [u8]) {
    for line in page.chunks_mut(SENTENCE.len()) {
        line.copy_from_slice(&SENTENCE[..line.len()]);
    }
}

/// Fill a page with one byte, [`PATTERN`].
pub fn pattern(page: &mut [u8]) {
    page.fill(PATTERN);
}

/// Fill a page as the first page of a program: the identification of a 64-bit little-endian ELF file
/// (`include/uapi/linux/elf.h`), then words, always the same.
pub fn elf(page: &mut [u8]) {
    const IDENTIFICATION: [u8; 16] = *b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0";
    Origin::of(&["elf"]).write(page, 0);
    page[..IDENTIFICATION.len()].copy_from_slice(&IDENTIFICATION);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn page(origin: Origin, number: u64) -> Vec<u8> {
        let mut page = vec![0; 4096];
        origin.write(&mut page, number);
        page
    }

    proptest! {
        #[test]
        fn pages_are_equal_exactly_when_their_origin_and_number_are(
            names in prop::array::uniform2("[a-c]{0,2}"), others in prop::array::uniform2("[a-c]{0,2}"),
            number in 0..4_u64, other in 0..4_u64,
        ) {
            let left = page(Origin::of(&[&names[0], &names[1]]), number);
            let right = page(Origin::of(&[&others[0], &others[1]]), other);
            prop_assert_eq!(left == right, names == others && number == other);
        }

        #[test]
        fn no_word_of_one_page_stands_at_its_place_in_another(number in any::<u64>(), other in any::<u64>()) {
            prop_assume!(number != other);
            let origin = Origin::of(&["x"]);
            let (left, right) = (page(origin, number), page(origin, other));
            prop_assert!(left.chunks(8).zip(right.chunks(8)).all(|(left, right)| left != right));
        }
    }

    #[test]
    fn recognisable_contents_are_what_they_say() {
        let mut page = vec![0; 4096];
        text(&mut page);
        assert!(page.iter().all(|byte| byte.is_ascii_graphic() || *byte == b' '));
        elf(&mut page);
        assert!(page.starts_with(b"\x7fELF"));
        pattern(&mut page);
        assert!(page.iter().all(|&byte| byte == PATTERN));
    }
}
