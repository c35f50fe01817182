//! Drops many references at once: those of the mappings that an unmapping removed.
//!
//! The frames of one program mostly follow each other, and are of one arena. So frames that were freed go
//! on in batches: to the CPU's list while a batch has room there, and else to its reserve or the arena.

use super::meta::Kind;
use super::percpu::BATCH;
use super::{FrameNumber, Frames};
use crate::sync::percpu::Local;
use crate::sync::wait::Wait;
use core::cell::Cell;

/// For fewer frames a batch does not pay.
const FEW: usize = 8;

impl Frames {
    /// Drops a reference to each of `numbers`, which are published single frames, and frees each frame of
    /// which that was the last reference.
    ///
    /// # Safety
    /// The caller had these references, of mappings that are gone and were flushed from every CPU that could
    /// hold a translation.
    pub unsafe fn put_all(&self, local: &Local, numbers: &[Cell<u32>], wait: &impl Wait) {
        for numbers in numbers.chunks(BATCH) {
            if numbers.len() < FEW {
                for number in numbers.iter().map(|number| FrameNumber(number.get())) {
                    if self.meta(number).put_ref() == 0 {
                        // SAFETY: the reference was the last one, and the mappings were flushed.
                        let frame = unsafe { self.reclaim(number).settle() };
                        self.free(local, frame, wait);
                    }
                }
                continue;
            }
            let mut batch = [FrameNumber(0); BATCH];
            let (mut freed, mut every, mut any) = (0, u8::MAX, 0);
            for (number, meta) in self.table.each_of(numbers) {
                if meta.put_ref() != 0 {
                    continue;
                }
                debug_assert!(matches!(meta.kind(), Kind::Used(_)), "{number:?} was not published");
                debug_assert_eq!(meta.order(), 0, "{number:?} heads a block");
                meta.set_kind(Kind::Pooled);
                meta.end_ownership();
                every &= meta.arena();
                any |= meta.arena();
                batch[freed] = number;
                freed += 1;
            }
            if freed == 0 {
                continue;
            }
            let batch = &batch[..freed];
            if every == any {
                self.free_batch(local, batch, any, wait);
            } else {
                self.give_back(batch, 0, false, wait);
            }
        }
    }

    /// Frees single frames of one arena, whose ownership has ended.
    fn free_batch(&self, local: &Local, batch: &[FrameNumber], arena: u8, wait: &impl Wait) {
        let stock = self.stocks.get(local);
        if !stock.keeps(arena) {
            return self.give_back(batch, 0, false, wait);
        }
        if stock.clean.push_all(batch) {
            return;
        }
        if batch.len() == BATCH {
            return self.shelve(local, batch, false, wait);
        }
        for number in batch {
            while !stock.clean.push(*number) {
                self.spill(local, false, wait);
            }
        }
    }
}

#[cfg(test)]
mod tests;
