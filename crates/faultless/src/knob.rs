//! Knobs: settings that can change while the subsystem runs.

use crate::addr::PAGE_SIZE;
use crate::identity::Identity;
use crate::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use crate::table::format::{INDEX_BITS, USER_END};
use core::fmt;
use core::ops::RangeInclusive;
use core::str::FromStr;

/// How faults and the operations that change an address space are synchronised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Locking {
    /// One reader-writer lock for each space: Linux up to 6.3.
    MmapLock = 0,
    /// Faults try one lock for each VMA, then the space's lock: Linux 6.4 to 6.14.
    PerVma = 1,
    /// No lock: the fault validates its result, and falls back to a range lock on one page.
    Speculative = 2,
}

/// When a fault requires the anon_vma of the VMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum AnonVmaCheck {
    /// At the start of the fault: a VMA without previous writes is served under the space's lock.
    Early = 0,
    /// When the fault actually makes an anonymous page.
    Late = 1,
}

/// Which mappings of files get huge pages, 2 MiB each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum HugeText {
    /// No mappings.
    Never = 0,
    /// Mappings with `MADV_HUGEPAGE`.
    Madvise = 1,
    /// In addition, all executable mappings without `MADV_NOHUGEPAGE`.
    Always = 2,
}

impl HugeText {
    /// All values, from the fewest to the most huge pages.
    pub const ALL: [Self; 3] = [Self::Never, Self::Madvise, Self::Always];

    /// Returns the value's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::Madvise => "madvise",
            Self::Always => "always",
        }
    }
}

impl Locking {
    /// All values, in historical order.
    pub const ALL: [Self; 3] = [Self::MmapLock, Self::PerVma, Self::Speculative];

    /// Returns the value's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::MmapLock => "mmap_lock",
            Self::PerVma => "per_vma",
            Self::Speculative => "speculative",
        }
    }
}

/// A [`Locking`] as stored in the words of knobs and spaces. Policies are compared as numbers: with
/// an `enum`, each comparison on the fault path would first have to compute the variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Policy(u8);

impl Policy {
    /// Returns the policy in the low bits of `word`.
    #[inline(always)]
    pub(crate) const fn of(word: u64) -> Self {
        Self(word as u8)
    }
}

impl PartialEq<Locking> for Policy {
    #[inline(always)]
    fn eq(&self, other: &Locking) -> bool {
        self.0 == *other as u8
    }
}

impl AnonVmaCheck {
    /// Returns the value's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Early => "early",
            Self::Late => "late",
        }
    }
}

/// Why a setting is not valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KnobError {
    /// There is no knob with this name.
    Unknown,
    /// Not of the form `KNOB=VALUE`.
    Malformed,
    /// The value is not valid for the knob; the field lists the valid values.
    Value(&'static str),
}

impl fmt::Display for KnobError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => {
                f.write_str("no such knob; the knobs are ")?;
                for (at, knob) in KNOBS.iter().enumerate() {
                    write!(f, "{}{}", if at == 0 { "" } else { ", " }, knob.0)?;
                }
                Ok(())
            }
            Self::Malformed => f.write_str("not of the form KNOB=VALUE"),
            Self::Value(expected) => write!(f, "expected {expected}"),
        }
    }
}

impl core::error::Error for KnobError {}

