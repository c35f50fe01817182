//! An estimate of the page walks (TLB misses) of a run, without hardware counters.
//!
//! A page walk sets the accessed bit of the page's entry. The kernel clears the accessed bits of a
//! process on request (`/proc/PID/clear_refs`) and counts the pages with a set bit
//! (`/proc/PID/smaps`, `Referenced`). The kernel does not flush TLBs for the request, so an access
//! to a page in a TLB sets no bit. The pages counted a millisecond after the request have had a
//! page walk each, at least. Walks of random pages hit some pages twice: `w` walks over `n` pages
//! set `n * (1 - exp(-w / n))` bits. The estimate inverts this formula, and the rate of the
//! millisecond counts until the next sample.
//!
//! Mappings of files are not counted: a page of a file also counts as referenced when another
//! process that used it ends.
//!
//! Memory in huge pages has one bit for 512 pages, so a process with much of such memory is not
//! sampled.

use super::supervise::{descendants, stat_words};
use faultless::PAGE_SIZE;
use procfs::FromBufRead;
use procfs::process::MemoryMaps;
use std::collections::HashMap;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

/// The time between the request to clear the bits and the count.
const WINDOW: Duration = Duration::from_millis(1);
/// The least time between two samples, and the least ratio of this time to the duration of a
/// sample: the kernel's walk over the page tables delays the program's mapping calls.
const PAUSE: Duration = Duration::from_millis(50);
const RARELY: u32 = 20;
/// Resident pages below which a process has few misses: current TLBs have 1,500 to 3,000 entries.
const FEW: f64 = 2048.0;
/// The most processes of a sample.
const MOST: usize = 16;

/// The page walks of a run so far.
#[derive(Debug, Default)]
pub struct PageWalks {
    begin: Option<Instant>,
    next: Option<Instant>,
    /// The time of the last sample of each process.
    last: HashMap<i32, Instant>,
    walks: f64,
    samples: u64,
}

impl PageWalks {
    /// Samples `pid` and its descendants, unless the last sample was shortly before.
    pub fn look(&mut self, pid: i32) {
        let now = Instant::now();
        let begin = *self.begin.get_or_insert(now);
        if self.next.is_some_and(|next| now < next) {
            return;
        }
        let processes = [pid].into_iter().chain(descendants(pid)).take(MOST);
        let cleared: Vec<_> = processes.filter_map(clear).collect();
        if !cleared.is_empty() {
            thread::sleep(WINDOW);
        }
        for (pid, before, at) in cleared {
            let window = at.elapsed();
            let Some(after) = Memory::of(pid) else { continue };
            let end = Instant::now();
            let since = end - self.last.insert(pid, end).unwrap_or(begin);
            self.walks += after.walks_since(before) * since.as_secs_f64() / window.as_secs_f64();
            self.samples += 1;
        }
        self.next = Some(Instant::now() + PAUSE.max(RARELY * now.elapsed()));
    }

    /// Returns the estimated page walks for private memory, or `None` without any sample: the
    /// processes were small or short, had huge pages, or the kernel does not permit the request.
    pub fn estimate(&self) -> Option<f64> {
        (self.samples > 0).then_some(self.walks)
    }
}

/// Clears the accessed bits of a process with enough memory in single pages. Returns the process,
/// its memory before, and the time of the request.
fn clear(pid: i32) -> Option<(i32, Memory, Instant)> {
    let memory = Memory::of(pid)?;
    let is_sampled = memory.resident >= FEW && memory.huge < memory.resident / 4.0;
    let clear = |pid| fs::write(format!("/proc/{pid}/clear_refs"), "1").ok();
    is_sampled.then(|| clear(pid)).flatten()?;
    Some((pid, memory, Instant::now()))
}

/// The memory of a process outside mappings of files, in pages.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Memory {
    resident: f64,
    huge: f64,
    referenced: f64,
    /// Faults of the process so far.
    faults: f64,
}

impl Memory {
    fn of(pid: i32) -> Option<Self> {
        // The kernel counts while a file is read, so the whole text comes before its parser.
        let read = |file| fs::read_to_string(format!("/proc/{pid}/{file}")).ok();
        Self::parse(&read("smaps")?, &read("stat")?)
    }

    /// Parses the texts of `smaps` and `stat`.
    fn parse(smaps: &str, stat: &str) -> Option<Self> {
        let mappings = MemoryMaps::from_buf_read(smaps.as_bytes()).ok()?;
        let without_file = mappings.into_iter().filter(|mapping| mapping.inode == 0);
        let anonymous: Vec<_> = without_file.map(|mapping| mapping.extension.map).collect();
        let pages = |name: &str| {
            let bytes = anonymous.iter().filter_map(|values| values.get(name));
            bytes.sum::<u64>() as f64 / PAGE_SIZE as f64
        };
        Some(Self {
            resident: pages("Rss"),
            huge: pages("AnonHugePages"),
            referenced: pages("Referenced"),
            // Faults without disk access are word 10 of the line.
            faults: stat_words(stat).nth(7)?.parse().ok()?,
        })
    }

