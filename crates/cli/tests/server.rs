//! The static command for servers of both architectures, its manual pages and its completions. The
//! command for aarch64 runs under QEMU's emulation of programs.

mod common;

use common::Ran;
use faultless_analysis::advise::report::{Count, Process, Reason, Report};
use faultless_trace::event::{
    Access, Backing, Event, Header, Kind, ProcessInfo, Prot, Recorded, ThreadInfo,
};
use faultless_trace::{Trace, compact};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// The largest size of the command in bytes.
const LARGEST: u64 = 15_000_000;
/// A recording made by perf on x86-64.
const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../trace/tests/data/fixture.perf.data");

/// A stand-in for `perf record` of a program or of running processes.
const PERF: &str = r#"#!/bin/sh
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case $1 in
    -o) out=$2; shift 2 ;;
    --control) pipes=${2#fifo:}; shift 2 ;;
    *) shift ;;
    esac
done
if [ "$1" = -- ]; then
    shift
    "$@"
    status=$?
    cat "$FIXTURE" > "$out"
    exit $status
fi
trap 'cat "$FIXTURE" > "$out"; exit 0' INT
read -r line < "${pipes%,*}"
echo ack > "${pipes#*,}"
while :; do sleep 0.02; done
"#;

/// A command for one architecture.
struct Built {
    file: PathBuf,
    /// The machine in the file's header.
    machine: u8,
    /// The emulator, if this machine does not run the command.
    emulator: Option<&'static str>,
}

static X86: LazyLock<Built> = LazyLock::new(|| Built::new("x86_64", 62));
static ARM: LazyLock<Built> = LazyLock::new(|| Built::new("aarch64", 183));

impl Built {
    /// Builds the command, if it is not built yet.
    fn new(architecture: &str, machine: u8) -> Self {
        let target = format!("{architecture}-unknown-linux-musl");
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let built = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--profile", "static", "-p", "faultless-cli"])
            .args(["--no-default-features", "--target", &target])
            .current_dir(&root)
            .status()
            .expect("cargo starts");
        assert!(built.success(), "a build for {target}; `rustup target add {target}` installs it");
        let emulator = (architecture != std::env::consts::ARCH).then_some(match architecture {
            "aarch64" => "qemu-aarch64",
            _ => "qemu-x86_64",
        });
        let folder =
            std::env::var_os("CARGO_TARGET_DIR").map_or(root.join("target"), PathBuf::from);
        Self { file: folder.join(target).join("static/faultless"), machine, emulator }
    }

    fn command(&self, args: &[&str]) -> Command {
        self.with_pages(4096, args)
    }

    /// Returns the command on a host with base pages of `size` bytes, if it is emulated.
    fn with_pages(&self, size: u32, args: &[&str]) -> Command {
        let mut command = match self.emulator {
            None => Command::new(&self.file),
            Some(emulator) => {
                let mut command = Command::new(emulator);
                command.args(["-p", &size.to_string()]).arg(&self.file);
                command
            }
        };
        command.args(args);
        command
    }

    fn run(&self, args: &[&str]) -> Ran {
        Ran::of(&mut self.command(args))
    }

    /// Returns the line of the contents of a recording.
    fn contents(&self, recording: &str) -> String {
        let out = self.run(&["replay", recording]).succeeds();
        let line = out.lines().find(|line| line.trim_start().starts_with("it did"));
        line.unwrap_or_else(|| panic!("no contents in {out}")).to_owned()
    }
}

/// A directory with the stand-in for perf.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let perf = dir.path().join("perf");
        fs::write(&perf, PERF).expect("written");
        fs::set_permissions(&perf, fs::Permissions::from_mode(0o755)).expect("ours");
        Self(dir)
    }

    fn file(&self, name: &str) -> String {
        self.0.path().join(name).to_str().expect("text").to_owned()
    }

    /// Lets `command` find the stand-in.
    fn run(&self, mut command: Command) -> Ran {
        let path = std::env::var("PATH").expect("a path");
        command.env("PATH", format!("{}:{path}", self.0.path().display())).env("FIXTURE", FIXTURE);
        Ran::of(&mut command)
    }
}

