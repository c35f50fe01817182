//! The initial files: the files of the archive, and files that programs expect on any Linux.

use super::attribute::Attribute;
use super::device::Device;
use super::directory::{self, Directory};
use super::inode::{Body, Inode, Name};
use super::listing::Listing;
use super::nodes;
use super::path::Step;
use super::pipe::{self, Pipe};
use super::proc;
use super::regular::MAX_LENGTH;
use super::root::set_root;
use super::set::list;
use super::transfer::Transfer;
use super::walk::{Links, Start, walk};
use crate::errno::{Errno, Result};
use core::fmt::{self, Display};
use cpio_reader::{Entry, Mode, iter_files};
use faultless::Setting;
use faultless_bare::percpu;
use faultless_bare::report;
use faultless_collections::{Arc, Map, String, Vec};
use linux_raw_sys::general as linux;

/// Makes the file system from a cpio archive in the "newc" format. Called once, before any thread
/// runs.
///
/// A file that cannot be made is reported and skipped.
///
/// # Errors
/// The archive is damaged, or names files that are not on the disk; the place is reported.
pub fn mount(archive: &[u8]) -> core::result::Result<(), &'static str> {
    let on_disk = Listing::read(archive)?;
    let root = Inode::numbered(1, Body::Directory(Directory::default()), 0o755);
    let root = root.map_err(|_| NO_MEMORY)?;
    root.change(|meta| meta.links = 2);
    // The root is its own parent.
    root.enter(&root, Name::new());
    set_root(root.clone()).map_err(|_| NO_MEMORY)?;
    let start = Start { root: root.clone(), here: root };
    let result = unpack(&start, archive, &on_disk);
    add_expected(&start).map_err(|_| NO_MEMORY)?;
    limit_files();
    result
}

/// Limits the resident pages of files to half of the memory that remains after unpacking the
/// archive, like Linux's `tmpfs`, unless the command line sets the knob.
fn limit_files() {
    let vm = percpu::vm();
    if vm.knobs().file_limit() >= vm.total_frames() {
        let seeded = vm.charged_pages();
        let rest = vm.total_frames().saturating_sub(seeded);
        vm.set(Setting::FileLimit(seeded + rest / 2));
    }
}

const NO_MEMORY: &str = "out of memory";

/// The reason for skipping a file.
fn why(errno: Errno) -> &'static str {
    if matches!(errno, Errno::ENOMEM | Errno::ENOSPC) { NO_MEMORY } else { errno.name() }
}

fn unpack(
    start: &Start,
    archive: &[u8],
    on_disk: &Listing<'_>,
) -> core::result::Result<(), &'static str> {
    let mut end = 0;
    let mut last = "the start";
    // Other names of a file, with the same number, come before the entry with its bytes.
    let mut linked: Map<(u32, u32, u32), Arc<Inode>> = Map::new();
    for entry in iter_files(archive) {
        if let Err(errno) = unpack_one(start, &entry, on_disk, &mut linked) {
            report!("message the file {:?} is omitted ({})", entry.name(), why(errno));
        }
        last = entry.name();
        let after = entry.file().as_ptr_range().end as usize - archive.as_ptr() as usize;
        end = after.next_multiple_of(4);
    }
    // The reader stops at a damaged entry, as at the last one.
    let rest = archive.get(end..).unwrap_or_default();
    let is_end = rest.get(..6) == Some(b"070701") && rest.get(110..120) == Some(b"TRAILER!!!");
    if archive.is_empty() || is_end {
        return Ok(());
    }
    report!("message the archive of files is damaged after {last:?}, at byte {end}");
    Err("the archive is damaged")
}

fn unpack_one(
    start: &Start,
    entry: &Entry<'_>,
    on_disk: &Listing<'_>,
    linked: &mut Map<(u32, u32, u32), Arc<Inode>>,
) -> Result<()> {
    let mode = entry.mode().bits();
    let name = entry.name().as_bytes();
    if name.split(|&byte| byte == b'/').any(|part| part == b"..") {
        return Err(Errno::EINVAL);
    }
    if mode & linux::S_IFMT == linux::S_IFDIR {
        let made = make_directories(start, name)?;
        made.change(|meta| meta.mode = mode & 0o7777);
        return Ok(());
    }
    let key = (entry.devmajor().unwrap_or(0), entry.devminor().unwrap_or(0), entry.ino());
    let inode = match mode & linux::S_IFMT {
        linux::S_IFREG if entry.nlink() > 1 && linked.contains_key(&key) => {
            let inode = linked.get(&key).ok_or(Errno::ENOENT)?.clone();
            fill(&inode, entry.file())?;
            let (parent, name) = place(start, name)?;
            return directory::link_again(&parent, &name, &inode);
        }
        linux::S_IFREG => {
            let inode = match on_disk.extent(name)? {
                Some(extent) => Inode::try_new_on_disk(mode, extent)?,
                None => Inode::try_new_regular(mode)?,
            };
            fill(&inode, entry.file())?;
            if entry.nlink() > 1 {
                linked.try_insert(key, inode.clone())?;
            }
            inode
        }
        linux::S_IFLNK => Inode::try_new(Body::Link(Vec::try_from_slice(entry.file())?), 0o777)?,
        linux::S_IFIFO => Inode::try_new(Body::Pipe(Pipe::try_new(pipe::Kind::Named)?), mode)?,
        linux::S_IFCHR if entry.mode().contains(Mode::CHARACTER_SPECIAL_DEVICE) => {
            let numbers = (entry.rdevmajor().unwrap_or(0), entry.rdevminor().unwrap_or(0));
            let device = Device::numbered(numbers.0, numbers.1).ok_or(Errno::ENODEV)?;
            Inode::try_new(Body::Device(device), mode)?
        }
        _ => return Err(Errno::EINVAL),
    };
    let seconds = u64::from(u32::try_from(entry.mtime()).unwrap_or(0));
    let (parent, name) = place(start, name)?;
    // The later of two entries with the same name wins.
    match directory::unlink(&parent, &name, false, |_| Ok(())) {
        Ok(()) | Err(Errno::ENOENT) => {}
        Err(errno) => return Err(errno),
    }
    directory::link(&parent, &name, &inode)?;
    inode.change(|meta| meta.modified = seconds * 1_000_000_000);
    Ok(())
}

