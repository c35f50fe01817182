//! From the loader to the first thread.
//!
//! [`start`], on the boot CPU, sets up its tables and stack, reads the start info, makes the
//! kernel's page tables, starts the clock, the heap, the other CPUs and the subsystem, and calls
//! [`Kernel::start`](crate::Kernel::start). Then all CPUs call [`Kernel::run`](crate::Kernel::run).

mod cpus;
mod entry;
mod info;

use crate::arch::{self, apic, clock, smap};
use crate::console;
use crate::descriptors;
use crate::heap;
use crate::kernel;
use crate::machine::{Bare, plant};
use crate::paging::{self, direct};
use crate::percpu::{self, PerCpu};
use crate::ranges::{self, Range};
use crate::report;
use crate::reserve;
use crate::trap::entry as trap_entry;
use alloc::boxed::Box;
use core::arch::asm;
use core::cell::UnsafeCell;
use faultless::try_box;
use faultless::{CpuId, FrameNumber, MAX_NODES, MemoryRegion, PAGE_SHIFT, PAGE_SIZE, Vm};
use faultless_collections::Vec;
use info::Info;

/// Bytes of the subsystem's metadata for each frame.
const FRAME_META: u64 = 64;
/// The alignment of the heap.
const HEAP_ALIGN: u64 = 2 << 20;

struct Boot(UnsafeCell<Info>);

// SAFETY: written only by `start`, before the other CPUs run.
unsafe impl Sync for Boot {}

static BOOT: Boot = Boot(UnsafeCell::new(Info::EMPTY));

struct First(PerCpu);

// SAFETY: only the boot CPU accesses the value.
unsafe impl Sync for First {}

static FIRST: First = First(PerCpu::new(CpuId(0)));

fn info() -> &'static Info {
    // SAFETY: `start` filled the value before any read.
    unsafe { &*BOOT.0.get() }
}

/// The kernel's command line.
pub fn command_line() -> &'static str {
    info().command_line()
}

/// The values of the words `NAME=VALUE` of the command line, in order.
pub fn words(name: &str) -> impl Iterator<Item = &'static str> {
    let words = command_line().split_ascii_whitespace();
    words.filter_map(move |word| word.strip_prefix(name)?.strip_prefix('='))
}

/// Returns whether `word` is on the command line.
pub fn is_said(word: &str) -> bool {
    command_line().split_ascii_whitespace().any(|said| said == word)
}

/// Returns the initial files passed to the loader.
pub fn initrd() -> &'static [u8] {
    let range = info().initrd;
    // SAFETY: the loader stored the files in this range, which is never part of free memory.
    unsafe { core::slice::from_raw_parts(direct(range.start), range.len() as usize) }
}

/// The entry point of the boot CPU, with the boot tables; `start_info` is a physical address.
pub extern "C" fn start(start_info: u32) -> ! {
    // SAFETY: only this CPU runs, and this is its first code.
    unsafe {
        descriptors::set_entries(trap_entry::entries());
        percpu::install(&FIRST.0);
        (*BOOT.0.get()).read(u64::from(start_info));
    }
    arch::enable();
    trap_entry::enable_system_calls();
    if !arch::features().smap {
        // SAFETY: with the boot tables code is writable; no other CPU runs.
        unsafe { smap::remove() };
    }
    for name in words("plant") {
        if !plant::set(name) {
            report!("message plant={name}: unknown fault");
        }
    }

    let mut free = info().memory.clone();
    let initrd = info().initrd;
    let initrd_pages = Range::new(initrd.start & !0xfff, initrd.end.next_multiple_of(PAGE_SIZE));
    for taken in [paging::image(), initrd_pages] {
        free.remove(taken).expect("too many ranges of memory");
    }
    assert!(initrd.end <= info().ends[1], "the initial files are not in memory");
    paging::build(&mut free, info().ends);
    load_root();
    paging::check();
    // SAFETY: the page is reserved for a guard.
    assert!(unsafe { paging::guard(entry::boot_guard()) }, "no memory for a guard");
    FIRST.0.idle_stack.set(entry::boot_guard() as u64 + PAGE_SIZE);
    FIRST.0.descriptors.guard();

    apic::mask_old();
    clock::init();
    apic::enable();
    apic::measure_timer();
    make_heap(&mut free);

    let wanted = words("cpus").last().map(|number| {
        number.parse().ok().filter(|&cpus| cpus >= 1).unwrap_or_else(|| {
            report!("message cpus={number} is not a number of CPUs; 1 is used");
            1
        })
    });
    let cpus = cpus::start_all(info().rsdp, wanted);
    percpu::set_cpus(cpus);
    // SAFETY: made once; the rest of the memory is mapped and not in use.
    let machine = unsafe { Bare::new(cpus, regions(&free)) };
    let vm = new_vm(machine);
    // SAFETY: called once on this CPU, whose number is 0.
    unsafe { percpu::enter(vm) };
    for setting in words("set") {
        match setting.parse() {
            Ok(setting) => vm.set(setting),
            Err(error) => report!("message set={setting}: {error}"),
        }
    }
    reserve::init();
    kernel::start(cpus);
    cpus::go(vm);
    kernel::run()
}