/// The knobs: name, values, meaning.
pub const KNOBS: &[(&str, &str, &str)] = &[
    ("locking", "mmap_lock | per_vma | speculative", "how faults and writers are synchronised"),
    ("speculative_page_fault", "0 | 1", "1: locking=speculative; 0: locking=per_vma"),
    ("anon_vma_check", "early | late", "when a fault checks for the anon_vma"),
    (
        "frame_limit",
        "1 to 1099511627776 frames",
        "limit of frames in use; above the limit operations fail as out of memory",
    ),
    ("max_map_count", "1 to 2147483647 areas", "limit of VMAs in a space"),
    (
        "file_limit",
        "0 to 1099511627776 pages",
        "limit of file pages that stay in memory; stores above the limit fail",
    ),
    ("stack_limit", "4096 to 140737488351232 bytes", "how far a growing stack may reach"),
    (
        "fault_around_pages",
        "1 | 2 | 4 | 8 | 16 | 32 | 64",
        "resident pages of a file that a read fault maps at once; 1: only the faulting page",
    ),
    (
        "prefault_max_order",
        "0 to 9",
        "log2 of the largest prefault window, in pages, of a thread that faults in sequence; 0: off",
    ),
    (
        "zeroed_pool",
        "0 to 1099511627776 frames",
        "pre-zeroed frames that each memory node keeps ready; 0: none",
    ),
    ("zero_on_free", "0 | 1", "1: a call that frees pages zeroes as many frames for the pools"),
    ("huge_text", "never | madvise | always", "which mappings of files get huge pages (2 MiB)"),
    (
        "edit_in_place",
        "0 | 1",
        "1: while one CPU uses a space, calls of this CPU edit the VMA tree in place, without a claim",
    ),
    (
        "deferred_flush",
        "0 | 1",
        "1: if all mappings of a moved or evicted page are read-only, the flush is deferred until the frame is needed",
    ),
    (
        "map_apart",
        "0 to 65536 mappings",
        "number of mappings that go to a separate region of the CPU if the place of an mmap is claimed; 0: the mmap waits",
    ),
    (
        "shard_after",
        "0 to 65536 edits",
        "number of alternating edits by CPUs in different places after which the VMA tree is divided into shards; 0: never",
    ),
];

/// The frames of 52 bits of physical addresses, the maximum of x86-64.
const MOST_FRAMES: u64 = 1 << 40;
/// The maximum of Linux's `vm.max_map_count`, an `int`.
const MOST_AREAS: u64 = i32::MAX as u64;
/// With this number of mappings a CPU hardly ever returns from its region.
const MOST_APART: u64 = 1 << 16;
/// 1 in models, to cover both cases.
const DEFAULT_APART: u32 = if cfg!(any(loom, shuttle)) { 1 } else { 256 };
/// The largest `shard_after`: with this value a tree is hardly ever parted.
const MOST_TURNS: u64 = 1 << 16;
/// With this number of turns, their extra cost equals the cost of dividing a small tree. 1 in
/// models, to divide trees there.
const DEFAULT_TURNS: u32 = if cfg!(any(loom, shuttle)) { 1 } else { 4 };

/// The current values of the knobs, except `frame_limit` and `zeroed_pool`, which are stored with
/// the frames.
pub struct Knobs {
    /// The locking policy, and the [identity](Identity) of the subsystem.
    locking: AtomicU64,
    anon_vma_check: AtomicU8,
    /// The maximum number of VMAs of a space.
    max_map_count: AtomicU64,
    /// The maximum number of pages of charged objects.
    file_limit: AtomicU64,
    /// The maximum number of bytes of a growing VMA.
    stack_limit: AtomicU64,
    /// log2 of the number of pages that a read of an object maps at once.
    fault_around: AtomicU8,
    /// log2 of the maximum number of pages mapped by a fault of a stream.
    prefault_max_order: AtomicU8,
    /// Whether a call that frees pages zeroes as many frames for the pools.
    zero_on_free: AtomicU8,
    /// Whether the only CPU in a space edits the VMA tree in place.
    edit_in_place: AtomicU8,
    /// Whether flushes of read-only mappings are deferred.
    deferred_flush: AtomicU8,
    /// Which mappings of files get huge pages.
    huge_text: AtomicU8,
    /// How many mappings of a CPU go to its own region after a mapping has met another CPU's claim.
    map_apart: AtomicU32,
    /// The number of edits by alternating CPUs, each in a different place, after which a VMA tree
    /// is divided; 0: never.
    shard_after: AtomicU32,
}

/// Uses the names of the settings.
impl fmt::Debug for Knobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Knobs")
            .field("locking", &self.locking())
            .field("anon_vma_check", &self.anon_vma_check())
            .field("max_map_count", &self.max_map_count())
            .field("file_limit", &self.file_limit())
            .field("stack_limit", &self.stack_limit())
            .field("fault_around_pages", &self.fault_around_pages())
            .field("prefault_max_order", &self.prefault_max_order())
            .field("zero_on_free", &self.zero_on_free())
            .field("edit_in_place", &self.edit_in_place())
            .field("deferred_flush", &self.deferred_flush())
            .field("huge_text", &self.huge_text())
            .field("map_apart", &self.map_apart())
            .field("shard_after", &self.shard_after())
            .finish()
    }
}

/// The initial values of a new subsystem.
impl Default for Knobs {
    fn default() -> Self {
        Self::new(Identity::default())
    }
}

