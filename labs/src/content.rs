//! Contents of pages in a layout: pseudo-random words from a seed, or one of a few recognizable contents.
//!
//! The words are SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). Its
//! output function is a bijection, so pages of different seeds differ in their first word already. A page that is read
//! while it is rewritten equals neither its old nor its new content. Seeds of different origin collide with probability
//! n²/2⁶⁵ for n pages.

/// The step of the SplitMix64 sequence: 2⁶⁴ divided by the golden ratio.
const SPLITMIX_STEP: u64 = 0x9e37_79b9_7f4a_7c15;

const TEXT_SENTENCE: &[u8] = b"Pages that hold the same need to be held only once. ";

/// The byte that fills the page of [`fill_pattern`].
pub const PATTERN_BYTE: u8 = 0x5a;

/// The origin of the content of a family of pages: equal origins give equal pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContentOrigin(u64);

impl ContentOrigin {
    /// The origin with these names, in this order.
    #[must_use]
    pub fn from_names(names: &[&str]) -> Self {
        // FNV-1a, 64 bits; a zero byte ends each name so that ("ab", "c") is not ("a", "bc").
        let bytes = names.iter().flat_map(|name| name.bytes().chain([0]));
        Self(bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)))
    }

    /// A pseudo-random number of this origin, by its index in the sequence.
    #[must_use]
    pub fn random_number(self, index: u64) -> u64 {
        splitmix64(self.0 ^ splitmix64(index))
    }

    /// Fill a page with the content of this origin that has this number.
    pub fn fill_page(self, page: &mut [u8], number: u64) {
        let mut state = self.random_number(number);
        for word in page.chunks_mut(8) {
            word.copy_from_slice(&splitmix64(state).to_ne_bytes()[..word.len()]);
            state = state.wrapping_add(SPLITMIX_STEP);
        }
    }
}

/// The output function of SplitMix64.
fn splitmix64(state: u64) -> u64 {
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

/// Fill a page with printable text, always the same.
pub fn fill_text(page: &mut [u8]) {
    for line in page.chunks_mut(TEXT_SENTENCE.len()) {
        line.copy_from_slice(&TEXT_SENTENCE[..line.len()]);
    }
}

/// Fill a page with one byte, [`PATTERN_BYTE`].
pub fn fill_pattern(page: &mut [u8]) {
    page.fill(PATTERN_BYTE);
}

/// Fill a page like the first page of a program: the identification of a 64-bit little-endian ELF file
/// (`include/uapi/linux/elf.h`), then constant words.
pub fn fill_elf_header(page: &mut [u8]) {
    const ELF_IDENT: [u8; 16] = *b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0";
    ContentOrigin::from_names(&["elf"]).fill_page(page, 0);
    page[..ELF_IDENT.len()].copy_from_slice(&ELF_IDENT);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn page_words(origin: ContentOrigin, number: u64) -> Vec<u8> {
        let mut page = vec![0; 4096];
        origin.fill_page(&mut page, number);
        page
    }

    proptest! {
        #[test]
        fn pages_are_equal_iff_origin_and_number_are(
            names in prop::array::uniform2("[a-c]{0,2}"), others in prop::array::uniform2("[a-c]{0,2}"),
            number in 0..4_u64, other in 0..4_u64,
        ) {
            let left = page_words(ContentOrigin::from_names(&[&names[0], &names[1]]), number);
            let right = page_words(ContentOrigin::from_names(&[&others[0], &others[1]]), other);
            prop_assert_eq!(left == right, names == others && number == other);
        }

        #[test]
        fn pages_differ_in_every_word(number in any::<u64>(), other in any::<u64>()) {
            prop_assume!(number != other);
            let origin = ContentOrigin::from_names(&["x"]);
            let (left, right) = (page_words(origin, number), page_words(origin, other));
            prop_assert!(left.chunks(8).zip(right.chunks(8)).all(|(left, right)| left != right));
        }
    }

    #[test]
    fn text_pattern_and_elf_pages_are_recognizable() {
        let mut page = vec![0; 4096];
        fill_text(&mut page);
        assert!(page.iter().all(|byte| byte.is_ascii_graphic() || *byte == b' '));
        fill_elf_header(&mut page);
        assert!(page.starts_with(b"\x7fELF"));
        fill_pattern(&mut page);
        assert!(page.iter().all(|&byte| byte == PATTERN_BYTE));
    }
}
