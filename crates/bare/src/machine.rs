//! The machine below the subsystem: real memory, real translations, real interrupts.
//!
//! *Translations.* A CPU holds user translations only of its running space. [`run`] switches to
//! another space: the CPU first loads the kernel's own tables, which drops its translations of the
//! old space, and leaves the old space's CPU set; then the CPU joins the new space's set, and loads
//! its tables. An idle CPU runs no space, so no flush interrupts it. The kernel's own translations
//! are global, the same in every space, and do not change after the CPUs have started.
//!
//! *Flushing.* A flush of the running space executes one INVLPG per page, or loads the root again
//! for more than [`PAGES_ONE_BY_ONE`] pages. A flush of another space is a no-op, since leaving
//! this space dropped its translations.
//!
//! *With PCIDs* leaving a space drops no translations, but marks the space's [slot](crate::pcid)
//! stale, and a stale slot is flushed when it is loaded next. So a switch loads the root twice but
//! flushes once, and a flush of a space left earlier only sets a mark. QEMU's emulation has no
//! PCIDs: only host tests cover the slots.
//!
//! *Shootdowns.* A flush request to another CPU is an interrupt, [`Vector::Flush`]. All kernel code
//! runs with interrupts off, so the handler runs between two instructions of a program, or in idle;
//! a CPU that waits in the kernel serves requests itself. Waiting CPUs check periodically whether a
//! request has been pending for too long, and panic in this case: a flush was lost.
//!
//! *Parking.* A CPU in a long wait halts, so that a hypervisor can run another CPU on its core. The
//! halted CPU accepts only interrupts of the highest class: flush requests, which it serves at
//! once, and wake-ups. It may hold kernel locks used by the other handlers.

mod bare;
pub(crate) mod plant;

pub use bare::Bare;

use crate::arch::apic::{self, Vector};
use crate::arch::{self, clock};
use crate::console;
use crate::kernel;
use crate::paging::{self, direct};
use crate::percpu::{self, PerCpu};
use core::arch::asm;
use core::hint::spin_loop;
use core::sync::atomic::Ordering;
use faultless::{
    CpuId, FrameNumber, Invalidate, Machine, MemoryRegion, PAGE_SHIFT, PAGE_SIZE, Space, SpaceId,
};
use faultless::{nontemporal_done, zero_nontemporal};

use plant::Plant;

/// The maximum number of pages that are flushed one by one.
const PAGES_ONE_BY_ONE: u64 = 32;
/// Flag of a load of CR3: keep the translations of the identifier.
const KEEP: u64 = 1 << 63;
/// The maximum time that a flush request may be pending. If a CPU exceeds this time, the kernel is
/// broken, or the host is very busy. Injected losses are detected sooner.
const PATIENCE_NS: u64 = 30_000_000_000;
/// See [`PATIENCE_NS`].
const PATIENCE_PLANTED_NS: u64 = 2_000_000_000;
/// The number of checks after which a waiting CPU also reads the clock.
const LOOKS: u32 = 1 << 12;

// SAFETY: by the trait's points:
// - `new` fixes CPUs and regions, by its contract.
// - The direct map permanently shows each frame at one address; programs reach the same frame.
// - `invalidate` drops the running space's translations by INVLPG or by loading CR3, which also
//   drop the paging-structure caches; cached translations of other spaces are never used (see the
//   module). Both instructions serialise, so no earlier walk continues after them.
// - A space's root is loaded from `run` to `run_none`, which activate and deactivate the space.
// - An interrupt makes the target serve its requests (`serve`), between two instructions of a
//   program, or in `park`, in which only interrupts of the highest class are accepted; the
//   interrupt is sent after earlier stores (`apic::interrupt`).
// - The processor sets accessed and dirty bits atomically, and the dirty bit before the store. An
//   injected fault breaks this rule on purpose, and affects only programs' data.
unsafe impl Machine for Bare {
    type Predictor = faultless::prefault::Streams;

    fn cpus(&self) -> usize {
        self.cpus
    }

    /// Nodes are tiers.
    fn node_cost(&self, node: u8) -> u32 {
        1 + u32::from(node)
    }

    fn regions(&self) -> &[MemoryRegion] {
        &self.regions
    }

