//! The allocators in a program's file and libraries, and the names of their settings in this build.
//!
//! Each allocator contains the names of its variables and options as constants, also in a stripped
//! or static program. A build of jemalloc with a prefix reads another variable: the standard
//! library's users in Rust have `_RJEM_MALLOC_CONF`.

use super::supervise::descendants;
use super::variables::Variables;
use memchr::memmem::{self, Finder};
use object::Endianness;
use object::elf::{DT_NEEDED, DT_RPATH, DT_RUNPATH, FileHeader64};
use object::read::elf::{Dyn, ElfFile, FileHeader, SectionHeader};
use std::collections::HashSet;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The end of the variable with the settings of jemalloc.
const CONF: &[u8] = b"MALLOC_CONF";
/// The start of jemalloc's and mimalloc's messages.
const JEMALLOC: &[u8] = b"<jemalloc>: ";
const MIMALLOC: &[u8] = b"mimalloc: ";
/// A variable of gperftools, and two of Google's later allocator.
const GPERFTOOLS: &[u8] = b"TCMALLOC_RELEASE_RATE\0";
const GOOGLE: [&[u8]; 2] = [b"TCMALLOC_HPAA_CONTROL\0", b"TCMALLOC_SIZE_CLASSES\0"];
/// Names of jemalloc's command to return memory, in programs that use the command.
const PURGES: [&[u8]; 3] = [b"arena.%d.purge", b"arena.%u.purge", b"arena.4096.purge"];
/// The setting of jemalloc that returns address space.
const UNRETAINS: &[u8] = b"retain:false";
/// The variables with which mimalloc commits memory at once: a segment, the first segments of a
/// thread, and an arena.
pub const EAGER: [(&str, &str); 3] = [
    ("MIMALLOC_EAGER_COMMIT", "1"),
    ("MIMALLOC_EAGER_COMMIT_DELAY", "0"),
    ("MIMALLOC_ARENA_EAGER_COMMIT", "1"),
];
/// The longest prefix of a variable.
const PREFIX: usize = 32;
/// Hexadecimal digits of the commit in jemalloc's version.
const COMMIT: usize = 40;
/// The largest file that is read, and the most libraries of a program.
const LARGEST: u64 = 1 << 30;
const MOST: usize = 256;
/// The time between two readings of the mappings of a run, and the most processes to read.
const PAUSE: Duration = Duration::from_millis(50);
const PROCESSES: usize = 16;
/// Directories of libraries, beside those in the program's file.
const PLACES: [&str; 9] = [
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/local/lib",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
];

/// An allocator other than the C library's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Linked {
    /// jemalloc.
    Jemalloc {
        /// The variable that this build reads.
        variable: String,
        /// The version, if known.
        version: Option<String>,
        /// Whether the build has the options of decay in milliseconds (version 5 and later).
        decays: bool,
        /// Whether the build has the option `thp` with its modes (version 5.1 and later).
        huge: bool,
        /// Whether the build has the option `retain` (version 5 and later).
        retains: bool,
    },
    /// mimalloc.
    Mimalloc {
        /// Whether the build has the option `purge_delay` (2.1 and later).
        purges: bool,
        /// Whether the build has the option `allow_decommit` (2.0).
        decommits: bool,
        /// Whether the option of large pages has its later name, `allow_large_os_pages`.
        allows: bool,
        /// Whether the build requests huge pages for memory that it commits at once (`allow_thp`,
        /// 2.2 and later).
        requests: bool,
        /// The variable with the time in milliseconds after which free pages are returned.
        delay: Option<&'static str>,
        /// The variables and values with which this build commits memory at once.
        eager: Vec<(&'static str, &'static str)>,
    },
    /// The allocator of gperftools.
    Gperftools,
    /// Google's allocator after gperftools, with its cache for each CPU.
    Google,
}

impl fmt::Display for Linked {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Jemalloc { variable, version: Some(version), .. } => {
                write!(out, "jemalloc {version}, which reads its settings from {variable}")
            }
            Self::Jemalloc { variable, .. } => {
                write!(out, "jemalloc, which reads its settings from {variable}")
            }
            Self::Mimalloc { .. } => out.write_str("mimalloc"),
            Self::Gperftools => out.write_str("tcmalloc of gperftools"),
            Self::Google => out.write_str("Google's tcmalloc"),
        }
    }
}

