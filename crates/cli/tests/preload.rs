//! The preloaded library of `run`, in programs of glibc and of musl.

mod common;

use common::program::{Place, RESIDENT, compilers};
use common::{Ran, command};
use std::process::Command;

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
    GROWS(0, mmap(0, 16 << 20, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0));
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

/// musl's own `calloc` would read the pages of the block, because `malloc` has a hook.
#[test]
fn large_calloc_touches_no_page() {
    let main = "
    #include <sys/resource.h>
    int main(void) {
        struct rusage before, after;
        getrusage(RUSAGE_SELF, &before);
        char *block = calloc(4, 8 << 20);
        getrusage(RUSAGE_SELF, &after);
        long faults = after.ru_minflt - before.ru_minflt;
        if (faults > 100) return fprintf(stderr, \"%ld faults\\n\", faults), 1;
        for (int i = 0; i < 32 << 20; i += 4096) if (block[i]) return 2;
        return 5;
    }";
    let place = Place::new();
    for compiler in compilers() {
        let program = place.compile(compiler, &format!("{compiler}-calloc"), main, &["-O0"]);
        let ran = place.run("populate=64M,no-thp", &[&program]);
        assert_eq!((ran.code, &*ran.err), (Some(5), ""), "{compiler}");
    }
}

/// Ends with 5 if a mapping of a file is populated, unless the mapping has code or is small.
const FILES: &str = r#"
#include <fcntl.h>
static double mapped(void) {
    long all, pages, files;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%ld %ld %ld", &all, &pages, &files) != 3) exit(90);
    fclose(file);
    return files * (double)sysconf(_SC_PAGESIZE) / (1 << 20);
}
static char *map(size_t bytes, int code, int file, int expected) {
    double before = mapped();
    char *start = mmap(0, bytes, PROT_READ | code, MAP_SHARED, file, 0);
    int grown = mapped() - before + 0.5;
    if (start == MAP_FAILED || grown != expected) exit(91);
    return start;
}
int main(void) {
    char name[] = "/tmp/faultless-file-XXXXXX";
    int file = mkstemp(name);
    if (file < 0 || unlink(name) || posix_fallocate(file, 0, 8 << 20)) return 1;
    if (map(8 << 20, PROT_EXEC, file, 0)[0] || map(900 << 10, 0, file, 0)[0]) return 2;
    return map(8 << 20, 0, file, 8)[4 << 20] ? 3 : 5;
}"#;

#[test]
fn mapped_files_are_populated() {
    let place = Place::new();
    for compiler in compilers() {
        let name = format!("{compiler}-files");
        let program = place.compile(compiler, &name, FILES, &["-O0"]);
        let ran = place.run("populate-files=1M", &[&program]);
        assert_eq!((ran.code, &*ran.err), (Some(5), ""), "{compiler}");
        // Another operation populates no file.
        assert_eq!(place.run("populate=1M", &[&program]).code, Some(91), "{compiler}");
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

/// A program with 5.6 MiB of text. Ends with 5 if a function in the middle of the text is on a huge
/// page, with 6 if the function is on small pages, and with another status if the text is damaged.
/// With an argument the program spends time in the function.
const TEXT: &str = r#"
#define FUNCTION(name) __attribute__((noinline)) unsigned long name(unsigned long n) { \
    unsigned long sum = 0; \
    for (unsigned long i = 0; i < n; i++) { sum += i; __asm__ volatile("" : "+r"(sum)); } \
    if (n == 7) __asm__ volatile(".fill 700000, 1, 0x90"); \
    return sum; \
}
FUNCTION(f1) FUNCTION(f2) FUNCTION(f3) FUNCTION(f4)
FUNCTION(f5) FUNCTION(f6) FUNCTION(f7) FUNCTION(f8)
int main(int count, char **words) {
    unsigned long (*all[])(unsigned long) = { f1, f2, f3, f4, f5, f6, f7, f8 };
    for (int i = 0; i < 8; i++)
        if (all[i](7) != 21 || all[i](100) != 4950) return 1;
    if (count > 1) f4(strtoul(words[1], 0, 10));
    long kib = huge((unsigned long)f4);
    return kib >= 2048 && kib % 2048 == 0 ? 5 : kib ? 2 : 6;
}"#;

#[test]
fn text_moves_to_huge_pages_with_glibc_and_with_musl() {
    let place = Place::new();
    for compiler in compilers() {
        let program = place.compile(compiler, compiler, TEXT, &["-O1"]);
        let status = |advice: &str| {
            let ran = place.run(advice, &[&program]);
            assert_eq!(ran.err, "", "{compiler}");
            ran.code
        };
        assert_eq!(status("huge-text"), Some(5), "{compiler}");
        assert_eq!(status("populate"), Some(6), "{compiler} without huge text");
        // Without huge pages a copy has no use.
        let refused = place.run("huge-text,no-thp", &[&program]);
        assert_eq!(refused.code, Some(6), "{compiler} without huge pages");
        let threads =
            place.run("huge-text,populate", &["sh", "-c", &format!("{program} & wait $!")]);
        assert_eq!(threads.code, Some(5), "{compiler} started by a shell");
    }
}

/// tmpfs provides huge pages of files, if its setting permits.
#[test]
fn collapsed_text_stays_a_mapping_of_its_file() {
    let Ok(shared) = tempfile::tempdir_in("/dev/shm") else {
        eprintln!("/dev/shm is not writable: not tested");
        return;
    };
    let place = Place(shared);
    // The segment of text begins at the same place in the file and in a huge page.
    let options = ["-O1", "-Wl,-z,max-page-size=0x200000,-z,separate-code", "-no-pie"];
    let program = place.compile("gcc", "program", TEXT, &options);
    let ran = place.run("huge-text-collapse", &[&program]);
    if ran.code == Some(6) {
        assert!(ran.err.contains("no huge pages for the program's file"), "{}", ran.err);
        eprintln!("this kernel does not collapse files: not tested");
        return;
    }
    assert_eq!((ran.code, &*ran.err), (Some(5), ""));
    let script = "cat /proc/$PPID/maps";
    let source = TEXT.replace("return kib >=", "if (system(words[2])) return 9; return kib >=");
    let program = place.compile("gcc", "maps", &source, &options);
    let maps = place.run("huge-text-collapse", &[&program, "0", script]).out;
    let text: Vec<_> = maps.lines().filter(|line| line.contains(" r-xp ")).collect();
    assert!(text.iter().any(|line| line.ends_with("/maps")), "{maps}");
    // Anonymous memory has an empty name.
    assert!(text.iter().all(|line| line.split_whitespace().count() > 5), "{maps}");
}

/// A breakpoint of a uprobe in a copy would end the program.
#[test]
fn text_with_changed_pages_is_not_copied() {
    let place = Place::new();
    let source = TEXT
        .replace("\".fill 700000, 1, 0x90\"", "\".fill 700000, 1, 0x90; jmp 1f; .quad main; 1:\"");
    assert_ne!(source, TEXT);
    let options = ["-O1", "-fPIE", "-pie", "-Wl,-z,notext", "-w"];
    let program = place.compile("gcc", "program", &source, &options);
    let ran = place.run("huge-text", &[&program]);
    assert_eq!(ran.code, Some(6));
    let warning =
        "faultless: warning: huge-text: breakpoints or relocations have changed the text: ";
    assert!(ran.err.starts_with(warning) && ran.err.lines().count() == 1, "{}", ran.err);
}

#[test]
fn exceptions_unwind_through_moved_text() {
    let place = Place::new();
    let source = TEXT
        .replace("int main(", "int inner(")
        .replace("return sum;", "if (n == 3) throw 3; return sum;")
        + "int main(int count, char **words) {
            int caught = 0;
            for (int i = 0; i < 100; i++) try { f4(i % 4); } catch (int three) { caught += three; }
            return caught == 75 ? inner(1, words) : 7;
        }";
    let place_of = place.path("program");
    let file = place.path("program.cc");
    std::fs::write(&file, format!("{RESIDENT}{source}")).expect("written");
    let built = Command::new("g++").arg("-O1").arg("-o").arg(&place_of).arg(&file).status();
    if !built.is_ok_and(|status| status.success()) {
        eprintln!("g++ is not installed: not tested");
        return;
    }
    let program = place_of.to_str().expect("text");
    assert_eq!(place.run("huge-text", &[program]).code, Some(5));
}

#[test]
fn perf_reports_symbols_of_moved_text() {
    let place = Place::new();
    let program = place.compile("gcc", "program", TEXT, &["-O1"]);
    let data = place.path("perf.data");
    let data = data.to_str().expect("text");
    let record = ["perf", "record", "-q", "-e", "cpu-clock", "-o", data, "--"];
    let moved = place.run("huge-text", &[&record[..], &[&program, "200000000"]].concat());
    if moved.code != Some(5) {
        eprintln!("perf cannot record here: not tested: {}", moved.err);
        return;
    }
    let report = Command::new("perf")
        .args(["report", "--stdio", "--sort", "dso,symbol", "-i", data])
        .output()
        .expect("perf started before");
    let report = String::from_utf8_lossy(&report.stdout);
    let line = report.lines().find(|line| !line.is_empty() && !line.starts_with('#'));
    assert!(
        line.is_some_and(|line| line.contains(" program ") && line.contains(" f4 ")),
        "{report}"
    );
}
