//! System calls that create, replace, end and query threads and processes.

use super::{Args, Errno, Result};
use crate::fs;
use crate::syscall::args::{Entry, calls};
use crate::task::clone::{self, Request};
use crate::task::exec::{self, Strings};
use crate::task::exit;
use crate::task::ids::may_inspect;
use crate::task::process::{self, Process, TABLE};
use crate::task::status::ExitStatus;
use crate::task::usage::Usage;
use crate::task::wait::wait_until;
use crate::task::{Thread, current};
use core::sync::atomic::Ordering;
use faultless_bare::arch::{self, Selectors, user};
use faultless_collections::{Arc, String};
use linux_raw_sys::general as nr;

/// The system calls of this file, by number.
pub(super) const CALLS: &[Entry] = calls![
    (nr::__NR_getpid, getpid),
    (nr::__NR_gettid, gettid),
    (nr::__NR_getppid, getppid),
    (nr::__NR_fork, fork),
    (nr::__NR_vfork, vfork),
    (nr::__NR_clone, clone),
    (nr::__NR_clone3, clone3),
    (nr::__NR_unshare, unshare),
    (nr::__NR_execve, execve),
    (nr::__NR_execveat, execveat),
    (nr::__NR_exit, exit),
    (nr::__NR_exit_group, exit_group),
    (nr::__NR_wait4, wait4),
    (nr::__NR_waitid, waitid),
    (nr::__NR_getpgid, getpgid),
    (nr::__NR_getpgrp, getpgrp),
    (nr::__NR_getsid, getsid),
    (nr::__NR_setpgid, setpgid),
    (nr::__NR_setsid, setsid),
    (nr::__NR_set_tid_address, set_tid_address),
    (nr::__NR_set_robust_list, set_robust_list),
    (nr::__NR_get_robust_list, get_robust_list),
    (nr::__NR_arch_prctl, arch_prctl),
    (nr::__NR_prctl, prctl),
];

/// The maximum length of a path, with its NUL.
const PATH_MAX: usize = 4096;

/// `fork()`.
pub fn fork(args: Args<'_>) -> Result {
    clone::clone(args.frame, &Request { exit_signal: nr::SIGCHLD, ..Request::default() })
}

/// `vfork()`.
pub fn vfork(args: Args<'_>) -> Result {
    let flags = nr::CLONE_VFORK | nr::CLONE_VM;
    clone::clone(args.frame, &Request { flags, exit_signal: nr::SIGCHLD, ..Request::default() })
}

/// `clone(flags, stack, parent_tid, child_tid, tls)`.
pub fn clone(args: Args<'_>) -> Result {
    let flags = args.a() as u32;
    let request = Request {
        flags: flags & !nr::CSIGNAL,
        clear_handlers: false,
        exit_signal: flags & nr::CSIGNAL,
        stack: args.b(),
        tls: args.e(),
        parent_tid: args.c(),
        child_tid: args.d(),
    };
    clone::clone(args.frame, &request)
}

/// `clone3(arguments, size)`.
pub fn clone3(args: Args<'_>) -> Result {
    const WORDS: usize = 11;
    const FIRST_SIZE: u64 = 64;
    let (at, size) = (args.a(), args.b());
    if size > faultless::PAGE_SIZE {
        return Err(Errno::E2BIG);
    }
    if size < FIRST_SIZE {
        return Err(Errno::EINVAL);
    }
    let known = size.min(WORDS as u64 * 8);
    for offset in known..size {
        if user::read::<u8>(at.wrapping_add(offset))? != 0 {
            return Err(Errno::E2BIG);
        }
    }
    let mut bytes = [0u8; WORDS * 8];
    user::read_bytes(&mut bytes[..known as usize], at)?;
    let mut words = [0u64; WORDS];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
    }
    let [
        flags,
        _pidfd,
        child_tid,
        parent_tid,
        exit_signal,
        stack,
        stack_size,
        tls,
        _,
        tids,
        cgroup,
    ] = words;
    let known_flags = u64::from(!nr::CSIGNAL) | nr::CLONE_CLEAR_SIGHAND;
    if flags & !known_flags != 0 || tids != 0 || cgroup != 0 {
        return Err(Errno::EINVAL);
    }
    let signals_go_together =
        flags & nr::CLONE_CLEAR_SIGHAND == 0 || flags & u64::from(nr::CLONE_SIGHAND) == 0;
    let silent = flags & u64::from(nr::CLONE_THREAD | nr::CLONE_PARENT) != 0;
    let stack_given = if stack == 0 {
        stack_size == 0
    } else {
        stack_size != 0
            && stack.checked_add(stack_size).is_some_and(|end| end <= faultless::USER_END)
    };
    if !signals_go_together || !stack_given || exit_signal > 64 || silent && exit_signal != 0 {
        return Err(Errno::EINVAL);
    }
    let request = Request {
        flags: flags as u32,
        clear_handlers: flags & nr::CLONE_CLEAR_SIGHAND != 0,
        exit_signal: exit_signal as u32,
        stack: stack + stack_size,
        tls,
        parent_tid,
        child_tid,
    };
    clone::clone(args.frame, &request)
}

