//! Counts of faults by call stack.

use super::Census;

/// The faults of one call stack, by purpose. See [`Census`] for each purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StackFaults {
    /// Stores to untouched private anonymous memory.
    pub zeroed: u64,
    /// Loads of untouched private anonymous memory.
    pub zero_page: u64,
    /// Faults on a present page of private memory: copies, mostly.
    pub copies: u64,
    /// Faults on files, and on shared memory touched earlier by another process. Without `text`.
    pub file: u64,
    /// Fetches of instructions from files.
    pub text: u64,
    /// First touches of pages of shared memory.
    pub shared: u64,
    /// Faults of `zeroed` in a mapping large enough for an additional call.
    pub in_mapping: u64,
    /// Faults of `zeroed` in an aligned range of the size of a huge page within one mapping.
    pub in_huge: u64,
    /// Faults of `zeroed` and `zero_page` on pages that the program had before and had freed by
    /// `munmap`, `brk` or `MADV_DONTNEED`.
    pub again: u64,
}

impl StackFaults {
    /// Returns all faults.
    pub fn total(&self) -> u64 {
        self.zeroed + self.zero_page + self.copies + self.file + self.text + self.shared
    }

    /// Adds the faults of `other`.
    pub fn add(&mut self, other: &Self) {
        self.zeroed += other.zeroed;
        self.zero_page += other.zero_page;
        self.copies += other.copies;
        self.file += other.file;
        self.text += other.text;
        self.shared += other.shared;
        self.in_mapping += other.in_mapping;
        self.in_huge += other.in_huge;
        self.again += other.again;
    }

    /// Returns the faults between two states of a census.
    pub(super) fn between(before: &Counts, after: &Counts) -> Self {
        let [zeroed, zero_page, copies, file, text, shared, returned, discarded] =
            std::array::from_fn(|at| after[at] - before[at]);
        Self {
            zeroed,
            zero_page,
            copies,
            file: file - text,
            text,
            shared,
            again: returned + discarded,
            ..Self::default()
        }
    }
}

/// The counts of a census that distinguish the purposes.
pub(super) type Counts = [u64; 8];

impl Census {
    /// Returns the counts that distinguish the purposes.
    pub(super) fn counts(&self) -> Counts {
        let Self { zeroed, zero_page, copies, file, text, shared, returned, discarded, .. } = *self;
        [zeroed, zero_page, copies, file, text, shared, returned, discarded]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::callers::{Call, Caller};
    use crate::event::{Access, Backing, Frame, Function, Kind, Prot, Recorded, StackId, Trace};
    use faultless::PAGE_SIZE;

    const START: u64 = 1 << 40;

    fn fault(page: u64, access: Access, number: u32) -> Kind {
        let mut fault = Kind::first(START + page * PAGE_SIZE, access);
        if let Kind::Fault { stack, .. } = &mut fault {
            *stack = StackId::new(number);
        }
        fault
    }

    #[test]
    fn faults_are_counted_for_their_stack_by_purpose() {
        let prot = Prot::READ | Prot::WRITE;
        // The aligned 2 MiB, and 2 pages behind.
        let len = 514 * PAGE_SIZE;
        let map = Kind::Map { start: START, len, prot, flags: 0x22, backing: Backing::Anon };
        let file = START + (1 << 30);
        let text = Kind::Area {
            start: file,
            len: 64 * PAGE_SIZE,
            prot: Prot::READ | Prot::EXEC,
            backing: Backing::File,
        };
        let called = Kind::Caller { stack: StackId::new(2) };
        let back = Kind::Advise { start: START, len: PAGE_SIZE, advice: 4 };
        let (r, w, x) = (Access::Read, Access::Write, Access::Exec);
        let far = (1 << 30) / PAGE_SIZE;
        let events = [
            called,
            map,
            text,
            fault(0, w, 1),
            fault(1, w, 1),
            fault(513, w, 1),
            fault(2, r, 2),
            called,
            back,
            fault(0, w, 2),
            fault(far, x, 2),
            fault(far + 40, r, 1),
            fault(3, w, 0),
        ];
        let mut trace = Trace::of_one_thread(events);
        trace.header.recorded = Recorded::USER_FAULTS | Recorded::STACKS;
        trace.stacks.functions.push(Function::default());
        let frame = Frame { caller: StackId::NONE, function: 0, line: 0 };
        trace.stacks.frames = vec![frame; 2];
        let census = Census::of(&trace).unwrap();
        let none = StackFaults::default();
        let first = StackFaults { zeroed: 3, in_mapping: 3, in_huge: 2, file: 1, ..none };
        let second = StackFaults {
            zeroed: 1,
            zero_page: 1,
            text: 1,
            in_mapping: 1,
            in_huge: 1,
            again: 1,
            ..none
        };
        let caller = Caller { call: Call::Mmap, stack: StackId::new(2) };
        let by = |stack, faults| ((StackId::new(stack), caller), faults);
        assert_eq!(census.callers, [by(1, 3), by(2, 2)].into(), "the text has no call");
        // One of the two faults of this call stack is on a page that the program had before.
        let caller = Caller { call: Call::Madvise, stack: StackId::new(2) };
        assert_eq!(census.freed, [((StackId::new(2), caller), 1)].into());
        let got: Vec<_> = census.stacks.into_iter().collect();
        assert_eq!(got, [(StackId::new(1), first), (StackId::new(2), second)]);
        assert_eq!((first.total(), second.total()), (4, 3));
        // Huge pages of 32 MiB do not fit.
        let large = Census::with_huge(&trace, 1 << 13).unwrap();
        assert!(large.stacks.values().all(|faults| faults.in_huge == 0));
        let mut both = first;
        both.add(&second);
        assert_eq!((both.total(), both.again, both.in_huge), (7, 1, 3));
    }
}
