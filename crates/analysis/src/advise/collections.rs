//! Python's garbage collector in children: the time of full collections that visit inherited
//! objects, in a run with a trace.
//!
//! `gc.freeze` before a fork excludes the objects of the parent from the collections of its
//! children, and from its own later collections, such as that at its end. The saving is the time of
//! these collections, with the copies of pages that they make, less the collection that the advice
//! adds before the fork. A recording of faults contains only
//! the copies. So the program runs once more, and the interpreter imports a module that times the
//! collections (`gc.callbacks`). A process that also has new objects spends a part of a collection
//! on them. This part is estimated from the numbers of memory blocks at the fork and at the
//! collection.

use super::once::{silent, supervised};
use crate::error::Error;
use std::collections::BTreeSet;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::Path;

/// The module that the interpreter imports at its start.
const HOOK: &str = include_str!("sitecustomize.py");
/// The variable with the file of the trace.
const TRACE: &str = "FAULTLESS_COLLECTIONS";
/// The variable with directories of modules.
const MODULES: &str = "PYTHONPATH";

/// The full collections of a run after forks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Collections {
    /// Children with a full collection.
    pub children: u64,
    /// Full collections in children.
    pub full: u64,
    /// Nanoseconds of processor time of these collections for inherited objects.
    pub inherited: f64,
    /// Nanoseconds of processor time of full collections in parents after their first fork, for
    /// objects that existed at the last fork.
    pub later: f64,
    /// Nanoseconds of processor time of a collection in each parent before its first fork.
    pub before: f64,
}

impl Collections {
    /// Runs `command` once with the trace. The program reads no input, and its output is dropped.
    /// Returns `None` after a request to stop, and if no child has a full collection, or the
    /// interpreter ignores the environment (`python -I`).
    ///
    /// # Errors
    /// The program cannot be run, or the files of the trace cannot be written or read.
    pub fn of_run(command: &[OsString]) -> Result<Option<Self>, Error> {
        let failed = |error| Error::host("the trace of Python's collector", error);
        let dir = tempfile::tempdir().map_err(failed)?;
        let trace = dir.path().join("trace");
        fs::write(dir.path().join("sitecustomize.py"), HOOK).map_err(failed)?;
        fs::write(&trace, "").map_err(failed)?;
        let mut program = silent(command)?;
        program.env(MODULES, with_modules(dir.path(), env::var_os(MODULES).as_deref()));
        program.env(TRACE, &trace);
        if supervised(&mut program, |_| ())?.is_none() {
            return Ok(None);
        }
        Ok(Self::of(&fs::read_to_string(&trace).map_err(failed)?))
    }

    /// Parses the lines of a trace. Returns `None` without a full collection in a child.
    fn of(text: &str) -> Option<Self> {
        let (mut out, mut children) = (Self::default(), BTreeSet::new());
        for line in text.lines() {
            let mut words = line.split(' ');
            let kind = words.next();
            // A child that was killed can leave a part of a line.
            let numbers: Result<Vec<u64>, _> = words.map(str::parse).collect();
            match (kind, numbers.as_deref()) {
                (Some("before"), Ok(&[took])) => out.before += took as f64,
                (Some(kind @ ("child" | "parent")), Ok(&[process, took, inherited, blocks])) => {
                    let share = if blocks == 0 { 1.0 } else { inherited as f64 / blocks as f64 };
                    let time = took as f64 * share.min(1.0);
                    if kind == "child" {
                        children.insert(process);
                        out.full += 1;
                        out.inherited += time;
                    } else {
                        out.later += time;
                    }
                }
                _ => {}
            }
        }
        out.children = children.len() as u64;
        (out.full > 0).then_some(out)
    }

    /// Returns the nanoseconds that `gc.collect` and `gc.freeze` before the fork save.
    pub fn saving(&self) -> f64 {
        self.inherited + self.later - self.before
    }
}

