//! The profile of this machine: the sources of its numbers, and the numbers measured directly on
//! the hardware.

use super::fit::{Fitted, Kind};
use super::hardware::{self, COLD, Effort, OWN, SECOND_LEVEL, SHARED};
use crate::error::Error;
use crate::processor;
use faultless_virtual::profile::Measured;
use faultless_virtual::{Number, Profile};
use faultless_workload::{Linux, System};

/// The profile that provides the numbers that cannot be measured.
const LIKE: &str = "two-socket";
/// The name of the profile.
pub const NAME: &str = "this-machine";
/// Comments at the top of the file.
pub const REMARKS: [&str; 2] = [
    "Written by `faultless calibrate`. The profile describes the subsystem's native machine on this host: CPUs are threads, the MMU is software,",
    "and calls and faults enter no kernel. So it predicts the figures of `faultless stat` here, and no kernel on this hardware.",
];

/// A function of [`FIGURES`], which measures and stores figures in the profile.
type Figure = fn(&mut Profile, Effort, [usize; 2]) -> Result<(), Error>;

/// The direct measurements of the hardware, part by part.
pub const FIGURES: [(&str, Figure); 7] = [
    ("CPUs", cpus),
    ("cache lines", lines),
    ("a line between two CPUs", transfer),
    ("zeroing", zeroing),
    ("copying", copying),
    ("memory bandwidth", bandwidth),
    ("sleeping and waking, dropping translations", threads),
];

fn number(value: f64, source: impl Into<String>) -> Number {
    Number { value: rounded(value), source: source.into() }
}

/// Rounds to four figures, the precision of the measurements.
pub fn rounded(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let unit = 10f64.powi(3 - value.abs().log10().floor() as i32);
    if unit > 1.0 { (value * unit).round() / unit } else { value.round() }
}

/// Returns the profile before any measurement.
///
/// # Errors
/// The bundled profile on which it is based is invalid.
pub fn base() -> Result<Profile, Error> {
    let mut profile = Profile::bundled(LIKE).map_err(Error::Profile)?;
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let host = format!("{}, {cpus} CPUs, {}", processor::model(), Linux::new().machine());
    profile.name = NAME.into();
    profile.summary = format!("the native machine of faultless on {host}");
    let (ipc, memory) = (&profile.cpu.instructions_per_cycle, &profile.memory);
    let later = |number: &Number| self::number(number.value, "not measured yet");
    profile.measured = Some(Measured {
        access_ns: later(&profile.line.own_ns),
        allocate_ns: number(0.0, "not measured yet"),
        fault_ipc: later(ipc),
        map_ipc: later(ipc),
        brk_ipc: later(ipc),
        protect_ipc: later(ipc),
        fork_ipc: later(ipc),
        zero_own_ns: later(&memory.zero_page_ns),
        zero_shared_ns: later(&memory.zero_page_ns),
        copy_own_ns: later(&memory.copy_page_ns),
        copy_shared_ns: later(&memory.copy_page_ns),
        shared_ns: later(&profile.line.far_ns),
        shared_lines: later(&profile.line.cached_lines),
    });
    Ok(profile)
}

/// Marks a number as taken from the bundled profile, with the reason.
fn taken(number: &mut Number, why: &str) {
    number.source = format!("taken from {LIKE}: {why}. Its source: {}", number.source);
}

fn cpus(profile: &mut Profile, effort: Effort, _: [usize; 2]) -> Result<(), Error> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from) as f64;
    let one = "one group of CPUs: the host does not report the topology to a guest, and two CPUs cannot measure it";
    let topology = &mut profile.topology;
    topology.sockets = number(1.0, one);
    topology.complexes_per_socket = number(1.0, one);
    topology.cpus_per_complex = number(cpus, "the CPUs that the host lets this process run on");
    profile.cpu.ghz = number(
        hardware::ghz(effort),
        "measured: a chain of shifts and exclusive ors, one cycle each",
    );
    profile.cpu.pause_ns = number(hardware::pause(effort), "measured: one PAUSE in a loop");
    Ok(())
}

