//! Shared memory segments: objects of the subsystem that processes map.
//!
//! *Attachments are VMAs*, as on Linux: one that is cut in two counts twice. They are counted by looking
//! at all spaces for VMAs that carry the segment's tag, when somebody asks; so fork, `execve`, `munmap` and
//! the end of a process need to know nothing of segments, and the count is right after each.
//!
//! *The end.* A segment holds a share of its object until it is marked to go. Then only its VMAs have
//! shares, and with the last of them the memory is free. What is left is the entry in the table: it tells
//! of a segment that goes as long as somebody has it attached, and is dropped by the next call that
//! meets it after that. Who attaches a marked segment takes the object from a VMA.

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

/// The most segments.
pub const MOST: usize = 4096;
/// The most bytes of one, and pages of all, that the settings tell of: no limit.
pub const LARGEST: u64 = u64::MAX - (1 << 24);
/// A mark of the mode: it goes when nobody has it attached.
const GOING: u32 = 0o1000;
/// A mark of the mode: somebody wants it kept in memory, where it is anyway.
const LOCKED: u32 = 0o2000;
/// Of `shmget`: of huge pages, of which there are none.
const HUGE: u32 = 0o4000;
/// Of `shmget`: memory for it need not be there.
const NO_RESERVE: u32 = 0o10000;

/// A segment.
#[derive(Debug)]
pub struct Segment {
    /// Until it is marked.
    object: Option<Held>,
    tag: u64,
    /// Its length.
    pub bytes: u64,
    /// When it was last attached; 0: never.
    pub attached: u64,
    /// When it was last detached, by `shmdt`.
    pub detached: u64,
    /// Who made it.
    pub creator: u32,
    /// Who attached or detached it last.
    pub last_user: u32,
}

static SEGMENTS: Mutex<Ids<Segment>> = Mutex::new(Ids::new(MOST));

/// The tag of a segment's object: this bit, the identifier, the key.
const TAG: u64 = 1 << 63;

/// The identifier and the key of the segment whose object has this tag.
pub const fn segment_of_tag(tag: u64) -> Option<(i32, i32)> {
    if tag & TAG == 0 { None } else { Some((((tag & !TAG) >> 32) as i32, tag as i32)) }
}

/// The tag and the object of an area that is an attachment.
fn attachment(area: &Area) -> Option<(u64, &Shared<Object>)> {
    let object = area.object.as_ref()?;
    (object.tag() & TAG != 0).then(|| (object.tag(), object))
}

/// Tells of all attachments of all segments, until `tell` says no.
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

/// How many attachments each of `tags` has, which are in order.
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

/// Forgets the segments that were marked and that nobody has attached any more.
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
        // Another may have been faster.
        let _ = segments.remove(id);
    }
    Ok(())
}

/// `shmget`.
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

/// The identifier of the segment at a place of the table.
///
/// # Errors
/// `EINVAL`: there is none.
pub fn at(place: i32) -> Result<i32> {
    SEGMENTS.lock().at(place)
}

/// The object of a segment, to be attached, and its length in bytes.
///
/// # Errors
/// `EINVAL`: there is none.
pub fn object(id: i32) -> Result<(Held, u64)> {
    let (tag, bytes) = {
        let mut all = SEGMENTS.lock();
        let (_, segment) = all.find(id)?;
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

/// Notes that `pid` attached a segment, or else detached it.
pub fn used(id: i32, attached: bool, pid: u32) {
    // It may be gone already.
    if let Ok((_, segment)) = SEGMENTS.lock().find(id) {
        *if attached { &mut segment.attached } else { &mut segment.detached } = seconds();
        segment.last_user = pid;
    }
}

/// The attachment that begins at `addr`: its segment, and where its parts lie. What lies there in its place,
/// or is moved, is no part.
///
/// # Errors
/// `EINVAL`: there is none. `ENOMEM`.
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

/// Looks at a segment: `look` gets it, and how many attachments it has.
///
/// # Errors
/// `EINVAL`: there is none. `ENOMEM`.
pub fn look<R>(id: i32, look: impl FnOnce(&Common, &Segment, u64) -> R) -> Result<R> {
    let tag = SEGMENTS.lock().find(id)?.1.tag;
    let [attachments] = count(&[tag])?[..] else { return Err(Errno::EINVAL) };
    let mut all = SEGMENTS.lock();
    let (common, segment) = all.find(id)?;
    if segment.object.is_none() && attachments == 0 {
        // It has gone, and nobody has looked since.
        return all.remove(id).and(Err(Errno::EINVAL));
    }
    Ok(look(common, segment, attachments))
}

/// Sets owner and permissions.
///
/// # Errors
/// `EINVAL`: there is none.
pub fn set(id: i32, uid: u32, gid: u32, mode: u32) -> Result<()> {
    SEGMENTS.lock().set(id, uid, gid, mode)
}

/// Sets whether it is to be kept in memory.
///
/// # Errors
/// `EINVAL`: there is none.
pub fn lock(id: i32, locked: bool) -> Result<()> {
    let mut all = SEGMENTS.lock();
    let (common, _) = all.find(id)?;
    common.mode = if locked { common.mode | LOCKED } else { common.mode & !LOCKED };
    Ok(())
}

/// Marks a segment to go with its last attachment: at once if there is none.
///
/// # Errors
/// `EINVAL`: there is none.
pub fn remove(id: i32) -> Result<()> {
    // Not freed under the lock: it may be large.
    let object = {
        let mut all = SEGMENTS.lock();
        let (common, segment) = all.find(id)?;
        common.key = PRIVATE;
        common.mode |= GOING;
        segment.object.take()
    };
    drop(object);
    // Without memory to count it goes later.
    let _ = look(id, |_, _, _| ());
    Ok(())
}

/// What all segments are together.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    /// How many there are.
    pub segments: u64,
    /// Their pages.
    pub pages: u64,
    /// Those that are there, but for those of segments that were marked.
    pub resident: u64,
    /// The highest place in the table that is taken.
    pub last_place: u64,
}

/// What there is.
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

/// Removes all of them. For the end, when no process is left.
pub(super) fn clear() {
    let all = core::mem::replace(&mut *SEGMENTS.lock(), Ids::new(MOST));
    drop(all);
}
