//! A keyed fingerprint of a page, with a proven bound on the collision probability of two pages.
//!
//! A page is read as pairs of 64-bit little-endian words (a1, b1), (a2, b2), ... and hashed with a random key of the
//! page's length, (k1, l1), (k2, l2), ...:
//!
//! ```text
//! h = sum over i of (ai + ki) * (bi + li)      in GF(2^64) modulo x^64 + x^4 + x^3 + x + 1
//! ```
//!
//! For two different pages, at least one pair differs, say in b. The difference of the two hashes is then
//! `ki * (bi + bi')` plus terms without `ki`. Because bi + bi' is not zero, the difference takes each of its 2^64
//! values equally often over a random `ki`. It is 0 with probability exactly 2^-64, for any two pages. This is the
//! half-multiplication form of multilinear hashing over GF(2^64) (D. Lemire and O. Kaser, "Faster 64-bit universal
//! hashing using carry-less multiplications", Journal of Cryptographic Engineering 6, 2016, section 4). The bound needs
//! a key that is drawn at random, unknown to the programs that fill the pages, and used for one census.
//!
//! The value 0 stands for the zero page, which is found by comparison. Any other page whose hash is 0 gets 1, which at
//! most doubles the bound.
//!
//! The multiplication is the carry-less one of PCLMULQDQ, VPCLMULQDQ or PMULL, chosen at run time. Sums stay unreduced
//! until the end, because reduction is linear. The 512-bit form is faster than XXH3, rapidhash and BLAKE3 and as fast
//! as gxhash (`make bench ARGS=hashes`). None of these has such a bound.

use std::io;

/// Number of 64-byte lines in a sample of a page.
const SAMPLED_LINES: usize = 4;

/// Hashes pages of one length under one key.
#[derive(Clone)]
pub struct Hasher {
    key: Vec<KeyLine>,
    multiply: CarrylessMultiply,
}

/// 64 bytes of key, aligned so that a vector load never crosses a cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct KeyLine([u64; 8]);

/// The implementations of the sum of products; all give the same 127 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CarrylessMultiply {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Pclmul,
    #[cfg(target_arch = "x86_64")]
    Vpclmul512,
    #[cfg(target_arch = "aarch64")]
    Pmull,
}

impl CarrylessMultiply {
    /// All implementations that this CPU can run, slowest first.
    fn available() -> Vec<Self> {
        #[allow(unused_mut)]
        let mut available = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("pclmulqdq") {
                available.push(Self::Pclmul);
            }
            if std::arch::is_x86_feature_detected!("avx512f") && std::arch::is_x86_feature_detected!("vpclmulqdq") {
                available.push(Self::Vpclmul512);
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("aes") {
            available.push(Self::Pmull);
        }
        available
    }
}

impl std::fmt::Debug for Hasher {
    /// Leaves out the key: programs that fill pages must not learn it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hasher").field("multiply", &self.multiply).finish_non_exhaustive()
    }
}

