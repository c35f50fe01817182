//! The consoles: the program's input and output, and the kernel's report.
//!
//! The program's input and output are the first serial port, its errors port 0xea, and the kernel's report,
//! line by line, port 0xe9. The last two are debug consoles, which take one byte per `out`.
//!
//! After reset the serial port's FIFOs are disabled, and each byte of input takes a round through the
//! emulator. Enabling them discards a received byte. So the host first sends one byte to be
//! discarded: until it is read no other arrives, and nothing is lost.

use crate::percpu;
use core::fmt::{self, Write};
use core::hint::spin_loop;
use core::sync::atomic::{AtomicBool, Ordering};
use faultless::locks::SpinLock;
use x86_64::instructions::port::Port;

const REPORT: u16 = 0xe9;
const ERROR: u16 = 0xea;
const SERIAL: u16 = 0x3f8;
const SERIAL_QUEUES: u16 = SERIAL + 2;
const SERIAL_STATUS: u16 = SERIAL + 5;
/// FIFO control of the serial port: enabled, with the longest input FIFO.
const QUEUES: u8 = 0xc1;
/// Status of the serial port: a byte has come in.
const RECEIVED: u8 = 1;
/// Status of the serial port: a byte may be sent.
const SENDABLE: u8 = 1 << 5;
/// Status of the serial port: every byte has been sent.
const SENT: u8 = 1 << 6;
const EXIT: u16 = 0xf4;
/// The exit status of the machine after a panic.
const PANICKED: u8 = 0x7f;

/// Each protects its port. Holders do not wait; waiters serve flush requests.
static OUTPUT: SpinLock<()> = SpinLock::new(());
static ERRORS: SpinLock<()> = SpinLock::new(());
static LINE: SpinLock<()> = SpinLock::new(());

fn out(port: u16, byte: u8) {
    // SAFETY: the devices behind these ports take bytes, and do not access memory.
    unsafe { Port::new(port).write(byte) };
}

fn serial_status() -> u8 {
    // SAFETY: reading the status changes nothing.
    unsafe { Port::new(SERIAL_STATUS).read() }
}

/// Sends bytes to the program's output.
pub fn write(bytes: &[u8]) {
    let _held = OUTPUT.lock(percpu::cpu());
    for &byte in bytes {
        while serial_status() & SENDABLE == 0 {
            spin_loop();
        }
        out(SERIAL, byte);
    }
}

/// The next byte of the program's input, if one has come in.
pub fn read() -> Option<u8> {
    /// Whether the FIFOs are enabled.
    static QUEUED: AtomicBool = AtomicBool::new(false);
    let _held = OUTPUT.lock(percpu::cpu());
    if serial_status() & RECEIVED == 0 {
        return None;
    }
    if !QUEUED.swap(true, Ordering::Relaxed) {
        while serial_status() & SENT == 0 {
            spin_loop();
        }
        out(SERIAL_QUEUES, QUEUES);
        return None;
    }
    // SAFETY: a byte was received; the lock is held.
    Some(unsafe { Port::new(SERIAL).read() })
}

/// Sends bytes to the program's error output.
pub fn error(bytes: &[u8]) {
    let _held = ERRORS.lock(percpu::cpu());
    bytes.iter().for_each(|&byte| out(ERROR, byte));
}

/// The report's port.
struct Report;

impl Write for Report {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.bytes().for_each(|byte| out(REPORT, byte));
        Ok(())
    }
}

/// One line of the report. See [`report!`](crate::report!).
pub fn line(text: fmt::Arguments<'_>) {
    let held = LINE.try_lock();
    let held = held.or_else(|| {
        // At boot no flush request can be served, and after a panic none has to be.
        (percpu::has_cpu() && !PANICKING.load(Ordering::Relaxed)).then(|| LINE.lock(percpu::cpu()))
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

/// Reports a panic, and ends the machine. A second CPU that panics waits for that.
pub fn panic(text: fmt::Arguments<'_>) -> ! {
    if !PANICKING.swap(true, Ordering::SeqCst) {
        line(format_args!("panic {text}"));
        end(PANICKED);
    }
    stop()
}

/// Ends the machine; the emulator's exit status is made from `status`.
pub fn end(status: u8) -> ! {
    out(EXIT, status);
    // The device is missing: a triple fault ends the machine, too.
    // SAFETY: nothing runs on this CPU afterwards.
    unsafe {
        let none =
            x86_64::structures::DescriptorTablePointer { limit: 0, base: x86_64::VirtAddr::zero() };
        x86_64::instructions::tables::lidt(&none);
        core::arch::asm!("ud2", options(noreturn));
    }
}

/// Halts this CPU for ever.
pub fn stop() -> ! {
    loop {
        x86_64::instructions::interrupts::disable();
        x86_64::instructions::hlt();
    }
}

/// Ends the machine with the program's exit status, 0 to 255.
pub fn power_off(status: u8) -> ! {
    report!("exit {status}");
    end(status)
}
