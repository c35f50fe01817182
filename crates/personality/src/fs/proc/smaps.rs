//! `/proc/PID/smaps` and `smaps_rollup`: what is resident of each area, and of all together.

use super::process::{list_maps, memory};
use super::{Subject, Text};
use crate::errno::{Errno, Result};
use core::fmt::{self, Write};
use core::ops::AddAssign;
use faultless::{AreaInfo, PAGE_SIZE, Prot, VirtRange, VmaFlags};
use faultless_bare::heap::try_push;
use faultless_bare::percpu;
use faultless_collections::Vec;

/// Pages of an area, or of several.
#[derive(Clone, Copy, Default)]
struct Pages {
    /// Those that are resident, by their kind.
    anon: u64,
    private_file: u64,
    shared_file: u64,
    shared_memory: u64,
    /// Of the resident ones, those that huge leaves map.
    huge: u64,
    swapped: u64,
}

impl AddAssign for Pages {
    fn add_assign(&mut self, more: Self) {
        self.anon += more.anon;
        self.private_file += more.private_file;
        self.shared_file += more.shared_file;
        self.shared_memory += more.shared_memory;
        self.huge += more.huge;
        self.swapped += more.swapped;
    }
}

const fn is_private(area: &AreaInfo) -> bool {
    !area.flags.contains(VmaFlags::SHARED)
}

impl Pages {
    fn of(area: &AreaInfo) -> Self {
        let mut pages = Self { huge: area.huge, swapped: area.swapped, ..Self::default() };
        *match (is_private(area), area.tag) {
            (true, 0) => &mut pages.anon,
            (true, _) => &mut pages.private_file,
            (false, 0) => &mut pages.shared_memory,
            (false, _) => &mut pages.shared_file,
        } = area.resident;
        pages
    }

    /// Writes the rows that both texts have; the text about all together tells the kinds, too. A program with thousands of areas may read it often, so
    /// the constant part is one string.
    fn tell(&self, text: &mut Text, kinds: bool) {
        let Self { anon, private_file, shared_file, shared_memory, huge, swapped } =
            self.kilobytes();
        let shared = shared_file + shared_memory;
        let (file, dirty) = (private_file + shared_file, anon + shared);
        let all = anon + private_file + shared;
        let kinds = fmt::from_fn(|text| match kinds {
            true => write!(
                text,
                "Pss_Anon:       {anon:8} kB\n\
                 Pss_File:       {file:8} kB\n\
                 Pss_Shmem:      {shared_memory:8} kB\n",
            ),
            false => Ok(()),
        });
        // Text remembers that it was cut.
        let _ = write!(
            text,
            "Rss:            {all:8} kB\n\
             Pss:            {all:8} kB\n\
             Pss_Dirty:      {dirty:8} kB\n\
             {kinds}\
             Shared_Clean:          0 kB\n\
             Shared_Dirty:   {shared:8} kB\n\
             Private_Clean:  {private_file:8} kB\n\
             Private_Dirty:  {anon:8} kB\n\
             Referenced:     {all:8} kB\n\
             Anonymous:      {anon:8} kB\n\
             KSM:                   0 kB\n\
             LazyFree:              0 kB\n\
             AnonHugePages:         0 kB\n\
             ShmemPmdMapped:        0 kB\n\
             FilePmdMapped:  {huge:8} kB\n\
             Shared_Hugetlb:        0 kB\n\
             Private_Hugetlb:       0 kB\n\
             Swap:           {swapped:8} kB\n\
             SwapPss:        {swapped:8} kB\n\
             Locked:                0 kB\n",
        );
    }

    /// The same in kB.
    const fn kilobytes(&self) -> Self {
        const PAGE: u64 = PAGE_SIZE / 1024;
        Self {
            anon: self.anon * PAGE,
            private_file: self.private_file * PAGE,
            shared_file: self.shared_file * PAGE,
            shared_memory: self.shared_memory * PAGE,
            huge: self.huge * PAGE,
            swapped: self.swapped * PAGE,
        }
    }
}

pub(super) fn smaps(of: &Subject, text: &mut Text) -> Result<()> {
    let Ok(memory) = memory(of) else { return Ok(()) };
    let mut maps = Text::default();
    list_maps(&memory, &mut maps)?;
    let maps = maps.finish()?;
    let mut areas = Vec::new();
    let mut room = Ok(());
    memory.space().areas(percpu::cpu(), |area| {
        if room.is_ok() {
            room = try_push(&mut areas, area);
        }
    });
    room?;
    // The two listings are made at different times: an area that is missing in one is left out.
    let mut areas = areas.into_iter().peekable();
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
        Pages::of(&area).tell(text, false);
        let mark = |prot, mark| if area.prot.contains(prot) { mark } else { "" };
        let _ = writeln!(
            text,
            "THPeligible:           0\nVmFlags: {}{}{}{}mr mw me ",
            mark(Prot::READ, "rd "),
            mark(Prot::WRITE, "wr "),
            mark(Prot::EXEC, "ex "),
            if is_private(&area) { "" } else { "sh " },
        );
    }
    Ok(())
}

pub(super) fn rollup(of: &Subject, text: &mut Text) -> Result<()> {
    let memory = memory(of)?;
    let mut range: Option<VirtRange> = None;
    let mut pages = Pages::default();
    memory.space().areas(percpu::cpu(), |area| {
        range = Some(range.map_or(area.range, |range| range.hull(area.range)));
        pages += Pages::of(&area);
    });
    let range = range.unwrap_or(VirtRange::new(0, 0));
    let (start, end) = (range.start, range.end);
    let _ = writeln!(
        text,
        "{start:08x}-{end:08x} ---p 00000000 00:00 0                          [rollup]"
    );
    pages.tell(text, true);
    Ok(())
}
