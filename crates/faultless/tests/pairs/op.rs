//! The operations of a case, and their executor: a program's thread on a CPU.
//!
//! Addresses are page numbers, relative to the first page of a window of eight pages across a
//! boundary: a multiple of 2 MiB, or of a larger power of two. In a space of its own, the window
//! lies below the start of automatic placement, so a placed mapping can land in the window. See
//! [`Arena`].

use super::arena::Arena;
use super::file::Words;
use super::seen::{AreaSeen, areas};
use faultless::FrameUse;
use faultless::{
    Access, Advice, Backing, CacheMode, Cpu, DeviceMemory, Errno, Error, FaultError, FaultKind,
    FrameNumber, Machine, MapFlags, MemPolicy, MemoryLock, NodeSet, Object, PAGE_SIZE,
    PrivateCopies, Prot, RemapFlags, Setting, Shared, Space, VirtRange, VmaFlags,
};
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// The start of automatic placement, which goes down.
pub const TOP: u64 = 0x7fff_f7ff_f000;
/// Pages of the window.
pub const WINDOW: i64 = 8;
/// The page of the window at the boundary.
pub const BOUNDARY: i64 = 4;
/// Distant pages: the source and target of moves, by side.
pub const APART: [i64; 2] = [-1 << 12, -1 << 13];

/// The range of a huge leaf: the 2 MiB below the boundary.
pub const LEAF: Span = Span::new(BOUNDARY - 512, 512);

pub const RW: Prot = Prot::READ.union(Prot::WRITE);
pub const RWX: Prot = RW.union(Prot::EXEC);
pub const NONE: Prot = Prot::empty();

/// Some pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    pub at: i64,
    pub pages: i64,
}

impl Span {
    pub const fn new(at: i64, pages: i64) -> Self {
        Self { at, pages }
    }

    pub const fn end(self) -> i64 {
        self.at + self.pages
    }

    /// Its pages.
    pub fn each(self) -> impl Iterator<Item = Self> {
        (self.at..self.end()).map(|at| Self::new(at, 1))
    }

    pub fn bytes(self) -> u64 {
        self.pages as u64 * PAGE_SIZE
    }
}

/// Of what takes pages out of the object: the first part, the second, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The pages leave the object.
    First,
    /// The mappings of the pages are unmapped.
    Second,
    Both,
}

/// The address argument of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum How {
    Hint,
    Fixed,
    NoReplace,
    Placed,
}

