//! The return to user mode.
//!
//! The return always checks the CPU's `attention`: while the flag is set, [`attend`] calls the
//! kernel. (Most system calls return from their [entry](crate::trap::entry), and use this return
//! only if the flag is set.)

use crate::arch::TrapFrame;
use crate::kernel;
use crate::percpu;
use core::arch::naked_asm;
use core::sync::atomic::Ordering;

/// Pops the registers of a frame, up to its `vector`.
macro_rules! pop_registers {
    () => {
        "pop r15\npop r14\npop r13\npop r12\npop rbp\npop rbx\npop r11\npop r10\npop r9\npop r8\n\
         pop rax\npop rcx\npop rdx\npop rsi\npop rdi\n"
    };
}

pub(crate) use pop_registers;

/// Returns to user mode with the frame at the top of the stack, independent of its contents.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn return_to_user() {
    naked_asm!(
        "mov rdi, rsp",
        "call {attend}",
        "swapgs",
        pop_registers!(),
        "add rsp, 16",
        "iretq",
        attend = sym attend,
    )
}

/// Calls the kernel until the task may continue in user mode.
pub(crate) extern "C" fn attend(frame: &mut TrapFrame) {
    loop {
        // Read again each time: the task may have moved to another CPU.
        let here = percpu::this();
        if here.attention.load(Ordering::Relaxed) {
            here.attention.store(false, Ordering::Relaxed);
            kernel::attention(frame);
        } else if frame.rip >> 47 != 0 {
            // IRET would fault in the kernel. Raise the exception of a jump to such an address in
            // the program:
            frame.vector = 13;
            frame.error = 0;
            kernel::exception(frame);
            percpu::this().attention.store(true, Ordering::Relaxed);
        } else {
            return;
        }
    }
}