/// Returns the value of [`MODULES`] with `dir` in front of the directories `before`.
fn with_modules(dir: &Path, before: Option<&OsStr>) -> OsString {
    let mut all = dir.as_os_str().to_owned();
    if let Some(before) = before.filter(|before| !before.is_empty()) {
        all.push(":");
        all.push(before);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collections_of_inherited_objects_are_added_up() {
        let text = "before 500\nchild 7 4000 300 300\nchild 7 1000 300 600\nchild 8 2000 10 0\n\
                    parent 1 800 300 400\nchild 9 1";
        let got = Collections::of(text).expect("collections");
        let inherited = 4000.0 + 500.0 + 2000.0;
        let want = Collections { children: 2, full: 3, inherited, later: 600.0, before: 500.0 };
        assert_eq!((got, got.saving()), (want, 6600.0));
        assert_eq!(Collections::of("before 500\nparent 1 800 300 400\n"), None);
        // Freed blocks of inherited objects.
        let fewer = Collections::of("child 7 4000 300 200").expect("a collection");
        assert_eq!(fewer.inherited, 4000.0);
    }

    #[test]
    fn modules_of_the_user_stay() {
        let with = |before: Option<&str>| with_modules(Path::new("/x"), before.map(OsStr::new));
        assert_eq!((with(None), with(Some(""))), ("/x".into(), "/x".into()));
        assert_eq!(with(Some("/a:/b")), "/x:/a:/b");
    }

    /// Returns the trace of a Python program; `None` without Python.
    fn of_program(script: &str) -> Option<Option<Collections>> {
        let python = |script: &str| ["python3", "-c", script].map(OsString::from);
        if silent(&python("import gc; gc.freeze")).ok()?.status().is_ok_and(|it| it.success()) {
            return Some(Collections::of_run(&python(script)).expect("it runs"));
        }
        eprintln!("skipped: no Python 3.7 or later");
        None
    }

    #[test]
    fn interpreter_times_the_collections_of_children() {
        let script = |collects: &str| {
            format!(
                "import gc, os\nall = [[] for _ in range(100000)]\nfor _ in range(2):\n  if os.fork() == 0:\n    {collects}\n    os._exit(0)\n  os.wait()"
            )
        };
        let Some(got) = of_program(&script("gc.collect()")) else { return };
        let got = got.expect("two children collect");
        assert_eq!((got.children, got.full), (2, 2));
        // 100,000 objects take a millisecond, and a collection after gc.freeze less than a tenth.
        assert!(got.inherited > 2e5 && got.before > 1e5, "{got:?}");
        // The interpreter collects at its end.
        assert!(got.later > 1e5, "{got:?}");
        let frozen = of_program(&script("gc.freeze(); gc.collect()")).flatten();
        let frozen = frozen.expect("two children collect");
        assert!(frozen.inherited < got.inherited / 4.0, "{frozen:?} and {got:?}");
        assert_eq!(of_program(&script("pass")), Some(None), "no collection");
    }

    #[test]
    fn sitecustomize_of_the_user_still_runs() {
        let dir = tempfile::tempdir().expect("a directory");
        let own = dir.path().join("sitecustomize.py");
        fs::write(&own, "import sys\nsys.own = True\n").expect("written");
        let script = format!(
            "import sys; sys.path; import os; os.environ['PYTHONPATH'].endswith('{0}') or exit(1)\n\
             import sitecustomize; sitecustomize.__file__ == '{1}' and sys.own or exit(2)",
            dir.path().display(),
            own.display()
        );
        let mut program = silent(&["python3", "-c", &script].map(OsString::from)).expect("a name");
        let hook = tempfile::tempdir().expect("a directory");
        fs::write(hook.path().join("sitecustomize.py"), HOOK).expect("written");
        program.env(MODULES, with_modules(hook.path(), Some(dir.path().as_os_str())));
        program.env(TRACE, hook.path().join("trace"));
        let Ok(status) = program.status() else { return };
        assert!(status.success(), "{status}");
    }
}
