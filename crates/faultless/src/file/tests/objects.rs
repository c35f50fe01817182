//! Mappings of objects: the results of Linux, the ownership, and chosen interleavings with
//! truncation.

use crate::addr::VirtRange;
use crate::audit::{audit, audit_with};
use crate::error::Errno::{self, EACCES, EFBIG, EINVAL, EOVERFLOW};
use crate::fault::{Access, FaultError, FaultKind};
use crate::file::Object;
use crate::frame::FrameUse;
use crate::heap::Shared;
use crate::knob::{Locking, Setting};
use crate::space::{Advice, Backing, Label, MapFlags, PrivateCopies, Prot, RemapFlags, Space};
use crate::stat::Counter;
use crate::sync::wait::Spin;
use crate::table::Entry;
use crate::table::node::{self, LAST};
use crate::table::protocol;
use crate::table::walk::{Reached, descend};
use crate::testing::TestMachine;
use crate::testing::guest::{self, AT, P, PRIVATE, RW, SHARED, TestCpu, between, cpu, load, store};
use crate::testing::guest::{map_object as map, read_object as read, write_object as write};
use std::format;
use std::string::{String, ToString};
use std::thread;
use std::time::Duration;
use std::vec::Vec;

type File = Shared<Object>;

/// Creates a file. Page `n` of `written` starts with the word `n + 1`; the other pages are holes.
fn file(cpu: &TestCpu<'_>, pages: u64, written: impl IntoIterator<Item = u64>) -> File {
    let file = Object::try_new(cpu, pages, 77).unwrap();
    for index in written {
        write(cpu, &file, index, index + 1).unwrap();
    }
    file
}

fn truncate(cpu: &TestCpu<'_>, space: &Space<TestMachine>, file: &File, pages: u64) {
    file.set_pages(cpu, pages).unwrap();
    space.revoke(cpu, file, pages..u64::MAX, PrivateCopies::Drop);
}

/// Returns the positions, in pages from `AT` on, of the mapped pages among the first 64.
fn present(cpu: &TestCpu<'_>, space: &Space<TestMachine>) -> Vec<u64> {
    (0..64).filter(|page| space.entry_at(cpu, AT + page * P).is_present()).collect()
}

/// Every frame is accounted for, now and when all is over.
fn finish(cpu0: &TestCpu<'_>, spaces: Vec<Space<TestMachine>>, files: Vec<File>) {
    let vm = cpu0.vm();
    if vm.machine().cpus > 1 {
        cpu(vm, 1).drain();
    }
    cpu0.drain();
    let (of_spaces, of_files): (Vec<_>, Vec<_>) = (spaces.iter().collect(), files.iter().collect());
    audit_with(cpu0, &of_spaces, &of_files).unwrap();
    spaces.into_iter().for_each(|space| space.exit(cpu0));
    files.into_iter().for_each(|file| Object::release(file, cpu0));
    cpu0.drain();
    assert_eq!(audit(cpu0, &[]).unwrap().taken(), 1, "only the zero page remains");
}

#[test]
fn a_kernel_reads_and_writes_and_resizes() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let file = file(&cpu, 3, [1]);
    assert_eq!([0, 1, 2, 3].map(|index| read(&cpu, &file, index)), [None, Some(2), None, None]);
    assert_eq!((file.has_page(&cpu, 1), file.has_page(&cpu, 2)), (true, false));
    assert_eq!(write(&cpu, &file, 3, 1), Err(EFBIG), "beyond the end");
    assert_eq!((file.resident_pages(&cpu), file.tag()), (1, 77));
    file.set_pages(&cpu, 600).unwrap();
    write(&cpu, &file, 599, 9).unwrap();
    file.set_pages(&cpu, 1).unwrap();
    file.set_pages(&cpu, 600).unwrap();
    assert_eq!((read(&cpu, &file, 599), read(&cpu, &file, 1)), (None, None), "zeros again");
    assert_eq!(file.set_pages(&cpu, Object::MAX_PAGES + 1), Err(EFBIG));
    assert_eq!(Object::try_new(&cpu, u64::MAX, 0).err(), Some(EFBIG));
    file.set_pages(&cpu, Object::MAX_PAGES).unwrap();
    write(&cpu, &file, Object::MAX_PAGES - 1, 5).unwrap();
    assert_eq!(read(&cpu, &file, Object::MAX_PAGES - 1), Some(5));
    assert_eq!(read(&cpu, &file, u64::MAX), None);
    file.free_pages(&cpu, 0..u64::MAX);
    assert_eq!(file.resident_pages(&cpu), 0);
    finish(&cpu, Vec::new(), Vec::from([file]));
}

