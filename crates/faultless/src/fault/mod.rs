//! The page-fault handler, with one implementation for all locking policies.
//!
//! [`Space::fault`] chooses what the fault holds (no lock, the lock of a VMA, the lock of the
//! space, or a range lock on one page) and finds the VMA. After this, all faults follow one path,
//! [`Attempt::serve`]: walk the tables, publish missing tables, read the entry, do the slow work,
//! lock the entry, validate the [ticket](ticket::Ticket), install the page. An attempt without a
//! lock aborts in every doubtful case, changes nothing, and passes its prepared page to the attempt
//! under a lock. Speculation never raises a fatal signal: only under a lock does a fault end with
//! SIGSEGV, SIGBUS or out-of-memory.
//!
//! A thread that faults in sequence gets prefaulted pages: see [`prefault`].
//!
//! A successful speculative fault writes one cache line shared with other CPUs: the line of the
//! entry. A fault that maps several pages writes the lines of all their entries, and, for pages of
//! an object, the lines of the frames' counts. A fault that copies a page also writes the count of
//! the source frame.

mod absent;
pub(crate) mod anon;
mod baseline;
mod cow;
mod device;
pub(crate) mod folio;
pub(crate) mod mem_policy;
mod object;
mod outcome;
pub mod prefault;
pub(crate) mod prepared;
mod swapped;
pub(crate) mod table;
pub(crate) mod ticket;
mod unshare;

#[cfg(all(test, not(loom)))]
pub(crate) mod tests;

use crate::addr::{VirtRange, page_down};
use crate::error::OutOfMemory;
use crate::knob::{AnonVmaCheck, Locking};
use crate::machine::{Invalidate, Machine};
use crate::space::area::{PageSource, Prot};
use crate::space::vma::Vma;
use crate::space::{Guard, Space};
use crate::stat::Counter;
use crate::sync::atomic::{AtomicU64, reads};
use crate::sync::grace::Section;
use crate::sync::mutant::{Mutant, lost};
use crate::sync::wait::Wait;
use crate::table::Entry;
use crate::table::format::USER_END;
use crate::table::node::{ENTRIES, LAST};
use crate::table::walk::{Reached, descend};
use crate::table::{node, protocol};
use crate::vm::Cpu;
use absent::{ReadIn, Reader};
pub use outcome::{FaultError, FaultKind};
use prefault::ThreadPredictor;
use prepared::Prepared;
use ticket::{Abort, Ticket};

/// The kind of access that faulted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// A load.
    Read,
    /// A store.
    Write,
    /// An instruction fetch.
    Execute,
}

impl Access {
    /// Returns whether a VMA with `prot` allows the access. On x86-64 writable and executable pages
    /// are always readable, so any of the three permissions allows a load.
    #[inline(always)]
    const fn allowed_by(self, prot: Prot) -> bool {
        prot.intersects(match self {
            Self::Read => Prot::READ.union(Prot::WRITE).union(Prot::EXEC),
            Self::Write => Prot::WRITE,
            Self::Execute => Prot::EXEC,
        })
    }
}

/// The maximum number of times a fault without a lock looks up its VMA again, after other CPUs have
/// changed the VMA.
const MAX_RETRIES: u32 = 4;

/// The parameters of a fault.
struct Request<'a, M: Machine> {
    page: u64,
    access: Access,
    /// The predictor of the faulting thread; `None` if prefault is off.
    ahead: Option<&'a ThreadPredictor<M>>,
}

impl<M: Machine> Clone for Request<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: Machine> Copy for Request<'_, M> {}

/// The VMAs that a fault on an unmapped page may extend.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Grow {
    /// The stack above the page.
    Stacks,
    Nothing,
}

/// One attempt to serve a fault, with its locks and ticket. A plain value, so that the compiler
/// keeps it in registers.
pub(crate) struct Attempt<'a, 'v, M: Machine> {
    cpu: &'a Cpu<'v, M>,
    space: &'a Space<M>,
    vma: &'a Vma,
    ticket: Ticket<'a>,
    page: u64,
    access: Access,
    ahead: Option<&'a ThreadPredictor<M>>,
}

