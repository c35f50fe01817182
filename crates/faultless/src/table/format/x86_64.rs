//! The x86-64 format with four levels: 48-bit addresses, with the lower half for user space.
//!
//! | bit | name | meaning here |
//! |---|---|---|
//! | 0 | present | the MMU may use the entry |
//! | 1 | write | stores allowed |
//! | 2 | user | user mode allowed |
//! | 3, 4 | cache mode | which of the entries 0 to 3 of the page attribute table applies |
//! | 5, 6 | accessed, dirty | set by hardware at any moment, atomically |
//! | 7 | huge | a leaf above the last level |
//! | 8 | swapped | a non-present entry that names a slot of the swap area; never set in a present entry, in which the bit means global |
//! | 9 | locked | software: a CPU is changing the entry |
//! | 10 | special | software: the frame is not counted (for example the zero page's) |
//! | 11 | hidden | software: a non-present entry that keeps its page (`PROT_NONE`) |
//! | 12..52 | frame | physical address of the frame or of the next table; of a swapped entry, the slot's number |
//! | 52 | aged | software: reclaim has cleared the accessed bit |
//! | 63 | no-execute | instruction fetches forbidden |
//!
//! A value is one of: *none* (0); *busy* (locked and not present: only the holder knows the old and
//! the new value; the holder may write its CPU number into the frame field); *present*; *present
//! and locked*; *hidden* (not present, otherwise a leaf); *swapped* (not present, contains only a
//! slot number). Any other value is illegal. Present and hidden entries *map* a page; a swapped
//! entry does not.
//!
//! # The page attribute table
//!
//! A leaf's bits 3 (PWT) and 4 (PCD) choose one of the first four entries of the PAT, the register
//! `IA32_PAT` (`0x277`) of each CPU. The subsystem uses them for write-back, write-through,
//! write-combining and uncached. These are the values after reset, except for entry 2, which is
//! uncached (UC-) after reset. So a kernel that maps device memory write-combining sets the
//! register to [`PAGE_ATTRIBUTES`] on each CPU. Without this setting the pages are uncached:
//! slower, but correct.
//!
//! # Pages without permissions
//!
//! A page without any permission is hidden; clearing the user bit alone is not enough. A kernel
//! that copies for a program walks the same tables, and the user bit does not stop the kernel.

use super::CacheMode;
use crate::addr::{FrameNumber, PAGE_SHIFT, PAGE_SIZE, VirtRange};
use crate::machine::CpuId;
use core::fmt;

/// Levels of tables, including the root.
pub const LEVELS: u32 = 4;
/// log2 of [`ENTRIES`]. The model checker uses small tables, because it keeps a history of every
/// atomic.
pub const INDEX_BITS: u32 = if cfg!(loom) { 2 } else { 9 };
/// Entries in a table: 512.
pub const ENTRIES: usize = 1 << INDEX_BITS;
/// The entries of a root table that map user space: its first half.
pub const USER_ROOT_ENTRIES: usize = ENTRIES / 2;
/// The first address beyond the lower half: 2^47. The MMU translates no address between the lower
/// and the upper half.
pub const CANONICAL_END: u64 =
    (USER_ROOT_ENTRIES as u64) << (PAGE_SHIFT + INDEX_BITS * (LEVELS - 1));
/// The first address that user space cannot use: 2^47 less one guard page, as on Linux with
/// four-level tables. (Under the model checker tables are small and span less.)
pub const USER_END: u64 = CANONICAL_END - PAGE_SIZE;

impl VirtRange {
    /// All of user space.
    pub const USER: Self = Self { start: 0, end: USER_END };
}

