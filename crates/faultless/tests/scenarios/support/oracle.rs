//! The permitted observations of programs: the values that a load of each page may return, and the
//! permitted accesses.
//!
//! One thread runs at a time, and an access is atomic, so the oracle knows the last store. A call
//! changes a page at some moment between its begin and its end. Until the end, both outcomes are
//! allowed.
//!
//! A page of any value is in one frame at a time: after a program has used a new frame of
//! the page, no program uses the old frame.

use faultless::{FrameNumber, Prot, SpaceId};
use std::collections::BTreeMap;

/// A page of a space.
pub type Page = (SpaceId, u64);

/// A frame and its ownership number, a combination that never comes back.
pub type Owned = (FrameNumber, u64);

/// The number of words of a page used by programs, from its start on.
pub const WORDS: usize = 2;

/// The frame through which a page is used.
#[derive(Clone, Copy, Debug)]
pub enum Through {
    /// A frame, or `None` for the zero page.
    Frame(Option<Owned>),
    /// The page's frame, or an abandoned frame, whose flush may be deferred.
    Any,
}

/// A word of a page, with any number of mappings.
#[derive(Clone, Debug, Default)]
struct Word {
    /// The possible values; never empty.
    may_be: Vec<u64>,
    /// The number of calls in progress that set the word to 0 at some moment, and whether several
    /// ran at once.
    wipes: u32,
    several: bool,
    /// Whether a store happened during such a call, so that the call may or may not have wiped the
    /// store.
    stored: bool,
    /// Whether the value was not 0 before, so that a load can distinguish the wipe; and whether a
    /// load has observed the wipe.
    tells: bool,
    wiped: bool,
    /// The number of calls in progress that lazily free the page: the word may become 0 from then
    /// on, until a store after these calls.
    frees: u32,
    lazy: bool,
    /// The possible values in the children of forks in progress, by fork.
    forks: Vec<(u32, Vec<u64>)>,
    /// For the first word of a page: the last used frame other than the zero page, and the frames
    /// before.
    frame: Option<Owned>,
    left: Vec<Owned>,
}

impl Word {
    fn new(value: u64) -> Self {
        Self { may_be: vec![value], ..Self::default() }
    }

    /// Records the use of the page through `frame`, or through the zero page.
    fn used(&mut self, frame: Option<Owned>) -> Result<(), String> {
        if frame.is_some_and(|frame| self.left.contains(&frame)) {
            return Err(format!("{frame:?} is used after its replacement"));
        }
        if self.frame != frame {
            self.left.extend(self.frame);
            self.frame = frame;
        }
        Ok(())
    }

    fn stored(&mut self, value: u64) {
        self.may_be = vec![value];
        if self.wipes != 0 && !self.wiped {
            self.may_be.push(0);
            (self.stored, self.tells) = (true, value != 0);
        }
        self.kept();
        self.forks.iter_mut().for_each(|(_, may)| may.push(value));
    }

    fn loaded(&mut self, value: u64) -> Result<(), String> {
        if !self.may_be.contains(&value) {
            return Err(format!("{value} was loaded, but only {:?} are possible", self.may_be));
        }
        if self.wipes == 0 {
            self.may_be = vec![value];
            self.may_be_freed();
        } else if self.wipes == 1 && !self.several && self.tells && value == 0 {
            self.may_be = vec![0];
            self.wiped = true;
        }
        Ok(())
    }

    fn begin_free(&mut self) {
        self.frees += 1;
        self.lazy = true;
        self.may_be_freed();
    }

    /// Records a store to the page: it is no longer lazily freed, unless such a call is in
    /// progress.
    fn kept(&mut self) {
        self.lazy &= self.frees != 0;
        self.may_be_freed();
    }

    fn may_be_freed(&mut self) {
        if self.lazy && !self.may_be.contains(&0) {
            self.may_be.push(0);
        }
    }

    fn begin_wipe(&mut self) {
        if self.wipes == 0 {
            (self.stored, self.several) = (false, false);
        } else {
            self.several = true;
        }
        self.wipes += 1;
        self.wiped = false;
        self.tells = !self.may_be.contains(&0);
        if self.tells {
            self.may_be.push(0);
        }
        self.forks.iter_mut().for_each(|(_, may)| may.push(0));
    }

