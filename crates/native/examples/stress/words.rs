//! The model of contents: the possible values of each word of a page.
//!
//! Each thread owns one word of every page and is the only writer of the word. A value names its
//! region, page, writer, process and generation, so each load detects a misplaced value. The owner
//! knows the exact value. Other threads know a lower bound of the generation.
//!
//! Some calls drop pages used by other threads. Such a call makes the page's count of cuts odd, and
//! even again at its end. Knowledge from before a cut is void. After the cut, older values must not
//! come back.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::ops::Range;
use std::sync::Arc;

/// The most threads of a round.
pub const WRITERS: usize = 8;

const GENERATION_BITS: u32 = 24;
const TAG_BITS: u32 = 14;
const WRITER_BITS: u32 = 4;
const PAGE_BITS: u32 = 10;

/// The position of a word: region, page, writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    id: u64,
    page: u64,
    writer: u64,
}

/// A value, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    place: Place,
    tag: u64,
    generation: u64,
}

impl Stamp {
    fn pack(self) -> u64 {
        let Self { place: Place { id, page, writer }, tag, generation } = self;
        (((id << PAGE_BITS | page) << WRITER_BITS | writer) << TAG_BITS | tag) << GENERATION_BITS
            | generation
    }

    fn unpack(value: u64) -> Self {
        let mut left = value;
        let mut low = |bits: u32| {
            let part = left & ((1 << bits) - 1);
            left >>= bits;
            part
        };
        let (generation, tag) = (low(GENERATION_BITS), low(TAG_BITS));
        let (writer, page) = (low(WRITER_BITS), low(PAGE_BITS));
        Self { place: Place { id: left, page, writer }, tag, generation }
    }
}

/// The knowledge about a word: `generation` at least, or exactly, as long as the cuts are `cuts`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Known {
    generation: u64,
    exact: bool,
    cuts: u64,
}

const CUTS_BITS: u32 = 31;

impl Known {
    fn pack(self) -> u64 {
        (self.generation << 1 | u64::from(self.exact)) << CUTS_BITS
            | self.cuts & ((1 << CUTS_BITS) - 1)
    }

    fn unpack(word: u64) -> Self {
        let high = word >> CUTS_BITS;
        Self { generation: high >> 1, exact: high & 1 != 0, cuts: word & ((1 << CUTS_BITS) - 1) }
    }
}

#[derive(Debug, Default)]
struct Word {
    /// The generation of the last store that began, set before the store.
    begun: AtomicU64,
    /// The generation of the last store that returned, set after the store.
    done: AtomicU64,
    /// A packed [`Known`], written by the owner alone.
    known: AtomicU64,
    /// Generations up to this number were dropped by a cut.
    dead: AtomicU64,
    /// Generations up to this number belong to the forking process.
    inherited: u64,
}

#[derive(Debug, Default)]
struct Page {
    /// Odd during a cut.
    cuts: AtomicU64,
    /// `MADV_FREE` was called: the page may become zeros at any time until the next store.
    lazy: AtomicBool,
    words: [Word; WRITERS],
}

/// A store that has begun.
#[derive(Clone, Copy, Debug)]
pub struct Attempt {
    /// The value to store.
    pub value: u64,
    /// The cuts of the page at the begin.
    pub cuts: Option<u64>,
}

/// The state of the model before a load.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    cuts: Option<u64>,
    known: u64,
}

/// The party that loads a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// The owner of the word, or any thread at a quiet moment.
    Owner,
    /// Another thread, while the owner may be storing.
    Other,
}

/// The source of a value.
enum Source {
    Zero,
    /// A store to this memory, with its generation.
    Stored(u64),
    /// A store to the file below this memory.
    File,
}

/// The values of a range of pages: a file, or private memory of a process.
#[derive(Debug)]
pub struct Contents {
    id: u64,
    tag: u64,
    /// The tags of the ancestor processes.
    lineage: Vec<u64>,
    pages: Vec<Page>,
    /// The file whose pages are copied on a store.
    below: Option<Arc<Contents>>,
}

impl Contents {
    /// `pages` pages of zeros, or of `below`.
    pub fn new(id: u64, tag: u64, pages: usize, below: Option<Arc<Self>>) -> Self {
        assert!(id > 0 && pages < 1 << PAGE_BITS && tag < 1 << TAG_BITS, "the numbers fit a value");
        let pages = (0..pages).map(|_| Page::default()).collect();
        Self { id, tag, lineage: Vec::new(), pages, below }
    }

