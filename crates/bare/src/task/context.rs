//! Switching between kernel stacks.
//!
//! A thread that does not run is a stack whose top few words are the registers that a call preserves and
//! an address to return to; a [`Context`] says where they are. [`switch`] puts the caller into that state
//! and takes another out of it. A thread that never ran is made to look as if it had been switched from
//! just before it returned to user mode.

use super::exit::return_to_user;
use super::stack::KernelStack;
use crate::arch::TrapFrame;
use crate::paging;
use crate::percpu;
use core::arch::naked_asm;

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
    let rip = return_to_user as *const () as u64;
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
