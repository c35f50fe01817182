//! Converts perf's records, in order of time, to a [`Trace`].
//!
//! # The time of a call
//!
//! A call consists of two records, enter and exit. The change of the address space happens between
//! them, and records of other threads may lie between them too. A call that adds memory is placed
//! at its exit, because no other thread can know of the memory before. A call that removes memory
//! is placed at its enter, because after the removal another thread's `mmap` may get the same
//! addresses and return first. `mprotect` is placed at its enter if it grants writing, and
//! otherwise at its exit, so that valid faults of other threads stay valid. An event placed at the
//! enter holds a slot, which is removed at the end if the call fails.
//!
//! # Mapping records
//!
//! The kernel writes an MMAP2 record for each new area, for a stack that grew, and for each area
//! changed by `mprotect`, with the size after merging. Within a recorded `mmap`, the record
//! provides the backing of the area, and the call provides all other data. Within another recorded
//! call, the record is redundant. Outside any call, the record becomes [`Kind::Area`].

use super::architecture::Architecture;
use super::call::{MAP_SHARED, call_event, pages};
use super::chains::Chains;
use super::hidden::Programs;
use super::roles::{COMPLETE, Call, NO_MUNMAP, Role, period, raw_field, raw_u64, role};
use super::unwind::Unwind;
use super::{Running, damaged, format, initial};
use crate::callers::discards;
use crate::event::{
    Access, Backing, Birth, Event, Events, Header, Kind, MAX_EVENTS, MAX_THREADS, ProcessInfo,
    Prot, Recorded, StackId, ThreadInfo, Trace,
};
use crate::resident::host_page_size;
use crate::symbols::Source;
use faultless::{PAGE_SIZE, page_down};
use linux_perf_data::linux_perf_event_reader::{
    AttrFlags, CpuMode, EventRecord, ForkOrExitRecord, RawData, RawEventRecord, RecordType,
    SampleFormat, SampleRecord,
};
use linux_perf_data::{Feature, PerfFile};
use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

const ERROR_PRESENT: u64 = 1;
const ERROR_WRITE: u64 = 1 << 1;
const ERROR_FETCH: u64 = 1 << 4;
const CLONE_VM: u64 = 0x100;
/// Results from here up are negated error numbers.
const FIRST_ERRNO: u64 = -4095i64 as u64;
const MAX_NAME: usize = 64;
/// The start of the note about a recording that exceeds a limit.
const CUT: &str = "the recording is cut at the limit of";

/// Returns whether `note` reports a recording that exceeds a limit.
pub(crate) fn is_cut(note: &str) -> bool {
    note.starts_with(CUT)
}

/// A call that has entered and not yet exited.
struct Pending {
    call: Call,
    args: [u64; 6],
    /// The place reserved in the events, for a call placed at its enter.
    slot: Option<usize>,
    /// The backing in a mapping record since the enter.
    backing: Option<Backing>,
    /// The call stack at the enter, of a call that creates memory.
    stack: StackId,
}

pub(super) struct Import<'a> {
    /// The processes that ran before the recording, if the recorder has examined them.
    running: Option<Running<'a>>,
    /// The number of each process from the start of the recording.
    first: Vec<(i32, u32)>,
    header: Header,
    roles: Vec<Role>,
    /// The architecture, whose numbers the calls have.
    architecture: Architecture,
    /// The bits of the addresses and lengths of all mappings, which the page size divides.
    bounds: u64,
    /// The calls with recorded exits.
    exits: HashSet<Call>,
    processes: Vec<ProcessInfo>,
    /// The number of each process, and of its running threads.
    alive: Vec<(i32, u32)>,
    threads: Vec<ThreadInfo>,
    process_of: HashMap<i32, u32>,
    thread_of: HashMap<i32, u32>,
    /// The place in the events of the birth of each process that might be a `vfork`.
    births: HashMap<u32, usize>,
    pending: HashMap<u32, Pending>,
    events: Events,
    /// The kernel marks the name of an executed program (Linux 3.16 and later).
    tells_exec: bool,
    /// Places in `events` of calls that failed later.
    failed_slots: Vec<usize>,
    /// Places in `events` of births that are a `vfork`.
    vforks: HashSet<usize>,
    start_ns: Option<u64>,
    now_us: u64,
    failed: u64,
    lost: [u64; 2],
    /// THROTTLE records: the kernel stopped an event for the rest of a tick.
    throttled: u64,
    /// Records of guests of virtual machines, whose memory is separate from the host's.
    guests: u64,
    /// The call chains of the faults and the calls.
    chains: Chains,
    /// The build identifiers of the files with code.
    build_ids: HashMap<PathBuf, Vec<u8>>,
}

