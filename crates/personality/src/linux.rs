//! The upcalls of the bare machine.

use crate::task::{self, lack, memory, reads, scheduler, thread, upcalls};
use crate::{syscall, wall};
use core::fmt;
use faultless::try_box;
use faultless::{Access, FaultError};
use faultless_bare::arch::TrapFrame;
use faultless_bare::percpu::{self, Interrupt};
use faultless_bare::{Kernel, boot, report};
use faultless_disk::SwapArea;

/// The kernel that runs Linux programs.
#[derive(Debug)]
pub struct Linux;

impl Kernel for Linux {
    fn start(cpus: usize) {
        // SAFETY: the first call of this module, on the boot CPU.
        unsafe { scheduler::init(cpus) };
        wall::init();
        memory::watch(lack::memory_is_free);
        if let Err(why) = faultless_disk::start(reads::wake) {
            report!("message the disk cannot be used: {why}");
        }
        match faultless_disk::start_swap(reads::wake) {
            Ok(true) => swap_on(),
            Ok(false) => {}
            Err(why) => report!("message the swap disk cannot be used: {why}"),
        }
        task::boot::boot(boot::initrd());
    }

    fn run() -> ! {
        scheduler::idle_loop()
    }

    #[inline(always)]
    fn system_call(frame: &mut TrapFrame) {
        syscall::dispatch(frame);
    }

    fn page_fault(frame: &mut TrapFrame, addr: u64, _: Access, why: FaultError) {
        upcalls::page_fault(frame, addr, why);
    }

    fn pending(frame: &mut TrapFrame, addr: u64, _: Access) {
        upcalls::pending(frame, addr);
    }

    fn devices(interrupted: bool) {
        if interrupted {
            faultless_disk::interrupted();
        } else {
            faultless_disk::poll();
        }
    }

    fn exception(frame: &mut TrapFrame) {
        upcalls::exception(frame);
    }

    fn interrupt(interrupt: Interrupt, frame: &TrapFrame) {
        match interrupt {
            Interrupt::Timer => upcalls::tick(frame),
            Interrupt::Reschedule => upcalls::reschedule(),
            // The machine serves these interrupts.
            Interrupt::Flush | Interrupt::Device => {}
        }
    }

    #[inline(always)]
    fn attention(frame: &mut TrapFrame) {
        upcalls::attention(frame);
    }

    fn describe(f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match thread::try_current() {
            Some(thread) => write!(f, "{:?}", *thread),
            None => f.write_str("a new thread"),
        }
    }
}

/// Enables swapping to the swap disk, which has started. Without this call, pages stay in memory.
fn swap_on() {
    let area = SwapArea::try_new().and_then(try_box);
    let why = match area.map(|area| percpu::cpu().swap_on(area)) {
        Ok(Ok(())) => return,
        Ok(Err(errno)) => errno.name(),
        Err(_) => "out of memory",
    };
    report!("message the swap disk cannot be used: {why}");
}
