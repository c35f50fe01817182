//! A storm of calls and accesses of many CPUs in one address space, under a seed's schedule.
//!
//! Each CPU has *chunks* of a few pages of one area, which lie among those of all others: so CPUs work in the same VMAs and tables, and never on the
//! same page. What a CPU finds in its chunks, and what its calls return, depends on its own calls alone: that is checked exactly, after each.
//! It also maps memory where the subsystem chooses, which nobody else may have meanwhile; and it does anything to a place that all share, where only
//! the books are checked. At the end, the audit.

use faultless::{Advice, MapFlags, PAGE_SIZE, Prot, RemapFlags};
use faultless_virtual::{Config, Profile, Stop, Virtual, VirtualCpu};
use std::cell::RefCell;
use std::collections::BTreeMap;

const RW: Prot = Prot::READ.union(Prot::WRITE);
const PRIVATE: MapFlags = MapFlags::PRIVATE.union(MapFlags::ANONYMOUS);
const FIXED: MapFlags = PRIVATE.union(MapFlags::FIXED);

/// Pages of a chunk, and chunks of a CPU.
const PAGES: usize = 3;
const CHUNKS: usize = 4;
/// Where the chunks are, and what all share: in a table of its own, and in part of that of the first chunks.
const AREA: u64 = 0x1000_0000_0000;
const SHARED: u64 = AREA - 6 * PAGE_SIZE;
const SHARED_PAGES: u64 = 6;
/// Automatic mappings of a CPU at one time.
const PLACED: usize = 3;

/// What a page is to the CPU that owns it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Page {
    Unmapped,
    /// Mapped, with what is stored there, and whether stores are allowed.
    Mapped(u64, bool),
}

/// One CPU's part.
struct Part<'a> {
    cpus: usize,
    number: usize,
    random: u64,
    chunks: [[Page; PAGES]; CHUNKS],
    /// Where it has automatic mappings, with their pages.
    placed: Vec<(u64, u64)>,
    /// Those of all CPUs, by their start.
    all_placed: &'a RefCell<BTreeMap<u64, u64>>,
    stored: u64,
}

