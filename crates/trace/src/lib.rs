//! faultless-trace