fn lines(profile: &mut Profile, effort: Effort, _: [usize; 2]) -> Result<(), Error> {
    let line = &mut profile.line;
    let in_instructions =
        "a hit in the first level is included in the instructions per cycle measured with the path";
    line.own_ns = number(0.0, in_instructions);
    match hardware::cached_lines() {
        Some(lines) => {
            let source = format!("the second-level cache, in lines: {SECOND_LEVEL}");
            line.cached_lines = number(lines as f64, source);
        }
        None => taken(&mut line.cached_lines, "the host does not report the size of its caches"),
    }
    let own = line.cached_lines.value as usize * 64;
    line.far_ns = number(
        hardware::chase(effort, own / 2),
        "measured: the lines of half the second-level cache, each read after the previous one has arrived",
    );
    let memory = hardware::chase(effort, 128 << 20);
    line.memory_ns = number(
        memory,
        "measured: the lines of 128 MiB, each read after the previous one has arrived",
    );
    line.remote_memory_ns = number(memory, "as line.memory_ns: only one memory node");
    taken(&mut line.occupancy, "the measurement requires four CPUs that write one line");
    taken(&mut line.invalidate_ns, "the measurement requires more than two CPUs");
    if let Some(measured) = &mut profile.measured {
        measured.shared_lines = number(
            hardware::shared_lines(effort) as f64,
            "measured: the largest memory with a speed of zeroing closer to the speed for 256 KiB than for 96 MiB",
        );
    }
    Ok(())
}

fn transfer(profile: &mut Profile, effort: Effort, cpus: [usize; 2]) -> Result<(), Error> {
    let took = hardware::transfer(effort, cpus)?;
    let [one, other] = cpus;
    let how = format!(
        "measured: half of a round trip by compare-and-swap between CPUs {one} and {other}"
    );
    let line = &mut profile.line;
    line.complex_ns = number(took, how);
    line.socket_ns = number(took, "as line.complex_ns: only one group of CPUs");
    line.remote_ns = number(took, "as line.complex_ns: only one socket");
    let interrupt = &mut profile.interrupt;
    let flag = "derived: the line of the target's interrupt flag, a line.complex_ns";
    interrupt.send_ns = number(took, flag);
    let part = "derived: included in interrupt.deliver_ns, as the target reads the flag";
    interrupt.handle_ns = number(0.0, part);
    Ok(())
}

fn zeroing(profile: &mut Profile, effort: Effort, _: [usize; 2]) -> Result<(), Error> {
    // The time for pages in memory comes from the fault probe, which uses them in random order.
    if let Some(measured) = &mut profile.measured {
        let own = hardware::zero(effort, OWN);
        measured.zero_own_ns = number(own, "measured: pages of 256 KiB in turn");
        let shared = hardware::zero(effort, SHARED);
        measured.zero_shared_ns = number(shared, "measured: pages of 8 MiB in turn");
    }
    Ok(())
}

fn copying(profile: &mut Profile, effort: Effort, _: [usize; 2]) -> Result<(), Error> {
    let [own, shared, memory] = [OWN, SHARED, COLD].map(|bytes| hardware::copy(effort, bytes));
    profile.memory.copy_page_ns =
        number(memory, "measured: from pages of 48 MiB to pages of 48 MiB, in turn");
    if let Some(measured) = &mut profile.measured {
        measured.copy_own_ns =
            number(own, "measured: from pages of 128 KiB to pages of 128 KiB, in turn");
        measured.copy_shared_ns =
            number(shared, "measured: from pages of 4 MiB to pages of 4 MiB, in turn");
    }
    Ok(())
}

