//! A cold page cache: the data files that a program maps, the time to read them, and the settings
//! that change this time.
//!
//! The times are elapsed times, as the processor does other work while a disk reads.

use super::item::{Apply, Open, size};
use super::supervise::descendants;
use crate::error::Error;
use crate::number::{fixed, grouped, plural};
use crate::rates::median;
use faultless::PAGE_SIZE;
use faultless_trace::files::{Files, READS, Reads};
use memmap2::{Advice, Mmap};
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::hint::black_box;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The smallest file whose reads are worth a measurement, in bytes.
const LEAST: u64 = 1 << 20;
/// The pages of large mappings from which reads are predicted: 8 MiB.
const FEW: u64 = 2048;
/// The bytes of a file that are read for a measurement, at most.
const MEASURED: usize = 64 << 20;
/// The windows of each size that are measured, at most.
const WINDOWS: usize = 16;
/// The rounds of the measurement of a whole file.
const ROUNDS: usize = 3;
/// The time between two readings of the mappings of a run, after the first readings.
const PAUSE: Duration = Duration::from_millis(50);
const FIRST: u32 = 10;
/// The share of the time of all reads below which a setting is not worth a line.
const WORTH: f64 = 0.1;
/// The name of the setting that populates mappings.
pub const POPULATE: &str = "populate file mappings";

/// The data files that the processes of a run map: files without mapped code.
#[derive(Clone, Debug, Default)]
pub struct DataFiles {
    files: Vec<PathBuf>,
    readings: u32,
    last: Option<Instant>,
}

impl DataFiles {
    /// Adds the data files that `pid` and its descendants map, unless the last reading was a moment
    /// ago.
    pub fn look(&mut self, pid: i32) {
        if self.readings > FIRST && self.last.is_some_and(|last| last.elapsed() < PAUSE) {
            return;
        }
        self.readings += 1;
        self.last = Some(Instant::now());
        for pid in [pid].into_iter().chain(descendants(pid)) {
            let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
            for path in data_files(&maps) {
                // The file of a process in a container is below its own root.
                let inside = PathBuf::from(format!("/proc/{pid}/root{path}"));
                let path = if Path::new(path).exists() { path.into() } else { inside };
                let large = fs::metadata(&path).is_ok_and(|it| it.is_file() && it.len() >= LEAST);
                if large && !self.files.contains(&path) {
                    self.files.push(path);
                }
            }
        }
    }

    /// Adds the large files in the arguments of `command` if no file was found: a run of few
    /// milliseconds can end before its mappings are read.
    pub fn add_arguments(&mut self, command: &[OsString]) {
        if !self.files.is_empty() {
            return;
        }
        let large =
            |path: &PathBuf| fs::metadata(path).is_ok_and(|it| it.is_file() && it.len() >= LEAST);
        self.files = command.iter().skip(1).map(PathBuf::from).filter(large).collect();
    }

    /// Returns the number of files.
    pub fn count(&self) -> u64 {
        self.files.len() as u64
    }

    /// Returns the bytes of the files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().filter_map(|file| fs::metadata(file).ok()).map(|it| it.len()).sum()
    }

    /// Returns the largest file.
    pub fn largest(&self) -> Option<&Path> {
        let bytes = |file: &&PathBuf| fs::metadata(file).map_or(0, |it| it.len());
        self.files.iter().max_by_key(bytes).map(PathBuf::as_path)
    }

    /// Writes changed pages of the files to the disk, and drops the files from the page cache.
    /// Pages that a process maps or locks stay. Skips a file that was removed.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub fn drop_pages(&self) -> Result<(), Error> {
        for path in self.files.iter().filter(|path| path.exists()) {
            let drop = || drop_file(&File::open(path)?);
            drop().map_err(|error| Error::host(path.display(), error))?;
        }
        Ok(())
    }
}

