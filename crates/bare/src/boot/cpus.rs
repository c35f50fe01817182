//! Starting the other CPUs.
//!
//! The ACPI tables list the CPUs; without the tables, `cpus=N` on the command line gives their
//! number. `cpus=N` also limits the number of started CPUs. Each CPU gets a number by its place in
//! the list, its [`PerCpu`] and a stack. A started CPU arrives in [`start_other`] and records its
//! arrival in [`STATES`]. A CPU that has not arrived after [`PATIENCE_NS`] is skipped; if it
//! arrives later, it halts.

use super::entry::{STACKS, TRAMPOLINE, trampoline};
use crate::arch::{self, apic, clock};
use crate::console;
use crate::ioapic;
use crate::kernel;
use crate::paging::direct;
use crate::percpu::{self, MAX_CPUS, PerCpu};
use crate::report;
use crate::task::stack::{KernelStack, STACK_BYTES};
use crate::trap::entry::enable_system_calls;
use acpi::madt::{Madt, MadtEntry};
use acpi::{AcpiHandler, AcpiTables, PhysicalMapping};
use alloc::boxed::Box;
use core::hint::spin_loop;
use core::mem;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicPtr, AtomicU8, Ordering};
use faultless::try_box_with;
use faultless::{CpuId, Vm};
use faultless_collections::Vec;

/// The maximum time to wait for the CPUs to arrive.
const PATIENCE_NS: u64 = 5_000_000_000;

/// The CPU is to be started.
const WANTED: u8 = 1;
/// The CPU has arrived.
const ARRIVED: u8 = 2;
/// The CPU did not arrive in time.
const GIVEN_UP: u8 = 3;

/// The state of each CPU, by APIC ID.
static STATES: [AtomicU8; 256] = [const { AtomicU8::new(0) }; 256];
/// The per-CPU data of each CPU, by APIC ID.
static PERCPUS: [AtomicPtr<PerCpu>; 256] = [const { AtomicPtr::new(core::ptr::null_mut()) }; 256];
/// The subsystem, once the CPUs can run threads.
static VM: AtomicPtr<Vm<crate::machine::Bare>> = AtomicPtr::new(core::ptr::null_mut());

/// The reason why no allocation here fails.
const EMPTY: &str = "the heap is empty yet, and large enough for all CPUs";

/// Returns the APIC IDs of the CPUs listed in the ACPI tables at `rsdp`. Also records the I/O
/// interrupt controllers.
fn listed(rsdp: u64) -> Option<Vec<u8>> {
    #[derive(Clone)]
    struct Mapped;
    impl AcpiHandler for Mapped {
        unsafe fn map_physical_region<T>(&self, at: usize, len: usize) -> PhysicalMapping<Self, T> {
            let place = NonNull::new(direct(at as u64).cast()).expect("in the direct map");
            // SAFETY: ACPI's tables are in memory, which the direct map maps permanently.
            unsafe { PhysicalMapping::new(at, place, len, len, self.clone()) }
        }
        fn unmap_physical_region<T>(_: &PhysicalMapping<Self, T>) {}
    }
    if rsdp == 0 {
        return None;
    }
    // SAFETY: the loader gave this address of the tables.
    let tables = unsafe { AcpiTables::from_rsdp(Mapped, rsdp as usize) }.ok()?;
    let madt = tables.find_table::<Madt>().ok()?;
    let usable = |entry| match entry {
        MadtEntry::LocalApic(local) if { local.flags } & 1 != 0 => Some(local.apic_id),
        MadtEntry::IoApic(controller) => {
            ioapic::add(controller.io_apic_address, controller.global_system_interrupt_base);
            None
        }
        _ => None,
    };
    Vec::try_from_iter(madt.get().entries().filter_map(usable)).ok()
}