#[test]
fn the_levels_of_an_object_match_its_pages() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let tables = || vm.census(&cpu).unwrap().tables;
    let grown = file(&cpu, 512, [0, 511]);
    assert_eq!(tables(), 1, "one table of a small object");
    grown.set_pages(&cpu, Object::MAX_PAGES).unwrap();
    assert_eq!(read(&cpu, &grown, 512), None);
    assert_eq!(tables(), 1, "a new length and a read need no table");
    let far = [512, 512 * 512, 512 * 512 * 512, Object::MAX_PAGES - 1];
    // A root and the tables below the root. The last page is below an existing root.
    for (index, more) in far.into_iter().zip([2, 3, 4, 3]) {
        let before = tables();
        write(&cpu, &grown, index, index).unwrap();
        assert_eq!(tables() - before, more, "of page {index}");
    }
    assert_eq!([0, 511].map(|index| read(&cpu, &grown, index)), [Some(1), Some(512)]);
    assert_eq!(far.map(|index| read(&cpu, &grown, index)), far.map(Some));
    assert_eq!(grown.resident_pages(&cpu), 6);
    grown.set_pages(&cpu, 512).unwrap();
    assert_eq!(grown.resident_pages(&cpu), 2);
    // An object created with many pages has its root at once.
    let before = tables();
    let large = file(&cpu, 513, [512]);
    assert_eq!(tables() - before, 2);
    finish(&cpu, Vec::new(), Vec::from([grown, large]));
}

#[test]
fn a_read_fault_maps_the_present_pages_around_it() {
    let vm = guest::vm(1, 512);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    // Pages 3..23 of the area are pages 5..25 of the file, of which 10 and 20 are not there.
    let file = file(&cpu, 64, (0..64).filter(|index| index % 10 != 0));
    map(&cpu, &space, (3, 20), RW, SHARED, (&file, 5));
    let before = vm.totals();
    assert_eq!(load(&cpu, &space, AT + 6 * P), Ok(9));
    let around: Vec<u64> = (3..16).filter(|page| (page + 2) % 10 != 0).collect();
    assert_eq!(present(&cpu, &space), around, "of the same block of 16 pages, and of the VMA");
    let counted = vm.totals().since(&before);
    assert_eq!(counted.get(Counter::SharedPage), 1);
    assert_eq!(counted.get(Counter::AroundPage), around.len() as u64 - 1);
    assert_eq!(space.resident_pages(&cpu), around.len() as u64);
    // No access faults again, not even a store.
    around.iter().for_each(|page| store(&cpu, &space, AT + page * P, 100 + page).unwrap());
    assert_eq!(vm.totals().since(&before).get(Counter::Faults), 1);
    assert_eq!(read(&cpu, &file, 6), Some(104));
    // A store maps only its own page, as does a read if the knob is 1.
    store(&cpu, &space, AT + 16 * P, 1).unwrap();
    vm.set(Setting::FaultAroundPages(1));
    load(&cpu, &space, AT + 20 * P).unwrap();
    assert_eq!(present(&cpu, &space).split_off(around.len()), [16, 20]);
    finish(&cpu, Vec::from([space]), Vec::from([file]));
}

#[test]
fn fault_around_ends_with_the_tables() {
    let vm = guest::vm(1, 512);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let file = file(&cpu, 520, 500..520);
    // The file's table ends in the middle of a block of the area.
    map(&cpu, &space, (0, 20), Prot::READ, PRIVATE, (&file, 500));
    vm.set(Setting::FaultAroundPages(64));
    load(&cpu, &space, AT + P).unwrap();
    assert_eq!(present(&cpu, &space), (0..12).collect::<Vec<_>>());
    load(&cpu, &space, AT + 13 * P).unwrap();
    assert_eq!(present(&cpu, &space), (0..20).collect::<Vec<_>>());
    finish(&cpu, Vec::from([space]), Vec::from([file]));
}

