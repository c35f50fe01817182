//! Memory objects: the contents of mapped files and of shared memory, and the page cache.

mod ahead;
mod charge;
mod evict;
pub mod folio;
mod length;
mod life;
pub mod object;
mod overwrite;
pub mod pages;
mod read;
mod root;
mod store;
mod write_back;

#[cfg(all(test, not(loom)))]
pub(crate) mod tests;

pub(crate) use charge::Charge;
pub(crate) use folio::NoFolio;
pub use object::Object;
pub(crate) use object::Parts;
pub(crate) use read::{Fetched, Lack, Reach, Unread};
pub use read::{PendingRead, Reading};
#[cfg(all(test, not(loom)))]
pub(crate) use root::Top;
pub use store::{BackingStore, Buffer, MOST_PAGES, ReadRun, Store, StoreError, WriteRun};
pub use write_back::SeenErrors;
pub(crate) use write_back::{Laundry, Mark};