impl Part<'_> {
    fn below(&mut self, limit: usize) -> usize {
        // SplitMix64.
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ mixed >> 31) % limit as u64) as usize
    }

    fn addr(&self, chunk: usize, page: usize) -> u64 {
        AREA + ((chunk * self.cpus + self.number) * PAGES + page) as u64 * PAGE_SIZE
    }

    /// A part of a chunk.
    fn span(&mut self) -> (usize, std::ops::Range<usize>) {
        let (chunk, first) = (self.below(CHUNKS), self.below(PAGES));
        (chunk, first..first + 1 + self.below(PAGES - first))
    }

    fn step(&mut self, cpu: &mut VirtualCpu<'_>) -> Result<(), Stop> {
        match self.below(10) {
            0..=6 => {
                let (chunk, pages) = self.span();
                self.own(cpu, chunk, pages)
            }
            7 | 8 => self.place(cpu),
            _ => {
                self.share(cpu);
                Ok(())
            }
        }
    }

    /// Does something to its own pages.
    fn own(
        &mut self,
        cpu: &mut VirtualCpu<'_>,
        chunk: usize,
        pages: std::ops::Range<usize>,
    ) -> Result<(), Stop> {
        let (start, len) =
            (self.addr(chunk, pages.start), (pages.end - pages.start) as u64 * PAGE_SIZE);
        let mapped = self.chunks[chunk][pages.clone()].iter().all(|page| *page != Page::Unmapped);
        match self.below(8) {
            0 => {
                assert_eq!(cpu.mmap(start, len, RW, FIXED)?, start);
                self.chunks[chunk][pages.clone()].fill(Page::Mapped(0, true));
            }
            1 => {
                cpu.munmap(start, len)?;
                self.chunks[chunk][pages.clone()].fill(Page::Unmapped);
            }
            2 => {
                let writable = self.below(3) != 0;
                let prot = if writable { RW } else { Prot::READ };
                let done = cpu.mprotect(start, len, prot);
                assert_eq!(done.is_ok(), mapped, "{done:?}");
                // What lies below a hole is changed all the same.
                for page in &mut self.chunks[chunk][pages.clone()] {
                    let Page::Mapped(_, allowed) = page else { break };
                    *allowed = writable;
                }
            }
            3 => {
                let done = cpu.madvise(start, len, Advice::DontNeed);
                assert_eq!(done.is_ok(), mapped, "{done:?}");
                for page in &mut self.chunks[chunk][pages.clone()] {
                    if let Page::Mapped(value, _) = page {
                        *value = 0;
                    }
                }
            }
            4 if pages.len() == 1 && mapped => {
                // To another of its pages, in place of what is there.
                let (to_chunk, to_page) = (self.below(CHUNKS), self.below(PAGES));
                if (to_chunk, to_page) != (chunk, pages.start) {
                    let to = self.addr(to_chunk, to_page);
                    let flags = RemapFlags::MAYMOVE | RemapFlags::FIXED;
                    assert_eq!(cpu.mremap((start, len), len, flags, to)?, to);
                    self.chunks[to_chunk][to_page] = self.chunks[chunk][pages.start];
                    self.chunks[chunk][pages.start] = Page::Unmapped;
                    self.check(cpu, to_chunk, to_page);
                }
            }
            _ => {
                for page in pages.clone() {
                    self.stored += 1;
                    let value = (self.number as u64) << 32 | self.stored;
                    let stored = cpu.store(self.addr(chunk, page), value);
                    if let Page::Mapped(old, true) = &mut self.chunks[chunk][page] {
                        assert!(stored.is_ok(), "{stored:?}");
                        *old = value;
                    } else {
                        assert!(matches!(stored, Err(Stop::Signal { .. })), "{stored:?}");
                    }
                }
            }
        }
        pages.for_each(|page| self.check(cpu, chunk, page));
        Ok(())
    }

    /// What is in a page is what this CPU left there.
    fn check(&self, cpu: &VirtualCpu<'_>, chunk: usize, page: usize) {
        let addr = self.addr(chunk, page);
        let found = cpu.load(addr);
        match self.chunks[chunk][page] {
            Page::Mapped(value, _) => {
                assert_eq!(found, Ok(value), "CPU {}: {addr:#x}", self.number);
            }
            Page::Unmapped => {
                assert!(matches!(found, Err(Stop::Signal { .. })), "{addr:#x}: {found:?}");
            }
        }
    }

    /// Maps memory where the subsystem chooses, or unmaps it.
    fn place(&mut self, cpu: &mut VirtualCpu<'_>) -> Result<(), Stop> {
        if self.placed.len() == PLACED || (!self.placed.is_empty() && self.below(3) == 0) {
            let at = self.below(self.placed.len());
            let (start, len) = self.placed.swap_remove(at);
            for page in (start..start + len).step_by(PAGE_SIZE as usize) {
                assert_eq!(cpu.load(page), Ok(page ^ self.number as u64));
            }
            // From before it is free until then it is nobody's.
            self.all_placed.borrow_mut().remove(&start);
            return cpu.munmap(start, len);
        }
        let len = (1 + self.below(4)) as u64 * PAGE_SIZE;
        let start = cpu.mmap(0, len, RW, PRIVATE)?;
        {
            let mut all = self.all_placed.borrow_mut();
            let before = all.range(..start + len).next_back();
            let free = before.is_none_or(|(other, length)| other + length <= start);
            assert!(free, "{start:#x} is another CPU's, too: {before:x?}");
            all.insert(start, len);
        }
        self.placed.push((start, len));
        for page in (start..start + len).step_by(PAGE_SIZE as usize) {
            cpu.store(page, page ^ self.number as u64)?;
        }
        Ok(())
    }

    /// Does anything to what all share: whatever comes of it.
    fn share(&mut self, cpu: &mut VirtualCpu<'_>) {
        let first = self.below(SHARED_PAGES as usize) as u64;
        let pages = 1 + self.below((SHARED_PAGES - first) as usize) as u64;
        let (start, len) = (SHARED + first * PAGE_SIZE, pages * PAGE_SIZE);
        match self.below(8) {
            0 | 1 => drop(cpu.mmap(start, len, RW, FIXED)),
            2 => drop(cpu.munmap(start, len)),
            3 => drop(cpu.mprotect(start, len, Prot::READ)),
            4 => drop(cpu.madvise(start, len, Advice::DontNeed)),
            5 => drop(cpu.madvise(start, len, Advice::Free)),
            6 => drop(cpu.load(start)),
            _ => drop(cpu.store(start, 1)),
        }
    }
}

/// What a storm does.
#[derive(Clone, Copy, Debug)]
pub struct Storm<'a> {
    pub profile: &'a Profile,
    pub cpus: usize,
    pub seed: u64,
    /// Steps of each CPU.
    pub steps: usize,
}

impl Storm<'_> {
    /// Runs it under the knobs `settings`. Returns the simulated time, in picoseconds, and what was counted.
    ///
    /// # Panics
    /// When a CPU finds what it did not leave, or the books do not balance.
    pub fn run(self, settings: &[&str]) -> (u64, Vec<(&'static str, u64)>) {
        let Self { profile, cpus, seed, steps } = self;
        let config = Config {
            cpus,
            memory_bytes: (64 << 20) + cpus as u64 * (1 << 20),
            slow_bytes: 0,
            seed,
        };
        let system = Virtual::new(profile, config).expect("a valid machine");
        settings.iter().for_each(|setting| system.set(setting).expect("a valid setting"));
        let process = system.process().expect("memory for a space");
        let all_placed = RefCell::new(BTreeMap::new());
        let ends = system.run(
            cpus,
            |_| &process,
            |cpu, number| {
                let mut part = Part {
                    cpus,
                    number,
                    random: seed << 16 | number as u64,
                    chunks: [[Page::Unmapped; PAGES]; CHUNKS],
                    placed: Vec::new(),
                    all_placed: &all_placed,
                    stored: 0,
                };
                for step in 0..steps {
                    part.step(cpu).unwrap_or_else(|stop| {
                        panic!("seed {seed}, CPU {number}, step {step}: {stop}")
                    });
                }
                for chunk in 0..CHUNKS {
                    (0..PAGES).for_each(|page| part.check(cpu, chunk, page));
                }
                cpu.now()
            },
        );
        if let Err(error) = system.audit(&[&process]) {
            panic!("seed {seed}: {error}");
        }
        let counters = system.counters();
        system.exit(process);
        (ends.into_iter().max().unwrap_or(0), counters)
    }
}