#[test]
fn private_stores_stay_private_and_shared_stores_do_not() {
    let vm = guest::vm(1, 512);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let file = file(&cpu, 4, 0..3);
    map(&cpu, &space, (0, 4), RW, PRIVATE, (&file, 0));
    map(&cpu, &space, (8, 4), RW, SHARED, (&file, 0));
    // Untouched, read before, and a hole.
    assert_eq!(space.fault_remote(&cpu, AT, Access::Write), Ok(FaultKind::Copy));
    store(&cpu, &space, AT, 50).unwrap();
    assert_eq!(load(&cpu, &space, AT + P), Ok(2));
    assert_eq!(space.fault_remote(&cpu, AT + P, Access::Write), Ok(FaultKind::Copy));
    store(&cpu, &space, AT + P, 51).unwrap();
    assert_eq!(space.fault_remote(&cpu, AT + 3 * P, Access::Write), Ok(FaultKind::Anon));
    store(&cpu, &space, AT + 3 * P, 53).unwrap();
    assert_eq!(
        [0, 1, 2, 3].map(|index| read(&cpu, &file, index)),
        [Some(1), Some(2), Some(3), None]
    );
    // A page without a private copy shows the file's page.
    assert_eq!(load(&cpu, &space, AT + 2 * P), Ok(3));
    store(&cpu, &space, AT + 10 * P, 60).unwrap();
    assert_eq!((load(&cpu, &space, AT + 2 * P), read(&cpu, &file, 2)), (Ok(60), Some(60)));
    // A child has private copies, and also the file's pages.
    let child = space.fork(&cpu).unwrap();
    store(&cpu, &child, AT, 70).unwrap();
    store(&cpu, &child, AT + 8 * P, 71).unwrap();
    assert_eq!([0, 8].map(|page| load(&cpu, &space, AT + page * P)), [Ok(50), Ok(71)]);
    // Advice against the copies brings the file back.
    space.madvise(&cpu, AT, 4 * P, Advice::DontNeed).unwrap();
    let seen = [0, 1, 2, 3].map(|page| load(&cpu, &space, AT + page * P).unwrap());
    assert_eq!(seen, [71, 2, 60, 0]);
    finish(&cpu, Vec::from([space, child]), Vec::from([file]));
}

#[test]
fn the_last_reference_ends_the_object() {
    let vm = guest::vm(1, 512);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let file = file(&cpu, 4, 0..4);
    map(&cpu, &space, (0, 4), Prot::READ, SHARED, (&file, 0));
    // The name is removed. The mapping and the child's mapping keep the object.
    Object::release(file, &cpu);
    let child = space.fork(&cpu).unwrap();
    space.exit(&cpu);
    assert_eq!(load(&cpu, &child, AT + 3 * P), Ok(4));
    child.munmap(&cpu, AT, 4 * P).unwrap();
    cpu.drain();
    let census = audit(&cpu, &[&child]).unwrap();
    assert_eq!((census.shared, census.tables), (0, 3), "tables above the last level remain");
    finish(&cpu, Vec::from([child]), Vec::new());
}

