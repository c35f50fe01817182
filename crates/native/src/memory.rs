//! Physical memory: one anonymous mapping of the host, cut into frames.
//!
//! *Invariant (host mapping):* the mapping spans `bytes` bytes from `base`, is readable and
//! writable, and lives as long as the [`Memory`]; only raw pointers and atomics ever point into it.
//!
//! Guest programs race with each other, so each of their accesses is a relaxed atomic of the host.
//! Programs that access the same bytes at different widths at the same time get the behaviour of
//! the hardware, which Rust's memory model does not describe, as in every emulator.
//!
//! The mapping stays on small pages of the host, because huge pages depend on the host's
//! fragmentation, and two runs would differ. The host allocates a page at its first access; use
//! [`populate`](crate::Config::populate) if this time must not be part of a measurement.

use crate::machine::ConfigError;
use core::cell::Cell;
use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};
use faultless::{Errno, FrameNumber, MemoryRegion, PAGE_SHIFT, PAGE_SIZE};
use memmap2::{Advice, MmapOptions, MmapRaw};

/// The largest number of memory nodes.
pub const MAX_NODES: usize = 8;
/// The smallest number of frames in a node, except the slow node.
pub(crate) const LEAST_FRAMES: usize = 2;

/// An integer that guest programs load and store at once: `u8`, `u16`, `u32` or `u64`.
pub trait Word: Copy + private::Atomic {}

impl Word for u8 {}
impl Word for u16 {}
impl Word for u32 {}
impl Word for u64 {}

/// The operations of a [`Word`] at an address of the host.
pub(crate) mod private {
    use super::*;

    /// A word and its atomic twin.
    ///
    /// The functions with an address require an address aligned to the word, and valid for atomic
    /// accesses of its size.
    pub trait Atomic: Sized {
        /// Bytes in the word.
        const SIZE: u64 = size_of::<Self>() as u64;
        /// A relaxed load.
        ///
        /// # Safety
        /// `at` is aligned, and valid for atomic accesses.
        unsafe fn load(at: *mut Self) -> Self;
        /// A relaxed store.
        ///
        /// # Safety
        /// `at` is aligned, and valid for atomic accesses.
        unsafe fn store(at: *mut Self, value: Self);
        /// Adds, wrapping around; the value before.
        ///
        /// # Safety
        /// `at` is aligned, and valid for atomic accesses.
        unsafe fn fetch_add(at: *mut Self, value: Self) -> Self;
        /// Replaces `old` by `new`; the value found.
        ///
        /// # Safety
        /// `at` is aligned, and valid for atomic accesses.
        unsafe fn compare_exchange(at: *mut Self, old: Self, new: Self) -> Result<Self, Self>;
        /// The little-endian word in the first bytes of `bytes`.
        fn from_le(bytes: [u8; 8]) -> Self;
        /// The word's bytes, little-endian, zero-extended.
        fn to_le(self) -> [u8; 8];
    }

    macro_rules! atomic {
        ($word:ty, $cell:ty) => {
            impl Atomic for $word {
                #[inline(always)]
                unsafe fn load(at: *mut Self) -> Self {
                    // SAFETY: the caller's promise.
                    unsafe { <$cell>::from_ptr(at) }.load(Relaxed)
                }
                #[inline(always)]
                unsafe fn store(at: *mut Self, value: Self) {
                    // SAFETY: the caller's promise.
                    unsafe { <$cell>::from_ptr(at) }.store(value, Relaxed);
                }
                #[inline(always)]
                unsafe fn fetch_add(at: *mut Self, value: Self) -> Self {
                    use core::sync::atomic::Ordering::SeqCst;
                    // SAFETY: the caller's promise.
                    unsafe { <$cell>::from_ptr(at) }.fetch_add(value, SeqCst)
                }
                #[inline(always)]
                unsafe fn compare_exchange(
                    at: *mut Self,
                    old: Self,
                    new: Self,
                ) -> Result<Self, Self> {
                    use core::sync::atomic::Ordering::SeqCst;
                    // SAFETY: the caller's promise.
                    unsafe { <$cell>::from_ptr(at) }.compare_exchange(old, new, SeqCst, SeqCst)
                }
                #[inline]
                fn from_le(bytes: [u8; 8]) -> Self {
                    u64::from_le_bytes(bytes) as $word
                }
                #[inline]
                #[allow(clippy::cast_lossless, reason = "u64 is among the words")]
                fn to_le(self) -> [u8; 8] {
                    (self as u64).to_le_bytes()
                }
            }
        };
    }
    atomic!(u8, AtomicU8);
    atomic!(u16, AtomicU16);
    atomic!(u32, AtomicU32);
    atomic!(u64, AtomicU64);
}

