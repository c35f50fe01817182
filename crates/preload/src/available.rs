//! The memory available to the program, which bounds the populated blocks.
//!
//! A program can allocate a large block and use a small part. A populated block uses memory in
//! whole, so a block stays as the program made it if the block is larger than half of the available
//! memory: the kernel's estimate for the host, and the limits of the program's control group and of
//! the groups above. Without readable files of the kernel no bound is known.

use crate::syscall;
use core::ffi::CStr;
use core::sync::atomic::{AtomicUsize, Ordering};

/// For blocks of this size in bytes and more, a reading is cheap compared with populating.
const LARGE: usize = 16 << 20;
/// The longest name of a file.
const NAME: usize = 512;

/// The bytes in smaller blocks that are populated before the next reading.
static LEFT: AtomicUsize = AtomicUsize::new(0);

/// Returns whether a new block of `bytes` can be populated.
pub fn permits(bytes: usize) -> bool {
    let take = |left: usize| left.checked_sub(bytes);
    if bytes < LARGE && LEFT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
        return true;
    }
    let Some(available) = of_host() else { return true };
    let available = of_groups().map_or(available, |groups| groups.min(available));
    LEFT.store(available / 8, Ordering::Relaxed);
    bytes <= available / 2
}

/// Returns the available memory of the host in bytes.
fn of_host() -> Option<usize> {
    let mut text = [0; 512];
    field(contents(c"/proc/meminfo", &mut text)?, b"MemAvailable:").map(|kib| kib << 10)
}

/// The files of a version of control groups.
struct Files {
    root: &'static [u8],
    limits: &'static [&'static [u8]],
    usage: &'static [u8],
}

const FIRST: Files = Files {
    root: b"/sys/fs/cgroup/memory",
    limits: &[b"/memory.limit_in_bytes"],
    usage: b"/memory.usage_in_bytes",
};
/// The kernel delays the processes of a group beyond `memory.high`.
const SECOND: Files = Files {
    root: b"/sys/fs/cgroup",
    limits: &[b"/memory.max", b"/memory.high"],
    usage: b"/memory.current",
};

/// Returns the available memory in bytes of the program's control group and of the groups above.
/// `None` without a limit.
fn of_groups() -> Option<usize> {
    let mut text = [0; 1024];
    let text = contents(c"/proc/self/cgroup", &mut text)?;
    let (files, mut group) = group(text)?;
    let mut available = None;
    loop {
        if let Some(rest) = of_group(&files, group) {
            available = Some(available.map_or(rest, |known: usize| known.min(rest)));
        }
        let Some(end) = group.iter().rposition(|byte| *byte == b'/') else { return available };
        group = group.get(..end)?;
    }
}

/// Returns the files, and the path of the group without a slash at its end.
fn group(text: &[u8]) -> Option<(Files, &[u8])> {
    let mut second = None;
    for line in text.split(|byte| *byte == b'\n') {
        let mut fields = line.splitn(3, |byte| *byte == b':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let path = path.strip_suffix(b"/").unwrap_or(path);
        if controllers.split(|byte| *byte == b',').any(|name| name == b"memory") {
            return Some((FIRST, path));
        }
        if controllers.is_empty() {
            second = Some((SECOND, path));
        }
    }
    second
}

/// Returns the available memory of a group in bytes: the lowest limit without the used memory, and
/// pages of files, which the kernel can free. `None` without a limit.
fn of_group(files: &Files, group: &[u8]) -> Option<usize> {
    let mut text = [0; 1024];
    let limits = files.limits.iter();
    let limits = limits.filter_map(|name| number(of_file(files, group, name, &mut text)?));
    let limit = limits.min()?;
    let used = number(of_file(files, group, files.usage, &mut text)?)?;
    let cached = of_file(files, group, b"/memory.stat", &mut text).map_or(0, |text| {
        let of = |name| field(text, name).unwrap_or(0);
        of(b"inactive_file ").saturating_add(of(b"active_file "))
    });
    Some(limit.saturating_sub(used.saturating_sub(cached)))
}

/// Returns the contents of a file of a group.
fn of_file<'a>(files: &Files, group: &[u8], name: &[u8], text: &'a mut [u8]) -> Option<&'a [u8]> {
    let mut path = [0; NAME];
    let mut len = 0;
    for part in [files.root, group, name] {
        path.get_mut(len..len + part.len())?.copy_from_slice(part);
        len += part.len();
    }
    contents(CStr::from_bytes_until_nul(&path).ok()?, text)
}

/// Returns the start of a file.
fn contents<'a>(path: &CStr, text: &'a mut [u8]) -> Option<&'a [u8]> {
    let file = syscall::open(path).ok()?;
    let len = syscall::read(file, text);
    syscall::close(file);
    text.get(..len.ok()?)
}

/// Returns the number after `name` at the start of a line.
fn field(text: &[u8], name: &[u8]) -> Option<usize> {
    text.split(|byte| *byte == b'\n').find_map(|line| number(line.strip_prefix(name)?))
}

/// Returns the number at the start of a text. `None` without a number, as in `max`.
fn number(text: &[u8]) -> Option<usize> {
    let text = text.trim_ascii_start();
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit());
    let mut value = None;
    for digit in digits {
        let known: usize = value.unwrap_or(0);
        value = Some(known.checked_mul(10)?.checked_add(usize::from(digit - b'0'))?);
    }
    value
}
