//! `processes [CHECK…]`: fork, vfork, execve and wait4.

use faultless_guest::args::Args;
use faultless_guest::check::{Check, Verdict};
use faultless_guest::mem::{PAGE, Region, Shared};
use faultless_guest::proc::{
    self, Status, exit_now, fork, kill, outcome, pid, tid, wait, wait_until,
};
use faultless_guest::sys::{Errno, checked, doing};
use faultless_guest::{check, clock, ensure, procfs, same, signal};
use std::arch::global_asm;
use std::ffi::CString;
use std::io::Read;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicI32, AtomicU64};
use std::thread;
use std::time::Instant;

/// Exit statuses, and the errors of `wait4` without children.
fn waits() -> Verdict {
    for status in [0, 1, 77, 255] {
        same!(outcome(|| exit_now(status))?, Status::Exited(status), "exit({status})");
    }
    same!(outcome(|| exit_now(0x1234))?, Status::Exited(0x34), "exit(0x1234)");
    same!(wait(-1, 0), Err(Errno(libc::ECHILD)), "waiting without children");
    let child = doing(
        "fork",
        fork(|| {
            clock::sleep_ms(50);
            3
        }),
    )?;
    same!(child.try_wait(), Ok(None), "a running child");
    same!(wait(1 << 22, 0), Err(Errno(libc::ECHILD)), "waiting for a process that is not a child");
    same!(wait(-1, 0), Ok(Some((child.pid, Status::Exited(3)))), "waiting for any child");
    // Many children at once; each is found once.
    let children: Vec<_> = (0..20).map(|number| fork(move || number)).collect();
    let mut sum = 0;
    for _ in &children {
        match doing("wait4", wait(-1, 0))? {
            Some((_, Status::Exited(status))) => sum += status,
            other => return Err(format!("a child ended with {other:?}")),
        }
    }
    same!(sum, (0..20).sum::<i32>(), "the sum of twenty statuses");
    same!(wait(-1, 0), Err(Errno(libc::ECHILD)), "waiting without remaining children");
    Ok(())
}

/// The usage of a child is reported with its end.
fn usage() -> Verdict {
    let child = doing(
        "fork",
        fork(|| {
            let region = Region::anonymous(64 * PAGE);
            region.map_or(1, |region| {
                // One fault for each page, without fault-around.
                let alone = region.advise(0, 64 * PAGE, libc::MADV_RANDOM);
                region.fill(1);
                i32::from(alone.is_err())
            })
        }),
    )?;
    let mut status = 0;
    // SAFETY: a usage of zeros is valid; the pointers are to locals.
    let (found, usage) = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        (checked(libc::wait4(child.pid, &raw mut status, 0, &raw mut usage)), usage)
    };
    same!(found, Ok(child.pid), "wait4");
    same!(Status::of(status), Status::Exited(0), "the child");
    ensure!(usage.ru_minflt >= 64, "the child took {} faults for 64 pages", usage.ru_minflt);
    Ok(())
}

/// An ended process that has not been waited for is a zombie: only its number exists.
fn zombies() -> Verdict {
    let child = doing("fork", fork(|| 9))?;
    let path = format!("/proc/{}/stat", child.pid);
    let begin = Instant::now();
    loop {
        let line = procfs::text(&path)?;
        let state = line.rsplit(") ").next().and_then(|rest| rest.chars().next());
        if state == Some('Z') {
            break;
        }
        ensure!(begin.elapsed().as_secs() < 10, "{path} contains {line:?} for an ended process");
        clock::sleep_ms(1);
    }
    same!(kill(child.pid, 0), Ok(()), "kill of a zombie with signal 0");
    let number = child.pid;
    same!(doing("wait4", child.wait())?, Status::Exited(9), "the zombie");
    same!(kill(number, 0), Err(Errno(libc::ESRCH)), "kill of a reaped child");
    // With SIGCHLD ignored there are no zombies.
    doing("sigaction", signal::ignore(libc::SIGCHLD))?;
    let child = doing("fork", fork(|| 9))?;
    same!(child.wait(), Err(Errno(libc::ECHILD)), "waiting for a child with SIGCHLD ignored");
    Ok(())
}

/// Returns the path at which this program can be executed again.
fn own_path() -> Result<CString, String> {
    let path = std::env::current_exe().map_err(|error| format!("/proc/self/exe: {error}"))?;
    CString::new(path.into_os_string().into_encoded_bytes()).map_err(|error| error.to_string())
}

