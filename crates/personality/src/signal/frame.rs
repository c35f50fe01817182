//! Signal frames: the data on a handler's stack, and the return from a handler.
//!
//! From lower to higher addresses: the handler's return address, `ucontext`, `siginfo`, and the
//! FPU's registers in XSAVE format, with Linux's magic numbers around the part unknown to older
//! programs. A program may return with any frame. So `rt_sigreturn` restores only state that user
//! mode may change: general registers, user flags, an FPU state accepted by the processor, and no
//! selector. A bad return address faults like any jump to this address.

use super::action::Action;
use super::info::Info;
use super::mask::block;
use super::send;
use super::set::{AlternateStack, Set, Trap};
use crate::errno::{Errno, Result};
use crate::task::current;
use core::mem::offset_of;
use faultless::USER_END;
use faultless_bare::arch::fpu::{self, FpuState, LEGACY_BYTES, Unfit};
use faultless_bare::arch::user::{self, Plain};
use faultless_bare::arch::{TrapFrame, USER_CODE, USER_DATA};
use faultless_collections::Vec;
use linux_raw_sys::general as linux;
use x86_64::registers::rflags::RFlags;

/// Bytes below the stack pointer that a function may use (the red zone).
const RED_ZONE: u64 = 128;
/// The smallest stack for `sigaltstack`.
pub const MIN_STACK: u64 = 2048;

/// `uc_flags`: the FPU state is in XSAVE format, and SS is valid.
const XSTATE: u64 = 1;
const HAS_SS: u64 = 2;
const STRICT_SS: u64 = 4;

/// Magic numbers before and after the extended part of XSAVE.
const MAGIC_1: u32 = 0x4650_5853;
const MAGIC_2: u32 = 0x4650_5845;
/// Offset in the first 512 bytes of the software-reserved part, which describes the extended part.
const SOFTWARE_AT: usize = 464;

/// `struct sigcontext`: the registers of the program interrupted by the handler.
#[repr(C)]
#[derive(Clone, Copy)]
struct Context {
    r8_to_r15: [u64; 8],
    rdi: u64,
    rsi: u64,
    rbp: u64,
    rbx: u64,
    rdx: u64,
    rax: u64,
    rcx: u64,
    rsp: u64,
    rip: u64,
    rflags: u64,
    cs: u16,
    gs: u16,
    fs: u16,
    ss: u16,
    error: u64,
    vector: u64,
    old_mask: u64,
    cr2: u64,
    fpu: u64,
    reserved: [u64; 8],
}

/// `struct ucontext`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UserContext {
    flags: u64,
    link: u64,
    stack: AlternateStack,
    context: Context,
    blocked: Set,
}

/// `struct rt_sigframe`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Frame {
    returns_to: u64,
    user: UserContext,
    info: Info,
}

// SAFETY: integers without padding, by the assertions below.
unsafe impl Plain for UserContext {}
// SAFETY: as above.
unsafe impl Plain for Frame {}

const _: () = {
    // By Linux's `asm/sigcontext.h` and `asm/ucontext.h`.
    assert!(size_of::<Context>() == 256 && offset_of!(Context, fpu) == 184);
    assert!(offset_of!(Context, rip) == 128 && offset_of!(Context, cs) == 144);
    assert!(size_of::<UserContext>() == 304 && offset_of!(UserContext, blocked) == 296);
    assert!(size_of::<Frame>() == 440 && offset_of!(Frame, info) == 312);
};

/// `struct _fpx_sw_bytes`: the description of the state after the first 512 bytes.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Software {
    magic: u32,
    /// Including the magic number at the end.
    all_bytes: u32,
    parts: u64,
    bytes: u32,
    padding: [u32; 7],
}
const _: () = assert!(size_of::<Software>() == LEGACY_BYTES - SOFTWARE_AT);

// SAFETY: integers without padding.
unsafe impl Plain for Software {}

