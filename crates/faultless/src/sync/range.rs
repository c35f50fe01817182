//! temp
#![allow(missing_docs)]
use super::wait::*;
use super::rwlock::*;
use super::percpu::*;
use crate::*;
#[derive(Debug)]
pub struct ClaimSlots;
impl ClaimSlots { pub fn try_new(_: usize) -> Result<Self, OutOfMemory> { Ok(Self) } }
#[derive(Debug)]
pub struct RangeLock(RwLock);
#[derive(Debug)]
pub struct RangeGuard<'a>(WriteGuard<'a>);
impl RangeLock {
    pub fn new() -> Self { Self(RwLock::new()) }
    pub fn acquire<'a>(&'a self, _: &'a ClaimSlots, _: &'a Local, _: [VirtRange; 2], w: &impl Wait) -> RangeGuard<'a> { RangeGuard(self.0.write(w)) }
}
