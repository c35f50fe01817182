//! The end of threads and processes, and the notification of parents.
//!
//! Only the thread itself ends a thread: by `exit`, `exit_group`, a fatal signal, or in
//! [`attention`](super::upcalls::attention) if it [must](super::Thread::must_end). The thread first
//! releases its futexes in user memory, leaves the space, and only then leaves its process's list.
//! So the only thread remaining in this list may replace or free the memory. The last thread ends
//! the process: it frees memory and files, [process 1](super::init) adopts the children, and a
//! zombie remains until the parent waits for the process.
//!
//! When the first program ends, all other processes are killed, and [the machine](super::finish)
//! stops.

use super::memory::Memory;
use super::process::{Process, TABLE};
use super::relatives::PROGRAM;
use super::status::ExitStatus;
use super::thread::{Current, Thread, current};
use super::wait::wait_in_any_case;
use super::{finish, futex, init, scheduler};
use crate::signal;
use crate::time::Times;
use core::sync::atomic::Ordering;
use faultless_bare::arch::user;
use faultless_bare::{machine, percpu};
use faultless_collections::{Arc, Slot};
use linux_raw_sys::general as nr;

/// Ends the running thread. For the first thread, `code` is also the exit code of the process,
/// unless another status is set.
pub fn exit(code: u8) -> ! {
    let thread = current();
    if thread.is_leader() {
        thread.process.end.leader_code.store(code, Ordering::Relaxed);
    }
    end_thread()
}

/// Ends all threads of the running process, including the running thread.
pub fn exit_group(status: ExitStatus) -> ! {
    kill(&current().process, status);
    end_thread()
}

/// Makes all threads of `process` end, with `status` unless a status is already set.
pub fn kill(process: &Process, status: ExitStatus) {
    process.end.status.lock().get_or_insert(status);
    for thread in process.threads.lock().iter() {
        ask_to_end(thread);
    }
}

fn ask_to_end(thread: &Arc<Thread>) {
    thread.must_end.store(true, Ordering::SeqCst);
    scheduler::wake(thread);
    scheduler::notify(thread);
}

/// Ends all other threads of the running thread's process. False: another thread does the same, and
/// the caller must end instead.
pub fn end_other_threads() -> bool {
    let thread = current();
    let process = &thread.process;
    {
        let threads = process.threads.lock();
        if thread.must_end() {
            return false;
        }
        threads.iter().filter(|other| other.tid != thread.tid).for_each(ask_to_end);
    }
    let alone = || {
        let alone = process.threads.lock().len() == 1;
        (alone || thread.must_end()).then_some(alone)
    };
    wait_in_any_case(&process.threads_changed, alone) && !thread.must_end()
}

/// Ends the running thread. Values owned by the caller are never dropped.
pub fn end_thread() -> ! {
    let last = {
        let thread = current();
        let process = &thread.process;
        say_goodbye(&thread);
        machine::run_none();
        let last = {
            // Removes the thread from both lists in one step: the only remaining thread may then
            // take the number.
            let mut table = TABLE.lock();
            let mut threads = process.threads.lock();
            table.threads.remove(&thread.tid);
            let own = threads.take(|other| other.tid == thread.tid);
            debug_assert!(own.is_some());
            let mut ended = process.used.by_ended.lock();
            let used = thread.usage();
            *ended = *ended + used;
            threads.is_empty().then_some(used.times)
        };
        signal::thread_ends(&thread);
        process.threads_changed.wake_all();
        last.map(|counted| (process.clone(), counted))
    };
    if let Some((process, counted)) = last {
        end_process(&process, counted);
    }
    faultless_bare::reserve::fill();
    scheduler::end()
}

