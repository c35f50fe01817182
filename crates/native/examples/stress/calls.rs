//! Calls of programs on their memory.

use super::accesses::load_remotely;
use super::operations::{Agent, Did, Outcome};
use super::region::{Reached, SLOTS};
use super::words::{Contents, Reader};
use super::world::{Program, locked};
use faultless::{Advice, Errno, MemPolicy, MemoryLock, PAGE_SIZE, Prot, RemapFlags};
use faultless_native::NativeCpu;
use std::sync::Arc;

const FIXED: RemapFlags = RemapFlags::MAYMOVE.union(RemapFlags::FIXED);

/// Moves pages to another slot, while other threads use the pages.
pub fn move_pages<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    program: &Arc<Program<'n>>,
) -> Outcome {
    let region = agent.region(program);
    let Some(mover) = region.mover() else { return Ok(Did::Nothing) };
    let most = if agent.random.bool() { 4 } else { region.len() };
    let (page, space) = (agent.page(region), program.process.space());
    let most = 1 + agent.random.usize(0..most);
    let Some((slot, pages)) = mover.run(cpu.cpu(), space, page, most)? else {
        return Ok(Did::Nothing);
    };
    let target = (slot + agent.random.usize(1..SLOTS)) % SLOTS;
    let (old, new) = (region.range(slot, &pages), region.range(target, &pages));
    let moved = mover.moving(cpu.cpu(), space, pages, || {
        cpu.mremap(old.start, old.len(), old.len(), FIXED, new.start)
    })?;
    Ok(moved.map(drop).into())
}

/// Moves all pages to one slot.
pub fn gather<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    program: &Arc<Program<'n>>,
) -> Outcome {
    let region = agent.region(program);
    let Some(mover) = region.mover() else { return Ok(Did::Nothing) };
    let (target, space) = (agent.random.usize(0..SLOTS), program.process.space());
    let (mut page, mut did) = (0, Did::Nothing);
    while page < region.len() {
        let run = mover.run(cpu.cpu(), space, page, region.len())?;
        page = run.as_ref().map_or(page + 1, |(_, pages)| pages.end);
        let Some((slot, pages)) = run.filter(|(slot, _)| *slot != target) else { continue };
        let (old, new) = (region.range(slot, &pages), region.range(target, &pages));
        let moved = mover.moving(cpu.cpu(), space, pages, || {
            cpu.mremap(old.start, old.len(), old.len(), FIXED, new.start)
        })?;
        did = moved.map(drop).into();
    }
    Ok(did)
}

/// Moves pages to another slot, and unmaps the old place afterwards.
pub fn keep_and_move<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    program: &Arc<Program<'n>>,
) -> Outcome {
    let region = agent.region(program);
    // Stores to the old place of a private page are lost, so this counts as a cut.
    if !region.is_private() {
        return Ok(Did::Nothing);
    }
    let Some(mover) = region.mover() else { return Ok(Did::Nothing) };
    let (page, space) = (agent.page(region), program.process.space());
    let Some((slot, pages)) = mover.run(cpu.cpu(), space, page, 16)? else {
        return Ok(Did::Nothing);
    };
    let target = (slot + agent.random.usize(1..SLOTS)) % SLOTS;
    let (old, new) = (region.range(slot, &pages), region.range(target, &pages));
    region.toggle_holes(pages.clone());
    region.contents.begin_cut(pages.clone());
    let moved = mover.moving(cpu.cpu(), space, 0..0, || {
        let flags = FIXED | RemapFlags::DONTUNMAP;
        let moved = cpu.mremap(old.start, old.len(), old.len(), flags, new.start);
        if moved.is_ok() {
            cpu.munmap(old.start, old.len())?;
        }
        moved
    })?;
    region.contents.end_cut_as_it_was(pages.clone());
    // After a failed call, some pages may be in two slots. These are holes until they are mapped
    // again.
    if moved.is_ok() {
        for page in pages.clone() {
            mover.locate(cpu.cpu(), space, page)?;
        }
        region.toggle_holes(pages);
    }
    Ok(moved.map(drop).into())
}

