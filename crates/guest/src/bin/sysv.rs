//! `sysv [CHECK…]`: System V's semaphores and message queues.

use faultless_guest::args::Args;
use faultless_guest::check::{Check, Verdict};
use faultless_guest::proc::{self, Status, fork, outcome, pid};
use faultless_guest::sys::{self, Errno, call, doing};
use faultless_guest::{check, clock, ensure, same};
use libc::{E2BIG, EAGAIN, EFBIG, EIDRM, EINVAL, ENOENT, ENOMSG, ERANGE};
use libc::{IPC_CREAT, IPC_NOWAIT, IPC_PRIVATE, IPC_RMID, IPC_STAT};

const GETPID: i32 = 11;
const GETVAL: i32 = 12;
const GETALL: i32 = 13;
const GETNCNT: i32 = 14;
const GETZCNT: i32 = 15;
const SETVAL: i32 = 16;
const SETALL: i32 = 17;
const UNDO: i16 = 0x1000;
const NO_WAIT: i16 = IPC_NOWAIT as i16;

/// The result of a rejected call.
const fn refused<T>(errno: i32) -> sys::Result<T> {
    Err(Errno(errno))
}

/// A set of semaphores; dropping the value removes the set.
struct Set(u64);

impl Set {
    fn new(count: u64) -> Result<Self, String> {
        let args = [IPC_PRIVATE as u64, count, (IPC_CREAT | 0o600) as u64];
        // SAFETY: changes no memory.
        doing("semget", unsafe { call(libc::SYS_semget, args) }).map(Self)
    }

    fn control(&self, at: u64, command: i32, argument: u64) -> sys::Result<u64> {
        // SAFETY: the callers' arguments suit the commands.
        unsafe { call(libc::SYS_semctl, [self.0, at, command as u64, argument]) }
    }

    /// Changes `(semaphore, by, flags)`.
    fn change(&self, changes: &[(u16, i16, i16)], nanoseconds: Option<i64>) -> sys::Result<u64> {
        let changes: Vec<_> = changes
            .iter()
            .map(|&(sem_num, sem_op, sem_flg)| libc::sembuf { sem_num, sem_op, sem_flg })
            .collect();
        let time = nanoseconds.map(|tv_nsec| libc::timespec { tv_sec: 0, tv_nsec });
        let at = time.as_ref().map_or(0, |time| std::ptr::from_ref(time) as u64);
        let args = [self.0, changes.as_ptr() as u64, changes.len() as u64, at];
        // SAFETY: reads the changes and the time.
        unsafe { call(libc::SYS_semtimedop, args) }
    }

    fn values(&self, count: usize) -> Result<Vec<u16>, String> {
        let mut values = vec![0; count];
        doing("GETALL", self.control(0, GETALL, values.as_mut_ptr() as u64))?;
        Ok(values)
    }
}

impl Drop for Set {
    fn drop(&mut self) {
        // The set may already be removed.
        let _ = self.control(0, IPC_RMID, 0);
    }
}

