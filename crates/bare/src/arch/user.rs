//! Copies from and to user memory, safe for any pointer.
//!
//! The range is first checked against the end of user space. If the processor mispredicts this
//! check, the address is masked, so that a speculative copy of kernel memory has no effect on the
//! caches. Each instruction that accesses user memory is listed in `.fixups` with the address of
//! its fixup. On a fault, the handler serves the fault in the running space of this CPU, like a
//! fault of the program, and repeats the instruction. If the fault cannot be served, the handler
//! continues at the fixup, and the copy returns `EFAULT`. SMAP allows access to user memory (AC is
//! set) only in these few instructions.
//!
//! Callers hold no lock that a page fault needs, and are not inside the subsystem.

use super::smap::{clac, stac};
use core::arch::{asm, naked_asm};
use core::mem::MaybeUninit;
use core::ptr;
use faultless::{Errno, PAGE_SIZE, USER_END};
use faultless_collections::Vec;

/// Plain data.
///
/// # Safety
/// Every bit pattern is a valid value, and there is no padding, which could reveal other kernel
/// memory to a program.
pub unsafe trait Plain: Copy {}

macro_rules! plain {
    ($($type:ty),* $(,)?) => {
        // SAFETY: integers, without padding.
        $(unsafe impl Plain for $type {})*
    };
}

plain!(u8, u16, u32, u64, i8, i16, i32, i64, usize);

// SAFETY: as the elements; there is no padding between elements.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// An entry of `.fixups`: the instruction at `label` continues at `{fixup}`.
macro_rules! fixup {
    ($label:literal, $to:literal) => {
        concat!(".pushsection .fixups, \"a\"\n.quad ", $label, "b, ", $to, "f\n.popsection\n")
    };
}

/// Defines a function of `dst`, `src` and `len` that executes `$by` for words and then for bytes.
/// Returns whether an access faulted.
macro_rules! by_words {
    ($by:literal) => {
        naked_asm!(
            "mov rcx, rdx",
            "shr rcx, 3",
            "and edx, 7",
            "xor eax, eax",
            stac!(),
            concat!("20: rep ", $by, "q"),
            fixup!("20", "29"),
            "mov ecx, edx",
            concat!("21: rep ", $by, "b"),
            fixup!("21", "29"),
            clac!(),
            "ret",
            "29:",
            clac!(),
            "mov eax, 1",
            "ret",
        )
    };
}

/// Copies `len` bytes; one side is user memory. Returns whether an access faulted.
#[unsafe(naked)]
unsafe extern "C" fn copy(dst: *mut u8, src: *const u8, len: usize) -> bool {
    by_words!("movs")
}

/// Fills `len` bytes of user memory with zeros, without reading memory. Returns whether an access
/// faulted.
#[unsafe(naked)]
unsafe extern "C" fn fill(dst: *mut u8, nothing: *const u8, len: usize) -> bool {
    by_words!("stos")
}

/// Copies bytes of user memory up to and including the first zero, at most `len`. Returns the
/// number of copied bytes, or -1 after a fault.
#[unsafe(naked)]
unsafe extern "C" fn copy_string(dst: *mut u8, src: *const u8, len: usize) -> isize {
    naked_asm!(
        "xor eax, eax",
        stac!(),
        "2: cmp rax, rdx",
        "je 3f",
        "20: mov cl, [rsi + rax]",
        fixup!("20", "29"),
        "mov [rdi + rax], cl",
        "inc rax",
        "test cl, cl",
        "jnz 2b",
        "3:",
        clac!(),
        "ret",
        "29:",
        clac!(),
        "mov rax, -1",
        "ret",
    )
}

/// Loads a word of user memory into `value`. Returns whether the access faulted.
#[unsafe(naked)]
unsafe extern "C" fn load(value: *mut u32, src: *const u32) -> bool {
    naked_asm!(
        stac!(),
        "20: mov ecx, [rsi]",
        fixup!("20", "29"),
        clac!(),
        "mov [rdi], ecx",
        "xor eax, eax",
        "ret",
        "29:",
        clac!(),
        "mov eax, 1",
        "ret",
    )
}

