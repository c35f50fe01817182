#![doc = include_str!("../FORMAT.md")]

use crate::error::{Error, Place};
use crate::event::{
    Access, Backing, Birth, Event, Events, Frame, Function, Header, Kind, MAX_EVENTS, MAX_FRAMES,
    MAX_FUNCTIONS, MAX_THREADS, ProcessInfo, Prot, Recorded, StackId, Stacks, ThreadInfo, Trace,
};
use crate::zstd;
use faultless::PAGE_SHIFT;
use std::path::Path;

/// The first bytes of a compact recording.
pub const MAGIC: &[u8; 8] = b"FLTRACE\n";
/// The written version. Earlier versions can be read, too.
pub const VERSION: u32 = 6;
/// The first version with instructions.
const WITH_INSTRUCTIONS: u32 = 2;
/// The first version with resident pages.
const WITH_RESIDENT: u32 = 3;
/// The first version with call stacks.
const WITH_STACKS: u32 = 4;
/// The first version with the number of omitted faults.
const WITH_OMITTED: u32 = 4;
/// The first version with the numbers of processes.
const WITH_PIDS: u32 = 5;
/// The first version with the callers of calls.
const WITH_CALLERS: u32 = 5;
/// The first version with the processor time of the processes.
const WITH_PROCESSOR: u32 = 6;
/// The extension of the file names.
pub const EXTENSION: &str = "fltrace";

/// The remedy for a damaged or truncated file.
const AGAIN: &str = "copy the file again, or record again";
const PREFIX: usize = 24;
const MAX_BODY: u64 = 256 << 20;
const MAX_STRING: usize = 4096;

const BIRTHS: [Birth; 3] = [Birth::Thread, Birth::Fork, Birth::Vfork];

/// Encodes `trace` in the compact form, for the file `path` (used in errors only).
///
/// # Errors
/// The trace does not pass [`Trace::check`], has a string above 4,096 bytes, or is larger than the
/// format allows. Longer notes are shortened.
pub fn encode(path: &Path, trace: &Trace) -> Result<Vec<u8>, Error> {
    trace.check().map_err(|(event, reason)| unchecked(path, event, reason))?;
    let writer = Writer::new(Fields::of(trace.header.recorded));
    let body = writer.body(trace).map_err(|why| Error::new(path, Place::File, why))?;
    if body.len() as u64 > MAX_BODY {
        return Err(Error::new(path, Place::File, "the trace is larger than 256 MiB"));
    }
    let packed = zstd::pack(&body);
    let mut bytes = Vec::with_capacity(PREFIX + packed.len());
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&crc32fast::hash(&body).to_le_bytes());
    bytes.extend_from_slice(&(body.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&packed);
    Ok(bytes)
}

/// Writes `trace` to the file `path`.
///
/// # Errors
/// The errors of [`encode`] and of the file system.
pub fn write(path: &Path, trace: &Trace) -> Result<(), Error> {
    let bytes = encode(path, trace)?;
    std::fs::write(path, bytes).map_err(|e| Error::new(path, Place::File, e.to_string()))
}

/// Reads the compact recording `bytes`, which came from the file `path` (used in errors only).
///
/// # Errors
/// The bytes are not a compact recording of a known version, or are truncated or corrupted.
pub fn parse(path: &Path, bytes: &[u8]) -> Result<Trace, Error> {
    if !bytes.starts_with(MAGIC) {
        return Err(Error::at(path, 0, "not a recording: the magic FLTRACE is missing"));
    }
    if bytes.len() < PREFIX {
        return Err(Error::at(
            path,
            bytes.len() as u64,
            format!("the file ends within its header: {AGAIN}"),
        ));
    }
    let word =
        |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let version = word(8);
    if !(1..=VERSION).contains(&version) {
        return Err(Error::at(
            path,
            8,
            format!("version {version}; this reads versions 1 to {VERSION}"),
        ));
    }
    let len = u64::from(word(16)) | u64::from(word(20)) << 32;
    if len > MAX_BODY {
        return Err(Error::at(path, 16, format!("a body of {len} bytes; the most is 256 MiB")));
    }
    let body = unpack(path, &bytes[PREFIX..], len)?;
    if crc32fast::hash(&body) != word(12) {
        return Err(Error::at(
            path,
            12,
            format!("the checksum does not match: the file is corrupted: {AGAIN}"),
        ));
    }
    let mut reader = Reader { body: &body, at: 0, version, fields: Fields::default() };
    let trace = reader
        .trace()
        .map_err(|reason| Error::new(path, Place::BodyOffset(reader.at as u64), reason))?;
    trace.check().map_err(|(event, reason)| unchecked(path, event, reason))?;
    Ok(trace)
}

