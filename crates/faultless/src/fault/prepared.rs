//! The frame that a fault prepared and has not installed: an aborted attempt passes the frame to
//! the next attempt, and the end of the fault frees it.

use crate::frame::{Clean, Frame, Zeroed};
use crate::machine::Machine;
use crate::vm::Cpu;
use core::ops::{Deref, DerefMut};

/// At most one frame, with the state of its preparation.
#[derive(Debug, Default)]
pub enum Prepared {
    /// No frame.
    #[default]
    Nothing,
    /// A frame with arbitrary contents.
    Clean(Frame<Clean>),
    /// A frame of zeros.
    Zeroed(Frame<Zeroed>),
}

impl Prepared {
    /// Returns a frame of zeros: the prepared frame, or a new one.
    #[inline(always)]
    pub(crate) fn zeroed<M: Machine>(&mut self, cpu: &Cpu<'_, M>) -> Option<Frame<Zeroed>> {
        match core::mem::take(self) {
            Self::Nothing => cpu.alloc_zeroed(),
            Self::Zeroed(frame) => Some(frame),
            Self::Clean(frame) => Some(cpu.zero(frame)),
        }
    }

    /// Returns a frame of zeros for a page table. The prepared frame is meant for a page and
    /// perhaps of a particular node, so it is used only if no other frame is free.
    #[inline(never)]
    pub(crate) fn table<M: Machine>(&mut self, cpu: &Cpu<'_, M>) -> Option<Frame<Zeroed>> {
        let frame = cpu.alloc_table();
        if frame.is_some() || self.is_nothing() { frame } else { self.zeroed(cpu) }
    }

    /// Keeps the frame of a table that was not installed, or frees the frame.
    #[cold]
    pub(crate) fn keep_table<M: Machine>(&mut self, frame: Frame<Zeroed>, cpu: &Cpu<'_, M>) {
        if self.is_nothing() { self.keep_zeroed(frame) } else { cpu.free(frame) }
    }

    /// Returns whether no frame is prepared.
    #[inline(always)]
    pub(crate) const fn is_nothing(&self) -> bool {
        matches!(self, Self::Nothing)
    }

    /// [`zeroed`](Self::zeroed) for uncommon paths.
    #[inline(never)]
    pub(crate) fn zeroed_seldom<M: Machine>(&mut self, cpu: &Cpu<'_, M>) -> Option<Frame<Zeroed>> {
        self.zeroed(cpu)
    }

    /// Returns a frame to overwrite: the prepared frame, or a new one.
    #[inline]
    pub(crate) fn clean<M: Machine>(&mut self, cpu: &Cpu<'_, M>) -> Option<Frame<Clean>> {
        match core::mem::take(self) {
            Self::Nothing => cpu.alloc(),
            Self::Zeroed(frame) => Some(frame.into()),
            Self::Clean(frame) => Some(frame),
        }
    }

    /// Keeps a frame that was not installed. No frame may be prepared: the kept frame was taken
    /// from here.
    pub(crate) fn keep_zeroed(&mut self, frame: Frame<Zeroed>) {
        debug_assert!(self.is_nothing(), "a second prepared frame");
        *self = Self::Zeroed(frame);
    }

    /// As [`keep_zeroed`](Self::keep_zeroed), for a frame with arbitrary contents.
    pub(crate) fn keep_clean(&mut self, frame: Frame<Clean>) {
        debug_assert!(self.is_nothing(), "a second prepared frame");
        *self = Self::Clean(frame);
    }

    /// Ensures that the next attempt finds a frame, and waits for a free frame if necessary.
    /// Returns whether there is one. The caller is in no grace section and holds no lock.
    pub(crate) fn wait_for_one<M: Machine>(&mut self, cpu: &Cpu<'_, M>) -> bool {
        if self.is_nothing()
            && let Ok(frame) = cpu.alloc_or_wait()
        {
            *self = Self::Clean(frame);
        }
        !self.is_nothing()
    }

    /// Calls `call`, which may call a store or a watcher, and frees the prepared frame if `call`
    /// panics.
    pub(crate) fn kept<M: Machine, R>(&mut self, cpu: &Cpu<'_, M>, call: impl FnOnce() -> R) -> R {
        let mut guard = Preparing { cpu, frame: core::mem::take(self) };
        let done = call();
        *self = core::mem::take(&mut guard.frame);
        done
    }

    /// Frees the prepared frame.
    #[inline(always)]
    pub(crate) fn finish<M: Machine>(self, cpu: &Cpu<'_, M>) {
        match self {
            Self::Nothing => {}
            Self::Clean(frame) => cpu.free(frame),
            Self::Zeroed(frame) => cpu.free(frame),
        }
    }
}

/// The [`Prepared`] frame of a call. Its drop frees an unneeded frame, also when a store panics. A
/// fault uses this guard only [around such calls](Prepared::kept): the guard would cost 20
/// instructions, and a [predictor](super::prefault::Predictor) must not panic.
pub(crate) struct Preparing<'c, 'v, M: Machine> {
    cpu: &'c Cpu<'v, M>,
    frame: Prepared,
}

impl<'c, 'v, M: Machine> Preparing<'c, 'v, M> {
    /// Starts without a frame.
    #[inline(always)]
    pub(crate) const fn new(cpu: &'c Cpu<'v, M>) -> Self {
        Self { cpu, frame: Prepared::Nothing }
    }
}

impl<M: Machine> Deref for Preparing<'_, '_, M> {
    type Target = Prepared;

    #[inline(always)]
    fn deref(&self) -> &Prepared {
        &self.frame
    }
}

impl<M: Machine> DerefMut for Preparing<'_, '_, M> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Prepared {
        &mut self.frame
    }
}

impl<M: Machine> Drop for Preparing<'_, '_, M> {
    #[inline(always)]
    fn drop(&mut self) {
        core::mem::take(&mut self.frame).finish(self.cpu);
    }
}