/// The machine's physical memory.
#[derive(Debug)]
pub struct Memory {
    base: *mut u8,
    bytes: u64,
    regions: Vec<MemoryRegion>,
    /// Keeps the mapping alive.
    _map: MmapRaw,
}

// SAFETY: `base` points into the mapping, which belongs to this value (host mapping); the memory
// behind it is accessed by atomics here, and by the frame's owner through `frame_bytes`.
unsafe impl Send for Memory {}
// SAFETY: as above; all other fields are constant.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps `bytes` bytes (rounded down to whole frames) and cuts them evenly into `nodes` nodes.
    ///
    /// # Errors
    /// There are no or too many nodes, the size is out of the
    /// [range](crate::Config::memory_bytes), or the host refuses the mapping.
    pub fn new(bytes: u64, nodes: usize) -> Result<Self, ConfigError> {
        Self::tiered(bytes, nodes, 0)
    }

    /// Creates the memory of [`new`](Self::new), and one more node behind, of `slow` bytes, unless
    /// `slow` is less than a frame.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn tiered(bytes: u64, nodes: usize, slow: u64) -> Result<Self, ConfigError> {
        let all = nodes.saturating_add(usize::from(slow >> PAGE_SHIFT != 0));
        if nodes == 0 || all > MAX_NODES {
            return Err(ConfigError::Nodes { nodes, slow });
        }
        let size = ConfigError::Size { bytes, slow, nodes };
        let frames = |bytes: u64| u32::try_from(bytes >> PAGE_SHIFT).map_err(|_| size);
        let (fast, slow) = (frames(bytes)?, frames(slow)?);
        let frames = fast.checked_add(slow).ok_or(size)?;
        // Frame 0 is unused: the number 0 means "none".
        if (fast as usize) < LEAST_FRAMES * nodes {
            return Err(size);
        }
        let bytes = u64::from(frames) << PAGE_SHIFT;
        let refused = ConfigError::Refused(Errno::ENOMEM);
        let map = MmapOptions::new()
            .len(usize::try_from(bytes).map_err(|_| refused)?)
            .no_reserve_swap()
            .map_anon()
            .map_err(|_| refused)?;
        let map = MmapRaw::from(map);
        // A host built without huge pages refuses the advice and has no need of it.
        let _ = map.advise(Advice::NoHugePage);
        // A process of the host that forks (to run a workload on the host's kernel beside this
        // machine) would pay for copying the tables of all this memory.
        let _ = map.advise(Advice::DontFork);

        let per_node = fast / nodes as u32;
        let region = |node: u32| {
            let first = (node * per_node).max(1);
            let end = if node + 1 == nodes as u32 { fast } else { (node + 1) * per_node };
            MemoryRegion { node: node as u8, first: FrameNumber(first), frames: end - first }
        };
        let last = MemoryRegion { node: nodes as u8, first: FrameNumber(fast), frames: slow };
        let regions = (0..nodes as u32).map(region).chain((slow != 0).then_some(last)).collect();
        Ok(Self { base: map.as_mut_ptr(), bytes, regions, _map: map })
    }

    /// Makes the host back every frame now. Only before the memory is used: a frame's first byte
    /// is written.
    pub fn populate(&mut self) {
        for phys in (0..self.bytes).step_by(PAGE_SIZE as usize) {
            self.store::<u8>(phys, 0);
        }
    }

    /// The nodes, each a run of frames.
    pub fn regions(&self) -> &[MemoryRegion] {
        &self.regions
    }

    /// Frames there are, whether handed out or not.
    pub fn frames(&self) -> u32 {
        (self.bytes >> PAGE_SHIFT) as u32
    }

    /// The bytes of `frame`; dangling when there is no such frame.
    #[inline(always)]
    pub fn frame_bytes(&self, frame: FrameNumber) -> *mut u8 {
        debug_assert!(frame.0 < self.frames(), "{frame:?} is beyond the end of memory");
        self.base.wrapping_add(frame.phys() as usize)
    }

    /// The host's address of `T` at physical address `phys`.
    ///
    /// A `phys` that is misaligned or beyond the end is a broken machine, not a guest's doing.
    #[inline(always)]
    fn at<T: Word>(&self, phys: u64) -> *mut T {
        assert!(
            phys.is_multiple_of(T::SIZE) && phys <= self.bytes - T::SIZE,
            "bad physical address {phys:#x}"
        );
        self.base.wrapping_add(phys as usize).cast()
    }

    /// Loads the word at `phys`, an aligned address.
    #[inline(always)]
    pub fn load<T: Word>(&self, phys: u64) -> T {
        // SAFETY: `at` gives an aligned address inside the mapping (host mapping).
        unsafe { T::load(self.at(phys)) }
    }

    /// Stores `value` at `phys`, an aligned address.
    #[inline(always)]
    pub fn store<T: Word>(&self, phys: u64, value: T) {
        // SAFETY: `at` gives an aligned address inside the mapping (host mapping).
        unsafe { T::store(self.at(phys), value) }
    }

    /// Adds `value` to the word at `phys`, atomically; the value before.
    #[inline(always)]
    pub fn fetch_add<T: Word>(&self, phys: u64, value: T) -> T {
        // SAFETY: `at` gives an aligned address inside the mapping (host mapping).
        unsafe { T::fetch_add(self.at(phys), value) }
    }

    /// Replaces the word at `phys` by `new` if it is `old`, atomically.
    ///
    /// # Errors
    /// The value found, if it is not `old`.
    #[inline(always)]
    pub fn compare_exchange<T: Word>(&self, phys: u64, old: T, new: T) -> Result<T, T> {
        // SAFETY: `at` gives an aligned address inside the mapping (host mapping).
        unsafe { T::compare_exchange(self.at(phys), old, new) }
    }

    /// Returns the page-table entry at `phys`. Acquire-loads of the entry see the table beneath it
    /// filled.
    #[inline(always)]
    pub fn entry(&self, phys: u64) -> &AtomicU64 {
        // SAFETY: `at` gives an aligned address inside the mapping, which outlives the borrow of
        // `self` (host mapping).
        unsafe { AtomicU64::from_ptr(self.at(phys)) }
    }

    /// Sets `len` bytes from `phys` to `byte`.
    pub fn fill(&self, phys: u64, len: u64, byte: u8) {
        let span = self.span(phys, len);
        let wide = u64::from_le_bytes([byte; 8]);
        for_each_word(phys, len, |at| span.store::<u64>(at, wide), |at| span.store::<u8>(at, byte));
    }

    /// Copies the bytes from `phys` on to `to`.
    pub fn read(&self, phys: u64, to: &mut [u8]) {
        let span = self.span(phys, to.len() as u64);
        let cells = Cell::from_mut(to).as_slice_of_cells();
        for_each_word(
            phys,
            cells.len() as u64,
            |at| {
                let bytes = span.load::<u64>(at).to_le_bytes();
                for (cell, byte) in cells[(at - phys) as usize..][..8].iter().zip(bytes) {
                    cell.set(byte);
                }
            },
            |at| cells[(at - phys) as usize].set(span.load(at)),
        );
    }

    /// Copies `from` to the bytes from `phys` on.
    pub fn write(&self, phys: u64, from: &[u8]) {
        let span = self.span(phys, from.len() as u64);
        for_each_word(
            phys,
            from.len() as u64,
            |at| {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(&from[(at - phys) as usize..][..8]);
                span.store(at, u64::from_le_bytes(bytes));
            },
            |at| span.store(at, from[(at - phys) as usize]),
        );
    }

    /// Copies `len` bytes from `from` to `to`, lowest address first.
    pub fn copy(&self, to: u64, from: u64, len: u64) {
        let (source, target) = (self.span(from, len), self.span(to, len));
        let byte = |at| target.store::<u8>(at, source.load(at - to + from));
        // Word by word does the same as byte by byte, unless a word would overlap its copy.
        if (to ^ from).is_multiple_of(8) && to.abs_diff(from) >= 8 {
            let word = |at| target.store::<u64>(at, source.load(at - to + from));
            for_each_word(to, len, word, byte);
        } else {
            (to..to + len).for_each(byte);
        }
    }

    /// Returns a range that lies in memory, checked once for all its words.
    fn span(&self, phys: u64, len: u64) -> Span<'_> {
        let end = phys.checked_add(len).filter(|&end| end <= self.bytes);
        let end = end.unwrap_or_else(|| panic!("bad physical range {phys:#x} + {len:#x}"));
        Span { memory: self, phys, end }
    }
}

