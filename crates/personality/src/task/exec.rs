//! Programs: from a file to a space that is ready to run.
//!
//! [`load`] makes the new memory while the old memory is still in place: it maps the program, runs
//! the new space on this CPU to write the stack, and then runs the old space again. A failure up to
//! this point does not change the caller. [`exec`] then ends the other threads, and cannot fail
//! after this step: the new memory replaces the old, and the only thread, which gets the process's
//! number, starts the program.

use super::exit;
use super::lack;
use super::memory::{Image, Memory};
use super::thread::{Thread, current, try_current};
use super::visit::Visit;
use crate::elf::{Header, Plan, Segment};
use crate::errno::{Errno, Result};
use crate::fs::{self, Inode, Regular, Transfer};
use crate::signal;
use core::ops::Range;
use core::sync::atomic::Ordering;
use faultless::Backing;
use faultless::{MapFlags, MemoryLock, PAGE_SIZE, Prot, USER_END, VirtRange};
use faultless_bare::arch::fpu::{self, FpuState};
use faultless_bare::arch::{self, Selectors, TrapFrame, user};
use faultless_bare::heap::FailNth;
use faultless_bare::percpu;
use faultless_collections::{Arc, Slot, String, Vec};
use linux_raw_sys::{auxvec as aux, general as nr};

/// Bounds, in bytes, for the total size of arguments, environment and their pointers. Within these
/// bounds the limit is a quarter of the stack limit.
const STRINGS: Range<u64> = 128 << 10..6 << 20;
/// The maximum size of one string, in bytes.
pub const STRING_MAX: usize = 128 << 10;
/// The size in bytes of the space that Linux maps for a new stack beyond its contents.
const STACK: u64 = 128 << 10;
/// Bytes of the header of an ELF file.
const HEADER: u64 = 64;
/// The maximum length of a script's first line.
const LINE: usize = 256;
/// The maximum nesting of scripts as interpreters.
const SCRIPTS: usize = 5;

/// Arguments or an environment: strings, each with its NUL.
#[derive(Debug, Default)]
pub struct Strings {
    bytes: Vec<u8>,
    count: usize,
}

impl Strings {
    /// Returns the strings of `bytes`, each ended by a NUL (the last NUL may be missing).
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn split(bytes: &[u8]) -> Result<Self> {
        let mut strings = Self::default();
        let bytes = bytes.strip_suffix(b"\0").unwrap_or(bytes);
        if !bytes.is_empty() {
            bytes.split(|&byte| byte == 0).try_for_each(|string| strings.push(string))?;
        }
        Ok(strings)
    }

    /// Adds a string without a NUL.
    ///
    /// # Errors
    /// `E2BIG`: the string, or the total of all strings, is too long. `ENOMEM`.
    pub fn push(&mut self, string: &[u8]) -> Result<()> {
        self.grow(string.len())?;
        // Reserved for both.
        self.bytes.try_extend_from_slice(string)?;
        Ok(self.bytes.try_push(0)?)
    }

    fn grow(&mut self, len: usize) -> Result<()> {
        let all = self.size() + (len + 1 + size_of::<u64>()) as u64;
        if len >= STRING_MAX || all > strings_max() {
            return Err(Errno::E2BIG);
        }
        self.bytes.try_reserve(len + 1)?;
        self.count += 1;
        Ok(())
    }

    /// Returns the size of the strings with their pointers, in bytes.
    fn size(&self) -> u64 {
        (self.bytes.len() + self.count * size_of::<u64>()) as u64
    }

    /// Reads the strings of the NULL-terminated array of pointers at `array` in the program's
    /// memory.
    ///
    /// # Errors
    /// `EFAULT`, and as [`push`](Self::push).
    pub fn read(array: u64) -> Result<Self> {
        let mut strings = Self::default();
        if array == 0 {
            return Ok(strings);
        }
        let mut at = array;
        loop {
            let pointer: u64 = user::read(at)?;
            if pointer == 0 {
                return Ok(strings);
            }
            let string = user::string(pointer, STRING_MAX)?.ok_or(Errno::E2BIG)?;
            strings.push(&string)?;
            at = at.checked_add(8).ok_or(Errno::EFAULT)?;
        }
    }