/// Executes this program again with the argument `word` and `FAULTLESS=environment`.
fn execute(word: &str) -> i32 {
    let Ok(path) = own_path() else { return 90 };
    let Ok(word) = CString::new(word) else { return 91 };
    let arguments = [path.as_ptr(), word.as_ptr(), std::ptr::null()];
    let environment = [c"FAULTLESS=environment".as_ptr(), std::ptr::null()];
    // SAFETY: the arrays end in null, and live as long as this process.
    unsafe { libc::execve(path.as_ptr(), arguments.as_ptr(), environment.as_ptr()) };
    Errno::last().0
}

/// `execve`: arguments, environment, handlers, masks and threads; and its errors.
fn exec() -> Verdict {
    same!(outcome(|| execute("exec:plain"))?, Status::Exited(40), "a program executed");
    let status = outcome(|| {
        thread::spawn(|| proc::spin_for_ever());
        clock::sleep_ms(5);
        execute("exec:plain")
    })?;
    same!(status, Status::Exited(40), "a program executed by a process with threads");
    let status = outcome(|| {
        thread::spawn(|| execute("exec:identity"));
        clock::sleep_ms(10_000);
        1
    })?;
    same!(status, Status::Exited(41), "a program executed by another thread than the first");
    let status = outcome(|| {
        extern "C" fn handler(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
        let _ = signal::handle(libc::SIGUSR1, handler, 0);
        let _ = signal::ignore(libc::SIGUSR2);
        let _ = signal::mask(libc::SIG_BLOCK, &[libc::SIGHUP]);
        execute("exec:signals")
    })?;
    same!(status, Status::Exited(42), "the signals of a program executed");
    let refused = |path: &std::ffi::CStr, text: Option<&[u8]>| -> Result<Errno, String> {
        if let Some(text) = text {
            let name = path.to_string_lossy().into_owned();
            std::fs::write(&name, text).map_err(|error| format!("write {name}: {error}"))?;
            // SAFETY: a plain call.
            unsafe { libc::chmod(path.as_ptr(), 0o755) };
        }
        let arguments = [path.as_ptr(), std::ptr::null()];
        // SAFETY: the arrays end in null. If the program is executed after all, this process is
        // lost.
        unsafe { libc::execve(path.as_ptr(), arguments.as_ptr(), arguments[1..].as_ptr().cast()) };
        let errno = Errno::last();
        if text.is_some() {
            let _ = std::fs::remove_file(path.to_string_lossy().into_owned());
        }
        Ok(errno)
    };
    same!(refused(c"/no/such/file", None)?.0, libc::ENOENT, "executing a missing file");
    same!(refused(c"/proc", None)?.0, libc::EACCES, "executing a directory");
    let mut header =
        *b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0\0\0\0\0\0\0\0\0";
    same!(refused(c"/tmp/empty", Some(b""))?.0, libc::ENOEXEC, "executing an empty file");
    same!(refused(c"/tmp/text", Some(b"no program"))?.0, libc::ENOEXEC, "executing text");
    same!(refused(c"/tmp/short", Some(&header))?.0, libc::ENOEXEC, "executing half a header");
    header[4] = 1;
    same!(refused(c"/tmp/narrow", Some(&header))?.0, libc::ENOEXEC, "executing 32-bit ELF");
    let mut far = [0u8; 64];
    far[..32].copy_from_slice(
        b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0\0\0\0\0\0\0\0\0",
    );
    // Program headers beyond the end of the file.
    far[32..40].copy_from_slice(&u64::MAX.to_le_bytes());
    (far[52], far[54], far[56]) = (64, 56, 1);
    same!(refused(c"/tmp/far", Some(&far))?.0 != 0, true, "executing headers beyond the end");
    Ok(())
}

/// Malformed programs are rejected, or ended by a signal if the error is detected too late; and
/// valid programs can still be executed.
fn malformed() -> Verdict {
    let whole =
        std::fs::read("/proc/self/exe").map_err(|error| format!("/proc/self/exe: {error}"))?;
    let path = format!("/tmp/malformed.{}", pid());
    let name = CString::new(path.clone()).map_err(|error| error.to_string())?;
    let attempt = |bytes: &[u8]| -> Result<Status, String> {
        std::fs::write(&path, bytes).map_err(|error| format!("write {path}: {error}"))?;
        // SAFETY: a plain call.
        doing("chmod", checked(unsafe { libc::chmod(name.as_ptr(), 0o755) }))?;
        let arguments = [name.as_ptr(), c"exec:plain".as_ptr(), std::ptr::null()];
        outcome(|| {
            // SAFETY: the arrays end in null.
            unsafe { libc::execve(name.as_ptr(), arguments.as_ptr(), arguments[2..].as_ptr()) };
            Errno::last().0
        })
    };
    // Offsets in the header of an ELF file, with invalid values.
    let wrong: [(&str, usize, &[u8]); 7] = [
        ("magic", 0, b"\x7fELG"),
        ("type: relocatable", 16, &[1, 0]),
        ("type: core", 16, &[4, 0]),
        ("machine", 18, &[40, 0]),
        ("size of a program header", 54, &[55, 0]),
        ("no program headers", 56, &[0, 0]),
        ("program headers beyond all addresses", 32, &[0xff; 8]),
    ];
    for (what, at, value) in wrong {
        let mut bytes = whole[..0x2000].to_vec();
        bytes[at..at + value.len()].copy_from_slice(value);
        same!(attempt(&bytes)?, Status::Exited(libc::ENOEXEC), "{what}");
    }
    for len in [0, 1, 4, 16, 63] {
        same!(attempt(&whole[..len])?, Status::Exited(libc::ENOEXEC), "a file of {len} bytes");
    }
    // The program headers, word by word: some values are not detected, some are detected too late.
    let table = 64;
    for at in (table..table + 4 * 56).step_by(8) {
        for value in
            [0u64, 1, 0xfff, 1 << 46, 1 << 47, 0xffff_8000_0000_0000, i64::MAX as u64, u64::MAX]
        {
            let mut bytes = whole[..0x2000].to_vec();
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            let status = attempt(&bytes)?;
            ensure!(
                matches!(status, Status::Killed(_) | Status::Exited(1..134)),
                "word {at:#x} of the file {value:#x}: {status:?}"
            );
        }
    }
    same!(attempt(&whole)?, Status::Exited(80), "the whole program, without its environment");
    std::fs::remove_file(&path).map_err(|error| format!("unlink {path}: {error}"))
}

/// Handmade programs with one error each: the same error as on Linux, or, if Linux detects the
/// error only after the old program is gone, `ENOEXEC` or the end by `SIGSEGV`.
fn hostile() -> Verdict {
    /// Returns a file header and three headers of segments, the first of which is the program; its
    /// code is at 0x100: `exit(7)`. The other segments are empty.
    fn program() -> Vec<u8> {
        let mut file = vec![0u8; 0x1000];
        let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, b"\x7fELF\x02\x01\x01");
        put(16, &[2, 0, 62, 0, 1, 0, 0, 0]);
        put(24, &0x40_0100_u64.to_le_bytes());
        put(32, &64u64.to_le_bytes());
        put(52, &[64, 0, 56, 0, 3, 0]);
        put(64, &[1, 0, 0, 0, 5, 0, 0, 0]);
        for (field, value) in
            [0, 0x40_0000, 0x40_0000, 0x1000, 0x1000, 0x1000_u64].iter().enumerate()
        {
            put(64 + 8 + 8 * field, &value.to_le_bytes());
        }
        // mov edi, 7; mov eax, 60; syscall
        put(0x100, &[0xbf, 7, 0, 0, 0, 0xb8, 60, 0, 0, 0, 0x0f, 0x05]);
        file
    }
    /// The offset of a field of a segment: 0 its kind, 1 offset, 2 address, 4 bytes in the file, 5
    /// in memory.
    const fn field(segment: usize, field: usize) -> usize {
        64 + segment * 56 + 8 * field
    }
    type Change<'a> = (usize, &'a [u8]);
    let path = format!("/tmp/hostile.{}", pid());
    let name = CString::new(path.clone()).map_err(|error| error.to_string())?;
    let attempt = |bytes: &[u8], changes: &[Change]| -> Result<Status, String> {
        let mut bytes = bytes.to_vec();
        for (at, value) in changes {
            bytes[*at..*at + value.len()].copy_from_slice(value);
        }
        std::fs::write(&path, bytes).map_err(|error| format!("write {path}: {error}"))?;
        // SAFETY: a plain call.
        doing("chmod", checked(unsafe { libc::chmod(name.as_ptr(), 0o755) }))?;
        outcome(|| {
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            let arguments = [name.as_ptr(), std::ptr::null()];
            // SAFETY: the arrays end in null, and the limit is a local.
            unsafe {
                libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
                libc::execve(name.as_ptr(), arguments.as_ptr(), arguments[1..].as_ptr());
            }
            Errno::last().0
        })
    };
    let whole = program();
    same!(attempt(&whole, &[])?, Status::Exited(7), "the valid program");
    let interpreter = |name: &'static str| -> [Change<'static>; 4] {
        let len: &'static [u8] = match name.len() {
            1 => &[1, 0],
            5 => &[5, 0],
            6 => &[6, 0],
            9 => &[9, 0],
            10 => &[10, 0],
            _ => &[0xff, 0xff],
        };
        [(field(1, 0), &[3]), (field(1, 1), &[0, 2]), (field(1, 4), len), (0x200, name.as_bytes())]
    };
    let refused: [(&str, &[Change], i32); 12] = [
        ("65,535 program headers", &[(56, &[0xff, 0xff])], libc::ENOEXEC),
        ("1,171 program headers", &[(56, &[0x93, 0x04])], libc::ENOEXEC),
        ("program headers beyond the end", &[(32, &[0xff, 0x0f])], libc::ENOEXEC),
        ("program headers of another size", &[(54, &[64])], libc::ENOEXEC),
        ("another machine", &[(18, &[183])], libc::ENOEXEC),
        ("an object file", &[(16, &[1])], libc::ENOEXEC),
        ("a missing interpreter", &interpreter("/none\0"), libc::ENOENT),
        ("an interpreter without a NUL", &interpreter("/none"), libc::ENOEXEC),
        ("an interpreter without a name", &interpreter("\0"), libc::ENOEXEC),
        ("an interpreter that is a directory", &interpreter("/proc\0"), libc::EACCES),
        ("an interpreter that is not a file", &interpreter("/dev/null\0"), libc::EACCES),
        ("a name of 64 KiB for an interpreter", &interpreter("no length"), libc::ENOEXEC),
    ];
    for (what, changes, errno) in refused {
        let mut changes = changes.to_vec();
        if what.starts_with("a name of 64") {
            changes[2].1 = &[0xff, 0xff];
        }
        same!(attempt(&whole, &changes)?, Status::Exited(errno), "{what}");
    }
    for len in [1, 63, 64, 119, 120, 231] {
        same!(
            attempt(&whole[..len], &[])?,
            Status::Exited(libc::ENOEXEC),
            "{len} bytes of the program"
        );
    }
    let high = 0xffff_8000_0000_0000_u64.to_le_bytes();
    let late: [(&str, &[Change]); 8] = [
        ("more in the file than in memory", &[(field(0, 5), &[0xff, 0x0f])]),
        ("a segment in the upper half", &[(field(0, 2), &high)]),
        ("a segment that wraps around", &[(field(0, 5), &[0xff; 8])]),
        ("a segment of all memory", &[(field(0, 5), &0x7fff_f000_0000_u64.to_le_bytes())]),
        ("a segment below the lowest address", &[(field(0, 2), &[0; 8])]),
        ("an address unlike the offset", &[(field(0, 2), &[8])]),
        ("an entry outside", &[(24, &0x50_0000_u64.to_le_bytes())]),
        ("an entry in the upper half", &[(24, &high)]),
    ];
    for (what, changes) in late {
        let status = attempt(&whole, changes)?;
        ensure!(
            matches!(
                status,
                Status::Exited(libc::ENOEXEC | libc::ENOMEM | libc::EINVAL)
                    | Status::Killed(libc::SIGSEGV)
            ),
            "{what}: {status:?}"
        );
    }
    // Its own interpreter, which is started and interprets no program.
    let own =
        [(field(1, 0), &[3u8][..]), (field(1, 1), &[0, 2]), (0x200, name.as_bytes_with_nul())];
    let mut own = own.to_vec();
    let len = (name.as_bytes_with_nul().len() as u16).to_le_bytes();
    own.push((field(1, 4), &len));
    let status = attempt(&whole, &own)?;
    ensure!(
        matches!(status, Status::Exited(7 | libc::ENOEXEC) | Status::Killed(libc::SIGSEGV)),
        "a program as its own interpreter: {status:?}"
    );
    // An interpreter that is no program.
    let text = format!("/tmp/hostile.text.{}", pid());
    let written = std::fs::write(&text, [b'x'; 100]);
    written.map_err(|error| format!("write {text}: {error}"))?;
    let text_name = CString::new(text.clone()).map_err(|error| error.to_string())?;
    // SAFETY: a plain call.
    doing("chmod", checked(unsafe { libc::chmod(text_name.as_ptr(), 0o755) }))?;
    let len = (text_name.as_bytes_with_nul().len() as u16).to_le_bytes();
    let odd = [
        (field(1, 0), &[3u8][..]),
        (field(1, 1), &[0, 2]),
        (0x200, text_name.as_bytes_with_nul()),
        (field(1, 4), &len),
    ];
    same!(attempt(&whole, &odd)?, Status::Exited(libc::ELIBBAD), "an interpreter that is text");
    let _ = std::fs::remove_file(&text);
    std::fs::remove_file(&path).map_err(|error| format!("unlink {path}: {error}"))
}