/// Returns the allocators in the contents of a file.
pub fn in_file(bytes: &[u8]) -> Vec<Linked> {
    let has = |word: &[u8]| memmem::find(bytes, word).is_some();
    // A constant ends with a zero byte, and follows the zero byte of another constant.
    let constant = |word: &str| {
        let text = [b"\0", word.as_bytes(), b"\0"].concat();
        has(&text)
    };
    let mut all = Vec::new();
    if has(JEMALLOC) {
        let decays = constant("dirty_decay_ms") || constant("opt.dirty_decay_ms");
        let huge = constant("metadata_thp") || constant("opt.metadata_thp");
        let retains = constant("retain") || constant("opt.retain");
        let version = version(bytes);
        let new = |variable| Linked::Jemalloc {
            variable,
            version: version.clone(),
            decays,
            huge,
            retains,
        };
        all.extend(variables(bytes).into_iter().map(new));
    }
    if has(MIMALLOC) && (constant("large_os_pages") || constant("allow_large_os_pages")) {
        all.push(Linked::Mimalloc {
            purges: constant("purge_delay"),
            decommits: constant("allow_decommit"),
            allows: constant("allow_large_os_pages"),
            requests: has(b"allow_thp\0"),
            delay: delay(&has),
            eager: eager(&has),
        });
    }
    if has(GPERFTOOLS) {
        all.push(Linked::Gperftools);
    } else if GOOGLE.iter().any(|word| has(word)) {
        all.push(Linked::Google);
    }
    all
}

/// Returns the variable of mimalloc with the time after which free pages are returned, in a build
/// whose file has these words.
fn delay(has: &impl Fn(&[u8]) -> bool) -> Option<&'static str> {
    // A constant may be the end of a longer constant. Later versions contain the earlier names.
    let names: [(&[u8], &str); 3] = [
        (b"purge_delay\0", "MIMALLOC_PURGE_DELAY"),
        (b"decommit_delay\0", "MIMALLOC_DECOMMIT_DELAY"),
        (b"reset_delay\0", "MIMALLOC_RESET_DELAY"),
    ];
    names.iter().find(|(word, _)| has(word)).map(|(_, variable)| *variable)
}

/// Returns the variables of mimalloc that commit memory at once, in a build whose file has these
/// words: version 3 has one, and each earlier version two or three.
fn eager(has: &impl Fn(&[u8]) -> bool) -> Vec<(&'static str, &'static str)> {
    let arena = has(b"arena_eager_commit\0");
    let options = [
        (has(b"eager_commit\0") && !has(b"deprecated_eager_commit\0"), EAGER[0]),
        (has(b"eager_commit_delay\0") && !has(b"deprecated_eager_commit_delay\0"), EAGER[1]),
        (arena, EAGER[2]),
        (!arena && has(b"\0eager_region_commit\0"), ("MIMALLOC_EAGER_REGION_COMMIT", "1")),
    ];
    options.into_iter().filter(|(there, _)| *there).map(|(_, option)| option).collect()
}

/// Returns whether the file of a program contains settings with which jemalloc returns address
/// space (`retain:false`).
pub fn unretains(bytes: &[u8]) -> bool {
    memmem::find(bytes, UNRETAINS).is_some()
}

/// Returns whether the file of a program requests jemalloc to return the free memory of arenas.
pub fn purges(bytes: &[u8]) -> bool {
    PURGES.iter().any(|name| memmem::find(bytes, name).is_some())
}

/// Returns the names of variables with the settings of jemalloc.
fn variables(bytes: &[u8]) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for at in Finder::new(CONF).find_iter(bytes) {
        let end = at + CONF.len();
        let before = &bytes[at.saturating_sub(PREFIX)..at];
        let letter =
            |byte: &&u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || **byte == b'_';
        let prefix = before.iter().rev().take_while(letter).count();
        let start = at - prefix;
        let whole = bytes.get(end) == Some(&0) && start > 0 && bytes[start - 1] == 0;
        let name = String::from_utf8_lossy(&bytes[start..end]).into_owned();
        if whole && !all.contains(&name) {
            all.push(name);
        }
    }
    all
}