    fn end_wipe(&mut self) {
        self.wipes -= 1;
        if self.wipes == 0 && !self.stored && !self.wiped {
            self.may_be = vec![0];
        }
    }
}

#[derive(Clone, Debug)]
struct Rights {
    words: [usize; WORDS],
    /// Whether a frame may come back: the frame of an object, after a copy of the page.
    copies: bool,
    /// The rights that may succeed, and the rights that must succeed.
    may: Prot,
    must: Prot,
    /// The number of calls in progress that change the rights, and the number of their begins and
    /// ends.
    changing: u32,
    changes: u64,
}

/// Whether an access must succeed according to the oracle: compared before and after a refused
/// fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    must: bool,
    changes: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Oracle {
    words: Vec<Word>,
    pages: BTreeMap<(u64, u64), Rights>,
    forks: u32,
}

impl Oracle {
    fn page(&mut self, (space, page): Page) -> &mut Rights {
        let words = &mut self.words;
        self.pages.entry((space.0, page)).or_insert_with(|| {
            let none = Prot::empty();
            let words = new_words(words, 0);
            Rights { words, copies: false, may: none, must: none, changing: 0, changes: 0 }
        })
    }

    fn words(&mut self, page: Page, mut each: impl FnMut(&mut Word)) {
        for word in self.page(page).words {
            each(&mut self.words[word]);
        }
    }

    /// An access to word `at` of the page happens, now, through `frame`, or that of zeros.
    pub fn accessed(
        &mut self,
        page: Page,
        frame: Through,
        at: usize,
        store: Option<u64>,
        found: u64,
    ) -> Result<(), String> {
        let needs = if store.is_some() { Prot::WRITE } else { Prot::READ };
        let Rights { may, words, copies, .. } = *self.page(page);
        if !may.contains(needs) {
            return Err(format!(
                "an access that needs {needs:?} happened, but only {may:?} are possible"
            ));
        }
        if let Through::Frame(frame) = frame
            && !copies
        {
            self.words[words[0]].used(frame)?;
        }
        match store {
            Some(value) => {
                self.words(page, Word::kept);
                self.words[words[at]].stored(value);
            }
            None => self.words[words[at]].loaded(found)?,
        }
        Ok(())
    }

    /// Begins a call that lazily frees the page.
    pub fn begin_free(&mut self, page: Page) {
        self.words(page, Word::begin_free);
    }

    /// The call is over.
    pub fn end_free(&mut self, page: Page) {
        self.words(page, |word| word.frees -= 1);
    }

    /// Returns whether an access that needs `right` must succeed now.
    pub fn claim(&mut self, page: Page, right: Prot) -> Claim {
        let rights = self.page(page);
        Claim { must: rights.must.contains(right), changes: rights.changes }
    }

    /// Checks a refused access whose claim was `before`.
    pub fn refused(&mut self, page: Page, right: Prot, before: Claim) -> Result<(), String> {
        if before.must && self.claim(page, right) == before {
            return Err("a permitted access was refused".into());
        }
        Ok(())
    }

    /// Begins a call that gives programs the rights `after` to the page, and empties the page if it
    /// `wipes`. Returns the argument for [`end`](Self::end).
    pub fn begin(&mut self, page: Page, after: Option<Prot>, wipes: bool) -> u64 {
        let rights = self.page(page);
        rights.changing += 1;
        rights.changes += 1;
        if let Some(after) = after {
            rights.may |= after;
            rights.must &= after;
        }
        let began = rights.changes;
        if wipes {
            self.words(page, Word::begin_wipe);
        }
        began
    }

    /// The call is over.
    pub fn end(&mut self, page: Page, after: Option<Prot>, wipes: bool, began: u64) {
        let rights = self.page(page);
        rights.changing -= 1;
        rights.changes += 1;
        // If calls overlap, only their common result is known.
        if let Some(after) = after
            && rights.changing == 0
            && rights.changes == began + 1
        {
            (rights.may, rights.must) = (after, after);
        }
        if wipes {
            self.words(page, Word::end_wipe);
        }
    }

