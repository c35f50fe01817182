//! The kind of a program, which determines the settings that affect it.

use super::item::Apply;
use super::linked::{self, Linked};
use super::variables::Variables;
use faultless_trace::Trace;
use faultless_trace::record::{find_program, has_capabilities};
use memchr::memmem;
use memmap2::Mmap;
use nix::unistd::{getegid, geteuid};
use object::elf::FileHeader64;
use object::read::elf::{ElfFile, FileHeader};
use object::{Architecture, Endianness, Object, ObjectSection};
use std::env::consts::ARCH;
use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The longest chain of interpreters of scripts that start another interpreter.
const MOST_INTERPRETERS: usize = 4;

/// The bytes of a script in which the kernel searches the interpreter.
const MOST_OF_LINE: u64 = 256;

/// Names of allocators, as found in the linked or preloaded libraries of a program.
const LINKED: [&str; 3] = ["jemalloc", "tcmalloc", "mimalloc"];
/// Libraries of sanitizers that must be loaded before all others. The static library of a
/// sanitizer, and the library of the sanitizer of undefined behaviour, have no such condition.
const SANITIZERS: [&str; 5] = ["libasan", "libhwasan", "liblsan", "libmsan", "libtsan"];
/// The names of these libraries in clang.
const CLANG_SANITIZERS: [&str; 4] =
    ["libclang_rt.asan", "libclang_rt.hwasan", "libclang_rt.lsan", "libclang_rt.tsan"];
/// The start of messages of allocators linked statically into a program, as in `rustc`.
const BUILT_IN: [&str; 2] = ["<jemalloc>: ", "mimalloc: "];

/// The end of jemalloc's variable in each build.
const CONF: &str = "MALLOC_CONF";

/// The first bytes of an ELF file.
const ELF: &[u8] = b"\x7fELF";
/// The bits of a file that runs as its owner, and as its group.
const SETUID: u32 = 0o4000;
const SETGID: u32 = 0o2010;

/// A name in glibc's code since version 2.26.
const TUNABLE: &str = "glibc.malloc.trim_threshold";

/// The known facts about a program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    /// Memory comes from glibc's `malloc`, according to the file of the program.
    pub glibc: bool,
    /// The program is linked statically, so no library can be preloaded.
    pub fixed: bool,
    /// Made by Go's compiler.
    pub go: bool,
    /// A Java virtual machine.
    pub java: bool,
    /// Python, or a script of Python.
    pub python: bool,
    /// Linked with musl.
    pub musl: bool,
    /// Contains, or is linked with, another allocator than glibc's.
    pub allocator: bool,
    /// Allocators other than the C library's, in the program's file and libraries.
    pub others: Vec<Linked>,
    /// The program itself requests jemalloc to return all free memory.
    pub purges: bool,
    /// The program's file contains settings with which jemalloc returns address space.
    pub unretains: bool,
    /// The variables of allocators in its environment, as far as known.
    pub variables: Variables,
    /// The program has other rights than its user, so the loader ignores variables.
    pub privileged: bool,
    /// Linked with the library of a sanitizer, which must be the first library.
    pub sanitizer: bool,
    /// Made for another machine, such as one with 32-bit addresses.
    pub foreign: bool,
}

impl Program {
    /// Examines the recorded program: its file, if the file exists, and the names of its threads.
    pub fn of(name: &OsStr, trace: &Trace) -> Self {
        let mut program = Self::named(name);
        program.add_libraries(name);
        let java = |thread: &faultless_trace::event::ThreadInfo| {
            thread.name.starts_with("VM Thread") || thread.name.starts_with("GC Thread")
        };
        program.java |= trace.threads.iter().any(java);
        program
    }

