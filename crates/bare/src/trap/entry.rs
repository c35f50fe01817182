//! Entry and exit: from user mode into the kernel and back.
//!
//! *The frame.* Every entry from user mode (exception, interrupt, system call) stores all registers
//! in a [`TrapFrame`] at the top of the running thread's kernel stack; changing the frame changes
//! the program. The processor pushes the last five words (for SYSCALL, the entry pushes these
//! words), and the entry pushes the others.
//!
//! *GS.* In the kernel the GS base is this CPU's [`PerCpu`], and `KERNEL_GS_BASE` holds the
//! program's; in user mode the two are exchanged. So each entry from user mode starts with SWAPGS,
//! and each return ends with SWAPGS; an interrupt of the kernel (in idle, or a fault of a copy from
//! or to user memory) does not swap. An LFENCE follows at the join of the two paths: under
//! misprediction the processor must not run the handler with the wrong GS base. The few exceptions
//! that may come in between (NMI, double fault, machine check) are fatal, have their own stacks,
//! and check the sign of the base.
//!
//! *Interrupts* are off from entry to return. Each entry clears the AC flag, which allows access to
//! user memory: the program can set the flag, and the flag is set when a copy faults.
//!
//! *The return* is in [`exit`](crate::task::exit), except for most system calls. SYSRET restores
//! only the state saved by SYSCALL: SYSRET is used if `rip` and `rflags` have values that SYSCALL
//! can produce, and `rcx` and `r11` are unchanged since the entry; IRET is used in every other
//! case. (`cs` and `ss` need no check: a user-mode frame always has the same two selectors, since
//! only the processor, the entry here, and [`TrapFrame::restrict`] set them.)

use super::{fatal as handle_fatal, page_fault as handle_page_fault, trap};
use crate::arch::smap::clac;
use crate::arch::{KERNEL_CODE, RESUME, SYSTEM_CALL, TrapFrame, USER_CODE, USER_DATA};
use crate::kernel;
use crate::percpu::PerCpu;
use crate::task::exit::{attend, pop_registers, return_to_user};
use core::arch::naked_asm;
use core::mem::offset_of;
use x86_64::VirtAddr;
use x86_64::registers::model_specific::{LStar, Msr, SFMask};
use x86_64::registers::rflags::RFlags;

/// The flags with which SYSRET must not return: trap and resume.
const NOT_BY_SYSRET: u32 = 1 << 8 | 1 << 16;

/// Extends a stack that ends with `vector` to a stack that ends with a whole frame.
macro_rules! push_registers {
    () => {
        "push rdi\npush rsi\npush rdx\npush rcx\npush rax\npush r8\npush r9\npush r10\npush r11\n\
         push rbx\npush rbp\npush r12\npush r13\npush r14\npush r15\n"
    };
}

/// The rest of an entry whose `vector` is on the stack: calls `{handler}` with the frame, and
/// returns to the interrupted code.
macro_rules! handle_and_return {
    () => {
        concat!(
            push_registers!(),
            clac!(),
            "cld\n",
            "test byte ptr [rsp + {cs}], 3\n",
            "jz 2f\n",
            "swapgs\n",
            "2: lfence\n",
            "mov rdi, rsp\n",
            "call {handler}\n",
            "test byte ptr [rsp + {cs}], 3\n",
            "jz 4f\n",
            "cmp byte ptr gs:[{attention}], 0\n",
            "jne 5f\n",
            "3: swapgs\n",
            "4:\n",
            pop_registers!(),
            "add rsp, 16\n",
            "iretq\n",
            "5: mov rdi, rsp\n",
            "call {attend}\n",
            "jmp 3b\n",
        )
    };
}

#[unsafe(naked)]
unsafe extern "C" fn common() {
    naked_asm!(
        handle_and_return!(),
        cs = const offset_of!(TrapFrame, cs),
        attention = const offset_of!(PerCpu, attention),
        handler = sym trap,
        attend = sym attend,
    )
}

/// Page faults have a separate entry, for speed. The entry sets the resume flag, by which the
/// sampling of system time recognises the return from a fault: the processor sets the flag, but
/// some emulators do not.
#[unsafe(naked)]
unsafe extern "C" fn page_fault() {
    naked_asm!(
        "push 14",
        "or dword ptr [rsp + {rflags} - {vector_at}], {resume}",
        handle_and_return!(),
        rflags = const offset_of!(TrapFrame, rflags),
        vector_at = const offset_of!(TrapFrame, vector),
        resume = const RESUME,
        cs = const offset_of!(TrapFrame, cs),
        attention = const offset_of!(PerCpu, attention),
        handler = sym handle_page_fault,
        attend = sym attend,
    )
}

