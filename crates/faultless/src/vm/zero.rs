//! Background zeroing: free frames are zeroed before they are needed.

use super::Cpu;
use crate::machine::Machine;
use crate::stat::Counter;

impl<M: Machine> Cpu<'_, M> {
    /// Zeroes free frames into the pools of the nodes (knob `zeroed_pool`), at most about `budget`, as a
    /// CPU does that has nothing else to do. Returns how many; 0 when the pools are full or off, or memory
    /// is short: then there is nothing to do until something was allocated or freed.
    ///
    /// Flush requests are served after each [`RUN`](crate::frame::zeroed::RUN) frames; a CPU that has to
    /// be quick to answer something else gives a budget of so many, and calls again.
    ///
    /// It also frees what calls of this CPU retired, if that is more than a little, and ends what was
    /// [dropped](Self::end_dropped).
    pub fn zero_ahead(&self, budget: usize) -> usize {
        self.end_dropped();
        self.collect_idle();
        self.zero_for(budget, Counter::ZeroedIdle)
    }

    /// Zeroes as many free frames as calls of this CPU freed, if the knob `zero_on_free` is set. They
    /// were counted by [`note_freed`](Self::note_freed).
    #[cold]
    pub(super) fn zero_freed(&self) {
        let freed = self.state.freed.take();
        if self.vm.knobs.zero_on_free() {
            self.zero_for(freed, Counter::ZeroedOnFree);
        }
    }

    /// Notes that a call let go of `frames` frames.
    #[inline]
    pub(crate) fn note_freed(&self, frames: usize) {
        self.state.freed.set(self.state.freed.get() + frames);
    }

    fn zero_for(&self, budget: usize, whom: Counter) -> usize {
        let mut done = 0;
        while done < budget {
            let run = self.vm.frames.zero_run(self.local(), &self.vm.machine, budget - done, self);
            if run == 0 {
                break;
            }
            done += run;
            self.serve_flushes();
        }
        self.state().counts.add(whom, done as u64);
        done
    }
}