impl<M: Machine> Clone for Attempt<'_, '_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: Machine> Copy for Attempt<'_, '_, M> {}

impl<M: Machine> Space<M> {
    /// Serves a page fault at `addr` that was not caused by an access of the running thread: for
    /// example, a debugger reads the memory of another program. The call maps the faulting page
    /// (and, for a file, the pages around it), and no predictor learns from the fault. A page-fault
    /// handler calls [`fault`](Self::fault); a kernel without threads, whose programs are
    /// CPUs, may use this call instead.
    ///
    /// `Ok` means that the access should be retried; after [`FaultKind::Pending`], once the page
    /// has been read. Spurious calls are harmless.
    ///
    /// # Errors
    /// The error to report to the program; see [`FaultError`].
    #[inline]
    pub fn fault_remote(
        &self,
        cpu: &Cpu<'_, M>,
        addr: u64,
        access: Access,
    ) -> Result<FaultKind, FaultError> {
        self.handle(cpu, Request { page: page_down(addr), access, ahead: None }, Grow::Stacks)
    }

    /// Serves a fault at `page` on behalf of a call, without an access by a program. Differs from
    /// [`fault_remote`](Self::fault_remote) in two ways: no stack grows for an unmapped page, and
    /// the call waits for a page that is being read.
    ///
    /// # Errors
    /// As [`fault_remote`](Self::fault_remote).
    #[inline(never)]
    pub(crate) fn fault_mapped(
        &self,
        cpu: &Cpu<'_, M>,
        page: u64,
        access: Access,
    ) -> Result<FaultKind, FaultError> {
        loop {
            match self.handle(cpu, Request { page, access, ahead: None }, Grow::Nothing)? {
                FaultKind::Pending => cpu.await_read().map_err(|_| FaultError::Bus)?,
                kind => return Ok(kind),
            }
        }
    }

    /// Serves a page fault at `addr` of a thread that runs in this space, and prefaults the pages
    /// that the thread is predicted to use next. The fault maps at most 2^`prefault_max_order`
    /// pages. A page-fault handler calls this function with the `thread` of the running thread; for
    /// other accesses use [`fault_remote`](Self::fault_remote). Each thread has its own `thread`. A
    /// thread that forks [resets](prefault::ThreadStreams::reset) its predictor; a thread that ends
    /// or starts another program [leaves](Self::exit_thread) the space. Calls that unmap pages
    /// should be made [on behalf of the thread](Cpu::for_thread).
    ///
    /// `Ok` means that the access should be retried; after [`FaultKind::Pending`], once the page
    /// has been read. Spurious calls are harmless.
    ///
    /// # Errors
    /// The error to report to the program; see [`FaultError`].
    #[inline]
    pub fn fault(
        &self,
        cpu: &Cpu<'_, M>,
        thread: &ThreadPredictor<M>,
        addr: u64,
        access: Access,
    ) -> Result<FaultKind, FaultError> {
        let ahead = (cpu.vm().knobs.prefault_max_order() != 0).then_some(thread);
        self.handle(cpu, Request { page: page_down(addr), access, ahead }, Grow::Stacks)
    }

    #[inline(always)]
    fn handle(
        &self,
        cpu: &Cpu<'_, M>,
        request: Request<'_, M>,
        grow: Grow,
    ) -> Result<FaultKind, FaultError> {
        cpu.count(Counter::Faults);
        let locking = self.locking(cpu);
        if locking == Locking::PerVma {
            // The rare path receives the fields separately, so that the struct need not be stored
            // in memory.
            let Request { page, access, ahead } = request;
            return self.handle_per_vma(cpu, page, access, ahead, grow);
        }
        let mut prepared = Prepared::Nothing;
        let served = if locking == Locking::Speculative {
            self.speculate(cpu, request, &mut prepared)
        } else {
            None
        };
        self.finish_fault(cpu, request, grow, served, prepared)
    }