    /// Examines the file of the program `name`, or of the interpreter of a script, without its
    /// libraries. Without a readable file, no fact is known.
    pub fn named(name: &OsStr) -> Self {
        let file = find_program(name).ok().and_then(|file| executed(&file));
        let mut program = file
            .as_deref()
            .and_then(|file| contents(file).ok())
            .map_or_else(Self::default, |bytes| Self::of_file(&bytes));
        let preloaded = std::env::var_os("LD_PRELOAD").unwrap_or_default();
        if LINKED.iter().any(|name| has(preloaded.as_bytes(), name)) {
            program.glibc = false;
            program.allocator = true;
        }
        program.sanitizer |= is_sanitizer(preloaded.as_bytes());
        let name = file.as_deref().and_then(Path::file_name).unwrap_or_default();
        program.python = name.as_bytes().starts_with(b"python");
        program.privileged = file.is_some_and(|file| {
            let user = (geteuid().as_raw(), getegid().as_raw());
            let changes = |meta: Metadata| {
                changes_rights(meta.mode(), (meta.uid(), meta.gid()), has_capabilities(&file), user)
            };
            fs::metadata(&file).is_ok_and(changes)
        });
        program
    }

    /// Examines the libraries that the loader of the program `name` maps. Reads all of them.
    pub fn add_libraries(&mut self, name: &OsStr) {
        if let Some(file) = find_program(name).ok().and_then(|file| executed(&file)) {
            let preloaded = std::env::var_os("LD_PRELOAD").unwrap_or_default();
            self.add_allocators(linked::loaded(&file, &preloaded.to_string_lossy()));
        }
    }

    /// Returns whether [`obstacle`](Self::obstacle) depends on the libraries of the program.
    pub fn depends_on_libraries(apply: &Apply) -> bool {
        let unknown = Self { glibc: true, ..Self::default() };
        let Apply::Environment(variables) = apply else { return false };
        variables.iter().any(|(name, _)| unknown.without_allocator(name).is_some())
    }

    /// Examines the libraries and the environment of the running process `pid`.
    pub fn add_mapped(&mut self, pid: i32) {
        self.variables.add(&Variables::of_process(pid));
        self.add_allocators(linked::mapped(pid));
    }

    /// Adds the allocators in the files of the program and its libraries.
    fn add_allocators(&mut self, files: Vec<PathBuf>) {
        let replaces = |file: &PathBuf| {
            let name = file.file_name().unwrap_or_default();
            LINKED.iter().any(|allocator| has(name.as_bytes(), allocator))
        };
        if files.iter().any(replaces) {
            self.glibc = false;
            self.allocator = true;
        }
        for linked in linked::in_files(files) {
            if !self.others.contains(&linked) {
                self.others.push(linked);
            }
        }
    }