    /// From now on `new` shows what `old` shows: the page is moved there, or is of the same object.
    pub fn alias(&mut self, old: Page, new: Page) {
        let Rights { words, copies, .. } = *self.page(old);
        let new = self.page(new);
        (new.words, new.copies) = (words, copies);
    }

    /// From now on the page is of a private mapping of an object.
    pub fn copies(&mut self, page: Page) {
        self.page(page).copies = true;
    }

    /// Makes the page a new page, whose words are `value`.
    pub fn renew(&mut self, page: Page, value: u64) {
        let words = new_words(&mut self.words, value);
        self.page(page).words = words;
    }

    /// Begins a fork of the pages of `parent`. Returns its number.
    pub fn begin_fork(&mut self, parent: SpaceId) -> u32 {
        let pages: Vec<Page> = self.of(parent).map(|(page, _)| (parent, page)).collect();
        self.begin_copy(pages, false)
    }

    /// Begins a copy: present and future values of `pages` may be found elsewhere. If the copy
    /// itself `empties` the pages, as reported just before, the resulting zeros are excluded.
    /// Returns the number of this copy.
    pub fn begin_copy(&mut self, pages: impl IntoIterator<Item = Page>, empties: bool) -> u32 {
        self.forks += 1;
        let number = self.forks;
        for page in pages {
            self.words(page, |word| {
                let mut may_be = word.may_be.clone();
                may_be.retain(|&value| value != 0 || !(empties && word.tells));
                word.forks.push((number, may_be));
            });
        }
        number
    }

    /// Ends the fork, with `child` if it succeeded; the pages selected by `shared` are the same in
    /// both spaces.
    pub fn end_fork(
        &mut self,
        fork: u32,
        parent: SpaceId,
        child: Option<SpaceId>,
        shared: impl Fn(u64) -> bool,
    ) {
        let pages: Vec<_> = self.of(parent).map(|(page, rights)| (page, rights.clone())).collect();
        for (page, rights) in pages {
            let own = self.copy(fork, rights.words);
            let words = if shared(page) { rights.words } else { own };
            if let Some(child) = child {
                let theirs = Rights { words, changing: 0, changes: 0, ..rights };
                self.pages.insert((child.0, page), theirs);
            }
        }
    }

    /// The copy is over: of each pair, what was in the first page is in the second.
    pub fn end_copy(&mut self, number: u32, pairs: impl Iterator<Item = (Page, Page)>) {
        for (from, to) in pairs {
            let Rights { words, copies, .. } = *self.page(from);
            let words = self.copy(number, words);
            let to = self.page(to);
            (to.words, to.copies) = (words, copies);
        }
    }

    /// Returns the words which copy `number` made of `words`; a word unknown to the copy is
    /// unchanged.
    fn copy(&mut self, number: u32, words: [usize; WORDS]) -> [usize; WORDS] {
        words.map(|word| {
            let forks = &mut self.words[word].forks;
            let Some(at) = forks.iter().position(|(fork, _)| *fork == number) else {
                return word;
            };
            let (_, may_be) = forks.swap_remove(at);
            self.words.push(Word { may_be, ..Word::default() });
            self.words.len() - 1
        })
    }

    /// Gives programs the rights `may` to the page, without a guarantee.
    pub fn doubtful(&mut self, page: Page, may: Prot) {
        let rights = self.page(page);
        rights.changes += 1;
        (rights.may, rights.must) = (may, Prot::empty());
    }

    fn of(&self, space: SpaceId) -> impl Iterator<Item = (u64, &Rights)> {
        self.pages
            .range((space.0, 0)..=(space.0, u64::MAX))
            .map(|(&(_, page), rights)| (page, rights))
    }
}

/// Adds words of one page, of `value`.
fn new_words(words: &mut Vec<Word>, value: u64) -> [usize; WORDS] {
    core::array::from_fn(|_| {
        words.push(Word::new(value));
        words.len() - 1
    })
}