/// Returns whether an ELF file requests a loader.
fn has_loader(bytes: &[u8]) -> bool {
    let number = |at: usize, len: usize| {
        bytes[at..at + len].iter().rev().fold(0, |sum, byte| (sum << 8) | usize::from(*byte))
    };
    let (table, each, count) = (number(32, 8), number(54, 2), number(56, 2));
    const INTERPRETER: usize = 3;
    (0..count).any(|at| number(table + at * each, 4) == INTERPRETER)
}

#[test]
fn static_command_is_one_small_file() {
    for built in [&*X86, &*ARM] {
        let bytes = fs::read(&built.file).expect("built");
        assert!(bytes.len() as u64 <= LARGEST, "{} bytes", bytes.len());
        assert_eq!(bytes[18], built.machine);
        assert!(!has_loader(&bytes), "a static file");
        let help = built.run(&["--help"]).succeeds();
        assert!(help.contains("faultless record") && !help.contains("boot"), "{help}");
        let error = built.run(&["boot", "rows"]).fails(2);
        assert!(error.contains("unrecognized subcommand"), "{error}");
        for list in ["workloads", "knobs", "counters", "profiles"] {
            assert!(built.run(&[list]).succeeds().lines().count() > 3);
        }
    }
    let own = fs::read("/bin/sh").expect("a shell");
    assert!(has_loader(&own), "a dynamic program");
}

#[test]
fn both_architectures_read_the_same_recordings() {
    for recording in ["sort", "python", FIXTURE] {
        assert_eq!(X86.contents(recording), ARM.contents(recording));
    }
    let out = ARM.run(&["advise", "python"]).succeeds();
    assert!(out.contains("python:") && out.contains("faults (predicted:"), "{out}");
}

#[test]
fn recording_of_one_architecture_is_read_on_the_other() {
    for (here, there) in [(&*ARM, &*X86), (&*X86, &*ARM)] {
        let place = Place::new();
        let file = place.file("x.fltrace");
        let args = ["record", "--lesser", "-o", &file, "--", "sh", "-c", "exit 7"];
        let ran = place.run(here.command(&args));
        assert_eq!(ran.code, Some(7), "{}", ran.err);
        assert_eq!(here.contents(&file), there.contents(&file));
        assert_eq!(here.contents(&file), here.contents(FIXTURE));
        let own = std::process::id().to_string();
        let running = place.file("running.fltrace");
        let args = ["record", "--lesser", "-o", &running, "--pid", &own, "--seconds", "1"];
        place.run(here.command(&args)).succeeds();
        assert_eq!(here.contents(&running), there.contents(&running));
    }
}

#[test]
fn run_and_advise_start_programs_on_aarch64() {
    let place = Place::new();
    let ran =
        ARM.run(&["run", "--apply", "malloc-arenas", "--", "sh", "-c", "echo $MALLOC_ARENA_MAX"]);
    assert_eq!(ran.succeeds(), "2\n");
    // QEMU has no switch for huge pages.
    assert_eq!(ARM.run(&["run", "--apply", "gogc", "--", "sh", "-c", "exit 9"]).code, Some(9));
    let out = place.run(ARM.command(&["advise", "--lesser", "--", "true"])).succeeds();
    assert!(out.contains("a run without the recorder"), "{out}");
}

