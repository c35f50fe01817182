//! Readers of recordings: what they take they understand, and what they refuse they explain.

use faultless_trace::plan::Plan;
use faultless_trace::{Error, Trace, compact, parse, perf as perf_data};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use std::path::Path;

const NAME: &str = "some.data";

/// A file of either format.
///
/// # Panics
/// A promise is broken.
pub fn trace(bytes: &[u8]) {
    understood(parse(Path::new(NAME), bytes));
}

/// A file as `perf record` writes it, from its first byte on.
///
/// # Panics
/// A promise is broken.
pub fn perf(bytes: &[u8]) {
    understood(perf_data::parse(Path::new(NAME), bytes));
}

/// What is inside a compact recording: `bytes` get the header, checksum and compression that let them
/// through to the reader of the body.
///
/// # Panics
/// A promise is broken.
pub fn body(bytes: &[u8]) {
    let mut file = compact::MAGIC.to_vec();
    file.extend(compact::VERSION.to_le_bytes());
    file.extend(crc32fast::hash(bytes).to_le_bytes());
    file.extend((bytes.len() as u64).to_le_bytes());
    file.extend(compress_to_vec(bytes, CompressionLevel::Fastest));
    understood(compact::parse(Path::new(NAME), &file));
}

fn understood(read: Result<Trace, Error>) {
    match read {
        Ok(trace) => {
            let _ = trace.summary().to_string();
            let _ = Plan::new(&trace);
            // It can be kept, and is the same then.
            if let Ok(file) = compact::encode(Path::new(NAME), &trace) {
                let again = compact::parse(Path::new(NAME), &file);
                assert_eq!(again.as_ref(), Ok(&trace), "kept and read again");
            }
        }
        Err(error) => {
            let text = error.to_string();
            assert!(text.starts_with("some.data: ") && text.len() > 20, "says little: {text}");
        }
    }
}
