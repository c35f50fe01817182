//! Kernel stacks, and switching between them.
//!
//! A thread that does not run is a stack whose top few words are the registers that a call preserves and
//! an address to return to; a [`Context`] says where they are. [`switch`] puts the caller into that state
//! and takes another out of it. A thread that never ran is made to look as if it had been switched from
//! just before it returned to user mode.
//!
//! Below each stack lies a [guard](paging::guard): who runs over it meets a double fault, on a stack of its
//! own, and not somebody else's memory. A few stacks whose threads have ended are kept with their guards for
//! the next threads.

use super::{TrapFrame, entry};
use crate::boot::paging;
use crate::kernel;
use crate::percpu;
use alloc::alloc::{alloc, dealloc};
use core::alloc::Layout;
use core::arch::naked_asm;
use core::fmt;
use core::ptr::NonNull;
use faultless::PAGE_SIZE;
use faultless::sync::spin::SpinLock;
use faultless::sync::wait::Spin;

/// Bytes of a kernel stack. `fork` needs most: less than 20 KiB.
pub const STACK_BYTES: usize = 24 << 10;
/// Bytes of the guard below it.
const GUARD_BYTES: usize = PAGE_SIZE as usize;
/// How many stacks are kept for the next threads.
const KEPT: usize = 32;

const LAYOUT: Layout = match Layout::from_size_align(GUARD_BYTES + STACK_BYTES, GUARD_BYTES) {
    Ok(layout) => layout,
    Err(_) => panic!("stacks are aligned to pages"),
};

/// Stacks that nobody runs on, with their guards.
struct Kept {
    bases: [Option<NonNull<u8>>; KEPT],
    count: usize,
}

// SAFETY: the memory belongs to whoever holds this.
unsafe impl Send for Kept {}

/// Its holder waits for nobody.
static STACKS: SpinLock<Kept> = SpinLock::new(Kept { bases: [None; KEPT], count: 0 });

/// A stack on which a thread runs in the kernel: its lowest address, that of the guard.
pub struct KernelStack(NonNull<u8>);

// SAFETY: it is memory that the value owns.
unsafe impl Send for KernelStack {}
// SAFETY: a shared reference gives only addresses.
unsafe impl Sync for KernelStack {}

impl KernelStack {
    /// A stack; `None` when the heap is exhausted.
    pub fn try_new() -> Option<Self> {
        Self::kept().or_else(Self::make)
    }

    fn kept() -> Option<Self> {
        let mut kept = STACKS.lock(&Spin);
        let last = kept.count.checked_sub(1)?;
        kept.count = last;
        kept.bases[last].take().map(Self)
    }

    #[cold]
    fn make() -> Option<Self> {
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { alloc(LAYOUT) })?;
        // SAFETY: the lowest page of what was just allocated, which nobody uses until `drop` takes the guard back.
        if unsafe { paging::guard(base.as_ptr()) } {
            return Some(Self(base));
        }
        // SAFETY: allocated with this layout.
        unsafe { dealloc(base.as_ptr(), LAYOUT) };
        None
    }

    /// The address above its highest byte, a multiple of 16.
    pub fn top(&self) -> u64 {
        self.0.as_ptr() as u64 + LAYOUT.size() as u64
    }

    /// Where the frame of a thread that runs on this stack lies while it is in the kernel.
    fn frame(&self) -> *mut TrapFrame {
        (self.top() as *mut TrapFrame).wrapping_sub(1)
    }
}

impl Drop for KernelStack {
    fn drop(&mut self) {
        {
            let mut kept = STACKS.lock(&Spin);
            let count = kept.count;
            if let Some(place) = kept.bases.get_mut(count) {
                *place = Some(self.0);
                kept.count += 1;
                return;
            }
        }
        // SAFETY: made so by `make`; its owner says that nobody runs on it.
        unsafe {
            paging::unguard(self.0.as_ptr());
            dealloc(self.0.as_ptr(), LAYOUT);
        }
    }
}

impl fmt::Debug for KernelStack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KernelStack(top {:#x})", self.top())
    }
}

/// Whose stack the running code has run over, if `fault`, where it met a fault, says that it has.
pub fn overrun(fault: u64) -> Option<Overrun> {
    let here = percpu::this();
    let below = |low: u64| (low.wrapping_sub(GUARD_BYTES as u64)..low).contains(&fault);
    if below(here.descriptors.fatal_stack()) {
        return Some(Overrun::Fatal);
    }
    let top = here.kernel_stack.get();
    if top != 0 {
        return below(top - STACK_BYTES as u64).then_some(Overrun::Thread);
    }
    below(here.idle_stack.get()).then_some(Overrun::Idle)
}

/// Whose stack was run over.
#[derive(Clone, Copy, Debug)]
pub enum Overrun {
    /// The running thread's.
    Thread,
    /// That on which the CPU starts and idles.
    Idle,
    /// That of fatal exceptions.
    Fatal,
}

impl fmt::Display for Overrun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Thread => {
                f.write_str("the kernel stack of ")?;
                kernel::describe(percpu::this().task(), f)
            }
            Self::Idle => f.write_str("the stack of the idle loop"),
            Self::Fatal => f.write_str("the stack of fatal exceptions"),
        }
    }
}

/// Where a thread that does not run is to go on.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Context {
    rsp: u64,
}

/// What [`switch`] takes off a stack.
#[repr(C)]
struct Saved {
    registers: [u64; 6],
    rip: u64,
}

/// A context that goes to user mode with the registers `frame`.
pub fn prepare(stack: &KernelStack, frame: TrapFrame) -> Context {
    let at = stack.frame();
    let saved = at.cast::<Saved>().wrapping_sub(1);
    let rip = entry::return_to_user as *const () as u64;
    // SAFETY: both lie on the stack, which nobody uses yet.
    unsafe {
        at.write(frame);
        saved.write(Saved { registers: [0; 6], rip });
    }
    Context { rsp: saved as u64 }
}

/// Leaves the running code to go on in `from`, and goes on with `to`.
///
/// # Safety
/// Interrupts are off. `to` was made by [`prepare`] or by a switch from it, and was not gone on with since;
/// its stack is no other CPU's. `from` is the running code's, and stays valid until it is gone on with.
#[unsafe(naked)]
pub unsafe extern "C" fn switch(from: *mut Context, to: *const Context) {
    naked_asm!(
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "mov [rdi], rsp",
        "mov rsp, [rsi]",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbx",
        "pop rbp",
        "ret",
    )
}

/// Makes entries from user mode on this CPU arrive on the stack with this top, that of a [`KernelStack`] that
/// exists; 0: there will be none, since idle does not go to user mode.
pub fn set_kernel_stack(top: u64) {
    // Not the stack of before: its thread may have ended, and the stack with it.
    let here = percpu::this();
    let guards = paging::guards();
    if here.guards.get() != guards {
        here.guards.set(guards);
        paging::drop_kernel_translations();
    }
    here.kernel_stack.set(top);
    here.descriptors.set_kernel_stack(top);
}
