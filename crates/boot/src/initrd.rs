//! The initial file system: a cpio archive in the `newc` format, which kernels unpack.
//!
//! The same files produce the same archive, byte for byte: entries are sorted, and inode numbers
//! are the positions of entries. Owners are not stored, because root owns everything in the guest.

use crate::error::BootError;
use cpio::newc::{self, ModeFileType};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::{self, File, Metadata};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The date of generated files, in seconds of Unix time: 1 January 2026, the start of the machines'
/// clocks.
const MADE: u32 = 1_767_225_600;

/// The folder with instructions for the kernel.
const OWN: &str = ".boot/";
/// The list of the files on the disk: a line `PAGE LENGTH PATH` for each.
const DISK_LIST: &str = ".boot/disk";
/// Bytes of a page of the disk.
pub(crate) const DISK_PAGE: u64 = 4096;

/// A file system under construction.
#[derive(Clone, Debug, Default)]
pub struct Initrd {
    entries: BTreeMap<String, Node>,
    skipped: Vec<String>,
}

#[derive(Clone, Debug)]
struct Node {
    /// Permission bits.
    mode: u32,
    /// Seconds of Unix time.
    modified: u32,
    what: What,
}

#[derive(Clone, Debug)]
enum What {
    Directory,
    Symlink(String),
    Bytes(Vec<u8>),
    /// A file of the host, and its size.
    File(PathBuf, u32),
    /// A file whose contents are on a disk.
    OnDisk,
}

impl What {
    fn kind(&self) -> ModeFileType {
        match self {
            Self::Directory => ModeFileType::Directory,
            Self::Symlink(_) => ModeFileType::Symlink,
            Self::Bytes(_) | Self::File(..) | Self::OnDisk => ModeFileType::Regular,
        }
    }

    fn size(&self) -> u32 {
        match self {
            Self::Directory | Self::OnDisk => 0,
            Self::Symlink(target) => target.len() as u32,
            // At most the maximum size of a file, which `bytes` checks.
            Self::Bytes(bytes) => bytes.len() as u32,
            Self::File(_, size) => *size,
        }
    }
}

impl What {
    /// Writes the contents to `out`; `failed` converts the errors of `out`.
    fn write(
        &self,
        out: &mut dyn Write,
        failed: impl Fn(io::Error) -> BootError,
    ) -> Result<(), BootError> {
        match self {
            Self::Directory | Self::OnDisk => Ok(()),
            Self::Symlink(target) => out.write_all(target.as_bytes()).map_err(failed),
            Self::Bytes(bytes) => out.write_all(bytes).map_err(failed),
            Self::File(path, size) => {
                let mut file = File::open(path).map_err(BootError::file(path))?;
                let copied = io::copy(&mut file, out).map_err(BootError::file(path))?;
                if copied != u64::from(*size) {
                    return Err(unfit(path, "the size changed during the read"));
                }
                Ok(())
            }
        }
    }
}

impl Initrd {
    /// Returns a file system without files.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns whether `path` is a directory; the root always is.
    pub fn is_directory(&self, path: &str) -> bool {
        path.is_empty()
            || matches!(self.entries.get(path), Some(Node { what: What::Directory, .. }))
    }

    /// Returns whether the path `cwd` is certainly not a directory. If the path contains a symbolic
    /// link or `..`, or lies below a directory filled by the kernel, only the kernel can decide
    /// this.
    pub(crate) fn lacks_directory(&self, cwd: &str) -> bool {
        let mut path = String::new();
        for part in cwd.split('/').filter(|part| !part.is_empty() && *part != ".") {
            if part == ".." || matches!(path.as_str(), "proc" | "dev") {
                return false;
            }
            if !path.is_empty() {
                path.push('/');
            }
            path.push_str(part);
            match self.entries.get(&path).map(|node| &node.what) {
                Some(What::Directory) => {}
                Some(What::Symlink(_)) => return false,
                Some(What::Bytes(_) | What::File(..) | What::OnDisk) | None => return true,
            }
        }
        false
    }

    /// Returns whether `path` exists.
    pub fn contains(&self, path: &str) -> bool {
        self.entries.contains_key(path)
    }

    /// Returns the entries skipped by [`tree`](Self::tree), with the reasons: sockets, devices and
    /// pipes.
    pub fn skipped(&self) -> &[String] {
        &self.skipped
    }

