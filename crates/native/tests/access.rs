//! One thread: every kind of access moves real bytes, and gets Linux's signals.

use crate::common::{PAGE, PRIVATE, RW, SHARED, machine, map};
use faultless::{Access, Errno, MapFlags, Object, Prot};
use faultless_native::{Signal, Stop};

#[test]
fn a_first_fault_maps_zeros_and_keeps_stores() {
    let native = machine(1);
    native
        .process()
        .unwrap()
        .run(|cpu| {
            let a = map(cpu, 4)?;
            assert_eq!(cpu.load::<u64>(a + 8)?, 0);
            cpu.store(a + 8, 0x1122_3344_5566_7788u64)?;
            assert_eq!(cpu.load::<u64>(a + 8)?, 0x1122_3344_5566_7788);
            assert_eq!(cpu.load::<u8>(a + 9)?, 0x77);
            assert_eq!(cpu.load::<u16>(a + 10)?, 0x5566);
            assert_eq!(cpu.load::<u32>(a + 12)?, 0x1122_3344);
            assert_eq!(cpu.load::<u8>(a + PAGE + 9)?, 0, "the page of zeros was not written");
            Ok(())
        })
        .unwrap();
    native.audit(&[]).unwrap();
}

#[test]
fn hits_need_no_walk_and_a_first_store_needs_one() {
    let native = machine(1);
    native
        .process()
        .unwrap()
        .run(|cpu| {
            let a = map(cpu, 1)?;
            cpu.store(a, 1u8)?;
            let walks = || native.machine().total_tlb_stats().walks();
            let before = walks();
            for _ in 0..100 {
                cpu.store(a, 1u8)?;
                cpu.load::<u64>(a + 8)?;
            }
            assert_eq!(walks(), before);
            assert!(native.machine().total_tlb_stats().data_hits >= 200);
            Ok(())
        })
        .unwrap();
}

#[test]
fn words_across_pages_and_bulk_moves_are_whole() {
    let native = machine(1);
    native
        .process()
        .unwrap()
        .run(|cpu| {
            let a = map(cpu, 8)?;
            cpu.store(a + PAGE - 3, 0x0102_0304_0506_0708u64)?;
            assert_eq!(cpu.load::<u64>(a + PAGE - 3)?, 0x0102_0304_0506_0708);
            assert_eq!(cpu.load::<u8>(a + PAGE)?, 0x05);

            let bytes: Vec<u8> = (0..2 * PAGE + 77).map(|i| (i * 7) as u8).collect();
            cpu.write_bytes(a + 5, &bytes)?;
            cpu.copy(a + 4 * PAGE + 100, a + 5, bytes.len() as u64)?;
            let mut seen = vec![0; bytes.len()];
            cpu.read_bytes(a + 4 * PAGE + 100, &mut seen)?;
            assert!(seen == bytes);
            cpu.fill(a + 10, PAGE, 9)?;
            assert_eq!((cpu.load::<u8>(a + 9)?, cpu.load::<u8>(a + 10)?), (bytes[4], 9));
            assert_eq!(cpu.load::<u8>(a + 9 + PAGE)?, 9);
            assert_eq!(cpu.load::<u8>(a + 10 + PAGE)?, bytes[PAGE as usize + 5]);
            Ok(())
        })
        .unwrap();
}

#[test]
fn touching_changes_no_byte() {
    let native = machine(1);
    native
        .process()
        .unwrap()
        .run(|cpu| {
            let a = map(cpu, 1)?;
            cpu.store(a, 77u8)?;
            cpu.touch(a, Access::Read)?;
            cpu.touch(a, Access::Write)?;
            assert_eq!(cpu.load::<u8>(a)?, 77);
            assert_eq!(cpu.fetch_add(a, 3u8)?, 77);
            assert_eq!(cpu.compare_exchange(a, 80u8, 5)?, Ok(80));
            assert_eq!(cpu.compare_exchange(a, 80u8, 6)?, Err(5));
            assert_eq!(cpu.fetch_add(a + 2, 1u32), Err(Signal::Bus { addr: a + 2 }));
            Ok(())
        })
        .unwrap();
}

