//! The page walk, as hardware does it, in the subsystem's page-table format (x86-64, four levels).
//!
//! An access walks from the root, or from the deepest table known to the CPU; every entry must be
//! present and allow the access. The walk sets the accessed bit in each used entry, and the dirty
//! bit in the leaf for a store. Each bit is set by compare-and-swap of the checked value: if the
//! entry changed in the meantime, the walk reads the entry again. A bit is therefore never set in
//! an entry that does not allow the access, and the dirty bit is set before the store.

use crate::memory::Memory;
use core::fmt;
use core::num::NonZeroU64;
use core::sync::atomic::Ordering;
use faultless::format::{
    ACCESSED, CANONICAL_END, DIRTY, ENTRIES, FRAME, HUGE, INDEX_BITS, LEVELS, NO_EXECUTE, PRESENT,
    SOFTWARE, USER, WRITE, frame_of,
};
use faultless::{Access, FrameNumber, PAGE_SHIFT};

/// log2 of the bytes covered by one entry of a root table.
pub const ROOT_SHIFT: u32 = PAGE_SHIFT + INDEX_BITS * (LEVELS - 1);

/// The size of the memory mapped by one leaf entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum PageSize {
    /// 4 KiB, from the last level.
    Size4K = 0,
    /// 2 MiB.
    Size2M = 1,
    /// 1 GiB.
    Size1G = 2,
}

impl PageSize {
    /// log2 of the size in bytes.
    #[inline(always)]
    pub const fn shift(self) -> u32 {
        PAGE_SHIFT + INDEX_BITS * self as u32
    }

    /// The size in bytes.
    #[inline(always)]
    pub const fn bytes(self) -> u64 {
        1 << self.shift()
    }

    /// The size of a leaf in a table whose entries are each for 2^`shift` bytes.
    const fn of_shift(shift: u32) -> Option<Self> {
        match (shift - PAGE_SHIFT) / INDEX_BITS {
            0 => Some(Self::Size4K),
            1 => Some(Self::Size2M),
            2 => Some(Self::Size1G),
            _ => None,
        }
    }
}

/// The content of a leaf entry and the entries above: the content of a TLB entry.
///
/// Two registers, even as an `Option`, because it is passed on every access.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Translation {
    /// The leaf's frame, present, write, dirty and no-execute bits, the permissions being those of
    /// the whole way from the root; and the size, from [`SIZE_SHIFT`] on.
    pub(crate) bits: NonZeroU64,
    /// The ownership of the page's frames when this was filled, added up; 0 outside checked mode.
    pub(crate) owner: u64,
}

/// The bit position of a translation's size, in bits that entries reserve for software.
const SIZE_SHIFT: u32 = SOFTWARE.trailing_zeros();

impl Translation {
    /// Creates a translation from the kept bits of a leaf entry.
    fn from_bits(bits: u64, size: PageSize) -> Self {
        // Present is bit 0, and always there: the value is never 0.
        let present = NonZeroU64::MIN;
        Self { bits: present | bits | (size as u64) << SIZE_SHIFT, owner: 0 }
    }

    /// Creates a translation to the page of `size` that starts with frame `first`. `dirty` means
    /// that its entry is marked dirty, so that stores need no walk.
    pub fn new(
        first: FrameNumber,
        size: PageSize,
        writable: bool,
        dirty: bool,
        executable: bool,
    ) -> Self {
        let mut bits = first.phys();
        if writable {
            bits |= WRITE;
        }
        if dirty {
            bits |= DIRTY;
        }
        if !executable {
            bits |= NO_EXECUTE;
        }
        Self::from_bits(bits, size)
    }

    /// Returns the size of the mapped memory.
    #[inline(always)]
    pub const fn size(self) -> PageSize {
        match self.bits.get() >> SIZE_SHIFT & 3 {
            0 => PageSize::Size4K,
            1 => PageSize::Size2M,
            _ => PageSize::Size1G,
        }
    }

    /// Returns whether this translation allows `access`.
    #[inline(always)]
    pub const fn permits(self, access: Access) -> bool {
        match access {
            Access::Read => true,
            Access::Write => self.bits.get() & (WRITE | DIRTY) == WRITE | DIRTY,
            Access::Execute => self.bits.get() & NO_EXECUTE == 0,
        }
    }