#[test]
fn mmap_of_an_object_refuses() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let file = file(&cpu, 4, [0]);
    let call = |len: u64, prot, flags, first, may_write| {
        let backing = Backing { object: &file, first, may_write };
        space.mmap_object(&cpu, AT, len, prot, flags, backing).map_err(|error| error.errno)
    };
    assert_eq!(call(P, RW, SHARED, 0, false), Err(EACCES));
    assert_eq!(call(0, RW, SHARED, 0, true), Err(EINVAL));
    assert_eq!(call(P, RW, SHARED, u64::MAX, true), Err(EOVERFLOW));
    assert_eq!(call(2 * P, RW, SHARED, (1 << 51) - 2, true), Err(EOVERFLOW));
    assert_eq!(call(P, RW, MapFlags::FIXED, 0, true), Err(EINVAL));
    assert_eq!(space.map_count(&cpu), 0);
    assert_eq!(call(P, RW, SHARED, (1 << 51) - 2, true), Ok(AT));
    assert_eq!(load(&cpu, &space, AT), Err(FaultError::Bus));
    // A shared mapping of a read-only file never becomes writable, also after a move and in a
    // child.
    assert_eq!(call(4 * P, Prot::READ, SHARED, 0, false), Ok(AT));
    let protect = |at, prot| space.mprotect(&cpu, at, P, prot).map_err(|error| error.errno);
    assert_eq!(protect(AT, RW), Err(EACCES));
    assert_eq!(protect(AT, Prot::READ | Prot::EXEC), Ok(()));
    let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
    space.mremap(&cpu, AT + P, P, 2 * P, flags, AT + 32 * P).unwrap();
    assert_eq!(protect(AT + 33 * P, RW), Err(EACCES));
    let child = space.fork(&cpu).unwrap();
    let errno = child.mprotect(&cpu, AT + 3 * P, P, RW).map_err(|error| error.errno);
    assert_eq!(errno, Err(EACCES));
    // A private mapping may become writable anyway.
    assert_eq!(call(4 * P, Prot::READ, PRIVATE, 0, false), Ok(AT));
    assert_eq!(protect(AT, RW), Ok(()));
    store(&cpu, &space, AT, 9).unwrap();
    assert_eq!(read(&cpu, &file, 0), Some(1));
    let advise = |advice| space.madvise(&cpu, AT, P, advice).map_err(|error| error.errno);
    assert_eq!((advise(Advice::Free), advise(Advice::WipeOnFork)), (Err(EINVAL), Err(EINVAL)));
    finish(&cpu, Vec::from([space, child]), Vec::from([file]));
}

#[test]
fn accesses_beyond_the_end_raise_sigbus() {
    let vm = guest::vm(1, 512);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let file = file(&cpu, 6, 0..6);
    map(&cpu, &space, (0, 8), RW, SHARED, (&file, 0));
    map(&cpu, &space, (8, 8), RW, PRIVATE, (&file, 0));
    map(&cpu, &space, (16, 2), RW, PRIVATE, (&file, 4));
    load(&cpu, &space, AT).unwrap();
    load(&cpu, &space, AT + 16 * P).unwrap();
    (8..14).for_each(|page| store(&cpu, &space, AT + page * P, 100 + page).unwrap());
    assert_eq!(load(&cpu, &space, AT + 6 * P), Err(FaultError::Bus));
    assert_eq!(store(&cpu, &space, AT + 14 * P, 1), Err(FaultError::Bus));
    truncate(&cpu, &space, &file, 3);
    assert_eq!(present(&cpu, &space), [0, 1, 2, 8, 9, 10], "private copies are also unmapped");
    assert_eq!(load(&cpu, &space, AT + 3 * P), Err(FaultError::Bus));
    assert_eq!(load(&cpu, &space, AT + 11 * P), Err(FaultError::Bus));
    assert_eq!(load(&cpu, &space, AT + 8 * P), Ok(108), "pages within the end stay mapped");
    assert_eq!(file.resident_pages(&cpu), 3);
    file.set_pages(&cpu, 5).unwrap();
    assert_eq!((load(&cpu, &space, AT + 3 * P), load(&cpu, &space, AT + 11 * P)), (Ok(0), Ok(0)));
    assert_eq!(load(&cpu, &space, AT + 17 * P), Err(FaultError::Bus));
    // A revocation has no effect in a space without a mapping of the object.
    let other = Space::new(&cpu).unwrap();
    other.revoke(&cpu, &file, 0..u64::MAX, PrivateCopies::Drop);
    finish(&cpu, Vec::from([space, other]), Vec::from([file]));
}

