//! The faults and calls of a case: in one space, on one CPU.

use super::cases::{CALL_PAGES, CALLS, PAGES, PRIVATE, RUN, RW};
use crate::idle::Idle;
use crate::machine::BareMachine;
use faultless::{
    Access, Counter, Cpu, FaultError, FaultKind, MapFlags, Object, PAGE_SIZE, Prot, Setting,
    Shared, Space, ThreadStreams,
};
use std::hint::black_box;
use std::sync::Arc;

/// The address of a small program.
const PROGRAM: u64 = 0x40_0000;
/// The address of its stack.
const STACK: u64 = 0x7fff_fff0_0000;

pub(super) type BareSpace = Space<BareMachine>;
pub(super) type BareCpu<'v> = Cpu<'v, BareMachine>;

/// Makes one fault, as a machine's trap handler would.
#[inline(never)]
#[unsafe(no_mangle)]
fn faultless_bench_fault_remote(
    space: &BareSpace,
    cpu: &BareCpu<'_>,
    addr: u64,
    access: Access,
) -> Result<FaultKind, FaultError> {
    space.fault_remote(cpu, addr, access)
}

/// Makes one fault of a thread with prefault.
#[inline(never)]
#[unsafe(no_mangle)]
fn faultless_bench_fault(
    space: &BareSpace,
    cpu: &BareCpu<'_>,
    thread: &ThreadStreams,
    addr: u64,
) -> Result<FaultKind, FaultError> {
    space.fault(cpu, thread, addr, Access::Write)
}

/// Makes one call of the subsystem.
#[inline(never)]
#[unsafe(no_mangle)]
fn faultless_bench_call(call: &mut dyn FnMut()) {
    call();
}

/// Ends a case.
#[inline(never)]
#[unsafe(no_mangle)]
pub(super) fn faultless_bench_case_end() {
    black_box(());
}

/// The space and CPU of a case.
pub(super) struct Run<'a, 'v> {
    pub(super) space: &'a BareSpace,
    pub(super) cpu: &'a BareCpu<'v>,
}

impl Run<'_, '_> {
    pub(super) fn map(&self, pages: u64) -> Result<u64, String> {
        self.space
            // More than the memory: only some pages of a large area are touched.
            .mmap(self.cpu, None, pages * PAGE_SIZE, RW, PRIVATE | MapFlags::NORESERVE)
            .map_err(|error| error.to_string())
    }

    pub(super) fn unmap(&self, area: u64, pages: u64) -> Result<(), String> {
        let unmapped = self.space.munmap(self.cpu, area, pages * PAGE_SIZE);
        unmapped.map_err(|error| error.to_string())
    }

    /// Maps the initial areas of a small program, because calls rarely find an empty space.
    pub(super) fn load_program(&self) -> Result<(), String> {
        let text = Prot::READ | Prot::EXEC;
        let areas = [Prot::READ, text, Prot::READ, RW, text, Prot::READ, RW];
        for (at, prot) in (0..).zip(areas) {
            let flags = PRIVATE | MapFlags::FIXED;
            let start = PROGRAM + at * CALL_PAGES * PAGE_SIZE;
            let mapped = self.space.mmap(self.cpu, start, CALL_PAGES * PAGE_SIZE, prot, flags);
            mapped.map_err(|error| error.to_string())?;
        }
        let flags = PRIVATE | MapFlags::FIXED | MapFlags::GROWSDOWN;
        let mapped = self.space.mmap(self.cpu, STACK, CALL_PAGES * PAGE_SIZE, RW, flags);
        mapped.map(drop).map_err(|error| error.to_string())
    }

    /// Faults one page in.
    pub(super) fn fault(&self, addr: u64, access: Access) -> Result<(), String> {
        self.space
            .fault_remote(self.cpu, addr, access)
            .map(drop)
            .map_err(|error| format!("{error:?}"))
    }

    /// Makes a call once to create its prerequisites, and then [`CALLS`] times, counted.
    pub(super) fn calls(&self, call: &dyn Fn() -> Result<(), String>) -> Result<(), String> {
        call()?;
        for _ in 0..CALLS {
            self.call(&mut || call())?;
        }
        faultless_bench_case_end();
        Ok(())
    }

    /// Faults [`PAGES`] pages in, at a distance of `step` pages; counted.
    pub(super) fn fault_each(&self, area: u64, step: u64, access: Access) -> Result<(), String> {
        self.fault_some(area, PAGES, step, access)
    }

    /// Faults `count` pages in, at a distance of `step` pages; counted.
    pub(super) fn fault_some(
        &self,
        area: u64,
        count: u64,
        step: u64,
        access: Access,
    ) -> Result<(), String> {
        for page in 0..count {
            let addr = area + page * step * PAGE_SIZE;
            faultless_bench_fault_remote(self.space, self.cpu, addr, access)
                .map_err(|error| format!("{error:?}"))?;
        }
        Ok(())
    }

    /// Stores to [`PAGES`] pages of an area of `pages` by one thread, in the order of `place`, with
    /// up to 2^`order` pages per fault. The faults are counted.
    pub(super) fn write_ahead(
        &self,
        order: u8,
        pages: u64,
        place: impl Fn(u64) -> u64,
    ) -> Result<(Counter, u64), String> {
        let (vm, thread) = (self.cpu.vm(), ThreadStreams::new());
        vm.set(Setting::PrefaultMaxOrder(order));
        let area = self.map(pages)?;
        let mut faults = 0;
        for addr in (0..PAGES).map(|at| area + place(at) * PAGE_SIZE) {
            let access = || vm.machine().access(self.space.root(), addr);
            if !access() {
                faultless_bench_fault(self.space, self.cpu, &thread, addr)
                    .map_err(|error| format!("{error:?}"))?;
                faults += 1;
                if !access() {
                    return Err(format!("{addr:#x} is not mapped after its fault"));
                }
            }
        }
        faultless_bench_case_end();
        Ok((Counter::AnonPage, faults))
    }

    /// Creates a file of [`PAGES`] resident pages.
    pub(super) fn file(&self) -> Result<Shared<Object>, String> {
        let refused = |errno| format!("a file: {errno:?}");
        let object = Object::try_new(self.cpu, PAGES, 1).map_err(refused)?;
        for index in 0..PAGES {
            object.write_page(self.cpu, index, |_| ()).map_err(refused)?;
        }
        Ok(object)
    }

    /// Creates a file of [`PAGES`] pages in a store.
    pub(super) fn stored(&self) -> Result<Shared<Object>, String> {
        Object::of_store(self.cpu, Arc::new(Idle { pages: PAGES, preferred: RUN as usize }), 1)
            .map_err(|errno| format!("a file: {errno:?}"))
    }

    /// Faults [`PAGES`] pages in; not counted.
    pub(super) fn touch(&self, area: u64, access: Access) -> Result<(), String> {
        for page in 0..PAGES {
            self.fault(area + page * PAGE_SIZE, access)?;
        }
        Ok(())
    }

    /// Makes a call; counted.
    pub(super) fn call(&self, call: &mut dyn FnMut() -> Result<(), String>) -> Result<(), String> {
        let mut answer = Ok(());
        faultless_bench_call(&mut || answer = call());
        answer
    }
}