    /// Returns whether this translation and the present leaf `entry` of `addr` agree on `access`:
    /// the same frame, and a permitted access. Their sizes may differ, because a split huge entry
    /// maps the same frames.
    pub(crate) const fn agrees(self, entry: u64, addr: u64, access: Access) -> bool {
        let needed = match access {
            Access::Read | Access::Execute => PRESENT,
            Access::Write => PRESENT | WRITE | DIRTY,
        };
        let fetches = !matches!(access, Access::Execute) || entry & NO_EXECUTE == 0;
        let size = if entry & HUGE == 0 { PageSize::Size4K } else { PageSize::Size2M };
        let phys = (entry & FRAME) + (addr & (size.bytes() - 1));
        entry & needed == needed && fetches && phys == self.phys(addr)
    }

    /// Its frames.
    pub(crate) fn frames(self) -> impl Iterator<Item = FrameNumber> {
        let first = self.first().0;
        (first..first + (self.size().bytes() >> PAGE_SHIFT) as u32).map(FrameNumber)
    }

    /// The first frame of the page.
    #[inline]
    pub const fn first(self) -> FrameNumber {
        frame_of(self.bits.get())
    }

    /// The physical address of `addr`, which lies in the page.
    #[inline(always)]
    pub const fn phys(self, addr: u64) -> u64 {
        let shift = PAGE_SHIFT + INDEX_BITS * (self.bits.get() >> SIZE_SHIFT & 3) as u32;
        (self.bits.get() & FRAME) + (addr & ((1 << shift) - 1))
    }
}

impl fmt::Debug for Translation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?}", self.first(), self.size())?;
        let bits = self.bits.get();
        for (set, mark) in [
            (bits & WRITE != 0, " write"),
            (bits & DIRTY != 0, " dirty"),
            (bits & NO_EXECUTE == 0, " execute"),
        ] {
            if set {
                f.write_str(mark)?;
            }
        }
        Ok(())
    }
}

/// The error code that hardware pushes with a page fault.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PageFault(pub u32);

impl PageFault {
    const PRESENT: u32 = 1 << 0;
    const WRITE: u32 = 1 << 1;
    const USER: u32 = 1 << 2;
    const RESERVED: u32 = 1 << 3;
    const FETCH: u32 = 1 << 4;

    const fn new(access: Access, why: u32) -> Self {
        let what = match access {
            Access::Read => 0,
            Access::Write => Self::WRITE,
            Access::Execute => Self::FETCH,
        };
        Self(Self::USER | what | why)
    }

    /// Returns whether the page was present but forbade the access.
    pub const fn is_protection(self) -> bool {
        self.0 & Self::PRESENT != 0
    }

    /// Returns whether an entry on the way was malformed: the tables are broken.
    pub const fn is_reserved(self) -> bool {
        self.0 & Self::RESERVED != 0
    }
}

impl fmt::Debug for PageFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page fault {:#x}", self.0)
    }
}

/// A table on the way of a walk, and the rights of the entries above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    table: FrameNumber,
    /// log2 of the bytes covered by one of its entries.
    shift: u32,
    /// The write and user bits set in all entries above, and the no-execute bit if set in any entry
    /// above.
    rights: u64,
    /// The ownership of the table's frame when this was read; 0 outside checked mode.
    pub(crate) owner: u64,
}

impl Step {
    /// Returns the start of a walk without cached entries.
    #[inline]
    pub const fn root(root: FrameNumber) -> Self {
        Self { table: root, shift: ROOT_SHIFT, rights: WRITE | USER, owner: 0 }
    }

    /// The table's frame.
    #[inline]
    pub const fn table(self) -> FrameNumber {
        self.table
    }

    /// Returns log2 of the bytes covered by one of its entries.
    #[inline]
    pub const fn shift(self) -> u32 {
        self.shift
    }

    /// Returns whether this is the root, where every walk may start.
    #[inline]
    pub const fn is_root(self) -> bool {
        self.shift == ROOT_SHIFT
    }

    pub(crate) fn into_cache(self) -> Translation {
        let bits = NonZeroU64::MIN | self.table.phys() | self.rights;
        Translation { bits, owner: self.owner }
    }

