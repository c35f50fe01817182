//! Queries of a state, and the accounting of frames.

use super::*;

impl State {
    pub(super) fn free(&self) -> Option<Frame> {
        self.frames.iter().position(|owner| *owner == Owner::Free).map(|at| at as Frame)
    }

    /// Returns whether `frame` still belongs to the page, or waits for the flush of its
    /// translations.
    pub(super) fn is_pages(&self, frame: Frame) -> bool {
        matches!(self.frames[frame as usize], Owner::Page | Owner::Owed(_))
    }

    /// A load by a translation to `frame`.
    pub(super) fn load(&mut self, frame: Frame) {
        self.stale |= !self.is_pages(frame);
        self.lost |= self.bytes[frame as usize] != self.shows;
    }

    pub(super) fn is_pending(&self) -> bool {
        self.pending > self.paid
    }

    pub(super) fn note_flush(&mut self, cpu: usize, before: Stamp) {
        self.flushed[cpu] = self.flushed[cpu].max(before);
    }

    /// Law 6: each frame is at the place named by its owner, and nowhere else.
    pub(super) fn is_accounted(&self) -> bool {
        self.frames.iter().enumerate().all(|(at, owner)| {
            let frame = at as Frame;
            let mapped = matches!(self.entry, Slot::Leaf(it, _) if it == frame);
            let in_fault = self.cpus.contains(&At::Held(frame));
            let (from, to) = match self.kernel {
                Kernel::Idle | Kernel::Ages => (None, None),
                Kernel::Has(then, from, _)
                | Kernel::Awaits(then, from, _)
                | Kernel::Defers(then, from, ..)
                | Kernel::Flushed(then, from, ..) => {
                    (Some(from), if let Then::Move(to) = then { Some(to) } else { None })
                }
            };
            let uses = [mapped, in_fault, from == Some(frame)];
            let used = uses.into_iter().filter(|used| *used).count();
            match owner {
                Owner::Page => used == 1 && to != Some(frame),
                Owner::Taken => used == 0 && to == Some(frame),
                Owner::Free | Owner::Owed(_) => used == 0 && to != Some(frame),
            }
        })
    }

    /// Returns whether any frame waits.
    pub(super) fn owes(&self) -> bool {
        self.frames.iter().any(|owner| matches!(owner, Owner::Owed(_)))
    }
}
