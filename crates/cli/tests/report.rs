//! `run --report`, and warnings about refused operations of the preloaded library.

mod common;

use common::program::{Place, compilers};
use common::{Ran, json_lines};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

/// Runs a program of `main` with `--report` and `--json`, with each C library. Calls `check` with
/// the end of the program and the JSON lines.
#[track_caller]
fn reported(advice: &str, main: &str, check: impl Fn(&Ran, &[Value])) {
    let place = Place::new();
    let json = place.path("report.json");
    for compiler in compilers() {
        let program = place.compile(compiler, compiler, main, &["-O1", "-pthread"]);
        let options = ["--apply", advice, "--report", "--json", json.to_str().expect("text")];
        let ran = Ran::of(&mut place.command(&options, &[&program, "0"]));
        let lines = json_lines(&fs::read_to_string(&json).unwrap_or_default());
        println!("{compiler}: {}{}", ran.out, ran.err);
        check(&ran, &lines);
    }
}

/// Returns the values of a metric, sorted.
fn values(lines: &[Value], metric: &str) -> Vec<u64> {
    let of = |line: &&Value| line["metric"] == metric;
    let mut values: Vec<_> =
        lines.iter().filter(of).map(|line| line["value"].as_u64().expect("a count")).collect();
    values.sort_unstable();
    values
}

/// Children and executed programs have their own counts, which stay after a kill.
#[test]
fn report_has_each_process_also_after_a_kill() {
    let main = r#"
    #include <signal.h>
    void *volatile keep;
    int main(int count, char **words) {
        int status, depth = atoi(words[1]);
        keep = malloc(32 << 20);
        if (depth) _exit(5);
        for (int i = 0; i < 2; i++) {
            pid_t child = fork();
            if (!child) {
                keep = malloc(8 << 20), keep = malloc(8 << 20);
                raise(i ? SIGKILL : SIGSEGV);
            }
            if (waitpid(child, &status, 0) != child || !WIFSIGNALED(status)) return 6;
        }
        execl(words[0], words[0], "1", (char *)0);
        return 7;
    }"#;
    reported("populate=4M", main, |ran, lines| {
        assert_eq!(ran.code, Some(5));
        assert_eq!(values(lines, "populated_blocks"), [1, 1, 2, 2]);
        let bytes = values(lines, "populated_bytes");
        assert!(
            bytes.iter().zip([16, 16, 32, 32]).all(|(got, mib)| got.div_ceil(1 << 20) == mib),
            "{bytes:?}"
        );
        assert!(ran.err.starts_with("faultless: the preloaded library in 4 processes:\n"));
        assert_eq!(
            ran.err.matches("    populate: 2 blocks of 16.0 MiB\n").count(),
            2,
            "{}",
            ran.err
        );
    });
}

/// The child of a daemon has no descriptor, no terminal and no parent.
#[test]
fn daemons_are_counted_and_programs_get_no_descriptor() {
    let main = r#"
    #include <fcntl.h>
    void *volatile keep;
    int main(void) {
        if (open("/dev/null", O_RDONLY) != 3) return 6;
        int ends[2], status;
        if (pipe(ends)) return 7;
        if (!fork()) {
            setsid();
            if (!fork()) {
                for (int file = 0; file < 1024; file++) if (file != ends[1]) close(file);
                if (chdir("/")) _exit(1);
                keep = malloc(16 << 20);
                if (open("/dev/null", O_RDONLY) != 0) _exit(1);
                _exit(write(ends[1], "x", 1) != 1);
            }
            _exit(0);
        }
        close(ends[1]);
        char byte;
        wait(&status);
        return read(ends[0], &byte, 1) == 1 ? 5 : 8;
    }"#;
    reported("populate=1M,prefault-ahead,huge-text", main, |ran, lines| {
        assert_eq!(ran.code, Some(5));
        assert_eq!(values(lines, "populated_blocks").iter().sum::<u64>(), 1);
    });
}

/// Each resident page of the block is from a fault of the program, or populated by the helper. The
/// faults of a thread do not include those of the helper.
#[test]
fn bytes_populated_ahead_are_the_pages_without_a_fault() {
    let main = r#"
    #include <sys/resource.h>
    #include <time.h>
    static long faults(void) {
        struct rusage usage;
        getrusage(RUSAGE_THREAD, &usage);
        return usage.ru_minflt;
    }
    static unsigned char states[64 << 8];
    int main(void) {
        char *block = MAP(64 << 20);
        struct timespec pause = { 0, 1000000 }, end = { 0, 200000000 };
        long before = faults(), resident = 0;
        for (long at = 0; at < 16 << 20; at += 4096) {
            block[at] = 1;
            if (at % (64 << 10) == 0) nanosleep(&pause, 0);
        }
        long faulted = faults() - before;
        nanosleep(&end, 0);
        if (mincore(block, 64 << 20, states)) return 6;
        for (int i = 0; i < 64 << 8; i++) resident += states[i] & 1;
        printf("%ld %ld\n", resident, faulted);
        return 5;
    }"#;
    reported("prefault-ahead=4M,no-thp", main, |ran, lines| {
        assert_eq!(ran.code, Some(5));
        assert_eq!(values(lines, "watched_blocks"), [1]);
        assert_eq!(values(lines, "unwatched_blocks"), [0]);
        let [bytes] = values(lines, "prefaulted_bytes")[..] else { panic!("{lines:?}") };
        let [resident, faulted] = ran.out.split_whitespace().collect::<Vec<_>>()[..] else {
            panic!("{}", ran.out)
        };
        let page = |text: &str| text.parse::<u64>().expect("a number");
        assert!(bytes > 4 << 20, "{bytes}");
        let (known, resident) = (bytes / 4096 + page(faulted), page(resident));
        assert!(known.abs_diff(resident) <= 40, "{known} of {resident} pages");
        let size = format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
        let line = format!("    prefault-ahead: {size} populated in 1 block\n");
        assert!(ran.err.contains(&line), "{}", ran.err);
    });
}

