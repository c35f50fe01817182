//! The preloaded library in programs that populated pages or further system calls could harm.

mod common;

use common::Ran;
use common::program::{Place, compilers};
use std::path::PathBuf;
use std::process::Command;

/// Compiles the program of `main` for each C library, and runs the program with `--report`. Checks
/// the status of the program, and that the report has `line`.
#[track_caller]
fn reported(advice: &str, main: &str, status: i32, line: &str) {
    let place = Place::new();
    for compiler in compilers() {
        let program = place.compile(compiler, compiler, main, &["-O1", "-pthread", "-w"]);
        let options = ["--apply", advice, "--report"];
        let ran = Ran::of(&mut place.command(&options, &[&program]));
        assert_eq!(ran.code, Some(status), "{compiler} with {advice}: {}", ran.err);
        assert!(ran.err.contains(line), "{compiler} with {advice}: no {line:?} in {}", ran.err);
    }
}

/// A seccomp filter with the calls of `malloc` and `exit`. Another call ends the program by a
/// signal.
const FILTER: &str = r"
#include <sys/prctl.h>
#include <sys/syscall.h>
struct step { unsigned short code; unsigned char then, otherwise; unsigned value; };
struct steps { unsigned short count; struct step *all; };
static void restrict_calls(int by_prctl) {
    static const int calls[] = { SYS_mmap, SYS_munmap, SYS_brk, SYS_mremap, SYS_mprotect,
        SYS_madvise, SYS_futex, SYS_exit, SYS_exit_group };
    struct step all[32] = { { 0x20, 0, 0, 0 } };
    int count = 1;
    for (int i = 0; i < sizeof calls / sizeof *calls; i++) {
        all[count++] = (struct step){ 0x15, 0, 1, calls[i] };
        all[count++] = (struct step){ 0x06, 0, 0, 0x7fff0000 };
    }
    all[count++] = (struct step){ 0x06, 0, 0, 0x80000000 };
    struct steps filter = { count, all };
    if (prctl(38, 1, 0, 0, 0)) exit(81);
    if (by_prctl ? prctl(22, 2, &filter) : syscall(SYS_seccomp, 1, 0, &filter)) exit(82);
}
void *volatile keep;
";

#[test]
fn operations_end_before_a_seccomp_filter_of_the_program() {
    let refused = "populate: refused 2 times: the program has installed a seccomp filter";
    for by_prctl in [0, 1] {
        let main = format!(
            "{FILTER}int main(void) {{
                /* Questions to the kernel are no filters. */
                if (!prctl(22, 2, 0) || !syscall(SYS_seccomp, 1, 0, 0)) return 1;
                GROWS(8, MAP(8 << 20));
                keep = MAP(80 << 20);
                restrict_calls({by_prctl});
                for (int i = 0; i < 2; i++) memset(keep = malloc(8 << 20), 1, 8 << 20);
                return 5;
            }}"
        );
        reported("populate=1M", &main, 5, refused);
        reported("populate=1M,prefault-ahead", &main, 5, refused);
    }
}

/// A new record of the report needs calls that the filter forbids.
#[test]
fn child_has_its_record_before_the_filter() {
    let main = format!(
        "{FILTER}int main(void) {{
            int status;
            /* The first call of glibc's malloc reads random numbers. */
            keep = malloc(1);
            if (!fork()) {{
                restrict_calls(1);
                keep = malloc(8 << 20);
                exit(0);
            }}
            wait(&status);
            return status ? 6 : 5;
        }}"
    );
    reported("populate=1M", &main, 5, "populate: refused 1 time: the program has installed");
}

/// Ends with 5 if the library stops to populate and has no helper thread after `USED`.
const USER_FAULTS: &str = r#"
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
void *volatile keep;
static int threads(void) {
    char line[256];
    int count = 0;
    FILE *file = fopen("/proc/self/status", "r");
    while (fgets(line, sizeof line, file)) sscanf(line, "Threads: %d", &count);
    fclose(file);
    return count;
}
int main(void) {
    GROWS(16, MAP(16 << 20));
    MAP(80 << 20);
    if (threads() != 2) return 1;
    USED;
    GROWS(0, keep = malloc(16 << 20));
    MAP(80 << 20);
    /* Without its end, the helper exists for 500 ms. */
    for (int i = 0; i < 30 && threads() != 1; i++) usleep(10000);
    return threads() == 1 ? 5 : 2;
}"#;

