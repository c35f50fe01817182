//! Records of `perf record -z`: zstd frames that go from one record to the next, without heed of where a record, a
//! block or what is inside ends.
//!
//! All of them are unpacked as one stream, and what it holds goes behind the records that were not compressed. What
//! was between them does not matter: the parser sorts records by time. It does so in rounds, and the ends of rounds
//! would no longer be where they belong, so they are left out.

use super::scan::{BUILD_ID, Packed, RECORD_COMPRESSED, RECORD_COMPRESSED2, refused};
use crate::zstd;
use std::io::{self, Read};

const RECORD_FINISHED_ROUND: u32 = 68;
/// The most that the compressed records of one file may hold.
const MAX_UNPACKED: u64 = 1 << 30;
/// An empty block that is a frame's last: `perf` flushes its frame, and does not end it.
const LAST_BLOCK: &[u8] = &[1, 0, 0];

/// `records`, which are at `offset` in the file, with those that are `packed` replaced by what they hold; or what is
/// wrong, and where in the file.
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

/// What the frames in `packed` hold.
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

/// Appends the whole records at the start of `bytes`, but for ends of rounds.
fn append(plain: &mut Vec<u8>, mut bytes: &[u8]) -> Result<(), String> {
    while let Some((header, _)) = bytes.split_first_chunk::<8>() {
        let [k0, k1, k2, k3, m0, m1, s0, s1] = *header;
        let kind = u32::from_le_bytes([k0, k1, k2, k3]);
        let size = usize::from(u16::from_le_bytes([s0, s1]));
        if size < header.len() {
            return Err(format!("compressed, a record of {size} bytes"));
        }
        // Where the recording was interrupted.
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
    /// Of the record that is being read.
    left: &'a [u8],
    /// Where that is in the file.
    at: u64,
    end: &'static [u8],
}

impl Source<'_> {
    /// Whether any compressed bytes are left.
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

    /// A record of 16 bytes.
    fn record(kind: u32, content: u64) -> Vec<u8> {
        [&kind.to_le_bytes()[..], &[0, 0, 16, 0], &content.to_le_bytes()].concat()
    }

    /// The header of a frame, and a block for each of `blocks`; the frame goes on.
    fn frame(blocks: &[&[u8]]) -> Vec<u8> {
        let block = |block: &&[u8]| [&(block.len() as u32 * 8).to_le_bytes()[..3], *block].concat();
        let blocks = blocks.iter().map(block);
        [vec![0x28, 0xb5, 0x2f, 0xfd, 0, 0x38], blocks.collect::<Vec<_>>().concat()].concat()
    }

    fn pieces(stream: &[u8], len: usize) -> Vec<Packed<'_>> {
        let piece = |(number, bytes)| Packed { at: 100 + number as u64, size: 1, bytes };
        stream.chunks(len).enumerate().map(piece).collect()
    }

    /// What comes of a file that has nothing but these records, each of one byte for simplicity.
    fn read(stream: &[u8], len: usize) -> Result<Vec<u8>, (u64, String)> {
        let packed = pieces(stream, len);
        replaced(&vec![0; packed.len()], 100, packed)
    }

    #[test]
    fn a_frame_may_be_cut_anywhere_and_need_not_end() {
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
    fn what_is_wrong_is_said_with_the_record() {
        let broken = [&frame(&[&record(9, 1)])[..], &[7, 0, 0]].concat();
        let (at, why) = read(&broken, 20).unwrap_err();
        assert!(at == 101 && why.contains("(zstd) is damaged"), "{at}: {why}");
        let nested = frame(&[&record(RECORD_COMPRESSED, 0)]);
        let (at, why) = read(&nested, 20).unwrap_err();
        assert!(at == 100 && why.contains("within a compressed one"), "{at}: {why}");
        let long = [0x28, 0xb5, 0x2f, 0xfd, 0, 0xa0];
        let (_, why) = read(&long, 20).unwrap_err();
        assert!(why.contains("looks back over"), "{why}");
    }
}
