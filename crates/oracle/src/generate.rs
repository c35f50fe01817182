//! Random cases. Ranges often begin and end at the ends of earlier ranges, so that VMAs are split,
//! merged, moved onto each other and grown into each other. Occasionally an argument is invalid.
//!
//! The [window](Window) of each case lies around a bound of 2 MiB, or of a larger power of two, at
//! random. Some ranges are longer than the span of a page table, and include several bounds.

use crate::case::Case;
use crate::op::{FETCH, OBJECTS, Op, PAGE, PAGES, PROCESSES, SLOTS, Window};
use fastrand::Rng;

/// The setting of half of the cases: with prefault, the present pages are not compared exactly.
const NOTHING_AHEAD: &str = "prefault_max_order=0";
/// Further settings of cases; each setting usually has its default.
const SETTINGS: [&str; 4] =
    ["locking=mmap_lock", "locking=per_vma", "anon_vma_check=early", "fault_around_pages=1"];

/// One in this many mappings, unmappings and changes of permissions is longer than a page table
/// covers.
const LONG: u32 = 12;
/// The span of a last-level page table.
const TABLE: u64 = 2 << 20;

const READ: u64 = 1;
const WRITE: u64 = 2;
const EXEC: u64 = 4;
const GROWSDOWN_PROT: u64 = 1 << 24;
const SHARED: u64 = 1;
const PRIVATE: u64 = 2;
const FIXED: u64 = 0x10;
const ANONYMOUS: u64 = 0x20;
const GROWSDOWN: u64 = 0x100;
const NORESERVE: u64 = 0x4000;
const POPULATE: u64 = 0x8000;
const STACK: u64 = 0x2_0000;
const NOREPLACE: u64 = 0x10_0000;
const MAYMOVE: u64 = 1;
const MUST_MOVE: u64 = 2;
const DONTUNMAP: u64 = 4;

/// Generates cases; the same seed generates the same cases.
#[derive(Debug)]
pub struct Generator {
    rng: Rng,
    window: Window,
    /// Pages at which ranges of this case began or ended.
    marks: Vec<u64>,
    stored: u64,
}

impl Generator {
    /// A generator.
    pub fn new(seed: u64) -> Self {
        let (rng, window) = (Rng::with_seed(seed), Window::default());
        Self { rng, window, marks: Vec::new(), stored: 0 }
    }

    /// A case of at most `longest` operations.
    pub fn case(&mut self, longest: usize) -> Case {
        self.marks.clear();
        self.stored = 0;
        self.window = Window::random(|below| self.rng.u64(..below));
        let mut settings = Vec::new();
        if self.one_in(2) {
            settings.push(NOTHING_AHEAD.into());
        }
        if self.one_in(4) {
            settings.push(SETTINGS[self.rng.usize(..SETTINGS.len())].into());
        }
        let len = self.rng.usize(longest / 4..=longest);
        let mut ops = vec![self.map()];
        ops.extend((1..len).map(|_| self.op()));
        Case { settings, window: self.window, ops }
    }

    fn one_in(&mut self, chances: u32) -> bool {
        self.rng.u32(..chances) == 0
    }

    /// Returns one of `choices`, with a probability proportional to its weight.
    fn weighted<T: Copy>(&mut self, choices: &[(u32, T)]) -> T {
        let sum: u32 = choices.iter().map(|choice| choice.0).sum();
        let mut left = self.rng.u32(..sum);
        for &(weight, choice) in choices {
            if left < weight {
                return choice;
            }
            left -= weight;
        }
        choices[0].1
    }

    fn op(&mut self) -> Op {
        type Make = fn(&mut Generator) -> Op;
        const MAKERS: [(u32, Make); 17] = [
            (16, Generator::map),
            (7, Generator::unmap),
            (10, Generator::protect),
            (10, Generator::remap),
            (11, Generator::advise),
            (4, Generator::resident),
            (8, Generator::load),
            (18, Generator::store),
            (2, Generator::fetch),
            (2, |_| Op::Look),
            (1, |_| Op::Census),
            (1, |_| Op::Touch),
            (3, Generator::write),
            (3, Generator::truncate),
            (3, |_| Op::Fork),
            (5, |generator| Op::Switch { process: generator.rng.usize(..PROCESSES) }),
            (1, |generator| Op::Exit { process: generator.rng.usize(1..PROCESSES) }),
        ];
        self.weighted(&MAKERS)(self)
    }

    /// Returns a page, often at the beginning or end of an earlier range.
    fn page(&mut self) -> u64 {
        if !self.marks.is_empty() && !self.one_in(3) {
            let mark = self.marks[self.rng.usize(..self.marks.len())];
            let near = self.weighted(&[(6, 0), (1, 1), (1, u64::MAX)]);
            return mark.wrapping_add(near).min(PAGES - 1);
        }
        self.rng.u64(..PAGES)
    }

    /// A range of pages: first and count.
    fn range(&mut self) -> (u64, u64) {
        let first = self.page();
        let other = self.page();
        let count = if other > first && self.one_in(2) {
            other - first
        } else {
            let most = self.weighted(&[(5, 4), (4, 16), (1, 32)]);
            self.rng.u64(1..=most)
        };
        self.marks.push(first);
        self.marks.push((first + count).min(PAGES));
        (first, count)
    }

    /// Returns a range in bytes, which is rarely invalid.
    fn bytes(&mut self) -> (u64, u64) {
        let (first, count) = self.range();
        (self.wrong_addr(self.window.page(first)), self.wrong_len(count * PAGE))
    }

