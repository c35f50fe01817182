//! Kernel stacks, and switching between them.
//!
//! A thread that does not run is a stack whose top few words are the registers that a call preserves and
//! an address to return to; a [`Context`] says where they are. [`switch`] puts the caller into that state
//! and takes another out of it. A thread that never ran is made to look as if it had been switched from
//! just before it returned to user mode.

use super::{TrapFrame, entry};
use crate::percpu;
use alloc::alloc::{alloc, dealloc};
use core::alloc::Layout;
use core::arch::naked_asm;
use core::fmt;
use core::ptr::NonNull;

/// Bytes of a kernel stack. `fork` needs most: 20 KiB.
pub const STACK_BYTES: usize = 32 << 10;
/// What the lowest word of a stack holds as long as nothing ran over it.
const CANARY: u64 = 0x7374_6163_6b65_6e64;

const LAYOUT: Layout = match Layout::from_size_align(STACK_BYTES, STACK_BYTES) {
    Ok(layout) => layout,
    Err(_) => panic!("stacks are aligned to their size"),
};

/// A stack on which a thread runs in the kernel.
pub struct KernelStack(NonNull<u8>);

// SAFETY: it is memory that the value owns.
unsafe impl Send for KernelStack {}
// SAFETY: a shared reference gives only addresses.
unsafe impl Sync for KernelStack {}

impl KernelStack {
    /// A stack; `None` when the heap is exhausted.
    pub fn try_new() -> Option<Self> {
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { alloc(LAYOUT) })?;
        // SAFETY: the lowest word of what was just allocated.
        unsafe { base.cast::<u64>().write(CANARY) };
        Some(Self(base))
    }

    /// The address above its highest byte, a multiple of 16.
    pub fn top(&self) -> u64 {
        self.0.as_ptr() as u64 + STACK_BYTES as u64
    }

    /// Where the frame of a thread that runs on this stack lies while it is in the kernel.
    fn frame(&self) -> *mut TrapFrame {
        (self.top() as *mut TrapFrame).wrapping_sub(1)
    }
}

impl Drop for KernelStack {
    fn drop(&mut self) {
        check(self.top());
        // SAFETY: allocated with this layout; its owner says that nobody runs on it.
        unsafe { dealloc(self.0.as_ptr(), LAYOUT) };
    }
}

impl fmt::Debug for KernelStack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KernelStack(top {:#x})", self.top())
    }
}

/// Panics when the stack with this top was run over.
fn check(top: u64) {
    let lowest = (top - STACK_BYTES as u64) as *const u64;
    // SAFETY: `top` is of a `KernelStack` that exists.
    let word = unsafe { lowest.read() };
    assert!(word == CANARY, "the kernel stack that ends at {top:#x} was run over");
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
/// exists, which is checked; 0: there will be none, since idle does not go to user mode.
pub fn set_kernel_stack(top: u64) {
    // Not the stack of before: its thread may have ended, and the stack with it.
    if top != 0 {
        check(top);
    }
    let here = percpu::this();
    here.kernel_stack.set(top);
    here.descriptors.set_kernel_stack(top);
}
