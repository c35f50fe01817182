//! Kernel calls on files mapped by programs.

use super::accesses::cpus;
use super::operations::{Agent, Did, Outcome};
use super::words::Reader;
use super::world::{File, Program, World};
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
use faultless::{Errno, PAGE_SIZE, PrivateCopies};
use faultless_native::NativeCpu;
use std::ops::Range;
use std::sync::Arc;

/// A file.
fn file<'w>(agent: &mut Agent<'w, '_>) -> Option<&'w File> {
    let files = &agent.world.files;
    (!files.is_empty()).then(|| &files[agent.random.usize(0..files.len())])
}

/// Some pages of a file.
fn pages(agent: &mut Agent<'_, '_>, file: &File) -> Range<u64> {
    let len = file.contents.len() as u64;
    let first = agent.random.u64(0..len);
    first..first + agent.random.u64(1..=len - first)
}

/// Drops the pages of `range` from all mappings.
fn revoke(
    world: &World<'_>,
    cpu: &NativeCpu<'_, '_>,
    file: &File,
    range: &Range<u64>,
    copies: PrivateCopies,
) {
    for program in world.everyone() {
        program.process.space().revoke(cpu.cpu(), &file.object, range.clone(), copies);
    }
}

/// Writes pages back.
pub fn write_back<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    _: &Arc<Program<'n>>,
) -> Outcome {
    let Some(file) = file(agent) else { return Ok(Did::Nothing) };
    let Some(_inside) = agent.world.gate.visit() else { return Ok(Did::Nothing) };
    let (range, everyone) = (pages(agent, file), agent.world.everyone());
    let written = file.object.write_back(cpu.cpu(), range, |pages| {
        for program in &everyone {
            program.process.space().write_protect(cpu.cpu(), &file.object, pages.clone());
        }
    });
    match written {
        Ok(_) => Ok(Did::All),
        Err(_) if file.device.is_some() => Ok(Did::Refused),
        Err(errno) => Err(format!("write-back to a store that works: {errno:?}")),
    }
}

/// Makes a file durable.
pub fn sync<'n>(agent: &mut Agent<'_, 'n>, _: &NativeCpu<'_, 'n>, _: &Arc<Program<'n>>) -> Outcome {
    let Some(file) = file(agent) else { return Ok(Did::Nothing) };
    Ok(if file.object.sync().is_ok() { Did::All } else { Did::Refused })
}

/// Drops clean, unmapped pages.
pub fn drop_clean<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    _: &Arc<Program<'n>>,
) -> Outcome {
    let Some(file) = file(agent) else { return Ok(Did::Nothing) };
    let range = pages(agent, file);
    file.object.drop_clean(cpu.cpu(), range);
    Ok(Did::All)
}

/// Evicts pages of a file.
pub fn evict<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    _: &Arc<Program<'n>>,
) -> Outcome {
    let Some(file) = file(agent) else { return Ok(Did::Nothing) };
    let range = pages(agent, file);
    file.object.evict(cpu.cpu(), range);
    Ok(Did::All)
}

fn set_len(cpu: &NativeCpu<'_, '_>, file: &File, pages: u64) -> Result<(), Errno> {
    file.object.set_len(cpu.cpu(), pages * PAGE_SIZE)
}

/// Shortens a file. The pages stay cut until the file is extended.
pub fn cut<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    _: &Arc<Program<'n>>,
) -> Outcome {
    let Some(file) = file(agent) else { return Ok(Did::Nothing) };
    let Some(_inside) = agent.world.gate.visit() else { return Ok(Did::Nothing) };
    let Ok(_cutter) = file.cutter.try_lock() else { return Ok(Did::Nothing) };
    let present = file.object.pages();
    if present == 0 {
        return Ok(Did::Nothing);
    }
    let end = agent.random.u64(0..present);
    let gone = end as usize..present as usize;
    file.contents.begin_cut(gone.clone());
    let dead = file.contents.bury(gone.clone());
    if set_len(cpu, file, end).is_err() {
        file.contents.exhume(gone.clone(), dead);
        file.contents.end_cut_as_it_was(gone);
        return match &file.device {
            Some(_) => Ok(Did::Refused),
            None => Err("a file cannot be shortened".to_owned()),
        };
    }
    let everything = end..file.contents.len() as u64;
    revoke(agent.world, cpu, file, &everything, PrivateCopies::Drop);
    Ok(Did::All)
}

