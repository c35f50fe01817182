//! `--html`: Chromium renders each page, light and dark; its plots are there, and its console is silent.

mod common;

use common::faultless;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Tells of each plot its heading, its size and how many marks it has; the colours of the page and of the plots' text.
const LOOK: &str = "<script>
const plots = [...document.querySelectorAll('figure > svg')].map(svg => {
    const box = svg.getBoundingClientRect();
    const marks = svg.querySelectorAll('polyline, circle, rect').length;
    const text = getComputedStyle(svg.querySelector('text')).fill;
    return [svg.getAttribute('aria-label'), Math.round(box.width), Math.round(box.height), marks, text].join('|');
});
const paper = getComputedStyle(document.body).backgroundColor;
document.body.setAttribute('data-look', [paper, document.documentElement.scrollWidth, ...plots].join(';'));
</script>";

const CHROMIUM: &str = "chromium";

/// What Chromium makes of a page.
#[derive(Debug)]
struct Look {
    paper: String,
    /// Pixels of the page, whose window has a thousand.
    width: u32,
    plots: Vec<Plot>,
    /// What it wrote on its console.
    console: Vec<String>,
}

#[derive(Debug)]
struct Plot {
    heading: String,
    width: u32,
    height: u32,
    marks: u32,
    text: String,
}

/// Has Chromium render `page` with `more` at its end.
fn look(dir: &Path, page: &str, more: &str, dark: bool) -> Look {
    let file = dir.join("page.html");
    fs::write(&file, page.replacen("</body>", &format!("{more}{LOOK}</body>"), 1))
        .expect("written");
    let output = Command::new(CHROMIUM)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            "--dump-dom",
        ])
        .args(["--window-size=1000,1000", "--virtual-time-budget=2000"])
        .arg(format!("--blink-settings=preferredColorScheme={}", u8::from(!dark)))
        .arg(format!("--user-data-dir={}", dir.join("profile").display()))
        .arg(format!("file://{}", file.display()))
        .output()
        .unwrap_or_else(|error| panic!("{CHROMIUM}: {error}; apt-get install chromium"));
    let said = String::from_utf8_lossy(&output.stderr);
    let dom = String::from_utf8_lossy(&output.stdout);
    let (_, look) = dom.split_once("data-look=\"").unwrap_or_else(|| panic!("no page: {said}"));
    let look = look.split('"').next().expect("it ends");
    let mut parts = look.split(';');
    let mut next = || parts.next().expect("it is told").to_owned();
    let (paper, width) = (next(), next());
    let plot = |part: &str| {
        let fields: Vec<_> = part.split('|').collect();
        let number = |at: usize| fields[at].parse().expect("a number");
        let (heading, text) = (fields[0].to_owned(), fields[4].to_owned());
        Plot { heading, width: number(1), height: number(2), marks: number(3), text }
    };
    Look {
        paper,
        width: width.parse().expect("a number"),
        plots: parts.map(plot).collect(),
        console: said.lines().filter(|line| line.contains("CONSOLE")).map(str::to_owned).collect(),
    }
}

/// The page that `args` write, which must show plots with these headings and nothing wrong.
fn shows(args: &[&str], headings: &[&str]) {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("out.html");
    let html = file.to_str().expect("text");
    faultless(&[args, &["--html", html]].concat()).succeeds();
    let page = fs::read_to_string(&file).expect("written");
    // It is in one piece: the name of a namespace is no address that is loaded.
    let loads = page.replace("http://www.w3.org/2000/svg", "");
    for loaded in ["<script", "<link rel=\"stylesheet", "http:", "https:", "src=", "url("] {
        assert!(!loads.contains(loaded), "{args:?}: {loaded}");
    }
    for dark in [false, true] {
        let look = look(dir.path(), &page, "", dark);
        assert_eq!(look.console, Vec::<String>::new(), "{args:?}");
        let found: Vec<_> = look.plots.iter().map(|plot| plot.heading.as_str()).collect();
        assert_eq!(found, headings, "{args:?}");
        assert!(look.width <= 1000, "{args:?}: {look:?}");
        for plot in &look.plots {
            assert!(plot.width > 600 && plot.height > 300 && plot.marks > 2, "{args:?}: {plot:?}");
        }
        let (paper, ink) = match dark {
            true => ("rgb(22, 24, 28)", "rgb(230, 230, 230)"),
            false => ("rgb(255, 255, 255)", "rgb(26, 26, 26)"),
        };
        assert_eq!(look.paper, paper, "{args:?}");
        assert!(look.plots.iter().all(|plot| plot.text == ink), "{args:?}: {look:?}");
    }
}

#[test]
fn scale_draws_throughput_time_and_latencies() {
    let headings = ["Throughput over CPUs", "Where the time goes", "Latencies: faults"];
    shows(&["scale", "page_fault_read", "--cpus", "1,2..8"], &headings);
}

#[test]
fn stat_draws_time_and_latencies() {
    let headings = ["Where the time goes", "Latencies: faults", "Latencies: mmap and munmap"];
    shows(&["stat", "small_allocs", "size=400K", "threads=2"], &headings);
}

#[test]
fn replay_draws_faults_memory_time_and_latencies() {
    let headings = [
        "Faults over time and address",
        "What prefault saves",
        "Resident memory",
        "Latencies",
        "Where the time goes",
    ];
    shows(&["replay", "sort"], &headings);
    shows(&["replay", "redis", "--policies"], &headings);
}

#[test]
fn compare_draws_instructions_ratios_and_programs() {
    let headings = ["Where a fault's instructions go", "Many CPUs", "Real programs"];
    shows(&["compare", "--quick", "--only", "sort", "--only", "pft"], &headings);
}

/// What the tests above rely on.
#[test]
fn an_error_on_the_console_is_seen() {
    let dir = tempfile::tempdir().expect("a directory");
    let page = "<!doctype html><html><body></body></html>";
    let silent = look(dir.path(), page, "", false);
    assert!(silent.console.is_empty() && silent.plots.is_empty(), "{silent:?}");
    for error in ["console.error('planted')", "throw new Error('planted')"] {
        let look = look(dir.path(), page, &format!("<script>{error}</script>"), false);
        assert!(look.console.iter().any(|line| line.contains("planted")), "{look:?}");
    }
}
