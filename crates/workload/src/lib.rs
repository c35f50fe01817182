//! Memory benchmarks, written once and run on any system.
//!
//! A [`Program`] is a benchmark. It requests memory operations of its system through [`Task`], like
//! a real program of a kernel (map, unmap, load, store, fork), and checks every result, so each
//! benchmark is also a test. A [`System`] runs programs: [`Linux`] on the kernel of this process,
//! `faultless_native::Native` on the subsystem of this workspace, and `faultless_virtual::Virtual`
//! on the subsystem with simulated CPUs. The programs have the names and do the work of established
//! kernel benchmarks; [`all`] lists them and [`Workload::parse`] selects one.
//!
//! ```
//! use faultless_workload::{Linux, Workload};
//!
//! let workload = Workload::parse("page_fault1", ["size=64K", "passes=2"])?;
//! let outcome = workload.run(&Linux::new())?;
//! assert_eq!(outcome.operations, 32);
//! println!("{:.0} faults a second", outcome.faults_per_second());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Times are in seconds, rates per second, sizes in bytes.

#[cfg(not(target_os = "linux"))]
compile_error!(
    "workloads are run on Linux hosts: clocks, processes and the kernel to compare with"
);

mod file;
mod host;
mod linux;
#[cfg(feature = "native")]
mod native;
mod outcome;
mod param;
mod program;
mod programs;
mod registry;
mod start;
mod system;
#[cfg(feature = "virtual")]
mod virtual_machine;

pub use file::{Contents, FUNCTION, FileSpec};
pub use linux::{Linux, LinuxTask};
#[cfg(feature = "native")]
pub use native::NativeTask;
pub use outcome::{Outcome, PFT_HEADER, percentile};
pub use param::{Kind, Param, ParamError, Settings};
pub use program::{MODE, Program, SECONDS, THREADS};
pub use programs::{
    Brk1, Discard, Ebizzy, Forks, Llm, Mmap1, PageFault1, PageFault1Churn, PageFault2, PageFault3,
    PageFaultFile, PageFaultRead, Pft, SmallAllocs, Text, Vma, VmaFault, VmaMmap, VmaMmapTouch,
    VmaUnmap, VmaUnmapUntouched, XsBench,
};
pub use registry::{Workload, WorkloadInfo, all};
pub use system::{
    Child, Crew, Failure, Footprint, Measured, Mode, Needs, Report, System, Tally, Task, Tiers,
    Worker,
};
#[cfg(feature = "virtual")]
pub use virtual_machine::VirtualTask;
