//! Call chains from copies of the stack, by the unwind tables of programs and libraries (the crate
//! `framehop`): `perf record --call-graph dwarf`.
//!
//! Each sample has the registers of the thread and the innermost bytes of its stack. The tables are
//! read from the files that the process has mapped, so the files must exist when the recording is
//! read. Without a table, the frame pointer is used.

use crate::symbols::{Module, Source};
use framehop::x86_64::{CacheX86_64, UnwindRegsX86_64, UnwinderX86_64};
use framehop::{ExplicitModuleSectionInfo, Unwinder};
use linux_perf_data::linux_perf_event_reader::constants::{
    PERF_REG_X86_BP, PERF_REG_X86_IP, PERF_REG_X86_SP,
};
use linux_perf_data::linux_perf_event_reader::{RawData, Regs};
use object::{Object, ObjectSection, ObjectSegment};
use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// The most frames of a stack, perf's limit for chains of the kernel.
const MAX_DEPTH: usize = 127;
/// The largest file whose tables are read.
const MAX_FILE: u64 = 4 << 30;

type Bytes = Rc<[u8]>;

/// The unwind tables of a file.
struct Tables {
    /// The offset in the file and the address of each segment, and the bytes in the file.
    segments: Vec<(u64, u64, u64)>,
    text: Option<Range<u64>>,
    eh_frame: Option<(Range<u64>, Bytes)>,
    eh_frame_hdr: Option<(Range<u64>, Bytes)>,
    debug_frame: Option<Bytes>,
}

/// The unwind tables of all processes.
pub(super) struct Unwind {
    running: bool,
    processes: HashMap<i32, UnwinderX86_64<Bytes>>,
    files: HashMap<PathBuf, Option<Rc<Tables>>>,
    cache: CacheX86_64,
}

impl Unwind {
    /// Creates the unwinder of a recording; `running` processes may have a root directory of their
    /// own.
    pub fn new(running: bool) -> Self {
        let (processes, files) = (HashMap::new(), HashMap::new());
        Self { running, processes, files, cache: CacheX86_64::new() }
    }

    /// Adds a mapping of `len` bytes of the process `pid` from `start` on, which maps the file of
    /// `module` from the byte `offset` on.
    pub fn map(&mut self, pid: i32, start: u64, len: u64, offset: u64, module: &Module) {
        let process = self.processes.entry(pid).or_default();
        process.remove_module(start);
        let Module::File(_, path) = module else { return };
        let Some(end) = start.checked_add(len) else { return };
        let source = Source { running: self.running, ..Source::default() };
        let tables = self.files.entry(path.clone()).or_insert_with(|| {
            let file = crate::symbols::file(pid, path, &source)?;
            crate::symbols::guarded(|| read(&file)).flatten().map(Rc::new)
        });
        let Some(tables) = tables else { return };
        let segment = tables.segments.iter().find(|(at, _, len)| (*at..at + len).contains(&offset));
        let Some((at, address, _)) = segment else { return };
        let base = start.wrapping_sub(address.wrapping_add(offset - at));
        let info = ExplicitModuleSectionInfo {
            base_svma: 0,
            text_svma: tables.text.clone(),
            eh_frame_svma: tables.eh_frame.as_ref().map(|(range, _)| range.clone()),
            eh_frame: tables.eh_frame.as_ref().map(|(_, bytes)| bytes.clone()),
            eh_frame_hdr_svma: tables.eh_frame_hdr.as_ref().map(|(range, _)| range.clone()),
            eh_frame_hdr: tables.eh_frame_hdr.as_ref().map(|(_, bytes)| bytes.clone()),
            debug_frame: tables.debug_frame.clone(),
            ..ExplicitModuleSectionInfo::default()
        };
        let name = path.display().to_string();
        process.add_module(framehop::Module::new(name, start..end, base, info));
    }

    /// Copies the mappings of the process `parent` to its new process `child`.
    pub fn fork(&mut self, parent: i32, child: i32) {
        if let Some(process) = self.processes.get(&parent).cloned() {
            self.processes.insert(child, process);
        }
    }

    /// Removes the mappings of the process `pid`, which executes another program.
    pub fn exec(&mut self, pid: i32) {
        self.processes.remove(&pid);
    }

    /// Returns the addresses of the frames of a thread of `pid`, the innermost first, from the
    /// registers and the innermost bytes of its stack. A return address is reduced by 1, so that it
    /// lies in the calling instruction.
    pub fn chain(&mut self, pid: i32, regs: &Regs<'_>, stack: RawData<'_>) -> Vec<u64> {
        let register = |number| regs.get(number);
        let (Some(ip), Some(sp), Some(bp)) =
            (register(PERF_REG_X86_IP), register(PERF_REG_X86_SP), register(PERF_REG_X86_BP))
        else {
            return Vec::new();
        };
        let process = self.processes.entry(pid).or_default();
        let mut word = |address: u64| {
            let at = address.checked_sub(sp).ok_or(())? as usize;
            let mut bytes = stack.get(at..at.checked_add(8).ok_or(())?).ok_or(())?;
            let mut word = [0; 8];
            bytes.read_exact(&mut word).map_err(|_| ())?;
            Ok(u64::from_le_bytes(word))
        };
        let mut frames = Vec::new();
        let registers = UnwindRegsX86_64::new(ip, sp, bp);
        let mut iter = process.iter_frames(ip, registers, &mut self.cache, &mut word);
        while frames.len() < MAX_DEPTH
            && let Ok(Some(frame)) = iter.next()
        {
            frames.push(frame.address_for_lookup());
        }
        frames
    }
}

/// Reads the tables of the ELF file at `path`.
fn read(path: &Path) -> Option<Tables> {
    if fs::metadata(path).ok()?.len() > MAX_FILE {
        return None;
    }
    let bytes = fs::read(path).ok()?;
    let file = object::File::parse(&*bytes).ok()?;
    let section = |name: &str| {
        let section = file.section_by_name(name)?;
        let range = section.address()..section.address().checked_add(section.size())?;
        let data = section.uncompressed_data().ok()?;
        Some((range, Bytes::from(&*data)))
    };
    let segments = file.segments().map(|segment| {
        let (offset, len) = segment.file_range();
        (offset, segment.address(), len)
    });
    let text = file.section_by_name(".text");
    let text = text.and_then(|text| Some(text.address()..text.address().checked_add(text.size())?));
    Some(Tables {
        segments: segments.filter(|(at, _, len)| at.checked_add(*len).is_some()).collect(),
        text,
        eh_frame: section(".eh_frame"),
        eh_frame_hdr: section(".eh_frame_hdr"),
        debug_frame: section(".debug_frame").map(|(_, bytes)| bytes),
    })
}
