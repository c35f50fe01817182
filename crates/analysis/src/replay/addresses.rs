//! A trace of addresses: the TLB activity of a program, and the effect of code in pages of 2 MiB.
//!
//! The trace is read twice: to find the program's code, and to run through simulated TLBs with
//! three layouts of the code, side by side. Data stays in pages of 4 KiB.

use crate::context::Context;
use crate::error::Error;
use crate::figures::{Figures, Number};
use crate::stop;
use faultless::{Access, FrameNumber, PAGE_SHIFT, PAGE_SIZE};
use faultless_native::TlbStats;
use faultless_native::mmu::{PageSize, Translation};
use faultless_native::tlb::{PROCESSOR, Tlb};
use faultless_trace::lackey::text::{FOLIO, Folio, Pages, Text, pages};
use faultless_trace::lackey::{Addresses, Kind};
use serde_json::Map;

/// The number of accesses between two checks for an interruption by the user.
const LOOK: usize = 1 << 16;
/// The start address of moved code: above all addresses of programs on Linux, which use the lower
/// half of this range.
const MOVED: u64 = 1 << 46;

/// The layout of code, and its page sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Unchanged, in pages of 4 KiB.
    Small,
    /// Unchanged; pages of 2 MiB inside the code are mapped by one entry.
    Whole,
    /// Each extent starts at a multiple of 2 MiB and is padded to a multiple of 2 MiB, in pages of
    /// 2 MiB.
    Aligned,
}

impl Layout {
    /// All layouts.
    pub const ALL: [Self; 3] = [Self::Small, Self::Whole, Self::Aligned];

    /// Returns the name in results.
    const fn name(self) -> &'static str {
        match self {
            Self::Small => "text=4K",
            Self::Whole => "text=2M_whole",
            Self::Aligned => "text=2M_aligned",
        }
    }
}

/// The code, and the result of each layout.
#[derive(Debug)]
pub struct Code {
    /// The extents of the code.
    pub text: Text,
    /// The pages of 2 MiB that are inside the code.
    pub whole: Vec<Folio>,
    /// The start of each extent in the moved layout.
    moved: Vec<u64>,
    folios: u64,
}

impl Code {
    fn new(text: Text) -> Self {
        let whole = text.whole();
        let (mut moved, mut folios) = (Vec::with_capacity(text.extents.len()), 0);
        for extent in &text.extents {
            moved.push(MOVED + folios * PageSize::Size2M.bytes());
            folios += extent.padded();
        }
        Self { text, whole, moved, folios }
    }

    /// Returns the address of a byte of a page under `layout`, and the size of its page.
    #[inline]
    fn place(&self, addr: u64, layout: Layout) -> (u64, PageSize) {
        let page = addr >> PAGE_SHIFT;
        match layout {
            Layout::Small => (addr, PageSize::Size4K),
            Layout::Whole => {
                let start = page / FOLIO * FOLIO * PAGE_SIZE;
                let found = self.whole.binary_search_by_key(&start, |folio| folio.addr);
                (addr, if found.is_ok() { PageSize::Size2M } else { PageSize::Size4K })
            }
            Layout::Aligned => match self.text.find(page) {
                Some(at) => {
                    let offset = addr - self.text.extents[at].first * PAGE_SIZE;
                    (self.moved[at] + offset, PageSize::Size2M)
                }
                None => (addr, PageSize::Size4K),
            },
        }
    }

    /// Returns the pages of 2 MiB under `layout`, and the fetches from them.
    pub fn coverage(&self, layout: Layout) -> (u64, u64) {
        match layout {
            Layout::Small => (0, 0),
            Layout::Whole => {
                let fetches = self.whole.iter().map(|folio| folio.fetches).sum();
                (self.whole.len() as u64, fetches)
            }
            Layout::Aligned => (self.folios, self.text.covered()),
        }
    }
}

