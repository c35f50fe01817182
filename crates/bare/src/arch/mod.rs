//! What only an x86-64 processor has: traps, system calls, interrupts, registers, devices at its ports.

pub mod apic;
pub mod clock;
pub mod console;
pub mod context;
pub(crate) mod descriptors;
pub mod entry;
pub mod fpu;
pub mod segments;
mod traps;
pub mod user;

pub use crate::report;
pub use segments::Selectors;

use core::arch::asm;
use core::fmt;
use x86_64::registers::control::{Cr0, Cr0Flags, Cr4, Cr4Flags, Efer, EferFlags};
use x86_64::registers::model_specific::Msr;
use x86_64::registers::rflags::RFlags;

/// The registers of a program that entered the kernel; see [`entry`].
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
    /// The exception or interrupt, or [`SYSTEM_CALL`](entry::SYSTEM_CALL).
    pub vector: u64,
    /// The processor's error code, or the number of the system call.
    pub error: u64,
    pub rip: u64,
    /// Only [`restrict`](Self::restrict) sets it, and `ss`.
    pub cs: u64,
    pub rflags: u64,
    pub rsp: u64,
    pub ss: u64,
}

// The stack below a frame is aligned for a call.
const _: () =
    assert!(size_of::<TrapFrame>() == 22 * 8 && size_of::<TrapFrame>().is_multiple_of(16));

/// The flag that is set in the registers an exception leaves until the program's next instruction.
pub const RESUME: u64 = 1 << 16;

/// The flags that a program may have as it likes: CF PF AF ZF SF TF DF OF AC ID.
const USER_FLAGS: u64 = 0x24_0dd5;

impl TrapFrame {
    /// Registers with which a program starts, at `rip`, on the stack `rsp`.
    pub fn start(rip: u64, rsp: u64) -> Self {
        let mut frame = Self { rip, rsp, ..Self::default() };
        frame.restrict();
        frame
    }

    /// Makes what a program chose (a signal frame that it returns with) fit for user mode: its
    /// selectors, interrupts on, and of the flags only those that are its own.
    pub fn restrict(&mut self) {
        self.cs = u64::from(entry::USER_CODE);
        self.ss = u64::from(entry::USER_DATA);
        self.rflags = self.rflags & USER_FLAGS | RFlags::INTERRUPT_FLAG.bits() | 2;
    }

