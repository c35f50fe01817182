//! The elapsed time of reads from a cold page cache on this host, measured in rounds. The processor
//! does other work while a disk reads, so the times are elapsed times.

use super::cold::drop_file;
use crate::error::Error;
use crate::rates::median;
use faultless::PAGE_SIZE;
use faultless_trace::files::{Files, READS, Reads};
use memmap2::{Advice, Mmap};
use std::fs::{self, File};
use std::hint::black_box;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The bytes of a file that are read for a measurement, at most.
const MEASURED: usize = 64 << 20;
/// The bytes of a write of a new file.
const BLOCK: usize = 1 << 20;
/// The windows of each size that are measured in a round, at most.
const WINDOWS: usize = 4;
/// The reads around a page that are measured in a round, at most. After 100 such reads the kernel
/// reads single pages.
const AROUNDS: usize = 64;
/// The single pages that are measured in a round.
const SINGLES: usize = 8;
/// The rounds of the measurement, and the rounds of a slow disk.
const ROUNDS: usize = 7;
const FEW_ROUNDS: usize = 3;
/// The time of a measurement after which a disk is slow.
const SLOW: Duration = Duration::from_secs(15);

/// The elapsed time of reads from a cold page cache.
#[derive(Clone, Debug, PartialEq)]
pub struct ColdCost {
    /// The rounds of the measurement.
    pub rounds: Vec<ReadTimes>,
    /// The size of a read with the present setting, an index of [`READS`].
    pub now: usize,
    /// The setting, if known.
    pub setting: Option<PathBuf>,
}

/// The elapsed time of reads in one round, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReadTimes {
    /// A read of each size of [`READS`], which a call requests, up to its last page.
    pub read: [f64; READS.len()],
    /// A read around the page of a fault, with the present setting. The next fault follows at once,
    /// while the disk reads the rest.
    pub around: f64,
    /// A single page.
    pub single: f64,
    /// A file that is loaded from in sequence.
    pub in_sequence: Sequence,
    /// A mapping that is populated.
    pub populated: Sequence,
}

/// The elapsed time of the pages of a file in sequence, in nanoseconds. The first pages take
/// longer: the kernel begins with folios of one page, and each read has larger folios than the read
/// before.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sequence {
    /// The number of the first pages.
    pub pages: f64,
    /// Each of the first pages.
    pub first: f64,
    /// Each of the later pages.
    pub later: f64,
}

impl Sequence {
    /// Returns a sequence in which all pages take the same time.
    pub const fn steady(page: f64) -> Self {
        Self { pages: 0.0, first: page, later: page }
    }

    /// Returns the nanoseconds of a sequence of `pages`.
    fn time(&self, pages: f64) -> f64 {
        let first = pages.min(self.pages);
        first * self.first + (pages - first) * self.later
    }
}

impl ColdCost {
    /// Measures a new file in the directory of temporary files. Returns `None` if the directory is
    /// not on a disk.
    ///
    /// # Errors
    /// The file cannot be written or read.
    pub fn measure() -> Result<Option<Self>, Error> {
        let failed = |error| Error::host("a file for the measurement of reads", error);
        let mut file = tempfile::tempfile().map_err(failed)?;
        // File systems may compress equal bytes.
        let mut random = fastrand::Rng::with_seed(1);
        let mut block = vec![0; BLOCK];
        for _ in 0..MEASURED / block.len() {
            random.fill(&mut block);
            file.write_all(&block).map_err(failed)?;
        }
        Self::of(&file).map_err(failed)
    }

