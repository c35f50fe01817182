//! Remote access to the memory of a space.

use crate::fault::{Access, FaultError};
use crate::file::Object;
use crate::space::{AccessError, Advice, MapFlags, PrivateCopies, Prot, Space};
use crate::stat::Counter;
use crate::table::format::USER_END;
use crate::testing::TestMachine;
use crate::testing::guest::{self, AT, FIXED, P, PRIVATE, RW, SHARED, TestCpu, TestSpace};
use crate::testing::guest::{between, cpu, load, map, map_object, store, with_space};
use crate::vm::Vm;
use std::string::ToString;
use std::vec;
use std::vec::Vec;

const SEGV: FaultError = FaultError::Segv { mapped: true };
const NOTHING: FaultError = FaultError::Segv { mapped: false };

fn word(cpu: &TestCpu<'_>, space: &TestSpace, addr: u64) -> Result<u64, AccessError> {
    let mut bytes = [0; 8];
    space.read_bytes(cpu, addr, &mut bytes).map(|()| u64::from_ne_bytes(bytes))
}

#[test]
fn remote_copies_cross_pages() {
    with_space(|cpu, space| {
        map(cpu, space, 0, 4, RW);
        // Misaligned at both ends, across three pages that are not present.
        let bytes: Vec<u8> =
            (0..2 * P as usize + 100).map(|at| (at * 7 + at / 251) as u8).collect();
        let at = AT + P - 37;
        space.write_bytes(cpu, at, &bytes).unwrap();
        let mut back = vec![0; bytes.len()];
        space.read_bytes(cpu, at, &mut back).unwrap();
        assert!(back == bytes);
        assert_eq!(word(cpu, space, at - 8), Ok(0));
        // The same word, read by the program.
        store(cpu, space, AT + P, 42).unwrap();
        assert_eq!(word(cpu, space, AT + P), Ok(42));
        space.write_bytes(cpu, AT + 2 * P, &43u64.to_ne_bytes()).unwrap();
        assert_eq!(load(cpu, space, AT + 2 * P), Ok(43));
        space.read_bytes(cpu, 0, &mut []).unwrap();
    });
}

#[test]
fn remote_access_stops_at_the_first_forbidden_page() {
    with_space(|cpu, space| {
        map(cpu, space, 0, 2, RW);
        map(cpu, space, 2, 1, Prot::READ);
        map(cpu, space, 3, 1, Prot::empty());
        let error = |done: u64, error| AccessError { done: done as usize, error };
        let mut bytes = vec![1; 8 * P as usize];
        let read = |at: u64, bytes: &mut [u8]| space.read_bytes(cpu, at, bytes);
        assert_eq!(space.write_bytes(cpu, AT + 100, &bytes), Err(error(2 * P - 100, SEGV)));
        assert_eq!(read(AT + 5, &mut bytes), Err(error(3 * P - 5, SEGV)));
        assert_eq!(bytes[..5], [0, 0, 0, 0, 0]);
        assert_eq!(bytes[95..97], [1, 1], "bytes written before the error remain");
        assert_eq!(read(AT + 4 * P, &mut bytes), Err(error(0, NOTHING)));
        assert_eq!(read(USER_END - 8, &mut bytes), Err(error(0, NOTHING)));
        for addr in [USER_END, u64::MAX - 7, u64::MAX] {
            assert_eq!(read(addr, &mut bytes), Err(error(0, NOTHING)), "{addr:#x}");
            assert_eq!(space.write_bytes(cpu, addr, &bytes), Err(error(0, NOTHING)), "{addr:#x}");
        }
        // No stack grows for a debugger's sake.
        space.mmap(cpu, AT + 600 * P, P, RW, FIXED | MapFlags::GROWSDOWN).unwrap();
        assert_eq!(space.write_bytes(cpu, AT + 599 * P, &bytes[..8]), Err(error(0, NOTHING)));
        assert_eq!(
            error(7, NOTHING).to_string(),
            "after 7 bytes: SIGSEGV: no mapping at the address"
        );
    });
}

#[test]
fn a_remote_store_copies_shared_pages() {
    with_space(|cpu, space| {
        map(cpu, space, 0, 4, RW);
        (0..3).for_each(|page| store(cpu, space, AT + page * P, page).unwrap());
        let child = space.fork(cpu).unwrap();
        space.write_bytes(cpu, AT, &100u64.to_ne_bytes()).unwrap();
        child.write_bytes(cpu, AT + P, &101u64.to_ne_bytes()).unwrap();
        assert_eq!([0, 1, 2].map(|page| word(cpu, space, AT + page * P).unwrap()), [100, 1, 2]);
        assert_eq!([0, 1, 2].map(|page| word(cpu, &child, AT + page * P).unwrap()), [0, 101, 2]);
        // The zero page belongs to no space.
        assert_eq!(word(cpu, space, AT + 3 * P), Ok(0));
        space.write_bytes(cpu, AT + 3 * P, &9u64.to_ne_bytes()).unwrap();
        assert_eq!(word(cpu, &child, AT + 3 * P), Ok(0));
        child.exit(cpu);
    });
}

