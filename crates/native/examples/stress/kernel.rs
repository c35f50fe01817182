//! Background work of a kernel, and settings.

use super::operations::{Agent, Did, Outcome};
use super::world::Program;
use faultless::{AnonVmaCheck, Errno, Locking, PAGE_SIZE, Setting};
use faultless_native::NativeCpu;
use std::sync::Arc;

/// Frees a few frames.
pub fn reclaim<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    _: &Arc<Program<'n>>,
) -> Outcome {
    cpu.cpu().reclaim(agent.random.u64(1..64));
    Ok(Did::All)
}

/// Does all background work within a small budget.
pub fn background<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    _: &Arc<Program<'n>>,
) -> Outcome {
    cpu.cpu().background(agent.random.u64(0..64));
    Ok(Did::All)
}

/// Frees frames if few are free.
pub fn reclaim_ahead<'n>(
    _: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    _: &Arc<Program<'n>>,
) -> Outcome {
    cpu.cpu().reclaim_ahead();
    Ok(Did::All)
}

/// Makes a free block of 2 MiB, if possible.
pub fn compact<'n>(
    _: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    _: &Arc<Program<'n>>,
) -> Outcome {
    cpu.cpu().compact(1);
    Ok(Did::All)
}

/// Makes free blocks of 2 MiB in the background.
pub fn compact_ahead<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    _: &Arc<Program<'n>>,
) -> Outcome {
    cpu.cpu().compact_ahead(agent.random.u64(1..512));
    Ok(Did::All)
}

/// Moves pages between fast and slow nodes.
pub fn balance<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    _: &Arc<Program<'n>>,
) -> Outcome {
    cpu.cpu().balance(agent.random.u64(0..64));
    Ok(Did::All)
}

/// Moves pages of the program to a node.
pub fn migrate<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    program: &Arc<Program<'n>>,
) -> Outcome {
    let region = agent.region(program);
    let (at, len) = agent.stretch(region, 24);
    let pages: Vec<_> = (0..len / PAGE_SIZE).map(|page| at + page * PAGE_SIZE).collect();
    let mut status = vec![Err(Errno::ENOENT); pages.len()];
    let nodes: Vec<_> = cpu.cpu().memory_nodes().iter().collect();
    let node = nodes[agent.random.usize(0..nodes.len())];
    let all = agent.random.bool();
    let moved = program.process.space().move_pages(cpu.cpu(), &pages, node, all, &mut status);
    moved.map_err(|error| error.to_string())?;
    match status.iter().find(|status| status.is_ok_and(|on| on != node)) {
        Some(status) => Err(format!("a page moved to node {node} is on {status:?}")),
        None => Ok(Did::All),
    }
}

/// Does the deferred flushes, and frees the frames of the CPU's list.
pub fn flush_deferred<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    _: &Arc<Program<'n>>,
) -> Outcome {
    cpu.cpu().flush_deferred();
    if agent.random.bool() {
        cpu.cpu().drain();
    }
    Ok(Did::All)
}

/// Zeroes free frames.
pub fn zero_ahead<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    _: &Arc<Program<'n>>,
) -> Outcome {
    cpu.cpu().zero_ahead(agent.random.usize(1..64));
    Ok(Did::All)
}

/// Changes a setting.
pub fn set<'n>(agent: &mut Agent<'_, 'n>, _: &NativeCpu<'_, 'n>, _: &Arc<Program<'n>>) -> Outcome {
    if !agent.world.plan.switching {
        return Ok(Did::Nothing);
    }
    let random = &mut agent.random;
    let setting = match random.u32(0..8) {
        0 => Setting::Locking(Locking::ALL[random.usize(0..3)]),
        1 => Setting::AnonVmaCheck([AnonVmaCheck::Early, AnonVmaCheck::Late][random.usize(0..2)]),
        2 => Setting::PrefaultMaxOrder(random.u8(0..7)),
        3 => Setting::FaultAroundPages(1 << random.u32(0..7)),
        4 => Setting::DeferredFlush(random.bool()),
        5 => Setting::EditInPlace(random.bool()),
        6 => Setting::ShardAfter(random.u32(0..6)),
        _ => Setting::ZeroOnFree(random.bool()),
    };
    agent.world.native.vm().set(setting);
    Ok(Did::All)
}
