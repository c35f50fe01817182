//! `faultless text`: compares a large program's code in pages of 4 KiB and of 2 MiB.
//!
//! The workload `text` runs with `huge_text` off and on, as one process and as several. Faults,
//! misses of the instruction TLB and page walks are counted for one process; shared frames need a
//! second process. Each run has a new machine, so that no run depends on the memory state of an
//! earlier run.

use crate::error::CliError;
use crate::interrupt;
use crate::number::within;
use crate::report::json::Json;
use crate::report::progress::Progress;
use crate::report::{self, JsonArgs, table};
use crate::set::SetArgs;
use faultless::{Counter, PAGE_SIZE};
use faultless_analysis::number::{grouped, percent, processes};
use faultless_analysis::settings::{Assignment, Settings};
use faultless_analysis::{Context, Figures, Observer, Sample, run};
use faultless_native::tlb::PROCESSOR;
use faultless_workload::{Outcome, ParamError, Workload};
use std::io::Write;
use std::sync::Arc;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  faultless text
  faultless text --size 471816K     as large as the published program
  faultless text --passes 1 --set fault_around_pages=1")]
pub struct TextArgs {
    /// Set the size of the program's code, such as 64M or 471816K
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    pub size: String,
    /// Call a function of each page N times
    #[arg(long, value_name = "N", default_value = "10")]
    pub passes: String,
    /// Set the number of processes that run the program, to measure shared frames
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = within(2..=64_u16))]
    pub processes: u16,
    #[command(flatten)]
    pub set: SetArgs,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// The knob, and its settings: off, on.
const KNOB: &str = "huge_text";
const VALUES: [&str; 2] = ["never", "always"];

/// Results of a prototype on Linux: W. Kucharski, "Read-only mapping of program text using large
/// THP pages" (February 2019). A program with 483,138,032 bytes of text, ten runs, x86-64 at 4.57
/// GHz; pages of 4 KiB, and of 2 MiB.
const PUBLISHED_FAULTS: [u64; 2] = [7_728, 598];
const PUBLISHED_MISSES: [u64; 2] = [1_219_514_499, 51_929_869];

/// One setting of the knob, and its results. An interrupted command may lack some of them.
struct Ran {
    name: String,
    /// The outcome with one process.
    alone: Outcome,
    /// The outcome with several processes.
    together: Option<Outcome>,
}

/// Converts an error in a parameter to an error that names the option of the command.
fn usage(error: ParamError) -> CliError {
    CliError::Usage(match error {
        ParamError::BadValue { param, value, expected, .. } => {
            let option = if param == "threads" { "processes" } else { param };
            format!("--{option} {value}: expected {expected}")
        }
        other => other.to_string(),
    })
}

/// Runs the workload with both settings, and compares them.
pub fn run(args: &TextArgs) -> Result<(), CliError> {
    args.set.one_value_each(&[])?;
    if let Some(set) = args.set.set.iter().find(|set| set.knob() == KNOB) {
        let why = format!("both settings of {KNOB} are compared");
        return Err(CliError::Usage(format!("--set {}: {why}", set.text())));
    }
    let workload = |processes: u16| {
        let params = [
            format!("size={}", args.size),
            format!("passes={}", args.passes),
            format!("threads={processes}"),
        ];
        Workload::parse("text", params).map_err(usage)
    };
    let (alone, together) = (Arc::new(workload(1)?), Arc::new(workload(args.processes)?));
    let mut json = Json::open(&args.json, &[])?;
    let (mut out, style) = report::output(&args.json);

    let mut columns = Vec::new();
    let progress = Progress::new(2 * VALUES.len() as u64);
    for value in VALUES {
        let mut given = args.set.set.clone();
        let name = format!("{KNOB}={value}");
        let setting: Result<Assignment, _> = name.parse();
        given.push(setting.map_err(|error| CliError::failed(&name, error))?);
        let settings = Settings::new(&given);
        let mut once = |workload: &Arc<Workload>, crew: u16| {
            progress.begin(&format!("{name}, {}", processes(crew.into())));
            let (shared, under) = (workload.clone(), settings.clone());
            let ran = interrupt::unless_requested(move || {
                let native = run::machine(run::memory(&shared), shared.crew().workers)?;
                run::on_native(&native, &under, &shared)
            });
            let Some(outcome) = ran.transpose()? else { return Ok(None) };
            let context = Context::of(workload, "native".into(), Some(&settings));
            json.outcome(&context, &outcome, &Sample::of(&outcome))?;
            progress.advance(1);
            Ok::<_, CliError>(Some(outcome))
        };
        let Some(one) = once(&alone, 1)? else { break };
        let together = once(&together, args.processes)?;
        columns.push(Ran { name, alone: one, together });
    }
    drop(progress);
    let title = format!("text: a program with {} of code, {} passes", args.size, args.passes);
    writeln!(out, "\n{title}\n")?;
    writeln!(out, "{}", tables(&columns, args.processes.into(), style))?;
    writeln!(
        out,
        "\nTLBs are simulated, with the sizes of {PROCESSOR}, whose first level has 8 entries \
         for instructions in 2 MiB. Published: faults\nand iTLB-load-misses of another program, \
         with 483,138,032 bytes of code, on Linux in 2019 (Kucharski); --size 471816K\nhas as \
         many pages. Compare the changes, not the misses: that program ran for minutes, with \
         other calls."
    )?;
    if interrupt::requested() {
        writeln!(out, "{}", interrupt::NOT_COMPLETE)?;
    }
    json.complete()
}

