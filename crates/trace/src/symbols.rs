//! Names of functions, by the symbols and the debug information of programs (the crate `blazesym`),
//! and by the files in which just-in-time compilers list their [code](jit).
//!
//! `blazesym` reads ELF symbols, DWARF with inlined calls, separate debug information (by debug
//! link and build identifier), and demangles names of C++ and Rust. `wholesym` reads the same, and
//! downloads debug information, which needs an asynchronous runtime and a network.

mod jit;

use crate::event::Function;
use crate::names::listed;
use blazesym::helper::read_elf_build_id;
use blazesym::symbolize::source::Elf;
use blazesym::symbolize::{Input, Sym, Symbolized, Symbolizer};
use jit::Jit;
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// The longest name of a function or file, in bytes.
const MAX_NAME: usize = 500;
/// The name of code in memory without a file and without a known name.
const MEMORY: &str = "[memory]";

/// A file with code, or code in the memory of a process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Module {
    /// The file with this path, as mapped by this process.
    File(i32, PathBuf),
    /// Memory of this process.
    Memory(i32),
}

impl Module {
    /// Returns the module that the process `pid` has mapped under the name `path`.
    pub fn of(pid: i32, path: &[u8]) -> Self {
        // Removed files keep their name with a mark.
        let path = path.strip_suffix(b" (deleted)").unwrap_or(path);
        match path {
            b"[vdso]" | b"[vsyscall]" => Self::File(pid, OsStr::from_bytes(path).into()),
            // perf names anonymous memory `//anon`; memfd and `/dev/zero` are memory, too.
            [b'/', b'/', ..] | [] => Self::Memory(pid),
            _ if path.starts_with(b"/memfd:") || path.starts_with(b"/dev/zero") => {
                Self::Memory(pid)
            }
            [b'/', ..] => Self::File(pid, OsStr::from_bytes(path).into()),
            _ => Self::Memory(pid),
        }
    }

    /// Returns whether the module is memory without a file.
    pub const fn is_memory(&self) -> bool {
        matches!(self, Self::Memory(_))
    }

    /// Returns the name of the file without its directory.
    fn name(&self) -> String {
        match self {
            Self::File(_, path) => {
                let name = path.file_name().unwrap_or(path.as_os_str());
                bounded(&name.to_string_lossy())
            }
            Self::Memory(_) => MEMORY.to_owned(),
        }
    }
}

/// A place in code: an offset in a file, or an address in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    /// The index of the module.
    pub module: u32,
    /// Bytes from the start of the file, or the address.
    pub offset: u64,
}

/// The origin of a recording.
#[derive(Clone, Debug, Default)]
pub(crate) struct Source {
    /// The build identifiers of files at the time of the recording, as far as known.
    pub build_ids: HashMap<PathBuf, Vec<u8>>,
    /// The recorded processes may still run: files are read in their root directories.
    pub running: bool,
}

/// The functions at a place, from the outermost to the innermost inlined call, with the lines in
/// their source files.
pub(crate) type Lines = Vec<(Function, u32)>;

/// Returns the functions at each of the `places` in the `modules`, and remarks.
pub(crate) fn find(
    modules: &[Module],
    places: &[Place],
    source: &Source,
) -> (Vec<Lines>, Vec<String>) {
    let unknown = |place: &Place| {
        let module = modules[place.module as usize].name();
        vec![(Function { module, ..Function::default() }, 0)]
    };
    let mut lines: Vec<Lines> = places.iter().map(unknown).collect();
    let mut changed: Vec<String> = Vec::new();
    let mut by_module: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (at, place) in places.iter().enumerate() {
        by_module.entry(place.module).or_default().push(at);
    }
    let symbolizer = Symbolizer::new();
    for (module, at) in by_module {
        let module = &modules[module as usize];
        let offsets: Vec<u64> = at.iter().map(|at| places[*at].offset).collect();
        let found = match module {
            Module::Memory(pid) => Jit::of(*pid, source.running).functions(&offsets),
            Module::File(pid, path) => {
                let Some(file) = file(*pid, path, source) else { continue };
                if is_other(&file, source.build_ids.get(path)) {
                    changed.push(path.display().to_string());
                    continue;
                }
                in_file(&symbolizer, &file, &module.name(), &offsets)
            }
        };
        for (at, found) in at.into_iter().zip(found) {
            if !found.is_empty() {
                lines[at] = found;
            }
        }
    }
    let is_changed = !changed.is_empty();
    let notes = is_changed.then(|| {
        format!(
            "call stacks have no names in {}: these files differ from the recorded files (build \
             identifier). Remedy: install the recorded versions, or record again",
            listed(changed)
        )
    });
    (lines, notes.into_iter().collect())
}

/// Returns the file `path` as the process `pid` sees it, if the file exists.
pub(crate) fn file(pid: i32, path: &Path, source: &Source) -> Option<PathBuf> {
    let root = || PathBuf::from(format!("/proc/{pid}/root"));
    let below = path.strip_prefix("/").ok();
    let inside = below.filter(|_| source.running).map(|below| root().join(below));
    inside.into_iter().chain([path.to_owned()]).find(|file| file.is_file())
}

