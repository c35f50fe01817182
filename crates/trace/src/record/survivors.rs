//! Processes that a recorded program leaves running, since perf ends with the program's first
//! process.

use super::signals::children;
use crate::names::listed;
use std::fs;
use std::ptr;

/// Makes orphaned processes children of this process until it is dropped.
pub(super) struct Survivors {
    /// Children from before.
    before: Vec<u32>,
    /// Whether this process was already a subreaper.
    subreaper: libc::c_int,
}

impl Survivors {
    pub(super) fn watch() -> Self {
        let mut subreaper = 0;
        // SAFETY: the first call writes one number to a valid place; the second touches no memory.
        unsafe {
            libc::prctl(libc::PR_GET_CHILD_SUBREAPER, &raw mut subreaper, 0, 0, 0);
            libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        }
        Self { before: own_children(), subreaper }
    }

    /// Returns the names of the processes that still run, beside `perf`. Reaps processes that have
    /// ended.
    pub(super) fn find(&self, perf: u32) -> Vec<String> {
        let adopted = own_children().into_iter().filter(|pid| *pid != perf);
        adopted.filter(|pid| !self.before.contains(pid)).filter_map(running).collect()
    }
}

impl Drop for Survivors {
    fn drop(&mut self) {
        // SAFETY: the call touches no memory.
        unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, self.subreaper, 0, 0, 0) };
    }
}

fn own_children() -> Vec<u32> {
    children(std::process::id()).unwrap_or_default()
}

/// Returns the name of the child `pid` if the child runs. Reaps the child if it has ended.
fn running(pid: u32) -> Option<String> {
    // SAFETY: without a place for the status, the call touches no memory.
    let ended = unsafe { libc::waitpid(pid.cast_signed(), ptr::null_mut(), libc::WNOHANG) };
    let name = || fs::read_to_string(format!("/proc/{pid}/comm")).ok();
    (ended == 0).then(name).flatten().map(|name| name.trim_end().to_owned())
}

/// Returns the note about processes that still run; `None` without such processes.
pub(super) fn note(names: &[String]) -> Option<String> {
    (!names.is_empty()).then(|| {
        format!(
            "the recording ends with the program's first process; other processes of the program \
             still run and are not recorded further: {}. Remedy: start the program in the \
             foreground (for example `nginx -g 'daemon off;'`)",
            listed(names.to_vec())
        )
    })
}

/// Held by tests that start processes, because [`Survivors::find`] reaps processes of other tests.
#[cfg(test)]
pub(super) fn alone() -> std::sync::MutexGuard<'static, ()> {
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn earlier_children_are_not_survivors() {
        let _alone = alone();
        let dir = tempfile::tempdir().unwrap();
        let sleep = crate::record::find_program("sleep".as_ref()).unwrap();
        let start = |name: &str| {
            let file = dir.path().join(name);
            std::os::unix::fs::symlink(&sleep, &file).unwrap();
            Command::new(file).arg("600").spawn().unwrap()
        };
        let mut earlier = start("earlier");
        let survivors = Survivors::watch();
        let mut later = start("later");
        let names = survivors.find(0);
        for child in [&mut earlier, &mut later] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        let has = |name: &str| names.iter().any(|it| it == name);
        assert!(has("later") && !has("earlier"), "{names:?}");
    }

    #[test]
    fn surviving_process_is_named() {
        let _alone = alone();
        let survivors = Survivors::watch();
        // The shell ends at once; the sleep has no parent then.
        let mut shell = Command::new("sh");
        shell.args(["-c", "sleep 1234 & echo $!"]).stdout(Stdio::piped());
        let mut shell = shell.spawn().unwrap();
        let own = shell.id();
        // The sleep keeps the pipe open, so only the number is read.
        let mut line = String::new();
        let mut out = std::io::BufReader::new(shell.stdout.take().unwrap());
        std::io::BufRead::read_line(&mut out, &mut line).unwrap();
        super::super::signals::await_end(own);
        let names = survivors.find(own);
        let pid: libc::pid_t = line.trim().parse().unwrap();
        // SAFETY: the calls touch no memory; the process is a child of this one.
        unsafe {
            libc::kill(pid, libc::SIGKILL);
            libc::waitpid(pid, ptr::null_mut(), 0);
        }
        shell.wait().unwrap();
        // Other tests may run programs at the same time.
        assert!(names.iter().any(|name| name == "sleep" || name == "sh"), "{names:?}");
        let note = note(&names).unwrap();
        assert!(note.contains("still run") && note.contains("in the foreground"), "{note}");
        assert_eq!(super::note(&[]), None);
        let many: Vec<_> = (0..900).map(|at| format!("worker-{at}")).collect();
        assert!(super::note(&many).is_some_and(|note| note.len() < 400));
    }
}
