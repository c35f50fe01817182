//! Records of `perf record -z`: zstd frames that continue across records. The boundaries of
//! records, blocks and contents are independent.
//!
//! All compressed records are decompressed as one stream, and the contents are placed after the
//! uncompressed records. Their order does not matter, because the parser sorts records by time. The
//! parser sorts in rounds, and the ends of rounds would be at wrong places, so they are removed.

use super::scan::{BUILD_ID, Packed, RECORD_COMPRESSED, RECORD_COMPRESSED2, refused};
use crate::zstd;
use std::io::{self, Read};

const RECORD_FINISHED_ROUND: u32 = 68;
/// The largest decompressed size of the compressed records of one file.
const MAX_UNPACKED: u64 = 1 << 30;
/// An empty last block of a frame: `perf` flushes its frame without ending it.
const LAST_BLOCK: &[u8] = &[1, 0, 0];

/// Returns `records`, at `offset` in the file, with the `packed` records replaced by their
/// contents. The error contains the place in the file and the reason.
pub(super) fn replaced(
    records: &[u8],
    offset: u64,
    packed: Vec<Packed<'_>>,
) -> Result<Vec<u8>, (u64, String)> {
    let Some(first) = packed.first().map(|record| record.at) else { return Ok(records.to_vec()) };
    let mut plain = Vec::new();
    let mut done = 0;
    for record in &packed {
        let start = (record.at - offset) as usize;
        append(&mut plain, &records[done..start]).map_err(|why| (first, why))?;
        done = start + record.size as usize;
    }
    append(&mut plain, &records[done..]).map_err(|why| (first, why))?;
    let unpacked = unpacked(packed)?;
    append(&mut plain, &unpacked).map_err(|why| (first, why))?;
    Ok(plain)
}

/// Returns the contents of the frames in `packed`.
fn unpacked(packed: Vec<Packed<'_>>) -> Result<Vec<u8>, (u64, String)> {
    let mut source =
        Source { at: packed[0].at, packed: packed.into_iter(), left: &[], end: LAST_BLOCK };
    let mut out = Vec::new();
    while source.more() {
        let most = MAX_UNPACKED - out.len() as u64;
        zstd::unpack(&mut source, most, &mut out).map_err(|damage| (source.at, damage.reason))?;
        if out.len() as u64 > MAX_UNPACKED {
            return Err((source.at, "the compressed records hold more than 1 GiB".into()));
        }
    }
    Ok(out)
}

/// Appends the complete records at the start of `bytes`, except ends of rounds.
fn append(plain: &mut Vec<u8>, mut bytes: &[u8]) -> Result<(), String> {
    while let Some((header, _)) = bytes.split_first_chunk::<8>() {
        let [k0, k1, k2, k3, m0, m1, s0, s1] = *header;
        let kind = u32::from_le_bytes([k0, k1, k2, k3]);
        let size = usize::from(u16::from_le_bytes([s0, s1]));
        if size < header.len() {
            return Err(format!("compressed, a record of {size} bytes"));
        }
        // The recording was interrupted here.
        let Some((record, rest)) = bytes.split_at_checked(size) else { break };
        refused(kind, u16::from_le_bytes([m0, m1]), record.get(BUILD_ID as usize).copied())
            .map_err(|(_, why)| format!("compressed: {why}"))?;
        match kind {
            RECORD_COMPRESSED | RECORD_COMPRESSED2 => {
                return Err("a compressed record within a compressed one".into());
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
    packed: std::vec::IntoIter<Packed<'a>>,
    /// The rest of the current record.
    left: &'a [u8],
    /// The place of the current record in the file.
    at: u64,
    end: &'static [u8],
}

impl Source<'_> {
    /// Returns whether any compressed bytes remain.
    fn more(&mut self) -> bool {
        while self.left.is_empty() {
            let Some(next) = self.packed.next() else { return false };
            (self.left, self.at) = (next.bytes, next.at);
        }
        true
    }
}

impl Read for Source<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.more() { self.left.read(buffer) } else { self.end.read(buffer) }
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
        replaced(&vec![0; packed.len()], 100, packed)
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
