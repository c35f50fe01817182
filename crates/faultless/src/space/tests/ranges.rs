//! Ranges outside every page or every user space: each call returns Linux's result, and changes no
//! other page.

use crate::addr::{PAGE_SIZE, VirtRange};
use crate::error::{Errno, Error};
use crate::fault::prefault::ThreadStreams;
use crate::file::Object;
use crate::heap::Shared;
use crate::space::{Advice, MapFlags, MemPolicy, MemoryLock, Prot, RemapFlags, Space};
use crate::table::format::USER_END;
use crate::testing::TestMachine;
use crate::testing::guest::{self, TestVm, cpu, load, read_object, store, write_object};
use crate::testing::store::Memory;
use crate::vm::Cpu;
use std::string::String;
use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;
use std::vec::Vec;

const AT: u64 = 1 << 30;
const P: u64 = PAGE_SIZE;
/// Mapped pages from `AT` on, of which every second page is touched.
const PAGES: u64 = 4;
const RW: Prot = Prot::READ.union(Prot::WRITE);
const FIXED: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS).union(MapFlags::FIXED);

type TestSpace = Space<TestMachine>;

/// Starts and ends around the mapping, the end of user space and the end of all addresses.
fn edges() -> Vec<u64> {
    let places = [0, AT, AT + P, AT + PAGES * P, USER_END - P, USER_END, 1 << 63, u64::MAX - P + 1];
    let around = |at: u64| [at.wrapping_sub(P), at.wrapping_sub(1), at, at.wrapping_add(1)];
    let mut all: Vec<u64> = places.into_iter().flat_map(around).collect();
    all.extend([AT + P / 2, u64::MAX]);
    all.sort_unstable();
    all.dedup();
    all
}

/// Runs `each` for all pairs of edges, and ends the process if a pair takes too long.
fn for_each_pair(mut each: impl FnMut(u64, u64)) {
    let current = Mutex::new(String::new());
    std::thread::scope(|scope| {
        let (sender, done) = channel::<()>();
        let current = &current;
        scope.spawn(move || {
            loop {
                match done.recv_timeout(Duration::from_secs(60)) {
                    Ok(()) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) => {
                        std::eprintln!("no return: {}", current.lock().unwrap());
                        std::process::abort();
                    }
                }
            }
        });
        for &start in &edges() {
            for &end in &edges() {
                *current.lock().unwrap() = std::format!("{start:#x}, {end:#x}");
                each(start, end);
                sender.send(()).unwrap();
            }
        }
    });
}

fn mapped(cpu: &Cpu<'_, TestMachine>) -> TestSpace {
    let space = Space::new(cpu).unwrap();
    space.mmap(cpu, AT, PAGES * P, RW, FIXED).unwrap();
    touch(cpu, &space);
    space
}

fn touch(cpu: &Cpu<'_, TestMachine>, space: &TestSpace) {
    (0..PAGES).step_by(2).for_each(|page| store(cpu, space, AT + page * P, page + 1).unwrap());
}

fn vm() -> TestVm {
    guest::vm(1, 64)
}

#[test]
fn listings_of_any_range_agree_with_a_list_of_pages() {
    let vm = vm();
    let cpu = cpu(&vm, 0);
    let space = mapped(&cpu);
    for_each_pair(|start, end| {
        let range = VirtRange { start, end };
        let touches = |at: u64| start < end && start < at + P && at < end;
        let mut reported = Vec::new();
        space.pages(&cpu, range, |addr, _| reported.push(addr));
        let there = (0..PAGES).step_by(2).map(|page| AT + page * P);
        assert_eq!(reported, there.filter(|at| touches(*at)).collect::<Vec<_>>(), "{range:?}");
        let mut areas = 0;
        space.each_area(&cpu, range, |_| {
            areas += 1;
            true
        });
        let overlaps = start < end && start < AT + PAGES * P && AT < end;
        assert_eq!(areas, u32::from(overlaps), "{range:?}");
        let covered = start >= end || AT <= start && end <= AT + PAGES * P;
        assert_eq!(space.is_mapped(&cpu, range), covered, "{range:?}");
    });
    space.exit(&cpu);
}

