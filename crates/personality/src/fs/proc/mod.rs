//! `/proc`: the state of the kernel, as names and texts in Linux's formats.
//!
//! A [`Node`] only identifies a file; the contents are made on each read. The [settings] of
//! `/proc/sys` are attributes in directories in memory.

mod compact;
pub(super) mod memory;
mod oom;
pub(super) mod pages;
mod process;
mod settings;
mod smaps;
mod switch;
mod system;

use super::directory::{self, Directory, Item};
use super::inode::{Body, Inode, Name, Target};
use super::live::Live;
use super::transfer::Transfer;
use crate::errno::{Errno, Result};
use crate::task::ids::may_inspect;
use crate::task::process::{TABLE, find};
use crate::task::{Process, Thread, current};
use core::fmt::Write;
use faultless::try_box;
use faultless_bare::heap::{FailNth, try_push};
use faultless_collections::{Arc, String, Vec};
use linux_raw_sys::general as linux;

/// Writes a text about the whole system.
type SystemText = fn(&mut Text) -> core::fmt::Result;
/// Writes a text about a process or thread.
type ProcessText = fn(&Subject, &mut Text) -> Result<()>;

/// A text being written. Programs determine the length, so the text may be larger than the heap. In
/// this case the rest is dropped, and the read of the text fails.
#[derive(Debug, Default)]
pub(super) struct Text {
    text: String,
    cut: bool,
}

impl Text {
    /// Returns the output of `make` as bytes.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(super) fn made(make: impl FnOnce(&mut Self) -> core::fmt::Result) -> Result<Vec<u8>> {
        if faultless_bare::heap::tight() {
            return Err(Errno::ENOMEM);
        }
        let mut text = Self::default();
        // Writing fails only if the text is cut.
        make(&mut text).map_err(|_| Errno::ENOMEM)?;
        Ok(text.finish()?.into_bytes())
    }

    fn push_str(&mut self, text: &str) {
        // `Text` records an error.
        let _ = self.write_str(text);
    }

    fn finish(self) -> Result<String> {
        if self.cut { Err(Errno::ENOMEM) } else { Ok(self.text) }
    }
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        let fits = text.len() <= self.text.room();
        self.cut |= !fits && faultless_bare::heap::tight();
        self.cut = self.cut || self.text.try_push_str(text).is_err();
        if self.cut { Err(core::fmt::Error) } else { Ok(()) }
    }
}

/// A process, and one of its threads.
pub(super) struct Subject {
    process: Arc<Process>,
    /// The thread of the path, or the first thread.
    thread: Option<Arc<Thread>>,
    /// Set if the path names a thread.
    of_thread: bool,
}

/// A part of `/proc`.
#[derive(Debug)]
pub enum Node {
    /// `/proc`, with its permanent entries.
    Root(Directory),
    /// A text about the system, by its index in the table of texts.
    System(usize),
    /// `/proc/self`, and with `true` `/proc/thread-self`.
    Myself(bool),
    /// `/proc/PID`
    Process(u32),
    /// `/proc/PID/task`
    Tasks(u32),
    /// `/proc/PID/task/TID`
    Thread(u32, u32),
    /// A text about a process or thread, by its index in the table of texts.
    Text(u32, Option<u32>, usize),
    /// `cwd`, `root` or `exe` of a process.
    Way(u32, Way),
    /// `/proc/PID/fd`
    Descriptors(u32),
    /// `/proc/PID/pagemap`
    Pages(u32),
    /// `/proc/PID/mem`
    Memory(u32),
    /// `/proc/PID/fd/FD`
    Descriptor(u32, i32),
}

/// The links of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The working directory.
    Directory,
    /// Its root.
    Root,
    /// Its program.
    Program,
}

const WAYS: [(&str, Way); 3] =
    [("cwd", Way::Directory), ("root", Way::Root), ("exe", Way::Program)];

/// A new `/proc`.
///
/// # Errors
/// `ENOMEM`.
pub(super) fn root() -> Result<Arc<Inode>> {
    let node = try_box(Node::Root(Directory::default()))?;
    let root = Inode::numbered(2, Body::Proc(node), 0o555)?;
    if let Body::Proc(node) = &root.body
        && let Some(fixed) = node.fixed()
    {
        directory::put(fixed, &root, b"sys", &settings::all()?)?;
    }
    Ok(root)
}

