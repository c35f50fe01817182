//! Result files, and checks that results do not overwrite input files.

use crate::error::CliError;
use crate::replay::source::STDIN;
use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Permissions of a new file, before the user's mask; and of a file that contains addresses of a
/// program, as perf sets them.
pub const FOR_ALL: u32 = 0o666;
pub const FOR_OWNER: u32 = 0o600;

/// Returns an error if an `output`, given with `option`, is one of the `inputs`: the same file
/// under any name, or a file in a directory that is an input. `-` is standard output, or the input
/// on standard input.
pub fn spare(option: &str, output: &Path, inputs: &[&Path]) -> Result<(), CliError> {
    let is_standard = output == Path::new("-");
    let file = if is_standard { Path::new("/dev/stdout") } else { output };
    let Ok(meta) = fs::metadata(file) else { return Ok(()) };
    // A device does not read back the data written to it.
    let kind = meta.file_type();
    if !kind.is_file() && !kind.is_fifo() {
        return Ok(());
    }
    let is_input = |input: &&&Path| {
        let input = if **input == Path::new("-") { Path::new(STDIN) } else { **input };
        let Ok(of) = fs::metadata(input) else { return false };
        let same = (of.dev(), of.ino()) == (meta.dev(), meta.ino());
        let inside =
            || Some(fs::canonicalize(file).ok()?.starts_with(fs::canonicalize(input).ok()?));
        same || of.is_dir() && inside().unwrap_or(false)
    };
    match inputs.iter().find(is_input) {
        None => Ok(()),
        Some(input) => Err(CliError::Usage(format!(
            "{option} {} would overwrite the input {}: specify another file",
            output.display(),
            input.display()
        ))),
    }
}

/// Returns an error if two outputs, each with its option, are one file: the second would overwrite
/// the first.
pub fn apart(outputs: &[(&str, Option<&Path>)]) -> Result<(), CliError> {
    // The resolved path of a file that may not exist yet.
    let place = |path: &Path| {
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
        fs::canonicalize(path).ok().or_else(|| {
            Some(fs::canonicalize(dir.unwrap_or(Path::new("."))).ok()?.join(path.file_name()?))
        })
    };
    let is_file = |path: &&Path| fs::metadata(path).map_or(true, |meta| meta.is_file());
    let given = outputs.iter().filter_map(|(option, path)| Some((option, (*path)?)));
    let mut places = Vec::new();
    for (option, path) in given.filter(|(_, path)| *path != Path::new("-") && is_file(path)) {
        let Some(at) = place(path) else { continue };
        if let Some((other, _)) = places.iter().find(|(_, place)| *place == at) {
            let path = path.display();
            let why = format!("{other} and {option}: both would write {path}: specify two files");
            return Err(CliError::Usage(why));
        }
        places.push((*option, at));
    }
    Ok(())
}

/// Returns the error of writing the file `name`, with the remedy for a file system that does not
/// accept the file.
fn unwritten(name: &Path, error: &io::Error) -> CliError {
    let remedy = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            ". An existing file is unchanged. Remedy: free space, or another file system"
        }
        ErrorKind::ReadOnlyFilesystem => ". Remedy: a file on another file system",
        _ => "",
    };
    // An error of a temporary file contains a name that is unknown to the user.
    let why = error.to_string();
    let why = why.split(" at path").next().unwrap_or(&why);
    CliError::failed(name.display(), format_args!("{why}{remedy}"))
}

/// A file that replaces the existing file when it is complete; the existing file stays unchanged
/// until then. A device or a pipe is written to directly.
#[derive(Debug)]
pub struct Replacing {
    /// The name given by the user.
    name: PathBuf,
    /// The target path, with symbolic links resolved. `None` for a device or a pipe.
    place: Option<PathBuf>,
}

impl Replacing {
    /// Creates a replacement for the file `name`, and checks that the file can be written.
    pub fn new(name: &Path) -> Result<Self, CliError> {
        let failed = |error| unwritten(name, &error);
        let there = match fs::metadata(name) {
            Err(_) => None,
            Ok(meta) => {
                fs::File::options().append(true).open(name).map_err(failed)?;
                Some(meta)
            }
        };
        let place = match there {
            // `name` may be a link to a file that does not exist yet.
            None => Some(fs::read_link(name).map_or(name.to_owned(), |to| beside(name, &to))),
            Some(meta) if meta.is_file() => Some(fs::canonicalize(name).map_err(failed)?),
            Some(_) => None,
        };
        let replacing = Self { name: name.to_owned(), place };
        // Detects a directory without write permission now, not at the end of the run.
        replacing.temporary(FOR_OWNER)?;
        Ok(replacing)
    }