    /// Returns a range in bytes that occasionally includes several bounds.
    fn long_bytes(&mut self) -> (u64, u64) {
        let (addr, len) = self.bytes();
        if self.one_in(LONG) && (PAGE..PAGES * PAGE).contains(&len) {
            (addr, len + self.rng.u64(1..=3) * TABLE)
        } else {
            (addr, len)
        }
    }

    /// Returns `addr`, or occasionally a misaligned or foreign address.
    fn wrong_addr(&mut self, addr: u64) -> u64 {
        if !self.one_in(60) {
            return addr;
        }
        self.weighted(&[
            (4, addr + 1),
            (4, addr + 1000),
            (1, 0x7fff_ffff_f000),
            (1, 0x8000_0000_0000),
            (1, 0xffff_8000_0000_0000),
            (1, u64::MAX - 4095),
        ])
    }

    /// Returns `len`, or occasionally another number of bytes in the last page, zero, or a length
    /// too large for any place. The length never reaches this program's own memory.
    fn wrong_len(&mut self, len: u64) -> u64 {
        if !self.one_in(30) {
            return len;
        }
        self.weighted(&[
            (4, len - 1),
            (4, len - 3000),
            (3, 0),
            (1, u64::MAX),
            (1, u64::MAX - 4095),
            (1, u64::MAX - 4096),
        ])
    }

    fn prot(&mut self) -> u64 {
        self.weighted(&[
            (4, 0),
            (6, READ),
            (18, READ | WRITE),
            (2, READ | EXEC),
            (3, READ | WRITE | EXEC),
            (1, WRITE),
            (1, EXEC),
        ])
    }

    fn map(&mut self) -> Op {
        let (addr, len) = self.long_bytes();
        let prot = self.prot();
        let object = self.rng.u32(..100) < 40;
        let kind = if object {
            self.weighted(&[(20, PRIVATE), (20, SHARED), (1, 0)])
        } else {
            self.weighted(&[(60, PRIVATE), (20, SHARED), (1, PRIVATE | SHARED), (1, 0)])
        };
        let how = self.weighted(&[(30, FIXED), (3, NOREPLACE), (1, FIXED | NOREPLACE), (8, 0)]);
        let mut flags = kind | how | if object { 0 } else { ANONYMOUS };
        for (chances, flag) in [(12, NORESERVE), (10, POPULATE), (25, GROWSDOWN), (30, STACK)] {
            if self.one_in(chances) {
                flags |= flag;
            }
        }
        if len >= TABLE {
            // The machines have memory for the window only.
            flags &= !POPULATE;
        }
        let object = object.then(|| {
            let first = if self.one_in(60) {
                self.weighted(&[(1, (1 << 51) - 1), (1, (1 << 51) - 64), (1, (1 << 52) - 1)])
            } else {
                self.rng.u64(..12)
            };
            (self.rng.usize(..OBJECTS), first)
        });
        Op::Map { addr, len, prot, flags, object }
    }

    fn unmap(&mut self) -> Op {
        let (addr, len) = self.long_bytes();
        Op::Unmap { addr, len }
    }

    fn protect(&mut self) -> Op {
        let (addr, len) = self.long_bytes();
        let more = self.weighted(&[(60, 0), (2, GROWSDOWN_PROT), (1, 1 << 25), (1, 8), (1, 16)]);
        Op::Protect { addr, len, prot: self.prot() | more }
    }

    fn remap(&mut self) -> Op {
        let (addr, len) = self.bytes();
        let other = self.range().1 * PAGE;
        let new_len = self.weighted(&[(3, len), (2, other)]);
        let new_len = self.wrong_len(new_len.max(PAGE));
        let len = if self.one_in(25) { 0 } else { len };
        let flags = self.weighted(&[
            (6, 0),
            (8, MAYMOVE),
            (20, MAYMOVE | MUST_MOVE),
            (4, MAYMOVE | DONTUNMAP),
            (4, MAYMOVE | MUST_MOVE | DONTUNMAP),
            (1, MUST_MOVE),
            (1, DONTUNMAP),
            (1, 8),
        ]);
        let target = self.window.page(self.range().0);
        let target = self.wrong_addr(target);
        Op::Remap { addr, len, new_len, flags, target }
    }

    fn advise(&mut self) -> Op {
        let (addr, len) = self.bytes();
        let advice = self.weighted(&[
            (10, 4),
            (5, 8),
            (4, 22),
            (4, 23),
            (3, 10),
            (2, 11),
            (3, 18),
            (2, 19),
            (1, 0),
            (1, 1),
            (1, 2),
            (1, 3),
            (1, 14),
            (1, 15),
            (1, 7),
            (1, 99),
        ]);
        Op::Advise { addr, len, advice }
    }

    fn resident(&mut self) -> Op {
        let (addr, len) = self.bytes();
        Op::Resident { addr, len }
    }

    fn slot(&mut self) -> u64 {
        self.window.page(self.page()) + SLOTS[self.rng.usize(..SLOTS.len())]
    }

    fn load(&mut self) -> Op {
        Op::Load { addr: self.slot() }
    }

    fn value(&mut self) -> u64 {
        self.stored += 1;
        self.stored
    }

    fn store(&mut self) -> Op {
        Op::Store { addr: self.slot(), value: self.value() }
    }

    fn fetch(&mut self) -> Op {
        Op::Fetch { addr: self.window.page(self.page()) + FETCH }
    }

    fn write(&mut self) -> Op {
        let object = self.rng.usize(..OBJECTS);
        let offset = self.rng.u64(..12) * PAGE + SLOTS[self.rng.usize(..SLOTS.len())];
        Op::Write { object, offset, value: self.value() }
    }

    fn truncate(&mut self) -> Op {
        Op::Truncate { object: self.rng.usize(..OBJECTS), pages: self.rng.u64(..14) }
    }
}