/// The entry of fatal exceptions, on a separate stack: these exceptions may come before an entry
/// has swapped GS, or after a return has swapped GS.
#[unsafe(naked)]
unsafe extern "C" fn fatal() {
    naked_asm!(
        push_registers!(),
        clac!(),
        "cld",
        "mov ecx, 0xc0000101",
        "rdmsr",
        "test edx, edx",
        "js 2f",
        "swapgs",
        "2: lfence",
        "mov rdi, rsp",
        "call {handler}",
        "ud2",
        handler = sym handle_fatal,
    )
}

macro_rules! entries {
    ($($vector:literal $way:ident $target:ident),* $(,)?) => {
        /// Returns the entry of each used vector.
        pub fn entries() -> impl Iterator<Item = (usize, u64)> {
            [$(($vector, {
                entries!(@entry $vector $way $target);
                entry as *const () as u64
            }),)*].into_iter()
        }
    };
    // The processor pushes no error code.
    (@entry $vector:literal plain $target:ident) => {
        #[unsafe(naked)]
        unsafe extern "C" fn entry() {
            naked_asm!("push 0", "push {vector}", "jmp {target}",
                vector = const $vector, target = sym $target)
        }
    };
    // The processor pushes an error code.
    (@entry $vector:literal error $target:ident) => {
        #[unsafe(naked)]
        unsafe extern "C" fn entry() {
            naked_asm!("push {vector}", "jmp {target}", vector = const $vector, target = sym $target)
        }
    };
    (@entry $vector:literal own $target:ident) => {
        use $target as entry;
    };
}

entries! {
    0 plain common, 1 plain common, 2 plain fatal, 3 plain common, 4 plain common, 5 plain common,
    6 plain common, 7 plain common, 8 error fatal, 9 plain common, 10 error common, 11 error common,
    12 error common, 13 error common, 14 own page_fault, 15 plain common, 16 plain common,
    17 error common, 18 plain fatal, 19 plain common, 20 plain common, 21 error common,
    // See `apic::Vector`.
    0xe1 plain common, 0xe2 plain common, 0xe3 plain common, 0xf0 plain common, 0xf1 plain common, 0xfe plain common, 0xff plain common,
}

/// The entry of SYSCALL.
#[unsafe(naked)]
pub unsafe extern "C" fn system_call() {
    naked_asm!(
        "swapgs",
        "mov gs:[{user_stack}], rsp",
        "mov rsp, gs:[{kernel_stack}]",
        "push {user_data}",
        "push qword ptr gs:[{user_stack}]",
        "push r11",
        "push {user_code}",
        "push rcx",
        "push rax",
        "push {vector}",
        push_registers!(),
        "mov rdi, rsp",
        "call {dispatch}",
        "cmp byte ptr gs:[{attention}], 0",
        "jne 2f",
        "mov rcx, [rsp + {rip}]",
        "cmp rcx, [rsp + {rcx}]",
        "jne 2f",
        "shr rcx, 47",
        "jnz 2f",
        "mov rcx, [rsp + {rflags}]",
        "cmp rcx, [rsp + {r11}]",
        "jne 2f",
        "test ecx, {not_by_sysret}",
        "jnz 2f",
        pop_registers!(),
        "mov rsp, [rsp + {rsp} - {vector_at}]",
        "swapgs",
        "sysretq",
        "2: jmp {return_to_user}",
        user_stack = const offset_of!(PerCpu, user_stack),
        kernel_stack = const offset_of!(PerCpu, kernel_stack),
        attention = const offset_of!(PerCpu, attention),
        user_data = const USER_DATA,
        user_code = const USER_CODE,
        vector = const SYSTEM_CALL,
        not_by_sysret = const NOT_BY_SYSRET,
        rip = const offset_of!(TrapFrame, rip),
        rcx = const offset_of!(TrapFrame, rcx),
        rflags = const offset_of!(TrapFrame, rflags),
        r11 = const offset_of!(TrapFrame, r11),
        rsp = const offset_of!(TrapFrame, rsp),
        vector_at = const offset_of!(TrapFrame, vector),
        dispatch = sym kernel::system_call,
        return_to_user = sym return_to_user,
    )
}

/// Makes [`system_call`] the entry of SYSCALL.
pub fn enable_system_calls() {
    let mut star = Msr::new(0xc000_0081);
    // SYSRET uses the data segment 8 above this value and the code segment 16 above; SYSCALL uses
    // the two segments from this value on.
    let (sysret, syscall) = (u64::from(USER_DATA - 8), u64::from(KERNEL_CODE));
    // SAFETY: the selectors are the selectors of `Descriptors`.
    unsafe { star.write(sysret << 48 | syscall << 32) };
    LStar::write(VirtAddr::new(system_call as *const () as u64));
    SFMask::write(
        RFlags::INTERRUPT_FLAG
            | RFlags::TRAP_FLAG
            | RFlags::DIRECTION_FLAG
            | RFlags::ALIGNMENT_CHECK
            | RFlags::NESTED_TASK,
    );
}
