//! The kernel's own page tables, which are the upper half of every space.
//!
//! All physical memory is mapped at [`DIRECT_MAP`], in 2 MiB pages, for data only. The image is
//! mapped at its link address, each part with its own protection; the registers of devices are
//! mapped uncached. The direct map maps the image's code and constants with small pages, read-only:
//! no address is both writable and executable, and no executable byte is writable through another
//! address. All these entries are global. [`check`] walks the tables and verifies these rules.
//!
//! *Guards.* The page below each kernel stack is not mapped ([`guard`]), so a stack overflow
//! faults. Guards are the only entries that change after the CPUs have started. Mapping a page
//! again needs no flush. After unmapping, other CPUs may keep a translation, which gives access
//! only to unused memory. But the CPU that is about to run on the stack must not have such a
//! translation: it compares [`guards`], the number of guards made so far, and drops the kernel's
//! translations ([`drop_kernel_translations`]) if this number has changed.

use crate::arch::apic;
use crate::ranges::{Range, Ranges};
use alloc::alloc::alloc;
use core::alloc::Layout;
use core::sync::atomic::{AtomicU64, Ordering};
use faultless::locks::Spin;
use faultless::locks::SpinLock;
use x86_64::registers::control::{Cr4, Cr4Flags};
use x86_64::structures::paging::PageTableFlags as Flags;

/// The address of the direct map of all physical memory.
pub const DIRECT_MAP: u64 = 0xffff_8880_0000_0000;

/// Machines have the registers of devices between this address and 4 GiB.
pub const DEVICES: u64 = (4 << 30) - (32 << 20);

/// Returns the kernel address of the physical address `phys`: memory, or (uncached) a register of a
/// device.
#[inline(always)]
pub const fn direct(phys: u64) -> *mut u8 {
    (DIRECT_MAP + phys) as *mut u8
}

const SMALL: u64 = 1 << 12;
const LARGE: u64 = 1 << 21;
const ADDRESS: u64 = 0xf_ffff_ffff_f000;
/// The link address of the image: the sum of this constant and the physical address.
const IMAGE: u64 = 0xffff_ffff_8000_0000;

/// The kernel's root table.
static ROOT: AtomicU64 = AtomicU64::new(0);

/// Returns the physical address of the kernel's root table, whose lower half is empty.
#[inline]
pub fn root() -> u64 {
    ROOT.load(Ordering::Relaxed)
}

unsafe extern "C" {
    static __image_start: u8;
    static __text_start: u8;
    static __text_end: u8;
    static __rodata_start: u8;
    static __rodata_end: u8;
    static __data_start: u8;
    static __image_end: u8;
}

/// Returns the place of the image in physical memory.
pub fn image() -> Range {
    Range::new(&raw const __image_start as u64 - IMAGE, &raw const __image_end as u64 - IMAGE)
}

/// Page tables under construction, in frames of `free`, all in the first GiB.
struct Tables<'a> {
    root: u64,
    free: &'a mut Ranges,
}

impl Tables<'_> {
    fn new_table(&mut self) -> u64 {
        let found = self.free.take(SMALL, SMALL).filter(|found| found.end <= 1 << 30);
        let table = found.expect("no memory for the kernel's page tables").start;
        // SAFETY: just taken; the boot tables map the first GiB.
        unsafe { direct(table).write_bytes(0, SMALL as usize) };
        table
    }

    /// Maps `range` of physical memory at `offset` above its address; if `large`, with large pages
    /// for the aligned parts.
    fn map(&mut self, range: Range, offset: u64, flags: Flags, large: bool) {
        let mut phys = range.start;
        while phys < range.end {
            let virt = phys.wrapping_add(offset);
            let fits = large && (phys | virt).is_multiple_of(LARGE) && range.end - phys >= LARGE;
            let (level, size) = if fits { (2, LARGE) } else { (1, SMALL) };
            let slot = self.slot(virt, level);
            let size_flag = if fits { Flags::HUGE_PAGE } else { Flags::empty() };
            // SAFETY: an entry of a table of ours.
            unsafe { slot.write(phys | (flags | size_flag | Flags::PRESENT).bits()) };
            phys += size;
        }
    }

    /// Returns the entry for `virt` in its table of `level`.
    fn slot(&mut self, virt: u64, level: u32) -> *mut u64 {
        let mut table = self.root;
        let mut at = 4;
        loop {
            let index = virt >> (12 + 9 * (at - 1)) & 511;
            let slot = direct(table + index * 8).cast::<u64>();
            if at == level {
                return slot;
            }
            // SAFETY: an entry of a table of ours.
            unsafe {
                if *slot == 0 {
                    *slot = self.new_table() | (Flags::PRESENT | Flags::WRITABLE).bits();
                }
                table = *slot & ADDRESS;
            }
            at -= 1;
        }
    }
}

