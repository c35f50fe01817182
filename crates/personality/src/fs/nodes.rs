//! `/sys/devices/system/node`: the memory nodes, and their nearest CPUs.

use super::attribute::{Attribute, Shown};
use super::inode::Inode;
use super::proc::Text;
use super::set::{list, mask};
use super::usage::{Usage, rows};
use crate::errno::Result;
use core::fmt::{self, Display};
use faultless::{CpuId, Machine};
use faultless_bare::percpu;
use faultless_collections::{Arc, String};

/// Returns the nodes as a bit set. All nodes have memory, and exist from the start.
pub(super) fn nodes() -> u64 {
    percpu::cpu().memory_nodes().bits().into()
}

/// Returns the CPUs nearest to a node as a bit set.
fn cpus_of(node: u8) -> u64 {
    let near = |cpu: &usize| percpu::vm().machine().nearest_node(CpuId(*cpu as u16)) == node;
    (0..percpu::cpus()).filter(near).fold(0, |cpus, cpu| cpus | 1 << cpu)
}

/// Returns the distance between two nodes, in Linux's unit: 10 is no distance. Nodes are tiers,
/// ordered by cost.
fn distance(from: u8, to: u8) -> u32 {
    let cost = |node| percpu::vm().machine().node_cost(node);
    10 * (1 + cost(from).abs_diff(cost(to)))
}

/// The nodes in order.
fn each() -> impl Iterator<Item = u8> {
    percpu::cpu().memory_nodes().iter()
}

/// Calls `add` with each file and its path.
///
/// # Errors
/// `ENOMEM`.
pub(super) fn add_all(mut add: impl FnMut(&str, Result<Arc<Inode>>)) -> Result<()> {
    let mut put = |name: fmt::Arguments<'_>, made| -> Result<()> {
        let path = String::try_format(format_args!("sys/devices/system/node/{name}"))?;
        add(&path, made);
        Ok(())
    };
    for name in ["online", "possible", "has_memory", "has_normal_memory"] {
        put(format_args!("{name}"), Attribute::fixed(list(nodes())))?;
    }
    let with_cpus = each().filter(|node| cpus_of(*node) != 0);
    let with_cpus = with_cpus.fold(0, |nodes, node| nodes | 1 << node);
    put(format_args!("has_cpu"), Attribute::fixed(list(with_cpus)))?;
    for node in each() {
        let mut own = |name: &str, made| put(format_args!("node{node}/{name}"), made);
        let cpus = cpus_of(node);
        own("cpulist", Attribute::fixed(list(cpus)))?;
        own("cpumap", Attribute::fixed(mask(cpus, percpu::cpus() as u32)))?;
        own("distance", Attribute::fixed(distances(node)))?;
        let shown = Shown::OfNode(meminfo, node);
        own("meminfo", Attribute { shown, store: None }.inode())?;
    }
    Ok(())
}

/// The distances from a node to each.
fn distances(from: u8) -> impl Display {
    fmt::from_fn(move |text| {
        let mut blank = "";
        for to in each() {
            write!(text, "{blank}{}", distance(from, to))?;
            blank = " ";
        }
        Ok(())
    })
}

fn meminfo(node: u8, text: &mut Text) -> fmt::Result {
    let usage = Usage::of(Some(node));
    let Usage { total, free, census, .. } = usage;
    let sizes = [("MemTotal", total), ("MemFree", free), ("MemUsed", total.saturating_sub(free))];
    let others = [("FilePages", census.shared), ("PageTables", census.tables)];
    let all = [&sizes[..], &usage.lists(), &usage.pages(), &others];
    all.iter().try_for_each(|part| rows(text, format_args!("Node {node} "), part))
}