/// The group of a child stays after its `execve`.
fn groups_after_exec() -> Verdict {
    let (mut reader, writer) = std::io::pipe().map_err(|error| format!("pipe: {error}"))?;
    let child = doing("fork", fork(|| execute("exec:wait")))?;
    drop(writer);
    // The child's end is closed by its `execve`.
    reader.read_to_end(&mut Vec::new()).map_err(|error| format!("read: {error}"))?;
    // SAFETY: the call changes no memory of the program.
    let moved = checked(unsafe { libc::setpgid(child.pid, 0) });
    doing("kill", child.signal(libc::SIGKILL))?;
    doing("wait4", child.wait())?;
    same!(moved, Err(Errno(libc::EACCES)), "setpgid of a child after its execve");
    Ok(())
}

/// The action of the program after [`execute`].
fn executed(word: &str) -> i32 {
    let environment = std::env::var("FAULTLESS").is_ok_and(|value| value == "environment");
    let arguments = std::env::args().count() == 2 && std::env::vars().count() == 1;
    if !environment || !arguments {
        return 80;
    }
    match word {
        "exec:plain" => 40,
        "exec:wait" => {
            clock::sleep_ms(60_000);
            43
        }
        "exec:identity" if pid() == tid() => 41,
        "exec:signals" => {
            let action = |signal| {
                // SAFETY: a query; the action is a local.
                unsafe {
                    let mut action: libc::sigaction = std::mem::zeroed();
                    libc::sigaction(signal, std::ptr::null(), &raw mut action);
                    action.sa_sigaction
                }
            };
            let handled = action(libc::SIGUSR1) == libc::SIG_DFL;
            let ignored = action(libc::SIGUSR2) == libc::SIG_IGN;
            let masked = signal::contains(&signal::blocked(), libc::SIGHUP);
            if handled && ignored && masked { 42 } else { 81 }
        }
        _ => 82,
    }
}

