//! Flushes: the requests and acknowledgements, and the set of CPUs that receive requests. The model
//! uses the real [`shoot`], [`Inbox`] and [`CpuSet`], and a machine whose TLBs have two cells each.
//!
//! Bounds: two threads, all executions; three threads, at most two forced switches. Under the model
//! checker an inbox holds one request, so that two senders cause an overflow.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p faultless --test models --target-dir target/loom flush::`

use crate::support::{Fair, Guarded, explore, local};
use faultless::sync::atomic::{AtomicU64, Ordering};
use faultless::sync::percpu::{Local, PerCpu};
use faultless::sync::wait::Wait;
use faultless::tlb::cpuset::CpuSet;
use faultless::tlb::deferred::Deferred;
use faultless::tlb::shootdown::{Inbox, shoot};
use faultless::{CpuId, Invalidate, Machine, MemoryRegion, SpaceId};
use faultless::{FrameNumber, VirtRange};
use loom::thread;
use std::cell::Cell;
use std::sync::Arc;

const SPACE: SpaceId = SpaceId(1);
const PAGES: usize = 2;

fn range(page: usize) -> VirtRange {
    VirtRange::page((page as u64) << faultless::PAGE_SHIFT)
}

/// Which pages each CPU's TLB knows.
struct Tlbs(Vec<[Cell<bool>; PAGES]>);

// SAFETY: each row belongs to one CPU.
unsafe impl Sync for Tlbs {}
// SAFETY: flags.
unsafe impl Send for Tlbs {}

// SAFETY: there is no memory; a TLB drops the requested translations.
unsafe impl Machine for Tlbs {
    type Predictor = faultless::prefault::Streams;

    fn cpus(&self) -> usize {
        self.0.len()
    }

    fn regions(&self) -> &[MemoryRegion] {
        &[]
    }

    fn frame_bytes(&self, _: FrameNumber) -> *mut u8 {
        unreachable!("no region")
    }

    fn invalidate(&self, cpu: CpuId, _: SpaceId, what: Invalidate) {
        for (page, known) in self.0[cpu.index()].iter().enumerate() {
            if what == Invalidate::All || what == Invalidate::Range(range(page)) {
                known.set(false);
            }
        }
    }

    fn invalidate_all(&self, cpu: CpuId) {
        self.0[cpu.index()].iter().for_each(|known| known.set(false));
    }

    fn interrupt(&self, _: CpuId) {}

    fn relax(&self, looks: u32) {
        Fair.wait(looks);
    }
}

/// A space of two pages, initially mapped, and the content of their frames. The content is read by
/// users of a page, and written by the next user of the frame.
struct World {
    tlbs: Tlbs,
    inboxes: PerCpu<Inbox>,
    set: CpuSet,
    mapped: [AtomicU64; PAGES],
    frames: [Guarded; PAGES],
    deferred: Deferred,
}

/// One CPU of the world.
struct Here {
    world: Arc<World>,
    local: Local,
}

/// Serves requests during every wait.
impl Wait for Here {
    fn wait(&self, looks: u32) {
        self.serve();
        Fair.wait(looks);
    }
}

impl Here {
    fn serve(&self) {
        let World { inboxes, tlbs, deferred, .. } = &*self.world;
        inboxes.get(&self.local).serve(tlbs, &self.local, SPACE, deferred);
    }

    fn join(&self) {
        self.world.set.insert(self.local.id());
    }

    /// As `Space::deactivate`.
    fn leave(&self) {
        self.world.tlbs.invalidate(self.local.id(), SPACE, Invalidate::All);
        self.world.set.remove(self.local.id());
        self.world.deferred.left_space(&self.local);
        self.serve();
    }

    /// An instruction that loads from `page`, if the page is mapped.
    fn load(&self, page: usize) {
        self.serve();
        let known = &self.world.tlbs.0[self.local.id().index()][page];
        if !known.get() {
            known.set(self.world.mapped[page].load(Ordering::Acquire) != 0);
        }
        if known.get() {
            self.world.frames[page].get();
        }
    }

    /// Unmaps `page` and reuses its frame.
    fn reuse(&self, page: usize, wait: &impl Wait) {
        let World { tlbs, inboxes, set, mapped, frames, .. } = &*self.world;
        mapped[page].store(0, Ordering::Release);
        shoot(tlbs, inboxes, &self.local, wait, SPACE, set, Invalidate::Range(range(page)));
        frames[page].add();
    }
}

impl Here {
    /// Unmaps `page`, defers the flush, and does the flush before the reuse of the frame.
    fn reuse_later(&self, page: usize) {
        let World { tlbs, inboxes, set, mapped, frames, deferred } = &*self.world;
        mapped[page].store(0, Ordering::Release);
        let stamp = deferred.defer(core::iter::once(set), self);
        deferred.flush_all(tlbs, inboxes, &self.local, self, |cpu| set.contains(cpu));
        assert!(deferred.paid() >= stamp);
        frames[page].add();
    }
}