    /// The first string.
    pub fn first(&self) -> Option<&[u8]> {
        (self.count != 0).then(|| self.iter().next()).flatten()
    }

    fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.bytes.split(|&byte| byte == 0).take(self.count)
    }

    /// Returns the strings with the first one replaced by `first`.
    fn behind(&self, first: &[&[u8]]) -> Result<Self> {
        let mut strings = Self::default();
        let rest = self.iter().skip(1);
        first.iter().copied().chain(rest).try_for_each(|string| strings.push(string))?;
        Ok(strings)
    }
}

/// Returns the stack limit of the running thread's process; `None` at boot.
fn stack_limit() -> Option<u64> {
    try_current().map(|thread| thread.process.limits.soft(nr::RLIMIT_STACK))
}

fn strings_max() -> u64 {
    (stack_limit().unwrap_or(8 << 20) / 4).clamp(STRINGS.start, STRINGS.end)
}

/// A loaded program, ready to start.
#[derive(Debug)]
pub struct Loaded {
    /// The memory of the program.
    pub memory: Arc<Memory>,
    /// The initial registers.
    pub frame: TrapFrame,
    /// See `frame`.
    pub fpu: FpuState,
    /// The name of the program.
    pub name: String,
}

/// Loads the program at `path`, as seen by the running thread's process.
///
/// # Errors
/// As `execve`; nothing is changed on errors.
pub fn load(path: &[u8], mut arguments: Strings, environment: &Strings) -> Result<Loaded> {
    if arguments.count == 0 {
        arguments.push(b"")?;
    }
    let mut program = Vec::try_from_slice(path)?;
    for _ in 0..=SCRIPTS {
        let file = fs::program(&program)?;
        let regular = regular(&file)?;
        let mut first = [0; LINE];
        let len = read_at(regular, 0, &mut first)?;
        if arguments.size() + environment.size() > strings_max() {
            return Err(Errno::E2BIG);
        }
        let Some(line) = first[..len].strip_prefix(b"#!") else {
            return load_file(&file, path, &program, &arguments, environment);
        };
        let (interpreter, argument) = interpreter(line, len == LINE)?;
        arguments = match argument {
            Some(argument) => arguments.behind(&[interpreter, argument, &program])?,
            None => arguments.behind(&[interpreter, &program])?,
        };
        program = Vec::try_from_slice(interpreter)?;
    }
    Err(Errno::ELOOP)
}

/// Returns the interpreter in the first line of a script, and its argument. If the line is `cut`
/// off, the argument may be incomplete, but an interpreter name that may be incomplete is an error.
fn interpreter(line: &[u8], cut: bool) -> Result<(&[u8], Option<&[u8]>)> {
    let is_blank = |byte: &u8| *byte == b' ' || *byte == b'\t';
    let end = line.iter().position(|&byte| byte == b'\n');
    // As on Linux, the last byte of a line cut off is ignored.
    let most = if cut { line.len() - 1 } else { line.len() };
    let ends = |byte: &u8| is_blank(byte) || *byte == 0;
    let name_ends = |line: &[u8]| line.trim_ascii_start().iter().any(ends);
    if cut && end.is_none_or(|end| end >= most) && !name_ends(&line[..most]) {
        return Err(Errno::ENOEXEC);
    }
    let line = &line[..end.unwrap_or(most).min(most)];
    let line = line.split(|&byte| byte == 0).next().unwrap_or(line).trim_ascii();
    let (name, rest) = line.split_at(line.iter().position(is_blank).unwrap_or(line.len()));
    if name.is_empty() {
        return Err(Errno::ENOEXEC);
    }
    let rest = rest.trim_ascii();
    Ok((name, (!rest.is_empty()).then_some(rest)))
}

fn regular(file: &Inode) -> Result<&Regular> {
    file.regular().ok_or(Errno::EACCES)
}

fn read_at(file: &Regular, offset: u64, bytes: &mut [u8]) -> Result<usize> {
    loop {
        file.fetch(offset, bytes.len() as u64, None)?;
        match Transfer::to_kernel(bytes, |to| file.read(to, offset, u64::MAX)) {
            Err(Errno::EAGAIN) => {}
            read => return read.map(|read| read as usize),
        }
    }
}