/// Makes the kernel's tables, in frames taken from `free`, for memory up to `ends`: below and above
/// 4 GiB.
pub fn build(free: &mut Ranges, ends: [u64; 2]) {
    let mut tables = Tables { root: 0, free };
    tables.root = tables.new_table();
    let data = Flags::WRITABLE | Flags::NO_EXECUTE | Flags::GLOBAL;
    let constants = Flags::NO_EXECUTE | Flags::GLOBAL;
    let part =
        |start: *const u8, end: *const u8| Range::new(start as u64 - IMAGE, end as u64 - IMAGE);
    let text = part(&raw const __text_start, &raw const __text_end);
    let rodata = part(&raw const __rodata_start, &raw const __rodata_end);
    let writable = part(&raw const __data_start, &raw const __image_end);
    tables.map(text, IMAGE, Flags::GLOBAL, false);
    tables.map(rodata, IMAGE, constants, false);
    tables.map(writable, IMAGE, data, false);

    let fixed = Range::new(text.start & !(LARGE - 1), rodata.end.next_multiple_of(LARGE));
    let low_end = ends[0].next_multiple_of(LARGE);
    tables.map(Range::new(0, fixed.start), DIRECT_MAP, data, true);
    tables.map(Range::new(fixed.start, text.start), DIRECT_MAP, data, false);
    tables.map(Range::new(text.start, rodata.end), DIRECT_MAP, constants, false);
    tables.map(Range::new(rodata.end, fixed.end), DIRECT_MAP, data, false);
    tables.map(Range::new(fixed.end, low_end), DIRECT_MAP, data, true);
    tables.map(Range::new(1 << 32, ends[1].next_multiple_of(LARGE)), DIRECT_MAP, data, true);

    let uncached = data | Flags::NO_CACHE | Flags::WRITE_THROUGH;
    tables.map(Range::new(DEVICES.max(low_end), 1 << 32), DIRECT_MAP, uncached, true);
    let registers = Range::new(apic::base(), apic::base() + SMALL);
    let offset = apic::MAPPED_AT.wrapping_sub(apic::base());
    tables.map(registers, offset, uncached, false);
    ROOT.store(tables.root, Ordering::Relaxed);
}

/// Walks the kernel's tables, which are in use, and panics if a page is both writable and
/// executable, is accessible to user mode, or maps code writable.
pub fn check() {
    let text = {
        let start = &raw const __text_start as u64 - IMAGE;
        Range::new(start, &raw const __text_end as u64 - IMAGE)
    };
    check_table(root(), 4, 0, Flags::all(), text);
}

fn check_table(table: u64, level: u32, virt: u64, above: Flags, text: Range) {
    for index in 0..512 {
        // SAFETY: a table of the kernel, in the direct map.
        let entry = unsafe { direct(table + index * 8).cast::<u64>().read() };
        let own = Flags::from_bits_truncate(entry);
        if !own.contains(Flags::PRESENT) {
            continue;
        }
        let virt = virt | index << (12 + 9 * (level - 1));
        // Each level can only remove rights; NO_EXECUTE removes a right.
        let rights = Flags::WRITABLE | Flags::USER_ACCESSIBLE;
        let flags = (above & own & rights) | ((above | own) & Flags::NO_EXECUTE);
        // At the root no right is removed yet.
        let flags = if level == 4 { own } else { flags };
        let phys = entry & ADDRESS & !1;
        if level != 1 && !own.contains(Flags::HUGE_PAGE) {
            check_table(phys, level - 1, virt, flags, text);
            continue;
        }
        let writable = flags.contains(Flags::WRITABLE);
        let executable = !flags.contains(Flags::NO_EXECUTE);
        let len = 1 << (12 + 9 * (level - 1));
        let shows_text = phys < text.end && text.start < phys + len;
        let users = flags.contains(Flags::USER_ACCESSIBLE);
        assert!(
            !users && !(writable && (executable || shows_text)),
            "the kernel's page at {virt:#x} has flags {flags:?}"
        );
    }
}

