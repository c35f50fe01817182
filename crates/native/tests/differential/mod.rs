//! Common parts of both sides of the comparison: the operations, their observed results, and their
//! generator.

pub mod host;
pub mod ours;

use std::collections::VecDeque;
use std::ops::Range;

pub const PAGE: u64 = faultless::PAGE_SIZE;
/// Places for mappings.
pub const SLOTS: usize = 6;
const CHILDREN: usize = 2;
/// Pages of a huge leaf.
const LEAF: u64 = 512;

/// The maximum size of the file and its mappings, in pages. Each slot is at least as long as the
/// longest mapping.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub file: u64,
    view: u64,
    slot: u64,
    /// Whether the file is text: long enough for a huge leaf, at an aligned address, and
    /// executable.
    pub is_text: bool,
}

impl Shape {
    /// Several runs of the backing store, and not a multiple of a run. The slots begin at different
    /// positions in a table.
    pub const DATA: Self = Self { file: 83, view: 48, slot: 53, is_text: false };
    pub const TEXT: Self = Self { file: LEAF + 40, view: LEAF + 40, slot: 2 * LEAF, is_text: true };

    pub const fn slot_bytes(self) -> u64 {
        self.slot * PAGE
    }

    pub const fn window_bytes(self) -> u64 {
        SLOTS as u64 * self.slot_bytes()
    }
}

/// A mapping of the file.
#[derive(Clone, Copy, Debug)]
pub struct View {
    pub first: u64,
    pub pages: u64,
    pub shared: bool,
    pub writable: bool,
}

type Views = [Option<View>; SLOTS];

/// A word: whose, in which slot, and how many bytes behind the slot's start.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub who: usize,
    pub slot: usize,
    pub at: u64,
    /// Whether the kernel loads or stores the word, for another process, and not an instruction.
    pub outside: bool,
}

impl Place {
    pub const fn offset_in_window(self, shape: Shape) -> u64 {
        self.slot as u64 * shape.slot_bytes() + self.at
    }
}

/// Pages of a mapping are counted from its start, and pages of the file from the file's start.
#[derive(Clone, Debug)]
pub enum Op {
    Map {
        slot: usize,
        view: View,
    },
    Unmap {
        slot: usize,
    },
    Protect {
        slot: usize,
        writable: bool,
    },
    Move {
        from: usize,
        to: usize,
    },
    Load(Place),
    Store(Place, u64),
    /// A load, and then whether the page is resident.
    Resident(Place),
    Read {
        offset: u64,
        len: u64,
    },
    Write {
        offset: u64,
        len: u64,
        seed: u64,
    },
    SetLen(u64),
    Punch(Range<u64>),
    /// `msync` of pages of a mapping.
    Msync {
        slot: usize,
        pages: Range<u64>,
    },
    Fsync,
    /// `MADV_DONTNEED`.
    Discard {
        slot: usize,
        pages: Range<u64>,
    },
    /// `MADV_COLLAPSE` of all of a mapping, which may be refused.
    Collapse {
        slot: usize,
    },
    /// `POSIX_FADV_DONTNEED`.
    Forget(Range<u64>),
    Fork,
    Exit {
        child: usize,
    },
}

/// The signal of an access that cannot be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    Bus,
    Segv,
}

/// The observed result of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    Loaded(Result<u64, Signal>),
    Stored(Result<(), Signal>),
    Resident(Result<u64, Signal>, bool),
    Read(Vec<u8>),
}

/// Returns the bytes written by an [`Op::Write`].
pub fn bytes_to_write(len: u64, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// One of the two sides.
pub trait Side {
    /// `known` is the state before.
    fn step(&mut self, known: &Known, op: &Op) -> Outcome;
    /// Returns the content of the host's file.
    fn stored(&self) -> Vec<u8>;
}

/// The state implied by the operations so far, without any access.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// The length of the file in bytes.
    pub len: u64,
    /// The mappings of the parent and its children.
    pub parent: Views,
    pub children: Vec<Views>,
}

impl Known {
    fn views(&self, who: usize) -> &Views {
        if who == 0 { &self.parent } else { &self.children[who - 1] }
    }

    /// Returns the mapping of `place`.
    pub fn view(&self, place: Place) -> View {
        self.views(place.who)[place.slot].expect("operations apply to existing mappings")
    }

    /// Returns the file offset of the word of `place`.
    pub fn offset(&self, place: Place) -> u64 {
        self.view(place).first * PAGE + place.at
    }

    /// Returns whether the page of `place` contains bytes of the file.
    pub fn is_in_file(&self, place: Place) -> bool {
        self.offset(place) < self.len.next_multiple_of(PAGE)
    }

    /// Returns whether the word of `place` lies, in part or completely, between the file's end and
    /// the end of the last page.
    fn is_behind_end(&self, place: Place) -> bool {
        self.is_in_file(place) && self.offset(place) + 8 > self.len
    }

