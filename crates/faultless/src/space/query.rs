//! Listings of a space: its VMAs, its counts, and its present pages.

use super::Space;
use super::area::{Area, PageSource, Prot, VmaFlags};
use super::brk::bounds::Heap;
use super::merge::{merge_later, roots_merge};
use super::pages::{Leaf, each_entry, each_leaf};
use super::vma::Vma;
use crate::addr::{PAGE_SHIFT, PAGE_SIZE, VirtRange, is_page_aligned, page_up};
use crate::error::{Errno, Error};
use crate::machine::{CpuId, Machine};
use crate::sync::atomic::Ordering;
use crate::sync::grace::Section;
use crate::sync::mutant::{Mutant, lost};
use crate::table::Entry;
use crate::table::{node, protocol};
use crate::vm::Cpu;
use core::fmt;
use core::ops::Range;

/// A VMA as a listing shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AreaInfo {
    /// The pages of the VMA.
    pub range: VirtRange,
    /// What programs may do with the pages.
    pub prot: Prot,
    /// How the VMA behaves.
    pub flags: VmaFlags,
    /// Byte offset into the object; the physical address of device memory; 0 for private anonymous
    /// memory.
    pub offset: u64,
    /// The kernel's tag of the object ([`Object::tag`](crate::Object::tag)) or of the device
    /// ([`DeviceMemory::tag`](crate::DeviceMemory::tag)); 0 without an object or device, or for a
    /// nameless one.
    pub tag: u64,
    /// `[heap]`, `[stack]`, `/dev/zero (deleted)` or empty; empty if there is a tag.
    pub name: &'static str,
    /// The number of resident pages: private pages, or pages of the object; not the zero page, nor
    /// device memory.
    pub resident: u64,
    /// The number of pages that map the zero page.
    pub zero: u64,
    /// The number of resident pages that huge leaves map: `FilePmdMapped` of Linux.
    pub huge: u64,
    /// The number of pages in the swap area.
    pub swapped: u64,
}

/// The name of a file in a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label<P> {
    /// Major and minor number of the device of the file.
    pub device: (u32, u32),
    /// The number of the inode.
    pub inode: u64,
    /// The path.
    pub path: P,
}

impl AreaInfo {
    /// Writes the line of `/proc/self/maps`, without the newline.
    fn line<P: AsRef<str>>(&self, f: &mut fmt::Formatter<'_>, label: &Label<P>) -> fmt::Result {
        let bit = |prot, mark| if self.prot.contains(prot) { mark } else { '-' };
        let VirtRange { start, end } = self.range;
        let Label { device: (major, minor), inode, path } = label;
        write!(
            f,
            "{start:08x}-{end:08x} {}{}{}{} {:08x} {major:02x}:{minor:02x} {inode} ",
            bit(Prot::READ, 'r'),
            bit(Prot::WRITE, 'w'),
            bit(Prot::EXEC, 'x'),
            if self.flags.contains(VmaFlags::SHARED) { 's' } else { 'p' },
            self.offset,
        )?;
        if path.as_ref().is_empty() {
            return Ok(());
        }
        // Linux pads the text before the name to 73 columns.
        let hex = |value: u64, least: u32| (value.max(1).ilog2() / 4 + 1).max(least);
        let columns = hex(start, 8)
            + hex(end, 8)
            + hex(self.offset, 8)
            + hex((*major).into(), 2)
            + hex((*minor).into(), 2)
            + inode.max(&1).ilog10()
            + 12;
        write!(f, "{:pad$}", "", pad = 73usize.saturating_sub(columns as usize))?;
        // A newline in a path would look like another line.
        for (at, part) in path.as_ref().split('\n').enumerate() {
            write!(f, "{}{part}", if at == 0 { "" } else { "\\012" })?;
        }
        Ok(())
    }
}

/// One line of `/proc/self/maps`. The tag of a file appears as its inode.
impl fmt::Display for AreaInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.line(f, &Label { device: (0, 0), inode: self.tag, path: self.name })
    }
}

/// A listing of a space's VMAs in the form of `/proc/self/maps`.
pub struct Maps<'a, 'v, M: Machine, F = fn(u64) -> Option<Label<&'static str>>> {
    space: &'a Space<M>,
    cpu: &'a Cpu<'v, M>,
    label: F,
}

impl<M: Machine, F> fmt::Debug for Maps<'_, '_, M, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Maps of {:?}", self.space)
    }
}