impl Here {
    /// As [`reuse_later`](Self::reuse_later), but CPUs may have flushed by themselves.
    fn reuse_collected(&self, page: usize) {
        let World { tlbs, inboxes, set, mapped, frames, deferred } = &*self.world;
        mapped[page].store(0, Ordering::Release);
        let stamp = deferred.defer(core::iter::once(set), self);
        deferred.ask();
        deferred.collect(self, |cpu| set.contains(cpu));
        if deferred.paid() < stamp {
            deferred.flush_all(tlbs, inboxes, &self.local, self, |cpu| set.contains(cpu));
        }
        frames[page].add();
    }

    /// As `Cpu::flush_if_asked`.
    fn flush_if_asked(&self) {
        let World { tlbs, deferred, .. } = &*self.world;
        if deferred.is_asked(&self.local) {
            let before = deferred.before_flush();
            tlbs.invalidate_all(self.local.id());
            deferred.flushed(&self.local, before);
        }
    }
}

/// A bit of the entries below, next to bit 0 for a mapped page.
const ACCESSED: u64 = 2;

impl Here {
    /// As [`load`](Self::load), but the MMU sets an accessed bit before it fills the TLB.
    fn touch(&self, page: usize) {
        self.serve();
        let known = &self.world.tlbs.0[self.local.id().index()][page];
        let slot = &self.world.mapped[page];
        while !known.get() {
            let seen = slot.load(Ordering::Acquire);
            if seen == 0 {
                return;
            }
            let order = (Ordering::AcqRel, Ordering::Relaxed);
            let marked = slot.compare_exchange(seen, seen | ACCESSED, order.0, order.1);
            known.set(seen & ACCESSED != 0 || marked.is_ok());
        }
        self.world.frames[page].get();
    }

    /// Clears the accessed bit of `page`, unmaps the page, and reuses its frame. The flush is
    /// skipped if no CPU has a translation.
    fn reuse_cold(&self, page: usize) {
        let World { set, mapped, frames, deferred, .. } = &*self.world;
        mapped[page].fetch_and(!ACCESSED, Ordering::Relaxed);
        let cleared = deferred.after_clear();
        let relaxed = Ordering::Relaxed;
        let unused = mapped[page].compare_exchange(1, 0, Ordering::AcqRel, relaxed).is_ok();
        if unused && deferred.flushed_by_all(|cpu| set.contains(cpu)) >= cleared {
            frames[page].add();
        } else {
            self.reuse(page, self);
        }
    }

    fn flush(&self) {
        let World { tlbs, deferred, .. } = &*self.world;
        let before = deferred.before_flush();
        tlbs.invalidate_all(self.local.id());
        deferred.flushed(&self.local, before);
    }
}

type Program = fn(&Here);

