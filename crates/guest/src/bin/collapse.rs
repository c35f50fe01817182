//! `collapse CHECK…`: used text that is mapped in base pages is moved to huge pages in the
//! background. The kernel scans text every [`PERIOD`] (`text_scan=20` on its command line).
//! `text_on_a_disk` needs a disk with `/data/text`. (Debian's Linux has no huge pages for the
//! text of files, so the collapse never happens there.)

use faultless_guest::check::{Check, Verdict};
use faultless_guest::clock;
use faultless_guest::dir::{self, create, io};
use faultless_guest::mem::{PAGE, READ, Region, WRITE};
use faultless_guest::proc::{Status, outcome};
use faultless_guest::procfs::{text, vmstat};
use faultless_guest::sys::doing;
use faultless_guest::{ensure, same};
use libc::{MAP_PRIVATE, PROT_EXEC};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// The size of a huge page.
const HUGE: u64 = 2 << 20;
/// The CPU time between two scans of the kernel, in seconds, as set on the command line.
const PERIOD: f64 = 0.02;
/// The size of each check's mapping.
const SIZE: u64 = 3 * HUGE;

/// Makes a file in memory, with the page number in each word of a page.
fn file(name: &str) -> Result<File, String> {
    let file = create(name)?;
    for page in 0..SIZE / PAGE {
        io("write", file.write_all_at(&page.to_le_bytes().repeat(PAGE as usize / 8), page * PAGE))?;
    }
    Ok(file)
}

/// Returns the number of bytes of `region` on huge pages, by `/proc/self/smaps`.
fn huge(region: &Region) -> Result<u64, String> {
    let (start, end) = (region.start(), region.start() + region.len());
    let (mut within, mut sum) = (false, 0);
    for line in text("/proc/self/smaps")?.lines() {
        let range = line.split_whitespace().next().and_then(|range| range.split_once('-'));
        let range = range.and_then(|(from, to)| {
            let number = |text| u64::from_str_radix(text, 16).ok();
            Some((number(from)?, number(to)?))
        });
        if let Some((from, to)) = range {
            within = start <= from && to <= end;
        } else if let Some(value) = line.strip_prefix("FilePmdMapped:").filter(|_| within) {
            let kib =
                value.trim().strip_suffix(" kB").and_then(|kib| kib.trim().parse::<u64>().ok());
            sum += kib.ok_or_else(|| format!("smaps: {line:?}"))? << 10;
        }
    }
    Ok(sum)
}

/// Loads from each page, like a program that executes the text; `except` has other contents.
fn use_text(region: &Region, except: Option<u64>) -> Verdict {
    for at in region.pages().filter(|at| Some(*at) != except) {
        ensure!(
            region.load(at + 8) == at / PAGE,
            "page {} contains {}",
            at / PAGE,
            region.load(at + 8)
        );
    }
    Ok(())
}

/// Uses the text until `bytes` of the text are on huge pages, without a time limit: the caller ends
/// a run that takes too long.
fn until_huge(region: &Region, bytes: u64) -> Verdict {
    while huge(region)? < bytes {
        for _ in 0..100 {
            use_text(region, None)?;
        }
    }
    same!(huge(region)?, bytes, "bytes on huge pages");
    use_text(region, None)
}

fn collapsed() -> Result<u64, String> {
    let counters = vmstat()?;
    counters.get("thp_collapse_file").copied().ok_or_else(|| "no thp_collapse_file".to_owned())
}

/// Maps the file at an address that permits huge pages for the whole file.
fn map(file: &File, prot: i32) -> Result<Region, String> {
    let region = doing("mmap", Region::map(SIZE, prot, MAP_PRIVATE, file.as_raw_fd(), 0))?;
    same!(region.start() % HUGE, 0, "the offset of {:#x} in a huge page", region.start());
    Ok(region)
}

/// Pages that were touched before they became text.
fn pages_touched_before_they_are_text() -> Verdict {
    let file = file("became")?;
    let region = map(&file, READ)?;
    use_text(&region, None)?;
    same!(huge(&region)?, 0, "bytes on huge pages, of a mapping without text");
    let before = collapsed()?;
    doing("mprotect", region.protect(0, SIZE, READ | PROT_EXEC))?;
    until_huge(&region, SIZE)?;
    ensure!(
        collapsed()? - before >= SIZE / HUGE,
        "thp_collapse_file does not count the huge pages"
    );
    Ok(())
}

