//! `faults [CHECK…]`: the behaviour of faults. Signals describe faults correctly; handlers can
//! repair the fault, jump out, or run on another stack; and a fault has no other effects.

use faultless_guest::args::Args;
use faultless_guest::check::{Check, Verdict};
use faultless_guest::mem::{NONE, PAGE, READ, Region, WRITE, load};
use faultless_guest::proc::{self, Status, fork, kill, pid};
use faultless_guest::signal::{self, NOTED, contains, handle, handle_with, mask, note};
use faultless_guest::sys::{Errno, call, checked, doing};
use faultless_guest::{check, ensure, same};
use std::arch::{asm, global_asm};
use std::fs::File;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::{null, null_mut};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Instant;

/// The page that [`open_up`] makes writable.
static PAGE_TO_OPEN: AtomicU64 = AtomicU64::new(0);

/// Records the fault and makes the page writable, so that the repeated access succeeds.
extern "C" fn open_up(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the arguments come from the kernel.
    unsafe { note(signal, info, context) };
    let page = PAGE_TO_OPEN.load(Relaxed);
    // SAFETY: the page belongs to a check's region.
    let _ = unsafe { call(libc::SYS_mprotect, [page, PAGE, WRITE as u64]) };
}

// `faultless_catch(body, argument)` calls `body(argument)` and returns 0, or 1 if
// `faultless_throw` is called in the meantime, also from a signal handler: a minimal `sigsetjmp`
// and `siglongjmp`.
global_asm!(
    ".globl faultless_catch",
    "faultless_catch:",
    "push rbx",
    "push rbp",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "sub rsp, 8",
    "mov [rip + faultless_catch_stack], rsp",
    "mov rax, rdi",
    "mov rdi, rsi",
    "call rax",
    "xor eax, eax",
    "jmp 3f",
    ".globl faultless_throw",
    "faultless_throw:",
    "mov rsp, [rip + faultless_catch_stack]",
    "mov eax, 1",
    "3:",
    "add rsp, 8",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbp",
    "pop rbx",
    "ret",
    ".local faultless_catch_stack",
    ".comm faultless_catch_stack, 8, 8",
);

unsafe extern "C" {
    fn faultless_catch(body: extern "C" fn(u64), argument: u64) -> i32;
    fn faultless_throw() -> !;
}

/// Records the signal and leaves by a jump, without returning to the interrupted code.
extern "C" fn jump_out(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the arguments come from the kernel.
    unsafe { note(signal, info, context) };
    // SAFETY: the handler runs within `faultless_catch`; no frame in between has destructors.
    unsafe { faultless_throw() }
}

extern "C" fn probe(addr: u64) {
    load(addr);
}

extern "C" fn overflow(depth: u64) {
    let mut frame = [depth; 512];
    // SAFETY: the pointer is to a local.
    unsafe { asm!("/* {0} */", in(reg) frame.as_mut_ptr(), options(nostack)) };
    if depth < u64::MAX {
        overflow(depth + 1);
    }
    // SAFETY: as above; the frame is used after the call, which prevents a tail call.
    unsafe { asm!("/* {0} */", in(reg) frame.as_mut_ptr(), options(nostack)) };
}

fn page(prot: i32) -> Result<Region, String> {
    doing("mmap", Region::map(PAGE, prot, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0))
}

/// Returns whether `body(argument)` was left by a jump.
fn jumped(body: extern "C" fn(u64), argument: u64) -> bool {
    // SAFETY: neither the bodies nor the handlers have destructors.
    unsafe { faultless_catch(body, argument) == 1 }
}

/// Checks the record of a fault at `addr`.
fn noted(signal: i32, code: i32, addr: u64) -> Verdict {
    same!(NOTED.signal.load(Relaxed), signal, "the signal");
    same!(NOTED.code.load(Relaxed), code, "si_code");
    same!(NOTED.addr.load(Relaxed), addr, "si_addr");
    Ok(())
}

