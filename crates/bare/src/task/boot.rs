//! The first process, which is the program that the machine was started for, and the end of the machine,
//! which is the end of that process.

use super::exec::{self, Loaded, Strings};
use super::process::{ExitStatus, Family, Process, TABLE};
use super::scheduler;
use super::thread::Thread;
use crate::arch::{power_off, report};
use crate::fs::{self, ProcessFiles};
use crate::heap::{Arc, Slot, Vec};
use crate::percpu;
use crate::signal::{ProcessSignals, ThreadSignals};
use crate::syscall::Result;
use core::fmt::Display;
use faultless::{Counter, CpuId};

/// The number of the first process.
pub const FIRST: u32 = 1;

/// Fills the file system from `archive`, and starts the program that it says. Called once, by the boot CPU,
/// when everything else is there.
///
/// Without a program there is nothing to do: the report says why, and the machine ends.
pub fn boot(archive: &[u8]) {
    if let Err(why) = fs::mount(archive) {
        stop(&"the archive of files cannot be read", why);
    }
    if crate::boot::is_said("noinput") {
        fs::end_input();
    }
    let read = |path| fs::read_all(path).unwrap_or_default();
    let (arguments, environment) = (read(b"/.boot/argv"), read(b"/.boot/environ"));
    let here = read(b"/.boot/cwd");
    let files = match ProcessFiles::first(&here) {
        Ok(files) => files,
        Err(errno) => stop(&here.escape_ascii(), errno.name()),
    };
    if let Err(errno) = start(&arguments, &environment, files) {
        let program = arguments.split(|&byte| byte == 0).next().unwrap_or_default();
        stop(&program.escape_ascii(), errno.name());
    }
}

fn stop(what: &dyn Display, why: &str) -> ! {
    /// What a shell says of a program that it cannot run.
    const CANNOT_RUN: u8 = 126;
    report!("message {what}: {why}");
    power_off(CANNOT_RUN)
}

fn start(arguments: &[u8], environment: &[u8], files: ProcessFiles) -> Result<()> {
    let (arguments, environment) = (Strings::split(arguments)?, Strings::split(environment)?);
    let path = Vec::try_from_slice(arguments.first().unwrap_or_default())?;
    let loaded = exec::load(&path, arguments, &environment)?;
    let signals = ProcessSignals::try_new()?;
    let process = Process::new(FIRST, loaded.memory, files, signals, Family::default());
    *process.name.lock() = loaded.name;
    let process = Arc::try_new(process)?;
    let signals = ThreadSignals::default();
    let Loaded { frame, fpu, .. } = loaded;
    let thread = Thread::try_new(FIRST, process.clone(), frame, fpu, signals, u64::MAX)?;
    process.threads.lock().push(thread.clone());
    {
        let mut table = TABLE.lock();
        let number = table.new_number();
        debug_assert_eq!(number, FIRST);
        table.threads.insert(Slot::try_new()?, FIRST, thread.clone());
        table.processes.insert(Slot::try_new()?, FIRST, process);
    }
    scheduler::start(thread);
    Ok(())
}

/// Ends the machine: the first process ended with `status`, and no other is left.
pub(super) fn finish(status: ExitStatus) -> ! {
    let vm = percpu::vm();
    let totals = vm.totals();
    for &counter in Counter::ALL {
        report!("counter {} {}", counter.name(), totals.get(counter));
    }
    let interrupts = ["interrupts_timer", "interrupts_reschedule", "interrupts_flush"];
    for (at, name) in interrupts.iter().enumerate() {
        let cpus = (0..percpu::cpus() as u16).map(CpuId);
        report!("counter {name} {}", cpus.map(|cpu| percpu::interrupts(cpu)[at]).sum::<u64>());
    }
    if crate::boot::is_said("check") {
        check();
    }
    if let Some(signal) = status.signal() {
        report!("signal {signal}");
    }
    power_off(status.shell())
}

/// Every frame is accounted for, now that no space is left. Apart, since the audit alone allocates without expecting
/// to fail.
#[inline(never)]
fn check() {
    fs::unmount();
    crate::ipc::clear();
    scheduler::drain_all();
    let cpu = percpu::cpu();
    if let Err(discrepancy) = faultless::audit::audit(cpu, &[]) {
        panic!("{discrepancy}");
    }
}
