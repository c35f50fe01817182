//! Warnings about refused operations, on standard error: before `main`, and at the end of the
//! program. While the program runs, the library prints no line.
//!
//! The C library reports the end of a program that returns from `main` or calls `exit`. A program
//! that calls `_exit`, or that a signal kills, prints no warning at its end. Warnings at the end go
//! to the file that was standard error at the start, and are omitted if the program has closed
//! this file, or uses its descriptor for another file. After a seccomp filter of the program no
//! warning is printed. A line that a slow reader would delay is
//! omitted, too.

use crate::layout::Reason;
use crate::{report, stop, syscall};
use core::ffi::c_int;
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

const STANDARD_ERROR: c_int = 2;
/// The longest message in bytes.
const MESSAGE: usize = 512;

/// The identifier of the process that prints warnings at its end, or 0. Forked children have
/// others.
static PROCESS: AtomicUsize = AtomicUsize::new(0);
/// The device and the inode of standard error at the start.
static FILE: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
/// The printed reasons: a bit for each of [`Reason::ALL`].
static PRINTED: AtomicU32 = AtomicU32::new(0);

const _: () = assert!(Reason::ALL.len() <= u32::BITS as usize);

/// Prints the refused operations before the program starts, and requests those of the end.
pub fn start() {
    let Ok(identity) = syscall::identity(STANDARD_ERROR) else { return };
    for (place, value) in FILE.iter().zip(identity) {
        place.store(value, Ordering::Relaxed);
    }
    print(|message, _| message.push(b": "));
    PROCESS.store(syscall::getpid(), Ordering::Relaxed);
}

/// Prints the operations that were refused after the start, with their numbers.
pub extern "C" fn end() {
    // A filter could end the program at the calls of a warning.
    if stop::is_filtered() || PROCESS.load(Ordering::Relaxed) != syscall::getpid() {
        return;
    }
    let [device, inode] = FILE.each_ref().map(|word| word.load(Ordering::Relaxed));
    if syscall::identity(STANDARD_ERROR) != Ok([device, inode]) {
        return;
    }
    print(|message, times| {
        message.push(b": refused ");
        message.push_number(times);
        let noun: &[u8] = if times == 1 { b" time: " } else { b" times: " };
        message.push(noun);
    });
}

/// Prints each reason that was not printed before, in one line: the operation, the text that
/// `number` adds for the number of refusals, the reason, the error code, and the remedy.
fn print(number: impl Fn(&mut Message, u64)) {
    for (index, reason) in Reason::ALL.into_iter().enumerate() {
        let (times, code) = report::refusals(reason);
        let bit = 1_u32 << index;
        if times == 0 || PRINTED.fetch_or(bit, Ordering::Relaxed) & bit != 0 {
            continue;
        }
        let (why, remedy) = reason.text(code);
        let mut message = Message { bytes: [0; MESSAGE], len: 0 };
        message.push(b"faultless: warning: ");
        message.push(reason.operation().as_bytes());
        number(&mut message, times);
        message.push(why.as_bytes());
        if let Some(error) = reason.error(code) {
            message.push(b" (error ");
            message.push_number(error.into());
            message.push(b")");
        }
        for part in [": ", remedy, "\n"] {
            message.push(part.as_bytes());
        }
        syscall::write(STANDARD_ERROR, message.bytes.get(..message.len).unwrap_or_default());
    }
}

/// A message in parts. Parts that do not fit are lost.
struct Message {
    bytes: [u8; MESSAGE],
    len: usize,
}

impl Message {
    fn push(&mut self, part: &[u8]) {
        if let Some(place) = self.bytes.get_mut(self.len..self.len + part.len()) {
            place.copy_from_slice(part);
            self.len += part.len();
        }
    }

    fn push_number(&mut self, number: u64) {
        if number >= 10 {
            self.push_number(number / 10);
        }
        self.push(&[b'0' + (number % 10) as u8]);
    }
}
