//! Pages charged against the knob `file_limit`.

use crate::addr::{FrameNumber, PAGE_SIZE};
use crate::error::Errno;
use crate::fault::FaultError;
use crate::file::{BackingStore, Object, ReadRun, StoreError, WriteRun};
use crate::heap::Shared;
use crate::knob::{Locking, Setting};
use crate::space::{MapFlags, Prot};
use crate::space::{MemoryLock, PrivateCopies, Space};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::table::Entry;
use crate::testing::guest::{self, AT, P, RW, SHARED, cpu, load, store};
use crate::testing::guest::{map_object as map, read_object, write_object};
use crate::testing::store::{Memory, file, finish};
use std::boxed::Box;
use std::sync::Arc;
use std::vec::Vec;

/// A store without writes.
#[derive(Debug)]
struct ReadOnly(Arc<Memory>);

impl BackingStore for ReadOnly {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
        self.0.read(run)
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn write(&self, _: &WriteRun<'_>) -> Result<(), StoreError> {
        unreachable!("a read-only store")
    }

    fn set_len(&self, bytes: u64) -> Result<(), Errno> {
        self.0.set_len(bytes)
    }
}

#[test]
fn stores_to_holes_stop_at_the_limit() {
    for locking in Locking::ALL {
        let vm = guest::vm(1, 256);
        vm.set(Setting::Locking(locking));
        vm.set(Setting::FileLimit(8));
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        let file = Object::try_new_charged(&cpu, 64, 0).unwrap();
        map(&cpu, &space, (0, 64), RW, SHARED, (&file, 0));
        (0..8).for_each(|page| store(&cpu, &space, AT + page * P, page).unwrap());
        assert_eq!(vm.charged_pages(), 8);
        assert_eq!(store(&cpu, &space, AT + 8 * P, 1), Err(FaultError::Bus));
        assert_eq!(load(&cpu, &space, AT + 8 * P), Err(FaultError::Bus));
        assert_eq!(write_object(&cpu, &file, 9, 1), Err(Errno::ENOSPC));
        assert_eq!(file.overwrite_page(&cpu, 9, |_| 4096), Err(Errno::ENOSPC));
        // The pages that are there can be stored to, and holes can be read by calls.
        store(&cpu, &space, AT, 77).unwrap();
        write_object(&cpu, &file, 1, 78).unwrap();
        assert_eq!(read_object(&cpu, &file, 9), None);
        // A hole makes room.
        file.free_pages(&cpu, 2..4);
        space.revoke(&cpu, &file, 2..4, PrivateCopies::Keep);
        assert_eq!(vm.charged_pages(), 6);
        store(&cpu, &space, AT + 8 * P, 1).unwrap();
        file.overwrite_page(&cpu, 9, |_| 4096).unwrap();
        assert_eq!(store(&cpu, &space, AT + 2 * P, 1), Err(FaultError::Bus));
        // Uncharged objects still get pages.
        let other = Object::try_new(&cpu, 64, 0).unwrap();
        (0..64).for_each(|page| write_object(&cpu, &other, page, page).unwrap());
        finish(&cpu, space, Vec::from([file, other]));
        assert_eq!(vm.charged_pages(), 0);
    }
}

#[test]
fn dirty_pages_of_a_read_only_store_are_charged() {
    for locking in Locking::ALL {
        let vm = guest::vm(1, 256);
        vm.set(Setting::Locking(locking));
        vm.set(Setting::FileLimit(8));
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        let memory = Memory::new(64, 0);
        let file = Object::of_store(&cpu, Box::new(ReadOnly(memory)), 0).unwrap();
        map(&cpu, &space, (0, 64), RW, SHARED, (&file, 0));
        (0..64).for_each(|page| assert_eq!(load(&cpu, &space, AT + page * P), Ok(page + 1)));
        assert_eq!(vm.charged_pages(), 0, "clean pages can leave");
        // Through an entry that was read before, twice, and through calls.
        (0..3).for_each(|page| store(&cpu, &space, AT + page * P, 90).unwrap());
        (0..3).for_each(|page| store(&cpu, &space, AT + page * P, 91).unwrap());
        write_object(&cpu, &file, 2, 92).unwrap();
        write_object(&cpu, &file, 3, 93).unwrap();
        file.overwrite_page(&cpu, 4, |_| PAGE_SIZE as usize).unwrap();
        assert_eq!(vm.charged_pages(), 5);
        // Through an entry created by the store.
        space.munmap(&cpu, AT, 64 * P).unwrap();
        map(&cpu, &space, (0, 64), RW, SHARED, (&file, 0));
        (2..8).for_each(|page| store(&cpu, &space, AT + page * P, 94).unwrap());
        assert_eq!(vm.charged_pages(), 8);
        assert_eq!(store(&cpu, &space, AT + 8 * P, 1), Err(FaultError::Bus));
        assert_eq!(load(&cpu, &space, AT + 8 * P), Ok(9));
        assert_eq!(store(&cpu, &space, AT + 8 * P, 1), Err(FaultError::Bus));
        assert_eq!(write_object(&cpu, &file, 9, 1), Err(Errno::ENOSPC));
        // The rest of the last page is cleared nevertheless.
        file.set_len(&cpu, 20 * PAGE_SIZE + 4).unwrap();
        space.revoke(&cpu, &file, 21..u64::MAX, PrivateCopies::Drop);
        assert_eq!(load(&cpu, &space, AT + 20 * P), Ok(21));
        file.set_len(&cpu, PAGE_SIZE).unwrap();
        space.revoke(&cpu, &file, 1..u64::MAX, PrivateCopies::Drop);
        assert_eq!(vm.charged_pages(), 1);
        finish(&cpu, space, Vec::from([file]));
        assert_eq!(vm.charged_pages(), 0);
    }
}

