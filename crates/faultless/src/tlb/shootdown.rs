//! Shootdowns: requests to CPUs to drop translations, and their acknowledgement.
//!
//! Each CPU has a queue of shootdown requests (its *inbox*; a request is a *post*). A sender adds a
//! request to the queue of each CPU of the space's set, interrupts the CPU, and waits until the
//! CPU's count of *served* requests has reached the request's sequence number. A CPU serves its
//! queue when interrupted, and in every wait loop, so two CPUs with mutual flush requests both make
//! progress. A full queue degrades to "drop everything".

use crate::machine::{CpuId, Invalidate, Machine, SpaceId};
use crate::sync::atomic::{AtomicU64, Ordering, fence};
use crate::sync::mutant::{Mutant, lost};
use crate::sync::order::{self, Flush, FlushInbox, Record};
use crate::sync::percpu::{Local, PerCpu};
use crate::sync::spin::SpinLock;
use crate::sync::wait::{Wait, until};
use crate::tlb::cpuset::CpuSet;
use crate::tlb::deferred::Deferred;
use arrayvec::ArrayVec;

/// Requests that a queue holds before it degrades.
const POSTS: usize = if cfg!(loom) { 1 } else { 8 };

#[derive(Debug, Default)]
struct Posts {
    items: ArrayVec<(SpaceId, Invalidate), POSTS>,
    everything: bool,
}

/// Waits like the machine, but serves no shootdown requests: for leaf locks.
struct Relax<'a, M>(&'a M, &'a Local);

impl<M: Machine> Wait for Relax<'_, M> {
    fn wait(&self, looks: u32) {
        self.0.relax(looks);
    }

    fn order(&self) -> Option<&Record> {
        Some(self.1.order())
    }
}

/// The shootdown requests to one CPU.
#[derive(Debug)]
pub struct Inbox {
    posts: SpinLock<Posts, FlushInbox>,
    /// The number of requests queued; written under the lock.
    posted: AtomicU64,
    /// The number of requests served.
    served: AtomicU64,
}

impl Default for Inbox {
    fn default() -> Self {
        Self::new()
    }
}

impl Inbox {
    /// Returns an empty queue.
    pub fn new() -> Self {
        Self {
            posts: SpinLock::ordered(Posts::default()),
            posted: AtomicU64::new(0),
            served: AtomicU64::new(0),
        }
    }

    /// Queues a request. The lock is a leaf: its holder does not wait, so this wait serves no
    /// requests.
    fn post<M: Machine>(&self, machine: &M, local: &Local, space: SpaceId, what: Invalidate) {
        let wait = Relax(machine, local);
        let mut posts = self.posts.lock(&wait);
        if posts.items.try_push((space, what)).is_err() {
            posts.everything = !lost(Mutant::OverflowDropsAll);
        }
        self.posted.store(self.posted.load(Ordering::Relaxed) + 1, Ordering::Release);
    }

    /// Queues a request to drop everything.
    pub fn post_everything<M: Machine>(&self, machine: &M, local: &Local) {
        let wait = Relax(machine, local);
        let mut posts = self.posts.lock(&wait);
        posts.everything = true;
        self.posted.store(self.posted.load(Ordering::Relaxed) + 1, Ordering::Release);
    }

