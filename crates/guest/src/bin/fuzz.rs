//! `fuzz [seconds=N] [seed=N] [workers=N] [calls=memory|all]`: random system calls from every
//! CPU.
//!
//! A supervisor runs `workers` processes of two threads each; each thread makes system calls with
//! random and boundary arguments, three in four of them memory calls. A worker that ends, as most
//! eventually do, is restarted with another seed. A worker without a call for a while may wait
//! indefinitely, as `poll`, `pause` or a read of a pipe may do: a signal interrupts the worker; if
//! it continues to wait, with the signal blocked, it is restarted, too. The test passes if the
//! machine continues to work: every worker can be killed at the end, and a new process finds a
//! consistent state.
//!
//! `calls=memory`, the default, makes only calls that change the worker's own memory, and limits
//! this memory. `calls=all` makes calls of every number and damages the system: the program must be
//! the machine's first process, or a descendant of no other process than the first.

mod arguments {
    //! The generation of calls and arguments.

    use faultless_guest::mem::PAGE;
    use faultless_guest::random::Random;

    /// The kind of an argument.
    #[derive(Clone, Copy)]
    enum Kind {
        /// Any value.
        Any,
        /// An address in the arena, mostly of a page.
        Area,
        /// Any pointer.
        Pointer,
        /// A length.
        Length,
        /// A descriptor.
        Fd,
        /// A small number.
        Small,
        /// Bits of `mprotect`'s protection.
        Prot,
        /// Flags of `mmap`.
        MapFlags,
        /// Flags of `mremap`.
        MoveFlags,
        /// Advice.
        Advice,
        /// An offset in a file.
        Offset,
    }

    use Kind::{Advice, Any, Area, Fd, Length, MapFlags, MoveFlags, Offset, Pointer, Prot, Small};

    /// The memory calls, and calls that copy to and from memory of the caller, by shape.
    const SHAPES: &[(i64, [Kind; 6])] = &[
        (libc::SYS_mmap, [Area, Length, Prot, MapFlags, Fd, Offset]),
        (libc::SYS_mmap, [Area, Length, Prot, MapFlags, Fd, Offset]),
        (libc::SYS_munmap, [Area, Length, Any, Any, Any, Any]),
        (libc::SYS_mprotect, [Area, Length, Prot, Any, Any, Any]),
        (libc::SYS_mprotect, [Area, Length, Prot, Any, Any, Any]),
        (libc::SYS_madvise, [Area, Length, Advice, Any, Any, Any]),
        (libc::SYS_madvise, [Area, Length, Advice, Any, Any, Any]),
        (libc::SYS_mremap, [Area, Length, Length, MoveFlags, Area, Any]),
        (libc::SYS_brk, [Pointer, Any, Any, Any, Any, Any]),
        (libc::SYS_mincore, [Area, Length, Pointer, Any, Any, Any]),
        (libc::SYS_msync, [Area, Length, Small, Any, Any, Any]),
        (libc::SYS_mlock, [Area, Length, Any, Any, Any, Any]),
        (libc::SYS_munlock, [Area, Length, Any, Any, Any, Any]),
        (libc::SYS_mlock2, [Area, Length, Small, Any, Any, Any]),
        (libc::SYS_mbind, [Area, Length, Small, Pointer, Small, Small]),
        (libc::SYS_set_mempolicy, [Small, Pointer, Small, Any, Any, Any]),
        (libc::SYS_get_mempolicy, [Pointer, Pointer, Length, Area, Small, Any]),
        (libc::SYS_remap_file_pages, [Area, Length, Prot, Small, Small, Any]),
        (libc::SYS_read, [Fd, Pointer, Length, Any, Any, Any]),
        (libc::SYS_write, [Fd, Pointer, Length, Any, Any, Any]),
        (libc::SYS_pread64, [Fd, Pointer, Length, Offset, Any, Any]),
        (libc::SYS_pwrite64, [Fd, Pointer, Length, Offset, Any, Any]),
        (libc::SYS_readv, [Fd, Pointer, Small, Any, Any, Any]),
        (libc::SYS_writev, [Fd, Pointer, Small, Any, Any, Any]),
        (libc::SYS_ftruncate, [Fd, Offset, Any, Any, Any, Any]),
        (libc::SYS_clock_gettime, [Small, Pointer, Any, Any, Any, Any]),
        (libc::SYS_sigaltstack, [Pointer, Pointer, Any, Any, Any, Any]),
        (libc::SYS_sched_getaffinity, [Small, Length, Pointer, Any, Any, Any]),
        (libc::SYS_getrusage, [Small, Pointer, Any, Any, Any, Any]),
        (libc::SYS_uname, [Pointer, Any, Any, Any, Any, Any]),
    ];