    /// Bytes of all files.
    pub fn size(&self) -> u64 {
        self.entries.values().map(|node| u64::from(node.what.size())).sum()
    }

    /// Adds a file with these contents and permission bits, and its parent directories. Replaces an
    /// existing file at `path`.
    pub fn bytes(&mut self, path: &str, mode: u32, bytes: Vec<u8>) -> Result<(), BootError> {
        self.parents(path);
        if u32::try_from(bytes.len()).is_err() {
            return Err(unfit(path, "an archive holds files of less than 4 GiB"));
        }
        let node = Node { mode, modified: MADE, what: What::Bytes(bytes) };
        self.entries.insert(path.to_owned(), node);
        Ok(())
    }

    /// Adds an empty directory, and its parent directories, unless it exists.
    pub fn directory(&mut self, path: &str) {
        self.parents(path);
        self.empty(path);
    }

    fn parents(&mut self, path: &str) {
        for (at, _) in path.match_indices('/') {
            self.empty(&path[..at]);
        }
    }

    fn empty(&mut self, path: &str) {
        if let Entry::Vacant(place) = self.entries.entry(path.to_owned()) {
            place.insert(Node { mode: 0o755, modified: MADE, what: What::Directory });
        }
    }

    /// Adds the tree below the directory `root` of the host, with modes, dates and symbolic links.
    pub fn tree(&mut self, root: &Path) -> Result<(), BootError> {
        let metadata = fs::metadata(root).map_err(BootError::file(root))?;
        if !metadata.is_dir() {
            return Err(BootError::file(root)(io::ErrorKind::NotADirectory.into()));
        }
        let mut open = vec![(root.to_owned(), String::new())];
        while let Some((directory, inside)) = open.pop() {
            for entry in fs::read_dir(&directory).map_err(BootError::file(&directory))? {
                let entry = entry.map_err(BootError::file(&directory))?;
                let path = entry.path();
                let Ok(name) = entry.file_name().into_string() else {
                    self.skipped
                        .push(format!("{path:?} has a name that is not text (UTF-8); omitted"));
                    continue;
                };
                let inside = if inside.is_empty() { name } else { format!("{inside}/{name}") };
                let metadata = entry.metadata().map_err(BootError::file(&path))?;
                if let Some(what) = self.what(&path, &metadata)? {
                    if metadata.is_dir() {
                        open.push((path, inside.clone()));
                    }
                    let modified = metadata.mtime().clamp(0, i64::from(u32::MAX)) as u32;
                    let node = Node { mode: metadata.mode() & 0o7777, modified, what };
                    self.entries.insert(inside, node);
                }
            }
        }
        Ok(())
    }

    /// Returns the node for `path` of the host. Returns `None`, and records a note, for a type that
    /// this file system does not support.
    fn what(&mut self, path: &Path, metadata: &Metadata) -> Result<Option<What>, BootError> {
        let kind = metadata.file_type();
        if kind.is_dir() {
            return Ok(Some(What::Directory));
        }
        if kind.is_symlink() {
            let target = fs::read_link(path).map_err(BootError::file(path))?;
            let target = target.into_os_string().into_string();
            let Ok(target) = target else {
                let why = "points to a name that is not text (UTF-8)";
                self.skipped.push(format!("{path:?} {why}; omitted"));
                return Ok(None);
            };
            return Ok(Some(What::Symlink(target)));
        }
        if kind.is_file() {
            let Ok(size) = u32::try_from(metadata.len()) else {
                return Err(unfit(path, "an archive holds files of less than 4 GiB"));
            };
            // Report an unreadable file now, and not during the start of the machine.
            File::open(path).map_err(BootError::file(path))?;
            return Ok(Some(What::File(path.to_owned(), size)));
        }
        let what = if kind.is_socket() {
            "a socket"
        } else if kind.is_fifo() {
            "a named pipe"
        } else {
            "a device"
        };
        self.skipped.push(format!("{} is {what}; omitted", path.display()));
        Ok(None)
    }

    /// Writes the archive.
    pub fn write(&self, out: &mut dyn Write) -> Result<(), BootError> {
        let archive = |error| BootError::file("the initial file system")(error);
        for (place, (name, node)) in self.entries.iter().enumerate() {
            let size = node.what.size();
            let mut entry = newc::Builder::new(name)
                .ino(place as u32 + 1)
                .mode(node.mode)
                .set_mode_file_type(node.what.kind())
                .mtime(node.modified)
                .write(&mut *out, size);
            node.what.write(&mut entry, archive)?;
            entry.finish().map_err(archive)?;
        }
        newc::trailer(out).map_err(archive)?;
        Ok(())
    }
}

