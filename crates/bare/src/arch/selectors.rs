//! The program's data segment selectors.
//!
//! In 64-bit mode the selectors have no effect on memory accesses, except through the bases of FS
//! and GS, which are set in other ways. But a program may load and read selectors, so each thread
//! has its own. The kernel can load any selector that a program could load: both use the same
//! descriptors.

use core::arch::asm;

/// The contents of DS, ES, FS and GS. The default is the null selector, with which programs start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Selectors {
    ds: u16,
    es: u16,
    fs: u16,
    gs: u16,
}

impl Selectors {
    /// The running program's.
    pub fn current() -> Self {
        let (ds, es, fs, gs): (u16, u16, u16, u16);
        // SAFETY: reads registers only.
        unsafe {
            asm!("mov {:x}, ds", "mov {:x}, es", "mov {:x}, fs", "mov {:x}, gs",
                out(reg) ds, out(reg) es, out(reg) fs, out(reg) gs,
                options(nomem, nostack, preserves_flags));
        }
        Self { ds, es, fs, gs }
    }

    /// Returns these selectors, with the null selector in FS.
    pub const fn without_fs(self) -> Self {
        Self { fs: 0, ..self }
    }

    /// Returns these selectors, with the null selector in GS.
    pub const fn without_gs(self) -> Self {
        Self { gs: 0, ..self }
    }

    /// Loads the selectors. If FS or GS changes, its base is lost.
    pub fn load(self) {
        let now = Self::current();
        // SAFETY: the selectors are null or were in these registers before, so they load. The
        // kernel uses neither DS, ES nor FS. GS is loaded while it has the program's base, which
        // loading changes. Interrupts are off, and the handlers of NMI and similar exceptions check
        // the base.
        unsafe {
            if self.ds != now.ds {
                asm!("mov ds, {:x}", in(reg) self.ds, options(nostack, preserves_flags));
            }
            if self.es != now.es {
                asm!("mov es, {:x}", in(reg) self.es, options(nostack, preserves_flags));
            }
            if self.fs != now.fs {
                asm!("mov fs, {:x}", in(reg) self.fs, options(nostack, preserves_flags));
            }
            if self.gs != now.gs {
                asm!("swapgs", "mov gs, {:x}", "swapgs", in(reg) self.gs,
                    options(nostack, preserves_flags));
            }
        }
    }
}