/// `SIGSEGV` reports the address and the reason: `SEGV_MAPERR` or `SEGV_ACCERR`.
fn segv_info() -> Verdict {
    const MAPERR: i32 = 1;
    const ACCERR: i32 = 2;
    doing("sigaction", handle(libc::SIGSEGV, jump_out, libc::SA_NODEFER))?;
    let region = page(NONE)?;
    let at = region.start() + 24;
    ensure!(jumped(probe, at), "a load from PROT_NONE succeeded");
    noted(libc::SIGSEGV, ACCERR, at)?;
    doing("munmap", region.unmap(0, PAGE))?;
    ensure!(jumped(probe, at), "a load from unmapped memory succeeded");
    noted(libc::SIGSEGV, MAPERR, at)?;
    ensure!(jumped(probe, 8), "a load from address 8 succeeded");
    noted(libc::SIGSEGV, MAPERR, 8)?;
    ensure!(jumped(probe, 0xffff_ffff_8000_0000), "a load from the kernel's memory succeeded");
    same!(
        NOTED.signal.load(Relaxed),
        libc::SIGSEGV,
        "the signal of a load from the kernel's memory"
    );
    // A general protection fault instead of a page fault: the CPU reports no address.
    ensure!(jumped(probe, 0x8000_0000_0000_0000), "a load from a non-canonical address succeeded");
    same!(
        NOTED.signal.load(Relaxed),
        libc::SIGSEGV,
        "the signal of a load from a non-canonical address"
    );
    same!(NOTED.addr.load(Relaxed), 0, "si_addr of a load from a non-canonical address");
    Ok(())
}

/// A handler that repairs the page and returns: the store is repeated.
fn segv_retry() -> Verdict {
    doing("sigaction", handle(libc::SIGSEGV, open_up, 0))?;
    for round in 1..=100 {
        let region = page(if round % 2 == 0 { READ } else { NONE })?;
        PAGE_TO_OPEN.store(region.start(), Relaxed);
        region.store(8, round);
        same!(region.load(8), round, "the last stored value");
        same!(NOTED.count.load(Acquire), round, "faults");
    }
    Ok(())
}

/// `SIGBUS` beyond the end of a mapped file, with `BUS_ADRERR`.
fn bus_beyond_end() -> Verdict {
    const ADRERR: i32 = 2;
    let file = memory_file()?;
    doing("ftruncate", checked(truncate(&file, PAGE as i64)))?;
    let region =
        doing("mmap", Region::map(2 * PAGE, WRITE, libc::MAP_SHARED, file.as_raw_fd(), 0))?;
    doing("sigaction", handle(libc::SIGBUS, jump_out, libc::SA_NODEFER))?;
    region.store(0, 1);
    ensure!(jumped(probe, region.start() + PAGE + 16), "a load beyond the end succeeded");
    noted(libc::SIGBUS, ADRERR, region.start() + PAGE + 16)?;
    doing("ftruncate", checked(truncate(&file, 0)))?;
    ensure!(jumped(probe, region.start()), "a load from a truncated page succeeded");
    noted(libc::SIGBUS, ADRERR, region.start())
}

/// A file without a name.
fn memory_file() -> Result<OwnedFd, String> {
    let path = format!("/tmp/signals.{}", pid());
    let file = File::options().read(true).write(true).create_new(true).open(&path);
    let file = file.map_err(|error| format!("create {path}: {error}"))?;
    std::fs::remove_file(&path).map_err(|error| format!("remove {path}: {error}"))?;
    Ok(file.into())
}

fn truncate(file: &OwnedFd, len: i64) -> i32 {
    // SAFETY: a plain call.
    unsafe { libc::ftruncate(file.as_raw_fd(), len) }
}

