//! A cold page cache: the data files that a program maps, and the settings that change the time to
//! read them. Each prediction has the interval of the rounds in which reads were
//! [measured](ColdCost).

use super::cold_cost::{ColdCost, ReadTimes};
use super::interval::Saving;
use super::item::{Apply, Open, size};
use super::mapped_files::FileCost;
use super::supervise::descendants;
use crate::error::Error;
use crate::number::{fixed, grouped, plural};
use crate::rates::median;
use faultless::PAGE_SIZE;
use faultless_trace::files::{Files, READS, Reads};
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The smallest file that is dropped from the page cache, and the smallest mapping that is
/// populated, in bytes.
const LEAST: u64 = 1 << 20;
/// The pages of large mappings from which reads are predicted: 8 MiB.
const FEW: u64 = 2048;
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

/// A setting for a cold page cache.
#[derive(Clone, Debug)]
pub struct ColdSetting {
    /// The setting, with the prediction in words.
    pub open: Open,
    /// The predicted saving of elapsed time, in nanoseconds; negative for a cost. The interval is
    /// that of the rounds of the measurement.
    pub saving: Saving,
    /// Bytes of the page cache that the program does not use; negative for fewer bytes.
    pub more: i64,
}

/// The predictions for a program whose files are not in the page cache.
#[derive(Clone, Debug)]
pub struct ColdStart {
    /// The elapsed time of all reads with the present settings, and of the faults outside
    /// sequences, in nanoseconds.
    pub now: f64,
    /// The reads.
    pub reads: Reads,
    /// The settings, the largest saving first.
    pub settings: Vec<ColdSetting>,
}

/// Returns the predictions for the files of a recording; `None` without large mappings of files.
/// `fault` is the cost of a fault with a warm page cache, if it was measured.
pub fn start(files: &Files, cost: &ColdCost, fault: Option<FileCost>) -> Option<ColdStart> {
    if !is_worth(files) {
        return None;
    }
    let reads = files.cold[cost.now];
    // The time of a page in sequence includes its faults.
    let in_sequence = (reads.next << READS[cost.now]) as f64 / reads.pages.max(1) as f64;
    let outside = files.loads[0] as f64 * (1.0 - in_sequence).max(0.0);
    let faults = outside * fault.map_or(0.0, |fault| fault.fault);
    let with_faults =
        |times: Vec<f64>| -> Vec<f64> { times.into_iter().map(|time| time + faults).collect() };
    let times = with_faults(cost.times(&reads, cost.now));
    let now = median(&times)?;
    let saving = |with: &[f64]| Saving::of(&times, with);
    let mut settings = Vec::new();
    // A recording with fault-around lacks the uses that smaller reads would miss.
    let others = (0..READS.len()).filter(|at| *at > cost.now || *at < cost.now && !files.around);
    let best = others
        .filter_map(|at| Some((at, saving(&with_faults(cost.times(&files.cold[at], at)))?)))
        .max_by(|one, other| one.1.middle.total_cmp(&other.1.middle));
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
    let populated = |times: &ReadTimes| times.populated_time(files);
    let populated: Vec<f64> = cost.rounds.iter().map(populated).collect();
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
        saving: saving(&populated)?,
        more: more(files.data_pages, reads.pages),
    });
    settings.sort_by(|one, other| other.saving.middle.total_cmp(&one.saving.middle));
    Some(ColdStart { now, reads, settings })
}

impl ColdSetting {
    /// Returns whether the predicted saving is beyond the noise of the measured reads, or the noise
    /// is unknown, because a slow disk has too few rounds.
    pub fn is_sure(&self) -> bool {
        self.saving.interval.is_none() || self.saving.is_sure()
    }
}

impl ColdStart {
    /// Returns whether `setting` saves enough for a line.
    pub fn is_worth(&self, setting: &ColdSetting) -> bool {
        setting.saving.middle >= WORTH * self.now
    }

