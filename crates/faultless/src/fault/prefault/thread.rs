//! The predictor of a thread.

use super::predictor::Predictor;
use super::streams::Streams;
use crate::machine::Machine;
use core::cell::{RefCell, RefMut};

/// The predictor of one thread. Each new thread starts with a new value.
#[derive(Debug)]
pub struct ThreadStreams<P = Streams>(RefCell<P>);

impl<P: Predictor> Default for ThreadStreams<P> {
    fn default() -> Self {
        Self::new()
    }
}

impl<P: Predictor> ThreadStreams<P> {
    /// Returns the predictor of a thread that has not faulted.
    pub const fn new() -> Self {
        Self(RefCell::new(P::NEW))
    }

    /// Forgets everything: for a thread that has forked.
    pub fn reset(&self) {
        self.0.replace(P::NEW);
    }

    /// Returns the predictor for one fault; `None` in a nested fault, which predicts nothing.
    pub(crate) fn of_fault(&self) -> Option<RefMut<'_, P>> {
        self.0.try_borrow_mut().ok()
    }
}

/// The predictor of a thread on machine `M`.
pub(crate) type ThreadPredictor<M> = ThreadStreams<<M as Machine>::Predictor>;