/// Extends a truncated file.
pub fn extend<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    _: &Arc<Program<'n>>,
) -> Outcome {
    let Some(file) = file(agent) else { return Ok(Did::Nothing) };
    let Ok(_cutter) = file.cutter.try_lock() else { return Ok(Did::Nothing) };
    let (present, len) = (file.object.pages(), file.contents.len());
    if present == len as u64 {
        return Ok(Did::Nothing);
    }
    if set_len(cpu, file, len as u64).is_err() {
        return match &file.device {
            Some(_) => Ok(Did::Refused),
            None => Err("a file cannot be extended".to_owned()),
        };
    }
    file.contents.end_cut(present as usize..len);
    Ok(Did::All)
}

/// Punches a hole into a file.
pub fn punch<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    _: &Arc<Program<'n>>,
) -> Outcome {
    let Some(file) = file(agent) else { return Ok(Did::Nothing) };
    let Some(_inside) = agent.world.gate.visit() else { return Ok(Did::Nothing) };
    let Ok(_cutter) = file.cutter.try_lock() else { return Ok(Did::Nothing) };
    let mut range = pages(agent, file);
    range.end = range.end.min(file.object.pages());
    if range.is_empty() {
        return Ok(Did::Nothing);
    }
    let gone = range.start as usize..range.end as usize;
    file.contents.begin_cut(gone.clone());
    let dead = file.contents.bury(gone.clone());
    if file.object.punch(cpu.cpu(), range.clone()).is_err() {
        file.contents.exhume(gone.clone(), dead);
        file.contents.end_cut_as_it_was(gone);
        return match &file.device {
            Some(_) => Ok(Did::Refused),
            None => Err("a file cannot have a hole".to_owned()),
        };
    }
    revoke(agent.world, cpu, file, &range, PrivateCopies::Keep);
    file.contents.end_cut(gone);
    Ok(Did::All)
}

/// Repeats `call` while it needs a page during another CPU's read.
fn once_read<R>(
    cpu: &NativeCpu<'_, '_>,
    mut call: impl FnMut() -> Result<R, Errno>,
) -> Result<R, Errno> {
    loop {
        match call() {
            Err(Errno::EAGAIN) => cpu.cpu().await_read()?,
            result => return result,
        }
        cpu.poll();
    }
}

/// The word of `writer` in page `page` of a file, as a call of the kernel reads it.
pub fn word(cpu: &NativeCpu<'_, '_>, file: &File, page: u64, writer: usize) -> Result<u64, Errno> {
    let load = |bytes: Option<*const u8>| {
        bytes.map_or(0, |bytes| {
            // SAFETY: within a lent page, aligned; other CPUs use atomic accesses as well.
            unsafe { &*bytes.cast::<AtomicU64>().add(writer) }.load(SeqCst)
        })
    };
    once_read(cpu, || file.object.read_page(cpu.cpu(), page, load))
}

/// Reads a word of a file by a call of the kernel.
pub fn read<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    _: &Arc<Program<'n>>,
) -> Outcome {
    let Some(file) = file(agent) else { return Ok(Did::Nothing) };
    let page = agent.random.usize(0..file.contents.len());
    let writer = agent.random.usize(0..cpus(agent.world));
    let reader = if writer == agent.writer { Reader::Owner } else { Reader::Other };
    let look = file.contents.look(page, writer);
    match word(cpu, file, page as u64, writer) {
        Ok(found) => {
            file.contents.judge(page, writer, look, found, reader)?;
            Ok(Did::All)
        }
        Err(Errno::ENOMEM) => Ok(Did::Refused),
        Err(_) if file.device.is_some() => Ok(Did::Refused),
        Err(errno) => Err(format!("page {page} of a file cannot be read: {errno:?}")),
    }
}

/// Writes an own word of a file by a call of the kernel.
pub fn write<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    _: &Arc<Program<'n>>,
) -> Outcome {
    let Some(file) = file(agent) else { return Ok(Did::Nothing) };
    let (page, writer) = (agent.random.usize(0..file.contents.len()), agent.writer);
    let look = file.contents.look(page, writer);
    let attempt = file.contents.begin(page, writer);
    let store = |bytes: *mut u8| {
        // SAFETY: within a lent page, aligned; other CPUs use atomic accesses as well.
        unsafe { &*bytes.cast::<AtomicU64>().add(writer) }.store(attempt.value, SeqCst);
    };
    let written = once_read(cpu, || file.object.write_page(cpu.cpu(), page as u64, store));
    file.contents.finish(page, writer, attempt, written.is_ok());
    match written {
        Ok(()) => Ok(Did::All),
        Err(Errno::ENOMEM) => Ok(Did::Refused),
        Err(Errno::EFBIG) if !file.contents.is_stable(page, look) => Ok(Did::Refused),
        Err(_) if file.device.is_some() => Ok(Did::Refused),
        Err(errno) => Err(format!("page {page} of a file cannot be written: {errno:?}")),
    }
}
