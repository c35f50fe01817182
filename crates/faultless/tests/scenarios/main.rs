//! All scenarios in one program: the subsystem is compiled once for their machine, and the tests of
//! all files run in parallel. See [`support`] and each file.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test --release -p faultless --test scenarios --target-dir target/shuttle exit::`
//! runs the scenarios of one file.
#![cfg(shuttle)]

#[macro_use]
mod support;

#[path = "../listed.rs"]
mod listed;
#[path = "../pairs/mod.rs"]
mod pairs;

mod access;
mod ahead;
mod bounds;
mod charges;
mod compact;
mod discard;
mod evict;
mod exit;
mod fork;
mod frames;
mod grow;
mod huge;
mod locking;
mod migrate;
mod moves;
mod object;
mod owner;
mod pair_matrix;
mod pins;
mod protect;
mod reclaim;
mod shards;
mod side;
mod stores;
mod swap;
mod unmap;

#[test]
fn every_file_is_run() {
    listed::every_file_is_run("scenarios", include_str!("main.rs"));
}

/// Each mutation point is named by a check that fails without the step: a model, a scenario, or the
/// explicit model.
#[test]
fn every_mutation_point_is_named_by_a_check() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &std::path::Path| std::fs::read_to_string(path).expect("a source file");
    let mut checks = String::new();
    for folder in ["tests/models", "tests/scenarios", "../model/tests"] {
        for file in root.join(folder).read_dir().expect("a folder of tests") {
            let path = file.expect("a file").path();
            if path.extension().is_some_and(|extension| extension == "rs") {
                checks.push_str(&read(&path));
            }
        }
    }
    let words: std::collections::HashSet<_> =
        checks.split(|letter: char| !letter.is_alphanumeric()).collect();
    let points = read(&root.join("src/sync/mutant.rs"));
    let (_, points) = points.split_once("pub enum Mutant {").expect("the mutation points");
    let (points, _) = points.split_once("\n}").expect("the end of the mutation points");
    let names = points.lines().map(str::trim).filter(|line| line.ends_with(','));
    let names = names.filter_map(|line| line.split([' ', ',']).next());
    let (unchecked, checked): (Vec<_>, Vec<_>) = names
        .filter(|name| name.starts_with(|letter: char| letter.is_uppercase()))
        .partition(|name| !words.contains(name));
    assert!(unchecked.is_empty() && checked.len() > 100, "{unchecked:?} of {}", checked.len());
}