/// A hole takes the object's pages out of all mappings, and none of the private copies.
#[test]
fn punching_a_hole_leaves_private_copies() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let file = file(&cpu, 8, 0..8);
    map(&cpu, &space, (0, 8), RW, SHARED, (&file, 0));
    map(&cpu, &space, (8, 8), RW, PRIVATE, (&file, 0));
    map(&cpu, &space, (16, 3), RW, PRIVATE, (&file, 4));
    // In several faults: a read fault maps the pages around its page.
    for page in [1, 9, 17] {
        load(&cpu, &space, AT + page * P).unwrap();
    }
    [8, 11, 13, 16].iter().for_each(|page| store(&cpu, &space, AT + page * P, 100 + page).unwrap());
    space.mprotect(&cpu, AT + 13 * P, P, Prot::empty()).unwrap();
    file.free_pages(&cpu, 2..6);
    space.revoke(&cpu, &file, 2..6, PrivateCopies::Keep);
    let left = [0, 1, 6, 7, 8, 9, 11, 14, 15, 16, 18];
    assert_eq!(present(&cpu, &space), left, "copies and pages beside the hole");
    space.mprotect(&cpu, AT + 13 * P, P, RW).unwrap();
    let loaded = [8, 9, 10, 11, 12, 13, 14, 16, 17, 18]
        .map(|page| load(&cpu, &space, AT + page * P).unwrap());
    assert_eq!(loaded, [108, 2, 0, 111, 0, 113, 7, 116, 0, 7]);
    assert_eq!([1, 2, 5, 6].map(|page| load(&cpu, &space, AT + page * P).unwrap()), [2, 0, 0, 7]);
    finish(&cpu, Vec::from([space]), Vec::from([file]));
}

/// A page removed from the object is used as before until its revocation, and never becomes
/// private.
#[test]
fn an_orphan_is_copied_and_not_reused() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let file = file(&cpu, 1, [0]);
    map(&cpu, &space, (0, 1), RW, PRIVATE, (&file, 0));
    load(&cpu, &space, AT).unwrap();
    file.free_pages(&cpu, 0..1);
    assert_eq!(vm.frames.meta(space.entry_at(&cpu, AT).frame()).refs(), 1);
    assert_eq!(space.fault_remote(&cpu, AT, Access::Write), Ok(FaultKind::Copy));
    assert_eq!((load(&cpu, &space, AT), read(&cpu, &file, 0)), (Ok(1), None));
    finish(&cpu, Vec::from([space]), Vec::from([file]));
}

#[test]
fn a_page_read_by_the_kernel_outlives_its_object() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let target = file(&cpu, 1, []);
    map(&cpu, &space, (0, 1), RW, SHARED, (&target, 0));
    let source = file(&cpu, 1, [0]);
    let share = source.clone();
    let copy = |bytes: Option<*const u8>| {
        Object::release(share, &cpu);
        source.set_pages(&cpu, 0).unwrap();
        // The user's side of the copy faults, and gets another frame. SAFETY: the aligned bytes of
        // a page.
        let value = || unsafe { bytes.unwrap().cast::<u64>().read() };
        assert_eq!(value(), 1);
        store(&cpu, &space, AT, 99).unwrap();
        assert_eq!(value(), 1);
    };
    source.read_page(&cpu, 0, copy).unwrap();
    assert_eq!(read(&cpu, &source, 0), None);
    finish(&cpu, Vec::from([space]), Vec::from([source, target]));
}

#[test]
fn a_fault_on_a_hole_overtaken_by_truncation_makes_no_page() {
    let vm = guest::vm(2, 512);
    let cpu0 = cpu(&vm, 0);
    let space = Space::new(&cpu0).unwrap();
    let file = file(&cpu0, 8, [0]);
    map(&cpu0, &space, (0, 8), RW, SHARED, (&file, 0));
    load(&cpu0, &space, AT).unwrap();
    let got = between(
        &vm,
        |other| truncate(other, &space, &file, 2),
        || space.fault_remote(&cpu0, AT + 4 * P, Access::Read),
    );
    assert_eq!(got, Err(FaultError::Bus));
    assert_eq!(vm.totals().get(Counter::Bus), 1);
    file.set_pages(&cpu0, 8).unwrap();
    assert!(!file.has_page(&cpu0, 4), "installed beyond the end");
    finish(&cpu0, Vec::from([space]), Vec::from([file]));
}

