//! The layouts of tracepoints, as described by the file.
//!
//! A file with tracepoints has a section (`HEADER_TRACING_DATA`) with the text of each tracepoint's
//! `format` file in tracefs: its number and the offset and size of each field. If this section is
//! missing or unreadable, default layouts are used, which x86-64 kernels have had since these
//! tracepoints exist: common fields in the first eight bytes; then `address`, `ip`, `error_code` at
//! 8, 16, 24 of a page fault; the number at 8 and arguments from 16 on, or the result at 16, of a
//! system call; `pid` at 8 and `clone_flags` at 32 of a new task.

use std::collections::HashMap;

/// The location of a field in the raw bytes of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Field {
    pub offset: usize,
    pub size: usize,
}

/// The fields of a tracepoint in order, without the common fields.
pub(super) type Fields = Vec<(String, Field)>;

/// Returns the layouts in the tracing-data section `bytes` by tracepoint name (`system:event`). The
/// list ends at unreadable data; the caller uses default layouts for missing tracepoints.
pub(super) fn layouts(bytes: &[u8]) -> HashMap<String, Fields> {
    let mut layouts = HashMap::new();
    let _ = read(Cursor { rest: bytes }, |name, text| {
        layouts.insert(name, fields(text));
    });
    layouts
}

/// Returns the names of the tracepoints in the tracing-data section `bytes` by number, up to
/// unreadable data.
pub(super) fn names(bytes: &[u8]) -> HashMap<u64, String> {
    let mut names = HashMap::new();
    let _ = read(Cursor { rest: bytes }, |name, text| {
        let number = text.lines().find_map(|line| line.strip_prefix("ID: "));
        names.extend(number.and_then(|number| Some((number.trim().parse().ok()?, name))));
    });
    names
}

struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    fn take(&mut self, len: u64) -> Option<&'a [u8]> {
        let (head, rest) = self.rest.split_at_checked(usize::try_from(len).ok()?)?;
        self.rest = rest;
        Some(head)
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn sized(&mut self) -> Option<&'a [u8]> {
        let len = u64::from_le_bytes(self.take(8)?.try_into().ok()?);
        self.take(len)
    }

    fn string(&mut self) -> Option<&'a str> {
        let end = self.rest.iter().position(|byte| *byte == 0)?;
        let text = self.take(end as u64 + 1)?;
        std::str::from_utf8(&text[..end]).ok()
    }
}

/// Walks the section: magic, version, machine, the two formats of the ring buffer's pages, ftrace's
/// own events, then each system's events. Calls `each` with the name of an event and the text of
/// its `format` file.
fn read(mut at: Cursor<'_>, mut each: impl FnMut(String, &str)) -> Option<()> {
    if at.take(10)? != b"\x17\x08\x44tracing" {
        return None;
    }
    at.string()?;
    let big_endian = at.take(1)?[0] != 0;
    at.take(1 + 4)?;
    if big_endian || at.string()? != "header_page" {
        return None;
    }
    at.sized()?;
    if at.string()? != "header_event" {
        return None;
    }
    at.sized()?;
    for _ in 0..at.u32()? {
        at.sized()?;
    }
    for _ in 0..at.u32()? {
        let system = at.string()?;
        for _ in 0..at.u32()? {
            let text = std::str::from_utf8(at.sized()?).ok()?;
            if let Some(name) = text.lines().find_map(|line| line.strip_prefix("name: ")) {
                each(format!("{system}:{}", name.trim()), text);
            }
        }
    }
    Some(())
}

/// Parses the fields in the text of a `format` file, with lines like
/// `field:unsigned long address; offset:8; size:8; signed:0;`, separated by tabs.
fn fields(text: &str) -> Fields {
    let number = |part: Option<&str>, key: &str| {
        part.and_then(|part| part.trim().strip_prefix(key)?.parse::<usize>().ok())
    };
    text.lines()
        .filter_map(|line| {
            let mut parts = line.trim().strip_prefix("field:")?.split(';');
            let declaration = parts.next()?;
            let offset = number(parts.next(), "offset:")?;
            let size = number(parts.next(), "size:")?;
            let name = declaration.split(['[', ';']).next()?.split_whitespace().last()?;
            let name = name.trim_start_matches('*');
            (!name.starts_with("common_")).then(|| (name.to_owned(), Field { offset, size }))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_file_gives_its_own_fields_in_order() {
        let text = "name: sys_enter_clone3\nID: 1\nformat:\n\
            \tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\n\
            \tfield:int __syscall_nr;\toffset:8;\tsize:4;\tsigned:1;\n\
            \tfield:struct clone_args * uargs;\toffset:16;\tsize:8;\tsigned:0;\n\
            \tfield:char comm[16];\toffset:24;\tsize:16;\tsigned:0;\n\nprint fmt: \"x\"\n";
        let names: Vec<_> = fields(text).into_iter().map(|(n, f)| (n, f.offset, f.size)).collect();
        let want = [("__syscall_nr", 8, 4), ("uargs", 16, 8), ("comm", 24, 16)]
            .map(|(n, o, s)| (n.to_owned(), o, s));
        assert_eq!(names, want);
    }

    #[test]
    fn truncated_section_gives_its_complete_layouts() {
        assert!(layouts(b"\x17\x08\x44tracing0.6\0\0\x08").is_empty());
    }
}
