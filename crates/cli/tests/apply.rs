//! `run`: advice in force for one program, the forms of `--print`, and the preloaded library.

mod common;

use common::{Ran, command, faultless};
use faultless_analysis::advise::file::decode;
use faultless_analysis::advise::item::Apply;
use nix::sys::signal::Signal;
use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Advice of every kind.
const ADVICE: &str = "version = 1
[[advice]]
name = \"no THP\"
thp = \"off\"
[[advice]]
name = \"odd value\"
environment = { ODD = \"a \\\"b\\\" 'c' $HOME %n \\\\ \\u00e4\\nline\" }
[[advice]]
name = \"malloc on THP\"
predicted_seconds = 0.5
environment = { GLIBC_TUNABLES = \"glibc.malloc.hugetlb=1\" }
[[advice]]
name = \"slow khugepaged\"
system = { file = \"/sys/kernel/mm/transparent_hugepage/khugepaged/scan_sleep_millisecs\", value = \"10001\" }
";
/// The setting of the whole system in [`ADVICE`].
const SETTING: &str = "/sys/kernel/mm/transparent_hugepage/khugepaged/scan_sleep_millisecs";
/// The value of `ODD` in [`ADVICE`].
const ODD: &str = "a \"b\" 'c' $HOME %n \\ \u{e4}\nline";

/// A directory for the cache, advice and programs.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().expect("a directory"));
        fs::write(place.path("advice.toml"), ADVICE).expect("written");
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().expect("text").to_owned()
    }

    /// Returns `faultless run` with these arguments and this directory as the cache.
    fn run(&self, args: &[&str]) -> Command {
        let mut run = command(&["run"]);
        run.args(args).env("XDG_CACHE_HOME", self.path("cache"));
        for variable in ["GLIBC_TUNABLES", "LD_PRELOAD", "MALLOC_ARENA_MAX", "JAVA_TOOL_OPTIONS"] {
            run.env_remove(variable);
        }
        run
    }

    fn ran(&self, args: &[&str]) -> Ran {
        Ran::of(&mut self.run(args))
    }

    /// Returns the only file in the cache.
    fn library(&self) -> PathBuf {
        let files: Vec<_> = fs::read_dir(self.path("cache/faultless"))
            .expect("a cache")
            .map(|entry| entry.expect("an entry").path())
            .collect();
        let [file] = &files[..] else { panic!("{files:?}") };
        file.clone()
    }

    /// Compiles a C program or library; returns its path.
    fn compile(&self, compiler: &str, name: &str, source: &str, options: &[&str]) -> String {
        let mut compiler = Command::new(compiler);
        compiler.args(["-x", "c", "-o"]).arg(self.path(name)).args(["-", "-x", "none"]);
        let mut compiler =
            compiler.args(options).stdin(Stdio::piped()).spawn().expect("an installed compiler");
        let mut input = compiler.stdin.take().expect("piped");
        input.write_all(source.as_bytes()).expect("the compiler reads");
        drop(input);
        assert!(compiler.wait().expect("it ends").success(), "{name}");
        self.text(name)
    }
}

fn installed(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output();
    found.is_ok_and(|output| output.status.success())
}

#[test]
fn advice_reaches_the_program_and_joins_lists_of_the_user() {
    let place = Place::new();
    let script = "echo \"$MALLOC_ARENA_MAX;$GLIBC_TUNABLES;$JAVA_TOOL_OPTIONS;$FAULTLESS_POPULATE\"
        echo \"$LD_PRELOAD\"; grep THP_enabled /proc/self/status";
    let names = "malloc-arenas=3,malloc-thp,java-thp,java-heap=256M,populate=2M,no-thp";
    let mut run = place.run(&["--apply", names, "--", "sh", "-c", script]);
    run.env("GLIBC_TUNABLES", "glibc.malloc.perturb=0").env("LD_PRELOAD", "libm.so.6");
    let ran = Ran::of(&mut run);
    let of_java = |line: &str| line.contains("on sh: the program is not Java");
    assert!(ran.err.lines().all(of_java) && ran.err.lines().count() == 2, "{}", ran.err);
    let library = place.library();
    let expected = format!(
        "3;glibc.malloc.perturb=0:glibc.malloc.hugetlb=1;\
         -XX:+UseTransparentHugePages -Xms256m;2097152\n{}:libm.so.6\nTHP_enabled:\t0\n",
        library.display()
    );
    assert_eq!(ran.succeeds(), expected);
    let plain = place.ran(&["--apply", "gogc=50", "--", "sh", "-c", "echo $GOGC$LD_PRELOAD"]);
    assert_eq!(plain.succeeds(), "50\n");
}

#[test]
fn file_and_names_combine() {
    let place = Place::new();
    let file = place.text("advice.toml");
    let script = "printf '%s' \"$GLIBC_TUNABLES $MALLOC_ARENA_MAX $ODD\"";
    let args = ["--advice", &file, "--apply", "malloc-arenas", "--", "sh", "-c", script];
    assert_eq!(place.ran(&args).succeeds(), format!("glibc.malloc.hugetlb=1 2 {ODD}"));
    fs::write(
        place.path("other.toml"),
        "version = 1\n[[advice]]\nname = \"few arenas\"\nenvironment.MALLOC_ARENA_MAX = \"1\"",
    )
    .expect("written");
    let other = place.text("other.toml");
    let error = place.ran(&["--advice", &other, "--apply", "malloc-arenas", "--", "true"]).fails(2);
    let expected =
        format!("malloc-arenas and few arenas ({other}): MALLOC_ARENA_MAX has two values, 2 and 1");
    assert!(error.contains(&expected), "{error}");
}

#[test]
fn user_variable_that_is_replaced_is_reported() {
    let place = Place::new();
    let mut run =
        place.run(&["--apply", "malloc-arenas", "--", "sh", "-c", "echo $MALLOC_ARENA_MAX"]);
    let ran = Ran::of(run.env("MALLOC_ARENA_MAX", "9"));
    assert!(ran.err.contains("malloc-arenas replaces MALLOC_ARENA_MAX=9"), "{}", ran.err);
    assert_eq!(ran.succeeds(), "2\n");
}

#[test]
fn run_becomes_the_program() {
    let place = Place::new();
    // The loop ends also if the signal does not arrive.
    let script = "trap 'exit 9' INT; echo $$; for i in $(seq 500); do sleep 0.01; done";
    for advice in ["no-thp", "populate,prefault-ahead,huge-text"] {
        let mut run = place.run(&["--apply", advice, "--", "sh", "-c", script]);
        let mut child = run.stdout(Stdio::piped()).spawn().expect("it starts");
        let mut first = String::new();
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        output.read_line(&mut first).expect("text");
        assert_eq!(first.trim(), child.id().to_string());
        common::send(&child, Signal::SIGINT);
        assert_eq!(child.wait().expect("it ends").code(), Some(9));
        let status = |script| {
            let mut run = place.run(&["--apply", advice, "--", "sh", "-c", script]);
            run.status().expect("it starts")
        };
        assert_eq!(status("exit 7").code(), Some(7));
        // The signal is the program's, not a status of 128 plus its number.
        assert_eq!(status("kill -TERM $$").signal(), Some(15));
    }
}

#[test]
fn wrong_arguments_are_explained() {
    let place = Place::new();
    let [file, damaged, empty] =
        ["advice.toml", "damaged.toml", "empty.toml"].map(|n| place.text(n));
    fs::write(&damaged, "version = 1\n[[advice]]\nname = \"a\"\nmlock = true\n").expect("written");
    fs::write(&empty, "version = 1\n").expect("written");
    let plain = place.text("plain");
    fs::write(&plain, "#!/bin/sh\n").expect("written");
    let wrong: [(&[&str], &[&str]); 13] = [
        (&["--", "true"], &["required", "--apply", "--advice"]),
        (&["--print", "env"], &["required", "--apply", "--advice"]),
        (&["--apply", "no-thp"], &["required", "<CMD>"]),
        (&["--apply", "nothp", "--", "true"], &["one of no-thp, ", "did you mean no-thp?"]),
        (&["--apply", "no-thp,gogc=x", "--", "true"], &["a number from 1", "gogc=400"]),
        (&["--apply", "no-thp", "--print", "pdf"], &["pdf", "systemd, docker, env"]),
        (&["--advice", "/no/file", "--", "true"], &["--advice /no/file: ", "advise --save"]),
        (&["--advice", &damaged, "--", "true"], &[&damaged, "line 4", "`mlock`", "--save FILE"]),
        (&["--apply", "no-thp", "--", "/no/program"], &["cannot run /no/program: No such file"]),
        (&["--apply", "no-thp", "--", &plain], &["cannot run ", "Permission denied"]),
        (&["--apply", "gogc=1,gogc=2", "--", "true"], &["gogc=1 and gogc=2: GOGC has two"]),
        (
            &["--apply", "populate", "--library", &file, "--", "true"],
            &["--library ", "is not a library", "use another name"],
        ),
        (
            &["--apply", "populate", "--library", "/tmp/a b.so", "--", "true"],
            &["--library /tmp/a b.so", "the loader does not accept ' '"],
        ),
    ];
    for (args, expected) in wrong {
        let error = place.ran(args).fails(2);
        for expected in expected {
            assert!(error.contains(expected), "{args:?} does not print {expected:?}:\n{error}");
        }
    }
    assert!(!place.path("cache").exists(), "a failed command writes no library");
    let ran = place.ran(&["--advice", &empty, "--", "echo", "started"]);
    assert!(ran.err.contains("contains no advice"), "{}", ran.err);
    assert_eq!(ran.succeeds(), "started\n");
}

/// The setting is harmless, and is restored if the command changes it.
#[test]
fn system_settings_are_printed_and_not_changed() {
    let place = Place::new();
    let read = || fs::read_to_string(SETTING).expect("a kernel with huge pages");
    let before = read();
    let ran = place.ran(&["--advice", &place.text("advice.toml"), "--", "true"]);
    let after = read();
    if after != before {
        fs::write(SETTING, &before).expect("root");
    }
    assert_eq!(after, before);
    assert_ne!(after.trim(), "10001");
    let command = format!("  echo 10001 > {SETTING}\n");
    assert_eq!(ran.err.matches(&command).count(), 1, "{}", ran.err);
    ran.succeeds();
    let error = place.ran(&["--apply", "no-thp", "--", "true"]).err;
    assert!(!error.contains("echo"), "{error}");
}

/// Returns the output of `--print` for the file and a library.
fn printed(place: &Place, form: &str) -> String {
    let file = place.text("advice.toml");
    let library = place.text("library.so");
    let ran = place.ran(&[
        "--advice",
        &file,
        "--apply",
        "populate=1M",
        "--library",
        &library,
        "--print",
        form,
        "--",
        "app",
        "its $word",
    ]);
    assert_eq!(ran.err, "", "no program starts, so its file is not needed");
    assert!(place.path("library.so").exists() && !place.path("cache").exists());
    ran.succeeds()
}

#[test]
fn printed_variables_are_accepted_by_a_shell() {
    let place = Place::new();
    let text = printed(&place, "env");
    let file = place.text("variables.sh");
    fs::write(&file, &text).expect("written");
    let library = place.text("library.so");
    for before in [None, Some("glibc.malloc.perturb=0")] {
        let script = ". \"$0\"; printf '%s|' \"$GLIBC_TUNABLES\" \"$ODD\" \"$FAULTLESS_POPULATE\"; \
                      sh -c 'printf \"%s\" \"$LD_PRELOAD\"'";
        let mut shell = Command::new("sh");
        shell.args(["-c", script, &file]).env_remove("LD_PRELOAD").env_remove("GLIBC_TUNABLES");
        shell.envs(before.map(|before| ("GLIBC_TUNABLES", before)));
        shell.envs(before.map(|_| ("LD_PRELOAD", "libm.so.6")));
        let (tunables, libraries) = match before {
            None => (String::new(), library.clone()),
            Some(before) => (format!("{before}:"), format!("{library}:libm.so.6")),
        };
        let expected = format!("{tunables}glibc.malloc.hugetlb=1|{ODD}|1048576|{libraries}");
        assert_eq!(Ran::of(&mut shell).succeeds(), expected);
    }
    for expected in
        ["faultless run --apply no-thp -- app 'its $word'", "as root: echo 10001 > /sys"]
    {
        let comment = text.lines().find(|line| line.contains(expected));
        assert!(comment.is_some_and(|line| line.starts_with('#')), "no {expected:?} in {text}");
    }
}

#[test]
fn printed_options_of_docker_are_words_of_a_shell() {
    let place = Place::new();
    let text = printed(&place, "docker");
    let library = place.text("library.so");
    let (comments, options): (Vec<_>, Vec<_>) =
        text.lines().partition(|line| line.starts_with('#'));
    let words = shlex::split(&options.join("\n")).expect("quoted words");
    let pairs: Vec<_> = words.chunks(2).map(|pair| (&*pair[0], &*pair[1])).collect();
    let expected = [
        ("-e", format!("ODD={ODD}")),
        ("-e", "GLIBC_TUNABLES=glibc.malloc.hugetlb=1".into()),
        ("-e", "FAULTLESS_POPULATE=1048576".into()),
        ("-e", format!("LD_PRELOAD={library}")),
        ("-v", format!("{library}:{library}:ro")),
    ];
    assert_eq!(pairs, expected.each_ref().map(|(option, value)| (*option, &**value)));
    let comments = comments.join("\n");
    for expected in [
        "docker cannot disable huge pages",
        "faultless run --apply no-thp -- app 'its $word'",
        "as root: echo 10001 > /sys",
        "GLIBC_TUNABLES replaces an earlier value",
    ] {
        assert!(comments.contains(expected), "no {expected:?} in {comments}");
    }
}

/// Returns the value in quotes as systemd reads it in `Environment=`: escapes of C, and `%%`.
fn of_systemd(quoted: &str) -> String {
    let inner = quoted.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).expect("quotes");
    let (mut text, mut chars) = (String::new(), inner.chars());
    while let Some(c) = chars.next() {
        match c {
            '\\' => text.push(match chars.next().expect("an escape") {
                'n' => '\n',
                't' => '\t',
                c @ ('"' | '\\') => c,
                other => panic!("escape {other}"),
            }),
            '%' => {
                assert_eq!(chars.next(), Some('%'), "a specifier");
                text.push('%');
            }
            '"' => panic!("the value ends early: {inner}"),
            c => text.push(c),
        }
    }
    text
}

