//! The program's data segment selectors.
//!
//! In 64-bit mode they say nothing about memory, but for the bases of FS and GS, which are set in other
//! ways. But a program may load them, and read them; so each thread has its own, as of any register. Whatever
//! a program could load the kernel can load again: both refer to the same descriptors.

use core::arch::asm;

/// What is in DS, ES, FS and GS. By default nothing: the null selector, with which programs start.
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

    /// These, but for FS: the null selector.
    pub const fn without_fs(self) -> Self {
        Self { fs: 0, ..self }
    }

    /// These, but for GS: the null selector.
    pub const fn without_gs(self) -> Self {
        Self { gs: 0, ..self }
    }

    /// Makes them the running program's. If FS or GS changes, its base is lost.
    pub fn load(self) {
        let now = Self::current();
        // SAFETY: the selectors are null or were in these registers before, so they load; the kernel
        // uses neither DS, ES nor FS. GS is loaded while the program's base is in it, which is what
        // loading changes; interrupts are off, and what comes all the same looks at the base.
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