/// Unmaps pages.
pub fn unmap<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    program: &Arc<Program<'n>>,
) -> Outcome {
    let region = agent.region(program);
    let Some(mover) = region.mover() else { return Ok(Did::Nothing) };
    let (page, space) = (agent.page(region), program.process.space());
    let most = 1 + agent.random.usize(0..12);
    let Some((slot, pages)) = mover.run(cpu.cpu(), space, page, most)? else {
        return Ok(Did::Nothing);
    };
    let range = region.range(slot, &pages);
    region.toggle_holes(pages.clone());
    let call = || cpu.munmap(range.start, range.len());
    let unmapped = match region.is_private() {
        true => region.contents.cut(pages.clone(), call),
        false => call(),
    };
    if unmapped.is_err() {
        region.toggle_holes(pages);
    }
    Ok(unmapped.into())
}

/// Maps unmapped pages.
pub fn map<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    program: &Arc<Program<'n>>,
) -> Outcome {
    let region = agent.region(program);
    let Some(mover) = region.mover() else { return Ok(Did::Nothing) };
    let Some(first) = (0..region.len()).find(|&page| region.hole(page).1) else {
        return Ok(Did::Nothing);
    };
    let end = (first..region.len()).find(|&page| !region.hole(page).1).unwrap_or(region.len());
    let (pages, space) = (first..end, program.process.space());
    let slot = agent.random.usize(0..SLOTS);
    // A page of a child may be there.
    let clear = || mover.clear(cpu.cpu(), space, &pages);
    let cleared = match region.is_private() {
        true => region.contents.cut(pages.clone(), clear),
        false => clear(),
    };
    if cleared.is_err() {
        return Ok(Did::Refused);
    }
    let mapped = mover.map(cpu.cpu(), space, &agent.world.files, slot, &pages);
    if mapped.is_ok() {
        region.toggle_holes(pages);
    }
    Ok(mapped.into())
}

/// Unmaps the end of a range of pages by `mremap`.
pub fn shrink<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    program: &Arc<Program<'n>>,
) -> Outcome {
    let region = agent.region(program);
    let Some(mover) = region.mover() else { return Ok(Did::Nothing) };
    let (page, space) = (agent.page(region), program.process.space());
    let Some((slot, pages)) = mover.run(cpu.cpu(), space, page, 12)? else {
        return Ok(Did::Nothing);
    };
    if pages.len() < 2 {
        return Ok(Did::Nothing);
    }
    let kept = agent.random.usize(1..pages.len());
    let (old, gone) = (region.range(slot, &pages), pages.start + kept..pages.end);
    region.toggle_holes(gone.clone());
    let new_len = kept as u64 * PAGE_SIZE;
    let call = || cpu.mremap(old.start, old.len(), new_len, RemapFlags::empty(), 0).map(drop);
    let shrunk = match region.is_private() {
        true => region.contents.cut(gone.clone(), call),
        false => call(),
    };
    if shrunk.is_err() {
        region.toggle_holes(gone);
    }
    Ok(shrunk.into())
}

/// Maps unmapped pages behind a page by `mremap`.
pub fn grow<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    program: &Arc<Program<'n>>,
) -> Outcome {
    let region = agent.region(program);
    let Some(mover) = region.mover() else { return Ok(Did::Nothing) };
    let is_end = |page: &usize| !region.hole(*page).1 && region.hole(page + 1).1;
    let Some(last) = (0..region.len() - 1).find(is_end) else { return Ok(Did::Nothing) };
    let end = (last + 1..region.len()).find(|&page| !region.hole(page).1);
    let (pages, space) = (last + 1..end.unwrap_or(region.len()), program.process.space());
    let clear = || mover.clear(cpu.cpu(), space, &pages);
    let cleared = match region.is_private() {
        true => region.contents.cut(pages.clone(), clear),
        false => clear(),
    };
    let located = mover.locate(cpu.cpu(), space, last)?;
    let (Ok(()), Some(slot)) = (cleared, located) else { return Ok(Did::Refused) };
    let old = region.range(slot, &(last..last + 1));
    let new_len = PAGE_SIZE * (1 + pages.len() as u64);
    let grown = cpu.mremap(old.start, PAGE_SIZE, new_len, RemapFlags::empty(), 0);
    if grown.is_ok() {
        for page in pages.clone() {
            mover.locate(cpu.cpu(), space, page)?;
        }
        region.toggle_holes(pages);
    }
    Ok(grown.map(drop).into())
}

