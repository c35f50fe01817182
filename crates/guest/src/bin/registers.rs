//! `registers [CHECK…]`: rarely used registers, and invalid values.

use faultless_guest::args::Args;
use faultless_guest::check::{self, Check, Verdict};
use faultless_guest::dir::io;
use faultless_guest::mem::{PAGE, READ, Region, Shared, WRITE};
use faultless_guest::proc::{self, Meeting, Status, exit_now, fork, outcome};
use faultless_guest::sys::{checked, doing};
use faultless_guest::{ensure, same, signal};
use libc::{SIGALRM, SIGKILL, SIGSEGV, SIGUSR1};
use std::arch::asm;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::process::Command;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// The selectors of user mode's data and code.
const DATA: u16 = 0x2b;
const CODE: u16 = 0x33;

/// Returns the contents of DS, ES, FS and GS.
fn selectors() -> [u16; 4] {
    let (ds, es, fs, gs): (u16, u16, u16, u16);
    // SAFETY: reads registers.
    unsafe {
        asm!("mov {:x}, ds", "mov {:x}, es", "mov {:x}, fs", "mov {:x}, gs",
            out(reg) ds, out(reg) es, out(reg) fs, out(reg) gs, options(nomem, nostack));
    }
    [ds, es, fs, gs]
}

/// Loads DS, ES and GS; the C library uses FS.
fn select([ds, es, gs]: [u16; 3]) {
    // SAFETY: 64-bit code does not use these selectors, and no memory access uses the base of GS.
    unsafe {
        asm!("mov ds, {:x}", "mov es, {:x}", "mov gs, {:x}", in(reg) ds, in(reg) es, in(reg) gs,
            options(nostack));
    }
}

/// Each process has its own selectors; a child starts with its parent's.
fn selectors_are_per_process() -> Verdict {
    const ROUNDS: usize = 50;
    let place = doing("mmap", Shared::new(Meeting::new()))?;
    // On one CPU: every meeting switches between the processes.
    doing("sched_setaffinity", proc::pin(doing("sched_getaffinity", proc::cpus())?[0]))?;
    same!(selectors(), [0; 4], "at the start");
    let keeps = |own: [u16; 4]| {
        let kept = |_: &usize| {
            place.wait(2);
            selectors() == own
        };
        (0..ROUNDS).filter(kept).count()
    };
    let other = doing("fork", fork(|| i32::from(keeps([0; 4]) != ROUNDS)))?;
    select([DATA, DATA, DATA]);
    let own = [DATA, DATA, 0, DATA];
    same!(keeps(own), ROUNDS, "rounds with unchanged selectors");
    same!(doing("wait4", other.wait())?, Status::Exited(0), "a process without descriptors");
    let child = outcome(|| {
        let inherited = selectors() == own;
        select([CODE, 0, 3]);
        i32::from(!inherited || selectors() != [CODE, 0, 0, 3])
    });
    same!(child?, Status::Exited(0), "a child's");
    same!(selectors(), own, "the parent's then");
    Ok(())
}

/// A new program starts with null selectors.
fn selectors_end_with_the_program() -> Verdict {
    select([DATA, DATA, DATA]);
    let shown = io("execve", Command::new("/proc/self/exe").arg("show=selectors").output())?;
    same!(String::from_utf8_lossy(&shown.stdout), "[0, 0, 0, 0]\n", "a new program's");
    Ok(())
}

/// The byte of an FPU state that the handler changes, and the changed bits.
static SPOILED: [AtomicI32; 2] = [AtomicI32::new(0), AtomicI32::new(0)];
/// XSAVE's addition to a state: a magic word, and the present parts.
const SOFTWARE: usize = 464;
const MAGIC: u32 = 0x4650_5853;
const MXCSR: usize = 24;
const HEADER: usize = 512;

/// Returns the state in a signal frame.
///
/// # Safety
/// `context` is the argument of a handler.
unsafe fn state_of(context: *mut libc::c_void) -> *mut u8 {
    // SAFETY: by the caller's contract.
    unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.fpregs.cast() }
}

unsafe extern "C" fn spoil(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let [at, bits] = SPOILED.each_ref().map(|word| word.load(Relaxed));
    // SAFETY: the kernel's context; the byte lies in the state.
    unsafe { *state_of(context).add(at as usize) ^= bits as u8 };
}

static PARTS: [AtomicI32; 2] = [AtomicI32::new(0), AtomicI32::new(0)];

unsafe extern "C" fn look(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel's context; both words lie in the state's first 512 bytes.
    let (magic, parts) = unsafe {
        let software = state_of(context).add(SOFTWARE);
        (software.cast::<u32>().read_unaligned(), software.add(8).cast::<i32>().read_unaligned())
    };
    PARTS[0].store(i32::from(magic == MAGIC), Relaxed);
    PARTS[1].store(parts, Relaxed);
}