fn bandwidth(profile: &mut Profile, effort: Effort, cpus: [usize; 2]) -> Result<(), Error> {
    let how = "measured: two CPUs that each zero 96 MiB at the same time";
    profile.memory.gigabytes_per_second = number(hardware::bandwidth(effort, cpus)?, how);
    Ok(())
}

fn threads(profile: &mut Profile, effort: Effort, cpus: [usize; 2]) -> Result<(), Error> {
    let [wake, woken] = hardware::waking(effort, cpus)?;
    let thread = &mut profile.thread;
    thread.wake_ns = number(wake, "measured: Machine::wake for a thread that sleeps");
    thread.woken_ns = number(
        woken,
        "measured: from the end of Machine::wake to a store of the thread that was woken",
    );
    thread.park_ns =
        number(wake, "assumed: as long as thread.wake_ns, the other half of the same switch");
    let [page, all] = hardware::tlb_flushes(effort);
    profile.tlb.flush_page_ns = number(page, "measured: the software TLB drops one page");
    profile.tlb.flush_all_ns = number(all, "measured: the software TLB drops everything");
    Ok(())
}

/// Adds the sources of the fitted numbers, and rounds them.
pub fn explain(profile: &mut Profile, fitted: &[Fitted]) {
    for path in fitted {
        let Fitted { step, native, simulated } = path;
        let Some(it) = profile.number_mut(step.key) else { continue };
        let unit = if step.kind == Kind::PerCycle {
            ", with the instructions of crates/virtual/instructions.toml"
        } else {
            ""
        };
        let name = step.probe.name();
        let how = if path.fits() {
            format!(
                "fitted: with it the path '{name}' takes as long simulated as natively, {native:.1} ns{unit}"
            )
        } else {
            format!(
                "not fitted: with it the path '{name}' takes {simulated:.1} ns simulated, and {native:.1} ns natively{unit}"
            )
        };
        *it = number(it.value, how);
    }
    let as_call = "as exception.call_ns: a fault also enters the subsystem by a function call";
    profile.exception.fault_ns = number(profile.exception.call_ns.value, as_call);
    if let Some(measured) = &profile.measured {
        let ipc = measured.fault_ipc.value;
        profile.cpu.instructions_per_cycle = number(ipc, "as measured.fault_ipc");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_keeps_four_figures() {
        let all = [123.456, 0.012_345_6, 1.0, 98_765.4, 0.0, 3.999_96];
        assert_eq!(all.map(rounded), [123.5, 0.012_35, 1.0, 98_765.0, 0.0, 4.0]);
    }

    #[test]
    fn every_number_of_a_measured_profile_has_a_source() {
        let mut profile = base().expect("a valid bundled profile");
        let effort = Effort { rounds: 1 };
        let Ok(cpus) = hardware::two_cpus() else { return };
        for (what, figure) in FIGURES {
            figure(&mut profile, effort, cpus).unwrap_or_else(|error| panic!("{what}: {error}"));
        }
        let native = |step| Fitted { step, native: 20.0, simulated: 20.0 };
        explain(&mut profile, &super::super::fit::STEPS.map(native));
        let apart = Fitted { simulated: 50.0, ..native(super::super::fit::STEPS[0]) };
        let mut other = profile.clone();
        explain(&mut other, &[apart]);
        let key = super::super::fit::STEPS[0].key;
        let source = other.number_mut(key).map(|number| number.source.clone());
        assert!(source.is_some_and(|it| it.starts_with("not fitted: ")), "{key}");
        let text = profile.to_toml(&REMARKS);
        let again = Profile::parse(NAME, &text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        for (name, Number { source, .. }) in again.numbers() {
            let says = ["measured: ", "fitted: ", "derived: ", "assumed: ", "as ", "taken from "];
            let known = says.iter().any(|says| source.starts_with(says))
                || name.starts_with("topology.")
                || name.ends_with("_lines")
                || name == "line.own_ns";
            assert!(known && source != "not measured yet", "{name}: {source}");
        }
    }
}