/// A row: its name, a figure for each setting, and the published figures.
type Row = (String, fn(&Ran) -> Option<u64>, Option<[u64; 2]>);

fn tables(columns: &[Ran], together: usize, style: report::Style) -> comfy_table::Table {
    let rows: [Row; 8] = [
        ("page faults".into(), |ran| Some(ran.alone.faults), Some(PUBLISHED_FAULTS)),
        (
            "instruction TLB, first level: misses".into(),
            |ran| Some(walks(&ran.alone)? + ran.alone.counter("itlb_misses.stlb_hit")?),
            None,
        ),
        (
            "all levels: page walks (iTLB-load-misses)".into(),
            |ran| walks(&ran.alone),
            Some(PUBLISHED_MISSES),
        ),
        ("calls".into(), |ran| Some(ran.alone.operations), None),
        ("code in memory, KiB".into(), |ran| kib(&ran.alone), None),
        (
            "faults that mapped 2 MiB (thp_file_mapped)".into(),
            |ran| ran.alone.counter(Counter::ThpFileMapped.name()),
            None,
        ),
        (
            "2 MiB not available (thp_file_fallback)".into(),
            |ran| ran.alone.counter(Counter::ThpFileFallback.name()),
            None,
        ),
        (
            format!("frames that {} share", processes(together)),
            |ran| ran.together.as_ref()?.counter("shared_frames"),
            None,
        ),
    ];
    let mut head = vec![processes(1)];
    head.extend(columns.iter().map(|ran| ran.name.clone()));
    head.extend((columns.len() == 2).then(|| "change".to_owned()));
    head.extend(["published, 4 KiB", "2 MiB", "change"].map(str::to_owned));
    let mut table = table::numbers(&head, style);
    for (name, figure, published) in rows {
        let figures: Vec<_> = columns.iter().map(figure).collect();
        let shown = |figure: &Option<u64>| figure.map_or("-".to_owned(), grouped);
        let mut cells = vec![name];
        cells.extend(figures.iter().map(shown));
        if let [off, on] = figures[..] {
            cells.push(off.zip(on).map_or_else(String::new, |(off, on)| change(off, on)));
        }
        match published {
            Some([off, on]) => cells.extend([grouped(off), grouped(on), change(off, on)]),
            None => cells.extend([String::new(), String::new(), String::new()]),
        }
        table::row(&mut table, cells);
    }
    table
}

fn walks(outcome: &Outcome) -> Option<u64> {
    outcome.counter("iTLB-load-misses")
}

fn kib(outcome: &Outcome) -> Option<u64> {
    Some(outcome.counter("file_pages")? * (PAGE_SIZE / 1024))
}

/// Returns the difference of `on` from `off`, in percent.
fn change(off: u64, on: u64) -> String {
    match (off, on) {
        (0, _) => String::new(),
        (off, on) if on == off => String::new(),
        (off, on) if on < off => format!("-{}", percent(off - on, off)),
        (off, on) => format!("+{}", percent(on - off, off)),
    }
}
