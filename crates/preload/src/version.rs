//! The version of the library.

/// The version in a program's memory and in the file: `strings` and `faultless run` find the text.
/// Ends with a zero byte.
#[unsafe(no_mangle)]
pub static FAULTLESS_PRELOAD_VERSION: [u8; TEXT.len()] = *TEXT;

/// The text of the version, with its mark.
const TEXT: &[u8; LENGTH] = {
    let text = concat!("faultless-preload ", env!("CARGO_PKG_VERSION"), "\0");
    match text.as_bytes().first_chunk() {
        Some(bytes) => bytes,
        None => panic!("the length is the length of the text"),
    }
};
const LENGTH: usize = concat!("faultless-preload ", env!("CARGO_PKG_VERSION"), "\0").len();
