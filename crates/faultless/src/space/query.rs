//! What can be asked of a space: its map, its counts, and which pages are there.

use super::pages::each_slot;
use super::vma::{Prot, Vma, VmaFlags};
use super::{Heap, Space};
use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtRange, is_page_aligned, page_up};
use crate::error::{Errno, Error};
use crate::machine::{CpuId, Machine};
use crate::sync::atomic::Ordering;
use crate::sync::wait::Spin;
use crate::table::node;
use crate::vm::Cpu;
use core::fmt;

/// A VMA as a listing shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AreaInfo {
    /// Where it lies.
    pub range: VirtRange,
    /// What programs may do with it.
    pub prot: Prot,
    /// How it behaves.
    pub flags: VmaFlags,
    /// Byte offset into its object; 0 for private memory.
    pub offset: u64,
    /// `[heap]`, `[stack]`, `/dev/zero (deleted)` or nothing.
    pub name: &'static str,
    /// Pages of it that are there: of its own, or of its object; not the page of zeros.
    pub resident: u64,
    /// Pages of it that show the page of zeros.
    pub zero: u64,
}

/// One line of `/proc/self/maps`.
impl fmt::Display for AreaInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bit = |prot, mark| if self.prot.contains(prot) { mark } else { '-' };
        let VirtRange { start, end } = self.range;
        // Linux pads what comes before the name to 73 columns.
        let columns = {
            let digits = |value: u64| (value.max(1).ilog2() / 4 + 1).max(8) as usize;
            digits(start) + digits(end) + digits(self.offset) + 16
        };
        write!(
            f,
            "{start:08x}-{end:08x} {}{}{}{} {:08x} 00:00 0 ",
            bit(Prot::READ, 'r'),
            bit(Prot::WRITE, 'w'),
            bit(Prot::EXEC, 'x'),
            if self.flags.contains(VmaFlags::SHARED) { 's' } else { 'p' },
            self.offset,
        )?;
        if self.name.is_empty() {
            return Ok(());
        }
        write!(f, "{:pad$}{}", "", self.name, pad = 73usize.saturating_sub(columns))
    }
}

/// A listing of a space's VMAs in the form of `/proc/self/maps`.
pub struct Maps<'a, 'v, M: Machine> {
    space: &'a Space<M>,
    cpu: &'a Cpu<'v, M>,
}

impl<M: Machine> fmt::Debug for Maps<'_, '_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<M: Machine> fmt::Display for Maps<'_, '_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut result = Ok(());
        self.space.areas(self.cpu, |area| {
            if result.is_ok() {
                result = writeln!(f, "{area}");
            }
        });
        result
    }
}

impl<M: Machine> Space<M> {
    /// The space's VMAs in the form of `/proc/self/maps`.
    pub fn maps<'a, 'v>(&'a self, cpu: &'a Cpu<'v, M>) -> Maps<'a, 'v, M> {
        Maps { space: self, cpu }
    }

    /// Tells of each VMA, in ascending order, all of one moment (but for the counts of pages).
    pub fn areas(&self, cpu: &Cpu<'_, M>, mut tell: impl FnMut(AreaInfo)) {
        let heap = *self.heap.lock(cpu);
        let section = cpu.section();
        for entry in self.tree.snapshot(&section).iter_from(0) {
            // SAFETY: VMAs in a view live as long as the section.
            tell(self.describe(cpu, unsafe { entry.value.as_ref() }, heap));
        }
    }

