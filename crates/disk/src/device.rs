//! The disks: virtio block devices with one queue each.

use crate::extent::OneByOne;
use crate::memory::Memory;
use crate::place::Place;
use alloc::boxed::Box;
use bitflags::bitflags;
use core::array;
use core::fmt;
use core::hint::spin_loop;
use core::ops::Range;
use core::ptr::NonNull;
use core::slice;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;
use faultless::{Buffer, Errno, FrameNumber, PAGE_SIZE, Reading, StoreError, WriteRun, try_box};
use faultless_bare::arch::clock;
use faultless_bare::paging::{DEVICES, direct};
use faultless_bare::sync::Mutex;
use faultless_bare::{boot, ioapic, percpu};
use faultless_collections::{Arc, OutOfMemory, Vec};
use virtio_drivers::queue::VirtQueue;
use virtio_drivers::transport::mmio::MmioTransport;
use virtio_drivers::transport::{DeviceType, Transport};

/// The maximum number of pages of one request.
pub const MOST_SEGMENTS: usize = 64;
/// Descriptors of a queue. A request takes one for each page, and two more.
const DESCRIPTORS: usize = 256;
/// The maximum number of concurrent requests, and so of runs.
const REQUESTS: usize = 64;
/// Bytes of a sector, in which positions on the disk are counted.
const SECTOR: u64 = 512;
/// The kinds of requests.
const READ: u32 = 0;
const WRITE: u32 = 1;
/// The queue's number.
const QUEUE: u16 = 0;
/// The offsets, in the device's configuration, of the capacity in sectors and of the maximum number
/// of segments of a request.
const CAPACITY: usize = 0;
const SEGMENTS: usize = 12;
/// The command line's word for the place of the swap disk.
const SWAP: &str = "swap";
/// The status of a successful request, and a status that no device returns.
const DONE: u8 = 0;
const UNKNOWN: u8 = 0xff;

bitflags! {
    /// The device's features used by this driver.
    #[derive(Debug)]
    struct Features: u64 {
        /// The configuration contains the maximum number of segments of a request.
        const SEGMENTS = 1 << 2;
        /// The device is read-only.
        const READ_ONLY = 1 << 5;
        /// The device conforms to version 1 of the specification.
        const VERSION_1 = 1 << 32;
    }
}

/// The possible disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Disk {
    /// The disk with the files, which is only read.
    Files,
    /// The disk for swapped pages.
    Swap,
}

/// Pages to be read.
#[derive(Debug)]
pub(crate) struct Order {
    /// The pages in memory.
    pub reading: Reading,
    /// The disk.
    pub disk: Disk,
    /// The first page on the disk.
    pub page: u64,
    /// The number of bytes that the disk has.
    pub bytes: usize,
    /// Set if a read of several pages fails.
    pub one_by_one: Arc<OneByOne>,
}

/// The work of a disk.
enum Work {
    Read(Order),
    /// Write pages, from this page on. The requesting CPU waits for the end.
    Write(u64),
}

/// Work that a disk has begun.
struct Run {
    work: Work,
    /// The number of unfinished requests.
    left: usize,
    failed: bool,
}

/// A part of a run, in the device's format.
struct Request {
    /// The kind of the request, a reserved word, and the first sector.
    header: [u8; 16],
    status: u8,
    kind: u32,
    /// The number of the request's run.
    run: usize,
    /// The number of pages: the first elements of `frames`.
    pages: usize,
    frames: [FrameNumber; MOST_SEGMENTS],
    /// The first descriptor, while the device has the request.
    token: Option<u16>,
}

struct Device {
    transport: MmioTransport<'static>,
    queue: VirtQueue<Memory, DESCRIPTORS>,
    /// The requests do not move: the device has addresses in them.
    requests: Vec<Request>,
    runs: Vec<Option<Run>>,
    segments: usize,
    pages: u64,
    wake: fn(u64),
}

/// The started disks. The holder of a lock does not wait.
static DISKS: [Mutex<Option<Box<Device>>>; 2] = [const { Mutex::new(None) }; 2];

/// The reason why a disk cannot be used.
#[derive(Debug)]
pub enum StartError {
    /// The command line's word is no valid place of a disk.
    Word(&'static str),
    /// The disk should be written, and is read-only.
    ReadOnly,
    /// No interrupt controller has this line.
    Line(u32),
    /// The device reports an error.
    Device(virtio_drivers::Error),
    /// Out of memory.
    Memory,
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Word(word) => {
                write!(f, "{word} on the command line is not SIZE@ADDRESS:LINE of a disk")
            }
            Self::ReadOnly => f.write_str("the disk is read-only"),
            Self::Line(line) => write!(f, "no interrupt controller has line {line}"),
            Self::Device(error) => write!(f, "the device: {error}"),
            Self::Memory => f.write_str("out of memory"),
        }
    }
}

