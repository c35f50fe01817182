//! The entry protocol, flushes and the reuse of frames, as an explicit state machine.
//!
//! The models under `--cfg loom` run the subsystem's own functions, one protocol at a time, under
//! every reordering of memory. This model runs none of these functions. It describes in states and
//! steps how the protocols work together — a fault without a lock, the MMU's walk and its TLB, a
//! writer that unmaps and maps again, the shootdown, the frame's way to its next owner — and visits
//! every state that three CPUs can reach. Each step on which the code rests is also a step here,
//! with the same name ([`faultless::Mutant`]): without the step a law must break.
//!
//! [`protocol`] contains the entry's machine, [`deferred`] the machine of flushes that wait while
//! pages move, are evicted and come back. [`leaves`] contains the machine of writers that edit one
//! VMA tree in place, a protocol that precedes its code; its steps are named by [`leaves::Rule`]. A
//! test checks each machine.
//!
//! [`explore`] also finds states in which a CPU waits for ever.

pub mod deferred;
pub mod explore;
pub mod leaves;
pub mod protocol;
