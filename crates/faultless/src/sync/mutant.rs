//! Mutation points: protocol steps that a test removes to prove that a check detects the loss.
//!
//! A model that cannot fail proves nothing. So a build that checks protocols can remove each step
//! that a protocol requires, one at a time (`--cfg loom`, `--cfg shuttle`): `with` runs a check
//! on the real code without this step, and the check must fail. In all other builds [`lost`] is the
//! constant `false`, and the compiler removes the code.

/// A protocol step. The comments describe the step, and the failure without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(clippy::exhaustive_enums, reason = "checks go over all of them")]
pub enum Mutant {
    /// The writer's fence between the odd sequences and its reads of the entries. Otherwise a fault
    /// for which the writer did not wait may still see the old sequence.
    WriterFence = 1,
    /// The fault's barrier between the swap of the entry and the second read of the sequence.
    FaultFence,
    /// The fault's second read of the sequence. Otherwise the fault installs an outdated page.
    SecondLook,
    /// The writer's wait for a held entry. Otherwise the writer overwrites the entry, and the fault
    /// then overwrites the writer's value.
    SettleWaits,
    /// The second read of all pages by a fault that maps a folio, after taking the entry. Otherwise
    /// a page that was cut off stays mapped.
    LeafLooksAgain,
    /// The record of a page that could not be read. Otherwise a fault on a later page reads both
    /// pages again, indefinitely.
    FailedIsNoted,
    /// The search of a collapse for private copies after stopping the VMA. Otherwise stores to a
    /// copy are lost.
    CollapseLooksAgain,
    /// The retry without a window if the window could not take the fault's own page. Otherwise the
    /// fault repeatedly reads permissions that `mprotect` has not reached yet, and never reaches if
    /// `mprotect` waits for a CPU that waits for the faulting CPU.
    RetriesAlone,
    /// mincore's wait until no CPU holds an entry. Otherwise a page is reported missing while it is
    /// being copied.
    LookSettles,
    /// The wait for the flush of an unmapped stack before a fault below it reports an error.
    /// Otherwise the program still uses the stack afterwards.
    StackIsFlushed,
    /// Keeping the bits that hardware set in a pinned entry. Otherwise a dirty bit is lost.
    KeepGained,
    /// A section's mark. Otherwise the grace period does not wait for the reader.
    SectionMark,
    /// The fence at the begin of a section. Otherwise the freeing CPU does not see the mark; and
    /// the revocation of an object's pages does not see the entry of a fault that still sees such a
    /// page.
    SectionFence,
    /// The read of all marks before the epoch advances. Otherwise the epoch advances while an old
    /// section is open.
    LookAtMarks,
    /// The second epoch of a grace period. Otherwise a grace period that began just before an
    /// advance ends too early.
    SecondEpoch,
    /// The fence between unlinking an object and reading the epoch of its retirement. Otherwise the
    /// epoch read is too old.
    RetireFence,
    /// The fence between reading the epoch and reading the marks. Otherwise a section opened in
    /// between is not seen.
    AdvanceFence,
    /// A writer checks whether its shard of the tree has ended. What it publishes in a shard that has ended is lost.
    ShardEnds,
    /// A CPU that makes an owned space shared waits until the owner releases it. The CPU reads what is being changed in place.
    JoinAwaitsOwner,
    /// A CPU that tries to become the owner looks whether others are in sections. It changes in place what they read.
    TryLooks,
    /// A CPU that uses a space reads the owner word. The CPU reads what is being changed in place.
    UserLooksAtOwner,
    /// A CPU that begins to run a space reads the owner word. Its faults read what is being changed in place.
    RunnerLooksAtOwner,
    /// A CPU that tries to become the owner of a space looks a second time whether it is alone there. A CPU that has begun to run
    /// the space reads what is being changed in place.
    OwnerLooksAgain,
    /// A step with a claim looks whether its CPU owns the space before it parts the tree. The owner's next change in place takes the directory
    /// of the shards for entries.
    OwnerPartsNothing,
    /// Claims that conflict wait for each other.
    RangeConflict,
    /// The release of the last claim that stops a parked one wakes it. It sleeps for ever.
    ReleaseWakes,
    /// The full fence between the look at other claims and the own one before it. Two that conflict do not find each other.
    ClaimFence,
    /// A CPU publishes a home that covers its claim. Another CPU that wants the same pages does not look at the claim.
    HomeCovers,
    /// The lock counts that a home covers more. A CPU whose claims come near does not look at them.
    HomeCounts,
    /// A claim that was parked tries again, as if it had just arrived. One that passed it meanwhile has its pages, too.
    ParkedTriesAgain,
    /// Keeping a wake-up for a CPU that has not parked yet. Otherwise the wake-up is lost.
    WakeLeavesPermit,
    /// The wait of a reader-writer lock's writer for readers.
    WriterWaitsForReaders,
    /// The reader count of a writer that becomes a reader. Otherwise another writer enters at the
    /// same time.
    DowngradeStays,
    /// The exclusion of a spin lock.
    SpinExcludes,
    /// The flush before references are dropped. Otherwise the frame gets the next owner while still
    /// mapped.
    FlushFirst,
    /// Dropping the translations before acknowledging a request. Otherwise the CPU continues to use
    /// them after the acknowledgement.
    DropTranslations,
    /// The sender's wait for acknowledgements.
    AwaitAnswers,
    /// The fence between changing the tables and reading the set of CPUs that run the space.
    /// Otherwise a CPU that joins in between walks the old tables and gets no request.
    JoinFence,
    /// The fence of a CPU that joins, between entering the set and the first walk: the counterpart.
    EnterSetFence,
    /// Dropping everything if the queue of requests overflows. Otherwise requests that did not fit
    /// are acknowledged but not served.
    OverflowDropsAll,
    /// Serving requests in wait loops. Otherwise two CPUs that flush each other wait indefinitely.
    WaiterAnswers,
    /// Dropping the translations of the old space on a switch to another space.
    LeaveFlush,
    /// The flush of the old page by a copy while the entry is busy. Otherwise a CPU reads the old
    /// page after a store to the new page.
    CopyFlush,
    /// The flush of the zero page at the first store to a page that maps it. Otherwise a CPU
    /// continues to read zeros.
    ZeroPageFlush,
    /// The exclusion of VMAs under change by another writer from a step. Otherwise the step merges
    /// with such a VMA, and the other writer then enables a VMA that is no longer in the tree.
    BusyIsLeft,
    /// Keeping a writer's new VMA stopped until its entries agree with the VMA. Otherwise faults
    /// use the VMA too early.
    ChangesStopped,
    /// The deferred merge of a new VMA with a neighbour under change. Otherwise the two stay
    /// separate.
    MergesLater,
    /// The early adoption of the neighbour's anon_vma by a VMA that will merge later. Otherwise the
    /// neighbour may be replaced first, and its anon_vma is lost.
    RootAdopted,
    /// The seal of anon_vmas while a step decides about later merges. Otherwise a fault makes an
    /// anon_vma meanwhile, and the two VMAs get different ones.
    SealsGroup,
    /// The separation of VMAs that were to merge later but differ now. Otherwise the VMAs merge
    /// when they become equal again, unlike in any sequential order.
    PartsNeighbours,
    /// Merging the remainders of a VMA with a deferred merge before a cut. Otherwise the remainder
    /// never merges if the cut removed the part next to a VMA under change.
    CutsUnmerged,
    /// The error of a pin of an unmapped page, without serving a fault. Otherwise the fault adds a
    /// page to a mapping made in the meantime.
    PinFindsNothing,
    /// The second read of the object's length by a CPU that begins to read a page, after taking the
    /// entry. Otherwise a truncated object keeps the page.
    ReadLooksAgain,
    /// The check by a CPU that begins to read a page, after taking the entry, whether the page is
    /// being cut off the store. Otherwise a store to a page that is already a hole is lost.
    ReadLooksForCut,
    /// Dropping the reads in progress of pages that are cut off a store. Otherwise the old contents
    /// return when the file grows.
    CutDropsReads,
    /// Taking a share of a read's state while holding the page's entry. Otherwise the state is
    /// freed before the waiting fault reads it.
    JoinHoldsEntry,
    /// Reporting no error for a page that no longer belongs to the failed read. Otherwise a program
    /// that waits for a page overwritten by the kernel is killed.
    OverwrittenIsNoError,
    /// Freeing the frame of a read whose page has left the object meanwhile. Otherwise the frame is
    /// leaked.
    EndFreesFrame,
    /// Dropping the last reference to a page in one step. Otherwise a frame is freed although
    /// another CPU has just taken a reference.
    DropsSole,
    /// Installing a new root above an object's tables only if the old root is still installed.
    /// Otherwise the pages below the other root are lost.
    GrowsOnce,
    /// The exclusion of write-back on other CPUs. Otherwise older bytes are written after newer
    /// bytes.
    TurnExcludes,
    /// Marking a page of a file dirty while the fault that makes it writable holds the entry.
    /// Otherwise the store is never written back.
    FaultMarksDirty,
    /// The write protection of a page before it is written back. Otherwise a store through an old
    /// entry is never written back.
    WriteBackProtects,
    /// Keeping pages dirty that could not be written back. Otherwise their stores are lost when the
    /// pages are dropped.
    FailedStaysDirty,
    /// The exclusion of dirty pages from dropping. Otherwise their stores are lost.
    DropsDirty,
    /// Counting VMAs that will merge as one. Otherwise a call is refused that no sequential order
    /// refuses.
    CountsMerged,
    /// Keeping the anon_vma of the remainder of a moved VMA if the remainder will be part of
    /// another VMA.
    RenewsParts,
    /// The wait for the flush of an unmap before an operation returns an error for the resulting
    /// hole. Otherwise a CPU gets the error, and then still uses the page.
    HoleIsFlushed,
    /// Holding a discard's entries until the flush. Otherwise one CPU uses a new page while another
    /// uses the old page.
    DiscardHolds,
    /// The second read of the object's length by a fault that copies a page, after taking the
    /// entry. Otherwise the fault installs a copy of a page cut off during the copy, after the
    /// truncation has checked the entry.
    CopyLooksAgain,
    /// The flush of removed permissions.
    ProtectFlush,
    /// The flush of entries made read-only by a fork.
    ForkFlush,
    /// The exclusion of dirty pages from lazy reclaim. Otherwise reclaim takes pages with new
    /// stores, and loses the stores.
    ReclaimLooksAtDirty,
    /// The flush of reclaim before it drops references. Otherwise the frame gets the next owner
    /// while still mapped.
    ReclaimFlush,
    /// The wait at the end of a space for reclaim in the space. Otherwise tables are freed while
    /// reclaim reads them.
    ExitAwaitsReclaim,
    /// The wait at the end of a space for walks of the reverse map.
    ExitAwaitsWalks,
    /// The exclusion of closed spaces from walks. Otherwise a walk reads freed tables.
    WalkLooksAtClosed,
    /// The fence between the begin of a walk and its check whether a space is closed. Otherwise the
    /// end of the space does not see the walk.
    LookFence,
    /// The fence between closing a space and reading which CPUs walk. Otherwise a walk in progress
    /// finds the space open.
    CloseFence,
    /// The flush of entries marked as clean. Otherwise a store through an old translation leaves
    /// the entry clean, and reclaim loses the store.
    FreeFlush,
    /// The grace period of an unlinked table. Otherwise a walk in this table installs an entry in a
    /// reused frame.
    TableGrace,
    /// The second check of a step whether the unmapped VMA is the last over its tables. Otherwise
    /// each of two such steps assumes that the second VMA stays, and a table remains without a VMA.
    UnmapLooksAgain,
    /// The validation of a table's VMA before the table is published.
    TableValidated,
    /// The fence of a truncation, before the object's pages are removed.
    TruncateFence,
    /// The second read of the object's length by a fault that adds a page.
    ObjectLooksAgain,
    /// The second read of an object's entry after taking a reference to its page.
    ReferLooksAgain,
    /// The second read of the page's entry by an access from outside, after taking the reference.
    /// Otherwise the access reads a frame with another owner.
    AccessLooksAgain,
    /// The second read of a page's entry after taking a pin. Otherwise a device uses a reused
    /// frame.
    PinLooksAgain,
    /// The check of the pin count by a CPU that copies a page, after taking the entry. Otherwise
    /// the program continues with the copy, and the device with the page.
    CopyLooksAtPins,
    /// The copy of pinned pages by a fork. Otherwise the next store moves the program away from the
    /// device's page.
    ForkLooksAtPins,
    /// The order of a fork: pinned pages are copied after the flush of the old permissions.
    /// Otherwise the child may get only the second of two stores.
    ForkCopiesAfterFlush,
    /// The check of the pin count after marking a page as clean. Otherwise the page is reclaimed
    /// together with the device's stores.
    FreeLooksAtPins,
    /// The taking of each entry of a batch before the commit. Otherwise the batch overwrites an
    /// entry made by another CPU.
    BatchTakesEach,
    /// The validation of the ticket after a batch has its entries. Otherwise the batch installs
    /// outdated pages.
    BatchAsks,
    /// Freeing the frames of an aborted batch. Otherwise the frames are leaked.
    BatchGivesBack,
    /// The second read of an entry by a fork, after taking a reference to its frame. Otherwise the
    /// frame may belong to another page.
    ForkLooksAgain,
    /// The copy of the notes of moved pages under a fork's claim. Otherwise the reverse map of the
    /// child lacks a move.
    ForkCopiesMoves,
    /// The new index of a page moved by `mremap`. Otherwise the reverse map does not find the page.
    MoveKeepsIndex,
    /// The comparison of a migration's taken entries with the frame's references. Otherwise stores
    /// of the kernel to the old frame are lost.
    MigrateCounts,
    /// The flush of a migration before its copy. Otherwise a program's stores through an old
    /// translation are lost.
    MigrateFlush,
    /// The check of compaction, before freeing a block as a whole, that all frames of the block
    /// were taken. Otherwise compaction frees the frames of another owner.
    CompactLooksAgain,
    /// The wait of a CPU without memory for the turn to write to the swap area. Otherwise the CPU
    /// reports out-of-memory while another CPU has the turn.
    ReclaimAwaitsTurn,
    /// Freeing isolated frames in every case. Otherwise the frames are leaked.
    IsolatedGoBack,
    /// The fence between a deferral's stamp and the read of the CPUs that may hold translations.
    /// Otherwise a joining CPU is missed.
    DeferFence,
    /// The wait of a settlement for the CPUs that may hold translations. Otherwise these CPUs use
    /// reused frames.
    SettleAwaits,
    /// Limiting payment without a settlement to the flushes of all CPUs that may hold translations.
    /// Otherwise these CPUs use reused frames.
    CollectLooks,
    /// Freeing only frames whose stamps are paid.
    ReleaseLooksAtStamps,
    /// The deferred flush before a change of a page's contents. Otherwise other CPUs see the old
    /// contents.
    WriteSettles,
    /// The second check for a deferred flush by a fault that allows stores, after taking the entry.
    /// Otherwise the page may have moved away and back, and another CPU sees it in the intermediate
    /// frame.
    StoreLooksAgain,
    /// Deferring flushes only if no mapping allows stores. Otherwise a CPU stores to the old frame.
    DeferLooksAtStores,
    /// Deferring flushes only if no operation has claimed the page. Otherwise a CPU stores through
    /// a translation whose flush is in progress.
    DeferLooksAtClaims,
    /// Taking a page without a flush only if all CPUs have dropped their translations since its
    /// accessed bit was cleared. Otherwise a CPU still has a translation.
    ColdLooksAtStamps,
    /// Clearing the aged bit when `MADV_FREE` clears the accessed bit. Otherwise the page moves
    /// without a flush while a CPU stores to it.
    FreeUnages,
    /// Copying the stamp of the last clear of the accessed bit when a page moves. Otherwise a CPU
    /// with a translation to the old frame keeps it after the page has left.
    MigrateKeepsStamp,
    /// The deferred flush of evicted pages before removing permissions or emptying entries.
    /// Otherwise a CPU sees an unmapped page.
    BatchSettlesEvicted,
    /// The deferred flush of evicted pages by a fault that copies an object's page to an empty
    /// entry. Otherwise another CPU sees the object's page after a program has stored to the copy.
    CopySettlesEvicted,
    /// The deferred flush by the kernel's overwrite of a missing page. Otherwise programs see the
    /// old page.
    OverwriteSettles,
    /// The deferred flush when pages are cut off an object. Otherwise programs see the old
    /// contents.
    CutSettles,
    /// The flush of an eviction. Otherwise a CPU stores to a page that was written and freed.
    EvictFlush,
    /// The exclusion of locked pages from eviction.
    EvictLooksAtLocks,
    /// The exclusion of dirty pages from eviction without a write. Otherwise their stores are lost.
    EvictLooksAtDirty,
    /// The wait of write-back for entries held by other CPUs. Otherwise earlier stores are missing
    /// in the store after the return.
    WriteBackAwaits,
    /// The flush of the whole space for a taken page that is claimed by an operation. Otherwise a
    /// CPU stores through a translation of an entry that was moved or hidden, and whose flush is in
    /// progress.
    FlushLooksAtClaims,
    /// Storing the count of a frame with several initial references once. Otherwise a reference
    /// taken by another CPU after the first store is lost.
    CountIsStoredOnce,
    /// The flush of pages before they leave their programs for the swap area. Otherwise stores
    /// through an old translation are lost.
    SwapFlush,
    /// The second check by a fault, after taking the program's entry, that the slot still has the
    /// page found. Otherwise the fault maps the former page of the slot.
    SwapInLooksAgain,
    /// The check of the slot count before a page becomes a program's own. Otherwise two programs
    /// store to one page.
    AdoptLooksAtCount,
    /// The dirty bit of a page that is swapped in. Otherwise reclaim treats the page as lazily
    /// freed.
    SwappedIsDirty,
    /// Counting the child's swapped entries in a fork. Otherwise the slot is reused while the
    /// child's entry names it.
    ForkCountsSlots,
    /// The additional reference to a page of a fork's child until the page is filled. Otherwise the
    /// page leaves memory before.
    FilledIsReferredTo,
    /// The release store of the count of a reused frame. Otherwise a CPU that takes a reference by
    /// an old frame number finds the old entry value.
    FreshCountReleases,
}

/// Returns whether the step of `mutant` is removed.
#[inline(always)]
pub fn lost(mutant: Mutant) -> bool {
    #[cfg(any(loom, shuttle))]
    return chosen::in_force() == Some(mutant);
    #[cfg(not(any(loom, shuttle)))]
    {
        let _ = mutant;
        false
    }
}

#[cfg(any(loom, shuttle))]
pub use chosen::{in_force, with};

#[cfg(any(loom, shuttle))]
mod chosen {
    use super::Mutant;
    use core::cell::Cell;

    std::thread_local! {
        /// Both model checkers run all threads of a model on the thread that started the check.
        static LOST: Cell<Option<Mutant>> = const { Cell::new(None) };
    }

    /// The mutant of the running check, if the check has one.
    pub fn in_force() -> Option<Mutant> {
        LOST.get()
    }

    /// Restores the step, also after the expected failure of the check.
    struct Restore;

    impl Drop for Restore {
        fn drop(&mut self) {
            LOST.set(None);
        }
    }

    /// Runs `check`, a model, on code without the step of `mutant`.
    pub fn with<R>(mutant: Mutant, check: impl FnOnce() -> R) -> R {
        LOST.set(Some(mutant));
        let _restore = Restore;
        check()
    }
}
