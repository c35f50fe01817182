//! The processor: features, halting, and the registers used only by programs.

use super::fpu;
use core::arch::asm;
use faultless::format::PAGE_ATTRIBUTES;
use x86_64::registers::control::{Cr0, Cr0Flags, Cr4, Cr4Flags, Efer, EferFlags};
use x86_64::registers::model_specific::Msr;

/// Waits for an interrupt. Called with interrupts off, like all kernel code. The interrupt is
/// served before this function returns, and no interrupt is lost between the caller's last check
/// and the wait.
pub fn idle() {
    // SAFETY: `sti` takes effect after the next instruction, so the wait cannot miss an interrupt;
    // the handlers keep the kernel's rules. Memory may change during the wait, so no `nomem`.
    unsafe { asm!("sti", "hlt", "cli", options(nostack)) };
}

/// Halts, anywhere in the kernel, until an interrupt whose handler takes no lock
/// ([`Vector::Flush`](super::apic::Vector) or `Wake`). Other interrupts stay pending until
/// interrupts are on. As in [`idle`], no interrupt is lost.
pub fn park() {
    /// The task priority that admits only the highest class of interrupts.
    const MASKED: u64 = 0xe;
    // SAFETY: the priority is 0 everywhere else, and again afterwards. The handlers that may run
    // keep the rules of `Machine::park`. Memory may change during the wait, so no `nomem`.
    unsafe {
        asm!("mov cr8, {masked}", "sti", "hlt", "cli", "mov cr8, {none}",
            masked = in(reg) MASKED, none = in(reg) 0u64, options(nostack));
    }
}

/// Serves pending interrupts. For long system calls, between two steps:
/// the caller holds no lock, and is not inside the subsystem.
pub fn serve_interrupts() {
    // SAFETY: `sti` takes effect after the next instruction, and the handlers keep the kernel's
    // rules. Memory may change in between, so no `nomem`.
    unsafe { asm!("sti", "nop", "nop", "cli", options(nostack)) };
}

const FS_BASE: Msr = Msr::new(0xc000_0100);
/// Holds the program's GS base while the kernel runs.
const USER_GS_BASE: Msr = Msr::new(0xc000_0102);

/// The program's FS base.
pub fn fs_base() -> u64 {
    // SAFETY: the register exists in 64-bit mode.
    unsafe { FS_BASE.read() }
}

/// Sets the program's FS base; 0 if `base` is no user address.
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

/// Sets the program's GS base; 0 if `base` is no user address.
pub fn set_gs_base(base: u64) {
    let (mut register, base) = (USER_GS_BASE, if base >> 47 == 0 { base } else { 0 });
    // SAFETY: not the kernel's own GS base; the base is canonical.
    unsafe { register.write(base) };
}

/// The page attribute table. Page-table entries select one of its eight entries for the caching of
/// memory.
const PAT: Msr = Msr::new(0x277);

/// The CPU's page attribute table ([`PAGE_ATTRIBUTES`] once the CPU has started).
pub fn page_attributes() -> u64 {
    // SAFETY: every processor with 64-bit mode has the register.
    unsafe { PAT.read() }
}

/// Enables the processor's protection features, the caching modes of device memory required by the
/// subsystem, and the FPU.
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
    // SAFETY: paging, protection and long mode do not change; the kernel is made for the other
    // flags. CR3 has identifier 0, which enabling PCID requires.
    unsafe {
        Cr4::write(cr4);
        Cr0::write(cr0);
        Efer::update(|efer| {
            *efer |= EferFlags::SYSTEM_CALL_EXTENSIONS | EferFlags::NO_EXECUTE_ENABLE;
        });
    }
    let mut pat = PAT;
    // SAFETY: the register exists, and the value consists of memory types. The write changes only
    // entry 2, which no page-table entry of the kernel selects; so no cached translation or line
    // changes its type, and no flush is needed.
    unsafe { pat.write(PAGE_ATTRIBUTES) };
    fpu::enable(has.xsave);
}

/// The features of the processor checked by the kernel, under Intel's names.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "features have their names")]
pub struct Features {
    pub smep: bool,
    pub smap: bool,
    pub umip: bool,
    pub xsave: bool,
    pub pcid: bool,
}

/// Reads the features of the processor.
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
