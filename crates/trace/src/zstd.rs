//! zstd frames from untrusted sources: the sizes in a frame are not trusted.

use ruzstd::decoding::errors::FrameDecoderError;
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use std::io::{self, BufRead, Read};

/// The window of zstd at levels up to 19. A decoder reserves this memory before it has seen a
/// block.
const MAX_WINDOW: u64 = 8 << 20;

/// An error in a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Damage {
    /// The start of the block that contains the error, in bytes from the start of the frame; 0 for
    /// the frame as a whole.
    pub begins: u64,
    /// Whether the source ended too early.
    pub ended: bool,
    /// The description of the error, for a user.
    pub reason: String,
}

impl Damage {
    fn of(error: &FrameDecoderError, begins: u64) -> Self {
        let mut cause: Option<&dyn std::error::Error> = Some(error);
        let mut ended = false;
        while let Some(error) = cause {
            let io = error.downcast_ref::<io::Error>();
            ended |= io.is_some_and(|error| error.kind() == io::ErrorKind::UnexpectedEof);
            cause = error.source();
        }
        let reason = match error {
            FrameDecoderError::WindowSizeTooBig { requested, .. } => {
                format!(
                    "the compressed data (zstd) refers back over {requested} bytes; the limit is 8 MiB"
                )
            }
            _ if ended => "the compressed data (zstd) is truncated".to_owned(),
            _ if begins == 0 => "no compressed data (a zstd frame) begins here".to_owned(),
            _ => "the compressed data (zstd) is damaged, in the block that begins here".to_owned(),
        };
        Self { begins, ended, reason }
    }
}

/// Compresses `body` as one frame.
pub(crate) fn pack(body: &[u8]) -> Vec<u8> {
    compress_to_vec(body, CompressionLevel::Fastest)
}

/// Appends the contents of the frame at the start of `source` to `out`, and leaves `source` behind
/// the frame. If the frame holds more than `most` bytes, decoding ends early, with `most + 1`
/// bytes, so that memory grows only with the actual contents.
///
/// # Errors
/// The source does not start with a frame, ends within the frame, is damaged, or needs a window of
/// more than 8 MiB.
pub(crate) fn unpack(source: &mut impl Read, most: u64, out: &mut Vec<u8>) -> Result<(), Damage> {
    let mut decoder = FrameDecoder::new();
    decoder.set_max_window_size(MAX_WINDOW);
    decoder.init(&mut *source).map_err(|error| Damage::of(&error, 0))?;
    let mut left = most.saturating_add(1);
    while !decoder.is_finished() {
        let begins = decoder.bytes_read_from_source();
        decoder
            .decode_blocks(&mut *source, BlockDecodingStrategy::UptoBlocks(1))
            .map_err(|error| Damage::of(&error, begins))?;
        let whole = |why: io::Error| Damage { begins, ended: false, reason: why.to_string() };
        left -= decoder.by_ref().take(left).read_to_end(out).map_err(whole)? as u64;
        if left == 0 {
            // The checksum has not been read yet.
            return Ok(());
        }
    }
    checksum(&decoder)
}

/// The contents of the frames in `source`, one after the other, decoded on demand.
pub(crate) struct Frames<R> {
    source: R,
    decoder: FrameDecoder,
    /// Whether a frame has begun, and not ended.
    open: bool,
}

impl<R: BufRead> Frames<R> {
    pub(crate) fn new(source: R) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(MAX_WINDOW);
        Self { source, decoder, open: false }
    }

    /// Decodes one more block, or begins the next frame. Returns whether there was one.
    fn advance(&mut self) -> io::Result<bool> {
        let damaged = |reason: String| io::Error::new(io::ErrorKind::InvalidData, reason);
        if self.open && self.decoder.is_finished() {
            checksum(&self.decoder).map_err(|damage| damaged(damage.reason))?;
            self.open = false;
        }
        let advanced = if self.open {
            let one = BlockDecodingStrategy::UptoBlocks(1);
            // The offset in the source does not matter to the reader of the contents, but the start
            // of a frame does.
            self.decoder
                .decode_blocks(&mut self.source, one)
                .map(|_| ())
                .map_err(|error| (error, 1))
        } else if self.source.fill_buf()?.is_empty() {
            return Ok(false);
        } else {
            self.open = true;
            self.decoder.init(&mut self.source).map_err(|error| (error, 0))
        };
        advanced.map_err(|(error, begins)| damaged(Damage::of(&error, begins).reason))?;
        Ok(true)
    }
}

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            let read = if self.open { self.decoder.read(out)? } else { 0 };
            if read > 0 || out.is_empty() || !self.advance()? {
                return Ok(read);
            }
        }
    }
}

/// Checks the checksum of an ended frame, if there is a checksum.
fn checksum(decoder: &FrameDecoder) -> Result<(), Damage> {
    let told = decoder.get_checksum_from_data();
    if told.is_some() && told != decoder.get_calculated_checksum() {
        let reason = "the checksum of the compressed data (zstd) does not match".to_owned();
        return Err(Damage { begins: 0, ended: false, reason });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_is_located_by_block_and_differs_from_truncation() {
        // Three blocks of 128 KiB with low compressibility.
        let body: Vec<u8> = (0..3u32 << 17).map(|at| (at.wrapping_mul(at) >> 7) as u8).collect();
        let good = pack(&body);
        let read = |bytes: &[u8]| {
            let mut out = Vec::new();
            unpack(&mut &*bytes, body.len() as u64, &mut out).map(|()| out)
        };
        assert_eq!(read(&good).as_ref(), Ok(&body));
        let mut places = std::collections::BTreeSet::new();
        for at in (8..good.len()).step_by(good.len() / 61) {
            let mut bad = good.clone();
            bad[at] ^= 0x55;
            let damage = read(&bad).expect_err("damaged data");
            // An error in the contents of a block may be detected only by the checksum of the
            // frame.
            assert!(damage.begins <= at as u64, "{at}: {damage:?}");
            places.insert(damage.begins);
            let cut = read(&good[..at]).expect_err("truncated data");
            assert!(cut.ended && cut.reason.ends_with("is truncated"), "{at}: {cut:?}");
        }
        assert!(places.len() > 1, "{places:?}");
    }
}