impl Knobs {
    /// Returns the knobs of the subsystem `identity`.
    pub(crate) fn new(identity: Identity) -> Self {
        Self {
            locking: AtomicU64::new(identity.with(Locking::Speculative as u8)),
            anon_vma_check: AtomicU8::new(AnonVmaCheck::Late as u8),
            max_map_count: AtomicU64::new(65530),
            file_limit: AtomicU64::new(MOST_FRAMES),
            stack_limit: AtomicU64::new(8 << 20),
            fault_around: AtomicU8::new(4),
            prefault_max_order: AtomicU8::new(5),
            zero_on_free: AtomicU8::new(0),
            edit_in_place: AtomicU8::new(1),
            deferred_flush: AtomicU8::new(1),
            huge_text: AtomicU8::new(HugeText::Always as u8),
            map_apart: AtomicU32::new(DEFAULT_APART),
            shard_after: AtomicU32::new(DEFAULT_TURNS),
        }
    }
}

/// One parsed setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Setting {
    /// `locking`
    Locking(Locking),
    /// `anon_vma_check`
    AnonVmaCheck(AnonVmaCheck),
    /// `frame_limit`: the maximum number of frames in use. Frames in the CPUs' stocks (up to 128
    /// each) may be allocated beyond the limit.
    FrameLimit(u64),
    /// `max_map_count`
    MaxMapCount(u64),
    /// `file_limit`: pages of [charged](crate::Object::try_new_charged) objects.
    FileLimit(u64),
    /// `stack_limit`
    StackLimit(u64),
    /// `fault_around_pages`: a power of two, at most 64; other numbers are rounded down to a power
    /// of two.
    FaultAroundPages(u64),
    /// `prefault_max_order`: at most 9, the pages of one table; larger numbers are treated as 9.
    PrefaultMaxOrder(u8),
    /// `zeroed_pool`
    ZeroedPool(u64),
    /// `zero_on_free`
    ZeroOnFree(bool),
    /// `edit_in_place`
    EditInPlace(bool),
    /// `deferred_flush`
    DeferredFlush(bool),
    /// `huge_text`
    HugeText(HugeText),
    /// `map_apart`
    MapApart(u32),
    /// `shard_after`, at most 65536: a larger number counts as 65536.
    ShardAfter(u32),
}

impl FromStr for Setting {
    type Err = KnobError;

    fn from_str(text: &str) -> Result<Self, KnobError> {
        let (knob, value) = text.split_once('=').ok_or(KnobError::Malformed)?;
        let (_, values, _) =
            KNOBS.iter().find(|(name, ..)| *name == knob).ok_or(KnobError::Unknown)?;
        let among = |allowed: RangeInclusive<u64>| {
            let number = value.parse().ok().filter(|number| allowed.contains(number));
            number.ok_or(KnobError::Value(values))
        };
        Ok(match (knob, value) {
            ("locking", "mmap_lock") => Self::Locking(Locking::MmapLock),
            ("locking", "per_vma") | ("speculative_page_fault", "0") => {
                Self::Locking(Locking::PerVma)
            }
            ("locking", "speculative") | ("speculative_page_fault", "1") => {
                Self::Locking(Locking::Speculative)
            }
            ("anon_vma_check", "early") => Self::AnonVmaCheck(AnonVmaCheck::Early),
            ("anon_vma_check", "late") => Self::AnonVmaCheck(AnonVmaCheck::Late),
            ("frame_limit", _) => Self::FrameLimit(among(1..=MOST_FRAMES)?),
            ("max_map_count", _) => Self::MaxMapCount(among(1..=MOST_AREAS)?),
            ("file_limit", _) => Self::FileLimit(among(0..=MOST_FRAMES)?),
            ("stack_limit", _) => Self::StackLimit(among(PAGE_SIZE..=USER_END)?),
            ("fault_around_pages", "1" | "2" | "4" | "8" | "16" | "32" | "64") => {
                Self::FaultAroundPages(among(1..=64)?)
            }
            ("prefault_max_order", _) => match value.parse() {
                Ok(order @ 0..=9) => Self::PrefaultMaxOrder(order),
                _ => return Err(KnobError::Value(values)),
            },
            ("zeroed_pool", _) => Self::ZeroedPool(among(0..=MOST_FRAMES)?),
            ("zero_on_free", "0") => Self::ZeroOnFree(false),
            ("zero_on_free", "1") => Self::ZeroOnFree(true),
            ("edit_in_place", "0") => Self::EditInPlace(false),
            ("edit_in_place", "1") => Self::EditInPlace(true),
            ("deferred_flush", "0") => Self::DeferredFlush(false),
            ("deferred_flush", "1") => Self::DeferredFlush(true),
            ("huge_text", _) => {
                let named = HugeText::ALL.into_iter().find(|choice| choice.name() == value);
                Self::HugeText(named.ok_or(KnobError::Value(values))?)
            }
            ("map_apart", _) => Self::MapApart(among(0..=MOST_APART)? as u32),
            ("shard_after", _) => Self::ShardAfter(among(0..=MOST_TURNS)? as u32),
            _ => return Err(KnobError::Value(values)),
        })
    }
}

