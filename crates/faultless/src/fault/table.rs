//! Publishes a missing table in the fault that needs it, by the same protocol and the same
//! validation as a page.

use crate::fault::prepared::Prepared;
use crate::fault::ticket::{Abort, Ticket};
use crate::frame::Use;
use crate::machine::Machine;
use crate::stat::Counter;
use crate::sync::atomic::AtomicU64;
use crate::sync::mutant::{Mutant, lost};
use crate::table::Entry;
use crate::table::protocol;
use crate::vm::Cpu;

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
    let frame = prepared.zeroed_seldom(cpu).ok_or(Abort::NoMemory)?;
    let Ok(held) = protocol::take(slot, Entry::NONE, cpu) else {
        cpu.count(Counter::TrylockFailed);
        prepared.keep_zeroed(frame);
        return Ok(());
    };
    if !ticket.is_valid() && !lost(Mutant::TableValidated) {
        held.revert();
        prepared.keep_zeroed(frame);
        return Err(Abort::VmaChanged);
    }
    let number = cpu.vm().frames.publish(frame, Use::Table, 0, u64::from(level - 1));
    held.commit(Entry::table(number));
    cpu.count(Counter::TablePublished);
    Ok(())
}
