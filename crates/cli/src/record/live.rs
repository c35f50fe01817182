//! Recordings of processes that already run: `--pid`, `--cgroup` and `--all`.

use super::{PORTABLE, RecordArgs, kept, named_for, put_portable, report, setup};
use crate::error::CliError;
use crate::number::within;
use crate::output::{FOR_OWNER, Replacing};
use crate::report::progress::{Progress, Reading};
use crate::report::say;
use faultless_analysis::Observer;
use faultless_trace::record::{Limits, Live, Progress as Recording, Setup, Signals, Subject};
use std::cell::OnceCell;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// The longest recording, in seconds: a day.
const LONGEST: u32 = 86_400;

/// Running processes, and the time of their recording.
#[derive(Debug, clap::Args)]
pub struct LiveArgs {
    /// Record the running process PID and its descendants, until Ctrl-C
    #[arg(long, value_name = "PID", value_delimiter = ',', value_parser = within(1..=i32::MAX))]
    pub pid: Vec<i32>,
    /// Record the processes of this control group
    #[arg(long, value_name = "PATH")]
    pub cgroup: Option<PathBuf>,
    /// Record all processes of the system
    #[arg(long)]
    pub all: bool,
    /// End the recording of running processes after N seconds
    #[arg(long, value_name = "N", value_parser = within(1..=LONGEST), conflicts_with = "program")]
    pub seconds: Option<u32>,
    /// Record each fault of running processes up to N events a second, and beyond that one in
    /// several faults [default: ten million in --seconds, or in a minute]
    #[arg(long, value_name = "N", value_parser = within(1..=u32::MAX), conflicts_with = "program")]
    pub max_rate: Option<u32>,
}

impl LiveArgs {
    /// Returns the running processes, if the arguments name some.
    pub fn subject(&self) -> Option<Subject> {
        match (&self.pid[..], &self.cgroup, self.all) {
            ([], None, false) => None,
            ([], None, true) => Some(Subject::System),
            ([], Some(path), _) => Some(Subject::Cgroup(path.clone())),
            (pids, ..) => Some(Subject::Processes(pids.to_vec())),
        }
    }
}

/// Records `subject` into the portable form, which can contain resident pages.
pub fn run(args: &RecordArgs, subject: &Subject) -> Result<ExitCode, CliError> {
    // A signal ends the recording, which is then written.
    let _signals = Signals::hold();
    let output = args.output(PORTABLE)?;
    let replacing = Replacing::new(&output)?;
    let setup = setup(&args.setup, false)?;
    replacing.check_old()?;
    let data = replacing.temporary(FOR_OWNER)?;
    let live = record(&setup, data.path(), subject, &args.live)
        .map_err(|error| CliError::Failed(named_for(&error.to_string(), data.path(), &output)))?;
    let put = put_portable(&replacing, &output, &live.recorded);
    put.map_err(|error| kept(error, data))?;
    report(&output, &live.recorded);
    Ok(ExitCode::SUCCESS)
}

/// Records `subject` with the file `data` of perf. Prints the overhead.
pub fn record(
    setup: &Setup,
    data: &Path,
    subject: &Subject,
    args: &LiveArgs,
) -> Result<Live, faultless_trace::record::RecordError> {
    let time = args.seconds.map(|seconds| Duration::from_secs(seconds.into()));
    let limits = Limits { time, rate: args.max_rate };
    let progress = Progress::on_terminal(args.seconds.unwrap_or(0).into());
    let reading = OnceCell::new();
    let mut shown = 0;
    let live = setup.record_live(data, subject, limits, |now| match now {
        Recording::Records(seconds, bytes) => {
            // A recording with fewer faults begins again.
            progress.advance((seconds as u64).saturating_sub(shown));
            shown = seconds as u64;
            let size = bytes as f64 / 1e6;
            progress.begin(&format!("records: {size:.1} MB; Ctrl-C ends the recording"));
        }
        Recording::Reads(share) => reading.get_or_init(Reading::new).read(share),
    })?;
    drop(reading);
    drop(progress);
    for pid in &live.ended {
        say!("faultless: {}", end_of(*pid, subject, live.seconds));
    }
    if !live.has_fault() {
        say!("faultless: {}", without_fault(live.seconds));
    }
    let used = match live.usage {
        Some(usage) => {
            format!("{:.2} s, with the cost of recording", usage.user + usage.system)
        }
        None => "an unknown time, because one of them has ended".to_owned(),
    };
    say!(
        "faultless: recorded {:.1} s: {:.0} events a second; the recorder took {:.2} s of \
         processor time ({:.1} % of a CPU), and the recorded processes {used}",
        live.seconds,
        live.rate(),
        live.recorder,
        100.0 * live.recorder / live.seconds.max(1e-3),
    );
    Ok(live)
}

/// Describes the end of the process `pid`, of `subject`, within a recording of this number of
/// seconds. A recording of one process ends with the process.
fn end_of(pid: i32, subject: &Subject, seconds: f64) -> String {
    match subject {
        Subject::Processes(pids) if pids.len() == 1 => {
            format!("PID {pid} ended after {seconds:.1} s")
        }
        _ => format!("PID {pid} ended during the recording"),
    }
}

/// Describes a recording of running processes without a page fault.
fn without_fault(seconds: f64) -> String {
    format!("no page fault in {seconds:.1} s: no setting of memory saves time in such a period")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_of_a_single_process_has_a_time() {
        let one = end_of(123, &Subject::Processes(vec![123]), 0.84);
        assert_eq!(one, "PID 123 ended after 0.8 s");
        let several = end_of(123, &Subject::Processes(vec![7, 123]), 0.84);
        assert_eq!(several, "PID 123 ended during the recording");
    }
}