    /// Returns the number of pages.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// The count of cuts of `page`; `None` during a cut.
    pub fn cuts(&self, page: usize) -> Option<u64> {
        let own = self.pages[page].cuts.load(SeqCst);
        let below = self.below.as_ref().map_or(Some(0), |below| below.cuts(page))?;
        own.is_multiple_of(2).then_some((own + below) & ((1 << CUTS_BITS) - 1))
    }

    /// Begins a store to the word of `writer`.
    pub fn begin(&self, page: usize, writer: usize) -> Attempt {
        let word = &self.pages[page].words[writer];
        let generation = word.begun.load(SeqCst) + 1;
        assert!(generation < 1 << GENERATION_BITS, "a round has too many stores");
        word.begun.store(generation, SeqCst);
        let place = Place { id: self.id, page: page as u64, writer: writer as u64 };
        let value = Stamp { place, tag: self.tag, generation }.pack();
        Attempt { value, cuts: self.cuts(page) }
    }

    /// Ends a store; `stored` is whether the store took place.
    pub fn finish(&self, page: usize, writer: usize, attempt: Attempt, stored: bool) {
        let word = &self.pages[page].words[writer];
        let Stamp { generation, .. } = Stamp::unpack(attempt.value);
        word.done.store(generation, SeqCst);
        if stored {
            let stable = attempt.cuts.filter(|&cuts| self.cuts(page) == Some(cuts));
            let known = match stable {
                Some(cuts) => Known { generation, exact: true, cuts },
                None => Known { generation: 0, exact: false, cuts: 1 },
            };
            word.known.store(known.pack(), SeqCst);
        }
    }

    /// Reads the model before a load.
    pub fn look(&self, page: usize, writer: usize) -> Look {
        let known = self.pages[page].words[writer].known.load(SeqCst);
        Look { cuts: self.cuts(page), known }
    }

    /// Returns whether no cut of `page` began or ended since `look`.
    pub fn is_stable(&self, page: usize, look: Look) -> bool {
        look.cuts.is_some() && look.cuts == self.cuts(page)
    }

    /// Checks `found`, which was loaded after `look`.
    pub fn judge(
        &self,
        page: usize,
        writer: usize,
        look: Look,
        found: u64,
        reader: Reader,
    ) -> Result<(), String> {
        let Page { lazy, words, .. } = &self.pages[page];
        let word = &words[writer];
        let (lazy, dead) = (lazy.load(SeqCst), word.dead.load(SeqCst));
        let same = word.known.load(SeqCst) == look.known;
        let stable = self.is_stable(page, look);
        let known = Known::unpack(look.known);
        let wrong = |why: &str| {
            let Self { id, tag, .. } = self;
            Err(format!(
                "word {writer} of page {page} of memory {id}, process {tag}, holds {:?}: {why}; \
                 {known:?}, {look:?}, {word:?}, lazy {lazy}",
                Stamp::unpack(found),
            ))
        };
        let source = match self.source(page, writer, found) {
            Ok(source) => source,
            Err(why) => return wrong(why),
        };
        let generation = match source {
            Source::Stored(generation) => generation,
            Source::Zero | Source::File => 0,
        };
        if !stable {
            return Ok(());
        }
        if generation != 0 && generation <= dead {
            return wrong("the page was dropped after the store");
        }
        if same && Some(known.cuts) == look.cuts {
            if generation < known.generation {
                return wrong("a later store is lost");
            }
            if known.exact && reader == Reader::Owner && generation != known.generation {
                return wrong("the owner has stored another value");
            }
        }
        let is_final = self.below.is_none() || generation != 0;
        if reader == Reader::Owner
            && !lazy
            && is_final
            && let Some(cuts) = look.cuts
        {
            word.known.store(Known { generation, exact: true, cuts }.pack(), SeqCst);
        }
        Ok(())
    }