/// Makes the subsystem. A separate function, because its allocations, which are reserved first,
/// must not fail.
#[inline(never)]
fn new_vm(machine: Bare) -> &'static Vm<Bare> {
    match Vm::new(machine) {
        Ok(vm) => Box::leak(try_box(vm).expect("the heap is empty yet")),
        Err(errno) => console::panic(format_args!("no memory for the subsystem: {errno:?}")),
    }
}

/// Loads the kernel's own tables.
fn load_root() {
    // SAFETY: the tables map all memory used by the kernel.
    unsafe { asm!("mov cr3, {}", in(reg) paging::root(), options(nostack, preserves_flags)) };
}

/// Takes the heap out of `free`: an eighth of memory, 8 to 512 MiB, and the subsystem's metadata of
/// the frames.
fn make_heap(free: &mut ranges::Ranges) {
    let all: u64 = free.iter().map(Range::len).sum();
    let first = free.iter().map(|range| range.start).min().unwrap_or(0);
    let last = free.iter().map(|range| range.end).max().unwrap_or(0);
    let meta = (last - first) / PAGE_SIZE * FRAME_META;
    let len = ((all / 8).clamp(8 << 20, 512 << 20) + meta).next_multiple_of(HEAP_ALIGN);
    let range = free.take(len, HEAP_ALIGN).unwrap_or_else(|| {
        console::panic(format_args!("{} MiB of memory are too little", all >> 20))
    });
    let (start, end) = (direct(range.start) as usize, direct(range.end) as usize);
    // SAFETY: mapped memory that was just taken.
    unsafe { heap::init(start, end, meta as usize) };
}

/// Returns the rest of the memory as regions for the subsystem: one node, or with `nodes=A:B`
/// several nodes, which get these shares of the memory from the lowest address upwards.
fn regions(free: &ranges::Ranges) -> Vec<MemoryRegion> {
    const EMPTY: &str = "the heap is empty yet";
    let text = words("nodes").last().unwrap_or("1");
    let shares = text.split(':').map(|share| share.parse().unwrap_or(0));
    let shares = Vec::try_from_iter(shares).expect(EMPTY);
    assert!(shares.len() <= MAX_NODES && !shares.contains(&0), "nodes={text}: not shares of nodes");
    let region = |(node, range): (usize, Range)| {
        // Memory from 16 TiB on has no frame numbers.
        let first = FrameNumber::from_phys(range.start)?;
        let frames = (range.len() >> PAGE_SHIFT).min(u64::from(u32::MAX - first.0)) as u32;
        Some(MemoryRegion { node: node as u8, first, frames })
    };
    Vec::try_from_iter(free.parts(&shares).filter_map(region)).expect(EMPTY)
}
