//! Shared memory segments: memory objects mapped by processes.
//!
//! *Attachments are VMAs*, as on Linux: a split VMA counts twice. Attachments are counted, when
//! needed, by a search of all spaces for VMAs with the segment's tag. So fork, `execve`, `munmap`
//! and the end of a process need no code for segments, and the count is always right.
//!
//! *Removal.* A segment holds a reference to its object until it is marked for removal. After the
//! mark only VMAs hold references, and the last VMA frees the memory. The entry in the table stays
//! while the segment is attached, and is dropped by the next call that finds it unattached.
//! Attaching a marked segment takes the object from a VMA.

use super::{Common, Ids, PRIVATE, seconds};
use crate::errno::{Errno, Result};
use crate::fs::regular::Held;
use crate::task::memory;
use faultless::Object;
use faultless::Shared;
use faultless::{Area, PAGE_SHIFT, PAGE_SIZE, Space, VirtRange};
use faultless_bare::heap::try_push;
use faultless_bare::machine::Bare;
use faultless_bare::percpu;
use faultless_bare::sync::Mutex;
use faultless_collections::Vec;

/// The maximum number of segments.
pub const MOST: usize = 4096;
/// The limits reported to programs, of the bytes of one segment and the pages of all: unlimited.
pub const LARGEST: u64 = u64::MAX - (1 << 24);
/// In the mode: marked for removal.
const GOING: u32 = 0o1000;
/// In the mode: locked in memory, without effect.
const LOCKED: u32 = 0o2000;
/// Flag of `shmget`: huge pages, which are not supported.
const HUGE: u32 = 0o4000;
/// Flag of `shmget`: do not reserve memory.
const NO_RESERVE: u32 = 0o10000;

/// A segment.
#[derive(Debug)]
pub struct Segment {
    /// The object, until the segment is marked for removal.
    object: Option<Held>,
    tag: u64,
    /// The length in bytes.
    pub bytes: u64,
    /// The time of the last attach; 0: never.
    pub attached: u64,
    /// The time of the last detach by `shmdt`.
    pub detached: u64,
    /// The process that made the segment.
    pub creator: u32,
    /// The last process that attached or detached the segment.
    pub last_user: u32,
}

static SEGMENTS: Mutex<Ids<Segment>> = Mutex::new(Ids::new(MOST));

/// The tag of a segment's object: this bit, the identifier, the key.
const TAG: u64 = 1 << 63;

/// Returns the identifier and the key of the segment whose object has this tag.
pub const fn segment_of_tag(tag: u64) -> Option<(i32, i32)> {
    if tag & TAG == 0 { None } else { Some((((tag & !TAG) >> 32) as i32, tag as i32)) }
}

/// Returns the tag and the object of a VMA, if the VMA is an attachment.
fn attachment(area: Area<'_>) -> Option<(u64, &Shared<Object>)> {
    let object = area.memory.object()?;
    (object.tag() & TAG != 0).then(|| (object.tag(), object))
}

/// Calls `tell` for each attachment of any segment, until `tell` returns false.
fn each_attachment(mut tell: impl FnMut(u64, &Shared<Object>) -> bool) {
    memory::each(|memory| {
        let mut more = true;
        memory.space().each_area(percpu::cpu(), VirtRange::USER, |area| {
            more = attachment(area).is_none_or(|(tag, object)| tell(tag, object));
            more
        });
        percpu::cpu().serve_flushes();
        more
    });
}

/// Returns the number of attachments of each of `tags`, which are sorted.
fn count(tags: &[u64]) -> Result<Vec<u64>> {
    let mut counts = Vec::try_filled(0, tags.len())?;
    each_attachment(|tag, _| {
        if let Ok(at) = tags.binary_search(&tag) {
            counts[at] += 1;
        }
        true
    });
    Ok(counts)
}