/// A call or an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// `mmap` of anonymous memory.
    Map(Span, How, Prot, MapFlags),
    Unmap(Span),
    Protect(Span, Prot),
    /// `mremap` of the span to the given number of pages; the last page is the target.
    Remap(Span, i64, RemapFlags, i64),
    Advise(Span, Advice),
    /// [`Advice::Free`] while another CPU has references to some of the pages, a bit for each: the
    /// referenced pages are unchanged.
    FreeBut(Span, u32),
    /// `mlock`, or `munlock`.
    Lock(Span, MemoryLock),
    /// `mbind`: new pages come from the last node.
    Bind(Span),
    /// No space may have more VMAs than this one has, until the pair is over.
    NoMoreAreas,
    /// Blocks placement and growth above a page. The blocking mapping merges with no VMA.
    Roof(i64),
    /// The start of the heap.
    HeapAt(i64),
    Brk(i64),
    Load(i64),
    Store(i64, u64),
    /// [`Load`](Self::Load) and [`Store`](Self::Store) from outside, which grow no stack.
    ReadOutside(i64),
    WriteOutside(i64, u64),
    /// The first part of an access: the fault.
    Fault(i64, Access),
    /// The first effect of a fault, which remains if the fault is overtaken: a stack grows down to
    /// the page, and a VMA gets an anon_vma.
    Begin(i64, Access),
    /// The same two of an access from outside, which does so only where something is mapped.
    FaultOutside(i64, Access),
    BeginOutside(i64, Access),
    /// The case gets its object: a page for each of the window, of which some are there.
    Object,
    /// The same, of a file: a page for each of the window, of which some were read.
    File,
    /// The same for a slow file: see [`file`](super::file).
    SlowFile,
    /// The same for program text: the file begins with the pages of [`LEAF`], and continues with
    /// the window's pages above.
    Text,
    /// Writes back stores to the file's pages.
    WriteBack(Span),
    /// Drops clean and unused pages of the file, which are read again on demand.
    DropClean(Span),
    /// Evicts pages of the file, with any number of mappings and after writeback if necessary. The
    /// pages are read again on demand.
    Evict(Span),
    /// Evicts the mapped pages, with any number of mappings; private pages are swapped out.
    SwapOut(Span),
    /// A kernel read of a page of the file, or a kernel write that returns the old word.
    ReadPage(i64),
    WritePage(i64, u64),
    /// The kernel overwrites a whole page of the file, which is not read first.
    Overwrite(i64, u64),
    /// Extends the object to the given number of pages.
    Extend(i64),
    /// `mmap` of the object: each page of the window shows the object's page of the same number.
    /// Text is executable.
    MapObject(Span, MapFlags),
    /// Resets the machine's device memory, if any: a page for each page of the window.
    Device,
    /// `mmap` of device memory: each page of the window shows the device's page of the same number.
    MapDevice(Span),
    /// A device load or store of the first word of a page, which is pinned for the access.
    PinRead(i64),
    PinWrite(i64, u64),
    /// Removes pages from the object: a truncation if private copies go too, otherwise a hole.
    Leave(Span, PrivateCopies, Part),
    /// Truncates the file behind the first byte of the page, which removes the pages beyond.
    EndIn(i64, Part),
    /// The effect of `MAP_POPULATE` on a page, whatever the mapping.
    Populate(i64),
    /// Moves each page to the other memory node, if the machine has two nodes and the page has no
    /// other user.
    MovePages(Span),
    /// Moves pages of the machine so that free frames are contiguous.
    Compact,
    /// A listing of the space.
    Maps,
    /// `mincore` of the page.
    InCore(i64),
    Fork,
    /// Ends one of the children created at the start.
    Exit,
    /// Drops a child, which ends with a later call.
    Drop,
}

/// The return value of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ret {
    Done,
    At(i64),
    /// The mapping is outside of the arena.
    Elsewhere,
    Word(u64),
    InCore(bool),
    Refused(Errno),
    Signal(FaultError),
    Areas(Vec<AreaSeen>),
}

impl fmt::Display for Ret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done => f.write_str("ok"),
            Self::At(page) => write!(f, "page {page}"),
            Self::Elsewhere => f.write_str("elsewhere"),
            Self::Word(word) => write!(f, "{word}"),
            Self::InCore(there) => f.write_str(if *there { "there" } else { "not there" }),
            Self::Refused(errno) => write!(f, "{errno:?}"),
            Self::Signal(error) => write!(f, "{error:?}"),
            Self::Areas(areas) => areas.iter().try_for_each(|area| write!(f, "{area}; ")),
        }
    }
}

impl From<Result<(), Error>> for Ret {
    fn from(result: Result<(), Error>) -> Self {
        result.map_or_else(|error| Self::Refused(error.errno), |()| Self::Done)
    }
}

/// A program's thread on a CPU of some machine.
pub trait Hand {
    type Machine: faultless::Machine;
    /// A forked space.
    type Child: Send;

    fn space(&self) -> &Space<Self::Machine>;
    fn cpu(&self) -> &Cpu<'_, Self::Machine>;
    /// The location of the case.
    fn arena(&self) -> Arena;
    /// Takes a waiting interrupt.
    fn poll(&self);
    /// # Errors
    /// The program's signal.
    fn load(&self, addr: u64) -> Result<u64, FaultError>;
    /// # Errors
    /// The program's signal.
    fn store(&self, addr: u64, value: u64) -> Result<(), FaultError>;
    /// # Errors
    /// `ENOMEM`.
    fn fork(&self) -> Result<Self::Child, Errno>;
    fn exit(&self, child: Self::Child);
    fn space_of(child: &Self::Child) -> &Space<Self::Machine>;
    /// A random number below this.
    fn random(&self, below: usize) -> usize;
    /// The first of [`WINDOW`] frames of device memory, if the machine has some.
    fn device(&self) -> Option<FrameNumber> {
        None
    }
}