    /// Calls with a higher frequency than other calls, for `all`.
    const OTHERS: &[(i64, [Kind; 6])] = &[
        (libc::SYS_futex, [Pointer, Small, Small, Pointer, Pointer, Any]),
        (libc::SYS_rt_sigaction, [Small, Pointer, Pointer, Small, Any, Any]),
        (libc::SYS_rt_sigprocmask, [Small, Pointer, Pointer, Small, Any, Any]),
        (libc::SYS_clone, [Any, Pointer, Pointer, Pointer, Pointer, Any]),
        (libc::SYS_clone3, [Pointer, Small, Any, Any, Any, Any]),
        (libc::SYS_fork, [Any; 6]),
        (libc::SYS_vfork, [Any; 6]),
        (libc::SYS_wait4, [Small, Pointer, Small, Pointer, Any, Any]),
        (libc::SYS_execve, [Pointer, Pointer, Pointer, Any, Any, Any]),
        (libc::SYS_open, [Pointer, Any, Any, Any, Any, Any]),
        (libc::SYS_openat, [Fd, Pointer, Any, Any, Any, Any]),
        (libc::SYS_close, [Fd, Any, Any, Any, Any, Any]),
        (libc::SYS_dup2, [Fd, Small, Any, Any, Any, Any]),
        (libc::SYS_fcntl, [Fd, Small, Any, Any, Any, Any]),
        (libc::SYS_pipe2, [Pointer, Any, Any, Any, Any, Any]),
        (libc::SYS_poll, [Pointer, Small, Small, Any, Any, Any]),
        (libc::SYS_getdents64, [Fd, Pointer, Length, Any, Any, Any]),
        (libc::SYS_memfd_create, [Pointer, Small, Any, Any, Any, Any]),
        (libc::SYS_arch_prctl, [Any, Pointer, Any, Any, Any, Any]),
        (libc::SYS_set_robust_list, [Pointer, Small, Any, Any, Any, Any]),
        (libc::SYS_set_tid_address, [Pointer, Any, Any, Any, Any, Any]),
        (libc::SYS_setitimer, [Small, Pointer, Pointer, Any, Any, Any]),
        (libc::SYS_timer_create, [Small, Pointer, Pointer, Any, Any, Any]),
        (libc::SYS_sched_setaffinity, [Small, Length, Pointer, Any, Any, Any]),
        (libc::SYS_rt_sigreturn, [Any; 6]),
        (libc::SYS_process_madvise, [Fd, Pointer, Small, Advice, Any, Any]),
    ];

    /// Excluded calls: they turn the machine off or stop its clocks, grant or revoke access to its
    /// devices, or change other processes, such as the supervisor.
    const AVOIDED: &[i64] = &[
        libc::SYS_reboot,
        libc::SYS_kexec_load,
        libc::SYS_kexec_file_load,
        libc::SYS_exit_group,
        libc::SYS_exit,
        libc::SYS_syslog,
        libc::SYS_vhangup,
        libc::SYS_iopl,
        libc::SYS_ioperm,
        libc::SYS_settimeofday,
        libc::SYS_clock_settime,
        libc::SYS_ptrace,
        libc::SYS_process_vm_writev,
        libc::SYS_kill,
        libc::SYS_tkill,
        libc::SYS_tgkill,
        libc::SYS_rt_sigqueueinfo,
        libc::SYS_rt_tgsigqueueinfo,
        libc::SYS_pidfd_send_signal,
        libc::SYS_prlimit64,
        libc::SYS_sched_setscheduler,
        libc::SYS_sched_setparam,
        libc::SYS_sched_setattr,
        libc::SYS_setpriority,
        libc::SYS_ioprio_set,
    ];

