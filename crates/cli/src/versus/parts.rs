//! The parts of the comparison, by the hardware of the machine: a disk, a swap disk, two memory
//! nodes, or none of these.

use super::{Done, MEMORY, Side, pairs_of, table_of};
use crate::error::CliError;
use crate::report::Style;
use faultless_boot::Nodes;
use faultless_boot::linux::Stock;
use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use tempfile::TempDir;

/// The rows measured by a boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Rows for any machine.
    Plain,
    /// Pages of a file on a disk: major faults, and eviction.
    Disk,
    /// Private pages that are swapped out and in.
    Swap,
    /// Pages that move between two memory nodes.
    Nodes,
    /// Pages that move in memory compaction.
    Compact,
}

/// The file on the disk, and its size in bytes: enough for the passes.
const UNREAD: &str = "unread";
const UNREAD_BYTES: u64 = 24 << 20;
/// The memory of a machine that swaps.
const SCARCE: u64 = 192 << 20;
/// The memory of a machine that is compacted. `AREA` is the size of the swap disk.
const SMALL: u64 = 512 << 20;
const AREA: u64 = 512 << 20;

/// An explanation of the figures.
const DISK: &str = "\
A major fault reads 32 pages from a virtio disk: the bare kernel from a file on its disk (virtio over MMIO), Linux from the disk itself,
/dev/vda (virtio over PCI, the driver virtio_blk loaded as a module), so without a file system; each by its default read-ahead. The disk's
time is excluded: meanwhile a second thread calls sched_yield, so that the CPU is never idle, and the instructions of these calls are
subtracted. The figure includes the interrupt, both switches of threads, the interrupted part of a sched_yield, and timer interrupts
during a wait. Their number depends on the host's disk, so the figure varies by some percent, more on a busy host.
evict_page: 1024 clean pages of the same file, mapped and used by one process, paged out by one call (MADV_PAGEOUT).";
const SWAP: &str = "\
One process stores to more private pages than fit in memory (machines of 192 MiB, with a swap disk), first to new pages, then again. The cost of
an evicted page excludes the plain fault of the page that gets the frame; the cost of a page that is read back includes the fault, the read-ahead
and the eviction of another page. The disk's time is excluded as above. The bare kernel's CPU itself waits while\npages are written; a counter (disk_wait_ns of /proc/vmstat) measures this time, which is also subtracted.";
const NODES: &str = "\
Pages that `move_pages` moves, 512 in a call, from one node of memory to another and back: private writable pages; private read-only
pages; and pages of a file in memory that is mapped read-only. The bare kernel defers the flushes of the latter two (deferred_flush). Both machines
have two nodes, half of memory each, and their CPU in the first; Linux has no automatic NUMA balancing. Copying a page takes 512 counted steps on both.";
const COMPACT: &str = "\
A process has touched three quarters of memory (machines of 512 MiB) and discarded three of every four pages; then 1 is written to
/proc/sys/vm/compact_memory. The cost of this write, divided by the number of moved pages (pgmigrate_success).";

impl Part {
    /// The parts after the plain rows, in the order of their output.
    pub const MORE: [Self; 4] = [Self::Nodes, Self::Compact, Self::Disk, Self::Swap];

    /// Returns the machine's memory nodes.
    pub fn nodes(self) -> Nodes {
        if self == Self::Nodes { Nodes::two() } else { Nodes::default() }
    }

    /// Returns the machine's memory in bytes.
    pub const fn memory(self) -> u64 {
        match self {
            Self::Swap => SCARCE,
            Self::Compact => SMALL,
            _ => MEMORY,
        }
    }

    /// Returns the size of its swap disk in bytes.
    pub fn swap(self) -> Option<u64> {
        (self == Self::Swap).then_some(AREA)
    }

    /// Creates a directory with the file on its disk.
    pub fn files(self) -> io::Result<Option<TempDir>> {
        if self != Self::Disk {
            return Ok(None);
        }
        let directory = tempfile::Builder::new().prefix("faultless-").tempdir()?;
        File::create(image(&directory))?.set_len(UNREAD_BYTES)?;
        Ok(Some(directory))
    }

