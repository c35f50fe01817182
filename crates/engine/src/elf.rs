//! Programs: what the host lets through, the kernel can load.

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
    match check(bytes, |_| true) {
        Ok(()) => assert!(plan.is_some(), "the host lets through what the kernel refuses"),
        Err(error) => assert!(error.to_string().len() > 20, "says little: {error}"),
    }
    let _ = check(bytes, |_| false);
}

/// What the kernel does with the file.
fn plan(bytes: &[u8]) -> Option<Plan> {
    let header = Header::parse(bytes)?;
    let table = header.table()?;
    let table = bytes.get(usize::try_from(table.start).ok()?..usize::try_from(table.end).ok()?)?;
    header.plan(table, bytes.len() as u64)
}

/// Its segments are pages, in order, apart from each other, and in the file.
fn sound(plan: &Plan, length: u64) {
    let mut end = 0;
    for segment in &plan.segments {
        assert!([segment.start, segment.zeros, segment.end].iter().all(|at| at % 4096 == 0));
        assert!(segment.start >= end && segment.start <= segment.zeros, "{plan:?}");
        assert!(segment.zeros <= segment.end && segment.end <= 0x7fff_ffff_f000, "{plan:?}");
        assert!(segment.tail <= segment.zeros, "{plan:?}");
        let pages = (segment.zeros - segment.start) / 4096;
        assert!((segment.page + pages).saturating_sub(1) * 4096 < length.max(1), "{plan:?}");
        end = segment.end;
    }
    if let Some(name) = &plan.interpreter {
        assert!(name.start <= name.end && name.end <= length, "{plan:?}");
    }
}
