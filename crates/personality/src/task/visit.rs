//! Access to the memory of another process.

use super::memory::Memory;
use super::scheduler;
use super::thread::try_current;
use core::marker::PhantomData;
use faultless_bare::machine;

/// A visit to another space: until this value is dropped, this CPU runs another space than its
/// thread's, so copies from and to user memory access this other space. The thread must not yield
/// the CPU before the drop.
#[derive(Debug)]
#[must_use = "the visit ends when this is dropped"]
pub struct Visit<'a>(PhantomData<&'a Memory>);

impl<'a> Visit<'a> {
    /// Runs the space of `memory`.
    pub fn to(memory: &'a Memory) -> Self {
        // SAFETY: `memory` is borrowed until the visit ends, and then the CPU runs another space.
        // (A visit ends in the function that began it, and is never forgotten.)
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
