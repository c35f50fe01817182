//! Balances memory in tiers: unused pages leave the fast node before the node is full, and used
//! pages move to the fast node.
//!
//! Linux demotes pages in a kernel thread of each node, and promotes pages in faults. Here each CPU
//! checks its own node at the end of a time slice, when its thread returns to user mode: an idle
//! CPU does not fill a node. [`Cpu::balance`](faultless::Cpu::balance) bounds the pages moved at
//! one time. `numa_balancing=disable` on the command line, a word known to Linux, disables all
//! these moves.

use super::current;
use faultless_bare::boot::words;
use faultless_bare::percpu;

/// The maximum number of pages promoted to the CPU's node in one time slice: 64 MB/s for each CPU.
const PROMOTED: u64 = 64;

/// Balances this CPU's node. The caller holds no lock.
pub(super) fn balance() {
    if let Some(memory) = current().process.memory() {
        memory.note_peaks();
    }
    if words("numa_balancing").last() != Some("disable") {
        percpu::cpu().balance(PROMOTED);
    }
}
