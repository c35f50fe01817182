//! Waiting for any of several files.

use super::file::File;
use super::stream::{Events, Stream, wait_and_look_again};
use crate::errno::{Errno, Result};
use crate::task::wait::{Changes, Place, Stop};
use crate::time;
use faultless_bare::heap::try_push;
use faultless_collections::{Arc, Vec};

/// Waits until `ready` returns a result; `ready` is called again whenever one of `files` changes.
/// `None` if the deadline, in nanoseconds since boot, passed first.
///
/// # Errors
/// `Errno::RESTART_UNHANDLED`: a signal came first. `ENOMEM`.
pub fn wait_for<'a, R>(
    files: impl Iterator<Item = &'a Arc<File>>,
    deadline: Option<u64>,
    ready: impl FnMut() -> Option<R>,
) -> Result<Option<R>> {
    let mut changes: Vec<Arc<Changes>> = Vec::new();
    let mut streams: Vec<&dyn Stream> = Vec::new();
    for stream in files.filter_map(|file| file.stream()) {
        stream.watch(&mut changes)?;
        try_push(&mut streams, &**stream)?;
    }
    let look_again = || streams.iter().filter_map(|stream| stream.look_again()).min();
    wait_for_changes(&changes, deadline, look_again, ready)
}

/// As [`wait_for`], with given announcements.
///
/// # Errors
/// `Errno::RESTART_UNHANDLED`: a signal came first. `ENOMEM`.
pub fn wait_for_changes<R>(
    changes: &[Arc<Changes>],
    deadline: Option<u64>,
    look_again: impl Fn() -> Option<u64>,
    ready: impl FnMut() -> Option<R>,
) -> Result<Option<R>> {
    let mut places = Vec::new();
    changes.iter().try_for_each(|changes| try_push(&mut places, Place::at(&changes.queue)))?;
    // A file may be watched several times, but needs only one place.
    places.sort_unstable_by_key(|place| core::ptr::from_ref(place.queue()));
    places.dedup_by_key(|place| core::ptr::from_ref(place.queue()));
    match wait_and_look_again(&places, deadline, look_again, ready) {
        Ok(result) => Ok(Some(result)),
        Err(Stop::Timeout) => Ok(None),
        Err(Stop::Signal) => Err(deadline.map_or(Errno::RESTART_UNHANDLED, time::interrupted)),
    }
}

/// Returns the events of `file`, limited to `wanted` and the events that are always reported.
pub fn ready(file: &File, wanted: Events) -> Events {
    file.ready() & (wanted | Events::ALWAYS | Events::NVAL)
}
