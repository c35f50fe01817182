//! What a major fault costs, a read of a page that a virtio disk has; and what it costs to evict such pages.

use super::{Done, Part, Side, pairs_of, table_of};
use crate::error::CliError;
use crate::report::Style;
use faultless_boot::linux::Stock;
use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use tempfile::TempDir;

/// The rows, the file that they read, and how large that is: enough for their passes.
const ROWS: &str = "major_fault,evict_page";
const UNREAD: &str = "unread";
const UNREAD_BYTES: u64 = 24 << 20;

/// What the figures are.
const READ: &str = "\
A major fault reads 32 pages from a virtio disk: the bare kernel from a file on its disk (virtio over MMIO), Linux from the disk itself,
/dev/vda (virtio over PCI, the driver virtio_blk loaded as a module), so without a file system; each by its default read-ahead. The disk's
time is excluded: meanwhile a second thread calls sched_yield, so that the CPU is never idle, and the instructions of its calls are taken
off. The figure keeps the interrupt, both switches of threads, the part of a sched_yield that a switch cuts off, and timer interrupts
during a wait. How many those are depends on the host's disk, so the figure varies by some percent, more on a busy host.
evict_page: 1024 clean pages of the same file, mapped and used by one process, paged out by one call (MADV_PAGEOUT).";

/// A directory with the file.
pub fn unread() -> io::Result<TempDir> {
    let directory = tempfile::Builder::new().prefix("faultless-").tempdir()?;
    File::create(image(&directory))?.set_len(UNREAD_BYTES)?;
    Ok(directory)
}

/// The file in it.
pub fn image(directory: &TempDir) -> PathBuf {
    directory.path().join(UNREAD)
}

/// The arguments of `rows` for these rows.
pub fn args(side: Side) -> [String; 2] {
    let disk = match side {
        Side::Ours => format!("disk=/{UNREAD}"),
        Side::Linux => "disk=/dev/vda".to_owned(),
    };
    [format!("row={ROWS}"), disk]
}

/// Prints what was measured; how many rows miss their target.
pub fn tell(
    out: &mut dyn Write,
    done: &[Done],
    stock: &Stock,
    style: Style,
) -> Result<usize, CliError> {
    let pairs = pairs_of(done, Part::Disk);
    if pairs.is_empty() {
        return Ok(0);
    }
    let (table, missed) = table_of(&pairs, stock, style);
    writeln!(out, "{table}\n{READ}\n")?;
    if stock.reads_disks() {
        return Ok(missed);
    }
    writeln!(out, "{} cannot read the disk, so these rows are not measured on it.\n", stock.name)?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::super::figures;
    use super::*;
    use crate::settings::Ahead;

    /// What is told, and what misses its target, with a kernel that was given as a file.
    fn told(done: &[Done]) -> (String, usize) {
        let directory = tempfile::tempdir().expect("a directory");
        let kernel = directory.path().join("vmlinuz-6.12.1");
        let mut bytes = vec![0; 0x206];
        bytes[0x202..].copy_from_slice(b"HdrS");
        std::fs::write(&kernel, bytes).expect("written");
        let stock = Stock::file(&kernel).expect("a kernel");
        let mut out = Vec::new();
        let missed = tell(&mut out, done, &stock, Style { terminal: false, width: 100 })
            .expect("memory takes it");
        (String::from_utf8(out).expect("text"), missed)
    }

    #[test]
    fn a_kernel_without_drivers_is_not_measured_and_fails_nothing() {
        assert_eq!(told(&[]), (String::new(), 0), "a row that nobody measured");
        let done = Done {
            side: Side::Ours,
            program: "rows",
            cpus: 1,
            ahead: Ahead::OFF,
            part: Part::Disk,
            args: Vec::new(),
            set: Vec::new(),
            figures: figures::figures("row major_fault 16500.0 per_fault"),
            trouble: None,
        };
        let (text, missed) = told(&[done]);
        assert!(text.contains("16,500") && text.contains("not measured on it"), "{text}");
        assert_eq!(missed, 0);
    }

    #[test]
    fn the_file_is_as_large_as_the_passes_need() {
        let directory = unread().expect("made");
        assert_eq!(std::fs::metadata(image(&directory)).expect("there").len(), UNREAD_BYTES);
    }
}
