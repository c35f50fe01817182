//! Cache lines: their holders, the cost of transfers, and contended lines.
//!
//! # Protocol
//!
//! A line has three states, as in the MESI protocol with exclusive and modified combined: without a
//! holder (in memory), held by one CPU, or shared by several CPUs for reading. A load of a line
//! held by the CPU costs a hit. Any other load transfers a copy from the nearest holder, or from
//! memory, and makes the line shared. A write invalidates all other copies and makes the writer the
//! only holder. A line serves one transfer after another: a CPU that requests a busy line waits. A
//! plain store waits in the CPU's store buffer, so the CPU continues; its next read-modify-write
//! waits until the buffer is empty.
//!
//! A CPU's caches hold the most recently used lines. If the number of transfers since the last use
//! of a line reaches the number of lines in the caches, the next use fetches the line from memory,
//! or from the last-level cache if the profile describes this cache. The home of a line matters: a
//! transfer between two CPUs of one socket costs as much as a transfer between sockets if the
//! line's memory is in another socket. The home is the socket of the CPU that allocated or first
//! used the line.
//!
//! # Names of lines
//!
//! Results must not depend on addresses of the host's allocator, so lines have their own numbers.
//! Each value allocated by the subsystem ([`Lines::made`]) starts on a new line, as in a kernel's
//! slab caches. A small value belongs to the CPU that allocated it. A large value is created with
//! the machine and has no owner. Values that were never announced keep the host's lines.

use crate::profile::{Costs, Time};
use core::panic::Location;
use faultless_observed::observe::Intent;
use rustc_hash::FxHashMap;

/// Bytes of a line.
pub(crate) const LINE: usize = 64;
/// The alignment of the host's allocator in bytes.
pub(crate) const GRANULE: usize = 16;
/// The home of a line allocated before the first run of a CPU, until the first use.
const NOWHERE: u16 = u16::MAX;
/// Lines of a first-level cache of 32 KiB.
const NEAR_LINES: u64 = 512;

/// CPUs with a copy.
#[derive(Clone, Debug, Default)]
enum Holders {
    #[default]
    None,
    One(u16),
    /// A set, and its size of at least two.
    Many(Box<[u64; 16]>, u16),
}

impl Holders {
    fn has(&self, cpu: u16) -> bool {
        match self {
            Self::None => false,
            Self::One(one) => *one == cpu,
            Self::Many(set, _) => set[usize::from(cpu / 64)] >> (cpu % 64) & 1 != 0,
        }
    }

    fn add(&mut self, cpu: u16) {
        match self {
            Self::None => *self = Self::One(cpu),
            Self::One(one) if *one == cpu => {}
            Self::One(one) => {
                let mut set = Box::new([0; 16]);
                for cpu in [*one, cpu] {
                    set[usize::from(cpu / 64)] |= 1 << (cpu % 64);
                }
                *self = Self::Many(set, 2);
            }
            Self::Many(set, count) => {
                let word = &mut set[usize::from(cpu / 64)];
                *count += u16::from(*word >> (cpu % 64) & 1 == 0);
                *word |= 1 << (cpu % 64);
            }
        }
    }

    fn each(&self, mut tell: impl FnMut(u16)) {
        match self {
            Self::None => {}
            Self::One(one) => tell(*one),
            Self::Many(set, _) => {
                for (at, mut word) in set.iter().copied().enumerate() {
                    while word != 0 {
                        tell((at * 64) as u16 + word.trailing_zeros() as u16);
                        word &= word - 1;
                    }
                }
            }
        }
    }
}

#[derive(Clone, Debug)]
struct Line {
    holders: Holders,
    /// The end of the current transfer.
    free_at: Time,
    /// The number of lines fetched by the only holder at the last use of this line.
    used: u64,
    /// The socket of its memory.
    home: u16,
    /// The type that contains the line: an index of [`Lines::kinds`].
    kind: u16,
}

/// The line of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LineId(u32);

impl LineId {
    /// Returns the number of the line.
    pub(crate) const fn number(self) -> u32 {
        self.0
    }
}

/// The times of an access to a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Transfer {
    /// The start of the transfer, delayed if the line is busy.
    pub(crate) begin: Time,
    /// The duration of the transfer.
    pub(crate) takes: Time,
    /// Whether the transfer was from another CPU, or invalidated copies in other CPUs.
    pub(crate) from_cpu: bool,
}

/// The transfers of lines at a place in the source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heat {
    /// Transfers of a line from another CPU.
    pub transfers: u64,
    /// The time for which CPUs waited for the lines.
    pub waited: Time,
}