#[test]
fn watched_blocks_are_counted_up_to_the_number_of_places() {
    let main = r"
    int main(void) {
        static void *blocks[40];
        for (int i = 0; i < 40; i++) blocks[i] = MAP(5 << 20);
        for (int i = 0; i < 40; i++) munmap(blocks[i], 5 << 20);
        for (int i = 0; i < 3; i++) blocks[i] = MAP(5 << 20);
        return 5;
    }";
    reported("prefault-ahead", main, |ran, lines| {
        assert_eq!(ran.code, Some(5));
        assert_eq!(values(lines, "watched_blocks"), [35]);
        assert_eq!(values(lines, "unwatched_blocks"), [8]);
        let line = "    prefault-ahead: 8 blocks not watched, more than 32 at a time\n";
        assert!(ran.err.contains(line), "{}", ran.err);
        assert!(ran.err.contains(" in 35 blocks\n"), "{}", ran.err);
    });
}

#[test]
fn populated_files_are_counted() {
    let main = r"
    #include <fcntl.h>
    #include <sys/syscall.h>
    int main(int count, char **words) {
        FILE *file = tmpfile();
        if (!file || posix_fallocate(fileno(file), 0, 8 << 20)) return 6;
        /* Holes of a file in memory stay. */
        int sparse = syscall(SYS_memfd_create, (long)words[0], 0L);
        if (sparse < 0 || ftruncate(sparse, 8 << 20) || write(sparse, words[0], 1) != 1) return 7;
        mmap(0, 8 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, sparse, 0);
        for (int i = 0; i < 2; i++) mmap(0, 8 << 20, PROT_READ, MAP_SHARED, fileno(file), 0);
        return 5;
    }";
    reported("populate-files=1M", main, |ran, lines| {
        assert_eq!(ran.code, Some(5));
        assert_eq!(values(lines, "populated_files"), [2]);
        assert_eq!(values(lines, "populated_file_bytes"), [16 << 20]);
        assert!(ran.err.contains("    populate-files: 2 mappings of 16.0 MiB\n"), "{}", ran.err);
    });
}

#[test]
fn block_that_realloc_keeps_is_not_populated_again() {
    let main = r"int main(void) {
        void *block = malloc(8 << 20);
        block = realloc(block, (8 << 20) + 1);
        free(block);
        return 5;
    }";
    reported("populate=1M", main, |ran, lines| {
        assert_eq!(ran.code, Some(5));
        assert_eq!(values(lines, "resident_blocks"), [1]);
        assert_eq!(values(lines, "populated_blocks"), [1]);
    });
}

/// A program that touches 4 MiB of a watched block in order, after `BEFORE`.
const TOUCHES: &str = r"
#include <time.h>
#define SIZE (16 << 20)
int main(void) {
    struct timespec pause = { 0, 1000000 };
    char *block = MAP(SIZE);
    BEFORE
    for (long at = 0; at < 4 << 20; at += 4096) {
        block[at] = 1;
        if (at % (64 << 10) == 0) nanosleep(&pause, 0);
    }
    return 5;
}";

#[test]
fn huge_page_advice_keeps_the_watch_and_a_moved_mapping_ends_it() {
    let advice = TOUCHES.replace("BEFORE", "if (madvise(block, SIZE, MADV_HUGEPAGE)) return 6;");
    reported("prefault-ahead=4M,no-thp", &advice, |ran, lines| {
        assert_eq!(ran.code, Some(5));
        assert!(values(lines, "prefaulted_bytes")[0] > 0, "{}", ran.err);
    });
    let moved = "int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        char *other = mmap(0, SIZE, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (mremap(other, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, block) != block) return 6;";
    reported("prefault-ahead=4M,no-thp", &TOUCHES.replace("BEFORE", moved), |ran, lines| {
        assert_eq!(ran.code, Some(5));
        assert_eq!(values(lines, "prefaulted_bytes"), [0], "{}", ran.err);
    });
}

/// A program with 2.8 MiB of text and more.
const TEXT: &str = r#"int main(void) {
    if (getpid() == 1) __asm__ volatile(".fill 4400000, 1, 0x90");
    return huge((unsigned long)main + 2200000) >= 2048 ? 5 : 6;
}"#;

