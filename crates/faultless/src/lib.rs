//! faultless: a virtual-memory subsystem that serves page faults without a lock.
//!
//! For people who build kernels, unikernels, hypervisors and emulators. The subsystem requires a
//! [`Machine`] (memory, CPUs, their TLBs, interrupts between CPUs) and provides address spaces with
//! Linux's calls and errors, whose faults take no lock.
//!
//! ```
//! use faultless::{Access, CpuId, FrameNumber, Invalidate, Machine, MapFlags, MemoryRegion, Prot};
//! use faultless::prefault::Streams;
//! use faultless::{PAGE_SIZE, Space, SpaceId, ThreadStreams, Vm};
//!
//! /// One CPU without a TLB, and 16 MiB of memory.
//! struct Tiny {
//!     memory: *mut u8,
//!     regions: [MemoryRegion; 1],
//! }
//!
//! unsafe impl Send for Tiny {}
//! unsafe impl Sync for Tiny {}
//! unsafe impl Machine for Tiny {
//!     type Predictor = Streams;
//!     fn cpus(&self) -> usize { 1 }
//!     fn regions(&self) -> &[MemoryRegion] { &self.regions }
//!     fn frame_bytes(&self, frame: FrameNumber) -> *mut u8 {
//!         unsafe { self.memory.add((frame.0 as u64 * PAGE_SIZE) as usize) }
//!     }
//!     fn invalidate(&self, _: CpuId, _: SpaceId, _: Invalidate) {}
//!     fn invalidate_all(&self, _: CpuId) {}
//!     fn interrupt(&self, _: CpuId) {}
//! }
//!
//! let layout = std::alloc::Layout::from_size_align(16 << 20, 4096).unwrap();
//! let memory = unsafe { std::alloc::alloc(layout) };
//! let regions = [MemoryRegion { node: 0, first: FrameNumber(1), frames: 4095 }];
//! let vm = Vm::new(Tiny { memory, regions }).unwrap();
//! let cpu = unsafe { vm.cpu(CpuId(0)) };
//!
//! let space = Space::new(&cpu)?;
//! let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS;
//! let at = space.mmap(&cpu, None, 1 << 20, Prot::READ | Prot::WRITE, flags)?;
//! space.activate(&cpu); // and load the page-table base with `space.root()`
//! let thread = ThreadStreams::new(); // one for each thread of your programs
//! space.fault(&cpu, &thread, at, Access::Write).unwrap(); // what your page-fault handler calls
//! print!("{}{}", space.maps(&cpu), vm.totals());
//! unsafe { space.deactivate(&cpu) }; // once another root is loaded
//! space.exit(&cpu);
//! # Ok::<(), faultless::Error>(())
//! ```
//!
//! # Terms
//!
//! A **space** ([`Space`]) is an address space: its VMAs, their tree, and its page tables. A CPU
//! runs one space at a time, from [`Space::activate`] to [`Space::deactivate`].
//!
//! A **fault** is an access that the MMU could not translate. The kernel's handler calls
//! [`Space::fault`], which finds the VMA, prepares a page and installs its page-table entry; then
//! the access is retried.
//!
//! A fault takes no lock, so an `munmap` may run concurrently on another CPU. Each VMA has a
//! sequence count: even while the VMA is in force, permanently odd after a call has detached the
//! VMA. The count read by the fault is its **ticket**. The fault takes the entry (makes the entry
//! *busy*), validates the ticket, and only then stores the page. `munmap` first makes the count
//! odd, and then waits for busy entries and empties all entries. So either the fault sees the odd
//! count and aborts, or `munmap` sees the entry and removes the page:
//!
//! ```text
//!  CPU 0: fault                              CPU 1: munmap
//!  ------------                              -------------
//!  open a grace section
//!  find the VMA, read its sequence: 4
//!  prepare a zeroed frame
//!                                            sequence: 4 -> 5 (odd: detached), full fence
//!                                            publish the tree without the VMA
//!  entry: none -> busy
//!  validate: the sequence is 5, not 4        meet the busy entry, wait
//!  entry: busy -> none                       entry is none: nothing to unmap
//!  close the section                         flush the TLBs, drop what was unmapped
//!  try again under a lock: SIGSEGV           retire the VMA
//!                                              ... both epochs pass: free the VMA
//!
//!  Had CPU 0 validated before the step to 5, it would have stored the page; CPU 1 would
//!  have waited for the busy entry, removed the page, flushed it, and then freed the frame.
//! ```
//!
//! A **grace section** is the period in which the fault may read the VMA without a lock. A call
//! does not free an unlinked object at once, but *retires* the object, to be freed after a grace
//! period, when every section open at the time has closed.
//!
//! # The laws
//!
//! 1. *No stale owner.* No CPU reads or writes a frame through a translation older than the frame's
//!    current ownership.
//! 2. *No lost write.* Every later load sees the value of a store.
//! 3. *The entry is the lock.* A successful speculative fault writes one shared cache line, the
//!    line of the installed entry. Exceptions: a fault that copies a frame or maps a page of an
//!    object also writes the count of the frame; a fault that maps surrounding pages writes all
//!    their entries and counts; and the first store to a page of a file with a store also marks the
//!    page's entry in the object dirty.
//! 4. *No signal from speculation.* SIGSEGV, SIGBUS and out-of-memory are decided only under a
//!    lock.
//! 5. *An abort changes nothing.* The prepared page goes to the fallback.
//! 6. *Every frame is accounted for* at any quiet moment: [`audit`].
//! 7. *No reuse before the flush.* No frame is used again while an old translation to the frame may
//!    be in a TLB. The type of a frame (`frame::Frame`) enforces this: only a flush makes a frame
//!    usable.
//! 8. *One path.* The fault has one implementation (`fault`).
//!
//! # In the background
//!
//! The subsystem has no threads of its own. A CPU that runs out of frames frees some in the current
//! call. For work that is better done in advance, a kernel calls [`Cpu::background`], on any of its
//! CPUs and at any rate: in a kernel thread that a timer wakes, and in the idle loop, but never in
//! an interrupt handler. The call returns soon if there is no work. The single calls, for kernels
//! with different rates, and the calls that remain:
//!
//! | call | effect | when |
//! |---|---|---|
//! | [`Cpu::background`] | evicts, balances, zeroes and compacts, within a budget of pages | every few milliseconds, and while a CPU is idle |
//! | [`Cpu::swap_on`] | sets the swap area, so that private pages may be swapped out | once, before memory is short |
//! | [`Cpu::reclaim_ahead`] | evicts pages if few frames are available | while programs wait for pages to be read, or every few milliseconds |
//! | [`Cpu::balance`] | moves pages between fast and slow memory | every few milliseconds on a CPU near fast memory |
//! | [`Cpu::zero_ahead`] | zeroes free frames, as set by the knob `zeroed_pool`, and frees retired objects | while a CPU is idle |
//! | [`Cpu::compact_ahead`] | makes free blocks of 2 MiB, if memory has at least 32 MiB | while a CPU is idle |
//! | [`Space::collapse_text`] | maps program text in use with huge pages | after every second of a program's run time |
//! | [`Shared::write_back`](Shared) | writes dirty pages of a file | by the kernel's rules for dirty files |
//! | [`Cpu::serve_flushes`] | serves flush requests of other CPUs | in every wait loop of the kernel |
//! | [`Cpu::drain`] | returns the frames kept by a CPU | before a CPU stops |
//!
//! # Overview
//!
//! A kernel implements [`Machine`], makes a [`Vm`] and a [`Cpu`] for each of its CPUs, and calls
//! [`Space`] and [`Object`]. The programs in `examples` show this, each in one file: a machine of
//! one CPU, an interpreter with software TLBs, a hypervisor's guest memory, and memory in tiers
//! with a swap area. The kernel implements [`BackingStore`] for the storage of its files; a
//! separate example shows this. [`locks`] contains the subsystem's locks, which its machine may
//! also use; [`audit`] checks that every frame is accounted for; [`KNOBS`] lists the settings;
//! [`Counter`] lists the counters. [`safety`] lists the promises of a kernel, and explains why no
//! safe call can cause undefined behaviour.
//!
//! The rest is private. `cargo doc --document-private-items` shows these modules: `space`
//! contains the calls, one file each; `fault` the fault; `table` the page tables, and
//! `table::protocol` the central protocol; `tlb` flushes and shootdowns; `rmap` the reverse map;
//! `frame` physical memory; `sync` the locks and grace periods, and `sync::order` the lock order.
#![no_std]

