//! Profiles: what the hardware beneath the simulated CPUs costs, each number with its source.
//!
//! A profile is a TOML file; the bundled ones are in `profiles/`. Times are in nanoseconds there, and picoseconds inside: all
//! arithmetic of the simulation is on integers, so that a run gives the same figures everywhere.

use core::fmt;
use serde::Deserialize;

/// Simulated time, in picoseconds.
pub type Time = u64;

/// A number of a profile.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Number {
    /// The number, in the unit that its key says.
    pub value: f64,
    /// Where it was published, or how it was derived or measured.
    pub source: String,
}

impl Number {
    /// Nanoseconds as simulated time.
    fn time(&self) -> Time {
        (self.value * 1000.0).round() as Time
    }
}

macro_rules! sections {
    (
        $($(#[$doc:meta])* $section:ident $name:ident { $($(#[$field_doc:meta])* $field:ident,)* })*
        ; $(#[$more_doc:meta])* $more_section:ident $more:ident {
            $($(#[$more_field_doc:meta])* $more_field:ident,)*
        }
    ) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Debug, Deserialize)]
            #[serde(deny_unknown_fields)]
            pub struct $section { $($(#[$field_doc])* pub $field: Number,)* }
        )*

        $(#[$more_doc])*
        #[derive(Clone, Debug, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $more_section { $($(#[$more_field_doc])* pub $more_field: Number,)* }

        /// A machine's costs.
        #[derive(Clone, Debug, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct Profile {
            /// Its name.
            pub name: String,
            /// What it is, in one line.
            pub summary: String,
            $($(#[$doc])* pub $name: $section,)*
            $(#[$more_doc])*
            pub $more: Option<$more_section>,
        }

        impl Profile {
            /// Every number, with its name: `section.key`.
            pub fn numbers(&self) -> Vec<(String, &Number)> {
                let mut all = vec![$($((key!($name.$field).to_owned(), &self.$name.$field),)*)*];
                if let Some($more) = &self.$more {
                    all.extend([$((key!($more.$more_field).to_owned(), &$more.$more_field),)*]);
                }
                all
            }

            /// The number of this name, to be changed; `None` where there is no such number.
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
    /// How CPUs are grouped. They are numbered socket by socket, and complex by complex within a socket.
    Topology topology {
        /// Sockets.
        sockets,
        /// Groups of CPUs in a socket that share a last-level cache.
        complexes_per_socket,
        /// CPUs in such a group.
        cpus_per_complex,
    }
    /// One CPU.
    Core cpu {
        /// Sustained frequency with all CPUs busy, in GHz.
        ghz,
        /// Instructions a cycle in the kernel's paths, without waiting for lines of other CPUs.
        instructions_per_cycle,
        /// One look of a wait loop.
        pause_ns,
    }
    /// How long it takes until a cache line is where it is accessed.
    LineCosts line {
        /// In the CPU's first-level cache.
        own_ns,
        /// In its further caches.
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
        /// The share of a transfer in which the line can serve nobody else, 0 to 1.
        occupancy,
        /// For each further CPU whose copy is invalidated.
        invalidate_ns,
        /// Lines that a CPU's own caches keep.
        cached_lines,
    }
    /// Into the kernel and back.
    Exceptions exception {
        /// A page fault in which nothing is done.
        fault_ns,
        /// A system call in which nothing is done.
        call_ns,
    }
    /// Interrupts between CPUs.
    Interrupts interrupt {
        /// What it takes the sender.
        send_ns,
        /// From the sending to the begin of the handler.
        deliver_ns,
        /// Into the handler and back.
        handle_ns,
    }
    /// Address translation.
    Translation tlb {
        /// A page walk, without the lines of the tables.
        walk_ns,
        /// Dropping one page.
        flush_page_ns,
        /// Dropping everything.
        flush_all_ns,
    }
    /// Memory.
    MemoryCosts memory {
        /// 4 KiB of zeros by one CPU.
        zero_page_ns,
        /// Copying 4 KiB by one CPU.
        copy_page_ns,
        /// What the memory of a socket moves in a second, in 10^9 bytes.
        gigabytes_per_second,
    }
    /// Giving a CPU away.
    Threads thread {
        /// Going to sleep.
        park_ns,
        /// What it takes who wakes.
        wake_ns,
        /// From the waking until the sleeper runs.
        woken_ns,
    }
    ;
    /// What only a measurement on the machine tells. Where a profile has no such section, an access costs what a first-level
    /// hit costs, every path has the same instructions a cycle, the heap costs nothing, and what is not in a CPU's own caches, or is zeroed or copied, is in
    /// memory.
    Measured measured {
        /// A program's access that its TLB serves.
        access_ns,
        /// Allocating a value of the subsystem on the heap, and freeing it: not among the instructions of a path.
        allocate_ns,
        /// Instructions a cycle of page faults, with the walk of the access that is tried again.
        fault_ipc,
        /// Of mmap, munmap, mremap and advice.
        map_ipc,
        /// Of the program break.
        brk_ipc,
        /// Of mprotect.
        protect_ipc,
        /// Of fork and exit.
        fork_ipc,
        /// 4 KiB of zeros into a page that the CPU's own caches have.
        zero_own_ns,
        /// The same of a page that the last-level cache has.
        zero_shared_ns,
        /// Copying 4 KiB between pages that the CPU's own caches have.
        copy_own_ns,
        /// The same between pages that the last-level cache has.
        copy_shared_ns,
        /// A line that the last-level cache has, and no other CPU.
        shared_ns,
        /// Lines that the last-level cache keeps.
        shared_lines,
    }
}

/// Why a profile cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProfileError {
    /// It is not of the form of a profile.
    #[error("{name}: {what}")]
    Form {
        /// The profile's file or name.
        name: String,
        /// What the parser says.
        what: String,
    },
    /// A number is out of range.
    #[error("{name}: {key} = {value}: {must}")]
    Value {
        /// The profile's name.
        name: String,
        /// Which number.
        key: String,
        /// Its value, as it is printed.
        value: String,
        /// What it must be.
        must: &'static str,
    },
    /// There is no bundled profile of this name.
    #[error("{0}: no such file, and no profile of that name; there are {names}", names = BUNDLED.map(|(name, _)| name).join(", "))]
    Unknown(String),
}

/// The bundled profiles: names and texts.
pub const BUNDLED: [(&str, &str); 3] = [
    ("two-socket", include_str!("../profiles/two-socket.toml")),
    ("384-core", include_str!("../profiles/384-core.toml")),
    ("eight-socket", include_str!("../profiles/eight-socket.toml")),
];

impl Profile {
    /// The bundled profile of this name.
    ///
    /// # Errors
    /// [`ProfileError::Unknown`].
    pub fn bundled(name: &str) -> Result<Self, ProfileError> {
        let found = BUNDLED.iter().find(|(known, _)| *known == name);
        let (name, text) = found.ok_or_else(|| ProfileError::Unknown(name.to_owned()))?;
        Self::parse(name, text)
    }

    /// The profile that `text` is; `name` is what errors call it.
    ///
    /// # Errors
    /// [`ProfileError::Form`], and [`ProfileError::Value`].
    pub fn parse(name: &str, text: &str) -> Result<Self, ProfileError> {
        let profile: Self = toml::from_str(text)
            .map_err(|error| ProfileError::Form { name: name.into(), what: error.to_string() })?;
        profile.check(name)?;
        Ok(profile)
    }

    fn check(&self, name: &str) -> Result<(), ProfileError> {
        for (key, number) in self.numbers() {
            let value = number.value;
            let whole = key.starts_with("topology.") || key.ends_with("_lines");
            let wrong = |must| ProfileError::Value {
                name: name.into(),
                key: key.clone(),
                value: value.to_string(),
                must,
            };
            if !value.is_finite() || !(0.0..=1e9).contains(&value) {
                return Err(wrong("must be between 0 and 1000000000"));
            }
            if whole && (value.fract() != 0.0 || value < 1.0) {
                return Err(wrong("must be a whole number from 1 on"));
            }
            let rate = ["cpu.ghz", "cpu.instructions_per_cycle", "memory.gigabytes_per_second"];
            if (rate.contains(&key.as_str()) || key.ends_with("_ipc")) && value < 0.01 {
                return Err(wrong("must be at least 0.01"));
            }
            if key == "line.occupancy" && value > 1.0 {
                return Err(wrong("must be between 0 and 1"));
            }
            if number.source.trim().is_empty() {
                return Err(wrong("needs a source"));
            }
        }
        if self.topology.sockets.value > 64.0 {
            let value = self.topology.sockets.value.to_string();
            let key = "topology.sockets".into();
            return Err(ProfileError::Value {
                name: name.into(),
                key,
                value,
                must: "must be at most 64",
            });
        }
        Ok(())
    }

    /// CPUs of the machine. A simulation may have more: then there are more sockets of the same kind.
    pub fn cpus(&self) -> usize {
        let topology = &self.topology;
        (topology.sockets.value
            * topology.complexes_per_socket.value
            * topology.cpus_per_complex.value) as usize
    }

    /// The profile as a file, which [`parse`](Self::parse) reads; `remarks` are comments at its top, a line each.
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

/// What pages cost that are in caches, in the CPU's own and in the last level; and lines of the last level.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cached {
    pub(crate) zero: [Time; 2],
    pub(crate) copy: [Time; 2],
    /// A line of the last level.
    pub(crate) line: Time,
    /// Lines that the last level keeps.
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

/// A profile's numbers as the simulation uses them.
#[derive(Clone, Debug)]
pub(crate) struct Costs {
    pub(crate) per_complex: usize,
    pub(crate) per_socket: usize,
    pub(crate) pause: Time,
    pub(crate) own: Time,
    /// Of a program, which its TLB serves.
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
    /// After a fault. Where instructions were measured with the path, they contain it.
    pub(crate) walk_again: Time,
    pub(crate) flush_page: Time,
    pub(crate) flush_all: Time,
    pub(crate) zero_page: Time,
    pub(crate) copy_page: Time,
    pub(crate) cached: Option<Cached>,
    /// Of a page, through the memory of a socket.
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
