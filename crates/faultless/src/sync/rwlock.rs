//! temp
#![allow(missing_docs)]
use super::atomic::*;
use super::wait::*;
#[derive(Debug)]
pub struct RwLock(AtomicU64);
#[derive(Debug)]
pub struct ReadGuard<'a>(&'a RwLock);
#[derive(Debug)]
pub struct WriteGuard<'a>(&'a RwLock);
impl RwLock {
    pub fn new() -> Self { Self(AtomicU64::new(0)) }
    pub fn try_read(&self) -> Option<ReadGuard<'_>> {
        let s = self.0.load(Ordering::Relaxed);
        (s < 1 << 32 && self.0.compare_exchange(s, s + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()).then(|| ReadGuard(self))
    }
    pub fn read(&self, w: &impl Wait) -> ReadGuard<'_> { let mut n = 0; loop { if let Some(g) = self.try_read() { return g } w.wait(n); n += 1; } }
    pub fn write(&self, w: &impl Wait) -> WriteGuard<'_> { let mut n = 0; while self.0.compare_exchange(0, 1 << 32, Ordering::AcqRel, Ordering::Relaxed).is_err() { w.wait(n); n += 1; } WriteGuard(self) }
}
impl Drop for ReadGuard<'_> { fn drop(&mut self) { self.0.0.fetch_sub(1, Ordering::AcqRel); } }
impl Drop for WriteGuard<'_> { fn drop(&mut self) { self.0.0.store(0, Ordering::Release); } }
