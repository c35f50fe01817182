//! The consoles: the program's input and outputs, and the kernel's report.
//!
//! The program's output is port 0xeb, its error output port 0xea, and the kernel's report, line by
//! line, port 0xe9. All three are debug consoles, which take one byte per `out`. QEMU completes the
//! `out` only after the host's pipe has accepted the byte, so no byte is lost: if the reader
//! pauses, the machine pauses too. A serial port, by contrast, drops a byte after a few retries.
//! The check for lost flush requests allows for such [pauses](last_pause), and the host compares
//! the number of received bytes with the number [sent](power_off).
//!
//! The program's input is the first serial port. After reset its FIFOs are disabled, and each byte
//! of input takes a round trip through the emulator. Enabling the FIFOs discards a received byte.
//! So the host first sends one byte to be discarded: the port accepts no further byte before the
//! kernel has read this one, so no input is lost.

use crate::arch::clock;
use crate::percpu;
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use faultless::locks::SpinLock;
use x86_64::instructions::port::Port;

const SERIAL: u16 = 0x3f8;
const SERIAL_QUEUES: u16 = SERIAL + 2;
const SERIAL_STATUS: u16 = SERIAL + 5;
/// FIFO control of the serial port: enabled, with the longest input FIFO.
const QUEUES: u8 = 0xc1;
/// Status of the serial port: a byte was received.
const RECEIVED: u8 = 1;
const EXIT: u16 = 0xf4;
/// The exit status of the machine after a panic.
const PANICKED: u8 = 0x7f;
/// The shortest time in which an output counts as paused, in nanoseconds.
const PAUSE_NS: u64 = 500_000_000;

/// A debug console.
struct Channel {
    port: u16,
    /// The number of bytes sent.
    sent: AtomicU64,
    /// The start of the current write, in nanoseconds since boot; 0 if there is no write.
    since: AtomicU64,
    /// The end of the last pause, in nanoseconds since boot.
    paused: AtomicU64,
    /// Held while bytes are sent. Waiters serve flush requests.
    lock: SpinLock<()>,
}

impl Channel {
    const fn new(port: u16) -> Self {
        Self {
            port,
            sent: AtomicU64::new(0),
            since: AtomicU64::new(0),
            paused: AtomicU64::new(0),
            lock: SpinLock::new(()),
        }
    }

    /// Sends bytes. The caller holds the lock, or is the only running CPU.
    fn send(&self, bytes: &[u8]) {
        let start = clock::now().max(1);
        self.since.store(start, Ordering::Relaxed);
        bytes.iter().for_each(|&byte| out(self.port, byte));
        self.sent.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        let end = clock::now();
        if end.saturating_sub(start) > PAUSE_NS {
            self.paused.store(end, Ordering::Relaxed);
        }
        self.since.store(0, Ordering::Relaxed);
    }

    fn last_pause(&self, now: u64) -> u64 {
        let since = self.since.load(Ordering::Relaxed);
        if since != 0 && now.saturating_sub(since) > PAUSE_NS {
            return now;
        }
        self.paused.load(Ordering::Relaxed)
    }
}

static OUTPUT: Channel = Channel::new(0xeb);
static ERRORS: Channel = Channel::new(0xea);
static REPORT: Channel = Channel::new(0xe9);
/// Protects the input port.
static INPUT: SpinLock<()> = SpinLock::new(());

fn out(port: u16, byte: u8) {
    // SAFETY: the devices behind these ports take bytes, and do not access memory.
    unsafe { Port::new(port).write(byte) };
}

/// Returns the end of the last pause of an output, in nanoseconds since boot; `now` if an output is
/// paused. During a pause, other CPUs may be unable to take interrupts: an emulator may hold its
/// own lock.
pub(crate) fn last_pause(now: u64) -> u64 {
    [&OUTPUT, &ERRORS, &REPORT]
        .map(|channel| channel.last_pause(now))
        .into_iter()
        .max()
        .unwrap_or(0)
}

/// Sends bytes to the program's output.
pub fn write(bytes: &[u8]) {
    let _held = OUTPUT.lock.lock(percpu::cpu());
    OUTPUT.send(bytes);
}

/// Returns the next byte of the program's input, if a byte was received.
pub fn read() -> Option<u8> {
    /// Set if the FIFOs are enabled.
    static QUEUED: AtomicBool = AtomicBool::new(false);
    let _held = INPUT.lock(percpu::cpu());
    // SAFETY: reading the status has no side effects.
    let status: u8 = unsafe { Port::new(SERIAL_STATUS).read() };
    if status & RECEIVED == 0 {
        return None;
    }
    if !QUEUED.swap(true, Ordering::Relaxed) {
        out(SERIAL_QUEUES, QUEUES);
        return None;
    }
    // SAFETY: a byte was received; the lock is held.
    Some(unsafe { Port::new(SERIAL).read() })
}

/// Sends bytes to the program's error output.
pub fn error(bytes: &[u8]) {
    let _held = ERRORS.lock.lock(percpu::cpu());
    ERRORS.send(bytes);
}

/// The report's port.
struct Report;

impl Write for Report {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        REPORT.send(text.as_bytes());
        Ok(())
    }
}

/// Writes one line of the report. See [`report!`](crate::report!).
pub fn line(text: fmt::Arguments<'_>) {
    let held = REPORT.lock.try_lock();
    let held = held.or_else(|| {
        // At boot flush requests cannot be served, and after a panic they need not be served.
        (percpu::has_cpu() && !PANICKING.load(Ordering::Relaxed))
            .then(|| REPORT.lock.lock(percpu::cpu()))
    });
    // Writing to a port does not fail.
    let _ = Report.write_fmt(text);
    let _ = Report.write_str("\n");
    drop(held);
}

/// Writes one line of the kernel's report, formatted as by `format!`.
#[macro_export]
macro_rules! report {
    ($($text:tt)*) => { $crate::console::line(format_args!($($text)*)) };
}

static PANICKING: AtomicBool = AtomicBool::new(false);

/// Reports a panic, and ends the machine. A second CPU that panics waits for the end.
pub fn panic(text: fmt::Arguments<'_>) -> ! {
    if !PANICKING.swap(true, Ordering::SeqCst) {
        line(format_args!("panic {text}"));
        end(PANICKED);
    }
    stop()
}

/// Ends the machine; the emulator derives its exit status from `status`.
pub fn end(status: u8) -> ! {
    out(EXIT, status);
    // The device is missing: a triple fault ends the machine, too. SAFETY: no code runs on this CPU
    // afterwards.
    unsafe {
        let none =
            x86_64::structures::DescriptorTablePointer { limit: 0, base: x86_64::VirtAddr::zero() };
        x86_64::instructions::tables::lidt(&none);
        core::arch::asm!("ud2", options(noreturn));
    }
}

/// Halts this CPU permanently.
pub fn stop() -> ! {
    loop {
        x86_64::instructions::interrupts::disable();
        x86_64::instructions::hlt();
    }
}

/// Ends the machine with the program's exit status, 0 to 255. Reports the numbers of bytes sent to
/// the two outputs, so that the host can check that all bytes arrived.
pub fn power_off(status: u8) -> ! {
    let [output, errors] = [&OUTPUT, &ERRORS].map(|channel| channel.sent.load(Ordering::Relaxed));
    report!("sent {output} {errors}");
    report!("exit {status}");
    end(status)
}
