//! Background zeroing: zeroes free frames before they are needed.

use super::Cpu;
use crate::machine::Machine;
use crate::stat::Counter;

impl<M: Machine> Cpu<'_, M> {
    /// Zeroes free frames into the pools of the nodes (knob `zeroed_pool`), about `budget` at most,
    /// on an idle CPU. Returns the number of frames; 0 if the pools are full or off, or memory is
    /// short: then a further call is useless until a frame is allocated or freed.
    ///
    /// Flush requests are served after each [`RUN`](crate::frame::zeroed::RUN) frames. A CPU that
    /// must react quickly to other events passes this number as the budget, and calls repeatedly.
    ///
    /// The function also frees objects retired by calls of this CPU, if there are many, and ends
    /// [dropped](Self::end_dropped) spaces and objects.
    pub fn zero_ahead(&self, budget: usize) -> usize {
        self.end_dropped();
        self.collect_idle();
        self.zero_for(budget, Counter::ZeroedIdle)
    }

    /// Zeroes as many free frames as calls of this CPU freed, if the knob `zero_on_free` is set.
    /// [`note_freed`](Self::note_freed) counts the freed frames.
    #[cold]
    pub(super) fn zero_freed(&self) {
        let freed = self.state.freed.take();
        if self.vm.knobs.zero_on_free() {
            self.zero_for(freed, Counter::ZeroedOnFree);
        }
    }

    /// Records that a call freed `frames` frames.
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
