//! The clocks of the host.

/// Processor time, in seconds, and page faults.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Usage {
    pub(crate) user: f64,
    pub(crate) system: f64,
    pub(crate) faults: u64,
}

impl Usage {
    /// Returns the usage since `before`.
    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            user: self.user - before.user,
            system: self.system - before.system,
            faults: self.faults - before.faults,
        }
    }
}

impl std::ops::AddAssign for Usage {
    fn add_assign(&mut self, other: Self) {
        self.user += other.user;
        self.system += other.system;
        self.faults += other.faults;
    }
}

impl From<libc::rusage> for Usage {
    fn from(usage: libc::rusage) -> Self {
        let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
        Self {
            user: seconds(usage.ru_utime),
            system: seconds(usage.ru_stime),
            // The kernel counts upwards from 0.
            faults: (usage.ru_minflt + usage.ru_majflt) as u64,
        }
    }
}

/// Returns the seconds on the clock shared by all threads and processes.
pub(crate) fn now() -> f64 {
    // SAFETY: a `timespec` of zeros is valid, and the call fills it.
    let time = unsafe {
        let mut time: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time);
        time
    };
    // A double holds nanoseconds for 100 days of uptime, and microseconds for 280 years.
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Yields between polls of a wait loop. Short waits are detected at once. If there are more threads
/// than processors, the other threads get processor time.
pub(crate) fn rest(looks: u32) {
    if looks.is_multiple_of(256) {
        std::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}

/// Returns the usage of this thread so far, as counted by the host kernel.
pub(crate) fn thread_usage() -> Usage {
    // SAFETY: a `timespec` and an `rusage` of zeros are valid, and the calls fill them.
    let usage = unsafe {
        // Reading the thread's clock updates it; `getrusage` alone returns the value of the last
        // tick.
        let mut time: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time);
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
        usage
    };
    usage.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_shorter_than_a_tick_is_measured() {
        for _ in 0..100 {
            let before = thread_usage();
            (0..100_000).for_each(|n: u32| _ = std::hint::black_box(n));
            let used = thread_usage().since(before);
            assert!(used.user + used.system > 0.0, "{used:?}");
        }
    }
}
