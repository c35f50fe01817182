//! Event counters (`eventfd`).

use super::stream::{Events, Stream};
use super::transfer::Transfer;
use crate::errno::{Errno, Result};
use crate::task::wait::Changes;
use faultless_bare::sync::Mutex;
use faultless_collections::Arc;

/// A counter; reads wait until the value is not 0.
#[derive(Debug)]
pub struct EventCounter {
    count: Mutex<u64>,
    /// Set if a read decrements the counter by 1 instead of taking the whole value.
    semaphore: bool,
    changes: Arc<Changes>,
}

impl EventCounter {
    /// A counter with the value `count`.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new(count: u64, semaphore: bool) -> Result<Arc<Self>> {
        let changes = Arc::try_new(Changes::default())?;
        Ok(Arc::try_new(Self { count: Mutex::new(count), semaphore, changes })?)
    }
}

impl Stream for EventCounter {
    fn read(&self, to: &mut Transfer<'_>) -> Result {
        if to.left() < 8 {
            return Err(Errno::EINVAL);
        }
        let taken = {
            let mut count = self.count.lock();
            if *count == 0 {
                return Err(Errno::EAGAIN);
            }
            let taken = if self.semaphore { 1 } else { *count };
            *count -= taken;
            taken
        };
        self.changes.announce();
        to.put_bytes(&taken.to_ne_bytes());
        to.result()
    }

    fn write(&self, from: &mut Transfer<'_>) -> Result {
        if from.left() != 8 {
            return Err(Errno::EINVAL);
        }
        // Read without consuming the bytes: the write may be repeated later.
        let mut bytes = [0; 8];
        if from.ahead().take_bytes(&mut bytes) != 8 {
            return Err(Errno::EFAULT);
        }
        let more = u64::from_ne_bytes(bytes);
        {
            let mut count = self.count.lock();
            let sum = count.checked_add(more).filter(|&sum| sum != u64::MAX);
            *count = match sum {
                Some(sum) => sum,
                None if more == u64::MAX => return Err(Errno::EINVAL),
                None => return Err(Errno::EAGAIN),
            };
        }
        from.skip(8);
        from.limit(0);
        self.changes.announce();
        Ok(8)
    }

    fn ready(&self) -> Events {
        let count = *self.count.lock();
        let mut ready = Events::empty();
        ready.set(Events::READ, count != 0);
        ready.set(Events::WRITE, count < u64::MAX - 1);
        ready
    }

    fn changes(&self) -> Option<&Arc<Changes>> {
        Some(&self.changes)
    }
}
