//! The place where the thread of a CPU sleeps while it waits for another CPU.

use faultless::locks::Permit;
use std::sync::{Condvar, Mutex, PoisonError};

/// One CPU's.
#[derive(Debug, Default)]
pub(crate) struct Parking {
    permit: Permit,
    asleep: Mutex<()>,
    woken: Condvar,
}

impl Parking {
    /// Sleeps until the CPU is woken, unless a wake-up came since the last return.
    pub(crate) fn park(&self) {
        let mut asleep = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
        if self.permit.park() {
            while !self.permit.is_given() {
                asleep = self.woken.wait(asleep).unwrap_or_else(PoisonError::into_inner);
            }
            self.permit.resume();
        }
    }

    /// Wakes the CPU, or prevents its next sleep.
    pub(crate) fn wake(&self) {
        if self.permit.give() {
            // A thread between its last check and its sleep has the lock.
            drop(self.asleep.lock().unwrap_or_else(PoisonError::into_inner));
            self.woken.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn a_wake_up_before_parking_is_not_lost() {
        const TIMES: u32 = if cfg!(miri) { 50 } else { 20_000 };
        let (parking, turns) = (Parking::default(), AtomicU32::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for turn in 0..TIMES {
                    while turns.load(Ordering::Relaxed) == 2 * turn {
                        parking.park();
                    }
                    turns.fetch_add(1, Ordering::Relaxed);
                }
            });
            for turn in 0..TIMES {
                turns.store(2 * turn + 1, Ordering::Relaxed);
                parking.wake();
                while turns.load(Ordering::Relaxed) != 2 * turn + 2 {
                    std::thread::yield_now();
                }
            }
        });
    }
}
