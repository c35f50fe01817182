//! Migration: moves pages to other frames while programs use them.
//!
//! A page may be mapped by many entries, in many spaces. The [reverse map](crate::rmap) finds them. A batch of pages moves like this:
//!
//! 1. it finds the entries of each page, and the page's entry in its object if it is one's, and holds none yet. Huge leaves are split;
//! 2. it takes all of a page's entries, each by a compare-and-swap from a value that names the frame, and waits for none. If one cannot be had,
//!    or the frame has another number of references than entries were taken, the page stays: it is pinned, or the kernel reads or
//!    writes it, or a fork or an `mremap` is under way;
//! 3. it flushes the translations of the whole batch, once for each space; the flush of a page all of whose mappings are read-only is
//!    [deferred](crate::tlb::deferred), if it may be;
//! 4. it copies the bytes, describes the new frames, and stores entries that differ from the old ones in the frame alone;
//! 5. it drops the references of the old frames. A frame whose flush is deferred is kept as it is.
//!
//! From step 2 to step 4 the entries are busy: faults and writers wait for them. So no store is lost: none comes between the flush
//! and the new entry. No VMA is looked at and no page is claimed: writers change an entry before it is taken or after it is stored.
//!
//! A CPU that takes a reference to a frame by an entry reads the entry again afterwards. So the count in step 2 proves that no other CPU
//! has a reference that this CPU does not know, and any CPU that takes one later finds the entry busy and drops it.

use crate::addr::{FrameNumber, VirtRange};
use crate::error::{Errno, OutOfMemory};
use crate::file::Object;
use crate::frame::{Clean, Frame, FrameMeta, Kind, Use};
use crate::heap::{Bounded, Shared, try_push};
use crate::machine::Machine;
use crate::rmap::walk::Found;
use crate::space::batch::shoot_core;
use crate::space::huge::split_leaf;
use crate::stat::Counter;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::grace::Section;
use crate::sync::mutant::{Mutant, lost};
use crate::sync::order::{self, Reclaim};
use crate::table::Entry;
use crate::table::node::{self, TABLE_ALIGN};
use crate::table::protocol::{self, Taken};
use crate::vm::Cpu;
use alloc::vec::Vec;
use core::ops::{ControlFlow, Range};

/// Pages that move together, with one flush for each space.
pub(crate) const BATCH: usize = 32;

/// A page that is to move.
#[derive(Debug)]
pub(crate) struct Moving {
    /// Its frame, to which the batch has a reference.
    pub(crate) frame: FrameNumber,
    /// The frame that it moved to, or why it did not move.
    pub(crate) outcome: Result<FrameNumber, Errno>,
}

/// An entry that maps a page, taken or not.
struct Mapping<'s> {
    found: Found<'s>,
    taken: Option<Taken<'s>>,
    /// What is flushed because of it.
    flush: Option<VirtRange>,
}

/// The work on one page.
struct Page<'s> {
    /// Its mappings, in the list of the batch.
    mappings: Range<usize>,
    /// Its object, and its entry there.
    object: Option<Shared<Object>>,
    name: Option<&'s AtomicU64>,
    taken: Option<(Taken<'s>, Entry)>,
    to: Option<Frame<Clean>>,
    /// Its flush is deferred.
    defers: bool,
}