#[test]
fn printed_drop_in_is_accepted_by_systemd() {
    let place = Place::new();
    let text = printed(&place, "systemd");
    let variables: HashMap<_, _> = text
        .lines()
        .filter_map(|line| line.strip_prefix("Environment="))
        .map(|value| of_systemd(value).split_once('=').map(|(n, v)| (n.to_owned(), v.to_owned())))
        .map(|pair| pair.expect("an assignment"))
        .collect();
    let library = place.text("library.so");
    for (name, value) in [
        ("ODD", ODD),
        ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
        ("FAULTLESS_POPULATE", "1048576"),
        ("LD_PRELOAD", &library),
    ] {
        assert_eq!(variables.get(name).map(|value| &**value), Some(value), "{name} in {text}");
    }
    assert_eq!(variables.len(), 4);
    // Settings of the whole system, and the other start of the program, are comments.
    let active = |line: &&str| !line.starts_with('#') && !line.starts_with("Environment=");
    assert_eq!(text.lines().filter(active).collect::<Vec<_>>(), ["[Service]"]);
    assert!(text.contains("run --apply no-thp -- \"app\" \"its $$word\"\n"), "{text}");
    let pre = format!("#ExecStartPre=+/bin/sh -c \"echo 10001 > {SETTING}\"");
    assert!(text.contains(&pre), "{text}");
    if !installed("systemd-analyze") {
        eprintln!("systemd-analyze is not installed: not tested");
        return;
    }
    // With the comments in force, too.
    let unit = place.path("app.service");
    for text in [text.clone(), text.replace("#Exec", "Exec")] {
        let text = text.replace("[Service]\n", "[Service]\nExecStart=/bin/true\n");
        fs::write(&unit, text).expect("written");
        let checked = Ran::of(Command::new("systemd-analyze").arg("verify").arg(&unit));
        assert_eq!((checked.code, &*checked.err), (Some(0), ""));
    }
    fs::write(&unit, "[Service]\nExecStart=/bin/true\nEnvironment=\"A=\\q\"\n").expect("written");
    let wrong = Ran::of(Command::new("systemd-analyze").arg("verify").arg(&unit));
    assert_ne!(wrong.err, "", "the check detects a wrong escape");
}

