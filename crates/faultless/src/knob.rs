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
    /// One lock for each VMA that faults try, the space's lock behind it: Linux 6.4 to 6.14.
    PerVma = 1,
    /// No lock: the fault validates its answer, and falls back to a range lock on one page.
    Speculative = 2,
}

/// When a fault asks for the VMA's anon_vma.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum AnonVmaCheck {
    /// At its entry: a VMA that was never written is served under the space's lock.
    Early = 0,
    /// When an anonymous page is really made.
    Late = 1,
}

/// Which mappings of files get huge pages, 2 MiB each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum HugeText {
    /// None.
    Never = 0,
    /// Those that `MADV_HUGEPAGE` asks for.
    Madvise = 1,
    /// Those, and all that may be executed, but where `MADV_NOHUGEPAGE` forbids it.
    Always = 2,
}

impl HugeText {
    /// All values, from the fewest to the most huge pages.
    pub const ALL: [Self; 3] = [Self::Never, Self::Madvise, Self::Always];

    /// The value's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::Madvise => "madvise",
            Self::Always => "always",
        }
    }
}

impl Locking {
    /// All values, in the order of the field's history.
    pub const ALL: [Self; 3] = [Self::MmapLock, Self::PerVma, Self::Speculative];

    /// The value's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::MmapLock => "mmap_lock",
            Self::PerVma => "per_vma",
            Self::Speculative => "speculative",
        }
    }
}

/// A [`Locking`] as a word of knobs and spaces has it. The two are compared as numbers: told apart as an `enum`,
/// each comparison on the way of a fault would first compute which it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Policy(u8);

impl Policy {
    /// That in the low bits of `word`.
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
    /// The value's name.
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
    /// There is no knob of that name.
    Unknown,
    /// Not of the form `KNOB=VALUE`.
    Malformed,
    /// The knob takes other values: these.
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
    ("anon_vma_check", "early | late", "when a fault asks for the anon_vma"),
    (
        "frame_limit",
        "1 to 1099511627776 frames",
        "frames that may be in use at once; with more, operations fail as out of memory",
    ),
    ("max_map_count", "1 to 2147483647 areas", "VMAs that a space may have"),
    (
        "file_limit",
        "0 to 1099511627776 pages",
        "pages of files that stay in memory; stores that would add more fail",
    ),
    ("stack_limit", "4096 to 140737488351232 bytes", "how far a growing stack may reach"),
    (
        "fault_around_pages",
        "1 | 2 | 4 | 8 | 16 | 32 | 64",
        "pages of a file that a read fault maps at once, where the file has them; 1: only its own",
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
        "1: while one CPU uses a space, its calls edit the VMA tree in place, without a claim",
    ),
    (
        "deferred_flush",
        "0 | 1",
        "1: the flush of pages that move or are evicted, all of whose mappings are read-only, waits until their frames are needed",
    ),
    (
        "map_apart",
        "0 to 65536 mappings",
        "if the place of a CPU's mmap is claimed, so many mappings go to a region of its own; 0: it waits",
    ),
    (
        "shard_after",
        "0 to 65536 edits",
        "edits of a VMA tree by CPUs in turns, each elsewhere, after which it is divided between them; 0: never",
    ),
];

/// The frames of 52 bits of physical addresses, which is all that x86-64 can have.
const MOST_FRAMES: u64 = 1 << 40;
/// What Linux's `vm.max_map_count`, an `int`, can be.
const MOST_AREAS: u64 = i32::MAX as u64;
/// So many that a CPU hardly ever comes back.
const MOST_APART: u64 = 1 << 16;
/// One in models, so that they do both.
const DEFAULT_APART: u32 = if cfg!(any(loom, shuttle)) { 1 } else { 256 };
/// The largest `shard_after`: a tree is parted so late that it hardly ever is.
const MOST_TURNS: u64 = 1 << 16;
/// So many turns cost as much more than other edits as it costs to divide a small tree. One in models, so that they divide trees.
const DEFAULT_TURNS: u32 = if cfg!(any(loom, shuttle)) { 1 } else { 4 };

/// The knobs' present values. Two are kept elsewhere: `frame_limit` and `zeroed_pool`, by the frames.
pub struct Knobs {
    /// The policy, and the [identity](Identity) of the subsystem whose knobs these are.
    locking: AtomicU64,
    anon_vma_check: AtomicU8,
    /// VMAs that a space may have.
    max_map_count: AtomicU64,
    /// Pages of charged objects.
    file_limit: AtomicU64,
    /// Bytes that a growing VMA may reach.
    stack_limit: AtomicU64,
    /// log2 of the pages that a read of an object maps at once.
    fault_around: AtomicU8,
    /// log2 of the pages that a stream's fault maps at most.
    prefault_max_order: AtomicU8,
    /// Whether a call that frees pages zeroes as many frames for the pools.
    zero_on_free: AtomicU8,
    /// Whether a CPU that is alone in a space edits it in place.
    edit_in_place: AtomicU8,
    /// Whether flushes of read-only mappings are deferred.
    deferred_flush: AtomicU8,
    /// Which mappings of files get huge pages.
    huge_text: AtomicU8,
    /// How many mappings of a CPU go to its own region once one has met another CPU's claim.
    map_apart: AtomicU32,
    /// After how many edits by CPUs in turns, each elsewhere, a tree of VMAs is divided; 0: never.
    shard_after: AtomicU32,
}