/// The MMU may use the entry.
pub const PRESENT: u64 = 1 << 0;
/// Stores are allowed, if the entries of all levels allow them.
pub const WRITE: u64 = 1 << 1;
/// User mode is allowed, if the entries of all levels allow it.
pub const USER: u64 = 1 << 2;
/// Which of the first four entries of the page attribute table a leaf uses.
pub const CACHE: u64 = 0b11 << CACHE_SHIFT;
/// The required value of the register `IA32_PAT` (`0x277`) of each CPU, with a byte for each entry
/// of the table: write-back (6), write-through (4), write-combining (1), uncached (0); and the
/// unused entries 4 to 7, as after reset.
pub const PAGE_ATTRIBUTES: u64 = 0x0007_0406_0001_0406;
/// The MMU sets this bit in each entry used by a walk.
pub const ACCESSED: u64 = 1 << 5;
/// The MMU sets this bit in the leaf before a store.
pub const DIRTY: u64 = 1 << 6;
/// A leaf above the last level.
pub const HUGE: u64 = 1 << 7;
/// Instruction fetches are forbidden, if set at any level.
pub const NO_EXECUTE: u64 = 1 << 63;
/// The physical address of the frame, or of the next table.
pub const FRAME: u64 = ((1 << 40) - 1) << PAGE_SHIFT;
/// Returns the frame in the bits of an entry. The field can hold larger physical addresses than
/// frame numbers can express, but the subsystem never writes such addresses.
#[inline]
pub const fn frame_of(bits: u64) -> FrameNumber {
    FrameNumber(((bits & FRAME) >> PAGE_SHIFT) as u32)
}
/// The number of slots that entries can name.
pub const SLOTS: u64 = 1 << 40;
/// Bits that the MMU ignores.
pub const SOFTWARE: u64 = LOCKED | SPECIAL | HIDDEN;

const CACHE_SHIFT: u32 = 3;
const LOCKED: u64 = 1 << 9;
const SPECIAL: u64 = 1 << 10;
const HIDDEN: u64 = 1 << 11;
const SWAPPED: u64 = 1 << 8;
const AGED: u64 = 1 << 52;

/// The value of a page-table entry. The module describes its encodings.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Entry(pub u64);

impl Entry {
    /// The empty entry.
    pub const NONE: Self = Self(0);
    /// Not present, and locked by a CPU that is filling or changing the entry.
    pub const BUSY: Self = Self(LOCKED);

    /// Returns a busy entry with the number of `cpu`, which locks several entries together and
    /// finds them again by this value.
    #[inline]
    pub const fn busy_of(cpu: CpuId) -> Self {
        Self(LOCKED | (cpu.0 as u64 + 1) << PAGE_SHIFT)
    }

    /// Returns a leaf that maps `frame` for user mode, readable, accessed and clean.
    #[inline]
    pub const fn leaf(frame: FrameNumber) -> Self {
        Self(frame.phys() | PRESENT | USER | ACCESSED | NO_EXECUTE)
    }

    /// Returns a readable leaf without a frame, with the fetch permission of a VMA.
    /// [`of`](Self::of) completes it.
    #[inline]
    pub const fn template(execute: bool) -> Self {
        Self::leaf(FrameNumber(0)).with_execute(execute)
    }

    /// Returns this template, completed with `frame`.
    #[inline(always)]
    pub const fn of(self, frame: FrameNumber) -> Self {
        Self(self.0 | frame.phys())
    }

    /// Returns the same leaf with the frame replaced by `frame`.
    #[inline]
    pub const fn with_frame(self, frame: FrameNumber) -> Self {
        Self(self.0 & !FRAME | frame.phys())
    }

    /// Returns an entry of an upper level that points to the table in `frame`.
    #[inline]
    pub const fn table(frame: FrameNumber) -> Self {
        Self(frame.phys() | PRESENT | WRITE | USER | ACCESSED)
    }

    /// Returns the same leaf, writable and dirty, for a fault on a store, which is about to happen.
    #[inline]
    pub const fn writable_dirty(self) -> Self {
        Self(self.0 | WRITE | DIRTY)
    }

    /// Returns the same leaf, writable.
    #[inline]
    pub const fn writable(self) -> Self {
        Self(self.0 | WRITE)
    }