/// The objects of a case besides its space.
#[derive(Debug)]
pub struct Besides<C> {
    /// Children created at the start, one of which is ended by [`Op::Exit`].
    pub old: Mutex<Vec<C>>,
    /// Children created by each side.
    pub new: [Mutex<Vec<C>>; 2],
    /// The object, if the case needs one.
    pub object: OnceLock<Shared<Object>>,
    /// The store of the object, if the object is a file.
    pub words: OnceLock<Arc<Words>>,
}

impl<C> Default for Besides<C> {
    fn default() -> Self {
        Self {
            old: Mutex::default(),
            new: Default::default(),
            object: OnceLock::new(),
            words: OnceLock::new(),
        }
    }
}

impl<C> Besides<C> {
    /// Returns the store of the file, if it is slow now.
    pub fn slow(&self) -> Option<&Words> {
        self.words.get().map(|words| &**words).filter(|words| words.is_slow())
    }

    /// The number of a page of the window, or near it, in the object.
    pub fn index(&self, page: i64) -> u64 {
        (self.words.get().map_or(0, |words| words.below) + page) as u64
    }

    /// Returns the object's page numbers of a span.
    pub fn indices(&self, span: Span) -> Range<u64> {
        self.index(span.at)..self.index(span.end())
    }

    /// Acts as a kernel for a program whose access faults: during the read of the page, the thread
    /// waits, and then retries.
    fn await_page<H: Hand>(&self, hand: &H, at: i64, access: Access) {
        let (Some(words), space, cpu) = (self.slow(), hand.space(), hand.cpu()) else { return };
        let addr = hand.arena().addr(at);
        while space.page_at(cpu, addr).is_none()
            && space.fault_remote(cpu, addr, access) == Ok(FaultKind::Pending)
        {
            words.wait(hand);
        }
    }
}

/// Returns the first word of a frame, as a device accesses the frame.
fn device_word<H: Hand>(hand: &H, frame: FrameNumber) -> &AtomicU64 {
    let at = hand.cpu().vm().machine().frame_bytes(frame).cast::<u64>();
    // SAFETY: a word of device memory, or of a pinned page.
    unsafe { AtomicU64::from_ptr(at) }
}

/// Runs `access`, a device's access to the page at `at`, which is pinned for the access.
fn pinned<H: Hand>(hand: &H, at: i64, write: bool, access: impl Fn(&AtomicU64) -> Ret) -> Ret {
    match hand.space().pin(hand.cpu(), hand.arena().addr(at), 1, write) {
        Ok(pins) => access(device_word(hand, pins.frames()[0])),
        Err(error) => Ret::Refused(error.errno),
    }
}

/// The object of a case: of three pages two are there.
fn make_object<H: Hand>(hand: &H) -> Shared<Object> {
    let pages = WINDOW as u64;
    let object = Object::try_new(hand.cpu(), pages, 1).expect("memory for an object");
    for index in (0..pages).filter(|index| index % 3 != 2) {
        // SAFETY: the first word of a page without other users.
        let write = |at: *mut u8| unsafe { at.cast::<u64>().write(200 + index) };
        object.write_page(hand.cpu(), index, write).expect("memory for a page");
    }
    object
}

/// Compacts all memory, on a small machine in small blocks.
fn compact<M: Machine>(cpu: &Cpu<'_, M>) {
    #[cfg(shuttle)]
    cpu.compact_small(2);
    #[cfg(not(shuttle))]
    cpu.compact(u64::MAX);
}