    /// Returns the reason for which `apply` has no effect on the program, or affects only a part
    /// of its memory. The processes that the program starts can differ.
    pub fn obstacle(&self, apply: &Apply) -> Option<&'static str> {
        match apply {
            Apply::Populate(_) | Apply::PrefaultAhead(_) => {
                self.not_preloaded().or_else(|| self.hides_blocks())
            }
            Apply::HugeText(_) | Apply::PopulateFiles(_) => self.not_preloaded(),
            Apply::Environment(variables) if variables.iter().any(|(name, _)| of_malloc(name)) => {
                self.without_glibc()
            }
            Apply::Environment(variables) => {
                variables.iter().find_map(|(name, _)| self.without_allocator(name))
            }
            _ => None,
        }
    }

    /// Returns whether the preloaded library populates the blocks of the program's allocator.
    pub fn populates(&self) -> bool {
        (self.glibc || self.musl || self.java) && !self.fixed
    }

    /// Returns the reason for which the variable `name` of another allocator, of Go or of Java has
    /// no effect.
    fn without_allocator(&self, name: &str) -> Option<&'static str> {
        let has = |is: fn(&Linked) -> bool| self.others.iter().any(is);
        let (found, why) = if name.ends_with(CONF) {
            let found = has(|linked| matches!(linked, Linked::Jemalloc { .. }));
            (found, "jemalloc is in none of the program's file and libraries")
        } else if name.starts_with("MIMALLOC_") {
            let found = has(|linked| matches!(linked, Linked::Mimalloc { .. }));
            (found, "mimalloc is in none of the program's file and libraries")
        } else if name.starts_with("TCMALLOC_") {
            let found = has(|linked| matches!(linked, Linked::Gperftools));
            (found, "tcmalloc of gperftools is in none of the program's file and libraries")
        } else if name == "JAVA_TOOL_OPTIONS" {
            (
                self.java,
                "the program is not Java; only Java programs that it starts read the setting",
            )
        } else if name.starts_with("GO") {
            (
                self.go,
                "the program is not made by Go; only Go programs that it starts read the setting",
            )
        } else {
            return None;
        };
        // Without a readable file, no fact is known.
        let known = self.glibc || self.allocator || self.musl || self.go || self.java || self.fixed;
        (known && !found).then_some(why)
    }

    /// Returns the reason for which the preloaded library does not see all blocks of the program.
    fn hides_blocks(&self) -> Option<&'static str> {
        if self.go {
            Some("Go makes mappings without the C library")
        } else if self.allocator {
            Some(
                "the program has its own allocator: only mappings that it makes by mmap are \
                 populated",
            )
        } else {
            None
        }
    }

    /// Returns the reason for which the library cannot be preloaded. The loader of a program for
    /// another machine reports an error.
    pub fn not_preloaded(&self) -> Option<&'static str> {
        if self.foreign {
            Some("the program is made for another machine than the library")
        } else if self.fixed {
            Some("the program is linked statically: no library can be preloaded")
        } else if self.privileged {
            Some(
                "the program gets other rights than its user (setuid, setgid or capabilities): \
                 the loader ignores LD_PRELOAD",
            )
        } else if self.sanitizer {
            Some(
                "the library of a sanitizer (libasan, libtsan, ...) must be loaded before all \
                 others: link AddressSanitizer statically (-static-libasan), or build the program \
                 without the sanitizer",
            )
        } else {
            None
        }
    }

    /// Returns the reason for which settings of glibc's `malloc` have no effect.
    fn without_glibc(&self) -> Option<&'static str> {
        if self.privileged {
            Some(
                "the program gets other rights than its user (setuid, setgid or capabilities): \
                 glibc ignores settings of malloc",
            )
        } else if self.musl {
            Some("the program is linked with musl, which has its own malloc")
        } else if self.allocator {
            Some("the program has its own allocator, not glibc's malloc")
        } else if self.go || self.fixed && !self.glibc {
            Some("the program does not contain glibc's malloc")
        } else {
            None
        }
    }

    fn of_file(bytes: &[u8]) -> Self {
        let Ok(file) = ElfFile::<FileHeader64<Endianness>>::parse(bytes) else {
            return Self { foreign: bytes.starts_with(ELF), ..Self::default() };
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
        let musl = loader.as_ref().is_some_and(|loader| loader.contains("musl"));
        let glibc = if loader.is_some() { !musl } else { has(bytes, TUNABLE) };
        Self {
            glibc: glibc && !others && !go,
            fixed: loader.is_none(),
            go,
            java,
            python: false,
            musl,
            allocator: others,
            others: Vec::new(),
            purges: linked::purges(bytes),
            unretains: linked::unretains(bytes),
            variables: Variables::default(),
            privileged: false,
            sanitizer: is_sanitizer(needed),
            foreign: !is_of_this_machine(&file),
        }
    }
}

/// Returns whether a file is made for the machine of this command.
fn is_of_this_machine(file: &ElfFile<'_, FileHeader64<Endianness>>) -> bool {
    match file.architecture() {
        Architecture::X86_64 => ARCH == "x86_64",
        Architecture::Aarch64 => ARCH == "aarch64",
        _ => !["x86_64", "aarch64"].contains(&ARCH),
    }
}

/// Returns whether a program gets other rights than the `user`, from the mode, the owner and the
/// capabilities of its file. The kernel then sets `AT_SECURE`. Users and groups are pairs.
fn changes_rights(mode: u32, owner: (u32, u32), capabilities: bool, user: (u32, u32)) -> bool {
    let other_user = mode & SETUID != 0 && owner.0 != user.0;
    // Without the permission of the group to execute, the bit has another meaning.
    let other_group = mode & SETGID == SETGID && owner.1 != user.1;
    other_user || other_group || capabilities && user.0 != 0
}

/// Returns whether glibc's `malloc` reads the variable `name`.
fn of_malloc(name: &str) -> bool {
    name == "GLIBC_TUNABLES" || name.starts_with("MALLOC_") && name != CONF
}

