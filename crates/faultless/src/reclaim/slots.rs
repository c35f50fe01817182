//! The slots of the swap area: the number of entries that name each slot, and the free slots.
//!
//! A free slot is reserved in three steps, each of which decrements a count:
//!
//! 1. the count of all free slots; at 0 the area is full;
//! 2. the count of free slots of a *cluster*, a group of contiguous slots. Every reservation
//!    granted by the first step has a free slot in some cluster;
//! 3. the slot's own count, which the search in this cluster raises from 0 to 1.
//!
//! Freeing a slot updates the counts in the reverse order, so each count is at most the sum of the
//! next ones. Thus a search visits each cluster once, and the slots of one cluster, however full
//! the area is. The search fails only in the first step. Two CPUs may take the last slots in turn,
//! so that one CPU must search again; this happens only because the other CPU has got a slot.
//!
//! Each page that is swapped in writes the counts of all slots and of a cluster, and also the
//! space's count of its swapped pages. Linux has such counts, too, and takes a lock to write a
//! cluster's count.

use crate::error::OutOfMemory;
use crate::heap::try_push;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, made};
use alloc::vec::Vec;

/// The number of slots of a cluster.
const CLUSTER: u64 = 512;
/// The number of clusters searched before flush requests are served.
const LOOKS: u64 = 1 << 12;

/// The counts.
#[derive(Debug)]
pub(super) struct Slots {
    /// The number of entries that name each slot, or 1 while the slot is reserved.
    counts: Vec<AtomicU32>,
    /// The number of free slots of each cluster.
    clusters: Vec<AtomicU64>,
    /// The number of all free slots.
    free: AtomicU64,
    /// The position at which the search for a free slot continues.
    next: AtomicU64,
}

impl Slots {
    /// Returns the counts of `slots` slots, all free.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the heap is exhausted.
    pub(super) fn try_new(slots: u64) -> Result<Self, OutOfMemory> {
        let in_cluster = |at: u64| AtomicU64::new((slots - at * CLUSTER).min(CLUSTER));
        Ok(Self {
            counts: all(slots, |_| AtomicU32::new(0))?,
            clusters: all(slots.div_ceil(CLUSTER), in_cluster)?,
            free: AtomicU64::new(slots),
            next: AtomicU64::new(0),
        })
    }

    /// Returns the number of slots.
    pub(super) const fn len(&self) -> u64 {
        self.counts.len() as u64
    }

    /// Returns the number of free slots.
    pub(super) fn free(&self) -> u64 {
        self.free.load(Ordering::Relaxed)
    }

    /// Returns how many entries name `slot`, or 1 if it is reserved.
    pub(super) fn count(&self, slot: u64) -> u32 {
        let count = self.counts.get(slot as usize);
        count.map_or(0, |count| count.load(Ordering::Acquire))
    }

    /// Counts one more entry for `slot`, which has at least one.
    ///
    /// # Errors
    /// [`OutOfMemory`]: the count has reached its maximum.
    pub(super) fn add(&self, slot: u64) -> Result<(), OutOfMemory> {
        let Some(count) = self.counts.get(slot as usize) else { return Err(OutOfMemory) };
        let relaxed = Ordering::Relaxed;
        let mut now = count.load(relaxed);
        loop {
            debug_assert!(now != 0, "an entry without a count");
            let more = now.checked_add(1).ok_or(OutOfMemory)?;
            match count.compare_exchange_weak(now, more, relaxed, relaxed) {
                Ok(_) => return Ok(()),
                Err(changed) => now = changed,
            }
        }
    }

    /// Sets the number of entries that name `slot`, which the caller has reserved, to `count`.
    pub(super) fn set(&self, slot: u64, count: u32) {
        // No other CPU changes the count of a reserved slot.
        self.counts[slot as usize].store(count, Ordering::Release);
    }

    /// Uncounts an entry of `slot`, or ends its reservation.
    pub(super) fn put(&self, slot: u64) {
        let Some(count) = self.counts.get(slot as usize) else { return };
        // All accesses to the page come before the next use of the slot.
        let before = count.fetch_sub(1, Ordering::Release);
        debug_assert!(before != 0, "a slot's count dropped twice");
        if before == 1 {
            self.clusters[(slot / CLUSTER) as usize].fetch_add(1, Ordering::Release);
            self.free.fetch_add(1, Ordering::Release);
        }
    }