    /// Returns whether the queue is empty. The loads are relaxed: a CPU that was interrupted for a
    /// request sees the request, by the contract of [`Machine::interrupt`]; a wait loop reads
    /// again.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.posted.load(Ordering::Relaxed) == self.served.load(Ordering::Relaxed)
    }

    /// Serves every waiting request on the calling CPU, `local`, which runs the space `runs`.
    /// Returns the number of requests.
    pub fn serve<M: Machine>(
        &self,
        machine: &M,
        local: &Local,
        runs: SpaceId,
        deferred: &Deferred,
    ) -> u64 {
        if self.is_empty() {
            return 0;
        }
        let (taken, ticket) = {
            let wait = Relax(machine, local);
            let mut posts = self.posts.lock(&wait);
            (core::mem::take(&mut *posts), self.posted.load(Ordering::Relaxed))
        };
        // A CPU has translations of the space it runs only. After dropping all of them, the CPU has
        // flushed all deferrals so far, too. The clock is read after the lock was taken: a
        // settlement reads the clock before it posts.
        let all = taken.everything || taken.items.contains(&(runs, Invalidate::All));
        let seen = all.then(|| deferred.before_served_flush());
        if lost(Mutant::DropTranslations) {
            // The mutant drops no translations.
        } else if taken.everything {
            machine.invalidate_all(local.id());
        } else {
            for (space, what) in taken.items {
                machine.invalidate(local.id(), space, what);
            }
        }
        if let Some(seen) = seen {
            deferred.flushed(local, seen);
        }
        let before = self.served.load(Ordering::Relaxed);
        self.served.store(ticket, Ordering::Release);
        ticket - before
    }
}

/// Drops translations of `space` on every CPU of `cpus`. Returns the number of CPUs interrupted,
/// after all have acknowledged. The caller's changes of the tables come first.
#[inline]
pub fn shoot<M: Machine>(
    machine: &M,
    inboxes: &PerCpu<Inbox>,
    local: &Local,
    wait: &impl Wait,
    space: SpaceId,
    cpus: &CpuSet,
    what: Invalidate,
) -> u64 {
    order::before::<Flush>(wait);
    // Either a CPU that joins the set now walks the changed tables, or this CPU sees the joining
    // CPU in the set.
    if !lost(Mutant::JoinFence) {
        fence(Ordering::SeqCst);
    }
    let here = local.id();
    let mut sent = 0;
    if cpus.any_but(here, machine.cpus()) {
        for cpu in cpus.iter(machine.cpus()).filter(|&cpu| cpu != here) {
            inboxes.remote(cpu).post(machine, local, space, what);
            machine.interrupt(cpu);
            sent += 1;
        }
    }
    if cpus.contains(here) {
        machine.invalidate(here, space, what);
    }
    if sent != 0 && !lost(Mutant::AwaitAnswers) {
        for cpu in cpus.iter(machine.cpus()).filter(|&cpu| cpu != here) {
            await_served(inboxes.remote(cpu), cpus, cpu, wait);
        }
    }
    sent
}

/// Waits until `cpu` has served all requests posted so far, or has flushed and left the set.
fn await_served(inbox: &Inbox, cpus: &CpuSet, cpu: CpuId, wait: &impl Wait) {
    let ticket = inbox.posted.load(Ordering::Acquire);
    until(wait, || inbox.served.load(Ordering::Acquire) >= ticket || !cpus.contains(cpu));
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::testing::TestMachine;

    #[test]
    fn an_inbox_serves_and_counts_each_post_once() {
        let machine = TestMachine::new(2, 2);
        // SAFETY: there are no slots.
        let [here, there] = [0, 1].map(|cpu| unsafe { Local::claim(CpuId(cpu)) });
        let (inbox, deferred) = (Inbox::new(), Deferred::try_new(2).unwrap());
        assert!(inbox.is_empty());
        for posts in [1, 3, POSTS as u64 + 2] {
            for space in 0..posts {
                inbox.post(&machine, &there, SpaceId(space), Invalidate::All);
                assert!(!inbox.is_empty());
            }
            assert_eq!(inbox.serve(&machine, &here, SpaceId(9), &deferred), posts);
            assert_eq!(
                (inbox.is_empty(), inbox.serve(&machine, &here, SpaceId(9), &deferred)),
                (true, 0)
            );
        }
        // The requests of the last round overflowed the queue, so they were served by one full
        // flush.
        let asked = [0, 0, 1, 2].map(|space| (CpuId(0), SpaceId(space), Invalidate::All));
        assert_eq!(*machine.invalidated.lock().unwrap(), asked);
    }
}
