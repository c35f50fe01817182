//! Checks, before the boot, whether the kernel can run a file.
//!
//! A kernel reports a bad program only as `ENOEXEC`; here each error names the place in the file.
//! An accepted file is a 64-bit x86 program, at fixed addresses or position-independent, whose
//! segments lie in the file and do not overlap in memory. The program is statically linked, or its
//! interpreter is among the files. The last check makes the kernel's own plan: a program that the
//! kernel would reject is rejected here.

use faultless_personality::elf::{INTERPRETER, MOST_SEGMENTS, PROGRAMS, Plan};
use object::LittleEndian;
use object::elf::{self, FileHeader64, ProgramHeader64};
use object::read::elf::{FileHeader, ProgramHeader};
use std::fmt;

const PAGE: u64 = 4096;

/// The first bytes of a program.
pub(crate) const MAGIC: [u8; 4] = elf::ELFMAG;

type Header = FileHeader64<LittleEndian>;

/// An error in a program, and its place in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ElfError {
    place: Place,
    why: String,
}

/// A part of an ELF file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The header, at offset 0.
    Header,
    /// The table of segments.
    Segments { at: u64 },
    /// One of the segments: its number, and the offset of its entry.
    Segment { number: usize, at: u64 },
}

impl fmt::Display for ElfError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place {
            Place::Header => write!(f, "ELF header: {}", self.why),
            Place::Segments { at } => write!(f, "program headers at offset {at:#x}: {}", self.why),
            Place::Segment { number, at } => {
                write!(f, "program header {number} at offset {at:#x}: {}", self.why)
            }
        }
    }
}

impl std::error::Error for ElfError {}

/// Fails with a place and a message.
macro_rules! wrong {
    ($place:expr, $($why:tt)+) => {
        return Err(ElfError { place: $place, why: format!($($why)+) })
    };
}

/// Checks the program in `data`, the whole file; `comes_along` returns whether the files contain
/// this path.
pub fn check(data: &[u8], comes_along: impl Fn(&str) -> bool) -> Result<(), ElfError> {
    let header = header(data)?;
    let endian = LittleEndian;
    let at = header.e_phoff(endian);
    let size = u64::from(header.e_phentsize(endian));
    if header.e_phnum(endian) == 0 {
        wrong!(Place::Header, "no program headers, so this is not a linked program");
    }
    if size != size_of::<ProgramHeader64<LittleEndian>>() as u64 {
        wrong!(Place::Header, "program headers of {size} bytes; the size must be 56");
    }
    let count = header.e_phnum(endian);
    if u64::from(count) > MOST_SEGMENTS {
        wrong!(Place::Header, "{count} program headers; at most {MOST_SEGMENTS} are read");
    }
    let segments = match header.program_headers(endian, data) {
        Ok(segments) => segments,
        Err(_) => wrong!(
            Place::Segments { at },
            "{} of the headers lie beyond the file's end at {:#x}; the file is truncated",
            count,
            data.len()
        ),
    };
    let place = |number: usize| Place::Segment { number, at: at + number as u64 * size };

    let mut loaded: Option<(usize, u64)> = None;
    let (mut entered, mut interpreted) = (false, None);
    for (number, segment) in segments.iter().enumerate() {
        match segment.p_type(endian) {
            elf::PT_INTERP => {
                interpreter(segment, data, &comes_along, place(number))?;
                if let Some(first) = interpreted.replace(number) {
                    wrong!(place(number), "a second interpreter; program header {first} names one");
                }
            }
            elf::PT_LOAD => {
                let end = load(header, segment, data, place(number))?;
                let start = segment.p_vaddr(endian);
                if let Some((before, below)) = loaded.filter(|(_, below)| start < *below) {
                    wrong!(
                        place(number),
                        "the segment begins at {start:#x}, before segment {before} ends ({below:#x})"
                    );
                }
                loaded = Some((number, end));
                let executable = segment.p_flags(endian).0 & elf::PF_X.0 != 0;
                let entry = header.e_entry(endian);
                entered |= executable && (start..end).contains(&entry);
            }
            _ => {}
        }
    }
    if loaded.is_none() {
        wrong!(Place::Segments { at }, "no header has a segment to load (PT_LOAD)");
    }
    if !entered {
        let entry = header.e_entry(endian);
        wrong!(
            Place::Header,
            "the entry point {entry:#x} lies in no executable segment, so this is not a program"
        );
    }
    if plan(data).is_none() {
        wrong!(
            Place::Segments { at },
            "the kernel finds no place for the segments from {:#x} to {:#x}",
            PROGRAMS.start,
            PROGRAMS.end
        );
    }
    Ok(())
}

/// Returns the kernel's layout of the program in `data`, the whole file; `None` if the kernel
/// rejects the program.
pub fn plan(data: &[u8]) -> Option<Plan> {
    let header = faultless_personality::elf::Header::parse(data)?;
    let table = header.table()?;
    let table = data.get(usize::try_from(table.start).ok()?..usize::try_from(table.end).ok()?)?;
    header.plan(table, data.len() as u64).ok()?
}

