//! `migrate [CHECK…] [rounds=N] [seed=N]`: the rules of translations while pages move between
//! memory nodes, seen from user mode.
//!
//! Each check works like the checks of `tlb`: one CPU writes a page through a present translation,
//! while another CPU moves the page. A missing flush is visible in three ways. A store through a
//! translation to the old frame is lost; a page moved while read-only shows its old contents after
//! a store; and a page shows stores by the next owner of its old frame. There is a check for each,
//! and a check with all of these at the same time, in which threads compare their reads with a
//! model.
//!
//! On a machine with one node no page moves, and the program reports this.

use faultless_guest::args::Args;
use faultless_guest::check::{Check, Verdict};
use faultless_guest::mem::{NONE, PAGE, READ, Region, WRITE, errno};
use faultless_guest::numa::{MOVE, MOVE_ALL, move_pages, nodes, nodes_of};
use faultless_guest::proc::{self, Status, fork, pin};
use faultless_guest::random::Random;
use faultless_guest::sys::{call, doing};
use faultless_guest::turns::{Outcome, anonymous, mark, ordered};
use faultless_guest::{check, ensure, procfs, same};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The parsed arguments.
struct Settings {
    rounds: u64,
    seed: u64,
}

static SETTINGS: OnceLock<Settings> = OnceLock::new();

fn settings() -> &'static Settings {
    SETTINGS.get_or_init(|| Settings { rounds: 500, seed: 1 })
}

/// Returns the target node of this round's moves. The source is the other node.
fn node_of(round: u64, nodes: i32) -> i32 {
    (round as i32 + 1) % nodes
}

/// Makes a file of `pages` pages without a name.
fn nameless(pages: u64) -> Result<File, String> {
    let path = format!("/tmp/migrate.{}", proc::pid());
    let explain = |error: std::io::Error| format!("{path}: {error}");
    let file = File::options().read(true).write(true).create_new(true).open(&path);
    let file = file.map_err(explain)?;
    std::fs::remove_file(&path).map_err(explain)?;
    file.set_len(pages * PAGE).map_err(explain)?;
    Ok(file)
}

fn errors() -> Verdict {
    let region = anonymous(4)?;
    region.store(0, 1);
    region.store(PAGE, 1);
    let pages = region.addresses();
    let mut status = [77; 4];
    // Reused memory may be on any node.
    same!(
        move_pages(&pages[..2], Some(&[0; 2]), &mut status[..2], MOVE),
        Ok(0),
        "a move to node 0"
    );
    let raw = |pid: u64, list: u64, nodes: u64, told: u64, flags: u64| {
        // SAFETY: the lists have four entries or are invalid; pages keep their contents.
        errno(unsafe { call(libc::SYS_move_pages, [pid, 4, list, nodes, told, flags]) })
    };
    let (list, told) = (pages.as_ptr() as u64, status.as_mut_ptr() as u64);
    same!(raw(0, list, 0, told, 1), libc::EINVAL, "only MPOL_MF_STRICT");
    same!(raw(0, list, 0, told, 8), libc::EINVAL, "an unknown flag");
    same!(raw(4_000_000, list, 0, told, MOVE), libc::ESRCH, "no such process");
    same!(raw(0, 8, 0, told, MOVE), libc::EFAULT, "no list of pages");
    same!(raw(0, list, 8, told, MOVE), libc::EFAULT, "no list of nodes");
    same!(raw(0, list, 0, 0, MOVE), libc::EFAULT, "an unmapped status list");
    for node in [-1, 7, 63, 5000] {
        same!(
            errno(move_pages(&pages, Some(&[node; 4]), &mut [0; 4], MOVE)),
            libc::ENODEV,
            "node {node}"
        );
    }
    same!(move_pages(&[], None, &mut [], MOVE), Ok(0), "no pages");

    // A read of untouched memory maps the zero page, which has no owner.
    let zero = region.load(2 * PAGE);
    doing("munmap", region.unmap(3 * PAGE, PAGE))?;
    let hole = [0, 0, -libc::EFAULT, -libc::EFAULT];
    same!(nodes_of(&pages), Ok(hole.to_vec()), "the nodes of pages; one page is {zero}");
    same!(
        move_pages(&pages, Some(&[0; 4]), &mut status, MOVE),
        Ok(0),
        "a move of pages to their current node"
    );
    same!(status, hole, "the status of the pages");
    let fresh = anonymous(1)?;
    same!(nodes_of(&[fresh.start() + 9]), Ok(vec![-libc::ENOENT]), "an absent page");
    doing("mprotect", region.protect(0, PAGE, NONE))?;
    same!(nodes_of(&pages[..1]), Ok(vec![0]), "an inaccessible page");

    // The lists are read up to the missing node.
    let nodes = doing("move_pages", nodes())?;
    let to = [nodes - 1, 7];
    same!(
        errno(move_pages(&pages[1..3], Some(&to), &mut status[..2], MOVE)),
        libc::ENODEV,
        "a wrong node after the first page"
    );
    same!(nodes_of(&pages[1..2]), Ok(vec![nodes - 1]), "the page before the wrong node");
    Ok(())
}

