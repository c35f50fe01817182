//! `refused [CHECK…]`: every allocation in the kernel's calls fails once, and the kernel
//! continues: a call fails as on Linux, without partial effects, and without leaks. Calls that
//! release something, wait, or end a process need no memory.
//!
//! On a kernel without `fail-nth` (see [`faultless_guest::refusal`]) each call is made without
//! failures.

use faultless_guest::check::{self, Check, Verdict};
use faultless_guest::mem::{PAGE, Region};
use faultless_guest::proc::{Status, exit_now, fork};
use faultless_guest::refusal::{Refusal, exhaust};
use faultless_guest::sys::{self, Errno, call, doing};
use faultless_guest::{args::Args, clock, proc, same, signal};
use libc::{EAGAIN, ENOLCK, ENOMEM};
use std::ffi::CStr;
use std::io::Write;
use std::ptr;
use std::sync::atomic::AtomicU32;

/// Makes a call of this process's own memory and descriptors.
fn make<const N: usize>(number: i64, args: [u64; N]) -> sys::Result<u64> {
    // SAFETY: every caller passes pointers to its own memory, which outlives the call.
    unsafe { call(number, args) }
}

/// A descriptor, closed at the end.
struct Fd(u64);

impl Drop for Fd {
    fn drop(&mut self) {
        let _ = make(libc::SYS_close, [self.0]);
    }
}

fn text(text: &CStr) -> u64 {
    text.as_ptr() as u64
}

fn open(path: &CStr, flags: i32) -> sys::Result<Fd> {
    let at = libc::AT_FDCWD as u64;
    make(libc::SYS_openat, [at, text(path), flags as u64, 0o600]).map(Fd)
}

fn pipe(flags: i32) -> sys::Result<[Fd; 2]> {
    let mut ends = [0i32; 2];
    make(libc::SYS_pipe2, [ends.as_mut_ptr() as u64, flags as u64])?;
    Ok(ends.map(|fd| Fd(fd as u64)))
}

/// Checks that a call succeeds without available memory.
fn must<T>(what: &str, result: sys::Result<T>) -> Result<T, String> {
    doing(what, result)
}

/// Pipes: made, filled, enlarged, peeked, spliced, opened again.
fn pipes() -> Verdict {
    let bytes = vec![7u8; 3 * PAGE as usize];
    exhaust(&[ENOMEM], |refusal| {
        let run = || -> sys::Result<()> {
            let [reader, writer] = pipe(libc::O_NONBLOCK)?;
            let [other, into] = pipe(libc::O_NONBLOCK)?;
            let at = bytes.as_ptr() as u64;
            for len in [100, 2 * PAGE, 3 * PAGE] {
                make(libc::SYS_write, [writer.0, at, len])?;
            }
            make(libc::SYS_fcntl, [writer.0, libc::F_SETPIPE_SZ as u64, 128 << 10])?;
            make(libc::SYS_tee, [reader.0, into.0, PAGE, 0])?;
            make(libc::SYS_splice, [reader.0, 0, into.0, 0, PAGE, 0])?;
            let mut buffer = [0u8; 64];
            make(libc::SYS_read, [other.0, buffer.as_mut_ptr() as u64, 64])?;
            let mut path = [0u8; 32];
            // The text fits, followed by a zero.
            let _ = write!(&mut path[..31], "/proc/self/fd/{}", other.0);
            let flags = (libc::O_RDONLY | libc::O_NONBLOCK) as u64;
            make(libc::SYS_open, [path.as_ptr() as u64, flags, 0]).map(Fd)?;
            Ok(())
        };
        Ok(refusal.during(run))
    })
}