fn unchecked(path: &Path, event: Option<u64>, reason: String) -> Error {
    Error::new(path, event.map_or(Place::File, Place::Event), reason)
}

/// Decompresses `packed`, which must contain exactly `len` bytes. Memory grows with the actual
/// contents, not with the size claimed by the header.
fn unpack(path: &Path, packed: &[u8], len: u64) -> Result<Vec<u8>, Error> {
    let mut rest = packed;
    let mut body = Vec::new();
    if let Err(damage) = zstd::unpack(&mut rest, len, &mut body) {
        let at = if damage.ended { packed.len() as u64 } else { damage.begins };
        return Err(Error::at(path, PREFIX as u64 + at, format!("{}: {AGAIN}", damage.reason)));
    }
    if body.len() as u64 != len {
        return Err(Error::at(
            path,
            16,
            format!("the header promises a body of {len} bytes; the body is shorter"),
        ));
    }
    if !rest.is_empty() {
        let at = PREFIX + packed.len() - rest.len();
        return Err(Error::at(path, at as u64, "bytes follow the compressed body"));
    }
    Ok(body)
}

/// The optional fields of events.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Fields {
    /// Whether faults contain their instructions.
    instructions: bool,
    /// Whether faults contain their call stacks.
    stacks: bool,
}

impl Fields {
    /// All fields, for events in memory.
    pub const ALL: Self = Self { instructions: true, stacks: true };

    /// Returns the fields of a recording with the kinds `recorded`.
    fn of(recorded: Recorded) -> Self {
        Self {
            instructions: recorded.contains(Recorded::INSTRUCTIONS),
            stacks: recorded.contains(Recorded::STACKS),
        }
    }
}

/// The values to which the next event is relative.
#[derive(Clone, Debug, Default)]
pub(crate) struct Position {
    /// The time of the last event, in microseconds.
    pub now: u64,
    /// The thread of the last event.
    thread: u32,
    /// By thread: the page of its last fault.
    pages: Vec<u64>,
}

impl Position {
    /// Returns the page of the last fault of the present thread.
    fn page(&mut self) -> &mut u64 {
        // Threads beyond the limit share a place: they cause an error of `Trace::check`.
        let at = (self.thread as usize).min(MAX_THREADS);
        if at >= self.pages.len() {
            self.pages.resize(at + 1, 0);
        }
        &mut self.pages[at]
    }
}

/// Writes the body of a recording.
#[derive(Clone)]
pub(crate) struct Writer {
    /// The written bytes.
    pub out: Vec<u8>,
    fields: Fields,
}

impl Writer {
    pub(crate) fn new(fields: Fields) -> Self {
        Self { out: Vec::new(), fields }
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.out.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.out.push(value as u8);
    }

    fn string(&mut self, text: &str) -> Result<(), String> {
        if text.len() > MAX_STRING {
            return Err(format!("a string of {} bytes; the most is {MAX_STRING}", text.len()));
        }
        self.varint(text.len() as u64);
        self.out.extend_from_slice(text.as_bytes());
        Ok(())
    }

    /// Writes the page of `addr` relative to the page `last`.
    fn page(&mut self, last: u64, addr: u64) {
        let delta = (addr >> PAGE_SHIFT).wrapping_sub(last) as i64;
        self.varint(((delta << 1) ^ (delta >> 63)) as u64);
    }

    fn range(&mut self, last: u64, start: u64, len: u64) {
        self.page(last, start);
        self.varint(len >> PAGE_SHIFT);
    }

