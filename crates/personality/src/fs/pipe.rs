//! Pipes, named and not, and the pairs of them that connected sockets are.
//!
//! A pipe is a ring of bytes. It is writable while as many bytes fit as are written in one piece
//! (`PIPE_BUF`); a write of no more than that is not split.

use super::stream::{Events, Stream};
use super::transfer::Transfer;
use crate::errno::{Errno, Result};
use crate::task::wait::{Changes, Stop, wait_until};
use faultless_bare::sync::Mutex;
use faultless_collections::{Arc, Vec};

/// Bytes that are written in one piece.
const PIPE_BUF: usize = 4096;
/// Bytes that a pipe holds, unless told otherwise.
const CAPACITY: usize = 64 << 10;
/// The most that it can be told to hold.
const MAX_CAPACITY: usize = 1 << 20;

/// Bytes on their way.
#[derive(Debug)]
pub struct Pipe {
    kind: Kind,
    state: Mutex<State>,
    changes: Arc<Changes>,
}

#[derive(Debug)]
struct State {
    /// Grows up to `capacity`.
    ring: Vec<u8>,
    head: usize,
    used: usize,
    capacity: usize,
    readers: u32,
    writers: u32,
    /// Ends that were ever opened: for who opens the other end.
    opened: [u64; 2],
}

/// Who finds a pipe to open it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Whoever knows its name: `mkfifo`. Who opens an end waits for the other.
    Named,
    /// Who has a descriptor of it, and opens that in `/proc/PID/fd`. Both ends were there from the start, so
    /// nobody waits.
    Anonymous,
}

impl State {
    fn room(&self) -> usize {
        self.capacity - self.used
    }

    /// Whether somebody is at the side that a reader, or else a writer, meets, and how many ever were.
    const fn other_side(&self, of_reader: bool) -> (bool, u64) {
        if of_reader {
            (self.writers != 0, self.opened[1])
        } else {
            (self.readers != 0, self.opened[0])
        }
    }

    /// Makes the ring hold `wanted` bytes.
    fn grow(&mut self, wanted: usize) -> Result<()> {
        if wanted <= self.ring.len() {
            return Ok(());
        }
        self.rebuild(wanted.next_power_of_two().min(self.capacity))
    }

    fn rebuild(&mut self, len: usize) -> Result<()> {
        if faultless_bare::heap::low() {
            return Err(Errno::ENOMEM);
        }
        let mut ring = Vec::try_with_capacity(len)?;
        let (first, second) = self.filled();
        ring.try_extend_from_slice(first)?;
        ring.try_extend_from_slice(second)?;
        ring.try_resize(len, 0)?;
        self.ring = ring;
        self.head = 0;
        Ok(())
    }

    /// The bytes on their way, in order.
    fn filled(&self) -> (&[u8], &[u8]) {
        let first = (self.ring.len() - self.head).min(self.used);
        (&self.ring[self.head..self.head + first], &self.ring[..self.used - first])
    }

    fn read(&mut self, to: &mut Transfer<'_>) {
        let (first, second) = self.filled();
        let mut taken = to.put_bytes(first);
        if taken == first.len() as u64 {
            taken += to.put_bytes(second);
        }
        self.used -= taken as usize;
        self.head = if self.used == 0 { 0 } else { (self.head + taken as usize) % self.ring.len() };
    }

    fn write(&mut self, from: &mut Transfer<'_>, len: usize) {
        let mut left = len;
        while left != 0 {
            let size = self.ring.len();
            let start = (self.head + self.used) % size;
            let part = left.min(size - start);
            let taken = from.take_bytes(&mut self.ring[start..start + part]) as usize;
            self.used += taken;
            if taken != part {
                return;
            }
            left -= part;
        }
    }
}