/// A panicking closure may have stored to a part of the page.
#[test]
fn a_panic_of_a_closure_keeps_the_charge_of_dirty_pages_only() {
    let vm = guest::vm(1, 256);
    vm.set(Setting::FileLimit(8));
    let cpu = cpu(&vm, 0);
    let stored = Object::of_store(&cpu, Box::new(ReadOnly(Memory::new(8, 0))), 0).unwrap();
    let plain = Object::try_new_charged(&cpu, 8, 0).unwrap();
    let planted = |call: &dyn Fn()| {
        let call = std::panic::AssertUnwindSafe(call);
        assert!(std::panic::catch_unwind(call).is_err(), "no panic");
    };
    let write = |object, page| Shared::write_page(object, &cpu, page, |_| panic!("planted"));
    let overwrite = |object, page| {
        let _ = Shared::overwrite_page(object, &cpu, page, |_| panic!("planted"));
    };
    planted(&|| overwrite(&stored, 0));
    assert_eq!(vm.charged_pages(), 0, "no page");
    planted(&|| write(&stored, 0).unwrap());
    assert_eq!(vm.charged_pages(), 1, "the page is dirty");
    planted(&|| write(&stored, 0).unwrap());
    planted(&|| overwrite(&stored, 0));
    assert_eq!(vm.charged_pages(), 1, "the page was dirty before");
    planted(&|| write(&plain, 0).unwrap());
    assert_eq!(vm.charged_pages(), 2, "a resident page");
    planted(&|| overwrite(&plain, 1));
    assert_eq!(vm.charged_pages(), 2, "no page");
    finish(&cpu, Space::new(&cpu).unwrap(), Vec::from([stored, plain]));
    assert_eq!(vm.charged_pages(), 0);
}

/// A closure may store through a mapping to the page for which the closure was called, as `write`
/// does from a mapping of the same file. The store finds the last page below the limit.
#[test]
fn a_closure_may_fault_on_its_own_page() {
    let vm = guest::vm(1, 256);
    vm.set(Setting::FileLimit(1));
    let cpu = cpu(&vm, 0);
    let stored = Object::of_store(&cpu, Box::new(ReadOnly(Memory::new(8, 0))), 0).unwrap();
    let plain = Object::try_new_charged(&cpu, 8, 0).unwrap();
    for (object, overwrites) in [(&stored, false), (&plain, false), (&plain, true)] {
        let space = Space::new(&cpu).unwrap();
        map(&cpu, &space, (0, 8), RW, SHARED, (object, 0));
        let faults = || store(&cpu, &space, AT + 8, 7).unwrap();
        if overwrites {
            let all = |_| {
                faults();
                PAGE_SIZE as usize
            };
            assert_eq!(object.overwrite_page(&cpu, 0, all), Ok(PAGE_SIZE as usize));
        } else {
            object.write_page(&cpu, 0, |_| faults()).unwrap();
        }
        assert_eq!(vm.charged_pages(), 1);
        object.set_len(&cpu, 0).unwrap();
        space.revoke(&cpu, object, 0..u64::MAX, PrivateCopies::Drop);
        object.set_len(&cpu, 8 * PAGE_SIZE).unwrap();
        assert_eq!(vm.charged_pages(), 0);
        space.exit(&cpu);
    }
    finish(&cpu, Space::new(&cpu).unwrap(), Vec::from([stored, plain]));
}