impl Initrd {
    /// Moves the contents of the files to a disk, whose image is written to `out`: the files are
    /// consecutive, and each starts at a page. The names remain in the archive, with a list for the
    /// kernel. Returns the first page of each file.
    ///
    /// Empty files stay in the archive, and so do files that the kernel needs before its disk
    /// starts.
    pub fn move_to_disk(
        &mut self,
        out: &mut dyn Write,
    ) -> Result<BTreeMap<String, u64>, BootError> {
        let failed = |error| BootError::file("the disk")(error);
        let (mut page, mut list, mut places) = (0, String::new(), BTreeMap::new());
        for (path, node) in &mut self.entries {
            let size = u64::from(node.what.size());
            let is_file = matches!(node.what, What::Bytes(_) | What::File(..));
            // A line of the list ends at the end of the path, so paths with newlines cannot be
            // listed.
            if !is_file || size == 0 || path.starts_with(OWN) || path.contains('\n') {
                continue;
            }
            node.what.write(out, failed)?;
            node.what = What::OnDisk;
            let pages = size.div_ceil(DISK_PAGE);
            let rest = (pages * DISK_PAGE - size) as usize;
            out.write_all(&[0; DISK_PAGE as usize][..rest]).map_err(failed)?;
            list.push_str(&format!("{page} {size} {path}\n"));
            places.insert(path.clone(), page);
            page += pages;
        }
        self.bytes(DISK_LIST, 0o444, list.into_bytes())?;
        Ok(places)
    }
}

