//! The subsystem on a scenario's machine, the oracle beside it, and the run of guests on its CPUs.

use super::guest::Guest;
use super::machine::{Board, step};
use super::oracle::Oracle;
use super::{AT, REGIME, RW, Regime, Space, page};
use core::sync::atomic::{AtomicBool, Ordering};
use faultless::audit::{audit, audit_with};
use faultless::sync::observe::at_once;
use faultless::{BackingStore, Cpu, CpuId, Locking, Object, Setting, Shared, Vm};
use shuttle::rand::Rng;
use std::sync::{Arc, Mutex, MutexGuard};

/// Frames of a scenario's machine.
const FRAMES: u32 = 320;

/// The subsystem on a machine, and the oracle.
pub struct World {
    pub vm: Vm<Board>,
    oracle: Mutex<Oracle>,
    /// Whether calls are reported to the oracle, and accesses checked by the oracle.
    pub(super) watched: bool,
    /// Whether frames may run out.
    pub(super) scarce: AtomicBool,
    /// Whether pages move to other frames.
    pub(super) moves: AtomicBool,
}

/// Frames of the far node.
const FAR: u32 = 16;

/// The program of a CPU in a space.
pub type Body<'a> = (&'a Space, &'a (dyn Fn(&Guest<'_>) + Sync));

impl World {
    /// Creates a world in the regime of the scenario; the thread that changes the knob has another
    /// CPU.
    pub fn new(cpus: usize) -> Self {
        Self::build(cpus, |cpus| Board::new(cpus, FRAMES).with_far_node(FAR), true)
    }

    /// As [`new`](Self::new), with `frames` frames. The scenario itself, not the oracle, judges the
    /// loaded values and the refusals.
    pub fn unwatched(cpus: usize, frames: u32) -> Self {
        Self::build(cpus, |cpus| Board::new(cpus, frames).with_far_node(FAR), false)
    }

    /// As [`unwatched`](Self::unwatched), on a machine [with steps](Board::with_steps_at_bytes)
    /// between a remote access and its copy.
    pub fn outside(cpus: usize, frames: u32) -> Self {
        Self::build(
            cpus,
            |cpus| Board::new(cpus, frames).with_far_node(FAR).with_steps_at_bytes(),
            false,
        )
    }

    fn build(cpus: usize, board: impl FnOnce(usize) -> Board, watched: bool) -> Self {
        let (locking, more) = match REGIME.get() {
            Regime::Always(locking) => (locking, 0),
            Regime::Changing => (Locking::Speculative, 1),
            Regime::Ahead => (Locking::Speculative, 0),
        };
        let vm = at_once(|| Vm::new(board(cpus + more)).unwrap());
        vm.set(Setting::Locking(locking));
        // In half of the schedules: operations of a CPU alone in a shared space must be tested as
        // well.
        vm.set(Setting::EditInPlace(shuttle::rand::thread_rng().gen_bool(0.5)));
        vm.set(Setting::PrefaultMaxOrder(if REGIME.get() == Regime::Ahead { 3 } else { 0 }));
        Self {
            vm,
            oracle: Mutex::default(),
            watched,
            scarce: AtomicBool::new(false),
            moves: AtomicBool::new(false),
        }
    }

    /// Creates a world of three CPUs, and a space with the first `pages` pages mapped and stored
    /// to: 1, 2, …
    pub fn with_pages(pages: u64) -> (Self, Space) {
        let world = Self::new(3);
        let space = world.space(|guest| guest.fill(AT, pages));
        (world, space)
    }

    /// Leaves `frames` frames available, until the guests have finished.
    pub fn leave_frames(&self, frames: u64) {
        self.quietly(|cpu| cpu.drain());
        let taken = self.vm.total_frames() - self.vm.free_frames();
        self.vm.set(Setting::FrameLimit(taken + frames));
        self.scarce.store(true, Ordering::Relaxed);
    }