    /// Returns the reads and their time, in words.
    pub fn describe(&self) -> String {
        let Reads { around, next, single, pages, .. } = self.reads;
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
    use super::super::cold_cost::tests::times;
    use super::super::cold_cost::{Sequence, setting};
    use super::*;
    use memmap2::Mmap;
    use std::os::unix::fs::MetadataExt;

    /// Returns the cost of this disk, in equal rounds, with reads of 128 KiB.
    fn cost() -> ColdCost {
        let setting = Some("/sys/block/x/queue/read_ahead_kb".into());
        ColdCost { rounds: vec![times(); 7], now: 0, setting }
    }

    fn predicted(files: &Files, cost: &ColdCost) -> ColdStart {
        start(files, cost, None).expect("a large mapping")
    }

    fn files(cold: [Reads; READS.len()], data_used: u64) -> Files {
        Files { data_pages: 16_384, data_used, cold, ..Files::default() }
    }

    #[test]
    fn sparse_loads_save_by_smaller_reads_and_lose_by_populating() {
        let reads =
            READS.map(|order| Reads { around: 100, pages: 100 << order, ..Reads::default() });
        let files = files(reads, 100);
        let round = ReadTimes { around: times().read[2], ..times() };
        let large = ColdCost { now: 2, rounds: vec![round; 7], ..cost() };
        let got = predicted(&files, &large);
        assert!((got.now - 100.0 * (1e5 + 512e4)).abs() < 1.0, "{got:?}");
        let [first, second] = &got.settings[..] else { panic!("{got:?}") };
        assert_eq!(first.open.name, "read-ahead 128 KiB");
        assert!((first.saving.middle - 100.0 * 480e4).abs() < 1.0 && first.is_sure(), "{first:?}");
        assert_eq!(first.more, -(100 * 480 * 4096));
        // The whole mapping takes 164 ms, and the reads around the pages 522 ms.
        assert!(second.open.why.ends_with("of which the program uses 400 KiB"), "{second:?}");
        assert_eq!((&*second.open.name, second.more), (POPULATE, (16_384 - 51_200) * 4096));
        let small = predicted(&files, &cost());
        assert!(small.settings.iter().all(|setting| !small.is_worth(setting)), "{small:?}");
        // A recording with fault-around does not show the uses that smaller reads would miss.
        let hidden = Files { around: true, ..files };
        let got = predicted(&hidden, &large);
        assert_eq!(got.settings.iter().filter(|it| it.open.name != POPULATE).count(), 1);
        assert!(got.settings.iter().any(|it| it.open.name == "read-ahead 8 MiB"), "{got:?}");
    }

    #[test]
    fn sequence_reads_early_and_saves_latency_by_larger_reads() {
        let pages = 16_384;
        let next = |order| (pages >> order) - 1;
        let sequence = Reads { around: 1, sequences: 1, single: 0, next: 0, pages };
        let reads = READS.map(|order| Reads { next: next(order), ..sequence });
        let got = predicted(&files(reads, pages), &cost());
        // A read in sequence takes 32 pages of 10 µs, instead of 420 µs.
        assert!((got.now - (4.2e5 + 511.0 * 3.2e5)).abs() < 1.0, "{got:?}");
        assert!(got.describe().starts_with("512 reads (511 in sequence) of 64 MiB"), "{got:?}");
        // The first read of 8 MiB takes as long as 64 early reads of 128 KiB.
        assert_eq!(got.settings[0].open.name, "read-ahead 2 MiB");
        assert!(got.settings[0].saving.middle > 0.0);
        let few = Files { data_pages: FEW - 1, ..files(reads, pages) };
        assert!(start(&few, &cost(), None).is_none());
    }

    #[test]
    fn each_populated_mapping_begins_with_small_folios() {
        let reads = READS.map(|_| Reads { around: 100, pages: 3200, ..Reads::default() });
        let populated = Sequence { pages: 4096.0, first: 2e4, later: 1e4 };
        let cost = ColdCost { rounds: vec![ReadTimes { populated, ..times() }; 7], ..cost() };
        let time = |data| {
            let got = predicted(&Files { data, ..files(reads, 16_384) }, &cost);
            let setting = got.settings.iter().find(|it| it.open.name == POPULATE);
            got.now - setting.expect("listed").saving.middle
        };
        assert!((time(1) - (4096.0 * 2e4 + 12_288.0 * 1e4)).abs() < 1.0, "{}", time(1));
        assert!((time(4) - 16_384.0 * 2e4).abs() < 1.0, "{}", time(4));
    }

    #[test]
    fn saving_within_the_noise_of_the_disk_is_not_sure() {
        let pages = 16_384;
        let reads = Reads { around: 1, sequences: 1, single: 0, next: 0, pages };
        let sequence = READS.map(|order| Reads { next: (pages >> order) - 1, ..reads });
        let populated = |each: &[f64]| {
            let round = |page: &f64| ReadTimes { populated: Sequence::steady(*page), ..times() };
            let cost = ColdCost { rounds: each.iter().map(round).collect(), ..cost() };
            let got = predicted(&files(sequence, pages), &cost);
            let at = got.settings.iter().position(|it| it.open.name == POPULATE);
            got.settings[at.expect("listed")].clone()
        };
        // Loads in sequence take 10 µs a page.
        let noisy = populated(&[0.8e4, 1.1e4, 0.9e4, 1.2e4, 1.3e4, 0.7e4, 0.9e4]);
        assert!(noisy.saving.middle > 0.0 && !noisy.is_sure(), "{noisy:?}");
        let better = populated(&[0.8e4, 0.85e4, 0.9e4, 0.8e4, 0.75e4, 0.7e4, 0.9e4]);
        assert!(better.saving.middle > 0.0 && better.is_sure(), "{better:?}");
        let few = populated(&[0.8e4, 1.1e4, 0.9e4]);
        assert!(few.is_sure() && few.saving.interval.is_none(), "{few:?}");
    }

    #[test]
    fn populated_mapping_saves_the_faults_of_random_loads() {
        let [in_sequence, random] = [Saving { middle: 0.0, interval: None }; 2];
        let fault = Some(FileCost { fault: 5000.0, page: 100.0, in_sequence, random });
        let reads = READS.map(|_| Reads { around: 100, pages: 3200, ..Reads::default() });
        let random = Files { loads: [1000, 0, 0, 0], ..files(reads, 16_384) };
        let saving = |files: &Files, fault| {
            let got = start(files, &cost(), fault).expect("a large mapping");
            let at = got.settings.iter().position(|it| it.open.name == POPULATE);
            (got.now, got.settings[at.expect("listed")].saving.middle)
        };
        let (without, with) = (saving(&random, None), saving(&random, fault));
        assert!((with.0 - without.0 - 5e6).abs() < 1.0, "{with:?} and {without:?}");
        assert!((with.1 - without.1 - 5e6).abs() < 1.0, "{with:?} and {without:?}");
        // Loads in sequence are measured with their faults.
        let reads = READS.map(|_| Reads { next: 100, pages: 3200, ..Reads::default() });
        let sequence = Files { cold: reads, ..random };
        assert_eq!(saving(&sequence, None), saving(&sequence, fault));
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
}
