//! Checked mode: it detects a planted fault, and reports none in a storm of all operations.

use crate::common::{PAGE, PRIVATE, RW, machine, map};
use core::sync::atomic::{AtomicUsize, Ordering};
use faultless::{Advice, Counter, MapFlags, Prot, RemapFlags};
use faultless_native::{Checked, Config, Native, NativeCpu, Signal, Stop};

#[test]
fn a_skipped_invalidation_is_detected() {
    let config = Config { cpus: 1, checked: Checked::Record, ..Config::default() };
    let native = Native::new(config).unwrap();
    let process = native.process().unwrap();
    // An address outside automatic placement.
    let (addr, space) = (0x10_0000, process.space().id());
    process
        .run(|cpu| {
            cpu.mmap(addr, PAGE, RW, PRIVATE.union(MapFlags::FIXED))?;
            cpu.store(addr, 1u8)?;
            // SAFETY: the guest only loads through the translation that stays behind; the plant is
            // taken away before the guest ends.
            unsafe { native.machine().plant_skipped_invalidations(cpu.id(), u32::MAX) };
            cpu.munmap(addr, PAGE)?;
            // SAFETY: as above.
            unsafe { native.machine().plant_skipped_invalidations(cpu.id(), 0) };
            // The frame comes back as somebody else's.
            let other = map(cpu, 64)?;
            cpu.fill(other, 64 * PAGE, 2)?;
            assert_eq!(native.machine().violation_count(), 0);
            cpu.load::<u8>(addr)?;
            Ok(())
        })
        .unwrap();
    let violations = native.machine().violations();
    assert_eq!(native.machine().violation_count(), 2, "before and after the load");
    assert_eq!((violations[0].addr, violations[0].space), (addr, space));
}

/// The expected contents of a thread's own area.
struct Own {
    at: u64,
    pages: Vec<u64>,
    /// Two addresses without other users, as targets of moves.
    places: [u64; 2],
}

impl Own {
    const PAGES: u64 = 24;

    fn new(cpu: &NativeCpu<'_, '_>, places: [u64; 2]) -> Result<Self, Stop> {
        Ok(Self { at: map(cpu, Self::PAGES)?, pages: vec![0; Self::PAGES as usize], places })
    }

    fn step(&mut self, cpu: &NativeCpu<'_, '_>, random: &mut fastrand::Rng) -> Result<(), Stop> {
        let page = random.u64(0..Self::PAGES);
        let len = random.u64(1..=Self::PAGES - page);
        let (addr, bytes) = (self.at + page * PAGE, len * PAGE);
        let part = page as usize..(page + len) as usize;
        match random.u32(0..16) {
            0 => {
                cpu.madvise(addr, bytes, Advice::DontNeed)?;
                self.pages[part].fill(0);
            }
            1 => {
                cpu.munmap(addr, bytes)?;
                let loaded = cpu.load::<u64>(addr);
                // Another thread may have mapped something there by now.
                assert!(loaded.is_ok() || loaded == Err(Signal::Segv { addr, mapped: false }));
                // Moves elsewhere, to avoid a collision.
                *self = Self::moved(cpu, self, part)?;
            }
            2 => {
                cpu.mprotect(addr, bytes, Prot::READ)?;
                assert_eq!(cpu.store(addr, 1u64), Err(Signal::Segv { addr, mapped: true }));
                cpu.mprotect(addr, bytes, RW)?;
            }
            3 => {
                let all = Self::PAGES * PAGE;
                let to = self.places[usize::from(self.at == self.places[0])];
                let flags = RemapFlags::MAYMOVE.union(RemapFlags::FIXED);
                // Refused while the area is several VMAs.
                if let Ok(moved) = cpu.mremap(self.at, all, all, flags, to) {
                    self.at = moved;
                }
            }
            4..8 => {
                let value = random.u64(1..);
                cpu.store(addr, value)?;
                self.pages[page as usize] = value;
            }
            _ => assert_eq!(cpu.load::<u64>(addr)?, self.pages[page as usize]),
        }
        Ok(())
    }

