//! Streams, which have no position: pipes, events, the console, devices.
//!
//! The operations of a stream do not wait. [`read`] and [`write`](fn@write) wait for all streams,
//! so that waiting is implemented once: a stream announces a change on its [`Changes`], and a
//! waiter retries after each announcement.

use super::transfer::Transfer;
use crate::errno::{Errno, Result};
use crate::signal::{self, Info};
use crate::task::current;
use crate::task::wait::{Changes, Place, Stop, wait_at};
use core::any::Any;
use core::fmt;
use faultless_bare::heap::try_push;
use faultless_collections::arc::Counted;
use faultless_collections::{Arc, Vec};
use linux_raw_sys::general as linux;

bitflags::bitflags! {
    /// The events of a stream, in the bits of `poll`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Events: u32 {
        /// Bytes to read are available, or the end of file is reached.
        const IN = linux::POLLIN;
        /// A write would not block.
        const OUT = linux::POLLOUT;
        /// The reader is gone.
        const ERR = linux::POLLERR;
        /// The writer is gone.
        const HUP = linux::POLLHUP;
        /// No such descriptor.
        const NVAL = linux::POLLNVAL;
        /// As `IN`.
        const RDNORM = linux::POLLRDNORM;
        /// As `OUT`.
        const WRNORM = linux::POLLWRNORM;
        /// The other end of a socket will write no more bytes.
        const RDHUP = linux::POLLRDHUP;
    }
}

impl Events {
    /// Ready to read.
    pub const READ: Self = Self::IN.union(Self::RDNORM);
    /// Ready to write.
    pub const WRITE: Self = Self::OUT.union(Self::WRNORM);
    /// Always reported.
    pub const ALWAYS: Self = Self::ERR.union(Self::HUP);
}

/// A stream. The operations do not wait, but fail with `EAGAIN`.
pub trait Stream: Any + fmt::Debug + Send + Sync {
    /// Copies the available bytes to `to`; 0 at the end of file.
    ///
    /// # Errors
    /// `EAGAIN`: no byte is available yet. Other errors as `read`.
    fn read(&self, to: &mut Transfer<'_>) -> Result {
        let _ = to;
        Err(Errno::EINVAL)
    }

    /// Copies from `from` as many bytes as fit.
    ///
    /// # Errors
    /// `EAGAIN`: no byte fits. Other errors as `write`.
    fn write(&self, from: &mut Transfer<'_>) -> Result {
        let _ = from;
        Err(Errno::EINVAL)
    }

    /// Returns the present events.
    fn ready(&self) -> Events;

    /// Returns the queue that announces changes of `ready`; `None` if the events never change.
    fn changes(&self) -> Option<&Arc<Changes>> {
        None
    }

    /// Returns [`changes`](Self::changes) for streams with several queues.
    ///
    /// # Errors
    /// `ENOMEM`.
    fn watch(&self, all: &mut Vec<Arc<Changes>>) -> Result<()> {
        Ok(self.changes().cloned().map_or(Ok(()), |changes| try_push(all, changes))?)
    }

    /// Returns a count that grows with each edge, for edge-triggered epoll; `None` if there are no
    /// edges.
    fn edges(&self) -> Option<u64> {
        self.changes().map(|changes| changes.count())
    }

    /// Returns the time of the next check without an announcement, in nanoseconds since boot. If
    /// this time becomes earlier, the stream announces the change.
    fn look_again(&self) -> Option<u64> {
        None
    }

    /// The bytes available to a read.
    ///
    /// # Errors
    /// `ENOTTY`: unknown.
    fn queued(&self) -> Result {
        Err(Errno::ENOTTY)
    }
}

/// Erases the type of a stream.
pub fn erase<T: Stream>(stream: Arc<T>) -> Arc<dyn Stream> {
    // SAFETY: the language's own cast.
    unsafe { Arc::cast(stream, |at| at as *mut Counted<dyn Stream>) }
}

/// Waits until `stream` is ready for any of `wanted`.
///
/// # Errors
/// [`Errno::RESTART`]: a signal came first.
pub fn wait(stream: &dyn Stream, wanted: Events) -> Result<()> {
    wait_since(stream, wanted, None)
}

/// Waits like [`wait`]. If `seen` is a number of changes, also waits for another change: the stream
/// may be ready, but not for all bytes of the caller.
fn wait_since(stream: &dyn Stream, wanted: Events, seen: Option<u64>) -> Result<()> {
    let changes = stream.changes();
    let place = changes.map(|changes| Place::at(&changes.queue));
    let as_seen = || seen.is_some() && changes.map(|changes| changes.count()) == seen;
    let ready = || {
        let now = stream.ready();
        (now.intersects(Events::ALWAYS) || now.intersects(wanted) && !as_seen()).then_some(())
    };
    wait_and_look_again(place.as_slice(), None, || stream.look_again(), ready).map_err(|stop| {
        debug_assert_eq!(stop, Stop::Signal, "a wait without a deadline");
        Errno::RESTART
    })
}

/// Waits like [`wait_at`], but also calls `ready` at the times returned by `look_again`.
///
/// # Errors
/// The reason for an early end of the wait.
pub fn wait_and_look_again<R>(
    places: &[Place<'_>],
    deadline: Option<u64>,
    look_again: impl Fn() -> Option<u64>,
    mut ready: impl FnMut() -> Option<R>,
) -> core::result::Result<R, Stop> {
    let until = || [deadline, look_again()].into_iter().flatten().min();
    loop {
        let at = until();
        let sooner = || until().is_some_and(|now| at.is_none_or(|at| now < at));
        let look = || ready().map(Some).or_else(|| sooner().then_some(None));
        match wait_at(places, at, look) {
            Ok(Some(result)) => return Ok(result),
            Err(Stop::Timeout) if at == deadline => return Err(Stop::Timeout),
            Ok(None) | Err(Stop::Timeout) => {}
            Err(Stop::Signal) => return Err(Stop::Signal),
        }
    }
}

/// Reads the available bytes; waits for the first byte unless `at_once`.
pub fn read(stream: &dyn Stream, to: &mut Transfer<'_>, at_once: bool) -> Result {
    loop {
        match stream.read(to) {
            Err(Errno::EAGAIN) if !at_once => wait(stream, Events::IN)?,
            result => return result,
        }
    }
}

/// Writes everything, and waits as often as needed; with `at_once`, writes what fits.
/// A write without a reader also sends `SIGPIPE`.
pub fn write(stream: &dyn Stream, from: &mut Transfer<'_>, at_once: bool) -> Result {
    write_with(stream, from, at_once, true)
}

/// Writes like [`write`](fn@write); `tell` enables `SIGPIPE`.
pub fn write_with(
    stream: &dyn Stream,
    from: &mut Transfer<'_>,
    at_once: bool,
    tell: bool,
) -> Result {
    loop {
        let seen = stream.changes().map(|changes| changes.count());
        let stop = match stream.write(from) {
            Ok(_) if from.left() == 0 => return from.result(),
            Ok(_) | Err(Errno::EAGAIN) if !at_once => match wait_since(stream, Events::OUT, seen) {
                Ok(()) => continue,
                Err(errno) => errno,
            },
            Ok(_) => return from.result(),
            Err(errno) => errno,
        };
        if from.moved() != 0 {
            return Ok(from.moved());
        }
        if stop == Errno::EPIPE && tell {
            signal::send_thread(&current().arc(), Info::kernel(linux::SIGPIPE));
        }
        return Err(stop);
    }
}