/// Sockets, events, timers and signals as files.
fn special() -> Verdict {
    let set = [0u64; 1];
    exhaust(&[ENOMEM], |refusal| {
        let run = || -> sys::Result<()> {
            let mut ends = [0i32; 2];
            let at = ends.as_mut_ptr() as u64;
            make(libc::SYS_socketpair, [libc::AF_UNIX as u64, libc::SOCK_STREAM as u64, 0, at])?;
            let [one, other] = ends.map(|fd| Fd(fd as u64));
            make(libc::SYS_sendto, [one.0, set.as_ptr() as u64, 8, 0, 0, 0])?;
            let mut buffer = [0u64; 1];
            make(libc::SYS_recvfrom, [other.0, buffer.as_mut_ptr() as u64, 8, 0, 0, 0])?;
            let _event = make(libc::SYS_eventfd2, [1, 0]).map(Fd)?;
            let _timer =
                make(libc::SYS_timerfd_create, [libc::CLOCK_MONOTONIC as u64, 0]).map(Fd)?;
            let at = set.as_ptr() as u64;
            let _signals = make(libc::SYS_signalfd4, [u64::MAX, at, 8, 0]).map(Fd)?;
            let _memory = make(libc::SYS_memfd_create, [text(c"refused"), 0]).map(Fd)?;
            Ok(())
        };
        Ok(refusal.during(run))
    })
}

/// Nested sets of files; a report is not lost.
fn epoll() -> Verdict {
    exhaust(&[ENOMEM], |refusal| {
        let run = || -> sys::Result<()> {
            let [inner, outer] = [
                make(libc::SYS_epoll_create1, [0]).map(Fd)?,
                make(libc::SYS_epoll_create1, [0]).map(Fd)?,
            ];
            let event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 3 };
            let add = libc::EPOLL_CTL_ADD as u64;
            let at = ptr::from_ref(&event) as u64;
            let mut pipes = [const { None }; 6];
            for place in &mut pipes {
                let ends = pipe(0)?;
                make(libc::SYS_write, [ends[1].0, at, 1])?;
                make(libc::SYS_epoll_ctl, [inner.0, add, ends[0].0, at])?;
                *place = Some(ends);
            }
            make(libc::SYS_epoll_ctl, [outer.0, add, inner.0, at])?;
            let mut told = [libc::epoll_event { events: 0, u64: 0 }; 8];
            for set in [&outer, &inner] {
                make(libc::SYS_epoll_wait, [set.0, told.as_mut_ptr() as u64, 8, 0])?;
            }
            Ok(())
        };
        Ok(refusal.during(run))
    })
}

/// Waiting for many files at once.
fn polling() -> Verdict {
    let [_reader, writer] = doing("pipe2", pipe(0))?;
    let mut all = [libc::pollfd { fd: writer.0 as i32, events: libc::POLLOUT, revents: 0 }; 300];
    let mut set = [0u64; 16];
    exhaust(&[ENOMEM], |refusal| {
        let run = || -> sys::Result<()> {
            make(libc::SYS_poll, [all.as_mut_ptr() as u64, 300, 0])?;
            set[writer.0 as usize / 64] |= 1 << (writer.0 % 64);
            let time = [0i64; 2];
            let sets = [writer.0 + 1, 0, set.as_mut_ptr() as u64, 0, time.as_ptr() as u64];
            make(libc::SYS_select, sets)?;
            Ok(())
        };
        Ok(refusal.during(run))
    })
}

/// Takes a lock, or with `F_UNLCK` releases locks, of open files on `len` bytes from `start` on.
fn lock(fd: u64, kind: i32, start: i64, len: i64) -> sys::Result<u64> {
    let request = libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: start,
        l_len: len,
        l_pid: 0,
    };
    make(libc::SYS_fcntl, [fd, libc::F_OFD_SETLK as u64, ptr::from_ref(&request) as u64])
}

/// Returns whether another owner's lock conflicts at `start`.
fn is_locked(fd: u64, start: i64) -> Result<bool, String> {
    let mut request = libc::flock {
        l_type: libc::F_WRLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: start,
        l_len: 1,
        l_pid: 0,
    };
    let at = ptr::from_mut(&mut request) as u64;
    doing("F_OFD_GETLK", make(libc::SYS_fcntl, [fd, libc::F_OFD_GETLK as u64, at]))?;
    Ok(i32::from(request.l_type) != libc::F_UNLCK)
}