/// `unshare(flags)`.
pub fn unshare(args: Args<'_>) -> Result {
    const KNOWN: u32 = nr::CLONE_FS
        | nr::CLONE_FILES
        | nr::CLONE_SYSVSEM
        | nr::CLONE_THREAD
        | nr::CLONE_SIGHAND
        | nr::CLONE_VM;
    let flags = args.a();
    if flags & !u64::from(KNOWN | clone::NAMESPACES) != 0 {
        return Err(Errno::EINVAL);
    }
    let flags = flags as u32;
    if flags & clone::NAMESPACES != 0 {
        return Err(Errno::EPERM);
    }
    let process = current().process.clone();
    let of_memory = nr::CLONE_THREAD | nr::CLONE_SIGHAND | nr::CLONE_VM;
    if flags & of_memory != 0 && process.threads.lock().len() > 1 {
        return Err(Errno::EINVAL);
    }
    process.files().unshare(flags & nr::CLONE_FILES != 0, flags & nr::CLONE_FS != 0)?;
    Ok(0)
}

/// `execve(path, arguments, environment)`.
pub fn execve(args: Args<'_>) -> Result {
    let path = user::string(args.a(), PATH_MAX)?.ok_or(Errno::ENAMETOOLONG)?;
    let (arguments, environment) = (args.b(), args.c());
    run(args, &path, arguments, environment)
}

/// `execveat(directory, path, arguments, environment, flags)`.
pub fn execveat(args: Args<'_>) -> Result {
    let path = user::string(args.b(), PATH_MAX)?.ok_or(Errno::ENAMETOOLONG)?;
    let path = fs::path_at(args.a() as i32, path, args.e() as u32)?;
    let (arguments, environment) = (args.c(), args.d());
    run(args, &path, arguments, environment)
}

fn run(args: Args<'_>, path: &[u8], arguments: u64, environment: u64) -> Result {
    if faultless_bare::heap::low() {
        return Err(Errno::ENOMEM);
    }
    let loaded = {
        let (arguments, environment) = (Strings::read(arguments)?, Strings::read(environment)?);
        exec::load(path, arguments, &environment)?
    };
    exec::exec(args.frame, loaded)
}

/// `exit(code)`.
pub fn exit(args: Args<'_>) -> Result {
    exit::exit(args.a() as u8)
}

/// `exit_group(code)`.
pub fn exit_group(args: Args<'_>) -> Result {
    exit::exit_group(ExitStatus::exited(args.a() as u8))
}

/// Which children are waited for.
enum Wanted {
    Any,
    Process(u32),
    Group(u32),
}

/// News of a child.
struct News {
    pid: u32,
    /// The real user of the child.
    uid: u32,
    status: ExitStatus,
    used: Usage,
}

