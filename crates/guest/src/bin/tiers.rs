//! `tiers [CHECK…]`: used pages move to the fast node and stay there, and unused pages leave the
//! fast node. The program needs a machine with two nodes of memory, the first of which is a quarter
//! of 128 MiB, and a swap area of 256 MiB.

use faultless_guest::args::Args;
use faultless_guest::check::{self, Check, Verdict};
use faultless_guest::mem::{PAGE, Region};
use faultless_guest::numa::{MOVE, move_pages, nodes_of};
use faultless_guest::procfs::vmstat;
use faultless_guest::sys::doing;
use faultless_guest::{ensure, same};
use std::time::{Duration, Instant};

/// The memory in constant use, in bytes: a part of the fast node.
const USED: u64 = 8 << 20;
/// The number of bytes of other pages after which the memory is used again.
const STEP: u64 = 256 << 10;
/// The time limit for moves, with a busy host.
const PATIENCE: Duration = Duration::from_secs(300);

fn word(at: u64) -> u64 {
    (at / PAGE + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn filled(bytes: u64) -> Result<Region, String> {
    let region = doing("mmap", Region::anonymous(bytes))?;
    region.pages().for_each(|at| region.store(at, word(at)));
    Ok(region)
}

/// Checks that each page of `region` has its stored contents.
fn is_whole(region: &Region) -> Verdict {
    same!(region.pages().find(|&at| region.load(at) != word(at)), None, "a page");
    Ok(())
}

/// Returns the number of pages of `region` in node `node`.
fn pages_on(region: &Region, node: i32) -> Result<usize, String> {
    let nodes = doing("move_pages", nodes_of(&region.addresses()))?;
    Ok(nodes.iter().filter(|there| **there == node).count())
}

fn counter(name: &str) -> Result<u64, String> {
    vmstat()?.get(name).copied().ok_or_else(|| format!("/proc/vmstat has no {name}"))
}

/// Uses a part of memory while it fills `bytes` of other memory. Returns both regions.
fn beside(bytes: u64) -> Result<[Region; 2], String> {
    let used = filled(USED)?;
    let other = doing("mmap", Region::anonymous(bytes))?;
    for at in other.pages() {
        other.store(at, word(at));
        if at % STEP == 0 {
            is_whole(&used)?;
        }
    }
    Ok([used, other])
}

/// Uses `used` until nine tenths of its pages are in the fast node.
fn all_come(used: &Region) -> Verdict {
    let (begin, all) = (Instant::now(), used.pages().count());
    loop {
        let there = pages_on(used, 0)?;
        if there * 10 >= all * 9 {
            return Ok(());
        }
        ensure!(begin.elapsed() < PATIENCE, "{there} of {all} pages are in the fast node");
        (0..10).try_for_each(|_| is_whole(used))?;
    }
}

/// Most of the used pages stay in the fast node while more pages are filled than the node holds.
fn used_pages_stay_fast() -> Verdict {
    let before = counter("pgdemote")?;
    let [used, other] = beside(64 << 20)?;
    let (near, all) = (pages_on(&used, 0)?, used.pages().count());
    ensure!(near * 2 >= all, "{near} of {all} used pages are in the fast node");
    ensure!(counter("pgdemote")? > before, "no page left the fast node");
    all_come(&used)?;
    is_whole(&other)
}

/// Used pages stay in memory while more pages are filled than memory holds.
fn used_pages_stay_in_memory() -> Verdict {
    let before = counter("pswpout")?;
    let [used, other] = beside(128 << 20)?;
    let [near, far] = [pages_on(&used, 0)?, pages_on(&used, 1)?];
    let all = used.pages().count();
    ensure!((near + far) * 10 >= all * 9, "{near} and {far} of {all} pages are in memory");
    ensure!(counter("pswpout")? > before, "no page left memory");
    all_come(&used)?;
    is_whole(&other)
}

/// Used pages move to the fast node, and other pages leave it.
fn used_pages_become_fast() -> Verdict {
    let used = filled(USED)?;
    let pages = used.addresses();
    let mut status = vec![0; pages.len()];
    doing("move_pages", move_pages(&pages, Some(&vec![1; pages.len()]), &mut status, MOVE))?;
    let there = pages_on(&used, 0)?;
    ensure!(there * 10 <= pages.len(), "{there} of {} pages are in the fast node", pages.len());
    let _other = filled(24 << 20)?;
    let before = counter("pgpromote_success")?;
    all_come(&used)?;
    ensure!(counter("pgpromote_success")? > before, "no page was promoted");
    Ok(())
}

const CHECKS: &[Check] = &[
    ("used_pages_stay_fast", used_pages_stay_fast),
    ("used_pages_become_fast", used_pages_become_fast),
    ("used_pages_stay_in_memory", used_pages_stay_in_memory),
];

fn main() {
    let args = Args::read("tiers", &[]);
    std::process::exit(check::run(&args, CHECKS))
}