/// A lock to be split stays whole if there is no memory for the second part.
fn locks() -> Verdict {
    let path = c"/tmp/refused.locks";
    let mut opened = [const { None }; 2];
    for place in &mut opened {
        *place = Some(doing("open", open(path, libc::O_RDWR | libc::O_CREAT))?);
    }
    let [Some(own), Some(other)] = opened else { return Err("two files".into()) };
    exhaust(&[ENOLCK], |refusal| {
        // The capacity of a list before it grows.
        for start in [0, 200, 400, 600] {
            doing("F_WRLCK", lock(own.0, libc::F_WRLCK, start, 100))?;
        }
        let ended = refusal.during(|| lock(own.0, libc::F_UNLCK, 40, 20));
        for (at, inside) in [(10, true), (50, ended.is_err()), (90, true)] {
            same!(is_locked(other.0, at)?, inside, "byte {at} is locked, after {ended:?}");
        }
        must("F_UNLCK", lock(own.0, libc::F_UNLCK, 0, 0))?;
        Ok(ended.map(drop))
    })?;
    // A lock of another kind inside a lock splits it, too.
    exhaust(&[ENOLCK], |refusal| {
        let ended = refusal.during(|| -> sys::Result<()> {
            lock(own.0, libc::F_WRLCK, 0, 100)?;
            lock(own.0, libc::F_RDLCK, 40, 20)?;
            make(libc::SYS_flock, [own.0, libc::LOCK_EX as u64])?;
            Ok(())
        });
        must("F_UNLCK", lock(own.0, libc::F_UNLCK, 0, 0))?;
        must("LOCK_UN", make(libc::SYS_flock, [own.0, libc::LOCK_UN as u64]))?;
        same!(is_locked(other.0, 50)?, false, "locked after the refusal");
        Ok(ended)
    })
}

/// Timers; the timers of `setitimer` need no memory.
fn timers() -> Verdict {
    exhaust(&[EAGAIN], |refusal| {
        let mut id = 0i32;
        let at = ptr::from_mut(&mut id) as u64;
        let ended =
            refusal.during(|| make(libc::SYS_timer_create, [libc::CLOCK_MONOTONIC as u64, 0, at]));
        if ended.is_ok() {
            let far = [0i64, 0, 1000, 0];
            let at = far.as_ptr() as u64;
            must("timer_settime", make(libc::SYS_timer_settime, [id as u64, 0, at, 0]))?;
            must("timer_delete", make(libc::SYS_timer_delete, [id as u64]))?;
        }
        let far = [0i64, 0, 1000, 0];
        refusal.during(|| -> Verdict {
            for which in 0..3 {
                let set = make(libc::SYS_setitimer, [which, far.as_ptr() as u64, 0]);
                must("setitimer", set)?;
            }
            must("alarm", make(libc::SYS_alarm, [0]))?;
            Ok(())
        })?;
        Ok(ended.map(drop))
    })
}

/// Signals that are pending with their information.
fn signals() -> Verdict {
    let signal = libc::SIGRTMIN() + 1;
    doing("block", signal::mask(libc::SIG_BLOCK, &[signal]))?;
    exhaust(&[EAGAIN], |refusal| {
        // A separate process, because a queue keeps its memory.
        let status = proc::outcome(|| {
            let refusal = Refusal::inherit(refusal);
            let mut info = [0u8; 128];
            info[..4].copy_from_slice(&signal.to_ne_bytes());
            info[8..12].copy_from_slice(&libc::SI_QUEUE.to_ne_bytes());
            let own = proc::pid() as u64;
            let at = info.as_ptr() as u64;
            let queue = || make(libc::SYS_rt_sigqueueinfo, [own, signal as u64, at]);
            let ended = refusal.during(|| -> sys::Result<()> {
                (0..5).try_for_each(|_| queue().map(drop))?;
                // This signal has no information, so it becomes pending in any case.
                make(libc::SYS_kill, [own, libc::SIGURG as u64]).map(drop)
            });
            refusal.tell(ended)
        })?;
        refusal.told(status)
    })
}

