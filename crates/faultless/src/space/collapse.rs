//! Collapse: replaces mapped base pages of a file by a huge leaf.
//!
//! The file's pages first become a [folio](crate::file::folio), if they are not: missing pages are
//! read, and pages are moved to contiguous frames. Mapped pages do not move. So the collapse
//!
//! 1. reads missing pages, while holding no locks;
//! 2. claims the pages, and stops the VMA over them;
//! 3. unmaps and flushes the base pages of this space;
//! 4. moves the file's pages, if they have no other user: no mapping in another space, no pin, no
//!    store that is not written back;
//! 5. stores the huge leaf in place of the table, which is freed after a grace period.
//!
//! If step 4 fails, the pages stay in the file, and the next accesses map them again.

use super::Space;
use super::area::{Area, VmaFlags};
use super::batch::FlushBatch;
use super::lock::MemoryLock;
use super::made::State;
use super::write::{NOWHERE, Writing};
use crate::addr::{PAGE_SIZE, VirtRange};
use crate::error::Errno;
use crate::fault::Access;
use crate::fault::folio::{shown, wanted};
use crate::file::{Fetched, Object};
use crate::frame::{FrameUse, Kind};
use crate::heap::Shared;
use crate::knob::HugeText;
use crate::machine::Machine;
use crate::stat::Counter;
use crate::sync::atomic::AtomicU64;
use crate::sync::grace::RetireChain;
use crate::sync::mutant::{Mutant, lost};
use crate::table::Entry;
use crate::table::node::{self, ENTRIES, HUGE, TABLE_ALIGN};
use crate::table::protocol;
use crate::table::walk::{Reached, descend, slot_of};
use crate::vm::Cpu;

/// The maximum number of VMAs, and places in them, checked by one search for text.
const MOST_LOOKS: usize = 64;

/// The result of a search for text.
enum Looked {
    /// Text to collapse, at this address.
    Found(u64),
    /// No text up to this address.
    Until(u64),
    /// No text.
    End,
}

impl<M: Machine> Space<M> {
    /// Collapses the parts of `range` that huge leaves can map: `MADV_COLLAPSE`. Continues after a
    /// part that cannot be collapsed.
    pub(super) fn collapse(&self, cpu: &Cpu<'_, M>, range: VirtRange) -> Result<(), Errno> {
        // As on Linux, a range that reaches no multiple of 2 MiB is an error; an empty range
        // between two equal multiples is not.
        let first = range.start.checked_next_multiple_of(TABLE_ALIGN);
        let short = first.is_none_or(|first| first > range.end);
        let (mut at, mut result) = (range.start, if short { Err(Errno::EINVAL) } else { Ok(()) });
        // Holes of any size are skipped: the range need not even lie in user space.
        while let Some(mapped) = self.mapped_from(cpu, at).filter(|mapped| *mapped < range.end) {
            let start = mapped.next_multiple_of(TABLE_ALIGN);
            at = start + TABLE_ALIGN;
            if at > range.end {
                break;
            }
            result = result.and(self.collapse_at(cpu, start));
        }
        // A hole is an error, regardless of the other results.
        if self.is_mapped(cpu, range) { result } else { Err(Errno::ENOMEM) }
    }

    /// Returns the first mapped address at or after `addr`.
    fn mapped_from(&self, cpu: &Cpu<'_, M>, addr: u64) -> Option<u64> {
        let section = self.section(cpu);
        self.view(cpu, &section).find(addr).map(|entry| entry.start.max(addr))
    }

    /// Searches for text that is in use and mapped by base pages, starting at address `from`, and
    /// collapses the first text found: 2 MiB of a mapping for which the knob `huge_text`, or the
    /// advice, selects huge pages, with at least `least` accessed pages. Returns the address at
    /// which to continue, or `None` at the end of the space. A kernel calls the function
    /// periodically, in the background: a call checks a bounded number of VMAs and tables,
    /// collapses at most once, and does not wait for pages that must first be read. They may be
    /// present the next time.
    pub fn collapse_text(&self, cpu: &Cpu<'_, M>, from: u64, least: usize) -> Option<u64> {
        self.check_vm(cpu);
        match self.look_for_text(cpu, from, least) {
            Looked::Found(start) => {
                // A refused collapse may succeed the next time.
                let _refused = self.collapse_at(cpu, start);
                // The caller does not wait for a read begun here.
                drop(cpu.pending_read());
                cpu.collect();
                Some(start + TABLE_ALIGN)
            }
            Looked::Until(addr) => Some(addr),
            Looked::End => None,
        }
    }

