//! The end of the machine: the report, and the audit.

use super::scheduler;
use super::status::ExitStatus;
use crate::fs;
use faultless::locks::until;
use faultless::{Counter, CpuId};
use faultless_bare::console::power_off;
use faultless_bare::percpu;
use faultless_bare::report;

/// Ends the machine after its program has ended with `status` and no other process exists.
pub(super) fn finish(status: ExitStatus) -> ! {
    let vm = percpu::vm();
    let totals = vm.totals();
    for &counter in Counter::ALL {
        report!("counter {} {}", counter.name(), totals.get(counter));
    }
    let interrupts =
        ["interrupts_timer", "interrupts_reschedule", "interrupts_flush", "interrupts_device"];
    for (at, name) in interrupts.iter().enumerate() {
        let cpus = (0..percpu::cpus() as u16).map(CpuId);
        report!("counter {name} {}", cpus.map(|cpu| percpu::interrupts(cpu)[at]).sum::<u64>());
    }
    if faultless_bare::boot::is_said("check") {
        check();
    }
    if let Some(signal) = status.signal() {
        report!("signal {signal}");
    }
    power_off(status.shell())
}

/// Checks that every frame is accounted for, now that no space exists. A separate function, because
/// only the audit makes allocations that must not fail.
#[inline(never)]
fn check() {
    // Reads without a waiter also hold frames.
    until(percpu::cpu(), || {
        faultless_disk::poll();
        faultless_disk::is_idle()
    });
    fs::unmount();
    crate::ipc::clear();
    let cpu = percpu::cpu();
    // The memory part of the swap area has no user; the tables of the swap area are accounted for.
    cpu.reclaim(u64::MAX);
    scheduler::drain_all();
    if let Err(discrepancy) = faultless::audit::audit(cpu, &[]) {
        panic!("{discrepancy}");
    }
}