    /// Returns a new area with the remains of the old area, and zeros in the unmapped part `lost`.
    fn moved(
        cpu: &NativeCpu<'_, '_>,
        old: &Self,
        lost: std::ops::Range<usize>,
    ) -> Result<Self, Stop> {
        let mut new = Self::new(cpu, old.places)?;
        for page in (0..Self::PAGES as usize).filter(|page| !lost.contains(page)) {
            let (from, to) = (old.at + page as u64 * PAGE, new.at + page as u64 * PAGE);
            cpu.copy(to, from, PAGE)?;
            new.pages[page] = old.pages[page];
            cpu.munmap(from, PAGE)?;
        }
        Ok(new)
    }

    fn check(&self, cpu: &NativeCpu<'_, '_>) -> Result<(), Stop> {
        for (page, &value) in self.pages.iter().enumerate() {
            assert_eq!(cpu.load::<u64>(self.at + page as u64 * PAGE)?, value);
        }
        Ok(())
    }
}

/// The area that all threads map, unmap, protect and touch without coordination.
const COMMON: u64 = 0x1000_0000;
const COMMON_PAGES: u64 = 16;

fn disturb(cpu: &NativeCpu<'_, '_>, random: &mut fastrand::Rng) -> Result<Option<Signal>, Stop> {
    let page = random.u64(0..COMMON_PAGES);
    let addr = COMMON + page * PAGE;
    let bytes = random.u64(1..=COMMON_PAGES - page) * PAGE;
    match random.u32(0..20) {
        0 => drop(cpu.mmap(addr, bytes, RW, PRIVATE.union(MapFlags::FIXED))?),
        1 => cpu.munmap(addr, bytes)?,
        2 => drop(cpu.mprotect(addr, bytes, Prot::READ)),
        3 => drop(cpu.mprotect(addr, bytes, RW)),
        4 => drop(cpu.madvise(addr, bytes, Advice::DontNeed)),
        5..12 => return Ok(cpu.store(addr, random.u64(..)).err()),
        _ => return Ok(cpu.load::<u64>(addr).err()),
    }
    Ok(None)
}

#[test]
fn a_storm_uses_no_stale_translation_and_loses_no_write() {
    const THREADS: usize = 4;
    let native = machine(THREADS);
    let process = native.process().unwrap();
    process
        .run(|cpu| {
            let fixed = PRIVATE.union(MapFlags::FIXED);
            Ok(cpu.mmap(COMMON, COMMON_PAGES * PAGE, RW, fixed)?)
        })
        .unwrap();
    let refused = AtomicUsize::new(0);
    process
        .run_threads(THREADS, |cpu, number| {
            let mut random = fastrand::Rng::with_seed(number as u64);
            let place = 0x2000_0000 + (number as u64) * 0x100_0000;
            let mut own = Own::new(cpu, [place, place + 0x80_0000])?;
            for step in 0..3000 {
                own.step(cpu, &mut random)?;
                if disturb(cpu, &mut random)?.is_some() {
                    refused.fetch_add(1, Ordering::Relaxed);
                }
                if step % 100 == number * 20 {
                    let child = cpu.fork()?;
                    cpu.switch(&child, |cpu| {
                        own.check(cpu)?;
                        cpu.fill(own.at, Own::PAGES * PAGE, 0xcc)?;
                        Ok(())
                    })?;
                    cpu.exit(child);
                    own.check(cpu)?;
                }
            }
            own.check(cpu)
        })
        .unwrap();
    assert!(refused.into_inner() > 0, "no call was refused");
    let received = native.vm().totals().get(Counter::TlbShootdownReceived);
    assert!(received > 0, "no translation was shot down");
    assert_eq!(native.machine().violation_count(), 0);
    native.audit(&[&process]).unwrap();
    process.exit();
    native.audit(&[]).unwrap();
}
