//! temp
#![allow(missing_docs)]
use super::atomic::*;
#[derive(Debug)]
pub struct Sequence(AtomicU64);
impl Sequence {
    pub fn new() -> Self { Self(AtomicU64::new(0)) }
    #[inline(always)]
    pub fn read(&self) -> Option<u64> { let s = self.0.load(Ordering::Acquire); (s & 1 == 0).then_some(s) }
    #[inline(always)]
    pub fn unchanged(&self, seen: u64) -> bool { self.0.load(Ordering::Relaxed) == seen }
    pub fn begin_write(&self) { let s = self.0.load(Ordering::Relaxed); self.0.store(s + 1, Ordering::Relaxed); }
    pub fn end_write(&self) { let s = self.0.load(Ordering::Relaxed); self.0.store(s + 1, Ordering::Release); }
    pub fn writer_fence() { fence(Ordering::SeqCst) }
}