/// System V's objects.
fn sysv() -> Verdict {
    let values = [3u16; 64];
    exhaust(&[ENOMEM], |refusal| {
        let set = Errno(libc::EINVAL);
        let mut made = [Err(set); 3];
        let mut attached = None;
        let ended = refusal.during(|| -> sys::Result<()> {
            made[0] = make(libc::SYS_semget, [0, 64, 0o600]);
            let sem = made[0]?;
            make(libc::SYS_semctl, [sem, 0, libc::SETALL as u64, values.as_ptr() as u64])?;
            let mut read = [0u16; 64];
            make(libc::SYS_semctl, [sem, 0, libc::GETALL as u64, read.as_mut_ptr() as u64])?;
            let change = libc::sembuf { sem_num: 1, sem_op: -1, sem_flg: libc::SEM_UNDO as i16 };
            make(libc::SYS_semop, [sem, ptr::from_ref(&change) as u64, 1])?;
            made[1] = make(libc::SYS_msgget, [0, 0o600]);
            let queue = made[1]?;
            let message = [1u64; 20];
            make(libc::SYS_msgsnd, [queue, message.as_ptr() as u64, 150, 0])?;
            let mut back = [0u64; 20];
            make(libc::SYS_msgrcv, [queue, back.as_mut_ptr() as u64, 150, 0, 0])?;
            made[2] = make(libc::SYS_shmget, [0, PAGE, 0o600]);
            let at = make(libc::SYS_shmat, [made[2]?, 0, 0])?;
            attached = Some(at);
            make(libc::SYS_shmdt, [at])?;
            attached = None;
            Ok(())
        });
        // A refused operation has no effect.
        if let Some(at) = attached {
            must("shmdt", make(libc::SYS_shmdt, [at]))?;
        }
        let remove = [(libc::SYS_semctl, 0), (libc::SYS_msgctl, 1), (libc::SYS_shmctl, 2)];
        for (number, kind) in remove {
            let Ok(id) = made[kind] else { continue };
            let args = if kind == 0 {
                [id, 0, libc::IPC_RMID as u64]
            } else {
                [id, libc::IPC_RMID as u64, 0]
            };
            must("IPC_RMID", make(number, args))?;
        }
        Ok(ended)
    })
}

/// Names: made, renamed, exchanged, listed, removed.
fn names() -> Verdict {
    let here = libc::AT_FDCWD as u64;
    let (dir, one, two, way) = (
        c"/tmp/refused.dir",
        c"/tmp/refused.dir/one",
        c"/tmp/refused.dir/two",
        c"/tmp/refused.dir/way",
    );
    exhaust(&[ENOMEM], |refusal| {
        let ended = refusal.during(|| -> sys::Result<()> {
            make(libc::SYS_mkdir, [text(dir), 0o700])?;
            let file = open(one, libc::O_RDWR | libc::O_CREAT)?;
            make(libc::SYS_write, [file.0, text(dir), 10])?;
            make(libc::SYS_mknod, [text(two), u64::from(libc::S_IFIFO | 0o600), 0])?;
            make(libc::SYS_symlink, [text(one), text(way)])?;
            let exchange = u64::from(libc::RENAME_EXCHANGE);
            make(libc::SYS_renameat2, [here, text(one), here, text(two), exchange])?;
            make(libc::SYS_rename, [text(two), text(one)])?;
            make(libc::SYS_link, [text(one), text(two)])?;
            let mut buffer = [0u8; 600];
            let at = buffer.as_mut_ptr() as u64;
            make(libc::SYS_readlink, [text(way), at, 600])?;
            make(libc::SYS_stat, [text(way), at])?;
            let listing = open(dir, libc::O_RDONLY | libc::O_DIRECTORY)?;
            make(libc::SYS_getdents64, [listing.0, at, 600])?;
            make(libc::SYS_fchdir, [listing.0])?;
            make(libc::SYS_getcwd, [at, 600])?;
            make(libc::SYS_chdir, [text(c"/")])?;
            make(libc::SYS_truncate, [text(one), 5000])?;
            Ok(())
        });
        doing("chdir", make(libc::SYS_chdir, [text(c"/")]))?;
        for name in [one, two, way] {
            let _ = make(libc::SYS_unlink, [text(name)]);
        }
        let _ = make(libc::SYS_rmdir, [text(dir)]);
        let there = make(libc::SYS_access, [text(dir), 0]);
        same!(there, Err(Errno(libc::ENOENT)), "the directory, after {ended:?}");
        Ok(ended)
    })
}

