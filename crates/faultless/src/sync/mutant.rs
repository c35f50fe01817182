//! Mutation points: protocol steps that a test removes to prove that a check detects the loss.
//!
//! A model that cannot fail proves nothing. Builds that check protocols (`--cfg loom`,
//! `--cfg shuttle`) can therefore remove each step on which a protocol rests, one at a time:
//! `with` runs a check on the real code without the step, and the check must fail. In every other
//! build [`lost`] is a constant `false`, and the compiler removes all mutation points.

/// A step on which a protocol rests. Each name describes the step. The comment describes the step,
/// then the failure if the step is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(clippy::exhaustive_enums, reason = "checks iterate over all mutants")]
pub enum Mutant {
    /// The writer's fence between the odd sequences and the entries. Otherwise, a fault for which
    /// the writer did not wait may still read the old sequence.
    WriterFence = 1,
    /// The fault's barrier between its swap of the entry and its second read of the sequence.
    FaultFence,
    /// The fault's second read of the sequence. Otherwise, the fault installs an outdated entry.
    SecondLook,
    /// The writer waits for a busy entry. Otherwise, the writer overwrites the busy entry, and the
    /// fault then overwrites the writer's entry.
    ReplaceWaits,
    /// A fault that maps a folio validates all pages of the folio while the fault holds the entry.
    /// Otherwise, a truncated page stays mapped.
    LeafLooksAgain,
    /// A page with a failed read is noted. Otherwise, a CPU that needs a later page reads both
    /// pages again, endlessly.
    FailedIsNoted,
    /// A collapse searches for private copies after the VMA is stopped. Otherwise, the bytes stored
    /// to such a copy are lost.
    CollapseLooksAgain,
    /// A fault whose prefault window cannot include its page is served without a window. Otherwise,
    /// the fault retries until mprotect reaches the permissions. If mprotect waits for a CPU that
    /// waits for the faulting CPU, the retries never end.
    RetriesAlone,
    /// mincore reads an entry after the entry is no longer busy. Otherwise, a page appears missing
    /// while the page is copied.
    QueryWaits,
    /// A fault below an unmapped stack returns its error after the unmapping is flushed. Otherwise,
    /// the program still uses the stack after the error.
    StackIsFlushed,
    /// Bits set by hardware in a pinned entry are kept. Otherwise, a dirty bit is lost.
    KeepGained,
    /// A CPU uses the VMA of its last fault only if the VMA's sequence is the same. Otherwise, the
    /// CPU uses another VMA in the same memory, or reads the VMA during a change.
    HintLooks,
    /// The end of a VMA changes its sequence. Otherwise, the CPU that removed the VMA still uses
    /// it.
    EndCounts,
    /// A section's mark. Otherwise, the grace period does not wait for the reader.
    SectionMark,
    /// The fence at the beginning of a section. Otherwise, the freeing CPU does not see the mark,
    /// and a revocation of object pages does not see the entry of a fault that still finds such a
    /// page.
    SectionFence,
    /// The check of all marks before the epoch advances. Otherwise, the epoch advances while an old
    /// section is open.
    LookAtMarks,
    /// The second epoch of a grace period. Otherwise, a section which began just before the first
    /// epoch is ignored.
    SecondEpoch,
    /// The fence between unlinking an object and reading the epoch of its retirement. Otherwise,
    /// the object is retired in too old an epoch.
    RetireFence,
    /// The fence between reading the epoch and reading the marks. Otherwise, a section opened
    /// between the two reads is missed.
    AdvanceFence,
    /// A writer checks whether its shard of the tree has ended. Otherwise, an update published in
    /// an ended shard is lost.
    ShardEnds,
    /// A CPU that makes an owned space shared waits for the owner's release. Otherwise, the CPU
    /// reads memory during a change in place.
    JoinAwaitsOwner,
    /// A CPU that tries to become the owner checks for CPUs in sections. Otherwise, the owner
    /// changes memory in place while those CPUs read.
    TryLooks,
    /// A CPU that uses a space reads the owner word. Otherwise, the CPU reads memory during a
    /// change in place.
    UserLooksAtOwner,
    /// A CPU that begins to run a space reads the owner word. Otherwise, the faults of this CPU
    /// read memory during a change in place.
    RunnerLooksAtOwner,
    /// A CPU that tries to become the owner of a space checks a second time for other CPUs in the
    /// space. Otherwise, a CPU that has begun to run the space reads memory during a change in
    /// place.
    OwnerLooksAgain,
    /// A step with a claim checks whether its CPU owns the space before the step splits the tree
    /// into shards. Otherwise, the owner's next change in place reads the shard directory as
    /// entries.
    OwnerPartsNothing,
    /// Conflicting claims wait for each other.
    RangeConflict,
    /// The release of the last claim that blocks a parked claim wakes the parked claim. Otherwise,
    /// the parked claim sleeps forever.
    ReleaseWakes,
    /// The full fence between publishing a claim and reading other claims. Otherwise, two
    /// conflicting claims miss each other.
    ClaimFence,
    /// A CPU publishes a home that covers its claim. Otherwise, another CPU with a claim for the
    /// same pages does not check this claim.
    HomeCovers,
    /// The lock counts the expansion of a home. Otherwise, a CPU with adjacent claims does not
    /// check the home's claims.
    HomeCounts,
    /// A parked claim retries as if the claim had just arrived. Otherwise, the claim shares its
    /// pages with a claim that passed in the meantime.
    ParkedTriesAgain,
    /// A wake-up of a CPU that has not parked yet is kept as a permit. Otherwise, the wake-up is
    /// lost.
    WakeLeavesPermit,
    /// The writer of a reader-writer lock waits for the readers.
    WriterWaitsForReaders,
    /// A downgraded writer of a reader-writer lock counts as a reader. Otherwise, another writer
    /// enters beside this reader.
    DowngradeStays,
    /// A spin lock has one holder.
    SpinExcludes,
    /// The flush happens before the references are dropped. Otherwise, a frame has its next owner
    /// while the frame is still mapped.
    FlushFirst,
    /// A CPU drops the translations before it acknowledges a request. Otherwise, the CPU
    /// acknowledges and still uses the translations.
    DropTranslations,
    /// The sender waits for acknowledgements.
    AwaitAnswers,
    /// The fence between changing the tables and reading the set of CPUs that run the space.
    /// Otherwise, a CPU that joins in between walks the old tables and receives no request.
    JoinFence,
    /// The fence of a joining CPU between its entry into the set and its first walk: the
    /// counterpart of `JoinFence`.
    EnterSetFence,
    /// An overflowing request queue drops all translations. Otherwise, requests without a queue
    /// slot are acknowledged without a drop.
    OverflowDropsAll,
    /// A wait loop serves requests. Otherwise, two CPUs that flush each other deadlock.
    WaiterServes,
    /// A switch to another space drops the translations of the old space.
    LeaveFlush,
    /// A copy flushes the old page while the entry is busy. Otherwise, a CPU reads the old page
    /// after another CPU has stored to the new page.
    CopyFlush,
    /// The first store to a page mapped to the zero page flushes the page. Otherwise, a CPU
    /// continues to read zeros.
    ZeroPageFlush,
    /// A step skips a VMA under change by another writer. Otherwise, the step merges with this VMA,
    /// and the other writer puts a VMA into force that is no longer in the tree.
    BusyIsLeft,
    /// A VMA under change comes into force after its entries match the new state. Otherwise, faults
    /// use the VMA too early.
    ChangesStopped,
    /// A VMA inserted next to a VMA under change merges with the latter afterwards. Otherwise, the
    /// two VMAs stay apart.
    MergesLater,
    /// A VMA with a deferred merge adopts the root of its neighbour at once. Otherwise, the
    /// neighbour is replaced in the meantime, and the root is lost.
    RootAdopted,
    /// No fault creates an anon_vma for a VMA while a step decides on a deferred merge. Otherwise,
    /// the two VMAs get different roots.
    SealsGroup,
    /// VMAs with a deferred merge that have become different stay apart even if they become equal
    /// again. Otherwise, the two merge, a result that no sequential order produces.
    PartsNeighbours,
    /// The rest of a cut VMA with a deferred merge merges before the cut. Otherwise, if the cut
    /// removes the link to a VMA under change, the rest never merges.
    CutsUnmerged,
    /// A pin that finds no mapping serves no fault. Otherwise, the fault installs a page in a
    /// mapping created in the meantime.
    PinFindsNothing,
    /// A CPU that begins to read a page reads the object's length again while it holds the entry.
    /// Otherwise, a truncated object keeps the page.
    ReadLooksAgain,
    /// A CPU that begins to read a page checks, while it holds the entry, whether the page is being
    /// cut off the store. Otherwise, a store to a page that is already a hole is lost.
    ReadLooksForCut,
    /// A truncation of the store discards the reads in progress of the removed pages. Otherwise,
    /// the removed bytes come back when the file grows.
    CutDropsReads,
    /// A CPU that waits for a read takes a reference to the read state while it holds the page's
    /// entry. Otherwise, the state is freed before the CPU reads it.
    JoinHoldsEntry,
    /// A failed read reports no error for a page that no longer belongs to the read. Otherwise, a
    /// program that waits for a page overwritten by the kernel is killed.
    OverwrittenIsNoError,
    /// The end of a read frees the frame if the page has left the object in the meantime.
    /// Otherwise, the frame leaks.
    EndFreesFrame,
    /// A CPU that drops a page takes the last reference in one step. Otherwise, the CPU frees a
    /// frame to which another CPU has just acquired a reference.
    DropsSole,
    /// A root is added above an object's tables only if no other root was added in the meantime.
    /// Otherwise, everything below the other root is lost.
    GrowsOnce,
    /// One CPU at a time writes back. Otherwise, older bytes overwrite newer bytes.
    TurnExcludes,
    /// A fault that makes a file page writable marks the page dirty while the fault holds the
    /// entry. Otherwise, the stored bytes are never written back.
    FaultMarksDirty,
    /// A page is write-protected before its writeback. Otherwise, bytes stored through an old entry
    /// are never written back.
    WriteBackProtects,
    /// A store charges a page of a read-only store while it holds the page's entry. Of two first
    /// stores to the last page that the limit allows, one fails.
    ChargeHoldsEntry,
    /// A store that has charged a page checks that the page is still in its entry. A new page
    /// becomes dirty without a charge.
    StoreLooksAtCharge,
    /// Pages with a failed writeback stay dirty. Otherwise, the stored bytes are lost when the
    /// pages are dropped.
    FailedStaysDirty,
    /// Dirty pages are not dropped. Otherwise, the stored bytes are lost.
    DropsDirty,
    /// VMAs with a deferred merge count as one VMA. Otherwise, a call fails that succeeds in every
    /// sequential order.
    CountsMerged,
    /// The remains of a VMA after a move are renewed without the anon_vma only if they will not
    /// become part of another VMA.
    RenewsParts,
    /// An operation returns an error for a hole after the unmapping that made the hole is flushed.
    /// Otherwise, a CPU receives the error and then still uses the page.
    HoleIsFlushed,
    /// A discard keeps its entries busy until the flush. Otherwise, one CPU uses a new page while
    /// another CPU uses the old page.
    DiscardHolds,
    /// A fault that copies an object's page reads the object's length again while the fault holds
    /// the entry. Otherwise, the fault installs a copy of a page removed in the meantime, after the
    /// truncation has checked the entry.
    CopyLooksAgain,
    /// Removed access rights are flushed.
    ProtectFlush,
    /// A fork flushes the entries it has made read-only.
    ForkFlush,
    /// Reclaim evicts only clean pages. Otherwise, reclaim evicts a page with a recent store and
    /// loses the store.
    ReclaimLooksAtDirty,
    /// Reclaim flushes before it drops the references. Otherwise, a frame has its next owner while
    /// the frame is still mapped.
    ReclaimFlush,
    /// The end of a space waits for reclaim in the space. Otherwise, the end frees tables during
    /// reclaim's reads.
    ExitAwaitsReclaim,
    /// The end of a space waits for walks of the reverse map.
    ExitAwaitsWalks,
    /// A walk skips closed spaces. Otherwise, the walk reads freed tables.
    WalkLooksAtClosed,
    /// The fence between the beginning of a walk and its check for a closed space. Otherwise, the
    /// end of the space does not find the walk.
    LookFence,
    /// The fence between closing a space and checking the walking CPUs. Otherwise, a walk that has
    /// begun finds the space open.
    CloseFence,
    /// Pages marked clean are flushed. Otherwise, a store through an old translation leaves the
    /// page clean, and reclaim loses the store.
    FreeFlush,
    /// An unlinked table waits for a grace period. Otherwise, a walk in the table installs an entry
    /// in a frame with another owner.
    TableGrace,
    /// The step checks again whether the unmapped VMA is the last VMA over its tables. Otherwise,
    /// two such steps each count the other's VMA as remaining, and a table is left without a VMA.
    UnmapLooksAgain,
    /// A table is published only while its VMA is in force.
    TableValidated,
    /// The fence of a truncation before the object's pages are removed.
    TruncateFence,
    /// A fault that adds a page to an object reads the object's length again.
    ObjectLooksAgain,
    /// A CPU that finds an object's page reads the page's entry again after it acquired the
    /// reference.
    ReferLooksAgain,
    /// A remote access reads the page's entry again after it acquired the reference. Otherwise, the
    /// access reads a frame with another owner.
    AccessLooksAgain,
    /// A CPU that pins a page reads the page's entry again after it acquired the pin. Otherwise, a
    /// device uses a frame with another owner.
    PinLooksAgain,
    /// A CPU that copies a page checks the pins while it holds the entry. Otherwise, the program
    /// continues with the copy and the device with the original page.
    CopyLooksAtPins,
    /// A fork copies pinned pages. Otherwise, the next store moves the program away from the
    /// device's page.
    ForkLooksAtPins,
    /// A fork copies pinned pages after it has flushed the old rights. Otherwise, of two stores the
    /// child gets only the second.
    ForkCopiesAfterFlush,
    /// A CPU that marks a page clean checks the pins afterwards. Otherwise, the page is reclaimed
    /// together with the bytes stored by the device.
    FreeLooksAtPins,
    /// A batch makes each of its entries busy before the commit. Otherwise, the batch overwrites an
    /// entry installed by another CPU.
    BatchTakesEach,
    /// A batch validates the ticket after it has its entries. Otherwise, the batch installs
    /// outdated entries.
    BatchAsks,
    /// An aborted batch returns its frames. Otherwise, the frames leak.
    BatchGivesBack,
    /// A fork reads an entry again after it acquired a reference to the frame. Otherwise, the frame
    /// may have another owner.
    ForkLooksAgain,
    /// A fork copies the notes of moved pages under its claim. Otherwise, the child's reverse map
    /// lacks a move.
    ForkCopiesMoves,
    /// A migration compares the number of its entries with the frame's references. Otherwise,
    /// kernel stores to the old frame are lost.
    MigrateCounts,
    /// A migration flushes before it copies. Otherwise, program stores through an old translation
    /// are lost.
    MigrateFlush,
    /// Compaction checks whether it has isolated all frames of a block before it frees the block as
    /// a whole. Otherwise, compaction frees frames of other owners.
    CompactLooksAgain,
    /// A CPU without memory waits for its turn to write to the swap area. Otherwise, the CPU
    /// reports that memory is exhausted while another CPU has the turn.
    ReclaimAwaitsTurn,
    /// Isolated frames are returned, whether or not the block was freed. Otherwise, the frames
    /// leak.
    IsolatedGoBack,
    /// The fence between a deferral's stamp and reading the set of CPUs that may hold translations.
    /// Otherwise, a CPU that joins is missed.
    DeferFence,
    /// A settlement waits for the CPUs that may hold translations. Otherwise, these CPUs use frames
    /// with other owners.
    FlushAwaitsCpus,
    /// A collection without a settlement releases only frames whose flush has been done by every
    /// CPU that may hold translations. Otherwise, such CPUs use frames with other owners.
    CollectLooks,
    /// Only frames with completed stamps are released.
    ReleaseLooksAtStamps,
    /// A CPU that changes the content of a page does the page's deferred flush. Otherwise, other
    /// CPUs read the old content.
    WriteFlushesPending,
    /// A fault that allows stores checks again for a deferred flush while the fault holds the
    /// entry. Otherwise, the page may have moved away and back in the meantime, and another CPU
    /// reads the intermediate frame.
    StoreLooksAgain,
    /// A flush is deferred only if no mapping allows stores. Otherwise, a CPU stores to an
    /// abandoned frame.
    DeferLooksAtStores,
    /// A flush is deferred only if no operation has claimed the page. Otherwise, a CPU stores
    /// through a translation whose flush is in progress.
    DeferLooksAtClaims,
    /// A page is unmapped without a flush only if all CPUs have dropped their translations since
    /// its accessed bit was cleared. Otherwise, a CPU still has a translation.
    FlushFreeChecksStamps,
    /// A page loses its age when `MADV_FREE` clears its accessed bit. Otherwise, the page moves
    /// without a flush while a CPU stores to it.
    FreeUnages,
    /// A moved page keeps the stamp of the last clear of its accessed bit. Otherwise, a CPU that
    /// reached the old frame still reaches it after the page has moved on.
    MigrateKeepsStamp,
    /// A CPU that removes permissions or clears entries does the deferred flush of pages evicted
    /// there. Otherwise, a CPU reads unmapped pages.
    BatchSettlesEvicted,
    /// A fault that copies an object's page to an empty entry does the deferred flush of a page
    /// evicted there. Otherwise, another CPU reads the object's page after a program has stored to
    /// its private copy.
    CopySettlesEvicted,
    /// A CPU that overwrites an absent page does the page's deferred flush. Otherwise, programs
    /// read the old page.
    OverwriteSettles,
    /// A truncation of an object does the deferred flush of the removed pages. Otherwise, programs
    /// read removed pages.
    CutSettles,
    /// An eviction flushes. Otherwise, a CPU stores to a page already written and evicted.
    EvictFlush,
    /// Locked pages are not evicted.
    EvictLooksAtLocks,
    /// Dirty pages are not dropped. Otherwise, the stored bytes are lost.
    EvictLooksAtDirty,
    /// Writeback waits for entries held by other CPUs. Otherwise, the stored bytes are not in the
    /// store when writeback returns.
    WriteBackAwaits,
    /// A CPU that unmaps a page claimed by an operation flushes the whole space. Otherwise, a CPU
    /// stores through a translation of a moved or hidden entry whose flush is in progress.
    FlushLooksAtClaims,
    /// The count of a frame that begins with several references is stored once. Otherwise, a
    /// reference acquired by another CPU after the first store is lost.
    CountIsStoredOnce,
    /// Pages are flushed before they leave their programs for the swap area. Otherwise, stores
    /// through an old translation are lost.
    SwapFlush,
    /// A fault that has found a page in the swap cache checks again, while it holds the program's
    /// entry, whether the slot has this page. Otherwise, the fault maps the slot's previous page.
    SwapInLooksAgain,
    /// A page is exclusive to a program only if no other entry names its slot. Otherwise, two
    /// programs store to one page.
    AdoptLooksAtCount,
    /// A page from the swap area is dirty. Otherwise, reclaim mistakes the page for a lazily freed
    /// page.
    SwappedIsDirty,
    /// A fork counts the child's swapped entries. Otherwise, the slot has a new owner while the
    /// child's entry still names it.
    ForkCountsSlots,
    /// Until a page of a fork's child is filled, the page has one reference more than mappings.
    /// Otherwise, reclaim evicts the page before it is filled.
    FilledIsReferredTo,
    /// The count of a frame's next life is stored with release ordering. Otherwise, a CPU that
    /// acquires a reference by an old frame number still reads the old entry.
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
        /// The removed step. Both model checkers run all threads of a model on the thread that
        /// started the model.
        static LOST: Cell<Option<Mutant>> = const { Cell::new(None) };
    }

    /// Returns the mutant of the running check, if any.
    pub fn in_force() -> Option<Mutant> {
        LOST.get()
    }

    /// Restores the step when dropped, also after the expected failure of the check.
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