/// Waits for a child that ended, stopped, or continued, by `options`, and reaps an ended one unless
/// `WNOWAIT`. `None`: there are children, but no news yet.
fn wait_for(wanted: &Wanted, options: u32) -> Result<Option<News>> {
    let parent = current().process.clone();
    let has = |option| options & option != 0;
    let matches = |child: &Process| {
        let who = match *wanted {
            Wanted::Any => true,
            Wanted::Process(pid) => child.pid == pid,
            Wanted::Group(group) => child.relatives.group.load(Ordering::Relaxed) == group,
        };
        let is_clone = child.family.lock().exit_signal != nr::SIGCHLD;
        who && (has(nr::__WALL) || is_clone == has(nr::__WCLONE))
    };
    let look = || {
        // With the table locked, no process ends, waits, or is adopted in between.
        let mut table = TABLE.lock();
        let children = &mut parent.family.lock().children;
        let mut found = false;
        for child in children.iter().filter(|child| matches(child)) {
            found = true;
            let uid = child.ids.user().real;
            let used = || child.usage() + *child.used.by_children.lock();
            if has(nr::WEXITED) && child.end.done.load(Ordering::SeqCst) {
                let status = child.end.status.lock().unwrap_or(ExitStatus::exited(0));
                let news = News { pid: child.pid, uid, status, used: used() };
                if !has(nr::WNOWAIT) {
                    table.processes.remove(&news.pid);
                    let mut used = parent.used.by_children.lock();
                    *used = *used + news.used;
                    drop(used);
                    children.take(|child| child.pid == news.pid);
                }
                return Some(Ok(Some(news)));
            }
            let keep = has(nr::WNOWAIT);
            let job = &child.signals.job;
            if let Some(status) = job.news(has(nr::WUNTRACED), has(nr::WCONTINUED), keep) {
                return Some(Ok(Some(News { pid: child.pid, uid, status, used: used() })));
            }
        }
        match found {
            false => Some(Err(Errno::ECHILD)),
            true if has(nr::WNOHANG) => Some(Ok(None)),
            true => None,
        }
    };
    wait_until(&[&parent.children_changed], None, look).map_err(|_| Errno::RESTART)?
}

/// `wait4(pid, status, options, usage)`.
pub fn wait4(args: Args<'_>) -> Result {
    const KNOWN: u32 =
        nr::WNOHANG | nr::WUNTRACED | nr::WCONTINUED | nr::__WNOTHREAD | nr::__WALL | nr::__WCLONE;
    let options = args.c() as u32;
    if options & !KNOWN != 0 {
        return Err(Errno::EINVAL);
    }
    let wanted = match args.a() as i32 {
        i32::MIN => return Err(Errno::ESRCH),
        -1 => Wanted::Any,
        0 => Wanted::Group(current().process.relatives.group.load(Ordering::Relaxed)),
        group if group < 0 => Wanted::Group(group.unsigned_abs()),
        pid => Wanted::Process(pid as u32),
    };
    let Some(news) = wait_for(&wanted, options | nr::WEXITED)? else {
        return Ok(0);
    };
    if args.b() != 0 {
        user::write(args.b(), &news.status.0)?;
    }
    if args.d() != 0 {
        user::write(args.d(), &super::system::rusage(news.used))?;
    }
    Ok(u64::from(news.pid))
}

/// `waitid(kind, id, information, options, usage)`.
pub fn waitid(args: Args<'_>) -> Result {
    let found = wait_by_id(&args);
    if let Err(errno) = found
        && errno.0 >= Errno::RESTART.0
    {
        return Err(errno);
    }
    if let (Ok(Some(news)), true) = (&found, args.e() != 0) {
        user::write(args.e(), &super::system::rusage(news.used))?;
    }
    if args.c() != 0 {
        // si_signo, si_errno, si_code; behind the padding si_pid, si_uid, si_status. As on Linux,
        // zeros where there is no news, also because of an error.
        let [first, second] = match &found {
            Ok(Some(News { pid, uid, status, .. })) => {
                [[nr::SIGCHLD, 0, status.child_code()], [*pid, *uid, status.child_status()]]
            }
            _ => [[0; 3]; 2],
        };
        user::write(args.c(), &first)?;
        user::write(args.c().wrapping_add(16), &second)?;
    }
    found.map(|_| 0)
}

/// Waits for the news selected by the arguments of `waitid`.
fn wait_by_id(args: &Args<'_>) -> Result<Option<News>> {
    const WHAT: u32 = nr::WEXITED | nr::WSTOPPED | nr::WCONTINUED;
    const KNOWN: u32 =
        WHAT | nr::WNOHANG | nr::WNOWAIT | nr::__WNOTHREAD | nr::__WALL | nr::__WCLONE;
    let (options, id) = (args.d() as u32, args.b() as u32);
    if options & !KNOWN != 0 || options & WHAT == 0 {
        return Err(Errno::EINVAL);
    }
    let wanted = match args.a() as u32 {
        nr::P_ALL => Wanted::Any,
        nr::P_PID if id as i32 > 0 => Wanted::Process(id),
        nr::P_PGID if id == 0 => {
            Wanted::Group(current().process.relatives.group.load(Ordering::Relaxed))
        }
        nr::P_PGID if id as i32 > 0 => Wanted::Group(id),
        _ => return Err(Errno::EINVAL),
    };
    wait_for(&wanted, options)
}