/// Semaphores are changed together or not at all, and a change that cannot be made waits.
fn semaphores() -> Verdict {
    let set = Set::new(3)?;
    same!(set.values(3)?, [0, 0, 0], "new semaphores");
    same!(set.change(&[(0, 2, 0), (1, 5, 0)], None), Ok(0), "semop");
    same!(set.control(0, GETPID, 0), Ok(pid() as u64), "the last process to change the value");
    let refuses = |changes: &[_]| set.change(changes, None);
    same!(refuses(&[(0, -1, 0), (2, -1, NO_WAIT)]), refused(EAGAIN), "one of two changes");
    same!(refuses(&[(1, 0, NO_WAIT)]), refused(EAGAIN), "not 0");
    same!(refuses(&[(0, 32767, 0)]), refused(ERANGE), "too large");
    same!(refuses(&[(3, 1, 0)]), refused(EFBIG), "no such semaphore");
    same!(refuses(&[]), refused(EINVAL), "no changes");
    same!(refuses(&[(0, 0, 0); 501]), refused(E2BIG), "too many changes");
    same!(set.change(&[(2, -1, 0)], Some(1_000_000)), refused(EAGAIN), "an expired time limit");
    same!(set.values(3)?, [2, 5, 0], "the values after these calls");
    same!(refuses(&[(0, -2, 0), (0, 0, 0), (0, 7, 0)]), Ok(0), "three changes of one semaphore");
    same!(set.control(0, GETVAL, 0), Ok(7), "the value of the semaphore");
    same!(set.control(0, SETVAL, 32768), refused(ERANGE), "SETVAL too large");
    same!(set.control(3, SETVAL, 1), refused(EINVAL), "SETVAL of a missing semaphore");
    let all = [1u16, 2, 3];
    doing("SETALL", set.control(0, SETALL, all.as_ptr() as u64))?;
    same!(set.values(3)?, all, "the values of SETALL");
    // SAFETY: zeros are a value.
    let mut status: libc::semid_ds = unsafe { std::mem::zeroed() };
    doing("IPC_STAT", set.control(0, IPC_STAT, (&raw mut status) as u64))?;
    same!((status.sem_nsems, status.sem_perm.mode & 0o777), (3, 0o600), "the result of IPC_STAT");
    ensure!(status.sem_otime > 0 && status.sem_ctime > 0, "no time of a change");
    let many = [IPC_PRIVATE as u64, 0, IPC_CREAT as u64];
    // SAFETY: changes no memory.
    same!(unsafe { call(libc::SYS_semget, many) }, refused(EINVAL), "a set without semaphores");

    doing("SETALL", set.control(0, SETALL, [0u16, 0, 1].as_ptr() as u64))?;
    let waits = |change: (u16, i16, i16)| {
        doing("fork", fork(|| i32::from(set.change(&[change], None) != Ok(0))))
    };
    let (one, zero) = (waits((0, -3, 0))?, waits((2, 0, 0))?);
    let waiting = || (set.control(0, GETNCNT, 0), set.control(2, GETZCNT, 0));
    while waiting() != (Ok(1), Ok(1)) {
        clock::sleep_ms(1);
    }
    doing("semop", set.change(&[(0, 2, 0)], None))?;
    clock::sleep_ms(5);
    same!(waiting(), (Ok(1), Ok(1)), "waiters after too small a change");
    doing("semop", set.change(&[(0, 1, 0), (2, -1, 0)], None))?;
    for child in [one, zero] {
        same!(doing("wait4", child.wait())?, Status::Exited(0), "the waiting child");
    }
    same!((set.values(3)?, waiting()), (vec![0, 0, 0], (Ok(0), Ok(0))), "afterwards");
    let last = doing("fork", fork(|| i32::from(refuses(&[(0, -1, 0)]) != refused(EIDRM))))?;
    while set.control(0, GETNCNT, 0) != Ok(1) {
        clock::sleep_ms(1);
    }
    doing("IPC_RMID", set.control(0, IPC_RMID, 0))?;
    same!(
        doing("wait4", last.wait())?,
        Status::Exited(0),
        "a process that waited during the removal"
    );
    same!(set.control(0, GETVAL, 0), refused(EINVAL), "the removed object");
    Ok(())
}

/// Changes undone at the end of a process.
fn undone() -> Verdict {
    let set = Set::new(2)?;
    doing("SETALL", set.control(0, SETALL, [5u16, 5].as_ptr() as u64))?;
    let child = outcome(|| {
        let done = set.change(&[(0, -2, UNDO), (1, 3, UNDO), (1, 1, 0)], None);
        // Refused changes are not undone.
        let refused = set.change(&[(0, -1, UNDO), (1, -20, NO_WAIT)], None);
        let values = set.values(2);
        i32::from(done != Ok(0) || refused != Err(Errno(EAGAIN)) || values != Ok(vec![3, 9]))
    });
    same!(child?, Status::Exited(0), "a child with SEM_UNDO");
    same!(set.values(2)?, [5, 6], "the values after the end of the child");
    let killed = doing(
        "fork",
        fork(|| {
            let _ = set.change(&[(0, -5, UNDO)], None);
            loop {
                clock::sleep_ms(100);
            }
        }),
    )?;
    doing("semop", set.change(&[(0, 0, 0)], None))?;
    doing("kill", killed.signal(libc::SIGKILL))?;
    doing("wait4", killed.wait())?;
    same!(set.values(2)?, [5, 6], "the values after the kill of the child");
    Ok(())
}

/// A message: number and text.
#[repr(C)]
struct Message {
    kind: i64,
    text: [u8; 64],
}

/// A message queue; dropping the value removes the queue.
struct Queue(u64);

impl Queue {
    fn send(&self, kind: i64, text: &[u8], flags: i32) -> sys::Result<u64> {
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend_from_slice(text);
        let args = [self.0, bytes.as_ptr() as u64, text.len() as u64, flags as u64];
        // SAFETY: reads the message.
        unsafe { call(libc::SYS_msgsnd, args) }
    }