/// Returns the version of jemalloc, such as `5.3.0`, from a constant such as `5.3.0-0-g54ea...`.
fn version(bytes: &[u8]) -> Option<String> {
    Finder::new(b"-g").find_iter(bytes).find_map(|at| {
        let commit = bytes.get(at + 2..at + 2 + COMMIT)?;
        let start = bytes[..at].iter().rposition(|byte| *byte == 0)? + 1;
        let text = std::str::from_utf8(&bytes[start..at]).ok()?;
        let (version, _) = text.split_once('-')?;
        let numbers = version.split('.').all(|part| part.parse::<u32>().is_ok());
        let whole = commit.iter().all(u8::is_ascii_hexdigit) && numbers;
        (whole && version.contains('.')).then(|| version.to_owned())
    })
}

/// Returns the allocators in these files, without duplicates.
pub fn in_files(files: impl IntoIterator<Item = PathBuf>) -> Vec<Linked> {
    let mut all = Vec::new();
    for file in files {
        for linked in read(&file).map(|bytes| in_file(&bytes)).unwrap_or_default() {
            if !all.contains(&linked) {
                all.push(linked);
            }
        }
    }
    all
}

/// Returns the program and the libraries that its loader maps at the start: those in the file, in
/// the libraries themselves, and in `preloaded`, the value of `LD_PRELOAD`.
pub fn loaded(program: &Path, preloaded: &str) -> Vec<PathBuf> {
    let mut all = vec![program.to_owned()];
    let words = preloaded.split([':', ' ']).filter(|word| !word.is_empty());
    let mut places: Vec<PathBuf> = Vec::new();
    for word in words {
        all.extend(found(word, &[]));
    }
    let mut names = HashSet::new();
    let mut next = 0;
    while next < all.len().min(MOST) {
        let file = all[next].clone();
        next += 1;
        let Some(bytes) = read(&file) else { continue };
        let (needed, runpath) = needs(&bytes);
        let origin = file.canonicalize().ok();
        let origin = origin.as_deref().and_then(Path::parent).unwrap_or(Path::new("/"));
        for place in runpath.iter().flat_map(|path| path.split(':')) {
            let place = place.replace("${ORIGIN}", "$ORIGIN");
            let place = place.replace("$ORIGIN", &origin.to_string_lossy());
            places.push(place.into());
        }
        for name in needed {
            if names.insert(name.clone()) {
                all.extend(found(&name, &places).filter(|file| !all.contains(file)));
            }
        }
    }
    all
}

/// Returns the executable files that the process `pid` maps.
pub fn mapped(pid: i32) -> Vec<PathBuf> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let mut all: Vec<PathBuf> = Vec::new();
    for line in maps.lines() {
        // Addresses, permissions, offset, device, inode, and the rest is the path.
        let mut words = line.splitn(6, char::is_whitespace);
        let executable = words.nth(1).is_some_and(|permissions| permissions.contains('x'));
        let path = words.nth(3).map(str::trim_start).filter(|path| path.starts_with('/'));
        let Some(path) = path.filter(|_| executable) else { continue };
        // The file of a process in a container is below its own root.
        let inside = PathBuf::from(format!("/proc/{pid}/root{path}"));
        let path = if Path::new(path).exists() { path.into() } else { inside };
        if !all.contains(&path) {
            all.push(path);
        }
    }
    all
}

/// The files mapped by the processes of a run.
#[derive(Debug, Default)]
pub struct Seen {
    files: Vec<PathBuf>,
    variables: Variables,
    last: Option<Instant>,
}

impl Seen {
    /// Adds the files that `pid` and its descendants map, unless the last reading was a moment ago.
    pub fn look(&mut self, pid: i32) {
        if self.last.is_some_and(|last| last.elapsed() < PAUSE) {
            return;
        }
        self.last = Some(Instant::now());
        for pid in [pid].into_iter().chain(descendants(pid)).take(PROCESSES) {
            let new: Vec<_> =
                mapped(pid).into_iter().filter(|file| !self.files.contains(file)).collect();
            self.files.extend(new);
            self.variables.add(&Variables::of_process(pid));
        }
    }

    /// Returns the variables of the processes that set an allocator.
    pub fn variables(&self) -> &Variables {
        &self.variables
    }

    /// Returns whether a file contains settings with which jemalloc returns address space.
    pub fn unretains(&self) -> bool {
        self.files.iter().filter_map(|file| read(file)).any(|bytes| unretains(&bytes))
    }

