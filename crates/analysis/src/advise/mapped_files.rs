//! Settings for mapped files: the size of fault-around, and mappings that are populated at once.

use super::cold::{POPULATE, drop_file};
use super::costs::Costs;
use super::findings::Findings;
use super::interval::Saving;
use super::item::{Apply, Item, Open, size};
use crate::calibrate::faults::thread_time;
use crate::error::Error;
use crate::number::{fixed, plural};
use crate::rates::median;
use faultless::PAGE_SIZE;
use faultless_trace::files::{Files, ORDERS};
use memmap2::{Advice, MmapOptions};
use std::fs::{File, OpenOptions};
use std::hint::black_box;
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::path::Path;

/// The setting of fault-around, in bytes.
const FILE: &str = "/sys/kernel/debug/fault_around_bytes";
/// The share of a mapping's pages that must be used to advise its population.
pub const MOSTLY: f64 = 0.9;
/// Pages of the file whose mapping is measured: 32 MiB.
const PAGES: usize = 8192;
/// Pages of the smallest file that is measured: 4 MiB.
const LEAST: usize = 1024;
/// The pages that a fault maps by default.
const AROUND: f64 = (1u32 << ORDERS[0]) as f64;
/// The bytes of a write of this file.
const BLOCK: usize = 1 << 20;
/// The rounds of the measurement.
const ROUNDS: usize = 7;

/// The processor time of mapped files in the page cache, in nanoseconds, with the unmapping.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FileCost {
    /// A fault on one page, with the pages that fault-around maps.
    pub fault: f64,
    /// A page mapped by `MADV_POPULATE_READ`.
    pub page: f64,
    /// The saving for each populated page, if the program loads from all pages in sequence: the
    /// kernel maps pages between the loads from the pages before.
    pub in_sequence: Saving,
    /// The same for loads from all pages in random order.
    pub random: Saving,
}

/// The loads from a measured mapping.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Loads {
    /// From one page of those that a fault maps.
    Few,
    /// From each page in sequence.
    InSequence,
    /// From each page in random order.
    Random,
}

impl Loads {
    const ALL: [Self; 3] = [Self::Few, Self::InSequence, Self::Random];
}

impl FileCost {
    /// Measures a file in the directory of temporary files, which lies in the page cache in folios
    /// like those of `files`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn measure(files: &Files) -> Result<Self, Error> {
        let measured = || {
            let mut file = tempfile::tempfile()?;
            let mut block = vec![1; BLOCK];
            let blocks = PAGES * PAGE_SIZE as usize / BLOCK;
            (0..blocks).try_for_each(|_| file.write_all(&block))?;
            drop_file(&file)?;
            if has_small_folios(files) {
                // SAFETY: the call takes a descriptor that is open, and no memory.
                unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) };
            }
            file.rewind()?;
            (0..blocks).try_for_each(|_| file.read_exact(&mut block))?;
            Self::of(&file, PAGES)
        };
        measured().map_err(|error| Error::host("a file for the measurement of faults", error))
    }

    /// Measures the file `path`, which is in the page cache as the program has left it. Returns
    /// `None` if the file cannot be mapped, or is too small.
    pub fn measure_file(path: &Path) -> Option<Self> {
        let file = File::open(path).ok()?;
        let pages = usize::try_from(file.metadata().ok()?.len() / PAGE_SIZE).ok()?.min(PAGES);
        if pages < LEAST {
            return None;
        }
        Self::of(&file, pages).ok()
    }

    fn of(file: &File, pages: usize) -> io::Result<Self> {
        let mut order: Vec<usize> = (0..pages).collect();
        fastrand::Rng::with_seed(1).shuffle(&mut order);
        // The first mapping reads missing pages.
        time(file, Loads::Few, true, &order)?;
        // The times of each order of loads, without and with populated pages.
        let mut times = Loads::ALL.map(|_| [Vec::new(), Vec::new()]);
        for round in 0..ROUNDS {
            for (loads, times) in Loads::ALL.into_iter().zip(&mut times) {
                for populate in [round % 2 == 0, round % 2 == 1] {
                    times[usize::from(populate)].push(time(file, loads, populate, &order)?);
                }
            }
        }
        let faults = pages as f64 / AROUND;
        let [few, in_sequence, random] = times;
        let [fault, page] = few.map(|times| median(&times).unwrap_or(0.0));
        let saving = |[faulted, populated]: [Vec<f64>; 2]| {
            let none = Saving { middle: 0.0, interval: None };
            Saving::of(&faulted, &populated)
                .map_or(none, |saving| saving.scaled(1.0 / pages as f64))
        };
        Ok(Self {
            fault: fault / faults,
            page: page / pages as f64,
            in_sequence: saving(in_sequence),
            random: saving(random),
        })
    }

    /// Returns the saving of populated mappings, and the interval of the measurements.
    fn populated(&self, files: &Files) -> Saving {
        let pages = files.large_pages as f64;
        let share = files.large_next as f64 / files.large_loads.max(1) as f64;
        let of =
            |in_sequence: f64, random: f64| pages * (share * in_sequence + (1.0 - share) * random);
        let ends = self.in_sequence.interval.zip(self.random.interval);
        Saving {
            middle: of(self.in_sequence.middle, self.random.middle),
            interval: ends.map(|(one, other)| [0, 1].map(|end| of(one[end], other[end]))),
        }
    }

    /// Returns the nanoseconds of `faults` that map `pages`.
    fn time(&self, faults: u64, pages: u64) -> f64 {
        let exception = (self.fault - AROUND * self.page).max(0.0);
        faults as f64 * exception + pages as f64 * self.page
    }
}

