use super::*;
use crate::addr::PAGE_SIZE;
use crate::frame::Kind;
use crate::knob::Setting;
use crate::machine::{CpuId, MemoryRegion};
use crate::space::Space;
use crate::stat::Counter;
use crate::sync::wait::Yield;
use crate::testing::TestMachine;
use crate::vm::Vm;
use crate::{MapFlags, Prot};
use core::cell::Cell;
use std::collections::BTreeSet;
use std::vec::Vec;

fn cpu(id: u16) -> Local {
    // SAFETY: each test claims each CPU once for its `Frames`.
    unsafe { Local::claim(CpuId(id)) }
}

/// Frames `1..frames` of a machine, none of which is zero, with pools of `pool` frames.
fn dirty(cpus: usize, frames: u32, pool: u64) -> (TestMachine, Frames) {
    let machine = TestMachine::new(cpus, frames);
    for number in 1..frames {
        soil(&machine, FrameNumber(number));
    }
    // SAFETY: the machine lives together with the frames from here on.
    let frames = unsafe { Frames::try_new(cpus, machine.regions(), |_| 0) }.unwrap();
    frames.set_zeroed_pool(pool, &Yield);
    (machine, frames)
}

fn soil(machine: &TestMachine, number: FrameNumber) {
    // SAFETY: the test's memory, without other users at this time.
    unsafe { machine.frame_bytes(number).write_bytes(0xa5, PAGE_SIZE as usize) };
}

fn is_zero(machine: &TestMachine, number: FrameNumber) -> bool {
    let page = machine.frame_bytes(number).cast::<u64>();
    let step = if cfg!(miri) { 73 } else { 1 };
    let mut words = (0..PAGE_SIZE as usize / 8).step_by(step);
    // SAFETY: as above.
    words.all(|word| unsafe { page.add(word).read() } == 0)
}

fn zero_all(local: &Local, machine: &TestMachine, frames: &Frames) -> usize {
    core::iter::from_fn(|| Some(frames.zero_run(local, machine, usize::MAX, &Yield)))
        .take_while(|&run| run != 0)
        .inspect(|&run| assert!(run <= RUN))
        .sum()
}

/// Allocates a zeroed frame, checks its contents, and overwrites them. Returns the frame and its
/// origin.
fn alloc(
    machine: &TestMachine,
    frames: &Frames,
    local: &Local,
) -> Option<(Frame<Zeroed>, Vec<Supply>)> {
    let heard = Cell::new(Vec::new());
    let frame = frames.alloc_zeroed(local, machine, &Yield, |supply| {
        let mut all = heard.take();
        all.push(supply);
        heard.set(all);
    })?;
    assert!(is_zero(machine, frame.number()), "{frame:?}");
    Some((frame, heard.take()))
}

/// Does a program's part before the frame is freed.
fn use_up(machine: &TestMachine, frame: Frame<Zeroed>) -> Frame<Clean> {
    soil(machine, frame.number());
    frame.into()
}

#[test]
fn without_a_pool_no_frame_is_zeroed_ahead() {
    let (machine, frames) = dirty(1, 200, 0);
    let local = cpu(0);
    assert_eq!(frames.zero_run(&local, &machine, usize::MAX, &Yield), 0);
    let (frame, supply) = alloc(&machine, &frames, &local).unwrap();
    assert_eq!(supply, [Supply::Now]);
    frames.free(&local, frame, &Yield);
    frames.drain(&local, &Yield);
    assert_eq!(frames.checked_census(&Yield).unwrap().free, 199);
}

