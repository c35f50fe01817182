//! `ebizzy`: the web application server of Valerie Henson (2006), as run with `-m`.
//!
//! A few large chunks of records hold the data. For each request a thread selects a random chunk,
//! maps memory for a copy, copies the chunk, finds a random record in the copy by binary search,
//! and unmaps the copy: one record. With `touch=yes` (the original's `-T`) the thread writes to
//! every page of the new memory instead of copying and searching, as for the published `-mTt`
//! figures. The original runs for 10 seconds and prints records per second.

use super::random::Random;
use super::touch::{map, unmap};
use crate::param::{Kind, Param, ParamError, Settings};
use crate::program::{Passes, Program};
use crate::system::{Crew, Failure, Needs, Tally, Task, Worker};
use faultless::{PAGE_SIZE, VirtRange};

static CHUNKS: Param =
    Param { name: "chunks", kind: Kind::Count(1, 4096), default: 10, help: "chunks of data" };
static CHUNK: Param =
    Param { name: "chunk", kind: Kind::Size, default: 512 << 10, help: "size of a chunk" };
static RECORDS: Param = Param {
    name: "records",
    kind: Kind::Count(1, 1 << 30),
    default: 300,
    help: "records that one thread searches",
};
static TOUCH: Param = Param {
    name: "touch",
    kind: Kind::Choice(&["no", "yes"]),
    default: 0,
    help: "write to every page of the copy instead of copying and searching",
};

/// Bytes in a record; record `i` of a chunk holds the number `i`.
const RECORD: u64 = 8;

/// `ebizzy`: allocate, copy, search, free.
#[derive(Clone, Copy, Debug)]
pub struct Ebizzy {
    chunks: u64,
    chunk: u64,
    passes: Passes,
    touch: bool,
}

impl Ebizzy {
    /// Finds `key` in the sorted records of `copy` by binary search, with one load per step.
    #[inline]
    fn search<T: Task>(task: &mut T, copy: VirtRange, key: u64) -> Result<u64, Failure> {
        let (mut low, mut high) = (0, copy.len() / RECORD);
        while low < high {
            let middle = low + (high - low) / 2;
            if task.load(copy.start + middle * RECORD)? < key {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        Ok(copy.start + low * RECORD)
    }
}

// SAFETY: the chunks of `prepare` stay mapped, and only `prepare` stores to them. A copy belongs to
// its worker, and every address in a copy lies below its length (`search` ends beyond the length
// only for a missing key, and all keys exist, which is checked first).
unsafe impl Program for Ebizzy {
    const NAME: &'static str = "ebizzy";
    const SUMMARY: &'static str = "threads allocate, copy, search and free chunks of data";
    const UNIT: &'static str = "records";
    const PARAMS: &'static [&'static Param] = &[&CHUNKS, &CHUNK, &RECORDS, &TOUCH];

    type State = Vec<VirtRange>;

    fn new(settings: &Settings) -> Result<Self, ParamError> {
        Ok(Self {
            chunks: settings.get(&CHUNKS),
            chunk: settings.get(&CHUNK),
            passes: Passes::new(settings, &RECORDS),
            touch: settings.get(&TOUCH) == 1,
        })
    }

    fn needs(&self, crew: &Crew) -> Needs {
        // The chunks of each process, and a copy of a chunk for each worker.
        let chunks = self.chunks * crew.processes() as u64 + crew.workers as u64;
        Needs::written(self.chunk.saturating_mul(chunks))
    }

    fn prepare<T: Task>(&self, task: &mut T) -> Result<Vec<VirtRange>, Failure> {
        let mut chunks = Vec::new();
        for _ in 0..self.chunks {
            let chunk = map(task, self.chunk)?;
            for record in 0..chunk.len() / RECORD {
                task.store(chunk.start + record * RECORD, record)?;
            }
            chunks.push(chunk);
        }
        Ok(chunks)
    }

    fn work<T: Task>(
        &self,
        task: &mut T,
        chunks: &Vec<VirtRange>,
        worker: Worker,
    ) -> Result<Tally, Failure> {
        let mut random = Random::new(worker.index as u64);
        let mut records = 0;
        while self.passes.more(task, records) {
            let chunk = chunks[random.below(self.chunks) as usize];
            let copy = map(task, self.chunk)?;
            if self.touch {
                for page in (copy.start..copy.end).step_by(PAGE_SIZE as usize) {
                    task.store(page, 0xff)?;
                }
            } else {
                task.copy(copy.start, chunk.start, self.chunk)?;
                let key = random.below(self.chunk / RECORD);
                let found = Self::search(task, copy, key)?;
                let expected = copy.start + key * RECORD;
                Failure::check("the place of the record found", found, expected, found)?;
                Failure::check("the record found", found, key, task.load(found)?)?;
            }
            unmap(task, copy)?;
            records += 1;
        }
        Ok(Tally { operations: records, extra: 0 })
    }

    fn finish<T: Task>(
        &self,
        task: &mut T,
        chunks: &Vec<VirtRange>,
        _: Worker,
    ) -> Result<(), Failure> {
        // Copies were written to separate memory, never to the chunks.
        for chunk in chunks {
            for record in (0..chunk.len() / RECORD).step_by(64) {
                let addr = chunk.start + record * RECORD;
                Failure::check("a record", addr, record, task.load(addr)?)?;
            }
        }
        Ok(())
    }
}
