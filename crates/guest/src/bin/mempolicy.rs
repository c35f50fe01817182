//! `mempolicy [CHECK…]`: `mbind`, `set_mempolicy` and `get_mempolicy`, and the memory nodes of new
//! pages.
//!
//! On a machine with one node all policies select this node; the checks then cover errors, and
//! merging of VMAs.

use faultless_guest::args::Args;
use faultless_guest::check::{Check, Verdict};
use faultless_guest::mem::{PAGE, Region, errno, find_mapping};
use faultless_guest::numa::{
    MOVE, MOVE_ALL, Policy, get_mempolicy, mbind, nodes, nodes_of, set_mempolicy,
};
use faultless_guest::proc::{self, Status, fork};
use faultless_guest::sys::{call, doing};
use faultless_guest::turns::anonymous;
use faultless_guest::{check, ensure, procfs, same};
use std::collections::BTreeMap;
use std::path::Path;

/// `MPOL_MF_STRICT`, and the flags of `get_mempolicy`.
const STRICT: u64 = 1;
const OF_NODE: u64 = 1;
const OF_ADDR: u64 = 2;
const ALLOWED: u64 = 4;
/// Linux's directory about the nodes.
const NODES: &str = "/sys/devices/system/node";

fn last() -> Result<i32, String> {
    Ok(doing("move_pages", nodes())? - 1)
}

/// Returns the number of a region's pages on each of the first two nodes.
fn counts(region: &Region) -> Result<[usize; 2], String> {
    let found = doing("move_pages", nodes_of(&region.addresses()))?;
    Ok([0, 1].map(|node| found.iter().filter(|found| **found == node).count()))
}

fn errors() -> Verdict {
    let region = anonymous(4)?;
    let (at, len) = (region.start(), region.len());
    let wrong = |mode, nodes| errno(mbind(at, len, Policy { mode, nodes }, 0));
    same!(wrong(99, 1), libc::EINVAL, "an unknown mode");
    same!(wrong(libc::MPOL_DEFAULT, 1), libc::EINVAL, "the default with a node");
    same!(wrong(libc::MPOL_LOCAL, 1), libc::EINVAL, "local with a node");
    same!(wrong(libc::MPOL_INTERLEAVE, 0), libc::EINVAL, "interleaving over no node");
    same!(wrong(libc::MPOL_INTERLEAVE, 1 << 63), libc::EINVAL, "a missing node");
    let first = Policy::preferred(0);
    same!(errno(mbind(at + 1, PAGE, first, 0)), libc::EINVAL, "an address within a page");
    same!(errno(mbind(at, u64::MAX - at, first, 0)), libc::EINVAL, "a range that wraps");
    same!(errno(mbind(at, len, first, 8)), libc::EINVAL, "an unknown flag");
    same!(mbind(at, 0, first, 0), Ok(()), "no pages");
    // SAFETY: there is no list.
    let list = |list, bits| unsafe { call(libc::SYS_mbind, [at, len, 1, list, bits, 0]) };
    same!(errno(list(8, 65)), libc::EFAULT, "an unreadable list");
    same!(errno(list(8, 1 << 30)), libc::EINVAL, "too long a list");
    same!(list(0, 65), Ok(0), "no list means no node, which is local");
    doing("munmap", region.unmap(PAGE, PAGE))?;
    same!(errno(mbind(at, len, first, 0)), libc::EFAULT, "a hole");
    same!(errno(mbind(at + PAGE, PAGE, first, 0)), libc::EFAULT, "an unmapped range");
    same!(mbind(at, len, Policy::DEFAULT, 0), Ok(()), "a hole is allowed with the default policy");
    same!(
        errno(mbind(at + PAGE, PAGE, Policy::DEFAULT, 0)),
        libc::EFAULT,
        "an unmapped range with the default policy"
    );

    same!(errno(get_mempolicy(0, 8)), libc::EINVAL, "an unknown flag of get_mempolicy");
    same!(errno(get_mempolicy(at, 0)), libc::EINVAL, "an address without its flag");
    same!(errno(get_mempolicy(0, OF_ADDR | ALLOWED)), libc::EINVAL, "two questions");
    same!(
        errno(get_mempolicy(at + PAGE, OF_ADDR)),
        libc::EFAULT,
        "the policy of an unmapped address"
    );
    same!(errno(get_mempolicy(0, OF_NODE)), libc::EINVAL, "the next node without interleaving");
    let mut list = [1u64; 512];
    let mut query = |bits: u64| {
        let to = list.as_mut_ptr() as u64;
        // SAFETY: the call stores at most a page.
        unsafe { call(libc::SYS_get_mempolicy, [0, to, bits, 0, 0, 0]) }
    };
    same!(errno(query(0)), libc::EINVAL, "a buffer without room for a node");
    same!(errno(query(8 * PAGE + 2)), libc::EINVAL, "a buffer for more than a page of nodes");
    same!(query(8 * PAGE + 1), Ok(0), "a buffer for a page of nodes");
    same!(list, [0; 512], "a page of nodes");
    same!(
        errno(set_mempolicy(Policy { mode: libc::MPOL_INTERLEAVE, nodes: 0 })),
        libc::EINVAL,
        "a thread's interleaving over no node"
    );
    Ok(())
}