/// The layout of the program in a file.
fn plan(file: &Regular) -> Result<Plan> {
    let mut first = [0; HEADER as usize];
    let len = read_at(file, 0, &mut first)?;
    let header = Header::parse(&first[..len]).ok_or(Errno::ENOEXEC)?;
    let place = header.table().filter(|place| place.end <= file.length()).ok_or(Errno::ENOEXEC)?;
    let mut table = Vec::try_filled(0, (place.end - place.start) as usize)?;
    let read = read_at(file, place.start, &mut table)?;
    header.plan(&table[..read], file.length())?.ok_or(Errno::ENOEXEC)
}

/// Returns the interpreter named in a plan of the program in `file`, and its plan. Linux reports
/// other errors for an interpreter than for a program.
fn interpreter_plan(file: &Regular, name: &Range<u64>) -> Result<(Arc<Inode>, Plan)> {
    let mut bytes = Vec::try_filled(0, (name.end - name.start) as usize)?;
    read_at(file, name.start, &mut bytes)?;
    let file = fs::program(bytes.strip_suffix(b"\0").ok_or(Errno::ENOEXEC)?)?;
    if regular(&file)?.length() < HEADER {
        return Err(Errno::EIO);
    }
    let plan = plan(regular(&file)?).map_err(|errno| match errno {
        Errno::ENOEXEC => Errno::ELIBBAD,
        errno => errno,
    })?;
    fetch_tails(regular(&file)?, &plan)?;
    Ok((file, plan))
}

/// Reads the pages of the file that mapping will zero in part.
fn fetch_tails(file: &Regular, plan: &Plan) -> Result<()> {
    for segment in plan.segments.iter().filter(|segment| segment.tail < segment.zeros) {
        let last = segment.page + (segment.tail - segment.start) / PAGE_SIZE;
        file.fetch(last * PAGE_SIZE, PAGE_SIZE, None)?;
    }
    Ok(())
}

/// A program mapped in the new space, moved by `bias`.
struct Mapped {
    bias: u64,
    end: u64,
}

fn load_file(
    file: &Arc<Inode>,
    path: &[u8],
    program: &[u8],
    arguments: &Strings,
    environment: &Strings,
) -> Result<Loaded> {
    let plan = plan(regular(file)?)?;
    fetch_tails(regular(file)?, &plan)?;
    let interpreter = match &plan.interpreter {
        None => None,
        Some(name) => Some(interpreter_plan(regular(file)?, name)?),
    };
    let memory = lack::with_memory(Memory::try_new)?;
    if let Some(limit) = stack_limit() {
        memory.space().set_stack_limit(limit);
    }
    // The code from here to the end of the visit does not sleep.
    let visit = Visit::to(&memory);
    let mapped = map(&memory, regular(file)?, &plan, plan.bias.unwrap_or(0))?;
    memory.space().set_heap_start(percpu::cpu(), mapped.end)?;
    let linker = match &interpreter {
        None => None,
        Some((file, plan)) => {
            let bias = match plan.bias {
                Some(_) => place(&memory, plan)?,
                None => 0,
            };
            let mapped = map(&memory, regular(file)?, plan, bias)?;
            Some((mapped.bias, plan.entry.wrapping_add(mapped.bias)))
        }
    };
    let entry = plan.entry.wrapping_add(mapped.bias);
    let (user, group) = match try_current() {
        Some(thread) => (thread.process.ids.user(), thread.process.ids.group()),
        None => Default::default(),
    };
    let auxiliary = [
        (aux::AT_HWCAP, capabilities()),
        (aux::AT_PAGESZ, PAGE_SIZE),
        (aux::AT_CLKTCK, 100),
        (aux::AT_MINSIGSTKSZ, crate::signal::frame_bytes()),
        (aux::AT_PHDR, if plan.table == 0 { 0 } else { plan.table + mapped.bias }),
        (aux::AT_PHENT, 56),
        (aux::AT_PHNUM, plan.count),
        (aux::AT_BASE, linker.map_or(0, |(base, _)| base)),
        (aux::AT_FLAGS, 0),
        (aux::AT_ENTRY, entry),
        (aux::AT_UID, user.real.into()),
        (aux::AT_EUID, user.effective.into()),
        (aux::AT_GID, group.real.into()),
        (aux::AT_EGID, group.effective.into()),
        (aux::AT_SECURE, 0),
        (aux::AT_MINSIGSTKSZ, signal::frame_bytes()),
    ];
    let stack = Stack { path, arguments, environment, auxiliary: &auxiliary };
    let (rsp, arguments, environment) = stack.write(&memory, plan.executable_stack)?;
    let rip = linker.map_or(entry, |(_, entry)| entry);
    drop(visit);
    let path = match Inode::path(file) {
        Err(Errno::ENOMEM) => return Err(Errno::ENOMEM),
        path => String::try_from_utf8_lossy(&path.unwrap_or_default())?,
    };
    *memory.image.lock() =
        Image { path, arguments: Some(arguments), environment: Some(environment) };
    let name = fs::file_name(program);
    let name = String::try_from_utf8_lossy(&name[..name.len().min(15)])?;
    let fpu = FpuState::try_new().ok_or(Errno::ENOMEM)?;
    Ok(Loaded { memory, frame: TrapFrame::start(rip, rsp), fpu, name })
}

