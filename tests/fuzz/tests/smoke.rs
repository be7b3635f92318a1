//! Every reader, fed with its corpus and with seeded mutations of it: what `cargo xtask fuzz` does, for a
//! moment.
//! It never checks what is read: a panic is the failure.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed step fails the test")]

use std::fs;
use std::path::{Path, PathBuf};

use becket_fuzz::TARGETS;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

/// Bytes made of each corpus.
const ROUNDS: u64 = 20_000;

/// The files of a corpus, in the order of their names.
fn corpus(name: &str) -> Vec<(String, Vec<u8>)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let mut files: Vec<_> = fs::read_dir(&dir)
        .unwrap_or_else(|error| panic!("{}: {error}", dir.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    let named = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
    files.iter().map(|path| (named(path), fs::read(path).unwrap())).collect()
}

/// Other bytes, a little.
fn mutated(corpus: &[(String, Vec<u8>)], random: &mut SmallRng) -> Vec<u8> {
    let mut bytes = corpus[random.random_range(0..corpus.len())].1.clone();
    for _ in 0..random.random_range(1..8) {
        if bytes.is_empty() {
            return bytes;
        }
        let at = random.random_range(0..bytes.len());
        let some = random.random_range(1..=bytes.len().min(16)).min(bytes.len() - at);
        match random.random_range(0..7) {
            0 => bytes[at] ^= 1 << random.random_range(0..8),
            1 => bytes[at] = random.random(),
            2 => bytes[at..at + some].fill(if random.random() { 0xff } else { 0 }),
            3 => bytes.truncate(at),
            4 => {
                let to = random.random_range(0..=bytes.len() - some);
                bytes.copy_within(at..at + some, to);
            }
            5 => drop(bytes.splice(at..at, vec![random.random(); some])),
            _ => drop(bytes.drain(at..at + some)),
        }
    }
    bytes
}

#[test]
fn no_reader_minds_any_bytes() {
    for (name, read) in TARGETS {
        let corpus = corpus(name);
        assert!(!corpus.is_empty(), "{name} has a corpus");
        for (file, bytes) in &corpus {
            // One that is not understood leads no fuzzer anywhere.
            let sketch = file.starts_with("found-") || file.starts_with("sketch-");
            assert!(read(bytes) || sketch, "{name}/{file} is sound");
        }
        read(&[]);
        for seed in 0..ROUNDS {
            // The panic's place in the output identifies the seed, so that it can be fed alone.
            let bytes = mutated(&corpus, &mut SmallRng::seed_from_u64(seed));
            let fed = std::panic::catch_unwind(|| read(&bytes));
            assert!(fed.is_ok(), "{name}, seed {seed}");
        }
    }
}

#[test]
fn every_corpus_has_a_reader() {
    for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(becket_fuzz::target(&name).is_some(), "{name}");
    }
}