/// A policy for the middle of a VMA splits the VMA, and can be read back.
fn parts() -> Verdict {
    let region = anonymous(6)?;
    let at = region.start();
    let whole = |what: &str| -> Result<u64, String> {
        let maps = procfs::text("/proc/self/maps")?;
        let found = find_mapping(&maps, at + 2 * PAGE).ok_or_else(|| format!("{what}: no VMA"))?;
        Ok((found.0.end - found.0.start) / PAGE)
    };
    let query = |at: u64| doing("get_mempolicy", get_mempolicy(at, OF_ADDR));
    same!(query(at)?, Policy::DEFAULT, "no policy");
    for policy in [Policy::preferred(0), Policy::interleave(1), Policy::LOCAL] {
        doing("mbind", mbind(at + 2 * PAGE, 2 * PAGE, policy, 0))?;
        same!(whole("bound")?, 2, "{policy:?}: a separate VMA");
        same!(query(at + 2 * PAGE)?, policy, "{policy:?}");
        same!(query(at + 5 * PAGE)?, Policy::DEFAULT, "{policy:?}: above the VMA");
    }
    doing("mbind", mbind(at, 6 * PAGE, Policy::preferred(0), 0))?;
    doing("mbind", mbind(at, 6 * PAGE, Policy::DEFAULT, 0))?;
    let length = whole("as before")?;
    ensure!(length >= 6, "one VMA again, of {length} pages");
    same!(
        doing("get_mempolicy", get_mempolicy(0, ALLOWED))?.nodes,
        (2 << last()?) - 1,
        "all nodes"
    );
    Ok(())
}

/// The fields of a node's file `meminfo`.
fn fields_of(node: i32) -> Result<BTreeMap<String, String>, String> {
    let path = format!("{NODES}/node{node}/meminfo");
    let label = format!("Node {node} ");
    procfs::fields(&path)?
        .into_iter()
        .map(|(name, value)| match name.strip_prefix(&label) {
            Some(name) => Ok((name.to_owned(), value)),
            None => Err(format!("{path}: {name:?}")),
        })
        .collect()
}

/// `/sys/devices/system/node` lists the nodes, and `/proc/zoneinfo` contains all of them.
fn directories() -> Verdict {
    const PAGES: u64 = 512;
    if !Path::new(NODES).exists() {
        // Some Linux kernels lack this directory.
        return Ok(());
    }
    let last = last()?;
    let line =
        |name: &str| Ok::<_, String>(procfs::text(&format!("{NODES}/{name}"))?.trim().to_owned());
    let all = if last == 0 { "0".to_owned() } else { format!("0-{last}") };
    for name in ["online", "has_memory", "has_normal_memory"] {
        same!(line(name)?, all, "{name}");
    }
    same!(line("has_cpu")?.starts_with('0'), true, "has_cpu");
    line("possible")?;
    let zones = procfs::text("/proc/zoneinfo")?;
    let (mut total, mut cpus) = (0, 0);
    for node in 0..=last {
        let distances = line(&format!("node{node}/distance"))?;
        let distances: Vec<u32> = distances.split(' ').filter_map(|it| it.parse().ok()).collect();
        same!(distances.len() as i32, last + 1, "distances of node {node}");
        for (to, distance) in distances.into_iter().enumerate() {
            let right = if to as i32 == node { distance == 10 } else { distance > 10 };
            ensure!(right, "the distance from {node} to {to}: {distance}");
        }
        let info = fields_of(node)?;
        let [own, free, used] =
            ["MemTotal", "MemFree", "MemUsed"].map(|name| procfs::kilobytes(&info, name));
        total += own.clone()?;
        same!(free? + used?, own?, "MemTotal of node {node}");
        let map = line(&format!("node{node}/cpumap"))?.replace(',', "");
        let own = u128::from_str_radix(&map, 16).map_err(|_| format!("cpumap {map:?}"))?;
        let none = line(&format!("node{node}/cpulist"))?.is_empty();
        same!(none, own == 0, "whether node {node} has no CPUs");
        cpus |= own;
        ensure!(zones.contains(&format!("Node {node}, zone ")), "no zone of node {node}");
    }
    let all_memory = procfs::kilobytes(&procfs::fields("/proc/meminfo")?, "MemTotal")?;
    // On a virtual machine, Linux may add memory without a node.
    let all_known = procfs::vmstat()?.contains_key("speculative_pgfault");
    let right = if all_known { total == all_memory } else { total <= all_memory };
    ensure!(right && total != 0, "the nodes contain {total} bytes of {all_memory}");
    ensure!(cpus & 1 != 0, "no node has CPU 0");
    let allowed = procfs::fields("/proc/self/status")?.remove("Mems_allowed_list");
    same!(allowed, Some(all), "Mems_allowed_list");
    let anon = || procfs::kilobytes(&fields_of(last)?, "AnonPages");
    let rise = || {
        let region = anonymous(PAGES)?;
        doing("mbind", mbind(region.start(), region.len(), Policy::preferred(last), 0))?;
        let before = anon()?;
        region.fill(1);
        Ok::<_, String>(anon()?.saturating_sub(before))
    };
    // Other programs of the host may free memory at the same time.
    let mut more = rise()?;
    for _ in 0..20 {
        more = more.max(rise()?);
    }
    // Linux counts for each CPU, and sums the counts periodically.
    ensure!(more >= PAGES * PAGE / 2, "AnonPages of node {last} rose by {more} bytes");
    Ok(())
}