    pub(crate) const fn from_cache(cached: Translation, shift: u32) -> Self {
        let (bits, owner) = (cached.bits.get(), cached.owner);
        let rights = bits & (WRITE | USER | NO_EXECUTE);
        Self { table: frame_of(bits), shift, rights, owner }
    }

    /// Returns the rights below `entry` of this table.
    const fn rights_below(self, entry: u64) -> u64 {
        self.rights & entry & (WRITE | USER) | (self.rights | entry) & NO_EXECUTE
    }
}

/// The result of a successful walk.
#[derive(Clone, Copy, Debug)]
pub struct Walk {
    /// The translation of the tables.
    pub translation: Translation,
    /// The physical address of the leaf entry.
    pub leaf: u64,
    /// The leaf entry after the walk.
    pub value: u64,
}

impl Walk {
    /// Returns whether the leaf still has the same content; accessed and dirty bits may have been
    /// added.
    pub fn still_holds(&self, memory: &Memory) -> bool {
        let now = memory.entry(self.leaf).load(Ordering::Acquire);
        (now ^ self.value) & !(ACCESSED | DIRTY) == 0
    }
}

/// Walks the tables for a user-mode `access` to `addr` and marks the used entries. The walk begins
/// at `start`, the root or a table on the way to `addr`. `owner` returns the ownership of a table's
/// frame, and `learn` is called for each table of the walk.
///
/// # Errors
/// The page fault that hardware would raise.
pub fn walk(
    memory: &Memory,
    start: Step,
    addr: u64,
    access: Access,
    owner: impl Fn(FrameNumber) -> u64,
    mut learn: impl FnMut(Step),
) -> Result<Walk, PageFault> {
    if addr >= CANONICAL_END {
        return Err(PageFault::new(access, 0));
    }
    let mut step = start;
    loop {
        let at = step.table.phys() + entry_offset(addr, step.shift);
        let slot = memory.entry(at);
        let seen = slot.load(Ordering::Acquire);
        if seen & PRESENT == 0 {
            return Err(PageFault::new(access, 0));
        }
        let rights = step.rights_below(seen);
        let huge = seen & HUGE != 0 && step.shift > PAGE_SHIFT;
        if step.shift > PAGE_SHIFT && !huge {
            if !mark(slot, seen, ACCESSED) {
                continue;
            }
            let table = frame_of(seen);
            let below = Step { table, shift: step.shift - INDEX_BITS, rights, owner: owner(table) };
            // The owner must belong to the same entry.
            if (slot.load(Ordering::Acquire) ^ seen) & !ACCESSED != 0 {
                continue;
            }
            step = below;
            learn(step);
            continue;
        }
        let Some(size) = PageSize::of_shift(step.shift) else {
            return Err(PageFault::new(access, PageFault::PRESENT | PageFault::RESERVED));
        };
        if !(seen & FRAME).is_multiple_of(size.bytes()) {
            return Err(PageFault::new(access, PageFault::PRESENT | PageFault::RESERVED));
        }
        let refused = rights & USER == 0
            || (access == Access::Write && rights & WRITE == 0)
            || (access == Access::Execute && rights & NO_EXECUTE != 0);
        if refused {
            return Err(PageFault::new(access, PageFault::PRESENT));
        }
        let marks = if access == Access::Write { ACCESSED | DIRTY } else { ACCESSED };
        if !mark(slot, seen, marks) {
            continue;
        }
        let value = seen | marks;
        let bits = value & (FRAME | DIRTY) | rights & (WRITE | NO_EXECUTE);
        let translation = Translation::from_bits(bits, size);
        return Ok(Walk { translation, leaf: at, value });
    }
}

/// Returns the byte offset in a table of the entry for `addr`, if each entry covers 2^`shift`
/// bytes.
#[inline(always)]
const fn entry_offset(addr: u64, shift: u32) -> u64 {
    (addr >> shift & (ENTRIES as u64 - 1)) * size_of::<u64>() as u64
}

