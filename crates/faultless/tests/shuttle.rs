//! All scenarios in one program: the subsystem is compiled once for their machine, and the tests of
//! all files run in parallel. See [`scenario`] and each file.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test --release -p faultless --test scenarios --target-dir target/shuttle shuttle_exit`
//! runs the scenarios of one file.
#![cfg(shuttle)]

#[macro_use]
mod scenario;

mod listed;
mod pairs;

mod shuttle_access;
mod shuttle_ahead;
mod shuttle_bounds;
mod shuttle_charges;
mod shuttle_compact;
mod shuttle_discard;
mod shuttle_evict;
mod shuttle_exit;
mod shuttle_fork;
mod shuttle_frames;
mod shuttle_grow;
mod shuttle_huge;
mod shuttle_locking;
mod shuttle_migrate;
mod shuttle_move;
mod shuttle_object;
mod shuttle_owner;
mod shuttle_pairs;
mod shuttle_pins;
mod shuttle_protect;
mod shuttle_reclaim;
mod shuttle_shards;
mod shuttle_side;
mod shuttle_stores;
mod shuttle_swap;
mod shuttle_unmap;

#[test]
fn every_file_is_run() {
    listed::every_file_is_run("shuttle_", include_str!("shuttle.rs"));
}
