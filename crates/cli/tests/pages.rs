//! `--html`: Chromium renders each page, light and dark, wide and narrow. The plots are present,
//! their text is readable, their marks have tooltips, and the console is silent.

mod common;

use common::faultless;
use faultless_trace::event::{Frame, Function, Kind, Recorded, StackId};
use faultless_trace::{Trace, compact, recordings};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Reports, for each visible plot: its heading, its size, its marks, its tooltips, the height of
/// its smallest text in screen pixels, whether all of its text is inside, and the colour of its
/// text. For the page: its colour, the widths of the document and of the window, and the smallest
/// height of text outside of plots.
const LOOK: &str = "<script>
const shown = [...document.querySelectorAll('figure > svg')].filter(svg => getComputedStyle(svg).display != 'none');
const height = element => parseFloat(getComputedStyle(element).fontSize);
const plots = shown.map(svg => {
    const box = svg.getBoundingClientRect();
    const marks = svg.querySelectorAll('polyline, circle:not(.tip), rect:not(.tip)').length;
    const tips = [...svg.querySelectorAll('.tip > title')].filter(title => title.textContent.length > 3).length;
    const texts = [...svg.querySelectorAll('text')].filter(text => text.textContent.trim() != '');
    const least = Math.min(...texts.map(text => height(text) * svg.getScreenCTM().a));
    const inside = texts.every(text => {
        const part = text.getBoundingClientRect();
        return part.left >= box.left - 1 && part.right <= box.right + 1 && part.top >= box.top - 1 && part.bottom <= box.bottom + 1;
    });
    const ink = getComputedStyle(svg.querySelector('text')).fill;
    const sizes = [Math.round(box.width), Math.round(box.height), marks, tips, least.toFixed(1), inside ? 1 : 0];
    return [svg.getAttribute('aria-label'), ...sizes, ink].join('|');
});
const others = Math.min(...[...document.querySelectorAll('h1, h2, p, pre, figcaption')].map(height));
const paper = getComputedStyle(document.body).backgroundColor;
const page = [paper, document.documentElement.scrollWidth, window.innerWidth, others];
document.body.setAttribute('data-look', [...page, ...plots].join(';'));
</script>";

const CHROMIUM: &str = "chromium";
/// The headings of plots with horizontal bars.
const NAMED: [&str; 4] = ["Call sites", "Calls that create memory", "Settings", "Before and after"];

/// The rendering of a page by Chromium.
#[derive(Debug)]
struct Look {
    paper: String,
    /// Pixels of the page, and of the window.
    width: f64,
    window: f64,
    /// The smallest height of text outside of plots, in pixels.
    text: f64,
    plots: Vec<Plot>,
    /// The messages on the console.
    console: Vec<String>,
}

#[derive(Debug)]
struct Plot {
    heading: String,
    width: f64,
    height: f64,
    marks: f64,
    /// Marks with a tooltip.
    tips: f64,
    /// The height of the smallest text, in screen pixels.
    text: f64,
    /// Whether all text is inside the plot.
    inside: bool,
    ink: String,
}

/// The widths of a desktop window and of a phone, in pixels.
const WIDE: u32 = 1000;
const NARROW: u32 = 400;

/// Renders `page` in Chromium, with `more` at its end, in a frame of `width` pixels, because
/// windows have a least width.
fn look(dir: &Path, page: &str, more: &str, (width, dark): (u32, bool)) -> Look {
    let inner = dir.join("inner.html");
    fs::write(&inner, page.replacen("</body>", &format!("{more}{LOOK}</body>"), 1))
        .expect("written");
    let file = dir.join("page.html");
    // The frame's attribute is copied to the outer page, which Chromium prints.
    let outer = format!(
        "<!doctype html><html><head><meta name=\"color-scheme\" content=\"light dark\"></head>\
         <body style=\"margin:0\"><iframe src=\"inner.html\" \
         style=\"border:0;width:{width}px;height:1000px\" onload=\"document.body.setAttribute('data-look', \
         this.contentDocument.body.getAttribute('data-look') || '')\"></iframe></body></html>"
    );
    fs::write(&file, outer).expect("written");
    let output = Command::new(CHROMIUM)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            "--dump-dom",
        ])
        .args(["--window-size=1100,1000", "--virtual-time-budget=2000"])
        .arg("--allow-file-access-from-files")
        .arg(format!("--blink-settings=preferredColorScheme={}", u8::from(!dark)))
        .arg(format!("--user-data-dir={}", dir.join("profile").display()))
        .arg(format!("file://{}", file.display()))
        .output()
        .unwrap_or_else(|error| panic!("{CHROMIUM}: {error}; apt-get install chromium"));
    let errors = String::from_utf8_lossy(&output.stderr);
    let dom = String::from_utf8_lossy(&output.stdout);
    let (_, look) = dom.split_once("data-look=\"").unwrap_or_else(|| panic!("no page: {errors}"));
    let look = look.split('"').next().expect("the end of the text");
    let mut parts = look.split(';');
    let mut next = || parts.next().unwrap_or_else(|| panic!("{look}: {errors}")).to_owned();
    let paper = next();
    let [width, window, text] = [next(), next(), next()].map(|it| it.parse().unwrap_or(0.0));
    let plot = |part: &str| {
        let fields: Vec<_> = part.split('|').collect();
        let number = |at: usize| fields[at].parse::<f64>().expect("a number");
        Plot {
            heading: fields[0].to_owned(),
            width: number(1),
            height: number(2),
            marks: number(3),
            tips: number(4),
            text: number(5),
            inside: fields[6] == "1",
            ink: fields[7].to_owned(),
        }
    };
    Look {
        paper,
        width,
        window,
        text,
        plots: parts.map(plot).collect(),
        console: errors
            .lines()
            .filter(|line| line.contains("CONSOLE"))
            .map(str::to_owned)
            .collect(),
    }
}

