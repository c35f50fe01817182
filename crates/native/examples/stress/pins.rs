//! Pins, and a device that uses the pinned pages.

use super::operations::{Agent, Did, Outcome};
use super::region::SLOTS;
use super::words::Reader;
use super::world::Program;
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};
use faultless::{FrameNumber, Machine, PAGE_SIZE, Pins};
use faultless_native::{NativeCpu, NativeMachine};
use std::sync::Arc;

/// A pinned page.
pub struct Held<'n> {
    pins: Pins<'n, NativeMachine>,
    region: usize,
    page: usize,
    /// The cuts of the page at the time of the pin, and the state of its hole.
    cuts: Option<u64>,
    hole: u64,
    write: bool,
}

/// Returns the word of `writer` in a frame, as a device accesses the frame.
fn device_word(machine: &NativeMachine, frame: FrameNumber, writer: usize) -> &AtomicU64 {
    let bytes = machine.frame_bytes(frame).cast::<AtomicU64>();
    // SAFETY: within a frame of the machine, aligned; other CPUs use atomic accesses as well.
    unsafe { &*bytes.add(writer) }
}

/// Pins a page.
pub fn pin<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    program: &Arc<Program<'n>>,
) -> Outcome {
    if agent.held.len() >= 4 || !Arc::ptr_eq(program, agent.program) {
        return Ok(Did::Nothing);
    }
    let number = agent.random.usize(0..program.regions.len());
    let region = &program.regions[number];
    let (page, write) = (agent.page(region), agent.random.bool());
    let (cuts, (hole, missing)) = (region.contents.cuts(page), region.hole(page));
    if cuts.is_none() || missing {
        return Ok(Did::Nothing);
    }
    let addr = region.addr(region.slot(page), page);
    let Ok(pins) = program.process.space().pin(cpu.cpu(), addr, PAGE_SIZE, write) else {
        return Ok(Did::Refused);
    };
    agent.held.push(Held { pins, region: number, page, cuts, hole, write });
    Ok(Did::All)
}

/// Compares a pinned page with the program's, and stores to it as a device.
pub fn use_pin<'n>(
    agent: &mut Agent<'_, 'n>,
    cpu: &NativeCpu<'_, 'n>,
    program: &Arc<Program<'n>>,
) -> Outcome {
    if agent.held.is_empty() || !Arc::ptr_eq(program, agent.program) {
        return Ok(Did::Nothing);
    }
    let number = agent.random.usize(0..agent.held.len());
    let Held { pins, region, page, cuts, hole, write } = &agent.held[number];
    let (region, page, frame) = (&program.regions[*region], *page, pins.frames()[0]);
    let is_same = || region.contents.cuts(page) == *cuts && region.hole(page).0 == *hole;
    if !is_same() {
        drop(agent.held.swap_remove(number));
        return Ok(Did::Nothing);
    }
    for slot in 0..SLOTS {
        let found = program.process.space().page_at(cpu.cpu(), region.addr(slot, page));
        let other = found.filter(|found| found.frame != frame);
        if let Some(other) = other
            && is_same()
        {
            return Err(format!("pinned page {page} is in {:?}, not {frame:?}", other.frame));
        }
    }
    let word = device_word(agent.world.native.machine(), frame, agent.writer);
    let look = region.contents.look(page, agent.writer);
    let found = word.load(SeqCst);
    if is_same() {
        region
            .contents
            .judge(page, agent.writer, look, found, Reader::Owner)
            .map_err(|wrong| format!("a device finds: {wrong}"))?;
    }
    if *write {
        let attempt = region.contents.begin(page, agent.writer);
        let here = attempt.cuts == *cuts;
        if here {
            word.store(attempt.value, SeqCst);
            if let Some(file) = region.file().filter(|_| !region.is_private()) {
                let object = &agent.world.files[file].object;
                object.note_stored(cpu.cpu(), page as u64..page as u64 + 1);
            }
        }
        region.contents.finish(page, agent.writer, attempt, here);
    }
    Ok(Did::All)
}

/// Unpins a page.
pub fn unpin<'n>(
    agent: &mut Agent<'_, 'n>,
    _: &NativeCpu<'_, 'n>,
    _: &Arc<Program<'n>>,
) -> Outcome {
    Ok(if agent.held.pop().is_some() { Did::All } else { Did::Nothing })
}
