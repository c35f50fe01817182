//! The events of a recording in memory: a few bytes for each, because recordings have millions of
//! events.
//!
//! The bytes are those of the [compact](crate::compact) form, with every optional field. Each
//! reader walks over the events in order, and decodes one event at a time.

use super::Event;
use crate::compact::{Fields, Position, Reader, Writer};
use std::fmt;
use std::iter::FusedIterator;

/// Events in order of time. An event is stored in three to twelve bytes: lower bits of addresses
/// and lengths that do not name a page are dropped.
#[derive(Clone)]
pub struct Events {
    writer: Writer,
    /// The place of the end.
    end: Position,
    count: usize,
}

impl Events {
    /// Returns the number of events.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns whether there is no event.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the time of the last event, in microseconds since the recording began; 0 without an
    /// event.
    pub fn last_us(&self) -> u64 {
        self.end.now
    }

    /// Returns the bytes of memory that the events use.
    pub fn bytes(&self) -> usize {
        self.writer.out.capacity()
    }

    /// Adds an event behind all others.
    pub fn push(&mut self, event: Event) {
        self.writer.event(&event, &mut self.end);
        self.count += 1;
    }

    /// Returns the events in order.
    pub fn iter(&self) -> Iter<'_> {
        let reader = Reader::of_events(&self.writer.out);
        Iter { reader, position: Position::default(), left: self.count }
    }

    /// Keeps the events for which `change` returns `true`, with its changes.
    pub fn retain_mut(&mut self, mut change: impl FnMut(&mut Event) -> bool) {
        // The changed events may be longer, so they get a new place.
        let kept =
            self.iter().filter_map(|mut event| change(&mut event).then_some(event)).collect();
        *self = kept;
    }
}

impl Default for Events {
    fn default() -> Self {
        Self { writer: Writer::new(Fields::ALL), end: Position::default(), count: 0 }
    }
}

impl PartialEq for Events {
    fn eq(&self, other: &Self) -> bool {
        self.count == other.count && self.writer.out == other.writer.out
    }
}

impl Eq for Events {}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self).finish()
    }
}

impl Extend<Event> for Events {
    fn extend<I: IntoIterator<Item = Event>>(&mut self, events: I) {
        events.into_iter().for_each(|event| self.push(event));
    }
}

impl FromIterator<Event> for Events {
    fn from_iter<I: IntoIterator<Item = Event>>(events: I) -> Self {
        let mut all = Self::default();
        all.extend(events);
        all
    }
}

impl<'a> IntoIterator for &'a Events {
    type Item = Event;
    type IntoIter = Iter<'a>;

    fn into_iter(self) -> Iter<'a> {
        self.iter()
    }
}

/// Decodes [`Events`] in order.
#[derive(Clone, Debug)]
pub struct Iter<'a> {
    reader: Reader<'a>,
    position: Position,
    left: usize,
}

impl Iterator for Iter<'_> {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        self.left = self.left.checked_sub(1)?;
        let event = self.reader.event(&mut self.position);
        debug_assert!(event.is_ok(), "{event:?}");
        event.ok()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Iter<'_> {}
impl FusedIterator for Iter<'_> {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Access, Backing, Birth, Kind, Prot, StackId};
    use proptest::prelude::*;

    fn kind() -> impl Strategy<Value = Kind> {
        let page = || (0..u64::MAX >> 12).prop_map(|page| page << 12);
        let prot = || (0..8u8).prop_map(Prot::from_bits_truncate);
        let backing =
            || proptest::sample::select(&[Backing::Anon, Backing::Heap, Backing::Special]);
        let access = proptest::sample::select(&[Access::Unknown, Access::Write, Access::Exec]);
        let birth = proptest::sample::select(&[Birth::Thread, Birth::Fork, Birth::Vfork]);
        prop_oneof![
            (page(), access, any::<[bool; 2]>(), any::<Option<u16>>(), any::<u32>()).prop_map(
                |(page, access, [kernel, present], instruction, stack)| Kind::Fault {
                    page,
                    access,
                    kernel,
                    present,
                    instruction,
                    stack: StackId::new(stack),
                }
            ),
            (page(), page(), prot(), any::<u32>(), backing()).prop_map(
                |(start, len, prot, flags, backing)| Kind::Map { start, len, prot, flags, backing }
            ),
            (page(), page(), prot(), backing())
                .prop_map(|(start, len, prot, backing)| Kind::Area { start, len, prot, backing }),
            (page(), page(), any::<bool>()).prop_map(|(start, len, written)| Kind::Resident {
                start,
                len,
                written
            }),
            (page(), page()).prop_map(|(start, len)| Kind::Unmap { start, len }),
            (page(), page(), page(), page(), any::<u32>()).prop_map(
                |(old, old_len, new, new_len, flags)| Kind::Remap {
                    old,
                    old_len,
                    new,
                    new_len,
                    flags
                }
            ),
            (page(), page(), prot()).prop_map(|(start, len, prot)| Kind::Protect {
                start,
                len,
                prot
            }),
            (page(), page(), any::<u32>()).prop_map(|(start, len, advice)| Kind::Advise {
                start,
                len,
                advice
            }),
            any::<u64>().prop_map(|end| Kind::Brk { end }),
            any::<u32>().prop_map(|stack| Kind::Caller { stack: StackId::new(stack) }),
            (any::<u32>(), birth).prop_map(|(child, birth)| Kind::Spawn { child, birth }),
            Just(Kind::Exec),
            Just(Kind::Exit),
        ]
    }

    proptest! {
        /// Times may run backwards, and threads may be missing in a table: `Trace::check` reports
        /// both.
        #[test]
        fn events_are_read_as_they_were_added(
            all in proptest::collection::vec((any::<u64>(), any::<u32>(), kind()), 0..40),
        ) {
            let event = |(time_us, thread, kind)| Event { time_us, thread, kind };
            let all: Vec<Event> = all.into_iter().map(event).collect();
            let events: Events = all.iter().copied().collect();
            prop_assert_eq!(events.iter().len(), all.len());
            prop_assert!(events.iter().eq(all.iter().copied()));
            prop_assert_eq!(events.last_us(), all.last().map_or(0, |event| event.time_us));
            let mut some = events.clone();
            some.retain_mut(|event| {
                event.thread /= 2;
                event.kind != Kind::Exec
            });
            let halved = |event: &Event| Event { thread: event.thread / 2, ..*event };
            let want = all.iter().filter(|event| event.kind != Kind::Exec).map(halved);
            prop_assert!(some.iter().eq(want));
        }
    }

    #[test]
    fn fault_needs_few_bytes() {
        let fault = |page: u64| Kind::Fault {
            // Two threads touch pages in distant areas.
            page: (1 << 45) + ((page % 2) << 40) + page * 4096,
            access: Access::Write,
            kernel: false,
            present: false,
            instruction: Some(page as u16 % 4096),
            stack: StackId::NONE,
        };
        let event = |n: u64| Event { time_us: n / 2, thread: n as u32 % 2, kind: fault(n) };
        let events: Events = (0..100_000).map(event).collect();
        assert!(events.writer.out.len() <= 7 * events.len(), "{}", events.writer.out.len());
    }
}