/// `/proc` in the tree.
fn home() -> Option<Arc<Inode>> {
    super::root::root().lookup(b"proc").ok()
}

fn number(name: &[u8]) -> Option<u32> {
    let text = core::str::from_utf8(name).ok()?;
    if text.starts_with('+') || text.len() > 1 && text.starts_with('0') {
        return None;
    }
    text.parse().ok()
}

fn decimal(number: impl core::fmt::Display) -> Result<Name> {
    Ok(String::try_format(format_args!("{number}"))?.into_bytes())
}

fn process(pid: u32) -> Result<Arc<Process>> {
    find(pid).ok_or(Errno::ENOENT)
}

fn inode(node: Node) -> Result<Arc<Inode>> {
    let number = node.number();
    let subject = node.subject().and_then(find);
    let is_open = matches!(node, Node::Process(_) | Node::Tasks(_) | Node::Thread(..));
    let owner = match subject {
        Some(process) if is_open || process.ids.is_dumpable() => {
            [process.ids.user().effective, process.ids.group().effective]
        }
        _ => [0; 2],
    };
    let mode = match node.kind() {
        linux::S_IFLNK => node.open_mode().unwrap_or(0o777),
        linux::S_IFDIR if matches!(node, Node::Descriptors(_)) => 0o500,
        linux::S_IFDIR => 0o555,
        _ if node.memory_of().is_some() => 0o600,
        _ => node.text_mode(),
    };
    let is_directory = node.kind() == linux::S_IFDIR;
    let inode = Inode::numbered(number, Body::Proc(try_box(node)?), mode)?;
    let [uid, gid] = owner;
    inode.change(|meta| {
        (meta.uid, meta.gid) = (uid, gid);
        if is_directory {
            meta.links = 2;
        }
    });
    Ok(inode)
}

/// Adds a node to a listing.
fn add(items: &mut Vec<Item>, node: Node) -> Result<()> {
    let item = Item { name: node.name()?, number: node.number(), kind: node.kind() };
    Ok(try_push(items, item)?)
}

impl Node {
    /// Returns the mode of a file, as on Linux.
    fn text_mode(&self) -> u32 {
        match *self {
            Self::Pages(_) => 0o400,
            Self::Text(_, _, at) => match process::TEXTS[at].0 {
                "environ" | "io" | "personality" => 0o400,
                "comm" | "oom_score_adj" | "oom_adj" | "fail-nth" | "sched" => 0o644,
                "clear_refs" => 0o200,
                _ => 0o444,
            },
            _ => 0o444,
        }
    }

    /// Returns the mode of a descriptor's link, by the access of its open file.
    fn open_mode(&self) -> Option<u32> {
        let Self::Descriptor(pid, fd) = *self else { return None };
        let file = find(pid)?.files().get(fd).ok()?;
        let read = if file.reads() { 0o500 } else { 0 };
        Some(read | if file.writes() { 0o300 } else { 0 })
    }

    /// Returns the process described by this node.
    const fn subject(&self) -> Option<u32> {
        match *self {
            Self::Process(pid)
            | Self::Tasks(pid)
            | Self::Thread(pid, _)
            | Self::Text(pid, ..)
            | Self::Way(pid, _)
            | Self::Descriptors(pid)
            | Self::Pages(pid)
            | Self::Memory(pid)
            | Self::Descriptor(pid, _) => Some(pid),
            Self::Root(_) | Self::System(_) | Self::Myself(_) => None,
        }
    }

    /// Checks that the caller may inspect the process described by this node.
    fn inspect(&self) -> Result<()> {
        let subject = self.subject().and_then(find);
        let may = subject.is_none_or(|process| may_inspect(&process));
        if may { Ok(()) } else { Err(Errno::EACCES) }
    }