/// Returns the paths of files in the text of `/proc/PID/maps` that have no mapped code.
fn data_files(maps: &str) -> Vec<&str> {
    let mut all: Vec<(&str, bool)> = Vec::new();
    for line in maps.lines() {
        // Addresses, permissions, offset, device, inode, and the rest is the path.
        let mut words = line.splitn(6, char::is_whitespace);
        let code = words.nth(1).is_some_and(|permissions| permissions.contains('x'));
        let path = words.nth(3).map(str::trim_start).filter(|path| path.starts_with('/'));
        let Some(path) = path else { continue };
        match all.iter_mut().find(|(known, _)| *known == path) {
            Some((_, has_code)) => *has_code |= code,
            None => all.push((path, code)),
        }
    }
    all.into_iter().filter(|(_, code)| !code).map(|(path, _)| path).collect()
}

/// Writes the changed pages of `file`, and drops its pages from the page cache.
///
/// # Errors
/// The pages cannot be written.
pub(super) fn drop_file(file: &File) -> std::io::Result<()> {
    // A file on a read-only file system cannot have changed pages.
    if let Err(error) = file.sync_data()
        && !matches!(error.raw_os_error(), Some(libc::EROFS | libc::EINVAL))
    {
        return Err(error);
    }
    // SAFETY: the call takes a descriptor that is open, and no memory.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) } {
        0 => Ok(()),
        code => Err(std::io::Error::from_raw_os_error(code)),
    }
}

