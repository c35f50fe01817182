//! Tests of faults: prefault, huge pages, policies, and chosen interleavings.

pub(crate) mod huge;
mod policies;
mod predictors;
mod prefault;