    /// Words that programs would not pass.
    const EDGES: &[u64] = &[
        0,
        1,
        7,
        0xfff,
        PAGE,
        0x7fff_ffff,
        0x8000_0000,
        0xffff_ffff,
        0x7fff_ffff_efff,
        0x7fff_ffff_f000,
        0x8000_0000_0000,
        0xffff_7fff_ffff_ffff,
        0xffff_8000_0000_0000,
        0xffff_8880_0000_0000,
        0xffff_8880_0010_0000,
        0xffff_ffff_8000_0000,
        0xffff_ffff_8010_0000,
        0xffff_ffff_ffff_f000,
        u64::MAX,
        i64::MAX as u64,
        i64::MIN as u64,
    ];

    /// The memory for the targets of pointers.
    #[derive(Clone, Copy)]
    pub struct Arena {
        /// The first byte.
        pub start: u64,
        /// The number of pages.
        pub pages: u64,
        /// The address of a page that stays unchanged, with strings, times and numbers.
        pub kept: u64,
    }

    fn argument(kind: Kind, arena: Arena, random: &mut Random) -> u64 {
        let area = |random: &mut Random| arena.start + random.below(arena.pages) * PAGE;
        if random.below(12) == 0 {
            return random.pick(EDGES);
        }
        match kind {
            Any => match random.below(4) {
                0 => random.next(),
                1 => random.next() >> random.below(64),
                2 => random.below(16),
                _ => argument(Pointer, arena, random),
            },
            Area => area(random) + if random.below(16) == 0 { random.below(PAGE) } else { 0 },
            Pointer => match random.below(4) {
                0 => arena.kept + random.below(PAGE / 16) * 16,
                // So close to the page's end that the object continues beyond it.
                1 => area(random) + PAGE - 1 - random.below(24),
                _ => area(random) + random.below(PAGE),
            },
            // A huge length, which may remove the worker's own memory, is rare, so that the worker
            // lives for a while.
            Length => match random.below(32) {
                0 => random.next() >> random.below(64),
                1..5 => random.below(2 * PAGE),
                _ => (1 + random.below(arena.pages / 2)) * PAGE,
            },
            Fd => random.below(10).wrapping_sub(1),
            Small => random.below(20).wrapping_sub(2),
            Prot => random.below(8),
            MapFlags => {
                let sharing =
                    random.pick(&[libc::MAP_PRIVATE, libc::MAP_PRIVATE, libc::MAP_SHARED]);
                let anonymous = if random.below(4) == 0 { 0 } else { libc::MAP_ANONYMOUS };
                let fixed = random.pick(&[0, libc::MAP_FIXED, libc::MAP_FIXED_NOREPLACE]);
                let more = random.pick(&[
                    0,
                    0,
                    0,
                    0,
                    libc::MAP_POPULATE,
                    libc::MAP_GROWSDOWN,
                    libc::MAP_NORESERVE,
                ]);
                (sharing | anonymous | fixed | more) as u64
            }
            MoveFlags => random.below(8),
            // Excludes advice that poisons the machine's memory.
            Advice => random.below(27),
            Offset => random.below(32) * PAGE,
        }
    }

