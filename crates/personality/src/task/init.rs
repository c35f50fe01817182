//! Process 1: the parent of the first program and of every orphan.
//!
//! Process 1 is part of the kernel: it has no program, no memory and no files, and its only thread
//! never runs, because the kernel performs all duties of an init. It ignores every signal,
//! including `SIGCHLD`, so its children become no zombies and need no wait. When the program ends,
//! the machine ends: [`end_all`] kills all other processes, and `finish` reports.

use super::exit;
use super::process::{self, Family, Process, TABLE, Table};
use super::relatives::{INIT, PROGRAM};
use super::status::ExitStatus;
use super::thread::{ENDED, Thread};
use super::wait::wait_in_any_case;
use crate::errno::{Errno, Result};
use crate::fs::ProcessFiles;
use crate::signal::{self, ProcessSignals, ThreadSignals};
use core::sync::atomic::Ordering;
use faultless_bare::arch::TrapFrame;
use faultless_bare::arch::fpu::FpuState;
use faultless_collections::{Arc, Slot, String};
use linux_raw_sys::general as nr;

/// Makes process 1. Called once, before there is another process.
///
/// # Errors
/// `ENOMEM`.
pub fn start() -> Result<Arc<Process>> {
    let number = TABLE.lock().new_number();
    debug_assert_eq!(number, INIT);
    let signals = ProcessSignals::try_ignoring_all()?;
    let process = Process::try_new(INIT, None, ProcessFiles::none()?, signals, Family::default())?;
    *process.name.lock() = String::try_from_str("init")?;
    let process = Arc::try_new(process)?;
    let fpu = FpuState::try_new().ok_or(Errno::ENOMEM)?;
    let (frame, signals) = (TrapFrame::start(0, 0), ThreadSignals::default());
    let thread = Thread::try_new(INIT, process.clone(), frame, fpu, signals, u64::MAX)?;
    // An ended thread is never woken.
    thread.state.store(ENDED, Ordering::Relaxed);
    process.threads.lock().push(thread.clone());
    let slots = (Slot::try_new()?, Slot::try_new()?);
    let mut table = TABLE.lock();
    table.threads.insert(slots.0, INIT, thread);
    table.processes.insert(slots.1, INIT, process.clone());
    Ok(process)
}

/// Returns the process that adopts the children of `process`: the nearest subreaper among its
/// ancestors, or process 1.
fn adopter(process: &Process, table: &Table) -> Option<Arc<Process>> {
    let mut ancestor = table.processes.get(&process.parent())?;
    while ancestor.pid != INIT && !ancestor.relatives.adopts.load(Ordering::Relaxed) {
        ancestor = table.processes.get(&ancestor.parent())?;
    }
    Some(ancestor.clone())
}

/// Moves the children of `process`, which is ending, to their new parent. Returns whether [signals
/// were noted](signal::orphan).
pub(super) fn adopt_children(process: &Process, table: &mut Table) -> bool {
    let mut children = core::mem::take(&mut process.family.lock().children);
    if children.is_empty() {
        return false;
    }
    let Some(parent) = adopter(process, table) else {
        return false;
    };
    let mut noted = false;
    // Child by child: a child can be linked in only one family at a time.
    while let Some(child) = children.pop() {
        child.relatives.parent.store(parent.pid, Ordering::Relaxed);
        child.family.lock().exit_signal = nr::SIGCHLD;
        noted |= signal::orphan::child_left(table, process, &child);
        let has_ended = child.end.done.load(Ordering::SeqCst);
        if has_ended && parent.signals.ignores_children() {
            table.processes.remove(&child.pid);
            continue;
        }
        if has_ended {
            let status = child.end.status.lock().unwrap_or(ExitStatus::exited(0));
            signal::child_ended(&parent, nr::SIGCHLD, &child, status);
        }
        parent.family.lock().children.push(child);
    }
    parent.children_changed.wake_all();
    noted
}

/// Kills every process but `program`, whose last thread calls this, and waits for their end.
pub(super) fn end_all(program: &Process) {
    let init = {
        let mut table = TABLE.lock();
        adopt_children(program, &mut table);
        table.processes.get(&INIT).cloned()
    };
    let gone = || {
        let mut gone = true;
        process::each(|other| {
            let remains = matches!(other.pid, INIT | PROGRAM);
            if !remains && !other.end.done.load(Ordering::SeqCst) {
                exit::kill(other, ExitStatus::killed(nr::SIGKILL));
                gone = false;
            }
        });
        gone.then_some(())
    };
    // Orphans become children of process 1, and in the end all processes are.
    if let Some(init) = init {
        wait_in_any_case(&init.children_changed, gone);
        let children = core::mem::take(&mut init.family.lock().children);
        drop(children);
    }
    let mut table = TABLE.lock();
    let left = (table.threads.remove(&INIT), core::mem::take(&mut table.processes));
    drop(table);
    drop(left);
}
