//! The limits of a process.

use crate::errno::{Errno, Result};
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use faultless::MemoryLock;
use faultless_bare::sync::Mutex;
use linux_raw_sys::general as nr;

/// The maximum number of a process or thread, as on Linux.
pub const PID_MAX: u32 = 4 << 20;

/// The locking of a process's future mappings: `mlockall` with `MCL_FUTURE`.
#[derive(Debug, Default)]
pub struct FutureLock(AtomicU8);

impl FutureLock {
    const HOW: [MemoryLock; 3] = [MemoryLock::No, MemoryLock::Now, MemoryLock::OnFault];

    #[inline]
    pub fn get(&self) -> MemoryLock {
        let at = self.0.load(Ordering::Relaxed);
        Self::HOW.get(usize::from(at)).copied().unwrap_or_default()
    }

    pub fn set(&self, how: MemoryLock) {
        let at = Self::HOW.iter().position(|&each| each == how).unwrap_or(0);
        self.0.store(at as u8, Ordering::Relaxed);
    }
}

/// The maximum number of descriptors of a process (`fs.nr_open`), as on Linux.
pub const MOST_DESCRIPTORS: u64 = 1 << 20;

/// Soft and hard limits, by Linux's numbers of resources.
pub type Rows = [[u64; 2]; 16];

/// The limits of the first processes: Linux's limits, with the subsystem's maximum stack size.
const FIRST: Rows = {
    const NONE: u64 = u64::MAX;
    let mut limits = [[NONE, NONE]; 16];
    limits[nr::RLIMIT_STACK as usize][0] = 8 << 20;
    limits[nr::RLIMIT_CORE as usize][0] = 0;
    limits[nr::RLIMIT_NPROC as usize] = [PID_MAX as u64, PID_MAX as u64];
    limits[nr::RLIMIT_NOFILE as usize] = [1024, MOST_DESCRIPTORS];
    limits[nr::RLIMIT_MEMLOCK as usize] = [8 << 20, 8 << 20];
    limits[nr::RLIMIT_SIGPENDING as usize] = [4096, 4096];
    limits[nr::RLIMIT_MSGQUEUE as usize] = [819_200, 819_200];
    limits[nr::RLIMIT_NICE as usize] = [0, 0];
    limits[nr::RLIMIT_RTPRIO as usize] = [0, 0];
    limits
};

/// The limits of a process.
#[derive(Debug)]
pub struct Limits {
    /// By Linux's numbers: soft and hard.
    pub rows: Mutex<Rows>,
    /// The soft limit of the address space, in bytes, for frequent reads.
    pub address_space: AtomicU64,
    /// The soft limit of private writable memory.
    pub data: AtomicU64,
    /// The soft limit of the size of files.
    pub file_size: AtomicU64,
    /// The soft limit of signals pending with their information.
    pub signals: AtomicU64,
    /// Set if new mappings are locked (`MCL_FUTURE`), and so faulted in, at once.
    pub locks_future: FutureLock,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            rows: Mutex::new(FIRST),
            address_space: AtomicU64::new(u64::MAX),
            data: AtomicU64::new(u64::MAX),
            file_size: AtomicU64::new(u64::MAX),
            signals: AtomicU64::new(FIRST[nr::RLIMIT_SIGPENDING as usize][0]),
            locks_future: FutureLock::default(),
        }
    }
}

impl Limits {
    /// Sets a limit, and returns the old limit. A higher hard limit requires that `may_raise`
    /// succeeds.
    ///
    /// # Errors
    /// `EINVAL`: an unknown resource, or the soft limit is above the hard limit. `EPERM`: more
    /// descriptors than `fs.nr_open`. The errors of `may_raise`.
    pub fn set(
        &self,
        resource: usize,
        new: [u64; 2],
        may_raise: impl FnOnce() -> Result<()>,
    ) -> Result<[u64; 2]> {
        let mut rows = self.rows.lock();
        let limit = rows.get_mut(resource).filter(|_| new[0] <= new[1]).ok_or(Errno::EINVAL)?;
        if resource == nr::RLIMIT_NOFILE as usize && new[1] > MOST_DESCRIPTORS {
            return Err(Errno::EPERM);
        }
        let old = *limit;
        if new[1] > old[1] {
            may_raise()?;
        }
        *limit = new;
        let copy = match resource as u32 {
            nr::RLIMIT_AS => &self.address_space,
            nr::RLIMIT_DATA => &self.data,
            nr::RLIMIT_FSIZE => &self.file_size,
            nr::RLIMIT_SIGPENDING => &self.signals,
            _ => return Ok(old),
        };
        copy.store(new[0], Ordering::Relaxed);
        Ok(old)
    }

    /// The soft limit of a resource.
    pub fn soft(&self, resource: u32) -> u64 {
        self.rows.lock().get(resource as usize).map_or(u64::MAX, |limit| limit[0])
    }

    /// Takes over the limits of `other`, as a new process does.
    pub fn copy_from(&self, other: &Self) {
        let rows = *other.rows.lock();
        *self.rows.lock() = rows;
        let pairs = [
            (&self.address_space, &other.address_space),
            (&self.data, &other.data),
            (&self.file_size, &other.file_size),
            (&self.signals, &other.signals),
        ];
        for (own, others) in pairs {
            own.store(others.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}
