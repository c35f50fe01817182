//! The start of the first program.

use super::exec::{self, Loaded, Strings};
use super::process::{Family, Process, TABLE};
use super::relatives::PROGRAM;
use super::thread::Thread;
use super::{init, scheduler};
use crate::errno::Result;
use crate::fs::{self, ProcessFiles};
use crate::signal::{ProcessSignals, ThreadSignals};
use core::fmt::Display;
use core::sync::atomic::Ordering;
use faultless_bare::console::power_off;
use faultless_bare::{percpu, report};
use faultless_collections::{Arc, Slot, Vec};
use linux_raw_sys::general as nr;

/// Fills the file system from `archive`, and starts the program named in the archive. The boot CPU
/// calls this function once, after the start of all other parts.
///
/// If the program cannot be started, the machine reports the reason and ends.
pub fn boot(archive: &[u8]) {
    if let Err(why) = fs::mount(archive) {
        stop(&"the archive of files cannot be read", why);
    }
    if faultless_bare::boot::is_said("noinput") {
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
    /// The exit status of a shell if a program cannot be run.
    const CANNOT_RUN: u8 = 126;
    report!("message {what}: {why}");
    power_off(CANNOT_RUN)
}

fn start(arguments: &[u8], environment: &[u8], files: ProcessFiles) -> Result<()> {
    let (arguments, environment) = (Strings::split(arguments)?, Strings::split(environment)?);
    let path = Vec::try_from_slice(arguments.first().unwrap_or_default())?;
    let loaded = exec::load(&path, arguments, &environment)?;
    let Loaded { memory, frame, fpu, name } = loaded;
    let signals = ProcessSignals::try_new()?;
    let family = Family { exit_signal: nr::SIGCHLD, ..Family::default() };
    let process = Process::try_new(PROGRAM, Some(memory), files, signals, family)?;
    *process.name.lock() = name;
    // The knob is the limit of the first program.
    let stack = percpu::vm().knobs().stack_limit();
    process.limits.set(nr::RLIMIT_STACK as usize, [stack, u64::MAX], || Ok(()))?;
    let parent = init::start()?;
    process.relatives.parent.store(parent.pid, Ordering::Relaxed);
    let process = Arc::try_new(process)?;
    let signals = ThreadSignals::default();
    let thread = Thread::try_new(PROGRAM, process.clone(), frame, fpu, signals, u64::MAX)?;
    let slots = (Slot::try_new()?, Slot::try_new()?);
    process.threads.lock().push(thread.clone());
    {
        let mut table = TABLE.lock();
        let number = table.new_number();
        debug_assert_eq!(number, PROGRAM);
        parent.family.lock().children.push(process.clone());
        table.threads.insert(slots.0, PROGRAM, thread.clone());
        table.processes.insert(slots.1, PROGRAM, process);
    }
    scheduler::start(thread);
    Ok(())
}
