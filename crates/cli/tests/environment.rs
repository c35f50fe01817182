//! Systems that do not permit a recording, or not all of it: each is created, and the message names
//! the cause and the remedy. A test that needs root, or a part that this system lacks, prints the
//! reason and is skipped.

mod common;
#[path = "../../trace/tests/made/mod.rs"]
mod made;

use common::{Ran, command};
use faultless_trace::event::Trace;
use faultless_trace::{Kind, read};
use made::{Made, Packing, VERSIONS};
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A recording made by perf.
const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../trace/tests/data/fixture.perf.data");

/// A stand-in for perf, which writes the recording.
const PERF: &str = "#!/bin/sh
while [ \"$1\" != -o ]; do shift; done
cat \"$FIXTURE\" > \"$2\"
";

/// A directory that each user can read, with perf's stand-in in `bin`.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir().expect("a directory"));
        let open = fs::Permissions::from_mode(0o755);
        fs::set_permissions(place.0.path(), open).expect("ours");
        fs::create_dir(place.file("bin")).expect("a directory");
        place.program("bin/perf", PERF.as_bytes(), 0o755);
        place
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.file(name).to_str().expect("text").to_owned()
    }

    fn program(&self, name: &str, bytes: &[u8], mode: u32) -> String {
        let file = self.file(name);
        fs::write(&file, bytes).expect("written");
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).expect("ours");
        self.text(name)
    }

    /// Runs `faultless` with `args` through the shell commands `before`, with perf's stand-in. The
    /// commands have the directory as `$PLACE`.
    fn through(&self, before: &str, args: &[&str]) -> Ran {
        let path = format!("{}:{}", self.text("bin"), std::env::var("PATH").expect("a path"));
        let script = format!("{before} \"$FAULTLESS\" \"$@\"");
        let mut shell = Command::new("sh");
        shell.args(["-c", &script, "sh"]).args(args).env("PATH", path);
        shell.env("FAULTLESS", env!("CARGO_BIN_EXE_faultless"));
        shell.env("FIXTURE", FIXTURE).env("PLACE", self.0.path());
        Ran::of(&mut shell)
    }
}

/// Returns whether this process is root, and can create namespaces. Prints why not.
fn is_root() -> bool {
    // A private mount needs the permission that the tests need.
    let is = Command::new("unshare").args(["-m", "mount", "-t", "tmpfs", "none", "/mnt"]).status();
    let is = is.is_ok_and(|status| status.success());
    if !is {
        eprintln!("no permission to mount: not tested");
    }
    is
}

/// Returns the recording in `file` by the real perf, if `ran` was permitted.
fn recorded(ran: &Ran, file: &Path) -> Option<Trace> {
    if ran.code != Some(0) {
        eprintln!("perf cannot record here: not tested: {}", ran.err);
        return None;
    }
    Some(read(file).expect("a recording"))
}

#[test]
fn missing_perf_is_named_with_its_package() {
    let place = Place::new();
    fs::remove_file(place.file("bin/perf")).expect("ours");
    for lesser in [&["--lesser"][..], &[]] {
        let args = [&["record"][..], lesser, &["--", "/bin/true"]].concat();
        let ran = Ran::of(command(&args).env("PATH", place.file("bin")));
        let error = ran.fails(1);
        assert!(error.contains("perf is not installed (no `perf` in PATH)"), "{error}");
        assert!(error.contains("apt install linux-perf"), "{error}");
        assert!(!error.contains("--lesser"), "{error}");
    }
}

#[test]
fn root_of_a_user_namespace_is_sent_to_the_host() {
    let place = Place::new();
    let paranoid = fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").unwrap_or_default();
    let inside = Command::new("unshare").args(["-Ur", "true"]).output();
    if !inside.is_ok_and(|out| out.status.success()) || paranoid.trim() == "-1" {
        eprintln!("no user namespaces, or events for all users: not tested");
        return;
    }
    let error = place.through("exec unshare -Ur", &["record", "--", "true"]).fails(1);
    assert!(error.contains("Root of a user namespace, as in a rootless container"), "{error}");
    assert!(error.contains("record on the host, with --pid or --cgroup"), "{error}");
}

