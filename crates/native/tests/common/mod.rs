//! Common parts of the native machine's tests.

#![allow(dead_code, reason = "each test uses a part")]

pub mod stress;

use core::sync::atomic::AtomicU64;
use faultless::{MapFlags, Prot};
use faultless_native::{Checked, Config, Native, NativeCpu, Stop};

pub const PAGE: u64 = faultless::PAGE_SIZE;
pub const RW: Prot = Prot::READ.union(Prot::WRITE);
pub const PRIVATE: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS);
pub const SHARED: MapFlags = MapFlags::SHARED.union(MapFlags::ANONYMOUS);

/// Creates a small machine that panics on a stale access.
pub fn machine(cpus: usize) -> Native {
    let config =
        Config { memory_bytes: 64 << 20, cpus, checked: Checked::Panic, ..Config::default() };
    Native::new(config).unwrap()
}

/// Maps `pages` private pages at any free address.
pub fn map(cpu: &NativeCpu<'_, '_>, pages: u64) -> Result<u64, Stop> {
    Ok(cpu.mmap(None, pages * PAGE, RW, PRIVATE)?)
}

/// A word in the kernel's view of a page, aligned.
pub fn word<'w>(at: *const u8) -> &'w AtomicU64 {
    // SAFETY: in a page of the machine's memory, which programs only reach by atomics too.
    unsafe { &*at.cast() }
}
