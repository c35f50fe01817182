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