/// Starts the other CPUs listed in the ACPI tables at `rsdp` (0: no tables), but at most `wanted`
/// CPUs in all, if given. Returns the number of CPUs, including this CPU.
pub fn start_all(rsdp: u64, wanted: Option<usize>) -> usize {
    let own = apic::id();
    apic::set_id(CpuId(0), own);
    let listed = listed(rsdp);
    let others = match &listed {
        Some(all) => all.try_clone(),
        None => Vec::try_from_iter(0..wanted.unwrap_or(1).min(255) as u8),
    };
    let mut others = others.expect(EMPTY);
    let most = wanted.unwrap_or(MAX_CPUS).min(MAX_CPUS);
    if wanted.is_some_and(|wanted| wanted > others.len().min(MAX_CPUS)) {
        report!("message cpus={}, but the machine has {}", wanted.unwrap_or(0), others.len());
    }
    others.retain(|&id| id != own);
    others.truncate(most - 1);
    if others.is_empty() {
        return 1;
    }

    let code = trampoline();
    // SAFETY: low memory is mapped and not in use.
    unsafe { direct(TRAMPOLINE).copy_from_nonoverlapping(code.as_ptr(), code.len()) };
    let mut cpus = 1;
    for &id in &others {
        let here = Box::leak(try_box_with(|| PerCpu::new(CpuId(0))).expect(EMPTY));
        let stack = KernelStack::try_new().expect(EMPTY);
        here.idle_stack.set(stack.top() - STACK_BYTES as u64);
        PERCPUS[usize::from(id)].store(here, Ordering::Relaxed);
        STATES[usize::from(id)].store(WANTED, Ordering::Relaxed);
        STACKS[usize::from(id)].store(stack.top(), Ordering::Release);
        // The CPU keeps the stack permanently.
        mem::forget(stack);
        apic::send_init(id);
    }
    clock::delay(10_000_000);
    // Some processors miss the first SIPI.
    for _ in 0..2 {
        let missing = |id: &&u8| STATES[usize::from(**id)].load(Ordering::Acquire) == WANTED;
        others.iter().filter(missing).for_each(|&id| apic::send_startup(id, TRAMPOLINE));
        clock::delay(200_000);
    }
    let deadline = clock::now() + PATIENCE_NS;
    for &id in &others {
        let state = &STATES[usize::from(id)];
        while state.load(Ordering::Acquire) == WANTED && clock::now() < deadline {
            spin_loop();
        }
        let given_up =
            state.compare_exchange(WANTED, GIVEN_UP, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if given_up {
            report!("message the CPU with APIC ID {id} did not start");
            continue;
        }
        // The CPU waits for `VM`, and does not read its number before.
        let here = PERCPUS[usize::from(id)].load(Ordering::Relaxed);
        // SAFETY: leaked above. The CPU waits for `VM`, which is stored after this, and receives no
        // interrupts until then: it does not access the cell.
        unsafe { (*here).id.set(CpuId(cpus as u16)) };
        apic::set_id(CpuId(cpus as u16), id);
        cpus += 1;
    }
    cpus
}

/// The entry point of another CPU, on its stack, with the boot tables.
pub extern "C" fn start_other(id: u8) -> ! {
    let state = &STATES[usize::from(id)];
    if state.compare_exchange(WANTED, ARRIVED, Ordering::AcqRel, Ordering::Acquire).is_err() {
        console::stop();
    }
    arch::enable();
    enable_system_calls();
    super::load_root();
    let here = PERCPUS[usize::from(id)].load(Ordering::Relaxed);
    // SAFETY: leaked by `start_all` for this CPU alone.
    unsafe { percpu::install(&*here) };
    percpu::this().descriptors.guard();
    apic::enable();
    let vm = loop {
        let vm = VM.load(Ordering::Acquire);
        if !vm.is_null() {
            break vm;
        }
        // Until `go` interrupts this CPU.
        arch::idle();
    };
    // SAFETY: the subsystem is never freed; this CPU's number is below the
    // machine's number of CPUs.
    unsafe { percpu::enter(&*vm) };
    kernel::run()
}

/// Lets the other CPUs run threads.
pub fn go(vm: &'static Vm<crate::machine::Bare>) {
    VM.store(core::ptr::from_ref(vm).cast_mut(), Ordering::Release);
    for cpu in (1..percpu::cpus() as u16).map(CpuId) {
        apic::interrupt(cpu, apic::Vector::Reschedule);
    }
}
