//! Tests of whole spaces: against a naive model, and of chosen interleavings.

mod access;
mod beside;
mod calls;
mod devices;
mod discards;
mod ended;
mod flushes;
mod guest;
mod holes;
mod huge;
mod lazy;
mod locks;
mod lowest;
mod memory;
mod model;
mod objects;
mod orders;
mod owner;
mod pins;
mod policies;
mod predictors;
mod prefault;
mod races;
mod soundness;
mod store;
mod stores;
