//! Ten million faults are recorded, replayed and advised on in one GiB of memory.

mod common;

use common::command;
use std::fs;
use std::process::Stdio;
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// The most resident memory of a command. The replayed program has 128 MiB.
const MOST: u64 = 1024 * MIB;
/// Touches 128 MiB, and returns the memory, 306 times: 10,027,008 faults.
const PROGRAM: &str = "
import mmap
memory = mmap.mmap(-1, 128 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for _ in range(306):
    for at in range(0, 128 << 20, 4096):
        memory[at] = 1
    memory.madvise(mmap.MADV_DONTNEED)
";

/// Runs the command. Returns its output and its peak resident memory in bytes.
fn peak(args: &[&str]) -> (String, u64) {
    let mut child = command(args).stdout(Stdio::piped()).spawn().expect("the command starts");
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    while child.try_wait().expect("a child").is_none() {
        let text = fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        peak = peak.max(kib.unwrap_or(0) << 10);
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output().expect("it has ended");
    assert!(output.status.success(), "{args:?}");
    println!("{}: {} MiB", args[0], peak / MIB);
    (String::from_utf8(output.stdout).expect("text"), peak)
}

#[test]
#[ignore = "takes minutes, and records as root; `.ci/long` runs it"]
fn ten_million_faults_need_at_most_one_gib() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("huge.fltrace");
    let file = file.to_str().expect("text");
    let (_, recorded) = peak(&["record", "-o", file, "--", "python3", "-c", PROGRAM]);
    let (replay, replayed) = peak(&["replay", file]);
    let (before, _) = replay.split_once(" faults in user").expect("a summary");
    let faults = before.rsplit(' ').next().and_then(|count| count.parse::<u64>().ok());
    assert!(faults.is_some_and(|faults| faults > 10_000_000), "{replay}");
    let (advice, advised) = peak(&["advise", file]);
    assert!(advice.contains("are spent in 10,0"), "{advice}");
    for (what, bytes) in [("record", recorded), ("replay", replayed), ("advise", advised)] {
        assert!(bytes > 0 && bytes <= MOST, "{what}: {} MiB", bytes / MIB);
    }
}