impl Pipe {
    /// An empty pipe without ends.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new(kind: Kind) -> Result<Arc<Self>> {
        Self::announcing(kind, Arc::try_new(Changes::default())?)
    }

    /// One that announces its changes in `changes`.
    fn announcing(kind: Kind, changes: Arc<Changes>) -> Result<Arc<Self>> {
        let state = State {
            ring: Vec::new(),
            head: 0,
            used: 0,
            capacity: CAPACITY,
            readers: 0,
            writers: 0,
            opened: [0; 2],
        };
        Ok(Arc::try_new(Self { kind, state: Mutex::new(state), changes })?)
    }

    /// An end of it.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn end(this: &Arc<Self>, reads: bool, writes: bool) -> Result<Arc<End>> {
        Ok(Self::enter(this, reads, writes)?.0)
    }

    /// An end of it, and what the other side was like just before: whether somebody was there, and how
    /// many ever were.
    fn enter(this: &Arc<Self>, reads: bool, writes: bool) -> Result<(Arc<End>, bool, u64)> {
        let (met, before) = {
            let mut state = this.state.lock();
            let before = state.other_side(reads);
            state.readers += u32::from(reads);
            state.writers += u32::from(writes);
            state.opened[0] += u64::from(reads);
            state.opened[1] += u64::from(writes);
            before
        };
        // A reader of a pipe without a name is told of its end even if it came after that.
        let missed = if this.kind == Kind::Named && !met { before } else { 0 };
        // Counted before it is made: without memory for it, its end is that of any.
        let end = End { pipe: this.clone(), reads, writes, missed };
        this.changes.announce();
        Ok((Arc::try_new(end)?, met, before))
    }

    /// Opens an end. A named pipe is waited for somebody at the other end of.
    ///
    /// # Errors
    /// `ENXIO`: nobody reads, and the call is not to wait. [`Errno::RESTART`]. `ENOMEM`.
    pub fn open(this: &Arc<Self>, reads: bool, writes: bool, at_once: bool) -> Result<Arc<End>> {
        let (end, met, before) = Self::enter(this, reads, writes)?;
        if met || this.kind == Kind::Anonymous || reads && (writes || at_once) {
            return Ok(end);
        }
        if at_once {
            return Err(Errno::ENXIO);
        }
        // Who came and left meanwhile was there too.
        let came = || {
            let (there, opened) = this.state.lock().other_side(reads);
            (there || opened != before).then_some(())
        };
        match wait_until(&[&this.changes.queue], None, came) {
            Ok(()) => Ok(end),
            Err(Stop::Signal | Stop::Timeout) => Err(Errno::RESTART),
        }
    }

    /// Bytes that it can hold.
    pub fn capacity(&self) -> usize {
        self.state.lock().capacity
    }

    /// Makes it hold at least `wanted` bytes, a power of two of pages.
    ///
    /// # Errors
    /// `EBUSY`: more are in it. `EPERM`: more than may be. `ENOMEM`.
    pub fn set_capacity(&self, wanted: usize) -> Result<usize> {
        let capacity = wanted.max(PIPE_BUF).checked_next_power_of_two().ok_or(Errno::EPERM)?;
        if capacity > MAX_CAPACITY {
            return Err(Errno::EPERM);
        }
        let mut state = self.state.lock();
        if capacity < state.used {
            return Err(Errno::EBUSY);
        }
        if capacity < state.ring.len() {
            state.rebuild(capacity)?;
        }
        state.capacity = capacity;
        drop(state);
        self.changes.announce();
        Ok(capacity)
    }

    fn read(&self, to: &mut Transfer<'_>) -> Result {
        let mut state = self.state.lock();
        if to.left() == 0 {
            return Ok(0);
        }
        if state.used == 0 {
            return if state.writers == 0 { Ok(0) } else { Err(Errno::EAGAIN) };
        }
        state.read(to);
        drop(state);
        self.changes.announce();
        to.result()
    }

    fn write(&self, from: &mut Transfer<'_>) -> Result {
        let mut state = self.state.lock();
        if from.left() == 0 {
            return Ok(0);
        }
        if state.readers == 0 {
            return Err(Errno::EPIPE);
        }
        let left = from.left() as usize;
        if state.room() < left.min(PIPE_BUF) {
            return Err(Errno::EAGAIN);
        }
        let len = left.min(state.room());
        let wanted = state.used + len;
        state.grow(wanted)?;
        state.write(from, len);
        drop(state);
        self.changes.announce();
        from.result()
    }

    /// Appends up to `len` of the bytes on their way to `bytes`; 0 at the end.
    ///
    /// # Errors
    /// `EAGAIN`: there are none yet. `ENOMEM`.
    pub fn look(&self, len: usize, bytes: &mut Vec<u8>) -> Result {
        let state = self.state.lock();
        if state.used == 0 {
            return if state.writers == 0 { Ok(0) } else { Err(Errno::EAGAIN) };
        }
        let len = len.min(state.used);
        bytes.try_reserve(len)?;
        let (first, second) = state.filled();
        let split = len.min(first.len());
        bytes.try_extend_from_slice(&first[..split])?;
        bytes.try_extend_from_slice(&second[..len - split])?;
        Ok(len as u64)
    }

    /// What an end that reads is ready for, which was opened when `missed` writers had come and gone.
    fn ready_to_read(&self, missed: u64) -> Events {
        let state = self.state.lock();
        let mut ready = Events::empty();
        ready.set(Events::READ, state.used != 0);
        // Who opened a named pipe without waiting is not told of an end before the beginning.
        ready.set(Events::HUP, state.writers == 0 && state.opened[1] != missed);
        ready
    }

    /// What the end that writes is ready for.
    fn ready_to_write(&self) -> Events {
        let state = self.state.lock();
        let mut ready = Events::empty();
        ready.set(Events::WRITE, state.room() >= PIPE_BUF);
        ready.set(Events::ERR, state.readers == 0);
        ready
    }

    fn close(&self, reads: bool, writes: bool) {
        let mut state = self.state.lock();
        state.readers -= u32::from(reads);
        state.writers -= u32::from(writes);
        if state.readers == 0 && state.writers == 0 {
            state.ring = Vec::new();
            state.head = 0;
            state.used = 0;
        }
        drop(state);
        self.changes.announce();
    }
}

