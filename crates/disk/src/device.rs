//! The disk: a virtio block device with one queue.

use crate::extent::OneByOne;
use crate::memory::Memory;
use crate::place::Place;
use alloc::boxed::Box;
use bitflags::bitflags;
use core::array;
use core::fmt;
use core::hint::spin_loop;
use core::ptr::NonNull;
use core::slice;
use faultless::{Buffer, Errno, PAGE_SIZE, Reading, StoreError, try_box};
use faultless_bare::paging::{DEVICES, direct};
use faultless_bare::sync::Mutex;
use faultless_bare::{boot, ioapic, percpu};
use faultless_collections::{Arc, OutOfMemory, Vec};
use virtio_drivers::queue::VirtQueue;
use virtio_drivers::transport::mmio::MmioTransport;
use virtio_drivers::transport::{DeviceType, Transport};

/// The most pages of one request.
pub const MOST_SEGMENTS: usize = 64;
/// Descriptors of the queue. A request takes one for each page, and two more.
const DESCRIPTORS: usize = 256;
/// The most requests at a time, and so the most runs.
const REQUESTS: usize = 64;
/// Bytes of a sector, in which positions on the disk are counted.
const SECTOR: u64 = 512;
/// The queue's number.
const QUEUE: u16 = 0;
/// Where the device's configuration has its capacity in sectors, and the most segments of a request.
const CAPACITY: usize = 0;
const SEGMENTS: usize = 12;
/// The status of a request that succeeded, and one that no device gives.
const DONE: u8 = 0;
const UNKNOWN: u8 = 0xff;

bitflags! {
    /// What this driver can use of what the device offers.
    #[derive(Debug)]
    struct Features: u64 {
        /// The configuration says how many segments a request may have.
        const SEGMENTS = 1 << 2;
        /// The device conforms to version 1 of the specification.
        const VERSION_1 = 1 << 32;
    }
}

/// Pages to be read.
#[derive(Debug)]
pub(crate) struct Order {
    /// The pages in memory.
    pub reading: Reading,
    /// The first on the disk.
    pub page: u64,
    /// Bytes that the disk has.
    pub bytes: usize,
    /// To be set if several pages cannot be read at once.
    pub one_by_one: Arc<OneByOne>,
}

/// An order that the disk works on.
struct Run {
    order: Order,
    /// The requests that have not ended.
    left: usize,
    failed: bool,
}

/// A part of a run, as the device gets it.
struct Request {
    /// The kind of the request (0: to read), a reserved word, and the first sector.
    header: [u8; 16],
    status: u8,
    /// The number of its run.
    run: usize,
    /// Which pages of the run.
    first: usize,
    pages: usize,
    /// Its first descriptor, while the device has it.
    token: Option<u16>,
}

struct Device {
    transport: MmioTransport<'static>,
    queue: VirtQueue<Memory, DESCRIPTORS>,
    /// They do not move: the device has addresses in them.
    requests: Vec<Request>,
    runs: Vec<Option<Run>>,
    segments: usize,
    pages: u64,
    wake: fn(u64),
}

/// The disk, once it has started. Holders do not wait.
static DISK: Mutex<Option<Box<Device>>> = Mutex::new(None);