    fn body(mut self, trace: &Trace) -> Result<Vec<u8>, String> {
        let header = &trace.header;
        let Header { program, made, page_size, kernel, thp, cpus, recorded, lost, notes, .. } =
            header;
        for text in [program, made, kernel, thp] {
            self.string(text)?;
        }
        let numbers = [
            (*page_size).into(),
            (*cpus).into(),
            recorded.bits().into(),
            *lost,
            header.omitted.into(),
            header.processor_us,
        ];
        for number in numbers {
            self.varint(number);
        }
        self.varint(notes.len() as u64);
        for note in notes {
            self.string(&note[..note.floor_char_boundary(MAX_STRING)])?;
        }
        self.varint(trace.processes.len() as u64);
        for process in &trace.processes {
            self.varint(process.parent.map_or(0, |parent| u64::from(parent) + 1));
            self.varint(process.pid.map_or(0, |pid| u64::from(pid) + 1));
        }
        self.varint(trace.threads.len() as u64);
        for thread in &trace.threads {
            self.varint(thread.process.into());
            self.string(&thread.name)?;
        }
        if recorded.contains(Recorded::STACKS) {
            self.stacks(&trace.stacks)?;
        }
        self.varint(trace.events.len() as u64);
        let mut position = Position::default();
        for event in &trace.events {
            self.event(&event, &mut position);
        }
        Ok(self.out)
    }

    fn stacks(&mut self, stacks: &Stacks) -> Result<(), String> {
        self.varint(stacks.functions.len() as u64);
        for Function { name, module, file } in &stacks.functions {
            [name, module, file].into_iter().try_for_each(|text| self.string(text))?;
        }
        self.varint(stacks.frames.len() as u64);
        for frame in &stacks.frames {
            self.varint(frame.caller.number().into());
            self.varint(frame.function.into());
            self.varint(frame.line.into());
        }
        Ok(())
    }

    /// Writes `event`, which follows the events up to `position`.
    pub(crate) fn event(&mut self, event: &Event, position: &mut Position) {
        let (code, extra) = code_of(&event.kind);
        let switched = u8::from(event.thread != position.thread);
        self.out.push(code | switched << 4 | extra << 5);
        self.varint(event.time_us.wrapping_sub(position.now));
        if switched == 1 {
            self.varint(event.thread.into());
        }
        (position.now, position.thread) = (event.time_us, event.thread);
        self.kind(&event.kind, position.page());
    }

    fn kind(&mut self, kind: &Kind, last: &mut u64) {
        match *kind {
            Kind::Fault { page, instruction, stack, .. } => {
                self.page(*last, page);
                *last = page >> PAGE_SHIFT;
                if self.fields.instructions {
                    self.varint(instruction.map_or(0, |place| u64::from(place) + 1));
                }
                if self.fields.stacks {
                    self.varint(stack.number().into());
                }
            }
            Kind::Map { start, len, flags, backing, .. } => {
                self.range(*last, start, len);
                self.varint(flags.into());
                self.out.push(backing as u8);
            }
            Kind::Area { start, len, backing, .. } => {
                self.range(*last, start, len);
                self.out.push(backing as u8);
            }
            Kind::Unmap { start, len }
            | Kind::Protect { start, len, .. }
            | Kind::Resident { start, len, .. } => {
                self.range(*last, start, len);
            }
            Kind::Remap { old, old_len, new, new_len, flags } => {
                self.range(*last, old, old_len);
                self.range(*last, new, new_len);
                self.varint(flags.into());
            }
            Kind::Advise { start, len, advice } => {
                self.range(*last, start, len);
                self.varint(advice.into());
            }
            Kind::Brk { end } => self.varint(end),
            Kind::Caller { stack } => self.varint(stack.number().into()),
            Kind::Spawn { child, .. } => self.varint(child.into()),
            Kind::Exec | Kind::Exit => {}
        }
    }
}

/// Returns the code and the extra bits of an event. Enumerations are stored by their order of
/// declaration, which `ALL` and `BIRTHS` repeat.
fn code_of(kind: &Kind) -> (u8, u8) {
    match *kind {
        Kind::Fault { access, kernel, present, .. } => {
            (u8::from(kernel), access as u8 | u8::from(present) << 2)
        }
        Kind::Map { prot, .. } => (2, prot.bits()),
        Kind::Area { prot, .. } => (3, prot.bits()),
        Kind::Unmap { .. } => (4, 0),
        Kind::Remap { .. } => (5, 0),
        Kind::Protect { prot, .. } => (6, prot.bits()),
        Kind::Advise { .. } => (7, 0),
        Kind::Brk { .. } => (8, 0),
        Kind::Spawn { birth, .. } => (9, birth as u8),
        Kind::Exec => (10, 0),
        Kind::Exit => (11, 0),
        Kind::Resident { written, .. } => (12, u8::from(written)),
        Kind::Caller { .. } => (13, 0),
    }
}

/// Reads the body of a recording.
#[derive(Clone, Debug)]
pub(crate) struct Reader<'a> {
    body: &'a [u8],
    at: usize,
    version: u32,
    fields: Fields,
}