    /// Returns whether a file requests jemalloc to return memory.
    pub fn purges(&self) -> bool {
        self.files.iter().filter_map(|file| read(file)).any(|bytes| purges(&bytes))
    }

    /// Returns the allocators in the files.
    pub fn allocators(self) -> Vec<Linked> {
        in_files(self.files)
    }
}

/// Returns the file of a library.
fn found(name: &str, places: &[PathBuf]) -> Option<PathBuf> {
    if name.contains('/') {
        return Some(name.into());
    }
    let environment = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let first = environment.split(':').filter(|place| !place.is_empty()).map(PathBuf::from);
    let places = first.chain(places.iter().cloned()).chain(PLACES.map(PathBuf::from));
    places.map(|place| place.join(name)).find(|file| file.is_file())
}

/// Returns the libraries that a file needs, and its paths of libraries.
fn needs(bytes: &[u8]) -> (Vec<String>, Vec<String>) {
    let mut out = (Vec::new(), Vec::new());
    let Ok(file) = ElfFile::<FileHeader64<Endianness>>::parse(bytes) else { return out };
    let (endian, data) = (file.endian(), file.data());
    let Ok(sections) = file.elf_header().sections(endian, data) else { return out };
    let Ok(Some((entries, link))) = sections.dynamic(endian, data) else { return out };
    let strings = sections
        .section(link)
        .ok()
        .and_then(|section| section.strings(endian, data).ok().flatten());
    let Some(strings) = strings else { return out };
    for entry in entries {
        let text = || {
            let name = entry.string(endian, strings).ok()?;
            Some(String::from_utf8_lossy(name).into_owned())
        };
        match entry.tag(endian) {
            DT_NEEDED => out.0.extend(text()),
            DT_RPATH | DT_RUNPATH => out.1.extend(text()),
            _ => {}
        }
    }
    out
}

