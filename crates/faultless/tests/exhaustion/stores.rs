//! Files with a store: pages that are read and written back.

use super::guest::{AT, P, RW, SHARED, Small, TestCpu, TestVm, World};
use super::shim::{self, Plan};
use super::{Case, FRAMES, Left, Refused, exhaust, new_world};
use faultless::{
    Access, Advice, AnonVmaCheck, BackingStore, CpuId, Errno, FaultError, FaultKind, MapFlags,
    Object, PrivateCopies, ReadRun, StoreError, ThreadStreams, WriteRun,
};
use std::cell::Cell;

const LATE: &[AnonVmaCheck] = &[AnonVmaCheck::Late];
const PAGES: usize = 8;

thread_local! {
    /// The contents of the store: the first word of each page. All other words are zeros. The store
    /// needs no heap, and outlives the object.
    static WORDS: Cell<[u64; PAGES]> = const { Cell::new([0; PAGES]) };
}

/// A store for one thread; see [`WORDS`].
#[derive(Debug)]
pub(super) struct Words;

impl BackingStore for Words {
    fn len(&self) -> u64 {
        PAGES as u64 * P
    }

    /// One page, so that the end state does not depend on the available memory.
    fn preferred_pages(&self) -> usize {
        1
    }

    fn read(&self, run: &mut ReadRun) -> Result<usize, StoreError> {
        let words = WORDS.get();
        for (index, page) in (run.first() as usize..).zip(run.memory()) {
            page.fill(0);
            page[..8].copy_from_slice(&words[index].to_ne_bytes());
        }
        Ok(run.bytes())
    }

    fn write(&self, run: &WriteRun<'_>) -> Result<(), StoreError> {
        let mut words = WORDS.get();
        for (index, (page, _)) in (run.first() as usize..).zip(run.memory()) {
            // SAFETY: a word of a page, valid for reads during the call, without concurrent stores.
            words[index] = unsafe { page.cast::<u64>().read() };
        }
        WORDS.set(words);
        Ok(())
    }

    fn set_len(&self, bytes: u64) -> Result<(), Errno> {
        let mut words = WORDS.get();
        words[(bytes.div_ceil(P) as usize).min(PAGES)..].fill(0);
        WORDS.set(words);
        Ok(())
    }

    fn punch(&self, pages: std::ops::Range<u64>) -> Result<(), Errno> {
        let mut words = WORDS.get();
        words[pages.start as usize..pages.end as usize].fill(0);
        WORDS.set(words);
        Ok(())
    }
}

/// The world's object is a file, whose page `n` starts with the word `n + 1`.
fn file(cpu: &TestCpu<'_>, world: &mut World) {
    WORDS.set(core::array::from_fn(|at| at as u64 + 1));
    let file = Object::of_store(cpu, std::sync::Arc::new(Words), 7).unwrap();
    Object::release(core::mem::replace(&mut world.objects[0], file), cpu);
}

/// Maps the file shared, and stores 10, 11, … to four pages.
fn stored_to(cpu: &TestCpu<'_>, world: &mut World) {
    file(cpu, world);
    world.map_object(cpu, 0, PAGES as u64, MapFlags::SHARED | MapFlags::FIXED, 0);
    (0..4).for_each(|page| world.store(cpu, page, 10 + page));
}

fn write_back(cpu: &TestCpu<'_>, world: &World) -> Result<u64, Errno> {
    let file = &world.objects[0];
    file.write_back(cpu, 0..u64::MAX, |pages| world.spaces[0].write_protect(cpu, file, pages))
}

/// Checks a kernel call that must succeed without any free memory.
fn infallible(
    name: &str,
    setup: &dyn Fn(&TestCpu<'_>, &mut World),
    call: &dyn Fn(&TestCpu<'_>, &mut World),
) {
    let call = |cpu: &TestCpu<'_>, world: &mut World| {
        call(cpu, world);
        Ok::<_, Refused>(())
    };
    exhaust(&Case { name, setup, call: &call, left: Left::Nothing, checks: LATE, may_fail: false });
}

#[test]
fn faults_that_read_from_the_store() {
    for away in [1, 512, 512 * 512 * 512] {
        for (flags, access, kind) in [
            (MapFlags::SHARED, Access::Read, FaultKind::Shared),
            (MapFlags::SHARED, Access::Write, FaultKind::Shared),
            (MapFlags::PRIVATE, Access::Read, FaultKind::Shared),
            (MapFlags::PRIVATE, Access::Write, FaultKind::Copy),
        ] {
            let setup = |cpu: &TestCpu<'_>, world: &mut World| {
                file(cpu, world);
                world.map(cpu, 0, 1, RW, SHARED);
                world.store(cpu, 0, 1);
                world.map_object(cpu, away, 4, flags | MapFlags::FIXED, 2);
            };
            let call = |cpu: &TestCpu<'_>, world: &mut World| {
                let got = world.spaces[0].fault_remote(cpu, AT + (away + 1) * P, access)?;
                assert_eq!(got, kind);
                Ok::<_, Refused>(())
            };
            let (name, left) = (&*format!("{access:?} of a file, {flags:?}"), Left::ReadIn);
            exhaust(&Case { name, setup: &setup, call: &call, left, checks: LATE, may_fail: true });
        }
    }
}

