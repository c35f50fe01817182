//! The contents of frames, with host memory only on demand.
//!
//! A benchmark stores one word to each page of much more memory than the host has. A frame without
//! host memory so far may therefore have one word in a separate table, and zeros otherwise. The
//! first store to another word, or a request for the bytes, moves the contents to host memory.

use core::cell::RefCell;
use faultless_native::Memory;

const PAGE: u64 = 4096;
/// Zeros, without any use of host memory.
const UNTOUCHED: u16 = 0;
/// In the host's memory.
const BYTES: u16 = u16::MAX;

/// The contents of all frames.
///
/// *Invariant (zeros beneath):* the host's bytes of a frame are zeros unless its state is
/// [`BYTES`]. A state in between is the number of the word, from 1 on, which is in `words` instead.
#[derive(Debug)]
pub(crate) struct Contents {
    memory: Memory,
    states: RefCell<Vec<u16>>,
    words: RefCell<Vec<u64>>,
}

impl Contents {
    pub(crate) fn new(memory: Memory) -> Self {
        let frames = memory.frames() as usize;
        // Both vectors contain zeros, so the host only backs used parts.
        let (states, words) = (RefCell::new(vec![0; frames]), RefCell::new(vec![0; frames]));
        Self { memory, states, words }
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Moves the frame's complete contents to host memory.
    pub(crate) fn make_bytes(&self, frame: u32) {
        let state = core::mem::replace(&mut self.states.borrow_mut()[frame as usize], BYTES);
        if state != UNTOUCHED && state != BYTES {
            self.memory.store(word_of(frame, state), self.words.borrow()[frame as usize]);
        }
    }

    pub(crate) fn zero(&self, frame: u32) {
        let state = &mut self.states.borrow_mut()[frame as usize];
        if *state == BYTES {
            self.memory.fill(u64::from(frame) * PAGE, PAGE, 0);
        } else {
            *state = UNTOUCHED;
        }
    }

    pub(crate) fn copy(&self, to: u32, from: u32) {
        self.zero(to);
        let state = self.states.borrow()[from as usize];
        match state {
            UNTOUCHED => {}
            BYTES => {
                self.make_bytes(to);
                self.memory.copy(u64::from(to) * PAGE, u64::from(from) * PAGE, PAGE);
            }
            state => {
                let word = self.words.borrow()[from as usize];
                self.store(u64::from(to) * PAGE + (u64::from(state) - 1) * 8, word);
            }
        }
    }

    /// Loads the word at `phys`, a multiple of 8.
    pub(crate) fn load(&self, phys: u64) -> u64 {
        let frame = (phys / PAGE) as usize;
        match self.states.borrow()[frame] {
            UNTOUCHED => 0,
            BYTES => self.memory.load(phys),
            state if phys == word_of(frame as u32, state) => self.words.borrow()[frame],
            _ => 0,
        }
    }

    /// Stores a word at `phys`, a multiple of 8.
    pub(crate) fn store(&self, phys: u64, value: u64) {
        let frame = (phys / PAGE) as usize;
        let state = self.states.borrow()[frame];
        let word = (phys % PAGE / 8) as u16 + 1;
        if state == UNTOUCHED || state == word {
            self.states.borrow_mut()[frame] = word;
            self.words.borrow_mut()[frame] = value;
        } else {
            self.make_bytes(frame as u32);
            self.memory.store(phys, value);
        }
    }
}

/// Returns the address of the word of a state.
fn word_of(frame: u32, state: u16) -> u64 {
    u64::from(frame) * PAGE + (u64::from(state) - 1) * 8
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn contents_match_plain_memory(
            steps in prop::collection::vec((0u8..5, 1u32..4, 0u64..6, any::<u64>()), 1..60),
        ) {
            let contents = Contents::new(Memory::new(4 * PAGE, 1).unwrap());
            let mut plain = vec![0u64; 4 * 512];
            for (what, frame, word, value) in steps {
                let at = frame as usize * 512 + word as usize;
                let other = frame % 3 + 1;
                match what {
                    0 | 1 => {
                        contents.store(at as u64 * 8, value);
                        plain[at] = value;
                    }
                    2 => {
                        contents.zero(frame);
                        plain[frame as usize * 512..][..512].fill(0);
                    }
                    3 => {
                        contents.copy(other, frame);
                        plain.copy_within(frame as usize * 512..(frame as usize + 1) * 512, other as usize * 512);
                    }
                    _ => contents.make_bytes(frame),
                }
                for frame in 1..4usize {
                    for word in 0..6 {
                        let at = frame * 512 + word;
                        prop_assert_eq!(contents.load(at as u64 * 8), plain[at]);
                    }
                }
            }
        }
    }
}
