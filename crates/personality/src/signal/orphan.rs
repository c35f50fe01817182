//! The signals caused by the end of a process: to children that requested one, and to stopped
//! process groups that become orphaned.
//!
//! Parents are known while the process table is locked, but signals cannot be sent under this lock,
//! because sending may lock the table. So the signals are first noted, and [`send_noted`] sends the
//! noted signals.

use super::info::Info;
use super::send::send_process;
use crate::task::process::{TABLE, Table};
use crate::task::relatives::INIT;
use crate::task::{Process, current};
use core::sync::atomic::Ordering;
use faultless_collections::Arc;
use linux_raw_sys::general as linux;

/// The group is orphaned, and a member was stopped.
const GROUP: u32 = 1;
/// The parent has ended, and the process requested a signal for this case.
const PARENT: u32 = 2;

/// Notes a reason to send `process` a signal.
fn note(process: &Process, what: u32) {
    process.signals.orphaned.fetch_or(what, Ordering::Relaxed);
}

fn group_of(process: &Process) -> u32 {
    process.relatives.group.load(Ordering::Relaxed)
}

fn session_of(process: &Process) -> u32 {
    process.relatives.session.load(Ordering::Relaxed)
}

/// Returns whether `parent` keeps the group of `child` from being orphaned: the parent is in
/// another group of the same session.
fn connects(parent: &Process, child: &Process) -> bool {
    group_of(parent) != group_of(child) && session_of(parent) == session_of(child)
}

/// Returns the members of a group that have not ended, without the process `but`.
fn members(table: &Table, group: u32, but: u32) -> impl Iterator<Item = &Process> {
    let live = move |it: &&Process| {
        group_of(it) == group && it.pid != but && !it.end.done.load(Ordering::SeqCst)
    };
    table.processes.values().map(|process| &**process).filter(live)
}

/// Returns whether a group is orphaned, without the process `but` (0: with all processes). As on
/// Linux, process 1 does not count as a parent.
pub(super) fn is_orphaned(table: &Table, group: u32, but: u32) -> bool {
    !members(table, group, but).any(|process| {
        let parent = process.parent();
        parent != INIT && table.processes.get(&parent).is_some_and(|it| connects(it, process))
    })
}

/// Notes the signals to send because `parent`, which is ending, is no longer the parent of `child`.
/// Returns whether there are any.
pub fn child_left(table: &Table, parent: &Process, child: &Process) -> bool {
    let asked = child.relatives.death_signal.load(Ordering::Relaxed) != 0;
    if asked {
        note(child, PARENT);
    }
    note_group(table, parent, child, 0) || asked
}

/// Notes the signals to send because `process` ends. Returns whether there are any.
pub fn process_leaves(table: &Table, process: &Process) -> bool {
    let parent = table.processes.get(&process.parent());
    parent.is_some_and(|parent| note_group(table, parent, process, process.pid))
}

/// Notes the signals for the group of `process`, if the group is stopped, and only `parent` kept it
/// from being orphaned.
fn note_group(table: &Table, parent: &Process, process: &Process, but: u32) -> bool {
    let group = group_of(process);
    let stopped = |process: &Process| process.signals.job.is_stopped();
    let noted = connects(parent, process)
        && is_orphaned(table, group, but)
        && members(table, group, but).any(stopped);
    if noted {
        members(table, group, but).for_each(|process| note(process, GROUP));
    }
    noted
}

/// Sends the noted signals. The caller holds no lock.
pub fn send_noted() {
    let is_noted = |process: &&Arc<Process>| process.signals.orphaned.load(Ordering::Relaxed) != 0;
    let next = || TABLE.lock().processes.values().find(is_noted).cloned();
    while let Some(process) = next() {
        let noted = process.signals.orphaned.swap(0, Ordering::Relaxed);
        let signal = process.relatives.death_signal.load(Ordering::Relaxed);
        if noted & PARENT != 0 && signal != 0 {
            send_process(&process, Info::sent(signal, &current().process, false));
        }
        if noted & GROUP != 0 {
            send_process(&process, Info::kernel(linux::SIGHUP));
            send_process(&process, Info::kernel(linux::SIGCONT));
        }
    }
}