/// Drops pages by `MADV_DONTNEED`.
pub fn discard<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    program: &Arc<Program<'n>>,
) -> Outcome {
    let region = agent.region(program);
    let Some(mover) = region.mover() else { return Ok(Did::Nothing) };
    let (page, space) = (agent.page(region), program.process.space());
    let most = 1 + agent.random.usize(0..24);
    let Some((slot, pages)) = mover.run(cpu.cpu(), space, page, most)? else {
        return Ok(Did::Nothing);
    };
    let range = region.range(slot, &pages);
    // Locked memory is refused, after the VMAs in front of it were discarded.
    let call = || cpu.madvise(range.start, range.len(), Advice::DontNeedLocked);
    let discarded = match region.is_private() {
        true => region.contents.cut(pages, call),
        false => call(),
    };
    Ok(discarded.into())
}

/// Gives pages up by `MADV_FREE`.
pub fn free_lazily<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    program: &Arc<Program<'n>>,
) -> Outcome {
    let region = agent.region(program);
    if region.file().is_some() {
        return Ok(Did::Nothing);
    }
    let Some(mover) = region.mover() else { return Ok(Did::Nothing) };
    let (page, space) = (agent.page(region), program.process.space());
    let Some((slot, pages)) = mover.run(cpu.cpu(), space, page, 16)? else {
        return Ok(Did::Nothing);
    };
    let range = region.range(slot, &pages);
    let call = || cpu.madvise(range.start, range.len(), Advice::Free);
    Ok(region.contents.loosen(pages, call).into())
}

/// Forbids stores or all accesses, and allows them again.
pub fn protect<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    program: &Arc<Program<'n>>,
) -> Outcome {
    let region = agent.region(program);
    let (at, len) = agent.stretch(region, 32);
    let less = [Prot::READ, Prot::READ, Prot::empty()][agent.random.usize(0..3)];
    let first = cpu.mprotect(at, len, less);
    let second = cpu.mprotect(at, len, Prot::RW);
    Ok(first.and(second).into())
}

/// Gives advice without an effect on contents.
pub fn advise<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    program: &Arc<Program<'n>>,
) -> Outcome {
    let region = agent.region(program);
    let (at, len) = agent.stretch(region, 32);
    let advice = [
        Advice::PageOut,
        Advice::PageOut,
        Advice::PageOut,
        Advice::Cold,
        Advice::Cold,
        Advice::WillNeed,
        Advice::WillNeed,
        Advice::PopulateRead,
        Advice::PopulateWrite,
        Advice::Normal,
        Advice::Random,
        Advice::Sequential,
        Advice::HugePage,
        Advice::NoHugePage,
    ];
    let advice = advice[agent.random.usize(0..advice.len())];
    Ok(cpu.madvise(at, len, advice).into())
}

/// Evicts pages, including pages mapped by other processes.
pub fn evict<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    program: &Arc<Program<'n>>,
) -> Outcome {
    let region = agent.region(program);
    let (at, len) = agent.stretch(region, 64);
    Ok(program.process.space().evict(cpu.cpu(), at, len).into())
}

/// Sets the memory policy of pages.
pub fn bind<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    program: &Arc<Program<'n>>,
) -> Outcome {
    let region = agent.region(program);
    let (at, len) = agent.stretch(region, 64);
    let nodes = cpu.cpu().memory_nodes();
    let policies = [
        MemPolicy::Default,
        MemPolicy::Local,
        MemPolicy::Preferred(nodes),
        MemPolicy::Interleave(nodes),
    ];
    let policy = policies[agent.random.usize(0..policies.len())];
    Ok(program.process.space().mbind(cpu.cpu(), at, len, policy).into())
}