/// Simulates one access to one page, by a CPU with this page in its page tables.
fn translate(tlb: &Tlb, addr: u64, size: PageSize, access: Access) {
    if tlb.lookup(addr, access).is_none() {
        tlb.count_walk(access, false);
        // The frame is never accessed.
        tlb.fill(addr, access, Translation::new(FrameNumber(0), size, true, true, true));
    }
}

/// The results of a trace.
#[derive(Debug)]
pub struct Simulated {
    /// The pages and the accesses of the trace.
    pub pages: Pages,
    /// The code of the program.
    pub code: Code,
    /// The activity of the TLBs under each of [`Layout::ALL`].
    pub stats: [TlbStats; 3],
    /// Accesses beyond user space: to the kernel's page of calls (vsyscall), which uses no TLB
    /// entries of programs.
    pub left_out: u64,
}

/// Reads the trace twice. Returns `None` after a request to stop.
///
/// # Errors
/// The trace is invalid.
pub fn simulate(trace: &mut Addresses) -> Result<Option<Simulated>, Error> {
    let failed = Error::Trace;
    let user = |access: &faultless_trace::lackey::Access| access.addr + (access.size - 1) < MOVED;
    let (mut seen, mut left_out) = (Pages::default(), 0);
    for (at, access) in trace.accesses().map_err(failed)?.enumerate() {
        if at % LOOK == 0 && stop::requested() {
            return Ok(None);
        }
        let access = access.map_err(failed)?;
        if user(&access) {
            seen.note(access);
        } else {
            left_out += 1;
        }
    }
    let code = Code::new(seen.text());
    let tlbs = Layout::ALL.map(|layout| (layout, Tlb::new()));
    for (at, access) in trace.accesses().map_err(failed)?.enumerate() {
        if at % LOOK == 0 && stop::requested() {
            return Ok(None);
        }
        let access = access.map_err(failed)?;
        let kinds: &[Access] = match access.kind {
            Kind::Fetch => &[Access::Execute],
            Kind::Load => &[Access::Read],
            Kind::Store => &[Access::Write],
            Kind::Modify => &[Access::Read, Access::Write],
        };
        for page in pages(access).filter(|_| user(&access)) {
            for (layout, tlb) in &tlbs {
                let (addr, size) = code.place(page << PAGE_SHIFT, *layout);
                kinds.iter().for_each(|kind| translate(tlb, addr, size, *kind));
            }
        }
    }
    Ok(Some(Simulated { pages: seen, code, stats: tlbs.map(|(_, tlb)| tlb.stats()), left_out }))
}

/// A count of the TLBs: its description, its name in results, and its value.
pub type Count = (&'static str, &'static str, fn(&TlbStats) -> u64);

/// The counts of the TLBs.
pub const COUNTS: [Count; 6] = [
    ("fetches: first-level misses", "itlb_first_level_misses", |it| {
        it.instruction_second_hits + it.instruction_walks
    }),
    ("fetches: page walks", "iTLB-load-misses", |it| it.instruction_walks),
    ("loads: first-level misses", "dtlb_load_first_level_misses", |it| {
        it.load_second_hits + it.load_walks
    }),
    ("loads: page walks", "dTLB-load-misses", |it| it.load_walks),
    ("stores: first-level misses", "dtlb_store_first_level_misses", |it| {
        it.store_second_hits + it.store_walks
    }),
    ("stores: page walks", "dTLB-store-misses", |it| it.store_walks),
];

