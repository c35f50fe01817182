//! Readers of recordings: an accepted recording is understood, and a refused recording is
//! explained.

use faultless_trace::lackey::{self, text::Pages};
use faultless_trace::plan::Plan;
use faultless_trace::{Error, Trace, compact, parse, perf as perf_data};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use std::path::Path;

const NAME: &str = "some.data";

/// A file of either format.
///
/// # Panics
/// If a promise is broken.
pub fn trace(bytes: &[u8]) {
    understood(parse(Path::new(NAME), bytes));
}

/// Reads a file in the format of `perf record`, from its first byte on.
///
/// # Panics
/// If a promise is broken.
pub fn perf(bytes: &[u8]) {
    understood(perf_data::parse(Path::new(NAME), bytes));
}

/// Reads the body of a compact recording: `bytes` get the header, checksum and compression required
/// to reach the reader of the body.
///
/// # Panics
/// If a promise is broken.
pub fn body(bytes: &[u8]) {
    let mut file = compact::MAGIC.to_vec();
    file.extend(compact::VERSION.to_le_bytes());
    file.extend(crc32fast::hash(bytes).to_le_bytes());
    file.extend((bytes.len() as u64).to_le_bytes());
    file.extend(compress_to_vec(bytes, CompressionLevel::Fastest));
    understood(compact::parse(Path::new(NAME), &file));
}

/// A trace of addresses, compressed or not.
///
/// # Panics
/// If a promise is broken.
pub fn addresses(bytes: &[u8]) {
    let mut pages = Pages::default();
    let mut read =
        || lackey::read(Path::new(NAME), bytes)?.try_for_each(|it| it.map(|it| pages.note(it)));
    if let Err(error) = read() {
        explained(&error);
    }
    let text = pages.text();
    for pair in text.extents.windows(2) {
        assert!(pair[0].last < pair[1].first, "extents overlap: {pair:?}");
    }
    for (at, extent) in text.extents.iter().enumerate() {
        for page in [extent.first, extent.last] {
            assert_eq!(text.find(page), Some(at), "{extent:?}");
        }
        assert!(
            extent.fetched.is_sorted() && extent.whole().all(|it| it >= extent.first),
            "{extent:?}"
        );
    }
    assert!(text.covered() <= text.fetches, "more than all is covered");
    assert!(
        text.whole().iter().map(|it| it.fetches).sum::<u64>() <= text.covered(),
        "more than the code"
    );
}

fn understood(read: Result<Trace, Error>) {
    match read {
        Ok(trace) => {
            let _ = trace.summary().to_string();
            let _ = Plan::new(&trace);
            // The trace can be encoded, and decodes to the same trace.
            if let Ok(file) = compact::encode(Path::new(NAME), &trace) {
                let again = compact::parse(Path::new(NAME), &file);
                assert_eq!(again.as_ref(), Ok(&trace), "encoded and decoded");
            }
        }
        Err(error) => explained(&error),
    }
}

fn explained(error: &Error) {
    let text = error.to_string();
    assert!(text.starts_with("some.data: ") && text.len() > 20, "too short an error: {text}");
}
