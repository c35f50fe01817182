//! Devices: the files of `/dev`, and the console.

use super::stream::{Events, Stream, erase};
use super::transfer::Transfer;
use crate::errno::{Errno, Result};
use crate::task::wait::Changes;
use core::sync::atomic::{AtomicU64, Ordering};
use faultless_bare::arch::clock;
use faultless_bare::console;
use faultless_bare::sync::Mutex;
use faultless_collections::Arc;

/// A device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// `/dev/null`
    Null,
    /// `/dev/zero`
    Zero,
    /// `/dev/full`
    Full,
    /// `/dev/random` and `/dev/urandom`
    Random,
    /// The program's input and output.
    Console,
    /// The program's error output.
    Complaints,
}

impl Device {
    /// Returns the device with these numbers.
    pub const fn numbered(major: u32, minor: u32) -> Option<Self> {
        Some(match (major, minor) {
            (1, 3) => Self::Null,
            (1, 5) => Self::Zero,
            (1, 7) => Self::Full,
            (1, 8 | 9) => Self::Random,
            (5, 0 | 1) => Self::Console,
            _ => return None,
        })
    }

    /// Returns the device's numbers on Linux, as in `st_rdev`.
    pub const fn number(self) -> u64 {
        match self {
            Self::Null => 1 << 8 | 3,
            Self::Zero => 1 << 8 | 5,
            Self::Full => 1 << 8 | 7,
            Self::Random => 1 << 8 | 9,
            Self::Console | Self::Complaints => 5 << 8 | 1,
        }
    }

    /// Returns whether the device is the console, which has no position.
    pub const fn is_console(self) -> bool {
        matches!(self, Self::Console | Self::Complaints)
    }

    /// Opens the stream of the device.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn try_open(self) -> Result<Arc<dyn Stream>> {
        Ok(erase(Arc::try_new(self)?))
    }
}

/// The number of bytes copied through the kernel at a time.
const BOUNCE: usize = 512;

impl Stream for Device {
    fn read(&self, to: &mut Transfer<'_>) -> Result {
        match self {
            Self::Null => return Ok(0),
            Self::Zero | Self::Full => {
                while to.left() != 0 {
                    // A large read takes long, and other CPUs may wait for a flush.
                    to.put_zeros(64 << 10);
                    faultless_bare::percpu::cpu().serve_flushes();
                }
            }
            Self::Random => {
                let mut bytes = [0; BOUNCE];
                while to.left() != 0 {
                    fill_random(&mut bytes);
                    to.put_bytes(&bytes);
                    faultless_bare::percpu::cpu().serve_flushes();
                }
            }
            Self::Console | Self::Complaints => return INPUT.lock().read(to),
        }
        to.result()
    }

    fn write(&self, from: &mut Transfer<'_>) -> Result {
        match self {
            Self::Null | Self::Zero | Self::Random => {
                from.skip(from.left());
            }
            Self::Full => return Err(Errno::ENOSPC),
            Self::Console | Self::Complaints => {
                let say = if *self == Self::Console { console::write } else { console::error };
                let mut bytes = [0; BOUNCE];
                while from.left() != 0 {
                    let taken = from.take_bytes(&mut bytes);
                    say(&bytes[..taken as usize]);
                    faultless_bare::percpu::cpu().serve_flushes();
                }
            }
        }
        from.result()
    }

    fn ready(&self) -> Events {
        if self.is_console() && !INPUT.lock().is_ready() {
            return Events::WRITE;
        }
        Events::READ | Events::WRITE
    }

    fn look_again(&self) -> Option<u64> {
        self.is_console().then(|| INPUT.lock().look_again())
    }

    fn changes(&self) -> Option<&Arc<Changes>> {
        None
    }

    fn queued(&self) -> Result {
        if !self.is_console() {
            return Err(Errno::ENOTTY);
        }
        let mut input = INPUT.lock();
        input.fill();
        Ok(input.len as u64)
    }
}

/// Unread console input. The port raises no interrupts: waiting threads poll it periodically.
#[derive(Debug)]
struct Input {
    /// A ring: the first of the bytes is at `head`, and there are `len`.
    ring: [u8; MOST],
    head: usize,
    len: usize,
    /// Set if the next byte is literal.
    literal: bool,
    /// Set if the input has ended.
    ended: bool,
    /// When the last byte arrived, in nanoseconds since boot.
    last: u64,
}

/// The maximum number of buffered bytes.
const MOST: usize = 4096;

static INPUT: Mutex<Input> =
    Mutex::new(Input { ring: [0; MOST], head: 0, len: 0, literal: false, ended: false, last: 0 });

/// Ends the console input.
pub fn end_input() {
    INPUT.lock().ended = true;
}

impl Input {
    /// From the host: the input ends.
    const END: u8 = 0x04;
    /// From the host: the next byte is literal.
    const LITERAL: u8 = 0x10;
    /// Nanoseconds between two polls: without recent input, and with recent input.
    const PERIODS: [u64; 2] = [5_000_000, 100_000];
    /// Nanoseconds of busy polling after a byte.
    const SPIN: u64 = 50_000;

    /// When to poll next.
    fn look_again(&self) -> u64 {
        let now = clock::now();
        now + Self::PERIODS[usize::from(now - self.last < 4 * Self::PERIODS[0])]
    }

    /// Buffers the arrived bytes.
    fn fill(&mut self) {
        let mut until = 0;
        while !self.ended && self.len < MOST {
            let Some(byte) = console::read() else {
                if clock::now() >= until {
                    break;
                }
                core::hint::spin_loop();
                continue;
            };
            self.last = clock::now();
            until = self.last + Self::SPIN;
            match byte {
                Self::LITERAL if !self.literal => self.literal = true,
                Self::END if !self.literal => self.ended = true,
                byte => {
                    self.literal = false;
                    self.ring[(self.head + self.len) % MOST] = byte;
                    self.len += 1;
                }
            }
        }
    }

    fn is_ready(&mut self) -> bool {
        self.fill();
        self.ended || self.len != 0
    }

    fn read(&mut self, to: &mut Transfer<'_>) -> Result {
        if !self.is_ready() && to.left() != 0 {
            return Err(Errno::EAGAIN);
        }
        // Two pieces if the data wraps around.
        for _ in 0..2 {
            let end = MOST.min(self.head + self.len);
            let taken = to.put_bytes(&self.ring[self.head..end]) as usize;
            self.head = (self.head + taken) % MOST;
            self.len -= taken;
        }
        to.result()
    }
}

/// Fills `bytes` with pseudorandom numbers: SplitMix64 over a counter. For hash seeds and tests;
/// the numbers are predictable, so no secret may depend on them.
pub fn fill_random(bytes: &mut [u8]) {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
    static COUNTER: AtomicU64 = AtomicU64::new(0x5eed);
    for chunk in bytes.chunks_mut(8) {
        let mut word = COUNTER.fetch_add(STEP, Ordering::Relaxed).wrapping_add(STEP);
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^= word >> 31;
        chunk.copy_from_slice(&word.to_ne_bytes()[..chunk.len()]);
    }
}
