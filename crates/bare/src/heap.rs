//! The kernel's heap.
//!
//! *Blocks* up to [`LARGEST`] bytes have power-of-two sizes, and are aligned to their size. Each
//! CPU has a list of free blocks of each size, which needs no lock, since interrupts are off in the
//! kernel. An empty list is refilled with a batch from the common stock; a long list returns a
//! batch to the stock. The stock grows by *slabs*, which are cut up into blocks. Larger allocations
//! are runs of pages, like slabs.
//!
//! *Any allocation may fail.* The kernel's collections ([`faultless_collections`]) return a result
//! from every operation that may grow, and replace the standard ones. Memory for operations that
//! must not fail is allocated in advance: a thread includes the memory for its waits, queue links
//! and deadlines; a table entry is reserved before the first change. Releasing an object, or ending
//! a thread, needs no memory. A test of the linked kernel checks dependencies, too: no code
//! reachable from a running program leads to the standard library's abort.
//!
//! *Reserve.* System calls that create objects check [`low`] first, and fail while less than an
//! eighth of the heap is free. So a program cannot take the memory that other programs need to
//! continue, or to inspect and end this program. When the heap seems low, slabs whose blocks are
//! all in the stock are first turned into pages again.
//!
//! *Tests* can make a chosen allocation of a thread fail: [`FailNth`].
//!
//! The lock of the stock is a leaf: its holder does not wait.

pub(crate) mod local;

use crate::pages::{self, Pages};
use crate::percpu;
use core::alloc::{GlobalAlloc, Layout};
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicUsize, Ordering};
use faultless::locks::Spin;
use faultless::locks::{SpinGuard, SpinLock};
use faultless::{OutOfMemory, PAGE_SHIFT};
use faultless_collections::Vec;
use local::{Block, CLASSES, LARGEST, PAGE, batch, block_bytes, class_of, slab_bytes};

/// The index of a thread's next allocation to fail, for tests: Linux's `fail-nth`. 0: no failure,
/// 1: the next allocation. With [`ALL`](Self::ALL), all later allocations fail, too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FailNth(pub u64);

impl FailNth {
    /// A flag: all later allocations fail, too.
    pub const ALL: u64 = local::ALL;

    /// The value of the running thread.
    pub fn get() -> Self {
        Self(percpu::this().heap.fail_nth.get())
    }

    /// Sets the value of the thread that runs or is about to run, and returns the old value.
    pub fn set(self) -> Self {
        Self(percpu::this().heap.fail_nth.replace(self.0))
    }
}

/// The common stock.
struct Common {
    base: usize,
    pages: Option<Pages<'static>>,
    /// For each page: the number of blocks in the stock from the slab that starts at this page.
    /// Used only by the search for free slabs.
    in_stock: &'static mut [u16],
    stock: [*mut Block; CLASSES],
    stocked: [usize; CLASSES],
}

// SAFETY: the holder of the stock owns the blocks in the stock.
unsafe impl Send for Common {}

static COMMON: SpinLock<Common> = SpinLock::new(Common {
    base: 0,
    pages: None,
    in_stock: &mut [],
    stock: [ptr::null_mut(); CLASSES],
    stocked: [0; CLASSES],
});

/// The number of free pages, as stored by the last holder of the lock.
static FREE: AtomicUsize = AtomicUsize::new(0);
/// With fewer free pages the heap is low.
static LOW: AtomicUsize = AtomicUsize::new(0);
/// All pages.
static TOTAL: AtomicUsize = AtomicUsize::new(0);

impl Common {
    /// Takes a run, with at least `spare` pages left free.
    fn take_pages(&mut self, count: usize, align: usize, spare: usize) -> Option<NonNull<u8>> {
        if self.pages.as_ref()?.free() < count + spare {
            self.reclaim();
            if self.pages.as_ref()?.free() < count + spare {
                return None;
            }
        }
        let found = match self.pages.as_mut()?.take(count, align) {
            Some(found) => found,
            None => {
                self.reclaim();
                self.pages.as_mut()?.take(count, align)?
            }
        };
        self.publish();
        NonNull::new((self.base + (found << PAGE_SHIFT)) as *mut u8)
    }

    fn give_pages(&mut self, at: usize, count: usize) {
        if let Some(pages) = &mut self.pages {
            pages.give((at - self.base) >> PAGE_SHIFT, count);
        }
        self.publish();
    }

    fn publish(&self) {
        FREE.store(self.pages.as_ref().map_or(0, Pages::free), Ordering::Relaxed);
    }

    fn push(&mut self, class: usize, block: *mut Block) {
        // SAFETY: the block is free, and the caller's.
        unsafe { block.write(Block { next: self.stock[class] }) };
        self.stock[class] = block;
        self.stocked[class] += 1;
    }

    fn pop(&mut self, class: usize) -> Option<*mut Block> {
        let block = NonNull::new(self.stock[class])?.as_ptr();
        // SAFETY: blocks in the stock are free, and point to the next.
        self.stock[class] = unsafe { (*block).next };
        self.stocked[class] -= 1;
        Some(block)
    }

