//! A round, as the seed decides it: the machine, the processes and their memory.

use core::fmt;
use faultless::{AnonVmaCheck, Locking, PAGE_SIZE, Setting};
use faultless_native::{Checked, Config};

/// The kind of swap area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swap {
    None,
    Memory,
    File,
    /// In memory, and operations fail at random.
    Failing,
}

/// The kind of store of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// Shared memory without a store.
    Memory,
    /// A store in memory, or in a file of the host.
    Stored { host: bool },
    /// A store in memory with random failures.
    Failing,
}

/// The memory mapped by a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionKind {
    Anonymous,
    /// The file with this number.
    Shared(usize),
    /// Private copies of the file with this number.
    Private(usize),
}

/// A round.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub round: u64,
    /// The number of threads of each process.
    pub threads: Vec<usize>,
    pub config: Config,
    pub swap: Swap,
    pub files: Vec<FileKind>,
    /// The regions of each process.
    pub regions: Vec<RegionKind>,
    /// Pages of each region and file.
    pub pages: usize,
    /// Whether the slots of a region share page tables.
    pub near: bool,
    pub settings: Vec<Setting>,
    /// Whether threads change settings.
    pub switching: bool,
    pub phases: usize,
    /// Operations of each thread in a phase.
    pub operations: usize,
    /// The maximum number of children that wait for their use or end.
    pub children: usize,
}

/// Threads of all processes.
const MOST_THREADS: usize = 6;

impl Plan {
    /// Returns the plan of round `round` for `seed`.
    pub fn new(seed: u64, round: u64) -> Self {
        let mut random = Self { seed, round, ..Self::smallest() }.random(0);
        let mut threads = vec![random.usize(1..=4)];
        while threads.len() < 4 && random.u32(0..3) != 0 {
            let left = MOST_THREADS - threads.iter().sum::<usize>();
            if left == 0 {
                break;
            }
            threads.push(random.usize(1..=left.min(3)));
        }
        let cpus = threads.iter().sum();
        // CPUs keep up to 128 frames each.
        let memory = (2 << 20) + (cpus as u64) * (256 << 10) + random.u64(0..(2 << 20));
        let nodes = [1, 1, 2, 3][random.usize(0..4)];
        let slow_bytes = if nodes > 1 && random.bool() { 1 << 20 } else { 0 };
        let config = Config {
            memory_bytes: memory & !(PAGE_SIZE - 1),
            nodes,
            slow_bytes,
            cpus,
            populate: false,
            checked: Checked::Record,
            jitter: [0, 3, 3, 16][random.usize(0..4)],
        };
        let swap = match random.u32(0..8) {
            0 => Swap::None,
            1..4 => Swap::Memory,
            4 | 5 => Swap::File,
            _ => Swap::Failing,
        };
        let file = |random: &mut fastrand::Rng| match random.u32(0..4) {
            0 => FileKind::Memory,
            1 => FileKind::Failing,
            _ => FileKind::Stored { host: random.bool() },
        };
        let files: Vec<_> = (0..random.usize(0..3)).map(|_| file(&mut random)).collect();
        let mut regions = vec![RegionKind::Anonymous; random.usize(1..3)];
        for number in 0..files.len() {
            regions.push(RegionKind::Shared(number));
            if random.bool() {
                regions.push(RegionKind::Private(number));
            }
        }
        // All regions are about as large as memory, or twice as large.
        let frames = config.memory_bytes / PAGE_SIZE;
        let wanted = frames * random.u64(1..4) / 2 / (regions.len() * threads.len()) as u64;
        let pages = (wanted as usize).clamp(24, 400);
        let settings = vec![
            Setting::Locking(Locking::ALL[[0, 1, 2, 2][random.usize(0..4)]]),
            Setting::AnonVmaCheck([AnonVmaCheck::Early, AnonVmaCheck::Late][random.usize(0..2)]),
            Setting::PrefaultMaxOrder(random.u8(0..6)),
            Setting::FaultAroundPages(1 << random.u32(0..6)),
            Setting::DeferredFlush(random.u32(0..4) != 0),
            Setting::EditInPlace(random.u32(0..4) != 0),
            Setting::ZeroedPool([0, 0, 32][random.usize(0..3)]),
        ];
        Self {
            seed,
            round,
            threads,
            config,
            swap,
            files,
            regions,
            pages,
            near: random.u32(0..4) != 0,
            settings,
            switching: random.u32(0..3) == 0,
            phases: random.usize(3..7),
            operations: random.usize(150..500),
            children: random.usize(0..5),
        }
    }

    fn smallest() -> Self {
        Self {
            seed: 0,
            round: 0,
            threads: Vec::new(),
            config: Config::default(),
            swap: Swap::None,
            files: Vec::new(),
            regions: Vec::new(),
            pages: 0,
            near: false,
            settings: Vec::new(),
            switching: false,
            phases: 0,
            operations: 0,
            children: 0,
        }
    }

    /// Returns random numbers of this round; each `stream` has separate numbers.
    pub fn random(&self, stream: u64) -> fastrand::Rng {
        let mut mixed = fastrand::Rng::with_seed(self.seed);
        mixed = fastrand::Rng::with_seed(mixed.u64(..) ^ self.round);
        fastrand::Rng::with_seed(mixed.u64(..) ^ stream)
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Config { memory_bytes, nodes, slow_bytes, jitter, .. } = self.config;
        writeln!(
            f,
            "threads {:?}, {} frames on {nodes} nodes, {} slow, jitter {jitter}, swap {:?}",
            self.threads,
            memory_bytes / PAGE_SIZE,
            slow_bytes / PAGE_SIZE,
            self.swap,
        )?;
        writeln!(f, "files {:?}, regions of {} pages {:?}", self.files, self.pages, self.regions)?;
        writeln!(f, "settings {:?}, switching {}", self.settings, self.switching)?;
        write!(
            f,
            "{} phases of {} operations, {} children, slots near {}",
            self.phases, self.operations, self.children, self.near
        )
    }
}
