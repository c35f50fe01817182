//! `victims [CHECK…]`: the choice of the killed process when memory is out. Hogs take all memory,
//! in separate processes; other processes must not be affected.
//!
//! `no_candidates`, which runs only by name, requires a machine whose processes are all protected;
//! Linux panics in this case.
//!
//! The machine's memory limits the hogs, so the machine must have less than 2 GiB; on a larger
//! machine only `score` can run, which takes little memory.

use faultless_guest::args::Args;
use faultless_guest::check::{self, Check, Verdict};
use faultless_guest::init::Init;
use faultless_guest::mem::{PAGE, Region, WRITE};
use faultless_guest::proc::{self, Child, Status, exit_now, fork, wait};
use faultless_guest::procfs::{fields, kilobytes, text, vmstat};
use faultless_guest::sys::{Errno, call, checked, doing};
use faultless_guest::{clock, ensure, same};
use std::fs;
use std::mem::forget;
use std::os::fd::AsRawFd;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};

const KILLED: Status = Status::Killed(libc::SIGKILL);
/// The exit status of a process that could not perform its part.
const WRONG: i32 = 30;

/// Words shared by this process and its children.
struct Shared(Region);

impl Shared {
    fn new() -> Result<Self, String> {
        let region = doing("mmap", Region::shared(PAGE))?;
        region.store(0, 0);
        Ok(Self(region))
    }

    fn word(&self, at: u64) -> &AtomicU64 {
        // SAFETY: the region is mapped while it is borrowed, and contains zeros or atomically
        // stored values.
        unsafe { AtomicU64::from_ptr((self.0.start() + 8 * at) as *mut u64) }
    }

    fn get(&self, at: u64) -> u64 {
        self.word(at).load(Ordering::SeqCst)
    }

    fn set(&self, at: u64, value: u64) {
        self.word(at).store(value, Ordering::SeqCst);
    }

    /// Waits until a word is not 0; a failed child never sets its word.
    fn await_word(&self, at: u64) {
        while self.get(at) == 0 {
            clock::sleep_ms(2);
        }
    }
}

/// Memory for programs, in bytes.
fn memory() -> Result<u64, String> {
    kilobytes(&fields("/proc/meminfo")?, "MemTotal")
}

/// Returns the number of processes killed so far.
fn kills() -> Result<u64, String> {
    vmstat()?.get("oom_kill").copied().ok_or_else(|| "no oom_kill".into())
}

/// Makes the running process more or less likely to be killed.
fn adjust(value: i32) {
    if fs::write("/proc/self/oom_score_adj", value.to_string()).is_err() {
        exit_now(WRONG);
    }
}

