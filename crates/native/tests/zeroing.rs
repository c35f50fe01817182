//! Frames zeroed ahead, by idle threads and by calls that free: all newly mapped memory is zero,
//! and the audit balances.

use crate::common::{PAGE, PRIVATE, RW};
use core::sync::atomic::{AtomicBool, Ordering};
use faultless::ZEROED_RUN;
use faultless::{Counter, Setting};
use faultless_native::{Checked, Config, Native};
use std::time::Duration;

const PAGES: u64 = 200;
const ROUNDS: u64 = 60;

#[test]
fn newly_mapped_memory_is_zero() {
    let config = Config {
        memory_bytes: 6 << 20,
        nodes: 2,
        cpus: 3,
        checked: Checked::Panic,
        jitter: 20,
        ..Config::default()
    };
    let native = Native::new(config).unwrap();
    native.vm().set(Setting::ZeroedPool(300));
    let process = native.process().unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                if native.zero_ahead(ZEROED_RUN) == 0 {
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
        });
        let run = process.run_threads(2, |cpu, number| {
            let number = number as u64;
            for round in 0..ROUNDS {
                // Each way of zeroing, with pools switched on and off.
                if round % 16 == number {
                    native.vm().set(Setting::ZeroOnFree(round % 32 == number));
                    native.vm().set(Setting::ZeroedPool(100 * (round % 48 / 16)));
                }
                let area = cpu.mmap(None, PAGES * PAGE, RW, PRIVATE)?;
                for page in (area..area + PAGES * PAGE).step_by(PAGE as usize) {
                    for word in (page..page + PAGE).step_by(8 * 67) {
                        assert_eq!(cpu.load::<u64>(word)?, 0, "round {round}");
                    }
                    cpu.store(page, 1 + page)?;
                    for word in (page..page + PAGE).step_by(8 * 67).skip(1) {
                        assert_eq!(cpu.load::<u64>(word)?, 0, "a page that is not zero");
                        cpu.store(word, 1 + word)?;
                    }
                }
                cpu.munmap(area, PAGES * PAGE)?;
            }
            Ok(())
        });
        over.store(true, Ordering::Relaxed);
        run.unwrap();
    });
    let totals = native.vm().totals();
    for counter in [
        Counter::ZeroedIdle,
        Counter::ZeroedOnFree,
        Counter::ZeroedInFault,
        Counter::ZeroedPoolHit,
        Counter::ZeroedPoolMiss,
    ] {
        assert_ne!(totals.get(counter), 0, "{}", counter.name());
    }
    native.audit(&[&process]).unwrap();
    process.exit();
    let census = native.audit(&[]).unwrap();
    assert_eq!((census.taken(), census.zero), (1, 1), "{census:?}");
}

#[test]
fn a_taken_cpu_does_not_zero_ahead() {
    let native = crate::common::machine(1);
    native.vm().set(Setting::ZeroedPool(300));
    let process = native.process().unwrap();
    process
        .run(|_| {
            assert_eq!(native.zero_ahead(ZEROED_RUN), 0);
            Ok(())
        })
        .unwrap();
    assert_eq!(native.zero_ahead(ZEROED_RUN), ZEROED_RUN);
    assert_eq!(native.vm().zeroed_frames(), ZEROED_RUN as u64);
}