/// Chooses the address of a second, position-independent program in the same space.
fn place(memory: &Memory, plan: &Plan) -> Result {
    let start = plan.segments.first().map_or(0, |segment| segment.start);
    let len = plan.segments.last().map_or(0, |segment| segment.end) - start;
    let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::NORESERVE;
    let at = memory.space().mmap(percpu::cpu(), None, len, Prot::empty(), flags)?;
    memory.space().munmap(percpu::cpu(), at, len)?;
    at.checked_sub(start).ok_or(Errno::ENOEXEC)
}

fn map(memory: &Memory, file: &Regular, plan: &Plan, bias: u64) -> Result<Mapped> {
    let mut end = 0;
    for segment in &plan.segments {
        map_segment(memory, file, segment, bias)?;
        end = segment.end + bias;
    }
    Ok(Mapped { bias, end })
}

fn map_segment(memory: &Memory, file: &Regular, segment: &Segment, bias: u64) -> Result<()> {
    let (space, cpu) = (memory.space(), percpu::cpu());
    let bit = |flag, prot| if segment.flags & flag != 0 { prot } else { Prot::empty() };
    let prot = bit(elf::abi::PF_R, Prot::READ)
        | bit(elf::abi::PF_W, Prot::WRITE)
        | bit(elf::abi::PF_X, Prot::EXEC);
    let flags = MapFlags::PRIVATE | MapFlags::FIXED;
    let Segment { start, zeros, end, page, tail, .. } = *segment;
    if zeros > start {
        let backing = Backing { object: file.map(), first: page, may_write: false };
        space.mmap_object(cpu, start + bias, zeros - start, prot, flags, backing)?;
    }
    if end > zeros {
        space.mmap(cpu, zeros + bias, end - zeros, prot, flags | MapFlags::ANONYMOUS)?;
    }
    // As on Linux, the rest of a last page that is not writable keeps the bytes of the file.
    if tail < zeros && prot.contains(Prot::WRITE) {
        user::zero_out(tail + bias, (zeros - tail) as usize)?;
    }
    Ok(())
}

/// Returns the processor's features as Linux passes them in `AT_HWCAP`: a word of CPUID.
fn capabilities() -> u64 {
    u64::from(core::arch::x86_64::__cpuid(1).edx)
}

/// The initial contents of a program's stack.
struct Stack<'a> {
    path: &'a [u8],
    arguments: &'a Strings,
    environment: &'a Strings,
    auxiliary: &'a [(u32, u64)],
}

