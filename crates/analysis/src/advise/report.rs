//! Reports of the preloaded library: the operations of each process of a program.

pub use layout::{Count, Reason, error};

use super::preload::REPORT;
use crate::error::Error;
use layout::{CLAIMED, MARK, NAME, PROCESS, RECORDS, WORDS};
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use tempfile::TempDir;

#[path = "../../../preload/src/layout.rs"]
mod layout;

/// The use of the file, for messages.
const PURPOSE: &str = "the report of the preloaded library";
const WORD: usize = size_of::<u64>();

/// A report in a file that the processes of a program write. The file is removed when this is
/// dropped; processes that still run keep their part, and later processes write no report.
#[derive(Debug)]
pub struct Report {
    file: PathBuf,
    _dir: TempDir,
}

/// The operations of the processes of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reported {
    /// The processes in the order of their start. A process that executes several programs has an
    /// entry for each.
    pub processes: Vec<Process>,
    /// The number of further processes, for which the report had no place.
    pub omitted: u64,
}

/// The operations of one program in one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// The identifier of the process, in its namespace.
    pub pid: u64,
    /// The name of the process at its start, at most 15 bytes.
    pub name: String,
    record: [u64; WORDS],
}

/// Refusals of one operation for one reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The reason.
    pub reason: Reason,
    /// The number of refusals.
    pub times: u64,
    /// The last error code of the kernel, or 0.
    pub code: u32,
}

impl Report {
    /// Creates an empty report. All space is allocated: the library writes to mapped memory, so a
    /// full disk must not interrupt the program.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn new() -> Result<Self, Error> {
        let failed = |error| Error::host(PURPOSE, error);
        let dir = tempfile::Builder::new().prefix("faultless-").tempdir().map_err(failed)?;
        let file = dir.path().join("report");
        let file = std::path::absolute(file).map_err(failed)?;
        let mut bytes = vec![0; RECORDS * WORDS * WORD];
        bytes[..WORD].copy_from_slice(&MARK.to_ne_bytes());
        fs::write(&file, bytes).map_err(failed)?;
        Ok(Self { file, _dir: dir })
    }

    /// Returns the variable that requests the report.
    pub fn variable(&self) -> (&'static str, OsString) {
        (REPORT, self.file.clone().into_os_string())
    }

    /// Reads the operations so far.
    ///
    /// # Errors
    /// The file cannot be read, or is not a report.
    pub fn read(&self) -> Result<Reported, Error> {
        let bytes = fs::read(&self.file).map_err(|error| Error::host(PURPOSE, error))?;
        decode(&bytes).ok_or_else(|| Error::run(PURPOSE, "the file is damaged"))
    }
}

/// Decodes the contents of a report.
fn decode(bytes: &[u8]) -> Option<Reported> {
    let words = bytes.chunks_exact(WORD).map(|word| word.try_into().map(u64::from_ne_bytes));
    let words: Vec<u64> = words.collect::<Result<_, _>>().ok()?;
    let (records, rest) = words.as_chunks::<WORDS>();
    let (head, records) = records.split_first()?;
    if head[0] != MARK || !rest.is_empty() {
        return None;
    }
    let claimed = head[CLAIMED];
    // A process writes its identifier last.
    let processes = records.iter().filter(|record| record[PROCESS] != 0).map(Process::of);
    let omitted = claimed.saturating_sub(records.len() as u64);
    Some(Reported { processes: processes.collect(), omitted })
}

impl Process {
    fn of(record: &[u64; WORDS]) -> Self {
        let name = [record[NAME].to_ne_bytes(), record[NAME + 1].to_ne_bytes()].concat();
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        let name = String::from_utf8_lossy(&name[..end]).into_owned();
        Self { pid: record[PROCESS], name, record: *record }
    }

    /// Returns a count.
    pub fn count(&self, count: Count) -> u64 {
        self.record[count as usize]
    }