    /// Returns the inode number, unique at any time.
    fn number(&self) -> u64 {
        let of = |id: u32, rest: u64| 1 << 62 | u64::from(id) << 32 | rest;
        match *self {
            Self::Root(_) => 2,
            Self::System(at) => of(0, at as u64),
            Self::Myself(of_thread) => of(0, 1000 + u64::from(of_thread)),
            Self::Process(pid) => of(pid, 0),
            Self::Tasks(pid) => of(pid, 1),
            Self::Descriptors(pid) => of(pid, 2),
            Self::Way(pid, way) => of(pid, 3 + way as u64),
            Self::Thread(_, tid) => of(tid, 6),
            Self::Pages(pid) => of(pid, 7),
            Self::Memory(pid) => of(pid, 8),
            Self::Text(pid, None, at) => of(pid, 1000 + at as u64),
            Self::Text(_, Some(tid), at) => of(tid, 2000 + at as u64),
            Self::Descriptor(pid, fd) => of(pid, 10_000 + fd as u64),
        }
    }
}

impl Live for Node {
    fn kind(&self) -> u32 {
        match self {
            Self::System(_) | Self::Text(..) | Self::Pages(_) | Self::Memory(_) => linux::S_IFREG,
            Self::Myself(_) | Self::Way(..) | Self::Descriptor(..) => linux::S_IFLNK,
            _ => linux::S_IFDIR,
        }
    }

    fn is_always_permitted(&self) -> bool {
        // As on Linux, a process may always use its own descriptors.
        matches!(*self, Self::Descriptors(pid) if pid == current().process.pid)
    }

    fn memory_of(&self) -> Option<u32> {
        match *self {
            Self::Memory(pid) => Some(pid),
            _ => None,
        }
    }

    fn is_by_address(&self) -> bool {
        matches!(self, Self::Memory(_) | Self::Pages(_))
    }

    fn permit(&self, _reads: bool, _writes: bool) -> Result<()> {
        let private = match *self {
            Self::Text(_, _, at) => process::PRIVATE.contains(&process::TEXTS[at].0),
            Self::Pages(_) | Self::Memory(_) => true,
            _ => false,
        };
        if private { self.inspect() } else { Ok(()) }
    }

    fn name(&self) -> Result<Name> {
        let name = match *self {
            Self::Root(_) => "",
            Self::System(at) => system::TEXTS[at].0,
            Self::Myself(false) => "self",
            Self::Myself(true) => "thread-self",
            Self::Tasks(_) => "task",
            Self::Text(_, _, at) => process::TEXTS[at].0,
            Self::Way(_, way) => WAYS[way as usize].0,
            Self::Descriptors(_) => "fd",
            Self::Pages(_) => "pagemap",
            Self::Memory(_) => "mem",
            Self::Process(number) | Self::Thread(_, number) => return decimal(number),
            Self::Descriptor(_, fd) => return decimal(fd),
        };
        Ok(Name::try_from_slice(name.as_bytes())?)
    }

    fn parent(&self) -> Result<Option<Arc<Inode>>> {
        let parent = match *self {
            Self::Root(_) => return Ok(None),
            Self::System(_) | Self::Myself(_) | Self::Process(_) => return Ok(home()),
            Self::Tasks(pid)
            | Self::Way(pid, _)
            | Self::Descriptors(pid)
            | Self::Pages(pid)
            | Self::Memory(pid) => Self::Process(pid),
            Self::Text(pid, None, _) => Self::Process(pid),
            Self::Text(pid, Some(tid), _) => Self::Thread(pid, tid),
            Self::Thread(pid, _) => Self::Tasks(pid),
            Self::Descriptor(pid, _) => Self::Descriptors(pid),
        };
        inode(parent).map(Some)
    }