/// Reads a file of a reasonable size.
fn read(file: &Path) -> Option<Vec<u8>> {
    let meta = fs::metadata(file).ok()?;
    (meta.is_file() && meta.len() <= LARGEST).then(|| fs::read(file).ok()).flatten()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns a build of jemalloc with all settings.
    pub fn jemalloc() -> Linked {
        Linked::Jemalloc {
            variable: "MALLOC_CONF".to_owned(),
            version: None,
            decays: true,
            huge: true,
            retains: true,
        }
    }

    fn file(constants: &[&str]) -> Vec<u8> {
        let mut bytes = b"\x7fELF\0".to_vec();
        for constant in constants {
            bytes.extend([constant.as_bytes(), b"\0"].concat());
        }
        bytes
    }

    #[test]
    fn variable_and_version_of_jemalloc_are_found() {
        let commit = "5.3.0-1-ge13ca993e8ccb9ba9847cc330696e02839f328f7";
        let message = "<jemalloc>: Error in munmap()";
        let options = ["dirty_decay_ms", "metadata_thp", "retain"];
        let new = file(&[&[message, "_RJEM_MALLOC_CONF", commit][..], &options].concat());
        let variable = "_RJEM_MALLOC_CONF".to_owned();
        let version = Some("5.3.0".to_owned());
        let want = Linked::Jemalloc { variable, version, decays: true, huge: true, retains: true };
        assert_eq!(
            want.to_string(),
            "jemalloc 5.3.0, which reads its settings from _RJEM_MALLOC_CONF"
        );
        assert_eq!(in_file(&new), [want]);
        // Version 4 has other options, and two copies have two variables.
        let old = in_file(&file(&[message, "MALLOC_CONF", "JE_MALLOC_CONF", "lg_dirty_mult"]));
        let variables: Vec<_> = old
            .iter()
            .map(|one| match one {
                Linked::Jemalloc {
                    variable,
                    version: None,
                    decays: false,
                    huge: false,
                    retains: false,
                } => &**variable,
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(variables, ["MALLOC_CONF", "JE_MALLOC_CONF"]);
        // The name in a sentence is not a variable of the program.
        assert!(in_file(&file(&["value of the environment variable MALLOC_CONF"])).is_empty());
        let sentence = file(&[message, "value of the environment variable MALLOC_CONF"]);
        assert!(in_file(&sentence).is_empty());
    }

    #[test]
    fn builds_of_mimalloc_and_tcmalloc_differ() {
        let new = file(&["mimalloc: ", "purge_delay", "allow_large_os_pages"]);
        let mimalloc = |is_new: bool| Linked::Mimalloc {
            purges: is_new,
            decommits: !is_new,
            allows: is_new,
            requests: false,
            delay: is_new.then_some("MIMALLOC_PURGE_DELAY"),
            eager: Vec::new(),
        };
        assert_eq!(in_file(&new), [mimalloc(true)]);
        let old = file(&["mimalloc: warning: ", "mimalloc: ", "allow_decommit", "large_os_pages"]);
        assert_eq!(in_file(&old), [mimalloc(false)]);
        assert_eq!(in_file(&file(&["TCMALLOC_RELEASE_RATE"])), [Linked::Gperftools]);
        assert_eq!(in_file(&file(&["TCMALLOC_HPAA_CONTROL"])), [Linked::Google]);
        assert!(in_file(&file(&["mimalloc: "])).is_empty());
        assert!(super::purges(&file(&["arena.%d.purge"])) && !super::purges(&new));
    }

    /// The constants of builds of 1.8, 2.0.9, 2.3 and 3.3, in which the linker has merged constants
    /// with the same end.
    #[test]
    fn names_of_the_options_of_mimalloc_follow_the_version() {
        let found = |constants: &[&str]| {
            let common = ["mimalloc: ", "large_os_pages"];
            let all = in_file(&file(&[&common[..], constants].concat()));
            let [Linked::Mimalloc { delay, eager, .. }] = &all[..] else { panic!("{all:?}") };
            let names = eager.iter().map(|(name, _)| name.trim_start_matches("MIMALLOC_"));
            (delay.expect("a delay").to_owned(), names.collect::<Vec<_>>().join(" "))
        };
        let old = ["eager_commit", "eager_region_commit", "eager_commit_delay", "reset_delay"];
        let names = "EAGER_COMMIT EAGER_COMMIT_DELAY EAGER_REGION_COMMIT".to_owned();
        assert_eq!(found(&old), ("MIMALLOC_RESET_DELAY".to_owned(), names));
        let second = [
            "eager_commit",
            "deprecated_eager_region_commit",
            "eager_commit_delay",
            "reset_delay",
            "segment_decommit_delay",
        ];
        let names = "EAGER_COMMIT EAGER_COMMIT_DELAY".to_owned();
        assert_eq!(found(&second), ("MIMALLOC_DECOMMIT_DELAY".to_owned(), names));
        let later = ["arena_eager_commit", "eager_region_commit", "eager_commit_delay"];
        let delays = ["purge_delay", "reset_delay"];
        let names = "EAGER_COMMIT EAGER_COMMIT_DELAY ARENA_EAGER_COMMIT".to_owned();
        let purge = "MIMALLOC_PURGE_DELAY".to_owned();
        assert_eq!(found(&[&later[..], &delays].concat()), (purge.clone(), names));
        let third = [
            "deprecated_eager_commit",
            "arena_eager_commit",
            "eager_region_commit",
            "deprecated_eager_commit_delay",
        ];
        let names = "ARENA_EAGER_COMMIT".to_owned();
        assert_eq!(found(&[&third[..], &delays].concat()), (purge, names));
    }

    #[test]
    fn libraries_of_a_program_are_those_of_its_mappings() {
        let own = std::env::current_exe().expect("the path of this test");
        let loaded: HashSet<_> =
            loaded(&own, "").into_iter().filter_map(|file| file.canonicalize().ok()).collect();
        let pid = i32::try_from(std::process::id()).expect("a process identifier");
        let mapped = mapped(pid);
        assert!(mapped.len() >= 2, "{mapped:?}");
        for file in mapped {
            let name = file.to_string_lossy().into_owned();
            // The loader is the interpreter, which no file needs by this name.
            assert!(loaded.contains(&file) || name.contains("/ld-"), "{name} of {loaded:?}");
        }
    }

    /// A program in another language finds the library by its own path.
    #[test]
    fn preloaded_libraries_count() {
        let dir = tempfile::tempdir().expect("a directory");
        let library = dir.path().join("libother.so");
        fs::write(&library, file(&["TCMALLOC_RELEASE_RATE"])).expect("written");
        let files = loaded(Path::new("/bin/sh"), &library.to_string_lossy());
        assert!(files.contains(&library) && files.len() > 2, "{files:?}");
        assert_eq!(in_files([library]), [Linked::Gperftools]);
    }
}
