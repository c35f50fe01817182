//! The preloaded library of `run`, in programs of glibc and of musl.

mod common;

use common::{Ran, command};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// A directory for the cache and for programs.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a directory"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs `faultless run` with this advice.
    fn run(&self, advice: &str, program: &[&str]) -> Ran {
        let mut run = command(&["run", "--apply", advice, "--"]);
        run.args(program).env("XDG_CACHE_HOME", self.path("cache")).env_remove("LD_PRELOAD");
        Ran::of(&mut run)
    }

    /// Compiles a C program; returns its path.
    fn compile(&self, compiler: &str, name: &str, source: &str, options: &[&str]) -> String {
        let mut compiler = Command::new(compiler);
        compiler.args(["-x", "c", "-o"]).arg(self.path(name)).args(["-", "-x", "none"]);
        let mut compiler =
            compiler.args(options).stdin(Stdio::piped()).spawn().expect("an installed compiler");
        let source = format!("{RESIDENT}{source}");
        let mut input = compiler.stdin.take().expect("piped");
        input.write_all(source.as_bytes()).expect("the compiler reads");
        drop(input);
        assert!(compiler.wait().expect("it ends").success(), "{name}");
        self.path(name).to_str().expect("text").to_owned()
    }
}

/// Returns the installed compilers: one for glibc, and one for musl.
fn compilers() -> impl Iterator<Item = &'static str> {
    ["gcc", "musl-gcc"].into_iter().filter(|compiler| {
        let found = Command::new(compiler).arg("--version").output().is_ok();
        if !found {
            eprintln!("{compiler} is not installed: not tested");
        }
        found
    })
}

/// The start of each program: `resident` returns the resident MiB without pages of files, and
/// `GROWS` checks the MiB that become resident in an expression.
const RESIDENT: &str = r#"
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
static double resident(void) {
    long all, pages, files;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%ld %ld %ld", &all, &pages, &files) != 3) exit(90);
    fclose(file);
    return (pages - files) * (double)sysconf(_SC_PAGESIZE) / (1 << 20);
}
#define GROWS(expected, expression) do { \
    double before = resident(); \
    expression; \
    int grown = resident() - before + 0.5; \
    if (grown != (expected)) { \
        fprintf(stderr, "%s: %d MiB, not %d\n", #expression, grown, (expected)); \
        exit(91); \
    } \
} while (0)
#define MAP(bytes) mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
"#;

/// Ends with 5 if blocks of each kind are populated, and freed blocks can be used again.
const BLOCKS: &str = r"
int main(void) {
    void *a, *b, *c, *d, *e;
    GROWS(0, a = malloc(700 << 10));
    GROWS(32, b = malloc(32 << 20));
    GROWS(8, c = calloc(8, 1 << 20));
    GROWS(8, d = aligned_alloc(4096, 8 << 20));
    GROWS(8, e = memalign(4096, 8 << 20));
    if (*(char *)c || *((char *)c + (8 << 20) - 1)) return 1;
    memset(b, 7, 32 << 20);
    b = realloc(b, 64 << 20);
    if (((char *)b)[(32 << 20) - 1] != 7) return 2;
    free(a), free(b), free(c), free(d), free(e);
    GROWS(16, a = MAP(16 << 20));
    GROWS(0, munmap(mmap(0, 16 << 20, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0), 4096));
    errno = 0;
    if (MAP(0) != MAP_FAILED || errno != EINVAL) return 3;
    return 5;
}";

#[test]
fn blocks_are_populated_with_glibc_and_with_musl() {
    let place = Place::new();
    for compiler in compilers() {
        let program = place.compile(compiler, compiler, BLOCKS, &["-O0"]);
        let ran = place.run("populate=1M", &[&program]);
        assert_eq!((ran.code, &*ran.err), (Some(5), ""), "{compiler}");
        // The check of a program without the library fails.
        let ran = place.run("no-thp", &[&program]);
        assert_eq!(ran.code, Some(91), "{compiler}: {}", ran.err);
    }
}

#[test]
fn printed_forms_contain_the_version_of_the_library() {
    let place = Place::new();
    for form in ["env", "systemd", "docker"] {
        let mut run = command(&["run", "--apply", "populate", "--print", form, "--library"]);
        let printed = Ran::of(run.arg(place.path("library.so"))).succeeds();
        let version = format!("# The library has version {},", env!("CARGO_PKG_VERSION"));
        assert!(printed.contains(&version), "no {version:?} in {printed}");
    }
}
