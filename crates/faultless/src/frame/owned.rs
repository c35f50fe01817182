//! Frames as values: owned by one holder, not mapped, and of a type that states whether a TLB flush
//! is pending (`FlushPending`) or complete (`Clean`, `Zeroed`).
//!
//! A CPU's TLB may hold a translation to a frame after its entry is gone. Until every such CPU has
//! flushed, the frame must not get a new owner (law 1). So a frame that comes out of a page table
//! is a `Frame<FlushPending>`, which can only be kept or [taken as flushed](Frame::assume_flushed).
//! Allocation returns, and freeing, zeroing and publishing take, a [`Flushed`] frame; the tests of
//! [`safety`](crate::safety) assert that `FlushPending` does not implement `Flushed`.
//!
//! A dropped `Frame` is leaked. It cannot free itself, because it knows neither its allocator nor
//! the current CPU; the census counts it as pooled, and audits report it.

use crate::addr::FrameNumber;
use crate::machine::Machine;
use core::fmt;
use core::marker::PhantomData;

/// A TLB flush is pending: stale translations to the frame may exist.
#[derive(Debug)]
pub enum FlushPending {}
/// No translation to the frame exists; its contents are arbitrary.
#[derive(Debug)]
pub enum Clean {}
/// No translation to the frame exists; its bytes are zero.
#[derive(Debug)]
pub enum Zeroed {}

mod sealed {
    /// `FlushPending`, and types of other crates, cannot implement [`Flushed`](super::Flushed).
    pub trait Sealed {}
    impl Sealed for super::Clean {}
    impl Sealed for super::Zeroed {}
}

/// The states of a frame without a pending flush: [`Clean`] and [`Zeroed`].
pub trait Flushed: sealed::Sealed {
    /// Whether the bytes are known to be zero.
    const ZEROED: bool;
}
impl Flushed for Clean {
    const ZEROED: bool = false;
}
impl Flushed for Zeroed {
    const ZEROED: bool = true;
}

/// An unmapped block of 2^order frames (usually one: order 0) that belongs to the holder of this
/// value.
#[must_use = "a dropped frame is lost"]
pub struct Frame<S> {
    number: FrameNumber,
    order: u8,
    state: PhantomData<S>,
}

impl<S> Frame<S> {
    #[inline(always)]
    pub(super) const fn new(number: FrameNumber, order: u8) -> Self {
        Self { number, order, state: PhantomData }
    }

    /// Returns the number of the first frame.
    #[inline]
    pub const fn number(&self) -> FrameNumber {
        self.number
    }

    /// Returns log2 of the frames in the block.
    #[inline]
    pub const fn order(&self) -> u8 {
        self.order
    }

    /// Consumes the value and returns the number; the frame stays allocated. For lists of numbers;
    /// a frame becomes a page-table entry through [`Frames::publish`](super::Frames::publish).
    #[inline]
    pub const fn into_number(self) -> FrameNumber {
        self.number
    }
}

impl Frame<FlushPending> {
    /// Marks the flush as done: the only conversion from `FlushPending` to [`Clean`].
    ///
    /// # Safety
    /// Every CPU that could hold a translation to these frames has dropped it, after the entry of
    /// the translation was cleared.
    #[inline]
    pub const unsafe fn assume_flushed(self) -> Frame<Clean> {
        Frame::new(self.number, self.order)
    }
}

impl Frame<Clean> {
    /// Fills the frames with zeros.
    #[inline]
    pub fn zero(self, machine: &impl Machine) -> Frame<Zeroed> {
        // The first frame separately, because it is usually the only one. SAFETY: the value is the
        // only owner, and a clean frame has no translation.
        unsafe { machine.zero_frame(self.number) };
        for number in (self.number.0..).take(1 << self.order).skip(1) {
            // SAFETY: the value is the only owner, and a clean frame has no translation.
            unsafe { machine.zero_frame(FrameNumber(number)) };
        }
        Frame::new(self.number, self.order)
    }
}

impl Frame<Clean> {
    /// Fills frames with zeros for later use.
    pub(super) fn zero_ahead(self, machine: &impl Machine) -> Frame<Zeroed> {
        // SAFETY: the value is the only owner, and a clean frame has no translation.
        unsafe { machine.zero_ahead(self.number, 1 << self.order) };
        Frame::new(self.number, self.order)
    }
}

impl From<Frame<Zeroed>> for Frame<Clean> {
    /// Drops the knowledge that the bytes are zero.
    #[inline]
    fn from(frame: Frame<Zeroed>) -> Self {
        Self::new(frame.number, frame.order)
    }
}

impl<S> fmt::Debug for Frame<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = core::any::type_name::<S>().rsplit("::").next().unwrap_or_default();
        write!(f, "Frame<{state}>({:#x}, order {})", self.number.0, self.order)
    }
}