/// An end of a pipe, or, of a named one, both.
#[derive(Debug)]
pub struct End {
    /// Its pipe.
    pub pipe: Arc<Pipe>,
    reads: bool,
    writes: bool,
    /// How many had been at the other end of a named pipe before this one was opened, if nobody was then.
    missed: u64,
}

impl Stream for End {
    fn read(&self, to: &mut Transfer<'_>) -> Result {
        self.pipe.read(to)
    }

    fn write(&self, from: &mut Transfer<'_>) -> Result {
        self.pipe.write(from)
    }

    fn ready(&self) -> Events {
        let mut ready = Events::empty();
        if self.reads {
            ready |= self.pipe.ready_to_read(self.missed);
        }
        if self.writes {
            ready |= self.pipe.ready_to_write();
        }
        ready
    }

    fn changes(&self) -> Option<&Arc<Changes>> {
        Some(&self.pipe.changes)
    }

    fn queued(&self) -> Result {
        Ok(self.pipe.state.lock().used as u64)
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.pipe.close(self.reads, self.writes);
    }
}

/// One of two connected sockets: a pipe each way.
#[derive(Debug)]
pub struct Socket {
    input: Mutex<Option<Arc<End>>>,
    output: Mutex<Option<Arc<End>>>,
    changes: Arc<Changes>,
}

impl Socket {
    /// Two of them.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_pair() -> Result<[Arc<Self>; 2]> {
        let changes = Arc::try_new(Changes::default())?;
        let pipe = || Pipe::announcing(Kind::Anonymous, changes.clone());
        let pipes = [pipe()?, pipe()?];
        let one = |at: usize| -> Result<Arc<Self>> {
            Ok(Arc::try_new(Self {
                input: Mutex::new(Some(Pipe::end(&pipes[at], true, false)?)),
                output: Mutex::new(Some(Pipe::end(&pipes[1 - at], false, true)?)),
                changes: changes.clone(),
            })?)
        };
        Ok([one(0)?, one(1)?])
    }

    /// Ends what it receives, or what it sends.
    pub fn shut_down(&self, input: bool, output: bool) {
        let input = if input { self.input.lock().take() } else { None };
        let output = if output { self.output.lock().take() } else { None };
        drop((input, output));
    }
}

impl Stream for Socket {
    fn read(&self, to: &mut Transfer<'_>) -> Result {
        let input = self.input.lock().clone();
        input.map_or(Ok(0), |input| input.read(to))
    }

    fn write(&self, from: &mut Transfer<'_>) -> Result {
        let output = self.output.lock().clone();
        output.map_or(Err(Errno::EPIPE), |output| output.write(from))
    }

    fn ready(&self) -> Events {
        let (input, output) = (self.input.lock().clone(), self.output.lock().clone());
        let mut ready = input.map_or(Events::HUP, |input| input.ready());
        let ended = ready.contains(Events::HUP);
        if ended {
            ready = Events::READ | Events::RDHUP;
        }
        let output = output.map_or(Events::ERR, |output| output.ready());
        let broken = output.contains(Events::ERR);
        ready |= if broken { Events::WRITE } else { output };
        ready.set(Events::HUP, ended && broken);
        ready
    }

    fn changes(&self) -> Option<&Arc<Changes>> {
        Some(&self.changes)
    }

    fn queued(&self) -> Result {
        let input = self.input.lock().clone();
        input.map_or(Ok(0), |input| input.queued())
    }
}
