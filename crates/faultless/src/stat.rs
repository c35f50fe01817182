//! Counters and trace points, under their published names.
//!
//! Each CPU counts on its own cache lines; a sum reads the lines of all CPUs. A trace point without
//! a watcher costs one predictable branch.

use crate::machine::SpaceId;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sync::order::TraceWatcher;
use crate::sync::spin::SpinLock;
use crate::sync::wait::{Spin, Wait};
use alloc::sync::Arc;
use core::fmt;

macro_rules! counters {
    ($($(#[doc = $doc:literal])* $variant:ident = $name:literal,)*) => {
        /// The counted events.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(usize)]
        #[non_exhaustive]
        pub enum Counter { $(
            $(#[doc = $doc])*
            #[doc = concat!(" Published as `", $name, "`.")]
            $variant,
        )* }

        impl Counter {
            /// Every counter.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Returns the published name.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Returns the meaning of the counter, in one line.
            pub const fn meaning(self) -> &'static str {
                match self { $(Self::$variant => concat!($($doc),*).trim_ascii(),)* }
            }
        }
    };
}

counters! {
    /// Faults handled, on any path. A fault that waits for its page to be read counts when it is
    /// repeated.
    Faults = "faults",
    /// Faults served speculatively.
    Spf = "spf",
    /// Speculations aborted: the VMA was missing, or being changed at the page.
    SpfVmaChanged = "spf_vma_changed",
    /// VMA lookups repeated without a lock, because another part of the VMA was changed meanwhile.
    SpfVmaReplaced = "spf_vma_replaced",
    /// Speculations aborted: the VMA has no anon_vma yet (`anon_vma_check=early` only).
    SpfVmaNoanon = "spf_vma_noanon",
    /// Speculations aborted: the page lies beyond the end of its object, must be read from its
    /// store, or must become part of a folio.
    SpfVmaNotsup = "spf_vma_notsup",
    /// Speculations aborted: the VMA seemed to forbid the access.
    SpfVmaAccess = "spf_vma_access",
    /// Speculations aborted: the tables above the entry changed.
    SpfPmdChanged = "spf_pmd_changed",
    /// Speculations aborted: no frame was available.
    SpfNomem = "spf_nomem",
    /// Entries that could not be taken because another CPU had changed them.
    TrylockFailed = "spf_trylock_failed",
    /// Speculations aborted in spaces run by only one CPU.
    AbortSingleThreaded = "spf_abort_single_threaded",
    /// Faults served under a VMA's lock.
    VmaLockSuccess = "vma_lock_success",
    /// Attempts under a VMA's lock aborted before the lock was taken.
    VmaLockAbort = "vma_lock_abort",
    /// Attempts under a VMA's lock aborted after it was taken.
    VmaLockRetry = "vma_lock_retry",
    /// Attempts under a VMA's lock that found the VMA detached.
    VmaLockMiss = "vma_lock_miss",
    /// Acquisitions of the space's lock for reading.
    MmapLockRead = "mmap_lock_read",
    /// Acquisitions of the space's lock for writing.
    MmapLockWrite = "mmap_lock_write",
    /// Acquisitions of the range lock by a fault, for one page.
    RangeLockFault = "range_lock_fault",
    /// Acquisitions of the range lock by a call that changes entries but no VMA.
    RangeLockShared = "range_lock_shared",
    /// Acquisitions of the range lock by a call that changes VMAs.
    RangeLockWrite = "range_lock_write",
    /// Calls that changed VMAs without a claim, because the CPU was the only user of the space.
    OwnerWrite = "owner_write",
    /// Read faults served under a lock: the space's, or a range lock on one page.
    ReadFaultLocked = "read_fault_locked",
    /// Read faults on untouched memory that mapped the zero page.
    ZeroPage = "fault_zero_page",
    /// New pages for writes to untouched memory.
    AnonPage = "fault_anon_page",
    /// Faults that mapped a page of a memory object itself.
    SharedPage = "fault_shared_page",
    /// Pages of memory objects mapped around a page that was read.
    AroundPage = "fault_around_page",
    /// Faults that waited for a read of a page from the store of an object.
    MajorFault = "pgmajfault",
    /// Pages of objects read from their stores.
    PageRead = "pages_read",
    /// Reads of stores, each of a run of pages.
    StoreRead = "store_read",
    /// Pages of objects written back to their stores.
    PageWritten = "pages_written",
    /// Writes of stores, each of a run of pages.
    StoreWrite = "store_write",
    /// Objects that ended with pages which their stores could not write.
    WriteBackLost = "write_back_lost",
    /// Huge leaves of files mapped, less the leaves unmapped or split: each maps 2 MiB.
    FilePmdMapped = "FilePmdMapped",
    /// Huge leaves of files mapped.
    ThpFileMapped = "thp_file_mapped",
    /// Faults that mapped base pages because there was no folio.
    ThpFileFallback = "thp_file_fallback",
    /// Folios made in the page cache, by one read or by copying the existing base pages.
    ThpFileAlloc = "thp_file_alloc",
    /// Huge leaves split into leaves of base pages.
    ThpSplitPmd = "thp_split_pmd",
    /// Base pages of a mapping replaced by a huge leaf.
    ThpCollapsed = "thp_collapse_file",
    /// Faults that mapped device memory.
    DevicePage = "fault_device_page",
    /// Faults that prefaulted at least one page.
    PrefaultHit = "prefault_hit",
    /// Faults for which no page was predicted.
    PrefaultMiss = "prefault_miss",
    /// Prefaulted pages.
    PrefaultPage = "prefault_page",
    /// Unused prefaulted pages: unmapped without an access.
    PrefaultWasted = "prefault_wasted",
    /// Prefaulted pages, or pages of a file read ahead, which a later check of a stream found used.
    PrefaultUsed = "prefault_used",
    /// Prefaulted pages, or pages of a file read ahead, which a later check of a stream found
    /// unused.
    PrefaultUnused = "prefault_unused",
    /// Pages copied on write.
    CowCopy = "fault_cow_copy",
    /// Pages made writable again because their last owner wrote.
    CowReuse = "fault_cow_reuse",
    /// Faults whose entry already allowed the access.
    Spurious = "fault_spurious",
    /// Stacks grown.
    StackGrowth = "fault_stack_growth",
    /// Faults that ended with SIGSEGV.
    Segv = "fault_sigsegv",
    /// Faults that ended with SIGBUS.
    Bus = "fault_sigbus",
    /// Faults for which no frame was left.
    Oom = "fault_oom",
    /// Pages zeroed during their allocation.
    ZeroedInFault = "zeroed_in_fault",
    /// Frames pre-zeroed by idle CPUs.
    ZeroedIdle = "zeroed_idle",
    /// Frames pre-zeroed by calls that had freed as many.
    ZeroedOnFree = "zeroed_on_free",
    /// Zeroed pages allocated from a pool.
    ZeroedPoolHit = "zeroed_pool_hit",
    /// Zeroed pages requested from an empty pool.
    ZeroedPoolMiss = "zeroed_pool_miss",
    /// Pages marked as lazily freed: `MADV_FREE`.
    LazyFree = "pglazyfree",
    /// Lazily freed pages that were reclaimed because frames had run out.
    LazilyFreed = "pglazyfreed",
    /// Tables published by faults.
    TablePublished = "table_published",
    /// Tables unlinked.
    TablePruned = "table_pruned",
    /// Anon_vmas given to VMAs by faults.
    AnonVmaPrepared = "anon_vma_prepared",
    /// Batches of pages that left read-only mappings, and whose flush was deferred.
    FlushDeferred = "flush_deferred",
    /// Pages taken from programs without a flush: no CPU had used the page since all CPUs had
    /// dropped their translations.
    FlushNeedless = "flush_needless",
    /// Times that all deferred flushes were done.
    DeferredSettled = "deferred_settled",
    /// Times that a CPU dropped all of its translations voluntarily because many frames waited for
    /// it.
    DeferredOwn = "deferred_own",
    /// Times that a CPU dropped all of its translations to make accessed bits reliable.
    FlushAged = "flush_aged",
    /// Frames that were kept for a deferred flush.
    FrameOwed = "frame_owed",
    /// Pages that moved to another frame.
    MigrateSuccess = "pgmigrate_success",
    /// Pages that could not be moved.
    MigrateFail = "pgmigrate_fail",
    /// Frames that compaction scanned for pages to move.
    CompactMigrateScanned = "compact_migrate_scanned",
    /// Frames that compaction scanned for free targets.
    CompactFreeScanned = "compact_free_scanned",
    /// Pages that compaction isolated for a move.
    CompactIsolated = "compact_isolated",
    /// Requests for a 2 MiB block for which memory was compacted because no block was free.
    CompactStall = "compact_stall",
    /// Compactions for a request that made no block free.
    CompactFail = "compact_fail",
    /// Compactions for a request that made a block free.
    CompactSuccess = "compact_success",
    /// 2 MiB blocks that compaction made free.
    CompactBlock = "compact_block",
    /// Pages scanned by reclaim, demotion or promotion.
    PageScanned = "pgscan",
    /// Pages that reclaim freed.
    PageStolen = "pgsteal",
    /// Pages that reclaim wrote to their store before freeing them.
    PageLaundered = "pgsteal_written",
    /// Pages of files that were evicted, and read again.
    WorkingsetRefault = "workingset_refault_file",
    /// Refaulted pages of files that a memory larger by the longer used pages would have kept: they
    /// now stay longer.
    WorkingsetActivate = "workingset_activate_file",
    /// Pages that moved to slower memory.
    Demoted = "pgdemote",
    /// Pages that moved to faster memory.
    Promoted = "pgpromote_success",
    /// Private pages that were swapped out, and read again.
    WorkingsetRefaultAnon = "workingset_refault_anon",
    /// Refaulted private pages that a memory larger by the longer used pages would have kept: they
    /// now stay longer.
    WorkingsetActivateAnon = "workingset_activate_anon",
    /// Pages read from the swap area.
    SwapIn = "pswpin",
    /// Pages written to the swap area.
    SwapOut = "pswpout",
    /// Faults on pages that were swapped out.
    SwapPage = "fault_swap_page",
    /// Page tables read by walks of the reverse map.
    RmapLook = "rmap_look",
    /// Flushes requested by operations.
    TlbFlush = "tlb_flush",
    /// Interrupts sent to other CPUs for flushes.
    TlbShootdownSent = "tlb_shootdown_sent",
    /// Flush requests of other CPUs served.
    TlbShootdownReceived = "tlb_shootdown_received",
}

/// One CPU's counts. Only this CPU adds; any CPU may read.
#[derive(Debug)]
pub struct Counts([AtomicU64; Counter::ALL.len()]);

impl Default for Counts {
    fn default() -> Self {
        Self(core::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Counts {
    /// Adds to a counter of the calling CPU.
    #[inline(always)]
    pub fn add(&self, counter: Counter, n: u64) {
        let count = &self.0[counter as usize];
        count.store(count.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// Subtracts from a gauge of the calling CPU. One CPU may subtract what another CPU has added:
    /// only the sum over all CPUs is meaningful.
    pub fn take(&self, counter: Counter, n: u64) {
        let count = &self.0[counter as usize];
        count.store(count.load(Ordering::Relaxed).wrapping_sub(n), Ordering::Relaxed);
    }

    /// Returns the count so far.
    pub fn get(&self, counter: Counter) -> u64 {
        self.0[counter as usize].load(Ordering::Relaxed)
    }
}

/// The sums over all CPUs at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Totals([u64; Counter::ALL.len()]);

impl Default for Totals {
    fn default() -> Self {
        Self([0; Counter::ALL.len()])
    }
}

impl Totals {
    pub(crate) fn include(&mut self, counts: &Counts) {
        for (sum, &counter) in self.0.iter_mut().zip(Counter::ALL) {
            *sum = sum.wrapping_add(counts.get(counter));
        }
    }

    /// Returns the sum of one counter.
    pub const fn get(&self, counter: Counter) -> u64 {
        self.0[counter as usize]
    }

    /// Returns the difference to the earlier totals `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self(core::array::from_fn(|at| self.0[at].saturating_sub(before.0[at])))
    }

    /// Iterates over all counters with their sums.
    pub fn iter(&self) -> impl Iterator<Item = (Counter, u64)> + '_ {
        Counter::ALL.iter().map(|&counter| (counter, self.get(counter)))
    }

    /// Returns the number of aborted speculations, for all reasons.
    pub const fn aborts(&self) -> u64 {
        self.get(Counter::SpfVmaChanged)
            + self.get(Counter::SpfVmaNoanon)
            + self.get(Counter::SpfVmaNotsup)
            + self.get(Counter::SpfVmaAccess)
            + self.get(Counter::SpfPmdChanged)
            + self.get(Counter::SpfNomem)
    }
}

/// Formats the totals like `/proc/vmstat`: a name and a number on each line. Speculative faults
/// have the name used there.
impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (counter, count) in self.iter() {
            let name = match counter {
                Counter::Spf => "speculative_pgfault",
                _ => counter.name(),
            };
            writeln!(f, "{name} {count}")?;
        }
        Ok(())
    }
}

/// A trace point of the `pagefault` system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[non_exhaustive]
pub enum TracePoint {
    /// `pagefault:spf_vma_changed`
    VmaChanged = 0,
    /// `pagefault:spf_vma_noanon`
    VmaNoanon = 1,
    /// `pagefault:spf_vma_notsup`
    VmaNotsup = 2,
    /// `pagefault:spf_vma_access`
    VmaAccess = 3,
    /// `pagefault:spf_pmd_changed`
    PmdChanged = 4,
}

impl TracePoint {
    /// Every trace point.
    pub const ALL: [Self; 5] =
        [Self::VmaChanged, Self::VmaNoanon, Self::VmaNotsup, Self::VmaAccess, Self::PmdChanged];

    /// Returns the published name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::VmaChanged => "pagefault:spf_vma_changed",
            Self::VmaNoanon => "pagefault:spf_vma_noanon",
            Self::VmaNotsup => "pagefault:spf_vma_notsup",
            Self::VmaAccess => "pagefault:spf_vma_access",
            Self::PmdChanged => "pagefault:spf_pmd_changed",
        }
    }
}

/// The event passed to a watcher of trace points.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct TraceEvent {
    /// The trace point.
    pub point: TracePoint,
    /// The space of the fault.
    pub space: SpaceId,
    /// The faulting address.
    pub addr: u64,
}