/// Descriptors in a growing table; copies between files.
fn descriptors() -> Verdict {
    let from = doing("open", open(c"/tmp/refused.from", libc::O_RDWR | libc::O_CREAT))?;
    let to = doing("open", open(c"/tmp/refused.to", libc::O_RDWR | libc::O_CREAT))?;
    let bytes = [5u8; 3000];
    doing("write", make(libc::SYS_pwrite64, [from.0, bytes.as_ptr() as u64, 3000, 0]))?;
    exhaust(&[ENOMEM], |refusal| {
        // The table is shared until it is copied, and so has its length.
        let status = proc::outcome(|| {
            let refusal = Refusal::inherit(refusal);
            let ended = refusal.during(|| -> sys::Result<()> {
                make(libc::SYS_fcntl, [from.0, libc::F_DUPFD as u64, 700]).map(drop)?;
                make(libc::SYS_dup3, [from.0, 900, 0])?;
                let mut zero = 0u64;
                let at = ptr::from_mut(&mut zero) as u64;
                make(libc::SYS_sendfile, [to.0, from.0, at, 3000])?;
                make(libc::SYS_unshare, [libc::CLONE_FILES as u64]).map(drop)
            });
            refusal.tell(ended)
        })?;
        refusal.told(status)
    })
}

/// The texts of `/proc`.
fn proc_texts() -> Verdict {
    let texts = [
        c"/proc/self/maps",
        c"/proc/self/smaps",
        c"/proc/self/status",
        c"/proc/self/stat",
        c"/proc/self/cmdline",
        c"/proc/self/limits",
        c"/proc/stat",
        c"/proc/meminfo",
        c"/proc/cpuinfo",
        c"/proc/interrupts",
        c"/proc/vmstat",
    ];
    let lists = [c"/proc", c"/proc/self", c"/proc/self/fd", c"/proc/self/task"];
    let ways = [c"/proc/self/exe", c"/proc/self/cwd", c"/proc/self/fd/0", c"/proc/self"];
    let mut buffer = vec![1u8; 64 << 10];
    let (at, len) = (buffer.as_mut_ptr() as u64, buffer.len() as u64);
    exhaust(&[ENOMEM], |refusal| {
        Ok(refusal.during(|| -> sys::Result<()> {
            for path in texts {
                let file = open(path, libc::O_RDONLY)?;
                make(libc::SYS_read, [file.0, at, len])?;
            }
            for path in lists {
                let list = open(path, libc::O_RDONLY | libc::O_DIRECTORY)?;
                make(libc::SYS_getdents64, [list.0, at, len])?;
            }
            for path in ways {
                make(libc::SYS_readlink, [text(path), at, len])?;
            }
            Ok(())
        }))
    })
}

