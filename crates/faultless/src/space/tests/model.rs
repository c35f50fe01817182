//! Random calls, loads and stores in several spaces, on mapped files, and with pages pinned for
//! devices, compared to a naive page map. After every step the audit checks every frame, reference
//! and entry.

mod pages;

use self::pages::{Contents, Model, Objects, Page, Word};
use crate::addr::{FrameNumber, PAGE_SIZE};
use crate::audit::audit_with;
use crate::error::Errno;
use crate::fault::FaultError;
use crate::file::Object;
use crate::heap::Shared;
use crate::knob::{Locking, Setting};
use crate::machine::Machine;
use crate::space::{
    Advice, Backing, DeviceMemory, MapFlags, Pins, PrivateCopies, Prot, RemapFlags, Space, VmaFlags,
};
use crate::table::format::CacheMode;
use crate::testing::guest::{self, TestVm};
use crate::testing::{DEVICE_FRAMES, TestMachine};
use crate::vm::Cpu;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::vec;
use std::vec::Vec;

/// The address window of the calls, which crosses from one last-level table to the next.
const PAGES: u64 = 40;
const BASE: u64 = (1 << 30) - 20 * PAGE_SIZE;
/// The number of files, and the initial number of pages of each file.
const FILES: usize = 3;
const FILE_PAGES: u64 = 12;
/// Device memory, as the number of an object.
const DEVICE: usize = 0;

#[derive(Clone, Debug)]
enum Step {
    Map { at: u64, len: u64, prot: u32, shared: bool, populate: bool },
    MapFile { at: u64, len: u64, prot: u32, file: usize, first: u64, how: u32 },
    MapDevice { at: u64, len: u64, prot: u32, first: u64, how: u32 },
    MapAnywhere { len: u64, hint: u64 },
    Unmap { at: u64, len: u64 },
    Protect { at: u64, len: u64, prot: u32 },
    Advise { at: u64, len: u64, advice: Advice },
    Remap { at: u64, old: u64, new: u64, to: u64, flags: u32 },
    Fork,
    Exit,
    Load { at: u64 },
    Store { at: u64, value: u64 },
    Locking(usize),
    Read { file: usize, index: u64 },
    Write { file: usize, index: u64, value: u64 },
    Resize { file: usize, pages: u64 },
    Remove { file: usize },
    FaultAround(u64),
    Prefault(u8),
    Pin { at: u64, len: u64, write: bool },
    Unpin { which: usize },
    DeviceStore { which: usize, page: usize, value: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    let at = || 0..PAGES;
    let len = || 1..12u64;
    let file = || 0..FILES;
    let advice = prop::sample::select(&[
        Advice::DontNeed,
        Advice::Free,
        Advice::DontFork,
        Advice::DoFork,
        Advice::WipeOnFork,
        Advice::KeepOnFork,
        Advice::Sequential,
        Advice::Normal,
        Advice::PopulateRead,
        Advice::PopulateWrite,
    ]);
    prop_oneof![
        4 => (at(), len(), 0..8u32, any::<bool>(), any::<bool>()).prop_map(
            |(at, len, prot, shared, populate)| Step::Map { at, len, prot, shared, populate }),
        4 => (at(), len(), 0..8u32, file(), 0..FILE_PAGES, 0..8u32).prop_map(
            |(at, len, prot, file, first, how)| Step::MapFile { at, len, prot, file, first, how }),
        2 => (at(), len(), 0..8u32, 0..FILE_PAGES, 0..8u32).prop_map(
            |(at, len, prot, first, how)| Step::MapDevice { at, len, prot, first, how }),
        1 => (len(), at()).prop_map(|(len, hint)| Step::MapAnywhere { len, hint }),
        3 => (at(), len()).prop_map(|(at, len)| Step::Unmap { at, len }),
        3 => (at(), len(), 0..8u32).prop_map(|(at, len, prot)| Step::Protect { at, len, prot }),
        3 => (at(), len(), advice).prop_map(|(at, len, advice)| Step::Advise { at, len, advice }),
        3 => (at(), 0..8u64, 0..9u64, at(), 0..8u32).prop_map(
            |(at, old, new, to, flags)| Step::Remap { at, old, new, to, flags }),
        2 => Just(Step::Fork),
        1 => Just(Step::Exit),
        6 => at().prop_map(|at| Step::Load { at }),
        8 => (at(), 1..u64::MAX).prop_map(|(at, value)| Step::Store { at, value }),
        1 => (0..3usize).prop_map(Step::Locking),
        2 => (file(), 0..FILE_PAGES).prop_map(|(file, index)| Step::Read { file, index }),
        4 => (file(), 0..FILE_PAGES, 1..u64::MAX).prop_map(
            |(file, index, value)| Step::Write { file, index, value }),
        3 => (file(), 0..FILE_PAGES).prop_map(|(file, pages)| Step::Resize { file, pages }),
        1 => file().prop_map(|file| Step::Remove { file }),
        1 => (0..7u32).prop_map(|order| Step::FaultAround(1 << order)),
        1 => (0..=9u8).prop_map(Step::Prefault),
        6 => (at(), 1..6u64, any::<bool>()).prop_map(|(at, len, write)| Step::Pin { at, len, write }),
        2 => any::<usize>().prop_map(|which| Step::Unpin { which }),
        4 => (any::<usize>(), any::<usize>(), 1..u64::MAX).prop_map(
            |(which, page, value)| Step::DeviceStore { which, page, value }),
    ]
}

/// The pages pinned for a device.
struct Device<'a> {
    pins: Pins<'a, TestMachine>,
    words: Vec<Word>,
    writes: bool,
}