    /// Whether user mode was left, rather than the kernel interrupted.
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

/// Waits for an interrupt. Called with interrupts off, as all of the kernel; what interrupts is served
/// before this returns, and no interrupt is lost between the caller's last look and the wait.
pub fn idle() {
    // SAFETY: `sti` takes effect after the next instruction, so the wait cannot miss an interrupt;
    // the handlers keep the kernel's rules. Memory may change meanwhile, so no `nomem`.
    unsafe { asm!("sti", "hlt", "cli", options(nostack)) };
}

/// Gives the core away until another CPU wants something of this one: waits, in the middle of whatever the
/// kernel does, for an interrupt whose handler takes no lock ([`Vector::Flush`](apic::Vector) and `Wake`).
/// Others wait until interrupts are on. As in [`idle`], none is lost.
pub fn park() {
    /// Below the highest class of interrupts.
    const MASKED: u64 = 0xe;
    // SAFETY: the priority is 0 everywhere else, and again afterwards. The handlers that may run keep the rules
    // of `Machine::park`. Memory may change meanwhile, so no `nomem`.
    unsafe {
        asm!("mov cr8, {masked}", "sti", "hlt", "cli", "mov cr8, {none}",
            masked = in(reg) MASKED, none = in(reg) 0u64, options(nostack));
    }
}

/// Serves the interrupts that came in meanwhile. For calls that take long, between two of their steps:
/// the caller holds no lock, and is in no call of the subsystem.
pub fn serve_interrupts() {
    // SAFETY: `sti` takes effect after the next instruction, and the handlers keep the kernel's rules.
    // Memory may change meanwhile, so no `nomem`.
    unsafe { asm!("sti", "nop", "nop", "cli", options(nostack)) };
}

const FS_BASE: Msr = Msr::new(0xc000_0100);
/// In the kernel the program's GS base is put aside here.
const USER_GS_BASE: Msr = Msr::new(0xc000_0102);

/// The program's FS base.
pub fn fs_base() -> u64 {
    // SAFETY: the register exists in 64-bit mode.
    unsafe { FS_BASE.read() }
}

/// Sets the program's FS base. What is no user address counts as 0.
pub fn set_fs_base(base: u64) {
    let (mut register, base) = (FS_BASE, if base >> 47 == 0 { base } else { 0 });
    // SAFETY: the kernel does not use FS; the base is canonical.
    unsafe { register.write(base) };
}

/// The program's GS base.
pub fn gs_base() -> u64 {
    // SAFETY: as `fs_base`.
    unsafe { USER_GS_BASE.read() }
}

/// Sets the program's GS base. What is no user address counts as 0.
pub fn set_gs_base(base: u64) {
    let (mut register, base) = (USER_GS_BASE, if base >> 47 == 0 { base } else { 0 });
    // SAFETY: not the kernel's own GS base; the base is canonical.
    unsafe { register.write(base) };
}

/// Ends the machine with the program's exit status, 0 to 255.
pub fn power_off(status: u8) -> ! {
    report!("exit {status}");
    console::end(status)
}

/// Switches on what the processor has for the kernel's protection, SYSCALL, and the FPU.
pub fn enable() {
    let has = features();
    let mut cr4 =
        Cr4::read() | Cr4Flags::OSFXSR | Cr4Flags::OSXMMEXCPT_ENABLE | Cr4Flags::PAGE_GLOBAL;
    cr4.set(Cr4Flags::SUPERVISOR_MODE_EXECUTION_PROTECTION, has.smep);
    cr4.set(Cr4Flags::SUPERVISOR_MODE_ACCESS_PREVENTION, has.smap);
    cr4.set(Cr4Flags::USER_MODE_INSTRUCTION_PREVENTION, has.umip);
    cr4.set(Cr4Flags::OSXSAVE, has.xsave);
    cr4.set(Cr4Flags::PCID, has.pcid);
    let cr0 = Cr0Flags::PROTECTED_MODE_ENABLE
        | Cr0Flags::MONITOR_COPROCESSOR
        | Cr0Flags::EXTENSION_TYPE
        | Cr0Flags::NUMERIC_ERROR
        | Cr0Flags::WRITE_PROTECT
        | Cr0Flags::ALIGNMENT_MASK
        | Cr0Flags::PAGING;
    // SAFETY: paging, protection and long mode stay as they are; the other flags say what the kernel
    // is made for. CR3 has identifier 0, as PCID wants it to be switched on.
    unsafe {
        Cr4::write(cr4);
        Cr0::write(cr0);
        Efer::update(|efer| {
            *efer |= EferFlags::SYSTEM_CALL_EXTENSIONS | EferFlags::NO_EXECUTE_ENABLE;
        });
    }
    descriptors::enable_system_calls();
    fpu::enable();
}

/// What the processor has, as far as the kernel asks, under Intel's names.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "features have their names")]
pub struct Features {
    pub smep: bool,
    pub smap: bool,
    pub umip: bool,
    pub xsave: bool,
    pub pcid: bool,
}

/// Asks the processor.
pub fn features() -> Features {
    let cpuid = raw_cpuid::CpuId::new();
    let basic = cpuid.get_feature_info();
    let extended = cpuid.get_extended_feature_info();
    Features {
        smep: extended.as_ref().is_some_and(|info| info.has_smep()),
        smap: extended.as_ref().is_some_and(|info| info.has_smap()),
        umip: extended.as_ref().is_some_and(|info| info.has_umip()),
        xsave: basic.as_ref().is_some_and(|info| info.has_xsave()),
        pcid: basic.as_ref().is_some_and(|info| info.has_pcid()),
    }
}
