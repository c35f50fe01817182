//! Switching between kernel stacks.
//!
//! While a thread does not run, the top words of its stack are the callee-saved registers and a
//! return address; its [`Context`] points to these words. [`switch`] saves the caller in this form,
//! and continues another thread. A new thread looks like a thread that was switched away just
//! before its return to user mode.

use super::exit::return_to_user;
use super::stack::KernelStack;
use crate::arch::TrapFrame;
use crate::paging;
use crate::percpu;
use core::arch::naked_asm;

/// The point at which a thread that does not run continues.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Context {
    rsp: u64,
}

/// The words that [`switch`] pops from a stack.
#[repr(C)]
struct Saved {
    registers: [u64; 6],
    rip: u64,
}

/// Returns a context that continues in user mode with the registers `frame`.
pub fn prepare(stack: &KernelStack, frame: TrapFrame) -> Context {
    let at = stack.frame();
    let saved = at.cast::<Saved>().wrapping_sub(1);
    let rip = return_to_user as *const () as u64;
    // SAFETY: both lie on the stack, which is not in use yet.
    unsafe {
        at.write(frame);
        saved.write(Saved { registers: [0; 6], rip });
    }
    Context { rsp: saved as u64 }
}

/// Saves the running code in `from`, and continues `to`.
///
/// # Safety
/// Interrupts are off. `to` was made by [`prepare`] or by a switch from this context, and has not
/// been continued since; no other CPU uses its stack. `from` belongs to the running code, and stays
/// valid until it is continued.
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

/// Sets the stack for entries from user mode on this CPU, by its top: the top of an existing
/// [`KernelStack`], or 0 for the idle loop, which has no user mode.
pub fn set_kernel_stack(top: u64) {
    // Not the previous stack, which may have been freed with its thread.
    let here = percpu::this();
    let guards = paging::guards();
    if here.guards.get() != guards {
        here.guards.set(guards);
        paging::drop_kernel_translations();
    }
    here.kernel_stack.set(top);
    here.descriptors.set_kernel_stack(top);
}
