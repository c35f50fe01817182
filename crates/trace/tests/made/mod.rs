//! Recordings as perf of Linux 3.2 to 6.x writes them, byte by byte: to a file and to a pipe.
//!
//! Each recording is the same short run of a program: its start, a fault on its code, an `mmap` of
//! four pages, two faults there, a fork with a fault of the child, and the ends of both processes.

#![allow(dead_code, reason = "each test target uses a part")]

/// The properties of a file that differ between versions of perf and the kernel.
#[derive(Clone, Copy, Debug)]
pub struct Version {
    /// The version of perf.
    pub name: &'static str,
    /// The size of a `perf_event_attr`, in bytes.
    pub attr: usize,
    /// The identifier of the event is at the start of a sample (since 3.12), and not within.
    pub identifier: bool,
    /// Mappings are MMAP2 records (since 3.16), and not MMAP records.
    pub mmap2: bool,
    /// The kernel marks `exec` (since 3.16).
    pub comm_exec: bool,
    /// Records other than samples have times and identifiers.
    pub sample_id_all: bool,
    /// The version of the format of tracing data.
    pub tracing: &'static str,
    /// The name of the number of a call in tracing data: `nr`, or `__syscall_nr` since 4.9.
    pub call: &'static str,
    /// A stream has the names of events (since 4.6).
    pub names: bool,
    /// A stream has features (since 4.14).
    pub features: bool,
    /// The size of the record before the tracing data of a stream, in bytes.
    pub tracing_record: u16,
    /// The recording has calls of `madvise`, and the entries of calls have call chains.
    pub chains: bool,
}

/// Versions with a difference in the format of their files.
pub const VERSIONS: [Version; 8] = {
    let newest = Version {
        name: "6.16.3",
        attr: 136,
        identifier: true,
        mmap2: true,
        comm_exec: true,
        sample_id_all: true,
        tracing: "0.6",
        call: "__syscall_nr",
        names: true,
        features: true,
        tracing_record: 16,
        chains: false,
    };
    let perf_6_1 = Version { name: "6.1.187", attr: 128, ..newest };
    let perf_5_4 = Version { name: "5.4.286", attr: 120, tracing_record: 12, ..perf_6_1 };
    let perf_4_14 = Version { name: "4.14.336", attr: 112, ..perf_5_4 };
    let perf_4_9 = Version { name: "4.9.337", features: false, ..perf_4_14 };
    let perf_4_4 =
        Version { name: "4.4.302", names: false, call: "nr", tracing: "0.5", ..perf_4_9 };
    let perf_4_0 = Version { name: "4.0.9", attr: 104, ..perf_4_4 };
    let perf_3_10 = Version {
        name: "3.10.108",
        attr: 96,
        identifier: false,
        mmap2: false,
        comm_exec: false,
        ..perf_4_0
    };
    [newest, perf_6_1, perf_5_4, perf_4_14, perf_4_9, perf_4_4, perf_4_0, perf_3_10]
};

pub const START: u64 = 0x7f00_0000_0000;
pub const CODE: u64 = 0x40_0000;

const MMAP: u32 = 1;
const COMM: u32 = 3;
const EXIT: u32 = 4;
const FORK: u32 = 7;
const SAMPLE: u32 = 9;
const MMAP2: u32 = 10;
const HEADER_ATTR: u32 = 64;
const HEADER_TRACING_DATA: u32 = 66;
const FINISHED_ROUND: u32 = 68;
const EVENT_UPDATE: u32 = 78;
const HEADER_FEATURE: u32 = 80;
const COMPRESSED: u32 = 81;
const COMPRESSED2: u32 = 83;

const TRACING_DATA: u32 = 1;
const EVENT_DESC: u32 = 12;

/// IP, TID, TIME, ADDR, CPU, PERIOD and RAW.
const FORMAT: u64 = 1 | 2 | 4 | 8 | 0x80 | 0x100 | RAW;
const RAW: u64 = 0x400;
const ID: u64 = 0x40;
const IDENTIFIER: u64 = 0x1_0000;
const CALLCHAIN: u64 = 0x20;
/// The marker before the frames of the program in a call chain.
const USER: u64 = -512i64 as u64;