/// The maximum size of a frame in bytes, for `AT_MINSIGSTKSZ` in the auxiliary vector.
pub fn frame_bytes() -> u64 {
    const ALIGNMENT: u64 = 64;
    size_of::<Frame>() as u64 + fpu_bytes(fpu::state_bytes() as u64) + RED_ZONE + ALIGNMENT
}

/// Bytes of the FPU state in a frame, for a state of `bytes`.
const fn fpu_bytes(bytes: u64) -> u64 {
    if bytes > LEGACY_BYTES as u64 { bytes + size_of::<u32>() as u64 } else { bytes }
}

/// Makes the running thread continue in `handler`, with a signal frame on its stack.
pub(super) fn push(
    registers: &mut TrapFrame,
    info: &Info,
    action: &Action,
    handler: u64,
    blocked: Set,
) -> Result<()> {
    let thread = current();
    let stack = thread.signals.stack.get();
    let on_alternate = action.has(linux::SA_ONSTACK)
        && stack.size != 0
        && stack.flags & linux::SS_DISABLE == 0
        && !stack.holds(registers.rsp);
    let top = if on_alternate {
        stack.start.wrapping_add(stack.size)
    } else {
        registers.rsp.wrapping_sub(RED_ZONE)
    };
    let mut state = FpuState::try_new().ok_or(Errno::ENOMEM)?;
    let fresh = FpuState::try_new().ok_or(Errno::ENOMEM)?;
    fpu::save(&mut state);
    let bytes = state.bytes();
    let fpu_at = top.wrapping_sub(fpu_bytes(bytes.len() as u64)) & !63;
    // As after a call: 8 bytes below a multiple of 16.
    let at = (fpu_at.wrapping_sub(size_of::<Frame>() as u64) & !15).wrapping_sub(8);
    // A handler does not start if its stack is too small, or if there is no return address.
    if (on_alternate || stack.holds(registers.rsp)) && !stack.spans(at)
        || !action.has(linux::SA_RESTORER)
    {
        return Err(Errno::EFAULT);
    }
    let extended = bytes.len() > LEGACY_BYTES;
    write_fpu(fpu_at, bytes)?;
    let frame = Frame {
        returns_to: action.restorer,
        user: UserContext {
            flags: HAS_SS | STRICT_SS | if extended { XSTATE } else { 0 },
            link: 0,
            stack,
            context: context(registers, &thread.signals.trap.get(), fpu_at, blocked),
            blocked,
        },
        info: *info,
    };
    user::write(at, &frame)?;
    if stack.flags & linux::SS_AUTODISARM != 0 {
        thread.signals.stack.set(AlternateStack::NONE);
    }
    registers.rdi = u64::from(info.signal());
    registers.rsi = at + offset_of!(Frame, info) as u64;
    registers.rdx = at + offset_of!(Frame, user) as u64;
    registers.rax = 0;
    registers.rip = handler;
    registers.rsp = at;
    let cleared = RFlags::DIRECTION_FLAG | RFlags::RESUME_FLAG | RFlags::TRAP_FLAG;
    registers.rflags &= !cleared.bits();
    fpu::restore(&fresh);
    Ok(())
}

fn write_fpu(at: u64, bytes: &[u8]) -> Result<()> {
    user::write_bytes(at, bytes)?;
    let mut software = Software::default();
    if bytes.len() > LEGACY_BYTES {
        software = Software {
            magic: MAGIC_1,
            all_bytes: fpu_bytes(bytes.len() as u64) as u32,
            parts: fpu::parts(),
            bytes: bytes.len() as u32,
            ..software
        };
        user::write(at + bytes.len() as u64, &MAGIC_2)?;
    }
    Ok(user::write(at + SOFTWARE_AT as u64, &software)?)
}