#[test]
fn remote_access_ends_at_the_object_length() {
    with_space(|cpu, space| {
        let file = Object::try_new(cpu, 2, 0).unwrap();
        for (page, flags) in [(0, SHARED), (8, PRIVATE)] {
            map_object(cpu, space, (page, 4), RW, flags, (&file, 0));
        }
        space.write_bytes(cpu, AT, &7u64.to_ne_bytes()).unwrap();
        assert_eq!(
            word(cpu, space, AT + 8 * P),
            Ok(7),
            "a private mapping reads the object's page"
        );
        space.write_bytes(cpu, AT + 8 * P, &8u64.to_ne_bytes()).unwrap();
        assert_eq!(word(cpu, space, AT), Ok(7));
        let beyond = Err(AccessError { done: 0, error: FaultError::Bus });
        assert_eq!(word(cpu, space, AT + 2 * P), beyond);
        file.set_pages(cpu, 0).unwrap();
        space.revoke(cpu, &file, 0..u64::MAX, PrivateCopies::Drop);
        assert_eq!(word(cpu, space, AT), beyond);
        Object::release(file, cpu);
    });
}

/// A lazily freed page stays after a remote store.
#[test]
fn a_remote_store_keeps_a_lazily_freed_page() {
    let vm = guest::vm(1, 128);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    map(&cpu, &space, 0, 2, RW);
    (0..2).for_each(|page| store(&cpu, &space, AT + page * P, 5).unwrap());
    space.madvise(&cpu, AT, 2 * P, Advice::Free).unwrap();
    space.write_bytes(&cpu, AT, &6u64.to_ne_bytes()).unwrap();
    assert_eq!(word(&cpu, &space, AT + P), Ok(5));
    // Uses all memory.
    map(&cpu, &space, 8, 126, RW);
    let before = vm.totals();
    let filled = (8..134).take_while(|page| store(&cpu, &space, AT + page * P, 1).is_ok()).count();
    assert!((100..126).contains(&filled), "{filled} pages");
    assert_eq!(vm.totals().since(&before).get(Counter::LazilyFreed), 1);
    assert_eq!(word(&cpu, &space, AT), Ok(6));
    space.exit(&cpu);
    cpu.drain();
    assert_eq!(vm.free_frames() + 1, vm.total_frames());
}

#[test]
fn a_translation_matches_the_mmu_rights() {
    with_space(|cpu, space| {
        map(cpu, space, 0, 4, RW);
        map(cpu, space, 4, 1, Prot::READ | Prot::EXEC);
        let prot = |page: u64| space.page_at(cpu, AT + page * P).map(|at| at.prot);
        assert_eq!(prot(0), None);
        load(cpu, space, AT).unwrap();
        assert_eq!(prot(0), Some(Prot::READ), "the zero page");
        assert_eq!(space.walk(cpu, AT, Access::Write), None);
        store(cpu, space, AT, 1).unwrap();
        assert_eq!(prot(0), Some(RW));
        load(cpu, space, AT + 4 * P).unwrap();
        assert_eq!(prot(4), Some(Prot::READ | Prot::EXEC));
        assert!(space.walk(cpu, AT + 4 * P, Access::Execute).is_some());
        assert_eq!(space.walk(cpu, AT, Access::Execute), None);
        let walked = space.walk(cpu, AT + 24, Access::Read).unwrap();
        let there = space.page_at(cpu, AT + 24).unwrap();
        assert_eq!((walked.offset, walked.frame), (24, there.frame));
        space.mprotect(cpu, AT, P, Prot::empty()).unwrap();
        assert_eq!(prot(0), Some(Prot::empty()));
        assert_eq!(space.walk(cpu, AT, Access::Read), None);
        space.mprotect(cpu, AT, P, RW).unwrap();
        // The walk of a store marks the page.
        space.madvise(cpu, AT, P, Advice::Free).unwrap();
        assert!(!space.entry_at(cpu, AT).is_dirty());
        space.fault_remote(cpu, AT, Access::Write).unwrap();
        assert!(space.walk(cpu, AT, Access::Write).is_some());
        assert!(space.entry_at(cpu, AT).is_dirty() && space.entry_at(cpu, AT).is_accessed());
        for addr in [USER_END, u64::MAX] {
            assert_eq!(space.page_at(cpu, addr), None);
            assert_eq!(space.walk(cpu, addr, Access::Read), None);
        }
    });
}

