//! Memory in tiers is kept in balance: pages that are not used leave the fast node before it is full, and pages that are used come to it.
//!
//! Linux demotes pages in a kernel thread of each node, and promotes them in the faults of those who use them. Here each CPU looks at its own node at the end of
//! a time slice, on the return of the thread that it runs to user mode: an idle CPU makes no node short. The pages that move at one
//! time are bounded by [`Cpu::balance`](faultless::Cpu::balance). `numa_balancing=disable` on the command line, a word that Linux knows, leaves all pages where they are.

use super::current;
use faultless_bare::boot::words;
use faultless_bare::percpu;

/// How many pages come to the CPU's node in one time slice, at most: 64 MB/s for each CPU.
const PROMOTED: u64 = 64;

/// Looks at this CPU's node. The caller holds no lock.
pub(super) fn tend() {
    if let Some(memory) = current().process.memory() {
        memory.note_peaks();
    }
    if words("numa_balancing").last() != Some("disable") {
        percpu::cpu().balance(PROMOTED);
    }
}
