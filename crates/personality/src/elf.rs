//! ELF files: the layout of a program in memory.
//!
//! Fields may have arbitrary values. Unusual files are rejected: the kernel need not run programs
//! that no tool would make.

use core::ops::{Range, RangeInclusive};
use elf::abi;
use elf::endian::LittleEndian;
use elf::file::{Class, FileHeader, parse_ident};
use elf::segment::{ProgramHeader, SegmentTable};
use faultless_collections::{OutOfMemory, Vec};

const PAGE: u64 = 4096;
/// Bytes of the file header, and of each program header.
const HEADER: usize = 64;
const ENTRY: u64 = 56;
/// The maximum number of program headers, as on Linux: the table has at most 64 KiB.
pub const MOST_SEGMENTS: u64 = 65536 / ENTRY;
/// The addresses for programs: above Linux's `mmap_min_addr`, and below mappings and
/// the stack.
pub const PROGRAMS: Range<u64> = 0x1_0000..0x7fff_f000_0000;
/// The allowed sizes of an interpreter's name, with its NUL, in bytes.
pub const INTERPRETER: RangeInclusive<u64> = 2..=PAGE;
/// The address of a position-independent program: at two thirds of user space, as on Linux.
const ANYWHERE: u64 = 0x5555_5555_4000;

/// The contents of the file header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    entry: u64,
    table: u64,
    count: u64,
    movable: bool,
}

/// A segment of a program: a private mapping of the file, followed by zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The address of the pages of the file; page-aligned, without the bias.
    pub start: u64,
    /// The end of the pages of the file, page-aligned, and so the start of the pages of zeros.
    pub zeros: u64,
    /// The end of the pages of zeros, page-aligned.
    pub end: u64,
    /// The page number of the first page in the file.
    pub page: u64,
    /// The start of the part of the last file page that must be zeroed; `zeros` without such a
    /// part.
    pub tail: u64,
    /// `PF_R`, `PF_W`, `PF_X`.
    pub flags: u32,
}

/// The layout of a program in memory.
#[derive(Debug, PartialEq, Eq)]
pub struct Plan {
    /// The segments, in order of addresses.
    pub segments: Vec<Segment>,
    /// The entry point, without the bias.
    pub entry: u64,
    /// The address of the program headers, without the bias; 0 if they are not mapped.
    pub table: u64,
    /// The number of program headers.
    pub count: u64,
    /// The default offset of all addresses; `None` if the program is not position-independent.
    pub bias: Option<u64>,
    /// The place of the interpreter's name in the file.
    pub interpreter: Option<Range<u64>>,
    /// Set if the stack is executable.
    pub executable_stack: bool,
}

