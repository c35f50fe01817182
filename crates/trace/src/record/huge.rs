//! Huge pages of the system, which hide first touches: one fault maps many pages.

use crate::resident::host_page_size;
use std::fs;
use std::path::Path;

const SYSFS: &str = "/sys/kernel/mm/transparent_hugepage";
/// Returns the size of THP in KiB, as in the names of sizes: the memory of a table of pages, whose
/// entries have eight bytes.
fn thp_kib(page: u64) -> u64 {
    (page * (page / 8)) >> 10
}

/// Returns the number of base pages in `kib` KiB.
fn pages(kib: u64) -> u64 {
    (kib << 10) / host_page_size()
}

/// The anonymous huge pages that a program gets without a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HugePages {
    /// Their sizes in KiB, from the smallest.
    sizes: Vec<u64>,
    /// Whether they are off for a recorded program.
    off: bool,
}

impl HugePages {
    /// Reads the system's sizes, and checks whether a program can be recorded without huge pages.
    pub(super) fn find() -> Self {
        Self { sizes: sizes(Path::new(SYSFS)), off: can_be_off() }
    }

    /// Returns the note about huge pages of processes that ran before the recording; `None` if no
    /// size is on.
    pub(super) fn live_note(&self) -> Option<String> {
        let largest = self.sizes.last()?;
        Some(format!(
            "huge pages are on for all programs (up to {largest} KiB), and a recording of running \
             processes leaves them on: a fault maps up to {} pages, whose first touches are not \
             recorded",
            pages(*largest)
        ))
    }

    /// Returns the note about huge pages; `None` if no size is on.
    pub(super) fn note(&self) -> Option<String> {
        let largest = self.sizes.last()?;
        let sizes: Vec<_> = self.sizes.iter().map(|kib| format!("{kib} KiB")).collect();
        let which = format!("huge pages are on for all programs ({})", sizes.join(", "));
        Some(if self.off {
            format!(
                "{which}, and off for the recorded program: without a recorder the program takes fewer faults, each of up to {} pages",
                pages(*largest)
            )
        } else {
            format!(
                "{which} and were on during the recording, as this kernel cannot disable them \
                 for one program: huge pages hide first touches. Disable them: `echo never | \
                 sudo tee {SYSFS}/enabled {SYSFS}/hugepages-*/enabled`"
            )
        })
    }
}

/// Returns the sizes that are on for all memory, in KiB, from the files below `sysfs`.
fn sizes(sysfs: &Path) -> Vec<u64> {
    let chosen = |file: &Path| {
        let text = fs::read_to_string(file).unwrap_or_default();
        let word = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
        word.map_or(String::new(), |(word, _)| word.to_owned())
    };
    let global = chosen(&sysfs.join("enabled"));
    let mut sizes = Vec::new();
    let mut listed = false;
    for entry in fs::read_dir(sysfs).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let kib =
            name.to_str().and_then(|name| name.strip_prefix("hugepages-")?.strip_suffix("kB"));
        let Some(kib) = kib.and_then(|kib| kib.parse().ok()) else { continue };
        listed = true;
        let own = chosen(&entry.path().join("enabled"));
        if own == "always" || own == "inherit" && global == "always" {
            sizes.push(kib);
        }
    }
    // Linux before 6.8 has one size.
    if !listed && global == "always" {
        sizes.push(thp_kib(host_page_size()));
    }
    sizes.sort_unstable();
    sizes
}

/// Returns whether the kernel can switch huge pages off for a program.
fn can_be_off() -> bool {
    // SAFETY: these calls touch no memory. The earlier setting is restored.
    unsafe {
        let before = libc::prctl(libc::PR_GET_THP_DISABLE, 0, 0, 0, 0);
        if before < 0 {
            return false;
        }
        let off = libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0;
        if before == 0 {
            libc::prctl(libc::PR_SET_THP_DISABLE, 0, 0, 0, 0);
        }
        off
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enabled_sizes_are_found() {
        let dir = std::env::temp_dir().join(format!("faultless-huge-{}", std::process::id()));
        let write = |name: &str, text: &str| {
            let file = dir.join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        write("enabled", "[always] madvise never\n");
        assert_eq!(sizes(&dir), [2048], "an old kernel");
        write("hugepages-2048kB/enabled", "always [inherit] madvise never\n");
        write("hugepages-64kB/enabled", "[always] inherit madvise never\n");
        write("hugepages-32kB/enabled", "always inherit [madvise] never\n");
        assert_eq!(sizes(&dir), [64, 2048]);
        write("enabled", "always [madvise] never\n");
        assert_eq!(sizes(&dir), [64]);
        write("hugepages-64kB/enabled", "always inherit madvise [never]\n");
        assert_eq!(sizes(&dir), [0; 0]);
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn hidden_touches_are_reported_with_a_remedy() {
        let note = |sizes: &[u64], off| HugePages { sizes: sizes.to_vec(), off }.note();
        assert_eq!(note(&[], true), None);
        assert_eq!(note(&[], false), None);
        let off = note(&[64, 2048], true).unwrap();
        assert!(off.contains("64 KiB, 2048 KiB") && off.contains("up to 512 pages"), "{off}");
        let on = note(&[64], false).unwrap();
        assert!(on.contains("hide first touches") && on.contains("echo never | sudo tee"), "{on}");
        assert!(can_be_off(), "as on any Linux with huge pages");
    }
}
