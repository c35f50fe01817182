//! The use of memory, as shown by `/proc/meminfo`, `/proc/vmstat` and the files of the memory
//! nodes.

use super::cache;
use super::proc::Text;
use core::fmt::{self, Display, Write};
use faultless::{Census, Machine, PAGE_SIZE};
use faultless_bare::percpu;

/// The numbers are in pages, each counted at its own moment.
pub(super) struct Usage {
    pub total: u64,
    pub free: u64,
    pub census: Census,
    /// Pages of files on the disk.
    pub on_disk: u64,
    /// Dirty pages of files on the disk.
    pub dirty: u64,
    /// Pages of the swap area.
    pub swap_cached: u64,
}

impl Usage {
    /// Returns the use of one memory node, or of all memory.
    pub fn of(node: Option<u8>) -> Self {
        let vm = percpu::vm();
        let is_own = |frame| node.is_none_or(|node| vm.frame_node(frame) == Some(node));
        let [mut on_disk, mut dirty, mut swap_cached] = [0; 3];
        cache::each_page(|frame, is_dirty| {
            on_disk += u64::from(is_own(frame));
            dirty += u64::from(is_dirty && is_own(frame));
        });
        percpu::cpu().each_swap_cached(|frame| swap_cached += u64::from(is_own(frame)));
        let (total, free, census) = match node {
            Some(node) => (total_on(node), vm.free_frames_on(node), vm.usage_on(node)),
            None => (vm.total_frames(), vm.free_frames(), vm.usage()),
        };
        // All are pages of objects.
        let swap_cached = swap_cached.min(census.shared);
        let on_disk = on_disk.min(census.shared - swap_cached);
        Self { total, free, census, on_disk, dirty: dirty.min(on_disk), swap_cached }
    }

    /// Pages of files, on the disk or not.
    pub const fn cached(&self) -> u64 {
        self.census.shared - self.swap_cached
    }

    /// Returns the pages of files that are not on the disk, which correspond to Linux's tmpfs.
    pub const fn in_memory(&self) -> u64 {
        self.cached() - self.on_disk
    }

    /// Returns the pages available without swapping. Dirty pages of files on the disk are not
    /// available, because the disk is only read.
    pub const fn available(&self) -> u64 {
        self.free + self.on_disk - self.dirty
    }

    /// Returns the frames in use, or waiting for a flush.
    pub const fn in_use(&self) -> u64 {
        self.census.taken() - self.census.pooled - self.census.torn
    }

    /// The rows about Linux's lists of pages.
    pub const fn lists(&self) -> [(&'static str, u64); 9] {
        let anon = self.census.anon + self.swap_cached + self.in_memory();
        [
            ("SwapCached", self.swap_cached),
            ("Active", anon + self.on_disk),
            ("Inactive", 0),
            ("Active(anon)", anon),
            ("Inactive(anon)", 0),
            ("Active(file)", self.on_disk),
            ("Inactive(file)", 0),
            ("Unevictable", 0),
            ("Mlocked", 0),
        ]
    }

    /// The rows with counts of pages by use.
    pub const fn pages(&self) -> [(&'static str, u64); 5] {
        [
            ("Dirty", self.dirty),
            ("Writeback", 0),
            ("AnonPages", self.census.anon),
            ("Mapped", self.census.mapped),
            ("Shmem", self.in_memory()),
        ]
    }
}

/// The pages of a memory node.
pub(super) fn total_on(node: u8) -> u64 {
    let regions = percpu::vm().machine().regions().iter();
    regions.filter(|region| region.node == node).map(|region| u64::from(region.frames)).sum()
}

/// Writes rows of pages, in kB, with `before` before each name.
pub(super) fn rows(text: &mut Text, before: impl Display, rows: &[(&str, u64)]) -> fmt::Result {
    for (name, pages) in rows {
        let blanks = 14usize.saturating_sub(name.len());
        let kilobytes = pages * (PAGE_SIZE / 1024);
        writeln!(text, "{before}{name}:{:blanks$} {kilobytes:8} kB", "")?;
    }
    Ok(())
}