    fn cpu(&self, id: usize) -> Cpu<'_, Board> {
        // SAFETY: each CPU is claimed by one thread at a time: before and after the run of the
        // guests, by the thread that runs them.
        unsafe { self.vm.cpu(CpuId(id as u16)) }
    }

    pub fn oracle(&self) -> MutexGuard<'_, Oracle> {
        self.oracle.lock().unwrap()
    }

    /// Creates a space, prepared by a guest before other CPUs use it.
    pub fn space(&self, prepare: impl FnOnce(&Guest<'_>)) -> Space {
        at_once(|| {
            let cpu = self.cpu(0);
            let space = Space::new(&cpu).unwrap();
            prepare(&Guest::enter(self, &cpu, &space));
            space
        })
    }

    /// Creates a space that maps 16 pages at [`AT`]. The first `words` words of each of the first
    /// `pages` pages are the page's number, from 1 on.
    pub fn numbered(&self, pages: u64, words: u64) -> Space {
        self.space(|guest| {
            guest.map(AT, 16, RW);
            for at in 0..pages {
                (0..words).for_each(|word| guest.store(page(at) + 8 * word, at + 1).unwrap());
            }
        })
    }

    /// Creates an object of `pages` pages. The kernel has written the first `there` pages: all
    /// words are 7.
    pub fn object(&self, pages: u64, there: u64) -> Shared<Object> {
        self.quietly(|cpu| {
            let object = Object::try_new(cpu, pages, 1).unwrap();
            for index in 0..there {
                // SAFETY: two words of a page without other users.
                object
                    .write_page(cpu, index, |at| unsafe { at.cast::<[u64; 2]>().write([7; 2]) })
                    .unwrap();
            }
            object
        })
    }

    /// Creates an object backed by `store`.
    pub fn file(&self, store: Arc<dyn BackingStore>) -> Shared<Object> {
        self.quietly(|cpu| Object::of_store(cpu, store, 1).unwrap())
    }

    /// Makes `store` the swap area.
    pub fn swap_on(&self, store: Arc<dyn BackingStore>) {
        self.quietly(|cpu| cpu.swap_on(store).unwrap());
    }

    /// Does something on a CPU before or after the guests, while nothing else happens.
    pub fn quietly<R>(&self, what: impl FnOnce(&Cpu<'_, Board>) -> R) -> R {
        at_once(|| what(&self.cpu(0)))
    }

    /// As [`quietly`](Self::quietly), in a space.
    pub fn within<R>(&self, space: &Space, what: impl FnOnce(&Guest<'_>) -> R) -> R {
        self.quietly(|cpu| what(&Guest::enter(self, cpu, space)))
    }

    /// Runs each body on a CPU of its own, in the regime of the scenario.
    pub fn run(&self, bodies: &[Body<'_>]) {
        shuttle::thread::scope(|scope| {
            if REGIME.get() == Regime::Changing {
                scope.spawn(|| self.turn_the_knob());
            }
            for (number, &(space, body)) in bodies.iter().enumerate() {
                scope.spawn(move || {
                    let cpu = self.cpu(number);
                    body(&Guest::enter(self, &cpu, space));
                });
            }
        });
    }

    fn turn_the_knob(&self) {
        for locking in [Locking::PerVma, Locking::MmapLock, Locking::Speculative, Locking::MmapLock]
        {
            (0..shuttle::rand::thread_rng().gen_range(0..150)).for_each(|_| step());
            self.vm.set(Setting::Locking(locking));
        }
    }

    /// Runs the audit, with the complete list of spaces, and all objects with other references.
    pub fn audit(&self, spaces: &[&Space], objects: &[&Shared<Object>]) {
        at_once(|| {
            (0..self.vm.machine().lines()).for_each(|id| self.cpu(id).drain());
            let audited = audit_with(&self.cpu(0), spaces, objects);
            audited.unwrap_or_else(|wrong| panic!("law 6: {wrong}"));
        });
    }

    /// Runs the audit, ends the spaces, and runs the audit again.
    pub fn finish(&self, spaces: Vec<Space>) {
        self.finish_with(spaces, Vec::new());
    }

    /// As [`finish`](Self::finish), for a scenario with references to `objects`.
    pub fn finish_with(&self, spaces: Vec<Space>, objects: Vec<Shared<Object>>) {
        self.vm.set(Setting::FrameLimit(u64::MAX));
        at_once(|| {
            let cpus = self.vm.machine().lines();
            let drain = || (0..cpus).for_each(|id| self.cpu(id).drain());
            let cpu = self.cpu(0);
            drain();
            let (living, shares): (Vec<_>, Vec<_>) =
                (spaces.iter().collect(), objects.iter().collect());
            audit_with(&cpu, &living, &shares).unwrap_or_else(|wrong| panic!("law 6: {wrong}"));
            spaces.into_iter().for_each(|space| space.exit(&cpu));
            objects.into_iter().for_each(|object| Object::release(object, &cpu));
            drain();
            let (slots, used) = cpu.swap_usage();
            assert_eq!(used, 0, "slots of the swap area were lost");
            if slots != 0 {
                // Frees the unused pages of the swap cache.
                cpu.reclaim(u64::MAX);
                drain();
            }
            let census = audit(&cpu, &[]);
            let census = census.unwrap_or_else(|wrong| panic!("law 6, in the end: {wrong}"));
            // The zero page, and the swap area's tables.
            let kept = 1 + if slots == 0 { 0 } else { census.tables };
            assert_eq!(self.vm.free_frames() + kept, self.vm.total_frames(), "frames were lost");
        });
    }
}
