//! The code of just-in-time compilers: `perf-PID.map` and `jit-PID.dump`, the files that perf
//! reads, in the directory for temporary files.
//!
//! Node writes a map with `--perf-basic-prof`, Python with `-X perf`, and Java and .NET with an
//! agent or a setting. A compiler may use an address again: the last function with the address
//! counts.

use super::{Lines, bounded};
use crate::event::Function;
use linux_perf_data::jitdump::{JitDumpReader, JitDumpRecord};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The name of the module of this code.
const JIT: &str = "[jit]";
/// The most bytes of a line of a map.
const MAX_LINE: u64 = 1 << 16;
/// The most functions of one process.
const MAX_FUNCTIONS: usize = 1 << 20;

/// The functions of a process by address: their ends and names.
#[derive(Debug, Default)]
pub(super) struct Jit {
    functions: BTreeMap<u64, (u64, String)>,
}

impl Jit {
    /// Reads the files of the process `pid`, in its root directory if the process may be `running`.
    pub fn of(pid: i32, running: bool) -> Self {
        let mut jit = Self::default();
        // In a container, the process has another number.
        let own = if running { number_inside(pid) } else { pid };
        let owners = owners(running.then_some(pid));
        directories(running.then_some(pid)).any(|directory| {
            let open = |name: String| regular(&directory.join(name), &owners);
            open(format!("perf-{own}.map")).into_iter().for_each(|file| jit.read_map(file));
            open(format!("jit-{own}.dump")).into_iter().for_each(|file| jit.read_dump(file));
            !jit.functions.is_empty()
        });
        jit
    }

    /// Returns the function at each of the `addresses`.
    pub fn functions(&self, addresses: &[u64]) -> Vec<Lines> {
        let at = |address: &u64| {
            let found = self.functions.range(..=*address).next_back();
            let Some((_, (_, name))) = found.filter(|(_, (end, _))| address < end) else {
                return Vec::new();
            };
            let name = name.clone();
            vec![(Function { name, module: JIT.to_owned(), file: String::new() }, 0)]
        };
        addresses.iter().map(at).collect()
    }

    fn add(&mut self, start: u64, len: u64, name: &str) {
        let Some(end) = start.checked_add(len).filter(|end| *end > start) else { return };
        if self.functions.len() < MAX_FUNCTIONS {
            self.functions.insert(start, (end, bounded(name)));
        }
    }

    /// Reads lines with a start and a length, both hexadecimal, and a name.
    fn read_map(&mut self, file: File) {
        let mut lines = BufReader::new(file);
        let mut line = Vec::new();
        loop {
            line.clear();
            match std::io::Read::take(&mut lines, MAX_LINE).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => break,
                Ok(_) => {}
            }
            let text = String::from_utf8_lossy(&line);
            let mut words = text.trim_end().splitn(3, ' ');
            let mut number = || {
                let word = words.next()?;
                u64::from_str_radix(word.trim_start_matches("0x"), 16).ok()
            };
            let (Some(start), Some(len)) = (number(), number()) else { continue };
            if let Some(name) = words.next() {
                self.add(start, len, name);
            }
        }
    }

    fn read_dump(&mut self, file: File) {
        let Ok(len) = file.metadata().map(|data| data.len()) else { return };
        let Ok(mut reader) = JitDumpReader::new(file) else { return };
        // A compiler that still runs may have written a part of the last record.
        while let Ok(Some(header)) = reader.next_record_header()
            && reader.next_record_offset() + u64::from(header.total_size) <= len
            && let Ok(Some(record)) = reader.next_record()
        {
            match record.parse() {
                Ok(JitDumpRecord::CodeLoad(load)) => {
                    let name = load.function_name.as_slice();
                    let len = load.code_bytes.len() as u64;
                    self.add(load.code_addr, len, &String::from_utf8_lossy(&name));
                }
                Ok(JitDumpRecord::CodeMove(moved)) => {
                    if let Some((_, name)) = self.functions.remove(&moved.old_code_addr) {
                        self.add(moved.new_code_addr, moved.code_size, &name);
                    }
                }
                _ => {}
            }
        }
    }
}

/// Returns the directories for temporary files: first the directory of the `running` process.
fn directories(running: Option<i32>) -> impl Iterator<Item = PathBuf> {
    let inside = running.map(|pid| PathBuf::from(format!("/proc/{pid}/root/tmp")));
    inside.into_iter().chain([std::env::temp_dir(), "/tmp".into()])
}

/// Returns the users whose files are trusted, as perf does: this user, root and the user of the
/// `running` process. Each user can make files in the directory for temporary files.
fn owners(running: Option<i32>) -> Vec<u32> {
    let process = running.and_then(|pid| fs::metadata(format!("/proc/{pid}")).ok());
    let process = process.map(|data| data.uid());
    let own = fs::metadata("/proc/self").ok().map(|data| data.uid());
    [Some(0), own, process].into_iter().flatten().collect()
}

/// Opens `path` if it is a regular file of one of the `owners`: not a link or a pipe.
fn regular(path: &Path, owners: &[u32]) -> Option<File> {
    let data = fs::symlink_metadata(path).ok()?;
    (data.is_file() && owners.contains(&data.uid())).then(|| File::open(path).ok()).flatten()
}

