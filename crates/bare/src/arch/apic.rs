//! The local interrupt controllers (APICs): interrupts between CPUs, and each CPU's timer.
//!
//! The registers are memory-mapped (xAPIC), which works for up to 255 CPUs. The legacy interrupt
//! controller (PIC) is masked permanently; its vectors are moved away from the exception vectors.

use core::hint::spin_loop;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering, compiler_fence};
use faultless::CpuId;
use x86_64::instructions::port::Port;
use x86_64::registers::model_specific::Msr;

/// The address of the registers: the last 2 MiB of virtual memory.
pub const MAPPED_AT: u64 = 0xffff_ffff_ffe0_0000;

const ID: u64 = 0x20;
const PRIORITY: u64 = 0x80;
const END_OF_INTERRUPT: u64 = 0xb0;
const SPURIOUS: u64 = 0xf0;
const COMMAND: u64 = 0x300;
const COMMAND_TARGET: u64 = 0x310;
const TIMER: u64 = 0x320;
const ERROR: u64 = 0x370;
const TIMER_START: u64 = 0x380;
const TIMER_NOW: u64 = 0x390;
const TIMER_DIVIDER: u64 = 0x3e0;

/// `SPURIOUS`: the controller is on.
const ON: u32 = 1 << 8;
/// `COMMAND`: the previous command is still being sent.
const SENDING: u32 = 1 << 12;
/// `COMMAND`: level assert, set in all commands except one.
const ASSERT: u32 = 1 << 14;
/// `TIMER` and others: masked.
const MASKED: u32 = 1 << 16;
/// Divides by 16.
const BY_16: u32 = 0b0011;

/// The interrupt vectors. The upper four bits are the class: a [parked](super::park) CPU accepts
/// only the highest class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Vector {
    /// A request to serve flush requests.
    Flush = 0xf0,
    /// A request to reschedule.
    Reschedule = 0xe1,
    /// The timer expired.
    Timer = 0xe2,
    /// An interrupt of a device.
    Device = 0xe3,
    /// A wake-up of a parked CPU.
    Wake = 0xf1,
    /// The controller reports an error.
    Error = 0xfe,
    /// A spurious interrupt.
    Spurious = 0xff,
}

impl Vector {
    /// Returns the interrupt with this vector, if any.
    #[inline]
    pub(crate) const fn from_number(vector: u64) -> Option<Self> {
        match vector {
            0xf0 => Some(Self::Flush),
            0xe1 => Some(Self::Reschedule),
            0xe2 => Some(Self::Timer),
            0xe3 => Some(Self::Device),
            0xf1 => Some(Self::Wake),
            0xfe => Some(Self::Error),
            0xff => Some(Self::Spurious),
            _ => None,
        }
    }
}

/// The maximum number of CPUs: a set of CPUs is one word.
pub const MAX_CPUS: usize = 64;

/// Each CPU's APIC ID.
static IDS: [AtomicU8; MAX_CPUS] = [const { AtomicU8::new(0) }; MAX_CPUS];

/// Timer counts per second, after the divider.
static TIMER_HZ: AtomicU64 = AtomicU64::new(0);

fn read(register: u64) -> u32 {
    // SAFETY: the registers are mapped at boot; those used here may be read at any time.
    unsafe { ((MAPPED_AT + register) as *const u32).read_volatile() }
}

fn write(register: u64, value: u32) {
    // SAFETY: the registers are mapped at boot. Writes raise interrupts, which the kernel handles,
    // or start other CPUs, which `boot::cpus` has prepared.
    unsafe { ((MAPPED_AT + register) as *mut u32).write_volatile(value) };
}

/// The physical address of the registers.
pub fn base() -> u64 {
    let register = Msr::new(0x1b);
    // SAFETY: every processor with a local controller has this register.
    unsafe { register.read() & 0xf_ffff_f000 }
}

/// Masks the legacy controller permanently.
pub(crate) fn mask_old() {
    let put = |port: u16, value: u8| {
        // SAFETY: the ports of the two legacy controllers.
        unsafe { Port::new(port).write(value) };
    };
    // A pending interrupt would arrive as an exception.
    for (command, data, first) in [(0x20, 0x21, 0x20), (0xa0, 0xa1, 0x28)] {
        put(command, 0x11);
        put(data, first);
        put(data, if command == 0x20 { 4 } else { 2 });
        put(data, 1);
        put(data, 0xff);
    }
}

/// Switches this CPU's controller on.
pub(crate) fn enable() {
    write(ERROR, Vector::Error as u32);
    write(TIMER, MASKED);
    write(PRIORITY, 0);
    write(SPURIOUS, ON | Vector::Spurious as u32);
}

/// Measures the frequency of the timers.
pub(crate) fn measure_timer() {
    const NS: u64 = 10_000_000;
    write(TIMER_DIVIDER, BY_16);
    // Read before the timer starts. If the host is busy in between, the timer seems slow, so later
    // interrupts come early rather than late.
    let start = super::clock::now();
    write(TIMER_START, u32::MAX);
    super::clock::delay(NS);
    let counts = u64::from(u32::MAX - read(TIMER_NOW));
    let took = (super::clock::now() - start).max(1);
    write(TIMER_START, 0);
    TIMER_HZ.store(counts * 1_000_000_000 / took, Ordering::Relaxed);
}

/// Sets this CPU's timer to interrupt once, in `ns` nanoseconds, replacing the earlier setting. The
/// counter's width limits the time (a minute at 1 GHz).
pub fn start_timer(ns: u64) {
    let counts = u128::from(ns) * u128::from(TIMER_HZ.load(Ordering::Relaxed)) / 1_000_000_000;
    write(TIMER_DIVIDER, BY_16);
    write(TIMER, Vector::Timer as u32);
    write(TIMER_START, counts.clamp(1, u128::from(u32::MAX)) as u32);
}

/// Stops this CPU's timer.
pub fn stop_timer() {
    write(TIMER_START, 0);
}

/// Records that the APIC ID of `cpu` is `id`.
pub(crate) fn set_id(cpu: CpuId, id: u8) {
    IDS[cpu.index()].store(id, Ordering::Relaxed);
}

/// This CPU's APIC ID.
pub(crate) fn id() -> u8 {
    (read(ID) >> 24) as u8
}

/// Ends the interrupt in service (EOI).
#[inline]
pub(crate) fn end_of_interrupt() {
    write(END_OF_INTERRUPT, 0);
}

/// Interrupts another CPU, which then sees all earlier stores of this CPU: the controller's
/// registers are uncached, so the processor writes to them after these stores, and the compiler
/// does not reorder the writes.
pub fn interrupt(cpu: CpuId, vector: Vector) {
    compiler_fence(Ordering::SeqCst);
    command(IDS[cpu.index()].load(Ordering::Relaxed), ASSERT | vector as u32);
}

/// Resets the CPU with this APIC ID (INIT).
pub(crate) fn send_init(id: u8) {
    command(id, ASSERT | 0b101 << 8);
}

/// Starts the CPU with this APIC ID, which was reset, at `addr`: below 1 MiB, a multiple of 4 KiB
/// (SIPI).
pub(crate) fn send_startup(id: u8, addr: u64) {
    command(id, ASSERT | 0b110 << 8 | (addr >> 12) as u32 & 0xff);
}

fn command(target: u8, command: u32) {
    while read(COMMAND) & SENDING != 0 {
        spin_loop();
    }
    write(COMMAND_TARGET, u32::from(target) << 24);
    write(COMMAND, command);
}