    /// Measures the file `path`, and drops the file from the page cache. Returns `None` if the file
    /// is not on a disk, or too small.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn measure_file(path: &Path) -> Result<Option<Self>, Error> {
        let measured = || Self::of(&File::open(path)?);
        measured().map_err(|error| Error::host(path.display(), error))
    }

    fn of(file: &File) -> std::io::Result<Option<Self>> {
        let metadata = file.metadata()?;
        let len = usize::try_from(metadata.len()).unwrap_or(usize::MAX).min(MEASURED);
        if len < (PAGE_SIZE << READS[READS.len() - 1]) as usize {
            return Ok(None);
        }
        let setting = setting(metadata.dev());
        let now = setting.as_deref().and_then(order_now).unwrap_or(0);
        let mut disk = Disk { file, len, now, random: fastrand::Rng::with_seed(1) };
        let (begin, mut rounds) = (Instant::now(), Vec::new());
        while rounds.len() < ROUNDS && (rounds.len() < FEW_ROUNDS || begin.elapsed() < SLOW) {
            rounds.push(disk.round(rounds.len() % 2 == 1)?);
        }
        // A file system in memory keeps its pages.
        let smallest: Vec<f64> = rounds.iter().map(|times| times.read[0]).collect();
        let cold = median(&smallest).unwrap_or(0.0) > 2.0 * in_memory(&disk.map()?, len);
        Ok(cold.then_some(Self { rounds, now, setting }))
    }

    /// Returns the nanoseconds of `reads` with the size `at` of [`READS`] in each round.
    pub(super) fn times(&self, reads: &Reads, at: usize) -> Vec<f64> {
        self.rounds.iter().map(|times| times.of(reads, at, self.now)).collect()
    }
}

impl ReadTimes {
    /// Returns the nanoseconds of `reads` with the size `at` of [`READS`]. `now` is the size of the
    /// loads in sequence.
    fn of(&self, reads: &Reads, at: usize, now: usize) -> f64 {
        let pages = |at: usize| f64::from(1u32 << READS[at]);
        let requested = self.read[now].max(1.0);
        // The kernel starts the next read of a sequence early.
        let early = (self.in_sequence.later * pages(now) / requested).min(1.0);
        // The first reads of a sequence, beyond a read around its first page and early reads.
        let length = reads.next as f64 / reads.sequences.max(1) as f64 * pages(now);
        let first = length.min(self.in_sequence.pages);
        let begun = first * (self.in_sequence.first - self.in_sequence.later);
        let around = self.around - pages(now) * self.in_sequence.later;
        let begin = (begun - around).max(0.0) * pages(at) / pages(now);
        // A read brings the pages of its window that are not in the page cache yet.
        let windows = (reads.around + reads.next).max(1) as f64;
        let missing = reads.pages.saturating_sub(reads.single) as f64 / windows;
        let page = (self.read[at] - self.single).max(0.0) / (pages(at) - 1.0);
        let read = self.read[at] - (pages(at) - missing).max(0.0) * page;
        let around = reads.around as f64 * self.around / requested;
        (around + reads.next as f64 * early) * read
            + reads.single as f64 * self.single
            + reads.sequences as f64 * begin
    }

    /// Returns the nanoseconds of the populated mappings of data.
    pub(super) fn populated_time(&self, files: &Files) -> f64 {
        let mappings = files.data.max(1) as f64;
        mappings * self.populated.time(files.data_pages as f64 / mappings)
    }
}

/// A file whose reads are measured.
struct Disk<'a> {
    file: &'a File,
    /// The bytes of the file that are read.
    len: usize,
    /// The size of a read with the present setting, an index of [`READS`].
    now: usize,
    random: fastrand::Rng,
}

