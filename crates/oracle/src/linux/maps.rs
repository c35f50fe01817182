//! `/proc/self/maps`, near the window.

use crate::op::Window;
use crate::seen::{Area, NAMELESS};
use std::io::Read;

/// The VMAs of this process near `window`.
///
/// # Errors
/// The kernel's.
pub fn areas(buffer: &mut Vec<u8>, window: Window) -> std::io::Result<Vec<Area>> {
    buffer.clear();
    // Opened again each time: a descriptor belongs to the address space in which it was opened.
    std::fs::File::open("/proc/self/maps")?.read_to_end(buffer)?;
    let text = std::str::from_utf8(buffer).unwrap_or_default();
    let near = |area: &Area| window.near().contains(&area.start);
    Ok(text.lines().filter_map(area).filter(near).collect())
}

/// The VMA of a line.
fn area(line: &str) -> Option<Area> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let (letters, offset) = (words.next()?.as_bytes(), words.next()?);
    let path = words.nth(2).unwrap_or("");
    let hex = |word| u64::from_str_radix(word, 16).ok();
    let prot = b"rwx".iter().zip(letters).enumerate();
    let prot = prot.map(|(bit, (letter, there))| u64::from(letter == there) << bit).sum();
    let object = match path.strip_prefix(super::OBJECT_PATH) {
        Some(number) => number.parse::<u64>().ok()? + 1,
        None if path == "/dev/zero" => NAMELESS,
        None => 0,
    };
    let shared = letters.get(3) == Some(&b's');
    Some(Area { start: hex(start)?, end: hex(end)?, prot, shared, offset: hex(offset)?, object })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_all_kinds_are_read() {
        let line =
            "200000000000-200000003000 r-xs 00002000 00:01 2053      /memfd:oracle1 (deleted)";
        let (start, end) = (0x2000_0000_0000, 0x2000_0000_3000);
        let expected = Area { start, end, prot: 5, shared: true, offset: 0x2000, object: 2 };
        assert_eq!(area(line), Some(expected));
        let line = "200000000000-200000003000 -w-p 00000000 00:00 0 ";
        let expected = Area { start, end, prot: 2, ..Area::default() };
        assert_eq!(area(line), Some(expected));
        let line = "200000000000-200000003000 ---s 00000000 00:01 9    /dev/zero (deleted)";
        assert_eq!(area(line).map(|area| area.object), Some(NAMELESS));
        assert_eq!(area("what?"), None);
    }
}
