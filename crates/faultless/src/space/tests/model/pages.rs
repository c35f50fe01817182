//! The naive page map: the state of each page, and the effect of each call.

use super::DEVICE;
use crate::error::Errno;
use crate::fault::FaultError;
use crate::space::{Advice, Prot, RemapFlags};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::vec::Vec;

/// The word in a frame that a space, an object or a device has.
pub(super) type Word = Rc<Cell<u64>>;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Page {
    pub(super) prot: Prot,
    /// The object behind the page, and the page number in the object.
    pub(super) object: Option<(usize, u64)>,
    pub(super) shared: bool,
    pub(super) may_write: bool,
    /// The word of a private page.
    pub(super) own: Option<Word>,
    pub(super) dont_fork: bool,
    pub(super) wipe: bool,
}

#[derive(Default)]
pub(super) struct Model {
    pub(super) pages: BTreeMap<u64, Page>,
}

/// An object's contents: its length, and the written words.
#[derive(Default)]
pub(super) struct Contents {
    pub(super) len: u64,
    pub(super) pages: BTreeMap<u64, Word>,
}

impl Contents {
    pub(super) fn new(len: u64) -> Self {
        Self { len, pages: BTreeMap::new() }
    }

    pub(super) fn get(&self, index: u64) -> u64 {
        self.pages.get(&index).map_or(0, |word| word.get())
    }

    /// The page, which is there from now on.
    pub(super) fn word(&mut self, index: u64) -> &Word {
        self.pages.entry(index).or_default()
    }
}

pub(super) type Objects = BTreeMap<usize, Contents>;

impl Page {
    pub(super) fn private(prot: Prot) -> Self {
        let (object, own) = (None, None);
        Self { prot, object, shared: false, may_write: true, own, dont_fork: false, wipe: false }
    }

    pub(super) fn is_device(&self) -> bool {
        self.object.is_some_and(|(object, _)| object == DEVICE)
    }

    pub(super) fn value(&self, objects: &Objects) -> Result<u64, FaultError> {
        match (&self.own, self.object) {
            (Some(word), _) => Ok(word.get()),
            (None, None) => Ok(0),
            (None, Some((object, index))) => {
                let contents = &objects[&object];
                if index < contents.len { Ok(contents.get(index)) } else { Err(FaultError::Bus) }
            }
        }
    }

    /// Faults the page in for writing, which makes a private page private to the space.
    pub(super) fn populate(&mut self, objects: &Objects, write: bool) -> Result<(), FaultError> {
        let value = self.value(objects)?;
        if write && !self.shared {
            self.own.get_or_insert_default().set(value);
        }
        Ok(())
    }

    /// Pins the page. Returns the word shared by the device and the space, or `None` if the pin is
    /// forbidden.
    pub(super) fn pin(&mut self, objects: &mut Objects, write: bool) -> Option<Word> {
        let allowed = if write { self.prot.contains(Prot::WRITE) } else { !self.prot.is_empty() };
        if !allowed || self.is_device() {
            return None;
        }
        // A private page becomes the space's own.
        self.populate(objects, true).ok()?;
        match (&self.own, self.object) {
            (None, Some((object, index))) => Some(objects.get_mut(&object)?.word(index).clone()),
            (own, _) => own.clone(),
        }
    }

    /// Returns the child's page after a fork.
    pub(super) fn copy(&self) -> Self {
        let own = self.own.as_ref().map(|word| Word::new(Cell::new(word.get())));
        Self { own, ..self.clone() }
    }
}

impl Model {
    pub(super) fn unmap(&mut self, from: u64, len: u64) {
        (from..from + len).for_each(|page| {
            self.pages.remove(&page);
        });
    }

    /// Applies the advice, whose call returned `got`.
    pub(super) fn advise(
        &mut self,
        objects: &Objects,
        from: u64,
        len: u64,
        advice: Advice,
        got: Result<(), Errno>,
    ) {
        let mut expected = Ok(());
        for number in from..from + len {
            let populates = matches!(advice, Advice::PopulateRead | Advice::PopulateWrite);
            let Some(page) = self.pages.get_mut(&number) else {
                expected = Err(Errno::ENOMEM);
                if populates {
                    break;
                }
                continue;
            };
            match advice {
                Advice::DontNeed
                | Advice::DoFork
                | Advice::PopulateRead
                | Advice::PopulateWrite
                    if page.is_device() =>
                {
                    expected = Err(Errno::EINVAL);
                    break;
                }
                Advice::DontNeed => page.own = None,
                Advice::Free | Advice::WipeOnFork if page.object.is_some() => {
                    expected = Err(Errno::EINVAL);
                    break;
                }
                Advice::DontFork => page.dont_fork = true,
                Advice::DoFork => page.dont_fork = false,
                Advice::WipeOnFork => page.wipe = true,
                Advice::KeepOnFork => page.wipe = false,
                Advice::PopulateWrite if !page.prot.contains(Prot::WRITE) => {
                    expected = Err(Errno::EINVAL);
                    break;
                }
                Advice::PopulateRead if !page.prot.contains(Prot::READ) => {
                    expected = Err(Errno::EINVAL);
                    break;
                }
                Advice::PopulateRead | Advice::PopulateWrite
                    if page.populate(objects, advice == Advice::PopulateWrite).is_err() =>
                {
                    expected = Err(Errno::EFAULT);
                    break;
                }
                _ => {}
            }
        }
        assert_eq!(got, expected, "{advice:?}");
    }

    /// Applies a move to `there`.
    pub(super) fn remap(&mut self, from: u64, old: u64, new: u64, there: u64, flags: RemapFlags) {
        if there == from && new <= old {
            // Linux checks only the first page, and unmaps the excess.
            return self.unmap(from + new, old - new);
        }
        let first = self.pages[&from].clone();
        // A move to a fixed address may include holes; the old mappings below the holes stay.
        let moved: Vec<_> =
            (0..old.min(new)).map(|index| self.pages.get(&(from + index)).cloned()).collect();
        if there != from {
            if flags.contains(RemapFlags::DONTUNMAP) {
                for index in 0..old {
                    if let Some(page) = self.pages.get_mut(&(from + index)) {
                        page.own = None;
                    }
                }
            } else {
                self.unmap(from, old);
            }
        } else {
            self.unmap(from, old);
        }
        for index in 0..new {
            let grown = Page {
                own: None,
                object: first.object.map(|(object, at)| (object, at + index)),
                ..first.clone()
            };
            if let Some(page) = moved.get(index as usize).cloned().unwrap_or(Some(grown)) {
                self.pages.insert(there + index, page);
            }
        }
    }
}