#[test]
fn moved_text_is_counted() {
    reported("huge-text", TEXT, |ran, lines| {
        assert_eq!(ran.code, Some(5));
        let (collapsed, copied) =
            (values(lines, "collapsed_segments"), values(lines, "copied_segments"));
        assert_eq!(collapsed[0] + copied[0], 1);
        assert!(ran.err.contains(" huge pages\n"), "{}", ran.err);
    });
}

/// The kernel refuses huge pages to a program with `no-thp`.
#[test]
fn refused_operations_are_reported_with_reason_and_remedy() {
    reported("huge-text,no-thp", TEXT, |ran, lines| {
        assert_eq!((ran.code, values(lines, "refused")), (Some(6), vec![1]));
        let line = "    huge-text: refused 1 time: the kernel has no huge pages for a copy of the \
                    text (error 22): write madvise to ";
        assert!(ran.err.contains(line), "{}", ran.err);
        let refused = lines.iter().find(|line| line["metric"] == "refused").expect("a line");
        assert_eq!(refused["params"]["code"], 22);
    });
}

/// The program gets a warning before its first line, also by exec; its children get none.
#[test]
fn refused_operations_are_warnings_without_a_report() {
    let place = Place::new();
    let program = place.compile("gcc", "program", TEXT, &["-O1"]);
    for (script, warnings) in [("echo first >&2; exec P", 1), ("P & wait; P; true", 0)] {
        let script = script.replace('P', &program);
        let ran = place.run("huge-text,no-thp", &["sh", "-c", &script]);
        let warning = "faultless: warning: huge-text: the kernel has no huge pages for a copy";
        assert_eq!(ran.err.matches(warning).count(), warnings, "{}", ran.err);
        assert_eq!(ran.err.starts_with("first\n"), warnings == 1, "{}", ran.err);
    }
    // A closed standard error is no obstacle.
    let script = format!("exec 2>&-; exec {program}");
    assert_eq!(place.run("huge-text,no-thp", &["sh", "-c", &script]).code, Some(6));
}

#[test]
fn signals_and_status_pass_through_a_report() {
    let place = Place::new();
    for (name, signal) in [
        ("TERM", Signal::SIGTERM),
        ("USR1", Signal::SIGUSR1),
        ("USR2", Signal::SIGUSR2),
        ("WINCH", Signal::SIGWINCH),
        ("CONT", Signal::SIGCONT),
    ] {
        let script =
            format!("trap 'exit 9' {name}; echo ready; for i in $(seq 500); do sleep 0.01; done");
        let mut run = place.command(&["--apply", "populate", "--report"], &["sh", "-c", &script]);
        let mut child =
            run.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it starts");
        let mut first = String::new();
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        output.read_line(&mut first).expect("text");
        common::send(&child, signal);
        assert_eq!(child.wait().expect("it ends").code(), Some(9), "{name}");
    }
    let ended = |script| {
        Ran::of(&mut place.command(&["--apply", "populate", "--report"], &["sh", "-c", script]))
    };
    assert_eq!(ended("exit 7").code, Some(7));
    assert_eq!(ended("kill -KILL $$").code, Some(137));
    let ran = ended("true");
    let line = "  1 process without large blocks: sh\n";
    assert!(ran.err.ends_with(line) && ran.code == Some(0), "{}", ran.err);
}

#[test]
fn ignored_sigpipe_stays_ignored() {
    let place = Place::new();
    for report in [&[][..], &["--report"]] {
        for (trap, ignored) in [("trap '' PIPE; ", true), ("", false)] {
            // Bit 12 of the mask is SIGPIPE. Each program of the test starts without the bit.
            let run = place.command(
                &[&["--apply", "populate"][..], report].concat(),
                &["sh", "-c", "grep SigIgn /proc/self/status"],
            );
            let mut sh = std::process::Command::new("env");
            sh.args(["--default-signal=PIPE", "sh", "-c", &format!("{trap}exec \"$@\""), "sh"]);
            sh.arg(run.get_program()).args(run.get_args()).env_remove("LD_PRELOAD");
            let ran = Ran::of(sh.env("XDG_CACHE_HOME", place.path("cache")));
            let mask = ran.out.trim().rsplit('\t').next().unwrap_or_default();
            let mask = u64::from_str_radix(mask, 16).expect("a mask");
            assert_eq!((mask >> 12) & 1 == 1, ignored, "{report:?}: {}", ran.out);
        }
    }
}

#[test]
fn report_without_the_library_is_explained() {
    let place = Place::new();
    let ran = Ran::of(&mut place.command(&["--apply", "malloc-arenas=2", "--report"], &["true"]));
    assert_eq!(ran.code, Some(0));
    let why = "faultless: no report: the advice does not use the preloaded library\n";
    assert_eq!(ran.err, why);
    let options = ["--apply", "populate", "--json", "-"];
    let error = Ran::of(&mut place.command(&options, &["true"])).fails(2);
    assert!(error.contains("standard output belongs to the program"), "{error}");
}
