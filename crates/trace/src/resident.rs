//! Mappings of a running process, and the pages that are resident, from `/proc/PID/maps` and
//! `/proc/PID/pagemap`.
//!
//! The kernel hides the frames from unprivileged users, and reports all that is required here to
//! the owner of the process: whether a page is present, and whether the page is an anonymous page
//! of this process alone.

use crate::event::{Backing, MAX_RESIDENT, Prot};
use crate::perf::Architecture;
use faultless::{PAGE_SIZE, USER_END};
use procfs::process::{
    MMPermissions, MMapPath, MemoryMap, MemoryPageFlags, PageInfo, PageMap, Process,
};
use procfs::{ProcError, ProcResult};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;

/// Pages read from a page map at once.
const AT_ONCE: u64 = 64 << 10;

/// The resident pages of one process at a point of time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The process.
    pub pid: i32,
    /// The end of the reading, in nanoseconds of `CLOCK_MONOTONIC`.
    pub taken_ns: u64,
    /// The mappings.
    pub areas: Vec<Area>,
    /// Runs of resident pages of 4 KiB by page number, and whether the process has stored to the
    /// pages.
    pub pages: Vec<(Range<u64>, bool)>,
    /// The number of swapped pages of the host.
    pub swapped: u64,
    /// Whether more pages are resident than a recording can contain.
    pub truncated: bool,
}

/// A mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Area {
    /// The addresses in a recording, in bytes.
    pub range: Range<u64>,
    /// Permissions.
    pub prot: Prot,
    /// The memory behind the mapping.
    pub backing: Backing,
}

impl Snapshot {
    /// Reads the mappings and the resident pages of the process `pid`. Reads at most `most` pages.
    ///
    /// # Errors
    /// The process does not exist, or this user may not read its page map.
    pub fn take(pid: i32, most: u64) -> ProcResult<Self> {
        let process = Process::new(pid)?;
        let maps = process.maps()?;
        let mut pagemap = process.pagemap()?;
        let mut snapshot = Self { pid, ..Self::default() };
        let mut left = most.min(MAX_RESIDENT);
        let size = host_page_size();
        for map in &maps {
            let area = area(map);
            if area.range.end > USER_END {
                continue;
            }
            let kernel = area.backing == Backing::Special;
            snapshot.areas.push(area);
            if kernel || snapshot.truncated {
                continue;
            }
            let range = map.address.0 / size..map.address.1 / size;
            snapshot.truncated = !snapshot.read(&mut pagemap, range, size, &mut left)?;
        }
        snapshot.taken_ns = now_ns();
        Ok(snapshot)
    }

    /// Reads `range`, in pages of `size` bytes. Returns whether no more than `left` pages of 4 KiB
    /// are resident.
    fn read(
        &mut self,
        pagemap: &mut PageMap,
        range: Range<u64>,
        size: u64,
        left: &mut u64,
    ) -> ProcResult<bool> {
        let mut first = range.start;
        while first < range.end {
            let end = range.end.min(first + AT_ONCE);
            let entries = match pagemap.get_range_info(first as usize..end as usize) {
                // The process has ended.
                Err(ProcError::Incomplete(_)) => return Ok(true),
                entries => entries?,
            };
            for (page, entry) in (first..end).zip(entries) {
                match entry {
                    PageInfo::MemoryPage(flags) if flags.contains(MemoryPageFlags::PRESENT) => {
                        let Some(rest) = left.checked_sub(size / PAGE_SIZE) else {
                            return Ok(false);
                        };
                        *left = rest;
                        let start = Architecture::OWN.address(page * size);
                        self.add(start / PAGE_SIZE..(start + size) / PAGE_SIZE, written(flags));
                    }
                    PageInfo::MemoryPage(_) => {}
                    PageInfo::SwapPage(_) => self.swapped += 1,
                }
            }
            first = end;
        }
        Ok(true)
    }

    /// Adds pages above all others.
    fn add(&mut self, pages: Range<u64>, written: bool) {
        match self.pages.last_mut() {
            Some((run, same)) if run.end == pages.start && *same == written => run.end = pages.end,
            _ => self.pages.push((pages, written)),
        }
    }

    /// Returns the number of resident pages of 4 KiB.
    pub fn count(&self) -> u64 {
        self.pages.iter().map(|(run, _)| run.end - run.start).sum()
    }
}

/// Returns the mapping of a line of `/proc/PID/maps`.
fn area(map: &MemoryMap) -> Area {
    let mut prot = Prot::empty();
    prot.set(Prot::READ, map.perms.contains(MMPermissions::READ));
    prot.set(Prot::WRITE, map.perms.contains(MMPermissions::WRITE));
    prot.set(Prot::EXEC, map.perms.contains(MMPermissions::EXECUTE));
    let name = match &map.pathname {
        MMapPath::Path(path) => path.as_os_str().as_bytes(),
        MMapPath::Heap => b"[heap]",
        MMapPath::Stack => b"[stack]",
        MMapPath::Anonymous | MMapPath::TStack(_) => b"",
        MMapPath::Vsys(_) => b"/SYSV",
        MMapPath::Other(name) if name.starts_with("anon") => b"",
        _ => b"[other]",
    };
    let backing = Backing::named(name, map.perms.contains(MMPermissions::SHARED));
    let start = Architecture::OWN.address(map.address.0);
    Area { range: start..start + (map.address.1 - map.address.0), prot, backing }
}

/// Returns whether the process has stored to a page: the page is anonymous, and no other process
/// maps it. The zero page counts as mapped by many.
fn written(flags: MemoryPageFlags) -> bool {
    flags.contains(MemoryPageFlags::MMAP_EXCLUSIVE) && !flags.contains(MemoryPageFlags::FILE)
}

