//! Programs: the host's checks before a boot, and the kernel's plan.

use faultless_boot::elf::{check, plan};
use faultless_personality::elf::Plan;

/// Checks a program file as the host does, and plans it as the kernel does.
///
/// # Panics
/// If a promise is broken.
pub fn elf(bytes: &[u8]) {
    let plan = plan(bytes);
    if let Some(plan) = &plan {
        sound(plan, bytes.len() as u64);
    }
    for comes_along in [true, false] {
        match check(bytes, |_| comes_along) {
            Ok(()) => assert!(plan.is_some(), "boots a program that the kernel refuses"),
            Err(error) => assert!(error.to_string().len() > 20, "too short an error: {error}"),
        }
    }
}

/// Checks that the segments are pages, in order (two may share one), in user space and in the file.
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