/// Checks the page written by `args`, which must show plots with these headings and without errors.
fn shows(args: &[&str], headings: &[&str]) {
    shows_at_least(args, headings, headings.len());
}

/// The same, for a page whose last plots depend on the host: it shows at least the first `least` of
/// the `headings`.
fn shows_at_least(args: &[&str], headings: &[&str], least: usize) {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("out.html");
    let html = file.to_str().expect("text");
    faultless(&[args, &["--html", html]].concat()).succeeds();
    let page = fs::read_to_string(&file).expect("written");
    // The page is a single file: the name of a namespace is no address to load.
    let loads = page.replace("http://www.w3.org/2000/svg", "");
    for loaded in ["<script", "<link rel=\"stylesheet", "http:", "https:", "src=", "url("] {
        assert!(!loads.contains(loaded), "{args:?}: {loaded}");
    }
    has_different_titles(&page);
    for (size, dark) in [(WIDE, false), (WIDE, true), (NARROW, true)] {
        let look = look(dir.path(), &page, "", (size, dark));
        assert_eq!(look.console, Vec::<String>::new(), "{args:?}");
        let found: Vec<_> = look.plots.iter().map(|plot| plot.heading.as_str()).collect();
        assert!(found.len() >= least, "{args:?}: {found:?}");
        assert_eq!(found, headings[..found.len()], "{args:?}");
        assert_eq!(look.window, f64::from(size), "{args:?}");
        assert!(look.width <= look.window && look.text >= 12.0, "{args:?}: {look:?}");
        let (width, height) = if size == WIDE { (600.0, 300.0) } else { (350.0, 350.0) };
        for plot in &look.plots {
            // The height of named bars follows from their number.
            let height = if NAMED.contains(&&*plot.heading) { 80.0 } else { height };
            assert!(plot.width > width && plot.height > height, "{args:?}: {plot:?}");
            assert!(plot.marks > 2.0 && plot.tips > 0.0, "{args:?}: {plot:?}");
            assert!(plot.text >= 12.0 && plot.inside, "{args:?} at {size}: {plot:?}");
        }
        let (paper, ink) = match dark {
            true => ("rgb(22, 24, 28)", "rgb(230, 230, 230)"),
            false => ("rgb(255, 255, 255)", "rgb(26, 26, 26)"),
        };
        assert_eq!(look.paper, paper, "{args:?}");
        assert!(look.plots.iter().all(|plot| plot.ink == ink), "{args:?}: {look:?}");
    }
}

/// Checks that each plot of `page` has a title of its own. Returns the number of plots.
fn has_different_titles(page: &str) -> usize {
    let parts = page.split("<figcaption>").skip(1);
    let titles: Vec<_> = parts.filter_map(|part| part.split('<').next()).collect();
    let different: BTreeSet<_> = titles.iter().collect();
    assert_eq!(different.len(), titles.len(), "{titles:?}");
    titles.len()
}