#[test]
#[cfg_attr(miri, ignore = "the interpreter takes long for this number of frames")]
fn a_pool_fills_to_its_limit_and_its_frames_are_free_and_zero() {
    let (machine, frames) = dirty(1, 1000, 100);
    let local = cpu(0);
    assert_eq!(frames.zero_run(&local, &machine, 0, &Yield), 0);
    assert_eq!(frames.zero_run(&local, &machine, 5, &Yield), 4, "a block");
    assert_eq!(zero_all(&local, &machine, &frames), 96);
    let census = frames.checked_census(&Yield).unwrap();
    assert_eq!((census.free, census.zeroed, census.taken()), (899, 100, 0));
    assert_eq!((frames.zeroed_count(), frames.free_count()), (100, 999));
    let listed = |number: &u32| frames.meta(FrameNumber(*number)).kind() != Kind::Reserved;
    let zero = (1..1000).filter(listed).filter(|&number| is_zero(&machine, FrameNumber(number)));
    assert_eq!(zero.count(), 100);
    frames.set_zeroed_pool(30, &Yield);
    assert_eq!(frames.checked_census(&Yield).unwrap().zeroed, 30);
    frames.set_zeroed_pool(0, &Yield);
    assert_eq!(frames.checked_census(&Yield).unwrap().free, 999);
}

#[test]
#[cfg_attr(miri, ignore = "the interpreter takes long for this number of frames")]
fn zeroed_frames_are_used_first_and_not_zeroed_again() {
    let (machine, frames) = dirty(1, 2000, 100);
    let local = cpu(0);
    zero_all(&local, &machine, &frames);
    let before = machine.zeroed();
    let mut all = Vec::new();
    for _ in 0..100 {
        let (frame, supply) = alloc(&machine, &frames, &local).unwrap();
        assert_eq!(supply, [Supply::Pool]);
        all.push(frame);
    }
    assert_eq!(machine.zeroed(), before);
    let (frame, supply) = alloc(&machine, &frames, &local).unwrap();
    assert_eq!((supply, machine.zeroed()), (Vec::from([Supply::Miss, Supply::Now]), before + 1));
    all.push(frame);
    // An unused returned frame is still zeroed; a used frame is not.
    frames.free(&local, all.pop().unwrap(), &Yield);
    let (frame, supply) = alloc(&machine, &frames, &local).unwrap();
    assert_eq!(supply, [Supply::Pool]);
    frames.free(&local, use_up(&machine, frame), &Yield);
    let (frame, supply) = alloc(&machine, &frames, &local).unwrap();
    assert_eq!(supply, [Supply::Miss, Supply::Now]);
    all.push(frame);
    all.into_iter().for_each(|frame| frames.free(&local, frame, &Yield));
    frames.drain(&local, &Yield);
    let census = frames.checked_census(&Yield).unwrap();
    assert_eq!((census.zeroed, census.taken()), (100, 0), "at most the limit of the pool");
}

#[test]
#[cfg_attr(miri, ignore = "the interpreter takes long for this number of frames")]
fn the_last_frames_are_available_wherever_they_are() {
    for limit in [u64::MAX, 150] {
        let (machine, frames) = dirty(1, 301, u64::MAX);
        frames.set_limit(limit);
        let local = cpu(0);
        zero_all(&local, &machine, &frames);
        assert!(frames.zeroed_count() > 200, "nearly all is in the pool");
        // Some are on the CPU's list of zeroed frames.
        let (frame, _) = alloc(&machine, &frames, &local).unwrap();
        frames.free(&local, frame, &Yield);
        let all: Vec<_> = core::iter::from_fn(|| frames.alloc(&local, &Yield)).collect();
        assert_eq!(all.len() as u64, limit.min(300));
        let numbers: BTreeSet<_> = all.iter().map(|frame| frame.number().0).collect();
        assert_eq!(numbers.len(), all.len());
        all.into_iter().for_each(|frame| frames.free(&local, frame, &Yield));
        // The opposite: no frame is zeroed, and all frames are available as zeroed frames.
        let all: Vec<_> = core::iter::from_fn(|| alloc(&machine, &frames, &local)).collect();
        assert_eq!(all.len() as u64, limit.min(300));
        all.into_iter().for_each(|(frame, _)| frames.free(&local, frame, &Yield));
        frames.drain(&local, &Yield);
        assert_eq!(frames.checked_census(&Yield).unwrap().taken(), 0);
    }
}