/// Held while a guard is made or removed. Only the heap's lock is taken inside it.
static GUARDING: SpinLock<()> = SpinLock::new(());
/// The number of guards made so far.
static GUARDS: AtomicU64 = AtomicU64::new(0);

/// Returns the number of guards made so far.
#[inline]
pub fn guards() -> u64 {
    GUARDS.load(Ordering::Acquire)
}

/// Unmaps the kernel's page at `page`. `false`: there is no memory for the required table, and the
/// mapping is unchanged.
///
/// # Safety
/// The page is in the image or the direct map. The caller owns the page, and does not use it before
/// [`unguard`].
pub unsafe fn guard(page: *const u8) -> bool {
    let _guarding = GUARDING.lock(&Spin);
    let (mut slot, large) = leaf(page as u64);
    if large {
        // SAFETY: the entry of a large page, and the lock is held.
        if !unsafe { split(slot) } {
            return false;
        }
        (slot, _) = leaf(page as u64);
    }
    // SAFETY: the entry of the caller's page; the lock excludes other writers.
    unsafe { slot.write_volatile(slot.read_volatile() & !Flags::PRESENT.bits()) };
    GUARDS.fetch_add(1, Ordering::Release);
    true
}

/// Splits a large page into small pages, permanently. `false`: there is no memory for the table.
///
/// # Safety
/// `slot` is the page's entry; [`GUARDING`] is held.
unsafe fn split(slot: *mut u64) -> bool {
    #[repr(C, align(4096))]
    struct Table([u64; 512]);
    // SAFETY: the layout is not empty.
    let table = unsafe { alloc(Layout::new::<Table>()) }.cast::<u64>();
    if table.is_null() {
        return false;
    }
    // SAFETY: the new table is not in use yet. Only the processor may write the entry concurrently:
    // it sets the accessed and dirty bits, which are not used. Both sizes map the same memory with
    // the same rights, so CPUs may cache either size.
    unsafe {
        let first = slot.read_volatile() & !Flags::HUGE_PAGE.bits();
        (0..512).for_each(|index| table.add(index).write(first + index as u64 * SMALL));
        let at = table as u64 - DIRECT_MAP;
        slot.write_volatile(at | (Flags::PRESENT | Flags::WRITABLE).bits());
    }
    true
}

/// Maps a page again after [`guard`].
///
/// # Safety
/// [`guard`] has unmapped the page.
pub unsafe fn unguard(page: *const u8) {
    let _guarding = GUARDING.lock(&Spin);
    let (slot, _) = leaf(page as u64);
    // SAFETY: the entry of the page, which is complete except for its present bit.
    unsafe { slot.write_volatile(slot.read_volatile() | Flags::PRESENT.bits()) };
}

/// Returns the entry for the kernel address `virt`, and whether the entry maps a large page.
fn leaf(virt: u64) -> (*mut u64, bool) {
    let mut table = root();
    let mut level = 4;
    loop {
        let index = virt >> (12 + 9 * (level - 1)) & 511;
        let slot = direct(table + index * 8).cast::<u64>();
        // SAFETY: an entry of the kernel's tables, which are never freed.
        let entry = unsafe { slot.read_volatile() };
        let large = level == 2 && entry & Flags::HUGE_PAGE.bits() != 0;
        if level == 1 || large {
            return (slot, large);
        }
        table = entry & ADDRESS;
        level -= 1;
    }
}

/// Drops all translations of this CPU, including global translations.
#[cold]
pub fn drop_kernel_translations() {
    let cr4 = Cr4::read();
    // SAFETY: turning global pages off and on drops all translations, including all PCIDs. No code
    // relies on cached translations.
    unsafe {
        Cr4::write(cr4 - Cr4Flags::PAGE_GLOBAL);
        Cr4::write(cr4);
    }
}