/// A call with an address and a length, and whether a length of 0 is an error.
type Call =
    (&'static str, bool, fn(&Cpu<'_, TestMachine>, &TestSpace, u64, u64) -> Result<(), Error>);

const CALLS: &[Call] = &[
    ("munmap", true, |cpu, space, addr, len| space.munmap(cpu, addr, len)),
    ("evict", true, |cpu, space, addr, len| space.evict(cpu, addr, len)),
    ("mprotect", false, |cpu, space, addr, len| space.mprotect(cpu, addr, len, Prot::READ)),
    ("mlock", false, |cpu, space, addr, len| space.mlock(cpu, addr, len, MemoryLock::Now)),
    ("mincore", false, |cpu, space, addr, len| space.mincore(cpu, addr, len, |_| ())),
    ("mbind", false, |cpu, space, addr, len| space.mbind(cpu, addr, len, MemPolicy::Local)),
    ("madvise", false, |cpu, space, addr, len| space.madvise(cpu, addr, len, Advice::DontNeed)),
];

/// Returns whether `len`, rounded up to pages, is 2^64. Linux's `mlock` and `mbind` use the result,
/// 0, as the length.
const fn wraps_to_zero(len: u64) -> bool {
    len > u64::MAX - P + 1
}

#[test]
fn calls_with_any_address_and_length_match_linux() {
    let vm = vm();
    let cpu = cpu(&vm, 0);
    for (name, zero_fails, call) in CALLS {
        let space = mapped(&cpu);
        for_each_pair(|addr, len| {
            let done = call(&cpu, &space, addr, len).map_err(|error| error.errno);
            let what = || std::format!("{name} of {addr:#x}, {len:#x}: {done:?}");
            if addr % P != 0 {
                assert_eq!(done, Err(Errno::EINVAL), "{}", what());
            } else if len == 0 && (addr <= USER_END || *name != "mincore") {
                let expected = if *zero_fails { Err(Errno::EINVAL) } else { Ok(()) };
                assert_eq!(done, expected, "{}", what());
            } else if wraps_to_zero(len) && ["mlock", "mbind"].contains(name) {
                assert_eq!(done, Ok(()), "{}", what());
            } else if len > USER_END || addr > USER_END - len {
                assert!(done.is_err(), "{}", what());
            }
            if done.is_ok() || addr % P == 0 {
                // As on Linux, a call that fails at a hole may have changed the pages below the
                // hole.
                space.mmap(&cpu, AT, PAGES * P, RW, FIXED).unwrap();
                touch(&cpu, &space);
            } else {
                assert_eq!(load(&cpu, &space, AT), Ok(1), "{}", what());
                assert_eq!(store(&cpu, &space, AT, 1), Ok(()), "{}", what());
            }
        });
        space.exit(&cpu);
    }
}

/// `mmap` at a fixed address replaces the old mapping, and changes no page if it fails.
#[test]
fn mappings_at_any_address_and_length_return() {
    let vm = vm();
    let cpu = cpu(&vm, 0);
    let space = mapped(&cpu);
    for_each_pair(|addr, len| {
        let done = space.mmap(&cpu, addr, len, RW, FIXED).map_err(|error| error.errno);
        let what = || std::format!("{addr:#x}, {len:#x}: {done:?}");
        if len == 0 {
            assert_eq!(done, Err(Errno::EINVAL), "{}", what());
        } else if addr % P != 0 || len > USER_END || addr > USER_END - len {
            assert!(done.is_err(), "{}", what());
        }
        if done.is_err() {
            assert_eq!(load(&cpu, &space, AT), Ok(1), "{}", what());
        } else {
            space.munmap(&cpu, 0, USER_END).unwrap();
            space.mmap(&cpu, AT, PAGES * P, RW, FIXED).unwrap();
            touch(&cpu, &space);
        }
    });
    space.exit(&cpu);
}

