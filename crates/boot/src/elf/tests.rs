//! Programs with one error each.

use super::check;

/// The offsets of the parts in the file below.
const PHOFF: usize = 0x40;
const PHENT: usize = 0x38;

/// A program of two segments: text at 0x400000 and data at 0x402000, the second longer in memory.
fn program() -> Vec<u8> {
    let mut file = vec![0; 0x2010];
    file[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\x00");
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(16, &2u16.to_le_bytes()); // ET_EXEC
    put(18, &62u16.to_le_bytes()); // x86-64
    put(20, &1u32.to_le_bytes());
    put(24, &0x40_1000_u64.to_le_bytes()); // entry
    put(32, &(PHOFF as u64).to_le_bytes());
    put(52, &64u16.to_le_bytes());
    put(54, &(PHENT as u16).to_le_bytes());
    put(56, &2u16.to_le_bytes());
    let segments =
        [(5u32, 0u64, 0x40_0000_u64, 0x1800u64, 0x1800u64), (6, 0x2000, 0x40_2000, 0x10, 0x2000)];
    for (number, (flags, offset, address, filed, size)) in segments.into_iter().enumerate() {
        let at = PHOFF + number * PHENT;
        put(at, &1u32.to_le_bytes()); // PT_LOAD
        put(at + 4, &flags.to_le_bytes());
        for (field, value) in
            [offset, address, address, filed, size, 0x1000].into_iter().enumerate()
        {
            put(at + 8 + 8 * field, &value.to_le_bytes());
        }
    }
    file
}

/// Returns the offset of a field of a segment, by its number in the entry.
fn field(segment: usize, field: usize) -> usize {
    PHOFF + segment * PHENT + 8 + 8 * field
}

#[track_caller]
fn refused(file: &[u8], expected: &[&str]) {
    let error = check(file, |_| false).expect_err(expected[0]).to_string();
    for expected in expected {
        assert!(error.contains(expected), "{error:?} does not contain {expected:?}");
    }
}

#[test]
fn programs_pass() {
    let mut file = program();
    assert_eq!(check(&file, |_| false), Ok(()));
    // Position-independent, from address 0.
    file[16] = 3;
    file[24..32].copy_from_slice(&0x1000u64.to_le_bytes());
    file[field(0, 1)..][..8].copy_from_slice(&0u64.to_le_bytes());
    file[field(1, 1)..][..8].copy_from_slice(&0x2000u64.to_le_bytes());
    assert_eq!(check(&file, |_| false), Ok(()));
}

#[test]
fn files_that_are_no_programs() {
    refused(b"", &["not an ELF file"]);
    refused(b"\x7fEL", &["not an ELF file"]);
    refused(b"hello, world", &["ELF header", "not an ELF file"]);
    refused(b"#!/bin/sh\nexit", &["script", "/bin/sh"]);
    refused(&program()[..0x3f], &["ends at 0x3f"]);
    refused(&program()[..0x80], &["program headers at offset 0x40", "truncated", "0x80"]);
}

#[test]
fn headers_with_one_byte_wrong() {
    let cases: [(usize, u8, &[&str]); 12] = [
        (4, 1, &["ELF header", "64-bit", "class 1"]),
        (5, 2, &["little-endian"]),
        (6, 9, &["version", "9"]),
        (16, 1, &["object file"]),
        (16, 4, &["core dump"]),
        (16, 77, &["type 77"]),
        (18, 40, &["another machine (40)"]),
        (54, 32, &["program headers of 32 bytes"]),
        (56, 0, &["no program headers"]),
        (57, 0xff, &["ELF header", "65282 program headers", "at most 1170"]),
        (57, 4, &["1026 of the headers lie beyond the file's end at 0x2010"]),
        (26, 0x80, &["entry point 0x801000", "no executable segment"]),
    ];
    for (at, byte, expected) in cases {
        let mut file = program();
        file[at] = byte;
        refused(&file, expected);
    }
}

#[test]
fn segments_with_one_field_wrong() {
    let cases: [(usize, u64, &[&str]); 16] = [
        (field(1, 0), 0x3000, &["program header 1 at offset 0x78", "truncated", "0x2010"]),
        (field(1, 0), u64::MAX - 0xfff, &["program header 1", "truncated"]),
        (field(1, 3), u64::MAX, &["program header 1", "truncated"]),
        (field(1, 4), 0xf, &["more bytes in the file (0x10) than in memory (0xf)"]),
        (field(1, 1), 0x40_2008, &["differ within a page"]),
        (field(1, 5), 0x1001, &["alignment 0x1001"]),
        (field(1, 4), u64::MAX, &["do not lie in a program's addresses"]),
        (field(1, 1), 0xffff_8000_0000_0000, &["do not lie in a program's addresses"]),
        (field(1, 4), 0x7fff_ffff_f000, &["do not lie in a program's addresses"]),
        (field(1, 1), u64::MAX - 0xfff, &["do not lie in a program's addresses"]),
        (field(1, 1), 0x7fff_f000_0000, &["do not lie in a program's addresses"]),
        (field(1, 4), 0x7fff_f000_0000 - 0x40_2000 + 1, &["0x7fffefbfe001 bytes at 0x402000"]),
        (field(0, 3), 0x1801, &["(0x1801) than in memory (0x1800)"]),
        (field(0, 1), 0, &["address 0x0 is below 0x10000"]),
        (field(1, 1), 0x40_0000, &["program header 1", "before segment 0 ends (0x401800)"]),
        (field(0, 4), 0x2001, &["before segment 0 ends (0x402001)"]),
    ];
    for (at, value, expected) in cases {
        let mut file = program();
        file[at..at + 8].copy_from_slice(&value.to_le_bytes());
        refused(&file, expected);
    }
}

#[test]
fn kinds_of_segments() {
    let mut file = program();
    // Both become notes.
    file[PHOFF] = 4;
    file[PHOFF + PHENT] = 4;
    refused(&file, &["program headers at offset 0x40", "PT_LOAD"]);
    // The first segment names the interpreter.
    let mut file = program();
    file[PHOFF] = 3;
    file[0x100..0x110].copy_from_slice(b"/lib64/ld.so.2\0\0");
    file[field(0, 0)..][..8].copy_from_slice(&0x100u64.to_le_bytes());
    file[field(0, 3)..][..8].copy_from_slice(&0xfu64.to_le_bytes());
    refused(&file, &["program header 0", "dynamically linked", "\"/lib64/ld.so.2\"", "-static"]);
    // With the interpreter present, only the text is missing, because the name replaced it.
    let error = check(&file, |name| name == "/lib64/ld.so.2").expect_err("no text");
    assert!(error.to_string().contains("entry point 0x401000"), "{error}");
    // Both segments name an interpreter.
    let mut twice = file.clone();
    twice[PHOFF + PHENT] = 3;
    let error = check(&twice, |_| true).expect_err("two interpreters");
    assert!(error.to_string().contains("1 at offset 0x78: a second interpreter"), "{error}");
    // A name beyond the maximum length.
    let mut long = file.clone();
    long[field(0, 3)..][..8].copy_from_slice(&0x1001u64.to_le_bytes());
    refused(&long, &["name of 4097 bytes"]);
    // The segment lies outside the file: the error omits the name.
    file[field(0, 0)..][..8].copy_from_slice(&u64::MAX.to_le_bytes());
    refused(&file, &["dynamically linked"]);
    // Position-independent, and too large for the address range of such programs.
    let mut file = program();
    file[16] = 3;
    file[field(1, 4)..][..8].copy_from_slice(&0x7000_0000_0000_u64.to_le_bytes());
    refused(&file, &["program headers at offset 0x40", "no place", "to 0x7ffff0000000"]);
    // Text without execute permission.
    let mut file = program();
    file[PHOFF + 4] = 4;
    refused(&file, &["entry point 0x401000"]);
}

/// Replaces words of the program headers by arbitrary values: no value causes a panic, and accepted
/// programs lie in the range for programs.
#[test]
fn no_header_word_causes_a_panic() {
    let whole = program();
    for at in (PHOFF..PHOFF + 2 * PHENT).step_by(8) {
        for shift in 0..64 {
            for value in [1u64 << shift, (1u64 << shift) - 1, u64::MAX << shift] {
                let mut file = whole.clone();
                file[at..at + 8].copy_from_slice(&value.to_le_bytes());
                if let Err(error) = check(&file, |_| false) {
                    assert!(error.to_string().contains("header"), "{error}");
                }
            }
        }
    }
}

#[test]
fn no_byte_causes_a_panic() {
    let whole = program();
    for at in 0..0xb0 {
        for byte in [0, 1, 0x7f, 0x80, 0xff] {
            let mut file = whole.clone();
            file[at] = byte;
            let _ = check(&file, |_| false);
            let _ = check(&file[..at], |_| false);
        }
    }
}
