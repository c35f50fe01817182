//! The program's x87, SSE and AVX registers.
//!
//! The kernel does not use these registers, so they stay in the processor while the kernel runs.
//! They are saved and loaded only when another thread is to run, or when a signal frame or a fork
//! copies them. The memory format is XSAVE's standard format, or FXSAVE's if the processor has no
//! XSAVE.

use alloc::alloc::{alloc, dealloc};
use core::alloc::Layout;
use core::arch::asm;
use core::array;
use core::fmt;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use x86_64::registers::xcontrol::{XCr0, XCr0Flags};

/// Bytes of the FXSAVE area, with which XSAVE's format starts.
pub const LEGACY_BYTES: usize = 512;
/// Bytes of the header that follows in XSAVE's format.
const HEADER_BYTES: usize = 64;
/// x87, SSE, AVX.
const WANTED: u64 = 0b111;
/// x87, SSE: the parts stored by FXSAVE.
const LEGACY: u64 = 0b11;
/// All exceptions masked, as Linux starts programs.
const CONTROL: u16 = 0x37f;
/// The initial MXCSR: all exceptions masked.
const MXCSR: u32 = 0x1f80;
/// Offset of MXCSR.
const MXCSR_AT: usize = 24;
/// Offset of the mask of the MXCSR bits supported by the processor.
const MXCSR_MASK_AT: usize = 28;
/// The bits supported by every processor, used if the mask is 0.
const MXCSR_SURE: u32 = 0xffbf;

/// Bytes of a state: `LEGACY_BYTES` if there is no XSAVE.
static BYTES: AtomicUsize = AtomicUsize::new(LEGACY_BYTES);

/// The MXCSR bits supported by the processor.
static MXCSR_MASK: AtomicU32 = AtomicU32::new(MXCSR_SURE);

/// The registers of a thread while the thread does not run.
pub struct FpuState(NonNull<u8>);

// SAFETY: the value owns this memory.
unsafe impl Send for FpuState {}
// SAFETY: a shared reference permits only reads.
unsafe impl Sync for FpuState {}

fn layout() -> Layout {
    // SAFETY: a power of two, and a size far below the limit.
    unsafe { Layout::from_size_align_unchecked(BYTES.load(Ordering::Relaxed), 64) }
}

impl FpuState {
    /// The registers of a new program; `None` when the heap is exhausted.
    pub fn try_new() -> Option<Self> {
        let mut state = Self::zeroed()?;
        let bytes = state.bytes_mut();
        bytes[..2].copy_from_slice(&CONTROL.to_le_bytes());
        bytes[MXCSR_AT..MXCSR_AT + 4].copy_from_slice(&MXCSR.to_le_bytes());
        Some(state)
    }

    fn zeroed() -> Option<Self> {
        let layout = layout();
        // SAFETY: the layout is not empty.
        let at = NonNull::new(unsafe { alloc(layout) })?;
        // SAFETY: just allocated with this size.
        unsafe { at.write_bytes(0, layout.size()) };
        Some(Self(at))
    }

    /// The bytes, as a signal frame shows them: 512 of FXSAVE's format, then the rest of XSAVE's.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with this size, and initialised.
        unsafe { core::slice::from_raw_parts(self.0.as_ptr(), BYTES.load(Ordering::Relaxed)) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as `bytes`; `&mut self` excludes other accesses.
        unsafe { core::slice::from_raw_parts_mut(self.0.as_ptr(), BYTES.load(Ordering::Relaxed)) }
    }