#[test]
fn programs_without_the_library_are_refused_with_the_advice_that_applies() {
    let place = Place::new();
    let source = "int main() { return 5; }";
    let fixed = place.compile("gcc", "static", source, &["-static"]);
    let warnings = |program: &str| {
        let ran = place.ran(&["--apply", "populate,malloc-thp", "--", program]);
        assert_eq!(ran.code, Some(5), "{program}: {}", ran.err);
        ran.err
    };
    let refused = |program: &str, advice: &str| {
        let error = place.ran(&["--apply", advice, "--", program]).fails(2);
        assert!(error.contains(&format!(" cannot be applied to {program}: ")), "{error}");
        error
    };
    let err = refused(&fixed, "populate,malloc-thp,huge-text");
    for expected in [
        "populate, huge-text cannot be applied",
        "the program is linked statically: no library can be preloaded",
        "this advice applies without the library: malloc-thp",
    ] {
        assert!(err.contains(expected), "no {expected:?} in {err}");
    }
    assert!(refused(&fixed, "prefault-ahead").contains("no part that applies"));
    assert_eq!(place.ran(&["--apply", "malloc-thp", "--", &fixed]).code, Some(5));
    // A script counts as its interpreter.
    let script = place.text("script");
    fs::write(&script, format!("#!{fixed}\n")).expect("written");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("ours");
    assert!(refused(&script, "populate").contains("linked statically"));
    let dynamic = place.compile("gcc", "dynamic", source, &[]);
    assert_eq!(warnings(&dynamic), "");
    if chown(&dynamic, Some(12_345), None).is_ok() {
        fs::set_permissions(&dynamic, fs::Permissions::from_mode(0o4755)).expect("ours");
        let err = refused(&dynamic, "no-thp,malloc-thp,populate");
        assert!(err.contains("the loader ignores LD_PRELOAD"), "{err}");
        assert!(err.ends_with("without the library: no-thp\n"), "glibc ignores the other: {err}");
        let ran = place.ran(&["--apply", "malloc-thp", "--", &dynamic]);
        assert!(ran.err.contains("glibc ignores settings of malloc"), "{}", ran.err);
    }
    // The loader does not start a program with the library of a sanitizer behind another library.
    let sanitizer = place.compile("gcc", "libtsan.so", "int sanitizer;", &["-shared", "-fPIC"]);
    let source_of_sanitized = "extern int sanitizer; int main() { return 5 + sanitizer; }";
    let sanitized = place.compile("gcc", "sanitized", source_of_sanitized, &[&sanitizer]);
    let err = refused(&sanitized, "populate,malloc-thp");
    assert!(err.contains("the library of a sanitizer"), "{err}");
    assert!(err.ends_with("without the library: malloc-thp\n"), "{err}");
    if installed("musl-gcc") {
        let err = warnings(&place.compile("musl-gcc", "musl", source, &[]));
        assert!(!err.contains("populate on"), "{err}");
        assert!(err.contains("linked with musl, which has its own malloc"), "{err}");
    }
}

