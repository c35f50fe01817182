//! faultless-native