extern crate alloc;
#[cfg(any(test, loom, shuttle))]
extern crate std;

mod addr;
pub mod audit;
mod ended;
mod error;
mod fault;
mod file;
mod heap;
mod identity;
mod knob;
mod machine;
mod reclaim;
mod rmap;
pub mod safety;
mod space;
mod stat;
#[cfg(test)]
mod testing;
mod vm;

// Modules used by the models of `tests/` are public only in the builds of the models.
#[cfg(not(any(loom, shuttle)))]
mod frame;
#[cfg(any(loom, shuttle))]
#[doc(hidden)]
pub mod frame;
#[cfg(not(any(loom, shuttle)))]
mod sync;
#[cfg(any(loom, shuttle))]
#[doc(hidden)]
pub mod sync;
#[cfg(not(any(loom, shuttle)))]
mod table;
#[cfg(any(loom, shuttle))]
#[doc(hidden)]
pub mod table;
#[cfg(not(any(loom, shuttle)))]
mod tlb;
#[cfg(any(loom, shuttle))]
#[doc(hidden)]
pub mod tlb;

pub use addr::{
    FrameNumber, PAGE_SHIFT, PAGE_SIZE, VirtRange, is_page_aligned, page_down, page_up,
};
pub use error::{Errno, Error, OutOfMemory};
pub use fault::prefault::ThreadStreams;
pub use fault::{Access, FaultError, FaultKind};
pub use file::{
    BackingStore, Buffer, MOST_PAGES, Object, PendingRead, ReadRun, Reading, SeenErrors, Store,
    StoreError, WriteRun,
};
pub use frame::zeroed::RUN as ZEROED_RUN;
pub use frame::{Census, FrameUse, Imbalance};
pub use heap::{Shared, try_box, try_box_with};
pub use knob::{AnonVmaCheck, HugeText, KNOBS, KnobError, Knobs, Locking, Setting};
pub use machine::{
    CpuId, Invalidate, MAX_CPUS, MAX_NODES, Machine, MemoryRegion, SpaceId, nontemporal_done,
    zero_nontemporal,
};
pub use reclaim::compact::Compacted;
pub use reclaim::tiers::Balanced;
pub use space::{
    AccessError, Advice, Area, AreaInfo, Backing, DeviceMemory, Label, MapFlags, Maps, MemPolicy,
    MemoryLock, NodeSet, PageInfo, PagePlace, PageSource, Pins, PrivateCopies, Prot, RemapFlags,
    Space, Translation, VmaFlags, VmaUsage,
};
pub use stat::{Counter, Totals, Trace, TraceEvent, TracePoint, Watcher};
#[doc(hidden)]
pub use sync::mutant::Mutant;
#[cfg(feature = "observe")]
pub use sync::observe;
pub use table::format::{CacheMode, USER_END};
pub use vm::{Background, Block, Cpu, Vm};

