//! System calls that read and write.

use super::{Args, Errno, Result, file};
use crate::fs::file::Kind;
use crate::fs::pipe::{End, Pipe, Socket};
use crate::fs::size;
use crate::fs::stream::{self, Events};
use crate::fs::{File, MAX_BYTES, Piece, Transfer};
use crate::syscall::args::{Entry, calls};
use crate::task::{cond_resched, lack};
use core::any::Any;
use faultless_bare::arch::user;
use faultless_collections::{Arc, Vec};
use linux_raw_sys::general as nr;

/// The system calls of this file, by number.
pub(in crate::syscall) const CALLS: &[Entry] = calls![
    (nr::__NR_read, read),
    (nr::__NR_write, write),
    (nr::__NR_pread64, pread),
    (nr::__NR_pwrite64, pwrite),
    (nr::__NR_readv, readv),
    (nr::__NR_writev, writev),
    (nr::__NR_preadv, preadv),
    (nr::__NR_pwritev, pwritev),
    (nr::__NR_preadv2, preadv2),
    (nr::__NR_pwritev2, pwritev2),
    (nr::__NR_lseek, lseek),
    (nr::__NR_sendfile, sendfile),
    (nr::__NR_copy_file_range, copy_file_range),
    (nr::__NR_splice, splice),
    (nr::__NR_vmsplice, vmsplice),
    (nr::__NR_tee, tee),
];

/// The maximum number of pieces of one call (`IOV_MAX`).
pub(in super::super) const MOST_PIECES: u64 = 1024;

// SAFETY: two words.
unsafe impl user::Plain for Piece {}

/// The program's `iovec`s at `addr`, which describe memory of the program.
///
/// # Errors
/// `EFAULT`: a piece outside user space. The errors of [`remote_pieces`].
pub(in super::super) fn pieces(addr: u64, count: u64) -> Result<Vec<Piece>> {
    let mut pieces = remote_pieces(addr, count)?;
    // As on Linux, the length of a single piece is cut first.
    if let [one] = &mut pieces[..] {
        one.len = one.len.min(MAX_BYTES);
    }
    pieces.iter().try_for_each(|piece| check_user(piece.base, piece.len))?;
    Ok(pieces)
}

/// The program's `iovec`s at `addr`, which describe memory of any process.
///
/// # Errors
/// `EINVAL`: too many pieces, or too long pieces. `EFAULT`: the `iovec`s cannot be read. `ENOMEM`.
pub(in super::super) fn remote_pieces(addr: u64, count: u64) -> Result<Vec<Piece>> {
    if count > MOST_PIECES {
        return Err(Errno::EINVAL);
    }
    let mut pieces = Vec::try_with_capacity(count as usize)?;
    let mut sum: u64 = 0;
    for at in 0..count {
        let piece: Piece = user::read(addr.wrapping_add(at * 16))?;
        sum = sum.checked_add(piece.len).filter(|&s| s <= i64::MAX as u64).ok_or(Errno::EINVAL)?;
        pieces.try_push(piece)?;
    }
    Ok(pieces)
}

/// Returns the offset of a call with an offset argument.
fn at(offset: u64) -> Result<Option<u64>> {
    if offset > i64::MAX as u64 { Err(Errno::EINVAL) } else { Ok(Some(offset)) }
}

/// The memory that a call describes: a buffer, or `iovec`s.
#[derive(Clone, Copy)]
enum Described {
    /// The address, and the length in bytes.
    Buffer(u64, u64),
    /// The address, and the number of `iovec`s.
    Vector(u64, u64),
}

impl Described {
    /// Calls `go` with the pieces. As on Linux, the memory is checked only if the file `permits`
    /// the call, and an `iovec` that cannot be read is an error of its own.
    fn with(self, permits: bool, go: impl FnOnce(&[Piece]) -> Result) -> Result {
        match self {
            _ if !permits => go(&[]),
            Self::Buffer(base, len) => {
                check_user(base, len)?;
                go(&[Piece { base, len }])
            }
            Self::Vector(addr, count) => go(&pieces(addr, count)?),
        }
    }
}

/// Returns whether `file` has a position, if the call has an offset.
fn takes(file: &File, offset: Option<u64>) -> bool {
    offset.is_none() || file.seekable()
}