/// Why the disk cannot be used.
#[derive(Debug)]
pub enum StartError {
    /// The command line's word does not say where a device is.
    Word(&'static str),
    /// No interrupt controller has this line.
    Line(u32),
    /// The device says so.
    Device(virtio_drivers::Error),
    /// There is no memory.
    Memory,
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Word(word) => {
                write!(f, "virtio_mmio.device={word} is not SIZE@ADDRESS:LINE of a device")
            }
            Self::Line(line) => write!(f, "no interrupt controller has line {line}"),
            Self::Device(error) => write!(f, "the device: {error}"),
            Self::Memory => f.write_str("there is no memory"),
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

/// Starts the disk that the command line names; returns whether there is one. When a read has ended, `wake` is called with
/// [its name](Reading::id). Called once, by the CPU that is to be interrupted.
///
/// # Errors
/// Why the disk cannot be used.
pub fn start(wake: fn(u64)) -> Result<bool, StartError> {
    for word in boot::words("virtio_mmio.device") {
        let place = Place::parse(word).ok_or(StartError::Word(word))?;
        let end = place.address.checked_add(place.size as u64).filter(|&end| end <= 4 << 30);
        if place.address < DEVICES || !place.address.is_multiple_of(PAGE_SIZE / 8) || end.is_none()
        {
            return Err(StartError::Word(word));
        }
        let registers = NonNull::new(direct(place.address).cast()).ok_or(StartError::Word(word))?;
        // SAFETY: the command line says that the registers are there. They are mapped for ever, and nobody else uses them.
        let found = unsafe { MmioTransport::new(registers, place.size) };
        // A place without a device is no error.
        let Ok(transport) = found else { continue };
        if transport.device_type() == DeviceType::Block {
            let device = Device::start(transport, wake)?;
            if !ioapic::route(place.line) {
                return Err(StartError::Line(place.line));
            }
            *DISK.lock() = Some(device);
            return Ok(true);
        }
    }
    Ok(false)
}

/// The pages of the disk; 0 if there is none.
pub fn pages() -> u64 {
    DISK.lock().as_ref().map_or(0, |device| device.pages)
}

/// Whether no read is under way.
pub fn is_idle() -> bool {
    DISK.lock().as_ref().is_none_or(|device| device.runs.iter().all(Option::is_none))
}

/// The disk has interrupted this CPU: completes what it has done.
pub fn interrupted() {
    if let Some(device) = &mut *DISK.lock() {
        device.transport.ack_interrupt();
    }
    poll();
}

/// Completes the reads that the disk has done. The caller holds no lock of the subsystem, and none that `wake` takes.
pub fn poll() {
    while let Some((run, wake)) = next_done() {
        run.end(wake);
    }
}

fn next_done() -> Option<(Run, fn(u64))> {
    let mut disk = DISK.lock();
    let device = disk.as_mut()?;
    let wake = device.wake;
    Some((device.next_done()?, wake))
}

/// Has the disk carry out `order`. The caller holds no lock. If there is no disk, the order is dropped, and its pages cannot be read.
pub(crate) fn read(order: Order) {
    let pages = order.bytes.div_ceil(PAGE_SIZE as usize);
    let (mut order, mut run, mut done) = (Some(order), None, 0);
    loop {
        if let Some(device) = &mut *DISK.lock() {
            run = run.or_else(|| device.begin(&mut order, pages));
            if let Some(run) = run {
                done += device.request(run, done..pages);
            }
        } else {
            return;
        }
        if done == pages {
            return;
        }
        // The queue is full.
        poll();
        percpu::cpu().serve_flushes();
        spin_loop();
    }
}

impl Run {
    fn end(self, wake: fn(u64)) {
        let Order { reading, bytes, one_by_one, .. } = self.order;
        let id = reading.id();
        let read = match self.failed {
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
    /// Calls `then` with what the device reads and what it writes for a request whose pages are `buffers`.
    fn lend<R>(
        &mut self,
        buffers: &[Buffer],
        then: impl for<'a> FnOnce(&'a [&'a [u8]], &'a mut [&'a mut [u8]]) -> R,
    ) -> R {
        let mut written: [&mut [u8]; MOST_SEGMENTS + 1] = array::from_fn(|_| &mut [][..]);
        for (part, buffer) in written.iter_mut().zip(buffers) {
            let start = direct(buffer.frame.phys());
            // SAFETY: a frame of a read that is under way, which is the read's alone. The slice serves to tell the device the address.
            *part = unsafe { slice::from_raw_parts_mut(start, PAGE_SIZE as usize) };
        }
        written[buffers.len()] = slice::from_mut(&mut self.status);
        then(&[&self.header], &mut written[..=buffers.len()])
    }
}

impl Device {
    // The queue is large: its copies are to leave the stack.
    #[inline(never)]
    fn start(
        mut transport: MmioTransport<'static>,
        wake: fn(u64),
    ) -> Result<Box<Self>, StartError> {
        let features = transport.begin_init(Features::all());
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
            run: 0,
            first: 0,
            pages: 0,
            token: None,
        };
        let requests = Vec::try_from_iter((0..REQUESTS).map(request))?;
        let runs = Vec::try_from_iter((0..REQUESTS).map(|_| None))?;
        let segments = segments.clamp(1, MOST_SEGMENTS);
        let pages = sectors * SECTOR / PAGE_SIZE;
        Ok(try_box(Self { transport, queue, requests, runs, segments, pages, wake })?)
    }

    /// Takes the order, for so many pages, as a run, and returns its number; `None`: there are too many runs.
    fn begin(&mut self, order: &mut Option<Order>, pages: usize) -> Option<usize> {
        let at = self.runs.iter().position(Option::is_none)?;
        let left = pages.div_ceil(self.segments);
        self.runs[at] = order.take().map(|order| Run { order, left, failed: false });
        Some(at)
    }

    /// Asks the device for as many of `pages` of the run as the queue takes, and returns how many.
    fn request(&mut self, run: usize, pages: core::ops::Range<usize>) -> usize {
        let Some(Run { order, .. }) = &self.runs[run] else { return 0 };
        let mut first = pages.start;
        while first < pages.end
            && let Some(request) = self.requests.iter_mut().find(|it| it.token.is_none())
        {
            let count = (pages.end - first).min(self.segments);
            let sector = (order.page + first as u64) * (PAGE_SIZE / SECTOR);
            request.header[8..].copy_from_slice(&sector.to_le_bytes());
            request.status = UNKNOWN;
            (request.run, request.first, request.pages) = (run, first, count);
            let buffers = &order.reading.buffers()[first..first + count];
            // SAFETY: the frames are the read's, and the request is the device's, until `next_done` has popped it; neither moves.
            let token = request.lend(buffers, |read, write| unsafe { self.queue.add(read, write) });
            let Ok(token) = token else { break };
            request.token = Some(token);
            first += count;
        }
        if first != pages.start && self.queue.should_notify() {
            self.transport.notify(QUEUE);
        }
        first - pages.start
    }

    /// Takes the requests that the device has done, up to and with the last of a run, which is returned.
    fn next_done(&mut self) -> Option<Run> {
        loop {
            let token = self.queue.peek_used()?;
            let request = self.requests.iter_mut().find(|it| it.token == Some(token));
            let request = request.expect("the disk has done what it was not asked for");
            let place = &mut self.runs[request.run];
            let run = place.as_mut().expect("a run ends with its last request");
            let pages = request.first..request.first + request.pages;
            let buffers = &run.order.reading.buffers()[pages];
            // SAFETY: those of `request`.
            let popped = request
                .lend(buffers, |read, write| unsafe { self.queue.pop_used(token, read, write) });
            popped.expect("it was just seen");
            request.token = None;
            // SAFETY: it is ours again; the device has written it.
            run.failed |= unsafe { (&raw const request.status).read_volatile() } != DONE;
            run.left -= 1;
            if run.left == 0 {
                return place.take();
            }
        }
    }
}
