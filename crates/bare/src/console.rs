//! What the kernel says, and what programs do.
//!
//! The program's output and input are the first serial port; its errors are port 0xea, the kernel's report,
//! line by line, port 0xe9: debug consoles, which take a byte an `out`.
//!
//! The serial port comes out of reset without its queues, and each byte of input is then a round through the
//! emulator. Switching them on throws away the byte that has come in. So the host sends one that is there to
//! be thrown away: while it waits no other comes in, and nothing is lost.

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
/// Queues of the serial port: on, and the longest for input.
const QUEUES: u8 = 0xc1;
/// Status of the serial port: a byte has come in.
const RECEIVED: u8 = 1;
/// Status of the serial port: a byte may be sent.
const SENDABLE: u8 = 1 << 5;
/// Status of the serial port: every byte has been sent.
const SENT: u8 = 1 << 6;
const EXIT: u16 = 0xf4;
/// What the machine is ended with when the kernel panics.
const PANICKED: u8 = 0x7f;

/// Each holds its port. Holders wait for nobody; waiters answer.
static OUTPUT: SpinLock<()> = SpinLock::new(());
static ERRORS: SpinLock<()> = SpinLock::new(());
static LINE: SpinLock<()> = SpinLock::new(());

fn out(port: u16, byte: u8) {
    // SAFETY: the ports here are of devices that take bytes, and touch no memory.
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
    /// Whether the queues are on.
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
    // SAFETY: a received byte is there, and ours.
    Some(unsafe { Port::new(SERIAL).read() })
}

/// Sends bytes to where the program's errors go.
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
        // At boot nobody can be answered, and after a panic nobody has to be.
        (percpu::has_cpu() && !PANICKING.load(Ordering::Relaxed)).then(|| LINE.lock(percpu::cpu()))
    });
    // What is written here does not fail.
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

/// Reports the end of the kernel, and ends the machine. Whoever comes second waits for that.
pub fn panic(text: fmt::Arguments<'_>) -> ! {
    if !PANICKING.swap(true, Ordering::SeqCst) {
        line(format_args!("panic {text}"));
        end(PANICKED);
    }
    stop()
}

/// Ends the machine; the emulator's exit status tells `status` as far as it can.
pub fn end(status: u8) -> ! {
    out(EXIT, status);
    // No such device. A fault that cannot be handled ends the machine too.
    // SAFETY: nothing runs here after it.
    unsafe {
        let none =
            x86_64::structures::DescriptorTablePointer { limit: 0, base: x86_64::VirtAddr::zero() };
        x86_64::instructions::tables::lidt(&none);
        core::arch::asm!("ud2", options(noreturn));
    }
}

/// Never does anything again.
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
