//! System calls about the machine and its usage.

use super::process::process_or_own;
use super::{Args, Errno, Result};
use crate::abi;
use crate::fs::{self, Piece, Transfer};
use crate::syscall::args::{Entry, calls};
use crate::task::ids::{may_limit, privileged};
use crate::task::process::{Process, TABLE};
use crate::task::relatives::PROGRAM;
use crate::task::usage::Usage;
use crate::task::{cond_resched, current, exit, oom, scheduler};
use crate::time;
use faultless_bare::arch::user;
use faultless_bare::percpu;
use linux_raw_sys::general as nr;

/// The system calls of this file, by number.
pub(super) const CALLS: &[Entry] = calls![
    (nr::__NR_uname, uname),
    (nr::__NR_sysinfo, sysinfo),
    (nr::__NR_getrandom, getrandom),
    (nr::__NR_prlimit64, prlimit64),
    (nr::__NR_getrlimit, getrlimit),
    (nr::__NR_setrlimit, setrlimit),
    (nr::__NR_getrusage, getrusage),
    (nr::__NR_times, times),
    (nr::__NR_membarrier, membarrier),
    (nr::__NR_personality, personality),
    (nr::__NR_reboot, reboot),
];

/// Clock ticks per second, for `times`.
const TICKS: u64 = 100;

/// The Linux version reported by `uname`.
const RELEASE: &str = "6.12.0-faultless";

/// `uname(names)`.
pub fn uname(args: Args<'_>) -> Result {
    const FIELD: usize = 65;
    let names = [
        "Linux",
        "faultless",
        RELEASE,
        concat!("#1 SMP ", env!("CARGO_PKG_VERSION")),
        "x86_64",
        "(none)",
    ];
    let mut bytes = [0u8; 6 * FIELD];
    for (field, name) in bytes.chunks_exact_mut(FIELD).zip(names) {
        field[..name.len()].copy_from_slice(name.as_bytes());
    }
    user::write_bytes(args.a(), &bytes)?;
    Ok(0)
}

/// `sysinfo(information)`.
pub fn sysinfo(args: Args<'_>) -> Result {
    let vm = percpu::vm();
    let load = (scheduler::runnable() as u64) << 16;
    let (total, free) = (vm.total_frames(), vm.free_frames());
    let (swap, swap_used) = percpu::cpu().swap_usage();
    let threads = TABLE.lock().threads.len() as u16;
    // uptime, loads, total, free, shared, buffers, total and free swap, threads, total and free
    // high memory, and the unit of memory.
    let words = [
        time::now() / abi::SECOND,
        load,
        load,
        load,
        total,
        free,
        0,
        0,
        swap,
        swap - swap_used,
        u64::from(threads),
        0,
        0,
        faultless::PAGE_SIZE,
    ];
    user::write(args.a(), &words)?;
    Ok(0)
}

/// `getrandom(buffer, length, flags)`: the same numbers on every run of a deterministic machine.
pub fn getrandom(args: Args<'_>) -> Result {
    const KNOWN: u64 = 1 | 2 | 4;
    const BOTH: u64 = 2 | 4;
    if args.c() & !KNOWN != 0 || args.c() & BOTH == BOTH {
        return Err(Errno::EINVAL);
    }
    let len = args.b().min(i32::MAX as u64 & !0xfff);
    let mut done = 0;
    let mut bytes = [0; 256];
    while done < len {
        let piece = (len - done).min(bytes.len() as u64) as usize;
        fs::fill_random(&mut bytes[..piece]);
        let there = [Piece { base: args.a().wrapping_add(done), len: piece as u64 }];
        let put = Transfer::of_user(&there).put_bytes(&bytes[..piece]);
        done += put;
        if put < piece as u64 {
            // The program's memory ends here.
            return if done == 0 { Err(Errno::EFAULT) } else { Ok(done) };
        }
        // Large buffers take long.
        if done & 0xffff == 0 && !cond_resched() {
            break;
        }
    }
    Ok(done)
}

/// `prlimit64(pid, resource, new, old)`.
pub fn prlimit64(args: Args<'_>) -> Result {
    let new: Option<[u64; 2]> = if args.c() == 0 { None } else { Some(user::read(args.c())?) };
    let process = process_or_own(args.a())?;
    let resource = args.b() as usize;
    if process.pid != current().process.pid && !may_limit(&process) {
        return Err(Errno::EPERM);
    }
    let old = match new {
        Some(new) => set_limit(&process, resource, new)?,
        None => *process.limits.rows.lock().get(resource).ok_or(Errno::EINVAL)?,
    };
    if args.d() != 0 {
        user::write(args.d(), &old)?;
    }
    Ok(0)
}