#[test]
fn forbidden_and_unmapped_addresses_have_different_signals() {
    let native = machine(1);
    native
        .process()
        .unwrap()
        .run(|cpu| {
            let a = cpu.mmap(None, 2 * PAGE, Prot::READ, PRIVATE)?;
            let accerr = |addr| Err(Signal::Segv { addr, mapped: true });
            let maperr = |addr| Err(Signal::Segv { addr, mapped: false });
            assert_eq!(cpu.store(a, 1u8), accerr(a));
            assert_eq!(cpu.fetch(a).map(drop), accerr(a));
            assert_eq!(cpu.load::<u8>(a), Ok(0));
            assert_eq!(cpu.store(a, 1u8), accerr(a), "the page of zeros remains read-only");
            for addr in [0, 8, 1 << 47, 1 << 63, !7] {
                assert_eq!(cpu.load::<u64>(addr).map(drop), maperr(addr));
                assert_eq!(cpu.store(addr, 1u64), maperr(addr));
            }
            assert_eq!(cpu.fill(u64::MAX - 5, 100, 1), maperr(u64::MAX - 5));

            cpu.mprotect(a, PAGE, Prot::empty())?;
            assert_eq!(cpu.load::<u8>(a + 1).map(drop), accerr(a + 1));
            cpu.mprotect(a, PAGE, RW.union(Prot::EXEC))?;
            cpu.store(a, 0xc3u8)?;
            assert_eq!(cpu.fetch(a), Ok(0xc3));
            cpu.munmap(a, 2 * PAGE)?;
            assert_eq!(cpu.load::<u8>(a).map(drop), maperr(a));
            Ok(())
        })
        .unwrap();
    native.audit(&[]).unwrap();
}

#[test]
fn a_refused_call_returns_its_name() {
    let native = machine(1);
    let process = native.process().unwrap();
    let stopped = process.run(|cpu| Ok(cpu.munmap(1, PAGE)?));
    match stopped {
        Err(Stop::Refused(error)) => {
            assert_eq!((error.operation, error.errno), ("munmap", Errno::EINVAL));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn errno_of_a_subsystem_call_stops_guest_code() {
    let native = machine(1);
    let process = native.process().unwrap();
    let stopped = process.run(|cpu| {
        let object = Object::try_new(cpu.cpu(), Object::MAX_PAGES + 1, 0)?;
        Object::release(object, cpu.cpu());
        Ok(())
    });
    assert_eq!(stopped.unwrap_err().to_string(), "subsystem call: EFBIG");
}

#[test]
fn audit_without_a_living_process_names_the_omission() {
    let native = machine(1);
    let process = native.process().unwrap();
    let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS;
    process
        .run(|cpu| {
            let at = cpu.mmap(None, PAGE, Prot::READ | Prot::WRITE, flags)?;
            Ok(cpu.store(at, 1u64)?)
        })
        .unwrap();
    assert_eq!(
        native.audit(&[]).unwrap_err().to_string(),
        "1 page frame recorded, 0 found; is a living space, or an object that no space maps, \
         missing in the list of the audit?"
    );
    native.audit(&[&process]).unwrap();
}

#[test]
fn errors_of_run_name_their_cause() {
    let native = machine(1);
    let process = native.process().unwrap();
    let text = |stopped: Result<(), Stop>| match stopped {
        Err(Stop::Refused(error)) => error.to_string(),
        other => panic!("{other:?}"),
    };
    // A second CPU on the same thread would be waited for in vain.
    assert_eq!(
        text(process.run(|_| process.run(|_| Ok(())))),
        "run inside guest code (use NativeCpu::switch there): EAGAIN"
    );
    assert_eq!(
        text(process.run(|_| process.run_threads(1, |_, _| Ok(())).map(drop))),
        "run_threads inside guest code: EAGAIN"
    );
    assert_eq!(
        text(process.run(|_| Ok(native.process().map(drop)?))),
        "process inside guest code (use NativeCpu::process there): EAGAIN"
    );
    assert_eq!(
        text(process.run_threads(2, |_, _| Ok(())).map(drop)),
        "run_threads with more threads than the machine has CPUs (Config::cpus): EINVAL"
    );
    // The range of a call that has a range is printed, even if it is empty.
    let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS;
    assert_eq!(
        text(process.run(|cpu| Ok(cpu.mmap(None, 0, Prot::READ, flags).map(drop)?))),
        "mmap 0x0..0x0 (length 0): EINVAL"
    );
}

#[test]
fn exhausted_memory_is_reported_and_freed() {
    let native = machine(1);
    let process = native.process().unwrap();
    let frames = native.vm().total_frames();
    let stopped = process.run(|cpu| {
        let flags = PRIVATE.union(MapFlags::NORESERVE);
        let a = cpu.mmap(None, (frames + 1) * PAGE, RW, flags)?;
        for page in 0..=frames {
            cpu.store(a + page * PAGE, 1u8)?;
        }
        Ok(())
    });
    assert!(matches!(stopped, Err(Stop::Signal(Signal::OutOfMemory { .. }))), "{stopped:?}");
    process.exit();
    let process = native.process().unwrap();
    process
        .run(|cpu| {
            let a = cpu.mmap(None, PAGE, RW, SHARED)?;
            Ok(cpu.store(a, 1u8)?)
        })
        .unwrap();
    native.audit(&[&process]).unwrap();
    process.exit();
    native.audit(&[]).unwrap();
}