#[test]
fn a_private_copy_overtaken_by_truncation_is_of_the_new_file() {
    for regrown in [false, true] {
        let vm = guest::vm(2, 512);
        let cpu0 = cpu(&vm, 0);
        let space = Space::new(&cpu0).unwrap();
        let file = file(&cpu0, 8, 0..8);
        map(&cpu0, &space, (0, 8), RW, PRIVATE, (&file, 0));
        store(&cpu0, &space, AT, 1).unwrap();
        // Untouched, and read before.
        load(&cpu0, &space, AT + 3 * P).unwrap();
        space.madvise(&cpu0, AT + 4 * P, P, Advice::DontNeed).unwrap();
        for page in [3, 4] {
            let got = between(
                &vm,
                |other| {
                    file.set_pages(other, 8).unwrap();
                    truncate(other, &space, &file, 2);
                    if regrown {
                        file.set_pages(other, 8).unwrap();
                    }
                },
                || store(&cpu0, &space, AT + page * P + 8, 5),
            );
            if regrown {
                assert_eq!((got, load(&cpu0, &space, AT + page * P)), (Ok(()), Ok(0)));
                space.madvise(&cpu0, AT + page * P, P, Advice::DontNeed).unwrap();
                write(&cpu0, &file, 4, 5).unwrap();
            } else {
                assert_eq!(got, Err(FaultError::Bus));
                file.set_pages(&cpu0, 8).unwrap();
                write(&cpu0, &file, 4, 5).unwrap();
            }
        }
        finish(&cpu0, Vec::from([space]), Vec::from([file]));
    }
}

#[test]
fn a_reverted_block_leaves_no_trace() {
    let vm = guest::vm(2, 512);
    let cpu0 = cpu(&vm, 0);
    let space = Space::new(&cpu0).unwrap();
    let file = file(&cpu0, 32, (0..32).filter(|&index| index != 4));
    map(&cpu0, &space, (0, 32), RW, SHARED, (&file, 0));
    load(&cpu0, &space, AT + 31 * P).unwrap();
    let resident = space.resident_pages(&cpu0);
    let before = vm.totals();
    // Because of the hole, the fault fills a frame. Because of the unmapping of the last page, the
    // fault looks up its VMA again.
    let got = between(
        &vm,
        |other| space.munmap(other, AT + 15 * P, P).unwrap(),
        || space.fault_remote(&cpu0, AT + 4 * P, Access::Read),
    );
    assert_eq!(got, Ok(FaultKind::Shared));
    let counted = vm.totals().since(&before);
    assert_eq!((counted.get(Counter::SpfVmaReplaced), counted.get(Counter::SharedPage)), (1, 1));
    assert_eq!((counted.aborts(), counted.get(Counter::RangeLockFault)), (0, 0));
    assert_eq!(counted.get(Counter::AroundPage), 14, "only by the second check");
    assert_eq!(space.resident_pages(&cpu0), resident + 15);
    assert_eq!(present(&cpu0, &space).len(), 15 + 16);
    finish(&cpu0, Vec::from([space]), Vec::from([file]));
}

#[test]
fn busy_entries_are_skipped() {
    let vm = guest::vm(1, 512);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let file = file(&cpu, 16, 0..16);
    map(&cpu, &space, (0, 16), RW, SHARED, (&file, 0));
    store(&cpu, &space, AT + 9 * P, 1).unwrap();
    let section = cpu.section();
    // SAFETY: inside a grace section.
    let Reached::Last(slots) = (unsafe { descend(vm.machine(), space.root(), AT) }) else {
        panic!("a table")
    };
    let held = protocol::take(&slots[node::index(AT + 7 * P, LAST)], Entry::NONE, &Spin).unwrap();
    assert_eq!(space.fault_remote(&cpu, AT, Access::Read), Ok(FaultKind::Shared));
    assert_eq!(vm.totals().get(Counter::AroundPage), 13);
    held.revert();
    drop(section);
    assert_eq!(present(&cpu, &space).len(), 15);
    assert_eq!(load(&cpu, &space, AT + 7 * P), Ok(8));
    finish(&cpu, Vec::from([space]), Vec::from([file]));
}

