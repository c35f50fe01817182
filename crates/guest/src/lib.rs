//! What the guest programs share: system calls, memory to probe, processes, checks and figures.
//!
//! The programs of this crate are ordinary Linux programs. Built as static ones they run, the very
//! same file, on the host's Linux, on a Linux in QEMU and on the bare machine:
//!
//! ```text
//! RUSTFLAGS="-C target-feature=+crt-static -C relocation-model=static" \
//!     cargo build --release -p faultless-guest --target x86_64-unknown-linux-gnu
//! ```
//!
//! | program | what it does |
//! |---|---|
//! | `rows` | measures what faults and calls cost, in instructions where the clock counts those |
//! | `reclaim` | the same of pages that are read from a disk, leave memory, and move |
//! | `counts` | counts faults and TLB shootdowns of phases that run on several CPUs |
//! | `tlb` | the laws of translations, seen from user mode |
//! | `migrate` | the same while pages move between memory nodes, and the errors of `move_pages` |
//! | `fuzz` | random system calls from every CPU |
//! | `faults`, `signals`, `threads`, `processes`, `clocks` | what programs expect of the interface, check by check |
//! | `orphans` | what becomes of processes whose parent ends |
//! | `files`, `streams`, `procfs` | the same of files, of descriptors, of `/proc` |
//! | `limits` | how deep and how long things may get |
//! | `seals`, `rlimits`, `errors` | seals of memory files, limits of a process's memory, errors of unusual arguments |
//! | `users` | user and group ids, permissions, scheduling policies, calls that only root may make |
//! | `memory`, `shm` | locking, rearranging and sharing memory, and that of other processes |
//! | `sysv` | semaphores and message queues |
//! | `collapse` | text in base pages that comes on huge pages by itself (not on Debian's Linux, which has none for files) |
//! | `oom` | takes all there is of everything |
//! | `victims` | who is killed when memory is out |
//!
//! What Linux does is what is right: every program but `collapse` passes there.

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
