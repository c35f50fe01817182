//! System V's IPC calls, one file for each kind. The objects are in [`crate::ipc`].

pub mod msg;
pub mod sem;
pub mod shm;

use super::{Args, Errno, Result};
use crate::ipc::Common;

/// Remove the object.
const RMID: u32 = 0;
/// Set owner and permissions.
const SET: u32 = 1;
/// Read the state.
const STAT: u32 = 2;
/// Read the limits.
const INFO: u32 = 3;

/// The common part of all objects: Linux's `ipc64_perm`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Permissions {
    key: i32,
    owner: [u32; 4],
    mode: u32,
    sequence: u16,
    zeros: [u16; 3],
    unused: [u64; 2],
}

impl Permissions {
    fn of(id: i32, common: &Common) -> Self {
        Self {
            key: common.key,
            owner: [common.uid, common.gid, common.creator[0], common.creator[1]],
            mode: common.mode,
            sequence: (id >> 15) as u16,
            zeros: [0; 3],
            unused: [0; 2],
        }
    }
}

const _: () = assert!(size_of::<Permissions>() == 48);
