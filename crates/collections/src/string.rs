//! Text.

use super::{OutOfMemory, Result, Vec};
use core::fmt;
use core::fmt::Write;
use core::ops::Deref;

/// Text that grows; writes fail when the heap is exhausted.
#[derive(Default, PartialEq, Eq)]
pub struct String {
    /// UTF-8.
    bytes: Vec<u8>,
}

impl String {
    /// Returns an empty text, which owns no memory.
    pub const fn new() -> Self {
        Self { bytes: Vec::new() }
    }

    /// A copy of `text`.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_from_str(text: &str) -> Result<Self> {
        Ok(Self { bytes: Vec::try_from_slice(text.as_bytes())? })
    }

    /// Returns the output of `format_args!`.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_format(text: fmt::Arguments<'_>) -> Result<Self> {
        let mut new = Self::new();
        // The kernel's formatting implementations do not fail by themselves.
        new.write_fmt(text).map_err(|_| OutOfMemory)?;
        Ok(new)
    }

    /// Returns the text in `bytes`; invalid UTF-8 becomes U+FFFD.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_from_utf8_lossy(bytes: &[u8]) -> Result<Self> {
        let mut new = Self::new();
        for chunk in bytes.utf8_chunks() {
            new.try_push_str(chunk.valid())?;
            if !chunk.invalid().is_empty() {
                new.try_push_str("\u{fffd}")?;
            }
        }
        Ok(new)
    }

    /// Appends `text`.
    ///
    /// # Errors
    /// [`OutOfMemory`]; the text is unchanged.
    pub fn try_push_str(&mut self, text: &str) -> Result<()> {
        self.bytes.try_extend_from_slice(text.as_bytes())
    }

    /// Returns the number of bytes that fit without more memory.
    pub fn room(&mut self) -> usize {
        self.bytes.spare_capacity_mut().len()
    }

    /// A copy.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_clone(&self) -> Result<Self> {
        Ok(Self { bytes: self.bytes.try_clone()? })
    }

    /// Returns the bytes.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// As a slice.
    pub fn as_str(&self) -> &str {
        // SAFETY: only text was ever appended.
        unsafe { core::str::from_utf8_unchecked(&self.bytes) }
    }
}

impl Deref for String {
    type Target = str;

    fn deref(&self) -> &str {
        self.as_str()
    }
}

impl AsRef<str> for String {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

impl Write for String {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.try_push_str(text).map_err(|_| fmt::Error)
    }
}

impl fmt::Display for String {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(f)
    }
}

impl fmt::Debug for String {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_utf8_is_replaced() {
        let text = String::try_from_utf8_lossy(b"a\xffb\xc3").unwrap();
        assert_eq!(text.as_str(), "a\u{fffd}b\u{fffd}");
        assert_eq!(String::try_format(format_args!("{:04}", 7)).unwrap().as_str(), "0007");
    }
}