fn unfit(path: impl Into<PathBuf>, why: &'static str) -> BootError {
    BootError::Unfit { path: path.into(), why }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;
    use std::io::Read;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    /// Name, mode with type, and contents of each entry.
    fn entries(initrd: &Initrd) -> Vec<(String, u32, Vec<u8>)> {
        let mut bytes = Vec::new();
        initrd.write(&mut bytes).expect("the output is memory");
        let mut rest = &bytes[..];
        let mut found = Vec::new();
        loop {
            let mut reader = newc::Reader::new(rest).expect("an entry");
            let entry = reader.entry().clone();
            if entry.is_trailer() {
                return found;
            }
            let mut contents = Vec::new();
            reader.read_to_end(&mut contents).expect("readable contents");
            found.push((entry.name().to_owned(), entry.mode(), contents));
            rest = reader.finish().expect("the next");
        }
    }

    #[test]
    fn tree_keeps_modes_and_links_and_skips_sockets() {
        let root = tempfile::tempdir().expect("a directory");
        let at = |name: &str| root.path().join(name);
        fs::create_dir(at("etc")).expect("made");
        fs::write(at("etc/motd"), "hello").expect("written");
        fs::set_permissions(at("etc/motd"), fs::Permissions::from_mode(0o4751)).expect("set");
        fs::set_permissions(at("etc"), fs::Permissions::from_mode(0o700)).expect("set");
        symlink("../etc/motd", at("link")).expect("linked");
        symlink("nowhere", at("dangling")).expect("linked");
        let _socket = UnixListener::bind(at("socket")).expect("bound");

        let mut initrd = Initrd::new();
        initrd.tree(root.path()).expect("read");
        assert_eq!(
            entries(&initrd),
            [
                ("dangling".into(), 0o120_777, b"nowhere".to_vec()),
                ("etc".into(), 0o040_700, Vec::new()),
                ("etc/motd".into(), 0o104_751, b"hello".to_vec()),
                ("link".into(), 0o120_777, b"../etc/motd".to_vec()),
            ]
        );
        assert_eq!(initrd.size(), 7 + 5 + 11);
        let [skipped] = initrd.skipped() else { panic!("{:?}", initrd.skipped()) };
        assert!(skipped.contains("socket is a socket"), "{skipped}");
    }

    /// A single unsupported name does not exclude other files, and the note names it exactly.
    #[test]
    fn non_utf8_names_are_skipped_and_reported() {
        let root = tempfile::tempdir().expect("a directory");
        let at = |name: &[u8]| root.path().join(OsStr::from_bytes(name));
        fs::write(at(b"caf\xe9.txt"), "latin 1").expect("written");
        fs::create_dir(at(b"dir\xff")).expect("made");
        fs::write(at(b"dir\xff/within"), "lost").expect("written");
        symlink(OsStr::from_bytes(b"to\xfe"), at(b"link")).expect("linked");
        fs::write(at("café".as_bytes()), "utf-8").expect("written");
        let mut initrd = Initrd::new();
        initrd.tree(root.path()).expect("read");
        assert_eq!(entries(&initrd), [("café".into(), 0o100_644, b"utf-8".to_vec())]);
        let mut skipped = initrd.skipped().to_vec();
        skipped.sort();
        let expected =
            ["caf\\xE9.txt\" has a name", "dir\\xFF\" has a name", "link\" points to a name"];
        assert_eq!(skipped.len(), 3, "{skipped:?}");
        assert!(
            skipped.iter().zip(expected).all(|(note, expected)| note.contains(expected)),
            "{skipped:?}"
        );
    }

    #[test]
    fn contents_move_to_a_disk() {
        let root = tempfile::tempdir().expect("a directory");
        fs::write(root.path().join("b"), vec![7; 5000]).expect("written");
        let mut initrd = Initrd::new();
        initrd.tree(root.path()).expect("read");
        initrd.bytes("a", 0o755, b"program".to_vec()).expect("fits");
        initrd.bytes("empty", 0o644, Vec::new()).expect("fits");
        initrd.bytes(".boot/argv", 0o444, b"/a".to_vec()).expect("fits");
        let mut image = Vec::new();
        let places = initrd.move_to_disk(&mut image).expect("the output is memory");
        assert_eq!(places, BTreeMap::from([("a".to_owned(), 0), ("b".to_owned(), 1)]));
        assert_eq!(image.len(), 3 * 4096);
        assert!(image[..7] == *b"program" && image[7..4096].iter().all(|&byte| byte == 0));
        assert!(image[4096..9096].iter().all(|&byte| byte == 7) && image[9096] == 0);
        let list = b"0 7 a\n1 5000 b\n".to_vec();
        let contents: BTreeMap<_, _> =
            entries(&initrd).into_iter().map(|(name, _, contents)| (name, contents)).collect();
        assert_eq!(contents[".boot/disk"], list);
        assert_eq!(contents[".boot/argv"], b"/a");
        assert!(contents["a"].is_empty() && contents["b"].is_empty());
        assert_eq!(initrd.size(), 2 + list.len() as u64);
    }

    #[test]
    fn parents_come_first_and_a_later_file_wins() {
        let mut initrd = Initrd::new();
        initrd.bytes("a/b/c", 0o644, b"1".to_vec()).expect("fits");
        initrd.bytes("a/b/c", 0o755, b"22".to_vec()).expect("fits");
        initrd.directory("a/b");
        let names: Vec<_> =
            entries(&initrd).into_iter().map(|(name, mode, _)| (name, mode)).collect();
        let expected = [("a", 0o040_755), ("a/b", 0o040_755), ("a/b/c", 0o100_755)];
        assert_eq!(names, expected.map(|(name, mode)| (name.to_owned(), mode)));
        for there in ["", "/", "/a", "a/./b/", "/a/../x", "//a//b"] {
            assert!(!initrd.lacks_directory(there), "{there}");
        }
        for lacking in ["/nope", "a/c", "a/b/c", "/a/b/c/d"] {
            assert!(initrd.lacks_directory(lacking), "{lacking}");
        }
        assert!(initrd.is_directory("") && initrd.is_directory("a/b"));
        assert!(!initrd.is_directory("a/b/c") && initrd.contains("a/b/c") && !initrd.contains("x"));
    }

    #[test]
    fn unreadable_files_are_named() {
        let root = tempfile::tempdir().expect("a directory");
        let gone = root.path().join("gone");
        let error = Initrd::new().tree(&gone).expect_err("a missing file");
        assert_eq!(
            error.to_string(),
            format!("{}: No such file or directory (os error 2)", gone.display())
        );
        fs::write(&gone, "").expect("written");
        let error = Initrd::new().tree(&gone).expect_err("is a file");
        assert_eq!(error.to_string(), format!("{}: not a directory", gone.display()));
    }
}
