//! Access to the memory of another process.

use super::memory::Memory;
use super::scheduler;
use super::thread::try_current;
use core::marker::PhantomData;
use faultless_bare::machine;

/// Until this is dropped, this CPU runs another space than that of its thread, so that copies from and to user memory
/// access that space. The thread must not give the CPU away meanwhile.
#[derive(Debug)]
#[must_use = "the visit ends when this is dropped"]
pub struct Visit<'a>(PhantomData<&'a Memory>);

impl<'a> Visit<'a> {
    /// Runs the space of `memory`.
    pub fn to(memory: &'a Memory) -> Self {
        // SAFETY: `memory` is borrowed until the visit ends, and then the CPU runs another space. (Visits
        // end in the function that they begin in, and are never forgotten.)
        unsafe { machine::run(memory.space()) };
        Self(PhantomData)
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        match try_current() {
            Some(_) => scheduler::run_memory(),
            None => machine::run_none(),
        }
    }
}