/// Drops the marked segments without attachments.
fn forget() -> Result<()> {
    let mut gone = Vec::new();
    for (id, _, segment) in SEGMENTS.lock().all().filter(|(.., segment)| segment.object.is_none()) {
        try_push(&mut gone, (segment.tag, id))?;
    }
    if gone.is_empty() {
        return Ok(());
    }
    gone.sort_unstable();
    let tags = Vec::try_from_iter(gone.iter().map(|&(tag, _)| tag))?;
    let counts = count(&tags)?;
    let mut segments = SEGMENTS.lock();
    for ((_, id), _) in gone.into_iter().zip(counts).filter(|&(_, count)| count == 0) {
        // Another thread may already have dropped the segment.
        let _ = segments.remove(id);
    }
    Ok(())
}

/// Finds or makes a segment: `shmget`.
///
/// # Errors
/// As Linux.
pub fn get(key: i32, bytes: u64, flags: u32, pid: u32) -> Result<i32> {
    let mut all = SEGMENTS.lock();
    if all.all().count() == MOST {
        drop(all);
        forget()?;
        all = SEGMENTS.lock();
    }
    let suits = |segment: &Segment| {
        if bytes > segment.bytes { Err(Errno::EINVAL) } else { Ok(()) }
    };
    all.get(key, flags, suits, |id| {
        if bytes == 0 || bytes > LARGEST {
            return Err(Errno::EINVAL);
        }
        let pages = bytes.div_ceil(PAGE_SIZE);
        let too_many = flags & NO_RESERVE == 0 && pages > percpu::vm().total_frames();
        if flags & HUGE != 0 || too_many {
            return Err(Errno::ENOMEM);
        }
        if pages > Object::MAX_PAGES {
            return Err(Errno::EINVAL);
        }
        let tag = TAG | (id as u64) << 32 | u64::from(key as u32);
        let object = Held::new(Object::try_new(percpu::cpu(), pages, tag)?);
        Ok(Segment {
            object: Some(object),
            tag,
            bytes,
            attached: 0,
            detached: 0,
            creator: pid,
            last_user: 0,
        })
    })
}

/// Returns the identifier of the segment at an index of the table.
///
/// # Errors
/// `EINVAL`: an unused index.
pub fn at(place: i32) -> Result<i32> {
    SEGMENTS.lock().at(place)
}

/// Returns the object of a segment, for an attachment with the permissions `wanted`, and its length
/// in bytes.
///
/// # Errors
/// `EINVAL`: an unknown identifier. `EACCES`.
pub fn object(id: i32, wanted: u32) -> Result<(Held, u64)> {
    let (tag, bytes) = {
        let mut all = SEGMENTS.lock();
        let (_, segment) = all.find_for(id, wanted)?;
        if let Some(object) = &segment.object {
            return Ok((Held::new(Shared::clone(object)), segment.bytes));
        }
        (segment.tag, segment.bytes)
    };
    let mut found = None;
    each_attachment(|of, object| {
        if of == tag {
            found = Some(Held::new(object.clone()));
        }
        of != tag
    });
    found.map(|object| (object, bytes)).ok_or(Errno::EINVAL)
}

/// Records that `pid` attached a segment, or detached it.
pub fn used(id: i32, attached: bool, pid: u32) {
    // The segment may already be removed.
    if let Ok((_, segment)) = SEGMENTS.lock().find(id) {
        *if attached { &mut segment.attached } else { &mut segment.detached } = seconds();
        segment.last_user = pid;
    }
}

