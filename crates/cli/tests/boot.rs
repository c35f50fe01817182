//! `faultless boot`: the selection of the accelerator. A script stands in for QEMU if a test needs
//! KVM to work, or to hang.

mod common;

use common::{Ran, command, faultless, json_lines};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Creates a stand-in for QEMU that runs `kvm` if called with KVM, and QEMU otherwise.
fn stand_in(dir: &Path, kvm: &str) {
    let script = format!(
        "#!/bin/bash\nPATH=${{PATH#*:}}\nif [[ \" $* \" == *' -accel kvm '* ]]; then\n{kvm}\nfi\nexec qemu-system-x86_64 \"$@\"\n"
    );
    let file = dir.join("qemu-system-x86_64");
    fs::write(&file, script).expect("written");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).expect("ours");
}

/// Boots a bundled program that faults, with the stand-in in `dir`.
fn boot(dir: &Path, args: &[&str]) -> Ran {
    let all = [&["boot", "--json", "-"], args, &["workload", "pft", "size=64K"]].concat();
    let mut command = command(&all);
    let path = std::env::var("PATH").expect("a path");
    Ran::of(command.env("PATH", format!("{}:{path}", dir.display())))
}

/// Returns the accelerator reported in the results.
fn accel(ran: &Ran) -> String {
    let json: String =
        ran.out.lines().filter(|line| line.starts_with('{')).collect::<Vec<_>>().join("\n");
    let lines = json_lines(&json);
    assert!(!lines.is_empty(), "{}", ran.err);
    lines[0]["params"]["accel"].as_str().expect("a reported accelerator").to_owned()
}

/// Returns whether this process may open KVM. KVM may still fail.
fn opens() -> bool {
    fs::File::options().read(true).write(true).open("/dev/kvm").is_ok()
}

#[test]
fn boot_uses_kvm_if_a_machine_runs_under_it() {
    let dir = tempfile::tempdir().expect("a directory");
    stand_in(dir.path(), "exec qemu-system-x86_64 \"${@/#kvm/tcg,thread=multi}\"");
    let ran = boot(dir.path(), &[]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    if opens() {
        assert_eq!(accel(&ran), "kvm", "{}", ran.err);
        assert!(ran.err.contains("on the processor (kvm)"), "{}", ran.err);
    } else {
        assert_eq!(accel(&ran), "tcg", "{}", ran.err);
        assert!(ran.err.contains("as KVM does not work: /dev/kvm: "), "{}", ran.err);
    }
}

#[test]
fn boot_falls_back_to_emulation_if_kvm_hangs_or_fails() {
    let dir = tempfile::tempdir().expect("a directory");
    for (kvm, why) in [("exec sleep 30", "within a second"), ("echo broken >&2; exit 1", "broken")]
    {
        stand_in(dir.path(), kvm);
        let begun = Instant::now();
        let ran = boot(dir.path(), &[]);
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        assert!(begun.elapsed() < Duration::from_secs(15), "after {:?}", begun.elapsed());
        assert_eq!(accel(&ran), "tcg");
        let why = if opens() { why } else { "/dev/kvm" };
        assert!(ran.err.contains("emulated (tcg), as KVM does not work: "), "{}", ran.err);
        assert!(ran.err.contains(why), "no {why:?} in {}", ran.err);
    }
}

/// QEMU prints warnings first, and a line after the error.
#[test]
fn reason_against_kvm_is_one_line_with_the_error() {
    let dir = tempfile::tempdir().expect("a directory");
    let kvm = "for line in 'warning: too many' 'error: no MSR' 'the end'; do\n\
               echo \"qemu-system-x86_64: $line\" >&2; done; exit 1";
    stand_in(dir.path(), kvm);
    let ran = boot(dir.path(), &[]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let why = if opens() { "QEMU: no MSR:\n" } else { "/dev/kvm: " };
    let expected = format!("emulated (tcg), as KVM does not work: {why}");
    assert!(ran.err.contains(&expected), "no {expected:?} in {}", ran.err);
    assert!(!ran.err.contains("too many"), "{}", ran.err);
}

/// Returns a program whose only instruction is privileged: the header, a segment, `hlt`.
fn halting() -> Vec<u8> {
    let (begin, size) = (0x40_0000_u64, 0x79_u64);
    let words = |words: &[u16]| words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let longs = |longs: &[u64]| longs.iter().flat_map(|long| long.to_le_bytes()).collect();
    let parts: [Vec<u8>; 7] = [
        b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec(),
        // An executable for x86-64, version 1.
        words(&[2, 62, 1, 0]),
        // The first instruction, the offsets of the segments and the sections.
        longs(&[begin + 0x78, 0x40, 0]),
        // Flags, sizes and numbers of the headers.
        words(&[0, 0, 0x40, 0x38, 1, 0x40, 0, 0]),
        // A segment to load, readable and executable: offset, addresses, sizes, alignment.
        words(&[1, 0, 5, 0]),
        longs(&[0, begin, begin, size, size, 0x1000]),
        vec![0xf4],
    ];
    parts.concat()
}

#[test]
fn program_ended_by_a_signal_is_reported() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("halts");
    fs::write(&file, halting()).expect("written");
    let ran = faultless(&["boot", "--accel", "tcg", file.to_str().expect("text")]);
    let expected = "halts: the program ended with signal: 11 (SIGSEGV)\n";
    assert!(ran.err.ends_with(expected), "{}", ran.err);
    assert_eq!(ran.code, Some(128 + 11), "{}", ran.err);
}

#[test]
fn requested_accelerator_is_not_probed() {
    let dir = tempfile::tempdir().expect("a directory");
    stand_in(dir.path(), "echo asked >&2; exit 1");
    for args in [&["--accel", "tcg"][..], &["--clock", "deterministic"]] {
        let ran = boot(dir.path(), args);
        assert_eq!((ran.code, accel(&ran)), (Some(0), "tcg".to_owned()), "{}", ran.err);
        assert!(ran.err.contains("emulated (tcg):"), "{}", ran.err);
    }
    let error = boot(dir.path(), &["--accel", "kvm"]).fails(1);
    assert!(error.contains(if opens() { "asked" } else { "--accel kvm: /dev/kvm" }), "{error}");
    let both = ["boot", "--accel", "kvm", "--clock", "deterministic", "workload"];
    let error = faultless(&both).fails(2);
    assert!(error.contains("use one of the two"), "{error}");
}