impl<'a> Reader<'a> {
    /// Creates the reader of events in memory.
    pub(crate) fn of_events(body: &'a [u8]) -> Self {
        Self { body, at: 0, version: VERSION, fields: Fields::ALL }
    }

    fn byte(&mut self) -> Result<u8, String> {
        let byte = *self.body.get(self.at).ok_or("the body ends within an item")?;
        self.at += 1;
        Ok(byte)
    }

    fn varint(&mut self) -> Result<u64, String> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            value |= bits << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err("a number is longer than 64 bits".into())
    }

    fn small(&mut self) -> Result<u32, String> {
        self.varint()?.try_into().map_err(|_| "a number is longer than 32 bits".into())
    }

    /// Reads a count of at most `most` items, each of at least one byte.
    fn count(&mut self, most: usize, what: &str) -> Result<usize, String> {
        let count = self.varint()?;
        let most = most.min(self.body.len() - self.at);
        if count > most as u64 {
            return Err(format!("{count} {what}; there can be at most {most}"));
        }
        Ok(count as usize)
    }

    fn string(&mut self) -> Result<String, String> {
        let len = self.count(MAX_STRING, "bytes of text")?;
        let text = &self.body[self.at..self.at + len];
        let text = std::str::from_utf8(text).map_err(|_| "a string is not UTF-8")?.to_owned();
        self.at += len;
        Ok(text)
    }

    fn page(&mut self, last: u64) -> Result<u64, String> {
        let zigzag = self.varint()?;
        let delta = (zigzag >> 1) ^ (zigzag & 1).wrapping_neg();
        let page = last.wrapping_add(delta);
        if page >> (64 - PAGE_SHIFT) != 0 {
            return Err("a page lies beyond the 64-bit address space".into());
        }
        Ok(page << PAGE_SHIFT)
    }

    fn pages(&mut self) -> Result<u64, String> {
        let pages = self.varint()?;
        if pages >> (64 - PAGE_SHIFT) != 0 {
            return Err("a range is larger than the 64-bit address space".into());
        }
        Ok(pages << PAGE_SHIFT)
    }

    /// Reads the offset of an instruction in its page.
    fn instruction(&mut self) -> Result<Option<u16>, String> {
        match self.varint()? {
            0 => Ok(None),
            // `Trace::check` examines the number.
            after @ 1..=0x1_0000 => Ok(Some((after - 1) as u16)),
            _ => Err("an instruction lies beyond the end of a page".into()),
        }
    }

    fn backing(&mut self) -> Result<Backing, String> {
        let code = self.byte()?;
        Backing::ALL.get(usize::from(code)).copied().ok_or(format!("unknown backing {code}"))
    }

    fn trace(&mut self) -> Result<Trace, String> {
        let [program, made, kernel, thp] =
            [self.string()?, self.string()?, self.string()?, self.string()?];
        let (page_size, cpus) = (self.small()?, self.small()?);
        let recorded = Recorded::from_bits(self.small()?).ok_or("an unknown kind of event")?;
        self.fields = Fields::of(recorded);
        for (has, since, what) in [
            (self.fields.instructions, WITH_INSTRUCTIONS, "instructions"),
            (self.fields.stacks, WITH_STACKS, "call stacks"),
        ] {
            if has && self.version < since {
                return Err(format!("version {} has no {what}", self.version));
            }
        }
        let lost = self.varint()?;
        let omitted = if self.version < WITH_OMITTED { 0 } else { self.small()? };
        let processor_us = if self.version < WITH_PROCESSOR { 0 } else { self.varint()? };
        let notes = self.count(1 << 10, "notes")?;
        let notes = (0..notes).map(|_| self.string()).collect::<Result<_, _>>()?;
        let header = Header {
            program,
            made,
            page_size,
            kernel,
            thp,
            cpus,
            recorded,
            lost,
            omitted,
            processor_us,
            notes,
        };
        let processes = self.count(MAX_THREADS, "processes")?;
        let processes = (0..processes)
            .map(|_| {
                let parent = self.small()?.checked_sub(1);
                let pid = if self.version < WITH_PIDS { 0 } else { self.small()? };
                Ok(ProcessInfo { parent, pid: pid.checked_sub(1) })
            })
            .collect::<Result<_, String>>()?;
        let threads = self.count(MAX_THREADS, "threads")?;
        let threads = (0..threads)
            .map(|_| Ok(ThreadInfo { process: self.small()?, name: self.string()? }))
            .collect::<Result<Vec<_>, String>>()?;
        let stacks = match recorded.contains(Recorded::STACKS) {
            true => self.stacks()?,
            false => Stacks::default(),
        };
        let count = self.count(MAX_EVENTS, "events")?;
        let mut events = Events::default();
        let mut position = Position::default();
        for _ in 0..count {
            let event = self.event(&mut position)?;
            if event.time_us < events.last_us() {
                return Err("time overflows".into());
            }
            if event.thread as usize >= threads.len() {
                return Err(format!("thread {} is not in the table", event.thread));
            }
            events.push(event);
        }
        if self.at != self.body.len() {
            return Err("bytes follow the last event".into());
        }
        Ok(Trace { header, processes, threads, events, stacks })
    }

    fn stacks(&mut self) -> Result<Stacks, String> {
        let functions = self.count(MAX_FUNCTIONS, "functions")?;
        let functions = (0..functions)
            .map(|_| {
                let (name, module) = (self.string()?, self.string()?);
                Ok(Function { name, module, file: self.string()? })
            })
            .collect::<Result<_, String>>()?;
        let frames = self.count(MAX_FRAMES, "frames")?;
        let frames = (0..frames)
            .map(|_| {
                let (caller, function) = (StackId::new(self.small()?), self.small()?);
                Ok(Frame { caller, function, line: self.small()? })
            })
            .collect::<Result<_, String>>()?;
        Ok(Stacks { functions, frames })
    }

    /// Reads the event that follows `position`.
    pub(crate) fn event(&mut self, position: &mut Position) -> Result<Event, String> {
        let tag = self.byte()?;
        position.now = position.now.wrapping_add(self.varint()?);
        if tag & 0x10 != 0 {
            position.thread = self.small()?;
        }
        let (time_us, thread) = (position.now, position.thread);
        let kind = self.kind(tag & 15, tag >> 5, position.page())?;
        Ok(Event { time_us, thread, kind })
    }

    fn kind(&mut self, code: u8, extra: u8, last: &mut u64) -> Result<Kind, String> {
        let from = *last;
        let prot = Prot::from_bits_truncate(extra);
        Ok(match code {
            0 | 1 => {
                let page = self.page(from)?;
                *last = page >> PAGE_SHIFT;
                let access = Access::ALL[usize::from(extra & 3)];
                let Fields { instructions, stacks } = self.fields;
                let instruction = if instructions { self.instruction()? } else { None };
                let stack = StackId::new(if stacks { self.small()? } else { 0 });
                Kind::Fault {
                    page,
                    access,
                    kernel: code == 1,
                    present: extra & 4 != 0,
                    instruction,
                    stack,
                }
            }
            2 => Kind::Map {
                start: self.page(from)?,
                len: self.pages()?,
                prot,
                flags: self.small()?,
                backing: self.backing()?,
            },
            3 => Kind::Area {
                start: self.page(from)?,
                len: self.pages()?,
                prot,
                backing: self.backing()?,
            },
            6 => Kind::Protect { start: self.page(from)?, len: self.pages()?, prot },
            9 => {
                let birth = BIRTHS.get(usize::from(extra)).copied();
                Kind::Spawn {
                    birth: birth.ok_or("an unknown kind of birth")?,
                    child: self.small()?,
                }
            }
            12 if self.version >= WITH_RESIDENT && extra <= 1 => {
                Kind::Resident { start: self.page(from)?, len: self.pages()?, written: extra == 1 }
            }
            _ if extra != 0 => return Err(format!("event code {code} has no extra bits")),
            4 => Kind::Unmap { start: self.page(from)?, len: self.pages()? },
            5 => Kind::Remap {
                old: self.page(from)?,
                old_len: self.pages()?,
                new: self.page(from)?,
                new_len: self.pages()?,
                flags: self.small()?,
            },
            7 => {
                Kind::Advise { start: self.page(from)?, len: self.pages()?, advice: self.small()? }
            }
            8 => Kind::Brk { end: self.varint()? },
            10 => Kind::Exec,
            11 => Kind::Exit,
            13 if self.version >= WITH_CALLERS => {
                Kind::Caller { stack: StackId::new(self.small()?) }
            }
            _ => return Err(format!("unknown event code {code}")),
        })
    }
}
