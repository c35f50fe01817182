//! Variables in the environment of a program that set its allocator.

use std::fs;

/// The end of jemalloc's variables, and the start of mimalloc's.
const CONF: &str = "MALLOC_CONF";
const MIMALLOC: &str = "MIMALLOC_";

/// Variables of allocators, with their values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Variables(Vec<(String, String)>);

impl Variables {
    /// Returns the variables of this process, which a program started by this process inherits.
    pub fn own() -> Self {
        let text = |word: std::ffi::OsString| word.to_string_lossy().into_owned();
        Self::of(std::env::vars_os().map(|(name, value)| (text(name), text(value))))
    }

    /// Returns the variables with which the process `pid` started; none if the process has ended or
    /// belongs to another user.
    pub fn of_process(pid: i32) -> Self {
        let bytes = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let words = bytes.split(|byte| *byte == 0).map(String::from_utf8_lossy);
        Self::of(words.filter_map(|word| {
            let (name, value) = word.split_once('=')?;
            Some((name.to_owned(), value.to_owned()))
        }))
    }

    /// Returns the variables of allocators among `all`.
    fn of(all: impl Iterator<Item = (String, String)>) -> Self {
        Self(all.filter(|(name, _)| name.ends_with(CONF) || name.starts_with(MIMALLOC)).collect())
    }

    /// Adds variables. A variable that is already present keeps its value.
    pub fn add(&mut self, other: &Self) {
        let new = other.0.iter().filter(|(name, _)| self.get(name).is_none());
        let new: Vec<_> = new.cloned().collect();
        self.0.extend(new);
    }

    /// Returns the value of the variable `name`.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| &**value)
    }

    /// Sets a variable.
    pub fn set(&mut self, name: &str, value: &str) {
        self.0.retain(|(known, _)| known != name);
        self.0.push((name.to_owned(), value.to_owned()));
    }

    /// Returns the value of `option` in jemalloc's variable `name`. The last value counts.
    pub fn option(&self, name: &str, option: &str) -> Option<&str> {
        let mut settings = self.get(name)?.split(',').filter_map(|one| one.split_once(':'));
        settings.rfind(|(known, _)| *known == option).map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::process::{Command, Stdio};

    fn of(all: &[(&str, &str)]) -> Variables {
        Variables::of(all.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
    }

    #[test]
    fn last_setting_of_an_option_counts() {
        let all =
            of(&[("_RJEM_MALLOC_CONF", "retain:false,thp:always,retain:true"), ("PATH", "/")]);
        assert_eq!(all.option("_RJEM_MALLOC_CONF", "retain"), Some("true"));
        assert_eq!((all.option("MALLOC_CONF", "retain"), all.get("PATH")), (None, None));
        let mut both = of(&[("MIMALLOC_EAGER_COMMIT", "0")]);
        both.add(&of(&[("MIMALLOC_EAGER_COMMIT", "1"), ("MALLOC_CONF", "retain:false")]));
        assert_eq!(both.get("MIMALLOC_EAGER_COMMIT"), Some("0"));
        assert_eq!(both.option("MALLOC_CONF", "retain"), Some("false"));
    }

    #[test]
    fn variables_of_a_running_process_are_read() {
        let mut command = Command::new("cat");
        command.env("MIMALLOC_PURGE_DELAY", "7").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().expect("cat starts");
        let pid = i32::try_from(process.id()).expect("a process identifier");
        // The kernel sets the environment up before the program's first instruction.
        let mut input = process.stdin.take().expect("a pipe");
        input.write_all(b"x").expect("written");
        process.stdout.take().expect("a pipe").read_exact(&mut [0]).expect("copied");
        let read = Variables::of_process(pid);
        drop(input);
        process.wait().expect("cat ends");
        assert_eq!(read.get("MIMALLOC_PURGE_DELAY"), Some("7"));
        assert_eq!(Variables::of_process(-1), Variables::default());
    }
}
