//! `text`: a program whose code exceeds the reach of the instruction TLB.
//!
//! Databases, browsers and compilers have tens to hundreds of megabytes of code, and spend part of
//! their time in page walks for instructions. Here the code is a file of functions that return at
//! once, mapped for execution at an address congruent to its offset modulo 2 MiB, as linkers lay
//! out programs for huge pages. A pass calls one function of each page, in an order in which
//! consecutive calls are far apart. In a TLB that is too small, every entry is therefore replaced
//! before its next use. Processes run one file; threads share one mapping of the file.

use crate::file::{Contents, FUNCTION, FUNCTIONS, FileSpec};
use crate::param::{Kind, Param, ParamError, Settings};
use crate::program::{Passes, Program};
use crate::system::{Crew, Failure, Mode, Needs, Tally, Task, Worker};
use faultless::{Advice, MapFlags, PAGE_SIZE, Prot, VirtRange};

static SIZE: Param =
    Param { name: "size", kind: Kind::Size, default: 32 << 20, help: "size of the code" };
static PASSES: Param = Param {
    name: "passes",
    kind: Kind::Count(1, 1 << 30),
    default: 8,
    help: "number of calls to a function of each page",
};
static ADVISE: Param = Param {
    name: "advise",
    kind: Kind::Choice(&["no", "huge"]),
    default: 0,
    help: "huge: request huge pages with MADV_HUGEPAGE",
};

/// Bytes of a huge page.
const HUGE: u64 = 2 << 20;

/// `text`: call functions all over a large program.
#[derive(Clone, Copy, Debug)]
pub struct Text {
    size: u64,
    passes: Passes,
    advise: bool,
}

/// Returns the distance in pages to the next call: near the golden section of the number of pages,
/// and without a common divisor, so that a pass reaches each page once.
fn stride(pages: u64) -> u64 {
    let gcd = |mut a: u64, mut b: u64| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    // 610/987 is near enough to the golden section, and exact.
    let near = (u128::from(pages) * 610 / 987) as u64;
    (near.max(1)..).find(|&stride| gcd(stride, pages) == 1).unwrap_or(1)
}

// SAFETY: loads and calls are in the mapping of code made by `prepare`, and there are no stores.
// `prepare` unmaps only memory around the mapping, which it reserved itself.
unsafe impl Program for Text {
    const NAME: &'static str = "text";
    const SUMMARY: &'static str = "processes call functions all over a large program";
    const UNIT: &'static str = "calls";
    const PARAMS: &'static [&'static Param] = &[&SIZE, &PASSES, &ADVISE];
    const MODES: &'static [Mode] = &[Mode::Processes, Mode::Threads];

    type State = VirtRange;

    fn new(settings: &Settings) -> Result<Self, ParamError> {
        let passes = Passes::new(settings, &PASSES);
        Ok(Self { size: settings.get(&SIZE), passes, advise: settings.get(&ADVISE) == 1 })
    }

    fn needs(&self, _: &Crew) -> Needs {
        // The pages of the file, independent of the number of mappings.
        Needs { written: self.size, largest: self.size.saturating_add(HUGE), ..Needs::default() }
    }

    fn files(&self, _: &Crew) -> Vec<FileSpec> {
        vec![FileSpec { bytes: self.size, contents: Contents::Code }]
    }

    fn prepare<T: Task>(&self, task: &mut T) -> Result<VirtRange, Failure> {
        let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::NORESERVE;
        let reserved = task.mmap(None, self.size + HUGE, Prot::empty(), flags)?;
        let start = reserved.next_multiple_of(HUGE);
        let text = VirtRange::new(start, start + self.size);
        let fixed = MapFlags::PRIVATE | MapFlags::FIXED;
        task.mmap_file(0, (Some(start), self.size), Prot::READ | Prot::EXEC, fixed, 0)?;
        for (from, to) in [(reserved, text.start), (text.end, reserved + self.size + HUGE)] {
            if from < to {
                task.munmap(from, to - from)?;
            }
        }
        if self.advise {
            task.madvise(text.start, text.len(), Advice::HugePage)?;
        }
        Ok(text)
    }

    fn work<T: Task>(&self, task: &mut T, text: &VirtRange, _: Worker) -> Result<Tally, Failure> {
        let (pages, mut tally) = (text.pages(), Tally::default());
        let (stride, mut page) = (stride(pages), 0);
        while self.passes.more(task, tally.extra) {
            for _ in 0..pages {
                let function = 1 + (page + tally.extra) % FUNCTIONS;
                task.call(text.start + page * PAGE_SIZE + function * FUNCTION)?;
                page += stride;
                if page >= pages {
                    page -= pages;
                }
            }
            tally.operations += pages;
            tally.extra += 1;
        }
        Ok(tally)
    }

    fn finish<T: Task>(&self, task: &mut T, text: &VirtRange, _: Worker) -> Result<(), Failure> {
        for (index, page) in (text.start..text.end).step_by(PAGE_SIZE as usize).enumerate() {
            Failure::check("the number of a page of code", page, index as u64, task.load(page)?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pass_reaches_each_page_once() {
        for pages in (1..200).chain([512, 987, 1974, 4096, 117_954]) {
            let stride = stride(pages);
            assert!(pages <= 2 || stride < pages, "{pages}: {stride}");
            let mut seen = vec![false; pages as usize];
            (0..pages).for_each(|call| seen[(call * stride % pages) as usize] = true);
            assert!(seen.into_iter().all(|seen| seen), "{pages}: {stride}");
        }
    }
}