/// Lets the kernel refuse `perf_event_open` to `command`, as the filters of containers do.
fn without_events(command: &mut Command) {
    // A load of the number of the call, a comparison, and the two results: EPERM, and permission.
    let number = libc::SYS_perf_event_open as u32;
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut steps = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, number),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    // SAFETY: the closure makes two calls, which are async-signal-safe, and the filter lives until
    // the kernel has copied it.
    unsafe {
        command.pre_exec(move || {
            let filter = libc::sock_fprog { len: 4, filter: steps.as_mut_ptr() };
            let set = libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter)
                    == 0;
            if set { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        });
    }
}

#[test]
fn seccomp_filter_is_named_with_the_capability() {
    let place = Place::new();
    for args in [
        &["record", "--", "true"][..],
        &["record", "--lesser", "--", "true"],
        &["advise", "--", "true"],
    ] {
        let mut command = command(args);
        command.env("PATH", format!("{}:/bin:/usr/bin", place.text("bin")));
        without_events(&mut command);
        let error = Ran::of(&mut command).fails(1);
        assert!(error.contains("a seccomp filter, as of a container"), "{error}");
        assert!(error.contains("--cap-add=PERFMON"), "{error}");
        assert!(!error.contains("--lesser accepts"), "{error}");
    }
}

#[test]
fn missing_tracefs_is_named_with_its_mount() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let hide = "exec unshare -m sh -c 'for dir in /sys/kernel/tracing /sys/kernel/debug; do \
                umount -l $dir/tracing; mount -t tmpfs none $dir; done 2> /dev/null; exec \"$@\"' sh";
    let error = place.through(hide, &["record", "--", "true"]).fails(1);
    assert!(error.contains("tracefs is not mounted"), "{error}");
    assert!(error.contains("`sudo mount -t tracefs nodev /sys/kernel/tracing`"), "{error}");
}

/// A file system with `size` bytes in `$PLACE/full`, and a command there.
fn full(size: u64, prepare: &str) -> String {
    format!(
        "exec unshare -m sh -c 'mkdir $PLACE/full; mount -t tmpfs -o size={size} none $PLACE/full; \
         cd $PLACE/full; {prepare} \"$@\"; code=$?; mkdir $PLACE/after; cp -a . $PLACE/after; exit \
         $code' sh"
    )
}

#[test]
fn full_disk_leaves_an_existing_recording() {
    if !is_root() {
        return;
    }
    let page = 4096;
    let pages = fs::metadata(FIXTURE).expect("a file").len().div_ceil(page);
    // The file of perf does not fit, or fits without the portable form.
    for (room, cause, kept) in [
        (pages / 2, "is full\n  remedy: free space there, or record", false),
        (pages + 1, "old.fltrace: No space", true),
    ] {
        let place = Place::new();
        let full = full(room * page, "echo old > old.fltrace;");
        let ran = place.through(&full, &["record", "--lesser", "-o", "old.fltrace", "--", "true"]);
        if ran.err.contains("this system cannot make a recording") {
            eprintln!("no events here: not tested");
            return;
        }
        let error = ran.fails(1);
        assert!(error.contains("No space left on device") && error.contains(cause), "{error}");
        let files = fs::read_dir(place.file("after")).expect("a directory");
        let names = files.map(|file| file.expect("a file").file_name());
        let names: Vec<_> = names.map(|name| name.display().to_string()).collect();
        let others: Vec<_> = names.iter().filter(|name| *name != "old.fltrace").collect();
        assert_eq!(others.len(), usize::from(kept), "{names:?}");
        assert!(others.iter().all(|name| error.contains(*name)), "{names:?}: {error}");
        let old = fs::read_to_string(place.file("after/old.fltrace")).expect("unchanged");
        assert_eq!(old, "old\n");
    }
}

/// One file that cannot be written does not prevent the others.
#[test]
fn full_disk_is_named_for_each_result() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    let save = place.text("saved.toml");
    let full = full(16384, "echo old > h.html; head -c 100000 /dev/zero > fill 2> /dev/null;");
    let args = ["advise", "ls", "--json", "j.jsonl", "--html", "h.html", "--export", "csv=c.csv"];
    let args = [&args[..], &["--save", &save]].concat();
    let fixture = [&["advise", FIXTURE][..], &args[2..]].concat();
    let error = place.through(&full, &fixture).fails(1);
    for name in ["c.csv", "--html h.html", "--json j.jsonl"] {
        let message = format!("{name}: No space left on device");
        let line = error.lines().find(|line| line.contains(&message));
        assert!(line.is_some_and(|line| line.contains("Remedy: free space")), "{error}");
    }
    assert!(fs::read_to_string(&save).is_ok_and(|text| text.contains("program")), "{error}");
    let old = fs::read_to_string(place.file("after/h.html")).expect("unchanged");
    assert_eq!(old, "old\n");
}

