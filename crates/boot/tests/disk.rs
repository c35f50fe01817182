//! Programs with files on a disk, on one CPU and on four: the kernel reads pages on demand.

mod common;

use common::{Ran, boot, busybox, deterministic, host, machines, parallel, try_boot};
use faultless_boot::{BootError, Disk, Machine, Program, guest};
use std::fs;
use std::path::Path;
use std::process::Command;

/// The number of pages of each file read by the guest program `disk`, and the unreadable page of
/// `bad`.
const PAGES: u64 = 320;
const BAD: u64 = 37;

/// Returns the contents of these files.
fn contents() -> Vec<u8> {
    let word = |at: u64| (at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..PAGES * 512).flat_map(|at| word(at).to_le_bytes()).collect()
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

fn copy(from: &Path, to: &Path) {
    host(Command::new("cp").arg(from).arg(to), "a copied file");
}

fn with(disk: Disk, machine: Machine) -> Machine {
    Machine { disk: Some(disk), ..machine }
}

/// Runs checks of the guest program `disk`, all of which must pass.
#[track_caller]
fn passes(machine: &Machine, checks: &[&str]) -> Ran {
    let files = folder();
    let data = files.path().join("data");
    fs::create_dir(&data).expect("a created file");
    let contents = contents();
    for name in [
        "reads",
        "odd",
        "mapped",
        "threads",
        "slow",
        "copies",
        "populated",
        "ahead",
        "advised",
        "caches",
        "overwritten",
        "stores",
        "cut",
        "cut_read",
        "bad",
        "out",
    ] {
        fs::write(data.join(name), &contents).expect("a written file");
    }
    for name in ["busybox_copy", "bad_program"] {
        copy(busybox(), &data.join(name));
    }
    // The interpreter's first argument is the applet's name.
    copy(busybox(), &data.join("busybox"));
    let script = data.join("script");
    fs::write(&script, "#!/data/busybox sh\nexec /data/busybox \"$@\"\n").expect("a written file");
    host(Command::new("chmod").arg("755").arg(&script), "an executable file");
    let program = Program::guest(guest("disk").expect("embedded guest programs"));
    let ran = boot(machine, &program.files(files.path()).args(checks)).exited(0);
    let passed = ran.output.lines().filter(|line| line.starts_with("ok ")).count();
    assert!(passed == checks.len() && !ran.output.contains("FAIL"), "{ran}");
    let count = |name| ran.report.counter(name).expect("a counter");
    assert!(count("pages_read") > 0 && count("interrupts_device") > 0, "{ran}");
    ran
}

#[test]
fn files_of_a_disk() {
    let checks = [
        "reads",
        "mapped",
        "many_threads",
        "copies",
        "populated",
        "advised",
        "caches",
        "overwritten",
        "stores",
        "cut",
        "programs",
    ];
    for machine in machines() {
        let ran = passes(&with(Disk::default(), machine), &checks);
        assert!(ran.report.counter("pgmajfault") > Some(0), "{ran}");
    }
}

/// One CPU runs a thread while another thread's page fault waits for a slow disk.
#[test]
fn others_run_during_major_faults() {
    for machine in [Machine { cpus: 1, ..parallel() }, parallel()] {
        let disk = Disk { reads_per_second: Some(10), ..Disk::default() };
        let ran = passes(&with(disk, machine), &["other_threads_run"]);
        assert!(ran.report.counter("pgmajfault") >= Some(PAGES / 32), "{ran}");
    }
}

/// With an additional swap disk, the kernel does not confuse the disks: pages of the program are
/// read back from the right place.
#[test]
fn file_disk_and_swap_disk_are_not_confused() {
    let files = folder();
    for machine in machines() {
        let machine = Machine { memory: 96 << 20, swap: Some(256 << 20), ..machine };
        let program = Program::guest(guest("swap").expect("embedded guest programs"));
        let program = program.files(files.path()).args(["stored_values_are_read_back"]);
        let ran = boot(&with(Disk::default(), machine), &program).exited(0);
        assert!(
            ran.output.contains("ok stored_values_are_read_back") && ran.report.messages.is_empty(),
            "{ran}"
        );
        let count = |name| ran.report.counter(name).expect("a counter");
        assert!(0 < count("pswpin") && count("pswpin") < count("pages_read"), "{ran}");
    }
}

/// Programs that read files see no error while memory is out and other programs are killed. (In the
/// host's time, like the disk's: on a clock of instructions the test did not end within minutes.)
#[test]
fn reads_while_memory_is_out() {
    for machine in [Machine { cpus: 1, ..parallel() }, parallel()] {
        let machine = Machine { memory: 128 << 20, ..machine };
        let ran = passes(&with(Disk::default(), machine), &["while_memory_is_out"]);
        assert_eq!(ran.report.messages.len(), 2, "{ran}");
    }
}

/// Unreadable pages of a disk cause `SIGBUS`, `EIO` or `EFAULT`, and do not affect other programs.
#[test]
fn errors_of_a_disk() {
    let unreadable = [("/data/bad", BAD), ("/data/bad_program", 0)];
    let unreadable = unreadable.map(|(path, page)| (path.to_owned(), page)).to_vec();
    for machine in machines() {
        let disk = Disk { unreadable: unreadable.clone(), ..Disk::default() };
        passes(&with(disk, machine), &["errors"]);
    }
    let disk = Disk { unreadable: vec![("/none".into(), 0)], ..Disk::default() };
    let program = Program::file(busybox()).expect("a valid program").args(["true"]);
    let refused = try_boot(&with(disk, parallel()), &program).err();
    assert!(matches!(refused, Some(BootError::Unfit { .. })), "{refused:?}");
}

/// The cost of a major fault is counted without the disk's time.
#[test]
fn the_cost_of_a_major_fault() {
    let files = folder();
    let unread = fs::File::create(files.path().join("unread")).expect("a created file");
    unread.set_len(12 << 20).expect("a file with a hole");
    let program = Program::guest(guest("reclaim").expect("embedded guest programs"));
    let program = program.files(files.path()).args(["row=major_fault", "disk=/unread", "passes=2"]);
    let cost = |reads_per_second| {
        let ran =
            boot(&with(Disk { reads_per_second, ..Disk::default() }, deterministic()), &program);
        let cost = ran.output.lines().find_map(|line| {
            line.strip_prefix("row major_fault ")?.strip_suffix(" per_fault")?.parse::<f64>().ok()
        });
        let cost = cost.unwrap_or_else(|| panic!("no row; {ran}"));
        assert!(ran.report.counter("pgmajfault") >= Some(96), "{ran}");
        cost
    };
    // Each read of the slow disk takes 2,000,000 instructions. Of this time only the timer's ticks
    // count, some thousand instructions. A slow host only adds to both costs, so the minimum of
    // several boots is compared.
    let (mut quick, mut slow) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..5 {
        quick = quick.min(cost(None));
        slow = slow.min(cost(Some(500)));
        if (slow - quick).abs() < 20_000.0 {
            break;
        }
    }
    assert!(quick > 5000.0 && (slow - quick).abs() < 20_000.0, "{quick} and {slow}");
}

/// A machine with less memory than its files: pages are dropped and read again.
#[test]
fn files_larger_than_memory() {
    let files = folder();
    let shell = files.path().join("busybox");
    copy(busybox(), &shell);
    let large = fs::File::create(files.path().join("large")).expect("a created file");
    large.set_len(600 << 20).expect("a file with a hole");
    let program = Program::file(&shell).expect("a valid program").files(files.path());
    let script = "dd if=/large of=/dev/null bs=1M && dd if=/large of=/dev/null bs=64k count=99 && tail -c 5 /large";
    let program = program.args(["sh", "-c", script]);
    let machine = Machine { memory: 256 << 20, ..parallel() };
    assert!(matches!(try_boot(&machine, &program).err(), Some(BootError::Memory { .. })));
    let ran = boot(&with(Disk::default(), machine), &program).exited(0);
    assert_eq!(ran.output, "\0\0\0\0\0", "{ran}");
    assert!(ran.report.counter("pages_read") >= Some(600 << 8), "{ran}");
}

/// Sequential reads with `read` are read ahead in growing runs; with prefault off, in the blocks
/// preferred by the disk.
#[test]
fn sequential_reads() {
    let files = folder();
    let shell = files.path().join("busybox");
    copy(busybox(), &shell);
    let long = fs::File::create(files.path().join("long")).expect("a created file");
    long.set_len(16 << 20).expect("a file with a hole");
    let program = Program::file(&shell).expect("a valid program").files(files.path());
    let reads = |order: u32, file: &str| {
        let script = format!("dd if={file} of=/dev/null bs=4k");
        let words = vec![format!("set=prefault_max_order={order}")];
        let machine = Machine { words, ..deterministic() };
        let program = program.clone().args(["sh", "-c", &script]);
        let ran = boot(&with(Disk::default(), machine), &program).exited(0);
        ran.report.counter("store_read").unwrap_or_else(|| panic!("{ran}"))
    };
    let [blocks, windows] = [0, 5].map(|order| reads(order, "/long") - reads(order, "/dev/null"));
    // 32 pages at a time.
    assert!((128..140).contains(&blocks) && windows < 90, "{blocks} and {windows} reads");
}

/// Text on a disk that is in use in base pages is moved to huge pages: missing pages are read in
/// the background.
#[test]
fn text_of_a_disk_collapses() {
    let files = folder();
    let data = files.path().join("data");
    fs::create_dir(&data).expect("a created file");
    // Each word of a page contains the page number.
    let text: Vec<u8> = (0..3 * 512u64).flat_map(|page| page.to_le_bytes().repeat(512)).collect();
    fs::write(data.join("text"), text).expect("a written file");
    let program = Program::guest(guest("collapse").expect("embedded guest programs"));
    let program = program.files(files.path()).args(["text_on_a_disk"]);
    for machine in machines() {
        let machine = Machine { words: vec!["text_scan=20".into()], ..machine };
        let ran = boot(&with(Disk::default(), machine), &program).exited(0);
        assert!(ran.output.contains("ok text_on_a_disk"), "{ran}");
        assert!(ran.report.counter("thp_collapse_file") >= Some(3), "{ran}");
    }
}

/// Random system calls from every CPU, by a program on a slow disk, with files as arguments of the
/// calls.
#[test]
fn random_calls() {
    let files = folder();
    for name in ["a", "b", "c"] {
        fs::write(files.path().join(name), contents()).expect("a written file");
    }
    let program = Program::guest(guest("fuzz").expect("embedded guest programs"));
    let program = program.files(files.path()).args(["seconds=20", "calls=all"]);
    let disk = Disk { reads_per_second: Some(500), ..Disk::default() };
    let ran = boot(&with(disk, parallel()), &program).exited(0);
    assert!(!ran.output.contains("FAIL"), "{ran}");
}

/// The shell script of the tests of programs, from a disk.
#[test]
fn a_script() {
    let files = folder();
    let (shell, script) = (files.path().join("busybox"), files.path().join("script.sh"));
    copy(busybox(), &shell);
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/script.sh"), &script)
        .expect("a copied file");
    let program = Program::file(&shell).expect("a valid program").files(files.path()).args([
        "sh",
        "/script.sh",
        "/busybox",
        "/tmp",
    ]);
    for machine in machines() {
        let there = boot(&machine, &program).exited(0).output;
        assert!(there.ends_with("done\n"), "{there}");
        let ran = boot(&with(Disk::default(), machine), &program).exited(0);
        assert_eq!(ran.output, there, "{ran}");
    }
}

/// A dynamically linked program, with its interpreter and libraries.
#[test]
fn a_dynamically_linked_program() {
    let files = folder();
    let program = files.path().join("program");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/program.c");
    let mut compile = Command::new("cc");
    compile.args(["-O1", "-pthread", "-o"]).arg(&program).arg(source).arg("-lm");
    host(&mut compile, "apt-get install gcc libc6-dev");
    let needed = host(Command::new("ldd").arg(&program), "a dynamically linked program");
    for path in needed.split_whitespace().filter(|word| word.starts_with('/')) {
        let inside = files.path().join(path.trim_start_matches('/'));
        fs::create_dir_all(inside.parent().expect("a directory")).expect("a created file");
        copy(Path::new(path), &inside);
    }
    let there =
        host(Command::new(&program).arg("one").env_clear(), "a program that runs on the host");
    let program = Program::file_among(files.path(), &program).expect("a valid program");
    let mut program = program.args(["one"]);
    program.environ.clear();
    for machine in machines() {
        let ran = boot(&with(Disk::default(), machine), &program).exited(0);
        assert_eq!(ran.output, there, "{ran}");
        assert!(ran.report.counter("pgmajfault") > Some(0), "{ran}");
    }
}
