//! zstd frames that come from anywhere: what a frame claims is not believed.

use ruzstd::decoding::{FrameDecoder, StreamingDecoder};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use std::io::{self, Read};

/// What zstd looks back over at levels up to 19. A decoder reserves it before it has seen a block.
const MAX_WINDOW: u64 = 8 << 20;

/// `body` as one frame.
pub(crate) fn pack(body: &[u8]) -> Vec<u8> {
    compress_to_vec(body, CompressionLevel::Fastest)
}

/// Appends to `out` what the frame at the start of `source` holds, and leaves `source` behind the frame. Ends early
/// where the frame holds more than `most` bytes, with `most + 1` of them: memory grows with what is really there.
///
/// # Errors
/// What is there is no frame, ends within it, is damaged, or looks back over more than 8 MiB.
pub(crate) fn unpack(source: &mut impl Read, most: u64, out: &mut Vec<u8>) -> io::Result<()> {
    let wrong = |reason: String| io::Error::new(io::ErrorKind::InvalidData, reason);
    let mut decoder = FrameDecoder::new();
    decoder.set_max_window_size(MAX_WINDOW);
    let mut stream = StreamingDecoder::new_with_decoder(source, decoder)
        .map_err(|error| wrong(error.to_string()))?;
    let read = stream.by_ref().take(most.saturating_add(1)).read_to_end(out)?;
    let decoder = stream.into_frame_decoder();
    let told = decoder.get_checksum_from_data();
    // Of a frame that was left early there is no checksum yet.
    if read as u64 <= most && told.is_some() && told != decoder.get_calculated_checksum() {
        return Err(wrong("the frame's checksum does not match".into()));
    }
    Ok(())
}
