//! The native machine of faultless: OS threads are CPUs.
//!
//! - [`memory`]: physical memory is one anonymous mapping of the host, cut into frames;
//! - [`tlb`]: each CPU has its own set-associative TLBs;
//! - [`mmu`]: a miss walks the page tables and sets accessed and dirty bits, as hardware does;
//! - [`machine`]: the implementation of the subsystem's machine interface;
//! - [`cpu`]: the accesses and calls of guest code, optionally checked against law 1;
//! - [`process`]: processes, and their threads;
//! - [`store`]: files of the host as backing stores of memory objects.
//!
//! ```
//! use faultless::{MapFlags, Prot};
//! use faultless_native::{Config, Native};
//!
//! let native = Native::new(Config::default()).unwrap();
//! let process = native.process().unwrap();
//! let sum = process.run(|cpu| {
//!     let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS;
//!     let a = cpu.mmap(None, 8192, Prot::READ | Prot::WRITE, flags)?;
//!     cpu.store(a, 40u64)?;
//!     cpu.store(a + 4096, 2u64)?;
//!     Ok(cpu.load::<u64>(a)? + cpu.load::<u64>(a + 4096)?)
//! });
//! assert_eq!(sum, Ok(42));
//! ```
//!
//! A kernel's other calls, in the background or once, go to the [`Cpu`](faultless::Cpu) below a
//! [`NativeCpu`]:
//!
//! ```
//! use faultless::{Advice, MapFlags, Prot};
//! use faultless_native::{Config, HostFile, Native};
//! use std::sync::Arc;
//!
//! let native = Native::new(Config::default()).unwrap();
//! let process = native.process().unwrap();
//! let file = tempfile::tempfile().unwrap();
//! file.set_len(1 << 20).unwrap();
//! let area = Arc::new(HostFile::new(file).unwrap());
//! let word = process.run(|cpu| {
//!     cpu.cpu().swap_on(area)?;
//!     let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS;
//!     let a = cpu.mmap(None, 8192, Prot::READ | Prot::WRITE, flags)?;
//!     cpu.store(a, 40u64)?;
//!     cpu.madvise(a, 8192, Advice::PageOut)?;
//!     assert_eq!(cpu.cpu().swap_usage(), (256, 1));
//!     // Every few milliseconds:
//!     cpu.cpu().reclaim_ahead();
//!     cpu.cpu().balance(64);
//!     Ok(cpu.load::<u64>(a)?)
//! });
//! assert_eq!(word, Ok(40));
//! ```

pub mod cpu;
pub mod machine;
pub mod memory;
pub mod mmu;
mod parking;
pub mod process;
pub mod store;
pub mod tlb;

pub use cpu::{NativeCpu, Signal, Stop};
pub use machine::{Checked, Config, ConfigError, NativeMachine, Stale, Violation};
pub use memory::{Memory, Word};
pub use process::{Native, Process};
pub use store::HostFile;
pub use tlb::{TLB_COUNTERS, TlbStats};

/// The examples of the project's README.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
pub struct Readme;