    fn describe(&self, cpu: &Cpu<'_, M>, vma: &Vma, heap: Heap) -> AreaInfo {
        let area = &vma.area;
        let (mut resident, mut zero) = (0, 0);
        // SAFETY: the caller is in a grace section.
        unsafe {
            each_slot(cpu, self.root(), area.range, |_, slot| {
                let entry = node::load(slot);
                match (entry.is_mapped(), entry.is_special()) {
                    (true, true) => zero += 1,
                    (true, false) => resident += 1,
                    _ => {}
                }
            });
        }
        let grows = area.flags.contains(VmaFlags::GROWSDOWN);
        let in_heap = area.range.start < heap.end && area.range.end > heap.start;
        AreaInfo {
            range: area.range,
            prot: area.prot,
            flags: area.flags,
            offset: if area.object.is_some() { area.offset << PAGE_SHIFT } else { 0 },
            name: match () {
                () if area.object.is_some() => "/dev/zero (deleted)",
                () if grows => "[stack]",
                () if in_heap && area.is_private() => "[heap]",
                () => "",
            },
            resident,
            zero,
        }
    }

    /// Which pages from `addr` on are there: one call of `tell` a page, for `len` bytes rounded up to
    /// pages, as `mincore` fills its vector.
    ///
    /// # Errors
    /// `EINVAL`: `addr` is unaligned. `ENOMEM`: a page of the range is not mapped; nothing is told
    /// of it and those after it.
    pub fn mincore(
        &self,
        cpu: &Cpu<'_, M>,
        addr: u64,
        len: u64,
        mut tell: impl FnMut(bool),
    ) -> Result<(), Error> {
        let given = VirtRange::new(addr, addr.saturating_add(len));
        let refused = |errno| Error { operation: "mincore", range: given, errno };
        if !is_page_aligned(addr) {
            return Err(refused(Errno::EINVAL));
        }
        let end = page_up(len)
            .and_then(|len| addr.checked_add(len))
            .filter(|&end| end <= crate::addr::USER_END)
            .ok_or(refused(Errno::ENOMEM))?;
        let section = cpu.section();
        let view = self.tree.snapshot(&section);
        let mut at = addr;
        while at < end {
            let entry = view.at(at).ok_or(refused(Errno::ENOMEM))?;
            // SAFETY: VMAs in a view live as long as the section.
            let vma = unsafe { entry.value.as_ref() };
            let stop = entry.end.min(end);
            while at < stop {
                tell(self.is_in_core(cpu, vma, at));
                at += PAGE_SIZE;
            }
        }
        Ok(())
    }

    fn is_in_core(&self, cpu: &Cpu<'_, M>, vma: &Vma, addr: u64) -> bool {
        let mut present = false;
        // SAFETY: the caller is in a grace section.
        unsafe {
            each_slot(cpu, self.root(), VirtRange::page(addr), |_, slot| {
                present = node::load(slot).is_mapped();
            });
        }
        let in_object = || {
            let index = vma.area.index_of(addr);
            vma.area
                .object
                .as_ref()
                .is_some_and(|object| index < object.pages() && object.has(cpu, index))
        };
        present || in_object()
    }

    /// Resident pages: those of its own and of shared objects that are mapped. Exact at a quiet
    /// moment.
    pub fn resident_pages(&self, cpu: &Cpu<'_, M>) -> u64 {
        let vm = cpu.vm();
        let mut pages = self.resident.load(Ordering::Relaxed);
        for id in 0..vm.machine().cpus() {
            let resident = &vm.cpus.remote(CpuId(id as u16)).resident;
            if resident.space.load(Ordering::Relaxed) == self.id().0 {
                pages = pages.wrapping_add(resident.pages.load(Ordering::Relaxed));
            }
        }
        pages
    }

    /// Pages of all VMAs.
    pub fn mapped_pages(&self) -> u64 {
        self.mapped.load(Ordering::Relaxed)
    }

    /// How many VMAs there are.
    pub fn map_count(&self, cpu: &Cpu<'_, M>) -> usize {
        self.tree.snapshot(&cpu.section()).len()
    }

    /// Start and end of the heap.
    pub fn heap_range(&self) -> VirtRange {
        let heap = *self.heap.lock(&Spin);
        VirtRange::new(heap.start, heap.end)
    }
}