    /// Returns the next call. With `all`, one in four calls has any number.
    pub fn next(arena: Arena, all: bool, random: &mut Random) -> (i64, [u64; 6]) {
        let (number, kinds) = match random.below(16) {
            0..2 if all => (random.below(480) as i64, [Any; 6]),
            2..4 if all => random.pick(OTHERS),
            _ => random.pick(SHAPES),
        };
        if AVOIDED.contains(&number) {
            return (libc::SYS_getpid, [0; 6]);
        }
        let args = kinds.map(|kind| argument(kind, arena, random));
        // Numbers beyond the table, and numbers that look like 32-bit or x32 calls.
        let odd = all && random.below(200) == 0;
        let number = if odd { number | random.pick(&[1 << 30, 1 << 31, 1 << 62]) } else { number };
        match number {
            // Limits a number of bytes that no worker may have.
            libc::SYS_madvise if args[2] > 30 => (number, [args[0], args[1], 4, 0, 0, 0]),
            _ => (number, args),
        }
    }
}

use arguments::Arena;
use faultless_guest::args::Args;
use faultless_guest::mem::{NONE, PAGE, READ, Region, Shared, WRITE};
use faultless_guest::proc::{self, Child, Status, exit_now, fork, outcome, pin};
use faultless_guest::random::Random;
use faultless_guest::sys::{call, doing};
use faultless_guest::{clock, procfs, signal};
use std::arch::asm;
use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::process::ExitCode;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI32, AtomicU64};
use std::time::{Duration, Instant};

const THREADS: usize = 2;
const MAX_WORKERS: usize = 64;
/// A worker without a call for this time is interrupted.
const WAITING: Duration = Duration::from_millis(100);
/// A worker without a call for this time is stuck.
const STUCK: Duration = Duration::from_millis(400);
/// The maximum memory that a worker may map on a shared machine.
const LIMIT: u64 = 1 << 30;
/// The arena's pages.
const PAGES: u64 = 64;
/// Inaccessible pages after the arena: calls with a length beyond the arena end there, and not in
/// the worker's own memory.
const GUARD: u64 = 2 * PAGES;
/// The number of calls after which the arena is made again.
const FRESH: u64 = 256;

/// The upper half of each count reported by a thread: a word without this mark was overwritten by a
/// stray call.
const MARK: u64 = 0x5eed_ca11 << 32;

/// The reports of a worker's threads. A call may overwrite this memory, too.
struct Slot {
    /// Calls made, each count with the mark.
    calls: [AtomicU64; THREADS],
    last: [AtomicU64; THREADS],
    /// The thread numbers (TIDs).
    tids: [AtomicI32; THREADS],
}

impl Slot {
    /// Returns the number of calls reported by the worker.
    fn calls(&self) -> u64 {
        let told = self.calls.iter().map(|calls| calls.load(Relaxed));
        told.filter(|told| told >> 32 == MARK >> 32).map(|told| told & !MARK).sum()
    }
}

/// The state shared by all workers.
struct Plan<'a> {
    seed: u64,
    all: bool,
    cpus: &'a [usize],
    slots: &'a [Slot; MAX_WORKERS],
}

/// Makes a call. A child made by the call ends at once, without touching memory, because it may
/// share the stack.
///
/// # Safety
/// The process is a worker, which may be damaged by the call.
unsafe fn fuzz(number: i64, args: [u64; 6]) -> i64 {
    let result: i64;
    let makes = [libc::SYS_clone, libc::SYS_clone3, libc::SYS_fork, libc::SYS_vfork];
    let makes = u64::from(makes.contains(&(number & 0xffff)));
    // SAFETY: by the caller's contract.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "test r12, r12",
            "jz 2f",
            "xor edi, edi",
            "mov eax, 60",
            "syscall",
            "ud2",
            "2:",
            // A register that the call does not change.
            in("r12") makes,
            inlateout("rax") number => result,
            inlateout("rdi") args[0] => _,
            in("rsi") args[1],
            in("rdx") args[2],
            in("r10") args[3],
            in("r8") args[4],
            in("r9") args[5],
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}

