//! Streams, which have no position: pipes, events, the console, devices.
//!
//! The operations of a stream do not wait. [`read`] and [`write`](fn@write) wait for all of them, so that
//! waiting is written once: a change of a stream is announced on its [`Changes`], and a
//! waiter tries again after each announcement.

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
        /// There is something to read, or the end of file.
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
        /// The other end of a socket will write no more.
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

/// A stream. Its operations do not wait, but fail with `EAGAIN`.
pub trait Stream: Any + fmt::Debug + Send + Sync {
    /// Copies what is there to `to`; 0 at the end of file.
    ///
    /// # Errors
    /// `EAGAIN`: nothing is there yet. Others as `read`.
    fn read(&self, to: &mut Transfer<'_>) -> Result {
        let _ = to;
        Err(Errno::EINVAL)
    }

    /// Copies from `from` as many bytes as fit.
    ///
    /// # Errors
    /// `EAGAIN`: nothing fits. Others as `write`.
    fn write(&self, from: &mut Transfer<'_>) -> Result {
        let _ = from;
        Err(Errno::EINVAL)
    }

    /// Its present events.
    fn ready(&self) -> Events;

    /// Where changes of `ready` are announced; none if it never changes.
    fn changes(&self) -> Option<&Arc<Changes>> {
        None
    }

    /// As `changes`, for several.
    ///
    /// # Errors
    /// `ENOMEM`.
    fn watch(&self, all: &mut Vec<Arc<Changes>>) -> Result<()> {
        Ok(self.changes().cloned().map_or(Ok(()), |changes| try_push(all, changes))?)
    }

    /// A count that grows with each edge, for edge-triggered epoll; none if there
    /// are no edges.
    fn edges(&self) -> Option<u64> {
        self.changes().map(|changes| changes.count())
    }

    /// When to check again without an announcement, in nanoseconds since boot. If this becomes
    /// earlier, that is announced.
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

/// As [`wait`], and if a number of changes is given, until there were more: the stream may be ready, but not for as much as the caller has.
fn wait_since(stream: &dyn Stream, wanted: Events, seen: Option<u64>) -> Result<()> {
    let changes = stream.changes();
    let place = changes.map(|changes| Place::at(&changes.queue));
    let as_seen = || seen.is_some() && changes.map(|changes| changes.count()) == seen;
    let ready = || {
        let now = stream.ready();
        (now.intersects(Events::ALWAYS) || now.intersects(wanted) && !as_seen()).then_some(())
    };
    wait_and_look_again(place.as_slice(), None, || stream.look_again(), ready).map_err(|stop| {
        debug_assert_eq!(stop, Stop::Signal, "there is no deadline");
        Errno::RESTART
    })
}

/// As [`wait_at`], but `ready` is also called again at the times that `look_again` returns.
///
/// # Errors
/// Why the wait ended early.
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

/// Reads what is there; waits for something unless `at_once`.
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

/// As [`write`](fn@write); `tell` enables `SIGPIPE`.
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
