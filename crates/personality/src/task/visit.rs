//! The memory of another process, reached as the running one's own.

use super::memory::Memory;
use super::scheduler;
use super::thread::try_current;
use core::marker::PhantomData;
use faultless_bare::machine;

/// This CPU runs a space that is not that of its thread, until this is dropped: so the kernel reaches
/// memory of others as it does the program's own. Who visits gives the CPU to nobody.
#[derive(Debug)]
#[must_use = "the visit ends when this is dropped"]
pub struct Visit<'a>(PhantomData<&'a Memory>);

impl<'a> Visit<'a> {
    /// Runs the space of `memory`.
    pub fn to(memory: &'a Memory) -> Self {
        // SAFETY: `memory` is borrowed until the visit ends, which has the CPU run something else. (Visits
        // are ended in the function that they begin in, and never forgotten.)
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