struct World<'a> {
    cpu: Cpu<'a, TestMachine>,
    devices: Vec<Device<'a>>,
    spaces: Vec<(Space<TestMachine>, Model)>,
    /// The kernel's shares, and the objects' numbers.
    files: Vec<(Shared<Object>, usize)>,
    objects: Objects,
    made: usize,
    turn: usize,
}

const fn number(addr: u64) -> u64 {
    addr / PAGE_SIZE
}

impl World<'_> {
    fn apply(&mut self, step: &Step) {
        self.turn += 1;
        let turn = self.turn % self.spaces.len();
        let (space, model) = &mut self.spaces[turn];
        let cpu = &self.cpu;
        let addr = |at: u64| BASE + at * PAGE_SIZE;
        match *step {
            Step::Map { at, len, prot, shared, populate } => {
                let mut flags = MapFlags::ANONYMOUS | MapFlags::FIXED;
                flags |= if shared { MapFlags::SHARED } else { MapFlags::PRIVATE };
                flags.set(MapFlags::POPULATE, populate);
                let prot = Prot::from_bits(prot).unwrap();
                let got = space.mmap(cpu, addr(at), len * PAGE_SIZE, prot, flags);
                assert_eq!(got, Ok(addr(at)));
                self.made += 1;
                self.objects.insert(self.made, Contents::new(len));
                for index in 0..len {
                    let object = shared.then_some((self.made, index));
                    let page = Page { object, shared, ..Page::private(prot) };
                    model.pages.insert(number(addr(at)) + index, page);
                }
            }
            Step::MapFile { at, len, prot, file, first, how } => {
                let [shared, may_write, populate] = [1, 2, 4].map(|bit| how & bit != 0);
                let mut flags = MapFlags::FIXED;
                flags |= if shared { MapFlags::SHARED } else { MapFlags::PRIVATE };
                flags.set(MapFlags::POPULATE, populate);
                let prot = Prot::from_bits(prot).unwrap();
                let (object, id) = &self.files[file];
                let backing = Backing { object, first, may_write };
                let got = space.mmap_object(cpu, addr(at), len * PAGE_SIZE, prot, flags, backing);
                let writable = prot.contains(Prot::WRITE);
                if shared && !may_write && writable {
                    assert_eq!(got.map_err(|error| error.errno), Err(Errno::EACCES));
                    return;
                }
                assert_eq!(got, Ok(addr(at)));
                let mut populating = populate && !prot.is_empty();
                for index in 0..len {
                    let object = Some((*id, first + index));
                    let mut page = Page { object, shared, may_write, ..Page::private(prot) };
                    populating = populating && page.populate(&self.objects, writable).is_ok();
                    model.pages.insert(number(addr(at)) + index, page);
                }
            }
            Step::MapDevice { at, len, prot, first, how } => {
                let [private, may_write, populate] = [7, 1, 2].map(|bits| how & bits == bits);
                let mut flags = MapFlags::FIXED;
                flags |= if private { MapFlags::PRIVATE } else { MapFlags::SHARED };
                flags.set(MapFlags::POPULATE, populate);
                let prot = Prot::from_bits(prot).unwrap();
                let cache = if first % 2 == 0 { CacheMode::Uncached } else { CacheMode::WriteBack };
                let frame = FrameNumber(cpu.vm().machine().device().0 + first as u32);
                let device = DeviceMemory { first: frame, cache, tag: 0, may_write };
                // SAFETY: device memory of the test machine, without other users and without
                // caches.
                let got = unsafe {
                    space.mmap_device(cpu, addr(at), len * PAGE_SIZE, prot, flags, device)
                };
                let expected = match private {
                    true => Err(Errno::EINVAL),
                    _ if !may_write && prot.contains(Prot::WRITE) => Err(Errno::EACCES),
                    _ => Ok(addr(at)),
                };
                assert_eq!(got.map_err(|error| error.errno), expected);
                for index in (0..len).filter(|_| expected.is_ok()) {
                    let object = Some((DEVICE, first + index));
                    let page = Page { object, shared: true, may_write, ..Page::private(prot) };
                    model.pages.insert(number(addr(at)) + index, page);
                }
            }
            Step::MapAnywhere { len, hint } => {
                let flags = MapFlags::ANONYMOUS | MapFlags::PRIVATE;
                let prot = Prot::READ | Prot::WRITE;
                let got = space.mmap(cpu, addr(hint), len * PAGE_SIZE, prot, flags).unwrap();
                let page = Page::private(prot);
                for index in 0..len {
                    let before = model.pages.insert(number(got) + index, page.clone());
                    assert!(before.is_none(), "not free");
                }
            }
            Step::Unmap { at, len } => {
                assert_eq!(space.munmap(cpu, addr(at), len * PAGE_SIZE), Ok(()));
                model.unmap(number(addr(at)), len);
            }
            Step::Protect { at, len, prot } => {
                let prot = Prot::from_bits(prot).unwrap();
                let got = space.mprotect(cpu, addr(at), len * PAGE_SIZE, prot);
                let mut expected = Ok(());
                for page in number(addr(at))..number(addr(at)) + len {
                    match model.pages.get_mut(&page) {
                        Some(page)
                            if prot.contains(Prot::WRITE) && page.shared && !page.may_write =>
                        {
                            expected = Err(Errno::EACCES);
                            break;
                        }
                        Some(page) => page.prot = prot,
                        None => {
                            expected = Err(Errno::ENOMEM);
                            break;
                        }
                    }
                }
                assert_eq!(got.map_err(|error| error.errno), expected);
            }
            Step::Advise { at, len, advice } => {
                let got = space.madvise(cpu, addr(at), len * PAGE_SIZE, advice);
                let got = got.map_err(|error| error.errno);
                model.advise(&self.objects, number(addr(at)), len, advice, got);
            }
            Step::Remap { at, old, new, to, flags } => {
                let flags = RemapFlags::from_bits(flags).unwrap();
                let (old_len, new_len) = (old * PAGE_SIZE, new * PAGE_SIZE);
                let first = number(addr(at));
                let devices = (first..first + old)
                    .filter_map(|page| model.pages.get(&page).map(Page::is_device));
                // Of several VMAs, the VMAs before a device's VMA move, although the call is
                // refused. The model does not cover this case.
                let mixed = devices.clone().any(|is| is) && !devices.clone().all(|is| is);
                if flags.contains(RemapFlags::DONTUNMAP) && mixed {
                    return;
                }
                let got = space.mremap(cpu, addr(at), old_len, new_len, flags, addr(to));
                if let Ok(there) = got {
                    let device = model.pages.get(&number(addr(at))).is_some_and(Page::is_device);
                    let keeps = flags.contains(RemapFlags::DONTUNMAP);
                    assert!(
                        !device || new <= old && !keeps,
                        "device memory that grows or keeps its old mapping"
                    );
                    model.remap(number(addr(at)), old, new, number(there), flags);
                }
            }
            Step::Fork => {
                if self.spaces.len() < 3 {
                    let (space, model) = &self.spaces[turn];
                    let child = space.fork(&self.cpu).unwrap();
                    let mut copy = Model::default();
                    for (&at, page) in model.pages.iter().filter(|(_, page)| !page.dont_fork) {
                        let own = if page.wipe { None } else { page.copy().own };
                        copy.pages.insert(at, Page { own, ..page.clone() });
                    }
                    self.spaces.push((child, copy));
                }
            }
            Step::Exit => {
                if self.spaces.len() > 1 {
                    let (space, _) = self.spaces.remove(turn);
                    space.exit(&self.cpu);
                }
            }
            Step::Load { at } => self.check_page(turn, number(addr(at))),
            Step::Store { at, value } => {
                let page = number(addr(at));
                let got = guest::store(cpu, space, addr(at), value);
                match model.pages.get_mut(&page) {
                    None => assert_eq!(got, Err(FaultError::Segv { mapped: false })),
                    Some(page) if !page.prot.contains(Prot::WRITE) => {
                        assert_eq!(got, Err(FaultError::Segv { mapped: true }));
                    }
                    Some(page) => {
                        assert_eq!(got, page.value(&self.objects).map(|_| ()));
                        match page.object.filter(|_| page.shared && got.is_ok()) {
                            Some((object, index)) => {
                                self.objects.get_mut(&object).unwrap().word(index).set(value);
                            }
                            None if got.is_ok() => page.own.get_or_insert_default().set(value),
                            None => {}
                        }
                    }
                }
            }
            Step::Read { file, index } => {
                let (object, id) = &self.files[file];
                // SAFETY: the bytes of a page, aligned.
                let word = |at: *const u8| unsafe { at.cast::<u64>().read() };
                let read = |page: Option<*const u8>| page.map_or(0, word);
                let got = object.read_page(cpu, index, read);
                assert_eq!(got, Ok(self.objects[id].get(index)));
            }
            Step::Write { file, index, value } => {
                let (object, id) = &self.files[file];
                // SAFETY: the bytes of a page, aligned.
                let got =
                    object.write_page(cpu, index, |at| unsafe { at.cast::<u64>().write(value) });
                let contents = self.objects.get_mut(id).unwrap();
                if index < contents.len {
                    assert_eq!(got, Ok(()));
                    contents.word(index).set(value);
                } else {
                    assert_eq!(got, Err(Errno::EFBIG));
                }
            }
            Step::Resize { file, pages } => {
                let (object, id) = &self.files[file];
                object.set_pages(cpu, pages).unwrap();
                let contents = self.objects.get_mut(id).unwrap();
                contents.len = pages;
                contents.pages.retain(|&index, _| index < pages);
                for (space, model) in &mut self.spaces {
                    space.revoke(cpu, object, pages..u64::MAX, PrivateCopies::Drop);
                    for page in model.pages.values_mut() {
                        if page.object.is_some_and(|(of, index)| of == *id && index >= pages) {
                            page.own = None;
                        }
                    }
                }
            }
            Step::Remove { file } => {
                self.made += 1;
                let new = Object::try_new(cpu, FILE_PAGES, self.made as u64).unwrap();
                self.objects.insert(self.made, Contents::new(FILE_PAGES));
                let (old, _) = std::mem::replace(&mut self.files[file], (new, self.made));
                Object::release(old, cpu);
            }
            Step::FaultAround(pages) => self.cpu.vm().set(Setting::FaultAroundPages(pages)),
            Step::Prefault(order) => self.cpu.vm().set(Setting::PrefaultMaxOrder(order)),
            Step::Locking(at) => self.cpu.vm().set(Setting::Locking(Locking::ALL[at])),
            Step::Pin { at, len, write } => {
                let got = space.pin(cpu, addr(at), len * PAGE_SIZE, write);
                // The pages before an unpinnable page are faulted in.
                let mut pin = |page| model.pages.get_mut(&page)?.pin(&mut self.objects, write);
                let words: Vec<_> =
                    (number(addr(at))..number(addr(at)) + len).map_while(&mut pin).collect();
                if words.len() as u64 == len {
                    self.devices.push(Device { pins: got.unwrap(), words, writes: write });
                } else {
                    assert_eq!(got.map(drop).map_err(|error| error.errno), Err(Errno::EFAULT));
                }
            }
            Step::Unpin { which } => {
                if !self.devices.is_empty() {
                    let which = which % self.devices.len();
                    self.devices.swap_remove(which);
                }
            }
            Step::DeviceStore { which, page, value } => {
                let mut writers: Vec<_> =
                    self.devices.iter().filter(|device| device.writes).collect();
                if !writers.is_empty() {
                    let device = writers.swap_remove(which % writers.len());
                    let page = page % device.words.len();
                    let at = cpu.vm().machine().frame_bytes(device.pins.frames()[page]);
                    // SAFETY: a word of a pinned page.
                    unsafe { at.cast::<u64>().write(value) };
                    device.words[page].set(value);
                }
            }
        }
    }

    /// Checks that each device reads the last stored words. A space with a device's page maps the
    /// page only to the device's frame, and maps this frame nowhere else.
    fn check_devices(&self) {
        for device in &self.devices {
            for (word, &frame) in device.words.iter().zip(device.pins.frames()) {
                let at = self.cpu.vm().machine().frame_bytes(frame);
                // SAFETY: a word of a pinned page.
                assert_eq!(unsafe { at.cast::<u64>().read() }, word.get(), "{frame:?}");
                for (space, model) in &self.spaces {
                    self.check_device_page(space, model, (word, frame));
                }
            }
        }
    }

    fn check_device_page(
        &self,
        space: &Space<TestMachine>,
        model: &Model,
        (word, frame): (&Word, FrameNumber),
    ) {
        for (&at, page) in &model.pages {
            let there = space.page_at(&self.cpu, at * PAGE_SIZE);
            let maps = there.as_ref().is_some_and(|there| there.frame == frame);
            match (&page.own, page.object) {
                (Some(own), _) => assert_eq!(maps, Rc::ptr_eq(own, word), "page {at:#x}"),
                (None, Some((object, index))) if maps => {
                    let of_object = self.objects[&object].pages.get(&index);
                    assert!(of_object.is_some_and(|of| Rc::ptr_eq(of, word)), "page {at:#x}");
                }
                _ => assert!(!maps, "page {at:#x}"),
            }
            assert!(!maps || there.is_some_and(|there| there.pinned));
        }
    }

    fn check_page(&self, turn: usize, page: u64) {
        let (space, model) = &self.spaces[turn];
        let got = guest::load(&self.cpu, space, page * PAGE_SIZE);
        match model.pages.get(&page) {
            None => assert_eq!(got, Err(FaultError::Segv { mapped: false })),
            Some(known) if known.prot.is_empty() => {
                assert_eq!(got, Err(FaultError::Segv { mapped: true }));
            }
            Some(known) => assert_eq!(got, known.value(&self.objects), "page {page:#x}"),
        }
    }

    /// The VMAs cover exactly the model's pages, with their protection and kind, in order.
    fn check_areas(&self) {
        for (space, model) in &self.spaces {
            let mut seen = BTreeMap::new();
            let mut last = 0;
            space.areas(&self.cpu, |area| {
                assert!(area.range.start >= last && !area.range.is_empty());
                last = area.range.end;
                for page in number(area.range.start)..number(area.range.end) {
                    let index = number(area.offset) + page - number(area.range.start);
                    seen.insert(page, (area.prot, area.flags, area.tag, index));
                }
            });
            assert!(seen.keys().eq(model.pages.keys()), "{seen:?} against {:?}", model.pages);
            for (page, (prot, flags, tag, index)) in seen {
                let known = &model.pages[&page];
                assert_eq!(prot, known.prot, "page {page:#x}");
                assert_eq!(flags.contains(VmaFlags::SHARED), known.shared);
                assert_eq!(flags.contains(VmaFlags::NOWRITE), known.shared && !known.may_write);
                if let Some((object, at)) = known.object {
                    let first = self.cpu.vm().machine().device().0;
                    let first = if known.is_device() { u64::from(first) } else { 0 };
                    assert_eq!(index, first + at, "page {page:#x}");
                    assert!(tag == 0 || tag == object as u64);
                }
                assert_eq!(flags.contains(VmaFlags::DONTFORK), known.dont_fork);
                assert_eq!(flags.contains(VmaFlags::WIPEONFORK), known.wipe);
            }
            assert_eq!(space.mapped_pages(&self.cpu), model.pages.len() as u64);
        }
    }

    fn audit(&self) {
        self.cpu.drain();
        let spaces: Vec<_> = self.spaces.iter().map(|(space, _)| space).collect();
        let files: Vec<_> = self.files.iter().map(|(file, _)| file).collect();
        if let Err(discrepancy) = audit_with(&self.cpu, &spaces, &files) {
            panic!("{discrepancy}");
        }
    }
}

