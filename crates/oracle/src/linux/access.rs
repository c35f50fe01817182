//! Real accesses with a result: the loaded value, or the kernel's signal.
//!
//! Each kind of access is one instruction with a label. The signal handler checks whether this
//! instruction was interrupted, writes the signal into the result registers, and continues at a
//! `ret`. An access therefore behaves exactly like a program's access, and leaves no state on any
//! stack.
//!
//! An instruction is fetched by a jump under the trap flag: the processor stops before the
//! instruction, and again behind it. Programs of this kind store no bytes at the fetched addresses,
//! so the executed instruction is two bytes of zeros: `add [rax], al`, with `rax` pointing to a
//! byte of this program.

use crate::seen::Signal;
use std::arch::global_asm;
use std::cell::UnsafeCell;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

/// An access's result, in the two registers of function results.
#[repr(C)]
struct Answer {
    /// The found value, or the signal.
    value: u64,
    /// Whether the value is a signal.
    failed: u64,
}

global_asm!(
    ".global oracle_load, oracle_store, oracle_touch, oracle_fetch, oracle_return",
    "oracle_load:",
    "mov rax, [rdi]",
    "xor edx, edx",
    "ret",
    "oracle_store:",
    "mov [rdi], rsi",
    "xor edx, edx",
    "ret",
    "oracle_touch:",
    "lock add byte ptr [rdi], 0",
    "xor edx, edx",
    "ret",
    "oracle_fetch:",
    "mov rax, rsi",
    "pushfq",
    "or qword ptr [rsp], 0x100",
    "popfq",
    "jmp rdi",
    "oracle_return:",
    "ret",
);

unsafe extern "C" {
    fn oracle_load(addr: u64) -> Answer;
    fn oracle_store(addr: u64, value: u64) -> Answer;
    fn oracle_touch(addr: u64) -> Answer;
    fn oracle_fetch(addr: u64, scratch: *mut u8) -> Answer;
    fn oracle_return();
}

/// The address of an instruction fetch in progress; 0: none.
static FETCHING: AtomicU64 = AtomicU64::new(0);

/// The trap flag.
const TF: i64 = 0x100;

/// Handles signals of the instructions above. Every other interrupted instruction gets the default
/// action.
extern "C" fn answer(number: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes both pointers, as defined for SA_SIGINFO.
    let (code, registers) = unsafe {
        let context = context.cast::<libc::ucontext_t>();
        ((*info).si_code, &mut (*context).uc_mcontext.gregs)
    };
    let at = registers[libc::REG_RIP as usize] as u64;
    let fetching = FETCHING.load(Ordering::Relaxed);
    let ours = [
        oracle_load as *const () as u64,
        oracle_store as *const () as u64,
        oracle_touch as *const () as u64,
    ]
    .contains(&at);
    let failed = if number == libc::SIGTRAP {
        if at == fetching {
            // Between the jump and its target.
            return;
        }
        false
    } else if ours || (fetching != 0 && at == fetching) {
        true
    } else {
        // SAFETY: plain call. The instruction is tried again, and ends the process.
        unsafe { libc::signal(number, libc::SIG_DFL) };
        return;
    };
    let word = (number as u64) << 32 | u64::from(code as u32);
    registers[libc::REG_RAX as usize] = if failed { word as i64 } else { 0 };
    registers[libc::REG_RDX as usize] = failed.into();
    registers[libc::REG_RIP as usize] = oracle_return as *const () as i64;
    registers[libc::REG_EFL as usize] &= !TF;
}

/// Installs the handler in this process and its forked children.
pub fn install() {
    const STACK: usize = 64 << 10;
    struct Stack(UnsafeCell<[u8; STACK]>);
    // SAFETY: only the kernel uses the stack, for the only thread of a process.
    unsafe impl Sync for Stack {}
    static ALTERNATE: Stack = Stack(UnsafeCell::new([0; STACK]));
    // SAFETY: plain calls; the stack belongs to this process alone, which has one thread.
    unsafe {
        let ss_sp = ALTERNATE.0.get().cast();
        let stack = libc::stack_t { ss_sp, ss_flags: 0, ss_size: STACK };
        libc::sigaltstack(&raw const stack, ptr::null_mut());
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = answer as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        for number in [libc::SIGSEGV, libc::SIGBUS, libc::SIGTRAP] {
            libc::sigaction(number, &raw const action, ptr::null_mut());
        }
    }
}

fn result(answer: Answer) -> Result<u64, Signal> {
    if answer.failed == 0 {
        return Ok(answer.value);
    }
    Err(Signal { number: (answer.value >> 32) as i32, code: answer.value as u32 as i32 })
}

/// Loads eight bytes.
pub fn load(addr: u64) -> Result<u64, Signal> {
    // SAFETY: whatever the address, a load changes no memory of this program.
    result(unsafe { oracle_load(addr) })
}

/// Stores eight bytes.
///
/// # Safety
/// The address is outside of this program's memory.
pub unsafe fn store(addr: u64, value: u64) -> Result<u64, Signal> {
    // SAFETY: handed on.
    result(unsafe { oracle_store(addr, value) })
}

/// Adds 0 to a byte.
pub fn touch(addr: u64) -> Result<u64, Signal> {
    // SAFETY: the access changes no byte.
    result(unsafe { oracle_touch(addr) })
}

/// Fetches an instruction.
///
/// # Safety
/// If the instruction can be executed, it is two bytes of zeros.
pub unsafe fn fetch(addr: u64) -> Result<u64, Signal> {
    let mut scratch = 0u8;
    FETCHING.store(addr, Ordering::Relaxed);
    // SAFETY: handed on; `add [rax], al` changes the scratch byte only.
    let answer = unsafe { oracle_fetch(addr, &raw mut scratch) };
    FETCHING.store(0, Ordering::Relaxed);
    result(answer)
}