/// The locks and wait loops of the subsystem, for use by the machine and the kernel.
///
/// A machine builds [`Machine::park`] and [`Machine::wake`] from a [`Permit`](locks::Permit). A
/// lock takes a [`Wait`](locks::Wait) as a parameter: a CPU that other CPUs may wait for passes its
/// [`Cpu`], which serves flush requests during the wait.
///
/// A kernel uses a [`SpinLock`](locks::SpinLock) as a lock of its own held during calls of the
/// subsystem, for example to exclude forks from a [write-back](Shared::write_back). An
/// [`RwLock`](locks::RwLock) stands for the `mmap_lock` of other systems, and in builds with debug
/// assertions most calls panic while it is held.
pub mod locks {
    pub use crate::sync::park::Permit;
    pub use crate::sync::percpu::Padded;
    pub use crate::sync::rwlock::{ReadGuard, RwLock, WriteGuard};
    pub use crate::sync::spin::{SpinGuard, SpinLock};
    pub use crate::sync::wait::{LOOKS_BEFORE_PARKING, Spin, Wait, until};
}

/// The page-table format: for a machine with a software MMU, and for the MMU settings of a kernel's
/// CPUs.
pub mod format {
    pub use crate::table::format::{
        ACCESSED, CACHE, CANONICAL_END, DIRTY, ENTRIES, FRAME, HUGE, INDEX_BITS, LEVELS,
        NO_EXECUTE, PAGE_ATTRIBUTES, PRESENT, SOFTWARE, USER, WRITE, frame_of,
    };
}

/// The prefault policies: the predictors named by a [`Machine`], and the types to replay recorded
/// faults against a predictor.
///
/// A kernel names [`Streams`](prefault::Streams), and gives each thread a [`ThreadStreams`].
pub mod prefault {
    pub use crate::fault::prefault::defaults::Defaults;
    pub use crate::fault::prefault::fixed::FixedWindow;
    pub use crate::fault::prefault::history::{BLOCK, BlockHistory, History};
    pub use crate::fault::prefault::predictor::{
        Check, Kind, Look, MAX_ORDER, Miss, Predictor, Seen, Tally, Window, beside,
    };
    pub use crate::fault::prefault::streams::Streams;
}
