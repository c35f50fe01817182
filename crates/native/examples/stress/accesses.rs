//! Loads and stores, of the program itself and from outside.

use super::operations::{Agent, Did, Outcome};
use super::region::{Reached, Region};
use super::words::{Look, Reader};
use super::world::{Program, World};
use faultless::{FaultError, PAGE_SIZE, Prot, Space};
use faultless_native::{NativeCpu, NativeMachine, Signal};
use std::sync::Arc;

/// Judges the result of an access to `page`. If the protection forbids the access, it is allowed
/// again.
fn conclude<R>(
    agent: &Agent<'_, '_>,
    cpu: &NativeCpu<'_, '_>,
    space: &Space<NativeMachine>,
    (region, page, cuts): (&Region, usize, Option<u64>),
    reached: Reached<R>,
) -> Outcome {
    match reached {
        Reached::Done(_) => Ok(Did::All),
        Reached::Missing => Ok(Did::Refused),
        Reached::Forbidden => {
            let addr = region.addr(region.slot(page), page);
            // Refused if the page has moved.
            let _ = space.mprotect(cpu.cpu(), addr, PAGE_SIZE, Prot::RW);
            Ok(Did::Refused)
        }
        Reached::Signal(signal) => {
            agent.world.permit(region, page, cuts, signal)?;
            Ok(Did::Refused)
        }
    }
}

/// Stores to an own word.
pub fn store<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    program: &Arc<Program<'n>>,
) -> Outcome {
    let region = agent.region(program);
    let page = agent.page(region);
    let cuts = region.contents.cuts(page);
    let stored = region.store(cpu, page, agent.writer)?;
    conclude(agent, cpu, program.process.space(), (region, page, cuts), stored)
}

/// Loads an own word.
pub fn load<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    program: &Arc<Program<'n>>,
) -> Outcome {
    let region = agent.region(program);
    let page = agent.page(region);
    let cuts = region.contents.cuts(page);
    let loaded = region.load(cpu, page, agent.writer, Reader::Owner)?;
    conclude(agent, cpu, program.process.space(), (region, page, cuts), loaded)
}

/// Loads a word of another thread.
pub fn peep<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    program: &Arc<Program<'n>>,
) -> Outcome {
    let region = agent.region(program);
    let (page, writer) = (agent.page(region), agent.random.usize(0..cpus(agent.world)));
    let reader = if writer == agent.writer { Reader::Owner } else { Reader::Other };
    let cuts = region.contents.cuts(page);
    let loaded = region.load(cpu, page, writer, reader)?;
    conclude(agent, cpu, program.process.space(), (region, page, cuts), loaded)
}

/// The number of threads of a round.
pub fn cpus(world: &World<'_>) -> usize {
    world.plan.config.cpus
}

fn signal(addr: u64, error: FaultError) -> Signal {
    match error {
        FaultError::Segv { mapped } => Signal::Segv { addr, mapped },
        FaultError::Bus => Signal::Bus { addr },
        FaultError::OutOfMemory => Signal::OutOfMemory { addr },
    }
}

/// Loads the word of `writer` in the memory of any program, and checks it.
pub fn load_remotely(
    cpu: &NativeCpu<'_, '_>,
    program: &Program<'_>,
    region: &Region,
    page: usize,
    writer: usize,
    reader: Reader,
) -> Result<Reached<Look>, String> {
    let space = program.process.space();
    let loaded = region.access(cpu, page, |addr| {
        let look = region.contents.look(page, writer);
        let mut word = [0; 8];
        let read = space.read_bytes(cpu.cpu(), addr + 8 * writer as u64, &mut word);
        read.map_err(|refused| signal(addr, refused.error))?;
        Ok((look, u64::from_ne_bytes(word)))
    })?;
    Ok(match loaded {
        Reached::Done((look, found)) => {
            region.contents.judge(page, writer, look, found, reader)?;
            Reached::Done(look)
        }
        Reached::Missing => Reached::Missing,
        Reached::Forbidden => Reached::Forbidden,
        Reached::Signal(signal) => Reached::Signal(signal),
    })
}

/// Another program, or a child, most of the time.
fn other<'n>(agent: &mut Agent<'_, 'n>) -> Arc<Program<'n>> {
    let mut all = agent.world.everyone();
    all.swap_remove(agent.random.usize(0..all.len()))
}

/// Reads a word of the memory of another program.
pub fn read_remotely<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    _: &Arc<Program<'n>>,
) -> Outcome {
    let other = other(agent);
    let region = agent.region(&other);
    let (page, writer) = (agent.page(region), agent.random.usize(0..cpus(agent.world)));
    let reader = if writer == agent.writer { Reader::Owner } else { Reader::Other };
    let cuts = region.contents.cuts(page);
    let loaded = load_remotely(cpu, &other, region, page, writer, reader)?;
    conclude(agent, cpu, other.process.space(), (region, page, cuts), loaded)
}

/// Stores to an own word in the memory of another program.
pub fn write_remotely<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    _: &Arc<Program<'n>>,
) -> Outcome {
    let other = other(agent);
    let region = agent.region(&other);
    let (page, writer) = (agent.page(region), agent.writer);
    let cuts = region.contents.cuts(page);
    let attempt = region.contents.begin(page, writer);
    let space = other.process.space();
    let stored = region.access(cpu, page, |addr| {
        let bytes = attempt.value.to_ne_bytes();
        let written = space.write_bytes(cpu.cpu(), addr + 8 * writer as u64, &bytes);
        written.map_err(|refused| signal(addr, refused.error))
    })?;
    region.contents.finish(page, writer, attempt, stored == Reached::Done(()));
    conclude(agent, cpu, space, (region, page, cuts), stored)
}
