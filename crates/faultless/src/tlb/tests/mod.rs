//! Tests of deferred flushes and of the number of flushes of each call.

pub(crate) mod deferred;
mod flushes;