impl<'a> Import<'a> {
    pub fn new(file: &PerfFile, running: Option<Running<'a>>) -> Result<Self, String> {
        let text = |value: Result<Option<&str>, _>| value.ok().flatten().unwrap_or("").to_owned();
        let arch = text(file.arch());
        let architecture = Architecture::of_perf(&arch)?;
        let section = file.feature_section_data(Feature::TRACING_DATA).unwrap_or_default();
        let layouts = format::layouts(section);
        let attrs = file.event_attributes();
        let mut recorded = Recorded::empty();
        let mut exits = HashSet::new();
        let roles: Vec<_> = attrs
            .iter()
            .map(|attr| role(attr, attrs, &layouts, &mut recorded, &mut exits))
            .collect::<Result<_, _>>()?;
        // Without times, these records would precede all samples.
        if !attrs.iter().any(|attr| attr.attr.flags.contains(AttrFlags::SAMPLE_ID_ALL)) {
            return Err(format!(
                "records of mappings and processes have no times (sample_id_all is off): {COMPLETE}"
            ));
        }
        if !recorded.intersects(Recorded::USER_FAULTS | Recorded::KERNEL_FAULTS) {
            return Err(format!("no page faults were recorded: {COMPLETE}"));
        }
        let of_faults = attrs.iter().zip(&roles).filter(|(_, role)| role.is_fault());
        let mut periods: Vec<_> = of_faults.map(|(attr, _)| period(attr)).collect();
        periods.dedup();
        let omitted = match periods[..] {
            [period] => u32::try_from(period.saturating_sub(1)).unwrap_or(u32::MAX),
            _ => return Err(format!("faults were recorded with several periods: {COMPLETE}")),
        };
        // Without its result the effect of such a call is unknown. Mapping records replace the
        // call.
        for (call, bit) in [
            (Call::Mmap, Recorded::MMAP),
            (Call::Mremap, Recorded::MREMAP),
            (Call::Brk, Recorded::BRK),
        ] {
            if !exits.contains(&call) {
                recorded.remove(bit);
            }
        }
        let copies = attrs.iter().any(|attr| {
            let format = attr.attr.sample_format;
            format.contains(SampleFormat::STACK_USER | SampleFormat::REGS_USER)
        });
        let version = text(file.perf_version());
        let assumed = "the file does not name its architecture; x86-64 is assumed";
        let header = Header {
            notes: if arch.is_empty() { vec![assumed.to_owned()] } else { Vec::new() },
            made: format!("perf record, perf {version}").trim_end_matches([',', ' ']).to_owned(),
            page_size: PAGE_SIZE as u32,
            kernel: text(file.os_release()),
            cpus: file.nr_cpus().ok().flatten().map_or(0, |cpus| cpus.nr_cpus_online),
            recorded,
            omitted,
            ..Header::default()
        };
        Ok(Self {
            running,
            first: Vec::new(),
            header,
            roles,
            architecture,
            bounds: 0,
            exits,
            processes: Vec::new(),
            alive: Vec::new(),
            threads: Vec::new(),
            process_of: HashMap::new(),
            thread_of: HashMap::new(),
            births: HashMap::new(),
            pending: HashMap::new(),
            events: Events::default(),
            tells_exec: attrs.iter().any(|attr| attr.attr.flags.contains(AttrFlags::COMM_EXEC)),
            failed_slots: Vec::new(),
            vforks: HashSet::new(),
            start_ns: None,
            now_us: 0,
            failed: 0,
            lost: [0; 2],
            throttled: 0,
            guests: 0,
            chains: Chains::new(copies.then(|| Unwind::new(running.is_some(), architecture))),
            build_ids: build_ids(file),
        })
    }

    /// Returns whether the next record might exceed the limits of a recording.
    pub fn is_full(&self) -> bool {
        // A record and each pending call have at most three events.
        let most = self.events.len() + 3 * (self.pending.len() + 1);
        most > MAX_EVENTS || self.threads.len() >= MAX_THREADS
    }

