//! `move_pages`: reports the memory nodes of pages, and moves pages between nodes.

use super::Space;
use crate::addr::{FrameNumber, VirtRange, page_down};
use crate::error::{Errno, Error};
use crate::file::pages::Lent;
use crate::frame::{FrameUse, Kind, folio};
use crate::machine::Machine;
use crate::reclaim::isolate::BATCH;
use crate::reclaim::migrate::Moving;
use crate::table::format::USER_END;
use crate::vm::Cpu;

impl<M: Machine> Space<M> {
    /// Writes the memory nodes of the pages at the addresses `pages` to `status`, in the same
    /// order, as `move_pages` of Linux does without a list of nodes. A status is `ENOENT` if the
    /// page is not in memory, and `EFAULT` if nothing is mapped, and for the zero page and device
    /// memory.
    ///
    /// The shorter of the two slices decides the number of pages.
    pub fn page_nodes(&self, cpu: &Cpu<'_, M>, pages: &[u64], status: &mut [Result<u8, Errno>]) {
        self.check_vm(cpu);
        for (addr, status) in pages.iter().zip(status) {
            *status = self.lend_page(cpu, *addr).map(|page| cpu.vm().frames.node(page.frame()));
        }
    }

    /// Moves the pages at the addresses `pages` to frames of `node`, as `move_pages` of Linux does,
    /// and loses no store of a program. For each page, `status` receives the node where the page is
    /// afterwards, or the reason why the page did not move: `ENOENT` if the page is not in memory;
    /// `EFAULT` if nothing is mapped, and for the zero page and device memory; `EACCES` if the page
    /// has other mappings, and `all` is not set; `EBUSY` if the page is pinned, or another call is
    /// using the page; `ENOMEM` if the node has no free frame, which the call finds before checking
    /// whether the page may move. A page that is already in `node` stays there, pinned or not.
    ///
    /// The call waits for other CPUs, so it is not allowed inside a closure that lists areas.
    ///
    /// # Errors
    /// `ENODEV` if the machine has no memory in `node`, `EINVAL` if `pages` and `status` differ in
    /// length. No page has moved then.
    pub fn move_pages(
        &self,
        cpu: &Cpu<'_, M>,
        pages: &[u64],
        node: u8,
        all: bool,
        status: &mut [Result<u8, Errno>],
    ) -> Result<(), Error> {
        self.check_vm(cpu);
        let refused = |errno| Error { operation: "move_pages", range: Error::NO_RANGE, errno };
        if pages.len() != status.len() {
            return Err(refused(Errno::EINVAL));
        }
        let regions = cpu.vm().machine().regions();
        if !regions.iter().any(|region| region.node == node && region.frames != 0) {
            return Err(refused(Errno::ENODEV));
        }
        for (pages, status) in pages.chunks(BATCH).zip(status.chunks_mut(BATCH)) {
            self.move_some(cpu, pages, node, all, status);
        }
        cpu.collect();
        Ok(())
    }

    /// [`move_pages`](Self::move_pages) for at most [`BATCH`] pages.
    fn move_some(
        &self,
        cpu: &Cpu<'_, M>,
        pages: &[u64],
        node: u8,
        all: bool,
        status: &mut [Result<u8, Errno>],
    ) {
        let _holds = cpu.hold_pages();
        let nothing = |_| Moving { frame: cpu.vm().zero, outcome: Err(Errno::EBUSY) };
        let mut moving: [Moving; BATCH] = core::array::from_fn(nothing);
        // The index of each page in `moving`: a page that is listed twice moves once.
        let (mut count, mut places) = (0, [None; BATCH]);
        for (at, addr) in pages.iter().enumerate() {
            let known = &moving[..count];
            let asked = self.lend_page(cpu, *addr).and_then(|page| {
                let known = known.iter().position(|moving| moving.frame == page.frame());
                let moves = known.is_none() && cpu.vm().frames.node(page.frame()) != node;
                if moves && !all && is_shared(cpu, page.frame()) {
                    return Err(Errno::EACCES);
                }
                Ok((page, known, moves))
            });
            status[at] = asked.map(|(page, known, moves)| {
                if known.is_some() {
                    places[at] = known;
                } else if moves {
                    moving[count].frame = page.keep();
                    places[at] = Some(count);
                    count += 1;
                }
                node
            });
        }
        cpu.migrate(&mut moving[..count], node);
        for (place, status) in places.iter().zip(status) {
            if let Some(Err(errno)) = place.map(|place| moving[place].outcome) {
                *status = Err(errno);
            }
        }
    }

    /// Returns the page that is mapped at `addr`, with a reference.
    fn lend_page<'a, 'v>(&self, cpu: &'a Cpu<'v, M>, addr: u64) -> Result<Lent<'a, 'v, M>, Errno> {
        let found = self.find_page(cpu, addr);
        let mapped = || addr < USER_END && self.is_mapped(cpu, VirtRange::page(addr));
        found.map_err(
            |errno| {
                if errno == Errno::ENOENT && !mapped() { Errno::EFAULT } else { errno }
            },
        )
    }

    fn find_page<'a, 'v>(&self, cpu: &'a Cpu<'v, M>, addr: u64) -> Result<Lent<'a, 'v, M>, Errno> {
        let section = self.section(cpu);
        // Another CPU that owns the space may change the tables in place.
        self.core.enter(cpu.id(), cpu, &section);
        let page = page_down(addr);
        loop {
            let entry = self.entry_by(cpu, &section, page, |slot| slot.wait_and_load(cpu));
            let entry = entry.ok_or(Errno::ENOENT)?;
            if !entry.is_mapped() {
                return Err(Errno::ENOENT);
            }
            if entry.is_special() {
                return Err(Errno::EFAULT);
            }
            let Some(lent) = Lent::try_new(cpu, entry.frame()) else { continue };
            let now =
                self.entry_by(cpu, &section, page, |slot| slot.load()).ok_or(Errno::ENOENT)?;
            if now.is_mapped() && !now.is_locked() && now.frame() == entry.frame() {
                return Ok(lent);
            }
        }
    }
}

/// Returns whether a page has other mappings. The caller has a reference besides the entry's.
pub(super) fn is_shared<M: Machine>(cpu: &Cpu<'_, M>, frame: FrameNumber) -> bool {
    let frames = &cpu.vm().frames;
    let meta = frames.meta(frame);
    if meta.kind() != Kind::Used(FrameUse::Shared) {
        return meta.refs() > 2;
    }
    meta.refs() > 3 || leaves_of(cpu, frame) > 1
}

/// Returns the number of huge leaves that map the folio of an object's frame, or 0 without a folio.
/// All these leaves share one reference to each frame.
pub(super) fn leaves_of<M: Machine>(cpu: &Cpu<'_, M>, frame: FrameNumber) -> u32 {
    let first = folio::first_of(frame);
    let leaves = cpu.vm().frames.table().find(first).filter(|meta| meta.get_ref_unless_zero());
    leaves.map_or(0, |meta| {
        let leaves = meta.leaves();
        // SAFETY: the reference just taken, which never was a mapping.
        unsafe { cpu.put_unmapped(first) };
        leaves
    })
}