/// Mappings: made, split, locked, moved, removed.
fn mappings() -> Verdict {
    let file = doing("open", open(c"/tmp/refused.map", libc::O_RDWR | libc::O_CREAT))?;
    doing("ftruncate", make(libc::SYS_ftruncate, [file.0, 8 * PAGE]))?;
    exhaust(&[ENOMEM], |refusal| {
        let mut made = [0u64; 2];
        let ended = refusal.during(|| -> sys::Result<()> {
            let (rw, none) = ((libc::PROT_READ | libc::PROT_WRITE) as u64, libc::PROT_NONE as u64);
            let anonymous = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
            made[0] = make(libc::SYS_mmap, [0, 16 * PAGE, rw, anonymous, u64::MAX, 0])?;
            make(libc::SYS_mprotect, [made[0] + 4 * PAGE, PAGE, none])?;
            let shared = libc::MAP_SHARED as u64;
            made[1] = make(libc::SYS_mmap, [0, 8 * PAGE, rw, shared, file.0, 0])?;
            let mut there = [0u8; 8];
            make(libc::SYS_mincore, [made[1], 8 * PAGE, there.as_mut_ptr() as u64])?;
            make(libc::SYS_munmap, [made[0] + 8 * PAGE, PAGE])?;
            let moved = libc::MREMAP_MAYMOVE as u64;
            made[1] = make(libc::SYS_mremap, [made[1], 8 * PAGE, 32 * PAGE, moved])?;
            make(libc::SYS_madvise, [made[0], PAGE, libc::MADV_DONTNEED as u64])?;
            make(libc::SYS_mlock, [made[0] + 2 * PAGE, PAGE])?;
            let on_fault = u64::from(libc::MLOCK_ONFAULT);
            make(libc::SYS_mlock2, [made[0] + 12 * PAGE, 2 * PAGE, on_fault])?;
            make(libc::SYS_munlock, [made[0] + 12 * PAGE, PAGE])?;
            Ok(())
        });
        for (at, pages) in [(made[0], 16), (made[1], 32)] {
            if at != 0 {
                must("munmap", make(libc::SYS_munmap, [at, pages * PAGE]))?;
            }
        }
        Ok(ended)
    })
}

/// New processes and threads, and other programs in them.
fn processes() -> Verdict {
    exhaust(&[ENOMEM, EAGAIN], |refusal| {
        let child = refusal.during(|| make(libc::SYS_fork, []));
        match child {
            Ok(0) => exit_now(0),
            Ok(child) => {
                let mut status = 0i32;
                let at = ptr::from_mut(&mut status) as u64;
                doing("wait4", make(libc::SYS_wait4, [child, at, 0, 0]))?;
                same!(status, 0, "the child's status");
                Ok(Ok(()))
            }
            Err(errno) => Ok(Err(errno)),
        }
    })?;
    // The file's path is read by the kernel; the new program ends at once.
    let words = [text(c"refused"), text(c"end"), 0];
    let none = [0u64];
    exhaust(&[ENOMEM], |refusal| {
        let status = proc::outcome(|| {
            let refusal = Refusal::inherit(refusal);
            let (path, words) = (text(c"/proc/self/exe"), words.as_ptr() as u64);
            let run = || make(libc::SYS_execve, [path, words, none.as_ptr() as u64]);
            let ended = refusal.during(run).map(drop);
            refusal.tell(ended)
        })?;
        refusal.told(status)
    })
}

/// Makes a file of eight pages without a name, and a mapping of all its pages.
fn mapped_memory() -> Result<(Fd, Region), String> {
    let memory = doing("memfd_create", make(libc::SYS_memfd_create, [text(c"refused"), 0]))?;
    let memory = Fd(memory);
    doing("ftruncate", make(libc::SYS_ftruncate, [memory.0, 8 * PAGE]))?;
    let rw = libc::PROT_READ | libc::PROT_WRITE;
    let mapped = Region::map(8 * PAGE, rw, libc::MAP_SHARED, memory.0 as i32, 0);
    let mapped = doing("mmap", mapped)?;
    mapped.fill(1);
    Ok((memory, mapped))
}