/// A thread that overflows its stack gets the signal on its alternate stack.
fn stack_overflow() -> Verdict {
    let other = doing("mmap", Region::anonymous(16 * PAGE))?;
    let stack = libc::stack_t {
        ss_sp: std::ptr::with_exposed_provenance_mut(other.start() as usize),
        ss_flags: 0,
        ss_size: other.len() as usize,
    };
    // SAFETY: the region is a stack without other uses, and is kept.
    doing("sigaltstack", checked(unsafe { libc::sigaltstack(&raw const stack, null_mut()) }))?;
    doing("sigaction", handle(libc::SIGSEGV, jump_out_stack, libc::SA_ONSTACK | libc::SA_NODEFER))?;
    ensure!(jumped(overflow, 0), "the stack did not end");
    let range = other.start()..other.start() + other.len();
    ensure!(range.contains(&HANDLER_STACK.load(Relaxed)), "the handler ran on another stack");
    let fault = NOTED.addr.load(Relaxed);
    let here = (&raw const stack) as u64;
    ensure!(fault < here && here - fault < 64 << 20, "si_addr {fault:#x} is not below {here:#x}");
    // After a jump out of the alternate stack, the stack is free again, and the next overflow
    // works, too.
    ensure!(jumped(overflow, 0), "the stack did not end the second time");
    std::mem::forget(other);
    Ok(())
}

/// The address of the stack of [`jump_out_stack`].
static HANDLER_STACK: AtomicU64 = AtomicU64::new(0);

extern "C" fn jump_out_stack(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let here = 0u8;
    HANDLER_STACK.store((&raw const here) as u64, Relaxed);
    jump_out(signal, info, context);
}

/// The state of the alternate stack: its address, whether it is in use, and rejected settings.
fn alternate_stack() -> Verdict {
    let ask = || {
        // SAFETY: a stack of zeros is valid, and the call fills it.
        unsafe {
            let mut stack: libc::stack_t = zeroed();
            libc::sigaltstack(null(), &raw mut stack);
            stack
        }
    };
    let other = doing("mmap", Region::anonymous(16 * PAGE))?;
    let stack = |size: usize, flags: i32| libc::stack_t {
        ss_sp: std::ptr::with_exposed_provenance_mut(other.start() as usize),
        ss_flags: flags,
        ss_size: size,
    };
    let change = |stack: libc::stack_t| {
        // SAFETY: the region is kept, and has no other use.
        checked(unsafe { libc::sigaltstack(&raw const stack, null_mut()) }).err()
    };
    same!(change(stack(16, 0)), Some(Errno(libc::ENOMEM)), "a stack of 16 bytes");
    same!(change(stack(1 << 16, 64)), Some(Errno(libc::EINVAL)), "a stack with unknown flags");
    same!(change(stack(1 << 16, 0)), None, "a stack");
    same!(ask().ss_flags, 0, "the flags of a stack");
    same!(ask().ss_sp as u64, other.start(), "the stack's address");
    doing("sigaction", handle(libc::SIGUSR1, note_stack, libc::SA_ONSTACK))?;
    doing("kill", kill(pid(), libc::SIGUSR1))?;
    same!(
        NOTED.code.load(Relaxed),
        libc::SS_ONSTACK,
        "the flags while a handler runs on the stack"
    );
    same!(NOTED.addr.load(Relaxed), libc::EPERM as u64, "changing the current stack of a handler");
    same!(change(stack(0, libc::SS_DISABLE)), None, "no stack");
    same!(ask().ss_flags, libc::SS_DISABLE, "the flags of no stack");
    Ok(())
}

extern "C" fn note_stack(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: a stack of zeros is valid, and the call fills it; the change is rejected here.
    unsafe {
        let mut stack: libc::stack_t = zeroed();
        libc::sigaltstack(null(), &raw mut stack);
        NOTED.code.store(stack.ss_flags, Relaxed);
        let refused = checked(libc::sigaltstack(&raw const stack, null_mut()));
        NOTED.addr.store(refused.err().map_or(0, |Errno(number)| number as u64), Relaxed);
    }
}