const fn value(seed: u64, at: u64) -> u64 {
    (at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed
}

/// Maps private memory with a recognisable value in each page.
fn filled(len: u64, seed: u64) -> Region {
    let Ok(region) = Region::anonymous(len) else { exit_now(WRONG) };
    region.pages().for_each(|at| region.store(at, value(seed, at)));
    region
}

fn is_filled(region: &Region, seed: u64) -> bool {
    region.pages().all(|at| region.load(at) == value(seed, at))
}

/// Takes memory until a signal ends this process.
fn take_all() -> i32 {
    loop {
        match Region::anonymous(1 << 20) {
            Ok(region) => {
                region.fill(1);
                forget(region);
            }
            // If the kernel has no memory for the mapping.
            Err(_) => clock::sleep_ms(1),
        }
    }
}

/// Starts a process with `len` bytes, which sets word `at`, and checks its bytes until word 0 is
/// set. The process exits with 0 if the bytes are unchanged.
fn bystander(shared: &Shared, at: u64, len: u64, adjustment: i32) -> Result<Child, String> {
    let child = fork(|| {
        if adjustment != 0 {
            adjust(adjustment);
        }
        let region = filled(len, at);
        shared.set(at, 1);
        while shared.get(0) == 0 {
            if !is_filled(&region, at) {
                return WRONG + 1;
            }
            clock::sleep_ms(5);
        }
        i32::from(!is_filled(&region, at))
    });
    let child = doing("fork", child)?;
    shared.await_word(at);
    Ok(child)
}

fn ends(child: Child, status: Status, who: &str) -> Verdict {
    same!(doing("wait4", child.wait())?, status, "{who}");
    Ok(())
}

/// Only the greedy process is killed.
fn greedy() -> Verdict {
    let (shared, before) = (Shared::new()?, kills()?);
    let small = bystander(&shared, 1, 2 << 20, 0)?;
    ends(doing("fork", fork(take_all))?, KILLED, "the hog")?;
    shared.set(0, 1);
    ends(small, Status::Exited(0), "the small process")?;
    same!(kills()? - before, 1, "killed processes");
    Ok(())
}

/// A protected process with more memory survives.
fn protected() -> Verdict {
    let (shared, before) = (Shared::new()?, kills()?);
    let large = bystander(&shared, 1, memory()? / 8 * 5, -1000)?;
    ends(doing("fork", fork(take_all))?, KILLED, "the smaller process")?;
    shared.set(0, 1);
    ends(large, Status::Exited(0), "the protected process")?;
    same!(kills()? - before, 1, "killed processes");
    Ok(())
}

/// A process with less memory but a positive adjustment is killed.
fn offered() -> Verdict {
    let (shared, before) = (Shared::new()?, kills()?);
    let small = bystander(&shared, 1, memory()? / 4, 1000)?;
    let large = fork(|| {
        let mut taken = Vec::new();
        let mut seed = 0;
        while shared.get(0) == 0 {
            taken.push(filled(256 << 10, seed));
            seed += 1;
            clock::sleep_ms(1);
        }
        i32::from(!(0..).zip(&taken).all(|(seed, region)| is_filled(region, seed)))
    });
    let large = doing("fork", large)?;
    ends(small, KILLED, "the process with a high score adjustment")?;
    shared.set(0, 1);
    ends(large, Status::Exited(0), "the larger process")?;
    same!(kills()? - before, 1, "killed processes");
    Ok(())
}

/// Makes a series of calls; returns the number of the failed call.
fn ask(step: u64) -> Result<(), (i32, Errno)> {
    fn of<T>(number: i32, result: Result<T, Errno>) -> Result<T, (i32, Errno)> {
        result.map_err(|errno| (number, errno))
    }
    let child = of(1, fork(|| 7))?;
    if of(2, child.wait())? != Status::Exited(7) {
        return Err((3, Errno(0)));
    }
    let mut ends = [0i32; 2];
    // SAFETY: the array has room for both.
    of(4, checked(unsafe { libc::pipe(ends.as_mut_ptr()) }))?;
    let [from, to] = ends.map(|fd| fd as u64);
    let region = of(5, Region::anonymous(64 * PAGE))?;
    let word = step ^ 0x5555;
    let at = &raw const word as u64;
    // SAFETY: the pointers are to a local, and to the region.
    unsafe {
        of(6, call(libc::SYS_write, [to, at, 8]))?;
        // Into untouched pages, which the kernel makes.
        of(7, call(libc::SYS_read, [from, region.start() + 32 * PAGE, 8]))?;
        of(8, call(libc::SYS_close, [from]))?;
        of(9, call(libc::SYS_close, [to]))?;
    }
    if region.load(32 * PAGE) != word {
        return Err((10, Errno(0)));
    }
    let advice = region.advise(0, region.len(), libc::MADV_POPULATE_WRITE);
    of(11, advice)?;
    of(12, region.protect(0, 8 * PAGE, WRITE & !libc::PROT_WRITE))?;
    of(13, region.end())
}

/// A process that makes calls is not affected: no call fails, and the process is not killed.
fn calls() -> Verdict {
    let (shared, before) = (Shared::new()?, kills()?);
    let asks = fork(|| {
        let mut step = 0;
        while shared.get(0) == 0 {
            if let Err((number, errno)) = ask(step) {
                shared.set(2, errno.0 as u64);
                return 60 + number;
            }
            step += 1;
            shared.set(1, step);
        }
        0
    });
    let asks = doing("fork", asks)?;
    shared.await_word(1);
    for _ in 0..3 {
        ends(doing("fork", fork(take_all))?, KILLED, "the hog")?;
    }
    // The process continues.
    let seen = shared.get(1);
    while shared.get(1) == seen && matches!(asks.try_wait(), Ok(None)) {
        clock::sleep_ms(2);
    }
    shared.set(0, 1);
    let ended = doing("wait4", asks.wait());
    ensure!(
        ended == Ok(Status::Exited(0)),
        "the asking process ended with {ended:?}, error {}",
        shared.get(2)
    );
    same!(kills()? - before, 3, "killed processes");
    Ok(())
}

/// A mapping of far more addresses than memory moves and grows, or the call fails; no process is
/// killed.
fn sparse() -> Verdict {
    const BYTES: u64 = 1 << 40;
    let before = kills()?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let map = |len| doing("mmap", Region::map(len, WRITE, flags, -1, 0));
    let at = BYTES / 2;
    let (from, to) = (map(BYTES)?, map(BYTES)?);
    from.store(at, 7);
    let start = from.start();
    match to.take(0, from) {
        Ok(()) => same!(to.load(at), 7, "the word that moved"),
        Err(Errno(libc::ENOMEM)) => {
            // SAFETY: the page is still mapped there, and contains no Rust objects.
            same!(unsafe { *((start + at) as *const u64) }, 7, "the word that did not move");
        }
        Err(errno) => return Err(format!("mremap: {errno}")),
    }
    let mut small = map(2 * PAGE)?;
    small.store(PAGE, 8);
    doing("mremap", small.resize(BYTES))?;
    same!(small.load(PAGE), 8, "the word of the mapping that grew");
    same!(kills()? - before, 0, "killed processes");
    Ok(())
}

/// A hog that never stores: the kernel reads into its memory. The hog gets no error when memory is
/// out.
fn hog_that_only_reads() -> Verdict {
    /// Bytes of a read.
    const READ: u64 = 1 << 20;
    let (shared, before) = (Shared::new()?, kills()?);
    let small = bystander(&shared, 1, 2 << 20, 0)?;
    let path = format!("/tmp/victims.{}", proc::pid());
    fs::write(&path, vec![5; READ as usize]).map_err(|error| format!("{path}: {error}"))?;
    let hog = fork(|| {
        let Ok(file) = fs::File::open(&path) else { return WRONG };
        let fd = file.as_raw_fd() as u64;
        loop {
            let Ok(region) = Region::anonymous(READ) else { return WRONG + 1 };
            let mut done = 0;
            while done < READ {
                let args = [fd, region.start() + done, READ - done, done];
                // SAFETY: the region has no other owner.
                match unsafe { call(libc::SYS_pread64, args) } {
                    Ok(read @ 1..) => done += read,
                    Ok(_) => return WRONG + 2,
                    Err(Errno(errno)) => return 60 + errno,
                }
            }
            forget(region);
        }
    });
    let ended = ends(doing("fork", hog)?, KILLED, "the hog");
    let _ = fs::remove_file(&path);
    ended?;
    shared.set(0, 1);
    ends(small, Status::Exited(0), "the small process")?;
    same!(kills()? - before, 1, "killed processes");
    Ok(())
}

/// Several hogs at once: each is killed once, and the last small process survives.
fn together() -> Verdict {
    const HOGS: usize = 4;
    let (shared, before) = (Shared::new()?, kills()?);
    let small = bystander(&shared, 1, 2 << 20, 0)?;
    let hogs = (0..HOGS).map(|_| doing("fork", fork(take_all)));
    let hogs = hogs.collect::<Result<Vec<_>, _>>()?;
    for hog in hogs {
        ends(hog, KILLED, "a hog")?;
    }
    shared.set(0, 1);
    ends(small, Status::Exited(0), "the small process")?;
    same!(kills()? - before, HOGS as u64, "killed processes");
    Ok(())
}

/// The victim's memory is in use for a while after the end of its process, by a reader in `/proc`.
/// No other process is killed during this time.
fn memory_held_by_readers() -> Verdict {
    let (shared, before) = (Shared::new()?, kills()?);
    // The second victim, if a second process were killed.
    let medium = bystander(&shared, 1, memory()? / 5, 0)?;
    let hog = doing("fork", fork(take_all))?;
    let readers = [0; 2].map(|_| {
        fork(|| {
            let path = format!("/proc/{}/smaps", hog.pid);
            let Ok(file) = fs::File::open(&path) else { return WRONG };
            while shared.get(0) == 0 {
                let _ = text(&path);
            }
            drop(file);
            0
        })
    });
    ends(hog, KILLED, "the hog")?;
    shared.set(0, 1);
    for reader in readers {
        ends(doing("fork", reader)?, Status::Exited(0), "a reader")?;
    }
    ends(medium, Status::Exited(0), "the process of medium size")?;
    same!(kills()? - before, 1, "killed processes");
    Ok(())
}

/// Processes that share the victim's memory are killed with it: the parent of a hog, which takes no
/// memory itself, whether it waits for the hog (`vfork`) or not.
fn shared_memory() -> Verdict {
    extern "C" fn hog(_: *mut libc::c_void) -> i32 {
        take_all()
    }
    // SAFETY: a plain call. Orphans become this process's children.
    let adopts =
        unsafe { call(libc::SYS_prctl, [libc::PR_SET_CHILD_SUBREAPER as u64, 1, 0, 0, 0]) };
    doing("prctl", adopts)?;
    for waits in [0, libc::CLONE_VFORK] {
        let before = kills()?;
        let parent = fork(|| {
            let Ok(stack) = Region::anonymous(256 << 10) else { return WRONG };
            let top = (stack.start() + stack.len()) as *mut libc::c_void;
            let flags = libc::CLONE_VM | libc::SIGCHLD | waits;
            // SAFETY: the child has its own stack, and its code shares no other state with this
            // process.
            let cloned = unsafe { libc::clone(hog, top, flags, std::ptr::null_mut()) };
            if cloned < 0 {
                return WRONG + 1;
            }
            loop {
                clock::sleep_ms(1000);
            }
        });
        let _parent = doing("fork", parent)?;
        for _ in 0..2 {
            let (_, status) = doing("wait4", wait(-1, 0))?.ok_or("no process ended")?;
            same!(status, KILLED, "one of two processes with shared memory");
        }
        same!(kills()? - before, 1, "chosen processes");
    }
    Ok(())
}

/// If all processes are protected, the process that finds no memory is killed. (Linux panics.)
fn no_candidates() -> Verdict {
    let (shared, before) = (Shared::new()?, kills()?);
    let other = bystander(&shared, 1, memory()? / 4, 0)?;
    ends(doing("fork", fork(take_all))?, KILLED, "the hog")?;
    shared.set(0, 1);
    ends(other, Status::Exited(0), "the other process")?;
    same!(kills()? - before, 1, "killed processes");
    Ok(())
}

/// `oom_score` contains the points: the resident, swapped and table pages, in thousandths of all
/// pages, and the adjustment.
fn score() -> Verdict {
    let region = doing("mmap", Region::anonymous(24 << 20))?;
    region.fill(1);
    let score =
        || text("/proc/self/oom_score")?.trim().parse::<i64>().map_err(|error| error.to_string());
    let status = fields("/proc/self/status")?;
    let sum = |names: [&str; 3]| {
        names.iter().try_fold(0, |sum, name| Ok(sum + kilobytes(&status, name)?))
    };
    let own: Result<u64, String> = sum(["VmRSS", "VmSwap", "VmPTE"]);
    let info = fields("/proc/meminfo")?;
    let all = kilobytes(&info, "MemTotal")? + kilobytes(&info, "SwapTotal")?;
    let [points, all] = [own?, all].map(|bytes| (bytes / PAGE) as i64);
    let base = text("/proc/self/oom_score_adj")?
        .trim()
        .parse::<i64>()
        .map_err(|error| error.to_string())?;
    for adjustment in [base, 600, 1000] {
        if adjustment < base {
            continue;
        }
        let written = fs::write("/proc/self/oom_score_adj", adjustment.to_string());
        written.map_err(|error| format!("writing oom_score_adj: {error}"))?;
        // Linux rounds a thousandth of all pages down.
        let points = points + adjustment * (all / 1000);
        let expected = (1000 + points * 1000 / all) * 2 / 3;
        let found = score()?;
        ensure!((found - expected).abs() <= 2, "oom_score is {found}, expected {expected}");
    }
    Ok(())
}

const CHECKS: &[Check] = &[
    ("greedy", greedy),
    ("protected", protected),
    ("offered", offered),
    ("calls", calls),
    ("sparse", sparse),
    ("hog_that_only_reads", hog_that_only_reads),
    ("together", together),
    ("memory_held_by_readers", memory_held_by_readers),
    ("shared_memory", shared_memory),
    ("score", score),
];
/// On the bare kernel only.
const UNLIKE_LINUX: &[Check] = &[("no_candidates", no_candidates)];

fn main() -> ExitCode {
    let args = Args::read("victims", &["settle"]);
    // A stock Linux can be started with only this program.
    let _init = Init::begin(args.get("settle", 1)).unwrap_or_else(|why| args.refuse(&why));
    let takes_all = args.words().iter().all(|word| word != "score") || args.words().len() > 1;
    match memory() {
        Ok(total) if takes_all && total >= 2 << 30 => {
            args.refuse(&format!("the machine has {} MiB: only score can run", total >> 20));
        }
        Err(why) => args.refuse(&why),
        _ => {}
    }
    proc::no_huge_pages();
    let protects_all = args.words().iter().any(|word| word == "no_candidates");
    if protects_all {
        adjust(-1000);
    }
    ExitCode::from(check::run(&args, if protects_all { UNLIKE_LINUX } else { CHECKS }) as u8)
}