    #[inline(always)]
    fn frame_bytes(&self, frame: FrameNumber) -> *mut u8 {
        direct(frame.phys())
    }

    #[inline]
    fn invalidate(&self, _: CpuId, space: SpaceId, what: Invalidate) {
        let here = percpu::this();
        if here.running.get() != space.0 {
            if bare::has_pcid() {
                here.slots.borrow_mut().mark_stale(space.0);
            }
            return;
        }
        if planted(here) {
            return;
        }
        match what {
            Invalidate::Range(range) if range.pages() <= PAGES_ONE_BY_ONE => {
                let mut page = range.start;
                while page < range.end {
                    // SAFETY: drops a translation, which the hardware may do at any time.
                    unsafe { asm!("invlpg [{}]", in(reg) page, options(nostack, preserves_flags)) };
                    page += PAGE_SIZE;
                }
            }
            Invalidate::Range(_) | Invalidate::All => reload(),
        }
    }

    fn invalidate_all(&self, _: CpuId) {
        let here = percpu::this();
        if !planted(here) {
            reload();
        }
    }

    fn interrupt(&self, cpu: CpuId) {
        // Not 0, which means that no request is pending.
        let now = clock::now() | 1;
        let asked = &percpu::remote(cpu).asked;
        // The time of the oldest pending request stays.
        let _ = asked.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
        if !plant::is(Plant::LostIpi) {
            apic::interrupt(cpu, Vector::Flush);
        }
    }

    fn relax(&self, looks: u32) {
        spin_loop();
        if looks % LOOKS == LOOKS - 1 {
            watch();
        }
    }

    fn park(&self, cpu: CpuId) {
        let permit = &percpu::remote(cpu).permit;
        if permit.park() {
            // An interrupt sent after this time is still pending.
            arch::park();
            permit.resume();
        }
    }

    fn wake(&self, cpu: CpuId) {
        if percpu::remote(cpu).permit.give() {
            apic::interrupt(cpu, Vector::Wake);
        }
    }

    fn poll_reads(&self, _: CpuId) {
        kernel::devices(false);
    }

    #[inline(always)]
    unsafe fn zero_frame(&self, frame: FrameNumber) {
        // SAFETY: a page of the direct map, which is the caller's.
        unsafe {
            asm!("rep stosq", inout("rdi") self.frame_bytes(frame) => _, inout("ecx") 512 => _,
                in("rax") 0, options(nostack, preserves_flags));
        }
    }

    unsafe fn zero_ahead(&self, first: FrameNumber, frames: u32) {
        for frame in first.0..first.0 + frames {
            // SAFETY: a page of the direct map, which is the caller's.
            unsafe { zero_nontemporal(self.frame_bytes(FrameNumber(frame))) };
        }
        nontemporal_done();
    }

    #[inline(always)]
    unsafe fn copy_frame(&self, to: FrameNumber, from: FrameNumber) {
        // SAFETY: two pages of the direct map. The caller owns the target; the copy is discarded if
        // a program stores to the source during the copy.
        unsafe {
            asm!("rep movsq", inout("rdi") self.frame_bytes(to) => _,
                inout("rsi") self.frame_bytes(from) => _, inout("ecx") 512 => _,
                options(nostack, preserves_flags));
        }
    }
}

/// Returns whether an injected fault prevents a flush.
#[inline(always)]
fn planted(here: &PerCpu) -> bool {
    plant::any() && planted_here(here)
}

#[cold]
fn planted_here(here: &PerCpu) -> bool {
    if here.serving.get() {
        let late = plant::is(Plant::EarlyReuse);
        here.late.set(here.late.get() || late);
        late
    } else {
        plant::is(Plant::SkipInvlpg)
    }
}

/// Loads the same root again, which drops its translations, and marks all other slots stale.
fn reload() {
    let here = percpu::this();
    if bare::has_pcid() {
        here.slots.borrow_mut().mark_all_stale(here.running.get());
    }
    // SAFETY: the tables do not change.
    unsafe {
        asm!("mov {0}, cr3", "mov cr3, {0}", out(reg) _, options(nostack, preserves_flags));
    }
}