/// The program fills pages at their first touch. A failed call ends the operations, too.
#[test]
fn operations_end_before_userfaultfd() {
    let refused = "populate: refused 2 times: the program provides the contents of pages by \
                   userfaultfd: ";
    for used in [
        "syscall(SYS_userfaultfd, O_CLOEXEC)",
        "ioctl(open(\"/dev/null\", O_RDWR), 0xc018aa3f, 0)",
        "syscall(SYS_ioctl, open(\"/dev/null\", O_RDWR), 0xc018aa3f, 0)",
    ] {
        let main = USER_FAULTS.replace("USED", used);
        reported("populate=1M,prefault-ahead", &main, 5, refused);
    }
}

/// A library that replaces some functions of glibc's allocator. Its blocks are in a pool, before
/// which no memory is mapped.
const PARTS: &str = r#"
extern void __libc_free(void *);
static char *pool;
static size_t used;
int posix_memalign(void **block, size_t align, size_t bytes) {
    if (!pool) {
        pool = (char *)MAP(33 << 20) + (1 << 20);
        munmap(pool - (1 << 20), 1 << 20);
    }
    size_t at = (used + align - 1) & -align;
    used = at + bytes;
    *block = pool + at;
    return 0;
}
void free(void *block) {
    if (!pool || (char *)block < pool || (char *)block >= pool + (32 << 20)) __libc_free(block);
}
"#;

#[test]
fn library_that_replaces_parts_of_the_allocator_gets_its_calls() {
    let place = Place::new();
    let parts = place.compile("gcc", "libparts.so", PARTS, &["-shared", "-fPIC", "-w"]);
    let main = "int main(void) {
        void *block, *watched = malloc(80 << 20);
        for (int i = 0; i < 100; i++) {
            if (!watched || posix_memalign(&block, 64, 1000)) return 1;
            free(block);
        }
        GROWS(16, block = malloc(16 << 20));
        free(block), free(watched);
        return 5;
    }";
    let program = place.compile("gcc", "program", main, &["-O0"]);
    let mut run = place.command(&["--apply", "populate=1M,prefault-ahead"], &[&program]);
    let ran = Ran::of(run.env("LD_PRELOAD", parts));
    assert_eq!((ran.code, &*ran.err), (Some(5), ""));
}

/// The older table of an ELF file lists all symbols, also those that the library uses.
#[test]
fn used_symbol_of_another_library_is_no_function_of_the_library() {
    let library = "void *allocated(size_t bytes) { return malloc(bytes); }";
    let main = "void *allocated(size_t);
    int main(void) {
        GROWS(8, free(allocated(100)); malloc(8 << 20));
        return 5;
    }";
    let place = Place::new();
    for compiler in compilers() {
        let options = ["-O1", "-shared", "-fPIC", "-fno-builtin", "-Wl,--hash-style=sysv"];
        let library = place.compile(compiler, "libused.so", library, &options);
        let program = place.compile(compiler, compiler, main, &["-O0", &library]);
        let ran = place.run("populate=1M", &[&program]);
        assert_eq!((ran.code, &*ran.err), (Some(5), ""), "{compiler}");
    }
}

