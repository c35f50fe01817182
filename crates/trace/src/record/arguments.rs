//! The arguments of perf.

use super::{Extent, STACK_BYTES, Setup, Unwind};
use std::ffi::OsString;
use std::path::Path;
use std::thread;

/// The size of perf's buffer for each CPU. With 64 KiB, one event in a thousand was lost; with
/// 32 MiB no event was lost.
const BUFFER: &str = "32M";
/// Bounds of the size of this buffer if faults store copies of the stack, in MiB. With 32 MiB, a
/// program that fills 100 MB of memory lost half of its faults; with 256 MiB it lost none.
const COPIES: [usize; 2] = [32, 256];
/// The size of these buffers together, in MiB, on hosts with few CPUs.
const ALL_COPIES: usize = 1024;
const CALLS: [&str; 6] = ["mmap", "munmap", "mprotect", "madvise", "brk", "mremap"];
/// The calls that create or free memory, which have call stacks.
const WITH_STACKS: [&str; 5] = ["mmap", "munmap", "madvise", "brk", "mremap"];

impl Setup {
    /// Returns the arguments of perf, without `perf` itself, that record `command` into `output`.
    pub fn arguments(&self, output: &Path, command: &[OsString]) -> Vec<OsString> {
        let mut args = self.common(output);
        args.extend(self.events(1).into_iter().flatten());
        args.push("--".into());
        args.extend_from_slice(command);
        args
    }

    /// Returns the arguments of every recording, without the events.
    pub(super) fn common(&self, output: &Path) -> Vec<OsString> {
        // Disables perf's cache of programs (-N), which would keep unused copies in the home
        // directory.
        let mut args: Vec<OsString> =
            ["record", "-q", "-N", "-c", "1", "-d"].map(Into::into).to_vec();
        // Without privilege, perf_event_mlock_kb bounds the buffer, and perf's default fits it.
        if self.privileged {
            let buffer = match self.stacks {
                Some(Unwind::Dwarf) => {
                    copies_buffer(thread::available_parallelism().map_or(1, usize::from))
                }
                _ => BUFFER.to_owned(),
            };
            args.extend(["-m".into(), buffer.into()]);
        }
        if self.stacks.is_some() {
            args.push("--user-callchains".into());
        } else {
            // Only call stacks need build identifiers, for which perf reads and maps its whole file
            // at the end.
            args.push("-B".into());
        }
        args.extend(["-o".into(), output.into()]);
        args
    }

    /// Returns perf's terms of an event: one in `period` occurrences, with its call stack.
    fn terms(&self, period: u32) -> String {
        let period = (period > 1).then(|| format!("period={period}"));
        let stacks = self.stacks.map(|unwind| match unwind {
            Unwind::FramePointers => "call-graph=fp".to_owned(),
            Unwind::Dwarf => format!("call-graph=dwarf,stack-size={STACK_BYTES}"),
        });
        let terms: Vec<_> = period.into_iter().chain(stacks).collect();
        if terms.is_empty() { String::new() } else { format!("/{}/", terms.join(",")) }
    }

    /// Returns the arguments for each event, with one in `period` faults.
    pub(super) fn events(&self, period: u32) -> Vec<Vec<OsString>> {
        let mut events = Vec::new();
        let mut event = |name: &str| events.push(["-e", name].map(OsString::from).to_vec());
        // A tracepoint has no period of its own. The stack of a call is taken at its entry.
        let (software, stacks) = (self.terms(period), self.terms(1));
        let colon = if software.is_empty() { ":" } else { "" };
        match self.extent {
            Extent::UserFaultsOnly => event(&format!("page-faults{software}{colon}u")),
            Extent::FaultsOnly => event(&format!("page-faults{software}")),
            Extent::Full | Extent::WithoutAccess => {
                if self.extent == Extent::Full && period == 1 {
                    event(&format!("exceptions:page_fault_user{stacks}"));
                    event(&format!("exceptions:page_fault_kernel{stacks}"));
                } else {
                    event(&format!("page-faults{software}"));
                }
                event("task:task_newtask");
                if let Some(architecture) = self.raw_syscalls {
                    let enter = format!("raw_syscalls:sys_enter{stacks}");
                    for event in [&*enter, "raw_syscalls:sys_exit"] {
                        let filtered = ["-e", event, "--filter", &architecture.filter()];
                        events.push(filtered.map(OsString::from).to_vec());
                    }
                } else {
                    for call in CALLS {
                        let stacks = if WITH_STACKS.contains(&call) { &*stacks } else { "" };
                        event(&format!("syscalls:sys_enter_{call}{stacks}"));
                        event(&format!("syscalls:sys_exit_{call}"));
                    }
                }
            }
        }
        events
    }
}

/// Returns the size of perf's buffer for each of `cpus` CPUs, if faults store copies of the stack.
fn copies_buffer(cpus: usize) -> String {
    let [least, most] = COPIES;
    // perf takes powers of two.
    let size = (ALL_COPIES / cpus.next_power_of_two()).clamp(least, most);
    format!("{size}M")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_of_copies_are_bounded_together() {
        for (cpus, want) in [(1, "256M"), (4, "256M"), (6, "128M"), (24, "32M"), (512, "32M")] {
            assert_eq!(copies_buffer(cpus), want, "{cpus} CPUs");
        }
    }
}