    /// Returns the refused operations, one entry for each reason.
    pub fn refusals(&self) -> impl Iterator<Item = Refusal> {
        Reason::ALL.into_iter().filter_map(|reason| {
            let word = self.record[reason as usize];
            let (times, code) = (word >> 16, (word & 0xffff) as u32);
            (times != 0).then_some(Refusal { reason, times, code })
        })
    }

    /// Returns whether no operation had an effect or was refused.
    pub fn is_empty(&self) -> bool {
        self.record[NAME + 2..].iter().all(|count| *count == 0)
    }

    /// Returns the bytes of all operations.
    pub fn bytes(&self) -> u64 {
        [
            Count::CollapsedBytes,
            Count::CopiedBytes,
            Count::PopulatedBytes,
            Count::PrefaultedBytes,
            Count::PopulatedFileBytes,
        ]
        .into_iter()
        .map(|count| self.count(count))
        .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::super::preload::{BYTES, Operations, Preload};
    use super::*;
    use std::env;
    use std::process::Command;

    /// The words of the counts, and of the reasons, have no overlap.
    #[test]
    fn each_count_and_reason_has_its_own_word() {
        let mut words: Vec<_> = Reason::ALL.into_iter().map(|reason| reason as usize).collect();
        words.extend(Count::CollapsedSegments as usize..=Count::PopulatedFileBytes as usize);
        words.sort_unstable();
        assert_eq!(words, (NAME + 2..NAME + 2 + words.len()).collect::<Vec<_>>());
        assert!(words.len() + NAME + 2 <= WORDS);
    }

    #[test]
    fn damaged_report_is_an_error() {
        let report = Report::new().expect("a directory");
        assert_eq!(report.read().expect("empty"), Reported { processes: Vec::new(), omitted: 0 });
        fs::write(&report.file, [0; 4096]).expect("our file");
        assert!(report.read().expect_err("no mark").to_string().contains("damaged"));
    }

    #[test]
    fn report_counts_processes_beyond_its_records() {
        let mut words = vec![0_u64; RECORDS * WORDS];
        (words[0], words[CLAIMED]) = (MARK, RECORDS as u64 + 6);
        words[WORDS..WORDS + 4].copy_from_slice(&[7, u64::from_ne_bytes(*b"a b\0cdef"), 0, 2]);
        words[WORDS + Reason::Small as usize] = 3 << 16 | 22;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let reported = decode(&bytes).expect("a report");
        assert_eq!(reported.omitted, 7);
        let [process] = &reported.processes[..] else { panic!("{reported:?}") };
        assert_eq!((process.pid, &*process.name), (7, "a b"));
        assert_eq!(process.count(Count::CollapsedSegments), 2);
        let refusal = Refusal { reason: Reason::Small, times: 3, code: 22 };
        assert_eq!(process.refusals().collect::<Vec<_>>(), [refusal]);
    }

    #[test]
    fn library_reports_populated_blocks() {
        if env::var_os(BYTES).is_some() {
            std::hint::black_box(Vec::<u8>::with_capacity(16 << 20));
            return;
        }
        let (preload, report) = (Preload::new().expect("built"), Report::new().expect("a file"));
        let operations = Operations { populate: Some(8 << 20), ..Operations::default() };
        let (_, module) = module_path!().split_once("::").expect("a first argument");
        let ran = Command::new(env::current_exe().expect("the path of this test"))
            .args(["--exact", &format!("{module}::library_reports_populated_blocks")])
            .envs(operations.environment(preload.path()))
            .envs([report.variable()])
            .output()
            .expect("a program that starts");
        assert!(ran.status.success());
        let reported = report.read().expect("written by the library");
        let [process] = &reported.processes[..] else { panic!("{reported:?}") };
        assert_eq!(process.count(Count::PopulatedBlocks), 1);
        assert_eq!(process.count(Count::PopulatedBytes).div_ceil(1 << 20), 16);
    }
}