/// A signal frame whose FPU state the processor would not load ends the program.
fn unfit_states() -> Verdict {
    doing("sigaction", signal::handle(SIGUSR1, look, 0))?;
    // SAFETY: there is a handler.
    doing("raise", checked(unsafe { libc::raise(SIGUSR1) }))?;
    let [extended, parts] = PARTS.each_ref().map(|word| word.load(Relaxed));
    doing("sigaction", signal::handle(SIGUSR1, spoil, 0))?;
    let ends = |at: usize, bits: i32| {
        outcome(|| {
            let _ = signal::default(SIGSEGV);
            SPOILED[0].store(at as i32, Relaxed);
            SPOILED[1].store(bits, Relaxed);
            // SAFETY: there is a handler.
            i32::from(unsafe { libc::raise(SIGUSR1) } != 0)
        })
    };
    let (fine, ended) = (Status::Exited(0), Status::Killed(SIGSEGV));
    same!(ends(MXCSR, 0)?, fine, "an unchanged state");
    same!(ends(MXCSR, 1)?, fine, "a flag of MXCSR");
    same!(ends(MXCSR + 3, 0x80)?, ended, "a reserved bit of MXCSR");
    if extended == 0 {
        return Ok(());
    }
    ensure!(parts & 3 == 3, "parts {parts:#x}");
    let absent = parts.trailing_ones() as usize;
    same!(
        ends(HEADER + absent / 8, 1 << (absent % 8))?,
        ended,
        "a state component that does not exist"
    );
    same!(ends(HEADER + 7, 0x40)?, ended, "a state component that is reserved");
    same!(ends(HEADER + 8, 1)?, ended, "another format");
    same!(ends(HEADER + 16, 1)?, ended, "a reserved byte of the header");
    // Parts that are not marked as present get their initial values.
    same!(ends(SOFTWARE + 8, parts)?, fine, "a state of no parts");
    Ok(())
}

/// An address above all user addresses, and below the kernel's.
const NOWHERE: usize = 1 << 63;

/// A handler at an invalid address causes another signal, repeatedly, until the stack is used up.
/// During this time other programs run, and may kill this program.
fn handlers_at_invalid_addresses() -> Verdict {
    // A stack that lasts for seconds, in little memory.
    const STACK: u64 = 1 << 30;
    const PIECE: u64 = 4 << 20;
    // SAFETY: the name lives; the descriptor has no other owner.
    let memory = unsafe {
        let fd = doing("memfd_create", checked(libc::memfd_create(c"stack".as_ptr(), 0)))?;
        File::from_raw_fd(fd)
    };
    io("ftruncate", memory.set_len(PIECE))?;
    let stack =
        doing("mmap", Region::map(STACK, 0, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0))?;
    for at in (0..STACK).step_by(PIECE as usize) {
        let fd = memory.as_raw_fd();
        doing("mmap", stack.replace(at, PIECE, WRITE, libc::MAP_SHARED, fd, 0))?;
    }
    // One CPU for both.
    doing("sched_setaffinity", proc::pin(doing("sched_getaffinity", proc::cpus())?[0]))?;
    let fails = |bytes: u64| {
        let own = libc::stack_t {
            ss_sp: with_exposed_provenance_mut((stack.start() + STACK - bytes) as usize),
            ss_flags: 0,
            ss_size: bytes as usize,
        };
        // SAFETY: an action of zeros is valid; the stack is a region without running code.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = NOWHERE;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_ONSTACK;
            libc::sigaltstack(&raw const own, null_mut());
            libc::sigaction(SIGSEGV, &raw const action, null_mut());
            libc::raise(SIGSEGV)
        }
    };
    same!(outcome(|| fails(64 * PAGE))?, Status::Killed(SIGSEGV), "at the end of the stack");
    let child = doing("fork", fork(|| fails(STACK)))?;
    std::thread::sleep(Duration::from_millis(20));
    doing("kill", child.signal(SIGKILL))?;
    same!(
        doing("wait4", child.wait())?,
        Status::Killed(SIGKILL),
        "a process that is killed before its failure"
    );
    Ok(())
}

/// Returns as from an interrupt, to the next instruction, with these selectors.
fn interrupt_return(code: u64, stack: u64) {
    // SAFETY: execution continues below with the same stack, or the process is ended.
    unsafe {
        asm!("mov {sp}, rsp", "push {stack}", "push {sp}", "pushfq", "push {code}",
            "lea {sp}, [rip + 2f]", "push {sp}", "iretq", "2:",
            sp = out(reg) _, code = in(reg) code, stack = in(reg) stack);
    }
}