impl Header {
    /// Reads the first bytes of a file; 64 are enough.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let ident = parse_ident::<LittleEndian>(bytes.get(..abi::EI_NIDENT)?).ok()?;
        let tail = bytes.get(abi::EI_NIDENT..HEADER)?;
        if ident.1 != Class::ELF64 {
            return None;
        }
        let header = FileHeader::<LittleEndian>::parse_tail(ident, tail).ok()?;
        let count = u64::from(header.e_phnum);
        let fine = header.e_machine == abi::EM_X86_64
            && matches!(header.e_type, abi::ET_EXEC | abi::ET_DYN)
            && u64::from(header.e_phentsize) == ENTRY
            && (1..=MOST_SEGMENTS).contains(&count);
        fine.then_some(Self {
            entry: header.e_entry,
            table: header.e_phoff,
            count,
            movable: header.e_type == abi::ET_DYN,
        })
    }

    /// The place of the program headers in the file; at most 64 KiB.
    pub const fn table(&self) -> Option<Range<u64>> {
        match self.table.checked_add(self.count * ENTRY) {
            Some(end) => Some(self.table..end),
            None => None,
        }
    }

    /// Returns the layout of a program in a file of `length` bytes with the program headers
    /// `table`; `None` if no kernel could run the program.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn plan(&self, table: &[u8], length: u64) -> Result<Option<Plan>, OutOfMemory> {
        let room = Vec::try_with_capacity(table.len() / ENTRY as usize)?;
        Ok(self.plan_in(room, table, length))
    }

    /// Makes the plan like [`plan`](Self::plan), with an empty vector that has capacity for all
    /// segments.
    fn plan_in(&self, segments: Vec<Segment>, table: &[u8], length: u64) -> Option<Plan> {
        let mut plan = Plan {
            segments,
            entry: self.entry,
            table: 0,
            count: self.count,
            bias: None,
            interpreter: None,
            executable_stack: false,
        };
        let mut loaded_end = 0;
        let mut align = PAGE;
        for header in SegmentTable::new(LittleEndian, Class::ELF64, table).iter() {
            let in_file = header.p_offset..header.p_offset.checked_add(header.p_filesz)?;
            match header.p_type {
                abi::PT_LOAD => {
                    if in_file.end > length || header.p_vaddr < loaded_end {
                        return None;
                    }
                    if let Some(segment) = Segment::of(&header)? {
                        plan.segments.try_push(segment).ok()?;
                    }
                    loaded_end = header.p_vaddr.checked_add(header.p_memsz)?;
                    if header.p_align.is_power_of_two() {
                        align = align.max(header.p_align);
                    }
                    if in_file.contains(&self.table) {
                        plan.table = header.p_vaddr + (self.table - header.p_offset);
                    }
                }
                abi::PT_INTERP => {
                    if plan.interpreter.is_some()
                        || in_file.end > length
                        || !INTERPRETER.contains(&header.p_filesz)
                    {
                        return None;
                    }
                    plan.interpreter = Some(in_file);
                }
                abi::PT_GNU_STACK => plan.executable_stack = header.p_flags & abi::PF_X != 0,
                _ => {}
            }
        }
        let (first, last) = (plan.segments.first()?, plan.segments.last()?);
        if self.movable {
            // The bias keeps its alignment.
            let bias = (ANYWHERE & !(align.min(1 << 30) - 1)).checked_sub(first.start)?;
            plan.bias = Some(bias);
        }
        let bias = plan.bias.unwrap_or(0);
        let fits = bias.checked_add(first.start)? >= PROGRAMS.start
            && bias.checked_add(last.end)? <= PROGRAMS.end;
        fits.then_some(plan)
    }
}