/// Locks a few pages and unlocks them.
pub fn lock<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    program: &Arc<Program<'n>>,
) -> Outcome {
    let region = agent.region(program);
    let (at, len) = agent.stretch(region, 4);
    let space = program.process.space();
    let kind = if agent.random.bool() { MemoryLock::Now } else { MemoryLock::OnFault };
    let locked = space.mlock(cpu.cpu(), at, len, kind);
    let _ = cpu.load::<u64>(at);
    let unlocked = space.mlock(cpu.cpu(), at, len, MemoryLock::No);
    Ok(locked.and(unlocked).into())
}

/// Lists the memory of the program.
pub fn list<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    program: &Arc<Program<'n>>,
) -> Outcome {
    let region = agent.region(program);
    let (at, len) = agent.stretch(region, 32);
    let space = program.process.space();
    if space.maps(cpu.cpu()).to_string().is_empty() && !region.hole(0).1 {
        return Err("a program without an area".to_owned());
    }
    let mut pages = 0;
    let listed = cpu.mincore(at, len, |_| pages += 1);
    if listed.is_ok() && pages != len / PAGE_SIZE {
        return Err(format!("mincore reports {pages} pages of {}", len / PAGE_SIZE));
    }
    let addresses: Vec<_> = (0..len / PAGE_SIZE).map(|page| at + page * PAGE_SIZE).collect();
    let mut nodes = vec![Err(Errno::ENOENT); addresses.len()];
    space.page_nodes(cpu.cpu(), &addresses, &mut nodes);
    let most = agent.world.plan.config.nodes as u8;
    match nodes.iter().find(|node| node.is_ok_and(|node| node > most)) {
        Some(node) => Err(format!("a page is on {node:?}")),
        None => Ok(Did::All),
    }
}

/// Forks the program. The child ends at once, or other threads use the child later.
pub fn fork<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    program: &Arc<Program<'n>>,
) -> Outcome {
    let world = agent.world;
    let Some(_inside) = world.gate.fork() else { return Ok(Did::Nothing) };
    let before: Vec<_> = program
        .regions
        .iter()
        .map(|region| (region.holes(), region.contents.before_fork()))
        .collect();
    let Ok(process) = cpu.fork() else { return Ok(Did::Refused) };
    let tag = world.tag();
    let child = |(region, (holes, looks)): (&super::region::Region, (Vec<u64>, Vec<_>))| {
        let contents = match region.is_private() {
            true => Arc::new(Contents::child(&region.contents, tag, &looks)),
            false => region.contents.clone(),
        };
        let there = holes.into_iter().zip(region.holes());
        region.child(contents, there.map(|(before, now)| before == now && now % 2 == 0))
    };
    let regions = program.regions.iter().zip(before).map(child).collect();
    let child = Program { process, regions };
    for _ in 0..4 {
        let region = agent.region(&child);
        let (page, writer) = (agent.page(region), agent.random.usize(0..world.plan.config.cpus));
        let cuts = region.contents.cuts(page);
        let found = load_remotely(cpu, &child, region, page, writer, Reader::Other)
            .map_err(|wrong| format!("in a new child: {wrong}"))?;
        if let Reached::Signal(signal) = found {
            world.permit(region, page, cuts, signal)?;
        }
    }
    let mut children = locked(&world.children);
    if children.len() < world.plan.children && agent.random.u32(0..4) != 0 {
        children.push(Arc::new(child));
    } else {
        drop(children);
        cpu.exit(child.process);
    }
    Ok(Did::All)
}

/// Ends an unused child.
pub fn end_child<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    program: &Arc<Program<'n>>,
) -> Outcome {
    let world = agent.world;
    let Some(_inside) = world.gate.fork() else { return Ok(Did::Nothing) };
    let mut children = locked(&world.children);
    if children.is_empty() {
        return Ok(Did::Nothing);
    }
    let number = agent.random.usize(0..children.len());
    if Arc::ptr_eq(&children[number], program) {
        return Ok(Did::Nothing);
    }
    let child = children.swap_remove(number);
    match Arc::try_unwrap(child) {
        Ok(child) => {
            drop(children);
            cpu.exit(child.process);
            Ok(Did::All)
        }
        Err(child) => {
            children.push(child);
            Ok(Did::Nothing)
        }
    }
}