#[test]
fn kernel_calls_that_read() {
    let (left, checks, may_fail) = (Left::Ways, LATE, true);
    let read = |cpu: &TestCpu<'_>, world: &mut World| {
        // SAFETY: a word of the page, lent.
        let word = |at: Option<*const u8>| at.map(|at| unsafe { at.cast::<u64>().read() });
        assert_eq!(world.objects[0].read_page(cpu, 3, word)?, Some(4));
        Ok::<_, Refused>(())
    };
    exhaust(&Case { name: "read_page", setup: &file, call: &read, left, checks, may_fail });
    let write = |cpu: &TestCpu<'_>, world: &mut World| {
        // SAFETY: a word of the page, lent.
        world.objects[0].write_page(cpu, 3, |at| unsafe { at.cast::<u64>().write(50) })?;
        assert!(world.objects[0].is_dirty(cpu, 3));
        Ok::<_, Refused>(())
    };
    exhaust(&Case { name: "write_page", setup: &file, call: &write, left, checks, may_fail });
}

/// The call reads no page, and requests no heap memory: without a frame, no state changes.
#[test]
fn overwrites_by_the_kernel() {
    let (left, checks, may_fail) = (Left::Ways, LATE, true);
    let overwrite = |cpu: &TestCpu<'_>, world: &mut World| {
        let stored = world.objects[0].overwrite_page(cpu, 3, |at| {
            // SAFETY: the page, lent.
            unsafe { at.cast::<[u64; 512]>().write([50; 512]) };
            P as usize
        })?;
        assert_eq!(stored as u64, P);
        assert!(world.objects[0].is_dirty(cpu, 3));
        Ok::<_, Refused>(())
    };
    exhaust(&Case {
        name: "overwrite_page",
        setup: &file,
        call: &overwrite,
        left,
        checks,
        may_fail,
    });
    let both = |cpu: &TestCpu<'_>, world: &mut World| {
        file(cpu, world);
        overwrite(cpu, world).unwrap();
    };
    infallible("overwrite_page of a resident page", &both, &|cpu, world| {
        overwrite(cpu, world).unwrap();
    });
}

/// Pages that are read before their use. Advice never fails: an access will read the remaining
/// pages.
#[test]
fn reading_ahead() {
    let mapped = |cpu: &TestCpu<'_>, world: &mut World| {
        file(cpu, world);
        world.map_object(cpu, 0, PAGES as u64, MapFlags::SHARED | MapFlags::FIXED, 0);
    };
    let (left, checks, may_fail) = (Left::ReadIn, LATE, true);
    let needed = |cpu: &TestCpu<'_>, world: &mut World| {
        let advised = world.spaces[0].madvise(cpu, AT + P, 5 * P, Advice::WillNeed);
        assert_eq!(advised, Ok(()));
        // Makes the end state independent of the read pages.
        world.objects[0].read_ahead(cpu, 1..6)?;
        Ok::<_, Refused>(())
    };
    exhaust(&Case { name: "WillNeed", setup: &mapped, call: &needed, left, checks, may_fail });
    let read = |cpu: &TestCpu<'_>, world: &mut World| {
        // Reads to the end of the file, behind which no further pages are read.
        let (reader, file) = (ThreadStreams::new(), &world.objects[0]);
        file.read_in_sequence(cpu, &reader, 3..4)?;
        file.read_in_sequence(cpu, &reader, 4..PAGES as u64)?;
        Ok::<_, Refused>(())
    };
    let name = "read_in_sequence";
    exhaust(&Case { name, setup: &file, call: &read, left, checks, may_fail });
}

#[test]
fn writing_back_and_dropping() {
    infallible("write_back", &stored_to, &|cpu, world| {
        assert_eq!(write_back(cpu, world), Ok(4));
        assert_eq!(WORDS.get(), [10, 11, 12, 13, 5, 6, 7, 8]);
        world.store(cpu, 0, 60);
        assert!(world.objects[0].is_dirty(cpu, 0), "the next store is detected");
    });
    let unmapped = |cpu: &TestCpu<'_>, world: &mut World| {
        stored_to(cpu, world);
        world.spaces[0].munmap(cpu, AT, PAGES as u64 * P).unwrap();
        write_back(cpu, world).unwrap();
    };
    infallible("drop_clean", &unmapped, &|cpu, world| {
        assert_eq!(world.objects[0].drop_clean(cpu, 0..u64::MAX), 4);
    });
}