    /// Cuts one more slab into blocks.
    fn grow(&mut self, class: usize) -> Option<()> {
        let count = slab_bytes(class) / PAGE;
        let slab = self.take_pages(count, count, 0)?.as_ptr();
        for at in (0..slab_bytes(class)).step_by(block_bytes(class)).rev() {
            self.push(class, slab.wrapping_add(at).cast());
        }
        Some(())
    }

    /// Frees the slabs whose blocks are all in the stock.
    fn reclaim(&mut self) {
        for class in 0..CLASSES {
            let whole = slab_bytes(class) / block_bytes(class);
            if self.stocked[class] < whole {
                continue;
            }
            let mut block = self.stock[class];
            while !block.is_null() {
                let page = self.slab_page(class, block);
                self.in_stock[page] += 1;
                // SAFETY: a block in the stock.
                block = unsafe { (*block).next };
            }
            let mut block = core::mem::replace(&mut self.stock[class], ptr::null_mut());
            self.stocked[class] = 0;
            while !block.is_null() {
                // SAFETY: a block that was in the stock.
                let next = unsafe { (*block).next };
                let page = self.slab_page(class, block);
                // The count returns to 0.
                if usize::from(self.in_stock[page]) >= whole {
                    self.in_stock[page] += 1;
                    if usize::from(self.in_stock[page]) == 2 * whole {
                        self.in_stock[page] = 0;
                        self.give_pages(self.base + (page << PAGE_SHIFT), slab_bytes(class) / PAGE);
                    }
                } else {
                    self.in_stock[page] -= 1;
                    self.push(class, block);
                }
                block = next;
            }
        }
    }

    /// The page at which the block's slab starts, counted from the heap's first.
    fn slab_page(&self, class: usize, block: *mut Block) -> usize {
        let slab = block as usize & !(slab_bytes(class) - 1);
        (slab - self.base) >> PAGE_SHIFT
    }
}

fn common() -> SpinGuard<'static, Common> {
    // Waiters here need not serve flush requests: the holder does not wait.
    COMMON.lock(&Spin)
}

/// The heap.
struct Heap;

#[global_allocator]
static HEAP: Heap = Heap;

// SAFETY: a block or run has one owner at a time: free ones are in a list or the stock, which are
// accessed by one CPU, or under the lock. Blocks are aligned to their size, a power of two that is
// at least the layout's size; runs are at multiples of their alignment in pages.
unsafe impl GlobalAlloc for Heap {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let bytes = layout.size().max(layout.align());
        if bytes > LARGEST {
            return take_run(layout);
        }
        let class = class_of(bytes);
        let local = &percpu::this().heap;
        if local.fail_nth.get() != 0 && local.fails() {
            return ptr::null_mut();
        }
        let list = &local.lists[class];
        let block = list.head.get();
        if block.is_null() {
            return refill(class);
        }
        // SAFETY: a block in this CPU's list.
        list.head.set(unsafe { (*block).next });
        list.room.set(list.room.get().wrapping_add(1));
        block.cast()
    }

    #[inline]
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        let bytes = layout.size().max(layout.align());
        if bytes > LARGEST {
            return give_run(at, layout);
        }
        let class = class_of(bytes);
        let list = &percpu::this().heap.lists[class];
        let block = at.cast::<Block>();
        // SAFETY: the block is free now.
        unsafe { block.write(Block { next: list.head.get() }) };
        list.head.set(block);
        let room = list.room.get().wrapping_sub(1);
        list.room.set(room);
        if room < 0 {
            spill(class);
        }
    }

    #[inline]
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        let (old, new) = (layout.size().max(layout.align()), new_size.max(layout.align()));
        let stays = if old.max(new) <= LARGEST {
            class_of(old) == class_of(new)
        } else {
            old.min(new) > LARGEST && old.div_ceil(PAGE) == new.div_ceil(PAGE)
        };
        if stays {
            return at;
        }
        // SAFETY: by the contract the layout is valid with the new size, and the caller owns the
        // old block.
        unsafe {
            let to = self.alloc(Layout::from_size_align_unchecked(new_size, layout.align()));
            if !to.is_null() {
                to.copy_from_nonoverlapping(at, layout.size().min(new_size));
                self.dealloc(at, layout);
            }
            to
        }
    }
}

#[cold]
#[inline(never)]
fn take_run(layout: Layout) -> *mut u8 {
    let local = &percpu::this().heap;
    if local.fail_nth.get() != 0 && local.fails() {
        return ptr::null_mut();
    }
    let align = (layout.align() / PAGE).max(1);
    // While the heap is low, the rest is for blocks: one large allocation could take the whole
    // rest.
    let spare = LOW.load(Ordering::Relaxed) / 2;
    let found = common().take_pages(layout.size().div_ceil(PAGE), align, spare);
    found.map_or(ptr::null_mut(), NonNull::as_ptr)
}

#[cold]
#[inline(never)]
fn give_run(at: *mut u8, layout: Layout) {
    common().give_pages(at as usize, layout.size().div_ceil(PAGE));
}