impl Hasher {
    /// A hasher for pages of `page_len` bytes, a multiple of 64, under a key from the kernel's random generator.
    pub fn with_random_key(page_len: usize) -> io::Result<Self> {
        let mut bytes = vec![0; page_len];
        let mut filled = 0;
        while filled < bytes.len() {
            filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())?;
        }
        Ok(Self::with_key(&bytes))
    }

    /// A hasher for pages as long as `key`, a multiple of 64 bytes. The bound holds only for a random key.
    ///
    /// # Panics
    /// If the key's length is no multiple of 64.
    pub fn with_key(key: &[u8]) -> Self {
        let (lines, rest) = key.as_chunks::<64>();
        assert!(rest.is_empty(), "a key of {} bytes is no multiple of 64", key.len());
        let key = lines.iter().map(|line| KeyLine(line_words(line))).collect();
        let multiply = *CarrylessMultiply::available().last().expect("the portable implementation is always available");
        Self { key, multiply }
    }

    /// The page length in bytes.
    pub fn page_len(&self) -> usize {
        self.key.len() * 64
    }

    /// Which instructions compute the hash, for reports.
    pub fn implementation(&self) -> &'static str {
        match self.multiply {
            CarrylessMultiply::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            CarrylessMultiply::Pclmul => "pclmulqdq",
            #[cfg(target_arch = "x86_64")]
            CarrylessMultiply::Vpclmul512 => "vpclmulqdq, 512 bit",
            #[cfg(target_arch = "aarch64")]
            CarrylessMultiply::Pmull => "pmull",
        }
    }

    /// The fingerprint of a page: 0 for the zero page only.
    ///
    /// # Panics
    /// If the page is not as long as the key.
    pub fn fingerprint(&self, page: &[u8]) -> u64 {
        let (lines, rest) = page.as_chunks::<64>();
        assert!(rest.is_empty() && lines.len() == self.key.len(), "a page of {} bytes", page.len());
        if are_lines_zero(lines) {
            return 0;
        }
        self.hash_lines(lines, &self.key).max(1)
    }

    /// 16 bits of the fingerprint of a few lines of a page, spread from its first to its last. Most changed pages
    /// differ in these lines, too, and reading them takes a fraction of the time.
    ///
    /// # Panics
    /// If the page is not as long as the key, or has fewer lines.
    pub fn fingerprint_sample(&self, page: &[u8]) -> u16 {
        let (lines, rest) = page.as_chunks::<64>();
        let has_enough_lines = lines.len() == self.key.len() && lines.len() >= SAMPLED_LINES;
        assert!(rest.is_empty() && has_enough_lines, "a page of {} bytes", page.len());
        let line_index = |i: usize| (lines.len() - 1) * i / (SAMPLED_LINES - 1);
        let (sampled, key): ([_; SAMPLED_LINES], [_; SAMPLED_LINES]) =
            (std::array::from_fn(|i| lines[line_index(i)]), std::array::from_fn(|i| self.key[line_index(i)]));
        self.hash_lines(&sampled, &key) as u16
    }

    /// The hash of some lines under the same number of key lines.
    fn hash_lines(&self, lines: &[[u8; 64]], key: &[KeyLine]) -> u64 {
        let (low, high) = match self.multiply {
            CarrylessMultiply::Portable => multiply_portable(lines, key),
            // SAFETY: `available` found the instructions on this CPU.
            #[cfg(target_arch = "x86_64")]
            CarrylessMultiply::Pclmul => unsafe { multiply_pclmul(lines, key) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            CarrylessMultiply::Vpclmul512 => unsafe { multiply_vpclmul512(lines, key) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            CarrylessMultiply::Pmull => unsafe { multiply_pmull(lines, key) },
        };
        reduce_modulo(low, high)
    }
}

fn line_words(line: &[u8; 64]) -> [u64; 8] {
    std::array::from_fn(|i| u64::from_le_bytes(line.as_chunks::<8>().0[i]))
}

/// Whether all bytes are zero. For most other pages it reads only one line of 64 bytes.
///
/// # Panics
/// If the length is no multiple of 64.
pub fn is_all_zeros(bytes: &[u8]) -> bool {
    let (lines, rest) = bytes.as_chunks::<64>();
    assert!(rest.is_empty(), "{} bytes", bytes.len());
    are_lines_zero(lines)
}

fn are_lines_zero(lines: &[[u8; 64]]) -> bool {
    lines.iter().all(|line| line_words(line).into_iter().fold(0, |all, word| all | word) == 0)
}

/// The 127-bit polynomial modulo x^64 + x^4 + x^3 + x + 1.
fn reduce_modulo(low: u64, high: u64) -> u64 {
    // x^64 is x^4 + x^3 + x + 1. So the high half is multiplied by it and added to the low half. The overflow of at
    // most four bits is reduced once more.
    let reduce_half = |half: u64| {
        let half = u128::from(half);
        half ^ half << 1 ^ half << 3 ^ half << 4
    };
    let folded = reduce_half(high);
    low ^ folded as u64 ^ reduce_half((folded >> 64) as u64) as u64
}

fn multiply_portable(lines: &[[u8; 64]], key: &[KeyLine]) -> (u64, u64) {
    let mut sum = 0u128;
    for (line, KeyLine(key)) in lines.iter().zip(key) {
        let line = line_words(line);
        for i in (0..8).step_by(2) {
            sum ^= carryless(line[i] ^ key[i], line[i + 1] ^ key[i + 1]);
        }
    }
    (sum as u64, (sum >> 64) as u64)
}

/// The carry-less product, four bits of `b` at a time.
fn carryless(a: u64, b: u64) -> u128 {
    let a = u128::from(a);
    let mut table = [0u128; 16];
    for i in 1..16 {
        table[i] = table[i >> 1] << 1 ^ if i & 1 == 1 { a } else { 0 };
    }
    (0..16).rev().fold(0, |product, nibble| product << 4 ^ table[(b >> (4 * nibble) & 15) as usize])
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse2,pclmulqdq")]
fn multiply_pclmul(lines: &[[u8; 64]], key: &[KeyLine]) -> (u64, u64) {
    use std::arch::x86_64::*;
    let mut sums = [_mm_setzero_si128(); 4];
    for (line, KeyLine(key)) in lines.iter().zip(key) {
        let line = line_words(line);
        for (i, sum) in sums.iter_mut().enumerate() {
            let pair = _mm_set_epi64x((line[2 * i + 1] ^ key[2 * i + 1]) as i64, (line[2 * i] ^ key[2 * i]) as i64);
            *sum = _mm_xor_si128(*sum, _mm_clmulepi64_si128::<0x10>(pair, pair));
        }
    }
    let sum = _mm_xor_si128(_mm_xor_si128(sums[0], sums[1]), _mm_xor_si128(sums[2], sums[3]));
    (_mm_cvtsi128_si64(sum) as u64, _mm_cvtsi128_si64(_mm_unpackhi_epi64(sum, sum)) as u64)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn multiply_vpclmul512(lines: &[[u8; 64]], key: &[KeyLine]) -> (u64, u64) {
    use std::arch::x86_64::*;
    // Four sums hide the multiplier's latency.
    let mut sums = [_mm512_setzero_si512(); 4];
    let (lines, rest) = lines.as_chunks::<4>();
    let (keys, key_rest) = key.as_chunks::<4>();
    for (lines, keys) in lines.iter().zip(keys) {
        for ((sum, line), key) in sums.iter_mut().zip(lines).zip(keys) {
            *sum = add_products(*sum, line, key);
        }
    }
    for (line, key) in rest.iter().zip(key_rest) {
        sums[0] = add_products(sums[0], line, key);
    }
    let sum = _mm512_xor_si512(_mm512_xor_si512(sums[0], sums[1]), _mm512_xor_si512(sums[2], sums[3]));
    let mut lanes = KeyLine([0; 8]);
    // SAFETY: `lanes` is 64 writable bytes, aligned to 64.
    unsafe { _mm512_store_si512(lanes.0.as_mut_ptr().cast(), sum) };
    let fold = |start: usize| lanes.0.iter().skip(start).step_by(2).fold(0, |all, lane| all ^ lane);
    (fold(0), fold(1))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn add_products(sum: std::arch::x86_64::__m512i, line: &[u8; 64], key: &KeyLine) -> std::arch::x86_64::__m512i {
    use std::arch::x86_64::*;
    // SAFETY: `line` is 64 readable bytes, and the load needs no alignment.
    let line = unsafe { _mm512_loadu_si512(line.as_ptr().cast()) };
    // SAFETY: a `KeyLine` is 64 readable bytes, aligned to 64.
    let key = unsafe { _mm512_load_si512(key.0.as_ptr().cast()) };
    let pairs = _mm512_xor_si512(line, key);
    _mm512_xor_si512(sum, _mm512_clmulepi64_epi128::<0x10>(pairs, pairs))
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon,aes")]
fn multiply_pmull(lines: &[[u8; 64]], key: &[KeyLine]) -> (u64, u64) {
    use std::arch::aarch64::vmull_p64;
    let mut sum = 0u128;
    for (line, KeyLine(key)) in lines.iter().zip(key) {
        let line = line_words(line);
        for i in (0..8).step_by(2) {
            sum ^= vmull_p64(line[i] ^ key[i], line[i + 1] ^ key[i + 1]);
        }
    }
    (sum as u64, (sum >> 64) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SplitMix64.
    fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        };
        (0..len / 8).flat_map(|_| next().to_le_bytes()).collect()
    }

    /// The definition, bit by bit: multiply and reduce in GF(2^64).
    fn field_product(a: u64, b: u64) -> u64 {
        let mut product = 0;
        for bit in (0..64).rev() {
            product = product << 1 ^ if product >> 63 == 1 { 0x1b } else { 0 };
            product ^= if b >> bit & 1 == 1 { a } else { 0 };
        }
        product
    }

    fn reference_hash(page: &[u8], key: &[u8]) -> u64 {
        let word = |bytes: &[u8], i: usize| u64::from_le_bytes(bytes[8 * i..8 * i + 8].try_into().unwrap());
        (0..page.len() / 8)
            .step_by(2)
            .fold(0, |sum, i| sum ^ field_product(word(page, i) ^ word(key, i), word(page, i + 1) ^ word(key, i + 1)))
    }

    #[test]
    fn all_implementations_match_the_definition() {
        let all = CarrylessMultiply::available();
        println!("implementations on this CPU: {all:?}");
        for len in [64, 192, 4096, 16384, 65536] {
            let key = random_bytes(1, len);
            for seed in 2..12 {
                let page = random_bytes(seed, len);
                let expected = reference_hash(&page, &key);
                for &multiply in &all {
                    let hasher = Hasher { multiply, ..Hasher::with_key(&key) };
                    assert_eq!(hasher.fingerprint(&page), expected, "{multiply:?}, {len} bytes");
                }
            }
        }
    }

    #[test]
    fn only_the_zero_page_hashes_to_zero() {
        let hasher = Hasher::with_random_key(4096).unwrap();
        assert_eq!(hasher.fingerprint(&[0; 4096]), 0);
        for position in [0, 7, 8, 4095] {
            let mut page = [0u8; 4096];
            page[position] = 1;
            assert_ne!(hasher.fingerprint(&page), 0, "byte {position}");
        }
        // A page equal to the key hashes to 0 and must not be taken for the zero page.
        let key = random_bytes(3, 4096);
        assert_eq!(Hasher::with_key(&key).fingerprint(&key), 1);
    }

    #[test]
    fn flipping_any_bit_changes_the_fingerprint() {
        let hasher = Hasher::with_random_key(4096).unwrap();
        let mut page = random_bytes(5, 4096);
        let original = hasher.fingerprint(&page);
        for bit in 0..4096 * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(hasher.fingerprint(&page), original, "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn sample_depends_on_exactly_its_lines() {
        for len in [256, 4096, 16384] {
            let (page, hasher) = (random_bytes(5, len), Hasher::with_key(&random_bytes(1, len)));
            let lines: Vec<usize> = (0..len / 64)
                .filter(|line| {
                    let mut changed = page.clone();
                    changed[64 * line + 9] ^= 1;
                    hasher.fingerprint_sample(&changed) != hasher.fingerprint_sample(&page)
                })
                .collect();
            let last = len / 64 - 1;
            assert_eq!(lines, [0, last / 3, 2 * last / 3, last], "{len} bytes");
        }
    }

    #[test]
    fn random_keys_differ() {
        let page = random_bytes(5, 4096);
        assert_ne!(
            Hasher::with_random_key(4096).unwrap().fingerprint(&page),
            Hasher::with_random_key(4096).unwrap().fingerprint(&page)
        );
    }
}