    pub fn after(&mut self, op: &Op) {
        match *op {
            Op::Map { slot, view } => self.parent[slot] = Some(view),
            Op::Unmap { slot } => self.parent[slot] = None,
            Op::Protect { slot, writable } => {
                self.parent[slot].iter_mut().for_each(|view| view.writable = writable);
            }
            Op::Move { from, to } => self.parent[to] = self.parent[from].take(),
            Op::Write { offset, len, .. } => self.len = self.len.max(offset + len),
            Op::SetLen(len) => self.len = len,
            Op::Fork => self.children.push(self.parent),
            Op::Exit { child } => drop(self.children.remove(child)),
            _ => {}
        }
    }
}

/// Makes operations up.
pub struct Generator {
    random: fastrand::Rng,
    shape: Shape,
    /// The operations that must come next.
    next: VecDeque<Op>,
    /// Whether the host clears programs' stores behind the end of the file when the file grows.
    /// Linux does so since 6.13, depending on the file system; POSIX does not specify the
    /// behaviour.
    clears: bool,
}

impl Generator {
    pub fn new(seed: u64, shape: Shape, clears: bool) -> Self {
        Self { random: fastrand::Rng::with_seed(seed), shape, next: VecDeque::new(), clears }
    }

    pub fn next(&mut self, known: &Known) -> Op {
        loop {
            if let Some(op) = self.next.pop_front().or_else(|| self.try_next(known)) {
                return op;
            }
        }
    }

    /// Returns `None` if the operation has no possible target.
    fn try_next(&mut self, known: &Known) -> Option<Op> {
        if self.shape.is_text && self.random.u32(0..12) == 0 {
            return self.of_leaf(known);
        }
        let file = self.shape.file;
        Some(match self.random.u32(0..1000) {
            0..250 => Op::Load(self.place(known)?),
            250..480 => return self.store(known),
            480..500 => Op::Resident(Place { who: 0, ..self.place(known)? }).only_if(known)?,
            500..580 => {
                let offset = self.offset(known);
                Op::Read { offset, len: self.random.u64(1..4 * PAGE) }
            }
            580..660 => {
                let offset = self.offset(known);
                let len = self.random.u64(1..3 * PAGE).min(file * PAGE - offset);
                Op::Write { offset, len, seed: self.random.u64(..) }
            }
            660..700 => Op::SetLen(self.length(known)),
            700..720 => Op::Punch(self.range(file)),
            720..745 => {
                let (slot, pages) = self.part(known)?;
                Op::Msync { slot, pages }
            }
            745..755 => Op::Fsync,
            755..810 => {
                let (slot, pages) = self.part(known)?;
                Op::Discard { slot, pages }
            }
            810..860 => Op::Forget(self.range(file)),
            860..910 => {
                let slot = self.random.usize(0..SLOTS);
                let first = self.random.u64(0..file);
                let view = View {
                    first,
                    pages: self.random.u64(1..=self.shape.view),
                    shared: self.random.bool(),
                    writable: self.random.u32(0..8) != 0,
                };
                Op::Map { slot, view }
            }
            910..925 => Op::Unmap { slot: self.slot(&known.parent)? },
            925..960 => {
                let slot = self.slot(&known.parent)?;
                Op::Protect { slot, writable: self.random.u32(0..3) != 0 }
            }
            960..980 => {
                let from = self.slot(&known.parent)?;
                let to = self.random.usize(0..SLOTS);
                if from == to {
                    return None;
                }
                Op::Move { from, to }
            }
            980..990 if known.children.len() < CHILDREN => Op::Fork,
            990.. if !known.children.is_empty() => {
                Op::Exit { child: self.random.usize(0..known.children.len()) }
            }
            _ => return None,
        })
    }

    /// Operations that create huge leaves, and operations on whole leaves.
    fn of_leaf(&mut self, known: &Known) -> Option<Op> {
        let most = self.shape.file * PAGE;
        Some(match self.random.u32(0..16) {
            0..3 => {
                // Unshared pages without dirty bits can become a folio.
                let mapped = (0..SLOTS).filter(|slot| known.parent[*slot].is_some());
                self.next.extend(mapped.map(|slot| Op::Unmap { slot }));
                self.next.extend(known.children.iter().map(|_| Op::Exit { child: 0 }));
                if known.len < LEAF * PAGE {
                    self.next.push_back(Op::SetLen(most));
                }
                self.next.push_back(Op::Fsync);
                let (slot, map) = self.map_leaf();
                // Base pages, unless the first load makes a leaf.
                let [first, second] = [(); 2].map(|()| self.load_of_leaf(slot));
                self.next.extend([map, first, Op::Collapse { slot }, second]);
                return None;
            }
            3..9 => {
                let (slot, map) = self.map_leaf();
                let load = self.load_of_leaf(slot);
                self.next.push_back(load);
                map
            }
            9 => Op::Collapse { slot: self.slot(&known.parent)? },
            10..12 => {
                let slot = self.slot(&known.parent)?;
                Op::Discard { slot, pages: 0..known.parent[slot]?.pages }
            }
            12 => {
                // Afterwards all pages are new.
                self.next.push_back(Op::SetLen(most));
                Op::SetLen(0)
            }
            _ => Op::SetLen(self.random.u64(LEAF * PAGE..=most)),
        })
    }

