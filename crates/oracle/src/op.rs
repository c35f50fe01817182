//! The operations of a case, on a window of pages, in Linux's own numbers.
//!
//! Every operation consists of raw numbers, so that a case can contain every request of a program,
//! including invalid requests. The process of each operation follows from the case: see [`Roster`].

use std::ops::{Range, RangeInclusive};

/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// The number of pages in which operations begin.
pub const PAGES: u64 = 64;
/// The number of checked pages: operations may reach beyond the window.
pub const SEEN_PAGES: u64 = PAGES + 32;
/// The most processes of a case.
pub const PROCESSES: usize = 4;
/// The number of objects (files in memory) of a case. The last object is mapped through a read-only
/// descriptor.
pub const OBJECTS: usize = 3;
/// The initial number of pages of an object.
pub const OBJECT_PAGES: u64 = 8;
/// The object that is read-only in shared mappings.
pub const READ_ONLY: usize = OBJECTS - 1;
/// The offsets of stored data in a page; all other bytes are unchanged.
pub const SLOTS: [u64; 3] = [0, 1000, PAGE - 8];
/// The offset of fetched instructions in a page, which is never stored to.
pub const FETCH: u64 = 2048;

/// The powers of two whose multiples are bounds of a window: from the span of a last-level page
/// table to a quarter of user space.
pub const POWERS: RangeInclusive<u32> = 21..=45;
/// The addresses of windows. Processes have no other mappings there.
const PLACES: Range<u64> = 1 << 43..1 << 46;
/// Bytes below and above the start of a window in which VMAs are compared.
const NEAR: u64 = 1 << 26;

/// The place of the window: the pages in which the operations of a case begin.
///
/// A space divides its VMAs and its page tables at *bounds*: multiples of 2 MiB. A window has a
/// bound at one of its pages. The bound can be a multiple of a larger power of two, at which a
/// larger part of the tree or of the tables ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window(u64);

impl Default for Window {
    /// Returns the window whose middle is the boundary of two top-level entries of the page tables,
    /// so moves within the window cross tables of every level.
    fn default() -> Self {
        Self((1 << 45) - PAGES / 2 * PAGE)
    }
}

impl Window {
    /// Returns the window that starts at `start`; `None` if the address is no page of
    /// [`PLACES`].
    pub fn at(start: u64) -> Option<Self> {
        (start.is_multiple_of(PAGE) && PLACES.contains(&start)).then_some(Self(start))
    }

    /// Returns a random window: page `below(PAGES)` is an odd multiple of a random one of
    /// [`POWERS`]. `below` returns a random number below its argument.
    pub fn random(mut below: impl FnMut(u64) -> u64) -> Self {
        let powers = u64::from(POWERS.end() - POWERS.start()) + 1;
        let power = POWERS.start() + below(powers) as u32;
        // The first quarter of user space up to the end of the places.
        let (low, high) = ((1 << 44) >> power, (1 << 46) >> power);
        let bound = ((low + below(high - low)) | 1) << power;
        Self(bound - below(PAGES) * PAGE)
    }

    /// The first address.
    pub const fn start(self) -> u64 {
        self.0
    }

    /// The address of page `page`.
    pub const fn page(self, page: u64) -> u64 {
        self.0 + page * PAGE
    }

    /// The range in which VMAs are compared.
    pub const fn near(self) -> Range<u64> {
        self.0 - NEAR..self.0 + NEAR
    }
}

/// One operation of a case. Addresses and lengths are in bytes, flags are Linux's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// `mmap` of anonymous memory, or of an object from a page on.
    Map {
        /// Hint or place.
        addr: u64,
        /// Length.
        len: u64,
        /// `PROT_*`.
        prot: u64,
        /// `MAP_*`.
        flags: u64,
        /// The object and its first page.
        object: Option<(usize, u64)>,
    },
    /// `munmap`.
    Unmap {
        /// Start.
        addr: u64,
        /// Length.
        len: u64,
    },
    /// `mprotect`.
    Protect {
        /// Start.
        addr: u64,
        /// Length.
        len: u64,
        /// `PROT_*`.
        prot: u64,
    },
    /// `mremap`.
    Remap {
        /// Start.
        addr: u64,
        /// Length.
        len: u64,
        /// Length afterwards.
        new_len: u64,
        /// `MREMAP_*`.
        flags: u64,
        /// Hint or place.
        target: u64,
    },
    /// `madvise`.
    Advise {
        /// Start.
        addr: u64,
        /// Length.
        len: u64,
        /// `MADV_*`.
        advice: u64,
    },
    /// `mincore`.
    Resident {
        /// Start.
        addr: u64,
        /// Length.
        len: u64,
    },
    /// `mincore` of every page, one by one.
    Census,
    /// A load of eight bytes.
    Load {
        /// Where.
        addr: u64,
    },
    /// A store of eight bytes.
    Store {
        /// The address of a slot.
        addr: u64,
        /// What.
        value: u64,
    },
    /// A fetch of an instruction.
    Fetch {
        /// Where.
        addr: u64,
    },
    /// A check of every page: whether it can be loaded from, and its content.
    Look,
    /// A store to every page that changes no byte.
    Touch,
    /// `pwrite` to an object.
    Write {
        /// The object.
        object: usize,
        /// The offset in bytes.
        offset: u64,
        /// Eight bytes.
        value: u64,
    },
    /// `ftruncate` of an object.
    Truncate {
        /// The object.
        object: usize,
        /// The new length.
        pages: u64,
    },
    /// `fork`. The parent continues.
    Fork,
    /// Another process continues.
    Switch {
        /// Which.
        process: usize,
    },
    /// The end of a process, but not of the first.
    Exit {
        /// Which.
        process: usize,
    },
}

