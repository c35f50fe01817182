//! A storm of calls and accesses of many CPUs in one address space, under a seed's schedule.
//!
//! Each CPU has *chunks* of a few pages of one area, interleaved with those of all other CPUs. CPUs
//! therefore work in the same VMAs and tables, and never on the same page. The contents of a CPU's
//! chunks, and the results of its calls, depend only on its own calls. Both are checked exactly,
//! after each call. A CPU also maps memory at addresses chosen by the subsystem, which no other CPU
//! may have at the same time, and makes arbitrary calls on a range shared by all CPUs, for which
//! only the audit applies. The run ends with the audit.

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
/// The address of the chunks, and of the shared range: in a separate table, and in part of the
/// table of the first chunks.
const AREA: u64 = 0x1000_0000_0000;
const SHARED: u64 = AREA - 6 * PAGE_SIZE;
const SHARED_PAGES: u64 = 6;
/// The largest number of simultaneous automatic mappings of a CPU.
const PLACED: usize = 3;

/// The state of a page for its owner.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Page {
    Unmapped,
    /// Mapped, with the stored value, and whether stores are allowed.
    Mapped(u64, bool),
}

/// One CPU's part.
struct Part<'a> {
    cpus: usize,
    number: usize,
    random: u64,
    chunks: [[Page; PAGES]; CHUNKS],
    /// The automatic mappings, with their pages.
    placed: Vec<(u64, u64)>,
    /// The automatic mappings of all CPUs, by their start.
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

    /// Returns a part of a chunk.
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

    /// Makes a call on its own pages.
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
                // Pages below a hole are changed nevertheless.
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
                // To another of its pages, replacing the mapping there.
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

    /// Checks that a page has the contents left by this CPU.
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

    /// Maps memory at an address chosen by the subsystem, or unmaps it.
    fn place(&mut self, cpu: &mut VirtualCpu<'_>) -> Result<(), Stop> {
        if self.placed.len() == PLACED || (!self.placed.is_empty() && self.below(3) == 0) {
            let at = self.below(self.placed.len());
            let (start, len) = self.placed.swap_remove(at);
            for page in (start..start + len).step_by(PAGE_SIZE as usize) {
                assert_eq!(cpu.load(page), Ok(page ^ self.number as u64));
            }
            // Removed before the memory becomes free, because another CPU may get it afterwards.
            self.all_placed.borrow_mut().remove(&start);
            return cpu.munmap(start, len);
        }
        let len = (1 + self.below(4)) as u64 * PAGE_SIZE;
        let start = cpu.mmap(None, len, RW, PRIVATE)?;
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

    /// Makes any call on the shared range, with any result.
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

/// The parameters of a storm.
#[derive(Clone, Copy, Debug)]
pub struct Storm<'a> {
    pub profile: &'a Profile,
    pub cpus: usize,
    pub seed: u64,
    /// Steps of each CPU.
    pub steps: usize,
}

impl Storm<'_> {
    /// Runs the storm under the knobs `settings`. Returns the simulated time, in picoseconds, and
    /// the counters.
    ///
    /// # Panics
    /// If a CPU finds wrong contents, or the audit fails.
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