    /// Returns the same leaf without write permission.
    #[inline]
    pub const fn read_only(self) -> Self {
        Self(self.0 & !WRITE)
    }

    /// Returns the same leaf with instruction fetches allowed or forbidden.
    #[inline]
    pub const fn with_execute(self, execute: bool) -> Self {
        Self(if execute { self.0 & !NO_EXECUTE } else { self.0 | NO_EXECUTE })
    }

    /// Returns the same leaf, hidden from the MMU or present.
    #[inline]
    pub const fn with_hidden(self, hidden: bool) -> Self {
        let frame = self.0 & !(PRESENT | HIDDEN);
        Self(frame | if hidden { HIDDEN } else { PRESENT })
    }

    /// Returns an entry for a page in slot `slot` of the swap area, a number below [`SLOTS`]. Not
    /// present.
    #[inline]
    pub const fn swapped(slot: u64) -> Self {
        Self(SWAPPED | slot << PAGE_SHIFT)
    }

    /// Returns the same leaf, marked as mapping a frame that is not counted.
    #[inline]
    pub const fn special(self) -> Self {
        Self(self.0 | SPECIAL)
    }

    /// Returns the same leaf with cache mode `mode`.
    #[inline]
    pub const fn cached(self, mode: CacheMode) -> Self {
        let entry = match mode {
            CacheMode::WriteBack => 0,
            CacheMode::WriteThrough => 1,
            CacheMode::WriteCombining => 2,
            CacheMode::Uncached => 3,
        };
        Self(self.0 & !CACHE | entry << CACHE_SHIFT)
    }

    /// Returns the cache mode of a leaf.
    #[inline]
    pub const fn cache_mode(self) -> CacheMode {
        match (self.0 & CACHE) >> CACHE_SHIFT {
            0 => CacheMode::WriteBack,
            1 => CacheMode::WriteThrough,
            2 => CacheMode::WriteCombining,
            _ => CacheMode::Uncached,
        }
    }

    /// Returns the same leaf as a huge leaf, above the last level; its frame must be aligned to the
    /// huge size.
    #[inline]
    pub const fn huge(self) -> Self {
        Self(self.0 | HUGE)
    }

    /// Returns the last-level leaf equivalent to place `at` of this huge leaf, with the same
    /// permissions.
    #[inline]
    pub const fn part(self, at: usize) -> Self {
        Self((self.0 & !HUGE) + ((at as u64) << PAGE_SHIFT))
    }

    /// Returns the same leaf with the dirty bit clear, for `MADV_FREE`. The aged bit is also
    /// cleared: an aged entry implies a frame that stores the time when the accessed bit was
    /// cleared.
    #[inline]
    pub const fn clean(self) -> Self {
        Self(self.0 & !(DIRTY | ACCESSED | AGED))
    }

    /// Returns the same leaf with the dirty bit clear.
    #[inline]
    pub const fn undirtied(self) -> Self {
        Self(self.0 & !DIRTY)
    }

    /// Returns the same leaf with the dirty bit set.
    #[inline]
    pub const fn dirty(self) -> Self {
        Self(self.0 | DIRTY)
    }

    /// Returns the same leaf with a clear accessed bit: for a page mapped before its first access.
    #[inline]
    pub const fn unused(self) -> Self {
        Self(self.0 & !ACCESSED)
    }

    /// Returns the same leaf with a clear accessed bit, marked as scanned by reclaim.
    #[inline]
    pub const fn aged(self) -> Self {
        Self(self.0 & !ACCESSED | AGED)
    }

    /// Returns whether reclaim has scanned the entry since the page was mapped.
    #[inline]
    pub const fn is_aged(self) -> bool {
        self.0 & AGED != 0
    }

    /// Returns whether reclaim has scanned the entry and the page was not accessed since.
    #[inline]
    pub const fn is_idle(self) -> bool {
        self.0 & (AGED | ACCESSED) == AGED
    }