/// Text with a page that the program has changed, and whose copy it has then discarded.
fn changed_and_discarded_pages() -> Verdict {
    let file = file("changed")?;
    let region = map(&file, WRITE | PROT_EXEC)?;
    use_text(&region, None)?;
    same!(huge(&region)?, SIZE, "bytes on huge pages, of text at the first access");
    let page = HUGE + 5 * PAGE;
    region.store(page + 8, 77);
    same!(huge(&region)?, SIZE - HUGE, "bytes on huge pages, after a store");
    // While the copy exists, the other pages stay in base pages, and no page is lost.
    for _ in 0..100 {
        use_text(&region, Some(page))?;
    }
    same!(region.load(page + 8), 77, "the stored value");
    doing("madvise", region.advise(page, PAGE, libc::MADV_DONTNEED))?;
    until_huge(&region, SIZE)
}

/// A child that ends while it has text to collapse, repeatedly.
fn process_ends_during_collapse() -> Verdict {
    let file = file("ends")?;
    for _ in 0..2 {
        let child = outcome(|| {
            let text = || {
                let region = map(&file, READ)?;
                use_text(&region, None)?;
                doing("mprotect", region.protect(0, SIZE, READ | PROT_EXEC))?;
                // Until the first is collapsed: the others remain.
                while huge(&region)? == 0 {
                    use_text(&region, None)?;
                }
                use_text(&region, None)
            };
            i32::from(text().is_err())
        });
        same!(child?, Status::Exited(0), "a child with text");
    }
    Ok(())
}

/// Text on a disk, a quarter of which was read and is in use: the rest is read for the huge pages,
/// without a waiting thread.
fn text_on_a_disk() -> Verdict {
    const USED: u64 = HUGE / PAGE / 4;
    let file = io("open", File::open("/data/text"))?;
    let region = map(&file, READ)?;
    // In random order, so that read-ahead does not read all pages.
    let used = || {
        let places = (0..3 * USED).map(|step| step * 37 % (3 * USED));
        places.map(|place| (place / USED * (HUGE / PAGE) + place % USED) * PAGE)
    };
    let use_some = || {
        for at in used() {
            same!(region.load(at + 8), at / PAGE, "the content of a page");
        }
        Ok::<_, String>(())
    };
    let read = || vmstat()?.get("pages_read").copied().ok_or_else(|| "no pages_read".to_owned());
    use_some()?;
    same!(huge(&region)?, 0, "bytes on huge pages, of a mapping without text");
    let before = read()?;
    doing("mprotect", region.protect(0, SIZE, READ | PROT_EXEC))?;
    while huge(&region)? < SIZE {
        (0..100).try_for_each(|_| use_some())?;
    }
    let more = read()? - before;
    ensure!(more >= SIZE / PAGE / 2, "{more} pages were read for the huge pages");
    use_text(&region, None)?;
    same!(read()? - before, more, "pages that were read for the huge pages");
    Ok(())
}

/// Text on a machine with the knob off is not collapsed; elsewhere this check fails.
fn no_collapse_when_off() -> Verdict {
    let file = file("off")?;
    let map = |offset| {
        let prot = READ | PROT_EXEC;
        doing("mmap", Region::map(2 * HUGE, prot, MAP_PRIVATE, file.as_raw_fd(), offset))
    };
    // Such a kernel does not align the address with the offset.
    let probe = map(0)?;
    let offset = probe.start() % HUGE;
    doing("munmap", probe.end())?;
    let region = map(offset)?;
    same!(region.start() % HUGE, offset, "the offset of {:#x} in a huge page", region.start());
    let begin = clock::used();
    while clock::used() - begin < 15.0 * PERIOD {
        for at in region.pages() {
            same!(region.load(at), (offset + at) / PAGE, "the content of page {}", at / PAGE);
        }
    }
    same!(huge(&region)?, 0, "bytes on huge pages");
    Ok(())
}

const CHECKS: &[Check] = &[
    ("pages_touched_before_they_are_text", pages_touched_before_they_are_text),
    ("changed_and_discarded_pages", changed_and_discarded_pages),
    ("process_ends_during_collapse", process_ends_during_collapse),
    ("text_on_a_disk", text_on_a_disk),
    ("no_collapse_when_off", no_collapse_when_off),
];

fn main() {
    dir::run("collapse", CHECKS);
}
