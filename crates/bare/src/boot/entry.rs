//! The first instructions of every CPU.
//!
//! The boot CPU arrives at `pvh_entry`, by the PVH protocol: 32-bit, no paging, `ebx` the start
//! info. The other CPUs arrive in real mode at a copy of `trampoline` below 1 MiB ([`TRAMPOLINE`]).
//! All CPUs continue at `long_mode`: they load the boot tables, which map the first GiB of physical
//! memory at 0, in the direct map and at the image. Then they jump to the image: the boot CPU to
//! [`start`](super::start), the other CPUs, on the stack in [`STACKS`] for their APIC ID, to
//! [`start_other`](super::cpus::start_other). Both soon replace the boot tables with the kernel's
//! own, whose lower half is empty.

use core::arch::global_asm;
use core::sync::atomic::AtomicU64;

/// The start address of the other CPUs in physical memory: below 1 MiB, a multiple of 4 KiB.
pub const TRAMPOLINE: u64 = 0x8000;

/// The top of the stack on which the CPU with this APIC ID starts; 0 for a CPU that is not started.
#[unsafe(no_mangle)]
pub static STACKS: [AtomicU64; 256] = [const { AtomicU64::new(0) }; 256];

/// Bytes of the boot CPU's stack, later used by its idle loop.
const BOOT_STACK: usize = 64 << 10;

/// The page below the boot CPU's stack, which becomes a guard.
pub fn boot_guard() -> *const u8 {
    unsafe extern "C" {
        static boot_stack_guard: u8;
    }
    &raw const boot_stack_guard
}

/// The bytes to be copied to [`TRAMPOLINE`].
pub fn trampoline() -> &'static [u8] {
    unsafe extern "C" {
        static trampoline_start: u8;
        static trampoline_end: u8;
    }
    // SAFETY: the two symbols delimit constant bytes of the image.
    unsafe {
        let len = (&raw const trampoline_end).offset_from_unsigned(&raw const trampoline_start);
        core::slice::from_raw_parts(&raw const trampoline_start, len)
    }
}

global_asm!(
    r#"
.set IMAGE_BASE, 0xffffffff80000000

.section .note.pvh, "a", @note
.align 4
.long 4, 8, 18                          # XEN_ELFNOTE_PHYS32_ENTRY
.asciz "Xen"
.quad pvh_entry - IMAGE_BASE

.section .text.boot, "ax"
.code32
.global pvh_entry
pvh_entry:
    cli
    cld
    movl %ebx, %esi
    lgdt boot_gdt_pointer - IMAGE_BASE

    # 512 pages of 2 MiB.
    movl $(boot_directory - IMAGE_BASE), %edi
    movl $0x83, %eax
    movl $512, %ecx
1:  movl %eax, (%edi)
    addl $0x200000, %eax
    addl $8, %edi
    loop 1b
    movl $(boot_directory - IMAGE_BASE + 3), boot_low - IMAGE_BASE
    movl $(boot_directory - IMAGE_BASE + 3), boot_high - IMAGE_BASE + 510 * 8
    movl $(boot_low - IMAGE_BASE + 3), boot_root - IMAGE_BASE
    movl $(boot_low - IMAGE_BASE + 3), boot_root - IMAGE_BASE + 273 * 8
    movl $(boot_high - IMAGE_BASE + 3), boot_root - IMAGE_BASE + 511 * 8

    xorl %ebp, %ebp
    ljmp $0x08, $(long_mode - IMAGE_BASE)

# In: ebp 0 on the boot CPU, whose start info is at esi.
long_mode:
    movw $0x10, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    movl $(1 << 5), %eax                # CR4.PAE
    movl %eax, %cr4
    movl $(boot_root - IMAGE_BASE), %eax
    movl %eax, %cr3
    movl $0xc0000080, %ecx              # EFER.LME and NXE
    rdmsr
    orl $((1 << 8) | (1 << 11)), %eax
    wrmsr
    movl $0x80010001, %eax              # CR0.PG, WP, PE
    movl %eax, %cr0
    ljmp $0x18, $(1f - IMAGE_BASE)
.code64
1:  movabsq $2f, %rax
    jmp *%rax
2:  testl %ebp, %ebp
    jnz 3f
    leaq boot_stack_end(%rip), %rsp
    movl %esi, %edi
    xorl %ebp, %ebp
    call {start}
    ud2
3:  movl $1, %eax                       # the APIC id
    xorl %ecx, %ecx
    cpuid
    shrl $24, %ebx
    leaq {stacks}(%rip), %rax
    movq (%rax, %rbx, 8), %rsp
    testq %rsp, %rsp
    jz 4f
    movl %ebx, %edi
    xorl %ebp, %ebp
    call {start_other}
    ud2
4:  cli
    hlt
    jmp 4b

.section .rodata.boot, "a"
.align 16
boot_gdt:
    .quad 0
    .quad 0x00cf9b000000ffff            # 0x08: 32-bit code
    .quad 0x00cf93000000ffff            # 0x10: data
    .quad 0x00af9b000000ffff            # 0x18: 64-bit code
boot_gdt_pointer:
    .word 31
    .long boot_gdt - IMAGE_BASE

.code16
trampoline_start:
    cli
    cld
    movw %cs, %ax
    movw %ax, %ds
    lgdtl 2f - trampoline_start
    movl %cr0, %eax
    orl $1, %eax
    movl %eax, %cr0
    ljmpl $0x08, $(1f - trampoline_start + {trampoline})
.code32
1:  movl $1, %ebp
    ljmp $0x08, $(long_mode - IMAGE_BASE)
2:  .word 31
    .long boot_gdt - IMAGE_BASE
trampoline_end:
.code64
.global trampoline_start
.global trampoline_end
.global boot_stack_guard

.section .bss.boot, "aw", @nobits
.align 4096
boot_root: .skip 4096
boot_low: .skip 4096
boot_high: .skip 4096
boot_directory: .skip 4096
boot_stack_guard: .skip 4096
boot_stack: .skip {boot_stack}
boot_stack_end:

.text
"#,
    start = sym super::start,
    start_other = sym super::cpus::start_other,
    stacks = sym STACKS,
    trampoline = const TRAMPOLINE,
    boot_stack = const BOOT_STACK,
    options(att_syntax)
);
