//! Settings for mapped files: the size of fault-around, and mappings that are populated at once.

use super::cold::{POPULATE, drop_file};
use super::costs::Costs;
use super::findings::Findings;
use super::item::{Apply, Item, size};
use crate::error::Error;
use crate::number::plural;
use crate::rates::median;
use faultless::PAGE_SIZE;
use faultless_trace::files::ORDERS;
use memmap2::{Advice, Mmap};
use std::fs::OpenOptions;
use std::hint::black_box;
use std::io::{self, Seek, Write};
use std::time::Instant;

/// The setting of fault-around, in bytes.
const FILE: &str = "/sys/kernel/debug/fault_around_bytes";
/// The share of a mapping's pages that must be used to advise its population.
pub const MOSTLY: f64 = 0.9;
/// Pages of the file whose mapping is measured: 32 MiB.
const PAGES: usize = 8192;
/// The bytes of a write of this file.
const BLOCK: usize = 1 << 20;
/// The rounds of the measurement.
const ROUNDS: usize = 5;

/// The time of mapped files in the page cache, in nanoseconds, with the unmapping.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FileCost {
    /// A fault on one page, with the pages that fault-around maps.
    pub fault: f64,
    /// A page mapped by `MADV_POPULATE_READ`.
    pub page: f64,
}

impl FileCost {
    /// Measures a file in the directory of temporary files.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn measure() -> Result<Self, Error> {
        let failed = |error| Error::host("a file for the measurement of faults", error);
        let mut file = tempfile::tempfile().map_err(failed)?;
        let block = vec![1; BLOCK];
        let blocks = PAGES * PAGE_SIZE as usize / BLOCK;
        (0..blocks).try_for_each(|_| file.write_all(&block)).map_err(failed)?;
        // Pages that were read lie in other folios of the page cache than pages that were written,
        // and most files of a program were read.
        drop_file(&file).map_err(failed)?;
        file.rewind().map_err(failed)?;
        io::copy(&mut file, &mut io::sink()).map_err(failed)?;
        let mut times = [Vec::new(), Vec::new()];
        let around = 1 << ORDERS[0];
        for _ in 0..ROUNDS {
            for (populate, times) in [false, true].into_iter().zip(&mut times) {
                let begin = Instant::now();
                // SAFETY: the file has no name, so no other process changes the file.
                let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
                // An old kernel refuses the advice, and the loads below are faults.
                if populate {
                    _ = map.advise(Advice::PopulateRead);
                }
                let mut sum = 0u64;
                for byte in map.iter().step_by(around * PAGE_SIZE as usize) {
                    sum += u64::from(*black_box(byte));
                }
                black_box(sum);
                drop(map);
                times.push(begin.elapsed().as_secs_f64() * 1e9);
            }
        }
        let [single, populated] = times.map(|times| median(&times).unwrap_or(0.0));
        Ok(Self { fault: single / (PAGES / around) as f64, page: populated / PAGES as f64 })
    }

    /// Returns the nanoseconds of `faults` that map `pages`.
    fn time(&self, faults: u64, pages: u64) -> f64 {
        let around = f64::from(1u32 << ORDERS[0]);
        let exception = (self.fault - around * self.page).max(0.0);
        faults as f64 * exception + pages as f64 * self.page
    }
}

/// Returns the predicted items: the best larger size of fault-around, and populated mappings.
pub fn predicted(findings: &Findings, _: &Costs) -> Vec<Item> {
    let Some(cost) = findings.file_cost else { return Vec::new() };
    let files = findings.files;
    let now = cost.time(files.loads[0], files.mapped[0]);
    let mut items = Vec::new();
    let larger = (1..ORDERS.len())
        .map(|at| (ORDERS[at], files.loads[at], now - cost.time(files.loads[at], files.mapped[at])))
        .max_by(|one, other| one.2.total_cmp(&other.2));
    if let Some((order, loads, saving)) = larger.filter(|_| files.loads[0] > 0) {
        let bytes = PAGE_SIZE << order;
        items.push(Item {
            name: format!("fault-around {}", size(bytes)),
            action: format!("echo {bytes} > {FILE} (debugfs)"),
            saving,
            spared: Some(files.loads[0] as f64 - loads as f64),
            unused: 0,
            apply: applied(bytes),
            at_best: 0.0,
            remarks: vec!["maps only pages in the page cache: a cold file saves less"],
        });
    }
    if files.large_loads > 0 {
        let populated = files.large_pages as f64 * cost.page;
        items.push(Item {
            name: POPULATE.into(),
            action: format!(
                "MAP_POPULATE or MADV_POPULATE_READ for {} of {} in sum",
                plural(files.large, "mapping"),
                size(files.large_pages * PAGE_SIZE)
            ),
            saving: files.large_loads as f64 * cost.fault - populated,
            spared: Some(files.large_loads as f64),
            unused: 0,
            // The preloaded library populates all mappings of at least this size.
            apply: Apply::PopulateFiles(files.smallest),
            at_best: 0.0,
            remarks: vec!["a cold file is read at once, before its first use"],
        });
    }
    items
}

/// Returns the way to set the size, if this host permits the change.
fn applied(bytes: u64) -> Apply {
    // A kernel with lockdown refuses to open the file.
    match OpenOptions::new().write(true).open(FILE) {
        Ok(_) => Apply::Sysfs(FILE.into(), bytes.to_string()),
        Err(_) => Apply::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::super::costs::tests::costs;
    use super::super::items::tests::{find, findings, sizes};
    use super::super::sysfs::Mode;
    use super::*;
    use faultless_trace::files::Files;

    #[test]
    fn larger_windows_save_exceptions() {
        let mut findings = findings("python", sizes(Mode::Madvise));
        findings.files = Files {
            loads: [1000, 250, 100, 90],
            mapped: [16_000, 16_000, 25_600, 46_080],
            large: 2,
            large_pages: 8000,
            smallest: 4 << 20,
            large_loads: 500,
            ..Files::default()
        };
        assert!(predicted(&findings, &costs()).is_empty(), "without a measurement");
        findings.file_cost = Some(FileCost { fault: 1000.0, page: 25.0 });
        let items = predicted(&findings, &costs());
        // 750 exceptions of 600 ns; 1 MiB saves 900 exceptions, and maps 9,600 pages more.
        let got = find(&items, "fault-around 256 KiB");
        assert!((got.saving - 750.0 * 600.0).abs() < 1.0, "{got:?}");
        assert_eq!(got.apply, applied(1 << 18));
        assert!(got.action.starts_with("echo 262144 > "), "{got:?}");
        let got = find(&items, "populate file mappings");
        assert!((got.saving - (500.0 * 1000.0 - 8000.0 * 25.0)).abs() < 1.0, "{got:?}");
        assert_eq!((got.spared, &got.apply), (Some(500.0), &Apply::PopulateFiles(4 << 20)));
    }

    #[test]
    fn fault_on_a_file_costs_more_than_a_populated_page() {
        let plausible = |cost: FileCost| cost.page > 0.5 && cost.fault > 2.0 * cost.page;
        // Other programs disturb single measurements.
        let measured = || FileCost::measure().expect("a temporary file");
        assert!((0..9).any(|_| plausible(measured())), "{:?}", measured());
    }
}