/// A callback for trace points. Called from inside the fault: it must not call the subsystem.
pub type Watcher = Arc<dyn Fn(TraceEvent) + Send + Sync>;

/// The trace points of one subsystem.
#[derive(Default)]
pub struct Trace {
    watched: AtomicU32,
    watcher: SpinLock<Option<Watcher>, TraceWatcher>,
}

impl Trace {
    /// Calls `watcher` at each of `points` from now on, and replaces the previous watcher.
    pub fn watch(&self, points: &[TracePoint], watcher: Watcher) {
        *self.watcher.lock(&Spin) = Some(watcher);
        let mask = points.iter().fold(0, |mask, &point| mask | 1 << point as u32);
        self.watched.store(mask, Ordering::Release);
    }

    /// Removes the watcher.
    pub fn unwatch(&self) {
        self.watched.store(0, Ordering::Release);
        self.watcher.lock(&Spin).take();
    }

    #[inline(always)]
    pub(crate) fn hit(&self, wait: &impl Wait, point: TracePoint, space: SpaceId, addr: u64) {
        if self.watched.load(Ordering::Relaxed) & 1 << point as u32 != 0 {
            self.tell(wait, TraceEvent { point, space, addr });
        }
    }

    #[cold]
    fn tell(&self, wait: &impl Wait, event: TraceEvent) {
        let watcher = self.watcher.lock(wait).clone();
        if let Some(watcher) = watcher {
            watcher(event);
        }
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Trace(watched {:#b})", self.watched.load(Ordering::Relaxed))
    }
}
