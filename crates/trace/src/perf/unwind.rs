//! Call chains from copies of the stack, by the unwind tables of programs and libraries (the crate
//! `framehop`): `perf record --call-graph dwarf`.
//!
//! Each sample has the registers of the thread and the innermost bytes of its stack. The tables are
//! read from the files that the process has mapped, so the files must exist when the recording is
//! read. Without a table, the frame pointer is used.

use super::architecture::Architecture;
use crate::symbols::{Module, Source};
use framehop::aarch64::{CacheAarch64, PtrAuthMask, UnwindRegsAarch64, UnwinderAarch64};
use framehop::x86_64::{CacheX86_64, UnwindRegsX86_64, UnwinderX86_64};
use framehop::{ExplicitModuleSectionInfo, FrameAddress, Unwinder};
use linux_perf_data::linux_perf_event_reader::RawData;
use linux_perf_data::linux_perf_event_reader::constants::{
    PERF_REG_ARM64_LR, PERF_REG_ARM64_PC, PERF_REG_ARM64_SP, PERF_REG_ARM64_X29, PERF_REG_X86_BP,
    PERF_REG_X86_IP, PERF_REG_X86_SP,
};
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
/// The address bits of a return address on aarch64. Programs that request no addresses above 2^48
/// get none, and pointer authentication uses the bits above.
const CODE: PtrAuthMask = PtrAuthMask(u64::MAX >> 16);

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

/// The unwind tables of one process.
#[derive(Clone)]
enum Process {
    X86(UnwinderX86_64<Bytes>),
    Arm(UnwinderAarch64<Bytes>),
}

impl Process {
    fn new(architecture: Architecture) -> Self {
        match architecture {
            Architecture::X86 => Self::X86(UnwinderX86_64::new()),
            Architecture::Arm => Self::Arm(UnwinderAarch64::new()),
        }
    }

    fn add(&mut self, module: framehop::Module<Bytes>) {
        match self {
            Self::X86(process) => process.add_module(module),
            Self::Arm(process) => process.add_module(module),
        }
    }

    fn remove(&mut self, start: u64) {
        match self {
            Self::X86(process) => process.remove_module(start),
            Self::Arm(process) => process.remove_module(start),
        }
    }
}

/// The unwind tables of all processes.
pub(super) struct Unwind {
    running: bool,
    architecture: Architecture,
    processes: HashMap<i32, Process>,
    files: HashMap<PathBuf, Option<Rc<Tables>>>,
    x86_cache: CacheX86_64,
    arm_cache: CacheAarch64,
}

impl Unwind {
    /// Creates the unwinder of a recording of a machine of this architecture; `running` processes
    /// may have a root directory of their own.
    pub fn new(running: bool, architecture: Architecture) -> Self {
        Self {
            running,
            architecture,
            processes: HashMap::new(),
            files: HashMap::new(),
            x86_cache: CacheX86_64::new(),
            arm_cache: CacheAarch64::new(),
        }
    }