/// `mremap` of each range to each other length, in place.
#[test]
fn mremap_of_any_address_and_lengths_returns() {
    let vm = vm();
    let cpu = cpu(&vm, 0);
    let space = mapped(&cpu);
    let check = |addr: u64, old: u64, new: u64| {
        let done = space.mremap(&cpu, addr, old, new, RemapFlags::empty(), 0);
        let done = done.map_err(|error| error.errno);
        let what = || std::format!("{addr:#x}, {old:#x}, {new:#x}: {done:?}");
        if !addr.is_multiple_of(P) || new == 0 {
            assert_eq!(done, Err(Errno::EINVAL), "{}", what());
        } else if !(AT..AT + PAGES * P).contains(&addr) || new > USER_END {
            assert!(done.is_err(), "{}", what());
        }
        if done.is_err() {
            let pages = [0, 2].map(|page| load(&cpu, &space, AT + page * P));
            assert_eq!(pages, [Ok(1), Ok(3)], "{}", what());
        } else {
            space.munmap(&cpu, AT, 1 << 40).unwrap();
            space.mmap(&cpu, AT, PAGES * P, RW, FIXED).unwrap();
            touch(&cpu, &space);
        }
    };
    for_each_pair(|addr, len| check(addr, len, len));
    for_each_pair(|old, new| check(AT, old, new));
    for_each_pair(|addr, new| check(addr, P, new));
    space.exit(&cpu);
}

/// `mremap` moves and extends a mapping up to the last page of user space, and no page beyond.
#[test]
fn mremap_reaches_the_end_of_user_space() {
    let vm = vm();
    let cpu = cpu(&vm, 0);
    let space = mapped(&cpu);
    let call = |addr: u64, old: u64, new: u64, flags: RemapFlags, target: u64| {
        let done = space.mremap(&cpu, addr, old * P, new * P, flags, target);
        done.map_err(|error| error.errno)
    };
    let fixed = RemapFlags::MAYMOVE | RemapFlags::FIXED;
    let last = |pages: u64| USER_END - pages * P;
    // All pages, with and without a change of the size.
    assert_eq!(call(AT, PAGES, PAGES, fixed, last(PAGES - 1)), Err(Errno::EINVAL));
    assert_eq!(call(AT, PAGES - 1, PAGES, fixed, last(PAGES - 1)), Err(Errno::EINVAL));
    assert_eq!(call(AT, PAGES, PAGES, fixed, last(PAGES)), Ok(last(PAGES)));
    assert_eq!(load(&cpu, &space, last(PAGES)), Ok(1));
    assert_eq!(load(&cpu, &space, last(PAGES - 2)), Ok(3));
    assert_eq!(store(&cpu, &space, last(1), 9), Ok(()));
    // The last mapping shrinks, and grows up to its old end.
    let none = RemapFlags::empty();
    assert_eq!(call(last(PAGES), PAGES, PAGES + 1, none, 0), Err(Errno::ENOMEM));
    assert_eq!(call(last(PAGES), PAGES, PAGES - 1, none, 0), Ok(last(PAGES)));
    assert!(load(&cpu, &space, last(1)).is_err());
    assert_eq!(call(last(PAGES), PAGES - 1, PAGES + 1, none, 0), Err(Errno::ENOMEM));
    assert_eq!(call(last(PAGES), PAGES - 1, PAGES, none, 0), Ok(last(PAGES)));
    assert_eq!(load(&cpu, &space, last(1)), Ok(0));
    // A single page moves back, and grows on the way to the end.
    assert_eq!(call(last(1), 1, 1, fixed, AT), Ok(AT));
    assert_eq!(call(AT, 1, 2, fixed, last(1)), Err(Errno::EINVAL));
    assert_eq!(call(AT, 1, 2, fixed, last(2)), Ok(last(2)));
    assert_eq!(load(&cpu, &space, last(1)), Ok(0));
    assert_eq!(load(&cpu, &space, last(PAGES)), Ok(1));
    space.exit(&cpu);
}

