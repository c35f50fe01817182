//! Stands in for the rest of the kernel: sees that what is there works.

pub mod syscall {
    use crate::arch::TrapFrame;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Errno(pub u16);

    impl Errno {
        pub const EFAULT: Self = Self(14);
        pub const ENOMEM: Self = Self(12);
        pub const ENAMETOOLONG: Self = Self(36);
    }

    pub fn dispatch(frame: &mut TrapFrame) {
        super::dispatch(frame);
    }
}

pub mod task {
    use crate::arch::{TrapFrame, power_off, report};
    use crate::percpu;
    use core::sync::atomic::Ordering;
    use faultless::{Access, FaultError};

    pub fn attention(_: &mut TrapFrame) {}

    pub fn page_fault(frame: &mut TrapFrame, addr: u64, access: Access, error: FaultError) {
        report!("message refused {access:?} at {addr:#x}: {error:?}: {frame:?}");
        power_off(139);
    }

    pub fn exception(frame: &mut TrapFrame) {
        report!("message exception {frame:?}");
        power_off(132);
    }

    pub fn tick() {}

    pub fn reschedule() {
        percpu::this().attention.store(true, Ordering::Relaxed);
    }

    pub mod scheduler {
        pub use crate::selfcheck::{idle_loop, init};
    }
}

use crate::arch::context::{Context, KernelStack, prepare, set_kernel_stack, switch};
use crate::arch::fpu::{self, FpuState};
use crate::arch::{self, TrapFrame, apic, clock, power_off, report, user};
use crate::{heap, machine, percpu};
use alloc::boxed::Box;
use core::sync::atomic::{AtomicUsize, Ordering};
use faultless::{CpuId, MapFlags, Prot, Space};

static HERE: AtomicUsize = AtomicUsize::new(0);

pub fn init(cpus: usize) {
    report!(
        "message {cpus} CPUs, {} free frames, heap {:?}",
        percpu::vm().free_frames(),
        heap::usage()
    );
    report!(
        "message {:?} {:?} {}",
        arch::features(),
        crate::boot::command_line(),
        crate::boot::initrd().len()
    );
    report!("message now {} wall {}", clock::now(), clock::wall());
}

pub fn idle_loop() -> ! {
    HERE.fetch_add(1, Ordering::SeqCst);
    if percpu::id().0 != 0 {
        loop {
            arch::idle();
        }
    }
    while HERE.load(Ordering::SeqCst) != percpu::cpus() {
        arch::idle();
    }
    for cpu in 1..percpu::cpus() as u16 {
        apic::interrupt(CpuId(cpu), apic::Vector::Reschedule);
    }
    clock::delay(50_000_000);
    for cpu in 0..percpu::cpus() as u16 {
        report!("message cpu {cpu} interrupts {:?}", percpu::interrupts(CpuId(cpu)));
    }
    let cpu = percpu::cpu();
    let space = Box::leak(Box::new(Space::new(cpu).unwrap()));
    machine::adopt(space);
    machine::run(Some(space));
    let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS;
    let all = Prot::READ | Prot::WRITE | Prot::EXEC;
    let at = space.mmap(cpu, 0, 1 << 20, all, flags).unwrap();
    // mov [rip-64K..], touch; mov eax, 39; syscall; loop
    const CODE: &[u8] = &[
        0xb9, 0xe8, 0x03, 0, 0,    // mov ecx, 1000
        0x51, // push rcx
        0xb8, 39, 0, 0, 0, // mov eax, 39
        0x0f, 0x05, // syscall
        0x59, // pop rcx
        0xff, 0xc9, // dec ecx
        0x75, 0xf3, // jnz -13
        0xb9, 100, 0, 0, 0, // mov ecx, 100
        0x48, 0x8d, 0xbc, 0x24, 0, 0, 0xf8, 0xff, // lea rdi, [rsp - 0x80000]
        0xc6, 0x07, 1, // mov byte [rdi], 1
        0x48, 0x81, 0xc7, 0, 0x10, 0, 0, // add rdi, 4096
        0xff, 0xc9, // dec ecx
        0x75, 0xf2, // jnz
        0xb8, 60, 0, 0, 0, // mov eax, 60
        0x0f, 0x05,
    ];
    user::write_bytes(at, CODE).unwrap();
    user::write::<u64>(at + 4093, &0x1122_3344_5566_7788).unwrap();
    assert_eq!(user::read::<u64>(at + 4093), Ok(0x1122_3344_5566_7788));
    user::write_bytes(at + 5000, b"hello\0").unwrap();
    assert_eq!(user::string(at + 5000, 100).unwrap(), b"hello");
    assert_eq!(user::string(at + 5000, 3), Err(syscall::Errno::ENAMETOOLONG));
    assert_eq!(user::read::<u64>(at + (1 << 20) - 4), Err(syscall::Errno::EFAULT));
    assert_eq!(user::read::<u64>(u64::MAX - 2), Err(syscall::Errno::EFAULT));
    assert_eq!(user::read::<u64>(0), Err(syscall::Errno::EFAULT));
    assert_eq!(user::compare_exchange_u32(at + 6000, 0, 5), Ok(Ok(0)));
    assert_eq!(user::compare_exchange_u32(at + 6000, 0, 6), Ok(Err(5)));
    assert_eq!(user::load_u32(at + 6000), Ok(5));
    user::zero_out(at + 5998, 9).unwrap();
    assert_eq!(user::load_u32(at + 6000), Ok(0));
    let stack = Box::leak(Box::new(KernelStack::try_new().unwrap()));
    let state = FpuState::try_new().unwrap();
    fpu::restore(&state);
    let frame = TrapFrame::start(at, at + (1 << 20) - 64);
    let context = prepare(stack, frame);
    set_kernel_stack(stack.top());
    let mut own = Context::default();
    // SAFETY: prepared just now.
    unsafe { switch(&mut own, &context) };
    unreachable!()
}

static START: AtomicUsize = AtomicUsize::new(0);
static CALLS: AtomicUsize = AtomicUsize::new(0);

fn dispatch(frame: &mut TrapFrame) {
    match frame.rax {
        39 => {
            let now = clock::now() as usize;
            if CALLS.fetch_add(1, Ordering::Relaxed) == 0 {
                START.store(now, Ordering::Relaxed);
            }
            frame.rax = 1;
        }
        60 => {
            report!(
                "message from first call to exit {} ns",
                clock::now() as usize - START.load(Ordering::Relaxed)
            );
            report!("message {} calls\n{}", CALLS.load(Ordering::Relaxed), percpu::vm().totals());
            arch::console::write(b"hello\n");
            power_off(7);
        }
        other => panic!("call {other}"),
    }
}