fn run(steps: &[Step]) {
    let vm: TestVm = guest::vm(2, 4096);
    let cpu = guest::cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let files =
        (1..=FILES).map(|id| (Object::try_new(&cpu, FILE_PAGES, id as u64).unwrap(), id)).collect();
    let mut world = World {
        cpu,
        devices: Vec::new(),
        spaces: Vec::from([(space, Model::default())]),
        files,
        objects: (1..=FILES)
            .map(|id| (id, Contents::new(FILE_PAGES)))
            .chain([(DEVICE, Contents::new(DEVICE_FRAMES.into()))])
            .collect(),
        made: FILES,
        turn: 0,
    };
    for step in steps {
        world.apply(step);
        world.check_areas();
        world.check_devices();
        world.audit();
    }
    for turn in 0..world.spaces.len() {
        let pages: Vec<_> = world.spaces[turn].1.pages.keys().copied().collect();
        pages.into_iter().for_each(|page| world.check_page(turn, page));
    }
    world.audit();
    for (space, _) in world.spaces.drain(..) {
        space.exit(&world.cpu);
    }
    world.audit();
    for (file, _) in world.files.drain(..) {
        Object::release(file, &world.cpu);
    }
    world.check_devices();
    world.audit();
    world.devices.clear();
    world.audit();
    assert_eq!(vm.free_frames(), vm.total_frames() - 1, "all but the zero page are free");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    #[test]
    fn a_space_behaves_like_a_page_map(steps in prop::collection::vec(step(), 1..60)) {
        run(&steps);
    }
}
