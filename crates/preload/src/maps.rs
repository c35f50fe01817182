//! The mappings of the process, from `/proc/self/maps`.

use crate::syscall;
use core::ffi::c_int;

/// A mapping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mapping {
    /// The first address.
    pub start: usize,
    /// The address after the last.
    pub end: usize,
    /// The permissions, as in `r-xp`.
    pub permissions: [u8; 4],
    /// The offset in the file.
    pub offset: usize,
    /// The major and the minor number of the file's device.
    pub device: [usize; 2],
    /// The inode of the file, or 0 for anonymous memory.
    pub inode: usize,
}

/// The beginning of a line that contains all fields but the name.
const FIELDS: usize = 128;

/// Calls `visit` for each mapping.
///
/// # Errors
/// The error code of the kernel; the file cannot be opened.
pub fn visit(mut visit: impl FnMut(Mapping)) -> Result<(), c_int> {
    let file = syscall::open(c"/proc/self/maps")?;
    read(file, &mut visit);
    syscall::close(file);
    Ok(())
}

fn read(file: c_int, visit: &mut impl FnMut(Mapping)) {
    let mut bytes = [0; 4096];
    let (mut line, mut len) = ([0; FIELDS], 0);
    while let Ok(count @ 1..) = syscall::read(file, &mut bytes) {
        for byte in bytes.iter().take(count) {
            if *byte == b'\n' {
                if let Some(mapping) = line.get(..len).and_then(parse) {
                    visit(mapping);
                }
                len = 0;
            } else if let Some(place) = line.get_mut(len) {
                *place = *byte;
                len += 1;
            }
        }
    }
}

/// Parses `START-END PERMISSIONS OFFSET DEVICE INODE NAME`.
fn parse(line: &[u8]) -> Option<Mapping> {
    let mut fields = line.split(|byte| *byte == b' ');
    let mut addresses = fields.next()?.split(|byte| *byte == b'-');
    let (start, end) = (hexadecimal(addresses.next()?)?, hexadecimal(addresses.next()?)?);
    let permissions = *fields.next()?.first_chunk()?;
    let offset = hexadecimal(fields.next()?)?;
    let mut device = fields.next()?.split(|byte| *byte == b':');
    let device = [hexadecimal(device.next()?)?, hexadecimal(device.next()?)?];
    let inode = decimal(fields.next()?)?;
    Some(Mapping { start, end, permissions, offset, device, inode })
}

fn decimal(digits: &[u8]) -> Option<usize> {
    digits.iter().try_fold(0_usize, |value, byte| {
        let digit = char::from(*byte).to_digit(10)?;
        value.checked_mul(10)?.checked_add(digit as usize)
    })
}

fn hexadecimal(digits: &[u8]) -> Option<usize> {
    digits.iter().try_fold(0_usize, |value, byte| {
        let digit = char::from(*byte).to_digit(16)?;
        Some(value.checked_mul(16)? | digit as usize)
    })
}