fn context(registers: &TrapFrame, trap: &Trap, fpu: u64, blocked: Set) -> Context {
    let r = registers;
    Context {
        r8_to_r15: [r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14, r.r15],
        rdi: r.rdi,
        rsi: r.rsi,
        rbp: r.rbp,
        rbx: r.rbx,
        rdx: r.rdx,
        rax: r.rax,
        rcx: r.rcx,
        rsp: r.rsp,
        rip: r.rip,
        rflags: r.rflags,
        cs: USER_CODE,
        gs: 0,
        fs: 0,
        ss: USER_DATA,
        error: trap.error,
        vector: trap.vector,
        old_mask: blocked,
        cr2: trap.addr,
        fpu,
        reserved: [0; 8],
    }
}

/// Restores the frame of the handler with the registers `registers`, and returns the frame's `rax`.
/// A bad frame causes `SIGSEGV`.
pub fn restore(registers: &mut TrapFrame) -> u64 {
    // The handler's return has popped the address.
    let at = registers.rsp.wrapping_sub(size_of::<u64>() as u64);
    if try_restore(registers, at).is_err() {
        send::force_segv(0);
    }
    registers.rax
}

fn try_restore(registers: &mut TrapFrame, at: u64) -> Result<()> {
    let from: UserContext = user::read(at.wrapping_add(offset_of!(Frame, user) as u64))?;
    let context = &from.context;
    // There is only 64-bit mode, and programs run in user space.
    if context.cs | 3 != USER_CODE || context.rip >= USER_END {
        return Err(Errno::EFAULT);
    }
    let state = read_fpu(context.fpu)?;
    let [r8, r9, r10, r11, r12, r13, r14, r15] = context.r8_to_r15;
    *registers = TrapFrame {
        r8,
        r9,
        r10,
        r11,
        r12,
        r13,
        r14,
        r15,
        rdi: context.rdi,
        rsi: context.rsi,
        rbp: context.rbp,
        rbx: context.rbx,
        rdx: context.rdx,
        rax: context.rax,
        rcx: context.rcx,
        rsp: context.rsp,
        rip: context.rip,
        rflags: context.rflags,
        ..*registers
    };
    registers.restrict();
    fpu::restore(&state);
    // As in `sigaltstack`, a bad value changes no state.
    let _ = set_stack(&from.stack, registers.rsp);
    block(from.blocked);
    Ok(())
}

/// Reads the FPU state at `at` in the program's memory; the initial state if `at` is null.
fn read_fpu(at: u64) -> Result<FpuState> {
    let mut state = FpuState::try_new().ok_or(Errno::ENOMEM)?;
    if at == 0 {
        return Ok(state);
    }
    let whole = state.bytes().len();
    let software: Software = user::read(at.wrapping_add(SOFTWARE_AT as u64))?;
    let extended = whole > LEGACY_BYTES
        && software.magic == MAGIC_1
        && software.bytes as usize == whole
        && user::read::<u32>(at.wrapping_add(whole as u64)) == Ok(MAGIC_2);
    let mut bytes = Vec::try_filled(0, if extended { whole } else { LEGACY_BYTES })?;
    user::read_bytes(&mut bytes, at)?;
    let parts = if extended { software.parts } else { !0 };
    state.take(&bytes, parts).map_err(|Unfit| Errno::EFAULT)?;
    Ok(state)
}

/// Sets the alternate stack of the running thread with the stack pointer `sp`.
///
/// # Errors
/// `EPERM` if the stack is in use; `EINVAL`; `ENOMEM` if the new stack is too small.
pub fn set_stack(new: &AlternateStack, sp: u64) -> Result<()> {
    let stack = &current().signals.stack;
    if stack.get().holds(sp) {
        return Err(Errno::EPERM);
    }
    let mode = new.flags & !linux::SS_AUTODISARM;
    match mode {
        linux::SS_DISABLE => stack.set(AlternateStack::NONE),
        0 | linux::SS_ONSTACK if new.size < MIN_STACK => return Err(Errno::ENOMEM),
        0 | linux::SS_ONSTACK => {
            let flags = new.flags & linux::SS_AUTODISARM;
            stack.set(AlternateStack { flags, padding: 0, ..*new });
        }
        _ => return Err(Errno::EINVAL),
    }
    Ok(())
}