/// A closure may also read its page in. The limit counts for that page, too.
#[test]
fn a_page_that_a_closure_reads_in_is_charged_within_the_limit() {
    let vm = guest::vm(1, 256);
    vm.set(Setting::FileLimit(0));
    let cpu = cpu(&vm, 0);
    let file = Object::of_store(&cpu, Box::new(ReadOnly(Memory::new(8, 0))), 0).unwrap();
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, (0, 8), RW, SHARED, (&file, 0));
    let overwrite = |page: u64| {
        let all = |to: *mut u8| {
            assert_eq!(load(&cpu, &space, AT + page * P), Ok(page + 1));
            // SAFETY: the page that is lent.
            unsafe { to.write_bytes(0, PAGE_SIZE as usize) };
            PAGE_SIZE as usize
        };
        file.overwrite_page(&cpu, page, all)
    };
    assert_eq!(overwrite(5), Err(Errno::ENOSPC));
    assert_eq!((vm.charged_pages(), load(&cpu, &space, AT + 5 * P)), (0, Ok(6)));
    // The page was read with the first one.
    vm.set(Setting::FileLimit(1));
    assert_eq!(overwrite(0), Ok(PAGE_SIZE as usize));
    assert_eq!((vm.charged_pages(), load(&cpu, &space, AT)), (1, Ok(0)));
    assert_eq!(overwrite(1), Err(Errno::ENOSPC));
    finish(&cpu, space, Vec::from([file]));
    assert_eq!(vm.charged_pages(), 0);
}

/// Two CPUs that store to one page at once need room for one page.
#[test]
fn two_stores_to_one_page_are_charged_once() {
    const PAGES: u64 = if cfg!(miri) { 4 } else { 200 };
    let vm = guest::vm(2, 1024);
    let here = cpu(&vm, 0);
    let space = Space::new(&here).unwrap();
    let memory = Memory::new(PAGES, 0);
    let file = Object::of_store(&here, Box::new(ReadOnly(memory)), 0).unwrap();
    map(&here, &space, (0, PAGES), RW, SHARED, (&file, 0));
    // Later stores to a half of the pages find entries that forbid them.
    (0..PAGES / 2).for_each(|page| assert_eq!(load(&here, &space, AT + page * P), Ok(page + 1)));
    let arrived = AtomicU64::new(0);
    let stores = |cpu: &guest::TestCpu<'_>, own: u64| {
        let mut barriers = 0;
        let mut meet = || {
            barriers += 2;
            arrived.fetch_add(1, Ordering::SeqCst);
            let since = std::time::Instant::now();
            while arrived.load(Ordering::SeqCst) < barriers {
                assert!(since.elapsed().as_secs() < 100, "the other CPU failed");
                cpu.serve_flushes();
                std::thread::yield_now();
            }
        };
        for page in 0..PAGES {
            vm.set(Setting::FileLimit(page + 1));
            meet();
            if page % 3 == own {
                let written = loop {
                    match write_object(cpu, &file, page, own) {
                        // The other CPU reads the page in.
                        Err(Errno::EAGAIN) => std::thread::yield_now(),
                        written => break written,
                    }
                };
                written.unwrap();
            } else {
                store(cpu, &space, AT + page * P, own).unwrap();
            }
            assert_eq!(vm.charged_pages(), page + 1);
            meet();
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| stores(&cpu(&vm, 1), 1));
        stores(&here, 0);
    });
    finish(&here, space, Vec::from([file]));
    assert_eq!(vm.charged_pages(), 0);
}

#[test]
fn stores_of_a_device_are_charged() {
    let vm = guest::vm(1, 256);
    vm.set(Setting::FileLimit(1));
    let cpu = cpu(&vm, 0);
    let file = Object::of_store(&cpu, Box::new(ReadOnly(Memory::new(64, 0))), 0).unwrap();
    (0..3).for_each(|page| assert_eq!(read_object(&cpu, &file, page), Some(page + 1)));
    file.note_stored(&cpu, 1..64);
    file.note_stored(&cpu, 1..64);
    let there = (1..64).filter(|page| file.has_page(&cpu, *page)).count() as u64;
    assert!((2..63).contains(&there), "{there} pages were read");
    assert_eq!(vm.charged_pages(), there, "the resident pages");
    finish(&cpu, Space::new(&cpu).unwrap(), Vec::from([file]));
    assert_eq!(vm.charged_pages(), 0);
}

