//! The counted cases: faults and calls on the bare machine, on one CPU.
//!
//! Each case prepares a space, then makes its faults or calls through the [functions](COUNTED) on
//! which the profiler's collection is toggled, and ends in [a function](CASE_END) at which the
//! profiler writes a part. The counters confirm that the faults were served in the way intended by
//! the case.

use super::run::{BareSpace, Run, faultless_bench_case_end};
use crate::idle::Idle;
use crate::machine::BareMachine;
use crate::prefault::scattered;
use faultless::{
    Access, Advice, AnonVmaCheck, Backing, Counter, CpuId, Locking, MapFlags, Object, PAGE_SIZE,
    Prot, Setting, Space, Vm,
};
use std::sync::Arc;

/// Pages of a case.
pub const PAGES: u64 = 4096;
/// Calls of a case in which each call is one operation.
pub(super) const CALLS: u64 = 1000;
/// Pages per read of a store.
pub(super) const RUN: u64 = 16;
/// Pages mapped by a huge leaf.
const HUGE: u64 = 512;
/// Pages of the area mapped by such a call.
pub(super) const CALL_PAGES: u64 = 16;
/// The symbols between whose entry and return instructions are counted.
pub const COUNTED: [&str; 3] =
    ["faultless_bench_fault_remote", "faultless_bench_fault", "faultless_bench_call"];
/// The symbol whose return ends a case.
pub const CASE_END: &str = "faultless_bench_case_end";

/// The address of file mappings, aligned to whole blocks of pages.
const MAPPED_AT: u64 = 1 << 30;

/// The number of pages per touched page in a scattered case.
const SPARSE: u64 = 16;

pub(super) const RW: Prot = Prot::READ.union(Prot::WRITE);
pub(super) const PRIVATE: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS);

/// The operation of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// First writes to consecutive pages.
    Write,
    /// First writes to consecutive pages, for which a pool has zeroed frames.
    PooledWrite,
    /// Stores of a thread to consecutive pages, prefaulted in windows of up to 2^`order`.
    Ahead {
        /// The knob.
        order: u8,
        /// Whether a pool has zeroed frames.
        pooled: bool,
    },
    /// Stores of a thread to pages scattered over an area, the same with every order.
    Scattered {
        /// The knob.
        order: u8,
    },
    /// Stores of a thread to one page in 16, upwards, so that no page has a touched neighbour.
    Sparse {
        /// The knob.
        order: u8,
    },
    /// First reads of consecutive pages.
    Read,
    /// Writes to pages with earlier reads only.
    WriteAfterRead,
    /// Writes to pages that were shared with a child, which has exited.
    Reuse,
    /// Writes to pages shared with a child.
    Copy,
    /// First writes to areas of one page each, each of which gets a new anon_vma.
    WriteFirst,
    /// First reads of a shared mapping of a file with resident pages, including fault-around.
    FileRead,
    /// First reads of such a mapping, each for its own page only.
    FileReadOne,
    /// First writes to such a mapping.
    FileWrite,
    /// First writes to a private mapping of such a file.
    FileCopy,
    /// First reads of a shared mapping of a file with a store, whose pages are read in runs of 16.
    /// The store itself does no work.
    FileMajor,
    /// First writes to a shared mapping of such a file, whose pages are in the page cache: each
    /// write is recorded.
    StoredWrite,
    /// First writes to a private mapping of such a file.
    StoredCopy,
    /// Eviction of the clean pages of such a file, mapped by one space, all in one call.
    Evict,
    /// Paging out written private pages to a swap area, all in one call. The store itself does no
    /// work.
    SwapOut,
    /// First fetches from a mapping of text in an unread file with a store: each reads and maps 512
    /// pages.
    HugeRead,
    /// The same for text that another space has already mapped with huge leaves.
    HugeMap,
    /// Unmapping touched pages, all in one call.
    Unmap,
    /// Mapping 16 pages and unmapping them untouched, in the space of a small program.
    MapUnmap,
    /// Mapping 16 pages, writing to one and unmapping all, in the space of a small program.
    MapTouchUnmap,
    /// Growing the heap of a small program by a page, and shrinking it again.
    Break,
    /// Removing write permission from a page in the middle of 16 written pages, and restoring it.
    Protect,
    /// Moving touched pages to another memory node, all in one call.
    Migrate,
    /// Forking a space of touched pages.
    Fork,
    /// Forking a space of touched pages, and ending the child.
    ForkExit,
}

