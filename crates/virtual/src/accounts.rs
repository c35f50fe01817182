//! What CPUs spent their time on.

use crate::profile::Time;

/// What CPUs spend their time on.
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
    /// Waiting for other CPUs: looking at what they must change, or parked.
    Waiting,
    /// In the program: accesses, and page walks.
    Program,
}

impl Spent {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Instructions,
        Self::Lines,
        Self::Pages,
        Self::Entry,
        Self::Flushes,
        Self::Waiting,
        Self::Program,
    ];

    /// Its name in tables.
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

/// What one CPU, or several together, did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accounts {
    /// Time by [`Spent`].
    pub spent: [Time; Spent::ALL.len()],
    /// Accesses that the subsystem reported in operations: between two of them are the instructions of [`Rates`](crate::rates).
    pub accesses: u64,
    /// Lines that came from another CPU, or whose copies other CPUs lost.
    pub transfers: u64,
    /// Lines that came from memory.
    pub fetches: u64,
    /// Interrupts sent.
    pub interrupts: u64,
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