impl<M: Machine, P: AsRef<str>, F: Fn(u64) -> Option<Label<P>>> fmt::Display
    for Maps<'_, '_, M, F>
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut result = Ok(());
        self.space.areas(self.cpu, |area| {
            if result.is_ok() {
                let label = if area.tag == 0 { None } else { (self.label)(area.tag) };
                result = match label {
                    Some(label) => area.line(f, &label),
                    None => area.fmt(f),
                }
                .and_then(|()| f.write_str("\n"));
            }
        });
        result
    }
}

/// Returns whether a CPU is changing `vma` or one of the VMAs of `next` that are to merge with
/// `vma`.
fn is_changing<'a>(mut vma: &'a Vma, next: impl Iterator<Item = &'a Vma>) -> bool {
    let changing = |vma: &Vma| vma.sequence.read().is_none();
    for next in next {
        if changing(vma) || !merge_later(vma, next) {
            break;
        }
        vma = next;
    }
    changing(vma)
}

impl<M: Machine> Space<M> {
    /// Returns the space's VMAs in the form of `/proc/self/maps`. The listing is written in a grace
    /// section: the formatter that [displays](fmt::Display) the listing must obey the rules of
    /// [`areas`](Self::areas).
    pub fn maps<'a, 'v>(&'a self, cpu: &'a Cpu<'v, M>) -> Maps<'a, 'v, M> {
        Maps { space: self, cpu, label: |_| None }
    }