/// A store through this translation would not mark the page accessed and dirty.
#[test]
fn a_translation_after_a_load_allows_no_stores() {
    with_space(|cpu, space| {
        let file = Object::try_new(cpu, 1, 1).unwrap();
        map_object(cpu, space, (0, 1), RW, SHARED, (&file, 0));
        load(cpu, space, AT).unwrap();
        let walked = |access| space.walk(cpu, AT, access).map(|to| to.prot);
        let allowed = space.page_at(cpu, AT).map(|to| to.prot);
        assert_eq!((walked(Access::Read), allowed), (Some(Prot::READ), Some(RW)));
        assert!(!space.entry_at(cpu, AT).is_dirty());
        // The translation of a store allows stores, as does a later translation.
        assert_eq!([Access::Write, Access::Read].map(walked), [Some(RW); 2]);
        space.munmap(cpu, AT, P).unwrap();
        cpu.wait_grace();
        Object::release(file, cpu);
    });
}

/// Another CPU unmaps the page while the access faults the page in. The access ends there, and the
/// page stays unmapped.
#[test]
fn an_access_ends_at_a_concurrent_unmapping() {
    let vm = guest::vm(2, 128);
    {
        let cpu = cpu(&vm, 0);
        let space = Space::new(&cpu).unwrap();
        map(&cpu, &space, 0, 2, RW);
        let bytes = [3; 16];
        let unmap = |other: &TestCpu<'_>| space.munmap(other, AT + P, P).unwrap();
        store(&cpu, &space, AT, 1).unwrap();
        let got = between(&vm, unmap, || space.write_bytes(&cpu, AT + P - 8, &bytes));
        assert_eq!(got, Err(AccessError { done: 8, error: NOTHING }));
        space.exit(&cpu);
        cpu.drain();
    }
    cpu(&vm, 1).drain();
    assert_eq!(vm.free_frames() + 1, vm.total_frames());
}

/// A remote read marks the page accessed.
#[test]
fn a_remote_load_marks_the_page_accessed() {
    with_space(|cpu, space| {
        map(cpu, space, 0, 1, RW);
        store(cpu, space, AT, 5).unwrap();
        // Clears the accessed bit, too.
        space.madvise(cpu, AT, P, Advice::Free).unwrap();
        assert!(!space.entry_at(cpu, AT).is_accessed());
        assert_eq!(word(cpu, space, AT), Ok(5));
        let entry = space.entry_at(cpu, AT);
        assert!(entry.is_accessed() && !entry.is_dirty());
    });
}

/// Two CPUs write and read a word from outside: neither sees half of one.
#[test]
fn aligned_words_are_copied_whole() {
    const ROUNDS: u64 = if cfg!(miri) { 20 } else { 1_000_000 };
    let vm = guest::vm(2, 128);
    let [first, second] = [cpu(&vm, 0), cpu(&vm, 1)];
    let space = Space::new(&first).unwrap();
    map(&first, &space, 0, 1, RW);
    std::thread::scope(|scope| {
        let space = &space;
        scope.spawn(move || {
            for round in 0..ROUNDS {
                let word = if round % 2 == 0 { 0 } else { u64::MAX };
                space.write_bytes(&first, AT, &word.to_ne_bytes()).unwrap();
            }
        });
        for _ in 0..ROUNDS {
            let seen = word(&second, space, AT).unwrap();
            assert!(seen == 0 || seen == u64::MAX, "{seen:#x}");
        }
    });
}

/// A guest's physical memory begins at 0.
#[test]
fn a_machine_may_let_page_0_be_mapped() {
    let mut machine = TestMachine::new(1, 64);
    machine.lowest = 0;
    let vm = Vm::new(machine).unwrap();
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    assert_eq!(space.mmap(&cpu, 0, 16 * P, RW, FIXED), Ok(0));
    space.write_bytes(&cpu, 0, &[1, 2, 3]).unwrap();
    assert_eq!(space.mmap(&cpu, P, P, RW, FIXED - MapFlags::FIXED).unwrap() & (P - 1), 0);
    space.munmap(&cpu, 0, 16 * P).unwrap();
    assert_eq!(space.mmap(&cpu, P, P, RW, FIXED - MapFlags::FIXED), Ok(P), "a hint below 64 KiB");
    space.exit(&cpu);
}