/// If evictable memory is smaller than the goal of background reclaim, the pages of a file used by
/// programs stay.
#[test]
fn an_unreachable_goal_does_not_evict_used_pages() {
    const FRAMES: u64 = 1024;
    const USED: u64 = 40;
    let vm = guest::vm(1, FRAMES as u32);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let memory = Memory::new(USED, 0);
    let file = file(&cpu, &memory);
    map(&cpu, &space, (0, USED), Prot::READ, SHARED, (&file, 0));
    // Private memory without a swap area.
    let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::FIXED | MapFlags::NORESERVE;
    space.mmap(&cpu, AT + 64 * P, FRAMES * P, RW, flags).unwrap();
    let mut page = 64;
    while vm.free_frames() > 90 {
        store(&cpu, &space, AT + page * P, page).unwrap();
        page += 1;
    }
    let round = || {
        for page in 0..USED {
            assert_eq!(load(&cpu, &space, AT + page * P), Ok(page + 1));
            cpu.reclaim_ahead();
        }
    };
    (0..4).for_each(|_| round());
    memory.reads.lock().unwrap().clear();
    (0..20).for_each(|_| round());
    let again = memory.reads.lock().unwrap().len();
    assert!(again <= 2, "{again} reads of pages that were in use");
    // With more memory the goal is as before.
    space.munmap(&cpu, AT + 64 * P, FRAMES * P).unwrap();
    cpu.drain();
    cpu.reclaim_ahead();
    space.mlock(&cpu, AT, USED * P, MemoryLock::No).unwrap();
    finish(&cpu, space, Vec::from([file]));
}

/// Pages of a file replace private memory step by step, while memory is short: the goal of
/// background reclaim rises with the evictable pages.
#[test]
fn a_lowered_goal_rises_with_the_evictable_pages() {
    const FRAMES: u64 = 1024;
    const PAGES: u64 = 2000;
    let vm = guest::vm(1, FRAMES as u32);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let memory = Memory::new(PAGES, 0);
    let file = file(&cpu, &memory);
    map(&cpu, &space, (0, PAGES), Prot::READ, SHARED, (&file, 0));
    // Private memory without a swap area.
    let (first, flags) = (AT + PAGES * P, MapFlags::PRIVATE | MapFlags::ANONYMOUS);
    let flags = flags | MapFlags::FIXED | MapFlags::NORESERVE;
    space.mmap(&cpu, first, FRAMES * P, RW, flags).unwrap();
    let mut private = 0;
    while vm.free_frames() > 90 {
        store(&cpu, &space, first + private * P, 1).unwrap();
        private += 1;
    }
    let mut next = 0;
    let mut read = |pages: u64| {
        let most = (0..pages).map(|_| {
            assert_eq!(load(&cpu, &space, AT + next * P), Ok(next + 1));
            next = (next + 1) % PAGES;
            cpu.reclaim_ahead();
            cpu.drain();
            vm.free_frames()
        });
        most.max().unwrap()
    };
    // Reclaim scans all of memory without reaching its goal, and lowers the goal.
    read(200);
    let few = read(80);
    assert!(few < FRAMES / 16, "{few} frames are free while private memory is large");
    for part in (0..private - 64).step_by(16) {
        space.munmap(&cpu, first + part * P, 16 * P).unwrap();
        read(16);
    }
    let most = read(4 * FRAMES);
    assert!(most >= 3 * FRAMES / 32, "{most} frames are free at most, of {FRAMES}");
    finish(&cpu, space, Vec::from([file]));
}

/// A page has its charge only while the entry of the object maps the frame of the page, dirty. The
/// page of another frame, a clean page and a page that has left lack the charge.
#[test]
fn a_page_lacks_its_charge_unless_its_entry_is_dirty() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let charged = Object::of_store(&cpu, Box::new(ReadOnly(Memory::new(8, 0))), 0).unwrap();
    let plain = Object::try_new(&cpu, 8, 0).unwrap();
    assert!(charged.is_charged() && !plain.is_charged());
    let [frame, other] = [FrameNumber(7), FrameNumber(8)];
    let entries = [
        (Entry::leaf(frame).dirty(), false),
        (Entry::leaf(frame), true),
        (Entry::leaf(other).dirty(), true),
        (Entry::leaf(other), true),
        (Entry::NONE, true),
    ];
    for (entry, lacks) in entries {
        let name = AtomicU64::new(entry.0);
        assert_eq!(charged.lacks_charge(&name, frame), lacks, "{entry:?}");
        assert!(!plain.lacks_charge(&name, frame), "{entry:?}");
    }
    finish(&cpu, Space::new(&cpu).unwrap(), Vec::from([charged, plain]));
}