// A failed call has moved no bytes, so it may be repeated.

fn read_to(fd: u64, memory: Described, offset: Option<u64>, flags: u64) -> Result {
    // The file of the checks is the file of the call, even if another thread closes the descriptor.
    let first = file(fd)?;
    memory.with(first.reads() && takes(&first, offset), |pieces| {
        check_flags(&first, pieces, flags)?;
        lack::with_memory(|| first.read(&mut Transfer::of_user(pieces), offset))
    })
}

fn write_from(fd: u64, memory: Described, offset: Option<u64>, flags: u64) -> Result {
    let first = file(fd)?;
    memory.with(first.writes() && takes(&first, offset), |pieces| {
        check_flags(&first, pieces, flags)?;
        let appends = match flags & (APPEND | NO_APPEND) {
            0 => first.flags() & nr::O_APPEND != 0,
            append => append == APPEND,
        };
        lack::with_memory(|| first.write_with(&mut Transfer::of_user(pieces), offset, appends))
    })
}

/// The flags `RWF_HIPRI`, which has no effect, `RWF_APPEND` and `RWF_NOAPPEND`.
const PRIORITY: u64 = nr::RWF_HIPRI as u64;
const APPEND: u64 = nr::RWF_APPEND as u64;
const NO_APPEND: u64 = 0x20;
/// All supported flags. Syncing has no effect.
const SUPPORTED: u64 = PRIORITY | nr::RWF_DSYNC as u64 | nr::RWF_SYNC as u64 | APPEND | NO_APPEND;

/// Fails if `file` does not support `flags`. As on Linux, errors of the file and of the memory come
/// first, and a call without bytes has no error.
fn check_flags(file: &File, pieces: &[Piece], flags: u64) -> Result<()> {
    let supported = if let Kind::Memory(_) = file.kind { PRIORITY } else { SUPPORTED };
    if pieces.iter().all(|piece| piece.len == 0) {
        Ok(())
    } else if flags & !supported != 0 {
        Err(Errno::EOPNOTSUPP)
    } else if flags & (APPEND | NO_APPEND) == APPEND | NO_APPEND {
        Err(Errno::EINVAL)
    } else {
        Ok(())
    }
}

fn buffer(args: &Args<'_>) -> Described {
    Described::Buffer(args.b(), args.c())
}

fn vector(args: &Args<'_>) -> Described {
    Described::Vector(args.b(), args.c())
}

/// Fails with `EFAULT` if the range is outside user space, even for 0 bytes, as Linux's `access_ok`
/// does.
pub(in super::super) fn check_user(addr: u64, len: u64) -> Result<()> {
    let end = addr.checked_add(len).filter(|&end| end <= faultless::USER_END);
    end.map(|_| ()).ok_or(Errno::EFAULT)
}

/// `read(fd, buffer, length)`.
pub fn read(args: Args<'_>) -> Result {
    read_to(args.a(), buffer(&args), None, 0)
}

/// `write(fd, buffer, length)`.
pub fn write(args: Args<'_>) -> Result {
    write_from(args.a(), buffer(&args), None, 0)
}

/// `pread64(fd, buffer, length, offset)`.
pub fn pread(args: Args<'_>) -> Result {
    read_to(args.a(), buffer(&args), at(args.d())?, 0)
}

/// `pwrite64(fd, buffer, length, offset)`.
pub fn pwrite(args: Args<'_>) -> Result {
    write_from(args.a(), buffer(&args), at(args.d())?, 0)
}

/// `readv(fd, pieces, count)`.
pub fn readv(args: Args<'_>) -> Result {
    read_to(args.a(), vector(&args), None, 0)
}

/// `writev(fd, pieces, count)`.
pub fn writev(args: Args<'_>) -> Result {
    write_from(args.a(), vector(&args), None, 0)
}

/// `preadv(fd, pieces, count, offset)`.
pub fn preadv(args: Args<'_>) -> Result {
    read_to(args.a(), vector(&args), at(args.d())?, 0)
}

/// `pwritev(fd, pieces, count, offset)`.
pub fn pwritev(args: Args<'_>) -> Result {
    write_from(args.a(), vector(&args), at(args.d())?, 0)
}

