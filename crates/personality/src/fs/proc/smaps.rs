//! `/proc/PID/smaps` and `smaps_rollup`: the resident pages of each area, and of all areas
//! together.

use super::process::{list_maps, memory};
use super::{Subject, Text};
use crate::errno::{Errno, Result};
use core::fmt::{self, Write};
use faultless::{
    AreaInfo, FrameUse, PAGE_SIZE, PageInfo, PagePlace, Prot, Space, VirtRange, VmaFlags,
};
use faultless_bare::heap::try_push;
use faultless_bare::machine::Bare;
use faultless_bare::percpu;
use faultless_collections::Vec;

/// The number of units per byte in which the share of a page with several mappings is counted, as
/// on Linux.
const PARTS: u64 = 1 << 12;

/// Counts of the pages of one area or several areas.
#[derive(Default)]
struct Pages {
    /// Pages in memory.
    resident: u64,
    /// Private pages, in mappings with or without an object.
    anon: u64,
    /// Pages with other mappings, and pages with this mapping only; in each array the clean pages
    /// come first, then the dirty pages.
    shared: [u64; 2],
    private: [u64; 2],
    referenced: u64,
    lazily_freed: u64,
    /// Pages mapped by huge leaves.
    huge: u64,
    swapped: u64,
    share: Shares,
}

/// Sums of page sizes, each divided by the page's number of mappings, in units of 1/[`PARTS`] byte:
/// dirty pages, pages of each kind, pages of locked areas, and swapped pages.
#[derive(Default)]
struct Shares {
    dirty: u64,
    anon: u64,
    file: u64,
    shared_memory: u64,
    locked: u64,
    swapped: u64,
}

const fn is_private(area: &AreaInfo) -> bool {
    !area.flags.contains(VmaFlags::SHARED)
}

impl Pages {
    /// Adds the pages of an area.
    fn add_area(&mut self, space: &Space<Bare>, area: &AreaInfo) {
        let locked = area.flags.contains(VmaFlags::LOCKED);
        // Shared memory has no file with its contents.
        let is_memory = !is_private(area) && area.tag == 0;
        self.huge += area.huge;
        space.pages(percpu::cpu(), area.range, |_, place| match place {
            PagePlace::Swapped { mappings, .. } => {
                self.swapped += 1;
                self.share.swapped += PAGE_SIZE * PARTS / u64::from(mappings);
            }
            PagePlace::Mapped(page) => self.add(&page, is_memory, locked),
            _ => {}
        });
    }

    fn add(&mut self, page: &PageInfo, is_memory: bool, locked: bool) {
        let anon = match page.usage {
            FrameUse::Anon => true,
            FrameUse::Shared => false,
            _ => return,
        };
        let dirty = page.dirty || is_memory && !anon;
        self.resident += 1;
        self.anon += u64::from(anon);
        self.referenced += u64::from(page.accessed);
        self.lazily_freed += u64::from(anon && !page.dirty);
        let of = if page.mappings > 1 { &mut self.shared } else { &mut self.private };
        of[usize::from(dirty)] += 1;
        let share = PAGE_SIZE * PARTS / u64::from(page.mappings);
        let shares = &mut self.share;
        *match (anon, is_memory) {
            (true, _) => &mut shares.anon,
            (false, true) => &mut shares.shared_memory,
            (false, false) => &mut shares.file,
        } += share;
        shares.dirty += if dirty { share } else { 0 };
        shares.locked += if locked { share } else { 0 };
    }

