//! Machines with a kernel of a hundred bytes: tests of the interface between host and guest,
//! without the real kernel.

use super::{Clock, Input, Limits, Streams};
use crate::{BootError, End, Machine, Program, Run};
use std::arch::global_asm;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tempfile::TempDir;

// Entered in 32-bit protected mode with `ebx` at the start information. After `cpus=1 `, its
// command line has a letter for the action. `e`: echoes the serial port's input to the output's
// console, up to and including the byte 4, and ends. `h`: hangs. `w`: writes a byte to the output's
// console and hangs. Any other letter: writes a word to each console and ends.
global_asm!(
    ".pushsection .rodata",
    ".code32",
    "faultless_boot_fake_start:",
    // Ports, and the texts written there; 64 bytes at 0x100000.
    "  .word 0xeb",
    "  .byte 4",
    "  .ascii \"out\\n\"",
    "  .word 0xea",
    "  .byte 4",
    "  .ascii \"err\\n\"",
    "  .word 0xe9",
    "  .byte 25",
    "  .ascii \"counter faults 12\\nexit 7\\n\"",
    "  .word 0",
    "  .balign 64",
    // The entry.
    "  mov eax, [ebx + 24]",
    "  mov al, [eax + 7]",
    "  cmp al, 'h'",
    "  je 6f",
    "  cmp al, 'w'",
    "  je 7f",
    "  cmp al, 'e'",
    "  je 4f",
    "  mov esi, 0x100000",
    "2: xor eax, eax",
    "  lodsw",
    "  test eax, eax",
    "  jz 5f",
    "  mov edx, eax",
    "  xor ecx, ecx",
    "  lodsb",
    "  mov cl, al",
    "  rep outsb",
    "  jmp 2b",
    "4: mov dx, 0x3fd",
    "  in al, dx",
    "  test al, 1",
    "  jz 4b",
    "  mov dx, 0x3f8",
    "  in al, dx",
    "  mov dx, 0xeb",
    "  out dx, al",
    "  cmp al, 4",
    "  jne 4b",
    "5: mov dx, 0xf4",
    "  out dx, eax",
    "6: hlt",
    "  jmp 6b",
    "7: mov dx, 0xeb",
    "  out dx, al",
    "  jmp 6b",
    "faultless_boot_fake_end:",
    ".code64",
    ".popsection",
);

unsafe extern "C" {
    static faultless_boot_fake_start: u8;
    static faultless_boot_fake_end: u8;
}

/// Returns the kernel as an ELF file: a segment at 1 MiB, and the note with the entry point.
fn kernel() -> Vec<u8> {
    const AT: u64 = 0x10_0000;
    const ENTRY: u32 = 0x10_0040;
    // SAFETY: the assembler put the labels around bytes that are never written.
    let code = unsafe {
        let (start, end) =
            (&raw const faultless_boot_fake_start, &raw const faultless_boot_fake_end);
        std::slice::from_raw_parts(start, end.offset_from_unsigned(start))
    };
    let mut note = Vec::new();
    for word in [4u32, 4, 18] {
        note.extend(word.to_le_bytes());
    }
    note.extend(b"Xen\0");
    note.extend(ENTRY.to_le_bytes());

    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    file.extend([2, 0, 62, 0]);
    file.extend(1u32.to_le_bytes());
    let words = |file: &mut Vec<u8>, values: &[u64]| {
        values.iter().for_each(|value| file.extend(value.to_le_bytes()));
    };
    words(&mut file, &[u64::from(ENTRY), 0x40, 0]);
    file.extend(0u32.to_le_bytes());
    file.extend([64, 0, 56, 0, 2, 0, 64, 0, 0, 0, 0, 0]);
    let headers = 64 + 2 * 56;
    let note_at = headers + code.len() as u64;
    for (kind, offset, address, size) in
        [(1u32, headers, AT, code.len() as u64), (4, note_at, 0, note.len() as u64)]
    {
        file.extend(kind.to_le_bytes());
        file.extend(7u32.to_le_bytes());
        words(&mut file, &[offset, address, address, size, size, 4]);
    }
    file.extend(code);
    file.extend(note);
    file
}

/// Returns a folder with the kernel, a machine that boots this kernel, and a placeholder program.
fn machine(mode: &str) -> (TempDir, Machine, Program) {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("kernel");
    fs::write(&file, kernel()).expect("written");
    let program = Program::unchecked(&file).expect("there");
    let machine = Machine {
        memory: 64 << 20,
        kernel: Some(file),
        words: vec![mode.to_owned()],
        ..Machine::default()
    };
    (dir, machine, program)
}

#[track_caller]
fn run(mode: &str, streams: Streams<'_>, limits: &Limits<'_>) -> Run {
    let (_dir, machine, program) = machine(mode);
    machine.run(&program, streams, limits).expect("QEMU runs")
}

