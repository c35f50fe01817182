//! Address space that jemalloc returns to the kernel: a program that switches off `retain`, the
//! default on 64-bit Linux.

use super::costs::Costs;
use super::findings::Findings;
use super::item::{Item, Open};
use super::linked::Linked;
use super::named;
use super::others::shown;
use super::time::touch_time;
use crate::number::{grouped, plural};
use faultless::PAGE_SIZE;

/// The number of sizes of jemalloc's mappings between two powers of two. The first has 2 MiB.
const SIZES: u64 = 4;
/// The largest free part that jemalloc uses for a block, in sizes of the block
/// (`lg_extent_max_active_fit`).
const FIT: f64 = 64.0;
/// The pages of the first mapping.
const FIRST: u64 = (2 << 20) / PAGE_SIZE;

/// Returns whether the program has switched off `retain` for this build.
pub fn is_off(linked: &Linked, findings: &Findings) -> bool {
    let Linked::Jemalloc { variable, retains: true, .. } = linked else { return false };
    let program = &findings.program;
    match program.variables.option(variable, "retain") {
        Some(value) => value == "false",
        None => program.unretains,
    }
}

/// jemalloc keeps address space: mappings that grow, instead of a mapping for each block.
///
/// A page returned by `munmap` is then returned by `MADV_DONTNEED`, which causes the same fault at
/// its next use. Small mappings are an exception: jemalloc joins free parts only within a mapping,
/// and uses a free part again for a block of at least a 64th of its size. A mapping of at most 64
/// blocks is therefore used again before it is returned.
pub fn predicted(linked: &Linked, findings: &Findings, costs: &Costs) -> Option<Item> {
    let apply = named::retain(linked).filter(|_| is_off(linked, findings))?;
    let discards = findings.discards;
    let block = discards.map_pages as f64 / discards.maps.max(1) as f64;
    let (mappings, small) = mappings(discards.peak_mapped, (block * FIT) as u64);
    let calls = discards.maps.saturating_sub(mappings);
    let share = small as f64 / discards.peak_mapped.max(1) as f64;
    let faults = discards.remapped as f64 * share.min(1.0);
    (calls > 0 && discards.unmaps > 0).then(|| Item {
        name: "jemalloc retains address space".into(),
        action: format!(
            "{} (the default on 64-bit Linux) spares {} of mmap, and {faults:.0} faults",
            shown(&apply),
            plural(calls, "call")
        ),
        saving: calls as f64 * costs.mapping + faults * touch_time(findings, costs),
        spared: Some(findings.spared(faults * findings.single())),
        unused: 0,
        apply,
        at_best: 0.0,
        remarks: vec!["blocks are assumed to have the average size of the program's mappings"],
    })
}

/// Returns the advice without a prediction: memory that is kept, too.
pub fn open(linked: &Linked, findings: &Findings) -> Option<Open> {
    let apply = named::keeps_and_retains(linked).filter(|_| is_off(linked, findings))?;
    let back = findings.discards.remapped;
    (back > 0).then(|| Open {
        name: "jemalloc keeps memory".into(),
        action: shown(&apply),
        why: format!(
            "spares at most {} faults on pages that munmap had returned; without `retain`, a \
             recording does not show which of them jemalloc would use again",
            grouped(back)
        ),
        apply,
    })
}

/// Returns the number of mappings with which jemalloc reaches this number of pages, and the pages
/// of those mappings with at most `limit` pages: each has the next of its sizes.
fn mappings(pages: u64, limit: u64) -> (u64, u64) {
    let (mut sum, mut count, mut small, mut unit) = (0, 0, 0, FIRST / SIZES);
    while sum < pages {
        for size in (SIZES..2 * SIZES).map(|step| step * unit) {
            if sum < pages {
                sum += size;
                count += 1;
                small += if size <= limit { size } else { 0 };
            }
        }
        unit *= 2;
    }
    (count, small)
}

#[cfg(test)]
mod tests {
    use super::super::costs::tests::costs;
    use super::super::item::Apply;
    use super::super::items::tests::{findings, sizes};
    use super::super::linked::tests::jemalloc;
    use super::super::sysfs::Mode;
    use super::*;
    use faultless_trace::discard::Discards;

    #[test]
    fn mappings_grow_by_a_quarter_of_the_last_power_of_two() {
        // 2, 2.5, 3, 3.5 and 4 MiB.
        let counts = [0, 1, 512, 513, 11 << 8, 15 << 8].map(|pages| mappings(pages, 0).0);
        assert_eq!(counts, [0, 1, 1, 2, 4, 5]);
        let small = [511, 512, 1024, 1 << 20].map(|limit| mappings(20 << 8, limit).1);
        assert_eq!(small, [0, 2 << 8, 15 << 8, 20 << 8]);
    }

    #[test]
    fn default_saves_calls_and_faults_of_a_program_without_it() {
        let mut findings = findings("python", sizes(Mode::Madvise));
        let (maps, map_pages) = (1005, 16 * 1005);
        findings.discards = Discards {
            maps,
            map_pages,
            unmaps: 40,
            remapped: 8000,
            peak_mapped: 15 << 8,
            ..Discards::default()
        };
        let get = |findings: &Findings| predicted(&jemalloc(), findings, &costs());
        assert!(get(&findings).is_none() && open(&jemalloc(), &findings).is_none(), "the default");
        findings.program.unretains = true;
        let got = get(&findings).expect("switched off");
        // Mappings of at most 64 blocks of 16 pages are used again: all of 15 MiB.
        assert_eq!((got.saving, got.spared), (1000.0 * 500.0 + 8000.0 * 2300.0, Some(8000.0)));
        let value = "retain:true".to_owned();
        assert_eq!(got.apply, Apply::environment([("MALLOC_CONF", value)]));
        let kept = open(&jemalloc(), &findings).expect("switched off");
        assert!(kept.action.starts_with("MALLOC_CONF=retain:true,dirty_decay_ms:-1"), "{kept:?}");
        // The average block has 4 pages: no mapping is small enough.
        findings.discards.map_pages = 4 * maps;
        assert_eq!(get(&findings).map(|item| item.saving), Some(1000.0 * 500.0));
        // The environment overrides the settings in the file.
        findings.program.variables.set("MALLOC_CONF", "retain:true");
        assert!(get(&findings).is_none(), "set by the user");
        findings.program.unretains = false;
        findings.program.variables.set("MALLOC_CONF", "narenas:1,retain:false");
        assert!(get(&findings).is_some());
    }
}
