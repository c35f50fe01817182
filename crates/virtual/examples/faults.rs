//! Page faults of many CPUs in one address space, under each locking policy, *simulated*:
//! throughput, the distribution of time, and the places at which CPUs wait for cache lines of other
//! CPUs.
//!
//! `cargo run --release -p faultless-virtual --example faults [-- PROFILE [CPUS...]]`

#[path = "../../trace/examples/output/mod.rs"]
mod output;

use faultless::{MapFlags, PAGE_SIZE, Prot};
use faultless_virtual::{Config, Profile, Spent, Virtual};
use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

/// Pages written by each CPU.
const PAGES: u64 = 2048;
/// Places to print.
const PLACES: usize = 5;

fn run(
    out: &mut impl Write,
    profile: &Profile,
    cpus: usize,
    (policy, order): (&str, u32),
) -> Result<f64, Box<dyn Error>> {
    let bytes = cpus as u64 * PAGES * PAGE_SIZE;
    // Such machines have more memory, but the metadata of this amount fits into the host.
    let memory_bytes = (bytes + bytes / 4).max(cpus as u64 * (128 << 20)) + (64 << 20);
    let system = Virtual::new(profile, Config { cpus, memory_bytes, slow_bytes: 0, seed: 0 })
        .map_err(|errno| format!("{cpus} CPUs: {errno:?}"))?;
    system.set(&format!("locking={policy}"))?;
    system.set(&format!("prefault_max_order={order}"))?;
    let process = system.process()?;
    let (rw, private) = (Prot::READ | Prot::WRITE, MapFlags::PRIVATE | MapFlags::ANONYMOUS);
    let area =
        system.run(1, |_| &process, |cpu, _| cpu.mmap(None, bytes, rw, private)).remove(0)?;
    let before = system.accounts();
    system.cool();
    let spans = system.run(
        cpus,
        |_| &process,
        |cpu, number| {
            let begin = cpu.now();
            let first = area + number as u64 * PAGES * PAGE_SIZE;
            for page in 0..PAGES {
                cpu.store(first + page * PAGE_SIZE, 1)?;
            }
            Ok::<_, faultless_virtual::Stop>((begin, cpu.now()))
        },
    );
    let spans: Vec<_> = spans.into_iter().collect::<Result<_, _>>()?;
    let begin = spans.iter().map(|span| span.0).min().unwrap_or(0);
    let end = spans.iter().map(|span| span.1).max().unwrap_or(0);
    let pages = (cpus as u64 * PAGES) as f64;
    let each_second = pages / ((end - begin) as f64 * 1e-12);
    let after = system.accounts();
    let transfers = (after.transfers - before.transfers) as f64 / pages;
    writeln!(out, "{policy:11} {order:5} {cpus:5} {each_second:13.0} {transfers:15.2}")?;
    let all: u64 =
        Spent::ALL.map(|on| after.spent[on as usize] - before.spent[on as usize]).iter().sum();
    let parts = Spent::ALL.map(|on| {
        let part = after.spent[on as usize] - before.spent[on as usize];
        format!("{} {:.0} %", on.name(), part as f64 / all as f64 * 100.0)
    });
    writeln!(out, "    {}", parts.join(", "))?;
    for place in system.hottest(PLACES) {
        let (waited, share) =
            (place.waited as f64 / pages / 1000.0, place.transfers as f64 / pages);
        writeln!(
            out,
            "    {waited:8.1} ns, {share:5.2} transfers a page: {} at {}:{}",
            place.of, place.file, place.line
        )?;
    }
    system.audit(&[&process])?;
    system.exit(process);
    Ok(each_second)
}

fn main() -> ExitCode {
    output::run(|out| table(out))
}

fn table(out: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let profile = Profile::bundled(&arguments.next().unwrap_or_else(|| "two-socket".into()))?;
    let cpus: Vec<usize> = arguments
        .map(|number| number.parse().map_err(|error| format!("CPUS {number}: {error}")))
        .collect::<Result<_, _>>()?;
    let cpus = if cpus.is_empty() { vec![1, 2, 8, 32, 128] } else { cpus };
    writeln!(out, "{profile}: simulated")?;
    writeln!(
        out,
        "{:11} {:>5} {:>5} {:>13} {:>15}",
        "policy", "order", "CPUs", "pages/s", "transfers/page"
    )?;
    for (policy, order) in
        [("mmap_lock", 0), ("per_vma", 0), ("speculative", 0), ("speculative", 3)]
    {
        let mut one = None;
        for &cpus in &cpus {
            let rate = run(out, &profile, cpus, (policy, order))?;
            let base = *one.get_or_insert(rate / cpus as f64);
            writeln!(out, "    {:.0} % of linear", rate / base / cpus as f64 * 100.0)?;
        }
    }
    Ok(())
}