/// Calls that release something, wait, or cannot report an error need no memory.
fn releases() -> Verdict {
    let path = c"/tmp/refused.free";
    let word = AtomicU32::new(1);
    exhaust(&[], |refusal| {
        let file = doing("open", open(path, libc::O_RDWR | libc::O_CREAT))?;
        doing("lock", lock(file.0, libc::F_WRLCK, 0, 100))?;
        let ends = doing("pipe2", pipe(0))?;
        doing("write", make(libc::SYS_write, [ends[1].0, text(path), 5]))?;
        let set = doing("epoll_create1", make(libc::SYS_epoll_create1, [0]).map(Fd))?;
        let event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
        let event = ptr::from_ref(&event) as u64;
        let add = libc::EPOLL_CTL_ADD as u64;
        doing("epoll_ctl", make(libc::SYS_epoll_ctl, [set.0, add, ends[0].0, event]))?;
        let region = doing("mmap", Region::anonymous(4 * PAGE))?;
        region.fill(1);
        let (memory, mapped) = mapped_memory()?;
        let child = doing("fork", fork(|| 5))?;
        let mut status = 0i32;
        refusal.during(|| -> Verdict {
            let part = [0i64, 1_000_000];
            let time = part.as_ptr() as u64;
            must("nanosleep", make(libc::SYS_nanosleep, [time, 0]))?;
            let wait = [ptr::from_ref(&word) as u64, libc::FUTEX_WAIT as u64, 1, time];
            let waited = make(libc::SYS_futex, wait);
            same!(waited, Err(Errno(libc::ETIMEDOUT)), "waiting for a futex");
            let at = ptr::from_mut(&mut status) as u64;
            must("wait4", make(libc::SYS_wait4, [child.pid as u64, at, 0, 0]))?;
            let mut buffer = [0u8; 8];
            let read = make(libc::SYS_read, [ends[0].0, buffer.as_mut_ptr() as u64, 8]);
            same!(read, Ok(5), "reading from a pipe");
            must("unlock", lock(file.0, libc::F_UNLCK, 20, 80))?;
            let remove = libc::EPOLL_CTL_DEL as u64;
            must("epoll_ctl", make(libc::SYS_epoll_ctl, [set.0, remove, ends[0].0, 0]))?;
            must("close", make(libc::SYS_close, [file.0]))?;
            must("kill", make(libc::SYS_kill, [proc::pid() as u64, libc::SIGURG as u64]))?;
            must("sched_yield", make(libc::SYS_sched_yield, []))?;
            let remove = libc::MADV_REMOVE as u64;
            must("MADV_REMOVE", make(libc::SYS_madvise, [mapped.start() + PAGE, PAGE, remove]))?;
            let hole = (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE) as u64;
            must("fallocate", make(libc::SYS_fallocate, [memory.0, hole, 3 * PAGE, 2 * PAGE]))?;
            must("ftruncate", make(libc::SYS_ftruncate, [memory.0, 6 * PAGE]))?;
            Ok(())
        })?;
        same!(status, 5 << 8, "the child's status");
        doing("munmap", region.end())?;
        doing("munmap", mapped.end())?;
        std::mem::forget(file);
        Ok(Ok(()))
    })
}

/// A process with all kinds of objects ends without memory.
fn ends() -> Verdict {
    let path = c"/tmp/refused.end";
    exhaust(&[], |refusal| {
        let status = proc::outcome(|| {
            let refusal = Refusal::inherit(refusal);
            let made = || -> sys::Result<()> {
                let file = open(path, libc::O_RDWR | libc::O_CREAT)?;
                lock(file.0, libc::F_WRLCK, 0, 100)?;
                let ends = pipe(0)?;
                make(libc::SYS_write, [ends[1].0, text(path), 5])?;
                let sem = make(libc::SYS_semget, [0, 8, 0o600])?;
                let change = libc::sembuf { sem_num: 1, sem_op: 1, sem_flg: libc::SEM_UNDO as i16 };
                make(libc::SYS_semop, [sem, ptr::from_ref(&change) as u64, 1])?;
                let mut id = 0i32;
                let at = ptr::from_mut(&mut id) as u64;
                make(libc::SYS_timer_create, [libc::CLOCK_MONOTONIC as u64, 0, at])?;
                let far = [0i64, 0, 1000, 0];
                make(libc::SYS_timer_settime, [id as u64, 0, far.as_ptr() as u64, 0])?;
                std::mem::forget((file, ends));
                make(libc::SYS_semctl, [sem, 0, libc::IPC_RMID as u64]).map(drop)
            };
            if made().is_err() {
                return 1;
            }
            // Never disabled: the process ends with failing allocations.
            refusal.during(|| exit_now(0))
        })?;
        same!(status, Status::Exited(0), "the process");
        Ok(Ok(()))
    })
}