/// Fills the arena with pages of all kinds, and its first page with useful objects for calls.
fn fill_arena(region: &Region) -> Result<(), faultless_guest::sys::Errno> {
    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let eighth = PAGES * PAGE / 8;
    region.replace(0, 8 * eighth, WRITE, private, -1, 0)?;
    region.replace(eighth, eighth, READ, private, -1, 0)?;
    region.replace(2 * eighth, eighth, NONE, private, -1, 0)?;
    region.unmap(3 * eighth, eighth)?;
    region.replace(4 * eighth, eighth, WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, 0)?;
    region.replace(8 * eighth, GUARD * PAGE, NONE, private, -1, 0)?;
    for (at, value) in [
        (0, u64::from_le_bytes(*b"/tmp/x\0\0")),
        (16, u64::from_le_bytes(*b"/proc/\0\0")),
        (32, u64::from_le_bytes(*b"..\0\0\0\0\0\0")),
        (48, 1),
        (56, 1_000_000),
        (64, 0),
        (80, region.start() + 5 * eighth),
        (88, 3 * PAGE),
        (96, u64::MAX),
        (112, 0x0001_0000_0001),
    ] {
        region.store(at, value);
    }
    Ok(())
}

/// The signal that interrupts a waiting worker.
const INTERRUPT: i32 = libc::SIGURG;

