//! The use of CPU time.

use crate::profile::Time;

/// A use of CPU time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Spent {
    /// Executing instructions of the subsystem.
    Instructions,
    /// Waiting for cache lines, of other CPUs or of memory.
    Lines,
    /// Zeroing and copying pages.
    Pages,
    /// Entering and leaving the kernel.
    Entry,
    /// Sending and taking interrupts, dropping translations.
    Flushes,
    /// Waiting for other CPUs: in a wait loop, or parked.
    Waiting,
    /// In the program: accesses, and page walks.
    Program,
}

impl Spent {
    /// All uses.
    pub const ALL: [Self; 7] = [
        Self::Instructions,
        Self::Lines,
        Self::Pages,
        Self::Entry,
        Self::Flushes,
        Self::Waiting,
        Self::Program,
    ];

    /// Returns the name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Instructions => "instructions",
            Self::Lines => "cache lines",
            Self::Pages => "zeroing and copying",
            Self::Entry => "kernel entry",
            Self::Flushes => "interrupts and flushes",
            Self::Waiting => "waiting for CPUs",
            Self::Program => "program",
        }
    }
}

/// The activity of one CPU, or of several together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accounts {
    /// Time by [`Spent`].
    pub spent: [Time; Spent::ALL.len()],
    /// Accesses reported by the subsystem in operations. The instructions of
    /// [`Rates`](crate::rates) are between two accesses.
    pub accesses: u64,
    /// Lines transferred from another CPU, or invalidated in other CPUs.
    pub transfers: u64,
    /// Lines fetched from memory.
    pub fetches: u64,
    /// Interrupts sent.
    pub interrupts: u64,
}

impl Accounts {
    /// Returns the activity since `before`, an earlier state of the same CPUs.
    pub(crate) fn since(&self, before: &Self) -> Self {
        Self {
            spent: core::array::from_fn(|on| self.spent[on] - before.spent[on]),
            accesses: self.accesses - before.accesses,
            transfers: self.transfers - before.transfers,
            fetches: self.fetches - before.fetches,
            interrupts: self.interrupts - before.interrupts,
        }
    }
}

impl core::ops::AddAssign for Accounts {
    fn add_assign(&mut self, other: Self) {
        self.spent.iter_mut().zip(other.spent).for_each(|(sum, part)| *sum += part);
        self.accesses += other.accesses;
        self.transfers += other.transfers;
        self.fetches += other.fetches;
        self.interrupts += other.interrupts;
    }
}
