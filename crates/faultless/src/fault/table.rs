//! A fault that finds no last-level table: it publishes the missing tables, by the same protocol and the same
//! validation as a page, or a huge leaf serves it.

use super::{Access, Attempt, FaultKind};
use crate::fault::prepared::Prepared;
use crate::fault::ticket::{Abort, Ticket};
use crate::frame::Use;
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

/// How a fault goes on that found no table.
pub(super) enum Way<'v> {
    /// In this one, by now.
    Table(&'v [AtomicU64; ENTRIES]),
    /// By a huge leaf.
    Served(FaultKind),
}

/// The last-level table of `page`, or the answer where a huge leaf is there, or is to be there. Publishes the tables that are missing. For
/// an attempt, in its grace section; it takes its parts, so that these stay in registers on the way that most faults go.
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
        // SAFETY: the attempt runs in a grace section, which outlives it.
        let (slot, level, seen) = match unsafe { descend(cpu.vm().machine(), space.root(), page) } {
            Reached::Last(table) => return Ok(Way::Table(table)),
            Reached::Above { slot, level, seen } => (slot, level, seen),
        };
        if seen.is_locked() {
            protocol::look(slot, cpu);
            continue;
        }
        if level == HUGE && !vma.area.memory.is_anonymous() {
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

/// Publishes an empty table into `slot`, an entry of a table of `level` that was seen to be none.
/// Returns `Ok` too when another CPU was faster: the walk is to be taken again.
///
/// The table belongs to the ticket's VMA. An operation that unmaps the VMA later meets the table,
/// because the table was linked while the ticket was valid.
///
/// # Errors
/// [`Abort::VmaChanged`] when the ticket is not valid; [`Abort::NoMemory`].
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
    let number = cpu.vm().frames.publish(frame, Use::Table, 0, u64::from(level - 1));
    held.commit(Entry::table(number));
    cpu.count(Counter::TablePublished);
    Ok(())
}