/// `vfork`: the parent waits until its child has ended or executed a program.
fn vfork() -> Verdict {
    let path = own_path()?;
    let arguments = [path.as_ptr(), c"exec:plain".as_ptr(), std::ptr::null()];
    let environment = [c"FAULTLESS=environment".as_ptr(), std::ptr::null()];
    let flags = (libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD) as u64;
    for execute in [false, true] {
        let stack = doing("mmap", Region::anonymous(64 << 10))?;
        let word = AtomicU64::new(0);
        let argument = ForkArgument {
            word: &raw const word,
            path: if execute { path.as_ptr() } else { std::ptr::null() },
            arguments: arguments.as_ptr(),
            environment: environment.as_ptr(),
        };
        let top = stack.start() + stack.len();
        // SAFETY: the child has its own stack, and shares its argument with a waiting parent.
        let child = unsafe { faultless_clone(flags, top, vforked, &raw const argument) };
        ensure!(child > 0, "clone with CLONE_VFORK: error {}", -child);
        // The child wrote to the shared memory long before its parent continued.
        same!(word.load(Relaxed), 5, "the value that the child wrote");
        let expected = Status::Exited(if execute { 40 } else { 33 });
        let ended = doing("wait4", wait(child as i32, 0))?;
        same!(ended, Some((child as i32, expected)), "the child");
    }
    let status = outcome(|| {
        // The C library's use of vfork: `posix_spawn`.
        let command = std::process::Command::new("/proc/self/exe")
            .arg("exec:plain")
            .env_clear()
            .env("FAULTLESS", "environment")
            .status();
        command.ok().and_then(|status| status.code()).unwrap_or(1)
    })?;
    same!(status, Status::Exited(40), "a program spawned by the library");
    Ok(())
}