/// Returns the offset of a call with flags: -1 is the position of the file.
fn at_or_position(offset: u64) -> Result<Option<u64>> {
    if offset == u64::MAX { Ok(None) } else { at(offset) }
}

/// `preadv2(fd, pieces, count, offset, , flags)`.
pub fn preadv2(args: Args<'_>) -> Result {
    read_to(args.a(), vector(&args), at_or_position(args.d())?, args.f())
}

/// `pwritev2(fd, pieces, count, offset, , flags)`.
pub fn pwritev2(args: Args<'_>) -> Result {
    write_from(args.a(), vector(&args), at_or_position(args.d())?, args.f())
}

/// `lseek(fd, offset, whence)`.
pub fn lseek(args: Args<'_>) -> Result {
    file(args.a())?.seek(args.b() as i64, args.c() as u32)
}

/// The number of bytes copied through the kernel at a time, from one file to another.
const BOUNCE: usize = 16 << 10;

/// Returns the pipe that the stream of `file` reads from, if any.
fn source(file: &File) -> Option<Arc<Pipe>> {
    let stream: &dyn Any = &**file.stream()?;
    match stream.downcast_ref::<Socket>() {
        Some(socket) => socket.input(),
        None => pipe(file).cloned(),
    }
}

/// Moves up to `len` bytes from `source`, the pipe of `from`, to another file. Bytes that cannot be
/// written stay in the pipe.
fn drain(
    source: &Pipe,
    from: &File,
    (to, mut to_at): (&File, Option<u64>),
    len: u64,
    at_once: bool,
) -> Result {
    let len = len.min(MAX_BYTES);
    let mut bytes = Vec::try_with_capacity(BOUNCE)?;
    let mut moved = 0;
    let mut stop = Ok(0);
    while moved < len {
        let part = (len - moved).min(BOUNCE as u64) as usize;
        // After the first moved bytes, the call does not wait for more.
        let to_at_once = to.stream().is_some() && to.at_once();
        let at_once = at_once || moved != 0 || from.at_once() || to_at_once;
        // The claim ends before a wait for space in the target.
        let step = some(to, Events::OUT, at_once, || {
            let mut front = None;
            some(from, Events::IN, at_once, || {
                front = source.claim()?;
                Ok(0)
            })?;
            let Some(front) = front else { return Ok(0) };
            bytes.clear();
            front.look(part, &mut bytes)?;
            let written = Transfer::from_kernel(&bytes, |out| match to.stream() {
                Some(stream) => stream::write(&**stream, out, true),
                None => to.write(out, to_at),
            })?;
            front.consume(written);
            Ok(written)
        });
        match step {
            Ok(0) => break,
            Ok(written) => {
                moved += written;
                to_at = to_at.map(|at| at + written);
            }
            Err(errno) => {
                stop = Err(errno);
                break;
            }
        }
        // Large copies take long.
        if !cond_resched() {
            break;
        }
    }
    if moved == 0 { stop } else { Ok(moved) }
}

/// Copies up to `len` bytes from one file to another. `at_once` is set if the call does not wait
/// for a pipe. Bytes that were read and could not be written are lost only if the source is a
/// device.
fn copy(
    (from, mut from_at): (&Arc<File>, Option<u64>),
    (to, mut to_at): (&Arc<File>, Option<u64>),
    len: u64,
    at_once: bool,
) -> Result {
    if let Some(source) = source(from) {
        return drain(&source, from, (to, to_at), len, at_once);
    }
    let mut bytes = Vec::try_filled(0, BOUNCE)?;
    let len = len.min(MAX_BYTES);
    let mut moved = 0;
    let mut stop = Ok(0);
    while moved < len {
        let part = (len - moved).min(BOUNCE as u64) as usize;
        // After the first copied bytes, the call does not wait for more.
        if moved != 0 && from.stream().is_some() && !from.ready().intersects(READABLE) {
            break;
        }
        let read = match Transfer::to_kernel(&mut bytes[..part], |into| from.read(into, from_at)) {
            Ok(0) => break,
            Ok(read) => read,
            Err(errno) => {
                stop = Err(errno);
                break;
            }
        };
        let (mut done, mut written) = (0, Ok(0));
        // A write that ends early is followed by a write of the rest, which has the error.
        while done < read {
            let piece = &bytes[done as usize..read as usize];
            let at = to_at.map(|at| at + done);
            written = Transfer::from_kernel(piece, |out| match to.stream() {
                // After the first copied bytes, the call does not wait for a full pipe.
                Some(stream) if pipe(to).is_some() => {
                    let at_once = at_once || to.at_once() || moved + done != 0;
                    some(to, Events::OUT, at_once, || stream::write(&**stream, out, true))
                }
                _ => to.write(out, at),
            });
            match written {
                Ok(part) if part != 0 => done += part,
                _ => break,
            }
        }
        from_at = from_at.map(|at| at + done);
        to_at = to_at.map(|at| at + done);
        moved += done;
        if done < read {
            if from_at.is_none() && from.seekable() {
                // The position moves back over the unwritten bytes.
                let _ = from.seek(done as i64 - read as i64, linux_raw_sys::general::SEEK_CUR);
            }
            stop = written;
            break;
        }
        // Large files take long.
        if !cond_resched() {
            break;
        }
    }
    if moved == 0 { stop } else { Ok(moved) }
}

