//! Open files (open file descriptions), to which descriptors refer.

use super::directory::Item;
use super::inode::{Body, Inode};
use super::pipe::Pipe;
use super::proc::memory::Opened;
use super::regular::{MAX_LENGTH, Regular};
use super::size;
use super::stream::{self, Events, Stream};
use super::transfer::Transfer;
use crate::errno::{Errno, Result};
use crate::task::reads::Reader;
use alloc::boxed::Box;
use core::fmt;
use core::sync::atomic::{AtomicU32, Ordering};
use faultless::try_box;
use faultless_bare::sync::Mutex;
use faultless_collections::{Arc, Link, Vec};
use linux_raw_sys::general as linux;

/// The way an open file is read and written.
pub enum Kind {
    /// As a regular file.
    Regular,
    /// As a directory: the listing is made by a read from the start.
    Directory(Mutex<Vec<Item>>),
    /// As a text of `/proc`: the text is made by a read from the start.
    Text(Mutex<Vec<u8>>),
    /// As the memory of a process, by address.
    Memory(Opened),
    /// As a stream.
    Stream(Arc<dyn Stream>),
    /// Not at all (`O_PATH`).
    Path,
}

impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Regular => "Regular",
            Self::Directory(_) => "Directory",
            Self::Text(_) => "Text",
            Self::Memory(_) => "Memory",
            Self::Stream(_) => "Stream",
            Self::Path => "Path",
        })
    }
}

/// An open file.
#[derive(Debug)]
pub struct File {
    /// The opened inode.
    pub inode: Arc<Inode>,
    /// The way the file is read and written.
    pub kind: Kind,
    /// The flags of `F_GETFL`: access and status.
    flags: AtomicU32,
    position: Mutex<u64>,
    /// The read-ahead state, if the file lies on the disk.
    reader: Option<Box<Reader>>,
    /// The link in the list of epoll sets still to visit.
    pub(super) nested: Link<Self>,
}

/// The flags changed by `F_SETFL`.
pub const CHANGEABLE: u32 =
    linux::O_APPEND | linux::O_NONBLOCK | linux::O_DIRECT | linux::O_NOATIME | linux::FASYNC;
/// The flags that only affect opening.
const OF_OPENING: u32 =
    linux::O_CREAT | linux::O_EXCL | linux::O_NOCTTY | linux::O_TRUNC | linux::O_CLOEXEC;

impl Drop for File {
    fn drop(&mut self) {
        super::lock::file_ended(self);
    }
}

impl File {
    /// Opens an inode.
    ///
    /// # Errors
    /// `EISDIR`, `ELOOP`: the inode is a symbolic link; `ENXIO`; `EACCES`; `EPERM`: the file is
    /// sealed; [`Errno::RESTART`]: a signal came before the other end of a pipe was opened;
    /// `ENOMEM`.
    pub fn open(inode: &Arc<Inode>, flags: u32) -> Result<Arc<Self>> {
        if faultless_bare::heap::tight() {
            return Err(Errno::ENOMEM);
        }
        let access = flags & linux::O_ACCMODE;
        let (reads, writes) = (access != linux::O_WRONLY, access != linux::O_RDONLY);
        let kind = match &inode.body {
            _ if flags & linux::O_PATH != 0 => Kind::Path,
            _ if inode.is_link() => return Err(Errno::ELOOP),
            _ if inode.is_directory() && (writes || flags & linux::O_TRUNC != 0) => {
                return Err(Errno::EISDIR);
            }
            _ if inode.is_directory() => Kind::Directory(Mutex::default()),
            Body::Regular(regular) => {
                if flags & linux::O_TRUNC != 0 {
                    regular.truncate(0, MAX_LENGTH)?;
                    inode.touch();
                }
                Kind::Regular
            }
            Body::Pipe(pipe) => {
                let at_once = flags & linux::O_NONBLOCK != 0;
                Kind::Stream(stream::erase(Pipe::open(pipe, reads, writes, at_once)?))
            }
            Body::Device(device) => Kind::Stream(device.try_open()?),
            Body::Proc(node) => {
                node.permit(reads, writes)?;
                match node.memory_of() {
                    Some(pid) => Kind::Memory(Opened::try_new(pid)?),
                    None => Kind::Text(Mutex::default()),
                }
            }
            _ => return Err(Errno::ENXIO),
        };
        Self::try_new(inode.clone(), kind, flags & !OF_OPENING)
    }

