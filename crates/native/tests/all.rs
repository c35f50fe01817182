//! All tests of the native machine in one program: the subsystem is compiled once for this machine,
//! and the tests of all files run in parallel. See each file.
//!
//! `cargo test -p faultless-native --test all stress_owners` runs the tests of one file.

mod common;
mod differential;

mod access;
mod checked;
mod coherence;
mod differential_files;
mod fork;
mod huge;
mod pairs;
mod shootdown;
mod stress_compact;
mod stress_evict;
mod stress_failing;
mod stress_files;
mod stress_huge;
mod stress_limits;
mod stress_migrate;
mod stress_owners;
mod stress_planted;
mod stress_rounds;
mod stress_stores;
mod stress_swap;
mod upper_levels;
mod zeroing;