/// A program that uses blocks of memory in four threads, and looks up a function behind its own.
const BLOCKS: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
int puts(const char *text) { return text != 0; }
static void *work(void *number) {
    for (long i = 0; i < 20; i++) {
        char *block = malloc((5 << 20) + i * 4096);
        memset(block, i, 5 << 20);
        block = realloc(block, 9 << 20);
        if (block[100] != i) exit(3);
        free(block);
    }
    return number;
}
int main(void) {
    pthread_t threads[4];
    int status;
    for (int i = 0; i < 4; i++) if (pthread_create(threads + i, 0, work, 0)) return 2;
    for (int i = 0; i < 4; i++) pthread_join(threads[i], 0);
    int (*next)(const char *) = (int (*)(const char *))dlsym(RTLD_NEXT, "puts");
    if (!next || next == puts) return 4;
    pid_t child = fork();
    char *block = mmap(0, 64 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (long at = 0; at < 64 << 20; at += 4096) block[at] = 1;
    munmap(block, 64 << 20);
    if (!child) _exit(5);
    return waitpid(child, &status, 0) == child && status == 5 << 8 ? 5 : 6;
}
"#;

/// Compilers for dynamic programs of aarch64, one for glibc and one for musl, each with the
/// directory of its loader.
const CROSS: [(&str, &str); 2] =
    [("aarch64-linux-gnu-gcc", "/usr/aarch64-linux-gnu"), ("aarch64-linux-musl-gcc", "/")];

/// The sizes of base pages in bytes, and the MiB of a huge page.
const PAGES: [(&str, u32); 3] = [("4096", 2), ("16384", 32), ("65536", 512)];

/// The preloaded library for aarch64, and the variables that request its operations.
struct Library {
    place: Place,
    file: String,
    variables: Vec<String>,
}

impl Library {
    fn new(advice: &str) -> Self {
        let place = Place::new();
        let file = place.file("preload.so");
        let printed =
            ARM.run(&["run", "--apply", advice, "--library", &file, "--print", "env"]).succeeds();
        let variables = printed.lines().filter_map(|line| line.strip_prefix("export "));
        let variables = variables
            .filter(|variable| !variable.starts_with("LD_PRELOAD"))
            .map(|variable| variable.replace(['"', '\''], ""))
            .collect();
        Self { place, file, variables }
    }

    /// Compiles `source` with each compiler that is installed, and runs the program with each size
    /// of a page. Calls `check` with the size, the MiB of a huge page, the end of the program, and
    /// the report.
    fn serves(&self, source: &str, check: impl Fn(&str, (&str, u32), &Ran, &[Process])) {
        let file = self.place.file("program.c");
        fs::write(&file, source).expect("written");
        for (compiler, root) in CROSS {
            let program = self.place.file(compiler);
            let mut command = Command::new(compiler);
            let built = command.args(["-O1", "-pthread", "-o", &program, &file, "-ldl"]).status();
            let Ok(built) = built else {
                eprintln!("{compiler} is not installed: not tested");
                continue;
            };
            assert!(built.success(), "{compiler}");
            for page in PAGES {
                let report = Report::new().expect("a directory");
                let (name, value) = report.variable();
                let mut run = Command::new("qemu-aarch64");
                run.args(["-L", root, "-p", page.0]);
                for variable in &self.variables {
                    run.args(["-E", variable]);
                }
                run.args(["-E", &format!("{name}={}", value.display())]);
                let library = format!("LD_PRELOAD={}", self.file);
                let ran = Ran::of(run.args(["-E", &library, &program]));
                let test = format!("{compiler}, pages of {} bytes", page.0);
                let processes = report.read().expect("a report").processes;
                check(&test, page, &ran, &processes);
            }
        }
    }
}

/// QEMU does not populate memory, but the calls of the library and their order are the same as on
/// an aarch64 host. The emulated programs have pages of each size, and the host has pages of 4 KiB.
#[test]
fn preloaded_library_serves_programs_of_aarch64() {
    let library = Library::new("populate=1M,prefault-ahead,huge-text");
    assert_eq!(fs::read(&library.file).expect("written")[18], ARM.machine);
    let file = &library.file;
    let error = ARM.run(&["run", "--apply", "populate", "--library", file, "--", "/bin/true"]);
    assert!(error.fails(2).contains("made for another machine"));
    library.serves(BLOCKS, |test, _, ran, processes| {
        assert_eq!((ran.code, &*ran.err), (Some(5), ""), "{test}: {}", ran.out);
        // QEMU ignores `MADV_WIPEONFORK`, so the child can use the record of its parent.
        let sum = |count| processes.iter().map(|process| process.count(count)).sum::<u64>();
        assert!(sum(Count::PopulatedBlocks) >= 2, "{test}: {processes:?}");
        // A block of 64 MiB in each process.
        assert_eq!(sum(Count::WatchedBlocks), 2, "{test}: {processes:?}");
    });
}

/// A program with 5.6 MiB of text.
const LARGE_TEXT: &str = r#"
__attribute__((used)) static void fill(void) {
    __asm__ volatile(".fill 1400000, 4, 0xd503201f");
}
int main(void) { return 5; }
"#;

/// QEMU reports success for `MADV_COLLAPSE`.
#[test]
fn huge_text_has_the_size_of_the_huge_pages_of_the_host() {
    let library = Library::new("huge-text");
    library.serves(LARGE_TEXT, |test, (_, huge), ran, processes| {
        assert_eq!((ran.code, &*ran.err), (Some(5), ""), "{test}: {}", ran.out);
        let [process] = processes else { panic!("{test}: {processes:?}") };
        let refusals: Vec<_> = process.refusals().map(|it| (it.reason, it.code)).collect();
        let bytes = process.count(Count::CollapsedBytes);
        if huge == 2 {
            assert!(bytes >= 2 << 20 && refusals.is_empty(), "{test}: {bytes}, {refusals:?}");
        } else {
            assert_eq!((bytes, &*refusals), (0, &[(Reason::Short, huge)][..]), "{test}");
        }
    });
}

/// Writes a recording of a host with pages of `size` bytes, with 300 faults.
fn recording(place: &Place, size: u32) -> String {
    let (start, bytes) = (1 << 32, u64::from(size));
    let (prot, len) = (Prot::READ | Prot::WRITE, 300 * bytes);
    let map = Kind::Map { start, len, prot, flags: 0x22, backing: Backing::Anon };
    let fault = |page: u64| Kind::first(start + page * bytes, Access::Write);
    let kinds = [map].into_iter().chain((0..300).map(fault));
    let recorded = Recorded::all() - Recorded::INSTRUCTIONS;
    let trace = Trace {
        header: Header { page_size: size, recorded, ..Header::default() },
        processes: vec![ProcessInfo { parent: None, pid: None }],
        threads: vec![ThreadInfo { process: 0, name: "app".to_owned() }],
        events: (0..)
            .zip(kinds)
            .map(|(time_us, kind)| Event { time_us, thread: 0, kind })
            .collect(),
        ..Trace::default()
    };
    let file = place.file(&format!("{size}.fltrace"));
    let encoded = compact::encode(Path::new(&file), &trace).expect("a valid recording");
    fs::write(&file, encoded).expect("written");
    file
}

#[test]
fn advice_exists_for_each_size_of_base_pages() {
    let place = Place::new();
    let other = "the recording is of a host with pages of";
    for size in [16384, 65536] {
        let file = recording(&place, size);
        let own = Ran::of(&mut ARM.with_pages(size, &["advise", &file]));
        assert!(!own.err.contains(other), "{size}: {}", own.err);
        let out = own.succeeds();
        let large = format!("a fault maps {} KiB", size >> 10);
        for part in ["in 300 faults (predicted:", "300 zero a page.", &large] {
            assert!(out.contains(part), "{size}: {out}");
        }
        let error = ARM.run(&["replay", &file]).fails(2);
        let expected = format!("pages of {} KiB, and the subsystem has pages of 4 KiB", size >> 10);
        assert!(error.contains(&expected), "{error}");
    }
    let ran = X86.run(&["advise", &recording(&place, 65536)]);
    assert!(ran.err.contains(other), "{}", ran.err);
    assert!(ran.succeeds().contains("in 300 faults (predicted:"));
}

#[test]
fn manual_pages_and_completions_are_valid() {
    let place = Place::new();
    X86.run(&["generate", &place.file("")]).succeeds();
    let pages: Vec<_> = fs::read_dir(place.file("man"))
        .expect("a directory")
        .map(|page| page.expect("readable").path())
        .collect();
    assert!(pages.iter().any(|page| page.ends_with("faultless-advise.1")) && pages.len() > 10);
    assert!(!pages.iter().any(|page| page.ends_with("faultless-generate.1")), "a hidden command");
    let check = |program: &str, args: &[&str]| {
        let ran = Ran::of(Command::new(program).args(args));
        assert!(ran.code == Some(0) && ran.err.is_empty(), "{program}: {}{}", ran.out, ran.err);
        ran.out
    };
    for page in &pages {
        let page = page.to_str().expect("text");
        check("mandoc", &["-T", "lint", "-W", "error", page]);
        let shown = check("mandoc", &["-T", "utf8", page]);
        assert!(shown.contains("faultless") && shown.lines().count() > 8, "{shown}");
    }
    let bash = place.file("completions/faultless.bash");
    let complete = "source \"$0\"; COMP_WORDS=(faultless rec) COMP_CWORD=1; \
                    _faultless faultless rec faultless; echo \"${COMPREPLY[@]}\"";
    assert_eq!(check("bash", &["-c", complete, &bash]), "record\n");
    check("zsh", &["-n", &place.file("completions/_faultless")]);
}
