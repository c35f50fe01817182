//! The kind of a program, which determines the settings that affect it.

use faultless_trace::Trace;
use faultless_trace::record::find_program;
use memchr::memmem;
use object::elf::FileHeader64;
use object::read::elf::{ElfFile, FileHeader};
use object::{Endianness, Object, ObjectSection};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The longest chain of interpreters of scripts that start another interpreter.
const MOST_INTERPRETERS: usize = 4;

/// Names of allocators, as found in the linked or preloaded libraries of a program.
const LINKED: [&str; 3] = ["jemalloc", "tcmalloc", "mimalloc"];
/// The start of messages of allocators linked statically into a program, as in `rustc`.
const BUILT_IN: [&str; 2] = ["<jemalloc>: ", "mimalloc: "];

/// A name in glibc's code since version 2.26.
const TUNABLE: &str = "glibc.malloc.trim_threshold";

/// The known facts about a program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Program {
    /// Memory comes from glibc's `malloc`, according to the file of the program.
    pub glibc: bool,
    /// The program is linked statically, so no library can be preloaded.
    pub fixed: bool,
    /// Made by Go's compiler.
    pub go: bool,
    /// A Java virtual machine.
    pub java: bool,
}

impl Program {
    /// Examines the recorded program: its file, if the file exists, and the names of its threads.
    pub fn of(name: &OsStr, trace: &Trace) -> Self {
        let file = find_program(name).ok().and_then(|file| executed(&file));
        let mut program = file
            .and_then(|file| fs::read(file).ok())
            .map_or_else(Self::default, |bytes| Self::of_file(&bytes));
        let java = |thread: &faultless_trace::event::ThreadInfo| {
            thread.name.starts_with("VM Thread") || thread.name.starts_with("GC Thread")
        };
        let preloaded = std::env::var_os("LD_PRELOAD").unwrap_or_default();
        program.glibc &= !LINKED.iter().any(|name| has(preloaded.as_bytes(), name));
        program.java |= trace.threads.iter().any(java);
        program
    }

    fn of_file(bytes: &[u8]) -> Self {
        let Ok(file) = ElfFile::<FileHeader64<Endianness>>::parse(bytes) else {
            return Self::default();
        };
        let go = file.section_by_name(".go.buildinfo").is_some()
            || file.section_by_name(".note.go.buildid").is_some();
        let data = |name: &str| {
            file.section_by_name(name).and_then(|section| section.data().ok()).unwrap_or_default()
        };
        let (needed, constants) = (data(".dynstr"), data(".rodata"));
        let others = LINKED.iter().any(|name| has(needed, name))
            || BUILT_IN.iter().any(|words| has(constants, words));
        let java = has(needed, "libjli.so") || has(needed, "libjvm.so");
        let loader = interpreter(&file);
        // A program linked statically with glibc contains the names of its tunables.
        let glibc = match &loader {
            Some(loader) => !loader.contains("musl"),
            None => has(bytes, TUNABLE),
        };
        Self { glibc: glibc && !others && !go, fixed: loader.is_none(), go, java }
    }
}

/// Returns whether `bytes` contain `word`.
fn has(bytes: &[u8], word: &str) -> bool {
    memmem::find(bytes, word.as_bytes()).is_some()
}

/// Returns the loader requested by an ELF file.
fn interpreter(file: &ElfFile<'_, FileHeader64<Endianness>>) -> Option<String> {
    let endian = file.endian();
    let headers = file.elf_header().program_headers(endian, file.data()).ok()?;
    let path = headers.iter().find_map(|header| {
        use object::read::elf::ProgramHeader;
        header.interpreter(endian, file.data()).ok().flatten()
    })?;
    Some(String::from_utf8_lossy(path).into_owned())
}

/// Returns the file executed by the kernel for `file`: the file itself, or the interpreter of a
/// script.
fn executed(file: &Path) -> Option<PathBuf> {
    let mut file = file.to_owned();
    for _ in 0..MOST_INTERPRETERS {
        let bytes = fs::read(&file).ok()?;
        let Some(rest) = bytes.strip_prefix(b"#!") else { return Some(file) };
        let line = rest.split(|byte| *byte == b'\n').next()?;
        let mut words = line.split(|byte| b" \t".contains(byte)).filter(|word| !word.is_empty());
        let first = Path::new(OsStr::from_bytes(words.next()?));
        // `/usr/bin/env python3`.
        file = match (first.file_name()?.as_bytes(), words.next()) {
            (b"env", Some(name)) => find_program(OsStr::from_bytes(name)).ok()?,
            _ => first.to_owned(),
        };
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_kind_follows_from_file_and_threads() {
        let got = Program::of("sh".as_ref(), &Trace::default());
        assert_eq!(got, Program { glibc: cfg!(target_env = "gnu"), ..Program::default() });
        let nothing = Program::of("/no/such/program".as_ref(), &Trace::default());
        assert_eq!(nothing, Program::default());
        let trace =
            faultless_trace::recordings::find("java").expect("bundled").trace().expect("good");
        assert!(Program::of("/no/such/program".as_ref(), &trace).java);
        assert_eq!(Program::of_file(b"#!/bin/sh\n"), Program::default());
    }

    #[test]
    fn static_glibc_is_found() {
        let dir = tempfile::tempdir().expect("a directory");
        let program = dir.path().join("program");
        let mut gcc = std::process::Command::new("gcc");
        gcc.args(["-static", "-x", "c", "-o"]).arg(&program).arg("-");
        let mut gcc = gcc.stdin(std::process::Stdio::piped()).spawn().expect("gcc links Rust here");
        let source =
            b"#include <stdlib.h>\nint main(int n, char **v) { return !malloc(n + !*v); }\n";
        std::io::Write::write_all(&mut gcc.stdin.take().expect("piped"), source)
            .expect("gcc reads its input");
        assert!(gcc.wait().expect("gcc ends").success(), "glibc's static library is installed");
        let got = Program::of(program.as_os_str(), &Trace::default());
        assert_eq!(got, Program { glibc: true, fixed: true, ..Program::default() });
    }

    /// The constants of this test contain the words of such an allocator, like those of a program
    /// linked with the allocator.
    #[test]
    fn statically_linked_allocator_is_found() {
        let own = fs::read(std::env::current_exe().expect("the path of this test")).expect("read");
        assert!(!Program::of_file(&own).glibc);
    }

    #[test]
    fn script_counts_as_its_interpreter() {
        let dir = tempfile::tempdir().expect("a directory");
        let script = dir.path().join("script");
        fs::write(&script, "#!/usr/bin/env sh\n").expect("written");
        let sh = executed(&script).expect("an installed sh");
        assert!(sh.ends_with("sh"), "{}", sh.display());
        fs::write(&script, format!("#!{}\n", script.display())).expect("written");
        assert_eq!(executed(&script), None, "gcc ends");
    }
}