    fn target(&self) -> Result<Target> {
        if let Self::Way(..) | Self::Descriptor(..) = self {
            self.inspect()?;
        }
        Ok(match *self {
            Self::Myself(false) => Target::Path(decimal(current().process.pid)?),
            Self::Myself(true) => {
                let (pid, tid) = (current().process.pid, current().tid);
                let path = String::try_format(format_args!("{pid}/task/{tid}"))?;
                Target::Path(path.into_bytes())
            }
            Self::Way(pid, Way::Program) => {
                let memory = process(pid)?.memory().ok_or(Errno::ENOENT)?;
                let path = memory.image.lock().path.try_clone()?;
                Target::Path(path.into_bytes())
            }
            Self::Way(pid, Way::Root) => Target::Inode(process(pid)?.files().start().root),
            Self::Way(pid, Way::Directory) => Target::Inode(process(pid)?.files().start().here),
            Self::Descriptor(pid, fd) => {
                let file = process(pid)?.files().get(fd).map_err(|_| Errno::ENOENT)?;
                Target::Inode(file.inode.clone())
            }
            _ => return Err(Errno::EINVAL),
        })
    }

    fn lookup(&self, name: &[u8]) -> Result<Arc<Inode>> {
        let node = match self {
            Self::Root(fixed) => {
                if let Some(inode) = fixed.get(name) {
                    return Ok(inode);
                }
                let at = system::TEXTS.iter().position(|text| text.0.as_bytes() == name);
                match name {
                    b"self" => Self::Myself(false),
                    b"thread-self" => Self::Myself(true),
                    _ if at.is_some() => Self::System(at.unwrap_or_default()),
                    _ => {
                        let pid = number(name).ok_or(Errno::ENOENT)?;
                        process(pid)?;
                        Self::Process(pid)
                    }
                }
            }
            &Self::Process(pid) => {
                process(pid)?;
                match name {
                    b"task" => Self::Tasks(pid),
                    b"fd" => Self::Descriptors(pid),
                    b"pagemap" => Self::Pages(pid),
                    b"mem" => Self::Memory(pid),
                    _ => match WAYS.iter().find(|way| way.0.as_bytes() == name) {
                        Some(&(_, way)) => Self::Way(pid, way),
                        None => Self::Text(pid, None, text_named(name)?),
                    },
                }
            }
            &Self::Tasks(pid) => {
                let tid = number(name).ok_or(Errno::ENOENT)?;
                thread(&*process(pid)?, tid)?;
                Self::Thread(pid, tid)
            }
            &Self::Thread(pid, tid) => {
                thread(&*process(pid)?, tid)?;
                Self::Text(pid, Some(tid), text_named(name)?)
            }
            &Self::Descriptors(pid) => {
                self.inspect()?;
                let fd = number(name).and_then(|fd| i32::try_from(fd).ok()).ok_or(Errno::ENOENT)?;
                process(pid)?.files().get(fd).map_err(|_| Errno::ENOENT)?;
                Self::Descriptor(pid, fd)
            }
            _ => return Err(Errno::ENOTDIR),
        };
        inode(node)
    }

    fn list(&self, items: &mut Vec<Item>) -> Result<()> {
        let texts = |pid, tid| (0..process::TEXTS.len()).map(move |at| Self::Text(pid, tid, at));
        match self {
            Self::Root(fixed) => {
                fixed.list(items)?;
                let systems = (0..system::TEXTS.len()).map(Self::System);
                let mut all = [false, true].map(Self::Myself).into_iter().chain(systems);
                all.try_for_each(|node| add(items, node))?;
                let table = TABLE.lock();
                let mut pids = table.processes.keys();
                pids.try_for_each(|&pid| add(items, Self::Process(pid)))?;
            }
            &Self::Process(pid) => {
                process(pid)?;
                let others =
                    [Self::Tasks(pid), Self::Descriptors(pid), Self::Pages(pid), Self::Memory(pid)];
                let ways = WAYS.iter().map(|&(_, way)| Self::Way(pid, way));
                let mut all = texts(pid, None).chain(others).chain(ways);
                all.try_for_each(|node| add(items, node))?;
            }
            &Self::Tasks(pid) => {
                let process = process(pid)?;
                let threads = process.threads.lock();
                let mut tids = threads.iter().map(|thread| thread.tid);
                tids.try_for_each(|tid| add(items, Self::Thread(pid, tid)))?;
            }
            &Self::Thread(pid, tid) => {
                texts(pid, Some(tid)).try_for_each(|node| add(items, node))?;
            }
            &Self::Descriptors(pid) => {
                self.inspect()?;
                process(pid)?.files().each_open(|fd| add(items, Self::Descriptor(pid, fd)))?;
            }
            _ => return Err(Errno::ENOTDIR),
        }
        Ok(())
    }