/// A program with 8.4 MiB of text. Ends with 5 if its text stays after advice that discards pages,
/// and memory in front of the text and in its place is discarded. The program gives advice by the
/// function `ADVISE`. Before version 6.13, Linux discards no pages for `process_madvise`.
const DISCARDED: &str = r#"
#include <dlfcn.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#define HUGE (2UL << 20)
typedef ssize_t (*process_call)(int, const struct iovec *, size_t, int, unsigned);
static int of_process(process_call call, char *start, size_t len, int advice) {
    struct iovec ranges[2] = { { start, len / 2 }, { start + len / 2, len - len / 2 } };
    int own = syscall(434, getpid(), 0);
    ssize_t given = call(own, ranges, 2, advice, 0);
    int code = errno;
    close(own);
    errno = code;
    return given == len ? 0 : -1;
}
static ssize_t call_by_number(int own, const struct iovec *ranges, size_t count, int advice, unsigned flags) {
    return syscall(440, own, ranges, count, advice, flags);
}
static int by_process(char *start, size_t len, int advice) {
    return of_process((process_call)dlsym(RTLD_DEFAULT, "process_madvise"), start, len, advice);
}
static int by_process_number(char *start, size_t len, int advice) {
    return of_process(call_by_number, start, len, advice);
}
static int by_number(char *start, size_t len, int advice) {
    return syscall(SYS_madvise, start, len, advice);
}
static int is_zero(char *page) { return page[0] == 0 && page[4095] == 0; }
int main(void) {
    if (getpid() == 1) __asm__ volatile(".fill 8800000, 1, 0x90");
    char *text = (char *)(((unsigned long)main + 2 * HUGE) & -HUGE);
    if (huge((unsigned long)text) < 2048) return 6;
    int advices[] = { MADV_DONTNEED, MADV_FREE, 20, 21, 24 };
    for (int i = 0; i < 5; i++) {
        if (ADVISE(text, HUGE, advices[i]) || ADVISE(text + 4096, 4096, advices[i])) return 7;
        if (text[0] != (char)0x90 || text[4097] != (char)0x90) return 8;
    }
    if (ADVISE(text, HUGE, 77) != -1 || errno != EINVAL) return 9;
    if (OLD_KERNEL && ADVISE((char *)MAP(HUGE), HUGE, MADV_DONTNEED)) return 5;
    /* The pages are the program's from here on. */
    char *own = mmap(text, HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (own != text) return 10;
    memset(own, 1, HUGE);
    if (ADVISE(own, HUGE + 8192, MADV_DONTNEED) || !is_zero(own) || !is_zero(own + HUGE - 4096))
        return 11;
    return own[HUGE] == (char)0x90 ? 5 : 12;
}"#;

#[test]
fn advice_that_discards_pages_keeps_copied_text() {
    let place = Place::new();
    for compiler in compilers() {
        for (advise, old) in
            [("madvise", 0), ("by_number", 0), ("by_process", 1), ("by_process_number", 1)]
        {
            let (advise, old) = (format!("-DADVISE={advise}"), format!("-DOLD_KERNEL={old}"));
            let options = ["-O1", "-w", &advise, &old];
            let program = place.compile(compiler, compiler, DISCARDED, &options);
            let ran = place.run("huge-text", &[&program]);
            assert_eq!((ran.code, &*ran.err), (Some(5), ""), "{compiler} {advise}");
        }
    }
}

/// A program with 8.4 MiB of text. A page of the text changes after the library has copied the
/// text, as by the breakpoint of a debugger: the library calls this `dl_iterate_phdr` before the
/// copy is put in place. `dlvsym` has no hook. Ends with 5 if the change stays, and with 4 if the
/// library makes no copy.
const CHANGED: &str = r#"
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#define HUGE (2UL << 20)
int main(int count);
static char *place(void) { return (char *)(((unsigned long)main + 2 * HUGE) & -HUGE) + 5000; }
static int busy, changed;
/* Whether an executable mapping of a huge page or more has no file. */
static int is_copied(void) {
    char line[512];
    int found = 0;
    unsigned long start, end, inode;
    FILE *file = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "%lx-%lx r-xp %*x %*s %lu", &start, &end, &inode) == 3)
            found |= inode == 0 && end - start >= HUGE;
    fclose(file);
    return found;
}
typedef int visitor(struct dl_phdr_info *, size_t, void *);
int dl_iterate_phdr(visitor visit, void *state) {
    int (*next)(visitor, void *) = dlvsym(RTLD_NEXT, "dl_iterate_phdr", VERSION);
    if (!busy && !changed) {
        busy = 1;
        if (is_copied()) {
            int memory = open("/proc/self/mem", O_RDWR);
            changed = pwrite(memory, "\x91", 1, (unsigned long)place());
            close(memory);
        }
        busy = 0;
    }
    return next(visit, state);
}
int main(int count) {
    if (count == 77) __asm__ volatile(".fill 8800000, 1, 0x90");
    if (!changed) return 4;
    return changed == 1 && *place() == (char)0x91 ? 5 : 6;
}"#;

