//! Bulk allocation of single frames, for faults that map many pages at once.
//!
//! A bulk allocation is optional work: it never waits, takes only free frames, and none that would
//! make memory [short](Frames::is_short). So it may return fewer frames than requested, or none.
//! Unneeded frames return to the CPU's lists; zeroed frames stay zeroed.

use super::arena::Lists;
use super::count::SHORT;
use super::owned::{Clean, Flushed, Frame, Zeroed};
use super::percpu::{BATCH, Magazine, batch_for};
use super::{FrameMeta, FrameUse, Frames};
use crate::addr::FrameNumber;
use crate::machine::Machine;
use crate::sync::percpu::Local;
use crate::sync::wait::Wait;
use core::fmt;
use core::marker::PhantomData;

/// Single frames owned by the holder of this value, in a buffer of the holder.
#[must_use = "dropped frames are lost"]
pub struct Bulk<'b, S> {
    /// *Invariant (a bulk owns):* this value owns the frames of these numbers, each a single frame
    /// in state `S`.
    numbers: &'b mut [FrameNumber],
    state: PhantomData<S>,
}

impl<'b, S> Bulk<'b, S> {
    /// Returns a bulk without frames.
    pub const fn empty() -> Self {
        Self { numbers: &mut [], state: PhantomData }
    }

    pub(super) const fn new(numbers: &'b mut [FrameNumber]) -> Self {
        Self { numbers, state: PhantomData }
    }

    /// Returns the number of remaining frames.
    #[inline]
    pub const fn len(&self) -> usize {
        self.numbers.len()
    }

    /// Returns whether no frame remains.
    #[cfg(any(test, loom, shuttle))]
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.numbers.is_empty()
    }

    /// Returns the numbers of the remaining frames, in order.
    #[cfg(any(test, loom, shuttle))]
    #[inline]
    pub const fn numbers(&self) -> &[FrameNumber] {
        self.numbers
    }

    /// Takes the next frame. Contiguous frames come in ascending order.
    #[inline]
    pub fn pop(&mut self) -> Option<Frame<S>> {
        let (first, rest) = core::mem::take(&mut self.numbers).split_first_mut()?;
        self.numbers = rest;
        Some(Frame::new(*first, 0))
    }
}

impl<'b, S> Bulk<'b, S> {
    /// Takes the next `count` frames, or all remaining frames if there are fewer.
    #[inline]
    pub fn take(&mut self, count: usize) -> Self {
        let numbers = core::mem::take(&mut self.numbers);
        let (taken, rest) = numbers.split_at_mut(count.min(numbers.len()));
        self.numbers = rest;
        Self::new(taken)
    }
}

impl<S> fmt::Debug for Bulk<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = core::any::type_name::<S>().rsplit("::").next().unwrap_or_default();
        write!(f, "Bulk<{state}>({} frames)", self.len())
    }
}