/// Returns the text of the axis labels and of the tooltips of the first plot of `args`.
fn first_plot(args: &[&str]) -> (Vec<String>, Vec<String>) {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("out.html");
    faultless(&[args, &["--html", file.to_str().expect("text")]].concat()).succeeds();
    let page = fs::read_to_string(&file).expect("written");
    let (_, svg) = page.split_once("<svg ").expect("a plot");
    let (svg, _) = svg.split_once("</svg>").expect("the end of the text");
    let texts = |begin: &str, end: &str| {
        let parts = svg.split(begin).skip(1).filter_map(|part| part.split_once(end));
        parts.map(|(text, _)| text.rsplit('>').next().unwrap_or(text).trim().to_owned()).collect()
    };
    (texts("<text ", "</text>"), texts("<title>", "</title>"))
}

#[test]
fn logarithmic_axis_has_few_labels_with_the_same_digits() {
    let (labels, tips) = first_plot(&["scale", "page_fault_read", "--cpus", "1,2..8"]);
    let rates: Vec<&str> =
        labels.iter().map(String::as_str).filter(|label| label.ends_with(" M")).collect();
    assert!((2..=10).contains(&rates.len()), "{labels:?}");
    for rate in rates {
        let digits = rate.trim_end_matches(" M");
        let leading = digits.trim_end_matches('0');
        assert!(["1", "2", "3", "5", "7"].contains(&leading), "{labels:?}");
    }
    for count in ["1", "2", "4", "8"] {
        assert!(labels.iter().any(|label| label == count), "{labels:?}");
        let tip = |tip: &String| tip.ends_with(&format!(", {count} CPUs"));
        assert_eq!(tips.iter().filter(|it| tip(it)).count(), 3, "one for each policy: {tips:?}");
    }
}

#[test]
fn faults_are_drawn_over_times_and_addresses() {
    let (labels, tips) = first_plot(&["replay", "sort"]);
    assert!(labels.iter().any(|label| label == "ms since the recording began"), "{labels:?}");
    assert!(labels.iter().any(|label| label == "address (hexadecimal)"), "{labels:?}");
    let addresses = labels.iter().filter(|label| {
        u64::from_str_radix(label, 16).is_ok_and(|it| it > 1 << 20 && it % 4096 == 0)
    });
    assert!(addresses.count() >= 3, "{labels:?}");
    let all = |tip: &String| {
        tip.contains("ms since") && tip.contains("address") && tip.contains("000 to ")
    };
    assert!(!tips.is_empty() && tips.iter().all(all), "{tips:?}");
}

#[test]
fn scale_draws_throughput_time_and_latencies() {
    let headings = ["Throughput over CPUs", "Time by activity", "Latencies: faults"];
    shows(&["scale", "page_fault_read", "--cpus", "1,2..8"], &headings);
}

#[test]
fn stat_draws_time_and_latencies() {
    let headings = ["Time by activity", "Latencies: faults", "Latencies: mmap and munmap"];
    shows(&["stat", "small_allocs", "size=400K", "threads=2"], &headings);
}

#[test]
fn replay_draws_faults_memory_time_and_latencies() {
    let headings = [
        "Faults over time and address",
        "Savings of prefault",
        "Resident memory",
        "Latencies",
        "Time by activity",
    ];
    shows(&["replay", "sort"], &headings);
    shows(&["replay", "redis", "--policies"], &headings);
}

#[test]
fn compare_draws_instructions_ratios_and_programs() {
    let headings = ["Instructions of a fault by module", "Many CPUs", "Real programs"];
    shows(&["compare", "--quick", "--only", "sort", "--only", "pft"], &headings);
}

#[test]
fn plots_of_memory_in_tiers_have_different_titles() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("out.html");
    let html = file.to_str().expect("text");
    faultless(&["compare", "--quick", "--only", "xsbench", "--html", html]).succeeds();
    let page = fs::read_to_string(&file).expect("written");
    assert!(has_different_titles(&page) > 1, "{page}");
}

/// Checks an assumption of the tests above.
#[test]
fn console_errors_are_detected() {
    let dir = tempfile::tempdir().expect("a directory");
    let page = "<!doctype html><html><body></body></html>";
    let silent = look(dir.path(), page, "", (WIDE, false));
    assert!(silent.console.is_empty() && silent.plots.is_empty(), "{silent:?}");
    for error in ["console.error('planted')", "throw new Error('planted')"] {
        let look = look(dir.path(), page, &format!("<script>{error}</script>"), (WIDE, false));
        assert!(look.console.iter().any(|line| line.contains("planted")), "{look:?}");
    }
}

#[test]
fn advise_draws_call_sites_memory_and_settings() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("app.fltrace");
    compact::write(&file, &with_a_stack()).expect("written");
    let headings = ["Call sites", "Resident memory", "Settings"];
    shows_at_least(&["advise", file.to_str().expect("text")], &headings, 2);
    shows_at_least(&["advise", "python"], &headings[1..], 1);
}

