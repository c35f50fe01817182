//! SMAP: the kernel can access user memory only in the copy instructions.

/// Forbids access to user memory; [removed](remove) if the CPU has no SMAP.
macro_rules! clac {
    () => {
        "771: clac\n.pushsection .smap, \"a\"\n.quad 771b\n.popsection\n"
    };
}

/// Allows access to user memory; see `clac`.
macro_rules! stac {
    () => {
        "772: stac\n.pushsection .smap, \"a\"\n.quad 772b\n.popsection\n"
    };
}

pub(crate) use {clac, stac};

unsafe extern "C" {
    static __smap_start: u64;
    static __smap_end: u64;
}

/// Replaces `clac` and `stac` in the code with a no-op if the CPU has no SMAP, because the CPU does
/// not support these instructions.
///
/// # Safety
/// The code is still writable, and no other CPU runs.
pub(crate) unsafe fn remove() {
    /// A no-op of three bytes.
    const NOTHING: [u8; 3] = [0x0f, 0x1f, 0x00];
    // SAFETY: the addresses of these instructions, which are three bytes long, are between the two
    // symbols, by the linker script.
    unsafe {
        let len = (&raw const __smap_end).offset_from_unsigned(&raw const __smap_start);
        for &at in core::slice::from_raw_parts(&raw const __smap_start, len) {
            (at as *mut [u8; 3]).write(NOTHING);
        }
    }
}
