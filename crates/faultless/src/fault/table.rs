//! Faults that find no last-level table: publishes the missing tables, with the same protocol and
//! validation as a page, or serves the fault with a huge leaf.

use super::{Access, Attempt, FaultKind};
use crate::fault::prepared::Prepared;
use crate::fault::ticket::{Abort, Ticket};
use crate::frame::FrameUse;
use crate::machine::Machine;
use crate::space::Space;
use crate::space::vma::Vma;
use crate::stat::Counter;
use crate::sync::atomic::AtomicU64;
use crate::sync::mutant::{Mutant, lost};
use crate::table::Entry;
use crate::table::node::{self, ENTRIES, HUGE};
use crate::table::protocol;
use crate::table::walk::{Reached, descend};
use crate::vm::Cpu;

/// How a fault that found no table continues.
pub(super) enum Way<'v> {
    /// In this table, which exists now.
    Table(&'v [AtomicU64; ENTRIES]),
    /// A huge leaf served the fault.
    Served(FaultKind),
}

/// Returns the last-level table of `page`, or the result of the fault if a huge leaf serves it.
/// Publishes missing tables. The caller is an attempt in its grace section. The function receives
/// the fields of the attempt separately, so that they stay in registers on the common path.
#[cold]
#[inline(never)]
pub(super) fn way_of<'v, M: Machine>(
    cpu: &Cpu<'v, M>,
    space: &Space<M>,
    vma: &Vma,
    ticket: Ticket<'_>,
    page: u64,
    access: Access,
    prepared: &mut Prepared,
) -> Result<Way<'v>, Abort> {
    loop {
        // SAFETY: the attempt runs in a grace section, which outlives the reference.
        let (slot, level, seen) = match unsafe { descend(cpu.vm().machine(), space.root(), page) } {
            Reached::Last(table) => return Ok(Way::Table(table)),
            Reached::Above { slot, level, seen } => (slot, level, seen),
        };
        if seen.is_locked() {
            protocol::wait_and_load(slot, cpu);
            continue;
        }
        if level == HUGE && !vma.memory().is_anonymous() {
            let attempt = Attempt { cpu, space, vma, ticket, page, access, ahead: None };
            if let Some(kind) = attempt.serve_huge(slot, seen)? {
                return Ok(Way::Served(kind));
            }
            if !node::load(slot).is_none() {
                continue;
            }
        }
        publish(cpu, ticket, slot, level, prepared)?;
    }
}

/// Publishes an empty table into `slot`, an entry of a table of `level` which was empty when read.
/// Also returns `Ok` if another CPU was faster: the caller must walk the tables again.
///
/// The table belongs to the ticket's VMA. The table was linked while the ticket was valid, so a
/// later operation that unmaps the VMA finds it.
///
/// # Errors
/// [`Abort::VmaChanged`] if the ticket is not valid; [`Abort::NoMemory`].
#[inline(always)]
pub(crate) fn publish<M: Machine>(
    cpu: &Cpu<'_, M>,
    ticket: Ticket<'_>,
    slot: &AtomicU64,
    level: u32,
    prepared: &mut Prepared,
) -> Result<(), Abort> {
    let frame = prepared.table(cpu).ok_or(Abort::NoMemory)?;
    let Ok(held) = protocol::take(slot, Entry::NONE, cpu) else {
        cpu.count(Counter::TrylockFailed);
        prepared.keep_table(frame, cpu);
        return Ok(());
    };
    if !ticket.is_valid() && !lost(Mutant::TableValidated) {
        held.revert();
        prepared.keep_table(frame, cpu);
        return Err(Abort::VmaChanged);
    }
    let number = cpu.vm().frames.publish(frame, FrameUse::Table, 0, u64::from(level - 1));
    held.commit(Entry::table(number));
    cpu.count(Counter::TablePublished);
    Ok(())
}