    /// Finishes a fault: returns `served`, the result of an attempt without the space's lock, or
    /// else serves the fault under the space's lock.
    #[inline(always)]
    fn finish_fault(
        &self,
        cpu: &Cpu<'_, M>,
        Request { page, access, ahead }: Request<'_, M>,
        grow: Grow,
        served: Option<FaultKind>,
        mut prepared: Prepared,
    ) -> Result<FaultKind, FaultError> {
        let served = match served {
            Some(kind) => Ok(kind),
            None => self.under_space_lock(cpu, page, access, ahead, grow, &mut prepared),
        };
        prepared.finish(cpu);
        served
    }

    /// Serves the fault without a lock. `None`: the speculation was aborted.
    ///
    /// If the VMA was replaced because another CPU changed a different part of it, the fault looks
    /// it up again, at most [`MAX_RETRIES`] times. If the VMA is being changed at this page, or is
    /// missing, the attempt aborts.
    #[inline(always)]
    fn speculate(
        &self,
        cpu: &Cpu<'_, M>,
        request: Request<'_, M>,
        prepared: &mut Prepared,
    ) -> Option<FaultKind> {
        let Request { page, access, ahead } = request;
        let section = cpu.section();
        let tried = match self.running_vma(cpu, &section, page, access, prepared) {
            None => Err(Abort::VmaChanged),
            Some((vma, seen)) => {
                let ticket = Ticket::speculative(vma, seen);
                // No closure here: the compiler does not always inline a closure.
                match self.check(cpu, vma, access) {
                    Ok(()) => Attempt { cpu, space: self, vma, ticket, page, access, ahead }
                        .serve(prepared),
                    Err(abort) => Err(abort),
                }
            }
        };
        match tried {
            Ok(kind) => {
                cpu.count(Counter::Spf);
                Some(kind)
            }
            Err(abort) => {
                drop(section);
                self.retry(cpu, page, access, ahead, prepared, abort)
            }
        }
    }

    /// Retries an aborted speculative fault.
    #[cold]
    #[inline(never)]
    fn retry(
        &self,
        cpu: &Cpu<'_, M>,
        page: u64,
        access: Access,
        ahead: Option<&ThreadPredictor<M>>,
        prepared: &mut Prepared,
        mut abort: Abort,
    ) -> Option<FaultKind> {
        for _ in 0..MAX_RETRIES {
            match abort {
                Abort::VmaChanged | Abort::TableChanged => {}
                // No grace section is open here, because a read may take long.
                Abort::Absent => {
                    match prepared.kept(cpu, || self.read_in(cpu, page, ahead, Reader::Attempt)) {
                        ReadIn::Retry => {}
                        ReadIn::Pending => return Some(absent::pending(cpu)),
                        ReadIn::Failed | ReadIn::NoMemory => break,
                    }
                }
                Abort::NoFolio => {
                    if let ReadIn::Pending = prepared.kept(cpu, || self.read_folio(cpu, page, 0)) {
                        return Some(absent::pending(cpu));
                    }
                }
                _ => break,
            }
            let section = cpu.section();
            let found = self.running_vma(cpu, &section, page, access, prepared);
            let Some((vma, seen)) = found else { break };
            if !matches!(abort, Abort::Absent | Abort::NoFolio) {
                cpu.count(Counter::SpfVmaReplaced);
            }
            let ticket = Ticket::speculative(vma, seen);
            let tried = self.check(cpu, vma, access).and_then(|()| {
                Attempt { cpu, space: self, vma, ticket, page, access, ahead }.serve(prepared)
            });
            match tried {
                Ok(kind) => {
                    cpu.count(Counter::Spf);
                    return Some(kind);
                }
                Err(again) => abort = again,
            }
        }
        // This calls a watcher of trace points.
        prepared.kept(cpu, || self.count_abort(cpu, page, abort));
        None
    }