/// The operation, and the settings.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// The operation.
    pub what: What,
    /// The locking policy.
    pub locking: Locking,
    /// With `early`, faults on areas without an anon_vma abort their speculation: the
    /// locked fallback.
    pub check: AnonVmaCheck,
    /// Whether another CPU runs the space, too, so that the space has no owner.
    pub shared: bool,
    /// Whether a promise depends on the case.
    pub gated: bool,
}

/// Every case, in the order of the parts.
pub fn all(quick: bool) -> Vec<Case> {
    use What::{
        Ahead, Break, Copy, Evict, FileCopy, FileMajor, FileRead, FileReadOne, FileWrite, Fork,
        ForkExit, HugeMap, HugeRead, MapTouchUnmap, MapUnmap, Migrate, PooledWrite, Protect, Read,
        Reuse, Scattered, Sparse, StoredCopy, StoredWrite, SwapOut, Unmap, Write, WriteAfterRead,
        WriteFirst,
    };
    let anonymous = [Write, Read, Reuse, Copy];
    let files =
        [FileRead, FileWrite, FileCopy, FileMajor, StoredWrite, StoredCopy, HugeRead, HugeMap];
    let faults: Vec<_> = anonymous.into_iter().chain(files).collect();
    let others = [PooledWrite, FileReadOne, WriteFirst, WriteAfterRead];
    let calls =
        [Unmap, MapUnmap, MapTouchUnmap, Break, Protect, Fork, ForkExit, Evict, SwapOut, Migrate];
    let mut cases = Vec::new();
    let ahead = [(0, false), (0, true), (3, false), (3, true), (5, false), (5, true)]
        .map(|(order, pooled)| Ahead { order, pooled });
    let scattered = [0, 3, 5].map(|order| Scattered { order });
    let sparse = [0, 3, 5].map(|order| Sparse { order });
    for what in faults.iter().copied().chain(others).chain(calls) {
        for locking in [Locking::Speculative, Locking::PerVma, Locking::MmapLock] {
            let gated = faults.contains(&what)
                || (calls.contains(&what) && locking == Locking::Speculative);
            cases.push(Case { what, locking, check: AnonVmaCheck::Late, gated, shared: false });
        }
        if matches!(what, Read | WriteFirst) {
            let (locking, check) = (Locking::Speculative, AnonVmaCheck::Early);
            cases.push(Case { what, locking, check, gated: false, shared: false });
        }
    }
    for what in ahead.into_iter().chain(scattered).chain(sparse) {
        let (locking, check) = (Locking::Speculative, AnonVmaCheck::Late);
        cases.push(Case { what, locking, check, gated: true, shared: false });
    }
    for what in [MapUnmap, Break] {
        let (locking, check) = (Locking::Speculative, AnonVmaCheck::Late);
        cases.push(Case { what, locking, check, gated: true, shared: true });
    }
    cases.retain(|case| case.gated || !quick);
    cases
}