/// The header of an x86-64 program.
fn header(data: &[u8]) -> Result<&Header, ElfError> {
    let place = Place::Header;
    if data.starts_with(b"#!") {
        let line = data[2..].split(|byte| *byte == b'\n').next().unwrap_or_default();
        let shell = String::from_utf8_lossy(line);
        wrong!(
            place,
            "not an ELF file but a script for {:?}; boot a static interpreter with the script in --files",
            shell.trim()
        );
    }
    if data.is_empty() {
        wrong!(place, "not an ELF file: the file is empty");
    }
    if !data.starts_with(&elf::ELFMAG) {
        let start = &data[..data.len().min(16)];
        let text = |byte: &u8| byte.is_ascii_graphic() || byte.is_ascii_whitespace();
        if start.iter().all(text) {
            let start = String::from_utf8_lossy(start);
            wrong!(place, "not an ELF file: the file begins with the text {start:?}");
        }
        wrong!(
            place,
            "not an ELF file: the file begins with the bytes {:02x?}",
            &start[..start.len().min(4)]
        );
    }
    let ident = |at: usize| data.get(at).copied().unwrap_or(0);
    if data.len() < size_of::<Header>() {
        wrong!(place, "the file ends at {:#x}, inside the header of 0x40 bytes", data.len());
    }
    // Class and byte order, in this order of the bytes.
    if ident(4) != elf::ELFCLASS64.0 {
        wrong!(place, "not a 64-bit program (class {})", ident(4));
    }
    if ident(5) != elf::ELFDATA2LSB.0 {
        wrong!(place, "not a little-endian program (data encoding {})", ident(5));
    }
    let Ok(header) = Header::parse(data) else {
        wrong!(place, "an unknown ELF version ({})", ident(6));
    };
    let (machine, kind) = (header.e_machine(LittleEndian), header.e_type(LittleEndian));
    if machine != elf::EM_X86_64 {
        wrong!(place, "a program for another machine ({}), not x86-64", machine.0);
    }
    match kind {
        elf::ET_EXEC | elf::ET_DYN => Ok(header),
        elf::ET_REL => wrong!(place, "an object file that is not linked yet"),
        elf::ET_CORE => wrong!(place, "a core dump"),
        other => wrong!(place, "type {} is not a program", other.0),
    }
}

/// Checks that the interpreter of a dynamically linked program is among the files.
fn interpreter(
    segment: &ProgramHeader64<LittleEndian>,
    data: &[u8],
    comes_along: impl Fn(&str) -> bool,
    place: Place,
) -> Result<(), ElfError> {
    let length = segment.p_filesz(LittleEndian);
    if !INTERPRETER.contains(&length) {
        wrong!(place, "an interpreter's name of {length} bytes; the length must be 2 to {PAGE}");
    }
    let name = segment.data(LittleEndian, data).unwrap_or_default();
    let name = String::from_utf8_lossy(name.strip_suffix(b"\0").unwrap_or(name));
    if !name.is_empty() && comes_along(&name) {
        return Ok(());
    }
    wrong!(
        place,
        "dynamically linked: requires the interpreter {name:?}; link the program statically (cc \
         -static, or RUSTFLAGS='-Ctarget-feature=+crt-static'), or put the interpreter and the \
         libraries in --files"
    )
}

/// Checks a segment to be loaded; returns its end in memory.
fn load(
    header: &Header,
    segment: &ProgramHeader64<LittleEndian>,
    data: &[u8],
    place: Place,
) -> Result<u64, ElfError> {
    let endian = LittleEndian;
    let (offset, filed) = (segment.p_offset(endian), segment.p_filesz(endian));
    let (start, size) = (segment.p_vaddr(endian), segment.p_memsz(endian));
    let length = data.len() as u64;
    if offset.checked_add(filed).is_none_or(|end| end > length) {
        wrong!(
            place,
            "{filed:#x} bytes from offset {offset:#x} reach beyond the file's end at \
             {length:#x}; the file is truncated"
        );
    }
    if filed > size {
        wrong!(place, "more bytes in the file ({filed:#x}) than in memory ({size:#x})");
    }
    if start % PAGE != offset % PAGE {
        wrong!(place, "address {start:#x} and offset {offset:#x} differ within a page");
    }
    let align = segment.p_align(endian);
    if align > 1 && !align.is_power_of_two() {
        wrong!(place, "the alignment {align:#x} is not a power of two");
    }
    let Some(end) = start.checked_add(size).filter(|end| *end <= PROGRAMS.end) else {
        wrong!(place, "{size:#x} bytes at {start:#x} do not lie in a program's addresses");
    };
    if header.e_type(endian) == elf::ET_EXEC && start < PROGRAMS.start {
        wrong!(
            place,
            "address {start:#x} is below {:#x}, the lowest address of a mapping",
            PROGRAMS.start
        );
    }
    Ok(end)
}

#[cfg(test)]
mod tests;
