//! All models in one program: it is compiled once, and the tests of all files run in parallel. See
//! [`models`] and each file.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p faultless --test models --target-dir target/loom loom_entry`
//! runs the models of one file.
#![cfg(loom)]

#[macro_use]
mod models;

mod listed;

mod loom_entry;
mod loom_flush;
mod loom_grace;
mod loom_huge;
mod loom_lists;
mod loom_locks;
mod loom_object;
mod loom_owner;
mod loom_space;
mod loom_stays;
mod loom_table;

#[test]
fn every_file_is_run() {
    listed::every_file_is_run("loom_", include_str!("loom.rs"));
}