/// A child of `vfork` that is ended by its own or another's signal: the parent continues.
fn vfork_killed() -> Verdict {
    let flags = (libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD) as u64;
    for (body, signal) in
        [(raises as extern "C" fn(_) -> !, libc::SIGKILL), (faults, libc::SIGSEGV)]
    {
        let stack = doing("mmap", Region::anonymous(64 << 10))?;
        let status = outcome(|| {
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: the limit is a local.
            unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const none) };
            let _ = signal::default(libc::SIGSEGV);
            let top = stack.start() + stack.len();
            // SAFETY: the child has its own stack and uses no other memory.
            let child = unsafe { faultless_clone(flags, top, body, std::ptr::null()) };
            let ended = wait(child as i32, 0);
            i32::from(ended != Ok(Some((child as i32, Status::Killed(signal)))))
        })?;
        same!(status, Status::Exited(0), "the parent of a child killed by signal {signal}");
    }
    // Killed by a third process while it sleeps.
    let word = doing("mmap", Shared::new(AtomicI32::new(0)))?;
    let parent = doing(
        "fork",
        fork(|| {
            let Ok(stack) = Region::anonymous(64 << 10) else { return 1 };
            let top = stack.start() + stack.len();
            let argument: *const AtomicI32 = &raw const *word;
            // SAFETY: the child has its own stack; the word is shared during the child's lifetime.
            let child = unsafe { faultless_clone(flags, top, sleeps, argument.cast()) };
            let ended = wait(child as i32, 0);
            i32::from(ended != Ok(Some((child as i32, Status::Killed(libc::SIGTERM)))))
        }),
    )?;
    wait_until(|| word.load(Acquire) != 0);
    clock::sleep_ms(5);
    same!(parent.try_wait(), Ok(None), "a parent whose child sleeps");
    same!(kill(word.load(Acquire), libc::SIGTERM), Ok(()), "ending the child");
    same!(doing("wait4", parent.wait())?, Status::Exited(0), "the parent of the ended child");
    Ok(())
}