    /// Returns whether the output is a regular file, not a device or a pipe.
    pub fn is_file(&self) -> bool {
        self.place.is_some()
    }

    /// Creates a new file on the same file system, which is removed when it is dropped.
    pub fn temporary(&self, mode: u32) -> Result<NamedTempFile, CliError> {
        let dir = match &self.place {
            Some(place) => place.parent().unwrap_or(Path::new("")).to_owned(),
            None => std::env::temp_dir(),
        };
        let dir = if dir.as_os_str().is_empty() { PathBuf::from(".") } else { dir };
        let mut prefix = OsString::from(".");
        prefix.push(self.name.file_name().unwrap_or_default());
        prefix.push(".");
        let mut file = tempfile::Builder::new();
        let file = file.prefix(&prefix).permissions(Permissions::from_mode(mode));
        file.tempfile_in(&dir).map_err(|error| {
            if !dir.exists() {
                let why = format!("the directory {} does not exist", dir.display());
                return CliError::failed(self.name.display(), why);
            }
            unwritten(&self.name, &error)
        })
    }

    /// Moves the complete `file` to its final path.
    pub fn put(&self, file: NamedTempFile) -> Result<(), CliError> {
        let Some(place) = &self.place else { return Ok(()) };
        let kept = file.persist(place);
        kept.map_err(|error| unwritten(&self.name, &error.error)).map(drop)
    }

    /// Moves the complete `file` to its final path, beside the [old](Self::keep_old) file. Returns
    /// `file` after an error.
    pub fn put_beside_old(&self, file: NamedTempFile) -> Result<(), (CliError, NamedTempFile)> {
        if let Err(error) = self.keep_old() {
            return Err((error, file));
        }
        let Some(place) = &self.place else { return Ok(()) };
        let kept = file.persist(place);
        kept.map(drop).map_err(|error| (unwritten(&self.name, &error.error), error.file))
    }

    /// Renames an existing file that is not empty to FILE.old, as perf does. Called before
    /// [`put`](Self::put).
    pub fn keep_old(&self) -> Result<(), CliError> {
        let Some((place, old)) = self.old() else { return Ok(()) };
        let kept = fs::rename(place, &old);
        kept.map_err(|error| CliError::failed(old.display(), error))
    }

    /// Checks that an existing file can be [kept](Self::keep_old).
    pub fn check_old(&self) -> Result<(), CliError> {
        match self.old() {
            Some((place, old)) if old.is_dir() => Err(CliError::Failed(format!(
                "{} is a directory, and would be the name of the existing {}: rename one of them, \
                 or specify another file with -o",
                old.display(),
                place.display()
            ))),
            _ => Ok(()),
        }
    }

    /// Returns an existing file that is not empty, and its later name.
    fn old(&self) -> Option<(&Path, PathBuf)> {
        let place = self.place.as_deref()?;
        fs::metadata(place).is_ok_and(|meta| meta.len() > 0).then(|| {
            let mut old = place.to_owned().into_os_string();
            old.push(".old");
            (place, old.into())
        })
    }

    /// Writes `bytes` as the complete contents.
    pub fn write(&self, bytes: &[u8]) -> Result<(), CliError> {
        self.complete(bytes, false)
    }

    /// Writes `bytes` as the complete contents, and then [keeps](Self::keep_old) an existing file.
    pub fn write_beside_old(&self, bytes: &[u8]) -> Result<(), CliError> {
        self.complete(bytes, true)
    }

    fn complete(&self, bytes: &[u8], keep_old: bool) -> Result<(), CliError> {
        let failed = |error| unwritten(&self.name, &error);
        if !self.is_file() {
            let mut device = fs::File::options().write(true).open(&self.name).map_err(failed)?;
            return device.write_all(bytes).map_err(failed);
        }
        let mut file = self.temporary(FOR_ALL)?;
        file.write_all(bytes).map_err(failed)?;
        if keep_old {
            self.keep_old()?;
        } else if let Ok(before) = fs::metadata(&self.name) {
            file.as_file().set_permissions(before.permissions()).map_err(failed)?;
        }
        self.put(file)
    }
}

/// Returns the target of a symbolic link at `link` with the contents `to`.
fn beside(link: &Path, to: &Path) -> PathBuf {
    link.parent().unwrap_or(Path::new("")).join(to)
}
