//! What programs may see: of each page the values that a load may find, and who may reach it.
//!
//! One thread runs at a time, and an access happens at one moment; so the oracle knows which store was
//! last. What a call does to a page happens at some moment between its begin and its end, and until the
//! end both outcomes are allowed.
//!
//! Whatever values may be there, a page is one at a time: once somebody has used another frame in its place, nobody
//! uses the one before.

use faultless::{FrameNumber, Prot, SpaceId};
use std::collections::BTreeMap;

/// A page of a space.
pub type Page = (SpaceId, u64);

/// A frame, and which ownership of it: as such it never comes back.
pub type Owned = (FrameNumber, u64);

/// Words of a page that programs use: the first ones.
pub const WORDS: usize = 2;

/// What a page is used through.
#[derive(Clone, Copy, Debug)]
pub enum Through {
    /// A frame; none is that of zeros.
    Frame(Option<Owned>),
    /// The page's frame, or one that it has left, as the flush may be deferred.
    Any,
}

/// A word of a page, wherever it is mapped.
#[derive(Clone, Debug, Default)]
struct Word {
    /// What it may be now; never empty.
    may_be: Vec<u64>,
    /// Calls under way that make it 0 at some moment, and whether there were several at once.
    wipes: u32,
    several: bool,
    /// Whether a store came during such a call, so that it may have been wiped, or not.
    stored: bool,
    /// Whether it was another value than 0 before, so that a load can tell; and whether one has seen the
    /// moment pass.
    tells: bool,
    wiped: bool,
    /// Calls under way that free it lazily: it may become 0 from then on until a store comes after them.
    frees: u32,
    lazy: bool,
    /// What the children may see that forks under way are making: by fork.
    forks: Vec<(u32, Vec<u64>)>,
    /// Of the first word of a page: the frame through which the page was used last, but for that of zeros; and those
    /// before.
    frame: Option<Owned>,
    left: Vec<Owned>,
}

impl Word {
    fn new(value: u64) -> Self {
        Self { may_be: vec![value], ..Self::default() }
    }

    /// The page is used through `frame`, or that of zeros.
    fn used(&mut self, frame: Option<Owned>) -> Result<(), String> {
        if frame.is_some_and(|frame| self.left.contains(&frame)) {
            return Err(format!("{frame:?} is used, after another in its place"));
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
            return Err(format!("{value} was loaded, where {:?} may be", self.may_be));
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

    /// A store comes to the page: it is no longer lazily freed, unless that happens just now.
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
    /// Whether a frame may come back: that of an object, after a copy of it.
    copies: bool,
    /// What may succeed, and what must.
    may: Prot,
    must: Prot,
    /// Calls under way that change this, and how often one began or ended.
    changing: u32,
    changes: u64,
}

/// Whether an access must succeed, as far as the oracle knows: compared before and after a fault that
/// was refused.
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
            return Err(format!("an access that needs {needs:?} happened, where {may:?} may be"));
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

    /// A call begins that frees the page lazily.
    pub fn begin_free(&mut self, page: Page) {
        self.words(page, Word::begin_free);
    }

    /// The call is over.
    pub fn end_free(&mut self, page: Page) {
        self.words(page, |word| word.frees -= 1);
    }

    /// Whether an access that needs `right` must succeed now.
    pub fn claim(&mut self, page: Page, right: Prot) -> Claim {
        let rights = self.page(page);
        Claim { must: rights.must.contains(right), changes: rights.changes }
    }

    /// An access was refused whose claim was `before`.
    pub fn refused(&mut self, page: Page, right: Prot, before: Claim) -> Result<(), String> {
        if before.must && self.claim(page, right) == before {
            return Err("an access was refused that nothing forbids".into());
        }
        Ok(())
    }

    /// A call begins that lets programs have `after` of the page, and empties it if it `wipes`.
    /// Returns what [`end`](Self::end) wants to know.
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
        // Where calls overlap, what they agree on is known.
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

    /// The page is a new one, whose words are `value`.
    pub fn renew(&mut self, page: Page, value: u64) {
        let words = new_words(&mut self.words, value);
        self.page(page).words = words;
    }

    /// A fork begins of the pages of `parent`. Returns its number.
    pub fn begin_fork(&mut self, parent: SpaceId) -> u32 {
        let pages: Vec<Page> = self.of(parent).map(|(page, _)| (parent, page)).collect();
        self.begin_copy(pages, false)
    }

    /// What is in `pages` now, or is stored there from now on, may be found elsewhere. If this is what
    /// `empties` them, as was said just now, that they are empty is not. Returns the number of this copy.
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

    /// The fork is over, and there is `child`, or none; pages of which `shared` says so are the same in
    /// both.
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

    /// The words that copy `number` made of `words`; a word that it did not begin with is the same.
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

    /// Programs may have `may` of the page; whether they get it depends.
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
