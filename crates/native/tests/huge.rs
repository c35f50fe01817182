//! Leaves of 2 MiB: a CPU's use of a leaf in the tables. The tests write the leaves directly,
//! outside of all VMAs.

use crate::common::{PAGE, PRIVATE, RW, machine};
use faultless::format::{HUGE, PRESENT, USER, frame_of};
use faultless::{Access, MapFlags, Prot};
use faultless_native::{Checked, Config, Native, NativeCpu, Signal, Stale};

const HUGE_SIZE: u64 = 1 << 21;
/// The address of the leaf, and a page that creates the tables above the leaf.
const AT: u64 = 0x4000_0000;
const BESIDE: u64 = AT + HUGE_SIZE;

/// The physical address of the level-2 entry of `addr`.
fn slot(cpu: &NativeCpu<'_, '_>, addr: u64) -> u64 {
    let memory = cpu.native().machine().memory();
    let at = |table: u64, shift: u32| table + (addr >> shift & 511) * 8;
    let below = |entry: u64| frame_of(memory.load::<u64>(entry)).phys();
    let root = cpu.running().space().root().phys();
    at(below(at(below(at(root, 39)), 30)), 21)
}

/// Creates the tables and a block of 512 frames, whose pages begin with their number. Runs `guest`
/// with the leaf in place.
fn with_leaf(
    native: &Native,
    guest: impl FnOnce(
        &NativeCpu<'_, '_>,
        faultless::Block<'_, faultless_native::NativeMachine>,
    ) -> Result<(), Signal>,
) {
    let memory = native.machine().memory();
    native
        .process()
        .unwrap()
        .run(|cpu| {
            cpu.mmap(BESIDE, PAGE, RW, PRIVATE | MapFlags::FIXED)?;
            cpu.store(BESIDE, 1u8)?;
            let block = cpu.cpu().alloc_block(9).unwrap();
            for (index, frame) in block.frames().enumerate() {
                memory.store(frame.phys(), index as u64);
            }
            let leaf = block.frames().next().unwrap().phys() | PRESENT | USER | HUGE;
            let slot = slot(cpu, AT);
            memory.store(slot, leaf);
            let done = guest(cpu, block);
            memory.store(slot, 0u64);
            // The CPU's translations of the leaf are dropped when the CPU runs another space.
            Ok(done?)
        })
        .unwrap();
}

#[test]
fn one_walk_and_one_entry_serve_a_whole_leaf() {
    let native = machine(1);
    with_leaf(&native, |cpu, block| {
        let before = native.machine().total_tlb_stats();
        for page in 0..512 {
            assert_eq!(cpu.load::<u64>(AT + page * PAGE)?, page);
            cpu.touch(AT + page * PAGE + 8, Access::Execute)?;
        }
        let stats = native.machine().total_tlb_stats();
        assert_eq!(stats.load_walks - before.load_walks, 1);
        assert_eq!(
            stats.instruction_walks - before.instruction_walks,
            0,
            "a hit in the second level"
        );
        assert_eq!(stats.instruction_second_hits - before.instruction_second_hits, 1);
        let stored = cpu.store(AT + 7 * PAGE, 1u8);
        assert!(matches!(stored, Err(Signal::Segv { .. })), "{stored:?}");
        assert_eq!(cpu.load::<u64>(AT + 7 * PAGE)?, 7);
        drop(block);
        Ok(())
    });
    native.audit(&[]).unwrap();
}

/// Freeing any of the frames is detected by an access to any page, because the CPU could reach the
/// freed frame.
#[test]
fn an_entry_outliving_its_frames_is_detected() {
    let config =
        Config { memory_bytes: 64 << 20, cpus: 1, checked: Checked::Record, ..Config::default() };
    let native = Native::new(config).unwrap();
    with_leaf(&native, |cpu, block| {
        cpu.load::<u8>(AT)?;
        assert_eq!(native.machine().violation_count(), 0);
        let last = block.frames().last().unwrap();
        drop(block);
        cpu.load::<u8>(AT + 511 * PAGE)?;
        let violations = native.machine().violations();
        assert_eq!(violations.len(), 2, "before and after the load: {violations:?}");
        let first = violations[0];
        assert_eq!((first.stale, first.addr, first.frame), (Stale::Owner, AT + 511 * PAGE, last));
        Ok(())
    });
}

/// An invalidation of one page drops the 2 MiB entry that covers the page.
#[test]
fn an_invalidated_page_drops_the_huge_entry() {
    let native = machine(1);
    with_leaf(&native, |cpu, block| {
        cpu.load::<u8>(AT)?;
        let walks = || native.machine().total_tlb_stats().load_walks;
        let before = walks();
        cpu.load::<u8>(AT + PAGE)?;
        assert_eq!(walks(), before);
        // Pages within the leaf are mapped, and one page is unmapped again.
        let within = AT + 9 * PAGE;
        native.machine().memory().store(slot(cpu, AT), 0u64);
        assert_eq!(cpu.load::<u8>(AT + PAGE)?, 1, "the entry was not invalidated yet");
        let populated = PRIVATE | MapFlags::FIXED | MapFlags::POPULATE;
        // The other page keeps the table. A freed table would be flushed with its whole range.
        cpu.mmap(within, 2 * PAGE, Prot::READ, populated).unwrap();
        cpu.munmap(within, PAGE).unwrap();
        let gone = cpu.load::<u8>(AT + PAGE);
        assert!(matches!(gone, Err(Signal::Segv { .. })), "{gone:?}");
        cpu.munmap(within + PAGE, PAGE).unwrap();
        drop(block);
        Ok(())
    });
    native.audit(&[]).unwrap();
}
