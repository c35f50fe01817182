//! Programs: as the host checks them before anything boots, and as the kernel plans them.

use faultless_bare::elf::{Header, Plan};
use faultless_boot::elf::check;

/// A program file, as the host checks it and as the kernel plans it.
///
/// # Panics
/// A promise is broken.
pub fn elf(bytes: &[u8]) {
    let plan = plan(bytes);
    if let Some(plan) = &plan {
        sound(plan, bytes.len() as u64);
    }
    for comes_along in [true, false] {
        if let Err(error) = check(bytes, |_| comes_along) {
            assert!(error.to_string().len() > 20, "says little: {error}");
        }
    }
}

/// What the kernel does with the file.
fn plan(bytes: &[u8]) -> Option<Plan> {
    let header = Header::parse(bytes)?;
    let table = header.table()?;
    let table = bytes.get(usize::try_from(table.start).ok()?..usize::try_from(table.end).ok()?)?;
    header.plan(table, bytes.len() as u64)
}

/// Its segments are pages, in order (two may share one), in user space and in the file.
fn sound(plan: &Plan, length: u64) {
    let mut before = 0;
    for segment in &plan.segments {
        assert!([segment.start, segment.zeros, segment.end].iter().all(|at| at % 4096 == 0));
        assert!(segment.start >= before && segment.start <= segment.zeros, "{plan:?}");
        assert!(segment.zeros <= segment.end && segment.end <= 0x7fff_ffff_f000, "{plan:?}");
        assert!(segment.tail <= segment.zeros, "{plan:?}");
        let pages = (segment.zeros - segment.start) / 4096;
        assert!((segment.page + pages).saturating_sub(1) * 4096 < length.max(1), "{plan:?}");
        before = segment.start;
    }
    if let Some(name) = &plan.interpreter {
        assert!(name.start <= name.end && name.end <= length, "{plan:?}");
    }
}