/// Stored bytes reach the store, whatever memory is available.
#[test]
fn the_end_of_a_file() {
    let unmapped = |cpu: &TestCpu<'_>, world: &mut World| {
        stored_to(cpu, world);
        world.spaces[0].munmap(cpu, AT, PAGES as u64 * P).unwrap();
    };
    for dropped in [false, true] {
        infallible("the end", &unmapped, &|cpu, world| {
            let file = world.objects.remove(0);
            if dropped {
                drop(file);
                assert_eq!(cpu.end_dropped(), 1);
            } else {
                Object::release(file, cpu);
            }
            assert_eq!(WORDS.get(), [10, 11, 12, 13, 5, 6, 7, 8]);
        });
    }
}

#[test]
fn changes_of_the_length() {
    infallible("shorter, and longer", &stored_to, &|cpu, world| {
        world.objects[0].set_len(cpu, 2 * P + 4).unwrap();
        world.spaces[0].revoke(cpu, &world.objects[0], 3..u64::MAX, PrivateCopies::Drop);
        world.objects[0].set_len(cpu, PAGES as u64 * P).unwrap();
        assert_eq!(write_back(cpu, world), Ok(3));
        assert_eq!(WORDS.get(), [10, 11, 12, 0, 0, 0, 0, 0]);
    });
    infallible("a hole", &stored_to, &|cpu, world| {
        world.objects[0].punch(cpu, 1..6).unwrap();
        world.spaces[0].revoke(cpu, &world.objects[0], 1..6, PrivateCopies::Keep);
        assert_eq!(write_back(cpu, world), Ok(1));
        assert_eq!(WORDS.get(), [10, 0, 0, 0, 0, 0, 7, 8]);
    });
}

/// The pages are evicted even if their mappings cannot be remembered. A page stays if the memory
/// for its eviction is not available.
#[test]
fn evictions_of_pages_with_many_mappings() {
    const MAPPINGS: u64 = 20;
    let (mut all, mut none) = (0, 0);
    for step in 0.. {
        let vm = TestVm::new(Small::new(FRAMES)).unwrap();
        // SAFETY: the only CPU handle.
        let cpu = unsafe { vm.cpu(CpuId(0)) };
        let mut world = new_world(&cpu);
        file(&cpu, &mut world);
        for at in 0..MAPPINGS {
            world.map_object(&cpu, 2 * at, 1, MapFlags::SHARED | MapFlags::FIXED, 0);
            assert_eq!(
                world.spaces[0].fault_remote(&cpu, AT + 2 * at * P, Access::Read),
                Ok(FaultKind::Shared)
            );
        }
        let evict = || world.objects[0].evict(&cpu, 0..1);
        let (left, refused) = shim::with(Plan::Only(step), evict);
        assert_eq!(world.objects[0].resident_pages(&cpu), 1 - left, "step {step}");
        cpu.drain();
        world.audit(&cpu);
        let mut word = [0; 8];
        world.spaces[0].read_bytes(&cpu, AT + 2 * P, &mut word).unwrap();
        assert_eq!(u64::from_ne_bytes(word), 1);
        world.end(&cpu);
        if refused == 0 {
            assert_eq!(left, 1);
            break;
        }
        all += left;
        none += 1 - left;
    }
    assert!(all > 0, "no step evicted the page");
    assert!(none > 0, "no step kept the page");
}

/// A fault that must read its page finds the heap exhausted, without the lock and with the lock.
/// The fault is retried once, after retired memory was freed.
#[test]
fn retired_memory_is_freed_for_a_read() {
    for (refused, served) in [(2, Ok(FaultKind::Shared)), (3, Err(FaultError::OutOfMemory))] {
        let vm = TestVm::new(Small::new(FRAMES)).unwrap();
        // SAFETY: the only CPU handle.
        let cpu = unsafe { vm.cpu(CpuId(0)) };
        let mut world = new_world(&cpu);
        file(&cpu, &mut world);
        world.map_object(&cpu, 0, PAGES as u64, MapFlags::SHARED | MapFlags::FIXED, 0);
        // Allocates the tables, and the memory of the first read.
        world.spaces[0].fault_remote(&cpu, AT, Access::Read).unwrap();
        let fault = || world.spaces[0].fault_remote(&cpu, AT + P, Access::Read);
        let (got, seen) = shim::with(Plan::Before(refused), fault);
        assert_eq!((got, seen), (served, refused));
        cpu.drain();
        world.end(&cpu);
    }
}