/// An allocator that ends the program if it gets a block of another allocator.
const ALLOCATOR: &str = r#"
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>
#define MARK 0x1234567812345678
static char pool[256 << 20];
static size_t used;
void *memalign(size_t align, size_t n) {
    if (align < 16) align = 16;
    size_t at = (used + 16 + align - 1) & ~(align - 1);
    used = at + n;
    ((uint64_t *)(pool + at))[-1] = MARK;
    ((uint64_t *)(pool + at))[-2] = n;
    return pool + at;
}
void *aligned_alloc(size_t align, size_t n) { return memalign(align, n); }
void *malloc(size_t n) { return memalign(16, n); }
void *calloc(size_t count, size_t n) { return malloc(count * n); }
void free(void *p) { if (p && ((uint64_t *)p)[-1] != MARK) _exit(99); }
void *realloc(void *p, size_t n) {
    void *q = malloc(n);
    free(p);
    size_t before = p ? ((uint64_t *)p)[-2] : 0;
    return memcpy(q, p, before < n ? before : n);
}
"#;

#[test]
fn program_with_another_allocator_gets_only_its_blocks() {
    let place = Place::new();
    let library = place.compile("gcc", "liballocator.so", ALLOCATOR, &["-shared", "-fPIC"]);
    let source = "#include <stdlib.h>
        #include <malloc.h>
        int main() {
            for (int i = 1; i < 40; i++) {
                char *block = realloc(malloc(i * 4000), i * 8000);
                block[0] = 1;
                free(block);
                free(calloc(i, i));
                free(aligned_alloc(64, 64 * i));
                free(memalign(64, 64 * i));
            }
            return 5;
        }";
    let directory = place.0.path().display();
    let rpath = format!("-Wl,-rpath,{directory}");
    let program = place.compile("gcc", "program", source, &[&library, &rpath]);
    for populate in ["populate=64K", "populate=1M", "prefault-ahead,huge-text"] {
        let ran = place.ran(&["--apply", populate, "--", &program]);
        assert_eq!((ran.code, &*ran.err), (Some(5), ""));
    }
}