/// By the names that settings have.
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

/// The values that a new subsystem starts with.
impl Default for Knobs {
    fn default() -> Self {
        Self::new(Identity::default())
    }
}

impl Knobs {
    /// The knobs of the subsystem `identity`.
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

/// One setting, understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Setting {
    /// `locking`
    Locking(Locking),
    /// `anon_vma_check`
    AnonVmaCheck(AnonVmaCheck),
    /// `frame_limit`: frames that may be in use. Frames that CPUs have in stock (up to 128 each) may be handed out beyond it.
    FrameLimit(u64),
    /// `max_map_count`
    MaxMapCount(u64),
    /// `file_limit`: pages of [charged](crate::Object::try_new_charged) objects.
    FileLimit(u64),
    /// `stack_limit`
    StackLimit(u64),
    /// `fault_around_pages`: a power of two, 64 at most; other numbers are rounded down to one.
    FaultAroundPages(u64),
    /// `prefault_max_order`: 9 at most, the pages of one table; larger numbers are taken for 9.
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
    /// How faults and writers are synchronised.
    pub fn locking(&self) -> Locking {
        let policy = Policy::of(self.locking_word());
        Locking::ALL.into_iter().find(|locking| policy == *locking).unwrap_or(Locking::Speculative)
    }

    /// The policy and the subsystem, as spaces have it too.
    #[inline(always)]
    pub(crate) fn locking_word(&self) -> u64 {
        self.locking.load(Ordering::Relaxed)
    }

    /// When a fault asks for the anon_vma.
    #[inline(always)]
    pub fn anon_vma_check(&self) -> AnonVmaCheck {
        if self.anon_vma_check.load(Ordering::Relaxed) == AnonVmaCheck::Early as u8 {
            AnonVmaCheck::Early
        } else {
            AnonVmaCheck::Late
        }
    }

    /// VMAs that a space may have.
    pub fn max_map_count(&self) -> u64 {
        self.max_map_count.load(Ordering::Relaxed)
    }

    /// Pages that [charged](crate::Object::try_new_charged) objects may have.
    pub fn file_limit(&self) -> u64 {
        self.file_limit.load(Ordering::Relaxed)
    }

    /// Bytes that a growing VMA may reach.
    pub fn stack_limit(&self) -> u64 {
        self.stack_limit.load(Ordering::Relaxed)
    }

    /// How many pages a read of an object maps at once: a power of two, 64 at most.
    #[inline]
    pub fn fault_around_pages(&self) -> usize {
        1 << (self.fault_around.load(Ordering::Relaxed) & 7)
    }

    /// log2 of the largest prefault window, in pages; 0: prefault is off.
    #[inline(always)]
    pub fn prefault_max_order(&self) -> u8 {
        self.prefault_max_order.load(Ordering::Relaxed)
    }

    /// Whether a call that frees pages zeroes as many frames for the pools.
    #[inline]
    pub fn zero_on_free(&self) -> bool {
        self.zero_on_free.load(Ordering::Relaxed) != 0
    }

    /// Whether a CPU that is alone in a space edits it in place.
    #[inline(always)]
    pub fn edit_in_place(&self) -> bool {
        self.edit_in_place.load(Ordering::Relaxed) != 0
    }

    /// Whether the flush of pages that move, all of whose mappings are read-only, is deferred.
    pub fn deferred_flush(&self) -> bool {
        self.deferred_flush.load(Ordering::Relaxed) != 0
    }

    /// Which mappings of files get huge pages.
    pub fn huge_text(&self) -> HugeText {
        let value = self.huge_text.load(Ordering::Relaxed);
        HugeText::ALL[usize::from(value).min(HugeText::ALL.len() - 1)]
    }

    /// How many mappings of a CPU go to its own region once one has met another CPU's claim; 0: none, it waits.
    #[inline]
    pub fn map_apart(&self) -> u32 {
        self.map_apart.load(Ordering::Relaxed)
    }

    /// After how many edits by CPUs in turns, each elsewhere, the tree of a space's VMAs is divided between them. 0: never.
    pub fn shard_after(&self) -> u32 {
        self.shard_after.load(Ordering::Relaxed)
    }

    /// Sets a knob that is kept here; `Vm::set` takes care of the others.
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
    fn settings_parse_or_say_what_is_expected() {
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

    /// What the list of knobs says of a range is what is taken.
    #[test]
    fn the_ends_of_a_range_are_taken_and_what_lies_beyond_is_not() {
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