/// All lines used so far.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    ids: FxHashMap<usize, u32>,
    /// All other lines, by their first byte.
    whole: FxHashMap<usize, u32>,
    /// The first line of each value allocated so far, by address and number of lines.
    values: FxHashMap<(usize, u32), u32>,
    lines: Vec<Line>,
    kinds: Vec<&'static str>,
    heat: FxHashMap<(u16, &'static Location<'static>), Heat>,
    /// Start, end and kind.
    arrays: Vec<(usize, usize, u16)>,
}

impl Lines {
    pub(crate) fn new() -> Self {
        Self { kinds: vec!["other"], ..Self::default() }
    }

    fn kind(&mut self, name: &'static str) -> u16 {
        let known = self.kinds.iter().position(|kind| *kind == name);
        known.unwrap_or_else(|| {
            self.kinds.push(name);
            self.kinds.len() - 1
        }) as u16
    }

    /// Registers an allocation of `bytes` bytes at `address` for a `what`, by `cpu` if a CPU runs.
    pub(crate) fn made(
        &mut self,
        costs: &Costs,
        address: usize,
        bytes: usize,
        what: &'static str,
        cpu: Option<(u16, u64)>,
    ) {
        let kind = self.kind(what);
        if bytes > 4096 {
            return self.name_array(address, bytes, kind);
        }
        let count = bytes.div_ceil(LINE) as u32;
        let next = self.lines.len() as u32;
        let first = *self.values.entry((address, count)).or_insert(next);
        let (holders, home, used) = match cpu {
            Some((cpu, fetches)) => (Holders::One(cpu), socket(costs, cpu), fetches),
            None => (Holders::None, NOWHERE, 0),
        };
        let line = Line { holders, free_at: 0, used, home, kind };
        if first == next {
            self.lines.resize(self.lines.len() + count as usize, line);
        } else {
            self.lines[first as usize..][..count as usize].fill(line);
        }
        // All granules, because values of other types may have used this memory since.
        for offset in (0..bytes).step_by(GRANULE) {
            self.ids.insert((address + offset) / GRANULE, first + (offset / LINE) as u32);
        }
    }

    /// Names the contents of `bytes` bytes at `address`, which have no holder yet.
    pub(crate) fn name(&mut self, address: usize, bytes: usize, what: &'static str) {
        let kind = self.kind(what);
        self.name_array(address, bytes, kind);
    }

    /// Records the address of an array, from which its lines are counted, and removes earlier lines
    /// there.
    fn name_array(&mut self, address: usize, bytes: usize, kind: u16) {
        let all = address..address + bytes;
        forget(&mut self.ids, all.start / GRANULE..all.end.div_ceil(GRANULE), 1);
        forget(&mut self.whole, all.clone(), GRANULE);
        self.arrays.push((all.start, all.end, kind));
    }

    /// Returns the line of `address`.
    pub(crate) fn find(&mut self, costs: &Costs, address: usize, cpu: u16) -> LineId {
        if let Some(id) = self.ids.get(&(address / GRANULE)) {
            return LineId(*id);
        }
        let next = self.lines.len() as u32;
        let array =
            self.arrays.iter().rev().find(|(start, end, _)| (*start..*end).contains(&address));
        // Memory outside any value keeps the host's line.
        let (first, kind) = array.map_or((0, 0), |(start, _, kind)| (*start, *kind));
        let id = *self.whole.entry(address - (address - first) % LINE).or_insert(next);
        if id == next {
            let home = socket(costs, cpu);
            self.lines.push(Line { holders: Holders::None, free_at: 0, used: 0, home, kind });
        }
        self.ids.insert(address / GRANULE, id);
        LineId(id)
    }

    /// Returns the cost of a hit, if `cpu` holds the line in the required state.
    #[inline]
    pub(crate) fn hit(
        &mut self,
        costs: &Costs,
        id: LineId,
        cpu: u16,
        fetches: u64,
        intent: Intent,
    ) -> Option<Time> {
        let line = &mut self.lines[id.0 as usize];
        match (&line.holders, intent) {
            (Holders::One(one), _) if *one == cpu => {}
            // The time of the last use is only known for a single holder.
            (Holders::Many(..), Intent::Load | Intent::Read) if line.holders.has(cpu) => {
                return Some(costs.own);
            }
            _ => return None,
        }
        let since = fetches.saturating_sub(line.used);
        line.used = fetches;
        if since <= NEAR_LINES {
            Some(costs.own)
        } else if since <= costs.cached_lines {
            Some(costs.far)
        } else if let Some(cached) = costs.cached.filter(|cached| since <= cached.lines) {
            Some(cached.line)
        } else {
            line.holders = Holders::None;
            None
        }
    }

