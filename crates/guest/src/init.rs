//! A program that may be the first process of a machine: with nothing around it, it makes its own
//! surroundings, and turns the machine off when it is done.

use crate::clock::sleep_ms;
use crate::sys::checked;
use crate::{proc, procfs};
use std::ffi::CString;

/// Proof of being the first process of a Linux that has nothing mounted yet. The machine goes off when it is
/// dropped.
#[derive(Debug)]
pub struct Init(());

impl Init {
    /// If this is such a process, mounts `/proc` and a tmpfs at `/tmp`, and lets the kernel come to rest for
    /// `settle` seconds: it has work left from its own start.
    ///
    /// # Errors
    /// What cannot be mounted.
    pub fn begin(settle: u64) -> Result<Option<Self>, String> {
        if proc::pid() != 1 || procfs::text("/proc/self/stat").is_ok() {
            return Ok(None);
        }
        mount("proc", "/proc")?;
        mount("tmpfs", "/tmp")?;
        sleep_ms(settle * 1000);
        Ok(Some(Self(())))
    }
}

impl Drop for Init {
    fn drop(&mut self) {
        // SAFETY: nothing here needs the machine any more.
        unsafe { libc::reboot(libc::LINUX_REBOOT_CMD_POWER_OFF) };
    }
}

/// Mounts a file system of `kind` at `target`.
fn mount(kind: &str, target: &str) -> Result<(), String> {
    let _ = std::fs::create_dir_all(target);
    let (kind, at) =
        (CString::new(kind).unwrap_or_default(), CString::new(target).unwrap_or_default());
    // SAFETY: the strings live as long as the call.
    let done =
        unsafe { libc::mount(kind.as_ptr(), at.as_ptr(), kind.as_ptr(), 0, std::ptr::null()) };
    checked(done).map(|_| ()).map_err(|errno| format!("mount {target}: {errno}"))
}