/// Pages shared with a child move only with the flag for all pages.
fn shared_pages() -> Verdict {
    let nodes = doing("move_pages", nodes())?;
    let region = anonymous(3)?;
    region.fill(5);
    // Reused memory may be on any node.
    doing("move_pages", region.move_to(0))?;
    let last = nodes - 1;
    let moves = |flags| {
        let mut status = [0; 3];
        move_pages(&region.addresses(), Some(&[last; 3]), &mut status, flags).map(|_| status)
    };
    // With one node the pages are already there.
    let refused = if nodes == 1 { 0 } else { -libc::EACCES };
    let child = doing(
        "fork",
        fork(|| {
            let found = [moves(MOVE), moves(MOVE_ALL)];
            let expected = [Ok([refused; 3]), Ok([last; 3])];
            if found != expected {
                println!("# {found:?}, expected {expected:?}");
            }
            i32::from(found != expected)
        }),
    )?;
    same!(doing("wait4", child.wait())?, Status::Exited(0), "the child that moves pages");
    same!(nodes_of(&region.addresses()), Ok(vec![last; 3]), "the parent's pages");
    for at in region.pages() {
        same!(region.load(at), 5, "the content of a moved page");
    }
    Ok(())
}

/// A program's store through a translation from before the move is not lost, and the program sees
/// later stores. The CPU that moves the page accesses it through the kernel: its own translation
/// would lead to the old frame, too, if the flush was missing.
fn store_elsewhere() -> Verdict {
    let nodes = doing("move_pages", nodes())?;
    let region = anonymous(1)?;
    let outside = || doing("process_vm_readv", region.load_outside(0));
    ordered(
        settings().rounds,
        |round| {
            region.store(0, mark(round, 1));
            Ok(())
        },
        |round| {
            same!(outside()?, mark(round, 1), "round {round}: a store before the move");
            doing("move_pages", region.move_to(node_of(round, nodes)))?;
            same!(outside()?, mark(round, 1), "round {round}: the moved page");
            doing("process_vm_writev", region.store_outside(0, mark(round, 2)))
        },
        |round| {
            same!(region.load(0), mark(round, 2), "round {round}: the old frame is read");
            region.store(0, mark(round, 3));
            same!(outside()?, mark(round, 3), "round {round}: a store to the old frame");
            Ok(())
        },
    )
}

/// A page moved while read-only shows every CPU the stores made afterwards.
fn store_after_move() -> Verdict {
    let nodes = doing("move_pages", nodes())?;
    let region = anonymous(1)?;
    region.store(0, mark(0, 1));
    ordered(
        settings().rounds,
        |round| {
            doing("mprotect", region.protect(0, PAGE, READ))?;
            same!(region.load(0), mark(round, 1), "round {round}: a store before the move");
            Ok(())
        },
        |round| {
            doing("move_pages", region.move_to(node_of(round, nodes)))?;
            doing("mprotect", region.protect(0, PAGE, WRITE))?;
            region.store(0, mark(round + 1, 1));
            Ok(())
        },
        |round| {
            let found = region.load(0);
            same!(found, mark(round + 1, 1), "round {round}: another CPU reads the old frame");
            Ok(())
        },
    )
}

/// The same for stores by the kernel, to a page of a file.
fn write_after_move() -> Verdict {
    let nodes = doing("move_pages", nodes())?;
    let file = nameless(1)?;
    let write = |value: u64| {
        file.write_all_at(&value.to_le_bytes(), 0).map_err(|error| format!("write: {error}"))
    };
    write(mark(0, 1))?;
    let region = doing("mmap", Region::map(PAGE, READ, libc::MAP_SHARED, file.as_raw_fd(), 0))?;
    ordered(
        settings().rounds,
        |round| {
            same!(region.load(0), mark(round, 1), "round {round}: a store before the move");
            Ok(())
        },
        |round| {
            // Its translation is needed only for the move.
            same!(region.load(0), mark(round, 1), "round {round}: the page of this process");
            doing("move_pages", region.move_to(node_of(round, nodes)))?;
            write(mark(round + 1, 1))
        },
        |round| {
            let found = region.load(0);
            same!(found, mark(round + 1, 1), "round {round}: another CPU reads the old frame");
            Ok(())
        },
    )
}