    fn look_for_text(&self, cpu: &Cpu<'_, M>, from: u64, least: usize) -> Looked {
        let choice = cpu.vm().knobs.huge_text();
        if choice == HugeText::Never {
            return Looked::End;
        }
        let section = self.section(cpu);
        let mut looks = 0;
        for entry in self.view(cpu, &section).iter_from(from) {
            let area = entry.get().area();
            let mut start = area.range.start.max(from).next_multiple_of(TABLE_ALIGN);
            loop {
                if looks == MOST_LOOKS {
                    return Looked::Until(start);
                }
                looks += 1;
                // The reasons that forbid a leaf here also apply to all following places: the
                // advice, the offset, the end of the VMA or of the file.
                if wanted(choice, area, start).is_none() {
                    break;
                }
                if self.used_in(cpu, start) >= least {
                    return Looked::Found(start);
                }
                start += TABLE_ALIGN;
            }
        }
        Looked::End
    }

    /// Returns how many accessed base pages the table of `start` maps. The caller is in a grace
    /// section.
    fn used_in(&self, cpu: &Cpu<'_, M>, start: u64) -> usize {
        // SAFETY: the caller is in a grace section.
        match unsafe { descend(cpu.vm().machine(), self.root(), start) } {
            Reached::Last(slots) => slots.iter().filter(|slot| node::load(slot).was_used()).count(),
            Reached::Above { .. } => 0,
        }
    }

    /// Collapses the pages starting at `start`.
    fn collapse_at(&self, cpu: &Cpu<'_, M>, start: u64) -> Result<(), Errno> {
        let found = self.with_vma(cpu, start, |vma| {
            let area = vma.area();
            let locked = area.lock() != MemoryLock::No;
            Some(collapsible(area, start).map(|(object, first)| (object.clone(), first, locked)))
        });
        let (object, first, locked) = found.ok_or(Errno::ENOMEM)?.ok_or(Errno::EINVAL)?;
        if !object.has_folio(cpu, first) {
            // A folio requires a free block.
            cpu.compact_for_folio();
        }
        let all = VirtRange::new(start, start + TABLE_ALIGN);
        let replace = || self.write(cpu, [all, NOWHERE], TABLE_ALIGN).collapse(all);
        let done = match object.fetch_missing(cpu, first) {
            Ok(Fetched::There) => match replace() {
                // A fault makes the leaf, or a table for the collapse to replace: the fault checks
                // the knob, and may be forbidden to make a folio.
                Ok(Replaced::Nothing) => match self.fault_mapped(cpu, start, Access::Read) {
                    Ok(_) => replace(),
                    Err(_) => Err(Errno::EAGAIN),
                },
                done => done,
            },
            Ok(Fetched::Pending(pending)) => {
                cpu.set_pending(pending);
                Err(Errno::EAGAIN)
            }
            Err(errno) => Err(errno),
        };
        Object::release(object, cpu);
        match done? {
            Replaced::Leaf => Ok(()),
            // The pages mapped by the fault are unmapped again.
            Replaced::Nothing => Err(Errno::EAGAIN),
            Replaced::Unmapped => {
                if locked {
                    self.map_again(cpu, all);
                }
                Err(Errno::EAGAIN)
            }
        }
    }

    /// Maps the pages of `all` again, which are locked and were unmapped. The file has the pages,
    /// so this needs no copy and no wait.
    fn map_again(&self, cpu: &Cpu<'_, M>, all: VirtRange) {
        for page in (all.start..all.end).step_by(PAGE_SIZE as usize) {
            if self.entry_at(cpu, page).is_none() {
                let _gone = self.fault_mapped(cpu, page, Access::Read);
            }
        }
    }
}

/// The result of an attempt to make a huge leaf.
enum Replaced {
    /// There is a leaf now.
    Leaf,
    /// None of the pages is mapped, and there is no table.
    Nothing,
    /// The pages are unmapped, and there is no leaf.
    Unmapped,
}

/// Returns what a huge leaf at `start` would map of `area`, unless its advice forbids a leaf.
fn collapsible(area: Area<'_>, start: u64) -> Option<(&Shared<Object>, u64)> {
    shown(area, start).filter(|_| !area.flags.contains(VmaFlags::NOHUGEPAGE))
}

