//! Lines that a check takes out, to see that it notices.
//!
//! A model that cannot fail proves nothing. So each line on which a protocol rests can be left out, one
//! at a time, in the builds that check protocols (`--cfg loom`, `--cfg shuttle`): `with` runs a check
//! on the real code less that line, and the check must fail. In every other build [`lost`] is `false` to
//! the compiler, and nothing is left of it.

/// A line that a protocol rests on. Each is named by what it does; the comment says what goes wrong
/// without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(clippy::exhaustive_enums, reason = "checks go over all of them")]
pub enum Mutant {
    /// The writer's fence between the odd sequences and the entries. A fault that it did not wait for
    /// may still see the sequence as it was.
    WriterFence = 1,
    /// The fault's barrier between its swap of the entry and its second look at the sequence.
    FaultFence,
    /// The fault's second look at the sequence. It installs an answer that is out of date.
    SecondLook,
    /// The writer's wait for an entry that is held. It overwrites it, and the fault then overwrites
    /// that.
    SettleWaits,
    /// A fault that maps a folio looks at all of its pages once it has the entry. A page that was cut off stays mapped.
    LeafLooksAgain,
    /// A page that could not be read is noted. Who needs one behind it reads both again, and for ever.
    FailedIsNoted,
    /// A collapse looks for copies once the VMA is stopped. What a program stored to one is lost.
    CollapseLooksAgain,
    /// A fault whose window cannot take its page is served without one. It looks again and again at permissions that mprotect has not reached yet, and
    /// which it never does, if it waits for a CPU that waits for this one.
    RetriesAlone,
    /// mincore looks at an entry once no CPU holds it. A page is missing while it is copied.
    LookSettles,
    /// A fault below a stack that was unmapped is told so once that is flushed. The program then uses the stack.
    StackIsFlushed,
    /// What hardware set in a pinned entry is kept. A dirty bit is lost.
    KeepGained,
    /// A section's mark. The grace period does not wait for the reader.
    SectionMark,
    /// The fence with which a section begins. The CPU that frees does not see the mark; and a revocation of an object's
    /// pages does not see the entry of a fault that still sees such a page.
    SectionFence,
    /// The look at all marks before the epoch advances. It advances while an old section is open.
    LookAtMarks,
    /// The second epoch of a grace period. One that began just before the first ends too early.
    SecondEpoch,
    /// The fence between the unlinking of an object and the look at the epoch it is retired in. The epoch
    /// is too old a one.
    RetireFence,
    /// The fence between the looks at the epoch and at the marks. A section that was opened meanwhile is
    /// not seen.
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
    /// A wake-up of a CPU that has yet to park is kept for it. It is lost.
    WakeLeavesPermit,
    /// A reader-writer lock's writer waits for readers.
    WriterWaitsForReaders,
    /// A reader-writer lock's writer that becomes a reader is one. Another writer enters beside it.
    DowngradeStays,
    /// A spin lock is taken by one.
    SpinExcludes,
    /// Flush before the references are put. The frame has its next owner while it is still mapped.
    FlushFirst,
    /// A CPU that acknowledges a request has dropped the translations. It acknowledges, and goes on using them.
    DropTranslations,
    /// The sender waits for acknowledgements.
    AwaitAnswers,
    /// The fence between the changed tables and the look at the set of CPUs that run the space. A CPU that joins
    /// meanwhile walks the old ones and is not told.
    JoinFence,
    /// The fence of a CPU that joins, between its entry into the set and its first walk: the other half.
    EnterSetFence,
    /// A full queue of requests drops everything. What did not fit is acknowledged, and not dropped.
    OverflowDropsAll,
    /// A wait loop services requests. Two CPUs that flush each other wait for ever.
    WaiterAnswers,
    /// A switch to another space drops the translations of the old one.
    LeaveFlush,
    /// A copy flushes the old page while the entry is busy. A CPU reads it after another has stored to
    /// the new one.
    CopyFlush,
    /// The first store to a page that maps the zero page flushes that page. Else a CPU continues to read zeros.
    ZeroPageFlush,
    /// A step leaves alone what another writer has under change. It merges with it, and the other lets run what is in the
    /// tree no more.
    BusyIsLeft,
    /// What a writer changes runs once its entries are as it says. Faults use it too early.
    ChangesStopped,
    /// What is put beside a VMA under change merges with it later. The two stay apart.
    MergesLater,
    /// What merges later has the root of its neighbour already. The neighbour is replaced meanwhile, and the root is gone.
    RootAdopted,
    /// While a step decides what merges later, no fault makes an anon_vma for it. The two end up with different ones.
    SealsGroup,
    /// VMAs that were to merge later, and are alike no more, stay two when they become alike again. They merge, as in no order.
    PartsNeighbours,
    /// What a cut leaves of a VMA whose merge was deferred merges before. If the cut removed what leads to a VMA under change, it
    /// never merges.
    CutsUnmerged,
    /// A pin that finds nothing mapped serves no fault. The fault leaves a page in what is mapped there by then.
    PinFindsNothing,
    /// A CPU that begins to read a page reads the object's length again once it has the entry. A truncated object keeps the page.
    ReadLooksAgain,
    /// A CPU that begins to read a page looks whether it is being cut off the store, once it has the entry. A store to a page that is a hole
    /// already is lost.
    ReadLooksForCut,
    /// Who cuts pages off a store drops the reads of them that are under way. What was cut off comes back when the file grows.
    CutDropsReads,
    /// Who waits for a read takes a share of its state while it has the page's entry. The state is gone when it looks there.
    JoinHoldsEntry,
    /// A read that fails tells nobody of a page that is no longer its own. Who waits for a page that the kernel has overwritten is killed.
    OverwrittenIsNoError,
    /// The end of a read frees the frame if the page has left the object meanwhile. It is lost.
    EndFreesFrame,
    /// Who drops a page takes the last reference in one step. It frees a frame to which another CPU has just got a reference.
    DropsSole,
    /// A root is put above an object's tables only where none was put meanwhile. What is below the other is lost.
    GrowsOnce,
    /// One CPU at a time writes back. Older bytes are written after newer ones.
    TurnExcludes,
    /// A fault that makes a page of a file writable marks it dirty while it has the entry. What is stored is never written back.
    FaultMarksDirty,
    /// A page is write-protected before it is written back. What is stored through an old entry is never written back.
    WriteBackProtects,
    /// Pages that could not be written back stay dirty. What was stored to them is lost when they are dropped.
    FailedStaysDirty,
    /// Dirty pages are not dropped. What was stored to them is lost.
    DropsDirty,
    /// VMAs that are to merge count as one. A call is refused that no order refuses.
    CountsMerged,
    /// What stays of a VMA after a move is renewed without its anon_vma only if it will not be a part of another VMA.
    RenewsParts,
    /// An operation returns an error for a hole once the unmapping that made the hole is flushed. A CPU is told of the hole, and
    /// then uses the page.
    HoleIsFlushed,
    /// A discard holds its entries until they are flushed. Another CPU uses a new page while one uses the old.
    DiscardHolds,
    /// A fault that copies an object's page reads the object's length again once it has the entry. It installs a copy of
    /// a page that was cut off meanwhile, after the truncation has looked there.
    CopyLooksAgain,
    /// Rights that were taken away are flushed.
    ProtectFlush,
    /// A fork flushes what it made read-only.
    ForkFlush,
    /// Reclaim takes pages that are not dirty. It takes what was stored to since, and loses the store.
    ReclaimLooksAtDirty,
    /// Reclaim flushes before it drops the references. The frame has its next owner while it is mapped.
    ReclaimFlush,
    /// The end of a space waits for reclaim in it. It frees tables that reclaim reads.
    ExitAwaitsReclaim,
    /// ... for walks of the reverse map.
    ExitAwaitsWalks,
    /// A walk leaves out spaces that are closed. It reads tables that are freed.
    WalkLooksAtClosed,
    /// The fence between the beginning of a walk and its look whether a space is closed. Its end finds no walk.
    LookFence,
    /// The fence between the closing of a space and the look at the CPUs that walk. A walk that has begun finds it open.
    CloseFence,
    /// What is marked as clean is flushed. A store through an old translation leaves it marked so, and
    /// reclaim loses the store.
    FreeFlush,
    /// An unlinked table waits for a grace period. A walk that is in it installs in a frame that is
    /// another's.
    TableGrace,
    /// The step looks again whether what is unmapped is the last over its tables. Of two such steps each takes the other's
    /// VMA for one that stays, and a table is left without a VMA.
    UnmapLooksAgain,
    /// A table is published only while its VMA is in force.
    TableValidated,
    /// The fence of a truncation, before the object's pages go.
    TruncateFence,
    /// A fault that adds a page to an object reads the object's length again.
    ObjectLooksAgain,
    /// A CPU that finds an object's page reads its entry again once it has the reference.
    ReferLooksAgain,
    /// An access from outside reads the page's entry again once it has the reference. It reads a frame that has another owner.
    AccessLooksAgain,
    /// Who pins a page looks at its entry again once it has the pin. A device uses what is another's.
    PinLooksAgain,
    /// Who copies a page looks at its pins once it has the entry. The program goes on with the copy, and the device with the page.
    CopyLooksAtPins,
    /// A fork copies pinned pages. The next store moves the program away from the device's page.
    ForkLooksAtPins,
    /// A fork copies pinned pages after it has flushed the old rights. The child gets the second of two stores alone.
    ForkCopiesAfterFlush,
    /// Who marks a page as clean looks at its pins afterwards. It is reclaimed with what the device stored.
    FreeLooksAtPins,
    /// A batch takes each of its entries before it commits it. It overwrites what another made there.
    BatchTakesEach,
    /// A batch asks the ticket once it has its entries. It installs answers that are out of date.
    BatchAsks,
    /// A batch that is given up gives its frames back. They are lost.
    BatchGivesBack,
    /// A fork looks at an entry again once it has a reference to its frame. The frame may be another's by then.
    ForkLooksAgain,
    /// A fork copies the notes of moved pages under its claim. The reverse map of the child lacks a move.
    ForkCopiesMoves,
    /// A page that `mremap` moves takes the index of its new place. The reverse map does not find it.
    MoveKeepsIndex,
    /// A migration compares the entries that it took with the frame's references. What the kernel stores to the old frame is lost.
    MigrateCounts,
    /// A migration flushes before it copies. What a program stores by an old translation is lost.
    MigrateFlush,
    /// Compaction looks whether it has all frames of a block before it gives it back as one. It gives back what others have.
    CompactLooksAgain,
    /// A CPU that is out of memory waits for the turn to write to the swap area. It says that memory is out where another has the turn.
    ReclaimAwaitsTurn,
    /// Isolated frames are given back, whatever became of the block. They are lost.
    IsolatedGoBack,
    /// The fence between a deferral's stamp and its look at the CPUs that may hold translations. One that joins is missed.
    DeferFence,
    /// A settlement waits for the CPUs that may hold translations. They use frames that others have.
    SettleAwaits,
    /// What is paid without a settlement is what each CPU that may hold translations has flushed. They use frames that others have.
    CollectLooks,
    /// Frames are given back whose stamps are paid, and no others.
    ReleaseLooksAtStamps,
    /// Who changes what a page shows does the flush that is deferred for it. Other CPUs see the page as it was.
    WriteSettles,
    /// A fault that allows stores looks again whether a flush is deferred, once it has the entry. The page may have moved away and back since, and another CPU sees it where it was between.
    StoreLooksAgain,
    /// A flush is deferred where no mapping allows stores. A CPU stores to a frame that was left.
    DeferLooksAtStores,
    /// A flush is deferred where no operation has claimed the page. A CPU stores by a translation whose flush is under way.
    DeferLooksAtClaims,
    /// A page is taken without a flush where all CPUs have dropped their translations since its accessed bit was cleared. One has a translation still.
    ColdLooksAtStamps,
    /// A page whose accessed bit `MADV_FREE` clears is not aged any more. It moves without a flush while a CPU stores to it.
    FreeUnages,
    /// A page that moves keeps the stamp of the last clear of its accessed bit. A CPU that came to the old frame does so still where the page has left since.
    MigrateKeepsStamp,
    /// Who takes permissions away, or empties entries, does the deferred flush of pages that were evicted there. A CPU sees what is unmapped.
    BatchSettlesEvicted,
    /// A fault that copies an object's page to an empty entry does so, too. Another CPU sees the object's page where a program has stored to its own.
    CopySettlesEvicted,
    /// Who overwrites a page that is not there does so. Programs see the page as it was.
    OverwriteSettles,
    /// Who cuts pages off an object does so. Programs see what was cut off.
    CutSettles,
    /// An eviction flushes. A CPU stores to a page that was written and is gone.
    EvictFlush,
    /// Locked pages are not evicted.
    EvictLooksAtLocks,
    /// Dirty pages are not dropped. What was stored to them is lost.
    EvictLooksAtDirty,
    /// Writing back waits for entries that other CPUs have. What was stored is not in the store when it returns.
    WriteBackAwaits,
    /// Who takes a page that an operation has claimed flushes all of the space. A CPU stores by a translation of an entry that was moved or hidden, and whose flush
    /// is under way.
    FlushLooksAtClaims,
    /// The count of a frame that begins with several references is stored once. A reference that another CPU takes after the first store is forgotten.
    CountIsStoredOnce,
    /// Pages that leave their programs for the swap area are flushed first. What a CPU stores by an old translation is lost.
    SwapFlush,
    /// A fault that has found a page of the area looks again whether the slot has it, once it has the program's entry. It maps what was in the slot
    /// before.
    SwapInLooksAgain,
    /// A page is a program's alone only if no other entry names its slot. Two programs store to one page.
    AdoptLooksAtCount,
    /// A page that comes back is dirty. Reclaim takes it for one that was freed lazily.
    SwappedIsDirty,
    /// A fork counts the child's swapped entries. The slot is another's while the child's entry names it.
    ForkCountsSlots,
    /// Until a page of a fork's child is filled, there is a reference to it more than mappings. It leaves memory before.
    FilledIsReferredTo,
    /// The count of a frame's next life is stored with release. A CPU that takes a reference by an old frame number
    /// finds the entry as it was.
    FreshCountReleases,
}

/// Whether the line of `mutant` is taken out.
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
        /// Both model checkers run all threads of a model on the thread that asked for it.
        static LOST: Cell<Option<Mutant>> = const { Cell::new(None) };
    }

    /// The mutant of the running check, if the check has one.
    pub fn in_force() -> Option<Mutant> {
        LOST.get()
    }

    /// Puts the line back, also when the check has failed, as it should.
    struct Restore;

    impl Drop for Restore {
        fn drop(&mut self) {
            LOST.set(None);
        }
    }

    /// Runs `check`, a model, on code without the line of `mutant`.
    pub fn with<R>(mutant: Mutant, check: impl FnOnce() -> R) -> R {
        LOST.set(Some(mutant));
        let _restore = Restore;
        check()
    }
}
