//! temp
#![allow(missing_docs)]
use super::percpu::*;
use super::wait::*;
use super::spin::*;
use alloc::vec::Vec;
use core::{cell::Cell, marker::PhantomData, ptr::NonNull};
#[repr(C)]
#[derive(Debug)]
pub struct RetireLink { next: Cell<Option<NonNull<RetireLink>>>, kind: u8 }
impl RetireLink {
    pub const fn new(kind: u8) -> Self { Self { next: Cell::new(None), kind } }
    pub fn kind(&self) -> u8 { self.kind }
}
#[derive(Debug)]
pub struct Grace(SpinLock<Vec<usize>>);
#[derive(Debug)]
pub struct Section<'s>(PhantomData<&'s Grace>);
impl Drop for Section<'_> { fn drop(&mut self) {} }
impl Grace {
    pub fn try_new(_: usize) -> Result<Self, crate::OutOfMemory> { Ok(Self(SpinLock::new(Vec::new()))) }
    #[inline(always)]
    pub fn enter<'s>(&'s self, _: &'s Local) -> Section<'s> { Section(PhantomData) }
    pub unsafe fn retire(&self, _: &Local, l: NonNull<RetireLink>) { self.0.lock(&Spin).push(l.as_ptr() as usize) }
    pub fn collect(&self, _: &Local) -> impl Iterator<Item = NonNull<RetireLink>> { core::mem::take(&mut *self.0.lock(&Spin)).into_iter().map(|l| NonNull::new(l as *mut _).unwrap()) }
    pub fn pending(&self, _: &Local) -> usize { self.0.lock(&Spin).len() }
    pub fn synchronize(&self, _: &Local, _: &impl Wait) {}
}
