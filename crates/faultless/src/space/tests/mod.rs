//! Tests of whole spaces: against a naive model, and of chosen interleavings.

mod access;
mod beside;
mod calls;
mod collapses;
mod devices;
mod discards;
mod ended;
mod holes;
mod locks;
mod lowest;
mod mbind;
pub(crate) mod migration_flushes;
pub(crate) mod migrations;
mod model;
mod orders;
mod owner;
mod page_info;
mod pins;
mod places;
mod races;
mod ranges;
mod shards;
mod soundness;
mod unwinding;
mod will_need;