impl<M: Machine> Writing<'_, '_, M> {
    /// Steps 2 to 5, for the pages of `all`. After an error nothing has changed.
    fn collapse(&self, all: VirtRange) -> Result<Replaced, Errno> {
        let (cpu, root) = (self.cpu, self.space.root());
        let vma = self.vma_at(all.start).ok_or(Errno::ENOMEM)?;
        let area = vma.area();
        let (object, first) = collapsible(area, all.start).ok_or(Errno::EINVAL)?;
        let object = object.clone();
        let leaf = vma.leaf;
        let hidden = area.prot.is_empty();
        let names = object.slots(cpu, first);
        // SAFETY: the range is claimed.
        let reached = unsafe { descend(cpu.vm().machine(), root, all.start) };
        let done = match (reached, names) {
            (_, None) => Err(Errno::EAGAIN),
            (Reached::Above { seen, .. }, _) if seen.is_huge() => Ok(Replaced::Leaf),
            (Reached::Above { .. }, _) => Ok(Replaced::Nothing),
            (Reached::Last(slots), Some(names)) => {
                let leaf = leaf.with_hidden(hidden);
                self.step(all.with_neighbours(), |step| {
                    let piece = step.take(all)?;
                    step.replace(all, piece, State::WriteLocked)
                })?;
                // From here on no fault makes a private copy.
                let files = slots.iter().all(|slot| self.is_files(slot));
                let can =
                    (files || lost(Mutant::CollapseLooksAgain)) && self.may_move(slots, names);
                let replaced = if can {
                    Ok(self.replace_table(all, leaf, &object, names, first))
                } else {
                    Err(Errno::EAGAIN)
                };
                self.finish();
                replaced
            }
        };
        Object::release(object, cpu);
        done
    }

    /// Returns whether the file's pages with the entries `names`, which this space maps through
    /// `slots`, may move and have no other user, or need not move. Checked before the pages are
    /// unmapped, to avoid a useless unmap. The result may be out of date, because other CPUs may
    /// change the pages.
    fn may_move(&self, slots: &[AtomicU64], names: &[AtomicU64; ENTRIES]) -> bool {
        let own = |(name, slot): (&AtomicU64, &AtomicU64)| {
            let (page, mapping) = (node::load(name), node::load(slot));
            let refs = 1 + u32::from(mapping.is_mapped());
            let meta = |page: Entry| self.cpu.vm().frames.meta(page.frame());
            Object::may_move(page) && meta(page).refs() <= refs && !meta(page).is_pinned()
        };
        Object::folio(names).is_some() || names.iter().zip(slots).all(own)
    }

    /// Returns whether the page of `slot` is the file's, and neither a private copy nor missing.
    fn is_files(&self, slot: &AtomicU64) -> bool {
        loop {
            let entry = protocol::wait_and_load(slot, self.cpu);
            if !entry.is_mapped() || entry.is_special() {
                return entry.is_none();
            }
            let kind = self.cpu.vm().frames.meta(entry.frame()).kind();
            // A page may move, and its frame may be reused.
            if node::load(slot).frame() == entry.frame() {
                return kind == Kind::Used(FrameUse::Shared);
            }
        }
    }

    /// Replaces the last-level table of `all`, whose VMA is stopped, by a huge leaf made of `leaf`.
    fn replace_table(
        &self,
        all: VirtRange,
        leaf: Entry,
        object: &Shared<Object>,
        names: &[AtomicU64; ENTRIES],
        first: u64,
    ) -> Replaced {
        let cpu = self.cpu;
        let mut batch = FlushBatch::new(cpu, self.space);
        self.zap(all, None, &mut batch);
        batch.finish();
        let made = Object::folio(names).is_some() || object.gather(cpu, names, first);
        let frame = made.then(|| Object::refer_to_folio(cpu, names)).flatten();
        if let Some(frame) = frame {
            let mut batch = FlushBatch::new(cpu, self.space);
            // SAFETY: the range is claimed, and its table exists.
            let slot = unsafe { slot_of(cpu.vm().machine(), self.space.root(), all.start, HUGE) };
            let replaced =
                slot.map(|slot| protocol::wait_and_replace(slot, cpu, |_| leaf.of(frame).huge()));
            let mut unlinked = RetireChain::default();
            if let Some((table, _)) = replaced.filter(|(table, _)| table.is_table()) {
                self.retire_table(table.frame(), &mut unlinked);
            }
            // CPUs may have cached the path to the table.
            batch.flush(all);
            // SAFETY: unlinked just now, with the only VMA over its span stopped; retired once. The
            // batch is finished before this call's section closes, so before the table is freed.
            unsafe { cpu.retire_all(unlinked) };
            batch.finish();
            cpu.add_resident(self.space, ENTRIES as i64);
            cpu.count(Counter::ThpFileMapped);
            cpu.count(Counter::FilePmdMapped);
            cpu.count(Counter::ThpCollapsed);
        }
        if frame.is_some() { Replaced::Leaf } else { Replaced::Unmapped }
    }
}
