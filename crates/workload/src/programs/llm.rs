//! `llm`: processes that repeatedly read models from files larger than memory.
//!
//! Modelled on servers of large language models: each process maps the file of one of three models,
//! read-only and shared, and generates tokens, each of which reads the whole model in order.
//! Processes with the same model start at different places. With fewer processes than models, each
//! process alternates between several. All files together are five quarters of both nodes' memory,
//! so pages are demoted to the slow node, evicted and read again.
//!
//! The processes' CPUs take turns with the work of a system thread: they move pages between the
//! nodes, and evict pages when memory is short.

use super::tiered::{FAST, Fresh, RATIO, SEED, background, moments, random, tiers};
use crate::file::{Contents, FileSpec};
use crate::param::{Kind, Param, ParamError, Settings};
use crate::program::{Passes, Program, THREADS};
use crate::system::{Crew, Failure, Mode, Needs, Tally, Task, Tiers, Worker};
use faultless::{MapFlags, PAGE_SIZE, Prot, VirtRange};

static PASSES: Param = Param {
    name: "passes",
    kind: Kind::Count(1, 1 << 30),
    default: 4,
    help: "number of times that a process reads its models",
};

/// The number of models.
const MODELS: usize = 3;
/// The pages read by a process between two calls of `background` on any CPU, and the pages promoted
/// per call.
const BACKGROUND_EACH: u64 = 16;
const PROMOTED: u64 = 8;

/// Read files larger than memory, in order.
#[derive(Clone, Copy, Debug)]
pub struct Llm {
    tiers: Tiers,
    threads: u64,
    passes: Passes,
    seed: u64,
}

/// The data of a process.
#[derive(Clone, Copy, Debug)]
pub struct State {
    models: [VirtRange; MODELS],
    fresh: Fresh,
}

impl Llm {
    /// Returns the pages of a model.
    const fn pages(&self) -> u64 {
        self.tiers.bytes() / PAGE_SIZE * 5 / 4 / MODELS as u64
    }

    /// Returns the number of models for each of `processes`: 1 with at least as many processes as
    /// models.
    fn models_of(processes: usize) -> usize {
        if processes < MODELS { MODELS } else { 1 }
    }
}

/// Returns the page of a model's `pages` that a `worker` reads first. The workers are spread over
/// the model; with a seed, each starts at a random page in its part.
fn begin(pages: u64, seed: u64, worker: Worker) -> u64 {
    let (index, count) = (worker.index as u64, worker.count.max(1) as u64);
    let first = pages * index / count;
    match seed {
        0 => first,
        seed => first + random(seed, worker.index).below((pages / count).max(1)),
    }
}

// SAFETY: a process loads from its own mappings, which stay mapped, and stores to its own fresh
// pages.
unsafe impl Program for Llm {
    const NAME: &'static str = "llm";
    const SUMMARY: &'static str = "processes repeatedly read model files larger than memory";
    const UNIT: &'static str = "pages";
    const PARAMS: &'static [&'static Param] = &[&FAST, &RATIO, &PASSES, &SEED];
    const MODES: &'static [Mode] = &[Mode::Processes];

    type State = State;

    fn new(settings: &Settings) -> Result<Self, ParamError> {
        let threads = settings.get(&THREADS);
        Ok(Self {
            tiers: tiers(settings)?,
            threads,
            passes: Passes::new(settings, &PASSES),
            seed: settings.get(&SEED),
        })
    }

    fn needs(&self, _: &Crew) -> Needs {
        let all = self.tiers.bytes();
        Needs { written: all, largest: all, tiers: Some(self.tiers) }
    }

    fn files(&self, _: &Crew) -> Vec<FileSpec> {
        vec![FileSpec { bytes: self.pages() * PAGE_SIZE, contents: Contents::Numbers }; MODELS]
    }

    fn prepare<T: Task>(&self, task: &mut T) -> Result<State, Failure> {
        let mut models = [VirtRange::new(0, 0); MODELS];
        for (file, model) in models.iter_mut().enumerate() {
            let len = self.pages() * PAGE_SIZE;
            let start = task.mmap_file(file, (None, len), Prot::READ, MapFlags::SHARED, 0)?;
            *model = VirtRange::new(start, start + len);
        }
        let read = self.pages() * Self::models_of(self.threads as usize) as u64;
        let fresh = Fresh::map(task, self.tiers, (1, self.threads), read)?;
        Ok(State { models, fresh })
    }

    fn work<T: Task>(&self, task: &mut T, state: &State, worker: Worker) -> Result<Tally, Failure> {
        let moments = moments(self.seed, worker.index);
        let mut own = state.fresh.of(Worker { index: 0, count: 1 }, moments);
        let mut tally = Tally::default();
        let begin = begin(self.pages(), self.seed, worker);
        let mine = (worker.index % MODELS..MODELS).step_by(worker.count.min(MODELS));
        let mine = mine.take(Self::models_of(worker.count));
        while self.passes.more(task, tally.extra) {
            for model in mine.clone() {
                let model = state.models[model];
                for number in (begin..self.pages()).chain(0..begin) {
                    let page = model.start + number * PAGE_SIZE;
                    let found = task.load(page)?;
                    Failure::check("the first word of a page of a model", page, number, found)?;
                    tally.operations += 1;
                    own.after(task, tally.operations)?;
                    background(task, worker, (tally.operations, BACKGROUND_EACH), PROMOTED);
                }
            }
            tally.extra += 1;
        }
        Ok(tally)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_process_starts_in_its_part_of_the_model() {
        let begins = |seed| {
            let begin = |index| begin(1000, seed, Worker { index, count: 16 });
            (0..16).map(begin).collect::<Vec<_>>()
        };
        for seed in 0..20 {
            for (index, begin) in (0..).zip(begins(seed)) {
                let part = 1000 * index / 16..1000 * (index + 1) / 16;
                assert!(part.contains(&begin), "{begin} of {part:?}, seed {seed}");
            }
        }
        assert_eq!(begins(0)[1], 1000 / 16);
        assert_ne!(begins(1), begins(2));
    }
}