impl<M: Machine> Cpu<'_, M> {
    /// Moves the pages of `batch`, at most [`BATCH`], to frames of node `node`, and drops the reference that the caller has to each frame.
    /// Not inside a grace section, and holding no lock.
    pub(crate) fn migrate(&self, batch: &mut [Moving], node: u8) {
        order::before::<Reclaim>(self);
        // Spaces that are entered wait for this CPU when they end.
        let _entered = order::hold::<Reclaim>(self);
        {
            let section = self.section();
            self.migrate_in(&section, batch, node);
        }
        for moving in batch.iter() {
            if moving.outcome.is_ok() {
                self.count(Counter::MigrateSuccess);
                continue;
            }
            self.count(Counter::MigrateFail);
            // SAFETY: the batch's own reference, which never was a mapping. Those of the mappings were dropped after a flush.
            unsafe { self.put_unmapped(moving.frame) };
        }
    }

    fn migrate_in<'s>(&'s self, section: &'s Section<'_>, batch: &mut [Moving], node: u8) {
        let mut numbers = [FrameNumber(0); BATCH];
        let to = &mut numbers[..batch.len()];
        let mut frames = self.vm().frames.alloc_on(self.local(), node, to, self);
        if frames.len() < batch.len() && self.settle_owed() {
            self.free_bulk(frames);
            let to = &mut numbers[..batch.len()];
            frames = self.vm().frames.alloc_on(self.local(), node, to, self);
        }
        let mut mappings: Vec<Mapping<'s>> = Vec::new();
        let Ok(mut pages) = Bounded::<Page<'s>>::try_new(batch.len()) else {
            self.free_bulk(frames);
            batch.iter_mut().for_each(|moving| moving.outcome = Err(Errno::ENOMEM));
            return;
        };
        for moving in batch.iter_mut() {
            let to = frames.pop();
            let found = match &to {
                Some(_) => self.find_entries(section, moving.frame, &mut mappings),
                None => Err(Errno::ENOMEM),
            };
            let mut page =
                Page { mappings: 0..0, object: None, name: None, taken: None, to, defers: false };
            match found {
                Ok((range, object)) => {
                    let index = self.vm().frames.meta(moving.frame).index.load(Ordering::Relaxed);
                    page.mappings = range;
                    page.name = object.as_ref().and_then(|object| object.slot(self, index));
                    page.object = object;
                    moving.outcome = Ok(moving.frame);
                }
                Err(errno) => moving.outcome = Err(errno),
            }
            pages.push(page);
        }
        // From here on entries are held, and this CPU waits for nothing but flushes.
        for (moving, page) in batch.iter_mut().zip(pages.iter_mut()) {
            if moving.outcome.is_ok() && !self.take_page(moving.frame, page, &mut mappings) {
                moving.outcome = Err(Errno::EBUSY);
            }
        }
        let stamp = self.defer(&mut pages, &mappings);
        if !lost(Mutant::MigrateFlush) {
            self.flush_mappings(&pages, &mut mappings);
        }
        for (moving, page) in batch.iter_mut().zip(pages.iter_mut()) {
            if let (Ok(_), Some(to)) = (moving.outcome, page.to.take_if(|_| moving.outcome.is_ok()))
            {
                moving.outcome = Ok(self.complete(moving.frame, to, page, &mut mappings, stamp));
            }
        }
        // Shares of objects are dropped here: if one is the last, a CPU ends the object later.
        pages.iter_mut().filter_map(|page| page.to.take()).for_each(|frame| self.free(frame));
        self.free_bulk(frames);
    }

    /// Adds the entries that map `frame` to `mappings`, and returns which they are, and the page's object.
    fn find_entries<'s>(
        &'s self,
        section: &'s Section<'_>,
        frame: FrameNumber,
        mappings: &mut Vec<Mapping<'s>>,
    ) -> Result<(Range<usize>, Option<Shared<Object>>), Errno> {
        let meta = self.vm().frames.meta(frame);
        let first = mappings.len();
        // A huge leaf is split, and the pages are then found one by one. Several spaces may have one.
        loop {
            // All references but the caller's own, and an object's. VMAs of one space may lead to the same entry of an object's page.
            let of_object = meta.kind() == Kind::Used(Use::Shared);
            let most = meta.refs().saturating_sub(1 + u32::from(of_object));
            let most = if of_object && most != 0 { u32::MAX } else { most };
            let (mut leaf, mut failed) = (None, None);
            let object = self.each_mapping(section, frame, most, |found| {
                if found.seen.is_huge() {
                    leaf = Some(found);
                    return ControlFlow::Break(());
                }
                match try_push(mappings, Mapping { found, taken: None, flush: None }) {
                    Ok(()) => ControlFlow::Continue(()),
                    Err(OutOfMemory) => {
                        failed = Some(Errno::ENOMEM);
                        ControlFlow::Break(())
                    }
                }
            });
            if let Some(errno) = failed {
                mappings.truncate(first);
                return Err(errno);
            }
            let Some(Found { space, addr, slot, .. }) = leaf else {
                if of_object {
                    drop_twice(mappings, first);
                }
                return Ok((first..mappings.len(), object));
            };
            mappings.truncate(first);
            split_leaf(self, &space, addr & !(TABLE_ALIGN - 1), slot);
        }
    }

    /// Takes all entries of a page, or none. Returns whether it has them.
    fn take_page<'s>(
        &'s self,
        frame: FrameNumber,
        page: &mut Page<'s>,
        mappings: &mut [Mapping<'s>],
    ) -> bool {
        let meta = self.vm().frames.meta(frame);
        let mappings = &mut mappings[page.mappings.clone()];
        let mut all = true;
        if meta.kind() == Kind::Used(Use::Shared) {
            page.taken = page.name.and_then(|name| self.take_of(name, node::load(name), frame));
            // A page that was cut off its object is about to be revoked.
            all = page.taken.is_some();
        }
        for mapping in &mut *mappings {
            if !all {
                break;
            }
            let Found { slot, seen, .. } = mapping.found;
            match self.take_of(slot, seen, frame) {
                Some((taken, seen)) => {
                    mapping.found.seen = seen;
                    mapping.taken = Some(taken);
                }
                None => all = false,
            }
        }
        // The entries' references, and the batch's own.
        let known = mappings.len() as u32 + u32::from(page.taken.is_some()) + 1;
        let alone = meta.refs() == known && !meta.is_pinned();
        if all && known > 1 && (alone || lost(Mutant::MigrateCounts)) {
            return true;
        }
        mappings.iter_mut().filter_map(|mapping| mapping.taken.take()).for_each(Taken::revert);
        if let Some((taken, _)) = page.taken.take() {
            taken.revert();
        }
        false
    }

    /// Takes an entry of the last level that was `seen`, if it maps `frame`, and returns its value.
    fn take_of<'s>(
        &'s self,
        slot: &'s AtomicU64,
        mut seen: Entry,
        frame: FrameNumber,
    ) -> Option<(Taken<'s>, Entry)> {
        while seen.is_mapped() && !seen.is_locked() && seen.frame() == frame {
            match protocol::take(slot, seen, self) {
                Ok(taken) => return Some((taken, seen)),
                // Accessed or dirty by now, or another's.
                Err(now) => seen = now,
            }
        }
        None
    }

    /// Chooses those of the pages whose entries are taken that need not be flushed at once, and returns the stamp of their flush.
    fn defer(&self, pages: &mut [Page<'_>], mappings: &[Mapping<'_>]) -> u64 {
        if !self.vm().knobs.deferred_flush() || !self.vm().frames.may_defer() {
            return 0;
        }
        for page in &mut *pages {
            let own = &mappings[page.mappings.clone()];
            page.defers = !own.is_empty() && own.iter().all(|mapping| self.may_defer(mapping));
        }
        let deferred = || pages.iter().filter(|page| page.defers);
        if deferred().next().is_none() {
            return 0;
        }
        let spaces = || deferred().flat_map(|page| &mappings[page.mappings.clone()]);
        let stamp = self.defer_flush(spaces().map(|mapping| &*mapping.found.space.cpus));
        // Before the new entries are stored: a CPU that finds one, and then changes what the page shows, finds the stamp.
        for page in deferred() {
            for mapping in &mappings[page.mappings.clone()] {
                mapping.found.space.pending.note(stamp);
            }
            if let Some(object) = &page.object {
                object.pending.note(stamp);
            }
        }
        stamp
    }

    /// Whether no CPU can store by a translation of an entry, which is taken.
    fn may_defer(&self, mapping: &Mapping<'_>) -> bool {
        let stores = mapping.found.seen.is_writable() && !lost(Mutant::DeferLooksAtStores);
        let claimed = self.is_claimed(mapping) && !lost(Mutant::DeferLooksAtClaims);
        mapping.taken.is_some() && !stores && !claimed
    }

    /// What is to be flushed of an entry's space before its frame is another's, if the entry is taken. All of it, where the flush of an operation that has
    /// changed the entry may be under way: it has taken permissions away here, or moved the entry here from an address that CPUs still use.
    fn what_to_flush(&self, mapping: &Mapping<'_>) -> Option<VirtRange> {
        let Found { addr, seen, .. } = mapping.found;
        if mapping.taken.is_none() {
            None
        } else if self.is_claimed(mapping) && !lost(Mutant::FlushLooksAtClaims) {
            Some(VirtRange::USER)
        } else {
            Entry::NONE.needs_flush(seen).then(|| VirtRange::page(addr))
        }
    }

    /// Whether an operation has a claim on the page of an entry, which is taken: it takes permissions away, or moves entries, before it flushes. Looked at behind
    /// the barrier with which the entry was taken: one that changed the entry before has its claim still, unless it has flushed.
    fn is_claimed(&self, mapping: &Mapping<'_>) -> bool {
        let Found { space, addr, .. } = &mapping.found;
        space.mmap_lock.is_held()
            || space.ranges.is_claimed(&self.vm().claims, VirtRange::page(*addr))
    }

    /// Flushes the entries that were taken, space by space, but for those of pages whose flush is deferred.
    fn flush_mappings(&self, pages: &[Page<'_>], mappings: &mut [Mapping<'_>]) {
        for page in pages.iter().filter(|page| !page.defers) {
            for mapping in &mut mappings[page.mappings.clone()] {
                mapping.flush = self.what_to_flush(mapping);
            }
        }
        let flushed = || mappings.iter().filter(|it| it.flush.is_some());
        for (at, Mapping { found: Found { space, .. }, .. }) in flushed().enumerate() {
            let same = |other: &&Mapping<'_>| other.found.space.id == space.id;
            if flushed().take(at).any(|other| same(&other)) {
                continue;
            }
            let ranges = flushed().filter(same).filter_map(|it| it.flush);
            if let Some(hull) = ranges.reduce(VirtRange::hull) {
                shoot_core(self, space, hull);
            }
        }
    }

    /// Copies a page whose entries are all taken and flushed, stores the new entries, and drops the references to the old frame. Returns the new one.
    fn complete(
        &self,
        from: FrameNumber,
        to: Frame<Clean>,
        page: &mut Page<'_>,
        mappings: &mut [Mapping<'_>],
        stamp: u64,
    ) -> FrameNumber {
        let meta: &FrameMeta = self.vm().frames.meta(from);
        // SAFETY: the new frame is ours, and the old one is referred to.
        unsafe { self.vm().machine().copy_frame(to.number(), from) };
        let usage = if page.taken.is_some() { Use::Shared } else { Use::Anon };
        let anchor = meta.anchor.load(Ordering::Relaxed);
        let index = meta.index.load(Ordering::Relaxed);
        let refs = page.mappings.len() as u32 + u32::from(page.taken.is_some());
        let to = self.vm().frames.publish_shared(to, usage, anchor, index, refs);
        for mapping in &mut mappings[page.mappings.clone()] {
            if let Some(taken) = mapping.taken.take() {
                taken.commit(mapping.found.seen.with_frame(to));
            }
        }
        if let Some((taken, seen)) = page.taken.take() {
            taken.commit(seen.with_frame(to));
        }
        // With the batch's own.
        let all = refs + 1;
        if page.defers {
            if meta.put_all(all) {
                // SAFETY: all references were ours, and no entry names the frame.
                let owed = unsafe { self.vm().frames.reclaim(from) };
                self.keep_owed(owed, stamp);
                return to;
            }
            // Who looked at an old entry has a reference for a moment, and may be the one that frees the frame.
            self.settle_pending();
        }
        for _ in 0..all {
            // SAFETY: the references of the old entries, which are gone, and flushed; and the batch's own.
            unsafe { self.put_unmapped(from) };
        }
        to
    }
}

/// Drops those of `mappings` from `first` on that are of the same entry as another.
fn drop_twice(mappings: &mut Vec<Mapping<'_>>, first: usize) {
    let slot = |mapping: &Mapping<'_>| core::ptr::from_ref(mapping.found.slot).addr();
    mappings[first..].sort_unstable_by_key(slot);
    let mut kept = first;
    for at in first..mappings.len() {
        if at == first || slot(&mappings[at]) != slot(&mappings[kept - 1]) {
            mappings.swap(kept, at);
            kept += 1;
        }
    }
    mappings.truncate(kept);
}
