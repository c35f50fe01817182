//! Millions of checked accesses without a violation; and each kind of violation, planted, is
//! detected. A thousand million accesses are
//! `cargo run --release -p faultless-native --example coherence`.

#[path = "common/coherence.rs"]
mod storm;

use crate::common::{PAGE, PRIVATE, RW};
use faultless::{Advice, Counter, MapFlags, Prot};
use faultless_native::{Checked, Config, Native, NativeCpu, Stale, Stop};

#[test]
fn no_translation_outlives_its_entry() {
    let done = storm::run(4, 2_000_000, |_| {});
    assert_eq!(done.violations, 0);
    assert!(done.accesses >= 2_000_000);
    for must in [Counter::TlbShootdownReceived, Counter::CowCopy, Counter::SharedPage] {
        assert!(done.totals.get(must) > 0, "no {must:?}: {done}");
    }
}

const AT: u64 = 0x10_0000;

/// Returns the violation detected when the program of a machine with one CPU runs `change` without
/// dropping translations, and then `access`.
fn seen(
    change: impl Fn(&NativeCpu<'_, '_>) -> Result<(), Stop>,
    access: impl Fn(&NativeCpu<'_, '_>) -> Result<(), Stop>,
) -> Option<Stale> {
    let config = Config { cpus: 1, checked: Checked::Record, ..Config::default() };
    let [planted, sound] = [u32::MAX, 0].map(|skipped| {
        let native = Native::new(config).unwrap();
        let process = native.process().unwrap();
        process
            .run(|cpu| {
                cpu.mmap(AT, PAGE, RW, PRIVATE.union(MapFlags::FIXED))?;
                cpu.store(AT, 1u64)?;
                // SAFETY: stale translations are used for loads, or for stores to a frame that
                // still belongs to the program or its child; the plant is removed before the guest
                // ends.
                unsafe { native.machine().plant_skipped_invalidations(cpu.id(), skipped) };
                let changed = change(cpu);
                // SAFETY: as above.
                unsafe { native.machine().plant_skipped_invalidations(cpu.id(), 0) };
                changed?;
                assert_eq!(native.machine().violation_count(), 0);
                let _ = access(cpu);
                Ok(())
            })
            .unwrap();
        native.machine().violations().first().map(|violation| {
            assert_eq!(violation.addr, AT);
            violation.stale
        })
    });
    assert_eq!(sound, None, "a violation in a sound run");
    planted
}

fn load(cpu: &NativeCpu<'_, '_>) -> Result<(), Stop> {
    cpu.load::<u64>(AT)?;
    Ok(())
}

fn store(cpu: &NativeCpu<'_, '_>) -> Result<(), Stop> {
    Ok(cpu.store(AT, 2u64)?)
}

#[test]
fn a_skipped_flush_is_detected() {
    let unmap = |cpu: &NativeCpu<'_, '_>| Ok(cpu.munmap(AT, PAGE)?);
    assert_eq!(seen(unmap, load), Some(Stale::Owner));
    let drop_it = |cpu: &NativeCpu<'_, '_>| Ok(cpu.madvise(AT, PAGE, Advice::DontNeed)?);
    assert_eq!(seen(drop_it, load), Some(Stale::Owner));
    // Here the frame is still the program's.
    let hide = |cpu: &NativeCpu<'_, '_>| Ok(cpu.mprotect(AT, PAGE, Prot::empty())?);
    assert_eq!(seen(hide, load), Some(Stale::Entry));
}

#[test]
fn a_frame_reused_too_early_is_detected() {
    let reuse = |cpu: &NativeCpu<'_, '_>| {
        cpu.munmap(AT, PAGE)?;
        // Until the frame is another page's.
        let other = cpu.mmap(None, 64 * PAGE, RW, PRIVATE)?;
        Ok(cpu.fill(other, 64 * PAGE, 2)?)
    };
    assert_eq!(seen(reuse, load), Some(Stale::Owner));
}

#[test]
fn a_stale_permission_to_store_is_detected() {
    let protect = |cpu: &NativeCpu<'_, '_>| Ok(cpu.mprotect(AT, PAGE, Prot::READ)?);
    assert_eq!(seen(protect, store), Some(Stale::Entry));
    assert_eq!(seen(protect, load), None, "loads are still allowed");
    // If only the TLB's entry were dirty, reclaim of clean pages would lose the store.
    let clean = |cpu: &NativeCpu<'_, '_>| Ok(cpu.madvise(AT, PAGE, Advice::Free)?);
    assert_eq!(seen(clean, store), Some(Stale::Entry));
}
