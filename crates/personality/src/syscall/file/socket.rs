//! Connected pairs of sockets, as bidirectional pipes.

use super::open::add_pair;
use super::rw::pieces;
use super::{Args, Errno, Result, file};
use crate::fs::file::Kind;
use crate::fs::inode::Body;
use crate::fs::pipe::Socket;
use crate::fs::stream::{self, Stream};
use crate::fs::{File, Inode, Piece, Transfer};
use crate::syscall::args::{Entry, calls};
use core::any::Any;
use faultless_bare::arch::user;
use faultless_collections::{Arc, Vec};
use linux_raw_sys::general as nr;

/// The system calls of this file, by number.
pub(in crate::syscall) const CALLS: &[Entry] = calls![
    (nr::__NR_socketpair, socketpair),
    (nr::__NR_sendto, sendto),
    (nr::__NR_recvfrom, recvfrom),
    (nr::__NR_sendmsg, sendmsg),
    (nr::__NR_recvmsg, recvmsg),
    (nr::__NR_shutdown, shutdown),
];

const AF_UNIX: u64 = 1;
const SOCK_STREAM: u32 = 1;
/// `MSG_DONTWAIT`
const AT_ONCE: u64 = 0x40;
/// `MSG_NOSIGNAL`
const NO_SIGNAL: u64 = 0x4000;
/// `MSG_WAITALL`, `MSG_MORE`, `MSG_CMSG_CLOEXEC`: flags without effect.
const HARMLESS: u64 = 0x100 | 0x8000 | 0x4000_0000;

/// `socketpair(family, type, protocol, sockets)`.
pub fn socketpair(args: Args<'_>) -> Result {
    let flags = args.b() as u32 & (nr::O_CLOEXEC | nr::O_NONBLOCK);
    if args.a() != AF_UNIX {
        return Err(Errno::EAFNOSUPPORT);
    }
    if args.b() as u32 & !flags != SOCK_STREAM {
        return Err(Errno::EOPNOTSUPP);
    }
    let status = flags & nr::O_NONBLOCK | nr::O_RDWR;
    let [first, second] = Socket::try_pair()?;
    let file = |socket: Arc<Socket>| -> Result<Arc<File>> {
        let inode = Inode::try_new(Body::Anonymous("socket"), 0o777)?;
        File::try_new(inode, Kind::Stream(stream::erase(socket)), status)
    };
    add_pair([file(first)?, file(second)?], flags & nr::O_CLOEXEC != 0, args.d())
}

/// The stream of a socket.
fn socket(file: &File) -> Result<(&Arc<dyn Stream>, &Socket)> {
    let stream = file.stream().ok_or(Errno::ENOTSOCK)?;
    let any: &dyn Any = &**stream;
    Ok((stream, any.downcast_ref().ok_or(Errno::ENOTSOCK)?))
}

fn send(fd: u64, pieces: &[Piece], flags: u64) -> Result {
    let file = file(fd)?;
    let (stream, _) = socket(&file)?;
    if flags & !(AT_ONCE | NO_SIGNAL | HARMLESS) != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    let at_once = file.at_once() || flags & AT_ONCE != 0;
    let mut from = Transfer::of_user(pieces);
    stream::write_with(&**stream, &mut from, at_once, flags & NO_SIGNAL == 0)
}

fn receive(fd: u64, pieces: &[Piece], flags: u64) -> Result {
    let file = file(fd)?;
    let (stream, _) = socket(&file)?;
    if flags & !(AT_ONCE | NO_SIGNAL | HARMLESS) != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    let at_once = file.at_once() || flags & AT_ONCE != 0;
    stream::read(&**stream, &mut Transfer::of_user(pieces), at_once)
}

/// `sendto(fd, buffer, length, flags, , )`.
pub fn sendto(args: Args<'_>) -> Result {
    if args.e() != 0 {
        return Err(Errno::EISCONN);
    }
    send(args.a(), &[Piece { base: args.b(), len: args.c() }], args.d())
}

/// `recvfrom(fd, buffer, length, flags, , )`.
pub fn recvfrom(args: Args<'_>) -> Result {
    if args.f() != 0 {
        // The peer has no name.
        user::write(args.f(), &0u32)?;
    }
    receive(args.a(), &[Piece { base: args.b(), len: args.c() }], args.d())
}

/// Reads the pieces of a message. The name is ignored; `sendmsg` checks the control data.
fn message(addr: u64) -> Result<Vec<Piece>> {
    let [_, _, at, count]: [u64; 4] = user::read(addr)?;
    pieces(at, count)
}

/// `sendmsg(fd, message, flags)`.
pub fn sendmsg(args: Args<'_>) -> Result {
    socket(&*file(args.a())?)?;
    let [_, control_len]: [u64; 2] = user::read(args.b().wrapping_add(32))?;
    if control_len != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    send(args.a(), &message(args.b())?, args.c())
}

/// `recvmsg(fd, message, flags)`.
pub fn recvmsg(args: Args<'_>) -> Result {
    socket(&*file(args.a())?)?;
    let result = receive(args.a(), &message(args.b())?, args.c())?;
    // No name, no control data, no flags.
    user::write(args.b().wrapping_add(8), &0u32)?;
    user::write(args.b().wrapping_add(40), &[0u64; 2])?;
    Ok(result)
}

/// `shutdown(fd, how)`.
pub fn shutdown(args: Args<'_>) -> Result {
    let file = file(args.a())?;
    let (_, socket) = socket(&file)?;
    match args.b() {
        how @ 0..=2 => socket.shut_down(how != 1, how != 0),
        _ => return Err(Errno::EINVAL),
    }
    Ok(0)
}