extern "C" fn raises(_: *const ForkArgument) -> ! {
    // SAFETY: plain calls.
    unsafe {
        libc::syscall(libc::SYS_kill, libc::syscall(libc::SYS_getpid), libc::SIGKILL);
        libc::_exit(1)
    }
}

extern "C" fn faults(_: *const ForkArgument) -> ! {
    faultless_guest::mem::load(0x10);
    // SAFETY: a plain call.
    unsafe { libc::_exit(1) }
}

extern "C" fn sleeps(word: *const ForkArgument) -> ! {
    // SAFETY: the word is shared and lives; plain calls.
    unsafe {
        let own = libc::syscall(libc::SYS_getpid) as i32;
        (*word.cast::<AtomicI32>()).store(own, Release);
        loop {
            libc::syscall(libc::SYS_pause);
        }
    }
}

/// A sibling, made with `CLONE_PARENT`, sends at its end the signal that its maker would send,
/// independent of the requested signal.
fn siblings() -> Verdict {
    // Like fork, with these flags.
    let clone = |flags: i32| {
        // SAFETY: without CLONE_VM the child is a copy, as after fork; the child makes only plain
        // calls.
        unsafe { checked(libc::syscall(libc::SYS_clone, flags as u64, 0u64, 0u64, 0u64, 0u64)) }
    };
    let sibling = doing("mmap", Shared::new(AtomicI32::new(0)))?;
    doing("sigaction", signal::handle(libc::SIGUSR2, signal::note, 0))?;
    let child = doing("clone", clone(libc::SIGUSR2))?;
    if child == 0 {
        match clone(libc::CLONE_PARENT | libc::SIGCHLD) {
            Ok(0) => exit_now(12),
            Ok(number) => sibling.store(number as i32, Release),
            Err(_) => sibling.store(-1, Release),
        }
        exit_now(11);
    }
    wait_until(|| sibling.load(Acquire) != 0);
    let sibling = sibling.load(Acquire);
    ensure!(sibling > 0, "clone with CLONE_PARENT failed");
    // Only a wait for all kinds of children, or for this kind, finds both.
    same!(
        wait(child as i32, 0),
        Err(Errno(libc::ECHILD)),
        "waiting for the clone child as for a normal child"
    );
    same!(
        wait(sibling, 0),
        Err(Errno(libc::ECHILD)),
        "waiting for the sibling as for a normal child"
    );
    let both = [(child as i32, 11, libc::__WALL), (sibling, 12, libc::__WCLONE)];
    for (number, status, kind) in both {
        let ended = doing("wait4", wait(number, kind))?;
        same!(ended, Some((number, Status::Exited(status))), "waiting with {kind:#x}");
    }
    ensure!(signal::NOTED.count.load(Acquire) >= 1, "no child sent SIGUSR2");
    same!(signal::NOTED.signal.load(Relaxed), libc::SIGUSR2, "the signal of the children");
    Ok(())
}