/// Returns whether the recorded faults on `files` mapped as many pages as a fault on small folios.
/// A fault on a huge folio maps the whole folio.
fn has_small_folios(files: &Files) -> bool {
    2.0 * files.large_loads as f64 * AROUND >= files.large_pages as f64
}

/// Returns the processor time of a new mapping of `file`, of its `loads`, and of its end. `order`
/// is the random order of the pages.
fn time(file: &File, loads: Loads, populate: bool, order: &[usize]) -> io::Result<f64> {
    let page = PAGE_SIZE as usize;
    let begin = thread_time();
    // SAFETY: the bytes are only read, and their values are not used. A program that shortens the
    // file ends this measurement by a signal, as for every reader.
    let map = unsafe { MmapOptions::new().len(order.len() * page).map(file) }?;
    // An old kernel refuses the advice, and the loads below are faults.
    if populate {
        _ = map.advise(Advice::PopulateRead);
    }
    let load = |at: usize| _ = black_box(map[at * page]);
    match loads {
        Loads::Few => (0..order.len()).step_by(1 << ORDERS[0]).for_each(load),
        Loads::InSequence => (0..order.len()).for_each(load),
        Loads::Random => order.iter().copied().for_each(load),
    }
    drop(map);
    Ok((thread_time() - begin).as_secs_f64() * 1e9)
}

/// Returns the advice if the saving of populated mappings is below the error of its measurement.
pub fn open(findings: &Findings) -> Option<Open> {
    let cost = findings.file_cost.filter(|_| findings.files.large_loads > 0)?;
    let saving = cost.populated(&findings.files);
    let [low, high] = saving.interval.filter(|_| !saving.is_sure())?;
    let seconds = |nanoseconds: f64| fixed(nanoseconds / 1e9, 3);
    Some(Open {
        name: POPULATE.into(),
        action: "no setting is known to help with a warm page cache".into(),
        why: format!(
            "MAP_POPULATE or MADV_POPULATE_READ for {} is predicted to save {} s ({} to {} s), below \
             the error of the measurement",
            populated_mappings(findings),
            seconds(saving.middle),
            seconds(low),
            seconds(high)
        ),
        apply: Apply::PopulateFiles(findings.files.smallest),
    })
}

