//! Tests of whole spaces: against a naive model, and of chosen interleavings.

mod access;
mod adversary;
mod beside;
mod calls;
mod discards;
mod ended;
mod flushes;
mod guest;
mod lazy;
mod locks;
mod memory;
mod model;
mod objects;
mod orders;
mod owner;
mod policies;
mod prefault;
mod races;
mod soundness;