#[test]
fn damaged_library_is_rewritten() {
    let place = Place::new();
    // `dd` allocates a block of 64 MiB, and does not touch it.
    let script = "dd if=/dev/null of=/dev/null bs=64M 2>/dev/null && echo copied";
    let run = || place.ran(&["--apply", "populate=1M", "--", "sh", "-c", script]);
    assert_eq!(run().succeeds(), "copied\n");
    let library = place.library();
    let intact = fs::read(&library).expect("the library");
    fs::write(&library, "damaged").expect("our file");
    let ran = run();
    assert_eq!((&*ran.err, ran.code), ("", Some(0)));
    assert!(fs::read(place.library()).expect("the library") == intact);
    let mode = fs::metadata(&library).expect("there").permissions().mode();
    assert_eq!(mode & 0o777, 0o644);
    let cache = place.path("cache/faultless");
    if chown(&cache, Some(12_345), None).is_ok() {
        let error = run().fails(2);
        assert!(error.contains("belongs to user 12345"), "{error}");
        let elsewhere = place.text("library.so");
        let args = ["--apply", "populate", "--library", &elsewhere, "--", "true"];
        place.ran(&args).succeeds();
        assert!(fs::read(elsewhere).expect("the library") == intact);
    }
}

#[test]
fn library_is_kept_below_home_without_xdg_cache_home() {
    let place = Place::new();
    let mut run = place.run(&["--apply", "populate", "--", "true"]);
    run.env_remove("XDG_CACHE_HOME").env("HOME", place.path("home"));
    Ran::of(&mut run).succeeds();
    assert!(place.path("home/.cache/faultless").is_dir());
}