/// Returns the bytes in a base page of this host.
pub fn host_page_size() -> u64 {
    procfs::page_size()
}

/// Returns the present time in nanoseconds of `CLOCK_MONOTONIC`, which perf uses for such
/// recordings.
pub(crate) fn now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time is valid to write. The call fails only for an unknown clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use procfs::FromRead;
    use procfs::process::MemoryMaps;
    use std::ptr;

    /// Maps `pages` pages of private memory, which stay mapped.
    fn map(pages: usize) -> *mut u8 {
        let (prot, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let len = pages * PAGE_SIZE as usize;
        // SAFETY: the mapping replaces no other memory.
        let start = unsafe { libc::mmap(ptr::null_mut(), len, prot, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        // Huge pages would make other pages resident.
        // SAFETY: the advice changes no contents.
        unsafe { libc::madvise(start, len, libc::MADV_NOHUGEPAGE) };
        start.cast()
    }

    fn own(most: u64) -> Snapshot {
        Snapshot::take(std::process::id() as i32, most).unwrap()
    }

    #[test]
    fn stored_loaded_and_untouched_pages_differ() {
        let start = map(8);
        let page = start as u64 / PAGE_SIZE;
        // SAFETY: the mapping has eight pages, which no other code uses.
        unsafe {
            start.add(PAGE_SIZE as usize).write_volatile(1);
            start.add(2 * PAGE_SIZE as usize).write_volatile(1);
            start.add(5 * PAGE_SIZE as usize).read_volatile();
        }
        let before = now_ns();
        let snapshot = own(u64::MAX);
        let of = |page| snapshot.pages.iter().find(|(run, _)| run.contains(&page)).map(|it| it.1);
        let states: Vec<_> = (page..page + 8).map(of).collect();
        let (stored, loaded) = (Some(true), Some(false));
        assert_eq!(states, [None, stored, stored, None, None, loaded, None, None]);
        let area = snapshot.areas.iter().find(|area| area.range.contains(&(page * PAGE_SIZE)));
        let area = area.unwrap();
        assert_eq!((area.prot, area.backing), (Prot::READ | Prot::WRITE, Backing::Anon));
        for backing in [Backing::File, Backing::Heap, Backing::Stack, Backing::Special] {
            assert!(snapshot.areas.iter().any(|area| area.backing == backing), "{backing:?}");
        }
        assert!(snapshot.taken_ns >= before && !snapshot.truncated);
        assert!(snapshot.count() > 100, "{}", snapshot.count());
    }

    #[test]
    fn line_of_maps_is_an_area_with_the_same_addresses() {
        let text = b"1000-5000 rw-p 00000000 00:00 0 \n\
            7000-8000 r-xp 00000000 08:01 9 /bin/true\n\
            9000-b000 ---p 00000000 00:00 0 [stack]\n";
        let maps: MemoryMaps = FromRead::from_read(&text[..]).unwrap();
        let areas: Vec<_> = maps.0.iter().map(area).collect();
        let expected = [
            (0x1000..0x5000, Prot::READ | Prot::WRITE, Backing::Anon),
            (0x7000..0x8000, Prot::READ | Prot::EXEC, Backing::File),
            (0x9000..0xb000, Prot::empty(), Backing::Stack),
        ];
        let start = |address| Architecture::OWN.address(address);
        let expected = expected.map(|(range, prot, backing)| Area {
            range: start(range.start)..start(range.start) + (range.end - range.start),
            prot,
            backing,
        });
        assert_eq!(areas, expected);
    }

    #[test]
    fn runs_of_pages_merge_if_adjacent_and_equal() {
        let mut snapshot = Snapshot::default();
        for (page, written) in [(1, true), (2, true), (3, false), (5, false), (6, false)] {
            snapshot.add(page..page + 1, written);
        }
        assert_eq!(snapshot.pages, [(1..3, true), (3..4, false), (5..7, false)]);
        assert_eq!(snapshot.count(), 5);
    }

    #[test]
    fn memfd_is_memory_and_not_a_file() {
        let len = 4 * PAGE_SIZE as usize;
        // SAFETY: the name is a string that ends with a zero byte.
        let fd = unsafe { libc::memfd_create(c"shared".as_ptr(), 0) };
        assert!(fd >= 0);
        // SAFETY: the descriptor is open.
        assert_eq!(unsafe { libc::ftruncate(fd, len as libc::off_t) }, 0);
        let map = |flags| {
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: the mapping replaces no other memory.
            let start = unsafe { libc::mmap(ptr::null_mut(), len, prot, flags, fd, 0) };
            assert_ne!(start, libc::MAP_FAILED);
            start as u64
        };
        let (shared, private) = (map(libc::MAP_SHARED), map(libc::MAP_PRIVATE));
        // SAFETY: the mapping has four pages, which no other code uses.
        unsafe { (shared as *mut u8).write_volatile(1) };
        let snapshot = own(u64::MAX);
        let of = |start| snapshot.areas.iter().find(|area| area.range.contains(&start));
        assert_eq!(of(shared).unwrap().backing, Backing::SharedAnon);
        assert_eq!(of(private).unwrap().backing, Backing::Anon);
        let page = shared / PAGE_SIZE;
        assert!(snapshot.pages.iter().any(|(run, _)| run.contains(&page)));
    }

    #[test]
    fn snapshot_has_at_most_the_permitted_pages() {
        let snapshot = own(7);
        assert!(snapshot.truncated);
        assert_eq!(snapshot.count(), 7);
    }

    #[test]
    fn missing_process_is_an_error() {
        assert!(Snapshot::take(i32::MAX, 1).is_err());
    }
}
