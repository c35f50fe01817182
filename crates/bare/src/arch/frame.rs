//! A program's registers, as the kernel's entries store them on its stack.

use core::fmt;
use x86_64::registers::rflags::RFlags;

/// `vector` of a system call's frame; its `error` is the number of the system call.
pub const SYSTEM_CALL: u64 = 256;

/// Selectors, with Linux's numbers, because signal frames show the numbers to programs.
pub const KERNEL_CODE: u16 = 0x10;
/// See [`KERNEL_CODE`].
pub const KERNEL_DATA: u16 = 0x18;
/// See [`KERNEL_CODE`].
pub const USER_DATA: u16 = 0x2b;
/// See [`KERNEL_CODE`].
pub const USER_CODE: u16 = 0x33;

/// The registers of a program that entered the kernel; see [`trap::entry`](crate::trap::entry).
#[repr(C)]
#[derive(Clone, Copy, Default)]
#[expect(missing_docs, reason = "registers have their names")]
pub struct TrapFrame {
    pub r15: u64,
    pub r14: u64,
    pub r13: u64,
    pub r12: u64,
    pub rbp: u64,
    pub rbx: u64,
    pub r11: u64,
    pub r10: u64,
    pub r9: u64,
    pub r8: u64,
    pub rax: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    /// The exception or interrupt, or [`SYSTEM_CALL`].
    pub vector: u64,
    /// The processor's error code, or the number of the system call.
    pub error: u64,
    pub rip: u64,
    /// Changed only by [`restrict`](Self::restrict), like `ss`.
    pub cs: u64,
    pub rflags: u64,
    pub rsp: u64,
    pub ss: u64,
}

// The stack below a frame is aligned for a call.
const _: () =
    assert!(size_of::<TrapFrame>() == 22 * 8 && size_of::<TrapFrame>().is_multiple_of(16));

/// The resume flag: set in the frame of an exception, and cleared by the program's next
/// instruction.
pub const RESUME: u64 = 1 << 16;

/// The flags that a program may set: CF PF AF ZF SF TF DF OF AC ID.
const USER_FLAGS: u64 = 0x24_0dd5;

impl TrapFrame {
    /// The initial registers of a program that starts at `rip`, on the stack `rsp`.
    pub fn start(rip: u64, rsp: u64) -> Self {
        let mut frame = Self { rip, rsp, ..Self::default() };
        frame.restrict();
        frame
    }

    /// Makes registers chosen by a program (by `rt_sigreturn`) safe for user mode: user selectors,
    /// interrupts on, and only flags that the program may set.
    pub fn restrict(&mut self) {
        self.cs = u64::from(USER_CODE);
        self.ss = u64::from(USER_DATA);
        self.rflags = self.rflags & USER_FLAGS | RFlags::INTERRUPT_FLAG.bits() | 2;
    }

    /// Returns whether the CPU was in user mode, rather than in the kernel.
    #[inline(always)]
    pub const fn of_user(&self) -> bool {
        self.cs & 3 != 0
    }
}

impl fmt::Debug for TrapFrame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vector, error, rip, cs, rflags, rsp, ss, .. } = self;
        write!(
            f,
            "vector {vector} error {error:#x} rip {rip:#x} cs {cs:#x} flags {rflags:#x} rsp {rsp:#x} \
             ss {ss:#x} rax {:#x} rbx {:#x} rcx {:#x} rdx {:#x} rsi {:#x} rdi {:#x} rbp {:#x} r8 {:#x} \
             r9 {:#x} r10 {:#x} r11 {:#x} r12 {:#x} r13 {:#x} r14 {:#x} r15 {:#x}",
            self.rax,
            self.rbx,
            self.rcx,
            self.rdx,
            self.rsi,
            self.rdi,
            self.rbp,
            self.r8,
            self.r9,
            self.r10,
            self.r11,
            self.r12,
            self.r13,
            self.r14,
            self.r15
        )
    }
}
