//! The parts of the bare machine's kernel that can be thought through, and tested, without the machine.
//! The kernel itself is the binary of this package.
#![no_std]
#![cfg_attr(
    test,
    allow(
        clippy::disallowed_types,
        clippy::disallowed_methods,
        clippy::disallowed_macros,
        reason = "tests run where there is memory"
    )
)]

extern crate alloc;

#[cfg(test)]
extern crate std;

#[path = "arch/calendar.rs"]
pub mod calendar;
#[path = "heap/collections/mod.rs"]
pub mod collections;
#[path = "task/elf.rs"]
pub mod elf;
#[path = "heap/pages.rs"]
pub mod pages;
#[path = "fs/path.rs"]
pub mod path;
#[path = "machine/pcid.rs"]
pub mod pcid;
#[path = "boot/ranges.rs"]
pub mod ranges;