/// Ends the thread's use of its memory: wakes the waiters for its robust futexes and for its end.
/// Also called before `execve` replaces the memory.
pub(super) fn say_goodbye(thread: &Current) {
    if let Some(memory) = thread.process.memory() {
        memory.space().exit_thread(percpu::cpu(), &thread.task.streams);
    }
    let robust = thread.robust_list.swap(0, Ordering::Relaxed);
    if robust != 0 {
        futex::release_robust(robust, thread.tid);
    }
    let clear = thread.clear_tid.swap(0, Ordering::Relaxed);
    // As on Linux, the store is omitted if no other thread uses the memory.
    let alone = || thread.process.memory().is_none_or(|memory| Arc::strong_count(&memory) == 2);
    if clear != 0 && (thread.process.threads.lock().len() > 1 || !alone()) {
        // A bad address is no error: the thread ends.
        let _ = user::write(clear, &0u32).map(|()| futex::wake(clear, false, 1, u32::MAX));
    }
}

/// Ends a process after its last thread, the running one, has left the process. `counted` is the
/// part of this thread's time already counted by the process.
fn end_process(process: &Arc<Process>, counted: Times) {
    let status = *process
        .end
        .status
        .lock()
        .get_or_insert(ExitStatus::exited(process.end.leader_code.load(Ordering::Relaxed)));
    process.note_memory();
    drop(process.memory.replace(None));
    crate::ipc::sem::process_ends(process.pid);
    process.memory_changed.wake_all();
    process.files().close_all();
    process.timers.end();
    if process.pid == PROGRAM {
        init::end_all(process);
        finish::finish(status);
    }
    // The locked table excludes the end of a parent, and waits by a parent, during these steps.
    let mut noted;
    let parent = {
        let mut table = TABLE.lock();
        noted = init::adopt_children(process, &mut table);
        noted |= signal::orphan::process_leaves(&table, process);
        {
            // Freeing the memory is a large part of the time of many programs.
            let mut ended = process.used.by_ended.lock();
            ended.times = ended.times + current().cpu_time.times() - counted;
        }
        process.end.done.store(true, Ordering::SeqCst);
        let (parent, exit_signal) = {
            let family = process.family.lock();
            (table.processes.get(&process.parent()).cloned(), family.exit_signal)
        };
        let unseen = parent
            .as_ref()
            .is_none_or(|parent| exit_signal == nr::SIGCHLD && parent.signals.ignores_children());
        if unseen {
            table.processes.remove(&process.pid);
            if let Some(parent) = &parent {
                let own = parent.family.lock().children.take(|child| child.pid == process.pid);
                debug_assert!(own.is_some());
            }
        }
        parent.map(|parent| (parent, exit_signal))
    };
    if let Some((parent, exit_signal)) = parent {
        if exit_signal != 0 {
            signal::child_ended(&parent, exit_signal, process, status);
        }
        parent.children_changed.wake_all();
    }
    if noted {
        signal::orphan::send_noted();
    }
}

/// Replaces the memory of the running thread's process with `new`, and drops the old memory once no
/// CPU runs its space.
pub(super) fn replace_memory(new: Arc<Memory>) {
    let process = current().process.clone();
    process.ids.execute();
    process.relatives.executed.store(true, Ordering::Relaxed);
    process.note_memory();
    let old = process.memory.replace(Some(new));
    scheduler::run_memory();
    drop(old);
    process.memory_changed.wake_all();
}

/// Ends the running thread, the only thread of its process, and starts `successor` in its place;
/// `slot` is for its entry in the table.
pub(super) fn succeed(successor: Arc<Thread>, slot: Slot<u32, Arc<Thread>>) {
    let thread = current();
    let mut table = TABLE.lock();
    let mut threads = thread.process.threads.lock();
    // A concurrent request to all threads has not reached the successor, so copy the flag.
    successor.must_end.store(thread.must_end(), Ordering::SeqCst);
    threads.push(successor.clone());
    table.threads.insert(slot, successor.tid, successor.clone());
    drop((table, threads));
    ask_to_end(&thread.arc());
    scheduler::start(successor);
}