impl From<OutOfMemory> for StartError {
    fn from(_: OutOfMemory) -> Self {
        Self::Memory
    }
}

impl From<virtio_drivers::Error> for StartError {
    fn from(error: virtio_drivers::Error) -> Self {
        Self::Device(error)
    }
}

/// Starts the disk with the files, if the command line names one; returns whether it does. When a
/// read has ended, the driver calls `wake` with [the read's name](Reading::id). Called once, by the
/// CPU that receives the interrupts.
///
/// # Errors
/// The reason why the disk cannot be used.
pub fn start(wake: fn(u64)) -> Result<bool, StartError> {
    // QEMU may list all devices.
    let swap = boot::words(SWAP).next().and_then(Place::parse);
    for word in boot::words("virtio_mmio.device") {
        let place = Place::parse(word).ok_or(StartError::Word(word))?;
        if swap.is_none_or(|swap| swap.address != place.address)
            && Disk::Files.start(place, word, wake)?
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Starts the swap disk, like [`start`].
///
/// # Errors
/// The reason why the disk cannot be used.
pub fn start_swap(wake: fn(u64)) -> Result<bool, StartError> {
    let Some(word) = boot::words(SWAP).next() else { return Ok(false) };
    let place = Place::parse(word).ok_or(StartError::Word(word))?;
    if Disk::Swap.start(place, word, wake)? { Ok(true) } else { Err(StartError::Word(word)) }
}

/// Returns the number of pages of the disk with the files; 0 without this disk.
pub fn pages() -> u64 {
    Disk::Files.pages()
}

/// Returns whether all disks are idle.
pub fn is_idle() -> bool {
    DISKS.iter().all(|disk| {
        let disk = disk.lock();
        disk.as_ref().is_none_or(|device| device.runs.iter().all(Option::is_none))
    })
}

/// Handles an interrupt of a disk: completes the finished reads.
pub fn interrupted() {
    for disk in &DISKS {
        if let Some(device) = &mut *disk.lock() {
            device.transport.ack_interrupt();
        }
    }
    poll();
}

/// Completes the finished reads of the disks. The caller holds no lock of the subsystem, and no
/// lock taken by `wake`.
pub fn poll() {
    for disk in &DISKS {
        let next_done = || {
            let mut disk = disk.lock();
            let device = disk.as_mut()?;
            let (order, failed) = device.next_done()?;
            Some((order, failed, device.wake))
        };
        while let Some((order, failed, wake)) = next_done() {
            order.end(failed, wake);
        }
    }
}

/// The total time for which CPUs have [waited](Waiting) for the disks, in nanoseconds.
static WAITED: AtomicU64 = AtomicU64::new(0);

/// Returns the total time for which CPUs have waited for the disks since the machine started, in
/// nanoseconds. The waits of threads do not count, because their CPUs do other work.
pub fn waited() -> u64 {
    WAITED.load(Relaxed)
}

/// The numbers of pages requested to be read, and to be written.
static MOVED: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// Returns the numbers of pages requested to be read, and to be written, since the machine started.
pub fn pages_moved() -> [u64; 2] {
    MOVED.each_ref().map(|pages| pages.load(Relaxed))
}

/// A CPU's wait for a disk: from the first turn to the drop.
#[derive(Default)]
struct Waiting {
    since: Option<u64>,
}

impl Waiting {
    /// Works during the wait: completes finished reads, and serves the flush requests of other
    /// CPUs.
    fn make_way(&mut self) {
        self.since.get_or_insert_with(clock::now);
        poll();
        percpu::cpu().serve_flushes();
        spin_loop();
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(since) = self.since {
            WAITED.fetch_add(clock::now().saturating_sub(since), Relaxed);
        }
    }
}

/// Makes the disk execute `order`. The caller holds no lock. Without a disk, the order is dropped,
/// and its pages cannot be read.
pub(crate) fn read(order: Order) {
    let (disk, pages) = (order.disk, order.bytes.div_ceil(PAGE_SIZE as usize));
    let (mut work, mut run, mut done) = (Some(Work::Read(order)), None, 0);
    let mut waiting = Waiting::default();
    loop {
        if let Some(device) = &mut *disk.device().lock() {
            run = run.or_else(|| device.begin(&mut work, pages));
            if let Some(run) = run {
                done += device.request(run, &[], done..pages);
            }
        } else {
            return;
        }
        if done == pages {
            return;
        }
        // The queue is full.
        waiting.make_way();
    }
}

/// Writes the pages of `run` to the disk from its page `page` on, and returns when the disk has the
/// pages. The caller holds no lock.
///
/// # Errors
/// `EIO`: at least one page was not written.
pub(crate) fn write(disk: Disk, page: u64, run: &WriteRun<'_>) -> Result<(), Errno> {
    let buffers = run.buffers();
    let (mut work, mut number, mut done) = (Some(Work::Write(page)), None, 0);
    let mut waiting = Waiting::default();
    loop {
        if let Some(device) = &mut *disk.device().lock() {
            number = number.or_else(|| device.begin(&mut work, buffers.len()));
            if let Some(number) = number {
                done += device.request(number, buffers, done..buffers.len());
                if let Some(written) = device.take_written(number) {
                    return written;
                }
            }
        } else {
            return Err(Errno::EIO);
        }
        waiting.make_way();
    }
}

impl Disk {
    fn device(self) -> &'static Mutex<Option<Box<Device>>> {
        &DISKS[self as usize]
    }

    /// Returns the disk's number of pages; 0 for a missing disk.
    pub(crate) fn pages(self) -> u64 {
        self.device().lock().as_ref().map_or(0, |device| device.pages)
    }

    /// Starts the device at `place`, parsed from `word`, as this disk; returns whether there is a
    /// disk.
    fn start(self, place: Place, word: &'static str, wake: fn(u64)) -> Result<bool, StartError> {
        let end = place.address.checked_add(place.size as u64).filter(|&end| end <= 4 << 30);
        if place.address < DEVICES || !place.address.is_multiple_of(PAGE_SIZE / 8) || end.is_none()
        {
            return Err(StartError::Word(word));
        }
        let registers = NonNull::new(direct(place.address).cast()).ok_or(StartError::Word(word))?;
        // SAFETY: by the command line, the registers are at this address. They are mapped
        // permanently, and have no other user: each of the two disks is started once, and the disks
        // are at different places.
        let found = unsafe { MmioTransport::new(registers, place.size) };
        // A place without a device is no error.
        let Ok(transport) = found else { return Ok(false) };
        if transport.device_type() != DeviceType::Block {
            return Ok(false);
        }
        let device = Device::start(transport, self == Self::Swap, wake)?;
        if !ioapic::route(place.line) {
            return Err(StartError::Line(place.line));
        }
        *self.device().lock() = Some(device);
        Ok(true)
    }
}

impl Order {
    fn end(self, failed: bool, wake: fn(u64)) {
        let Self { reading, bytes, one_by_one, .. } = self;
        let id = reading.id();
        let read = match failed {
            false => Ok(bytes),
            true if reading.buffers().len() == 1 => Err(Errno::EIO),
            true => {
                one_by_one.begin();
                Err(Errno::EAGAIN)
            }
        };
        reading.complete(percpu::cpu(), read.map_err(|errno| StoreError { done: 0, errno }));
        wake(id);
    }
}

impl Request {
    /// Calls `then` with the buffers that the device reads and the buffers that it writes.
    fn lend<R>(
        &mut self,
        then: impl for<'a> FnOnce(&'a [&'a [u8]], &'a mut [&'a mut [u8]]) -> R,
    ) -> R {
        let frames = &self.frames[..self.pages];
        let status = slice::from_mut(&mut self.status);
        if self.kind == WRITE {
            let mut read: [&[u8]; MOST_SEGMENTS + 1] = [&[]; MOST_SEGMENTS + 1];
            read[0] = &self.header;
            for (part, frame) in read[1..].iter_mut().zip(frames) {
                // SAFETY: a frame of a write in progress, whose page is kept by the caller of
                // `write`. The slice only passes the address to the device, and is never read: the
                // kernel may be storing to the frame.
                *part = unsafe { slice::from_raw_parts(direct(frame.phys()), PAGE_SIZE as usize) };
            }
            return then(&read[..=frames.len()], &mut [status]);
        }
        let mut written: [&mut [u8]; MOST_SEGMENTS + 1] = array::from_fn(|_| &mut [][..]);
        for (part, frame) in written.iter_mut().zip(frames) {
            let start = direct(frame.phys());
            // SAFETY: a frame of a read in progress, which belongs to this read alone. The slice
            // only passes the address to the device.
            *part = unsafe { slice::from_raw_parts_mut(start, PAGE_SIZE as usize) };
        }
        written[frames.len()] = status;
        then(&[&self.header], &mut written[..=frames.len()])
    }
}

impl Device {
    // The queue is large: its copies must leave the stack.
    #[inline(never)]
    fn start(
        mut transport: MmioTransport<'static>,
        is_written: bool,
        wake: fn(u64),
    ) -> Result<Box<Self>, StartError> {
        let features = transport.begin_init(Features::all());
        if is_written && features.contains(Features::READ_ONLY) {
            return Err(StartError::ReadOnly);
        }
        let segments = match features.contains(Features::SEGMENTS) {
            true => transport.read_config_space::<u32>(SEGMENTS)? as usize,
            false => MOST_SEGMENTS,
        };
        let sectors = transport.read_consistent(|| {
            let low = transport.read_config_space::<u32>(CAPACITY)?;
            let high = transport.read_config_space::<u32>(CAPACITY + 4)?;
            Ok(u64::from(high) << 32 | u64::from(low))
        })?;
        let queue = VirtQueue::new(&mut transport, QUEUE, false, false)?;
        transport.finish_init();
        let request = |_| Request {
            header: [0; 16],
            status: UNKNOWN,
            kind: READ,
            run: 0,
            pages: 0,
            frames: [FrameNumber(0); MOST_SEGMENTS],
            token: None,
        };
        let requests = Vec::try_from_iter((0..REQUESTS).map(request))?;
        let runs = Vec::try_from_iter((0..REQUESTS).map(|_| None))?;
        let segments = segments.clamp(1, MOST_SEGMENTS);
        let pages = sectors * SECTOR / PAGE_SIZE;
        Ok(try_box(Self { transport, queue, requests, runs, segments, pages, wake })?)
    }

    /// Takes the work, for `pages` pages, as a run, and returns the run's number; `None`: there are
    /// too many runs.
    fn begin(&mut self, work: &mut Option<Work>, pages: usize) -> Option<usize> {
        let at = self.runs.iter().position(Option::is_none)?;
        let left = pages.div_ceil(self.segments);
        self.runs[at] = work.take().map(|work| Run { work, left, failed: false });
        Some(at)
    }

    /// Passes as many of `pages` of the run to the device as the queue can take, and returns the
    /// number of passed pages. For a writing run, `written` contains the buffers.
    fn request(&mut self, run: usize, written: &[Buffer], pages: Range<usize>) -> usize {
        let Some(Run { work, .. }) = &self.runs[run] else { return 0 };
        let (kind, page, buffers) = match work {
            Work::Read(order) => (READ, order.page, order.reading.buffers()),
            Work::Write(page) => (WRITE, *page, written),
        };
        let mut first = pages.start;
        while first < pages.end
            && let Some(request) = self.requests.iter_mut().find(|it| it.token.is_none())
        {
            let count = (pages.end - first).min(self.segments);
            let sector = (page + first as u64) * (PAGE_SIZE / SECTOR);
            request.header[..4].copy_from_slice(&kind.to_le_bytes());
            request.header[8..].copy_from_slice(&sector.to_le_bytes());
            request.status = UNKNOWN;
            (request.kind, request.run, request.pages) = (kind, run, count);
            for (frame, buffer) in request.frames.iter_mut().zip(&buffers[first..first + count]) {
                *frame = buffer.frame;
            }
            // SAFETY: the frames belong to the run, and the request belongs to the device, until
            // `next_done` has popped the request; neither moves. Written pages are kept until
            // `write` returns, which waits for the pop.
            let token = request.lend(|read, write| unsafe { self.queue.add(read, write) });
            let Ok(token) = token else { break };
            request.token = Some(token);
            first += count;
        }
        if first != pages.start && self.queue.should_notify() {
            self.transport.notify(QUEUE);
        }
        MOVED[usize::from(kind == WRITE)].fetch_add((first - pages.start) as u64, Relaxed);
        first - pages.start
    }

    /// Takes the requests finished by the device, up to and including the last request of a read.
    /// Returns this read, and whether it failed.
    fn next_done(&mut self) -> Option<(Order, bool)> {
        loop {
            let token = self.queue.peek_used()?;
            let request = self.requests.iter_mut().find(|it| it.token == Some(token));
            let request = request.expect("the device finishes only requests of the driver");
            let place = &mut self.runs[request.run];
            let run = place.as_mut().expect("a run ends after its last request");
            // SAFETY: the buffers of `request`.
            let popped =
                request.lend(|read, write| unsafe { self.queue.pop_used(token, read, write) });
            popped.expect("the finished request");
            request.token = None;
            // SAFETY: the request belongs to the driver again; the device has written the status.
            run.failed |= unsafe { (&raw const request.status).read_volatile() } != DONE;
            run.left -= 1;
            // A writing run stays until its requester takes the result.
            if run.left == 0
                && let Some(Run { work: Work::Read(order), failed, .. }) =
                    place.take_if(|run| matches!(run.work, Work::Read(_)))
            {
                return Some((order, failed));
            }
        }
    }

    /// Ends a writing run if all its requests have ended; returns the result.
    fn take_written(&mut self, run: usize) -> Option<Result<(), Errno>> {
        let run = self.runs[run].take_if(|run| run.left == 0)?;
        Some(if run.failed { Err(Errno::EIO) } else { Ok(()) })
    }
}