impl Knobs {
    /// Returns how faults and writers are synchronised.
    pub fn locking(&self) -> Locking {
        let policy = Policy::of(self.locking_word());
        Locking::ALL.into_iter().find(|locking| policy == *locking).unwrap_or(Locking::Speculative)
    }

    /// Returns the word of the policy and the identity, as spaces store it.
    #[inline(always)]
    pub(crate) fn locking_word(&self) -> u64 {
        self.locking.load(Ordering::Relaxed)
    }

    /// Returns when a fault requires the anon_vma.
    #[inline(always)]
    pub fn anon_vma_check(&self) -> AnonVmaCheck {
        if self.anon_vma_check.load(Ordering::Relaxed) == AnonVmaCheck::Early as u8 {
            AnonVmaCheck::Early
        } else {
            AnonVmaCheck::Late
        }
    }

    /// Returns the maximum number of VMAs of a space.
    pub fn max_map_count(&self) -> u64 {
        self.max_map_count.load(Ordering::Relaxed)
    }

    /// Returns the maximum number of pages of [charged](crate::Object::try_new_charged) objects.
    pub fn file_limit(&self) -> u64 {
        self.file_limit.load(Ordering::Relaxed)
    }

    /// Returns the maximum number of bytes of a growing VMA.
    pub fn stack_limit(&self) -> u64 {
        self.stack_limit.load(Ordering::Relaxed)
    }

    /// Returns how many pages a read of an object maps at once: a power of two, at most 64.
    #[inline]
    pub fn fault_around_pages(&self) -> usize {
        1 << (self.fault_around.load(Ordering::Relaxed) & 7)
    }

    /// Returns log2 of the largest prefault window, in pages; 0: prefault is off.
    #[inline(always)]
    pub fn prefault_max_order(&self) -> u8 {
        self.prefault_max_order.load(Ordering::Relaxed)
    }

    /// Returns whether a call that frees pages zeroes as many frames for the pools.
    #[inline]
    pub fn zero_on_free(&self) -> bool {
        self.zero_on_free.load(Ordering::Relaxed) != 0
    }

    /// Returns whether the only CPU in a space edits the VMA tree in place.
    #[inline(always)]
    pub fn edit_in_place(&self) -> bool {
        self.edit_in_place.load(Ordering::Relaxed) != 0
    }

    /// Returns whether the flush of pages with only read-only mappings is deferred when they move.
    pub fn deferred_flush(&self) -> bool {
        self.deferred_flush.load(Ordering::Relaxed) != 0
    }

    /// Returns which mappings of files get huge pages.
    pub fn huge_text(&self) -> HugeText {
        let value = self.huge_text.load(Ordering::Relaxed);
        HugeText::ALL[usize::from(value).min(HugeText::ALL.len() - 1)]
    }

    /// Returns how many mappings of a CPU go to its own region after a mapping has met another
    /// CPU's claim; 0: the CPU waits instead.
    #[inline]
    pub fn map_apart(&self) -> u32 {
        self.map_apart.load(Ordering::Relaxed)
    }

    /// Returns the number of edits by alternating CPUs, each in a different place, after which the
    /// VMA tree of a space is divided between them. 0: never.
    pub fn shard_after(&self) -> u32 {
        self.shard_after.load(Ordering::Relaxed)
    }