/// A pin of any bytes, aligned or not: all of their pages, or an error.
#[test]
fn pins_of_any_range_cover_only_mapped_pages() {
    let vm = vm();
    let cpu = cpu(&vm, 0);
    let space = mapped(&cpu);
    for_each_pair(|addr, len| {
        let end = addr.checked_add(len);
        let inside = addr >= AT && end.is_some_and(|end| end <= AT + PAGES * P);
        let none = len == 0 && addr <= USER_END;
        for write in [false, true] {
            let done = space.pin(&cpu, addr, len, write).map(drop).map_err(|error| error.errno);
            let expected = if inside || none { Ok(()) } else { Err(Errno::EFAULT) };
            assert_eq!(done, expected, "{addr:#x}, {len:#x}");
        }
    });
    space.exit(&cpu);
}

/// A call on pages of an object, and whether the call discards the contents of the pages.
type PagesCall =
    (&'static str, bool, fn(&Cpu<'_, TestMachine>, &Shared<Object>, core::ops::Range<u64>));

const PAGES_CALLS: &[PagesCall] = &[
    ("read_ahead", false, |cpu, object, pages| object.read_ahead(cpu, pages).unwrap()),
    ("read_exactly", false, |cpu, object, pages| object.read_exactly(cpu, pages).unwrap()),
    ("read_in_sequence", false, |cpu, object, pages| {
        object.read_in_sequence(cpu, &ThreadStreams::new(), pages).unwrap();
    }),
    ("evict", false, |cpu, object, pages| _ = object.evict(cpu, pages)),
    ("drop_clean", false, |cpu, object, pages| _ = object.drop_clean(cpu, pages)),
    ("note_stored", false, |cpu, object, pages| object.note_stored(cpu, pages)),
    ("write_back", false, |cpu, object, pages| _ = object.write_back(cpu, pages, |_| ()).unwrap()),
    ("free_pages", true, |cpu, object, pages| object.free_pages(cpu, pages)),
    ("punch", true, |cpu, object, pages| object.punch(cpu, pages).unwrap()),
];

/// Numbers of pages around the ends of an object, of the largest object and of all numbers.
fn indexes() -> Vec<u64> {
    let places = [1, PAGES, 512, Object::MAX_PAGES, 1 << 52, 1 << 63];
    let mut all: Vec<u64> = places.into_iter().flat_map(|at: u64| [at - 1, at, at + 1]).collect();
    all.extend([u64::MAX - 1, u64::MAX]);
    all.sort_unstable();
    all.dedup();
    all
}

#[test]
fn object_calls_on_any_pages_change_no_other_pages() {
    let vm = guest::vm(1, 200);
    let cpu = cpu(&vm, 0);
    for stored in [true, false] {
        let object = if stored {
            Object::of_store(&cpu, Memory::new(PAGES, 0), 5).unwrap()
        } else {
            Object::try_new(&cpu, PAGES, 5).unwrap()
        };
        for (name, discards, call) in PAGES_CALLS {
            for &start in &indexes() {
                for &end in &indexes() {
                    for page in 0..PAGES {
                        write_object(&cpu, &object, page, page + 1).unwrap();
                    }
                    call(&cpu, &object, start..end);
                    for page in 0..PAGES {
                        let now = read_object(&cpu, &object, page).unwrap_or(0);
                        let may_be_gone = *discards && (start..end).contains(&page);
                        let fits = now == page + 1 || may_be_gone && now == 0;
                        assert!(fits, "{name} of {start:#x}..{end:#x}: page {page} contains {now}");
                    }
                }
            }
        }
        for index in indexes().into_iter().filter(|index| *index >= PAGES) {
            assert!(!object.has_page(&cpu, index) && !object.is_dirty(&cpu, index), "{index:#x}");
            assert!(object.write_page(&cpu, index, |_| ()).is_err(), "{index:#x}");
            assert!(object.overwrite_page(&cpu, index, |_| 0).is_err(), "{index:#x}");
        }
        for bytes in edges().into_iter().filter(|bytes| bytes.div_ceil(P) > Object::MAX_PAGES) {
            assert_eq!(object.set_len(&cpu, bytes), Err(Errno::EFBIG), "{bytes:#x}");
        }
        assert_eq!(object.pages(), PAGES);
        guest::check(&cpu, &[], &[&object], 0);
        Object::release(object, &cpu);
    }
}
