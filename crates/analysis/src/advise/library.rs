//! The preloaded library in a file that outlives the command.

use super::preload::{LIBRARIES, contents, version};
use crate::error::Error;
use nix::unistd::geteuid;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, Permissions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The permissions of the file, and of its directory.
const FILE: u32 = 0o644;
const DIRECTORY: u32 = 0o755;
/// Permissions of users other than the owner to write.
const OTHERS_WRITE: u32 = 0o022;

/// Writes the library to the user's cache directory, unless the file is there already. Returns its
/// path.
///
/// # Errors
/// There is no cache directory, the directory belongs to another user, or the file cannot be
/// written. The error names the remedy.
pub fn cached() -> Result<PathBuf, Error> {
    let base = cache(|name| std::env::var_os(name), geteuid().is_root()).ok_or_else(|| {
        let why = "neither XDG_CACHE_HOME nor HOME is set: set HOME, or use --library FILE";
        Error::run("the library to preload", why)
    })?;
    put(&base.join("faultless"), contents()?)
}

/// Writes the library to the file `to`, unless the file is there already. Returns its absolute
/// path.
///
/// # Errors
/// `to` is another kind of file, or cannot be written.
pub fn at(to: &Path) -> Result<PathBuf, Error> {
    let library = contents()?;
    let to = std::path::absolute(to).map_err(|error| Error::host(to.display(), error))?;
    loadable(&to)?;
    if let Ok(meta) = fs::metadata(&to) {
        let before = if meta.is_file() { fs::read(&to).ok() } else { None };
        let known =
            before.as_deref().is_some_and(|before| before.is_empty() || version(before).is_some());
        if !known {
            let why =
                "the file is not a library of `faultless run`: remove it, or use another name";
            return Err(Error::input(to.display(), why));
        }
        if before.as_deref() == Some(library) {
            return Ok(to);
        }
    }
    write(&to, library)?;
    Ok(to)
}

/// Returns the directory of caches.
fn cache(variable: impl Fn(&str) -> Option<OsString>, root: bool) -> Option<PathBuf> {
    // The specification of XDG ignores relative paths.
    let set = |name| variable(name).map(PathBuf::from).filter(|path: &PathBuf| path.is_absolute());
    set("XDG_CACHE_HOME")
        .or_else(|| Some(set("HOME")?.join(".cache")))
        .or_else(|| root.then(|| PathBuf::from("/var/cache")))
}

/// Writes `library` to a file in the directory `dir`, unless the file is there already. The name of
/// the file contains a hash, so that commands of several versions use one directory.
fn put(dir: &Path, library: &[u8]) -> Result<PathBuf, Error> {
    let mut hash = DefaultHasher::new();
    library.hash(&mut hash);
    let file = dir.join(format!("preload-{:016x}.so", hash.finish()));
    loadable(&file)?;
    own(dir)?;
    if !intact(&file, library) {
        write(&file, library)?;
    }
    Ok(file)
}

/// Creates the directory `dir`, and prevents writes by other users.
fn own(dir: &Path) -> Result<(), Error> {
    let failed = |error: io::Error| {
        Error::run(dir.display(), format_args!("{error}; use --library FILE for another place"))
    };
    DirBuilder::new().recursive(true).mode(DIRECTORY).create(dir).map_err(failed)?;
    let me = geteuid().as_raw();
    // A symbolic link must belong to the user, too.
    let link = fs::symlink_metadata(dir).map_err(failed)?;
    let meta = fs::metadata(dir).map_err(failed)?;
    if let Some(other) = [link.uid(), meta.uid()].into_iter().find(|owner| *owner != me) {
        let why = format!(
            "the directory belongs to user {other}, who could replace the library: remove the \
             directory, or use --library FILE"
        );
        return Err(Error::input(dir.display(), why));
    }
    if meta.mode() & OTHERS_WRITE != 0 {
        let mode = Permissions::from_mode(meta.mode() & 0o7777 & !OTHERS_WRITE);
        fs::set_permissions(dir, mode).map_err(failed)?;
    }
    Ok(())
}

/// Returns whether the file has these contents, and only its owner, the user, can change them.
fn intact(file: &Path, contents: &[u8]) -> bool {
    let ours = fs::symlink_metadata(file).is_ok_and(|meta| {
        meta.is_file() && meta.uid() == geteuid().as_raw() && meta.mode() & 0o777 == FILE
    });
    ours && fs::read(file).is_ok_and(|before| before == contents)
}

/// Replaces the file in one step, so that starting programs find the whole library.
fn write(file: &Path, contents: &[u8]) -> Result<(), Error> {
    let failed = |error| Error::host(file.display(), error);
    let dir = file.parent().unwrap_or(Path::new("/"));
    if !dir.is_dir() {
        return Err(Error::input(file.display(), "the directory does not exist: create it first"));
    }
    let mut new = tempfile::Builder::new();
    let new = new.prefix(".preload.").permissions(Permissions::from_mode(FILE));
    let mut new = new.tempfile_in(dir).map_err(failed)?;
    new.write_all(contents).map_err(failed)?;
    // The mode above is reduced by the user's mask.
    new.as_file().set_permissions(Permissions::from_mode(FILE)).map_err(failed)?;
    new.persist(file).map_err(|error| failed(error.error)).map(drop)
}