    /// Sets a knob stored here; `Vm::set` handles the other knobs.
    pub(crate) fn set(&self, setting: Setting) {
        match setting {
            Setting::Locking(value) => {
                let word = Identity::of(self.locking_word()).with(value as u8);
                self.locking.store(word, Ordering::Release);
            }
            Setting::AnonVmaCheck(value) => {
                self.anon_vma_check.store(value as u8, Ordering::Release);
            }
            Setting::MaxMapCount(value) => self.max_map_count.store(value, Ordering::Release),
            Setting::FileLimit(pages) => self.file_limit.store(pages, Ordering::Release),
            Setting::StackLimit(value) => self.stack_limit.store(value, Ordering::Release),
            Setting::FaultAroundPages(pages) => {
                let order = pages.clamp(1, 64).ilog2() as u8;
                self.fault_around.store(order, Ordering::Release);
            }
            Setting::PrefaultMaxOrder(order) => {
                self.prefault_max_order.store(order.min(INDEX_BITS as u8), Ordering::Release);
            }
            Setting::ZeroOnFree(on) => self.zero_on_free.store(on.into(), Ordering::Release),
            Setting::HugeText(value) => self.huge_text.store(value as u8, Ordering::Release),
            Setting::EditInPlace(on) => self.edit_in_place.store(on.into(), Ordering::Release),
            Setting::DeferredFlush(on) => self.deferred_flush.store(on.into(), Ordering::Release),
            Setting::MapApart(mappings) => self.map_apart.store(mappings, Ordering::Release),
            Setting::ShardAfter(edits) => {
                self.shard_after.store(edits.min(MOST_TURNS as u32), Ordering::Release);
            }
            Setting::FrameLimit(_) | Setting::ZeroedPool(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::format;

    #[test]
    fn settings_parse_or_report_the_valid_values() {
        assert_eq!("locking=per_vma".parse(), Ok(Setting::Locking(Locking::PerVma)));
        assert_eq!("speculative_page_fault=1".parse(), Ok(Setting::Locking(Locking::Speculative)));
        assert_eq!("locking".parse::<Setting>(), Err(KnobError::Malformed));
        assert_eq!("color=red".parse::<Setting>(), Err(KnobError::Unknown));
        assert_eq!("anon_vma_check=soon".parse::<Setting>(), Err(KnobError::Value("early | late")));
        assert_eq!("fault_around_pages=8".parse(), Ok(Setting::FaultAroundPages(8)));
        assert!(matches!("fault_around_pages=3".parse::<Setting>(), Err(KnobError::Value(_))));
        assert_eq!("prefault_max_order=9".parse(), Ok(Setting::PrefaultMaxOrder(9)));
        assert_eq!("prefault_max_order=10".parse::<Setting>(), Err(KnobError::Value("0 to 9")));
        assert_eq!("zeroed_pool=4096".parse(), Ok(Setting::ZeroedPool(4096)));
        assert_eq!("zero_on_free=1".parse(), Ok(Setting::ZeroOnFree(true)));
        assert_eq!("edit_in_place=0".parse(), Ok(Setting::EditInPlace(false)));
        assert_eq!("zero_on_free=2".parse::<Setting>(), Err(KnobError::Value("0 | 1")));
        let frames = KnobError::Value("1 to 1099511627776 frames");
        assert_eq!("frame_limit=many".parse::<Setting>(), Err(frames));
    }

    /// Every range accepts exactly the values in its description in `KNOBS`.
    #[test]
    fn ranges_accept_both_ends_and_nothing_beyond() {
        let takes = |knob: &str, value: u128| format!("{knob}={value}").parse::<Setting>().is_ok();
        let mut ranges = 0;
        for (knob, values, _) in KNOBS {
            let Some((low, rest)) = values.split_once(" to ") else { continue };
            let high = rest.split_once(' ').map_or(rest, |(high, _)| high);
            let [low, high] = [low, high].map(|end| end.parse::<u128>().unwrap());
            assert!(takes(knob, low) && takes(knob, high), "{knob}: {values}");
            assert!(low == 0 || !takes(knob, low - 1), "{knob}: {values}");
            for beyond in [high + 1, u64::MAX.into(), 1 << 64] {
                assert!(!takes(knob, beyond), "{knob}={beyond}: {values}");
            }
            assert!(format!("{knob}=-1").parse::<Setting>().is_err(), "{knob}: {values}");
            ranges += 1;
        }
        assert_eq!(ranges, 8);
    }
}