/// Returns the number of the process `pid` in its innermost namespace.
fn number_inside(pid: i32) -> i32 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    innermost(&status).unwrap_or(pid)
}

/// Returns the last number of the process in the text of its `status` file.
fn innermost(status: &str) -> Option<i32> {
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    numbers.split_whitespace().last()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn map_names_functions_by_address() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("perf-1.map");
        let text = "1000 20 LazyCompile:~run /app/a.js:3\n0x2000 0x10 b\nnoise\n1000 10 again\n\
                    ffffffffffffffff 10 beyond\n";
        fs::write(&path, text).unwrap();
        let mut jit = Jit::default();
        jit.read_map(File::open(&path).unwrap());
        let of = |address: u64| {
            let lines = jit.functions(&[address]).remove(0);
            lines.first().map(|(function, _)| function.name.clone())
        };
        assert_eq!(of(0x100f).as_deref(), Some("again"));
        assert_eq!((of(0x1010), of(0xfff)), (None, None));
        assert_eq!(of(0x2000).as_deref(), Some("b"));
        assert_eq!(of(u64::MAX), None);
    }

    /// Files in the directory for temporary files, removed at the end.
    struct Files(Vec<PathBuf>);

    impl Files {
        fn map(&mut self, directory: &Path, pid: i32, text: &str) {
            let path = directory.join(format!("perf-{pid}.map"));
            fs::write(&path, text).unwrap();
            self.0.push(path);
        }
    }

    impl Drop for Files {
        fn drop(&mut self) {
            for path in &self.0 {
                _ = fs::remove_file(path);
            }
        }
    }

    /// No process has a number above 4,194,304.
    #[test]
    fn map_of_an_ended_process_is_found_by_its_number() {
        let pid = 1_000_000_000 + std::process::id() as i32;
        let mut files = Files(Vec::new());
        let name = |running| {
            let lines = Jit::of(pid, running).functions(&[0x1008]).remove(0);
            lines.first().map(|(function, _)| (function.name.clone(), function.module.clone()))
        };
        assert_eq!(name(false), None);
        files.map(&std::env::temp_dir(), pid, "1000 10 run\n");
        assert_eq!(name(false), Some(("run".to_owned(), JIT.to_owned())));
    }

    #[test]
    fn root_directory_of_a_running_process_is_searched_first() {
        let pid = std::process::id() as i32;
        let mut files = Files(Vec::new());
        files.map(Path::new("/tmp"), number_inside(pid), "1000 10 inside\n");
        let lines = Jit::of(pid, true).functions(&[0x1000]).remove(0);
        assert_eq!(lines[0].0.name, "inside");
        let first = directories(Some(pid)).next();
        assert_eq!(first, Some(PathBuf::from(format!("/proc/{pid}/root/tmp"))));
        assert_eq!(directories(None).next(), Some(std::env::temp_dir()));
    }

    #[test]
    fn number_in_the_innermost_namespace_names_the_files() {
        assert_eq!(innermost("Name:\tnode\nNSpid:\t123\t45\t7\nNSpgid:\t1\n"), Some(7));
        assert_eq!(innermost("NSpid:\t123\n"), Some(123));
        assert_eq!(innermost("Name:\tnode\n"), None);
    }

    #[test]
    fn only_regular_files_of_trusted_users_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let (file, link) = (directory.path().join("perf-1.map"), directory.path().join("link"));
        fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let own = fs::metadata(&file).unwrap().uid();
        assert!(regular(&file, &[own]).is_some() && owners(None).contains(&own));
        assert!(regular(&file, &[own + 1]).is_none(), "a file of another user");
        assert!(regular(&link, &[own]).is_none(), "a link");
        assert!(regular(directory.path(), &[own]).is_none(), "no file");
    }

    #[test]
    fn dump_names_functions_that_were_loaded_or_moved() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("jit-1.dump");
        let word = |value: u32| value.to_le_bytes();
        let long = |value: u64| value.to_le_bytes();
        // Magic, version, size, ELF machine, padding, process, time, flags.
        let mut bytes = [word(0x4a69_5444), word(1), word(40), word(62), word(0), word(1)].concat();
        bytes.extend([long(5), long(0)].concat());
        let load = |address: u64, index: u64| {
            let name = b"add\0";
            let code = [0x90u8; 16];
            let size = 16 + 40 + name.len() + code.len();
            let mut record = [word(0), word(size as u32)].concat();
            record.extend(long(6));
            record.extend([word(1), word(1)].concat());
            record.extend([long(address), long(address), long(16), long(index)].concat());
            record.extend(name);
            record.extend(code);
            record
        };
        bytes.extend(load(0x4000, 1));
        bytes.extend(load(0x5000, 2));
        // The second function moves.
        bytes.extend([word(1), word(16 + 48)].concat());
        bytes.extend(long(7));
        bytes.extend([word(1), word(1)].concat());
        bytes.extend([long(0x6000), long(0x5000), long(0x6000), long(16), long(2)].concat());
        // The start of a record.
        bytes.extend(word(0));
        fs::write(&path, bytes).unwrap();
        let mut jit = Jit::default();
        jit.read_dump(File::open(&path).unwrap());
        let named = |address: u64| !jit.functions(&[address])[0].is_empty();
        assert!(named(0x400f) && named(0x6000));
        assert!(!named(0x4010) && !named(0x5000));
    }
}
