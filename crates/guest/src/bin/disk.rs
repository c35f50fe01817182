//! `disk CHECK…`: files on a disk, whose pages are read on demand.
//!
//! In `/data` each check has its own file, which has not been read before: [`PAGES`] pages, with
//! [`word`] of its offset in each word. `other_threads_run` needs a slow disk, and `errors` a disk
//! that cannot read page [`BAD`] of its file.

use faultless_guest::check::{Check, Verdict};
use faultless_guest::dir::{self, io, number};
use faultless_guest::mem::{PAGE, READ, Region, WRITE, load};
use faultless_guest::proc::{self, Status, fork, pid, wait_until};
use faultless_guest::procfs::{fields, kilobytes, vmstat};
use faultless_guest::sys::{Errno, call, checked, doing};
use faultless_guest::{ensure, same, signal};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::mem::{forget, zeroed};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

/// Pages of each file.
const PAGES: u64 = 320;
/// Bytes of each file.
const BYTES: u64 = PAGES * PAGE;
/// The unreadable page.
const BAD: u64 = 37;

/// The word at the place `at`, a multiple of 8.
fn word(at: u64) -> u64 {
    (at / 8 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The bytes of a file from `at` on.
fn bytes(at: u64, len: u64) -> Vec<u8> {
    let from = at / 8 * 8;
    let words = (from..at + len).step_by(8).flat_map(|at| word(at).to_le_bytes());
    words.skip((at - from) as usize).take(len as usize).collect()
}

fn path(name: &str) -> String {
    format!("/data/{name}")
}

fn file(name: &str) -> Result<File, String> {
    io(name, OpenOptions::new().read(true).write(true).open(path(name)))
}

fn map(file: &File, prot: i32, flags: i32) -> Result<Region, String> {
    doing("mmap", Region::map(BYTES, prot, flags, file.as_raw_fd(), 0))
}

/// Returns the major faults of this thread, and the number of its sleeps.
fn faults_and_sleeps() -> [i64; 2] {
    // SAFETY: the structure is a local, of integers.
    let usage = unsafe {
        let mut usage: libc::rusage = zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
        usage
    };
    [usage.ru_majflt, usage.ru_nvcsw]
}

/// The major faults of this thread.
fn major_faults() -> i64 {
    faults_and_sleeps()[0]
}

/// Reads of the whole file, and of parts that begin and end within pages.
fn reads() -> Verdict {
    let mut odd = file("odd")?;
    for (at, len) in [(12_345, 70_001), (BYTES - 100, 100), (4095, 2), (200_000, 1)] {
        let mut buffer = vec![0; len as usize];
        io("pread", odd.read_exact_at(&mut buffer, at))?;
        ensure!(buffer == bytes(at, len), "{len} bytes from {at} are wrong");
    }
    same!(io("seek", odd.seek(SeekFrom::End(-10)))?, BYTES - 10, "the position");
    let mut rest = [0; 64];
    same!(io("read", odd.read(&mut rest))?, 10, "bytes at the end");
    ensure!(rest[..10] == bytes(BYTES - 10, 10), "the last bytes are wrong");
    let all = io("read", fs::read(path("reads")))?;
    ensure!(all == bytes(0, BYTES), "{} bytes, or different bytes", all.len());
    Ok(())
}

/// A mapping is read by major faults, each of which reads more than its page.
fn mapped() -> Verdict {
    let file = file("mapped")?;
    let region = map(&file, READ, libc::MAP_PRIVATE)?;
    let before = major_faults();
    for at in (0..BYTES / 8).rev().map(|place| place * 8) {
        same!(region.load(at), word(at), "the word at {at}");
    }
    let major = major_faults() - before;
    ensure!(major > 0 && major <= PAGES as i64 / 8, "{major} major faults for {PAGES} pages");
    let again = map(&file, READ, libc::MAP_SHARED)?;
    again.pages().for_each(|at| {
        again.load(at);
    });
    same!(major_faults() - before, major, "major faults of resident pages");
    Ok(())
}

/// Many threads fault in the same pages, in different orders.
fn many_threads() -> Verdict {
    let region = map(&file("threads")?, READ, libc::MAP_SHARED)?;
    let region = &region;
    let wrong: u64 = thread::scope(|scope| {
        let threads: Vec<_> = (0..8u64)
            .map(|thread| {
                scope.spawn(move || {
                    let places = (0..PAGES).map(|step| {
                        let page = (step * (2 * thread + 1) + 40 * thread) % PAGES;
                        page * PAGE + thread * 8
                    });
                    places.filter(|&at| region.load(at) != word(at)).count() as u64
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(PAGES)).sum()
    });
    same!(wrong, 0, "wrong words");
    Ok(())
}

/// While a thread waits for the disk, other threads run on its CPU.
fn other_threads_run() -> Verdict {
    static STEPS: AtomicU64 = AtomicU64::new(0);
    static END: AtomicBool = AtomicBool::new(false);
    let region = map(&file("slow")?, READ, libc::MAP_PRIVATE)?;
    let other = thread::spawn(|| {
        while !END.load(Ordering::Relaxed) {
            STEPS.fetch_add(1, Ordering::Relaxed);
        }
    });
    wait_until(|| STEPS.load(Ordering::Relaxed) != 0);
    let mut slept = 0;
    for at in region.pages() {
        let (steps, [faults, sleeps]) = (STEPS.load(Ordering::Relaxed), faults_and_sleeps());
        same!(region.load(at), word(at), "the word at {at}");
        let ran = STEPS.load(Ordering::Relaxed) - steps;
        let [more_faults, more_sleeps] = faults_and_sleeps();
        slept += u64::from(more_faults > faults && more_sleeps > sleeps && ran > 0);
    }
    END.store(true, Ordering::Relaxed);
    let _ = other.join();
    // The disk's first reads are quick.
    ensure!(slept >= 3, "another thread ran while this thread slept in {slept} major faults");
    Ok(())
}

/// The kernel copies from and to pages that are not present yet.
fn copies() -> Verdict {
    let file = file("copies")?;
    let region = map(&file, WRITE, libc::MAP_PRIVATE)?;
    let (mut reader, mut writer) = io("pipe", std::io::pipe())?;
    let at = |page: u64| region.start() + page * PAGE;
    // SAFETY: the kernel reads the region's bytes.
    let written = unsafe { call(libc::SYS_write, [writer.as_raw_fd() as u64, at(1) - 50, 100]) };
    same!(written, Ok(100), "bytes written from absent pages");
    let mut buffer = [0; 100];
    io("read", reader.read_exact(&mut buffer))?;
    ensure!(buffer[..] == bytes(PAGE - 50, 100), "the written bytes are wrong");
    // Into the middle of a page: the rest is the file's.
    io("write", writer.write_all(&[0xee; 8]))?;
    // SAFETY: the kernel writes the region's bytes.
    let read = unsafe { call(libc::SYS_read, [reader.as_raw_fd() as u64, at(100) + 16, 8]) };
    same!(read, Ok(8), "bytes read into an absent page");
    let words = [0, 8, 16, 24].map(|more| region.load(100 * PAGE + more));
    let whole = |more| word(100 * PAGE + more);
    same!(words, [whole(0), whole(8), 0xeeee_eeee_eeee_eeee, whole(24)], "the page");
    // By the access of a debugger.
    let mut seen = [0u64; 2];
    let local = [seen.as_mut_ptr() as u64, 16];
    let remote = [at(200), 16];
    let args = [pid() as u64, local.as_ptr() as u64, 1, remote.as_ptr() as u64, 1, 0];
    // SAFETY: the kernel writes to `seen` alone.
    same!(unsafe { call(libc::SYS_process_vm_readv, args) }, Ok(16), "process_vm_readv");
    same!(seen, [word(200 * PAGE), word(200 * PAGE + 8)], "the bytes that were read");
    Ok(())
}

/// Pages requested in advance cause no major faults.
fn populated() -> Verdict {
    let file = file("populated")?;
    let before = major_faults();
    let region = map(&file, READ, libc::MAP_SHARED | libc::MAP_POPULATE)?;
    for at in region.pages() {
        same!(region.load(at), word(at), "the word at {at}");
    }
    same!(major_faults() - before, 0, "major faults of populated pages");
    let ahead = self::file("ahead")?;
    let region = map(&ahead, READ, libc::MAP_PRIVATE)?;
    // SAFETY: a plain call.
    let advised = unsafe {
        libc::posix_fadvise(ahead.as_raw_fd(), 0, BYTES as i64, libc::POSIX_FADV_WILLNEED)
    };
    same!(advised, 0, "posix_fadvise");
    wait_until(|| there(&region).map_or(true, |there| there.iter().all(|there| *there)));
    let before = major_faults();
    for at in region.pages() {
        same!(region.load(at), word(at), "the word at {at}");
    }
    same!(major_faults() - before, 0, "major faults of pages after read-ahead");
    Ok(())
}

/// Returns for each page of the mapping whether it is in memory.
fn there(region: &Region) -> Result<Vec<bool>, String> {
    let mut there = vec![0u8; PAGES as usize];
    let args = [region.start(), BYTES, there.as_mut_ptr() as u64];
    // SAFETY: the vector has a byte for each page.
    doing("mincore", unsafe { call(libc::SYS_mincore, args) })?;
    Ok(there.into_iter().map(|there| there & 1 != 0).collect())
}

/// The pages in memory after advice and accesses.
fn advised() -> Verdict {
    let file = file("advised")?;
    let seen = map(&file, READ, libc::MAP_SHARED)?;
    let resident = || Ok::<_, String>(there(&seen)?.iter().filter(|there| **there).count());
    let advise = |advice: i32, at: u64, len: u64| {
        // SAFETY: a plain call.
        let advised =
            unsafe { libc::posix_fadvise(file.as_raw_fd(), at as i64, len as i64, advice) };
        if advised == 0 { Ok(()) } else { Err(format!("posix_fadvise({advice}): {advised}")) }
    };
    let read = |at: u64, len: u64| {
        let mut buffer = vec![0; len as usize];
        io("pread", file.read_exact_at(&mut buffer, at))?;
        ensure!(buffer == bytes(at, len), "{len} bytes from {at} are wrong");
        Ok(())
    };
    // At random: only the needed pages.
    advise(libc::POSIX_FADV_RANDOM, 0, 0)?;
    [5, 250, 90].iter().try_for_each(|page| read(page * PAGE + 7, 8))?;
    read(130 * PAGE + 5, 2 * PAGE)?;
    same!(resident()?, 6, "pages in memory after random reads");
    let random = map(&file, READ, libc::MAP_PRIVATE)?;
    doing("madvise", random.advise(0, BYTES, libc::MADV_RANDOM))?;
    same!(random.load(300 * PAGE), word(300 * PAGE), "the word of page 300");
    same!(resident()?, 7, "pages in memory after a random access to a mapping");
    // Only whole pages are dropped, and no mapped page.
    advise(libc::POSIX_FADV_DONTNEED, 90 * PAGE + 1, 42 * PAGE - 2)?;
    let left: Vec<_> =
        there(&seen)?.iter().enumerate().filter_map(|(at, there)| there.then_some(at)).collect();
    same!(left, [5, 90, 131, 132, 250, 300], "pages in memory after pages 91 to 130 were dropped");
    advise(libc::POSIX_FADV_DONTNEED, 0, 0)?;
    same!(resident()?, 1, "mapped pages in memory");
    // As before: more pages than needed.
    advise(libc::POSIX_FADV_NORMAL, 0, 0)?;
    read(40 * PAGE, 8)?;
    ensure!(resident()? > 8, "{} pages in memory", resident()?);
    ensure!(advise(9, 0, 0).is_err(), "unknown advice is accepted");
    Ok(())
}

/// Clean pages are available memory, and are dropped on request, unless they are mapped; reads are
/// counted.
fn caches() -> Verdict {
    const DROP: &str = "/proc/sys/vm/drop_caches";
    let seen = || -> Result<[u64; 3], String> {
        let info = fields("/proc/meminfo")?;
        let available = kilobytes(&info, "MemAvailable")?;
        let reclaimable = available.saturating_sub(kilobytes(&info, "MemFree")?);
        let read = vmstat()?.get("pgpgin").copied().ok_or("/proc/vmstat has no pgpgin")?;
        Ok([kilobytes(&info, "Cached")?, reclaimable, read * 1024])
    };
    let least = |what: &str, more: u64, least: u64| {
        ensure!(more >= least, "{what}: {more} bytes of {least}");
        Ok(())
    };
    let file = file("caches")?;
    let read = || io("pread", file.read_exact_at(&mut vec![0; BYTES as usize], 0));
    io(DROP, fs::write(DROP, "3"))?;
    let before = seen()?;
    read()?;
    let after = seen()?;
    // Linux counts for each CPU, and keeps half of a small cache.
    for (what, at, part) in [("Cached rose", 0, 2), ("MemAvailable", 1, 4), ("pgpgin rose", 2, 1)] {
        least(what, after[at].saturating_sub(before[at]), BYTES / part)?;
    }
    io("pwrite", file.write_all_at(&[9; PAGE as usize], 7 * PAGE))?;
    let region = map(&file, READ, libc::MAP_SHARED)?;
    let mapped = region.load(20 * PAGE);
    io(DROP, fs::write(DROP, "1\n"))?;
    let dropped = seen()?;
    least("Cached fell", after[0].saturating_sub(dropped[0]), BYTES / 2)?;
    let left = there(&region)?;
    let left: Vec<_> = (0..left.len()).filter(|page| left[*page]).collect();
    ensure!(left.contains(&20) && left.len() < 40, "pages that remain: {left:?}");
    same!(region.load(20 * PAGE), mapped, "the mapped page");
    same!(region.load(7 * PAGE), u64::from_le_bytes([9; 8]), "the written page");
    read()?;
    least("pgpgin rose again", seen()?[2].saturating_sub(dropped[2]), BYTES / 2)
}

/// Whole pages are written without a read from the disk.
fn overwritten() -> Verdict {
    let file = file("overwritten")?;
    let seen = map(&file, READ, libc::MAP_SHARED)?;
    io("pwrite", file.write_all_at(&[5; 3 * PAGE as usize], 64 * PAGE))?;
    let resident = || Ok::<_, String>(there(&seen)?.iter().filter(|there| **there).count());
    same!(resident()?, 3, "pages in memory after whole pages were written");
    let mut expected = bytes(0, BYTES);
    expected[64 * PAGE as usize..][..3 * PAGE as usize].fill(5);
    // From memory that ends within a page: the bytes before the end count.
    let from = doing(
        "mmap",
        Region::map(2 * PAGE, WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0),
    )?;
    from.store(0, u64::from_le_bytes([7; 8]));
    doing("mprotect", from.protect(PAGE, PAGE, 0))?;
    let args = [file.as_raw_fd() as u64, from.start() + PAGE / 2, PAGE, 200 * PAGE];
    // SAFETY: the kernel reads the region's bytes.
    let short = unsafe { call(libc::SYS_pwrite64, args) };
    // No bytes, or all available bytes: on Linux this depends on whether the page is in memory.
    let short = match short {
        Ok(bytes) => bytes,
        Err(errno) => {
            same!(errno, Errno(libc::EFAULT), "a write from half a page");
            0
        }
    };
    expected[200 * PAGE as usize..][..short as usize].fill(0);
    let all = io("read", fs::read(path("overwritten")))?;
    ensure!(
        all == expected,
        "the file differs from the written bytes, with {short} bytes of half a page"
    );
    Ok(())
}

/// Stored data stays, separate from the disk's data; private stores are not visible in the file.
fn stores() -> Verdict {
    let stored = file("stores")?;
    let mut expected = bytes(0, BYTES);
    let mut put = |at: u64, what: &[u8]| {
        expected[at as usize..][..what.len()].copy_from_slice(what);
        io("pwrite", stored.write_all_at(what, at))
    };
    put(PAGE + 10, b"within a page")?;
    put(20 * PAGE - 3, b"over the end of a page")?;
    put(64 * PAGE, &[5; 3 * PAGE as usize])?;
    let (shared, private) =
        (map(&stored, WRITE, libc::MAP_SHARED)?, map(&stored, WRITE, libc::MAP_PRIVATE)?);
    shared.store(128 * PAGE + 8, 77);
    expected[128 * PAGE as usize + 8..][..8].copy_from_slice(&77u64.to_le_bytes());
    private.store(200 * PAGE, 99);
    same!(private.load(200 * PAGE + 8), word(200 * PAGE + 8), "the rest of the private copy");
    let all = io("read", fs::read(path("stores")))?;
    ensure!(all == expected, "the file differs from the stored bytes");
    let mut end = io("open", OpenOptions::new().append(true).open(path("stores")))?;
    io("append", end.write_all(b"more"))?;
    expected.extend_from_slice(b"more");
    // The kernel writes it in pieces.
    let long = vec![3; 3 << 20];
    same!(io("write", end.write(&long))?, long.len(), "bytes of a long write at the end");
    expected.extend_from_slice(&long);
    ensure!(
        io("read", fs::read(path("stores")))? == expected,
        "the file differs from the appended bytes"
    );
    Ok(())
}

/// Truncated parts are zeros after the file grows again, whether their pages had been read or not.
fn cut() -> Verdict {
    for read_first in [false, true] {
        let name = if read_first { "cut_read" } else { "cut" };
        let file = file(name)?;
        if read_first {
            io("read", fs::read(path(name)))?;
        }
        let end = 50 * PAGE + 1000;
        io("truncate", file.set_len(end))?;
        io("lengthen", file.set_len(BYTES))?;
        let all = io("read", fs::read(path(name)))?;
        same!(all.len() as u64, BYTES, "the length");
        ensure!(all[..end as usize] == bytes(0, end), "{name}: the remaining bytes are wrong");
        let zeros = all[end as usize..].iter().all(|&byte| byte == 0);
        ensure!(zeros, "{name}: truncated bytes are back");
    }
    Ok(())
}

/// Runs a program that has not been read yet, and a script with an interpreter on the disk.
fn programs() -> Verdict {
    for name in ["busybox_copy", "script"] {
        let ran = io(name, Command::new(path(name)).arg("echo").arg("it runs").output())?;
        same!(String::from_utf8_lossy(&ran.stdout), "it runs\n", "the output of {name}");
    }
    Ok(())
}

/// An unreadable page is an error only for its users.
fn errors() -> Verdict {
    let bad = file("bad")?;
    let region = map(&bad, READ, libc::MAP_PRIVATE)?;
    let at = |page: u64| region.start() + page * PAGE;
    let ends = |page: u64| {
        let child = fork(|| {
            let _ = signal::default(libc::SIGBUS);
            load(at(page));
            0
        });
        doing("wait4", doing("fork", child)?.wait())
    };
    for round in 0..2 {
        for page in [BAD - 1, BAD, BAD + 1] {
            let expected = match page {
                BAD => Status::Killed(libc::SIGBUS),
                _ => Status::Exited(0),
            };
            same!(ends(page)?, expected, "round {round}: a load from page {page}");
        }
    }
    same!(region.load((BAD + 1) * PAGE), word((BAD + 1) * PAGE), "the word behind the bad page");
    // The bytes before the page can be read.
    let mut buffer = vec![0; 8 * PAGE as usize];
    let from = (BAD - 3) * PAGE;
    same!(io("pread", bad.read_at(&mut buffer, from))? as u64, 3 * PAGE, "readable bytes");
    ensure!(buffer[..3 * PAGE as usize] == bytes(from, 3 * PAGE), "the bytes are wrong");
    same!(number(bad.read_at(&mut buffer, BAD * PAGE)), libc::EIO, "a read of the bad page");
    same!(
        number(bad.write_at(b"x", BAD * PAGE + 1)),
        libc::EIO,
        "a write to a part of the bad page"
    );
    let (_reader, writer) = io("pipe", std::io::pipe())?;
    // SAFETY: the kernel reads the region's bytes.
    let written = unsafe { call(libc::SYS_write, [writer.as_raw_fd() as u64, at(BAD), 100]) };
    same!(written, Err(Errno(libc::EFAULT)), "a write from the bad page");
    let populated = checked(unsafe {
        // SAFETY: advice about the region.
        libc::madvise(at(BAD) as *mut libc::c_void, PAGE as usize, libc::MADV_POPULATE_READ)
    });
    same!(populated, Err(Errno(libc::EFAULT)), "populating the bad page");
    let run = Command::new(path("bad_program")).status();
    same!(number(run), libc::EIO, "running a program with an unreadable header");
    Ok(())
}

/// While other processes take all memory, a file is read as usual: neither calls nor faults fail.
fn while_memory_is_out() -> Verdict {
    let hogs = fork(|| {
        for _ in 0..2 {
            let hog = proc::outcome(|| {
                loop {
                    if let Ok(region) = Region::anonymous(1 << 20) {
                        region.fill(1);
                        forget(region);
                    }
                }
            });
            if hog != Ok(Status::Killed(libc::SIGKILL)) {
                return 1;
            }
        }
        0
    });
    let hogs = doing("fork", hogs)?;
    let file = file("out")?;
    let mut buffer = vec![0; 8 * PAGE as usize];
    loop {
        let ended = doing("wait4", hogs.try_wait())?;
        for at in (0..BYTES).step_by(buffer.len()) {
            io("pread", file.read_exact_at(&mut buffer, at))?;
            ensure!(buffer == bytes(at, buffer.len() as u64), "the bytes at {at} are wrong");
        }
        let region = map(&file, READ, libc::MAP_PRIVATE)?;
        for at in region.pages() {
            same!(region.load(at), word(at), "the word at {at}");
        }
        if let Some(status) = ended {
            same!(status, Status::Exited(0), "the parent of the hogs");
            return Ok(());
        }
    }
}

const CHECKS: &[Check] = &[
    ("reads", reads),
    ("mapped", mapped),
    ("many_threads", many_threads),
    ("other_threads_run", other_threads_run),
    ("copies", copies),
    ("populated", populated),
    ("advised", advised),
    ("caches", caches),
    ("overwritten", overwritten),
    ("stores", stores),
    ("cut", cut),
    ("programs", programs),
    ("errors", errors),
    ("while_memory_is_out", while_memory_is_out),
];

fn main() {
    dir::run("disk", CHECKS);
}