/// Sets a limit of `process`, and returns the old limit.
fn set_limit(process: &Process, resource: usize, new: [u64; 2]) -> Result<[u64; 2]> {
    let old = process.limits.set(resource, new, privileged)?;
    if resource == nr::RLIMIT_STACK as usize
        && let Some(memory) = process.memory()
        // The memory of a parent has the parent's limit.
        && !oom::is_in_vfork(process)
    {
        memory.space().set_stack_limit(new[0]);
    }
    Ok(old)
}

/// `getrlimit(resource, limit)`.
pub fn getrlimit(args: Args<'_>) -> Result {
    let limits = *current().process.limits.rows.lock();
    let limit = limits.get(args.a() as usize).ok_or(Errno::EINVAL)?;
    user::write(args.b(), limit)?;
    Ok(0)
}

/// `setrlimit(resource, limit)`.
pub fn setrlimit(args: Args<'_>) -> Result {
    let new = user::read(args.b())?;
    set_limit(&current().process, args.a() as usize, new)?;
    Ok(0)
}

/// `struct rusage`.
pub(super) const fn rusage(used: Usage) -> [u64; 18] {
    // User and system time in seconds and microseconds, largest resident size, sizes, minor and
    // major faults, swaps, input, output, messages, signals, switches.
    let Usage { times, minor_faults, major_faults, switches: [given, taken], most_resident } = used;
    // In KiB.
    let memory = most_resident << 2;
    let time::Times { user, system } = times;
    let (user, user_rest) = (user / abi::SECOND, user % abi::SECOND / 1000);
    let (system, rest) = (system / abi::SECOND, system % abi::SECOND / 1000);
    let faults = [minor_faults, major_faults];
    [
        user, user_rest, system, rest, memory, 0, 0, 0, faults[0], faults[1], 0, 0, 0, 0, 0, 0,
        given, taken,
    ]
}

/// `getrusage(who, usage)`.
pub fn getrusage(args: Args<'_>) -> Result {
    let thread = current();
    let used = match args.a() as i32 {
        nr::RUSAGE_CHILDREN => *thread.process.used.by_children.lock(),
        0 => thread.process.usage_now(),
        // As on Linux, the memory is the process's memory.
        1 => Usage { most_resident: thread.process.usage_now().most_resident, ..thread.usage() },
        _ => return Err(Errno::EINVAL),
    };
    user::write(args.b(), &rusage(used))?;
    Ok(0)
}

/// `times(times)`.
pub fn times(args: Args<'_>) -> Result {
    let ticks = |nanoseconds: u64| nanoseconds / (abi::SECOND / TICKS);
    let process = &current().process;
    let (own, children) = (process.times(), process.used.by_children.lock().times);
    if args.a() != 0 {
        let all = [own.user, own.system, children.user, children.system];
        user::write(args.a(), &all.map(ticks))?;
    }
    Ok(ticks(time::now()))
}

/// `membarrier(command, flags, cpu)`: only the query, which reports no commands.
pub fn membarrier(args: Args<'_>) -> Result {
    const QUERY: u64 = 0;
    if args.a() == QUERY && args.b() == 0 { Ok(0) } else { Err(Errno::EINVAL) }
}

/// `personality(persona)`: only the default.
pub fn personality(_: Args<'_>) -> Result {
    Ok(0)
}

/// `reboot(magic, magic, command, argument)`: the first program may power off the machine.
pub fn reboot(args: Args<'_>) -> Result {
    const MAGIC: u32 = 0xfee1_dead;
    const MAGICS: [u32; 4] = [672_274_793, 85_072_278, 369_367_448, 537_993_216];
    const OFF: [u32; 3] = [0x0123_4567, 0xcdef_0123, 0x4321_fedc];
    privileged()?;
    if args.a() as u32 != MAGIC || !MAGICS.contains(&(args.b() as u32)) {
        return Err(Errno::EINVAL);
    }
    if current().process.pid != PROGRAM {
        return Err(Errno::EPERM);
    }
    if OFF.contains(&(args.c() as u32)) {
        exit::exit_group(crate::task::status::ExitStatus::exited(0));
    }
    // Enable or disable Ctrl-Alt-Del.
    Ok(0)
}