#[test]
fn a_block_is_split_from_a_pool_and_found_half_zeroed() {
    let (machine, frames) = dirty(1, 65, 48);
    let local = cpu(0);
    // 1..65: the largest blocks are 16 and 32 frames.
    assert_eq!(zero_all(&local, &machine, &frames), 48);
    let block = frames.alloc_order(&local, 5, &Yield).expect("frames 32 to 63");
    assert_eq!(block.number(), FrameNumber(32));
    frames.free(&local, block, &Yield);
    let census = frames.checked_census(&Yield).unwrap();
    assert_eq!(census.free + census.zeroed, 64);
}

#[test]
#[cfg_attr(miri, ignore = "the interpreter takes long for this number of frames")]
fn unused_zeroed_frames_do_not_enter_the_reserve() {
    // Enough for a reserve.
    let (machine, frames) = dirty(1, 1 << 13, 1 << 10);
    let local = cpu(0);
    zero_all(&local, &machine, &frames);
    let all: Vec<_> = (0..1 << 10).map(|_| alloc(&machine, &frames, &local).unwrap()).collect();
    assert_eq!(frames.zeroed_count(), 0);
    for (frame, supply) in all {
        assert_eq!(supply, [Supply::Pool]);
        frames.free(&local, frame, &Yield);
    }
    frames.drain(&local, &Yield);
    assert_eq!(frames.zeroed_count(), 1 << 10);
}

#[test]
#[cfg_attr(miri, ignore = "the interpreter takes long for this number of frames")]
fn no_frame_is_zeroed_ahead_or_spared_if_memory_is_short() {
    let (machine, frames) = dirty(1, 1601, 1600);
    let local = cpu(0);
    let mut taken: Vec<_> = (0..1440).map(|_| frames.alloc(&local, &Yield).unwrap()).collect();
    assert!(!frames.is_short() && frames.zero_run(&local, &machine, 4, &Yield) != 0);
    while !frames.is_short() {
        taken.push(frames.alloc(&local, &Yield).unwrap());
    }
    assert!(frames.free_count() < 100 && frames.free_count() >= 90, "{}", frames.free_count());
    assert_eq!(frames.zero_run(&local, &machine, usize::MAX, &Yield), 0);
    let mut buffer = [FrameNumber(0); 32];
    assert!(frames.alloc_bulk(&local, &mut buffer, &Yield).is_empty());
    assert!(frames.alloc_zeroed_bulk(&local, &machine, &mut buffer, &Yield).0.is_empty());
    // Every CPU that needs a frame gets one.
    taken.push(frames.alloc(&local, &Yield).unwrap());
    taken.into_iter().for_each(|frame| frames.free(&local, frame, &Yield));
    assert!(!frames.is_short());
    frames.drain(&local, &Yield);
    assert_eq!(frames.checked_census(&Yield).unwrap().taken(), 0);
}

#[test]
fn a_near_frame_is_preferred_to_a_distant_zeroed_frame() {
    let machine = TestMachine::new(1, 400);
    let region = |node, first, frames| MemoryRegion { node, first: FrameNumber(first), frames };
    // SAFETY: frames of the machine, which lives together with the frames from here on.
    let frames =
        unsafe { Frames::try_new(1, &[region(0, 1, 199), region(1, 200, 200)], |_| 0) }.unwrap();
    let local = cpu(0);
    frames.set_zeroed_pool(1000, &Yield);
    // The pools of all nodes, the nearest first, up to what would be short.
    let zeroed = zero_all(&local, &machine, &frames);
    assert!(zeroed > 300, "{zeroed}");
    let node = |frame: &Frame<Zeroed>| frames.layout.node(frames.meta(frame.number()).arena());
    let mut all: Vec<_> = (0..199).map(|_| alloc(&machine, &frames, &local).unwrap().0).collect();
    assert!(all.iter().all(|frame| node(frame) == 0));
    let (far, supply) = alloc(&machine, &frames, &local).unwrap();
    assert_eq!((node(&far), supply), (1, Vec::from([Supply::Pool])));
    all.push(far);
    all.into_iter().for_each(|frame| frames.free(&local, use_up(&machine, frame), &Yield));
    frames.drain(&local, &Yield);
    let (near, supply) = alloc(&machine, &frames, &local).unwrap();
    assert_eq!((node(&near), supply), (0, Vec::from([Supply::Miss, Supply::Now])));
    frames.free(&local, near, &Yield);
}

