//! Shared anonymous memory: an object that owns its pages, mapped by any number of VMAs.
//!
//! The object finds its pages through a page table of its own, in which the "address" is the byte
//! offset: the same walk, the same entry protocol and the same publication of tables as a space. A
//! page that is not there yet is put in place by whoever needs it first, without a lock. The object
//! holds one reference to each of its pages; each mapping holds one more.

use crate::addr::{FrameNumber, PAGE_SHIFT, VirtRange};
use crate::error::OutOfMemory;
use crate::fault::prepared::Prepared;
use crate::fault::table;
use crate::fault::ticket::{Abort, Ticket};
use crate::frame::Use;
use crate::heap::Shared;
use crate::machine::Machine;
use crate::table::entry::Entry;
use crate::table::node::{self, LAST, ROOT};
use crate::table::protocol;
use crate::table::range::{self, Run};
use crate::table::walk::{Reached, descend};
use crate::vm::Cpu;
use core::convert::Infallible;

/// A shared anonymous object of a fixed number of pages.
#[derive(Debug)]
pub struct SharedObject {
    root: FrameNumber,
    pages: u64,
}

impl SharedObject {
    /// An object of `pages` pages, all zero.
    pub(crate) fn try_new<M: Machine>(
        cpu: &Cpu<'_, M>,
        pages: u64,
    ) -> Result<Shared<Self>, OutOfMemory> {
        let frame = cpu.alloc_or_wait()?.zero(cpu.vm().machine());
        let root = cpu.vm().frames.publish(frame, Use::Table, 0, u64::from(ROOT));
        Shared::try_new(Self { root, pages }).inspect_err(|_| {
            // SAFETY: nobody has seen the table.
            unsafe { cpu.free_tables(root, ROOT) };
        })
    }

    /// The frame of its root table.
    pub(crate) const fn root(&self) -> FrameNumber {
        self.root
    }

    /// How many pages it has.
    pub const fn pages(&self) -> u64 {
        self.pages
    }

    /// The page at `index`, which must be below [`pages`](Self::pages), made if it was not there.
    /// The caller is in a grace section and owns a share of the object, or sees one in a VMA.
    ///
    /// # Errors
    /// [`OutOfMemory`] when no frame is left.
    pub(crate) fn page<M: Machine>(
        &self,
        cpu: &Cpu<'_, M>,
        index: u64,
        prepared: &mut Prepared,
    ) -> Result<FrameNumber, OutOfMemory> {
        let machine = cpu.vm().machine();
        let addr = index << PAGE_SHIFT;
        loop {
            // SAFETY: the object's tables are unlinked only in `destroy`, when no share is left.
            match unsafe { descend(machine, self.root, addr) } {
                Reached::Above { slot, level, seen } => {
                    if seen.is_locked() {
                        protocol::look(slot, cpu);
                        continue;
                    }
                    // Nothing can change the object behind our back, so the answer stands.
                    if table::publish(cpu, &Ticket::held(), slot, level, prepared)
                        == Err(Abort::NoMemory)
                    {
                        return Err(OutOfMemory);
                    }
                }
                Reached::Last(slots) => {
                    let slot = &slots[node::index(addr, LAST)];
                    let seen = protocol::look(slot, cpu);
                    if seen.is_present() {
                        return Ok(seen.frame());
                    }
                    let frame = prepared.zeroed(cpu).ok_or(OutOfMemory)?;
                    match protocol::take(slot, seen) {
                        Ok(held) => {
                            let number = cpu.vm().frames.publish(frame, Use::Shared, 0, index);
                            held.commit(Entry::leaf(number));
                            return Ok(number);
                        }
                        Err(_) => prepared.keep_zeroed(frame),
                    }
                }
            }
        }
    }

    /// Whether the page at `index` was made.
    pub(crate) fn has<M: Machine>(&self, cpu: &Cpu<'_, M>, index: u64) -> bool {
        // SAFETY: as in `page`.
        match unsafe { descend(cpu.vm().machine(), self.root, index << PAGE_SHIFT) } {
            Reached::Last(slots) => {
                node::load(&slots[node::index(index << PAGE_SHIFT, LAST)]).is_present()
            }
            Reached::Above { .. } => false,
        }
    }

    /// Frees all its pages and tables. No VMA uses it any more.
    pub(crate) fn destroy<M: Machine>(self, cpu: &Cpu<'_, M>) {
        let machine = cpu.vm().machine();
        let all = VirtRange::new(0, self.pages << PAGE_SHIFT);
        let put = |run: Run<'_>| {
            if let Run::Pages { slots, .. } = run {
                for entry in slots.iter().map(node::load).filter(|entry| entry.is_present()) {
                    // SAFETY: the object's own reference, which never was a mapping; those of the
                    // mappings were put when they were flushed.
                    unsafe { cpu.put_unmapped(entry.frame()) };
                }
            }
            Ok::<(), Infallible>(())
        };
        // SAFETY: the last share of the object is gone, so its tables are ours alone.
        unsafe {
            let Ok(()) = range::visit(machine, self.root, all, put);
            cpu.free_tables(self.root, ROOT);
        }
    }
}