    fn receive(&self, kind: i64, most: u64, flags: i32) -> sys::Result<(i64, Vec<u8>)> {
        let mut message = Message { kind: 0, text: [0; 64] };
        let at = (&raw mut message) as u64;
        let args = [self.0, at, most.min(64), kind as u64, flags as u64];
        // SAFETY: writes at most the message.
        let len = unsafe { call(libc::SYS_msgrcv, args)? };
        Ok((message.kind, message.text[..len as usize].to_vec()))
    }

    fn control(&self, command: i32, buffer: u64) -> sys::Result<u64> {
        // SAFETY: the buffer, if any, has the size of the command.
        unsafe { call(libc::SYS_msgctl, [self.0, command as u64, buffer]) }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // The queue may already be removed.
        let _ = self.control(IPC_RMID, 0);
    }
}

/// Messages come in order, or by number, and a blocked call waits.
fn messages() -> Verdict {
    let get = |key: i32, flags: i32| {
        // SAFETY: changes no memory.
        unsafe { call(libc::SYS_msgget, [key as u64, flags as u64]) }
    };
    same!(get(0x4662_0000 ^ pid(), 0), refused(ENOENT), "no queue yet");
    let queue = Queue(doing("msgget", get(IPC_PRIVATE, IPC_CREAT | 0o600))?);
    let next = |kind: i64, flags: i32| queue.receive(kind, 64, flags | IPC_NOWAIT);
    same!(next(0, 0), refused(ENOMSG), "an empty queue");
    for (kind, text) in [(5, "five"), (3, "three"), (7, "seven"), (3, "again"), (9, "nine")] {
        doing("msgsnd", queue.send(kind, text.as_bytes(), 0))?;
    }
    let found = |kind: i64, text: &str| Ok((kind, text.as_bytes().to_vec()));
    same!(next(7, 0), found(7, "seven"), "by number");
    same!(next(-6, 0), found(3, "three"), "the lowest number");
    same!(next(5, libc::MSG_EXCEPT), found(3, "again"), "all but a number");
    same!(next(4, 0), refused(ENOMSG), "no such number");
    same!(queue.receive(0, 2, IPC_NOWAIT), refused(E2BIG), "too long");
    same!(queue.receive(0, 2, libc::MSG_NOERROR), found(5, "fi"), "cut off");
    // SAFETY: zeros are a value.
    let mut status: libc::msqid_ds = unsafe { std::mem::zeroed() };
    doing("IPC_STAT", queue.control(IPC_STAT, (&raw mut status) as u64))?;
    same!((status.msg_qnum, status.msg_qbytes), (1, 16384), "the result of IPC_STAT");
    same!((status.msg_lspid, status.msg_lrpid), (pid(), pid()), "the last sender and receiver");
    same!(next(0, 0), found(9, "nine"), "the last");
    same!(queue.send(0, b"", 0), refused(EINVAL), "the number 0");
    same!(queue.send(1, &[0; 8193], 0), refused(EINVAL), "too long to send");
    for _ in 0..2 {
        doing("msgsnd", queue.send(1, &[1; 8192], IPC_NOWAIT))?;
    }
    same!(queue.send(1, &[1], IPC_NOWAIT), refused(EAGAIN), "a full queue");
    let sender = doing("fork", fork(|| i32::from(queue.send(2, b"late", 0) != Ok(0))))?;
    clock::sleep_ms(5);
    same!(sender.try_wait(), Ok(None), "the sender to a full queue");
    doing("msgrcv", queue.receive(1, 64, libc::MSG_NOERROR))?;
    same!(queue.receive(2, 64, 0), found(2, "late"), "the message that waited");
    same!(doing("wait4", sender.wait())?, Status::Exited(0), "the sender");
    // If the call comes late, the queue no longer exists.
    let waits = || {
        let end = queue.receive(4, 64, 0);
        i32::from(end != refused(EIDRM) && end != refused(EINVAL))
    };
    let waiter = doing("fork", fork(waits))?;
    clock::sleep_ms(20);
    same!(waiter.try_wait(), Ok(None), "the waiting receiver");
    doing("IPC_RMID", queue.control(IPC_RMID, 0))?;
    let ended = doing("wait4", waiter.wait())?;
    same!(ended, Status::Exited(0), "a process that waited during the removal");
    same!(next(0, 0), refused(EINVAL), "the removed object");
    Ok(())
}

const CHECKS: &[Check] = &[("semaphores", semaphores), ("undone", undone), ("messages", messages)];

fn main() {
    let args = Args::read("sysv", &[]);
    proc::no_huge_pages();
    std::process::exit(check::run(&args, CHECKS))
}