#[test]
fn text_that_changes_during_the_copy_stays() {
    let place = Place::new();
    let version = if cfg!(target_arch = "x86_64") { "2.2.5" } else { "2.17" };
    let version = format!("-DVERSION=\"GLIBC_{version}\"");
    let program = place.compile("gcc", "program", CHANGED, &["-O1", "-rdynamic", "-w", &version]);
    let ran = Ran::of(&mut place.command(&["--apply", "huge-text", "--report"], &[&program]));
    if ran.code == Some(4) {
        eprintln!("the library makes no copy on this host: not tested: {}", ran.err);
        return;
    }
    assert_eq!(ran.code, Some(5), "{}", ran.err);
    let line = "huge-text: refused 1 time: breakpoints or relocations have changed the text";
    assert!(ran.err.contains(line), "{}", ran.err);
}

/// The path and the contents of a file of the kernel.
type File<'a> = (&'a str, &'a str);

/// Runs a program with these files of the kernel.
/// Returns `None` without the permission to replace files of the kernel.
fn with_files(place: &Place, program: &[&str], files: &[File<'_>]) -> Option<Ran> {
    let mut mounts = Vec::new();
    for (index, (path, text)) in files.iter().enumerate() {
        let file = place.path(&format!("kernel-{index}"));
        std::fs::write(&file, text).expect("written");
        mounts.push((*path, file));
    }
    with_mounts(place, program, &mounts)
}

/// Runs a program with other files or directories at these paths, in which a shell expands
/// variables. Returns `None` without the permission to mount.
fn with_mounts(place: &Place, program: &[&str], mounts: &[(&str, PathBuf)]) -> Option<Ran> {
    let mut script = String::from("set -e\n");
    for (path, file) in mounts {
        script += &format!("mount --bind {} {path} || exit 77\n", file.display());
    }
    script += "exec \"$@\"\n";
    let run = place.command(&["--apply", "populate=1M"], program);
    let mut unshare = Command::new("unshare");
    unshare.args(["-r", "-m", "sh", "-c", &script, "sh"]).arg(run.get_program());
    unshare.args(run.get_args()).env_remove("LD_PRELOAD");
    let ran = Ran::of(unshare.env("XDG_CACHE_HOME", place.path("cache")));
    if matches!(ran.code, Some(1 | 77 | 127)) {
        eprintln!("no permission to mount: not tested: {}", ran.err);
        return None;
    }
    Some(ran)
}

#[test]
fn blocks_beyond_half_of_the_available_memory_are_not_populated() {
    let place = Place::new();
    let main = "int main(void) {
        GROWS(8, MAP(8 << 20));
        GROWS(0, calloc(24 << 20, 1));
        for (int i = 0; i < 8; i++) GROWS(4, MAP(4 << 20));
        return 5;
    }";
    let program = place.compile("gcc", "program", main, &["-O0"]);
    let host = ("/proc/meminfo", "MemTotal: 99999999 kB\nMemFree: 9 kB\nMemAvailable: 32768 kB\n");
    let Some(ran) = with_files(&place, &[&program], &[host]) else { return };
    let warning = "faultless: warning: populate: refused 1 time: the block is larger than half of \
                   the available memory: ";
    assert_eq!(ran.code, Some(5), "{}", ran.err);
    assert!(ran.err.starts_with(warning) && ran.err.lines().count() == 1, "{}", ran.err);
}

/// Runs a program that maps 8 MiB in the control group of `/proc/PID/cgroup`, with these files
/// below `/sys/fs/cgroup`. Checks how many MiB become resident. Returns false without the
/// permission to mount.
#[track_caller]
fn populated_in_group(group: &str, files: &[File<'_>], expected: &str) -> bool {
    let place = Place::new();
    let main = "int main(int count, char **words) {
        GROWS(atoi(words[1]), MAP(8 << 20));
        return 5;
    }";
    let program = place.compile("gcc", "program", main, &["-O0"]);
    let (own, root) = (place.path("own"), place.path("groups"));
    std::fs::write(&own, group).expect("written");
    std::fs::create_dir(&root).expect("a directory");
    for (path, text) in files {
        let file = root.join(path);
        std::fs::create_dir_all(file.parent().expect("below the root")).expect("a directory");
        std::fs::write(file, text).expect("written");
    }
    let mounts = [("/proc/$$/cgroup", own), ("/sys/fs/cgroup", root)];
    let Some(ran) = with_mounts(&place, &[&program, expected], &mounts) else { return false };
    assert_eq!(ran.code, Some(5), "{group:?} {files:?}: {}", ran.err);
    let refused = ran.err.contains("the block is larger than half of the available memory");
    assert_eq!(refused, expected == "0", "{group:?} {files:?}: {}", ran.err);
    true
}

