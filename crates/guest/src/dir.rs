//! A private directory of the program, and file errors as texts.

use crate::args::Args;
use crate::check::{self, Check};
use crate::proc::{no_huge_pages, pid};
use crate::sys::{Errno, checked};
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::OnceLock;

static DIR: OnceLock<PathBuf> = OnceLock::new();

/// Runs the checks of `program` selected by its arguments, in a private directory in `dir=DIR`
/// (`/tmp`), which is removed at the end.
pub fn run(program: &'static str, checks: &[Check]) -> ! {
    let args = Args::read(program, &["dir"]);
    let place = PathBuf::from(args.text("dir").unwrap_or("/tmp"));
    let dir = place.join(format!("{program}.{}", pid()));
    if let Err(error) = fs::create_dir_all(&dir) {
        args.refuse(&format!("cannot make {}: {error}", dir.display()));
    }
    let _ = DIR.set(dir.clone());
    no_huge_pages();
    let status = check::run(&args, checks);
    let _ = std::env::set_current_dir("/");
    let _ = fs::remove_dir_all(&dir);
    std::process::exit(status)
}

/// The directory.
pub fn dir() -> PathBuf {
    DIR.get().map_or_else(|| PathBuf::from("/tmp"), Clone::clone)
}

/// The file `name` in the program's own directory.
pub fn path(name: &str) -> PathBuf {
    dir().join(name)
}

/// Converts an error of `std::io` to a message that contains the operation.
pub fn io<T>(what: &str, result: std::io::Result<T>) -> Result<T, String> {
    result.map_err(|error| format!("{what}: {error}"))
}

/// The error number of a result of `std::io`, or 0.
pub fn number<T>(result: std::io::Result<T>) -> i32 {
    result.err().map_or(0, |error| error.raw_os_error().unwrap_or(-1))
}

/// Makes an empty file of this name, and opens it for reading and writing.
pub fn create(name: &str) -> Result<File, String> {
    let file =
        OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path(name));
    io(&format!("create {name}"), file)
}

fn c_string(path: &std::path::Path) -> Result<CString, String> {
    CString::new(path.as_os_str().as_encoded_bytes()).map_err(|error| error.to_string())
}

/// Opens with flags of Linux's own.
pub fn open(name: &str, flags: i32) -> Result<OwnedFd, Errno> {
    let path = c_string(&path(name)).map_err(|_| Errno(libc::EINVAL))?;
    // SAFETY: the path lives as long as the call, and the new descriptor has no other owner.
    unsafe { checked(libc::open(path.as_ptr(), flags, 0o644)).map(|fd| OwnedFd::from_raw_fd(fd)) }
}
