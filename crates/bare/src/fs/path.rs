//! Paths: bytes between slashes.

/// Longest path, with the NUL that ends it.
pub const PATH_MAX: usize = 4096;
/// Longest name.
pub const NAME_MAX: usize = 255;
/// Symbolic links that a walk follows before it gives up.
pub const MAX_LINKS: u32 = 40;

/// The first name of a path, and what comes after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step<'a> {
    /// The name; neither empty nor with a slash.
    pub name: &'a [u8],
    /// What follows the name, slashes and all.
    pub rest: &'a [u8],
}

impl<'a> Step<'a> {
    /// The first step of `path`, if it has a name.
    pub fn of(path: &'a [u8]) -> Option<Self> {
        let start = path.iter().position(|&byte| byte != b'/')?;
        let path = &path[start..];
        let len = path.iter().position(|&byte| byte == b'/').unwrap_or(path.len());
        let (name, rest) = path.split_at(len);
        Some(Self { name, rest })
    }

    /// Whether no name follows.
    pub fn is_last(&self) -> bool {
        self.rest.iter().all(|&byte| byte == b'/')
    }

    /// Whether it is the last, and a slash says that it must be a directory.
    pub fn ends_in_slash(&self) -> bool {
        self.is_last() && !self.rest.is_empty()
    }
}

/// The last name of a path, or the empty one.
pub fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|&byte| byte == b'/').next().unwrap_or_default()
}
