//! The virtual machine of faultless: the subsystem on N simulated CPUs, on one thread, with the
//! same results in every run.
//!
//! - [`profile`]: hardware costs, each number with its source;
//! - `simulation`: CPUs as coroutines, each with a clock; the selection of the next CPU;
//! - `lines`: the directory of cache lines: hits, transfers, invalidations, queues;
//! - `log`: the lines used by operations, and their times;
//! - [`rates`]: instructions between two accesses;
//! - `contents`: frames whose contents need one word on the host;
//! - `recent`: frames whose contents are in caches;
//! - `machine`: the platform interface of the subsystem;
//! - [`cpu`]: the accesses and calls of programs;
//! - [`process`]: processes, runs, and their times;
//! - [`window`]: the steady part of a run;
//! - [`published`]: published figures of real machines.
//!
//! The subsystem is compiled a second time for this machine (`faultless-observed`), with atomics
//! that report each access. Builds of other machines contain none of this. All times are
//! *simulated*.
//!
//! ```
//! use faultless::{MapFlags, Prot};
//! use faultless_virtual::{Config, Profile, Virtual};
//!
//! let profile = Profile::bundled("two-socket").unwrap();
//! let config = Config { cpus: 4, memory_bytes: 64 << 20, slow_bytes: 0, seed: 0 };
//! let system = Virtual::new(&profile, config).unwrap();
//! let process = system.process().unwrap();
//! let took = system.run(4, |_| &process, |cpu, _| {
//!     let begin = cpu.now();
//!     let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS;
//!     let area = cpu.mmap(None, 1 << 20, Prot::READ | Prot::WRITE, flags).unwrap();
//!     (area..area + (1 << 20)).step_by(4096).for_each(|page| cpu.store(page, 1).unwrap());
//!     cpu.now() - begin
//! });
//! assert!(took.iter().all(|picoseconds| *picoseconds > 0));
//! ```

mod accounts;
mod contents;
mod convert;
pub mod cpu;
mod disk;
mod lines;
mod log;
mod machine;
pub mod process;
pub mod profile;
pub mod published;
pub mod rates;
mod recent;
mod simulation;
pub mod window;

pub use accounts::{Accounts, Spent};
pub use cpu::{Idle, Stop, ThreadStreams, VirtualCpu};
pub use faultless_native::TlbStats;
pub use log::LineUse;
pub use machine::VirtualMachine;
pub use process::{Config, File, HotPlace, Process, Virtual};
pub use profile::{Number, Profile, ProfileError};
pub use simulation::Meeting;
pub use window::Steady;