    /// A file of this kind.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_new(inode: Arc<Inode>, kind: Kind, flags: u32) -> Result<Arc<Self>> {
        let (flags, position) = (AtomicU32::new(flags), Mutex::new(0));
        let stored = inode.regular().is_some_and(Regular::is_stored);
        let reader = stored.then(|| try_box(Reader::new())).transpose()?;
        Ok(Arc::try_new(Self { inode, kind, flags, position, reader, nested: Link::new() })?)
    }

    /// Sets whether the file is read in random order (`POSIX_FADV_RANDOM`).
    pub fn read_at_random(&self, at_random: bool) {
        if let Some(reader) = &self.reader {
            reader.at_random(at_random);
        }
    }

    /// The flags of `F_GETFL`.
    pub fn flags(&self) -> u32 {
        self.flags.load(Ordering::Relaxed)
    }

    /// Changes the flags of `F_SETFL`.
    pub fn set_flags(&self, flags: u32) {
        let kept = self.flags() & !CHANGEABLE;
        self.flags.store(kept | flags & CHANGEABLE, Ordering::Relaxed);
    }

    /// Returns whether the file is non-blocking.
    pub fn at_once(&self) -> bool {
        self.flags() & linux::O_NONBLOCK != 0
    }

    /// Returns whether the file was opened for reading.
    pub fn reads(&self) -> bool {
        let access = self.flags() & linux::O_ACCMODE;
        !matches!(self.kind, Kind::Path) && matches!(access, linux::O_RDONLY | linux::O_RDWR)
    }

    /// Returns whether the file was opened for writing.
    pub fn writes(&self) -> bool {
        let access = self.flags() & linux::O_ACCMODE;
        !matches!(self.kind, Kind::Path) && matches!(access, linux::O_WRONLY | linux::O_RDWR)
    }

    /// Returns the stream, if the file is a stream.
    pub fn stream(&self) -> Option<&Arc<dyn Stream>> {
        match &self.kind {
            Kind::Stream(stream) => Some(stream),
            _ => None,
        }
    }

    /// Returns the ready events.
    pub fn ready(&self) -> Events {
        match &self.kind {
            Kind::Stream(stream) => stream.ready(),
            Kind::Path => Events::NVAL,
            _ => Events::READ | Events::WRITE,
        }
    }

    /// Returns whether the file has a position.
    pub fn seekable(&self) -> bool {
        match (&self.kind, &self.inode.body) {
            (Kind::Stream(_), Body::Device(device)) => !device.is_console(),
            (Kind::Stream(_) | Kind::Path, _) => false,
            _ => true,
        }
    }

    /// Fails if the call has an offset and the file has no position.
    fn check_offset(&self, offset: Option<u64>) -> Result<()> {
        match self.kind {
            Kind::Path => Err(Errno::EBADF),
            _ if offset.is_some() && !self.seekable() => Err(Errno::ESPIPE),
            _ => Ok(()),
        }
    }

    /// Fails if `len` bytes from `offset` on, or from the position on, extend beyond the maximum
    /// offset.
    fn check_range(&self, offset: Option<u64>, len: u64) -> Result<()> {
        let start = match (&self.kind, offset) {
            // Positions in the memory of a process are addresses.
            (Kind::Memory(_), _) | (Kind::Stream(_), None) => return Ok(()),
            (_, Some(offset)) => offset,
            (_, None) => *self.position.lock(),
        };
        let end = start.checked_add(len).filter(|&end| end <= i64::MAX as u64);
        end.map(|_| ()).ok_or(Errno::EINVAL)
    }

    /// Reads from `offset`, or from the position, which then advances.
    ///
    /// # Errors
    /// As `read` and `pread`.
    pub fn read(&self, to: &mut Transfer<'_>, offset: Option<u64>) -> Result {
        self.check_offset(offset)?;
        if !self.reads() {
            return Err(Errno::EBADF);
        }
        self.check_range(offset, to.left())?;
        match &self.kind {
            Kind::Stream(stream) => stream::read(&**stream, to, self.at_once()),
            Kind::Directory(_) => Err(Errno::EISDIR),
            Kind::Path => Err(Errno::EBADF),
            Kind::Memory(memory) => self.at_position(offset, |at| memory.read(to, at)),
            _ if offset.is_some_and(|offset| offset > MAX_LENGTH) => Ok(0),
            Kind::Regular => self.read_regular(to, offset),
            _ => match offset {
                Some(offset) => self.read_from(to, offset),
                None => {
                    let mut position = self.position.lock();
                    let moved = self.read_from(to, *position)?;
                    *position += moved;
                    Ok(moved)
                }
            },
        }
    }

    /// Moves bytes at `offset`, or at the position, which then advances. The position's lock is not
    /// held during the move.
    fn at_position(&self, offset: Option<u64>, go: impl FnOnce(u64) -> Result) -> Result {
        let moved = go(offset.unwrap_or_else(|| *self.position.lock()))?;
        if offset.is_none() {
            let mut position = self.position.lock();
            *position = position.wrapping_add(moved);
        }
        Ok(moved)
    }

    /// Reads like [`read`](Self::read) from a regular file, in pieces. Each piece is read once its
    /// pages are present.
    fn read_regular(&self, to: &mut Transfer<'_>, offset: Option<u64>) -> Result {
        let regular = self.inode.regular().ok_or(Errno::EINVAL)?;
        loop {
            let mut position = offset.is_none().then(|| self.position.lock());
            let from = match (&position, offset) {
                (Some(position), _) => **position,
                (None, offset) => offset.unwrap_or(0) + to.moved(),
            };
            let piece = regular.piece(to.left());
            if !regular.is_there(from, piece) {
                drop(position);
                match regular.fetch(from, piece, self.reader.as_deref()) {
                    // The rest cannot be read.
                    Ok(there) if there < piece => to.limit(there),
                    Ok(_) => {}
                    Err(_) if to.moved() != 0 => return to.result(),
                    Err(errno) => return Err(errno),
                }
                continue;
            }
            let moved = match regular.read(to, from, piece) {
                Err(Errno::EAGAIN) => continue,
                moved => moved?,
            };
            if let Some(position) = &mut position {
                **position += moved;
            }
            if moved < piece || to.left() == 0 {
                return to.result();
            }
        }
    }

    fn read_from(&self, to: &mut Transfer<'_>, offset: u64) -> Result {
        match (&self.kind, &self.inode.body) {
            (Kind::Text(text), Body::Proc(node)) => {
                if let Some(result) = node.read(to, offset) {
                    return result;
                }
                if offset == 0 || text.lock().is_empty() {
                    // Made without the lock, because this accesses other files.
                    let made = node.text()?;
                    *text.lock() = made;
                }
                let text = text.lock();
                if let Some(rest) = text.get(offset as usize..) {
                    to.put_bytes(rest);
                }
                to.result()
            }
            _ => Err(Errno::EINVAL),
        }
    }

    /// Writes at `offset`, or at the position, which then advances.
    ///
    /// # Errors
    /// As `write` and `pwrite`.
    pub fn write(&self, from: &mut Transfer<'_>, offset: Option<u64>) -> Result {
        self.write_with(from, offset, self.flags() & linux::O_APPEND != 0)
    }

    /// Writes like [`write`](Self::write); `append` replaces the flag `O_APPEND` of the file.
    ///
    /// # Errors
    /// As `write` and `pwrite`.
    pub fn write_with(&self, from: &mut Transfer<'_>, offset: Option<u64>, append: bool) -> Result {
        self.check_offset(offset)?;
        if !self.writes() {
            return Err(Errno::EBADF);
        }
        self.check_range(offset, from.left())?;
        match (&self.kind, &self.inode.body) {
            (Kind::Stream(stream), _) => stream::write(&**stream, from, self.at_once()),
            (Kind::Regular, Body::Regular(regular)) => {
                self.write_regular(regular, from, offset, append)?;
                if from.moved() != 0 {
                    self.inode.touch();
                }
                from.result()
            }
            (Kind::Text(_), Body::Proc(node)) => node.write(from),
            (Kind::Memory(memory), _) => self.at_position(offset, |at| memory.write(from, at)),
            _ => Err(Errno::EINVAL),
        }
    }

    /// Writes like [`write`](Self::write) to a regular file, in pieces. Each piece is written once
    /// the pages that keep other bytes are present.
    fn write_regular(
        &self,
        regular: &Regular,
        from: &mut Transfer<'_>,
        offset: Option<u64>,
        append: bool,
    ) -> Result<()> {
        loop {
            let mut position = offset.is_none().then(|| self.position.lock());
            let at = match (&position, offset) {
                _ if append => None,
                (Some(position), _) => Some(**position),
                (None, offset) => offset.map(|offset| offset + from.moved()),
            };
            let piece = regular.piece(from.left());
            let first = at.unwrap_or_else(|| regular.length());
            if !regular.kept_is_there(first, piece) {
                drop(position);
                match regular.fetch_kept(first, piece) {
                    // The rest cannot be read.
                    Ok(there) if there < piece => from.limit(there),
                    Ok(_) => {}
                    Err(_) if from.moved() != 0 => return Ok(()),
                    Err(errno) => return Err(errno),
                }
                continue;
            }
            let before = from.moved();
            let limit = size::limit();
            let start = match regular.write(from, at, piece, limit) {
                Err(Errno::EAGAIN) => continue,
                // A partial write succeeds.
                Err(_) if before != 0 => return Ok(()),
                Err(Errno::EFBIG) if limit < MAX_LENGTH => {
                    drop(position);
                    return Err(size::exceeded());
                }
                start => start?,
            };
            let moved = from.moved() - before;
            if let Some(position) = &mut position {
                **position = start + moved;
            }
            if moved < piece || from.left() == 0 {
                return Ok(());
            }
        }
    }

    /// Moves the position: `lseek`.
    ///
    /// # Errors
    /// `EINVAL`, `ESPIPE`, `ENXIO`, `EOVERFLOW`.
    pub fn seek(&self, offset: i64, whence: u32) -> Result {
        if let Kind::Path = self.kind {
            return Err(Errno::EBADF);
        }
        if !self.seekable() {
            return Err(Errno::ESPIPE);
        }
        if self.stream().is_some() {
            // As on Linux, seeking in a device without a position succeeds.
            return if whence <= linux::SEEK_HOLE { Ok(0) } else { Err(Errno::EINVAL) };
        }
        let mut position = self.position.lock();
        let length = self.inode.length();
        let by_address = matches!(&self.inode.body, Body::Proc(node) if node.is_by_address());
        let base = match whence {
            linux::SEEK_SET => 0,
            linux::SEEK_CUR => *position,
            linux::SEEK_END if self.inode.is_directory() || by_address => {
                return Err(Errno::EINVAL);
            }
            linux::SEEK_END => length,
            linux::SEEK_DATA | linux::SEEK_HOLE => {
                let regular = self.inode.regular().ok_or(Errno::EINVAL)?;
                let offset = u64::try_from(offset).map_err(|_| Errno::ENXIO)?;
                *position = regular.seek(offset, whence == linux::SEEK_DATA)?;
                return Ok(*position);
            }
            _ => return Err(Errno::EINVAL),
        };
        let to = base.checked_add_signed(offset).filter(|&to| to <= i64::MAX as u64);
        // As on Linux, a position that is an address may be negative, and wraps.
        let wrapped = by_address.then(|| base.wrapping_add_signed(offset));
        *position = wrapped.or(to).ok_or(Errno::EINVAL)?;
        Ok(*position)
    }

    /// Calls `tell` for the entries of a directory from the position on, including `.` and `..`,
    /// until `tell` returns false. The second argument is the position after each entry.
    ///
    /// # Errors
    /// `ENOTDIR`, `ENOENT`: the directory was removed. `ENOMEM`.
    pub fn list(&self, mut tell: impl FnMut(&Item, u64) -> bool) -> Result<()> {
        let Kind::Directory(listing) = &self.kind else {
            return Err(if let Kind::Path = self.kind { Errno::EBADF } else { Errno::ENOTDIR });
        };
        let mut position = self.position.lock();
        if *position == 0 {
            let mut items = Vec::new();
            let parent = match Inode::parent(&self.inode) {
                Err(Errno::ENOENT) => self.inode.clone(),
                parent => parent?,
            };
            items.try_push(Item::try_new(b".", &self.inode)?)?;
            items.try_push(Item::try_new(b"..", &parent)?)?;
            match &self.inode.body {
                Body::Directory(directory) => directory.list(&mut items)?,
                Body::Proc(node) => node.list(&mut items)?,
                _ => return Err(Errno::ENOTDIR),
            }
            *listing.lock() = items;
        }
        let listing = listing.lock();
        for item in listing.iter().skip(*position as usize) {
            if !tell(item, *position + 1) {
                break;
            }
            *position += 1;
        }
        Ok(())
    }
}