extern "C" fn interrupted(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Runs one thread of a worker: an endless loop of calls.
fn thread(plan: &Plan, worker: usize, index: usize, generation: u64) {
    let slot = &plan.slots[worker];
    let number = (worker * THREADS + index) as u64;
    let mut random = Random::new(plan.seed ^ number << 48 ^ generation << 16);
    let cpu = plan.cpus[number as usize % plan.cpus.len()];
    let Ok(region) = Region::anonymous((PAGES + GUARD) * PAGE).map(ManuallyDrop::new) else {
        exit_now(3)
    };
    // A page that the arena's fixed mappings do not replace.
    slot.tids[index].store(proc::tid(), Relaxed);
    let Ok(kept) = Region::anonymous(PAGE).map(ManuallyDrop::new) else { exit_now(3) };
    let arena = Arena { start: region.start(), pages: PAGES, kept: kept.start() };
    let mut calls = 0;
    loop {
        let _ = pin(cpu);
        let _ = signal::handle(INTERRUPT, interrupted, 0);
        let _ = signal::mask(libc::SIG_UNBLOCK, &[INTERRUPT]);
        if fill_arena(&region).is_err() {
            exit_now(4);
        }
        for at in (0..128).step_by(8) {
            kept.store(at, region.load(at));
        }
        for _ in 0..FRESH {
            let (number, args) = arguments::next(arena, plan.all, &mut random);
            slot.last[index].store(number as u64, Relaxed);
            // SAFETY: this process is a worker.
            let _ = unsafe { fuzz(number, args) };
            calls += 1;
            slot.calls[index].store(MARK | calls, Relaxed);
        }
    }
}

/// A worker's process.
fn worker(plan: &Plan, number: usize, generation: u64) -> i32 {
    let _ = signal::default(libc::SIGPIPE);
    // A file that grows beyond its limit is an error, and not a signal. SAFETY: the signal has no
    // handler.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    // Accidental output goes into a separate pipe; the next descriptor is a file.
    for fd in 0..3 {
        // SAFETY: a worker prints no output.
        let _ = unsafe { call(libc::SYS_close, [fd]) };
    }
    let mut ends = [0i32; 2];
    // SAFETY: the array has space for both; calls that would block return.
    unsafe {
        let _ = call(libc::SYS_pipe2, [ends.as_mut_ptr() as u64, libc::O_NONBLOCK as u64]);
        let _ = call(libc::SYS_memfd_create, [c"fuzz".as_ptr() as u64, 0]);
        // A separate process group: signals to this group must not reach the supervisor.
        let _ = call(libc::SYS_setsid, []);
    }
    let memory = libc::rlimit { rlim_cur: LIMIT, rlim_max: LIMIT };
    let file = libc::rlimit { rlim_cur: 16 << 20, rlim_max: 16 << 20 };
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointers are to locals.
    unsafe {
        if !plan.all {
            libc::setrlimit(libc::RLIMIT_AS, &raw const memory);
        }
        libc::setrlimit(libc::RLIMIT_FSIZE, &raw const file);
        libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
    }
    std::thread::scope(|scope| {
        for index in 1..THREADS {
            let builder = std::thread::Builder::new();
            let _ = builder.spawn_scoped(scope, move || thread(plan, number, index, generation));
        }
        thread(plan, number, 0, generation);
    });
    0
}

/// A running worker.
struct Running {
    child: Child,
    calls: u64,
    since: Instant,
    interrupted: bool,
}

/// The results of the workers.
#[derive(Default)]
struct Tally {
    started: u64,
    calls: u64,
    interrupted: u64,
    stuck: u64,
    ends: BTreeMap<String, u64>,
    stuck_in: BTreeMap<u64, u64>,
}

impl Tally {
    fn end(&mut self, status: Status, slot: &Slot) {
        self.calls += slot.calls();
        let name = match status {
            Status::Exited(status) => format!("exit {status}"),
            Status::Killed(signal) => format!("signal {signal}"),
        };
        *self.ends.entry(name).or_default() += 1;
    }
}

/// Starts worker `number`.
fn start(plan: &Plan, number: usize, tally: &mut Tally) -> Result<Running, String> {
    tally.started += 1;
    let generation = tally.started;
    plan.slots[number].calls.iter().for_each(|calls| calls.store(0, Relaxed));
    let begin = Instant::now();
    loop {
        // Other workers may use all memory for a moment.
        match fork(|| worker(plan, number, generation)) {
            Ok(child) => {
                return Ok(Running { child, calls: 0, since: Instant::now(), interrupted: false });
            }
            Err(errno) if begin.elapsed().as_secs() >= 10 => return Err(format!("fork: {errno}")),
            Err(_) => clock::sleep_ms(20),
        }
    }
}

/// Kills worker `number` and waits for its end, which must come.
fn stop(plan: &Plan, child: &Child, number: usize, tally: &mut Tally) -> Result<(), String> {
    let _ = child.signal(libc::SIGKILL);
    let begin = Instant::now();
    // The host may be busy.
    while begin.elapsed().as_secs() < 100 {
        if let Some(status) = doing("wait4", child.try_wait())? {
            tally.end(status, &plan.slots[number]);
            return Ok(());
        }
        clock::sleep_ms(1);
    }
    let status = procfs::text(&format!("/proc/{}/status", child.pid)).unwrap_or_else(|error| error);
    Err(format!("worker {number} is alive after SIGKILL: {status}"))
}

/// Keeps workers running until the time is over.
fn supervise(plan: &Plan, workers: usize, time: Duration, tally: &mut Tally) -> Result<(), String> {
    let begin = Instant::now();
    let mut running = Vec::new();
    for number in 0..workers {
        running.push(start(plan, number, tally)?);
    }
    while begin.elapsed() < time {
        clock::sleep_ms(2);
        for (number, worker) in running.iter_mut().enumerate() {
            let slot = &plan.slots[number];
            let calls = slot.calls();
            if let Some(status) = doing("wait4", worker.child.try_wait())? {
                tally.end(status, slot);
                *worker = start(plan, number, tally)?;
            } else if calls != worker.calls {
                (worker.calls, worker.since) = (calls, Instant::now());
                worker.interrupted = false;
            } else if worker.since.elapsed() > WAITING && !worker.interrupted {
                worker.interrupted = true;
                tally.interrupted += 1;
                for tid in &slot.tids {
                    let (pid, tid) = (worker.child.pid as u64, tid.load(Relaxed) as u64);
                    // SAFETY: one of the threads may have ended; the worker has a handler.
                    let _ = unsafe { call(libc::SYS_tgkill, [pid, tid, INTERRUPT as u64]) };
                }
            } else if worker.since.elapsed() > STUCK {
                tally.stuck += 1;
                *tally.stuck_in.entry(slot.last[0].load(Relaxed)).or_default() += 1;
                stop(plan, &worker.child, number, tally)?;
                *worker = start(plan, number, tally)?;
            }
        }
        reap_others(&running);
    }
    for (number, worker) in running.iter().enumerate() {
        stop(plan, &worker.child, number, tally)?;
    }
    Ok(())
}

/// Reaps the orphans adopted by this process as the machine's first process.
fn reap_others(running: &[Running]) {
    if proc::pid() != 1 {
        return;
    }
    loop {
        // SAFETY: zeros are valid, and the pointer is to a local.
        let found = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
            if libc::waitid(libc::P_ALL, 0, &raw mut info, options) != 0 {
                return;
            }
            info.si_pid()
        };
        if found == 0 || running.iter().any(|worker| worker.child.pid == found) {
            return;
        }
        let _ = proc::wait(found, libc::WNOHANG);
    }
}