#[test]
fn limits_of_control_groups_of_version_two_bound_blocks() {
    const MIB_10: &str = "10485760\n";
    const MIB_20: &str = "20971520\n";
    const MIB_32: &str = "33554432\n";
    const CACHE: &str = "anon 1\ninactive_file 6291456\nactive_file 2097152\n";
    let own = "0::/a/b\n";
    let zero = "0\n";
    let cases: &[(&str, &[File<'_>], &str)] = &[
        (own, &[("a/b/memory.max", MIB_10), ("a/b/memory.current", zero)], "0"),
        (own, &[("a/b/memory.max", "max\n"), ("a/b/memory.current", MIB_32)], "8"),
        (own, &[("a/b/memory.max", MIB_20), ("a/b/memory.current", zero)], "8"),
        // The group above has the lower limit, or only the group above has a limit.
        (
            own,
            &[
                ("a/b/memory.max", MIB_32),
                ("a/b/memory.current", zero),
                ("a/memory.max", MIB_20),
                ("a/memory.current", MIB_10),
            ],
            "0",
        ),
        (
            own,
            &[
                ("a/b/memory.max", "max\n"),
                ("a/b/memory.current", zero),
                ("a/memory.max", MIB_10),
                ("a/memory.current", zero),
            ],
            "0",
        ),
        // Pages of files are available.
        (own, &[("a/b/memory.max", MIB_32), ("a/b/memory.current", MIB_20)], "0"),
        (
            own,
            &[
                ("a/b/memory.max", MIB_32),
                ("a/b/memory.current", MIB_20),
                ("a/b/memory.stat", CACHE),
            ],
            "8",
        ),
        // The kernel delays a group beyond `memory.high`.
        (
            own,
            &[
                ("a/b/memory.max", "max\n"),
                ("a/b/memory.high", MIB_10),
                ("a/b/memory.current", zero),
            ],
            "0",
        ),
        (
            own,
            &[
                ("a/b/memory.max", MIB_10),
                ("a/b/memory.high", MIB_32),
                ("a/b/memory.current", zero),
            ],
            "0",
        ),
        // The root of a container's namespace has the limit of the container.
        ("0::/\n", &[("memory.max", MIB_10), ("memory.current", zero)], "0"),
    ];
    for (group, files, expected) in cases {
        if !populated_in_group(group, files, expected) {
            return;
        }
    }
}

#[test]
fn limits_of_control_groups_of_version_one_bound_blocks() {
    const MIB_10: &str = "10485760\n";
    const NO_LIMIT: &str = "9223372036854771712\n";
    let own = "5:cpu,memory:/a/b\n1:name=systemd:/c\n0::/d\n";
    let (limit, usage) = ("memory/a/b/memory.limit_in_bytes", "memory/a/b/memory.usage_in_bytes");
    let cases: &[(&[File<'_>], &str)] = &[
        (&[(limit, MIB_10), (usage, "0\n")], "0"),
        (&[(limit, NO_LIMIT), (usage, "0\n")], "8"),
        (
            &[
                (limit, NO_LIMIT),
                (usage, "0\n"),
                ("memory/memory.limit_in_bytes", MIB_10),
                ("memory/memory.usage_in_bytes", "0\n"),
            ],
            "0",
        ),
        // The memory belongs to version 1, also if groups of version 2 exist.
        (&[("d/memory.max", MIB_10), ("d/memory.current", "0\n")], "8"),
    ];
    for (files, expected) in cases {
        if !populated_in_group(own, files, expected) {
            return;
        }
    }
}
