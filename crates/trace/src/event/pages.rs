//! Recordings of hosts with base pages of 16 and 64 KiB.
//!
//! A recording keeps the addresses of its host. The subsystem has pages of 4 KiB, so a model of
//! memory reads a recording with larger pages [in small pages](Trace::in_small_pages).

use super::{Event, Events, Kind, MAX_EVENTS, Trace};
use faultless::PAGE_SIZE;

/// The sizes of base pages that a recording can have, in bytes.
pub const PAGE_SIZES: [u32; 3] = [4 << 10, 16 << 10, 64 << 10];

impl Trace {
    /// Returns the number of pages of 4 KiB in a page of this recording.
    pub fn small_pages(&self) -> u64 {
        (u64::from(self.header.page_size) / PAGE_SIZE).max(1)
    }

    /// Extends each range to whole pages of the recording, as the kernel does.
    pub(crate) fn extend_to_pages(&mut self) {
        let page = u64::from(self.header.page_size);
        if page <= PAGE_SIZE {
            return;
        }
        let widen = |start: &mut u64, len: &mut u64| {
            let end = start.saturating_add(*len);
            *start -= *start % page;
            // `Trace::check` rejects a range that wraps.
            *len = end.checked_next_multiple_of(page).unwrap_or(end) - *start;
        };
        self.events.retain_mut(|event| {
            match &mut event.kind {
                Kind::Fault { page: at, .. } => *at -= *at % page,
                Kind::Map { start, len, .. }
                | Kind::Area { start, len, .. }
                | Kind::Resident { start, len, .. }
                | Kind::Unmap { start, len }
                | Kind::Protect { start, len, .. }
                | Kind::Advise { start, len, .. } => widen(start, len),
                Kind::Remap { old, old_len, new, new_len, .. } => {
                    widen(old, old_len);
                    widen(new, new_len);
                }
                Kind::Brk { .. }
                | Kind::Caller { .. }
                | Kind::Spawn { .. }
                | Kind::Exec
                | Kind::Exit => {}
            }
            true
        });
    }

    /// Returns the recording in pages of 4 KiB: each fault becomes a fault of every page of 4 KiB
    /// in the recorded page, in order of addresses. A count of faults is then
    /// [`small_pages`](Self::small_pages) times the recorded count, and bytes are unchanged.
    ///
    /// # Errors
    /// The result has too many events.
    pub fn in_small_pages(mut self) -> Result<Self, String> {
        let parts = self.small_pages();
        if parts == 1 {
            return Ok(self);
        }
        let is_fault = |event: &Event| matches!(event.kind, Kind::Fault { .. });
        let faults = self.events.iter().filter(is_fault).count();
        let all = faults * (parts as usize - 1) + self.events.len();
        if all > MAX_EVENTS {
            return Err(format!(
                "{faults} faults of {} KiB are {all} events in pages of 4 KiB; the limit is \
                 {MAX_EVENTS}: record a shorter time",
                self.header.page_size >> 10
            ));
        }
        let mut events = Events::default();
        for event in &self.events {
            let Kind::Fault { page, .. } = event.kind else {
                events.push(event);
                continue;
            };
            events.extend((0..parts).map(|part| {
                let mut event = event;
                if let Kind::Fault { page: at, .. } = &mut event.kind {
                    *at = page + part * PAGE_SIZE;
                }
                event
            }));
        }
        self.events = events;
        self.header.page_size = PAGE_SIZE as u32;
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Access;

    const LARGE: u64 = 64 << 10;

    fn large(events: impl IntoIterator<Item = Kind>) -> Trace {
        let mut trace = Trace::of_one_thread(events);
        trace.header.page_size = LARGE as u32;
        trace
    }

    #[test]
    fn ranges_grow_to_whole_pages_of_the_host() {
        let mut trace = large([
            Kind::first(LARGE + 3 * PAGE_SIZE, Access::Write),
            Kind::Unmap { start: 4 * LARGE, len: LARGE + PAGE_SIZE },
            Kind::Unmap { start: LARGE + PAGE_SIZE, len: LARGE },
            Kind::Brk { end: 12_345 },
        ]);
        trace.check().expect_err("not aligned");
        trace.extend_to_pages();
        let kinds: Vec<_> = trace.events.iter().map(|event| event.kind).collect();
        let want = [
            Kind::first(LARGE, Access::Write),
            Kind::Unmap { start: 4 * LARGE, len: 2 * LARGE },
            Kind::Unmap { start: LARGE, len: 2 * LARGE },
            Kind::Brk { end: 12_345 },
        ];
        assert_eq!(kinds, want);
        trace.check().expect("aligned");
    }

    #[test]
    fn ranges_that_wrap_stay_wrong() {
        let start = u64::MAX - u64::MAX % LARGE;
        let mut trace = large([Kind::Unmap { start, len: LARGE - 1 }]);
        trace.extend_to_pages();
        trace.check().expect_err("the end is beyond all addresses");
    }

    #[test]
    fn large_fault_touches_all_its_small_pages() {
        let unmap = Kind::Unmap { start: LARGE, len: LARGE };
        let trace = large([Kind::first(LARGE, Access::Write), unmap]);
        assert_eq!(trace.small_pages(), 16);
        let small = trace.in_small_pages().expect("few events");
        small.check().expect("a valid recording");
        assert_eq!((small.small_pages(), small.events.len()), (1, 17));
        let kinds: Vec<_> = small.events.iter().map(|event| event.kind).collect();
        assert_eq!(kinds[15], Kind::first(2 * LARGE - PAGE_SIZE, Access::Write));
        assert_eq!(kinds[16], unmap);
        assert_eq!(small.clone().in_small_pages(), Ok(small));
    }

    #[test]
    fn other_page_sizes_are_rejected() {
        for (size, valid) in
            [(4096, true), (8192, false), (16384, true), (32768, false), (65536, true), (0, false)]
        {
            let mut trace = Trace::of_one_thread([]);
            trace.header.page_size = size;
            assert_eq!(trace.check().is_ok(), valid, "{size}");
        }
    }
}
