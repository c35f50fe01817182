//! The end of threads and of processes, and how parents learn of it.
//!
//! Only a thread itself ends it: by `exit`, `exit_group`, a fatal signal, or in
//! [`attention`](super::upcalls::attention) if it [must](super::Thread::must_end). It releases its futexes in
//! its memory, leaves the space, and only then leaves its process's list: the only thread left in that
//! list may replace or free the memory. The last one ends the process: memory and files are freed, [process
//! 1](super::init) adopts the children, and a zombie stays until the parent waits for it.
//!
//! When the program that the machine was started for ends, all other processes are killed, and
//! [the machine](super::finish) stops.

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

/// Ends the running thread. If it is the first, `code` is that of the process unless something else decides.
pub fn exit(code: u8) -> ! {
    let thread = current();
    if thread.is_leader() {
        thread.process.end.leader_code.store(code, Ordering::Relaxed);
    }
    end_thread()
}

/// Ends the running thread and all others of its process.
pub fn exit_group(status: ExitStatus) -> ! {
    kill(&current().process, status);
    end_thread()
}

/// Makes all threads of `process` end, with `status` unless another is set already.
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

/// Ends all other threads of the running thread's process. False: another thread does the same, and this one
/// must end instead.
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

/// Ends the running thread. Values that the caller owns are never dropped.
pub fn end_thread() -> ! {
    let last = {
        let thread = current();
        let process = &thread.process;
        say_goodbye(&thread);
        machine::run_none();
        let last = {
            // From both lists in one step: a thread that is alone then may take the number.
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

/// Ends the thread's use of its memory: wakes waiters of its robust futexes, and of its end. Also called
/// before `execve` replaces the memory.
pub(super) fn say_goodbye(thread: &Current) {
    if let Some(memory) = thread.process.memory() {
        memory.space().thread_leaves(percpu::cpu(), &thread.task.streams);
    }
    let robust = thread.robust_list.swap(0, Ordering::Relaxed);
    if robust != 0 {
        futex::release_robust(robust, thread.tid);
    }
    let clear = thread.clear_tid.swap(0, Ordering::Relaxed);
    // As on Linux, nothing is stored in memory that no other thread uses.
    let alone = || thread.process.memory().is_none_or(|memory| Arc::strong_count(&memory) == 2);
    if clear != 0 && (thread.process.threads.lock().len() > 1 || !alone()) {
        // A bad address is no error: the thread ends.
        let _ = user::write(clear, &0u32).map(|()| futex::wake(clear, false, 1, u32::MAX));
    }
}

/// Ends a process whose last thread, the running one, has left it. `counted` is the part of that thread's
/// time that the process has counted already.
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
    // With the table locked no parent ends or waits in between.
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

/// Replaces the memory of the running thread's process by `new`, and drops the old when no CPU runs it.
pub(super) fn replace_memory(new: Arc<Memory>) {
    let process = current().process.clone();
    process.ids.execute();
    process.note_memory();
    let old = process.memory.replace(Some(new));
    scheduler::run_memory();
    drop(old);
    process.memory_changed.wake_all();
}

/// Ends the running thread, the only one of its process, and starts `successor` in its place; `slot` is for its entry
/// in the table.
pub(super) fn succeed(successor: Arc<Thread>, slot: Slot<u32, Arc<Thread>>) {
    let thread = current();
    let mut table = TABLE.lock();
    let mut threads = thread.process.threads.lock();
    // A request to all threads to end, meanwhile, has missed this one.
    successor.must_end.store(thread.must_end(), Ordering::SeqCst);
    threads.push(successor.clone());
    table.threads.insert(slot, successor.tid, successor.clone());
    drop((table, threads));
    ask_to_end(&thread.arc());
    scheduler::start(successor);
}