const READABLE: crate::fs::stream::Events = crate::fs::stream::Events::READ;

/// An offset in the program's memory, which a call reads and advances.
struct Offset {
    addr: u64,
    at: Option<u64>,
}

impl Offset {
    fn read(addr: u64) -> Result<Self> {
        let at = if addr == 0 { None } else { at(user::read(addr)?)? };
        Ok(Self { addr, at })
    }

    /// Returns the offset, or without one the position of `file`.
    fn or_position(&self, file: &File) -> Result {
        self.at.map_or_else(|| file.seek(0, nr::SEEK_CUR), Ok)
    }

    fn advance(&self, moved: u64) -> Result<()> {
        match self.at {
            Some(at) => Ok(user::write(self.addr, &(at + moved))?),
            None => Ok(()),
        }
    }
}

/// Checks that bytes can be moved from `from` to `to`, which must not append, unless `to` is a
/// pipe.
fn check_ends(from: &File, to: &File) -> Result<()> {
    if !from.reads() || !to.writes() {
        return Err(Errno::EBADF);
    }
    let appends = to.flags() & nr::O_APPEND != 0 && pipe(to).is_none();
    if appends { Err(Errno::EINVAL) } else { Ok(()) }
}

/// `sendfile(out, in, offset, length)`.
pub fn sendfile(args: Args<'_>) -> Result {
    let (to, from) = (file(args.a())?, file(args.b())?);
    let offset = Offset::read(args.c())?;
    check_ends(&from, &to)?;
    if offset.at.is_some() && !from.seekable() {
        return Err(Errno::ESPIPE);
    }
    let moved = copy((&from, offset.at), (&to, None), args.d(), false)?;
    offset.advance(moved)?;
    Ok(moved)
}

/// `copy_file_range(in, in_offset, out, out_offset, length, flags)`.
pub fn copy_file_range(args: Args<'_>) -> Result {
    let (from, to) = (file(args.a())?, file(args.c())?);
    if args.f() != 0 {
        return Err(Errno::EINVAL);
    }
    for file in [&from, &to] {
        match file.kind {
            Kind::Regular => {}
            Kind::Path => return Err(Errno::EBADF),
            Kind::Directory(_) => return Err(Errno::EISDIR),
            _ => return Err(Errno::EINVAL),
        }
    }
    if !from.reads() || !to.writes() || to.flags() & nr::O_APPEND != 0 {
        return Err(Errno::EBADF);
    }
    let (from_at, to_at) = (Offset::read(args.b())?, Offset::read(args.d())?);
    let (first, target) = (from_at.or_position(&from)?, to_at.or_position(&to)?);
    let limit = size::limit();
    if target >= limit {
        return Err(size::exceeded());
    }
    // As on Linux, bytes beyond the end do not overlap.
    let left = from.inode.length().saturating_sub(first);
    let len = args.e().min(MAX_BYTES).min(limit - target).min(left);
    if Arc::ptr_eq(&from.inode, &to.inode) && first.abs_diff(target) < len {
        return Err(Errno::EINVAL);
    }
    let moved = copy((&from, from_at.at), (&to, to_at.at), len, false)?;
    from_at.advance(moved)?;
    to_at.advance(moved)?;
    Ok(moved)
}