    /// Returns the VMA at `page` and its sequence, unless a writer is changing the VMA. If the VMA
    /// has a memory policy, a frame is [prepared](mem_policy).
    #[inline(always)]
    fn running_vma<'s>(
        &'s self,
        cpu: &Cpu<'_, M>,
        section: &'s Section<'_>,
        page: u64,
        access: Access,
        prepared: &mut Prepared,
    ) -> Option<(&'s Vma, u64)> {
        if let Some((vma, seen)) = cpu.state().hint.get(section, self.id())
            && vma.range().contains(page)
        {
            return Some((vma, seen));
        }
        self.look_up_vma(cpu, section, page, access, prepared)
    }

    #[inline(never)]
    fn look_up_vma<'s>(
        &'s self,
        cpu: &Cpu<'_, M>,
        section: &'s Section<'_>,
        page: u64,
        access: Access,
        prepared: &mut Prepared,
    ) -> Option<(&'s Vma, u64)> {
        let runs = self.is_run_by(cpu);
        let view = if runs { self.view_of_runner(cpu, section) } else { self.view(cpu, section) };
        let entry = view.at(page)?;
        let vma = entry.get();
        let seen = vma.sequence.read()?;
        mem_policy::place(cpu, vma, page, access, prepared);
        if runs && !mem_policy::has_policy(vma) {
            cpu.state().hint.set(self.id(), vma, seen);
        }
        Some((vma, seen))
    }

    #[cold]
    fn count_abort(&self, cpu: &Cpu<'_, M>, page: u64, abort: Abort) {
        cpu.count(abort.counter());
        if !self.core.cpus.any_but(cpu.id(), cpu.vm().machine().cpus()) {
            cpu.count(Counter::AbortSingleThreaded);
        }
        if let Some(point) = abort.point() {
            cpu.vm().trace.hit(cpu, point, self.id(), page);
        }
    }

    /// Makes the checks that need no page table.
    #[inline(always)]
    fn check(&self, cpu: &Cpu<'_, M>, vma: &Vma, access: Access) -> Result<(), Abort> {
        if !access.allowed_by(vma.prot()) {
            return Err(Abort::Access);
        }
        if vma.anon_vma.value() == 0
            && vma.memory().is_anonymous()
            && cpu.vm().knobs.anon_vma_check() == AnonVmaCheck::Early
        {
            return Err(Abort::NoAnon);
        }
        Ok(())
    }

    /// Serves the fault under a lock that excludes writers, with the final result.
    #[cold]
    #[inline(never)]
    fn under_space_lock(
        &self,
        cpu: &Cpu<'_, M>,
        page: u64,
        access: Access,
        ahead: Option<&ThreadPredictor<M>>,
        grow: Grow,
        prepared: &mut Prepared,
    ) -> Result<FaultKind, FaultError> {
        let request = Request { page, access, ahead };
        if page >= USER_END {
            cpu.count(Counter::Segv);
            return Err(FaultError::Segv { mapped: false });
        }
        let (mut settled, mut looks, mut hole) = (false, 0, VirtRange::page(page));
        let mut folios = 0;
        loop {
            let tried = match self.locked_attempt(cpu, request, prepared) {
                Err(Abort::Unmapped) if grow == Grow::Stacks => {
                    match self.grow_stack(cpu, page) {
                        // The stack has grown, or another CPU has mapped the page: retry in both
                        // cases.
                        Ok(None) => continue,
                        Ok(Some(seen)) => {
                            if !lost(Mutant::StackIsFlushed) {
                                hole = seen;
                            }
                            Err(Abort::Unmapped)
                        }
                        Err(OutOfMemory) => Err(Abort::NoHeap),
                    }
                }
                tried => tried,
            };
            match tried {
                Ok(kind) => return Ok(kind),
                // Another part of the VMA was changed, so this VMA takes no anon_vma. Wait until
                // the writer's step is done.
                Err(Abort::VmaChanged) => {
                    cpu.wait(looks);
                    looks += 1;
                }
                Err(Abort::NoMemory) if prepared.wait_for_one(cpu) => {}
                Err(Abort::NoHeap) if !settled => {
                    // Retired objects may hold the missing memory. There is no other memory to wait
                    // for.
                    prepared.kept(cpu, || cpu.wait_grace_all());
                    settled = true;
                }
                Err(Abort::NoMemory | Abort::NoHeap | Abort::TooManyMappings) => {
                    cpu.count(Counter::Oom);
                    return Err(FaultError::OutOfMemory);
                }
                Err(Abort::Unmapped) => {
                    // A stack above may also have been unmapped just now.
                    self.await_unmapping(cpu, hole);
                    cpu.count(Counter::Segv);
                    return Err(FaultError::Segv { mapped: false });
                }
                Err(Abort::Access) => {
                    cpu.count(Counter::Segv);
                    return Err(FaultError::Segv { mapped: true });
                }
                Err(Abort::BeyondObject) => {
                    cpu.count(Counter::Bus);
                    return Err(FaultError::Bus);
                }
                Err(abort @ (Abort::NoAnon | Abort::TableChanged)) => {
                    unreachable!("a fault under a lock aborted: {abort:?}")
                }
                Err(Abort::NoFolio) => {
                    if let ReadIn::Pending =
                        prepared.kept(cpu, || self.read_folio(cpu, page, folios))
                    {
                        return Ok(absent::pending(cpu));
                    }
                    folios += 1;
                }
                Err(Abort::Absent) => {
                    match prepared.kept(cpu, || self.read_in(cpu, page, ahead, Reader::UnderLock)) {
                        ReadIn::Retry => {}
                        ReadIn::Pending => return Ok(absent::pending(cpu)),
                        ReadIn::Failed => {
                            cpu.count(Counter::Bus);
                            return Err(FaultError::Bus);
                        }
                        ReadIn::NoMemory => {
                            cpu.count(Counter::Oom);
                            return Err(FaultError::OutOfMemory);
                        }
                    }
                }
            }
        }
    }

    fn locked_attempt(
        &self,
        cpu: &Cpu<'_, M>,
        request: Request<'_, M>,
        prepared: &mut Prepared,
    ) -> Result<FaultKind, Abort> {
        let Request { page, access, ahead } = request;
        let guard = self.share(cpu, VirtRange::page(page), Counter::RangeLockFault);
        let of_page = matches!(guard, Guard::Range { .. });
        let ticket = if of_page { Ticket::page_held() } else { Ticket::held() };
        let ahead = ahead.filter(|_| ticket.is_of_neighbours());
        let section = cpu.section();
        let entry = self.view(cpu, &section).at(page).ok_or(Abort::Unmapped)?;
        let vma = entry.get();
        if !access.allowed_by(vma.prot()) {
            return Err(Abort::Access);
        }
        if access == Access::Read {
            cpu.count(Counter::ReadFaultLocked);
        }
        let attempt = Attempt { cpu, space: self, vma, ticket, page, access, ahead };
        mem_policy::place(cpu, vma, page, access, prepared);
        attempt.serve(prepared)
    }
}