#[test]
#[cfg_attr(miri, ignore = "the interpreter takes long for this number of frames")]
fn a_run_is_contiguous_and_its_rest_stays_zeroed() {
    for length in [8, 32, 64, 200] {
        let (machine, frames) = dirty(1, 4097, 150);
        let local = cpu(0);
        let mut buffer = [FrameNumber(0); 200];
        zero_all(&local, &machine, &frames);
        let before = machine.zeroed();
        let (mut run, hits) =
            frames.alloc_zeroed_bulk(&local, &machine, &mut buffer[..length], &Yield);
        assert_eq!((run.len(), hits), (length, length.min(150)));
        assert_eq!(machine.zeroed() - before, (length - hits) as u64);
        let numbers: BTreeSet<_> = run.numbers().iter().map(|number| number.0).collect();
        assert_eq!(numbers.len(), length);
        let pairs = run.numbers().windows(2);
        let neighbours = pairs.filter(|pair| pair[0].0 + 1 == pair[1].0).count();
        assert!(neighbours >= length / 2, "{neighbours} of {length}");
        let first = run.pop().unwrap();
        assert_eq!(run.len(), length - 1);
        assert!(is_zero(&machine, first.number()));
        frames.free(&local, use_up(&machine, first), &Yield);
        frames.free_bulk(&local, run, &Yield);
        let (again, hits) = frames.alloc_zeroed_bulk(&local, &machine, &mut buffer[..8], &Yield);
        assert_eq!((again.len(), hits), (8, if length == 8 { 8 } else { hits }));
        assert!(again.numbers().iter().all(|&number| is_zero(&machine, number)));
        frames.free_bulk(&local, again, &Yield);
        let run = frames.alloc_bulk(&local, &mut buffer[..length], &Yield);
        assert!(run.len() >= length - length / 8, "{run:?}");
        frames.free_bulk(&local, run, &Yield);
        frames.drain(&local, &Yield);
        assert_eq!(frames.checked_census(&Yield).unwrap().taken(), 0);
    }
}

#[test]
#[cfg_attr(miri, ignore = "the interpreter takes long for this number of frames")]
fn calls_and_faults_count_the_origin_of_zeroed_frames() {
    let vm = Vm::new(TestMachine::new(1, 2000)).unwrap();
    // SAFETY: the only handle of the CPU.
    let cpu = unsafe { vm.cpu(CpuId(0)) };
    let space = Space::new(&cpu).unwrap();
    let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS;
    let area = space.mmap(&cpu, None, 512 * PAGE_SIZE, Prot::READ | Prot::WRITE, flags).unwrap();
    let touch = |first: u64, pages: u64| {
        for page in first..first + pages {
            space.fault_remote(&cpu, area + page * PAGE_SIZE, crate::fault::Access::Write).unwrap();
        }
    };
    let count = |counter| vm.totals().get(counter);
    let all = || {
        [
            Counter::ZeroedIdle,
            Counter::ZeroedOnFree,
            Counter::ZeroedInFault,
            Counter::ZeroedPoolHit,
            Counter::ZeroedPoolMiss,
        ]
        .map(count)
    };
    assert_eq!(cpu.zero_ahead(100), 0, "off");
    touch(0, 10);
    let [_, _, tables, ..] = all();
    assert_eq!(all(), [0, 0, tables, 0, 0]);
    assert!((10..=14).contains(&tables), "pages and tables: {tables}");
    vm.set(Setting::ZeroedPool(100));
    assert_eq!(cpu.zero_ahead(40), 40);
    assert_eq!((cpu.zero_ahead(usize::MAX), vm.zeroed_frames()), (60, 100));
    let zeroed = vm.machine().zeroed();
    touch(10, 100);
    assert_eq!(all(), [100, 0, tables, 100, 0]);
    assert_eq!(vm.machine().zeroed(), zeroed);
    touch(110, 3);
    assert_eq!(all(), [100, 0, tables + 3, 100, 3]);
    assert_eq!(vm.machine().zeroed(), zeroed + 3);
    let mut buffer = [FrameNumber(0); 8];
    let run = cpu.alloc_zeroed_bulk(&mut buffer);
    assert_eq!((run.len(), all()), (8, [100, 0, tables + 11, 100, 11]));
    cpu.free_bulk(run);
    let run = cpu.vm().frames.alloc_bulk(cpu.local(), &mut buffer, &cpu);
    assert_eq!(run.len(), 8);
    cpu.free_bulk(run);
    cpu.drain();
    assert_eq!(vm.zeroed_frames(), 8, "the zeroed frames were not used");
    // Freeing zeroes if the knob requests it.
    space.munmap(&cpu, area, 50 * PAGE_SIZE).unwrap();
    assert_eq!(count(Counter::ZeroedOnFree), 0);
    vm.set(Setting::ZeroOnFree(true));
    space.munmap(&cpu, area + 50 * PAGE_SIZE, 60 * PAGE_SIZE).unwrap();
    assert_eq!((count(Counter::ZeroedOnFree), vm.zeroed_frames()), (60, 68));
    space.exit(&cpu);
    cpu.drain();
    let census = crate::audit::audit(&cpu, &[]).unwrap();
    assert_eq!((census.taken(), census.zeroed), (1, vm.zeroed_frames()));
}