impl Disk<'_> {
    /// Drops the file from the page cache, and maps it.
    fn map(&self) -> std::io::Result<Mmap> {
        drop_file(self.file)?;
        // SAFETY: the bytes are only read, and their values are not used. A program that shortens
        // the file ends this measurement by a signal, as for every reader.
        unsafe { memmap2::MmapOptions::new().len(self.len).map(self.file) }
    }

    /// Measures all times once. With `populated_first`, measures the populated mapping before the
    /// loads in sequence.
    fn round(&mut self, populated_first: bool) -> std::io::Result<ReadTimes> {
        let mut read = [0.0; READS.len()];
        for (time, order) in read.iter_mut().zip(READS) {
            *time = self.windows(order)?;
        }
        let around = self.around()?;
        let single = self.single()?;
        let mut whole = [Sequence::steady(0.0); 2];
        for populated in [populated_first, !populated_first] {
            whole[usize::from(populated)] = self.whole(populated)?;
        }
        let [in_sequence, populated] = whole;
        Ok(ReadTimes { read, around, single, in_sequence, populated })
    }

    /// Returns the nanoseconds of a read of `1 << order` pages.
    fn windows(&mut self, order: u8) -> std::io::Result<f64> {
        let page = PAGE_SIZE as usize;
        let bytes = page << order;
        let mut windows: Vec<usize> = (0..self.len / bytes).collect();
        self.random.shuffle(&mut windows);
        let map = self.map()?;
        map.advise(Advice::Random)?;
        let mut times = Vec::new();
        for window in windows.into_iter().take(WINDOWS) {
            let begin = Instant::now();
            map.advise_range(Advice::WillNeed, window * bytes, bytes)?;
            black_box(map[(window + 1) * bytes - page]);
            times.push(begin.elapsed().as_secs_f64() * 1e9);
        }
        Ok(median(&times).unwrap_or(0.0))
    }

    /// Returns the nanoseconds of a read around the page of a fault.
    fn around(&mut self) -> std::io::Result<f64> {
        let page = PAGE_SIZE as usize;
        let bytes = page << READS[self.now];
        let mut windows: Vec<usize> = (0..self.len / bytes).collect();
        self.random.shuffle(&mut windows);
        windows.truncate(AROUNDS);
        let Some(last) = windows.last() else { return Ok(0.0) };
        drop_file(self.file)?;
        // The kernel counts misses for each open file.
        let file = File::open(format!("/proc/self/fd/{}", self.file.as_raw_fd()))?;
        // SAFETY: see `map`.
        let map = unsafe { memmap2::MmapOptions::new().len(self.len).map(&file) }?;
        let begin = Instant::now();
        // The kernel reads as many pages before the page as behind it.
        windows.iter().for_each(|window| _ = black_box(map[window * bytes + bytes / 2]));
        black_box(map[(last + 1) * bytes - page]);
        Ok(begin.elapsed().as_secs_f64() * 1e9 / windows.len() as f64)
    }

    /// Returns the nanoseconds of a read of one page.
    fn single(&mut self) -> std::io::Result<f64> {
        let page = PAGE_SIZE as usize;
        let map = self.map()?;
        map.advise(Advice::Random)?;
        let mut times = Vec::new();
        for _ in 0..SINGLES {
            let at = self.random.usize(..self.len / page) * page;
            let begin = Instant::now();
            black_box(map[at]);
            times.push(begin.elapsed().as_secs_f64() * 1e9);
        }
        Ok(median(&times).unwrap_or(0.0))
    }

    /// Returns the time of all pages if they are loaded from in sequence, with or without
    /// `MADV_POPULATE_READ` before. The first half has the smaller folios.
    fn whole(&self, populated: bool) -> std::io::Result<Sequence> {
        let page = PAGE_SIZE as usize;
        let half = self.len / 2 / page * page;
        let map = self.map()?;
        let each = |from: usize, bytes: usize| {
            let begin = Instant::now();
            // An old kernel refuses the advice, and the loads below are faults.
            if populated {
                _ = map.advise_range(Advice::PopulateRead, from, bytes);
            }
            (from..from + bytes).step_by(page).for_each(|at| _ = black_box(map[at]));
            begin.elapsed().as_secs_f64() * 1e9 / (bytes / page) as f64
        };
        let (first, later) = (each(0, half), each(half, self.len - half));
        Ok(Sequence { pages: (half / page) as f64, first, later })
    }
}

/// Returns the nanoseconds of a window of the smallest size in a mapping of `len` bytes after the
/// pages were read.
fn in_memory(map: &Mmap, len: usize) -> f64 {
    let bytes = (PAGE_SIZE as usize) << READS[0];
    let mut times = Vec::new();
    _ = map.advise(Advice::PopulateRead);
    for window in (0..len / bytes).take(WINDOWS) {
        let begin = Instant::now();
        _ = map.advise_range(Advice::WillNeed, window * bytes, bytes);
        black_box(map[(window + 1) * bytes - PAGE_SIZE as usize]);
        times.push(begin.elapsed().as_secs_f64() * 1e9);
    }
    median(&times).unwrap_or(0.0)
}

