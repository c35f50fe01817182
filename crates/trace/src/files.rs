//! Faults on mapped files with other sizes of fault-around.
//!
//! A load or fetch from a file maps the surrounding pages that are in the page cache
//! (`fault_around_bytes`, 64 KiB by default). Recordings are made without fault-around.

use crate::event::{Access, Backing, Birth, Kind, Trace};
use crate::page_set::{PageSet, pages};
use crate::plan::PlanError;
use faultless::PAGE_SIZE;
use rangemap::RangeMap;
use std::ops::Range;

/// The orders of pages that one fault maps: 64 KiB, 256 KiB, 1 MiB and 2 MiB.
pub const ORDERS: [u8; 4] = [4, 6, 8, 9];
/// The smallest mapping for which an additional call is worthwhile, in bytes.
const LARGE: u64 = 1 << 20;

/// Counts of faults on files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Files {
    /// Faults of loads and fetches, with each size of [`ORDERS`].
    pub loads: [u64; ORDERS.len()],
    /// Pages that the faults map, with each size, at most.
    pub mapped: [u64; ORDERS.len()],
    /// Large mappings without executable code, and mostly loaded from.
    pub large: u64,
    /// Their pages, and the loads of `loads` in them with the default size.
    pub large_pages: u64,
    /// See `large_pages`.
    pub large_loads: u64,
}

impl Files {
    /// Counts `trace`. A large mapping counts if the program touches the share `mostly` of its
    /// pages, from 0 to 1.
    ///
    /// # Errors
    /// The trace does not pass [`Trace::check`].
    pub fn of(trace: &Trace, mostly: f64) -> Result<Self, PlanError> {
        trace.check().map_err(|(event, reason)| PlanError { event, reason })?;
        let mut walk = Walk { mostly, ..Walk::default() };
        walk.memories.resize_with(trace.processes.len(), Memory::default);
        for event in &trace.events {
            let process = trace.threads[event.thread as usize].process as usize;
            match event.kind {
                Kind::Spawn { child, birth: Birth::Fork } => {
                    let to = trace.threads[child as usize].process as usize;
                    // The entries of files are not copied.
                    walk.memories[to].mapped = walk.memories[process].mapped.clone();
                }
                Kind::Exec => walk.end(process),
                kind => walk.step(process, kind),
            }
        }
        (0..trace.processes.len()).for_each(|process| walk.end(process));
        Ok(walk.out)
    }
}

#[derive(Default)]
struct Memory {
    /// The mappings, by page, with an index in `large`.
    mapped: RangeMap<u64, Option<usize>>,
    /// Mapped windows of each size.
    around: [PageSet; ORDERS.len()],
}

/// A large mapping.
struct Large {
    pages: u64,
    touched: PageSet,
    loads: u64,
}

#[derive(Default)]
struct Walk {
    out: Files,
    mostly: f64,
    memories: Vec<Memory>,
    large: Vec<Large>,
}

impl Walk {
    fn step(&mut self, process: usize, kind: Kind) {
        match kind {
            Kind::Map { start, len, prot, backing, .. }
            | Kind::Area { start, len, prot, backing } => {
                let range = pages(start, len);
                self.unmap(process, range.clone());
                if !matches!(backing, Backing::File | Backing::SharedFile) {
                    return;
                }
                let executes = prot.contains(crate::event::Prot::EXEC);
                let large = (len >= LARGE && !executes).then(|| {
                    let pages = len / PAGE_SIZE;
                    self.large.push(Large { pages, touched: PageSet::default(), loads: 0 });
                    self.large.len() - 1
                });
                self.memories[process].mapped.insert(range, large);
            }
            Kind::Unmap { start, len } => self.unmap(process, pages(start, len)),
            Kind::Fault { page, access, present: false, .. } => {
                self.fault(process, page / PAGE_SIZE, access);
            }
            _ => {}
        }
    }

    fn fault(&mut self, process: usize, page: u64, access: Access) {
        let memory = &mut self.memories[process];
        let Some((mapping, large)) = memory.mapped.get_key_value(&page) else { return };
        let large = large.map(|at| &mut self.large[at]);
        if access == Access::Write {
            return;
        }
        let mut first = false;
        for (at, order) in ORDERS.iter().enumerate() {
            if !memory.around[at].insert(page >> order) {
                continue;
            }
            let window = page >> order << order;
            let end = (window + (1 << order)).min(mapping.end);
            self.out.loads[at] += 1;
            self.out.mapped[at] += end - window.max(mapping.start);
            first |= at == 0;
        }
        if let Some(large) = large {
            large.touched.insert(page);
            large.loads += u64::from(first);
        }
    }

    fn unmap(&mut self, process: usize, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let memory = &mut self.memories[process];
        memory.mapped.remove(range.clone());
        for (around, order) in memory.around.iter_mut().zip(ORDERS) {
            around.remove(range.start >> order..range.end.div_ceil(1 << order));
        }
    }

    fn end(&mut self, process: usize) {
        self.memories[process] = Memory::default();
        let mostly = self.mostly;
        // Mappings of other processes are counted at the end of the last process.
        if self.memories.iter().any(|memory| !memory.mapped.is_empty()) {
            return;
        }
        for large in self.large.drain(..) {
            if large.touched.len() as f64 >= mostly * large.pages as f64 {
                self.out.large += 1;
                self.out.large_pages += large.pages;
                self.out.large_loads += large.loads;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Prot;

    const START: u64 = 1 << 40;

    fn map(prot: Prot) -> Kind {
        let len = 1024 * PAGE_SIZE;
        Kind::Map { start: START, len, prot, flags: 1, backing: Backing::SharedFile }
    }

    fn of(first: Kind, faults: impl Iterator<Item = (u64, Access)>) -> Files {
        let fault = |(page, access)| Kind::first(START + page * PAGE_SIZE, access);
        let events: Vec<_> = [first].into_iter().chain(faults.map(fault)).collect();
        Files::of(&Trace::of_one_thread(events), 0.9).expect("a valid trace")
    }

    #[test]
    fn larger_windows_save_loads_in_sequence() {
        let all = || (0..1024).map(|page| (page, Access::Read));
        let got = of(map(Prot::READ), all());
        assert_eq!((got.loads, got.mapped), ([64, 16, 4, 2], [1024; 4]));
        assert_eq!((got.large, got.large_pages, got.large_loads), (1, 1024, 64));
        let code = of(map(Prot::READ | Prot::EXEC), all());
        assert_eq!((code.loads[0], code.large), (64, 0));
    }

    #[test]
    fn sparse_loads_map_pages_in_vain() {
        let got = of(map(Prot::READ), (0..4).map(|n| (n * 256 + 255, Access::Read)));
        assert_eq!((got.loads, got.mapped), ([4, 4, 4, 2], [64, 256, 1024, 1024]));
        assert_eq!(got.large, 0, "hardly used");
        let stores = of(map(Prot::READ | Prot::WRITE), (0..8).map(|page| (page, Access::Write)));
        assert_eq!(stores, Files::default());
    }
}