/// A handler left by a jump: the mask is the handler's, until it is restored.
fn jump_keeps_mask() -> Verdict {
    doing("sigaction", handle_with(libc::SIGSEGV, jump_out, 0, &[libc::SIGUSR2]))?;
    ensure!(jumped(probe, 8), "a load from address 8 succeeded");
    let now = signal::blocked();
    ensure!(contains(&now, libc::SIGSEGV), "the signal of the handler is not blocked");
    ensure!(contains(&now, libc::SIGUSR2), "the handler's mask is not in force");
    doing("sigprocmask", mask(libc::SIG_UNBLOCK, &[libc::SIGSEGV, libc::SIGUSR2]))?;
    ensure!(jumped(probe, 16), "the second load succeeded");
    noted(libc::SIGSEGV, 1, 16)
}

/// A fault with a blocked or ignored signal ends the process.
fn forced() -> Verdict {
    let blocked = fork(|| {
        let _ = handle(libc::SIGSEGV, note, 0);
        let _ = mask(libc::SIG_BLOCK, &[libc::SIGSEGV]);
        load(8);
        0
    });
    let status = doing("fork", blocked).and_then(|child| doing("wait4", child.wait()))?;
    same!(status, Status::Killed(libc::SIGSEGV), "a fault with SIGSEGV blocked");
    let ignored = fork(|| {
        let _ = signal::ignore(libc::SIGSEGV);
        load(8);
        0
    });
    let status = doing("fork", ignored).and_then(|child| doing("wait4", child.wait()))?;
    same!(status, Status::Killed(libc::SIGSEGV), "a fault with SIGSEGV ignored");
    Ok(())
}

fn no_core() {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a local.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const none) };
}

fn raise_ud2() {
    // SAFETY: only raises an exception.
    unsafe { asm!("ud2") }
}

fn raise_int3() {
    // SAFETY: as above.
    unsafe { asm!("int3") }
}

fn raise_div() {
    // SAFETY: as above; its outputs are declared.
    unsafe { asm!("div {0:e}", in(reg) 0, inout("eax") 1 => _, inout("edx") 0 => _) }
}

fn raise_hlt() {
    // SAFETY: as above: the instruction is privileged.
    unsafe { asm!("hlt") }
}

/// Registers and flags are unchanged after a handler, including vector registers and the x87 unit.
fn registers_kept() -> Verdict {
    extern "C" fn spoil(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
        // SAFETY: all changes are declared, or restored.
        unsafe {
            asm!(
                "fninit", "fldpi", "fstp st(0)",
                "pcmpeqd xmm0, xmm0", "pcmpeqd xmm1, xmm1", "pcmpeqd xmm6, xmm6", "pcmpeqd xmm15, xmm15",
                out("xmm0") _, out("xmm1") _, out("xmm6") _, out("xmm15") _,
            );
        }
        NOTED.count.fetch_add(1, Release);
    }
    doing("sigaction", handle(libc::SIGALRM, spoil, libc::SA_RESTART))?;
    let every = libc::timeval { tv_sec: 0, tv_usec: 2000 };
    let timer = libc::itimerval { it_interval: every, it_value: every };
    let args = [libc::ITIMER_REAL as u64, (&raw const timer) as u64, 0];
    // SAFETY: the pointer is to a local.
    doing("setitimer", unsafe { call(libc::SYS_setitimer, args) })?;
    let begin = Instant::now();
    while NOTED.count.load(Acquire) < 20 {
        ensure!(begin.elapsed().as_secs() < 20, "no signal of the timer");
        let wrong: u64;
        let control: u16 = 0x037f & !0x0300;
        let mut found: u16 = 0;
        // Fills the registers, spins, and compares them. SAFETY: all changes are declared; fninit
        // restores the control word.
        unsafe {
            asm!(
                "fninit", "fldcw [{control}]", "fld1",
                "mov r8, 0x1111", "mov r9, 0x2222", "mov r12, 0x3333", "mov r15, 0x4444",
                "movq xmm0, r8", "movq xmm1, r9", "movq xmm6, r12", "movq xmm15, r15",
                "mov ecx, 100000", "stc",
                "2:", "dec ecx", "jnz 2b",
                "mov eax, 0", "setnc al",
                "sub r8, 0x1111", "or rax, r8", "sub r9, 0x2222", "or rax, r9",
                "sub r12, 0x3333", "or rax, r12", "sub r15, 0x4444", "or rax, r15",
                "movq r8, xmm0", "sub r8, 0x1111", "or rax, r8",
                "movq r8, xmm1", "sub r8, 0x2222", "or rax, r8",
                "movq r8, xmm6", "sub r8, 0x3333", "or rax, r8",
                "movq r8, xmm15", "sub r8, 0x4444", "or rax, r8",
                "fnstcw [{found}]", "fstp st(0)", "fninit",
                control = in(reg) &raw const control, found = in(reg) &raw mut found,
                out("rax") wrong, out("rcx") _, out("r8") _, out("r9") _, out("r12") _, out("r15") _,
                out("xmm0") _, out("xmm1") _, out("xmm6") _, out("xmm15") _,
                out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
                out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
            );
        }
        same!(wrong, 0, "changed bits of registers");
        same!(found, control, "the x87 control word");
    }
    Ok(())
}