#[test]
fn stream_is_read_from_standard_input() {
    let replay = |bytes: &[u8]| {
        let mut child = command(&["replay", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command starts");
        let mut input = child.stdin.take().expect("piped");
        input.write_all(bytes).expect("read");
        drop(input);
        let output = child.wait_with_output().expect("the command ends");
        Ran {
            code: output.status.code(),
            out: String::from_utf8(output.stdout).expect("text"),
            err: String::from_utf8(output.stderr).expect("text"),
        }
    };
    for packing in [Packing::None, Packing::First, Packing::Second] {
        let stream = Made::new(VERSIONS[0]).stream(packing);
        let out = replay(&stream).succeeds();
        assert!(out.contains("app: a recording of the program app"), "{out}");
        assert!(out.contains("4 faults in user"), "{out}");
    }
    let stream = Made::new(VERSIONS[0]).stream(Packing::None);
    let comm = stream.windows(4).position(|bytes| bytes == b"app\0").expect("a name");
    let error = replay(&stream[..comm]).fails(2);
    assert!(error.contains("has no page fault") || error.contains("first event"), "{error}");
    assert!(error.contains("let perf record end before its reader"), "{error}");
}

/// The program kills perf, which then does not complete its file.
#[test]
fn recording_of_a_killed_perf_is_read_up_to_its_last_record() {
    let place = Place::new();
    let script = "for i in $(seq 600); do /bin/true; done; kill -KILL $PPID";
    let note = "perf ended before it completed the file (it was killed, or its disk was full): ";
    let file = place.text("killed.data");
    let mut perf = Command::new("perf");
    perf.args(["record", "-q", "-c", "1", "-d", "-e", "page-faults", "-o", &file, "--"]);
    let ended = perf.args(["sh", "-c", script]).output();
    if !ended.is_ok_and(|output| output.status.signal() == Some(9)) {
        eprintln!("perf cannot record here: not tested");
        return;
    }
    let out = Ran::of(&mut command(&["replay", &file])).succeeds();
    assert!(out.contains(note) && out.contains("records are read"), "{out}");
    let trace = read(Path::new(&file)).expect("a recording");
    assert!(trace.summary().user_faults > 10_000, "{}", trace.summary());
    // The names of tracepoints come from this kernel. perf writes when a buffer is half full, so
    // this program has many faults.
    let file = place.text("killed.fltrace");
    let code = "import mmap
memory = mmap.mmap(-1, 128 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for _ in range(16):
    memory[::4096] = bytes(32768)
    memory.madvise(mmap.MADV_DONTNEED)";
    let record = |script: &str| {
        let args = ["record", "-o", &file, "--", "sh", "-c", script, "sh", code];
        Ran::of(&mut command(&args))
    };
    let ran = record("python3 -c \"$1\"; kill -KILL $PPID");
    if ran.err.contains("this system cannot make a recording") {
        eprintln!("no tracepoints here: not tested");
        return;
    }
    assert_eq!(ran.code, Some(128 + 9), "{}", ran.err);
    for part in [note, "perf ended with signal: 9", "are those of the running kernel"] {
        assert!(ran.err.contains(part), "no {part:?} in {}", ran.err);
    }
    let trace = read(Path::new(&file)).expect("a recording");
    assert!(trace.header.notes.iter().any(|it| it.starts_with(note)), "{:?}", trace.header.notes);
    let summary = trace.summary();
    assert!(summary.user_faults > 100_000 && summary.maps > 10, "{summary}");
    // perf has written no fault at this time.
    let error = record("kill -KILL $PPID").fails(1);
    let start = "perf record ended with signal: 9 (SIGKILL) and no recording: perf ended before";
    assert!(error.contains(start), "{error}");
}

/// Returns a program of 32 bits that ends at once.
fn narrow() -> Vec<u8> {
    let (base, size) = (0x804_8000_u32, 84 + 9);
    let half = |value: u16| value.to_le_bytes().to_vec();
    let word = |value: u32| value.to_le_bytes().to_vec();
    [
        b"\x7fELF\x01\x01\x01\0\0\0\0\0\0\0\0\0".to_vec(),
        // An executable file of i386.
        [half(2), half(3), word(1), word(base + 84), word(52), word(0), word(0)].concat(),
        [52, 32, 1, 0, 0, 0].map(half).concat(),
        // A segment with this file, which can be read and executed.
        [1, 0, base, base, size, size, 5, 0x1000].map(word).concat(),
        // xor ebx, ebx; mov eax, 1; int 0x80.
        vec![0x31, 0xdb, 0xb8, 1, 0, 0, 0, 0xcd, 0x80],
    ]
    .concat()
}

#[test]
fn program_of_32_bits_is_named() {
    let place = Place::new();
    let program = place.program("narrow", &narrow(), 0o755);
    if !Command::new(&program).status().is_ok_and(|status| status.success()) {
        eprintln!("no programs of 32 bits here: not tested");
        return;
    }
    let error = Ran::of(&mut command(&["run", "--apply", "populate", "--", &program])).fails(2);
    assert!(error.contains("made for another machine than the library"), "{error}");
    let file = place.text("narrow.fltrace");
    let ran = Ran::of(&mut command(&["record", "-o", &file, "--", &program]));
    let Some(trace) = recorded(&ran, Path::new(&file)) else { return };
    let note = "the kernel does not report the calls of 32-bit programs (narrow)";
    assert!(ran.err.contains(note), "{}", ran.err);
    assert!(trace.header.notes.iter().any(|it| it.starts_with(note)), "{:?}", trace.header.notes);
}

#[test]
fn setuid_program_within_a_recording_is_named() {
    if !is_root() {
        return;
    }
    let place = Place::new();
    // The program outlasts the start of every other program.
    let sleep = fs::read("/bin/sleep").expect("a program");
    let program = place.program("changes", &sleep, 0o4755);
    let open = fs::Permissions::from_mode(0o777);
    fs::create_dir(place.file("out")).expect("a directory");
    fs::set_permissions(place.file("out"), open).expect("ours");
    let file = place.text("out/x.fltrace");
    let user = ["--reuid", "65534", "--regid", "65534", "--clear-groups"];
    let run = |args: &[&str]| {
        let binary = place.file("bin/faultless");
        fs::copy(env!("CARGO_BIN_EXE_faultless"), &binary).expect("copied");
        Ran::of(Command::new("setpriv").args(user).arg(binary).args(args))
    };
    let script = format!("{program} 0.1; true");
    let ran = run(&["record", "--lesser", "-o", &file, "--", "sh", "-c", &script]);
    if recorded(&ran, Path::new(&file)).is_none() {
        return;
    }
    assert!(
        ran.err.contains("no fault of changes was recorded. Remedy: record as root"),
        "{}",
        ran.err
    );
    let error = run(&["record", "--lesser", "-o", &file, "--", &program, "0.1"]).fails(1);
    assert!(error.contains("runs as another user (setuid, setgid or capabilities)"), "{error}");
    let error = run(&["run", "--apply", "populate", "--", &program, "0.1"]).fails(2);
    assert!(error.contains("the loader ignores LD_PRELOAD"), "{error}");
}

/// A process that executes another program while it is recorded.
#[test]
fn process_may_exec_and_end_while_it_is_recorded() {
    let place = Place::new();
    let file = place.text("x.fltrace");
    let mut shell = Command::new("sh")
        .args(["-c", "read line; exec sleep 0.5"])
        .stdin(Stdio::piped())
        .spawn()
        .expect("a shell");
    let pid = shell.id().to_string();
    let started = Instant::now();
    let recorder = command(&["record", "--lesser", "--pid", &pid, "--seconds", "60", "-o", &file])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    // perf needs some time to begin.
    std::thread::sleep(Duration::from_secs(3));
    let mut input = shell.stdin.take().expect("piped");
    input.write_all(b"\n").expect("read");
    shell.wait().expect("ended");
    let output = recorder.wait_with_output().expect("the command ends");
    let ran = Ran {
        code: output.status.code(),
        out: String::new(),
        err: String::from_utf8(output.stderr).expect("text"),
    };
    let Some(trace) = recorded(&ran, Path::new(&file)) else { return };
    assert!(started.elapsed() < Duration::from_secs(50), "the recording ends with the process");
    let kinds: Vec<_> = trace.events.iter().map(|event| event.kind).collect();
    let exec = kinds.iter().position(|kind| matches!(kind, Kind::Exec)).expect("an exec");
    let later = kinds[exec..].iter().filter(|kind| matches!(kind, Kind::Fault { .. }));
    assert!(later.count() > 10, "{:?}", ran.err);
    assert!(matches!(kinds.last(), Some(Kind::Exit)), "{:?}", kinds.last());
}