    /// Creates a mapping that can hold a huge leaf.
    fn map_leaf(&mut self) -> (usize, Op) {
        let slot = self.random.usize(0..SLOTS);
        let pages = self.random.u64(LEAF..=self.shape.view);
        let (shared, writable) = (self.random.bool(), self.random.bool());
        (slot, Op::Map { slot, view: View { first: 0, pages, shared, writable } })
    }

    fn load_of_leaf(&mut self, slot: usize) -> Op {
        let at = self.random.u64(0..LEAF) * PAGE + self.random.u64(0..LEAF) * 8;
        Op::Load(Place { who: 0, slot, at, outside: false })
    }

    fn slot(&mut self, views: &Views) -> Option<usize> {
        let mapped: Vec<_> = (0..SLOTS).filter(|slot| views[*slot].is_some()).collect();
        self.random.choice(mapped)
    }

    /// A word of a mapping, often near the end of the file.
    fn place(&mut self, known: &Known) -> Option<Place> {
        let who = self.random.usize(0..=known.children.len());
        let slot = self.slot(known.views(who))?;
        let view = known.views(who)[slot]?;
        let near_end = (known.len & !7) + 8 * self.random.u64(0..4);
        let at = near_end.checked_sub(16 + view.first * PAGE);
        let at = at.filter(|at| *at < view.pages * PAGE && self.random.u32(0..6) == 0);
        let at = at.unwrap_or_else(|| {
            // Few words, so that stores are found again.
            let word = [0, 1, 200, 511][self.random.usize(0..4)];
            self.random.u64(0..view.pages) * PAGE + word * 8
        });
        Some(Place { who, slot, at, outside: self.random.u32(0..5) == 0 })
    }

    fn store(&mut self, known: &Known) -> Option<Op> {
        let place = self.place(known)?;
        let view = known.view(place);
        let store = Op::Store(place, self.random.u64(..));
        if !view.shared || !view.writable || !known.is_behind_end(place) {
            return Some(store);
        }
        // Stores behind the end are in no file, and the kernel decides how long they stay visible
        // there. The file therefore grows beyond this page before the next comparison.
        if !self.clears {
            return None;
        }
        let end = known.len.next_multiple_of(PAGE);
        let len = self.random.u64(end..=end + 3 * PAGE);
        let load = Op::Load(place);
        self.next.push_back(load.clone());
        if self.random.bool() {
            self.next.push_back(Op::Fsync);
        }
        self.next.push_back(match self.random.bool() {
            true => Op::SetLen(len),
            false => Op::Write { offset: len, len: 9, seed: len },
        });
        self.next.extend([load, Op::Read { offset: end - PAGE, len: PAGE }]);
        Some(store)
    }

    /// Returns the start of a call's range.
    fn offset(&mut self, known: &Known) -> u64 {
        let file = self.shape.file;
        match self.random.u32(0..4) {
            0 => self.random.u64(0..file) * PAGE,
            1 => known.len.saturating_sub(self.random.u64(0..2 * PAGE)).min(file * PAGE - 1),
            _ => self.random.u64(0..file * PAGE),
        }
    }

    fn length(&mut self, known: &Known) -> u64 {
        let most = self.shape.file * PAGE;
        match self.random.u32(0..8) {
            0 => 0,
            1 | 2 => self.random.u64(0..=self.shape.file) * PAGE,
            3 => (known.len + self.random.u64(0..PAGE)).min(most),
            4 => known.len.saturating_sub(self.random.u64(0..PAGE)),
            _ => self.random.u64(most / 2..=most),
        }
    }

    /// Returns a random range of at least one page among `pages`.
    fn range(&mut self, pages: u64) -> Range<u64> {
        let start = self.random.u64(0..pages);
        let longest = if self.random.bool() { 4 } else { pages };
        start..(start + self.random.u64(1..=longest)).min(pages)
    }

    fn part(&mut self, known: &Known) -> Option<(usize, Range<u64>)> {
        let slot = self.slot(&known.parent)?;
        let pages = known.parent[slot]?.pages;
        Some((slot, self.range(pages)))
    }
}

impl Op {
    /// Returns the operation, if the parent has its target.
    fn only_if(self, known: &Known) -> Option<Self> {
        let is_there = match self {
            Self::Resident(place) => {
                let view = known.parent[place.slot];
                view.is_some_and(|view| place.at < view.pages * PAGE)
            }
            _ => true,
        };
        is_there.then_some(self)
    }
}