/// Returns the file with the size of reads of the device `dev`, if there is one.
pub(super) fn setting(dev: u64) -> Option<PathBuf> {
    let (major, minor) = (libc::major(dev), libc::minor(dev));
    let of_file_system = PathBuf::from(format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb"));
    let device = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    // A partition has the setting of its disk.
    let mut all =
        [of_file_system, device.join("queue/read_ahead_kb"), device.join("../queue/read_ahead_kb")]
            .into_iter();
    all.find_map(|file| fs::canonicalize(file).ok())
}

/// Returns the size in `setting`, as the index of the nearest size of [`READS`].
fn order_now(setting: &Path) -> Option<usize> {
    let kib: u64 = fs::read_to_string(setting).ok()?.trim().parse().ok()?;
    let order = (kib << 10).div_ceil(PAGE_SIZE).max(1).ilog2();
    (0..READS.len()).min_by_key(|at| u32::from(READS[*at]).abs_diff(order))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// The times of a disk with 100 µs and 10 µs for each page.
    pub fn times() -> ReadTimes {
        ReadTimes {
            read: READS.map(|order| 1e5 + 1e4 * f64::from(1u32 << order)),
            around: 1e5 + 32e4,
            single: 1.1e5,
            in_sequence: Sequence::steady(1e4),
            populated: Sequence::steady(1e4),
        }
    }

    #[test]
    fn read_takes_the_time_of_its_missing_pages() {
        let around =
            |pages: u64| Reads { around: 100, single: 7, pages: pages + 7, ..Reads::default() };
        let of = |pages| times().of(&around(pages), 3, 0) - 7.0 * 1.1e5;
        // A window has 2,048 pages, of which half are in the page cache.
        assert!((of(204_800) - 100.0 * (1e5 + 2048e4)).abs() < 1.0, "{}", of(204_800));
        assert!((of(102_400) - 100.0 * (1e5 + 1024e4)).abs() < 1.0, "{}", of(102_400));
        // Reads that end at the end of a mapping, without a page each.
        assert!(of(0) > 0.0);
        assert_eq!(times().of(&Reads::default(), 0, 0), 0.0);
    }

    #[test]
    fn read_around_a_page_takes_the_time_of_faults() {
        let reads = Reads { around: 100, pages: 3200, ..Reads::default() };
        // The disk reads the rest of a window during the next fault.
        let half = ReadTimes { around: 2.1e5, ..times() };
        assert!((half.of(&reads, 0, 0) - 100.0 * 2.1e5).abs() < 1.0);
        // Reads of 512 KiB have the same share.
        let larger = Reads { pages: 12_800, ..reads };
        assert!((half.of(&larger, 1, 0) - 50.0 * times().read[1]).abs() < 1.0);
    }

    #[test]
    fn first_pages_of_a_sequence_take_longer() {
        let sequence = Sequence { pages: 8192.0, first: 2e4, later: 1e4 };
        assert_eq!(sequence.time(4096.0), 4096.0 * 2e4);
        assert_eq!(sequence.time(65_536.0), 8192.0 * 2e4 + 57_344.0 * 1e4);
        let slow = ReadTimes { in_sequence: sequence, ..times() };
        let reads = Reads { around: 1, next: 2047, sequences: 1, single: 0, pages: 65_536 };
        let time = slow.of(&reads, 0, 0);
        assert!((time - sequence.time(65_536.0)).abs() < 1.0, "{time}");
        // A page at random begins no sequence.
        let alone = Reads { sequences: 0, ..reads };
        assert!(slow.of(&alone, 0, 0) < time - 8000.0 * 1e4);
    }

    #[test]
    fn larger_reads_from_a_disk_take_longer() {
        // Without a disk there is no measurement.
        let Some(cost) = ColdCost::measure().expect("a temporary file") else { return };
        assert!(cost.rounds.len() >= FEW_ROUNDS);
        let times = &cost.rounds[0];
        for sequence in [times.in_sequence, times.populated] {
            assert!(sequence.first > 0.0 && sequence.later > 0.0, "{cost:?}");
        }
        assert!(times.single > 0.0 && times.around > 0.0, "{cost:?}");
        let middle = |at: usize| {
            let times: Vec<f64> = cost.rounds.iter().map(|times| times.read[at]).collect();
            median(&times).unwrap_or(0.0)
        };
        assert!(middle(3) > middle(0) && middle(0) > 0.0, "{cost:?}");
    }
}
