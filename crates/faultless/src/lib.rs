//! faultless: a virtual-memory subsystem that serves page faults without a lock.
//!
//! For people who build kernels, unikernels, hypervisors and emulators. The subsystem needs a
//! [`Machine`] beneath it — memory, CPUs, their TLBs, a way to interrupt them — and gives you address
//! spaces with Linux's calls and errors, whose faults take no lock.
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
//! let at = space.mmap(&cpu, 0, 1 << 20, Prot::READ | Prot::WRITE, flags)?;
//! space.activate(&cpu); // and load the page-table base with `space.root()`
//! let thread = ThreadStreams::new(); // one for each thread of your programs
//! space.fault_of(&cpu, &thread, at, Access::Write).unwrap(); // what your page-fault handler calls
//! print!("{}{}", space.maps(&cpu), vm.totals());
//! unsafe { space.deactivate(&cpu) }; // once another root is loaded
//! space.exit(&cpu);
//! # Ok::<(), faultless::Error>(())
//! ```
//!
//! # What the words mean
//!
//! A **space** ([`Space`]) is an address space: its VMAs, the tree that finds them, and its page tables. A CPU runs one
//! space at a time, from [`Space::activate`] to [`Space::deactivate`].
//!
//! A **fault** is an access that the MMU could not translate. The kernel's handler calls [`Space::fault_of`], which
//! finds the VMA, prepares a page and installs its page-table entry; then the access is tried again.
//!
//! A fault takes no lock, so an `munmap` may run beside it on another CPU. Each VMA has a sequence count: even while
//! the VMA is in force, odd for ever once a call has detached it. The count that the fault read is its **ticket**. The fault
//! takes the entry (it makes it *busy*), validates the ticket, and only then stores the page. `munmap` first makes the
//! count odd, and then empties the entries, waiting for those that are busy. So either the fault sees the odd count
//! and gives up, or `munmap` sees the entry and removes the page:
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
//! A **grace section** is the stretch in which the fault may look at the VMA without a lock. What a call unlinks it
//! only *retires*: it is freed after a grace period, when every section that was open at that moment has closed.
//!
//! # The laws
//!
//! 1. *Never a stale owner.* No CPU reads or writes a frame through a translation older than the
//!    frame's present ownership.
//! 2. *Never a lost write.* What a store wrote, every later load sees.
//! 3. *The entry is the lock.* A speculative fault that succeeds writes one shared cache line, that of
//!    the entry it installs (and the count of a frame that it copies or maps from an object; where it
//!    maps pages around its own, the entries and counts of all; and the first store to a page of a file with a store also
//!    the page's entry in the object, which it marks dirty).
//! 4. *No signal from speculation.* SIGSEGV, SIGBUS and out-of-memory are decided under the lock only.
//! 5. *An abort leaves no trace.* The page that it prepared goes to the fallback.
//! 6. *Every frame is accounted for* at any quiet moment: [`audit`].
//! 7. *No frame is used again while an old translation of it may be in a TLB.* The type of a frame says so
//!    (`frame::Frame`): only a flush makes it usable.
//! 8. *One path.* The fault is written once (`fault`).
//!
//! # In the background
//!
//! Nothing happens by itself: the subsystem has no threads. A CPU that runs out of frames frees some in the call that needs them. What is better done before
//! that, a kernel calls, on any of its CPUs, as often as it likes. Each call returns soon where there is nothing to do.
//!
//! | call | what it does | when |
//! |---|---|---|
//! | [`Cpu::swap_on`] | names the swap area: from then on private pages may leave memory | once, before memory is short |
//! | [`Cpu::reclaim_ahead`] | evicts pages if few frames can be had | where programs wait for pages that are read, or every few milliseconds |
//! | [`Cpu::balance`] | moves pages between fast and slow memory | every few milliseconds on a CPU near fast memory |
//! | [`Cpu::zero_ahead`] | zeroes free frames, if the knob `zeroed_pool` says so, and frees what was retired | while a CPU is idle |
//! | [`Cpu::compact_ahead`] | makes free blocks of 2 MiB, where memory has at least 32 MiB | while a CPU is idle |
//! | [`Space::collapse_text`] | puts program text that is in use on huge pages | after every second that a program ran |
//! | [`Shared::write_back`](Shared) | writes pages of a file that are dirty | as the kernel's rules about dirty files say |
//! | [`Cpu::serve_flushes`] | drops what other CPUs wait for | wherever the kernel waits |
//! | [`Cpu::drain`] | gives back the frames that a CPU keeps | before a CPU stops |
//!
//! # Where to look
//!
//! A kernel implements [`Machine`], makes a [`Vm`] and a [`Cpu`] for each of its CPUs, and calls [`Space`] and
//! [`Object`]. Four programs in `examples` do so, each in one file: a machine of one CPU, an interpreter with software TLBs,
//! a hypervisor's guest memory, and memory in tiers with a swap area. It implements [`BackingStore`] for what its files are stored in, which has an example of its own. [`locks`] are what the subsystem waits with, for its machine to use as well; [`audit`] checks that
//! every frame is accounted for; [`KNOBS`] can be switched; [`Counter`] says what is counted. [`safety`] says what a kernel promises, and why
//! nothing else can go wrong.
//!
//! The rest is private. `cargo doc --document-private-items` shows it: in `space` the calls, one file each; in `fault`
//! the fault; in `table` the page tables, and in `table::protocol` the protocol that everything rests on; in `tlb`
//! flushes and shootdowns; in `rmap` the reverse map; in `frame` physical memory; in `sync` what CPUs agree with,
//! and in `sync::order` the lock order.
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

