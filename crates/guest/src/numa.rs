//! Pages and memory nodes.

use crate::mem::{PAGE, Region};
use crate::sys::{self, Errno, call};

/// Flag of [`move_pages`]: move pages mapped only by this process.
pub const MOVE: u64 = 2;
/// Flag of [`move_pages`]: also move shared pages.
pub const MOVE_ALL: u64 = 4;

/// Moves the pages of this process at the addresses `pages` to `nodes`; without `nodes`, only reads
/// their nodes. Stores for each page its node after the call, or the negated number of an error,
/// and returns the number of pages that could not be moved.
///
/// # Errors
/// `move_pages`'.
///
/// # Panics
/// If the lists differ in length.
pub fn move_pages(
    pages: &[u64],
    nodes: Option<&[i32]>,
    status: &mut [i32],
    flags: u64,
) -> sys::Result<u64> {
    assert!(pages.len() == status.len() && nodes.is_none_or(|nodes| nodes.len() == pages.len()));
    let nodes = nodes.map_or(0, |nodes| nodes.as_ptr() as u64);
    let (list, told) = (pages.as_ptr() as u64, status.as_mut_ptr() as u64);
    // SAFETY: the lists have this number of entries; programs do not see the frames of their pages.
    unsafe { call(libc::SYS_move_pages, [0, pages.len() as u64, list, nodes, told, flags]) }
}

/// Returns the nodes of pages, or negated errors.
///
/// # Errors
/// `move_pages`'.
pub fn nodes_of(pages: &[u64]) -> sys::Result<Vec<i32>> {
    let mut status = vec![0; pages.len()];
    move_pages(pages, None, &mut status, MOVE)?;
    Ok(status)
}

/// Returns the number of memory nodes: 1 or 2.
///
/// # Errors
/// `mmap`'s, and `move_pages`' except for a missing node.
pub fn nodes() -> sys::Result<i32> {
    let region = Region::anonymous(PAGE)?;
    region.fill(1);
    match move_pages(&[region.start()], Some(&[1]), &mut [0], MOVE) {
        Ok(_) => Ok(2),
        Err(Errno(libc::ENODEV)) => Ok(1),
        Err(errno) => Err(errno),
    }
}

impl Region {
    /// Returns the addresses of the pages.
    pub fn addresses(&self) -> Vec<u64> {
        self.pages().map(|at| self.start() + at).collect()
    }

    /// Moves all pages to `node`.
    ///
    /// # Errors
    /// `move_pages`'; `EBUSY` if a page did not move.
    pub fn move_to(&self, node: i32) -> sys::Result<()> {
        let pages = self.addresses();
        let mut status = vec![-1; pages.len()];
        move_pages(&pages, Some(&vec![node; pages.len()]), &mut status, MOVE)?;
        let moved = status.iter().all(|there| *there == node);
        if moved { Ok(()) } else { Err(Errno(libc::EBUSY)) }
    }
}

/// The nodes for new pages: Linux's `MPOL_*`, with one bit for each node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The mode.
    pub mode: i32,
    /// The nodes.
    pub nodes: u64,
}

impl Policy {
    /// None.
    pub const DEFAULT: Self = Self { mode: libc::MPOL_DEFAULT, nodes: 0 };

    /// The node of the CPU.
    pub const LOCAL: Self = Self { mode: libc::MPOL_LOCAL, nodes: 0 };

    /// Returns the policy for this node, while it has free memory.
    pub const fn preferred(node: i32) -> Self {
        Self { mode: libc::MPOL_PREFERRED, nodes: 1 << node }
    }

    /// Returns the policy that alternates between the first nodes.
    pub const fn interleave(nodes: i32) -> Self {
        Self { mode: libc::MPOL_INTERLEAVE, nodes: (1 << nodes) - 1 }
    }

    /// Returns the arguments of the calls: the mode, the address of the nodes, and the number of
    /// bits plus one.
    fn words(&self) -> [u64; 3] {
        [self.mode as u64, (&raw const self.nodes) as u64, u64::from(u64::BITS) + 1]
    }
}

/// Sets the policy of the memory at `addr`.
///
/// # Errors
/// `mbind`'s.
pub fn mbind(addr: u64, len: u64, policy: Policy, flags: u64) -> sys::Result<()> {
    let [mode, nodes, bits] = policy.words();
    // SAFETY: the nodes have this number of bits; programs do not see the frames of their pages.
    unsafe { call(libc::SYS_mbind, [addr, len, mode, nodes, bits, flags]) }.map(|_| ())
}

/// Sets the policy of this thread.
///
/// # Errors
/// `set_mempolicy`'s.
pub fn set_mempolicy(policy: Policy) -> sys::Result<()> {
    let [mode, nodes, bits] = policy.words();
    // SAFETY: as above.
    unsafe { call(libc::SYS_set_mempolicy, [mode, nodes, bits, 0, 0, 0]) }.map(|_| ())
}

/// Returns the policy of this thread, or with `MPOL_F_ADDR` (2) the policy of the memory at `addr`.
///
/// # Errors
/// `get_mempolicy`'s.
pub fn get_mempolicy(addr: u64, flags: u64) -> sys::Result<Policy> {
    // Linux requires space for the maximum number of nodes.
    const WORDS: usize = 16;
    let (mut mode, mut nodes) = (-1i32, [u64::MAX; WORDS]);
    let (mode_at, nodes_at) = ((&raw mut mode) as u64, nodes.as_mut_ptr() as u64);
    let bits = (WORDS * 64) as u64;
    // SAFETY: the call stores the mode and at most this number of bits.
    unsafe { call(libc::SYS_get_mempolicy, [mode_at, nodes_at, bits, addr, flags, 0]) }?;
    Ok(Policy { mode, nodes: nodes[0] })
}
