//! Path resolution.

use super::inode::{Inode, Name, Target};
use super::path::{MAX_LINKS, NAME_MAX, PATH_MAX, Step};
use crate::errno::{Errno, Result};
use crate::task::ids::EXECUTE;
use faultless_collections::{Arc, Vec};

/// The start directories of walks.
#[derive(Clone, Debug)]
pub struct Start {
    /// The start of absolute paths; `..` does not lead out of this directory.
    pub root: Arc<Inode>,
    /// The start of relative paths.
    pub here: Arc<Inode>,
}

/// The treatment of symbolic links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Links {
    /// Follow all links.
    Follow,
    /// All except at the end of the path.
    KeepLast,
    /// Refuse all links: any link is an error.
    Refuse,
}

/// The result of a walk.
#[derive(Debug)]
pub struct Found {
    /// The directory that contains the last name.
    pub directory: Arc<Inode>,
    /// The last name; empty for the root, and maybe `.` or `..`.
    pub name: Name,
    /// The inode of the last name, if it exists.
    pub inode: Option<Arc<Inode>>,
    /// Set if the path ends in a slash, which requires a directory.
    pub slash: bool,
}

impl Found {
    /// The inode at the end of the path.
    ///
    /// # Errors
    /// `ENOENT`: it does not exist.
    pub fn existing(self) -> Result<Arc<Inode>> {
        self.inode.ok_or(Errno::ENOENT)
    }
}

/// Walks `path`, whose last name need not exist.
///
/// # Errors
/// `ENOENT`, `ENOTDIR`, `EACCES`, `ELOOP`, `ENAMETOOLONG`, `ENOMEM`.
pub fn walk(start: &Start, path: &[u8], links: Links) -> Result<Found> {
    if path.is_empty() {
        return Err(Errno::ENOENT);
    }
    let begin = |path: &[u8], here: Arc<Inode>| {
        if path[0] == b'/' { start.root.clone() } else { here }
    };
    let mut here = begin(path, start.here.clone());
    let mut path = Vec::try_from_slice(path)?;
    let mut followed = 0;
    let mut at = 0;
    loop {
        let Some(step) = Step::of(&path[at..]) else {
            let inode = Some(here.clone());
            return Ok(Found { directory: here, name: Name::default(), inode, slash: true });
        };
        if !here.is_directory() {
            return Err(Errno::ENOTDIR);
        }
        here.permit(EXECUTE)?;
        let (last, slash) = (step.is_last(), step.ends_in_slash());
        let next = match step.name {
            b"." => here.clone(),
            b".." if Arc::ptr_eq(&here, &start.root) => here.clone(),
            b".." => Inode::parent(&here)?,
            name if name.len() > NAME_MAX => return Err(Errno::ENAMETOOLONG),
            name => match here.lookup(name) {
                Ok(next) => next,
                Err(Errno::ENOENT) if last => {
                    let name = Vec::try_from_slice(name)?;
                    return Ok(Found { directory: here, name, inode: None, slash });
                }
                Err(errno) => return Err(errno),
            },
        };
        if next.is_link() && (!last || slash || links != Links::KeepLast) {
            followed += 1;
            if followed > MAX_LINKS || links == Links::Refuse {
                return Err(Errno::ELOOP);
            }
            match next.target()? {
                Target::Path(mut target) => {
                    if target.is_empty() {
                        return Err(Errno::ENOENT);
                    }
                    target.try_extend_from_slice(step.rest)?;
                    if target.len() > 2 * PATH_MAX {
                        return Err(Errno::ENAMETOOLONG);
                    }
                    here = begin(&target, here);
                    path = target;
                    at = 0;
                    continue;
                }
                Target::Inode(inode) if last => {
                    if slash && !inode.is_directory() {
                        return Err(Errno::ENOTDIR);
                    }
                    let name = Vec::try_from_slice(step.name)?;
                    return Ok(Found { directory: here, name, inode: Some(inode), slash });
                }
                Target::Inode(inode) => {
                    at = path.len() - step.rest.len();
                    here = inode;
                    continue;
                }
            }
        }
        if last {
            if slash && !next.is_directory() {
                return Err(Errno::ENOTDIR);
            }
            let name = Vec::try_from_slice(step.name)?;
            return Ok(Found { directory: here, name, inode: Some(next), slash });
        }
        at = path.len() - step.rest.len();
        here = next;
    }
}