    /// Transfers the line to `cpu` at `now`.
    pub(crate) fn fetch(
        &mut self,
        costs: &Costs,
        id: LineId,
        cpu: u16,
        (fetches, now): (u64, Time),
        intent: Intent,
    ) -> Transfer {
        let line = &mut self.lines[id.0 as usize];
        if line.home == NOWHERE {
            line.home = socket(costs, cpu);
        }
        let (mut nearest, mut farthest, mut others) = (Time::MAX, 0, 0u64);
        let home = line.home;
        let has = line.holders.has(cpu);
        line.holders.each(|holder| {
            if holder != cpu {
                let takes = between(costs, cpu, holder, home);
                nearest = nearest.min(takes);
                farthest = farthest.max(takes);
                others += 1;
            }
        });
        let reads = matches!(intent, Intent::Load | Intent::Read);
        let copy = if has {
            0
        } else if others == 0 {
            if socket(costs, cpu) == home { costs.memory } else { costs.remote_memory }
        } else {
            nearest
        };
        let takes = if reads || others == 0 {
            copy
        } else {
            copy.max(farthest) + (others - 1) * costs.invalidate
        };
        let begin = now.max(line.free_at);
        line.free_at = begin + takes * costs.occupancy / 1024;
        if reads {
            line.holders.add(cpu);
        } else {
            line.holders = Holders::One(cpu);
        }
        line.used = fetches;
        Transfer { begin, takes, from_cpu: others != 0 }
    }

    /// Records the wait of a CPU for a line.
    pub(crate) fn waited(&mut self, id: LineId, at: &'static Location<'static>, waited: Time) {
        let kind = self.lines[id.0 as usize].kind;
        let heat = self.heat.entry((kind, at)).or_default();
        heat.transfers += 1;
        heat.waited += waited;
    }

    /// Clears the recorded waits.
    pub(crate) fn cool(&mut self) {
        self.heat.clear();
    }

    /// Returns the places by waiting time, the hottest first: the type that contains the line, and
    /// the location of the access.
    pub(crate) fn hottest(&self) -> Vec<(&'static str, &'static Location<'static>, Heat)> {
        let mut all: Vec<_> = self
            .heat
            .iter()
            .map(|(&(kind, at), &heat)| (self.kinds[usize::from(kind)], at, heat))
            .collect();
        all.sort_by_key(|(kind, at, heat)| {
            (core::cmp::Reverse(heat.waited), *kind, at.file(), at.line())
        });
        all
    }
}

/// Removes the keys in `range`. Only multiples of `step` from its start can exist.
fn forget(known: &mut FxHashMap<usize, u32>, range: core::ops::Range<usize>, step: usize) {
    if known.len() < range.len() / step {
        known.retain(|key, _| !range.contains(key));
    } else {
        range.step_by(step).for_each(|key| {
            known.remove(&key);
        });
    }
}

pub(crate) fn socket(costs: &Costs, cpu: u16) -> u16 {
    (usize::from(cpu) / costs.per_socket) as u16
}

/// Returns the cost of a transfer from one CPU to another, with the line's memory in the socket
/// `home`.
fn between(costs: &Costs, to: u16, from: u16, home: u16) -> Time {
    if usize::from(to) / costs.per_complex == usize::from(from) / costs.per_complex {
        return costs.complex;
    }
    let (to, from) = (socket(costs, to), socket(costs, from));
    if to == from && to == home { costs.socket } else { costs.remote }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Profile;

    const AT: usize = 0x10_0010;

    /// The count does not depend on the start of an array, or on earlier values there.
    #[test]
    fn lines_of_an_array_are_counted_from_its_start() {
        let costs = Costs::new(&Profile::bundled("two-socket").expect("a bundled profile"));
        let mut lines = Lines::new();
        lines.made(&costs, AT, 64, "value", Some((1, 0)));
        let value = lines.find(&costs, AT, 0);
        let mut arrays = Vec::new();
        for _ in 0..2 {
            lines.made(&costs, AT, 8192, "array", None);
            let [first, same, next] = [0, 48, 64].map(|at| lines.find(&costs, AT + at, 0));
            assert_eq!(first, same);
            assert_ne!(first, next);
            arrays.push(first);
        }
        assert_ne!(arrays[0], value, "the value was freed");
        assert_ne!(arrays[0], arrays[1], "the first array was freed");
        lines.made(&costs, AT, 64, "value", Some((1, 0)));
        assert_eq!(lines.find(&costs, AT, 0), value, "values keep their numbers");
    }
}
