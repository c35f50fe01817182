//! Profiles: the hardware costs of the simulated CPUs, each number with its source.
//!
//! A profile is a TOML file; the bundled profiles are in `profiles/`. Times are in nanoseconds in
//! files, and in picoseconds internally. The simulation uses integer arithmetic only, so a run
//! gives the same figures on every host.

mod problems;
mod template;

use core::fmt;
use serde::Deserialize;

pub use problems::{Problem, unit};

/// Simulated time, in picoseconds.
pub type Time = u64;

/// A number of a profile.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Number {
    /// The number, in the unit of its key.
    pub value: f64,
    /// The publication, derivation or measurement of the number.
    pub source: String,
}

impl Number {
    /// Converts nanoseconds to simulated time.
    fn time(&self) -> Time {
        (self.value * 1000.0).round() as Time
    }
}

/// A section of the profile format.
#[derive(Clone, Debug)]
pub struct Section {
    /// The name of the TOML table.
    pub name: &'static str,
    /// The meaning of the section.
    pub meaning: &'static str,
    /// Whether a profile may omit the section.
    pub optional: bool,
    /// The keys, all of which the section must have: names and meanings.
    pub keys: Vec<(&'static str, &'static str)>,
}

macro_rules! sections {
    (
        $($(#[doc = $doc:literal])* $section:ident $name:ident {
            $($(#[doc = $field_doc:literal])* $field:ident,)*
        })*
        ; $(#[doc = $more_doc:literal])* $more_section:ident $more:ident {
            $($(#[doc = $more_field_doc:literal])* $more_field:ident,)*
        }
    ) => {
        $(
            $(#[doc = $doc])*
            #[derive(Clone, Debug, Deserialize)]
            #[serde(deny_unknown_fields)]
            pub struct $section { $($(#[doc = $field_doc])* pub $field: Number,)* }
        )*

        $(#[doc = $more_doc])*
        #[derive(Clone, Debug, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $more_section { $($(#[doc = $more_field_doc])* pub $more_field: Number,)* }

        /// A machine's costs.
        #[derive(Clone, Debug, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct Profile {
            /// The name.
            pub name: String,
            /// A description of the machine, in one line.
            pub summary: String,
            $($(#[doc = $doc])* pub $name: $section,)*
            $(#[doc = $more_doc])*
            pub $more: Option<$more_section>,
        }

        impl Profile {
            /// Returns the sections of the format, in the order in which profiles are written.
            pub fn format() -> Vec<Section> {
                vec![
                    $(Section {
                        name: stringify!($name),
                        meaning: concat!($($doc,)*).trim_start(),
                        optional: false,
                        keys: vec![$((stringify!($field), concat!($($field_doc,)*).trim_start()),)*],
                    },)*
                    Section {
                        name: stringify!($more),
                        meaning: concat!($($more_doc,)*).trim_start(),
                        optional: true,
                        keys: vec![$(
                            (stringify!($more_field), concat!($($more_field_doc,)*).trim_start()),
                        )*],
                    },
                ]
            }

            /// Returns every number, with its name: `section.key`.
            pub fn numbers(&self) -> Vec<(String, &Number)> {
                let mut all = vec![$($((key!($name.$field).to_owned(), &self.$name.$field),)*)*];
                if let Some($more) = &self.$more {
                    all.extend([$((key!($more.$more_field).to_owned(), &$more.$more_field),)*]);
                }
                all
            }

            /// Returns the number of this name for a change, or `None` if no number has this name.
            pub fn number_mut(&mut self, name: &str) -> Option<&mut Number> {
                $($(if name == key!($name.$field) {
                    return Some(&mut self.$name.$field);
                })*)*
                let $more = self.$more.as_mut()?;
                $(if name == key!($more.$more_field) {
                    return Some(&mut $more.$more_field);
                })*
                None
            }
        }
    };
}

macro_rules! key {
    ($section:ident.$field:ident) => {
        concat!(stringify!($section), ".", stringify!($field))
    };
}

sections! {
    /// The grouping of CPUs, which are numbered socket by socket, and complex by complex in a
    /// socket.
    Topology topology {
        /// Number of sockets.
        sockets,
        /// Complexes in a socket: groups of CPUs that share a last-level cache.
        complexes_per_socket,
        /// CPUs in a complex.
        cpus_per_complex,
    }
    /// One CPU.
    Core cpu {
        /// Sustained frequency with all CPUs busy, in GHz.
        ghz,
        /// Instructions a cycle in paths of the kernel, without waits for lines of other CPUs.
        instructions_per_cycle,
        /// One iteration of a wait loop.
        pause_ns,
    }
    /// The time of one access to a cache line, by the present place of the line.
    LineCosts line {
        /// In the CPU's first-level cache.
        own_ns,
        /// In its other caches.
        far_ns,
        /// From another CPU of the complex.
        complex_ns,
        /// From another complex of the socket.
        socket_ns,
        /// From another socket.
        remote_ns,
        /// From the memory of the socket.
        memory_ns,
        /// From the memory of another socket.
        remote_memory_ns,
        /// The share of a transfer in which the line cannot serve other CPUs, 0 to 1.
        occupancy,
        /// For each further CPU whose copy a store invalidates.
        invalidate_ns,
        /// Number of lines that a CPU's own caches hold.
        cached_lines,
    }
    /// Entries into the kernel, with the return.
    Exceptions exception {
        /// A page fault with an empty handler.
        fault_ns,
        /// An empty system call.
        call_ns,
    }
    /// Interrupts between CPUs.
    Interrupts interrupt {
        /// Time of the sender.
        send_ns,
        /// From the send to the begin of the handler.
        deliver_ns,
        /// An empty handler, with its entry and return.
        handle_ns,
    }
    /// Address translation.
    Translation tlb {
        /// A page walk, without the cache lines of the tables.
        walk_ns,
        /// Invalidation of one page.
        flush_page_ns,
        /// Invalidation of all pages.
        flush_all_ns,
    }
    /// The time of whole pages.
    MemoryCosts memory {
        /// Zeroing 4 KiB by one CPU, in memory.
        zero_page_ns,
        /// Copying 4 KiB by one CPU, in memory.
        copy_page_ns,
        /// Bandwidth of the memory of one socket, in 10^9 bytes a second.
        gigabytes_per_second,
    }
    /// Threads that sleep while they wait.
    Threads thread {
        /// Putting a thread to sleep.
        park_ns,
        /// Waking a thread, on the CPU of the waker.
        wake_ns,
        /// From the wake-up until the woken thread runs.
        woken_ns,
    }
    ;
    /// Costs that only `faultless calibrate` measures. Without this section a program's access
    /// costs as much as a first-level hit, all paths use `instructions_per_cycle`, the heap is
    /// free, and a page or line outside of a CPU's own caches is in memory.
    Measured measured {
        /// A memory access of a program that hits in the TLB.
        access_ns,
        /// One allocation of the subsystem on the heap, and its release; paths exclude both.
        allocate_ns,
        /// Instructions a cycle of page faults, with the walk of the repeated access.
        fault_ipc,
        /// Instructions a cycle of mmap, munmap, mremap and madvise.
        map_ipc,
        /// Instructions a cycle of brk.
        brk_ipc,
        /// Instructions a cycle of mprotect.
        protect_ipc,
        /// Instructions a cycle of fork and exit.
        fork_ipc,
        /// Zeroing 4 KiB that the CPU's own caches hold.
        zero_own_ns,
        /// Zeroing 4 KiB that the last-level cache holds.
        zero_shared_ns,
        /// Copying 4 KiB between pages that the CPU's own caches hold.
        copy_own_ns,
        /// Copying 4 KiB between pages that the last-level cache holds.
        copy_shared_ns,
        /// Access to a line that the last-level cache holds, and no other CPU.
        shared_ns,
        /// Number of lines that the last-level cache holds.
        shared_lines,
    }
}

/// The reason for which a profile cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProfileError {
    /// The text does not have the form of a profile.
    #[error("{name}: {what}")]
    Form {
        /// The profile's file or name.
        name: String,
        /// The message of the parser.
        what: String,
    },
    /// Fields are missing, unknown or out of range.
    #[error("{}", lines(name, problems))]
    Fields {
        /// The profile's file or name.
        name: String,
        /// The problems, at least one.
        problems: Vec<Problem>,
    },
    /// No bundled profile has this name.
    #[error("{0}: no bundled profile of that name; there are {names}", names = BUNDLED.map(|(name, _)| name).join(", "))]
    Unknown(String),
}

/// Returns a line for each of `problems`, with the profile's file or name.
fn lines(name: &str, problems: &[Problem]) -> String {
    let lines: Vec<_> = problems.iter().map(|problem| format!("{name}: {problem}")).collect();
    lines.join("\n")
}

/// The bundled profiles: names and texts.
pub const BUNDLED: [(&str, &str); 6] = [
    ("two-socket", include_str!("../profiles/two-socket.toml")),
    ("384-core", include_str!("../profiles/384-core.toml")),
    ("eight-socket", include_str!("../profiles/eight-socket.toml")),
    ("epyc-9965", include_str!("../profiles/epyc-9965.toml")),
    ("xeon-6980p", include_str!("../profiles/xeon-6980p.toml")),
    ("graviton4", include_str!("../profiles/graviton4.toml")),
];

impl Profile {
    /// Returns the bundled profile of this name.
    ///
    /// # Errors
    /// [`ProfileError::Unknown`].
    pub fn bundled(name: &str) -> Result<Self, ProfileError> {
        let found = BUNDLED.iter().find(|(known, _)| *known == name);
        let (name, text) = found.ok_or_else(|| ProfileError::Unknown(name.to_owned()))?;
        Self::parse(name, text)
    }

    /// Parses the profile in `text`; `name` is the name in errors.
    ///
    /// # Errors
    /// [`ProfileError::Form`], and [`ProfileError::Fields`] with all problems.
    pub fn parse(name: &str, text: &str) -> Result<Self, ProfileError> {
        let form = |what| ProfileError::Form { name: name.into(), what };
        let problems = problems::problems(text).map_err(form)?;
        if !problems.is_empty() {
            return Err(ProfileError::Fields { name: name.into(), problems });
        }
        toml::from_str(text).map_err(|error| form(error.to_string()))
    }

    /// Returns the CPUs of the machine. A simulation may have more, on additional sockets of the
    /// same kind.
    pub fn cpus(&self) -> usize {
        let topology = &self.topology;
        (topology.sockets.value
            * topology.complexes_per_socket.value
            * topology.cpus_per_complex.value) as usize
    }

    /// Returns the profile as a file readable by [`parse`](Self::parse). `remarks` are comment
    /// lines at its top.
    pub fn to_toml(&self, remarks: &[&str]) -> String {
        let quoted = |text: &str| toml::Value::from(text).to_string();
        let mut text: String = remarks.iter().map(|remark| format!("# {remark}\n")).collect();
        text += &format!("\nname = {}\nsummary = {}\n", quoted(&self.name), quoted(&self.summary));
        let mut last = "";
        let numbers = self.numbers();
        for (name, Number { value, source }) in &numbers {
            let Some((section, key)) = name.split_once('.') else { continue };
            if section != last {
                text += &format!("\n[{section}]\n");
                last = section;
            }
            text += &format!("{key} = {{ value = {value}, source = {} }}\n", quoted(source));
        }
        text
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.summary)
    }
}

/// The costs of pages in caches, in the CPU's own and in the last-level cache, and of lines in the
/// last-level cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cached {
    pub(crate) zero: [Time; 2],
    pub(crate) copy: [Time; 2],
    /// A line of the last level.
    pub(crate) line: Time,
    /// Lines held by the last-level cache.
    pub(crate) lines: u64,
}

impl Cached {
    fn new(measured: &Measured) -> Self {
        Self {
            zero: [measured.zero_own_ns.time(), measured.zero_shared_ns.time()],
            copy: [measured.copy_own_ns.time(), measured.copy_shared_ns.time()],
            line: measured.shared_ns.time(),
            lines: measured.shared_lines.value as u64,
        }
    }
}

/// A profile's numbers in the form used by the simulation.
#[derive(Clone, Debug)]
pub(crate) struct Costs {
    pub(crate) per_complex: usize,
    pub(crate) per_socket: usize,
    pub(crate) pause: Time,
    pub(crate) own: Time,
    /// A program's access with a TLB hit.
    pub(crate) access: Time,
    pub(crate) far: Time,
    pub(crate) allocate: Time,
    pub(crate) complex: Time,
    pub(crate) socket: Time,
    pub(crate) remote: Time,
    pub(crate) memory: Time,
    pub(crate) remote_memory: Time,
    /// In 1/1024.
    pub(crate) occupancy: Time,
    pub(crate) invalidate: Time,
    pub(crate) cached_lines: u64,
    pub(crate) fault: Time,
    pub(crate) call: Time,
    pub(crate) send: Time,
    pub(crate) deliver: Time,
    pub(crate) handle: Time,
    pub(crate) walk: Time,
    /// The walk after a fault. Zero if the measured instructions of the path include the walk.
    pub(crate) walk_again: Time,
    pub(crate) flush_page: Time,
    pub(crate) flush_all: Time,
    pub(crate) zero_page: Time,
    pub(crate) copy_page: Time,
    pub(crate) cached: Option<Cached>,
    /// A page through the memory of a socket.
    pub(crate) page_through_memory: Time,
    pub(crate) park: Time,
    pub(crate) wake: Time,
    pub(crate) woken: Time,
}

impl Costs {
    pub(crate) fn new(profile: &Profile) -> Self {
        let per_complex = profile.topology.cpus_per_complex.value as usize;
        let line = &profile.line;
        // 4,096 bytes at 10^9 bytes a second take 4,096 ns.
        let page = 4096.0 / profile.memory.gigabytes_per_second.value;
        Self {
            per_complex,
            per_socket: per_complex * profile.topology.complexes_per_socket.value as usize,
            pause: profile.cpu.pause_ns.time().max(1),
            own: line.own_ns.time(),
            access: profile.measured.as_ref().map_or(&line.own_ns, |it| &it.access_ns).time(),
            far: line.far_ns.time(),
            allocate: profile.measured.as_ref().map_or(0, |it| it.allocate_ns.time()),
            complex: line.complex_ns.time(),
            socket: line.socket_ns.time(),
            remote: line.remote_ns.time(),
            memory: line.memory_ns.time(),
            remote_memory: line.remote_memory_ns.time(),
            occupancy: (line.occupancy.value * 1024.0).round() as Time,
            invalidate: line.invalidate_ns.time(),
            cached_lines: line.cached_lines.value as u64,
            fault: profile.exception.fault_ns.time(),
            call: profile.exception.call_ns.time(),
            send: profile.interrupt.send_ns.time(),
            deliver: profile.interrupt.deliver_ns.time(),
            handle: profile.interrupt.handle_ns.time(),
            walk: profile.tlb.walk_ns.time(),
            walk_again: profile.measured.as_ref().map_or(profile.tlb.walk_ns.time(), |_| 0),
            flush_page: profile.tlb.flush_page_ns.time(),
            flush_all: profile.tlb.flush_all_ns.time(),
            zero_page: profile.memory.zero_page_ns.time(),
            copy_page: profile.memory.copy_page_ns.time(),
            cached: profile.measured.as_ref().map(Cached::new),
            page_through_memory: (page * 1000.0).round() as Time,
            park: profile.thread.park_ns.time(),
            wake: profile.thread.wake_ns.time(),
            woken: profile.thread.woken_ns.time(),
        }
    }
}