    /// [`maps`](Self::maps) with the names that `label` gives for the tags of objects. `label` runs
    /// in the same section.
    pub fn maps_with<'a, 'v, P, F>(&'a self, cpu: &'a Cpu<'v, M>, label: F) -> Maps<'a, 'v, M, F>
    where
        P: AsRef<str>,
        F: Fn(u64) -> Option<Label<P>>,
    {
        Maps { space: self, cpu, label }
    }

    /// Calls `tell` with each VMA, in ascending order. All VMAs are of one moment; counts of pages
    /// are not. If CPUs change different VMAs during the call, and the heap is exhausted, the VMAs
    /// are not of one moment, either: the listing may show the later of two changes, and not the
    /// earlier.
    ///
    /// `tell` runs in a grace section, which keeps every CPU from reusing memory that any CPU frees
    /// during the section. So `tell` must be short, must not wait for calls of other CPUs on
    /// spaces, and must not make a call that waits: calls that change a space, faults,
    /// [`read_bytes`](Self::read_bytes), [`exit`](Self::exit),
    /// [`Cpu::end_dropped`](crate::Cpu::end_dropped). Other listings, of this space or another, may
    /// be nested. In builds with debug assertions such a call panics at a wait that the section
    /// forbids. A call that finds nothing to wait for does not panic, so a run without a panic
    /// proves nothing.
    pub fn areas(&self, cpu: &Cpu<'_, M>, mut tell: impl FnMut(AreaInfo)) {
        let section = self.section(cpu);
        let heap = self.heap.get();
        // Makes the space shared, if another CPU owns the space.
        self.view(cpu, &section);
        // SAFETY: the subsystem has one grace period, and all trees are read in its sections.
        let view = unsafe { self.tree.of_one_moment(&section, cpu.local(), &cpu.vm().grace, cpu) };
        let entries = view.iter();
        let mut vmas = entries.map(|entry| entry.get()).peekable();
        while let Some(mut vma) = vmas.next() {
            let (mut range, mut root) = (vma.range(), vma.anon_vma.get());
            // The listing already merges VMAs that a writer keeps apart until the entries are
            // changed.
            let changing = is_changing(vma, vmas.clone());
            let one = |vma: &Vma, root, next: &Vma| {
                changing && merge_later(vma, next) && roots_merge(root, next.anon_vma.get())
            };
            while let Some(next) = vmas.next_if(|next| one(vma, root, next)) {
                range.end = next.end();
                root = root.or_else(|| next.anon_vma.get());
                vma = next;
            }
            let offset = vma.index_of(range.start);
            tell(self.describe(cpu, Area { range, offset, ..vma.area() }, heap));
        }
    }

    /// Calls `tell` with each area that overlaps `range`, in ascending order and whole, all of one
    /// moment, until `tell` returns `false`. Reads no page. An empty or reversed range overlaps no
    /// area.
    ///
    /// `tell` runs in a grace section, and must obey the rules of [`areas`](Self::areas).
    pub fn each_area(
        &self,
        cpu: &Cpu<'_, M>,
        range: VirtRange,
        mut tell: impl FnMut(Area<'_>) -> bool,
    ) {
        let section = self.section(cpu);
        if range.end <= range.start {
            return;
        }
        for entry in self.view(cpu, &section).iter_from(range.start) {
            if entry.start >= range.end || !tell(entry.get().area()) {
                return;
            }
        }
    }

    fn describe(&self, cpu: &Cpu<'_, M>, area: Area<'_>, heap: Heap) -> AreaInfo {
        let (mut resident, mut zero, mut huge, mut swapped) = (0, 0, 0, 0);
        // SAFETY: the caller is in a grace section.
        unsafe {
            each_entry(cpu, self.root(), area.range, |part, entry| {
                if entry.is_huge() {
                    huge += part.pages();
                } else if entry.is_mapped() {
                    resident += u64::from(!entry.is_special());
                    zero += u64::from(cpu.vm().maps_zeros(entry));
                }
                swapped += u64::from(entry.is_swapped());
            });
        }
        let grows = area.flags.contains(VmaFlags::GROWSDOWN);
        let tag = match area.memory {
            PageSource::Anonymous => 0,
            PageSource::Object(object) => object.tag(),
            PageSource::Device { tag, .. } => *tag,
        };
        let in_heap = area.range.start < heap.end && area.range.end > heap.start;
        AreaInfo {
            range: area.range,
            prot: area.prot,
            flags: area.flags,
            offset: if area.memory.is_anonymous() { 0 } else { area.offset << PAGE_SHIFT },
            tag,
            name: match area.memory {
                PageSource::Object(_) if tag == 0 => "/dev/zero (deleted)",
                PageSource::Anonymous if grows => "[stack]",
                PageSource::Anonymous if in_heap => "[heap]",
                _ => "",
            },
            resident: resident + huge,
            zero,
            huge,
            swapped,
        }
    }

    /// Reports which of the pages in the `len` bytes starting at `addr`, rounded up to pages, are
    /// in memory: one call of `tell` for each page, as `mincore` fills its vector. `tell` runs in a
    /// grace section, and must obey the rules of [`areas`](Self::areas).
    ///
    /// # Errors
    /// `EINVAL`: `addr` is unaligned. `ENOMEM`: a page of the range is not mapped; the call reports
    /// neither this page nor the pages after it.
    pub fn mincore(
        &self,
        cpu: &Cpu<'_, M>,
        addr: u64,
        len: u64,
        mut tell: impl FnMut(bool),
    ) -> Result<(), Error> {
        self.check_vm(cpu);
        let given = VirtRange::new(addr, addr.saturating_add(len));
        let refused = |errno| Error { operation: "mincore", range: given, errno };
        if !is_page_aligned(addr) {
            return Err(refused(Errno::EINVAL));
        }
        let end = page_up(len)
            .and_then(|len| addr.checked_add(len))
            .filter(|&end| end <= crate::table::format::USER_END)
            .ok_or(refused(Errno::ENOMEM))?;
        let mut at = addr;
        while at < end {
            let section = self.section(cpu);
            at = self.tell_in_core(cpu, &section, at..end, &mut tell);
            drop(section);
            let is_hole = || !self.is_mapped(cpu, VirtRange::page(at));
            if at < end && is_hole() {
                self.await_unmapping(cpu, VirtRange::page(at));
                if is_hole() {
                    return Err(refused(Errno::ENOMEM));
                }
            }
        }
        Ok(())
    }

    /// Reports which pages of `range` are in memory, up to the first unmapped page. Returns the
    /// address of that page, or the end of `range`.
    fn tell_in_core(
        &self,
        cpu: &Cpu<'_, M>,
        section: &Section<'_>,
        range: Range<u64>,
        tell: &mut impl FnMut(bool),
    ) -> u64 {
        let view = self.view(cpu, section);
        let mut at = range.start;
        while at < range.end
            && let Some(entry) = view.at(at)
        {
            let vma = entry.get();
            let stop = entry.end.min(range.end);
            while at < stop {
                tell(self.is_in_core(cpu, vma, at));
                at += PAGE_SIZE;
            }
        }
        at
    }

    /// If a CPU holds the entry, the call waits until that CPU is done, because a CPU that copies a
    /// page holds the entry of a present page.
    fn is_in_core(&self, cpu: &Cpu<'_, M>, vma: &Vma, addr: u64) -> bool {
        let (mut present, mut swapped) = (false, Entry::NONE);
        // SAFETY: the caller is in a grace section.
        unsafe {
            each_leaf(cpu, self.root(), VirtRange::page(addr), |leaf| {
                let (Leaf::Page { slot, .. } | Leaf::Huge { slot, .. }) = leaf;
                let settles = !lost(Mutant::QueryWaits);
                let entry =
                    if settles { protocol::wait_and_load(slot, cpu) } else { node::load(slot) };
                present = entry.is_mapped();
                swapped = entry;
            });
        }
        if swapped.is_swapped() {
            let swap = cpu.vm().swap.get();
            return swap.is_some_and(|swap| swap.object().has_page(cpu, swapped.slot()));
        }
        let in_object = || {
            let index = vma.index_of(addr);
            vma.memory().object().is_some_and(|object| object.has_page(cpu, index))
        };
        // As on Linux, device memory is not in core.
        !vma.memory().is_device() && (present || in_object())
    }

    /// Returns whether VMAs, which may differ, map each byte of `range`. An empty or reversed range
    /// contains no byte, so the result is `true`.
    pub fn is_mapped(&self, cpu: &Cpu<'_, M>, range: VirtRange) -> bool {
        let section = self.section(cpu);
        let view = self.view(cpu, &section);
        let mut at = range.start;
        while at < range.end {
            match view.at(at) {
                Some(entry) => at = entry.end,
                None => return false,
            }
        }
        true
    }

    /// Returns an identification of the place at `addr` in shared memory, the same in every
    /// mapping: the [identity](crate::heap::Shared::id) of the object, and the byte offset into the
    /// object. Returns `None` if memory is private, or nothing is mapped.
    ///
    /// A waiter for a change of shared memory, such as a futex, is found by this pair. The pair is
    /// meaningless once the object has no mapping and no reference.
    pub fn shared_place(&self, cpu: &Cpu<'_, M>, addr: u64) -> Option<(u64, u64)> {
        self.with_vma(cpu, addr, |vma| {
            let object = vma.memory().object().filter(|_| !vma.is_private())?;
            let offset = (vma.index_of(addr) << PAGE_SHIFT) | (addr & (PAGE_SIZE - 1));
            Some((object.id(), offset))
        })
    }

    /// Returns the result of `tell` for the VMA at `addr`, in one grace section; `None` if nothing
    /// is mapped.
    pub(crate) fn with_vma<R>(
        &self,
        cpu: &Cpu<'_, M>,
        addr: u64,
        tell: impl FnOnce(&Vma) -> Option<R>,
    ) -> Option<R> {
        let section = self.section(cpu);
        let entry = self.view(cpu, &section).at(addr)?;
        tell(entry.get())
    }

    /// Returns the number of resident pages: pages of the space's own and mapped pages of shared
    /// objects. Exact at a quiet moment.
    pub fn resident_pages(&self, cpu: &Cpu<'_, M>) -> u64 {
        self.check_vm(cpu);
        let vm = cpu.vm();
        let mut pages = self.core.resident.load(Ordering::Relaxed);
        for id in 0..vm.machine().cpus() {
            let resident = &vm.cpus.remote(CpuId(id as u16)).resident;
            if resident.space.load(Ordering::Relaxed) == self.id().0 {
                pages = pages.wrapping_add(resident.pages.load(Ordering::Relaxed));
            }
        }
        pages
    }

    /// Returns the number of pages in the [swap area](Cpu::swap_on): `VmSwap`. Exact at a quiet
    /// moment.
    pub fn swapped_pages(&self, cpu: &Cpu<'_, M>) -> u64 {
        self.check_vm(cpu);
        self.core.swapped.load(Ordering::Relaxed)
    }

    /// Returns the number of pages of all VMAs.
    pub fn mapped_pages(&self, cpu: &Cpu<'_, M>) -> u64 {
        self.view(cpu, &self.section(cpu)).bytes() >> PAGE_SHIFT
    }

    /// Returns the number of VMAs.
    pub fn map_count(&self, cpu: &Cpu<'_, M>) -> usize {
        self.view(cpu, &self.section(cpu)).len()
    }

    /// Returns the start and end of the heap.
    pub fn heap_range(&self) -> VirtRange {
        let heap = self.heap.get();
        VirtRange::new(heap.start, heap.end)
    }
}
