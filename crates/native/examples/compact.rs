//! Scatters a program's pages over memory, compacts the memory, and prints the number of free 2 MiB
//! blocks before and after, and the cost of a page.
//!
//! `cargo run --release -p faultless-native --example compact -- --kept 8 --memory 512`

use faultless::{Counter, MapFlags, PAGE_SIZE, Prot};
use faultless_native::{Config, Native};
use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

const USAGE: &str = "\
compact [--kept NUMBER] [--memory MIB]
Unmaps all but one page in --kept (8) of nearly all memory of --memory (512) MiB, then compacts.";

const AT: u64 = 1 << 30;

fn arguments() -> Result<(u64, u64), String> {
    let (mut kept, mut memory) = (8, 512);
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{name} requires a value"))?;
        let number = value.parse().map_err(|_| format!("{name}: {value}: not a number"))?;
        match name.as_str() {
            "--kept" if number > 1 => kept = number,
            "--memory" if number > 15 => memory = number,
            _ => return Err(format!("{name} {value}: unknown option")),
        }
    }
    Ok((kept, memory))
}

fn main() -> ExitCode {
    let (kept, memory) = match arguments() {
        Ok(given) => given,
        Err(wrong) => {
            eprintln!("compact: {wrong}\n{USAGE}");
            return ExitCode::FAILURE;
        }
    };
    let memory_bytes = memory << 20;
    let config = Config { memory_bytes, cpus: 1, populate: true, ..Config::default() };
    let native = Native::new(config).expect("memory for the machine");
    let process = native.process().expect("memory for a process");
    let pages = memory_bytes / PAGE_SIZE * 9 / 10;
    let flags = MapFlags::PRIVATE | MapFlags::ANONYMOUS | MapFlags::FIXED;
    let page = |at: u64| AT + at * PAGE_SIZE;
    process
        .run(|cpu| {
            cpu.mmap(AT, pages * PAGE_SIZE, Prot::READ | Prot::WRITE, flags)?;
            for at in 0..pages {
                cpu.store(page(at), at)?;
            }
            for at in (0..pages).step_by(kept as usize) {
                let behind = (at + kept).min(pages);
                if at + 1 < behind {
                    cpu.madvise(
                        page(at + 1),
                        (behind - at - 1) * PAGE_SIZE,
                        faultless::Advice::DontNeed,
                    )?;
                }
            }
            let cpu_of = cpu.cpu();
            cpu_of.drain();
            let before = cpu_of.free_huge_blocks();
            let begin = Instant::now();
            let done = cpu_of.compact(u64::MAX);
            let took = begin.elapsed();
            // The check at the end holds the result if the reader has closed the output.
            let mut out = std::io::stdout().lock();
            let after = cpu_of.free_huge_blocks();
            let _ = writeln!(out, "free blocks of 2 MiB: {before} before, {after} after");
            let _ = writeln!(
                out,
                "{} pages moved in {took:?}: {:.2} µs each",
                done.moved,
                took.as_secs_f64() * 1e6 / done.moved.max(1) as f64,
            );
            let totals = native.vm().totals();
            for counter in
                [Counter::CompactMigrateScanned, Counter::CompactFreeScanned, Counter::MigrateFail]
            {
                let _ = writeln!(out, "{} {}", counter.name(), totals.get(counter));
            }
            for at in (0..pages).step_by(kept as usize) {
                assert_eq!(cpu.load::<u64>(page(at))?, at, "page {at}");
            }
            Ok(())
        })
        .expect("a program that runs");
    process.exit();
    ExitCode::SUCCESS
}