    fn text(&self) -> Result<Vec<u8>> {
        // Again: another process may have the number now.
        self.permit(true, false)?;
        match *self {
            Self::System(at) => Text::made(system::TEXTS[at].1),
            Self::Text(pid, tid, at) => {
                let process = find(pid).ok_or(Errno::ESRCH)?;
                let thread = match tid {
                    Some(tid) => Some(thread(&process, tid).map_err(|_| Errno::ESRCH)?),
                    None => {
                        let threads = process.threads.lock();
                        threads.iter().find(|thread| thread.tid == pid).or(threads.first()).cloned()
                    }
                };
                let subject = Subject { process, thread, of_thread: tid.is_some() };
                let mut told = Ok(());
                let text = Text::made(|text| {
                    told = process::TEXTS[at].1(&subject, text);
                    Ok(())
                });
                told.and(text)
            }
            _ => Err(Errno::EINVAL),
        }
    }

    fn write(&self, from: &mut Transfer<'_>) -> Result {
        let &Self::Text(pid, tid, at) = self else {
            // Linux has a separate error for texts about the system.
            return Err(if let Self::System(_) = self { Errno::EIO } else { Errno::EINVAL });
        };
        let process = || find(pid).ok_or(Errno::ESRCH);
        match process::TEXTS[at].0 {
            "comm" => {
                let mut name = [0; 15];
                let taken = from.take_bytes(&mut name) as usize;
                let name = String::try_from_utf8_lossy(name[..taken].trim_ascii_end())?;
                *process()?.name.lock() = name;
            }
            "oom_score_adj" => return oom::write(&*process()?, false, from),
            "oom_adj" => return oom::write(&*process()?, true, from),
            "fail-nth" => {
                let mut text = [0; 20];
                let taken = from.take_bytes(&mut text) as usize;
                set_fail_nth(tid, &text[..taken])?;
            }
            _ => return Err(Errno::EINVAL),
        }
        from.skip(from.left());
        from.result()
    }

    fn fixed(&self) -> Option<&Directory> {
        match self {
            Self::Root(fixed) => Some(fixed),
            _ => None,
        }
    }

    fn read(&self, to: &mut Transfer<'_>, offset: u64) -> Option<Result> {
        match self {
            Self::Pages(pid) => Some(self.inspect().and_then(|()| pages::read(*pid, to, offset))),
            _ => None,
        }
    }
}

/// Makes an allocation of the running thread fail. With a `+` after the number, all later
/// allocations fail, too. Allowed only if the kernel's command line enables this test.
fn set_fail_nth(tid: Option<u32>, text: &[u8]) -> Result<()> {
    if !faultless_bare::boot::is_said("fail-nth") || tid.is_some_and(|tid| tid != current().tid) {
        return Err(Errno::EPERM);
    }
    let text = text.trim_ascii_end();
    let (text, all) = match text.strip_suffix(b"+") {
        Some(text) => (text, FailNth::ALL),
        None => (text, 0),
    };
    let nth: u32 =
        core::str::from_utf8(text).ok().and_then(|it| it.parse().ok()).ok_or(Errno::EINVAL)?;
    let old = FailNth(if nth == 0 { 0 } else { u64::from(nth) | all }).set();
    current().fail_left.set(old.0 & !FailNth::ALL);
    Ok(())
}

fn thread(process: &Process, tid: u32) -> Result<Arc<Thread>> {
    let threads = process.threads.lock();
    threads.iter().find(|thread| thread.tid == tid).cloned().ok_or(Errno::ENOENT)
}

fn text_named(name: &[u8]) -> Result<usize> {
    process::TEXTS.iter().position(|text| text.0.as_bytes() == name).ok_or(Errno::ENOENT)
}

/// Writes one line `name:\tvalue` of a status file.
fn field(text: &mut Text, name: &str, value: impl core::fmt::Display) {
    // `Text` records an error.
    let _ = writeln!(text, "{name}:\t{value}");
}
