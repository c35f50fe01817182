//! All models in one program: it is compiled once, and the tests of all files run in parallel. See
//! [`support`] and each file.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p faultless --test models --target-dir target/loom entry::`
//! runs the models of one file.
#![cfg(loom)]

#[macro_use]
mod support;

#[path = "../listed.rs"]
mod listed;

mod entry;
mod flush;
mod grace;
mod huge;
mod lists;
mod locks;
mod object;
mod owner;
mod region_counter;
mod space;
mod table;
mod vma;

#[test]
fn every_file_is_run() {
    listed::every_file_is_run("models", include_str!("main.rs"));
}
