//! C programs for tests of the preloaded library.

use super::{Ran, command};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// A directory for the cache and for programs.
pub struct Place(pub tempfile::TempDir);

impl Place {
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("a directory"))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs `faultless run` with this advice.
    pub fn run(&self, advice: &str, program: &[&str]) -> Ran {
        Ran::of(&mut self.command(&["--apply", advice], program))
    }

    /// Returns `faultless run` with these options.
    pub fn command(&self, options: &[&str], program: &[&str]) -> Command {
        let mut run = command(&["run"]);
        run.args(options).arg("--").args(program);
        run.env("XDG_CACHE_HOME", self.path("cache")).env_remove("LD_PRELOAD");
        run
    }

    /// Compiles a C program; returns its path.
    pub fn compile(&self, compiler: &str, name: &str, source: &str, options: &[&str]) -> String {
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
pub fn compilers() -> impl Iterator<Item = &'static str> {
    ["gcc", "musl-gcc"].into_iter().filter(|compiler| {
        let found = Command::new(compiler).arg("--version").output().is_ok();
        if !found {
            eprintln!("{compiler} is not installed: not tested");
        }
        found
    })
}

/// The start of each program: `resident` returns the resident MiB without pages of files, `huge`
/// the KiB on huge pages around an address, and `GROWS` checks the MiB that become resident in an
/// expression.
pub const RESIDENT: &str = r#"
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
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
/* The KiB of huge pages in the mapping of an address. */
static long huge(unsigned long address) {
    char line[512];
    long kib = 0;
    unsigned long start, end;
    int within = 0;
    FILE *file = fopen("/proc/self/smaps", "r");
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
            within = start <= address && address < end;
        if (within && (!strncmp(line, "AnonHugePages:", 14) || !strncmp(line, "FilePmdMapped:", 14)
                       || !strncmp(line, "ShmemPmdMapped:", 15)))
            kib += atol(strchr(line, ':') + 1);
    }
    fclose(file);
    return kib;
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