/// A range of physical addresses.
///
/// *Invariant (inside):* it lies inside the memory.
#[derive(Clone, Copy)]
struct Span<'m> {
    memory: &'m Memory,
    phys: u64,
    end: u64,
}

impl Span<'_> {
    /// The host's address of the word at `at`, aligned and in the span.
    #[inline(always)]
    fn at<T: Word>(self, at: u64) -> *mut T {
        debug_assert!(at.is_multiple_of(T::SIZE) && self.phys <= at && at + T::SIZE <= self.end);
        self.memory.base.wrapping_add(at as usize).cast()
    }

    #[inline(always)]
    fn load<T: Word>(self, at: u64) -> T {
        // SAFETY: callers give aligned addresses of the span, which lies in the mapping (inside).
        unsafe { T::load(self.at(at)) }
    }

    #[inline(always)]
    fn store<T: Word>(self, at: u64, value: T) {
        // SAFETY: callers give aligned addresses of the span, which lies in the mapping (inside).
        unsafe { T::store(self.at(at), value) }
    }
}

/// Calls `wide` for each aligned 8-byte word of `start..start + len` and `narrow` for each byte
/// outside those, in order.
#[inline(always)]
fn for_each_word(start: u64, len: u64, mut wide: impl FnMut(u64), mut narrow: impl FnMut(u64)) {
    let end = start + len;
    let body = start.next_multiple_of(8).min(end);
    let tail = (end & !7).max(body);
    (start..body).for_each(&mut narrow);
    let mut at = body;
    while at < tail {
        wide(at);
        at += 8;
    }
    (tail..end).for_each(&mut narrow);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn nodes_share_all_frames_except_the_first() {
        let memory = Memory::new(1003 * PAGE_SIZE + 5, 4).unwrap();
        let mut next = 1;
        for (node, region) in memory.regions().iter().enumerate() {
            assert_eq!(usize::from(region.node), node);
            assert_eq!(region.first.0, next);
            next += region.frames;
        }
        assert_eq!(next, 1003);
        assert_eq!(memory.frames(), 1003);
    }

    #[test]
    fn a_slow_node_follows_the_other_nodes() {
        let memory = Memory::tiered(100 * PAGE_SIZE, 2, 400 * PAGE_SIZE).unwrap();
        let regions: Vec<_> =
            memory.regions().iter().map(|it| (it.node, it.first.0, it.frames)).collect();
        assert_eq!(regions, [(0, 1, 49), (1, 50, 50), (2, 100, 400)]);
        assert_eq!(memory.frames(), 500);
        let error = Memory::tiered(1 << 20, MAX_NODES, 1 << 20).unwrap_err();
        assert_eq!(Errno::from(error), Errno::EINVAL);
    }

    #[test]
    fn bad_shapes_are_refused() {
        for (bytes, nodes) in
            [(0, 1), (PAGE_SIZE, 1), (1 << 30, 0), (1 << 30, MAX_NODES + 1), (1 << 46, 1)]
        {
            assert_eq!(Errno::from(Memory::new(bytes, nodes).unwrap_err()), Errno::EINVAL);
        }
    }

    #[test]
    fn frames_and_physical_addresses_are_the_same_memory() {
        let mut memory = Memory::new(1 << 20, 1).unwrap();
        memory.populate();
        memory.store::<u32>(5 * PAGE_SIZE + 8, 0xdead_beef);
        // SAFETY: frame 5 exists and has no other user.
        let seen = unsafe { memory.frame_bytes(FrameNumber(5)).add(8).cast::<u32>().read() };
        assert_eq!(seen, 0xdead_beef);
        assert_eq!(memory.compare_exchange::<u32>(5 * PAGE_SIZE + 8, 1, 2), Err(0xdead_beef));
        assert_eq!(memory.fetch_add::<u32>(5 * PAGE_SIZE + 8, 1), 0xdead_beef);
        assert_eq!(memory.load::<u8>(5 * PAGE_SIZE + 8), 0xf0);
    }

    #[test]
    #[should_panic = "bad physical address"]
    fn accesses_beyond_memory_panic() {
        Memory::new(1 << 20, 1).unwrap().load::<u64>((1 << 20) - 4);
    }

    proptest! {
        #[test]
        fn bulk_moves_agree_with_byte_slices(
            ops in proptest::collection::vec((0u8..4, 0u64..200, 0u64..200, 0u64..60, any::<u8>()), 1..40)
        ) {
            let memory = Memory::new(1 << 16, 1).unwrap();
            let mut model = vec![0u8; 300];
            let base = PAGE_SIZE + 1;
            for (op, to, from, len, byte) in ops {
                let (t, f, l) = (to as usize, from as usize, len as usize);
                match op {
                    0 => {
                        memory.fill(base + to, len, byte);
                        model[t..t + l].fill(byte);
                    }
                    1 => {
                        memory.copy(base + to, base + from, len);
                        for i in 0..l {
                            model[t + i] = model[f + i];
                        }
                    }
                    2 => {
                        let bytes: Vec<u8> = (0..len as u8).map(|i| i ^ byte).collect();
                        memory.write(base + to, &bytes);
                        model[t..t + l].copy_from_slice(&bytes);
                    }
                    _ => {
                        let mut bytes = vec![0; l];
                        memory.read(base + to, &mut bytes);
                        prop_assert_eq!(&bytes[..], &model[t..t + l]);
                    }
                }
            }
            let mut all = vec![0; model.len()];
            memory.read(base, &mut all);
            prop_assert_eq!(all, model);
        }
    }
}