/// The live processes and the running process, which follow from the operations alone. An invalid
/// operation (a switch to a missing process, too many forks) has no effect, so any part of a case
/// is a case.
#[derive(Clone, Debug)]
pub struct Roster {
    live: Vec<usize>,
    forked: usize,
    current: usize,
}

impl Default for Roster {
    fn default() -> Self {
        Self { live: vec![0], forked: 0, current: 0 }
    }
}

impl Roster {
    /// Returns the running process.
    pub fn current(&self) -> usize {
        self.current
    }

    /// Returns the live processes.
    pub fn live(&self) -> &[usize] {
        &self.live
    }

    /// Returns the process of `op`.
    pub fn doer(&self, op: &Op) -> usize {
        match op {
            Op::Exit { .. } => self.ended_by(op).unwrap_or(self.current),
            _ => self.current,
        }
    }

    /// Returns the process created by `op`.
    pub fn made_by(&self, op: &Op) -> Option<usize> {
        (*op == Op::Fork && self.forked + 1 < PROCESSES).then_some(self.forked + 1)
    }

    /// Returns the process ended by `op`.
    pub fn ended_by(&self, op: &Op) -> Option<usize> {
        match *op {
            Op::Exit { process } if process != 0 && self.live.contains(&process) => Some(process),
            _ => None,
        }
    }

    /// Advances to the state after `op`.
    pub fn after(&mut self, op: &Op) {
        if let Some(made) = self.made_by(op) {
            self.live.push(made);
            self.forked = made;
        }
        if let Some(ended) = self.ended_by(op) {
            self.live.retain(|&process| process != ended);
            if self.current == ended {
                self.current = 0;
            }
        }
        if let Op::Switch { process } = *op
            && self.live.contains(&process)
        {
            self.current = process;
        }
    }
}

/// Returns `ops`, followed by a check and a touch of every page from every process.
pub fn with_last_looks(ops: &[Op]) -> Vec<Op> {
    let mut roster = Roster::default();
    ops.iter().for_each(|op| roster.after(op));
    let mut all = ops.to_vec();
    for &process in roster.live() {
        all.push(Op::Switch { process });
        all.extend([Op::Census, Op::Look, Op::Touch, Op::Look, Op::Census]);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_have_bounds_of_every_power_at_every_page() {
        let mut rng = fastrand::Rng::with_seed(7);
        let mut found = std::collections::BTreeSet::new();
        for _ in 0..40_000 {
            let window = Window::random(|below| rng.u64(..below));
            assert_eq!(Window::at(window.start()), Some(window));
            let bounds = (0..PAGES).filter(|page| window.page(*page).is_multiple_of(2 << 20));
            let bounds: Vec<_> = bounds.collect();
            assert_eq!(bounds.len(), 1, "{window:?}");
            found.insert((window.page(bounds[0]).trailing_zeros(), bounds[0]));
        }
        let all = POWERS.flat_map(|power| (0..PAGES).map(move |page| (power, page)));
        assert!(all.eq(found));
    }

    #[test]
    fn a_roster_follows_forks_switches_and_exits() {
        let mut roster = Roster::default();
        let mut run = |ops: &[Op]| {
            ops.iter().for_each(|op| roster.after(op));
            (roster.live().to_vec(), roster.current())
        };
        assert_eq!(run(&[Op::Switch { process: 1 }, Op::Exit { process: 0 }]), (vec![0], 0));
        assert_eq!(run(&[Op::Fork, Op::Switch { process: 1 }, Op::Fork]), (vec![0, 1, 2], 1));
        assert_eq!(run(&[Op::Exit { process: 1 }]), (vec![0, 2], 0));
        assert_eq!(run(&[Op::Fork, Op::Fork]), (vec![0, 2, 3], 0));
    }
}