/// Runs a program on each CPU. The first `members` CPUs have joined and used all pages before.
fn programs<const CPUS: usize>(
    bound: Option<usize>,
    members: &'static [u16],
    all: [Program; CPUS],
) {
    explore(bound, move || {
        let world = Arc::new(World {
            tlbs: Tlbs((0..CPUS).map(|_| Default::default()).collect()),
            inboxes: PerCpu::try_new(CPUS, |_| Inbox::new()).unwrap(),
            set: CpuSet::new(),
            mapped: [(); PAGES].map(|()| AtomicU64::new(1 | ACCESSED)),
            frames: [(); PAGES].map(|()| Guarded::new()),
            deferred: Deferred::try_new(CPUS).unwrap(),
        });
        for &cpu in members {
            world.set.insert(CpuId(cpu));
            world.tlbs.0[usize::from(cpu)].iter().for_each(|known| known.set(true));
        }
        let here = |cpu| Here { world: Arc::clone(&world), local: local(cpu as u16) };
        let others: Vec<_> = (1..CPUS)
            .map(|cpu| {
                let (here, program) = (here(cpu), all[cpu]);
                thread::spawn(move || {
                    let here = here;
                    program(&here);
                })
            })
            .collect();
        all[0](&here(0));
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}

// SAFETY: a CPU is moved to the thread that represents the CPU.
unsafe impl Send for Here {}

/// One CPU uses a page while another CPU reuses its frame.
fn use_against_reuse() {
    programs(
        None,
        &[1],
        [
            |here| here.reuse(0, here),
            |here| {
                here.load(0);
                here.load(0);
                here.leave();
            },
        ],
    );
}

#[test]
fn no_cpu_uses_a_flushed_translation() {
    use_against_reuse();
}

/// A CPU joins while another CPU flushes.
fn joining_against_reuse() {
    programs(
        None,
        &[],
        [
            |here| here.reuse(0, here),
            |here| {
                here.join();
                here.load(0);
                here.load(0);
                here.leave();
            },
        ],
    );
}

#[test]
fn a_joining_cpu_gets_a_request_or_sees_the_change() {
    joining_against_reuse();
}

/// A CPU leaves while another CPU flushes, and comes back.
#[test]
fn a_returning_cpu_uses_no_old_translation() {
    programs(
        None,
        &[1],
        [
            |here| here.reuse(0, here),
            |here| {
                here.load(0);
                here.leave();
                here.join();
                here.load(0);
                here.leave();
            },
        ],
    );
}

/// A CPU uses a page and leaves, while the page's flush is deferred and then done.
fn use_against_deferred_reuse() {
    programs(
        None,
        &[1],
        [
            |here| here.reuse_later(0),
            |here| {
                here.load(0);
                here.leave();
            },
        ],
    );
}

#[test]
fn no_cpu_uses_a_translation_after_the_deferred_flush() {
    use_against_deferred_reuse();
}

/// A CPU flushes by itself, while the page's flush is deferred and then collected.
fn use_against_collected_reuse() {
    programs(
        None,
        &[1],
        [
            |here| here.reuse_collected(0),
            |here| {
                here.load(0);
                here.flush_if_asked();
                here.load(0);
                here.leave();
            },
        ],
    );
}

#[test]
fn no_cpu_uses_a_translation_after_its_own_flush() {
    use_against_collected_reuse();
}

/// A CPU flushes by itself, and may use the page again, before it is taken without a flush.
#[test]
fn no_cpu_uses_a_cold_page() {
    programs(
        None,
        &[1],
        [
            |here| here.reuse_cold(0),
            |here| {
                here.touch(0);
                here.flush();
                here.touch(0);
                here.leave();
            },
        ],
    );
}

/// A CPU joins while a page is aged, and taken without a flush.
#[test]
fn a_joining_cpu_finds_the_accessed_bit_clear() {
    programs(
        None,
        &[],
        [
            |here| here.reuse_cold(0),
            |here| {
                here.join();
                here.touch(0);
                here.touch(0);
                here.leave();
            },
        ],
    );
}

/// A CPU joins while a flush is deferred, and collected.
#[test]
fn joining_cpu_is_flushed() {
    programs(
        None,
        &[],
        [
            |here| here.reuse_collected(0),
            |here| {
                here.join();
                here.load(0);
                here.flush_if_asked();
                here.load(0);
                here.leave();
            },
        ],
    );
}

/// A CPU joins while a flush is deferred.
fn joining_against_deferred_reuse() {
    programs(
        None,
        &[],
        [
            |here| here.reuse_later(0),
            |here| {
                here.join();
                here.load(0);
                here.leave();
            },
        ],
    );
}

#[test]
fn a_joining_cpu_is_recorded_or_sees_the_change() {
    joining_against_deferred_reuse();
}

/// Two CPUs flush each other, and both finish.
#[test]
fn two_cpus_that_flush_each_other_finish() {
    programs(
        None,
        &[0, 1],
        [
            |here| {
                here.load(1);
                here.reuse(0, here);
                here.load(1);
                here.leave();
            },
            |here| {
                here.load(0);
                here.reuse(1, here);
                here.leave();
            },
        ],
    );
}

/// The same for two CPUs that serve no request during their waits.
#[test]
#[should_panic(expected = "maximum number of branches")]
fn two_waiters_that_serve_no_request_deadlock() {
    programs(
        None,
        &[0, 1],
        [
            |here| {
                here.reuse(0, &Fair);
                here.leave();
            },
            |here| {
                here.reuse(1, &Fair);
                here.leave();
            },
        ],
    );
}

/// Two CPUs send a request to a third CPU, whose inbox has room for one.
fn two_requests_for_one_inbox_slot() {
    programs(
        Some(2),
        &[2],
        [
            |here| here.reuse(0, here),
            |here| here.reuse(1, here),
            |here| {
                here.load(0);
                here.load(1);
                here.load(0);
                here.leave();
            },
        ],
    );
}

#[test]
fn a_full_inbox_flushes_everything() {
    two_requests_for_one_inbox_slot();
}

caught! {
    the_sender_waits_for_the_acknowledgement:
        without AwaitAnswers, use_against_reuse(), says "Causality violation";
    an_acknowledging_cpu_has_dropped_the_translations:
        without DropTranslations, use_against_reuse(), says "Causality violation";
    the_sender_needs_its_fence:
        without JoinFence, joining_against_reuse(), says "Causality violation";
    a_joining_cpu_needs_its_fence:
        without EnterSetFence, joining_against_reuse(), says "Causality violation";
    a_settlement_waits:
        without FlushAwaitsCpus, use_against_deferred_reuse(), says "Causality violation";
    a_collection_checks_all_cpus:
        without CollectLooks, use_against_collected_reuse(), says "Causality violation";
    a_deferral_needs_its_fence:
        without DeferFence, joining_against_deferred_reuse(), says "Causality violation";
    an_overflow_drops_all_translations:
        without OverflowDropsAll, two_requests_for_one_inbox_slot(), says "Causality violation";
}