/// The elapsed time of reads from a cold page cache, in nanoseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct ColdCost {
    /// A read of each size of [`READS`], for which the program waits.
    pub read: [f64; READS.len()],
    /// A single page.
    pub single: f64,
    /// A page of a file that is loaded from in sequence.
    pub in_sequence: f64,
    /// A page of a mapping that is populated.
    pub populated: f64,
    /// The size of a read with the present setting, an index of [`READS`].
    pub now: usize,
    /// The setting, if known.
    pub setting: Option<PathBuf>,
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
        let mut block = vec![0; LEAST as usize];
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
        let largest = (PAGE_SIZE << READS[READS.len() - 1]) as usize;
        if len < largest {
            return Ok(None);
        }
        let map = || {
            drop_file(file)?;
            // SAFETY: the bytes are only read, and their values are not used. A program that
            // shortens the file ends this measurement by a signal, as for every reader.
            unsafe { memmap2::MmapOptions::new().len(len).map(file) }
        };
        let load = |map: &Mmap, at: usize| black_box(map[at]);
        let page = PAGE_SIZE as usize;
        let mut random = fastrand::Rng::with_seed(1);
        let mut read = [0.0; READS.len()];
        for (time, order) in read.iter_mut().zip(READS) {
            let bytes = page << order;
            let mut windows: Vec<usize> = (0..len / bytes).collect();
            random.shuffle(&mut windows);
            let map = map()?;
            map.advise(Advice::Random)?;
            let mut times = Vec::new();
            for window in windows.into_iter().take(WINDOWS) {
                let begin = Instant::now();
                map.advise_range(Advice::WillNeed, window * bytes, bytes)?;
                load(&map, (window + 1) * bytes - page);
                times.push(begin.elapsed().as_secs_f64() * 1e9);
            }
            *time = median(&times).unwrap_or(0.0);
        }
        let singles = map()?;
        singles.advise(Advice::Random)?;
        let mut times = Vec::new();
        for _ in 0..WINDOWS {
            let at = random.usize(..len / page) * page;
            let begin = Instant::now();
            load(&singles, at);
            times.push(begin.elapsed().as_secs_f64() * 1e9);
        }
        // A mapped page stays in the page cache.
        drop(singles);
        let single = median(&times).unwrap_or(0.0);
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            for (populate, times) in [false, true].into_iter().zip(&mut times) {
                let map = map()?;
                let begin = Instant::now();
                // An old kernel refuses the advice, and the loads below are faults.
                if populate {
                    _ = map.advise(Advice::PopulateRead);
                }
                for at in (0..len).step_by(page) {
                    load(&map, at);
                }
                times.push(begin.elapsed().as_secs_f64() * 1e9 / (len / page) as f64);
            }
        }
        let [in_sequence, populated] = times.map(|times| median(&times).unwrap_or(0.0));
        // A file system in memory keeps its pages.
        let cold = read[0] > 2.0 * in_memory(&map()?, len);
        let setting = setting(metadata.dev());
        let now = setting.as_deref().and_then(order_now).unwrap_or(0);
        Ok(cold.then_some(Self { read, single, in_sequence, populated, now, setting }))
    }

    /// Returns the nanoseconds of `reads` with the size `at` of [`READS`].
    fn time(&self, reads: &Reads, at: usize) -> f64 {
        // The kernel starts the next read of a sequence early.
        let pages = f64::from(1u32 << READS[self.now]);
        let early = (self.in_sequence * pages / self.read[self.now].max(1.0)).min(1.0);
        (reads.around as f64 + reads.next as f64 * early) * self.read[at]
            + reads.single as f64 * self.single
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
fn setting(dev: u64) -> Option<PathBuf> {
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

/// A setting for a cold page cache.
#[derive(Clone, Debug)]
pub struct ColdSetting {
    /// The setting, with the prediction in words.
    pub open: Open,
    /// The predicted saving of elapsed time, in nanoseconds; negative for a cost.
    pub saving: f64,
    /// Bytes of the page cache that the program does not use; negative for fewer bytes.
    pub more: i64,
}

/// The predictions for a program whose files are not in the page cache.
#[derive(Clone, Debug)]
pub struct ColdStart {
    /// The elapsed time of all reads with the present settings, in nanoseconds.
    pub now: f64,
    /// The reads.
    pub reads: Reads,
    /// The settings, the largest saving first.
    pub settings: Vec<ColdSetting>,
}

/// Returns the predictions for the files of a recording; `None` without large mappings of files.
pub fn start(files: &Files, cost: &ColdCost) -> Option<ColdStart> {
    if !is_worth(files) {
        return None;
    }
    let reads = files.cold[cost.now];
    let now = cost.time(&reads, cost.now);
    let mut settings = Vec::new();
    // A recording with fault-around lacks the uses that smaller reads would miss.
    let others = (0..READS.len()).filter(|at| *at > cost.now || *at < cost.now && !files.around);
    let best = others
        .map(|at| (at, now - cost.time(&files.cold[at], at)))
        .max_by(|one, other| one.1.total_cmp(&other.1));
    if let (Some((at, saving)), Some(file)) = (best, &cost.setting) {
        let with = files.cold[at];
        let kib = (PAGE_SIZE << READS[at]) >> 10;
        let count = with.around + with.next + with.single;
        settings.push(ColdSetting {
            open: Open {
                name: format!("read-ahead {}", size(kib << 10)),
                action: format!("echo {kib} > {}", file.display()),
                why: format!(
                    "{} of {} in sum",
                    plural(count, "read"),
                    size(with.pages * PAGE_SIZE)
                ),
                apply: sysfs(file, kib),
            },
            saving,
            more: more(with.pages, reads.pages),
        });
    }
    settings.push(ColdSetting {
        open: Open {
            name: POPULATE.into(),
            action: "MAP_POPULATE or MADV_POPULATE_READ in the program, or `faultless run --apply \
                     populate-files`"
                .into(),
            why: if files.around {
                // Fault-around hides the use of pages.
                format!("reads all {} of the mappings", size(files.data_pages * PAGE_SIZE))
            } else {
                format!(
                    "reads all {} of the mappings, of which the program uses {}",
                    size(files.data_pages * PAGE_SIZE),
                    size(files.data_used * PAGE_SIZE)
                )
            },
            apply: Apply::PopulateFiles(LEAST),
        },
        saving: now - files.data_pages as f64 * cost.populated,
        more: more(files.data_pages, reads.pages),
    });
    settings.sort_by(|one, other| other.saving.total_cmp(&one.saving));
    Some(ColdStart { now, reads, settings })
}

impl ColdStart {
    /// Returns whether `setting` saves enough for a line.
    pub fn is_worth(&self, setting: &ColdSetting) -> bool {
        setting.saving >= WORTH * self.now
    }

    /// Returns the reads and their time, in words.
    pub fn describe(&self) -> String {
        let Reads { around, next, single, pages } = self.reads;
        format!(
            "{} ({} in sequence) of {} in sum, {} s of elapsed time",
            plural(around + next + single, "read"),
            grouped(next),
            size(pages * PAGE_SIZE),
            fixed(self.now / 1e9, 3)
        )
    }
}

/// Returns whether a recording has enough pages of files for a prediction.
pub fn is_worth(files: &Files) -> bool {
    files.data_pages >= FEW
}

/// Returns the bytes of `pages` beyond those of `before`.
fn more(pages: u64, before: u64) -> i64 {
    (pages.cast_signed() - before.cast_signed()) * PAGE_SIZE.cast_signed()
}

/// Returns the way to set the size of reads, if this host permits the change.
fn sysfs(file: &Path, kib: u64) -> Apply {
    match OpenOptions::new().write(true).open(file) {
        Ok(_) => Apply::Sysfs(file.to_owned(), kib.to_string()),
        Err(_) => Apply::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the cost of a disk with 100 µs and 10 µs for each page, and reads of 128 KiB.
    fn cost() -> ColdCost {
        ColdCost {
            read: READS.map(|order| 1e5 + 1e4 * f64::from(1u32 << order)),
            single: 1.1e5,
            in_sequence: 1e4,
            populated: 1e4,
            now: 0,
            setting: Some("/sys/block/x/queue/read_ahead_kb".into()),
        }
    }

    fn files(cold: [Reads; READS.len()], data_used: u64) -> Files {
        Files { data_pages: 16_384, data_used, cold, ..Files::default() }
    }

    #[test]
    fn sparse_loads_save_by_smaller_reads_and_lose_by_populating() {
        let reads =
            READS.map(|order| Reads { around: 100, next: 0, single: 0, pages: 100 << order });
        let files = files(reads, 100);
        let large = ColdCost { now: 2, ..cost() };
        let got = start(&files, &large).expect("a large mapping");
        assert!((got.now - 100.0 * (1e5 + 512e4)).abs() < 1.0, "{got:?}");
        let [first, second] = &got.settings[..] else { panic!("{got:?}") };
        assert_eq!(first.open.name, "read-ahead 128 KiB");
        assert!((first.saving - 100.0 * 480e4).abs() < 1.0, "{first:?}");
        assert_eq!(first.more, -(100 * 480 * 4096));
        // The whole mapping takes 164 ms, and the reads around the pages 522 ms.
        assert!(second.open.why.ends_with("of which the program uses 400 KiB"), "{second:?}");
        assert_eq!((&*second.open.name, second.more), (POPULATE, (16_384 - 51_200) * 4096));
        let small = start(&files, &cost()).expect("a large mapping");
        assert!(small.settings.iter().all(|setting| !small.is_worth(setting)), "{small:?}");
        // A recording with fault-around does not show the uses that smaller reads would miss.
        let hidden = Files { around: true, ..files };
        let got = start(&hidden, &large).expect("a large mapping");
        assert_eq!(got.settings.iter().filter(|it| it.open.name != POPULATE).count(), 1);
        assert!(got.settings.iter().any(|it| it.open.name == "read-ahead 8 MiB"), "{got:?}");
    }

    #[test]
    fn sequence_reads_early_and_saves_latency_by_larger_reads() {
        let pages = 16_384;
        let reads = READS.map(|order| Reads { around: 1, next: pages >> order, single: 0, pages });
        let got = start(&files(reads, pages), &cost()).expect("a large mapping");
        // A read in sequence takes 32 pages of 10 µs, instead of 420 µs.
        assert!((got.now - (4.2e5 + 512.0 * 3.2e5)).abs() < 1.0, "{got:?}");
        assert!(got.describe().starts_with("513 reads (512 in sequence) of 64 MiB"), "{got:?}");
        // The first read of 8 MiB takes as long as 64 early reads of 128 KiB.
        assert_eq!(got.settings[0].open.name, "read-ahead 2 MiB");
        assert!(got.settings[0].saving > 0.0);
        let few = Files { data_pages: FEW - 1, ..files(reads, pages) };
        assert!(start(&few, &cost()).is_none());
    }

    #[test]
    fn data_files_have_no_mapped_code() {
        let maps = "\
7f00-7f01 r--p 00000000 fe:00 12   /usr/lib/libc.so.6
7f01-7f02 r-xp 00001000 fe:00 12   /usr/lib/libc.so.6
7f10-7f20 r--s 00000000 fe:00 13   /data/a model.bin
7f30-7f40 rw-p 00000000 00:00 0
7f50-7f60 rw-p 00000000 00:00 0    [heap]
";
        assert_eq!(data_files(maps), ["/data/a model.bin"]);
    }

    /// Returns the number of pages of `map` in the page cache.
    fn cached(map: &Mmap) -> usize {
        let mut pages = vec![0_u8; map.len() / PAGE_SIZE as usize];
        // SAFETY: the range is a mapping, and the kernel writes one byte for each of its pages.
        let code =
            unsafe { libc::mincore(map.as_ptr().cast_mut().cast(), map.len(), pages.as_mut_ptr()) };
        assert_eq!(code, 0);
        pages.iter().filter(|page| **page & 1 == 1).count()
    }

    #[test]
    fn mapped_files_are_found_and_leave_the_page_cache() {
        // The usual directory of temporary files may be in memory.
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("ours");
        let path = dir.path().join("data");
        fs::write(&path, vec![7; 2 << 20]).expect("written");
        let file = File::open(&path).expect("there");
        // SAFETY: no other process changes the file.
        let map = unsafe { Mmap::map(&file) }.expect("mapped");
        let mut data = DataFiles::default();
        data.look(std::process::id().cast_signed());
        assert!(data.files.contains(&path), "{data:?}");
        let program = std::env::current_exe().expect("known");
        assert!(!data.files.contains(&program), "a file with code");
        assert!(data.count() >= 1 && data.bytes() >= 2 << 20);
        drop(map);
        let command = ["program".into(), "-v".into(), path.clone().into_os_string()];
        let before = data.count();
        data.add_arguments(&command);
        assert_eq!(data.count(), before, "mapped files are known");
        let mut named = DataFiles::default();
        named.add_arguments(&command);
        assert_eq!(named.files, [&*path]);
        let only = DataFiles { files: vec![path.clone(), dir.path().join("removed")], ..data };
        assert_eq!((only.largest(), only.bytes()), (Some(&*path), 2 << 20));
        // SAFETY: see above.
        let map = || unsafe { Mmap::map(&file) }.expect("mapped");
        assert_eq!(cached(&map()), 512);
        only.drop_pages().expect("readable");
        // A file system in memory keeps the pages.
        let disk = setting(file.metadata().expect("open").dev()).is_some();
        assert!(!disk || cached(&map()) == 0);
    }

    #[test]
    fn larger_reads_from_a_disk_take_longer() {
        // Without a disk there is no measurement.
        let Some(cost) = ColdCost::measure().expect("a temporary file") else { return };
        assert!(cost.in_sequence > 0.0 && cost.populated > 0.0 && cost.single > 0.0, "{cost:?}");
        assert!(cost.read[3] > cost.read[0] && cost.read[0] > 0.0, "{cost:?}");
    }
}
