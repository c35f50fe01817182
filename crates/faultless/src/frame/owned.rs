//! Frames as values: owned by one holder, mapped nowhere, and of a type that says whether a TLB flush is pending (`Owed`) or
//! complete (`Clean`, `Zeroed`).
//!
//! A CPU's TLB may hold a translation to a frame after its entry is gone. Until every such
//! CPU has flushed, the frame must not get a new owner (law 1), so a frame that comes out of a page table
//! is a `Frame<Owed>`, which can only be kept or [settled](Frame::settle). What allocation hands out
//! and what freeing, zeroing and publishing take is a [`Settled`] frame; the tests of [`safety`](crate::safety) assert that
//! an owed one is none.
//!
//! A `Frame` that is dropped is lost. It cannot free itself, for it does not know its allocator, nor
//! which CPU it is on; the census counts it as pooled for ever, and audits find it there.

use crate::addr::FrameNumber;
use crate::machine::Machine;
use core::fmt;
use core::marker::PhantomData;

/// A TLB flush is pending: stale translations to the frame may exist.
#[derive(Debug)]
pub enum Owed {}
/// No translation to the frame exists; its contents are arbitrary.
#[derive(Debug)]
pub enum Clean {}
/// No translation to the frame exists; its bytes are zero.
#[derive(Debug)]
pub enum Zeroed {}

mod sealed {
    /// `Owed`, and types of other crates, cannot implement [`Settled`](super::Settled).
    pub trait Sealed {}
    impl Sealed for super::Clean {}
    impl Sealed for super::Zeroed {}
}

/// The states of a frame that owes nothing: [`Clean`] and [`Zeroed`].
pub trait Settled: sealed::Sealed {
    /// Whether the bytes are known to be zero.
    const ZEROED: bool;
}
impl Settled for Clean {
    const ZEROED: bool = false;
}
impl Settled for Zeroed {
    const ZEROED: bool = true;
}

/// An unmapped block of 2^order frames (mostly one: order 0) that belongs to the holder of this value.
#[must_use = "a frame that is dropped is lost"]
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

    /// The number of the first frame.
    #[inline]
    pub const fn number(&self) -> FrameNumber {
        self.number
    }

    /// log2 of the frames in the block.
    #[inline]
    pub const fn order(&self) -> u8 {
        self.order
    }

    /// Gives up the value and keeps the number; the frame stays allocated. The way into a
    /// page-table entry is [`Frames::publish`](super::Frames::publish); this is for lists of numbers.
    #[inline]
    pub const fn into_number(self) -> FrameNumber {
        self.number
    }
}

impl Frame<Owed> {
    /// Declares the debt paid: the only way from `Owed` to [`Clean`].
    ///
    /// # Safety
    /// Every CPU that could hold a translation to these frames has dropped it, after the entry that
    /// it came from was cleared.
    #[inline]
    pub const unsafe fn settle(self) -> Frame<Clean> {
        Frame::new(self.number, self.order)
    }
}

impl Frame<Clean> {
    /// Fills the frames with zeros.
    #[inline]
    pub fn zero(self, machine: &impl Machine) -> Frame<Zeroed> {
        // The first by itself: mostly it is the only one.
        // SAFETY: the value is the only owner, and a clean frame has no translation.
        unsafe { machine.zero_frame(self.number) };
        for number in (self.number.0..).take(1 << self.order).skip(1) {
            // SAFETY: the value is the only owner, and a clean frame has no translation.
            unsafe { machine.zero_frame(FrameNumber(number)) };
        }
        Frame::new(self.number, self.order)
    }
}

impl Frame<Clean> {
    /// Fills frames with zeros that are not needed at once.
    pub(super) fn zero_ahead(self, machine: &impl Machine) -> Frame<Zeroed> {
        // SAFETY: the value is the only owner, and a clean frame has no translation.
        unsafe { machine.zero_ahead(self.number, 1 << self.order) };
        Frame::new(self.number, self.order)
    }
}

impl From<Frame<Zeroed>> for Frame<Clean> {
    /// Forgets that the bytes are zero.
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
