//! Records of `perf record -z`: zstd frames that continue across records. The boundaries of
//! records, blocks and contents are independent.
//!
//! All compressed records are decompressed as one stream, and the contents are placed after the
//! uncompressed records. Their order does not matter, because the parser sorts records by time. The
//! parser sorts in rounds, and the ends of rounds would be at wrong places, so they are removed.

use super::damaged;
use super::scan::{BUILD_ID, Packed, RECORD_COMPRESSED, RECORD_COMPRESSED2, refused};
use crate::zstd::{self, Damage};
use std::io::{self, Read};

const RECORD_FINISHED_ROUND: u32 = 68;
/// The largest decompressed size of the compressed records of one file.
const MAX_UNPACKED: u64 = 1 << 30;
/// An empty last block of a frame: `perf` flushes its frame without ending it.
const LAST_BLOCK: &[u8] = &[1, 0, 0];

/// Returns `records`, at `offset` in the file, with the `packed` records replaced by their
/// contents. If the recording is `cut`, the last frame may end within a block, which is omitted.
/// The error contains the place in the file and the reason.
pub(super) fn replaced(
    records: &[u8],
    offset: u64,
    packed: &[Packed<'_>],
    cut: bool,
) -> Result<Vec<u8>, (u64, String)> {
    let Some(first) = packed.first().map(|record| record.at) else { return Ok(records.to_vec()) };
    let mut plain = Vec::new();
    let mut done = 0;
    for record in packed {
        let start = (record.at - offset) as usize;
        append(&mut plain, &records[done..start]).map_err(|why| (first, why))?;
        done = start + record.size as usize;
    }
    append(&mut plain, &records[done..]).map_err(|why| (first, why))?;
    let unpacked = unpacked(packed, cut)?;
    append(&mut plain, &unpacked).map_err(|why| (first, why))?;
    Ok(plain)
}

/// Returns the contents of the frames in `packed`. See [`replaced`] for `cut`.
fn unpacked(packed: &[Packed<'_>], cut: bool) -> Result<Vec<u8>, (u64, String)> {
    let mut out = Vec::new();
    // The end of a frame must not complete a block that is cut.
    let (mut left, mut end) = (u64::MAX, if cut { &[] } else { LAST_BLOCK });
    loop {
        out.clear();
        match unpack(packed, left, end, &mut out) {
            Ok(()) => return Ok(out),
            Err((whole, damage)) if end.is_empty() && damage.ended => {
                (left, end) = (whole, LAST_BLOCK);
            }
            Err((_, damage)) => return Err((damage.begins, damaged(&damage.reason))),
        }
    }
}

/// Appends the contents of the frames in the first `left` bytes of `packed`, followed by `end`, to
/// `out`. The error has the number of bytes before the block with the error, and the place of the
/// record in the file.
fn unpack(
    packed: &[Packed<'_>],
    left: u64,
    end: &'static [u8],
    out: &mut Vec<u8>,
) -> Result<(), (u64, Damage)> {
    let (at, part) = (packed[0].at, &[][..]);
    let mut source = Source { at, packed: packed.iter(), part, left, read: 0, end };
    while source.more() {
        let begins = source.read;
        let most = MAX_UNPACKED - out.len() as u64;
        let placed = |at, whole, damage| Err((whole, Damage { begins: at, ..damage }));
        if let Err(damage) = zstd::unpack(&mut source, most, out) {
            return placed(source.at, begins + damage.begins, damage);
        }
        if out.len() as u64 > MAX_UNPACKED {
            let reason = "the compressed records hold more than 1 GiB: record without -z".into();
            return placed(source.at, 0, Damage { begins: 0, ended: false, reason });
        }
    }
    Ok(())
}

/// Appends the complete records at the start of `bytes`, except ends of rounds.
fn append(plain: &mut Vec<u8>, mut bytes: &[u8]) -> Result<(), String> {
    while let Some((header, _)) = bytes.split_first_chunk::<8>() {
        let [k0, k1, k2, k3, m0, m1, s0, s1] = *header;
        let kind = u32::from_le_bytes([k0, k1, k2, k3]);
        let size = usize::from(u16::from_le_bytes([s0, s1]));
        if size < header.len() {
            return Err(damaged(&format_args!("compressed, a record of {size} bytes")));
        }
        // The recording was interrupted here.
        let Some((record, rest)) = bytes.split_at_checked(size) else { break };
        refused(kind, u16::from_le_bytes([m0, m1]), record.get(BUILD_ID as usize).copied())
            .map_err(|(_, why)| format!("compressed: {why}"))?;
        match kind {
            RECORD_COMPRESSED | RECORD_COMPRESSED2 => {
                return Err(damaged(&"a compressed record within a compressed one"));
            }
            RECORD_FINISHED_ROUND => {}
            _ => plain.extend_from_slice(record),
        }
        bytes = rest;
    }
    Ok(())
}

/// The contents of compressed records, one after the other, and the end of the last frame.
struct Source<'a> {
    packed: std::slice::Iter<'a, Packed<'a>>,
    /// The rest of the current record.
    part: &'a [u8],
    /// The place of the current record in the file.
    at: u64,
    /// The bytes of the records that may still be read, and those that have been read.
    left: u64,
    read: u64,
    end: &'static [u8],
}

impl Source<'_> {
    /// Returns whether any compressed bytes remain.
    fn more(&mut self) -> bool {
        while self.part.is_empty() && self.left > 0 {
            let Some(next) = self.packed.next() else { return false };
            let len = usize::try_from(self.left).unwrap_or(usize::MAX).min(next.bytes.len());
            (self.part, self.at) = (&next.bytes[..len], next.at);
            self.left -= len as u64;
        }
        !self.part.is_empty()
    }
}

impl Read for Source<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if !self.more() {
            return self.end.read(buffer);
        }
        let read = self.part.read(buffer)?;
        self.read += read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a record of 16 bytes.
    fn record(kind: u32, content: u64) -> Vec<u8> {
        [&kind.to_le_bytes()[..], &[0, 0, 16, 0], &content.to_le_bytes()].concat()
    }

    /// Returns the header of a frame, and a block for each of `blocks`, without the end of the
    /// frame.
    fn frame(blocks: &[&[u8]]) -> Vec<u8> {
        let block = |block: &&[u8]| [&(block.len() as u32 * 8).to_le_bytes()[..3], *block].concat();
        let blocks = blocks.iter().map(block);
        [vec![0x28, 0xb5, 0x2f, 0xfd, 0, 0x38], blocks.collect::<Vec<_>>().concat()].concat()
    }

    fn pieces(stream: &[u8], len: usize) -> Vec<Packed<'_>> {
        let piece = |(number, bytes)| Packed { at: 100 + number as u64, size: 1, bytes };
        stream.chunks(len).enumerate().map(piece).collect()
    }

    /// Reads a file that consists of these records, each of one byte for simplicity.
    fn read(stream: &[u8], len: usize) -> Result<Vec<u8>, (u64, String)> {
        let packed = pieces(stream, len);
        replaced(&vec![0; packed.len()], 100, &packed, false)
    }

    #[test]
    fn frames_may_be_split_anywhere_and_lack_an_end() {
        let records = [record(9, 1), record(RECORD_FINISHED_ROUND, 2), record(9, 3)].concat();
        let stream = frame(&[&records[..5], &records[5..]]);
        let want = [record(9, 1), record(9, 3)].concat();
        for len in 1..=stream.len() {
            assert_eq!(read(&stream, len), Ok(want.clone()), "{len}");
        }
    }

    /// A block that is not complete is omitted, if the recording is cut.
    #[test]
    fn cut_frame_has_its_whole_blocks() {
        let [first, second] = [record(9, 1), record(9, 3)];
        let stream = frame(&[&first, &second]);
        let ends = [6, 6 + 3 + first.len(), stream.len()];
        for len in 7..=stream.len() {
            let packed = pieces(&stream[..len], 4);
            let read = |cut| replaced(&vec![0; packed.len()], 100, &packed, cut);
            let want: Vec<_> = [&first, &second].into_iter().zip(&ends[1..]).collect();
            let whole = want.iter().filter(|(_, end)| **end <= len);
            let whole: Vec<_> = whole.flat_map(|(record, _)| record.to_vec()).collect();
            assert_eq!(read(true), Ok(whole), "{len}");
            let ends_here = ends[1..].contains(&len);
            assert_eq!(read(false).is_ok(), ends_here, "{len}");
        }
    }

    #[test]
    fn frames_follow_each_other() {
        let stream = [zstd::pack(&record(9, 1)), zstd::pack(&record(9, 2))].concat();
        let want = [record(9, 1), record(9, 2)].concat();
        assert_eq!(read(&stream, 3), Ok(want));
    }

    #[test]
    fn errors_contain_the_record() {
        let broken = [&frame(&[&record(9, 1)])[..], &[7, 0, 0]].concat();
        let (at, why) = read(&broken, 20).unwrap_err();
        assert!(at == 101 && why.contains("(zstd) is damaged"), "{at}: {why}");
        let nested = frame(&[&record(RECORD_COMPRESSED, 0)]);
        let (at, why) = read(&nested, 20).unwrap_err();
        assert!(at == 100 && why.contains("within a compressed one"), "{at}: {why}");
        let long = [0x28, 0xb5, 0x2f, 0xfd, 0, 0xa0];
        let (_, why) = read(&long, 20).unwrap_err();
        assert!(why.contains("refers back over"), "{why}");
    }
}