    /// Reserves the next free slot: its count becomes 1. `pause` is called periodically in a long
    /// search.
    pub(super) fn reserve(&self, mut pause: impl FnMut()) -> Option<u64> {
        if !take_one(&self.free) {
            return None;
        }
        let (slots, clusters) = (self.len(), self.clusters.len() as u64);
        let next = self.next.load(Ordering::Relaxed) % slots;
        let has_one = |cluster: &u64| {
            if cluster.is_multiple_of(LOOKS) {
                pause();
            }
            take_one(&self.clusters[*cluster as usize])
        };
        let cluster = (next / CLUSTER..).map(|cluster| cluster % clusters).find(has_one)?;
        let (first, order) = (cluster * CLUSTER, (Ordering::Acquire, Ordering::Relaxed));
        let in_cluster = (slots - first).min(CLUSTER);
        let is_free = |slot: &u64| {
            let count = &self.counts[*slot as usize];
            count.load(Ordering::Relaxed) == 0
                && count.compare_exchange(0, 1, order.0, order.1).is_ok()
        };
        let from = next.saturating_sub(first);
        let slot = (from..).map(|at| first + at % in_cluster).find(is_free)?;
        self.next.store(slot + 1, Ordering::Relaxed);
        Some(slot)
    }

    /// Returns whether the counts of clusters and the total agree with the slots. For use while no
    /// CPU changes the counts.
    pub(super) fn agree(&self) -> bool {
        let free = |slots: &[AtomicU32]| {
            slots.iter().filter(|count| count.load(Ordering::Relaxed) == 0).count() as u64
        };
        let mut clusters = self.counts.chunks(CLUSTER as usize).zip(&self.clusters);
        free(&self.counts) == self.free()
            && clusters.all(|(slots, count)| free(slots) == count.load(Ordering::Relaxed))
    }
}

/// Decrements `count`, unless it is 0. Returns whether it did.
fn take_one(count: &AtomicU64) -> bool {
    let mut now = count.load(Ordering::Relaxed);
    while now != 0 {
        let order = (Ordering::Acquire, Ordering::Relaxed);
        match count.compare_exchange_weak(now, now - 1, order.0, order.1) {
            Ok(_) => return true,
            Err(changed) => now = changed,
        }
    }
    false
}