impl Frames {
    /// Allocates up to `to.len()` frames with arbitrary contents, as many as can be spared.
    #[cfg(any(test, loom, shuttle))]
    pub fn alloc_bulk<'b>(
        &self,
        local: &Local,
        to: &'b mut [FrameNumber],
        wait: &impl Wait,
    ) -> Bulk<'b, Clean> {
        let spared = self.spare(local, to.len());
        let got = self.fill_clean(local, &mut to[..spared], wait);
        Bulk::new(&mut to[..got])
    }

    /// Allocates up to `to.len()` frames of `node`, and of no other node, directly from its arenas.
    pub fn alloc_on<'b>(
        &self,
        local: &Local,
        node: u8,
        to: &'b mut [FrameNumber],
        wait: &impl Wait,
    ) -> Bulk<'b, Clean> {
        let mut got = self.take_on(node, to, wait);
        if got < to.len() {
            // This CPU may keep some in its lists.
            self.drain(local, wait);
            got += self.take_on(node, &mut to[got..], wait);
        }
        self.single(&mut to[..got])
    }

    /// As [`alloc_on`](Self::alloc_on), without the frames kept by this CPU.
    pub fn take_from<'b>(
        &self,
        node: u8,
        to: &'b mut [FrameNumber],
        wait: &impl Wait,
    ) -> Bulk<'b, Clean> {
        let got = self.take_on(node, to, wait);
        self.single(&mut to[..got])
    }

    /// Makes frames just taken from arenas single frames.
    fn single<'b>(&self, taken: &'b mut [FrameNumber]) -> Bulk<'b, Clean> {
        self.table.each(taken).for_each(FrameMeta::make_single);
        Bulk::new(taken)
    }

    /// Takes frames of `node` from its arenas, and returns their number.
    fn take_on(&self, node: u8, to: &mut [FrameNumber], wait: &impl Wait) -> usize {
        let mut got = 0;
        for arena in self.layout.arenas_of(node).map(|number| &self.arenas[number]) {
            if got == to.len() {
                break;
            }
            got += arena.locked(wait, |lists| lists.alloc_bulk(&self.table, &mut to[got..]));
        }
        if got == 0 {
            return 0;
        }
        // The frames are taken before they are reserved, as in `take_block`.
        let want = |available: u64| available.min(got as u64);
        let reserved = self.reserve_or_collect(1, want, wait).unwrap_or(0) as usize;
        for number in &to[reserved..got] {
            let give_back = |lists: &mut Lists| lists.free.free(&self.table, *number, 0);
            self.arena_of(*number).locked(wait, give_back);
        }
        reserved
    }

    /// Allocates up to `to.len()` zeroed frames, as many as can be spared. Returns them and the
    /// number of pre-zeroed frames among them. The others are zeroed here.
    #[inline(always)]
    pub fn alloc_zeroed_bulk<'b>(
        &self,
        local: &Local,
        machine: &impl Machine,
        to: &'b mut [FrameNumber],
        wait: &impl Wait,
    ) -> (Bulk<'b, Zeroed>, usize) {
        let spared = self.spare(local, to.len());
        let to = &mut to[..spared];
        let mut zeroed = 0;
        if self.zeroed_pool() != 0 {
            zeroed = fill(&self.stocks.get(local).zeroed, to, |rest, want| {
                self.take_zeroed(local, rest, wait, |available| self.want(want, available))
            });
            to[..zeroed].iter().for_each(|number| machine.prefetch_frame(*number));
        }
        let got = zeroed + self.fill_clean(local, &mut to[zeroed..], wait);
        for number in &to[zeroed..got] {
            let _: Frame<Zeroed> = Frame::<Clean>::new(*number, 0).zero(machine);
        }
        (Bulk::new(&mut to[..got]), zeroed)
    }

    /// [Publishes](Self::publish) the frames of `bulk` with consecutive indices, the first at page
    /// `index`, and returns their numbers.
    #[inline(never)]
    pub fn publish_bulk<'b, S: Flushed>(
        &self,
        bulk: Bulk<'b, S>,
        usage: FrameUse,
        anchor: u64,
        index: u64,
    ) -> &'b [FrameNumber] {
        let metas = self.table().each(bulk.numbers);
        metas.zip(index..).for_each(|(meta, index)| meta.publish(usage, anchor, index, 1));
        bulk.numbers
    }

    /// Frees the remaining frames.
    pub fn free_bulk<S: Flushed>(&self, local: &Local, mut bulk: Bulk<'_, S>, wait: &impl Wait) {
        while let Some(frame) = bulk.pop() {
            self.free(local, frame, wait);
        }
    }

    /// Returns how many of `wanted` frames can be taken without making memory short. Frames already
    /// owned by the CPU do not change the answer, so if they suffice, the shared count is not read.
    fn spare(&self, local: &Local, wanted: usize) -> usize {
        let own = self.stocks.get(local).clean.len() as u64 + self.reserves.get(local).len();
        if own >= wanted as u64 && !self.seems_short() {
            return wanted;
        }
        self.want(Want::Spared, self.available()).min(wanted as u64) as usize
    }

    fn want(&self, want: Want, available: u64) -> u64 {
        match want {
            Want::Batch => batch_for(available) as u64,
            Want::Spared => available.saturating_sub(self.limit() / SHORT),
        }
    }

    fn fill_clean(&self, local: &Local, to: &mut [FrameNumber], wait: &impl Wait) -> usize {
        let list = &self.stocks.get(local).clean;
        let mut got = list.take(to);
        while got < to.len() && self.restock(local, wait) != 0 {
            got += list.take(&mut to[got..]);
        }
        got
    }
}

/// How many of the available frames to take.
#[derive(Clone, Copy)]
enum Want {
    /// A batch for the CPU's list.
    Batch,
    /// The maximum without making memory short.
    Spared,
}

/// Fills `to` from the CPU's `list`, and then with frames which `take` takes from the nodes:
/// directly if the rest is a batch or more, else through the list. Returns the number of frames.
fn fill(
    list: &Magazine,
    to: &mut [FrameNumber],
    take: impl Fn(&mut [FrameNumber], Want) -> usize,
) -> usize {
    let got = list.take(to);
    let rest = &mut to[got..];
    if rest.is_empty() {
        return got;
    }
    if rest.len() >= BATCH {
        return got + take(rest, Want::Spared);
    }
    let mut batch = [FrameNumber(0); BATCH];
    let stocked = take(&mut batch, Want::Batch);
    let taken = stocked.min(rest.len());
    rest[..taken].copy_from_slice(&batch[..taken]);
    list.refill_after(&batch[..stocked], taken);
    got + taken
}
