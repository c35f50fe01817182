//! The page-table format of the subsystem. Only the file below this module contains the bit layout.
//!
//! All other modules use the names that the format exports. Another format (five levels, Sv48,
//! AArch64) is another file next to [`x86_64`], and one line here. A format provides:
//!
//! - **An entry of one 64-bit word**, which the MMU reads atomically and software changes by
//!   compare-and-swap. `0` is the empty entry, at every level.
//! - **[`LEVELS`] levels** of tables of [`ENTRIES`] entries (2^[`INDEX_BITS`]), one frame each. An
//!   upper entry points to a table or is a huge leaf; an entry of the last level maps one base
//!   page.
//! - **Three software bits in a present entry**: *locked* ([`Entry::locked`]: a CPU is changing the
//!   entry), *special* ([`Entry::special`]: the frame is not counted), and *aged* ([`Entry::aged`]:
//!   reclaim has cleared the accessed bit).
//! - **Three encodings of an entry that is not present**: *busy* ([`Entry::BUSY`],
//!   [`Entry::busy_of`]), which contains the number of a CPU; *hidden* ([`Entry::with_hidden`]),
//!   which keeps the frame and the remaining bits of a leaf; and *swapped* ([`Entry::swapped`]),
//!   which names one of [`SLOTS`] slots of the swap area and has no permission. The MMU ignores all
//!   of them.
//! - **Accessed and dirty bits**, which hardware updates atomically in the entry, and never in an
//!   entry that is not present. Without such hardware the machine's fault handler must make both
//!   updates, by compare-and-swap. [`Entry::with_marks_of`] carries over the bits that hardware
//!   sets while a CPU has the entry locked.
//! - **The [`CacheMode`]s** of device memory ([`Entry::cached`]). If the modes need a register in
//!   addition to the tables, the format documents how the kernel sets the register.
//! - **The changes that leave a stale translation** in a TLB: [`Entry::needs_flush`]. If the
//!   architecture requires break-before-make (AArch64, for another frame or size), the subsystem
//!   already complies: a CPU that changes the frame of a present entry makes the entry busy and
//!   flushes before it stores the new value.
//! - **The user range**: [`CANONICAL_END`], [`USER_END`], and the entries of a root table for user
//!   space ([`USER_ROOT_ENTRIES`]); the remaining entries belong to the kernel.

mod x86_64;

/// How CPUs cache the accesses to a page. The subsystem's own memory is always
/// [`WriteBack`](Self::WriteBack).
///
/// All mappings of a page must have the same mode, including the kernel's own mapping: the kernel
/// is responsible for this.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CacheMode {
    /// Loads and stores are cached: ordinary memory, tables of the firmware.
    #[default]
    WriteBack,
    /// Loads are cached; stores go to memory at once.
    WriteThrough,
    /// Accesses are not cached; stores may be gathered: framebuffers.
    WriteCombining,
    /// Accesses are not cached, and each access takes place, in order: registers of devices.
    Uncached,
}

pub use x86_64::{
    ACCESSED, CACHE, CANONICAL_END, DIRTY, ENTRIES, Entry, FRAME, HUGE, INDEX_BITS, LEVELS,
    NO_EXECUTE, PAGE_ATTRIBUTES, PRESENT, SLOTS, SOFTWARE, USER, USER_END, USER_ROOT_ENTRIES,
    WRITE, frame_of,
};
