//! Whole pages overwritten by the kernel: the old bytes are not read, and a read in progress does
//! not overwrite the new bytes.

use crate::addr::PAGE_SIZE;
use crate::audit::audit;
use crate::error::Errno;
use crate::fault::{Access, FaultKind};
use crate::file::{Object, StoreError};
use crate::knob::{Locking, Setting};
use crate::space::Space;
use crate::testing::guest::{self, AT, P, RW, SHARED, TestCpu, TestSpace, cpu, load, map_object};
use crate::testing::guest::{read_object, write_object};
use crate::testing::store::{File, Memory, PAGE, Plan, file, finish, write_back};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::vec::Vec;

/// Runs `test` under each locking policy with a file of eight pages and a hundred bytes of 7,
/// mapped shared and not yet read.
fn each(test: impl Fn(&TestCpu<'_>, &TestSpace, &Arc<Memory>, &File)) {
    for locking in Locking::ALL {
        let vm = guest::vm(1, 256);
        vm.set(Setting::Locking(locking));
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        let memory = Memory::new(8, 100);
        let file = file(&cpu, &memory);
        map_object(&cpu, &space, (0, 9), RW, SHARED, (&file, 0));
        test(&cpu, &space, &memory, &file);
        finish(&cpu, space, Vec::from([file]));
    }
}

/// Stores `bytes` bytes of `value` at the beginning of a page, of which no other is wanted.
fn overwrite(
    cpu: &TestCpu<'_>,
    file: &File,
    index: u64,
    value: u8,
    bytes: usize,
) -> Result<usize, Errno> {
    file.overwrite_page(cpu, index, |page| {
        // SAFETY: within the page, lent.
        unsafe { page.write_bytes(value, bytes) };
        bytes
    })
}

const fn word(byte: u8) -> u64 {
    u64::from_ne_bytes([byte; 8])
}

#[test]
fn an_overwritten_page_is_not_read() {
    each(|cpu, space, memory, file| {
        assert_eq!(overwrite(cpu, file, 5, 55, PAGE), Ok(PAGE));
        // All bytes of the last, partial page.
        let last = file.overwrite_page(cpu, 8, |page| {
            // SAFETY: the page is lent to the closure. The bytes behind the returned length are
            // ignored.
            unsafe { page.write_bytes(88, PAGE) };
            100
        });
        assert_eq!(last, Ok(100));
        let there = (0..9).filter(|page| file.has_page(cpu, *page)).collect::<Vec<_>>();
        let dirty = (0..9).filter(|page| file.is_dirty(cpu, *page)).collect::<Vec<_>>();
        assert_eq!((there, dirty), (Vec::from([5, 8]), Vec::from([5, 8])));
        let last = [0, 88, 96, 104, 4088].map(|at| load(cpu, space, AT + 8 * P + at).unwrap());
        assert_eq!(last, [word(88), word(88), u64::from(word(88) as u32), 0, 0]);
        assert_eq!(read_object(cpu, file, 5), Some(word(55)));
        assert_eq!(memory.reads.lock().unwrap().len(), 0);
        // It is there now: a part may be stored to, by the same call too.
        write_object(cpu, file, 5, 1).unwrap();
        assert_eq!(overwrite(cpu, file, 5, 9, 16), Ok(16));
        let words = [8, 16].map(|at| load(cpu, space, AT + 5 * P + at));
        assert_eq!(words, [Ok(word(9)), Ok(word(55))]);
        assert_eq!(write_back(cpu, &[space], file), Ok(2));
        assert_eq!((memory.word(5), memory.word(8)), (word(9), word(88)));
        assert_eq!(memory.bytes.lock().unwrap().len(), 8 * PAGE + 100);
        assert_eq!(overwrite(cpu, file, 9, 9, PAGE), Err(Errno::EFBIG));
    });
}

/// A closure that stops early stores no part of an absent page, because the rest of the page is
/// unknown.
#[test]
fn a_part_of_an_absent_page_is_not_stored() {
    each(|cpu, space, memory, file| {
        assert_eq!(overwrite(cpu, file, 5, 55, PAGE - 1), Ok(0));
        assert_eq!(overwrite(cpu, file, 8, 88, 99), Ok(0));
        assert_eq!(file.resident_pages(cpu), 0);
        assert_eq!(load(cpu, space, AT + 5 * P), Ok(6));
        let gives_up = AssertUnwindSafe(|| file.overwrite_page(cpu, 0, |_| panic!("on purpose")));
        assert!(catch_unwind(gives_up).is_err());
        assert_eq!(write_back(cpu, &[space], file), Ok(0));
        assert_eq!(memory.reads.lock().unwrap().len(), 1);
    });
}

/// A read in progress ends after the page was overwritten: without an error, with an error in
/// another page, or with an error in this page. All waiters find the new bytes.
#[test]
fn a_read_in_progress_does_not_overwrite_new_bytes() {
    let errors = [0, 1, 2].map(|pages| Some(StoreError { done: pages * PAGE, errno: Errno::EIO }));
    for error in [None].into_iter().chain(errors) {
        each(|cpu, space, memory, file| {
            memory.plan([Plan::Later]);
            let fault = |page| space.fault_remote(cpu, AT + page * P, Access::Read);
            assert_eq!(fault(1), Ok(FaultKind::Pending));
            let pending = cpu.pending_read().unwrap();
            assert_eq!(overwrite(cpu, file, 1, 11, PAGE), Ok(PAGE));
            assert_eq!(load(cpu, space, AT + P), Ok(word(11)), "before the read ends");
            memory.complete(cpu, error);
            assert_eq!(pending.outcome(), Some(Ok(())), "{error:?}");
            assert_eq!(load(cpu, space, AT + P), Ok(word(11)));
            assert_eq!([0, 2].map(|page| load(cpu, space, AT + page * P)), [Ok(1), Ok(3)]);
            assert_eq!(write_back(cpu, &[space], file), Ok(1));
            assert_eq!(memory.word(1), word(11));
        });
    }
}

#[test]
fn overwrite_page_returns_at_most_a_page() {
    each(|cpu, _, _, file| {
        for there in [false, true] {
            assert_eq!(file.has_page(cpu, 3), there);
            let outcome = file.overwrite_page(cpu, 3, |page| {
                // SAFETY: the page, lent.
                unsafe { page.write_bytes(33, PAGE) };
                PAGE + 1
            });
            assert_eq!(outcome, Ok(PAGE), "{there}");
        }
    });
}

/// While a program's bytes are copied, with a fault, the same page is read, or created by another
/// call.
#[test]
fn the_page_may_be_created_concurrently() {
    each(|cpu, space, memory, file| {
        let meanwhile = |then: &dyn Fn()| {
            file.overwrite_page(cpu, 2, |page| {
                then();
                // SAFETY: the page, lent.
                unsafe { page.write_bytes(22, PAGE) };
                PAGE
            })
        };
        assert_eq!(meanwhile(&|| assert_eq!(load(cpu, space, AT + 2 * P), Ok(3))), Ok(PAGE));
        assert_eq!(load(cpu, space, AT + 2 * P), Ok(word(22)));
        assert!(file.is_dirty(cpu, 2));
        // Shorter, and gone.
        let cut = meanwhile(&|| file.set_len(cpu, PAGE_SIZE).unwrap());
        space.revoke(cpu, file, 1..u64::MAX, crate::space::PrivateCopies::Drop);
        assert_eq!(cut, Ok(PAGE), "the page was resident");
        file.set_len(cpu, 4 * PAGE_SIZE).unwrap();
        let cut = meanwhile(&|| file.set_len(cpu, PAGE_SIZE).unwrap());
        assert_eq!((cut, memory.bytes.lock().unwrap().len()), (Err(Errno::EFBIG), PAGE));
    });
}

/// The last page grows during the call and is stored to: no stored byte is lost.
#[test]
fn the_file_may_grow_concurrently() {
    each(|cpu, space, memory, file| {
        let stored = file.overwrite_page(cpu, 8, |page| {
            file.set_len(cpu, 9 * PAGE_SIZE).unwrap();
            write_object(cpu, file, 8, 4).unwrap();
            write_back(cpu, &[space], file).unwrap();
            file.drop_clean(cpu, 0..u64::MAX);
            // SAFETY: within the page, lent.
            unsafe { page.write_bytes(8, 100) };
            100
        });
        assert_eq!((stored, load(cpu, space, AT + 8 * P)), (Ok(0), Ok(4)));
        assert_eq!(memory.bytes.lock().unwrap().len(), 9 * PAGE);
    });
}

/// An object without a store needs no zeros either.
#[test]
fn an_object_without_a_store_accepts_whole_pages() {
    let vm = guest::vm(1, 64);
    let cpu = cpu(&vm, 0);
    let object = Object::try_new(&cpu, 4, 0).unwrap();
    assert_eq!(overwrite(&cpu, &object, 1, 3, PAGE), Ok(PAGE));
    assert_eq!(overwrite(&cpu, &object, 2, 3, 5), Ok(0));
    assert_eq!(object.resident_pages(&cpu), 1);
    assert_eq!(read_object(&cpu, &object, 1), Some(word(3)));
    guest::check(&cpu, &[], &[&object], 0);
    Object::release(object, &cpu);
    cpu.drain();
    assert_eq!(audit(&cpu, &[]).unwrap().taken(), 1);
}
