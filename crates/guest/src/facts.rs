//! Facts of a Linux kernel that change the cost of its memory management, read from the running
//! kernel.

use crate::{init, procfs};
use std::fs;

/// `SYSLOG_ACTION_READ_ALL`: returns the kernel's log without removing the text.
const READ_ALL: i32 = 3;
/// The number of bytes of the log to read.
const LOG: usize = 1 << 20;
const VULNERABILITIES: &str = "/sys/devices/system/cpu/vulnerabilities";

/// Prints the facts, one a line: `fact NAME TEXT`. A fact that the kernel does not publish is
/// absent.
///
/// The caller is the first process of the machine, because the function mounts `sysfs` and
/// `securityfs`.
pub fn print() {
    // Without these mounts, the facts in them are absent.
    let _ = init::mount("sysfs", "/sys");
    let _ = init::mount("securityfs", "/sys/kernel/security");
    for (name, text) in all() {
        println!("fact {name} {}", text.split_whitespace().collect::<Vec<_>>().join(" "));
    }
}

/// Returns names and texts.
fn all() -> Vec<(String, String)> {
    let file = |name: &str, path: &str| Some((name.to_owned(), procfs::text(path).ok()?));
    let mut facts: Vec<_> = [
        file("release", "/proc/sys/kernel/osrelease"),
        file("cmdline", "/proc/cmdline"),
        file("numa_balancing", "/proc/sys/kernel/numa_balancing"),
        file("lsm", "/sys/kernel/security/lsm"),
    ]
    .into_iter()
    .flatten()
    .collect();
    let cgroups = procfs::text("/proc/cgroups").unwrap_or_default();
    let memory = cgroups.lines().find(|line| line.split_whitespace().next() == Some("memory"));
    let enabled = memory.and_then(|line| line.split_whitespace().nth(3)).unwrap_or("0");
    facts.push(("memcg".to_owned(), enabled.to_owned()));
    let log = log();
    for (name, mark) in [("auto_init", "mem auto-init: "), ("audit", "audit: initializing ")] {
        let found = log.lines().find_map(|line| line.split_once(mark));
        facts.extend(found.map(|(_, rest)| (name.to_owned(), rest.to_owned())));
    }
    let mut vulnerabilities: Vec<_> = fs::read_dir(VULNERABILITIES)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let text = fs::read_to_string(entry.path()).ok()?;
            Some((format!("cpu.{name}"), text))
        })
        .collect();
    vulnerabilities.sort();
    facts.extend(vulnerabilities);
    facts
}

/// Returns the kernel's log, or an empty text if the kernel refuses.
fn log() -> String {
    let mut bytes = vec![0u8; LOG];
    // SAFETY: the buffer has `LOG` bytes.
    let read = unsafe { libc::klogctl(READ_ALL, bytes.as_mut_ptr().cast(), LOG as i32) };
    bytes.truncate(usize::try_from(read).unwrap_or(0));
    String::from_utf8_lossy(&bytes).into_owned()
}
