#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| faultless_fuzzing::operations(bytes));
