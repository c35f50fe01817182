//! Every target on a fixed corpus, and on mutations of the corpus that are the same in every run.

use faultless_fuzzing::TARGETS;
use std::fs;
use std::path::{Path, PathBuf};

/// Returns the files of a target's corpus, and the number of mutations to try.
fn corpus(target: &str) -> (Vec<PathBuf>, u32) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (folder, name, mutations) = match target {
        "trace" => ("crates/trace/recordings", "redis.fltrace", 300),
        "perf" => ("crates/trace/tests/data", ".perf.data", 600),
        "body" => ("fuzz/corpus/body", "", 1500),
        "addresses" => ("fuzz/corpus/addresses", "", 3000),
        "elf" => ("fuzz/corpus/elf", "", 6000),
        _ => ("fuzz/corpus/operations", "", 1200),
    };
    let files = fs::read_dir(root.join(folder)).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = files.filter(|path| path.to_string_lossy().ends_with(name)).collect();
    files.sort();
    assert!(!files.is_empty(), "no corpus in {folder}");
    (files, mutations)
}

/// A few bytes changed, cut out, put in or doubled.
fn mutate(bytes: &mut Vec<u8>, random: &mut fastrand::Rng) {
    for _ in 0..random.u32(1..6) {
        let at = random.usize(..=bytes.len());
        let len = random.usize(1..=16).min(bytes.len() - at);
        match random.u32(0..8) {
            0 => drop(bytes.drain(at..at + len)),
            1 => bytes.truncate(at),
            2 => bytes.splice(at..at, (0..len).map(|_| random.u8(..))).for_each(drop),
            3 => {
                let copy = bytes[at..at + len].to_vec();
                let to = random.usize(..=bytes.len());
                drop(bytes.splice(to..to, copy));
            }
            4 => bytes[at..at + len].fill(*random.choice([0, 0xff].iter()).unwrap_or(&0)),
            _ if at < bytes.len() => {
                let value =
                    [0, 1, 0x7f, 0x80, 0xff, random.u8(..), bytes[at] ^ 1 << random.u32(..8)];
                bytes[at] = value[random.usize(..value.len())];
            }
            _ => {}
        }
    }
}

fn run(target: &str) {
    let (_, drive) = TARGETS.into_iter().find(|(name, _)| *name == target).unwrap();
    let (files, mutations) = corpus(target);
    let mut random = fastrand::Rng::with_seed(4);
    let files: Vec<_> = files.iter().map(|path| fs::read(path).unwrap()).collect();
    let told = |bytes: &[u8]| {
        struct Told<'b>(&'b [u8]);
        impl Drop for Told<'_> {
            fn drop(&mut self) {
                if std::thread::panicking() {
                    let path = std::env::temp_dir().join("faultless-fuzzing-failed");
                    let _ = fs::write(&path, self.0);
                    eprintln!("the input is in {}", path.display());
                }
            }
        }
        let told = Told(bytes);
        drive(bytes);
        drop(told);
    };
    drive(&[]);
    files.iter().for_each(|bytes| told(bytes));
    for turn in 0..mutations {
        let mut bytes = files[turn as usize % files.len()].clone();
        mutate(&mut bytes, &mut random);
        told(&bytes);
    }
    for _ in 0..mutations / 4 {
        let noise: Vec<u8> = (0..random.usize(..2000)).map(|_| random.u8(..)).collect();
        told(&noise);
    }
}

#[test]
fn recordings() {
    run("trace");
}

#[test]
fn bodies_of_recordings() {
    run("body");
}

#[test]
fn files_of_perf() {
    run("perf");
}

#[test]
fn traces_of_addresses() {
    run("addresses");
}

#[test]
fn programs() {
    run("elf");
}

#[test]
fn sequences_of_operations() {
    run("operations");
}
