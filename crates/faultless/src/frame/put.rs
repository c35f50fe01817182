//! Drops many references at once: the references of mappings removed by an unmap.
//!
//! The frames of one program are mostly consecutive and in one arena. So freed frames are passed on
//! in batches: to the CPU's list if the whole batch fits, and else to its reserve or the arena.

use super::meta::Kind;
use super::percpu::BATCH;
use super::{FrameNumber, Frames};
use crate::sync::percpu::Local;
use crate::sync::wait::Wait;
use core::cell::Cell;

/// Below this number of frames a batch does not pay.
const FEW: usize = 8;

impl Frames {
    /// Drops a reference to each of `numbers`, which are published single frames, and frees each
    /// frame whose last reference was dropped.
    ///
    /// # Safety
    /// The caller owned these references. Their mappings are removed and were flushed from every
    /// CPU that could hold a translation.
    pub unsafe fn put_all(&self, local: &Local, numbers: &[Cell<u32>], wait: &impl Wait) {
        for numbers in numbers.chunks(BATCH) {
            if numbers.len() < FEW {
                for number in numbers.iter().map(|number| FrameNumber(number.get())) {
                    if self.meta(number).put_ref() == 0 {
                        // SAFETY: the reference was the last one, and the mappings were flushed.
                        let frame = unsafe { self.reclaim(number).assume_flushed() };
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