/// The argument of [`vforked`].
#[repr(C)]
struct ForkArgument {
    word: *const AtomicU64,
    path: *const libc::c_char,
    arguments: *const *const libc::c_char,
    environment: *const *const libc::c_char,
}

extern "C" fn vforked(argument: *const ForkArgument) -> ! {
    // SAFETY: the parent waits, and the argument lives during the wait.
    unsafe {
        let argument = &*argument;
        clock::sleep_ms(20);
        (*argument.word).store(5, Relaxed);
        if !argument.path.is_null() {
            libc::execve(argument.path, argument.arguments, argument.environment);
        }
        libc::_exit(33)
    }
}

// `faultless_clone(flags, stack, body, argument)`: clones; the child calls `body(argument)` on the
// stack that ends at `stack`. Returns the child's number, or minus an error number.
global_asm!(
    ".globl faultless_clone",
    "faultless_clone:",
    // The child finds its function and argument on its stack: its registers except rax and rsp are
    // the parent's, and the call uses the argument registers.
    "sub rsi, 16",
    "mov [rsi], rdx",
    "mov [rsi + 8], rcx",
    "xor edx, edx",
    "xor r10d, r10d",
    "xor r8d, r8d",
    "mov eax, 56",
    "syscall",
    "test rax, rax",
    "jnz 2f",
    "xor ebp, ebp",
    "pop rax",
    "pop rdi",
    "call rax",
    "2:",
    "ret",
);

unsafe extern "C" {
    fn faultless_clone(
        flags: u64,
        stack: u64,
        body: extern "C" fn(*const ForkArgument) -> !,
        argument: *const ForkArgument,
    ) -> i64;
}

/// Thousands of processes, one after another, and many at once.
fn fork_storm() -> Verdict {
    for round in 0..200 {
        same!(outcome(|| round & 127)?, Status::Exited(round & 127), "process {round}");
    }
    let children: Vec<_> = (0..40)
        .map(|number| {
            fork(move || {
                let grandchild = fork(|| number);
                match grandchild.and_then(|child| child.wait()) {
                    Ok(Status::Exited(status)) => status,
                    _ => 100,
                }
            })
        })
        .collect();
    for (number, child) in children.into_iter().enumerate() {
        let status = doing("wait4", doing("fork", child)?.wait())?;
        same!(status, Status::Exited(number as i32), "process {number} of 40");
    }
    Ok(())
}

const CHECKS: &[Check] = &[
    ("waits", waits),
    ("usage", usage),
    ("zombies", zombies),
    ("exec", exec),
    ("malformed", malformed),
    ("hostile", hostile),
    ("vfork", vfork),
    ("vfork_killed", vfork_killed),
    ("siblings", siblings),
    ("groups_after_exec", groups_after_exec),
    ("fork_storm", fork_storm),
];

fn main() {
    if let Some(word) = std::env::args().nth(1).filter(|word| word.starts_with("exec:")) {
        std::process::exit(executed(&word));
    }
    let args = Args::read("processes", &[]);
    proc::no_huge_pages();
    std::process::exit(check::run(&args, CHECKS))
}
