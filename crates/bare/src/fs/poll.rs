//! Waiting for any of several files.

use super::file::File;
use super::stream::{Changes, Events};
use crate::heap::try_push;
use crate::syscall::{Errno, Result};
use crate::task::wait::{Stop, WaitQueue, wait_until};
use crate::time;
use alloc::sync::Arc;
use alloc::vec::Vec;

/// Waits until `ready` gives something, which is asked again whenever one of `files` changes; `None` when
/// the deadline, in nanoseconds since boot, passed first.
///
/// # Errors
/// `Errno::RESTART_UNHANDLED`: a signal came first. `ENOMEM`.
pub fn wait_for<'a, R>(
    files: impl Iterator<Item = &'a Arc<File>>,
    deadline: Option<u64>,
    ready: impl FnMut() -> Option<R>,
) -> Result<Option<R>> {
    let mut changes: Vec<Arc<Changes>> = Vec::new();
    let mut again = None;
    for stream in files.filter_map(|file| file.stream()) {
        stream.watch(&mut changes)?;
        again = again.or_else(|| stream.look_again().map(|_| stream.clone()));
    }
    let look_again = || again.as_ref().and_then(|stream| stream.look_again());
    wait_for_changes(&changes, deadline, look_again, ready)
}

/// As [`wait_for`], where it is known already what announces changes.
///
/// # Errors
/// `Errno::RESTART_UNHANDLED`: a signal came first. `ENOMEM`.
pub fn wait_for_changes<R>(
    changes: &[Arc<Changes>],
    deadline: Option<u64>,
    look_again: impl Fn() -> Option<u64>,
    mut ready: impl FnMut() -> Option<R>,
) -> Result<Option<R>> {
    let mut queues: Vec<&WaitQueue> = Vec::new();
    changes.iter().try_for_each(|changes| try_push(&mut queues, &changes.queue))?;
    // A file may be watched many times, but is to be waited for once.
    queues.sort_unstable_by_key(|queue| core::ptr::from_ref(*queue));
    queues.dedup_by_key(|queue| core::ptr::from_ref(*queue));
    loop {
        let until = [deadline, look_again()].into_iter().flatten().min();
        match wait_until(&queues, until, &mut ready) {
            Ok(result) => return Ok(Some(result)),
            Err(Stop::Signal) => {
                return Err(deadline.map_or(Errno::RESTART_UNHANDLED, time::interrupted));
            }
            Err(Stop::Timeout) if until == deadline => return Ok(None),
            Err(Stop::Timeout) => {}
        }
    }
}

/// Which of the events that are `wanted`, or are told in any case, `file` is ready for.
pub fn ready(file: &File, wanted: Events) -> Events {
    file.ready() & (wanted | Events::ALWAYS | Events::NVAL)
}
