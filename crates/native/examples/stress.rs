//! Rounds of random operations of several processes on a small machine: mappings, moves, forks,
//! pins, shrinking files, swap on failing stores. A model of contents finds lost stores and foreign
//! data. The audit of the library runs while no thread runs.
//!
//! `cargo run --release -p faultless-native --example stress -- --rounds 500`

#[path = "stress/mod.rs"]
mod stress;

use clap::Parser;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};
use stress::plan::Plan;
use stress::tally::Tally;
use stress::world::{self, Control, Ended};

/// The time limit after which a round counts as stuck.
const STUCK: Duration = Duration::from_secs(120);
/// The time limit for the threads of a failed or interrupted round, after which the threads count
/// as deadlocked.
const PATIENCE: Duration = Duration::from_secs(10);
/// The number of rounds after which each operation and expected counter must have been counted.
const ENOUGH: u64 = 100;

/// Runs rounds of random operations of several processes, and checks contents and books.
#[derive(Parser)]
#[command(name = "stress")]
struct Arguments {
    /// How many rounds to run
    #[arg(long, default_value_t = 100)]
    rounds: u64,
    /// Chooses the rounds
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Runs this round again and again, instead of the rounds from 0 on
    #[arg(long)]
    round: Option<u64>,
    /// Prints the plan of each round, and counts at the end
    #[arg(long)]
    verbose: bool,
}

/// Prints a line. The exit code holds the result if the reader has closed the output.
macro_rules! print_line {
    ($($text:tt)*) => {{
        let _ = writeln!(std::io::stdout(), $($text)*);
    }};
}

static CONTROL: Control = Control::new();

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Err(error) = ctrlc::set_handler(|| CONTROL.stop()) {
        eprintln!("stress: Ctrl-C ends the program at once: {error}");
    }
    let (begun, tally, begin) = (AtomicU64::new(0), Tally::default(), Instant::now());
    let ended = std::thread::scope(|scope| {
        let rounds = scope.spawn(|| run(&arguments, &tally, &begun));
        let (mut last, mut since) = (None, Instant::now());
        while !rounds.is_finished() {
            std::thread::sleep(Duration::from_millis(50));
            let round = begun.load(SeqCst);
            let now = (round, CONTROL.failure(), CONTROL.is_stopped());
            let most = if now.1.is_some() || now.2 { PATIENCE } else { STUCK };
            if last.as_ref() != Some(&now) {
                (last, since) = (Some(now), Instant::now());
            } else if since.elapsed() > most {
                let round = arguments.round.unwrap_or(round.saturating_sub(1));
                let wrong =
                    now.1.unwrap_or_else(|| format!("the round has not ended after {most:?}"));
                report(&arguments, &Plan::new(arguments.seed, round), &wrong);
                // The threads wait for each other.
                std::process::exit(1);
            }
        }
        rounds.join().expect("rounds catch panics")
    });
    let rounds = begun.load(SeqCst);
    clear_line();
    let took = begin.elapsed().as_secs_f64();
    print_line!("{rounds} rounds, {} operations, {took:.1} s", tally.operations());
    if arguments.verbose {
        print_line!("{tally}");
    }
    let Ok(ended) = ended else { return ExitCode::FAILURE };
    if ended == Ended::Stopped {
        print_line!("interrupted");
        return ExitCode::from(130);
    }
    let missing = tally.missing();
    if rounds >= ENOUGH && arguments.round.is_none() && !missing.is_empty() {
        print_line!("never seen: {}", missing.join(", "));
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// Runs all rounds. A failure is reported.
fn run(arguments: &Arguments, tally: &Tally, begun: &AtomicU64) -> Result<Ended, ()> {
    for number in 0..arguments.rounds {
        let plan = Plan::new(arguments.seed, arguments.round.unwrap_or(number));
        if arguments.verbose {
            print_line!("round {}: {plan}", plan.round);
        } else {
            progress(number, arguments.rounds);
        }
        begun.store(number + 1, SeqCst);
        match world::run(&plan, tally, &CONTROL) {
            Ok(Ended::Whole) => {}
            Ok(Ended::Stopped) => return Ok(Ended::Stopped),
            Err(wrong) => {
                report(arguments, &plan, &wrong);
                return Err(());
            }
        }
    }
    Ok(Ended::Whole)
}

/// Prints a failure, and the command to repeat its round.
fn report(arguments: &Arguments, plan: &Plan, wrong: &str) {
    clear_line();
    print_line!("round {} of seed {} failed: {wrong}\n{plan}", plan.round, plan.seed);
    print_line!(
        "threads differ from run to run; this repeats the round:\n\
         cargo run --release -p faultless-native --example stress -- --seed {} --round {} --rounds {}",
        plan.seed,
        plan.round,
        arguments.rounds.max(200),
    );
}

/// Shows how many rounds are done: on one line of a terminal, else now and then.
fn progress(done: u64, all: u64) {
    if std::io::stderr().is_terminal() {
        eprint!("\r{done} of {all} rounds");
        let _ = std::io::stderr().flush();
    } else if done.is_multiple_of(50) && done != 0 {
        eprintln!("{done} of {all} rounds");
    }
}

fn clear_line() {
    if std::io::stderr().is_terminal() {
        eprint!("\r\x1b[K");
    }
}