fn fill(inode: &Inode, bytes: &[u8]) -> Result<()> {
    let regular = inode.regular().ok_or(Errno::EINVAL)?;
    if bytes.is_empty() {
        return Ok(());
    }
    Transfer::from_kernel(bytes, |from| regular.write(from, Some(0), u64::MAX, MAX_LENGTH))?;
    if regular.length() == bytes.len() as u64 { Ok(()) } else { Err(Errno::ENOSPC) }
}

/// The directory and the name of a new file.
fn place(start: &Start, path: &[u8]) -> Result<(Arc<Inode>, Name)> {
    let name = super::file_name(path);
    let parent = make_directories(start, &path[..path.len() - name.len()])?;
    Ok((parent, Vec::try_from_slice(name)?))
}

/// Returns the directory at `path`; makes missing directories.
fn make_directories(start: &Start, path: &[u8]) -> Result<Arc<Inode>> {
    let mut here = start.root.clone();
    let mut rest = path;
    while let Some(step) = Step::of(rest) {
        let from = Start { root: start.root.clone(), here: here.clone() };
        let found = walk(&from, step.name, Links::Follow)?;
        here = match found.inode {
            Some(inode) if inode.is_directory() => inode,
            Some(_) => return Err(Errno::ENOTDIR),
            None => directory::make_directory(&found.directory, &found.name, 0o755)?,
        };
        rest = step.rest;
    }
    Ok(here)
}

/// Adds the files that programs expect, unless the archive contains them.
fn add_expected(start: &Start) -> Result<()> {
    use Device::{Console, Full, Null, Random, Zero};
    let add = |path: &str, made: Result<Arc<Inode>>| {
        let added = made.and_then(|inode| {
            let (parent, name) = place(start, path.as_bytes())?;
            directory::link(&parent, &name, &inode)
        });
        if let Err(errno) = added
            && errno != Errno::EEXIST
        {
            report!("message {path} is omitted ({})", why(errno));
        }
    };
    let directory = |path: &str, mode: u32| {
        let body = Body::Directory(Directory::default());
        add(path, Inode::try_new(body, mode));
    };
    let text = |path: &str, text: &str| {
        let made = Inode::try_new_regular(0o644).and_then(|inode| {
            fill(&inode, text.as_bytes())?;
            Ok(inode)
        });
        add(path, made);
    };
    let link = |path: &str, to: &str| {
        let to = Vec::try_from_slice(to.as_bytes());
        let made = to.map_err(Errno::from).and_then(|to| Inode::try_new(Body::Link(to), 0o777));
        add(path, made);
    };
    directory("tmp", 0o1777);
    directory("dev", 0o755);
    directory("dev/shm", 0o1777);
    directory("root", 0o700);
    let devices = [
        ("dev/null", Null),
        ("dev/zero", Zero),
        ("dev/full", Full),
        ("dev/random", Random),
        ("dev/urandom", Random),
        ("dev/tty", Console),
        ("dev/console", Console),
    ];
    for (path, device) in devices {
        add(path, Inode::try_new(Body::Device(device), 0o666));
    }
    link("dev/fd", "/proc/self/fd");
    link("dev/stdin", "/proc/self/fd/0");
    link("dev/stdout", "/proc/self/fd/1");
    link("dev/stderr", "/proc/self/fd/2");
    // An archive of a root file system has an empty mount point there.
    let _ = directory::remove_directory(&start.root, b"proc", |_| Ok(()));
    add("proc", proc::root());
    let attribute = |path: fmt::Arguments<'_>, text: &dyn Display| -> Result<()> {
        add(&String::try_format(path)?, Attribute::fixed(text));
        Ok(())
    };
    let cpus = percpu::cpus();
    let all = list(u64::MAX >> (u64::BITS as usize - cpus));
    for name in ["online", "possible", "present"] {
        attribute(format_args!("sys/devices/system/cpu/{name}"), &all)?;
    }
    attribute(format_args!("sys/devices/system/cpu/offline"), &"")?;
    attribute(format_args!("sys/devices/system/cpu/kernel_max"), &63)?;
    for cpu in 0..cpus {
        let files: [(&str, &dyn Display); 4] = [
            ("core_id", &cpu),
            ("physical_package_id", &0),
            ("thread_siblings_list", &cpu),
            ("core_siblings_list", &all),
        ];
        for (name, what) in files {
            attribute(format_args!("sys/devices/system/cpu/cpu{cpu}/topology/{name}"), what)?;
        }
    }
    nodes::add_all(add)?;
    let huge = "sys/kernel/mm/transparent_hugepage";
    attribute(format_args!("{huge}/enabled"), &"always madvise [never]")?;
    attribute(format_args!("{huge}/hpage_pmd_size"), &(2 << 20))?;
    text("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n");
    text("etc/group", "root:x:0:\n");
    text("etc/hostname", "faultless\n");
    Ok(())
}