/// For each number of frames left, each step is done or refused, and every frame is accounted for.
#[test]
fn out_of_memory_with_files_leaks_no_frames() {
    let mut refused = 0;
    for left in 0..20 {
        let vm = guest::vm(1, 512);
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        let kept = file(&cpu, 600, (0..8).chain(595..600));
        map(&cpu, &space, (0, 16), RW, SHARED, (&kept, 0));
        map(&cpu, &space, (1000, 16), RW, PRIVATE, (&kept, 590));
        cpu.drain();
        vm.set(Setting::FrameLimit(vm.total_frames() - vm.free_frames() + left));
        let check = || {
            cpu.drain();
            audit_with(&cpu, &[&space], &[&kept]).unwrap();
        };
        for page in [0, 9, 1005, 1003, 1015] {
            for access in [Access::Read, Access::Write] {
                match space.fault_remote(&cpu, AT + page * P, access) {
                    Ok(_) => {}
                    Err(FaultError::OutOfMemory) => refused += 1,
                    // Page 1015 is page 605 of the file.
                    Err(error) => assert_eq!((page, error), (1015, FaultError::Bus)),
                }
                check();
            }
        }
        if write(&cpu, &kept, 300, 3).is_err() {
            assert_eq!(read(&cpu, &kept, 300), None);
            refused += 1;
        }
        check();
        match Object::try_new(&cpu, 4, 1) {
            Ok(new) => {
                let _ = write(&cpu, &new, 0, 1);
                Object::release(new, &cpu);
            }
            Err(error) => assert_eq!(error, Errno::ENOMEM),
        }
        truncate(&cpu, &space, &kept, 1);
        check();
        finish(&cpu, Vec::from([space]), Vec::from([kept]));
    }
    assert!(refused > 20, "memory was never short");
}

#[test]
fn the_map_names_files_as_in_proc() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let file = file(&cpu, 4, []);
    map(&cpu, &space, (0, 2), Prot::READ | Prot::EXEC, PRIVATE, (&file, 1));
    let shared = MapFlags::SHARED | MapFlags::FIXED;
    space.mmap(&cpu, AT + 8 * P, P, RW, shared).unwrap();
    let label = |tag| Some(Label { device: (0x103, 0x1a), inode: tag * 1000, path: "/tmp/a\nb" });
    let lines: Vec<String> =
        space.maps_with(&cpu, label).to_string().lines().map(String::from).collect();
    let start = "40000000-40002000 r-xp 00001000 103:1a 77000 ";
    assert_eq!(lines[0], format!("{start:73}/tmp/a\\012b"));
    let start = "40008000-40009000 rw-s 00000000 00:00 0 ";
    assert_eq!(lines[1], format!("{start:73}/dev/zero (deleted)"));
    let unnamed = space.maps(&cpu).to_string();
    assert_eq!(unnamed.lines().next(), Some("40000000-40002000 r-xp 00001000 00:00 77 "));
    let nobody = |_| None::<Label<&str>>;
    assert_eq!(space.maps_with(&cpu, nobody).to_string(), unnamed);
    finish(&cpu, Vec::from([space]), Vec::from([file]));
}

#[test]
fn cached_pages_are_in_core() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let file = file(&cpu, 4, [1]);
    map(&cpu, &space, (0, 4), RW, PRIVATE, (&file, 0));
    store(&cpu, &space, AT + 3 * P, 1).unwrap();
    let mut there = Vec::new();
    space.mincore(&cpu, AT, 4 * P, |present| there.push(present)).unwrap();
    assert_eq!(there, [false, true, false, true]);
    finish(&cpu, Vec::from([space]), Vec::from([file]));
}

#[test]
fn shared_memory_is_identified_by_object_and_offset() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let (one, two) = (file(&cpu, 8, []), file(&cpu, 8, []));
    let (space, other) = (Space::new(&cpu).unwrap(), Space::new(&cpu).unwrap());
    map(&cpu, &space, (0, 4), RW, SHARED, (&one, 2));
    map(&cpu, &space, (8, 4), RW, PRIVATE, (&one, 2));
    map(&cpu, &other, (20, 4), RW, SHARED, (&one, 0));
    map(&cpu, &other, (30, 4), RW, SHARED, (&two, 0));
    let place = |space: &Space<_>, page: u64| space.shared_place(&cpu, AT + page * P + 12);
    assert_eq!(place(&space, 1), Some((one.id(), 3 * P + 12)));
    assert_eq!(place(&space, 1), place(&other, 23), "the same, mapped elsewhere");
    assert_ne!(place(&other, 30), place(&other, 20), "another object");
    assert_eq!((place(&space, 8), place(&space, 4)), (None, None), "private; not mapped");
    finish(&cpu, Vec::from([space, other]), Vec::from([one, two]));
}

