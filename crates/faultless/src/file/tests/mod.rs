//! Tests of objects and their stores, through whole spaces.

mod charges;
mod failing;
mod folios;
mod objects;
mod overwrites;
mod read_ahead;
mod stores;
