//! Path resolution.

use super::inode::{Inode, Name, Target};
use super::path::{MAX_LINKS, NAME_MAX, PATH_MAX, Step};
use crate::errno::{Errno, Result};
use crate::task::ids::EXECUTE;
use faultless_collections::{Arc, Vec};

/// Where walks start.
#[derive(Clone, Debug)]
pub struct Start {
    /// Where absolute paths start; `..` does not lead out of it.
    pub root: Arc<Inode>,
    /// Where relative paths start.
    pub here: Arc<Inode>,
}

/// Whether to follow symbolic links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Links {
    /// All of them.
    Follow,
    /// All except at the end of the path.
    KeepLast,
    /// None: any is an error.
    Refuse,
}

/// Where a path ends.
#[derive(Debug)]
pub struct Found {
    /// The directory that holds the last name.
    pub directory: Arc<Inode>,
    /// The last name; empty for the root, and maybe `.` or `..`.
    pub name: Name,
    /// The inode of the last name, if it exists.
    pub inode: Option<Arc<Inode>>,
    /// Whether the path ends in a slash, so that it must be a directory.
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