/// Atomically replaces a word of user memory with `new` if the word equals `*value`; `*value`
/// becomes the old value. Returns whether the access faulted.
#[unsafe(naked)]
unsafe extern "C" fn exchange(value: *mut u32, dst: *mut u32, new: u32) -> bool {
    naked_asm!(
        "mov eax, [rdi]",
        stac!(),
        "20: lock cmpxchg [rsi], edx",
        fixup!("20", "29"),
        clac!(),
        "mov [rdi], eax",
        "xor eax, eax",
        "ret",
        "29:",
        clac!(),
        "mov eax, 1",
        "ret",
    )
}

/// Returns `addr` if the `len` bytes from `addr` on are user addresses.
#[inline(always)]
fn check(addr: u64, len: usize) -> Result<u64, Errno> {
    match addr.checked_add(len as u64) {
        Some(end) if end <= USER_END => Ok(masked(addr)),
        _ => Err(Errno::EFAULT),
    }
}

/// Returns `addr` if it is below the end of user space, otherwise 0. Computed without a branch, so
/// the result is also right under speculation.
#[inline(always)]
fn masked(addr: u64) -> u64 {
    let mask: u64;
    // SAFETY: computes only.
    unsafe {
        asm!("cmp {addr}, {end}", "sbb {mask}, {mask}", addr = in(reg) addr,
            end = in(reg) USER_END, mask = lateout(reg) mask,
            options(pure, nomem, nostack));
    }
    addr & mask
}

#[inline(always)]
fn done(failed: bool) -> Result<(), Errno> {
    if failed { Err(Errno::EFAULT) } else { Ok(()) }
}

/// Copies `len` bytes of the program's memory, from `src` on. On an error `dst` may be partly
/// written.
///
/// # Errors
/// `EFAULT`.
///
/// # Safety
/// `dst` is valid for writes of `len` bytes of kernel memory.
#[inline]
pub unsafe fn copy_in(dst: *mut u8, src: u64, len: usize) -> Result<(), Errno> {
    let src = check(src, len)?;
    // SAFETY: `dst` by the contract; the user side may fault, but is not kernel memory.
    done(unsafe { copy(dst, src as *const u8, len) })
}

/// Copies `len` bytes to the program's memory at `dst`.
///
/// # Errors
/// `EFAULT`; a part may have been copied.
///
/// # Safety
/// `src` is valid for reads of `len` bytes of kernel memory.
#[inline]
pub unsafe fn copy_out(dst: u64, src: *const u8, len: usize) -> Result<(), Errno> {
    let dst = check(dst, len)?;
    // SAFETY: as `copy_in`.
    done(unsafe { copy(dst as *mut u8, src, len) })
}

/// Fills `bytes` from the program's memory.
///
/// # Errors
/// `EFAULT`.
pub fn read_bytes(bytes: &mut [u8], src: u64) -> Result<(), Errno> {
    // SAFETY: the slice is valid.
    unsafe { copy_in(bytes.as_mut_ptr(), src, bytes.len()) }
}

/// Copies `bytes` to the program's memory.
///
/// # Errors
/// `EFAULT`.
pub fn write_bytes(dst: u64, bytes: &[u8]) -> Result<(), Errno> {
    // SAFETY: the slice is valid.
    unsafe { copy_out(dst, bytes.as_ptr(), bytes.len()) }
}

/// Fills `len` bytes of the program's memory with zeros.
///
/// # Errors
/// `EFAULT`.
pub fn zero_out(dst: u64, len: usize) -> Result<(), Errno> {
    let dst = check(dst, len)?;
    // SAFETY: user memory.
    done(unsafe { fill(dst as *mut u8, ptr::null(), len) })
}

