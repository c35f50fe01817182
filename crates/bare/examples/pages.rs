//! A kernel of a hundred lines: it maps one MiB, starts a program of thirty bytes there, and lets
//! the subsystem serve the program's page faults.
//!
//! The program stores to each page of its memory, reports the number of pages with its only system
//! call, and then stores beyond the end. The subsystem cannot serve this fault and passes it to the
//! kernel, which ends the machine.
//!
//! `cargo build --profile kernel -p faultless-bare --example pages --features kernel --target x86_64-unknown-none`,
//! then
//! `qemu-system-x86_64 -M microvm -cpu max -nographic -debugcon stdio -serial null -monitor null -device isa-debug-exit,iobase=0xf4 -append cpus=1 -kernel target/x86_64-unknown-none/kernel/examples/pages`.
//! QEMU ends with status 1, which its device makes from the exit status 0 of the example.
#![no_std]
#![no_main]

extern crate alloc;

use alloc::boxed::Box;
use core::arch::global_asm;
use core::cell::UnsafeCell;
use core::hint::spin_loop;
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use faultless::format::PAGE_ATTRIBUTES;
use faultless::try_box;
use faultless::{Access, CpuId, FaultError, MapFlags, PAGE_SIZE, Prot, Space};
use faultless_bare::arch::fpu::FpuState;
use faultless_bare::arch::{self, TrapFrame, user};
use faultless_bare::console::power_off;
use faultless_bare::percpu;
use faultless_bare::task::context::{self, Context};
use faultless_bare::task::{self, Task};
use faultless_bare::{Kernel, machine, report};

/// Bytes of the program's memory.
const MEMORY: u64 = 1 << 20;

// The program: `rdi` is the start of its memory, `rsi` the end.
global_asm!(
    ".section .rodata.program, \"a\"",
    "program_start:",
    "xor eax, eax",
    "2: mov [rdi], rdi",
    "inc eax",
    "add rdi, 4096",
    "cmp rdi, rsi",
    "jb 2b",
    "syscall",
    "mov [rsi], rsi",
    "program_end:",
    ".text",
);

/// The program's bytes.
fn program() -> &'static [u8] {
    unsafe extern "C" {
        static program_start: u8;
        static program_end: u8;
    }
    let (start, end) = (&raw const program_start, &raw const program_end);
    // SAFETY: the two symbols delimit constant bytes of the image.
    unsafe { core::slice::from_raw_parts(start, end.offset_from_unsigned(start)) }
}

/// The program's task, for the CPU that runs the program.
static TASK: AtomicPtr<Task> = AtomicPtr::new(ptr::null_mut());

/// The number of CPUs ready to cache device memory as the subsystem requires.
static READY: AtomicUsize = AtomicUsize::new(0);

struct Example;

faultless_bare::kernel!(Example);

impl Kernel for Example {
    fn start(cpus: usize) {
        let cpu = percpu::cpu();
        let space =
            try_box(Space::new(cpu).expect("memory for a space")).expect("memory for a space");
        let space = Box::leak(space);
        machine::adopt(space);
        // SAFETY: the space is never dropped.
        unsafe { machine::run(space) };

        let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS;
        let code =
            space.mmap(cpu, None, PAGE_SIZE, Prot::RWX, flags).expect("one page of address space");
        user::write_bytes(code, program()).expect("the page is mapped");
        // Far from the code, so that no mapping follows.
        let prot = Prot::READ | Prot::WRITE;
        let memory = space.mmap(cpu, code - (1 << 30), MEMORY, prot, flags).expect("room");

        let frame = TrapFrame { rdi: memory, rsi: memory + MEMORY, ..TrapFrame::start(code, 0) };
        let fpu = FpuState::try_new().expect("memory for registers");
        let task = Task::try_new(frame, fpu).expect("memory for a task");
        TASK.store(Box::leak(try_box(task).expect("memory for a task")), Ordering::Relaxed);
        report!("message {cpus} CPUs, {} MiB mapped", MEMORY >> 20);
    }

    fn run() -> ! {
        // SAFETY: leaked by `start`.
        let task = unsafe { &*TASK.load(Ordering::Relaxed) };
        assert_eq!(arch::page_attributes(), PAGE_ATTRIBUTES, "{:?}", percpu::id());
        READY.fetch_add(1, Ordering::Relaxed);
        if percpu::id() == CpuId(0) {
            while READY.load(Ordering::Relaxed) != percpu::cpus() {
                spin_loop();
            }
            report!("message {} CPUs know all cache modes", percpu::cpus());
            context::set_kernel_stack(task.stack.top());
            let left = UnsafeCell::new(Context::default());
            // SAFETY: no other CPU runs the task, and this code is never resumed.
            unsafe {
                task::set_current(percpu::this(), task);
                task.registers.load();
                context::switch(left.get(), task.registers.context.get());
            }
        }
        loop {
            arch::idle();
        }
    }

    fn system_call(frame: &mut TrapFrame) {
        let task = task::running(percpu::this()).expect("the task of the program");
        report!("message {} pages stored to, {} page faults", frame.rax, task.faults());
    }

    fn page_fault(frame: &mut TrapFrame, addr: u64, access: Access, why: FaultError) {
        let behind = addr == frame.rsi;
        report!("message {access:?} behind the end: {why:?}");
        power_off(if behind { 0 } else { 1 })
    }

    fn exception(frame: &mut TrapFrame) {
        panic!("the program failed: {frame:?}");
    }
}