    /// Finds the store that wrote `found`.
    fn source(&self, page: usize, writer: usize, found: u64) -> Result<Source, &'static str> {
        if found == 0 {
            return Ok(Source::Zero);
        }
        let word = &self.pages[page].words[writer];
        let Stamp { place, tag, generation } = Stamp::unpack(found);
        if place != (Place { id: self.id, page: page as u64, writer: writer as u64 }) {
            return match &self.below {
                Some(below) => below.source(page, writer, found).map(|_| Source::File),
                None => Err("the value of another place"),
            };
        }
        if generation > word.begun.load(SeqCst) {
            return Err("the value was never stored here");
        }
        let ours = tag == self.tag && generation > word.inherited;
        let theirs = self.lineage.contains(&tag) && generation <= word.inherited;
        if ours || theirs {
            Ok(Source::Stored(generation))
        } else {
            Err("the value of another process")
        }
    }

    /// Drops the contents of `pages` by `call`. If `call` fails, some of the pages may be
    /// unchanged.
    pub fn cut<E>(
        &self,
        pages: Range<usize>,
        call: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        self.begin_cut(pages.clone());
        let dead = self.bury(pages.clone());
        let result = call();
        if result.is_err() {
            self.exhume(pages.clone(), dead);
            self.end_cut_as_it_was(pages);
        } else {
            self.end_cut(pages);
        }
        result
    }

    /// Begins a cut of `pages`, which no other thread may be cutting.
    pub fn begin_cut(&self, pages: Range<usize>) {
        for page in &self.pages[pages] {
            page.cuts.fetch_add(1, SeqCst);
        }
    }

    /// Ends a cut that has dropped the pages.
    pub fn end_cut(&self, pages: Range<usize>) {
        for page in &self.pages[pages] {
            page.lazy.store(false, SeqCst);
            page.cuts.fetch_add(1, SeqCst);
        }
    }

    /// Ends a cut that may have dropped no pages.
    pub fn end_cut_as_it_was(&self, pages: Range<usize>) {
        for page in &self.pages[pages] {
            page.cuts.fetch_add(1, SeqCst);
        }
    }

    /// Records that all returned stores to `pages` will be dropped. To be called during a cut,
    /// before the dropping call. Returns the former records.
    pub fn bury(&self, pages: Range<usize>) -> Vec<u64> {
        let words = self.pages[pages].iter().flat_map(|page| &page.words);
        words.map(|word| word.dead.swap(word.done.load(SeqCst), SeqCst)).collect()
    }

    /// Takes the notes of [`bury`](Self::bury) back, in the same cut.
    pub fn exhume(&self, pages: Range<usize>, former: Vec<u64>) {
        let words = self.pages[pages].iter().flat_map(|page| &page.words);
        for (word, dead) in words.zip(former) {
            word.dead.store(dead, SeqCst);
        }
    }

    /// Calls `call`, after which `pages` may become zeros until the next store.
    pub fn loosen<R>(&self, pages: Range<usize>, call: impl FnOnce() -> R) -> R {
        self.begin_cut(pages.clone());
        for page in &self.pages[pages.clone()] {
            page.lazy.store(true, SeqCst);
        }
        let result = call();
        self.end_cut_as_it_was(pages);
        result
    }

    /// The state before a fork.
    pub fn before_fork(&self) -> Vec<[Look; WRITERS]> {
        let looks = |page| core::array::from_fn(|writer| self.look(page, writer));
        (0..self.len()).map(looks).collect()
    }

    /// Returns the contents of a child forked after `before`.
    pub fn child(&self, tag: u64, before: &[[Look; WRITERS]]) -> Self {
        let lineage = self.lineage.iter().copied().chain([self.tag]).collect();
        let mut pages = Vec::new();
        for (number, (page, looks)) in self.pages.iter().zip(before).enumerate() {
            let own = page.cuts.load(SeqCst);
            let (dead, lazy): ([u64; WRITERS], _) = (
                core::array::from_fn(|writer| page.words[writer].dead.load(SeqCst)),
                page.lazy.load(SeqCst),
            );
            let begun: [u64; WRITERS] =
                core::array::from_fn(|writer| page.words[writer].begun.load(SeqCst));
            let is_stable = self.is_stable(number, looks[0]) && own % 2 == 0;
            let word = |writer: usize| {
                let cuts = looks[writer].cuts.map_or(1, |cuts| cuts.wrapping_sub(own));
                let known = Known::unpack(looks[writer].known);
                let is_known =
                    is_stable && looks[writer].cuts == Some(known.cuts) && own <= known.cuts;
                let generation = if is_known { known.generation } else { 0 };
                Word {
                    begun: begun[writer].into(),
                    done: begun[writer].into(),
                    known: Known { generation, exact: false, cuts }.pack().into(),
                    dead: if is_stable { dead[writer] } else { 0 }.into(),
                    inherited: begun[writer],
                }
            };
            let words = core::array::from_fn(word);
            pages.push(Page { cuts: 0.into(), lazy: lazy.into(), words });
        }
        Self { id: self.id, tag, lineage, pages, below: self.below.clone() }
    }
}
