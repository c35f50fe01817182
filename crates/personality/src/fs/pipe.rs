//! Pipes, named and anonymous, and connected sockets, which are pairs of pipes.
//!
//! A pipe is a ring of bytes. The pipe is writable while `PIPE_BUF` bytes fit; a write of at most
//! this size is not split.

use super::stream::{Events, Stream};
use super::transfer::Transfer;
use crate::errno::{Errno, Result};
use crate::task::wait::{Changes, Stop, wait_until};
use faultless_bare::sync::Mutex;
use faultless_collections::{Arc, Vec};

/// The most bytes of an atomic write.
const PIPE_BUF: usize = 4096;
/// The default capacity in bytes.
const CAPACITY: usize = 64 << 10;
/// The largest capacity in bytes.
const MAX_CAPACITY: usize = 1 << 20;

/// A pipe.
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
    /// The number of ends opened so far (readers, writers), for an opener waiting for the other
    /// end.
    opened: [u64; 2],
    /// Set while a [`Front`] exists.
    is_claimed: bool,
}

/// How a pipe is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// By name (`mkfifo`). Opening one end waits for the other.
    Named,
    /// By a descriptor, in `/proc/PID/fd`. Both ends have existed from the start, so opening does
    /// not wait.
    Anonymous,
}

impl State {
    fn room(&self) -> usize {
        self.capacity - self.used
    }

    /// Returns whether the other side of a reader, or else of a writer, is open, and the number of
    /// times it was opened.
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

    /// The bytes in the ring, in order.
    fn filled(&self) -> (&[u8], &[u8]) {
        let first = (self.ring.len() - self.head).min(self.used);
        (&self.ring[self.head..self.head + first], &self.ring[..self.used - first])
    }

    /// Reads the available bytes into `to`. As on Linux, a part of [`PIPE_BUF`] bytes that does not
    /// fit into `to` as a whole is not read.
    ///
    /// # Errors
    /// `EFAULT`: no byte was read.
    fn read(&mut self, to: &mut Transfer<'_>) -> Result<()> {
        let (first, second) = self.filled();
        let (before, wanted) = (to.progress(), to.left().min(self.used as u64));
        let mut taken = to.put_bytes(first);
        if taken == first.len() as u64 {
            taken += to.put_bytes(second);
        }
        if taken < wanted {
            taken -= taken % PIPE_BUF as u64;
            to.uncount(&before);
            to.count(taken);
        }
        if taken == 0 {
            return Err(Errno::EFAULT);
        }
        self.advance(taken as usize);
        Ok(())
    }

    /// Removes the first `taken` bytes, if the pipe was not closed in between.
    fn advance(&mut self, taken: usize) {
        let taken = taken.min(self.used);
        self.used -= taken;
        self.head = if self.used == 0 { 0 } else { (self.head + taken) % self.ring.len() };
    }

    /// Returns whether there are bytes to read; not at the end of file.
    ///
    /// # Errors
    /// `EAGAIN`: there may be bytes later.
    const fn has_bytes(&self) -> Result<bool> {
        match (self.is_claimed, self.used, self.writers) {
            (true, ..) => Err(Errno::EAGAIN),
            (false, 0, 0) => Ok(false),
            (false, 0, _) => Err(Errno::EAGAIN),
            (false, ..) => Ok(true),
        }
    }

    /// Appends up to `len` of the bytes to `bytes`.
    ///
    /// # Errors
    /// `ENOMEM`.
    fn copy_to(&self, len: usize, bytes: &mut Vec<u8>) -> Result {
        let len = len.min(self.used);
        bytes.try_reserve(len)?;
        let (first, second) = self.filled();
        let split = len.min(first.len());
        bytes.try_extend_from_slice(&first[..split])?;
        bytes.try_extend_from_slice(&second[..len - split])?;
        Ok(len as u64)
    }

    /// Appends `len` bytes from `from`. As on Linux, a part of [`PIPE_BUF`] bytes that cannot be
    /// copied as a whole is not written.
    fn write(&mut self, from: &mut Transfer<'_>, len: usize) {
        let end = self.used + len;
        while self.used < end {
            let (before, part) = (from.progress(), PIPE_BUF.min(end - self.used));
            if !self.fill(from, part) {
                from.uncount(&before);
                return;
            }
            self.used += part;
        }
    }

    /// Copies `len` bytes from `from` to the room behind the contents. Returns whether all of the
    /// bytes could be copied.
    fn fill(&mut self, from: &mut Transfer<'_>, len: usize) -> bool {
        let size = self.ring.len();
        let start = (self.head + self.used) % size;
        let first = len.min(size - start);
        let (below, above) = self.ring.split_at_mut(start);
        let mut copies = |bytes: &mut [u8]| from.take_bytes(bytes) == bytes.len() as u64;
        copies(&mut above[..first]) && copies(&mut below[..len - first])
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

    /// Returns a pipe that announces its changes in `changes`.
    fn announcing(kind: Kind, changes: Arc<Changes>) -> Result<Arc<Self>> {
        let state = State {
            ring: Vec::new(),
            head: 0,
            used: 0,
            capacity: CAPACITY,
            readers: 0,
            writers: 0,
            opened: [0; 2],
            is_claimed: false,
        };
        Ok(Arc::try_new(Self { kind, state: Mutex::new(state), changes })?)
    }

    /// Returns an end of the pipe.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn end(this: &Arc<Self>, reads: bool, writes: bool) -> Result<Arc<End>> {
        Ok(Self::enter(this, reads, writes)?.0)
    }

