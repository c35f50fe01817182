//! The x86-64 processor: registers, interrupts, user memory, time. These modules do not use the
//! state of other CPUs, or of the kernel.

pub mod apic;
pub mod clock;
mod cpu;
pub mod fpu;
mod frame;
mod selectors;
pub(crate) mod smap;
pub mod user;

pub(crate) use cpu::enable;
pub use cpu::{
    Features, features, fs_base, gs_base, idle, page_attributes, park, serve_interrupts,
    set_fs_base, set_gs_base,
};
pub use frame::{KERNEL_CODE, KERNEL_DATA, RESUME, SYSTEM_CALL, TrapFrame, USER_CODE, USER_DATA};
pub use selectors::Selectors;