/// A handler's context is the interrupted context, and changes of the context take effect.
fn context_changed() -> Verdict {
    extern "C" fn skip(_: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        let context = context.cast::<libc::ucontext_t>();
        // SAFETY: the kernel passes the interrupted context; ud2 is two bytes long.
        unsafe {
            let registers = &mut (*context).uc_mcontext.gregs;
            NOTED.addr.store(
                (*info).si_addr() as u64 ^ registers[libc::REG_RIP as usize] as u64,
                Relaxed,
            );
            registers[libc::REG_RIP as usize] += 2;
            registers[libc::REG_RAX as usize] += 1;
        }
        NOTED.count.fetch_add(1, Release);
    }
    NOTED.addr.store(1, Relaxed);
    doing("sigaction", handle(libc::SIGILL, skip, 0))?;
    let left: u64;
    // SAFETY: the handler skips the instruction.
    unsafe { asm!("ud2", inout("rax") 41u64 => left) };
    same!(NOTED.count.load(Acquire), 1, "signals");
    same!(NOTED.addr.load(Relaxed), 0, "si_addr of SIGILL and the context's rip differ in");
    same!(left, 42, "rax after the handler changed it");
    Ok(())
}

/// Invalid instructions, and the end of a process that executes them.
fn exceptions() -> Verdict {
    let exceptions: [(&str, fn(), i32); 4] = [
        ("ud2", raise_ud2, libc::SIGILL),
        ("int3", raise_int3, libc::SIGTRAP),
        ("div by 0", raise_div, libc::SIGFPE),
        ("hlt", raise_hlt, libc::SIGSEGV),
    ];
    for (name, body, signal) in exceptions {
        let child = doing(
            "fork",
            fork(|| {
                no_core();
                let _ = signal::default(signal);
                body();
                0
            }),
        )?;
        same!(doing("wait4", child.wait())?, Status::Killed(signal), "{name}");
    }
    Ok(())
}

const CHECKS: &[Check] = &[
    ("segv_info", segv_info),
    ("segv_retry", segv_retry),
    ("bus_beyond_end", bus_beyond_end),
    ("stack_overflow", stack_overflow),
    ("alternate_stack", alternate_stack),
    ("jump_keeps_mask", jump_keeps_mask),
    ("forced", forced),
    ("exceptions", exceptions),
    ("registers_kept", registers_kept),
    ("context_changed", context_changed),
];

fn main() {
    let args = Args::read("faults", &[]);
    proc::no_huge_pages();
    std::process::exit(check::run(&args, CHECKS))
}