/// A value in the program's memory, at any address.
///
/// # Errors
/// `EFAULT`.
#[inline]
pub fn read<T: Plain>(addr: u64) -> Result<T, Errno> {
    let mut value = MaybeUninit::<T>::uninit();
    // SAFETY: the value is valid for writes of its size.
    unsafe { copy_in(value.as_mut_ptr().cast(), addr, size_of::<T>()) }?;
    // SAFETY: all of its bytes were written, and any bit pattern is valid (`Plain`).
    Ok(unsafe { value.assume_init() })
}

/// Stores a value in the program's memory, at any address.
///
/// # Errors
/// `EFAULT`.
#[inline]
pub fn write<T: Plain>(addr: u64, value: &T) -> Result<(), Errno> {
    // SAFETY: the value is valid for reads of its size.
    unsafe { copy_out(addr, (&raw const *value).cast(), size_of::<T>()) }
}

/// Returns the bytes of a string in the program's memory, without the terminating zero; `None` if
/// the first `max` bytes contain no zero.
///
/// # Errors
/// `EFAULT`; `ENOMEM`.
pub fn string(addr: u64, max: usize) -> Result<Option<Vec<u8>>, Errno> {
    let mut bytes = Vec::new();
    while bytes.len() < max {
        let at = addr.checked_add(bytes.len() as u64).ok_or(Errno::EFAULT)?;
        // A page at a time: the memory after the string need not be mapped.
        let piece = (PAGE_SIZE - at % PAGE_SIZE).min((max - bytes.len()) as u64) as usize;
        let at = check(at, piece)?;
        bytes.try_reserve(piece).map_err(|_| Errno::ENOMEM)?;
        let free = bytes.spare_capacity_mut();
        // SAFETY: `piece` bytes were reserved.
        let copied = unsafe { copy_string(free.as_mut_ptr().cast(), at as *const u8, piece) };
        let copied = usize::try_from(copied).map_err(|_| Errno::EFAULT)?;
        // SAFETY: this number of bytes was written.
        unsafe { bytes.set_len(bytes.len() + copied) };
        if bytes.last() == Some(&0) {
            bytes.pop();
            return Ok(Some(bytes));
        }
    }
    Ok(None)
}

/// Atomically loads the word at `addr`, a multiple of 4.
///
/// # Errors
/// `EFAULT`.
pub fn load_u32(addr: u64) -> Result<u32, Errno> {
    let addr = check(addr, 4)?;
    let mut value = 0;
    // SAFETY: one side is kernel memory, the other is user memory.
    done(unsafe { load(&mut value, addr as *const u32) })?;
    Ok(value)
}

/// Atomically replaces the word at `addr`, a multiple of 4, with `new` if the word is `old`.
/// Returns `Ok` with the old value, or `Err` with the present value.
///
/// # Errors
/// `EFAULT`.
pub fn compare_exchange_u32(addr: u64, old: u32, new: u32) -> Result<Result<u32, u32>, Errno> {
    let addr = check(addr, 4)?;
    let mut value = old;
    // SAFETY: one side is kernel memory, the other is user memory.
    done(unsafe { exchange(&mut value, addr as *mut u32, new) })?;
    Ok(if value == old { Ok(old) } else { Err(value) })
}

unsafe extern "C" {
    static __fixups_start: [u64; 2];
    static __fixups_end: [u64; 2];
}

/// Returns the address to continue at after an unserved fault of the instruction at `rip`; `None`
/// if the instruction is not listed.
pub(crate) fn fixup(rip: u64) -> Option<u64> {
    // SAFETY: the pairs lie between the two symbols, by the linker script.
    let pairs = unsafe {
        let len = (&raw const __fixups_end).offset_from_unsigned(&raw const __fixups_start);
        core::slice::from_raw_parts(&raw const __fixups_start, len)
    };
    pairs.iter().find(|pair| pair[0] == rip).map(|pair| pair[1])
}
