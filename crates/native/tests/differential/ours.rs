//! The subsystem: the operations as a kernel makes them of the calls of spaces and objects.

use super::host::bytes_of;
use super::{Known, Op, Outcome, PAGE, Place, Shape, Side, Signal, View, bytes_to_write};
use faultless::{
    Advice, Backing, Errno, FaultError, MapFlags, Object, PrivateCopies, Prot, RemapFlags, Shared,
    Space,
};
use faultless_native::{NativeCpu, NativeMachine, Process, Signal as NativeSignal, Stop};
use std::fs::File;
use std::ops::Range;

/// The start of a table.
const TABLE: u64 = 0x4000_0000;

/// The subsystem's side.
pub struct Ours<'c, 'a, 'n> {
    cpu: &'c mut NativeCpu<'a, 'n>,
    object: Shared<Object>,
    /// The file behind the object.
    file: File,
    shape: Shape,
    children: Vec<Process<'n>>,
    /// The number of pages dropped by `Op::Forget`.
    pub dropped: u64,
}

impl<'c, 'a, 'n> Ours<'c, 'a, 'n> {
    pub fn new(
        cpu: &'c mut NativeCpu<'a, 'n>,
        object: Shared<Object>,
        file: File,
        shape: Shape,
    ) -> Self {
        Self { cpu, object, file, shape, children: Vec::new(), dropped: 0 }
    }

    fn slot_at(&self, slot: usize) -> u64 {
        // Text lies at addresses suitable for huge leaves. Other mappings begin within a table, and
        // cross the end of a table.
        let window = if self.shape.is_text { TABLE } else { TABLE - 130 * PAGE };
        window + slot as u64 * self.shape.slot_bytes()
    }

    fn addr_of(&self, place: Place) -> u64 {
        self.slot_at(0) + place.offset_in_window(self.shape)
    }

    fn protection(&self, writable: bool) -> Prot {
        let text = if self.shape.is_text { Prot::EXEC } else { Prot::empty() };
        text | if writable { Prot::RW } else { Prot::READ }
    }

    /// Ends everything except the process.
    pub fn end(self) {
        self.children.into_iter().for_each(|child| self.cpu.exit(child));
        Object::release(self.object, self.cpu.cpu());
    }

    fn space(&self, who: usize) -> &Space<NativeMachine> {
        match who.checked_sub(1) {
            None => self.cpu.running().space(),
            Some(child) => self.children[child].space(),
        }
    }

    fn spaces(&self) -> impl Iterator<Item = &Space<NativeMachine>> {
        (0..=self.children.len()).map(|who| self.space(who))
    }

    fn revoke(&self, pages: Range<u64>, copies: PrivateCopies) {
        let cpu = self.cpu.cpu();
        self.spaces().for_each(|space| space.revoke(cpu, &self.object, pages.clone(), copies));
    }

    /// Writes pages back, and makes them durable.
    fn sync(&self, pages: Range<u64>) {
        let cpu = self.cpu.cpu();
        let protect = |pages: Range<u64>| {
            self.spaces().for_each(|space| space.write_protect(cpu, &self.object, pages.clone()));
        };
        self.object.write_back(cpu, pages.clone(), protect).expect("the file can be written");
        self.object.sync().expect("the file can be synced");
        let dirty = pages.take_while(|page| *page < self.object.pages());
        let dirty = dirty.filter(|page| self.object.is_dirty(cpu, *page));
        assert_eq!(dirty.count(), 0, "pages are dirty without a later access");
    }

    fn load(&mut self, place: Place) -> Result<u64, Signal> {
        if place.outside {
            let mut bytes = [0; 8];
            let loaded =
                self.space(place.who).read_bytes(self.cpu.cpu(), self.addr_of(place), &mut bytes);
            return loaded
                .map(|()| u64::from_ne_bytes(bytes))
                .map_err(|error| refused(error.error));
        }
        self.access(place, |cpu, addr| cpu.load(addr))
    }