#[test]
fn vmas_and_pages_are_listed() {
    let vm = guest::vm(1, 256);
    let cpu = cpu(&vm, 0);
    let (space, other) = (Space::new(&cpu).unwrap(), Space::new(&cpu).unwrap());
    let file = file(&cpu, 8, []);
    map(&cpu, &space, (0, 8), RW, SHARED, (&file, 0));
    map(&cpu, &space, (8, 4), RW, PRIVATE, (&file, 0));
    map(&cpu, &other, (0, 8), RW, SHARED, (&file, 0));
    space.munmap(&cpu, AT + 2 * P, P).unwrap();
    let listed = |first: u64, end: u64, most: usize| {
        let mut listed = Vec::new();
        space.each_area(&cpu, VirtRange::new(AT + first * P, AT + end * P), |area| {
            assert!(area.memory.object().is_some_and(|object| object.same(&file)));
            listed.push(((area.range.start - AT) / P, area.range.pages(), area.offset));
            listed.len() < most
        });
        listed
    };
    assert_eq!(listed(0, 12, 9), [(0, 2, 0), (3, 5, 3), (8, 4, 0)], "all");
    assert_eq!(
        listed(1, 3, 9),
        [(0, 2, 0)],
        "whole mappings, without mappings that begin at the end"
    );
    assert_eq!(listed(0, 12, 2), [(0, 2, 0), (3, 5, 3)], "at most the requested number");

    let page = |space: &Space<_>, page: u64| {
        space.page_at(&cpu, AT + page * P).map(|page| (page.usage, page.exclusive))
    };
    assert_eq!((page(&space, 0), page(&space, 2)), (None, None), "no page; not mapped");
    store(&cpu, &space, AT, 1).unwrap();
    assert_eq!(page(&space, 0), Some((FrameUse::Shared, true)), "mapped only here");
    load(&cpu, &other, AT).unwrap();
    assert_eq!(page(&space, 0), Some((FrameUse::Shared, false)), "mapped also in the other space");
    store(&cpu, &space, AT + 8 * P, 1).unwrap();
    assert_eq!(page(&space, 8), Some((FrameUse::Anon, true)), "a private copy");
    let [here, there] = [&space, &other].map(|space| space.page_at(&cpu, AT).unwrap().frame);
    assert_eq!(here, there);
    finish(&cpu, Vec::from([space, other]), Vec::from([file]));
}

/// A revocation that waits for a move must follow the move.
#[test]
fn a_revocation_follows_a_concurrent_move() {
    for locking in Locking::ALL {
        let vm = guest::vm(3, 256);
        vm.set(Setting::Locking(locking));
        let cpu0 = cpu(&vm, 0);
        let space = Space::new(&cpu0).unwrap();
        let file = file(&cpu0, 4, 0..4);
        map(&cpu0, &space, (0, 4), RW, SHARED, (&file, 0));
        (0..4).for_each(|page| store(&cpu0, &space, AT + page * P, 9).unwrap());
        let moves = || {
            let (cpu1, flags) = (cpu(&vm, 1), RemapFlags::MAYMOVE | RemapFlags::FIXED);
            space.mremap(&cpu1, AT, 4 * P, 4 * P, flags, AT + 32 * P).unwrap();
            cpu1.drain();
        };
        let truncates = || {
            let cpu2 = cpu(&vm, 2);
            truncate(&cpu2, &space, &file, 1);
            cpu2.drain();
        };
        thread::scope(|scope| {
            let held = space.share(&cpu0, VirtRange::page(AT), Counter::RangeLockFault);
            // The revocation finds the mapping at its old address, and queues behind the move.
            for waits in [&moves as &(dyn Fn() + Sync), &truncates] {
                scope.spawn(waits);
                thread::sleep(Duration::from_millis(10));
            }
            drop(held);
        });
        assert_eq!(present(&cpu0, &space), [32], "{locking:?}");
        finish(&cpu0, Vec::from([space]), Vec::from([file]));
    }
}