/// New pages come from the nodes of a policy.
fn new_pages() -> Verdict {
    const PAGES: u64 = 32;
    let last = last()?;
    let region = anonymous(PAGES)?;
    doing("mbind", mbind(region.start(), region.len(), Policy::preferred(last), 0))?;
    region.fill(1);
    same!(nodes_of(&region.addresses()), Ok(vec![last; PAGES as usize]), "the last node");
    let node = doing("get_mempolicy", get_mempolicy(region.start(), OF_ADDR | OF_NODE))?;
    same!(node.mode, last, "the node of a page");
    // Copies are new pages, in a child too.
    let child = fork(|| {
        region.fill(2);
        i32::from(nodes_of(&region.addresses()) != Ok(vec![last; PAGES as usize]))
    });
    same!(doing("wait4", doing("fork", child)?.wait())?, Status::Exited(0), "a child's copies");
    let turns = anonymous(PAGES)?;
    doing("mbind", mbind(turns.start(), turns.len(), Policy::interleave(last + 1), 0))?;
    turns.fill(1);
    let half = PAGES as usize / 2;
    let expected = if last == 0 { [2 * half, 0] } else { [half; 2] };
    same!(counts(&turns)?, expected, "in turns");
    Ok(())
}

/// Present pages move if requested.
fn moves() -> Verdict {
    const PAGES: u64 = 40;
    let last = last()?;
    let region = anonymous(PAGES)?;
    region.fill(7);
    doing("move_pages", region.move_to(0))?;
    let bind =
        |policy, flags| mbind(region.start(), region.len(), policy, flags).map_err(|it| it.0);
    let astray = if last == 0 { Ok(()) } else { Err(libc::EIO) };
    same!(bind(Policy::preferred(last), STRICT), astray, "pages on another node");
    same!(bind(Policy::preferred(last), 0), Ok(()), "a policy without a move");
    same!(nodes_of(&region.addresses()), Ok(vec![0; PAGES as usize]), "the unchanged nodes");
    same!(bind(Policy::preferred(last), MOVE | STRICT), Ok(()), "a policy with a move");
    same!(nodes_of(&region.addresses()), Ok(vec![last; PAGES as usize]), "to the last node");
    same!(bind(Policy::preferred(0), MOVE_ALL), Ok(()), "and back");
    same!(nodes_of(&region.addresses()), Ok(vec![0; PAGES as usize]), "to the first");
    for at in region.pages() {
        same!(region.load(at), 7, "the content of a moved page");
    }
    Ok(())
}

/// A thread's policy applies to its later mappings, and its children inherit the policy.
fn thread_policies() -> Verdict {
    const PAGES: u64 = 16;
    let last = last()?;
    let policy = Policy::preferred(last);
    doing("set_mempolicy", set_mempolicy(policy))?;
    same!(doing("get_mempolicy", get_mempolicy(0, 0))?, policy, "the thread's");
    let uses = || -> Result<bool, String> {
        let region = anonymous(PAGES)?;
        region.fill(1);
        Ok(nodes_of(&region.addresses()) == Ok(vec![last; PAGES as usize]))
    };
    same!(uses()?, true, "the node of the mapped memory");
    let child = doing("fork", fork(|| i32::from(uses() != Ok(true))))?;
    same!(doing("wait4", child.wait())?, Status::Exited(0), "the node of a child's memory");
    doing("set_mempolicy", set_mempolicy(Policy::DEFAULT))?;
    same!(doing("get_mempolicy", get_mempolicy(0, 0))?, Policy::DEFAULT, "no policy again");
    Ok(())
}

const CHECKS: &[Check] = &[
    ("errors", errors),
    ("parts", parts),
    ("directories", directories),
    ("new_pages", new_pages),
    ("moves", moves),
    ("thread_policies", thread_policies),
];

fn main() {
    let args = Args::read("mempolicy", &[]);
    proc::no_huge_pages();
    if nodes() == Ok(1) {
        println!("# one memory node: all policies select this node");
    }
    std::process::exit(check::run(&args, CHECKS))
}
