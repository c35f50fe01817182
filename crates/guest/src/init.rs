//! A program that may be the first process of a machine: it sets up its own environment, and turns
//! the machine off at the end.

use crate::clock::sleep_ms;
use crate::sys::{call, checked};
use crate::{proc, procfs};
use std::ffi::CString;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// The folder of kernel modules, which are loaded in the order of their names.
const MODULES: &str = "/modules";
/// `MODULE_INIT_COMPRESSED_FILE`: the kernel decompresses the module.
const COMPRESSED: u64 = 4;

/// Proof of being the first process of a Linux without mounts. Dropping the value turns the machine
/// off.
#[derive(Debug)]
pub struct Init(());

impl Init {
    /// If this is the first process, mounts `/proc` and a tmpfs at `/tmp`, loads the kernel
    /// modules, with `/dev` for their devices, and waits `settle` seconds for the kernel to finish
    /// the work of its own start.
    ///
    /// # Errors
    /// A mount or a load that failed.
    pub fn begin(settle: u64) -> Result<Option<Self>, String> {
        if proc::pid() != 1 || procfs::text("/proc/self/stat").is_ok() {
            return Ok(None);
        }
        mount("proc", "/proc")?;
        mount("tmpfs", "/tmp")?;
        if Path::new(MODULES).exists() {
            mount("devtmpfs", "/dev")?;
            load_modules()?;
        }
        sleep_ms(settle * 1000);
        Ok(Some(Self(())))
    }
}

impl Drop for Init {
    fn drop(&mut self) {
        // SAFETY: the machine is no longer needed.
        unsafe { libc::reboot(libc::LINUX_REBOOT_CMD_POWER_OFF) };
    }
}

/// Mounts a file system of `kind` at `target`.
pub(crate) fn mount(kind: &str, target: &str) -> Result<(), String> {
    let _ = std::fs::create_dir_all(target);
    let (kind, at) =
        (CString::new(kind).unwrap_or_default(), CString::new(target).unwrap_or_default());
    // SAFETY: the strings live as long as the call.
    let done =
        unsafe { libc::mount(kind.as_ptr(), at.as_ptr(), kind.as_ptr(), 0, std::ptr::null()) };
    checked(done).map(|_| ()).map_err(|errno| format!("mount {target}: {errno}"))
}

/// Loads the kernel modules.
fn load_modules() -> Result<(), String> {
    let explain =
        |path: &Path, error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let entries = fs::read_dir(MODULES).map_err(|error| explain(Path::new(MODULES), &error))?;
    let mut modules: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    modules.sort();
    for path in modules {
        let file = File::open(&path).map_err(|error| explain(&path, &error))?;
        let compressed = path.extension().is_some_and(|end| end != "ko");
        let flags = if compressed { COMPRESSED } else { 0 };
        let args = [file.as_raw_fd() as u64, c"".as_ptr() as u64, flags];
        // SAFETY: the string is constant.
        unsafe { call(libc::SYS_finit_module, args) }
            .map_err(|errno| explain(&path, &format!("finit_module: {errno}")))?;
    }
    Ok(())
}
