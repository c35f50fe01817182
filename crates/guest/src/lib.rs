//! The code shared by the guest programs: system calls, memory to probe, processes, checks and
//! measurements.
//!
//! The programs of this crate are ordinary Linux programs. Built as static programs, the same files
//! run on the host's Linux, on a Linux in QEMU and on the bare machine:
//!
//! ```text
//! RUSTFLAGS="-C target-feature=+crt-static -C relocation-model=static" \
//!     cargo build --release -p faultless-guest --target x86_64-unknown-linux-gnu
//! ```
//!
//! | program | purpose |
//! |---|---|
//! | `rows` | measures the cost of faults and calls, in instructions if the clock counts instructions |
//! | `reclaim` | measures the cost of reading pages from a disk, evicting and moving pages |
//! | `counts` | counts faults and TLB shootdowns of phases that run on several CPUs |
//! | `tlb` | the rules of translations, seen from user mode |
//! | `migrate` | the same while pages move between memory nodes, and the errors of `move_pages` |
//! | `fuzz` | random system calls from every CPU |
//! | `faults`, `signals`, `threads`, `processes`, `clocks` | the behaviour that programs expect, check by check |
//! | `orphans` | processes whose parent has ended |
//! | `files`, `streams`, `procfs` | the behaviour of files, of descriptors, of `/proc` |
//! | `limits` | limits of depth and length |
//! | `seals`, `rlimits`, `errors` | seals of memory files, limits of a process, errors of unusual arguments |
//! | `users`, `rights` | user and group ids, permissions, scheduling policies, calls reserved for root |
//! | `memory`, `shm` | locking, rearranging and sharing memory, and access to the memory of other processes |
//! | `sysv` | semaphores and message queues |
//! | `collapse` | the background collapse of text to huge pages (not on Debian's Linux, which has no huge pages for files) |
//! | `oom` | exhausts each resource |
//! | `victims` | the choice of the killed process when memory is out |
//!
//! Linux's behaviour is the reference: every program except `collapse` passes on Linux.

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
compile_error!("guest programs are Linux programs for x86-64");

pub mod args;
pub mod check;
pub mod clock;
pub mod dir;
pub mod facts;
pub mod init;
pub mod measure;
pub mod mem;
pub mod numa;
pub mod proc;
pub mod procfs;
pub mod random;
pub mod refusal;
pub mod signal;
pub mod sys;
pub mod turns;
