//! The parts of a file that `mmap` maps.

use super::device::Device;
use super::file::{File, Kind};
use super::inode::Body;
use super::regular::{AboutToMap, Held, Regular};
use crate::errno::{Errno, Result};
use faultless::{Backing, MapFlags, Object, Prot, Shared};
use faultless_bare::percpu;

/// The memory that a mapping of a file refers to.
#[derive(Debug)]
pub struct Mapping {
    object: Held,
    may_write: bool,
    /// Held until the mapping exists.
    _about: Option<AboutToMap>,
}

impl Mapping {
    /// The backing from page `first` on.
    pub fn starting_at(&self, first: u64) -> Backing<'_> {
        Backing { object: &self.object, first, may_write: self.may_write }
    }
}

/// Returns the memory for a mapping of `file`.
///
/// # Errors
/// `EBADF`, `EACCES`, `EPERM`: the file is sealed; `ENODEV`: the file cannot be mapped; `ENOMEM`.
pub fn object_to_map(file: &File, prot: Prot, flags: MapFlags) -> Result<Mapping> {
    if let Kind::Path = file.kind {
        return Err(Errno::EBADF);
    }
    let shared = flags.contains(MapFlags::SHARED);
    if !file.reads() || shared && prot.contains(Prot::WRITE) && !file.writes() {
        return Err(Errno::EACCES);
    }
    match &file.inode.body {
        Body::Regular(regular) => {
            // Not for other mappings, which must not make `F_ADD_SEALS` fail.
            let stores = shared && file.writes();
            let about = match stores.then(|| Regular::map_writable(&file.inode)) {
                Some(Err(errno)) if prot.contains(Prot::WRITE) => return Err(errno),
                about => about.and_then(Result::ok),
            };
            let may_write =
                if shared { about.is_some() } else { file.writes() && !regular.forbids_stores() };
            let object: Shared<Object> = regular.map().clone();
            Ok(Mapping { object: Held::new(object), may_write, _about: about })
        }
        Body::Device(Device::Zero) => {
            let object = Object::try_new(percpu::cpu(), Object::MAX_PAGES, 0)?;
            Ok(Mapping { object: Held::new(object), may_write: file.writes(), _about: None })
        }
        _ => Err(Errno::ENODEV),
    }
}
