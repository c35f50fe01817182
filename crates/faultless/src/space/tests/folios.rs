//! Folios and huge leaves where something is in the way: strange ranges, pages that are being moved, stores that fail later, locked memory.

use super::guest::{self, AT, P, PRIVATE, TestSpace, TestVm, cpu, map_object};
use super::store::{File, Memory, file, finish};
use crate::error::Errno;
use crate::fault::{Access, FaultError, FaultKind};
use crate::knob::{Locking, Setting};
use crate::space::{Advice, Prot, Space};
use std::sync::Arc;
use std::vec::Vec;

const RX: Prot = Prot::READ.union(Prot::EXEC);
/// Pages of a folio.
const F: u64 = 512;
const FRAMES: u32 = 8192;

/// A range of which most is mapped nowhere is refused at once, as on Linux, which looks at VMAs and not at addresses.
#[test]
fn a_collapse_of_a_strange_range_is_refused() {
    let vm = guest::vm(2, FRAMES);
    let cpu = cpu(&vm, 0);
    let space = Space::new(&cpu).unwrap();
    let collapse = |at: u64, len: u64| {
        space.madvise(&cpu, at, len, Advice::Collapse).map_err(|error| error.errno)
    };
    for (at, len) in [
        (0u64.wrapping_sub(2 * P), P),
        (0u64.wrapping_sub(1 << 22), (1 << 22) - P),
        (1 << 62, 1 << 62),
    ] {
        assert_eq!(collapse(at, len), Err(Errno::ENOMEM), "{at:#x} and {len:#x}");
    }
    finish(&cpu, space, Vec::new());
}

struct Text<'v> {
    cpu: guest::TestCpu<'v>,
    space: TestSpace,
    memory: Arc<Memory>,
    file: File,
}

impl<'v> Text<'v> {
    fn new(vm: &'v TestVm, prot: Prot, flags: crate::space::MapFlags) -> Self {
        let cpu = cpu(vm, 0);
        let space = Space::new(&cpu).unwrap();
        let memory = Memory::new(F, 0);
        let file = file(&cpu, &memory);
        map_object(&cpu, &space, (0, F), prot, flags, (&file, 0));
        Self { cpu, space, memory, file }
    }

    fn fetch(&self, page: u64) -> Result<FaultKind, FaultError> {
        self.space.fault(&self.cpu, AT + page * P, Access::Execute)
    }
}

/// One of the pages has as many mappings as can be counted. Base pages of the others can be had.
#[test]
fn a_folio_with_a_page_of_too_many_mappings_is_mapped_in_base_pages() {
    use crate::frame::FrameMeta;
    for locking in Locking::ALL {
        let vm = guest::vm(2, FRAMES);
        vm.set(Setting::Locking(locking));
        let text = Text::new(&vm, RX, PRIVATE);
        assert_eq!(text.fetch(1), Ok(FaultKind::Huge));
        text.space.madvise(&text.cpu, AT, F * P, Advice::DontNeed).unwrap();
        let frame = text.file.get(&text.cpu, 300).unwrap();
        let meta = vm.frames.meta(frame);
        let refs = meta.refs();
        meta.preset_refs(FrameMeta::MAX_MAPPINGS);
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let (vm, space) = (&vm, &text.space);
            scope.spawn(move || {
                let result = space.fault(&cpu(vm, 1), AT + P, Access::Execute);
                sender.send(result).unwrap();
            });
            let found = receiver.recv_timeout(std::time::Duration::from_secs(5));
            let Ok(found) = found else {
                std::eprintln!("{locking:?}: the fault does not end");
                std::process::abort();
            };
            assert_eq!(found, Ok(FaultKind::Shared), "{locking:?}");
        });
        text.space.madvise(&text.cpu, AT, F * P, Advice::DontNeed).unwrap();
        meta.preset_refs(refs);
        // SAFETY: the reference that `get` took.
        unsafe { text.cpu.put_unmapped(frame) };
        finish(&text.cpu, text.space, Vec::from([text.file]));
    }
}