/// `getpid()`.
pub fn getpid(_: Args<'_>) -> Result {
    Ok(u64::from(current().process.pid))
}

/// `gettid()`.
pub fn gettid(_: Args<'_>) -> Result {
    Ok(u64::from(current().tid))
}

/// `getppid()`.
pub fn getppid(_: Args<'_>) -> Result {
    Ok(u64::from(current().process.parent()))
}

/// The process `pid`; 0 is the caller's own.
pub(super) fn process_or_own(pid: u64) -> Result<Arc<Process>> {
    match pid as u32 {
        0 => Ok(current().process.clone()),
        pid => process::find(pid).ok_or(Errno::ESRCH),
    }
}

/// The thread `tid`; 0 is the caller.
pub(super) fn thread_or_own(tid: u64) -> Result<Arc<Thread>> {
    match tid as u32 {
        0 => Ok(current().arc()),
        tid => process::find_thread(tid).ok_or(Errno::ESRCH),
    }
}

/// `getpgid(pid)`.
pub fn getpgid(args: Args<'_>) -> Result {
    Ok(u64::from(process_or_own(args.a())?.relatives.group.load(Ordering::Relaxed)))
}

/// `getpgrp()`.
pub fn getpgrp(_: Args<'_>) -> Result {
    Ok(u64::from(current().process.relatives.group.load(Ordering::Relaxed)))
}

/// `getsid(pid)`.
pub fn getsid(args: Args<'_>) -> Result {
    Ok(u64::from(process_or_own(args.a())?.relatives.session.load(Ordering::Relaxed)))
}

/// `setpgid(pid, group)`.
pub fn setpgid(args: Args<'_>) -> Result {
    let own = current().process.clone();
    if (args.b() as i32) < 0 {
        return Err(Errno::EINVAL);
    }
    let process = process_or_own(args.a())?;
    let session = own.relatives.session.load(Ordering::Relaxed);
    let is_child = process.parent() == own.pid;
    if process.pid != own.pid && !is_child {
        return Err(Errno::ESRCH);
    }
    let session_of_process = process.relatives.session.load(Ordering::Relaxed);
    if session_of_process != session {
        return Err(Errno::EPERM);
    }
    if is_child && process.relatives.executed.load(Ordering::Relaxed) {
        return Err(Errno::EACCES);
    }
    if session_of_process == process.pid {
        return Err(Errno::EPERM);
    }
    let group = if args.b() == 0 { process.pid } else { args.b() as u32 };
    let exists = || {
        TABLE.lock().processes.values().any(|other| {
            other.relatives.group.load(Ordering::Relaxed) == group
                && other.relatives.session.load(Ordering::Relaxed) == session
        })
    };
    if group != process.pid && !exists() {
        return Err(Errno::EPERM);
    }
    process.relatives.group.store(group, Ordering::Relaxed);
    Ok(0)
}

/// `setsid()`.
pub fn setsid(_: Args<'_>) -> Result {
    let process = current().process.clone();
    let pid = process.pid;
    let leads = |other: &Arc<Process>| other.relatives.group.load(Ordering::Relaxed) == pid;
    if TABLE.lock().processes.values().any(leads) {
        return Err(Errno::EPERM);
    }
    process.relatives.session.store(pid, Ordering::Relaxed);
    process.relatives.group.store(pid, Ordering::Relaxed);
    Ok(u64::from(pid))
}

/// `set_tid_address(address)`.
pub fn set_tid_address(args: Args<'_>) -> Result {
    let thread = current();
    thread.clear_tid.store(args.a(), Ordering::Relaxed);
    Ok(u64::from(thread.tid))
}

/// Bytes of the head of a robust futex list.
const ROBUST_HEAD: u64 = 24;

/// `set_robust_list(head, size)`.
pub fn set_robust_list(args: Args<'_>) -> Result {
    if args.b() != ROBUST_HEAD {
        return Err(Errno::EINVAL);
    }
    current().robust_list.store(args.a(), Ordering::Relaxed);
    Ok(0)
}