/// The recorded events, with the number of each tracepoint. The last two are recorded with call
/// chains alone.
const EVENTS: [(&str, u64); 6] = [
    ("exceptions:page_fault_user", 115),
    ("syscalls:sys_enter_mmap", 608),
    ("syscalls:sys_exit_mmap", 607),
    ("task:task_newtask", 140),
    ("syscalls:sys_enter_madvise", 706),
    ("syscalls:sys_exit_madvise", 705),
];
/// Calls of `madvise` with the time, the page, the advice and the result: a discard, a discard that
/// fails, and a request for huge pages.
const ADVISED: [(u64, u64, u64, i64); 3] =
    [(8_100, 2, 4, 0), (8_200, 3, 4, -22), (8_300, 0, 14, 0)];
/// The events that are entries of calls.
const ENTRIES: [usize; 2] = [1, 4];

/// A recording in parts.
pub struct Made {
    version: Version,
    /// Each event with its attribute and its identifier.
    attrs: Vec<(&'static str, Vec<u8>, u64)>,
    features: Vec<(u32, Vec<u8>)>,
    pub records: Vec<u8>,
}

/// The way of compression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    None,
    /// Records of Linux 5.2 and later.
    First,
    /// Records of Linux 6.16 and later.
    Second,
}

fn words(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn pair(first: u32, second: u32) -> u64 {
    u64::from(first) | u64::from(second) << 32
}

/// Returns a record, with a size that is not rounded up.
pub fn record(kind: u32, misc: u16, body: &[u8]) -> Vec<u8> {
    let size = u16::try_from(8 + body.len()).expect("a short record");
    [&kind.to_le_bytes()[..], &misc.to_le_bytes(), &size.to_le_bytes(), body].concat()
}

/// Returns `text` with zeros up to a multiple of `to` bytes.
fn padded(text: &[u8], to: usize) -> Vec<u8> {
    let mut bytes = text.to_vec();
    bytes.resize((text.len() + 1).next_multiple_of(to), 0);
    bytes
}

impl Version {
    /// Returns the recorded events.
    fn events(self) -> impl Iterator<Item = (&'static str, u64)> {
        EVENTS.into_iter().take(if self.chains { EVENTS.len() } else { 4 })
    }
}

impl Made {
    pub fn new(version: Version) -> Self {
        let attrs = version.events().zip(0..).map(|((name, config), which)| {
            let mut attr = vec![0; version.attr];
            let has_chains = version.chains && ENTRIES.contains(&which);
            let chains = if has_chains { CALLCHAIN } else { 0 };
            let format = FORMAT | chains | if version.identifier { IDENTIFIER } else { ID };
            // Disabled, inherited, with mappings, names, the start at exec, tasks and mapped data.
            let mut flags: u64 = 1 | 1 << 1 | 1 << 8 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 17;
            for (set, bit) in
                [(version.sample_id_all, 18), (version.mmap2, 23), (version.comm_exec, 24)]
            {
                flags |= u64::from(set) << bit;
            }
            let fields = [pair(2, version.attr as u32), config, 1, format, 0, flags, 0, 0];
            attr[..64].copy_from_slice(&words(&fields));
            (name, attr, 501 + which as u64)
        });
        let mut made =
            Self { version, attrs: attrs.collect(), features: Vec::new(), records: Vec::new() };
        made.records = made.run();
        let text = |text: &str| {
            let text = padded(text.as_bytes(), 64);
            [&(text.len() as u32).to_le_bytes()[..], &text].concat()
        };
        made.features = vec![
            (TRACING_DATA, made.tracing_data()),
            (3, text("server")),
            (4, text(version.name)),
            (5, text(version.name)),
            (6, text("x86_64")),
            (7, pair(4, 4).to_le_bytes().to_vec()),
            (EVENT_DESC, made.event_desc()),
        ];
        made
    }

    /// Returns the run as recorded by `perf record -c 1 -d -e page-faults`: without tracepoints.
    pub fn of_faults(version: Version) -> Self {
        let mut made = Self::new(version);
        let (_, mut attr, id) = made.attrs.swap_remove(0);
        // The software event of page faults, whose samples have no data.
        attr[..16].copy_from_slice(&words(&[pair(1, version.attr as u32), 2]));
        let format = u64::from_le_bytes(attr[24..32].try_into().expect("8 bytes")) & !RAW;
        attr[24..32].copy_from_slice(&words(&[format]));
        made.attrs = vec![("page-faults", attr, id)];
        made.records = made.run_of_faults();
        made.features.retain(|(feature, _)| ![TRACING_DATA, EVENT_DESC].contains(feature));
        made.features.push((EVENT_DESC, made.event_desc()));
        made
    }

    /// Returns the run of faults, with a process of which one thread ends before another has a
    /// fault.
    pub fn of_threads(version: Version) -> Self {
        let mut made = Self::of_faults(version);
        let task = |kind, (pid, parent): (u32, u32), tid, time: u64| {
            let fields = words(&[pair(pid, parent), pair(tid, parent), time]);
            record(kind, 0, &[fields, made.trailer(pid, tid, time)].concat())
        };
        let mut records = task(FORK, (500, 100), 500, 20_000);
        records.extend(task(FORK, (500, 500), 501, 21_000));
        records.extend(task(EXIT, (500, 500), 501, 22_000));
        let fields = made.fields(0, (500, 502), 23_000, START);
        records.extend(record(SAMPLE, 2, &words(&fields)));
        made.records.extend(records);
        made
    }

    /// Returns the run of faults, with the starts of `count` processes and a fault of the last.
    pub fn of_processes(version: Version, count: u32) -> Self {
        let mut made = Self::of_faults(version);
        let last = 1_000 + count;
        for pid in 1_000..last {
            let time = 20_000 + u64::from(pid);
            let fields = words(&[pair(pid, 100), pair(pid, 100), time]);
            made.records.extend(record(FORK, 0, &[fields, made.trailer(pid, pid, time)].concat()));
        }
        let fields = made.fields(0, (last - 1, last - 1), 1_000_000, START);
        made.records.extend(record(SAMPLE, 2, &words(&fields)));
        made
    }

    /// Removes the features with these numbers.
    pub fn without(mut self, features: &[u32]) -> Self {
        self.features.retain(|(feature, _)| !features.contains(feature));
        self
    }

    /// Returns the identifier and time that follow the fields of a record, except of a sample.
    fn trailer(&self, pid: u32, tid: u32, time: u64) -> Vec<u8> {
        if !self.version.sample_id_all {
            return Vec::new();
        }
        match self.version.identifier {
            true => words(&[pair(pid, tid), time, 0, 501]),
            false => words(&[pair(pid, tid), time, 501, 0]),
        }
    }

    /// Returns a sample of the event `which`. `raw` are the fields of the tracepoint, from offset 8
    /// on.
    fn sample(&self, which: usize, (pid, tid): (u32, u32), time: u64, raw: &[u64]) -> Vec<u8> {
        let mut fields = self.fields(which, (pid, tid), time, 0);
        if self.version.chains && ENTRIES.contains(&which) {
            fields.extend([3, USER, CODE + 0x10, CODE + 0x1020]);
        }
        let common = pair(EVENTS[which].1 as u32, tid);
        let data = [words(&[common]), words(raw)].concat();
        // The size of the data makes the record a multiple of 8 bytes.
        let size = data.len() as u32 + 4;
        let body = [&words(&fields)[..], &size.to_le_bytes(), &data, &[0; 4]].concat();
        record(SAMPLE, 2, &body)
    }

    /// Returns the fields of a sample without its data.
    fn fields(&self, which: usize, (pid, tid): (u32, u32), time: u64, address: u64) -> Vec<u64> {
        let id = 501 + which as u64;
        let ip = CODE + 0x123;
        let mut fields = Vec::new();
        if self.version.identifier {
            fields.push(id);
        }
        fields.extend([ip, pair(pid, tid), time, address]);
        if !self.version.identifier {
            fields.push(id);
        }
        fields.extend([0, 1]);
        fields
    }

    fn mapping(
        &self,
        pid: u32,
        time: u64,
        (start, len): (u64, u64),
        code: bool,
        name: &str,
    ) -> Vec<u8> {
        let name = padded(name.as_bytes(), 8);
        let place = words(&[pair(pid, pid), start, len, 0]);
        // PROT_READ with PROT_EXEC or PROT_WRITE, and MAP_PRIVATE.
        let more = words(&[0, 77, 0, pair(if code { 5 } else { 3 }, 2)]);
        let (kind, more) = if self.version.mmap2 { (MMAP2, &more[..]) } else { (MMAP, &[][..]) };
        let misc = 2 | if code { 0 } else { 1 << 13 };
        record(kind, misc, &[&place, more, &name, &self.trailer(pid, pid, time)].concat())
    }

    /// Returns the records of the run.
    fn run(&self) -> Vec<u8> {
        let (parent, child) = ((100, 100), (101, 101));
        let exec = if self.version.comm_exec { 1 << 13 } else { 0 };
        let name = [&words(&[pair(100, 100)])[..], &padded(b"app", 8)].concat();
        let fault = |who, time, address, code| self.sample(0, who, time, &[address, CODE, code]);
        let task = |kind, pid: u32, time: u64| {
            let fields = words(&[pair(pid, 100), pair(pid, 100), time]);
            record(kind, 0, &[fields, self.trailer(pid, pid, time)].concat())
        };
        let call = [9, 0, 0x4000, 3, 0x22, u64::MAX, 0];
        // The child, its name from the fifth byte on, the flags of the clone, and an adjustment.
        let new_task = [pair(101, u32::from_le_bytes(*b"app\0")), 0, 0, 0x0120_0011, 0];
        // Calls of `madvise`: the place, the advice, and the result.
        let advise = |(time, page, advice, result): (u64, u64, u64, i64)| {
            let enter = [28, START + page * 0x1000, 0x1000, advice];
            let enter = self.sample(4, parent, time, &enter);
            [enter, self.sample(5, parent, time + 50, &[28, result as u64])].concat()
        };
        let calls = if self.version.chains { &ADVISED[..] } else { &[] };
        let advised: Vec<_> = calls.iter().copied().map(advise).collect();
        [
            record(COMM, 2 | exec, &[name, self.trailer(100, 100, 1_000)].concat()),
            self.mapping(100, 2_000, (CODE, 0x2000), true, "/bin/app"),
            fault(parent, 3_000, CODE, 0x14),
            self.sample(1, parent, 4_000, &call),
            self.mapping(100, 5_000, (START, 0x4000), false, "//anon"),
            self.sample(2, parent, 6_000, &[9, START]),
            fault(parent, 7_000, START, 6),
            fault(parent, 8_000, START + 0x1000, 6),
            advised.concat(),
            task(FORK, 101, 9_000),
            self.sample(3, parent, 9_500, &new_task),
            fault(child, 10_000, START, 7),
            task(EXIT, 101, 11_000),
            task(EXIT, 100, 12_000),
            record(FINISHED_ROUND, 0, &[]),
        ]
        .concat()
    }

    /// Returns the records of the run without those of tracepoints.
    fn run_of_faults(&self) -> Vec<u8> {
        let exec = if self.version.comm_exec { 1 << 13 } else { 0 };
        let name = [&words(&[pair(100, 100)])[..], &padded(b"app", 8)].concat();
        let fault = |pid, time, address| {
            record(SAMPLE, 2, &words(&self.fields(0, (pid, pid), time, address)))
        };
        let task = |kind, pid: u32, time: u64| {
            let fields = words(&[pair(pid, 100), pair(pid, 100), time]);
            record(kind, 0, &[fields, self.trailer(pid, pid, time)].concat())
        };
        [
            record(COMM, 2 | exec, &[name, self.trailer(100, 100, 1_000)].concat()),
            self.mapping(100, 2_000, (CODE, 0x2000), true, "/bin/app"),
            fault(100, 3_000, CODE),
            self.mapping(100, 5_000, (START, 0x4000), false, "//anon"),
            fault(100, 7_000, START),
            record(FINISHED_ROUND, 0, &[]),
            fault(100, 8_000, START + 0x1000),
            task(FORK, 101, 9_000),
            fault(101, 10_000, START),
            task(EXIT, 101, 11_000),
            task(EXIT, 100, 12_000),
            record(FINISHED_ROUND, 0, &[]),
        ]
        .concat()
    }

    /// Returns the layouts of the tracepoints.
    fn tracing_data(&self) -> Vec<u8> {
        let sized = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
        let event = |(name, number): (&str, u64)| {
            let name = name.split(':').nth(1).expect("system and name");
            let call = format!("int {}", self.version.call);
            let long = |name: &'static str, at| (name, 16 + 8 * at, 8);
            let fields = match name {
                "page_fault_user" => vec![
                    ("unsigned long address", 8, 8),
                    ("unsigned long ip", 16, 8),
                    ("unsigned long error_code", 24, 8),
                ],
                "sys_enter_mmap" => {
                    let names = ["addr", "len", "prot", "flags", "fd", "off"];
                    let args = names.into_iter().zip(0..).map(|(name, at)| long(name, at));
                    [(&*call, 8, 4)].into_iter().chain(args).collect()
                }
                "sys_enter_madvise" => {
                    let args = ["start", "len_in", "behavior"].into_iter().zip(0..);
                    let args = args.map(|(name, at)| long(name, at));
                    [(&*call, 8, 4)].into_iter().chain(args).collect()
                }
                "sys_exit_mmap" | "sys_exit_madvise" => vec![(&*call, 8, 4), ("long ret", 16, 8)],
                _ => vec![
                    ("pid_t pid", 8, 4),
                    ("char comm[16]", 12, 16),
                    ("unsigned long clone_flags", 32, 8),
                ],
            };
            let mut text = format!("name: {name}\nID: {number}\nformat:\n");
            let common = ("unsigned short common_type", 0, 2);
            for (field, offset, size) in [common].into_iter().chain(fields) {
                text += &format!("\tfield:{field};\toffset:{offset};\tsize:{size};\tsigned:0;\n");
            }
            sized(&(text + "\nprint fmt: \"\"\n"))
        };
        let mut data = b"\x17\x08\x44tracing".to_vec();
        data.extend(self.version.tracing.as_bytes());
        // The end of the version, little-endian, the sizes of a long and of a page.
        data.extend([0, 0, 8, 0, 0x10, 0, 0]);
        data.extend(b"header_page\0");
        data.extend(sized("\tfield: u64 timestamp;\toffset:0;\tsize:8;\tsigned:0;\n"));
        data.extend(b"header_event\0");
        data.extend(sized("# compressed entry header\n"));
        // No events of ftrace itself.
        data.extend(0u32.to_le_bytes());
        let systems = ["exceptions", "syscalls", "task"];
        data.extend((systems.len() as u32).to_le_bytes());
        for system in systems {
            let events: Vec<_> = self
                .version
                .events()
                .filter(|(name, _)| name.split(':').next() == Some(system))
                .map(event)
                .collect();
            data.extend(padded(system.as_bytes(), 1));
            data.extend((events.len() as u32).to_le_bytes());
            data.extend(events.concat());
        }
        // Symbols, formats of printk, and since 0.6 names of tasks: all empty.
        let empty = if self.version.tracing == "0.6" { 4 + 4 + 8 } else { 4 + 4 };
        data.extend(vec![0; empty]);
        data
    }

    fn event_desc(&self) -> Vec<u8> {
        let count = pair(self.attrs.len() as u32, self.version.attr as u32);
        let mut section = count.to_le_bytes().to_vec();
        for (name, attr, id) in &self.attrs {
            let name = padded(name.as_bytes(), 64);
            section.extend(attr);
            section.extend(pair(1, name.len() as u32).to_le_bytes());
            section.extend(name);
            section.extend(id.to_le_bytes());
        }
        section
    }

    /// Returns the records, in a frame of zstd in parts of `part` bytes. The frame has a window of
    /// 128 KiB, an uncompressed block for each record, and neither an end nor a checksum, as those
    /// of perf.
    fn packed(&self, packing: Packing, part: usize) -> Vec<u8> {
        let mut stream = vec![0x28, 0xb5, 0x2f, 0xfd, 0, 0x38];
        let mut rest = &self.records[..];
        while !rest.is_empty() {
            let size = u16::from_le_bytes([rest[6], rest[7]]);
            let (record, more) = rest.split_at(usize::from(size));
            stream.extend(&(u32::from(size) << 3).to_le_bytes()[..3]);
            stream.extend(record);
            rest = more;
        }
        let second = |bytes: &[u8]| {
            let mut body = words(&[bytes.len() as u64]);
            body.extend(bytes);
            body.resize(body.len().next_multiple_of(8), 0);
            record(COMPRESSED2, 0, &body)
        };
        let parts = stream.chunks(part);
        match packing {
            Packing::None => self.records.clone(),
            Packing::First => parts.flat_map(|bytes| record(COMPRESSED, 0, bytes)).collect(),
            Packing::Second => parts.flat_map(second).collect(),
        }
    }

    /// Returns the file: the header, identifiers, attributes, records, and features.
    pub fn file(&self, packing: Packing) -> Vec<u8> {
        let header = 104;
        let ids: Vec<_> = self.attrs.iter().map(|(_, _, id)| *id).collect();
        let attrs_at = header + 8 * ids.len() as u64;
        let mut attrs = Vec::new();
        for (at, (_, attr, _)) in (header..).step_by(8).zip(&self.attrs) {
            attrs.extend(attr);
            attrs.extend(words(&[at, 8]));
        }
        let data = self.packed(packing, 100);
        let data_at = attrs_at + attrs.len() as u64;
        let mut at = data_at + data.len() as u64 + 16 * self.features.len() as u64;
        let (mut table, mut bits) = (Vec::new(), 0_u64);
        for (feature, contents) in &self.features {
            bits |= 1 << feature;
            table.extend([at, contents.len() as u64]);
            at += contents.len() as u64;
        }
        let header = [
            header,
            self.version.attr as u64 + 16,
            attrs_at,
            attrs.len() as u64,
            data_at,
            data.len() as u64,
            0,
            0,
            bits,
            0,
            0,
            0,
        ];
        let contents = self.features.iter().flat_map(|(_, contents)| contents.clone()).collect();
        [b"PERFILE2".to_vec(), words(&header), words(&ids), attrs, data, words(&table), contents]
            .concat()
    }

    /// Returns the file of a perf that was killed: the size of the records is 0, and no feature
    /// follows the records.
    pub fn unended(&self, packing: Packing) -> Vec<u8> {
        let mut file = self.file(packing);
        let word = |at| u64::from_le_bytes(*file[at..].first_chunk().expect("a header")) as usize;
        let end = word(40) + word(48);
        file.truncate(end);
        file[48..56].fill(0);
        file
    }

    /// Returns the stream that `perf record -o -` writes.
    pub fn stream(&self, packing: Packing) -> Vec<u8> {
        let mut out = [b"PERFILE2".to_vec(), words(&[16])].concat();
        for (_, attr, id) in &self.attrs {
            out.extend(record(HEADER_ATTR, 0, &[&attr[..], &words(&[*id])].concat()));
        }
        let of = |wanted| self.features.iter().find(|(feature, _)| *feature == wanted);
        if self.version.features {
            for (feature, contents) in self.features.iter().filter(|it| it.0 != TRACING_DATA) {
                let body = [words(&[u64::from(*feature)]), contents.clone()].concat();
                out.extend(record(HEADER_FEATURE, 0, &body));
            }
            // The end of the features.
            out.extend(record(HEADER_FEATURE, 0, &words(&[32])));
        }
        if let Some((_, data)) = of(TRACING_DATA) {
            let len = data.len().next_multiple_of(8);
            let mut body = (len as u32).to_le_bytes().to_vec();
            body.resize(usize::from(self.version.tracing_record) - 8, 0);
            out.extend(record(HEADER_TRACING_DATA, 0, &body));
            out.extend(data);
            out.resize(out.len() + len - data.len(), 0);
        }
        if self.version.names {
            for (name, _, id) in &self.attrs {
                let body = [words(&[2, *id]), padded(name.as_bytes(), 8)].concat();
                out.extend(record(EVENT_UPDATE, 0, &body));
            }
        }
        out.extend(self.packed(packing, 100));
        out
    }
}
