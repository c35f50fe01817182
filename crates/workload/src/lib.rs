//! faultless-workload