/// Checks that a new process finds a consistent state.
fn in_order() -> Result<(), String> {
    let begin = Instant::now();
    loop {
        let status = outcome(|| {
            let Ok(region) = Region::anonymous(1 << 20) else { return 1 };
            region.fill(7);
            let (send, receive) = std::sync::mpsc::channel();
            std::thread::spawn(move || send.send(8));
            let right = region.pages().all(|at| region.load(at) == 7);
            i32::from(!right || receive.recv() != Ok(8) || procfs::vmstat().is_err())
        });
        match status {
            Ok(Status::Exited(0)) => return Ok(()),
            // The memory of the workers may not be free yet.
            _ if begin.elapsed().as_secs() < 10 => clock::sleep_ms(100),
            other => return Err(format!("a process after the calls: {other:?}")),
        }
    }
}

/// Returns whether this program has the machine to itself.
fn own_machine() -> bool {
    // SAFETY: a plain call.
    proc::pid() == 1 || unsafe { libc::getppid() } == 1
}

fn main() -> ExitCode {
    let args = Args::read("fuzz", &["seconds", "seed", "workers", "calls"]);
    let seconds: f64 = args.get("seconds", 2.0);
    let all = match args.text("calls") {
        None | Some("memory") => false,
        Some("all") if own_machine() => true,
        Some("all") => args.refuse(
            "calls=all would harm this system, which does not belong to this program alone",
        ),
        Some(other) => args.refuse(&format!("calls={other} is neither memory nor all")),
    };
    let cpus = proc::cpus().unwrap_or_else(|_| vec![0]);
    let workers = args.get("workers", cpus.len().clamp(2, MAX_WORKERS));
    if !(1..=MAX_WORKERS).contains(&workers) || !(0.0..1e6).contains(&seconds) {
        args.refuse(&format!("workers must be 1 to {MAX_WORKERS}, and seconds below a million"));
    }
    let slots = Shared::new(
        [const {
            Slot {
                calls: [const { AtomicU64::new(0) }; THREADS],
                last: [const { AtomicU64::new(0) }; THREADS],
                tids: [const { AtomicI32::new(0) }; THREADS],
            }
        }; MAX_WORKERS],
    );
    let Ok(slots) = slots else { args.refuse("no shared memory") };
    proc::no_huge_pages();
    let plan = Plan { seed: args.get("seed", 1), all, cpus: &cpus, slots: &slots };
    let mut tally = Tally::default();
    let verdict = supervise(&plan, workers, Duration::from_secs_f64(seconds), &mut tally)
        .and_then(|()| in_order());
    println!("fuzz seed {}", plan.seed);
    println!("fuzz calls {}", tally.calls);
    println!(
        "fuzz workers {} interrupted {} stuck {}",
        tally.started, tally.interrupted, tally.stuck
    );
    for (end, count) in &tally.ends {
        println!("fuzz ended {end}: {count}");
    }
    for (call, count) in &tally.stuck_in {
        println!("fuzz stuck in call {}: {count}", *call as i64);
    }
    match verdict {
        Ok(()) if tally.calls > 0 => {
            println!("ok survived");
            ExitCode::SUCCESS
        }
        Ok(()) => {
            println!("FAIL survived: no call was made");
            ExitCode::FAILURE
        }
        Err(why) => {
            println!("FAIL survived: {why}");
            ExitCode::FAILURE
        }
    }
}
