//! `/proc/sys`: the settings of the kernel. Only settings with an effect are writable.

use super::super::attribute::{Attribute, Shown, Store};
use super::super::cache;
use super::super::directory::{self, Directory};
use super::super::inode::{Body, Inode};
use super::oom::read_number;
use super::system::RELEASE;
use super::{compact, switch};
use crate::errno::{Errno, Result};
use crate::fs::Transfer;
use faultless_collections::Arc;

/// The read-only settings, by path.
const FIXED: &[(&str, &str)] = &[
    ("kernel/pid_max", "4194304"),
    ("kernel/threads-max", "4194304"),
    ("kernel/randomize_va_space", "0"),
    ("kernel/osrelease", RELEASE),
    ("kernel/ostype", "Linux"),
    ("kernel/version", "#1 SMP"),
    ("kernel/hostname", "faultless"),
    ("kernel/domainname", "(none)"),
    ("kernel/ngroups_max", "65536"),
    ("kernel/cap_last_cap", "40"),
    ("kernel/core_pattern", "core"),
    ("kernel/shmmax", "18446744073692774399"),
    ("kernel/shmall", "18446744073692774399"),
    ("kernel/shmmni", "4096"),
    ("kernel/msgmax", "8192"),
    ("kernel/msgmnb", "16384"),
    ("kernel/msgmni", "32000"),
    ("kernel/sem", "32000\t1024000000\t500\t32000"),
    ("kernel/perf_event_paranoid", "4"),
    ("kernel/yama/ptrace_scope", "0"),
    ("kernel/random/entropy_avail", "256"),
    ("kernel/random/boot_id", "00000000-0000-4000-8000-000000000000"),
    ("vm/max_map_count", "65530"),
    ("vm/overcommit_memory", "0"),
    ("vm/overcommit_ratio", "50"),
    ("vm/mmap_min_addr", "65536"),
    ("vm/swappiness", "60"),
    ("vm/nr_hugepages", "0"),
    ("vm/oom_kill_allocating_task", "0"),
    ("vm/panic_on_oom", "0"),
    ("fs/file-max", "9223372036854775807"),
    ("fs/nr_open", "1048576"),
    ("fs/pipe-max-size", "1048576"),
    ("fs/pipe-user-pages-soft", "16384"),
    ("fs/mqueue/msg_max", "10"),
];

/// The writable settings and the actions.
const CHANGEABLE: [(&str, Shown, Store); 3] = [
    ("vm/speculative_page_fault", Shown::Made(switch::text), switch::write),
    ("vm/compact_memory", Shown::Nothing, compact::write),
    ("vm/drop_caches", Shown::Nothing, drop_caches),
];

/// Returns the directory with all settings.
///
/// # Errors
/// `ENOMEM`.
pub(super) fn all() -> Result<Arc<Inode>> {
    let top = Inode::try_new(Body::Directory(Directory::default()), 0o555)?;
    for (path, text) in FIXED {
        put(&top, path, &Attribute::fixed(text)?)?;
    }
    for (path, shown, store) in CHANGEABLE {
        put(&top, path, &Attribute { shown, store: Some(store) }.inode()?)?;
    }
    Ok(top)
}

/// Adds `file` below `top`, with the directories on the way.
fn put(top: &Arc<Inode>, path: &str, file: &Arc<Inode>) -> Result<()> {
    let mut here = top.clone();
    let mut rest = path;
    while let Some((name, below)) = rest.split_once('/') {
        here = match here.lookup(name.as_bytes()) {
            Ok(there) => there,
            Err(_) => directory::make_directory(&here, name.as_bytes(), 0o555)?,
        };
        rest = below;
    }
    directory::link(&here, rest.as_bytes(), file)
}

/// Serves `drop_caches`: 1 drops clean pages of files, 2 drops Linux's reclaimable slabs (no effect
/// here), and 3 both. 4 disables Linux's log message (no effect here).
///
/// # Errors
/// `EINVAL`: any other number. `ERANGE`: more than 32 bits. `EFAULT`.
fn drop_caches(from: &mut Transfer<'_>) -> Result {
    const PAGES: i32 = 1;
    let (given, taken) = read_number(from)?;
    if !(1..=4).contains(&given) {
        return Err(Errno::EINVAL);
    }
    if given & PAGES != 0 {
        cache::drop_clean();
    }
    Ok(taken)
}