    /// Takes bytes chosen by a program: a prefix of the format of [`bytes`](Self::bytes). Parts
    /// beyond the prefix, and parts that are not `wanted`, get their initial values.
    ///
    /// # Errors
    /// [`Unfit`]: the processor would not load the bytes. The state must not be used in this case.
    pub fn take(&mut self, chosen: &[u8], wanted: u64) -> Result<(), Unfit> {
        let bytes = self.bytes_mut();
        let len = chosen.len().min(bytes.len());
        bytes[..len].copy_from_slice(&chosen[..len]);
        bytes[len..].fill(0);
        let mxcsr = bytes[MXCSR_AT..].first_chunk().map_or(0, |mxcsr| u32::from_le_bytes(*mxcsr));
        if mxcsr & !MXCSR_MASK.load(Ordering::Relaxed) != 0 {
            return Err(Unfit);
        }
        let Some((header, _)) = bytes[LEGACY_BYTES..].split_first_chunk_mut::<HEADER_BYTES>()
        else {
            return Ok(());
        };
        // Without a header the x87 and SSE parts follow.
        let [mut has, mut format, mut reserved] = [LEGACY, 0, 0];
        if len >= LEGACY_BYTES + HEADER_BYTES {
            let word = |at: usize| u64::from_le_bytes(array::from_fn(|byte| header[8 * at + byte]));
            [has, format, reserved] = [0, 1, 2].map(word);
        }
        if has & !parts() != 0 || format != 0 || reserved != 0 {
            return Err(Unfit);
        }
        // The processor ignores the rest of the header.
        header.fill(0);
        header[..8].copy_from_slice(&(has & wanted).to_le_bytes());
        Ok(())
    }
}

/// Bytes on which XRSTOR or FXRSTOR would fault: a part that is not enabled, another format than
/// the standard one, or a reserved bit that is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfit;

impl Drop for FpuState {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, which never changes once there is a state.
        unsafe { dealloc(self.0.as_ptr(), layout()) };
    }
}

impl fmt::Debug for FpuState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FpuState")
    }
}

/// The FXSAVE area.
#[repr(C, align(16))]
struct Legacy([u32; LEGACY_BYTES / 4]);

/// Enables the parts supported by the processor, before any state exists.
pub(super) fn enable(has_xsave: bool) {
    let mut area = Legacy([0; LEGACY_BYTES / 4]);
    // SAFETY: the area has the size and alignment required by the instruction, which `arch::enable`
    // enabled.
    unsafe { asm!("fxsave64 [{}]", in(reg) &raw mut area, options(nostack)) };
    if area.0[MXCSR_MASK_AT / 4] != 0 {
        MXCSR_MASK.store(area.0[MXCSR_MASK_AT / 4], Ordering::Relaxed);
    }
    if !has_xsave {
        return;
    }
    let cpuid = raw_cpuid::CpuId::new();
    let Some(leaf) = cpuid.get_extended_state_info() else { return };
    let mut parts = XCr0Flags::X87 | XCr0Flags::SSE;
    parts.set(XCr0Flags::AVX, leaf.xcr0_supports_avx_256());
    // SAFETY: the processor has XSAVE, which `arch::enable` enabled, and these parts.
    unsafe { XCr0::write(parts) };
    // Read again, for the size of the enabled parts.
    if let Some(leaf) = cpuid.get_extended_state_info() {
        BYTES.store(leaf.xsave_area_size_enabled_features() as usize, Ordering::Relaxed);
    }
}

fn has_xsave() -> bool {
    BYTES.load(Ordering::Relaxed) > LEGACY_BYTES
}

/// Bytes of a state.
pub fn state_bytes() -> usize {
    BYTES.load(Ordering::Relaxed)
}

/// Which of XSAVE's parts a state has.
pub fn parts() -> u64 {
    WANTED & XCr0::read_raw()
}

/// Stores the processor's registers.
pub fn save(state: &mut FpuState) {
    let at = state.0.as_ptr();
    // SAFETY: the area belongs to the state, is aligned to 64, and has the size required by the
    // instruction.
    unsafe {
        if has_xsave() {
            asm!("xsave64 [{}]", in(reg) at, in("eax") WANTED as u32, in("edx") 0, options(nostack));
        } else {
            asm!("fxsave64 [{}]", in(reg) at, options(nostack));
        }
    }
}

/// Loads the processor's registers.
pub fn restore(state: &FpuState) {
    let at = state.0.as_ptr();
    // SAFETY: as `save`. The contents were stored by `save` or checked by `take`, so the load does
    // not fault. The kernel does not use these registers.
    unsafe {
        if has_xsave() {
            asm!("xrstor64 [{}]", in(reg) at, in("eax") WANTED as u32, in("edx") 0,
                options(nostack, readonly));
        } else {
            asm!("fxrstor64 [{}]", in(reg) at, options(nostack, readonly));
        }
    }
}
