//! Message queues: texts with a number each, received in order or by number.

use super::{Ids, seconds};
use crate::errno::{Errno, Result};
use crate::task::wait::{Stop, WaitQueue, wait_until};
use faultless_bare::sync::Mutex;
use faultless_collections::{Arc, Chain, Link, Linked, Vec};

/// The maximum number of queues.
pub const MOST: usize = 32000;
/// The maximum size of a message in bytes.
pub const LONGEST: u64 = 8192;
/// The default limit of a queue in bytes.
pub const CAPACITY: u64 = 16384;

/// A message.
#[derive(Debug)]
pub struct Message {
    /// The number of the message, from 1 on.
    pub kind: i64,
    /// Its text.
    pub text: Vec<u8>,
    link: Link<Self>,
}

/// The messages of a queue, as a kind of [chains](Chain).
#[derive(Debug)]
pub struct Queued;

// SAFETY: the field has no other use.
unsafe impl Linked<Queued> for Message {
    fn link(&self) -> &Link<Self> {
        &self.link
    }
}

impl Message {
    /// A message.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new(kind: i64, text: Vec<u8>) -> Result<Arc<Self>> {
        Ok(Arc::try_new(Self { kind, text, link: Link::new() })?)
    }
}

/// The state of a queue.
#[derive(Debug)]
pub struct State {
    messages: Chain<Message, Queued>,
    /// The total size of the messages in bytes.
    pub bytes: u64,
    /// The maximum total size.
    pub capacity: u64,
    /// The last sender and the last receiver; 0 if there is no such process.
    pub last_users: [u32; 2],
    /// The times of the last send and receive.
    pub times: [u64; 2],
    gone: bool,
}

/// A queue.
#[derive(Debug)]
pub struct Queue {
    state: Mutex<State>,
    changed: WaitQueue,
}

/// All queues.
pub static QUEUES: Mutex<Ids<Arc<Queue>>> = Mutex::new(Ids::new(MOST));

/// Which message to receive.
#[derive(Clone, Copy, Debug)]
pub enum Wanted {
    /// The first.
    Any,
    /// The first with this number.
    Kind(i64),
    /// The first with another number.
    Not(i64),
    /// The first with the lowest number, if this number is at most the limit.
    UpTo(i64),
}

impl State {
    /// The number of messages.
    pub fn len(&self) -> u64 {
        self.messages.len() as u64
    }

    fn find(&self, wanted: Wanted) -> Option<&Arc<Message>> {
        let mut all = self.messages.iter();
        match wanted {
            Wanted::Any => all.next(),
            Wanted::Kind(kind) => all.find(|message| message.kind == kind),
            Wanted::Not(kind) => all.find(|message| message.kind != kind),
            Wanted::UpTo(most) => {
                all.min_by_key(|message| message.kind).filter(|message| message.kind <= most)
            }
        }
    }
}

impl Queue {
    /// An empty queue.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new() -> Result<Arc<Self>> {
        let state = State {
            messages: Chain::new(),
            bytes: 0,
            capacity: CAPACITY,
            last_users: [0; 2],
            times: [0; 2],
            gone: false,
        };
        Ok(Arc::try_new(Self { state: Mutex::new(state), changed: WaitQueue::new() })?)
    }

    /// Calls `look` with the state.
    pub fn look<R>(&self, look: impl FnOnce(&State) -> R) -> R {
        look(&self.state.lock())
    }

    /// Sets the limit in bytes.
    pub fn set_capacity(&self, capacity: u64) {
        self.state.lock().capacity = capacity;
        self.changed.wake_all();
    }

    /// Waits until `act` returns a result, and then wakes other waiters.
    fn act<R>(
        &self,
        at_once: Option<Errno>,
        mut act: impl FnMut(&mut State) -> Result<Option<R>>,
    ) -> Result<R> {
        let done = wait_until(&[&self.changed], None, || {
            let mut state = self.state.lock();
            if state.gone {
                return Some(Err(Errno::EIDRM));
            }
            match (act(&mut state).transpose(), at_once) {
                (None, Some(errno)) => Some(Err(errno)),
                (done, _) => done,
            }
        });
        let done = match done {
            Ok(done) => done?,
            Err(Stop::Signal | Stop::Timeout) => return Err(Errno::RESTART_UNHANDLED),
        };
        self.changed.wake_all();
        Ok(done)
    }

    /// Appends a message when it fits.
    ///
    /// # Errors
    /// As `msgsnd`.
    pub fn send(&self, message: Arc<Message>, pid: u32, at_once: bool) -> Result<()> {
        let bytes = message.text.len() as u64;
        self.act(at_once.then_some(Errno::EAGAIN), |state| {
            if state.bytes + bytes > state.capacity || state.len() + 1 > state.capacity {
                return Ok(None);
            }
            state.messages.push(message.clone());
            state.bytes += bytes;
            (state.last_users[0], state.times[0]) = (pid, seconds());
            Ok(Some(()))
        })
    }

    /// Removes and returns the wanted message when it exists; a message longer than `most` only
    /// with `cut`.
    ///
    /// # Errors
    /// As `msgrcv`.
    pub fn receive(
        &self,
        wanted: Wanted,
        most: u64,
        cut: bool,
        pid: u32,
        at_once: bool,
    ) -> Result<Arc<Message>> {
        self.act(at_once.then_some(Errno::ENOMSG), |state| {
            let Some(message) = state.find(wanted).cloned() else { return Ok(None) };
            if !cut && message.text.len() as u64 > most {
                return Err(Errno::E2BIG);
            }
            state.messages.take(|it| Arc::ptr_eq(it, &message));
            state.bytes -= message.text.len() as u64;
            (state.last_users[1], state.times[1]) = (pid, seconds());
            Ok(Some(message))
        })
    }
}

/// Returns the queue with identifier `id`, for a caller that needs the permissions `wanted`.
///
/// # Errors
/// `EINVAL`: an unknown identifier. `EACCES`.
pub fn find(id: i32, wanted: u32) -> Result<Arc<Queue>> {
    QUEUES.lock().find_for(id, wanted).map(|(_, queue)| queue.clone())
}

/// Removes a queue, and wakes its waiters.
///
/// # Errors
/// `EINVAL`: an unknown identifier. `EPERM`.
pub fn remove(id: i32) -> Result<()> {
    let queue = {
        let mut queues = QUEUES.lock();
        queues.find_own(id)?;
        queues.remove(id)?
    };
    queue.state.lock().gone = true;
    queue.changed.wake_all();
    Ok(())
}