    /// Adds a mapping of `len` bytes of the process `pid` from `start` on, which maps the file of
    /// `module` from the byte `offset` on.
    pub fn map(&mut self, pid: i32, start: u64, len: u64, offset: u64, module: &Module) {
        let new = || Process::new(self.architecture);
        let process = self.processes.entry(pid).or_insert_with(new);
        process.remove(start);
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
        process.add(framehop::Module::new(name, start..end, base, info));
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
    /// registers, by perf's numbers, and the innermost bytes of its stack. A return address is
    /// reduced by 1, so that it lies in the calling instruction.
    pub fn chain(
        &mut self,
        pid: i32,
        register: impl Fn(u64) -> Option<u64>,
        stack: RawData<'_>,
    ) -> Vec<u64> {
        let numbers = match self.architecture {
            Architecture::X86 => [PERF_REG_X86_IP, PERF_REG_X86_SP, PERF_REG_X86_BP],
            Architecture::Arm => [PERF_REG_ARM64_PC, PERF_REG_ARM64_SP, PERF_REG_ARM64_X29],
        };
        let [Some(ip), Some(sp), Some(frame)] = numbers.map(&register) else {
            return Vec::new();
        };
        let mut word = |address: u64| {
            let at = address.checked_sub(sp).ok_or(())? as usize;
            let mut bytes = stack.get(at..at.checked_add(8).ok_or(())?).ok_or(())?;
            let mut word = [0; 8];
            bytes.read_exact(&mut word).map_err(|_| ())?;
            Ok(u64::from_le_bytes(word))
        };
        let new = || Process::new(self.architecture);
        match self.processes.entry(pid).or_insert_with(new) {
            Process::X86(process) => {
                let registers = UnwindRegsX86_64::new(ip, sp, frame);
                let mut iter = process.iter_frames(ip, registers, &mut self.x86_cache, &mut word);
                frames(|| iter.next().ok().flatten())
            }
            Process::Arm(process) => {
                let link = register(PERF_REG_ARM64_LR).unwrap_or(0);
                let registers = UnwindRegsAarch64::new_with_ptr_auth_mask(CODE, link, sp, frame);
                let mut iter = process.iter_frames(ip, registers, &mut self.arm_cache, &mut word);
                frames(|| iter.next().ok().flatten())
            }
        }
    }
}

/// Returns the addresses of the frames of `next`.
fn frames(next: impl FnMut() -> Option<FrameAddress>) -> Vec<u64> {
    std::iter::from_fn(next).take(MAX_DEPTH).map(|frame| frame.address_for_lookup()).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    const SP: u64 = 0x7000_0000;
    /// The bits of pointer authentication in a return address.
    const SIGNED: u64 = 0xa5 << 48;

    /// Returns the chain of a thread at `ip` with the frame pointer `frame` and these words on its
    /// stack.
    fn chain(unwind: &mut Unwind, ip: u64, frame: u64, stack: &[u64]) -> Vec<u64> {
        let register = |number| match number {
            PERF_REG_ARM64_PC => Some(ip),
            PERF_REG_ARM64_SP => Some(SP),
            PERF_REG_ARM64_X29 => Some(frame),
            PERF_REG_ARM64_LR => Some(SIGNED | 0x66_0004),
            _ => None,
        };
        let bytes: Vec<_> = stack.iter().flat_map(|word| word.to_le_bytes()).collect();
        unwind.chain(1, register, RawData::Single(&bytes))
    }

    #[test]
    fn frame_pointers_of_aarch64_lead_to_unsigned_return_addresses() {
        let mut unwind = Unwind::new(false, Architecture::Arm);
        let stack = [1, 2, SP + 48, SIGNED | 0x40_2004, 3, 4, SP + 80, 0x40_3004, 0, 0, 0, 0];
        let got = chain(&mut unwind, 0x40_1010, SP + 16, &stack);
        assert_eq!(got[..3], [0x40_1010, 0x40_2003, 0x40_3003]);
        // The numbers of the registers are those of the recorded machine.
        let mut other = Unwind::new(false, Architecture::X86);
        assert_ne!(chain(&mut other, 0x40_1010, SP + 16, &stack).get(..3), Some(&got[..3]));
    }

    #[test]
    fn tables_of_aarch64_replace_frame_pointers() {
        // A common entry: code in steps of 4 bytes, data in steps of -8, the return address in
        // register 30, and the frame at register 31.
        let mut table = vec![12, 0, 0, 0, 0, 0, 0, 0, 1, 0, 4, 0x78, 30, 0x0c, 31, 0];
        // The entry of a function of 256 bytes at 0x1000: after its first instruction the frame has
        // 32 bytes, and registers 29 and 30 are in its lowest words.
        table.extend([28, 0, 0, 0, 20, 0, 0, 0]);
        table.extend(0x1000_u64.to_le_bytes());
        table.extend(0x100_u64.to_le_bytes());
        table.extend([0x41, 0x0e, 32, 0x80 | 29, 4, 0x80 | 30, 3, 0]);
        table.extend([0; 4]);
        let info = ExplicitModuleSectionInfo {
            base_svma: 0,
            text_svma: Some(0x1000..0x1100),
            eh_frame_svma: Some(0x2000..0x2000 + table.len() as u64),
            eh_frame: Some(Bytes::from(&*table)),
            ..ExplicitModuleSectionInfo::default()
        };
        let mut unwind = Unwind::new(false, Architecture::Arm);
        let mut process = Process::new(Architecture::Arm);
        process.add(framehop::Module::new("f".into(), 0x40_1000..0x40_1100, 0x40_0000, info));
        unwind.processes.insert(1, process);
        // The function has called itself, and its caller is a function with a frame pointer.
        let stack = [
            7,
            SIGNED | 0x40_1054,
            0,
            0,
            SP + 64,
            SIGNED | 0x50_0004,
            0,
            0,
            SP + 80,
            SIGNED | 0x60_0008,
            0,
            0,
        ];
        let got = chain(&mut unwind, 0x40_1010, 7, &stack);
        assert_eq!(got[..4], [0x40_1010, 0x40_1053, 0x50_0003, 0x60_0007]);
    }
}