/// Returns whether the names of libraries contain a sanitizer that must be the first library.
fn is_sanitizer(names: &[u8]) -> bool {
    SANITIZERS.iter().chain(&CLANG_SANITIZERS).any(|name| has(names, &format!("{name}.so")))
        || CLANG_SANITIZERS.iter().any(|name| has(names, &format!("{name}-")))
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

/// Returns the contents of a program. A program of 100 MB is mapped, as only small parts are used.
fn contents(file: &Path) -> io::Result<Mmap> {
    let file = File::open(file)?;
    // SAFETY: the bytes are only read, each once. The kernel refuses writes to running programs,
    // and package managers replace a program by a new file.
    unsafe { Mmap::map(&file) }
}

/// Returns the file executed by the kernel for `file`: the file itself, or the interpreter of a
/// script.
fn executed(file: &Path) -> Option<PathBuf> {
    let mut file = file.to_owned();
    for _ in 0..MOST_INTERPRETERS {
        let mut bytes = Vec::new();
        File::open(&file).ok()?.take(MOST_OF_LINE).read_to_end(&mut bytes).ok()?;
        let Some(rest) = bytes.strip_prefix(b"#!") else { return Some(file) };
        let line = rest.split(|byte| *byte == b'\n').next()?;
        let mut words = line.split(|byte| b" \t".contains(byte)).filter(|word| !word.is_empty());
        let first = Path::new(OsStr::from_bytes(words.next()?));
        // `/usr/bin/env python3`, or `/usr/bin/env -S python3 -u`.
        let second = words.find(|word| *word != b"-S");
        file = match (first.file_name()?.as_bytes(), second) {
            (b"env", Some(name)) => find_program(OsStr::from_bytes(name)).ok()?,
            _ => first.to_owned(),
        };
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::named;
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

    /// Compiles a program that allocates memory.
    fn compiled(compiler: &str, options: &[&str]) -> Program {
        let dir = tempfile::tempdir().expect("a directory");
        let program = dir.path().join("program");
        let mut compiler = std::process::Command::new(compiler);
        compiler.args(options).args(["-x", "c", "-o"]).arg(&program).arg("-");
        let mut compiler =
            compiler.stdin(std::process::Stdio::piped()).spawn().expect("an installed compiler");
        let source =
            b"#include <stdlib.h>\nint main(int n, char **v) { return !malloc(n + !*v); }\n";
        std::io::Write::write_all(&mut compiler.stdin.take().expect("piped"), source)
            .expect("the compiler reads its input");
        assert!(compiler.wait().expect("it ends").success(), "the C library is installed");
        Program::of(program.as_os_str(), &Trace::default())
    }

    #[test]
    fn static_glibc_is_found() {
        let got = compiled("gcc", &["-static"]);
        assert_eq!(got, Program { glibc: true, fixed: true, ..Program::default() });
        assert!(got.obstacle(&Apply::Populate(1)).is_some_and(|why| why.contains("statically")));
        assert_eq!(got.obstacle(&named::malloc_thp()), None);
    }

    #[test]
    fn musl_is_found() {
        if find_program("musl-gcc".as_ref()).is_err() {
            eprintln!("musl-gcc is not installed: not tested");
            return;
        }
        let got = compiled("musl-gcc", &[]);
        assert_eq!(got, Program { musl: true, ..Program::default() });
        assert_eq!(got.not_preloaded(), None);
        assert_eq!(got.obstacle(&Apply::Populate(1)), None);
        assert!(got.obstacle(&named::malloc_thp()).is_some_and(|why| why.contains("musl")));
    }

    /// A static program of glibc contains the names of glibc's settings.
    #[test]
    fn static_program_without_settings_of_glibc_is_not_of_glibc() {
        let options = ["-static", "-nostdlib", "-Dmain=_start", "-Wl,--defsym=malloc=0"];
        let got = compiled("gcc", &options);
        assert_eq!(got, Program { fixed: true, ..Program::default() });
        let why = got.obstacle(&named::malloc_thp());
        assert_eq!(why, Some("the program does not contain glibc's malloc"));
    }

    #[test]
    fn obstacles_depend_on_the_advice() {
        let glibc = Program { glibc: true, ..Program::default() };
        let privileged = Program { privileged: true, ..glibc.clone() };
        let allocator = Program { allocator: true, ..Program::default() };
        let foreign = Program { foreign: true, ..Program::default() };
        let go = Program { go: true, ..Program::default() };
        let populate = Apply::Populate(1 << 20);
        let malloc = named::malloc_keeps_memory();
        for (program, on_populate, on_malloc) in [
            (Program::default(), "", ""),
            (glibc, "", ""),
            (privileged, "ignores LD_PRELOAD", "glibc ignores settings of malloc"),
            (allocator, "only mappings", "its own allocator"),
            (foreign, "another machine", ""),
            (go, "Go makes mappings", "does not contain glibc"),
        ] {
            let of = |apply: &Apply| program.obstacle(apply).unwrap_or_default();
            let (got, of_malloc) = (of(&populate), of(&malloc));
            assert!(got.contains(on_populate) && got.is_empty() == on_populate.is_empty(), "{got}");
            assert!(
                of_malloc.contains(on_malloc) && of_malloc.is_empty() == on_malloc.is_empty(),
                "{of_malloc}"
            );
            assert_eq!(of(&Apply::WithoutThp), "");
        }
    }

    #[test]
    fn settings_of_an_absent_runtime_have_no_effect() {
        let glibc = Program { glibc: true, ..Program::default() };
        let go = Program { go: true, ..Program::default() };
        let java = Program { java: true, glibc: true, ..Program::default() };
        let has = |program: &Program, apply: &Apply| program.obstacle(apply).is_none();
        for (apply, program) in [
            (named::gogc(200), &go),
            (named::go_frees_lazily(), &go),
            (named::java_thp(), &java),
            (named::java_heap(1 << 28), &java),
        ] {
            assert!(!has(&glibc, &apply) && has(program, &apply), "{apply:?}");
            assert!(has(&Program::default(), &apply), "an unknown file");
        }
        assert!(!has(&go, &named::java_thp()) && !has(&java, &named::gogc(200)));
    }

    #[test]
    fn settings_of_an_absent_allocator_have_no_effect() {
        let glibc = Program { glibc: true, ..Program::default() };
        let named = |text: &str| text.parse::<named::Named>().expect("a known name");
        let why = |program: &Program, text| program.obstacle(named(text).apply());
        for (name, word) in [
            ("jemalloc-thp", "jemalloc"),
            ("mimalloc-keeps-memory", "mimalloc"),
            ("tcmalloc-keeps-memory", "gperftools"),
        ] {
            assert!(why(&glibc, name).is_some_and(|why| why.contains(word)), "{name}");
            assert_eq!(why(&Program::default(), name), None, "an unknown file");
        }
        let jemalloc = Linked::Jemalloc {
            variable: CONF.to_owned(),
            version: None,
            decays: true,
            huge: true,
            retains: true,
        };
        let with = Program { allocator: true, others: vec![jemalloc], ..Program::default() };
        assert_eq!(why(&with, "jemalloc-thp"), None);
        assert!(why(&with, "mimalloc-thp").is_some());
    }

    #[test]
    fn rights_change_with_owner_group_and_capabilities() {
        let user = (1000, 1000);
        assert!(changes_rights(0o4755, (0, 0), false, user));
        assert!(!changes_rights(0o4755, user, false, user), "the user's own file");
        assert!(changes_rights(0o2755, (1000, 42), false, user));
        assert!(!changes_rights(0o2644, (1000, 42), false, user), "no permission of the group");
        assert!(changes_rights(0o755, (0, 0), true, user));
        assert!(!changes_rights(0o755, (0, 0), true, (0, 0)), "root has all capabilities");
        assert!(!changes_rights(0o755, (0, 0), false, user));
    }

    #[test]
    fn program_for_32_bits_is_foreign() {
        assert!(Program::of_file(b"\x7fELF\x01\x01\x01").foreign);
        assert!(!Program::named("sh".as_ref()).foreign);
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
        fs::write(&script, "#!/usr/bin/env -S sh -e\n").expect("written");
        assert_eq!(executed(&script), Some(sh));
        fs::write(&script, format!("#!{}\n", script.display())).expect("written");
        assert_eq!(executed(&script), None, "a script that is its own interpreter");
        let python = dir.path().join("python3.99");
        fs::copy(executed(Path::new("/bin/sh")).expect("an installed sh"), &python)
            .expect("copied");
        fs::write(&script, format!("#!{}\n", python.display())).expect("written");
        assert_eq!(executed(&script).as_ref(), Some(&python));
        assert!(Program::named(python.as_ref()).python && !Program::named("sh".as_ref()).python);
    }
}