impl Op {
    /// Runs the operation. New children go to `born`.
    pub fn apply<H: Hand>(
        self,
        hand: &H,
        besides: &Besides<H::Child>,
        born: &Mutex<Vec<H::Child>>,
    ) -> Ret {
        let (space, cpu, arena) = (hand.space(), hand.cpu(), hand.arena());
        let addr = |page| arena.addr(page);
        let mapped = |result: Result<u64, Error>| {
            result.map_or_else(|error| Ret::Refused(error.errno), |at| Ret::At(arena.page(at)))
        };
        hand.poll();
        match self {
            Self::Map(span, how, prot, more) => {
                let (start, how) = match how {
                    How::Hint => (addr(span.at), MapFlags::empty()),
                    How::Fixed => (addr(span.at), MapFlags::FIXED),
                    How::NoReplace => (addr(span.at), MapFlags::FIXED_NOREPLACE),
                    How::Placed => (0, MapFlags::empty()),
                };
                mapped(space.mmap(cpu, start, span.bytes(), prot, how | more | MapFlags::ANONYMOUS))
            }
            Self::Unmap(span) => space.munmap(cpu, addr(span.at), span.bytes()).into(),
            Self::Protect(span, prot) => {
                space.mprotect(cpu, addr(span.at), span.bytes(), prot).into()
            }
            Self::Remap(old, pages, flags, to) => {
                let (new, to) = (pages as u64 * PAGE_SIZE, addr(to));
                let to = if flags.contains(RemapFlags::FIXED) { to } else { 0 };
                mapped(space.mremap(cpu, addr(old.at), old.bytes(), new, flags, to))
            }
            Self::Advise(span, advice) => {
                match space.madvise(cpu, addr(span.at), span.bytes(), advice) {
                    // Pages that are in use for a moment are not replaced by a leaf.
                    Err(Error { errno: Errno::EAGAIN, .. }) if advice == Advice::Collapse => {
                        Ret::Done
                    }
                    done => done.into(),
                }
            }
            Self::FreeBut(span, used) => {
                let used = span.each().enumerate().filter(|(bit, _)| used >> bit & 1 != 0);
                let pins = used.map(|(_, page)| (addr(page.at), page.bytes()));
                // Only pages in memory: a pin would swap in other pages.
                let pins = pins.filter(|(at, _)| space.page_at(cpu, *at).is_some());
                let pin = |(at, len)| space.pin(cpu, at, len, false);
                let _pins = pins.map(pin).collect::<Vec<_>>();
                Self::Advise(span, Advice::Free).apply(hand, besides, born)
            }
            Self::SwapOut(span) => space.evict(cpu, addr(span.at), span.bytes()).into(),
            Self::Lock(span, lock) => space.mlock(cpu, addr(span.at), span.bytes(), lock).into(),
            Self::Bind(span) => {
                let regions = cpu.vm().machine().regions().iter();
                let last = regions.map(|region| region.node).max().unwrap_or(0);
                let policy = MemPolicy::Preferred(NodeSet::only(last));
                space.mbind(cpu, addr(span.at), span.bytes(), policy).into()
            }
            Self::NoMoreAreas => {
                let count = areas(hand, |area| area).len();
                cpu.vm().set(Setting::MaxMapCount(count as u64));
                Ret::Done
            }
            Self::Roof(page) => {
                let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
                Self::Map(arena.roof(page), How::Fixed, Prot::EXEC, flags)
                    .apply(hand, besides, born)
            }
            Self::HeapAt(page) => space.set_heap_start(cpu, addr(page)).into(),
            Self::Brk(to) => Ret::At(arena.page(space.brk(cpu, addr(to)))),
            Self::Load(at) => {
                besides.await_page(hand, at, Access::Read);
                hand.load(addr(at)).map_or_else(Ret::Signal, Ret::Word)
            }
            Self::Store(at, value) => {
                besides.await_page(hand, at, Access::Write);
                hand.store(addr(at), value).map_or_else(Ret::Signal, |()| Ret::Done)
            }
            Self::ReadOutside(at) => {
                let mut word = [0; 8];
                let read = space.read_bytes(cpu, addr(at), &mut word);
                let word = |()| Ret::Word(u64::from_ne_bytes(word));
                read.map_or_else(|error| Ret::Signal(error.error), word)
            }
            Self::WriteOutside(at, value) => {
                let written = space.write_bytes(cpu, addr(at), &value.to_ne_bytes());
                written.map_or_else(|error| Ret::Signal(error.error), |()| Ret::Done)
            }
            Self::Fault(at, access) => {
                space.fault_remote(cpu, addr(at), access).map_or_else(Ret::Signal, |_| Ret::Done)
            }
            Self::Begin(at, access) => {
                let (start, there) = (addr(at), space.page_at(cpu, addr(at)));
                // A store to a page that is not private to the VMA, a zero page or an object's
                // page, also faults.
                let other = there.is_some_and(|page| page.usage != FrameUse::Anon);
                let begins = there.is_none() || other && access == Access::Write;
                let swapped = space.swapped_pages(cpu);
                // A page in the swap area is not made, but comes back.
                let comes_back = || space.swapped_pages(cpu) != swapped;
                if begins && space.fault_remote(cpu, start, access).is_ok() && !comes_back() {
                    let emptied = space.madvise(cpu, start, PAGE_SIZE, Advice::DontNeedLocked);
                    return match other {
                        true => Self::Fault(at, Access::Read).apply(hand, besides, born),
                        false => emptied.into(),
                    };
                }
                Ret::Done
            }
            Self::FaultOutside(at, _) | Self::BeginOutside(at, _)
                if !space.is_mapped(cpu, VirtRange::page(addr(at))) =>
            {
                Ret::Done
            }
            Self::FaultOutside(at, access) => Self::Fault(at, access).apply(hand, besides, born),
            Self::BeginOutside(at, access) => Self::Begin(at, access).apply(hand, besides, born),
            Self::Object => {
                besides.object.get_or_init(|| make_object(hand));
                Ret::Done
            }
            Self::File | Self::SlowFile | Self::Text => {
                besides.object.get_or_init(|| self.make_file(hand, besides));
                Ret::Done
            }
            Self::WriteBack(_)
            | Self::DropClean(_)
            | Self::Evict(_)
            | Self::ReadPage(_)
            | Self::WritePage(..)
            | Self::Overwrite(..)
            | Self::Extend(_) => {
                let Some(object) = besides.object.get() else {
                    return Ret::Refused(Errno::EINVAL);
                };
                loop {
                    // Another CPU may be reading the page, whatever the store.
                    match (self.of_file(hand, besides, object), besides.words.get()) {
                        (Ret::Refused(Errno::EAGAIN), Some(words)) => words.wait(hand),
                        (done, _) => return done,
                    }
                }
            }
            Self::MapObject(span, flags) => {
                let Some(object) = besides.object.get() else {
                    return Ret::Refused(Errno::EINVAL);
                };
                let first = besides.index(span.at);
                let backing = Backing { object, first, may_write: true };
                let flags = flags | MapFlags::FIXED;
                let prot = if besides.index(0) == 0 { RW } else { RWX };
                mapped(space.mmap_object(cpu, addr(span.at), span.bytes(), prot, flags, backing))
            }
            Self::Device => {
                for (number, frame) in (300..).zip(hand.device().into_iter().flat_map(window)) {
                    device_word(hand, frame).store(number, Ordering::Relaxed);
                }
                Ret::Done
            }
            Self::MapDevice(span) => {
                let Some(frame) = hand.device().and_then(|it| window(it).nth(span.at as usize))
                else {
                    return Ret::Refused(Errno::EINVAL);
                };
                let cache = CacheMode::Uncached;
                let device = DeviceMemory { first: frame, cache, tag: 2, may_write: true };
                let flags = MapFlags::SHARED | MapFlags::FIXED;
                // SAFETY: device memory of the test machine, without other users and without
                // caches.
                mapped(unsafe {
                    space.mmap_device(cpu, addr(span.at), span.bytes(), RW, flags, device)
                })
            }
            Self::PinRead(at) => {
                pinned(hand, at, false, |word| Ret::Word(word.load(Ordering::Relaxed)))
            }
            Self::PinWrite(at, value) => pinned(hand, at, true, |word| {
                word.store(value, Ordering::Relaxed);
                Ret::Done
            }),
            Self::Leave(span, copies, part) => {
                let Some(object) = besides.object.get() else {
                    return Ret::Refused(Errno::EINVAL);
                };
                let ends = copies == PrivateCopies::Drop;
                let Range { start, end } = besides.indices(span);
                let pages = start..if ends { u64::MAX } else { end };
                match part {
                    Part::Second => {}
                    _ if ends => {
                        object.set_len(cpu, pages.start * PAGE_SIZE).expect("a shorter one");
                    }
                    _ => object.punch(cpu, pages.clone()).expect("a hole"),
                }
                if part != Part::First {
                    space.revoke(cpu, object, pages, copies);
                }
                Ret::Done
            }
            Self::EndIn(at, part) => {
                let Some(object) = besides.object.get() else {
                    return Ret::Refused(Errno::EINVAL);
                };
                let last = besides.index(at);
                if part != Part::Second {
                    object.set_len(cpu, last * PAGE_SIZE + 1).expect("a shorter one");
                }
                if part != Part::First {
                    space.revoke(cpu, object, last + 1..u64::MAX, PrivateCopies::Drop);
                }
                Ret::Done
            }
            Self::Populate(at) => {
                let mut advice = Advice::PopulateRead;
                space.each_area(cpu, VirtRange::page(addr(at)), |area| {
                    if !area.flags.contains(VmaFlags::SHARED) && area.prot.contains(Prot::WRITE) {
                        advice = Advice::PopulateWrite;
                    }
                    false
                });
                space.madvise(cpu, addr(at), PAGE_SIZE, advice).into()
            }
            Self::MovePages(span) => {
                let pages: Vec<_> = span.each().map(|page| addr(page.at)).collect();
                let mut nodes = vec![Err(Errno::ENOENT); pages.len()];
                space.page_nodes(cpu, &pages, &mut nodes);
                for (page, node) in pages.iter().zip(nodes) {
                    let mut status = [Ok(0)];
                    // With one node there is no target.
                    let _ = node
                        .map(|node| space.move_pages(cpu, &[*page], 1 - node, true, &mut status));
                }
                Ret::Done
            }
            Self::Compact => {
                compact(cpu);
                Ret::Done
            }
            Self::Maps => Ret::Areas(areas(hand, |area| area.without_name())),
            Self::InCore(at) => {
                let mut there = false;
                match space.mincore(cpu, addr(at), PAGE_SIZE, |it| there = it) {
                    Ok(()) => Ret::InCore(there),
                    Err(error) => Ret::Refused(error.errno),
                }
            }
            Self::Fork => match hand.fork() {
                Ok(child) => {
                    born.lock().unwrap().push(child);
                    Ret::Done
                }
                Err(errno) => Ret::Refused(errno),
            },
            Self::Exit => {
                let child = besides.old.lock().unwrap().pop();
                let Some(child) = child else { return Ret::Refused(Errno::EINVAL) };
                hand.exit(child);
                Ret::Done
            }
            Self::Drop => {
                let child = besides.old.lock().unwrap().pop();
                child.map_or(Ret::Refused(Errno::EINVAL), |_| Ret::Done)
            }
        }
    }

    /// Runs the operation for a case without further objects.
    pub fn alone<H: Hand>(self, hand: &H) -> Ret {
        let none = Besides::default();
        self.apply(hand, &none, &none.old)
    }
}

/// Returns the frames of device memory from `first` on.
fn window(first: FrameNumber) -> impl Iterator<Item = FrameNumber> {
    (first.0..first.0 + WINDOW as u32).map(FrameNumber)
}
