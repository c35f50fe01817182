//! The host of the measurements, for the record.

use serde_json::{Value, json};
use std::fs;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the host: processor, cores, kernel, compiler, and the current time. Unknown facts are
/// null.
pub fn facts() -> Value {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map(|rest| rest.trim_start_matches([' ', '\t', ':']).to_owned());
    let cores = std::thread::available_parallelism().ok().map(usize::from);
    let load = fs::read_to_string("/proc/loadavg").ok();
    let load = load.as_deref().and_then(|text| text.split(' ').next()).map(str::to_owned);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map(|since| since.as_secs()).ok();
    json!({
        "processor": model,
        "cores": cores,
        "virtual": cpuinfo.contains("hypervisor"),
        "kernel": said("uname", &["-sr"]),
        "compiler": said("rustc", &["--version"]),
        "valgrind": said("valgrind", &["--version"]),
        "load_before": load,
        "unix_time": now,
    })
}

/// Returns the first line printed by a command.
pub(crate) fn said(command: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(command).args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.lines().next().unwrap_or_default().to_owned())
}