impl Segment {
    /// Returns the segment of `header`; `Some(None)` if the segment is empty.
    fn of(header: &ProgramHeader) -> Option<Option<Self>> {
        let &ProgramHeader { p_vaddr, p_offset, p_filesz, p_memsz, p_flags, .. } = header;
        if p_filesz > p_memsz || (p_vaddr ^ p_offset) % PAGE != 0 {
            return None;
        }
        if p_memsz == 0 {
            return Some(None);
        }
        let page_up = |addr: u64| addr.checked_next_multiple_of(PAGE);
        let in_file = p_vaddr.checked_add(p_filesz)?;
        let start = p_vaddr - p_vaddr % PAGE;
        let zeros = if p_filesz == 0 { start } else { page_up(in_file)? };
        Some(Some(Self {
            start,
            zeros,
            end: page_up(p_vaddr.checked_add(p_memsz)?)?,
            page: (p_offset - p_offset % PAGE) / PAGE,
            tail: if p_memsz > p_filesz && p_filesz != 0 { in_file } else { zeros },
            flags: p_flags,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;
    use std::vec::Vec;

    fn file_header(kind: u16, table: u64, count: u16) -> Vec<u8> {
        let mut bytes = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        bytes.extend(kind.to_le_bytes());
        bytes.extend(abi::EM_X86_64.to_le_bytes());
        bytes.extend(1u32.to_le_bytes());
        for value in [0x40_1000u64, table, 0] {
            bytes.extend(value.to_le_bytes());
        }
        bytes.extend(0u32.to_le_bytes());
        for value in [64u16, 56, count, 64, 0, 0] {
            bytes.extend(value.to_le_bytes());
        }
        bytes
    }

    fn entry(kind: u32, flags: u32, [offset, addr, in_file, in_memory]: [u64; 4]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(kind.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        for value in [offset, addr, addr, in_file, in_memory, PAGE] {
            bytes.extend(value.to_le_bytes());
        }
        bytes
    }

    const TEXT: [u64; 4] = [0, 0x40_0000, 0x1234, 0x1234];
    const DATA: [u64; 4] = [0x1678, 0x40_2678, 0x100, 0x3000];

    fn plan(kind: u16, loads: &[[u64; 4]]) -> Option<Plan> {
        let header = Header::parse(&file_header(kind, 64, loads.len() as u16))?;
        let table: Vec<u8> =
            loads.iter().flat_map(|&load| entry(abi::PT_LOAD, abi::PF_R, load)).collect();
        assert_eq!(header.table(), Some(64..64 + table.len() as u64));
        header.plan(&table, 0x1800).unwrap()
    }

    #[test]
    fn plan_maps_text_data_and_zeros() {
        let plan = plan(abi::ET_EXEC, &[TEXT, DATA]).unwrap();
        assert_eq!((plan.entry, plan.table, plan.bias), (0x40_1000, 0x40_0040, None));
        let flags = abi::PF_R;
        let text = Segment {
            start: 0x40_0000,
            zeros: 0x40_2000,
            end: 0x40_2000,
            page: 0,
            tail: 0x40_2000,
            flags,
        };
        let data = Segment {
            start: 0x40_2000,
            zeros: 0x40_3000,
            end: 0x40_6000,
            page: 1,
            tail: 0x40_2778,
            flags,
        };
        assert_eq!(*plan.segments, [text, data]);
    }

    #[test]
    fn movable_program_is_placed_at_two_thirds() {
        let at_zero = [[0, 0, 0x1234, 0x1234]];
        assert_eq!(plan(abi::ET_DYN, &at_zero).unwrap().bias, Some(ANYWHERE));
        assert_eq!(plan(abi::ET_EXEC, &at_zero), None, "a fixed program at address zero");
    }

    #[test]
    fn odd_programs_are_refused() {
        let odd = [
            ("beyond the file", [0x1000, 0x40_1000, 0x801, 0x801]),
            ("more in the file than in memory", [0, 0x40_0000, 0x100, 0xff]),
            ("not congruent", [0x10, 0x40_0000, 0x100, 0x100]),
            ("wraps around in memory", [0, 0x40_0000, 0x100, u64::MAX - 0x1000]),
            ("wraps around at the end", [0, !0xfff, 0x100, 0x100]),
            ("wraps around in the file", [!0xfff, 0x40_0000, 0x1000, 0x1000]),
            ("in the kernel", [0, 0xffff_8000_0000_0000, 0x100, 0x100]),
            ("over the stack", [0, 0x7fff_ffff_0000, 0x100, 0x100]),
            ("an empty segment", [0, 0x40_0000, 0, 0]),
        ];
        for (what, load) in odd {
            assert_eq!(plan(abi::ET_EXEC, &[load]), None, "{what}");
        }
        assert_eq!(plan(abi::ET_EXEC, &[DATA, TEXT]), None, "not upwards");
        assert_eq!(plan(abi::ET_EXEC, &[TEXT, TEXT]), None, "overlapping");
    }

    #[test]
    fn other_files_are_no_programs() {
        let good = file_header(abi::ET_EXEC, 64, 1);
        assert!(Header::parse(&good).is_some());
        for length in 0..HEADER {
            assert_eq!(Header::parse(&good[..length]), None, "{length} bytes");
        }
        // Magic, class, order, type, machine, size and number of table entries.
        for at in [0, 4, 5, 16, 18, 54, 57] {
            let mut bad = good.clone();
            bad[at] ^= 0x55;
            assert_eq!(Header::parse(&bad), None, "byte {at}");
        }
        let far = Header::parse(&file_header(abi::ET_EXEC, u64::MAX - 8, 1)).unwrap();
        assert_eq!(far.table(), None);
    }
}