/// Sets `marks` in an entry if it is still `seen`. Returns whether it was.
#[inline(always)]
fn mark(slot: &core::sync::atomic::AtomicU64, seen: u64, marks: u64) -> bool {
    seen & marks == marks
        || slot.compare_exchange(seen, seen | marks, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use faultless::PAGE_SIZE;

    const TABLE: u64 = PRESENT | WRITE | USER;
    const ADDR: u64 = 0x7f12_3456_7000;

    /// Tables in frames 1 to 4, a leaf at `level` (1: 4 KiB) for [`ADDR`] with `bits`.
    fn tables(level: u32, bits: u64) -> (Memory, u64) {
        let memory = Memory::new(64 * PAGE_SIZE, 1).unwrap();
        for depth in 0..4 - level {
            memory.store::<u64>(slot(depth), (u64::from(depth) + 2) << PAGE_SHIFT | TABLE);
        }
        let leaf = slot(4 - level);
        memory.store(leaf, bits);
        (memory, leaf)
    }

    fn slot(depth: u32) -> u64 {
        ((u64::from(depth) + 1) << PAGE_SHIFT) + entry_offset(ADDR, ROOT_SHIFT - INDEX_BITS * depth)
    }

    const ROOT: FrameNumber = FrameNumber(1);

    /// Walks from the root, on a CPU without cached entries.
    fn walk(
        memory: &Memory,
        root: FrameNumber,
        addr: u64,
        access: Access,
    ) -> Result<Walk, PageFault> {
        super::walk(memory, Step::root(root), addr, access, |_| 0, |_| {})
    }

    #[test]
    fn a_walk_may_start_at_any_learned_table() {
        for clear in [0, WRITE, USER] {
            let (memory, _) = tables(1, 9 << PAGE_SHIFT | TABLE);
            memory.store::<u64>(slot(1), memory.load::<u64>(slot(1)) & !clear | NO_EXECUTE);
            for access in [Access::Read, Access::Write, Access::Execute] {
                let mut steps = vec![Step::root(ROOT)];
                let learn = |step| steps.push(step);
                let whole =
                    super::walk(&memory, Step::root(ROOT), ADDR, access, |f| f.0.into(), learn);
                assert_eq!(
                    steps.iter().map(|step| step.shift()).collect::<Vec<_>>(),
                    [39, 30, 21, 12]
                );
                for step in steps {
                    assert!(step.is_root() || step.owner == u64::from(step.table().0));
                    assert_eq!(Step::from_cache(step.into_cache(), step.shift()), step);
                    let rest = super::walk(&memory, step, ADDR, access, |_| 0, |_| {});
                    let ends = |walk: &Walk| (walk.translation, walk.leaf, walk.value);
                    assert_eq!(rest.as_ref().map(ends), whole.as_ref().map(ends));
                }
            }
        }
    }

    #[test]
    fn each_size_maps_its_span_and_marks_the_way() {
        for (level, size) in [(1, PageSize::Size4K), (2, PageSize::Size2M), (3, PageSize::Size1G)] {
            let huge = if level > 1 { HUGE } else { 0 };
            let (memory, leaf) = tables(level, 1 << 30 | PRESENT | WRITE | USER | huge);
            let read = walk(&memory, ROOT, ADDR + 5, Access::Read).unwrap();
            assert_eq!((read.leaf, read.translation.size()), (leaf, size));
            assert_eq!(
                read.translation.phys(ADDR + 5),
                (1 << 30) + ((ADDR + 5) & (size.bytes() - 1))
            );
            for depth in 0..4 - level {
                assert_eq!(memory.load::<u64>(slot(depth)) & (ACCESSED | DIRTY), ACCESSED);
            }
            assert_eq!(memory.load::<u64>(leaf) & (ACCESSED | DIRTY), ACCESSED);
            assert!(!read.translation.permits(Access::Write), "not marked dirty yet");

            let write = walk(&memory, ROOT, ADDR, Access::Write).unwrap();
            assert_eq!(memory.load::<u64>(leaf) & (ACCESSED | DIRTY), ACCESSED | DIRTY);
            assert!(write.translation.permits(Access::Write));
            assert!(read.still_holds(&memory) && write.still_holds(&memory));
            memory.store::<u64>(leaf, 0);
            assert!(!write.still_holds(&memory));
        }
    }

    #[test]
    fn a_translation_agrees_with_the_entries_of_its_split_page() {
        let huge = Translation::new(FrameNumber(1 << 9), PageSize::Size2M, false, false, true);
        assert_eq!(
            huge.frames().map(|frame| frame.0).collect::<Vec<_>>(),
            (512..1024).collect::<Vec<_>>()
        );
        let addr = (7 << 21) + 5 * PAGE_SIZE + 8;
        let entry = |frame: u64| frame << PAGE_SHIFT | PRESENT | USER;
        for access in [Access::Read, Access::Execute] {
            assert!(huge.agrees(entry(512) | HUGE, addr, access));
            assert!(huge.agrees(entry(512 + 5), addr, access));
            assert!(!huge.agrees(entry(512 + 4), addr, access));
            assert!(!huge.agrees(entry(1024) | HUGE, addr, access));
            assert!(!huge.agrees(0, addr, access));
        }
        assert!(!huge.agrees(entry(512) | HUGE | NO_EXECUTE, addr, Access::Execute));
        assert!(!huge.agrees(entry(512) | HUGE, addr, Access::Write));
    }

    #[test]
    fn faults_distinguish_missing_from_forbidden_pages() {
        let (memory, leaf) = tables(1, 9 << PAGE_SHIFT | PRESENT | USER | NO_EXECUTE);
        let before = memory.load::<u64>(leaf);
        let fault = |addr, access| walk(&memory, ROOT, addr, access).unwrap_err();
        assert_eq!(fault(ADDR, Access::Write), PageFault(0b111));
        assert_eq!(fault(ADDR, Access::Execute), PageFault(0b1_0101));
        assert_eq!(fault(ADDR + PAGE_SIZE, Access::Write), PageFault(0b110));
        assert_eq!(fault(ADDR ^ 1 << 40, Access::Read), PageFault(0b100));
        assert_eq!(fault(ADDR | CANONICAL_END, Access::Read), PageFault(0b100));
        assert_eq!(fault(u64::MAX, Access::Read), PageFault(0b100));
        assert_eq!(memory.load::<u64>(leaf), before);
        walk(&memory, ROOT, ADDR, Access::Read).unwrap();
    }

    #[test]
    fn permissions_combine_all_levels() {
        for (clear, access) in [(WRITE, Access::Write), (USER, Access::Read)] {
            for depth in 0..4 {
                let (memory, _) = tables(1, 9 << PAGE_SHIFT | TABLE);
                memory.store::<u64>(slot(depth), memory.load::<u64>(slot(depth)) & !clear);
                assert!(walk(&memory, ROOT, ADDR, access).unwrap_err().is_protection());
            }
        }
        for depth in 0..4 {
            let (memory, _) = tables(1, 9 << PAGE_SHIFT | TABLE);
            memory.store::<u64>(slot(depth), memory.load::<u64>(slot(depth)) | NO_EXECUTE);
            assert!(walk(&memory, ROOT, ADDR, Access::Execute).unwrap_err().is_protection());
            let read = walk(&memory, ROOT, ADDR, Access::Read).unwrap();
            assert!(!read.translation.permits(Access::Execute));
        }
    }

    #[test]
    fn malformed_leaves_are_reserved_faults() {
        let (memory, _) = tables(4, PRESENT | USER | HUGE);
        assert!(walk(&memory, ROOT, ADDR, Access::Read).unwrap_err().is_reserved());
        let (memory, _) = tables(2, 9 << PAGE_SHIFT | PRESENT | USER | HUGE);
        assert!(walk(&memory, ROOT, ADDR, Access::Read).unwrap_err().is_reserved());
    }

    #[test]
    fn a_marking_race_loses_no_change_of_the_entry() {
        let (memory, leaf) = tables(1, 9 << PAGE_SHIFT | TABLE);
        std::thread::scope(|scope| {
            // One thread walks and marks; another thread unmaps the page and maps it again, clean.
            let walker = scope.spawn(|| {
                let (mut walks, mut found) = (0, 0);
                // The other thread may be descheduled for the whole time, with the page unmapped.
                while walks < 20_000 || found == 0 {
                    walks += 1;
                    match walk(&memory, ROOT, ADDR, Access::Write) {
                        Ok(_) => found += 1,
                        Err(fault) => assert!(!fault.is_protection()),
                    }
                }
            });
            for _ in 0..20_000 {
                memory.entry(leaf).swap(0, Ordering::AcqRel);
                // Had the walker stored instead of swapped, the entry would come back to life.
                for _ in 0..4 {
                    assert_eq!(memory.load::<u64>(leaf), 0);
                }
                memory.store::<u64>(leaf, 9 << PAGE_SHIFT | TABLE);
            }
            walker.join().unwrap();
        });
    }
}