#[test]
fn advise_draws_the_runs_before_and_after_a_setting() {
    let script = "print(len({str(i) for i in range(300000)}))";
    let program = ["advise", "--try", "--rounds", "2", "--", "python3", "-c", script];
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("out.html");
    let html = file.to_str().expect("text");
    let args = [&program[..2], &["--html", html], &program[2..]].concat();
    faultless(&args).succeeds();
    let page = fs::read_to_string(&file).expect("written");
    assert!(page.contains("<h2>Resident memory</h2>"), "{page}");
    let tried = page.contains("No setting to try is predicted");
    assert_ne!(page.contains("<h2>Before and after</h2>"), tried, "{page}");
}

/// The flame graph of `advise --export` is a file of its own, with scripts: Chromium draws it.
#[test]
fn flame_graph_is_drawn() {
    let dir = tempfile::tempdir().expect("a directory");
    let (recording, svg) = (dir.path().join("app.fltrace"), dir.path().join("app.svg"));
    compact::write(&recording, &with_a_stack()).expect("written");
    let target = format!("flamegraph={}", svg.display());
    faultless(&["advise", recording.to_str().expect("text"), "--export", &target]).succeeds();
    let output = Command::new(CHROMIUM)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"])
        .args(["--dump-dom", "--virtual-time-budget=2000"])
        .arg(format!("--user-data-dir={}", dir.path().join("profile").display()))
        .arg(format!("file://{}", svg.display()))
        .output()
        .unwrap_or_else(|error| panic!("{CHROMIUM}: {error}; apt-get install chromium"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!errors.contains("CONSOLE"), "{errors}");
    // The script of the graph writes the labels of the frames when it is loaded.
    let dom = String::from_utf8_lossy(&output.stdout);
    let labels = dom.matches(">serve </text>").count();
    assert_eq!(labels, 1, "{dom}");
}

/// The background and the text around the frames follow the reader's mode. The text of a frame is
/// black on a bright colour in both modes.
#[test]
fn flame_graph_is_readable_in_dark_mode() {
    let dir = tempfile::tempdir().expect("a directory");
    let (recording, file) = (dir.path().join("app.fltrace"), dir.path().join("app.svg"));
    compact::write(&recording, &with_a_stack()).expect("written");
    let target = format!("flamegraph={}", file.display());
    faultless(&["advise", recording.to_str().expect("text"), "--export", &target]).succeeds();
    let svg = fs::read_to_string(&file).expect("written");
    let script = "<script>const of = name => getComputedStyle(document.querySelector(name));
        document.documentElement.setAttribute('data-look', [of('#background stop').stopColor,
            of('#title').fill, of('#search').fill, of('#frames text').fill].join(';'));</script>";
    fs::write(&file, svg.replacen("</svg>", &format!("{script}</svg>"), 1)).expect("written");
    for (dark, want) in [
        (false, "rgb(238, 242, 238);rgb(0, 0, 0);rgb(0, 0, 0);rgb(0, 0, 0)"),
        (true, "rgb(22, 24, 28);rgb(230, 230, 230);rgb(230, 230, 230);rgb(0, 0, 0)"),
    ] {
        let output = Command::new(CHROMIUM)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"])
            .arg(format!("--blink-settings=preferredColorScheme={}", u8::from(!dark)))
            .arg(format!("--user-data-dir={}", dir.path().join("profile").display()))
            .arg(format!("file://{}", file.display()))
            .output()
            .unwrap_or_else(|error| panic!("{CHROMIUM}: {error}; apt-get install chromium"));
        let dom = String::from_utf8_lossy(&output.stdout);
        let look = dom.split_once("data-look=\"").and_then(|(_, rest)| rest.split_once('"'));
        assert_eq!(look.map(|(look, _)| look), Some(want), "dark: {dark}");
    }
}

/// Returns a recording in which each fault has the call stack `serve`.
fn with_a_stack() -> Trace {
    let recording = recordings::find("redis").expect("bundled");
    let mut trace = recording.trace().expect("valid");
    trace.header.recorded |= Recorded::STACKS;
    trace.stacks.functions.push(Function { name: "serve".into(), ..Function::default() });
    trace.stacks.frames.push(Frame { caller: StackId::NONE, function: 0, line: 0 });
    trace.events.retain_mut(|event| {
        if let Kind::Fault { stack, .. } = &mut event.kind {
            *stack = StackId::new(1);
        }
        true
    });
    trace
}