    fn store(&mut self, place: Place, value: u64) -> Result<(), Signal> {
        if place.outside {
            let (space, bytes) = (self.space(place.who), value.to_ne_bytes());
            let stored = space.write_bytes(self.cpu.cpu(), self.addr_of(place), &bytes);
            return stored.map_err(|error| refused(error.error));
        }
        self.access(place, |cpu, addr| cpu.store(addr, value))
    }

    /// Lets the process of `place` make an access there.
    fn access<R>(
        &mut self,
        place: Place,
        access: impl FnOnce(&NativeCpu<'_, '_>, u64) -> Result<R, NativeSignal>,
    ) -> Result<R, Signal> {
        let addr = self.addr_of(place);
        let done = match place.who.checked_sub(1) {
            None => access(self.cpu, addr).map_err(Stop::from),
            Some(child) => {
                self.cpu.switch(&self.children[child], |cpu| access(cpu, addr).map_err(Stop::from))
            }
        };
        done.map_err(|stop| match stop {
            Stop::Signal(NativeSignal::Bus { addr: at }) if at == addr => refused(FaultError::Bus),
            Stop::Signal(NativeSignal::Segv { addr: at, mapped }) if at == addr => {
                refused(FaultError::Segv { mapped })
            }
            _ => panic!("{stop}"),
        })
    }

    /// As `pread`: as many of `len` bytes as the file has.
    fn read(&self, offset: u64, len: u64) -> Vec<u8> {
        let end = (offset + len).min(self.object.bytes());
        let mut bytes = Vec::new();
        for (page, part) in by_page(offset, end) {
            let append = |at: Option<*const u8>| match at {
                // SAFETY: bytes of the page, lent by the object; the only CPU is here, and runs no
                // program.
                Some(at) => bytes.extend_from_slice(unsafe {
                    core::slice::from_raw_parts(at.add(part.start), part.len())
                }),
                None => bytes.resize(bytes.len() + part.len(), 0),
            };
            self.object.read_page(self.cpu.cpu(), page, append).expect("the file can be read");
        }
        bytes
    }

    /// As `pwrite`.
    fn write(&self, offset: u64, bytes: &[u8]) {
        let cpu = self.cpu.cpu();
        let end = offset + bytes.len() as u64;
        if end > self.object.bytes() {
            self.object.set_len(cpu, end).expect("the file can grow");
        }
        let mut rest = bytes;
        for (page, part) in by_page(offset, end) {
            let (now, later) = rest.split_at(part.len());
            // SAFETY: as in `read`.
            let copy = |at: *mut u8| unsafe {
                at.add(part.start).copy_from_nonoverlapping(now.as_ptr(), now.len());
                part.end
            };
            // The whole part of the page inside the file: the page is not read.
            let to_its_end = part.end as u64 == PAGE || end == self.object.bytes();
            let is_whole = part.start == 0 && to_its_end;
            let written = if is_whole {
                self.object.overwrite_page(cpu, page, copy)
            } else {
                self.object.write_page(cpu, page, copy)
            };
            assert_eq!(written, Ok(part.end), "the page can be written");
            rest = later;
        }
    }

    fn map(&self, slot: usize, view: View) {
        let flags = if view.shared { MapFlags::SHARED } else { MapFlags::PRIVATE };
        self.clear(slot);
        let backing = Backing { object: &self.object, first: view.first, may_write: true };
        let (at, len, prot) =
            (self.slot_at(slot), view.pages * PAGE, self.protection(view.writable));
        let space = self.cpu.running().space();
        let flags = flags | MapFlags::FIXED;
        let mapped = space.mmap_object(self.cpu.cpu(), at, len, prot, flags, backing);
        assert_eq!(mapped, Ok(at));
    }

    fn clear(&self, slot: usize) {
        self.cpu.munmap(self.slot_at(slot), self.shape.slot_bytes()).expect("munmap");
    }
}