    /// Returns the estimated page walks for private memory since `before`, when all bits were
    /// cleared. A new page has its bit from its fault. A fault can also map several pages.
    fn walks_since(&self, before: Self) -> f64 {
        let new = (self.resident - before.resident).max(self.faults - before.faults).max(0.0);
        let new = new.min(self.resident);
        let pages = self.resident - new;
        let touched = (self.referenced - new).clamp(0.0, pages);
        // At least one page has no bit: the formula has no finite value for all pages.
        let share = (touched / pages.max(1.0)).min(1.0 - 1.0 / pages.max(2.0));
        -pages * (1.0 - share).ln()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::process::{Command, Stdio};

    fn memory(resident: f64, referenced: f64) -> Memory {
        Memory { resident, huge: 0.0, referenced, faults: 50.0 }
    }

    #[test]
    fn memory_is_parsed_in_pages() {
        let smaps = "00400000-00600000 r-xp 00000000 fe:00 77 /usr/bin/a program\n\
                     Rss: 1024 kB\nReferenced: 1024 kB\nVmFlags: rd ex mr mw me\n\
                     7f0000000000-7f0000800000 rw-p 00000000 00:00 0 \n\
                     Rss: 8192 kB\nReferenced: 4096 kB\nAnonHugePages: 2048 kB\n\
                     VmFlags: rd wr mr mw me ac\n\
                     7ffe00000000-7ffe00020000 rw-p 00000000 00:00 0 [stack]\n\
                     Rss: 16 kB\nReferenced: 8 kB\nAnonHugePages: 0 kB\n";
        let stat = "7 (a name) R 1 7 7 0 -1 4194304 1234 0 5 0 9 8";
        let (resident, huge, referenced) = (2052.0, 512.0, 1026.0);
        let expected = Memory { resident, huge, referenced, faults: 1234.0 };
        assert_eq!(Memory::parse(smaps, stat), Some(expected));
        assert_eq!(Memory::parse("Rss: 4 kB\n", stat), None);
        assert_eq!(Memory::parse(smaps, "7 (a name) R 1"), None);
    }

    #[test]
    fn walks_exceed_the_touched_pages() {
        let before = memory(10_000.0, 10_000.0);
        // Few pages of many: one walk each.
        let few = memory(10_000.0, 10.0).walks_since(before);
        assert!((10.0..10.1).contains(&few), "{few}");
        // Half of the pages: n * ln 2.
        let half = memory(10_000.0, 5000.0).walks_since(before);
        assert!((half - 6931.5).abs() < 0.1, "{half}");
        // New pages are referenced by their faults.
        let grown = memory(11_000.0, 1010.0).walks_since(before);
        assert!((10.0..10.1).contains(&grown), "{grown}");
        // The program returns memory and faults on it again: the size stays.
        let again = Memory { faults: 1050.0, ..memory(10_000.0, 1010.0) };
        assert!((10.0..10.1).contains(&again.walks_since(before)));
        // All pages: finite.
        assert!(memory(10_000.0, 10_000.0).walks_since(before).is_finite());
    }

    /// A program that uses 64 MiB at random has many walks, and one that waits has few. On a busy
    /// host the first program may not run during a sample, so the samples continue.
    #[test]
    fn random_accesses_are_seen() {
        let walks = |script: &str, enough: f64, longest: Duration| {
            let script =
                format!("$| = 1; my $s = 'x' x (64 << 20); my $n = 0; print \"\\n\"; {script}");
            let mut program = Command::new("perl")
                .args(["-e", &script])
                .stdout(Stdio::piped())
                .spawn()
                .expect("perl starts");
            let pid = program.id().cast_signed();
            let mut ready = [0];
            program.stdout.take().expect("piped").read_exact(&mut ready).expect("a line");
            let (mut walks, begin) = (PageWalks::default(), Instant::now());
            while begin.elapsed() < longest && walks.walks < enough {
                walks.look(pid);
                thread::sleep(Duration::from_millis(5));
            }
            program.kill().expect("it runs");
            program.wait().expect("it ends");
            (walks.estimate(), begin.elapsed())
        };
        let busy = "my $x = 1; while (1) { $x = ($x * 1103515245 + 12345) % 2147483648; \
                    $n += ord(substr($s, $x % (64 << 20), 1)); }";
        let (busy, time) = walks(busy, 50_000.0, Duration::from_secs(60));
        let (idle, _) = walks("sleep 90", f64::INFINITY, time.max(Duration::from_millis(500)));
        let (Some(busy), Some(idle)) = (busy, idle) else {
            // A kernel without accessed bits in /proc.
            assert!(!std::path::Path::new("/proc/self/clear_refs").exists());
            return;
        };
        assert!(busy > 50_000.0 && busy > 20.0 * idle, "{busy} and {idle} walks in {time:?}");
    }
}