/// Returns the number and the size of the mappings that are worth populating.
fn populated_mappings(findings: &Findings) -> String {
    let files = &findings.files;
    format!("{} of {} in sum", plural(files.large, "mapping"), size(files.large_pages * PAGE_SIZE))
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
    let populated = cost.populated(&files);
    if files.large_loads > 0 && populated.is_sure() {
        items.push(Item {
            name: POPULATE.into(),
            action: format!(
                "MAP_POPULATE or MADV_POPULATE_READ for {}",
                populated_mappings(findings)
            ),
            saving: populated.middle,
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
            large_next: 400,
            ..Files::default()
        };
        assert!(predicted(&findings, &costs()).is_empty(), "without a measurement");
        assert!(open(&findings).is_none(), "without a measurement");
        let saving = |middle: f64, low, high| Saving { middle, interval: Some([low, high]) };
        let cost = FileCost {
            fault: 1000.0,
            page: 25.0,
            in_sequence: saving(37.5, 25.0, 50.0),
            random: saving(-6.25, -12.5, 0.0),
        };
        findings.file_cost = Some(cost);
        let items = predicted(&findings, &costs());
        // 750 exceptions of 600 ns; 1 MiB saves 900 exceptions, and maps 9,600 pages more.
        let got = find(&items, "fault-around 256 KiB");
        assert!((got.saving - 750.0 * 600.0).abs() < 1.0, "{got:?}");
        assert_eq!(got.apply, applied(1 << 18));
        assert!(got.action.starts_with("echo 262144 > "), "{got:?}");
        let got = find(&items, "populate file mappings");
        // Of 500 faults that map 8,000 pages, 400 are in sequence.
        assert!((got.saving - (6400.0 * 37.5 - 1600.0 * 6.25)).abs() < 1.0, "{got:?}");
        assert_eq!((got.spared, &got.apply), (Some(500.0), &Apply::PopulateFiles(4 << 20)));
        assert!(open(&findings).is_none(), "beyond the error");
    }

    #[test]
    fn saving_below_its_error_is_no_advice() {
        let mut findings = findings("python", sizes(Mode::Madvise));
        let saving =
            |middle: f64| Saving { middle, interval: Some([middle - 300.0, middle + 300.0]) };
        let cost = |in_sequence, random| FileCost {
            fault: 1000.0,
            page: 25.0,
            in_sequence: saving(in_sequence),
            random: saving(random),
        };
        findings.files = Files {
            loads: [1000; 4],
            large: 2,
            large_pages: 16_000,
            smallest: 4 << 20,
            large_loads: 1000,
            large_next: 1000,
            ..Files::default()
        };
        for (in_sequence, expected) in
            [(500.0, true), (200.0, false), (-200.0, false), (-500.0, true)]
        {
            findings.file_cost = Some(cost(in_sequence, -900.0));
            let items = predicted(&findings, &costs());
            let item = items.iter().find(|item| item.name == POPULATE);
            let open = open(&findings);
            assert_eq!((item.is_some(), open.is_some()), (expected, !expected), "{items:?}");
            if let Some(item) = item {
                assert!((item.saving - 16e3 * in_sequence).abs() < 1.0, "{item:?}");
            }
            if let Some(open) = open {
                assert_eq!(open.apply, Apply::PopulateFiles(4 << 20), "--try decides");
                let expected = "2 mappings of 62 MiB in sum is predicted to save ";
                assert!(open.why.contains(expected) && open.why.contains("error"), "{open:?}");
            }
        }
        // Loads at random cost more if pages are populated.
        findings.files.large_next = 0;
        findings.file_cost = Some(cost(500.0, -900.0));
        assert!(
            (find(&predicted(&findings, &costs()), POPULATE).saving + 16e3 * 900.0).abs() < 1.0
        );
        findings.files.large_loads = 0;
        assert!(open(&findings).is_none());
    }

    #[test]
    fn fault_on_a_file_costs_more_than_a_populated_page() {
        let plausible = |cost: FileCost| cost.page > 0.5 && cost.fault > 2.0 * cost.page;
        // Other programs disturb single measurements.
        let measured = || FileCost::measure(&Files::default()).expect("a temporary file");
        assert!((0..9).any(|_| plausible(measured())), "{:?}", measured());
    }
}