impl Simulated {
    /// Passes the counts of the trace `name` to `figures`.
    ///
    /// # Errors
    /// A figure cannot be written.
    pub fn figures(&self, figures: &mut dyn Figures, name: &str) -> Result<(), Error> {
        let [fetches, loads, stores] = self.pages.counts;
        for (layout, stats) in Layout::ALL.into_iter().zip(&self.stats) {
            let context = Context {
                machine: "tlb-simulated".into(),
                workload: format!("replay:{name}"),
                cpus: 1,
                setting: layout.name().into(),
                params: Map::from_iter([
                    ("trace".to_owned(), name.into()),
                    ("processor".to_owned(), PROCESSOR.into()),
                ]),
                knobs: Map::new(),
                basis: None,
            };
            let (folios, covered) = self.code.coverage(layout);
            let counts = [
                ("fetches", fetches),
                ("loads", loads),
                ("stores", stores),
                ("text_folios", folios),
                ("fetches_in_folios", covered),
            ];
            let rows = COUNTS.iter().map(|(_, metric, figure)| (*metric, figure(stats)));
            for (metric, count) in counts.into_iter().chain(rows) {
                figures.figure(&context, metric, "count", Number::Whole(count))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// Simulates a trace of these lines.
    fn simulated(lines: impl IntoIterator<Item = String>) -> Simulated {
        let text: String = lines.into_iter().map(|line| line + "\n").collect();
        let mut trace = Addresses::of_bytes(Path::new("t"), text.into_bytes().leak());
        simulate(&mut trace).expect("a valid trace").expect("not interrupted")
    }

    /// Code of 8 MiB, starting in the middle of a page of 2 MiB, called page by page, three times;
    /// a load of a constant in the code, and a load of data.
    #[test]
    fn code_that_thrashes_small_pages_fits_in_large_pages() {
        let start = 0x4010_0000u64;
        let pages = 2048;
        let pass = |_| {
            (0..pages).flat_map(move |page| {
                let fetch = format!("I  {:x},4", start + page * PAGE_SIZE);
                let load = format!(" L {:x},8", start + page * PAGE_SIZE + 64);
                [fetch, load, " M 1fff000,8".to_owned()]
            })
        };
        let simulated = simulated((0..3).flat_map(pass));
        assert_eq!(simulated.pages.counts, [3 * pages, 6 * pages, 3 * pages]);
        assert_eq!(simulated.code.text.extents.len(), 1);
        let coverage = Layout::ALL.map(|layout| simulated.code.coverage(layout));
        // Half of the first page of 2 MiB, three full pages, and half of the last; four pages if
        // moved.
        assert_eq!(coverage, [(0, 0), (3, 3 * 3 * 512), (4, 3 * pages)]);
        let [small, whole, aligned] = simulated.stats;
        // More pages than entries of the second level. Fetches find entries filled by data
        // accesses.
        assert_eq!(small.instruction_walks, 3 * pages);
        assert!(small.load_second_hits >= 3 * pages, "{small:?}");
        // Code sometimes evicts the entry of the data.
        assert!((1..32).contains(&small.load_walks) && small.store_walks == 0, "{small:?}");
        // The pages at the ends, 512 of 4 KiB, stay in the second level.
        assert_eq!(whole.instruction_walks, 512 + 3);
        assert_eq!(whole.instruction_second_hits, 2 * 512);
        assert_eq!(aligned.instruction_walks, 4);
        assert_eq!((aligned.instruction_second_hits, aligned.instruction_hits), (0, 3 * pages - 4));
        assert_eq!(aligned.load_walks, 1);
    }

    #[test]
    fn accesses_beyond_user_space_are_excluded_and_reported() {
        let lines = ["I  1000,1", "I  ffffffffff600000,3", " L 7fffffffffff,8"];
        let simulated = simulated(lines.map(str::to_owned));
        assert_eq!((simulated.left_out, simulated.pages.counts), (2, [1, 0, 0]));
    }

    /// An access to two pages looks both up.
    #[test]
    fn access_across_pages_translates_both() {
        let simulated = simulated(["I  1ffe,4", " M 5ffc,8"].map(str::to_owned));
        let small = simulated.stats[0];
        assert_eq!((small.instruction_walks, small.load_walks), (2, 2));
        assert_eq!((small.store_walks, small.data_hits), (0, 2));
    }
}
