//! Pairs of operations of two CPUs on one space, in rounds, each judged by the sequential orders of
//! its operations. The pairs are drawn at random, or are one of the programs known to have failed.
//!
//! `cargo run --release -p faultless-native --example pairs -- --rounds 10_000_000 --policy per_vma`

#[path = "../tests/common/pairs.rs"]
mod stress;

use core::sync::atomic::{AtomicBool, Ordering};
use faultless::Setting;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stress::pairs::known::known;
use stress::{Plan, Progress, Source};

const USAGE: &str = "\
pairs [--rounds NUMBER] [--seed NUMBER] [--policy speculative|per_vma|mmap_lock|all]
      [--program random|known|NAME] [--case NUMBER] [--jitter NUMBER] [--prefault ORDER]";

/// The number of failed rounds printed in full.
const SHOWN: u64 = 3;
/// The time limit after which a round counts as stuck.
const STUCK: Duration = Duration::from_secs(60);

struct Arguments {
    plan: Plan,
    policies: Vec<faultless::Locking>,
    programs: Vec<(&'static str, Source)>,
}

fn arguments() -> Result<Arguments, String> {
    let mut plan = Plan {
        source: Source::Drawn,
        rounds: 1_000_000,
        seed: 1,
        locking: faultless::Locking::Speculative,
        jitter: 0,
        prefault: 0,
    };
    let mut policies = faultless::Locking::ALL.to_vec();
    let mut programs = vec![("random", Source::Drawn)];
    let mut case = None;
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{name} requires a value"))?;
        let number = || {
            value
                .replace('_', "")
                .parse::<u64>()
                .map_err(|_| format!("{name}: {value}: not a number"))
        };
        let small =
            || number().and_then(|it| it.try_into().map_err(|_| format!("{name}: {value}")));
        match name.as_str() {
            "--rounds" => plan.rounds = number()?,
            "--seed" => plan.seed = number()?,
            "--case" => case = Some(number()?),
            "--jitter" => plan.jitter = small()?,
            "--prefault" => plan.prefault = small()? as u8,
            "--policy" if value == "all" => {}
            "--policy" => match format!("locking={value}").parse() {
                Ok(Setting::Locking(locking)) => policies = vec![locking],
                _ => return Err(format!("{value}: unknown policy")),
            },
            "--program" if value == "random" => {}
            "--program" => {
                let named =
                    known().into_iter().filter(|(name, _)| value == "known" || *name == value);
                programs = named.map(|(name, case)| (name, Source::One(Box::new(case)))).collect();
                if programs.is_empty() {
                    let names: Vec<_> = known().into_iter().map(|(name, _)| name).collect();
                    return Err(format!(
                        "{value}: unknown program; the programs are {}",
                        names.join(", ")
                    ));
                }
            }
            _ => return Err(format!("{name}: unknown option")),
        }
    }
    if let Some(number) = case {
        let one = plan.case(number);
        programs = vec![("one case", Source::One(Box::new(one)))];
    }
    Ok(Arguments { plan, policies, programs })
}

/// Prints the progress until the run is over.
fn watch(progress: &Progress, over: &AtomicBool, name: &str, rounds: u64, start: Instant) {
    let (mut before, mut since) = (0, Instant::now());
    while !over.load(Ordering::Relaxed) {
        std::thread::park_timeout(Duration::from_millis(500));
        let done = progress.rounds.load(Ordering::Relaxed);
        if done != before {
            (before, since) = (done, Instant::now());
        } else if since.elapsed() > STUCK {
            if let Some((number, case)) = &*progress.now.lock().unwrap() {
                eprintln!("\na round does not end: case {number}\n{case}");
            }
            std::process::exit(1);
        }
        if std::io::stderr().is_terminal() {
            let (seconds, part) = (start.elapsed().as_secs_f64(), done as f64 / rounds as f64);
            let left = (seconds / part.max(1e-9) - seconds).max(0.0);
            let bad = progress.bad.load(Ordering::Relaxed);
            eprint!(
                "\r{name}: {:5.1} %, {seconds:.0} s, {left:.0} s left, {bad} bad   ",
                part * 100.0
            );
            let _ = std::io::stderr().flush();
        }
    }
}

fn main() -> ExitCode {
    let Arguments { plan, policies, programs } = match arguments() {
        Ok(arguments) => arguments,
        Err(wrong) => {
            eprintln!("{wrong}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let mut code = ExitCode::SUCCESS;
    let progress: Arc<std::sync::Mutex<Arc<Progress>>> = Arc::default();
    let running = progress.clone();
    let heard = ctrlc::set_handler(move || {
        if running.lock().unwrap().enough.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    });
    if let Err(error) = heard {
        eprintln!("Ctrl-C will print no results: {error}");
    }
    for (name, source) in programs {
        for &locking in &policies {
            let plan = Plan { source: source.clone(), locking, ..plan.clone() };
            let now = Arc::new(Progress::default());
            *progress.lock().unwrap() = now.clone();
            let (start, over) = (Instant::now(), AtomicBool::new(false));
            let title = format!("{name}, {locking:?}");
            std::thread::scope(|scope| {
                let watcher = scope.spawn(|| watch(&now, &over, &title, plan.rounds, start));
                plan.run(&now, |number, what| {
                    if now.bad.load(Ordering::Relaxed) <= SHOWN {
                        let seed = plan.seed;
                        // The exit code holds the result if the reader has closed the output.
                        let _ =
                            writeln!(std::io::stdout(), "\n--seed {seed} --case {number}: {what}");
                    }
                });
                over.store(true, Ordering::Relaxed);
                watcher.thread().unpark();
            });
            let [done, bad] = [&now.rounds, &now.bad].map(|it| it.load(Ordering::Relaxed));
            if std::io::stderr().is_terminal() {
                eprintln!();
            }
            let seconds = start.elapsed().as_secs_f64();
            let _ =
                writeln!(std::io::stdout(), "{title}: {bad} bad rounds in {done}, {seconds:.0} s");
            if bad != 0 {
                code = ExitCode::FAILURE;
            }
            if now.enough.load(Ordering::Relaxed) {
                return code;
            }
        }
    }
    code
}