/// Serves the flush requests for which this CPU was interrupted.
pub(crate) fn serve() {
    let here = percpu::this();
    if !percpu::has_cpu() {
        return;
    }
    percpu::remote(here.id.get()).asked.store(0, Ordering::Relaxed);
    here.serving.set(true);
    here.cpu().serve_flushes();
    here.serving.set(false);
}

/// Serves flush requests at the timer interrupt, in case their interrupt was lost, and the flushes
/// delayed by an injected fault.
pub(crate) fn tick() {
    if !plant::is(Plant::LostIpi) {
        percpu::cpu().serve_flushes();
    }
    if percpu::this().late.take() {
        reload();
    }
    if plant::any() {
        let idle = percpu::this().current.get().is_null();
        plant::run_over(if idle { Plant::OverrunIdle } else { Plant::OverrunThread });
        plant::run_over(Plant::OverrunFatal);
    }
}

/// Panics if a CPU has not served a flush request for too long. The time before the end of the last
/// pause of an output does not count.
#[cold]
fn watch() {
    let here = percpu::id();
    // This CPU waits, and has just served its requests.
    percpu::remote(here).asked.store(0, Ordering::Relaxed);
    let now = clock::now();
    let patience = if plant::any() { PATIENCE_PLANTED_NS } else { PATIENCE_NS };
    let pause = console::last_pause(now);
    for other in (0..percpu::cpus() as u16).map(CpuId).filter(|&other| other != here) {
        let since = percpu::remote(other).asked.load(Ordering::Relaxed);
        if since != 0 && now.saturating_sub(since.max(pause)) > patience {
            console::panic(format_args!("cpu {} waits for a flush by cpu {}", here.0, other.0));
        }
    }
}

/// Runs `space` on this CPU: from now on, user mode, and copies from and to user memory, use this
/// space.
///
/// # Panics
/// If the space was not [adopted](adopt): its tables lack the kernel half.
///
/// # Safety
/// The space exists, and does not move, until this CPU runs another space or [none](run_none).
pub unsafe fn run(space: &Space<Bare>) {
    let here = percpu::this();
    if here.space.get() == space {
        return;
    }
    assert!(is_adopted(space), "{space:?} is to run, but was not adopted");
    run_none();
    space.activate(here.cpu());
    here.space.set(space);
    here.running.set(space.id().0);
    if bare::has_pcid() {
        let slot = here.slots.borrow_mut().load(space.id().0);
        load(space.root().phys() | u64::from(slot.pcid) | if slot.flush { 0 } else { KEEP });
    } else {
        load(space.root().phys());
    }
}

/// Runs no space on this CPU, only the kernel's own tables.
pub fn run_none() {
    let here = percpu::this();
    let old = here.space.get();
    // SAFETY: by the contract of `run`, which made this space the running one.
    if let Some(old) = unsafe { old.as_ref() } {
        load(paging::root() | if bare::has_pcid() { KEEP } else { 0 });
        here.space.set(core::ptr::null());
        here.running.set(0);
        // SAFETY: the kernel's own tables are loaded, with an empty user half.
        unsafe { old.deactivate(here.cpu()) };
    }
}

fn load(cr3: u64) {
    // SAFETY: the upper half of the root is the kernel's.
    unsafe { asm!("mov cr3, {}", in(reg) cr3, options(nostack, preserves_flags)) };
}

/// Copies the kernel's half of the tables into a new space. Called once for each space, before its
/// first run.
pub fn adopt(space: &Space<Bare>) {
    const HALF: usize = 1 << (PAGE_SHIFT - 1);
    let (from, to) = (direct(paging::root()), direct(space.root().phys()));
    // SAFETY: both are root tables; the kernel owns the upper half of the new table, which is not
    // in use yet.
    unsafe { to.add(HALF).copy_from_nonoverlapping(from.add(HALF), HALF) };
}

/// Returns whether the tables of `space` have the last of the kernel's entries, which maps its
/// image.
fn is_adopted(space: &Space<Bare>) -> bool {
    const LAST: usize = (1 << PAGE_SHIFT) - size_of::<u64>();
    // SAFETY: the last entry of a root table, in the half that only `adopt` writes.
    unsafe { direct(space.root().phys()).add(LAST).cast::<u64>().read() != 0 }
}