    /// Returns the same value with the lock bit.
    #[inline]
    pub const fn locked(self) -> Self {
        Self(self.0 | LOCKED)
    }

    /// Returns the same value without the lock bit.
    #[cfg(any(test, loom, shuttle))]
    #[inline]
    pub const fn unlocked(self) -> Self {
        Self(self.0 & !LOCKED)
    }

    /// Returns the same leaf, with the accessed and dirty bits that hardware has set in `now` since
    /// a CPU locked the entry with the value `before`.
    #[inline]
    pub const fn with_marks_of(self, now: Self, before: Self) -> Self {
        Self(self.0 | now.0 & !before.locked().0)
    }

    /// Returns whether the entry is empty.
    #[inline]
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }

    /// Returns whether the entry is empty or maps the same page as `page`, accessed or not.
    #[inline(always)]
    pub const fn fits(self, page: Self) -> bool {
        self.is_none() || self.unused().0 == page.unused().0
    }

    /// Returns whether the MMU may use the entry.
    #[inline]
    pub const fn is_present(self) -> bool {
        self.0 & PRESENT != 0
    }

    /// Returns whether the entry keeps a page that no program may access.
    #[inline]
    pub const fn is_hidden(self) -> bool {
        self.0 & HIDDEN != 0
    }

    /// Returns whether the page is in the [swap area](crate::reclaim::swap).
    #[inline]
    pub const fn is_swapped(self) -> bool {
        self.0 & SWAPPED != 0
    }

    /// Returns the slot of a swapped entry.
    #[inline]
    pub const fn slot(self) -> u64 {
        (self.0 & FRAME) >> PAGE_SHIFT
    }

    /// Returns whether the entry maps a page, present or hidden (or, above the last level, points
    /// to a table).
    #[inline]
    pub const fn is_mapped(self) -> bool {
        self.0 & (PRESENT | HIDDEN) != 0
    }

    /// Returns whether a CPU is changing the entry.
    #[inline]
    pub const fn is_locked(self) -> bool {
        self.0 & LOCKED != 0
    }

    /// Returns whether stores are allowed.
    #[inline]
    pub const fn is_writable(self) -> bool {
        self.0 & WRITE != 0
    }

    /// Returns whether instruction fetches are allowed.
    #[inline]
    pub const fn is_executable(self) -> bool {
        self.0 & NO_EXECUTE == 0
    }

    /// Returns whether a store has used the entry since it was installed or cleaned.
    #[inline]
    pub const fn is_dirty(self) -> bool {
        self.0 & DIRTY != 0
    }

    /// Returns whether the MMU may use a page with a counted frame, the page was accessed, and no
    /// CPU is changing the entry. Most entries are in this state, and one comparison detects it.
    #[inline(always)]
    pub const fn is_used_page(self) -> bool {
        self.0 & (PRESENT | LOCKED | SPECIAL | ACCESSED) == PRESENT | ACCESSED
    }

    /// Returns whether the entry maps a counted frame that was prefaulted for a store and never
    /// accessed. Such an entry is installed dirty and [not accessed](Self::unused); hardware sets
    /// the accessed bit before or together with the dirty bit, and [`clean`](Self::clean) clears
    /// both.
    #[inline]
    pub const fn is_wasted(self) -> bool {
        self.0 & (ACCESSED | AGED | DIRTY) == DIRTY
    }

    /// Returns whether the entry maps a page that was accessed: any page except a prefaulted page
    /// (or a prefaulted zero page) without an access.
    #[inline]
    pub const fn was_used(self) -> bool {
        self.is_mapped() && (self.0 & (ACCESSED | AGED) != 0 || self.0 & (DIRTY | SPECIAL) == 0)
    }

    /// Returns the same leaf with the accessed bit set.
    #[inline]
    pub const fn used(self) -> Self {
        Self(self.0 | ACCESSED)
    }

    /// Returns whether an access has used the entry since it was installed or cleaned.
    #[inline]
    pub const fn is_accessed(self) -> bool {
        self.0 & ACCESSED != 0
    }

    /// Returns whether the entry is a leaf above the last level.
    #[inline]
    pub const fn is_huge(self) -> bool {
        self.0 & HUGE != 0
    }

    /// Returns whether CPUs must drop cached translations of the old value `old`, now that the
    /// entry has this value. An entry that was not present is in no TLB. A cached translation that
    /// allows less than the new entry is dropped by the resulting fault.
    #[inline]
    pub const fn needs_flush(self, old: Self) -> bool {
        // Dirty is included: a store through a cached dirty translation would not mark the entry
        // again.
        const GRANTS: u64 = PRESENT | WRITE | USER | DIRTY;
        let lost = old.0 & !self.0 & GRANTS | self.0 & !old.0 & NO_EXECUTE;
        let other = (self.0 ^ old.0) & (FRAME | HUGE | CACHE);
        old.is_present() && lost | other != 0
    }

    /// Returns whether the frame is not counted.
    #[inline]
    pub const fn is_special(self) -> bool {
        self.0 & SPECIAL != 0
    }

    /// Returns whether the MMU may use a page with a counted frame, and no CPU is changing the
    /// entry.
    #[inline]
    pub const fn is_counted_page(self) -> bool {
        self.0 & (PRESENT | LOCKED | SPECIAL) == PRESENT
    }

    /// Returns whether the entry points to a table of the next level, unlocked.
    #[inline]
    pub const fn is_table(self) -> bool {
        self.0 & (PRESENT | HUGE | LOCKED) == PRESENT
    }

    /// Returns the mapped frame, or the frame of the next table. Meaningless unless
    /// [mapped](Self::is_mapped).
    #[inline]
    pub const fn frame(self) -> FrameNumber {
        frame_of(self.0)
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_none() {
            return f.write_str("none");
        }
        if *self == Self::BUSY {
            return f.write_str("busy");
        }
        if self.is_swapped() {
            return write!(f, "slot {}", self.slot());
        }
        write!(f, "{:?}", self.frame())?;
        for (set, mark) in [
            (self.is_writable(), " write"),
            (self.is_hidden(), " hidden"),
            (self.is_executable(), " execute"),
            (self.is_accessed(), " accessed"),
            (self.is_dirty(), " dirty"),
            (self.is_huge(), " huge"),
            (self.is_special(), " special"),
            (self.is_locked(), " locked"),
            (self.0 & AGED != 0, " aged"),
        ] {
            if set {
                f.write_str(mark)?;
            }
        }
        if self.0 & CACHE != 0 {
            write!(f, " {:?}", self.cache_mode())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leaf_keeps_its_frame_through_every_change() {
        let frame = FrameNumber(0xdead_beef);
        let leaf = Entry::leaf(frame).writable_dirty().with_execute(true).special().locked();
        assert_eq!(leaf.frame(), frame);
        assert!(leaf.is_present() && leaf.is_writable() && leaf.is_dirty());
        assert!(leaf.is_executable() && leaf.is_special() && leaf.is_locked());
        let plain = leaf.unlocked().read_only().with_execute(false).clean();
        assert_eq!(plain.frame(), frame);
        assert!(!plain.is_writable() && !plain.is_dirty() && !plain.is_locked());
        assert!(!plain.is_executable());
    }

    #[test]
    fn a_hidden_leaf_is_mapped_and_restored_unchanged() {
        let leaf = Entry::leaf(FrameNumber(7)).special();
        let hidden = leaf.with_hidden(true);
        assert!(hidden.is_hidden() && hidden.is_mapped() && !hidden.is_present());
        assert_eq!(hidden.frame(), FrameNumber(7));
        assert_eq!(hidden.with_hidden(false), leaf);
        assert!(!Entry::BUSY.is_mapped() && !Entry::NONE.is_mapped());
    }

    #[test]
    fn translations_that_allow_more_or_map_another_page_need_a_flush() {
        let leaf = Entry::leaf(FrameNumber(7));
        let writable = leaf.writable_dirty();
        for (old, new) in [
            (leaf, Entry::NONE),
            (leaf, leaf.with_hidden(true)),
            (leaf, Entry::leaf(FrameNumber(8))),
            (leaf, leaf.huge()),
            (leaf, leaf.cached(CacheMode::Uncached)),
            (writable, leaf),
            (writable, writable.clean()),
            (leaf.with_execute(true), leaf),
        ] {
            assert!(new.needs_flush(old), "{old:?} to {new:?}");
        }
        for (old, new) in [
            (Entry::NONE, leaf),
            (Entry::NONE, Entry::NONE),
            (leaf, leaf),
            (leaf, writable),
            (leaf, leaf.clean()),
            (leaf, leaf.with_execute(true)),
            (leaf.with_hidden(true), writable),
            (leaf.with_hidden(true), Entry::NONE),
        ] {
            assert!(!new.needs_flush(old), "{old:?} to {new:?}");
        }
    }

    #[test]
    fn values_match_the_hardware_format() {
        const FRAME: u64 = 0xcde_f012_3000;
        let frame = FrameNumber::from_phys(FRAME).unwrap();
        let leaf = Entry::leaf(frame);
        // Accessed, user, present; a table entry is writable, so the next level decides about
        // stores and fetches.
        assert_eq!(Entry::table(frame), Entry(FRAME | 0x27));
        assert_eq!(leaf, Entry(1 << 63 | FRAME | 0x25));
        assert_eq!(Entry::template(false).of(frame), leaf);
        assert_eq!(Entry::template(true).of(frame), Entry(FRAME | 0x25));
        assert_eq!(leaf.with_execute(true).with_execute(true), Entry(FRAME | 0x25));
        assert_eq!(leaf.with_execute(false), leaf);
        for (entry, bit) in [
            (leaf.writable(), 1),
            (leaf.dirty(), 6),
            (leaf.huge(), 7),
            (leaf.locked(), 9),
            (leaf.special(), 10),
        ] {
            assert_eq!(entry, Entry(leaf.0 | 1 << bit));
        }
        for (mode, bits) in [
            (CacheMode::WriteBack, 0),
            (CacheMode::WriteThrough, 0x08),
            (CacheMode::WriteCombining, 0x10),
            (CacheMode::Uncached, 0x18),
        ] {
            let cached = leaf.cached(CacheMode::Uncached).cached(mode);
            assert_eq!(cached, Entry(leaf.0 | bits));
            assert_eq!(cached.with_hidden(true).cache_mode(), mode);
            assert_eq!(cached.frame(), frame);
        }
        // The register has a byte for each; the manuals number the types.
        for (mode, memory_type) in [
            (CacheMode::WriteBack, 6),
            (CacheMode::WriteThrough, 4),
            (CacheMode::WriteCombining, 1),
            (CacheMode::Uncached, 0),
        ] {
            let place = (leaf.cached(mode).0 & CACHE) >> CACHE_SHIFT;
            assert_eq!(PAGE_ATTRIBUTES.to_le_bytes()[place as usize], memory_type, "{mode:?}");
        }
        assert_eq!(leaf.writable_dirty(), Entry(leaf.0 | 0x42));
        assert_eq!(leaf.writable_dirty().writable_dirty().dirty().used(), leaf.writable_dirty());
        assert_eq!(leaf.writable_dirty().read_only(), leaf.dirty());
        assert_eq!(leaf.writable_dirty().clean(), leaf.writable().unused());
        assert_eq!(leaf.unused(), Entry(leaf.0 & !0x20));
        assert_eq!(leaf.with_hidden(true), Entry(leaf.0 & !1 | 1 << 11));
        assert_eq!(Entry::BUSY, Entry(1 << 9));
    }

    #[test]
    fn busy_is_locked_and_not_present_and_not_none() {
        assert!(Entry::BUSY.is_locked() && !Entry::BUSY.is_present() && !Entry::BUSY.is_none());
        assert!(!Entry::BUSY.is_table());
        let ours = Entry::busy_of(CpuId(0));
        assert!(ours.is_locked() && !ours.is_mapped() && !ours.is_none() && !ours.is_table());
        assert!(ours != Entry::BUSY && ours != Entry::busy_of(CpuId(1)));
    }

    #[test]
    fn prefaulted_pages_differ_from_used_pages() {
        let leaf = Entry::leaf(FrameNumber(7));
        let (own, zeros) = (leaf.writable_dirty(), leaf.special());
        for used in [own, zeros, own.clean(), leaf, own.with_hidden(true), own.read_only()] {
            assert!(used.was_used() && !used.is_wasted(), "{used:?}");
        }
        for ahead in [own.unused(), own.unused().with_hidden(true), own.unused().read_only()] {
            assert!(ahead.is_wasted() && !ahead.was_used(), "{ahead:?}");
            assert!(ahead.used().was_used() && !ahead.used().is_wasted(), "{ahead:?}");
        }
        assert!(
            !zeros.unused().was_used() && !zeros.unused().is_wasted(),
            "the zero page costs no frame"
        );
        for none in [Entry::NONE, Entry::BUSY] {
            assert!(!none.was_used() && !none.is_wasted());
        }
    }

    #[test]
    fn pages_scanned_by_reclaim_count_as_used() {
        let own = Entry::leaf(FrameNumber(7)).writable_dirty();
        let aged = own.aged();
        assert!(aged.was_used() && !aged.is_wasted() && !aged.is_accessed());
        assert!(aged.is_aged() && aged.used().is_aged() && !own.is_aged());
        assert_eq!((aged.frame(), aged.is_writable()), (own.frame(), true));
        assert!(!aged.needs_flush(own) && !own.needs_flush(aged));
        assert!(own.is_used_page() && !aged.is_used_page() && !own.unused().is_used_page());
        let others = [own.locked(), own.special(), own.with_hidden(true), Entry::swapped(1)];
        assert!(others.iter().all(|entry| !entry.is_used_page()));
        assert!(!own.unused().was_used() && aged.clean().was_used() && !aged.clean().is_aged());
        assert!(aged.is_idle() && !aged.used().is_idle() && !own.unused().is_idle());
    }

    #[test]
    fn a_swapped_entry_has_no_other_state() {
        for slot in [0, 1, SLOTS - 1] {
            let entry = Entry::swapped(slot);
            assert_eq!(entry.slot(), slot);
            assert!(entry.is_swapped() && !entry.is_none() && !entry.is_mapped());
            assert!(!entry.is_locked() && !entry.is_special() && !entry.is_dirty());
            assert!(!entry.is_table() && !entry.is_huge() && !entry.is_hidden());
            assert!(!entry.was_used() && !entry.is_wasted() && !entry.fits(Entry::NONE));
            let leaf = Entry::leaf(FrameNumber(7));
            assert!(!leaf.needs_flush(entry) && !Entry::NONE.needs_flush(entry));
            assert!(entry.needs_flush(leaf));
        }
        let leaf = Entry::leaf(FrameNumber(u32::MAX)).writable_dirty().special().with_hidden(true);
        assert!(!leaf.is_swapped() && !Entry::NONE.is_swapped() && !Entry::BUSY.is_swapped());
        assert!(!Entry::busy_of(CpuId(u16::MAX)).is_swapped());
    }

    #[test]
    fn huge_leaves_are_not_tables() {
        let huge = Entry::leaf(FrameNumber(512)).huge();
        assert!(huge.is_huge() && huge.is_present() && !huge.is_table());
        assert!(Entry::table(FrameNumber(3)).is_table());
        assert!(!Entry::table(FrameNumber(3)).locked().is_table());
    }
}
