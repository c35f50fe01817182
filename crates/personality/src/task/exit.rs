//! The end of threads and of processes, and how parents hear of it.
//!
//! A thread ends in its own code only: `exit`, `exit_group`, a deadly signal, or
//! [`attention`](super::upcalls::attention) that sees that it [must](super::Thread::must_end). It says goodbye in
//! its memory, leaves the space, and only then leaves its process's list: who finds itself alone in that
//! list may replace or free the memory. The last one ends the process: memory and files go, the children
//! go to [process 1](super::init), and a zombie stays until the parent asks for it.
//!
//! The end of the program that the machine was started for is the end of all: the others are killed, and
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

/// Ends the running thread. `code` is the process's if it is the first and nothing else decides.
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

/// Makes all threads of `process` end; `status` is how unless that is decided already.
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

/// Ends all threads of the running one's process but that. False: another was faster, and this one
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

/// Ends the running thread. What the code that calls this owns is never dropped.
pub fn end_thread() -> ! {
    let last = {
        let thread = current();
        let process = &thread.process;
        say_goodbye(&thread);
        machine::run_none();
        let last = {
            // From both lists at once: whoever then is alone may take the number.
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
    scheduler::end()
}

/// Leaves the thread's memory, and releases what others there wait for: its robust futexes, and its end. Also
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
    // Linux, too, stores nothing in memory that nobody else looks at.
    let alone = || thread.process.memory().is_none_or(|memory| Arc::strong_count(&memory) == 2);
    if clear != 0 && (thread.process.threads.lock().len() > 1 || !alone()) {
        // Nowhere to store it is no error: the thread ends.
        let _ = user::write(clear, &0u32).map(|()| futex::wake(clear, false, 1, u32::MAX));
    }
}

/// The end of a process whose last thread, the running one, has left it; `counted` is how much of that one's
/// time the process has counted already.
fn end_process(process: &Arc<Process>, counted: Times) {
    let status = *process
        .end
        .status
        .lock()
        .get_or_insert(ExitStatus::exited(process.end.leader_code.load(Ordering::Relaxed)));
    drop(process.memory.replace(None));
    crate::ipc::sem::process_ends(process.pid);
    process.memory_changed.wake_all();
    process.files().close_all();
    process.timers.end();
    if process.pid == PROGRAM {
        init::end_all(process);
        finish::finish(status);
    }
    // With the table locked no parent ends or asks in between.
    let mut noted;
    let parent = {
        let mut table = TABLE.lock();
        noted = init::adopt_children(process, &mut table);
        noted |= signal::orphan::process_leaves(&table, process);
        {
            // To take memory apart is a large part of many a program's time.
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

/// Takes `memory` from the process of the running thread, for `new`, and drops it when nobody runs it.
pub(super) fn replace_memory(new: Arc<Memory>) {
    let process = current().process.clone();
    let old = process.memory.replace(Some(new));
    scheduler::run_memory();
    drop(old);
    process.memory_changed.wake_all();
}

/// Ends the running thread, the only one of its process, and starts `successor` in its place, which is listed in
/// `slot`.
pub(super) fn succeed(successor: Arc<Thread>, slot: Slot<u32, Arc<Thread>>) {
    let thread = current();
    let mut table = TABLE.lock();
    let mut threads = thread.process.threads.lock();
    // Who asked all threads to end meanwhile has not seen this one.
    successor.must_end.store(thread.must_end(), Ordering::SeqCst);
    threads.push(successor.clone());
    table.threads.insert(slot, successor.tid, successor.clone());
    drop((table, threads));
    ask_to_end(&thread.arc());
    scheduler::start(successor);
}
