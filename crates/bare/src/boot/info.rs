//! The data passed by the loader (PVH's start info): the command line, the initial files, the
//! memory map.

use crate::paging::direct;
use crate::ranges::{Range, Ranges};
use core::slice;

/// The maximum length of the command line.
const COMMAND_LINE_BYTES: usize = 4096;
/// The first word of a start info.
const MAGIC: u32 = 0x336e_c578;
/// In a memory map: usable.
const RAM: u32 = 1;
/// Below this lie the BIOS data, and the first code of the other CPUs.
const LOW_MEMORY: u64 = 1 << 20;

#[derive(Clone, Copy)]
#[repr(C)]
struct StartInfo {
    magic: u32,
    version: u32,
    flags: u32,
    modules: u32,
    module_list: u64,
    command_line: u64,
    rsdp: u64,
    memory_map: u64,
    memory_map_entries: u32,
    reserved: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Module {
    address: u64,
    size: u64,
    command_line: u64,
    reserved: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct MapEntry {
    address: u64,
    size: u64,
    kind: u32,
    reserved: u32,
}

/// A copy of the data passed by the loader.
pub struct Info {
    command_line: [u8; COMMAND_LINE_BYTES],
    command_line_len: usize,
    /// The place of the initial files in physical memory.
    pub initrd: Range,
    /// The address of the ACPI tables; 0: unknown.
    pub rsdp: u64,
    /// All usable memory, in whole pages, from 1 MiB on, including the memory of the kernel and the
    /// initial files.
    pub memory: Ranges,
    /// The end of the memory below 4 GiB, and of all memory.
    pub ends: [u64; 2],
}

impl Info {
    pub const EMPTY: Self = Self {
        command_line: [0; COMMAND_LINE_BYTES],
        command_line_len: 0,
        initrd: Range::new(0, 0),
        rsdp: 0,
        memory: Ranges::EMPTY,
        ends: [0; 2],
    };

    pub fn command_line(&self) -> &str {
        str::from_utf8(&self.command_line[..self.command_line_len]).unwrap_or("")
    }

    /// Reads the start info at physical address `at`.
    ///
    /// # Safety
    /// The loader has stored a start info there, and the start info and the data it points to have
    /// not been overwritten. The first GiB of memory is mapped.
    pub unsafe fn read(&mut self, at: u64) {
        // SAFETY: by the contract; the loader puts all of it into the first GiB.
        let info = unsafe { direct(at).cast::<StartInfo>().read() };
        assert!(info.magic == MAGIC, "no start info at {at:#x}: not started by PVH");
        assert!(info.version >= 1, "the start info has no memory map");
        if info.command_line != 0 {
            // SAFETY: a string of the loader, which ends with a zero.
            let line = unsafe { core::ffi::CStr::from_ptr(direct(info.command_line).cast()) };
            let line = line.to_bytes();
            assert!(
                line.len() <= COMMAND_LINE_BYTES && str::from_utf8(line).is_ok(),
                "the command line is not UTF-8, or longer than {COMMAND_LINE_BYTES} bytes"
            );
            self.command_line[..line.len()].copy_from_slice(line);
            self.command_line_len = line.len();
        }
        if info.modules != 0 {
            // SAFETY: the loader's list has `modules` elements.
            let module = unsafe { direct(info.module_list).cast::<Module>().read() };
            self.initrd = Range::new(module.address, module.address.saturating_add(module.size));
        }
        self.rsdp = info.rsdp;
        // SAFETY: the loader's list has this number of entries.
        let entries = unsafe {
            slice::from_raw_parts(
                direct(info.memory_map).cast::<MapEntry>(),
                info.memory_map_entries as usize,
            )
        };
        // Pages that are only partly memory, or on which two entries disagree, are not used.
        for entry in entries.iter().filter(|entry| entry.kind == RAM) {
            let end = entry.address.saturating_add(entry.size) & !0xfff;
            let start = entry.address.next_multiple_of(0x1000).max(LOW_MEMORY);
            self.memory.add(Range::new(start, end)).expect("too many ranges of memory");
            self.ends[usize::from(end > 1 << 32)] = self.ends[usize::from(end > 1 << 32)].max(end);
        }
        for entry in entries.iter().filter(|entry| entry.kind != RAM) {
            let end = entry.address.saturating_add(entry.size);
            self.memory.remove(Range::new(entry.address, end)).expect("too many ranges of memory");
        }
        self.ends[1] = self.ends[1].max(self.ends[0]);
        assert!(self.ends[0] != 0, "the memory map has no usable memory");
    }
}
