//! Warnings of the preloaded library about operations that are refused while the program runs: the
//! program prints them at its end.

mod common;

use common::Ran;
use common::program::{Place, compilers};
use std::fs;
use std::io::Write;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// `refuse` lets the kernel refuse an advice of `madvise` from then on, as a filter of a container
/// does: the library does not detect a direct call of the kernel. `refused` is a program whose
/// blocks are refused.
const REFUSE: &str = r"
#include <sys/prctl.h>
#include <sys/syscall.h>
struct step { unsigned short code; unsigned char then, otherwise; unsigned value; };
struct steps { unsigned short count; struct step *all; };
static void refuse(unsigned advice, unsigned code) {
    /* The number of the call, and the third argument. The results: an error, and permission. */
    struct step all[] = {
        { 0x20, 0, 0, 0 }, { 0x15, 0, 3, SYS_madvise },
        { 0x20, 0, 0, 32 }, { 0x15, 0, 1, advice },
        { 0x06, 0, 0, 0x50000 | code }, { 0x06, 0, 0, 0x7fff0000 },
    };
    struct steps filter = { 6, all };
    if (prctl(38, 1, 0, 0, 0) || syscall(SYS_prctl, 22, 2, &filter, 0, 0)) exit(80);
}
void *volatile keep;
static void refused(unsigned code) {
    keep = malloc(8 << 20);
    refuse(23, code);
    for (int i = 0; i < 3; i++) keep = malloc(8 << 20);
}
";

/// Compiles the program of `main`, whose first lines are [`REFUSE`].
fn compile(place: &Place, compiler: &str, name: &str, main: &str) -> String {
    let source = format!("{REFUSE}{main}");
    place.compile(compiler, &format!("{name}-{compiler}"), &source, &["-O1", "-pthread"])
}

/// The warning about three refusals with an error code.
fn warning(code: u32, remedy: &str) -> String {
    format!(
        "faultless: warning: populate: refused 3 times: the kernel has not populated memory \
         (error {code}): {remedy}\n"
    )
}

const NOT_PERMITTED: &str = "permit madvise with MADV_POPULATE_WRITE (seccomp)";

#[test]
fn refusals_after_the_start_are_printed_at_the_end() {
    let place = Place::new();
    let main = r#"int main(int count, char **words) {
        refused(atoi(words[1]));
        fputs("last\n", stderr);
        if (count > 2) _exit(5);
        return 5;
    }"#;
    for compiler in compilers() {
        let program = compile(&place, compiler, "program", main);
        for (code, remedy) in [
            (1, NOT_PERMITTED),
            (12, "raise the limit of the program's memory, or use a larger size"),
        ] {
            let ran = place.run("populate=1M", &[&program, &code.to_string()]);
            let expected = format!("last\n{}", warning(code, remedy));
            assert_eq!((ran.code, ran.err), (Some(5), expected), "{compiler}");
        }
        // The C library does not report such an end.
        let ran = place.run("populate=1M", &[&program, "1", "_exit"]);
        assert_eq!((ran.code, &*ran.err), (Some(5), "last\n"), "{compiler}");
        // A shell becomes the program, or has the program as a child.
        for (script, warnings) in [("exec P 1", 1), ("P 1; P 1; true", 0)] {
            let script = script.replace('P', &program);
            let ran = place.run("populate=1M", &["sh", "-c", &script]);
            assert_eq!(ran.err.matches(&warning(1, NOT_PERMITTED)).count(), warnings, "{script}");
        }
    }
}

#[test]
fn refusal_that_was_printed_at_the_start_is_not_repeated() {
    let place = Place::new();
    let main = r"int main(int count, char **words) {
        if (count > 1) { refuse(23, 1); return execv(words[1], words + 1); }
        keep = malloc(8 << 20);
        return 5;
    }";
    let program = compile(&place, "gcc", "program", main);
    let ran = place.run("populate=1M", &[&program, &program]);
    let why = "the kernel has not populated memory (error 1)";
    let expected = format!("faultless: warning: populate: {why}: {NOT_PERMITTED}\n");
    assert_eq!((ran.code, ran.err), (Some(5), expected));
}