/// Read-only pages leave the second node, and other pages fill the node: no CPU sees the new pages
/// instead of the old.
fn old_frames_reused() -> Verdict {
    const PAGES: u64 = 32;
    if doing("move_pages", nodes())? == 1 {
        return Ok(());
    }
    // More than the second node has.
    let memory = procfs::kilobytes(&procfs::fields("/proc/meminfo")?, "MemTotal")?;
    let (region, filler) = (anonymous(PAGES)?, anonymous(memory / PAGE / 10)?);
    for at in region.pages() {
        region.store(at, mark(0, at / PAGE));
    }
    doing("mprotect", region.protect(0, PAGES * PAGE, READ))?;
    filler.fill(1);
    let pages = filler.addresses();
    let mut status = vec![0; pages.len()];
    let move_filler = Mutex::new(|node| {
        doing("move_pages", move_pages(&pages, Some(&vec![node; pages.len()]), &mut status, MOVE))
    });
    let looks = |what: &str, round: u64| {
        for at in region.pages() {
            same!(region.load(at), mark(0, at / PAGE), "round {round}: {what}");
        }
        Ok(())
    };
    ordered(
        settings().rounds / 20 + 1,
        |round| {
            move_filler.lock().unwrap_or_else(PoisonError::into_inner)(0)?;
            doing("move_pages", region.move_to(1))?;
            // This move may have left a translation here, which would hide a translation left by
            // the next move.
            doing("mprotect", region.protect(0, PAGES * PAGE, NONE))?;
            doing("mprotect", region.protect(0, PAGES * PAGE, READ))?;
            looks("before the move", round)
        },
        |_| {
            doing("move_pages", region.move_to(0))?;
            let stayed = move_filler.lock().unwrap_or_else(PoisonError::into_inner)(1)?;
            ensure!(stayed > 0, "{} pages do not fill the second node", pages.len());
            Ok(())
        },
        |round| looks("another CPU reads the new content of the old frames", round),
    )
}

/// Pages that one thread at a time stores to, with increasing numbers, each reported after the
/// store.
struct Told<'a> {
    region: &'a Region,
    told: Vec<AtomicU64>,
}

impl<'a> Told<'a> {
    fn new(region: &'a Region) -> Self {
        Self { region, told: region.pages().map(|_| AtomicU64::new(0)).collect() }
    }

    /// Reports that page `page` has its next value, after `store` has stored it.
    fn next(&self, page: u64, store: impl FnOnce(u64) -> Outcome) -> Outcome {
        let told = &self.told[page as usize];
        let next = told.load(Ordering::Relaxed) + 1;
        store(mark(next, page))?;
        told.store(next, Ordering::Release);
        Ok(())
    }

    /// Checks that a page has the reported value, or a later value.
    fn look(&self, page: u64) -> Outcome {
        let told = self.told[page as usize].load(Ordering::Acquire);
        let found = self.region.load(page * PAGE);
        let latest = self.told[page as usize].load(Ordering::Acquire) + 1;
        let known =
            (told..=latest).any(|number| found == if number == 0 { 0 } else { mark(number, page) });
        ensure!(
            known,
            "page {page} contains {found}, but {told} was announced and at most {latest} stored"
        );
        Ok(())
    }
}