/// `get_robust_list(tid, head, size)`.
pub fn get_robust_list(args: Args<'_>) -> Result {
    let thread = thread_or_own(args.a())?;
    if !may_inspect(&thread.process) {
        return Err(Errno::EPERM);
    }
    let head = thread.robust_list.load(Ordering::Relaxed);
    user::write(args.c(), &ROBUST_HEAD)?;
    user::write(args.b(), &head)?;
    Ok(0)
}

/// `arch_prctl(code, address)`.
pub fn arch_prctl(args: Args<'_>) -> Result {
    const SET_GS: u32 = 0x1001;
    const SET_FS: u32 = 0x1002;
    const GET_FS: u32 = 0x1003;
    const GET_GS: u32 = 0x1004;
    let addr = args.b();
    match args.a() as u32 {
        SET_GS | SET_FS if addr >= faultless::USER_END => return Err(Errno::EPERM),
        // A base set this way belongs to the null selector.
        SET_GS => {
            Selectors::current().without_gs().load();
            arch::set_gs_base(addr);
        }
        SET_FS => {
            Selectors::current().without_fs().load();
            arch::set_fs_base(addr);
        }
        GET_FS => user::write(addr, &arch::fs_base())?,
        GET_GS => user::write(addr, &arch::gs_base())?,
        _ => return Err(Errno::EINVAL),
    }
    Ok(0)
}

/// `prctl(option, ...)`: settings without an effect here are accepted.
pub fn prctl(args: Args<'_>) -> Result {
    use linux_raw_sys::prctl as p;
    const NAME: usize = 16;
    let process = current().process.clone();
    match args.a() as u32 {
        p::PR_SET_NAME => {
            let mut bytes = [0u8; NAME - 1];
            for (at, byte) in (args.b()..).zip(&mut bytes) {
                *byte = user::read(at)?;
                if *byte == 0 {
                    break;
                }
            }
            let len = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
            let name = String::try_from_utf8_lossy(&bytes[..len])?;
            *process.name.lock() = name;
            Ok(0)
        }
        p::PR_GET_NAME => {
            let mut bytes = [0u8; NAME];
            {
                let name = process.name.lock();
                let len = name.len().min(NAME - 1);
                bytes[..len].copy_from_slice(&name.as_bytes()[..len]);
            }
            user::write(args.b(), &bytes)?;
            Ok(0)
        }
        p::PR_GET_DUMPABLE => Ok(current().process.ids.is_dumpable().into()),
        p::PR_GET_PDEATHSIG => {
            user::write(args.b(), &process.relatives.death_signal.load(Ordering::Relaxed))?;
            Ok(0)
        }
        p::PR_GET_CHILD_SUBREAPER => {
            user::write(args.b(), &u32::from(process.relatives.adopts.load(Ordering::Relaxed)))?;
            Ok(0)
        }
        p::PR_SET_CHILD_SUBREAPER => {
            process.relatives.adopts.store(args.b() != 0, Ordering::Relaxed);
            Ok(0)
        }
        p::PR_SET_DUMPABLE if args.b() > 1 => Err(Errno::EINVAL),
        p::PR_SET_PDEATHSIG if args.b() > 64 => Err(Errno::EINVAL),
        p::PR_SET_NO_NEW_PRIVS if args.b() != 1 => Err(Errno::EINVAL),
        p::PR_SET_PDEATHSIG => {
            process.relatives.death_signal.store(args.b() as u32, Ordering::Relaxed);
            Ok(0)
        }
        p::PR_SET_DUMPABLE => {
            process.ids.set_dumpable(args.b() == 1);
            Ok(0)
        }
        p::PR_SET_NO_NEW_PRIVS
        | p::PR_SET_THP_DISABLE
        | p::PR_SET_TIMERSLACK
        | p::PR_SET_KEEPCAPS
        | p::PR_SET_PTRACER
        | p::PR_TASK_PERF_EVENTS_DISABLE
        | p::PR_TASK_PERF_EVENTS_ENABLE
        | p::PR_GET_THP_DISABLE
        | p::PR_GET_KEEPCAPS
        | p::PR_GET_NO_NEW_PRIVS
        | p::PR_GET_SECCOMP => Ok(0),
        p::PR_GET_TIMERSLACK => Ok(50_000),
        p::PR_CAPBSET_READ => Ok(1),
        _ => Err(Errno::EINVAL),
    }
}