impl Side for Ours<'_, '_, '_> {
    fn step(&mut self, known: &Known, op: &Op) -> Outcome {
        let view = |slot: usize| known.parent[slot].expect("a mapped slot");
        match *op {
            Op::Map { slot, view } => self.map(slot, view),
            Op::Unmap { slot } => self.clear(slot),
            Op::Protect { slot, writable } => {
                let (at, len) = (self.slot_at(slot), view(slot).pages * PAGE);
                self.cpu.mprotect(at, len, self.protection(writable)).expect("mprotect");
            }
            Op::Move { from, to } => {
                self.clear(to);
                let (at, len) = (self.slot_at(from), view(from).pages * PAGE);
                let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
                let moved = self.cpu.mremap(at, len, len, flags, self.slot_at(to));
                assert_eq!(moved, Ok(self.slot_at(to)));
            }
            Op::Load(place) => return Outcome::Loaded(self.load(place)),
            Op::Store(place, value) => return Outcome::Stored(self.store(place, value)),
            Op::Resident(place) => {
                let loaded = self.load(place);
                let page = self.addr_of(place) & !(PAGE - 1);
                let mut there = None;
                self.cpu.mincore(page, PAGE, |resident| there = Some(resident)).expect("mincore");
                return Outcome::Resident(loaded, there.expect("mincore reports each page"));
            }
            Op::Read { offset, len } => return Outcome::Read(self.read(offset, len)),
            Op::Write { offset, len, seed } => self.write(offset, &bytes_to_write(len, seed)),
            Op::SetLen(len) => {
                self.object.set_len(self.cpu.cpu(), len).expect("the length can be set");
                self.revoke(len.div_ceil(PAGE)..u64::MAX, PrivateCopies::Drop);
            }
            Op::Punch(ref pages) => {
                self.object.punch(self.cpu.cpu(), pages.clone()).expect("a hole can be punched");
                self.revoke(pages.clone(), PrivateCopies::Keep);
            }
            Op::Msync { slot, ref pages } => {
                let first = view(slot).first;
                self.sync(first + pages.start..first + pages.end);
            }
            Op::Fsync => self.sync(0..u64::MAX),
            Op::Discard { slot, ref pages } => {
                let len = (pages.end - pages.start) * PAGE;
                let at = self.slot_at(slot) + pages.start * PAGE;
                self.cpu.madvise(at, len, Advice::DontNeed).expect("madvise");
            }
            Op::Collapse { slot } => {
                let (at, len) = (self.slot_at(slot), view(slot).pages * PAGE);
                let refused = self.cpu.madvise(at, len, Advice::Collapse).err();
                let expected = [Errno::EAGAIN, Errno::EINVAL, Errno::ENOMEM];
                assert!(refused.is_none_or(|error| expected.contains(&error.errno)), "{refused:?}");
            }
            Op::Forget(ref pages) => {
                self.dropped += self.object.drop_clean(self.cpu.cpu(), pages.clone());
            }
            Op::Fork => self.children.push(self.cpu.fork().expect("fork")),
            Op::Exit { child } => {
                let child = self.children.remove(child);
                self.cpu.exit(child);
            }
        }
        Outcome::Done
    }

    fn stored(&self) -> Vec<u8> {
        bytes_of(&self.file)
    }
}

/// The pages of `start..end`, and which bytes of each.
fn by_page(start: u64, end: u64) -> impl Iterator<Item = (u64, Range<usize>)> {
    (start / PAGE..end.div_ceil(PAGE)).map(move |page| {
        let within = |at: u64| at.clamp(page * PAGE, (page + 1) * PAGE) - page * PAGE;
        (page, within(start) as usize..within(end) as usize)
    })
}

/// Returns the signal of a program for a refused access.
fn refused(error: FaultError) -> Signal {
    match error {
        FaultError::Bus => Signal::Bus,
        FaultError::Segv { mapped: true } => Signal::Segv,
        _ => panic!("{error}"),
    }
}
