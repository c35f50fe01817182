//! The entry protocol, flushes and the reuse of frames, as an explicit state machine.
//!
//! The models under `--cfg loom` run the subsystem's own functions, one protocol at a time, under
//! every reordering of memory. This one runs none of them: it says in states and steps what they do
//! together — a fault without a lock, the MMU's walk and its TLB, a writer that unmaps and maps
//! again, the shootdown, the frame's way to its next owner — and visits every state that three CPUs
//! can reach. What the code rests on is a line here, too, with the same name
//! ([`faultless::Mutant`]): without it a law must break.
//!
//! [`protocol`] has the entry's machine, [`deferred`] that of flushes that wait while pages move,
//! leave memory and come back. A test checks each.

pub mod deferred;
pub mod protocol;