/// Returns the attachment that begins at `addr`: its segment, and the ranges of its parts. Other
/// mappings in its range, and moved parts, do not belong to the attachment.
///
/// # Errors
/// `EINVAL`: no attachment begins there. `ENOMEM`.
pub fn parts(space: &Space<Bare>, addr: u64) -> Result<(i32, Vec<VirtRange>)> {
    let mut found: Option<(u64, VirtRange)> = None;
    let mut parts = Vec::new();
    let mut room = Ok(());
    let above = VirtRange::new(addr, VirtRange::USER.end.max(addr));
    space.each_area(percpu::cpu(), above, |area| {
        let of = attachment(area).filter(|_| {
            area.range.start.checked_sub(addr).is_some_and(|at| at >> PAGE_SHIFT == area.offset)
        });
        match (found, of) {
            (None, Some((tag, object))) => {
                let end = addr.saturating_add(object.pages() << PAGE_SHIFT);
                found = Some((tag, VirtRange::new(addr, end)));
                room = try_push(&mut parts, area.range);
            }
            (Some((tag, all)), Some((of, _))) if of == tag && all.covers(area.range) => {
                room = try_push(&mut parts, area.range);
            }
            _ => {}
        }
        room.is_ok() && found.is_none_or(|(_, all)| area.range.end < all.end)
    });
    room?;
    let (id, _) = found.and_then(|(tag, _)| segment_of_tag(tag)).ok_or(Errno::EINVAL)?;
    Ok((id, parts))
}

/// Calls `look` with a segment, for a caller that wants these permissions, and its number of
/// attachments.
///
/// # Errors
/// `EINVAL`: an unknown identifier. `EACCES`. `ENOMEM`.
pub fn look<R>(id: i32, wanted: u32, look: impl FnOnce(&Common, &Segment, u64) -> R) -> Result<R> {
    let tag = SEGMENTS.lock().find_for(id, wanted)?.1.tag;
    let [attachments] = count(&[tag])?[..] else { return Err(Errno::EINVAL) };
    let mut all = SEGMENTS.lock();
    let (common, segment) = all.find(id)?;
    if segment.object.is_none() && attachments == 0 {
        // The segment is unattached, but has not been dropped yet.
        return all.remove(id).and(Err(Errno::EINVAL));
    }
    Ok(look(common, segment, attachments))
}

/// Sets owner and permissions.
///
/// # Errors
/// The errors of [`Ids::set`].
pub fn set(id: i32, uid: u32, gid: u32, mode: u32) -> Result<()> {
    SEGMENTS.lock().set(id, uid, gid, mode)
}

/// Locks or unlocks the segment in memory.
///
/// # Errors
/// `EINVAL`: an unknown identifier. `EPERM`.
pub fn lock(id: i32, locked: bool) -> Result<()> {
    let mut all = SEGMENTS.lock();
    let (common, _) = all.find_own(id)?;
    common.mode = if locked { common.mode | LOCKED } else { common.mode & !LOCKED };
    Ok(())
}

/// Marks a segment for removal; removes it at once if it is not attached.
///
/// # Errors
/// `EINVAL`: an unknown identifier. `EPERM`.
pub fn remove(id: i32) -> Result<()> {
    // Not freed under the lock, because the segment may be large.
    let object = {
        let mut all = SEGMENTS.lock();
        let (common, segment) = all.find_own(id)?;
        common.key = PRIVATE;
        common.mode |= GOING;
        segment.object.take()
    };
    drop(object);
    // Without memory for the count, the segment is removed later.
    let _ = look(id, 0, |_, _, _| ());
    Ok(())
}

/// Totals of all segments.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    /// The number of segments.
    pub segments: u64,
    /// The number of their pages.
    pub pages: u64,
    /// The number of resident pages, except pages of marked segments.
    pub resident: u64,
    /// The highest used index of the table.
    pub last_place: u64,
}

/// The totals.
///
/// # Errors
/// `ENOMEM`.
pub fn totals() -> Result<Totals> {
    forget()?;
    let all = SEGMENTS.lock();
    let mut totals = Totals { last_place: all.last_place(), ..Totals::default() };
    for (.., segment) in all.all() {
        totals.segments += 1;
        totals.pages += segment.bytes.div_ceil(PAGE_SIZE);
        totals.resident +=
            segment.object.as_ref().map_or(0, |object| object.resident_pages(percpu::cpu()));
    }
    Ok(totals)
}

/// Removes all segments, when the machine ends and no process is left.
pub(super) fn clear() {
    let all = core::mem::replace(&mut *SEGMENTS.lock(), Ids::new(MOST));
    drop(all);
}