impl Stack<'_> {
    /// Maps and writes the stack in Linux's layout. Returns the stack pointer, and the addresses of
    /// the arguments and the environment. This CPU runs the space.
    fn write(&self, memory: &Memory, executable: bool) -> Result<(u64, VirtRange, VirtRange)> {
        const PLATFORM: &[u8] = b"x86_64\0";
        let Self { path, arguments, environment, auxiliary } = self;
        // From the top down: a zero, the path, the environment, the arguments, ...
        let path_at = USER_END - 8 - (path.len() as u64 + 1);
        let environment_at = path_at - environment.bytes.len() as u64;
        let arguments_at = environment_at - arguments.bytes.len() as u64;
        let platform_at = arguments_at - PLATFORM.len() as u64;
        let random_at = (platform_at - 16) & !15;
        let count = arguments.count + environment.count + 2 * auxiliary.len() + 16;
        let mut words = Vec::try_with_capacity(count)?;
        words.try_push(arguments.count as u64)?;
        for (strings, mut at) in [(arguments, arguments_at), (environment, environment_at)] {
            for string in strings.iter() {
                words.try_push(at)?;
                at += string.len() as u64 + 1;
            }
            words.try_push(0)?;
        }
        let more = [
            (aux::AT_RANDOM, random_at),
            (aux::AT_EXECFN, path_at),
            (aux::AT_PLATFORM, platform_at),
            (aux::AT_NULL, 0),
        ];
        for &(kind, value) in auxiliary.iter().chain(&more) {
            words.try_extend([u64::from(kind), value])?;
        }
        let rsp = (random_at - words.len() as u64 * 8) & !15;

        let start = faultless::page_down(rsp) - STACK;
        let mut prot = Prot::READ | Prot::WRITE;
        prot.set(Prot::EXEC, executable);
        let flags = MapFlags::PRIVATE
            | MapFlags::ANONYMOUS
            | MapFlags::GROWSDOWN
            | MapFlags::FIXED_NOREPLACE;
        memory.space().mmap(percpu::cpu(), start, USER_END - start, prot, flags)?;
        let put = user::write_bytes;
        put(path_at, path)?;
        put(environment_at, &environment.bytes)?;
        put(arguments_at, &arguments.bytes)?;
        put(platform_at, PLATFORM)?;
        let mut random = [0; 16];
        fs::fill_random(&mut random);
        put(random_at, &random)?;
        // SAFETY: the words are valid for reads of their size.
        unsafe { user::copy_out(rsp, words.as_ptr().cast(), words.len() * 8) }?;
        let arguments = VirtRange::new(arguments_at, environment_at);
        Ok((rsp, arguments, VirtRange::new(environment_at, path_at)))
    }
}

/// Runs `loaded` in place of the running thread's program, with the registers `frame`.
///
/// # Errors
/// `ENOMEM`; [`RESTART`](Errno::RESTART): the thread must end. Nothing is changed on errors.
pub fn exec(frame: &mut TrapFrame, loaded: Loaded) -> Result {
    let thread = current();
    let process = &thread.process;
    let fresh = || {
        let affinity = thread.affinity.load(Ordering::Relaxed);
        let signals = thread.signals.fork(false);
        let fpu = FpuState::try_new().ok_or(Errno::ENOMEM)?;
        Thread::try_new(process.pid, process.clone(), loaded.frame, fpu, signals, affinity)
    };
    // The only thread has the process's number. If this is not the first thread, a new thread with
    // this number replaces the running one.
    let successor = if thread.is_leader() { None } else { Some((fresh()?, Slot::try_new()?)) };
    process.files().prepare_exec()?;
    if !exit::end_other_threads() {
        return Err(Errno::RESTART);
    }
    // Fault injection was requested for the old program.
    FailNth::default().set();
    let Loaded { memory, frame: start, fpu, name } = loaded;
    exit::say_goodbye(&thread);
    exit::replace_memory(memory);
    process.files().close_on_exec();
    process.signals.clear_handlers();
    process.timers.exec();
    process.limits.locks_future.set(MemoryLock::No);
    *process.name.lock() = name;
    if let Some((successor, slot)) = successor {
        exit::succeed(successor, slot);
    }
    thread.signals.reset_for_exec();
    Selectors::default().load();
    arch::set_fs_base(0);
    arch::set_gs_base(0);
    fpu::restore(&fpu);
    *frame = start;
    // The result of the call.
    Ok(frame.rax)
}