    /// Returns whether the figures vary between boots, with the time of the host's disk.
    pub const fn varies(self) -> bool {
        self.needs_disk()
    }

    /// Returns whether the figures need a kernel with drivers for disks.
    const fn needs_disk(self) -> bool {
        matches!(self, Self::Disk | Self::Swap)
    }

    /// Returns whether `stock` can measure this part.
    pub fn fits(self, stock: &Stock) -> bool {
        !self.needs_disk() || stock.reads_disks()
    }

    /// Returns the program's arguments.
    pub fn args(self, side: Side) -> Vec<String> {
        let word = match (self, side) {
            (Self::Plain, _) => return Vec::new(),
            (Self::Disk, Side::Ours) => format!("disk=/{UNREAD}"),
            (Self::Disk, Side::Linux(_)) => "disk=/dev/vda".to_owned(),
            (Self::Swap, Side::Ours) => "swap=there".to_owned(),
            (Self::Swap, Side::Linux(_)) => "swap=/dev/vda".to_owned(),
            (Self::Nodes, _) => "to=1".to_owned(),
            (Self::Compact, _) => "compact".to_owned(),
        };
        let few = matches!(self, Self::Swap | Self::Compact).then(|| "passes=2".to_owned());
        [word].into_iter().chain(few).collect()
    }

    /// Returns the explanation of the figures.
    const fn explained(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Disk => DISK,
            Self::Swap => SWAP,
            Self::Nodes => NODES,
            Self::Compact => COMPACT,
        }
    }

    /// Prints the measurements. Returns the number of rows that miss their target.
    pub fn print(
        self,
        out: &mut dyn Write,
        done: &[Done],
        stock: &Stock,
        style: Style,
    ) -> Result<usize, CliError> {
        let pairs = pairs_of(done, self);
        if pairs.is_empty() {
            return Ok(0);
        }
        let (table, missed) = table_of(&pairs, stock, style);
        writeln!(out, "{table}\n{}\n", self.explained())?;
        if self.fits(stock) {
            return Ok(missed);
        }
        writeln!(
            out,
            "{} cannot read the disk, so these rows are not measured on it.\n",
            stock.name
        )?;
        Ok(0)
    }
}

/// Returns the file in its directory.
pub fn image(directory: &TempDir) -> PathBuf {
    directory.path().join(UNREAD)
}

#[cfg(test)]
mod tests {
    use super::super::figures;
    use super::*;
    use faultless_analysis::settings::Regime;

    /// Returns the output and the number of missed targets, with a kernel given as a file.
    fn printed(done: &[Done]) -> (String, usize) {
        let directory = tempfile::tempdir().expect("a directory");
        let kernel = directory.path().join("vmlinuz-6.12.1");
        let mut bytes = vec![0; 0x206];
        bytes[0x202..].copy_from_slice(b"HdrS");
        std::fs::write(&kernel, bytes).expect("written");
        let stock = Stock::file(&kernel).expect("a kernel");
        let mut out = Vec::new();
        let missed = Part::Disk
            .print(&mut out, done, &stock, Style { terminal: false, width: 100 })
            .expect("the output is memory");
        (String::from_utf8(out).expect("text"), missed)
    }

    #[test]
    fn kernel_without_disk_drivers_skips_disk_rows() {
        assert_eq!(printed(&[]), (String::new(), 0), "a row that was not measured");
        let done = Done {
            side: Side::Ours,
            program: "reclaim",
            cpus: 1,
            regime: Regime::OFF,
            part: Part::Disk,
            args: Vec::new(),
            set: Vec::new(),
            figures: figures::figures("row major_fault 16500.0 per_fault"),
            facts: Vec::new(),
            run: 0,
            trouble: None,
        };
        let (text, missed) = printed(&[done]);
        assert!(text.contains("16,500") && text.contains("not measured on it"), "{text}");
        assert_eq!(missed, 0);
    }

    #[test]
    fn disk_file_suffices_for_the_passes() {
        let directory = Part::Disk.files().expect("made").expect("a directory of files");
        assert_eq!(std::fs::metadata(image(&directory)).expect("there").len(), UNREAD_BYTES);
    }
}