/// Fills this CPU's empty list, and takes a block.
#[cold]
#[inline(never)]
fn refill(class: usize) -> *mut u8 {
    let list = &percpu::this().heap.lists[class];
    let mut common = common();
    if common.stock[class].is_null() && common.grow(class).is_none() {
        return ptr::null_mut();
    }
    for _ in 0..batch(class) {
        let Some(block) = common.pop(class) else { break };
        // SAFETY: the block belongs to this CPU now.
        unsafe { block.write(Block { next: list.head.get() }) };
        list.head.set(block);
        list.room.set(list.room.get() - 1);
    }
    let block = list.head.get();
    // SAFETY: the stock contained a block.
    list.head.set(unsafe { (*block).next });
    list.room.set(list.room.get() + 1);
    block.cast()
}

/// Returns a batch of this CPU's long list to the stock.
#[cold]
#[inline(never)]
fn spill(class: usize) {
    let list = &percpu::this().heap.lists[class];
    let mut common = common();
    for _ in 0..batch(class) {
        let block = list.head.get();
        // SAFETY: the list is longer than a batch.
        list.head.set(unsafe { (*block).next });
        list.room.set(list.room.get() + 1);
        common.push(class, block);
    }
}

/// Makes the memory `start..end` of the direct map the heap. `fixed` bytes are allocated
/// permanently, before the first check whether the heap is [`low`].
///
/// # Safety
/// Called once, with memory that is page-aligned and not in use.
pub(crate) unsafe fn init(start: usize, end: usize, fixed: usize) {
    let count = (end - start) / PAGE;
    let words = pages::words(count);
    // The first pages contain the bookkeeping of all pages.
    let own = (words * 8 + count * 2).div_ceil(PAGE);
    // SAFETY: the caller's memory, aligned for both; zero is a valid value of both.
    let (words, in_stock) = unsafe {
        let start = start as *mut u8;
        start.write_bytes(0, own * PAGE);
        let words = core::slice::from_raw_parts_mut(start.cast::<u64>(), words);
        let counts = start.add(words.len() * 8).cast::<u16>();
        (words, core::slice::from_raw_parts_mut(counts, count))
    };
    let mut pages = Pages::new(words, count);
    pages.take(own, 1);
    let total = pages.free();
    let mut common = common();
    common.base = start;
    common.in_stock = in_stock;
    common.pages = Some(pages);
    common.publish();
    TOTAL.store(total, Ordering::Relaxed);
    LOW.store(total.saturating_sub(fixed.div_ceil(PAGE)) / 8, Ordering::Relaxed);
}

/// Returns whether less than an eighth of the heap (without its fixed part) is free. In this case,
/// system calls that create objects fail with `ENOMEM`.
#[inline]
pub fn low() -> bool {
    FREE.load(Ordering::Relaxed) < LOW.load(Ordering::Relaxed) && low_indeed()
}

/// Returns whether less than a sixteenth of the heap is free. In this case, reading files,
/// directories and `/proc` fails, too. While the heap is only [`low`], these reads work, so that
/// programs can find and kill the process that uses the memory.
#[inline]
pub fn tight() -> bool {
    FREE.load(Ordering::Relaxed) < LOW.load(Ordering::Relaxed) / 2 && low_indeed() && {
        FREE.load(Ordering::Relaxed) < LOW.load(Ordering::Relaxed) / 2
    }
}

#[cold]
fn low_indeed() -> bool {
    let mut common = common();
    let stocked: usize = (0..CLASSES).map(|class| common.stocked[class] * block_bytes(class)).sum();
    // Not at every call with a low heap: the search takes time in proportion to the stock.
    if stocked / PAGE > LOW.load(Ordering::Relaxed) / 8 {
        common.reclaim();
    }
    FREE.load(Ordering::Relaxed) < LOW.load(Ordering::Relaxed)
}

/// Pushes to a list whose length a program chooses.
///
/// # Errors
/// [`OutOfMemory`]: the heap is [`tight`], or too small for the longer list.
pub fn try_push<T>(list: &mut Vec<T>, value: T) -> Result<(), OutOfMemory> {
    if tight() {
        return Err(OutOfMemory);
    }
    list.try_push(value)
}

/// Returns the number of allocated bytes, including the free blocks in the lists of other CPUs.
pub fn allocated() -> u64 {
    let common = common();
    let pages = TOTAL.load(Ordering::Relaxed) - common.pages.as_ref().map_or(0, Pages::free);
    let stocked: usize = (0..CLASSES).map(|class| common.stocked[class] * block_bytes(class)).sum();
    (pages * PAGE - stocked - percpu::this().heap.free_bytes()) as u64
}

/// Returns the size of the heap, and the size of its free pages, in bytes.
pub fn usage() -> (u64, u64) {
    let bytes = |pages: &AtomicUsize| (pages.load(Ordering::Relaxed) * PAGE) as u64;
    (bytes(&TOTAL), bytes(&FREE))
}