/// Returns a list of `len` counts.
fn all<T>(len: u64, count: impl Fn(u64) -> T) -> Result<Vec<T>, OutOfMemory> {
    let mut counts = Vec::new();
    counts.try_reserve_exact(len as usize).map_err(|_| OutOfMemory)?;
    made(counts.as_ptr(), len as usize);
    (0..len).try_for_each(|at| try_push(&mut counts, count(at)))?;
    Ok(counts)
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;
    use std::thread;

    fn reserve(slots: &Slots) -> Option<u64> {
        slots.reserve(|| {})
    }

    #[derive(Clone, Debug)]
    enum Step {
        /// Reserves this number of slots.
        Reserve(u64),
        /// Counts or uncounts an entry of the slot in use at this place.
        Add(usize),
        Put(usize),
        /// Frees all slots starting at this place.
        PutFrom(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (1u64..700).prop_map(Step::Reserve),
            (1u64..4).prop_map(Step::Reserve),
            any::<usize>().prop_map(Step::Add),
            any::<usize>().prop_map(Step::Put),
            any::<usize>().prop_map(Step::PutFrom),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 96 }))]

        #[test]
        fn a_slot_is_found_while_one_is_free(
            len in 1u64..if cfg!(miri) { 600 } else { 2000 },
            steps in prop::collection::vec(step(), 1..if cfg!(miri) { 4 } else { 60 }),
        ) {
            let slots = Slots::try_new(len).unwrap();
            let mut model = BTreeMap::new();
            for step in steps {
                let used: Vec<u64> = model.keys().copied().collect();
                let at = |place: usize| place.checked_rem(used.len()).map(|at| used[at]);
                match step {
                    Step::Reserve(count) => for _ in 0..count {
                        let slot = reserve(&slots);
                        prop_assert_eq!(slot.is_none(), model.len() as u64 == len);
                        if let Some(slot) = slot {
                            prop_assert!(slot < len && model.insert(slot, 1).is_none());
                        }
                    },
                    Step::Add(place) => if let Some(slot) = at(place) {
                        slots.add(slot).unwrap();
                        model.entry(slot).and_modify(|count| *count += 1);
                    },
                    Step::Put(place) => if let Some(slot) = at(place) {
                        slots.put(slot);
                        model.entry(slot).and_modify(|count| *count -= 1);
                        model.retain(|_, count| *count != 0);
                    },
                    Step::PutFrom(place) => if let Some(first) = at(place) {
                        for (slot, count) in model.split_off(&first) {
                            (0..count).for_each(|_| slots.put(slot));
                        }
                    },
                }
                prop_assert!(slots.agree());
                prop_assert_eq!(slots.free(), len - model.len() as u64);
            }
            for slot in 0..len {
                prop_assert_eq!(slots.count(slot), model.get(&slot).copied().unwrap_or(0));
            }
        }
    }

    /// Slots are reserved in ascending order, so that pages which leave together are written
    /// together.
    #[test]
    fn neighbouring_slots_are_reserved_in_order() {
        let slots = Slots::try_new(1200).unwrap();
        // Also if other slots become free in the meantime.
        let mut all = (0..1200).map(|at| {
            let slot = reserve(&slots).unwrap();
            if at == 600 {
                (300..320).for_each(|slot| slots.put(slot));
            }
            slot
        });
        assert!(all.by_ref().eq(0..1200));
        assert!((300..320).all(|slot| reserve(&slots) == Some(slot)));
        assert_eq!(reserve(&slots), None);
        (300..900).for_each(|slot| slots.put(slot));
        assert!((320..900).chain(300..320).all(|slot| reserve(&slots) == Some(slot)));
    }

    /// No slot is checked in a cluster without free slots, not even a slot that seems to be free.
    #[test]
    fn clusters_without_a_free_slot_are_skipped() {
        let slots = Slots::try_new(4 * CLUSTER).unwrap();
        while reserve(&slots).is_some() {}
        slots.put(3 * CLUSTER + 7);
        slots.counts[..3 * CLUSTER as usize].iter().for_each(|it| it.store(0, Ordering::Relaxed));
        assert_eq!(reserve(&slots), Some(3 * CLUSTER + 7));
        assert_eq!(reserve(&slots), None, "the area is full");
    }

    #[test]
    fn long_searches_pause() {
        let slots = Slots::try_new(3 * LOOKS * CLUSTER).unwrap();
        slots.clusters.iter().for_each(|it| it.store(0, Ordering::Relaxed));
        slots.clusters[3 * LOOKS as usize - 1].store(1, Ordering::Relaxed);
        let mut pauses = 0;
        assert_eq!(slots.reserve(|| pauses += 1), Some((3 * LOOKS - 1) * CLUSTER));
        assert_eq!(pauses, 3);
    }

    #[test]
    fn a_count_does_not_overflow() {
        let slots = Slots::try_new(1).unwrap();
        assert_eq!((reserve(&slots), slots.add(1)), (Some(0), Err(OutOfMemory)));
        slots.set(0, u32::MAX);
        assert_eq!((slots.add(0), slots.count(0)), (Err(OutOfMemory), u32::MAX));
    }

    /// Three CPUs reserve and free the slots of an area that has fewer slots than they need.
    #[test]
    fn no_slot_has_two_owners() {
        let slots = Slots::try_new(CLUSTER + 1).unwrap();
        // Two free slots in the first cluster, one in the next.
        let taken = CLUSTER - 2;
        (0..taken).for_each(|_| assert!(reserve(&slots).is_some()));
        let owners: Vec<_> = (0..=CLUSTER).map(|_| AtomicU32::new(0)).collect();
        let rounds = if cfg!(miri) { 20 } else { 20_000 };
        thread::scope(|scope| {
            for cpu in 1..=3 {
                let (slots, owners) = (&slots, &owners);
                scope.spawn(move || {
                    for _ in 0..rounds {
                        let own = [reserve(slots), reserve(slots)];
                        for slot in own.into_iter().flatten() {
                            let owner = &owners[slot as usize];
                            assert_eq!(
                                owner.swap(cpu, Ordering::Relaxed),
                                0,
                                "two owners of {slot}"
                            );
                            assert_eq!(slots.count(slot), 1);
                        }
                        for slot in own.into_iter().flatten() {
                            let owner = owners[slot as usize].swap(0, Ordering::Relaxed);
                            assert_eq!(owner, cpu, "another owner of {slot}");
                            slots.put(slot);
                        }
                    }
                });
            }
        });
        assert!(slots.agree());
        assert_eq!(slots.free(), CLUSTER + 1 - taken);
    }
}
