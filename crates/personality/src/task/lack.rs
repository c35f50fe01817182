//! Waiting for memory after an allocation failure.
//!
//! Memory is out when an operation finds no free frame and [reclaim](faultless) finds no page to
//! evict. Then a [victim](super::oom) is chosen and killed, and the failed thread
//! [waits](wait_for_memory) until the memory of a process is free. The thread then retries its
//! operation: a [page fault](fault), a [call of the subsystem](with_memory), or the system call
//! with the [failed](resume) copy. A waiting thread holds no lock.
//!
//! *One victim at a time.* No second process is killed before the memory of an ending process is
//! free. This memory may be in use beyond the end of the process, for example by a reader of
//! `/proc/PID/smaps`. So threads wait for the end of the [`Memory`](super::memory::Memory), not of
//! the process. If memory was freed since the last failure of a thread, the thread retries before a
//! victim is chosen: its failure may be older than the free.
//!
//! *Processes that share the memory* of the victim are killed too. Otherwise the memory would not
//! become free.
//!
//! *No candidates.* If every process is protected (`oom_score_adj` is -1000), Linux panics. Here no
//! program stops the kernel: the process that needs memory is killed, protected or not.

use super::exit;
use super::oom::{KILLS, Victim, choose, is_ending, uses};
use super::process;
use super::status::ExitStatus;
use super::thread::{WaitQueue, current, try_current};
use super::wait::{is_killed, wait_unless_killed};
use crate::errno::{Errno, Result};
use crate::signal;
use core::sync::atomic::Ordering;
use faultless::PAGE_SIZE;
use faultless_bare::arch::{SYSTEM_CALL, TrapFrame};
use faultless_bare::reserve::{self, Lack};
use faultless_bare::sync::Mutex;
use faultless_bare::{percpu, report};
use linux_raw_sys::general as nr;

/// The event that unblocks the waiting threads.
#[derive(Debug)]
enum Awaited {
    /// No event: the next thread that finds no memory chooses a victim.
    Nothing,
    /// A thread is choosing.
    Choice,
    /// The end of the memory with this number.
    Memory(u64),
}

#[derive(Debug)]
struct State {
    awaited: Awaited,
    /// The number of memories freed so far.
    freed: u64,
}

/// The holder of this lock does not wait.
static STATE: Mutex<State> = Mutex::new(State { awaited: Awaited::Nothing, freed: 0 });
/// Woken when a memory is free.
static CHANGED: WaitQueue = WaitQueue::new();

/// Records that the memory with this number is free now.
pub fn memory_is_free(number: u64) {
    {
        let mut state = STATE.lock();
        state.freed += 1;
        if matches!(state.awaited, Awaited::Memory(awaited) if awaited == number) {
            state.awaited = Awaited::Nothing;
        }
    }
    CHANGED.wake_all();
}

/// Waits for memory after the running thread found no free memory. On return, the thread retries or
/// ends: it may have been killed. The caller holds no lock, and no memory except its own process's.
pub fn wait_for_memory() {
    let thread = current();
    if is_killed(&thread) {
        return;
    }
    let (freed, chooses) = {
        let mut state = STATE.lock();
        let freed = state.freed;
        if thread.freed_seen.replace(freed) != freed {
            return;
        }
        let chooses = matches!(state.awaited, Awaited::Nothing);
        if chooses {
            state.awaited = Awaited::Choice;
        }
        (freed, chooses)
    };
    if chooses {
        let process = &thread.process;
        let own = || {
            report!(
                "message Out of memory and no killable processes: the allocating process is killed"
            );
            process.memory().map(|memory| Victim { process: process.clone(), memory, points: 0 })
        };
        let victim = choose().or_else(own);
        // The victim's memory is held here, so it ends after this store.
        STATE.lock().awaited = match &victim {
            Some(victim) => Awaited::Memory(victim.memory.space().id().0),
            None => Awaited::Nothing,
        };
        if let Some(victim) = victim {
            end(&victim);
        }
    }
    let _ = wait_unless_killed(&CHANGED, || (STATE.lock().freed != freed).then_some(()));
    // Refill before the retry, so that the next copy finds the reserve full. Missing frames are
    // taken back later.
    reserve::fill();
}

/// Calls `call`, which must hold no resource on return, and retries after memory was freed while
/// `call` fails for lack of memory.
///
/// # Errors
/// The errors of `call`. `ENOMEM`: for another reason, or the thread is killed.
pub fn with_memory<R>(mut call: impl FnMut() -> Result<R>) -> Result<R> {
    loop {
        percpu::cpu().take_starved();
        let result = call();
        let lacks = matches!(result, Err(Errno::ENOMEM)) && percpu::cpu().take_starved();
        if !lacks || try_current().is_none_or(|thread| is_killed(&thread)) {
            return result;
        }
        wait_for_memory();
    }
}

/// Handles a page fault of the running program that found no memory: on return, the program repeats
/// its access or ends.
pub(super) fn fault() {
    if reserve::is_lack() { wait_for_memory() } else { end_own() }
}

/// Kills the running process, whose page cannot be mapped even with free memory.
fn end_own() {
    let process = &current().process;
    if let Some(memory) = process.memory() {
        end(&Victim { process: process.clone(), memory, points: 0 });
    }
}

/// Handles a lack of memory in copies, on the return to the program with the registers `frame`.
/// Waits for memory; a system call that failed for lack of memory is restarted.
pub(super) fn resume(frame: &mut TrapFrame, lack: Lack) {
    match lack {
        Lack::None => return,
        Lack::Hopeless => return end_own(),
        // The reserve could be filled: memory is available again.
        Lack::Lent | Lack::Failed if reserve::fill() => {}
        Lack::Lent | Lack::Failed => wait_for_memory(),
    }
    let failed = frame.vector == SYSTEM_CALL && frame.rax == (-i64::from(Errno::EFAULT.0)) as u64;
    if lack == Lack::Failed && failed {
        signal::restart_call(frame);
    }
}

/// Kills all processes that use the victim's memory.
fn end(victim: &Victim) {
    let Victim { process, memory, points } = victim;
    if !is_ending(process) {
        KILLS.fetch_add(1, Ordering::Relaxed);
        let (space, cpu) = (memory.space(), percpu::cpu());
        let pages = [
            space.mapped_pages(cpu),
            space.resident_pages(cpu),
            space.swapped_pages(cpu),
            memory.table_pages(),
        ];
        let [total, resident, swapped, tables] = pages.map(|pages| pages * (PAGE_SIZE / 1024));
        // The program chooses the name; it must not break the line of the report.
        report!(
            "message Out of memory: Killed process {} ({}), points {points}: total-vm:{total}kB, rss:{resident}kB, \
             swap:{swapped}kB, pgtables:{tables}kB, oom_score_adj:{}",
            process.pid,
            process.name.lock().escape_debug(),
            process.oom_score_adj.load(Ordering::Relaxed),
        );
    }
    // The second pass finds a process made during the first one. After the second pass no user of
    // the memory makes another process.
    for _ in 0..2 {
        process::each(|process| {
            if uses(process, memory) {
                exit::kill(process, ExitStatus::killed(nr::SIGKILL));
            }
        });
    }
}