/// Returns as from a far call, to the next instruction, with this selector.
fn far_return(code: u64) {
    // SAFETY: execution continues below with the same stack, or the process is ended.
    unsafe {
        asm!("push {code}", "lea {at}, [rip + 2f]", "push {at}", "retfq", "2:",
            at = out(reg) _, code = in(reg) code);
    }
}

/// `iretq` and `lretq` with valid selectors continue, and with invalid selectors end the program at
/// once.
fn returns() -> Verdict {
    let ends = |act: &dyn Fn()| {
        outcome(|| {
            let _ = signal::default(SIGALRM);
            let _ = signal::default(SIGSEGV);
            // SAFETY: a plain call.
            unsafe { libc::alarm(20) };
            act();
            0
        })
    };
    let (code, data) = (u64::from(CODE), u64::from(DATA));
    let ended = Status::Killed(SIGSEGV);
    // Some emulators make these accesses with the kernel's rights, and then reject them.
    let fine = [Status::Exited(0), ended];
    for (name, act) in [
        ("iretq", &(|| interrupt_return(code, data)) as &dyn Fn()),
        ("lretq", &|| far_return(code)),
    ] {
        let end = ends(act)?;
        ensure!(fine.contains(&end), "{name}: {end:?}");
    }
    for bad in [0, 0x10, 0x18, data, 0xfff8] {
        same!(ends(&|| interrupt_return(bad, data))?, ended, "iretq to code {bad:#x}");
        same!(ends(&|| far_return(bad))?, ended, "lretq to code {bad:#x}");
    }
    for bad in [0, 0x18, 0xfff8] {
        same!(ends(&|| interrupt_return(code, bad))?, ended, "iretq to stack {bad:#x}");
    }
    Ok(())
}

unsafe extern "C" fn exit_with_error(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel's context.
    let error = unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    exit_now(error[libc::REG_ERR as usize] as i32)
}

/// The error code of an access to a kernel address is the code of a protection fault, independent
/// of the kernel's tables.
fn error_codes() -> Verdict {
    const KERNEL: [u64; 3] = [0xffff_8000_0000_0000, 0xffff_8880_0000_1000, 0xffff_ffff_8000_0000];
    let fails = |at: u64, stores: bool| {
        outcome(|| {
            let _ = signal::handle(SIGSEGV, exit_with_error, 0);
            // SAFETY: the access ends the process.
            unsafe {
                match stores {
                    true => asm!("mov byte ptr [{}], 0", in(reg) at, options(nostack)),
                    false => asm!("mov al, [{}]", in(reg) at, out("al") _, options(nostack)),
                }
            }
            99
        })
    };
    let region = doing("mmap", Region::anonymous(3 * PAGE))?;
    region.store(PAGE, 1);
    doing("mprotect", region.protect(PAGE, PAGE, READ))?;
    doing("munmap", region.unmap(2 * PAGE, PAGE))?;
    same!(fails(region.start() + 2 * PAGE, false)?, Status::Exited(4), "a load from a hole");
    same!(fails(region.start() + 2 * PAGE, true)?, Status::Exited(6), "a store to a hole");
    same!(fails(region.start() + PAGE, true)?, Status::Exited(7), "a store to read-only memory");
    for at in KERNEL {
        same!(fails(at, false)?, Status::Exited(5), "a load from {at:#x}");
        same!(fails(at, true)?, Status::Exited(7), "a store to {at:#x}");
    }
    Ok(())
}

/// There is no local descriptor table: its selectors have no descriptor, and cannot be loaded.
fn no_local_descriptors() -> Verdict {
    for selector in (7..=0xffff).step_by(8) {
        let found: u8;
        // SAFETY: reads the rights of a descriptor, without loading it.
        unsafe {
            asm!("lar {at:e}, {selector:e}", "setz {found}", at = out(reg) _,
                selector = in(reg) selector, found = out(reg_byte) found, options(nostack));
        }
        same!(found, 0, "whether there is a descriptor for {selector:#x}");
    }
    let loads = outcome(|| {
        let _ = signal::default(SIGSEGV);
        select([7, 7, 7]);
        0
    });
    same!(loads?, Status::Killed(SIGSEGV), "loading a selector of the local table");
    Ok(())
}

const CHECKS: &[Check] = &[
    ("error_codes", error_codes),
    ("no_local_descriptors", no_local_descriptors),
    ("selectors_are_per_process", selectors_are_per_process),
    ("selectors_end_with_the_program", selectors_end_with_the_program),
    ("unfit_states", unfit_states),
    ("handlers_at_invalid_addresses", handlers_at_invalid_addresses),
    ("returns", returns),
];

fn main() {
    let args = Args::read("registers", &["show"]);
    if args.text("show") == Some("selectors") {
        println!("{:?}", selectors());
        return;
    }
    std::process::exit(check::run(&args, CHECKS))
}
