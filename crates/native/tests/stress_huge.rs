//! Threads in two processes fetch and load code in pages of 2 MiB. One thread unmaps, splits,
//! forbids, copies by stores, collapses, and evicts the code. A found page is always the right
//! page, and no CPU uses a removed 2 MiB translation.

use crate::common::stress::{machine, storm, weather};
use crate::common::{PAGE, RW};
use faultless::{Access, Advice, Backing, Counter, Errno, HugeText, MapFlags, Object, PAGE_SIZE};
use faultless::{Prot, Setting, Shared};
use faultless_native::{HostFile, NativeCpu, Process, Signal, Stop};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// The number of threads that use the code; one more thread changes the code.
const READERS: usize = 2;
/// Three pages of 2 MiB, and a part of a fourth.
const PAGES: u64 = 3 * 512 + 100;
const AT: u64 = 0x4000_0000;
const CODE: Prot = Prot::READ.union(Prot::EXEC);
/// The offset of a page's number.
const NUMBER: u64 = 8;

/// Returns the beginning of each page: its number in the file, and its complement.
fn contents(page: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&(!page).to_le_bytes());
    bytes[NUMBER as usize..].copy_from_slice(&page.to_le_bytes());
    bytes
}

/// The code, and the two processes that run it at the same address.
struct Program<'n> {
    object: Shared<Object>,
    other: Process<'n>,
}

impl Program<'_> {
    /// Maps `pages` in `process` at their address.
    fn map(&self, cpu: &NativeCpu<'_, '_>, process: &Process<'_>, first: u64, pages: u64) {
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        let backing = Backing { object: &self.object, first, may_write: true };
        let (at, len) = (AT + first * PAGE, pages * PAGE);
        let mapped = process.space().mmap_object(cpu.cpu(), at, len, CODE, flags, backing);
        assert_eq!(mapped, Ok(at));
    }
}

/// Uses a page, which may be unmapped or forbidden at the moment. Returns whether it was present.
fn use_page(cpu: &NativeCpu<'_, '_>, page: u64, access: Access) -> bool {
    let at = AT + page * PAGE;
    let used = match access {
        Access::Execute => cpu.touch(at, access).map(|()| page),
        _ => cpu.load::<u64>(at + NUMBER),
    };
    match used {
        Ok(found) => assert_eq!(found, page, "at {at:#x} on cpu {:?}", cpu.id()),
        Err(Signal::Segv { addr, .. }) => assert_eq!(addr & !(PAGE_SIZE - 1), at),
        Err(signal) => panic!("{signal}"),
    }
    used.is_ok()
}

/// Changes the code of the running process or the other process.
fn change<'n>(
    cpu: &mut NativeCpu<'_, 'n>,
    program: &Program<'n>,
    random: &mut fastrand::Rng,
) -> Result<(), Stop> {
    let whole = random.bool();
    let (first, pages) = if whole {
        (random.u64(0..3) * 512, 512)
    } else {
        let first = random.u64(0..PAGES);
        (first, random.u64(1..=(PAGES - first).min(40)))
    };
    let process = if random.u32(0..4) == 0 { &program.other } else { cpu.running() };
    let (space, at, len) = (process.space(), AT + first * PAGE, pages * PAGE);
    match random.u32(0..16) {
        0..3 => {
            space.munmap(cpu.cpu(), at, len)?;
            program.map(cpu, process, first, pages);
        }
        3..6 => space.madvise(cpu.cpu(), at, len, Advice::DontNeed)?,
        6 => {
            for prot in [Prot::READ, Prot::empty(), CODE] {
                space.mprotect(cpu.cpu(), at, len, prot)?;
            }
        }
        // A store copies the page, whose content stays the same. Then the file is mapped again.
        7..9 => {
            space.mprotect(cpu.cpu(), at, len, RW)?;
            space.write_bytes(cpu.cpu(), at, &contents(first)).expect("a writable page");
            program.map(cpu, process, first, pages);
        }
        9..11 => {
            let start = AT + first / 512 * 512 * PAGE;
            match space.madvise(cpu.cpu(), start, 512 * PAGE, Advice::Collapse) {
                Ok(()) => {}
                Err(error) => assert!(
                    matches!(error.errno, Errno::EAGAIN | Errno::EINVAL | Errno::ENOMEM),
                    "{error}"
                ),
            }
        }
        11..13 => {
            for process in [cpu.running(), &program.other] {
                process.space().madvise(cpu.cpu(), AT, PAGES * PAGE, Advice::DontNeed)?;
            }
            program.object.drop_clean(cpu.cpu(), first..first + pages);
        }
        13 => {
            let values = [HugeText::Never, HugeText::Madvise, HugeText::Always, HugeText::Always];
            cpu.native().vm().set(Setting::HugeText(values[random.usize(0..values.len())]));
        }
        14 => {
            let child = cpu.fork()?;
            let page = random.u64(0..PAGES);
            cpu.switch(&child, |cpu| {
                use_page(cpu, page, Access::Execute);
                Ok(())
            })?;
            cpu.exit(child);
        }
        _ => {
            let page = random.u64(0..PAGES);
            cpu.switch(&program.other, |cpu| {
                use_page(cpu, page, Access::Read);
                Ok(())
            })?;
        }
    }
    Ok(())
}

#[test]
fn code_in_large_pages_survives_all_changes() {
    let native = machine(READERS + 1, 32 << 20);
    let must = [
        Counter::Spf,
        Counter::VmaLockSuccess,
        Counter::ThpFileMapped,
        Counter::ThpFileAlloc,
        Counter::ThpSplitPmd,
        Counter::ThpCollapsed,
    ];
    let host = tempfile::tempfile().unwrap();
    for page in 0..PAGES {
        host.write_all_at(&contents(page), page * PAGE).unwrap();
    }
    host.set_len(PAGES * PAGE).unwrap();
    let mut seed = 0;
    weather(&native, &must, |mode, length| {
        seed += 0x1_0000;
        native.vm().set(Setting::HugeText(HugeText::Always));
        let store = Arc::new(HostFile::new(host.try_clone().unwrap()).unwrap());
        let (process, other) = (native.process().unwrap(), native.process().unwrap());
        let object = process.run(|cpu| Ok(Object::of_store(cpu.cpu(), store, 1).unwrap())).unwrap();
        let program = Program { object, other };
        process
            .run(|cpu| {
                program.map(cpu, &process, 0, PAGES);
                program.map(cpu, &program.other, 0, PAGES);
                Ok(())
            })
            .unwrap();
        storm(&process, READERS + 1, mode, length, |cpu, number, clock| {
            let mut random = fastrand::Rng::with_seed(seed ^ number as u64);
            while clock.goes_on() {
                if number == READERS {
                    change(cpu, &program, &mut random)?;
                } else {
                    let access = if random.bool() { Access::Execute } else { Access::Read };
                    use_page(cpu, random.u64(0..PAGES), access);
                }
            }
            Ok(())
        });
        // In the end all pages are present.
        process
            .run(|cpu| {
                assert!((0..PAGES).all(|page| use_page(cpu, page, Access::Execute)));
                assert!((0..PAGES).all(|page| use_page(cpu, page, Access::Read)));
                let Program { object, other } = program;
                cpu.exit(other);
                Object::release(object, cpu.cpu());
                Ok(())
            })
            .unwrap();
        process.exit();
    });
}