/// The measured costs decide which settings are saved, so the file is compared with the report.
#[test]
fn saved_advice_of_a_recording_is_applied() {
    let place = Place::new();
    let file = place.text("saved.toml");
    fs::write(&file, "an older file").expect("written");
    let ran = faultless(&["advise", "gcc", "--save", &file]);
    let err = ran.err.clone();
    let report = ran.succeeds();
    let text = fs::read_to_string(&file).expect("written");
    let advice = decode(Path::new(&file), &text).expect("a file that can be read");
    assert!(text.contains("version = 1\nprogram = \""), "{text}");
    let noted = if advice.is_empty() { "no advice" } else { "next: faultless run --advice" };
    assert!(err.contains(&format!("{file}: ")) && err.contains(noted), "{err}");
    for one in &advice {
        let row = format!("| {} ", one.name);
        assert!(report.contains(&row), "no {row:?} in {report}");
        assert!(one.predicted.is_some_and(|seconds| seconds > 0.0) && one.measured.is_none());
    }
    let ran = place.ran(&["--advice", &file, "--", "env", "-0"]);
    let err = ran.err.clone();
    let environment = ran.succeeds();
    for one in &advice {
        match &one.apply {
            Apply::Environment(all) => {
                for (name, value) in all {
                    assert!(environment.contains(&format!("{name}={value}\0")), "{environment}");
                }
            }
            Apply::Populate(bytes) => {
                assert!(environment.contains(&format!("FAULTLESS_POPULATE={bytes}\0")));
            }
            Apply::Sysfs(file, value) => {
                assert!(err.contains(&format!("echo {value} > {}", file.display())), "{err}");
            }
            Apply::PopulateFiles(bytes) => {
                assert!(environment.contains(&format!("FAULTLESS_POPULATE_FILES={bytes}\0")));
            }
            Apply::WithoutThp | Apply::PrefaultAhead(_) | Apply::HugeText(_) | Apply::Nothing => {}
        }
    }
}

#[test]
fn save_never_overwrites_inputs_and_other_outputs() {
    let place = Place::new();
    let recording = place.text("gcc.fltrace");
    let bytes = faultless_trace::recordings::find("gcc").expect("bundled").bytes;
    fs::write(&recording, bytes).expect("written");
    for (args, code, expected) in [
        (&["advise", &*recording, "--save", &*recording][..], 2, "would overwrite the input"),
        (&["advise", "gcc", "--save", "x", "--json", "./x"], 2, "--json and --save: both"),
        (&["advise", "gcc", "--save", "/nowhere/x"], 1, "--save /nowhere/x: the directory"),
        (&["advise", "gcc", "--save", "-"], 2, "--save ./- is a file of that name"),
    ] {
        let ran = faultless(args);
        assert_eq!(ran.out, "");
        let error = ran.fails(code);
        assert!(error.contains(expected), "{args:?}: {error}");
    }
    assert!(fs::read(&recording).expect("there") == bytes);
}