/// Pages move back and forth while threads load from them and store to them: to private pages, each
/// thread to its own words; to private pages that become writable for each store; and to pages of a
/// file, by `write`.
fn storm() -> Verdict {
    const PAGES: u64 = 48;
    const WORDS: u64 = 64;
    let nodes = doing("move_pages", nodes())?;
    let cpus = doing("sched_getaffinity", proc::cpus())?;
    let crew = cpus.len().clamp(2, WORDS as usize / 2) as u64;
    let (own, guarded, file) = (anonymous(PAGES)?, anonymous(PAGES)?, nameless(PAGES)?);
    let mapped = Region::map(PAGES * PAGE, READ, libc::MAP_SHARED, file.as_raw_fd(), 0);
    let mapped = doing("mmap", mapped)?;
    own.fill(0);
    guarded.fill(0);
    doing("mprotect", guarded.protect(0, PAGES * PAGE, READ))?;
    let (guarded, mapped) = (Told::new(&guarded), Told::new(&mapped));
    let stop = AtomicBool::new(false);
    let word = |page: u64, thread: u64| page * PAGE + 8 * (1 + thread);
    // Every value contains its thread and page.
    let value = |thread: u64, page: u64, count: u64| (count * WORDS + thread) * PAGES + page;

    let worker = |thread: u64| -> Outcome {
        doing("sched_setaffinity", pin(cpus[thread as usize % cpus.len()]))?;
        let mut random = Random::new(settings().seed + thread);
        let mut model = [0; PAGES as usize];
        let mut count = 0;
        while !stop.load(Ordering::Relaxed) {
            let page = random.below(PAGES);
            same!(
                own.load(word(page, thread)),
                model[page as usize],
                "thread {thread}: the thread's word of page {page}"
            );
            if random.below(2) == 0 {
                count += 1;
                model[page as usize] = value(thread, page, count);
                own.store(word(page, thread), model[page as usize]);
            }
            let (page, other) = (random.below(PAGES), 1 + random.below(crew - 1));
            let found = own.load(word(page, other));
            ensure!(
                found == 0 || found % PAGES == page && found / PAGES % WORDS == other,
                "page {page} contains {found} for thread {other}"
            );
            guarded.look(random.below(PAGES))?;
            mapped.look(random.below(PAGES))?;
            if thread == 1 {
                let page = random.below(PAGES);
                mapped.next(page, |value| {
                    file.write_all_at(&value.to_le_bytes(), page * PAGE)
                        .map_err(|error| format!("write: {error}"))
                })?;
            }
        }
        Ok(())
    };
    let mover = || -> Outcome {
        doing("sched_setaffinity", pin(cpus[0]))?;
        let mut random = Random::new(settings().seed);
        let mut moved = 0;
        for round in 0..settings().rounds {
            if stop.load(Ordering::Relaxed) {
                // The failed thread reports the reason.
                return Ok(());
            }
            let starts = [&own, guarded.region, mapped.region].map(Region::start);
            let pages: Vec<_> = (0..1 + random.below(24))
                .map(|_| starts[random.below(3) as usize] + random.below(PAGES) * PAGE)
                .collect();
            let to: Vec<_> = pages.iter().map(|_| random.below(nodes as u64) as i32).collect();
            let mut status = vec![-1; pages.len()];
            let stayed = doing("move_pages", move_pages(&pages, Some(&to), &mut status, MOVE_ALL))?;
            // A page of the file may not be present yet. Pages in use by another CPU stay; Linux
            // then reports no later page.
            let fits = |(status, to): (&i32, &i32)| {
                status == to || [-libc::ENOENT, -libc::EBUSY].contains(status)
            };
            ensure!(
                stayed > 0 || status.iter().zip(&to).all(fits),
                "round {round}: {status:?} for {to:?}"
            );
            moved += status.iter().zip(&to).filter(|(status, to)| status == to).count();
            let page = random.below(PAGES);
            guarded.next(page, |value| {
                doing("mprotect", guarded.region.protect(page * PAGE, PAGE, WRITE))?;
                guarded.region.store(page * PAGE, value);
                doing("mprotect", guarded.region.protect(page * PAGE, PAGE, READ))
            })?;
            // If CPUs take turns, the other threads run now.
            proc::yield_now();
        }
        ensure!(
            moved as u64 > settings().rounds,
            "{moved} pages moved in {} rounds",
            settings().rounds
        );
        Ok(())
    };
    std::thread::scope(|scope| {
        let (worker, mover, stop) = (&worker, &mover, &stop);
        let work = move |outcome: Outcome| {
            stop.store(true, Ordering::Relaxed);
            outcome
        };
        let threads: Vec<_> =
            (1..crew).map(|thread| scope.spawn(move || work(worker(thread)))).collect();
        let mine = work(mover());
        let theirs = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err("a thread panicked".into())));
        theirs.fold(mine, Result::and)
    })
}

const CHECKS: &[Check] = &[
    ("errors", errors),
    ("shared_pages", shared_pages),
    ("store_elsewhere", store_elsewhere),
    ("store_after_move", store_after_move),
    ("write_after_move", write_after_move),
    ("old_frames_reused", old_frames_reused),
    ("storm", storm),
];

fn main() {
    let args = Args::read("migrate", &["rounds", "seed"]);
    let given = Settings { rounds: args.get("rounds", 500), seed: args.get("seed", 1) };
    if SETTINGS.set(given).is_err() {
        args.refuse("the settings must be read once");
    }
    proc::no_huge_pages();
    if nodes() == Ok(1) {
        println!("# one memory node: no page moves");
    }
    std::process::exit(check::run(&args, CHECKS))
}
