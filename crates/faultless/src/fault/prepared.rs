//! The frame that a fault prepared and has not installed: an aborted attempt passes it
//! to the next one, and the end of the fault frees it.

use crate::frame::{Clean, Frame, Zeroed};
use crate::machine::Machine;
use crate::vm::Cpu;
use core::ops::{Deref, DerefMut};

/// At most one frame, with the state of its preparation.
#[derive(Debug, Default)]
pub enum Prepared {
    /// None.
    #[default]
    Nothing,
    /// A frame with arbitrary contents.
    Clean(Frame<Clean>),
    /// A frame of zeros.
    Zeroed(Frame<Zeroed>),
}

impl Prepared {
    /// A frame of zeros: the prepared one, or a new one.
    #[inline(always)]
    pub(crate) fn zeroed<M: Machine>(&mut self, cpu: &Cpu<'_, M>) -> Option<Frame<Zeroed>> {
        match core::mem::take(self) {
            Self::Nothing => cpu.alloc_zeroed(),
            Self::Zeroed(frame) => Some(frame),
            Self::Clean(frame) => Some(cpu.zero(frame)),
        }
    }

    /// A frame of zeros for a page table. The prepared one is for a page, which may have to be of a certain node: it is taken only if there is
    /// no other.
    #[inline(never)]
    pub(crate) fn table<M: Machine>(&mut self, cpu: &Cpu<'_, M>) -> Option<Frame<Zeroed>> {
        let frame = cpu.alloc_table();
        if frame.is_some() || self.is_nothing() { frame } else { self.zeroed(cpu) }
    }

    /// Keeps the frame of a table that was not installed, or frees it.
    #[cold]
    pub(crate) fn keep_table<M: Machine>(&mut self, frame: Frame<Zeroed>, cpu: &Cpu<'_, M>) {
        if self.is_nothing() { self.keep_zeroed(frame) } else { cpu.free(frame) }
    }

    /// Whether there is none.
    #[inline(always)]
    pub(crate) const fn is_nothing(&self) -> bool {
        matches!(self, Self::Nothing)
    }

    /// As [`zeroed`](Self::zeroed), where it is not what is mostly done.
    #[inline(never)]
    pub(crate) fn zeroed_seldom<M: Machine>(&mut self, cpu: &Cpu<'_, M>) -> Option<Frame<Zeroed>> {
        self.zeroed(cpu)
    }

    /// A frame to be overwritten: the prepared one, or a new one.
    #[inline]
    pub(crate) fn clean<M: Machine>(&mut self, cpu: &Cpu<'_, M>) -> Option<Frame<Clean>> {
        match core::mem::take(self) {
            Self::Nothing => cpu.alloc(),
            Self::Zeroed(frame) => Some(frame.into()),
            Self::Clean(frame) => Some(frame),
        }
    }

    /// Keeps a frame that was not installed. There is none yet: it was taken from here.
    pub(crate) fn keep_zeroed(&mut self, frame: Frame<Zeroed>) {
        debug_assert!(self.is_nothing(), "a second prepared frame");
        *self = Self::Zeroed(frame);
    }

    /// As [`keep_zeroed`](Self::keep_zeroed).
    pub(crate) fn keep_clean(&mut self, frame: Frame<Clean>) {
        debug_assert!(self.is_nothing(), "a second prepared frame");
        *self = Self::Clean(frame);
    }

    /// Makes sure that the next attempt finds a frame, waiting for one if need be. Returns whether
    /// there is one. Not inside a grace section, and holding no lock.
    pub(crate) fn wait_for_one<M: Machine>(&mut self, cpu: &Cpu<'_, M>) -> bool {
        if self.is_nothing()
            && let Ok(frame) = cpu.alloc_or_wait()
        {
            *self = Self::Clean(frame);
        }
        !self.is_nothing()
    }

    /// Calls `call`, which may call a store or a watcher, and frees the frame if that panics.
    pub(crate) fn kept<M: Machine, R>(&mut self, cpu: &Cpu<'_, M>, call: impl FnOnce() -> R) -> R {
        let mut guard = Preparing { cpu, frame: core::mem::take(self) };
        let done = call();
        *self = core::mem::take(&mut guard.frame);
        done
    }

    /// Frees the frame.
    #[inline(always)]
    pub(crate) fn finish<M: Machine>(self, cpu: &Cpu<'_, M>) {
        match self {
            Self::Nothing => {}
            Self::Clean(frame) => cpu.free(frame),
            Self::Zeroed(frame) => cpu.free(frame),
        }
    }
}

/// The [`Prepared`] frame of a call. The drop frees a frame that was not needed, also when a store
/// panics. A fault has such a guard only [around such calls](Prepared::kept): it would cost 20 instructions, and a [predictor](super::prefault::Predictor)
/// must not panic.
pub(crate) struct Preparing<'c, 'v, M: Machine> {
    cpu: &'c Cpu<'v, M>,
    frame: Prepared,
}

impl<'c, 'v, M: Machine> Preparing<'c, 'v, M> {
    /// No frame yet.
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