    /// Writes the rows common to both texts; with `kinds`, also the kinds, for the text about all
    /// areas. A program with thousands of areas may read the text often, so the constant part is
    /// one string.
    fn tell(&self, text: &mut Text, kinds: bool) {
        const PAGE: u64 = PAGE_SIZE / 1024;
        let [shared_clean, shared_dirty] = self.shared.map(|pages| pages * PAGE);
        let [private_clean, private_dirty] = self.private.map(|pages| pages * PAGE);
        let [resident, referenced, anonymous, lazily_freed, huge, swapped] =
            [self.resident, self.referenced, self.anon, self.lazily_freed, self.huge, self.swapped]
                .map(|pages| pages * PAGE);
        let Shares { dirty, anon, file, shared_memory, locked, swapped: swap_share } = self.share;
        let [all, dirty, anon, file, shared_memory, locked, swap_share] =
            [anon + file + shared_memory, dirty, anon, file, shared_memory, locked, swap_share]
                .map(|share| share / PARTS / 1024);
        let kinds = fmt::from_fn(|text| match kinds {
            true => write!(
                text,
                "Pss_Anon:       {anon:8} kB\n\
                 Pss_File:       {file:8} kB\n\
                 Pss_Shmem:      {shared_memory:8} kB\n",
            ),
            false => Ok(()),
        });
        // `Text` records an error.
        let _ = write!(
            text,
            "Rss:            {resident:8} kB\n\
             Pss:            {all:8} kB\n\
             Pss_Dirty:      {dirty:8} kB\n\
             {kinds}\
             Shared_Clean:   {shared_clean:8} kB\n\
             Shared_Dirty:   {shared_dirty:8} kB\n\
             Private_Clean:  {private_clean:8} kB\n\
             Private_Dirty:  {private_dirty:8} kB\n\
             Referenced:     {referenced:8} kB\n\
             Anonymous:      {anonymous:8} kB\n\
             KSM:                   0 kB\n\
             LazyFree:       {lazily_freed:8} kB\n\
             AnonHugePages:         0 kB\n\
             ShmemPmdMapped:        0 kB\n\
             FilePmdMapped:  {huge:8} kB\n\
             Shared_Hugetlb:        0 kB\n\
             Private_Hugetlb:       0 kB\n\
             Swap:           {swapped:8} kB\n\
             SwapPss:        {swap_share:8} kB\n\
             Locked:         {locked:8} kB\n",
        );
    }
}

pub(super) fn smaps(of: &Subject, text: &mut Text) -> Result<()> {
    let Ok(memory) = memory(of) else { return Ok(()) };
    let mut maps = Text::default();
    list_maps(&memory, &mut maps)?;
    let maps = maps.finish()?;
    // The two listings are made at different times: skip an area that is missing in one of them.
    let mut areas = areas(memory.space())?.into_iter().peekable();
    for line in maps.lines() {
        let start = line.split('-').next().and_then(|hex| u64::from_str_radix(hex, 16).ok());
        let start = start.ok_or(Errno::EIO)?;
        while areas.next_if(|area| area.range.start < start).is_some() {}
        let Some(area) = areas.next_if(|area| area.range.start == start) else { continue };
        let size = area.range.len() / 1024;
        let _ = write!(
            text,
            "{line}\n\
             Size:           {size:8} kB\n\
             KernelPageSize:        4 kB\n\
             MMUPageSize:           4 kB\n",
        );
        let mut pages = Pages::default();
        pages.add_area(memory.space(), &area);
        pages.tell(text, false);
        let mark = |prot, mark| if area.prot.contains(prot) { mark } else { "" };
        let _ = writeln!(
            text,
            "THPeligible:           0\nVmFlags: {}{}{}{}mr mw me {}",
            mark(Prot::READ, "rd "),
            mark(Prot::WRITE, "wr "),
            mark(Prot::EXEC, "ex "),
            if is_private(&area) { "" } else { "sh " },
            if area.flags.contains(VmaFlags::LOCKED) { "lo " } else { "" },
        );
    }
    Ok(())
}

pub(super) fn rollup(of: &Subject, text: &mut Text) -> Result<()> {
    let memory = memory(of)?;
    let mut range: Option<VirtRange> = None;
    let mut pages = Pages::default();
    for area in areas(memory.space())? {
        range = Some(range.map_or(area.range, |range| range.hull(area.range)));
        pages.add_area(memory.space(), &area);
    }
    let range = range.unwrap_or(VirtRange::new(0, 0));
    let (start, end) = (range.start, range.end);
    let _ = writeln!(
        text,
        "{start:08x}-{end:08x} ---p 00000000 00:00 0                          [rollup]"
    );
    pages.tell(text, true);
    Ok(())
}

/// The areas of a space.
fn areas(space: &Space<Bare>) -> Result<Vec<AreaInfo>> {
    let mut areas = Vec::new();
    let mut pushed = Ok(());
    space.areas(percpu::cpu(), |area| {
        if pushed.is_ok() {
            pushed = try_push(&mut areas, area);
        }
    });
    pushed?;
    Ok(areas)
}
