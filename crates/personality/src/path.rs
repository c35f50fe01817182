//! Splitting paths into names.

/// The maximum length of a path, with its NUL.
pub const PATH_MAX: usize = 4096;
/// The maximum length of a name.
pub const NAME_MAX: usize = 255;
/// The maximum number of symbolic links followed by a walk.
pub const MAX_LINKS: u32 = 40;

/// The first name of a path, and the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step<'a> {
    /// The name: not empty, without a slash.
    pub name: &'a [u8],
    /// The rest of the path after the name, including slashes.
    pub rest: &'a [u8],
}

impl<'a> Step<'a> {
    /// Returns the first step of `path`, if it has a name.
    pub fn of(path: &'a [u8]) -> Option<Self> {
        let start = path.iter().position(|&byte| byte != b'/')?;
        let path = &path[start..];
        let len = path.iter().position(|&byte| byte == b'/').unwrap_or(path.len());
        let (name, rest) = path.split_at(len);
        Some(Self { name, rest })
    }

    /// Returns whether no name follows.
    pub fn is_last(&self) -> bool {
        self.rest.iter().all(|&byte| byte == b'/')
    }

    /// Returns whether this is the last step and a slash follows, which requires a directory.
    pub fn ends_in_slash(&self) -> bool {
        self.is_last() && !self.rest.is_empty()
    }
}

/// Returns the last name of a path, or the empty name.
pub fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|&byte| byte == b'/').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    fn names(path: &[u8]) -> Vec<&[u8]> {
        let mut rest = path;
        core::iter::from_fn(|| {
            let step = Step::of(rest)?;
            rest = step.rest;
            Some(step.name)
        })
        .collect()
    }

    #[test]
    fn repeated_slashes_separate_names() {
        let expected: [&[u8]; 3] = [b"a", b"..", b"b c"];
        assert_eq!(names(b"//a/..///b c/"), expected);
        assert!(names(b"///").is_empty());
        assert!(names(b"").is_empty());
    }

    #[test]
    fn trailing_slash_requires_a_directory() {
        let last = |path| {
            let step = Step::of(path).unwrap();
            (step.is_last(), step.ends_in_slash())
        };
        assert_eq!(last(b"a"), (true, false));
        assert_eq!(last(b"a//"), (true, true));
        assert_eq!(last(b"/a/b"), (false, false));
    }

    #[test]
    fn file_name_follows_the_last_slash() {
        assert_eq!(file_name(b"/bin/sh"), b"sh");
        assert_eq!(file_name(b"sh"), b"sh");
        assert_eq!(file_name(b"/bin/"), b"");
    }
}