#[test]
fn consoles_reach_their_streams() {
    for clock in [Clock::Real, Clock::Deterministic] {
        let (mut output, mut errors) = (Vec::new(), Vec::new());
        let (_dir, mut machine, program) = machine("speak");
        machine.clock = clock;
        let streams = Streams::keep(&mut output, &mut errors);
        let run = machine.run(&program, streams, &Limits::default()).expect("QEMU runs");
        assert_eq!(run.end, End::Exited(7));
        assert_eq!(run.report.counter("faults"), Some(12));
        assert_eq!((output.as_slice(), errors.as_slice()), (&b"out\n"[..], &b"err\n"[..]));
    }
}

#[test]
fn input_arrives_completely_and_ends() {
    let mut output = Vec::new();
    let input = Input::Bytes(b"a\x04b\x10\n".to_vec());
    let streams = Streams { input, output: Box::new(&mut output), errors: Box::new(io::sink()) };
    // The fake kernel discards no byte, ends at the first 4, and does not recognise the escape
    // byte.
    let run = run("echo", streams, &Limits::default());
    assert_eq!(run.end, End::Silent(String::new()));
    assert_eq!(output, b"\x16a\x10\x04");
    assert_eq!(super::escaped(b"a\x04b\x10\n"), b"a\x10\x04b\x10\x10\n");
}

#[test]
fn a_machine_that_hangs_is_stopped() {
    let started = Instant::now();
    let (mut output, mut errors) = (Vec::new(), Vec::new());
    let limits = Limits { timeout: Some(Duration::from_millis(300)), stop: None };
    let timed_out = run("hang", Streams::keep(&mut output, &mut errors), &limits);
    assert_eq!(timed_out.end, End::TimedOut);
    assert!(timed_out.wall >= Duration::from_millis(300));
    let stop = || started.elapsed() > Duration::from_millis(400);
    let limits = Limits { timeout: None, stop: Some(&stop) };
    let stopped = run("hang", Streams::keep(&mut output, &mut errors), &limits);
    assert_eq!(stopped.end, End::Stopped);
}

/// A writer that fails with this error.
struct Fails(io::ErrorKind);

impl io::Write for Fails {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(self.0.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn closed_output_ends_the_machine() {
    // The output has no reader, and the kernel does not end.
    let (_dir, machine, program) = machine("write");
    let streams = Streams {
        input: Input::None,
        output: Box::new(Fails(io::ErrorKind::BrokenPipe)),
        errors: Box::new(io::sink()),
    };
    let run = machine.run(&program, streams, &Limits::default()).expect("QEMU runs");
    assert_eq!(run.end, End::Closed);
}

#[test]
fn closed_output_keeps_the_status_and_lost_output_is_reported() {
    let (_dir, machine, program) = machine("speak");
    let run = |kind| {
        let (output, errors) = (Box::new(Fails(kind)), Box::new(io::sink()));
        let streams = Streams { input: Input::None, output, errors };
        machine.run(&program, streams, &Limits::default()).expect("QEMU runs").end
    };
    assert_eq!(run(io::ErrorKind::BrokenPipe), End::Exited(7));
    let End::Unwritten(why) = run(io::ErrorKind::StorageFull) else { panic!("a write error") };
    assert!(why.starts_with("standard output: "), "{why}");
}

#[test]
fn qemu_errors_are_passed_on() {
    let (_dir, mut machine, program) = machine("speak");
    let (mut output, mut errors) = (Vec::new(), Vec::new());
    machine.cpu = "no-such-cpu".into();
    let run = machine.run(&program, Streams::keep(&mut output, &mut errors), &Limits::default());
    let End::Silent(stderr) = run.expect("QEMU starts").end else {
        panic!("an end without a report")
    };
    assert!(stderr.contains("no-such-cpu"), "{stderr}");
}

#[test]
fn invalid_inputs_are_refused_before_boot() {
    let (_dir, machine, program) = machine("speak");
    let refused = |machine: &Machine, program: &Program| {
        let (mut output, mut errors) = (Vec::new(), Vec::new());
        let streams = Streams::keep(&mut output, &mut errors);
        machine.run(program, streams, &Limits::default()).expect_err("is refused")
    };
    let gone = Machine { kernel: Some(PathBuf::from("/no/kernel")), ..machine.clone() };
    let error = refused(&gone, &program);
    assert!(error.to_string().starts_with("/no/kernel: No such file"), "{error}");
    let error = refused(&machine, &program.clone().args(["a\0b"]));
    assert!(matches!(error, BootError::Nul { what: "argument", .. }), "{error}");
    let error = refused(&machine, &program.clone().files("/no/files"));
    assert!(error.to_string().starts_with("/no/files: No such file"), "{error}");
}