impl<M: Machine> Attempt<'_, '_, M> {
    /// The single path of all faults. The common case comes first; all others continue in
    /// [`prefault::serve`] or [`serve_slow`].
    #[inline(always)]
    fn serve(self, prepared: &mut Prepared) -> Result<FaultKind, Abort> {
        reads(self.vma.memory());
        // SAFETY: the attempt runs in a grace section, which outlives the reference.
        let reached = unsafe { descend(self.cpu.vm().machine(), self.space.root(), self.page) };
        let table = match reached {
            Reached::Last(table) => table,
            Reached::Above { .. } => {
                let Self { cpu, space, vma, ticket, page, access, .. } = self;
                match table::way_of(cpu, space, vma, ticket, page, access, prepared)? {
                    table::Way::Table(table) => table,
                    table::Way::Served(kind) => return Ok(kind),
                }
            }
        };
        let write = self.access == Access::Write;
        // The first store to a VMA makes its anon_vma and takes the long path, as does a store that
        // finds the slot sealed.
        if self.vma.memory().is_anonymous()
            && (!write || self.vma.anon_vma.get().is_some())
            && self.ahead.is_none_or(|thread| self.skips_prediction(thread, table))
        {
            let slot = &table[node::index(self.page, LAST)];
            if node::load(slot).is_none() {
                let done = if write {
                    self.write_untouched(prepared, slot)?
                } else {
                    self.read_untouched(slot)?
                };
                if let Some(kind) = done {
                    return Ok(kind);
                }
            }
        }
        let Self { cpu, space, vma, ticket, page, access, ahead } = self;
        match ahead {
            Some(thread) => {
                prefault::serve(cpu, space, vma, ticket, page, access, thread, table, prepared)
            }
            None => serve_slow(cpu, space, vma, ticket, page, access, table, prepared),
        }
    }