/// Children, and another file at the descriptor of standard error, get no warning.
#[test]
fn only_the_program_prints_and_only_to_its_standard_error() {
    let place = Place::new();
    let file = place.path("file");
    let main = r#"
    #include <fcntl.h>
    int main(int count, char **words) {
        int status;
        refused(1);
        if (!strcmp(words[1], "child")) {
            pid_t child = fork();
            if (!child) exit(7);
            if (waitpid(child, &status, 0) != child || status != 7 << 8) return 1;
            _exit(5);
        }
        close(2);
        if (count > 2 && open(words[2], O_WRONLY | O_CREAT, 0600) != 2) return 2;
        return 5;
    }"#;
    for compiler in compilers() {
        let program = compile(&place, compiler, "program", main);
        for words in [&["child"][..], &["closed"], &["file", file.to_str().expect("text")]] {
            let ran = place.run("populate=1M", &[&[&*program], words].concat());
            assert_eq!((ran.code, &*ran.err), (Some(5), ""), "{compiler} {words:?}");
        }
        assert_eq!(fs::read_to_string(&file).expect("written"), "", "{compiler}");
    }
}

/// A pipe that has no reader, or that is full, delays no program and changes no status.
#[test]
fn standard_error_that_accepts_no_line_does_not_affect_the_program() {
    let place = Place::new();
    let program = compile(&place, "gcc", "program", "int main(void) { refused(1); return 5; }");
    for full in [false, true] {
        let (reader, mut writer) = std::io::pipe().expect("a pipe");
        let reader = if full {
            // The default capacity of a pipe.
            writer.write_all(&[0; 64 << 10]).expect("an empty pipe");
            Some(reader)
        } else {
            drop(reader);
            None
        };
        let mut run = place.command(&["--apply", "populate=1M"], &[&program]);
        let mut child = run.stdin(Stdio::null()).stderr(writer).spawn().expect("it starts");
        let begin = Instant::now();
        let status = loop {
            match child.try_wait().expect("a child") {
                None if begin.elapsed() < Duration::from_secs(20) => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                None => child.kill().expect("a child"),
                Some(status) => break status,
            }
        };
        assert_eq!(status.code(), Some(5), "full: {full}, {status}");
        drop(reader);
    }
}

#[test]
fn refused_parts_and_files_are_printed_too() {
    let place = Place::new();
    let main = r#"
    #include <time.h>
    static void map_file(long bytes, long mapped) {
        FILE *file = tmpfile();
        if (!file || ftruncate(fileno(file), bytes)) exit(2);
        if (mmap(0, mapped, PROT_READ, MAP_SHARED, fileno(file), 0) == MAP_FAILED) exit(3);
    }
    int main(int count, char **words) {
        struct timespec pause = { 0, 1000000 };
        if (atoi(words[1]) == 22) {
            /* Pages after the end of a file are no refusal. */
            map_file(1 << 20, 8 << 20);
            refuse(22, 12);
            map_file(8 << 20, 8 << 20);
            return 5;
        }
        refuse(23, 12);
        char *block = malloc(64 << 20);
        for (long at = 0; at < 4 << 20; at += 4096) {
            block[at] = 1;
            if (at % (64 << 10) == 0) nanosleep(&pause, 0);
        }
        return 5;
    }"#;
    for compiler in compilers() {
        let program = compile(&place, compiler, "program", main);
        for (advice, operation, number, why) in [
            ("22", "populate-files", "refused 1 time: ", "not populated a mapped file (error 12)"),
            ("23", "prefault-ahead", "refused ", " times: the kernel has not populated memory"),
        ] {
            let ran = place.run(&format!("{operation}=1M"), &[&program, advice]);
            assert_eq!(ran.code, Some(5), "{compiler}");
            let start = format!("faultless: warning: {operation}: {number}");
            let line = ran.err.strip_prefix(&start).unwrap_or_else(|| panic!("{}", ran.err));
            assert!(line.contains(why) && line.lines().count() == 1, "{}", ran.err);
        }
    }
}

/// The report has the refusals of all processes, so the program prints none.
#[test]
fn program_with_a_report_prints_no_warning() {
    let place = Place::new();
    let main = r#"int main(void) { refused(1); fputs("last\n", stderr); return 5; }"#;
    let program = compile(&place, "gcc", "program", main);
    let ran = Ran::of(&mut place.command(&["--apply", "populate=1M", "--report"], &[&program]));
    assert_eq!(ran.code, Some(5));
    let line = "    populate: refused 3 times: the kernel has not populated memory (error 1): ";
    assert!(ran.err.starts_with("last\nfaultless: the preloaded library in 1 process:\n"));
    assert!(ran.err.contains(line) && !ran.err.contains("warning"), "{}", ran.err);
}