    /// Adds the note about records that are omitted because the recording is
    /// [full](Self::is_full).
    pub fn cut(&mut self) {
        let seconds = self.now_us as f64 / 1e6;
        self.header.notes.push(format!(
            "{CUT} {MAX_THREADS} threads and processes and {MAX_EVENTS} events: all events after \
             {seconds:.1} s are missing. Remedy: record a shorter time, or a part of the program"
        ));
    }

    /// Processes the next record of the perf event `attr`.
    pub fn record(&mut self, attr: usize, record: &RawEventRecord<'_>) -> Result<(), String> {
        if let Some(ns) = record.timestamp().filter(|ns| *ns > 0) {
            let start = *self.start_ns.get_or_insert(ns);
            self.now_us = self.now_us.max(ns.saturating_sub(start) / 1000);
        }
        if matches!(CpuMode::from_misc(record.misc), CpuMode::GuestKernel | CpuMode::GuestUser) {
            self.guests += 1;
            return Ok(());
        }
        if record.record_type == RecordType::THROTTLE {
            self.throttled += 1;
            return Ok(());
        }
        if record.record_type == RecordType::LOST_SAMPLES {
            self.lost[1] = self.lost[1].saturating_add(raw_u64(record.data, 0).unwrap_or(0));
            return Ok(());
        }
        match record.parse().map_err(|error| damaged(&error))? {
            EventRecord::Sample(sample) => self.sample(attr, &sample),
            EventRecord::Mmap2(map) if map.pid > 0 && map.cpu_mode != CpuMode::Kernel => {
                let path = map.path.as_slice();
                let shared = u64::from(map.flags) & MAP_SHARED != 0;
                let prot = Prot::from_bits_truncate(map.protection as u8);
                let thread = self.thread(map.pid, map.tid);
                if prot.contains(Prot::EXEC) {
                    let (start, offset) = (map.address, map.page_offset);
                    self.chains.map(map.pid, start, map.length, offset, &path);
                }
                self.area(thread, map.address, map.length, prot, Backing::named(&path, shared));
                Ok(())
            }
            EventRecord::Mmap(map) if map.pid > 0 && map.cpu_mode != CpuMode::Kernel => {
                let prot = Prot::READ | if map.is_executable { Prot::EXEC } else { Prot::WRITE };
                let thread = self.thread(map.pid, map.tid);
                let path = map.path.as_slice();
                if map.is_executable {
                    let (start, offset) = (map.address, map.page_offset);
                    self.chains.map(map.pid, start, map.length, offset, &path);
                }
                let backing = Backing::named(&path, false);
                self.area(thread, map.address, map.length, prot, backing);
                Ok(())
            }
            EventRecord::Comm(comm) if comm.pid > 0 => {
                let thread = self.thread(comm.pid, comm.tid);
                let name = comm.name.as_slice();
                let name: String = String::from_utf8_lossy(&name).chars().take(MAX_NAME).collect();
                if comm.is_execve {
                    if self.header.program.is_empty() {
                        self.header.program.clone_from(&name);
                    }
                    self.pending.remove(&thread);
                    self.chains.exec(comm.pid);
                    self.push(thread, Kind::Exec);
                }
                self.threads[thread as usize].name = name;
                Ok(())
            }
            // perf lists the processes that run already, before all records with a time.
            EventRecord::Fork(fork) if record.timestamp() == Some(0) && fork.pid > 0 => {
                self.thread(fork.pid, fork.tid);
                Ok(())
            }
            EventRecord::Fork(fork) => {
                self.fork(&fork);
                Ok(())
            }
            EventRecord::Exit(exit) => {
                self.exit(&exit);
                Ok(())
            }
            EventRecord::Lost(lost) => {
                self.lost[0] = self.lost[0].saturating_add(lost.count);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Returns the trace after all records have been processed.
    pub fn finish(mut self) -> Result<Trace, String> {
        let open: Vec<_> = self.pending.drain().collect();
        for (thread, pending) in open {
            self.settle(thread, &pending, 0);
        }
        // The recorder of running processes has its own note.
        if self.header.omitted > 0 && self.running.is_none() {
            let note = format!("one in {} faults was recorded", self.header.period());
            self.header.notes.push(note);
        }
        // Since 6.1, perf reports the lost events a second time at its end.
        self.header.lost = self.lost[0].max(self.lost[1]);
        if self.throttled > 0 {
            // The number of lost events is unknown; at least one per record.
            self.header.lost = self.header.lost.saturating_add(self.throttled);
            let note = format!("the kernel throttled events {} times", self.throttled);
            self.header.notes.push(note);
        }
        if self.guests > 0 {
            let note = format!("{} records of virtual machines' guests are omitted", self.guests);
            self.header.notes.push(note);
        }
        if !self.header.recorded.contains(Recorded::MUNMAP) {
            self.header.notes.push(NO_MUNMAP.to_owned());
        }
        if self.tells_exec {
            self.name_running();
        }
        if self.failed > 0 {
            let note = format!("{} calls that the kernel refused are omitted", self.failed);
            self.header.notes.push(note);
        }
        let source = Source { build_ids: self.build_ids, running: self.running.is_some() };
        let (stacks, named, notes) = self.chains.named(&source);
        self.header.notes.extend(notes);
        let mut programs = Programs::of(self.events.iter(), &self.threads, &self.processes);
        let calls = self.header.recorded.contains(Recorded::MUNMAP);
        let whole = self.header.omitted == 0 && self.header.lost == 0;
        self.header.notes.extend(programs.notes(&self.threads, calls, whole));
        self.failed_slots.sort_unstable();
        let mut failed = self.failed_slots.into_iter().peekable();
        let mut numbers = 0..;
        self.events.retain_mut(|event| {
            let Some(number) = numbers.next() else { return true };
            let keeps = programs.keeps(event, &self.threads);
            if let Kind::Fault { stack, .. } | Kind::Caller { stack } = &mut event.kind {
                *stack = named[stack.number() as usize];
            }
            if let Kind::Spawn { birth, .. } = &mut event.kind
                && self.vforks.contains(&number)
            {
                *birth = Birth::Vfork;
            }
            failed.next_if_eq(&number).is_none() && keeps
        });
        self.header.page_size = match self.running {
            Some(_) if self.architecture == Architecture::OWN => host_page_size() as u32,
            _ => self.architecture.page_size(self.bounds),
        };
        let mut trace = Trace {
            header: self.header,
            processes: self.processes,
            threads: self.threads,
            events: self.events,
            stacks,
        };
        trace.extend_to_pages();
        if let Some(running) = self.running {
            initial::add(&mut trace, &self.first, self.start_ns.unwrap_or(0), running);
        }
        Ok(trace)
    }

    /// Adds a note about processes that ran before the recording began.
    fn name_running(&mut self) {
        let mut executed = vec![false; self.processes.len()];
        let mut running = vec![false; self.processes.len()];
        for event in &self.events {
            let process = self.threads[event.thread as usize].process as usize;
            match event.kind {
                Kind::Exec => executed[process] = true,
                Kind::Fault { .. } if self.processes[process].parent.is_none() => {
                    running[process] |= !executed[process];
                }
                _ => {}
            }
        }
        let count = running.iter().filter(|running| **running).count();
        let Some(first) = running.iter().position(|running| *running) else { return };
        if self.header.program.is_empty() {
            let mut threads = self.threads.iter();
            let thread = threads.find(|thread| thread.process as usize == first);
            self.header.program = thread.map_or(String::new(), |thread| thread.name.clone());
        }
        if self.running.is_some() {
            return;
        }
        let processes = if count == 1 { "process" } else { "processes" };
        self.header.notes.push(format!(
            "{count} {processes} ran before the recording began (perf record -p or -a): earlier \
             touches of pages are unknown, and only faults of the recorded time are included. \
             Remedy: record with `faultless record --pid PID`, which reads the resident pages, or \
             record the program from its start, with `faultless record -- PROGRAM`"
        ));
    }

    fn push(&mut self, thread: u32, kind: Kind) {
        self.events.push(Event { time_us: self.now_us, thread, kind });
    }

    /// Adds a call, and its call stack if recorded.
    fn push_call(&mut self, thread: u32, kind: Kind, stack: StackId) {
        if stack != StackId::NONE {
            self.push(thread, Kind::Caller { stack });
        }
        self.push(thread, kind);
    }

    fn new_process(&mut self, pid: i32, parent: Option<u32>) -> u32 {
        let process = self.processes.len() as u32;
        self.processes.push(ProcessInfo { parent, pid: u32::try_from(pid).ok() });
        self.alive.push((pid, 0));
        if parent.is_none() {
            self.first.push((pid, process));
        }
        self.process_of.insert(pid, process);
        process
    }

    fn new_thread(&mut self, tid: i32, process: u32, name: String) -> u32 {
        let thread = self.threads.len() as u32;
        self.threads.push(ThreadInfo { process, name });
        self.alive[process as usize].1 += 1;
        self.thread_of.insert(tid, thread);
        thread
    }

    /// Returns the thread `tid` of the process `pid`. An unknown thread has existed from the start.
    fn thread(&mut self, pid: i32, tid: i32) -> u32 {
        if let Some(thread) = self.thread_of.get(&tid) {
            return *thread;
        }
        let process = match self.process_of.get(&pid) {
            Some(process) => *process,
            None => self.new_process(pid, None),
        };
        self.new_thread(tid, process, String::new())
    }

    fn fork(&mut self, fork: &ForkOrExitRecord) {
        if self.thread_of.contains_key(&fork.tid) || fork.pid <= 0 {
            return;
        }
        let Some(&parent) = self.thread_of.get(&fork.ptid) else {
            self.thread(fork.pid, fork.tid);
            return;
        };
        let ThreadInfo { process, name } = self.threads[parent as usize].clone();
        let (child, birth) = if self.process_of.get(&fork.pid) == Some(&process) {
            (self.new_thread(fork.tid, process, name), Birth::Thread)
        } else {
            self.chains.fork(fork.ppid, fork.pid);
            let process = self.new_process(fork.pid, Some(process));
            (self.new_thread(fork.tid, process, name), Birth::Fork)
        };
        if birth == Birth::Fork {
            self.births.insert(child, self.events.len());
        }
        self.push(parent, Kind::Spawn { child, birth });
    }

    fn exit(&mut self, exit: &ForkOrExitRecord) {
        let Some(thread) = self.thread_of.remove(&exit.tid) else { return };
        if let Some(pending) = self.pending.remove(&thread) {
            self.settle(thread, &pending, 0);
        }
        self.push(thread, Kind::Exit);
        let process = self.threads[thread as usize].process;
        let (pid, alive) = &mut self.alive[process as usize];
        *alive -= 1;
        // The number may be reused by another process.
        if *alive == 0 && self.process_of.get(pid) == Some(&process) {
            self.process_of.remove(pid);
        }
    }

    /// Processes a mapping record.
    fn area(&mut self, thread: u32, address: u64, len: u64, prot: Prot, backing: Backing) {
        self.bounds |= address | len;
        let address = self.architecture.address(address);
        if let Some(pending) = self.pending.get_mut(&thread) {
            pending.backing.get_or_insert(backing);
            return;
        }
        if let Some((start, len)) = pages(address, len) {
            self.push(thread, Kind::Area { start, len, prot, backing });
        }
    }

    fn sample(&mut self, attr: usize, sample: &SampleRecord<'_>) -> Result<(), String> {
        let (Some(pid), Some(tid)) = (sample.pid, sample.tid) else {
            return Err("a sample without a thread; record with perf's default sample type".into());
        };
        if pid <= 0 {
            return Ok(());
        }
        let raw = sample.raw.unwrap_or(RawData::empty());
        let cut = |part: &str| damaged(&format_args!("a sample without {part}"));
        let field = |field, name: &str| raw_field(raw, field).ok_or_else(|| cut(name));
        match &self.roles[attr] {
            &Role::Fault { kernel, address, ip, error_code } => {
                let code = field(error_code, "error code")?;
                let page = page_down(self.architecture.address(field(address, "address")?));
                let access = if code & ERROR_FETCH != 0 {
                    Access::Exec
                } else if code & ERROR_WRITE != 0 {
                    Access::Write
                } else {
                    Access::Read
                };
                let present = code & ERROR_PRESENT != 0;
                let instruction = Some(place_in_page(field(ip, "instruction")?));
                let stack = self.stack(pid, sample);
                let thread = self.thread(pid, tid);
                self.push(
                    thread,
                    Kind::Fault { page, access, kernel, present, instruction, stack },
                );
            }
            Role::SoftwareFault => {
                let address = sample.addr.ok_or_else(|| cut("address"))?;
                let page = page_down(self.architecture.address(address));
                let kernel = sample.cpu_mode == CpuMode::Kernel;
                let thread = self.thread(pid, tid);
                let (access, present) = (Access::Unknown, false);
                let instruction = sample.ip.map(place_in_page);
                let stack = self.stack(pid, sample);
                self.push(
                    thread,
                    Kind::Fault { page, access, kernel, present, instruction, stack },
                );
            }
            Role::Enter { number, args } => {
                let number = field(*number, "call number")?;
                let Some(call) = self.architecture.call(number) else { return Ok(()) };
                let mut values = [0; 6];
                for (value, arg) in values.iter_mut().zip(args) {
                    *value = field(*arg, "arguments")?;
                }
                values[0] = self.architecture.address(values[0]);
                let stack = match call {
                    Call::Mmap | Call::Mremap | Call::Brk | Call::Munmap => self.stack(pid, sample),
                    Call::Madvise if discards(values[2] as u32) => self.stack(pid, sample),
                    Call::Mprotect | Call::Madvise => StackId::NONE,
                };
                let thread = self.thread(pid, tid);
                self.enter(thread, call, values, stack);
            }
            &Role::Exit { number, result } => {
                let number = field(number, "call number")?;
                let result = field(result, "result")?;
                let thread = self.thread(pid, tid);
                let call = self.architecture.call(number);
                let matched = self.pending.get(&thread).is_some_and(|it| call == Some(it.call));
                if let (true, Some(pending)) = (matched, self.pending.remove(&thread)) {
                    self.settle(thread, &pending, result);
                }
            }
            &Role::NewTask { pid, flags } => {
                let child = field(pid, "child")? as i32;
                let shares = field(flags, "clone flags")? & CLONE_VM != 0;
                let slot = self.thread_of.get(&child).and_then(|child| self.births.remove(child));
                self.vforks.extend(slot.filter(|_| shares));
            }
            Role::Other => {}
        }
        Ok(())
    }

    /// Returns the call stack of a fault or a call of the process `pid`.
    fn stack(&mut self, pid: i32, sample: &SampleRecord<'_>) -> StackId {
        let Some(stack) = self.chains.sample(pid, sample) else { return StackId::NONE };
        self.header.recorded |= Recorded::STACKS;
        stack
    }

    fn enter(&mut self, thread: u32, call: Call, args: [u64; 6], stack: StackId) {
        // An enter without an exit, or with a lost exit.
        if let Some(pending) = self.pending.remove(&thread) {
            self.settle(thread, &pending, 0);
        }
        let stands_here = match call {
            Call::Munmap | Call::Madvise => true,
            Call::Mprotect => args[2] & u64::from(Prot::WRITE.bits()) != 0,
            Call::Mmap | Call::Mremap | Call::Brk => false,
        };
        // The slot has the time of the enter.
        let slot = if stands_here { call_event(call, &args, 0, None) } else { None };
        let slot = slot.map(|kind| {
            self.push_call(thread, kind, stack);
            self.events.len() - 1
        });
        if self.exits.contains(&call) {
            self.pending.insert(thread, Pending { call, args, slot, backing: None, stack });
        } else if slot.is_none()
            && let Some(kind) = call_event(call, &args, 0, None)
            && call == Call::Mprotect
        {
            self.push(thread, kind);
        }
    }

    /// Processes the return of a call with `result`; 0 for an unseen exit.
    fn settle(&mut self, thread: u32, pending: &Pending, result: u64) {
        let folded = self.architecture.address(result);
        if result >= FIRST_ERRNO {
            self.failed += 1;
            self.failed_slots.extend(pending.slot);
            // The call stack is directly before the call.
            let stack = pending.slot.filter(|_| pending.stack != StackId::NONE);
            self.failed_slots.extend(stack.map(|slot| slot - 1));
        } else if pending.slot.is_none()
            && let Some(kind) = call_event(pending.call, &pending.args, folded, pending.backing)
        {
            self.push_call(thread, kind, pending.stack);
        }
    }
}

/// Returns the build identifier of each file with code, as far as recorded.
fn build_ids(file: &PerfFile) -> HashMap<PathBuf, Vec<u8>> {
    let ids = file.build_ids().unwrap_or_default();
    ids.into_values().map(|file| (OsStr::from_bytes(&file.path).into(), file.build_id)).collect()
}

/// Returns the offset of the byte at `addr` in its page.
fn place_in_page(addr: u64) -> u16 {
    (addr % PAGE_SIZE) as u16
}
