//! Fault-around, which hides faults on pages of files, and is a setting of the whole system.

use crate::loan::Loan;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// The start of the note about a recording with fault-around.
pub const AROUND_ON: &str = "fault-around is still on";
const FAULT_AROUND: &str = "/sys/kernel/debug/fault_around_bytes";

const LOCKDOWN: &str = "/sys/kernel/security/lockdown";

/// Returns the remedy for a refusal to root, from the contents of the file of lockdown. The file
/// has the mode in brackets.
fn remedy_of_root(lockdown: Option<&str>) -> &'static str {
    match lockdown {
        Some(mode) if !mode.contains("[none]") => {
            "a kernel without lockdown (`cat /sys/kernel/security/lockdown`)"
        }
        _ => {
            "none is known: the kernel refuses the change also to root, as in a container or with a \
             security module"
        }
    }
}

/// Fault-around, turned off until this is dropped. Several recordings at a time share the setting.
pub(super) struct FaultAround {
    off: Result<Loan, (PathBuf, io::Error)>,
}

impl FaultAround {
    /// Turns fault-around off, if the kernel permits.
    pub(super) fn turn_off() -> Self {
        Self { off: Loan::shared(Path::new(FAULT_AROUND), "4096") }
    }

    /// Returns the note about fault-around that is still on.
    pub(super) fn note(&self) -> Option<String> {
        self.off.as_ref().err().map(|(file, problem)| {
            let remedy = match problem.raw_os_error() {
                _ if file != Path::new(FAULT_AROUND) => "a shell in this place",
                Some(libc::ENOENT) => {
                    "`sudo mount -t debugfs none /sys/kernel/debug`, and record as root"
                }
                Some(libc::EROFS) => "`sudo mount -o remount,rw /sys/kernel/debug`",
                // Root gets this error, too.
                Some(libc::EPERM) => remedy_of_root(fs::read_to_string(LOCKDOWN).ok().as_deref()),
                _ => "record as root",
            };
            format!(
                "{AROUND_ON} ({}: {problem}): a fault on a file page \
                 may have mapped up to sixteen pages. Remedy: {remedy}",
                file.display()
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lockdown_is_named_only_where_it_is_on() {
        for (mode, named) in [
            (Some("none [integrity] confidentiality\n"), true),
            (Some("[none] integrity confidentiality\n"), false),
            (None, false),
        ] {
            assert_eq!(remedy_of_root(mode).contains("lockdown"), named, "{mode:?}");
        }
    }
}
