//! Huge leaves: the count of a folio's leaves, splits of a leaf, and concurrent removals of file
//! pages. The model runs the real calls on two CPUs of a small machine. Its tables have four
//! entries, so a folio has four pages.
//!
//! Bounds: two threads, at most two forced switches.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p faultless --test models --target-dir target/loom huge::`

use crate::support::explore;
use crate::support::machine::{Toy, cpu, page, touch};
use faultless::audit::audit_with;
use faultless::sync::atomic::{AtomicU64, Ordering};
use faultless::table::node::ENTRIES;
use faultless::{
    Access, Advice, Backing, Counter, Cpu, CpuId, FaultKind, HugeText, MapFlags, Object,
    PrivateCopies, Prot, Setting, Shared, Space,
};
use loom::thread;
use std::sync::Arc;

/// Pages of a folio.
const F: u64 = ENTRIES as u64;
const AT: u64 = 16;
const FRAMES: u32 = 48;

/// Two spaces that map a file of one folio, and a CPU.
struct Side<'a> {
    cpu: &'a Cpu<'a, Toy>,
    file: &'a Shared<Object>,
    spaces: &'a [Space<Toy>; 2],
}

impl Side<'_> {
    /// The first fetch, in a space without a leaf.
    fn fetch(&self, space: usize) {
        let served = self.spaces[space].fault_remote(self.cpu, page(AT), Access::Execute);
        assert!(matches!(served, Ok(FaultKind::Huge | FaultKind::Shared)), "{served:?}");
    }

    fn discard(&self, space: usize) {
        self.spaces[space].madvise(self.cpu, page(AT), page(F), Advice::DontNeed).unwrap();
    }

    fn load(&self, space: usize, at: u64) -> u64 {
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        touch(self.cpu, &self.spaces[space], page(AT + at), Access::Read, load).unwrap()
    }

    fn store(&self, space: usize, at: u64, value: u64) {
        let store = |word: &AtomicU64| word.store(value, Ordering::Relaxed);
        touch(self.cpu, &self.spaces[space], page(AT + at), Access::Write, store).unwrap();
    }
}

type Act = fn(&Side<'_>);

/// Runs `left` on CPU 0, and `right` on CPU 1, which runs programs in the first space. `before` and
/// `after` run on CPU 0, at the beginning and the end. The word of each file page, at the page's
/// number, contains the number plus one. At the end no frame is lost.
fn two(bound: usize, before: Act, left: Act, right: Act, after: Act) {
    explore(Some(bound), move || {
        let vm = Toy::vm(2, FRAMES);
        vm.set(Setting::HugeText(HugeText::Always));
        let here = cpu(&vm, CpuId(0));
        let file = Object::try_new(&here, F, 1).unwrap();
        let spaces = Arc::new([(); 2].map(|()| Space::new(&here).unwrap()));
        for index in 0..F {
            let write = |bytes: *mut u8| {
                // SAFETY: a page of this machine is an array of words.
                let words = unsafe { &*bytes.cast::<[AtomicU64; ENTRIES]>() };
                words[index as usize].store(index + 1, Ordering::Relaxed);
            };
            file.write_page(&here, index, write).unwrap();
        }
        for space in spaces.iter() {
            let (flags, prot) =
                (MapFlags::PRIVATE | MapFlags::FIXED, Prot::READ | Prot::WRITE | Prot::EXEC);
            let backing = Backing { object: &file, first: 0, may_write: false };
            space.mmap_object(&here, page(AT), page(F), prot, flags, backing).unwrap();
        }
        let side = Side { cpu: &here, file: &file, spaces: &spaces };
        // The file's pages become a folio.
        side.fetch(0);
        assert_eq!(vm.totals().get(Counter::ThpFileMapped), 1);
        side.discard(0);
        before(&side);
        let other = {
            let (vm, spaces, file) = (Arc::clone(&vm), Arc::clone(&spaces), file.clone());
            thread::spawn(move || {
                let there = cpu(&vm, CpuId(1));
                spaces[0].activate(&there);
                right(&Side { cpu: &there, file: &file, spaces: &spaces });
                // SAFETY: the program has ended.
                unsafe { spaces[0].deactivate(&there) };
                Object::release(file, &there);
                there.drain();
            })
        };
        // Lets the other thread go first without counting a forced switch.
        thread::yield_now();
        left(&side);
        other.join().unwrap();
        after(&side);
        here.drain();
        audit_with(&here, &[&spaces[0], &spaces[1]], &[&file]).expect("a clean audit");
        for space in Arc::into_inner(spaces).expect("the last reference to the spaces") {
            space.exit(&here);
        }
        Object::release(file, &here);
        here.drain();
        let census = vm.census(&here).unwrap();
        assert_eq!((census.free, census.zero), (u64::from(FRAMES) - 1, 1), "a frame is lost");
    });
}

/// The first leaf is made in two spaces at once, and the last is dropped in two at once.
fn first_leaves_and_last_ones() {
    two(
        2,
        |_| {},
        |side| {
            side.fetch(1);
            side.discard(1);
        },
        |side| {
            side.fetch(0);
            side.discard(0);
        },
        |_| {},
    );
}

#[test]
fn leaves_are_counted_and_keep_their_frames() {
    first_leaves_and_last_ones();
}

/// A discard of one page splits a leaf, while a program loads through the leaf and stores to
/// another page.
fn a_split_against_a_program() {
    two(
        2,
        |side| side.fetch(0),
        |side| side.spaces[0].madvise(side.cpu, page(AT + 3), page(1), Advice::DontNeed).unwrap(),
        |side| {
            assert_eq!(side.load(0, 1), 2);
            side.store(0, 1, 9);
            assert_eq!((side.load(0, 1), side.load(0, 3)), (9, 4), "a lost write");
        },
        |side| assert_eq!(side.load(0, 1), 9, "a lost write"),
    );
}

#[test]
fn a_split_keeps_every_page() {
    a_split_against_a_program();
}

/// A page leaves the file and is revoked in both spaces in turn, while another CPU creates a leaf
/// in the first space. The second space has a leaf.
fn a_first_fetch_against_a_hole() {
    two(
        2,
        |side| side.fetch(1),
        |side| {
            side.file.free_pages(side.cpu, 1..2);
            for space in side.spaces {
                space.revoke(side.cpu, side.file, 1..2, PrivateCopies::Keep);
            }
        },
        |side| side.fetch(0),
        |side| {
            for space in 0..2 {
                assert_eq!(side.load(space, 1), 0, "an evicted page is mapped");
            }
        },
    );
}

#[test]
fn no_leaf_maps_a_removed_page() {
    a_first_fetch_against_a_hole();
}

caught! {
    mapping_a_folio_validates_all_pages:
        without LeafLooksAgain, a_first_fetch_against_a_hole(), says "an evicted page";
}