/// Two CPUs concurrently allocate, overwrite, free and zero frames, down to the last frame. Every
/// zeroed frame is zero, and at the end all frames are at their places.
#[test]
fn two_cpus_never_get_a_dirty_frame_as_zeroed() {
    const ROUNDS: u32 = if cfg!(miri) { 20 } else { 2000 };
    let (machine, frames) = dirty(2, 400, 120);
    let work = |id: u16| {
        let local = cpu(id);
        let (mut mine, mut random, mut failures) = (Vec::new(), u32::from(id) + 1, 0u32);
        let mut buffer = [FrameNumber(0); 40];
        for _ in 0..ROUNDS {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let amount = (random >> 24) as usize;
            match random >> 16 & 7 {
                0 | 1 => {
                    for _ in 0..amount {
                        match alloc(&machine, &frames, &local) {
                            Some((frame, _)) => mine.push(use_up(&machine, frame)),
                            None => failures += 1,
                        }
                    }
                }
                2 => {
                    let to = &mut buffer[..amount % 40];
                    let (mut run, _) = frames.alloc_zeroed_bulk(&local, &machine, to, &Yield);
                    for _ in 0..amount % 7 {
                        let Some(frame) = run.pop() else { break };
                        assert!(is_zero(&machine, frame.number()));
                        mine.push(use_up(&machine, frame));
                    }
                    frames.free_bulk(&local, run, &Yield);
                }
                3 | 4 => {
                    frames.zero_run(&local, &machine, amount, &Yield);
                }
                5 => mine.extend(frames.alloc_order(&local, (amount % 4) as u8, &Yield)),
                _ => {
                    let keep = mine.len().saturating_sub(amount);
                    mine.drain(keep..).for_each(|frame| {
                        for number in (frame.number().0..).take(1 << frame.order()) {
                            soil(&machine, FrameNumber(number));
                        }
                        frames.free(&local, frame, &Yield);
                    });
                }
            }
        }
        mine.into_iter().for_each(|frame| frames.free(&local, frame, &Yield));
        frames.drain(&local, &Yield);
        failures
    };
    let failures: u32 = std::thread::scope(|scope| {
        let other = scope.spawn(|| work(1));
        work(0) + other.join().unwrap()
    });
    assert_ne!(failures, 0, "memory was never exhausted, so the test is weak");
    assert_eq!(frames.checked_census(&Yield).unwrap().taken(), 0);
    let local = cpu(0);
    let all: Vec<_> = core::iter::from_fn(|| alloc(&machine, &frames, &local)).collect();
    assert_eq!(all.len() as u64, frames.total());
    all.into_iter().for_each(|(frame, _)| frames.free(&local, frame, &Yield));
}