/// Checks whether the loader accepts the path in `LD_PRELOAD`.
fn loadable(path: &Path) -> Result<(), Error> {
    let bytes = path.as_os_str().as_bytes();
    match bytes.iter().find(|byte| b" \t\n:$".contains(byte)) {
        None => Ok(()),
        Some(byte) => {
            let why = format!(
                "the loader does not accept {:?} in a path of {LIBRARIES}: use --library FILE \
                 for another place",
                char::from(*byte)
            );
            Err(Error::input(path.display(), why))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("there").mode() & 0o777
    }

    #[test]
    fn damaged_file_is_rewritten() {
        let dir = tempfile::tempdir().expect("a directory");
        let place = dir.path().join("a/faultless");
        let put = || put(&place, b"library").expect("our directory");
        let file = put();
        assert!(file.starts_with(&place) && mode(&file) == 0o644, "{}", file.display());
        let inode = |file: &Path| fs::metadata(file).expect("there").ino();
        let first = inode(&file);
        assert_eq!(put(), file);
        assert_eq!(inode(&file), first, "an intact file stays");
        fs::write(&file, "librarx").expect("our file");
        assert_eq!(fs::read(put()).expect("rewritten"), b"library");
        // A file that others can change, a link, and a directory that others can change.
        fs::set_permissions(&file, Permissions::from_mode(0o666)).expect("our file");
        assert_eq!(mode(&put()), 0o644);
        let other = dir.path().join("other");
        fs::rename(&file, &other).expect("our file");
        std::os::unix::fs::symlink(&other, &file).expect("a link");
        assert!(fs::symlink_metadata(put()).expect("there").is_file());
        fs::set_permissions(&place, Permissions::from_mode(0o777)).expect("our directory");
        put();
        assert_eq!(mode(&place), 0o755);
        assert_ne!(super::put(&place, b"other").expect("our directory"), file);
    }

    #[test]
    fn directory_of_another_user_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        if !geteuid().is_root() {
            eprintln!("only root can give a directory away: not tested");
            return;
        }
        std::os::unix::fs::chown(dir.path(), Some(12_345), None).expect("root");
        let error = put(dir.path(), b"library").expect_err("another user's").to_string();
        for expected in ["belongs to user 12345", "--library FILE"] {
            assert!(error.contains(expected), "{error}");
        }
        // A link of another user to a directory of this user.
        let (ours, link) = (dir.path().join("ours"), dir.path().join("link"));
        fs::create_dir(&ours).expect("a directory");
        std::os::unix::fs::symlink(&ours, &link).expect("a link");
        put(&link, b"library").expect("our link");
        std::os::unix::fs::lchown(&link, Some(12_345), None).expect("root");
        put(&link, b"library").expect_err("another user's link");
    }

    #[test]
    fn cache_directory_follows_the_environment() {
        let of = |pairs: &'static [(&str, &str)], root| {
            let variable = |name: &str| {
                pairs.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
            };
            cache(variable, root).map(|path| path.to_str().expect("text").to_owned())
        };
        assert_eq!(of(&[("XDG_CACHE_HOME", "/x"), ("HOME", "/h")], false).as_deref(), Some("/x"));
        let relative = of(&[("XDG_CACHE_HOME", "x"), ("HOME", "/h")], true);
        assert_eq!(relative.as_deref(), Some("/h/.cache"));
        assert_eq!(of(&[("HOME", "")], true).as_deref(), Some("/var/cache"));
        assert_eq!(of(&[], false), None);
    }

    #[test]
    fn only_libraries_are_replaced_at_a_given_place() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("library.so");
        assert_eq!(at(&file).expect("a new file"), file);
        let library = contents().expect("a built library");
        fs::write(&file, b"\x7fELF older faultless-preload 0.0.1\0").expect("our file");
        at(&file).expect("an older library");
        assert_eq!(fs::read(&file).expect("there"), library);
        fs::write(&file, "a letter").expect("our file");
        let error = at(&file).expect_err("another file").to_string();
        assert!(error.contains("remove it, or use another name"), "{error}");
        assert_eq!(fs::read(&file).expect("there"), b"a letter");
        let error = at(&dir.path().join("none/x.so")).expect_err("no directory").to_string();
        assert!(error.ends_with("the directory does not exist: create it first"), "{error}");
        for wrong in ["a b.so", "a:b.so", "a$LIB.so"] {
            let error = at(&dir.path().join(wrong)).expect_err(wrong).to_string();
            assert!(error.contains("the loader does not accept"), "{error}");
        }
    }
}