    /// Serves a fault on an entry that is not empty. `None`: retry.
    fn serve_nonempty(
        self,
        prepared: &mut Prepared,
        slot: &AtomicU64,
        seen: Entry,
    ) -> Result<Option<FaultKind>, Abort> {
        if seen.is_locked() {
            protocol::wait_and_load(slot, self.cpu);
            return Ok(None);
        }
        if !seen.is_present() {
            if seen.is_swapped() {
                mem_policy::prepare(self.cpu, self.vma, self.page, prepared);
                return self.map_swapped(prepared, slot, seen);
            }
            debug_assert!(seen.is_hidden(), "{seen:?}");
            // This VMA allows the access, so a writer has changed the entry concurrently.
            return Err(Abort::VmaChanged);
        }
        if self.access == Access::Write && !seen.is_writable() {
            return self.write_protected(prepared, slot, seen);
        }
        // The entry already allows the access. This CPU may have cached an older entry.
        let page = VirtRange::page(self.page);
        self.cpu.vm().machine().invalidate(self.cpu.id(), self.space.id(), Invalidate::Range(page));
        self.cpu.count(Counter::Spurious);
        Ok(Some(FaultKind::Spurious))
    }
}

/// The rest of [`Attempt::serve`] for the faulting page alone, with any entry. Receives the fields
/// of an attempt separately, so that they stay in registers on the common path.
#[cold]
#[inline(never)]
#[expect(clippy::too_many_arguments, reason = "the arguments are the parts of an attempt")]
fn serve_slow<M: Machine>(
    cpu: &Cpu<'_, M>,
    space: &Space<M>,
    vma: &Vma,
    ticket: Ticket<'_>,
    page: u64,
    access: Access,
    table: &[AtomicU64; ENTRIES],
    prepared: &mut Prepared,
) -> Result<FaultKind, Abort> {
    let attempt = Attempt { cpu, space, vma, ticket, page, access, ahead: None };
    let slot = &table[node::index(page, LAST)];
    loop {
        let seen = node::load(slot);
        let done = if seen.is_none() {
            match (vma.memory(), access) {
                (PageSource::Anonymous, Access::Write) => {
                    attempt.prepare_anon_vma()?;
                    attempt.write_untouched(prepared, slot)?
                }
                (PageSource::Anonymous, Access::Read | Access::Execute) => {
                    attempt.read_untouched(slot)?
                }
                (PageSource::Object(object), Access::Write) if vma.is_private() => {
                    attempt.copy_object_page(prepared, object, slot)?
                }
                (PageSource::Object(object), _) => attempt.map_object(prepared, object, table)?,
                (PageSource::Device { .. }, _) => attempt.map_device(table)?,
            }
        } else {
            attempt.serve_nonempty(prepared, slot, seen)?
        };
        if let Some(kind) = done {
            return Ok(kind);
        }
    }
}