// What only the models of `tests/` look into is public in their builds alone.
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
pub use frame::{Census, Imbalance, Use};
pub use heap::{Shared, try_box, try_box_with};
pub use knob::{AnonVmaCheck, HugeText, KNOBS, KnobError, Knobs, Locking, Setting};
pub use machine::{
    CpuId, Invalidate, MAX_CPUS, MAX_NODES, Machine, MemoryRegion, SpaceId, nontemporal_done,
    zero_nontemporal,
};
pub use reclaim::compact::Compacted;
pub use reclaim::tiers::Balanced;
pub use space::{
    AccessError, Advice, Area, AreaInfo, Backing, Copies, DeviceMemory, Label, Lock, MapFlags,
    Maps, MemPolicy, Memory, NodeSet, PageInfo, PagePlace, Pins, Prot, RemapFlags, Space,
    Translation, VmaFlags,
};
pub use stat::{Counter, Point, Totals, Trace, TraceEvent, Watcher};
#[doc(hidden)]
pub use sync::mutant::Mutant;
#[cfg(feature = "observe")]
pub use sync::observe;
pub use table::format::{CacheMode, USER_END};
pub use vm::{Block, Cpu, Vm};

/// What the subsystem's CPUs wait and exclude each other with, for the machine beneath and the kernel above.
///
/// A machine builds [`Machine::park`] and [`Machine::wake`] from a [`Permit`](locks::Permit). A lock asks how to wait:
/// a CPU that may hold up others waits with its [`Cpu`], which serves their flush requests meanwhile.
///
/// A kernel's own lock that is held while it calls the subsystem, as one that keeps forks out of a [write-back](Shared::write_back), is a
/// [`SpinLock`](locks::SpinLock). An [`RwLock`](locks::RwLock) counts as the one lock of a space that other systems have, and in builds with debug assertions most calls panic
/// under it.
pub mod locks {
    pub use crate::sync::park::Permit;
    pub use crate::sync::percpu::Padded;
    pub use crate::sync::rwlock::{ReadGuard, RwLock, WriteGuard};
    pub use crate::sync::spin::{SpinGuard, SpinLock};
    pub use crate::sync::wait::{LOOKS_BEFORE_PARKING, Spin, Wait, until};
}

/// The page-table format: for a machine whose MMU is software, and what a kernel must tell the MMU of its CPUs.
pub mod format {
    pub use crate::table::format::{
        ACCESSED, CACHE, CANONICAL_END, DIRTY, ENTRIES, FRAME, HUGE, INDEX_BITS, LEVELS,
        NO_EXECUTE, PAGE_ATTRIBUTES, PRESENT, SOFTWARE, USER, WRITE, frame_of,
    };
}

/// The policy of prefaults: what a [`Machine`] names as its predictor, and what replays recorded faults against it.
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