/// `splice(in, in_offset, out, out_offset, length, flags)`: one side is a pipe.
pub fn splice(args: Args<'_>) -> Result {
    let (len, flags) = (args.e(), args.f());
    if len == 0 {
        return Ok(0);
    }
    if flags & !SPLICE_FLAGS != 0 {
        return Err(Errno::EINVAL);
    }
    let (from, to) = (file(args.a())?, file(args.c())?);
    check_ends(&from, &to)?;
    if from.stream().is_none() && to.stream().is_none() {
        return Err(Errno::EINVAL);
    }
    for (file, offset) in [(&from, args.b()), (&to, args.d())] {
        if offset != 0 && !file.seekable() {
            return Err(if pipe(file).is_some() { Errno::ESPIPE } else { Errno::EINVAL });
        }
    }
    let (from_at, to_at) = (Offset::read(args.b())?, Offset::read(args.d())?);
    let at_once = flags & SPLICE_NONBLOCK != 0;
    let moved = copy((&from, from_at.at), (&to, to_at.at), len, at_once)?;
    from_at.advance(moved)?;
    to_at.advance(moved)?;
    Ok(moved)
}

/// Flags of `splice` and similar calls: all, and `SPLICE_F_NONBLOCK`.
const SPLICE_FLAGS: u64 = 15;
const SPLICE_NONBLOCK: u64 = 2;

/// Returns the pipe if `file` is an end of a pipe.
fn pipe(file: &File) -> Option<&Arc<Pipe>> {
    let end: &dyn Any = &**file.stream()?;
    end.downcast_ref::<End>().map(|end| &end.pipe)
}

/// Moves the bytes that can be moved without waiting; waits for the first bytes unless `at_once`.
fn some(file: &File, wanted: Events, at_once: bool, mut act: impl FnMut() -> Result) -> Result {
    loop {
        match (act(), file.stream()) {
            (Err(Errno::EAGAIN), Some(stream)) if !at_once => stream::wait(&**stream, wanted)?,
            (result, _) => return result,
        }
    }
}

/// `vmsplice(fd, pieces, count, flags)`: like `writev` to a pipe, or `readv` from a pipe, as far
/// as the bytes fit.
pub fn vmsplice(args: Args<'_>) -> Result {
    let (file, flags) = (file(args.a())?, args.d());
    if flags & !SPLICE_FLAGS != 0 {
        return Err(Errno::EINVAL);
    }
    let pieces = pieces(args.b(), args.c())?;
    let mut memory = Transfer::of_user(&pieces);
    if memory.left() == 0 {
        return Ok(0);
    }
    let (Some(stream), Some(_)) = (file.stream(), pipe(&file)) else { return Err(Errno::EBADF) };
    let at_once = flags & SPLICE_NONBLOCK != 0 || file.at_once();
    if file.writes() {
        some(&file, Events::OUT, at_once, || stream::write(&**stream, &mut memory, true))
    } else {
        stream::read(&**stream, &mut memory, at_once)
    }
}

/// `tee(in, out, length, flags)`: copies the contents of one pipe to another, without consuming
/// the contents.
pub fn tee(args: Args<'_>) -> Result {
    let (from, to, flags) = (file(args.a())?, file(args.b())?, args.d());
    if flags & !SPLICE_FLAGS != 0 {
        return Err(Errno::EINVAL);
    }
    if args.c() == 0 {
        return Ok(0);
    }
    if !from.reads() || !to.writes() {
        return Err(Errno::EBADF);
    }
    let (Some(source), Some(target)) = (pipe(&from), pipe(&to)) else { return Err(Errno::EINVAL) };
    let Some(stream) = to.stream().filter(|_| !Arc::ptr_eq(source, target)) else {
        return Err(Errno::EINVAL);
    };
    let at_once = flags & SPLICE_NONBLOCK != 0;
    let len = args.c().min(source.capacity() as u64) as usize;
    // The contents may change during the wait for space.
    some(&to, Events::OUT, at_once, || {
        let mut bytes = Vec::new();
        some(&from, Events::IN, at_once, || source.look(len, &mut bytes))?;
        Transfer::from_kernel(&bytes, |bytes| stream::write(&**stream, bytes, true))
    })
}