impl Case {
    /// Returns the name of the operation.
    pub const fn workload(&self) -> &'static str {
        match self.what {
            What::Write => "anonymous_write_fault",
            What::PooledWrite => "pooled_write_fault",
            What::Ahead { .. } => "sequential_write_per_page",
            What::Scattered { .. } => "scattered_write_fault",
            What::Sparse { .. } => "sparse_write_fault",
            What::Read => "anonymous_read_fault",
            What::WriteAfterRead => "write_after_read_fault",
            What::Reuse => "cow_reuse_fault",
            What::Copy => "cow_copy_fault",
            What::WriteFirst => "first_write_of_area_fault",
            What::FileRead => "file_read_per_page",
            What::FileReadOne => "file_read_fault",
            What::FileWrite => "file_shared_write_fault",
            What::FileCopy => "file_private_write_fault",
            What::FileMajor => "file_major_fault_per_page",
            What::StoredWrite => "stored_shared_write_fault",
            What::StoredCopy => "stored_private_write_fault",
            What::Evict => "evict_per_page",
            What::SwapOut => "swap_out_per_page",
            What::HugeRead => "huge_text_read_per_page",
            What::HugeMap => "huge_text_map_per_page",
            What::Unmap => "munmap_per_page",
            What::MapUnmap => "mmap_munmap_pair",
            What::MapTouchUnmap => "mmap_touch_munmap",
            What::Break => "brk_pair",
            What::Protect => "mprotect_pair",
            What::Migrate => "migrate_per_page",
            What::Fork => "fork_per_page",
            What::ForkExit => "fork_exit_per_page",
        }
    }

    /// Returns its settings, in the form of the knobs.
    pub fn setting(&self) -> String {
        let (locking, check) = (self.locking.name(), self.check.name());
        match (self.what, self.check) {
            (What::Ahead { order, pooled: true }, _) => {
                format!("prefault_max_order={order} zeroed_pool={}", self.pool())
            }
            (What::Ahead { order, .. } | What::Scattered { order } | What::Sparse { order }, _) => {
                format!("prefault_max_order={order}")
            }
            (_, AnonVmaCheck::Late) if self.shared => {
                format!("locking={locking} (another CPU runs the space)")
            }
            (_, AnonVmaCheck::Late) => format!("locking={locking}"),
            (_, AnonVmaCheck::Early) => {
                format!("locking={locking} anon_vma_check={check} (fallback)")
            }
        }
    }

    /// Returns the number of frames that the pool may hold.
    const fn pool(&self) -> u64 {
        match self.what {
            What::PooledWrite | What::Ahead { pooled: true, .. } => PAGES + 64,
            _ => 0,
        }
    }

    /// Returns the number of counted operations.
    pub const fn operations(&self) -> u64 {
        match self.what {
            What::MapUnmap | What::MapTouchUnmap | What::Break | What::Protect => CALLS,
            _ => PAGES,
        }
    }

    /// Returns the number of pages zeroed or copied by an operation, which are subtracted from the
    /// cost.
    pub const fn pages_filled(&self) -> u64 {
        match self.what {
            What::Write
            | What::WriteFirst
            | What::WriteAfterRead
            | What::Copy
            | What::FileCopy
            | What::StoredCopy
            | What::Migrate
            | What::Ahead { pooled: false, .. }
            | What::Scattered { .. }
            | What::Sparse { .. } => PAGES,
            What::MapTouchUnmap => CALLS,
            _ => 0,
        }
    }

    /// Runs the case.
    ///
    /// # Errors
    /// The faults were not served in the intended way.
    pub fn run(&self) -> Result<(), String> {
        // Two frames per page for copies, and page tables.
        let frames = 2 * PAGES as u32 + 512;
        let nodes: &[_] = if self.what == What::Migrate { &[frames; 2] } else { &[frames] };
        let vm = Vm::new(BareMachine::of_nodes(if self.shared { 2 } else { 1 }, nodes))
            .map_err(|errno| format!("the machine: {errno:?}"))?;
        vm.set(Setting::Locking(self.locking));
        vm.set(Setting::AnonVmaCheck(self.check));
        // Cases with prefault set the order themselves.
        vm.set(Setting::PrefaultMaxOrder(0));
        // SAFETY: the only `Cpu` of this CPU.
        let cpu = unsafe { vm.cpu(CpuId(0)) };
        // SAFETY: as above, for a CPU of the machine if used.
        let other = self.shared.then(|| unsafe { vm.cpu(CpuId(1)) });
        vm.set(Setting::ZeroedPool(self.pool()));
        cpu.zero_ahead(usize::MAX);
        let space = Space::new(&cpu).map_err(|error| error.to_string())?;
        space.activate(&cpu);
        if let Some(other) = &other {
            space.activate(other);
        }
        let before = vm.totals();
        let run = Run { space: &space, cpu: &cpu };
        if self.operations() == CALLS {
            run.load_program()?;
        }
        let (kind, count) = self.work(&run).map_err(|error| format!("{self:?}: {error}"))?;
        let since = vm.totals().since(&before);
        let expected = [(kind, count), self.served_by(count)];
        for (counter, expected) in expected {
            let got = since.get(counter);
            if got != expected {
                return Err(format!("{self:?}: {} is {got}, not {expected}", counter.name()));
            }
        }
        for cpu in other.iter().chain([&cpu]) {
            // SAFETY: the program has ended.
            unsafe { space.deactivate(cpu) };
        }
        space.exit(&cpu);
        Ok(())
    }

    /// Returns the counter of the expected path of all `faults` faults, and the expected value.
    const fn served_by(&self, faults: u64) -> (Counter, u64) {
        match (self.locking, self.check) {
            (Locking::Speculative, AnonVmaCheck::Early) => (Counter::RangeLockFault, PAGES),
            (Locking::Speculative, AnonVmaCheck::Late) => (Counter::RangeLockFault, 0),
            (Locking::PerVma, _) => (Counter::MmapLockRead, self.roots_locked(faults)),
            (Locking::MmapLock, _) => (Counter::Spf, 0),
        }
    }

    /// Returns the number of faults under a VMA's lock that must take the space's lock, for an
    /// anon_vma.
    const fn roots_locked(&self, faults: u64) -> u64 {
        match self.what {
            What::Read
            | What::MapUnmap
            | What::FileRead
            | What::FileReadOne
            | What::FileWrite
            | What::StoredWrite => 0,
            // The faults of the other space only, half of which find that the pages must be read.
            What::HugeMap => faults,
            // Once under the space's lock to find that the page must be read, and once to find the
            // page.
            What::FileMajor | What::HugeRead => 2 * faults,
            What::WriteFirst | What::MapTouchUnmap => faults,
            // The area's anon_vma, and the advice.
            What::SwapOut => 2,
            // The pages of the heap, the area, or both have one anon_vma each.
            _ => 1,
        }
    }

    /// Does the work. Returns the counter to check and its expected value.
    fn work(&self, run: &Run<'_, '_>) -> Result<(Counter, u64), String> {
        let faults = match self.what {
            What::Write | What::PooledWrite => {
                run.fault_each(run.map(PAGES)?, 1, Access::Write)?;
                Counter::AnonPage
            }
            What::Ahead { order, .. } => return run.write_ahead(order, PAGES, |at| at),
            What::Scattered { order } => {
                let pages = SPARSE * PAGES;
                return run.write_ahead(order, pages, |at| scattered(at, pages.ilog2()));
            }
            What::Sparse { order } => {
                return run.write_ahead(order, SPARSE * PAGES, |at| SPARSE * at);
            }
            What::Read => {
                run.fault_each(run.map(PAGES)?, 1, Access::Read)?;
                Counter::ZeroPage
            }
            What::WriteAfterRead => {
                let area = run.map(PAGES)?;
                run.touch(area, Access::Read)?;
                run.fault_each(area, 1, Access::Write)?;
                Counter::CowCopy
            }
            What::Reuse | What::Copy => {
                let area = run.map(PAGES)?;
                run.touch(area, Access::Write)?;
                let child = run.space.fork(run.cpu).map_err(|error| error.to_string())?;
                if self.what == What::Reuse {
                    child.exit(run.cpu);
                    run.fault_each(area, 1, Access::Write)?;
                    Counter::CowReuse
                } else {
                    run.fault_each(area, 1, Access::Write)?;
                    child.exit(run.cpu);
                    Counter::CowCopy
                }
            }
            What::WriteFirst => {
                let area = run.map(2 * PAGES)?;
                for page in 0..PAGES {
                    run.space
                        .munmap(run.cpu, area + (2 * page + 1) * PAGE_SIZE, PAGE_SIZE)
                        .map_err(|error| error.to_string())?;
                }
                run.fault_each(area, 2, Access::Write)?;
                Counter::AnonPage
            }
            What::FileRead
            | What::FileReadOne
            | What::FileWrite
            | What::FileCopy
            | What::FileMajor
            | What::StoredWrite
            | What::StoredCopy
            | What::Evict
            | What::HugeRead
            | What::HugeMap => return self.map_a_file(run),
            What::Unmap => {
                let area = run.map(PAGES)?;
                run.touch(area, Access::Write)?;
                run.call(&mut || run.unmap(area, PAGES))?;
                Counter::AnonPage
            }
            What::MapUnmap => {
                run.calls(&|| {
                    let area = run.map(CALL_PAGES)?;
                    run.unmap(area, CALL_PAGES)
                })?;
                return Ok((Counter::Faults, 0));
            }
            What::MapTouchUnmap => {
                run.calls(&|| {
                    let area = run.map(CALL_PAGES)?;
                    run.fault(area, Access::Write)?;
                    run.unmap(area, CALL_PAGES)
                })?;
                return Ok((Counter::AnonPage, CALLS + 1));
            }
            What::Break => {
                let start = run.space.brk(run.cpu, 0);
                let end = start + CALL_PAGES * PAGE_SIZE;
                let set = |to| {
                    let now = run.space.brk(run.cpu, to);
                    if now == to { Ok(()) } else { Err(format!("brk({to:#x}) is {now:#x}")) }
                };
                set(end)?;
                run.fault(start, Access::Write)?;
                run.calls(&|| set(end + PAGE_SIZE).and_then(|()| set(end)))?;
                return Ok((Counter::AnonPage, 1));
            }
            What::Protect => {
                let area = run.map(CALL_PAGES)?;
                for page in 0..CALL_PAGES {
                    run.fault(area + page * PAGE_SIZE, Access::Write)?;
                }
                let middle = area + CALL_PAGES / 2 * PAGE_SIZE;
                let set = |prot| {
                    let set = run.space.mprotect(run.cpu, middle, PAGE_SIZE, prot);
                    set.map_err(|error| error.to_string())
                };
                run.calls(&|| set(Prot::READ).and_then(|()| set(RW)))?;
                return Ok((Counter::AnonPage, CALL_PAGES));
            }
            What::Migrate => {
                let area = run.map(PAGES)?;
                run.touch(area, Access::Write)?;
                let pages: Vec<_> = (0..PAGES).map(|page| area + page * PAGE_SIZE).collect();
                let mut nodes = vec![Ok(0); pages.len()];
                run.call(&mut || {
                    let moved = run.space.move_pages(run.cpu, &pages, 1, false, &mut nodes);
                    moved.map_err(|error| error.to_string())
                })?;
                faultless_bench_case_end();
                return Ok((Counter::MigrateSuccess, PAGES));
            }
            What::SwapOut => {
                let store = Arc::new(Idle { pages: PAGES, preferred: RUN as usize });
                run.cpu.swap_on(store).map_err(|errno| format!("the swap area: {errno:?}"))?;
                let area = run.map(PAGES)?;
                run.touch(area, Access::Write)?;
                run.call(&mut || {
                    let out = run.space.madvise(run.cpu, area, PAGES * PAGE_SIZE, Advice::PageOut);
                    out.map_err(|error| error.to_string())
                })?;
                faultless_bench_case_end();
                return Ok((Counter::SwapOut, PAGES));
            }
            What::ForkExit => {
                let area = run.map(PAGES)?;
                run.touch(area, Access::Write)?;
                run.call(&mut || {
                    let child = run.space.fork(run.cpu).map_err(|error| error.to_string())?;
                    child.exit(run.cpu);
                    Ok(())
                })?;
                Counter::AnonPage
            }
            What::Fork => {
                let area = run.map(PAGES)?;
                run.touch(area, Access::Write)?;
                let mut child = None;
                run.call(&mut || {
                    child = Some(run.space.fork(run.cpu).map_err(|error| error.to_string())?);
                    Ok(())
                })?;
                if let Some(child) = child {
                    child.exit(run.cpu);
                }
                Counter::AnonPage
            }
        };
        faultless_bench_case_end();
        Ok((faults, PAGES))
    }

    /// The cases of files.
    fn map_a_file(&self, run: &Run<'_, '_>) -> Result<(Counter, u64), String> {
        let object = match self.what {
            What::FileMajor
            | What::StoredWrite
            | What::StoredCopy
            | What::Evict
            | What::HugeRead
            | What::HugeMap => run.stored()?,
            _ => run.file()?,
        };
        if matches!(self.what, What::StoredWrite | What::StoredCopy | What::Evict) {
            object.read_ahead(run.cpu, 0..PAGES).map_err(|errno| format!("a file: {errno:?}"))?;
        }
        let copies = matches!(self.what, What::FileCopy | What::StoredCopy);
        let kind = if copies { MapFlags::PRIVATE } else { MapFlags::SHARED };
        let (access, around, expected) = match self.what {
            What::FileRead => {
                let around = run.cpu.vm().knobs().fault_around_pages() as u64;
                (Access::Read, around, (Counter::AroundPage, PAGES / around * (around - 1)))
            }
            What::FileReadOne => (Access::Read, 1, (Counter::SharedPage, PAGES)),
            What::Evict => (Access::Read, 1, (Counter::PageStolen, PAGES)),
            What::FileMajor => (Access::Read, RUN, (Counter::MajorFault, PAGES / RUN)),
            What::FileWrite | What::StoredWrite => (Access::Write, 1, (Counter::SharedPage, PAGES)),
            // Includes the other space's count.
            What::HugeMap => (Access::Execute, HUGE, (Counter::ThpFileMapped, 2 * PAGES / HUGE)),
            What::HugeRead => (Access::Execute, HUGE, (Counter::ThpFileMapped, PAGES / HUGE)),
            _ => (Access::Write, 1, (Counter::CowCopy, PAGES)),
        };
        run.cpu.vm().set(Setting::FaultAroundPages(around));
        let text = matches!(self.what, What::HugeRead | What::HugeMap);
        let prot = if text { Prot::READ | Prot::EXEC } else { RW };
        let other = Space::new(run.cpu).map_err(|error| error.to_string())?;
        let at = MAPPED_AT;
        let flags = kind | MapFlags::FIXED;
        let map = |space: &BareSpace| {
            let backing = Backing { object: &object, first: 0, may_write: true };
            let mapped = space.mmap_object(run.cpu, at, PAGES * PAGE_SIZE, prot, flags, backing);
            mapped.map_err(|error| error.to_string())
        };
        map(run.space)?;
        if self.what == What::HugeMap {
            map(&other)?;
            for first in (0..PAGES).step_by(HUGE as usize) {
                let fetched = other.fault_remote(run.cpu, at + first * PAGE_SIZE, access);
                fetched.map_err(|error| error.to_string())?;
            }
        }
        if self.what == What::Evict {
            run.touch(at, access)?;
            run.call(&mut || {
                let evicted = run.space.madvise(run.cpu, at, PAGES * PAGE_SIZE, Advice::PageOut);
                evicted.map_err(|error| error.to_string())
            })?;
        } else {
            run.fault_some(at, PAGES / around, around, access)?;
        }
        faultless_bench_case_end();
        other.exit(run.cpu);
        Object::release(object, run.cpu);
        Ok(expected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_takes_its_intended_path() {
        for case in all(false) {
            case.run().unwrap();
        }
    }
}