/// Returns whether `file` has another build identifier than the recorded file.
fn is_other(file: &Path, recorded: Option<&Vec<u8>>) -> bool {
    let Some(recorded) = recorded else { return false };
    let own = guarded(|| read_elf_build_id(file).ok().flatten());
    own.flatten().is_some_and(|own| {
        // perf fills short identifiers with zeros.
        let len = own.len().min(recorded.len());
        own[..len] != recorded[..len] || recorded[len..].iter().any(|byte| *byte != 0)
    })
}

/// Calls `read`, which reads a file that may be damaged by an external crate. A panic has no
/// result.
pub(crate) fn guarded<T>(read: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(read)).ok()
}

/// Returns the functions at the `offsets` in the file at `path`; none for unknown offsets.
fn in_file(symbolizer: &Symbolizer, path: &Path, name: &str, offsets: &[u64]) -> Vec<Lines> {
    let source = blazesym::symbolize::source::Source::Elf(Elf::new(path));
    let found = guarded(|| symbolizer.symbolize(&source, Input::FileOffset(offsets)).ok());
    let found = found.flatten().unwrap_or_default();
    let lines = |found: &Symbolized<'_>| found.as_sym().map_or(Vec::new(), |sym| of_sym(sym, name));
    found.iter().map(lines).collect()
}

fn of_sym(sym: &Sym<'_>, module: &str) -> Lines {
    let function = |name: &str, code: Option<&blazesym::symbolize::CodeInfo<'_>>| {
        let file = code.map_or(String::new(), |code| bounded(&code.file.to_string_lossy()));
        let line = code.and_then(|code| code.line).unwrap_or(0);
        (Function { name: bounded(name), module: module.to_owned(), file }, line)
    };
    let outer = function(&sym.name, sym.code_info.as_deref());
    let inlined = sym.inlined.iter().map(|inner| function(&inner.name, inner.code_info.as_ref()));
    std::iter::once(outer).chain(inlined).collect()
}

/// Returns `name`, shortened to the longest length of a name, without characters that control a
/// terminal.
fn bounded(name: &str) -> String {
    name[..name.floor_char_boundary(MAX_NAME)].replace(char::is_control, "?")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn module_of_a_mapping_is_a_file_or_memory() {
        let file = |path: &str| Module::File(1, path.into());
        for (name, want) in [
            ("/usr/lib/libc.so.6", file("/usr/lib/libc.so.6")),
            ("/tmp/app (deleted)", file("/tmp/app")),
            ("[vdso]", file("[vdso]")),
            ("//anon", Module::Memory(1)),
            ("/memfd:jit (deleted)", Module::Memory(1)),
            ("/dev/zero", Module::Memory(1)),
            ("[heap]", Module::Memory(1)),
            ("", Module::Memory(1)),
        ] {
            assert_eq!(Module::of(1, name.as_bytes()), want, "{name}");
        }
    }

    #[test]
    fn names_have_a_bound_and_no_control_characters() {
        assert_eq!(bounded("a\x1b[31mb\nc"), "a?[31mb?c");
        assert_eq!(bounded(&"é".repeat(MAX_NAME)).len(), MAX_NAME);
    }

    /// The C library has a build identifier. A static test program has no C library to read.
    #[test]
    fn file_of_another_version_gives_no_names() {
        let maps = procfs::process::Process::myself().unwrap().maps().unwrap();
        let library = maps.iter().find_map(|map| match &map.pathname {
            procfs::process::MMapPath::Path(path) => {
                path.to_string_lossy().contains("libc.so").then(|| path.clone())
            }
            _ => None,
        });
        let Some(library) = library else { return };
        let own = read_elf_build_id(&library).unwrap().expect("a build identifier").into_owned();
        let modules = [Module::File(1, library.clone())];
        // The start of the text of the library.
        let text = maps.iter().find(|map| {
            map.pathname == procfs::process::MMapPath::Path(library.clone())
                && map.perms.contains(procfs::process::MMPermissions::EXECUTE)
        });
        let first = text.expect("text").offset;
        let places: Vec<_> =
            (0..64).map(|at| Place { module: 0, offset: first + (at << 12) }).collect();
        let named = |build_id: Option<Vec<u8>>| {
            let build_ids = build_id.into_iter().map(|id| (library.clone(), id)).collect();
            let (lines, notes) = find(&modules, &places, &Source { build_ids, running: false });
            let names = lines.iter().filter(|lines| !lines[0].0.name.is_empty()).count();
            (names > 0, notes.len())
        };
        let padded = [&own[..], &[0; 4]].concat();
        let longer = [&own[..], &[1; 4]].concat();
        let mut other = own.clone();
        other[0] ^= 1;
        assert_eq!(named(None), (true, 0));
        assert_eq!(named(Some(own)), (true, 0));
        assert_eq!(named(Some(padded)), (true, 0));
        assert_eq!(named(Some(longer)), (false, 1));
        assert_eq!(named(Some(other)), (false, 1));
    }
}
