//! Compares the fingerprint with common fast hashes, page by page, under the conditions of a census: in a buffer that
//! `process_vm_readv` has just filled. A second measurement uses pages that stay in the cache.

use crate::BenchmarkEffort;
use crate::findings::{Findings, MarkdownTable, PairedRatio, SampleSpread};
use crate::rounds::draw_orders;
use crate::target_process::{TargetLayout, TargetProcesses};
use anyhow::{Context, Result, ensure};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use pagefold_linux::BATCH_BYTES;
use pagefold_sys::fingerprint::Hasher;
use pagefold_sys::mapping::{Mapping, page_size};
use std::hint::black_box;
use std::io::IoSliceMut;
use std::time::{Duration, Instant};

/// A hash of a page.
struct HashCandidate {
    name: &'static str,
    /// Its guarantees, and the instructions that it was built with.
    note: String,
    hash: HashFn,
}

type HashFn = Box<dyn Fn(&[u8]) -> u64>;

const GXHASH_ABSENT_NOTE: &str = "gxhash is not in this table: it compiles only where the compiler may use AES \
                         instructions everywhere (`RUSTFLAGS=\"-C target-feature=+aes\"`, which `make bench` sets \
                         where the CPU has them).";

fn hash_candidates() -> Result<Vec<HashCandidate>> {
    let hasher = Hasher::with_random_key(page_size())?;
    let instructions = hasher.implementation();
    let static_width = if cfg!(target_feature = "avx2") { "256 bit" } else { "128 bit" };
    Ok(vec![
        HashCandidate {
            name: "pagefold",
            note: format!("64 bit, keyed, collisions proven 2^-64 a pair; {instructions}"),
            hash: Box::new(move |page| hasher.fingerprint(page)),
        },
        HashCandidate {
            name: "XXH3 (xxhash-rust)",
            note: format!("64 bit; {static_width}, chosen when built"),
            hash: Box::new(xxhash_rust::xxh3::xxh3_64),
        },
        HashCandidate {
            name: "XXH3 (twox-hash)",
            note: "64 bit; widest of up to 256 bit, chosen at run time".to_owned(),
            hash: Box::new(twox_hash::XxHash3_64::oneshot),
        },
        HashCandidate {
            name: "rapidhash",
            note: "64 bit; scalar multiplications".to_owned(),
            hash: Box::new(rapidhash::v3::rapidhash_v3),
        },
        #[cfg(target_feature = "aes")]
        HashCandidate {
            name: "gxhash",
            note: "64 bit; AES rounds, 128 bit wide (256 wants a nightly compiler)".to_owned(),
            hash: Box::new(|page| gxhash::gxhash64(page, 0)),
        },
        HashCandidate {
            name: "blake3",
            note: "cryptographic, cut to 64 bit; widest vectors, chosen at run time".to_owned(),
            hash: Box::new(|page| {
                let hash = blake3::hash(page);
                u64::from_le_bytes(*hash.as_bytes().first_chunk().expect("32 bytes"))
            }),
        },
    ])
}

/// Measure all hashes.
pub fn measure(effort: BenchmarkEffort) -> Result<Findings> {
    let (bytes, rounds) = if effort.quick { (16 << 20, 3) } else { (256 << 20, 15) };
    let targets = TargetProcesses::start([TargetLayout { bytes, seed: 2, ..TargetLayout::default() }])?;
    let (pid, address) = (nix::unistd::Pid::from_raw(targets.pids()[0].try_into()?), targets.addresses()[0]);
    let mut buffer = Mapping::anonymous(BATCH_BYTES)?;
    let candidates = hash_candidates()?;
    let mut findings = Findings::new("hash,round,bytes,seconds_read,seconds_hash_after_read,seconds_hash_in_cache");
    let mut fresh: Vec<Vec<f64>> = vec![Vec::new(); candidates.len()];
    let mut with_read = fresh.clone();
    let mut cached = fresh.clone();
    // The round before the first one warms up and is not counted.
    let indices: Vec<usize> = (0..candidates.len()).collect();
    for (round, order) in draw_orders(&indices, rounds + 1).into_iter().enumerate() {
        for chosen in order {
            let HashCandidate { name, hash, .. } = &candidates[chosen];
            let (mut reading, mut hashing, mut in_cache) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
            for offset in (0..bytes).step_by(BATCH_BYTES) {
                let remote = RemoteIoVec { base: address as usize + offset, len: BATCH_BYTES };
                let begin = Instant::now();
                let read = process_vm_readv(pid, &mut [IoSliceMut::new(buffer.as_mut_slice())], &[remote])?;
                ensure!(read == BATCH_BYTES, "a short read");
                let filled = Instant::now();
                hash_pages(hash, buffer.as_slice());
                let hashed = Instant::now();
                hash_pages(hash, buffer.as_slice());
                in_cache += hashed.elapsed();
                reading += filled - begin;
                hashing += hashed - filled;
            }
            if round > 0 {
                let [reading, hashing, in_cache] = [reading, hashing, in_cache].map(|time| time.as_secs_f64());
                fresh[chosen].push(bytes as f64 / hashing / 1e9);
                with_read[chosen].push(bytes as f64 / (reading + hashing) / 1e9);
                cached[chosen].push(bytes as f64 / in_cache / 1e9);
                findings.samples.push(format!("{name},{round},{bytes},{reading:.6},{hashing:.6},{in_cache:.6}"));
            }
        }
    }
    let mut table = MarkdownTable::new(
        format!("Hashing pages of {} bytes in a buffer of {} KiB", page_size(), BATCH_BYTES >> 10),
        &["hash", "what it is", "just read GB/s", "in cache GB/s", "read and hash GB/s", "rate against ours"],
    );
    table.text_columns = 2;
    for (i, candidate) in candidates.iter().enumerate() {
        let relative_rate =
            PairedRatio::from_rounds(with_read[i].iter().zip(&with_read[0]).map(|(rate, baseline)| rate / baseline))
                .context("no rounds")?;
        let median = |samples: &[f64]| format!("{:.1}", SampleSpread::from_samples(samples.iter().copied()).median);
        table.rows.push(vec![
            candidate.name.to_owned(),
            candidate.note.clone(),
            median(&fresh[i]),
            median(&cached[i]),
            median(&with_read[i]),
            if i == 0 { "1".to_owned() } else { relative_rate.format_percent() },
        ]);
    }
    table.notes.push(
        "Base pages, read by `process_vm_readv`. \"Rate against ours\" compares reading and hashing together, which is \
         what a census does: geometric means of the ratios within rounds, with 95 % intervals. Ours also tells pages \
         of zeros apart."
            .to_owned(),
    );
    if cfg!(not(target_feature = "aes")) {
        table.notes.push(GXHASH_ABSENT_NOTE.to_owned());
    }
    findings.tables.push(table);
    Ok(findings)
}

fn hash_pages(hash: &dyn Fn(&[u8]) -> u64, buffer: &[u8]) {
    black_box(buffer.chunks_exact(page_size()).fold(0, |sum, page| sum ^ hash(page)));
}