/// A process ends without memory although its children are adopted and notified.
fn orphans() -> Verdict {
    exhaust(&[], |refusal| {
        // The read ends when all holders of the writer have ended.
        let [reader, writer] = doing("pipe2", pipe(0))?;
        let status = proc::outcome(|| {
            let refusal = Refusal::inherit(refusal);
            if family().is_err() {
                return 1;
            }
            // Never disabled: the process ends with failing allocations.
            refusal.during(|| exit_now(0))
        })?;
        same!(status, Status::Exited(0), "the parent");
        drop(writer);
        let mut left = libc::pollfd { fd: reader.0 as i32, events: 0, revents: 0 };
        doing("poll", make(libc::SYS_poll, [ptr::from_mut(&mut left) as u64, 1, 10_000]))?;
        same!(left.revents, libc::POLLHUP, "the orphans' end");
        Ok(Ok(()))
    })
}

/// Makes a zombie, and two children that the end of their parent kills: one requested the signal,
/// and the other is stopped in its own group.
fn family() -> sys::Result<()> {
    let mut byte = [0u8; 1];
    let at = byte.as_mut_ptr() as u64;
    let [told, tells] = pipe(0)?;
    let zombie = fork(|| 0)?;
    let _asks = fork(|| {
        let kill = libc::SIGKILL as u64;
        let _ = make(libc::SYS_prctl, [libc::PR_SET_PDEATHSIG as u64, kill, 0, 0, 0]);
        let _ = make(libc::SYS_write, [tells.0, at, 1]);
        clock::sleep_ms(20_000);
        1
    })?;
    let stops = fork(|| {
        let _ = make(libc::SYS_setpgid, [0, 0]);
        let _ = proc::kill(proc::pid(), libc::SIGSTOP);
        clock::sleep_ms(20_000);
        1
    })?;
    // All children have reached their states.
    make(libc::SYS_read, [told.0, at, 1])?;
    for (child, how) in [(zombie, libc::WEXITED), (stops, libc::WSTOPPED)] {
        let (whose, how) = (u64::from(libc::P_PID), (how | libc::WNOWAIT) as u64);
        make(libc::SYS_waitid, [whose, child.pid as u64, 0, how, 0])?;
    }
    Ok(())
}

const CHECKS: &[Check] = &[
    ("pipes", pipes),
    ("special", special),
    ("epoll", epoll),
    ("polling", polling),
    ("locks", locks),
    ("timers", timers),
    ("signals", signals),
    ("sysv", sysv),
    ("names", names),
    ("descriptors", descriptors),
    ("proc_texts", proc_texts),
    ("mappings", mappings),
    ("processes", processes),
    ("releases", releases),
    ("ends", ends),
    ("orphans", orphans),
];

fn main() {
    let args = Args::read("refused", &[]);
    if args.words() == ["end"] {
        exit_now(0);
    }
    proc::no_huge_pages();
    let passed = check::run(&args, CHECKS);
    clean();
    std::process::exit(passed)
}

/// Removes the remains of the checks.
fn clean() {
    for name in ["locks", "from", "to", "map", "free", "end"] {
        let _ = std::fs::remove_file(format!("/tmp/refused.{name}"));
    }
}