    /// Returns an end of the pipe, and the previous state of the other side: whether it was open,
    /// and the number of times it was opened.
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
        // A reader of an anonymous pipe sees the end of file even if it was opened later.
        let missed = if this.kind == Kind::Named && !met { before } else { 0 };
        // The end is counted before the allocation: if this fails, dropping `end` undoes the count.
        let end = End { pipe: this.clone(), reads, writes, missed };
        this.changes.announce();
        Ok((Arc::try_new(end)?, met, before))
    }

    /// Opens an end. For a named pipe this waits until the other end is opened.
    ///
    /// # Errors
    /// `ENXIO`: no reader, and non-blocking. [`Errno::RESTART`]. `ENOMEM`.
    pub fn open(this: &Arc<Self>, reads: bool, writes: bool, at_once: bool) -> Result<Arc<End>> {
        let (end, met, before) = Self::enter(this, reads, writes)?;
        if met || this.kind == Kind::Anonymous || reads && (writes || at_once) {
            return Ok(end);
        }
        if at_once {
            return Err(Errno::ENXIO);
        }
        // An end that was opened and closed in between counts, too.
        let came = || {
            let (there, opened) = this.state.lock().other_side(reads);
            (there || opened != before).then_some(())
        };
        match wait_until(&[&this.changes.queue], None, came) {
            Ok(()) => Ok(end),
            Err(Stop::Signal | Stop::Timeout) => Err(Errno::RESTART),
        }
    }

    /// Returns the capacity in bytes.
    pub fn capacity(&self) -> usize {
        self.state.lock().capacity
    }

    /// Sets the capacity to at least `wanted` bytes, rounded up to a power of two of pages.
    ///
    /// # Errors
    /// `EBUSY`: the pipe contains more bytes. `EPERM`: above the limit. `EINVAL`: not a size, as on
    /// Linux. `ENOMEM`.
    pub fn set_capacity(&self, wanted: usize) -> Result<usize> {
        if wanted > 1 << 31 {
            return Err(Errno::EINVAL);
        }
        let capacity = wanted.max(PIPE_BUF).next_power_of_two();
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
        if !state.has_bytes()? {
            return Ok(0);
        }
        state.read(to)?;
        drop(state);
        self.changes.announce();
        Ok(to.moved())
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

    /// Copies up to `len` bytes without consuming them, and appends the bytes to `bytes`; 0 at the
    /// end of file.
    ///
    /// # Errors
    /// `EAGAIN`: the pipe is empty. `ENOMEM`.
    pub fn look(&self, len: usize, bytes: &mut Vec<u8>) -> Result {
        let state = self.state.lock();
        if state.has_bytes()? { state.copy_to(len, bytes) } else { Ok(0) }
    }

    /// Claims the bytes at the front, so that the caller can move the bytes without a lock: until
    /// the result is dropped, other readers wait. `None` at the end of file.
    ///
    /// # Errors
    /// `EAGAIN`: the pipe is empty, or claimed by another reader.
    pub fn claim(&self) -> Result<Option<Front<'_>>> {
        let mut state = self.state.lock();
        if !state.has_bytes()? {
            return Ok(None);
        }
        state.is_claimed = true;
        Ok(Some(Front { pipe: self, taken: 0 }))
    }

    /// The events of a reading end, which was opened after `missed` writers.
    fn ready_to_read(&self, missed: u64) -> Events {
        let state = self.state.lock();
        let mut ready = Events::empty();
        if state.is_claimed {
            return ready;
        }
        ready.set(Events::READ, state.used != 0);
        // A non-blocking reader of a named pipe sees no end of file before the first writer.
        ready.set(Events::HUP, state.writers == 0 && state.opened[1] != missed);
        ready
    }

    /// The events of a writing end.
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

/// The bytes at the front of a pipe, claimed by one reader.
#[derive(Debug)]
pub struct Front<'a> {
    pipe: &'a Pipe,
    /// The number of bytes to consume at the end of the claim.
    taken: usize,
}

impl Front<'_> {
    /// Appends up to `len` bytes to `bytes`.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn look(&self, len: usize, bytes: &mut Vec<u8>) -> Result {
        self.pipe.state.lock().copy_to(len, bytes)
    }

    /// Ends the claim, and consumes the first `taken` bytes.
    pub fn consume(mut self, taken: u64) {
        self.taken = taken as usize;
    }
}

impl Drop for Front<'_> {
    fn drop(&mut self) {
        let mut state = self.pipe.state.lock();
        state.is_claimed = false;
        state.advance(self.taken);
        drop(state);
        self.pipe.changes.announce();
    }
}

/// An end of a pipe, or both ends of a named pipe.
#[derive(Debug)]
pub struct End {
    /// Its pipe.
    pub pipe: Arc<Pipe>,
    reads: bool,
    writes: bool,
    /// For a named pipe whose other end was closed when this one was opened: the number of times
    /// the other end had been opened.
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

/// One of two connected sockets, made of a pipe for each direction.
#[derive(Debug)]
pub struct Socket {
    input: Mutex<Option<Arc<End>>>,
    output: Mutex<Option<Arc<End>>>,
    changes: Arc<Changes>,
}

impl Socket {
    /// Two connected sockets.
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

    /// Returns the pipe from which the socket receives, unless receiving has ended.
    pub fn input(&self) -> Option<Arc<Pipe>> {
        Some(self.input.lock().as_ref()?.pipe.clone())
    }

    /// Ends receiving or sending.
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
