//! Checks whether a program can be run, before perf is started, because perf's message cannot be
//! distinguished from the program's own output.

use std::ffi::{CString, OsStr};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The longest first line of a script that the kernel reads.
const FIRST_LINE: u64 = 256;

/// Returns the file executed for `name`: the name itself if it contains a slash, otherwise the
/// first file in PATH.
///
/// # Errors
/// The error of `execve`: the file, or the interpreter of a script, does not exist, is a directory,
/// or is not executable.
pub fn find(name: &OsStr) -> io::Result<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        return executable(&path).map(|()| path);
    }
    let mut found = io::Error::from_raw_os_error(libc::ENOENT);
    let path = std::env::var_os("PATH").unwrap_or_default();
    for file in std::env::split_paths(&path).map(|dir| dir.join(name)) {
        match executable(&file) {
            Ok(()) if !name.is_empty() => return Ok(file),
            // A later directory may have an executable file. If none has, this error is more
            // specific than "not found".
            Err(error) if error.raw_os_error() == Some(libc::EACCES) => found = error,
            _ => {}
        }
    }
    Err(found)
}

/// Returns whether the program in the file at `path` gets other rights than its user. The kernel
/// then ends recordings of unprivileged users.
pub(super) fn changes_user(path: &Path) -> bool {
    let rights = libc::S_ISUID | libc::S_ISGID;
    fs::metadata(path).is_ok_and(|meta| meta.mode() & rights != 0) || has_capabilities(path)
}

/// Returns whether the file at `path` gives capabilities to the program.
pub fn has_capabilities(path: &Path) -> bool {
    let Ok(name) = CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: both strings end with a zero. A size of 0 asks for the length alone.
    let len = unsafe {
        let key = c"security.capability".as_ptr();
        libc::getxattr(name.as_ptr(), key, std::ptr::null_mut(), 0)
    };
    len > 0
}

fn executable(path: &Path) -> io::Result<()> {
    permitted(path)?;
    let mut line = Vec::new();
    // A file that is executable and not readable is no script.
    if let Ok(file) = File::open(path) {
        file.take(FIRST_LINE).read_to_end(&mut line)?;
    }
    let Some(rest) = line.strip_prefix(b"#!") else { return Ok(()) };
    let rest = rest.split(|byte| *byte == b'\n').next().unwrap_or(rest).trim_ascii_start();
    let interpreter = rest.split(|byte| b" \t".contains(byte)).next().unwrap_or(rest);
    let interpreter = Path::new(OsStr::from_bytes(interpreter));
    permitted(interpreter).map_err(|error| {
        let why = format!("interpreter {}: {error}", interpreter.display());
        io::Error::new(error.kind(), why)
    })
}

/// Returns whether the permissions of the file at `path` allow its execution.
fn permitted(path: &Path) -> io::Result<()> {
    if fs::metadata(path)?.is_dir() {
        return Err(io::Error::from_raw_os_error(libc::EISDIR));
    }
    let name = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `name` is a string that ends with a zero, and lives until the call returns.
    match unsafe { libc::faccessat(libc::AT_FDCWD, name.as_ptr(), libc::X_OK, libc::AT_EACCESS) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn find_returns_the_error_of_execve() {
        let dir = std::env::temp_dir().join(format!("faultless-run-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let file = |name: &str, text: &str, mode| {
            let path = dir.join(name);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            path
        };
        let result = |path: &Path| find(path.as_os_str()).map_err(|error| error.raw_os_error());
        assert_eq!(result(&dir), Err(Some(libc::EISDIR)));
        assert_eq!(result(&dir.join("none")), Err(Some(libc::ENOENT)));
        assert_eq!(result(&file("plain", "#!/bin/sh\n", 0o644)), Err(Some(libc::EACCES)));
        let good = file("good", "#! /bin/sh -e\nexit 0\n", 0o755);
        assert_eq!(result(&good), Ok(good.clone()));
        let lost = file("lost", "#!/no/such/interpreter\n", 0o755);
        let error = find(lost.as_os_str()).unwrap_err().to_string();
        assert!(error.contains("interpreter /no/such/interpreter: No such file"), "{error}");
        assert_eq!(result(Path::new("")), Err(Some(libc::ENOENT)));
        assert!(find("sh".as_ref()).unwrap().ends_with("sh"));
        assert!(!changes_user(&good));
        assert!(
            changes_user(&file("root", "", 0o4755)) && changes_user(&file("group", "", 0o2755))
        );
        fs::remove_dir_all(dir).unwrap();
    }
}
